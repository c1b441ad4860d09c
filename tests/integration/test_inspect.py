"""What inspect says of whole, failed, half-written and damaged run folders."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_pretrain.cli import failures, main, report
from lit_pretrain.cli.runstate import living_ranks, read_state
from lit_pretrain.cli.train import save
from lit_pretrain.errors import ConfigError, RankError
from lit_pretrain.instantiate.checkpoints import look
from lit_pretrain.instantiate.job import train
from tests.conf import tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5 updates of 4 x 16 tokens, checkpoints after 4 and 5: Lightning's files."""
    shards = tiny.write_corpus(tmp_path_factory.mktemp("corpus"))
    folder = tmp_path_factory.mktemp("runs") / "one"
    folder.mkdir()
    overrides = [*shards, *tiny.SHRINK, "length.steps=5", "validation.every_steps=2", "trainer.log_every_n_steps=1"]
    config = tiny.with_lightnings_files(tiny.composed(folder, overrides))
    save(config, folder / "resolved.yaml")
    train(config)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text("- experiment=demo\n- 'data.corpus.sources={a: b c}'\n")
    return folder


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def unfinished(run_dir: Path) -> Path:
    """As a run that recorded no end."""
    (run_dir / "result.json").unlink()
    (run_dir / "checkpoints" / "last.ckpt").unlink()
    return run_dir


