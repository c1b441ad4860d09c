"""What Lightning's loops do around a sharded module: uneven validation, precision, inference mode, fresh starts."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lit_pretrain.callbacks import GradientClipping
from lit_pretrain.distributed import state
from lit_pretrain.errors import ConfigError
from lit_pretrain.module import GPTModule
from lit_pretrain.strategies import HybridParallelStrategy, TensorParallelStrategy, ZeROStrategy
from tests.support.parity import BOUND, Wide, adamw, config, global_batches
from tests.support.plain import Classifier, loader, trainer

BATCHES = global_batches(updates=4, rows=4)


class Stream(torch.utils.data.IterableDataset):
    """Batches of unknown number."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class Uneven(pl.LightningDataModule):
    """Rank 0 validates three batches of the first loader and one of the second; rank 1 one and two."""

    def __init__(self, *, sized):
        super().__init__()
        self.sized = sized

    def train_dataloader(self):
        return torch.utils.data.DataLoader(BATCHES[:1], batch_size=None)

    def val_dataloader(self):
        place = self.trainer.strategy.distributed_sampler_kwargs
        shares = [[BATCHES[:3], BATCHES[:1]], [BATCHES[3:], BATCHES[2:]]][place["rank"]]
        return [torch.utils.data.DataLoader(s if self.sized else Stream(s), batch_size=None) for s in shares]


class TwoLoaders(Wide):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self._evaluate(batch)
        self.log("mine", float(batch_idx), sync_dist=True, reduce_fx="max")


def validate_unevenly(stage, sized):
    module = TwoLoaders(config("gpt2", tied=True), optimizer=adamw, seed=5)
    run = trainer(ZeROStrategy(stage), devices=2, max_epochs=2)
    run.fit(module, datamodule=Uneven(sized=sized))
    # Which weights were validated is seen after one more update: nothing stale may have been left gathered.
    return {
        "val": run.callback_metrics["val/loss"].item(),
        "last": [run.callback_metrics[f"mine/dataloader_idx_{i}"].item() for i in (0, 1)],
        "weights": {n: state.whole(p) for n, p in module.named_parameters()},
    }


def uneven(cases):
    return [validate_unevenly(stage, sized) for stage, sized in cases]


def test_validation_with_other_numbers_of_batches_on_each_rank(ranks):
    """The ranks' shares together are every batch once, plus the first and the last two: against one process."""
    module = Wide(config("gpt2", tied=True), optimizer=adamw, seed=5)
    run = trainer("auto", max_epochs=2)
    everything = torch.utils.data.DataLoader([*BATCHES, BATCHES[0], *BATCHES[2:]], batch_size=None)
    run.fit(module, torch.utils.data.DataLoader(BATCHES[:1], batch_size=None), everything)
    cases = [(3, True), (3, False), (1, True)]
    for results in ranks(2, uneven, cases):
        for got in results:
            assert got["val"] == pytest.approx(run.callback_metrics["val/loss"].item(), rel=1e-6)
            assert got["last"] == [2.0, 1.0]
            for name, p in module.named_parameters():
                assert float((got["weights"][name] - p.detach()).abs().max()) <= BOUND


class Types(pl.Callback):
    """Types of weights and activations while a block runs."""

    def setup(self, trainer, pl_module, stage):
        self.seen = set()
        pl_module.layers[1].register_forward_hook(
            lambda module, args, out: self.seen.add((module.up.weight.dtype, args[0].dtype, out.dtype))
        )


def precisions(flag):
    types, module = Types(), Classifier()
    run = trainer(ZeROStrategy(3), devices=2, precision=flag, callbacks=[types])
    run.fit(module, loader(8, batch_size=4))
    kept = {p.dtype for p in module.parameters()} | {p.grad.dtype for p in module.parameters()}
    return types.seen, kept, run.precision


def precisions_of(flags):
    return [precisions(flag) for flag in flags]


def test_the_precision_flag_is_heard(ranks):
    """A plugin of the strategy's own, set before the trainer's, would make this a silent float32 run."""
    bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
    cases = (("bf16-mixed", bf16, f32), ("32-true", f32, f32), ("64-true", f64, f64))
    for results in ranks(2, precisions_of, [flag for flag, _, _ in cases]):
        for (flag, computed, kept), (seen, types, name) in zip(cases, results, strict=True):
            assert seen == {(computed, computed, computed)}
            assert types == {kept}
            assert name == flag


