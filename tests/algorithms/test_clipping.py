"""Clipping bias, thresholds, noise of means and exchange rates, against mpmath at 40 digits and worst-case laws."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.reference.heavy_tailed_literal import algorithm_12, clip_row
from tests.reference.papers.heavy_tailed import (
    clip_bias_bound,
    clip_bias_constant,
    coordinatewise_clip,
    coordinatewise_groups,
    coordinatewise_noise_std,
    exchange_rate_proximal_pl,
    exchange_rate_strongly_convex,
)
from torch_dpsco.accounting.analysis.gaussian import SENSITIVITIES
from torch_dpsco.algorithms import heavy_tailed_numbers as cl
from torch_dpsco.errors import AdjacencyError, InfeasibleError

ORDERS = st.floats(1.001, 200.0) | st.sampled_from([2.0, 1.0 + 1e-12, 1e6])
SIZES = st.floats(1e-6, 1e6)
ADJACENCIES = st.sampled_from(["replace_one", "zero_out", "add_remove"])


def exact_constant(k):
    return mpmath.exp((k - 1) * mpmath.log(k - 1) - k * mpmath.log(k))


@given(ORDERS, SIZES, st.floats(0.01, 100.0))
@example(1e6, 1.0, 1.0001)
@example(1.0 + 1e-12, 1.0, 2.0)
def test_bias_and_thresholds_agree_with_40_digits(k, r, ratio):
    with mpmath.workdps(40):
        x, c = mpmath.mpf(k), exact_constant(mpmath.mpf(k))
        assert clip_bias_constant(k) == pytest.approx(float(c), rel=1e-12)
        bias = c * mpmath.mpf(r) / mpmath.mpf(ratio) ** (x - 1)
        if 1e-290 < bias < 1e290:
            assert cl.clip_bias(r, k, r * ratio) == pytest.approx(
                float(bias), rel=1e-14 * max(k, 100.0)
            )
            paper = bias / c / (x - 1)
            assert clip_bias_bound(r, k, r * ratio, mode="paper") == pytest.approx(
                float(paper), rel=1e-14 * max(k, 100.0)
            )
        linear = r * ((x - 1) * c / mpmath.mpf(ratio)) ** (1 / x)
        assert cl.clip_threshold_linear(r, k, ratio) == pytest.approx(float(linear), rel=1e-12)
        square = r * ((x - 1) * 3 * c**2 / mpmath.mpf(ratio)) ** (1 / (2 * x))
        assert cl.clip_threshold_square(r, k, 3.0, ratio) == pytest.approx(
            float(square), rel=1e-12
        )


def test_the_constant_tends_to_one_at_k_1_and_the_bias_vanishes_for_large_k_beyond_the_moment():
    assert clip_bias_constant(1.0 + 1e-13) == pytest.approx(1.0, abs=1e-11)
    assert cl.clip_bias(1.0, 1e6, 1.001) < 1e-300
    assert cl.clip_bias(1.0, 1e6, 0.999) > 1e300
    assert cl.clip_bias(1.0, 1e6, 1e-300) == math.inf


@given(st.floats(1.05, 20.0), SIZES, st.floats(0.0, 3.0))
def test_the_two_point_law_attains_the_bias_bound(k, r, excess):
    """Mass p at x = kC/(k-1) and the rest at 0, with p x^k = r^k: its bias p (x - C) is the bound."""
    C = (k - 1) * r / k * (1 + excess)
    x = k * C / (k - 1)
    p = math.exp(k * (math.log(r) - math.log(x)))
    assert p <= 1 + 1e-9
    assert p * (x - C) == pytest.approx(cl.clip_bias(r, k, C), rel=1e-9)


@given(st.floats(1.1, 20.0), SIZES, st.floats(0.01, 50.0), st.integers(0, 2**32 - 1))
def test_no_law_with_the_moment_has_more_bias(k, r, ratio, seed):
    generator = np.random.default_rng(seed)
    values = generator.pareto(generator.uniform(0.5, 4.0), size=50) + 1e-3
    weights = generator.dirichlet(np.full(50, 0.3))
    values *= r / (weights @ values**k) ** (1 / k)
    C = ratio * r
    assert weights @ np.maximum(values - C, 0.0) <= cl.clip_bias_worst(r, k, C) * (1 + 1e-9)
    assert cl.clip_bias_worst(r, k, C) <= cl.clip_bias(r, k, C)


def test_the_worst_bias_is_continuous_and_attained_by_a_constant_norm_below_the_kink():
    kink = 2.0 * 1.5 / 3.0  # (k-1) r/k at r = 1.5, k = 3
    assert cl.clip_bias_worst(1.5, 3.0, kink * (1 - 1e-12)) == pytest.approx(
        cl.clip_bias(1.5, 3.0, kink), rel=1e-9
    )
    assert cl.clip_bias_worst(1.5, 3.0, 0.25) == 1.25
    assert cl.clip_bias_worst(1.5, 3.0, 2.0) == cl.clip_bias(1.5, 3.0, 2.0)


@given(st.floats(1.1, 50.0), SIZES, st.floats(1e-6, 10.0), st.floats(0.3, 3.0))
def test_each_threshold_minimizes_its_objective(k, r, weight, other):
    C = cl.clip_threshold_linear(r, k, weight)
    least = cl.clip_bias(r, k, C) + weight * C
    assert least == pytest.approx(k * cl.clip_bias(r, k, C), rel=1e-9)
    assert cl.clip_bias(r, k, other * C) + weight * other * C >= least * (1 - 1e-9)
    C = cl.clip_threshold_square(r, k, 2.0, weight)
    assert 2 * cl.clip_bias(r, k, other * C) ** 2 + weight * (other * C) ** 2 >= (
        2 * cl.clip_bias(r, k, C) ** 2 + weight * C**2
    ) * (1 - 1e-9)


@given(
    st.floats(1e-200, 1e200),
    st.integers(1, 10**7),
    st.floats(1e-80, 1e80),
    st.integers(1, 10**6),
    ADJACENCIES,
)
@example(1.0, 3, 1e-250, 7, "replace_one")
@example(1.0, 3, 1e250, 7, "zero_out")
def test_the_noise_of_a_mean_is_never_below_its_exact_value(C, s, rho, steps, adjacency):
    sigma = Fraction(cl.mean_noise_std(C, s, rho, steps, adjacency))
    S = Fraction(SENSITIVITIES[adjacency]) * Fraction(C) / s
    cost = steps * S**2 / (2 * sigma**2) / Fraction(rho)
    assert 1 - Fraction(1, 2**46) <= cost <= 1


@given(
    st.integers(1, 6),
    st.floats(1e-3, 1e3),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["one", "null"]),
)
def test_one_record_moves_a_clipped_mean_by_no_more_than_declared(s, C, seed, kind):
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((s, 3)) * 10.0 ** generator.uniform(-5, 5, size=(s, 1))
    rows[0] = generator.choice([0.0, 1e-310, 1e150, -1e150, math.inf, math.nan], size=3)
    other = rows.copy()
    other[0] = -rows[0] if kind == "one" else 0.0
    moved = (
        np.sum([clip_row(g, C) for g in rows], axis=0)
        - np.sum([clip_row(g, C) for g in other], axis=0)
    ) / s
    assert np.linalg.norm(moved) <= cl.sensitivity_factor(
        "replace_one" if kind == "one" else "zero_out"
    ) * C / s * (1 + 1e-9)


def test_noise_outside_of_floating_point_and_without_privacy_is_refused():
    with pytest.raises(InfeasibleError, match="clip and rho"):
        cl.mean_noise_std(1e-300, 1000, 1.0)
    with pytest.raises(InfeasibleError, match="clip and rho"):
        cl.mean_noise_std(1e300, 1, 1e-300)
    with pytest.raises(InfeasibleError, match="clip and rho"):
        cl.mean_noise_std(1e-310, 1000, 1e-300)
    with pytest.raises(ValueError, match="rho must be finite"):
        cl.mean_noise_std(1.0, 10, math.inf)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cl.mean_noise_std(0.0, 10, 1.0), "clip must be > 0"),
        (lambda: cl.mean_noise_std(math.inf, 10, 1.0), "clip must be finite"),
        (lambda: cl.mean_noise_std(1.0, 0, 1.0), "batch_size must be an integer >= 1"),
        (lambda: cl.mean_noise_std(1.0, 10, 0.0), "rho must be > 0"),
        (lambda: cl.mean_noise_std(1.0, 10, 1.0, steps=0), "steps must be an integer >= 1"),
        (lambda: cl.mean_noise_std(1.0, 10, 1.0, adjacency="swap"), "adjacency must be one of"),
        (lambda: coordinatewise_noise_std(4, 5, 1.0, 1, 1.0), "groups must be <= batch_size=4"),
        (lambda: coordinatewise_noise_std(4, 2, 1.0, 0, 1.0), "dim must be an integer >= 1"),
        (lambda: coordinatewise_groups(3, 0.0), "failure must be in"),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_threshold_beyond_floating_point_asks_for_a_clip():
    with pytest.raises(InfeasibleError, match="give a clip"):
        cl.clip_threshold_linear(1e300, 1.01, 1e-300)


@given(st.integers(1, 60), st.data())
def test_the_noise_of_a_median_covers_the_worst_group(s, data):
    """The worst pair: the differing record turns its group mean from all at -tau to the record at +tau."""
    m, d = data.draw(st.integers(1, s)), data.draw(st.integers(1, 4))
    rows = np.full((s, d), -1.0)
    if m > 1:  # a median of groups follows one of them only where it is the middle one
        size = s // m
        upper = (m - 1) // 2
        rows[size : size * (1 + upper)] = 1.0
    other = rows.copy()
    other[0] = 1.0
    moved = np.linalg.norm(algorithm_12(rows, m, 1.0) - algorithm_12(other, m, 1.0))
    sigma = coordinatewise_noise_std(s, m, 1.0, d, 0.5)
    assert moved <= sigma * (1 + 1e-12)
    if m == 1:
        assert moved == pytest.approx(sigma, rel=1e-12)
    group = Fraction(2, s // m)  # of a group mean, in each coordinate
    assert Fraction(sigma) ** 2 >= group**2 * d
    assert coordinatewise_noise_std(s, m, 1.0, d, 0.5, "zero_out") == pytest.approx(
        sigma / 2, rel=1e-14
    )


def test_groups_cut_by_position_have_no_guarantee_under_add_remove():
    with pytest.raises(AdjacencyError, match="cut by position"):
        coordinatewise_noise_std(8, 4, 1.0, 2, 1.0, "add_remove")


@given(st.floats(1.1, 20.0), st.floats(0.1, 10.0), st.floats(0.4, 2.5))
def test_the_threshold_of_the_median_minimizes_bias_and_noise(k, gamma, other):
    def objective(tau):
        bias = (2.0 / tau) ** (k - 1) * clip_bias_constant(k) * gamma**k
        return bias**2 + coordinatewise_noise_std(1000, 5, tau, 10, 0.5) ** 2

    tau = coordinatewise_clip(1000, 5, 10, 0.5, gamma, k)
    assert objective(other * tau) >= objective(tau) * (1 - 1e-9)


@given(st.integers(1, 1000), st.integers(1, 1000), st.floats(1e-4, 10.0), st.integers(1, 50))
def test_exchange_rates_are_those_of_the_specification_and_half_under_zero_out(s, d, rho, T):
    n = s * T
    wanted = {
        cl.exchange_rate_mean(s, d, rho): math.sqrt(2 * d / rho) / s,
        cl.accelerated_factor(T) * cl.exchange_rate_mean(s, d, rho): 4
        * math.sqrt(d * T / (3 * rho))
        / n,
        cl.exchange_rate_phase(n, d, rho): math.sqrt(8 * d / rho) / n,
        exchange_rate_strongly_convex(n, d, T, rho, 3.0, 0.5): math.sqrt(
            2 * 0.5 * d / (3.0 * rho)
        )
        * T
        / n,
        exchange_rate_proximal_pl(n, d, T, rho): math.sqrt(4 * d / (3 * rho)) * T / n,
    }
    for found, value in wanted.items():
        assert found == pytest.approx(value, rel=1e-12)
    assert cl.exchange_rate_phase(n, d, rho, "zero_out") == pytest.approx(
        cl.exchange_rate_phase(n, d, rho) / 2
    )


def test_the_quantile_of_the_exchange_rate_is_the_best_threshold_for_any_law():
    norms = np.sort(np.random.default_rng(3).pareto(1.5, size=4001))
    a = cl.exchange_rate_mean(100, 5, 0.5)
    assert 0.03 < a < 0.05
    objective = [np.mean(np.maximum(norms - C, 0.0)) + a * C for C in norms]
    assert abs(np.argmin(objective) / 4001 - (1 - a)) < 1e-3