def inspected(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    capfd.readouterr()  # a training before
    code = main(["inspect", *words])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    return out


def row(out: str, name: str) -> str:
    (line,) = [line for line in out.splitlines() if line.startswith(f"  {name} ")]
    return line[2 + len(name) :].strip()


def test_a_finished_run(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = json.loads((finished / "result.json").read_text())
    out = inspected(capfd, str(finished))
    assert out.startswith(f"{finished}\n")
    assert row(out, "state").startswith("finished ")
    assert row(out, "reached") == "5 of 5 updates, 320 tokens"
    assert row(out, "command") == "lit-pretrain train experiment=demo 'data.corpus.sources={a: b c}'"
    assert row(out, "model").startswith("8.69K parameters: 1 layers, width 16, 2 heads, context 16, vocabulary 320")
    assert row(out, "data") == "ShardFolders: a, b"
    assert row(out, "length") == "5 updates, 320 tokens"
    assert row(out, "ranks") == "1, strategy auto, precision 32-true"
    for name, unit in (("val/loss", " nats per token"), ("val/bits_per_byte", "")):
        assert row(out, name) == f"{result['metrics'][name]:.4f}{unit}"
    table = out[out.index("checkpoints ") :].split("\n\n")[0].splitlines()
    assert [line.split() for line in table[1:]] == [
        ["step-00000004.ckpt", "4", *table[1].split()[2:4], "looks", "whole"],
        ["last.ckpt", "5", *table[2].split()[2:4], "looks", "whole"],
    ]
    assert row(out, "curves") == f"tensorboard --logdir {finished}"
    assert row(out, "text") == f'lit-pretrain generate run={finished} prompt="..."'
    assert row(out, "score") == f"lit-pretrain evaluate run={finished}"
    assert "again" not in out
    again = inspected(capfd, f"run={finished}")
    assert again.splitlines()[2:] == out.splitlines()[2:]  # but for how long ago it was


def test_for_machines(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = json.loads(inspected(capfd, str(finished), "format=json"), parse_constant=lambda name: pytest.fail(name))
    assert (found["state"], found["updates"]) == ("finished", 5)
    assert [c["updates"] for c in found["checkpoints"]] == [4, 5]
    assert found["metrics"] == pytest.approx(json.loads((finished / "result.json").read_text())["metrics"])


def raised(error: BaseException) -> BaseException:
    """The error with a traceback, as a rank would catch it."""
    try:
        raise error
    except BaseException as e:
        return e


def test_a_rank_that_failed(unfinished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    failures.write(unfinished, 1, raised(RuntimeError("Connection reset by peer")))
    failures.write(unfinished, 0, raised(ValueError("the cause\nin two lines")))
    out = inspected(capfd, str(unfinished))
    assert row(out, "state").startswith("rank 0 failed ")
    assert row(out, "state").endswith("in two lines")
    # The failed run's last curves and checkpoint stand in for a result.
    assert row(out, "reached") == "5 of 5 updates, 320 tokens"
    assert "  step-00000004.ckpt" in out
    assert row(out, "go on").startswith("lit-pretrain train experiment=demo")
    assert row(out, "go on").endswith(f" run_id={unfinished.name} resume=auto")


def test_a_command_that_failed(unfinished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report.write(unfinished, [], ConfigError("optimizer.lr=-1 must be positive."))
    state = row(inspected(capfd, str(unfinished)), "state")
    assert state.startswith("failed ")
    assert state.endswith(": optimizer.lr=-1 must be positive.")
    report.write(unfinished, [], RankError("rank 0 of 2 failed:\nTraceback ...\nZeroDivisionError: division by zero"))
    assert row(inspected(capfd, str(unfinished)), "state").endswith("ZeroDivisionError: division by zero")


def test_a_run_that_finished_and_then_failed(run_dir: Path) -> None:
    report.write(run_dir, [], ConfigError("optimized_metric=x was not logged by the run."))
    state = read_state(run_dir)
    assert state.kind == "failed"
    assert "then it failed: optimized_metric=x was not logged" in state.sentence


@pytest.mark.parametrize(
    ("error", "sentence"),
    [(KeyboardInterrupt(), "interrupted by Ctrl-C"), (RuntimeError("SIGTERMException"), "stopped by SIGTERM")],
)
def test_an_interrupted_run(unfinished: Path, error: BaseException, sentence: str) -> None:
    failures.write(unfinished, 0, raised(error))
    state = read_state(unfinished)
    assert state.kind == "interrupted"
    assert state.sentence.startswith(sentence)


def test_a_run_without_an_end(unfinished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = inspected(capfd, str(unfinished))
    assert row(out, "state").startswith("no end is recorded: it was killed, or runs on another machine")
    assert {"train/loss", "val/loss"} <= set(read_state(unfinished).metrics)


def test_a_living_run(unfinished: Path, tmp_path: Path) -> None:
    (tmp_path / "proc" / "12").mkdir(parents=True)
    words = ["python", "-m", "lit_pretrain.cli.worker", str(unfinished), ""]
    (tmp_path / "proc" / "12" / "cmdline").write_bytes("\0".join(words).encode())
    assert living_ranks(unfinished, tmp_path / "proc") == 1
    assert living_ranks(tmp_path / "other", tmp_path / "proc") == 0
    code = "import sys, time; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, *words[2:4]], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            if Path("/proc").is_dir():
                assert read_state(unfinished).kind == "running"
        finally:
            process.kill()


def test_torn_and_foreign_checkpoints(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    last = run_dir / "checkpoints" / "last.ckpt"
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    os.utime(last)
    (run_dir / "checkpoints" / "empty.ckpt").touch()
    with zipfile.ZipFile(run_dir / "checkpoints" / "zip.ckpt", "w") as archive:
        archive.writestr("a.txt", "a")
    out = inspected(capfd, str(run_dir))
    lines = {line.split()[0]: line for line in out.splitlines() if ".ckpt " in line and line.startswith("  ")}
    assert lines["last.ckpt"].endswith("torn, or no checkpoint")
    assert lines["empty.ckpt"].endswith("torn, or no checkpoint")
    assert lines["zip.ckpt"].endswith("no checkpoint of torch: it has no data.pkl")
    assert lines["step-00000004.ckpt"].endswith("looks whole")
    assert row(out, "text").startswith(f"lit-pretrain generate run={run_dir} prompt=")


def test_verify_reads_everything(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = run_dir / "checkpoints"
    content = torch.load(folder / "last.ckpt", weights_only=True)
    content["state_dict"]["model.norm.weight"][0] = float("inf")
    torch.save(content, folder / "inf.ckpt")
    torch.save({"global_step": 3, "state_dict": {}}, folder / "none.ckpt")

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (run_dir / "ran",))

    torch.save({"global_step": 7, "state_dict": Evil()}, folder / "evil.ckpt")
    quick = inspected(capfd, str(run_dir))
    assert quick.count("looks whole") == 5
    assert [line.split()[1] for line in quick.splitlines() if line.startswith("  evil.ckpt")] == ["7"]
    out = inspected(capfd, str(run_dir), "verify=true")
    assert out.count(" whole\n") == 2
    assert "model.norm.weight holds values that are not finite" in out
    assert "it holds no weights" in out
    assert "cannot be read as a checkpoint" in out
    assert not (run_dir / "ran").exists()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with checkpoint folders."""
    shards = tiny.write_corpus(tmp_path_factory.mktemp("corpus"))
    folder = tmp_path_factory.mktemp("runs") / "ours"
    folder.mkdir()
    config = tiny.composed(folder, [*shards, *tiny.SHRINK, "length.steps=5", "validation.every_steps=2"])
    save(config, folder / "resolved.yaml")
    train(config)
    return folder


def test_checkpoint_folders(folders: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = Path(shutil.copytree(folders, tmp_path / "run"))
    saved = run_dir / "checkpoints"
    (saved / ".step-9.1-a.tmp").mkdir()  # of a save that was killed
    out = inspected(capfd, str(run_dir))
    table = out[out.index("checkpoints ") :].split("\n\n")[0].splitlines()
    assert [[*line.split()[:2], *line.split()[4:]] for line in table[1:]] == [
        ["step-00000004", "4", "interval", "looks", "whole"],
        ["step-00000005", "5", "end", "looks", "whole"],
    ]
    assert inspected(capfd, str(run_dir), "verify=true").count(" whole\n") == 2
    (part,) = (saved / "step-00000005" / "tensors").glob("*.distcp")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert inspected(capfd, str(run_dir)).count("looks whole") == 2  # sizes only
    out = inspected(capfd, str(run_dir), "verify=true")
    assert out.count(" whole\n") == 1
    assert "is damaged (checksum)" in out
    (saved / "step-00000004" / "COMPLETE").unlink()
    assert "step-00000004 has no COMPLETE file" in inspected(capfd, str(run_dir))


def test_a_preempted_run(folders: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = Path(shutil.copytree(folders, tmp_path / "outputs" / "one"))
    result = json.loads((run_dir / "result.json").read_text())
    (run_dir / "result.json").write_text(json.dumps({**result, "ended": "preempted", "steps": 4}))
    config = yaml.safe_load((run_dir / "resolved.yaml").read_text())
    save({**config, "output_root": str(tmp_path / "outputs")}, run_dir / "resolved.yaml")
    (run_dir / ".hydra").mkdir()
    (run_dir / ".hydra" / "overrides.yaml").write_text("- experiment=demo\n- run_id=one\n- resume=auto\n")
    out = inspected(capfd, str(run_dir))
    assert row(out, "state").startswith("preempted at update 4 ")
    assert row(out, "go on") == "lit-pretrain train experiment=demo run_id=one resume=auto"
    assert json.loads(inspected(capfd, str(run_dir), "format=json"))["state"] == "preempted"


def test_the_step_is_read_without_unpickling(tmp_path: Path) -> None:
    for step in (3, 300, 70_000, 2**40):
        path = tmp_path / f"{step}.ckpt"
        torch.save({"epoch": 9, "global_step": step, "state_dict": {}}, path)
        assert look(path).step == step
    with zipfile.ZipFile(tmp_path / "odd.ckpt", "w") as archive:
        archive.writestr("odd/data.pkl", b"no pickle")
    assert look(tmp_path / "odd.ckpt").step is None
    with zipfile.ZipFile(tmp_path / "none.ckpt", "w") as archive:
        archive.writestr("none/data.pkl", pickle.dumps({"a": "global_step"}))
    assert look(tmp_path / "none.ckpt").step is None


DAMAGES = {
    "resolved.yaml": (b"a: [", "resolved.yaml is damaged"),
    "result.json": (b'{"steps": ', "result.json cannot be read"),
    "failure.json": (b"[]", "failure.json holds no mapping"),
    "errors/rank0.json": (b"\xff", "rank0.json cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named_and_the_rest_is_shown(
    run_dir: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    content, sentence = DAMAGES[name]
    (run_dir / name).parent.mkdir(exist_ok=True)
    (run_dir / name).write_bytes(content)
    out = inspected(capfd, str(run_dir))
    assert sentence in row(out, "damaged")
    assert out.count("looks whole") == 2
    assert row(out, "reached").startswith("5 ")


@pytest.mark.parametrize(
    "name", ["resolved.yaml", "result.json", "checkpoints", "tensorboard", ".hydra", "tokenizer.json"]
)
def test_a_missing_part_stops_nothing(run_dir: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    path = run_dir / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    out = inspected(capfd, str(run_dir))
    assert row(out, "reached").startswith("5 ")
    assert "Traceback" not in out


def test_a_run_that_had_just_begun(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "resolved.yaml").write_text("module: {}\n")
    out = inspected(capfd, str(tmp_path))
    assert row(out, "reached") == "no update that left a trace"
    assert f"none in {tmp_path}/checkpoints" in out
    assert "nothing: neither curves nor a checkpoint that can be read" in out


@pytest.fixture
def swept(run_dir: Path) -> Path:
    """A folder with a run and a sweep: two jobs ended, one was refused."""
    folder = run_dir.parent / "outputs" / "s"
    for job, (rate, loss) in {"0": ("1e-3", 5.5), "1": ("3e-3", 5.25)}.items():
        shutil.copytree(run_dir, folder / job)
        words = ["experiment=demo", f"optimizer.lr={rate}", "seed=1"]
        (folder / job / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(words))
        result = json.loads((folder / job / "result.json").read_text())
        result["metrics"] |= {"val/loss": loss, "val/bits_per_byte": 2.5}
        (folder / job / "result.json").write_text(json.dumps(result))
    report.write(folder / "10", ["experiment=demo", "optimizer.lr=-1", "seed=1"], ConfigError("no."))
    shutil.copytree(run_dir, folder.parent / "alone")
    return folder


def test_a_sweep_is_a_table_of_its_jobs(
    swept: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(swept.parent.parent)
    lines = inspected(capfd, "outputs/s").splitlines()
    assert lines[0].split() == ["job", "optimizer.lr", "val/loss", "bits/byte", "updates", "state", "folder"]
    assert [line.split() for line in lines[1:4]] == [
        ["0", "1e-3", "5.5000", "2.5000", "5", "finished", "outputs/s/0"],
        ["1", "3e-3", "5.2500", "2.5000", "5", "finished", "outputs/s/1"],
        ["10", "-1", "-", "-", "-", "failed", "outputs/s/10"],
    ]
    assert lines[4:] == ["", "least val/loss: job 1 (optimizer.lr=3e-3)"]
    found = json.loads(inspected(capfd, "outputs/s", "format=json"))
    assert [run["state"] for run in found["runs"].values()] == ["finished", "finished", "failed"]
    assert [run["swept"] for run in found["runs"].values()] == [{"optimizer.lr": r} for r in ("1e-3", "3e-3", "-1")]


def test_a_folder_of_runs_lists_its_sweeps(
    swept: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(swept.parent.parent)
    lines = inspected(capfd, "outputs").splitlines()
    assert lines[0] == "outputs holds 1 run and 1 sweep; inspect one with lit-pretrain inspect outputs/s"
    assert lines[3].split()[:3] == ["alone", "finished", "5"]
    assert lines[5].split() == ["sweep", "jobs", "finished", "least", "val/loss", "swept"]
    assert lines[6].split() == ["s", "3", "2", "5.2500", "optimizer.lr=1e-3,3e-3,-1"]
    found = json.loads(inspected(capfd, "outputs", "format=json"))
    assert list(found["runs"]) == ["alone"]
    assert list(found["sweeps"]["s"]) == ["0", "1", "10"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "run must be given: run=..."),
        (["nowhere"], "run=nowhere does not exist; name the folder of a run"),
        (["."], "run=. is not a run folder (no resolved.yaml); name the folder that a training run printed."),
        (["run=.", "verify=maybe"], "verify=maybe must be true or false."),
        (["run=.", "format=xml"], "format=xml is unknown; use text or json."),
        (["run=.", "verfy=true"], "verfy is not a setting of inspect; did you mean 'verify'?"),
    ],
)
def test_refused_in_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["inspect", *words])
    out, err = capfd.readouterr()
    assert (code, out) == (1, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_no_torch_unless_it_verifies(unfinished: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from lit_pretrain.cli import main\n"
        f"assert main(['inspect', {str(unfinished)!r}]) == 0\n"
        "loaded = {'torch', 'lightning', 'torchmetrics', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tmp_path)
