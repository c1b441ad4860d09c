"""The ledger of skipped data: what follows from it, and that nothing is lost or half read on disk."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_pretrain.errors import ConfigError, DataError
from lit_pretrain.spikes import LedgerFile, Skip, SkipLedger


def skip(low, high, *, step=None, spike=None, **more):
    step = low if step is None else step
    return Skip(step=step, low=low, high=high, spike=high if spike is None else spike, kind="jump", **more)


# Two jumps that touch, one apart, and a later rollback that swallows the first two.
LEDGER = SkipLedger([skip(10, 14), skip(14, 16), skip(30, 31), skip(8, 18)])


@pytest.mark.parametrize(
    ("position", "expected"),
    [(0, 0), (7, 7), (8, 18), (10, 18), (17, 18), (18, 18), (29, 29), (30, 31), (31, 31), (99, 99)],
)
def test_next_position(position, expected):
    assert LEDGER.next_position(position) == expected


def test_ranges_are_merged():
    assert LEDGER.ranges == ((8, 18), (30, 31))
    assert SkipLedger([skip(10, 14), skip(14, 16)]).next_position(10) == 16
    assert SkipLedger().next_position(5) == 5


@pytest.mark.parametrize(("position", "expected"), [(8, 0), (9, 1), (12, 4), (18, 10), (30, 10), (31, 11), (50, 11)])
def test_skipped_before(position, expected):
    assert LEDGER.skipped_before(position) == expected


@settings(max_examples=200, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=8), position=st.integers(0, 60))
def test_ranges_do_what_the_entries_say(pairs, position):
    ledger = SkipLedger([skip(low, low + length) for low, length in pairs])
    skipped = {i for low, length in pairs for i in range(low, low + length)}
    expected = position
    while expected in skipped:
        expected += 1
    assert ledger.next_position(position) == expected
    assert ledger.skipped_before(position) == sum(i < position for i in skipped)


def test_learning_rate_factors_by_hand():
    ledger = SkipLedger(
        [skip(10, 15, step=10, lr_factor=0.5, until=20), skip(8, 18, step=8, lr_factor=0.5, until=14), skip(40, 41)]
    )
    assert [ledger.lr_factor(u) for u in (7, 8, 9, 10, 13, 14, 19, 20, 40)] == [1, 0.5, 0.5, 0.25, 0.25, 0.5, 0.5, 1, 1]


def test_checkpoints_of_an_abandoned_timeline_are_refused():
    """Snapshot at 10, spike at 15; a checkpoint written at 13 in between holds what was taken back."""
    ledger = SkipLedger([skip(10, 15)])
    assert ledger.accepts(position=10, length=0)
    assert not ledger.accepts(position=13, length=0)
    assert ledger.accepts(position=18, length=1)  # written after the rollback
    # A second rollback, to before the first: what was written between the two is gone as well.
    ledger = ledger.added(skip(8, 25))
    assert ledger.accepts(position=8, length=0)
    assert not ledger.accepts(position=10, length=0)
    assert not ledger.accepts(position=18, length=1)
    assert ledger.accepts(position=26, length=2)
    assert not ledger.accepts(position=26, length=3)  # from a run that knows more than this ledger


FLOATS = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))
SKIPS = st.builds(
    lambda low, length, **more: Skip(low=low, high=low + length, **more),
    low=st.integers(0, 10**12),
    length=st.integers(1, 10**6),
    step=st.integers(0, 10**9),
    spike=st.integers(0, 10**9),
    kind=st.sampled_from(["jump", "shift", "gradient", "nonfinite"]),
    loss=FLOATS,
    grad_norm=FLOATS,
    z=FLOATS,
    lr_factor=st.floats(1e-3, 1.0),
    until=st.integers(0, 10**9),
    reason=st.text(max_size=30),
    details=st.dictionaries(st.text(max_size=5), st.lists(st.text(max_size=5), max_size=3), max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(entries=st.lists(SKIPS, max_size=4))
def test_a_ledger_survives_its_lines(entries):
    ledger = SkipLedger(entries)
    lines = ledger.state_dict()
    assert all("\n" not in line and json.loads(line, parse_constant=pytest.fail) for line in lines)
    again = SkipLedger.from_state(json.loads(json.dumps(lines)))
    assert again == ledger
    for a, b in zip(again.entries, entries, strict=True):
        assert (a.step, a.low, a.high, a.lr_factor, a.details) == (b.step, b.low, b.high, b.lr_factor, b.details)
        assert a.loss == b.loss or (math.isnan(a.loss) and math.isnan(b.loss))


def test_reconciling_with_a_checkpoint():
    one, two = skip(10, 15), skip(20, 25)
    short, long = SkipLedger([one]), SkipLedger([one, two])
    assert short.reconciled(long) == long
    assert long.reconciled(short) == long
    with pytest.raises(DataError, match="different rollbacks"):
        SkipLedger([two]).reconciled(long)


def test_appended_entries_are_read_again(tmp_path):
    file = LedgerFile(tmp_path / "run" / "ledger.jsonl")
    assert file.read() == SkipLedger()
    entries = [skip(10, 15, loss=math.nan, details={"documents": ["a.py"]}), skip(20, 25, loss=7.25)]
    for entry in entries:
        file.append(entry)
    assert LedgerFile(str(file.path)).read() == SkipLedger(entries)
    assert file.path.read_text() == "".join(f"{e.to_json()}\n" for e in entries)


def test_an_entry_torn_at_any_byte_is_as_if_it_had_never_been(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first, torn, later = skip(10, 15), skip(20, 25, reason="größer"), skip(30, 35)
    LedgerFile(path).append(first)
    kept = path.read_bytes()
    line = torn.to_json().encode() + b"\n"
    for cut in range(len(line)):
        path.write_bytes(kept + line[:cut])
        assert LedgerFile(path).read() == SkipLedger([first])
    # The next entry takes the place of what was torn, however short it is itself.
    path.write_bytes(kept + line[:-1])
    LedgerFile(path).append(later)
    assert path.read_bytes() == kept + later.to_json().encode() + b"\n"


def test_a_length_without_its_bytes_is_torn_as_well(tmp_path):
    path = tmp_path / "ledger.jsonl"
    LedgerFile(path).append(skip(10, 15))
    kept = path.read_bytes()
    path.write_bytes(kept + b"\0" * 100)
    assert len(LedgerFile(path).read()) == 1
    path.write_bytes(kept + b'{"step"\0\0\0\0\n')
    LedgerFile(path).append(skip(30, 35))
    assert LedgerFile(path).read() == SkipLedger([skip(10, 15), skip(30, 35)])


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[1]",
        "null",
        '{"step": 1',
        skip(10, 15).to_json().replace('"high": 15', '"high": 9'),
        skip(10, 15).to_json().replace('"kind"', '"sort"'),
    ],
)
def test_a_damaged_entry_is_no_torn_one(tmp_path, line):
    path = tmp_path / "ledger.jsonl"
    path.write_text(f"{skip(1, 2).to_json()}\n{line}\n{skip(20, 25).to_json()}\n")
    with pytest.raises(DataError, match=r"ledger\.jsonl, line 2: .* Repair or remove the line"):
        LedgerFile(path).read()


def test_an_entry_is_on_the_disk_before_append_returns(tmp_path, monkeypatch):
    path, synced = tmp_path / "ledger.jsonl", []

    def fsync(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        assert path.read_text().endswith("\n")

    monkeypatch.setattr(os, "fsync", fsync)
    LedgerFile(path).append(skip(10, 15))
    assert synced == [str(path), str(tmp_path)]


def test_a_ledger_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"skip ledger .*ledger\.jsonl"):
        LedgerFile(tmp_path / "file" / "ledger.jsonl").append(skip(10, 15))
    with pytest.raises(DataError, match="Could not read the skip ledger"):
        LedgerFile(tmp_path).read()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"low": -1}, r"skip\.low=-1"),
        ({"high": 10}, r"skip\.high=10 must be a whole number of at least 11"),
        ({"step": 1.5}, r"skip\.step=1\.5"),
        ({"lr_factor": 0.0}, r"skip\.lr_factor=0\.0 must be a finite number above 0"),
        ({"lr_factor": math.nan}, r"skip\.lr_factor=nan"),
    ],
)
def test_impossible_entries_are_refused(change, match):
    with pytest.raises(ConfigError, match=match):
        Skip(**{"step": 10, "low": 10, "high": 15, "spike": 15, "kind": "jump"} | change)


def test_empty_lines_are_passed_over(tmp_path):
    """An editor may leave them."""
    file = LedgerFile(tmp_path / "spikes.jsonl")
    file.path.write_text(f"\n{skip(0, 2).to_json()}\n  \n{skip(4, 6).to_json()}\n")
    assert file.read().ranges == ((0, 2), (4, 6))


def test_an_entry_that_comes_twice_is_refused(tmp_path):
    file = LedgerFile(tmp_path / "spikes.jsonl")
    file.path.write_text(f"{skip(0, 2).to_json()}\n{skip(0, 2).to_json()}\n")
    with pytest.raises(DataError, match=r"line 2 repeats an entry above it.*; remove the line"):
        file.read()


@pytest.mark.parametrize("details", [[], {"snapshots": 3}, {"snapshots": [[1]]}, {"snapshots": [["1", True]]}])
def test_details_of_another_kind_are_refused(details):
    line = json.dumps({"step": 1, "low": 1, "high": 2, "spike": 2, "kind": "jump", "details": details})
    whole = json.loads(skip(0, 2).to_json()) | json.loads(line)
    with pytest.raises(DataError, match=r"is no entry of a skip ledger"):
        Skip.from_json(json.dumps(whole))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"loss": 10**400}, "int too large"),
        ({"lr_factor": 10**400}, r"skip\.lr_factor=10+ must be a finite number"),
        ({"kind": 3}, "kind and reason have to be text"),
        ({"reason": None}, "kind and reason have to be text"),
    ],
)
def test_values_of_another_kind_are_refused(change, match):
    with pytest.raises(DataError, match=rf"is no entry of a skip ledger \(.*{match}"):
        Skip.from_json(json.dumps(json.loads(skip(0, 2).to_json()) | change))


def test_what_was_not_known_may_be_left_out():
    line = '{"step": 1, "low": 1, "high": 2, "spike": 2, "kind": "jump"}'
    assert Skip.from_json(line) == Skip(step=1, low=1, high=2, spike=2, kind="jump")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux has a folder in which root cannot write")
def test_a_place_is_tried_and_not_asked():
    with pytest.raises(DataError, match=r"could not be written \(.*\); set rollback\.ledger"):
        LedgerFile("/proc/spikes.jsonl").check_writable()


def test_a_device_is_no_ledger():
    with pytest.raises(DataError, match=r"/dev/null could not be written \(it is no regular file\)"):
        LedgerFile("/dev/null").check_writable()


@pytest.mark.parametrize("place", ["file/spikes.jsonl", "folder", "file/deep/spikes.jsonl"])
def test_a_place_that_takes_no_ledger_is_known_beforehand(tmp_path, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"could not be written \(.*\); set rollback\.ledger"):
        LedgerFile(tmp_path / place).check_writable()
    LedgerFile(tmp_path / "new" / "spikes.jsonl").check_writable()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]  # nothing was made
