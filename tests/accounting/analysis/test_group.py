"""Groups, two hops and users: every rule against exact pairs, and the Poisson profile against high precision."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from torch_dpsco.accounting.analysis.convert import rdp_epsilon
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_epsilon
from torch_dpsco.accounting.analysis.group import (
    RDPPoint,
    group_approx_dp_delta,
    group_delta,
    group_epsilon,
    group_gdp_mu,
    group_pure_epsilon,
    group_zcdp_rho,
    poisson_group_delta,
    rdp_group,
    rdp_group_point,
    rdp_replace_one,
    replace_one_delta,
    replace_one_epsilon,
    user_mu,
)
from torch_dpsco.accounting.analysis.pure import laplace_delta, rdp_laplace, rdp_pure
from torch_dpsco.accounting.analysis.rdp import (
    default_orders,
    rdp_gaussian,
    rdp_poisson_gaussian,
    rdp_poisson_gaussian_group,
    rdp_poisson_gaussian_replace_one,
)
from torch_dpsco.errors import AdjacencyError, ConditionError

sizes = st.integers(1, 12)
orders = st.one_of(st.floats(1.001, 4.0), st.floats(1.0, 10.0).map(lambda x: 2**x)).filter(lambda a: a > 1)
epsilons = st.floats(0.0, 6.0)


@given(st.floats(0.0, 5.0), st.floats(-300.0, 0.0).map(lambda x: 10**x), st.integers(1, 200))
@example(1e-12, 1e-6, 7)
@example(0.0, 1e-6, 7)
def test_group_delta_is_not_below_its_exact_value(epsilon, delta, size):
    with mp.workdps(60):
        exact = min(mp.mpf(1), mp.mpf(delta) * mp.fsum(mp.exp(i * mp.mpf(epsilon)) for i in range(size)))
        found = group_approx_dp_delta(epsilon, delta, size)
        assert exact <= found <= exact * (1 + mp.mpf("3e-12"))


def test_group_delta_is_one_where_it_overflows_and_zero_without_delta():
    assert group_approx_dp_delta(700.0, 5e-324, 1000) == 1.0
    assert group_approx_dp_delta(700.0, 0.0, 1000) == 0.0
    assert group_approx_dp_delta(1.0, 0.3, 1) == 0.3


@given(st.floats(1e-300, 1e300), st.integers(1, 10**6))
def test_products_are_not_below_their_exact_values(value, size):
    pairs = [
        (group_pure_epsilon(value, size), Fraction(value) * size),
        (group_zcdp_rho(value, size), Fraction(value) * size**2),
        (group_gdp_mu(value, size), Fraction(value) * size),
    ]
    for found, exact in pairs:
        assert math.isinf(found) or exact <= Fraction(found) <= exact * Fraction(10**15 + 1, 10**15)


def test_products_that_are_exact_stay_exact():
    assert (group_pure_epsilon(0.5, 3), group_zcdp_rho(0.5, 3), group_gdp_mu(0.5, 3)) == (1.5, 4.5, 1.5)
    assert group_pure_epsilon(math.inf, 3) == math.inf


@given(st.floats(0.05, 3.0), st.integers(1, 6), epsilons)
def test_a_group_under_gaussian_or_laplace_noise_costs_less_than_the_generic_rule(mu, size, epsilon):
    generic = group_delta(epsilon, lambda e: gaussian_delta(mu, e), size)
    assert gaussian_delta(group_gdp_mu(mu, size), epsilon) <= generic * (1 + 1e-9)
    generic = group_delta(epsilon, lambda e: laplace_delta(e, 1 / mu), size)
    assert laplace_delta(epsilon, 1 / (mu * size)) <= generic * (1 + 1e-9) + 1e-15


@given(st.floats(0.1, 50.0), sizes)
def test_group_delta_uses_no_more_than_its_epsilon(epsilon, size):
    used = []

    def curve(e):
        used.append(e)
        return 0.0

    assert group_delta(epsilon, curve, size) == 0.0
    assert size * Fraction(max(used)) <= Fraction(epsilon)
    assert size * max(used) >= epsilon * (1 - 1e-14)
    assert min(used) == 0.0


def test_a_flat_curve_is_best_used_at_a_small_epsilon():
    """An (epsilon, delta) event has the same delta from its epsilon on: going further only costs e^epsilon."""
    assert group_delta(8.0, lambda e: 1e-6 if e >= 1 else 1.0, 2) == pytest.approx(1e-6 * (1 + math.e), rel=0.15)


@given(st.floats(0.02, 1.0), st.integers(1, 5), st.floats(-10.0, -1.0).map(lambda x: 10**x))
@settings(max_examples=10)
def test_the_epsilon_of_a_group_is_the_least_with_its_delta(mu, size, delta):
    def curve(e):
        return gaussian_delta(mu, e)

    epsilon = group_epsilon(delta, curve, size)
    assert group_delta(epsilon, curve, size) <= delta
    assert epsilon == 0 or group_delta(epsilon * (1 - 1e-6) - 1e-8, curve, size) > delta
    assert epsilon >= gaussian_epsilon(size * mu, delta) * (1 - 1e-9)


def test_a_curve_that_never_falls_gives_an_infinite_epsilon():
    assert group_epsilon(1e-6, lambda e: 1e-5, 2) == math.inf
    assert replace_one_epsilon(1e-6, lambda e: 1e-6) == math.inf
    assert replace_one_epsilon(0.5, lambda e: 0.01) == 0.0


@given(st.floats(0.02, 2.0), epsilons)
@settings(max_examples=60)
def test_two_hops_are_never_below_the_exact_replacement(mu, epsilon):
    """Replacing moves a Gaussian or a Laplace center by twice as much, and shifts randomized response twice."""
    two = replace_one_delta(epsilon, lambda e: gaussian_delta(mu, e))
    assert gaussian_delta(2 * mu, epsilon) <= two * (1 + 1e-10)
    assert (
        laplace_delta(epsilon, 1 / (2 * mu)) <= replace_one_delta(epsilon, lambda e: laplace_delta(e, 1 / mu)) + 1e-15
    )
    even = group_delta(epsilon, lambda e: gaussian_delta(mu, e), 2)
    assert two <= even * (1 + 1e-9)


@given(st.floats(1e-4, 0.9), st.floats(0.3, 5.0), st.floats(0.01, 3.0))
@settings(max_examples=40)
def test_two_hops_of_the_poisson_profile_bound_its_replace_one_pair(rate, noise, epsilon):
    """H of (1-q) N(0) + q N(1) over (1-q) N(0) + q N(-1), by a Riemann sum."""
    x = np.arange(-1 - 12 * noise, 1 + 12 * noise, noise / 200)
    null, up, down = (np.exp(-((x - at) ** 2) / (2 * noise**2)) for at in (0, 1, -1))
    p, q = (1 - rate) * null + rate * up, (1 - rate) * null + rate * down
    exact = np.sum(np.maximum(p - math.exp(epsilon) * q, 0)) / 200 / math.sqrt(2 * math.pi)

    def curve(e):
        return max(poisson_group_delta(1, rate, noise, e, direction) for direction in ("remove", "add"))

    assert exact <= replace_one_delta(epsilon, curve) + 1e-6


@given(st.lists(st.lists(st.floats(0.02, 1.0), min_size=4, max_size=4), min_size=3, max_size=6), orders)
@settings(max_examples=200)
def test_the_chain_of_renyi_hops_bounds_any_chain_of_distributions(masses, order):
    """D_a of the ends of a random chain, against the rule with the true divergence of the worst hop at each order."""
    chain = np.array(masses) / np.sum(masses, axis=1, keepdims=True)
    loss = np.log(chain[:-1]) - np.log(chain[1:])

    def divergence(p, log_ratio, a):
        return logsumexp((a - 1) * log_ratio, b=p, axis=-1) / (a - 1)

    def worst_hop(block):
        return np.array([divergence(chain[:-1], loss, a).max() for a in block])

    exact = divergence(chain[0], np.log(chain[0]) - np.log(chain[-1]), order)
    assert exact <= rdp_group(worst_hop, len(loss), order) + 1e-9


@given(st.floats(0.05, 5.0), sizes, orders)
@settings(max_examples=60)
def test_the_chain_is_exact_for_gaussians_and_above_exact_laplace_and_pure_costs(strength, size, order):
    chain = rdp_group(lambda a: rdp_gaussian(a, 1 / strength), size, order)
    assert chain == pytest.approx(rdp_gaussian(order, 1 / (size * strength)), rel=1e-11)
    chain = rdp_group(lambda a: rdp_laplace(1 / strength, a), size, order)
    assert rdp_laplace(1 / (size * strength), order) <= chain * (1 + 1e-11)
    assert rdp_pure(strength, order) <= rdp_group(lambda a: rdp_pure(strength, a), size, order) * (1 + 1e-12)


@given(st.floats(1e-3, 0.5), st.floats(0.6, 20.0), st.integers(2, 5), st.floats(1.05, 40.0))
@settings(max_examples=30)
def test_the_poisson_mixture_of_a_group_costs_less_than_the_chain(rate, noise, size, order):
    chain = rdp_group(lambda a: rdp_poisson_gaussian(rate, noise, a), size, order)
    for direction in ("remove", "add"):
        assert rdp_poisson_gaussian_group(rate, noise, size, order, direction) <= chain
    two = rdp_replace_one(lambda a: rdp_poisson_gaussian(rate, noise, a), order)
    assert rdp_poisson_gaussian_replace_one(rate, noise, order) <= two


@given(st.floats(0.05, 5.0), st.integers(1, 9), st.floats(2.0, 64.0))
def test_the_chain_is_below_the_doubling_rule_and_below_the_textbook_two_hops(strength, size, order):
    for curve in (lambda a: rdp_laplace(1 / strength, a), lambda a: rdp_pure(strength, a), lambda a: 0 * a + 1.0):
        doublings = (size - 1).bit_length()
        high = order * 2**doublings
        point = rdp_group_point(high, float(curve(np.array([high]))[0]), size)
        assert point.order == order
        assert rdp_group(curve, size, order) <= point.value * (1 + 1e-11)
        two = np.array([2 * order, 2 * order - 1])
        textbook = (order - 0.5) / (order - 1) * curve(two)[0] + curve(two)[1]
        assert rdp_replace_one(curve, order) <= textbook * (1 + 1e-11)


@given(st.floats(0.05, 5.0), st.sampled_from([2, 3, 4, 8]), st.floats(2.0, 64.0))
def test_the_doubling_rule_bounds_gaussian_and_laplace_groups(strength, size, order):
    doublings = (size - 1).bit_length()
    high = order * 2**doublings
    point = rdp_group_point(high, rdp_gaussian(high, 1 / strength), size)
    assert rdp_gaussian(order, 1 / (size * strength)) <= point.value
    point = rdp_group_point(high, rdp_laplace(1 / strength, high), size)
    assert rdp_laplace(1 / (size * strength), order) <= point.value * (1 + 1e-11)


def test_the_doubling_rule_refuses_orders_below_its_condition():
    assert rdp_group_point(1.5, 0.25, 1) == RDPPoint(1.5, 0.25)
    assert rdp_group_point(4.0, 0.25, 2) == RDPPoint(2.0, 0.75)
    for size, least in [(2, 4), (3, 8), (4, 8), (5, 16)]:
        assert rdp_group_point(least, 1.0, size).order == 2.0
        with pytest.raises(ConditionError, match=f"order must be >= {least}"):
            rdp_group_point(math.nextafter(least, 0), 1.0, size)


def test_arrays_of_orders_agree_with_scalars():
    grid = np.array([1.01, 64.0, 2.0, 3.7])
    values = rdp_group(lambda a: rdp_laplace(1.0, a), 3, grid)
    assert np.array_equal(values, [rdp_group(lambda a: rdp_laplace(1.0, a), 3, float(a)) for a in grid])


def test_measured_epsilons_of_the_group_bound_for_poisson_sampling():
    """sigma = 1, n = 60000, b = 256, one epoch: the exact pair 0.530 (PLD), two hops of PLD 0.884; by Renyi below."""
    grid = default_orders()
    grid = grid[grid <= 4096]

    def curve(a):
        return 235 * rdp_poisson_gaussian(256 / 60000, 1.0, a)

    exact = rdp_epsilon(grid, 235 * rdp_poisson_gaussian_replace_one(256 / 60000, 1.0, grid), 1e-5).epsilon
    two_hops = rdp_epsilon(grid, rdp_replace_one(curve, grid), 1e-5).epsilon
    assert exact == pytest.approx(0.9899, abs=1e-4)
    assert exact < two_hops < 2.2157


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize(("items", "passes"), [(1, 1), (4, 3), (7, 10)])
def test_the_items_of_a_user_move_each_release_by_their_number(adjacency, items, passes):
    """The exact GDP parameter is the norm of the vector of mean shifts over the noise."""
    spread = [1] * (items * passes)
    joint = [items] * passes
    factor = 2 if adjacency == "replace_one" else 1
    for counts in (spread, joint):
        exact = factor * np.linalg.norm(counts) / 1.7
        assert exact <= user_mu(counts, 1.7, adjacency) * (1 + 1e-14)
        assert user_mu(counts, 1.7, adjacency) <= exact * (1 + 1e-14)
    bound = factor * items * math.sqrt(passes) / 1.7
    assert user_mu(spread, 1.7, adjacency) <= user_mu(joint, 1.7, adjacency) == pytest.approx(bound, rel=1e-14)


def test_users_who_are_added_or_removed_are_refused():
    with pytest.raises(AdjacencyError, match="zero_out or replace_one"):
        user_mu([1], 1.0, "add_remove")
    assert user_mu([], 1.0, "zero_out") == 0.0


def hockey_stick(size: int, rate: float, noise: float, epsilon: float, direction: str) -> mp.mpf:
    """By survival functions at the root of the loss, in enough digits for their difference."""
    q, z, e = mp.mpf(rate), mp.mpf(noise), mp.mpf(epsilon)  # epsilon may have more digits than a float
    weights = [mp.binomial(size, j) * q**j * (1 - q) ** (size - j) for j in range(size + 1)]

    def log_ratio(x):
        return mp.log(mp.fsum(w * mp.exp(j * (2 * x - j) / (2 * z * z)) for j, w in enumerate(weights)))

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
    return survival(-low / z) - mp.exp(e) * mp.fsum(w * survival((j - low) / z) for j, w in enumerate(weights))


@pytest.mark.slow
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
def test_poisson_group_delta_is_not_below_its_high_precision_value(size, rate, noise, epsilon, direction):
    with mp.workdps(80):
        exact = hockey_stick(size, rate, noise, epsilon, direction)
        found = poisson_group_delta(size, rate, noise, epsilon, direction)
        if exact > mp.mpf("1e-290"):
            above = hockey_stick(size, rate, noise, epsilon * (1 - mp.mpf("1.1e-12")), direction)
            assert exact <= found <= above * (1 + mp.mpf("1.1e-9"))
        else:
            assert found < 1e-289


@given(sizes, st.floats(1e-3, 1.0), st.floats(0.1, 10.0), st.floats(0.0, 4.0))
@settings(max_examples=40)
def test_the_poisson_profile_is_below_its_limits(size, rate, noise, epsilon):
    for direction in ("remove", "add"):
        delta = poisson_group_delta(size, rate, noise, epsilon, direction)
        assert 0 <= delta <= gaussian_delta(size / noise, epsilon) * (1 + 2e-9)
        assert delta <= poisson_group_delta(size + 1, rate, noise, epsilon, direction) * (1 + 2e-9)
        assert delta <= (1 - (1 - rate) ** size) * (1 + 2e-9)  # data processing: the null without the unit's records
        orders = np.array([1.5, 2.0, 4.0, 8.0, 32.0])
        cost = rdp_poisson_gaussian_group(rate, noise, size, orders, direction)
        if 1e-200 < delta < 1:
            assert rdp_epsilon(orders, cost, delta).epsilon >= epsilon * (1 - 1e-7)


def test_full_sampling_is_the_gaussian_mechanism_and_no_sampling_costs_nothing():
    for direction in ("remove", "add"):
        assert poisson_group_delta(3, 1.0, 2.0, 0.5, direction) == pytest.approx(gaussian_delta(1.5, 0.5), rel=1e-12)
        near = poisson_group_delta(3, 1 - 1e-12, 2.0, 0.5, direction)
        assert near == pytest.approx(gaussian_delta(1.5, 0.5), rel=1e-8)
        assert poisson_group_delta(3, 0.0, 0.0, 0.5, direction) == 0.0


def test_little_noise_counts_as_none():
    for noise in (0.0, 1e-5, 3e-4):
        remove, add = (poisson_group_delta(2, 0.3, noise, 0.2, direction) for direction in ("remove", "add"))
        assert remove == pytest.approx(1 - 0.49, rel=2e-9)
        assert add == pytest.approx(1 - math.exp(0.2) * 0.49, rel=2e-9)
    assert poisson_group_delta(2, 1.0, 0.0, 5.0) == poisson_group_delta(2, 1.0, 0.0, 5.0, "add") == 1.0
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
        (lambda: group_zcdp_rho(-1.0, 2), "rho must be >= 0"),
        (lambda: group_gdp_mu(math.nan, 2), "mu must be >= 0"),
        (lambda: group_pure_epsilon(1.0, 1.5), "group_size must be an integer"),
        (lambda: group_delta(-1.0, lambda e: 0.0, 2), "epsilon must be >= 0"),
        (lambda: group_epsilon(0.0, lambda e: 0.0, 2), "delta must be in"),
        (lambda: replace_one_delta(1.0, lambda e: 2.0), "delta must be in"),
        (lambda: replace_one_epsilon(1.0, lambda e: 0.0), "delta must be in"),
        (lambda: rdp_group(lambda a: a, 0, 2.0), "group_size must be an integer >= 1"),
        (lambda: rdp_replace_one(lambda a: a, 1.0), "order must be finite and > 1"),
        (lambda: rdp_group_point(4.0, -1.0, 2), "value must be >= 0"),
        (lambda: user_mu([1], 0.0, "zero_out"), "noise_multiplier must be > 0"),
        (lambda: user_mu([-1], 1.0, "zero_out"), "items_per_release must be an integer >= 0"),
        (lambda: user_mu([1], 1.0, "both"), "adjacency must be one of zero_out, replace_one"),
        (lambda: poisson_group_delta(1, 1.5, 1.0, 1.0), "sample_rate must be in"),
        (lambda: poisson_group_delta(1, 0.5, 1.0, 1.0, "both"), "direction must be one of remove, add"),
        (lambda: poisson_group_delta(1, 0.5, -1.0, 1.0), "noise_multiplier must be >= 0"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
