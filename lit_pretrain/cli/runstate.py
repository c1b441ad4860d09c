"""How a run went, from what it left in its folder: no torch, and nothing there is taken to be whole."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lit_pretrain import units
from lit_pretrain.cli import early, failures, launch, report
from lit_pretrain.instantiate import checkpoints
from lit_pretrain.instantiate.checkpoints import CheckpointFacts

STOPPED, BUDGET = "stopped.json", "budget.json"
"""What LossSpikeRollback and ChinchillaBudget leave at their ends."""

Kind = Literal["running", "finished", "preempted", "failed", "interrupted", "unknown"]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """How a run went.

    Args:
        kind: One word.
        sentence: What happened.
        steps: Updates it is known to have reached; None when nothing tells.
        metrics: The last values known.
        checkpoints: Oldest first.
        notes: What is damaged or missing.
    """

    kind: Kind
    sentence: str
    steps: int | None
    metrics: Mapping[str, float]
    checkpoints: tuple[CheckpointFacts, ...]
    notes: tuple[str, ...] = field(default=())


def read_state(run_dir: Path) -> RunState:
    """Work out how a run went."""
    notes: list[str] = []
    found = tuple(checkpoints.listed(run_dir / checkpoints.FOLDER))
    result = _read_json(run_dir / launch.RESULT, notes)
    kind, sentence = _ending(run_dir, result, notes)
    steps, metrics = (result or {}).get("steps"), _numbers((result or {}).get("metrics"))
    if not isinstance(steps, int):
        steps = max((c.step for c in found if c.step is not None), default=None)
        seen, metrics = last_curves(run_dir)
        told = (steps, seen, _updates(run_dir / STOPPED, notes))  # a budget.json may be of an earlier part
        steps = max((n for n in told if n is not None), default=None)
    return RunState(kind=kind, sentence=sentence, steps=steps, metrics=metrics, checkpoints=found, notes=tuple(notes))


def _updates(path: Path, notes: list[str]) -> int | None:
    found = (_read_json(path, notes) or {}).get("updates")
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def left_behind(run_dir: Path) -> list[tuple[str, str]]:
    """What the callbacks that end a run have left: why, and what it came to. Damage is told of elsewhere."""
    rows, notes = [], list[str]()
    stopped, budget = _read_json(run_dir / STOPPED, notes) or {}, _read_json(run_dir / BUDGET, notes) or {}
    if stopped.get("reason"):
        rows.append(("stopped", f"by {stopped.get('by')}: {stopped['reason']}"))
    tokens, ratio, loss = (budget.get(name) for name in ("tokens", "tokens_per_parameter", "loss"))
    if isinstance(tokens, int | float) and isinstance(ratio, int | float):
        name = budget.get("loss_name") or "loss"
        last = f", {name} {loss:.4f}" if isinstance(loss, int | float) else ""
        at = f"at update {budget.get('updates')}: {units.count(tokens)} tokens that count"
        rows.append(("budget", f"{at}, {ratio:.2f} per parameter{last}"))
    return rows


def _ending(run_dir: Path, result: Mapping[str, Any] | None, notes: list[str]) -> tuple[Kind, str]:
    living = living_ranks(run_dir)
    if living:
        return "running", f"running now, on {living} ranks of this machine"
    failure = _read_json(run_dir / report.FILE, notes)
    reports = [r for p in sorted((run_dir / failures.FOLDER).glob("rank*.json")) if (r := _read_json(p, notes))]
    first = min(reports, key=lambda r: (bool(r.get("secondary")), r.get("time") or math.inf), default=None)
    when = _ago(run_dir / launch.RESULT)
    if result is not None and result.get("ended") == "preempted":
        return "preempted", f"preempted at update {result.get('steps')} {when}, saved; it can go on (see below)"
    if result is not None:
        took = result.get("seconds")
        lasted = f", after {units.duration(took)}" if isinstance(took, (int, float)) else ""
        then = f"; then it failed: {_last_line(failure.get('text'))}" if failure else ""
        return ("failed" if then else "finished"), f"finished {when}{lasted}{then}"
    if first is not None and _last_line(first.get("traceback")).startswith("KeyboardInterrupt"):
        return "interrupted", f"interrupted by Ctrl-C {_ago(run_dir / failures.FOLDER)}"
    if failure is not None:
        return "failed", f"failed {_ago(run_dir / report.FILE)}: {_last_line(failure.get('text'))}"
    if first is not None:
        who = f"rank {first.get('rank')} " if len(reports) > 1 else ""
        what = _last_line(first.get("traceback") or first.get("message"))
        if "SIGTERM" in what:
            return "interrupted", f"stopped by SIGTERM {_ago(run_dir / failures.FOLDER)}"
        return "failed", f"{who}failed {_ago(run_dir / failures.FOLDER)}: {what}"
    return "unknown", (
        "no end is recorded: it was killed, or runs on another machine; the last sign of it was written "
        f"{_last_sign(run_dir)}"
    )


def _read_json(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """A mapping, or None when there is no such file or it is damaged, which ``notes`` gets to know."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        notes.append(f"{path.name} cannot be read ({' '.join(str(e).split())})")
        return None
    if not isinstance(content, dict):
        notes.append(f"{path.name} holds no mapping")
        return None
    return content


