"""Lightning strategies that shard and split ordinary LightningModules.

Importing this registers the names ``zero1``, ``zero2``, ``zero3``, ``tp``, ``pp`` and ``cp`` with Lightning, each for
all devices: ``Trainer(strategy="zero3", devices=8)``.
"""

if __name__ != "lit_pretrain.strategies":
    raise ImportError("strategies/ is part of lit-pretrain: import it as lit_pretrain.strategies.")

from lightning.pytorch.strategies import StrategyRegistry

from lit_pretrain.strategies.mesh_strategy import MeshStrategy
from lit_pretrain.strategies.presets import (
    ContextParallelStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)

__all__ = [
    "ContextParallelStrategy",
    "HybridParallelStrategy",
    "MeshStrategy",
    "PipelineParallelStrategy",
    "TensorParallelStrategy",
    "ZeROStrategy",
]

for _stage in (1, 2, 3):
    StrategyRegistry.register(f"zero{_stage}", ZeROStrategy, f"ZeRO stage {_stage}", override=True, stage=_stage)
StrategyRegistry.register("tp", TensorParallelStrategy, "Tensor parallelism over all devices", override=True)
StrategyRegistry.register("pp", PipelineParallelStrategy, "A pipeline over all devices", override=True)
StrategyRegistry.register("cp", ContextParallelStrategy, "Context parallelism over all devices", override=True)