def step_hooks_under_inference_mode(settings):
    """Updates, with the strategy's validation hook called under inference mode before and between them, or not."""

    class Around(pl.Callback):
        def validate(self, trainer):
            if self.calls:
                with torch.inference_mode():
                    trainer.strategy.validation_step(BATCHES[2], 0)

        # Before the first step, where FSDP makes the tensors into which it gathers from then on.
        def on_train_start(self, trainer, pl_module):
            self.validate(trainer)

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.validate(trainer)

    out = []
    for calls in (False, True):
        callback = Around()
        callback.calls = calls
        module = Wide(config("llama", tied=True), optimizer=adamw, seed=5)
        run = trainer(HybridParallelStrategy(**settings), devices=2, callbacks=[callback])
        run.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))
        loops = (run.fit_loop.epoch_loop.val_loop, run.validate_loop, run.test_loop, run.predict_loop)
        assert not any(loop.inference_mode for loop in loops)
        out.append({n: state.whole(p) for n, p in module.named_parameters()})
    return out


@pytest.mark.parametrize(
    "settings", [{"stage": 3}, {"pipeline_parallel_size": 2, "num_microbatches": 4}], ids=["zero3", "pp"]
)
def test_validation_under_inference_mode_leaves_training_alone(ranks, settings):
    for without, with_it in ranks(2, step_hooks_under_inference_mode, settings):
        assert all(torch.equal(with_it[name], value) for name, value in without.items())


def clip_by_callback(strategy):
    """GradientClipping and masked targets under mixed layouts: the norm it logs, and the weights."""
    clipping = GradientClipping(0.1)
    module = Wide(config("llama", tied=False), optimizer=adamw, seed=5)
    kind = HybridParallelStrategy(**strategy) if strategy else "auto"
    run = trainer(kind, devices=2 if strategy else 1, callbacks=[clipping], log_every_n_steps=1)
    run.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))
    return run.callback_metrics.get("train/grad_norm"), {n: state.whole(p) for n, p in module.named_parameters()}


def test_our_clipping_uses_the_strategys_norm(ranks):
    _, want = clip_by_callback(None)
    for _, got in ranks(2, clip_by_callback, {"tensor_parallel_size": 2, "stage": 3}):
        for name, value in want.items():
            assert float((got[name] - value).abs().max()) <= BOUND


def fresh(strategy, on_meta):
    """Weights before the first update, and where they were while the module was built."""
    settings = {"devices": 2, "max_steps": 0, "precision": "32-true"}
    run = trainer(HybridParallelStrategy(**strategy), **settings)
    with run.init_module(empty_init=on_meta):
        module = GPTModule(config("llama", tied=False), seed=9)
    built_on = {p.device.type for p in module.parameters()}
    run.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))
    sharded = all(isinstance(p, DTensor) for p in module.parameters())
    return built_on, sharded, {n: state.whole(p) for n, p in module.named_parameters()}


def fresh_ones(cases):
    return [fresh(*case) for case in cases]


def test_initial_weights_depend_on_no_layout_nor_on_the_meta_device(ranks):
    want = dict(GPTModule(config("llama", tied=False), seed=9).named_parameters())
    tp = {"tensor_parallel_size": 2, "stage": 3}
    cases = [({"stage": 3}, True), (tp, True), (tp, False), ({"stage": 0}, True)]
    for results in ranks(2, fresh_ones, cases):
        for (_, on_meta), (built_on, sharded, got) in zip(cases, results, strict=True):
            assert built_on == ({"meta"} if on_meta else {"cpu"})
            assert sharded
            assert all(torch.equal(got[name], p.detach()) for name, p in want.items())


