"""Progress of long preparations: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from lit_pretrain.units import duration

_LINE_EVERY_S = 30.0  # where there is no bar


class Progress:
    """Shows what is being done.

    Args:
        title: First line.
        console: Where; None is standard error.
    """

    def __init__(self, title: str, *, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(stderr=True)
        self._title = title
        self._task: TaskID | None = None
        self._open_ended = False
        self._bars: Bars | None = None
        self._what, self._total, self._done = "", 0, 0
        self._began = self._said = 0.0
        if self._console.is_terminal:
            self._bars = Bars(
                TextColumn("  {task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
            )

    def step(self, what: str, *, total: int | None = None) -> None:
        """Begin the next piece of work; up to ``total`` calls of ``advance`` will follow."""
        if self._bars is None:
            self._what, self._total, self._done = what, total or 0, 0
            self._began = self._said = time.monotonic()
            self.say(what)
            return
        self._finish()
        self._task, self._open_ended = self._bars.add_task(what, total=total), total is None

    def advance(self, steps: int = 1) -> None:
        """So many of the ``total`` are done."""
        if self._bars is not None:
            if self._task is not None:
                self._bars.advance(self._task, steps)
            return
        self._done += steps
        now = time.monotonic()
        if self._done and now - self._said >= _LINE_EVERY_S:
            self._said = now
            left = (now - self._began) * (self._total - self._done) / self._done
            self.say(f"{self._what}: {self._done} of {self._total}, about {duration(left)} left")

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)

    def _finish(self) -> None:
        """Stop the clock of the piece of work that has ended."""
        if self._bars is not None and self._task is not None:
            if self._open_ended:
                self._bars.update(self._task, total=1, completed=1)
            self._bars.stop_task(self._task)

    def __enter__(self) -> Progress:
        self._console.print(self._title, highlight=False, markup=False)
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._finish()
            self._bars.stop()
