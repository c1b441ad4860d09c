"""Lightning's checkpoints as folders: a real one comes back exactly, and optimizer state follows its names."""

from __future__ import annotations

import copy
import math
import pickle
import threading

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lit_pretrain.distributed.checkpoint import CheckpointError, background, complete, read_checkpoint, verify
from lit_pretrain.plugins import FolderCheckpointIO, match_parameters
from tests.unit.callbacks.tiny import Tiny, loader, trainer


class Odd(Callback):
    """State of every awkward kind."""

    def state_dict(self):
        return {
            "worst": math.nan, "best": -math.inf, 3: {"by int": (1, (2.0, None))}, "t": torch.tensor([math.nan]),
            "set": {1, 2}, "size": torch.Size([1, 2]), "dtype": torch.bfloat16, "raw": b"\0x",
        }  # fmt: skip


class Scheduled(Tiny):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.save_hyperparameters({"lr": 0.01, "nested": {"a": [1, 2]}})
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def configure_optimizers(self):
        decay, plain = [], []
        for parameter in self.parameters():
            (decay if parameter.dim() > 1 else plain).append(parameter)
        groups = [{"params": decay, "weight_decay": 0.1, "name": "decay"}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trained(tmp_path, *, steps=10, **settings):
    callbacks = [
        ModelCheckpoint(tmp_path / "stock", monitor="val/loss", save_last=True, every_n_train_steps=4, save_top_k=2),
        EarlyStopping("val/loss", patience=9),
        LearningRateMonitor(),
        Odd(),
    ]
    run = trainer(
        tmp_path, *callbacks, enable_checkpointing=True, max_steps=steps, val_check_interval=4, limit_val_batches=2,
        logger=CSVLogger(tmp_path, name="logs"), **settings,
    )  # fmt: skip
    run.fit(Scheduled(), loader(), loader(seed=2))
    return run


def alike(a, b, at="") -> None:
    assert type(a) is type(b) or (isinstance(a, dict) and isinstance(b, dict)), (at, type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, at
        assert a.shape == b.shape, at
        assert torch.equal(a, b) or torch.equal(a.isnan(), b.isnan()), at
    elif isinstance(a, dict):
        assert list(a) == list(b), at
        for key in a:
            assert type(key) is type(next(k for k in b if k == key)), at
            alike(a[key], b[key], f"{at}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), at
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            alike(x, y, f"{at}.{i}")
    else:
        assert a == b or (a != a and b != b), at


@pytest.mark.parametrize("in_background", [False, True])
def test_a_real_checkpoint_comes_back_exactly(tmp_path, in_background):
    dumped = trained(tmp_path)._checkpoint_connector.dump_checkpoint(weights_only=False)
    assert {"callbacks", "optimizer_states", "lr_schedulers", "loops", "hyper_parameters"} <= set(dumped)
    wanted = copy.deepcopy(dumped)
    plugin = FolderCheckpointIO(background=in_background)
    plugin.save_checkpoint(dumped, tmp_path / "step-10")
    alike(wanted, dumped)  # saving changes nothing of it
    got = plugin.load_checkpoint(tmp_path / "step-10")
    ours = got.pop("lit_pretrain")
    assert ours["rng"] == []
    assert (ours["facts"]["global_step"], ours["facts"]["microbatches_read"]) == (10, 10)
    alike({key: wanted[key] for key in sorted(wanted)}, {key: got[key] for key in sorted(got)})
    plugin.teardown()


def named(run):
    names = {id(p): name for name, p in run.lightning_module.named_parameters()}
    return [[[names[id(p)] for p in group["params"]] for group in o.param_groups] for o in run.optimizers]


def test_names_facts_and_random_states(tmp_path):
    run = trained(tmp_path)
    dumped = run._checkpoint_connector.dump_checkpoint(weights_only=False)
    rng = [{"torch": torch.get_rng_state(), "python": (3, (1, 2), None)}]
    facts = {"microbatches_read": 20, "updates_read": 10, "reason": "end", "monitors": {"val/loss": 1.5}}
    dumped["lit_pretrain"] = {"parameter_names": named(run), "facts": facts, "rng": rng, "more": {1: "x"}}
    plugin = FolderCheckpointIO()
    plugin.save_checkpoint(dumped, tmp_path / "c")
    got = plugin.load_checkpoint(str(tmp_path / "c"))
    assert got["lit_pretrain"]["more"] == {1: "x"}
    assert got["lit_pretrain"]["parameter_names"] == named(run)
    assert torch.equal(got["lit_pretrain"]["rng"][0]["torch"], rng[0]["torch"])
    alike(dumped["optimizer_states"], got["optimizer_states"])
    found = verify(tmp_path / "c")
    assert (found.global_step, found.updates_read, found.reason, found.monitors) == (10, 10, "end", {"val/loss": 1.5})
    _, tensors = read_checkpoint(tmp_path / "c")
    assert "optimizer.0.exp_avg.net.0.weight" in tensors
    assert torch.equal(tensors["model.net.0.weight"], run.lightning_module.net[0].weight)
    dumped["lit_pretrain"]["facts"] = {"updates": 3}
    with pytest.raises(CheckpointError, match="facts has 'updates'"):
        plugin.save_checkpoint(dumped, tmp_path / "d")
    plugin.teardown()


def resumed(folder, *plugins):
    """Six updates saved every second, then six more in a new Trainer."""
    every = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max")
    first = trainer(folder, every, enable_checkpointing=True, max_steps=6, plugins=list(plugins))
    first.fit(Scheduled(dropout=0.0), loader())
    second = trainer(folder, max_steps=12, plugins=list(plugins))
    second.fit(Scheduled(dropout=0.0), loader(), ckpt_path=folder / "step=6.ckpt")
    assert second.global_step == 12
    return second


def test_a_trainer_resumes_from_a_folder_as_from_its_own_file(tmp_path):
    stock = resumed(tmp_path / "stock")
    plugin = FolderCheckpointIO()
    ours = resumed(tmp_path / "ours", plugin)
    assert [found.facts.global_step for found in complete(tmp_path / "ours")] == [6, 4]  # the older one is gone
    alike(dict(stock.lightning_module.state_dict()), dict(ours.lightning_module.state_dict()))
    alike(stock.optimizers[0].state_dict(), ours.optimizers[0].state_dict())


class Backwards(Scheduled):
    """The same parameters, listed the other way round, and the groups too."""

    def configure_optimizers(self):
        given = super().configure_optimizers()
        groups = [{**g, "params": g["params"][::-1]} for g in given["optimizer"].param_groups][::-1]
        return torch.optim.AdamW([{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups], lr=9.0)


def test_optimizer_state_follows_its_names_into_another_order(tmp_path):
    run = trained(tmp_path)
    dumped = run._checkpoint_connector.dump_checkpoint(weights_only=False)
    dumped["lit_pretrain"] = {"parameter_names": named(run)}
    plugin = FolderCheckpointIO(background=False)
    plugin.save_checkpoint(dumped, tmp_path / "c")
    other = Backwards()
    other.load_state_dict(run.lightning_module.state_dict())
    optimizer = other.configure_optimizers()
    names = {id(p): name for name, p in other.named_parameters()}
    now = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    assert now != named(run)[0]
    optimizer.load_state_dict(match_parameters(plugin.load_checkpoint(tmp_path / "c"), [now])[0])
    before = run.optimizers[0]
    by_name = dict(run.lightning_module.named_parameters())
    for name, parameter in other.named_parameters():
        for key, value in before.state[by_name[name]].items():
            assert torch.equal(optimizer.state[parameter][key], value), (name, key)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.1]
    assert all(g["lr"] == before.param_groups[0]["lr"] for g in optimizer.param_groups)
    for model, o in ((run.lightning_module, before), (other, optimizer)):  # one more step, alike
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        o.step()
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, by_name[name]), name


def test_other_parameters_are_refused_by_name(tmp_path):
    run = trained(tmp_path)
    dumped = run._checkpoint_connector.dump_checkpoint(weights_only=False)
    dumped["lit_pretrain"] = {"parameter_names": named(run)}
    plugin = FolderCheckpointIO(background=False)
    plugin.save_checkpoint(dumped, tmp_path / "c")
    loaded = plugin.load_checkpoint(tmp_path / "c")
    names = named(run)[0]
    with pytest.raises(CheckpointError, match=r"lacks net\.9\.weight and also has net\.0\.weight"):
        match_parameters(loaded, [[["net.9.weight", *names[0][1:]], names[1]]])
    with pytest.raises(CheckpointError, match="has 2 groups where this run has 1"):
        match_parameters(loaded, [[names[0] + names[1]]])
    with pytest.raises(CheckpointError, match="1 optimizers and this run 2"):
        match_parameters(loaded, [names, names])
    dumped["lit_pretrain"] = {"parameter_names": [[names[0]]]}
    with pytest.raises(CheckpointError, match="name every parameter once"):
        plugin.save_checkpoint(dumped, tmp_path / "d")
    dumped["lit_pretrain"] = {"parameter_names": [[[names[0][0]] * len(names[0]), names[1]]]}
    with pytest.raises(CheckpointError, match=r"two parameters with the name 'net\.0\.weight'"):
        plugin.save_checkpoint(dumped, tmp_path / "d")


def test_names_of_wrappers_stay_out_of_the_folder_and_come_back_to_the_trainer(tmp_path):
    inner = nn.Linear(2, 2)
    state = {"model._orig_mod.fc.weight": inner.weight.data, "model.h._checkpoint_wrapped_module.b": inner.bias.data}
    plugin = FolderCheckpointIO(background=False)
    plugin.save_checkpoint({"state_dict": state, "global_step": 1}, tmp_path / "c")
    _, tensors = read_checkpoint(tmp_path / "c")
    assert set(tensors) == {"model.model.fc.weight", "model.model.h.b"}
    alike(plugin.load_checkpoint(tmp_path / "c")["state_dict"], state)


def test_old_files_are_read_and_those_that_could_run_are_not(tmp_path):
    plugin = FolderCheckpointIO()
    torch.save({"state_dict": {"a": torch.ones(2)}, "epoch": 1}, tmp_path / "old.ckpt")
    assert torch.equal(plugin.load_checkpoint(tmp_path / "old.ckpt")["state_dict"]["a"], torch.ones(2))
    with pytest.raises(CheckpointError, match="would run what"):
        plugin.load_checkpoint(tmp_path / "old.ckpt", weights_only=False)
    torch.save({"module": nn.Linear(1, 1)}, tmp_path / "object.ckpt")
    torch.save([1], tmp_path / "list.ckpt")
    (tmp_path / "torn.ckpt").write_bytes((tmp_path / "old.ckpt").read_bytes()[:500])
    for name, said in (
        ("object.ckpt", "cannot be read"), ("list.ckpt", "holds a list"), ("torn.ckpt", "cannot be read"),
        ("none.ckpt", "does not exist"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=said):
            plugin.load_checkpoint(tmp_path / name)


def test_remote_paths_and_options_are_refused(tmp_path):
    plugin = FolderCheckpointIO()
    with pytest.raises(CheckpointError, match="not a local path"):
        plugin.save_checkpoint({}, "s3://bucket/c")
    with pytest.raises(CheckpointError, match="means nothing"):
        plugin.save_checkpoint({}, tmp_path / "c", storage_options={"a": 1})


def test_an_older_one_is_removed_only_after_the_newer_one_is_whole(tmp_path, monkeypatch):
    plugin = FolderCheckpointIO()
    plugin.save_checkpoint({"global_step": 1}, tmp_path / "step-1")
    plugin.wait()
    hold, real, failing = threading.Event(), background.write_packed, [False]

    def slow(folder, packed, **settings):
        assert hold.wait(30)
        if failing[0]:
            raise CheckpointError("the disk is full")
        return real(folder, packed, **settings)

    monkeypatch.setattr(background, "write_packed", slow)
    failing[0] = True
    plugin.save_checkpoint({"global_step": 2}, tmp_path / "step-2")
    plugin.remove_checkpoint(tmp_path / "step-1")
    hold.set()
    with pytest.raises(CheckpointError, match="the disk is full"):
        plugin.wait()
    assert verify(tmp_path / "step-1").global_step == 1
    hold.clear()
    failing[0] = False
    plugin.save_checkpoint({"global_step": 2}, tmp_path / "step-2")
    plugin.remove_checkpoint(tmp_path / "step-1")
    assert (tmp_path / "step-1").exists()
    hold.set()
    plugin.teardown()
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]


def test_a_full_disk_ends_the_run_with_the_reason(tmp_path, monkeypatch):
    def full(folder, packed, **settings):
        raise CheckpointError(f"{folder} could not be written (No space left on device)")

    monkeypatch.setattr(background, "write_packed", full)
    every = ModelCheckpoint(tmp_path / "c", every_n_train_steps=2, save_top_k=-1)
    run = trainer(tmp_path, every, enable_checkpointing=True, max_steps=6, plugins=[FolderCheckpointIO()])
    with pytest.raises(CheckpointError, match="No space left"):
        run.fit(Scheduled(), loader())
    assert run.global_step == 4


def test_what_is_saved_after_a_run_is_there_at_once(tmp_path, monkeypatch):
    """Nobody would wait for a thread then, and the end of the program would break it off."""
    held = threading.Event()
    write = background.write_packed
    monkeypatch.setattr(background, "write_packed", lambda *a, **k: (held.wait(30), write(*a, **k)))
    plugin = FolderCheckpointIO()
    run = trainer(tmp_path, max_steps=1, plugins=[plugin])
    run.fit(Scheduled(dropout=0.0), loader())
    run.save_checkpoint(tmp_path / "after")
    assert verify(tmp_path / "after").global_step == 1
    plugin.begin()
    run.save_checkpoint(tmp_path / "within")
    assert not (tmp_path / "within").exists()  # its thread is held up
    held.set()
    plugin.wait()
    assert verify(tmp_path / "within").global_step == 1


def test_it_travels_to_spawned_ranks(tmp_path):
    plugin = FolderCheckpointIO(background=True, threads=1)
    plugin.save_checkpoint({"global_step": 1}, tmp_path / "c")
    other = pickle.loads(pickle.dumps(plugin))
    assert verify(tmp_path / "c").global_step == 1
    other.save_checkpoint({"global_step": 2}, tmp_path / "d")
    other.teardown()
    assert verify(tmp_path / "d").global_step == 2
    assert other.background


def test_tensors_go_to_the_device_asked_for(tmp_path):
    plugin = FolderCheckpointIO(background=False)
    plugin.save_checkpoint({"state_dict": {"a": torch.ones(2)}, "x": [torch.ones(1)]}, tmp_path / "c")
    got = plugin.load_checkpoint(tmp_path / "c", map_location="meta")
    assert got["state_dict"]["a"].is_meta
    assert got["x"][0].is_meta
