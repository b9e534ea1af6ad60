"""Coefficients in the units of a table: what they say is what the model computes, and noise is spent on once."""

from __future__ import annotations

import itertools
from datetime import date
from typing import Any

import numpy as np
import pytest

import torch_dpsco as dp
from torch_dpsco.estimators import (
    Category,
    Date,
    LinearSVC,
    LogisticRegression,
    Number,
    Ordered,
    Ridge,
    Schema,
    SoftmaxRegression,
)
from torch_dpsco.statistics.coefficients import coefficients_of, short

N = 600
COLUMNS: dict[str, Any] = {
    "age": Number(17, 90),
    "dose": Number(-3, 5, missing=True),
    "size": Ordered(["s", "m", "l"]),
    "town": Category(["a", "b", "c"]),
    "sex": Category(["f", "m"], baseline=True),
    "day": Date("2020-03-01", "2021-01-15"),
}
RAW = {
    "age": [17, 40.5, 90],
    "dose": [-3, 0.5, 5, None],
    "size": "sml",
    "town": "abc",
    "sex": "fm",
    "day": ["2020-03-01", "2020-05-10", "2021-01-15"],
}
ROWS = [dict(zip(RAW, row, strict=True)) for row in itertools.product(*RAW.values())]
FRAME = {name: [row[name] for row in ROWS] for name in RAW}


def schema(**target: Any) -> Schema:
    return Schema(COLUMNS, **target)


def fitted(kind: Any, given: Schema, targets: Any, **more: Any) -> Any:
    rng = np.random.default_rng(2)
    chosen = rng.integers(len(ROWS), size=N)
    X = given.features(FRAME)[chosen]
    model = kind(epsilon=20.0, delta=1e-6, n=N, **given.settings(), **more)
    return model.fit(X, np.asarray(targets)[rng.integers(len(targets), size=N)])


def by_hand(found: Any, row: dict[str, Any], label: str = "") -> float:
    """Returns the score of a row as a reader of the table computes it: value times number, plus that of its level."""
    value = dict(zip(found.names, found.values, strict=True))
    total = value[f"{label}intercept"] + value[f"{label}age"] * row["age"]
    total += value[f"{label}day"] * (date.fromisoformat(row["day"]) - date(2020, 3, 1)).days
    if row["dose"] is None:
        total += (
            value[f"{label}dose missing"] + value[f"{label}dose"] * 1.0
        )  # the middle of -3 and 5
    else:
        total += value[f"{label}dose"] * row["dose"]
    total += value[f"{label}size"] * "sml".index(row["size"])
    total += value[f"{label}town={row['town']}"]
    return float(total + (value[f"{label}sex=m"] if row["sex"] == "m" else 0.0))


@pytest.mark.parametrize(
    ("kind", "target", "moves", "more"),
    [
        (
            LogisticRegression,
            {"target": "died", "labels": ["no", "yes"]},
            "log-odds of 'yes'",
            {"residual_clip": None},
        ),
        (LinearSVC, {"target": "died", "labels": ["no", "yes"]}, "score of 'yes'", {}),
        (Ridge, {"target": "cost", "target_range": (0.0, 9.0)}, "cost", {}),
    ],
)
def test_the_table_computes_what_the_model_predicts(
    kind: Any, target: Any, moves: str, more: Any
) -> None:
    given = schema(**target)
    model = fitted(kind, given, given.labels or [1.0, 8.0], **more)
    found = coefficients_of(model, given, 0.95)
    ask = model.decision_function if given.labels else model.predict
    said = ask(given.features(FRAME))
    assert said.std() > 1e-4
    assert [by_hand(found, row) for row in ROWS] == pytest.approx(said.tolist())
    assert found.moves == moves
    towns = [k for k, name in enumerate(found.names) if name.startswith("town=")]
    assert found.values[towns].sum() == pytest.approx(0.0)
    assert found.scaled[0] == pytest.approx(model.coef_.ravel()[0])


def test_scores_of_clipped_gradients_are_not_called_log_odds() -> None:
    given = schema(target="died", labels=["no", "yes"])
    model = fitted(LogisticRegression, given, given.labels)
    found = coefficients_of(model, given, 0.95)
    scores = np.array([by_hand(found, row) for row in ROWS])
    odds = model.decision_function(given.features(FRAME))
    assert found.moves == "score of 'yes'"
    assert (np.sign(odds) == np.sign(scores)).all()
    assert (np.abs(odds) <= np.abs(scores) * (1 + 1e-9)).all()
    assert (np.abs(odds) >= np.abs(scores) / 2 * (1 - 1e-9)).all()


