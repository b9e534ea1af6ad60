"""Scale and intercept of logistic regression by noisy steps: charged, bounded, drawn, and what they are for."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators import HuberRegressor, LogisticRegression
from torch_dpsco.estimators.gradient_descent import NoisyGDPlan, _pair_sums, plan_noisy_gd
from torch_dpsco.estimators.link import Link
from torch_dpsco.estimators.records import Records
from torch_dpsco.problem import smooth_pace

DRAW = "torch_dpsco.estimators.gradient_descent.gaussian_vector"
GIVEN = {"delta": 1e-6, "bound_x": 2.0, "classes": (0, 1)}


def model(epsilon: float = 1.0, n: int = 4_000, **settings: object) -> LogisticRegression:
    return LogisticRegression(epsilon=epsilon, n=n, **(GIVEN | settings))


def planned(adjacency: str = "add_remove", **settings: object) -> NoisyGDPlan:
    plan = model(adjacency=adjacency, **settings).plan(30)
    assert isinstance(plan, NoisyGDPlan)
    return plan


def rare(n: int, share: float, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Rows that say nothing about a rare label."""
    draws = np.random.default_rng(seed)
    return draws.uniform(size=(n, 30)) * 0.3 + 0.1, (draws.random(n) < share).astype(int)


def log_loss(y: np.ndarray, odds: np.ndarray) -> float:
    return float(np.mean(np.logaddexp(0.0, odds) - y * odds))


# -- the guarantee ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
def test_the_sums_for_scale_and_intercept_of_records_are_charged(adjacency: str) -> None:
    plan = planned(adjacency)
    moved = 2 if adjacency == "replace_one" else 1
    alone = dataclasses.replace(plan, last_std=None).own_event().mu
    both = math.hypot(alone, moved * math.sqrt(2 * 32) / plan.last_std)
    assert both <= plan.own_event().mu <= both * (1 + 1e-4)
    spent = math.hypot(plan.own_event().mu, plan.task.prepare.level)
    assert gaussian_mu(1.0, 1e-6) * (1 - 1e-9) <= spent <= gaussian_mu(1.0, 1e-6)


def test_sums_that_an_edited_plan_adds_are_charged_or_refused() -> None:
    task = dataclasses.replace(planned().task, reg=5.0)
    last = plan_noisy_gd(task)
    assert last.momentum is None
    assert last.last_std is None
    edited = dataclasses.replace(last, last_std=10.0)
    assert edited.own_event().mu >= math.hypot(last.own_event().mu, math.sqrt(2 * 32) / 10.0)
    loss = dataclasses.replace(task, loss=dp.losses.SmoothedHinge(), residual_clip=None)
    with pytest.raises(ConditionError, match="last_std"):
        dataclasses.replace(plan_noisy_gd(loss), last_std=10.0)


@pytest.mark.parametrize("label", [-1.0, 1.0])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_no_record_moves_the_sums_for_scale_and_intercept_by_more_than_the_root_of_2(
    label: float, size: float
) -> None:
    """Whatever a record, the direction and the point are; one whose label is wrong by far attains it."""
    draws = torch.Generator().manual_seed(3)
    rows = torch.randn(200, 5, generator=draws).double() * size
    rows[:, -1] = 0.3
    most = 0.0
    for point in (torch.zeros(2), torch.tensor([-9.0, -9.0]), torch.tensor([900.0, 400.0])):
        for row in rows:
            record = Records(row[None], torch.tensor([label]))
            total = _pair_sums(
                torch.randn(5, generator=draws).double(), 0.3, point.double(), record
            )
            most = max(most, float(total[0].norm()))
    assert most <= math.sqrt(2) * (1 + 1e-12)
    if size > 1:
        assert most == pytest.approx(math.sqrt(2), rel=1e-3)


