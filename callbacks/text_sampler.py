"""Samples of generated text while a model trains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from lit_pretrain.callbacks import _compat
from lit_pretrain.callbacks._measuring.meter import pause_timing_of
from lit_pretrain.callbacks.order import Order
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import TextGenerator


class Codec(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of token ids."""
        ...


class TextSampler(Callback):
    """Lets the model continue a few prompts and writes the text to TensorBoard (``samples/0``, ``samples/1`` ...).

    Training goes on as if nothing had happened: random states, train and eval modes and gradients are as before.
    Every rank generates, since a sharded model needs them all; rank 0 writes. Without a TensorBoard logger the text is
    printed. A last sample is taken at the end of training.

    Args:
        prompts: At least one, none empty.
        every_n_steps: Updates between samples.
        max_new_tokens: Length of a continuation.
        temperature: 0 takes the likeliest token.
        top_k: Only the k likeliest tokens; None for all.
        top_p: Only the likeliest tokens that make up this probability; None for all.
        seed: The same draws for every sample, so that a change of text is a change of the model.
        tokenizer: With ``encode`` and ``decode``, and ``eos_id`` where a text may end early; None takes the data
            module's.

    Raises:
        ConfigError: Before the first step, if the module has no ``generate`` or there is no tokenizer.
    """

    order: ClassVar[int] = Order.STATISTICS
    needs_whole_model: ClassVar[bool] = True
    """Strategies that spread layers over ranks refuse it before they start any."""

    def __init__(
        self,
        prompts: Sequence[str],
        *,
        every_n_steps: int = 500,
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        tokenizer: Codec | None = None,
    ) -> None:
        texts = isinstance(prompts, Sequence) and all(isinstance(prompt, str) and prompt for prompt in prompts)
        if isinstance(prompts, str) or not prompts or not texts:
            raise ConfigError(
                f"callbacks.sampler.prompts={prompts!r} must be a list of at least one prompt, each a text that is not "
                "empty."
            )
        for name, value in (("every_n_steps", every_n_steps), ("max_new_tokens", max_new_tokens)):
            if value < 1:
                raise ConfigError(f"callbacks.sampler.{name}={value} must be at least 1.")
        if not 0 <= temperature < math.inf:
            raise ConfigError(f"callbacks.sampler.temperature={temperature} must be a finite number of at least 0.")
        if top_k is not None and top_k < 1:
            raise ConfigError(f"callbacks.sampler.top_k={top_k} must be at least 1, or null for all tokens.")
        if top_p is not None and not 0 < top_p <= 1:
            raise ConfigError(f"callbacks.sampler.top_p={top_p} must be above 0 and at most 1, or null for all tokens.")
        self.prompts = list(prompts)
        self.every_n_steps = every_n_steps
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.seed = seed
        self.tokenizer = tokenizer
        self._codec: Codec | None = None
        self._ids: list[list[int]] = []
        self._sampled_at = -1
        self._said_so = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a module that cannot generate; encode the prompts."""
        if not isinstance(pl_module, TextGenerator):
            raise ConfigError(
                f"TextSampler needs a module with a generate method (lit_pretrain.specs.TextGenerator), and "
                f"{type(pl_module).__name__} has none; remove the callback or add one."
            )
        self._codec = self.tokenizer or getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        if self._codec is None:
            raise ConfigError(
                "TextSampler has no tokenizer: set callbacks.sampler.tokenizer, or use a data module with one."
            )
        self._ids = [list(self._codec.encode(prompt)) for prompt in self.prompts]
        self._sampled_at, self._said_so = -1, False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sample after every ``every_n_steps`` updates."""
        if not _compat.accumulates(trainer) and trainer.global_step % self.every_n_steps == 0:
            self._sample(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last word."""
        self._sample(trainer, pl_module)

    def _sample(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == self._sampled_at:
            return
        self._sampled_at = trainer.global_step
        pause_timing_of(trainer.callbacks)  # type: ignore[attr-defined]
        assert isinstance(pl_module, TextGenerator)
        assert self._codec is not None
        # Not inference_mode: it breaks the next backward of models sharded by torch's fully_shard.
        with (
            isolate_rng(),
            _as_it_was(pl_module),
            torch.no_grad(),
            trainer.precision_plugin.val_step_context(),
        ):
            continuations = [
                pl_module.generate(
                    ids,
                    max_new_tokens=self.max_new_tokens,
                    temperature=self.temperature,
                    top_k=self.top_k,
                    top_p=self.top_p,
                    seed=self.seed,
                    eos_id=getattr(self._codec, "eos_id", None),
                )
                for ids in self._ids
            ]
        if trainer.is_global_zero:
            for i, (prompt, ids) in enumerate(zip(self.prompts, continuations, strict=True)):
                self._write(trainer, i, prompt, self._codec.decode(list(ids)))

    def _write(self, trainer: Trainer, i: int, prompt: str, text: str) -> None:
        boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        for board in boards:
            board.experiment.add_text(f"samples/{i}", _as_markdown(prompt, text), global_step=trainer.global_step)
        if boards:
            return
        if not self._said_so:
            self._said_so = True
            rank_zero_info("TextSampler: there is no TensorBoard logger, so samples are printed.")
        trainer.print(f"[update {trainer.global_step}] {prompt}|{text}")


def _as_markdown(prompt: str, text: str) -> str:
    # TensorBoard renders Markdown; an indented block shows the text as it is.
    return "\n".join("    " + line for line in f"{prompt}|{text}".split("\n"))


@contextmanager
def _as_it_was(module: LightningModule) -> Iterator[None]:
    """Evaluation mode inside; every submodule's own mode afterwards, also of those that were frozen in eval."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode
