"""Names of weights without what wrappers put into them, and weights that find their places under other wrappers."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lit_pretrain.plugins.checkpoint_dict import global_name


def accept_wrappers(module: nn.Module) -> RemovableHandle:
    """Let ``module.load_state_dict`` take names that differ from its own by wrappers only.

    A model that was compiled when it was saved is loaded into one that is not, and the other way round.

    Args:
        module: Its first ``load_state_dict`` hook is added.

    Returns:
        Call ``remove()`` on it afterwards.
    """
    handle: RemovableHandle = module.register_load_state_dict_pre_hook(_rename)  # type: ignore[no-untyped-call]
    return handle


def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    own = [
        name for pairs in (module.named_parameters, module.named_buffers) for name, _ in pairs(remove_duplicate=False)
    ]
    wanted = {global_name(name): name for name in own}
    if len(wanted) != len(own):
        return  # two that differ by a wrapper alone: nobody can tell which is meant
    for name in [name for name in state if name not in set(own)]:
        new = wanted.get(global_name(name.removeprefix(prefix)))
        if new is not None and prefix + new not in state:
            state[prefix + new] = state.pop(name)
