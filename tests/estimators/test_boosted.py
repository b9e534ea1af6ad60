"""Boosted AdaSSP: what a record does to X'X and to each round, their noise, and the rounds as the page has them."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators import Ridge
from torch_dpsco.estimators.base import plan_linear
from torch_dpsco.estimators.least_squares import BoostedPlan, boosted_clip, plan_boosted
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.task import LinearTask, make_records
from torch_dpsco.noise import gaussian_vector


def draw_with(monkeypatch, drawn):
    """Takes the place of what noise is drawn with."""
    for place in ("gradient_descent", "least_squares"):
        monkeypatch.setattr(f"torch_dpsco.estimators.{place}.gaussian_vector", drawn)


BOUND, TARGET = 1.5, 2.0
NAN, INF = math.nan, math.inf
ADJACENCIES = ["add_remove", "zero_out", "replace_one"]
RECORDS = (
    (BOUND, 0.0, TARGET),
    (BOUND, 0.0, -INF),
    (0.0, -BOUND, TARGET),
    (1e308, 1e308, 1e308),
    (BOUND * math.cos(0.3), BOUND * math.sin(0.3), TARGET),
    (1e-9, 1e-12, TARGET),
    (0.0, 0.0, TARGET),
    (NAN, 1.0, 1.0),
    (1.0, 1.0, NAN),
)


def task(adjacency: str = "add_remove", **settings: object) -> LinearTask:
    given = {
        "loss": dp.losses.Squared(),
        "preparation": Preparation(BOUND),
        "bound_y": TARGET,
        "dim": 2,
        "n": 4,
    }
    return LinearTask(
        **(given | {"budget": dp.Budget(1.0, 1e-6, adjacency=adjacency)} | settings)
    )


def released(
    given: LinearTask, plan: BoostedPlan, table: list[tuple[float, ...]], path: list[Tensor]
) -> Tensor:
    """X'X in the coordinates that its noise is independent in, and the sum of each round at the iterate of a path."""
    rows = torch.tensor(table, dtype=torch.float64)
    records = make_records(given, rows[:, :2], rows[:, 2])
    gram = records.gram(records.weights)
    parts = [gram.diagonal() / plan.gram_std, gram[1:, 0] * math.sqrt(2) / plan.gram_std]
    return torch.cat(parts + [plan.gradient(records, w) / plan.noise_std for w in path])


def moved(
    given: LinearTask, plan: BoostedPlan, rest: list[tuple[float, ...]], path: list[Tensor]
) -> list[float]:
    """GDP levels of the joint release at that path, over neighbors."""
    with_it = [released(given, plan, [*rest, record], path) for record in RECORDS]
    if given.adjacency == "add_remove":
        return [float((one - released(given, plan, rest, path)).norm()) for one in with_it]
    if given.adjacency == "zero_out":
        return [float((one - with_it[-1]).norm()) for one in with_it]
    return [float((one - other).norm()) for one, other in permutations(with_it, 2)]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
@settings(max_examples=25)
@examples(st.floats(0, 2 * math.pi), st.floats(0, 1))
def test_no_record_moves_the_rounds_by_more_than_the_level(
    adjacency: str, angle: float, share: float
) -> None:
    given = task(adjacency)
    plan = plan_boosted(given, rounds=3)
    point = (
        share
        * plan.radius
        * torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    )
    rest = [(0.0, 0.4, 1.0), (0.9, -0.1, -2.0), (-0.3, 0.9, 0.5)]
    assert (
        max(moved(given, plan, rest, [torch.zeros(2).double(), point, -point]))
        <= plan.own_event().mu
    )


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_opposite_targets_attain_the_level_of_the_rounds(adjacency: str) -> None:
    given = task(adjacency)
    plan = plan_boosted(given, rounds=3)
    found = moved(given, plan, [(0.0, 0.4, 1.0)] * 3, [torch.zeros(2).double()] * 3)
    # opposite gradients have one matrix, so that a replaced record attains the part of the sums alone
    attained = math.sqrt(1 - 0.2) if adjacency == "replace_one" else 1.0
    assert attained * plan.own_event().mu * (1 - 1e-6) < max(found) <= plan.own_event().mu


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("rounds", [1, 7, 40])
def test_the_rounds_have_the_level_of_the_budget(adjacency: str, rounds: int) -> None:
    mu = gaussian_mu(1.0, 1e-6)
    plan = plan_boosted(task(adjacency), rounds)
    assert mu * (1 - 1e-12) < plan.event().mu <= mu
    assert plan.event().adjacencies == (adjacency,)
    sides = 2 if adjacency == "replace_one" else 1
    parts = [math.sqrt(sides) * BOUND**2 / plan.gram_std] + [
        sides * plan.clip / plan.noise_std
    ] * rounds
    assert mu * (1 - 1e-9) < math.hypot(*parts) <= mu
    assert parts[0] == pytest.approx(mu * math.sqrt(0.2))


def run(given: LinearTask, plan: BoostedPlan, rows: Tensor, targets: Tensor) -> Tensor:
    records = make_records(given, rows, targets)
    return plan.release(records, dp.Accountant(given.budget), torch.Generator().manual_seed(0))


