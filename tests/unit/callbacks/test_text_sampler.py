from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_pretrain.callbacks import TextSampler, ThroughputMonitor
from lit_pretrain.errors import ConfigError
from tests.unit.callbacks.tiny import Tiny, loader, trainer


class Letters:
    def encode(self, text):
        return [ord(c) - 97 for c in text]

    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


class Writer(Tiny):
    """Generation draws from every random source, runs the network in its current mode, and notes that mode."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.net[1].eval()  # frozen in evaluation mode by its owner
        self.modes, self.losses, self.prompts = [], [], []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        random.random()
        np.random.rand()
        return loss

    def generate(self, prompt_ids, *, max_new_tokens, temperature=1.0, top_k=None, top_p=None, seed=None, eos_id=None):
        self.modes.append([m.training for m in self.modules()])
        self.prompts.append(list(prompt_ids))
        assert not torch.is_grad_enabled()
        torch.rand(3)
        random.random()
        np.random.rand()
        self(torch.rand(2, 3))
        return [(prompt_ids[-1] + 1 + i) % 26 for i in range(max_new_tokens)]


class Grads(Callback):
    """Gradients of a window that is not over, around whatever other callbacks do."""

    def __init__(self):
        self.before = None

    def on_after_backward(self, trainer, pl_module):
        self.before = [p.grad.clone() for p in pl_module.parameters()]

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        assert all(torch.equal(a, p.grad) for a, p in zip(self.before, pl_module.parameters(), strict=True))


def run(tmp_path, *callbacks, **settings):
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = Writer(lr=0.05, dropout=0.5)
    torch.manual_seed(3)
    t = trainer(tmp_path, *callbacks, Grads(), **{"max_steps": 8, **settings})
    t.fit(model, loader(), loader())
    return model, t, (random.random(), np.random.rand(), torch.rand(1).item())


def test_training_goes_on_as_if_nothing_had_happened(tmp_path):
    plain, _, draws = run(tmp_path)
    sampled, _, draws_too = run(
        tmp_path, TextSampler(["ab"], every_n_steps=1, max_new_tokens=3, tokenizer=Letters()), accumulate_grad_batches=2
    )
    plain, _, draws = run(tmp_path, accumulate_grad_batches=2)
    assert len(sampled.modes) == 8
    assert sampled.losses == plain.losses
    assert draws == draws_too
    for p, q in zip(plain.parameters(), sampled.parameters(), strict=True):
        assert torch.equal(p, q)
    assert not any(any(modes) for modes in sampled.modes), "generation runs in evaluation mode"
    assert [m.training for m in sampled.modules()] == [m.training for m in plain.modules()]


def test_writes_text_to_tensorboard(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    sampler = TextSampler(["ab", "x"], every_n_steps=4, max_new_tokens=3, tokenizer=Letters())
    run(tmp_path, sampler, logger=logger, max_steps=9)
    assert len(list(tmp_path.glob("events*"))) == 1
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    first, second = events.Tensors("samples/0/text_summary"), events.Tensors("samples/1/text_summary")
    assert [e.step for e in first] == [4, 8, 9]
    assert first[0].tensor_proto.string_val[0] == b"    ab|cde"
    assert second[2].tensor_proto.string_val[0] == b"    x|yza"


def test_prints_without_tensorboard_and_says_so(tmp_path, capsys, caplog):
    sampler = TextSampler(["ab"], every_n_steps=4, max_new_tokens=3, tokenizer=Letters())
    with caplog.at_level("INFO"):
        run(tmp_path, sampler, logger=CSVLogger(tmp_path))
    assert capsys.readouterr().out.count("ab|cde") == 2
    assert sum("no TensorBoard logger" in r.message for r in caplog.records) == 1


def test_sampling_is_not_training_time(tmp_path):
    now = [0.0]

    class Slow(Writer):
        def generate(self, *args, **settings):
            now[0] += 1000.0
            return super().generate(*args, **settings)

        def training_step(self, batch, batch_idx):
            now[0] += 1.0
            return super().training_step(batch, batch_idx)

    monitor = ThroughputMonitor(clock=lambda: now[0], ignore_updates=0)
    sampler = TextSampler(["ab"], every_n_steps=2, max_new_tokens=3, tokenizer=Letters())
    t = trainer(tmp_path, monitor, sampler, max_steps=6)
    t.fit(Slow(), loader())
    assert t.callback_metrics["perf/step_time_s"] == 1.0


def test_fast_dev_run_takes_one_sample(tmp_path, capsys):
    model, _, _ = run(tmp_path, TextSampler(["ab"], tokenizer=Letters()), fast_dev_run=2)
    assert len(model.modes) == 1


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="Tiny has none"):
        trainer(tmp_path, TextSampler(["a"], tokenizer=Letters()), max_steps=1).fit(Tiny(), loader())
    with pytest.raises(ConfigError, match="no tokenizer"):
        trainer(tmp_path, TextSampler(["a"]), max_steps=1).fit(Writer(), loader())
    for bad in ([], [""], "abc", [1, 2], None):
        with pytest.raises(ConfigError, match="prompts="):
            TextSampler(bad)
    with pytest.raises(ConfigError, match="every_n_steps=0"):
        TextSampler(["a"], every_n_steps=0)
    with pytest.raises(ConfigError, match="temperature=-1"):
        TextSampler(["a"], temperature=-1)
    for name, value in (("temperature", float("nan")), ("top_k", 0), ("top_p", 2.0), ("top_p", 0.0)):
        with pytest.raises(ConfigError, match=f"callbacks.sampler.{name}={value}"):
            TextSampler(["a"], **{name: value})
