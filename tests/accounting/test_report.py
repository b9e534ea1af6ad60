from __future__ import annotations

import math
import re
from dataclasses import dataclass

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_epsilon
from torch_dpsco.accounting.analysis.risk import Risk
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import (
    Design,
    Disjoint,
    Draw,
    Fixed,
    Full,
    Poisson,
    Shuffled,
    Undeclared,
)
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    CLIP_UNITS,
    REPLACE_ONE,
    ZERO_OUT,
    Gaussian,
    NonPrivate,
    Parallel,
    PoissonGaussian,
    Repeat,
    Sequential,
    WORGaussian,
    clipped_gaussian,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.accounting.report import (
    Charge,
    Run,
    group_guarantee,
    rounded_up,
)
from torch_dpsco.errors import AdjacencyError
from torch_dpsco.sampling import make_sampler

STEP = PoissonGaussian(1.0, 0.01)
DELTA = 1e-5


def charged(*events, **settings) -> Accountant:
    accountant = Accountant(**settings)
    for event in events:
        accountant.authorize(event, 3)
    return accountant


@pytest.mark.cases(5, 1)
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
    assert first.startswith(
        f"({rounded_up(report.epsilon)}, 1e-05)-differential privacy, {adjacency}: "
    )
    assert meaning.format(unit) in first
    assert f"({report.method})" in first
    assert report.unit == unit
    for other in ADJACENCIES:
        line = f"  {other}: epsilon {rounded_up(report.epsilons[other])}"
        assert (line in others) == (other != adjacency)


def test_figures_are_those_of_the_ledger():
    accountant = charged(STEP, clipped_gaussian(5.0))
    report = accountant.report(DELTA)
    assert report.epsilons == {
        a: accountant.get_epsilon(DELTA, adjacency=a) for a in ADJACENCIES
    }
    assert report.epsilon == report.epsilons[ZERO_OUT]
    assert report.events == (f"3 x {STEP}", f"3 x {clipped_gaussian(5.0)}")
    assert all(f"  event: {line}" in str(report) for line in report.events)


@pytest.mark.cases(0, 1)
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
    report = charged(STEP, event, adjacency=REPLACE_ONE).report(DELTA)
    assert sorted(report.epsilons) == sorted(set(ADJACENCIES) - set(missing))
    for adjacency in missing:
        assert f"  {adjacency}: epsilon" not in str(report)


def test_a_report_in_an_unsupported_adjacency_is_refused():
    with pytest.raises(AdjacencyError):
        charged(WORGaussian(1.0, 1, 10), adjacency=ADD_REMOVE).report(DELTA)


def test_assumptions_name_unit_planning_noise_and_each_kind_of_sampling():
    plain = charged(clipped_gaussian(5.0), unit="user").report(DELTA).assumptions
    assert plain[0] == "all rows of a user carry its id, and no other does"
    assert "noise, rates and number of steps fixed before the run" in plain
    assert any("floating-point" in line for line in plain)
    assert not any("loader" in line for line in plain)
    for events, words in (
        ([STEP], ["Poisson loader"]),
        ([WORGaussian(1.0, 1, 10)], ["fixed-size loader", "public data set size"]),
        ([STEP, WORGaussian(1.0, 1, 10)], ["Poisson loader", "fixed-size loader"]),
        (
            [Parallel({"0": [STEP]}, "p")],
            ["Poisson loader", "parts cut by", "public data set size"],
        ),
    ):
        report = charged(*events).report(DELTA)
        text = "\n".join(line for line in str(report).splitlines() if "assumes:" in line)
        assert all(word in text for word in [*words, "kept secret", "one record per example"])


@pytest.mark.slow
def test_the_method_is_named_with_its_order_if_it_has_one():
    assert charged(clipped_gaussian(5.0)).report(DELTA).method == "gdp"
    assert charged(STEP).report(DELTA).method == "pld"
    many = charged(*(PoissonGaussian(1.0 + k / 100, 0.01) for k in range(65)))
    assert re.fullmatch(r"rdp, order [\d.e+]+", many.report(DELTA).method)
    assert charged(Gaussian(1.0, {ZERO_OUT: 1.0}, 0.1)).report(DELTA).method == "failure"


