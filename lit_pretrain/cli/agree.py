"""Ranks that torchrun or srun started agree on one configuration and one decision before anything else happens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lit_pretrain.cli.ranks import External
from lit_pretrain.errors import ConfigError
from lit_pretrain.instantiate.identity import changes

TIMEOUT_S = 120.0
"""For every rank to compose its configuration: they start together."""
HEARD_S = 10.0
"""For a rank to read a refusal."""
PREFIX = "lit_pretrain"
OWN = ("cache_dir", "data.corpus.cache_dir")
"""Settings that may differ between machines."""


def join(outer: External) -> Any:
    """The store that the ranks share; keep it for as long as the run lives.

    torchrun's agent serves one. Otherwise rank 0 serves it where torch's own rendezvous will look for it later: in the
    same process both are one.

    Args:
        outer: What started this process.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    env = os.environ
    if outer.by == "srun" and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        from lightning.fabric.plugins.environments import (  # type: ignore[attr-defined]
            SLURMEnvironment,
        )

        place = SLURMEnvironment(auto_requeue=False)
        address, port = place.main_address, place.main_port
    else:
        address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    served = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        address,
        port,
        is_master=outer.rank == 0 and not served,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timedelta(seconds=TIMEOUT_S),
    )


def agreed(
    store: Any, outer: External, config: Callable[[], Mapping[str, Any]], decide: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Rank 0's decision, on every rank; or the same refusal on every rank.

    Args:
        store: Of :func:`join`.
        outer: What started this process.
        config: Gives this rank's configuration.
        decide: What rank 0 does once all configurations are the same; its result is plain JSON.

    Raises:
        ConfigError: A rank has another configuration than rank 0 or none, or ``decide`` refused.
        Exception: What ``config`` raised, on the rank where it did.
    """
    base = f"{PREFIX}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    mine, failure = _mine(config)
    store.set(f"{base}/config/{outer.rank}", json.dumps(mine))
    if outer.rank == 0:
        verdict: dict[str, Any] = {}
        try:
            _compare(store, base, outer.world_size, mine)
            verdict["decision"] = decide()
        except BaseException as e:
            verdict["refused"] = str(e) or type(e).__name__
            _tell(store, base, outer.world_size, verdict)
            raise (failure or e) from None
        store.set(f"{base}/verdict", json.dumps(verdict))
        return dict(verdict["decision"])
    verdict = json.loads(_get(store, f"{base}/verdict", rank=0))
    store.set(f"{base}/read/{outer.rank}", "1")
    if failure is not None:
        raise failure
    if "refused" in verdict:
        raise ConfigError(verdict["refused"])
    return dict(verdict["decision"])


def _mine(config: Callable[[], Mapping[str, Any]]) -> tuple[dict[str, Any], Exception | None]:
    try:
        # A value that JSON has no word for differs by its text.
        return {"config": json.loads(json.dumps(config(), default=str))}, None
    except Exception as e:
        return {"error": str(e)}, e


def _compare(store: Any, base: str, world_size: int, first: Mapping[str, Any]) -> None:
    for rank in range(world_size):
        other = first if rank == 0 else json.loads(_get(store, f"{base}/config/{rank}", rank=rank))
        if "error" in other:
            raise ConfigError(f"rank {rank} has no configuration: {' '.join(other['error'].split())}")
        found = [one for one in changes(first["config"], other["config"]) if one.key not in OWN]
        if found:
            words = "; ".join(f"{one.key} is {one.new} there and {one.old} on rank 0" for one in found[:3])
            more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
            raise ConfigError(
                f"rank {rank} was started with other settings: {words}{more}; start every rank with the same words."
            )


def _tell(store: Any, base: str, world_size: int, verdict: Mapping[str, Any]) -> None:
    """Let every rank hear a refusal: the store may end with this process, and torchrun ends the others with it."""
    store.set(f"{base}/verdict", json.dumps(verdict))
    for rank in range(1, world_size):
        with suppress(Exception):  # one that is gone already
            store.wait([f"{base}/read/{rank}"], timedelta(seconds=HEARD_S))


def _get(store: Any, key: str, *, rank: int) -> bytes:
    try:
        value: bytes = store.get(key)
    except Exception as e:
        raise ConfigError(
            f"rank {rank} did not say within {TIMEOUT_S:.0f} s what it was started with; look at its output."
        ) from e
    return value
