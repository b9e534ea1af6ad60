"""zCDP: conversions against a brute-force minimum and on the safe side, compositions against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath as mp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.reference.papers.accounting import (
    compose_parallel,
    compose_sequential,
    zcdp_epsilon_bs16,
    zcdp_rho,
    zcdp_rho_bs16,
)
from torch_dpsco.accounting.analysis.gaussian import gaussian_epsilon
from torch_dpsco.accounting.analysis.rdp import rdp_epsilon, zcdp_epsilon

rhos = st.floats(1e-12, 1e6)
epsilons = st.one_of(st.just(0.0), st.floats(1e-9, 1e4))
deltas = st.one_of(st.floats(1e-300, 1e-3), st.floats(1e-3, 1 - 1e-9))


def epsilon_at(b: mp.mpf, rho: float, delta: float) -> mp.mpf:
    return (1 + b) * rho - mp.log1p(1 / b) - (mp.log(delta) + mp.log1p(b)) / b


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("rho", [1e-12, 1e-3, 1.0, 1e5])
@pytest.mark.parametrize("delta", [1e-200, 1e-5, 0.9])
def test_epsilon_is_the_brute_force_minimum(rho, delta):
    grid = [mp.exp(mp.mpf(i) / 10) for i in range(-150, 450)]
    near = min(grid, key=lambda b: epsilon_at(b, rho, delta))
    brute = max(mp.mpf(0), epsilon_at(near, rho, delta))
    fine = max(
        mp.mpf(0),
        min(epsilon_at(near * mp.exp(mp.mpf(i) / 1000), rho, delta) for i in range(-100, 101)),
    )
    found = zcdp_epsilon(rho, delta)
    assert found <= brute
    assert found == pytest.approx(float(fine), rel=1e-6, abs=1e-12)


@pytest.mark.slow
@given(rhos, deltas)
@example(0.1, 1e-5)
def test_no_order_of_the_exact_curve_beats_epsilon_by_rounding(rho, delta):
    """The value returned is at least the exact minimum: the formula at its own optimal order, in 40 digits."""
    with mp.workdps(40):
        target = -mp.log(delta)
        # rho b^2 + log(1 + b) is at most target on the left and at least target on the right
        left, right = mp.mpf(0), min(mp.expm1(target), mp.sqrt(target / rho))
        for _ in range(140):
            middle = (left + right) / 2
            left, right = (
                (middle, right)
                if rho * middle**2 + mp.log1p(middle) < target
                else (left, middle)
            )
        assert zcdp_epsilon(rho, delta) >= epsilon_at(right, rho, delta) * (1 - mp.mpf("1e-30"))


@given(epsilons, deltas)
@example(0.0, 1e-300)
@example(1e4, 1 - 1e-9)
def test_zcdp_conversions_are_on_the_safe_side(epsilon, delta):
    rho = zcdp_rho(epsilon, delta)
    assert rho >= 0
    assert zcdp_epsilon(rho, delta) <= epsilon
    assert zcdp_epsilon(rho * (1 + 1e-6) + 1e-290, delta) >= epsilon * (1 - 1e-9)


@given(rhos, rhos, deltas, deltas)
def test_epsilon_is_monotone_in_rho_and_delta(rho, other_rho, delta, other_delta):
    rho, other_rho = sorted((rho, other_rho))
    delta, other_delta = sorted((delta, other_delta))
    epsilon = zcdp_epsilon(rho, delta)
    assert epsilon <= zcdp_epsilon(other_rho, delta) * (1 + 1e-13)
    assert epsilon >= zcdp_epsilon(rho, other_delta) * (1 - 1e-13)


@pytest.mark.slow
@given(st.floats(1e-6, 100.0), st.floats(1e-12, 0.1))
def test_the_exact_gaussian_is_below_zcdp_and_zcdp_below_the_textbook_bound(rho, delta):
    epsilon = zcdp_epsilon(rho, delta)
    assert gaussian_epsilon(math.sqrt(2 * rho), delta) <= epsilon * (1 + 1e-9)
    assert epsilon <= zcdp_epsilon_bs16(rho, delta)


@given(st.floats(1e-4, 10.0), st.floats(1e-12, 0.01))
def test_the_optimal_order_beats_a_grid_of_orders(rho, delta):
    orders = [1.05, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 1000.0]
    assert zcdp_epsilon(rho, delta) <= rdp_epsilon(
        orders, [rho * a for a in orders], delta
    ).epsilon * (1 + 1e-12)


def test_measured_values_of_one_release():
    assert zcdp_epsilon(0.1, 1e-5) == pytest.approx(1.914, abs=5e-4)
    assert gaussian_epsilon(math.sqrt(0.2), 1e-5) == pytest.approx(1.760, abs=5e-4)
    assert zcdp_epsilon_bs16(0.1, 1e-5) == pytest.approx(2.246, abs=5e-4)


def test_nothing_released_costs_nothing():
    assert zcdp_epsilon(0.0, 1e-9) == 0.0


def test_tiny_deltas_do_not_overflow():
    for delta in (5e-324, 1e-310):
        assert 0 < zcdp_epsilon(1.0, delta) < 60
        assert 0 < zcdp_rho(1.0, delta) < 1e-3
        assert zcdp_rho(0.0, delta) == 0.0


@pytest.mark.slow
@given(st.one_of(rhos, st.floats(0.0, 1e-300)), deltas, epsilons)
@example(5e-324, 1e-5, 1e-160)
@example(0.0, 0.5, 0.0)
def test_textbook_bounds_are_rounded_safely(rho, delta, epsilon):
    with mp.workdps(40):
        log_inverse = -mp.log(delta)
        exact = rho + 2 * mp.sqrt(rho * log_inverse)
        assert exact <= zcdp_epsilon_bs16(rho, delta) <= exact * (1 + mp.mpf("3e-15"))
        inverse = (mp.sqrt(epsilon + log_inverse) - mp.sqrt(log_inverse)) ** 2
        found = zcdp_rho_bs16(epsilon, delta)
        assert inverse * (1 - mp.mpf("2e-14")) - 2e-300 <= found <= inverse
    assert zcdp_epsilon_bs16(found, delta) <= epsilon


@given(rhos, epsilons, deltas)
def test_the_textbook_bounds_are_never_tighter_than_the_optimal_order(rho, epsilon, delta):
    assert zcdp_epsilon(rho, delta) <= zcdp_epsilon_bs16(rho, delta) * (1 + 1e-13)
    assert zcdp_rho(epsilon, delta) >= zcdp_rho_bs16(epsilon, delta) * (1 - 2e-12)


@given(
    st.lists(
        st.one_of(st.just(0.0), st.floats(5e-324, 1e300), st.floats(1e-6, 1.0)), max_size=12
    )
)
@example([0.1] * 10)
@example([1e16, 1.0, 1.0])
@example([1e308, 1e308])
def test_the_sequential_sum_is_the_exact_one_rounded_up(values):
    exact, found = sum(map(Fraction, values)), compose_sequential(values)
    if math.isinf(found):
        assert exact > Fraction(1.7e308)
        return
    assert exact <= Fraction(found)
    assert exact == Fraction(found) or exact > Fraction(math.nextafter(found, 0.0))


@given(st.lists(st.floats(0.0, 1e6), max_size=8), st.lists(st.floats(0.0, 1e6), max_size=8))
def test_composition_does_not_depend_on_order_and_parts_cost_less_than_a_sequence(first, second):
    both = [*first, *second]
    assert compose_sequential(both) == compose_sequential([*second, *first])
    assert compose_parallel(both) == max(compose_parallel(first), compose_parallel(second))
    assert (
        compose_parallel(both)
        <= compose_sequential(both)
        <= len(both) * compose_parallel(both) * (1 + 1e-15)
    )


def test_compositions_of_nothing_and_of_a_release_without_noise():
    assert compose_sequential([]) == compose_parallel([]) == 0.0
    assert compose_sequential(iter([0.5])) == compose_parallel(iter([0.5])) == 0.5
    assert compose_sequential([0.1, math.inf]) == compose_parallel([0.1, math.inf]) == math.inf


@pytest.mark.slow
@given(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=6), st.floats(1e-10, 0.1))
def test_the_sum_of_rhos_is_that_of_the_merged_gaussian(mus, delta):
    rho = compose_sequential([mu * mu / 2 for mu in mus])
    merged = math.sqrt(math.fsum(mu * mu for mu in mus))
    assert rho == pytest.approx(merged**2 / 2, rel=1e-14)
    assert gaussian_epsilon(merged, delta) <= zcdp_epsilon(rho, delta) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zcdp_epsilon_bs16(-1.0, 1e-5), "rho must be >= 0"),
        (lambda: zcdp_epsilon_bs16(1.0, 1.0), "delta must be in"),
        (lambda: zcdp_rho_bs16(math.nan, 1e-5), "epsilon must be >= 0"),
        (lambda: zcdp_rho_bs16(1.0, 0.0), "delta must be in"),
        (lambda: compose_sequential([0.1, -0.1]), "rhos must be >= 0"),
        (lambda: compose_parallel([0.1, math.nan]), "rhos must be >= 0"),
        (lambda: compose_parallel(["0.1"]), "rhos must be a number"),
        (lambda: zcdp_rho(1.0, 1.0), "delta must be in"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
