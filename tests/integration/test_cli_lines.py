"""Command lines and what they print, in this process: none of them starts a run, none shows a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lit_pretrain.cli import EXAMPLES, VERBS, main

CONF = Path(__file__).parent / "cli_toy" / "conf"
TRAIN = ["train", "--config-dir", str(CONF), "model=tiny"]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capfd.readouterr()
    return code, out, err


WRONG_SETTINGS = {
    # names
    "modle=x": "modle is not a setting of train; did you mean 'module' or 'model'?",
    "model=tinny": "model=tinny does not exist; did you mean 'tiny'?",
    "optimizer.lrr=1": "optimizer.lrr is not a setting of optimizer; did you mean 'lr'?",
    "optimiser.lr=1": "optimiser is not a setting of train; did you mean 'optimizer'?",
    "optimizer=adam": "optimizer=adam does not exist; did you mean 'adamw'?",
    "schedule=cosine": "schedule=cosine does not exist; did you mean 'warmup_cosine'?",
    "precision=fp16": "precision=fp16 does not exist; did you mean",
    "experiment=demos": "experiment=demos does not exist; did you mean 'demo'?",
    "callbacks.cliping.max_norm=1": "callbacks.cliping is not a setting of callbacks; did you mean 'clipping'?",
    "~callbacks.cliping": "callbacks.cliping is not a setting of callbacks; did you mean 'clipping'?",
    "hydra.swep.dir=x": "hydra.swep is not a setting of hydra; did you mean 'sweep'?",
    "trainer.max_step=3": "trainer.max_step is not a setting of trainer; did you mean 'max_steps'",
    "+foo=1": "foo is not a setting of train; known: ",
    "+optimizer.lr=1": "optimizer.lr exists already; write optimizer.lr=... without the +.",
    "~length": "trainer.max_steps follows from length.steps, which is not there.",
    # values
    "run_id=": "run_id='' must name a folder, such as run_id=first; or leave it out.",
    "output_root=null": "output_root=None must name a folder, such as output_root=outputs; or leave it out.",
    "length.steps=null": "no length of training is given; set one of length.steps, length.tokens and length.epochs.",
    "length.tokens=5000": "length.steps=4 and length.tokens=5000 disagree: 5000 tokens are 10 steps of 512 tokens",
    "length.epochs=1": "length.epochs=1 and length.steps=4 are both given; set one of them to null.",
    "length.steps=abc": "length.steps='abc' must be a whole number of at least 1.",
    "batch.global_batch_size=9": "batch.global_batch_size=9 must be a multiple of batch.micro_batch_size=8 x",
    "batch.micro_batch_size=0": "batch.micro_batch_size=0 must be a whole number of at least 1.",
    "batch.sequence_length=64": "batch.sequence_length=64 must be at most model.block_size=16;",
    "validation.every_steps=0": "validation.every_steps=0 must be a whole number of at least 1.",
    "seed=???": "seed must be given: seed=...",
    "seed=-1": "seed=-1 must be a whole number from 0 to 4294967295.",
    "data=shards": "data.corpus.sources must be given: data.corpus.sources=...",
    "data.corpus.domains=[cod]": "corpus.domains holds 'cod', which is unknown; use code or english.",
    "data.corpus.vocab_size=10": "corpus.vocab_size=10 must be a whole number of at least 257.",
    "trainer.devices=zero": "trainer.devices='zero' must be a whole number of at least 1, a list of device indices",
    "trainer.num_nodes=2": "trainer.num_nodes=2 needs a launcher on every node",
    "trainer.precision=half": "trainer.precision='half' must be one of 64, 64-true, 32, 32-true, 16, 16-mixed, bf16,",
    "precision=bf16 trainer.precision=16-mixed": "trainer.precision=16-mixed needs a GPU: on a CPU Lightning",
    "model=gpt": "model.block_size must be given: model.block_size=...",
    "length={}": "length={} changes nothing: a mapping is merged into what is there (steps, tokens, epochs);",
    "batch.sequence_length=long": "batch.sequence_length='long' must be a whole number of at least 1.",
    "model.n_head=3": "model.n_head=3 must divide model.n_embd=16;",
    "model.vocab_size=big": "model.vocab_size='big' must be a whole number.",
    "+model.layers=3": "model.layers is not a setting of lit_pretrain.specs.GPTConfig; did you mean 'n_layer'?",
    # grammar
    "optimizer.lr=1,2": "optimizer.lr=1,2: several values make a sweep, which needs -m;",
    "run_id=a=b": "run_id=a=b: a value with '=' in it needs quotes inside quotes: 'run_id=\"a=b\"'.",
    "data.corpus.domains=[code,": "data.corpus.domains=[code,: the value cannot be read; lists are [a,b]",
    "model=null": "model=null: a group needs an option; name one",
    "batch=3": "batch is a group of settings, not one value; set batch.NAME=...",
    "model.n_head=${nope}": "model.n_head follows from nope, which is not there.",
    "output_root=/proc/nowhere": "/proc/nowhere",
}


@pytest.mark.parametrize(("word", "sentence"), WRONG_SETTINGS.items(), ids=list(WRONG_SETTINGS))
def test_wrong_settings(capfd: pytest.CaptureFixture[str], word: str, sentence: str) -> None:
    words = word.split(" ") if word.startswith("precision") else [word]
    code, out, err = run(capfd, *TRAIN, "length.steps=4", "trainer=cpu", *words)
    assert (code, out) == (1, "")
    assert err.startswith("lit-pretrain: ")
    assert sentence in err
    assert err.count("\n") == 1


WRONG_COMBINATIONS = {
    ("strategy=single", "trainer.devices=2"): "strategy=single trains on one device, but trainer.devices=2",
    ("run.inline=true", "trainer.devices=2"): "run.inline=true is for one job of one process",
    ("data=shards", "data.corpus.sources={a: nowhere}"): "nowhere",
    (
        "data=shards",
        "data.corpus.sources={a: x}",
        "data.corpus.sources={b: y}",
    ): "data.corpus.sources has names already, and a mapping changes only those; to replace it write "
    "'~data.corpus.sources' '+data.corpus.sources={b: y}', to add to it +data.corpus.sources.NAME=....",
}


@pytest.mark.parametrize(("words", "sentence"), WRONG_COMBINATIONS.items())
def test_wrong_combinations(capfd: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str) -> None:
    code, out, err = run(capfd, *TRAIN, "length.steps=4", *words)
    assert (code, out) == (1, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_a_file_in_the_way_of_the_run_folder(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    (workplace / "outputs").write_text("")
    code, _, err = run(capfd, *TRAIN, "length.steps=4")
    assert code == 1
    assert "outputs" in err
    assert "choose another" in err
    assert "Traceback" not in err


def test_broken_yaml_names_its_line(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    folder = workplace / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "x.yaml").write_text("a: 1\nb: [1\nc: 2\n")
    code, _, err = run(capfd, "train", "--config-dir", "mine", "experiment=x")
    assert code == 1
    assert "x.yaml, line 3: not valid YAML" in err
    assert "Traceback" not in err


def test_what_a_users_file_merges_in_is_checked_too(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    folder = workplace / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "x.yaml").write_text("# @package _global_\noptimiser: {lr: 1}\nlength: {steps: 1}\n")
    code, _, err = run(
        capfd,
        "train",
        "--config-dir",
        "mine",
        "experiment=x",
        "hydra.searchpath=[file://" + str(CONF) + "]",
        "model=tiny",
    )
    assert code == 1
    assert "optimiser is not a setting of train; did you mean 'optimizer'?" in err


def test_an_earlier_run_is_not_touched(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    saved = workplace / "outputs" / "one" / "checkpoints" / "last.ckpt"
    saved.parent.mkdir(parents=True)
    saved.write_bytes(b"weights")
    code, _, err = run(capfd, *TRAIN, "run_id=one", "length.steps=4", "debug=fast")
    assert code == 1
    assert "holds an earlier run with the checkpoint last.ckpt" in err
    assert err.count("\n") == 1
    assert saved.read_bytes() == b"weights"
    left = {p.name for p in saved.parents[1].iterdir()}
    assert left.isdisjoint({"resolved.yaml", "result.json", "failure.json", ".hydra"})


def test_every_failed_job_of_a_sweep_is_printed(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    code, _, err = run(capfd, *TRAIN, "-m", "run_id=s", "length.steps=4", "run.inline=true", "seed=1,2")
    assert code == 1
    assert err.count("run.inline=true is for one job of one process") == 2
    assert "2 of 2 jobs failed: 0, 1" in err
    assert "Traceback" not in err
    assert sorted(p.name for p in (workplace / "outputs" / "s").iterdir() if p.is_dir()) == ["0", "1"]


WRONG_RUNS = {
    (): "run must be given: run=...",
    ("run=nowhere",): "run=nowhere does not exist; name the folder of a run",
    ("run=.",): "run=. is not a run folder (no resolved.yaml); did you mean run=saved?",
    ("run=inside",): "inside/checkpoints holds no checkpoint; the run saved none",
    (
        "run=inside",
        "checkpoint=x.ckpt",
    ): "checkpoint=x.ckpt is neither newest, best nor a checkpoint; in inside/checkpoints there is: none.",
    ("run=saved",): "there is no tokenizer at saved/tokenizer.json; name a tokenizer.json with tokenizer=FILE.",
    ("run=saved", "tokenizer=saved/resolved.yaml"): "saved/resolved.yaml is not a tokenizer.json",
    ("run=damaged",): "damaged/resolved.yaml is damaged",
    ("run=other",): "other/resolved.yaml is not the configuration of a training run",
    ("run=inside", "promt=x"): "promt is not a setting of generate; did you mean 'prompt'",
}


# What every verb that reads a run says, whatever it would do with it.
WRONG_EVALUATIONS = {
    words: sentence
    for words, sentence in WRONG_RUNS.items()
    if not any(word.startswith(("tokenizer=", "promt=")) for word in words) and words != ("run=saved",)
} | {
    ("run=saved", "text=x.txt"): "there is no tokenizer at saved/tokenizer.json; name a",
    ("run=saved", "txt=x"): "txt is not a setting of evaluate; did you mean 'text'?",
    ("run=saved", "text=a,b.txt", "shards=x"): "shards and text are both given; keep one of them.",
    ("saved", "text=[a,"): "text=[a,: the value cannot be read; lists are [a,b]",
}  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "words", "sentence"),
    [("generate", *row) for row in WRONG_RUNS.items()] + [("evaluate", *row) for row in WRONG_EVALUATIONS.items()],
)
def test_a_verb_without_a_whole_run(
    capfd: pytest.CaptureFixture[str], workplace: Path, verb: str, words: tuple[str, ...], sentence: str
) -> None:
    for name, text in {"inside": "module: {}", "saved": "module: {}", "damaged": "a: [", "other": "a: 1"}.items():
        (workplace / name / "checkpoints").mkdir(parents=True)
        (workplace / name / "resolved.yaml").write_text(text)
    with zipfile.ZipFile(workplace / "saved" / "checkpoints" / "last.ckpt", "w") as archive:
        archive.writestr("last/data.pkl", b"")
    code, out, err = run(capfd, verb, *words)
    assert (code, out) == (1, "")
    assert sentence in err
    assert err.count("\n") == 1


WRONG_EXPLANATIONS = {
    "modle=x": "modle is not a setting of explain; did you mean 'module' or 'model'?",
    "optimizer.lrr=1": "optimizer.lrr is not a setting of optimizer; did you mean 'lr'?",
    "experiment=demos": "experiment=demos does not exist; did you mean 'demo'?",
    "explain.devise=H100": "explain.devise is not a setting of explain; did you mean 'device'?",
    "explain.device=abacus": "explain.device=abacus is not in the table; use one of GB200, B200",
    "explain.utilisation=2": "explain.utilisation=2 must be above 0 and at most 1; 0.4 is usual.",
    "length.steps=1,2": "length.steps=1,2: several values make a sweep, which needs -m;",
}


@pytest.mark.parametrize(("word", "sentence"), WRONG_EXPLANATIONS.items(), ids=list(WRONG_EXPLANATIONS))
def test_wrong_explanations(capfd: pytest.CaptureFixture[str], word: str, sentence: str) -> None:
    code, out, err = run(capfd, "explain", "length.steps=4", word)
    assert (code, out) == (1, "")
    assert sentence in err
    assert err.count("\n") == 1


COMPOSED = (
    "length.",
    "~length",
    "batch.",
    "seed",
    "data.corpus",
    "data=",
    "trainer.devices",
    "trainer.num",
    "model.n_",
)
"""What Hydra composes, and only the values are wrong: explain goes on and lists it."""


@pytest.mark.slow  # the same sentences once more
@pytest.mark.parametrize("word", [word for word in WRONG_SETTINGS if word.startswith(COMPOSED)])
def test_explain_says_what_train_says(capfd: pytest.CaptureFixture[str], word: str) -> None:
    code, out, err = run(capfd, "explain", *TRAIN[1:], "length.steps=4", word)
    assert code == 1
    assert err.count("\n") == 1
    # A value with a hole in its grammar stops the composition.
    assert WRONG_SETTINGS[word] in (out.split("\nillegal\n")[1] if out else err)


# What works


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_usage_explains_the_verbs(capfd: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, _ = run(capfd, *words)
    assert code == 0
    assert all(verb in out and text in out for verb, text in VERBS.items())
    assert EXAMPLES in out


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_help_and_configuration(capfd: pytest.CaptureFixture[str], verb: str) -> None:
    words = [verb, *TRAIN[1:]] if verb in ("train", "explain") else [verb]
    code, out, err = run(capfd, *words, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"lit-pretrain {verb}")
    setting = {"train": "seed:", "explain": "utilisation:", "generate": "seed:"}.get(verb, ": ")
    assert setting in out
    code, out, err = run(capfd, *words, "--cfg", "job")
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
    code, out, _ = run(capfd, "train", "--config-dir", "mine", "optimizer=sgd", "--help")
    assert code == 0
    loader = ConfigLoaderImpl(create_config_search_path("pkg://lit_pretrain.conf"))
    for group in loader.list_groups(""):
        options = loader.get_group_options(group)
        if group != "hydra" and options:
            mine = ["sgd"] if group == "optimizer" else []
            assert f"\n{group}: {', '.join(sorted([*options, *mine]))}\n" in out
    assert "\noptimizer: {}\n" in out


def test_info(workplace: Path) -> None:
    words = [sys.executable, "-m", "lit_pretrain.cli", *TRAIN, "--info", "defaults", "seed=1"]
    out = subprocess.run(words, check=True, capture_output=True, text=True, cwd=workplace).stdout
    assert "optimizer/adamw" in out


def test_a_users_folder_extends_ours(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    folder = workplace / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "x.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /optimizer: adamw\noptimizer: {lr: 0.5}\n"
    )
    code, out, _ = run(
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
        ("lit-pretrain evaluate tex", "text="),
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
    code, out, _ = run(capfd, "-sc", "query=bash")
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
