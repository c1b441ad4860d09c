"""A folder gives back what was written, and nothing that was changed since."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lit_pretrain.distributed.checkpoint import (
    CheckpointError,
    files,
    load_tensors,
    manifest,
    read_checkpoint,
    read_rng,
    read_tree,
    tensors,
    verify,
)
from lit_pretrain.distributed.checkpoint._compat import load_metadata
from tests.unit.distributed.checkpoint.states import bits, state, write

KINDS = (
    "manifest.json", "trainer.json", "COMPLETE", "rng/rank-00000.json", "tensors/.metadata", "tensors/__0_0.distcp",
)  # fmt: skip


def test_everything_comes_back_bit_for_bit(tmp_path):
    tree = {"epoch": 1, "callbacks": {"stop": {"best": torch.tensor(math.nan), "n": (1, 2)}}, 3: [torch.arange(4)]}
    rng = [{"torch": torch.get_rng_state(), "python": (3, (1, 2), None)}, {"torch": torch.get_rng_state() + 0}]
    written = write(tmp_path / "step-250", tree=tree, rng=rng)
    read, named = read_checkpoint(tmp_path / "step-250")
    assert {name: bits(tensor) for name, tensor in named.items()} == {k: bits(v) for k, v in state().items()}
    assert read["callbacks"]["stop"]["n"] == (1, 2)
    assert math.isnan(read["callbacks"]["stop"]["best"])
    assert torch.equal(read[3][0], torch.arange(4))
    assert bits(read_tree(tmp_path / "step-250")[3][0]) == bits(torch.arange(4))
    states = read_rng(tmp_path / "step-250")
    assert torch.equal(states[0]["torch"], rng[0]["torch"])
    assert states[0]["python"] == (3, (1, 2), None)
    assert len(states) == 2
    facts = verify(tmp_path / "step-250")
    assert facts == written
    assert (facts.global_step, facts.microbatches_read, facts.updates_read, facts.reason) == (250, 1000, 250, "best")
    assert facts.monitors == {"val/loss": 2.5, "x": math.inf}
    assert facts.versions["torch"] == torch.__version__
    assert [p.name for p in tmp_path.iterdir()] == ["step-250"]


def test_a_tied_tensor_is_written_once_and_comes_back_tied(tmp_path):
    write(tmp_path / "c")
    write(tmp_path / "untied", tensors={name: tensor.clone() for name, tensor in state().items()})
    stored = [sum(p.stat().st_size for p in (tmp_path / name / "tensors").glob("*.distcp")) for name in ("c", "untied")]
    assert stored[1] - stored[0] >= 64 * 32 * 4
    _, named = read_checkpoint(tmp_path / "c")
    assert named["model.head.weight"].data_ptr() == named["model.wte.weight"].data_ptr()


def test_tensors_of_several_files_and_only_those_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "FILE_BYTES", 4096)
    many = {f"model.{i}": torch.full((300,), float(i)) for i in range(12)} | {"optimizer.0.m.a": torch.ones(2000)}
    write(tmp_path / "c", tensors=many)
    assert len(list((tmp_path / "c/tensors").glob("*.distcp"))) >= 4
    _, named = read_checkpoint(tmp_path / "c", keys=lambda name: name.startswith("model."))
    assert {k: bits(v) for k, v in named.items()} == {k: bits(v) for k, v in many.items() if k.startswith("model.")}
    (tmp_path / "c/tensors/__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        read_checkpoint(tmp_path / "c", keys=lambda name: name.startswith("optimizer."))


def test_stock_torch_reads_the_tensors(tmp_path):
    write(tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c/tensors", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    wanted = state()
    del wanted["model.head.weight"]  # an alias, kept in trainer.json
    assert {name: bits(tensor) for name, tensor in found.items()} == {k: bits(v) for k, v in wanted.items()}


def test_given_tensors_are_filled_in_place(tmp_path):
    write(tmp_path / "c")
    targets = {name: torch.full_like(tensor, 5) for name, tensor in state().items() if "nan" not in name}
    load_tensors(tmp_path / "c", targets)
    assert {name: bits(t) for name, t in targets.items()} == {k: bits(v) for k, v in state().items() if "nan" not in k}
    with pytest.raises(CheckpointError, match=r"has no tensor model\.other"):
        load_tensors(tmp_path / "c", {"model.other": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"model\.half in shape \(7,\) and the model needs \(8,\)"):
        load_tensors(tmp_path / "c", {"model.half": torch.zeros(8)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, 0.5, 0.999])
def test_a_flipped_byte_is_found(tmp_path, kind, place):
    write(tmp_path / "c")
    path = tmp_path / "c" / kind
    content = bytearray(path.read_bytes())
    content[int(place * len(content)) if kind != "COMPLETE" else int(place * 70)] ^= 4
    path.write_bytes(content)
    for read in (verify, read_checkpoint):
        with pytest.raises(CheckpointError, match=r"earlier|newer|lit-pretrain") as caught:
            read(tmp_path / "c")
        assert str(tmp_path / "c") in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_or_missing_file_is_found(tmp_path, kind):
    write(tmp_path / "c")
    path = tmp_path / "c" / kind
    os.truncate(path, path.stat().st_size // 2)
    for read in (verify, read_checkpoint):
        with pytest.raises(CheckpointError, match=Path(kind).name.replace(".", r"\.")):
            read(tmp_path / "c")
    path.unlink()
    for read in (verify, read_checkpoint):
        with pytest.raises(CheckpointError, match=Path(kind).name.replace(".", r"\.")):
            read(tmp_path / "c")


def seal(folder: Path, change) -> None:
    """Change the manifest and make everything fit again, as somebody with intent would."""
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    data = json.dumps(content).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "COMPLETE").write_text(files.checksum(data))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(version=2), "format version 2 and this lit-pretrain reads version 1"),
        (lambda m: m.update(format="other"), "says format 'other'"),
        (lambda m: m.pop("files"), "is not a manifest"),
        (lambda m: m.update(global_step="x"), "is not a manifest"),
        (lambda m: m["files"].update({"../x": {"bytes": 1, "checksum": "crc32:0"}}), "outside the folder"),
        (lambda m: m["files"]["trainer.json"].update(checksum="md99:00"), "unknown checksum algorithm"),
        (lambda m: m["files"].pop("tensors/__0_0.distcp"), "not in the manifest"),
        (lambda m: m["files"].pop("trainer.json"), "not in the manifest"),
    ],
)
def test_a_manifest_that_fits_but_is_none_of_ours(tmp_path, change, said):
    write(tmp_path / "c")
    seal(tmp_path / "c", change)
    with pytest.raises(CheckpointError, match=said):
        read_checkpoint(tmp_path / "c")


class Runs:
    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


class Nested:
    """Hides the call inside what an index does need."""

    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return torch.Size, ((1, Runs(self.call)),)


@pytest.mark.parametrize(
    "payload",
    [
        lambda mark: Runs((os.system, (f"touch {mark}",))),
        lambda mark: Runs((eval, (f"open({str(mark)!r}, 'w')",))),
        lambda mark: {"state_dict_metadata": {}, "x": [Nested((eval, (f"open({str(mark)!r}, 'w')",)))]},
        lambda mark: Runs((getattr, (0, "real"))),
        lambda mark: Runs((torch.load, (str(mark),))),
        lambda mark: torch.Size([1]),
        lambda mark: {"no": "index"},
    ],
    ids=["system", "eval", "nested", "getattr", "torch.load", "size", "dict"],
)
def test_a_malicious_index_runs_nothing(tmp_path, payload):
    """Everything fits, checksums included: only the content is not what an index holds."""
    write(tmp_path / "c")
    mark = tmp_path / "mark"
    data = pickle.dumps(payload(mark))
    (tmp_path / "c/tensors/.metadata").write_bytes(data)
    entry = {"bytes": len(data), "checksum": files.checksum(data)}
    seal(tmp_path / "c", lambda m: m["files"].update({"tensors/.metadata": entry}))
    verify(tmp_path / "c")  # no byte differs from what was written down
    for read in (read_checkpoint, read_tree, lambda folder: load_tensors(folder, {"model.half": torch.zeros(7)})):
        with pytest.raises(CheckpointError, match=r"\.metadata is not trusted: .*nothing in it was run"):
            read(tmp_path / "c")
    assert not mark.exists()


def test_an_index_cannot_change_the_classes_it_names(tmp_path):
    """BUILD on a class sets its attributes: here __setstate__ of every later index, on a stand-in of this one only."""
    from torch.distributed.checkpoint import metadata

    before = dict(vars(metadata.Metadata))
    data = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}U\x07versionU\x03badsb."
    with pytest.raises(ValueError, match="malformed"):
        load_metadata(data)
    assert dict(vars(metadata.Metadata)) == before


def test_an_archive_of_something_else_is_refused(tmp_path, monkeypatch):
    """A tensor's place holds a pickle that wants to run: torch's own restricted reading says no."""
    write(tmp_path / "c", tensors={"model.a": torch.empty(0, 4)})  # read by torch.load, as its container is not known
    path = tmp_path / "c/tensors/__0_0.distcp"
    mark = tmp_path / "mark"
    saved = io.BytesIO()
    torch.save(Runs((os.system, (f"touch {mark}",))), saved)
    data = saved.getvalue()[: path.stat().st_size].ljust(path.stat().st_size, b"\0")
    path.write_bytes(data)
    checksum = files.checksum(data, algorithm="crc32")
    seal(tmp_path / "c", lambda m: m["files"]["tensors/__0_0.distcp"].update(checksum=checksum))
    with pytest.raises(CheckpointError, match="holds no tensor"):
        read_checkpoint(tmp_path / "c")
    assert not mark.exists()


class Full:
    """A file on a disk with so much room."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if self.room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = self.file.write(data[: self.room[0]])
        self.room[0] -= size
        return size

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 100, 5_000, 9_500, 15_500, 17_800])
def test_a_full_disk_leaves_everything_as_it_was(tmp_path, monkeypatch, room):
    write(tmp_path / "step-1", step=1)
    size = sum(p.stat().st_size for p in (tmp_path / "step-1").rglob("*") if p.is_file())
    assert size > 17_800, "the largest room must not be enough"
    left, opened = [room], files.open_new
    monkeypatch.setattr(files, "open_new", lambda path: Full(opened(path), left))
    for name in ("step-2", "step-1"):  # a new one, and one over the old one
        left[0] = room
        with pytest.raises(CheckpointError, match=r"could not be written \(No space left on device\); .* untouched"):
            write(tmp_path / name, step=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    assert verify(tmp_path / "step-1").global_step == 1


def test_a_limit_on_file_sizes_in_another_process(tmp_path):
    """The kernel's own refusal, in the middle of a file of tensors."""
    program = (
        "import resource, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from lit_pretrain.distributed.checkpoint import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    write_checkpoint(Path(sys.argv[1]), tensors={'a': torch.ones(1 << 19), 'b': torch.ones(1 << 10)},\n"
        "                     tree={}, facts=CheckpointFacts(global_step=1))\n"
        "except CheckpointError as e:\n"
        "    print(e)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "step-1")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "could not be written (File too large)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_a_second_thread_is_not_lost(tmp_path, monkeypatch):
    """Stock writing loses it, and ends with a torn file that nobody hears of."""
    monkeypatch.setattr(tensors, "FILE_BYTES", 1024)
    opened = files.open_new

    def broken(path):
        return Full(opened(path), [100]) if path.name == "__0_7.distcp" else opened(path)

    monkeypatch.setattr(files, "open_new", broken)
    with pytest.raises(CheckpointError, match="No space left"):
        write(tmp_path / "c", tensors={f"a{i}": torch.ones(256) for i in range(10)}, threads=3)


def test_a_folder_is_replaced_only_by_a_whole_one(tmp_path, monkeypatch):
    write(tmp_path / "last", step=1)
    write(tmp_path / "last", step=2)
    assert verify(tmp_path / "last").global_step == 2
    assert [p.name for p in tmp_path.iterdir()] == ["last"]
    renamed = Path.rename

    def dies(self, target):
        if self.name.endswith(".tmp"):
            raise KeyboardInterrupt
        return renamed(self, target)

    monkeypatch.setattr(Path, "rename", dies)
    monkeypatch.setattr(files, "remove_tree", lambda path: None)  # the process is dead
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "last", step=3)
    monkeypatch.undo()
    (aside,) = tmp_path.glob("last*")
    assert verify(aside).global_step == 2


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"\['a'\]\['1'\] is a object"):
        write(tmp_path / "c", tree={"a": [1, object()]})
    with pytest.raises(CheckpointError, match=r"must not begin with 'extra\.'"):
        write(tmp_path / "c", tree={"x": torch.ones(1)}, tensors={"extra.x": torch.zeros(1)})
    assert list(tmp_path.iterdir()) == []


