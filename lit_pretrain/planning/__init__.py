"""What a run needs, in closed form: parameters and FLOPs."""

from lit_pretrain.planning.flops import PEAK_FLOPS, flops_per_token, peak_flops
from lit_pretrain.planning.parameters import ParameterCount, count_parameters

__all__ = ["PEAK_FLOPS", "ParameterCount", "count_parameters", "flops_per_token", "peak_flops"]
