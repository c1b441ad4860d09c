"""Words on the command line that are no settings: what each prints. None shows a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_pretrain.cli import VERBS, main

WRONG_WORDS = {
    ("trian",): "'trian' is not a verb; did you mean 'train'?",
    ("zzz",): f"'zzz' is not a verb; known: {', '.join(sorted(VERBS))}.",
    ("model=gpt",): f"a verb must come first ({', '.join(VERBS)}); did you mean: lit-pretrain train model=gpt",
    ("-m", "seed=1,2"): "did you mean: lit-pretrain train -m seed=1,2",
    ("train", "--lr=1"): "--lr is not a flag of lit-pretrain train; settings have no dashes: lr=1",
    ("train", "--multi-run"): "--multi-run is not a flag of lit-pretrain train; did you mean '--multirun'?",
    ("train", "fast"): "'fast': a setting is written name=value, a choice group=option, a removal ~name.",
    ("train", "--experimental-rerun", "x.pickle"): "--experimental-rerun reads a pickle, which may run any program;",
    (
        "train",
        "data.weights={a:",
        "1}",
    ): "'1}' is part of a value with spaces, which needs quotes, as in 'NAME={a: b}'.",
    ("train", "--cfg", "jobs"): "--cfg jobs is unknown; use --cfg job, hydra, all.",
    ("train", "--cfg"): "--cfg is unknown; use --cfg job, hydra, all.",
    ("train", "--config-dir"): "--config-dir needs a value.",
    ("train", "run.dir=a"): "run.dir=a: a run's folder follows from output_root and run_id; say output_root=FOLDER",
    ("generate", "--prompt=hi"): "--prompt is not a flag of lit-pretrain generate; settings have no dashes: prompt=hi",
    ("generate", "-m", "run=x"): "-m makes sweeps of train; run generate once for each setting.",
    ("explain", "--multirun", "seed=1,2"): "--multirun makes sweeps of train; run explain once for each setting.",
    ("explain", "hydra.mode=MULTIRUN"): "hydra.mode=MULTIRUN makes sweeps of train; run explain once for each setting.",
    ("explain", "demo"): "'demo': a setting is written name=value, a choice group=option, a removal ~name.",
    ("evaluate", "--multirun", "run=a,b"): "--multirun makes sweeps of train; run evaluate once for each setting.",
    ("evaluate", "a", "b"): "'a': a setting is written name=value",
    ("evaluate", "run=a", "b"): "'b': a setting is written name=value",
    ("evaluate", "--text=x"): "--text is not a flag of lit-pretrain evaluate; settings have no dashes: text=x",
    ("inspect", "-v", "a"): "-v is not a flag of lit-pretrain inspect; did you mean",
    ("inspct", "a"): "'inspct' is not a verb; did you mean 'inspect'?",
    ("explian", "experiment=demo"): "'explian' is not a verb; did you mean 'explain'?",
}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("words", "sentence"), WRONG_WORDS.items(), ids=" ".join)
def test_wrong_words(capfd: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str) -> None:
    code = main(list(words))
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("lit-pretrain: ")
    assert sentence in err
    assert err.count("\n") == 1
