"""An estimator with the loss of a stranger (tests/outside): in blocks, for users, in plans and previews."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import torch_dpsco as dp
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.objectives import LinearObjective
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.task import LinearTask
from torch_dpsco.step.plan import Plan

N = 4000
FILE = Path(__file__).parents[1] / "outside" / "stranger" / "estimator.py"


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stranger_estimator", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def table() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = rng.uniform(-1, 1, (N, 2)) / math.sqrt(2)
    return rows, rng.poisson(np.exp(1 + rows @ [1.5, -1.0])).astype(np.float64)


def test_the_same_model_is_fitted_to_blocks_and_to_users(theirs: ModuleType) -> None:
    rows, counts = table()
    model = theirs.PoissonRegressor(epsilon=4.0, n=N, bound_x=1.0, bound_y=20.0)
    blocks = lambda: iter([(rows[:2000], counts[:2000]), (rows[2000:], counts[2000:])])  # noqa: E731
    assert model.fit(blocks).score(rows, counts) > 0.2
    users = theirs.PoissonRegressor(epsilon=4.0, n=N // 2, bound_x=1.0, bound_y=20.0)
    users.fit(rows, counts, groups=np.arange(N) // 2)
    assert users.plan_.unit == "user"
    assert np.isfinite(users.coef_).all()


def test_plans_with_a_loss_of_ones_own_are_saved_and_read(theirs: ModuleType) -> None:
    for mechanism in ("objective", "output", "noisy_gd", "preconditioned_gd"):
        model = theirs.PoissonRegressor(n=N, bound_x=1.0, bound_y=20.0, mechanism=mechanism)
        plan = model.plan(2)
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    problem = theirs.CappedPoisson(cap=4.0).problem(bound_x=1.0, radius=2.0)
    plan = dp.HolderSGD.plan(problem=problem, n=N, budget=dp.Budget(1.0, 1e-6))
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_preview_scores_a_loss_that_is_of_no_residual_by_itself(theirs: ModuleType) -> None:
    rows, counts = table()
    model = theirs.PoissonRegressor(epsilon=4.0, n=N, bound_x=1.0, bound_y=20.0)
    found = model.preview(rows, counts, epsilons=[4.0], runs=3)
    assert set(found.scores) == {"mean loss"}
    assert found.not_private["mean loss"] < found.constant["mean loss"]


def test_a_loss_of_several_scores_that_is_not_the_softmax_is_refused() -> None:
    class Other(dp.losses.SoftmaxCrossEntropy.__bases__[0]):  # type: ignore[misc]
        num_scores = 3
        target_kind = "class"
        value = derivative = None
        holder_exponent = lambda self: 1.0  # noqa: E731
        holder_constant = loss_at_zero = grad_bound = lambda self, *given: 1.0

    with pytest.raises(ConditionError, match="of one score, or the softmax"):
        LinearTask(
            loss=Other(), preparation=Preparation(1.0), dim=2, n=9, budget=dp.Budget(1.0, 1e-6)
        )


def test_the_bound_on_slopes_is_that_for_the_targets_there_are(theirs: ModuleType) -> None:
    class Wide(theirs.CappedPoisson):  # type: ignore[misc,name-defined]
        def grad_bound(self, radius: float, bound_x: float, bound_y: float) -> float:
            return bound_x * max(self.cap, bound_y)

        def derivative(self, score: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return score.exp().clamp(max=self.cap) - target

    targets = torch.tensor([50.0, 0.0])
    wide = LinearObjective(
        Wide(cap=2.0), Records(torch.eye(2), targets), reg=1.0, normalizer=1.0
    )
    assert wide.slope_mass(1e9) >= 50 + 2


def test_promises_of_a_loss_decide_which_mechanisms_take_it(theirs: ModuleType) -> None:
    given = {"epsilon": 1.0, "n": N, "bound_x": 1.0, "bound_y": 20.0}
    for mechanism, match in (("adassp", "squared loss"), ("boosted_adassp", "squared loss")):
        with pytest.raises(ConditionError, match=match):
            theirs.PoissonRegressor(mechanism=mechanism, **given).plan(2)
    with pytest.raises(ConditionError, match="has no summary"):
        theirs.PoissonRegressor(**given).summary()
