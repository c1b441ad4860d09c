"""TokenDataModule: what stands in a batch, on any number of ranks, and every refusal."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lit_pretrain.corpus import ShardFolders, ShardWriter, open_tokens, train_tokenizer
from lit_pretrain.data import TokenDataModule, ngram_baselines
from lit_pretrain.errors import ConfigError, DataError
from lit_pretrain.specs import TokenAccounting

T = 8


def data(corpus: Any, **settings: Any) -> TokenDataModule:
    return TokenDataModule(
        corpus, **({"sequence_length": T, "micro_batch_size": 4, "global_batch_size": 24, "seed": 3} | settings)
    )


def on_rank(module: TokenDataModule, rank: int, size: int) -> TokenDataModule:
    """The module as it stands on one of several data-parallel ranks."""
    strategy = SimpleNamespace(
        distributed_sampler_kwargs={"rank": rank, "num_replicas": size}, root_device=torch.device("cpu")
    )
    accumulation = module.global_batch_size // (module.micro_batch_size * size)
    module.trainer = SimpleNamespace(strategy=strategy, accumulate_grad_batches=accumulation)  # type: ignore[assignment]
    return module


def test_a_batch_against_the_files(corpus: Any, shards: Any) -> None:
    module = data(corpus)
    names = list(shards["sources"])
    assert module.source_names == names == ["big", "small"]
    whole = {name: np.fromfile(shards["sources"][name] / "shard-00000.bin", "<u2").tolist() for name in names}
    for position in range(30):
        batch = module.read_train(position)
        assert set(batch) == {"ids", "targets", "source", "index"}
        assert type(batch["index"]) is int
        assert batch["index"] == position
        assert batch["ids"].shape == batch["targets"].shape == (4, T)
        assert {batch[name].dtype for name in ("ids", "targets", "source")} == {torch.int64}
        for ids, targets, source in zip(batch["ids"], batch["targets"], batch["source"], strict=True):
            # stride T from the stream's beginning
            starts = range(0, len(whole[names[source]]) - T, T)
            assert any(
                whole[names[source]][at : at + T] == ids.tolist()
                and whole[names[source]][at + 1 : at + T + 1] == targets.tolist()
                for at in starts
            )


def rows_of(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(row) for row in batch["ids"].tolist()]


@pytest.mark.parametrize(("size", "micro"), [(1, 24), (1, 1), (2, 4), (3, 4), (4, 2), (6, 4), (24, 1)])
def test_any_layout_reads_the_same_global_batches(corpus: Any, size: int, micro: int) -> None:
    reference = data(corpus, micro_batch_size=24)
    ranks = [on_rank(data(corpus, micro_batch_size=micro), rank, size) for rank in range(size)]
    accumulation = 24 // (size * micro)
    for update in range(5):
        read = [
            row
            for step in range(accumulation)
            for rank in ranks
            for row in rows_of(rank.read_train(update * accumulation + step))
        ]
        assert read == rows_of(reference.read_train(update))


def test_ranks_read_different_rows(corpus: Any) -> None:
    first, second = (on_rank(data(corpus), rank, 2) for rank in range(2))
    assert rows_of(first.read_train(0)) != rows_of(second.read_train(0))


def test_isolated_documents_in_a_batch(corpus: Any) -> None:
    module = data(corpus, isolate_documents=True, micro_batch_size=24)
    batch = module.read_train(0)
    assert set(batch) == {"ids", "targets", "source", "index", "positions", "doc_ids"}
    after_eos = batch["ids"] == 0  # the writer ended every document with id 0
    assert after_eos.any()
    assert (batch["targets"][after_eos] == -100).all()
    assert (batch["targets"][~after_eos] != -100).all()
    starts = torch.roll(after_eos, 1, dims=1)
    starts[:, 0] = True
    assert (batch["positions"][starts] == 0).all()
    assert (batch["positions"][~starts] > 0).all()
    assert (batch["doc_ids"] == torch.cumsum(starts, 1) - 1).all()


def test_weights_decide_shares(corpus: Any) -> None:
    module = data(corpus, weights={"big": 1, "small": 3})
    sources = torch.cat([module.read_train(position)["source"] for position in range(60)])
    assert torch.bincount(sources).tolist() == [60, 180]
    proportional = data(corpus)
    sizes = [len(windows) for windows in proportional.train_windows.values()]
    sources = torch.cat([proportional.read_train(position)["source"] for position in range(600)])
    assert torch.bincount(sources)[0] == pytest.approx(2400 * sizes[0] / sum(sizes), abs=1)


def test_skipped_stretches(corpus: Any) -> None:
    plain, skipping = data(corpus), data(corpus, skip=[(1, 3), (4, 5)])
    steps = [0, 3, 5, 6]
    for update, step in enumerate(steps):
        for micro in range(6):
            a, b = skipping.read_train(6 * update + micro), plain.read_train(6 * step + micro)
            assert a["index"] == b["index"] == 6 * step + micro
            assert torch.equal(a["ids"], b["ids"])


def test_sizes_others_ask_for(corpus: Any) -> None:
    module = data(corpus)
    assert isinstance(module, TokenAccounting)
    assert module.tokens_per_update == 24 * T
    assert module.vocab_size == 300
    assert module.tokenizer is None
    assert module.token_bytes is None
    tokens = {name: windows.stream.num_tokens for name, windows in module.train_windows.items()}
    assert module.updates_per_epoch == sum((number - 1) // T for number in tokens.values()) // 24
    assert len(module.train_dataloader()) == module.updates_per_epoch * 6


@pytest.mark.parametrize(("size", "micro"), [(1, 4), (1, 3), (2, 4), (3, 5), (7, 2)])
def test_validation_reads_every_target_once(corpus: Any, shards: Any, size: int, micro: int) -> None:
    loaders = [
        list(on_rank(data(corpus, micro_batch_size=micro, global_batch_size=micro * size), rank, size).val_dataloader())
        for rank in range(size)
    ]
    assert len({len(loader) for loader in loaders}) == 1
    batches = [batch for loader in loaders for batch in loader]
    assert all(batch["ids"].shape == (micro, T) for batch in batches)
    for number, folder in enumerate(shards["validation"].values()):
        ids = np.fromfile(folder / "shard-00000.bin", "<u2")
        seen = torch.cat([batch["targets"][batch["source"] == number].flatten() for batch in batches])
        assert sorted(seen[seen != -100].tolist()) == sorted(ids[1:].tolist())
    assert [batch["index"] for batch in loaders[0]] == list(range(len(loaders[0])))


def test_a_limited_validation_spreads_over_the_sources(corpus: Any) -> None:
    module = data(corpus, max_validation_tokens=10 * T)
    source, window = module.validation_rows()
    sizes = [len(windows) for windows in module.validation_windows if windows is not None]
    counts = np.bincount(source)
    assert len(source) <= 10 < sum(sizes)
    assert counts[0] == 10 * sizes[0] // sum(sizes)
    assert counts[1] == 10 * sizes[1] // sum(sizes)
    assert sorted(window[source == 0].tolist()) == [number * sizes[0] // counts[0] for number in range(counts[0])]


def test_the_first_validation_batches_are_mixed(corpus: Any) -> None:
    source, _ = data(corpus).validation_rows()
    assert len(set(source[: len(source) // 2].tolist())) == 2


def test_no_validation(shards: Any, trainer: Any, recorder: Any) -> None:
    module = data(ShardFolders(sources=shards["sources"]), global_batch_size=4)
    assert module.val_dataloader() == []
    trainer(max_steps=1).fit(recorder(), datamodule=module)
    with pytest.raises(DataError, match="no validation split"):
        ngram_baselines(module)


def test_validation_of_one_source_only(shards: Any) -> None:
    held_out = {"small": shards["validation"]["small"]}
    module = data(ShardFolders(sources=shards["sources"], validation=held_out))
    batches = list(module.val_dataloader())
    stream = open_tokens(held_out["small"])
    targets = torch.cat([batch["targets"].flatten() for batch in batches])
    assert (targets != -100).sum() == stream.num_tokens - 1
    assert {int(s) for batch in batches for s in batch["source"][batch["targets"][:, 0] != -100]} == {1}


def test_no_thread_is_left_after_fit(corpus: Any, trainer: Any, recorder: Any) -> None:
    trainer(max_steps=3, limit_val_batches=2).fit(recorder(), datamodule=data(corpus, global_batch_size=4))
    assert not [thread for thread in threading.enumerate() if thread.name == "lit-pretrain-prefetch"]


def test_overfitting_reads_the_same_batches(corpus: Any, trainer: Any, recorder: Any) -> None:
    module = recorder()
    trainer(max_epochs=3, overfit_batches=2, limit_val_batches=0).fit(
        module, datamodule=data(corpus, global_batch_size=4)
    )
    assert module.read == [0, 1] * 3


def test_a_shorter_epoch_reads_on(corpus: Any, trainer: Any, recorder: Any) -> None:
    module = recorder()
    settings = {"max_epochs": 3, "limit_train_batches": 4, "limit_val_batches": 0}
    trainer(**settings).fit(module, datamodule=data(corpus, global_batch_size=4))
    assert module.read == list(range(12))


def test_a_copy_opens_its_own_files(corpus: Any) -> None:
    module = data(corpus)
    expected = module.read_train(3)["ids"]
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert torch.equal(other.read_train(3)["ids"], expected)
    assert len(pickle.dumps(module)) < 5000  # not the text


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sequence_length": 0}, r"data\.sequence_length=0 must be a whole number of at least 1"),
        ({"micro_batch_size": 1.5}, r"data\.micro_batch_size=1\.5"),
        ({"global_batch_size": True}, r"data\.global_batch_size=True"),
        ({"global_batch_size": 10}, r"data\.global_batch_size=10 must be a multiple of data\.micro_batch_size=4"),
        ({"prefetch": -1}, r"data\.prefetch=-1"),
        ({"max_validation_tokens": 0}, r"data\.max_validation_tokens=0"),
        ({"seed": "x"}, r"data\.seed='x'"),
        ({"skip": [(3, 3)]}, "data.skip entry"),
        ({"weights": {"points": [[0, {"a": 1}]], "units": "tokens"}}, "unknown key 'units'"),
    ],
)
def test_bad_settings(corpus: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        data(corpus, **settings)


def test_batch_sizes_that_do_not_fit_the_trainer(corpus: Any, trainer: Any, recorder: Any) -> None:
    module = recorder()
    says = r"accumulate_grad_batches=1 must be 6: data\.global_batch_size=24 / \(data\.micro_batch_size=4 x 1"
    with pytest.raises(ConfigError, match=says):
        trainer(max_steps=1).fit(module, datamodule=data(corpus))
    with pytest.raises(ConfigError, match="times 5 data-parallel ranks; use a multiple of 20"):
        on_rank(data(corpus), 0, 5).train_dataloader()


def test_weights_for_other_sources(corpus: Any) -> None:
    with pytest.raises(ConfigError, match=r"the corpus has \['big', 'small'\]"):
        data(corpus, weights={"big": 1, "web": 1}).setup("fit")


def test_sequences_longer_than_a_source(corpus: Any) -> None:
    with pytest.raises(DataError, match="a window needs 5001"):
        data(corpus, sequence_length=5000).setup("fit")


def write(folder: Path, ids: list[int], **settings: Any) -> Path:
    with ShardWriter(folder, **({"vocab_size": 300, "eos_id": 0} | settings)) as writer:
        writer.add(ids)
    return folder


def test_sources_that_do_not_belong_together(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [1] * 99, tokenizer_hash="x")
    for name, settings, says in (
        ("v", {"vocab_size": 301}, "vocab_size=301"),
        ("e", {"eos_id": 1}, "eos_id=1"),
        ("t", {"tokenizer_hash": "y"}, "tokenizer_hash=y"),
    ):
        b = write(tmp_path / name, [1] * 99, **settings)
        with pytest.raises(DataError, match=says):
            ShardFolders(sources={"a": a, "b": b}).locate()


def test_a_tokenizer_of_other_shards(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["some text of no interest " * 9], tmp_path / "t.json", vocab_size=270)
    own = write(tmp_path / "own", [1] * 99, vocab_size=270, tokenizer_hash=tokenizer.content_hash)
    other = write(tmp_path / "other", [1] * 99, vocab_size=270, tokenizer_hash="other")
    module = data(ShardFolders(sources={"a": own}, tokenizer=tokenizer.path))
    assert module.tokenizer is not None
    assert module.token_bytes is not None
    assert module.token_bytes.tolist() == tokenizer.token_bytes().tolist()
    with pytest.raises(DataError, match="another tokenizer than the one given"):
        ShardFolders(sources={"a": other}, tokenizer=tokenizer.path).locate()
    with pytest.raises(DataError, match=r"^data\.corpus\.tokenizer: .*does not exist"):
        ShardFolders(sources={"a": own}, tokenizer=tmp_path / "none.json").locate()
    with pytest.raises(DataError, match=r"^data\.corpus\.validation\.a: .*does not exist"):
        ShardFolders(sources={"a": own}, validation={"a": tmp_path / "none"}).locate()


@pytest.mark.parametrize("at", [0, T])  # an input, and a target that is no input of its row
def test_ids_that_changed_after_the_manifest(tmp_path: Path, at: int) -> None:
    with ShardWriter(tmp_path / "a", vocab_size=300, eos_id=0) as writer:
        writer.add([1] * T)
    ids = np.fromfile(tmp_path / "a" / "shard-00000.bin", "<u2")
    ids[at] = 40_000
    ids.tofile(tmp_path / "a" / "shard-00000.bin")
    module = data(ShardFolders(sources={"a": tmp_path / "a"}), micro_batch_size=1, global_batch_size=1)
    with pytest.raises(DataError, match=r"a holds the id 40000 near token 0, beyond vocab_size=300"):
        module.read_train(0)


def test_bare_files_need_a_vocabulary_that_fits(tmp_path: Path) -> None:
    np.asarray([5, 299, 0] * 50, "<u2").tofile(tmp_path / "train.bin")
    path = tmp_path / "train.bin"
    with pytest.raises(ConfigError, match=r"corpus\.vocab_size is not set"):
        _ = data(ShardFolders(sources={"a": path})).vocab_size
    good = ShardFolders(sources={"a": path}, vocab_size=300, eos_id=0)
    good.prepare()
    assert data(good, isolate_documents=True).read_train(0)["ids"].max() == 299
    with pytest.raises(DataError, match="holds the id 299, beyond vocab_size=299"):
        ShardFolders(sources={"a": path}, vocab_size=299).prepare()
    with pytest.raises(DataError, match="where documents begin"):
        data(ShardFolders(sources={"a": path}, vocab_size=300), isolate_documents=True).setup("fit")


def test_contradicting_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.corpus\.dtype='float32'"):
        ShardFolders(sources={"a": tmp_path}, dtype="float32")
    with pytest.raises(ConfigError, match="sources is empty"):
        ShardFolders(sources={})
    with pytest.raises(ConfigError, match="names 'b', which is not among"):
        ShardFolders(sources={"a": tmp_path}, validation={"b": tmp_path})
    with pytest.raises(ConfigError, match="already says vocab_size"):
        ShardFolders(sources={"a": tmp_path}, tokenizer=tmp_path, vocab_size=3)


def test_baselines_score_the_validation_targets(corpus: Any) -> None:
    module = data(corpus)
    scores = ngram_baselines(module)
    targets = sum(windows.stream.num_tokens - 1 for windows in module.validation_windows if windows is not None)
    assert scores.unigram.targets == scores.bigram.targets == targets
    assert scores.bigram.bits_per_byte is None
    assert set(scores.bigram_of) == {"big", "small"}
    assert sum(part.nats for part in scores.bigram_of.values()) == pytest.approx(scores.bigram.nats)
    # ids are uniform over 299: nothing to learn but EOS
    assert scores.unigram.nats_per_token == pytest.approx(np.log(299), abs=0.5)
