"""Correlated noise: sensitivity over all participations, the recurrence, and how little error prefix sums have."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.analysis.rounding import gamma
from torch_dpsco.accounting.calibrate import noise_multiplier
from torch_dpsco.accounting.designs import Poisson
from torch_dpsco.algorithms.correlated_numbers import Banded, least_error, square_root
from torch_dpsco.errors import AdjacencyError, ConditionError

PAGE = Path(__file__).parents[2] / "docs" / "proofs" / "correlated.md"


@st.composite
def strategies(draw, most=6):
    lifetimes = draw(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=most))
    column = np.cumsum([1.0 - min(sum(lifetimes), 0.999), *lifetimes])[::-1]
    return Banded(tuple((column / column[0]).tolist()))


def dense(strategy, steps):
    column = np.zeros(steps)
    column[: strategy.bands] = strategy.coefficients[:steps]
    return np.array(
        [[column[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)]
    )


def run(strategy, fresh, forget=()):
    """All noise of a run from its fresh noise; the past is forgotten before the steps in `forget`."""
    noise, past = [], []
    for t, z in enumerate(fresh):
        past = [] if t in forget else past[: strategy.bands - 1]
        noise.append(strategy.correlated(z, past))
        past = [noise[-1], *past]
    return np.array(noise)


def patterns(steps, separation):
    for size in range(1, steps + 1):
        for chosen in combinations(range(steps), size):
            if all(later - earlier >= separation for earlier, later in pairwise(chosen)):
                yield list(chosen)


# Sensitivity


@settings(deadline=None, max_examples=30)
@given(strategies(most=4), st.integers(1, 9), st.integers(0, 3))
def test_sensitivity_is_the_largest_over_all_patterns(strategy, steps, more):
    """Equal unit rows add up as much as any: the norm of the sum of the columns is compared, not the formula."""
    separation = strategy.bands + more
    matrix = dense(strategy, steps)
    largest = max(
        np.linalg.norm(matrix[:, chosen].sum(axis=1)) for chosen in patterns(steps, separation)
    )
    for adjacency, factor in (("zero_out", 1.0), ("replace_one", 2.0)):
        assert strategy.sensitivity(steps, separation, adjacency) == pytest.approx(
            factor * largest, rel=1e-12
        )


@settings(deadline=None, max_examples=60)
@given(
    strategies(),
    st.integers(1, 25),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_no_rows_of_a_record_move_the_sum_further(strategy, steps, more, dim, seed):
    """Any directions, any norms up to 1, any steps that are apart, one row zeroed or replaced by another."""
    rng, separation = np.random.default_rng(seed), strategy.bands + more
    old, new = np.zeros((2, steps, dim))
    t = int(rng.integers(0, separation))
    while t < steps:
        for rows in (old, new):
            row = rng.normal(size=dim)
            rows[t] = row / np.linalg.norm(row) * rng.choice([1.0, rng.uniform()])
        t += separation + int(rng.integers(0, 3))
    matrix = dense(strategy, steps)
    for neighbor, adjacency in (
        (np.zeros_like(old), "zero_out"),
        (new, "replace_one"),
        (-old, "replace_one"),
    ):
        moved = np.linalg.norm(matrix @ (old - neighbor))
        assert moved <= strategy.sensitivity(steps, separation, adjacency)


def test_fewer_steps_apart_than_bands_are_refused():
    strategy = square_root(4)
    with pytest.raises(
        ConditionError, match=r"separation must be at least 4, the number of bands \(got 3\)"
    ):
        strategy.sensitivity(10, 3, "zero_out")
    with pytest.raises(ConditionError, match="separation"):
        strategy.rounding(10, 3, dim=1)
    # what it refuses: rows of one record add up beyond the sum of squares
    columns = dense(strategy, 10)[:, [0, 3, 6, 9]]
    assert np.linalg.norm(columns.sum(axis=1)) > 1.1 * np.linalg.norm(columns)


@settings(deadline=None, max_examples=60)
@given(strategies(most=12), st.integers(1, 40))
def test_sensitivity_is_rounded_up(strategy, steps):
    """Against exact rational arithmetic, and within a few units of rounding of it."""
    separation = strategy.bands
    squares = [Fraction(c) ** 2 for c in strategy.coefficients]
    exact = sum(sum(squares[: steps - first]) for first in range(0, steps, separation))
    bound = Fraction(strategy.sensitivity(steps, separation, "zero_out"))
    assert exact <= bound**2 <= exact * (1 + Fraction(1, 2**46))
    assert Fraction(strategy.norm) ** 2 >= sum(squares)
    assert strategy.sensitivity(steps, separation, "replace_one") == 2.0 * float(bound)


def test_add_remove_is_refused():
    with pytest.raises(AdjacencyError, match="zero_out and replace_one"):
        square_root(2).sensitivity(10, 2, "add_remove")
    with pytest.raises(ValueError, match="adjacency must be one of"):
        square_root(2).sensitivity(10, 2, "both")


def test_the_loss_of_an_adaptive_run_is_that_of_one_gaussian_release():
    """Rows turn to where the last answers point; the privacy loss still is N(m/2, m), m = S^2/z^2, exactly."""
    strategy, steps, separation, z, runs = square_root(3), 11, 4, 1.3, 40_000
    rng = np.random.default_rng(5)
    answers, rows, means = np.zeros((3, steps, runs, 2))
    fresh = z * rng.normal(size=(steps, runs, 2))
    noise, past, loss = [], [], np.zeros(runs)
    for t in range(steps):
        if t % separation == 0:
            turned = answers[:t].sum(axis=0) + np.array([1.0, 0.0])
            rows[t] = np.stack([-turned[:, 1], turned[:, 0]], axis=1)
            rows[t] /= np.linalg.norm(rows[t], axis=1, keepdims=True)
        noise.append(strategy.correlated(fresh[t], past))
        past = [noise[-1], *past][:2]
        answers[t] = rows[t] + noise[-1]
        # what is known after it: sum_j c_j answers is N(sum_j c_j rows, z^2) with the record, N(0, z^2) without
        seen = sum(c * answers[t - j] for j, c in enumerate(strategy.coefficients) if j <= t)
        means[t] = sum(c * rows[t - j] for j, c in enumerate(strategy.coefficients) if j <= t)
        loss += ((seen**2 - (seen - means[t]) ** 2) / (2 * z * z)).sum(axis=1)
    m = (strategy.sensitivity(steps, separation, "zero_out") / z) ** 2
    assert np.ptp(rows[4, :, 0]) > 1.9  # rows do depend on answers
    assert kstest((loss - m / 2) / math.sqrt(m), "norm").pvalue > 1e-6
    m *= 1.1
    assert kstest((loss - m / 2) / math.sqrt(m), "norm").pvalue < 1e-6


# The recurrence


@settings(deadline=None, max_examples=40)
@given(strategies(), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_recurrence_is_the_inverse_of_the_matrix(strategy, steps, seed):
    fresh = np.random.default_rng(seed).normal(size=(steps, 2, 3))
    solved = np.linalg.solve(dense(strategy, steps), fresh.reshape(steps, -1)).reshape(
        fresh.shape
    )
    np.testing.assert_allclose(run(strategy, fresh), solved, rtol=1e-9, atol=1e-9)


def test_forgotten_noise_needs_no_separation():
    """The matrix of a run that forgets is read off its noise; it forgets between steps 4 and 5."""
    strategy = square_root(4)
    fresh = np.eye(10)
    matrix, without = (np.linalg.inv(run(strategy, fresh, forget)) for forget in ((5,), ()))
    assert np.linalg.norm(matrix[:, [4, 5]].sum(axis=1)) <= math.sqrt(2) * strategy.norm
    assert np.linalg.norm(without[:, [4, 5]].sum(axis=1)) > 1.1 * math.sqrt(2) * strategy.norm
    np.testing.assert_allclose(without, dense(strategy, 10), atol=1e-12)


@given(strategies(most=8))
def test_no_noise_grows(strategy):
    weights = strategy.prefix_weights(200)
    assert weights.min() >= -1e-9
    assert weights.max() <= 1.0 + 1e-9
    fresh = np.zeros(200)
    fresh[0] = 1.0
    np.testing.assert_allclose(np.cumsum(run(strategy, fresh)), weights, atol=1e-9)


@pytest.mark.parametrize(
    "coefficients",
    [
        (),
        (0.9,),
        (2.0, 1.0),
        (1.0, 2.0),
        (1.0, 0.5, 0.6),
        (1.0, -0.1),
        (1.0, math.nan),
        (1, 1.0 + 1e-15),
    ],
)
def test_noise_that_grows_is_refused(coefficients):
    with pytest.raises(ValueError, match="coefficients must be"):
        Banded(coefficients)


def test_what_is_refused_rounds_fresh_noise_to_nothing():
    """c = (1, 2): after 60 steps C w is no more the fresh noise; with the square root it is to 15 digits."""
    fresh = np.random.default_rng(0).normal(size=70)
    noise = [0.0]
    for z in fresh:
        noise.append(z - 2.0 * noise[-1])
    exact = [Fraction(w) + 2 * Fraction(before) for before, w in pairwise(noise)]
    assert (
        max(abs(float(z - Fraction(x))) for z, x in zip(exact[60:], fresh[60:], strict=True))
        > 1.0
    )
    assert abs(dense(square_root(2), 70) @ run(square_root(2), fresh) - fresh).max() < 1e-14


def test_fresh_noise_meets_the_echo_in_one_rounding():
    strategy, rng = square_root(5), np.random.default_rng(3)
    for _ in range(200):
        fresh, *past = rng.normal(size=5) * [1e-9, 1, 1, 1, 1]
        echo = 0.0
        for coefficient, noise in zip(strategy.coefficients[1:], past, strict=True):
            echo += coefficient * noise
        assert strategy.correlated(fresh, past) == fresh - echo
    assert strategy.correlated(fresh, []) == fresh


def echo_errors(strategy, fresh, noise):
    """Exact errors a_t = z_t - sum_j c_j w_{t-j} - w_t of a run in one coordinate, but for the last subtraction."""
    errors = []
    for t in range(len(fresh)):
        past = noise[max(0, t - strategy.bands + 1) : t][::-1]
        exact = sum(
            Fraction(c) * Fraction(w)
            for c, w in zip(strategy.coefficients[1:], past, strict=False)
        )
        errors.append(float(Fraction(float(-strategy.correlated(0.0, list(past)))) - exact))
    return np.array(errors)


def test_errors_of_the_echo_are_within_the_rounding():
    """Two data sets with the same answers: their noise differs in the record's steps, and so do errors near these."""
    strategy, steps, separation = least_error(steps=120, bands=8), 120, 40
    fresh = np.random.default_rng(7).normal(size=steps)
    noise = run(strategy, fresh)
    errors = echo_errors(strategy, fresh, noise)
    assert (
        0.0 < abs(errors).max() <= gamma(8) * sum(strategy.coefficients[1:]) * abs(noise).max()
    )
    other = noise.copy()
    other[::separation] += 1.0
    differ = echo_errors(strategy, fresh, other) - errors
    assert set(np.flatnonzero(differ)) <= {t + j for t in (0, 40, 80) for j in range(1, 8)}
    assert 0.0 < np.linalg.norm(differ) <= strategy.rounding(steps, separation, dim=1)


