"""The mesh of ranks, and what a rank has to know about its place in it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lit_pretrain.distributed import _compat
from lit_pretrain.specs import ParallelDims


class RankMesh:
    """All ranks, arranged by axis: data parallelism outermost, then pipeline, then context, tensor innermost.

    Every rank makes it, once; it creates process groups.

    Args:
        dims: Sizes of the axes; their product is the world size.
        device_type: ``cpu`` or ``cuda``.
    """

    def __init__(self, dims: ParallelDims, *, device_type: str) -> None:
        assert dims.world_size == dist.get_world_size(), (dims, dist.get_world_size())
        self.dims = dims
        self.device_mesh = init_device_mesh(
            device_type, tuple(dims.sizes.values()), mesh_dim_names=tuple(str(axis) for axis in dims.sizes)
        )
        mesh = self.device_mesh
        both = dims.dp_replicate > 1 and dims.dp_shard > 1
        self._data = _compat.flatten(mesh["dp_replicate", "dp_shard"], "dp") if both else None
        # Ranks that share sequences hold parts of one model too, and their gradients add up: they shard it together.
        self._shard = mesh["dp_shard"] if dims.cp == 1 else mesh["cp"]
        if dims.cp > 1 and dims.dp_shard > 1:
            self._shard = _compat.flatten(mesh["dp_shard", "cp"], "dp_shard_cp")
        self._loss = self.data
        if dims.cp > 1:
            replicated = dims.dp_replicate > 1
            self._loss = _compat.flatten(mesh["dp_replicate", "dp_shard", "cp"], "dp_cp") if replicated else self._shard

    def sharding(self, *, replicated: bool = False) -> DeviceMesh:
        """Where parameters are sharded: one dimension, or two, replicate x shard, under hybrid sharding.

        Args:
            replicated: Nothing is sharded: then it is the one dimension over which parameters are replicated.
        """
        if replicated:
            return self.loss
        if self.dims.dp_replicate == 1:
            return self._shard
        return _compat.concatenate([self.device_mesh["dp_replicate"], self._shard])

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks over which parameters are sharded: they gather them together."""
        return self._shard.get_group()

    @property
    def data(self) -> DeviceMesh:
        """The ranks that read different data and share nothing else, in one dimension."""
        if self._data is not None:
            return self._data
        return self.device_mesh["dp_replicate" if self.dims.dp_replicate > 1 else "dp_shard"]

    @property
    def loss(self) -> DeviceMesh:
        """The ranks that see different targets, in one dimension: of other data, or of other parts of its sequences."""
        return self._loss

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that share each matrix."""
        return self.device_mesh["tp"]

    @property
    def data_rank(self) -> int:
        """This rank's place among those that read different data."""
        return self.data.get_local_rank()

    def coordinate(self, axis: str) -> int:
        """This rank's place along one axis."""
        return self.device_mesh.get_local_rank(axis)
