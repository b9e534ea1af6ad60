"""Groups: the rules against exact values, and the Poisson profile of a group against high precision."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.reference.papers.accounting import poisson_group_delta
from tests.reference.papers.mixtures import (
    group_approx_dp_delta,
    group_gdp_mu,
    rdp_poisson_gaussian_group,
)
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta
from torch_dpsco.accounting.analysis.rdp import rdp_epsilon

sizes = st.integers(1, 12)
orders = st.one_of(st.floats(1.001, 4.0), st.floats(1.0, 10.0).map(lambda x: 2**x)).filter(
    lambda a: a > 1
)
epsilons = st.floats(0.0, 6.0)


@given(st.floats(0.0, 5.0), st.floats(-300.0, 0.0).map(lambda x: 10**x), st.integers(1, 200))
@example(1e-12, 1e-6, 7)
@example(0.0, 1e-6, 7)
def test_group_delta_is_not_below_its_exact_value(epsilon, delta, size):
    with mp.workdps(60):
        exact = min(
            mp.mpf(1), mp.mpf(delta) * mp.fsum(mp.exp(i * mp.mpf(epsilon)) for i in range(size))
        )
        found = group_approx_dp_delta(epsilon, delta, size)
        assert exact <= found <= exact * (1 + mp.mpf("3e-12"))


def test_group_delta_is_one_where_it_overflows_and_zero_without_delta():
    assert group_approx_dp_delta(700.0, 5e-324, 1000) == 1.0
    assert group_approx_dp_delta(700.0, 0.0, 1000) == 0.0
    assert group_approx_dp_delta(1.0, 0.3, 1) == 0.3


@given(st.floats(1e-300, 1e300), st.integers(1, 10**6))
def test_products_are_not_below_their_exact_values(value, size):
    found, exact = group_gdp_mu(value, size), Fraction(value) * size
    assert math.isinf(found) or exact <= Fraction(found) <= exact * Fraction(10**15 + 1, 10**15)


def test_products_that_are_exact_stay_exact():
    assert group_gdp_mu(0.5, 3) == 1.5
    assert group_gdp_mu(math.inf, 3) == math.inf


def hockey_stick(size: int, rate: float, noise: float, epsilon: float, direction: str) -> mp.mpf:
    """By survival functions at the root of the loss, in enough digits for their difference."""
    q, z, e = (
        mp.mpf(rate),
        mp.mpf(noise),
        mp.mpf(epsilon),
    )  # epsilon may have more digits than a float
    weights = [mp.binomial(size, j) * q**j * (1 - q) ** (size - j) for j in range(size + 1)]

    def log_ratio(x):
        return mp.log(
            mp.fsum(w * mp.exp(j * (2 * x - j) / (2 * z * z)) for j, w in enumerate(weights))
        )

    def survival(x):
        return mp.erfc(x / mp.sqrt(2)) / 2

    level = e if direction == "remove" else -e
    low, high = -200 * (z * z + z) - 10, size + 200 * (z * z + z) + z * z * (e - mp.log(q))
    if log_ratio(low) >= level:
        return mp.mpf(0)
    for _ in range(230):
        middle = (low + high) / 2
        low, high = (middle, high) if log_ratio(middle) < level else (low, middle)
    if direction == "remove":
        mixture = mp.fsum(w * survival((low - j) / z) for j, w in enumerate(weights))
        return mixture - mp.exp(e) * survival(low / z)
    return survival(-low / z) - mp.exp(e) * mp.fsum(
        w * survival((j - low) / z) for j, w in enumerate(weights)
    )


@pytest.mark.weekly
@given(
    st.sampled_from([1, 2, 3, 8]),
    st.floats(-9.0, -0.001).map(lambda x: 10**x),
    st.floats(-1.7, 2.0).map(lambda x: 10**x),
    st.one_of(st.just(0.0), st.floats(-6.0, 1.3).map(lambda x: 10**x)),
    st.sampled_from(["remove", "add"]),
)
@settings(max_examples=60)
@example(1, 0.01, 5.0, 1.0, "remove")
@example(1, 0.5, 1.0, 0.69, "add")
@example(1, 0.001, 1.0, 0.001, "add")
@example(8, 0.3, 0.02, 1e-6, "add")
def test_poisson_group_delta_is_not_below_its_high_precision_value(
    size, rate, noise, epsilon, direction
):
    with mp.workdps(80):
        exact = hockey_stick(size, rate, noise, epsilon, direction)
        found = poisson_group_delta(size, rate, noise, epsilon, direction)
        if exact > mp.mpf("1e-290"):
            above = hockey_stick(size, rate, noise, epsilon * (1 - mp.mpf("1.1e-12")), direction)
            assert exact <= found <= above * (1 + mp.mpf("1.1e-9"))
        else:
            assert found < 1e-289


@pytest.mark.slow
@given(sizes, st.floats(1e-3, 1.0), st.floats(0.1, 10.0), st.floats(0.0, 4.0))
@settings(max_examples=40)
def test_the_poisson_profile_is_below_its_limits(size, rate, noise, epsilon):
    for direction in ("remove", "add"):
        delta = poisson_group_delta(size, rate, noise, epsilon, direction)
        assert 0 <= delta <= gaussian_delta(size / noise, epsilon) * (1 + 2e-9)
        assert delta <= poisson_group_delta(size + 1, rate, noise, epsilon, direction) * (
            1 + 2e-9
        )
        assert delta <= (1 - (1 - rate) ** size) * (
            1 + 2e-9
        )  # data processing: the null without the unit's records
        orders = np.array([1.5, 2.0, 4.0, 8.0, 32.0])
        cost = rdp_poisson_gaussian_group(rate, noise, size, orders, direction)
        if 1e-200 < delta < 1:
            assert rdp_epsilon(orders, cost, delta).epsilon >= epsilon * (1 - 1e-7)


def test_full_sampling_is_the_gaussian_mechanism_and_no_sampling_costs_nothing():
    for direction in ("remove", "add"):
        assert poisson_group_delta(3, 1.0, 2.0, 0.5, direction) == pytest.approx(
            gaussian_delta(1.5, 0.5), rel=1e-12
        )
        near = poisson_group_delta(3, 1 - 1e-12, 2.0, 0.5, direction)
        assert near == pytest.approx(gaussian_delta(1.5, 0.5), rel=1e-8)
        assert poisson_group_delta(3, 0.0, 0.0, 0.5, direction) == 0.0


def test_little_noise_counts_as_none():
    for noise in (0.0, 1e-5, 3e-4):
        remove, add = (
            poisson_group_delta(2, 0.3, noise, 0.2, direction) for direction in ("remove", "add")
        )
        assert remove == pytest.approx(1 - 0.49, rel=2e-9)
        assert add == pytest.approx(1 - math.exp(0.2) * 0.49, rel=2e-9)
    assert (
        poisson_group_delta(2, 1.0, 0.0, 5.0)
        == poisson_group_delta(2, 1.0, 0.0, 5.0, "add")
        == 1.0
    )
    assert poisson_group_delta(2, 0.3, 0.0, 5.0, "add") == 0.0


def test_extreme_arguments_give_probabilities():
    for noise in (1e-3, 1.0, 1e8, 1e200):
        for rate in (1e-300, 1e-9, 0.5, 1 - 1e-16):
            for epsilon in (0.0, 1e-9, 30.0, 1e6):
                for direction in ("remove", "add"):
                    assert 0 <= poisson_group_delta(2, rate, noise, epsilon, direction) <= 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_approx_dp_delta(-1.0, 0.1, 2), "epsilon must be >= 0"),
        (lambda: group_approx_dp_delta(1.0, 1.1, 2), "delta must be in"),
        (lambda: group_approx_dp_delta(1.0, 0.1, 0), "group_size must be an integer >= 1"),
        (lambda: group_gdp_mu(math.nan, 2), "mu must be >= 0"),
        (lambda: poisson_group_delta(1, 1.5, 1.0, 1.0), "sample_rate must be in"),
        (
            lambda: poisson_group_delta(1, 0.5, 1.0, 1.0, "both"),
            "direction must be one of remove, add",
        ),
        (lambda: poisson_group_delta(1, 0.5, -1.0, 1.0), "noise_multiplier must be >= 0"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
