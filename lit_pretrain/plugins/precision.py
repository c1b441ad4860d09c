"""16-bit training with float32 master weights, for any Lightning strategy that holds whole weights and for ours."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer

from lit_pretrain.errors import ConfigError
from lit_pretrain.plugins import _compat
from lit_pretrain.plugins.full_precision import restore, run_in_full_precision
from lit_pretrain.plugins.gradient_checks import agree, first_non_finite, gradients_of, share, underflow, unscale
from lit_pretrain.plugins.loss_scale import DynamicLossScaler
from lit_pretrain.plugins.narrow_reduction import narrow_reduction
from lit_pretrain.plugins.overflow_count import OverflowCount
from lit_pretrain.plugins.working_copies import WorkingCopies

_DTYPES: dict[str, torch.dtype | None] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
_FLAGS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}


class MasterWeightPrecision(Precision):
    """Forward and backward in 16 bits, gradients accumulated in float32, float32 master weights in the optimizer.

    The module's parameters are the masters. While it computes they are replaced by 16-bit copies, which are refreshed
    for each batch; under autocast, so that operations that need float32 (losses, norms) get it. Under a strategy
    that shards weights itself (ours) the gathered weights are those copies. Optimizer states, checkpoints and callbacks
    see float32 only, and any precision loads any other's checkpoint.

    With ``fp16`` the loss is scaled. Gradients are unscaled once, before ``on_before_optimizer_step``, so norms and
    clipping work in true units. An update with a non-finite gradient on any rank is skipped on all: weights, optimizer
    states and learning-rate schedulers stay, as do callbacks that count applied updates. ``trainer.global_step`` moves
    on, as it does in Lightning.

    With ``bf16`` nothing is scaled or skipped: non-finite gradients are counted and reported, and what happens to them
    is for whoever guards the run to say (``GradientClipping(non_finite=...)``).

    Logs ``precision/loss_scale`` (fp16), ``precision/skipped_updates`` or ``precision/overflows``, and the shares of
    gradients that the 16-bit type cannot hold in full: ``precision/underflow_scaled`` as they come from the backward
    pass, ``precision/underflow_unscaled`` in true units, which is what there would be without a scale.

    Args:
        precision: ``bf16``, ``fp16``, or ``fp32``, which changes nothing.
        reduce_in: ``fp32``, or ``16bit`` for half the traffic of gradients between data-parallel ranks.
        keep_fp32: Parts that stay and compute in float32: patterns of module names, ``*`` for one part
            (``model.blocks.*.attn_norm``), or of a method (``model.loss``).
        scaler: Of the loss, under fp16; None for one with its defaults.
        max_consecutive_overflows: Under bf16, so many updates in a row with non-finite gradients stop the run.

    Raises:
        ConfigError: An argument is out of range. Before the first step: weights that are not float32, weights that
            another strategy has sharded, several optimizers, or one that evaluates a closure.
        FloatingPointError: Too many skips in a row, or an overflow at the scaler's floor; on every rank.

    Example::

        Trainer(plugins=MasterWeightPrecision("fp16"), strategy="ddp", devices=8)
    """

    def __init__(
        self,
        precision: Literal["bf16", "fp16", "fp32"] = "bf16",
        *,
        reduce_in: Literal["fp32", "16bit"] = "fp32",
        keep_fp32: Sequence[str] = (),
        scaler: DynamicLossScaler | None = None,
        max_consecutive_overflows: int = 20,
    ) -> None:
        if precision not in _DTYPES:
            raise ConfigError(f"precision={precision!r} is unknown here; use one of bf16, fp16, fp32.")
        if reduce_in not in ("fp32", "16bit"):
            raise ConfigError(f"precision.reduce_in={reduce_in!r} is unknown; use fp32 or 16bit.")
        if isinstance(keep_fp32, str) or not all(isinstance(pattern, str) for pattern in keep_fp32):
            raise ConfigError(f"precision.keep_fp32={keep_fp32!r} must be a list of patterns.")
        if scaler is not None and precision != "fp16":
            raise ConfigError(f"precision.scaler is for fp16; precision={precision} has too few or no small numbers.")
        if scaler is not None and not isinstance(scaler, DynamicLossScaler):
            raise ConfigError(
                f"precision.scaler={scaler!r} must be a DynamicLossScaler, such as DynamicLossScaler(min_scale=2)."
            )
        limit = max_consecutive_overflows
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ConfigError(f"precision.max_consecutive_overflows={limit!r} must be a whole number of at least 1.")
        self.kind = precision
        self.precision = _FLAGS[precision]  # type: ignore[assignment]  # what Trainer.precision says
        self.dtype = _DTYPES[precision]
        self.reduce_in, self.keep_fp32 = reduce_in, tuple(keep_fp32)
        self.scaler = (scaler or DynamicLossScaler()) if precision == "fp16" else None
        self.last_update_skipped = False
        self._overflows = OverflowCount(limit=max_consecutive_overflows) if precision == "bf16" else None
        self._is_scaled = False
        self._unscaled_early: Tensor | None = None  # before the step, for clipping: whether it found an overflow
        self._module: nn.Module | None = None
        self._device = torch.device("cpu")
        self._copies: WorkingCopies | None = None
        self._schedulers: list[Any] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind!r})"

    # ---------------------------------------------------------------- what others ask

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied with now; 1 but for fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def skipped_updates(self) -> int:
        """Updates skipped so far, over all resumes."""
        return 0 if self.scaler is None else self.scaler.skipped_updates

    @property
    def overflows(self) -> int:
        """Under bf16: updates with a non-finite gradient so far. Waits for the device."""
        return 0 if self._overflows is None else self._overflows.total

    @property
    def working_copy_bytes(self) -> int:
        """Memory of the 16-bit copies on this rank; 0 where a strategy holds them."""
        return 0 if self._copies is None else self._copies.num_bytes

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; empty for fp32. Masters and optimizer states are the module's and the optimizer's own."""
        if self.scaler is not None:
            return {"scaler": self.scaler.state_dict()}
        return {} if self._overflows is None else {"overflows": self._overflows.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state; one of another precision leaves this one at its start."""
        if self.scaler is not None and "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])
        if self._overflows is not None and "overflows" in state_dict:
            self._overflows.load_state_dict(state_dict["overflows"])

    # ---------------------------------------------------------------- set-up

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Check the weights and take hold of them; nothing is converted in place."""
        strategy = _compat.strategy_of(module)
        shares = bool(getattr(strategy, "casts_weights", False))
        if not shares:
            for name in ("clip_grad_by_norm", "clip_grad_by_value"):
                self.__dict__.pop(name, None)  # of a strategy of ours that had this plugin before
        if self.dtype is None:
            return module
        self._device = torch.device("cpu") if strategy is None else strategy.root_device
        for name, parameter in module.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise ConfigError(
                    f"{self!r} cannot make a copy of {name}, whose shape is not known yet; run one forward pass before "
                    "training, so that the lazy module makes its weights."
                )
            if isinstance(parameter, DTensor) and not shares:
                raise ConfigError(
                    f"{self!r} cannot make copies of weights that {type(strategy).__name__} has sharded ({name}); use "
                    f"precision={_FLAGS[self.kind]!r} there, or a strategy of lit_pretrain.strategies."
                )
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                raise ConfigError(
                    f"{self!r} keeps float32 master weights, but {name} is {str(parameter.dtype).split('.')[1]}; build "
                    "or load the module in float32."
                )
        kept = run_in_full_precision(module, self.keep_fp32, device_type=self._device.type)
        if module is not self._module or self._copies is None:
            statistics = {name: m for name, m in module.named_modules() if _compat.has_running_statistics(m)}
            if shares:
                self._check_kept(statistics, kept)
            kept = kept.union(*(m.parameters() for m in statistics.values()))
            self._copies = None if shares else WorkingCopies(module, self.dtype, kept=kept)
        self._module = module
        return module

    def _check_kept(self, norms: dict[str, nn.Module], kept: frozenset[nn.Parameter]) -> None:
        """Sharding gathers by name: what has to stay in float32 has to be named."""
        for name, norm in norms.items():
            if not kept.issuperset(norm.parameters()):
                raise ConfigError(
                    f"{name} is a {type(norm).__name__}, which has to stay in float32 beside its running statistics; "
                    f"name it in precision.keep_fp32 ([{name}])."
                )

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Check the optimizer and note the schedulers, which a skipped update must not step."""
        if self.dtype is None:
            return model, optimizers, lr_schedulers
        if len(optimizers) > 1:
            raise ConfigError(
                f"{self!r} works with one optimizer, and configure_optimizers returned {len(optimizers)}; put all "
                "parameters into groups of one."
            )
        if any(isinstance(o, LBFGS) for o in optimizers):
            raise ConfigError(f"{self!r} does not work with LBFGS, which evaluates a closure several times; use AdamW.")
        self._schedulers = lr_schedulers
        if isinstance(model, DistributedDataParallel) and self.reduce_in == "16bit":
            try:
                model.register_comm_hook(None, narrow_reduction(self.dtype))
            except RuntimeError as e:
                raise ConfigError(
                    "precision.reduce_in=16bit and the strategy's ddp_comm_hook would both change how gradients are "
                    "reduced; remove one of them."
                ) from e
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Let go of the module and of the copies."""
        _compat.release_schedulers(self._schedulers)
        self._schedulers = []
        if self._copies is not None and self._module is not None:
            self._copies.close()
            restore(self._module)
        self._module = self._copies = self._unscaled_early = None

    # ---------------------------------------------------------------- forward and backward

    def convert_input(self, data: Any) -> Any:
        """A batch begins; it stays as it is: the model and autocast decide.

        The copies are made anew for it: averages of weights write ``p.data``, which no version counter tells.
        """
        if self._copies is not None:
            self._copies.expire()
        if self._schedulers and isinstance(self._module, pl.LightningModule) and _compat.is_training(self._module):
            _compat.release_schedulers(self._schedulers)
        return data

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """The module computes in 16 bits."""
        if self.dtype is None:
            yield
            return
        # Autocast would keep copies of its own of what is still float32, past the next update.
        with self._with_copies(), torch.autocast(self._device.type, dtype=self.dtype, cache_enabled=False):
            yield

    @contextmanager
    def _with_copies(self) -> Generator[None, None, None]:
        if self._copies is None:
            yield
        else:
            with self._copies.inserted():
                yield

    @contextmanager
    def _with_masters(self) -> Generator[None, None, None]:
        if self._copies is None:
            yield
        else:
            with self._copies.taken_out():
                yield

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss."""
        if self.scaler is not None:
            if self._unscaled_early is not None:
                raise ConfigError(
                    "clip_gradients was called before the last backward pass of an update, so that scaled gradients "
                    "would be added to unscaled ones; call it right before optimizer.step()."
                )
            tensor = (tensor.float() if tensor.dtype == torch.float16 else tensor) * self.scaler.scale
            self._is_scaled = True
        return super().pre_backward(tensor, module)

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Backward with the copies in place: activation checkpointing computes forward passes again."""
        with self._with_copies():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clip in true units, also where manual optimization clips before the step has unscaled."""
        if self._is_scaled:
            self._is_scaled = False
            self._unscaled_early = unscale(gradients_of(optimizer), scale=self.loss_scale, device=self._device)
        super().clip_gradients(optimizer, *args, **kwargs)

    # ---------------------------------------------------------------- the update

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Backward, unscale, agree on overflow, hooks and clipping, then step or skip. Every rank calls it."""
        if self.dtype is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        self.last_update_skipped = False
        if result is None and model.automatic_optimization:
            return result  # training_step returned None: there are no gradients
        trainer = model.trainer
        logs = _compat.should_log(trainer)
        with self._with_masters():
            gradients = gradients_of(optimizer)
            # Manual optimization may step twice after one backward pass.
            scale, self._is_scaled = self.loss_scale if self._is_scaled else 1.0, False
            early, self._unscaled_early = self._unscaled_early, None
            shares = self._underflow_shares(gradients, scale, trainer.world_size) if logs and early is None else {}
            found = unscale(gradients, scale=scale, device=self._device)
            if early is not None:  # clipping by value has made finite what was not
                scale, found = self.loss_scale, torch.maximum(found, early)
            found = agree(found, world_size=trainer.world_size)
            if self._overflows is not None:
                self._overflows.add(found, model, reads=logs)
            self._after_closure(model, optimizer)
            if self.scaler is None or self._may_step(found, scale, model):
                optimizer.step(**kwargs)
            else:
                _compat.hold_schedulers(self._schedulers)
        if self._copies is not None:
            self._copies.expire()
        if logs:
            self._log(model, {**shares, "precision/loss_scale": scale} if self.scaler else shares)
        return result

    def _may_step(self, found: Tensor, scale: float, model: pl.LightningModule) -> bool:
        """Tell the scaler; whether the update may be applied."""
        assert self.scaler is not None
        overflow = bool(found.item())  # the one wait of an update: whether to step is decided here
        self.scaler.update(overflow=overflow)
        self.last_update_skipped = overflow
        reason = self.scaler.exhausted
        if reason is not None:
            name = first_non_finite(model, world_size=model.trainer.world_size)
            raise FloatingPointError(
                f"Update {model.trainer.global_step}: {reason}, and at a loss scale of {scale:g} the gradient of "
                f"{name} is not finite. Look at the batch and the learning rate of that update, or use precision=bf16."
            )
        return not overflow

    def _underflow_shares(self, gradients: list[Tensor], scale: float, world_size: int) -> dict[str, float]:
        assert self.dtype is not None
        counts = underflow(gradients, scale=scale, dtype=self.dtype, device=self._device)
        low, lost = share(counts, world_size=world_size)
        return {"precision/underflow_scaled": low, "precision/underflow_unscaled": lost}

    def _log(self, model: pl.LightningModule, figures: dict[str, float]) -> None:
        if self._overflows is not None:
            figures["precision/overflows"] = float(self._overflows.total)
        else:
            figures["precision/skipped_updates"] = float(self.skipped_updates)
        for name, value in figures.items():
            model.log(name, value, on_step=True, on_epoch=False)
