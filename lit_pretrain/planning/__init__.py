"""What a run needs, in closed form: parameters, FLOPs and memory."""

from lit_pretrain.planning.flops import PEAK_FLOPS, flops_per_token, peak_flops
from lit_pretrain.planning.memory import MemoryPerRank, activation_bytes, memory_per_rank
from lit_pretrain.planning.parameters import ParameterCount, count_parameters

__all__ = [
    "PEAK_FLOPS",
    "MemoryPerRank",
    "ParameterCount",
    "activation_bytes",
    "count_parameters",
    "flops_per_token",
    "memory_per_rank",
    "peak_flops",
]
