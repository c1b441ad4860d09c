"""Logits and gradients equal those of ``transformers`` for the same random weights, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_pretrain.errors import ConfigError
from lit_pretrain.models import GPT, from_hugging_face, to_hugging_face
from lit_pretrain.specs import GPTConfig, RopeScaling

transformers = pytest.importorskip("transformers")
modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")


@pytest.fixture
def float64_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaMA's norm of ``transformers`` computes in float32 whatever the dtype; here its formula in float64.

    Their angles are float32 as well, and so are ours: nothing to replace.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)


def randomise(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def gpt2(config: GPTConfig) -> nn.Module:
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.block_size,
            n_embd=config.n_embd,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_inner=config.ffn_size,
            activation_function={"gelu_tanh": "gelu_new", "gelu": "gelu"}[config.mlp],
            layer_norm_epsilon=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    return model.double().eval()


def llama(config: GPTConfig) -> nn.Module:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_base}
    scaling = config.rope_scaling
    if scaling is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_block_size,
            }
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.n_embd,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_size,
            max_position_embeddings=config.block_size,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            attention_bias=config.bias,
            mlp_bias=config.bias,
            tie_word_embeddings=config.tie_embeddings,
        )
    )
    return model.double().eval()


def assert_same(theirs: nn.Module, config: GPTConfig) -> None:
    randomise(theirs)
    ours = GPT(config).double()
    ours.load_state_dict(from_hugging_face(theirs.state_dict(), config))
    ids = torch.randint(config.vocab_size, (2, config.block_size), generator=torch.Generator().manual_seed(1))
    expected = theirs(input_ids=ids).logits
    hidden = ours(ids)
    got = ours.logits(hidden)[..., : config.vocab_size]
    # Rounding only: 1e-16 relative, grown by depth and width.
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)

    targets = ids.roll(-1, dims=1)
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    ours.loss(hidden, targets).nll_sum.backward()
    their_gradients = from_hugging_face(
        {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}, config
    )
    largest = max(g.abs().max().item() for g in their_gradients.values())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad, their_gradients[name], rtol=0, atol=1e-11 * largest, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"n_layer": 3, "n_head": 2, "n_embd": 40, "block_size": 33},
        {"tie_embeddings": False},
        {"mlp": "gelu", "ffn_hidden_size": 24},
        {"vocab_multiple": 1, "norm_eps": 1e-3},
    ],
    ids=str,
)
def test_gpt2(kwargs: dict[str, Any]) -> None:
    config = GPTConfig(**({"vocab_size": 101, "block_size": 17, "n_layer": 2, "n_head": 4, "n_embd": 32} | kwargs))
    assert_same(gpt2(config), config)


LLAMA3 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_block_size=32)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"n_kv_head": 2},
        {"n_kv_head": 1, "n_layer": 3},
        {"tie_embeddings": True, "rope_base": 500_000.0},
        {"rope_base": 100.0, "block_size": 130},
        {"head_dim": 16, "n_embd": 48, "n_head": 6, "n_kv_head": 3},
        {"rope_scaling": RopeScaling(kind="linear", factor=4.0)},
        {"rope_scaling": LLAMA3, "block_size": 128, "rope_base": 500_000.0, "n_kv_head": 2},
        {"bias": True, "norm_eps": 1e-6},
    ],
    ids=str,
)
@pytest.mark.usefixtures("float64_norm")
def test_llama(kwargs: dict[str, Any]) -> None:
    base: dict[str, Any] = {"vocab_size": 101, "block_size": 17, "n_layer": 2, "n_head": 4, "n_embd": 32}
    base |= {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "tie_embeddings": False}
    config = GPTConfig(**(base | kwargs))
    assert_same(llama(config), config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_there_and_back(kind: str, tied: bool) -> None:
    base: dict[str, Any] = {"vocab_size": 101, "block_size": 8, "n_layer": 2, "n_head": 4, "n_embd": 32}
    if kind == "llama":
        base |= {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "n_kv_head": 2}
    config = GPTConfig(**base, tie_embeddings=tied)
    state = GPT(config).state_dict()
    exported = to_hugging_face(state, config)
    theirs = (gpt2 if kind == "gpt2" else llama)(config)
    theirs.load_state_dict({name: value.double() for name, value in exported.items()}, strict=True)
    back = from_hugging_face(exported, config)
    assert back.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(back[name], value), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("transformer.h.1.ln_2.bias"), "has no 'transformer.h.1.ln_2.bias'"),
        (lambda s: s.update({"transformer.h.2.ln_1.bias": torch.zeros(32)}), "no place for"),
        (lambda s: s.update({"transformer.wpe.weight": torch.zeros(9, 32)}), r"gives \(9, 32\) for wpe.weight"),
        (lambda s: s.update({"transformer.wte.weight": torch.zeros(100, 32)}), r"gives \(100, 32\) for wte.weight"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    config = GPTConfig(vocab_size=101, block_size=8, n_layer=2, n_head=4, n_embd=32)
    state = to_hugging_face(GPT(config).state_dict(), config)
    state["transformer.h.0.attn.bias"] = torch.ones(1)  # a mask buffer of older files: ignored
    from_hugging_face(state, config)
    change(state)
    with pytest.raises(ConfigError, match=message):
        from_hugging_face(state, config)


@pytest.mark.parametrize(
    "kwargs", [{"qk_norm": True}, {"bias": False}, {"position": "rope"}, {"n_kv_head": 2}, {"norm": "rmsnorm"}], ids=str
)
def test_an_architecture_without_a_family_is_refused(kwargs: dict[str, Any]) -> None:
    config = GPTConfig(vocab_size=101, block_size=8, n_layer=1, n_head=4, n_embd=32, **kwargs)
    with pytest.raises(ConfigError, match=r"model\."):
        to_hugging_face(GPT(config).state_dict(), config)
