"""The figures that explain prints, by hand; what it calls suspicious and illegal; and that nothing stops it."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lit_pretrain.cli import checks, main
from lit_pretrain.cli.explain import gpu_name, resolve_gently
from lit_pretrain.cli.explanation import Hardware, sections
from lit_pretrain.cli.outlook import look
from lit_pretrain.cli.suspicions import suspicions, usual_rate
from lit_pretrain.cli.table import layout
from lit_pretrain.data import TokenDataModule
from lit_pretrain.instantiate import build
from tests.conf import tiny

GPU = Hardware(name="NVIDIA A100-SXM4-80GB", peak=312e12, utilisation=0.5)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def explained(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["explain", *words])
    out, err = capfd.readouterr()
    return code, out, err


def row(out: str, name: str) -> str:
    (line,) = [line for line in out.splitlines() if line.startswith(f"  {name} ")]
    return line[2 + len(name) :].strip()


def test_a_run_by_hand(capfd: pytest.CaptureFixture[str], shards: list[str], workplace: Path) -> None:
    # 1 layer, width 16, 320 rows, 16 positions; 100 updates of 4 x 16 tokens in microbatches of 1 on 2 ranks.
    code, out, err = explained(
        capfd, *shards, *tiny.SHRINK, "length.steps=100", "batch.micro_batch_size=1", "trainer.devices=2",
        "strategy=ddp", "explain.device=A100", "explain.utilisation=0.5", "schedule.warmup_steps=10",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert row(out, "update") == "4 sequences x 16 tokens = 64 tokens"
    assert row(out, "made of") == "microbatches 2 x sequences 1 x data-parallel ranks 2"
    assert row(out, "ranks") == "2, cpu"
    assert row(out, "updates") == "100"
    assert row(out, "tokens") == "6.4K (6,400)"
    assert row(out, "warmup") == "10 updates, 640 tokens"
    assert row(out, "decay") == "90 updates, 5.76K tokens"
    assert (row(out, "first update"), row(out, "peak"), row(out, "last update")) == ("3e-05", "0.0003", "3e-05")
    # 12 x 16^2 weights, biases 4 x 16 + 64 + 16, two norms of 32; final norm 32; embeddings (320 + 16) x 16
    blocks = 12 * 256 + 144 + 64
    assert row(out, "without embeddings") == f"3.31K ({blocks + 32:,})"
    total = blocks + 32 + 336 * 16
    assert row(out, "parameters") == f"{total / 1e3:.3g}K ({total:,})"
    assert row(out, "tokens/parameter").startswith("0.737 ")
    per_token = 6 * (12 * 256 + 320 * 16) + 12 * 16 * 16
    assert row(out, "FLOPs per token").startswith(f"{per_token:.4g} ")
    assert row(out, "in total").startswith(f"{per_token * 6400:.4g} FLOPs")
    assert row(out, "holds").endswith("1/2 of each batch")
    assert row(out, "weights").startswith(f"{total * 4 / 1024:.1f} KiB")
    assert row(out, "gradients") == f"{total * 4 / 1024:.1f} KiB"
    assert row(out, "optimizer") == f"{total * 8 / 1024:.1f} KiB"
    assert list(workplace.iterdir()) == []


def test_hours_and_days(shards: list[str], tmp_path: Path) -> None:
    """LLaMA 7B: 6 N D + attention; 1T tokens on 8 A100 at half their peak."""
    words = ["experiment=llama_7b", *shards, "trainer.devices=8", "run.num_processes=8"]
    outlook = look(tiny.composed(tmp_path, words))
    per_token = 6 * (6_738_415_616 - 32000 * 4096 - 65 * 4096) + 12 * 32 * 4096 * 2048
    assert outlook.flops_per_token == per_token
    text = layout(sections(outlook, GPU))
    hours = per_token * outlook.tokens_per_update * outlook.updates / (312e12 * 0.5) / 3600
    assert f"{hours:,.3g} device-hours" in text
    assert f"{per_token * outlook.tokens / 86400e15:.3g} PFLOP/s-days" in text
    assert row(text, "tokens/parameter").startswith("148 ")


def test_passes_over_prepared_text_and_epochs(capfd: pytest.CaptureFixture[str], shards: list[str]) -> None:
    words = [*shards, *tiny.SHRINK, "length={steps: null, tokens: null, epochs: 3}"]
    _, out, _ = explained(capfd, *words)
    # What the data module would run is asked of the data module itself.
    datamodule = build(tiny.composed(Path.cwd(), words)["data"], "data")
    assert isinstance(datamodule, TokenDataModule)
    assert row(out, "updates") == f"{3 * datamodule.updates_per_epoch:,}"
    assert float(row(out, "passes").split()[0]) == pytest.approx(3, rel=0.05)


def test_a_corpus_that_is_not_there_yet(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    code, out, _ = explained(capfd, "length.epochs=2", f"cache_dir={workplace / 'cache'}")
    assert code == 0
    assert row(out, "updates") == "not known"
    assert row(out, "passes") == "not known until the corpus is made, when a run first uses it"
    assert not (workplace / "cache").exists()


SUSPICIOUS = {
    "batch.global_batch_size=1 batch.micro_batch_size=1": "batch.global_batch_size=1 makes every update from one",
    "schedule.warmup_steps=50": "schedule.warmup_steps=50 is a warmup of 50 of 100 updates, more than 10%",
    "optimizer.lr=1": "optimizer.lr=1 is 474 times what is usual for 3.31K parameters",
    "model.vocab_size=400": "model.vocab_size=400 is larger than the tokenizer's 320, so 80 rows are never trained",
    "model.block_size=32": "batch.sequence_length=16 leaves the positions from 16 to model.block_size=32 untrained",
    "batch.sequence_length=16": "batch.sequence_length=16 is no multiple of 64",
    "validation.every_steps=101": "validation.every_steps=101 is beyond the 100 updates",
    "data.seed=2": "data.corpus holds out",
    "data.corpus.validation=null": "data.corpus holds no text out",
    "+trainer.limit_val_batches=0": "trainer.limit_val_batches=0 turns validation off",
    "~callbacks.checkpoint": "callbacks: no checkpoint is written",
    "callbacks.checkpoint.every_n_steps=200": "callbacks.checkpoint.every_n_steps=200 is beyond",
    "callbacks=none": "callbacks: gradients are not clipped",
    "length.steps=1": "length: 64 tokens are 0.0074 per parameter",
    "length.steps=9000": "and beyond 4 times the same text teaches little",
    "trainer.accelerator=gpu batch.micro_batch_size=1": "batch.micro_batch_size=1 needs",
    "trainer.accelerator=gpu": "trainer.precision=32-true leaves most of a GPU's speed unused",
    "debug=fast": "trainer.fast_dev_run saves and logs nothing",
}


BASE = ["length={steps: 100}", "validation.every_steps=50"]


@pytest.fixture(scope="module")
def base(shards: list[str]) -> list[str]:
    return suspicions(look(tiny.composed(Path.cwd(), [*shards, *tiny.SHRINK, *BASE])))


@pytest.mark.parametrize(("words", "sentence"), SUSPICIOUS.items(), ids=list(SUSPICIOUS))
def test_suspicious(shards: list[str], base: list[str], words: str, sentence: str) -> None:
    found = suspicions(look(tiny.composed(Path.cwd(), [*shards, *tiny.SHRINK, *BASE, *words.split()])))
    assert [s for s in found if sentence in s]
    if words not in ("batch.sequence_length=16", "data.seed=2"):  # true of the base as well
        assert not [s for s in base if sentence in s]


def test_held_out_text_of_usual_size_is_not_suspicious(shards: list[str]) -> None:
    outlook = look(tiny.composed(Path.cwd(), [*shards, *tiny.SHRINK, *BASE]))
    assert outlook.corpus is not None
    for held_out, said in ((0, "data.corpus holds no text out"), (9_999, "holds out 9,999 tokens"), (10_000, "")):
        found = suspicions(replace(outlook, corpus=replace(outlook.corpus, held_out=held_out)))
        about = [sentence for sentence in found if sentence.startswith("data.corpus")]
        assert len(about) == bool(said)
        assert all(said in sentence for sentence in about)


def test_a_sound_run_is_not_suspicious(tmp_path: Path) -> None:
    words = ["length.tokens=22e6", "schedule=wsd", f"cache_dir={tmp_path}", "trainer.accelerator=cpu"]
    assert suspicions(look(tiny.composed(tmp_path, words))) == []


def test_usual_rates_are_those_of_published_recipes() -> None:
    # GPT-3's table 2.1: 125M 6e-4, 6.7B 1.2e-4, 175B 0.6e-4
    for non_embedding, published in ((85e6, 6e-4), (6.4e9, 1.2e-4), (174e9, 6e-5)):
        assert 0.5 < usual_rate(int(non_embedding)) / published < 2


def test_every_illegal_setting_is_named_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = explained(
        capfd, "data=shards", "length.steps=4", "length.epochs=2", "batch.global_batch_size=9", "seed=-1",
        "model.n_head=3", "schedule.warmup_steps=7", "optimizer.lr=fast", "+model.layers=2",
    )  # fmt: skip
    assert code == 1
    assert err == "lit-pretrain: train would refuse this: 7 settings must change, listed above as illegal.\n"
    illegal = out.split("\nillegal\n")[1]
    assert illegal.count("\n") == 7
    for sentence in (
        "data.corpus.sources must be given: 'data.corpus.sources={web: FOLDER}'; lit-pretrain prepare",
        "length.epochs=2 and length.steps=4 are both given",
        "batch.global_batch_size=9 must be a multiple of",
        "seed=-1 must be a whole number",
        "model.layers is not a setting of lit_pretrain.specs.GPTConfig; did you mean 'n_layer'?",
        "not schedule.warmup_steps=7 and schedule.warmup_fraction=0.02",
        "optimizer.lr='fast' must be a finite number of at least 0.",
    ):
        assert sentence in illegal


def test_classes_of_the_users_own_are_not_known(capfd: pytest.CaptureFixture[str]) -> None:
    groups = ("model", "data", "data.corpus", "optimizer", "schedule", "trainer", "strategy", "module", "logger")
    own = [f"{group}._target_=nowhere.Mine" for group in groups]
    code, out, err = explained(capfd, "strategy=ddp", "length.steps=5", *own)
    assert (code, err) == (0, "")
    assert row(out, "parameters") == "not known of nowhere.Mine"
    assert row(out, "holds") == "not known for this strategy"
    assert row(out, "tokens") == "41K (40,960)"


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from leaves(value, (*path, key))


@pytest.mark.slow
def test_no_value_anywhere_stops_it(shards: list[str], tmp_path: Path) -> None:
    """Every setting, one at a time, missing or of a kind that it should not be."""
    config = tiny.composed(tmp_path, [*shards, *tiny.SHRINK, "strategy=ddp"])
    spared = ("clipping", "throughput", "progress", "sampler", "record")  # nobody looks into these
    paths = [path for path in leaves(config) if path[0] != "logger" and path[1:2] not in [(name,) for name in spared]]
    assert len(paths) > 90
    missing = object()
    for path, value in itertools.product(paths, (missing, "text", {})):
        changed = copy.deepcopy(config)
        if path[0] not in ("data", "batch"):  # opening the corpus takes the most time
            changed["data"]["corpus"]["_target_"] = "nowhere.Corpus"
        node: Any = changed
        for key in path[:-1]:
            node = node[key]
        if value is missing:
            del node[path[-1]]
        else:
            node[path[-1]] = value
        outlook = look(changed)
        assert layout(sections(outlook, GPU))
        suspicions(outlook)
        checks.violations(changed)


def test_what_cannot_be_resolved_is_left_out() -> None:
    config = OmegaConf.create({"a": "${b}", "c": {"d": "???", "e": 1}, "f": ["${g}", 2], "h": "${c.d}"})
    plain, errors = resolve_gently(config, [])
    assert plain == {"c": {"e": 1}, "f": [2]}
    assert len(errors) == len(set(errors)) >= 3
    assert "c.d must be given: c.d=..." in errors


def test_the_gpu_of_this_machine_by_its_driver(tmp_path: Path) -> None:
    assert gpu_name(tmp_path / "nowhere") is None
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    assert gpu_name(tmp_path) == "NVIDIA H100 80GB HBM3"


def test_no_torch_and_within_seconds(workplace: Path, shards: list[str]) -> None:
    code = (
        "import sys\n"
        "from lit_pretrain.cli import main\n"
        f"assert main({['explain', *shards, *tiny.SHRINK]!r}) == 0\n"
        "loaded = {'torch', 'lightning', 'torchmetrics', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=workplace, env={**os.environ})
    assert time.monotonic() - start < 15  # 1.4 s on an idle core
    assert list(workplace.iterdir()) == []
