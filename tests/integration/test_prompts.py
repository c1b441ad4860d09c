"""Prompts on the command line, and how text comes out."""

from __future__ import annotations

import pytest

from lit_pretrain.cli import main
from lit_pretrain.cli.generate import prepare_arguments, show


@pytest.mark.parametrize(
    "prompt",
    [
        "plain",
        "a, b",
        "[x] {y: 1}",
        "it's",
        'say "hi"',
        "a=b",
        "${seed}",
        "back\\slash\\",
        "tail\\\\",
        "$5",
        "two\nlines",
        "",
    ],
)
def test_a_prompt_is_text_not_grammar(prompt: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    (word,) = prepare_arguments([f"prompt={prompt}"])
    value = OverridesParser.create().parse_override(word).value()
    assert str(OmegaConf.create({"seed": 7, "prompt": value}).prompt) == prompt


class Terminal:
    def __init__(self, *, live: bool) -> None:
        self.live, self.pieces = live, [""]

    def isatty(self) -> bool:
        return self.live

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("live", [True, False])
def test_text_streams_to_a_terminal_and_characters_stay_whole(live: bool) -> None:
    tokens = list("né €!".encode())  # one token per byte
    out = Terminal(live=live)
    show("p:", tokens, lambda ids: bytes(ids).decode(errors="replace"), out)  # type: ignore[arg-type]
    assert "".join(out.pieces) == "p:né €!\n"
    written = [p for p in out.pieces if p]
    assert written == (["p:", "n", "é", " ", "€", "!", "\n"] if live else ["p:", "né €!", "\n"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["prompt=a", "prompts=[b]"], "prompt and prompts are both given"),
        (["prompts=a"], "prompts='a' must be a list of texts"),
        (["prompts=[a,null]"], "prompts[1]=None is no text; put quotes around each"),
        (["prompts=[1]"], "prompts[0]=1 is no text"),
        (["prompt_file=nowhere.txt"], "prompt_file=nowhere.txt cannot be read (No such file or directory)"),
        (["prompt_file=/dev/null"], "prompt_file=/dev/null holds no prompt"),
        (["format=xml"], "format=xml is unknown; use text or json."),
    ],
)
def test_prompts_that_cannot_be(capfd: pytest.CaptureFixture[str], words: list[str], sentence: str) -> None:
    code = main(["generate", "run=nowhere", *words])
    out, err = capfd.readouterr()
    assert (code, out) == (1, "")
    assert sentence in err
    assert err.count("\n") == 1
