"""Progress of long preparations: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress:
    """Shows what is being done, on standard error.

    Args:
        title: First line.
    """

    def __init__(self, title: str) -> None:
        console = Console(stderr=True)
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            self._bars = Bars(
                TextColumn("  {task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
            )
        self._title = title

    def step(self, what: str, *, total: int | None = None) -> None:
        """Begin the next piece of work; ``total`` calls of ``advance`` will follow."""
        if self._bars is None:
            print(f"  {what}", file=sys.stderr, flush=True)
            return
        if self._task is not None:
            self._bars.update(
                self._task, total=self._bars.tasks[-1].completed or 1, completed=self._bars.tasks[-1].completed or 1
            )
        self._task = self._bars.add_task(what, total=total)

    def advance(self) -> None:
        """One of the ``total`` is done."""
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task)

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._bars is not None:
            self._bars.console.print(f"  {line}", highlight=False)
        else:
            print(f"  {line}", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        print(self._title, file=sys.stderr, flush=True)
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
