"""The learning rates of an optimizer's parameter groups: their peaks, and what others did to them."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from lit_pretrain.errors import ConfigError

ParamGroups = list[dict[str, Any]]


class GroupRates:
    """Peaks of the parameter groups, written as ``peak x factor x whatever somebody else multiplied in``."""

    def __init__(self) -> None:
        self.peaks: list[float] = []
        self._names: list[str | None] = []
        self._foreign: list[float] = []
        self._written: list[float] | None = None
        self._restored = False
        self._warned = False

    def configure(self, groups: ParamGroups) -> None:
        """Note the peaks of a freshly configured optimizer.

        Where a state was restored its peaks stay, brought into the order of these groups.

        Raises:
            ConfigError: If a restored state has another number of groups.
        """
        peaks, names = [float(group["lr"]) for group in groups], [group.get("name") for group in groups]
        if self._restored:
            self._match(peaks, names)
        else:
            self.peaks, self._names, self._foreign, self._written = peaks, names, [1.0] * len(peaks), None

    def write(self, groups: ParamGroups, factor: float) -> list[float]:
        """Set every group's rate; groups that were added while training come in with the rate they have."""
        for group in groups[len(self.peaks) :]:
            self.peaks.append(float(group["lr"]))
            self._names.append(group.get("name"))
            self._foreign.append(1.0)
        self._fold_in_edits(groups)
        rates = [peak * factor * theirs for peak, theirs in zip(self.peaks, self._foreign, strict=True)]
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._written = rates
        return rates

    def metrics(self, rates: list[float]) -> dict[str, float]:
        """``optim/lr`` of the first group, and one entry per group where they differ."""
        metrics = {"optim/lr": rates[0]}
        if len(set(rates)) > 1:
            metrics |= {f"optim/lr/{name or i}": r for i, (name, r) in enumerate(zip(self._names, rates, strict=True))}
        return metrics

    def forget_written(self) -> None:
        """Take the rates found at the next write for stale, not for somebody's edit."""
        self._written = None

    def forget_restored(self) -> None:
        """The next ``configure`` starts from the optimizer again."""
        self._restored = False

    def state_dict(self) -> dict[str, Any]:
        """Plain containers only."""
        return {
            "peaks": list(self.peaks),
            "names": list(self._names),
            "foreign": list(self._foreign),
            "written": None if self._written is None else list(self._written),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved peaks; matched at once with the groups already seen, or with those ``configure`` brings."""
        peaks, names = self.peaks, self._names
        self.peaks, self._names, self._foreign = list(state["peaks"]), list(state["names"]), list(state["foreign"])
        self._written = None if state["written"] is None else list(state["written"])
        self._restored = True
        if peaks:
            self._match(peaks, names)

    def _match(self, configured: list[float], names: list[str | None]) -> None:
        if all(names) and sorted(map(str, names)) == sorted(map(str, self._names)):
            at = [self._names.index(name) for name in names]
            self.peaks, self._foreign = [self.peaks[i] for i in at], [self._foreign[i] for i in at]
            self._written = None if self._written is None else [self._written[i] for i in at]
            self._names = names
        if len(configured) != len(self.peaks):
            raise ConfigError(
                f"The checkpoint holds learning rates of {len(self.peaks)} parameter groups and the optimizer has "
                f"{len(configured)}; resume with the groups it was saved with."
            )
        if configured != self.peaks:
            warnings.warn(
                f"The checkpoint's peak learning rates {self.peaks} are used, not the configured {configured}.",
                stacklevel=2,
            )

    def _fold_in_edits(self, groups: ParamGroups) -> None:
        for i, written in enumerate(self._written or ()):
            value = groups[i]["lr"]
            if isinstance(value, torch.Tensor):
                # Reading a CUDA tensor would wait for the device at every batch. Float32 rounds what was written.
                if value.device.type != "cpu" or math.isclose(value.item(), written, rel_tol=1e-6):
                    continue
            elif value == written:
                continue
            if written > 0:
                self._foreign[i] *= float(value) / written
            if not self._warned:
                self._warned = True
                outcome = "kept as a factor from here on" if written > 0 else "ignored, since the schedule is at 0"
                warnings.warn(
                    f"Somebody changed the learning rate of parameter group {i} from {written:g} to {float(value):g}; "
                    f"{outcome}.",
                    stacklevel=2,
                )
