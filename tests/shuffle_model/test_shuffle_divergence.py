"""Binomial noise and its shift: against 40-digit sums, and the privacy statement against exact hockey sticks."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from tests.reference.papers.accounting import rdp_binomial_shift
from torch_dpsco.accounting.analysis.rdp import rdp_delta, rdp_epsilon
from torch_dpsco.errors import ConditionError, InfeasibleError


def masses(trials, p):
    with mp.workdps(40):
        chance = mp.mpf(p)
        mass = [(1 - chance) ** trials]
        for y in range(1, trials + 1):
            mass.append(mass[-1] * (trials - y + 1) * chance / (y * (1 - chance)))
        return mass


def reference(trials, p, shift, order, delta_window):
    """The definition of docs/proofs/heavy_tailed.md#shuffle-accountant in 40 digits: (divergence, lost mass)."""
    low = max(int(binom.ppf(delta_window / 2, trials, p)), shift)
    high = min(int(binom.isf(delta_window / 2, trials, p)), trials - shift)
    mass = masses(trials, p)
    with mp.workdps(40):
        window = range(low, high + 1)
        kept, a = mp.fsum(mass[y] for y in window), mp.mpf(order)
        sums = [
            mp.fsum(mass[y] ** a * mass[y - s] ** (1 - a) for y in window)
            for s in (shift, -shift)
        ]
        return max((mp.log(total) - a * mp.log(kept)) / (a - 1) for total in sums), 1 - kept


cases = st.tuples(
    st.integers(4, 800),
    st.one_of(st.just(0.5), st.floats(0.02, 0.98)),
    st.floats(0.0, 1.0),
    st.floats(-2.0, 2.0).map(lambda x: 1 + 10**x),
    st.floats(-14.0, -2.0).map(lambda x: 10**x),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(cases)
@example((400, 0.5, 0.2, 10.0, 1e-8))
def test_the_divergence_is_the_exact_one_rounded_up(case):
    trials, p, share, order, delta_window = case
    shift = 1 + int(share * min(math.sqrt(trials * p * (1 - p)), trials / 4))
    exact, lost = reference(trials, p, shift, order, delta_window)
    found = rdp_binomial_shift(trials, p, shift, order, delta_window)
    # the law on the window is divided by its mass 1 - lost, and lost is rounded up by at most 2e-8 of itself
    assert exact <= found.rdp <= exact * (1 + mp.mpf("1e-8")) + 3e-8 * lost / (1 - lost)
    assert lost <= found.lost_mass <= lost * (1 + mp.mpf("2e-8"))


def log_binomial(trials, p, y):
    chance = mp.mpf(p)
    ways = mp.loggamma(trials + 1) - mp.loggamma(y + 1) - mp.loggamma(trials - y + 1)
    return ways + y * mp.log(chance) + (trials - y) * mp.log1p(-chance)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("trials", "p"), [(10**6, 0.5), (10**9, 0.5), (10**10, 0.01), (10**11, 0.5), (10**12, 0.01)]
)
def test_the_lost_mass_of_many_trials_is_the_exact_one_rounded_up(trials, p):
    found = rdp_binomial_shift(trials, p, 2, 3.0, 1e-8).lost_mass
    exact = mp.mpf(0)
    with mp.workdps(30):
        deviation = mp.sqrt(trials * mp.mpf(p) * (1 - mp.mpf(p)))
        for end, way in (
            (int(binom.ppf(5e-9, trials, p)) - 1, -1),
            (int(binom.isf(5e-9, trials, p)) + 1, 1),
        ):

            def mass(k, end=end, way=way):
                return mp.exp(log_binomial(trials, p, end + way * k))

            if trials <= 10**6:  # few enough to be added up
                exact += mp.fsum(mass(k) for k in range(8 * int(deviation)))
                continue
            # sum over k >= 0 by Euler and Maclaurin: integral + first / 2 - slope / 12
            whole = mp.quad(mass, [0, deviation / 4, deviation, 3 * deviation, 8 * deviation])
            exact += whole + mass(0) / 2 - (mass(1) - mass(-1)) / 24
    assert exact <= found <= exact * (1 + mp.mpf("2e-8"))


@pytest.mark.slow
@settings(max_examples=40)
@given(cases, st.floats(0.0, 4.0))
def test_the_statement_covers_the_exact_hockey_stick_in_both_directions(case, epsilon):
    trials, p, share, _, delta_window = case
    shift = 1 + int(share * min(math.sqrt(trials * p * (1 - p)), trials / 4))
    orders = [1.25, 2.0, 4.0, 8.0, 16.0, 64.0]
    found = [rdp_binomial_shift(trials, p, shift, order, delta_window) for order in orders]
    bound = rdp_delta(orders, [bound.rdp for bound in found], epsilon) + found[0].lost_mass
    mass = np.array([float(value) for value in masses(trials, p)])
    moved = [np.concatenate([np.zeros(shift), mass]), np.concatenate([mass, np.zeros(shift)])]
    for one, other in (moved, moved[::-1]):
        assert np.maximum(one - math.exp(epsilon) * other, 0.0).sum() <= bound * (1 + 1e-12)


