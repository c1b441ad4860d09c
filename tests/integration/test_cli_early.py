"""A command of one process: the worker that was started before Hydra is its rank."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from lit_pretrain.cli import early
from lit_pretrain.cli.runstate import living_ranks
from tests.integration.cli_processes import alive, output, start, wait_for, witnesses, workplace

pytestmark = pytest.mark.slow


def test_the_waiting_worker_trains_and_hears_signals(tmp_path: Path) -> None:
    work = workplace(tmp_path / "work")
    folder = work / "outputs" / "s"
    process = start(work, "run_id=s", "length.steps=10000", "callbacks.fail.how=slow")
    assert wait_for(lambda: bool(witnesses(folder))), output(work)
    pid = witnesses(folder)[0]["pid"]
    assert early.MODULE in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    assert living_ranks(folder) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, output(work)
    assert not alive(pid)
