"""Preconditioned gradient descent: what one record does to each release, their noise, and the loop itself."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators import least_squares as preconditioned_gd
from torch_dpsco.estimators.base import plan_linear
from torch_dpsco.estimators.least_squares import (
    PreconditionedGDPlan,
    horizon,
    plan_boosted,
    plan_preconditioned_gd,
    stable_step,
)
from torch_dpsco.estimators.preparation import Preparation, PrivatePreparation, Units
from torch_dpsco.estimators.task import LinearTask, make_records
from torch_dpsco.noise import gaussian_vector


def draw_with(monkeypatch, drawn):
    """Takes the place of what noise is drawn with."""
    for place in ("gradient_descent", "least_squares"):
        monkeypatch.setattr(f"torch_dpsco.estimators.{place}.gaussian_vector", drawn)


BOUND, CLASSES = 1.5, 3
NAN, INF = math.nan, math.inf
SOFTMAX = {"loss": dp.losses.SoftmaxCrossEntropy(CLASSES)}
LOGISTIC = {"loss": dp.losses.Logistic(), "residual_clip": 0.3}
SQUARED = {"loss": dp.losses.Squared(), "bound_y": 2.0}
KINDS = pytest.mark.parametrize(
    "kind", [SOFTMAX, LOGISTIC, SQUARED], ids=["classes", "signs", "real"]
)
# (x1, x2, target, weight): the target is that of a sign, rounded to a class, or real
RECORDS = (
    (BOUND, 0.0, 1.0, 1.0),
    (-BOUND, 0.0, 1.0, 1.0),
    (BOUND, 0.0, -1.0, 1.0),
    (0.0, -9.0, 1.0, 5.0),
    (1e308, 1e308, 1e308, 1.0),
    (0.1, 0.2, 2.0, 0.5),
    (NAN, 1.0, 1.0, 1.0),
    (1.0, INF, 1.0, 1.0),
    (1.0, 1.0, NAN, 1.0),
    (1.0, 1.0, 1.0, NAN),
    (1.0, 1.0, 1.0, -INF),
    (0.0, 0.0, 0.0, 1.0),
)
NULL = (NAN, 0.0, 0.0, 1.0)


PRIVATE, UNIT = Preparation(BOUND), Preparation(1.0, intercept=0.3, whole=True)
# released: a center off all rows, and a radius within which some lie
UNITS = Units(replace(UNIT, center=(0.2, -0.1), scale=(0.6, 0.6), before=BOUND))


def measured(kind: dict[str, object]) -> dict[str, object]:
    """Settings of a task whose rows are measured before, for a part of the budget."""
    given = PrivatePreparation(
        given=PRIVATE, rows=0.05, counts=0.08, bound_y=kind.get("bound_y")
    )
    return {"preparation": UNIT, "prepare": given}


def task(adjacency: str = "add_remove", **settings: object) -> LinearTask:
    given = {"preparation": Preparation(BOUND), "dim": 2, "n": 4} | SOFTMAX
    return LinearTask(
        **(given | {"budget": dp.Budget(1.0, 1e-6, adjacency=adjacency)} | settings)
    )


def records_of(given: LinearTask, rows: list[tuple[float, ...]]) -> object:
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)
    targets = table[:, 2]
    if given.num_scores > 1:  # 2 is the last class; what is negative, huge or no number is none
        targets = torch.where(targets.abs() < 3, targets, -1.0).long()
    return make_records(
        given, table[:, :2], targets, table[:, 3], UNITS if given.prepare else None
    )


def silent(dim: int, std: float, generator: torch.Generator) -> Tensor:
    return torch.zeros(dim, dtype=torch.float64)


def release(plan: PreconditionedGDPlan, records: object, seed: int = 0) -> Tensor:
    return plan.release(
        records, dp.Accountant(plan.task.budget), torch.Generator().manual_seed(seed)
    )


# -- one record -------------------------------------------------------------------------------------------------------


def moved(given: LinearTask, plan: PreconditionedGDPlan) -> tuple[float, float]:
    """How far neighbors move X'X and a sum of gradients, at most: over points from 0 to the edge of the ball."""
    shared = [(0.0, 0.4, 1.0, 1.0), (0.9, -0.1, -1.0, 0.7), (-0.3, 0.9, 2.0, 1.0)]
    with_it = [[*shared, record] for record in (*RECORDS, NULL)]
    rows = [shared, *with_it] if given.adjacency == "add_remove" else [[*shared, NULL], *with_it]
    data, pairs = (
        [records_of(given, one) for one in rows],
        [(0, other) for other in range(1, len(rows))],
    )
    if given.adjacency == "replace_one":
        pairs = list(permutations(range(len(rows)), 2))

    def apart(released: list[Tensor]) -> float:
        return max(float((released[one] - released[other]).norm()) for one, other in pairs)

    draws, most = torch.Generator().manual_seed(1), 0.0
    for size in (0.0, 0.1, 3.0, plan.radius):
        w = torch.randn(given.parameters, generator=draws, dtype=torch.float64)
        w = size * w / w.norm()
        most = max(most, apart([plan.gradient(records, w) for records in data]))
    return apart([records.gram(records.weights) for records in data]), most


