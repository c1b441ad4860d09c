"""Kernels that only a GPU has, against plain ones: flash attention, compiled blocks, ring attention over NCCL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_pretrain.distributed.ring_attention import gather_shards, ring_attention
from lit_pretrain.models import GPT
from lit_pretrain.models.init import init_weights
from lit_pretrain.specs import GPTConfig
from tests.support.precision_runs import RATE, ROUNDOFF, relative_error, train

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
B, H, G, T, D = 2, 4, 2, 256, 64


def inputs(dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output."""
    g = torch.Generator().manual_seed(0)
    shapes = [(B, H, T, D), (B, G, T, D), (B, G, T, D), (B, H, T, D)]
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(device, dtype) for shape in shapes]


def results(q: Any, k: Any, v: Any, grad: Any, attend: Any) -> list[torch.Tensor]:
    """Output and gradients, in float64 on the CPU."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attend(*leaves)
    return [t.detach().double().cpu() for t in (out, *torch.autograd.grad(out, leaves, grad))]


def sdpa(q: Any, k: Any, v: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def written_out(q: Any, k: Any, v: Any) -> torch.Tensor:
    """Softmax attention by its definition."""
    k, v = (t.repeat_interleave(H // G, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_flash_attention_with_grouped_queries(device: str, kind: str) -> None:
    """The kernel is forced, so that torch refuses where it cannot run."""
    given = inputs(DTYPES[kind], device)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        got = results(*given, sdpa)
    want = results(*(t.double() for t in given), written_out)
    for name, a, b in zip(("out", "q", "k", "v"), got, want, strict=True):
        # A rounding of the weights, of the output and of each result; a key's gradient adds up two query heads.
        bound = 4 * ROUNDOFF[kind] * b.abs().max().clamp(min=1)
        assert (a - b).abs().max() <= bound, name


def test_the_model_may_take_the_flash_kernel(device: str) -> None:
    """Nothing that the GPT hands to attention rules the fast kernel out; without it the forced call would raise."""
    config = GPTConfig(vocab_size=128, block_size=T, n_layer=2, n_head=H, n_embd=H * D, n_kv_head=G, position="rope")
    model = GPT(config)
    init_weights(model, seed=1)
    model.to(device)
    ids = torch.randint(128, (B, T), generator=torch.Generator().manual_seed(1)).to(device)
    losses = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend), torch.autocast(device, torch.bfloat16):
            sums = model.loss(model(ids[:, :-1]), ids[:, 1:])
        sums.nll_sum.backward()
        losses[backend] = sums.nll_sum.item() / (B * (T - 1))
    flash, plain = losses.values()
    assert abs(flash - plain) <= relative_error("bf16") * plain / math.sqrt(B * (T - 1))
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_compiled_blocks_train_like_eager_ones(accelerator: str) -> None:
    kind = "bf16"
    eager, compiled = (train("auto", kind, updates=5, accelerator=accelerator, compile=c) for c in (False, True))
    assert compiled["skipped"] == eager["skipped"] == []
    # Two runs in 16 bits, each with its own roundings.
    error = math.hypot(relative_error(kind), relative_error(kind))
    drift = math.sqrt(sum(float((compiled["weights"][n] - w).square().sum()) for n, w in eager["weights"].items()))
    assert drift <= error * RATE * math.sqrt(sum(norm**2 for norm in eager["norms"]))


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.usefixtures("one_rank")
def test_ring_attention_alone(device: str, isolated: bool) -> None:
    """A ring of one: the design's bound in float64, and rounding only in 16 bits."""
    group = dist.group.WORLD
    assert group is not None
    ids = (torch.arange(T) // 100).expand(B, -1).to(device)
    docs = gather_shards(ids, group=group) if isolated else None

    def ring(q: Any, k: Any, v: Any) -> torch.Tensor:
        return ring_attention(q, k, v, group=group, doc_ids_RBT=docs, rows=100)

    def whole(q: Any, k: Any, v: Any) -> torch.Tensor:
        if not isolated:
            return written_out(q, k, v)
        mask = (ids[:, :, None] == ids[:, None, :])[:, None] & torch.ones(T, T, dtype=torch.bool, device=device).tril()
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    given = inputs(torch.float64, device)
    for a, b in zip(results(*given, ring), results(*given, whole), strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max().clamp(min=1)
    narrow = [t.bfloat16() for t in given]
    for a, b in zip(results(*narrow, ring), results(*(t.double() for t in narrow), whole), strict=True):
        assert (a - b).abs().max() <= 4 * ROUNDOFF["bf16"] * b.abs().max().clamp(min=1)
