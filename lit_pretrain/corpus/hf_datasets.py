"""Hugging Face datasets as input: on the hub (``hf://NAME``), or a folder written by ``save_to_disk``."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import fsspec

from lit_pretrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from lit_pretrain.corpus.sources import Reading

_HUB = "hf://"
_HUB_FILES = "hf://datasets/"  # files on the hub, which fsspec opens
_SAVED = ("dataset_dict.json", "dataset_info.json")


def is_dataset(given: str) -> bool:
    """Whether an input is a dataset rather than files."""
    if given.startswith(_HUB):
        return not given.startswith(_HUB_FILES)
    if any(sign in given for sign in "*?["):
        return False
    try:
        fs, root = fsspec.core.url_to_fs(given)
    except (ImportError, ValueError):  # said where files are listed
        return False
    return any(fs.exists(posixpath.join(root, name)) for name in _SAVED)


def describe(given: str, *, reading: Reading) -> dict[str, Any]:
    """Path, name, size and stamp of a dataset, as ``InputFile`` takes them.

    Raises:
        ConfigError: The package is missing, or there is no such split or column.
        DataError: The dataset cannot be loaded or is empty.
    """
    dataset = _load(given, reading)
    if not dataset.num_rows:
        raise DataError(f"input={given} has no rows.")
    column = dataset.select_columns([reading.text_key])
    name = given.rstrip("/").rpartition("/")[2]
    stamp = f"{dataset.num_rows} rows, {dataset.info.version}"
    return {"path": given, "name": name, "size": int(column.data.nbytes), "stamp": stamp}


def num_rows(given: str, *, reading: Reading) -> int:
    """Rows of the split."""
    return int(_load(given, reading).num_rows)


def read_rows(given: str, start: int, end: int, *, reading: Reading) -> Iterator[Any]:
    """The text column's values from row ``start`` to before row ``end``."""
    column = _load(given, reading).select_columns([reading.text_key])
    for low in range(start, end, 256):
        yield from column[low : min(low + 256, end)][reading.text_key]


def _load(given: str, reading: Reading) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"input={given} is a Hugging Face dataset, which needs the package datasets; install it with pip install "
            "'lit-pretrain[hf]'."
        ) from error
    split = reading.dataset_split
    try:
        if given.startswith(_HUB):
            return _checked(
                datasets.load_dataset(given.removeprefix(_HUB), reading.dataset_config, split=split), given, reading
            )
        loaded = datasets.load_from_disk(given)
    except ConfigError:
        raise
    except Exception as error:  # the package raises many kinds
        reason = " ".join(str(error).split()).rstrip(".")
        raise DataError(f"input={given} cannot be loaded as a Hugging Face dataset ({reason}).") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ConfigError(f"dataset_split={split} is not in {given}; it has {', '.join(loaded)}.")
        loaded = loaded[split]
    return _checked(loaded, given, reading)


def _checked(dataset: Any, given: str, reading: Reading) -> Any:
    if reading.text_key not in dataset.column_names:
        names = ", ".join(map(repr, dataset.column_names))
        raise ConfigError(f"{given} has no column {reading.text_key!r} (text_key); it has {names}.")
    return dataset
