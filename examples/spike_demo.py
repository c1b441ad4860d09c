"""The demo's second act: a window of poisoned data, once left alone and once rolled back, and a picture of both.

``python examples/spike_demo.py --out outputs/demo-spike`` trains a small GPT twice on the default corpus; in the window
every target is replaced by a wrong one. The second run has ``LossSpikeRollback`` among its callbacks and nothing else
that differs. Both log into TensorBoard, and ``spike.png`` shows the two curves; it is in TensorBoard, too.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import matplotlib as mpl
from lightning.pytorch.loggers import TensorBoardLogger

from lit_pretrain import units
from lit_pretrain.callbacks import (
    ExactResume,
    GradientClipping,
    LossSpikeRollback,
    Order,
    RunCounters,
    TensorBoardContinuation,
    WarmupCosine,
    sort_callbacks,
)
from lit_pretrain.corpus import DefaultCorpus
from lit_pretrain.data import TokenDataModule
from lit_pretrain.module import GPTModule
from lit_pretrain.specs import GPTConfig
from lit_pretrain.spikes import RobustRule, RollbackPolicy

VOCABULARY, LENGTH, ROWS = 2048, 128, 8
UPDATES = 190
POISON = range(120, 140)  # updates whose targets are wrong


class PoisonedData(TokenDataModule):
    """In the window every target is another token: the mirror image of the right one in the vocabulary."""

    def read_train(self, position: int) -> dict[str, Any]:
        """One microbatch."""
        batch = super().read_train(position)
        if batch["index"] in POISON:
            batch["targets"] = VOCABULARY - 1 - batch["targets"]
        return batch


class Curve(pl.Callback):
    """The loss of every update; an update that is made again replaces what it was."""

    order = Order.ROLLBACK - 1  # before a rollback changes the number of the update in progress

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note it."""
        self.losses = {step: loss for step, loss in self.losses.items() if step < trainer.global_step}
        self.losses[trainer.global_step] = float(trainer.callback_metrics["train/loss"])


def train(out: Path, name: str, *, rolls_back: bool, cache_dir: str) -> tuple[dict[int, float], str]:
    """One run; its curve, and what its ledger says."""
    pl.seed_everything(1, verbose=False)
    curve = Curve()
    rollback = LossSpikeRollback(
        RobustRule(patience=3),
        monitor="train/loss",
        every_n_steps=10,
        policy=RollbackPolicy(distance=20),
        ledger=out / name / "spikes.jsonl",
    )
    callbacks: list[Any] = [
        ExactResume(),
        WarmupCosine(warmup_steps=20, total_steps=UPDATES),
        GradientClipping(1.0, non_finite="ignore"),
        RunCounters(),
        TensorBoardContinuation(),
        curve,
        *([rollback] if rolls_back else []),
    ]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=UPDATES,
        callbacks=sort_callbacks(callbacks),
        logger=TensorBoardLogger(out, name=name, version=""),
        log_every_n_steps=1,
        limit_val_batches=0,
        default_root_dir=out / name,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    config = GPTConfig(
        vocab_size=VOCABULARY,
        block_size=LENGTH,
        n_layer=4,
        n_head=4,
        n_embd=128,
        ffn_hidden_size=344,
        position="rope",
        norm="rmsnorm",
        mlp="swiglu",
        bias=False,
        qk_norm=True,
    )
    data = PoisonedData(
        DefaultCorpus(
            domains=["code", "english"], vocab_size=VOCABULARY, validation_fraction=0.05, cache_dir=cache_dir
        ),
        sequence_length=LENGTH,
        micro_batch_size=ROWS,
        global_batch_size=ROWS,
        seed=1,
    )
    trainer.fit(GPTModule(config, seed=1), datamodule=data)
    said = "; ".join(f"update {e.spike} taken back to {e.step}" for e in rollback.ledger.entries)
    return curve.losses, said


def draw(out: Path, alone: dict[int, float], rolled_back: dict[int, float]) -> None:
    """The picture, as a file and in TensorBoard."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt  # needs the backend chosen

    figure, axes = plt.subplots(figsize=(8, 4.5), constrained_layout=True)
    axes.axvspan(POISON.start + 1, POISON.stop, color="0.88", label="poisoned data")
    axes.plot(list(alone), list(alone.values()), color="tab:red", linewidth=1.2, label="left alone")
    axes.plot(list(rolled_back), list(rolled_back.values()), color="tab:blue", linewidth=1.2, label="LossSpikeRollback")
    axes.set(
        xlabel="update", ylabel="training loss, nats per token", title="A poisoned window, with and without rollback"
    )
    axes.legend()
    figure.savefig(out / "spike.png", dpi=120)
    logger = TensorBoardLogger(out, name="picture", version="")
    logger.experiment.add_figure("spike", figure, global_step=0)
    logger.finalize("success")


def main() -> None:
    """Run both, draw, and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/demo-spike"))
    parser.add_argument("--cache-dir", default=os.environ.get("LIT_PRETRAIN_CACHE", "~/.cache/lit-pretrain"))
    arguments = parser.parse_args()
    began = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    alone, _ = train(arguments.out, "left-alone", rolls_back=False, cache_dir=arguments.cache_dir)
    rolled_back, said = train(arguments.out, "rolled-back", rolls_back=True, cache_dir=arguments.cache_dir)
    draw(arguments.out, alone, rolled_back)
    print(f"Rolled back: {said or 'nothing'}")
    for name, curve in (("left alone", alone), ("rolled back", rolled_back)):
        worst = max(loss for step, loss in curve.items() if step > POISON.start)
        after = [loss for step, loss in curve.items() if POISON.stop < step <= POISON.stop + 20]
        mean = sum(after) / len(after)
        print(f"  {name:<12} worst loss {worst:.2f}; 20 updates after the window {mean:.2f}; end {curve[UPDATES]:.2f}")
    print(f"The picture is {arguments.out / 'spike.png'}; took {units.duration(time.monotonic() - began)}.")


if __name__ == "__main__":
    main()
