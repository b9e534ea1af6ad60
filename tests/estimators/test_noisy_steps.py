"""Noisy gradient descent: its steps, its noise, the ball, and the level of chains that attain the bound."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from scipy import stats
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu, noisy_gd_mu
from torch_dpsco.estimators import gradient_descent
from torch_dpsco.estimators.gradient_descent import NoisyGDPlan, plan_noisy_gd, way_guess
from torch_dpsco.estimators.preparation import Preparation, signal_to_noise
from torch_dpsco.estimators.records import gradient_rounding, project
from torch_dpsco.estimators.task import LinearTask, build_objective, make_records
from torch_dpsco.noise import gaussian_vector

DRAW = "torch_dpsco.estimators.gradient_descent.gaussian_vector"
WIDE = 8_000
# a target so far away that the gradient of the loss is -k x at every iterate: the chain is that of a quadratic
FAR = {"loss": dp.losses.Huber(0.25), "bound_y": 1e9}


def task(adjacency: str = "add_remove", **settings: object) -> LinearTask:
    given = {"preparation": Preparation(1.0), "dim": 1, "n": 3, "n_max": 5, "reg": 1.0} | FAR
    return LinearTask(
        **(given | {"budget": dp.Budget(1.0, 1e-6, adjacency=adjacency)} | settings)
    )


def last_iterate(
    given: LinearTask, plan: NoisyGDPlan, rows: Tensor, targets: Tensor, seed: int = 0
) -> Tensor:
    records = make_records(given, rows, targets)
    return plan.release(
        records, dp.Accountant(given.budget), torch.Generator().manual_seed(seed)
    )


def silent(dim: int, std: float, generator: torch.Generator) -> Tensor:
    return torch.zeros(dim, dtype=torch.float64)


def shrinking(plan: NoisyGDPlan) -> float:
    """Factor of a step where only the regularizer bends."""
    return 1 - plan.lr * plan.reg


def std_of_the_last_iterate(plan: NoisyGDPlan) -> float:
    steps = range(plan.steps)
    return (
        plan.lr
        * plan.noise_std
        * math.sqrt(math.fsum(shrinking(plan) ** (2 * k) for k in steps))
    )


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one", "zero_out"])
@pytest.mark.parametrize("steps", [1, 7, None])
def test_a_chain_that_attains_the_bound_has_the_level_of_the_budget(
    adjacency: str, steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = task(adjacency)
    plan = plan_noisy_gd(given, steps)
    monkeypatch.setattr(DRAW, silent)
    ups = torch.tensor([1e9, 1e9, 1e9])
    changed = {"add_remove": ups[:2], "replace_one": ups * torch.tensor([1.0, 1.0, -1.0])}
    other = changed.get(adjacency, torch.tensor([1e9, 1e9, math.nan]))
    ends = [
        last_iterate(given, plan, torch.ones(len(t), 1, dtype=torch.float64), t)
        for t in (ups, other)
    ]
    level = float((ends[0] - ends[1]).abs()) / std_of_the_last_iterate(plan)
    assert level <= plan.event().mu
    assert level > 0.999 * plan.event().mu
    assert gaussian_mu(1.0, 1e-6) * (1 - 1e-13) < plan.event().mu <= gaussian_mu(1.0, 1e-6)
    assert plan.event().adjacencies == (adjacency,)


def noise_of_the_last_iterate(given: LinearTask, plan: NoisyGDPlan) -> float:
    """Chi-square statistic, of WIDE degrees of freedom."""
    end = last_iterate(given, plan, torch.zeros(given.n, WIDE), torch.zeros(given.n))
    assert float(end.norm()) < plan.radius / 2  # the ball is no part of this
    return float((end / std_of_the_last_iterate(plan)).square().sum())


def test_a_step_without_its_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """False alarms: 1e-6."""
    given = task("replace_one", dim=WIDE, n=30, n_max=30)
    plan = plan_noisy_gd(given, 6)
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], WIDE)
    assert low <= noise_of_the_last_iterate(given, plan) <= high
    for missing in range(6):
        count = iter(range(6))

        def forgetful(
            dim: int, std: float, generator: torch.Generator, count=count, missing=missing
        ) -> Tensor:
            return gaussian_vector(dim, std if next(count) != missing else 0.0, generator)

        monkeypatch.setattr(DRAW, forgetful)
        assert noise_of_the_last_iterate(given, plan) < low


def test_each_planned_step_draws_the_planned_noise_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, float]] = []

    def counted(dim: int, std: float, generator: torch.Generator) -> Tensor:
        drawn.append((dim, std))
        return gaussian_vector(dim, std, generator)

    monkeypatch.setattr(DRAW, counted)
    for steps in (1, 5, None):
        plan = plan_noisy_gd(task("replace_one"), steps)
        drawn.clear()
        last_iterate(task("replace_one"), plan, torch.ones(3, 1), torch.ones(3))
        assert drawn == [(1, plan.noise_std)] * plan.steps
        assert steps in (None, plan.steps)
    assert plan.steps in (12, 13)  # 3 beta/reg, beta of 3 records and reg, rounded up


@pytest.mark.parametrize("radius", [0.05, math.inf])
def test_iterates_stay_in_the_ball(radius: float, monkeypatch: pytest.MonkeyPatch) -> None:
    given = task("replace_one", dim=3, radius=radius)
    plan = plan_noisy_gd(given, 20)
    assert plan.radius <= radius
    norms: list[float] = []

    def watched(point: Tensor, ball: float) -> Tensor:
        found = project(point, ball)
        norms.append(float(found.norm()))
        return found

    monkeypatch.setattr("torch_dpsco.estimators.gradient_descent.project", watched)
    monkeypatch.setattr(
        DRAW, lambda dim, std, generator: 1e9 * gaussian_vector(dim, std, generator)
    )
    last_iterate(given, plan, torch.ones(3, 3), torch.ones(3))
    assert len(norms) == 20
    assert max(norms) <= plan.radius * (1 + 1e-12)


def test_a_step_contracts_as_promised_on_every_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two points, one data set, one step: the distance shrinks by the c that the level rests on."""
    monkeypatch.setattr(DRAW, silent)
    rows = torch.tensor([[3.0, 1.0], [0.2, -0.1], [-1.0, 5.0], [math.nan, 0.0], [0.0, -9.0]])
    for loss in (
        {"loss": dp.losses.Logistic(), "bound_y": None},
        {"loss": dp.losses.Huber(1.0), "bound_y": 1.0},
    ):
        for residual_clip in (None, 0.3):
            given = task(dim=2, residual_clip=residual_clip, reg=0.3, **loss)
            plan = plan_noisy_gd(given, 1)
            objective = build_objective(
                given, plan.reg, make_records(given, rows, torch.tensor([1.0, -1, 1, 1, 1]))
            )
            beta = 2 / plan.lr - plan.reg
            assert objective.smoothness <= beta * (1 + 1e-12)
            promised = (beta - plan.reg) / (beta + plan.reg)
            draws = torch.Generator().manual_seed(1)
            for size in (1e-3, 1.0, 30.0):
                one, other = (size * torch.randn(2, 2, generator=draws)).double()
                moved = [w - plan.lr * objective.value_and_gradient(w)[1] for w in (one, other)]
                assert float((moved[0] - moved[1]).norm()) <= promised * float(
                    (one - other).norm()
                ) * (1 + 1e-9)


