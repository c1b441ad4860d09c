"""Tensor parallelism: a plan's styles as DTensor layouts and hooks.

Between layers the residual stream is whole on every rank, or, with sequence parallelism, split along the sequence. A
column layer and the row layer after it need one reduction in the forward and one in the backward pass; the styles are
made so that layers which read the same input share one.

Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2 (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import TensorStyle

SEQUENCE_DIM = 1  # of (B, T, C)


class SequenceSplit:
    """Whether the residual stream is split along the sequence in the pass that is running.

    A sequence whose length the ranks cannot share evenly (a single token of generation, an odd validation batch) goes
    through whole: plain tensor parallelism with the same weights. In training it is refused: the ranks draw dropout
    masks of their own there, which a whole stream would not survive.

    Args:
        size: Ranks of the tensor-parallel group.
        enabled: Split where it is possible.
    """

    def __init__(self, *, size: int, enabled: bool) -> None:
        self._size, self._enabled = size, enabled
        self.active = False

    def begin(self, length: int, *, training: bool) -> None:
        """A pass over sequences of ``length`` tokens begins.

        Raises:
            ConfigError: It trains, and the ranks cannot share the length.
        """
        self.active = self._enabled and length % self._size == 0
        if self._enabled and training and not self.active:
            raise ConfigError(
                f"strategy.sequence_parallel=true needs sequences whose length is a multiple of "
                f"strategy.tensor_parallel_size={self._size}, not {length}; use another length, or "
                f"strategy.sequence_parallel=false."
            )

    @property
    def placement(self) -> Placement:
        """Of the residual stream, (B, T, C)."""
        return Shard(SEQUENCE_DIM) if self.active else Replicate()


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted name fits a pattern; ``*`` stands within one part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


class _Style:
    """Layout of a module's parameters, and what happens to its first argument and to its result."""

    parameters: ClassVar[Mapping[str, Placement]] = {}  # those left out are replicated
    owns_parameters: ClassVar[bool] = True
    is_called: ClassVar[bool] = True

    def __init__(self, module: nn.Module, mesh: DeviceMesh, sequence: SequenceSplit) -> None:
        self.module, self.mesh, self.sequence = module, mesh, sequence

    def reads(self, x: Tensor) -> Tensor:
        return x

    def gives(self, y: Any) -> Any:
        return y

    def wrap(self, x: Tensor, placement: Placement) -> DTensor:
        return x if isinstance(x, DTensor) else DTensor.from_local(x, self.mesh, [placement], run_check=False)

    def whole(self, x: Tensor) -> DTensor:
        """``x`` on every rank; its gradient is summed over the ranks, once for all that read this object."""
        return self.wrap(x, Replicate()).redistribute(placements=[Replicate()])

    def stream(self, x: Tensor) -> DTensor:
        return self.wrap(x, self.sequence.placement)

    def to_stream(self, y: DTensor) -> Tensor:
        return y.redistribute(placements=[self.sequence.placement]).to_local()

    def to_whole(self, y: DTensor) -> Tensor:
        return y.redistribute(placements=[Replicate()]).to_local()


class _Column(_Style):
    parameters: ClassVar = {"weight": Shard(0), "bias": Shard(0)}

    def reads(self, x: Tensor) -> Tensor:
        # What has entered is shared by several column layers: their gradients meet there, and are reduced once.
        return x if isinstance(x, DTensor) else self.whole(x)

    def gives(self, y: DTensor) -> Tensor:
        return y.to_local()


class _ColumnGather(_Column):
    def gives(self, y: DTensor) -> Tensor:
        return self.to_whole(y)


class _Row(_Style):
    parameters: ClassVar = {"weight": Shard(1)}

    def reads(self, x: Tensor) -> Tensor:
        return self.wrap(x, Shard(x.dim() - 1))

    def gives(self, y: DTensor) -> Tensor:
        return self.to_stream(y)


class _Vocabulary(_Style):
    parameters: ClassVar = {"weight": Shard(0)}

    def reads(self, ids: Tensor) -> Tensor:
        self.sequence.begin(ids.shape[-1], training=self.module.training)
        return self.whole(ids)

    def gives(self, y: DTensor) -> Tensor:
        return self.to_stream(y)


class _VocabularyHead(_Style):
    parameters: ClassVar = {"weight": Shard(0)}
    is_called = False


class _Ids(_Style):
    """Stands where an embedding is on an earlier pipeline stage: ids still tell the length of the sequence."""

    owns_parameters = False

    def reads(self, ids: Tensor) -> Tensor:
        self.sequence.begin(ids.shape[-1], training=self.module.training)
        return ids


class _TiedHead(_Ids):
    """An embedding that is only the head of a pipeline's last stage."""

    parameters: ClassVar = {"weight": Shard(0)}
    owns_parameters = True


class _Positions(_Style):
    def reads(self, positions: Tensor) -> Tensor:
        whole = self.wrap(positions, Replicate())
        return whole.redistribute(placements=[Shard(positions.dim() - 1)]) if self.sequence.active else whole

    def gives(self, y: DTensor) -> Tensor:
        return y.to_local()


