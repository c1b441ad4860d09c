"""Command lines and what they print, in this process: none of them starts a run, none shows a traceback."""

from __future__ import annotations

import errno
import zipfile
from pathlib import Path

import pytest

from lit_pretrain.cli.claim import claimed
from tests.integration.cli_processes import CONF, TRAIN, run_here


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


WRONG_SETTINGS = {
    # names
    "modle=x": "modle is not a setting of train; did you mean 'module' or 'model'?",
    "model=tinny": "model=tinny does not exist; did you mean 'tiny'?",
    "optimizer.lrr=1": "optimizer.lrr is not a setting of optimizer; did you mean 'lr'?",
    "optimiser.lr=1": "optimiser is not a setting of train; did you mean 'optimizer'?",
    "optimizer=adam": "optimizer=adam does not exist; did you mean 'adamw'?",
    "schedule=cosine": "schedule=cosine does not exist; did you mean 'warmup_cosine'?",
    "precision=fp61": "precision=fp61 does not exist; did you mean",
    "experiment=demos": "experiment=demos does not exist; did you mean 'demo'?",
    "callbacks.cliping.max_norm=1": "callbacks.cliping is not a setting of callbacks; did you mean 'clipping'?",
    "~callbacks.cliping": "callbacks.cliping is not a setting of callbacks; did you mean 'clipping'?",
    "hydra.swep.dir=x": "hydra.swep is not a setting of hydra; did you mean 'sweep'?",
    "trainer.max_step=3": "trainer.max_step is not a setting of trainer; did you mean 'max_steps'",
    "lr=1e-3": "lr is not a setting of train; did you mean 'optimizer.lr'?",
    "+foo=1": "foo is not a setting of train; known: ",
    "+optimizer.lr=1": "optimizer.lr exists already; write optimizer.lr=... without the +.",
    "~length": "trainer.max_steps follows from length.steps, which is not there.",
    # values
    "run_id=": "run_id='' must name a folder, such as run_id=first; or leave it out.",
    "run_id=[a]": "run_id=['a'] must be a name, such as run_id=first.",
    "run_id=../x": "run_id='../x' must lie below output_root; name another folder with output_root=....",
    "run_id=.": "run_id='.' must lie below output_root",
    "run_id=/tmp/x": "run_id='/tmp/x' must lie below output_root",
    "run_id='a=b'": "run_id='a=b' must have neither '=' nor control characters; use letters, digits and -.",
    "output_root=null": "output_root=None must name a folder, such as output_root=outputs; or leave it out.",
    "length.steps=null": "no length of training is given; set one of length.steps, length.tokens and length.epochs.",
    "length.tokens=5000": "length.steps=4 and length.tokens=5000 disagree: 5000 tokens are 10 steps of 512 tokens",
    "length.epochs=1": "length.epochs=1 and length.steps=4 are both given; set one of them to null.",
    "length.steps=abc": "length.steps='abc' must be a whole number of at least 1.",
    "batch.global_batch_size=9": "batch.global_batch_size=9 must be a multiple of batch.micro_batch_size=8 x",
    "batch.micro_batch_size=0": "batch.micro_batch_size=0 must be a whole number of at least 1.",
    "batch.sequence_length=64": "batch.sequence_length=64 must be at most model.block_size=16;",
    "batch.accumulation=3": "batch.accumulation=3 disagrees with batch, from which 4 follows; leave",
    "batch.tokens_per_update=5": "batch.tokens_per_update=5 disagrees with batch, from which 512 follows;",
    "trainer.max_steps=5": "trainer.max_steps=5 disagrees with length.steps=4, from which 4 follows; leave",
    "trainer.num_nodes=0": "trainer.num_nodes=0 must be a whole number of at least 1.",
    "~data": "data is missing, and no run can do without it; leave out ~data.",
    "callbacks=[nope]": "callbacks=nope does not exist; a group takes the name of one option.",
    "validation.every_steps=0": "validation.every_steps=0 must be a whole number of at least 1.",
    "seed=???": "seed must be given: seed=...",
    "seed=-1": "seed=-1 must be a whole number from 0 to 4294967295.",
    "data=shards": "data.corpus.sources must be given: 'data.corpus.sources={web: FOLDER}'; lit-pretrain prepare",
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
    "module.config=null": "module.config=None must be the settings of a model; choose one with model=NAME",
    "model.block_size=null": "batch.sequence_length=None must be a whole number of at least 1.",
    "run.num_processes=0": "run.num_processes=0 must be a whole number of at least 1.",
    "batch.data_parallel_size=0": "batch.data_parallel_size=0 must be a whole number of at least 1.",
    "data.corpus=null": "data.corpus=None must say where the text is; choose data=default or data=shards",
    "optimizer._target_=torch.optim.Adam": "optimizer._target_=torch.optim.Adam takes parameters, and the module",
    "module=null": "module=None must be a group of settings with a _target_; leave module out.",
    # numbers
    "optimizer.lr=nan": "optimizer.lr=nan is not a number; give one, or leave optimizer.lr out.",
    "optimizer.lr=inf": "optimizer.lr=inf must be a finite number of at least 0.",
    "optimizer.lr=-1": "optimizer.lr=-1 must be a finite number of at least 0.",
    "optimizer.lr=fast": "optimizer.lr='fast' must be a finite number of at least 0.",
    "optimizer.weight_decay=-0.1": "optimizer.weight_decay=-0.1 must be a finite number of at least 0.",
    "optimizer.eps=0": "optimizer.eps=0 must be a finite number above 0.",
    "optimizer.betas=[0.9,1]": "optimizer.betas=[0.9, 1] must be two numbers of at least 0 and below 1",
    "optimizer.betas=0.9": "optimizer.betas=0.9 must be two numbers of at least 0 and below 1",
    "optimizer.betas=[nan,0.9]": "optimizer.betas[0]=nan is not a number",
    "schedule.warmup_fraction=nan": "schedule.warmup_fraction=nan is not a number",
    "schedule.warmup_fraction=-1": "schedule.warmup_fraction=-1 must lie between 0 and 1.",
    "schedule.warmup_fraction=inf": "schedule.warmup_fraction=inf must be a finite number, or null.",
    "schedule.min_ratio=2": "schedule.min_ratio=2 must lie between 0 and 1.",
    "schedule.warmup_steps=2": "Exactly one of schedule.warmup_steps, warmup_tokens, warmup_fraction must be set",
    "length.steps=nan": "length.steps=nan must be a whole number of at least 1.",
    "length.tokens=inf": "length.tokens=inf must be a whole number of at least 1.",
    "callbacks.clipping.max_norm=nan": "callbacks.clipping.max_norm=nan is not a number",
    "validation.max_tokens=nan": "validation.max_tokens=nan is not a number",
    # grammar
    "optimizer.lr=1,2": "optimizer.lr=1,2: several values make a sweep, which needs -m;",
    "run_id=a=b": "run_id=a=b: a value with '=' in it needs quotes inside quotes: 'run_id=\"a=b\"'.",
    "data.corpus.domains=[code,": "data.corpus.domains=[code,: the value cannot be read; lists are [a,b]",
    "hydra.mode=multi": "hydra.mode=multi cannot be set: Invalid value 'multi', expected one of [RUN, MULTIRUN].",
    "hydra.run.dir=null": "hydra.run.dir=null cannot be set: ",
    "model=null": "model=null: a group needs an option; name one",
    "batch=3": "batch is a group of settings, not one value; set batch.NAME=...",
    "model.n_head=${nope}": "model.n_head follows from nope, which is not there.",
    "output_root=/proc/nowhere": "/proc/nowhere",
}


