"""Curves of a resumed run, read back with both of TensorBoard's loaders."""

from __future__ import annotations

import subprocess
import time

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginAccumulator

from lit_pretrain.callbacks import ExactResume, RunCheckpoint, TensorBoardContinuation
from tests.unit.callbacks.tiny import Tiny, loader, trainer


def fit(folder, *, steps, callback=True, path=None):
    """Logs every update and saves every fourth."""
    logger = TensorBoardLogger(folder, name="", version="")
    callbacks = [TensorBoardContinuation()] if callback else []
    saver = RunCheckpoint(folder / "checkpoints", every_n_steps=4, keep_last=9, save_at_end=False)
    run = trainer(
        folder, saver, *callbacks, ExactResume(), enable_checkpointing=True, max_steps=steps, logger=logger,
        val_check_interval=2, check_val_every_n_epoch=None,
    )  # fmt: skip
    run.fit(Tiny(lr=0.01), loader(), loader(8), ckpt_path=path)
    logger.experiment.flush()


def steps(folder, name="train/loss"):
    found = []
    for reader in (EventAccumulator, PluginAccumulator):
        events = reader(str(folder))
        events.Reload()
        if reader is EventAccumulator:
            found.append([event.step for event in events.Scalars(name)])
        else:
            found.append([event.step for event in events.Tensors(name)])
    return found


def test_a_resumed_run_has_each_update_once(tmp_path):
    fit(tmp_path, steps=7)  # updates 5 to 7 are logged, and lost
    path = tmp_path / "checkpoints" / "step-00000004.ckpt"
    fit(tmp_path, steps=10, path=path)
    assert len(list(tmp_path.glob("*tfevents*"))) == 2
    assert steps(tmp_path) == [list(range(10))] * 2
    assert steps(tmp_path, "val/loss") == [[1, 3, 5, 7, 9]] * 2
    fit(tmp_path, steps=12, path=path)  # and once more from the same place
    assert steps(tmp_path) == [list(range(12))] * 2


def test_without_it_the_curve_runs_back(tmp_path):
    """What the callback is for; if this fails, TensorBoard has learned it and the callback can go."""
    fit(tmp_path, steps=7, callback=False)
    fit(tmp_path, steps=10, callback=False, path=tmp_path / "checkpoints" / "step-00000004.ckpt")
    assert steps(tmp_path)[0] == [*range(7), *range(4, 10)]


def test_the_fast_loader_agrees(tmp_path):
    """TensorBoard's data server, which the web page reads from."""
    grpc = pytest.importorskip("grpc")
    server = pytest.importorskip("tensorboard_data_server")
    from tensorboard.context import RequestContext
    from tensorboard.data import grpc_provider
    from tensorboard.data.proto import data_provider_pb2_grpc

    board = tmp_path / "board"
    fit(board, steps=7)
    fit(board, steps=10, path=board / "checkpoints" / "step-00000004.ckpt")
    port_file = tmp_path / "port"
    process = subprocess.Popen(
        [server.server_binary(), f"--logdir={board}", "--port=0", f"--port-file={port_file}", "--die-after-stdin"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while not (port_file.exists() and port_file.read_text().strip()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        address = f"127.0.0.1:{int(port_file.read_text())}"
        with grpc.insecure_channel(address) as channel:
            provider = grpc_provider.GrpcDataProvider(
                address, data_provider_pb2_grpc.TensorBoardDataProviderStub(channel)
            )
            read: list[int] = []
            while time.monotonic() < deadline and len(read) < 10:
                found = provider.read_scalars(
                    RequestContext(), experiment_id="", plugin_name="scalars", downsample=1000
                )
                read = [point.step for tags in found.values() for point in tags.get("train/loss", [])]
                time.sleep(0.1)
        assert read == list(range(10))
    finally:
        process.stdin.close()
        process.wait(10)
