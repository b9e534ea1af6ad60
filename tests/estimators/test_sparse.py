"""`Lasso`: choices of features by the exponential mechanism, and the fit to what they choose.

The law of a choice is compared with the bound of its proof in integers; what a record does to a score, with fractions.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import torch_dpsco as dp
from torch_dpsco import noise
from torch_dpsco.accounting.events import ZCDP
from torch_dpsco.errors import BudgetExceeded, ConditionError
from torch_dpsco.estimators import Lasso, sparse
from torch_dpsco.estimators.records import sum_terms
from torch_dpsco.estimators.sparse import SparsePlan
from torch_dpsco.estimators.task import LinearPlan, make_records
from torch_dpsco.noise import Repeatable

N = 400


def lasso(**changes: Any) -> Lasso:
    settings = {"epsilon": 4.0, "delta": 1e-5, "n": N, "bound_x": 1.0, "bound_y": 8.0}
    return Lasso(**{**settings, **changes})


def plan_of(dim: int, **changes: Any) -> SparsePlan:
    plan = lasso(**changes).plan(dim)
    assert isinstance(plan, SparsePlan)
    return plan


def table(count: int = N, dim: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    X = random.uniform(-1, 1, (count, dim))
    return X, 3 * X[:, 5] - 2 * X[:, 40] + 0.1 * random.normal(size=count)


# -- the law of a choice ----------------------------------------------------------------------------------------------


def window(scores: np.ndarray, other: np.ndarray, epsilon: float) -> float:
    """Returns the width of the interval of all log ratios of two laws, which must hold 0."""
    first, second = (noise.choice_law(given, 1.0, epsilon) for given in (scores, other))
    logs = np.log(first.astype(np.longdouble)) - np.log(second.astype(np.longdouble))
    shift = math.log(Fraction(int(second.sum()), int(first.sum())))
    assert logs.min() + shift <= 1e-15
    assert logs.max() + shift >= -1e-15
    return float(logs.max() - logs.min())


SCORES = {
    "many": np.random.default_rng(0).uniform(0, 50, 40_000),
    "far apart": np.array([0.0, 1e6, 3e5, 80.0, 2e3]),
    "near the floor": np.linspace(20, 40, 5000),
    "ties": np.zeros(7),
}


@pytest.mark.parametrize("epsilon", [2.0**-13, 0.01, 0.3, 2.0, 30.0])
@pytest.mark.parametrize("name", SCORES)
def test_the_law_of_a_choice_keeps_its_range_exactly(name: str, epsilon: float) -> None:
    scores = SCORES[name] / epsilon
    random = np.random.default_rng(1)
    worst = np.where(np.arange(len(scores)) % 2, 1.0, -1.0)
    for moved in (
        worst,
        -worst,
        random.uniform(-1, 1, len(scores)),
        np.sign(random.normal(size=len(scores))),
    ):
        assert window(scores, scores + moved, epsilon) <= epsilon


@pytest.mark.parametrize(("name", "value"), [("_FLOOR", 1.0), ("_ROUNDED", -1e-3)])
def test_without_its_margins_the_range_of_a_choice_is_broken(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    monkeypatch.setattr(noise, name, value)
    scores = np.append(0.0, np.linspace(0, 34, 8001) / 0.15)
    moved = np.append(0.0, np.where(np.arange(8001) % 2, 1.0, -1.0))
    assert window(scores, scores + moved, 0.3) > 0.3


def test_a_choice_is_drawn_in_proportion_to_its_law() -> None:
    law = np.array([5, 0, 3, 2])
    source = Repeatable(torch.Generator().manual_seed(0))
    counts = np.bincount([noise.choose(law, source) for _ in range(4000)], minlength=4)
    assert counts[1] == 0
    # six deviations, of probability below 1e-8
    assert (np.abs(counts - 400 * law) <= 6 * np.sqrt(400 * law * (1 - law / 10))).all()


def test_a_choice_has_a_largest_epsilon() -> None:
    scores = [0.0, 2.0**-14]
    laws = [noise.choice_law(scores, 1.0, 2.0**power).tolist() for power in (15, 16, 17, 40)]
    assert laws[0] != laws[1] == laws[2] == laws[3]


def test_a_choice_of_almost_no_epsilon_is_uniform() -> None:
    law = noise.choice_law([0.0, 1e9], 1.0, 2.0**-14)
    assert law[0] == law[1]


@pytest.mark.parametrize("scores", [[0.0, math.nan], [math.inf, 0.0], np.zeros(2**17 + 1)])
def test_scores_of_no_law_are_refused(scores: Any) -> None:
    with pytest.raises(ValueError, match="scores must be"):
        noise.choice_law(scores, 1.0, 1.0)


# -- what a record does to a score ------------------------------------------------------------------------------------

STRANGE = (
    ([1.0, -1.0, 1.0], 8.0),
    ([1e9, -1e9, 0.3], -1e9),
    ([-1.0, -1.0, -1.0], -8.0),
    ([math.nan, 1.0, 1.0], 1.0),
    ([1.0, 1.0, math.inf], 1.0),
)


def gradient(plan: SparsePlan, X: Any, y: Any) -> torch.Tensor:
    records = make_records(plan.task, torch.tensor(X), torch.tensor(y))
    w = torch.tensor([0.5, 0.0, -0.5], dtype=torch.float64)
    return plan._gradient(records, [0, 2], w)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one", "add_remove"])
def test_no_record_moves_a_score_by_more_than_the_sensitivity(adjacency: str) -> None:
    plan = plan_of(3, adjacency=adjacency, prepare=None, n=9)
    random = np.random.default_rng(0)
    X, y = random.uniform(-1, 1, (8, 3)), random.normal(size=8)
    sums = []
    for row, target in STRANGE:
        sums.append(gradient(plan, np.vstack([X, [row]]), np.append(y, target)))
    without = gradient(plan, np.vstack([X, [[0.0] * 3]]), np.append(y, 0.0))
    moved = max(float((found - without).abs().max()) for found in sums)
    assert 0.99 < moved <= plan.sensitivity
    if adjacency == "replace_one":
        apart = max(float((a - b).abs().max()) for a in sums for b in sums)
        assert 1.99 < apart <= plan.sensitivity
    for null in sums[3:]:
        assert torch.equal(null, without)


def test_rounding_is_in_the_sensitivity_of_a_score() -> None:
    plan = plan_of(3, n=1000, prepare=None, bound_y=1e6)
    random = np.random.default_rng(0)
    X = random.uniform(-1, 1, (1000, 3))
    y = X @ [0.5, 0, -0.5] * plan.task.loss.knee + random.uniform(-1, 1, 1000) * 1e5
    found = gradient(plan, X, y)
    w = [Fraction(1, 2), Fraction(0), Fraction(-1, 2)]
    exact = [Fraction(0)] * 3
    for row, target in zip(X.tolist(), y.tolist(), strict=True):
        miss = sum(a * Fraction(b) for a, b in zip(w, row, strict=True))
        miss -= Fraction(target) / Fraction(plan.task.loss.knee)
        slope = max(Fraction(-1), min(Fraction(1), miss))
        exact = [a + slope * Fraction(b) for a, b in zip(exact, row, strict=True)]
    error = max(abs(float(Fraction(a) - b)) for a, b in zip(found.tolist(), exact, strict=True))
    room = (plan.sensitivity - 1) / 2
    assert 0 < error <= room
    assert room < plan_of(3, n=10_000, prepare=None, bound_y=1e6).sensitivity / 2 - 0.5
    # as docs/proofs/sparse.md counts: M (gamma(S + 16) + m gamma(T + 16)), gamma(k) = k u to first order
    features = plan.fit.task.dim
    largest = 1e6 / plan.task.loss.knee + features / 2
    proved = 1000 * 2.0**-53 * (sum_terms(1000) + 16 + largest * (features + 16))
    assert room == pytest.approx(proved, rel=1e-3)


# -- what is charged --------------------------------------------------------------------------------------------------


def test_every_choice_and_the_fit_are_charged() -> None:
    X, y = table()
    ledger = dp.Accountant(dp.Budget(4.0, 1e-5, adjacency="zero_out"))
    model = lasso(accountant=ledger).fit(X, y)
    plan = model.plan_
    assert isinstance(plan, SparsePlan)
    (first, choices, units, fit) = [
        event for *_, event, count in ledger.ledger.entries() if count == 1
    ]
    assert plan.task.prepare is not None
    assert plan.fit.task.prepare is not None
    assert first == plan.task.prepare.event("zero_out")
    assert choices == ZCDP(plan.rho, adjacencies=("zero_out",))
    assert units == plan.fit.task.prepare.event("zero_out")
    assert fit == plan.fit.own_event()


def test_a_choice_has_the_law_of_its_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(scores: Any, sensitivity: float, epsilon: float) -> Any:
        asked.append((len(scores), sensitivity, epsilon))
        return noise.choice_law(scores, sensitivity, epsilon)

    monkeypatch.setattr(sparse, "choice_law", noted)
    X, y = table()
    model = lasso(features=4, bound_x=2.0).fit(2 * X, y)
    plan = model.plan_
    assert isinstance(plan, SparsePlan)
    assert [count for count, _, _ in asked] == [120, 118, 116, 114]
    assert all(sensitivity == plan.sensitivity for _, sensitivity, _ in asked)
    spent = math.fsum(epsilon**2 / 8 for _, _, epsilon in asked)
    assert 0.999 * plan.rho < spent <= plan.rho


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one", "add_remove"])
@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.01, 1e-7), (1.0, 1e-8), (8.0, 1e-12), (40.0, 1e-7)]
)
@pytest.mark.parametrize("features", [None, 1, 30])
def test_a_plan_spends_no_more_than_its_budget(
    adjacency: str, epsilon: float, delta: float, features: int | None
) -> None:
    plan = plan_of(
        900, epsilon=epsilon, delta=delta, adjacency=adjacency, features=features, n=10**6
    )
    assert 0.98 * epsilon < plan.epsilon() <= epsilon


def test_an_edited_plan_charges_what_it_draws() -> None:
    plan = plan_of(60)
    assert replace(plan, rho=2 * plan.rho).epsilon() > plan.epsilon()
    with pytest.raises(ValueError, match="rho must be"):
        replace(plan, rho=0.0)


def test_a_refused_fit_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "choose", lambda *_: pytest.fail("a choice was drawn"))
    X, y = table()
    ledger = dp.Accountant(dp.Budget(0.5, 1e-5, adjacency="zero_out"))
    with pytest.raises(BudgetExceeded):
        lasso(accountant=ledger).fit(X, y)


# -- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one", "add_remove"])
def test_the_features_that_tell_are_found_among_many(adjacency: str) -> None:
    X, y = table(2000, 3000)
    model = lasso(n=2000, epsilon=8.0, adjacency=adjacency, features=2).fit(X, y)
    assert np.flatnonzero(model.coef_).tolist() == [5, 40]
    assert np.abs(model.coef_[[5, 40]] - [3, -2]).max() < 0.4


def test_a_step_lessens_the_score_of_what_is_like_the_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def best(scores: torch.Tensor, *_: float) -> np.ndarray:
        seen.append(scores.numpy())
        return np.where(np.arange(len(scores)) == int(scores.argmin()), 1, 0)

    monkeypatch.setattr(sparse, "choice_law", best)
    X, y = table()
    for sign in (1, -1):
        seen.clear()
        X[:, 1] = 0.9 * X[:, 5]
        lasso(features=2, epsilon=50.0).fit(X, sign * y)
        assert sign * seen[0][1] < sign * seen[1][1] < 0


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("prepare", ["auto", None])
def test_coefficients_are_for_raw_rows(intercept: bool, prepare: str | None) -> None:
    random = np.random.default_rng(0)
    raw = random.uniform(10, 14, (4000, 30))
    y = 2 * (raw[:, 3] - 12) - (raw[:, 9] - 12) + intercept
    model = lasso(
        n=4000,
        epsilon=50.0,
        bound_x=0.5,
        features=2,
        feature_center=(12.0,) * 30,
        feature_scale=(4.0,) * 30,
        fit_intercept=intercept,
        prepare=prepare,
    ).fit(raw, y)
    assert np.abs(model.predict(raw) - y).max() < 0.5
    again = dp.estimators.Released.of(model)
    assert np.array_equal(again.predict(raw), model.predict(raw))


def test_entries_beyond_their_bound_count_as_the_bound() -> None:
    X, y = table(2000)
    X[:, 5] *= 1e3  # sign alone is left
    y = 3 * np.sign(X[:, 5])
    model = lasso(n=2000, epsilon=8.0, features=1).fit(X, y)
    assert np.flatnonzero(model.coef_).tolist() == [5]
    assert abs(model.coef_[5] - 3) < 0.5


def test_a_plan_is_read_back_as_it_was() -> None:
    plan = plan_of(60)
    assert LinearPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert f"{plan.fit.task.dim} of 60 features" in str(plan)


def test_a_plan_says_all_that_is_measured() -> None:
    plan = plan_of(60)
    said = [text for _, text in plan.lines() if text.startswith("measured within")]
    assert plan.task.prepare is not None
    assert said == [str(plan.task.prepare), str(plan.fit.task.prepare)]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"delta": 0.0}, ValueError, "delta must be > 0"),
        ({"reg": 1.0}, ValueError, "reg must be"),
        ({"radius": 2.0}, ValueError, "radius must be"),
        ({"mechanism": "output"}, ValueError, "mechanism must be"),
        ({"intercept_scaling": 2.0}, ValueError, "intercept_scaling must be"),
        ({"secure": "exact"}, ValueError, "secure must be"),
        ({"features": 0}, ValueError, "features must be"),
        ({"features": 61}, ValueError, "features must be"),
        ({"bound_x": None}, ValueError, "bound on each entry"),
    ],
)
def test_what_does_not_go_together_is_refused(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    X, y = table()
    ledger = dp.Accountant(adjacency="zero_out")
    with pytest.raises(error, match=words):
        lasso(accountant=ledger, **changes).fit(X, y)
    assert not len(ledger.ledger)


def test_users_blocks_and_too_many_features_are_refused() -> None:
    X, y = table()
    ledger = dp.Accountant(adjacency="zero_out")
    model = lasso(accountant=ledger)
    with pytest.raises(ValueError, match="unit must be one of example \\(got 'user'\\)"):
        model.fit(X, y, groups=np.arange(N))
    with pytest.raises(ConditionError, match="Lasso, need arrays"):
        model.fit(lambda: iter([(X, y)]))
    with pytest.raises(ValueError, match="dim must be"):
        model.plan(2**16 + 1)
    assert not len(ledger.ledger)
