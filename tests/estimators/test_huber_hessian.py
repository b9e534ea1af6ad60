"""What intervals of Huber's loss need beside the answer: a Hessian without jumps and a sum of squared slopes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from scipy import stats

import torch_dpsco as dp
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.estimators.choose import fit_linear, plan_linear
from torch_dpsco.estimators.objective import ObjectivePlan, plan_objective
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.task import LinearTask, make_records
from torch_dpsco.losses import Huber

BOUND, THRESHOLD, TARGET, NAN, INF = 1.5, 0.5, 2.0, math.nan, math.inf
LEVEL = 0.5 * gaussian_mu(1.0, 1e-6)
ROWS = (
    *(
        (BOUND, 0.0, y)
        for y in (0.0, 0.3, -0.375, 0.4999999, 0.5, 0.5000001, 0.625, TARGET, -INF)
    ),
    (0.0, -BOUND, 0.375),
    (9.0, 9.0, 1.0),
    (0.1, 0.2, -0.4),
    (NAN, 1.0, 1.0),
)


def plan(adjacency: str = "add_remove", **settings: object) -> ObjectivePlan:
    given = {
        "loss": Huber(threshold=THRESHOLD),
        "preparation": Preparation(BOUND),
        "dim": 2,
        "n": 4,
        "bound_y": TARGET,
    }
    budget = dp.Budget(1.0, 1e-6, adjacency=adjacency)
    return plan_objective(
        LinearTask(**(given | {"curvature": LEVEL, "budget": budget, "n_max": 8} | settings))
    )


def sums(
    made: ObjectivePlan, rows: list[tuple[float, ...]], at: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
    made = replace(made, task=replace(made.task, n=len(rows)))
    return made._curvature(at, make_records(made.task, table[:, :2], table[:, 2]))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
def test_no_record_moves_what_is_released_beside_by_more(adjacency: str) -> None:
    """Exact, in units of both noises: the level of the two releases together is the one that is charged."""
    made, moved, squares = plan(adjacency), [], []
    points = [
        torch.tensor(p, dtype=torch.float64) for p in ((0.0, 0.0), (0.3, -0.2), (1e6, 1e6))
    ]
    for point, one, other in product(points, ROWS, ROWS):
        common = [ROWS[1], (-1.0, 0.5, 1.0)]
        after = {"add_remove": [], "zero_out": [(NAN, 0.0, 1.0)], "replace_one": [other]}[
            adjacency
        ]
        before = sums(made, [*common, one], point)
        change = [
            a - b for a, b in zip(before, sums(made, [*common, *after], point), strict=True)
        ]
        squares.append(abs(float(change[1])))
        moved.append(
            math.hypot(
                float(torch.linalg.matrix_norm(change[0])) / made.hessian_scale,
                squares[-1] / made.squares_scale,
            )
        )
    assert 0.94 * LEVEL < max(moved) <= LEVEL * (1 + 1e-12)
    assert max(squares) == pytest.approx(THRESHOLD**2)


@pytest.mark.slow
def test_both_are_charged_with_the_answer() -> None:
    made, alone = plan(), plan(curvature=0.0, reg=plan().reg)
    assert made.noise_scale > alone.noise_scale
    assert (alone.hessian_scale, alone.squares_scale) == (0.0, 0.0)
    assert replace(made, noise_scale=alone.noise_scale).event().delta > 1.5e-6
    assert replace(made, task=replace(made.task, curvature=2 * LEVEL)).event().delta > 1.5e-6
    spent = math.hypot(BOUND**2 / made.hessian_scale, THRESHOLD**2 / made.squares_scale)
    assert 0.999999 * LEVEL < spent <= LEVEL


def test_the_hessian_has_no_jump_that_a_rounded_score_could_move() -> None:
    """Of slope 2 / threshold at most, and the second derivative itself away from the threshold."""
    loss, residual = (
        Huber(threshold=THRESHOLD),
        torch.linspace(-2, 2, 40_001, dtype=torch.float64),
    )
    ramp = loss.ramp(residual)
    assert float(ramp.diff().abs().max() / residual.diff().min()) <= 2 / THRESHOLD * (1 + 1e-9)
    far = (residual.abs() / THRESHOLD - 1).abs() > 0.25
    assert torch.equal(ramp[far], loss.bend(residual)[far])
    assert float(ramp.mean()) == pytest.approx(float(loss.bend(residual).mean()), rel=1e-3)


def test_both_are_those_at_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made, rows = plan(), [ROWS[k] for k in (1, 2, 9, 11)]
    monkeypatch.setattr(ObjectivePlan, "output_scale", 0.5)
    noisy = "torch_dpsco.estimators.objective."
    monkeypatch.setattr(f"{noisy}symmetric_noise", lambda *given: 0.0)
    drawn = iter([torch.zeros(2), torch.tensor([0.4, -0.3]), torch.zeros(1)])
    monkeypatch.setattr(f"{noisy}gaussian_vector", lambda *given: next(drawn).double())
    table = torch.tensor(rows, dtype=torch.float64)
    records = make_records(made.task, table[:, :2], table[:, 2])
    answer = made.release(records, made.ledger(), torch.Generator())
    hessian, squares = sums(made, rows, answer[:2])
    assert torch.equal(answer[2:6].view(2, 2), hessian)
    assert torch.equal(answer[6], squares)
    assert not torch.equal(hessian, sums(made, rows, torch.zeros(2, dtype=torch.float64))[0])


@pytest.mark.slow
def test_the_noise_of_both_has_the_level_that_is_charged() -> None:
    """Chi-square, false alarm: 1e-6 each."""
    dim, draws = 60, 60
    made = plan(dim=dim, n=1)
    records = make_records(
        made.task, torch.full((1, dim), NAN, dtype=torch.float64), torch.ones(1)
    )
    generator = torch.Generator().manual_seed(2)
    found = [made.release(records, made.ledger(), generator)[dim:] for _ in range(draws)]
    entries = found[0][:-1].view(dim, dim)
    for values, std, count in (
        (entries, made.hessian_scale, dim * (dim + 1) // 2),
        (torch.stack(found)[:, -1], made.squares_scale, draws),
    ):
        low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], count)
        assert low <= float((values / std).square().sum()) <= high


@pytest.mark.slow
def test_rounding_is_in_the_noise_of_both() -> None:
    few, many = (plan(n=n, n_max=n, reg=1e6) for n in (10, 10**9))
    for name in ("hessian_scale", "squares_scale"):
        assert getattr(few, name) < (1 - 1e-4) * getattr(many, name)
    # rounding of scores matters as much as they are large beside the threshold
    narrow = plan(n=10**7, n_max=10**7, reg=1e6, loss=Huber(threshold=1e-2))
    wide = plan(n=10**7, n_max=10**7, reg=1e6)
    assert narrow.hessian_scale - few.hessian_scale > 2 * (
        wide.hessian_scale - few.hessian_scale
    )


def test_a_fit_tells_the_sum_beside_the_hessian() -> None:
    made = plan_linear(plan().task)
    assert made.mechanism == "objective"
    fitted = fit_linear(made, torch.zeros(4, 2, dtype=torch.float64), torch.ones(4))
    assert fitted.hessian.shape == (2, 2)
    assert fitted.moments.shape == (1,)
