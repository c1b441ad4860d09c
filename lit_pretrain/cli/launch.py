"""One process per rank: start them, watch them, pass signals on, bring the first error home.

Every rank, rank 0 too, is a fresh ``python -m lit_pretrain.cli.worker RUN_DIR`` that reads the resolved configuration
from the run folder and has torchrun's environment variables: Lightning starts nothing by itself, and nothing that a job
does to its process (a process group, LOCAL_RANK, seeds) can reach the next job of the same sweep.

No torch, no Hydra, no Lightning.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from lit_pretrain.cli import early, failures, ranks
from lit_pretrain.errors import Preempted, RankError

WORKER = "lit_pretrain.cli.worker"
RESOLVED = "resolved.yaml"
RESULT = "result.json"
POLL_S = 0.05
SETTLE_S = 2.0
"""After the first bad exit: time for the others to write their own error, for the cause may be theirs."""
GRACE_S = 30.0
"""After SIGTERM or Ctrl-C: time to finish the step and save."""
FORWARDED = (signal.SIGTERM, signal.SIGUSR1)


class Terminated(BaseException):
    """SIGTERM reached the command. Not an Exception: it ends a whole sweep, not one job of it.

    Args:
        signum: The signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Failed(BaseException):
    """A single run failed; ``__cause__`` says why.

    Not an Exception, so that Hydra lets it pass without a line of its own. Jobs of a sweep raise the cause itself.
    """


