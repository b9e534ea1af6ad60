"""Objective perturbation of one coordinate: the exact law of the release for neighbors, by integration on a grid.

theta has the density p_b(-J'(theta)) J''(theta), J without its linear term; the released point is theta, moved by as
much as the certificate leaves, plus Gaussian noise. Adversarial neighbors: moved in opposite directions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.ndimage import gaussian_filter1d
from scipy.special import logsumexp

import torch_dpsco as dp
from torch_dpsco.accounting.curves import objective_curve
from torch_dpsco.estimators.objective import ObjectivePlan, _change, plan_objective
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.task import LinearTask, make_records
from torch_dpsco.losses.table import ResidualClipped

DELTA = 1e-3
Data = tuple[tuple[float, float], ...]  # (x, y)
Array = NDArray[np.float64]

LOSSES: dict[str, dict[str, object]] = {
    "logistic": {"loss": dp.losses.Logistic()},
    "clipped logistic": {"loss": dp.losses.Logistic(), "residual_clip": 0.3},
    "smoothed hinge": {"loss": dp.losses.SmoothedHinge(1.0)},
    "huber": {"loss": dp.losses.Huber(0.5), "bound_y": 2.0},
    "clipped squared": {"loss": dp.losses.Squared(), "bound_y": 2.0, "residual_clip": 0.5},
}


@lru_cache
def planned(
    name: str, adjacency: str, delta: float, reg: float | None = None
) -> tuple[LinearTask, ObjectivePlan]:
    budget = dp.Budget(1.0, delta, adjacency=adjacency)
    task = LinearTask(
        preparation=Preparation(1.0), dim=1, n=3, budget=budget, reg=reg, **LOSSES[name]
    )
    return task, plan_objective(task)


def slopes(task: LinearTask, reg: float, data: Data, grid: Array) -> tuple[Array, Array]:
    """J' and J'' on the grid, from the loss itself."""
    first, second = reg * grid, np.full_like(grid, reg)
    scores = torch.from_numpy(grid)
    for x, y in data:
        loss, target = task.clipped or task.loss, torch.full_like(scores, y)
        if isinstance(loss, ResidualClipped):
            loss = loss.of_norms(torch.full_like(scores, abs(x)))
        first = first + x * loss.derivative(x * scores, target).numpy()
        second = second + x * x * loss.second_derivative(x * scores, target).numpy()
    return first, second


def log_density(task: LinearTask, plan: ObjectivePlan, data: Data, grid: Array) -> Array:
    first, second = slopes(task, plan.reg, data, grid)
    law = stats.laplace if plan.task.pure else stats.norm
    return law(scale=plan.noise_scale).logpdf(first) + np.log(second)


def grid_of(plan: ObjectivePlan, points: int) -> Array:
    """Points of a part of the line that holds all but 1e-12 of the probability."""
    deviations = 30.0 if plan.task.pure else 7.5
    reach = (deviations * plan.noise_scale + 3) / plan.reg
    return np.linspace(-reach, reach, points)


def neighbors(adjacency: str, labels: tuple[float, float]) -> list[tuple[Data, Data]]:
    """Alone, among records that pull the same way, and among those that pull back."""
    up, down = labels
    one, other = (1.0, up), (1.0, down)
    rest: list[Data] = [(), (one, one), (other, (0.3, up))]
    if adjacency == "replace_one":
        return [((*shared, one), (*shared, other)) for shared in rest]
    return [((*shared, one), shared) for shared in rest]


def hockey_stick(one: Array, other: Array, grid: Array) -> float:
    return float(np.maximum(one - np.e * other, 0).sum() * (grid[1] - grid[0]))


def realized_delta(task: LinearTask, plan: ObjectivePlan) -> float:
    """Largest delta at epsilon = 1 of the exact minimizer over the neighbors and their order."""
    grid, found = grid_of(plan, 40_001), []
    for pair in neighbors(task.adjacency, (2.0, -2.0) if task.bound_y else (1.0, -1.0)):
        one, other = (np.exp(log_density(task, plan, data, grid)) for data in pair)
        assert one.sum() * (grid[1] - grid[0]) == pytest.approx(1, abs=1e-3)
        found += [hockey_stick(one, other, grid), hockey_stick(other, one, grid)]
    return max(found)


CASES = [
    ("logistic", "add_remove", None),
    ("clipped logistic", "add_remove", 100.0),
    ("clipped logistic", "replace_one", 100.0),
    ("smoothed hinge", "add_remove", 100.0),
    ("huber", "add_remove", 100.0),
    ("clipped squared", "replace_one", 100.0),
]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("name", "adjacency", "reg"), CASES)
def test_neighbors_are_told_apart_by_no_more_than_delta(
    name: str, adjacency: str, reg: float | None
) -> None:
    task, plan = planned(name, adjacency, DELTA, reg)
    realized = realized_delta(task, plan)
    assert realized <= DELTA
    if name == "clipped logistic":
        assert realized > 0.9 * DELTA  # nothing may be shaved off
    halved = replace(plan, noise_scale=plan.noise_scale / 2)
    assert realized_delta(task, halved) > DELTA  # half of the noise is caught


