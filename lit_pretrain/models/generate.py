"""Continue prompts, with a key-value cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lit_pretrain.errors import ConfigError
from lit_pretrain.models.cache import KVCache
from lit_pretrain.models.gpt import GPT
from lit_pretrain.models.sampling import Sampling, draw

# Document ids of the padding before a short prompt, and of its tokens: attention keeps the two apart.
_PADDING, _TEXT = -1, 0


class _Decoder:
    """Next-token logits of a batch of growing sequences.

    Rows are padded on the left, so that all of them write the same slot of the cache. A row that outgrows the block
    keeps its last ``block_size // 2`` tokens and the batch is encoded anew; when that happens depends on the row
    alone, so a row's continuation does not depend on its neighbours.
    """

    def __init__(self, model: GPT, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> None:
        self.model = model
        self.device = model.wte.weight.device
        self.block_size = model.config.block_size
        self.contexts = [list(prompt) for prompt in prompts]
        self._cut()
        self.cache: KVCache | None = None
        self.cache_length = min(self.block_size, max(len(context) for context in self.contexts) + max_new_tokens)

    def _cut(self) -> bool:
        """Shorten the contexts that are too long; whether there were any."""
        keep = max(1, self.block_size // 2)
        too_long = [len(context) > self.block_size for context in self.contexts]
        self.contexts = [c[-keep:] if cut else c for c, cut in zip(self.contexts, too_long, strict=True)]
        return any(too_long)

    def append(self, tokens: Sequence[int]) -> None:
        """Add one token to each row."""
        for context, token in zip(self.contexts, tokens, strict=True):
            context.append(token)
        if self._cut():
            self.cache = None

    def logits(self) -> Tensor:
        """Logits of the next token of each row, (B, padded V)."""
        fresh = self.cache is None
        if self.cache is None:
            self.cache = self._new_cache()
        longest = max(len(context) for context in self.contexts)
        width = longest if fresh else 1
        ids, positions, docs = [], [], []
        for context in self.contexts:
            padding = max(0, width - len(context))
            new = context[-width:]
            ids.append([0] * padding + new)
            positions.append([0] * padding + list(range(len(context) - len(new), len(context))))
            docs.append([_PADDING] * padding + [_TEXT] * len(new))
        is_ragged = any(len(context) != longest for context in self.contexts)
        hidden_BTC = self.model(
            torch.tensor(ids, device=self.device),
            torch.tensor(positions, device=self.device),
            torch.tensor(docs, device=self.device) if is_ragged else None,
            cache=self.cache,
        )
        return self.model.logits(hidden_BTC[:, -1:])[:, 0]

    def _new_cache(self) -> KVCache:
        weight = self.model.wte.weight
        dtype = weight.dtype
        if torch.is_autocast_enabled(weight.device.type):
            dtype = torch.get_autocast_dtype(weight.device.type)
        return KVCache(
            self.model.config,
            batch_size=len(self.contexts),
            max_length=self.cache_length,
            device=weight.device,
            dtype=dtype,
        )


def _check(model: GPT, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int | None) -> None:
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**31) <= seed < 2**63):
        raise ConfigError(f"seed={seed!r} must be a whole number below 2^63; leave it out for other text each time.")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens={max_new_tokens!r} must be a whole number of at least 0.")
    vocab_size = model.config.vocab_size
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"Prompt {row} is empty; give at least one token, such as the end-of-text id.")
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ConfigError(
                f"Prompt {row} holds token {wrong}, but ids run from 0 to {vocab_size - 1}; use the tokenizer this "
                f"model was trained with."
            )


@torch.no_grad()
def _next_tokens(decoder: _Decoder, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    was_training = decoder.model.training
    decoder.model.eval()
    try:
        uniform_B = torch.stack([torch.rand((), generator=g, dtype=torch.float64, device="cpu") for g in generators])
        return [int(token) for token in draw(decoder.logits(), sampling, uniform_B).tolist()]
    finally:
        decoder.model.train(was_training)


def _steps(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int | None,
) -> Iterator[list[int]]:
    generators = [torch.Generator(device="cpu") for _ in prompts]
    for row, generator in enumerate(generators):
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed + row)
    decoder = _Decoder(model, prompts, max_new_tokens=max_new_tokens)
    for step in range(max_new_tokens):
        tokens = _next_tokens(decoder, sampling, generators)
        yield tokens
        if step + 1 < max_new_tokens:
            decoder.append(tokens)


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eos_id: int | None = None,
) -> list[list[int]]:
    """Continuations of prompts of any lengths, without the prompts.

    A sequence that outgrows ``block_size`` goes on from its last ``block_size // 2`` tokens. Dropout is off while a
    token is computed, and the model's mode is as before afterwards.

    Args:
        model: The GPT; where it is and in its dtype.
        prompts: Token ids, at least one each.
        max_new_tokens: Longest continuation.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Draw from the k most likely tokens only.
        top_p: Draw from the fewest tokens whose probabilities reach this sum.
        seed: Row ``i`` draws from a generator seeded with ``seed + i``; None draws differently each time.
        eos_id: A row ends before this token.

    Raises:
        ConfigError: A setting or a prompt is impossible.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    _check(model, prompts, max_new_tokens, seed)
    continuations: list[list[int]] = [[] for _ in prompts]
    if not prompts:
        return continuations
    done = [False] * len(prompts)
    for tokens in _steps(model, prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed):
        for row, token in enumerate(tokens):
            done[row] = done[row] or token == eos_id
            if not done[row]:
                continuations[row].append(token)
        if all(done):
            break
    return continuations


def stream(
    model: GPT,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eos_id: int | None = None,
) -> Iterator[int]:
    """The tokens that ``generate`` would give for one prompt, each as soon as it is drawn.

    Args:
        model: The GPT.
        prompt: Token ids, at least one.
        max_new_tokens: Longest continuation.
        temperature: As in ``generate``.
        top_k: As in ``generate``.
        top_p: As in ``generate``.
        seed: As in ``generate``.
        eos_id: The stream ends before this token.

    Raises:
        ConfigError: At the call, not at the first token.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    _check(model, [prompt], max_new_tokens, seed)
    steps = _steps(model, [prompt], max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    return _until(steps, eos_id)


def _until(steps: Iterator[list[int]], eos_id: int | None) -> Iterator[int]:
    for (token,) in steps:
        if token == eos_id:
            return
        yield token
