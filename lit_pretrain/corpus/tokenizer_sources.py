"""Tokenizers of other people as one ``tokenizer.json``: Hugging Face, GPT-2's two files, tiktoken's ranks."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from lit_pretrain.corpus._files import readable_errors
from lit_pretrain.corpus.tokenizer import EOS_TOKEN
from lit_pretrain.errors import ConfigError, DataError

_USUAL_EOS = (EOS_TOKEN, "<|end_of_text|>", "</s>", "<eos>")
_GPT2_FILES = ("vocab.json", "merges.txt")
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A rank file holds neither: where words end, and the id of the end of a document.
_KNOWN_RANKS = {
    "r50k_base": (_GPT2, 50256),
    "p50k_base": (_GPT2, 50256),
    "gpt2": (_GPT2, 50256),
    "cl100k_base": (_GPT4, 100257),
    "o200k_base": (_GPT4O, 199999),
}


@dataclass(frozen=True, kw_only=True)
class TokenizerSource:
    """A tokenizer ready to be written.

    Args:
        content: Of ``tokenizer.json``.
        eos_token: The token that ends a document.
        origin: What it was made of, for people.
    """

    content: str
    eos_token: str
    origin: str


def load_tokenizer(given: Path | str, *, eos_token: str | None = None, pattern: str | None = None) -> TokenizerSource:
    """Read or convert a tokenizer.

    Args:
        given: A ``tokenizer.json``, a Hugging Face folder, a folder with (or one of) ``vocab.json`` and ``merges.txt``,
            or a ``.tiktoken`` file.
        eos_token: The token that ends a document; None takes what the files say, else one of the usual names.
        pattern: Regular expression that cuts text into words, for ``.tiktoken`` files of unknown name.

    Raises:
        ConfigError: There is no end-of-document token, or no pattern.
        DataError: The files are missing, damaged or of unknown kind.
    """
    path = Path(given).expanduser()
    if pattern is not None and path.suffix != ".tiktoken":
        raise ConfigError(f"tokenizer_pattern is for .tiktoken files; tokenizer={given} says itself how it cuts text.")
    with readable_errors(path, doing="read"):
        if not path.exists():
            raise DataError(
                f"tokenizer={given} does not exist; give train, a tokenizer.json, a folder with one, vocab.json beside "
                "merges.txt, or a .tiktoken file."
            )
        content: str | None = None
        if path.suffix == ".tiktoken":
            tokenizer, origin, usual = _from_ranks(path, eos_token, pattern), "tiktoken ranks", eos_token or EOS_TOKEN
        else:
            folder = path if path.is_dir() else path.parent
            single = path / "tokenizer.json" if path.is_dir() else path
            if path.name not in _GPT2_FILES and single.is_file():
                content = single.read_text(encoding="utf-8", errors="replace")
                tokenizer, origin = _from_json(single, content), "tokenizer.json"
            elif all((folder / name).is_file() for name in _GPT2_FILES):
                tokenizer, origin = _from_gpt2(folder), "vocab.json and merges.txt"
            else:
                raise DataError(
                    f"{path} holds no tokenizer.json, nor vocab.json with merges.txt; save it with transformers: "
                    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
                )
            usual = _find_eos(tokenizer, folder, eos_token, given)
    if (eos_id := tokenizer.token_to_id(usual)) is None:
        raise ConfigError(f"{path} has no token {usual!r}; name its end-of-document token with eos_token=....")
    changed = tokenizer.truncation is not None or tokenizer.padding is not None
    tokenizer.no_truncation()  # settings of one use, which would cut or fill up documents
    tokenizer.no_padding()
    if eos_id not in tokenizer.get_added_tokens_decoder():
        changed = True
        tokenizer.add_special_tokens([AddedToken(usual, special=True, normalized=False)])
    written = tokenizer.to_str(pretty=True) if content is None or changed else content
    return TokenizerSource(content=written, eos_token=usual, origin=origin)


def _from_json(path: Path, content: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(content)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is not a tokenizer.json ({error}); write it again.") from error


def _from_gpt2(folder: Path) -> Tokenizer:
    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:
        raise DataError(f"vocab.json and merges.txt in {folder} do not fit together ({error}).") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _find_eos(tokenizer: Tokenizer, folder: Path, eos_token: str | None, given: Path | str) -> str:
    """The end-of-document token: asked for, said beside the file, or the only usual one there is."""
    if eos_token is not None:
        return eos_token
    said = _eos_beside(folder / "tokenizer_config.json")
    if said is not None:
        return said
    found = [token for token in _USUAL_EOS if tokenizer.token_to_id(token) is not None]
    if len(found) == 1:
        return found[0]
    why = f"has several usual ones ({', '.join(found)})" if found else f"has none of the usual {', '.join(_USUAL_EOS)}"
    raise ConfigError(
        f"tokenizer={given} does not say which token ends a document and {why}; name it with eos_token=...."
    )


def _eos_beside(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        said: Any = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error}); copy it again.") from error
    if isinstance(said, Mapping):
        said = said.get("content")
    return said if isinstance(said, str) else None


def _from_ranks(path: Path, eos_token: str | None, pattern: str | None) -> Tokenizer:
    ranks = _read_ranks(path)
    known = _KNOWN_RANKS.get(path.stem)
    if known is None and pattern is None:
        raise ConfigError(
            f"tokenizer={path} does not say where words end; give its regular expression as tokenizer_pattern=..., or "
            f"name the file as published ({', '.join(_KNOWN_RANKS)})."
        )
    letter = _byte_letters()
    vocab = {"".join(letter[byte] for byte in token): rank for token, rank in ranks.items()}
    eos, used = eos_token or EOS_TOKEN, set(ranks.values())
    eos_id = known[1] if known and known[1] not in used else max(used) + 1
    vocab.setdefault(eos, eos_id)
    merges = [("".join(letter[b] for b in left), "".join(letter[b] for b in right)) for left, right in _merges(ranks)]
    # A word that is itself a token is taken whole, also when no merges lead to it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    cut = Regex(pattern if pattern is not None else known[0] if known else "")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(cut, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                f"{path}, line {number}: not a token in base 64 and its rank; download it again."
            ) from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"{path} has no rank for {len(missing)} of the 256 bytes: it is no rank file, or cut off.")
    if len(set(ranks.values())) != len(ranks):
        raise DataError(f"{path} gives two tokens the same rank; download it again.")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All pairs of tokens that make a token, in the order in which tiktoken prefers them: by what they make."""
    found: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=lambda token: ranks[token]):
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in halves if left in ranks and right in ranks]
        found.extend(sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]])))
    return found


def _byte_letters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Source: Radford et al. 2019: printable bytes stand for themselves, the others are numbered from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, number = [], 256
    for byte in range(256):
        letters.append(chr(byte if byte in printable else number))
        number += byte not in printable
    return letters
