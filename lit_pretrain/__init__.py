"""Pretrain GPT-style language models with PyTorch Lightning and Hydra.

Rooms are imported by name (``lit_pretrain.callbacks``, ``lit_pretrain.strategies``, ``lit_pretrain.models`` ...): this
file imports none of them, so that the command line answers before torch is loaded.
"""

__version__ = "0.1.0"
