"""The default regularizer of output perturbation: its bound holds, it is the least, and it is feasible."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_dpsco as dp
from torch_dpsco.errors import CalibrationError
from torch_dpsco.estimators import output as least_risk
from torch_dpsco.estimators.objectives import LinearObjective
from torch_dpsco.estimators.output import _risk, least_risk_reg, plan_output
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.task import LinearTask
from torch_dpsco.noise import gaussian_vector
from torch_dpsco.step.exact_noise import knorm_vector


def task(loss: Any = None, delta: float = 1e-6, **options: Any) -> LinearTask:
    return LinearTask(
        loss=dp.losses.Logistic() if loss is None else loss,
        preparation=Preparation(2.0),
        dim=6,
        n=2000,
        budget=dp.Budget(1.0, delta, adjacency="add_remove"),
        **options,
    )


TASKS = [
    task(),
    task(delta=0.0),
    task(dp.losses.Hinge()),
    task(dp.losses.Pinball(0.9), bound_y=3.0),
    task(dp.losses.Squared(), delta=0.0, bound_y=3.0),
    task(dp.losses.SoftmaxCrossEntropy(4), delta=0.0),
    task(tilt=0.2, n_min=1500, radius=2.0),
    task(tilt=-0.02, n_min=1500),
    task(attack_radius=0.1),
    task(radius=0.5),
]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("given", TASKS, ids=[str(index) for index in range(len(TASKS))])
def test_the_default_has_the_least_bound_of_a_fine_grid_up_to_its_step(given):
    best = least_risk_reg(given)
    bound = given.preparation.bound + given.attack_reach
    least = _risk(given, plan_output(replace(given, reg=best)), bound)
    for factor in (0.01, 0.1, 0.5, 0.8, 1.25, 2.0, 10.0, 100.0):
        try:
            other = _risk(given, plan_output(replace(given, reg=best * factor)), bound)
        except (CalibrationError, OverflowError):
            continue
        assert least <= 1.1 * other
    assert least < math.inf


@pytest.mark.weekly
@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_the_score_of_a_row_moves_by_the_std_that_the_bound_uses(delta):
    """20000 draws: the relative std of the mean of squares is below 0.02, and 0.1 is five of them."""
    given = replace(task(delta=delta), reg=50.0)
    plan = plan_output(given)
    draw = knorm_vector if delta == 0 else gaussian_vector
    generator = torch.Generator().manual_seed(0)
    row = torch.tensor([3.0, 0.0, -1.0, 0.5, 2.0, 1.0]).double()
    scores = torch.stack([row @ draw(6, plan.noise_scale, generator) for _ in range(20_000)])
    spread = plan.noise_scale * (math.sqrt(7) if delta == 0 else 1.0)
    assert float((scores**2).mean() / (row @ row)) == pytest.approx(spread**2, rel=0.1)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("loss", [dp.losses.Logistic(), dp.losses.Hinge()])
@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_noise_costs_no_more_than_the_bound(loss, delta):
    given = replace(task(loss, delta=delta), reg=20.0)
    plan = plan_output(given)
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(300, 6, generator=generator, dtype=torch.float64)
    X *= 2 / X.norm(dim=1, keepdim=True)
    mean = LinearObjective(
        loss, Records(X, torch.sign(X[:, 0] + 0.3)), reg=0.0, normalizer=300.0
    )
    w = torch.tensor([1.0, -0.5, 0.2, 0.0, 0.3, 0.0]).double()
    draw = knorm_vector if delta == 0 else gaussian_vector
    moved = [
        mean.value(w + draw(6, plan.noise_scale, generator)) - mean.value(w) for _ in range(400)
    ]
    limit = _risk(given, plan, 2.0) - plan.reg / given.n / 2 * (5.0 / 2.0) ** 2
    assert 0 < sum(moved) / 400 < limit


def test_a_task_that_nothing_is_proved_for_raises_what_the_plan_raised():
    with pytest.raises(CalibrationError, match="n_min"):
        least_risk_reg(task(tilt=0.5))


def test_where_no_bound_is_finite_a_regularizer_is_asked_for(monkeypatch):
    monkeypatch.setattr(least_risk, "_risk", lambda *arguments: math.nan)
    with pytest.raises(
        CalibrationError, match="reg must be given: no default has a finite bound"
    ):
        least_risk_reg(task())


def test_a_larger_public_number_of_records_needs_less_regularization_a_record():
    few, many = task(), replace(task(), n=200_000, n_max=0)
    assert least_risk_reg(many) / 200_000 < least_risk_reg(few) / 2000