class Stack(pl.LightningModule):
    """Layers that can fill themselves, and nothing else."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.LayerNorm(4)

    def training_step(self, batch, batch_idx):
        raise AssertionError("never called")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fresh_stacks():
    return fresh_stack(Stack), fresh_stack(Classifier)


def fresh_stack(cls):
    run = trainer(ZeROStrategy(3), devices=2, max_steps=0, precision="32-true")
    torch.manual_seed(4)
    with run.init_module(empty_init=True):
        module = cls()
    try:
        run.fit(module, loader(8, batch_size=4))
    except ConfigError as e:
        return str(e)
    return {n: state.whole(p) for n, p in module.named_parameters()}


def test_layers_that_can_fill_themselves_start_alike_on_every_rank_and_others_are_refused(ranks):
    (first, message), (second, _) = ranks(2, fresh_stacks)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len({tuple(first[f"layers.{i}.weight"].flatten().tolist()) for i in range(3)}) == 3
    assert float(first["layers.0.weight"].abs().max()) <= 0.5  # nn.Linear: uniform within 1 / sqrt(4)
    assert torch.equal(first["norm.weight"], torch.ones(4))
    assert message.startswith("Classifier is on the meta device, but its layer itself (Classifier) has no reset_")


def masks(sequence_parallel):
    """Dropout masks of replicated and of split activations, from a model whose weights change nothing."""
    module = Wide(config("gpt2", tied=True, dropout=0.5), optimizer=adamw, seed=5)
    run = trainer(TensorParallelStrategy(2, sequence_parallel=sequence_parallel), devices=4, max_steps=1)
    torch.manual_seed(1234 + 1000 * run.global_rank)  # as if nobody had seeded the processes
    seen = {}
    block = module.model.blocks["0"]

    def note(_module, args):
        seen["embedded"] = (args[0] == 0).tolist()

    def draw(_module, _args):
        seen["inside"] = torch.rand(4).tolist()

    block.register_forward_pre_hook(note)
    # Inside attention: hooked after the layout is made, so that it draws from what the layout's own hook has set.
    run.callbacks.append(
        pl.callbacks.LambdaCallback(on_train_start=lambda *_: block.attn.register_forward_pre_hook(draw))
    )
    run.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))
    seen["after"] = torch.rand(4).tolist()
    return run.strategy.mesh.data_rank, run.strategy.mesh.coordinate("tp"), seen


def both_masks():
    return masks(False), masks(True)


def test_dropout_is_alike_where_activations_are_and_only_there(ranks):
    whole, split = zip(*ranks(4, both_masks), strict=True)
    results = {(data, tp): seen for data, tp, seen in whole}
    for data in (0, 1):
        assert results[data, 0]["embedded"] == results[data, 1]["embedded"]
        assert results[data, 0]["after"] == results[data, 1]["after"]
        assert results[data, 0]["inside"] != results[data, 1]["inside"]
    assert results[0, 0]["embedded"] != results[1, 0]["embedded"]
    results = {(data, tp): seen for data, tp, seen in split}
    assert len({str(seen["embedded"]) for seen in results.values()}) == 4  # four quarters of the activations


def continuation(strategy):
    """Tokens that follow a prompt, greedily; one token at a time cannot be split along the sequence."""
    module = Wide(config("llama", tied=False), optimizer=adamw, seed=5)
    texts = []

    class Sample(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            texts.append(pl_module.generate([1, 2, 3], max_new_tokens=5, temperature=0.0))

    run = trainer(
        HybridParallelStrategy(**strategy) if strategy else "auto", devices=2 if strategy else 1, callbacks=[Sample()]
    )
    run.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))
    return texts


def continuations(strategies):
    return [continuation(strategy) for strategy in strategies]


def test_generation_from_sharded_weights(ranks):
    want = continuation(None)
    assert len(want[0]) == 5
    for results in ranks(2, continuations, [{"stage": 3}, {"tensor_parallel_size": 2, "stage": 3}]):
        assert results == [want, want]


def unseeded():
    """A module that every rank has filled with numbers of its own."""
    torch.manual_seed(100 + torch.distributed.get_rank())
    module = Stack()
    run = trainer(ZeROStrategy(3), devices=2, max_steps=0)
    mine = module.layers[0].weight.detach().clone()
    run.fit(module, loader(8, batch_size=4))
    return mine, state.whole(module.layers[0].weight)


def test_every_rank_starts_from_rank_zeros_weights(ranks):
    (first, together), (second, also) = ranks(2, unseeded, init=True)
    assert not torch.equal(first, second)
    assert torch.equal(together, first.double())
    assert torch.equal(also, first.double())


def read_as_if_alone():
    """A loader that deals batches out by the process's rank, under tensor parallelism."""
    run = trainer(TensorParallelStrategy(2), devices=2)
    mine = BATCHES[run.global_rank :: 2]
    try:
        run.fit(GPTModule(config("gpt2", tied=True)), torch.utils.data.DataLoader(mine, batch_size=None))
    except ConfigError as e:
        return str(e)
    return "went through"


def odd_lengths(sequence_parallel):
    """Training on sequences of 7 tokens with 2 tensor-parallel ranks."""
    short = [{k: v[:, :7] for k, v in batch.items()} for batch in BATCHES]
    run = trainer(TensorParallelStrategy(2, sequence_parallel=sequence_parallel), devices=2)
    try:
        run.fit(GPTModule(config("gpt2", tied=True)), torch.utils.data.DataLoader(short, batch_size=None))
    except ConfigError as e:
        return str(e)
    return "went through"


def laid_out_twice():
    module = Stack()
    trainer(ZeROStrategy(3), devices=2, max_steps=0).fit(module, loader(8, batch_size=4))
    try:
        trainer(ZeROStrategy(2), devices=2, max_steps=0).fit(module, loader(8, batch_size=4))
    except ConfigError as e:
        return str(e)
    return "went through"


def refused():
    return read_as_if_alone(), odd_lengths(False), odd_lengths(True), laid_out_twice()


def test_what_cannot_work_is_refused_on_every_rank(ranks):
    for batches, whole, split, twice in ranks(2, refused):
        assert batches.startswith("Ranks of one tensor-parallel group read different batches; let the loader follow")
        assert whole == "went through"
        assert split.startswith("strategy.sequence_parallel=true needs sequences whose length is a multiple of")
        assert "is already sharded by another strategy" in twice
