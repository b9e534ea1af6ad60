from __future__ import annotations

import json
import math
import re
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.papers.accounting import RDPFilter
from tests.reference.papers.mixtures import rdp_epsilon_at_order, rdp_poisson_gaussian
from tests.reference.papers.orders import rdp_poisson_gaussian_replace_one
from torch_dpsco.accounting import budgets as odometer
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu, gaussian_sigma
from torch_dpsco.accounting.analysis.rdp import rdp_epsilon
from torch_dpsco.accounting.budgets import (
    Budget,
    adaptive_epsilon,
    make_filter,
    within,
)
from torch_dpsco.accounting.events import (
    Failure,
    Gaussian,
    NonPrivate,
    Parallel,
    PoissonGaussian,
    Pure,
    Repeat,
    Sequential,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import AdjacencyError, InfeasibleError

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "holder.json").read_text())
STEPS = [
    (v["inputs"]["budget"], v["inputs"]["step_rdp"], v["expected"])
    for v in VECTORS
    if "filter" in v["function"]
]
costs = st.floats(0, 10)


def executed(run: RDPFilter, spends: list[float]) -> int:
    """Number of events before the first refusal."""
    for number, value in enumerate(spends):
        if not run.admits(value):
            return number
        run.charge(value)
    return len(spends)


# -- budget -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0}, r"epsilon must be > 0 \(got 0\.0\)"),
        ({"epsilon": math.inf}, r"epsilon must be finite \(got inf\)"),
        ({"epsilon": math.nan}, r"epsilon must be > 0 \(got nan\)"),
        ({"delta": -1e-9}, r"delta must be >= 0 \(got -1e-09\)"),
        ({"delta": math.nan}, r"delta must be >= 0 \(got nan\)"),
        ({"delta": 1}, r"delta must be in \[0, 1\) \(got 1\.0\)"),
        (
            {"adjacency": "swap"},
            r"adjacency must be one of add_remove, zero_out, replace_one \(got 'swap'\)",
        ),
        ({"unit": "row"}, r"unit must be one of example, user \(got 'row'\)"),
        (
            {"mode": "some"},
            r"mode must be one of planned, gdp, rdp \(got 'some'\)",
        ),
    ],
)
def test_a_bad_target_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        Budget(**({"epsilon": 1.0, "delta": 1e-5} | change))


@pytest.mark.parametrize("scalar", [np.float64, torch.tensor])
def test_a_budget_is_a_value_of_plain_numbers(scalar):
    budget = Budget(scalar(2.0), scalar(0.125))
    assert (type(budget.epsilon), type(budget.delta)) == (float, float)
    assert budget == Budget(2, 0.125)
    assert len({budget, Budget(2, 0.125), Budget(2, 0.125, adjacency="add_remove")}) == 2
    assert (budget.adjacency, budget.unit, budget.mode) == ("zero_out", "example", "planned")


# -- filter -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "spends", "expected"), STEPS)
def test_the_filter_executes_as_many_events_as_the_vectors_say(budget, spends, expected):
    assert executed(RDPFilter(2.0, budget), spends) == expected


def test_there_are_vectors():
    assert len(STEPS) >= 10


@given(costs, st.lists(costs, max_size=200))
def test_what_was_executed_never_passes_the_budget(budget, spends):
    run = RDPFilter(8.0, budget)
    admitted = []
    for value in spends:
        if run.admits(value):
            run.charge(value)
            admitted.append(value)
        else:
            assert math.fsum([*admitted, value]) > budget
    assert math.fsum(admitted) <= budget * (1 + 1e-11)


def test_a_refused_event_costs_nothing_and_a_cheaper_one_still_fits():
    run = RDPFilter(8.0, 0.5)
    run.charge(0.3)
    with pytest.raises(
        ValueError, match=r"value must fit the budget: spent 0\.3, asked 0\.3, budget 0\.5"
    ):
        run.charge(0.3)
    assert run.spent == 0.3
    run.charge(0.2)
    assert not run.admits(1e-9)
    assert run.admits(0.0)


