"""What RunCounters says of updates that it has not seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_pretrain.callbacks import RunCounters
from tests.unit.callbacks.tiny import Tiny, loader, trainer


@pytest.mark.parametrize(
    ("setting", "earlier", "message"),
    [
        (12, 3 * 12, r"its 3 updates are counted as if each had used the tokens of one to come"),
        (lambda batch: batch[0].numel(), 0, r"the tokens of its 3 updates are not known and left out"),
    ],
)
def test_updates_before_it_came(tmp_path: Path, setting: Any, earlier: int, message: str) -> None:
    """Batches of 4 rows of 3 numbers; three updates without counters and two with them."""
    first = trainer(tmp_path, max_steps=3)
    first.fit(Tiny(lr=0.01), loader())
    first.save_checkpoint(tmp_path / "three.ckpt")
    counters = RunCounters(tokens_per_batch=setting)
    with pytest.warns(UserWarning, match=message):
        trainer(tmp_path, counters, max_steps=5).fit(Tiny(lr=0.01), loader(), ckpt_path=tmp_path / "three.ckpt")
    assert counters.updates == 5
    assert counters.tokens == counters.tokens_read == earlier + 2 * 12