def test_rounding_is_in_the_sensitivity_of_the_sums_of_records() -> None:
    """Also of scores, whose clip is 2/sqrt(d) of what they may be: far out a gradient moves by 350 times as much."""
    plan = planned()
    draws = torch.Generator().manual_seed(4)
    rows = torch.randn(400, 31, generator=draws).double()
    rows = rows / rows.norm(dim=1, keepdim=True)
    rows[:, -1] = 0.3
    labels = torch.where(rows[:, 0] > 0, 1.0, -1.0)
    direction = torch.randn(31, generator=draws).double()
    direction = direction / direction.norm() * math.sqrt(30) / 2
    point = torch.tensor([800.0, -300.0]).double()
    computed = _pair_sums(direction, 0.3, point, Records(rows, labels))[0]
    terms: list[tuple[float, float]] = []
    for row, label in zip(rows.tolist(), labels.tolist(), strict=True):
        score = math.fsum(a * b for a, b in zip(row, direction.tolist(), strict=True))
        pair = min(max(score, -1.0), 1.0), row[-1] / 0.3
        margin = label * (800.0 * pair[0] - 300.0 * pair[1])
        slope = -label / (1 + math.exp(margin)) if margin < 700 else 0.0
        terms.append((slope * pair[0], slope * pair[1]))
    exact = [math.fsum(column) for column in zip(*terms, strict=True)]
    assert math.dist(computed.tolist(), exact) <= plan._last_rounding
    scores = 8_000 * math.sqrt(2) * 250 * 31 * 2.0**-53 * math.sqrt(30) / 2
    assert plan._last_rounding > scores


def test_a_record_of_weight_zero_or_without_a_number_adds_nothing_to_them() -> None:
    rows = torch.tensor([[1.0, 0.3], [math.nan, 0.3]]).double()
    for record in (
        Records(rows[:1], torch.ones(1), torch.zeros(1)),
        Records(rows[1:], torch.ones(1)),
    ):
        total = _pair_sums(torch.ones(2).double(), 0.3, torch.ones(2).double(), record)
        assert total[0].tolist() == [0.0, 0.0]


def test_each_of_these_sums_gets_its_noise_and_nothing_else_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[float] = []

    def noted(dim: int, std: float, source: object) -> Tensor:
        drawn.append(std)
        return torch.zeros(dim, dtype=torch.float64)

    monkeypatch.setattr(DRAW, noted)
    fitted = model().fit(*rare(4_000, 0.3))
    plan = fitted.plan_
    assert drawn == [plan.noise_std] * plan.steps + [plan.last_std] * 32


# -- what they are ----------------------------------------------------------------------------------------------------


def test_scale_and_intercept_of_records_are_the_loop_of_the_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DRAW, lambda dim, std, source: torch.zeros(dim, dtype=torch.float64))
    X, y = rare(4_000, 0.2)
    fitted = model().fit(X, (X[:, 0] + X[:, 1] > 0.55).astype(int))
    y = np.where(X[:, 0] + X[:, 1] > 0.55, 1.0, -1.0)
    plan, units = fitted.plan_, fitted.units_
    rows = units.rows(torch.from_numpy(X)).numpy()
    slopes = fitted.coef_[0] * np.array(units.rows.scale)
    bare = slopes / np.linalg.norm(slopes)  # of which the scale is not known
    ratio = float(fitted.intercept_[0] + fitted.coef_[0] @ np.array(units.rows.center))
    pairs = np.column_stack(
        [(rows[:, :-1] @ bare / (2 / math.sqrt(30))).clip(-1, 1), rows[:, -1] / 0.3]
    )
    pace = smooth_pace(math.sqrt(16) / plan.last_std, 32, 2_000)

    def ends(start: np.ndarray) -> np.ndarray:
        v, moved, later = start, np.zeros(2), []
        for step in range(32):
            gradient = pairs.T @ (-y / (1 + np.exp(y * (pairs @ v))))
            moved = pace.momentum * moved - pace.lr * gradient
            v = v + moved
            if step >= 16:
                later.append(v)
        return np.mean(later, axis=0)

    size = float(np.linalg.norm(slopes))
    first = dataclasses.replace(plan, last_std=None)
    answer = first.draw(_records(fitted, X, y), None)
    unit = 2 / math.sqrt(30) * float(answer[:-1].norm())
    scale, shift = ends(np.array([0.4 * unit, 0.8 * 0.3 * float(answer[-1])]))
    assert size == pytest.approx(scale / unit * float(answer[:-1].norm()), rel=1e-6)
    assert ratio == pytest.approx(shift, rel=1e-6)