@pytest.mark.parametrize("value", [math.inf, math.nan, -0.1, -math.inf])
def test_a_cost_that_is_no_cost_is_refused(value):
    run = RDPFilter(8.0, 1e300)
    assert not run.admits(value)
    with pytest.raises(ValueError, match="value must fit the budget"):
        run.charge(value)
    assert run.spent == 0.0


def test_rounding_of_a_hundred_thousand_small_costs_stays_within_the_slack():
    run = RDPFilter(2.0, 1.0)
    assert executed(run, [1e-5] * 100_001) == 100_000


@pytest.mark.slow
@given(st.floats(1.01, 1e6), st.floats(1e-3, 50), st.floats(1e-15, 0.99))
def test_an_exhausted_filter_converts_to_its_target(order, epsilon, delta):
    overhead = rdp_epsilon_at_order(0.0, order, delta)
    if overhead >= epsilon:
        with pytest.raises(ValueError, match="order must leave a budget"):
            RDPFilter.for_budget(order, epsilon, delta)
        return
    run = RDPFilter.for_budget(order, epsilon, delta)
    assert run.budget == epsilon - max(overhead, 0.0)
    assert rdp_epsilon_at_order(run.budget, order, delta) <= epsilon * (1 + 1e-12)
    if order > 1.011:
        assert rdp_epsilon([order], [run.budget], delta).epsilon <= epsilon * (1 + 1e-12)


def test_the_best_order_leaves_the_largest_budget_to_a_gaussian_run():
    """rho = 0.1 at delta = 1e-5: the best order admits the run at epsilon 1.914, others do not."""
    rho, epsilon, delta = 0.1, 1.915, 1e-5
    admitted = [o / 10 for o in range(15, 300) if _admits_gaussian(o / 10, rho, epsilon, delta)]
    assert admitted
    assert 9 < min(admitted) < max(admitted) < 13


def _admits_gaussian(order: float, rho: float, epsilon: float, delta: float) -> bool:
    try:
        return RDPFilter.for_budget(order, epsilon, delta).admits(rho * order)
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("order", "budget", "message"),
    [
        (1.0, 1.0, r"order must be finite and > 1 \(got 1\.0\)"),
        (math.inf, 1.0, r"order must be finite and > 1 \(got inf\)"),
        (2.0, -1.0, r"budget must be >= 0 \(got -1\.0\)"),
        (2.0, math.inf, r"budget must be finite \(got inf\)"),
        (2.0, math.nan, r"budget must be >= 0 \(got nan\)"),
    ],
)
def test_order_and_budget_are_checked(order, budget, message):
    with pytest.raises(ValueError, match=message):
        RDPFilter(order, budget)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, r"epsilon must be > 0"),
        ({"delta": 0.0}, r"delta must be in \(0, 1\)"),
        ({"order": 1.0}, r"order must be finite and > 1"),
        (
            {"order": 1.05},
            r"order must leave a budget: at order 1\.05 the conversion alone costs",
        ),
    ],
)
def test_the_target_of_a_filter_is_checked(change, message):
    with pytest.raises(ValueError, match=message):
        RDPFilter.for_budget(**({"order": 20.0, "epsilon": 1.0, "delta": 1e-5} | change))


# -- budgets of adaptive modes ----------------------------------------------------------------------------------------

TARGET = {"epsilon": 1.0, "delta": 1e-5, "adjacency": "replace_one"}
ADAPTIVE = [{"mode": "gdp"}, {"mode": "rdp"}]
ALL_MODES = [{"mode": "planned"}, *ADAPTIVE]


def gaussian(sigma: float, **more: float) -> Gaussian:
    return Gaussian(sigma, {"replace_one": 1.0, "zero_out": 0.5}, **more)


@pytest.mark.parametrize(
    ("change", "message"),
    [],
)
def test_a_bad_mode_of_a_budget_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        Budget(**(TARGET | change))


def test_budgets_of_every_mode_are_values_that_show_what_was_given():
    budget = Budget(**TARGET, mode="rdp")
    assert repr(budget).endswith("mode='rdp')")
    others = [Budget(**TARGET, mode="gdp"), Budget(**TARGET)]
    assert len({budget, *others}) == 3
    assert budget.adaptive
    assert not Budget(**TARGET).adaptive


