"""A corpus of some kB and the overrides that make any configuration small."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module

from lit_pretrain.cli.train import resolve
from lit_pretrain.corpus import ShardWriter, train_tokenizer

VOCAB_SIZE = 320
SEQUENCE_LENGTH = 16

MODEL = (
    f"model.vocab_size={VOCAB_SIZE}",
    f"model.block_size={SEQUENCE_LENGTH}",
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_embd=16",
    "++model.n_kv_head=null",
    "++model.head_dim=null",
    "++model.ffn_hidden_size=null",
)
RUN = (
    "length={steps: 2, tokens: null, epochs: null}",
    f"batch.sequence_length={SEQUENCE_LENGTH}",
    "batch.global_batch_size=4",
    "batch.micro_batch_size=2",
    "validation.max_tokens=256",
    "schedule.warmup_steps=1",
    "schedule.warmup_fraction=null",
    "trainer.accelerator=cpu",
    "trainer.devices=1",
)
SHRINK = (*MODEL, *RUN)


def write_corpus(folder: Path) -> list[str]:
    """Write two sources with held-out text and a tokenizer; returns the overrides that use them."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(200)]
    texts = [" ".join(rng.choices(words, k=60)) for _ in range(40)]
    tokenizer = train_tokenizer(texts, folder / "tokenizer.json", vocab_size=VOCAB_SIZE)
    for name, part in {
        "a": texts[:18],
        "b": texts[18:30],
        "a-held-out": texts[30:35],
        "b-held-out": texts[35:],
    }.items():
        settings = {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id}
        with ShardWriter(folder / name, tokenizer_hash=tokenizer.content_hash, **settings) as writer:
            for text in part:
                writer.add(tokenizer.encode(text), num_bytes=len(text.encode()))
    return [
        "data=shards",
        f"data.corpus.sources={{a: '{folder / 'a'}', b: '{folder / 'b'}'}}",
        f"data.corpus.validation={{a: '{folder / 'a-held-out'}', b: '{folder / 'b-held-out'}'}}",
        f"data.corpus.tokenizer='{folder / 'tokenizer.json'}'",
    ]


def composed(run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The resolved configuration of ``lit-pretrain train OVERRIDES``, without the command line."""
    with initialize_config_module("lit_pretrain.conf", version_base="1.3"):
        return resolve(compose("train", [*overrides, f"run.dir='{run_dir}'", "run_id=test"]))


def with_lightnings_files(config: dict[str, Any]) -> dict[str, Any]:
    """The same run, saving as Lightning alone does: single files, by ModelCheckpoint."""
    config["trainer"]["plugins"] = []
    config["callbacks"] = {
        name: node
        for name, node in config["callbacks"].items()
        if name not in ("checkpoint", "resume", "curves", "preemption")
    }
    config["callbacks"]["checkpoint"] = {
        "_target_": "lightning.pytorch.callbacks.ModelCheckpoint",
        "dirpath": f"{config['run']['dir']}/checkpoints",
        "filename": "step-{step:08d}",
        "auto_insert_metric_name": False,
        "every_n_train_steps": config["validation"]["every_steps"],
        "save_top_k": 1,
        "enable_version_counter": False,
    }
    return config
