"""Help, flags of Hydra and shell completion, in this process where Hydra allows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_pretrain.cli import EXAMPLES, VERBS
from tests.integration.cli_processes import CONF, TRAIN, run_here


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_usage_explains_the_verbs(capfd: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, _ = run_here(capfd, *words)
    assert code == 0
    assert all(verb in out and text in out for verb, text in VERBS.items())
    assert EXAMPLES in out


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_help_and_configuration(capfd: pytest.CaptureFixture[str], verb: str) -> None:
    words = [verb, *TRAIN[1:]] if verb in ("train", "explain") else [verb]
    code, out, err = run_here(capfd, *words, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"lit-pretrain {verb}")
    setting = {"train": "seed:", "explain": "utilisation:", "generate": "seed:"}.get(verb, ": ")
    assert setting in out
    code, out, err = run_here(capfd, *words, "--cfg", "job")
    assert (code, err) == (0, "")
    assert setting in out


@pytest.mark.parametrize("words", ["--help", "train --help", "generate --cfg job", "inspect --help"])
def test_a_closed_pager_is_no_error(words: str) -> None:
    line = f"{sys.executable} -m lit_pretrain.cli {words} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_help_lists_every_group_as_hydra_does(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path

    folder = workplace / "mine" / "optimizer"
    folder.mkdir(parents=True)
    (folder / "sgd.yaml").write_text("{}\n")
    code, out, _ = run_here(capfd, "train", "--config-dir", "mine", "optimizer=sgd", "--help")
    assert code == 0
    loader = ConfigLoaderImpl(create_config_search_path("pkg://lit_pretrain.conf"))
    for group in loader.list_groups(""):
        options = loader.get_group_options(group)
        if group != "hydra" and options:
            mine = ["sgd"] if group == "optimizer" else []
            assert f"\n{group}: {', '.join(sorted([*options, *mine]))}\n" in out
    assert "\noptimizer: {}\n" in out


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ("--cfg job", "optimized_metric: val/loss"),
        ("--cfg job --package length", "steps: 4"),
        ("--cfg job --resolve", "accumulation: 4"),
        ("--cfg hydra", "name: train"),
        ("--cfg all", "output_root: outputs"),
        ("--hydra-help", "--multirun"),
        ("--version", "Hydra 1"),
    ],
)
def test_flags_of_hydra(capfd: pytest.CaptureFixture[str], workplace: Path, words: str, seen: str) -> None:
    given = [*TRAIN, "length.steps=4", "trainer=cpu"] if words != "--hydra-help" else ["train"]
    code, out, err = run_here(capfd, *given, *words.split())
    assert (code, err) == (0, "")
    assert seen in out
    assert list(workplace.iterdir()) == []


def test_info(workplace: Path) -> None:
    seen = {
        "defaults": ["optimizer/adamw"],
        "all": ["optimizer/adamw", "pkg://lit_pretrain.conf", "optimized_metric: "],
    }
    for what, texts in seen.items():
        words = [sys.executable, "-m", "lit_pretrain.cli", *TRAIN, "--info", what, "seed=1"]
        out = subprocess.run(words, check=True, capture_output=True, text=True, cwd=workplace).stdout
        assert [text for text in texts if text not in out] == []


def test_a_users_folder_extends_ours(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    folder = workplace / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "x.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /optimizer: adamw\noptimizer: {lr: 0.5}\n"
    )
    code, out, _ = run_here(
        capfd, "train", "--config-dir", "mine", f"hydra.searchpath=[file://{CONF}]", "model=tiny", "experiment=x",
        "length.steps=1", "--cfg", "job", "--resolve",
    )  # fmt: skip
    assert code == 0
    assert "lr: 0.5" in out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lit-pretrain ", " ".join(VERBS)),
        ("lit-pretrain expl", "explain"),
        ("lit-pretrain evaluate text_", "text_key="),
        ("lit-pretrain inspect ver", "verify="),
        ("lit-pretrain explain schedule=warm", "schedule=warmup_cosine"),
        ("lit-pretrain explain explain.dev", "explain.device="),
        ("lit-pretrain ge", "generate"),
        ("lit-pretrain train optimi", "optimized_metric=\toptimizer=\toptimizer."),
        ("lit-pretrain train schedule=warm", "schedule=warmup_cosine"),
        ("lit-pretrain train optimizer.weight", "optimizer.weight_decay="),
        ("lit-pretrain generate tempe", "temperature="),
    ],
)
def test_completion(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, expected: str
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    code, out, _ = run_here(capfd, "-sc", "query=bash")
    assert code == 0
    assert sorted(out.split()) == sorted(expected.split())


def test_nothing_heavy_is_loaded_and_nothing_left_behind(workplace: Path) -> None:
    code = (
        "import os, sys\n"
        "from lit_pretrain.cli import main\n"
        "before = dict(os.environ), list(sys.argv)\n"
        f"assert main({[*TRAIN, 'length.steps=1', 'seed=-1']!r}) == 1\n"
        "assert main(['generate', 'run=nowhere']) == 1\n"
        "assert main(['evaluate', 'nowhere']) == 1\n"
        "assert main(['inspect', 'nowhere']) == 1\n"
        "assert (dict(os.environ), sys.argv) == before\n"
        "loaded = {'torch', 'lightning', 'torchmetrics', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=workplace, env={**os.environ})
