"""Initial weights: one table, and one random generator per parameter."""

from __future__ import annotations

import hashlib
import math
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_pretrain.specs import GPTConfig

DEFAULT_STD = 0.02


class Rule(NamedTuple):
    """How a parameter starts.

    Args:
        pattern: Shell-style pattern of global parameter names; the first match counts.
        kind: ``normal`` has standard deviation ``init_std``, ``residual`` has ``init_std / sqrt(2 n_layer)``,
            ``vocabulary`` is ``normal`` with zero rows for padding.
    """

    pattern: str
    kind: Literal["normal", "residual", "vocabulary", "ones", "zeros"]


RULES = (
    Rule("*.bias", "zeros"),
    Rule("norm.*", "ones"),
    Rule("*_norm.weight", "ones"),
    Rule("wte.weight", "vocabulary"),
    Rule("head.weight", "vocabulary"),
    Rule("*.o_proj.weight", "residual"),
    Rule("*.down_proj.weight", "residual"),
    Rule("*.weight", "normal"),
)


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def initial_value(name: str, shape: tuple[int, ...], config: GPTConfig, *, seed: int) -> Tensor:
    """The whole initial parameter, float32 on the CPU: a function of its global name, its shape and the seed alone.

    Args:
        name: Global parameter name, such as ``blocks.3.attn.q_proj.weight``.
        shape: Unsharded shape.
        config: The architecture.
        seed: Any whole number.

    Raises:
        LookupError: No rule matches ``name``.
    """
    rule = next((rule for rule in RULES if fnmatchcase(name, rule.pattern)), None)
    if rule is None:
        raise LookupError(f"no initialisation rule matches parameter {name!r}")
    value = torch.empty(shape, dtype=torch.float32, device="cpu")
    if rule.kind == "ones":
        return value.fill_(1.0)
    if rule.kind == "zeros":
        return value.zero_()
    std = config.init_std if config.init_std is not None else DEFAULT_STD
    if rule.kind == "residual":
        std /= math.sqrt(2 * config.n_layer)
    value.normal_(0.0, std, generator=_generator(name, seed))
    if rule.kind == "vocabulary":
        value[config.vocab_size :] = 0.0
    return value


@torch.no_grad()
def init_weights(model: nn.Module, *, seed: int = 0) -> None:
    """Fill every parameter of a GPT in place.

    Weights do not depend on how the model is sharded or pruned, on its dtype before rounding, on its device, or on
    whether it was built on the meta device. Each rank draws whole parameters, one at a time, and keeps its shard;
    nothing is communicated.

    Args:
        model: A GPT, or a part of one with the same parameter names and a ``config``; DTensor parameters are fine.
        seed: Any whole number.
    """
    config = model.config
    assert isinstance(config, GPTConfig)
    for name, parameter in model.named_parameters():
        _assign(parameter, initial_value(name, tuple(parameter.shape), config, seed=seed))


def _assign(parameter: Tensor, value: Tensor) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
        return
    local = parameter.to_local()
    # src_data_rank=None: every rank cuts its own shard from its own copy, without a broadcast.
    whole = value.to(local.device)
    shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    local.copy_(shard.to_local())
