"""What was paid for is not lost: whatever could fail after the charge fails before it, or works."""

from __future__ import annotations

import math
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torch_dpsco as dp
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators import Category, LogisticRegression, Number, Ridge
from torch_dpsco.estimators.released import Released
from torch_dpsco.estimators.solvers import needed_eigenvalue
from torch_dpsco.show import plots
from torch_dpsco.show.cli import main
from torch_dpsco.statistics import study as module
from torch_dpsco.statistics.results import Study
from torch_dpsco.statistics.study import study

N = 300
RNG = np.random.default_rng(7)
BUDGET = dp.Budget(2.0, 1e-6)
LARGER = dp.Budget(4.0, 1e-6)  # for intervals of N records
NAMES = ("price ($)", "income_$_per_$m", "50 % <b>&amp;", r"a\$b\\", "'\"`|{}[]", "_")
FIELDS: dict[str, Any] = {
    "columns": {name: Number(0, 1) for name in NAMES}
    | {"c": Category(["$a", "$b$_{\n"], baseline=True)},
    "target": "died $_",
    "labels": ["$no", "yes\n"],
    "unit": "grand-child's",
    "one_row_per_unit": True,
}
REFUSED: dict[str, dict[str, Any]] = {
    "a unit with an underscore": {"unit": "Patient_1"},
    "a unit in brackets": {"unit": "patient (adult)"},
    "a name that no file can hold": {"columns": {"\ud800": Number(0, 1)}},
    "a level that no file can hold": {
        "columns": {"c": Category(["a", "\ud800"], baseline=True)}
    },
    "labels that no model file can hold": {"labels": [Decimal(1), Decimal(2)]},
}


def table(fields: dict[str, Any]) -> dict[str, Any]:
    drawn = RNG.integers(2, size=N)
    kinds = fields["columns"].items()
    columns = {
        name: kind.levels if isinstance(kind, Category) else (0.1, 0.9) for name, kind in kinds
    }
    return {
        name: [pair[k] for k in drawn]
        for name, pair in (columns | {fields["target"]: fields["labels"]}).items()
    }


@pytest.mark.slow
def test_odd_names_work_wherever_they_stand(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        plots, "encoded", lambda drawn, kind: b""
    )  # what has names was laid out before
    frame = table(FIELDS)
    found = study(frame, dp.Schema(**FIELDS), LARGER, intervals=0.3, show=None)
    found.save(tmp_path / "study")
    again = Released.load(tmp_path / "study" / "model.json")
    assert (again.predict(frame) == found.predict(frame)).all()
    assert "Study of 'died $_'" in (tmp_path / "study" / "summary.txt").read_text(
        encoding="utf-8"
    )
    assert "grand-child&#x27;s" in (tmp_path / "study" / "report.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_report_or_file_can_hold_is_refused_before_anything_is_spent(name, tmp_path):
    ledger, fields = tmp_path / "ledger", FIELDS | REFUSED[name]
    with pytest.raises((ValueError, TypeError)):
        study(
            table(fields),
            dp.Schema(**fields),
            LARGER,
            intervals=0.3,
            show=None,
            ledger_path=str(ledger),
        )
    assert not ledger.exists()


def test_without_matplotlib_the_model_is_saved_before_pictures_are_missed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = study(table(FIELDS), dp.Schema(**FIELDS), BUDGET, show=None)
    with pytest.raises(ImportError, match="pip install 'torch_dpsco"):
        found.save(tmp_path / "study")
    assert {path.name for path in (tmp_path / "study").iterdir()} == {
        "model.json",
        "summary.txt",
    }
    saved = Released.load(tmp_path / "study" / "model.json")
    assert saved.card["headline"] == found.report().headline


def test_a_part_of_a_study_that_would_fail_does_so_before_the_ledger_is_made(
    tmp_path, monkeypatch
):
    """Whatever `try` makes of the stand-in: score, sets, report, model file, summary, picture."""
    for name in (
        "scores.score",
        "module.conformal",
        "Study.report",
        "Released.json",
        "Study.summary",
        "plots.figure",
    ):
        with monkeypatch.context() as patch:
            owner, _, attribute = name.partition(".")
            patch.setattr(
                {
                    "module": module,
                    "scores": module.scores,
                    "Study": Study,
                    "Released": Released,
                    "plots": plots,
                }[owner],
                attribute,
                fail,
            )
            with pytest.raises(RuntimeError, match="fails"):
                study(
                    table(FIELDS),
                    dp.Schema(**FIELDS),
                    BUDGET,
                    show=None,
                    ledger_path=str(tmp_path / "ledger"),
                )
        assert not (tmp_path / "ledger").exists(), name


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("fails")


def test_labels_that_no_array_holds_are_refused_before_a_fit_is_charged():
    ledger = dp.Accountant(dp.Budget(1.0, 1e-6, "add_remove"))
    model = LogisticRegression(n=N, bound_x=1.0, classes=("a", (1, 2)), accountant=ledger)
    with pytest.raises(ValueError, match="inhomogeneous"):
        model.fit(np.zeros((N, 1)), ["a"] * N)
    assert len(ledger) == 0


# -- intervals --------------------------------------------------------------------------------------------------------

PAID: list[tuple[Any, dict[str, Any]]] = [
    (LogisticRegression, {"classes": ("no", "yes")}),
    (Ridge, {"bound_y": 3.0}),
]


@pytest.mark.parametrize(("kind", "more"), PAID)
def test_intervals_that_no_table_of_this_size_has_are_refused_before_they_are_paid_for(
    kind, more
):
    """The most that the least eigenvalue can be is reached by rows of full length in all directions alike."""
    given: dict[str, Any] = {
        "bound_x": 1.0,
        "intervals": 0.3,
        "adjacency": "replace_one",
        "epsilon": 0.2,
    } | more
    plan = kind(**given, n=4000).plan(2)
    least = math.ceil(needed_eigenvalue(3, plan.hessian_scale) * 3 / plan.task.smoothness)
    assert kind(**given, n=least + 2).plan(2).task.curvature
    with pytest.raises(ConditionError, match="intervals must be of more records"):
        kind(**given, n=least - 2).plan(2)


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def words(tmp_path, monkeypatch) -> list[str]:
    """Words of a fit, in a folder of its own."""
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    lines = [f"{k % 7 / 7},{'yes' if k % 7 > 3 else 'no'}" for k in range(N)]
    Path("table.csv").write_text("\n".join(["v,y", *lines]), encoding="utf-8")
    dp.Schema({"v": Number(0, 1)}, target="y", labels=["no", "yes"]).save("schema.toml")
    return [
        "fit",
        "table.csv",
        "--schema",
        "schema.toml",
        "--epsilon",
        "2",
        "--ledger",
        "ledger",
        "--out",
    ]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_spent(words, capsys):
    assert main([*words, "table.csv/study"]) == 2
    assert "out must be a folder that can be written to" in capsys.readouterr().err
    assert not Path("ledger").exists()


def test_a_model_that_no_disk_takes_is_printed(words, capsys, monkeypatch):
    def full(self: Any, path: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Released, "save", full)
    assert main([*words, "study"]) == 2
    out, err = capsys.readouterr()
    assert "no space left" in err
    Path("rescued.json").write_text(out[out.index('{\n "format"') :], encoding="utf-8")
    assert Released.load("rescued.json").kind == "probabilities"
