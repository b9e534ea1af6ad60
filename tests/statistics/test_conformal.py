"""Conformal sets: what one unit moves, that the level is kept, what is charged, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, multinomial

import torch_dpsco as dp
from torch_dpsco.accounting.events import ADJACENCIES, Adjacency, Pure
from torch_dpsco.algorithms.mechanisms import score_law, score_slack
from torch_dpsco.errors import AdjacencyError, BudgetExceeded, UnitError
from torch_dpsco.statistics.conformal import ConformalSets, conformal

module = import_module(
    "torch_dpsco.statistics.conformal"
)  # the package has the function of this name

UNIT, DRAWS = 2**20, 2**53
PAGE = Path(__file__).parents[2] / "docs" / "conformal.md"


class Line:
    """Predicts the first number; its chance of label 1 is the second one."""

    classes_ = ("no", "yes")

    def predict(self, X: Any) -> Any:
        return X[:, 0]

    def predict_proba(self, X: Any) -> Any:
        return np.stack([1.0 - X[:, 1], X[:, 1]], axis=1)


def calibrated(X: Any, y: Any, **more: Any) -> ConformalSets:
    return conformal(
        Line(), X, y, **{"budget": dp.Budget(1.0, 1e-6), "bound": 2.0, "bins": 8} | more
    )


def taken(X: Any, y: Any, **more: Any) -> Any:
    """Returns the scores that a threshold is drawn by, in units."""
    seen = []

    def note(scores: Any, sensitivity: float, epsilon: float) -> Any:
        seen.append(scores.copy())
        return score_law(scores, sensitivity, epsilon)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "score_law", note)
        calibrated(X, y, **more)
    return seen[0]


def table(errors: Any) -> tuple[Any, Any]:
    """Returns rows and targets of these errors of the line."""
    X = np.stack([np.zeros(len(errors)), np.full(len(errors), 0.5)], axis=1)
    return X, np.asarray(errors, dtype=float)


odd = st.sampled_from(
    [0.0, -0.0, 0.25, 2.0, 3.0, 1e300, -1e300, math.inf, math.nan]
) | st.floats(-3, 3)
levels = st.sampled_from([0.1, 0.5, 0.9, 0.99])


@pytest.mark.weekly
@settings(max_examples=60, deadline=None)
@given(st.lists(odd, min_size=1, max_size=80), odd, levels)
def test_no_neighbor_moves_a_score_by_more(
    errors: list[float], other: float, level: float
) -> None:
    more = {"level": level, "budget": dp.Budget(20.0, 1e-6)}
    X, y = table(errors)
    changed, null = y.copy(), y.copy()
    changed[0], null[0] = other, math.nan
    base = taken(X, y, **more)
    allowed = module._sensitivities(math.ceil(level / (1 - (1 - level) / 20) * UNIT))
    assert abs(taken(X, changed, **more) - base).max() <= allowed["replace_one"] == UNIT
    for neighbor in (taken(X, null, **more), taken(X[1:], y[1:], **more)):
        assert abs(neighbor - base).max() <= allowed["add_remove"] == allowed["zero_out"]


@pytest.mark.slow
def test_the_sensitivities_are_reached() -> None:
    more = {"budget": dp.Budget(1e4, 1e-6), "bins": 2}
    near, far = (taken(*table([v, *[0.0] * 40, *[9.0] * 40]), **more) for v in (0.0, 9.0))
    assert abs(near - far).max() == UNIT
    less = taken(*table([*[0.0] * 40, *[9.0] * 40]), **more)
    assert abs(less - far).max() > 0.9 * UNIT


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), odd), min_size=1, max_size=30),
    st.lists(odd, max_size=40),
)
def test_a_user_moves_a_score_by_no_more_than_a_record(
    rows: list[tuple[int, float]], theirs: list[float]
) -> None:
    more: dict[str, Any] = {"budget": dp.Budget(20.0, 1e-6, unit="user")}
    ids, errors = (list(column) for column in zip(*rows, strict=True))
    allowed = module._sensitivities(math.ceil(0.9 / 0.995 * UNIT))
    base = taken(*table(errors), groups=np.array(ids), **more)
    joined = taken(*table(errors + theirs), groups=np.array(ids + [9] * len(theirs)), **more)
    assert abs(joined - base).max() <= allowed["add_remove"]
    replaced = [(u, e) for u, e in rows if u] + [(0, e) for e in theirs]
    if replaced and any(u == 0 for u, _ in rows):
        ids, errors = (list(column) for column in zip(*replaced, strict=True))
        assert abs(taken(*table(errors), groups=np.array(ids), **more) - base).max() <= UNIT


def test_a_record_is_a_user_with_one_row() -> None:
    errors = np.linspace(0, 3, 50)
    alone = taken(*table(errors))
    budget = dp.Budget(1.0, 1e-6, unit="user")
    assert (taken(*table(errors), groups=np.arange(50), budget=budget) == alone).all()
    twice = taken(
        *table(np.repeat(errors, 3)), groups=np.repeat(np.arange(50), 3), budget=budget
    )
    assert (twice == alone).all()


@pytest.mark.parametrize("spoilt", ["row", "target", "label"])
def test_null_records_count_for_nothing_in_sets(spoilt: str) -> None:
    X, y = table(np.linspace(0, 3, 50))
    more: dict[str, Any] = {}
    if spoilt == "label":
        y, more = np.where(y > 1, "yes", "no").astype(object), {"bound": None}
    without = taken(X[1:], y[1:], **more)
    if spoilt == "row":
        X[0, 0] = math.nan
    else:
        y[0] = math.nan if spoilt == "target" else ["not a label"]
    assert (taken(X, y, **more) == without).all()


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_the_law_keeps_epsilon_of_neighbors(adjacency: Adjacency) -> None:
    epsilon, rng = 0.7, np.random.default_rng(2)
    more: dict[str, Any] = {"budget": dp.Budget(epsilon, 1e-6, adjacency=adjacency), "bins": 3}
    sensitivity = module._sensitivities(math.ceil(0.9 / 0.995 * UNIT))[adjacency]
    for _ in range(40):
        X, y = table(rng.uniform(0, 3, size=200))
        other = y.copy()
        other[0] = rng.uniform(0, 3) if adjacency == "replace_one" else math.nan
        near = (X[1:], y[1:]) if adjacency == "add_remove" else (X, other)
        laws = [score_law(taken(*each, **more), sensitivity, epsilon) for each in ((X, y), near)]
        assert abs(np.log(laws[0] / laws[1])).max() <= epsilon


@pytest.mark.parametrize("size", [1, 2, 9, 513])
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 50.0])
def test_a_draw_is_worse_than_the_slack_with_the_stated_probability(
    size: int, epsilon: float
) -> None:
    rng = np.random.default_rng(size)
    for failure in (5e-5, 0.005, 0.3):
        slack = score_slack(size, 3.0, epsilon, failure)
        for scores in (
            np.where(np.arange(size) == 0, 0.0, slack * (1 + 1e-12) + 1e-9),
            rng.uniform(0, 3 * slack, size) + 7.0,
            rng.exponential(slack, size),
        ):
            law = score_law(scores, 3.0, epsilon)
            assert int(law[scores > scores.min() + slack].sum()) <= failure * DRAWS


def test_the_slack_is_not_far_from_needed() -> None:
    slack = score_slack(513, 1.0, 1.0, 0.005)
    law = score_law(np.where(np.arange(513) == 0, 0.0, 0.9 * slack), 1.0, 1.0)
    assert int(law[1:].sum()) > 0.005 * DRAWS


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(odd, min_size=1, max_size=120), levels)
def test_an_edge_within_the_error_has_the_rank(errors: list[float], level: float) -> None:
    epsilon, failure = 20.0, (1 - level) / 20
    X, y = table(errors)
    scores = taken(X, y, level=level, budget=dp.Budget(epsilon, 1e-6, "replace_one"))
    rank = math.ceil(level / (1 - failure) * UNIT)
    error = score_slack(9, module._sensitivities(rank)["replace_one"], epsilon, failure)
    valid = y[np.isfinite(y)]
    assert scores.min() == 0
    for place, edge in enumerate(2.0 * np.arange(1, 9) / 8):
        if scores[place] <= error:
            assert (abs(valid) <= edge).sum() >= level / (1 - failure) * (len(valid) + 1)


def histograms(n: int, cells: int) -> Iterator[list[int]]:
    """Yields all histograms of n records in so many cells."""
    for bars in combinations(range(n + cells - 1), cells - 1):
        ends = (-1, *bars, n + cells - 1)
        yield [ends[k + 1] - ends[k] - 1 for k in range(cells)]


def exact_coverage(
    n: int, chances: list[float], level: float, budget: dp.Budget, lowered: bool = False
) -> float:
    """Returns the exact coverage of a new record, of records whose errors fall into 3 steps or above with chances."""
    failure, covered = (1 - level) / 20, 0.0
    rank = math.ceil(level / (1 - failure) * UNIT)
    sensitivity = module._sensitivities(rank)[budget.adjacency]
    error = 0 if lowered else math.ceil(score_slack(4, sensitivity, budget.epsilon, failure))
    below = np.cumsum(chances)
    below[-1] = 1.0
    for histogram in histograms(n, 4):
        cells = np.repeat(np.arange(4), histogram)
        records = module.HeldOut(np.zeros((n, 1)), np.zeros(n), np.ones(n, dtype=bool), None)
        law = score_law(
            module._scores(records, cells, rank, error, 4), sensitivity, budget.epsilon
        )
        covered += multinomial.pmf(histogram, n, chances) * float(law @ below) / DRAWS
    return covered


CHANCES = [[0.25] * 4, [0.45, 0.06, 0.3, 0.19], [0.0, 0.49, 0.02, 0.49]]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("chances", CHANCES)
def test_the_exact_coverage_is_at_least_the_level(chances: list[float]) -> None:
    budget = dp.Budget(4.0, 1e-6, adjacency="add_remove")
    assert 0.5 <= exact_coverage(24, chances, 0.5, budget) < 0.9  # not by sets of everything


@pytest.mark.slow
def test_without_the_error_of_the_draw_the_level_is_missed() -> None:
    budget, chances = dp.Budget(0.1, 1e-6, adjacency="add_remove"), [0.01, 0.01, 0.5, 0.48]
    assert exact_coverage(24, chances, 0.9, budget, lowered=True) < 0.65
    assert exact_coverage(24, chances, 0.9, budget) >= 0.9


def test_the_coverage_is_not_far_above_the_level() -> None:
    rng = np.random.default_rng(0)
    found = calibrated(*table(rng.uniform(0, 1.9, 5000)), bins=512)
    assert 0.9 * 1.9 < found.threshold < 0.93 * 1.9


@pytest.mark.weekly
@pytest.mark.parametrize("regressor", [True, False])
def test_new_records_are_covered(regressor: bool) -> None:
    """400 calibrations of 300 records, a new record each: fewer hits than 90 % allow by chance below 1e-7 fail."""
    rng, hits, wide = np.random.default_rng(5), 0, 0
    for _ in range(400):
        X = rng.uniform(0.0, 1.0, size=(301, 2))
        if regressor:
            y: Any = X[:, 0] + rng.laplace(size=301) / 3
            found = calibrated(X[:300], y[:300], bins=64)
            low, high = found.intervals(X[300:])[0]
            hits += low <= y[300] <= high
        else:
            y = np.where(rng.uniform(size=301) < X[:, 1], "yes", "no")
            found = calibrated(X[:300], y[:300], bins=64, bound=None)
            hits += y[300] in found.sets(X[300:])[0]
        wide += math.isinf(found.threshold)
    assert hits >= binom.ppf(1e-7, 400, 0.9)
    assert wide < 40


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(1e-3, 1e7))
def test_what_was_within_the_threshold_lies_in_the_interval(
    target: float, said: float, threshold: float
) -> None:
    found = ConformalSets(Line(), 0.9, threshold, (), dp.Accountant().report(1e-6))
    low, high = found.intervals(np.array([[said, 0.0]]))[0]
    if abs(target - said) <= threshold:
        assert low <= target <= high
    elif abs(target - said) > threshold * (1 + 1e-9) + 1e-9:
        assert not low <= target <= high


@pytest.mark.slow
def test_ends_hold_targets_at_the_very_threshold() -> None:
    rng = np.random.default_rng(1)
    for target, said in zip(rng.normal(size=3000), 7 * rng.normal(size=3000), strict=True):
        found = ConformalSets(Line(), 0.9, abs(target - said), (), dp.Accountant().report(1e-6))
        low, high = found.intervals(np.array([[said, 0.0]]))[0]
        assert low <= target <= high


def test_an_error_on_an_edge_is_covered_by_it() -> None:
    more = {"budget": dp.Budget(1e4, 1e-6)}
    assert calibrated(*table([1.0] * 500), **more).threshold == 1.0
    assert calibrated(*table([np.nextafter(1.0, 2.0)] * 500), **more).threshold == 1.25


def test_few_records_give_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly always: a finite threshold is drawn once in 140 times, here the likeliest one is."""
    monkeypatch.setattr(module, "draw", lambda law, source: int(np.argmax(law)))
    for n in (0, 1, 20):
        X, y = table(np.zeros(n))
        assert calibrated(X, y).threshold == math.inf
        assert np.isinf(calibrated(X, y).intervals([[0.3, 0.0]])).all()
        assert calibrated(X, ["no"] * n, bound=None).sets([[0.0, 0.1]]) == [("no", "yes")]