def test_the_table_of_several_labels_computes_what_they_differ_by() -> None:
    given = schema(target="died", labels=["no", "yes", "unknown"])
    model = fitted(SoftmaxRegression, given, given.labels)
    found = coefficients_of(model, given, 0.95)
    odds = model.decision_function(given.features(FRAME))
    odds = odds - odds.mean(1, keepdims=True)
    for k, label in enumerate(("no", "yes", "unknown")):
        own = [by_hand(found, row, f"{label}: ") for row in ROWS]
        assert own == pytest.approx(odds[:, k].tolist())


def test_units_and_spans_are_those_of_the_schema() -> None:
    given = schema(target="died", labels=["no", "yes"])
    found = coefficients_of(fitted(LogisticRegression, given, given.labels), given, 0.95)
    assert found.units == (
        "per 1 of 17 to 90",
        "per 1 of -3 to 5",
        "against the middle",
        "per level of s to l",
        *["against the average level"] * 3,
        "against 'f'",
        "per day from 2020-03-01 to 2021-01-15",
        "where numbers are 0, days the first ones",
    )
    assert found.spans.tolist() == [73, 8, 1, 2, 1, 1, 1, 1, 320, 0]
    moved = np.abs(found.values * found.spans)[:-1]
    assert found.strongest.tolist() == np.argsort(-moved, kind="stable").tolist()
    assert found.intervals is None
    assert "no intervals: LogisticRegression has no summary" in str(found)


def test_intervals_are_those_of_coded_features_in_other_units() -> None:
    """Of a slope they are the same ones scaled; of the intercept they are that of a sum, with what its terms share."""
    few = Schema(
        {"age": Number(17, 90), "sex": Category(["f", "m"], baseline=True)},
        target="died",
        labels=["no", "yes"],
    )
    rng = np.random.default_rng(4)
    X = np.column_stack([rng.uniform(-1, 1, 4000), rng.integers(0, 2, 4000)])
    y = np.where(rng.random(4000) < 1 / (1 + np.exp(-2 * X[:, 0])), "yes", "no")
    model = LogisticRegression(epsilon=4.0, n=4000, intervals=0.3, **few.settings()).fit(X, y)
    own, coded = coefficients_of(model, few, 0.9), model.summary(0.9)
    assert own.inference is not None
    assert own.inference.names == ("age", "sex=m", "intercept")
    assert own.intervals[0] == pytest.approx(coded.intervals[0] * 2 / 73)
    assert own.intervals[1] == pytest.approx(coded.intervals[1])
    assert own.inference.p_values[:2] == pytest.approx(coded.p_values[:2])
    assert own.values[2] == pytest.approx(
        coded.coefficients[2] + coded.coefficients[0] * (-2 * 17 / 73 - 1)
    )
    apart = np.hypot(coded.standard_errors[2], coded.standard_errors[0] * (2 * 17 / 73 + 1))
    assert own.inference.standard_errors[2] != pytest.approx(apart, rel=1e-3)
    assert own.inference.standard_errors[2] < 2 * apart
    assert "90 % interval" in str(own)
    assert "* the log-odds are linear" in str(own)


def test_nothing_is_charged_for_a_table() -> None:
    given = schema(target="died", labels=["no", "yes"])
    ledger = dp.Accountant(dp.Budget(20.0, 1e-6))
    model = fitted(LogisticRegression, given, given.labels, accountant=ledger)
    before = ledger.ledger.digest()
    coefficients_of(model, given, 0.95)
    assert ledger.ledger.digest() == before


@pytest.mark.parametrize("level", [0.0, 1.0, "95"])
def test_a_level_that_is_none_is_refused_by_name(level: Any) -> None:
    given = schema(target="died", labels=["no", "yes"])
    with pytest.raises(ValueError, match="level must be"):
        coefficients_of(fitted(LogisticRegression, given, given.labels), given, level)


def test_a_picture_shows_the_strongest_over_their_whole_column() -> None:
    pytest.importorskip("matplotlib")
    from torch_dpsco.show import plots

    given = schema(target="died", labels=["no", "yes"])
    found = coefficients_of(fitted(LogisticRegression, given, given.labels), given, 0.95)
    (axes,) = plots.figure("", found.panel()).axes
    rows = [tick.get_text() for tick in axes.get_yticklabels()]
    assert rows == [f"{found.names[k]}\n{found.units[k]}" for k in found.strongest[:8]]
    points = axes.get_lines()[0].get_xdata()
    assert points == pytest.approx((found.values * found.spans)[found.strongest[:8]])
    assert [note.get_text() for note in axes.texts] == [
        short(found.values[k], "+") for k in found.strongest[:8]
    ]
