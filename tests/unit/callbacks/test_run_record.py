from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from lit_pretrain.callbacks import GradientClipping, RunRecord, ThroughputMonitor, WarmupCosine
from lit_pretrain.callbacks.run_record import flatten, plain
from lit_pretrain.errors import ConfigError
from tests.unit.callbacks.tiny import Tiny, loader, trainer

CONFIG = {
    "model": {"n_layer": 2, "dropout": 0.1, "rope": None, "bias": True},
    "data": {"paths": [Path("a/b"), "c"], "weights": {}, 3: "number"},
    "seed": 2**60,
    "limit": math.inf,
    "name": "Ünï: #x",
}


def test_flatten_by_hand():
    assert flatten(CONFIG) == {
        "model.n_layer": 2,
        "model.dropout": 0.1,
        "model.rope": "None",
        "model.bias": True,
        "data.paths.0": "a/b",
        "data.paths.1": "c",
        "data.weights": "{}",
        "data.3": "number",
        "seed": "1152921504606846976",
        "limit": "inf",
        "name": "Ünï: #x",
    }
    assert flatten({}) == {}


def read(folder):
    assert len(list(folder.rglob("events*"))) == 1, "one writer, one file"
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def hparams_of(events):
    def content(tag):
        data = events.SummaryMetadata(tag).plugin_data.content
        return plugin_data_pb2.HParamsPluginData.FromString(data)

    start = content("_hparams_/session_start_info").session_start_info.hparams
    experiment = content("_hparams_/experiment").experiment
    ended = "_hparams_/session_end_info" in events.summary_metadata
    values = {k: getattr(v, v.WhichOneof("kind")) for k, v in start.items()}
    return values, [m.name.tag for m in experiment.metric_infos], ended


class Saving(Tiny):
    """A module with hyper-parameters of its own, which Lightning writes too."""

    def __init__(self, width=8):
        super().__init__(lr=0.05)
        self.save_hyperparameters()


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("model", [Tiny, Saving])
def test_config_text_table_and_final_metrics_in_one_file(tmp_path, as_file, model):
    config = CONFIG
    if as_file:
        config = tmp_path / "resolved.yaml"
        config.write_text(yaml.safe_dump(plain(CONFIG)), encoding="utf-8")
    logger = TensorBoardLogger(tmp_path / "run", name="", version="")
    others = [WarmupCosine(warmup_steps=2), GradientClipping(), ThroughputMonitor(tokens_per_batch=4)]
    run = trainer(tmp_path, RunRecord(config), *others, logger=logger, max_steps=6, val_check_interval=3)
    run.fit(model(), loader(), loader())
    events = read(tmp_path / "run")
    values, columns, ended = hparams_of(events)
    assert values["model.n_layer"] == 2
    assert values["data.paths.0"] == "a/b"
    assert values["limit"] == "inf"
    assert columns == ["final/val/loss", "final/train/loss"]
    assert ended
    assert events.Scalars("final/val/loss")[-1].value == pytest.approx(float(run.callback_metrics["val/loss"]))
    assert events.Scalars("final/val/loss")[-1].step == 6
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert yaml.safe_load("\n".join(line[4:] for line in text.splitlines())) == plain(CONFIG)
    for tag in ("optim/lr", "train/grad_norm", "train/clip_share", "perf/tokens_per_s", "train/loss"):
        assert [e.step for e in events.Scalars(tag)][-1] == 5
        assert len(events.Scalars(tag)) >= 4


def test_a_run_that_dies_keeps_its_row(tmp_path):
    logger = TensorBoardLogger(tmp_path / "run", name="", version="")
    with pytest.raises(FloatingPointError):
        trainer(tmp_path, RunRecord(CONFIG), GradientClipping(), logger=logger, max_steps=6).fit(
            Tiny(poison={2}), loader()
        )
    values, _, ended = hparams_of(read(tmp_path / "run"))
    assert values["model.n_layer"] == 2
    assert not ended


def test_other_loggers_and_fast_dev_run(tmp_path):
    run = trainer(tmp_path, RunRecord(CONFIG), logger=CSVLogger(tmp_path, name="", version=""), max_steps=2)
    run.fit(Tiny(), loader())
    assert "model.n_layer: 2" in (tmp_path / "hparams.yaml").read_text()
    assert "final/train/loss" in (tmp_path / "metrics.csv").read_text()
    trainer(tmp_path, RunRecord(CONFIG), logger=TensorBoardLogger(tmp_path / "no"), fast_dev_run=True).fit(
        Tiny(), loader(), loader()
    )
    assert not list((tmp_path / "no").rglob("events*"))


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.yaml' cannot be read"):
        trainer(tmp_path, RunRecord(tmp_path / "missing.yaml"), max_steps=1).fit(Tiny(), loader())
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match=r"bad\.yaml' cannot be read"):
        trainer(tmp_path, RunRecord(tmp_path / "bad.yaml"), max_steps=1).fit(Tiny(), loader())
    with pytest.raises(ConfigError, match="list of names"):
        RunRecord({}, metrics="val/loss")
