"""Callbacks that work in any Lightning project."""

if __name__ != "lit_pretrain.callbacks":
    raise ImportError("callbacks/ is part of lit-pretrain: import it as lit_pretrain.callbacks.")

from lit_pretrain.callbacks.clipping import GradientClipping
from lit_pretrain.callbacks.learning_rate import LearningRateSchedule
from lit_pretrain.callbacks.order import Order, sort_callbacks
from lit_pretrain.callbacks.schedules import (
    WarmupConstant,
    WarmupCosine,
    WarmupInverseSqrt,
    WarmupLinear,
    WarmupStableDecay,
)

__all__ = [
    "GradientClipping",
    "LearningRateSchedule",
    "Order",
    "WarmupConstant",
    "WarmupCosine",
    "WarmupInverseSqrt",
    "WarmupLinear",
    "WarmupStableDecay",
    "sort_callbacks",
]
