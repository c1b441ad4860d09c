"""What somebody would write without a command line: the same model, data and logger, and Lightning's Trainer.

``python -m benchmarks.startup_script ROOT RUN_DIR``; also the callback that notes when the first step is done.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl


class FirstStep(pl.Callback):
    """Writes the time at which the first training step is done.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def on_train_batch_end(self, *_: Any) -> None:
        """Only the first time."""
        if not self._path.exists():
            self._path.write_text(repr(time.time()), encoding="utf-8")


def main(root: Path, run_dir: Path) -> None:
    """One update."""
    from lightning.pytorch.loggers import TensorBoardLogger

    from lit_pretrain.corpus import ShardFolders
    from lit_pretrain.data import TokenDataModule
    from lit_pretrain.module import GPTModule
    from lit_pretrain.optim import adamw
    from lit_pretrain.specs import GPTConfig

    pl.seed_everything(1)
    config = GPTConfig(vocab_size=2048, block_size=256, n_layer=4, n_head=4, n_embd=128, mlp="gelu")
    data = TokenDataModule(
        ShardFolders(sources={"a": root / "a", "b": root / "b"}, tokenizer=root / "tokenizer.json"),
        sequence_length=256,
        micro_batch_size=8,
        global_batch_size=8,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=TensorBoardLogger(run_dir, name="tensorboard"),
        callbacks=[FirstStep(str(run_dir / "first"))],
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=run_dir,
    )
    trainer.fit(GPTModule(config, optimizer=partial(adamw, lr=3e-4)), datamodule=data)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
