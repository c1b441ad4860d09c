"""Lightning's checkpoint dict, taken apart into named tensors and the rest, and put together again. No Lightning.

A trainer writes optimizer state by position: another order of the parameters, and it lands on the wrong ones. Here it
is kept by the parameters' names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from lit_pretrain.distributed.checkpoint.manifest import CheckpointError, CheckpointFacts

OURS = "lit_pretrain"
"""Key in the dict: ``{"parameter_names": [[[name, ...] per group] per optimizer], "facts": {...}, "rng": [per rank]}``
"""
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and of activation checkpointing
HPARAMS_TYPE = "hparams_type"  # a class of OmegaConf; hyper-parameters are saved as plain containers


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A checkpoint dict taken apart.

    Args:
        tensors: ``model.<name>`` and ``optimizer.<i>.<state>.<name>``.
        tree: Everything else; what could not be named stays in it.
        rng: Random states by rank.
        facts: For the manifest.
    """

    tensors: dict[str, Tensor]
    tree: dict[str, Any]
    rng: list[Mapping[str, Any]]
    facts: CheckpointFacts


def global_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def split(checkpoint: Mapping[str, Any]) -> Parts:
    """Take a checkpoint dict apart; the dict and its containers stay as they are, its tensors are not copied.

    Args:
        checkpoint: From ``Trainer.dump_checkpoint``, with or without the key ``lit_pretrain``.

    Raises:
        CheckpointError: Names and parameters do not go together.
    """
    ours = dict(checkpoint.get(OURS) or {})
    rng = list(ours.pop("rng", None) or [])
    facts = _facts(checkpoint, ours.pop("facts", None))
    tree = {key: value for key, value in checkpoint.items() if key not in (OURS, "state_dict", "optimizer_states")}
    if isinstance(tree.get(HPARAMS_TYPE), type):
        del tree[HPARAMS_TYPE]
    tensors: dict[str, Tensor] = {}
    if "state_dict" in checkpoint:
        tree["state_dict"] = _split_model(checkpoint["state_dict"], tensors)
    if "optimizer_states" in checkpoint:
        states = checkpoint["optimizer_states"]
        names = ours.pop("parameter_names", None)
        if names is not None and len(names) != len(states):
            raise CheckpointError(
                f"lit_pretrain.parameter_names is for {len(names)} optimizers and there are {len(states)}; name all."
            )
        tree["optimizer_states"] = [
            _split_optimizer(i, state, None if names is None else names[i], tensors) for i, state in enumerate(states)
        ]
    if OURS in checkpoint:
        tree[OURS] = ours
    return Parts(tensors=tensors, tree=tree, rng=rng, facts=facts)


