"""What one room may ask of another without importing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class PreparedCorpus:
    """A corpus ready to read: one shard folder per source and split, and the tokenizer all of them share.

    Args:
        train: Source name to shard folder.
        validation: Source name to shard folder of held-out documents; may be empty.
        tokenizer: A ``tokenizer.json``; None when only ids are known.
        eos_token: The tokenizer's token that ends a document.
        vocab_size: For ids without a manifest and without a tokenizer.
        eos_id: The end-of-document id, likewise.
        dtype: Type of the ids in bare ``.bin`` files, which cannot say it.
    """

    train: Mapping[str, Path]
    validation: Mapping[str, Path] = field(default_factory=dict)
    tokenizer: Path | None = None
    eos_token: str = "<|endoftext|>"
    vocab_size: int | None = None
    eos_id: int | None = None
    dtype: str = "uint16"


@runtime_checkable
class CorpusProvider(Protocol):
    """Makes or finds a corpus. ``prepare`` is called on one process per node and may take long; it shows progress."""

    def prepare(self) -> PreparedCorpus:
        """Build what is missing, then say where everything is. Calling it again is cheap."""
        ...

    def locate(self) -> PreparedCorpus:
        """Where everything is, without building. Raises DataError when ``prepare`` has not run."""
        ...


@runtime_checkable
class TokenAccounting(Protocol):
    """A data module that knows how many tokens one optimizer update uses, over all data-parallel ranks."""

    @property
    def tokens_per_update(self) -> int:
        """Nominal target tokens in a global batch."""
        ...


@runtime_checkable
class BatchOrigins(Protocol):
    """A data module that can say where the rows of a batch come from."""

    def origins(self, index: int) -> list[dict[str, Any]]:
        """Of each row of the global batch that holds this microbatch: source, file, offset, text; plain containers.

        Args:
            index: What a batch calls itself (``batch["index"]``).
        """
        ...


@runtime_checkable
class MixturePlan(Protocol):
    """A plan of global batches over several sources."""

    def shares(self, data_step: int) -> dict[str, float]:
        """Share of each source in the global batch at a step."""
        ...

    def epochs(self, data_step: int) -> dict[str, float]:
        """Passes over each source before a step, with a fraction."""
        ...


@runtime_checkable
class AppliedUpdates(Protocol):
    """A callback that counts the updates that were really applied (fp16 skips none of them into the count)."""

    @property
    def applied_updates(self) -> int:
        """Optimizer updates applied so far."""
        ...


@runtime_checkable
class GradientNorm(Protocol):
    """A strategy that knows its one global gradient norm, whatever the layout."""

    def global_grad_norm(self, parameters: Sequence[Any]) -> Any:
        """L2 norm over all ranks of the unscaled gradients, a 0-d float32 tensor. Every rank calls it."""
        ...


@runtime_checkable
class LossRanks(Protocol):
    """A strategy in which some ranks see the same targets (tensor or pipeline parallelism)."""

    @property
    def num_loss_ranks(self) -> int:
        """Ranks whose losses add up to the global batch's; the strategy's ``reduce`` goes over just these."""
        ...


@runtime_checkable
class StepSums(Protocol):
    """A LightningModule whose training step adds to sums that every rank needs afterwards.

    Under a pipeline the step runs on the last stage only, once for each microbatch; its sums are then given to all.
    """

    @property
    def num_step_sums(self) -> int:
        """How many numbers there are."""
        ...

    def step_sums(self) -> Any:
        """The sums since the last update, a 1-d float64 tensor."""
        ...

    def set_step_sums(self, sums: Any, *, parts: int) -> None:
        """Take over the sums of another rank.

        Args:
            sums: From its :meth:`step_sums`.
            parts: Calls of the training step there for each batch.
        """
        ...


@runtime_checkable
class LazyParameters(Protocol):
    """A module that can be built without memory and give its parameters their first values later."""

    def initialize_parameters(self) -> None:
        """Fill every parameter and buffer in place. Parameters may be sharded; the values depend on no layout."""
        ...


@runtime_checkable
class TextGenerator(Protocol):
    """A LightningModule that can continue token ids."""

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        eos_id: int | None = None,
    ) -> list[int]:
        """The prompt's continuation, without the prompt."""
        ...
