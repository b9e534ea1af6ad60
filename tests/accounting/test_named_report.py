"""Reports that say what one unit is, and what their publisher promises."""

from __future__ import annotations

import copy
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torch_dpsco as dp
from torch_dpsco.accounting.designs import AssignedParts, Design, Undeclared
from torch_dpsco.accounting.events import ADJACENCIES, Adjacency, clipped_gaussian, in_words
from torch_dpsco.accounting.report import OneRelease, Run
from torch_dpsco.accounting.statement import Statement, make_statement
from torch_dpsco.estimators import LogisticRegression

DESIGNS: tuple[Design, ...] = (
    dp.Poisson(6, 24),
    dp.Fixed(6, 24),
    dp.Shuffled(6, 24),
    dp.Disjoint(6, 24),
    dp.Cyclic(6, 24, 2),
    dp.Assigned(6, 24),
    dp.Full(24),
    dp.Parts(((dp.Full(8), 1), (dp.Poisson(4, 16), 2)), 24),
    AssignedParts(((dp.Full(8), 1), (dp.Assigned(4, 16), 2)), 24),
    Undeclared(6),
)
UNIT = re.compile(r"\b(examples?|users?)\b")
ONE_ROW = {"one_row_per_unit": True}
WHY: dict[str, dict[str, bool]] = {"example": ONE_ROW, "user": {}}  # why one row is one unit


def statement(unit: str, adjacency: Adjacency, design: Design, one: bool = False) -> Statement:
    step = clipped_gaussian(9.0)
    ledger = dp.Accountant(dp.Budget(5.0, 0.1, adjacency=adjacency, unit=unit))  # type: ignore[arg-type]
    ledger.authorize(step, 2)
    run = (OneRelease if one else Run)("Some", design, step, 2, 4, finalized=False)
    return make_statement(ledger.report(), run)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("unit", ["example", "user"])
@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("one", [True, False])
def test_no_sentence_says_the_old_name(unit: str, adjacency: Adjacency, one: bool) -> None:
    for design in DESIGNS[:-1] if one else DESIGNS:  # one release has a declared design
        plain = statement(unit, adjacency, design, one)
        named = plain.named("patient", **WHY[unit])
        for text in (str(plain), plain.markdown(), str(plain.figures)):
            assert unit in text
            assert "patient" not in text
        for text in (
            str(named),
            named.markdown(),
            str(named.figures),
            named.json().replace(f'"unit": "{unit}"', ""),
        ):
            assert "patient" in text
            assert not UNIT.search(text), UNIT.search(text)
        assert len(named.sections) == len(plain.sections)
        proviso = ", if each patient has one row" if unit == "example" else ""
        assert named.headline == plain.headline.replace(
            f"one {unit} ({in_words(adjacency)})",
            f"one patient ({in_words(adjacency)}){proviso}",
        )


def test_pictures_have_the_name_too() -> None:
    pytest.importorskip("matplotlib")
    plain = statement("user", "replace_one", DESIGNS[1])
    assert "one user (" in plain.plot().get_suptitle()
    assert "one patient (" in plain.named("patient").plot().get_suptitle()


def test_figures_and_unit_are_the_same() -> None:
    plain = statement("user", "add_remove", DESIGNS[0])
    hospital = plain.named("hospital")
    named = hospital.figures
    assert named.unit == "user"
    assert named.assumptions[0] == "all rows of a hospital carry its id, and no other does"
    assert replace(named, named_unit=(), assumptions=plain.figures.assumptions) == plain.figures
    assert hospital.named("ward") == plain.named("ward")


def test_a_row_is_not_said_to_be_a_person() -> None:
    flat = " ".join(
        str(statement("example", "add_remove", DESIGNS[0]).named("patient", **ONE_ROW)).split()
    )
    assert "for one patient (add_remove: added or removed), if each patient has one row." in flat
    assert (
        "One patient is one row of the training data. With several rows, a patient is not protected"
        in flat
    )
    assert "One record per patient." in flat
    assert "One patient is all rows with its id" in " ".join(
        str(statement("user", "add_remove", DESIGNS[0]).named("patient")).split()
    )