def test_each_round_gets_its_noise_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, float]] = []

    def counted(dim: int, std: float, generator: torch.Generator) -> Tensor:
        drawn.append((dim, std))
        return gaussian_vector(dim, std, generator)

    draw_with(monkeypatch, counted)
    given = task(dim=3)
    for rounds in (1, 5):
        drawn.clear()
        plan = plan_boosted(given, rounds)
        run(given, plan, torch.ones(4, 3), torch.ones(4))
        assert drawn == [(6, plan.gram_std)] + [(3, plan.noise_std)] * rounds


def test_the_noise_of_the_matrix_is_not_rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    eigh = torch.linalg.eigh
    draw_with(
        monkeypatch, lambda dim, std, generator: torch.full((dim,), std, dtype=torch.float64)
    )
    monkeypatch.setattr(
        torch.linalg, "eigh", lambda matrix: seen.append(matrix.clone()) or eigh(matrix)
    )
    given = task(dim=3)
    plan = plan_boosted(given)
    run(given, plan, torch.zeros(4, 3), torch.ones(4))
    (noise,) = seen
    assert noise.diagonal().tolist() == [plan.gram_std] * 3
    for row, column in ((1, 0), (2, 0), (2, 1)):  # the triangle that is read
        exact = Fraction(float(noise[row, column])) ** 2
        assert abs(exact * 2 / Fraction(plan.gram_std) ** 2 - 1) <= Fraction(1, 2**51)


@pytest.mark.parametrize("reg", [None, 7.0])
@pytest.mark.parametrize("rounds", [1, 2, 9])
def test_the_rounds_are_those_of_the_page(
    reg: float | None, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With noise of all ones times its std, on gradients; the loop is written literally, record by record."""
    draw_with(
        monkeypatch, lambda dim, std, generator: torch.full((dim,), std, dtype=torch.float64)
    )
    given = task(n=50, dim=3, reg=reg)
    plan = plan_boosted(given, rounds)
    draws = torch.Generator().manual_seed(rounds)
    rows = torch.randn(50, 3, generator=draws, dtype=torch.float64) * 0.5
    targets = torch.randn(50, generator=draws, dtype=torch.float64)
    answer = run(given, plan, rows, targets).numpy()
    x = (rows * (BOUND / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)).numpy()
    y = targets.clamp(-TARGET, TARGET).numpy()
    noise = np.full((3, 3), math.sqrt(0.5)) + (1 - math.sqrt(0.5)) * np.eye(3)
    values, vectors = np.linalg.eigh(x.T @ x + plan.gram_std * noise)
    ridge = plan.gram_std * (math.sqrt(6) + 2.72) + (reg or 0.0)
    inverse = np.linalg.inv(
        vectors @ np.diag(np.maximum(values, 0)) @ vectors.T + ridge * np.eye(3)
    )
    w, later = np.zeros(3), []
    for t in range(rounds):
        total = np.full(3, -plan.noise_std) - (reg or 0.0) * w
        for row, target in zip(x, y, strict=True):
            gradient = row * (target - row @ w)
            total = total + gradient * min(1.0, plan.clip / np.linalg.norm(gradient))
        w = w + inverse @ total
        w = w * min(1.0, plan.radius / np.linalg.norm(w))
        later += [w] if t >= rounds // 2 else []
    np.testing.assert_allclose(answer, np.mean(later, axis=0), rtol=1e-7)


def test_a_clip_follows_public_numbers() -> None:
    widths = [boosted_clip(signal) for signal in (1.0, 100.0, 400.0, 1e4)]
    assert widths == [1.0, 1.0, 2.0, 10.0]
    small, large = (plan_boosted(task(n=n)) for n in (10, 10**6))
    assert small.clip == pytest.approx(0.1 * TARGET * BOUND)
    assert large.clip == pytest.approx(0.2 * TARGET * BOUND)  # in public units it stops widening
    public = {"adjacency": "add_remove", "n": 10**6, "bound_x": BOUND, "bound_y": TARGET}
    measured = Ridge(delta=1e-9, **public).plan(2)
    assert measured.clip / measured.task.preparation.bound > 10.0  # spreads


@pytest.mark.slow
def test_the_noise_of_rounds_is_for_residuals_and_not_for_the_bound_on_targets() -> None:
    """Of ten runs all are near least squares (score 0.853); scores are 0.852 with a std of 0.0004."""
    draws = np.random.default_rng(5)
    X = draws.uniform(0, 1, size=(8000, 4))
    y = X @ [1.0, -2.0, 0.5, 1.0] + 0.3 * draws.standard_normal(8000) + 3.0
    given = {"epsilon": 0.3, "adjacency": "add_remove", "n": 8000, "bound_x": 2.0}
    assert min(Ridge(bound_y=40.0, **given).fit(X, y).score(X, y) for _ in range(10)) > 0.84
    near, far = (Ridge(bound_y=bound, **given).plan(4) for bound in (40.0, 400.0))
    assert near.noise_std == far.noise_std
    near, far = (
        Ridge(bound_y=bound, mechanism="adassp", **given).plan(4) for bound in (40.0, 400.0)
    )
    assert far.constants.std_xty == pytest.approx(10 * near.constants.std_xty)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": dp.losses.Huber(1.0)},
        {"residual_clip": 0.5},
        {"budget": dp.Budget(1.0, 0.0)},
    ],
)
def test_only_squared_losses_at_positive_delta_are_boosted(settings: dict[str, object]) -> None:
    with pytest.raises(ConditionError, match="boosted AdaSSP"):
        plan_boosted(task(**settings))
    with pytest.raises(ConditionError, match="mechanism='output'"):
        plan_linear(task(), "boosted_adassp", secure="exact")
