"""``lit-pretrain VERB [Hydra overrides]``.

This file answers before anything heavy is loaded: Hydra only once a verb is known, torch and Lightning only in the
processes that train.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

VERBS = {
    "prepare": "turn your own text into shards to train on",
    "train": "pretrain a model, or several with -m",
    "explain": "what train would do with the same words, and what is wrong or doubtful about it",
    "generate": "continue prompts with a trained model",
    "evaluate": "how well a trained model predicts its held-out text, or any other",
    "inspect": "what a run is, how it ended, and which of its checkpoints can be read",
}

EXAMPLES = """\
examples:
  lit-pretrain train experiment=demo
  lit-pretrain train model=gpt2-124m data=shards data.corpus.sources="{web: FOLDER}" length.tokens=1e9
  lit-pretrain train -m optimizer.lr=1e-3,3e-4 length.steps=1000 trainer.devices=2 strategy=ddp
  lit-pretrain explain model=gpt2-124m length.tokens=10e9 explain.device=H100
  lit-pretrain generate run=outputs/RUN prompt="Once upon a time"
  lit-pretrain evaluate run=outputs/RUN text=FILE
  lit-pretrain inspect outputs/RUN
"""


def usage() -> str:
    """What the command prints without arguments."""
    rows = "\n".join(f"  {verb:<10}{text}" for verb, text in VERBS.items())
    return (
        "usage: lit-pretrain VERB [flags] [group=option] [setting=value] ...\n\n"
        f"verbs:\n{rows}\n\n{EXAMPLES}\n"
        "lit-pretrain VERB --help shows a verb's groups and settings; --version the version.\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Console entry.

    Args:
        arguments: Words after the command's name; those of the process by default.

    Returns:
        The exit code: 0; 1 for a failed run or a refused setting; 2 for a wrong verb or flag; 75 for a run that a
        signal ended after it had saved; 130 after Ctrl-C; 128 + n after signal n.
    """
    try:
        code = _main(list(sys.argv[1:] if arguments is None else arguments), is_command=arguments is None)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, a closed pager) has enough
        # What is left in the buffer goes nowhere; else Python complains about it when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:  # while modules were being loaded: later it is met where it can be told from other ends
        print("lit-pretrain: interrupted.", file=sys.stderr)
        return 130
    return code


def _main(argv: list[str], *, is_command: bool) -> int:
    if {"-sc", "--shell-completion"} & set(argv):
        return _complete(argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0
    if argv[0] == "--version":
        from lit_pretrain import __version__

        print(f"lit-pretrain {__version__}")
        return 0
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        print(f"lit-pretrain: {_not_a_verb(verb, rest)}", file=sys.stderr)
        return 2
    from lit_pretrain.cli import early

    # A program that calls main() with words of its own has most likely loaded torch already.
    with early.started(verb, rest) if is_command else nullcontext():
        from lit_pretrain.cli.app import run_verb

        return run_verb(verb, rest)


def _not_a_verb(word: str, rest: Sequence[str]) -> str:
    from lit_pretrain.instantiate.nearest import nearest

    if "=" in word or word.startswith("-"):
        line = " ".join(["lit-pretrain train", word, *rest])
        return f"a verb must come first ({', '.join(VERBS)}); did you mean: {line}"
    return f"{word!r} is not a verb; {nearest(word, VERBS)}"


def _complete(argv: list[str]) -> int:
    """Shell completion.

    Hydra's shell script calls ``lit-pretrain -sc query=bash`` with the whole line in COMP_LINE; Hydra must see it
    without the verb. ``-sc install=bash`` and ``uninstall=bash`` are the same for every verb.
    """
    from lit_pretrain.cli.app import environment, run_verb

    argv = [word for word in argv if word not in VERBS]
    line = os.environ.get("COMP_LINE")
    if line is None:
        return run_verb("train", argv)
    words = line.split(" ")
    if len(words) < 3 or words[1] not in VERBS:
        begun = words[1] if len(words) > 1 else ""
        print(" ".join(verb for verb in VERBS if verb.startswith(begun)))
        return 0
    point = int(os.environ.get("COMP_POINT") or len(line)) - len(words[1]) - 1
    with environment(COMP_LINE=" ".join([words[0], *words[2:]]), COMP_POINT=str(max(0, point))):
        return run_verb(words[1], argv)
