"""What inspect says of rollbacks, from the ledger alone."""

from __future__ import annotations

import json
from pathlib import Path

from lit_pretrain.cli import spikes_seen
from lit_pretrain.spikes import LedgerFile, Skip

ENTRY = Skip(
    step=40,
    low=40,
    high=53,
    spike=52,
    kind="jump",
    loss=19.5,
    grad_norm=float("nan"),
    z=31.25,
    lr_factor=0.5,
    until=52,
    reason="Update 52: far out.",
    details={
        "batches": [102, 103],
        "rows": 20,
        "documents": [
            {"source": "code", "file": f"/data/shard-{i:05d}.bin", "offset": 7 * i, "text": f"def  f{i}():\n pass"}
            for i in range(12)
        ],
    },
)


def test_a_run_without_spikes_says_nothing(tmp_path: Path) -> None:
    assert spikes_seen.as_text(*spikes_seen.read(tmp_path)) == ""


def test_a_spike_with_its_documents(tmp_path: Path) -> None:
    LedgerFile(tmp_path / "spikes.jsonl").append(ENTRY)
    said = spikes_seen.as_text(*spikes_seen.read(tmp_path)).splitlines()
    assert said[1] == "  update 52: jump, loss 19.5, gradient norm nan, z 31.25"
    assert said[2].startswith("    back to update 40; 13 updates' worth of data left out, from position 40")
    assert said[2].endswith(", learning rate x 0.5 until update 52")
    assert said[3] == "    batches 102, 103"
    assert said[4] == '    code  shard-00000.bin token 0  "def f0(): pass"'
    assert said[-1] == "    and 12 rows more"  # 20 rows, 8 of them printed


def test_json_is_strict_and_whole(tmp_path: Path) -> None:
    LedgerFile(tmp_path / "spikes.jsonl").append(ENTRY)
    (plain,) = json.loads(json.dumps(spikes_seen.as_json(spikes_seen.read(tmp_path)[0]), allow_nan=False))
    assert plain["left_out"] == [40, 53]
    assert plain["grad_norm"] == "nan"
    assert len(plain["documents"]) == 12


def test_a_damaged_ledger_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "spikes.jsonl").write_text("nonsense\n")
    assert "line 1" in spikes_seen.as_text(*spikes_seen.read(tmp_path))
