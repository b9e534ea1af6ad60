"""A study: who is in which part, what is charged and when, and what is refused before anything is spent."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import torch_dpsco as dp
from tests.streams import Picked
from torch_dpsco.accounting.events import ADD_REMOVE, REPLACE_ONE, ZERO_OUT
from torch_dpsco.accounting.report import HELD
from torch_dpsco.errors import (
    BudgetExceeded,
    ConditionError,
    PrivacyError,
    UnitError,
    UtilityWarning,
)
from torch_dpsco.estimators import Category, LinearSVC, LogisticRegression, Number, Ridge, Schema
from torch_dpsco.noise import Repeatable
from torch_dpsco.show import plots
from torch_dpsco.statistics import study as module
from torch_dpsco.statistics.held_out import split
from torch_dpsco.statistics.results import Study
from torch_dpsco.statistics.study import plan_study, study

N = 4000
COLUMNS = {"age": Number(17, 90), "sex": Category(["f", "m"])}
LABELS: dict[str, Any] = {"target": "died", "labels": ["no", "yes"]}
COST: dict[str, Any] = {"target": "cost", "target_range": (0, 1500)}
USERS: dict[str, Any] = {"ids": "id", "rows_per_unit": None}
SCHEMA = Schema(COLUMNS, **LABELS)


def frame(n: int = N) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    age = rng.integers(17, 91, n)
    return {
        "age": age,
        "sex": rng.choice(["f", "m"], n),
        "died": np.where(rng.random(n) < 1 / (1 + np.exp(-(age - 60) / 8)), "yes", "no"),
        "cost": 10.0 * age + rng.normal(size=n) * 30,
        "id": np.arange(n) // 2,
    }


def made(schema: Schema = SCHEMA, budget: dp.Budget | None = None, **more: Any) -> Study:
    return study(frame(), schema, budget or dp.Budget(2.0, 1e-6), show=None, **more)


# -- parts ------------------------------------------------------------------------------------------------------------


def source(seed: int) -> Repeatable:
    return Picked(np.random.default_rng(seed))


def test_where_the_number_of_units_is_public_so_is_that_of_each_part():
    for adjacency in (REPLACE_ONE, ZERO_OUT):
        assert split(1001, 0.2, adjacency).sum() == 200
    first, second = split(1000, 0.5, REPLACE_ONE), split(1000, 0.5, REPLACE_ONE)
    assert (first != second).any()  # drawn anew


def test_under_add_remove_each_unit_has_a_coin_of_its_own():
    """One unit more leaves the parts of all others as they are; the number of each part is binomial."""
    for seed in range(20):
        assert (
            split(500, 0.2, ADD_REMOVE, source(seed))
            == split(501, 0.2, ADD_REMOVE, source(seed))[:500]
        ).all()
    numbers = [split(1000, 0.2, ADD_REMOVE, source(seed)).sum() for seed in range(200)]
    assert len(set(numbers)) > 20
    low, high = stats.binom.ppf([5e-7, 1 - 5e-7], 200_000, 0.2)
    assert low <= sum(numbers) <= high


def test_every_unit_is_held_out_as_often(monkeypatch):
    often = sum(split(60, 0.25, REPLACE_ONE, source(seed)).astype(int) for seed in range(2000))
    low, high = stats.binom.ppf([1e-9, 1 - 1e-9], 2000, 0.25)  # of 60: false alarm below 1e-6
    assert (low <= often).all()
    assert (often <= high).all()


@pytest.mark.weekly
@pytest.mark.parametrize("users", [False, True])
def test_where_a_unit_is_does_not_depend_on_others(monkeypatch, users):
    """The model is fitted to the one part and scored on the other; a user's rows stay together."""
    seen: dict[str, Any] = {}
    fit, scoring = LogisticRegression.fit, module.scores.score

    def fitted(self, X, y, groups=None):
        seen["fit"] = X, groups
        return fit(self, X, y, groups=groups)

    def scored(model, X, y, groups=None, **more):
        seen["held"] = X, groups
        return scoring(model, X, y, groups=groups, **more)

    monkeypatch.setattr(LogisticRegression, "fit", fitted)
    monkeypatch.setattr(module.scores, "score", scored)
    schema = Schema(COLUMNS, **LABELS, **(USERS if users else {}))
    made(schema, dp.Budget(2.0, 1e-6, unit="user" if users else "example"))
    (fit_rows, fit_ids), (held_rows, held_ids) = seen["fit"], seen["held"]
    assert len(fit_rows) + len(held_rows) == N
    whole = schema.read(frame()).X
    together = np.concatenate([fit_rows, held_rows])
    assert (together[np.lexsort(together.T)] == whole[np.lexsort(whole.T)]).all()
    if users:
        assert not set(fit_ids) & set(held_ids)
        assert len(set(held_ids)) == N // 2 // 5


