"""Several ranks write one folder, plain and sharded, and any number of ranks reads it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lit_pretrain.distributed.checkpoint import (
    BackgroundWriter,
    CheckpointError,
    CheckpointFacts,
    files,
    load_tensors,
    newest,
    read_checkpoint,
    read_rng,
    verify,
    write_checkpoint,
)


def whole() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "model.rows": torch.randn(7, 3, generator=g),  # uneven over 2 ranks
        "model.columns": torch.randn(4, 6, generator=g),
        "model.copy": torch.randn(5, generator=g),
        "model.plain": torch.randn(2, 2, generator=g),
    }


PLACEMENTS = {"model.rows": Shard(0), "model.columns": Shard(1), "model.copy": Replicate()}


def sharded(mesh, tensors):
    return {k: distribute_tensor(v, mesh, [PLACEMENTS[k]]) if k in PLACEMENTS else v for k, v in tensors.items()}


def save(folder: str, in_background: bool) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group = dist.new_group(backend="gloo")
    rng = [{"rank": rank} for rank in range(dist.get_world_size())]
    given = {"tensors": sharded(mesh, whole()), "tree": {"epoch": 3}, "rng": rng}
    facts = CheckpointFacts(global_step=4, updates_read=4)
    if in_background:
        writer = BackgroundWriter(process_group=group)
        writer.save(Path(folder), **given, facts=facts)
        for tensor in given["tensors"].values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(0)
        dist.barrier()  # the trainer's own collectives go on meanwhile
        writer.close()
    else:
        write_checkpoint(Path(folder), **given, facts=facts, process_group=group)
    assert verify(Path(folder)).global_step == 4
    return sorted(p.name for p in (Path(folder) / "tensors").iterdir())


def load(folder: str) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    targets = sharded(mesh, {name: torch.zeros_like(tensor) for name, tensor in whole().items()})
    load_tensors(Path(folder), targets)
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in targets.items()}


@pytest.mark.parametrize("in_background", [False, True])
def test_two_ranks_write_and_any_number_reads(ranks, tmp_path, in_background):
    names = ranks(2, save, str(tmp_path / "c"), in_background, init=True)
    assert names[0] == names[1] == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    tree, tensors = read_checkpoint(tmp_path / "c")
    assert tree == {"epoch": 3}
    assert read_rng(tmp_path / "c") == [{"rank": 0}, {"rank": 1}]
    for name, tensor in whole().items():
        assert torch.equal(tensors[name], tensor), name
    for found in ranks(3, load, str(tmp_path / "c"), init=True):
        for name, tensor in whole().items():
            assert torch.equal(found[name], tensor), name


def test_one_process_writes_and_two_ranks_read(ranks, tmp_path):
    write_checkpoint(tmp_path / "c", tensors=whole(), tree={}, facts=CheckpointFacts(global_step=1))
    for found in ranks(2, load, str(tmp_path / "c"), init=True):
        assert all(torch.equal(found[name], tensor) for name, tensor in whole().items())


def fail_on(folder: str, rank: int, part: str) -> str:
    opened = files.open_new

    def full(path):
        if dist.get_rank() == rank and part in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path)

    files.open_new = full
    try:
        save(folder, False)
    except CheckpointError as e:
        return str(e)
    finally:
        files.open_new = opened
    return "saved"


@pytest.mark.parametrize(("rank", "part"), [(0, "distcp"), (1, "distcp"), (0, ".metadata"), (0, "manifest")])
def test_a_full_disk_on_one_rank_is_an_error_on_all(ranks, tmp_path, rank, part):
    said = ranks(2, fail_on, str(tmp_path / "c"), rank, part, timeout_s=60, init=True)
    assert all("could not be written" in sentence and "No space left on device" in sentence for sentence in said), said
    assert newest(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
