"""Numbers as people read them: counts, bytes, durations."""

from __future__ import annotations

import math


def count(value: float) -> str:
    """``1234567`` as ``1.23M`` (decimal steps: K, M, B, T)."""
    for step, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= step * 0.9995:
            return f"{value / step:.3g}{letter}"
    return f"{value:.4g}"


def size(num_bytes: float) -> str:
    """Bytes in binary steps: ``1536`` as ``1.5 KiB``."""
    for step, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= step * (1 - 0.05 / 1024):  # what would round to 1024.0 of the smaller unit
            return f"{num_bytes / step:.1f} {name}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as ``42s``, ``3m20s``, ``5h07m`` or ``2d03h``; ``?`` when not finite."""
    if not math.isfinite(seconds):
        return "?"
    total = round(seconds)
    days, rest = divmod(total, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    if minutes:
        return f"{minutes}m{secs:02d}s"
    return f"{secs}s"
