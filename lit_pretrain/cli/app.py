"""Runs one verb under Hydra, and turns every outcome into one exit code and one readable report."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import shlex
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import hydra

from lit_pretrain.cli import flags, help, hints, ranks, report, resolvers
from lit_pretrain.cli.launch import Failed, Terminated
from lit_pretrain.errors import ConfigError, Preempted, RankError


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables; everything is as before afterwards, whatever ran in between."""
    before = os.environ.copy()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _logging() -> Iterator[None]:
    """Hydra sets up the root logger for its jobs; put it back."""
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]


@contextmanager
def _own_classes() -> Iterator[None]:
    """A user's classes in the working directory can be imported; last, so they hide nothing that is installed."""
    before = sys.path[:]
    sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _sweep_folder() -> Iterator[None]:
    """A sweep's folder is its own until it is over."""
    with ExitStack() as held:
        before = report.HELD.set(held)
        try:
            yield
        finally:
            report.HELD.reset(before)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds a sweep, so that joblib ends its workers; while ranks run, it goes to them instead."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, _: FrameType | None) -> None:
        raise Terminated(signum)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _scratch() -> Iterator[str]:
    """A folder that is gone afterwards.

    Raises:
        ConfigError: There is no place for one.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="lit-pretrain-")
    except OSError as e:
        raise ConfigError(f"no temporary folder can be made ({e}); name a place for it with TMPDIR=....") from e
    with folder as name:
        yield name


def run_verb(verb: str, argv: list[str]) -> int:
    """Compose a verb's configuration from ``argv`` and run it.

    Args:
        verb: One of :data:`lit_pretrain.cli.VERBS`.
        argv: Hydra's flags and overrides.

    Returns:
        The exit code; see :func:`lit_pretrain.cli.main`.
    """
    argv = flags.named(verb, argv)
    wrong = flags.check(verb, argv)
    if wrong is not None:
        return _complain(wrong, code=2)
    if not set(help.WORDS).isdisjoint(argv):
        return _help(verb, argv)
    argv = flags.arranged(argv)
    module = importlib.import_module(f"lit_pretrain.cli.{verb}")
    job: Callable[..., Any] = module.job
    if hasattr(module, "prepare_arguments"):
        argv = module.prepare_arguments(argv)
    if not ranks.is_rank_zero():  # torchrun, srun: one rank writes the log file
        argv = [*argv, "hydra/job_logging=stdout"]
    try:
        with _scratch() as scratch:
            note = Path(scratch) / "sweep"
            # With HYDRA_FULL_ERROR Hydra raises what went wrong instead of printing it and leaving the process.
            ours = {ranks.COMMAND_VARIABLE: ranks.this_command(), ranks.NOTE_VARIABLE: str(note)}
            with environment(HYDRA_FULL_ERROR="1", **ours):
                return _run(verb, job, argv, note)
    except ConfigError as e:
        return _complain(str(e))


def _help(verb: str, argv: list[str]) -> int:
    resolvers.register()
    try:
        print(help.page(verb, argv), end="")
    except BrokenPipeError:
        raise
    except Exception as e:
        return _say_why(e, verb, argv)
    return 0


def _run(verb: str, job: Callable[..., Any], argv: list[str], note: Path) -> int:
    application = hydra.main(version_base="1.3", config_path="pkg://lit_pretrain.conf", config_name=verb)(job)
    try:
        # The plain name: shell completion registers itself under it.
        with _sweep_folder(), _logging(), _own_classes(), _sigterm_raises(), _arguments(["lit-pretrain", *argv]):
            application()
    except KeyboardInterrupt:
        return _complain("interrupted.", code=130)
    except Terminated as e:
        return _complain(f"stopped by {signal.Signals(e.signum).name}.", code=128 + e.signum)
    except Preempted as e:
        if not ranks.is_rank_zero():
            return e.EXIT_CODE
        return _complain(f"{e}. Go on with:\n  {_go_on(e, argv)}", code=e.EXIT_CODE)
    except SystemExit as e:  # a flag with a wrong value, by argparse
        return e.code if isinstance(e.code, int) else 1
    except Failed as e:
        if isinstance(e.__cause__, BrokenPipeError):
            raise e.__cause__ from None
        return _say_why(e.__cause__, verb, argv)
    except BrokenPipeError:
        raise
    except Exception as e:
        return 1 if _sweep_failures(note) else _say_why(e, verb, argv)
    return 1 if _sweep_failures(note) else 0


def _say_why(e: BaseException | None, verb: str, argv: list[str]) -> int:
    """One report for every failure: a sentence where the user can do something, else the traceback."""
    if isinstance(e, (ConfigError, RankError)):
        return _complain(str(e))
    if e is not None and hints.knows(e):
        return _complain(hints.explain(e, verb, argv))
    if isinstance(e, OSError) and e.errno == errno.ENOSPC:
        return _complain("there is no space left on the disk; free some, or choose another with output_root=....")
    if isinstance(e, OSError) and e.filename is not None:
        return _complain(f"{e.filename}: {e.strerror}; choose another folder with output_root=... or run_id=....")
    traceback.print_exception(e)
    return 1


def _go_on(e: Preempted, argv: list[str]) -> str:
    """The same words with resume=auto, for the run, or for the whole sweep where it was one."""
    from lit_pretrain.cli import resume, saved  # they load numpy, which --help is spared

    words = [word for word in argv if word.partition("=")[0] not in ("resume", "resume_accept")]
    if "-m" not in words and "--multirun" not in words:
        run_dir = Path(e.checkpoint).parent.parent
        return resume.again(words, run_dir, saved.read_resolved(run_dir)["output_root"])
    return shlex.join(["lit-pretrain", "train", *words, "resume=auto"])


def _sweep_failures(note: Path) -> int:
    """Say how every job of a sweep went; how many failed."""
    if not note.exists():
        return 0
    folder = Path(note.read_text(encoding="utf-8"))
    if ranks.is_rank_zero():
        from lit_pretrain.cli import sweep  # loads numpy, which --help is spared

        print(f"\n{sweep.table(folder)}", end="", flush=True)
    return report.print_failures(folder, sys.stderr)


def _complain(text: str, *, code: int = 1) -> int:
    print(f"lit-pretrain: {text}", file=sys.stderr)
    return code
