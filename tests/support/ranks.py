"""Several ranks inside one test: ``ranks(2, fn, *args)`` runs ``fn`` on two ranks and returns what each returned."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, TypeVar

from lit_pretrain.errors import RankError

T = TypeVar("T")

START_S = 180.0  # torch and Lightning from a cold disk
MARGIN_S = 30.0  # beyond a call's own deadline, which the server keeps
LOG_TAIL = 8000  # characters of a rank's output in an error
# What a rank says when another one has gone: never the cause.
SECONDARY = re.compile(r"Connection (closed|reset) by peer|Broken pipe|failed to recv|Socket closed", re.IGNORECASE)


class RankPool:
    """Runs functions on a number of ranks, each a forked process with the environment that torchrun gives.

    A Lightning ``Trainer`` in such a function therefore starts nothing itself. One pool serves a whole test session:
    its server holds torch and Lightning loaded. Close it at the end.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._log: IO[bytes] | None = None
        self.hello: dict[str, int] | None = None

    def start(self) -> None:
        """Start the server and return at once; the first call waits until it is warm."""
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("rank_server.py")), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=env,
                start_new_session=True,  # Ctrl-C is for the tests; the server ends with its socket
            )
        self._connection = Connection(ours.detach())

    def close(self) -> None:
        """End the server and every rank."""
        if self._connection is not None:
            self._connection.close()
        if self._server is not None:
            try:
                self._server.wait(10.0)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        if self._log is not None:
            self._log.close()
        self._server = self._connection = self._log = self.hello = None

    def _receive(self, timeout_s: float) -> Any:
        assert self._connection is not None
        assert self._server is not None
        assert self._log is not None
        try:
            if self._connection.poll(timeout_s):
                return pickle.loads(self._connection.recv_bytes())
            what = f"did not answer within {timeout_s:.0f} s"
        except (EOFError, ConnectionResetError):
            what = f"ended with code {self._server.wait(10.0)}"
        self._log.seek(0)
        raise RankError(f"The rank server {what}:\n{self._log.read().decode(errors='replace')}")

    def __call__(
        self,
        world_size: int,
        fn: Callable[..., T],
        /,
        *args: Any,
        timeout_s: float = 300.0,
        init: bool = False,
    ) -> list[T]:
        """Call ``fn(*args)`` on every rank; the results in order of rank.

        Every rank is a new process with the test's working directory and environment, plus torchrun's variables. What
        the ranks print is printed here when all are done.

        Args:
            world_size: Ranks, all on this machine.
            fn: A function at the top of a module. Arguments and results travel as pickles.
            args: For every rank the same.
            timeout_s: From the fork to the last answer.
            init: Initialise the gloo process group before calling ``fn``.

        Raises:
            RankError: A rank raised, died or hung. Holds the cause's traceback, or every rank's stack.
            TypeError: ``fn`` is not at the top of a module.
        """
        target = _target(fn)
        if self._server is None:
            self.start()
        logs = Path(tempfile.mkdtemp(prefix="ranks-"))
        request = {
            "world_size": world_size,
            "target": target,
            "args": pickle.dumps(args),
            "timeout_s": timeout_s,
            "init": init,
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "sys_path": list(sys.path),
            "logs": [str(logs / f"rank{rank}.log") for rank in range(world_size)],
        }
        try:
            if self.hello is None:
                self.hello = self._receive(START_S)
                if self.hello["num_threads"] != 1:
                    raise RankError(
                        f"The rank server runs {self.hello['num_threads']} threads; forking it is not safe."
                    )
            assert self._connection is not None
            self._connection.send_bytes(pickle.dumps(request))
            answers = self._receive(timeout_s + MARGIN_S)
            outputs = [_tail(logs / f"rank{rank}.log") for rank in range(world_size)]
        except BaseException:
            self.close()  # the conversation is out of step: begin anew
            raise
        finally:
            shutil.rmtree(logs, ignore_errors=True)
        if any(answer["status"] != "ok" for answer in answers):
            raise RankError(_report(answers, outputs, timeout_s=timeout_s))
        for rank, output in enumerate(outputs):
            if output:
                print(f"[rank {rank}]\n{output}")
        return [pickle.loads(answer["value"]) for answer in sorted(answers, key=lambda answer: answer["rank"])]


def _target(fn: Callable[..., Any]) -> dict[str, str]:
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    qualname = getattr(fn, "__qualname__", "<")
    file = getattr(module, "__file__", None)
    if "<" in qualname or file is None:
        raise TypeError(f"{fn!r} must be a function at the top of a module, so that a rank can import it.")
    return {"module": fn.__module__, "file": str(file), "qualname": qualname}


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return text if len(text) <= LOG_TAIL else f"[...]{text[-LOG_TAIL:]}"


def _report(answers: list[dict[str, Any]], outputs: list[str], *, timeout_s: float) -> str:
    """One text for a failed call: the cause first, then the other ranks, then what they printed (stacks included)."""
    failed = [answer for answer in answers if answer["status"] == "error"]
    lines = []
    if failed:
        cause = min(failed, key=lambda answer: bool(SECONDARY.search(answer["summary"])))  # stable: earliest first
        lines.append(f"rank {cause['rank']} of {len(answers)} failed: {cause['summary']}")
        lines.append(cause["traceback"])
    else:
        cause = None
        hung = [answer["rank"] for answer in answers if answer["status"] == "hung"]
        lines.append(f"ranks {hung} of {len(answers)} were not done after {timeout_s:g} s; their stacks are below.")
    others = sorted((answer for answer in answers if answer is not cause), key=lambda answer: answer["rank"])
    lines += [f"rank {answer['rank']}: {answer.get('summary', answer['status'])}" for answer in others]
    lines += [f"--- output of rank {rank} ---\n{output}" for rank, output in enumerate(outputs) if output]
    return "\n".join(lines)
