"""The ``inspect`` verb: what a run is, how far it got, how it ended, and what can be done with it. Loads no torch."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from lit_pretrain import units
from lit_pretrain.cli import launch, resume, saved, spikes_seen, sweep
from lit_pretrain.cli.outlook import Outlook, get, look
from lit_pretrain.cli.resolvers import resolve
from lit_pretrain.cli.runstate import BUDGET, STOPPED, RunState, left_behind, read_state
from lit_pretrain.cli.table import Section, columns, layout
from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate import checkpoints
from lit_pretrain.instantiate.checkpoints import CheckpointFacts
from lit_pretrain.planning.memory import precision_word

FREE_TEXT = ("run",)
"""Settings whose value is text as it stands, not Hydra's grammar."""
FORMATS = ("text", "json")
SHOWN = {"val/loss": "nats per token", "val/perplexity": "", "val/bits_per_byte": "", "train/loss": "nats per token"}
"""Metrics and their units, in the order in which they are printed."""
UNKNOWN = "not known"
_OURS = (launch.RESOLVED, launch.RESULT, "errors", "failure.json", ".hydra")


def prepare_arguments(argv: Sequence[str]) -> list[str]:
    """A path may be written as it is."""
    return saved.free_text(argv, FREE_TEXT)


def job(config: DictConfig) -> None:
    """Print what a run folder holds."""
    try:
        plain = resolve(config)
        saved.one_of("format", plain["format"], FORMATS)
        if not isinstance(plain["verify"], bool):
            raise ConfigError(f"verify={plain['verify']} must be true or false.")
        run_dir = Path(str(plain["run"])).expanduser()
        sys.stdout.write(describe(run_dir, verify=plain["verify"], as_json=plain["format"] == "json"))
    except Exception as e:
        raise launch.Failed from e


def describe(run_dir: Path, *, verify: bool, as_json: bool = False) -> str:
    """A run folder, or a folder of runs, as text or JSON.

    Args:
        run_dir: The folder; it may be half-written or damaged.
        verify: Read every checkpoint whole.
        as_json: Strict JSON.

    Raises:
        ConfigError: There is no such folder, or nothing in it is of a run.
    """
    config: dict[str, Any] = {}
    damage = ""
    try:
        config = saved.read_resolved(run_dir)
    except ConfigError as e:
        holds_runs = bool(sweep.run_folders(run_dir) or sweep.sweeps_in(run_dir))
        if holds_runs and not (run_dir / launch.RESOLVED).exists():
            return _several(run_dir, as_json=as_json)
        if not run_dir.is_dir() or not _is_a_run(run_dir):
            raise
        damage = "" if _is_foreign(run_dir) else str(e)
    state, outlook = read_state(run_dir), look(config)
    if not config and not damage:
        state = replace(state, sentence="not begun by lit-pretrain; what our callbacks left of it:")
    facts = tuple(_verified(c) for c in state.checkpoints) if verify else state.checkpoints
    if as_json:
        return _json(run_dir, config, state, facts)
    parts = [layout([_run(run_dir, config, outlook, state, [damage, *state.notes])])]
    parts.append(_checkpoints(run_dir, facts, verified=verify))
    spikes = spikes_seen.as_text(*spikes_seen.read(run_dir))
    parts += [spikes] if spikes else []
    parts.append(layout([Section("next", _next(run_dir, config, state, facts))]))
    return "\n".join(parts)


def _is_a_run(run_dir: Path) -> bool:
    names = (*_OURS, checkpoints.FOLDER, spikes_seen.FILE, STOPPED, BUDGET, "tensorboard")
    return any((run_dir / name).exists() for name in names)


def _is_foreign(run_dir: Path) -> bool:
    """Whether another program than ours began the run: its callbacks left something, our command line did not."""
    left = any((run_dir / name).exists() for name in (spikes_seen.FILE, STOPPED, BUDGET))
    left = left or bool(checkpoints.listed(run_dir / checkpoints.FOLDER))
    return left and not any((run_dir / name).exists() for name in _OURS)


def _run(run_dir: Path, config: Mapping[str, Any], outlook: Outlook, state: RunState, notes: Sequence[str]) -> Section:
    rows = [("state", state.sentence)]
    rows += [("damaged", note) for note in notes if note]
    began = run_dir / launch.RESOLVED
    if began.exists():
        rows.append(("began", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began.stat().st_mtime))))
    command = _command(run_dir)
    if command:
        rows.append(("command", command))
    if config:
        rows += _what(config, outlook)
    rows.append(("reached", _reached(outlook, state)))
    rows += left_behind(run_dir)
    for name, unit in SHOWN.items():
        if name in state.metrics:
            rows.append((name, f"{state.metrics[name]:.4f} {unit}".rstrip()))
    return Section(str(run_dir), rows)


def _what(config: Mapping[str, Any], outlook: Outlook) -> list[tuple[str, str]]:
    model, count = outlook.architecture, outlook.parameters
    if model is None or count is None:
        shape = f"{get(config, 'model._target_', UNKNOWN)}"
    else:
        shape = (
            f"{units.count(count.total - count.padding)} parameters: {model.n_layer} layers, width {model.n_embd}, "
            f"{model.n_head} heads, context {model.block_size}, vocabulary {model.vocab_size}"
        )
    corpus = get(config, "data.corpus") or {}
    names = get(corpus, "domains") or list(get(corpus, "sources") or {})
    kind = str(get(corpus, "_target_", get(config, "data._target_", UNKNOWN))).rpartition(".")[2]
    strategy = get(config, "trainer.strategy", UNKNOWN)
    strategy = str(get(strategy, "_target_", strategy)).rpartition(".")[2] or str(strategy)
    planned = f"{get(config, 'trainer.max_epochs')} epochs"
    if outlook.updates is not None:
        tokens = "" if outlook.tokens is None else f", {units.count(outlook.tokens)} tokens"
        planned = f"{outlook.updates:,} updates{tokens}"
    ranks = UNKNOWN if outlook.ranks is None else str(outlook.ranks)
    return [
        ("model", shape),
        ("data", f"{kind}: {', '.join(map(str, names))}" if names else kind),
        ("length", planned),
        (
            "ranks",
            f"{ranks}, strategy {strategy}, precision {precision_word(get(config, 'trainer.precision', UNKNOWN))}",
        ),
    ]


