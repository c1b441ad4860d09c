"""The processes of a mesh strategy: how they start, find each other and talk."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor

from lit_pretrain.distributed.mesh import RankMesh
from lit_pretrain.errors import ConfigError
from lit_pretrain.specs import ParallelDims
from lit_pretrain.strategies import _compat

T = TypeVar("T")
Launcher = Literal["script", "spawn", "fork"]


class MeshProcesses(ParallelStrategy):
    """One process per device, arranged in a mesh.

    Args:
        sizes: Axis to size; None for one that takes what the others leave.
        launcher: How processes start where nothing else (torchrun, srun, the command line) starts them: ``script``
            runs the program again for each device, ``spawn`` and ``fork`` start functions.
        timeout_s: How long a rank waits for another before it gives up, in seconds.
    """

    # Without it Lightning gives a strategy that is not its own no DistributedSampler: the same data on every rank.
    is_distributed = True

    def __init__(
        self, *, sizes: dict[str, int | None], launcher: Launcher = "script", timeout_s: float = 1800.0
    ) -> None:
        super().__init__()
        if launcher not in ("script", "spawn", "fork"):
            raise ConfigError(f"strategy.launcher={launcher!r} must be one of script, spawn, fork.")
        if not timeout_s > 0:
            raise ConfigError(f"strategy.timeout_s={timeout_s!r} must be above 0.")
        self._sizes, self._kind, self._timeout = sizes, launcher, timedelta(seconds=timeout_s)
        self.num_nodes = 1
        self._mesh: RankMesh | None = None

    @property
    def dims(self) -> ParallelDims:
        """Sizes of the axes, for the processes that the trainer asks for.

        Raises:
            ConfigError: They do not fit; listing what would.
        """
        return ParallelDims.fit(self.num_processes * self.num_nodes, **self._sizes)

    @property
    def mesh(self) -> RankMesh:
        """The mesh of ranks, once processes have found each other."""
        if self._mesh is None:
            raise RuntimeError("The mesh of ranks exists only after the strategy has set up its processes.")
        return self._mesh

    @property
    def root_device(self) -> torch.device:
        """Where this rank computes."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This rank's share of the data: ranks that share matrices, layers or sequences have the same."""
        return {"num_replicas": self.mesh.dims.data_parallel_size, "rank": self.mesh.data_rank}

    @property
    def num_loss_ranks(self) -> int:
        """Ranks whose losses add up to the global batch's."""
        return self.mesh.loss.size()

    def _check_before_launch(self) -> None:
        """Refuse what cannot run, while there is one process."""

    def _configure_launcher(self) -> None:
        _ = self.dims  # refused here, before any process starts
        assert self.cluster_environment is not None
        if self.cluster_environment.creates_processes_externally:
            self._check_environment(self.cluster_environment)
            return
        if self._kind == "script":
            self._launcher = _compat.CheckedScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes, check=self._check_before_launch
            )
        else:
            self._launcher = _compat.CheckedForkLauncher(self, check=self._check_before_launch, start_method=self._kind)

    def _check_environment(self, environment: ClusterEnvironment) -> None:
        """Refuse variables that do not belong to this run, before ranks wait for others that nobody starts."""
        world, local = self.num_processes * self.num_nodes, environment.local_rank()
        sizes = f"trainer.devices={self.num_processes} x trainer.num_nodes={self.num_nodes}"
        if isinstance(environment, LightningEnvironment):
            if world > 1 and "MASTER_PORT" not in os.environ:
                raise ConfigError(
                    f"LOCAL_RANK={local} says that something else starts the {world} ranks, but MASTER_PORT, by which "
                    "they would find each other, is not set; unset LOCAL_RANK if an earlier run has left it behind."
                )
        elif environment.world_size() != world:
            raise ConfigError(
                f"The launcher says there are {environment.world_size()} ranks, but {sizes} is {world}; make them "
                "equal, or unset stale variables such as WORLD_SIZE or SLURM_NTASKS."
            )
        if not 0 <= local < self.num_processes:
            raise ConfigError(
                f"This process is number {local} on its machine, but {sizes} has only numbers below "
                f"{self.num_processes}; unset LOCAL_RANK or SLURM_LOCALID if an earlier run has left them behind."
            )

    def set_world_ranks(self, process_idx: int | None = None) -> None:
        """Tell the cluster environment and Lightning which rank this is.

        Args:
            process_idx: Place on this machine, where a launcher has just made the process.
        """
        assert self.cluster_environment is not None
        if process_idx is not None:
            os.environ["LOCAL_RANK"] = str(process_idx)
        local = self.local_rank if process_idx is None else process_idx
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + local)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        _compat.tell_rank_zero(self.global_rank)

    def _worker_setup(self, process_idx: int) -> None:
        self.set_world_ranks(process_idx)

    def setup_environment(self) -> None:
        """Find the other processes and make the mesh."""
        super().setup_environment()
        assert self.cluster_environment is not None
        if not dist.is_initialized():
            self.set_world_ranks()
            assert self.cluster_environment.world_size() == self.dims.world_size
            _compat.init_process_group(self.cluster_environment, device=self.root_device, timeout=self._timeout)
        if self._mesh is None:
            self._mesh = RankMesh(self.dims, device_type=self.root_device.type)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            on_cuda = self.root_device.type == "cuda"
            dist.barrier(device_ids=[self.root_device.index] if on_cuda else None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Rank ``src``'s object, on every rank."""
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks that see different targets, unless a group is given. Other than tensors pass as is."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        return _compat.reduce_over(tensor, group if group is not None else self._loss_group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over the ranks that see different targets, unless a group is given; (ranks, ...)."""
        return super().all_gather(tensor, group=group if group is not None else self._loss_group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all, or any, of all ranks say yes."""
        if not dist.is_initialized():
            return decision
        vote = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(vote, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(vote)

    @property
    def _loss_group(self) -> Any:
        return self.mesh.loss.get_group()
