"""The Hessian at the answer of objective perturbation: what one record does to it, its noise, and its charge."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from scipy import stats

import torch_dpsco as dp
from tests.reference.papers.objective import amp_delta_monotone
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.analysis.objective import hessian_sensitivity
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.base import plan_linear
from torch_dpsco.estimators.fits import fit_linear
from torch_dpsco.estimators.objective import ObjectivePlan, plan_objective
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.task import LinearTask, build_objective, make_records
from torch_dpsco.losses import Logistic

BOUND, NAN = 1.5, math.nan
MU = gaussian_mu(1.0, 1e-6)
ROWS = (
    (BOUND, 0.0, 1.0),
    (0.0, -BOUND, -1.0),
    (9.0, 9.0, 1.0),
    (0.1, 0.2, -1.0),
    (NAN, 1.0, 1.0),
    (1.0, 1.0, 0.5),
)


def task(adjacency: str = "add_remove", **settings: object) -> LinearTask:
    given = {
        "loss": Logistic(),
        "preparation": Preparation(BOUND),
        "dim": 2,
        "n": 4,
        "curvature": 0.5 * MU,
    }
    return LinearTask(
        **(given | {"budget": dp.Budget(1.0, 1e-6, adjacency=adjacency)} | settings)
    )


def hessian(given: LinearTask, rows: list[tuple[float, ...]], at: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
    given = replace(given, n=max(1, len(rows)), n_max=8)
    return build_objective(given, 0.0, make_records(given, table[:, :2], table[:, 2])).hessian(
        at
    )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
def test_no_record_moves_the_hessian_by_more_than_its_sensitivity_and_some_attain_it(
    adjacency: str,
) -> None:
    given, moved = task(adjacency), []
    points = [
        torch.tensor(p, dtype=torch.float64) for p in ((0.0, 0.0), (3.0, -1.0), (1e6, 1e6))
    ]
    for point, one, other in product(points, ROWS, ROWS):
        common = [ROWS[3], (-1.0, 0.5, 1.0)]
        after = {"add_remove": [], "zero_out": [(NAN, 0.0, 1.0)], "replace_one": [other]}[
            adjacency
        ]
        change = hessian(given, [*common, one], point) - hessian(given, [*common, *after], point)
        moved.append(float(torch.linalg.matrix_norm(change)))
    bound = hessian_sensitivity(BOUND**2 / 4, adjacency)
    assert 0.9999 * bound <= max(moved) <= bound * (1 + 1e-12)


@pytest.mark.slow
def test_the_hessian_is_charged_with_the_answer() -> None:
    """The delta is that of b and of both Gaussian releases beside it, at the budget's epsilon."""
    plan, alone = (
        plan_objective(task()),
        plan_objective(task(curvature=0.0, reg=plan_objective(task()).reg)),
    )
    assert plan.noise_scale > alone.noise_scale
    constants = plan.reg, plan.task.lipschitz, plan.task.smoothness
    spent = amp_delta_monotone(
        1.0, plan.noise_scale, *constants, math.hypot(0.01, 0.5 * MU), "add_remove"
    )
    assert 0.99e-6 <= spent <= 1e-6
    # one with the noise of an answer alone is charged more than the budget
    cheap = replace(plan, noise_scale=alone.noise_scale)
    assert cheap.event().delta > 1.5e-6
    # and so is a Hessian with less noise
    assert replace(plan, task=replace(plan.task, curvature=MU)).event().delta > 1.5e-6


def test_the_charge_is_no_less_than_that_of_a_gaussian_release_of_the_hessian_alone() -> None:
    curve = plan_objective(task(), charge="curve").event()
    alone = plan_objective(
        replace(task(curvature=0.0), reg=plan_objective(task()).reg), charge="curve"
    )
    alone = replace(alone, noise_scale=plan_objective(task()).noise_scale).event()
    assert curve.orders == alone.orders
    for order, cost, without in zip(curve.orders, curve.values, alone.values, strict=True):
        assert cost >= (without + order * (0.5 * MU) ** 2 / 2) * (1 - 1e-12)


def released(plan: ObjectivePlan, rows: list[tuple[float, ...]]) -> torch.Tensor:
    table = torch.tensor(rows, dtype=torch.float64)
    records = make_records(plan.task, table[:, :2], table[:, 2])
    return plan.release(records, plan.ledger(), torch.Generator().manual_seed(1))


def test_the_hessian_is_that_at_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, rows = plan_objective(task()), [ROWS[k] for k in (0, 1, 2, 3)]
    monkeypatch.setattr("torch_dpsco.estimators.objective.symmetric_noise", lambda *given: 0.0)
    # far from the minimizer, so that another point has another Hessian
    monkeypatch.setattr(ObjectivePlan, "output_scale", 5.0)
    answer = released(plan, rows)
    assert torch.equal(answer[2:].view(2, 2), hessian(plan.task, rows, answer[:2]))
    assert not torch.allclose(
        answer[2:].view(2, 2), hessian(plan.task, rows, torch.zeros(2, dtype=torch.float64))
    )


def test_the_noise_of_the_hessian_has_the_level_that_is_charged() -> None:
    """Chi-square, false alarm: 1e-6. In an orthonormal basis all coordinates have the same std."""
    dim = 60
    given = task(dim=dim, n=1)
    plan = plan_objective(given)
    records = make_records(
        plan.task, torch.full((1, dim), NAN, dtype=torch.float64), torch.ones(1)
    )
    entries = plan.release(records, plan.ledger(), torch.Generator().manual_seed(2))[dim:].view(
        dim, dim
    )
    assert torch.equal(entries, entries.T)
    std = hessian_sensitivity(BOUND**2 / 4, "add_remove") / given.curvature
    square = float((entries / std).square().sum())
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], dim * (dim + 1) // 2)
    assert low <= square <= high
    assert plan.hessian_scale == pytest.approx(std, rel=1e-6)


@pytest.mark.slow
def test_rounding_is_in_the_noise_of_the_hessian() -> None:
    few, many = (plan_objective(task(n=n, reg=1e4)) for n in (10, 10**9))
    exact = hessian_sensitivity(BOUND**2 / 4, "add_remove") / (0.5 * MU)
    assert (
        exact < few.hessian_scale < (1 + 1e-9) * exact < (1 + 1e-4) * exact < many.hessian_scale
    )


def test_a_fit_without_intervals_releases_no_hessian() -> None:
    features, labels = torch.zeros(4, 2, dtype=torch.float64), torch.ones(4)
    assert fit_linear(plan_linear(task(curvature=0.0)), features, labels).hessian is None
    plan = plan_linear(task())
    assert plan.mechanism == "objective"
    assert fit_linear(plan, features, labels).hessian.shape == (2, 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": dp.losses.SmoothedHinge()},
        {"residual_clip": 0.5},
        {"radius": 2.0},
        {"attack_radius": 0.1},
        {"budget": dp.Budget(1.0, 0.0)},
    ],
)
def test_what_tells_no_intervals_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConditionError, match=r"must be .* for intervals"):
        task(**settings)


@pytest.mark.parametrize("mechanism", ["output", "noisy_gd"])
def test_other_mechanisms_do_not_pay_for_a_hessian(mechanism: str) -> None:
    with pytest.raises(ConditionError, match="mechanism must be 'objective'"):
        plan_linear(task(reg=1.0), mechanism)
