"""Text as token ids on disk, and the plan of which ids stand in which batch. No torch."""

from lit_pretrain.corpus.default import DefaultCorpus
from lit_pretrain.corpus.folders import ShardFolders, check_alike
from lit_pretrain.corpus.holdout import split_documents
from lit_pretrain.corpus.manifest import Manifest, ShardInfo, token_dtype
from lit_pretrain.corpus.mixture import WeightSchedule
from lit_pretrain.corpus.permutation import KeyedPermutation, derive_keys, mix
from lit_pretrain.corpus.plan import BatchPlan, SkipList
from lit_pretrain.corpus.reader import TokenStream, open_tokens, verify_folder
from lit_pretrain.corpus.tokenizer import EOS_TOKEN, TokenizerFile, train_tokenizer
from lit_pretrain.corpus.windows import IGNORED, Windows, read_rows
from lit_pretrain.corpus.writer import ShardWriter

__all__ = [
    "EOS_TOKEN",
    "IGNORED",
    "BatchPlan",
    "DefaultCorpus",
    "KeyedPermutation",
    "Manifest",
    "ShardFolders",
    "ShardInfo",
    "ShardWriter",
    "SkipList",
    "TokenStream",
    "TokenizerFile",
    "WeightSchedule",
    "Windows",
    "check_alike",
    "derive_keys",
    "mix",
    "open_tokens",
    "read_rows",
    "split_documents",
    "token_dtype",
    "train_tokenizer",
    "verify_folder",
]
