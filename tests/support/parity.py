"""One module trained by a Trainer under any strategy, and what has to come out the same: the oracle of parallelism.

The reference is the same module in one process, in float64, on the whole of every global batch.
"""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_pretrain.distributed import state
from lit_pretrain.module import GPTModule
from lit_pretrain.specs import GPTConfig
from lit_pretrain.strategies import HybridParallelStrategy, MeshStrategy

SEQUENCE, VOCABULARY = 8, 61
BOUND = 1e-12
"""Of the greatest difference, relative to the greatest value where that is above 1."""


def config(style: str, *, tied: bool, dropout: float = 0.0, layers: int = 2) -> GPTConfig:
    """``gpt2``: learned positions, LayerNorm, biases. ``llama``: rotation, RMSNorm, SwiGLU, grouped queries, QK norm,
    z-loss, and a vocabulary that no number of ranks divides."""
    shape = {"vocab_size": VOCABULARY, "block_size": SEQUENCE, "n_layer": layers, "n_head": 4, "n_embd": 16}
    if style == "gpt2":
        return GPTConfig(**shape, tie_embeddings=tied, vocab_multiple=8, dropout=dropout)
    assert style == "llama"
    return GPTConfig(
        **shape,
        n_kv_head=2 if not tied else 4,
        position="rope",
        norm="rmsnorm",
        mlp="swiglu",
        ffn_hidden_size=24,
        bias=False,
        qk_norm=True,
        z_loss=1e-3,
        vocab_multiple=1,
        tie_embeddings=tied,
        dropout=dropout,
    )


def global_batches(*, updates: int, rows: int) -> list[dict[str, torch.Tensor]]:
    """Batches of token ids and partly masked targets; masking differs from row to row."""
    g = torch.Generator().manual_seed(11)
    tokens = torch.randint(VOCABULARY, (updates * rows, SEQUENCE + 1), generator=g)
    ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    share = (torch.arange(updates * rows) % rows)[:, None] / (2 * rows)
    targets[torch.rand(targets.shape, generator=g) < share] = -100
    return [{"ids": ids[i : i + rows], "targets": targets[i : i + rows]} for i in range(0, len(ids), rows)]


class Slices(pl.LightningDataModule):
    """Each data-parallel rank reads its rows of every microbatch of every global batch."""

    def __init__(self, *, updates: int, rows: int, accumulate: int) -> None:
        super().__init__()
        self.batches, self.accumulate = global_batches(updates=updates, rows=rows), accumulate

    def _mine(self, batches: list[dict[str, torch.Tensor]]) -> Any:
        given = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"rank": 0, "num_replicas": 1})
        out = []
        for batch in batches:
            size = len(batch["ids"]) // self.accumulate // given["num_replicas"]
            for micro in range(self.accumulate):
                start = (micro * given["num_replicas"] + given["rank"]) * size
                out.append({k: v[start : start + size] for k, v in batch.items()})
        return torch.utils.data.DataLoader(out, batch_size=None)

    def train_dataloader(self) -> Any:
        return self._mine(self.batches)

    def val_dataloader(self) -> Any:
        return self._mine(self.batches[:2])


