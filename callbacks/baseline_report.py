"""A run's validation loss beside what counting alone achieves."""

from __future__ import annotations

from typing import ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lit_pretrain.callbacks.order import Order
from lit_pretrain.data import NgramBaselines, TokenDataModule, ngram_baselines
from lit_pretrain.errors import ConfigError


class BaselineReport(Callback):
    """Scores unigram and bigram models on the run's own validation targets, and prints a table at the end.

    A language model that does not pass the bigram model has learned next to nothing. The bigram model is a strong one:
    modified Kneser-Ney, the better of one for all sources and one per source. In TensorBoard both stand as flat lines
    (``baseline/unigram``, ``baseline/bigram``) in nats per token, like ``val/loss``.

    Raises:
        ConfigError: Before the first step, if the data is not a ``TokenDataModule`` with held-out text.
    """

    order: ClassVar[int] = Order.STATISTICS

    def __init__(self) -> None:
        self.baselines: NgramBaselines | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count, on rank 0 alone: the others wait for it at the first collective."""
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, TokenDataModule):
            raise ConfigError(
                f"BaselineReport needs a TokenDataModule, not {type(data).__name__}; remove the callback."
            )
        if not data.validation_rows()[0].size:
            raise ConfigError("BaselineReport needs held-out text and data.corpus has none; remove the callback.")
        if trainer.is_global_zero:
            self.baselines = ngram_baselines(data)
            self._draw(trainer, step=0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table."""
        if self.baselines is not None:
            self._draw(trainer, step=trainer.global_step)
            print(self.table(trainer), flush=True)

    def _draw(self, trainer: Trainer, *, step: int) -> None:
        assert self.baselines is not None
        lines = {
            "baseline/unigram": self.baselines.unigram.nats_per_token,
            "baseline/bigram": self.baselines.bigram.nats_per_token,
        }
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_metrics(lines, step=step)

    def table(self, trainer: Trainer) -> str:
        """Nats per token and bits per byte of the model and of both counting models, per source and over all."""
        found = self.baselines
        assert found is not None
        rows = [("all sources", "", found.unigram, found.bigram)]
        if len(found.bigram_of) > 1:
            parts = [(name, f"/{name}", found.unigram_of[name], found.bigram_of[name]) for name in found.bigram_of]
            rows = [*parts, *rows]
        known = trainer.callback_metrics
        lines = ["", "held-out text          nats per token              bits per byte"]
        lines.append(f"  {'':<14}{'model':>8}{'bigram':>9}{'unigram':>9}   {'model':>8}{'bigram':>9}{'unigram':>9}")
        for name, suffix, unigram, bigram in rows:
            line = f"  {name:<14}"
            for kind, marks in (
                ("loss", (bigram.nats_per_token, unigram.nats_per_token)),
                ("bits_per_byte", (bigram.bits_per_byte, unigram.bits_per_byte)),
            ):
                own = known.get(f"val/{kind}{suffix}")
                line += f"{_number(None if own is None else float(own)):>8}"
                line += "".join(f"{_number(mark):>9}" for mark in marks) + "   "
            lines.append(line.rstrip())
        return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