def test_a_file_or_nothing_where_a_folder_is_asked_for(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        verify(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        verify(tmp_path / "file")


def test_the_manifest_holds_what_others_read(tmp_path):
    write(tmp_path / "c")
    found = json.loads((tmp_path / "c/manifest.json").read_text())
    assert found["format"] == "lit-pretrain-checkpoint"
    assert found["version"] == 1
    assert found["data_position"] == {"microbatches": 1000, "updates": 250}
    assert found["monitors"] == {"val/loss": 2.5, "x": "inf"}
    assert found["ledger_length"] == 0
    listed = {str(p.relative_to(tmp_path / "c")) for p in (tmp_path / "c").rglob("*") if p.is_file()}
    assert listed == {*found["files"], "manifest.json", "COMPLETE"}
    assert manifest.VERSION == 1
    assert str(tmp_path).encode() not in (tmp_path / "c/tensors/.metadata").read_bytes()


def test_a_tensor_that_torch_itself_must_save_keeps_the_reason_of_a_failure(tmp_path, monkeypatch):
    """torch.save alone says "unexpected pos 64 vs 0" for most of them."""
    opened = files.open_new
    for room in (10, 200, 700, 1000, 1400):
        left = [room]
        monkeypatch.setattr(files, "open_new", lambda path, left=left: Full(opened(path), left))
        with pytest.raises(CheckpointError, match="No space left on device"):
            write(tmp_path / "c", tensors={"model.empty": torch.empty(0, 4)})
