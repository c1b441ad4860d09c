"""The pool that every distributed test stands on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from lit_pretrain.errors import RankError


@dataclass(frozen=True)
class Pair:
    rank: int
    tensor: torch.Tensor


def _environment() -> dict[str, str]:
    return dict(os.environ)


def _double(pair: Pair) -> Pair:
    return Pair(int(os.environ["RANK"]), 2 * pair.tensor)


def _sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return total.item()


def _is_initialized() -> bool:
    return dist.is_initialized()


def _leave_traces() -> None:
    os.environ["LEFT_BY_A_RANK"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)


def _traces() -> tuple[bool, str, torch.dtype]:
    return "LEFT_BY_A_RANK" in os.environ, os.getcwd(), torch.get_default_dtype()


def _fail_on(rank: int, folder: Path) -> None:
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == rank:
        raise ArithmeticError("the cause")
    dist.barrier()


def _hang_on(rank: int, folder: Path) -> None:
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))
    if dist.get_rank() == rank:
        _wait_for_the_other()


def _wait_for_the_other() -> None:
    dist.barrier()


def _kill_yourself(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _unpicklable() -> object:
    return lambda: None


def _start_a_child() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _gone(pid: int, *, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while _alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not _alive(pid)


def test_every_rank_gets_what_torchrun_gives(ranks, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "7")  # stale, from somebody else's job
    monkeypatch.setenv("SET_BY_THE_TEST", "yes")
    envs = ranks(3, _environment)
    assert [env["RANK"] for env in envs] == ["0", "1", "2"]
    assert [env["LOCAL_RANK"] for env in envs] == ["0", "1", "2"]
    assert {(env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"]) for env in envs} == {("3", "3", "0")}
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"], env["TORCHELASTIC_RUN_ID"]) for env in envs}) == 1
    assert all(env["SET_BY_THE_TEST"] == "yes" for env in envs)


def test_arguments_and_results_of_this_file_travel(ranks):
    pairs = ranks(2, _double, Pair(-1, torch.arange(3)))
    assert [pair.rank for pair in pairs] == [0, 1]
    assert all(pair.tensor.tolist() == [0, 2, 4] for pair in pairs)


def test_a_process_group_on_request(ranks):
    assert ranks(4, _sum_of_ranks, init=True) == [10.0] * 4
    assert ranks(1, _sum_of_ranks, init=True) == [1.0]
    assert ranks(2, _is_initialized) == [False, False]


def test_a_call_leaves_nothing_for_the_next(ranks):
    ranks(1, _leave_traces)
    assert ranks(1, _traces) == [(False, os.getcwd(), torch.float32)]
    assert "LEFT_BY_A_RANK" not in os.environ


def test_a_failing_rank_is_reported_and_the_others_end(ranks, tmp_path):
    start = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 1 of 3 failed: ArithmeticError: the cause") as caught:
        ranks(3, _fail_on, 1, tmp_path, init=True)
    assert time.monotonic() - start < 20.0
    assert "in _fail_on" in str(caught.value)
    assert all(_gone(int((tmp_path / rank).read_text())) for rank in "012")


def test_a_hang_shows_every_stack(ranks, tmp_path):
    with pytest.raises(RankError, match=r"ranks \[1\] of 2 were not done after 2 s") as caught:
        ranks(2, _hang_on, 1, tmp_path, init=True, timeout_s=2)
    assert "in _wait_for_the_other" in str(caught.value)
    assert all(_gone(int((tmp_path / rank).read_text())) for rank in "01")
    assert ranks(2, _sum_of_ranks, init=True) == [3.0, 3.0]


def test_a_killed_rank_is_named(ranks):
    with pytest.raises(RankError, match=r"^rank 1 of 2 failed: was killed by SIGKILL"):
        ranks(2, _kill_yourself, 1)


def test_a_result_that_cannot_travel_is_an_error(ranks):
    with pytest.raises(RankError, match=r"^rank 0 of 1 failed: .*[Pp]ickl"):
        ranks(1, _unpicklable)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_rank_started_ends_with_it(ranks):
    assert all(_gone(child) for child in ranks(2, _start_a_child))


def test_a_function_that_no_rank_can_import_is_refused(ranks):
    with pytest.raises(TypeError, match="top of a module"):
        ranks(2, lambda: None)


def test_the_server_keeps_to_one_thread(ranks):
    ranks(1, _is_initialized)
    assert ranks.hello["num_threads"] == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_server_ends_with_the_tests(tmp_path, repository):
    """Even when the test process is killed in the middle of a call."""
    program = """
        import sys, time
        from pathlib import Path
        sys.path.insert(0, {root!r})
        from tests.distributed.test_ranks_pool import _hang_on
        from tests.support.ranks import RankPool
        pool = RankPool()
        pool.start()
        Path({folder!r}, "server").write_text(str(pool._server.pid))
        pool(2, _hang_on, 1, Path({folder!r}), init=True, timeout_s=300)
    """
    code = textwrap.dedent(program).format(root=str(repository), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        end = time.monotonic() + 90.0
        while not all((tmp_path / name).exists() for name in ("server", "0", "1")) and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    pids = [int((tmp_path / name).read_text()) for name in ("server", "0", "1")]
    assert all(_gone(pid) for pid in pids)


def _fit(folder: Path) -> tuple[str, int, int, list[int], torch.Tensor]:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    class Linear(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1, bias=False)
            self.seen: list[int] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.seen += batch[:, 0].int().tolist()
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    data = torch.arange(8.0)[:, None].expand(8, 4)
    model = Linear()
    trainer = Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, DataLoader(data, batch_size=2, shuffle=False))
    environment = type(trainer.strategy.cluster_environment).__name__
    return environment, trainer.world_size, os.getppid(), model.seen, model.layer.weight.detach()


def test_lightning_trains_on_the_ranks_and_starts_none(ranks, tmp_path):
    first, second = ranks(2, _fit, tmp_path)
    assert first[0] == second[0] == "TorchElasticEnvironment"
    assert first[1] == second[1] == 2
    assert first[2] == second[2] == ranks.hello["pid"]
    assert sorted(first[3] + second[3]) == list(range(8))
    assert torch.equal(first[4], second[4])
