"""What a run leaves in its folder, and what generate makes of it; in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml

from lit_pretrain.cli import main
from lit_pretrain.cli.saved import find_checkpoint, read_checkpoint
from lit_pretrain.cli.train import _metric, save
from lit_pretrain.distributed.checkpoint import verify
from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate import build, checkpoints
from lit_pretrain.instantiate.job import summary, train
from lit_pretrain.instantiate.run import build_run
from tests.conf import tiny


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, shards: list[str]) -> Path:
    """A finished run: 5 updates of 2 microbatches, validated every 2 updates."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    folder.mkdir()
    overrides = [*shards, *tiny.SHRINK, "length.steps=5", "validation.every_steps=2", "trainer.log_every_n_steps=1"]
    config = tiny.composed(folder, overrides)
    save(config, folder / "resolved.yaml")
    train(config)
    return folder


@pytest.fixture(scope="module")
def stock_dir(tmp_path_factory: pytest.TempPathFactory, shards: list[str]) -> Path:
    """A run of the same length that saved as Lightning alone does."""
    folder = tmp_path_factory.mktemp("runs") / "stock"
    folder.mkdir()
    overrides = [*shards, *tiny.SHRINK, "length.steps=5", "validation.every_steps=2"]
    config = tiny.with_lightnings_files(tiny.composed(folder, overrides))
    save(config, folder / "resolved.yaml")
    train(config)
    return folder


def read(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    config = yaml.safe_load((run_dir / "resolved.yaml").read_text())
    return config, json.loads((run_dir / "result.json").read_text())


def test_the_folder_holds_what_a_run_is(run_dir: Path) -> None:
    files = sorted(str(p.relative_to(run_dir)) for p in run_dir.rglob("*") if p.is_file())
    events = [f for f in files if "tfevents" in f]
    assert len(events) == 1
    saved = [f for f in files if f.startswith("checkpoints/")]
    assert {f.split("/")[1] for f in saved} == {"step-00000004", "step-00000005"}
    assert [f for f in files if f not in [*events, *saved]] == [
        "resolved.yaml",
        "result.json",
        "tensorboard/hparams.yaml",
        "tokenizer.json",
    ]
    assert Path(events[0]).parent == Path("tensorboard")
    assert not any("=" in f for f in files)


def test_the_result_counts_updates_and_tokens(run_dir: Path) -> None:
    _, result = read(run_dir)
    # 5 updates x 4 sequences x 16 tokens
    assert (result["steps"], result["tokens"]) == (5, 320)
    assert result["checkpoint"] == str(run_dir / "checkpoints" / "step-00000005")
    assert {"val/loss", "val/perplexity", "val/bits_per_byte", "train/loss"} <= set(result["metrics"])


def test_the_final_validation_is_of_the_final_weights(run_dir: Path) -> None:
    """Step 5 is no multiple of 2: without a last validation the result would be that of step 4."""
    config, result = read(run_dir)
    for name, same in (("step-00000005", True), ("step-00000004", False)):
        module = build(config["module"], "module")
        datamodule = build(config["data"], "data")
        module.load_state_dict(read_checkpoint(run_dir / "checkpoints" / name)["state_dict"])
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, barebones=False)
        (metrics,) = trainer.validate(module, datamodule=datamodule, verbose=False)
        assert (abs(metrics["val/loss"] - result["metrics"]["val/loss"]) < 1e-6) is same


