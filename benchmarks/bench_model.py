"""A training step of our GPT against a plain GPT-2 loop and against the LLaMA of ``transformers``, of the same size.

Every model does forward, loss, backward and a fused AdamW update on the same ids, on the CPU in float32. They take
turns step by step in one process, so that a slow minute of the machine hits all alike; a ratio is the median over
rounds of two times of the same round. Both GPT-2s use the exact GELU.

``python -m benchmarks.bench_model`` prints a table; ``run()`` gives the figures.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.interleave import race_here, summarise
from benchmarks.interleave import table as rows_table
from lit_pretrain.models import GPT
from lit_pretrain.optim import adamw
from lit_pretrain.specs import GPTConfig


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is trained, and on how many tokens a step."""

    name: str
    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int
    batch_size: int
    block_size: int = 256
    llama_ffn: int

    def config(self, *, llama: bool) -> GPTConfig:
        """Our architecture of this size."""
        shape = {"n_layer": self.n_layer, "n_head": self.n_head, "n_embd": self.n_embd}
        shape |= {"vocab_size": self.vocab_size, "block_size": self.block_size}
        if not llama:
            return GPTConfig(**shape, mlp="gelu")
        return GPTConfig(
            **shape, position="rope", norm="rmsnorm", mlp="swiglu", bias=False, ffn_hidden_size=self.llama_ffn
        )


_SMALL = functools.partial(Size, n_layer=4, n_head=4, n_embd=128, batch_size=8, llama_ffn=344)
_LARGE = functools.partial(Size, n_layer=6, n_head=6, n_embd=384, batch_size=4, llama_ffn=1024)
SIZES = (
    _SMALL(name="1M", vocab_size=2048),
    _SMALL(name="1M, vocabulary 8192", vocab_size=8192),
    _LARGE(name="10M", vocab_size=2048),
    _LARGE(name="10M, vocabulary 8192", vocab_size=8192),
)


class PlainBlock(nn.Module):
    """GPT-2's block as everybody writes it: one projection for queries, keys and values."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after the block."""
        b, t, c = x.shape
        parts = self.qkv(self.norm_1(x)).split(c, dim=2)
        q, k, v = (part.view(b, t, self.num_heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainGPT2(nn.Module):
    """A GPT-2 with a tied head and the whole logits in memory."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab_size, size.n_embd)
        self.positions = nn.Embedding(size.block_size, size.n_embd)
        self.blocks = nn.ModuleList(PlainBlock(size.n_embd, size.n_head) for _ in range(size.n_layer))
        self.norm = nn.LayerNorm(size.n_embd)
        self.head = nn.Linear(size.n_embd, size.vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def _ours(config: GPTConfig) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    model = GPT(config)

    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        sums = model.loss(model(ids), targets)
        return (sums.nll_sum + sums.z_loss_sum) / sums.num_targets

    return model, loss


def _plain(size: Size) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    model = PlainGPT2(size)
    return model, model


def _transformers(config: GPTConfig) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.n_embd,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.block_size,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )

    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    return model, loss


def _step(*, kind: str, size: Size) -> Callable[[], None]:
    torch.manual_seed(0)
    if kind == "plain GPT-2 loop":
        model, loss = _plain(size)
    elif kind == "transformers LLaMA":
        model, loss = _transformers(size.config(llama=True))
    else:
        model, loss = _ours(size.config(llama=kind == "ours, LLaMA"))
    optimizer = adamw(model)
    ids = torch.randint(size.vocab_size, (size.batch_size, size.block_size + 1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> None:
        loss(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


OURS = ("ours, GPT-2", "ours, LLaMA")
PEERS = ("plain GPT-2 loop", "transformers LLaMA")


def run(*, rounds: int = 15, steps: int = 3, threads: int = 2, sizes: tuple[Size, ...] = SIZES) -> dict[str, Any]:
    """Figures of all sizes, ready for JSON: rows of each size, against the peer with the lower median.

    Args:
        rounds: Rounds of turns; at least 9.
        steps: Steps of a turn.
        threads: Torch threads.
        sizes: What to measure.
    """
    if rounds < 9:
        raise ValueError(f"rounds={rounds} must be at least 9")
    figures: dict[str, Any] = {}
    for size in sizes:
        contenders = {kind: _step(kind=kind, size=size) for kind in (*OURS, *PEERS)}
        times = race_here(contenders, rounds=rounds, repeats=steps, warmup=2, threads=threads)
        better = min(PEERS, key=lambda peer: statistics.median(times[peer]))
        title = (
            f"{size.name}, {size.batch_size * size.block_size:,} tokens a step, {threads} threads, ratio to {better}"
        )
        figures[title] = summarise(times, against=better)
    return figures


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    return "\n\n".join(rows_table(f"Model step, {name}", rows) for name, rows in figures.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="A training step of our GPT against its peers.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, action="append", help="which of the sizes, from 0; all by default")
    arguments = parser.parse_args()
    sizes = SIZES if arguments.size is None else tuple(SIZES[i] for i in arguments.size)
    print(table(run(rounds=arguments.rounds, threads=arguments.threads, sizes=sizes)))


if __name__ == "__main__":
    main()