# -- charges ----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "budget",
    [
        dp.Budget(1.0, 1e-6),
        dp.Budget(1.0, 1e-6, ADD_REMOVE),
        dp.Budget(1.0, 1e-6, ZERO_OUT),
        dp.Budget(2.0, 0.0),
        dp.Budget(advantage=0.2),
        dp.Budget(tpr=0.2, fpr=0.01),
    ],
)
def test_both_parts_have_the_whole_budget_and_together_keep_it(budget):
    found = made(budget=budget, n=N)
    report = found.report().figures
    assert report.epsilon <= (
        budget.epsilon if budget.risk is None or report.delta == budget.delta else 100
    )
    assert {charge.passes for charge in report.charges} == {1}
    ledger = found.model.accountant.ledger
    assert {place.startswith(HELD) for place, _, _, _ in ledger.entries()} == {True}
    assert {part for _, part, _, _ in ledger.entries()} == {"fit", "held"}
    if budget.delta > 0:  # each spends all of it alone
        for part in ("fit", "held"):
            events = [
                e for _, p, e, count in ledger.entries() if p == part for _ in range(count)
            ]
            alone = dp.accounting.ledger.Ledger(events)
            assert alone.epsilon(budget.delta, budget.adjacency) == pytest.approx(
                budget.epsilon, rel=0.2
            )


