"""Plugins for Lightning's Trainer: checkpoint folders. For precision, bf16 is Lightning's own autocast until then."""

from lit_pretrain.plugins.checkpoint_dict import match_parameters
from lit_pretrain.plugins.checkpoint_io import FolderCheckpointIO

__all__ = ["FolderCheckpointIO", "match_parameters"]
