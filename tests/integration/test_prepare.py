"""``lit-pretrain prepare`` as a user runs it: errors in a sentence, kills, and training on what it made."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_pretrain.cli import main
from tests.conf import tiny


def write_jsonl(path: Path, *, documents: int, words: int = 40) -> Path:
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(2000)]
    with path.open("w") as file:
        for _ in range(documents):
            file.write(json.dumps({"text": " ".join(rng.choices(vocabulary, k=words))}) + "\n")
    return path


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_train_on_what_prepare_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "my data.jsonl", documents=300)
    words = [
        "input=my data.jsonl",
        "output=web 1",
        f"vocab_size={tiny.VOCAB_SIZE}",
        "workers=0",
        "validation_fraction=0.1",
    ]
    assert main(["prepare", *words]) == 0
    out, err = capfd.readouterr()
    assert " lossless: " in err
    program, verb, *told = shlex.split(out.splitlines()[-1])
    assert (program, verb) == ("lit-pretrain", "train")
    shrink = [word for word in tiny.SHRINK if not word.startswith(("model.vocab_size", "length"))]
    told.remove("length.epochs=1")
    assert main(["train", *told, *shrink, "length.steps=2", "run_id=x", "callbacks=minimal", "logger=none"]) == 0
    capfd.readouterr()
    result = json.loads((tmp_path / "outputs" / "x" / "result.json").read_text())
    assert result["steps"] == 2
    assert "val/bits_per_byte" in result["metrics"]
    assert main(["prepare", *words]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("web 1 was prepared before")
    assert err == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["output=out"], "input must be given: input=..."),
        (["input=a.jsonl"], "output must be given: output=..."),
        (["input=b.jsonl", "output=out"], "input=b.jsonl does not exist; check the path."),
        (["input=notes.md", "output=out"], "notes.md is of unknown kind"),
        (["input=notes.md", "output=out", "format=jsonl"], "1 not JSON"),
        (["input=a.jsonl", "output=out", "text_key=body"], "its keys are 'text'"),
        (["input=latin.txt", "output=out"], "1 not UTF-8, first"),
        (["input=a.jsonl", "output=notes.md"], "output=notes.md is a file; name a folder."),
        (["input=a.jsonl", "output=/proc/nothing", "vocab_size=260"], "/proc/nothing"),
        (["input=a.jsonl", "output=out", "tokenizer=none.json"], "tokenizer=none.json does not exist"),
        (["input=a.jsonl", "output=out", "tokenizer=notes.md"], "notes.md is not a tokenizer.json"),
        (["input=a.jsonl", "output=out", "vocab_size=200"], "vocab_size=200 must be a whole number of at least 257."),
        (["input=a.jsonl", "output=out", "vocab_size=9999"], "vocab_size=9999 was asked for; give more text"),
        (["input=a.jsonl", "output=out", "worker=2"], "worker is not a setting of prepare; did you mean 'workers'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_command_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", documents=5)
    (tmp_path / "notes.md").write_text("notes")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert main(["prepare", *words, "workers=0"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("lit-pretrain: ")
    assert sentence in last
    assert "Traceback" not in err


def command(folder: Path, output: str) -> list[str]:
    words = [f"input={folder / 'a.jsonl'}", f"output={folder / output}", "vocab_size=400", "sample_bytes=100000"]
    return [sys.executable, "-m", "lit_pretrain.cli", "prepare", *words, "workers=2", "unit_bytes=130000"]


def processes_of(group: int) -> set[int]:
    """Living processes of a process group."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(pgrp) == group and state != "Z":
                found.add(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_and_started_again(tmp_path: Path, signum: int) -> None:
    write_jsonl(tmp_path / "a.jsonl", documents=20_000)  # about 5 MB
    subprocess.run(command(tmp_path, "whole"), check=True, capture_output=True)
    process = subprocess.Popen(
        command(tmp_path, "killed"), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    parts = tmp_path / "killed" / ".parts"
    deadline = time.monotonic() + 60
    while len(list(parts.glob("[0-9]*"))) < 4:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signum) if signum == signal.SIGKILL else os.killpg(process.pid, signum)
    code = process.wait(30)
    assert code == (-signum if signum == signal.SIGKILL else 128 + signum)
    deadline = time.monotonic() + 10
    while processes_of(process.pid):
        assert time.monotonic() < deadline, "workers outlived the command"
        time.sleep(0.05)
    finished = len(list(parts.glob("[0-9]*")))
    assert not (tmp_path / "killed" / "prepare.json").exists()
    done = subprocess.run(command(tmp_path, "killed"), check=True, capture_output=True, text=True)
    assert f"{finished} of " in done.stderr
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


@pytest.mark.slow
def test_a_killed_worker_is_said(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", documents=60_000)
    process = subprocess.Popen(command(tmp_path, "out"), start_new_session=True, stderr=subprocess.PIPE, text=True)
    parts = tmp_path / "out" / ".parts"
    deadline = time.monotonic() + 60
    while not (drafts := list(parts.glob(".[0-9]*.tmp"))):  # a part's draft is its worker's; a .json is the command's
        assert time.monotonic() < deadline
        time.sleep(0.01)
    worker = int(drafts[0].name.split(".")[-2].split("-")[0])
    os.kill(worker, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a worker process was killed (out of memory?); run the same command again" in err
    assert "Traceback" not in err