class Watch(pl.Callback):
    """Losses, norms and the gradients of the first and the last update, each gathered whole."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        gradients = {}
        for name, p in pl_module.named_parameters():
            assert p.grad is not None, name
            gradients[name] = state.whole(p.grad)
        self.gradients = [*self.gradients[:1], gradients]
        if isinstance(trainer.strategy, MeshStrategy):
            self.norms.append(trainer.strategy.global_grad_norm(list(pl_module.parameters())).item())
        else:
            self.norms.append(torch.cat([g.flatten() for g in gradients.values()]).norm().item())

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.losses):
            self.losses.append(trainer.callback_metrics["train/loss"].item())


class Wide(GPTModule):
    """Logs the loss in float64: Lightning would round it to float32."""

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        if name == "train/loss":
            self.exact = [*getattr(self, "exact", []), float(value)]
        super().log(name, value, **kwargs)


def adamw(model: torch.nn.Module) -> Optimizer:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    # A large epsilon: AdamW's first updates are otherwise the sign of a gradient, also of one that is truly zero.
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=1e-2,
        eps=1e-3,
        foreach=False,
    )


def train(
    strategy: Any,
    *,
    style: str = "gpt2",
    tied: bool = True,
    accumulate: int = 1,
    updates: int = 3,
    rows: int = 12,
    devices: int = 1,
    clip: float | None = 0.2,
    layers: int = 2,
    kind: type[Wide] = Wide,
    **settings: Any,
) -> dict[str, Any]:
    """Train; every rank calls it and gets whole results.

    Args:
        strategy: ``auto``, a strategy, or the settings of a HybridParallelStrategy.
        style: ``gpt2`` or ``llama``.
        tied: Head and embedding share a weight.
        accumulate: Microbatches per update.
        updates: Optimizer updates.
        rows: Sequences of a global batch.
        devices: Ranks.
        clip: Greatest norm.
        layers: Of the model.
        kind: Of module.
        settings: Of the Trainer.
    """
    if isinstance(strategy, dict):
        strategy = HybridParallelStrategy(**strategy)
    watch = Watch()
    module = kind(config(style, tied=tied, layers=layers), optimizer=adamw, seed=5)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[watch],
        **settings,
    )
    trainer.fit(module, datamodule=Slices(updates=updates, rows=rows, accumulate=accumulate))
    return {
        "losses": module.exact,
        "norms": watch.norms,
        "gradients": watch.gradients,
        "weights": {name: state.whole(p) for name, p in module.named_parameters()},
        "val": trainer.callback_metrics["val/loss"].item(),
        "sharded": any(isinstance(p, DTensor) for p in module.parameters()),
    }


def _exact(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def share_of(want: dict[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """Of a whole model's results those that a pipeline's rank has too."""
    names = got["weights"]
    return {
        **want,
        "weights": {n: want["weights"][n] for n in names},
        "gradients": [{n: g[n] for n in names} for g in want["gradients"]],
    }


def differences(got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """Greatest difference of losses, norms, gradients and weights, each relative to the greatest value above 1."""
    assert len(got["losses"]) == len(want["losses"])
    assert got["weights"].keys() == want["weights"].keys()
    pairs: dict[str, list[tuple[Any, Any]]] = {
        "loss": [(_exact(got["losses"]), _exact(want["losses"]))],
        "norm": [(_exact(got["norms"]), _exact(want["norms"]))],
        "gradients": [
            (mine[name], theirs[name])
            for mine, theirs in zip(got["gradients"], want["gradients"], strict=True)
            for name in theirs
        ],
        "weights": [(got["weights"][name], want["weights"][name]) for name in want["weights"]],
    }
    out = {}
    for kind, both in pairs.items():
        greatest = max([1.0, *(float(w.abs().max()) for _, w in both)])
        out[kind] = max(float((g - w).abs().max()) for g, w in both) / greatest
    return out


@functools.cache
def reference(style: str, tied: bool, accumulate: int, layers: int, rows: int) -> dict[str, Any]:
    """The same training in this process alone."""
    return train("auto", style=style, tied=tied, accumulate=accumulate, layers=layers, rows=rows)


def train_all(world: int, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """One rank's trainings, one after the other in one process."""
    return [train(strategy, devices=world, **model) for strategy, model in cases]


def check(ranks: Any, world: int, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Compare trainings under strategies with those of one process.

    Args:
        ranks: The fixture.
        world: Ranks.
        cases: Settings of a HybridParallelStrategy, and of ``train`` where they are not those of a tied GPT-2. What is
            compared with is a ``Wide``, whatever ``kind`` they name.
    """
    usual = {"style": "gpt2", "tied": True, "accumulate": 1, "layers": 2, "rows": 12}
    cases = [(strategy, {**usual, **model}) for strategy, model in cases]
    outputs = ranks(world, train_all, world, cases, timeout_s=400)
    for i, (strategy, model) in enumerate(cases):
        want = reference(**{key: value for key, value in model.items() if key != "kind"})
        assert max(want["norms"]) > 0.2  # clipping is at work
        results = [output[i] for output in outputs]
        assert set().union(*(got["weights"] for got in results)) == set(want["weights"])
        has_parts = strategy.get("pipeline_parallel_size", 1) > 1
        for got in results:
            assert (set(got["weights"]) < set(want["weights"])) == has_parts
            assert got["sharded"]
            found = differences(got, share_of(want, got))
            assert all(value <= BOUND for value in found.values()), (strategy, model, found)
            assert abs(got["val"] / want["val"] - 1) <= 1e-6  # logged as float32
