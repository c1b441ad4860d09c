"""A node of the configuration -> the object it describes, strictly.

Hydra's ``instantiate`` does the construction. Before it, every node is checked against the constructor it names, so
that a misspelt or misplaced setting is one sentence with the nearest name and not a traceback out of somebody's
``__init__``.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate.nearest import nearest
from lit_pretrain.instantiate.signatures import Accepted, accepted, mismatch

DIRECTIVES = ("_target_", "_partial_", "_args_", "_convert_", "_recursive_")
NEEDED = "needs it."
"""How the message about a missing setting ends."""


def locate(path: object, where: str) -> Any:
    """The class or function at a dotted path.

    Raises:
        ConfigError: There is none; the message names the nearest one in the module.
    """
    if not isinstance(path, str) or "." not in path:
        raise ConfigError(f"{where}._target_={path!r} must be a dotted path such as package.module.Name.")
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as e:
        try:
            return getattr(locate(module_name, where), name)  # a method: package.module.Class.from_x
        except (ConfigError, AttributeError):
            raise ConfigError(f"{where}._target_={path!r} cannot be imported: {e}.") from e
    try:
        return getattr(module, name)
    except AttributeError as e:
        public = [n for n in dir(module) if not n.startswith("_")]
        raise ConfigError(f"{where}._target_={path!r}: {module_name} has no {name}; {nearest(name, public)}") from e


def validate(node: Any, where: str, *, given: Collection[str] = ()) -> None:
    """Check a node, and every node in it, against the constructors they name.

    Args:
        node: Plain containers; a mapping with ``_target_``.
        where: The node's path in the configuration, for messages.
        given: Settings that will come as objects: known, and not missing.

    Raises:
        ConfigError: No ``_target_``, an unknown or missing setting, a value of the wrong type, a bad ``_target_``.
    """
    if not isinstance(node, Mapping) or "_target_" not in node:
        held = f"it holds {', '.join(map(str, node)) or 'nothing'}" if isinstance(node, Mapping) else f"it is {node!r}"
        raise ConfigError(f"{where} has no _target_ ({held}); name a class there, or drop it with ~{where}.")
    target = locate(node["_target_"], where)
    if not callable(target):
        raise ConfigError(f"{where}._target_={node['_target_']!r} is neither a class nor a function.")
    try:
        takes = accepted(target)
    except (TypeError, ValueError):  # a builtin without a signature: its own errors have to do
        takes = None
    for key, value in node.items():
        if key not in DIRECTIVES:
            _validate_setting(str(key), value, f"{where}.{key}", node["_target_"], takes)
    if takes is not None and not node.get("_partial_") and not node.get("_args_"):
        missing = sorted(takes.required - set(node) - set(given))
        if missing:
            raise ConfigError(f"{where}.{missing[0]} must be given: {node['_target_']} {NEEDED}")


def _validate_setting(key: str, value: Any, where: str, owner: str, takes: Accepted | None) -> None:
    if takes is not None and not takes.anything and key not in takes.names:
        raise ConfigError(f"{where} is not a setting of {owner}; {nearest(key, takes.names)}")
    if isinstance(value, Mapping) and any(k in value for k in DIRECTIVES):
        validate(value, where)
        return
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            if isinstance(item, Mapping) and "_target_" in item:
                validate(item, f"{where}[{i}]")
    if takes is not None and key in takes.annotations:
        rule = mismatch(value, takes.annotations[key])
        if rule is not None:
            raise ConfigError(f"{where}={value!r} must be {rule}.")


def build(node: Any, where: str, **extra: Any) -> Any:
    """The object a node describes.

    Args:
        node: Plain containers; a mapping with ``_target_``.
        where: The node's path in the configuration, for messages.
        extra: Arguments that are objects already; they replace settings of the same name.

    Raises:
        ConfigError: As :func:`validate`; one that a constructor raised arrives as it was raised, and a ValueError or
            Lightning's MisconfigurationException becomes one that names the node. Anything else is passed on.
    """
    plain = {k: v for k, v in node.items() if k not in extra} if isinstance(node, Mapping) else node
    validate(plain, where, given=extra)
    try:
        if not extra:
            return instantiate(plain, _convert_="all")
        # Objects go past OmegaConf, which would copy what it is given.
        return instantiate({**plain, "_partial_": True}, _convert_="all")(**extra)
    except Exception as e:
        cause = _cause(e)
        if isinstance(cause, ConfigError) or not _is_a_users_mistake(cause):
            raise cause from None
        raise ConfigError(f"{where}: {' '.join(str(cause).split())}") from cause


def _cause(e: Exception) -> Exception:
    """What a constructor raised, out of the wrappers that Hydra put around it."""
    while isinstance(e, InstantiationException) and isinstance(e.__cause__, Exception):
        e = e.__cause__
    return e


def _is_a_users_mistake(e: Exception) -> bool:
    """Constructors refuse settings in these ways; told by name, since Lightning may not be loaded."""
    if isinstance(e, (ValueError, InstantiationException)):
        return True
    return any(base.__name__ == "MisconfigurationException" for base in type(e).__mro__)
