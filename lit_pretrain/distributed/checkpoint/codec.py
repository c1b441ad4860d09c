"""Nested Python values as plain JSON and back, exactly, without pickle. Loads torch only where there are tensors.

JSON's own values stand for themselves. Everything else is an object with the key ``$``, which names what it is::

    (1, math.nan)  ->  {"$": "tuple", "v": [1, {"$": "float", "v": "7ff8000000000000"}]}

Tensors are taken out: the JSON holds ``{"$": "tensor", "key": "callbacks.EarlyStopping.best_score"}`` and the tensor is
returned beside it under that key.
"""

from __future__ import annotations

import argparse
import base64
import math
import struct
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

from lit_pretrain.distributed.checkpoint.manifest import CheckpointError

TAG = "$"
FACTORIES: dict[str, Any] = {
    "list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str, "tuple": tuple, "bool": bool,
    "OrderedDict": OrderedDict,
}  # fmt: skip
PLAIN_INT = 1 << 63  # beyond it Python refuses decimal texts at some length; hexadecimal ones have no limit


def encode(tree: Any, *, inline_tensors: bool = False, root: str = "the checkpoint") -> tuple[Any, dict[str, Any]]:
    """A tree as JSON, and the tensors that stood in it by path.

    Args:
        tree: Nested dict (any keys of str, int, float, bool, None or tuples of them), list, tuple, set, frozenset, str,
            bytes, numbers, Path, torch.Size, torch.dtype, torch.device, numpy scalars and arrays, OrderedDict,
            defaultdict; a Namespace and OmegaConf's containers become plain ones.
        inline_tensors: Put tensors into the JSON instead, for small ones.
        root: What errors call the whole.

    Raises:
        CheckpointError: naming the path and the type of what can be no part of it.
    """
    encoder = _Encoder(inline=inline_tensors, root=root)
    return encoder.value(tree, ()), encoder.tensors


