"""GPT in plain torch: valid on one CPU, with no process group and no strategy."""

from lit_pretrain.models.cache import KVCache
from lit_pretrain.models.checkpointing import ActivationCheckpointing
from lit_pretrain.models.generate import generate, stream
from lit_pretrain.models.gpt import GPT, Block
from lit_pretrain.models.hf import from_hugging_face, to_hugging_face
from lit_pretrain.models.init import init_weights
from lit_pretrain.models.loss import IGNORE_INDEX, LossSums, chunked_cross_entropy
from lit_pretrain.models.norms import RMSNorm

__all__ = [
    "GPT",
    "IGNORE_INDEX",
    "ActivationCheckpointing",
    "Block",
    "KVCache",
    "LossSums",
    "RMSNorm",
    "chunked_cross_entropy",
    "from_hugging_face",
    "generate",
    "init_weights",
    "stream",
    "to_hugging_face",
]