def test_the_budget_is_shown_and_gives_the_default_delta():
    accountant = charged(STEP, budget=Budget(8.0, 1e-6, "replace_one"))
    assert "  budget: epsilon 8 at delta 1e-06" in str(accountant.report()).splitlines()
    assert accountant.report().delta == 1e-6
    assert accountant.report(DELTA).delta == DELTA
    with pytest.raises(
        ValueError, match=r"delta must be given when there is no budget \(got None\)"
    ):
        charged(STEP).report()


def test_no_release_and_no_noise_are_reported_as_zero_and_infinity():
    assert set(charged().report(DELTA).epsilons.values()) == {0.0}
    report = charged(NonPrivate()).report(DELTA)
    assert set(report.epsilons.values()) == {math.inf}
    assert str(report).startswith("(inf, 1e-05)-differential privacy")


def passes(steps: int, step: Gaussian, accountant: Accountant | None = None) -> Accountant:
    design, accountant = Shuffled(5, 20), accountant or Accountant()
    for draw, _ in make_sampler(design, steps=steps).draws():
        accountant.authorize(design.draw_event(step, draw))
    return accountant


def test_passes_over_parts_are_gathered_and_show_their_noise():
    step = clipped_gaussian(5.0)
    shown = step.only(ZERO_OUT, REPLACE_ONE)
    report = passes(14, step).report(DELTA)
    assert report.events == (
        f"3 passes over 4 disjoint parts, on each at most 1 x {shown}",
        f"1 pass over 2 disjoint parts, on each at most 1 x {shown}",
    )
    assert [line for line in str(report).splitlines() if "event: " in line] == [
        f"  event: {e}" for e in report.events
    ]
    assert report.charges == (Charge(shown, 1, 3, 4), Charge(shown, 1, 1, 2))


def test_parts_of_unequal_cost_are_shown_by_the_costliest():
    a, b = Gaussian(1.0, {REPLACE_ONE: 1.0}), Gaussian(2.0, {REPLACE_ONE: 1.0})
    accountant = Accountant(adjacency=REPLACE_ONE)
    accountant.authorize(Parallel({"0": [a, a, b], "1": [a]}, "p"))
    accountant.authorize(b, 7)
    assert accountant.report(DELTA).charges == (
        Charge(b, 7),
        Charge(a, 2, 1, 2),
        Charge(b, 1, 1, 1),
    )


@pytest.mark.slow
def test_the_charges_of_a_report_cost_what_the_ledger_costs():
    accountant = passes(14, clipped_gaussian(5.0), charged(STEP))
    again = Ledger(
        Repeat(charge.event, charge.count * max(1, charge.passes))
        for charge in accountant.report(1e-5).charges
    )
    assert again.epsilon(DELTA, REPLACE_ONE) == pytest.approx(
        accountant.get_epsilon(DELTA, adjacency=REPLACE_ONE), rel=1e-12
    )


# -- what an attacker can make of it ----------------------------------------------------------------------------------

# far from where floats underflow
EPSILONS = st.just(0.0) | st.floats(1e-250, 60.0)
DELTAS = st.just(0.0) | st.floats(1e-250, 1.0)


@given(EPSILONS, DELTAS)
def test_the_attack_bound_is_the_formula_and_is_attained(epsilon, delta):
    with mpmath.workdps(40):
        power, slack = mpmath.exp(epsilon), mpmath.mpf(delta)
        exact = (mpmath.expm1(epsilon) + 2 * slack) / (power + 1)
        # tells the truth with probability delta, else randomized response: right with odds e^epsilon
        right, wrong = slack + (1 - slack) * power / (power + 1), (1 - slack) / (power + 1)
        assert abs(right - wrong - exact) < mpmath.mpf(10) ** -35
        assert (
            abs(right - power * wrong - slack) < power * mpmath.mpf(10) ** -35
        )  # it is just (epsilon, delta)-DP
        bound = Risk.of_point(epsilon, delta).advantage
        assert exact <= bound <= exact * (1 + mpmath.mpf(10) ** -11) + 3e-15


