"""What the model computes: documents, precision, dropout, checkpointing, compilation."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lit_pretrain.errors import ConfigError
from lit_pretrain.models import GPT, RMSNorm
from lit_pretrain.specs import GPTConfig

GPT2: dict[str, Any] = {"vocab_size": 61, "block_size": 24, "n_layer": 2, "n_head": 4, "n_embd": 32, "init_std": 0.3}
LLAMA = GPT2 | {
    "position": "rope",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "n_kv_head": 2,
    "tie_embeddings": False,
    "qk_norm": True,
}
FAMILIES = pytest.mark.parametrize("kwargs", [GPT2, LLAMA], ids=["gpt2", "llama"])


def batch(config: GPTConfig, *, rows: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (rows, config.block_size), generator=generator)


def gradients(model: GPT, ids: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    sums = model.loss(model(ids, **kwargs), ids)
    (sums.nll_sum + sums.z_loss_sum).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@FAMILIES
def test_documents_in_one_row_equal_documents_alone(kwargs: dict[str, Any]) -> None:
    model = GPT(GPTConfig(**kwargs)).double()
    ids = batch(model.config)
    lengths = (1, 9, 14)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    documents = torch.cat([torch.full((n,), 7 + i) for i, n in enumerate(lengths)]).expand(2, -1)
    together = model(ids, positions, documents)
    alone = torch.cat([model(part) for part in ids.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    assert (together - model(ids)).abs().max() > 1e-3  # without isolation the result is another


@FAMILIES
def test_no_token_sees_a_later_one(kwargs: dict[str, Any]) -> None:
    model = GPT(GPTConfig(**kwargs)).double()
    ids = batch(model.config)
    changed = ids.clone()
    changed[:, 10] = (ids[:, 10] + 1) % model.config.vocab_size
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=1e-13)
    assert ((before[:, 10:] - after[:, 10:]).abs().amax(dim=(0, 2)) > 1e-6).all()


def test_rotary_attention_depends_on_distances_only() -> None:
    model = GPT(GPTConfig(**(LLAMA | {"block_size": 48}))).double()
    ids = batch(model.config)[:, :20]
    shifted = model(ids, torch.arange(20).expand(2, -1) + 28)
    # Angles are rounded to float32: at most 48 radians x 2^-24 each.
    torch.testing.assert_close(shifted, model(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", ["selective", "full"])
@FAMILIES
def test_checkpointing_changes_no_gradient_and_repeats_dropout(kwargs: dict[str, Any], mode: Any) -> None:
    config = GPTConfig(**(kwargs | {"dropout": 0.3, "z_loss": 1e-2}))
    plain, checkpointed = GPT(config).double(), GPT(config, activation_checkpointing=mode).double()
    assert plain.state_dict().keys() == checkpointed.state_dict().keys()
    ids = batch(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = gradients(plain, ids)
        torch.manual_seed(5)
        got = gradients(checkpointed, ids)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-12, atol=1e-12)


class _Kept:
    """Elements that backward will find stored."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        self.storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor


def test_full_checkpointing_keeps_the_least() -> None:
    kept = {}
    for mode in ("none", "full"):
        model = GPT(GPTConfig(**(GPT2 | {"n_layer": 4})), activation_checkpointing=mode)  # type: ignore[arg-type]
        meter = _Kept()
        with torch.autograd.graph.saved_tensors_hooks(meter.pack, lambda tensor: tensor):
            model(batch(model.config))
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept[mode] = sum(size for key, size in meter.storages.items() if key not in weights)
    assert kept["full"] < kept["none"] / 3