@pytest.mark.parametrize(
    ("steps", "bands", "separation", "dim"), [(1000, 16, 100, 10**6), (64, 2, 64, 1)]
)
def test_the_rounding_is_that_of_the_page(steps, bands, separation, dim):
    strategy = square_root(bands)
    participations = math.ceil(steps / separation)
    size = gamma(bands) * sum(strategy.coefficients[1:]) * 37.6 * math.sqrt(steps)
    bound = 2 * math.sqrt(participations * (bands - 1) * dim) * size
    assert strategy.rounding(steps, separation, dim) == pytest.approx(bound, rel=1e-12)
    assert strategy.rounding(steps, separation, dim) >= bound
    assert Banded((1.0,)).rounding(steps, separation, dim) == 0.0


def test_long_sums_are_refused():
    with pytest.raises(ConditionError, match="steps must be at most"):
        square_root(64).rounding(10**15, 64, dim=1)


# Error


@given(strategies(), st.integers(1, 30))
def test_stds_are_those_of_the_dense_matrices(strategy, steps):
    sums = np.tril(np.ones((steps, steps))) @ np.linalg.inv(dense(strategy, steps))
    np.testing.assert_allclose(
        strategy.prefix_std(steps), np.linalg.norm(sums, axis=1), rtol=1e-8
    )


