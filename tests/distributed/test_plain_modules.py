"""LightningModules that know nothing of strategies, under sharding and tensor parallelism."""

from __future__ import annotations

import pytest
import torch

from lit_pretrain.distributed import state
from lit_pretrain.specs import ParallelPlan
from lit_pretrain.strategies import HybridParallelStrategy, TensorParallelStrategy, ZeROStrategy
from tests.support.parity import BOUND
from tests.support.plain import Classifier, Dealt, loader, trainer

PLAN = ParallelPlan(tensor_parallel={"layers.*.up": "column", "layers.*.down": "row"}, units=("layers.*",))


def weights(module):
    return {name: state.whole(p) for name, p in module.named_parameters()}


def close(got, want):
    greatest = max([1.0, *(float(w.abs().max()) for w in want.values())])
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert float((got[name] - value).abs().max()) <= BOUND * greatest, name


def fit_classifier(strategy, devices, batch_size):
    """Every loop of Lightning's, with accumulation, clipping, groups, a scheduler and a monitor."""
    module = Classifier(width=8)
    run = trainer(
        strategy,
        devices=devices,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.3,
        use_distributed_sampler=True,
    )
    run.fit(module, datamodule=Dealt(48, batch_size=batch_size, held_out=24))
    validated = {k: float(v) for k, v in run.callback_metrics.items()}
    tested = run.test(module, loader(20, batch_size=2), verbose=False)[0]
    predicted = run.predict(module, loader(12, batch_size=3))
    return {
        "weights": weights(module),
        "val": validated,
        "test": tested,
        "predicted": torch.cat(predicted).tolist(),
        "rates": module.rates,
        "seen": module.seen,
        "steps": run.global_step,
    }


def classify(cases):
    out = []
    for kind, settings, devices, batch_size in cases:
        kinds = {"zero": ZeROStrategy, "tp": TensorParallelStrategy, "hybrid": HybridParallelStrategy}
        out.append(fit_classifier(kinds[kind](**settings), devices, batch_size))
    return out


def test_a_plain_module_under_every_layout(ranks):
    """Every loop runs, and equals one process; ranks of one tensor-parallel group read the same rows."""
    want = fit_classifier("auto", 1, 8)
    cases = [("zero", {"stage": s}, 2, 4) for s in range(4)] + [("tp", {"plan": PLAN}, 2, 8)]
    for rank, results in enumerate(ranks(2, classify, cases)):
        for case, got in zip(cases, results, strict=True):
            close(got["weights"], want["weights"])
            assert got["steps"] == want["steps"] == 6
            assert got["rates"] == want["rates"][: len(got["rates"])]
            assert got["val"]["val_loss"] == pytest.approx(want["val"]["val_loss"], rel=1e-6)
            assert got["test"]["val_loss"] == pytest.approx(want["test"]["val_loss"], rel=1e-6)
            assert got["test"]["val_rows"] == 20
            if case[0] == "zero":
                assert got["seen"][:4] == want["seen"][rank:8:2]  # as a DistributedSampler deals them out
                assert got["predicted"] == want["predicted"][rank::2]
            else:
                assert got["seen"] == want["seen"]
                assert got["predicted"] == want["predicted"]


def injected(kind):
    """Rows that this rank trained on, with a loader that knows nothing of ranks."""
    module = Classifier(width=8)
    strategy = ZeROStrategy(3) if kind == "zero" else TensorParallelStrategy(plan=PLAN)
    trainer(strategy, devices=2, use_distributed_sampler=True).fit(module, loader(16, batch_size=2, shuffle=True))
    return module.seen


def test_lightning_deals_a_plain_loader_out_by_data_parallel_rank(ranks):
    """Without `is_distributed` no sampler comes, and every rank trains on everything."""
    everything = sorted(loader(16, batch_size=16).dataset.tensors[0][:, 0].double().tolist())
    first, second = ranks(2, injected, "zero")
    assert len(first) == len(second) == 8
    assert sorted(first + second) == pytest.approx(everything)
    first, second = ranks(2, injected, "tp")
    assert first == second
    assert sorted(first) == pytest.approx(everything)
