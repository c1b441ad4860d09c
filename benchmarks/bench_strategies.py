"""A training step under our strategies and under Lightning's ModelParallelStrategy, in turns, on 2 ranks.

``python -m benchmarks.bench_strategies [--starts 3] [--rounds 5] [--out FILE]`` prints a table and exits with 1 where
one of ours takes more than 1.03 x as long. Both train the same GPT from the same weights on the same batches in float32
with the same optimizer, and shard or split the same layers: Lightning's by a ``configure_model`` as its documentation
writes it, with torch's own styles. A step is forward, backward and update as Lightning's loop runs it, without
clipping, which fails under Lightning's strategy where meshes are mixed. CPU time of both ranks is told, too: it tells
what a strategy costs from what else the machine was doing.

All contenders live in the same two processes, one thread each: first one is set up, then, from inside its
``on_train_start``, the next. Where memory happens to lie moves a step by several per cent for as long as a process
lives, so that there are several starts, each of which sets the contenders up in another order.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import Optimizer

from benchmarks.__main__ import circumstances
from benchmarks.interleave import race_here, summarise
from benchmarks.interleave import table as rows_table
from lit_pretrain.models import GPT
from lit_pretrain.optim import adamw
from lit_pretrain.specs import GPTConfig
from lit_pretrain.strategies import TensorParallelStrategy, ZeROStrategy
from tests.support.ranks import RankPool

WORLD, ROWS, LENGTH = 2, 2, 256
LIMIT = 1.03  # of Lightning's step
CONFIG = GPTConfig(
    vocab_size=4096,
    block_size=LENGTH,
    n_layer=6,
    n_head=6,
    n_embd=384,
    position="rope",
    norm="rmsnorm",
    mlp="swiglu",
    bias=False,
    tie_embeddings=False,
)
OURS = {"zero3": "zero3, ours", "tp": "tp2, ours", "sequence": "tp2 sequence, ours"}
THEIRS = {"zero3": "zero3, Lightning", "tp": "tp2, Lightning", "sequence": "tp2 sequence, Lightning"}


class Language(pl.LightningModule):
    """What a user writes around a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(CONFIG)
        self.last_loss = torch.tensor(float("nan"))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean over targets."""
        hidden = self.model(batch["ids"])
        if isinstance(hidden, DTensor):
            hidden = hidden.redistribute(placements=[Replicate()]).to_local()
        loss = self.model.loss(hidden, batch["targets"]).nll_sum / batch["targets"].numel()
        self.last_loss = loss.detach()
        return loss

    def configure_optimizers(self) -> Optimizer:
        """AdamW."""
        return adamw(self.model)


class Sharded(Language):
    """Sharded by hand, for Lightning's strategy."""

    def configure_model(self) -> None:
        """Each block, then the rest."""
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks.values():
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)


class Split(Language):
    """Split by hand, for Lightning's strategy."""

    def configure_model(self) -> None:
        """Every matrix by columns or rows; the residual stream is whole on every rank."""
        assert self.device_mesh is not None
        _split(self.model, self.device_mesh["tensor_parallel"])


class SplitSequence(Language):
    """The same, with the residual stream split along the sequence."""

    def configure_model(self) -> None:
        """Every matrix by columns or rows, and norms by tokens."""
        assert self.device_mesh is not None
        mesh = self.device_mesh["tensor_parallel"]
        _split(self.model, mesh, stream=Shard(1))
        for block in self.model.blocks.values():
            around = {
                "attn_norm": SequenceParallel(),
                "mlp_norm": SequenceParallel(),
                "attn": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
                ),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            }
            parallelize_module(block, mesh, around)
        parallelize_module(self.model, mesh, {"norm": SequenceParallel()})


def _split(model: GPT, mesh: DeviceMesh, *, stream: Any = None) -> None:
    stream = stream or Replicate()
    # The loss takes the head's rows as they are, and does not call it.
    parallelize_module(
        model,
        mesh,
        {"wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream), "head": ColwiseParallel()},
    )
    for block in model.blocks.values():
        styles: dict[str, Any] = dict.fromkeys(
            ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.gate_proj", "mlp.up_proj"), ColwiseParallel()
        )
        styles |= dict.fromkeys(("attn.o_proj", "mlp.down_proj"), RowwiseParallel(output_layouts=stream))
        parallelize_module(block, mesh, styles)


CONTENDERS: dict[str, Callable[[], tuple[pl.LightningModule, Any]]] = {
    OURS["zero3"]: lambda: (Language(), ZeROStrategy(3)),
    THEIRS["zero3"]: lambda: (Sharded(), ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)),
    OURS["tp"]: lambda: (Language(), TensorParallelStrategy(2, sequence_parallel=False)),
    THEIRS["tp"]: lambda: (Split(), ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)),
    OURS["sequence"]: lambda: (Language(), TensorParallelStrategy(2, sequence_parallel=True)),
    THEIRS["sequence"]: lambda: (SplitSequence(), ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)),
}