def mean_error(strategy, steps):
    return strategy.norm * float(np.sqrt((strategy.prefix_std(steps) ** 2).mean()))


@pytest.mark.parametrize(("steps", "bands"), [(1, 1), (20, 20), (100, 4), (100, 32), (1000, 16)])
def test_the_search_beats_the_square_root_and_every_neighbor(steps, bands):
    found, rng = least_error(steps, bands), np.random.default_rng(1)
    assert found.bands == bands
    least = mean_error(found, steps)
    assert least <= mean_error(square_root(bands), steps)
    lifetimes = -np.diff([*found.coefficients, 0.0])
    for _ in range(50 * (bands > 1)):
        moved = lifetimes * np.exp(0.1 * rng.normal(size=bands))
        column = np.cumsum(moved[::-1])[::-1]
        assert mean_error(Banded(tuple((column / column[0]).tolist())), steps) >= least * (
            1 - 1e-7
        )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("steps", [2, 10, 300])
def test_two_bands_are_those_of_an_exhaustive_search(steps):
    grid = np.linspace(0.0, 1.0, 2001)
    best = min(grid, key=lambda c: mean_error(Banded((1.0, float(c))), steps))
    assert least_error(steps, 2).coefficients[1] == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("steps", [5, 40, 100])
def test_all_bands_come_close_to_what_no_strategy_beats(steps):
    singular = np.linalg.svd(np.tril(np.ones((steps, steps))), compute_uv=False)
    assert 1.0 <= mean_error(least_error(steps, steps), steps) / (singular.sum() / steps) <= 1.08