def _command(run_dir: Path) -> str:
    """The command line that made the run, as Hydra kept it; empty where it did not."""
    words = _overrides(run_dir)
    return "" if words is None else shlex.join(["lit-pretrain", "train", *words])


def _overrides(run_dir: Path) -> list[str] | None:
    try:
        words = yaml.safe_load((run_dir / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None
    return [*_config_folder(run_dir), *map(str, words)] if isinstance(words, list) else None


def _config_folder(run_dir: Path) -> list[str]:
    """The flag that named a folder of the user's own options."""
    try:
        kept = yaml.safe_load((run_dir / ".hydra" / "hydra.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return []
    sources = get(kept, "hydra.runtime.config_sources") or []
    own = [get(s, "path") for s in sources if get(s, "provider") == "command-line" and get(s, "schema") == "file"]
    return ["--config-dir", str(own[0])] if own else []


def _reached(outlook: Outlook, state: RunState) -> str:
    if state.steps is None:
        return "no update that left a trace"
    tokens = "" if not outlook.tokens_per_update else f", {units.count(state.steps * outlook.tokens_per_update)} tokens"
    of = "" if outlook.updates is None else f" of {outlook.updates:,}"
    return f"{state.steps:,}{of} updates{tokens}"


def _verified(facts: CheckpointFacts) -> CheckpointFacts:
    """The same, with the whole file read as tensors and plain data."""
    if facts.problem:
        return facts
    problem = ""
    try:
        problem = checkpoints.damage(facts.path)
        weights = {} if problem else saved.read_weights(facts.path)
        if problem:
            pass
        elif not weights:
            problem = "it holds no weights"
        else:
            broken = [name for name, value in weights.items() if value.is_floating_point() and not _is_finite(value)]
            problem = f"{broken[0]} holds values that are not finite" if broken else ""
    except ConfigError as e:
        problem = str(e)
    return replace(facts, problem=problem)


def _is_finite(value: Any) -> bool:
    return bool(value.isfinite().all())


def _checkpoints(run_dir: Path, facts: Sequence[CheckpointFacts], *, verified: bool) -> str:
    if not facts:
        return f"checkpoints\n  none in {run_dir / checkpoints.FOLDER}\n"
    good = "whole" if verified else "looks whole"
    rows = [
        [f"  {f.path.name}", "?" if f.step is None else f"{f.step:,}", units.size(f.size), f.reason, f.problem or good]
        for f in facts
    ]
    return columns(["checkpoints", "updates", "size", "saved for", "readable"], rows, left=(0, 3, 4))


def _next(
    run_dir: Path, config: Mapping[str, Any], state: RunState, facts: Sequence[CheckpointFacts]
) -> list[tuple[str, str]]:
    folder = shlex.quote(str(run_dir))
    rows = []
    if (run_dir / "tensorboard").is_dir():
        rows.append(("curves", f"tensorboard --logdir {folder}"))
    usable = [f for f in facts if not f.problem]
    if usable and config:
        try:
            saved.find_tokenizer(run_dir, None, resolved=config)
        except ConfigError:
            rows.append(("text", f'lit-pretrain generate run={folder} tokenizer=FILE prompt="..."'))
        else:
            rows.append(("text", f'lit-pretrain generate run={folder} prompt="..."'))
        rows.append(("score", f"lit-pretrain evaluate run={folder}"))
    if state.kind not in ("running", "finished") and config:
        words = _overrides(run_dir)
        if words is not None and usable:
            rows.append(("go on", resume.again(words, run_dir, config.get("output_root", "outputs"))))
        elif words is not None:
            rows.append(("again", _command(run_dir)))
    if usable and not config and _is_foreign(run_dir):
        rows.append(("go on", f'trainer.fit(..., ckpt_path="{usable[-1].path}")'))
    return rows or [("", "nothing: neither curves nor a checkpoint that can be read")]


def _several(folder: Path, *, as_json: bool) -> str:
    """A sweep's jobs, or the runs and sweeps of a folder."""
    if as_json:
        return sweep.as_json(folder)
    return sweep.table(folder) if sweep.is_sweep(folder) else sweep.overview(folder)


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _json(run_dir: Path, config: Mapping[str, Any], state: RunState, facts: Sequence[CheckpointFacts]) -> str:
    content = {
        "run": str(run_dir),
        "state": state.kind,
        "sentence": state.sentence,
        "updates": state.steps,
        "metrics": _finite(state.metrics),
        "checkpoints": [
            {
                "path": str(f.path),
                "bytes": f.size,
                "updates": f.step,
                "reason": f.reason or None,
                "problem": f.problem or None,
            }
            for f in facts
        ],
        "spikes": spikes_seen.as_json(spikes_seen.read(run_dir)[0]),
        "left_behind": dict(left_behind(run_dir)),
        "notes": list(state.notes),
        "has_configuration": bool(config),
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"
