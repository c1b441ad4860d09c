"""A small GPT run that can be killed and resumed, and that writes down all that must not change.

Top-level functions, so that rank processes can call them. A record is a file of JSON lines per rank, written through to
the kernel line by line: it survives SIGKILL.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping

from lit_pretrain.callbacks import (
    ExactResume,
    GradientClipping,
    RunCheckpoint,
    RunCounters,
    WarmupCosine,
    sort_callbacks,
)
from lit_pretrain.corpus import ShardFolders, ShardWriter
from lit_pretrain.data import TokenDataModule
from lit_pretrain.distributed import state
from lit_pretrain.distributed.checkpoint import catalog
from lit_pretrain.module import GPTModule
from lit_pretrain.plugins import FolderCheckpointIO
from lit_pretrain.specs import GPTConfig

VOCAB, T, ROWS = 61, 8, 8  # ids, tokens per row, rows per update
UPDATES = 20  # two epochs and a bit of the third; see `corpus`


def corpus(root: Path) -> ShardFolders:
    """9 updates in an epoch, and 6 rows held out."""
    for name, tokens in (("train", 9 * ROWS * T + T), ("held", 6 * T + 1)):
        if not (root / name).exists():
            ids = np.random.default_rng(len(name)).integers(1, VOCAB, tokens)
            with ShardWriter(root / name, vocab_size=VOCAB, eos_id=0, config_hash=name) as writer:
                writer.add(ids)
    return ShardFolders(sources={"text": root / "train"}, validation={"text": root / "held"})


class Writer(Callback):
    """One line per microbatch read, update made and validation run; the state of everything random after each update.

    Last among the callbacks, so that its lines tell what the others did.
    """

    order = 1000

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def _say(self, trainer: pl.Trainer, **line: Any) -> None:
        with open(Path(self.folder) / f"rank{trainer.global_rank}.jsonl", "a") as f:
            f.write(json.dumps(line) + "\n")

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._say(trainer, start=trainer.global_step)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        index = batch["index"] if isinstance(batch, dict) else batch[0].flatten()[:2].tolist()
        self._say(trainer, read=index, step=trainer.global_step, epoch=trainer.current_epoch, batch=batch_idx)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.fit_loop._should_accumulate():
            rates = [g["lr"] for g in trainer.optimizers[0].param_groups]
            self._say(
                trainer,
                update=trainer.global_step,
                loss=float(trainer.callback_metrics["train/loss"]).hex(),
                rate=rates,
                logged_as=trainer.fit_loop.epoch_loop._batches_that_stepped,
                random=drawn(),
            )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._say(trainer, validated=trainer.global_step, loss=float(trainer.callback_metrics["val/loss"]).hex())

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._say(trainer, epoch_end=trainer.current_epoch, at=trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._say(trainer, end=trainer.global_step)


def drawn() -> list[Any]:
    """What the three generators would give next; they are not moved."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    out = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return out


