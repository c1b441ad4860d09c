"""The wheel in another environment: its console script trains, and another Hydra application uses our YAML."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

APP = """
import hydra
import lightning.pytorch as pl
import torch
from hydra.utils import instantiate

import lit_pretrain
from lit_pretrain.module import GPTModule


@hydra.main(version_base=None, config_path="conf", config_name="app")
def main(cfg):
    ids = torch.randint(0, cfg.model.vocab_size, (8, 17), generator=torch.Generator().manual_seed(0))
    batches = [{"ids": row[None, :-1], "targets": row[None, 1:]} for row in ids]
    module = GPTModule(instantiate(cfg.model), optimizer=instantiate(cfg.optimizer))
    callbacks = [instantiate(cfg.schedule), *(instantiate(node) for node in cfg.callbacks.values())]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=4, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks, log_every_n_steps=1,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    metrics = trainer.callback_metrics
    print("FROM", lit_pretrain.__file__)
    print("FOUND", cfg.mine, module.config.n_layer, cfg.callbacks.clipping.max_norm, trainer.global_step)
    print("RATE", float(metrics["optim/lr"]), bool(torch.isfinite(metrics["train/grad_norm"])))


if __name__ == "__main__":
    main()
"""
APP_YAML = """
defaults:
  - model: llama-tiny
  - optimizer: adamw
  - schedule: warmup_cosine
  - callbacks: minimal
  - extra: own
  - _self_
hydra:
  searchpath: [pkg://lit_pretrain.conf]
  run: {dir: out}
optimizer: {lr: 0.002}
"""


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A virtual environment with the wheel alone; its dependencies are those of this one, found through a path file."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout.strip()  # fmt: skip
    # Not a site folder: path files in it, as that of an editable install, do not count.
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(purelib, "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    # Ignoring what is installed: metadata of an editable install would count as this very version.
    subprocess.run([*pip, "--ignore-installed", "--no-deps", "--no-index", str(wheel)], check=True, timeout=120)
    return folder


def run(command: list[object], cwd: Path, **variables: str) -> str:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env | variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_package_comes_from_the_wheel(environment, tmp_path):
    program = "import lit_pretrain.callbacks as c, lit_pretrain.strategies as s; print(c.__file__, s.__file__)"
    for file in run([environment / "bin" / "python", "-c", program], tmp_path).split():
        assert Path(file).is_relative_to(environment)


def test_the_console_script_trains_and_reads_its_own_configuration(environment, tmp_path):
    script = environment / "bin" / "lit-pretrain"
    assert "prepare" in run([script, "--help"], tmp_path)
    assert "n_layer: 2" in run([script, "train", "model=gpt-tiny", "--cfg", "job"], tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"The line {i} of {i * 7919 % 1000} words.\n" for i in range(3000)))
    run(
        [
            script, "prepare", "input=text.txt", "documents=line", "output=shards", "tokenizer=train",
            "vocab_size=300", "validation_fraction=0.1",
        ],
        tmp_path,
    )  # fmt: skip
    run(
        [
            script, "train", "model=gpt-tiny", "data=shards", "data.corpus.sources={text: shards/train}",
            "data.corpus.validation={text: shards/validation}", "data.corpus.tokenizer=shards/tokenizer.json",
            "trainer=cpu", "length.steps=2", "run_id=wheel",
        ],
        tmp_path,
    )  # fmt: skip
    (events,) = tmp_path.rglob("events.out.tfevents*")
    assert "wheel" in events.relative_to(tmp_path).parts


def test_another_hydra_application_finds_our_configuration(environment, tmp_path):
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "conf" / "extra").mkdir(parents=True)
    (tmp_path / "conf" / "app.yaml").write_text(APP_YAML)
    (tmp_path / "conf" / "extra" / "own.yaml").write_text("# @package _global_\nmine: 7\n")
    python = environment / "bin" / "python"
    override = "callbacks.clipping.max_norm=0.25"
    said = dict(
        line.split(" ", 1)
        for line in run([python, "app.py", override], tmp_path).splitlines()
        if line.startswith(("FROM", "FOUND", "RATE"))
    )
    assert Path(said["FROM"]).is_relative_to(environment)
    assert said["FOUND"] == "7 2 0.25 4"
    rate, finite = said["RATE"].split()
    assert float(rate) == pytest.approx(0.0002), "the schedule ends at a tenth of the peak"
    assert finite == "True"