# -- what a mode decides ----------------------------------------------------------------------------------------------


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("sigma", [19.9, 40.0, 700.0])
def test_the_number_of_steps_left_is_exact_and_nothing_is_charged(mode, sigma):
    run, ledger, event = (
        make_filter(Budget(**TARGET, **mode)),
        Ledger([Repeat(gaussian(20.0), 3)]),
        gaussian(sigma),
    )
    before = ledger.digest()
    left = run.max_steps(ledger, event)
    assert left > 5
    assert run.admits(ledger, event, left)
    assert not run.admits(ledger, event, left + 1)
    assert f"room for {left} more of this event" in run.refusal(ledger, event, left + 1)
    assert run.max_steps(ledger, gaussian(0.1)) == 0
    assert run.max_steps(ledger, Gaussian(1.0, {"replace_one": 0.0})) == 2**40
    assert run.max_steps(ledger, Repeat(event, 2)) == left // 2
    assert (ledger.digest(), len(ledger)) == (before, 3)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_refused_event_leaves_room_for_a_smaller_one(mode):
    run, ledger = make_filter(Budget(**TARGET, **mode)), Ledger([Repeat(gaussian(20.0), 14)])
    before = ledger.digest()
    assert not run.admits(ledger, gaussian(4.0))
    assert not run.admits(ledger, NonPrivate())
    assert ledger.digest() == before
    assert run.admits(ledger, gaussian(30.0))
    assert run.admits(ledger)
    ledger.add(gaussian(4.0))  # recorded all the same
    assert not run.admits(ledger)
    assert not run.admits(ledger, gaussian(1e6))
    assert run.spent(ledger) > run.limit


@pytest.mark.cases(4, 1)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_resumed_run_decides_from_the_ledger_alone(mode):
    ledger = Ledger([Repeat(gaussian(20.0 + k), 2) for k in range(5)])
    again = Ledger.from_json(ledger.to_json())
    run = make_filter(Budget(**TARGET, **mode))
    assert run.spent(again) == run.spent(ledger)
    assert run.max_steps(again, gaussian(33.0)) == run.max_steps(ledger, gaussian(33.0))


def test_what_was_used_is_told_in_the_resource_of_the_mode():
    ledger = Ledger([Repeat(gaussian(20.0), 4)])
    gdp, renyi, planned = (
        make_filter(Budget(**TARGET, mode=mode)) for mode in ("gdp", "rdp", "planned")
    )
    assert gdp.spent(ledger) == pytest.approx(0.01, rel=1e-12)
    assert gdp.limit == pytest.approx(gaussian_mu(1.0, 1e-5) ** 2, rel=1e-12)
    assert "would bring the sum of mu^2 to" in gdp.refusal(ledger, gaussian(1.0))
    assert planned.spent(ledger) == ledger.epsilon(1e-5, "replace_one")
    least = renyi.spent(ledger)
    orders = np.array(odometer.ODOMETER_ORDERS)
    orders[0] = 1.3  # of the grid
    assert odometer.mixture_filter_admits(least, 1e-5, orders, 0.005 * orders)
    assert not odometer.mixture_filter_admits(least * 0.99999, 1e-5, orders, 0.005 * orders)


@pytest.mark.parametrize(
    ("spent", "fits"),
    [(0.0, True), (0.3, True), (0.3 * (1 + 1e-12), False), (math.inf, False), (math.nan, False)],
)
def test_a_resource_fits_up_to_its_limit_and_not_beyond(spent, fits):
    assert within(spent, 0.3) is fits
    assert within(0.0, 0.0)
    assert not within(1e-300, 0.0)


@pytest.mark.cases(1, 1)
def test_a_long_sum_of_different_costs_is_not_rounded_down():
    sigmas = [1e3 + k / 7 for k in range(3000)]
    ledger = Ledger([gaussian(sigma) for sigma in sigmas])
    exact = mp.fsum(1 / mp.mpf(sigma) ** 2 for sigma in sigmas)
    spent = make_filter(Budget(**TARGET, mode="gdp")).spent(ledger)
    assert exact <= spent <= exact * (1 + 1e-11)
    # as much as 2999 additions can lose
    assert spent >= ledger.cost("replace_one").mu_squared * (1 + 2999 * 2.0**-53)
    orders, costs = odometer._renyi_costs(ledger, "replace_one")
    for order, cost in zip(orders, costs, strict=True):
        assert order / 2 * exact <= cost <= order / 2 * exact * (1 + 1e-11)