@pytest.mark.slow
def test_nothing_more_is_charged_to_the_ledger_of_a_study():
    found = made()
    X, y = SCHEMA.read(frame()).X, SCHEMA.read(frame()).y
    with pytest.raises((BudgetExceeded, PrivacyError)):
        found.model.fit(X[: N - N // 5], y[: N - N // 5])
    with pytest.raises((BudgetExceeded, PrivacyError)):
        dp.score(
            found.model, X, y, budget=dp.Budget(2.0, 1e-6), accountant=found.model.accountant
        )


def test_a_fit_that_fails_leaves_a_charge_and_no_study(monkeypatch, tmp_path):
    path = str(tmp_path / "ledger")

    def broken(model, *args, **kwargs):
        if hasattr(model.accountant, "ledger"):  # not the stand-in that is tried before
            raise RuntimeError("broken")
        return scoring(model, *args, **kwargs)

    scoring = module.scores.score
    monkeypatch.setattr(module.scores, "score", broken)
    with pytest.raises(RuntimeError, match="broken"):
        made(ledger_path=path)
    assert len(dp.accounting.ledger_file.LedgerCopy(path).book.ledger) == 1


def test_a_ledger_of_another_run_is_refused_before_anything_is_spent(tmp_path):
    path = tmp_path / "ledger"
    first = made(ledger_path=str(path))
    with pytest.raises(ValueError, match=r"must be new, since it spends .* \(got '.*ledger'"):
        made(ledger_path=str(path), holdout=0.3)
    with pytest.warns(UtilityWarning, match="paid for by an earlier run"):
        again = made(ledger_path=str(path))
    assert again.score.value == first.score.value
    assert again.privacy.epsilon == first.privacy.epsilon


def test_the_plan_is_shown_before_anything_is_spent():
    def stop(text):
        assert "fit: 3200 of 4000, the whole budget" in text
        assert "LogisticRegression by" in text
        assert "held out: 800, the whole budget" in text
        assert "auc: epsilon 0.5" in text
        assert "predictions that cover 90 %: epsilon 0.5" in text
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(frame(), SCHEMA, dp.Budget(1.0, 1e-6), show=stop)


# -- models and scores ------------------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("schema", "unit", "more", "name", "least"),
    [
        (SCHEMA, "example", {}, "LogisticRegression", 0.8),
        (SCHEMA, "example", {"model": LinearSVC, "metric": "accuracy"}, "LinearSVC", 0.6),
        (Schema(COLUMNS, **LABELS, **USERS), "user", {}, "LogisticRegression", 0.7),
        (
            Schema(COLUMNS, target="died", labels=["no", "yes", "?"]),
            "example",
            {},
            "SoftmaxRegression",
            0.6,
        ),
        (Schema(COLUMNS, **COST), "example", {}, "Ridge", None),
        (Schema(COLUMNS, **COST), "example", {"metric": "squared_error"}, "Ridge", None),
        (Schema(COLUMNS, **COST, **USERS), "user", {}, "HuberRegressor", None),
    ],
)
def test_the_model_follows_from_the_schema(schema, unit, more, name, least):
    found = made(schema, dp.Budget(4.0, 1e-6, unit=unit), **more)
    assert type(found.model).__name__ == name
    if least is not None:
        assert found.score.value > least
    else:
        assert found.score.value < (100 if found.score.metric == "absolute_error" else 200**2)


@pytest.mark.weekly
def test_a_study_searches_at_one_price():
    cost = Schema(COLUMNS, **COST)
    found = made(
        cost, dp.Budget(8.0, 1e-6), candidates={"small": {}, "large": {"reg": 1e9}}, trials=20.0
    )
    assert "the best of 20 trials on average, among small, large" in str(found.plan)
    assert found.privacy.epsilon <= 8.0
    assert len(found.model.accountant) == 3  # search, score, sets
    assert found.model.privacy_.epsilon <= 8.0
    with pytest.raises((BudgetExceeded, PrivacyError)):
        found.model.fit(np.zeros((3200, 3)), np.zeros(3200))
    with pytest.raises(ConditionError, match="a preview is of one model"):
        found.plan.preview()


@pytest.mark.slow
def test_a_preview_of_a_plan_spends_nothing():
    plan = plan_study(SCHEMA, dp.Budget(1.0, 1e-6), n=N)
    assert plan.preview(epsilons=[1.0]).noise[0] < 1
    public = frame(300)
    public["age"] = np.where(np.arange(300) == 7, math.nan, public["age"])
    assert "AUC" in plan.preview(public, epsilons=[1.0], runs=3).scores
    assert plan.model.accountant is None


@pytest.mark.parametrize("own", [{}, USERS], ids=["rows", "users"])
def test_epsilon_and_delta_are_a_budget_of_whom_the_schema_protects(own):
    schema = Schema(COLUMNS, **LABELS, **own)
    flat = plan_study(schema, epsilon=2.0, delta=1e-6, n=N)
    assert flat.budget.unit == ("user" if own else "example")
    by_budget = plan_study(schema, dp.Budget(2.0, 1e-6), n=N)
    assert (flat.budget, str(flat)) == (by_budget.budget, str(by_budget))
    with pytest.raises(ValueError, match="epsilon and delta must be given"):
        study(frame(), schema, show=None)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.cases(9, 4)
@pytest.mark.parametrize(
    ("error", "words", "more"),
    [
        (
            UnitError,
            "budget must be of unit 'user'",
            {"budget": dp.Budget(1.0, 1e-6, unit="user")},
        ),
        (
            UnitError,
            "budget must be of unit 'user'",
            {
                "schema": Schema(COLUMNS, **LABELS, **USERS),
                "budget": dp.Budget(1.0, 1e-6, unit="example"),
            },
        ),
        (
            ValueError,
            "budget must be of mode 'planned'",
            {"budget": dp.Budget(1.0, 1e-6, mode="gdp")},
        ),
        (ValueError, "metric must be one of", {"metric": "log_loss"}),
        (ValueError, "n must leave 50 units", {"holdout": 0.001}),
        (ValueError, "holdout must be", {"holdout": 1.0}),
        (ValueError, "bound_x must be left to the schema", {"bound_x": 3.0}),
        (ValueError, "epsilon and delta must be given, or a budget", {"epsilon": 3.0}),
        (
            ValueError,
            "n must be given under add_remove",
            {"budget": dp.Budget(1.0, 1e-6, ADD_REMOVE)},
        ),
        (UnitError, "n must be the number of examples under zero_out", {"n": N - 1}),
        (ValueError, "speed must be an argument of study", {"speed": 1}),
        (
            ValueError,
            "bound_x must be left to the schema",
            {"candidates": {"a": {"bound_x": 1.0}}},
        ),
        (ValueError, "candidates must be one or more", {"candidates": {}}),
        (ValueError, "trials must be given with candidates", {"trials": 5.0}),
        (
            UnitError,
            "candidates must be of rows",
            {
                "candidates": {"a": {}},
                "schema": Schema(COLUMNS, **LABELS, **USERS),
                "budget": dp.Budget(1.0, 1e-6, unit="user"),
            },
        ),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_spent(error, words, more, monkeypatch):
    monkeypatch.setattr(
        dp.Accountant, "authorize", lambda *args, **kwargs: pytest.fail("charged")
    )
    with pytest.raises(error, match=words):
        made(more.pop("schema", SCHEMA), more.pop("budget", dp.Budget(1.0, 1e-6)), **more)


# -- what is released -------------------------------------------------------------------------------------------------

BASE = Schema(
    COLUMNS | {"sex": Category(["f", "m"], baseline=True)},
    **LABELS,
    unit="patient",
    one_row_per_unit=True,
)


@pytest.mark.slow
def test_intervals_have_the_names_of_the_schema():
    records = {
        name: column for name, column in frame().items() if name != "id"
    }  # two rows of an id are one patient
    found = study(records, BASE, dp.Budget(4.0, 1e-6), show=None, intervals=0.3)
    table = found.coefficients()
    assert table.names == ("age", "sex=m", "intercept")
    assert table.units[:2] == ("per 1 of 17 to 90", "against 'f'")
    low, high = found.coefficients(level=1 - 1e-7).intervals.T
    assert low[0] < 1 / 8 < high[0]  # the truth: 1/8 a year, from 60 years on
    assert low[2] < -60 / 8 < high[2]
    assert table.scaled[0] == pytest.approx(table.values[0] * 73 / 2)
    assert "sex=m" in found.summary()
    assert "with intervals unless noise hides them" in str(found.plan)
    assert "no intervals" not in found.summary()
    found.model.hessian_[:] = 0.0  # as if noise hid it
    assert "no intervals: the noisy Hessian must stand out" in found.summary()
    assert str(found.plan) not in found.summary()
    assert found.report().headline.endswith(
        "for one patient (zero_out: emptied), if each patient has one row."
    )
    assert "No patient has a second row: one_row_per_unit=True" in str(found.plan)
    text = " ".join(str(found.report()).split())
    assert "Ranges, levels and labels of the schema are public" in text
    assert "The model with what intervals need; the score of it;" in text
    assert f"Score: {found.score}, on {found.plan.held} patients that were held out." in text
    assert found.report().title == "Privacy card: LogisticRegression of 'died'"
    assert f"A study: {2 + (found.sets is not None)} releases" in text
    assert f"measured on {found.plan.held} others" in text
    assert "finalize()" not in text


@pytest.mark.parametrize("rows", [1, None])
def test_units_with_ids_have_their_name_without_a_proviso(rows):
    """With ids the code keeps one row of each, or protects all of them."""
    schema = Schema(COLUMNS, **LABELS, ids="id", rows_per_unit=rows, unit="patient")
    report = made(schema, dp.Budget(2.0, 1e-6, unit="example" if rows else "user")).report()
    assert report.headline.endswith("for one patient (zero_out: emptied).")
    assert "All rows of a patient carry its id, and no other does." in " ".join(
        str(report).split()
    )


def test_intervals_of_whole_groups_are_refused_before_anything_is_spent():
    with pytest.raises(ValueError, match="give column 'sex' Category"):
        made(intervals=0.3)
    found = made().coefficients()
    assert found.intervals is None
    assert "no intervals: LogisticRegression has no summary: intervals must be paid for" in str(
        found
    )


def test_predictions_need_no_target():
    found, table = made(), frame(20)
    assert set(found.predict({"age": [20, 90], "sex": ["f", "m"]})) == {"no", "yes"}
    with pytest.raises(ValueError, match="X must have values that the schema can read"):
        found.predict({"age": ["?"], "sex": ["f"]})
    assert found.predict(table).shape == (20,)


@pytest.mark.weekly
@pytest.mark.parametrize(
    "schema", [SCHEMA, Schema(COLUMNS, target="died", labels=["no", "yes", "?"])]
)
def test_a_study_is_drawn(schema):
    pytest.importorskip("matplotlib")
    figure = made(schema).plot()
    assert [axes.get_title() for axes in figure.axes] == [
        "What the model says",
        "How good it is, on those held out",
        "What can be found out about one example",
    ]
    tops = [axes.get_subplotspec().rowspan.start for axes in figure.axes]
    assert tops == [0, 0, 0]  # one row


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("page", ["study", "inference", "released"])
def test_the_code_of_the_pages_runs(page):
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), f"docs/{page}.md", "exec"), {})