@pytest.mark.parametrize("trials", [2000, 10**6])
@pytest.mark.parametrize("order", [1.5, 4.0, 8.0])
def test_many_trials_cost_what_a_gaussian_of_their_variance_costs(trials, order):
    gaussian = order / (2 * trials * 0.3 * 0.7)
    assert rdp_binomial_shift(trials, 0.3, 1, order, 1e-10).rdp == pytest.approx(
        gaussian, rel=6e-3
    )


def test_the_sizing_example_costs_what_was_measured():
    """d = 10, n = 1000, g = 64, b = 314: epsilon 0.97 to 0.98, depending on the orders."""
    values, lost, orders = [], 0.0, [12.0, 16.0, 20.0, 24.0]
    for order in orders:
        found = {
            shift: rdp_binomial_shift(314_000, 0.5, shift, order, 1e-8)
            for shift in (1, 8, 32, 64, 65)
        }
        values.append(
            max(bound.rdp / shift**2 for shift, bound in found.items())
            * (64 + math.sqrt(10)) ** 2
        )
        lost = max(lost, *(bound.lost_mass for bound in found.values()))
    assert 0.97 <= rdp_epsilon(orders, values, 1e-5 - 10 * lost).epsilon <= 0.98


@pytest.mark.slow
@given(
    st.integers(100, 5000),
    st.floats(0.1, 0.9),
    st.integers(1, 5),
    st.floats(1.1, 20.0),
    st.floats(0.1, 3.0),
)
def test_the_divergence_grows_with_the_order_and_is_symmetric_in_the_coin(
    trials, p, shift, order, more
):
    found = rdp_binomial_shift(trials, p, shift, order, 1e-6)
    assert found.rdp <= rdp_binomial_shift(trials, p, shift, order + more, 1e-6).rdp * (1 + 1e-8)
    other = rdp_binomial_shift(
        trials, 1 - p, shift, order, 1e-6
    )  # 1 - p rounds: the window may move by one
    assert other.rdp == pytest.approx(found.rdp, rel=1e-4)


def test_tiny_windows_and_a_shift_as_large_as_the_support():
    for delta_window in (5e-324, 1e-300):
        whole = rdp_binomial_shift(40, 0.5, 1, 2.0, delta_window)
        exact, lost = reference(40, 0.5, 1, 2.0, delta_window)
        assert exact <= whole.rdp <= exact * (1 + mp.mpf("1e-9"))
        assert lost <= whole.lost_mass <= lost * (1 + mp.mpf("1e-7"))
    assert rdp_binomial_shift(4, 0.5, 2, 2.0, 1e-3).lost_mass == pytest.approx(10 / 16, rel=1e-7)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 0.5, 1, 2.0, 1e-8), ValueError, "trials must be an integer >= 1"),
        ((10, 0.0, 1, 2.0, 1e-8), ValueError, "noise_probability must be in"),
        ((10, 1.0, 1, 2.0, 1e-8), ValueError, "noise_probability must be in"),
        ((10, 0.5, 0, 2.0, 1e-8), ValueError, "shift must be an integer >= 1"),
        ((10, 0.5, 1.5, 2.0, 1e-8), ValueError, "shift must be an integer"),
        ((10, 0.5, 1, 1.0, 1e-8), ValueError, "order must be finite and > 1"),
        ((10, 0.5, 1, 2.0, 0.0), ValueError, "delta_window must be in"),
        ((10, 0.5, 1, 2.0, 1.0), ValueError, "delta_window must be in"),
        (
            (10, 0.5, 6, 2.0, 1e-8),
            ConditionError,
            r"shift must leave a window within 10 trials \(got 6\)",
        ),
        (
            (1000, 0.01, 60, 2.0, 1e-8),
            ConditionError,
            "shift must leave a window within 1000 trials",
        ),
        ((10**14, 0.5, 1, 2.0, 1e-8), InfeasibleError, "window of at most 4194304 points"),
        (
            (10**7, 0.5, 3 * 10**6, 2.0, 1e-8),
            InfeasibleError,
            "window of at most 4194304 points",
        ),
    ],
)
def test_arguments_out_of_range_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        rdp_binomial_shift(*arguments)
