"""Mistakes of a new user: an error before anything is spent where type, shape or name tell, else a finding."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import torch_dpsco as dp
from torch_dpsco.errors import UnitError
from torch_dpsco.estimators import Category, LogisticRegression, Number, Ordered, Ridge, Schema

N = 600
RNG = np.random.default_rng(5)
AGE = RNG.integers(18, 90, N)
CLEAN: dict[str, Any] = {
    "age": AGE,
    "income": RNG.uniform(5_000, 190_000, N),
    "share": RNG.uniform(0, 1, N),
    "sex": RNG.choice(["f", "m"], N),
    "stage": RNG.choice([1, 2, 3], N),
    "died": np.where(RNG.random(N) < 0.4, "yes", "no"),
    "patient": [f"P{k}" for k in range(N)],
}
COLUMNS = {
    "age": Number(17, 90),
    "income": Number(0, 200_000),
    "share": Number(0, 1),
    "sex": Category(["f", "m"]),
    "stage": Ordered([1, 2, 3]),
}
SCHEMA = Schema(COLUMNS, target="died", labels=["no", "yes"], ids="patient", unit="patient")
USERS = Schema(
    COLUMNS,
    target="died",
    labels=["no", "yes"],
    ids="patient",
    rows_per_unit=None,
    unit="patient",
)
PROMISED = Schema(
    COLUMNS, target="died", labels=["no", "yes"], unit="patient", one_row_per_unit=True
)
ROWS = Schema(COLUMNS, target="died", labels=["no", "yes"])
COST = Schema({"age": Number(17, 90)}, target="income", target_range=(0, 200_000))

FOUND: dict[str, tuple[Schema, dict[str, Any], str]] = {
    "labels are -1 and +1": (SCHEMA, {"died": RNG.choice([-1, 1], N)}, "died"),
    "labels are 1 and 2": (
        Schema(COLUMNS, target="died", labels=[0, 1]),
        {"died": RNG.choice([1, 2], N)},
        "died",
    ),
    "labels are 0 and 1, not text": (SCHEMA, {"died": RNG.choice([0, 1], N)}, "died"),
    "labels of another case": (SCHEMA, {"died": RNG.choice(["No", "Yes"], N)}, "died"),
    "one label only": (SCHEMA, {"died": ["no"] * N}, "died"),
    "a label with a blank": (SCHEMA, {"died": RNG.choice(["no", "yes "], N)}, "died"),
    "age in months": (SCHEMA, {"age": AGE * 12}, "age"),
    "years of birth in place of ages": (SCHEMA, {"age": 2026 - AGE}, "age"),
    "income in thousands": (SCHEMA, {"income": RNG.uniform(5, 190, N)}, "income"),
    "percent in place of a share": (SCHEMA, {"share": RNG.uniform(0, 100, N)}, "share"),
    "a share in place of percent": (
        Schema({"share": Number(0, 100)}, target="died", labels=["no", "yes"]),
        {},
        "share",
    ),
    "missing is coded as -999": (
        SCHEMA,
        {"age": np.where(np.arange(N) % 100 == 0, -999, AGE)},
        "age",
    ),
    "a decimal comma": (
        SCHEMA,
        {"share": [f"{value:.2f}".replace(".", ",") for value in CLEAN["share"]]},
        "share",
    ),
    "a unit in the text": (SCHEMA, {"age": [f"{value} years" for value in AGE]}, "age"),
    "dates as text": (SCHEMA, {"age": ["2001-02-03"] * N}, "age"),
    "two columns are swapped": (SCHEMA, {"age": CLEAN["income"], "income": AGE}, "income"),
    "a level with a trailing blank": (SCHEMA, {"sex": RNG.choice(["f", "m "], N)}, "sex"),
    "levels as codes": (SCHEMA, {"sex": RNG.choice([0, 1], N)}, "sex"),
    "truth values as text": (
        Schema({"smokes": Category([0, 1])}, target="died", labels=["no", "yes"]),
        {"smokes": RNG.choice(["True", "False"], N)},
        "smokes",
    ),
    "a column of zeros": (SCHEMA, {"income": np.zeros(N)}, "income"),
    "ids are missing": (SCHEMA, {"patient": [math.nan] * 10 + list(range(N - 10))}, "patient"),
    "ids are fractions": (SCHEMA, {"patient": RNG.random(N)}, "patient"),
    "patients come several times": (SCHEMA, {"patient": np.arange(N) // 3}, "patient"),
    "the index is taken for the id": (USERS, {"patient": np.arange(N)}, "patient"),
    "many values are missing": (
        SCHEMA,
        {"age": np.where(np.arange(N) % 4 == 0, math.nan, AGE)},
        "age",
    ),
    "a target in another unit": (COST, {"income": CLEAN["income"] * 1000}, "income"),
    "all records are there twice": (
        SCHEMA,
        {name: np.concatenate([np.asarray(CLEAN[name])[: N // 2]] * 2) for name in COLUMNS}
        | {"income": np.concatenate([CLEAN["income"][: N // 2]] * 2)},
        "",
    ),
    "an empty table": (SCHEMA, {name: [] for name in CLEAN}, ""),
    "a decimal comma, beside missing values": (
        Schema({"share": Number(0, 1, missing=True)}, target="died", labels=["no", "yes"]),
        {
            "share": [
                None if k % 9 == 0 else f"{value:.2f}".replace(".", ",")
                for k, value in enumerate(CLEAN["share"])
            ]
        },
        "share",
    ),
    "dates as objects": (SCHEMA, {"age": [datetime.date(2001, 2, 3)] * N}, "age"),
    "a third of values is missing": (
        SCHEMA,
        {"age": np.where(np.arange(N) % 3 == 0, math.nan, AGE)},
        "age",
    ),
    "stays are called patients": (PROMISED, {"patient": np.arange(N) // 3}, "patient"),
    "stays are called patients, by a name in camels": (
        PROMISED,
        {"PatientID": np.arange(N) // 3},
        "PatientID",
    ),
    "ids are those of stays": (
        Schema(COLUMNS, target="died", labels=["no", "yes"], ids="stay", unit="patient"),
        {"stay": np.arange(N), "patient": np.arange(N) // 3},
        "patient",
    ),
    "rows of people with several": (ROWS, {"patient_id": np.arange(N) // 3}, "patient_id"),
    "names of people with several rows": (
        ROWS,
        {"who": [f"Ada {2 * k // 3}" for k in range(N)]},
        "who",
    ),
}
GO_ON = {  # what is printed, and stops no study
    "income in thousands",
    "a share in place of percent",
    "missing is coded as -999",
    "a column of zeros",
    "ids are missing",
    "patients come several times",
    "the index is taken for the id",
    "all records are there twice",
    "rows of people with several",
    "names of people with several rows",
}


def model(**settings: Any) -> LogisticRegression:
    return LogisticRegression(**{"epsilon": 1.0, "n": N, **SCHEMA.settings(), **settings})


def twice() -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.concat([pandas.DataFrame(CLEAN), pandas.DataFrame({"age": AGE})], axis=1)


X, Y = SCHEMA.read(CLEAN).X, SCHEMA.read(CLEAN).y
TOLD: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "the target is among the features": (
        ValueError,
        "target and ids must not be among the features",
        lambda: Schema({"died": Category(["no", "yes"])}, target="died", labels=["no", "yes"]),
    ),
    "the id is among the features": (
        ValueError,
        "ids must not be among the features",
        lambda: Schema(
            {"patient": Number(0, N)}, target="died", labels=["no", "yes"], ids="patient"
        ),
    ),
    "a column is misspelled": (
        ValueError,
        "column 'age' must be in the frame",
        lambda: SCHEMA.read({"Age": AGE}),
    ),
    "a column is there twice": (ValueError, "2 times", lambda: SCHEMA.read(twice())),
    "dates": (
        ValueError,
        "column 'age' of the frame must be a list or array",
        lambda: SCHEMA.read(
            CLEAN | {"age": np.array(["2001-01-01"] * N, dtype="datetime64[D]")}
        ),
    ),
    "ids are truth values": (
        ValueError,
        "integers or text",
        lambda: SCHEMA.read(CLEAN | {"patient": np.ones(N, dtype=bool)}),
    ),
    "low and high are swapped": (ValueError, "low must be below high", lambda: Number(90, 17)),
    "the wrong n": (UnitError, "n", lambda: model(n=N + 1, adjacency="replace_one").fit(X, Y)),
    "no n": (
        ValueError,
        "n must be given",
        lambda: model(n=None, adjacency="add_remove").fit(X, Y),
    ),
    "no bound on rows": (
        ValueError,
        "bound_x must be given",
        lambda: model(bound_x=None).fit(X, Y),
    ),
    "C": (TypeError, "reg", lambda: model(C=1.0)),
    "penalty": (TypeError, "penalty", lambda: model(penalty="l2")),
    "max_grad_norm": (TypeError, "max_grad_norm", lambda: model(max_grad_norm=1.0)),
    "targets of two columns": (ValueError, "shape", lambda: model().fit(X, np.zeros((N, 2)))),
    "classes='balanced'": (
        ValueError,
        "class_weight",
        lambda: model(class_weight="balanced").fit(X, Y),
    ),
    "a ledger of users for rows": (
        UnitError,
        "unit",
        lambda: dp.study(CLEAN, USERS, dp.Budget(1.0, 1e-6, unit="example"), n=N, show=None),
    ),
    "a metric of labels for a real target": (
        ValueError,
        "metric must be one of",
        lambda: dp.study(CLEAN, COST, dp.Budget(1.0, 1e-6), metric="auc", show=None),
    ),
    "a regressor for labels": (
        TypeError,
        "classes",
        lambda: Ridge(epsilon=1.0, n=N, **SCHEMA.settings()),
    ),
}


@pytest.mark.cases(18, 9)
@pytest.mark.parametrize("mistake", FOUND)
def test_the_check_finds(mistake):
    schema, changes, column = FOUND[mistake]
    found = schema.check(CLEAN | changes)
    assert column in found.columns, f"{mistake}: {found}"
    assert "NOT PRIVATE" in str(found)
    assert found.stops == ("STOPS A STUDY" in str(found)) == (mistake not in GO_ON), (
        f"{mistake}: {found}"
    )
    lists = {
        name: np.asarray(values, object).tolist() for name, values in (CLEAN | changes).items()
    }
    assert schema.check(lists) == found  # value by value


def test_the_check_finds_nothing_in_a_clean_table():
    for schema in (SCHEMA, COST, PROMISED, ROWS):
        assert schema.check(CLEAN).findings == (), str(schema.check(CLEAN))
    missing = Schema({"age": Number(17, 90, missing=True)}, target="died", labels=["no", "yes"])
    assert (
        missing.check(CLEAN | {"age": np.where(np.arange(N) % 3 == 0, math.nan, AGE)}).findings
        == ()
    )
    users = USERS.check(CLEAN | {"patient": np.arange(N) // 3})
    first = str(SCHEMA.check(CLEAN | {"patient": np.arange(N) // 3}))
    assert "only the first row of each patient counts" in first
    assert users.findings == (), str(users)


def test_what_lies_beside_the_columns_of_a_schema_may_be_anything():
    beside = {
        "seen": np.array(["2001-01-01"] * N, dtype="datetime64[D]"),
        "images": np.zeros((N, 2, 2)),
        "note": "x",
        3: 4,
    }
    assert ROWS.check(CLEAN | beside).findings == ()
    pandas = pytest.importorskip("pandas")
    one = pandas.DataFrame({"id": [1] * N})
    assert ROWS.check(pandas.concat([pandas.DataFrame(CLEAN), one, one], axis=1)).findings == ()


@pytest.mark.parametrize(("lost", "stops"), [(N // 20, False), (N // 20 + 1, True)])
def test_a_study_stops_where_more_than_1_in_20_records_is_lost(lost, stops):
    place = np.arange(N)
    for changes in (
        {"age": np.where(place < lost, math.nan, AGE)},
        {"died": np.where(place < lost, "?", CLEAN["died"])},
        {"stage": np.where(place < lost, 9, CLEAN["stage"])},
    ):
        found = SCHEMA.check(CLEAN | changes)
        assert found.findings
        assert found.stops == stops, str(found)


def test_the_check_takes_a_rare_event_for_no_mistake():
    schema = Schema(
        {"fell": Number(0, 1), "falls": Number(0, 10)}, target="died", labels=["no", "yes"]
    )
    rare = np.arange(N) < 2
    assert schema.check(CLEAN | {"fell": rare.astype(int), "falls": 9 * rare}).findings == ()


@pytest.mark.parametrize("mistake", TOLD)
def test_an_error_tells_before_anything_is_spent(mistake, monkeypatch):
    monkeypatch.setattr(
        dp.Accountant, "authorize", lambda *args, **kwargs: pytest.fail("charged")
    )
    error, words, call = TOLD[mistake]
    with pytest.raises(error, match=words):
        call()


def test_there_are_at_least_25_mistakes():
    assert len(FOUND) + len(TOLD) >= 25