def test_curves_reach_tensorboard(run_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    scalars = events.Tags()["scalars"]
    assert {"train/loss", "val/loss", "val/bits_per_byte", "train/grad_norm", "optim/lr"} <= set(scalars)
    # Validated after updates 2 and 4, and at the end; x is updates, not microbatches.
    assert len(events.Scalars("val/loss")) == 3
    assert events.Scalars("val/loss")[-1].step <= 5
    _, result = read(run_dir)
    assert events.Scalars("val/loss")[-1].value == pytest.approx(result["metrics"]["val/loss"], rel=1e-6)


def test_a_length_in_epochs(tmp_path: Path, shards: list[str]) -> None:
    overrides = [*shards, *tiny.SHRINK, "length.steps=null", "length.epochs=1", "callbacks=none", "logger=none"]
    config = tiny.composed(tmp_path, [*overrides, "batch.global_batch_size=32", "batch.micro_batch_size=32"])
    run = build_run(config)
    run.datamodule.setup("fit")
    expected = run.datamodule.updates_per_epoch  # type: ignore[attr-defined]
    assert expected > 1
    result = train(config)
    assert result["steps"] == expected
    assert "val/loss" in result["metrics"]
    assert result["checkpoint"] is None


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["+trainer.logger=true"], "trainer.logger and logger decide the same thing"),
        (["+trainer.callbacks=[x]"], "trainer.callbacks and callbacks.NAME decide the same thing"),
        (["+trainer.gradient_clip_val=1.0"], "gradient_clip_val"),
        (["+callbacks.mine={_target_: torch.nn.Identity}"], "Identity is not a Lightning Callback"),
        (["callbacks.clipping=5"], "callbacks.clipping has no _target_ (it is 5)"),
        (["optimizer.lr=fast"], "optimizer.lr='fast' must be a number."),
        (["+optimizer.momentum=1"], "optimizer.momentum is not a setting of lit_pretrain.optim.adamw"),
        (["optimizer.betas=[0.9]"], "optimizer.betas=[0.9] must be two numbers"),
        (["trainer.precision=half"], "trainer.precision='half' must be one of"),
        (["callbacks.clipping.max_norm=-1"], "callbacks.clipping.max_norm=-1 must be above 0"),
        (["module._target_=builtins.dict"], "module._target_=builtins.dict makes no LightningModule;"),
        (["+callbacks.x={_target_: lit_pretrain.callbacks.RunCheckpoint}"], "trainer: Found more than one"),
        (["trainer.accelerator=tpu"], "trainer: Requirement"),
        (["+data.weights=5"], "data.weights=5 must be"),
        (["model.vocab_size=300"], "model.vocab_size=300 is smaller than the data's vocabulary of 320"),
    ],
)  # fmt: skip
def test_refused_before_the_first_step(tmp_path: Path, shards: list[str], overrides: list[str], sentence: str) -> None:
    config = tiny.composed(tmp_path, [*shards, *tiny.SHRINK, *overrides])
    save(config, tmp_path / "resolved.yaml")
    with pytest.raises(ValueError, match="") as e:
        train(config)
    assert sentence in str(e.value)
    assert type(e.value).__name__ in ("ConfigError", "DataError")
    assert "\n" not in str(e.value)
    assert not (tmp_path / "checkpoints").exists()


# generate


def text(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["generate", *words, "device=cpu"]) == 0
    return capfd.readouterr().out


