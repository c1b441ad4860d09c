"""Runs that go on: what is found, what is refused, what accepting does; in this process."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_pretrain.cli import main
from lit_pretrain.cli.saved import read_checkpoint
from lit_pretrain.distributed.checkpoint import files
from lit_pretrain.instantiate import checkpoints
from tests.conf import tiny

WORDS = ("validation.every_steps=2", "optimizer.lr=0.01", "run.inline=true", "callbacks=default", "~callbacks.sampler")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, shards: list[str]) -> Path:
    """The folder of a run of 4 updates."""
    root = tmp_path_factory.mktemp("outputs")
    assert command(root, shards, "run_id=one", "length.steps=4") == 0
    return root / "one"


@pytest.fixture
def root(begun: Path, tmp_path: Path) -> Path:
    """A copy of it, to go on with."""
    shutil.copytree(begun, tmp_path / "one")
    return tmp_path


def command(root: Path, shards: list[str], *words: str) -> int:
    return main(["train", *shards, *tiny.SHRINK, *WORDS, f"output_root='{root}'", *words])


def steps(run_dir: Path) -> list[int | None]:
    return [one.step for one in checkpoints.listed(run_dir / "checkpoints")]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = checkpoints.listed(run_dir / "checkpoints")[-1].path
    found: dict[str, torch.Tensor] = read_checkpoint(newest)["state_dict"]
    return found


def refused(capfd: pytest.CaptureFixture[str], code: int) -> str:
    assert code == 1
    err = capfd.readouterr().err
    assert err.count("lit-pretrain: ") == 1, err
    assert "Traceback" not in err
    return err


def test_it_goes_on_as_if_it_had_never_stopped(root: Path, shards: list[str]) -> None:
    """With a horizon that both share: the schedule's end is not that of the first part."""
    horizon = ("+schedule.total_steps=8",)
    assert command(root, shards, "run_id=whole", "length.steps=8", *horizon) == 0
    assert command(root, shards, "run_id=parts", "length.steps=4", *horizon) == 0
    assert command(root, shards, "run_id=parts", "length.steps=8", "resume=auto", *horizon) == 0
    whole, parts = weights(root / "whole"), weights(root / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_finished_run_does_nothing_and_a_longer_one_goes_on(
    root: Path, shards: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in (root / "one").rglob("*") if p.is_file() and p.suffix != ".log"}
    assert command(root, shards, "run_id=one", "length.steps=4", "resume=auto") == 0
    assert "is finished: 4 updates, all that were asked for; nothing to do" in capfd.readouterr().err
    after = {p: p.stat().st_mtime_ns for p in (root / "one").rglob("*") if p.is_file() and p.suffix != ".log"}
    assert after == before
    assert command(root, shards, "run_id=one", "length.steps=6", "resume=auto") == 0
    assert "goes on from" in capfd.readouterr().err
    assert steps(root / "one") == [4, 6]
    assert json.loads((root / "one" / "result.json").read_text())["steps"] == 6


def test_auto_without_anything_begins_and_says_so(
    tmp_path: Path, shards: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, shards, "run_id=new", "length.steps=2", "resume=auto") == 0
    assert f"no checkpoint in {tmp_path}/new/checkpoints: the run begins at its start." in capfd.readouterr().err
    assert steps(tmp_path / "new") == [2]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run_id=one"], "holds an earlier run with the checkpoint step-00000004"),
        (["run_id=one", "resume=never"], "go on with it by resume=auto"),
        (["resume=auto"], "resume=auto needs the name of the run to go on with: add run_id=NAME."),
        (["run_id=one", "resume=auto", "model.dropout=0.5"], "model.dropout was 0.0, is 0.5"),
        (["run_id=one", "resume=auto", "optimizer.lr=1"], "optimizer.lr was 0.01, is 1"),
        (["run_id=one", "resume=auto", "schedule.min_ratio=0.2"], "schedule.min_ratio was 0.1, is 0.2"),
        (["run_id=one", "resume=auto", "data.isolate_documents=true"], "data.isolate_documents was False, is True"),
        (["run_id=one", "resume=auto", "length.steps=3"], "length.steps was 4, is 3"),
        (["run_id=one", "resume=auto", "seed=7", "resume_accept=[sed]"], "resume_accept=[sed,seed]"),
        (["run_id=two", "resume_accept=[seed]"], "resume_accept needs a run to go on with"),
        (["run_id=two", "resume=nowhere"], "resume=nowhere does not exist"),
        (["run_id=two", "resume=ROOT"], "holds no checkpoint; name a checkpoint or the folder of a run"),
        (["run_id=two", "resume=[a]"], "must be auto, never or the path"),
        (["run_id=two", "resume=ROOT/one", "seed=7"], "seed was 1, is 7"),
        (["run_id=two", "resume=ROOT/one"], "stands at update 4, and length.* asks for 4 in all"),
    ],
)
def test_refused(
    root: Path, shards: list[str], capfd: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    run = {p.relative_to(root) for p in (root / "one").rglob("*")}
    words = [word.replace("ROOT", str(root)) for word in words]
    assert sentence in refused(capfd, command(root, shards, "length.steps=4", *words))
    assert {p.relative_to(root) for p in (root / "one").rglob("*")} == run
    assert steps(root / "one") == [2, 4]


def test_other_tokenizer_under_the_same_name(
    begun: Path, shards: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(begun, tmp_path / "one")
    (tmp_path / "corpus").mkdir()
    corpus = tiny.write_corpus(tmp_path / "corpus")
    accepted = "resume_accept=[data.corpus.sources,data.corpus.validation,data.corpus.tokenizer]"
    # The same corpus elsewhere is the same data: only the paths have to be accepted.
    assert command(tmp_path, corpus, "run_id=one", "length.steps=6", "resume=auto", accepted) == 0
    path = tmp_path / "corpus" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["version"] = "1.0 "
    path.write_text(json.dumps(content))
    capfd.readouterr()
    assert command(tmp_path, corpus, "run_id=one", "length.steps=8", "resume=auto") == 1
    assert "tokenizer" in capfd.readouterr().err


def test_a_path_goes_into_a_new_folder(root: Path, shards: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    first = root / "one" / "checkpoints" / "step-00000002"
    for name, source in (("from-run", root / "one"), ("from-checkpoint", first)):
        assert command(root, shards, f"run_id={name}", "length.steps=6", f"resume='{source}'") == 0
    assert "update 4 with another length" in capfd.readouterr().err
    assert steps(root / "from-run")[-1] == steps(root / "from-checkpoint")[-1] == 6
    assert steps(root / "one") == [2, 4]
    a, b = weights(root / "from-run"), weights(root / "from-checkpoint")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert "would write over the newer ones" in refused(
        capfd, command(root, shards, "run_id=one", "length.steps=6", f"resume='{first}'")
    )


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def seal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and let everything fit again, as somebody with intent would."""
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    data = json.dumps(content).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "COMPLETE").write_text(files.checksum(data))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "tensors": lambda folder: flip(next((folder / "tensors").glob("*.distcp"))),
    "tree": lambda folder: flip(folder / "trainer.json"),
    "manifest": lambda folder: flip(folder / "manifest.json"),
    "no end": lambda folder: (folder / "COMPLETE").unlink(),
    "truncated": lambda folder: os.truncate(folder / "trainer.json", 100),
    "later version": lambda folder: seal(folder, lambda manifest: manifest.update(version=99)),
    "empty": lambda folder: [path.unlink() for path in folder.rglob("*") if path.is_file()],
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_aloud(
    root: Path, shards: list[str], capfd: pytest.CaptureFixture[str], what: str
) -> None:
    DAMAGES[what](root / "one" / "checkpoints" / "step-00000004")
    # A name says nothing: the older one is called as if it were newer.
    (root / "one" / "checkpoints" / "step-00000002").rename(root / "one" / "checkpoints" / "zz-00000009")
    assert command(root, shards, "run_id=one", "length.steps=4", "resume=auto") == 0
    err = capfd.readouterr().err
    assert "step-00000004 was passed over" in err
    assert "goes on from" in err
    assert "zz-00000009, update 2" in err


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_a_malicious_index_is_refused_and_nothing_runs(
    root: Path, shards: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Every checksum fits: somebody with intent made it. It is not passed over in silence, and nothing is lost."""
    folder = root / "one" / "checkpoints" / "step-00000004"
    data = pickle.dumps(Evil(tmp_path / "ran"))
    (folder / "tensors" / ".metadata").write_bytes(data)
    entry = {"bytes": len(data), "checksum": files.checksum(data)}
    seal(folder, lambda manifest: manifest["files"].update({"tensors/.metadata": entry}))
    assert command(root, shards, "run_id=one", "length.steps=6", "resume=auto") == 1
    err = capfd.readouterr().err
    assert ".metadata is not trusted: it asks for" in err
    assert "nothing in it was run" in err
    assert "Traceback" not in err
    assert main(["generate", f"run={root}/one", "device=cpu"]) == 1
    assert main(["inspect", f"{root}/one", "verify=true"]) == 0
    assert "is not trusted" in capfd.readouterr().out
    assert not (tmp_path / "ran").exists()
    assert steps(root / "one") == [2, 4]
    older = root / "one" / "checkpoints" / "step-00000002"
    assert command(root, shards, "run_id=other", "length.steps=6", f"resume='{older}'") == 0


def test_nothing_but_damage_is_refused(root: Path, shards: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    for folder in (root / "one" / "checkpoints").iterdir():
        (folder / "COMPLETE").unlink()
    assert command(root, shards, "run_id=one", "length.steps=6", "resume=auto") == 1
    assert "none of the 2 checkpoints in" in capfd.readouterr().err


def test_accepted_changes_take_effect(root: Path, shards: list[str]) -> None:
    """The checkpoint remembers peak rate, betas and weight decay; the accepted ones win."""
    words = ["optimizer.lr=0.02", "optimizer.betas=[0.8,0.9]", "optimizer.weight_decay=0.3", "schedule=constant"]
    accept = "resume_accept=[optimizer,schedule]"
    assert command(root, shards, "run_id=one", "length.steps=6", "resume=auto", accept, *words) == 0
    newest = checkpoints.listed(root / "one" / "checkpoints")[-1].path
    (state,) = read_checkpoint(newest)["optimizer_states"]
    groups: list[dict[str, Any]] = state["param_groups"]
    assert {tuple(group["betas"]) for group in groups} == {(0.8, 0.9)}
    assert {group["weight_decay"] for group in groups} == {0.3, 0.0}
    assert {round(float(group["lr"]), 9) for group in groups} == {0.02}


def test_other_data_is_accepted_from_there_on(root: Path, shards: list[str]) -> None:
    words = ("seed=5", "batch.global_batch_size=8", "resume_accept=[seed,batch]")
    assert command(root, shards, "run_id=one", "length.steps=6", "resume=auto", *words) == 0
    assert steps(root / "one")[-1] == 6


def test_a_checkpoint_of_another_model(root: Path, shards: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    words = ("model.n_layer=2", "resume_accept=[model]")
    assert command(root, shards, "run_id=two", "length.steps=6", f"resume='{root}/one'", *words) == 1
    err = capfd.readouterr().err
    assert "step-00000004 does not fit the model of this run" in err
    assert "Traceback" not in err


def test_curves_go_on(root: Path, shards: list[str]) -> None:
    """A run that died after update 4, and had logged up to 4, goes on from update 2."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shutil.rmtree(root / "one" / "checkpoints" / "step-00000004")
    words = ("length.steps=6", "resume=auto", "trainer.log_every_n_steps=1")
    assert command(root, shards, "run_id=one", *words) == 0
    events = EventAccumulator(str(root / "one" / "tensorboard"))
    events.Reload()
    for name in ("train/loss", "optim/lr", "val/loss"):
        found = [event.step for event in events.Scalars(name)]
        assert found == sorted(set(found)), (name, found)
    assert [event.step for event in events.Scalars("train/loss")][-4:] == [2, 3, 4, 5]


@pytest.mark.parametrize("name", ["été β 漢🙂", "it's [1], {a: 1}", "a/b/c", "-m", "null"])
def test_a_run_of_any_name_goes_on(
    tmp_path: Path, shards: list[str], capfd: pytest.CaptureFixture[str], name: str
) -> None:
    root = tmp_path / 'Läufe & "more", x'
    quoted = name.replace("'", "\\'")
    words = [*shards, *tiny.SHRINK, *WORDS, f"output_root='{root}'", f"run_id='{quoted}'"]
    assert main(["train", *words, "length.steps=2"]) == 0
    assert steps(root / name) == [2]
    assert main(["train", *words, "length.steps=4", "resume=auto"]) == 0
    assert steps(root / name) == [2, 4]
    capfd.readouterr()
    assert main(["inspect", f"run={root / name}"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "finished" in out
    assert main(["generate", f"run={root / name}", "device=cpu", "max_new_tokens=2"]) == 0


def test_lightnings_files_go_on_too(tmp_path: Path, shards: list[str]) -> None:
    from lit_pretrain.cli.train import save
    from lit_pretrain.instantiate.job import train

    folder = tmp_path / "stock"
    folder.mkdir()
    overrides = [*shards, *tiny.SHRINK, "validation.every_steps=2", "logger=none", "length.steps=4"]
    config = tiny.with_lightnings_files(tiny.composed(folder, overrides))
    save(config, folder / "resolved.yaml")
    train(config)
    longer = tiny.with_lightnings_files(tiny.composed(tmp_path / "longer", [*overrides, "length.steps=6"]))
    longer["run"]["checkpoint"] = str(folder / "checkpoints" / "step-00000004.ckpt")
    assert train(longer)["steps"] == 6
