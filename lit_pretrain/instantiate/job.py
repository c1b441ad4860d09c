"""One rank of one training run, from a resolved configuration. Needs no Hydra; also the entry for other programs."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer, seed_everything

from lit_pretrain import units
from lit_pretrain.errors import Preempted
from lit_pretrain.instantiate import checkpoints
from lit_pretrain.instantiate.closing import checkpoint_folder
from lit_pretrain.instantiate.resuming import explained
from lit_pretrain.instantiate.run import Run, build_run

RESOLVED = "resolved.yaml"
RESULT = "result.json"


def train(config: Mapping[str, Any]) -> dict[str, Any]:
    """Train. Every rank calls it; rank 0 writes ``result.json`` into the run folder and prints a summary.

    Args:
        config: The resolved configuration, plain containers.

    Returns:
        ``metrics`` (name to final value), ``steps``, ``tokens``, ``seconds``, ``checkpoint`` (a path or None).

    Raises:
        ConfigError: Before the first step.
        KeyboardInterrupt: The run was interrupted; Lightning has shut down in order.
        Preempted: A signal asked it to end; it has saved.
    """
    start = time.monotonic()
    seed_everything(config["seed"], workers=True, verbose=False)
    run_dir = Path(config["run"]["dir"])
    _keep_configuration(config, run_dir / RESOLVED)
    run = build_run(config)
    trainer = run.trainer
    checkpoint = config["run"].get("checkpoint")
    preempted: Preempted | None = None
    try:
        fit(run, checkpoint=checkpoint)
    except Preempted as e:
        preempted = e
    result: dict[str, Any] = {
        "ended": "finished" if preempted is None else "preempted",
        "metrics": {k: float(v) for k, v in sorted(trainer.callback_metrics.items())},
        "steps": trainer.global_step,
        "tokens": trainer.global_step * config["batch"]["tokens_per_update"],
        "seconds": round(time.monotonic() - start, 3),
        "checkpoint": _last_checkpoint(trainer),
    }
    if preempted is not None:
        result |= {"signal": preempted.signal, "checkpoint": preempted.checkpoint, "requeued": preempted.requeued}
        if trainer.is_global_zero:
            _write(result, run_dir / RESULT)
        raise preempted
    if trainer.is_global_zero:
        _write(result, run_dir / RESULT)
        print(summary(config, result), flush=True)
    return result


def fit(run: Run, *, checkpoint: str | None = None) -> None:
    """``trainer.fit``, with an interruption raised as one: Lightning turns Ctrl-C into ``sys.exit(1)``.

    Args:
        run: What to train.
        checkpoint: Where to go on; read as tensors and plain data only.
    """
    try:
        run.trainer.fit(
            run.module,
            datamodule=run.datamodule,
            ckpt_path=checkpoint,
            weights_only=None if checkpoint is None else True,
        )
    except RuntimeError as e:
        clear = explained(e, str(checkpoint))
        if clear is e:
            raise
        raise clear from e
    except Preempted:
        raise
    except SystemExit:
        if run.trainer.interrupted:
            raise KeyboardInterrupt from None
        raise


def _last_checkpoint(trainer: Trainer) -> str | None:
    folder = checkpoint_folder(trainer)
    saved = [one.path for one in checkpoints.listed(folder) if not one.problem] if folder is not None else []
    return str(saved[-1]) if saved else None


def summary(config: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """What the end of a run says on the terminal."""
    run_dir = config["run"]["dir"]
    metrics = result["metrics"]
    rows = [("steps", f"{result['steps']:,} ({units.count(result['tokens'])} tokens)")]
    names = {
        "val/loss": "nats per token",
        "val/perplexity": "",
        "val/bits_per_byte": "",
        "train/loss": "nats per token, last update",
    }
    rows += [(name, f"{metrics[name]:.4f} {unit}".rstrip()) for name, unit in names.items() if name in metrics]
    if result["checkpoint"]:
        rows.append(("checkpoint", result["checkpoint"]))
    logger = config.get("logger")
    logged = not config["trainer"].get("fast_dev_run")
    if logged and isinstance(logger, Mapping) and str(logger.get("_target_", "")).endswith("TensorBoardLogger"):
        rows.append(("curves", f"tensorboard --logdir {run_dir}"))
    if result["checkpoint"]:
        rows.append(("text", f'lit-pretrain generate run={run_dir} prompt="..."'))
    width = max(len(name) for name, _ in rows)
    lines = [f"\nlit-pretrain: finished in {units.duration(result['seconds'])}"]
    return "\n".join([*lines, *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _keep_configuration(config: Mapping[str, Any], path: Path) -> None:
    """Write the configuration, where the command line has not done so: callbacks and ``generate`` read it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
        os.replace(draft, path)


def _write(result: Mapping[str, Any], path: Path) -> None:
    """Write strict JSON, complete or not at all; values that JSON has no word for become null."""
    metrics = {k: v if math.isfinite(v) else None for k, v in result["metrics"].items()}
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({**result, "metrics": metrics}, indent=2) + "\n", encoding="utf-8")
    os.replace(draft, path)