class Noise(Callback):
    """Draws from python and numpy in every step, so that their states matter to the loss."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        random.random()
        np.random.rand()

    def on_validation_batch_start(self, *_: Any) -> None:
        torch.rand(3)
        random.random()


class Kill(Callback):
    """SIGKILL at one moment. ``at`` is a hook and how often it has been called (from 1), validation included."""

    order = 999

    def __init__(self, hook: str, count: int) -> None:
        self._left = count
        setattr(self, hook, self._strike)

    def _strike(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def gpt(**settings: Any) -> GPTModule:
    config = {"vocab_size": VOCAB, "block_size": T, "n_layer": 2, "n_head": 2, "n_embd": 16, "dropout": 0.2}
    return GPTModule(GPTConfig(**(config | settings)), seed=3)


def trainer(folder: str, callbacks: list[Any], **settings: Any) -> pl.Trainer:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    given = {
        "accelerator": "cpu",
        "max_steps": UPDATES,
        "accumulate_grad_batches": 2,
        "val_check_interval": 3 * settings.get("accumulate_grad_batches", 2),
        "check_val_every_n_epoch": None,
        "logger": False,
        "strategy": "ddp" if world > 1 else "auto",
    }
    return pl.Trainer(
        devices=world,
        default_root_dir=folder,
        callbacks=sort_callbacks(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **(given | settings),
    )


def seed(*, resumed: bool) -> None:
    """Different random states on every rank, and none of them that of a resumed process."""
    rank = int(os.environ.get("RANK", "0"))
    pl.seed_everything(7 + rank + 100 * resumed, verbose=False)
    random.seed(11 + rank + 100 * resumed)


def newest(folder: str) -> str | None:
    """Of folders the newest whole one; of files by name, which is enough where nothing tears them."""
    place = Path(folder) / "checkpoints"
    whole = catalog.newest(place)
    if whole is not None:
        return str(whole.path)
    found = sorted(place.glob("step-*.ckpt"))
    return str(found[-1]) if found else None


def run(
    root: str,
    folder: str,
    *,
    kill: tuple[str, int] | None = None,
    callbacks: list[Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    ckpt_path: str | None = "newest",
    accumulation: int = 2,
    dropout: float = 0.2,
    folders: bool = False,
    replicas: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train from the newest checkpoint of the folder, or from the start; give what has to be equal.

    Args:
        root: Where the shards are.
        folder: Of the run.
        kill: Hook and count at which this process kills itself.
        callbacks: Further ones.
        checkpoint: Settings of RunCheckpoint.
        ckpt_path: ``newest``, a path, or None for a run from the start.
        accumulation: Microbatches per update; their size follows.
        dropout: Probability.
        folders: Checkpoints are folders, written in the background.
        replicas: Ranks that read different rows; None for all.
        settings: Of the trainer.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = newest(folder) if ckpt_path == "newest" else ckpt_path
    seed(resumed=path is not None)
    data = TokenDataModule(
        corpus(Path(root)),
        sequence_length=T,
        micro_batch_size=ROWS // accumulation // (replicas or world),
        global_batch_size=ROWS,
    )
    counters = RunCounters()
    saver = RunCheckpoint(**({"every_n_steps": 1, "keep_last": 3} | (checkpoint or {})))
    everything = [
        saver,
        Writer(folder),
        Noise(),
        counters,
        GradientClipping(1.0),
        EarlyStopping("val/loss", patience=50),
        WarmupCosine(warmup_steps=3, total_steps=UPDATES),
        ExactResume(),
        *(callbacks or []),
    ]
    if kill is not None:
        everything.append(Kill(*kill))
    module = gpt(dropout=dropout)
    plugins = settings.pop("plugins", [FolderCheckpointIO()] if folders else None)
    fit = trainer(folder, everything, accumulate_grad_batches=accumulation, plugins=plugins, **settings)

    fit.fit(module, datamodule=data, ckpt_path=path)
    return outcome(fit, module) | {"tokens": counters.tokens, "read": counters.tokens_read, "updates": counters.updates}


def outcome(trainer: pl.Trainer, module: Any) -> dict[str, Any]:
    """This rank's weights, optimizer state and random state, as bytes and numbers."""
    stopping = [c.state_dict() for c in trainer.callbacks if isinstance(c, EarlyStopping)]
    return {
        "weights": {name: state.local(value).cpu().numpy().tobytes() for name, value in module.state_dict().items()},
        "optimizer": [
            state.local(value).cpu().numpy().tobytes()
            for values in trainer.optimizers[0].state.values()
            for value in values.values()
        ],
        "random": drawn(),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "stopping": [{k: float(v) if isinstance(v, torch.Tensor) else v for k, v in s.items()} for s in stopping],
    }


def lines(folder: str, rank: int = 0) -> list[dict[str, Any]]:
    """The record of one rank; empty when it did nothing."""
    path = Path(folder) / f"rank{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def history(folder: str, rank: int = 0) -> list[dict[str, Any]]:
    """What happened on the way to the final weights: of the lines before each resume, those of its own past.

    A resumed run says at its start how many updates it has. What an earlier process did after that has no part in the
    weights; what it did before must join with what follows without a gap or a repetition.
    """
    kept: list[dict[str, Any]] = []
    for line in lines(folder, rank):
        if "start" in line:
            at = line["start"]
            kept = [x for x in kept if _is_before(x, at)]
        else:
            kept.append(line)
    return kept


def _is_before(line: dict[str, Any], step: int) -> bool:
    if "read" in line:
        return line["step"] < step
    done = line.get("update", line.get("validated", line.get("at", line.get("end"))))
    return done <= step
