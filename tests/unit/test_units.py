"""Counts, bytes and durations as people read them."""

from __future__ import annotations

import math

import pytest

from lit_pretrain import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (0.25, "0.25"),
        (999, "999"),
        (999.6, "1K"),
        (1000, "1K"),
        (12_345, "12.3K"),
        (999_499, "999K"),
        (999_600, "1M"),
        (1_234_567, "1.23M"),
        (124_439_808, "124M"),
        (6_738_415_616, "6.74B"),
        (999_999_999_999, "1T"),
        (15.6e12, "15.6T"),
        (-1_500, "-1.5K"),
    ],
)
def test_count(value, text):
    assert units.count(value) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (1_048_576, "1.0 MiB"),
        (80 * 1024**3, "80.0 GiB"),
        (3 * 1024**4, "3.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_size(num_bytes, text):
    assert units.size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.4, "0s"),
        (42, "42s"),
        (59.6, "1m00s"),
        (200, "3m20s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (5 * 3600 + 7 * 60 + 59, "5h07m"),
        (86_400, "1d00h"),
        (2 * 86_400 + 3 * 3600 + 1800, "2d03h"),
        (math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_duration(seconds, text):
    assert units.duration(seconds) == text
