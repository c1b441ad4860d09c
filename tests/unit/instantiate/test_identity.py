from __future__ import annotations

from typing import Any

import pytest

from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate.identity import changes, differences, refuse


def config(**changed: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "model": {"n_layer": 2, "vocab_size": 320, "dropout": 0.0},
        "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]},
        "schedule": {"_target_": "WarmupCosine", "min_ratio": 0.1},
        "batch": {"sequence_length": 16, "global_batch_size": 4, "micro_batch_size": 2},
        "seed": 1,
        "length": {"steps": 10, "tokens": None, "epochs": None},
        "trainer": {"precision": "32-true", "max_steps": 10, "max_epochs": -1, "devices": 1},
        "callbacks": {"clipping": {"max_norm": 1.0}, "progress": {"interval_s": 30.0}},
        "data": {"corpus": {"sources": {"a": "x"}, "vocab_size": 320}, "seed": 1, "prefetch": 2, "weights": None},
        "module": {"config": {"n_layer": 2, "vocab_size": 320, "dropout": 0.0}, "compile": False, "seed": 1},
        "run": {"dir": "a"},
    }
    for path, value in changed.items():
        node = plain
        *above, leaf = path.split("__")
        for name in above:
            node = node[name]
        node[leaf] = value
    return plain


@pytest.mark.parametrize(
    ("changed", "sentences"),
    [
        ({}, []),
        ({"model__dropout": 0.1, "module__config": {"n_layer": 2, "vocab_size": 320, "dropout": 0.1}},
         ["model.dropout was 0.0, is 0.1"]),  # handed on to the module: named once
        ({"optimizer__lr": 0.1}, ["optimizer.lr was 0.001, is 0.1"]),
        ({"optimizer__betas": [0.9, 0.99]}, ["optimizer.betas was [0.9, 0.95], is [0.9, 0.99]"]),
        ({"schedule": None}, ["schedule._target_ was WarmupCosine, is null", "schedule.min_ratio was 0.1, is null"]),
        ({"seed": 2, "data__seed": 2, "module__seed": 2}, ["seed was 1, is 2"]),
        ({"data__seed": 2}, ["data.seed was 1, is 2"]),
        ({"batch__global_batch_size": 8}, ["batch.global_batch_size was 4, is 8"]),
        ({"data__corpus__sources": {"a": "x", "b": "y"}}, ["data.corpus.sources.b was null, is y"]),
        ({"trainer__precision": "bf16-mixed"}, ["trainer.precision was 32-true, is bf16-mixed"]),
        ({"callbacks__clipping": None}, ["callbacks.clipping.max_norm was 1.0, is null"]),
        # Speed, place, display, the future: free.
        ({"batch__micro_batch_size": 1, "trainer__devices": 2, "run__dir": "b", "data__prefetch": 0}, []),
        ({"module__compile": True, "callbacks__progress": None, "data__weights": {"a": 1}}, []),
        # Longer is no difference, shorter is, and a length that cannot be compared.
        ({"trainer__max_steps": 20, "length": {"steps": 20}}, []),
        ({"trainer__max_steps": 12, "length": {"tokens": 768}}, []),
        ({"trainer__max_steps": 5, "length": {"steps": 5}}, ["length.steps was 10, is 5"]),
        ({"trainer__max_steps": 5, "length": {"tokens": 320}}, ["length was steps=10, is tokens=320"]),
        ({"trainer__max_steps": -1, "trainer__max_epochs": 1, "length": {"epochs": 1}},
         ["length was steps=10, is epochs=1"]),
    ],
)  # fmt: skip
def test_what_counts_as_another_run(changed: dict[str, Any], sentences: list[str]) -> None:
    assert [str(one) for one in differences(config(), config(**changed))] == sentences


def test_epochs() -> None:
    one, two = (
        config(trainer__max_steps=-1, trainer__max_epochs=n, length={"steps": None, "epochs": n}) for n in (1, 2)
    )
    assert differences(one, two) == []
    assert [str(d) for d in differences(two, one)] == ["length.epochs was 2, is 1"]


def test_the_refusal_names_everything_and_the_way_out() -> None:
    found = differences(config(), config(optimizer__lr=0.1, seed=2))
    with pytest.raises(ConfigError) as e:
        refuse(found, ["schedule"], of="step-5")
    assert str(e.value) == (
        "step-5 was made with other settings: optimizer.lr was 0.001, is 0.1; seed was 1, is 2; restore them, begin "
        "another run with run_id=..., or accept the change with resume_accept=[schedule,optimizer.lr,seed]."
    )
    with pytest.raises(ConfigError, match="seed was 1, is 2; restore") as e:
        refuse(found, ["optimizer"], of="step-5")
    assert "optimizer.lr was" not in str(e.value)
    refuse(found, ["optimizer.lr", "seed"], of="step-5")
    with pytest.raises(ConfigError, match="optimizer"):  # a name that only begins alike accepts nothing
        refuse(found, ["optim", "seed"], of="step-5")


def test_every_change() -> None:
    assert [str(one) for one in changes(config(), config(trainer__devices=2, run__dir="b"))] == [
        "trainer.devices was 1, is 2",
        "run.dir was a, is b",
    ]
