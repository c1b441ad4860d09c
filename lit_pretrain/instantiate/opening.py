"""How a run begins: what its folder needs to be enough by itself."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

TOKENIZER = "tokenizer.json"


class TokenizerCopy(Callback):
    """Copies the data's tokenizer into the run folder before the first step: a run that dies can still make text.

    Args:
        run_dir: The run folder.
    """

    order = 1

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / TOKENIZER

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy it, complete or not at all; the data is open by now."""
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        source = getattr(getattr(datamodule, "tokenizer", None), "path", None)
        if source is None or not trainer.is_global_zero:
            return
        draft = self._path.with_suffix(f".{os.getpid()}.tmp")
        shutil.copyfile(source, draft)
        os.replace(draft, self._path)