@pytest.mark.cases(3, 1)
@KINDS
@pytest.mark.parametrize("intercept", [0.0, 0.8, "measured"])
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
def test_no_record_moves_a_preconditioned_step_by_more_than_the_clip(
    adjacency: str, intercept: float | str, kind: dict[str, object]
) -> None:
    """What is measured takes its share of the level: what is left is that of the steps."""
    private = intercept == "measured"
    prepare = (
        measured(kind) if private else {"preparation": Preparation(BOUND, intercept=intercept)}
    )
    given = task(adjacency, **kind, **prepare)
    plan, sides = plan_preconditioned_gd(given), 1 + (adjacency == "replace_one")
    gram, gradient = moved(given, plan)
    square = given.preparation.bound**2
    assert 0.8 * math.sqrt(sides) * square < gram <= math.sqrt(sides) * square
    # with an intercept no row is the negative of another one
    assert (0.8 if intercept else 0.99) * sides * plan.clip < gradient <= sides * plan.clip
    spent = math.hypot(gram / plan.gram_std, math.sqrt(plan.steps) * gradient / plan.noise_std)
    own = plan.own_event()
    assert (0.8 if intercept else 0.99) * own.mu < spent <= own.mu
    assert own.adjacencies == (adjacency,)
    assert (0.05 if private else 0.0) <= given.measured
    assert (
        gaussian_mu(1.0, 1e-6) * (1 - 1e-13)
        < math.hypot(own.mu, given.measured)
        <= gaussian_mu(1.0, 1e-6)
    )


def test_a_step_that_does_not_clip_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    given = task(**LOGISTIC)
    plan = plan_preconditioned_gd(given)
    assert moved(given, plan)[1] <= plan.clip
    monkeypatch.setattr(preconditioned_gd, "_GUARD", -0.01)
    assert moved(given, plan)[1] > plan.clip


@KINDS
def test_null_records_change_no_bit_of_a_gradient(kind: dict[str, object]) -> None:
    given = task(**kind, n=8)
    plan, rows = plan_preconditioned_gd(given), [(0.3, 0.4, 1.0, 1.0), (0.9, -0.1, 1.0, 0.7)]
    w = torch.full((given.parameters,), plan.radius / 9, dtype=torch.float64)
    for null in (
        NULL,
        (1.0, INF, 1.0, 1.0),
        (1.0, 1.0, NAN, 1.0),
        (1.0, 1.0, 1.0, NAN),
        (1.0, 1.0, 1.0, 0.0),
    ):
        with_it = plan.gradient(records_of(given, [*rows, null]), w)
        torch.testing.assert_close(
            with_it, plan.gradient(records_of(given, rows), w), rtol=1e-14, atol=0
        )


