"""Pipelines under a Trainer: GPTModule and a classifier as a user writes it, each against one process in float64."""

from __future__ import annotations

import copy
import functools

import lightning.pytorch as pl
import pytest
import torch

from lit_pretrain.distributed import state
from lit_pretrain.errors import ConfigError
from lit_pretrain.schedules.pipeline import SCHEDULES
from lit_pretrain.strategies import HybridParallelStrategy, PipelineParallelStrategy
from tests.support import parity
from tests.support.parity import BOUND
from tests.support.pipelined_modules import PLAN, REFUSED, Classifier, Compiled, Rows


def check(ranks, world, cases):
    size = {"layers": 4, "rows": 24}
    parity.check(ranks, world, [({"num_microbatches": 4, **s}, {**size, **model}) for s, model in cases])


def test_gpt_on_two_ranks_under_every_schedule(ranks):
    cases = []
    for i, name in enumerate(SCHEDULES):
        tied, untied = {"tied": True, "style": "llama", "accumulate": 3}, {"tied": False}
        cases.append(({"schedule": name, "pipeline_parallel_size": 2}, tied if i % 2 else untied))
    check(ranks, 2, cases)


@pytest.mark.slow
def test_gpt_on_two_ranks_the_other_half(ranks):
    cases = []
    for i, name in enumerate(SCHEDULES):
        tied, untied = {"tied": True, "style": "llama", "accumulate": 3}, {"tied": False}
        cases.append(({"schedule": name, "pipeline_parallel_size": 2}, untied if i % 2 else tied))
    check(ranks, 2, cases)


@pytest.mark.slow
def test_gpt_with_data_and_with_tensor_parallelism(ranks):
    pp = {"pipeline_parallel_size": 2}
    check(
        ranks,
        4,
        [
            # A split backward with parameters that are freed after each forward gave wrong gradients without an error.
            ({"schedule": "zero_bubble", **pp, "stage": 3}, {"accumulate": 3}),
            ({"schedule": "zbv", **pp, "tensor_parallel_size": 2}, {"accumulate": 3}),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_of_zero_under_every_schedule(ranks, stage):
    tied, accumulate = (True, 3) if stage % 2 else (False, 1)
    model = {"tied": tied, "accumulate": accumulate, "style": "gpt2" if stage > 1 else "llama"}
    check(ranks, 4, [({"schedule": s, "pipeline_parallel_size": 2, "stage": stage}, model) for s in SCHEDULES])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "dualpipev"])
def test_data_times_pipeline_times_tensor(ranks, schedule):
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "stage": 3}
    check(ranks, 8, [({"schedule": schedule, **sizes}, {"tied": tied, "style": "llama"}) for tied in (True, False)])


# -------------------------------------------------------------------- a module that knows nothing of it


def classify(settings, devices, *, module=Classifier, fast=False, accumulate=2, clip=0.2, rows=48):
    """Fit, validate, test and predict; what this rank saw of it."""
    strategy = "auto" if settings is None else HybridParallelStrategy(plan=PLAN, num_microbatches=4, **settings)
    model = module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision="64-true",
        max_epochs=2,
        accumulate_grad_batches=1 if fast else accumulate,
        gradient_clip_val=clip,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        fast_dev_run=fast,
    )
    data = Rows(rows=rows)
    trainer.fit(model, datamodule=data)
    fitted = {k: float(v) for k, v in trainer.callback_metrics.items()}
    tested = trainer.test(model, datamodule=data, verbose=False)[0]
    predicted = [p["class"] for p in trainer.predict(model, datamodule=data) or []]
    return {
        "seen": model.seen,
        "rates": model.rates,
        "order": model.order,
        "fitted": fitted,
        "tested": tested,
        "predicted": torch.cat(predicted),
        "weights": {n: state.whole(p) for n, p in model.named_parameters()},
    }


@functools.cache
def classified(accumulate=2):
    return classify(None, 1, accumulate=accumulate)


def classify_all(schedules):
    return [classify({"schedule": schedule, "pipeline_parallel_size": 2}, 2) for schedule in schedules]


def test_a_plain_module(ranks):
    want = classified()
    outputs = ranks(2, classify_all, ["gpipe", "interleaved_1f1b", "zbv"])
    for got in [one for output in outputs for one in output]:
        assert len(got["seen"]) == len(want["seen"]) == 12
        for mine, theirs in zip(got["seen"], want["seen"], strict=True):
            for name in ("loss", "output", "top"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-12), name
        assert got["rates"] == want["rates"]
        assert got["order"] == want["order"]  # every hook where Lightning has it
        assert got["fitted"]["accuracy"] == pytest.approx(want["fitted"]["accuracy"], rel=1e-6)
        assert got["fitted"]["val_loss"] == pytest.approx(want["fitted"]["val_loss"], rel=1e-6)
        assert got["tested"] == pytest.approx(want["tested"], rel=1e-6)
        assert torch.equal(got["predicted"], want["predicted"])
        for name, value in got["weights"].items():
            torch.testing.assert_close(value, want["weights"][name], rtol=0, atol=BOUND)


def test_unequal_numbers_of_validation_batches_neither_hang_nor_lose_rows(ranks):
    # 3 batches of 8, 8 and 6 rows over 2 data-parallel ranks: one has two, the other has one.
    outputs = ranks(4, classify, {"schedule": "1f1b", "pipeline_parallel_size": 2, "stage": 3}, 4, timeout_s=120)
    places = [0, 0, 1, 1]
    predicted = [outputs[places.index(p)]["predicted"] for p in (0, 1)]
    assert [len(p) for p in predicted] == [14, 8]
    accuracies = {round(got["fitted"]["accuracy"] * 22, 6) for got in outputs}
    assert len(accuracies) == 1
    assert accuracies.pop() == pytest.approx(round(outputs[0]["fitted"]["accuracy"] * 22))  # of all 22 rows, whole hits