def _records(fitted: LogisticRegression, X: np.ndarray, y: np.ndarray) -> Records:
    return Records(torch.from_numpy(X), torch.from_numpy(y), prepare=fitted.units_.rows)


def test_blocks_get_the_scale_that_arrays_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DRAW, lambda dim, std, source: torch.zeros(dim, dtype=torch.float64))
    monkeypatch.setattr(
        "torch_dpsco.estimators.preparation.gaussian_vector",
        lambda dim, std, source: torch.zeros(dim, dtype=torch.float64),
    )
    X, y = rare(4_000, 0.2)

    def blocks() -> object:
        return iter([(X[:1_500], y[:1_500]), (X[1_500:], y[1_500:])])

    whole, parts = model().fit(X, y), model().fit(blocks)
    np.testing.assert_allclose(parts.coef_, whole.coef_, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(parts.intercept_, whole.intercept_, rtol=1e-7)


def test_two_directions_on_the_same_records_are_two_sums() -> None:
    record = Records(torch.tensor([[0.5, 0.1, 0.3]]).double(), torch.ones(1))
    point = torch.tensor([1.0, 0.0]).double()
    one, other = (
        _pair_sums(torch.tensor(along).double(), 0.3, point, record)[0]
        for along in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    )
    assert float(one[0] / one[1]) == pytest.approx(0.5)
    assert float(other[0] / other[1]) == pytest.approx(0.1)


# -- where they are taken ---------------------------------------------------------------------------------------------


def test_they_are_taken_for_log_odds_in_measured_units_with_enough_records_only() -> None:
    assert planned().last_std is not None
    assert planned(prepare=None, mechanism="noisy_gd").last_std is None
    assert planned(n=1_400, epsilon=0.3).last_std is None
    assert model(n=40_000, epsilon=3.0).plan(3).mechanism == "objective"
    settings = {"epsilon": 1.0, "delta": 1e-6, "n": 4_000, "bound_x": 2.0, "bound_y": 3.0}
    assert HuberRegressor(**settings, mechanism="noisy_gd").plan(30).last_std is None


@pytest.mark.parametrize(("n", "share"), [(4_000, 0.1), (400_000, 1e-4)])
def test_their_share_of_the_squared_level_falls_with_the_square_of_the_records(
    n: int, share: float
) -> None:
    plan = planned(n=n, mechanism="noisy_gd")
    total = gaussian_mu(1.0, 1e-6) ** 2
    part = (math.sqrt(2 * 32) / plan.last_std) ** 2 / total
    assert part <= share
    assert part >= min(0.08, 0.8 * (300 / n) ** 2 / total)


def test_the_plan_says_so_and_the_answer_needs_no_other_link() -> None:
    fitted = model().fit(*rare(4_000, 0.2))
    assert "32 more" in str(fitted.plan_)
    assert fitted._link is None
    assert isinstance(model(n=1_400, epsilon=0.3).fit(*rare(1_400, 0.2))._link, Link)
    X = rare(50, 0.5, seed=2)[0]
    odds = X @ fitted.coef_[0] + fitted.intercept_[0]
    np.testing.assert_allclose(fitted.decision_function(X), odds, rtol=1e-9, atol=1e-12)
    chances = fitted.predict_proba(X)[:, 1]
    np.testing.assert_allclose(chances, 1 / (1 + np.exp(-odds)), rtol=1e-9)


def test_a_rare_label_that_rows_say_nothing_about_costs_little_beside_its_rate() -> None:
    """12 fits: the mean excess over the rate is 0.6 % (0.4), and was 6 % (1) with the scores of the steps."""
    X, y = rare(4_000, 0.06)
    test, truth = rare(20_000, 0.06, seed=2)
    none = log_loss(truth, np.full(len(truth), math.log(0.06 / 0.94)))
    losses = [log_loss(truth, model().fit(X, y).decision_function(test)) for _ in range(12)]
    assert np.mean(losses) < 1.025 * none
