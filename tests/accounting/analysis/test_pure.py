"""Pure mechanisms: against 60-digit arithmetic, random pairs of distributions, and each other."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from tests.reference.papers.accounting import laplace_delta
from tests.reference.papers.orders import rdp_laplace, rdp_pure
from tests.reference.papers.pure import pure_delta
from torch_dpsco.accounting.analysis.pure import rho_pure
from torch_dpsco.accounting.analysis.rdp import default_orders

epsilons = st.floats(-12.0, 3.0).map(lambda x: 10**x)
orders = st.one_of(
    st.floats(-12.0, 6.1).map(lambda x: 1 + 10**x), st.integers(1, 52).map(lambda i: 1 + 2.0**-i)
)
SLACK = 1 + 2e-12  # two curves, each rounded up by 1e-12


def randomized_response(epsilon: float, order: float) -> mp.mpf:
    e, a = mp.mpf(epsilon), mp.mpf(order)
    if a == 1:
        return e * mp.tanh(e / 2)
    return (mp.log(mp.cosh((2 * a - 1) * e / 2)) - mp.log(mp.cosh(e / 2))) / (a - 1)


def laplace(scale: float, order: float) -> mp.mpf:
    t, a = 1 / mp.mpf(scale), mp.mpf(order)
    parts = a * mp.exp((a - 1) * t) + (a - 1) * mp.exp(-a * t)
    return mp.log(parts / (2 * a - 1)) / (a - 1)


@pytest.mark.slow
@given(epsilons, orders)
@settings(max_examples=300)
@example(1e3, 2.0**20)
@example(1e-9, 2.0**20)
@example(1e-9, 1 + 2.0**-52)
@example(1e3, 1 + 2.0**-52)
@example(2.0**-20, 2.0**20 + 1)
def test_no_curve_is_below_its_high_precision_value(epsilon, order):
    with mp.workdps(120):
        exact = randomized_response(epsilon, order)
        found = rdp_pure(epsilon, order)
        assert found == epsilon or exact <= found <= exact * (1 + mp.mpf("1.1e-12"))
        assert found <= epsilon
        exact = laplace(1 / epsilon, order)
        assert exact <= rdp_laplace(1 / epsilon, order) <= exact * (1 + mp.mpf("1.1e-12"))


@pytest.mark.slow
@given(st.floats(2e-150, 1e3))
@example(1e3)
@example(1e-9)
def test_rho_is_not_below_its_high_precision_value(epsilon):
    with mp.workdps(60):
        exact = randomized_response(epsilon, 1.0)
        assert rho_pure(epsilon) == epsilon or exact <= rho_pure(epsilon) <= exact * (
            1 + mp.mpf("4e-15")
        )


@pytest.mark.slow
@given(epsilons, orders)
def test_zcdp_of_pure_privacy_bounds_every_order_and_is_reached_at_order_one(epsilon, order):
    assert rdp_pure(epsilon, order) <= rho_pure(epsilon) * order * SLACK
    assert rho_pure(epsilon) <= min(epsilon, epsilon**2 / 2) * (1 + 4e-15)


def test_published_figures_of_zcdp():
    assert rho_pure(1.0) == pytest.approx(0.4621, abs=5e-5)
    assert rho_pure(4.0) == pytest.approx(3.856, abs=5e-4)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(-1.0, 1.0)), min_size=2, max_size=8),
    epsilons,
    orders,
)
@settings(max_examples=200)
def test_no_random_epsilon_dp_pair_costs_more_than_randomized_response(points, epsilon, order):
    """Q is any distribution, P / Q between e^-epsilon and e^epsilon after normalization."""
    with mp.workdps(60):
        mass = [mp.mpf(weight) for weight, _ in points]
        ratio = [mp.exp(mp.mpf(min(epsilon, 50.0)) * tilt / 2) for _, tilt in points]
        total_q = mp.fsum(mass)
        total_p = mp.fsum(m * r for m, r in zip(mass, ratio, strict=True))
        losses = [mp.log(r * total_q / total_p) for r in ratio]
        worst = float(max(abs(loss) for loss in losses)) * (1 + 1e-15)
        moment = mp.fsum(
            m / total_q * mp.exp(order * loss) for m, loss in zip(mass, losses, strict=True)
        )
        divergence = mp.log(moment) / (mp.mpf(order) - 1)
        assert divergence <= rdp_pure(worst, order) + mp.mpf("1e-40") / (mp.mpf(order) - 1)


@pytest.mark.slow
@given(epsilons, orders)
def test_laplace_noise_costs_less_than_randomized_response(epsilon, order):
    scale = 1 / epsilon
    assert rdp_laplace(scale, order) <= rdp_pure(1 / scale, order) * SLACK


@pytest.mark.slow
@given(epsilons, epsilons, orders, orders)
def test_the_curves_increase_in_epsilon_and_in_the_order(epsilon, other, order, higher):
    epsilon, other = sorted((epsilon, other))
    order, higher = sorted((order, higher))
    assert rdp_pure(epsilon, order) <= rdp_pure(other, order) * SLACK
    assert rdp_pure(epsilon, order) <= rdp_pure(epsilon, higher) * SLACK
    assert rdp_laplace(1 / epsilon, order) <= rdp_laplace(1 / other, order) * SLACK
    assert rdp_laplace(1 / epsilon, order) <= rdp_laplace(1 / epsilon, higher) * SLACK


def test_large_orders_tend_to_epsilon():
    assert rdp_pure(2.0, 1e9) == pytest.approx(2.0, rel=1e-8)
    assert rdp_laplace(0.5, 1e9) == pytest.approx(2.0, rel=1e-8)


@pytest.mark.slow
@given(st.lists(st.floats(1e-3, 3.0), min_size=1, max_size=5), orders)
def test_the_coordinates_of_a_vector_cost_at_most_their_l1_distance(shifts, order):
    parts = sum(rdp_laplace(1 / shift, order) for shift in shifts)
    assert parts <= rdp_laplace(1 / math.fsum(shifts), order) * (1 + 1e-11)


@given(st.floats(-40.0, 40.0), st.floats(1e-3, 30.0))
@example(1.0, 1.0)
@example(math.nextafter(10.0, 0.0), 10.0)
def test_profiles_are_not_below_their_high_precision_values(epsilon, strength):
    scale = 1 / strength
    with mp.workdps(100):
        e, t = mp.mpf(epsilon), 1 / mp.mpf(scale)
        exact = 1 - mp.exp(e) if e <= -t else max(mp.mpf(0), 1 - mp.exp((e - t) / 2))
        assert (
            exact - mp.mpf("1e-50")
            <= laplace_delta(epsilon, scale)
            <= exact * (1 + mp.mpf("2e-15")) + mp.mpf("1e-50")
        )
        w = mp.mpf(strength)
        p = mp.exp(w) / (1 + mp.exp(w))
        exact = max(mp.mpf(0), p - mp.exp(e) * (1 - p)) + max(mp.mpf(0), 1 - p - mp.exp(e) * p)
        assert (
            exact - mp.mpf("1e-50")
            <= pure_delta(epsilon, strength)
            <= exact * (1 + mp.mpf("3e-15")) + mp.mpf("1e-50")
        )


@pytest.mark.parametrize("epsilon", [-1.5, -0.3, 0.0, 0.4, 0.99])
def test_the_laplace_profile_is_the_integral_of_the_densities(epsilon):
    scale = 1.0

    def excess(x):
        return max(0.0, math.exp(-abs(x) / scale) - math.exp(epsilon - abs(x - 1) / scale)) / (
            2 * scale
        )

    value = sum(
        quad(excess, low, high, limit=200)[0]
        for low, high in [(-40, 0), (0, 0.5), (0.5, 1), (1, 40)]
    )
    assert laplace_delta(epsilon, scale) == pytest.approx(value, abs=1e-8)


@given(st.floats(0.0, 5.0), st.floats(0.01, 5.0))
def test_profiles_are_dual_at_negative_thresholds_and_ordered(epsilon, strength):
    for profile in (lambda e: laplace_delta(e, 1 / strength), lambda e: pure_delta(e, strength)):
        dual = -math.expm1(-epsilon) + math.exp(-epsilon) * profile(epsilon)
        assert profile(-epsilon) == pytest.approx(dual, rel=1e-12, abs=1e-15)
    assert (
        laplace_delta(epsilon, 1 / strength)
        <= pure_delta(epsilon, strength) * (1 + 1e-14) + 1e-15
    )
    assert pure_delta(math.nextafter(strength, math.inf), strength) == 0.0


@pytest.mark.parametrize("curve", [rdp_pure, lambda e, a: rdp_laplace(1 / e, a)])
def test_arrays_agree_with_scalars(curve):
    grid = np.concatenate([default_orders(), [2.0**20, 1.5]])
    values = curve(0.7, grid)
    assert values.shape == grid.shape
    assert np.array_equal(values, [curve(0.7, float(a)) for a in grid])
    assert isinstance(curve(0.7, 2.0), float)


def test_special_and_extreme_arguments():
    assert rdp_pure(0.0, 2.0) == 0.0 == rho_pure(0.0) == pure_delta(0.0, 0.0)
    assert rdp_pure(math.inf, 2.0) == rho_pure(math.inf) == rdp_laplace(0.0, 2.0) == math.inf
    assert laplace_delta(1.0, 0.0) == pure_delta(1.0, math.inf) == 1.0
    assert 0 < rdp_pure(1e-200, 2.0) <= 1e-200
    assert 0 < rho_pure(1e-200) <= 1e-200
    assert rdp_laplace(1e200, 2.0) > 0
    assert rdp_laplace(5e-324, 2.0) == math.inf
    assert rdp_pure(1e300, 1e300) == 1e300
    assert rdp_pure(0.3, np.empty(0)).shape == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: laplace_delta(math.inf, 1.0), "epsilon must be finite"),
        (lambda: laplace_delta(1.0, -1.0), "scale must be >= 0"),
        (lambda: pure_delta(1.0, -1.0), "pure_epsilon must be >= 0"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
