"""Costs of shuffled sums over all shifts and orders: against every single one, and against exact hockey sticks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.papers.accounting import rdp_shuffle
from tests.shuffle_model.exact_shuffle import delta_bounds
from torch_dpsco.accounting.analysis.rdp import rdp_epsilon, zcdp_epsilon
from torch_dpsco.errors import ConditionError, InfeasibleError
from torch_dpsco.shuffle_model import numbers as shuffle
from torch_dpsco.shuffle_model.numbers import zcdp_shuffle

EXAMPLE = {"dim": 10, "max_shift": 64, "shift_norm": 64 + math.sqrt(10), "delta_window": 1e-9}


@st.composite
def cases(draw):
    """Draws N, p and a largest shift that leaves the window half of the way from the mean to the nearer end."""
    trials, p = draw(st.integers(200, 5000)), draw(st.sampled_from([0.5, 0.25, 0.9]))
    return trials, p, draw(st.integers(1, min(40, int(trials * min(p, 1 - p) / 2))))


@pytest.mark.slow
@settings(max_examples=25)
@given(cases(), st.floats(1.01, 60.0), st.data())
def test_no_shift_costs_more_than_kappa_says(case, order, data):
    trials, p, most = case
    shifts = data.draw(st.lists(st.integers(-most, most), min_size=1, max_size=6))
    norm = max(math.hypot(*shifts), 1.0)
    arguments = {"dim": len(shifts), "max_shift": most, "shift_norm": norm, "delta_window": 1e-7}
    [bound], _ = rdp_shuffle(trials, p, [order], **arguments)
    rho = zcdp_shuffle(trials, p, **arguments).rho
    window = shuffle._Window(trials, p, most, 1e-7)
    exact = sum(window.pair(abs(shift)).divergence(order) for shift in shifts if shift)
    assert exact <= bound * (1 + 1e-9)
    assert exact <= rho * order * (1 + 1e-9)


@settings(max_examples=15)
@given(cases())
def test_rho_covers_every_order(case):
    trials, p, shift = case
    rho = zcdp_shuffle(
        trials, p, dim=1, max_shift=shift, shift_norm=shift, delta_window=1e-6
    ).rho
    pair = shuffle._Window(trials, p, shift, 1e-6).pair(shift)
    for order in [1 + 10 ** (k / 7 - 4) for k in range(70)]:
        assert pair.divergence(order) <= rho * order * (1 + 1e-12)
    assert pair.worst_loss() < math.inf


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("trials", "grid", "dim"), [(10**5, 20, 4), (10**6, 126, 1000), (10**8, 126, 1000)]
)
def test_rho_is_close_to_that_of_a_gaussian(trials, grid, dim):
    norm = grid + math.sqrt(dim)
    rho = zcdp_shuffle(
        trials, 0.5, dim=dim, max_shift=grid, shift_norm=norm, delta_window=1e-3 / trials
    ).rho
    assert norm**2 * 2 / trials <= rho <= norm**2 * 2 / trials * 1.025


def test_the_tables_of_orders_and_shifts_are_fine_enough():
    orders, shifts = shuffle._ORDERS, shuffle._shifts(5000)
    assert max(shuffle._between_orders(*pair) for pair in pairwise(orders)) < 1.006
    assert max(shuffle._between_shifts(*pair) for pair in pairwise(shifts)) < 1.006
    assert (shifts[:8], shifts[-1]) == (list(range(1, 9)), 5000)
    assert [shuffle._shifts(most) for most in (1, 8, 9)] == [
        [1],
        list(range(1, 9)),
        list(range(1, 10)),
    ]


def test_chord_factors_bound_what_lies_between():
    for low, high in [(8, 9), (8, 11), (100, 115)]:
        for shift in range(low, high + 1):
            share = (shift - low) / (high - low)
            assert (1 - share) * low**2 + share * high**2 <= shuffle._between_shifts(
                low, high
            ) * shift**2 * (1 + 1e-12)
    for low, high in [(1.0, 1.004), (1.3, 1.7), (40.0, 46.0)]:
        for k in range(1, 100):
            order = low + (high - low) * k / 100
            chord = (1 - k / 100) * low * (low - 1) + k / 100 * high * (high - 1)
            assert chord <= shuffle._between_orders(low, high) * order * (order - 1) * (
                1 + 1e-12
            )


@pytest.mark.slow
def test_more_noise_bits_than_fit_count_as_many_as_fit():
    costs = [
        zcdp_shuffle(10**k, 0.5, dim=1, max_shift=2, shift_norm=2, delta_window=1e-12).rho
        for k in (8, 12)
    ]
    assert 0 < costs[1] <= costs[0]


@pytest.mark.slow
def test_the_sizing_example_keeps_its_delta_exactly():
    """d = 10, n = 1000, g = 64, b = 314: feasible shifts have an exact delta below 1e-5 at the accountant's epsilon."""
    cost = zcdp_shuffle(314_000, 0.5, **EXAMPLE)
    epsilon = zcdp_epsilon(cost.rho, 1e-5 - cost.failure)
    curve, lost = rdp_shuffle(314_000, 0.5, [12.0, 16.0, 20.0, 24.0], **EXAMPLE)
    assert 0.97 <= epsilon <= 0.98
    assert 0.97 <= rdp_epsilon([12.0, 16.0, 20.0, 24.0], curve, 1e-5 - lost).epsilon <= 0.98
    largest = 0.0
    for shifts in ([21] * 10, [64, 20, 3, 1], [47, 47, 9], [-64, 19, -6, 3]):
        assert math.hypot(*shifts) <= EXAMPLE["shift_norm"]
        lower, upper = delta_bounds(314_000, 0.5, shifts, epsilon)
        assert 0 < lower <= upper <= 1e-5
        largest = max(largest, upper)
    assert 1e-6 <= largest <= 3e-6


