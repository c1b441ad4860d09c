"""A training step through Trainer with all default callbacks, through a plain Trainer, and in a bare PyTorch loop.

All train the same GPT on the same shards with the same optimizer and clip at the same norm, in fp32 on the CPU.
Every tenth step is logged and counts with its share; validation, samples and saving come rarely and are left out.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.interleave import Gate, race, summarise
from benchmarks.interleave import table as rows_table

ROOT = "LIT_PRETRAIN_BENCH_ROOT"
OVERRIDES = [
    "data=shards",
    "model=gpt-1m",
    "trainer=cpu",
    "length.steps=100000",
    "batch.global_batch_size=8",
    "batch.micro_batch_size=8",
    "validation.every_steps=100000",
]


def prepare_shards(root: Path) -> None:
    import sysconfig

    from lit_pretrain.corpus import ShardWriter, TokenizerFile, train_tokenizer

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    train_tokenizer(texts, root / "tokenizer.json", vocab_size=2048)
    tokenizer = TokenizerFile(root / "tokenizer.json")
    for i, name in enumerate(("a", "b")):
        with ShardWriter(
            root / name,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            tokenizer_hash=tokenizer.content_hash,
        ) as writer:
            for ids in tokenizer.encode_batch(texts[i::2]):
                writer.add(ids)


def _config() -> dict[str, Any]:
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    from lit_pretrain.cli import resolvers

    resolvers.register()
    root = Path(os.environ[ROOT])
    run_dir = tempfile.mkdtemp(dir=root)
    sources = [f"data.corpus.sources={{a: {root}/a, b: {root}/b}}", f"data.corpus.tokenizer={root}/tokenizer.json"]
    with initialize_config_module("lit_pretrain.conf", version_base="1.3"):
        config = compose("train", [*OVERRIDES, *sources, f"run.dir={run_dir}"])
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(k): v for k, v in plain.items()}


def _gated(module: Any, gate: Gate) -> Any:
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        gate()
        return step(batch, batch_idx)

    module.training_step = training_step
    return module


def bare_loop(gate: Gate) -> None:
    """A loop in PyTorch: forward, backward, clip, step."""
    import torch

    from lit_pretrain.instantiate import build

    config = _config()
    data, module = build(config["data"], "data"), build(config["module"], "module")
    data.setup("fit")
    model = module.model.train()
    optimizer = module.configure_optimizers()
    loader = data.train_dataloader()
    while True:
        for batch in loader:
            gate()
            sums = model.loss(model(batch["ids"]), batch["targets"])
            optimizer.zero_grad()
            (sums.nll_sum / batch["targets"].numel()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def _plain(gate: Gate, **settings: Any) -> None:
    import lightning.pytorch as pl

    from lit_pretrain.instantiate import build

    config = _config()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=100_000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
        **settings,
    )
    trainer.fit(_gated(build(config["module"], "module"), gate), datamodule=build(config["data"], "data"))


def plain_trainer(gate: Gate) -> None:
    """Lightning with nothing switched on, not even clipping."""
    _plain(gate)


def plain_trainer_clipping(gate: Gate) -> None:
    """Lightning with nothing switched on but its own clipping."""
    _plain(gate, gradient_clip_val=1.0)


def default_trainer(gate: Gate) -> None:
    """What `lit-pretrain train` builds: schedule, callbacks, TensorBoard."""
    import yaml

    from lit_pretrain.instantiate.run import build_run

    config = _config()
    (Path(config["run"]["dir"]) / "resolved.yaml").write_text(yaml.safe_dump(config))
    run = build_run(config)
    run.trainer.fit(_gated(run.module, gate), datamodule=run.datamodule)


CONTENDERS: dict[str, Callable[[Gate], None]] = {
    "PyTorch loop": bare_loop,
    "Trainer, nothing on": plain_trainer,
    "Trainer, gradient_clip_val": plain_trainer_clipping,
    "Trainer, all default callbacks": default_trainer,
}


def run(*, rounds: int = 31, steps: int = 10) -> dict[str, Any]:
    """Step times and their ratios to a plain Trainer. Each round holds one logged step."""
    with tempfile.TemporaryDirectory() as root:
        prepare_shards(Path(root))
        os.environ[ROOT] = root
        try:
            times = race(CONTENDERS, rounds=rounds, steps=steps)
        finally:
            del os.environ[ROOT]
    return {
        "against plain Trainer": summarise(times, against="Trainer, nothing on"),
        "against PyTorch loop": summarise(times, against="PyTorch loop"),
    }


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    title = "Training step, GPT of 1M parameters, 2,048 tokens"
    return "\n\n".join(rows_table(f"{title}, {name}", rows) for name, rows in figures.items())


if __name__ == "__main__":
    print(table(run()))
