"""What ranks compute together."""

from lit_pretrain.distributed.grad_norm import global_norm

__all__ = ["global_norm"]
