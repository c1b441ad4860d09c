"""What a class or function of a configuration accepts: names, and the simple types among its annotations."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The settings of a callable.

    Args:
        names: Every name it takes, the private ones aside.
        required: Those without a default.
        annotations: Name to annotation, where it could be evaluated.
        anything: It takes any keyword.
    """

    names: frozenset[str]
    required: frozenset[str]
    annotations: Mapping[str, Any]
    anything: bool


def accepted(target: Callable[..., Any]) -> Accepted:
    """The settings of ``target``; ``**kwargs`` that a constructor hands to its base are followed there."""
    names: set[str] = set()
    required: set[str] = set()
    annotations: dict[str, Any] = {}
    filled: set[str] = set()  # a subclass gives these to its base itself
    anything = False
    for depth, (function, drop) in enumerate(_constructors(target)):
        hints = _hints(function)
        anything, rest = False, ""
        for p in list(inspect.signature(function).parameters.values())[drop:]:
            if p.kind is p.VAR_KEYWORD:
                anything, rest = True, p.name
            elif p.kind is not p.VAR_POSITIONAL and p.name not in names | filled:
                names.add(p.name)
                if p.default is p.empty and depth == 0:
                    required.add(p.name)
                if p.name in hints:
                    annotations[p.name] = hints[p.name]
        given = _given_to_base(function, rest) if anything else None
        if given is None:
            break
        filled |= given
    return Accepted(names=frozenset(names), required=frozenset(required), annotations=annotations, anything=anything)


def _constructors(target: Callable[..., Any]) -> list[tuple[Callable[..., Any], int]]:
    """Functions whose parameters count, nearest first, with how many leading ones (self) do not."""
    if not inspect.isclass(target):
        return [(target, 0)]
    return [(vars(base)["__init__"], 1) for base in target.__mro__ if base is not object and "__init__" in vars(base)]


def _given_to_base(function: Callable[..., Any], rest: str) -> set[str] | None:
    """The keywords in a constructor's ``super().__init__(..., **rest)``; None when ``**rest`` goes somewhere else."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source: then any keyword is fine
        return None
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "__init__":
            continue
        if any(k.arg is None and isinstance(k.value, ast.Name) and k.value.id == rest for k in call.keywords):
            return {k.arg for k in call.keywords if k.arg is not None}
    return None


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception:  # names imported for type checkers only: then types go unchecked, nothing else
        return {}


def mismatch(value: Any, annotation: Any) -> str | None:
    """What ``value`` must be when plain data cannot be what ``annotation`` says; None when it fits or nobody can tell.

    Only numbers, text, booleans, None, Literal, lists, mappings and unions of them are judged.
    """
    allowed = _flatten(annotation)
    words: list[str] = []
    for one in allowed:
        verdict = _judge(value, one)
        if verdict is None:
            return None
        words.append(verdict)
    return " or ".join(dict.fromkeys(words))


def _flatten(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [part for arg in typing.get_args(annotation) for part in _flatten(arg)]
    if typing.get_origin(annotation) is typing.Annotated:
        return _flatten(typing.get_args(annotation)[0])
    return [annotation]


def _judge(value: Any, annotation: Any) -> str | None:
    """None when ``value`` fits one plain annotation or it is none of ours to judge, else what it must be."""
    origin = typing.get_origin(annotation) or annotation
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if origin is Literal:
        choices = typing.get_args(annotation)
        return None if value in choices else f"one of {', '.join(map(str, choices))}"
    fits = {
        type(None): (value is None, "null"),
        bool: (isinstance(value, bool), "true or false"),
        int: (number and isinstance(value, int), "a whole number"),
        float: (number, "a number"),
        str: (isinstance(value, str), "text"),
        Path: (isinstance(value, str), "a path"),
    }
    try:
        verdict = fits.get(origin)
    except TypeError:  # an unhashable annotation
        return None
    if verdict is not None:
        return None if verdict[0] else verdict[1]
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return None if isinstance(value, Mapping) else "a mapping"
    if not inspect.isclass(origin):
        return None
    if issubclass(origin, Sequence) or origin in (set, frozenset):
        return None if isinstance(value, (list, tuple)) else "a list"
    if isinstance(value, Mapping) and not typing.is_typeddict(origin):
        return f"a {origin.__name__}: name its class in _target_"
    if number and origin.__module__.startswith("lit_pretrain"):  # a class of somebody else may take numbers
        return f"a {origin.__name__}: name its class in _target_"
    return None