@pytest.mark.parametrize(
    ("schema", "model", "words"),
    [
        (SCHEMA, Ridge, "model must be one for 2 labels, .*got Ridge, which takes no classes"),
        (
            Schema(COLUMNS, target="died", target_range=(0, 1)),
            LogisticRegression,
            "for a real target, .*no bound_y",
        ),
        (
            SCHEMA,
            "Ridge",
            "model must be a class of torch_dpsco.estimators, as Ridge .*got 'Ridge'",
        ),
    ],
)
def test_a_model_of_other_targets_is_refused(schema, model, words):
    with pytest.raises(ValueError, match=words):
        plan_study(schema, dp.Budget(1.0, 1e-6), n=N, model=model)


@pytest.mark.weekly
def test_a_study_is_saved_into_a_new_folder(tmp_path):
    pytest.importorskip("matplotlib")
    found = made(BASE, dp.Budget(4.0, 1e-6), check=False)
    found.save(tmp_path / "study")
    assert {path.name for path in (tmp_path / "study").iterdir()} == {
        "model.json",
        "report.html",
        "summary.txt",
        "study.svg",
    }
    with pytest.raises(FileExistsError, match="folder must be new"):
        found.save(tmp_path / "study")
    assert found.released().card["guarantee"]["unit_name"] == "patient"
    assert "finalize" not in str(found.report())  # a study has none


