"""What a test must leave as it found it."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Written by pytest, by Lightning (seed_everything; Trainer(deterministic=True)) and by torch's compiler, with no way to
# take them back: put back here, without a complaint.
TOLERATED = (
    "PYTEST_CURRENT_TEST",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "CUBLAS_WORKSPACE_CONFIG",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
)
LITTER = ("lightning_logs", "checkpoints")


@contextmanager
def no_leaks(root: Path) -> Iterator[None]:
    """Put global state back after the body, and complain about what nobody may leave.

    Complains about environment variables, the working directory, disabled loggers, an initialised process group,
    torch's default dtype, and Lightning's default folders in ``root``. Puts back in silence: random states and torch's
    deterministic flags. Loads no torch itself.

    Raises:
        AssertionError: naming everything that was left.
    """
    env, cwd = dict(os.environ), Path.cwd()
    litter = {name for name in LITTER if (root / name).exists()}
    silent = _disabled_loggers()
    states = _random_states()
    torch = sys.modules.get("torch")
    dtype = torch.get_default_dtype() if torch else None
    deterministic = _deterministic()
    yield
    found = _environment_changes(env)
    if Path.cwd() != cwd:
        found.append(f"working directory {Path.cwd()}")
        os.chdir(cwd)
    silenced = sorted(_disabled_loggers() - silent)
    if silenced:
        found.append(f"disabled loggers {', '.join(silenced)}")
    for name in silenced:
        logging.getLogger(name).disabled = False
    torch = sys.modules.get("torch")
    if torch is not None:
        found += _torch_changes(torch, dtype)
        _restore_deterministic(torch, deterministic)
    _restore_random_states(states)
    found += [f"folder {name} in the repository" for name in LITTER if (root / name).exists() and name not in litter]
    assert not found, f"The test left behind: {'; '.join(found)}."


def _disabled_loggers() -> set[str]:
    loggers = logging.root.manager.loggerDict.items()
    return {name for name, logger in loggers if isinstance(logger, logging.Logger) and logger.disabled}


def _environment_changes(before: dict[str, str]) -> list[str]:
    now = dict(os.environ)
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    os.environ.update(before)
    for key in now.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[key]
    return [f"environment variable {key}={now.get(key)!r}" for key in changed if key not in TOLERATED]


def _torch_changes(torch, dtype) -> list[str]:  # type: ignore[no-untyped-def]
    found = []
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        found.append("an initialised process group")
        dist.destroy_process_group()
    dtype = dtype or torch.float32
    if torch.get_default_dtype() != dtype:
        found.append(f"default dtype {torch.get_default_dtype()}")
        torch.set_default_dtype(dtype)
    return found


def _deterministic() -> tuple[bool, bool, bool] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )


def _restore_deterministic(torch, before) -> None:  # type: ignore[no-untyped-def]
    before = before or (False, False, False)
    if _deterministic() != before:  # the setter imports torch's compiler: a second, so only when needed
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]


def _random_states() -> dict[str, object]:
    states: dict[str, object] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state()
    return states


def _restore_random_states(states: dict[str, object]) -> None:
    random.setstate(states["random"])  # type: ignore[arg-type]
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])