def shorter(settings, devices):
    return classify(settings, devices, rows=44)


def test_a_shorter_batch_inside_a_window_keeps_the_gradients_before_it(ranks):
    # It needs a schedule of its own; when torch makes one, it clears the gradients of sharded modules.
    want = shorter(None, 1)
    for got in ranks(2, shorter, {"schedule": "zero_bubble", "pipeline_parallel_size": 2, "stage": 2}, 2):
        for name, value in got["weights"].items():
            torch.testing.assert_close(value, want["weights"][name], rtol=0, atol=BOUND)


def test_fast_dev_run(ranks):
    for got in ranks(2, dev_run, timeout_s=120):
        assert len(got["seen"]) == 1


def dev_run():
    return classify({"schedule": "dualpipev", "pipeline_parallel_size": 2}, 2, fast=True)


def refused(kind):
    try:
        classify({"pipeline_parallel_size": 2}, 2, module=REFUSED[kind][0], accumulate=1, clip=None)
    except ConfigError as error:
        return str(error)
    return "ran"


def refused_all():
    return {kind: refused(kind) for kind in REFUSED}


def test_what_a_pipeline_cannot_honour_is_refused_on_every_rank(ranks):
    first, second = ranks(2, refused_all)
    assert first == second
    for kind, (_, message) in REFUSED.items():
        assert message in first[kind], (kind, first[kind])


def other_refusals():
    out = []
    attempts = [
        ({"schedule": "zbv", "pipeline_parallel_size": 2}, Compiled),
        ({"schedule": "1f1b", "pipeline_parallel_size": 2, "layers_per_stage": [3, 3]}, Classifier),
    ]
    for settings, module in attempts:
        try:
            classify(settings, 2, module=module)
        except ConfigError as error:
            out.append(str(error))
    try:
        strategy = PipelineParallelStrategy(schedule="1f1b", num_microbatches=3, plan=PLAN)
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, logger=False, precision="64-true", max_steps=1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(Classifier(), datamodule=Rows())
    except ConfigError as error:
        out.append(str(error))
    return out


def test_layouts_that_do_not_fit_are_refused(ranks):
    for compiled, cut, rows in ranks(2, other_refusals):
        assert "torch.compile" in compiled
        assert "layers_per_stage=[3, 3] must name 2 counts" in cut
        assert "for example [2, 3]" in cut
        assert "8 rows cannot be cut into strategy.num_microbatches=3 equal parts; use 2, 4 or 8" in rows


def whole_states(settings, devices):
    """Two epochs, and the checkpoint in between as one process would have it."""
    strategy = "auto" if settings is None else HybridParallelStrategy(plan=PLAN, num_microbatches=4, **settings)
    kept = {}

    class Keep(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                weights = copy.deepcopy(trainer.strategy.lightning_module_state_dict())
                optimizer = copy.deepcopy(trainer.strategy.optimizer_state(trainer.optimizers[0]))
                kept.update(weights={n: v for n, v in weights.items() if n.startswith("net")}, optimizer=optimizer)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Keep()],
    )
    model = Classifier()
    trainer.fit(model, datamodule=Rows())
    # Load it back, scrambled before, and see that everything is as it was.
    checkpoint = trainer.strategy.broadcast({"state_dict": kept["weights"], "optimizer_states": [kept["optimizer"]]})
    before = [state.whole(p) for p in model.parameters()]
    moments = state.whole_optimizer_state(trainer.optimizers[0])["state"]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        for entry in trainer.optimizers[0].state.values():
            entry["exp_avg"].zero_()
    trainer.strategy.load_model_state_dict(checkpoint, strict=False)
    trainer.strategy.load_optimizer_state_dict(checkpoint)
    restored = all(torch.equal(a, state.whole(p)) for a, p in zip(before, model.parameters(), strict=True))
    again = state.whole_optimizer_state(trainer.optimizers[0])["state"]
    restored &= all(torch.equal(again[i]["exp_avg"], moments[i]["exp_avg"]) for i in moments)
    return kept, restored


def test_a_checkpoint_is_that_of_one_process(ranks):
    ((want, _),) = [whole_states(None, 1)]
    outputs = ranks(2, whole_states, {"schedule": "interleaved_1f1b", "pipeline_parallel_size": 2}, 2)
    assert all(restored for _, restored in outputs)
    assert outputs[1][0] == {"weights": {}, "optimizer": {}}
    got = outputs[0][0]
    assert list(got["weights"]) == list(want["weights"])
    for name, value in want["weights"].items():
        torch.testing.assert_close(got["weights"][name], value, rtol=0, atol=BOUND)
    assert [g["params"] for g in got["optimizer"]["param_groups"]] == [
        g["params"] for g in want["optimizer"]["param_groups"]
    ]
    assert [g["lr"] for g in got["optimizer"]["param_groups"]] == [g["lr"] for g in want["optimizer"]["param_groups"]]
    for index, entry in want["optimizer"]["state"].items():
        torch.testing.assert_close(got["optimizer"]["state"][index]["exp_avg"], entry["exp_avg"], rtol=0, atol=BOUND)