class _Encoder:
    def __init__(self, *, inline: bool, root: str) -> None:
        self.tensors: dict[str, Any] = {}
        self._inline = inline
        self._root = root
        self._open: set[int] = set()
        self._torch = sys.modules.get("torch")  # not loaded: then there are none of its objects either
        self._numpy = sys.modules.get("numpy")

    def value(self, x: Any, at: tuple[str, ...]) -> Any:
        kind = type(x)
        if x is None or kind is bool or kind is str:
            return x
        if kind is int:
            return x if -PLAIN_INT <= x < PLAIN_INT else {TAG: "int", "v": hex(x)}
        if kind is float:
            return x if math.isfinite(x) else {TAG: "float", "v": struct.pack(">d", x).hex()}
        if kind is complex:
            return {TAG: "complex", "v": [self.value(x.real, at), self.value(x.imag, at)]}
        if kind is bytes:
            return {TAG: "bytes", "v": _text(x)}
        if isinstance(x, PurePath):
            return {TAG: "path", "v": str(x)}
        leaf = self._foreign(x, at)
        if leaf is not None:
            return leaf
        if id(x) in self._open:
            raise self._refusal(at, x, "it contains itself", "break the circle")
        self._open.add(id(x))
        try:
            return self._container(x, kind, at)
        finally:
            self._open.discard(id(x))

    def _container(self, x: Any, kind: type, at: tuple[str, ...]) -> Any:
        if kind is dict:
            return self._dict(x, at)
        if kind is list:
            return [self.value(item, (*at, str(i))) for i, item in enumerate(x)]
        if kind is tuple or kind is set or kind is frozenset:
            return {TAG: kind.__name__, "v": [self.value(item, (*at, str(i))) for i, item in enumerate(x)]}
        if kind is OrderedDict:
            return {TAG: "OrderedDict", "v": self._items(x, at)}
        if kind is defaultdict:
            name = next((n for n, factory in FACTORIES.items() if factory is x.default_factory), None)
            if name is None and x.default_factory is not None:
                raise self._refusal(
                    at, x, f"its factory is {x.default_factory!r}", f"use one of {', '.join(FACTORIES)}, or a dict"
                )
            return {TAG: "defaultdict", "factory": name, "v": self._items(x, at)}
        if isinstance(x, argparse.Namespace):
            return self._dict(vars(x), at)
        if kind.__module__.split(".")[0] == "omegaconf" and kind.__name__ in ("DictConfig", "ListConfig"):
            return self._omegaconf(x, at)
        raise self._refusal(at, x, "only plain data is saved", "save numbers, strings, lists, dicts or tensors instead")

    def _dict(self, x: Mapping[Any, Any], at: tuple[str, ...]) -> Any:
        if all(type(key) is str for key in x) and TAG not in x:
            return {key: self.value(item, (*at, key)) for key, item in x.items()}
        return {TAG: "dict", "v": self._items(x, at)}

    def _items(self, x: Mapping[Any, Any], at: tuple[str, ...]) -> list[Any]:
        return [[self._key(key, at), self.value(item, (*at, str(key)))] for key, item in x.items()]

    def _key(self, key: Any, at: tuple[str, ...]) -> Any:
        if key is None or type(key) in (str, int, float, bool, bytes, complex):
            return self.value(key, at)
        if type(key) is tuple:
            return {TAG: "tuple", "v": [self._key(part, at) for part in key]}
        raise self._refusal((*at, repr(key)), key, "it is a key", "use strings or numbers as keys")

    def _omegaconf(self, x: Any, at: tuple[str, ...]) -> Any:
        """By behaviour, without importing it: a DictConfig has ``items``, a ListConfig has not."""
        if hasattr(x, "items"):
            return self._dict(dict(x.items()), at)
        return self.value(list(x), at)

    def _foreign(self, x: Any, at: tuple[str, ...]) -> Any:
        """Objects of torch and numpy; None for others."""
        if isinstance(x, Enum):
            raise self._refusal(at, x, "only plain data is saved", "save its .value or .name instead")
        torch, numpy = self._torch, self._numpy
        if torch is not None:
            if isinstance(x, torch.Tensor):
                return self._tensor(x, at)
            if type(x) is torch.Size:
                return {TAG: "torch.Size", "v": list(x)}
            if type(x) is torch.dtype:
                return {TAG: "torch.dtype", "v": str(x).removeprefix("torch.")}
            if type(x) is torch.device:
                return {TAG: "torch.device", "v": str(x)}
        if numpy is not None:
            if type(x) is numpy.ndarray or isinstance(x, numpy.generic):
                return self._array(x, at)
            if isinstance(x, numpy.dtype):
                return {TAG: "numpy.dtype", "v": x.str}
        return None

    def _array(self, x: Any, at: tuple[str, ...]) -> Any:
        if x.dtype.hasobject or x.dtype.names:
            raise self._refusal(at, x, f"its dtype is {x.dtype}", "use an array of numbers")
        kind = "numpy.array" if type(x) is self._numpy.ndarray else "numpy.scalar"  # type: ignore[union-attr]
        return {TAG: kind, "dtype": x.dtype.str, "shape": list(x.shape), "v": _text(x.tobytes())}

    def _tensor(self, x: Any, at: tuple[str, ...]) -> Any:
        x = x.detach()
        if x.layout is not self._torch.strided or x.is_quantized or x.is_meta:  # type: ignore[union-attr]
            what = "a quantized tensor" if x.is_quantized else "a meta tensor" if x.is_meta else f"a {x.layout} tensor"
            raise self._refusal(at, x, f"it is {what}", "save it dense")
        if self._inline:
            from lit_pretrain.distributed.checkpoint.blob import raw

            dtype = str(x.dtype).removeprefix("torch.")
            data = bytes(raw(x.cpu().contiguous()))
            return {TAG: "inline", "dtype": dtype, "shape": list(x.shape), "v": _text(data)}
        path = key = ".".join(at) or "value"
        number = 1
        while key in self.tensors:  # "a.b" under one key and "b" under "a" read the same
            number += 1
            key = f"{path}#{number}"
        self.tensors[key] = x
        return {TAG: "tensor", "key": key}

    def _refusal(self, at: tuple[str, ...], x: Any, why: str, way_out: str) -> CheckpointError:
        kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
        where = f"{self._root}[{']['.join(repr(part) for part in at)}]" if at else self._root
        return CheckpointError(f"{where} is a {kind}, which cannot be saved: {why}; {way_out}.")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def child(plain: Any, key: str) -> Any:
    """The encoded value under one key of an encoded dict; None when there is none."""
    if isinstance(plain, dict) and plain.get(TAG) in ("dict", "OrderedDict", "defaultdict"):
        return next((value for name, value in plain["v"] if name == key), None)
    return plain.get(key) if isinstance(plain, dict) and TAG not in plain else None


