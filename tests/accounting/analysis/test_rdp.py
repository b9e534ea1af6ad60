"""Renyi curves under Poisson sampling: against high precision, other libraries, brute-force pairs and known figures.

Fixed-size batches are in test_wor.py.
"""

from __future__ import annotations

import math

import dp_accounting
import mpmath as mp
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gammaln

from tests.reference.papers.accounting import (
    rdp_gaussian,
    rdp_poisson_replace_one_profile,
    rdp_wor_gaussian_wbk,
)
from tests.reference.papers.mixtures import (
    PoissonMixture,
    rdp_poisson_gaussian,
    rdp_poisson_gaussian_group,
)
from tests.reference.papers.orders import rdp_poisson_gaussian_replace_one, rdp_wor_gaussian
from torch_dpsco.accounting.analysis.rdp import default_orders, rdp_epsilon

rates = st.one_of(st.floats(1e-9, 1.0), st.floats(-9.0, 0.0).map(lambda x: 10**x))
noises = st.floats(-2.0, 4.0).map(lambda x: 10**x)
orders = st.one_of(st.floats(1.001, 100.0), st.floats(2.0, 14.0).map(lambda x: 2**x))
SLACK = 1 + 2e-12  # two curves, each rounded up by 1e-12

CURVES = {
    "remove": lambda q, z, a: rdp_poisson_gaussian(q, z, a, "remove"),
    "add": lambda q, z, a: rdp_poisson_gaussian(q, z, a, "add"),
    "replace": rdp_poisson_gaussian_replace_one,
    "group of 3, remove": lambda q, z, a: rdp_poisson_gaussian_group(q, z, 3, a, "remove"),
    "group of 3, add": lambda q, z, a: rdp_poisson_gaussian_group(q, z, 3, a, "add"),
    "wor": rdp_wor_gaussian,
    "wbk": rdp_wor_gaussian_wbk,
    "profile": lambda q, z, a: rdp_poisson_replace_one_profile(a, z, q),
}
SHIFT = {"replace": 2.0, "group of 3, remove": 3.0, "group of 3, add": 3.0}


def by_trapezoid(pair: str, rate: float, noise: float, order: float, size: int = 1) -> mp.mpf:
    """D_a from E_Q[phi_a(P/Q)] by the trapezoid rule in 50 digits, at every point that float64 does not rule out.

    The step is far below the distance pi z^2 of the branch points and below z, where the rule is exact to 1e-30. The
    peak of the pair "add" is narrower at large orders: half the step.
    """
    step = min(noise / 5, noise**2 / 4) / (2 if pair == "add" else 1)
    depth = noise**2 * (abs(math.log1p(-rate) - math.log(rate)) + math.log(size * order) + 60)
    low = -size - 12 * noise - (min(size * order, depth) if pair == "add" else 0)
    x = np.arange(low, (2 if pair == "replace" else size) * order + 12 * noise, step)

    def log_mixture(x):
        parts = [
            math.log(math.comb(size, j))
            + j * math.log(rate)
            + (size - j) * math.log1p(-rate)
            - (x - j) ** 2 / 2 / noise**2
            for j in range(size + 1)
        ]
        return np.logaddexp.reduce(parts, axis=0)

    null = log_mixture(-x) if pair == "replace" else -(x**2) / 2 / noise**2
    base, ratio = (
        (null, log_mixture(x) - null)
        if pair != "add"
        else (log_mixture(x), null - log_mixture(x))
    )
    size_of_phi = np.maximum(order * ratio, 0) + 2 * np.minimum(
        0, np.log(order * np.abs(ratio) + 1e-300)
    )
    kept = x[base + size_of_phi > np.max(base + size_of_phi) - 50]
    with mp.workdps(50):
        q, z, a = mp.mpf(rate), mp.mpf(noise), mp.mpf(order)

        def mixture(x):
            weights = [
                mp.binomial(size, j) * q**j * (1 - q) ** (size - j) for j in range(size + 1)
            ]
            return mp.fsum(
                w * mp.exp(-((x - j) ** 2) / (2 * z * z)) for j, w in enumerate(weights)
            )

        def integrand(x):
            p, q0 = (
                mixture(x),
                mixture(-x) if pair == "replace" else mp.exp(-x * x / (2 * z * z)),
            )
            p, q0 = (q0, p) if pair == "add" else (p, q0)
            return q0 * ((p / q0) ** a - 1 - a * (p / q0 - 1))

        points = [mp.mpf(low) + mp.mpf(step) * round((value - low) / step) for value in kept]
        excess = mp.fsum(integrand(point) for point in points) * step / (z * mp.sqrt(2 * mp.pi))
        return mp.log1p(excess) / (a - 1)


