from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.designs import Shuffled
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    Gaussian,
    NonPrivate,
    Parallel,
    PoissonGaussian,
    WORGaussian,
    clipped_gaussian,
)
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.accounting.report import rounded_up
from torch_dpsco.errors import AdjacencyError
from torch_dpsco.sampling import make_sampler

STEP = PoissonGaussian(1.0, 0.01)
DELTA = 1e-5


def charged(*events, **settings) -> Accountant:
    accountant = Accountant(**settings)
    for event in events:
        accountant.authorize(event, 3)
    return accountant


@pytest.mark.parametrize(
    ("adjacency", "meaning"),
    [
        (ADD_REMOVE, "the data set has one {} more or less"),
        (ZERO_OUT, "one {} is replaced by a null record"),
        (REPLACE_ONE, "one {} is replaced by any other"),
    ],
)
@pytest.mark.parametrize("unit", ["example", "user"])
def test_the_first_line_names_guarantee_adjacency_and_unit(adjacency, meaning, unit):
    report = charged(STEP, adjacency=adjacency, unit=unit).report(DELTA)
    first, *others = str(report).splitlines()
    assert first.startswith(f"({rounded_up(report.epsilon)}, 1e-05)-differential privacy, {adjacency}: ")
    assert meaning.format(unit) in first
    assert "(rdp, order " in first
    assert report.unit == unit
    for other in ADJACENCIES:
        line = f"  {other}: epsilon {rounded_up(report.epsilons[other])}"
        assert (line in others) == (other != adjacency)


def test_figures_are_those_of_the_ledger():
    accountant = charged(STEP, clipped_gaussian(5.0))
    report = accountant.report(DELTA)
    assert report.epsilons == {a: accountant.get_epsilon(DELTA, adjacency=a) for a in ADJACENCIES}
    assert report.epsilon == report.epsilons[REPLACE_ONE]
    assert report.events == tuple(accountant.ledger.describe())
    assert all(f"  event: {line}" in str(report) for line in report.events)


@pytest.mark.parametrize(
    ("event", "missing"),
    [
        (WORGaussian(1.0, 1, 10), [ADD_REMOVE]),
        (Parallel({"0": [clipped_gaussian(1.0)]}, "p"), [ADD_REMOVE]),
        (Gaussian(1.0, {REPLACE_ONE: 1.0}), [ADD_REMOVE, ZERO_OUT]),
        (STEP, []),
    ],
)
def test_an_adjacency_that_one_event_does_not_support_is_left_out(event, missing):
    report = charged(STEP, event).report(DELTA)
    assert sorted(report.epsilons) == sorted(set(ADJACENCIES) - set(missing))
    for adjacency in missing:
        assert f"  {adjacency}: epsilon" not in str(report)


def test_a_report_in_an_unsupported_adjacency_is_refused():
    with pytest.raises(AdjacencyError):
        charged(WORGaussian(1.0, 1, 10), adjacency=ADD_REMOVE).report(DELTA)


def test_assumptions_name_unit_planning_noise_and_each_kind_of_sampling():
    plain = charged(clipped_gaussian(5.0), unit="user").report(DELTA).assumptions
    assert plain[0] == "one record per user"
    assert "noise, rates and number of steps fixed before the run" in plain
    assert any("floating-point" in line for line in plain)
    assert not any("loader" in line for line in plain)
    for events, words in (
        ([STEP], ["Poisson loader"]),
        ([WORGaussian(1.0, 1, 10)], ["fixed-size loader", "public data set size"]),
        ([STEP, WORGaussian(1.0, 1, 10)], ["Poisson loader", "fixed-size loader"]),
        ([Parallel({"0": [STEP]}, "p")], ["Poisson loader", "parts cut by", "public data set size"]),
    ):
        report = charged(*events).report(DELTA)
        text = "\n".join(line for line in str(report).splitlines() if "assumes:" in line)
        assert all(word in text for word in [*words, "kept secret", "one record per example"])


def test_the_method_is_named_with_its_order_if_it_has_one():
    assert charged(clipped_gaussian(5.0)).report(DELTA).method == "gdp"
    assert re.fullmatch(r"rdp, order [\d.e+]+", charged(STEP).report(DELTA).method)
    assert charged(Gaussian(1.0, {REPLACE_ONE: 1.0}, 0.1)).report(DELTA).method == "failure"


def test_the_budget_is_shown_and_gives_the_default_delta():
    accountant = charged(STEP, budget=Budget(8.0, 1e-6))
    assert "  budget: epsilon 8 at delta 1e-06" in str(accountant.report()).splitlines()
    assert accountant.report().delta == 1e-6
    assert accountant.report(DELTA).delta == DELTA
    with pytest.raises(ValueError, match=r"delta must be given when there is no budget \(got None\)"):
        charged(STEP).report()


def test_no_release_and_no_noise_are_reported_as_zero_and_infinity():
    assert set(charged().report(DELTA).epsilons.values()) == {0.0}
    report = charged(NonPrivate()).report(DELTA)
    assert set(report.epsilons.values()) == {math.inf}
    assert str(report).startswith("(inf, 1e-05)-differential privacy")


def test_epochs_over_parts_are_reported_as_one_line_each():
    design = Shuffled(5, 20)
    accountant = Accountant()
    for draw, _ in make_sampler(design, steps=6).draws():
        accountant.authorize(design.draw_event(clipped_gaussian(5.0), draw))
    lines = [line for line in str(accountant.report(DELTA)).splitlines() if "event: " in line]
    assert [line.split(": ")[-1] for line in lines] == ["4 disjoint parts used", "2 disjoint parts used"]


@given(st.floats(0, 1e300), st.integers(1, 15))
def test_no_printed_epsilon_is_rounded_down(value, digits):
    text = rounded_up(value, digits)
    assert float(text) >= value
    assert float(text) <= value * (1 + 1.01 * 10.0 ** (1 - digits))
    assert rounded_up(float(text), digits) == text  # what was printed is printed again as it is


def test_rounding_up_keeps_figures_that_need_no_more_digits():
    assert [rounded_up(v) for v in (0.0, 1.0, 1e-5, 0.99991, 123456.0, math.inf)] == [
        *("0", "1", "1e-05", "1", "1.235e+05", "inf")
    ]


def test_every_epsilon_of_a_printed_report_is_at_least_the_exact_one():
    for noise in (0.7, 0.9, 1.1, 1.7, 2.3, 5.1):
        report = charged(PoissonGaussian(noise, 0.01)).report(DELTA)
        shown = {REPLACE_ONE: float(re.match(r"\((\S+),", str(report)).group(1))}
        shown |= {a: float(e) for a, e in re.findall(r"  (\w+): epsilon (\S+)", str(report))}
        assert shown.keys() == report.epsilons.keys()
        for adjacency, exact in report.epsilons.items():
            assert exact <= shown[adjacency] <= exact * 1.002
