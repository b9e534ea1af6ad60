"""Values in a notebook: what they print as is one line, what they show is HTML that no name of a column breaks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import torch_dpsco as dp
from tests.accounting.test_default_adjacency import PLANS, planned
from torch_dpsco import shown
from torch_dpsco.estimators import Category, LogisticRegression, Number
from torch_dpsco.statistics.study import Study, plan_study
from torch_dpsco.step.plan import Plan

EVIL = "<script>alert('&\")</script>"
N = 400
SCHEMA = dp.Schema(
    {EVIL: Number(0, 1), **{f"column {k}": Category(["a", EVIL]) for k in range(60)}},
    target="died",
    labels=["no", EVIL],
)
PRIVATE = 0.123456789  # of every row


@cache
def studied() -> Study:
    frame: dict[str, Any] = {f"column {k}": ["a"] * N for k in range(60)}
    frame |= {EVIL: [PRIVATE] * N, "died": ["no", EVIL] * (N // 2)}
    return dp.study(frame, SCHEMA, epsilon=2.0, delta=1e-6, show=None, check=False)


VALUES: dict[str, Callable[[], Any]] = {
    **{name: (lambda name=name: planned(name)[0]) for name in PLANS},  # type: ignore[misc]
    "fit": lambda: LogisticRegression(n=N, bound_x=1.0, classes=(0, 1)).plan(3),
    "preview": lambda: LogisticRegression(n=N, bound_x=1.0, classes=(0, 1)).preview(dim=3),
    "study plan": lambda: plan_study(SCHEMA, epsilon=1.0, delta=1e-6, n=N),
    "study": studied,
    "score": lambda: studied().score,
    "statement": lambda: studied().report(),
    "report": lambda: studied().privacy,
    "ledger's": lambda: dp.Accountant(dp.Budget(1.0, 0.0)).report(),
    "schema": lambda: SCHEMA,
    "budget": lambda: dp.Budget(1.0, 1e-6),
    "budget of rates": lambda: dp.Budget(tpr=0.2, fpr=0.01, unit="user"),
}


def all_plans(kind: type[Plan] = Plan) -> set[type[Plan]]:
    return {kind, *(inner for direct in kind.__subclasses__() for inner in all_plans(direct))}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_prints_one_short_line_and_shows_a_table(name: str) -> None:
    value = VALUES[name]()
    assert 0 < len(repr(value)) <= shown.MOST
    assert len(repr(value).splitlines()) == 1
    assert type(value).__name__ in repr(value)
    html = value._repr_html_()
    tree = ElementTree.fromstring(html)  # raises unless it is well-formed
    assert len(list(tree.iter("tr"))) >= 2
    assert not {"script", "style", "img"} & {node.tag for node in tree.iter()}
    assert not any(node.attrib for node in tree.iter())  # no colours of its own
    assert str(PRIVATE) not in html + repr(value)


def test_every_plan_prints_so() -> None:
    for kind in all_plans():
        assert kind.__repr__ is Plan.__repr__


def test_names_are_shown_as_they_are() -> None:
    said = "".join(ElementTree.fromstring(SCHEMA._repr_html_()).itertext())
    assert EVIL in said
    assert EVIL not in SCHEMA._repr_html_()


def test_a_long_line_is_cut_and_a_broken_one_joined() -> None:
    assert shown.line(1, "x" * 500) == f"<int: {'x' * 190}...>"
    assert len(shown.line(1, "x" * 500)) == shown.MOST
    assert shown.line(1, "x" * 193) == f"<int: {'x' * 193}>"
    assert shown.line(1, "a\n  b") == "<int: a b>"


def test_what_is_printed_stays_whole() -> None:
    study = studied()
    assert str(study) == study.summary()
    assert len(str(study).splitlines()) > 5
    assert len(str(study.report()).splitlines()) > 5
    assert len(str(planned("NetSGD")[0]).splitlines()) > 5


def test_the_text_is_folded_below_the_table() -> None:
    tree = ElementTree.fromstring(studied()._repr_html_())
    (folded,) = tree.iter("pre")
    assert folded.text == str(studied())
    assert np.isclose(float(studied().score), studied().score.value)