@pytest.mark.slow
def test_the_l2_budget_would_under_report_coordinatewise_sums():
    """Algorithm 13 moves all coordinates by the whole grid: at epsilon 0.97 its exact delta is 0.046."""
    lower, upper = delta_bounds(314_000, 0.5, [64] * 10, 0.97)
    assert 0.045 <= lower <= upper <= 0.047
    cost = zcdp_shuffle(314_000, 0.5, **(EXAMPLE | {"shift_norm": 64 * math.sqrt(10)}))
    epsilon = zcdp_epsilon(cost.rho, 1e-5 - cost.failure)
    assert 3.0 < epsilon < 4.0
    assert delta_bounds(314_000, 0.5, [64] * 10, epsilon)[1] <= 1e-5


def test_the_closed_form_for_scalars_fails_at_its_corner():
    """Cheu et al., Lemma 3.1 as reconstructed: g = 1, epsilon = 15, delta = 0.49 claims 0.49 at 45; it is 0.517."""
    grid, epsilon, delta = 1, 15.0, 0.49
    log = math.log(2 / delta)
    trials = math.floor(180 * grid**2 * log / epsilon**2) + 1
    p = 90 * grid**2 * log / (trials * epsilon**2)
    assert trials == 2
    lower, _ = delta_bounds(trials, p, [1], epsilon * (2 / grid + 1))
    assert lower == pytest.approx(0.517, abs=1e-3)
    assert lower > delta


@settings(max_examples=20)
@given(
    st.integers(50, 3000),
    st.sampled_from([0.5, 0.3]),
    st.integers(1, 8),
    st.integers(1, 3),
    st.floats(0.2, 3.0),
)
def test_the_cost_covers_the_exact_hockey_stick_in_both_directions(
    trials, p, grid, dim, epsilon
):
    cost = zcdp_shuffle(
        trials, p, dim=dim, max_shift=grid, shift_norm=grid * math.sqrt(dim), delta_window=1e-6
    )
    for sign in (1, -1):
        for delta in (1e-4, 1e-2):
            if zcdp_epsilon(cost.rho, delta) <= epsilon:
                lower, _ = delta_bounds(trials, p, [sign * grid] * dim, epsilon, step=1e-3)
                assert lower <= delta + cost.failure


def test_a_shift_that_cuts_the_window_is_named_as_what_fails():
    """Bin(200, 0.9) has its mean at 180, and a shift by 21 leaves what is below 179: more than half is lost."""
    arguments = {"max_shift": 21, "shift_norm": 1.0, "delta_window": 1e-7}
    with pytest.raises(
        ConditionError,
        match=r"max_shift must leave a window within 200 trials .* 1/2 of .*got 21",
    ):
        rdp_shuffle(200, 0.9, [2.0], dim=2, **arguments)
    with pytest.raises(ConditionError, match="max_shift must leave"):
        zcdp_shuffle(200, 0.9, dim=2, **arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dim": 0}, ValueError, "dim must be"),
        ({"max_shift": 0}, ValueError, "max_shift must be"),
        ({"shift_norm": 0.0}, ValueError, "shift_norm must be > 0"),
        ({"delta_window": 1.0}, ValueError, "delta_window must be"),
        ({"max_shift": 300_000}, InfeasibleError, "max_shift must be <"),
        ({"max_shift": 157_001}, ConditionError, "shift must leave a window"),
        (
            {"delta_window": 0.5},
            ConditionError,
            "delta_window be below that, for 10 coordinates",
        ),
    ],
)
def test_bad_arguments_of_costs_are_named(change, error, message):
    with pytest.raises(error, match=message):
        zcdp_shuffle(314_000, 0.5, **(EXAMPLE | change))
    with pytest.raises(ConditionError, match="shift must leave a window within 100 trials"):
        zcdp_shuffle(100, 0.5, **EXAMPLE)
    with pytest.raises(ValueError, match="orders must be finite and > 1"):
        rdp_shuffle(314_000, 0.5, [1.0], **EXAMPLE)
