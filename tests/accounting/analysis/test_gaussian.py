"""The exact Gaussian curve: against 60-digit arithmetic, dp-accounting, and on the safe side of every inverse."""

from __future__ import annotations

import math

import dp_accounting
import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.reference.papers.output import gaussian_sigma_zhao, zhao_constant
from torch_dpsco.accounting.analysis.gaussian import (
    gaussian_delta,
    gaussian_epsilon,
    gaussian_log_delta,
    gaussian_mu,
    gaussian_sigma,
    log_delta_curve,
)
from torch_dpsco.errors import ConditionError

mus = st.floats(1e-8, 1e3)
epsilons = st.one_of(st.just(0.0), st.floats(1e-8, 1e3))
deltas = st.one_of(st.floats(1e-300, 1e-3), st.floats(1e-3, 1 - 1e-9))


def exact_log_delta(epsilon: float, mu: float) -> mp.mpf:
    """log(Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)) with digits to spare for the cancellation."""
    lost = max(epsilon / mu, mu / 2) ** 2 / 4.6 - 2 * math.log10(min(mu, 1.0))
    with mp.workdps(60 + int(lost)):
        epsilon, mu = mp.mpf(epsilon), mp.mpf(mu)
        upper = mp.erfc((epsilon / mu - mu / 2) / mp.sqrt(2)) / 2
        lower = mp.exp(epsilon) * mp.erfc((epsilon / mu + mu / 2) / mp.sqrt(2)) / 2
        return mp.log(upper - lower)


@pytest.mark.cases(17, 8)
@pytest.mark.parametrize("mu", [1e-9, 1e-6, 1e-3, 0.02, 0.3, 1.0, 3.0, 12.0, 80.0])
@pytest.mark.parametrize("depth", [0.0, 1e-6, 0.1, 0.999, 1.0, 5.0, 11.9, 12.1, 30.0])
def test_log_delta_agrees_with_exact_arithmetic(mu, depth):
    epsilon = mu * depth
    exact = exact_log_delta(epsilon, mu)
    # relative to log(delta) where delta is near 1, absolute elsewhere
    assert (
        abs(gaussian_log_delta(epsilon, mu) - exact)
        <= 1e-12 * min(1, abs(exact)) + 1e-13 * abs(exact) + 1e-300
    )


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(
    ("epsilon", "mu"), [(0.5, 0.02), (8.0, 0.9), (400.0, 30.0), (5000.0, 100.0), (0.5, 1e-2)]
)
def test_log_delta_survives_where_delta_underflows_or_is_one(epsilon, mu):
    assert gaussian_log_delta(epsilon, mu) == pytest.approx(
        float(exact_log_delta(epsilon, mu)), rel=1e-12
    )


def test_delta_at_the_ends_of_its_range():
    assert gaussian_delta(mu=0.0, epsilon=0.0) == 0.0
    assert gaussian_log_delta(epsilon=1.0, mu=0.0) == -math.inf
    assert gaussian_delta(mu=math.inf, epsilon=3.0) == 1.0
    assert gaussian_delta(mu=1e-300, epsilon=1e300) == 0.0
    assert gaussian_delta(mu=1e200, epsilon=1.0) == 1.0
    assert gaussian_epsilon(mu=0.0, delta=1e-9) == 0.0
    assert gaussian_epsilon(mu=math.inf, delta=0.5) == math.inf


def test_delta_at_epsilon_zero_is_the_total_variation_distance():
    for mu in (1e-9, 1e-4, 0.1, 2.0, 20.0):
        assert gaussian_delta(mu, 0.0) == pytest.approx(math.erf(mu / math.sqrt(8)), rel=1e-12)


def test_the_array_kernel_agrees_with_the_scalar_one():
    grid = np.geomspace(1e-6, 100, 50)
    assert log_delta_curve(grid, 0.7).tolist() == [
        gaussian_log_delta(epsilon, 0.7) for epsilon in grid
    ]


@given(mus, mus, epsilons, epsilons)
def test_delta_increases_with_mu_and_decreases_with_epsilon(
    mu, other_mu, epsilon, other_epsilon
):
    mu, other_mu = sorted((mu, other_mu))
    epsilon, other_epsilon = sorted((epsilon, other_epsilon))
    slack = 1e-11 + 1e-12 * abs(gaussian_log_delta(epsilon, mu))
    assert gaussian_log_delta(epsilon, mu) <= gaussian_log_delta(epsilon, other_mu) + slack
    assert gaussian_log_delta(other_epsilon, mu) <= gaussian_log_delta(epsilon, mu) + slack