def test_errors_of_the_solver_are_covered_by_the_noise_on_the_answer() -> None:
    task, plan = planned("clipped logistic", "add_remove", DELTA, 100.0)
    points = round(2 * 7.6 * plan.noise_scale / plan.reg / plan.output_scale * 3)
    grid = grid_of(plan, points)
    shift = math.ceil(plan.distance / (grid[1] - grid[0]))
    one, other = (
        np.exp(log_density(task, plan, data, grid))
        for data in neighbors("add_remove", (1.0, -1.0))[0]
    )
    without, found = hockey_stick(one, other, grid), []
    for sign in (shift, -shift):  # in opposite directions
        moved = [
            gaussian_filter1d(np.roll(law, s), plan.output_scale / (grid[1] - grid[0]))
            for law, s in ((one, sign), (other, -sign))
        ]
        found += [hockey_stick(*moved, grid), hockey_stick(*reversed(moved), grid)]
    assert without < max(found) <= DELTA


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("adjacency", ["replace_one", "add_remove"])
@pytest.mark.parametrize("name", ["clipped logistic", "smoothed hinge", "huber"])
def test_the_charged_curve_bounds_the_renyi_divergence_of_neighbors(
    name: str, adjacency: str
) -> None:
    task = planned(name, "add_remove", 0.0)[0]  # any: what is charged depends on the noise alone
    noise, lipschitz = 4.0, task.lipschitz
    for reg in (0.5, 100.0):
        pure, plan = planned(name, adjacency, 0.0)
        curve = objective_curve(noise, _change(pure, reg), 0.0, adjacency)
        plan = replace(
            plan,
            task=replace(pure, noise_multiplier=noise / lipschitz, reg=reg),
            noise_scale=noise,
        )
        grid, shares = np.linspace(-60 * noise / reg, 60 * noise / reg, 30_001), []
        for pair in neighbors(adjacency, (2.0, -2.0) if task.bound_y else (1.0, -1.0)):
            laws = [log_density(pure, plan, data, grid) for data in pair]
            one, other = (
                law - logsumexp(law) for law in laws
            )  # of sum 1 on the grid, whose errors orders near 1 magnify
            for order, value in list(zip(curve.orders, curve.values, strict=True))[::9]:
                if 1.1 < order < 40:
                    for p, q in ((one, other), (other, one)):
                        moment = logsumexp(order * p + (1 - order) * q)
                        shares.append(moment / (order - 1) / value)
        assert max(shares) <= 1
        assert max(shares) > (0.8 if reg == 100.0 else 0.3)


@pytest.mark.cases(5, 2)
@pytest.mark.parametrize("adjacency", ["replace_one", "add_remove"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_pure_epsilon_bounds_the_log_ratio_of_the_densities(name: str, adjacency: str) -> None:
    task, plan = planned(name, adjacency, 0.0)
    grid, worst = grid_of(plan, 40_001), 0.0
    for one, other in neighbors(adjacency, (2.0, -2.0) if task.bound_y else (1.0, -1.0)):
        ratio = log_density(task, plan, one, grid) - log_density(task, plan, other, grid)
        worst = max(worst, float(np.abs(ratio).max()))
    spent_on_the_answer = 2 * plan.distance / plan.output_scale
    assert worst + spent_on_the_answer <= 1
    assert worst > (0.3 if adjacency == "replace_one" else 0.7)


@pytest.mark.weekly
@pytest.mark.parametrize("delta", [DELTA, 0.0])
def test_releases_have_the_law_that_was_integrated(delta: float) -> None:
    """Kolmogorov-Smirnov, 400 releases; false alarms: 1e-6."""
    task, plan = planned("clipped logistic", "add_remove", delta, 100.0)
    data = ((1.0, 1.0), (-0.7, 1.0), (0.2, -1.0))
    rows = torch.tensor([[x] for x, _ in data], dtype=torch.float64)
    records = make_records(task, rows, torch.tensor([y for _, y in data]))
    draws = torch.Generator().manual_seed(11)
    found = [float(plan.release(records, dp.Accountant(task.budget), draws)) for _ in range(400)]
    grid = grid_of(plan, 40_001)
    law = np.cumsum(np.exp(log_density(task, plan, data, grid))) * (grid[1] - grid[0])
    assert law[-1] == pytest.approx(1, abs=1e-3)
    assert stats.kstest(found, lambda values: np.interp(values, grid, law)).pvalue > 1e-6
