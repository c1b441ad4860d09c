"""Forks the rank processes of the tests, as a program of its own (started by ``tests/support/ranks.py``).

A fork copies the calling thread alone, and a lock that another thread held stays locked for ever in the child. A test
process in which torch has run has such threads, and forking it hung. This process imports torch and Lightning once,
runs no tensor operation, keeps to one thread, and forks ranks on request, in milliseconds each.

Usage: ``python -P rank_server.py FD``, FD being one end of a socket pair. Every message is one pickle.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

SETTLE_S = 2.0  # after the first failure: time for the others to report theirs, which may be the cause
REPORT_S = 1.5  # after the deadline: time for the ranks to write their stacks
POLL_S = 0.05

WARM = (
    "lightning.pytorch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",  # an optimizer's first step imports it: about a second in every rank
)


def rank_environment(base: dict[str, str], *, rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment that torchrun would give this rank, on top of the test's own."""
    from lit_pretrain.cli.ranks import RANK_VARIABLES  # by the test's sys.path, not the server's

    env = {key: value for key, value in base.items() if key not in RANK_VARIABLES}
    for key, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        env |= {key: str(value), f"LOCAL_{key}": str(value), f"ROLE_{key}": str(value)}
    env |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"TORCHELASTIC_RUN_ID": f"tests-{os.getppid()}-{port}", "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo asks for the host's name, which need not resolve
    return env


def _load(module: str, file: str, qualname: str) -> Any:
    """The function to run. Test files are often not importable by name: then their file is loaded under that name."""
    if module not in sys.modules:
        try:
            found = importlib.util.find_spec(module)
        except ImportError:
            found = None
        if found is not None and found.origin == file:
            importlib.import_module(module)
        else:
            spec = importlib.util.spec_from_file_location(module, file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[module] = importlib.util.module_from_spec(spec)  # pickles refer to it by this name
            spec.loader.exec_module(sys.modules[module])
    target: Any = sys.modules[module]
    for name in qualname.split("."):
        target = getattr(target, name)
    return target


def _end_with_server() -> None:
    """On Linux, die when the server does, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _run(rank: int, request: dict[str, Any], listener: socket.socket) -> dict[str, Any]:
    import numpy as np
    import torch
    from torch import distributed as dist

    port = listener.getsockname()[1]
    world_size = request["world_size"]
    sys.path[:] = request["sys_path"]
    environment = rank_environment(request["env"], rank=rank, world_size=world_size, port=port)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["cwd"])
    random.seed()  # a fresh process would differ from its peers; a forked one would not
    np.random.seed()
    torch.set_num_threads(1)
    store = None
    if rank == 0:
        # Nobody else can take the port: the socket has been listening since before the fork. ``env://`` joins it.
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            world_size,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    else:
        listener.close()
    try:
        if request["init"]:
            dist.init_process_group("gloo")
        fn = _load(**request["target"])
        value = fn(*pickle.loads(request["args"]))
        return {"status": "ok", "value": pickle.dumps(value), "store": store}
    except BaseException as error:
        lines = traceback.format_exception(error)
        return {
            "status": "error",
            "traceback": "".join(lines),
            "summary": lines[-1].strip(),
            "store": store,
        }


def _be_rank(rank: int, request: dict[str, Any], listener: socket.socket, out: Connection) -> NoReturn:
    """The life of one rank. Never returns; it is killed by the server once every rank has answered."""
    try:
        os.setsid()  # whatever it starts can be ended with it
        _end_with_server()
        log = os.open(request["logs"][rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable()
        faulthandler.dump_traceback_later(request["timeout_s"], file=sys.stderr)
        answer = _run(rank, request, listener)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()
        _store = answer.pop("store")  # held: other ranks may still need it
        out.send_bytes(pickle.dumps(answer))
        while True:
            signal.pause()
    except BaseException:
        traceback.print_exc()  # into the log: the pipe may be what failed
        sys.stderr.flush()
    finally:
        os._exit(70)


def _fork(request: dict[str, Any], client: Connection) -> tuple[dict[int, Connection], dict[int, int]]:
    pipes: dict[int, Connection] = {}
    pids: dict[int, int] = {}
    world_size = request["world_size"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4 * world_size)
        for rank in range(world_size):
            receiver, sender = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                client.close()
                receiver.close()
                for pipe in pipes.values():
                    pipe.close()
                _be_rank(rank, request, listener, sender)
            sender.close()
            pipes[rank], pids[rank] = receiver, pid
    return pipes, pids


def _collect(
    request: dict[str, Any], pipes: dict[int, Connection], pids: dict[int, int], client: Connection
) -> list[dict[str, Any]]:
    """Wait until all ranks answered, one failed, or time is up. Answers stand in order of arrival."""
    answers: list[dict[str, Any]] = []
    open_ranks = set(pids)
    deadline = time.monotonic() + request["timeout_s"] + REPORT_S
    while open_ranks and time.monotonic() < deadline:
        ready = wait([client, *(pipes[rank] for rank in open_ranks)], timeout=POLL_S)
        if client in ready:
            raise EOFError  # nothing is sent during a call: this is the end of the test process
        for rank in sorted(open_ranks):
            ended, code = os.waitpid(pids[rank], os.WNOHANG)  # before looking at the pipe: its last words count
            answer: dict[str, Any] | None = None
            try:
                if pipes[rank].poll():
                    answer = pickle.loads(pipes[rank].recv_bytes())
            except (EOFError, OSError):
                pass
            if answer is None and ended:
                exit_code = os.waitstatus_to_exitcode(code)
                how = (
                    f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exited with {exit_code}"
                )
                answer = {"status": "error", "traceback": "", "summary": how}
            if answer is not None:
                answers.append({"rank": rank, **answer})
                open_ranks.remove(rank)
                if answer["status"] == "error":
                    deadline = min(deadline, time.monotonic() + SETTLE_S)
    late = "ended with the others" if any(a["status"] == "error" for a in answers) else "hung"
    return answers + [{"rank": rank, "status": late} for rank in sorted(open_ranks)]


def _end(pids: dict[int, int]) -> None:
    """Kill every rank and whatever it started; wait until they are gone."""
    for pid in pids.values():
        for kill in (os.killpg, os.kill):  # killpg misses a rank that has not reached setsid yet
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
    for pid in pids.values():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _num_threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


def serve(client: Connection) -> None:
    """Answer requests until the test process is gone."""
    for module in WARM:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # no rank walks through, and so copies, what all of them share
    num_threads = _num_threads()
    client.send_bytes(pickle.dumps({"pid": os.getpid(), "num_threads": num_threads}))
    while True:
        try:
            request = pickle.loads(client.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        pids: dict[int, int] = {}
        try:
            pipes, pids = _fork(request, client)
            answers = _collect(request, pipes, pids, client)
        except EOFError:
            return
        finally:
            _end(pids)
        for pipe in pipes.values():
            pipe.close()
        client.send_bytes(pickle.dumps(answers))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # an orderly end of torch takes a second