class _Enter(_Style):
    owns_parameters = False

    def reads(self, x: Tensor) -> Tensor:
        # One tensor for all the column layers inside, so that their gradients are summed before they are reduced.
        return self.stream(x).redistribute(placements=[Replicate()])


class _Norm(_Style):
    """Norms the tokens that a rank has, with plain weights: distributed ones cost a twelfth of a small CPU step."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, sequence: SequenceSplit) -> None:
        super().__init__(module, mesh, sequence)
        self._forward = module.forward
        module.forward = self._with_plain_weights

    @property
    def has_part(self) -> bool:
        """Whether other ranks norm other parts of the same activations, so that gradients add up over them."""
        return self.sequence.active

    def _with_plain_weights(self, *args: Any, **kwargs: Any) -> Any:
        parameters: dict[str, Any] = self.module._parameters
        kept, gradient = dict(parameters), Partial() if self.has_part else Replicate()
        for key, weight in kept.items():
            if isinstance(weight, DTensor):
                # Redistributed for the way back, where it sums parts of the gradient.
                same = weight.redistribute(placements=[Replicate()])
                parameters[key] = same.to_local(grad_placements=[gradient])
        try:
            return self._forward(*args, **kwargs)
        finally:
            parameters.update(kept)


class _FinalNorm(_Norm):
    def gives(self, y: Tensor) -> Tensor:
        return self.to_whole(self.stream(y)) if self.sequence.active else y


class _HeadNorm(_Norm):
    @property
    def has_part(self) -> bool:
        return True


_STYLES: Mapping[TensorStyle, type[_Style]] = {
    "column": _Column,
    "column_gather": _ColumnGather,
    "row": _Row,
    "vocabulary": _Vocabulary,
    "vocabulary_head": _VocabularyHead,
    "ids": _Ids,
    "tied_head": _TiedHead,
    "positions": _Positions,
    "enter": _Enter,
    "norm": _Norm,
    "final_norm": _FinalNorm,
    "head_norm": _HeadNorm,
}


def apply_tensor_parallel(
    root: nn.Module,
    styles: Mapping[str, TensorStyle],
    *,
    mesh: DeviceMesh,
    sequence_parallel: bool = False,
    prepare: Callable[[str, nn.Module], None] | None = None,
) -> SequenceSplit:
    """Split a module over tensor-parallel ranks, in place. Every rank calls it; nothing is communicated.

    Weights have to be equal on all ranks, or on the meta device. Weights that were one object stay one object.

    Args:
        root: The module.
        styles: Pattern of submodule names to style.
        mesh: One dimension.
        sequence_parallel: Split the residual stream along the sequence where its length allows.
        prepare: Called with the name and the layer before its weights are split.

    Returns:
        What says whether the stream is split.

    Raises:
        ConfigError: A pattern fits no submodule, or a module that cannot be split that way; or tied weights would be
            laid out in two ways.
    """
    sequence = SequenceSplit(size=mesh.size(), enabled=sequence_parallel)
    split: dict[nn.Parameter, nn.Parameter] = {}
    for pattern, word in styles.items():
        found = [(name, module) for name, module in root.named_modules() if matches(name, pattern)]
        if not found:
            raise ConfigError(f"The tensor-parallel plan names {pattern!r}, which the model has not; correct the plan.")
        for name, module in found:
            style = _STYLES[word](module, mesh, sequence)
            if style.owns_parameters:
                if prepare is not None:
                    prepare(name, module)
                _split_parameters(name, module, style, split)
            _hook(module, style)
    for name, module in root.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter in split:
                raise ConfigError(
                    f"{name}.{key} is tied to a weight that the tensor-parallel plan splits, but is not in the plan "
                    "itself; add it, so that both stay one."
                )
    return sequence


def _split_parameters(name: str, module: nn.Module, style: _Style, split: dict[nn.Parameter, nn.Parameter]) -> None:
    if any(True for _ in module.children()):
        raise ConfigError(f"The tensor-parallel plan splits {name}, which is no single layer; name its layers instead.")
    if any(isinstance(p, Shard) for p in style.parameters.values()) and not isinstance(
        module, nn.Linear | nn.Embedding
    ):
        raise ConfigError(
            f"The tensor-parallel plan splits {name}, a {type(module).__name__}; only nn.Linear and nn.Embedding "
            "can be split (a fused Conv1D cannot: use ZeRO for such a model)."
        )
    for key, parameter in list(module.named_parameters(recurse=False)):
        placement = style.parameters.get(key, Replicate())
        new = split.get(parameter)
        if new is None:
            new = split[parameter] = _distribute(parameter, style.mesh, placement)
        elif isinstance(new, DTensor) and tuple(new.placements) != (placement,):
            raise ConfigError(f"{name}.{key} is tied to a weight that the tensor-parallel plan splits in another way.")
        module.register_parameter(key, new)


def _distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    # src_data_rank=None: every rank cuts its own part from its own copy, without a broadcast.
    value = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def _hook(module: nn.Module, style: _Style) -> None:
    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (style.reads(args[0]), *args[1:])

    def after(_module: nn.Module, _args: tuple[Any, ...], result: Any) -> Any:
        return style.gives(result)

    if style.is_called:
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