@pytest.mark.parametrize(("word", "sentence"), WRONG_SETTINGS.items(), ids=list(WRONG_SETTINGS))
def test_wrong_settings(capfd: pytest.CaptureFixture[str], word: str, sentence: str) -> None:
    words = word.split(" ") if word.startswith("precision") else [word]
    code, out, err = run_here(capfd, *TRAIN, "length.steps=4", "trainer=cpu", *words)
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
    code, out, err = run_here(capfd, *TRAIN, "length.steps=4", *words)
    assert (code, out) == (1, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_a_file_in_the_way_of_the_run_folder(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    (workplace / "outputs").write_text("")
    code, _, err = run_here(capfd, *TRAIN, "length.steps=4")
    assert code == 1
    assert "outputs" in err
    assert "choose another" in err
    assert "Traceback" not in err


def test_no_place_for_temporary_files(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", "/nowhere")
        code, _, err = run_here(capfd, *TRAIN, "length.steps=4")
    assert code == 1
    assert err.startswith("lit-pretrain: no temporary folder can be made (")
    assert err.endswith("name a place for it with TMPDIR=....\n")


def test_a_disk_that_is_full_from_the_start(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lit_pretrain.cli.train.save", full)
    code, _, err = run_here(capfd, *TRAIN, "length.steps=4")
    assert code == 1
    assert err.startswith("lit-pretrain: there is no space left on the disk; free some, or choose another")
    assert err.count("\n") == 1


def test_broken_yaml_names_its_line(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    folder = workplace / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "x.yaml").write_text("a: 1\nb: [1\nc: 2\n")
    code, _, err = run_here(capfd, "train", "--config-dir", "mine", "experiment=x")
    assert code == 1
    assert "x.yaml, line 3: not valid YAML" in err
    assert "Traceback" not in err


def test_what_a_users_file_merges_in_is_checked_too(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    folder = workplace / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "x.yaml").write_text("# @package _global_\noptimiser: {lr: 1}\nlength: {steps: 1}\n")
    code, _, err = run_here(
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
    code, _, err = run_here(capfd, *TRAIN, "run_id=one", "length.steps=4", "debug=fast")
    assert code == 1
    assert "holds an earlier run with the checkpoint last.ckpt" in err
    assert err.count("\n") == 1
    assert saved.read_bytes() == b"weights"
    left = {p.name for p in saved.parents[1].iterdir()}
    assert left.isdisjoint({"resolved.yaml", "result.json", "failure.json", ".hydra"})


@pytest.mark.parametrize("word", ["optimizer.lr=-1", "run_id=", "data=shards"])
def test_a_refused_run_leaves_no_folder(capfd: pytest.CaptureFixture[str], workplace: Path, word: str) -> None:
    assert run_here(capfd, *TRAIN, "length.steps=4", word)[0] == 1
    assert not list(workplace.iterdir())


def test_a_refused_run_leaves_the_folder_that_it_found(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    (workplace / "outputs" / "mine").mkdir(parents=True)
    (workplace / "outputs" / "mine" / "notes.txt").write_text("keep")
    assert run_here(capfd, *TRAIN, "length.steps=4", "run_id=mine", "optimizer.lr=-1")[0] == 1
    assert [str(path.relative_to(workplace)) for path in workplace.rglob("*")] == [
        "outputs",
        "outputs/mine",
        "outputs/mine/notes.txt",
    ]


def test_every_failed_job_of_a_sweep_is_printed(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    code, out, err = run_here(capfd, *TRAIN, "-m", "run_id=s", "length.steps=4", "run.inline=true", "seed=1,2")
    assert code == 1
    assert [line.split() for line in out.split("\n\n")[-1].splitlines()] == [
        ["job", "seed", "val/loss", "bits/byte", "updates", "state", "folder"],
        ["0", "1", "-", "-", "-", "failed", "outputs/s/0"],
        ["1", "2", "-", "-", "-", "failed", "outputs/s/1"],
    ]
    assert err.count("run.inline=true is for one job of one process") == 2
    assert "2 of 2 jobs failed: 0, 1" in err
    assert "Traceback" not in err
    assert sorted(p.name for p in (workplace / "outputs" / "s").iterdir() if p.is_dir()) == ["0", "1"]


def test_a_sweep_without_what_must_be_given(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    for words, sentence in (
        (["data=shards", "length.steps=4,5"], "data.corpus.sources must be given: 'data.corpus.sources={web: FOLDER}'"),
        (["length.steps=null", "seed=1,2"], "no length of training is given; set one of length.steps"),
    ):
        code, _, err = run_here(capfd, *TRAIN, "-m", "run_id=s", *words)
        assert code == 1
        assert err.count(sentence) == 2
        assert "Traceback" not in err


def test_optuna_stops_at_a_failed_trial(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    words = [*TRAIN, "-m", "run_id=s", "length.steps=4", *words, "optimizer.lr=choice(-1,-2)"]
    code, _, err = run_here(capfd, *words)
    assert code == 1
    assert "\n=== job 0 failed (" in err
    assert " must be a finite number of at least 0." in err
    assert err.endswith("lit-pretrain: 1 of 1 jobs failed: 0\n")
    assert "Traceback" not in err
    code, out, err = run_here(capfd, *words, "hydra.sweeper.max_failure_rate=1.0")
    assert code == 1
    assert err.endswith("lit-pretrain: 3 of 3 jobs failed: 0, 1, 2\n")
    assert out.count(" failed ") == 3


def test_two_sweeps_of_one_name(capfd: pytest.CaptureFixture[str], workplace: Path) -> None:
    folder = workplace / "outputs" / "s"
    (folder / "0").mkdir(parents=True)
    (folder / "0" / "failure.json").write_text("of the other sweep")
    words = [*TRAIN, "-m", "run_id=s", "length.steps=4", "run.inline=true", "seed=1,2"]
    with claimed(folder):
        code, _, err = run_here(capfd, *words)
        assert code == 1
        assert err.startswith(f"lit-pretrain: another process is training in {folder}")
        assert err.count("\n") == 1
        assert (folder / "0" / "failure.json").read_text() == "of the other sweep"
    assert "2 of 2 jobs failed: 0, 1" in run_here(capfd, *words)[2]
    with claimed(folder):  # given back
        pass


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
    code, out, err = run_here(capfd, verb, *words)
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
    code, out, err = run_here(capfd, "explain", "length.steps=4", word)
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
    "optimizer.lr=-",
    "optimizer.lr=nan",
    "schedule.warm",
    "module",
)
"""What Hydra composes, and only the values are wrong: explain goes on and lists it."""


@pytest.mark.slow  # the same sentences once more
@pytest.mark.parametrize("word", [word for word in WRONG_SETTINGS if word.startswith(COMPOSED)])
def test_explain_says_what_train_says(capfd: pytest.CaptureFixture[str], word: str) -> None:
    code, out, err = run_here(capfd, "explain", *TRAIN[1:], "length.steps=4", word)
    assert code == 1
    assert err.count("\n") == 1
    # A value with a hole in its grammar stops the composition.
    assert WRONG_SETTINGS[word] in (out.split("\nillegal\n")[1] if out else err)
