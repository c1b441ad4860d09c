"""Where a run keeps its checkpoints, and which is the newest. No torch, no Lightning."""

from __future__ import annotations

from pathlib import Path

FOLDER = "checkpoints"
"""In the run folder."""
LAST = "last.ckpt"
"""The checkpoint of the run's end, when none was due there anyway."""


def listed(folder: Path) -> list[Path]:
    """Checkpoints in a folder, oldest first; empty when there is no such folder."""
    return sorted(folder.glob("*.ckpt"), key=lambda p: (p.stat().st_mtime_ns, p.name))
