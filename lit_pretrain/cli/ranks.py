"""What the environment says about this process: whether torchrun or srun started it as one rank of several."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_ERROR_FILE",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
)
"""Set per rank; a rank that we start must not inherit them from whoever started us."""


COMMAND_VARIABLE = "LIT_PRETRAIN_COMMAND"
"""Process and machine of the command, so that a job in a worker process of a sweep knows whose end is its own."""


NOTE_VARIABLE = "LIT_PRETRAIN_SWEEP_NOTE"
"""File in which :class:`lit_pretrain.cli.report.SweepReport` leaves the sweep's folder."""


def this_command() -> str:
    """What the command writes into :data:`COMMAND_VARIABLE`."""
    return f"{os.getpid()}@{socket.gethostname()}"


def command_to_watch(environment: Mapping[str, str] | None = None) -> int | None:
    """Process id of the command when this process is a worker of its sweep, whoever lies between (joblib, submitit).

    None in the command itself, and on another machine, where SLURM decides when a job ends.
    """
    pid, _, machine = (os.environ if environment is None else environment).get(COMMAND_VARIABLE, "").partition("@")
    if not pid.isdigit() or machine != socket.gethostname() or int(pid) == os.getpid():
        return None
    return int(pid)


def is_alive(pid: int) -> bool:
    """Whether a process of this machine lives; one that nobody has buried yet does not."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(") ")[2][:1] != "Z"
    except PermissionError:
        return True
    except OSError:
        return False


@dataclass(frozen=True, kw_only=True)
class External:
    """This process is one of ``world_size`` ranks that somebody else started."""

    rank: int
    world_size: int
    by: str


def external(environment: Mapping[str, str] | None = None) -> External | None:
    """The outer launcher's word, or None: then the command starts the ranks itself."""
    env = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" in env and "RANK" in env and "WORLD_SIZE" in env:
        return External(rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"]), by="torchrun")
    # sbatch and salloc set SLURM_NTASKS too; only inside an srun step is every task this command.
    if int(env.get("SLURM_NTASKS") or 1) > 1 and "SLURM_PROCID" in env and env.get("SLURM_STEP_ID", "").isdigit():
        return External(rank=int(env["SLURM_PROCID"]), world_size=int(env["SLURM_NTASKS"]), by="srun")
    return None


def is_rank_zero() -> bool:
    """Whether this process speaks for the run: it writes the shared files."""
    outer = external()
    return outer is None or outer.rank == 0


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment of a rank that we start: ours, less :data:`RANK_VARIABLES`, plus what torchrun would set."""
    env = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // world_size)))
    # Threads that spin for long at a barrier starve each other as soon as anything else runs on the machine; without
    # any spinning a quiet machine is slower (figures in docs/log.md). What the user sets stands.
    if "OMP_WAIT_POLICY" not in env:
        env.setdefault("GOMP_SPINCOUNT", "1000")
    return env | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"lit-pretrain-{os.getpid()}-{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