AWKWARD = [
    ("remove", 1e-9, 0.7, 1.001),
    ("remove", 1e-9, 1e6, 1.5),
    ("remove", 0.01, 0.05, 1.001),
    ("remove", 0.3, 0.02, 2.5),
    ("remove", 0.1, 0.15, 1.5),
    ("remove", 1e-3, 0.1, 1.05),
    ("remove", 1e-4, 4.0, 1.1),
    ("remove", 0.01, 20.0, 16384.0),
    ("remove", 1e-6, 300.0, 16384.5),
    ("remove", 1 - 1e-9, 3.0, 40.7),
    ("add", 1e-9, 0.7, 1.001),
    ("add", 0.5, 0.02, 1.03),
    ("add", 0.1, 0.15, 1.5),
    ("add", 0.5, 5.0, 16384.0),
    ("add", 1 - 1e-9, 3.0, 40.7),
    ("add", 1 - 1e-6, 30.0, 2000.5),
    ("replace", 1e-9, 0.7, 1.001),
    ("replace", 0.2, 0.05, 1.01),
    ("replace", 2.5e-5, 0.154, 1.002),
    ("replace", 1e-3, 0.1, 1.05),
    ("replace", 1e-3, 1e8, 3.3),
    ("replace", 0.01, 12.0, 16384.0),
    ("replace", 1 - 1e-9, 3.0, 40.7),
]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("pair", "rate", "noise", "order"), AWKWARD)
def test_no_curve_is_below_its_high_precision_value(pair, rate, noise, order):
    exact = by_trapezoid(pair, rate, noise, order)
    assert exact <= CURVES[pair](rate, noise, order) <= exact * (1 + mp.mpf("1.2e-12"))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("direction", "rate", "noise", "size", "order"),
    [
        ("remove", 1e-8, 4.5, 5, 2.7),
        ("remove", 0.12, 0.25, 5, 1.03),
        ("remove", 0.05, 60.0, 20, 500.5),
        ("remove", 0.9, 2.0, 3, 64.0),
        ("add", 1e-8, 4.5, 5, 2.7),
        ("add", 0.7, 0.2, 5, 1.04),
        ("add", 0.5, 20.0, 20, 500.5),
        ("add", 0.2, 0.05, 2, 1.003),
    ],
)
def test_no_group_curve_is_below_its_high_precision_value(direction, rate, noise, size, order):
    exact = by_trapezoid(direction, rate, noise, order, size)
    value = rdp_poisson_gaussian_group(rate, noise, size, order, direction)
    assert exact <= value <= exact * (1 + mp.mpf("1.2e-12"))


