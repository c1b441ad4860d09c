"""A GPT as an ordinary LightningModule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_pretrain.corpus import derive_keys
from lit_pretrain.data.replica import Replica
from lit_pretrain.errors import ConfigError
from lit_pretrain.models import GPT, ActivationCheckpointing, generate, init_weights
from lit_pretrain.module.metrics import TokenLoss
from lit_pretrain.module.weighting import TargetWeighting
from lit_pretrain.optim import adamw
from lit_pretrain.planning import flops_per_token
from lit_pretrain.specs import GPTConfig, RopeScaling

Batch = Mapping[str, Any]


def _config(value: GPTConfig | Mapping[str, Any]) -> GPTConfig:
    if isinstance(value, GPTConfig):
        return value
    fields = dict(value)
    if isinstance(fields.get("rope_scaling"), Mapping):
        fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
    return GPTConfig(**fields)


class GPTModule(pl.LightningModule):
    """Next-token pretraining of a GPT.

    Batches are mappings with ``ids`` (B, T) and ``targets`` (B, T), int64, -100 where nothing is to be predicted; under
    document isolation also ``positions`` and ``doc_ids`` (B, T); for a report per source, ``source`` (B,).

    The training loss of an update is the mean over the valid targets of the global batch: equal to one big batch,
    whatever the accumulation, the number of data-parallel ranks and the masking.

    Logs ``train/loss`` (once per update, over the global batch), ``val/loss`` in nats per token, ``val/perplexity`` and
    ``val/bits_per_byte`` (when the data module knows its bytes), and the same per source as ``val/loss/SOURCE`` where
    the data module names several.

    Args:
        config: The architecture; a mapping of its fields is taken too (that is what a checkpoint holds).
        optimizer: Called with the model, gives the optimizer; None means :func:`lit_pretrain.optim.adamw`.
        activation_checkpointing: ``none``, ``selective`` or ``full``.
        compile: Compile each block in place with ``torch.compile``; names in checkpoints stay the same.
        seed: Seed of the initial weights; independent of the global random state.

    Example::

        module = GPTModule(GPTConfig(vocab_size=2048, block_size=256, n_layer=4, n_head=4, n_embd=128))
        Trainer(max_steps=100).fit(module, TokenDataModule(...))
    """

    model: GPT
    _token_bytes: Tensor | None

    def __init__(
        self,
        config: GPTConfig | Mapping[str, Any],
        *,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        activation_checkpointing: ActivationCheckpointing = "none",
        compile: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config = _config(config)
        # Plain containers, so that a checkpoint loads with weights_only=True.
        self.save_hyperparameters(
            {
                "config": dataclasses.asdict(self.config),
                "activation_checkpointing": activation_checkpointing,
                "seed": seed,
            },
            logger=False,
        )
        self._make_optimizer = optimizer if optimizer is not None else adamw
        self._seed = seed
        self._compile = compile
        self._weighting = TargetWeighting()
        on_meta = torch.get_default_device().type == "meta"
        with torch.device("meta"):  # never initialise twice
            self.model = GPT(self.config, activation_checkpointing=activation_checkpointing)
        if not on_meta:
            self.configure_model()
        self.val_metrics = nn.ModuleDict({"all": TokenLoss()})
        self._source_names: list[str] = []
        self.register_buffer("_token_bytes", None, persistent=False)

    # ---------------------------------------------------------------- set-up

    def configure_model(self) -> None:
        """Give the parameters memory and their initial values, if they are still on the meta device.

        A strategy that shards them gives them memory itself, and calls :meth:`initialize_parameters` afterwards.
        """
        waits = self._trainer is not None and getattr(self._trainer.strategy, "materializes", False)
        if not waits and any(p.is_meta for p in self.model.parameters()):
            device = torch.get_default_device()
            self.model.to_empty(device="cpu" if device.type == "meta" else device)
            self.initialize_parameters()

    def initialize_parameters(self) -> None:
        """Give every parameter its initial value, in place; the same whatever its layout."""
        init_weights(self.model, seed=self._seed)

    def setup(self, stage: str) -> None:
        """Check the data against the model, and learn its sources and bytes per token."""
        data = getattr(self.trainer, "datamodule", None)
        vocab_size = getattr(data, "vocab_size", None)
        if vocab_size is not None and vocab_size > self.config.vocab_size:
            raise ConfigError(
                f"model.vocab_size={self.config.vocab_size} is smaller than the data's vocabulary of {vocab_size}; use "
                f"model.vocab_size={vocab_size} or a tokenizer with fewer ids."
            )
        length = getattr(data, "sequence_length", None)
        if length is not None and length > self.config.block_size:
            raise ConfigError(
                f"data.sequence_length={length} must be at most model.block_size={self.config.block_size}; shorten the "
                f"sequences or lengthen the model's context."
            )
        self._source_names = list(getattr(data, "source_names", None) or [])
        for i in range(len(self._source_names)):
            self.val_metrics[str(i)] = TokenLoss().to(self.device)
        token_bytes = getattr(data, "token_bytes", None)
        if token_bytes is not None:
            self._token_bytes = torch.as_tensor(token_bytes, dtype=torch.int64, device=self.device)
        if self._compile:
            for block in self.model.blocks.values():
                block.compile()
            self._compile = False

    def configure_optimizers(self) -> Optimizer:
        """The optimizer over the model's parameter groups."""
        return self._make_optimizer(self.model)

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs per trained token, forward and backward, at the length that is trained."""
        trainer = self._trainer
        length = getattr(getattr(trainer, "datamodule", None), "sequence_length", None)
        return flops_per_token(self.config, length or self.config.block_size)

    # ---------------------------------------------------------------- training

    def forward(self, ids: Tensor, positions: Tensor | None = None, doc_ids: Tensor | None = None) -> Tensor:
        """Logits (B, T, padded V) of ids (B, T); padding columns are -inf."""
        logits: Tensor = self.model.logits(self.model(ids, positions, doc_ids))
        return logits

    def on_fit_start(self) -> None:
        """Start with no half-finished accumulation window."""
        self._weighting.drop()

    def on_train_start(self) -> None:
        """Give every data-parallel rank dropout masks of its own: all of them were seeded alike."""
        place = Replica.of(self.trainer)
        if self.config.dropout > 0 and place.rank > 0:
            (key,) = derive_keys("dropout", torch.initial_seed(), place.rank, count=1)
            torch.manual_seed(int(key) >> 1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one microbatch, weighted by the nominal target count."""
        hidden = self.model(batch["ids"], batch.get("positions"), batch.get("doc_ids"))
        sums = self.model.loss(hidden, batch["targets"])
        return self._weighting.scale(
            sums.nll_sum + sums.z_loss_sum, sums.num_targets, nominal=batch["targets"].numel(), report=sums.nll_sum
        )

    num_step_sums = 3

    def step_sums(self) -> Tensor:
        """Sums of the training step, for the other ranks of a pipeline (:class:`lit_pretrain.specs.StepSums`)."""
        return self._weighting.sums()

    def set_step_sums(self, sums: Tensor, *, parts: int) -> None:
        """Sums of the training step, from the last rank of a pipeline."""
        self._weighting.set_sums(sums, parts=parts)

    def on_after_backward(self) -> None:
        """At the end of a window: weigh the gradients by the actual target count, and log the loss of the update."""
        loss = self._weighting.finish(self)
        if loss is not None:
            self.log("train/loss", loss)

    # ---------------------------------------------------------------- evaluation

    def _evaluate(self, batch: Batch) -> None:
        hidden = self.model(batch["ids"], batch.get("positions"), batch.get("doc_ids"))
        targets = batch["targets"]
        sources = batch.get("source")
        if sources is None or not self._source_names:
            self._add("all", hidden, targets)
            return
        for source in sources.unique().tolist():  # one pass per source: rows of a batch may be mixed
            rows = sources == source
            self._add(str(source), hidden[rows], targets[rows])

    def _add(self, key: str, hidden: Tensor, targets: Tensor) -> None:
        sums = self.model.loss(hidden, targets)
        num_bytes: Tensor | int = 0
        if self._token_bytes is not None:
            num_bytes = self._token_bytes[targets[targets >= 0]].sum()
        for name in {key, "all"}:
            if name in self.val_metrics:
                self._metric(name).update(sums.nll_sum, sums.num_targets, num_bytes)

    def _metric(self, key: str) -> TokenLoss:
        return cast(TokenLoss, self.val_metrics[key])

    def _report(self, prefix: str) -> None:
        for key in self.val_metrics:
            metric = self._metric(key)
            name = "" if key == "all" else f"/{self._source_names[int(key)]}"
            if key != "all" and len(self._source_names) < 2:
                metric.reset()
                continue
            for kind, value in metric.summary().items():
                # Already equal on every rank; sync_dist says so to Lightning.
                self.log(f"{prefix}/{kind}{name}", value.to(torch.float32), sync_dist=True)
            metric.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add one batch to the validation sums."""
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        """Log validation loss, perplexity and bits per byte."""
        self._report("val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add one batch to the test sums."""
        self._evaluate(batch)

    def on_test_epoch_end(self) -> None:
        """Log test loss, perplexity and bits per byte."""
        self._report("test")

    # ---------------------------------------------------------------- text

    @torch.no_grad()
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
        """Continue token ids; see :func:`lit_pretrain.models.generate`. Returns the continuation only."""
        was_training = self.model.training
        self.model.eval()
        try:
            out: list[list[int]] = generate(
                self.model,
                [list(prompt_ids)],
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                eos_id=eos_id,
            )
        finally:
            self.model.train(was_training)
        return out[0]
