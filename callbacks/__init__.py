"""Callbacks that work in any Lightning project."""

if __name__ != "lit_pretrain.callbacks":
    raise ImportError("callbacks/ is part of lit-pretrain: import it as lit_pretrain.callbacks.")

from lit_pretrain.callbacks.baseline_report import BaselineReport
from lit_pretrain.callbacks.batch_size_ramp import BatchSizeRamp
from lit_pretrain.callbacks.budget import ChinchillaBudget
from lit_pretrain.callbacks.clipping import GradientClipping
from lit_pretrain.callbacks.counters import RunCounters
from lit_pretrain.callbacks.data_annealing import DataAnnealing
from lit_pretrain.callbacks.exact_resume import ExactResume
from lit_pretrain.callbacks.gradient_statistics import GradientStatistics
from lit_pretrain.callbacks.learning_rate import LearningRateSchedule
from lit_pretrain.callbacks.non_finite import NonFiniteGuard
from lit_pretrain.callbacks.order import Order, sort_callbacks
from lit_pretrain.callbacks.preemption import PreemptionCheckpoint
from lit_pretrain.callbacks.progress import PretrainProgress
from lit_pretrain.callbacks.rollback import LossSpikeRollback
from lit_pretrain.callbacks.run_checkpoint import RunCheckpoint
from lit_pretrain.callbacks.run_record import RunRecord
from lit_pretrain.callbacks.schedules import (
    WarmupConstant,
    WarmupCosine,
    WarmupInverseSqrt,
    WarmupLinear,
    WarmupStableDecay,
)
from lit_pretrain.callbacks.tensorboard import TensorBoardContinuation
from lit_pretrain.callbacks.text_sampler import TextSampler
from lit_pretrain.callbacks.throughput import ThroughputMonitor

__all__ = [
    "BaselineReport",
    "BatchSizeRamp",
    "ChinchillaBudget",
    "DataAnnealing",
    "ExactResume",
    "GradientClipping",
    "GradientStatistics",
    "LearningRateSchedule",
    "LossSpikeRollback",
    "NonFiniteGuard",
    "Order",
    "PreemptionCheckpoint",
    "PretrainProgress",
    "RunCheckpoint",
    "RunCounters",
    "RunRecord",
    "TensorBoardContinuation",
    "TextSampler",
    "ThroughputMonitor",
    "WarmupConstant",
    "WarmupCosine",
    "WarmupInverseSqrt",
    "WarmupLinear",
    "WarmupStableDecay",
    "sort_callbacks",
]
