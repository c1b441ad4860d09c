"""What a run was made of, and how it ended, in its TensorBoard folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lit_pretrain.callbacks.order import Order
from lit_pretrain.errors import ConfigError


class RunRecord(Callback):
    """Writes the resolved configuration at the start and the final metrics at the end.

    In TensorBoard: the configuration as text (``config``), every leaf of it as a hyper-parameter, and at the end the
    ``final/...`` scalars that its table of hyper-parameters shows. All through the logger's own writer, so there is one
    event file. The table's columns are fixed when the run starts, since TensorBoard reads only the first description;
    a run that dies keeps its row. Other loggers get the flattened hyper-parameters and the final metrics.

    Args:
        config: Plain containers, or a YAML file to read at the start.
        metrics: Names of logged metrics whose last value belongs to the record.

    Raises:
        ConfigError: When the YAML file cannot be read, before the first step.
    """

    order: ClassVar[int] = Order.STATISTICS

    def __init__(
        self, config: Mapping[str, Any] | str | Path, *, metrics: Sequence[str] = ("val/loss", "train/loss")
    ) -> None:
        if isinstance(metrics, str):
            raise ConfigError(f"callbacks.record.metrics={metrics!r} must be a list of names.")
        self.config = config
        self.metrics = list(metrics)
        self._end: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the record before Lightning writes the module's own hyper-parameters: the first description counts."""
        if stage != "fit":
            return
        from torch.utils.tensorboard.summary import hparams  # loads TensorBoard, which other users of this room spare

        tree = self._read()
        flat = flatten(tree)
        for logger in trainer.loggers:
            if not isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(flat)
            elif trainer.is_global_zero:
                text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
                board = logger.experiment
                board.add_text("config", "\n".join("    " + line for line in text.splitlines()))
                columns = {f"final/{name}": 0.0 for name in self.metrics}
                experiment, start, self._end = hparams(dict(flat), columns)  # type: ignore[no-untyped-call]
                for summary in (experiment, start):
                    board.file_writer.add_summary(summary)
                board.flush()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the final metrics and close the record."""
        known = trainer.callback_metrics
        final = {f"final/{name}": float(known[name]) for name in self.metrics if name in known}
        for logger in trainer.loggers:
            if final:
                logger.log_metrics(final, step=trainer.global_step)
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero and self._end is not None:
                logger.experiment.file_writer.add_summary(self._end)
                logger.experiment.flush()

    def _read(self) -> Any:
        if isinstance(self.config, Mapping):
            return plain(self.config)
        try:
            return plain(yaml.safe_load(Path(self.config).read_text(encoding="utf-8")) or {})
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(
                f"callbacks.record.config={str(self.config)!r} cannot be read as YAML: {error}"
            ) from error


def plain(value: Any) -> Any:
    """The same tree in types that YAML knows: anything else becomes its text."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return str(value)


def flatten(tree: Any, prefix: str = "") -> dict[str, bool | int | float | str]:
    """One entry per leaf: ``{"a": {"b": [1, None]}}`` is ``{"a.b.0": 1, "a.b.1": "None"}``.

    Values are what TensorBoard takes: numbers and text. None, empty containers and numbers that are not finite, which
    its table cannot hold, are text; so are whole numbers beyond 2^53, which it would round.
    """
    if isinstance(tree, Mapping) and tree:
        return {k: v for key, value in tree.items() for k, v in flatten(value, f"{prefix}{key}.").items()}
    if isinstance(tree, (list, tuple)) and tree:
        return {k: v for i, value in enumerate(tree) for k, v in flatten(value, f"{prefix}{i}.").items()}
    name = prefix.removesuffix(".")
    if not name:
        return {}
    if isinstance(tree, torch.Tensor) or not isinstance(tree, (bool, int, float, str)):
        return {name: str(tree)}
    exact = isinstance(tree, (bool, str)) or (math.isfinite(tree) and abs(tree) <= 2**53)
    return {name: tree if exact else str(tree)}
