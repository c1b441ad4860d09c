"""Ordinary LightningModules for pipelines to train, and ones that a pipeline has to refuse."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lit_pretrain.specs import ParallelPlan

PLAN = ParallelPlan(blocks="net.layers", embed=("net.enter",), head=("net.leave",))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Linear, layers, linear; what stands between the layers counts too."""

    def __init__(self, *, layers: int = 5, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.leave = nn.Linear(width, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        x = self.enter(x) * scale
        for layer in self.layers:
            x = layer(x) * 1.1
        return self.leave(F.relu(x))


class Classifier(pl.LightningModule):
    """As a user writes it: knows nothing of pipelines."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = Net()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.seen: list[dict[str, float]] = []
        self.rates: list[float] = []
        self.order: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x, scale=2.0)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"top": logits.max(), "mean": logits.mean()}, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x, scale=2.0)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_epoch=True)
        loss = F.cross_entropy(logits, y)
        self.log("val_loss", loss, sync_dist=True)
        return loss

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"class": self.net(batch[0], scale=2.0).argmax(-1)}

    def configure_optimizers(self) -> Any:
        biases = [p for n, p in self.named_parameters() if n.endswith("bias")]
        rest = [p for n, p in self.named_parameters() if not n.endswith("bias")]
        optimizer = torch.optim.AdamW(
            [{"params": rest, "weight_decay": 0.1}, {"params": biases, "lr": 0.02, "weight_decay": 0.0}],
            lr=0.01,
            eps=1e-3,
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = self.trainer.callback_metrics
        self.seen.append({k: float(metrics[k]) for k in ("loss", "top", "mean")} | {"output": float(outputs["loss"])})
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.order.append("zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.order.append("before_backward")

    def on_after_backward(self) -> None:
        self.order.append("after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.order.append("step")


class Rows(pl.LightningDataModule):
    """48 rows to train on, 22 to validate: the last batch is shorter, and data-parallel ranks get unequal numbers."""

    def __init__(self, *, batch: int = 8, rows: int = 48) -> None:
        super().__init__()
        self.batch, self.rows = batch, rows

    def _loader(self, seed: int, rows: int) -> DataLoader[Any]:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, 6, generator=draw, dtype=torch.float64)
        y = torch.randint(3, (rows,), generator=draw)
        place = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"rank": 0, "num_replicas": 1})
        batches = [slice(i, i + self.batch) for i in range(0, rows, self.batch)][place["rank"] :: place["num_replicas"]]
        picked = torch.cat([torch.arange(rows)[b] for b in batches])
        return DataLoader(TensorDataset(x[picked], y[picked]), batch_size=self.batch)

    def train_dataloader(self) -> Any:
        return self._loader(1, self.rows)

    def val_dataloader(self) -> Any:
        return self._loader(2, 22)

    test_dataloader = predict_dataloader = val_dataloader


class ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Classifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Twice(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]) + self.net(-batch[0]), batch[1])


class Never(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0].sum()


class DrawsBefore(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0] + torch.randn_like(batch[0])), batch[1])


class DrawsAfter(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(F.dropout(self.net(batch[0])), batch[1])


class Counts(Classifier):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return F.cross_entropy(self.net(batch[0]), batch[1])


class NoLoss(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


class Fails(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net(batch[0])
        raise KeyError("what the user did wrong")


class Outside(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


class Compiled(Classifier):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.net.layers:
            layer.compile(backend="eager")


REFUSED: dict[str, tuple[type[Classifier], str]] = {
    "by hand": (ByHand, "automatic_optimization=False"),
    "own backward": (OwnBackward, "overrides backward"),
    "twice": (Twice, "calls self.net more than once"),
    "never": (Never, "never called self.net"),
    "draws before": (DrawsBefore, "draws random numbers before it calls self.net"),
    "draws after": (DrawsAfter, "draws random numbers after it calls self.net"),
    "counts": (Counts, "changes self.calls before it calls self.net"),
    "no loss": (NoLoss, "training_step returned None"),
    "fails": (Fails, "KeyError: 'what the user did wrong'"),
    "outside": (Outside, "Outside.more.weight is a parameter outside of Outside.net"),
}
