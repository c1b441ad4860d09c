"""One plain file of weights from a checkpoint folder.

::

    python -m lit_pretrain.distributed.checkpoint.export outputs/run/checkpoints/step-00000250 weights.pt

``torch.load("weights.pt")`` then gives a dict of names and tensors that ``GPT(config).load_state_dict`` takes as it is.
Every file that is read is checked, and no pickle is trusted. Without lit-pretrain, torch's own
``torch.distributed.checkpoint.format_utils.dcp_to_torch_save(FOLDER/tensors, OUT)`` gives the whole state as a file; it
unpickles the folder's index freely, so only use it on a folder of your own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from lit_pretrain.distributed.checkpoint import files
from lit_pretrain.distributed.checkpoint.contents import read_checkpoint
from lit_pretrain.distributed.checkpoint.manifest import CheckpointError
from lit_pretrain.distributed.checkpoint.tensors import Stream
from lit_pretrain.errors import ConfigError

MODEL = "model."  # of a checkpoint's names
PREFIX = "model."  # of a LightningModule that keeps its network under ``self.model``


def weights(folder: Path, *, prefix: str = PREFIX) -> dict[str, Tensor]:
    """The model's parameters and buffers by the names that the model itself gives them.

    Args:
        folder: A checkpoint folder.
        prefix: Where the LightningModule keeps the model; only names that begin with it are taken, without it. Empty:
            all names of the LightningModule.

    Raises:
        CheckpointError: The folder is damaged, or no name begins with ``prefix``.
    """
    _, tensors = read_checkpoint(folder, keys=lambda name: name.startswith(MODEL))
    names = [name.removeprefix(MODEL) for name in tensors]
    taken = {name.removeprefix(prefix): tensors[MODEL + name] for name in names if name.startswith(prefix)}
    if not taken:
        raise CheckpointError(f"--prefix={prefix!r} begins none of the names in {folder}, such as {names[:3]}.")
    return taken


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file, whole or not at all; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_pretrain.distributed.checkpoint.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkpoint folder")
    parser.add_argument("out", type=Path, metavar="OUT.pt", help="the file to write; replaced if it is there")
    parser.add_argument(
        "--prefix", default=PREFIX, help="take names that begin with this, without it (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    try:
        state = weights(given.folder, prefix=given.prefix)
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    temporary = given.out.with_name(files.temporary_name(given.out.name))
    try:
        sink = files.Sink(temporary)
        try:
            Stream(sink).save(state)
            sink.finish()
        finally:
            sink.close()
        temporary.replace(given.out)
        files.sync_folder(given.out.parent)
    except OSError as e:
        print(f"error: {given.out} could not be written ({e.strerror}).", file=sys.stderr)
        return 1
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{given.out}: {len(state)} tensors, {sum(tensor.numel() for tensor in state.values()):,} values")
    return 0


if __name__ == "__main__":
    sys.exit(main())
