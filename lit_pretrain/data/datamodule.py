"""TokenDataModule: a corpus as batches for ``Trainer.fit``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from numpy.typing import NDArray

from lit_pretrain.corpus import BatchPlan, SkipList, TokenizerFile, WeightSchedule, Windows, read_rows
from lit_pretrain.data._compat import batches_read, rescale_restored_batches
from lit_pretrain.data.identity import PlanIdentity
from lit_pretrain.data.loader import Batch, PlanLoader
from lit_pretrain.data.opened import OpenedCorpus, check_ids, open_corpus
from lit_pretrain.data.origins import row_origin
from lit_pretrain.data.replica import Replica
from lit_pretrain.data.validation import shard_rows, validation_rows
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import CorpusProvider


class TokenDataModule(pl.LightningDataModule):
    """Batches of token windows from a mixture of sources.

    Every rank computes the same plan of global batches and reads its rows of it: any number of ranks and any
    microbatch size train on the same global batches, and a run resumed from any Lightning checkpoint goes on with the
    very next one. A batch is a dict as docs/architecture.md tells.

    One Lightning epoch reads about as many tokens as the corpus has. Each source repeats in a new order whenever it is
    used up, whatever the epoch.

    Args:
        corpus: Makes or finds the shards.
        sequence_length: Inputs per row, in tokens.
        micro_batch_size: Rows per data-parallel rank and forward pass.
        global_batch_size: Rows per optimizer update over all ranks.
        weights: Share of each source, or a ``WeightSchedule`` (also as ``{points: ..., unit: ...}``); None is
            proportional to the tokens.
        isolate_documents: Give ``positions`` and ``doc_ids``, and ignore targets in another document than their input.
        seed: Decides the order of windows and rows.
        skip: Pairs ``[low, high)`` of data steps that are never read, for instance batches at which a loss spiked.
        max_validation_tokens: Validate on at most so many targets, spread evenly over the held-out text; None on all.
        prefetch: Batches that a thread makes ahead; 0 turns it off.

    Raises:
        ConfigError: When a setting is impossible.

    Example:
        ``Trainer(max_steps=100).fit(module, datamodule=TokenDataModule(DefaultCorpus(), sequence_length=128,
        micro_batch_size=8, global_batch_size=8))``
    """

    def __init__(
        self,
        corpus: CorpusProvider,
        *,
        sequence_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        weights: WeightSchedule | Mapping[str, Any] | None = None,
        isolate_documents: bool = False,
        seed: int = 0,
        skip: Sequence[Sequence[int]] = (),
        max_validation_tokens: int | None = None,
        prefetch: int = 2,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("sequence_length", sequence_length, 1),
            ("micro_batch_size", micro_batch_size, 1),
            ("global_batch_size", global_batch_size, 1),
            ("prefetch", prefetch, 0),
            ("max_validation_tokens", 1 if max_validation_tokens is None else max_validation_tokens, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"data.{name}={value!r} must be a whole number of at least {least}.")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"data.seed={seed!r} must be a whole number.")
        if global_batch_size % micro_batch_size:
            raise ConfigError(
                f"data.global_batch_size={global_batch_size} must be a multiple of "
                f"data.micro_batch_size={micro_batch_size}."
            )
        self.corpus = corpus
        self.sequence_length = sequence_length
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.weights = _schedule(weights)
        self.isolate_documents = isolate_documents
        self.seed = seed
        self.skip = SkipList(skip)
        self.max_validation_tokens = max_validation_tokens
        self.prefetch = prefetch
        self._opened: OpenedCorpus | None = None
        self._plan: BatchPlan | None = None
        self._rows: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None
        self._restored: PlanIdentity | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what is memory-mapped: a process that gets a copy opens the files itself."""
        return self.__dict__ | {"_opened": None, "_plan": None, "_rows": None}

    # What others ask

    @property
    def source_names(self) -> list[str]:
        """Sources, in the order of the ids in ``batch["source"]``."""
        return list(self._open().train)

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to ``vocab_size - 1``."""
        return self._open().vocab_size

    @property
    def tokenizer(self) -> TokenizerFile | None:
        """The tokenizer, or None when only ids are known."""
        return self._open().tokenizer

    @property
    def token_bytes(self) -> torch.Tensor | None:
        """UTF-8 bytes per token id, (V,), int64; None without a tokenizer."""
        tokenizer = self._open().tokenizer
        return None if tokenizer is None else torch.from_numpy(tokenizer.token_bytes())

    @property
    def tokens_per_update(self) -> int:
        """Nominal target tokens in a global batch."""
        return self.global_batch_size * self.sequence_length

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer updates in one Lightning epoch: about one pass over all tokens."""
        windows = sum(len(windows) for windows in self._open().train.values())
        return max(1, windows // self.global_batch_size)

    @property
    def plan(self) -> BatchPlan:
        """The plan of global batches."""
        if self._plan is None:
            self._plan = BatchPlan(
                {name: len(windows) for name, windows in self._open().train.items()},
                global_batch_size=self.global_batch_size,
                tokens_per_row=self.sequence_length,
                weights=self.weights,
                seed=self.seed,
            )
        return self._plan

    # What Lightning calls

    def prepare_data(self) -> None:
        """Build the corpus if it is missing. Lightning calls this on one process per node."""
        self.corpus.prepare()

    def setup(self, stage: str | None = None) -> None:
        """Open the shards and check the settings against them and the trainer."""
        self._open()
        if stage == "fit":
            _ = self.plan
            self._check_batch_size()

    def train_dataloader(self) -> PlanLoader:
        """Batches from where the trainer stands."""
        self._check_batch_size()
        num_batches = self.updates_per_epoch * self._accumulation()
        repeated = self._overfit_batches(num_batches)
        return PlanLoader(
            self.read_train if repeated is None else lambda position: self.read_train(position % repeated),
            num_batches=num_batches,
            start=self._position,
            depth=self.prefetch,
            pin_memory=self._on_cuda(),
        )

    def val_dataloader(self) -> PlanLoader | list[PlanLoader]:
        """Held-out windows, each once over all ranks; an empty list when nothing is held out."""
        opened = self._open()
        source, window = self.validation_rows()
        if not source.size:
            return []
        place = self._replica()
        sources, windows = shard_rows(
            source, window, rank=place.rank, world_size=place.size, micro_batch_size=self.micro_batch_size
        )
        held_out = [windows_ for windows_ in opened.validation if windows_ is not None]
        anything = [windows_ if windows_ is not None else held_out[0] for windows_ in opened.validation]
        return PlanLoader(
            lambda number: self._batch(anything, sources[number], windows[number], index=number),
            num_batches=len(sources),
            depth=self.prefetch,
            pin_memory=self._on_cuda(),
        )

    def state_dict(self) -> dict[str, Any]:
        """What the plan was made of. The position is Lightning's own count of batches."""
        return self._identity().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse to go on with another plan.

        Other ranks and another microbatch size are the same plan. Evaluation may use any data.

        Raises:
            ConfigError: Naming the settings that differ.
        """
        if self.trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return
        restored, now = PlanIdentity.from_state(state_dict), self._identity()
        restored.check_same(now)
        if restored.accumulation != now.accumulation:
            rescale_restored_batches(self.trainer, old=restored.accumulation, new=now.accumulation)
        self._restored = restored

    # Reading

    @property
    def train_windows(self) -> dict[str, Windows]:
        """Training windows per source."""
        return self._open().train

    @property
    def validation_windows(self) -> list[Windows | None]:
        """Held-out windows per source, in the order of ``source_names``; None for a source without."""
        return self._open().validation

    def validation_rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and window of every row that validation reads over all ranks, (N,) and (N,)."""
        limit = self.max_validation_tokens
        return validation_rows(
            self._open().validation, max_windows=None if limit is None else max(1, limit // self.sequence_length)
        )

    def read_train(self, position: int) -> Batch:
        """This rank's microbatch at an absolute position, counted over all epochs. Pure: position in, batch out."""
        update, micro = divmod(position, self._accumulation())
        step = self.skip.data_step(update)
        if self._rows is None or self._rows[0] != step:
            self._rows = (step, *self.plan.rows(step))
        _, source, window = self._rows
        mine = self._replica().rows(micro, micro_batch_size=self.micro_batch_size)
        index = step * self._accumulation() + micro
        return self._batch(list(self._open().train.values()), source[mine], window[mine], index=index)

    def origins(self, index: int) -> list[dict[str, Any]]:
        """Where each row of a global batch comes from; see :class:`lit_pretrain.specs.BatchOrigins`.

        Args:
            index: ``batch["index"]`` of one of its microbatches.
        """
        source, window = self.plan.rows(index // self._accumulation())
        train = list(self._open().train.items())
        return [
            row_origin(train[of][0], train[of][1], int(which), tokenizer=self.tokenizer)
            for of, which in zip(source.tolist(), window.tolist(), strict=True)
        ]

    def _batch(
        self, sources: Sequence[Windows], source: NDArray[np.int64], window: NDArray[np.int64], *, index: int
    ) -> Batch:
        arrays = read_rows(
            sources,
            source=source,
            window=window,
            isolate_documents=self.isolate_documents,
            padding=self._open().eos_id or 0,
        )
        check_ids(
            arrays["ids"], arrays["targets"], [sources[of] for of in source], window, vocab_size=self._open().vocab_size
        )
        batch: Batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        batch["source"] = torch.from_numpy(np.maximum(source, 0))
        batch["index"] = index
        return batch

    def _open(self) -> OpenedCorpus:
        if self._opened is None:
            self._opened = open_corpus(
                self.corpus.locate(), sequence_length=self.sequence_length, isolate_documents=self.isolate_documents
            )
        return self._opened

    # Where this process stands

    def _replica(self) -> Replica:
        return Replica.of(self.trainer)

    def _accumulation(self) -> int:
        """Microbatches per update."""
        return self.global_batch_size // (self.micro_batch_size * self._replica().size)

    def _position(self) -> int:
        """The next microbatch to read, once the trainer's counters are restored."""
        if self.trainer is None:
            return 0
        position = batches_read(self.trainer)
        if self._restored is not None:
            self._restored.check_past(self._identity(), updates=position // self._accumulation())
            self._restored = None
        return position

    def _overfit_batches(self, num_batches: int) -> int | None:
        """How many batches ``Trainer(overfit_batches=...)`` wants again and again; None without it."""
        wanted = getattr(self.trainer, "overfit_batches", 0)
        if not wanted:
            return None
        return max(1, min(num_batches, wanted if isinstance(wanted, int) else int(num_batches * wanted)))

    def _on_cuda(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    def _check_batch_size(self) -> None:
        self._replica().check(
            self.trainer, micro_batch_size=self.micro_batch_size, global_batch_size=self.global_batch_size
        )

    def _identity(self) -> PlanIdentity:
        opened = self._open()
        return PlanIdentity(
            seed=self.seed,
            sequence_length=self.sequence_length,
            global_batch_size=self.global_batch_size,
            isolate_documents=self.isolate_documents,
            sources={
                name: {"tokens": windows.stream.num_tokens, "made_by": windows.stream.info.config_hash}
                for name, windows in opened.train.items()
            },
            windows={name: len(windows) for name, windows in opened.train.items()},
            weights=self.plan.schedule.describe(),
            skip=[list(pair) for pair in self.skip.ranges],
            accumulation=self._accumulation(),
        )


def _schedule(weights: WeightSchedule | Mapping[str, Any] | None) -> WeightSchedule | None:
    if weights is None or isinstance(weights, WeightSchedule):
        return weights
    if "points" in weights:
        unknown = set(weights) - {"points", "unit"}
        if unknown:
            raise ConfigError(f"data.weights has the unknown key {sorted(unknown)[0]!r}; use points and unit.")
        return WeightSchedule(weights["points"], unit=weights.get("unit", "steps"))
    return WeightSchedule.constant(weights)