def test_a_mode_says_what_it_takes():
    sampled = PoissonGaussian(1.0, 0.01)
    run = make_filter(Budget(**TARGET, mode="gdp"))
    for event in (sampled, Pure(0.01), Sequential((gaussian(50.0), sampled))):
        assert not run.admits(Ledger([gaussian(20.0)]), event)
        said = run.refusal(Ledger([gaussian(20.0)]), event)
        assert "mode 'gdp' takes unsampled Gaussian noise that cannot fail only" in said
    assert run.max_steps(Ledger([gaussian(20.0), sampled]), gaussian(50.0)) == 0
    assert not run.admits(Ledger([sampled]))
    assert run.admits(Ledger(), PoissonGaussian(40.0, 1.0))  # not sampled at all
    renyi = make_filter(Budget(**TARGET, mode="rdp"))
    assert renyi.admits(Ledger(), PoissonGaussian(4.0, 0.01))
    assert renyi.admits(Ledger(), Pure(0.01))


@pytest.mark.parametrize("mode", ALL_MODES)
def test_an_event_without_a_guarantee_under_the_adjacency_is_named(mode):
    run = make_filter(Budget(**TARGET | {"adjacency": "add_remove"}, **mode))
    with pytest.raises(AdjacencyError, match=r"Gaussian\(sigma=20\.0.*add_remove"):
        run.admits(Ledger(), gaussian(20.0))


def test_the_adjacency_of_the_budget_counts():
    one, zero = (
        make_filter(Budget(1.0, 1e-5, a, mode="gdp")).max_steps(Ledger(), gaussian(20.0))
        for a in ("replace_one", "zero_out")
    )
    assert zero in range(4 * one, 4 * one + 4)


def test_a_target_that_no_order_can_meet_names_the_smallest_one():
    with pytest.raises(
        InfeasibleError, match=r"epsilon must be >= [\d.]+, the smallest .* \(got 0\.001\)"
    ):
        make_filter(Budget(**TARGET | {"epsilon": 1e-3}, mode="rdp"))


@pytest.mark.parametrize(
    "event", [Gaussian(3.0, {"add_remove": 1.0}), PoissonGaussian(0.8, 0.02)]
)
def test_an_order_beside_the_grid_is_the_next_larger_one(event):
    known = odometer._renyi_costs(Ledger([event]), "add_remove")
    for order, read, cost in zip(odometer.ODOMETER_ORDERS, *known, strict=True):
        assert order <= read <= max(order + 0.5, order * 1.03)
        exact = (
            order / 18
            if isinstance(event, Gaussian)
            else float(rdp_poisson_gaussian(0.02, 0.8, [order], "remove")[0])
        )
        assert exact * (1 - 1e-13) <= cost


# -- partitions and failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ADAPTIVE)
def test_disjoint_parts_cost_their_maximum_at_every_order(mode):
    run, event = make_filter(Budget(**TARGET, **mode)), gaussian(20.0)

    def on(part: str) -> Parallel:
        return Parallel({part: [event]}, "parts")

    left = run.max_steps(Ledger([event]), event)
    ledger = Ledger([event, Repeat(on("a"), left)])
    assert not run.admits(ledger, on("a"))
    assert not run.admits(ledger, event)
    assert run.max_steps(ledger, on("b")) == left
    ledger.add(on("b"), left)
    assert run.admits(ledger)
    assert not run.admits(ledger, on("b"))
    assert not run.admits(ledger, Parallel({"c": [event]}, "other parts"))


@pytest.mark.parametrize("mode", ADAPTIVE)
@pytest.mark.parametrize(
    "failing",
    [gaussian(1e5, failure=1e-9), Failure(1e-9, "transcript")],
)
def test_what_may_fail_fits_no_adaptive_budget(mode, failing):
    run = make_filter(Budget(**TARGET, **mode))
    assert run.admits(Ledger(), gaussian(1e5))
    assert run.max_steps(Ledger(), failing) == 0
    assert not run.admits(Ledger([failing]), gaussian(1e5))
    assert "that cannot fail" in run.refusal(Ledger(), failing)


