"""Sums near a point that was read are the sums over all records, within what is declared for their rounding."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import torch_dpsco as dp
from tests.test_native import needed
from torch_dpsco.estimators import least_squares, objectives
from torch_dpsco.estimators.least_squares import (
    BoostedPlan,
    RobustPlan,
    plan_boosted,
    plan_preconditioned_gd,
)
from torch_dpsco.estimators.objectives import NearSums, row_losses
from torch_dpsco.estimators.preparation import Preparation, signal_to_noise
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.task import LinearTask
from torch_dpsco.losses import Huber, SmoothedPinball, Squared
from torch_dpsco.losses.base import TableLoss

pytestmark = needed
DOUBLE = torch.float64


def task(loss: TableLoss, n: int = 200, dim: int = 3, **changes: object) -> LinearTask:
    given = LinearTask(
        loss=loss,
        preparation=Preparation(1.0, intercept=0.5),
        dim=dim,
        n=n,
        budget=dp.Budget(1.0, 1e-6),
        bound_y=2.0,
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def records_of(n: int, dim: int, seed: int) -> Records:
    """Long, short and equal rows, with targets at corners of losses, null records, and weights."""
    draws = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, dim, dtype=DOUBLE, generator=draws)
    rows *= torch.logspace(-3, 1, n, dtype=DOUBLE)[torch.randperm(n, generator=draws)][:, None]
    targets = (torch.randn(n, dtype=DOUBLE, generator=draws) * 4).round() / 4
    weights = torch.rand(n, dtype=DOUBLE, generator=draws).round(decimals=2)
    if n > 20:
        rows[1], rows[2], rows[3] = 0.0, math.nan, 1e-300
        targets[4], weights[5] = math.nan, 0.0
    return Records(rows, targets, weights, prepare=Preparation(1.0, intercept=0.5))


def exact(plan: BoostedPlan, records: Records, w: Tensor) -> list[Fraction]:
    loss, clip = plan.task.loss, Fraction(plan.clip * (1 - 1e-9))
    point = [Fraction(v) for v in w.tolist()]
    total = [Fraction(0)] * len(point)
    rows = records.select(torch.arange(records.count)).tolist()
    columns = records.targets.tolist(), records.weights.tolist(), records.norms.tolist()
    for x, y, weight, norm in zip(rows, *columns, strict=True):
        if not weight:
            continue
        row = [Fraction(v) for v in x]
        slope = sum((a * b for a, b in zip(row, point, strict=True)), Fraction(0)) - Fraction(y)
        if isinstance(loss, Huber):
            slope = max(-Fraction(loss.threshold), min(Fraction(loss.threshold), slope))
        if isinstance(loss, SmoothedPinball):
            t = Fraction(loss.quantile)
            slope = max(-t, min(1 - t, slope / Fraction(loss.width)))
        limit = clip / Fraction(norm)
        slope = Fraction(weight) * max(-limit, min(limit, slope))
        total = [t + slope * v for t, v in zip(total, row, strict=True)]
    return total


PLANS = {
    "squared": lambda **given: plan_boosted(task(Squared(), **given)),
    "huber": lambda **given: plan_preconditioned_gd(task(Huber(0.3), **given)),
    "pinball": lambda **given: plan_preconditioned_gd(task(SmoothedPinball(0.8, 0.4), **given)),
}


def walk(dim: int, reach: float, seed: int) -> list[Tensor]:
    """Far steps, near ones of many lengths, a return, and the same point again."""
    draws = torch.Generator().manual_seed(seed)
    point = torch.zeros(dim, dtype=DOUBLE)
    points = [point]
    for length in (
        3.0,
        0.4,
        *[10.0**-k for k in range(12)],
        0.0,
        0.3,
        2.0,
        0.01,
        0.9,
        1e-3,
        0.5,
    ):
        way = torch.randn(dim, dtype=DOUBLE, generator=draws)
        point = point + way * (length * reach / float(way.norm()))
        points.append(point)
    return [*points, points[3], points[3]]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("n", "dim"), [(0, 2), (1, 1), (40, 3), (150, 6)])
def test_the_rounding_of_sums_near_a_point_is_declared(
    name: str, n: int, dim: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(objectives, "_CALM", math.inf)  # every chance is used
    plan = PLANS[name](n=200, dim=dim)
    assert plan.roundings == objectives.ROUNDINGS
    _, moved = plan._moves
    allowed = moved - plan.clip  # for both data sets
    for seed in range(3):
        records = records_of(n, dim, seed)
        losses = row_losses(plan.task.loss, records, plan.clip * (1 - 1e-9))
        assert losses is not None
        sums = NearSums(records, losses, plan._reach, records.gram(records.weights))
        read = 0
        for point in walk(dim + 1, plan._reach, seed):
            sums._uses = math.inf
            found = sums(point)
            read += sums._place is not None and torch.equal(sums._place.point, point)
            gap = [
                Fraction(a) - b
                for a, b in zip(found.tolist(), exact(plan, records, point), strict=True)
            ]
            assert math.sqrt(sum(float(g) ** 2 for g in gap)) <= allowed / 2
        assert read >= 2 or not n


@pytest.mark.parametrize("name", PLANS)
def test_sums_near_a_point_are_those_over_all_records(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    plan = PLANS[name](n=6000, dim=5)
    records = records_of(6000, 5, 0)
    total = plan.sums(records, records.gram(records.weights))
    used = []
    original = objectives._Place.sum_at
    monkeypatch.setattr(
        objectives._Place,
        "sum_at",
        lambda place, *move: used.append(1) or original(place, *move),
    )
    for point in walk(6, 0.2 * plan._reach, 1):
        found, wanted = total(point), plan.gradient(records, point)
        torch.testing.assert_close(found.flatten(), wanted.flatten(), rtol=0, atol=1e-9)
    assert used


def test_a_loud_run_is_not_read_again_and_again():
    plan = PLANS["huber"](n=6000, dim=5)
    records = records_of(6000, 5, 0)
    losses = row_losses(plan.task.loss, records, plan.clip)
    assert losses is not None
    sums = NearSums(records, losses, plan._reach, records.gram(records.weights))
    draws = torch.Generator().manual_seed(0)
    tried = []
    for _ in range(200):
        sums(0.2 * plan._reach * torch.randn(6, dtype=DOUBLE, generator=draws))
        tried.append(sums._price)
    assert sums._place is None
    assert tried[-1] >= 96


def test_records_at_a_bound_end_the_search_for_a_reach():
    plan = PLANS["huber"](n=6000, dim=1)
    rows, targets = torch.ones(6000, 1, dtype=DOUBLE), torch.full((6000,), 0.3, dtype=DOUBLE)
    records = Records(rows, targets, prepare=Preparation(1.0, intercept=0.5))
    losses = row_losses(plan.task.loss, records)
    assert losses is not None
    sums = NearSums(records, losses, plan._reach, records.gram(records.weights))
    for point in (1e-3, 0.0, 0.0, 1e-9):
        sums._uses = math.inf
        found = sums(torch.full((2,), point, dtype=DOUBLE))
        assert found.isfinite().all()
        assert sums._place is None


def test_records_that_c_does_not_read_are_all_read(monkeypatch: pytest.MonkeyPatch):
    plan = PLANS["huber"](n=5000)
    records = records_of(5000, 3, 2)
    found = plan.sums(records, torch.zeros(4, 4, dtype=DOUBLE))(torch.ones(4, dtype=DOUBLE))
    monkeypatch.setattr(Records, "in_c", False)
    other = plan.sums(records, torch.zeros(4, 4, dtype=DOUBLE))(torch.ones(4, dtype=DOUBLE))
    torch.testing.assert_close(found.view_as(other), other, rtol=1e-12, atol=1e-12)


def test_losses_with_bounded_slopes_are_never_cut_and_spend_their_level():
    for loss in (Huber(0.3), SmoothedPinball(0.8, 0.4)):
        given = task(loss, n=5000)
        plan = plan_preconditioned_gd(given)
        assert isinstance(plan, RobustPlan)
        assert plan.clip == given.lipschitz
        assert 0.84 < plan.momentum < 0.94
        assert given.level * (1 - 1e-9) < plan.own_event().mu <= given.level
        assert plan.step_size(torch.ones(4)) * given.smoothness == pytest.approx(
            given.preparation.bound**2
        )
        assert 1000 * plan._reach == pytest.approx(plan.radius)


@pytest.mark.parametrize(("n", "noisy"), [(300, True), (5000, False)])
def test_robust_steps_are_shorter_where_noise_is_loud(n: int, noisy: bool):
    given = task(Huber(0.3), n=n)
    signal = signal_to_noise(given.level, n, given.parameters)
    assert (signal < 60) == noisy
    whole = given.preparation.bound**2 / given.smoothness
    found = plan_preconditioned_gd(given).step_size(torch.ones(4))
    assert found == pytest.approx(whole * min(1.0, signal / 60))


def test_noiseless_rounds_end_at_the_minimizer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        least_squares, "gaussian_vector", lambda dim, *_: torch.zeros(dim).double()
    )
    monkeypatch.setattr(
        "torch_dpsco.estimators.gradient_descent.gaussian_vector",
        lambda dim, *_: torch.zeros(dim).double(),
    )
    given = task(Huber(0.3), n=5000, budget=dp.Budget(8.0, 1e-6))
    draws = torch.Generator().manual_seed(3)
    rows = torch.randn(5000, 3, dtype=DOUBLE, generator=draws) / 2
    targets = rows @ torch.tensor([0.5, -1.0, 0.2]).double() + 0.3
    records = Records(rows, targets, prepare=given.preparation)
    plan = plan_preconditioned_gd(given)
    w = plan.draw(records, torch.Generator())
    gradient = plan.gradient(records, w)
    assert float(gradient.norm()) < 1e-3 * 5000 * plan.clip