def by_binomial_sum(rate: float, noise: float, order: int) -> mp.mpf:
    """D_a(mixture || Gaussian) at an integer order, in 40 digits, from every term that float64 does not rule out."""
    i = np.arange(2.0, order + 1)
    power = i * (i - 1) / 2 / noise**2
    size_of_term = (
        gammaln(order + 1)
        - gammaln(i + 1)
        - gammaln(order - i + 1)
        + i * (math.log(rate) - math.log1p(-rate))
    )
    size_of_term += power + np.log(-np.expm1(-power))
    with mp.workdps(40):
        q, excess, term, previous = mp.mpf(rate), mp.mpf(0), mp.mpf(0), -1
        for j in (int(k) for k in i[size_of_term > size_of_term.max() - 50]):
            if j == previous + 1:
                term *= mp.mpf(order - j + 1) / j * q / (1 - q)
            else:
                term = mp.binomial(order, j) * q**j * (1 - q) ** (order - j)
            previous = j
            excess += term * mp.expm1(mp.mpf(j * (j - 1)) / (2 * mp.mpf(noise) ** 2))
        return mp.log1p(excess) / (order - 1)


@pytest.mark.parametrize("order", [2, 3, 64, 500])
@pytest.mark.parametrize(
    ("rate", "noise"), [(1e-9, 0.5), (0.004, 1.0), (0.02, 20.0), (0.5, 100.0), (0.999, 1e4)]
)
def test_integer_orders_agree_with_the_binomial_sum(rate, noise, order):
    exact = by_binomial_sum(rate, noise, order)
    assert (
        exact
        <= rdp_poisson_gaussian(rate, noise, float(order))
        <= exact * (1 + mp.mpf("1.2e-12"))
    )


def test_the_last_order_of_the_grid_agrees_with_the_binomial_sum():
    exact = by_binomial_sum(0.02, 20.0, 16384)
    assert exact <= rdp_poisson_gaussian(0.02, 20.0, 16384.0) <= exact * (1 + mp.mpf("1.2e-12"))


any_rates = st.one_of(
    st.floats(-7.0, -0.01).map(lambda x: 10**x),
    st.floats(-7.0, -0.3).map(lambda x: 1 - 10**x),
    st.sampled_from([1e-7, 256 / 60000, 1 - 1e-7]),
)
any_noises = st.floats(-1.0, 2.0).map(lambda x: 10**x)


@pytest.mark.slow
@given(any_rates, any_noises, st.lists(st.floats(1.0, 20.0), min_size=1, max_size=4))
@settings(max_examples=60)
def test_integer_orders_of_any_grid_agree_with_the_binomial_sum(rate, noise, logarithms):
    """The orders are evaluated together with others, of their own blocks and of other ones."""
    chosen = np.round(2 ** np.array(logarithms))
    grid = np.concatenate([default_orders(), chosen])
    values = rdp_poisson_gaussian(rate, noise, grid)[-chosen.size :]
    for order, value in zip(chosen, values, strict=True):
        exact = by_binomial_sum(rate, noise, int(order))
        assert exact <= value <= exact * (1 + mp.mpf("1.2e-12"))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("pair", ["remove", "add", "replace"])
@given(
    any_rates,
    any_noises,
    st.one_of(st.floats(-3.0, 0.0).map(lambda x: 1 + 10**x), st.floats(2.0, 500.0)),
)
@settings(max_examples=25)
def test_any_order_of_any_grid_agrees_with_its_high_precision_value(pair, rate, noise, order):
    exact = by_trapezoid(pair, rate, noise, order)
    value = CURVES[pair](rate, noise, np.append(default_orders(), order))[-1]
    assert exact <= value <= exact * (1 + mp.mpf("1.2e-12"))