# -- planned ----------------------------------------------------------------------------------------------------------


def test_the_planned_refusal_names_the_least_epsilon_that_would_admit():
    run, ledger, event = (
        make_filter(Budget(**TARGET)),
        Ledger([Repeat(gaussian(20.0), 3)]),
        gaussian(20.0),
    )
    text = run.refusal(ledger, event, 26)
    found = re.search(
        r"would bring epsilon to ([\d.]+), past the budget of 1 .*; spent ([\d.]+) in 3 events, "
        r"remaining ([\d.]+), room for 25",
        text,
    )
    assert found
    assert float(found[2]) >= ledger.epsilon(1e-5, "replace_one")
    assert float(found[3]) == pytest.approx(1.0 - ledger.epsilon(1e-5, "replace_one"), rel=1e-5)
    least = float(found[1])
    assert make_filter(Budget(least, 1e-5, "replace_one")).admits(ledger, event, 26)
    assert not make_filter(Budget(least * 0.9999, 1e-5, "replace_one")).admits(ledger, event, 26)


# -- the epsilon to quote ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ADAPTIVE)
def test_an_adaptive_run_quotes_its_target_and_else_the_odometer(mode):
    budget, ledger = Budget(**TARGET, **mode), Ledger([Repeat(gaussian(20.0), 5)])
    spent = [5 * order / 800 for order in odometer.ODOMETER_ORDERS]

    def quoted(delta, adjacency="replace_one", with_budget=budget):
        return adaptive_epsilon(ledger, delta, adjacency, with_budget)

    def metered(delta):
        return pytest.approx(
            odometer.odometer_epsilon(odometer.ODOMETER_ORDERS, spent, delta), rel=1e-3
        )

    assert quoted(1e-5) == quoted(1e-3) == 1.0
    assert quoted(1e-6) == metered(1e-6)
    assert (
        quoted(1e-5, with_budget=None)
        == quoted(1e-5, with_budget=Budget(**TARGET))
        == metered(1e-5)
    )
    assert quoted(1e-5, with_budget=None) > ledger.epsilon(1e-5, "replace_one")
    assert quoted(1e-5, "zero_out") < quoted(1e-5, with_budget=None)
    ledger.add(gaussian(1.0))
    assert quoted(1e-5) > 1.0  # recorded past the budget
    assert quoted(1e-5) > ledger.epsilon(1e-5, "replace_one")


def test_an_adaptive_run_of_nothing_spends_nothing_and_one_that_may_fail_everything():
    assert adaptive_epsilon(Ledger(), 1e-5, "replace_one") == 0.0
    assert adaptive_epsilon(Ledger([NonPrivate()]), 1e-5, "replace_one") == math.inf
    for failing in (gaussian(1.0, failure=1e-9), Failure(1e-9, "transcript")):
        assert adaptive_epsilon(Ledger([failing]), 1e-5, "replace_one") == math.inf


def test_exact_calibration_fills_a_gaussian_budget_to_the_last_step():
    for epsilon, delta, steps in (
        (0.1, 1e-3, 1),
        (1.0, 1e-5, 1),
        (2.0, 1e-6, 10),
        (50.0, 1e-8, 7),
    ):
        sigma = gaussian_sigma(epsilon, delta, sensitivity=math.sqrt(steps))
        run = make_filter(Budget(epsilon, delta, "replace_one", mode="gdp"))
        assert run.max_steps(Ledger(), Gaussian(sigma, {"replace_one": 1.0})) == steps


# -- a thousand adaptive schedules, judged by arithmetic of this file -------------------------------------------------

MIXED = tuple(odometer._renyi_costs(Ledger(), "replace_one")[0].tolist())
SAMPLED = PoissonGaussian(1.0, 0.02)
SAMPLED_COST = {
    a: float(c)
    for a, c in zip(MIXED, rdp_poisson_gaussian_replace_one(0.02, 1.0, MIXED), strict=True)
}


def hockey_stick(mu: mp.mpf, epsilon: float) -> mp.mpf:
    return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


