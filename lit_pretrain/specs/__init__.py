"""What the rooms tell each other: plain dataclasses and Protocols, no torch."""

from lit_pretrain.specs.gpt import GPTConfig, RopeScaling
from lit_pretrain.specs.parallel import ParallelDims, ParallelPlan, TensorStyle
from lit_pretrain.specs.protocols import (
    AppliedUpdates,
    BatchOrigins,
    CorpusProvider,
    GradientNorm,
    LazyParameters,
    LossRanks,
    MixturePlan,
    PreparedCorpus,
    StepSums,
    TextGenerator,
    TokenAccounting,
)

__all__ = [
    "AppliedUpdates",
    "BatchOrigins",
    "CorpusProvider",
    "GPTConfig",
    "GradientNorm",
    "LazyParameters",
    "LossRanks",
    "MixturePlan",
    "ParallelDims",
    "ParallelPlan",
    "PreparedCorpus",
    "RopeScaling",
    "StepSums",
    "TensorStyle",
    "TextGenerator",
    "TokenAccounting",
]
