"""Nodes -> objects: every mistake is one sentence that names the place and the way out."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate import build, nearest, validate


class Base:
    def __init__(self, *, speed: float = 1.0, root_dir: str, depth: int = 0) -> None:
        self.speed, self.root_dir, self.depth = speed, root_dir, depth


class Child(Base):
    def __init__(self, folder: str, width: int = 4, **rest: Any) -> None:
        super().__init__(root_dir=folder, **rest)
        self.width = width


class Keeps(Base):
    """Takes anything, and hands nothing on."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(root_dir="x")
        self.rest = rest


class Typed:
    def __init__(
        self,
        *,
        kind: Literal["a", "b"] = "a",
        count: int | None = None,
        names: Sequence[str] = (),
        shares: Mapping[str, float] | None = None,
        path: Path | str = "",
        child: Base | None = None,
        on: bool = False,
    ) -> None:
        self.child, self.shares = child, shares


class Refuses:
    def __init__(self, size: int = 1) -> None:
        if size == 2:
            raise ConfigError("size=2 must be odd.")
        if size == 4:
            raise ValueError("four is\n too many")
        if size == 6:
            raise KeyError("a bug")


def scale(model: Any, *, factor: float = 1.0) -> tuple[Any, float]:
    return model, factor


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("parts_of_test")
    for thing in (Base, Child, Keeps, Typed, Refuses, scale):
        monkeypatch.setattr(thing, "__module__", "parts_of_test")
        setattr(module, thing.__name__, thing)
    monkeypatch.setitem(sys.modules, "parts_of_test", module)


def node(name: str, **settings: Any) -> dict[str, Any]:
    return {"_target_": f"parts_of_test.{name}", **settings}


def test_builds_nested_objects() -> None:
    built = build(node("Typed", child=node("Child", folder="f", depth=3), shares={"a": 1}), "x")
    assert (built.child.root_dir, built.child.depth, built.child.width) == ("f", 3, 4)
    assert type(built.shares) is dict


def test_partial_waits_for_its_first_argument() -> None:
    assert build(node("scale", _partial_=True, factor=2.0), "optimizer")("model") == ("model", 2.0)


def test_extra_objects_arrive_as_they_are_and_replace_settings() -> None:
    child = Base(root_dir="mine")
    built = build(node("Typed", child=None), "x", child=child)
    assert built.child is child


def test_kwargs_that_stay_in_the_class_accept_anything() -> None:
    assert build(node("Keeps", anything=1), "x").rest == {"anything": 1}


SENTENCES = {
    "unknown": (
        node("Base", root_dir="x", sped=1),
        r"x.sped is not a setting of parts_of_test.Base; did you mean 'speed'\?",
    ),
    "unknown in base": (node("Child", folder="x", dept=1), "x.dept is not a setting.*did you mean 'depth'"),
    "filled by the subclass": (node("Child", folder="x", root_dir="y"), "x.root_dir is not a setting"),
    "missing": (node("Child"), "x.folder must be given: parts_of_test.Child needs it."),
    "nested unknown": (node("Typed", child=node("Base", root_dir="", sped=1)), "x.child.sped is not a setting"),
    "nested without target": (
        node("Typed", child={"speed": 1}),
        "x.child=.* must be a Base: name its class in _target_ or null",
    ),
    "whole": (node("Typed", count="3"), "x.count='3' must be a whole number or null."),
    "whole, not true": (node("Typed", count=True), "x.count=True must be a whole number or null."),
    "whole, not a fraction": (node("Typed", count=1.5), "x.count=1.5 must be a whole number or null."),
    "literal": (node("Typed", kind="c"), "x.kind='c' must be one of a, b."),
    "list": (node("Typed", names="abc"), "x.names='abc' must be a list."),
    "mapping": (node("Typed", shares=[1]), r"x.shares=\[1\] must be a mapping or null."),
    "boolean": (node("Typed", on=1), "x.on=1 must be true or false."),
    "number": (node("Base", root_dir="x", speed="fast"), "x.speed='fast' must be a number."),
    "no target": ({"speed": 1}, "x has no _target_ .it holds speed.; name a class there, or drop it with ~x."),
    "no node": (None, "x has no _target_ .it is None."),
    "text": ("adamw", "x has no _target_ .it is 'adamw'."),
    "no such name": (node("Chlid"), "parts_of_test has no Chlid; did you mean 'Child'"),
    "no such module": (
        {"_target_": "no_such.Thing"},
        "x._target_='no_such.Thing' cannot be imported: No mod",
    ),
    "no path": ({"_target_": "Thing"}, "x._target_='Thing' must be a dotted path"),
    "not callable": ({"_target_": "string.digits"}, "neither a class nor a function"),
    "refused by the constructor": (node("Refuses", size=2), "^size=2 must be odd.$"),
    "refused deep inside": (node("Typed", child=node("Refuses", size=2)), "^size=2 must be odd.$"),
    "ValueError": (node("Refuses", size=4), "^x: four is too many$"),
    "forbidden by Hydra": ({"_target_": "os.system", "command": "true"}, "^x: Target 'os.system' is blocklisted"),
}


@pytest.mark.parametrize(("given", "sentence"), SENTENCES.values(), ids=SENTENCES)
def test_mistakes(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as e:
        build(given, "x")
    assert "\n" not in str(e.value)


def test_a_bug_in_a_constructor_arrives_as_it_is() -> None:
    with pytest.raises(KeyError, match="a bug"):
        build(node("Refuses", size=6), "x")


@pytest.mark.parametrize(
    "good",
    [
        node("Typed", count=3, names=["a"], shares={"a": 0.5}, path="p", kind="b", on=True),
        node("Typed", count=None, shares=None),
        node("Base", root_dir="x", speed=1),
        node("scale", _partial_=True),
    ],
)
def test_validate_lets_good_nodes_pass(good: dict[str, Any]) -> None:
    validate(good, "x")


def test_nearest() -> None:
    assert nearest("lrr", ["lr", "betas"]) == "did you mean 'lr'?"
    assert nearest("Strategie", ["strategy"]) == "did you mean 'strategy'?"
    assert nearest("zzz", ["b", "a"]) == "known: a, b."
    assert nearest("zzz", []) == "nothing is known there."
    assert nearest("zzz", [f"n{i}" for i in range(20)]).endswith("and 8 more.")