def converted(cost: mp.mpf, order: float, delta: float) -> mp.mpf:
    return (
        cost
        + mp.log1p(-1 / mp.mpf(order))
        - (mp.log(delta) + mp.log(order)) / (mp.mpf(order) - 1)
    )


def excess(mode: str, mus: list[float], samples: int, epsilon: float, delta: float) -> float:
    """How far the run passes the target, in the mode's arithmetic: > 0 is too far."""
    square = mp.fsum(mp.mpf(mu) ** 2 for mu in mus)
    if mode == "gdp":
        return float(hockey_stick(mp.sqrt(square), epsilon) / delta - 1) if mus else -1.0
    costs = {a: square / 2 * mp.mpf(a) + samples * mp.mpf(SAMPLED_COST[a]) for a in SAMPLED_COST}
    powers = np.array([a - 1 for a in MIXED])
    heads = np.array([float((a - 1) * (epsilon - costs[a])) for a in MIXED]) - math.log(
        len(MIXED)
    )
    x = np.geomspace(1e-4, 20.0, 4000)[:, None]
    values = np.logaddexp.reduce(heads + powers * x, axis=1) - np.log(-np.expm1(-x[:, 0]))
    return -math.log(delta) - float(values.min())


ADAPTIVE = given(
    st.sampled_from(["gdp", "gdp", "rdp"]),  # the last is slow
    st.sampled_from([2.0, 3.3, 6.0]),
    st.sampled_from([1e-3, 1e-5, 1e-8]),
    st.lists(
        st.tuples(st.floats(0.05, 2.0), st.floats(-3.0, 3.0), st.integers(0, 5)),
        min_size=1,
        max_size=10,
    ),
)


def no_adaptive_schedule_passes_the_target(mode, epsilon, delta, rounds):
    """Whether it holds; each mu is chosen from the luck so far: more is asked for after lucky noise."""
    epsilon *= 2 if delta < 1e-6 else 1
    run, ledger = (
        make_filter(Budget(epsilon, delta, "replace_one", mode=mode)),
        Ledger(),
    )
    mus: list[float] = []
    samples, loss, refused = 0, 0.0, None
    for mu, noise, kind in rounds:
        mu *= math.exp(min(max(-loss, -1.0), 1.0))  # lucky: spend more
        sampled = kind == 0 and mode == "rdp"
        sigma = 1.0 / mu
        event = SAMPLED if sampled else gaussian(sigma)
        mu = 1.0 / sigma
        times = kind if kind > 1 else 1
        asked = [*mus, *([] if sampled else [mu] * times)], samples + sampled * times
        if not run.admits(ledger, event, times):
            refused = asked
            continue
        ledger.add(event, times)
        mus, samples = asked
        loss += times * mu * mu / 2 + math.sqrt(times) * mu * noise
    fits = run.admits(ledger) and excess(mode, mus, samples, epsilon, delta) <= 0
    return fits and (refused is None or excess(mode, *refused, epsilon, delta) > -1e-6)


@pytest.mark.slow
@settings(max_examples=100)
@ADAPTIVE
def test_no_adaptive_schedule_passes_the_target(mode, epsilon, delta, rounds):
    assert no_adaptive_schedule_passes_the_target(mode, epsilon, delta, rounds)


@pytest.mark.weekly
@settings(max_examples=1000)
@ADAPTIVE
def test_none_of_many_adaptive_schedules_passes_the_target(mode, epsilon, delta, rounds):
    assert no_adaptive_schedule_passes_the_target(mode, epsilon, delta, rounds)


@pytest.mark.slow
@given(st.floats(0.05, 60.0), st.floats(1e-12, 0.5))
def test_an_exhausted_mode_is_its_target_exactly(epsilon, delta):
    """The largest sum that each mode lets pass, tolerance for rounding included, is judged with 40 digits."""
    slack = 1.0 + 4.0 * 2.0**-52
    with mp.workdps(40):
        gdp = make_filter(Budget(epsilon, delta, "replace_one", mode="gdp")).limit
        assert hockey_stick(mp.sqrt(mp.mpf(gdp) * slack), epsilon) <= delta
        assert hockey_stick(mp.sqrt(mp.mpf(gdp) * (1 + 1e-9)), epsilon) > delta * (1 - 1e-9)
