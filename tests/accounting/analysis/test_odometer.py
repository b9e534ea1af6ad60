"""Odometer and filters: against 50-digit roots and minima, their inequality everywhere, and adaptive runs."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from tests.reference.papers.accounting import zcdp_rho
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_mu
from torch_dpsco.accounting.analysis.rdp import rdp_delta, rdp_epsilon, zcdp_epsilon
from torch_dpsco.accounting.budgets import (
    ODOMETER_ORDERS,
    Budget,
    make_filter,
    mixture_filter_admits,
    mixture_filter_log_margin,
    odometer_epsilon,
)

GRID = np.array(ODOMETER_ORDERS)
deltas = st.one_of(st.floats(-300.0, -0.01).map(lambda x: 10**x), st.floats(0.01, 0.99))
log_scale = st.floats(-6.0, 2.0).map(lambda x: 10**x)


@st.composite
def states(draw):
    """Orders and costs (some 0, some infinite)."""
    excess = draw(
        st.lists(st.floats(-2.0, 5.0).map(lambda x: 10**x), min_size=1, max_size=6, unique=True)
    )
    size = len(excess)
    spent = draw(
        st.lists(
            st.one_of(log_scale, st.just(0.0), st.just(math.inf)), min_size=size, max_size=size
        )
    )
    return [1 + e for e in excess], spent


def mixture(epsilon: mp.mpf, orders, spent) -> mp.mpf:
    """sum_a e^((a-1) (epsilon - S_a)) / K"""
    parts = zip(orders, spent, strict=True)
    return mp.fsum(
        mp.exp((mp.mpf(a) - 1) * (epsilon - mp.mpf(s))) / len(orders)
        for a, s in parts
        if math.isfinite(s)
    )


@pytest.mark.slow
@given(states(), deltas)
@settings(max_examples=150)
@example(([1.01, 1e5], [0.0, 0.0]), 0.99)
@example(([2.0], [math.inf]), 0.5)
def test_the_odometer_is_rounded_up(state, delta):
    orders, spent = state
    found = odometer_epsilon(orders, spent, delta)
    if all(math.isinf(s) for s in spent):
        assert found == math.inf
        return
    with mp.workdps(50):
        assert found > 0
        assert mixture(mp.mpf(found), *state) * mp.mpf(delta) >= 1
        # the rounding is that of exponents up to (a - 1) S_a; the least a - 1 turns it into one of epsilon
        sizes = [(a - 1) * s for a, s in zip(orders, spent, strict=True) if math.isfinite(s)]
        slack = 1e-11 + 1e-12 * (max(sizes) + 700) / (min(orders) - 1)
        assert mixture(mp.mpf(found) * (1 - mp.mpf("1e-11")) - slack, *state) * mp.mpf(delta) < 1


@given(st.floats(1e-6, 10.0), deltas)
def test_the_odometer_is_above_the_conversion_fixed_in_advance(rho, delta):
    running = odometer_epsilon(GRID, rho * GRID, delta)
    assert running >= rdp_epsilon(GRID, rho * GRID, delta).epsilon
    assert running >= zcdp_epsilon(rho, delta)


def test_the_overhead_of_the_odometer_is_the_measured_one():
    assert odometer_epsilon(GRID, 0.1 * GRID, 1e-5) == pytest.approx(2.456, abs=5e-4)
    assert zcdp_epsilon(0.1, 1e-5) == pytest.approx(1.914, abs=5e-4)


@pytest.mark.slow
@given(states(), deltas, st.floats(1.0, 3.0))
def test_the_odometer_grows_with_the_costs_and_shrinks_with_delta(state, delta, factor):
    orders, spent = state
    more = [factor * s for s in spent]
    assert odometer_epsilon(orders, spent, delta) <= odometer_epsilon(orders, more, delta) * (
        1 + 1e-12
    )
    smaller = delta / factor
    assert odometer_epsilon(orders, spent, delta) <= odometer_epsilon(orders, spent, smaller) * (
        1 + 1e-12
    )


@pytest.mark.slow
@given(states(), st.one_of(st.just(0.0), st.floats(-3.0, 2.0).map(lambda x: 10**x)))
@settings(max_examples=50)
@example(([2.0], [0.1]), 1.0)
@example(([1.01, 1e5], [0.5, 0.001]), 0.0)
def test_the_margin_is_never_above_the_true_minimum(state, epsilon):
    """The minimum by bisection on the slope in 50 digits; what is given away stays below the stated bound."""
    orders, spent = state
    found = mixture_filter_log_margin(epsilon, orders, spent)
    if all(math.isinf(s) for s in spent):
        assert found == -math.inf
        return
    with mp.workdps(50):
        kept = [
            (mp.mpf(a) - 1, mp.mpf(s), mp.mpf(1) / len(orders))
            for a, s in zip(orders, spent, strict=True)
            if s < math.inf
        ]

        def terms(x):
            return [w * mp.exp(e * (epsilon - s + x)) for e, s, w in kept]

        low, high = mp.mpf("1e-12"), mp.mpf(20)
        for _ in range(150):
            middle = (low + high) / 2
            parts = terms(middle)
            slope = mp.fsum(t * e for t, (e, _, _) in zip(parts, kept, strict=True)) / mp.fsum(
                parts
            )
            low, high = (middle, high) if slope < 1 / mp.expm1(middle) else (low, middle)
        minimum = mp.log(mp.fsum(terms(low))) - mp.log(-mp.expm1(-low))
        size = float(max(e * max(s, epsilon, 1) for e, s, _ in kept))
        assert found <= minimum
        assert found >= minimum - 1e-9 - 1e-12 * size


@pytest.mark.slow
@given(states(), st.floats(0.0, 20.0), deltas)
@settings(max_examples=150)
def test_an_admitted_state_satisfies_the_inequality_for_every_loss(state, epsilon, delta):
    """(1 - e^(epsilon - l))_+ <= delta/K sum_a e^((a-1) (l - S_a)), which optional stopping turns into delta."""
    orders, spent = state
    if not mixture_filter_admits(epsilon, delta, orders, spent):
        return
    with mp.workdps(50):
        for x in np.concatenate([np.geomspace(1e-7, 30, 60), [1 / (a - 1) for a in orders]]):
            loss = epsilon + mp.mpf(float(x))
            assert -mp.expm1(-mp.mpf(float(x))) <= mp.mpf(delta) * mixture(loss, orders, spent)


@given(st.floats(1.02, 500.0), log_scale, st.floats(0.0, 10.0))
def test_a_filter_of_one_order_grants_the_conversion_of_that_order(order, spent, epsilon):
    margin = mixture_filter_log_margin(epsilon, [order], [spent])
    log_delta = (order - 1) * (spent - epsilon + math.log1p(-1 / order)) - math.log(order)
    assert -margin == pytest.approx(log_delta, rel=1e-9, abs=1e-9)
    delta = rdp_delta([order], [spent], epsilon)
    if 1e-300 < delta < math.sqrt(-math.expm1(-spent)) * 0.99:
        assert mixture_filter_admits(epsilon, min(0.999, delta * (1 + 1e-6)), [order], [spent])
        assert not mixture_filter_admits(epsilon, delta * (1 - 1e-6), [order], [spent])


@pytest.mark.slow
@given(st.floats(0.1, 10.0), st.floats(-12.0, -1.0).map(lambda x: 10**x))
@settings(max_examples=10)
def test_the_mixture_filter_admits_more_than_the_odometer_and_less_than_the_best_order(
    epsilon, delta
):
    def largest(fits):
        low, high = 0.0, 100.0
        for _ in range(45):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    by_filter = largest(lambda rho: mixture_filter_admits(epsilon, delta, GRID, rho * GRID))
    by_odometer = largest(lambda rho: odometer_epsilon(GRID, rho * GRID, delta) <= epsilon)
    in_advance = largest(lambda rho: rdp_epsilon(GRID, rho * GRID, delta).epsilon <= epsilon)
    assert by_odometer <= by_filter * (1 + 1e-9)
    assert by_filter <= max(in_advance, zcdp_rho(epsilon, delta)) * (1 + 1e-9)


@pytest.mark.slow
def test_more_costs_are_never_admitted_again():
    rhos = np.linspace(0.0, 0.3, 200)
    admitted = [mixture_filter_admits(2.2, 1e-5, GRID, rho * GRID) for rho in rhos]
    assert admitted[0]
    assert not admitted[-1]
    assert admitted == sorted(admitted, reverse=True)


def adaptive_losses(rng, fits, runs=20_000, steps=40):
    """Gaussian releases whose mu depends on the loss so far; returns loss, rho spent, of runs stopped by `fits`.

    Under the first data set a release with mu adds a loss of N(mu^2/2, mu^2).
    """
    loss, rho, active = np.zeros(runs), np.zeros(runs), np.ones(runs, dtype=bool)
    history = [(loss.copy(), rho.copy())]
    for _ in range(steps):
        mu = np.where(loss > 0.5, 0.45, np.where(loss < 0, 0.05, 0.2))
        active &= fits(rho + mu**2 / 2)
        loss = np.where(active, loss + mu**2 / 2 + mu * rng.normal(size=runs), loss)
        rho = np.where(active, rho + mu**2 / 2, rho)
        history.append((loss.copy(), rho.copy()))
    return history


@pytest.mark.weekly
def test_the_loss_of_adaptive_runs_passes_the_odometer_no_more_often_than_delta():
    """Binomial quantile 1e-6 over 20,000 runs, at any of 40 times."""
    delta = 0.05
    table = np.linspace(0, 6, 2001)
    allowed = np.array([odometer_epsilon(GRID, rho * GRID, delta) for rho in table])
    history = adaptive_losses(np.random.default_rng(5), lambda rho: rho <= 6)
    # the odometer at the grid point below is smaller than at the true cost, so that it is passed more often
    passed = np.zeros(20_000, dtype=bool)
    for loss, rho in history:
        passed |= loss > allowed[np.searchsorted(table, rho, side="right") - 1]
    assert passed.sum() <= binom.isf(1e-6, 20_000, delta)
    assert passed.sum() > 0


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("kind", ["mixture", "gdp"])
def test_adaptive_runs_stopped_by_a_filter_keep_their_delta(kind):
    """Hoeffding: the mean of 20,000 variables in [0, 1] is off by more than 0.0186 with probability 1e-6."""
    epsilon, delta = 0.8, 0.05
    table = np.linspace(0, 1, 201)
    budget = {
        "mixture": max(
            rho for rho in table if mixture_filter_admits(epsilon, delta, GRID, rho * GRID)
        ),
        "gdp": make_filter(Budget(epsilon, delta, mode="gdp")).limit / 2,
    }[kind]
    loss, rho = adaptive_losses(np.random.default_rng(6), lambda spent: spent <= budget)[-1]
    assert np.all(rho <= budget)
    assert rho.max() > 0.5 * budget
    spent_delta = np.mean(np.maximum(0.0, -np.expm1(epsilon - loss)))
    assert spent_delta <= delta + 0.0186
    unlimited = adaptive_losses(np.random.default_rng(6), lambda spent: spent <= 4)[-1][0]
    assert (
        np.mean(np.maximum(0.0, -np.expm1(epsilon - unlimited))) > delta + 0.0186
    )  # the test has power


@pytest.mark.slow
@given(st.floats(0.01, 10.0), deltas)
def test_the_gdp_budget_is_not_above_the_square_of_mu(epsilon, delta):
    budget = make_filter(Budget(epsilon, delta, mode="gdp")).limit
    assert Fraction(budget) <= Fraction(gaussian_mu(epsilon, delta)) ** 2
    assert gaussian_delta(math.sqrt(budget), epsilon) <= delta
    assert gaussian_delta(math.sqrt(budget) * (1 + 1e-9), epsilon) >= delta * (1 - 1e-9)


def test_the_orders_of_the_odometer_are_those_of_the_spec():
    assert ODOMETER_ORDERS == (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: odometer_epsilon([1.0], [0.1], 0.1), "orders must be finite and > 1"),
        (lambda: odometer_epsilon([2.0], [-0.1], 0.1), "spent must be >= 0"),
        (lambda: odometer_epsilon([2.0], [math.nan], 0.1), "spent must be >= 0"),
        (lambda: odometer_epsilon([2.0, 3.0], [0.1], 0.1), "orders and spent must be 1-d"),
        (lambda: odometer_epsilon([], [], 0.1), "orders and spent must be 1-d"),
        (lambda: odometer_epsilon([2.0], [0.1], 0.0), "delta must be in"),
        (lambda: mixture_filter_admits(-1.0, 0.1, [2.0], [0.1]), "epsilon must be >= 0"),
        (lambda: mixture_filter_admits(1.0, 1.0, [2.0], [0.1]), "delta must be in"),
        (lambda: mixture_filter_log_margin(math.inf, [2.0], [0.1]), "epsilon must be finite"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
