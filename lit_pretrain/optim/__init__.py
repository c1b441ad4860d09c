"""Optimizers and the groups of parameters they treat alike."""

from lit_pretrain.optim.adamw import adamw
from lit_pretrain.optim.groups import parameter_groups

__all__ = ["adamw", "parameter_groups"]
