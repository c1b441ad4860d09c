"""What a long preparation prints."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lit_pretrain.corpus._progress import Progress


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_shown(terminal: bool) -> None:
    out = io.StringIO()
    with Progress("Making it", console=Console(file=out, force_terminal=terminal, width=100)) as progress:
        progress.step("reading [all] files", total=3)
        for _ in range(3):
            progress.advance()
        progress.step("thinking")
        progress.say("12 documents")
    shown = out.getvalue()
    for text in ("Making it", "reading [all] files", "thinking", "12 documents"):
        assert text in shown
    assert ("3/3" in shown) == ("1/1" in shown) == terminal
    if not terminal:
        assert shown == "Making it\n  reading [all] files\n  thinking\n  12 documents\n"
