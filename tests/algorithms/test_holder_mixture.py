"""Noise for independent batches against enumeration of all hit patterns and high precision."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from tests.reference.papers import holder_mixture
from tests.reference.papers.holder import count_law, uniform_delta, uniform_rdp
from tests.reference.papers.holder_mixture import uniform_sigma, weighted_law
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_log_delta
from torch_dpsco.algorithms.holder_numbers import RunPath, run_path
from torch_dpsco.errors import ConditionError


def patterns(path, rate):
    """Yields (probability, sensitivity, number of hits) of every set of hit steps."""
    size = path.hits.size
    for pattern in itertools.product([0, 1], repeat=size):
        hits = sum(pattern)
        moved = path.drift + float(np.dot(pattern, path.hits)) if hits else 0.0
        yield rate**hits * (1 - rate) ** (size - hits), min(moved, path.cap), hits


def enumerated(path, rate, sigma, epsilon, inflation=0.0):
    return math.fsum(
        p * gaussian_delta((d + k * inflation) / sigma, epsilon)
        for p, d, k in patterns(path, rate)
        if d > 0
    )


@pytest.mark.slow
@given(
    st.integers(1, 9),
    st.floats(0.01, 1.0),
    st.floats(0.1, 4.0),
    st.floats(0.0, 3.0),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_the_mixture_agrees_with_the_enumeration_of_all_hit_patterns(
    size, rate, sigma, epsilon, seed
):
    rng = np.random.default_rng(seed)
    path = RunPath(
        drift=float(rng.uniform(0, 0.5)), hits=rng.uniform(0.0, 1.0, size), cap=math.inf
    )
    exact = enumerated(path, rate, sigma, epsilon)
    ours = uniform_delta(sigma, path, rate, epsilon)
    assert ours >= exact * (1 - 1e-12)
    assert (
        ours
        <= enumerated(path, rate, sigma, epsilon, inflation=path.hits.max() / 256) * (1 + 1e-9)
        + 1e-30
    )
    count = count_law(path, rate).delta(sigma, epsilon)
    assert count >= ours * (1 - 1e-9) or count == pytest.approx(ours, rel=0.02)
    largest = [
        binom.pmf(k, size, rate)
        * gaussian_delta((path.drift + k * path.hits.max()) / sigma, epsilon)
        for k in range(1, size + 1)
    ]
    assert count == pytest.approx(math.fsum(largest), rel=1e-9, abs=1e-30)


@pytest.mark.weekly
@given(st.integers(2, 600), st.floats(1e-3, 0.2), st.floats(0.1, 5.0), st.floats(-10, -3))
@settings(max_examples=25, deadline=None)
def test_the_noise_has_the_delta_asked_for_and_hardly_less_does_not(
    steps, rate, epsilon, log_delta
):
    delta = 10**log_delta
    path = run_path(
        np.full(steps, 0.05),
        1.0,
        holder_exponent=0.5,
        holder_constant=1.0,
        batch_size=1,
        hit_constant=2,
        glm=True,
    )
    sigma = uniform_sigma(path, rate, epsilon, delta) if (steps - 1) * rate > 2 * delta else None
    if sigma is not None:
        assert uniform_delta(sigma, path, rate, epsilon) <= delta
        assert uniform_delta(sigma * (1 - 1e-7), path, rate, epsilon) > delta


@pytest.mark.slow
def test_many_steps_in_blocks_are_never_below_and_two_percent_above_the_law_of_single_steps():
    path = RunPath(drift=0.01, hits=np.linspace(1.0, 0.01, 600), cap=math.inf)
    law = np.ones(1)
    for units in np.round(np.floor(path.hits * 300)).astype(int):  # rounded down: a lower bound
        step = np.zeros(units + 1)
        step[[0, -1]] = 1 - 2e-3, 2e-3
        law = np.convolve(law, step)[:4000]
    moved = 0.01 + np.arange(law.size) / 300
    for sigma in (1.0, 3.0):
        below = math.fsum(
            p * gaussian_delta(m / sigma, 1.0) for p, m in zip(law[1:], moved[1:], strict=True)
        )
        assert below <= uniform_delta(sigma, path, 2e-3, 1.0)
        assert uniform_delta(sigma * 1.02, path, 2e-3, 1.0) < below


@pytest.mark.parametrize(
    ("trials", "rate"),
    [(1, 0.3), (7, 1.0), (50, 0.02), (10**6, 1e-6), (10**6, 0.3), (999, 0.999)],
)
def test_binomial_masses_are_upper_bounds(trials, rate):
    start, masses, lost = holder_mixture._binomial(trials, rate, 1e-40)
    with mpmath.workdps(60):
        p = mpmath.mpf(rate)
        for k in (0, masses.size // 3, masses.size // 2, masses.size - 1):
            j = start + k
            exact = mpmath.binomial(trials, j) * p**j * (1 - p) ** (trials - j)
            assert (
                exact - mpmath.mpf("1e-320")
                <= masses[k]
                <= exact * (1 + mpmath.mpf("1e-6")) + (mpmath.mpf("1e-39") if k == 0 else 0)
            )
    assert masses.sum() + lost >= 1 - 1e-14
    assert masses.sum() == pytest.approx(1.0, rel=1e-6)
    assert lost <= 3e-40


def test_a_hit_of_size_zero_still_pays_for_the_drift():
    path = RunPath(drift=1.0, hits=np.array([0.0, 0.0]), cap=math.inf)
    exact = (1 - 0.9**2) * gaussian_delta(0.5, 1.0)
    assert exact <= uniform_delta(2.0, path, 0.1, 1.0) <= exact * (1 + 1e-9)


@given(st.floats(0.0, 20.0), st.floats(-8, 3))
def test_the_curve_of_the_mixture_is_never_below_the_exact_one(epsilon, log_mu):
    mu = 10**log_mu
    ours = float(holder_mixture._log_delta(epsilon, np.array([mu]))[0])
    exact = gaussian_log_delta(epsilon, mu)
    assert ours >= exact - 1e-13 * abs(exact)
    if exact > -60:
        # log_ndtr errs by 16 u (4 + 60) at most here, of a difference of its values that is at least mu / 12
        assert ours <= exact + max(1e-8, 2e-12 / mu)


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_the_renyi_bound_is_the_sum_over_patterns_or_above(rate):
    path = RunPath(drift=0.2, hits=np.array([0.7, 0.1, 0.4, 0.3]), cap=1.2)
    for order, sigma in itertools.product([1.5, 2.0, 16.0], [0.5, 3.0]):
        exact = math.fsum(
            p * math.exp(order * (order - 1) * d**2 / (2 * sigma**2))
            for p, d, _ in patterns(path, rate)
        )
        largest = [0.0, *np.minimum(0.2 + np.cumsum([0.7, 0.4, 0.3, 0.1]), 1.2)]
        by_count = math.fsum(
            binom.pmf(k, 4, rate) * math.exp(order * (order - 1) * d**2 / (2 * sigma**2))
            for k, d in enumerate(largest)
        )
        ours = uniform_rdp(order, sigma, path, rate)
        assert ours >= math.log(exact) / (order - 1)
        assert ours == pytest.approx(math.log(by_count) / (order - 1), rel=1e-9)


@pytest.mark.slow
def test_records_that_are_hit_thousands_of_times_are_planned_on_a_coarser_grid():
    path = RunPath(drift=0.0, hits=np.full(100_000, 0.001), cap=math.inf)
    law = weighted_law(path, 0.1)
    assert law.masses.size <= 2**17
    mean = float(law.masses @ law.sensitivities)
    assert 10.0 <= mean <= 10.0 * 1.07


def test_a_delta_that_would_let_the_answer_out_without_noise_is_refused():
    path = RunPath(drift=0.0, hits=np.ones(3), cap=math.inf)
    with pytest.raises(ConditionError, match="probability that a record is used at all"):
        uniform_sigma(path, 1e-5, 1.0, 1e-3)
    with pytest.raises(ConditionError, match="delta must be at least"):
        uniform_sigma(RunPath(0.0, np.ones(100), math.inf), 0.1, 1.0, 1e-39)


def test_one_step_needs_no_noise():
    path = run_path(
        [0.1], 1.0, holder_exponent=0.0, holder_constant=1.0, batch_size=1, hit_constant=2
    )
    assert uniform_sigma(path, 0.5, 1.0, 1e-6) == 0.0
    assert uniform_delta(1.0, path, 0.5, 1.0) == 0.0
    assert uniform_rdp(2.0, 1.0, path, 0.5) == 0.0