def _numbers(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        return {}
    return {str(k): float(v) for k, v in metrics.items() if isinstance(v, (int, float))}


def _last_line(text: object) -> str:
    lines = [line.strip() for line in str(text or "").splitlines() if line.strip()]
    return lines[-1] if lines else "it does not say why"


def _ago(path: Path) -> str:
    """When a file or folder was last written."""
    try:
        seconds = time.time() - path.stat().st_mtime
    except OSError:
        return "at an unknown time"
    return "just now" if seconds < 1 else f"{units.duration(seconds)} ago"


def _last_sign(run_dir: Path) -> str:
    newest, age = run_dir, -math.inf
    for path in run_dir.rglob("*"):
        try:
            written = path.stat().st_mtime
        except OSError:  # a temporary file of a run that goes on
            continue
        if path.is_file() and written > age:
            newest, age = path, written
    return f"{_ago(newest)} ({newest.relative_to(run_dir) if newest != run_dir else 'the folder itself'})"


def living_ranks(run_dir: Path, proc: Path = Path("/proc")) -> int:
    """Rank processes of this run that live on this machine; 0 where the system cannot tell.

    Args:
        run_dir: The run folder.
        proc: Where the kernel lists processes.
    """
    count = 0
    for path in proc.glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has just ended, or is somebody else's
            continue
        if launch.WORKER in words:
            count += Path(words[words.index(launch.WORKER) + 1]).resolve() == run_dir.resolve()
        elif early.MODULE in words:  # told its folder later: it holds the folder's lock
            count += _has_open(path.parent / "fd", run_dir)
    return count


def _has_open(handles: Path, run_dir: Path) -> bool:
    """Whether a process has a folder itself open."""
    with suppress(OSError):  # it has just ended, or is somebody else's
        return any(one.samefile(run_dir) for one in handles.iterdir() if one.exists())
    return False


def last_curves(run_dir: Path) -> tuple[int | None, dict[str, float]]:
    """The last step and values of losses in TensorBoard's files; for a run that recorded no end."""
    if not list(run_dir.glob("tensorboard/*tfevents*")):
        return None, {}
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={SCALARS: 1})
    try:
        events.Reload()
        found = {name: events.Scalars(name)[-1] for name in ("train/loss", "val/loss") if name in events.scalars.Keys()}
    except Exception:  # whatever a half-written file makes of the reader: the curves are an extra
        return None, {}
    # Lightning writes the loss of the first update at step 0.
    steps = found["train/loss"].step + 1 if "train/loss" in found else None
    return steps, {name: float(event.value) for name, event in found.items()}