def test_a_row_gets_a_name_by_ids_or_by_a_promise(tmp_path: Path) -> None:
    """One row is one patient because somebody says so, which every page says first, or because ids were looked at."""
    rows, users = (
        statement("example", "replace_one", DESIGNS[1]),
        statement("user", "replace_one", DESIGNS[1]),
    )
    for why in ({}, {"one_row_per_unit": True, "by_ids": True}):
        with pytest.raises(
            ValueError, match="one_row_per_unit must be True if each unit has one row"
        ):
            rows.named("patient", **why)
    for why in ({"one_row_per_unit": True}, {"by_ids": True}):
        with pytest.raises(ValueError, match="one_row_per_unit and by_ids must be left out"):
            users.named("patient", **why)
    promised, kept = rows.named("patient", **ONE_ROW), rows.named("patient", by_ids=True)
    for said in (promised.headline, str(promised.figures), promised.markdown(), promised.json()):
        assert "if each patient has one row" in said
    for said in (str(kept), str(kept.figures)):
        assert "if each patient" not in said
        assert "ll rows of a patient carry its id, and no other does" in " ".join(said.split())
    assert "of several rows with its id, the others were left out" in " ".join(str(kept).split())
    assert (
        kept.named("ward", **ONE_ROW)
        == rows.named("ward", **ONE_ROW)
        != kept.named("ward", by_ids=True)
    )


@pytest.mark.parametrize(
    ("name", "several"),
    [
        ("patient", "patients"),
        ("company", "companies"),
        ("woman", "women"),
        ("young man", "young men"),
        ("human", "humans"),
        ("day", "days"),
        ("bus", "buses"),
        ("branch", "branches"),
    ],
)
def test_several_units_have_a_name(name: str, several: str) -> None:
    plain = statement("example", "add_remove", DESIGNS[0])
    assert (plain.figures.unit_name, plain.figures.unit_names) == ("example", "examples")
    named = plain.named(name, **ONE_ROW).figures
    assert (named.unit_name, named.unit_names) == (name, several)
    assert plain.named("person", "people", **ONE_ROW).figures.unit_names == "people"


@pytest.mark.slow
def test_copies_and_files_keep_the_name(tmp_path: Path) -> None:
    said = statement("user", "replace_one", DESIGNS[1]).named("patient").promising("a b c")
    for again in (copy.deepcopy(said), pickle.loads(pickle.dumps(said))):
        assert again == said
        assert again.figures.unit_name == "patient"
    said.save(tmp_path / "card.json")
    read = json.loads((tmp_path / "card.json").read_text(encoding="utf-8"))
    assert (read["guarantee"]["unit"], read["guarantee"]["unit_name"]) == ("user", "patient")
    assert "a b c" in read["assumptions"]
    for name in ("card.html", "card.md"):
        said.save(tmp_path / name)
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "A b c." in text
        assert not UNIT.search(re.sub(r"data:image[^\"]*", "", text))


@pytest.mark.parametrize("bad", ["", " ", "a|b", "<b>", "a\nb", "a`b", 3, None])
def test_names_of_other_kinds_are_refused(bad: Any) -> None:
    report = statement("example", "add_remove", DESIGNS[0])
    with pytest.raises(ValueError, match="unit must be"):
        report.named(bad)
    if bad is not None:
        with pytest.raises(ValueError, match="plural must be"):
            report.named("patient", bad)


def test_promises_are_on_the_card_once() -> None:
    plain = statement("example", "add_remove", DESIGNS[0])
    promise = "ranges and levels of the schema are public, not read off the table"
    said = plain.promising(promise, "ids are right.").promising(f"{promise}.")
    held = dict(said.sections)["What must hold"]
    assert [line for line in held if "schema" in line] == [f"{promise[0].upper()}{promise[1:]}."]
    assert "Ids are right." in held
    assert f"  assumes: {promise}" in str(said.figures)
    assert set(plain.figures.assumptions) < set(said.figures.assumptions)
    assert said.named("patient", **ONE_ROW) == plain.named("patient", **ONE_ROW).promising(
        promise, "ids are right"
    )


@pytest.mark.parametrize("bad", ["", " . ", "a\nb", 3, None])
def test_promises_of_other_kinds_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="sentences must be text of one line"):
        statement("example", "add_remove", DESIGNS[0]).promising("fine", bad)


@pytest.mark.slow
def test_a_cap_on_users_says_users() -> None:
    X = np.random.default_rng(0).uniform(size=(400, 2))
    model = LogisticRegression(n=100, bound_x=1.5, classes=(False, True), adjacency="add_remove")
    said = model.fit(X, X[:, 0] > 0.5, groups=np.arange(400) % 100).report()
    assert "There are no more than n_max = 200 users." in " ".join(str(said).split())
    assert "There are no more than n_max = 200 patients." in " ".join(
        str(said.named("patient")).split()
    )


def test_the_page_on_promises_says_what_its_code_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "before_you_start.md").read_text(
        encoding="utf-8"
    )
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(code, "docs/before_you_start.md", "exec"), {})
    assert f"```\n{capsys.readouterr().out}```" in page