@pytest.mark.parametrize("rate", [1e-3, 0.05, 0.5])
@pytest.mark.parametrize("noise", [0.4, 1.0, 5.0])
def test_epsilon_agrees_with_dp_accounting_at_integer_orders(rate, noise):
    for order in (2, 5, 32, 256):
        accountant = RdpAccountant([order])
        step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
        accountant.compose(step, 1000)
        ours = rdp_epsilon(
            [order], [1000 * rdp_poisson_gaussian(rate, noise, float(order))], 1e-6
        ).epsilon
        assert ours == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-9)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize(
    "pair", [pair for pair in CURVES if pair != "wbk"]
)  # that bound is not monotone
@given(rates, noises, orders, orders)
@settings(max_examples=30)
def test_every_curve_increases_with_the_order(pair, rate, noise, order, other):
    order, other = sorted((order, other))
    assert CURVES[pair](rate, noise, order) <= CURVES[pair](rate, noise, other) * SLACK


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("pair", CURVES)
@given(rates, noises, noises, orders)
@settings(max_examples=30)
def test_every_curve_decreases_with_the_noise(pair, rate, noise, other, order):
    noise, other = sorted((noise, other))
    assert CURVES[pair](rate, noise, order) * SLACK >= CURVES[pair](rate, other, order)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("pair", [pair for pair in CURVES if pair != "wbk"])
@given(rates, rates, noises, orders)
@settings(max_examples=30)
def test_every_curve_increases_with_the_rate_up_to_the_unsampled_gaussian(
    pair, rate, other, noise, order
):
    rate, other = sorted((rate, other))
    assert CURVES[pair](rate, noise, order) <= CURVES[pair](other, noise, order) * SLACK
    unsampled = rdp_gaussian(order, noise / SHIFT.get(pair, 1.0))
    assert CURVES[pair](other, noise, order) <= unsampled * SLACK
    assert CURVES[pair](1.0, noise, order) == pytest.approx(unsampled, rel=1e-14)


@given(rates, noises, orders)
@settings(max_examples=60)
def test_adding_costs_less_than_removing_and_removing_less_than_replacing(rate, noise, order):
    add, remove = CURVES["add"](rate, noise, order), CURVES["remove"](rate, noise, order)
    assert add <= remove * SLACK
    assert remove <= CURVES["replace"](rate, noise, order) * SLACK


@given(rates, noises, orders)
@settings(max_examples=60)
def test_the_exact_replace_one_pair_is_below_the_profile_bound_and_two_hops(rate, noise, order):
    exact = rdp_poisson_gaussian_replace_one(rate, noise, order)
    assert exact <= rdp_poisson_replace_one_profile(order, noise / 2, rate) * SLACK
    # remove, then add: weak triangle inequality of Renyi divergences
    far, near = (rdp_poisson_gaussian(rate, noise, a) for a in (2 * order, 2 * order - 1))
    assert exact <= ((order - 0.5) / (order - 1) * far + near) * SLACK


@given(
    st.floats(0.01, 0.9),
    st.floats(0.4, 3.0),
    st.floats(1.1, 6.0),
    st.floats(0, math.pi),
    st.floats(0.2, 1.0),
)
@settings(max_examples=40)
def test_no_two_contributions_are_further_apart_than_opposite_ones(
    rate, noise, order, angle, norm
):
    """(1-q) N(0) + q N(v) against (1-q) N(0) + q N(w) in the plane, by a Riemann sum (spectrally accurate here)."""
    axis = np.arange(-8 * noise - 2, 2 * order + 1 + 8 * noise, min(noise / 3, noise**2 / 3))
    other = np.arange(-8 * noise - order, order + 8 * noise, min(noise / 3, noise**2 / 3))
    x, y = axis[:, None], other[None, :]
    null = np.exp(-(x**2 + y**2) / (2 * noise**2))
    near = np.exp(-((x - 1) ** 2 + y**2) / (2 * noise**2))
    tilt = norm * math.cos(angle), norm * math.sin(angle)
    far = np.exp(-((x - tilt[0]) ** 2 + (y - tilt[1]) ** 2) / (2 * noise**2))
    p, q = (1 - rate) * null + rate * near + 1e-300, (1 - rate) * null + rate * far + 1e-300
    moment = np.sum(p * np.exp((order - 1) * (np.log(p) - np.log(q)))) / np.sum(null)
    assert (
        math.log(moment) / (order - 1)
        <= rdp_poisson_gaussian_replace_one(rate, noise, order) + 1e-9
    )


