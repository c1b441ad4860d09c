"""GPTModule in a Trainer: against a plain loop, across accumulation, through a checkpoint."""

import math
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional as F

from lit_pretrain.errors import ConfigError
from lit_pretrain.models import GPT, init_weights
from lit_pretrain.module import GPTModule
from lit_pretrain.specs import GPTConfig, RopeScaling

CONFIG = GPTConfig(vocab_size=61, block_size=16, n_layer=2, n_head=2, n_embd=16)
SGD = partial(lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr), lr=0.5)


class Rows(pl.LightningDataModule):
    """Random rows with masked targets; the protocol of our data module, by hand."""

    def __init__(self, *, rows=24, micro=4, masked=0.3, vocab_size=61, sources=("code", "english")):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, 61, (rows, 17), generator=g)
        self.ids, self.targets = tokens[:, :-1], tokens[:, 1:].clone()
        self.targets[torch.rand(self.targets.shape, generator=g) < masked] = -100
        self.source = torch.arange(rows) % 2
        self.micro, self.vocab_size, self.sequence_length = micro, vocab_size, 16
        self.source_names = list(sources)
        self.token_bytes = torch.arange(61) % 5

    def _loader(self):
        rows = [
            {"ids": i, "targets": t, "source": s} for i, t, s in zip(self.ids, self.targets, self.source, strict=True)
        ]
        return torch.utils.data.DataLoader(rows, batch_size=self.micro)

    train_dataloader = val_dataloader = test_dataloader = _loader


def trainer(**kwargs):
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**defaults, **kwargs})


def plain_nll(model, data):
    """Oracle: full logits and torch's own cross-entropy, nats per target, (N,)."""
    logits = model.logits(model(data.ids))[..., :61]
    return F.cross_entropy(logits.flatten(0, 1), data.targets.flatten(), ignore_index=-100, reduction="none")


@pytest.mark.parametrize("accumulate", [1, 3, 6])
def test_training_equals_a_plain_loop_over_global_batches(accumulate):
    data = Rows()
    module = GPTModule(CONFIG, optimizer=SGD)
    trainer(max_epochs=1, accumulate_grad_batches=accumulate, precision="64-true").fit(module, datamodule=data)

    model = GPT(CONFIG).double()
    optimizer = SGD(model)
    rows = 4 * accumulate
    for start in range(0, 24, rows):
        logits = model.logits(model(data.ids[start : start + rows]))[..., :61]
        targets = data.targets[start : start + rows]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for (name, got), want in zip(module.model.named_parameters(), model.parameters(), strict=True):
        assert (got - want).abs().max() <= 1e-12 * max(1.0, want.abs().max()), name
    assert module.trainer.callback_metrics["train/loss"].item() == pytest.approx(loss.item(), rel=1e-6)


def test_validation_is_token_weighted_per_source_and_in_bits_per_byte():
    data = Rows(micro=5)
    module = GPTModule(CONFIG)
    (metrics,) = trainer().validate(module, datamodule=data, verbose=False)
    with torch.no_grad():
        nll = plain_nll(module.model.eval(), data).view(24, 16)
    valid = data.targets >= 0
    num_bytes = data.token_bytes[data.targets.clamp(min=0)] * valid
    for name, rows in (("", slice(None)), ("/code", slice(0, None, 2)), ("/english", slice(1, None, 2))):
        mean = (nll[rows].sum() / valid[rows].sum()).item()
        assert metrics[f"val/loss{name}"] == pytest.approx(mean, rel=1e-5)
        assert metrics[f"val/perplexity{name}"] == pytest.approx(math.exp(mean), rel=1e-5)
        bits = (nll[rows].sum() / math.log(2) / num_bytes[rows].sum()).item()
        assert metrics[f"val/bits_per_byte{name}"] == pytest.approx(bits, rel=1e-5)


def test_one_source_is_reported_once():
    (metrics,) = trainer().validate(GPTModule(CONFIG), datamodule=Rows(sources=["all"]), verbose=False)
    assert set(metrics) == {"val/loss", "val/perplexity", "val/bits_per_byte"}


def test_a_source_without_held_out_text_has_no_figures():
    data = Rows(sources=["code", "english", "maths"])  # the rows are of the first two
    (metrics,) = trainer().validate(GPTModule(CONFIG), datamodule=data, verbose=False)
    assert {name.rpartition("/")[2] for name in metrics} == {"loss", "perplexity", "bits_per_byte", "code", "english"}


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = GPTModule(CONFIG, seed=5)
    torch.manual_seed(2)
    second = GPTModule(CONFIG, seed=5)
    reference = GPT(CONFIG)
    init_weights(reference, seed=5)
    for a, b, c in zip(first.parameters(), second.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert not torch.equal(first.model.wte.weight, GPTModule(CONFIG, seed=6).model.wte.weight)


def test_meta_module_gets_the_same_weights_later():
    with torch.device("meta"):
        module = GPTModule(CONFIG, seed=5)
    assert all(p.is_meta for p in module.parameters())
    module.configure_model()
    for a, b in zip(module.parameters(), GPTModule(CONFIG, seed=5).parameters(), strict=True):
        assert torch.equal(a, b)


def test_checkpoint_holds_plain_containers_and_rebuilds_the_module(tmp_path):
    config = GPTConfig(
        vocab_size=61,
        block_size=16,
        n_layer=1,
        n_head=2,
        n_embd=16,
        position="rope",
        rope_scaling=RopeScaling(kind="linear", factor=2.0),
    )
    module = GPTModule(config, seed=4)
    t = trainer(max_steps=2)
    t.fit(module, datamodule=Rows())
    t.save_checkpoint(tmp_path / "x.ckpt")
    torch.load(tmp_path / "x.ckpt", weights_only=True)
    again = GPTModule.load_from_checkpoint(tmp_path / "x.ckpt")
    assert again.config == config
    for (name, a), b in zip(module.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.slow
def test_compiling_changes_no_name():
    module = GPTModule(CONFIG, compile=True)
    trainer(max_steps=1).fit(module, datamodule=Rows())
    assert list(module.state_dict()) == list(GPTModule(CONFIG).state_dict())


def test_vocabulary_and_length_are_checked_against_the_data():
    with pytest.raises(ConfigError, match=r"model.vocab_size=61 is smaller than the data's vocabulary of 62"):
        trainer(max_steps=1).fit(GPTModule(CONFIG), datamodule=Rows(vocab_size=62))
    data = Rows()
    data.sequence_length = 32
    with pytest.raises(ConfigError, match=r"data.sequence_length=32 must be at most model.block_size=16"):
        trainer(max_steps=1).fit(GPTModule(CONFIG), datamodule=data)


def test_generate_returns_the_continuation_and_keeps_the_mode():
    module = GPTModule(CONFIG).train()
    out = module.generate([1, 2, 3], max_new_tokens=5, temperature=0.0)
    assert len(out) == 5
    assert module.model.training
    with torch.no_grad():
        logits = module.model.eval().logits(module.model(torch.tensor([[1, 2, 3]])))
    assert out[0] == int(logits[0, -1].argmax())


def test_flops_follow_the_trained_length():
    assert GPTModule(CONFIG).flops_per_token > 0


def test_predict_and_forward_give_logits():
    module = GPTModule(CONFIG)
    assert module(torch.zeros(2, 4, dtype=torch.int64)).shape == (2, 4, CONFIG.padded_vocab_size)
