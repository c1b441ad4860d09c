"""A small module and callbacks that misbehave on request, found through the working directory of the command."""

import json
import os
import time

import lightning.pytorch as pl
import torch


class Toy(pl.LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.1) -> None:
        super().__init__()
        self.net = torch.nn.Linear(width, 1)
        self.lr = lr

    def training_step(self, batch, _):
        loss = self.net(batch).pow(2).mean()
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        self.log("val/loss", self.net(batch).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class ToyData(pl.LightningDataModule):
    def __init__(self, width: int = 8, micro_batch_size: int = 4) -> None:
        super().__init__()
        self.width, self.micro_batch_size = width, micro_batch_size

    def _loader(self, rows: int):
        g = torch.Generator().manual_seed(0)
        return torch.utils.data.DataLoader(torch.randn(rows, self.width, generator=g), self.micro_batch_size)

    def train_dataloader(self):
        return self._loader(4096)

    def val_dataloader(self):
        return self._loader(16)


class Witness(pl.Callback):
    """Every rank writes what it sees."""

    def on_train_start(self, trainer, pl_module):
        keys = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "PL_GLOBAL_SEED")
        seen = {
            "rank": trainer.global_rank,
            "world": trainer.world_size,
            "lr": pl_module.lr,
            "pid": os.getpid(),
            "root": str(trainer.default_root_dir),
            "weight": pl_module.net.weight.sum().item(),
            "env": {k: os.environ.get(k) for k in keys},
        }
        path = os.path.join(trainer.default_root_dir, f"witness-{trainer.global_rank}.json")
        with open(path + ".tmp", "w") as f:
            json.dump(seen, f)
        os.replace(path + ".tmp", path)


class FailOn(pl.Callback):
    """Raise, get killed or be slow, on one rank at one update."""

    def __init__(self, rank: int = -1, step: int = 1, how: str = "raise") -> None:
        self.rank, self.step, self.how = rank, step, how

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.how == "slow":
            time.sleep(0.2)
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            if self.how == "raise":
                raise RuntimeError(f"boom on rank {self.rank}")
            if self.how == "kill":
                os.kill(os.getpid(), 9)
