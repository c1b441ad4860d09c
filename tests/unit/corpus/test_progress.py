"""What a long preparation prints."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lit_pretrain.corpus._progress import Progress


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_shown(terminal: bool) -> None:
    out = io.StringIO()
    with Progress("Making it", console=Console(file=out, force_terminal=terminal, width=100)) as progress:
        progress.step("reading [all] files", total=3)
        for _ in range(3):
            progress.advance()
        progress.step("thinking")
        progress.say("12 documents")
    shown = out.getvalue()
    for text in ("Making it", "reading [all] files", "thinking", "12 documents"):
        assert text in shown
    assert ("3/3" in shown) == ("1/1" in shown) == terminal
    if not terminal:
        assert shown == "Making it\n  reading [all] files\n  thinking\n  12 documents\n"


def test_without_a_bar_a_line_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("lit_pretrain.corpus._progress.time.monotonic", lambda: clock[0])
    out = io.StringIO()
    with Progress("Making it", console=Console(file=out, width=100)) as progress:
        progress.step("encoding", total=100)
        for seconds, steps in ((10, 5), (29, 5), (31, 10), (40, 5), (61, 25)):
            clock[0] = float(seconds)
            progress.advance(steps)
    # 20 of 100 after 31 s leaves 4 x 31 s, 50 of 100 after 61 s another 61 s
    assert out.getvalue().splitlines()[2:] == [
        "  encoding: 20 of 100, about 2m04s left",
        "  encoding: 50 of 100, about 1m01s left",
    ]