def test_sets_have_the_labels_that_pass() -> None:
    found = ConformalSets(Line(), 0.9, 0.6, ("no", "yes"), dp.Accountant().report(1e-6))
    assert found.sets([[0.0, 0.5], [0.0, 0.3], [0.0, 0.9]]) == [("no", "yes"), ("no",), ("yes",)]


def test_the_release_is_charged_where_it_was_proved() -> None:
    for adjacency, proved in (
        ("replace_one", set(ADJACENCIES)),
        ("add_remove", {"add_remove", "zero_out"}),
    ):
        ledger = dp.Accountant(dp.Budget(1.0, 1e-6, adjacency=adjacency))  # type: ignore[arg-type]
        found = calibrated(
            *table(np.zeros(30)),
            accountant=ledger,
            budget=dp.Budget(0.5, 0.0, adjacency=adjacency),
        )  # type: ignore[arg-type]
        ((_, _, event, count),) = ledger.ledger.entries()
        assert isinstance(event, Pure)
        assert (event.eps, set(event.adjacencies), count) == (0.5, proved, 1)
        assert 0.49 < found.privacy.epsilon <= 0.5


def test_no_set_is_drawn_that_was_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = dp.Accountant(dp.Budget(0.1, 1e-6))
    monkeypatch.setattr(module, "draw", lambda *_: pytest.fail("drawn"))
    with pytest.raises(BudgetExceeded):
        calibrated(*table(np.zeros(30)), accountant=ledger)
    assert not len(ledger)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "level": ({"level": 1.0}, ValueError, "level must be in"),
    "bins": ({"bins": 1025}, ValueError, "bins must be in 1..1024"),
    "level near 1": ({"level": 1 - 2**-21}, ValueError, "level must be in"),
    "bound": ({"bound": -1.0}, ValueError, "bound must be > 0"),
    "both": ({"classes": (0, 1)}, ValueError, "classes must not be given with a bound"),
    "no classes": (
        {"model": object(), "bound": None},
        ValueError,
        "classes must be given, .*bound of intervals",
    ),
    "model": ({"model": object()}, ValueError, "model must have a method predict"),
    "epsilon": ({"budget": dp.Budget(1e-9, 1e-6)}, ValueError, "epsilon must be >"),
    "no groups": (
        {"budget": dp.Budget(1.0, 1e-6, unit="user")},
        UnitError,
        "groups must be given",
    ),
    "groups": (
        {"groups": np.arange(30), "budget": dp.Budget(1.0, 1e-6, unit="example")},
        UnitError,
        "groups must be given with",
    ),
    "unit": ({"accountant": dp.Accountant(unit="user")}, UnitError, "user"),
    "adjacency": (
        {
            "accountant": dp.Accountant(adjacency="add_remove"),
            "budget": dp.Budget(1.0, 1e-6, "replace_one"),
        },
        AdjacencyError,
        "accountant must have the adjacency",
    ),
    "rows": ({"X": np.zeros(30)}, ValueError, "2D"),
    "targets": ({"y": np.zeros(29)}, ValueError, "y"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_by_name(name: str) -> None:
    change, error, words = REFUSED[name]
    ledger = change.get("accountant") or dp.Accountant()
    X, y = table(np.zeros(30))
    given = {
        "model": Line(),
        "X": X,
        "y": y,
        "budget": dp.Budget(1.0, 1e-6),
        "bound": 2.0,
        "accountant": ledger,
    }
    with pytest.raises(error, match=words):
        conformal(**given | change)
    assert not len(ledger)


def test_sets_are_of_classifiers_and_intervals_of_regressors() -> None:
    X, y = table(np.zeros(30))
    with pytest.raises(ValueError, match=r"call intervals\(X\)"):
        calibrated(X, y).sets(X)
    with pytest.raises(ValueError, match=r"call sets\(X\)"):
        calibrated(X, ["no"] * 30, bound=None).intervals(X)
    with pytest.raises(ValueError, match="NaN or infinity"):
        calibrated(X, y).intervals([[math.nan, 0.0]])


@pytest.mark.slow
def test_the_page_runs() -> None:
    text, names = PAGE.read_text(encoding="utf-8"), dict[str, Any]()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    for block in blocks:
        exec(compile(block, "docs/conformal.md", "exec"), names)
