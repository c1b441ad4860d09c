"""Plugins for Lightning's Trainer: checkpoint folders, and 16-bit training with float32 master weights."""

from lit_pretrain.plugins.checkpoint_dict import match_parameters
from lit_pretrain.plugins.checkpoint_io import FolderCheckpointIO
from lit_pretrain.plugins.loss_scale import DynamicLossScaler
from lit_pretrain.plugins.precision import MasterWeightPrecision

__all__ = ["DynamicLossScaler", "FolderCheckpointIO", "MasterWeightPrecision", "match_parameters"]
