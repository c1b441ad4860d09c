from collections import namedtuple

import pytest
import torch

from lit_pretrain.distributed.pipeline import Call, rows_of, split
from lit_pretrain.errors import ConfigError

Pair = namedtuple("Pair", "a b")


def test_rows_are_shared_out_in_order_whatever_holds_them():
    x = torch.arange(12).reshape(6, 2)
    batch = {"x": x, "deep": [Pair(x[:, 0], "same")], "names": list("abcdef"), "index": 7, "scale": torch.tensor(2.0)}
    parts = split(batch, 3, rows=6)
    assert len(parts) == 3
    for i, part in enumerate(parts):
        assert torch.equal(part["x"], x[2 * i : 2 * i + 2])
        assert torch.equal(part["deep"][0].a, x[2 * i : 2 * i + 2, 0])
        assert part["deep"][0].b == "same"
        assert part["names"] == list("abcdef")[2 * i : 2 * i + 2]
        assert part["index"] == 7
        assert part["scale"] == 2.0


def test_microbatches_are_views():
    x = torch.zeros(4, 3)
    first, second = split((x, None), 2, rows=4)
    second[0].fill_(1.0)
    assert first[1] is None
    assert x.sum(1).tolist() == [0, 0, 3, 3]


def test_rows_of_the_first_tensor():
    assert rows_of([1, {"a": torch.tensor(1.0), "b": (torch.zeros(5, 2), torch.zeros(3))}]) == 5
    assert rows_of({"a": [1, "x"]}) is None


def test_a_call_keeps_its_keywords():
    x = torch.arange(4)
    calls = Call((x,), {"mask": x > 1, "causal": True}).split(2)
    assert [c.args[0].tolist() for c in calls] == [[0, 1], [2, 3]]
    assert [c.kwargs["mask"].tolist() for c in calls] == [[False, False], [True, True]]
    assert all(c.kwargs["causal"] is True for c in calls)


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ConfigError, match=r"shape \(3, 2\) in a batch of 4 rows"):
        split([torch.zeros(4), torch.zeros(3, 2)], 2, rows=4)
    with pytest.raises(ConfigError, match="6 rows, which 4 microbatches cannot share"):
        Call((torch.zeros(6),)).split(4)
    with pytest.raises(ConfigError, match="without a tensor that has rows"):
        Call((1, "x")).split(2)
