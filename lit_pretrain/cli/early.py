"""A rank that loads torch and Lightning while the command still composes its configuration.

Loading them takes most of the time from the command to the first step, and needs nothing of the configuration. So for
a run of one process a worker is started before Hydra is, and told later what to do; where anything about it turns out
not to fit, it is ended and a worker is started in the usual way.

No torch, no Hydra, no Lightning, except in the worker itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from lit_pretrain.cli import flags, ranks

MODULE = "lit_pretrain.cli.early"
_OF_THE_RUN = frozenset((*ranks.RANK_VARIABLES, ranks.COMMAND_VARIABLE, ranks.NOTE_VARIABLE, "HYDRA_FULL_ERROR"))
"""May change between the worker's start and the run's: no library reads them when it is loaded."""
_HARMLESS_FLAGS = frozenset(("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn"))
_MOST_HANDLES = 8

WAITING: ContextVar[Early | None] = ContextVar("early", default=None)
"""The worker that waits for this command's run, if there is one."""


class Early:
    """The waiting worker, seen from the command."""

    def __init__(self) -> None:
        self._environment = ranks.environment(0, 1, port=0)
        self._folder = os.getcwd()
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=theirs.fileno(),
                env=self._environment,
                start_new_session=True,  # as every rank: Ctrl-C comes to the command alone
            )
        with contextlib.suppress(OSError):  # it died already
            self._line.sendall(json.dumps({"sys_path": sys.path}).encode() + b"\n")

    def take(
        self, run_dir: Path, environment: Mapping[str, str], *, spec: Mapping[str, Any], handles: Sequence[int]
    ) -> subprocess.Popen[bytes] | None:
        """Give the worker its run.

        Args:
            run_dir: The run folder, with the resolved configuration.
            environment: What a worker started now would get.
            spec: The same.
            handles: Descriptors that it keeps open.

        Returns:
            The worker, its standard input open; None where it does not fit or has died.
        """
        process = self._process
        fits = self._folder == os.getcwd() and _lasting(self._environment) == _lasting(environment)
        if process is None or process.poll() is not None or not fits or len(handles) > _MOST_HANDLES:
            return None
        order = {"run_dir": str(run_dir.absolute()), "environment": dict(environment), "spec": dict(spec)}
        try:
            socket.send_fds(self._line, [b"!"], list(handles))
            self._line.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            return None
        process.stdin = self._line.makefile("wb")  # its end tells the rank that we are gone
        self._line.close()
        self._process = None
        return process

    def end(self) -> None:
        """End the worker if nobody took it."""
        self._line.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _OF_THE_RUN}


def _is_wanted(verb: str, argv: Sequence[str]) -> bool:
    """Whether the words look like one run of one process on a machine that can do two things at once."""
    words = flags.overrides(argv)
    others = [word.partition("=")[0] for word in argv if word.startswith("-")]
    return (
        verb == "train"
        and _HARMLESS_FLAGS.issuperset(others)
        and not any(word.startswith(("strategy=", "trainer.devices=", "run.inline=")) for word in words)
        and ranks.external() is None
        and ranks.usable_cores() > 1
    )


@contextlib.contextmanager
def started(verb: str, argv: Sequence[str]) -> Iterator[None]:
    """Have a worker wait meanwhile, if the command line is one that could use it."""
    if not _is_wanted(verb, argv):
        yield
        return
    early = Early()
    before = WAITING.set(early)
    try:
        yield
    finally:
        WAITING.reset(before)
        early.end()


def main() -> int:
    """The worker: load, wait, be a rank. Returns the exit code."""
    from lit_pretrain.cli import worker

    sys.path[:] = json.loads(worker.read_line())["sys_path"]
    from lit_pretrain.instantiate.quiet import quiet

    quiet()
    import lit_pretrain.instantiate.job  # noqa: F401  # what all this is for

    with socket.socket(fileno=os.dup(0)) as line:
        told, _, _, _ = socket.recv_fds(line, 1, _MOST_HANDLES)  # they stay open until this process ends
    if not told:  # the command needs no worker, or is gone
        return 0
    order = json.loads(worker.read_line())
    os.environ.clear()
    os.environ.update(order["environment"])
    return worker.serve(Path(order["run_dir"]), order["spec"])


if __name__ == "__main__":
    from lit_pretrain.cli import worker as as_worker

    as_worker.leave(main())