@pytest.mark.parametrize(
    ("kind", "planner"),
    [
        (SOFTMAX, plan_preconditioned_gd),
        (LOGISTIC, plan_preconditioned_gd),
        (SQUARED, plan_preconditioned_gd),
        (SQUARED, plan_boosted),
    ],
)
def test_rounding_is_in_the_sensitivity_of_a_preconditioned_step(
    kind: dict[str, object], planner: Any
) -> None:
    count = 3000
    given = task(n=count, n_max=count, **kind)
    plan = planner(given)
    gram, gradient = plan._moves
    rows = torch.randn(count, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    targets = (
        torch.arange(count) % 3
        if given.num_scores > 1
        else torch.where(torch.arange(count) % 3 == 0, -1.0, 1.0)
    )
    records = make_records(given, rows, targets)
    prepared = torch.cat([block for _, block in records.blocks()])
    w = torch.randn(
        given.num_scores, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    for point in (w, w * plan.radius / w.norm()):
        slopes = given.loss.derivative((prepared @ point.T).squeeze(1), records.targets).view(
            count, -1
        )
        limits = plan.clip * (1 - 1e-9) / prepared.norm(dim=1)
        slopes = slopes * (limits / slopes.norm(dim=1)).clamp(max=1.0).unsqueeze(1)
        exact = [
            [math.fsum((slope * column).tolist()) for column in prepared.T] for slope in slopes.T
        ]
        error = float(
            (
                plan.gradient(records, point.flatten())
                - torch.tensor(exact, dtype=torch.float64).flatten()
            ).norm()
        )
        assert 0 < 2 * error <= gradient - plan.clip
    exact = [[math.fsum((one * other).tolist()) for one in prepared.T] for other in prepared.T]
    error = float(
        (records.gram(records.weights) - torch.tensor(exact, dtype=torch.float64)).norm()
    )
    assert 0 < 2 * error <= gram - BOUND**2


# -- noise ------------------------------------------------------------------------------------------------------------


@KINDS
def test_the_level_of_a_run_is_that_of_all_its_releases(
    kind: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, float]] = []

    def counted(dim: int, std: float, generator: torch.Generator) -> Tensor:
        drawn.append((dim, std))
        return gaussian_vector(dim, std, generator)

    draw_with(monkeypatch, counted)
    plan = plan_preconditioned_gd(task(**kind))
    release(plan, records_of(plan.task, list(RECORDS[:4])))
    assert drawn[0] == (3, plan.gram_std)  # of the lower triangle
    assert drawn[1:] == [(plan.task.parameters, plan.noise_std)] * plan.steps
    level = math.hypot(BOUND**2 / drawn[0][1], *(plan.clip / std for _, std in drawn[1:]))
    assert level <= plan.event().mu <= level * (1 + 1e-9)


WIDE = 600


def noise_of_the_answer(
    plan: PreconditionedGDPlan, monkeypatch: pytest.MonkeyPatch, missing: int = -1
) -> float:
    """Chi-square statistic of the answer on null records, X'X without noise: (K - 1) WIDE degrees of freedom."""
    calls = iter(range(-1, plan.steps))

    def drawn(dim: int, std: float, generator: torch.Generator) -> Tensor:
        call = next(calls)
        return (
            silent(dim, std, generator)
            if call in (-1, missing)
            else gaussian_vector(dim, std, generator)
        )

    draw_with(monkeypatch, drawn)
    zero = torch.zeros(WIDE, dtype=torch.float64)
    monkeypatch.setattr(
        torch.linalg, "eigh", lambda gram: (zero, torch.eye(WIDE, dtype=torch.float64))
    )
    records = make_records(plan.task, torch.zeros(4, WIDE), torch.zeros(4, dtype=torch.int64))
    answer = release(plan, records).view(CLASSES, WIDE)
    assert float(answer.sum(0).abs().max()) < 1e-9 * float(answer.abs().max())
    lr = min(
        horizon(
            zero.numpy(), plan.ridge, plan.gram_std, plan.noise_std / math.sqrt(plan.steps), 4
        )
        / plan.steps,
        stable_step(1 / CLASSES, plan.ridge, 0.0),
    )
    last = math.ceil(0.3 * plan.steps)
    shares = [min(1.0, (plan.steps - step) / last) for step in range(plan.steps)]
    std = lr / plan.ridge * plan.noise_std * math.sqrt(math.fsum(share**2 for share in shares))
    return float((answer / std).square().sum())


def test_a_preconditioned_step_without_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """False alarms: 1e-6 each."""
    plan = plan_preconditioned_gd(task(dim=WIDE))
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], (CLASSES - 1) * WIDE)
    assert low <= noise_of_the_answer(plan, monkeypatch) <= high
    few = PreconditionedGDPlan.from_dict(plan.to_dict() | {"steps": 4})
    assert low <= noise_of_the_answer(few, monkeypatch) <= high
    for missing in range(3):
        assert noise_of_the_answer(few, monkeypatch, missing) < low


