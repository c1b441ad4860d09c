"""Settings that follow from the user's words. Pure functions: no torch, no Hydra, no Lightning."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_pretrain.errors import ConfigError


def visible_gpus(environment: Mapping[str, str] | None = None, devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that a process started now would see, without loading torch.

    Args:
        environment: Where ``CUDA_VISIBLE_DEVICES`` is read; the process's own by default.
        devices: Folder of the device files.
    """
    listed = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    present = sum(1 for p in devices.glob("nvidia[0-9]*") if p.name[6:].isdigit())
    if listed is None or not present:
        return present
    names = [n.strip() for n in listed.split(",")]
    count = 0
    for n in names:
        if not n or n.startswith("-"):  # CUDA stops reading at the first invalid entry
            break
        count += 1
    return count


def num_devices(devices: object, accelerator: str, gpus: int) -> int:
    """Processes on this machine.

    Args:
        devices: ``trainer.devices``: a count, a list of indices, ``auto`` or -1.
        accelerator: ``trainer.accelerator``.
        gpus: GPUs there are.

    Raises:
        ConfigError: No whole number of at least 1 follows.
    """
    if isinstance(devices, str) and devices not in ("auto", "-1"):
        pieces = devices.strip("[] ").split(",")
        if len(pieces) > 1 and all(p.strip().isdigit() for p in pieces if p.strip()):
            return len([p for p in pieces if p.strip()])  # Lightning reads "0," and "0,2" as indices
        if devices.isdigit():
            devices = int(devices)
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        if not devices:
            raise ConfigError("trainer.devices=[] names no device; give a count, a list of indices or auto.")
        return len(devices)
    if devices in ("auto", -1, "-1"):
        return max(1, gpus) if accelerator in ("auto", "gpu", "cuda") else 1
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ConfigError(
            f"trainer.devices={devices!r} must be a whole number of at least 1, a list of device indices, or auto."
        )
    return devices


def whole(name: str, value: object, *, least: int = 1) -> int:
    """``value`` as an int; ``2e9`` counts as a whole number.

    Raises:
        ConfigError: It is not a whole number of at least ``least``.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}.")
    return value


def run_name(name: object) -> str:
    """The name of a run, which is that of its folder below ``output_root``.

    Raises:
        ConfigError: It is none, or leads out of that folder.
    """
    if isinstance(name, (Mapping, Sequence)) and not isinstance(name, str):
        raise ConfigError(f"run_id={name!r} must be a name, such as run_id=first.")
    text = "" if name is None else str(name)
    if not text.strip():
        raise ConfigError(f"run_id={name!r} must name a folder, such as run_id=first; or leave it out.")
    if text.startswith(("/", "~")) or any(part in ("", ".", "..") for part in text.rstrip("/").split("/")):
        raise ConfigError(f"run_id={text!r} must lie below output_root; name another folder with output_root=....")
    if "=" in text or not text.isprintable():
        raise ConfigError(f"run_id={text!r} must have neither '=' nor control characters; use letters, digits and -.")
    return text


def accumulation(global_batch_size: object, micro_batch_size: object, data_parallel_size: object) -> int:
    """Microbatches per update on each data-parallel rank.

    Args:
        global_batch_size: Sequences per update.
        micro_batch_size: Sequences per forward pass on each rank.
        data_parallel_size: Ranks that read different data.

    Raises:
        ConfigError: The first is no multiple of the product of the others.
    """
    batch = whole("batch.global_batch_size", global_batch_size)
    micro = whole("batch.micro_batch_size", micro_batch_size)
    per_pass = micro * whole("batch.data_parallel_size", data_parallel_size)
    if batch % per_pass:
        below, above = batch // per_pass * per_pass, -(-batch // per_pass) * per_pass
        use = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"batch.global_batch_size={batch} must be a multiple of batch.micro_batch_size={micro} x "
            f"batch.data_parallel_size={data_parallel_size}; use {use}, or another micro batch."
        )
    return batch // per_pass


def tokens_per_update(global_batch_size: object, sequence_length: object) -> int:
    """Tokens of one update over all ranks."""
    return whole("batch.global_batch_size", global_batch_size) * whole("batch.sequence_length", sequence_length)


def max_steps(steps: object, tokens: object, epochs: object, tokens_per_update: int) -> int:
    """Updates to train for, from whichever length the user gave; -1 when it is given in epochs.

    Raises:
        ConfigError: None is given, or two that disagree.
    """
    given: dict[str, int] = {}
    if steps is not None:
        given["length.steps"] = whole("length.steps", steps)
    if tokens is not None:
        # Round up: at least the tokens asked for.
        given["length.tokens"] = -(-whole("length.tokens", tokens) // tokens_per_update)
    if epochs is not None:
        whole("length.epochs", epochs)
        if given:
            other = next(iter(given))
            value = steps if other == "length.steps" else tokens
            raise ConfigError(f"length.epochs={epochs} and {other}={value} are both given; set one of them to null.")
        return -1
    if not given:
        raise ConfigError("no length of training is given; set one of length.steps, length.tokens and length.epochs.")
    if len(set(given.values())) > 1:
        raise ConfigError(
            f"length.steps={steps} and length.tokens={tokens} disagree: {tokens} tokens are "
            f"{given['length.tokens']} steps of {tokens_per_update} tokens; set one of them to null."
        )
    return next(iter(given.values()))


def max_epochs(epochs: object) -> int:
    """``trainer.max_epochs``: the epochs asked for, or -1 (no limit) when the length is given otherwise."""
    return -1 if epochs is None else whole("length.epochs", epochs)


def every_microbatches(name: str, steps: object, accumulation: int) -> int:
    """An interval in updates as an interval in microbatches, the unit of Lightning's ``val_check_interval``."""
    return whole(name, steps) * accumulation


def single_device(accelerator: str, gpus: int) -> str:
    """The one device that ``strategy=single`` trains on, as torch names it."""
    if accelerator in ("gpu", "cuda") or (accelerator == "auto" and gpus):
        return "cuda:0"
    return "mps" if accelerator == "mps" else "cpu"
