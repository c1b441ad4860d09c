"""The jobs of a sweep, or the runs of a folder, side by side. No torch; nothing there is taken to be whole."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from lit_pretrain.cli import launch, report
from lit_pretrain.cli.runstate import RunState, read_state
from lit_pretrain.cli.table import columns

LOSS, BITS = "val/loss", "val/bits_per_byte"
_SHORT = 40
"""Characters of a swept value that are shown."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of several.

    Args:
        folder: Of the run.
        words: Setting to value, as they stood on its command line.
        state: How it went.
    """

    folder: Path
    words: Mapping[str, str]
    state: RunState

    @property
    def loss(self) -> float:
        """The last validation loss; infinite where there is none."""
        value = self.state.metrics.get(LOSS, math.inf)
        return value if math.isfinite(value) else math.inf


def run_folders(folder: Path) -> list[Path]:
    """Folders in a folder that are runs, begun or refused, by number where they have one."""
    found = [path for path in folder.glob("*/") if not path.name.startswith(".")]
    runs = [path for path in found if any((path / name).is_file() for name in (launch.RESOLVED, report.FILE))]
    return sorted(runs, key=lambda path: (len(path.name) if path.name.isdigit() else 0, path.name))


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds the numbered jobs of a sweep."""
    runs = run_folders(folder)
    return bool(runs) and all(path.name.isdigit() for path in runs) and not (folder / launch.RESOLVED).exists()


def read_jobs(folder: Path) -> list[Job]:
    """Every run in a folder."""
    return [Job(folder=path, words=_words(path), state=read_state(path)) for path in run_folders(folder)]


def swept(jobs: Sequence[Job]) -> list[str]:
    """Settings that differ between jobs, in the order of the command line."""
    names = list(dict.fromkeys(name for job in jobs for name in job.words))
    return [name for name in names if len({job.words.get(name) for job in jobs}) > 1]


def table(folder: Path) -> str:
    """A sweep: one line for each job, and which is best; empty where there is none."""
    jobs = read_jobs(folder)
    if not jobs:
        return ""
    names = swept(jobs)
    rows = [
        [
            job.folder.name,
            *(_cut(job.words.get(name, "-")) for name in names),
            _figure(job.state, LOSS),
            _figure(job.state, BITS),
            "-" if job.state.steps is None else f"{job.state.steps:,}",
            job.state.kind,
            _place(job.folder),
        ]
        for job in jobs
    ]
    left = (0, *range(1, len(names) + 1), len(names) + 4, len(names) + 5)
    text = columns(["job", *names, LOSS, "bits/byte", "updates", "state", "folder"], rows, left=left)
    best = min(jobs, key=lambda job: job.loss)
    if len(jobs) > 1 and math.isfinite(best.loss):
        chosen = shlex.join(f"{name}={best.words[name]}" for name in names if name in best.words)
        text += f"\nleast {LOSS}: job {best.folder.name}{f' ({chosen})' if chosen else ''}\n"
    return text


def overview(folder: Path) -> str:
    """The runs of a folder, and the sweeps with their swept values."""
    runs, sweeps = read_jobs(folder), sweeps_in(folder)
    places = [*(job.folder for job in runs), *sweeps]
    text = f"{folder} holds {_contents(len(runs), len(sweeps))}; inspect one with lit-pretrain inspect "
    text += f"{shlex.quote(str(places[-1]))}\n"
    if runs:
        rows = [
            [
                job.folder.name,
                job.state.kind,
                "?" if job.state.steps is None else f"{job.state.steps:,}",
                _figure(job.state, LOSS),
                _figure(job.state, "train/loss"),
            ]
            for job in runs
        ]
        text += "\n" + columns(["run", "state", "updates", LOSS, "train/loss"], rows, left=(0, 1))
    if sweeps:
        rows = [_summary(sweep) for sweep in sweeps]
        text += "\n" + columns(["sweep", "jobs", "finished", f"least {LOSS}", "swept"], rows, left=(0, 4))
    return text


def sweeps_in(folder: Path) -> list[Path]:
    """Folders in a folder that are sweeps, by name."""
    return sorted(path for path in folder.glob("*/") if not path.name.startswith(".") and is_sweep(path))


def as_json(folder: Path) -> str:
    """The same as strict JSON."""
    content: dict[str, object] = {"folder": str(folder), "runs": _entries(read_jobs(folder))}
    sweeps = sweeps_in(folder)
    if sweeps:
        content["sweeps"] = {sweep.name: _entries(read_jobs(sweep)) for sweep in sweeps}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def _entries(jobs: Sequence[Job]) -> dict[str, dict[str, object]]:
    names = swept(jobs)
    return {
        job.folder.name: {
            "state": job.state.kind,
            "updates": job.state.steps,
            "swept": {name: job.words[name] for name in names if name in job.words},
            "metrics": {name: value if math.isfinite(value) else None for name, value in job.state.metrics.items()},
        }
        for job in jobs
    }


def _summary(sweep: Path) -> list[str]:
    jobs = read_jobs(sweep)
    finished = sum(job.state.kind == "finished" for job in jobs)
    least = min(job.loss for job in jobs)
    values = {
        name: ",".join(dict.fromkeys(job.words[name] for job in jobs if name in job.words)) for name in swept(jobs)
    }
    words = " ".join(f"{name}={_cut(value)}" for name, value in values.items())
    return [sweep.name, str(len(jobs)), str(finished), f"{least:.4f}" if math.isfinite(least) else "-", words or "-"]


def _words(run_dir: Path) -> dict[str, str]:
    """The command line of a job: of one that was refused, the report of its failure keeps it."""
    words: object = None
    with suppress(OSError, ValueError, KeyError, TypeError):
        words = json.loads((run_dir / report.FILE).read_text(encoding="utf-8"))["overrides"]
    with suppress(OSError, ValueError, yaml.YAMLError):
        words = yaml.safe_load((run_dir / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    split = [str(word).partition("=") for word in words] if isinstance(words, list) else []
    return {name: value for name, _, value in split}


def _contents(runs: int, sweeps: int) -> str:
    found = [f"{n} {what}" if n == 1 else f"{n} {what}s" for n, what in ((runs, "run"), (sweeps, "sweep")) if n]
    return " and ".join(found)


def _figure(state: RunState, name: str) -> str:
    return f"{state.metrics[name]:.4f}" if name in state.metrics else "-"


def _cut(value: str) -> str:
    return value if len(value) <= _SHORT else f"{value[: _SHORT - 3]}..."


def _place(folder: Path) -> str:
    """A folder as one would type it from here."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_absolute() and folder.is_relative_to(here) else folder)
