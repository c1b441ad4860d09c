"""What a preparation folder says about itself: unfinished, finished, or made of something else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lit_pretrain.corpus._files import readable_errors, sync_folder, write_whole
from lit_pretrain.corpus.encode import RECORD, SPLITS, Tally, unit_folder
from lit_pretrain.corpus.manifest import Manifest, ShardInfo
from lit_pretrain.corpus.tokenizer import TokenizerFile
from lit_pretrain.errors import ConfigError, DataError

DONE = "prepare.json"
TOKENIZER = "tokenizer.json"
_PARTS = ".parts"
_PLAN = "plan.json"
_VERSION = 1


def finished(output: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of a finished preparation of just this; None when there is no finished one.

    Raises:
        ConfigError: The folder holds a finished preparation of something else.
        DataError: The folder's record is damaged.
    """
    path = output / DONE
    if not path.exists():
        return None
    record = _read(path)
    _compare(record, identity, f"output={output} was prepared")
    shutil.rmtree(output / _PARTS, ignore_errors=True)  # left by a kill just before the end
    return record


def open_parts(output: Path) -> Path:
    """The folder of finished units, made or found again.

    Raises:
        ConfigError: The output folder holds something else.
        DataError: It cannot be written.
    """
    parts = output / _PARTS
    with readable_errors(output, doing="write"):
        if output.exists() and not output.is_dir():
            raise ConfigError(f"output={output} is a file; name a folder.")
        foreign = [name for name in (*SPLITS, TOKENIZER) if (output / name).exists()]
        if foreign and not parts.exists():
            raise ConfigError(f"output={output} already holds {foreign[0]}; choose another folder.")
        parts.mkdir(parents=True, exist_ok=True)
    return parts


def begin(output: Path, identity: Mapping[str, Any]) -> None:
    """Write down what is being prepared, or find that it goes on; only for the holder of the lock.

    Raises:
        ConfigError: There is an unfinished preparation of something else.
    """
    parts = output / _PARTS
    clean(parts)
    plan = parts / _PLAN
    if plan.exists() and ((output / TOKENIZER).exists() or any(parts.glob("[0-9]*"))):  # there is something to lose
        _compare(_read(plan), identity, f"output={output} holds an unfinished preparation")
    else:
        write_whole(plan, _dump({"version": _VERSION, "identity": identity}))


def clean(parts: Path) -> None:
    """Remove what a killed process left half finished."""
    for path in parts.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def encoded_bytes(parts: Path, numbers: Iterable[int]) -> int:
    """UTF-8 bytes of text in finished units."""
    return sum(Manifest.load(unit_folder(parts, number) / split).num_bytes for number in numbers for split in SPLITS)


def finish(output: Path, identity: Mapping[str, Any], *, tokenizer: TokenizerFile, num_units: int) -> dict[str, Any]:
    """Move the units' shards to their places and write the record, last; may be interrupted and called again.

    Raises:
        DataError: There are no documents, or something cannot be moved.
    """
    parts = output / _PARTS
    tally = Tally()
    with readable_errors(output, doing="write"):
        for number in range(num_units):
            tally.merge(json.loads((unit_folder(parts, number) / RECORD).read_bytes()))
        manifests = {
            split: [Manifest.load(unit_folder(parts, number) / split) for number in range(num_units)]
            for split in SPLITS
        }
        if not any(manifest.num_documents for manifest in manifests["train"]):
            held_out = sum(manifest.num_documents for manifest in manifests["validation"])
            raise DataError(
                f"all {held_out} documents fell to validation; delete {output} and prepare more documents, or hold "
                "none out with validation_fraction=0."
            )
        splits = {}
        for split, some in manifests.items():
            merged = _gather(output, split, some, tokenizer)
            if merged is not None:
                splits[split] = {
                    "documents": merged.num_documents,
                    "bytes": merged.num_bytes,
                    "tokens": merged.num_tokens,
                    "shards": len(merged.shards),
                }
        record = {
            "version": _VERSION,
            "splits": splits,
            "skipped": tally.reasons,
            "tokenizer": {
                "eos_token": tokenizer.eos_token,
                "eos_id": tokenizer.eos_id,
                "vocab_size": tokenizer.vocab_size,
                "hash": tokenizer.content_hash,
            },
            "identity": identity,
        }
        write_whole(output / DONE, _dump(record))
        shutil.rmtree(parts, ignore_errors=True)
    return record