@pytest.mark.slow
@given(st.floats(1e-4, 60.0), st.floats(1e-14, 0.5))
def test_no_attack_on_gaussian_noise_beats_the_stated_bound(mu, delta):
    """The best test between N(0, 1) and N(mu, 1) has advantage Phi(mu/2) - Phi(-mu/2) = erf(mu / sqrt(8))."""
    with mpmath.workdps(40):
        truth = mpmath.erf(mpmath.mpf(mu) / mpmath.sqrt(8))
        assert Risk.of_point(gaussian_epsilon(mu, delta), delta).advantage >= truth


@pytest.mark.slow
@given(st.floats(0.05, 1e5), st.sampled_from(ADJACENCIES))
def test_the_reported_advantage_is_exact_for_unsampled_gaussians(noise, adjacency):
    accountant = charged(clipped_gaussian(noise), adjacency=adjacency)
    with mpmath.workdps(40):
        mu = CLIP_UNITS[adjacency] * mpmath.sqrt(3) / mpmath.mpf(noise)
        truth = mpmath.erf(mu / mpmath.sqrt(8))
        assert (
            truth
            <= accountant.report(DELTA).advantage
            <= min(1, truth * (1 + mpmath.mpf(10) ** -11) + 2e-15)
        )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("q", [0.01, 0.3, 1.0])
def test_the_reported_advantage_of_a_sampled_step_is_above_the_true_one(noise, q):
    """The best test between N(0, z^2) and its mixture with N(1, z^2) at rate q has advantage q erf(1 / (z sqrt(8)))."""
    accountant = Accountant(adjacency=ADD_REMOVE)
    accountant.authorize(PoissonGaussian(noise, q))
    report = accountant.report(DELTA)
    with mpmath.workdps(40):
        truth = mpmath.mpf(q) * mpmath.erf(1 / (mpmath.mpf(noise) * mpmath.sqrt(8)))
        assert truth <= report.advantage
    assert report.advantage <= Risk.of_point(report.epsilon, DELTA).advantage


def test_without_noise_the_advantage_is_one_and_without_release_zero():
    assert (
        charged(NonPrivate()).report(DELTA).advantage
        == Risk.of_point(math.inf, 0.0).advantage
        == 1.0
    )
    assert charged().report(DELTA).advantage == Risk.of_point(0.0, 0.0).advantage == 0.0


@given(st.floats(0.0, 700.0), DELTAS, st.integers(1, 20))
def test_the_guarantee_of_a_group_is_the_formula_rounded_up(epsilon, delta, size):
    group_epsilon, group_delta = group_guarantee(epsilon, delta, size)
    with mpmath.workdps(60):
        assert (
            size * mpmath.mpf(epsilon)
            <= group_epsilon
            <= size * mpmath.mpf(epsilon) * (1 + mpmath.mpf(10) ** -13)
        )
        exact = min(1, size * mpmath.exp((size - 1) * mpmath.mpf(epsilon)) * mpmath.mpf(delta))
        assert exact <= group_delta <= exact * (1 + mpmath.mpf(10) ** -9)


@pytest.mark.slow
@given(st.floats(0.01, 3.0), st.floats(1e-12, 0.1), st.integers(1, 8))
def test_a_group_hidden_by_gaussian_noise_has_at_least_the_guarantee_stated(mu, delta, size):
    epsilon, group_delta = group_guarantee(gaussian_epsilon(mu, delta), delta, size)
    assert gaussian_delta(size * mu, epsilon) <= group_delta


@pytest.mark.parametrize(
    "bad", [{"epsilon": -1.0}, {"delta": 1.5}, {"delta": -1e-9}, {"epsilon": math.nan}]
)
def test_figures_out_of_range_are_refused(bad):
    figures = {"epsilon": 1.0, "delta": 1e-5} | bad
    with pytest.raises(ValueError, match=f"^{next(iter(bad))} must be"):
        Risk.of_point(**figures)
    with pytest.raises(ValueError, match=f"^{next(iter(bad))} must be"):
        group_guarantee(**figures, size=2)