def test_the_noise_of_the_covariance_has_its_std_in_the_triangle_that_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chi-square, false alarms: 1e-6 each."""
    dim, seen = 60, []
    eigh = torch.linalg.eigh

    def watched(matrix: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(matrix)
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", watched)
    plan = plan_preconditioned_gd(task(dim=dim))
    release(
        plan, make_records(plan.task, torch.zeros(4, dim), torch.zeros(4, dtype=torch.int64))
    )
    [noise] = seen
    rows, columns = torch.tril_indices(dim, dim, -1)  # the triangle that is read
    for values, std in (
        (noise.diagonal(), plan.gram_std),
        (noise[rows, columns], plan.gram_std / math.sqrt(2)),
    ):
        low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], len(values))
        assert low <= float((values / std).square().sum()) <= high


# -- the loop ---------------------------------------------------------------------------------------------------------


def literal(plan: PreconditionedGDPlan, rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The loop in numpy, record by record, without noise."""
    d = rows.shape[1]
    gram = sum(np.outer(x, x) for x in rows)
    values = np.linalg.eigvalsh(gram)
    inverse = np.linalg.inv(gram + plan.ridge * np.eye(d))
    noise = plan.noise_std / math.sqrt(plan.steps)
    tau = horizon(values, plan.ridge, plan.gram_std, noise, plan.task.n)
    lr = min(tau / plan.steps, CLASSES * (1 + plan.ridge / values[-1]))
    w, iterates = np.zeros((CLASSES, d)), []
    for _ in range(plan.steps):
        total = np.zeros_like(w)
        for x, y in zip(rows, labels, strict=True):
            chances = np.exp(w @ x - (w @ x).max())
            gradient = np.outer(chances / chances.sum() - np.eye(CLASSES)[y], x)
            total += gradient * min(1.0, plan.clip / np.linalg.norm(gradient))
        w = w - lr * total @ inverse
        iterates.append(w)
    return np.mean(iterates[-math.ceil(0.3 * plan.steps) :], axis=0)


def test_the_loop_is_the_literal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_with(monkeypatch, silent)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(12, 4))
    rows *= (
        BOUND / np.linalg.norm(rows, axis=1, keepdims=True) * rng.uniform(0.3, 1, size=(12, 1))
    )
    labels = rng.integers(CLASSES, size=12)
    for epsilon in (1.0, 300.0):
        plan = plan_preconditioned_gd(
            task(dim=4, n=12, budget=dp.Budget(epsilon, 1e-6, "add_remove"))
        )
        answer = release(
            plan, make_records(plan.task, torch.from_numpy(rows), torch.from_numpy(labels))
        )
        wanted = literal(plan, rows, labels)
        torch.testing.assert_close(
            answer.view(CLASSES, 4), torch.from_numpy(wanted), rtol=1e-6, atol=1e-12
        )


