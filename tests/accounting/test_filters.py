from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_dpsco.accounting.analysis.convert import rdp_epsilon, rdp_epsilon_at_order
from torch_dpsco.accounting.filters import Budget, RDPFilter

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "holder.json").read_text())
STEPS = [(v["inputs"]["budget"], v["inputs"]["step_rdp"], v["expected"]) for v in VECTORS if "filter" in v["function"]]
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
        ({"delta": 0}, r"delta must be in \(0, 1\) \(got 0\.0\)"),
        ({"delta": 1}, r"delta must be in \(0, 1\) \(got 1\.0\)"),
        ({"adjacency": "swap"}, r"adjacency must be one of add_remove, zero_out, replace_one \(got 'swap'\)"),
        ({"unit": "row"}, r"unit must be one of example, user \(got 'row'\)"),
        ({"mode": "gdp"}, r"mode must be one of planned \(got 'gdp'\)"),
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
    assert (budget.adjacency, budget.unit, budget.mode) == ("replace_one", "example", "planned")


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
    with pytest.raises(ValueError, match=r"value must fit the budget: spent 0\.3, asked 0\.3, budget 0\.5"):
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
        ({"order": 1.05}, r"order must leave a budget: at order 1\.05 the conversion alone costs"),
    ],
)
def test_the_target_of_a_filter_is_checked(change, message):
    with pytest.raises(ValueError, match=message):
        RDPFilter.for_budget(**({"order": 20.0, "epsilon": 1.0, "delta": 1e-5} | change))