def test_a_group_of_nobody_is_refused_and_an_infinite_epsilon_gives_no_guarantee():
    with pytest.raises(ValueError, match="size must be an integer >= 1"):
        group_guarantee(1.0, 1e-5, 0)
    assert group_guarantee(math.inf, 1e-5, 2) == (math.inf, 1.0)
    assert group_guarantee(math.inf, 0.0, 2) == (math.inf, 0.0)


# -- what is still planned --------------------------------------------------------------------------------------------

DESIGNS = [
    Poisson(5, 20),
    Fixed(5, 20),
    Shuffled(5, 20),
    Disjoint(5, 20),
    Full(20),
    Undeclared(5),
]


def run_of(design, steps, planned, event=None) -> Run:
    return Run("X", design, event or clipped_gaussian(5.0), steps, planned, False)


@pytest.mark.cases(5, 2)
@pytest.mark.parametrize("design", DESIGNS, ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("made", [0, 1, 3, 4])
def test_the_planned_epsilon_is_what_the_ledger_holds_in_the_end(design, made):
    planned = 4 if isinstance(design, Disjoint) else 9
    accountant, step = Accountant(adjacency=REPLACE_ONE), clipped_gaussian(5.0)
    if isinstance(design, Undeclared):
        draws = [Draw(5)] * planned
    elif isinstance(design, Shuffled):  # iterations are whole passes
        sampler = make_sampler(design, steps=4)
        draws = [draw for _ in range(3) for draw, _ in sampler.draws()][:planned]
    else:
        draws = [draw for draw, _ in make_sampler(design, steps=planned).draws()]
    for draw in draws[:made]:
        accountant.authorize(design.draw_event(step, draw))
    expected = accountant.report(
        DELTA, ahead=run_of(design, made, planned).ahead()
    ).planned_epsilon
    for draw in draws[made:]:
        accountant.authorize(design.draw_event(step, draw))
    assert expected == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-12)


def test_asking_what_is_planned_charges_nothing():
    accountant = charged(STEP)
    report = accountant.report(DELTA, ahead=Repeat(STEP, 100))
    assert len(accountant) == 3
    assert report.planned_epsilon > report.epsilon == accountant.get_epsilon(DELTA)
    assert accountant.report(DELTA).planned_epsilon is None


def test_without_a_plan_nothing_is_ahead():
    assert run_of(Poisson(5, 20), 3, None).ahead() is None
    assert run_of(Poisson(5, 20), 3, None).unfinished == 0
    assert run_of(Poisson(5, 20), 3, 5).unfinished == 2


def test_a_pass_that_is_planned_twice_counts_once():
    """`Disjoint` draws one pass only; steps planned past it can never be made."""
    assert run_of(Disjoint(5, 20), 2, 100).ahead().n == 0
    assert run_of(Disjoint(5, 20), 0, 100).ahead().n == 1


@dataclass(frozen=True)
class Doubling(Design):
    """A design of somebody else, whose event does not repeat one event."""

    batch_size: int = 5
    n: int = 20

    def event(self, base, draws=1):
        return Sequential((Repeat(base, draws), Repeat(base, draws)))

    def draw_event(self, base, draw):
        return self.event(base, 1)


def test_the_rest_of_a_plan_of_a_foreign_design_is_asked_from_it():
    step = clipped_gaussian(5.0)
    assert run_of(Doubling(), 3, 5).ahead() == Doubling().event(step, 2)


# -- rounding ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.slow
def test_every_epsilon_of_a_printed_report_is_at_least_the_exact_one():
    for noise in (0.7, 0.9, 1.1, 1.7, 2.3, 5.1):
        report = charged(PoissonGaussian(noise, 0.01)).report(DELTA)
        shown = {ZERO_OUT: float(re.match(r"\((\S+),", str(report)).group(1))}
        shown |= {a: float(e) for a, e in re.findall(r"  (\w+): epsilon (\S+)", str(report))}
        assert shown.keys() == report.epsilons.keys()
        for adjacency, exact in report.epsilons.items():
            assert exact <= shown[adjacency] <= exact * 1.002