def _facts(checkpoint: Mapping[str, Any], given: Mapping[str, Any] | None) -> CheckpointFacts:
    step = int(checkpoint.get("global_step", 0))
    if given is None:
        try:
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            read = int(progress["total"]["processed"])
        except (KeyError, TypeError):
            read = 0
        return CheckpointFacts(global_step=step, microbatches_read=read, updates_read=step)
    known = {field.name for field in fields(CheckpointFacts)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise CheckpointError(f"lit_pretrain.facts has {unknown[0]!r}; it may have {', '.join(sorted(known))}.")
    return CheckpointFacts(**{"global_step": step, **given})


def _split_model(state: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    names: dict[str, str] = {}
    other: dict[str, Any] = {}
    short = [global_name(name) for name in state]
    unique = len(set(short)) == len(short)
    for name, value in state.items():
        if isinstance(value, Tensor):
            names[name] = global_name(name) if unique else name
            tensors[f"model.{names[name]}"] = value
        else:
            other[name] = value
    return {"order": list(state), "renamed": {k: v for k, v in names.items() if k != v}, "other": other}


def _split_optimizer(
    number: int, state: Mapping[str, Any], names: Sequence[Sequence[str]] | None, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    groups = state["param_groups"]
    if names is None:
        by_group = [[str(i) for i in group["params"]] for group in groups]
    else:
        by_group = [[global_name(name) for name in group] for group in names]
        counts = [len(group["params"]) for group in groups]
        if [len(group) for group in by_group] != counts:
            raise CheckpointError(
                f"optimizer {number} has groups of {counts} parameters and lit_pretrain.parameter_names of "
                f"{[len(group) for group in by_group]}; name every parameter once, in the optimizer's order."
            )
    label = {
        i: name
        for group, part in zip(groups, by_group, strict=True)
        for i, name in zip(group["params"], part, strict=True)
    }
    if len(set(label.values())) != len(label):
        double = next(name for name in label.values() if list(label.values()).count(name) > 1)
        raise CheckpointError(f"optimizer {number} has two parameters with the name {double!r}; give each its own.")
    plain: dict[str, Any] = {}
    shapes: dict[str, list[str]] = {}
    loose: dict[Any, Any] = {}
    for i, values in state["state"].items():
        if i not in label or not isinstance(values, Mapping):
            loose[i] = values
            continue
        name = label[i]
        shapes[name] = list(values)
        rest = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        if rest:
            plain[name] = rest
        tensors.update(
            {f"optimizer.{number}.{key}.{name}": value for key, value in values.items() if isinstance(value, Tensor)}
        )
    return {
        "named": names is not None,
        "names": by_group,
        "indices": [list(group["params"]) for group in groups],
        "states": shapes,
        "plain": plain,
        "loose": loose,
        "param_groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "rest": {key: value for key, value in state.items() if key not in ("state", "param_groups")},
    }


def join(
    tree: Mapping[str, Any], tensors: Mapping[str, Tensor], rng: Sequence[Mapping[str, Any]], facts: CheckpointFacts
) -> dict[str, Any]:
    """The checkpoint dict that ``split`` took apart; its key ``lit_pretrain`` is always there.

    Raises:
        CheckpointError: Something is missing.
    """
    try:
        out = {key: value for key, value in tree.items() if key not in (OURS, "state_dict", "optimizer_states")}
        if "state_dict" in tree:
            out["state_dict"] = _join_model(tree["state_dict"], tensors)
        if "optimizer_states" in tree:
            states = tree["optimizer_states"]
            out["optimizer_states"] = [_join_optimizer(i, state, tensors) for i, state in enumerate(states)]
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise CheckpointError(f"the checkpoint lacks {e}; take another checkpoint.") from e
    out[OURS] = {**tree.get(OURS, {}), "rng": list(rng), "facts": asdict(facts)}
    kept = tree.get("optimizer_states", [])
    if kept and all(state["named"] for state in kept):
        out[OURS]["parameter_names"] = [state["names"] for state in kept]
    return out


def _join_model(kept: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    renamed, other = kept["renamed"], kept["other"]
    return {
        name: other[name] if name in other else tensors[f"model.{renamed.get(name, name)}"] for name in kept["order"]
    }


def _join_optimizer(number: int, kept: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    state: dict[Any, Any] = {}
    for names, indices in zip(kept["names"], kept["indices"], strict=True):
        for name, i in zip(names, indices, strict=True):
            if name in kept["states"]:
                plain = kept["plain"].get(name, {})
                state[i] = {
                    key: plain[key] if key in plain else tensors[f"optimizer.{number}.{key}.{name}"]
                    for key in kept["states"][name]
                }
    groups = [
        {**group, "params": list(indices)} for group, indices in zip(kept["param_groups"], kept["indices"], strict=True)
    ]
    return {**kept["rest"], "state": {**state, **kept["loose"]}, "param_groups": groups}


def match_parameters(
    checkpoint: Mapping[str, Any], parameter_names: Sequence[Sequence[Sequence[str]]]
) -> list[dict[str, Any]]:
    """A loaded checkpoint's optimizer states in the order of the optimizers at hand.

    Each parameter gets the state of its name, whatever its position and group were. A group's settings (learning rate
    and so on) are those of the saved group that most of its parameters were in.

    Args:
        checkpoint: Lightning's dict, as loaded; not changed.
        parameter_names: Of the optimizers at hand: names per group per optimizer.

    Returns:
        For ``checkpoint["optimizer_states"]``.

    Raises:
        CheckpointError: Optimizers, groups or parameters are others than those saved; every difference is named.
    """
    states = checkpoint["optimizer_states"]
    saved = (checkpoint.get(OURS) or {}).get("parameter_names")
    if saved is None:
        return list(states)
    if len(parameter_names) != len(states):
        raise CheckpointError(
            f"the checkpoint has {len(states)} optimizers and this run {len(parameter_names)}; configure the same."
        )
    return [
        _match(i, state, old, new)
        for i, (state, old, new) in enumerate(zip(states, saved, parameter_names, strict=True))
    ]


def _match(
    number: int, state: Mapping[str, Any], old: Sequence[Sequence[str]], new: Sequence[Sequence[str]]
) -> dict[str, Any]:
    groups = state["param_groups"]
    index = {
        global_name(name): i
        for names, group in zip(old, groups, strict=True)
        for name, i in zip(names, group["params"], strict=True)
    }
    wanted = [[global_name(name) for name in group] for group in new]
    flat = [name for group in wanted for name in group]
    differ = [("lacks", sorted(set(flat) - index.keys())), ("also has", sorted(index.keys() - set(flat)))]
    if any(names for _, names in differ) or len(groups) != len(wanted):
        said = [f"{what} {_few(names)}" for what, names in differ if names]
        if len(groups) != len(wanted):
            said.append(f"has {len(groups)} groups where this run has {len(wanted)}")
        raise CheckpointError(
            f"the checkpoint's optimizer {number} {' and '.join(said)}; resume with the model and optimizer saved."
        )
    place = {name: k for k, name in enumerate(flat)}
    known = {i: place[name] for name, i in index.items()}
    out_groups, at = [], 0
    for group, names in zip(_pair(groups, old, wanted), wanted, strict=True):
        out_groups.append({**group, "params": list(range(at, at + len(names)))})
        at += len(names)
    return {**state, "state": {known.get(i, i): v for i, v in state["state"].items()}, "param_groups": out_groups}


def _pair(groups: Sequence[Any], old: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> list[Any]:
    """Saved settings for each group at hand: groups may change places."""
    home = {global_name(name): g for g, names in enumerate(old) for name in names}
    out = []
    for position, names in enumerate(wanted):
        votes = [home[name] for name in names]
        out.append(
            groups[max(set(votes), key=lambda g: (votes.count(g), g == position))] if votes else groups[position]
        )
    return out


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
