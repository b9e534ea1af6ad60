"""Solvers that lie, accuracies that are only promised, and an audit of what is released in one dimension."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.output import OutputPlan, plan_output
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.records import project
from torch_dpsco.estimators.solvers import certified_descent, solve
from torch_dpsco.estimators.task import LinearTask, build_objective, make_records
from torch_dpsco.noise import gaussian_vector
from torch_dpsco.step.exact_noise import knorm_vector

SOLVE = importlib.import_module("torch_dpsco.estimators.solvers")


def task(delta: float = 1e-6, **settings: object) -> LinearTask:
    given = {
        "loss": dp.losses.Logistic(),
        "preparation": Preparation(1.0),
        "dim": 1,
        "n": 4,
        "reg": 2.0,
    }
    return LinearTask(**(given | {"budget": dp.Budget(1.0, delta, "replace_one")} | settings))


def data(sign: float) -> tuple[Tensor, Tensor]:
    """Neighbors: the last record of the one pulls up, that of the other down."""
    return torch.tensor([[1.0], [1.0], [-0.5], [sign]]), torch.ones(4)


# -- a solver that is right in expectation, and tells one record where it errs -----------------------------------------


def lying(error: float) -> Callable[..., Tensor]:
    def solver(objective, start: Tensor, distance: float) -> Tensor:
        exact = certified_descent(objective, torch.zeros_like(start), distance / 100).w
        # the sign of the last record's gradient, at an error of size `error`
        row = objective.records.select(torch.tensor([3]))
        slope = objective.slopes(row @ exact, slice(3, 4)) @ row
        return exact + error * float(slope.sign())

    return solver


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("error", [1e-4, 0.1, 1.0, 1e9, 1e200, math.inf, math.nan])
@pytest.mark.parametrize("settings", [{}, {"radius": 0.3}, {"residual_clip": 0.2}])
def test_a_solver_that_tells_a_record_is_repaired(
    settings: dict[str, object], error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = task(**settings)
    plan = plan_output(given)
    exact, found = [], []
    for sign in (1.0, -1.0):
        records = make_records(given, *data(sign))
        objective = build_objective(given, plan.reg, records)
        exact.append(solve(objective, plan.distance / 100, radius=plan.task.radius).w)
        with monkeypatch.context() as patch:
            patch.setattr(SOLVE, "newton", lying(error))
            found.append(plan.solve(records))
    for right, given_out in zip(exact, found, strict=True):
        assert float((right - given_out).abs()) <= plan.distance * 1.01
    assert float((found[0] - found[1]).abs()) <= dict(plan.event().sens)["replace_one"]


def test_a_solver_of_smoothed_kinks_that_lies_is_repaired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = task(loss=dp.losses.Hinge())
    plan = plan_output(given)
    assert plan.task.loss == dp.losses.SmoothedHinge(1e-3)
    records = make_records(given, *data(1.0))
    exact = solve(build_objective(plan.task, plan.reg, records), plan.distance / 10).w
    continuation = importlib.import_module("torch_dpsco.estimators.solvers")
    for error in (0.1, 1e9, math.nan):
        monkeypatch.setattr(
            continuation, "newton", lambda smooth, start, distance, error=error: start + error
        )
        assert float((plan.solve(records) - exact).abs()) <= plan.distance * 1.1


@pytest.mark.slow
def test_a_loop_that_diverged_is_solved_from_zero() -> None:
    for settings in (
        {},
        {"radius": 0.3},
        {"tilt": 1.0},
        {"loss": dp.losses.Hinge()},
        {"attack_radius": 0.5},
    ):
        given = task(**settings)
        plan = plan_output(given)
        records = make_records(given, *data(1.0))
        objective = build_objective(plan.task, plan.reg, records)
        exact = solve(objective, plan.distance / 10, radius=plan.task.radius).w
        for start in (math.nan, math.inf, -math.inf, 1e30, 1e155, 1e200, 1.7e308):
            found = plan.solve(records, torch.full((1,), start, dtype=torch.float64))
            assert float((found - exact).abs()) <= plan.distance * 1.1


# -- audit: releases on neighbors, told apart by thresholds -----------------------------------------------------------

RUNS = 20_000


def releases(
    given: LinearTask, plan: OutputPlan, sign: float, scale: float, seed: int
) -> Tensor:
    """Many releases, all of one solve; the noise is drawn by the code, times `scale` in place of the planned one."""
    point = plan.solve(make_records(given, *data(sign)))
    draws, ledger = torch.Generator().manual_seed(seed), dp.Accountant()
    one = replace(plan, noise_scale=scale).release(point, ledger, draws)
    draw = knorm_vector if given.budget.delta == 0 else gaussian_vector
    assert torch.equal(
        one,
        project(point + draw(1, scale, torch.Generator().manual_seed(seed)), plan.task.radius),
    )
    if given.budget.delta:
        return point + gaussian_vector(RUNS, scale, draws)
    signs = torch.where(torch.rand(RUNS, generator=draws) < 0.5, -1.0, 1.0)
    return point + scale * signs * torch.empty(RUNS, dtype=torch.float64).exponential_(
        generator=draws
    )


def proved_loss(one: Tensor, other: Tensor, delta: float) -> float:
    """Lower confidence bound on epsilon at delta, over 40 thresholds and both orders; false alarms: 1e-6."""
    level, best = 1e-6 / 160, 0.0
    values = np.quantile(torch.cat([one, other]).numpy(), np.linspace(0.02, 0.98, 40))
    for first, second in ((one, other), (other, one)):
        for value in values:
            for hits in ((first > value, second > value), (first < value, second < value)):
                often, rarely = (int(h.sum()) for h in hits)
                low = stats.beta.ppf(level, often, RUNS - often + 1) if often else 0.0
                high = (
                    stats.beta.ppf(1 - level, rarely + 1, RUNS - rarely)
                    if rarely < RUNS
                    else 1.0
                )
                best = max(best, math.log(max(low - delta, 1e-300) / high))
    return best


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("delta", [1e-2, 0.0])
def test_an_audit_catches_half_of_the_noise_and_passes_the_planned_one(delta: float) -> None:
    # strong regularization and a clip: the two minimizers are as far apart as one record can move them
    given = task(delta, reg=100.0, residual_clip=0.2)
    plan = plan_output(given)
    for scale, caught in ((plan.noise_scale, False), (plan.noise_scale / 2, True)):
        one, other = (
            releases(given, plan, sign, scale, seed) for sign, seed in ((1.0, 5), (-1.0, 6))
        )
        assert (proved_loss(one, other, delta) > 1.0) == caught


def test_a_tolerance_below_the_rounding_is_not_planned() -> None:
    """Public numbers decide, before there are data that could fail."""
    given = LinearTask(
        loss=dp.losses.Logistic(),
        preparation=Preparation(1.0),
        dim=3,
        n=10**6,
        budget=dp.Budget(1.0, 1e-6, "replace_one"),
        reg=1e4,
    )
    assert plan_output(given).distance * 1e4 == pytest.approx(
        1e-3 * plan_output(given).sensitivity * 1e4 / 2
    )
    with pytest.raises(ConditionError, match="rounding"):
        plan_output(replace(given, reg=1e-9))
