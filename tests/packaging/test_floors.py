"""The contracts on imports hold, and would be seen to break."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NEEDS_NO_TORCH = (
    "lit_pretrain",
    "lit_pretrain.cli",
    "lit_pretrain.corpus",
    "lit_pretrain.planning",
    "lit_pretrain.schedules",
    "lit_pretrain.spikes",
    "lit_pretrain.specs",
    "lit_pretrain.units",
)


@pytest.mark.parametrize("module", NEEDS_NO_TORCH)
def test_light_modules_load_neither_torch_nor_lightning(module):
    """``--help`` and plans answer at once; torch and Lightning take seconds to import."""
    program = (
        f"import sys, {module}; print(*sorted({{'torch', 'lightning', 'pytorch_lightning', 'transformers', 'hydra'}}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def _lint(tree: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([str(program), "--no-cache"], cwd=tree, capture_output=True, text=True, timeout=120)


def test_the_contracts_hold(repository, tools, tmp_path):
    copy_sources, _, _ = tools
    done = _lint(copy_sources(repository, tmp_path / "source"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line", "contract", "chain"),
    [
        (
            "lit_pretrain/models/stray.py",
            "from lit_pretrain.cli import main",
            "A room imports only rooms on floors below",
            "lit_pretrain.models.stray -> lit_pretrain.cli",
        ),
        (
            "callbacks/stray.py",
            "import lit_pretrain.strategies",
            "A room imports only rooms on floors below",
            "lit_pretrain.callbacks.stray -> lit_pretrain.strategies",
        ),
        (
            "lit_pretrain/schedules/stray.py",
            "import torch",
            "Rooms below the models need no torch",
            "lit_pretrain.schedules.stray -> torch",
        ),
        (
            "strategies/stray.py",
            "import omegaconf",
            "Hydra and OmegaConf live in cli and instantiate only",
            "lit_pretrain.strategies.stray -> omegaconf",
        ),
        (
            "lit_pretrain/optim/stray.py",
            "import lightning.pytorch",
            "Models and optimizers are plain torch",
            "lit_pretrain.optim.stray -> lightning",
        ),
        (
            "lit_pretrain/attic/__init__.py",
            "",
            "A room imports only rooms on floors below",
            "attic",
        ),
    ],
    ids=["upwards", "sideways", "torch", "hydra", "lightning", "unlisted-room"],
)
def test_a_stray_import_breaks_its_contract(repository, tools, tmp_path, file, line, contract, chain):
    copy_sources, _, _ = tools
    tree = copy_sources(repository, tmp_path / "source")
    (tree / file).parent.mkdir(exist_ok=True)
    (tree / file).write_text(f'"""Stray."""\n{line}\n')
    done = _lint(tree)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in done.stdout, done.stdout
    assert chain in done.stdout, done.stdout