class _Calls(TorchDispatchMode):
    """How often each operation really ran; what a checkpoint hands back from memory is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_repeats_no_matrix_product() -> None:
    counts = {}
    for mode in ("none", "selective", "full"):
        model = GPT(GPTConfig(**GPT2), activation_checkpointing=mode)  # type: ignore[arg-type]
        ids = batch(model.config)
        with _Calls() as calls:
            model(ids).sum().backward()
        counts[mode] = calls.count
    for name in ("addmm", "mm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert counts["selective"][name] == counts["none"][name] > 0, name
    assert counts["selective"]["gelu"] == 2 * counts["none"]["gelu"]
    # Six linear layers in each of two blocks; recomputation stops early, before the last of a block.
    assert counts["none"]["addmm"] == 12
    assert counts["full"]["addmm"] == 12 + 10


@FAMILIES
def test_dropout_is_off_in_evaluation_and_random_in_training(kwargs: dict[str, Any]) -> None:
    model = GPT(GPTConfig(**(kwargs | {"dropout": 0.2})))
    without = GPT(GPTConfig(**kwargs))
    ids = batch(model.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert not torch.equal(model(ids), model(ids))
    torch.testing.assert_close(model.eval()(ids), without(ids))


@FAMILIES
def test_autocast_trains_close_to_float32(kwargs: dict[str, Any]) -> None:
    model = GPT(GPTConfig(**(kwargs | {"init_std": None})))
    ids = batch(model.config)
    exact = gradients(model, ids)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = model.loss(model(ids), ids)
    sums.nll_sum.backward()
    assert sums.nll_sum.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        if name.endswith("k_proj.bias"):
            continue  # its true gradient is zero: softmax does not feel a constant added to all keys
        similarity = torch.cosine_similarity(parameter.grad.flatten(), exact[name].flatten(), dim=0)
        assert similarity > 0.98, name


@FAMILIES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_model_stays_close_to_the_same_weights_in_float64(kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    config = GPTConfig(**(kwargs | {"init_std": None}))
    low = GPT(config).to(dtype)
    exact = GPT(config).double()
    exact.load_state_dict({name: value.double() for name, value in low.state_dict().items()})
    ids = batch(config)
    hidden = low(ids)
    assert hidden.dtype == dtype
    # Hidden states have unit scale after the norm; rounding errors of a dozen operations add up at random.
    assert (hidden.double() - exact(ids)).pow(2).mean().sqrt() < 6 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_of_16_bit_input_is_rounded_once(dtype: torch.dtype) -> None:
    norm = RMSNorm(64, eps=1e-5)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
    norm = norm.to(dtype)
    # Squares of 300 overflow float16, and eps vanishes in it.
    x = (300.0 * torch.randn(5, 64, generator=torch.Generator().manual_seed(1))).to(dtype)
    x[0] = 1e-3
    wide, weight = x.double(), norm.weight.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    # Half a unit in the last place, and a little for float32 on the way.
    torch.testing.assert_close(norm(x).double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-7)


def test_rms_norm_gradients_equal_finite_differences() -> None:
    norm = RMSNorm(6, eps=1e-3).double()
    generator = torch.Generator().manual_seed(0)
    nn.init.normal_(norm.weight, generator=generator)
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,))
    expected = torch.autograd.grad(nn.functional.rms_norm(x, (6,), norm.weight, 1e-3).sin().sum(), (x, norm.weight))
    got = torch.autograd.grad(norm(x).sin().sum(), (x, norm.weight))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kwargs", [{"activation_checkpointing": "some"}, {"loss_chunk_size": 0}], ids=str)
def test_bad_settings_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        GPT(GPTConfig(**GPT2), **kwargs)


@FAMILIES
def test_a_sequence_longer_than_the_block_is_refused(kwargs: dict[str, Any]) -> None:
    model = GPT(GPTConfig(**kwargs))
    with pytest.raises(ConfigError, match=r"25 tokens is longer than model\.block_size=24"):
        model(torch.zeros(1, 25, dtype=torch.int64))


@FAMILIES
def test_a_model_can_be_copied_and_pickled_after_use(kwargs: dict[str, Any]) -> None:
    model = GPT(GPTConfig(**kwargs))
    ids = batch(model.config)
    size = len(pickle.dumps(model))
    expected = model(ids)
    assert len(pickle.dumps(model)) == size  # no table of angles travels along
    assert torch.equal(copy.deepcopy(model)(ids), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids), expected)


@FAMILIES
def test_training_works_after_inference_mode(kwargs: dict[str, Any]) -> None:
    model = GPT(GPTConfig(**kwargs))
    ids = batch(model.config)
    with torch.inference_mode():
        model.loss(model(ids), ids)
    assert gradients(model, ids)


def test_padding_stays_zero_through_training_with_weight_decay() -> None:
    model = GPT(GPTConfig(**LLAMA))
    before = model.wte.weight[60].clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for seed in range(3):
        gradients(model, batch(model.config, seed=seed))
        optimizer.step()
    assert model.head is not None
    for weight in (model.wte.weight, model.head.weight):
        assert weight.shape[0] == 64
        assert torch.equal(weight[61:], torch.zeros(3, 32))
    assert not torch.equal(model.wte.weight[60], before)


@pytest.mark.slow
@FAMILIES
def test_compiled_blocks_give_the_same_without_a_graph_break(kwargs: dict[str, Any]) -> None:
    # backend="aot_eager" traces forward and backward as the default one does, and needs no C++ compiler.
    model = GPT(GPTConfig(**kwargs)).double()
    ids = batch(model.config)
    expected = gradients(model, ids)
    torch._dynamo.reset()
    try:
        for block in model.blocks.values():
            block.compile(backend="aot_eager", fullgraph=True)
        got = gradients(model, ids)
    finally:
        torch._dynamo.reset()
    assert got.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-11)