@pytest.mark.slow
@given(epsilons, deltas)
@example(0.0, 1e-300)
@example(1000.0, 1 - 1e-9)
def test_the_inverses_are_on_the_safe_side(epsilon, delta):
    mu = gaussian_mu(epsilon, delta)
    assert gaussian_delta(mu, epsilon) <= delta
    assert gaussian_delta(mu * (1 + 1e-6), epsilon) > delta
    again = gaussian_epsilon(mu, delta)
    assert gaussian_delta(mu, again) <= delta
    assert again <= epsilon * (1 + 1e-9) + 1e-9 * mu


@pytest.mark.cases(17, 8)
@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.1, 1.0, 8.0, 100.0])
@pytest.mark.parametrize("delta", [1e-100, 1e-10, 1e-5, 0.1, 0.9])
def test_the_exact_delta_at_the_inverse_is_at_most_delta(epsilon, delta):
    mu = gaussian_mu(epsilon, delta)
    exact = exact_log_delta(epsilon, mu)
    assert mp.log(delta) * (1 + mp.mpf("1e-10")) <= exact <= mp.log(delta)
    epsilon = gaussian_epsilon(2 * mu, delta)
    assert exact_log_delta(epsilon, 2 * mu) <= mp.log(delta)


@pytest.mark.weekly
@given(st.floats(1e-3, 100), st.floats(-40, math.log(0.5)))
@example(1e-3, -7.0)
@example(1e-3, -8.212404183399265)
def test_what_mu_calibrates_is_within_the_target_it_was_calibrated_for(epsilon, log_delta):
    delta = math.exp(log_delta)
    sigma = gaussian_sigma(epsilon, delta, sensitivity=1.0)
    assert gaussian_epsilon(1.0 / sigma, delta) <= epsilon
    mu = gaussian_mu(epsilon, delta)
    for ulps in range(-4, 5):  # what a ledger's mu^2, sums and roots may round
        assert gaussian_epsilon(mu * (1 + ulps * 2.0**-52), delta) <= epsilon


@pytest.mark.slow
@given(st.floats(0.0, 100.0), deltas, st.floats(1e-6, 1e6))
def test_sigma_never_falls_short_of_the_exact_noise(epsilon, delta, sensitivity):
    sigma = gaussian_sigma(epsilon, delta, sensitivity)
    assert gaussian_delta(sensitivity / sigma, epsilon) <= delta
    assert sensitivity / sigma <= gaussian_mu(epsilon, delta)


@pytest.mark.slow
@given(mus, deltas, deltas)
def test_epsilon_is_monotone_in_delta(mu, delta, other):
    delta, other = sorted((delta, other))
    assert gaussian_epsilon(mu, delta) >= gaussian_epsilon(mu, other) * (1 - 1e-12)


def test_agrees_with_dp_accounting():
    for sigma in (0.3, 1.0, 5.0, 40.0):
        for delta in (1e-3, 1e-5, 1e-9):
            theirs = dp_accounting.get_epsilon_gaussian(sigma, delta)
            assert gaussian_epsilon(1 / sigma, delta) == pytest.approx(theirs, rel=1e-6)
    for epsilon in (0.1, 1.0, 8.0):
        theirs = dp_accounting.get_sigma_gaussian(epsilon, 1e-6)
        assert gaussian_sigma(epsilon, 1e-6, 1.0) == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(
    ("delta", "last"),
    [(1e-3, 7.463), (1e-5, 8.419), (1e-6, 8.782), (1e-8, 9.374), (1e-10, 9.849)],
)
def test_the_textbook_noise_fails_above_a_known_epsilon(delta, last):
    def textbook(epsilon: float) -> float:
        return math.sqrt(2 * math.log(1.25 / delta)) / epsilon

    assert textbook(last - 0.002) > gaussian_sigma(last - 0.002, delta, 1.0)
    assert textbook(last + 0.002) < gaussian_sigma(last + 0.002, delta, 1.0)


halves = st.one_of(
    st.floats(5e-324, 1e-3),
    st.floats(1e-3, 0.499),
    st.floats(1e-16, 1e-3).map(lambda gap: 0.5 - gap),
)


