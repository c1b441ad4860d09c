"""What evaluate prints, against the run's own validation and against plain torch."""

from __future__ import annotations

import functools
import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lit_pretrain.cli import main, saved
from lit_pretrain.cli.train import save
from lit_pretrain.corpus import IGNORED, TokenizerFile, open_tokens
from lit_pretrain.instantiate.evaluate import strided_batches
from lit_pretrain.instantiate.job import train
from tests.conf import tiny


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="module")
def shards(corpus: Path) -> list[str]:
    return tiny.write_corpus(corpus)


def trained(folder: Path, *overrides: str) -> Path:
    folder.mkdir(parents=True)
    config = tiny.composed(folder, overrides)
    save(config, folder / "resolved.yaml")
    train(config)
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, shards: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    return trained(folder, *shards, *tiny.SHRINK, "length.steps=3", "optimizer.lr=0.01")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "some, text.txt"
    path.write_text("abc def ghi jab cde fgh iia bcd efg hij abc déf " * 6, encoding="utf-8")
    return path


def evaluated(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capfd.readouterr()  # a training before
    assert main(["evaluate", *words, "device=cpu", "format=json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    return found


def close(found: float | None, expected: float) -> bool:
    return found is not None and abs(found - expected) < 1e-5


def test_the_runs_own_split_at_the_same_cap_is_its_validation(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    metrics = json.loads((run_dir / "result.json").read_text())["metrics"]
    found = evaluated(capfd, f"run={run_dir}", "max_tokens=256")  # tiny.RUN's validation.max_tokens
    assert close(found["all"]["loss"], metrics["val/loss"])
    assert close(found["all"]["bits_per_byte"], metrics["val/bits_per_byte"])
    assert found["all"]["perplexity"] == pytest.approx(metrics["val/perplexity"], rel=1e-5)
    assert list(found["sources"]) == ["a", "b"]
    for name, score in found["sources"].items():
        assert close(score["loss"], metrics[f"val/loss/{name}"])
    assert found["all"]["tokens"] == sum(score["tokens"] for score in found["sources"].values()) <= 256
    # Another number of rows at once is the same text.
    again = evaluated(capfd, str(run_dir), "max_tokens=256", "batch_size=3")
    assert close(again["all"]["loss"], found["all"]["loss"])
    assert again["all"]["tokens"] == found["all"]["tokens"]


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_the_runs_own_precision(
    precision: str, tmp_path: Path, shards: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path / "run", *shards, *tiny.SHRINK, f"precision={precision}", "optimizer.lr=0.1")
    metrics = json.loads((folder / "result.json").read_text())["metrics"]
    found = evaluated(capfd, f"run={folder}", "max_tokens=256")
    assert close(found["all"]["loss"], metrics["val/loss"])
    other = evaluated(capfd, f"run={folder}", "max_tokens=256", "as_precision=32-true")
    assert other["precision"] == "32-true"
    assert precision == "fp64" or not close(other["all"]["loss"], metrics["val/loss"])


def test_documents_stay_apart_where_training_kept_them_apart(
    tmp_path: Path, shards: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path / "run", *shards, *tiny.SHRINK, "data.isolate_documents=true")
    metrics = json.loads((folder / "result.json").read_text())["metrics"]
    assert close(evaluated(capfd, f"run={folder}", "max_tokens=256")["all"]["loss"], metrics["val/loss"])


@functools.cache
def loaded(run_dir: Path) -> Any:
    resolved = saved.read_resolved(run_dir)
    return saved.load(resolved, saved.find_checkpoint(run_dir, "newest"), device="cpu")


def all_logits(run_dir: Path, ids: list[int]) -> torch.Tensor:
    """Logits of one forward pass, (len(ids), V)."""
    model = loaded(run_dir)
    with torch.no_grad():
        out: torch.Tensor = model.logits(model(torch.tensor([ids])))[0]
    return out


def test_the_whole_split_is_every_held_out_token_once(
    run_dir: Path, corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = evaluated(capfd, f"run={run_dir}")
    for name, score in found["sources"].items():
        stream = open_tokens(corpus / f"{name}-held-out")
        ids = stream.piece(0, stream.num_tokens).astype(np.int64)
        nats = 0.0
        for low in range(0, len(ids) - 1, tiny.SEQUENCE_LENGTH):
            piece = ids[low : low + tiny.SEQUENCE_LENGTH + 1]
            logits = all_logits(run_dir, piece[:-1].tolist())
            nats += float(F.cross_entropy(logits, torch.tensor(piece[1:]), reduction="sum"))
        assert score["tokens"] == len(ids) - 1
        assert close(score["loss"], nats / (len(ids) - 1))
    folders = f"shards={{a: '{corpus / 'a-held-out'}', b: '{corpus / 'b-held-out'}'}}"
    shown = evaluated(capfd, f"run={run_dir}", folders)
    assert list(shown["sources"]) == ["a", "b"]
    assert all(shown["sources"][name] == pytest.approx(found["sources"][name]) for name in ("a", "b"))
    one = evaluated(capfd, f"run={run_dir}", f"shards={corpus / 'b-held-out'}")
    assert one["sources"] == {"b-held-out": pytest.approx(found["sources"]["b"])}


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_any_text_in_strided_windows(
    run_dir: Path, text_file: Path, capfd: pytest.CaptureFixture[str], stride: int
) -> None:
    """Oracle: one forward pass per predicted token, its context found by hand."""
    tokenizer = TokenizerFile(run_dir / "tokenizer.json")
    ids = tokenizer.encode(text_file.read_text(encoding="utf-8"))
    length = tiny.SEQUENCE_LENGTH
    nats, num_bytes = 0.0, 0
    for target in range(1, len(ids)):
        end = length if target <= length else length + -(-(target - length) // stride) * stride
        end = min(end, len(ids) - 1)  # last input token of the window, as a count
        context = ids[max(0, end - length) : target]
        nats -= float(all_logits(run_dir, context)[-1].log_softmax(-1)[ids[target]])
        num_bytes += int(tokenizer.token_bytes()[ids[target]])
    found = evaluated(capfd, f"run={run_dir}", f"text={text_file}", f"stride={stride}")["all"]
    assert found["tokens"] == len(ids) - 1
    assert found["bytes"] == num_bytes
    assert close(found["loss"], nats / (len(ids) - 1))
    assert close(found["bits_per_byte"], nats / math.log(2) / num_bytes)
    assert found["perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-4)


def test_short_and_several_texts(run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = TokenizerFile(run_dir / "tokenizer.json")
    (tmp_path / "two.txt").write_text("zz")
    (tmp_path / "more.txt").write_text("abc def")
    two, more = (tokenizer.encode(t) for t in ("zz", "abc def"))
    assert len(two) == 2
    found = evaluated(capfd, f"run={run_dir}", f"text=[{tmp_path / 'two.txt'},{tmp_path / 'more.txt'}]")
    (of_two, of_more) = found["sources"].values()
    assert (of_two["tokens"], of_more["tokens"]) == (1, len(more) - 1)
    assert close(of_two["loss"], -float(all_logits(run_dir, two[:1])[0].log_softmax(-1)[two[1]]))
    capped = evaluated(capfd, f"run={run_dir}", f"text={tmp_path / 'more.txt'}", "max_tokens=1")
    assert capped["all"]["tokens"] == 1


def test_documents_of_jsonl_are_read_as_prepare_reads_them(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = ["abc def", "ghi jab cde fgh"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    lines = [json.dumps({"id": 7, "body": text}) for text in texts]
    (tmp_path / "docs.jsonl").write_text("\n".join([*lines, '{"id": 8}', ""]))
    with gzip.open(tmp_path / "docs.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    plain = evaluated(capfd, f"run={run_dir}", f"text=[{tmp_path / '0.txt'},{tmp_path / '1.txt'}]")
    assert (
        main(
            [
                "evaluate",
                f"run={run_dir}",
                f"text={tmp_path / 'docs.jsonl'}",
                "text_key=body",
                "format=json",
                "device=cpu",
            ]
        )
        == 0
    )
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert found["all"] == pytest.approx(plain["all"])
    assert found["of"] == f"{tmp_path / 'docs.jsonl'} (2 documents, field 'body')"
    assert "left out: 1 without the text key, first " in err
    compressed = evaluated(capfd, f"run={run_dir}", f"text={tmp_path / 'docs.jsonl.gz'}", "text_key=body")
    assert compressed["all"] == pytest.approx(plain["all"])
    capped = evaluated(capfd, f"run={run_dir}", f"text={tmp_path / 'docs.jsonl.gz'}", "text_key=body", "max_tokens=3")
    assert capped["all"]["tokens"] == 3


@pytest.mark.parametrize("stride", [1, 3, 4])
@pytest.mark.parametrize("size", [2, 4, 5, 6, 13])
def test_every_token_but_the_first_is_a_target_once(size: int, stride: int) -> None:
    batches = list(strided_batches([range(100, 100 + size)], length=4, stride=stride, batch_size=2))
    targets = np.concatenate([batch["targets"].ravel() for batch in batches])
    assert sorted(targets[targets != IGNORED].tolist()) == list(range(101, 100 + size))
    for batch in batches:
        assert batch["ids"].shape[1] == 4
        for ids, wanted in zip(batch["ids"], batch["targets"], strict=True):
            for place in np.flatnonzero(wanted != IGNORED):
                assert wanted[place] == ids[place] + 1


def test_the_table(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = evaluated(capfd, f"run={run_dir}")
    assert main(["evaluate", f"run={run_dir}", "device=cpu"]) == 0
    lines = capfd.readouterr().out.splitlines()
    checkpoint = saved.find_checkpoint(run_dir, "newest")
    assert lines[0] == f"{checkpoint} on the run's held-out text, precision 32-true"
    assert lines[2].split() == ["source", "tokens", "loss", "(nats/token)", "perplexity", "bits/byte"]
    assert [line.split()[0] for line in lines[3:]] == ["a", "b", "all"]
    total = found["all"]
    numbers = [f"{total['tokens']:,}", f"{total['loss']:.4f}", f"{total['perplexity']:,.2f}"]
    assert lines[-1].split() == ["all", *numbers, f"{total['bits_per_byte']:.4f}"]


def test_a_broken_model_is_still_strict_json(
    run_dir: Path, tmp_path: Path, text_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = saved.read_checkpoint(saved.find_checkpoint(run_dir, "newest"))
    checkpoint["state_dict"]["model.norm.weight"].fill_(float("nan"))
    torch.save(checkpoint, tmp_path / "nan.ckpt")
    found = evaluated(capfd, f"run={run_dir}", f"checkpoint={tmp_path / 'nan.ckpt'}", f"text={text_file}")
    assert (found["all"]["loss"], found["all"]["perplexity"]) == (None, None)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["text=one.txt"], "text=one.txt has 1 tokens, and predicting needs 2"),
        (["text=empty.txt"], "text=empty.txt has 0 tokens, and predicting needs 2"),
        (["text=latin.txt"], "text=latin.txt is not UTF-8 text (byte 1); convert it first."),
        (["text=nowhere"], "text=nowhere cannot be read (No such file or directory); name a text file."),
        (["text=long.jsonl"], "text=long.jsonl: the input holds no document that can be used (1 not JSON, first"),
        (["text=keys.jsonl"], "its keys are 'body'). text_key=text names the text in each record."),
        (["text=nowhere.jsonl"], "text=nowhere.jsonl cannot be read (No such file or directory); name a text file."),
        (["text=.", "text_key=3"], "text_key=3 must be a text: the key in JSONL, the column in Parquet."),
        (["text=."], "text=. cannot be read (Is a directory); name a text file."),
        (["text=[]"], "text=[] must be a file, or several as [a,b]."),
        (["text=long.txt", "stride=17"], "stride=17 must be at most 16"),
        (["text=long.txt", "stride=0"], "stride=0 must be a whole number of at least 1."),
        (["text=long.txt", "shards=x"], "shards and text are both given; keep one of them."),
        (["shards=nowhere"], "nowhere"),
        (["shards=5"], "shards=5 must be a shard folder, or several as {name: folder}."),
        (["max_tokens=none"], "max_tokens='none' must be a whole number of at least 1."),
        (["batch_size=0"], "batch_size=0 must be a whole number of at least 1."),
        (["batch_size=-1"], "batch_size=-1 must be a whole number of at least 1."),
        (["as_precision=half"], "as_precision=half is unknown; use one of 64, 64-true"),
        (["format=xml"], "format=xml is unknown; use table or json."),
        (["checkpoint=best"], "checkpoint=best needs a metric that the run watched"),
        (["checkpoint=x.ckpt"], "checkpoint=x.ckpt is neither newest, best nor a checkpoint"),
        (["device=abacus"], "device=abacus cannot be used here"),
        (["txt=x"], "txt is not a setting of evaluate; did you mean 'text'?"),
    ],
)  # fmt: skip
def test_refused_in_one_sentence(
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in {"one": b"z", "empty": b"", "latin": b"a\xe9", "long": b"abc def"}.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    (tmp_path / "long.jsonl").write_bytes(b"abc def")
    (tmp_path / "keys.jsonl").write_text('{"body": "abc def"}')
    code = main(["evaluate", f"run={run_dir}", "device=cpu", *words])
    out, err = capfd.readouterr()
    assert (code, out) == (1, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_a_run_without_held_out_text(tmp_path: Path, shards: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    folder = trained(tmp_path / "run", *shards, *tiny.SHRINK, "data.corpus.validation=null")
    assert main(["evaluate", f"run={folder}", "device=cpu"]) == 1
    assert "the run's held-out text holds nothing to predict; name other text" in capfd.readouterr().err
