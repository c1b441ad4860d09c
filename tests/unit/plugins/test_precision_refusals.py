"""What the plugin cannot do is refused before the first step; what it keeps in float32 is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.optim import LBFGS, SGD

from lit_pretrain.errors import ConfigError
from lit_pretrain.plugins import DynamicLossScaler, MasterWeightPrecision
from tests.support.precisions import Net, batches, trainer


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        (("fp8",), {}, "precision='fp8' is unknown here; use one of bf16, fp16, fp32"),
        (("bf16",), {"reduce_in": "bf16"}, "precision.reduce_in='bf16' is unknown; use fp32 or 16bit"),
        (("bf16",), {"keep_fp32": "model.norm"}, "precision.keep_fp32='model.norm' must be a list"),
        (("bf16",), {"scaler": DynamicLossScaler()}, "precision.scaler is for fp16"),
        (("bf16",), {"max_consecutive_overflows": 0}, "precision.max_consecutive_overflows=0 must be a whole number"),
    ],
)
def test_arguments(arguments: Any, settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MasterWeightPrecision(*arguments, **settings)


def test_a_flag_and_a_plugin_are_refused_naming_both() -> None:
    with pytest.raises(ValueError, match=r"precision=bf16-mixed.*MasterWeightPrecision\('fp16'\)"):
        trainer(precision="bf16-mixed", plugins=MasterWeightPrecision("fp16"))


def test_weights_that_are_not_float32() -> None:
    module = Net(batches=batches(1))
    module.net[2].bfloat16()
    with pytest.raises(
        ConfigError, match=r"keeps float32 master weights, but net\.2\.weight is bfloat16; build or load"
    ):
        trainer(plugins=MasterWeightPrecision("bf16")).fit(module)


def test_optimizers() -> None:
    with pytest.raises(ConfigError, match="does not work with LBFGS"):
        trainer(plugins=MasterWeightPrecision("bf16")).fit(Net(lambda p: LBFGS(p), batches=batches(1)))

    class Two(Net):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [SGD(self.net[0].parameters(), lr=0.1), SGD(self.net[2].parameters(), lr=0.1)]

    with pytest.raises(ConfigError, match="works with one optimizer, and configure_optimizers returned 2"):
        trainer(plugins=MasterWeightPrecision("fp16")).fit(Two(batches=batches(1)))


def test_lightnings_fsdp_is_refused() -> None:
    """By Lightning, when the trainer hands the plugin to the strategy."""
    strategy: Any = FSDPStrategy()
    with pytest.raises(TypeError, match=r"FSDPPrecision.*MasterWeightPrecision\('bf16'\)"):
        strategy.precision_plugin = MasterWeightPrecision("bf16")


def test_weights_that_another_strategy_sharded(ranks: Any) -> None:
    (text,) = ranks(1, sharded_elsewhere, init=True)
    assert text.startswith("MasterWeightPrecision('bf16') cannot make copies of weights that SingleDeviceStrategy has")
    assert "(net.0.weight)" in text


def sharded_elsewhere() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    module = Net(batches=batches(1))
    distribute_module(module.net, init_device_mesh("cpu", (1,)))
    with pytest.raises(ConfigError) as raised:
        trainer(plugins=MasterWeightPrecision("bf16")).fit(module)
    return str(raised.value)


class Normed(Net):
    """A norm and a loss of their own, that tell what they got."""

    def __init__(self) -> None:
        super().__init__(batches=batches(2))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1))
        self.seen: dict[str, Any] = {}
        self.net[1].register_forward_pre_hook(lambda m, _: self.seen.update(norm_weight=m.weight.dtype))
        self.net[2].register_forward_pre_hook(lambda m, x: self.seen.update(head_input=x[0].dtype))

    def criterion(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        product = output @ output.t()  # narrowed by autocast, unless it is off
        self.seen.update(criterion=(output.dtype, product.dtype))
        return (output - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.criterion(self.net(batch["x"]), batch["y"])


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_parts_that_stay_in_float32(kind: Any) -> None:
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    module = Normed()
    trainer(plugins=MasterWeightPrecision(kind)).fit(module)
    assert module.seen == {"norm_weight": narrow, "head_input": narrow, "criterion": (narrow, narrow)}
    module = Normed()
    plugin = MasterWeightPrecision(kind, keep_fp32=["net.1", "criterion"])
    before = module.net[1].weight.detach().clone()
    for _ in range(2):  # a second fit changes nothing more
        trainer(plugins=plugin).fit(module)
        wide = torch.float32
        assert module.seen == {"norm_weight": wide, "head_input": wide, "criterion": (wide, wide)}
    assert not torch.equal(module.net[1].weight, before)
    assert isinstance(module.net[1], nn.LayerNorm)
    assert module.net[1](torch.ones(1, 16)).dtype == torch.float32  # outside of training it is what it was


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("net.9", "precision.keep_fp32 has 'net.9', which names no part and no method of Normed"),
        ("other.*", "which names no part"),
    ],
)
def test_patterns_that_fit_nothing(pattern: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("*", r"\*")):
        trainer(plugins=MasterWeightPrecision("bf16", keep_fp32=[pattern])).fit(Normed())


def test_containers_are_never_called() -> None:
    class Listed(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(1, 1)])

    with pytest.raises(ConfigError, match=r"but layers is a container that is never called; name what is in it"):
        trainer(plugins=MasterWeightPrecision("bf16", keep_fp32=["layers"])).fit(Listed())


def test_fp32_changes_nothing() -> None:
    plain, plugged = Net(batches=batches(4)), Net(batches=batches(4))
    trainer().fit(plain)
    plugin = MasterWeightPrecision("fp32")
    trainer(plugins=plugin).fit(plugged)
    assert plugin.state_dict() == {}
    for a, b in zip(plain.parameters(), plugged.parameters(), strict=True):
        assert torch.equal(a, b)
