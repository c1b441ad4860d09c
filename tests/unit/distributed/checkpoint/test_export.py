"""One plain file that a plain GPT loads."""

from __future__ import annotations

import pytest
import torch

from lit_pretrain.distributed.checkpoint import CheckpointFacts, write_checkpoint
from lit_pretrain.distributed.checkpoint.export import main
from lit_pretrain.models import GPT
from lit_pretrain.specs import GPTConfig

CONFIG = GPTConfig(vocab_size=61, block_size=16, n_layer=2, n_head=2, n_embd=16)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = GPT(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    tensors = {f"model.model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {"model.metric.total": torch.tensor(1.0), "optimizer.0.exp_avg.model.wte.weight": torch.ones(3)}
    write_checkpoint(tmp_path / "c", tensors=tensors, tree={}, facts=CheckpointFacts(global_step=1))
    return model


def test_a_plain_gpt_loads_it(saved, tmp_path, capsys):
    assert main([str(tmp_path / "c"), str(tmp_path / "w.pt")]) == 0
    count = sum(p.numel() for p in saved.state_dict().values())
    assert f"{count:,} values" in capsys.readouterr().out
    fresh = GPT(CONFIG)
    fresh.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True), strict=True)
    ids = torch.arange(12).reshape(1, 12)
    assert torch.equal(fresh(ids), saved(ids))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "w.pt"]


def test_another_prefix(saved, tmp_path, capsys):
    assert main([str(tmp_path / "c"), str(tmp_path / "w.pt"), "--prefix", ""]) == 0
    assert "metric.total" in torch.load(tmp_path / "w.pt", weights_only=True)
    assert main([str(tmp_path / "c"), str(tmp_path / "x.pt"), "--prefix", "net."]) == 2
    assert "--prefix='net.' begins none of the names" in capsys.readouterr().err
    assert not (tmp_path / "x.pt").exists()


def test_a_damaged_folder_is_an_error_and_no_file(saved, tmp_path, capsys):
    path = tmp_path / "c/tensors/__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[900] ^= 1
    path.write_bytes(content)
    assert main([str(tmp_path / "c"), str(tmp_path / "w.pt")]) == 2
    assert "is damaged (checksum)" in capsys.readouterr().err
    assert not (tmp_path / "w.pt").exists()


def test_a_file_that_cannot_be_written(saved, tmp_path, capsys):
    assert main([str(tmp_path / "c"), str(tmp_path / "none" / "w.pt")]) == 1
    assert "could not be written (No such file or directory)" in capsys.readouterr().err