def test_generate_continues_a_prompt(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [f"run={run_dir}", "max_new_tokens=12", "seed=3", "prompt=abc, def"]
    first = text(capfd, *words)
    assert first.startswith("abc, def")
    assert len(first) > len("abc, def\n")
    assert text(capfd, *words) == first
    assert text(capfd, *words[:2], "seed=4", words[3]) != first
    greedy = text(capfd, *words, "temperature=0")
    assert text(capfd, *words[:2], "seed=4", words[3], "temperature=0") == greedy
    assert text(capfd, *words, "top_k=1") == greedy


def test_generate_uses_the_checkpoint_it_is_told(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert find_checkpoint(run_dir, "newest").name == "step-00000005"
    assert find_checkpoint(run_dir, "step-00000004").name == "step-00000004"
    words = [f"run={run_dir}", "max_new_tokens=3", "seed=3", "prompt=a"]
    assert text(capfd, *words, "checkpoint=step-00000004").startswith("a")


def test_generate_reads_lightnings_files_too(stock_dir: Path, run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Both runs made the same updates, so the text is the same."""
    assert find_checkpoint(stock_dir, "newest").name == "last.ckpt"
    words = ["max_new_tokens=8", "seed=3", "prompt=a"]
    assert text(capfd, f"run={stock_dir}", *words) == text(capfd, f"run={run_dir}", *words)
    four = [
        text(capfd, f"run={d}", *words, f"checkpoint={name}")
        for d, name in ((stock_dir, "step-00000004.ckpt"), (run_dir, "step-00000004"))
    ]
    assert four[0] == four[1]


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(run_dir, tmp_path / "hurt"))
    for part in (folder / "checkpoints" / "step-00000005" / "tensors").glob("*.distcp"):
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    words = ["max_new_tokens=8", "seed=3", "prompt=a"]
    assert main(["generate", f"run={folder}", *words, "device=cpu"]) == 0
    out, err = capfd.readouterr()
    assert out == text(capfd, f"run={run_dir}", *words, "checkpoint=step-00000004")
    assert "step-00000005 was passed over" in err


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", "half", "other model"])
def test_a_damaged_checkpoint_is_one_sentence(
    stock_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: bytes | str
) -> None:
    path, run_dir = tmp_path / "bad.ckpt", stock_dir
    whole = (run_dir / "checkpoints" / "last.ckpt").read_bytes()
    if damage == "other model":
        torch.save({"state_dict": {"model.wte.weight": torch.zeros(2, 2)}}, path)
    else:
        path.write_bytes(damage if isinstance(damage, bytes) else whole[: len(whole) // 2])
    code = main(["generate", f"run={run_dir}", f"checkpoint={path}", "device=cpu"])
    out, err = capfd.readouterr()
    assert (code, out) == (1, "")
    assert err.startswith(f"lit-pretrain: {path} ")
    assert "Traceback" not in err


def test_a_pickle_in_a_checkpoint_does_not_run(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"state_dict": Evil()}, tmp_path / "evil.ckpt")
    assert main(["generate", f"run={run_dir}", f"checkpoint={tmp_path / 'evil.ckpt'}", "device=cpu"]) == 1
    assert "cannot be read as a checkpoint" in capfd.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("max_new_tokens=-1", "max_new_tokens=-1 must be"),
        ("temperature=-1", "temperature=-1"),
        ("top_p=2", "top_p=2"),
        ("top_k=0", "top_k=0"),
        ("device=abacus", "device=abacus cannot be used here"),
    ],
)
def test_impossible_sampling(run_dir: Path, capfd: pytest.CaptureFixture[str], setting: str, sentence: str) -> None:
    code = main(["generate", f"run={run_dir}", "device=cpu", setting])
    out, err = capfd.readouterr()
    assert (code, out) == (1, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_several_prompts_are_a_batch(run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Row i of a batch draws with seed + i: each continuation is that of its prompt alone."""
    words = [f"run={run_dir}", "max_new_tokens=6"]
    alone = [text(capfd, *words, f"prompt={prompt}", f"seed={seed}") for prompt, seed in (("abc", 3), ("d", 4))]
    (tmp_path / "prompts.txt").write_text("abc\n\nd\n")
    expected = f"--- 1 of 2\n{alone[0]}--- 2 of 2\n{alone[1]}"
    assert text(capfd, *words, "seed=3", "prompts=[abc,d]") == expected
    assert text(capfd, *words, "seed=3", f"prompt_file={tmp_path / 'prompts.txt'}") == expected
    rows = json.loads(text(capfd, *words, "seed=3", "prompts=[abc,d]", "format=json"))
    assert [row["prompt"] + row["continuation"] + "\n" for row in rows] == alone
    (row,) = json.loads(text(capfd, *words, "seed=3", "prompt=abc", "format=json"))
    assert row["prompt"] + row["continuation"] + "\n" == alone[0]


def test_an_unfinished_run_has_the_tokenizer_of_its_data(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(run_dir, tmp_path / "killed"))
    (folder / "tokenizer.json").unlink()
    words = ["max_new_tokens=6", "seed=3", "prompt=abc"]
    assert text(capfd, f"run={folder}", *words) == text(capfd, f"run={run_dir}", *words)
    config = yaml.safe_load((folder / "resolved.yaml").read_text())
    config["data"]["corpus"]["sources"] = {"a": str(tmp_path / "gone")}
    save(config, folder / "resolved.yaml")
    assert main(["generate", f"run={folder}", "device=cpu"]) == 1
    assert "there is no tokenizer at" in capfd.readouterr().err


class StoppedError(Exception):
    pass


def test_the_tokenizer_is_in_the_folder_before_the_first_step(
    tmp_path: Path, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise StoppedError

    monkeypatch.setattr("lit_pretrain.module.GPTModule.training_step", stop)
    config = tiny.composed(tmp_path / "run", [*shards, *tiny.SHRINK, "callbacks=none", "logger=none"])
    with pytest.raises(StoppedError):
        train(config)
    original = Path(config["data"]["corpus"]["tokenizer"])
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == original.read_bytes()


def test_text_ends_at_the_token_that_ends_documents_in_the_data(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same run, whose tokenizer spells its end-of-document token otherwise."""
    folder = Path(shutil.copytree(run_dir, tmp_path / "other"))
    written = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(written.replace("<|endoftext|>", "</s>"))
    words = ["max_new_tokens=6", "seed=3", "prompt=abc"]
    assert main(["generate", f"run={folder}", *words, "device=cpu"]) == 1
    assert "has no token '<|endoftext|>'" in capfd.readouterr().err
    expected = text(capfd, f"run={run_dir}", *words)
    assert text(capfd, f"run={folder}", *words, "eos_token=</s>") == expected
    config = yaml.safe_load((folder / "resolved.yaml").read_text())
    config["data"]["corpus"]["eos_token"] = "</s>"
    save(config, folder / "resolved.yaml")
    assert text(capfd, f"run={folder}", *words) == expected
    other = tmp_path / "text.txt"
    other.write_text("abc def abc")
    assert main(["evaluate", f"run={folder}", f"text={other}", "device=cpu"]) == 0


@pytest.mark.parametrize("fast", [2, None])
def test_the_summary_names_curves_that_exist(fast: int | None) -> None:
    config = {"run": {"dir": "x"}, "trainer": {"fast_dev_run": fast}, "logger": {"_target_": "l.TensorBoardLogger"}}
    result = {"metrics": {}, "steps": 2, "tokens": 4, "seconds": 1.0, "checkpoint": None}
    assert ("tensorboard --logdir x" in summary(config, result)) is (fast is None)


def test_top_p_narrows_the_choice(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [f"run={run_dir}", "max_new_tokens=12", "seed=3", "prompt=abc"]
    assert text(capfd, *words, "top_p=1e-6") == text(capfd, *words, "temperature=0")
    assert text(capfd, *words, "top_p=1.0", "temperature=1.5") != text(capfd, *words, "temperature=0")


def test_the_best_checkpoint_is_by_the_watched_metric(
    run_dir: Path, stock_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(["generate", f"run={run_dir}", "device=cpu", "checkpoint=best"])
    assert (code, capfd.readouterr().err.count("\n")) == (1, 1)
    folder = tmp_path / "moved" / "checkpoints"
    shutil.copytree(stock_dir / "checkpoints", folder)
    content = torch.load(folder / "last.ckpt", weights_only=True)
    state = {"monitor": "val/loss", "best_model_path": "/elsewhere/checkpoints/good.ckpt"}
    torch.save({**content, "callbacks": {"ModelCheckpoint{'monitor': 'val/loss'}": state}}, folder / "last.ckpt")
    with pytest.raises(ValueError, match=r"checkpoint=best was .*good.ckpt, which is gone"):
        find_checkpoint(folder.parent, "best")
    (folder / "good.ckpt").touch()
    assert find_checkpoint(folder.parent, "best") == folder / "good.ckpt"


def test_the_best_of_our_own_checkpoints(tmp_path: Path, shards: list[str]) -> None:
    """Such a large rate that every update after the second makes it worse."""
    overrides = [*shards, *tiny.SHRINK, "length.steps=6", "validation.every_steps=2", "logger=none"]
    config = tiny.composed(tmp_path, [*overrides, "callbacks.checkpoint.monitor=val/loss", "schedule=constant"])
    config["optimizer"]["lr"] = 0.3
    train(config)
    found = {one.path.name: one.step for one in checkpoints.listed(tmp_path / "checkpoints")}
    best = find_checkpoint(tmp_path, "best")
    assert best.name in found
    losses = {name: verify(tmp_path / "checkpoints" / name).monitors["val/loss"] for name in found}
    assert min(losses, key=lambda name: losses[name]) == best.name


@pytest.mark.parametrize("metrics", [{}, {"val/loss": None}, {"val/loss": 2.5}])
def test_a_run_without_a_validation_loss_is_a_good_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metrics: dict[str, float | None]
) -> None:
    # None: a loss that is not finite. Without held-out text there is no such figure at all.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_pretrain.cli.train._run", lambda *_, **__: {"metrics": metrics})
    assert main(["train", "length.steps=1"]) == 0
    assert main(["train", "-m", "length.steps=1,2"]) == 0


def test_only_an_optimising_sweeper_needs_its_metric() -> None:
    with pytest.raises(ConfigError, match="optimized_metric=val/loss was not logged by the run; known: train/loss"):
        _metric("val/loss", {"train/loss": 1.0}, needed=True)
    assert _metric("val/loss", {"val/loss": 2.5}, needed=True) == 2.5
