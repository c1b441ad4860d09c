"""A resolved configuration -> objects, strictly. Importing this room loads neither torch nor Lightning."""

from lit_pretrain.instantiate.build import build, locate, validate
from lit_pretrain.instantiate.nearest import nearest

__all__ = ["build", "locate", "nearest", "validate"]