class Hand(pl.Callback):
    """Calls a function with a trainer that is ready to train."""

    def __init__(self, function: Callable[[pl.Trainer], None]) -> None:
        self.function = function

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hand it over."""
        self.function(trainer)


class Steps:
    """Steps of one trainer, one for each call; they begin and end together on all ranks."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer, self.done = trainer, 0
        self.cpu_s: list[float] = []
        place: dict[str, int] = trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(place["rank"])
        tokens = torch.randint(CONFIG.vocab_size, (8, ROWS, LENGTH + 1), generator=generator)
        self.batches = [{"ids": t[:, :-1].contiguous(), "targets": t[:, 1:].contiguous()} for t in tokens]

    def __call__(self) -> None:
        """Forward, backward, update."""
        dist.barrier()
        arguments = OrderedDict(batch=self.batches[self.done % len(self.batches)], batch_idx=self.done)
        loop = self.trainer.fit_loop.epoch_loop.automatic_optimization
        started = time.process_time()
        loop.run(self.trainer.optimizers[0], self.done, arguments)
        self.cpu_s.append(time.process_time() - started)
        self.done += 1
        dist.barrier()

    @property
    def loss(self) -> float:
        """Of the last step."""
        module = self.trainer.lightning_module
        assert isinstance(module, Language)
        return float(module.last_loss)


def measure(names: list[str], rounds: int, repeats: int) -> dict[str, Any]:
    """Step times of one rank.

    Args:
        names: Contenders, in the order in which they are set up.
        rounds: Each gives one figure per contender.
        repeats: Steps of every contender in a round.
    """
    result: dict[str, Any] = {}

    def set_up(names: list[str], ready: dict[str, Steps]) -> None:
        if not names:
            # Drawn by a seed, so that all ranks take the same turns.
            result["times"] = race_here(ready, rounds=rounds, repeats=repeats, threads=1)
            result["cpu"] = {name: steps.cpu_s[-rounds * repeats :] for name, steps in ready.items()}
            result["losses"] = {name: steps.loss for name, steps in ready.items()}
            result["layout"] = {name: layout(steps.trainer.lightning_module) for name, steps in ready.items()}
            return
        module, strategy = CONTENDERS[names[0]]()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=WORLD,
            strategy=strategy,
            max_steps=1,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Hand(lambda trainer: set_up(names[1:], {**ready, names[0]: Steps(trainer)}))],
        )
        trainer.fit(module, [0])

    set_up(names, {})
    return result


def layout(module: nn.Module) -> dict[str, list[int]]:
    """Shapes of the parts of weights that a rank holds between steps."""
    for part in module.modules():
        getattr(part, "reshard", lambda: None)()
    return {name: list(p.to_local().shape) for name, p in module.named_parameters() if isinstance(p, DTensor)}


def run(*, starts: int = 3, rounds: int = 5, repeats: int = 3) -> dict[str, Any]:
    """Rows of each pair, of time and of CPU time.

    Args:
        starts: Pairs of fresh processes.
        rounds: Figures of each.
        repeats: Steps of every contender in a round.

    Raises:
        RuntimeError: The two did not train the same.
    """
    names = list(CONTENDERS)
    times: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for start in range(starts):
        pool = RankPool()
        try:
            order = names[start % len(names) :] + names[: start % len(names)]
            order = order[::-1] if start % 2 else order
            ranks = pool(WORLD, measure, order, rounds, repeats, timeout_s=600.0)
        finally:
            pool.close()
        for rank in ranks:
            for key in OURS:
                ours, theirs = OURS[key], THEIRS[key]
                if abs(rank["losses"][ours] / rank["losses"][theirs] - 1) > 1e-3:
                    raise RuntimeError(f"{ours} and {theirs} trained to other losses: {rank['losses']}")
                check_layouts(ours, rank["layout"][ours], rank["layout"][theirs])
        for name in names:
            times[name] += ranks[0]["times"][name]
            cpu[name] += [sum(both) for both in zip(*(rank["cpu"][name] for rank in ranks), strict=True)]
    return {
        key: {
            kind: summarise({name: seconds[name] for name in (OURS[key], THEIRS[key])}, against=THEIRS[key])
            for kind, seconds in (("time", times), ("CPU time of both ranks", cpu))
        }
        for key in OURS
    }


def check_layouts(name: str, ours: dict[str, list[int]], theirs: dict[str, list[int]]) -> None:
    """Every weight that Lightning's strategy has cut is cut alike by ours.

    Raises:
        RuntimeError: One is not.
    """
    for key, shape in theirs.items():
        if ours.get(key) != shape:
            raise RuntimeError(f"{name} holds {ours.get(key)} of {key}, Lightning's strategy {shape}")


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    parameters = sum(p.numel() for p in GPT(CONFIG).parameters()) / 1e6
    title = f"Training step, GPT of {parameters:.1f}M parameters, {ROWS * LENGTH:,} tokens a rank"
    return "\n\n".join(
        rows_table(f"{title}, {key}, {kind}", rows) for key, kinds in figures.items() for kind, rows in kinds.items()
    )


def main() -> int:
    """Time, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_strategies", description=__doc__)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    figures = run(starts=arguments.starts, rounds=arguments.rounds, repeats=arguments.repeats)
    print(table(figures))
    if arguments.out is not None:
        report = {**circumstances(), "limit": LIMIT, "strategies": figures}
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(figures[key]["time"][OURS[key]]["ratio"] <= LIMIT for key in OURS) else 1


if __name__ == "__main__":
    from benchmarks import bench_strategies  # rank processes look for `measure` by the module's real name

    sys.exit(bench_strategies.main())