def test_a_first_step_is_least_squares_on_indicators(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0 the gradient is X'(1/K - Y): one step with a clip that binds nobody is a ridge regression, times K."""
    draw_with(monkeypatch, silent)
    plan = plan_preconditioned_gd(task(n=50, dim=3, budget=dp.Budget(300.0, 1e-6, "add_remove")))
    plan = PreconditionedGDPlan.from_dict(plan.to_dict() | {"steps": 1, "clip": 2 * BOUND})
    draws = torch.Generator().manual_seed(4)
    rows, labels = torch.randn(50, 3, generator=draws).double() / 3, torch.arange(50) % CLASSES
    records = make_records(plan.task, rows, labels)
    prepared = torch.cat([block for _, block in records.blocks()])
    gram = prepared.T @ prepared + plan.ridge * torch.eye(3, dtype=torch.float64)
    ridge = torch.linalg.solve(
        gram, prepared.T @ (torch.nn.functional.one_hot(labels).double() - 1 / CLASSES)
    ).T
    answer = release(plan, records).view(CLASSES, 3)
    ratio = float(answer.norm() / ridge.norm())
    torch.testing.assert_close(answer, ratio * ridge)
    assert (
        0
        < ratio
        < CLASSES
        * (1 + plan.ridge / float(torch.linalg.eigvalsh(prepared.T @ prepared)[-1]))
        * 1.001
    )


def test_iterates_and_the_answer_stay_in_the_ball(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_with(
        monkeypatch, lambda dim, std, generator: 1e9 * gaussian_vector(dim, std, generator)
    )
    rows = list(RECORDS[:4])
    for given in (task(radius=0.05), task(), task(**SQUARED)):
        plan = plan_preconditioned_gd(given)
        assert plan.radius <= given.radius
        assert float(release(plan, records_of(given, rows)).norm()) <= plan.radius * (1 + 1e-12)
    assert plan.radius > 100  # beyond all that a budget's noise would do


def test_many_records_are_fitted_as_well_as_without_privacy() -> None:
    """At a large budget the answer separates what can be separated; K-scores and one score alike."""
    draws = torch.Generator().manual_seed(5)
    centers = 1.2 * torch.eye(3, dtype=torch.float64)
    labels = torch.arange(600) % CLASSES
    rows = centers[labels] + 0.1 * torch.randn(600, 3, generator=draws, dtype=torch.float64)
    given = task(dim=3, n=600, budget=dp.Budget(30.0, 1e-6, "add_remove"))
    w = release(plan_preconditioned_gd(given), make_records(given, rows, labels)).view(
        CLASSES, 3
    )
    assert torch.equal((rows @ w.T).argmax(1), labels)
    signs = torch.where(labels == 0, 1.0, -1.0)
    one = task(
        dim=3,
        n=600,
        budget=given.budget,
        preparation=Preparation(BOUND, intercept=1.0),
        **LOGISTIC,
    )
    w = release(plan_preconditioned_gd(one), make_records(one, rows, signs))
    assert torch.equal(torch.sign(rows @ w[:3] + w[3]), signs.double())


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"budget": dp.Budget(1.0, 0.0)}, "delta > 0"),
        ({"reg": 1.0}, "reg"),
        ({"loss": dp.losses.Hinge()}, "smooth"),
        ({"loss": dp.losses.Logistic(), "tilt": 1.0}, "plain sum"),
        ({"loss": dp.losses.Logistic(), "attack_radius": 1.0}, "plain sum"),
    ],
)
def test_what_it_does_not_cover_is_refused(settings: dict[str, object], word: str) -> None:
    with pytest.raises(ConditionError, match=word):
        plan_preconditioned_gd(task(**settings))
    with pytest.raises(ConditionError, match="exact"):
        plan_linear(task(), "preconditioned_gd", secure="exact")
