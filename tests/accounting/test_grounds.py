"""Every sentence that depends on the ledger is implied by it: all kinds of events, alone and in pairs.

The grounds are written here once more, by lists of events, apart from the code that decides.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations
from typing import Any, get_args

import pytest

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.designs import Full
from torch_dpsco.accounting.events import (
    GDP,
    ZCDP,
    ZERO_OUT,
    AboveThreshold,
    ApproxDP,
    Failure,
    Gaussian,
    KNorm,
    Laplace,
    NonPrivate,
    Parallel,
    PoissonGaussian,
    Pure,
    RandomAllocation,
    RDPCurve,
    SimpleEvent,
    WORGaussian,
)
from torch_dpsco.accounting.report import (
    OneRelease,
    PrivacyReport,
    Run,
    Words,
    charged,
    sentences_of,
)
from torch_dpsco.accounting.statement import Statement, make_statement

DELTA_SPENT = 1e-5
SENS = {ZERO_OUT: 1.0}
EVENTS: dict[str, Any] = {
    "gaussian": Gaussian(5.0, SENS),
    "exact": Gaussian(5.0, SENS, exact=True),
    "failing": Gaussian(5.0, SENS, failure=1e-7),
    "silent": Gaussian(0.0, SENS),
    "poisson": PoissonGaussian(5.0, 0.1),
    "exact poisson": PoissonGaussian(5.0, 0.1, exact=True),
    "fixed": WORGaussian(5.0, 1, 10),
    "allocated": RandomAllocation(5.0, 4),
    "laplace": Laplace(10.0, SENS),
    "threshold": AboveThreshold(20.0, 20.0, SENS),
    "pure": Pure(0.1),
    "approximate": ApproxDP(0.1, 1e-7),
    "approximate without delta": ApproxDP(0.1, 0.0),
    "zcdp": ZCDP(0.01),
    "binomial": ZCDP(0.01, 1e-7),
    "gdp": GDP(0.2),
    "k-norm": KNorm(0.1, 3),
    "curve": RDPCurve((2.0, 8.0), (0.02, 0.08)),
    "failure": Failure(1e-7, "transcript"),
    "no failure": Failure(0.0),
    "not private": NonPrivate(),
}
GAUSSIAN = {
    "gaussian",
    "exact",
    "failing",
    "silent",
    "poisson",
    "exact poisson",
    "fixed",
    "allocated",
}
EXACT = {"exact", "exact poisson"}
FLOATS = GAUSSIAN - EXACT | {"gdp"}
FAILING, STATED = {"failing", "failure"}, {"approximate", "binomial"}
WITHOUT_NOISE = {"silent", "not private"}
PURE = {"laplace", "threshold", "pure", "approximate without delta", "k-norm", "no failure"}
# neither pure nor a point: delta falls as epsilon rises
CURVED = {
    "gaussian",
    "exact",
    "poisson",
    "exact poisson",
    "fixed",
    "allocated",
    "zcdp",
    "gdp",
    "curve",
}
EVERY = set(EVENTS)
ASSUMED = ("assumed",)
DELTA = ("sections", "What delta is")

# a part of each sentence, and what must and must not be in a ledger that implies it
IMPLIED: dict[str, tuple[set[str], set[str]]] = {
    "fixed before the run": (EVERY, set()),
    "Poisson loader": ({"poisson", "exact poisson"}, set()),
    "fixed-size loader": ({"fixed"}, set()),
    "one of the batches of a pass by itself": ({"allocated"}, set()),
    "records assigned to batches": (set(), set()),
    "held out decided by a fresh draw": (set(), set()),
    "parts cut by position": (set(), set()),
    "parts cut record by record": (set(), set()),
    "exact discrete Gaussian noise on a public grid": (EXACT, FLOATS),
    "exact discrete Gaussian noise in events marked": (EXACT, set()),
    "ideal Gaussian noise (": (FLOATS, EXACT),
    "ideal Laplace noise": ({"laplace", "threshold"}, set()),
    "ideal K-norm noise": ({"k-norm"}, set()),
    "random bits of noise": (EVERY - {"failure", "no failure", "not private"}, set()),
    "delta is a slack": (EVERY, set()),
    "what the proof rests on fails": (FAILING, set()),
    "stated together with an epsilon": (STATED, set()),
    "With the Gaussian noise used here": (
        CURVED & GAUSSIAN,
        FAILING | STATED | WITHOUT_NOISE | {"zcdp", "gdp", "curve"},
    ),
    "by a whole curve": (CURVED - GAUSSIAN, FAILING | STATED | WITHOUT_NOISE),
    "has an epsilon at delta = 0": (PURE, EVERY - PURE),
    "The definition alone": (EVERY, set()),
}
RELEASE = OneRelease("SomeRelease", Full(100), Gaussian(5.0, SENS, exact=True), 1, 1, True)


def words_of(*names: str) -> Words:
    truths = charged((EVENTS[name] for name in names), ZERO_OUT)
    return Words(
        {**truths, "adaptive": False, "pure": False, "record": "record", "records": "records"}
    )


def accountant_of(*names: str) -> Accountant:
    accountant = Accountant(adjacency=ZERO_OUT)
    for name in names:
        accountant.record(EVENTS[name])
    return accountant


@cache
def report_of(*names: str) -> PrivacyReport:
    return accountant_of(*names).report(DELTA_SPENT)


LEDGERS = [
    *((name,) for name in EVENTS),
    *(("exact", name) for name in ("gaussian", "gdp", "failing", "laplace", "pure", "binomial")),
    ("gaussian", "exact", "laplace"),
    tuple(sorted(PURE)),
    tuple(EVENTS),
]


def said(statement: Statement, title: str) -> list[str]:
    return list(dict(statement.sections).get(title, ()))


def test_every_kind_of_event_is_tried() -> None:
    assert {type(event) for event in EVENTS.values()} == set(get_args(SimpleEvent))


def test_every_sentence_has_a_ground_here() -> None:
    for sentence in (*sentences_of(*ASSUMED), *sentences_of(*DELTA)):
        text = sentence.text.replace("{out_of_scope}", "")
        assert sum(part in text for part in IMPLIED) == 1, sentence.text


def test_each_sentence_is_printed_if_the_ledger_implies_it_and_only_then() -> None:
    seen = set()
    for names in (*LEDGERS, *combinations(EVENTS, 2), tuple(CURVED | PURE)):
        words = words_of(*names)
        lines = [*words.said(*ASSUMED), *words.said(*DELTA)]
        for part, (needed, excluded) in IMPLIED.items():
            implied = bool(needed & set(names)) and not excluded & set(names)
            if part == "exact discrete Gaussian noise in events marked":
                implied = implied and bool(FLOATS & set(names))
            assert sum(part in line for line in lines) == implied, (part, names)
            seen |= {part} if implied else set()
    assert set(IMPLIED) - seen == {part for part, (needed, _) in IMPLIED.items() if not needed}


def test_these_are_the_sentences_of_reports_and_statements() -> None:
    for names in LEDGERS:
        report = report_of(*names)
        words = words_of(*names)
        assert list(report.assumptions[1:]) == list(words.said(*ASSUMED))
        spent = list(words.said(*DELTA))
        assert said(make_statement(report, RELEASE), "What delta is") == spent


def test_a_ledger_without_charges_names_no_noise() -> None:
    report = report_of()
    assert report.assumptions == (
        "one record per example",
        "noise, rates and number of steps fixed before the run",
    )
    assert len(said(make_statement(report, RELEASE), "What delta is")) == 2


def test_what_is_said_of_delta_is_true_of_the_curve() -> None:
    """Where it is no chance of disclosure, delta falls with epsilon; elsewhere some of it stays."""
    for names in LEDGERS:
        words, accountant = (
            " ".join(said(make_statement(report_of(*names), RELEASE), "What delta is")),
            accountant_of(*names),
        )
        far = accountant.get_delta(60.0)
        assert (far < 1e-15) if "It is not the chance" in words else (far >= 5e-8), names
        if "has an epsilon at delta = 0" in words:
            assert math.isfinite(accountant.get_epsilon(0.0))


CUTS = {
    "records assigned to batches": ("assigned/x", "keyed", True),
    "held out decided by a fresh draw": ("held/x", "keyed", True),
    "parts cut by position": ("parts/x", "positional", False),
    "parts cut record by record": ("parts/x", "keyed", True),
}


@pytest.mark.parametrize("part", CUTS)
def test_parts_are_said_to_be_cut_as_they_were(part: str) -> None:
    accountant = Accountant(adjacency=ZERO_OUT)
    accountant.authorize(Parallel({"a": (Pure(0.1),)}, *CUTS[part]))
    lines = accountant.report(DELTA_SPENT).assumptions
    assert [other for other in CUTS if any(other in line for line in lines)] == [part]
    assert any("public data set size" in line for line in lines) == (
        CUTS[part][1] == "positional"
    )


@pytest.mark.parametrize("repeatable", [False, True])
def test_no_card_promises_unlimited_computing_power(repeatable: bool) -> None:
    for names in LEDGERS:
        report = report_of(*names)
        run = Run("SomeSGD", Full(100), Gaussian(5.0, SENS), 1, 1, True, repeatable=repeatable)
        text = " ".join(str(make_statement(report, run)).split())
        assert "unlimited" not in text
        if math.isfinite(report.epsilon):
            source = "generator" if repeatable else "cipher"
            assert (
                f"any computing power that does not break the {source} from which noise and any batches"
                in text
            )


def test_one_card_says_of_each_release_once_how_its_noise_is_drawn() -> None:
    """No sentence about exact noise beside one that takes it back."""
    for names in LEDGERS:
        for event in (RELEASE.event, Pure(0.1), EVENTS["zcdp"]):
            run = OneRelease("SomeRelease", Full(100), event, 1, 1, True)
            lines = said(make_statement(report_of(*names), run), "What must hold")
            gaussian = [line for line in lines if "Gaussian noise" in line]
            assert len(gaussian) <= 1, names
            untold = [line for line in lines if line.startswith("Ideal noise in this run")]
            assert len(untold) == (event != RELEASE.event), names