@given(st.floats(1e-4, 0.9), st.floats(0.3, 100.0), st.floats(1.01, 100.0), st.integers(1, 12))
@settings(max_examples=40)
def test_a_larger_group_costs_more_but_less_than_the_generic_group_bound(
    rate, noise, order, size
):
    cost = rdp_poisson_gaussian_group(rate, noise, size, order)
    assert cost <= rdp_poisson_gaussian_group(rate, noise, size + 1, order) * SLACK
    # two records instead of one: (2a, D) -> (a, 3 D)
    doubled = rdp_poisson_gaussian_group(rate, noise, 2 * size, order)
    assert (
        doubled <= 3 * rdp_poisson_gaussian_group(rate, noise, size, 2 * order) * SLACK
        or order < 2
    )


def test_a_group_of_one_is_a_record():
    for direction in ("remove", "add"):
        one = rdp_poisson_gaussian_group(0.01, 0.8, 1, default_orders(), direction)
        assert np.array_equal(one, rdp_poisson_gaussian(0.01, 0.8, default_orders(), direction))


def test_large_groups_stay_within_memory_and_below_the_unsampled_cost():
    grid = np.array([1.5, 8.0, 256.0])
    cost = rdp_poisson_gaussian_group(0.01, 50.0, 300, grid)
    assert np.all(cost < rdp_gaussian(grid, 50.0 / 300))
    assert np.all(cost > rdp_gaussian(grid, 50.0 / 3) / 2)  # three records on average
    assert np.all(
        rdp_poisson_gaussian_group(0.01, 1e-3, 300, grid)
        <= rdp_gaussian(grid, 1e-3 / 300) * SLACK
    )


@pytest.mark.parametrize("pair", CURVES)
def test_special_cases_of_rate_and_noise(pair):
    grid = np.array([1.001, 2.0, 2.5, 16384.0])
    assert np.all(CURVES[pair](0.0, 1.0, grid) == 0.0)
    assert np.all(CURVES[pair](0.0, 0.0, grid) == 0.0)
    assert np.all(CURVES[pair](0.3, 0.0, grid) == math.inf)
    assert np.all(CURVES[pair](1.0, 0.0, grid) == math.inf)


@pytest.mark.cases(30, 15)
@pytest.mark.parametrize("pair", CURVES)
@pytest.mark.parametrize("rate", [1e-300, 1e-9, 0.5, 1 - 1e-16])
@pytest.mark.parametrize("noise", [5e-324, 1e-160, 1e-5, 1e-3, 17.0, 1e8, 1e200])
def test_extreme_arguments_give_numbers_between_zero_and_infinity(pair, rate, noise):
    grid = np.array([1 + 1e-10, 1.001, 2.0, 100.5, 16384.0, 2.0**20, 2.0**20 + 1, 1e12])
    values = CURVES[pair](rate, noise, grid[:5] if pair == "wbk" else grid)
    assert np.all(values >= 0)
    finite = values[np.isfinite(values)]
    assert pair == "wbk" or np.all(np.diff(finite) >= -2e-12 * finite[1:])


@pytest.mark.parametrize("pair", CURVES)
def test_noise_below_the_numerical_range_costs_at_least_as_much(pair):
    grid = np.array([1.1, 2.0, 16.0])
    assert np.all(CURVES[pair](0.01, 0.9e-4, grid) >= CURVES[pair](0.01, 1e-4, grid))


@pytest.mark.parametrize("pair", CURVES)
def test_arrays_agree_with_scalars_in_any_sequence(pair):
    grid = np.array([64.0, 1.5, 2.0, 16384.0, 2.0, 3.7])
    values = CURVES[pair](0.01, 1.3, grid)
    assert isinstance(CURVES[pair](0.01, 1.3, 2.0), float)
    assert values.shape == grid.shape
    np.testing.assert_allclose(
        values, [CURVES[pair](0.01, 1.3, float(a)) for a in grid], rtol=1e-12
    )