def decode(plain: Any, tensors: Mapping[str, Any]) -> Any:
    """The tree that was encoded.

    Args:
        plain: What ``encode`` gave, or what JSON made of it.
        tensors: By path, as ``encode`` gave them.

    Raises:
        CheckpointError: It is nothing that ``encode`` could have given.
    """
    try:
        return _decode(plain, tensors)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, struct.error) as e:
        raise CheckpointError(
            f"the checkpoint's tree cannot be read ({type(e).__name__}: {e}); take another checkpoint."
        ) from e


def _decode(x: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(x, list):
        return [_decode(item, tensors) for item in x]
    if not isinstance(x, dict):
        return x
    tag = x.get(TAG)
    if tag is None:
        return {key: _decode(item, tensors) for key, item in x.items()}
    if tag == "tensor":
        if x["key"] not in tensors:
            raise CheckpointError(f"the checkpoint lacks the tensor {x['key']!r}; take another checkpoint.")
        return tensors[x["key"]]
    if tag in ("dict", "OrderedDict", "defaultdict"):
        pairs = [(_decode(key, tensors), _decode(item, tensors)) for key, item in x["v"]]
        if tag == "defaultdict":
            return defaultdict(None if x["factory"] is None else FACTORIES[x["factory"]], pairs)
        return OrderedDict(pairs) if tag == "OrderedDict" else dict(pairs)
    if tag in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](_decode(item, tensors) for item in x["v"])
    return _decode_leaf(tag, x)


def _decode_leaf(tag: str, x: dict[str, Any]) -> Any:
    value = x["v"]
    if tag == "int":
        return int(value, 16)
    if tag == "float":
        return struct.unpack(">d", bytes.fromhex(value))[0]
    if tag == "complex":
        return complex(*(_decode(part, {}) for part in value))
    if tag == "bytes":
        return base64.b64decode(value, validate=True)
    if tag == "path":
        return Path(value)
    if tag.startswith("numpy."):
        return _decode_numpy(tag, x)
    import torch

    if tag == "torch.Size":
        return torch.Size(value)
    if tag == "torch.device":
        return torch.device(value)
    if tag in ("torch.dtype", "inline"):
        dtype = getattr(torch, value if tag == "torch.dtype" else x["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"the checkpoint names {value!r}, which is no dtype; take another checkpoint.")
        if tag == "torch.dtype":
            return dtype
        data = bytearray(base64.b64decode(value, validate=True))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(x["shape"])
    raise CheckpointError(f"the checkpoint holds a value of unknown kind {tag!r}; use the lit-pretrain that wrote it.")


def _decode_numpy(tag: str, x: dict[str, Any]) -> Any:
    import numpy as np

    if tag == "numpy.dtype":
        return np.dtype(x["v"])
    array = np.frombuffer(base64.b64decode(x["v"], validate=True), dtype=np.dtype(x["dtype"])).reshape(x["shape"])
    return array.copy() if tag == "numpy.array" else array[()]
