"""Generation with the cache equals computing everything anew, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_pretrain.errors import ConfigError
from lit_pretrain.models import GPT, KVCache, generate, stream
from lit_pretrain.models.sampling import Sampling, draw, probabilities
from lit_pretrain.specs import GPTConfig

GPT2: dict[str, Any] = {"vocab_size": 61, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32, "init_std": 0.4}
LLAMA = GPT2 | {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "n_kv_head": 2}
FAMILIES = pytest.mark.parametrize("kwargs", [GPT2, LLAMA], ids=["gpt2", "llama"])


def build(kwargs: dict[str, Any]) -> GPT:
    return GPT(GPTConfig(**kwargs)).double()


def greedy_without_cache(model: GPT, prompt: Sequence[int], count: int) -> list[int]:
    block = model.config.block_size
    tokens, context = list(prompt), list(prompt)
    for _ in range(count):
        if len(context) > block:
            context = context[-(block // 2) :]
        logits = model.logits(model(torch.tensor([context])))[0, -1]
        token = int(logits.argmax())
        tokens.append(token)
        context.append(token)
    return tokens[len(prompt) :]


@FAMILIES
@pytest.mark.parametrize("steps", [(1,) * 16, (5, 1, 7, 3), (16,)])
def test_cached_logits_equal_uncached_ones(kwargs: dict[str, Any], steps: tuple[int, ...]) -> None:
    model = build(kwargs)
    ids = torch.randint(61, (3, 16), generator=torch.Generator().manual_seed(0))
    cache = KVCache(model.config, batch_size=3, max_length=16, dtype=torch.float64)
    with torch.no_grad():
        cached = torch.cat([model(part, cache=cache) for part in ids.split(steps, dim=1)], dim=1)
        torch.testing.assert_close(model.logits(cached), model.logits(model(ids)), rtol=0, atol=1e-10)
    assert cache.length == 16
    assert cache.layers["0"].k_BSHD.shape == (3, 16, model.config.num_kv_heads, 8)


@FAMILIES
def test_the_cache_keeps_documents_apart(kwargs: dict[str, Any]) -> None:
    model = build(kwargs)
    ids = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]).expand(2, -1)
    documents = torch.tensor([0] * 5 + [1] * 7).expand(2, -1)
    cache = KVCache(model.config, batch_size=2, max_length=12, dtype=torch.float64)
    with torch.no_grad():
        parts = zip(*(x.split((3, 4, 5), dim=1) for x in (ids, positions, documents)), strict=True)
        cached = torch.cat([model(*part, cache=cache) for part in parts], dim=1)
        torch.testing.assert_close(cached, model(ids, positions, documents), rtol=0, atol=1e-12)


@FAMILIES
def test_greedy_equals_no_cache_beyond_the_block_and_in_ragged_batches(kwargs: dict[str, Any]) -> None:
    model = build(kwargs)
    prompts = [[1, 2, 3], [7], list(range(40)), [9] * 16, [4, 8] * 7]
    with torch.no_grad():
        expected = [greedy_without_cache(model, prompt, 40) for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=40, temperature=0.0) == expected
    assert len({tuple(row) for row in expected}) == len(prompts)


@FAMILIES
def test_a_sampled_row_does_not_depend_on_its_neighbours(kwargs: dict[str, Any]) -> None:
    model = build(kwargs)
    prompts = [[1, 2, 3], [7], [9] * 16]
    together = generate(model, prompts, max_new_tokens=30, seed=3)
    for row, prompt in enumerate(prompts):
        assert generate(model, [prompt], max_new_tokens=30, seed=3 + row) == [together[row]]
    assert generate(model, prompts, max_new_tokens=30, seed=4) != together


@FAMILIES
def test_stream_gives_the_tokens_of_generate(kwargs: dict[str, Any]) -> None:
    model = build(kwargs)
    settings: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.8, "top_k": 20, "seed": 5}
    expected = generate(model, [[1, 2]], **settings)[0]
    assert list(stream(model, [1, 2], **settings)) == expected
    eos = expected[11]
    until = expected[: expected.index(eos)]
    assert list(stream(model, [1, 2], **settings, eos_id=eos)) == until
    assert generate(model, [[1, 2]], **settings, eos_id=eos) == [until]


def test_the_model_is_left_as_it_was() -> None:
    model = build(GPT2 | {"dropout": 0.5})
    first = generate(model, [[1]], max_new_tokens=10, temperature=0.0)
    assert model.training
    assert first == generate(model.eval(), [[1]], max_new_tokens=10, temperature=0.0)
    assert not model.training
    tokens = stream(model.train(), [1], max_new_tokens=10)
    next(tokens)
    assert model.training
    assert torch.is_grad_enabled()


def test_nothing_to_do() -> None:
    model = build(GPT2)
    assert generate(model, [], max_new_tokens=5) == []
    assert generate(model, [[1]], max_new_tokens=0) == [[]]


def test_a_block_of_one_token() -> None:
    model = build(GPT2 | {"block_size": 1})
    assert len(generate(model, [[1, 2]], max_new_tokens=4, seed=0)[0]) == 4


def test_padding_is_never_sampled() -> None:
    model = build(GPT2 | {"vocab_size": 3, "vocab_multiple": 64})
    with torch.no_grad():
        model.wte.weight[3:] = 100.0 * model.wte.weight[:1]
    rows = generate(model, [[0]] * 8, max_new_tokens=50, temperature=5.0, seed=0)
    assert {token for row in rows for token in row} == {0, 1, 2}


def logits_of(*p: float) -> Tensor:
    return torch.tensor([p], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), (0.5, 0.2, 0.25, 0.05)),
        (Sampling(top_k=2), (2 / 3, 0.0, 1 / 3, 0.0)),
        (Sampling(top_k=9), (0.5, 0.2, 0.25, 0.05)),
        (Sampling(top_p=0.5), (1.0, 0.0, 0.0, 0.0)),
        (Sampling(top_p=0.51), (2 / 3, 0.0, 1 / 3, 0.0)),
        (Sampling(top_p=1e-9), (1.0, 0.0, 0.0, 0.0)),
        (Sampling(top_k=3, top_p=0.7), (2 / 3, 0.0, 1 / 3, 0.0)),
        # Squares of the probabilities: .25 .04 .0625 .0025, sum .355.
        (Sampling(temperature=0.5), (0.25 / 0.355, 0.04 / 0.355, 0.0625 / 0.355, 0.0025 / 0.355)),
    ],
    ids=str,
)
def test_probabilities_by_hand(sampling: Sampling, expected: tuple[float, ...]) -> None:
    p = probabilities(logits_of(0.5, 0.2, 0.25, 0.05), sampling)
    torch.testing.assert_close(p / p.sum(), torch.tensor([expected], dtype=torch.float64), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.19, 1), (0.21, 3), (1 - 2**-53, 3)])
def test_a_draw_is_a_function_of_its_number(uniform: float, token: int) -> None:
    logits = torch.tensor([[-math.inf, math.log(0.2), -math.inf, math.log(0.8), -math.inf]])
    assert draw(logits, Sampling(), torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_sampled_frequencies_are_the_probabilities() -> None:
    n = 20_000
    uniform = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = draw(logits_of(0.5, 0.2, 0.25, 0.05).expand(n, -1), Sampling(), uniform)
    share = tokens.bincount(minlength=4) / n
    # Four standard deviations of a share near one half.
    assert (share - torch.tensor([0.5, 0.2, 0.25, 0.05])).abs().max() < 4 * 0.5 / math.sqrt(n)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": "warm"}, "temperature='warm'"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": "5"}, "top_k='5'"),
        ({"top_p": "most"}, "top_p='most'"),
        ({"seed": "abc"}, "seed='abc'"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"prompts": [[1], []]}, "Prompt 1 is empty"),
        ({"prompts": [[61]]}, "token 61, but ids run from 0 to 60"),
        ({"prompts": [[3, -1]]}, "token -1"),
    ],
    ids=str,
)
def test_bad_values_are_refused(kwargs: dict[str, Any], message: str) -> None:
    model = build(GPT2)
    settings = {"prompts": [[1]], "max_new_tokens": 1} | kwargs
    prompts = settings.pop("prompts")
    with pytest.raises(ConfigError, match=message):
        generate(model, prompts, **settings)
    with pytest.raises(ConfigError, match=message.replace("Prompt 1", "Prompt 0")):
        stream(model, prompts[-1], **settings)
