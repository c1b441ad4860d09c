"""What the stability callbacks refuse at construction, each with a sentence that names the setting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_pretrain.callbacks import (
    BatchSizeRamp,
    DataAnnealing,
    GradientStatistics,
    LossSpikeRollback,
    NonFiniteGuard,
    RunCounters,
)
from lit_pretrain.callbacks._measuring.tokens import own_tokens
from lit_pretrain.callbacks._rollback.alarm import Alarm
from lit_pretrain.errors import ConfigError
from lit_pretrain.spikes import MeanRule, RobustRule, RollbackPolicy

WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (GradientStatistics, {"every_n_steps": 2.5}, r"statistics\.every_n_steps=2\.5 must be a whole number"),
    (GradientStatistics, {"every_n_steps": True}, r"statistics\.every_n_steps=True must be a whole number"),
    (GradientStatistics, {"update_ratio": "no"}, r"statistics\.update_ratio='no' must be true or false"),
    (GradientStatistics, {"smoothing": math.nan}, r"statistics\.smoothing=nan must be a finite number"),
    (GradientStatistics, {"smoothing": 1.5}, r"statistics\.smoothing=1\.5 must be .* above 0 and at most 1"),
    (GradientStatistics, {"smoothing": "a"}, r"statistics\.smoothing='a' must be a finite number"),
    (DataAnnealing, {"num_points": 2.5}, r"annealing\.num_points=2\.5 must be a whole number"),
    (DataAnnealing, {"num_points": "5"}, r"annealing\.num_points='5' must be a whole number"),
    (DataAnnealing, {"num_points": 10**9}, r"annealing\.num_points=1000000000 must be at most 100"),
    (BatchSizeRamp, {"updates": 3, "start_share": "half"}, r"ramp\.start_share='half' must be a finite number"),
    (BatchSizeRamp, {"updates": 3, "start_share": 1.0}, r"ramp\.start_share=1\.0 must be below 1"),
    (NonFiniteGuard, {"activations": 1}, r"non_finite\.activations=1 must be true or false"),
    (NonFiniteGuard, {"max_reports": "5"}, r"non_finite\.max_reports='5' must be a whole number"),
    (RunCounters, {"clock": 3.0}, r"counters\.clock=3\.0 must be a function"),
    (LossSpikeRollback, {"detector": None}, r"spikes\.rule=None must be robust or mean, or a rule object"),
    (LossSpikeRollback, {"detector": 4}, r"spikes\.rule=4 must be robust or mean, or a rule object"),
    (LossSpikeRollback, {"monitor": 4}, r"rollback\.monitor=4 must be the name of a logged value"),
    (MeanRule, {"window": 10**30}, r"spikes\.mean\.window=1\d+ must be at most 1,000,000"),
    (RobustRule, {"window": 10**30}, r"spikes\.robust\.window=1\d+ must be at most 1,000,000"),
    (RobustRule, {"threshold": 10**400}, r"spikes\.robust\.threshold=10+ must be a finite number"),
    (RollbackPolicy, {"growth": 10**400}, r"rollback\.growth=10+ must be a finite number"),
    (RollbackPolicy, {"distance": 10**400}, r"rollback\.distance=10+ must be at most 1,000,000"),
    (RollbackPolicy, {"distance": 2.5}, r"rollback\.distance=2\.5 must be a whole number"),
    (RollbackPolicy, {"stretch": "200"}, r"rollback\.stretch='200' must be a whole number"),
    (RollbackPolicy, {"max_rollbacks": True}, r"rollback\.max_rollbacks=True must be a whole number"),
    (RollbackPolicy, {"lr_factor": "half"}, r"rollback\.lr_factor='half' must be a finite number"),
    (Alarm, {"timeout_s": "10"}, r"rollback\.alarm\.timeout_s='10' must be a finite number"),
    (Alarm, {"timeout_s": math.nan}, r"rollback\.alarm\.timeout_s=nan must be a finite number"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), WRONG)
def test_refused(kind: Callable[..., Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


@pytest.mark.parametrize("given", [None, "8", 1.5, -3, True, math.nan, math.inf, torch.ones(2), torch.tensor(True)])
def test_a_function_has_to_count_whole_tokens(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"tokens_per_batch gave .* a whole number of at least 0"):
        own_tokens(None, lambda batch: given)


@pytest.mark.parametrize("given", [8, 8.0, torch.tensor(8), torch.tensor([8])])
def test_what_is_whole_counts(given: Any) -> None:
    found = own_tokens(None, lambda batch: given)
    assert found == 8
    assert type(found) is int  # it goes into checkpoints and JSON
