"""One pass whose draws are secret: what the planners choose for it, and what it is charged."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import torch_dpsco as dp
from tests.algorithms.heavy_runs import DELTA, LOSS, PROBLEM, model, records
from torch_dpsco.accounting.events import ADJACENCIES, RandomAllocation, Repeat
from torch_dpsco.algorithms.heavy_tailed_numbers import OnePass, accelerated_plan
from torch_dpsco.errors import UtilityWarning
from torch_dpsco.step.chooser import noise_of_pass, numbers_of_steps, risk

CLASSES = [dp.AcceleratedSGD, dp.ClippedSGD, dp.ProximalSGD]
MOMENTS = dp.Problem(
    smoothness=1.0, strong_convexity=0.1, pl_constant=0.1, radius=2.0, moment=1.0, moment_order=3
)
pytestmark = pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")


def planned(cls: Any, adjacency: Any = "add_remove", n: int = 20_000, **changes: Any) -> Any:
    budget = dp.Budget(1.0, 1e-6, adjacency)
    kind = {"problem": PROBLEM, "clip": 1.0, "dim": 4, "sampling": "assigned", **changes}
    return cls.plan(n=n, budget=budget, **kind)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "changes",
    [{}, {"problem": MOMENTS, "clip": None}, {"lr": 0.1}, {"steps": 50}, {"batch_size": 300}],
)
def test_a_secret_pass_is_planned_with_its_own_noise(
    cls: Any, adjacency: Any, changes: dict[str, Any]
) -> None:
    plan = planned(cls, adjacency, **changes)
    assert plan.design.amplification
    assert plan.design.batches == plan.steps
    assert plan.event() == Repeat(RandomAllocation(plan.noise_multiplier, plan.steps), 1)
    assert 0.998 <= plan.epsilon() <= 1.0
    cut = planned(
        cls,
        adjacency,
        **changes
        | {"sampling": dp.Assigned(plan.batch_size, 20_000, amplification=False)}
        | {"steps": None, "batch_size": None},
    )
    assert plan.noise_multiplier < cut.noise_multiplier / 3


def test_the_number_of_steps_has_the_least_bound_of_those_that_are_tried() -> None:
    plan = planned(dp.AcceleratedSGD, problem=MOMENTS, clip=None)
    budget = dp.Budget(1.0, 1e-6, "add_remove")
    bounds = {}
    for steps in numbers_of_steps(20_000):
        rho = 0.5 / noise_of_pass(budget, steps) ** 2
        data = OnePass(20_000, 4, rho, 1.0, 3.0, adjacency="add_remove")
        bounds[steps] = accelerated_plan(data, smoothness=1.0, diameter=4.0, steps=steps).bound
    assert plan.steps == min(bounds, key=lambda steps: bounds[steps])
    assert 1 < plan.steps < 1024
    rho = 0.5 / plan.noise_multiplier**2
    data = OnePass(20_000, 4, rho, 1.0, 3.0, adjacency="add_remove")
    exact = accelerated_plan(data, smoothness=1.0, diameter=4.0, steps=plan.steps)
    assert plan.clip == pytest.approx(exact.clip, rel=1e-12)
    assert plan.lr == pytest.approx(exact.lr, rel=1e-12)


@pytest.mark.slow
def test_what_is_compared_is_near_the_noise_of_the_pass() -> None:
    budget = dp.Budget(1.0, 1e-6, "zero_out")
    for steps in (1, 16, 256):
        exact = planned(dp.ClippedSGD, "zero_out", steps=steps).noise_multiplier
        assert exact * (1 - 1e-9) <= noise_of_pass(budget, steps) <= 1.3 * exact


def test_more_noise_and_fewer_steps_are_worse() -> None:
    for momentum in (True, False):
        assert risk(1.0, 0.2, 50, 1.0, momentum) > risk(1.0, 0.1, 50, 1.0, momentum)
        assert risk(1.0, 0.1, 5, 1.0, momentum) > risk(1.0, 0.1, 50, 1.0, momentum)
    assert risk(1.0, 0.01, 50, 1.0, momentum=False) > risk(1.0, 0.01, 50, 1.0, momentum=True)


def test_only_what_is_said_of_the_chosen_steps_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UtilityWarning)
        plan = planned(dp.AcceleratedSGD, problem=MOMENTS, clip=None, n=200_000)
    assert plan.steps > 1


def test_a_pilot_keeps_the_charge_of_a_secret_pass() -> None:
    plan = planned(dp.AcceleratedSGD, adjacency="add_remove", clip=dp.Pilot(size=400))
    assert "RandomAllocation" in str(plan.event())
    assert plan.noise_multiplier < 2


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_secret_pass_is_charged_as_a_whole_in_its_first_step(cls: Any, adjacency: Any) -> None:
    layer = model()
    budget = dp.Budget(1.0, DELTA, adjacency)
    plan = cls.plan(
        problem=PROBLEM, n=120, budget=budget, clip=2.0, steps=4, dim=layer, sampling="assigned"
    )
    optimizer = cls(layer.parameters(), plan)
    used: list[int] = []
    for x, y, number in optimizer.loader(records(120), isolation="none"):
        optimizer.zero_grad()
        LOSS(layer(x), y).backward()
        optimizer.step()
        used += number.tolist()
        assert len(optimizer.accountant) == 1
        assert (
            budget.epsilon * (1 - 1e-3)
            <= optimizer.accountant.get_epsilon(DELTA)
            <= budget.epsilon
        )
    optimizer.finalize()
    assert optimizer.steps == 4
    assert sorted(used) == list(range(120))
    assert "amplified by random allocation" in str(optimizer.report())


@pytest.mark.slow
def test_a_kept_run_of_fit_is_one_secret_pass() -> None:
    layer = dp.attach(torch.nn.Linear(3, 1))
    plan = planned(dp.ClippedSGD, n=600)
    optimizer = dp.ClippedSGD(layer.parameters(), plan)
    data = torch.utils.data.TensorDataset(*records(600).tensors[:2])
    dp.fit(layer, optimizer, data, LOSS, progress=False)
    assert optimizer.finalized
    assert (optimizer.steps, len(optimizer.accountant)) == (plan.steps, 1)
    assert optimizer.report().epsilon <= 1.0


@pytest.mark.parametrize("cls", [dp.AcceleratedSGD, dp.ProximalSGD])
def test_a_theorem_of_one_pass_refuses_a_second(cls: Any) -> None:
    with pytest.raises(ValueError, match="passes must be 1 for"):
        planned(cls, sampling=dp.Assigned(100, 20_000, passes=2))
    with pytest.raises(ValueError, match=r"epochs must be 1 for one pass \(got 2\)"):
        planned(cls, epochs=2)
    with pytest.raises(ValueError, match="or sampling 'allocated' for several"):
        planned(dp.ClippedSGD, epochs=2)
