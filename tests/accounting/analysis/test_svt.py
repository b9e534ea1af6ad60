"""AboveThreshold: epsilon against exact transcript probabilities, error probabilities, the sum with Gaussians."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from tests.reference.papers.accounting import bad_pass_integral, sequence_probability
from tests.reference.papers.pure import pure_delta
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_mu
from torch_dpsco.accounting.analysis.pure import (
    above_threshold_epsilon,
    above_threshold_scales,
    bad_pass_margin,
    bad_pass_probability,
    concentration_score_sensitivity,
    laplace_difference_tail,
    svt_gaussian_delta,
    svt_gaussian_mu,
)
from torch_dpsco.errors import InfeasibleError

scales = st.floats(-1.0, 2.0).map(lambda x: 10**x)


def laplace_cdf(y):
    return np.where(y < 0, np.exp(-np.abs(y)) / 2, 1 - np.exp(-np.abs(y)) / 2)


def transcript_probability(gaps: list[float], passed: list[bool], b1: float, b2: float) -> float:
    """P[transcript] with the threshold drawn once, by a fine Riemann sum over its noise."""
    rho = np.linspace(-60 * b1, 60 * b1, 240_001)
    density = np.exp(-np.abs(rho) / b1) / (2 * b1)
    for gap, yes in zip(gaps, passed, strict=True):
        density = density * (
            laplace_cdf((gap - rho) / b2) if yes else laplace_cdf((rho - gap) / b2)
        )
    return float(density.sum() * (rho[1] - rho[0]))


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 1000))
def test_epsilon_is_not_below_its_exact_value(threshold, query, sensitivity, positives):
    exact = Fraction(sensitivity) / Fraction(threshold) + 2 * positives * Fraction(
        sensitivity
    ) / Fraction(query)
    found = above_threshold_epsilon(threshold, query, sensitivity, positives)
    assert exact <= Fraction(found) <= exact * (1 + Fraction(1, 10**14))


@given(
    st.floats(1e-6, 100.0), st.floats(1e-6, 100.0), st.integers(1, 100), st.floats(0.01, 0.99)
)
def test_scales_made_for_an_epsilon_never_exceed_it(epsilon, sensitivity, positives, share):
    found = above_threshold_scales(epsilon, sensitivity, positives, share)
    spent = above_threshold_epsilon(*found, sensitivity, positives)
    assert epsilon * (1 - 1e-13) <= spent <= epsilon
    assert sensitivity / found[0] == pytest.approx(share * epsilon, rel=1e-13)


def test_the_textbook_scales_spend_epsilon():
    assert above_threshold_epsilon(2 / 0.5, 4 / 0.5, 1.0) == pytest.approx(0.5, rel=1e-14)
    assert above_threshold_epsilon(1.0, 1.0, 0.0) == 0.0
    assert above_threshold_epsilon(0.0, 1.0, 1.0) == math.inf


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.floats(-4, 4), st.sampled_from([-1.0, 0.0, 1.0]), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    st.floats(0.5, 3.0),
    st.floats(0.5, 3.0),
)
@settings(max_examples=60)
def test_no_transcript_separates_neighbors_by_more_than_epsilon(queries, b1, b2):
    """c is the number of answers of the halting kind; scores move by at most the sensitivity 1, in either direction."""
    passed = [answer for _, _, answer in queries]
    halts = passed.count(False)
    near = transcript_probability([gap for gap, _, _ in queries], passed, b1, b2)
    far = transcript_probability([gap + move for gap, move, _ in queries], passed, b1, b2)
    bound = above_threshold_epsilon(b1, b2, 1.0, max(1, halts))
    assert abs(math.log(near / far)) <= bound * (1 + 1e-6) + 1e-6


@pytest.mark.weekly
def test_epsilon_is_nearly_reached_by_long_streams():
    """Many passes force rho down, then one halt: passes move up by 1 and the halting score down by 1."""
    b1, b2 = 2.0, 4.0
    gaps = [-20.0] * 400
    near = transcript_probability([*gaps, 20.0], [True] * 400 + [False], b1, b2)
    far = transcript_probability(
        [gap + 1 for gap in gaps] + [19.0], [True] * 400 + [False], b1, b2
    )
    ratio = abs(math.log(near / far))
    bound = above_threshold_epsilon(b1, b2, 1.0)
    assert 0.7 * bound < ratio <= bound


def test_the_published_scales_of_the_filter_leak_more_than_claimed():
    """docs/errata.md, paper 3, E2: n = 704, T = 11, epsilon = 1, delta = 1e-6 claimed; scores move by 2 (n - 1) / n."""
    threshold = 4 * 704 / 5

    def score(left: int, middle: bool) -> float:
        """Of `left` users at -1, the rest at +1 and user 1 at 0 (near all) or at -3 (near none)."""
        return (left**2 + (703 - left) ** 2 + 1 + 2 * 703 * middle) / 704

    def probabilities(b1, b2):
        pairs = (score(625, True), score(624, False)), (score(625, False), score(624, True))
        return [sequence_probability(a - threshold, b - threshold, 10, b1, b2) for a, b in pairs]

    p, q = probabilities(4.0, 8.0)
    assert p == pytest.approx(1.247e-2, rel=1e-3)
    assert q == pytest.approx(4.75e-3, rel=2e-3)
    log_ratio = math.log(p / q)
    assert log_ratio == pytest.approx(0.966, abs=2e-3)
    assert p * gaussian_delta(0.0644, 1 - log_ratio) > 100 * 1e-6
    p, q = probabilities(8.0, 16.0)
    assert math.log(p / q) == pytest.approx(0.490, abs=2e-3)
    assert (
        math.log(p / q)
        <= above_threshold_epsilon(8.0, 16.0, concentration_score_sensitivity(704))
        == pytest.approx(0.5, rel=0.01)
    )


@given(st.integers(2, 7), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_the_score_moves_by_at_most_its_sensitivity(n, random):
    points = [random.uniform(0, 3) for _ in range(n)]
    moved = [random.uniform(0, 3), *points[1:]]

    def score(values):
        return Fraction(sum(abs(x - y) <= 1 for x in values for y in values), n)

    assert abs(score(points) - score(moved)) <= Fraction(concentration_score_sensitivity(n))


def test_the_sensitivity_of_the_score_is_reached():
    for n in (2, 3, 10):
        together, apart = [0.0] * n, [9.0] + [0.0] * (n - 1)

        def score(values):
            return Fraction(sum(abs(x - y) <= 1 for x in values for y in values), len(values))

        assert (
            score(together) - score(apart)
            == Fraction(2 * (n - 1), n)
            <= Fraction(concentration_score_sensitivity(n))
        )
    assert concentration_score_sensitivity(1) == 0.0


@given(st.floats(-200.0, 600.0), scales, scales)
@settings(max_examples=200)
def test_the_tail_of_a_laplace_difference_has_all_digits(margin, b1, b2):
    with mp.workdps(60):
        m, s, t = abs(mp.mpf(margin)), mp.mpf(b1), mp.mpf(b2)
        if s == t:
            exact = mp.exp(-m / s) * (mp.mpf(1) / 2 + m / (4 * s))
        else:
            exact = (t**2 * mp.exp(-m / t) - s**2 * mp.exp(-m / s)) / (2 * (t**2 - s**2))
        exact = exact if margin >= 0 else 1 - exact
        found = laplace_difference_tail(margin, b1, b2)
        assert abs(found - exact) <= exact * mp.mpf("1e-12") + mp.mpf("1e-300")
    assert found == laplace_difference_tail(margin, b2, b1)


def test_nearly_equal_scales_do_not_cancel():
    one = laplace_difference_tail(50.0, 2.0, 2.0)
    assert laplace_difference_tail(50.0, 2.0, 2.0 * (1 + 1e-15)) == pytest.approx(one, rel=1e-12)


def mp_integral(scale: float, query: float, breaks: list[float], function) -> mp.mpf:
    """E[function(rho)] for Laplace rho, by mpmath on panels that double around each break."""
    b = mp.mpf(scale)
    low, high = min(breaks) - 80 * b, max(breaks) + 80 * b
    points = {low, high, *breaks}
    for at in breaks:
        for k in range(-3, 14):
            for side in (-1, 1):
                point = at + side * min(b, query) * mp.mpf(2) ** k
                points |= {point} if low < point < high else set()
    return mp.quad(lambda r: mp.exp(-abs(r) / b) / (2 * b) * function(r), sorted(points))


def mp_log_cdf(y):
    return mp.log1p(-mp.exp(-y) / 2) if y >= 0 else y - mp.log(2)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("margin", "steps", "b1", "b2"),
    [
        (20.8, 1, 4.0, 8.0),
        (172.4, 10**5, 4.0, 4.0),
        (500.0, 1000, 0.1, 40.0),
        (300.0, 10**8, 30.0, 0.2),
        (-10.0, 5, 3.0, 2.0),
        (0.0, 1, 1.0, 1.0),
        (60.0, 10**6, 1.0, 1.0 + 1e-9),
    ],
)
def test_bad_pass_probability_is_not_below_its_integral(margin, steps, b1, b2):
    with mp.workdps(30):
        m, q = mp.mpf(margin), mp.mpf(b2)
        breaks = [mp.mpf(0), -m, q * mp.log(steps) - m]
        exact = mp_integral(b1, b2, breaks, lambda r: -mp.expm1(steps * mp_log_cdf((m + r) / q)))
        assert exact <= bad_pass_probability(margin, steps, b1, b2)
        assert bad_pass_integral(margin, steps, b1, b2) == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("first", "last", "passes", "b1", "b2"),
    [
        (2.3, -1.2, 10, 4.0, 8.0),
        (-30.0, 40.0, 1000, 2.0, 0.5),
        (5.0, 5.0, 0, 1.0, 1.0),
        (-3.0, 2.0, 10**6, 0.3, 20.0),
    ],
)
def test_sequence_probability_is_its_integral(first, last, passes, b1, b2):
    with mp.workdps(30):
        f, g, q = mp.mpf(first), mp.mpf(last), mp.mpf(b2)
        peak = f - q * mp.log(max(1, passes * b1 / (2 * b2)))
        breaks = [mp.mpf(0), f, g, f - q * mp.log(max(1, passes)), peak]
        exact = mp_integral(
            b1,
            b2,
            breaks,
            lambda r: mp.exp(passes * mp_log_cdf((f - r) / q) + mp_log_cdf((r - g) / q)),
        )
        assert abs(sequence_probability(first, last, passes, b1, b2) / exact - 1) < 1e-9


@given(st.floats(-5.0, 60.0), st.integers(1, 10**6), scales, scales)
@settings(max_examples=60)
def test_bad_passes_grow_with_the_steps_and_are_bounded_by_the_union(margin, steps, b1, b2):
    one, many = (bad_pass_probability(margin, count, b1, b2) for count in (steps, 2 * steps))
    assert one <= many * (1 + 3e-9)
    assert one <= min(1.0, steps * laplace_difference_tail(margin, b1, b2)) * (1 + 2e-9)
    assert bad_pass_probability(margin, 1, b1, b2) == pytest.approx(
        laplace_difference_tail(margin, b1, b2), rel=2e-9
    )
    assert bad_pass_probability(margin + 1, steps, b1, b2) <= one * (1 + 3e-9)


@pytest.mark.slow
@given(st.floats(-14.0, -0.01).map(lambda x: 10**x), st.integers(1, 10**6), scales, scales)
@settings(max_examples=100)
def test_the_margin_of_a_failure_is_the_least_that_its_union_bound_admits(
    failure, steps, b1, b2
):
    """At 40 digits: the tail at the margin fits, and just below it does not (or the margin is 0)."""
    margin = bad_pass_margin(failure, steps, b1, b2)
    assert bad_pass_probability(margin, steps, b1, b2) <= failure * (1 + 2e-9)

    def union(m):
        s, t = mp.mpf(b1), mp.mpf(b2)
        if s == t:
            return steps * mp.exp(-m / s) * (mp.mpf(1) / 2 + m / (4 * s))
        return steps * (t**2 * mp.exp(-m / t) - s**2 * mp.exp(-m / s)) / (2 * (t**2 - s**2))

    with mp.workdps(60):
        assert union(mp.mpf(margin)) <= failure * (1 + mp.mpf("1e-12"))
        if margin > 1e-9:
            assert union(mp.mpf(margin) * (1 - mp.mpf("1e-9"))) > failure * (1 - mp.mpf("1e-12"))


def test_no_margin_is_needed_for_a_failure_of_one_half():
    assert bad_pass_margin(0.5, 1, 1.0, 2.0) <= 1e-11


@pytest.mark.slow
def test_bad_passes_are_not_more_frequent_than_computed():
    """Binomial tail 1e-6 on 200,000 runs of 50 queries, all 12 below the threshold."""
    rng = np.random.default_rng(11)
    n, margin, b1, b2 = 200_000, 12.0, 2.0, 3.0
    passes = (
        rng.laplace(scale=b2, size=(n, 50)).max(axis=1) - rng.laplace(scale=b1, size=n) > margin
    )
    beta = bad_pass_integral(margin, 50, b1, b2)
    assert binom.ppf(1e-6, n, beta) <= passes.sum() <= binom.isf(1e-6, n, beta)


@given(st.floats(0.0, 10.0), st.floats(0.0, 10.0), st.floats(1e-3, 8.0))
@settings(max_examples=60)
def test_pair_delta_is_not_below_its_high_precision_value(epsilon, epsilon_svt, mu):
    def hockey_stick(e, m):
        return mp.ncdf(m / 2 - e / m) - mp.exp(e) * mp.ncdf(-m / 2 - e / m)

    with mp.workdps(120):
        e, a, m = mp.mpf(epsilon), mp.mpf(epsilon_svt), mp.mpf(mu)
        p = mp.exp(a) / (1 + mp.exp(a))
        exact = p * hockey_stick(e - a, m) + (1 - p) * hockey_stick(e + a, m)
        if exact > mp.mpf("1e-300"):
            assert (
                exact
                <= svt_gaussian_delta(epsilon, epsilon_svt, mu)
                <= exact * (1 + mp.mpf("2e-9"))
            )


@pytest.mark.slow
@given(st.floats(0.0, 5.0), st.floats(0.0, 5.0), st.floats(0.0, 5.0))
def test_the_pair_costs_more_than_either_part_and_less_than_both_in_sequence(
    epsilon, epsilon_svt, mu
):
    both = svt_gaussian_delta(epsilon, epsilon_svt, mu)
    assert both >= max(pure_delta(epsilon, epsilon_svt), gaussian_delta(mu, epsilon)) * (
        1 - 1e-10
    )
    if epsilon >= epsilon_svt:
        assert both <= gaussian_delta(mu, epsilon - epsilon_svt) * (1 + 1e-9)
    assert svt_gaussian_delta(epsilon, epsilon_svt, 0.0) == pytest.approx(
        pure_delta(epsilon, epsilon_svt), rel=1e-12
    )
    assert svt_gaussian_delta(epsilon, 0.0, mu) == pytest.approx(
        gaussian_delta(mu, epsilon), rel=1e-9
    )


@pytest.mark.weekly
@given(st.floats(0.05, 8.0), st.floats(0.0, 0.95), st.floats(-12.0, -0.1).map(lambda x: 10**x))
@settings(max_examples=60)
def test_the_mu_of_a_budget_is_the_largest_that_fits(epsilon, share, delta):
    mu = svt_gaussian_mu(epsilon, delta, share * epsilon)
    assert svt_gaussian_delta(epsilon, share * epsilon, mu) <= delta
    assert svt_gaussian_delta(epsilon, share * epsilon, mu * (1 + 1e-6)) > delta
    assert mu <= gaussian_mu(epsilon, delta) * (1 + 1e-9)


def test_a_run_that_exceeds_the_budget_alone_is_infeasible_and_the_least_delta_is_named():
    with pytest.raises(InfeasibleError, match=r"delta must be > 0\.06"):
        svt_gaussian_mu(0.5, 1e-6, 0.6)
    assert svt_gaussian_mu(0.5, 5e-324, 0.1) >= 0.0


def test_arguments_out_of_range_are_named():
    with pytest.raises(ValueError, match="passes must be an integer >= 0"):
        sequence_probability(1.0, 1.0, -1, 1.0, 1.0)