@pytest.mark.parametrize(("steps", "bands"), [(0, 1), (3, 4), (3, 0)])
def test_no_strategy_has_more_bands_than_steps(steps, bands):
    with pytest.raises(ValueError, match=r"bands must be|steps must be"):
        least_error(steps, bands)


def test_an_unsampled_run_costs_the_same_ratio_for_every_number_of_passes():
    strategy = square_root(8)
    for passes in (1, 5, 10):
        whole = strategy.sensitivity(100, 100 // passes, "zero_out")
        assert whole / math.sqrt(passes) == pytest.approx(strategy.norm, rel=1e-12)


# Numbers that the page quotes


def quoted(columns):
    rows = [
        re.findall(r"[\d.]+", line)
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if "| 1" in line[:3]
    ]
    return [row for row in rows if len(row) == columns]


@pytest.mark.slow
def test_quoted_ratios_are_computed_ones():
    rows = quoted(6)
    assert len(rows) >= 8
    for steps, bands, *ratios in rows:
        found = []
        for strategy in (square_root(int(bands)), least_error(int(steps), int(bands))):
            std = strategy.prefix_std(int(steps))
            alone = square_root(1).prefix_std(int(steps))
            found.append(
                (np.linalg.norm(std) / np.linalg.norm(alone), std[-1] / alone[-1], strategy.norm)
            )
        (mean, last, norm), (best_mean, best_last, best_norm) = found
        expected = [mean * norm, best_mean * best_norm, last * norm, best_last * best_norm]
        assert [float(ratio) for ratio in ratios] == pytest.approx(expected, abs=0.0011)


@pytest.mark.weekly
def test_quoted_noise_of_poisson_batches_is_computed_noise():
    rows = quoted(5)
    assert len(rows) == 6
    for steps, passes, *ratios in rows:
        design = Poisson(100, 100 * int(steps) // int(passes))
        for epsilon, ratio in zip((1.0, 4.0, 8.0), ratios, strict=True):
            noise = noise_multiplier(
                epsilon, 1e-6, design=design, steps=int(steps), adjacency="zero_out", rtol=1e-3
            )
            alone = math.sqrt(int(passes)) / gaussian_mu(epsilon, 1e-6)
            assert float(ratio) == pytest.approx(noise / alone, abs=0.0011)
