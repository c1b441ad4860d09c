"""Somebody is told of a spike: a function, a command or a webhook of the user's."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_pretrain.checks import number
from lit_pretrain.errors import ConfigError

AlarmTarget = Callable[[Mapping[str, Any]], object] | str | Sequence[str] | None


class Alarm:
    """Tells it on one rank, without holding up training: commands and webhooks run in a thread.

    A function is waited for, in a thread of its own: ``timeout_s`` at most. An alarm that fails is a warning, never the
    end of a run.

    Args:
        target: A function of the facts; ``http://`` or ``https://``: the facts are posted there as JSON; any other text
            or list of words: a command that gets the facts as one line of JSON on its standard input. None for silence.
        timeout_s: Of one telling, in seconds.

    Raises:
        ConfigError: The target is none of these.
    """

    def __init__(self, target: AlarmTarget = None, *, timeout_s: float = 10.0) -> None:
        if target is not None and not callable(target) and not _words(target):
            raise ConfigError(
                f"rollback.alarm={target!r} must be a function, a command, or a webhook's address (https://...)."
            )
        number("rollback.alarm.timeout_s", timeout_s, above=0.0)
        self._target = target
        self._timeout_s = timeout_s
        self._threads: list[threading.Thread] = []

    def __call__(self, facts: Mapping[str, Any]) -> None:
        """Tell the facts: plain containers."""
        target = self._target
        if target is None:
            return
        if callable(target):
            thread = self._start(lambda: target(facts))
            thread.join(self._timeout_s)
            if thread.is_alive():
                rank_zero_warn(
                    f"The spike alarm {target!r} has not returned after {self._timeout_s:g} s; training goes on "
                    "without waiting for it."
                )
            return
        line = json.dumps(finite(facts), allow_nan=False).encode() + b"\n"
        tell = self._post if isinstance(target, str) and target.startswith(("http://", "https://")) else self._run
        self._threads.append(self._start(lambda: tell(line)))

    def _start(self, tell: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(tell,), daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Wait for what is being told."""
        for thread in self._threads:
            thread.join(self._timeout_s)
        self._threads = []

    def _post(self, line: bytes) -> None:
        request = urllib.request.Request(str(self._target), data=line, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self._timeout_s):
            pass

    def _run(self, line: bytes) -> None:
        subprocess.run(_words(self._target), input=line, check=True, timeout=self._timeout_s)

    def _guarded(self, tell: Callable[[], object]) -> None:
        try:
            tell()
        except Exception as error:  # whatever it is, training matters more
            rank_zero_warn(f"The spike alarm failed: {type(error).__name__}: {error}")


def _words(target: object) -> list[str]:
    """Of a command; none where it is no command."""
    try:
        words = shlex.split(target) if isinstance(target, str) else target
    except ValueError:  # a quotation mark is left open
        return []
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        return []
    return list(words) if words and words[0].strip() else []


def finite(value: Any) -> Any:
    """The same containers in strict JSON: numbers that are not finite become text."""
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