def exact_zhao_constant(delta: float) -> mp.mpf:
    """The formula as the paper has it, with digits to spare for sqrt(16 delta + 1) - 1."""
    return mp.sqrt(mp.log(2 / (mp.sqrt(16 * mp.mpf(delta) + 1) - 1)))


@given(halves)
@example(5e-324)
@example(math.nextafter(0.5, 0.0))
@example(0.1)
@example(math.nextafter(0.1, 0.0))
def test_the_constant_of_zhao_is_the_exact_one_rounded_up(delta):
    with mp.workdps(400):
        exact = exact_zhao_constant(delta)
        assert exact <= zhao_constant(delta) <= exact * (1 + mp.mpf("5e-15"))


@pytest.mark.slow
@given(st.floats(-12.0, 12.0).map(lambda x: 10**x), halves, st.floats(1e-6, 1e6))
@example(1e26, math.nextafter(0.5, 0.0), 1.0)
@example(1e13, math.nextafter(0.5, 0.0), 1.0)
@example(1e-12, 1e-300, 1.0)
def test_the_noise_of_zhao_covers_the_exact_curve_for_every_epsilon(epsilon, delta, sensitivity):
    """And the check of the curve refuses none: the proof has room for all rounding."""
    sigma = gaussian_sigma_zhao(epsilon, delta, sensitivity)
    assert gaussian_log_delta(epsilon, sensitivity / sigma) <= math.log(delta)
    assert sigma >= gaussian_sigma(epsilon, delta, sensitivity) * (1 - 1e-11)
    with mp.workdps(400):
        c = exact_zhao_constant(delta)
        exact = sensitivity * (c + mp.sqrt(c**2 + epsilon)) / (mp.sqrt(2) * epsilon)
        assert exact <= sigma <= exact * (1 + mp.mpf("3e-14"))


def test_the_noise_of_zhao_costs_what_was_measured():
    for delta, ratio in [(1e-12, 1.12), (1e-6, 1.20), (1e-3, 1.35)]:
        assert gaussian_sigma_zhao(1.0, delta, 1.0) / gaussian_sigma(
            1.0, delta, 1.0
        ) == pytest.approx(ratio, abs=6e-3)


def test_the_noise_of_zhao_is_checked_against_the_exact_curve():
    """A subnormal std cannot hold what the closed form asks for: only the curve sees that."""
    smallest = 5e-324
    with pytest.raises(
        ConditionError,
        match=r"falls short of delta = 1e-06 at epsilon = 4.125; use gaussian_sigma",
    ):
        gaussian_sigma_zhao(4.125, 1e-6, smallest)
    assert gaussian_sigma(4.125, 1e-6, smallest) == 2 * smallest
    assert (
        gaussian_sigma(100.0, 1e-6, smallest)
        == gaussian_sigma_zhao(100.0, 1e-6, smallest)
        == smallest
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gaussian_delta(-1.0, 1.0), "mu must be >= 0"),
        (lambda: gaussian_delta(1.0, -1.0), "epsilon must be >= 0"),
        (lambda: gaussian_log_delta(math.inf, 1.0), "epsilon must be finite"),
        (lambda: gaussian_epsilon(1.0, 0.0), "delta must be in"),
        (lambda: gaussian_mu(1.0, 1.0), "delta must be in"),
        (lambda: gaussian_mu(-0.1, 1e-5), "epsilon must be >= 0"),
        (lambda: gaussian_sigma(1.0, 1e-5, 0.0), "sensitivity must be > 0"),
        (lambda: gaussian_sigma_zhao(0.0, 1e-5, 1.0), "epsilon must be > 0"),
        (lambda: gaussian_sigma_zhao(math.inf, 1e-5, 1.0), "epsilon must be finite"),
        (lambda: gaussian_sigma_zhao(1.0, 0.5, 1.0), r"delta must be in \(0, 0.5\)"),
        (lambda: gaussian_sigma_zhao(1.0, 0.0, 1.0), r"delta must be in \(0, 0.5\)"),
        (lambda: gaussian_sigma_zhao(1.0, 1e-5, -1.0), "sensitivity must be > 0"),
        (lambda: gaussian_sigma_zhao(1e-300, 1e-5, 1e300), "sigma must be finite"),
        (lambda: zhao_constant(math.nan), "delta must be in"),
        (lambda: gaussian_sigma(math.nan, 1e-5, 1.0), "epsilon must be >= 0"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