@pytest.mark.parametrize("level", [None, 0.9])
def test_a_bar_names_the_step_that_runs_where_it_is_asked_for_or_seen(
    level, capsys, monkeypatch
):
    steps = ["read", "rehearse on made-up rows", "fit LogisticRegression", "score auc"]
    steps += [] if level is None else ["calibrate predictions"]
    made(level=level, check=False)
    assert capsys.readouterr() == ("", "")  # no terminal
    made(level=level, check=False, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    seen = re.findall(r"([a-zA-Z][\w -]*): +\d+%[^\r]*?(\d+)/(\d+)", err)
    assert list(dict.fromkeys(name for name, *_ in seen)) == steps
    assert seen[-1][1:] == (str(len(steps)),) * 2
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    made(level=level, check=False, progress=False)
    assert capsys.readouterr().err == ""
    made(level=level, check=False)
    assert "score auc" in capsys.readouterr().err


def test_the_bar_stops_where_a_study_does(capsys, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("broken")

    monkeypatch.setattr(LogisticRegression, "fit", broken)
    with pytest.raises(RuntimeError, match="broken"):
        made(check=False, progress=True)
    assert "2/5" in (err := capsys.readouterr().err)
    assert "3/5" not in err


# -- the look before --------------------------------------------------------------------------------------------------


def test_a_table_that_cannot_be_read_spends_nothing(tmp_path, capsys):
    """Labels of another case, without a word: a model of nothing. Told to, a study goes on."""
    table, ledger = (
        frame() | {"died": np.array(["No", "Yes"])[np.arange(N) % 2]},
        tmp_path / "ledger",
    )
    plan = plan_study(SCHEMA, dp.Budget(2.0, 1e-6), n=N)
    for run in (
        plan.run,
        lambda table, **more: study(table, SCHEMA, dp.Budget(2.0, 1e-6), show=print, **more),
    ):
        with pytest.raises(ValueError, match="the table must be one that its schema can read"):
            run(table, ledger_path=str(ledger))
        assert not ledger.exists()
        out, err = capsys.readouterr()
        assert out == ""
        assert "NOT PRIVATE" in err
        assert "STOPS A STUDY: died: 100.0% of values are none of the labels ('No', 'Yes'" in err
    assert plan.run(table, check=False).score.value < 0.8
    assert capsys.readouterr() == ("", "")


def test_what_the_look_finds_is_on_standard_error_alone(tmp_path, capsys, monkeypatch):
    """The error, and all that is saved of a study that goes on, say nothing of it."""
    monkeypatch.setattr(plots, "encoded", lambda drawn, kind: b"")
    odd = {"sex": np.where(np.arange(N) % 4 == 0, "zebra", frame()["sex"])}
    with pytest.raises(ValueError, match="standard error") as caught:
        study(frame() | odd | {"age": ["giraffe"] * N}, SCHEMA, dp.Budget(2.0, 1e-6), show=None)
    assert not re.search(r"zebra|giraffe|age|sex|%", str(caught.value))
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert "giraffe" not in capsys.readouterr().err  # a text that is no number is not quoted
    found = study(frame() | odd, SCHEMA, dp.Budget(2.0, 1e-6), show=print)
    out, err = capsys.readouterr()
    assert "25.0% of values are none of the levels ('zebra')" in err
    found.save(tmp_path / "study")
    written = [path.read_text(encoding="utf-8") for path in (tmp_path / "study").iterdir()]
    assert not any("zebra" in text or "25.0%" in text for text in (out, *written))
    assert "The look at the table beside its schema" in " ".join(str(found.report()).split())
