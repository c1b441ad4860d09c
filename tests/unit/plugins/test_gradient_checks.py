"""Looking at gradients of which a rank may hold nothing."""

import pytest
import torch

from lit_pretrain.plugins import gradient_checks

CPU = torch.device("cpu")


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_rank_that_holds_nothing_of_a_parameter(scale):
    nothing, some = torch.zeros(0, 3), torch.full((2,), 4.0)
    assert gradient_checks.unscale([nothing], scale=scale, device=CPU).item() == 0.0
    assert gradient_checks.unscale([nothing, some], scale=scale, device=CPU).item() == 0.0
    assert some.tolist() == [4.0 / scale] * 2
    some[1] = float("nan")
    assert gradient_checks.unscale([some, nothing], scale=scale, device=CPU).item() == 1.0
