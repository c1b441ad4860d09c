"""Whether a run begins, goes on or is finished: decided before any process starts. Loads no torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from lit_pretrain.cli import launch
from lit_pretrain.cli.claim import InUseError
from lit_pretrain.distributed.checkpoint import catalog
from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate import checkpoints
from lit_pretrain.instantiate.checkpoints import CheckpointFacts
from lit_pretrain.instantiate.identity import KEY, differences, refuse

NEVER, AUTO = "never", "auto"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What becomes of a command.

    Args:
        kind: ``new``, ``resume`` or ``finished``.
        checkpoint: Where it goes on; None for a new run.
        step: Updates done there.
    """

    kind: Literal["new", "resume", "finished"]
    checkpoint: Path | None = None
    step: int = 0


def decide(config: Mapping[str, Any], run_dir: Path, *, named: bool, say: Callable[[str], None]) -> Decision:
    """Decide, by what there is on the disk.

    Args:
        config: The resolved configuration, plain containers.
        run_dir: The run folder, ours already.
        named: Whether the user named the run.
        say: Told what happens, and what was passed over.

    Raises:
        ConfigError: The setting is wrong, or the checkpoint is of another run.
        InUseError: The folder holds an earlier run that this one would write over.
    """
    word, accepted = _words(config)
    own = run_dir / checkpoints.FOLDER
    if word == NEVER:
        if accepted:
            raise ConfigError("resume_accept needs a run to go on with: add resume=auto or resume=PATH.")
        _refuse_earlier(own, run_dir, named=named)
        return Decision(kind="new")
    if word == AUTO and not named:
        raise ConfigError("resume=auto needs the name of the run to go on with: add run_id=NAME.")
    source = run_dir if word == AUTO else Path(word).expanduser()
    found = _find(source, auto=word == AUTO, say=say)
    if found is None:
        say(f"no checkpoint in {own}: the run begins at its start.")
        return Decision(kind="new")
    if found.path.absolute().parent != own.absolute():
        _refuse_earlier(own, run_dir, named=named)
    elif found.path.absolute() != checkpoints.listed(own)[-1].path.absolute() and word != AUTO and source != run_dir:
        raise InUseError(
            f"resume={word} is not the newest checkpoint of {run_dir}, and going on from it would write over the newer "
            f"ones; choose another run_id=...."
        )
    old = made_with(found.path)
    if old is not None:
        refuse(differences(old, config), accepted, of=str(found.path))
    step = found.step or 0
    if found.path.absolute().parent == own.absolute() and _is_finished(config, old, run_dir, step):
        say(
            f"{run_dir} is finished: {step:,} updates, all that were asked for; nothing to do. A longer length.* goes "
            f"on from there."
        )
        return Decision(kind="finished", checkpoint=found.path, step=step)
    updates = _length(config)[0]
    if isinstance(updates, int) and 0 < updates <= step:
        raise ConfigError(
            f"{found.path} stands at update {step:,}, and length.* asks for {updates:,} in all: nothing is left to "
            "train; ask for more."
        )
    extended = old is not None and _length(old) != _length(config)
    more = " with another length, which was accepted" if extended else ""
    say(f"goes on from {found.path}, update {step:,}{more}.")
    return Decision(kind="resume", checkpoint=found.path, step=step)


def _words(config: Mapping[str, Any]) -> tuple[str, list[str]]:
    word, accepted = config.get("resume", NEVER), config.get("resume_accept") or []
    if not isinstance(word, str) or not word.strip():
        raise ConfigError(f"resume={word!r} must be auto, never or the path of a checkpoint or of a run folder.")
    if isinstance(accepted, str):
        accepted = [accepted]
    if not isinstance(accepted, list) or not all(isinstance(key, str) for key in accepted):
        raise ConfigError(f"resume_accept={accepted!r} must list settings, such as [optimizer.lr,schedule].")
    return word, accepted


def _refuse_earlier(own: Path, run_dir: Path, *, named: bool) -> None:
    saved = checkpoints.listed(own)
    if saved:
        go_on = "go on with it by resume=auto, " if named else ""
        raise InUseError(
            f"{run_dir} holds an earlier run with the checkpoint {saved[-1].path.name}, which this run would write "
            f"over; {go_on}choose another run_id=..., or move that folder away."
        )


def _find(source: Path, *, auto: bool, say: Callable[[str], None]) -> CheckpointFacts | None:
    """The checkpoint to go on from; None where a run folder of ``auto`` holds none at all."""
    if not auto and (source.is_file() or catalog.is_checkpoint(source)):
        problem = checkpoints.look(source).problem or checkpoints.damage(source)
        if problem:
            raise ConfigError(f"resume={source} cannot be used: {problem.rstrip('.')}; choose another.")
        return checkpoints.look(source)
    folder = source / checkpoints.FOLDER
    if not auto and not source.exists():
        raise ConfigError(f"resume={source} does not exist; name a checkpoint or a run folder, or use auto or never.")
    found = checkpoints.newest(folder, say=say)
    if found is not None:
        return found
    damaged = len(checkpoints.listed(folder))
    if damaged:
        raise ConfigError(
            f"none of the {damaged} checkpoints in {folder} can be read; begin another run with run_id=..., or move "
            f"that folder away."
        )
    if not auto:
        raise ConfigError(f"resume={source} holds no checkpoint; name a checkpoint or the folder of a run.")
    return None


def made_with(path: Path) -> dict[str, Any] | None:
    """The configuration that a checkpoint was made with; None where only the ranks can read it, or nobody."""
    if path.is_dir():
        kept = catalog.plain(path, KEY)
        return kept["config"] if isinstance(kept, dict) and isinstance(kept.get("config"), dict) else None
    try:
        config = yaml.safe_load((path.parent.parent / launch.RESOLVED).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    return config if isinstance(config, dict) else None


def _length(config: Mapping[str, Any]) -> tuple[Any, Any]:
    trainer = config.get("trainer") or {}
    return trainer.get("max_steps"), trainer.get("max_epochs")


def _is_finished(config: Mapping[str, Any], old: Mapping[str, Any] | None, run_dir: Path, step: int) -> bool:
    updates, epochs = _length(config)
    if isinstance(updates, int) and updates > 0:
        return step >= updates
    result = read_result(run_dir)
    ended = result.get("ended", "finished") == "finished" and result.get("steps") == step
    return ended and old is not None and _length(old)[1] == epochs


def read_result(run_dir: Path) -> dict[str, Any]:
    """What a run left at its end; without one, or with a damaged one, no metrics."""
    try:
        result = json.loads((run_dir / launch.RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"metrics": {}}
    return result if isinstance(result, dict) and isinstance(result.get("metrics"), dict) else {"metrics": {}}


def again(words: Sequence[str], run_dir: Path, output_root: object) -> str:
    """The command line that goes on with a run.

    Args:
        words: Overrides that began it.
        run_dir: Its folder.
        output_root: The folder of all runs.
    """
    root, folder = Path(str(output_root)).expanduser().absolute(), run_dir.absolute()
    name = str(folder.relative_to(root)) if folder.is_relative_to(root) else folder.name
    kept = [word for word in words if word.partition("=")[0] not in ("run_id", "resume", "resume_accept")]
    return shlex.join(["lit-pretrain", "train", *kept, f"run_id={name}", "resume=auto"])
