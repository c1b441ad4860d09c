"""The processes of a strategy, started in each way a user may start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch
import lightning.pytorch as pl
from torch import nn
import lit_pretrain.strategies
from lit_pretrain.strategies import ZeROStrategy

class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):  # in the rank itself: after spawn and fork the program's own trainer has not trained
        if self.global_rank == 0:
            print("done", self.trainer.global_step, flush=True)

def main():
    pl.seed_everything(1, verbose=False)
    how = sys.argv[1]
    strategy = "zero3" if how == "name" else ZeROStrategy(3, launcher=how)
    data = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=4)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Plain(), data)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("how", ["name", "script", "spawn", "fork"])
def test_lightnings_own_launchers(tmp_path: Path, how: str) -> None:
    (tmp_path / "run.py").write_text(SCRIPT)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "run.py", how]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "done 2" in done.stdout


def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(SCRIPT)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "run.py", "name"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "done 2" in done.stdout