def _gather(output: Path, split: str, manifests: list[Manifest], tokenizer: TokenizerFile) -> Manifest | None:
    """Rename the shards of all units into one folder, numbered in order; what is there already was moved before."""
    target = output / split
    shards: list[ShardInfo] = []
    for number, manifest in enumerate(manifests):
        if manifest.tokenizer_hash != tokenizer.content_hash:
            raise DataError(
                f"{output / TOKENIZER} was changed while shards were made; delete {output} and start again."
            )
        source = unit_folder(output / _PARTS, number) / split
        for shard in manifest.shards:
            target.mkdir(exist_ok=True)
            name = f"shard-{len(shards):05d}"
            for ending in (".bin", ".idx"):
                if (source / f"{shard.name}{ending}").exists():
                    os.replace(source / f"{shard.name}{ending}", target / f"{name}{ending}")
                elif not (target / f"{name}{ending}").exists():
                    raise DataError(f"{source / shard.name}{ending} is gone; delete {output} and start again.")
            shards.append(ShardInfo(**{**vars(shard), "name": name}))
    if not shards:
        return None
    sync_folder(target)
    first = manifests[0]
    merged = Manifest(
        dtype=first.dtype,
        vocab_size=first.vocab_size,
        eos_id=first.eos_id,
        tokenizer_hash=first.tokenizer_hash,
        config_hash=first.config_hash,
        shards=tuple(shards),
    )
    merged.save(target)
    return merged


def nothing_usable(tally: Tally) -> str:
    """Why no document could be used."""
    why = describe_skipped(tally.reasons)
    return f"the input holds no document that can be used{f' ({why})' if why else ''}."


def describe_skipped(reasons: Mapping[str, Mapping[str, Any]]) -> str:
    """Documents left out, per reason with the first of them."""
    return "; ".join(
        f"{what['documents']} {reason}, first {what['first']}" + (f": {what['detail']}" if what["detail"] else "")
        for reason, what in reasons.items()
    )


def _compare(there: Mapping[str, Any], identity: Mapping[str, Any], begun: str) -> None:
    """Raises ConfigError naming the first setting or file that differs."""
    before, now = there["identity"], json.loads(json.dumps(identity))
    if before == now:
        return
    key = next(key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key))
    if key == "files":
        old, new = ({tuple(file[:1]): file for file in some} for some in (before[key], now[key]))
        name = next((n[0] for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)), "their order")
        differs = f"other input: {name} is new, gone or changed"
    elif isinstance(before.get(key), dict) and isinstance(now.get(key), dict):
        inner = next(k for k in sorted(before[key].keys() | now[key].keys()) if before[key].get(k) != now[key].get(k))
        differs = f"{inner}={before[key].get(inner)}, not {now[key].get(inner)}"
    elif key == "tokenizer":
        differs = "another tokenizer"
    else:
        differs = f"{key}={before.get(key)}, not {now.get(key)}"
    raise ConfigError(f"{begun} with {differs}; choose another folder, or delete this one to start over.")


def _read(path: Path) -> dict[str, Any]:
    with readable_errors(path, doing="read"):
        raw = path.read_bytes()
    try:
        record: dict[str, Any] = json.loads(raw)
        if record["version"] != _VERSION or not isinstance(record["identity"], dict):
            raise DataError(f"{path} has version {record['version']}; only version {_VERSION} can be read.")
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is damaged ({error}); delete its folder and prepare again.") from error
    return record


def _dump(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
