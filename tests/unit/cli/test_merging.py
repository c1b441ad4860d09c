from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from lit_pretrain.cli import resolvers
from lit_pretrain.cli.merging import stays
from lit_pretrain.errors import ConfigError

resolvers.register()
OLD = ("data=shards", "data.corpus.sources={a: x, b: y}")


def composed(*words: str) -> tuple[DictConfig, list[str]]:
    with initialize_config_module("lit_pretrain.conf", version_base="1.3"):
        return compose("train", list(words)), list(words)


def test_what_a_merge_leaves_is_said() -> None:
    config, words = composed(*OLD, "data.corpus.sources={b: z}")
    assert dict(config.data.corpus.sources) == {"a": "x", "b": "z"}  # Hydra merges: the reason for all this
    (sentence,) = stays(config, words)
    assert sentence == (
        "data.corpus.sources={b: z} is merged into what is there: a stays; to replace it write '~data.corpus.sources' "
        "'+data.corpus.sources={NAME: ...}'."
    )


def test_the_way_out_replaces() -> None:
    config, words = composed(*OLD, "~data.corpus.sources", "+data.corpus.sources={c: z}")
    assert dict(config.data.corpus.sources) == {"c": "z"}
    assert stays(config, [words[0], words[-1]]) == []


def test_an_empty_mapping_is_refused() -> None:
    config, words = composed(*OLD, "data.corpus.sources={}")
    with pytest.raises(
        ConfigError, match=r"data.corpus.sources=\{\} changes nothing: .* there \(a, b\); to replace it"
    ):
        stays(config, words[2:])


@pytest.mark.parametrize("word", ["length={steps: 5}", "optimizer={lr: 1}", "data.corpus.sources={a: x, b: y, c: z}"])
def test_what_surprises_nobody_is_not_said(word: str) -> None:
    config, _ = composed("data=shards", word)
    assert stays(config, [word]) == []