def run(
    run_dir: Path, world_size: int, *, orphan_of: int | None = None, keep_open: Sequence[int] = ()
) -> dict[str, Any]:
    """Run all ranks over ``run_dir/resolved.yaml``.

    Args:
        run_dir: The run folder.
        world_size: Ranks, all on this machine.
        orphan_of: Process whose death must end the run (the command, when a sweep runs this job in a worker process).
        keep_open: Descriptors that every rank inherits, such as a lock.

    Returns:
        What rank 0 wrote to ``run_dir/result.json``.

    Raises:
        ConfigError: A rank met a user's mistake. All ranks are gone when this or another error is raised.
        RankError: A rank failed; the message holds its traceback.
        KeyboardInterrupt: Ctrl-C; the ranks had GRACE_S to save.
        Terminated: SIGTERM; the same.
        Preempted: A signal ended the run, and it saved.
    """
    shutil.rmtree(run_dir / failures.FOLDER, ignore_errors=True)
    (run_dir / RESULT).unlink(missing_ok=True)
    group = _Ranks(run_dir, keep_open)
    with _forwarding(group):
        try:
            group.start(world_size)
            group.watch(orphan_of)
        except KeyboardInterrupt:
            group.send(signal.SIGINT)
            group.wait(GRACE_S)  # a second Ctrl-C leaves here and kills
            raise
        except SystemExit:  # submitit leaves in this way before it puts a job back into the queue
            group.send(signal.SIGTERM)
            group.wait(GRACE_S)
            raise
        finally:
            group.end()
    if len(group.codes) == world_size and set(group.codes.values()) == {Preempted.EXIT_CODE}:
        raise _preempted(run_dir)
    if group.asked:
        raise Terminated(group.asked[0])
    if any(group.codes.values()) or len(group.codes) < world_size:
        raise failures.first(run_dir, {r: group.codes.get(r, 0) for r in range(world_size)}, group.seen)
    try:
        result: dict[str, Any] = json.loads((run_dir / RESULT).read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise RankError(f"every rank ended well, but {run_dir / RESULT} is missing.") from e
    return result


def _preempted(run_dir: Path) -> Preempted:
    result = json.loads((run_dir / RESULT).read_text(encoding="utf-8"))
    return Preempted(
        signal=result["signal"],
        step=result["steps"],
        checkpoint=result["checkpoint"],
        requeued=result["requeued"],
    )


class _Ranks:
    """The processes of one run.

    Args:
        run_dir: The run folder.
        keep_open: Descriptors that every rank inherits.
    """

    def __init__(self, run_dir: Path, keep_open: Sequence[int]) -> None:
        self.run_dir = run_dir
        self.keep_open = tuple(keep_open)
        self.procs: list[subprocess.Popen[bytes]] = []
        self.asked: list[int] = []  # signals that asked the run to end
        self.codes: dict[int, int] = {}  # exit codes of ranks that ended by themselves
        self.seen: dict[int, float] = {}

    def start(self, world_size: int) -> None:
        """Start every rank. The listening socket goes to rank 0 open, so that nobody else can take its port."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(4 * world_size)
            port = listener.getsockname()[1]
            for rank in range(world_size):
                fd = listener.fileno() if rank == 0 and world_size > 1 else None
                self._start_one(rank, world_size, port, fd)
        if self.asked:  # the signal came before everybody was there to hear it
            self.send(self.asked[0])

    def _start_one(self, rank: int, world_size: int, port: int, listen_fd: int | None) -> None:
        with contextlib.ExitStack() as stack:
            # Rank 0 speaks on the terminal.
            log = None if rank == 0 else stack.enter_context(open(self.run_dir / f"rank{rank}.log", "wb"))
            environment = ranks.environment(rank, world_size, port)
            spec = {"sys_path": sys.path, "listen_fd": listen_fd}
            waiting = early.WAITING.get() if world_size == 1 else None
            if waiting is not None:
                ready = waiting.take(self.run_dir, environment, spec=spec, handles=self.keep_open)
                if ready is not None:
                    self.procs.append(ready)
                    return
            proc = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(self.run_dir)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                env=environment,
                pass_fds=self.keep_open if listen_fd is None else (*self.keep_open, listen_fd),
                start_new_session=True,  # Ctrl-C comes to us alone; we pass it on once
            )
        self.procs.append(proc)
        assert proc.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died already: watch() will see
            proc.stdin.write(json.dumps(spec).encode() + b"\n")
            proc.stdin.flush()  # the pipe stays open: its end tells the rank that we are gone

    def watch(self, orphan_of: int | None) -> None:
        """Return when every rank has ended, or one has failed and the others had time to say why."""
        deadline: float | None = None
        while not self.poll():
            if orphan_of is not None and not self.asked and not ranks.is_alive(orphan_of):
                self.ask(signal.SIGTERM)
            if self.asked:
                self.wait(GRACE_S)
                return
            if deadline is None and any(self.codes.values()):
                # Preempted ranks end together; rank 0 has files to close.
                is_preempted = set(self.codes.values()) <= {0, Preempted.EXIT_CODE}
                deadline = time.monotonic() + (GRACE_S if is_preempted else SETTLE_S)
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(POLL_S)

    def poll(self) -> bool:
        """Note the exit codes there are; whether every rank has ended."""
        for rank, proc in enumerate(self.procs):
            if rank not in self.codes and proc.poll() is not None:
                self.codes[rank], self.seen[rank] = proc.returncode, time.time()
        return len(self.codes) == len(self.procs)

    def wait(self, seconds: float) -> None:
        """Wait for every rank to end, at most ``seconds``."""
        end = time.monotonic() + seconds
        while not self.poll() and time.monotonic() < end:
            time.sleep(POLL_S)

    def ask(self, signum: int) -> None:
        """Ask every rank to end, and remember it."""
        self.asked.append(signum)
        self.send(signum)

    def send(self, signum: int) -> None:
        """Pass a signal on to every rank; SIGKILL to everything that the ranks started, too."""
        for proc in self.procs:
            if proc.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    if signum == signal.SIGKILL:
                        os.killpg(proc.pid, signum)
                    else:
                        proc.send_signal(signum)

    def end(self) -> None:
        """Kill what is left and release the pipes. Our own SIGKILL does not count as an exit code."""
        self.poll()
        self.send(signal.SIGKILL)
        for proc in self.procs:
            proc.wait()
            if proc.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    proc.stdin.close()


@contextlib.contextmanager
def _forwarding(group: _Ranks) -> Iterator[None]:
    """While ranks run, SIGTERM and SIGUSR1 go to them. Signal handlers exist in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(signum: int, _: FrameType | None) -> None:
        if signum == signal.SIGTERM:
            group.ask(signum)
        else:
            group.send(signum)

    before = {s: signal.signal(s, forward) for s in FORWARDED}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