def test_the_bound_outside_the_numerical_range_exceeds_the_curve_inside():
    grid = np.array([1.5, 2.0, 40.5, 1024.0])
    for rate, noise, size in [(0.01, 0.3, 1), (1e-6, 20.0, 1), (0.9, 2.0, 1), (0.1, 5.0, 4)]:
        bound = PoissonMixture(rate, noise, size).convexity_bound(grid, 1.0)
        assert np.all(rdp_poisson_gaussian_group(rate, noise, size, grid) <= bound)
        assert np.all(bound <= rdp_gaussian(grid, noise / size) * SLACK)
    opposite = PoissonMixture(0.01, 0.3).convexity_bound(grid, 2.0)
    assert np.all(rdp_poisson_gaussian_replace_one(0.01, 0.3, grid) <= opposite)


def test_no_orders_give_no_values():
    assert rdp_gaussian(np.empty(0), 1.0).shape == (0,)


def test_order_above_a_thousand_is_finite_where_binomials_overflow():
    assert np.all(
        np.isfinite(
            rdp_poisson_gaussian(0.01, 30.0, np.array([1031.0, 6434.0, 16384.0, 2.0**20]))
        )
    )


def test_epsilon_has_no_floor_from_a_short_order_grid():
    """Opacus #670: its orders stop at 63, which gives 0.103 here."""
    grid = default_orders()
    found = rdp_epsilon(grid, rdp_poisson_gaussian(0.01, 30.0, grid), 1e-5)
    assert found.epsilon <= 6.57e-4
    assert 5000 < found.order < 8000
    steps = 1000 * rdp_poisson_gaussian(0.01, 20.3925, grid)
    assert rdp_epsilon(grid, steps, 1e-5).epsilon <= 0.05


@pytest.mark.parametrize(
    ("noise", "epochs", "expected"),
    [
        (0.6, 1, 3.849),
        (1.0, 1, 0.9899),
        (2.0, 1, 0.2554),
        (0.6, 10, 6.735),
        (1.0, 10, 1.9431),
        (2.0, 10, 0.8283),
    ],
)
def test_measured_replace_one_epsilons(noise, epochs, expected):
    grid = default_orders()
    cost = 235 * epochs * rdp_poisson_gaussian_replace_one(256 / 60000, noise, grid)
    assert rdp_epsilon(grid, cost, 1e-5).epsilon == pytest.approx(expected, rel=1e-3)


def test_replacing_costs_four_times_removing_at_most_and_the_same_at_large_orders():
    def ratio(noise: float, order: float) -> float:
        return CURVES["replace"](1e-4, noise, order) / CURVES["remove"](1e-4, noise, order)

    assert ratio(4.0, 2.0) == pytest.approx(3.88, abs=0.01)
    assert ratio(1.0, 2.0) == pytest.approx(2.7, abs=0.05)
    assert ratio(1.0, 1000.0) == pytest.approx(1.0, abs=0.01)


def test_the_default_grid_is_ascending_with_integers_from_eleven_on():
    grid = default_orders()
    assert 165 <= grid.size <= 180
    assert np.all(np.diff(grid) > 0)
    assert np.all(grid[grid >= 11] == np.round(grid[grid >= 11]))
    assert grid[0] == 1.001
    assert grid[-1] == 2**14


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: rdp_poisson_gaussian(0.1, 1.0, 2.0, "both"),
            "direction must be one of remove, add",
        ),
        (
            lambda: rdp_poisson_gaussian_group(0.1, 1.0, 0, 2.0),
            "group_size must be an integer >= 1",
        ),
        (lambda: rdp_gaussian(2.0, -1.0), "noise_ratio must be >= 0"),
        (lambda: rdp_poisson_replace_one_profile(2.0, -1.0, 0.1), "noise_ratio must be >= 0"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
