"""FLOPs of a token against hand computation, the model itself and published shapes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lit_pretrain.errors import ConfigError
from lit_pretrain.models import GPT
from lit_pretrain.planning import PEAK_FLOPS, count_parameters, flops_per_token, peak_flops
from lit_pretrain.specs import GPTConfig


def test_by_hand() -> None:
    config = GPTConfig(vocab_size=10, block_size=8, n_layer=3, n_head=2, n_embd=4)
    # 192 weights a block and a head of 40; attention 12 x 3 layers x width 4 x 8 keys.
    assert flops_per_token(config, 8) == 6 * (3 * 192 + 40) + 12 * 3 * 4 * 8
    # A causal kernel sees 4.5 keys on average.
    assert flops_per_token(config, 8, causal=True) == 6 * (3 * 192 + 40) + 12 * 3 * 4 * 4.5


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_equals_what_the_model_multiplies(family: str) -> None:
    llama = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "n_kv_head": 2}
    config = GPTConfig(
        vocab_size=64, block_size=16, n_layer=2, n_head=4, n_embd=32, **(llama if family == "llama" else {})
    )  # type: ignore[arg-type]
    model = GPT(config)
    ids = torch.randint(64, (3, 16))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.logits(model(ids)).sum().backward()
    assert counter.get_total_flops() == 3 * 16 * flops_per_token(config, 16)


def test_large_models_are_near_6_n() -> None:
    config = GPTConfig(vocab_size=50257, block_size=2048, n_layer=96, n_head=96, n_embd=12288)
    n = count_parameters(config).total
    # PaLM's appendix B adds 12 L H Q T = 12 x 96 x 12288 x 2048 to 6 N.
    assert flops_per_token(config, 2048) == pytest.approx(6 * n + 12 * 96 * 12288 * 2048, rel=1e-3)


def test_a_length_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="sequence_length=0"):
        flops_per_token(GPTConfig(vocab_size=10, block_size=8, n_layer=1, n_head=2, n_embd=4), 0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA GH200 480GB", 989.5e12),
        ("NVIDIA H20", 148e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA L4", 121e12),
        ("Tesla T4", 65e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA B200", 2250e12),
        ("Intel(R) Xeon(R) Processor", None),
        ("NVIDIA T400", None),
    ],
)
def test_peaks_by_the_names_that_drivers_report(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_every_name_in_the_table_finds_itself() -> None:
    for name, peak in PEAK_FLOPS.items():
        assert peak_flops(f"NVIDIA {name}") == peak
