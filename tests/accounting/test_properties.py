"""Properties of ledgers and accountants that docs/proofs/accounting.md implies, by hypothesis.

`ELSEWHERE` names the tests of those that were tested already; the others are here. Curves and laws have tests of their
own in `analysis/`. Renyi figures are held to rounding. Those by privacy loss distributions lie above the exact ones by
what their grid costs, which aims at 0.1 % of epsilon by an estimate; their inequalities are held to `GRID`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.rdp import zcdp_epsilon
from torch_dpsco.accounting.curves import cost_of
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    Adjacency,
    Event,
    Laplace,
    Parallel,
    PoissonGaussian,
    Pure,
    Repeat,
    WORGaussian,
    clipped_gaussian,
)
from torch_dpsco.accounting.ledger import Ledger

ELSEWHERE = {
    "epsilon nonincreasing in delta": "test_ledger.py::test_epsilon_falls_with_delta_and_delta_inverts_it",
    "WOR(tight) <= WOR(wbk) <= closed form": "analysis/test_wor.py::test_the_tight_curve_is_below_the_published_ones",
    "compose(a,b) == compose(b,a)": "test_ledger.py::test_neither_order_nor_queries_nor_bundling_change_the_cost",
    "round trip": "test_accountant_state.py::test_the_state_survives_torch_save_with_weights_only_and_json",
    "round trip of a ledger": "test_ledger.py::test_the_json_round_trip_keeps_every_bit",
    "resumed == uninterrupted": "test_accountant_state.py::test_a_resumed_run_spends_what_an_uninterrupted_one_does",
    "filter, 1000 adaptive schedules": "test_filters.py::test_no_adaptive_schedule_passes_the_target",
    "filter, simulated": "../statistical/test_filters.py::test_no_adaptive_adversary_leaks_more_than_the_target",
    "budget": "test_accountant.py::test_no_sequence_of_requests_ever_passes_the_budget",
    "odometer": "analysis/test_odometer.py::test_the_odometer_is_above_the_conversion_fixed_in_advance",
    "audit": "../statistical/test_audit.py::test_no_attack_beats_the_reported_epsilon_and_one_with_less_noise_would",
}

GRID = 2e-3
SLACK = {"rdp": 1e-9, "pld": GRID, "best": GRID}
SENS = {ADD_REMOVE: 1.0, ZERO_OUT: 1.0, REPLACE_ONE: 2.0}


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


noises, rates, deltas = powers(-0.2, 0.8), powers(-4.0, -0.3), powers(-9.0, -2.0)
steps = powers(0.0, 2.5).map(int)
poisson = st.builds(PoissonGaussian, noises, rates)
fixed = st.builds(
    lambda noise, size: WORGaussian(2 * noise, size, 2000), noises, st.integers(1, 200)
)
plain = st.builds(clipped_gaussian, powers(0.3, 1.5))
laplace = st.builds(lambda scale: Laplace(scale, SENS), powers(0.0, 1.5))
pure = st.builds(Pure, powers(-2.0, 0.0))
methods = st.sampled_from(sorted(SLACK))
runs = st.lists(st.tuples(st.one_of(poisson, fixed, plain), steps), min_size=1, max_size=3)


def epsilon(
    events: list[tuple[Event, int]], delta: float, adjacency: Adjacency, method: str = "best"
) -> float:
    accountant = Accountant(adjacency=adjacency)
    for event, count in events:
        accountant.authorize(event, count)
    return accountant.get_epsilon(delta, method=method)


@pytest.mark.parametrize("place", ELSEWHERE.values(), ids=list(ELSEWHERE))
def test_what_is_said_to_be_tested_elsewhere_is(place):
    path, name = place.split("::")
    assert f"def {name}(" in (Path(__file__).parent / path).read_text()


# -- monotone ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=20)
@given(
    st.data(),
    st.sampled_from(["noise", "steps", "rate", "size"]),
    powers(0.05, 0.6),
    methods,
    deltas,
)
def test_less_noise_more_steps_and_larger_samples_never_cost_less(
    data, changed, factor, method, delta
):
    """Each on a ledger that also holds another release."""
    adjacency = data.draw(st.sampled_from([ZERO_OUT, REPLACE_ONE]))
    noise, rate, count, other = (data.draw(some) for some in (noises, rates, steps, plain))
    size = data.draw(st.integers(1, 200))
    larger_noise = noise * factor if changed == "noise" else noise
    larger_rate, larger_size = min(1.0, rate * factor), min(2000, int(size * factor) + 1)
    larger_count = int(count * factor) + 1 if changed == "steps" else count
    small: Event = PoissonGaussian(larger_noise, rate)
    large: Event = PoissonGaussian(noise, larger_rate if changed == "rate" else rate)
    if changed == "size" or (changed != "rate" and data.draw(st.booleans())):
        small = WORGaussian(2 * larger_noise, size, 2000)
        large = WORGaussian(2 * noise, larger_size if changed == "size" else size, 2000)
    lower = epsilon([(small, count), (other, 1)], delta, adjacency, method)
    upper = epsilon([(large, larger_count), (other, 1)], delta, adjacency, method)
    assert lower <= upper * (1 + SLACK[method])


@pytest.mark.slow
@settings(max_examples=10)
@given(runs, deltas, powers(0.01, 2.0), st.sampled_from([ZERO_OUT, REPLACE_ONE]))
def test_loss_distributions_cost_less_at_larger_deltas(run, delta, factor, adjacency):
    """The other methods: `ELSEWHERE`."""
    at_delta, at_larger = (
        epsilon(run, min(d, 0.5), adjacency, "pld") for d in (delta, delta * factor)
    )
    assert at_larger <= at_delta * (1 + GRID)


# -- methods and adjacencies ------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.one_of(poisson, fixed, plain, pure), steps), min_size=1, max_size=3),
    deltas,
)
def test_loss_distributions_are_below_renyi_bounds_and_the_best_below_all(run, delta):
    for adjacency in (ZERO_OUT, REPLACE_ONE):
        found = {method: epsilon(run, delta, adjacency, method) for method in SLACK}
        assert found["pld"] <= found["rdp"] * (1 + GRID)
        assert found["best"] <= found["rdp"]


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(st.one_of(plain, laplace, pure), st.integers(1, 30)), min_size=1, max_size=3
    ),
    deltas,
)
def test_renyi_bounds_are_below_those_of_zcdp_where_there_is_one(run, delta):
    """The best order of zCDP is optimal among all, that of Renyi among those of a grid: at most 0.1 % apart."""
    for adjacency in ADJACENCIES:
        rho = sum(count * cost_of(event, adjacency).rho for event, count in run)
        concentrated, renyi = zcdp_epsilon(rho, delta), epsilon(run, delta, adjacency, "rdp")
        assert renyi <= concentrated * (1 + 1e-3)
        assert epsilon(run, delta, adjacency) <= min(renyi, concentrated)


@pytest.mark.weekly
@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.one_of(poisson, plain, laplace), steps), min_size=1, max_size=3),
    deltas,
    methods,
)
def test_replacing_a_record_costs_at_least_as_much_as_removing_or_zeroing_it(run, delta, method):
    removed, zeroed, replaced = (
        epsilon(run, delta, adjacency, method) for adjacency in ADJACENCIES
    )
    assert zeroed == removed
    assert removed <= replaced * (1 + SLACK[method])


@pytest.mark.slow
@settings(max_examples=15)
@given(fixed, steps, deltas, methods)
def test_fixed_batches_cost_the_same_for_a_record_zeroed_or_replaced_and_more_than_poisson_ones(
    event, count, delta, method
):
    zeroed, replaced = (
        epsilon([(event, count)], delta, adjacency, method)
        for adjacency in (ZERO_OUT, REPLACE_ONE)
    )
    assert zeroed == replaced
    sampled = PoissonGaussian(event.noise_multiplier, event.batch_size / event.dataset_size)
    assert epsilon([(sampled, count)], delta, REPLACE_ONE, method) <= replaced * (
        1 + SLACK[method]
    )


@settings(max_examples=30)
@given(
    powers(-0.5, 2.0),
    st.integers(1, 1000),
    deltas,
    st.sampled_from(["best", "rdp", "pld"]),
)
def test_poisson_sampling_at_rate_one_is_the_gaussian(noise, count, delta, method):
    for adjacency in ADJACENCIES:
        sampled, whole = PoissonGaussian(noise, 1.0), clipped_gaussian(noise)
        at_rate_one = epsilon([(sampled, count)], delta, adjacency, method)
        assert at_rate_one == epsilon([(whole, count)], delta, adjacency, method)
        mixed = epsilon([(sampled, count), (whole, count)], delta, adjacency, method)
        assert mixed == pytest.approx(
            epsilon([(whole, 2 * count)], delta, adjacency, method), rel=1e-9
        )


# -- composition ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=10)
@given(runs, st.randoms(use_true_random=False), deltas)
def test_loss_distributions_compose_in_any_order(run, random, delta):
    """Up to rounding: the mu^2 of Gaussians are added as they come. The other methods: `ELSEWHERE`."""
    moved = list(run)
    random.shuffle(moved)
    found = epsilon(moved, delta, REPLACE_ONE, "pld")
    assert found == pytest.approx(epsilon(run, delta, REPLACE_ONE, "pld"), rel=1e-12)


@pytest.mark.weekly
@settings(max_examples=15)
@given(runs, deltas, methods, st.sampled_from([ZERO_OUT, REPLACE_ONE]))
def test_one_part_costs_what_its_events_cost_in_sequence(run, delta, method, adjacency):
    block = Parallel({"only": [Repeat(event, count) for event, count in run]}, "p")
    alone = epsilon([(block, 1)], delta, adjacency, method)
    assert alone == pytest.approx(epsilon(run, delta, adjacency, method), rel=1e-12)
    # another part that costs no more changes nothing, and neither does an empty one
    less = [Repeat(event, count - 1) for event, count in run]
    both = Parallel(
        {"only": [Repeat(event, count) for event, count in run], "less": less, "none": []}, "p"
    )
    assert epsilon([(both, 1)], delta, adjacency, method) == pytest.approx(alone, rel=GRID)


# -- adaptive ---------------------------------------------------------------------------------------------------------


@pytest.mark.weekly
@settings(max_examples=12)
@given(st.lists(st.tuples(st.one_of(poisson, fixed, plain, laplace), steps), max_size=3), deltas)
def test_the_odometer_is_never_below_the_epsilon_of_parameters_fixed_in_advance(run, delta):
    for adjacency in (ZERO_OUT, REPLACE_ONE):
        planned, adaptive = Accountant(adjacency=adjacency), Accountant(adjacency=adjacency)
        before = 0.0
        for event, count in run:
            planned.record(event, count)
            adaptive.record(event, count, adaptive=True)
            odometer = adaptive.get_epsilon(delta)
            assert odometer >= planned.get_epsilon(delta, method="rdp")
            assert odometer >= planned.get_epsilon(delta) * (1 - 1e-12)
            assert odometer >= before  # and it never goes back
            before = odometer
        assert adaptive.ledger.digest() == planned.ledger.digest()


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.one_of(poisson, fixed, plain, laplace, pure), steps), max_size=4),
    st.integers(0, 4),
)
def test_a_ledger_read_from_its_own_words_gives_the_same_bits(run, cut):
    """A state taken at any time and resumed, and the rows of the ledger; more of this: `ELSEWHERE`."""
    whole, first, second = (Accountant(adjacency=REPLACE_ONE) for _ in range(3))
    for event, count in run:
        whole.record(event, count)
    for event, count in run[:cut]:
        first.record(event, count)
    second.load_state_dict(first.state_dict())
    for event, count in run[cut:]:
        second.record(event, count)
    rows = Ledger.from_json(whole.ledger.to_json())
    assert second.ledger.to_json() == whole.ledger.to_json() == rows.to_json()
    for delta in (1e-9, 1e-3):
        figures = {
            second.get_epsilon(delta, method="rdp"),
            rows.epsilon(delta, REPLACE_ONE, "rdp"),
        }
        assert figures == {whole.get_epsilon(delta, method="rdp")}