def test_rounding_is_in_the_sensitivity_of_a_noisy_step() -> None:
    count = 3000
    given = task(dim=2, n=count, n_max=count, reg=5.0, loss=dp.losses.Logistic(), bound_y=None)
    plan = plan_noisy_gd(given, 1)
    # of one step the level is sensitivity/std
    moved = plan.noise_std * plan.event().mu / noisy_gd_mu(1, 0.5, 1.0, 1.0)
    allowed = moved - given.lipschitz
    rows = torch.randn(count, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    labels = torch.where(torch.arange(count) % 3 == 0, -1.0, 1.0)
    records = make_records(given, rows, labels)
    point = torch.tensor([0.3, -plan.radius], dtype=torch.float64)
    computed = build_objective(given, plan.reg, records).value_and_gradient(point)[1]
    prepared = torch.cat([block for _, block in records.blocks()])
    slopes = given.loss.derivative(prepared @ point, labels.double())
    exact = [
        math.fsum((slopes * prepared[:, k]).tolist()) + plan.reg * float(point[k])
        for k in range(2)
    ]
    error = float((computed - torch.tensor(exact, dtype=torch.float64)).norm())
    assert 0 < 2 * error <= allowed
    most = gradient_rounding(
        count, 2, lipschitz=1.0, smoothness=0.25, reg=5.0, norm=plan.radius, weight=count
    )
    assert allowed > 2 * most * (1 - 1e-3)


def test_the_budget_pays_for_the_level_whatever_the_number_of_steps() -> None:
    for steps in (1, 3, 200):
        plan = plan_noisy_gd(task("replace_one"), steps)
        beta = 2 / plan.lr - plan.reg
        contraction = (beta - plan.reg) / (beta + plan.reg)
        level = noisy_gd_mu(steps, contraction, 2 * 0.25, plan.noise_std)
        assert level <= gaussian_mu(1.0, 1e-6)
        assert level == pytest.approx(gaussian_mu(1.0, 1e-6), rel=1e-4)


def test_a_number_of_steps_that_is_none_is_named() -> None:
    for steps in (0, -1, 2.5):
        with pytest.raises(ValueError, match="steps"):
            plan_noisy_gd(task("replace_one"), steps)


# -- all sums released ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one", "zero_out"])
def test_all_steps_of_a_run_with_momentum_are_charged(adjacency: str) -> None:
    given = task(adjacency, reg=None, dim=2, n=500, n_max=500, bound_y=3.0)
    plan = plan_noisy_gd(given, steps=30, released="all")
    moved = (2 if adjacency == "replace_one" else 1) * 0.25
    level = math.sqrt(30) * moved / plan.noise_std
    assert level <= plan.event().mu <= level * (1 + 1e-6)
    assert gaussian_mu(1.0, 1e-6) * (1 - 1e-9) <= plan.event().mu <= gaussian_mu(1.0, 1e-6)
    # a regularizer lets the last iterate forget, not the sums
    assert (
        dataclasses.replace(plan, task=dataclasses.replace(plan.task, reg=50.0)).event().mu
        >= level
    )
    # the last iterate alone would be cheaper at the same noise, and is not what is charged
    alone = plan_noisy_gd(task(adjacency, dim=2, n=500, n_max=500, reg=50.0), steps=30)
    assert dataclasses.replace(alone, noise_std=plan.noise_std).event().mu < plan.event().mu


def test_a_run_with_momentum_is_the_loop_of_its_docstring() -> None:
    given = task(reg=None, dim=2, n=50, n_max=50, loss=dp.losses.Huber(1.0), bound_y=3.0)
    plan = dataclasses.replace(plan_noisy_gd(given, steps=9, released="all"), momentum=0.7)
    draws = torch.Generator().manual_seed(4)
    rows, targets = (
        torch.randn(50, 2, generator=draws).double() * 0.3,
        torch.randn(50, generator=draws).double(),
    )
    found = last_iterate(given, plan, rows, targets, seed=7)
    noise, w, moved, later = (
        torch.Generator().manual_seed(7),
        torch.zeros(2).double(),
        torch.zeros(2).double(),
        [],
    )
    for step in range(9):
        slopes = -(targets - rows @ w).clamp(-1.0, 1.0)
        gradient = slopes @ rows + gaussian_vector(2, plan.noise_std, noise)
        moved = 0.7 * moved - plan.lr * gradient
        w = w + moved
        if step >= 4:
            later.append(w)
    torch.testing.assert_close(found, torch.stack(later).mean(0))


@pytest.mark.parametrize(("kind", "power", "from_"), [("labels", 2, 60.0), ("targets", 1, 30.0)])
def test_steps_that_would_drown_go_less_far(kind: str, power: int, from_: float) -> None:
    loss = {} if kind == "targets" else {"loss": dp.losses.Logistic(), "bound_y": None}
    for n in (100, 2000, 200_000):
        budget = dp.Budget(1.0, 1e-6, adjacency="add_remove")
        given = task(reg=None, dim=20, n=n, n_max=2 * n, budget=budget, **loss)
        share = min(1.0, signal_to_noise(given.level, n, given.parameters) / from_) ** power
        assert gradient_descent._way(given) == pytest.approx(way_guess(given) * share)
    silent = task(reg=None, budget=None, noise_multiplier=50.0, **loss)
    assert gradient_descent._way(silent) == way_guess(silent)


def test_more_noise_shortens_the_way() -> None:
    momenta, steps = [], []
    for epsilon in (0.05, 0.2, 1.0, 5.0):
        given = task(
            reg=None,
            dim=20,
            n=5000,
            n_max=10_000,
            budget=dp.Budget(epsilon, 1e-6, adjacency="add_remove"),
        )
        plan = plan_noisy_gd(given, released="all")
        momenta.append(plan.momentum), steps.append(plan.steps)
    assert momenta == sorted(momenta)
    assert 0 <= momenta[0] < momenta[-1] <= 1 - 10 / (steps[-1] + 5)
    assert 64 <= steps[0] <= steps[1] < steps[2] < steps[3] <= 1024
    with pytest.raises(ValueError, match="momentum must be in"):
        dataclasses.replace(plan_noisy_gd(task(reg=None), released="all"), momentum=1.0)
    with pytest.raises(ValueError, match="released"):
        plan_noisy_gd(task(), released="some")
