"""Trees survive JSON exactly, or are refused by name."""

from __future__ import annotations

import argparse
import json
import math
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import Enum, IntEnum
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_pretrain.distributed.checkpoint import CheckpointError, decode, encode


def through(tree):
    plain, tensors = encode(tree)
    return decode(json.loads(json.dumps(plain, allow_nan=False)), tensors)


def alike(a, b) -> bool:
    """Same types, same values, same order; floats by their bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return alike(a.real, b.real) and alike(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            alike(k, m) and alike(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


KEYS = st.one_of(
    st.text(max_size=4), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.just("$"),
    st.tuples(st.integers(), st.text(max_size=2)),
)  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=9),
    st.complex_numbers(), st.builds(PurePosixPath, st.sampled_from(["a/b", "/", "."])).map(Path),
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.frozensets(st.integers(), max_size=3),
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=200)
@given(TREES)
def test_any_tree_of_plain_data_comes_back(tree):
    assert alike(through(tree), tree)


@pytest.mark.parametrize(
    "value",
    [
        math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, 10**400, -(2**63) - 1, "\ud800",
        {"$": "tuple", "v": []},
        {1: "int", "1": "str", 1.5: "float"}, {True: 0, None: 1}, (), [()], {1, 2}, frozenset({"a"}), b"\0\xff",
        torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), np.dtype("<i4"),
        defaultdict(list, {"a": [1]}), defaultdict(None, {"a": 1}), OrderedDict([("b", 1), ("a", 2)]),
    ],
    ids=repr,
)  # fmt: skip
def test_special_values(value):
    got = through({"x": value})["x"]
    assert alike(got, value)
    if isinstance(value, defaultdict):
        assert got.default_factory is value.default_factory


def test_a_nan_keeps_its_payload():
    odd = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    assert struct.pack(">d", through(odd)).hex() == "fff8000000000123"


@pytest.mark.parametrize(
    "value", [np.float64(0.1), np.int8(-3), np.bool_(True), np.str_("né"), np.datetime64("2020-01-01")]
)
def test_numpy_scalars_keep_their_type(value):
    got = through([value])[0]
    assert type(got) is type(value)
    assert got == value
    assert got.dtype == value.dtype


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype=">u2").reshape(2, 3), np.array(3.5), np.zeros((0, 2)), np.asfortranarray(np.eye(3))]
)
def test_arrays_keep_dtype_and_shape_and_can_be_written(array):
    got = through(array)
    assert got.dtype == array.dtype
    assert np.array_equal(got, array)
    assert got.shape == array.shape
    got[...] = 1


def test_tensors_are_taken_out_by_path():
    tree = {"a": {"b": [torch.ones(2), 3]}, "a.b": (torch.zeros(1),), 7: torch.tensor(1)}
    plain, tensors = encode(tree)
    assert set(tensors) == {"a.b.0", "a.b.0#2", "7"}
    back = decode(json.loads(json.dumps(plain)), tensors)
    assert back["a"]["b"][0] is tensors["a.b.0"]
    assert torch.equal(back["a.b"][0], torch.zeros(1))
    assert torch.equal(back["a"]["b"][0], torch.ones(2))


@pytest.mark.parametrize(
    "tensor", [torch.get_rng_state()[:9], torch.tensor(2.5, dtype=torch.bfloat16), torch.ones(0, 3)]
)
def test_small_tensors_can_stay_inside(tensor):
    plain, tensors = encode({"t": tensor}, inline_tensors=True)
    back = decode(json.loads(json.dumps(plain)), {})["t"]
    assert not tensors
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_namespaces_and_omegaconf_become_plain_containers():
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"a": [1, {"b": 2.5}], "c": "${a}"})
    assert through({"hparams": config}) == {"hparams": {"a": [1, {"b": 2.5}], "c": [1, {"b": 2.5}]}}
    assert through(argparse.Namespace(a=1, b=[2])) == {"a": 1, "b": [2]}


class Colour(Enum):
    RED = 1


class Number(IntEnum):
    ONE = 1


Pair = namedtuple("Pair", "a b")


def circle():
    x = [1]
    x.append(x)
    return x


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Colour.RED, r"\.value or \.name"),
        (Number.ONE, r"\.value or \.name"),
        (Pair(1, 2), "Pair"),
        (Counter("a"), "Counter"),
        (object(), "a object"),
        (print, "builtin_function"),
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.eye(2).to_sparse(), "save it dense"),
        (torch.ones(1, device="meta"), "a meta tensor"),
        (np.array([object()]), "an array of numbers"),
        (defaultdict(lambda: 3), "its factory"),
        (circle(), "it contains itself"),
        ({object(): 1}, "it is a key"),
        (slice(1), "slice"),
    ],
)
def test_what_is_no_plain_data_is_refused_by_its_path(value, said):
    with pytest.raises(CheckpointError, match=said) as caught:
        encode({"callbacks": [0, {"mine": value}]})
    assert "the checkpoint['callbacks']['1']['mine']" in str(caught.value)


@pytest.mark.parametrize(
    "plain",
    [
        {"$": "exec", "v": "x"}, {"$": "tensor", "key": "none"}, {"$": "tuple"}, {"$": "torch.dtype", "v": "load"},
        {"$": "numpy.array", "dtype": "O", "shape": [1], "v": "AAAAAAAAAAA="}, {"$": "float", "v": "zz"},
        {"$": "defaultdict", "factory": "eval", "v": []},
        {"$": "inline", "dtype": "float32", "shape": [9], "v": "AAAA"},
        {"$": "bytes", "v": "!"}, {"$": "dict", "v": [[{"$": "dict", "v": []}, 1]]}, {"$": ["x"], "v": 1},
    ],
    ids=str,
)  # fmt: skip
def test_json_that_nobody_wrote_is_refused(plain):
    with pytest.raises(CheckpointError):
        decode({"a": plain}, {})


def test_it_needs_no_torch():
    program = (
        "import sys\nfrom lit_pretrain.distributed.checkpoint import catalog, encode, decode, verify\n"
        "assert decode(encode({1: (2.5, b'x')})[0], {}) == {1: (2.5, b'x')}\n"
        "print(*({'torch', 'numpy', 'lightning'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
