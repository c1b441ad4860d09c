"""A run that goes on from a checkpoint: what it was made with travels in it, and accepted changes take effect."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate.identity import KEY, Difference, differences, refuse

TOKENIZER = "data.corpus.tokenizer"
OF_DATA = ("data", "batch", "seed", "model.vocab_size")
"""Settings that decide what is read."""


class RunIdentity(Callback):
    """Puts the run's configuration into every checkpoint, and refuses a checkpoint of another one.

    Args:
        config: The resolved configuration, plain containers.
        accepted: Settings, or groups of them, that may differ.
    """

    order = 2

    def __init__(self, config: Mapping[str, Any], *, accepted: Sequence[str] = ()) -> None:
        self._config = config
        self._accepted = list(accepted)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add what the run is."""
        checkpoint[KEY] = {"config": copy.deepcopy(dict(self._config)), "tokenizer": _tokenizer_hash(trainer)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Compare, and let accepted changes of the optimizer win over what the checkpoint remembers.

        Raises:
            ConfigError: Something differs that was not accepted.
        """
        saved = checkpoint.get(KEY)
        if not isinstance(saved, Mapping):  # of somebody's own trainer
            return
        found = differences(saved["config"], self._config)
        was, now = saved.get("tokenizer"), _tokenizer_hash(trainer)
        if was and now and was != now and not any(one.key == TOKENIZER for one in found):
            found.append(Difference(key=TOKENIZER, old=f"of content {was[:12]}", new=f"of content {now[:12]}"))
        refuse(found, self._accepted, of="the checkpoint")
        for one in found:
            group, _, name = one.key.partition(".")
            if group == "optimizer":
                _change_optimizer(checkpoint, name, one)


def _tokenizer_hash(trainer: Trainer) -> str | None:
    tokenizer = getattr(trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]
    return getattr(tokenizer, "content_hash", None)


def _change_optimizer(checkpoint: Mapping[str, Any], name: str, change: Difference) -> None:
    """Every parameter group that had the old value gets the new one; a rate is scaled where a schedule is at work."""
    for state in checkpoint.get("optimizer_states", ()):
        for group in state.get("param_groups", ()):
            if name in group and _same(group[name], change.old):
                group[name] = type(group[name])(change.new) if isinstance(group[name], tuple) else change.new
    if name != "lr" or not change.old:
        return
    for state in checkpoint.get("callbacks", {}).values():
        rates = state.get("rates") if isinstance(state, Mapping) else None
        if isinstance(rates, dict) and "peaks" in rates:
            rates["peaks"] = [peak * change.new / change.old for peak in rates["peaks"]]
            rates["written"] = None


def _same(value: Any, old: Any) -> bool:
    return bool((list(value) if isinstance(value, tuple) else value) == old)


def accept_other_data(datamodule: LightningDataModule, accepted: Sequence[str]) -> None:
    """Let a data module go on where its data was changed, and the change accepted: the position stays, in updates.

    Args:
        datamodule: Its ``load_state_dict`` is replaced.
        accepted: Settings, or groups of them.
    """
    if not any(key == group or key.startswith(f"{group}.") for key in accepted for group in OF_DATA):
        return
    original = datamodule.load_state_dict

    def load(state_dict: dict[str, Any]) -> None:
        now = datamodule.state_dict()
        kept = {key: state_dict[key] for key in ("accumulation",) if key in state_dict and key in now}
        original({**now, **kept})

    datamodule.load_state_dict = load  # type: ignore[method-assign]


def explained(error: RuntimeError, checkpoint: str) -> Exception:
    """Torch's complaint about weights that do not fit as one sentence; any other error as it is."""
    text = " ".join(str(error).split())
    if not text.startswith("Error(s) in loading state_dict"):
        return error
    return ConfigError(f"{checkpoint} does not fit the model of this run: {text[:300]}")
