"""A byte-level BPE: trained here, saved as ``tokenizer.json``, exact on any text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lit_pretrain.corpus._files import readable_errors, write_whole
from lit_pretrain.errors import ConfigError, DataError

EOS_TOKEN = "<|endoftext|>"
_SMALLEST = 257  # 256 bytes and the end-of-document token
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenizerFile:
    """A ``tokenizer.json`` and what the data needs to know of it.

    Text is never turned into a special token, whatever it spells: only the data puts end-of-document ids.

    Args:
        path: A ``tokenizer.json`` as the ``tokenizers`` library writes it.
        eos_token: The token that ends a document.

    Raises:
        DataError: When the file is missing, unreadable, damaged or lacks ``eos_token``.
    """

    def __init__(self, path: Path | str, *, eos_token: str = EOS_TOKEN) -> None:
        self.path = Path(path)
        with readable_errors(self.path, doing="read"):
            raw = self.path.read_bytes()
        try:
            text = raw.decode()
            self._tokenizer: Tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{self.path} is not a tokenizer.json ({error}); write it again.") from error
        self._tokenizer.encode_special_tokens = True
        self._content = json.loads(text)
        found = self._tokenizer.token_to_id(eos_token)
        if found is None:
            raise DataError(f"{self.path} has no token {eos_token!r}; name its end-of-document token as eos_token.")
        self.eos_token = eos_token
        self.eos_id = int(found)

    @cached_property
    def vocab_size(self) -> int:
        """Ids run from 0 to ``vocab_size - 1``; a published vocabulary may leave some of them unused."""
        return 1 + int(max(self._tokenizer.get_vocab(with_added_tokens=True).values()))

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the content, whatever its layout in the file."""
        return hashlib.sha256(json.dumps(self._content, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without an end-of-document id.

        Raises:
            DataError: When ``text`` holds bytes that were no UTF-8 (Python keeps them as lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"The text {text[:40]!r} is not UTF-8 (character {error.start}); convert it first."
            ) from error
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, in parallel where the machine allows."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; special tokens are left out, bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_of(self, index: int) -> str | None:
        """How the vocabulary spells a token; None for an id without one."""
        token: str | None = self._tokenizer.id_to_token(index)
        return token

    def token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes that each id stands for, (V,), int64; 0 for special tokens.

        Exact for byte-level vocabularies (GPT-2) and those with byte fallback (SentencePiece).
        """
        sizes = np.zeros(self.vocab_size, np.int64)
        added = self._tokenizer.get_added_tokens_decoder()
        byte_level = "ByteLevel" in json.dumps(self._content.get("decoder"))
        for token, index in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if index in added:
                sizes[index] = 0 if added[index].special else len(token.encode())
            elif byte_level:
                sizes[index] = len(token)  # one character per byte
            elif _BYTE_TOKEN.fullmatch(token):
                sizes[index] = 1
            else:
                sizes[index] = len(token.replace("▁", " ").encode())
        return sizes


def train_tokenizer(texts: Iterable[str], path: Path | str, *, vocab_size: int) -> TokenizerFile:
    """Train a byte-level BPE and save it; the same texts in the same order give the same file.

    Args:
        texts: Documents.
        path: Where ``tokenizer.json`` goes.
        vocab_size: At least 257: every byte and the end-of-document token.

    Raises:
        ConfigError: When ``vocab_size`` is too small.
        DataError: When the texts are too few to fill the vocabulary.

    Source: Sennrich et al. 2016 (BPE); Radford et al. 2019 (over bytes).
    """
    if vocab_size < _SMALLEST:
        raise ConfigError(f"vocab_size={vocab_size} must be at least {_SMALLEST}: all bytes and {EOS_TOKEN}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    # Sorted: the library hands the alphabet over from a set, whose order may differ between processes.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_in_batches(texts), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise DataError(
            f"The texts give only {tokenizer.get_vocab_size()} tokens, vocab_size={vocab_size} was asked for; give "
            "more text or a smaller vocab_size."
        )
    write_whole(Path(path), tokenizer.to_str(pretty=True).encode())
    return TokenizerFile(path)


def _in_batches(texts: Iterable[str], size: int = 256) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
