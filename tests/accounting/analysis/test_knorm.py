"""K-norm noise: against its closed form in Bessel functions, two-dimensional integration, and sampling."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import dblquad
from scipy.stats import gamma

from tests.reference.papers.accounting import (
    knorm_delta,
    knorm_logpdf,
    knorm_mean_norm,
    knorm_radius_quantile,
    knorm_scale,
    knorm_second_moment,
    laplace_delta,
)
from tests.reference.papers.orders import rdp_l2_knorm, rdp_laplace, rdp_pure
from tests.reference.papers.pure import pure_delta
from torch_dpsco.accounting.analysis.rdp import default_orders, rdp_epsilon

epsilons = st.floats(-9.0, 3.0).map(lambda x: 10**x)
orders = st.floats(-6.0, 6.0).map(lambda x: 1 + 10**x)
dims = st.one_of(st.integers(2, 12), st.floats(1.1, 3.3).map(lambda x: int(10**x)))
SLACK = 1 + 2e-12  # two curves, each rounded up by 1e-12


def closed_form(epsilon: float, dim: int, order: float) -> mp.mpf:
    """log(x (x/s)^nu (K_(nu+1)(x) I_nu(s) + (x/s) K_nu(x) I_(nu+1)(s))) / (a - 1), s = (2a - 1) x."""
    x, nu, a = mp.mpf(epsilon) / 2, mp.mpf(dim) / 2 - 1, mp.mpf(order)
    s = (2 * a - 1) * x
    parts = mp.besselk(nu + 1, x) * mp.besseli(nu, s) + x / s * mp.besselk(nu, x) * mp.besseli(
        nu + 1, s
    )
    return mp.log(x * (x / s) ** nu * parts) / (a - 1)


def log_density_of_loss(epsilon: mp.mpf, dim: int):
    """The density of eta = loss / epsilon, unnormalized: from the Bessel functions, not from the module."""
    x, nu = epsilon / 2, mp.mpf(dim) / 2 - 1
    kappa = 2 * (dim - 1) / epsilon * mp.besselk(nu + 1, x) / mp.besselk(nu, x)
    return lambda theta: (
        mp.cos(theta) ** (dim - 2) * (kappa + mp.cos(theta) ** 2) * mp.exp(x * mp.sin(theta))
    )


@pytest.mark.weekly
@given(epsilons, dims, orders)
@settings(max_examples=60)
def test_the_curve_is_not_below_its_closed_form(epsilon, dim, order):
    with mp.workdps(60):
        try:
            exact = closed_form(epsilon, dim, order)
        except mp.libmp.NoConvergence:
            return
        found = rdp_l2_knorm(epsilon, dim, order)
        assert exact <= found <= exact * (1 + mp.mpf("1.1e-12"))


@pytest.mark.cases(13, 6)
@pytest.mark.parametrize("epsilon", [1e-9, 0.3, 5.0, 1e3])
@pytest.mark.parametrize("dim", [1, 2, 3, 200])
@pytest.mark.parametrize("order", [1 + 1e-6, 2.0, 1e5])
def test_the_closed_form_is_met_at_the_corners(epsilon, dim, order):
    with mp.workdps(60):
        exact = closed_form(epsilon, dim, order)
        assert (
            exact * (1 - mp.mpf("1e-40"))
            <= rdp_l2_knorm(epsilon, dim, order)
            <= exact * (1 + mp.mpf("1.2e-12"))
        )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("epsilon", "dim", "order"), [(1.0, 2, 2.0), (2.0, 5, 2.5), (0.5, 5, 8.0), (4.0, 10, 3.0)]
)
def test_the_curve_is_the_integral_over_radius_and_angle(epsilon, dim, order):
    """Another form: E exp((a-1) epsilon (|Z - e1| - |Z|)), |Z| ~ Gamma(dim, 1/epsilon), angle ~ sin^(dim-2)."""
    norm = math.sqrt(math.pi) * math.gamma((dim - 1) / 2) / math.gamma(dim / 2)

    def integrand(angle, radius):
        shifted = math.sqrt(radius**2 - 2 * radius * math.cos(angle) + 1)
        weight = gamma.pdf(radius, dim, scale=1 / epsilon) * math.sin(angle) ** (dim - 2) / norm
        return weight * math.exp((order - 1) * epsilon * (shifted - radius))

    top = (dim + 12 * math.sqrt(dim) + 30) / epsilon
    total = sum(
        dblquad(integrand, low, high, 0, math.pi, epsabs=1e-9, epsrel=1e-9)[0]
        for low, high in [(0, 0.5), (0.5, 1), (1, 2), (2, top / 3), (top / 3, top)]
    )
    assert rdp_l2_knorm(epsilon, dim, order) == pytest.approx(
        math.log(total) / (order - 1), rel=1e-6
    )


def test_no_shift_is_worse_than_the_longest_one():
    """v -> E exp(c (|Z - v| - |Z|)) on samples: a convex even function of v along every ray."""
    rng = np.random.default_rng(7)
    epsilon, dim, c = 2.0, 4, 3.0
    direction = rng.normal(size=(20_000, dim))
    z = (
        direction
        / np.linalg.norm(direction, axis=1, keepdims=True)
        * rng.gamma(dim, 1 / epsilon, 20_000)[:, None]
    )
    z = np.concatenate([z, -z])
    radius = np.linalg.norm(z, axis=1)
    lengths = np.linspace(0, 1, 11)
    moments = [
        np.mean(np.exp(c * (np.linalg.norm(z - length * np.eye(dim)[0], axis=1) - radius)))
        for length in lengths
    ]
    assert np.all(np.diff(moments) > 0)
    assert np.all(np.diff(moments, 2) > 0)


@pytest.mark.slow
@given(epsilons, st.sampled_from([1, 2, 3, 7, 50, 10**4, 10**7]), orders)
@settings(max_examples=60)
def test_the_curve_is_below_randomized_response_and_decreases_with_the_dimension(
    epsilon, dim, order
):
    assert rdp_l2_knorm(epsilon, dim, order) <= rdp_pure(epsilon, order)
    assert rdp_l2_knorm(epsilon, dim + 1, order) <= rdp_l2_knorm(epsilon, dim, order) * SLACK
    assert rdp_l2_knorm(epsilon, dim, order) <= rdp_l2_knorm(2 * epsilon, dim, order) * SLACK
    assert (
        rdp_l2_knorm(epsilon, dim, order)
        <= rdp_l2_knorm(epsilon, dim, 1 + 2 * (order - 1)) * SLACK
    )


def test_one_dimension_is_laplace_noise():
    grid = default_orders()
    np.testing.assert_allclose(rdp_l2_knorm(0.5, 1, grid), rdp_laplace(2.0, grid), rtol=3e-12)
    assert knorm_delta(0.2, 0.5, 1) == pytest.approx(laplace_delta(0.2, 2.0), rel=1e-12)


def test_high_dimensions_have_the_price_of_the_fisher_information():
    for dim in (10**4, 10**7, 10**9):
        assert rdp_l2_knorm(1.0, dim, 2.0) == pytest.approx(2.0 / (2 * dim), rel=1e-4)


def test_measured_epsilons_of_the_spec():
    grid = default_orders()
    cost = rdp_l2_knorm(4.0, 100, grid)
    assert rdp_epsilon(grid, cost, 1e-5).epsilon == pytest.approx(1.61, abs=0.005)
    assert rdp_epsilon(grid, 10 * cost, 1e-5).epsilon == pytest.approx(6.16, abs=0.005)
    assert knorm_delta(1.61, 4.0, 100) < 1e-5


@pytest.mark.weekly
@given(st.floats(0.05, 20.0), st.floats(0.0, 0.999), st.integers(2, 60))
@settings(max_examples=10)
def test_the_profile_is_not_below_its_integral_in_high_precision(pure, share, dim):
    epsilon = pure * share
    with mp.workdps(40):
        e = mp.mpf(pure)
        density = log_density_of_loss(e, dim)
        total = mp.quad(density, mp.linspace(-mp.pi / 2, mp.pi / 2, 40))
        start = mp.asin(mp.mpf(epsilon) / e)

        def excess(theta):
            return -mp.expm1(mp.mpf(epsilon) - e * mp.sin(theta)) * density(theta)

        exact = mp.quad(excess, mp.linspace(start, mp.pi / 2, 25)) / total
        assert exact <= knorm_delta(epsilon, pure, dim) <= exact * (1 + mp.mpf("1.2e-9"))


@pytest.mark.slow
@given(st.floats(0.01, 20.0), st.floats(0.0, 1.5), st.sampled_from([1, 2, 10, 1000, 10**7]))
def test_the_profile_is_below_the_conversion_of_its_renyi_curve_and_below_pure_privacy(
    pure, share, dim
):
    delta = knorm_delta(pure * share, pure, dim)
    assert 0 <= delta <= pure_delta(pure * share, pure)
    if 1e-200 < delta < 1:
        grid = default_orders()
        assert (
            rdp_epsilon(grid, rdp_l2_knorm(pure, dim, grid), delta).epsilon
            >= pure * share * (1 - 1e-6) - 1e-9
        )


@pytest.mark.slow
@given(st.floats(0.0, 4.0), st.floats(0.0, 4.0))
def test_the_profile_decreases_also_next_to_its_end(epsilon, other):
    epsilon, other = sorted((epsilon, other))
    assert knorm_delta(epsilon, 3.0, 20) >= knorm_delta(other, 3.0, 20) * (1 - 2e-9)
    assert knorm_delta(3.0, 3.0, 20) == 0.0 <= knorm_delta(math.nextafter(3.0, 0.0), 3.0, 20)


def test_the_profile_agrees_with_sampling():
    """Hoeffding: the mean of 200,000 variables in [0, 1] is off by more than 0.0063 with probability 1e-6."""
    rng = np.random.default_rng(3)
    epsilon, pure, dim, n = 0.3, 2.0, 6, 200_000
    direction = rng.normal(size=(n, dim))
    z = (
        direction
        / np.linalg.norm(direction, axis=1, keepdims=True)
        * rng.gamma(dim, 1 / pure, n)[:, None]
    )
    shifted = z.copy()
    shifted[:, 0] -= 1
    loss = pure * (np.linalg.norm(shifted, axis=1) - np.linalg.norm(z, axis=1))
    mean = np.mean(np.maximum(0.0, -np.expm1(epsilon - loss)))
    assert knorm_delta(epsilon, pure, dim) == pytest.approx(mean, abs=0.0063)


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_the_scale_never_falls_short_of_the_exact_ratio(epsilon, sensitivity):
    scale = knorm_scale(epsilon, sensitivity)
    assert Fraction(scale) * Fraction(epsilon) >= Fraction(sensitivity)
    assert scale <= sensitivity / epsilon * (1 + 3e-16)


@pytest.mark.parametrize("dim", [1, 2, 3, 10])
def test_the_density_integrates_to_one_and_has_the_stated_moments(dim):
    sensitivity, epsilon = 0.7, 1.3
    radius = np.linspace(0, 60, 400_001)[1:]
    log_density = np.array(
        [knorm_logpdf([0.0] * dim, sensitivity, epsilon)]
    ) - radius / knorm_scale(epsilon, sensitivity)
    shell = (
        2
        * math.pi ** (dim / 2)
        / math.gamma(dim / 2)
        * radius ** (dim - 1)
        * np.exp(log_density)
    )
    step = radius[1] - radius[0]
    correction = shell[0] / 2 if dim == 1 else 0.0  # the end point at 0
    assert (shell.sum() + correction) * step == pytest.approx(1, rel=1e-6)
    assert (shell * radius).sum() * step == pytest.approx(
        knorm_mean_norm(dim, sensitivity, epsilon), rel=1e-6
    )
    assert (shell * radius**2).sum() * step == pytest.approx(
        knorm_second_moment(dim, sensitivity, epsilon), rel=1e-6
    )
    median = knorm_radius_quantile(dim, sensitivity, epsilon, 0.5)
    assert (shell[radius <= median].sum() + correction) * step == pytest.approx(0.5, abs=1e-3)


def test_extreme_arguments_give_valid_numbers():
    grid = np.array([1 + 1e-10, 1.5, 2.0**20, 1e12])
    for epsilon in (0.0, 1e-300, 1e-99, 1e-9, 1e3, 1e6):
        for dim in (1, 2, 3, 10**8):
            values = rdp_l2_knorm(epsilon, dim, grid)
            assert np.all((values >= 0) & (values <= rdp_pure(epsilon, grid)))
            assert np.all(values > 0) or epsilon == 0
    assert knorm_delta(0.0, 0.0, 5) == 0.0
    assert knorm_delta(0.0, 1e-300, 5) <= 1e-300


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: knorm_delta(-0.1, 1.0, 2), "epsilon must be >= 0"),
        (lambda: knorm_scale(0.0, 1.0), "epsilon must be > 0"),
        (lambda: knorm_scale(1.0, -1.0), "sensitivity must be > 0"),
        (lambda: knorm_scale(1e-300, 1e300), "scale must be finite"),
        (lambda: knorm_radius_quantile(2, 1.0, 1.0, 1.0), "quantile must be in"),
        (lambda: knorm_logpdf([], 1.0, 1.0), "value must be a 1-d array"),
        (lambda: knorm_mean_norm(0, 1.0, 1.0), "dim must be an integer >= 1"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
