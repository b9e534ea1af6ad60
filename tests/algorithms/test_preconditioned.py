"""Preconditioned gradient descent by public numbers: its level, its horizon, its steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpsco.estimators.least_squares import (
    horizon,
    preconditioned_mu,
    preconditioned_numbers,
    ridge_of,
    stable_step,
)

sizes = st.floats(-3.0, 3.0).map(lambda x: 10**x)


@given(sizes, sizes, sizes, sizes, st.integers(1, 500))
def test_the_level_is_the_root_of_the_sum_of_squares_rounded_up(
    gram, gram_std, moved, std, steps
):
    squares = [(gram / gram_std) ** 2, *[(moved / std) ** 2] * steps]
    exact = math.sqrt(math.fsum(squares))
    found = preconditioned_mu(gram, gram_std, moved, std, steps)
    assert exact * (1 - 1e-15) <= found <= exact * (1 + 1e-13)


def test_noise_on_scores_has_the_std_of_the_horizon():
    """Weights with the noise of tau on each eigenvector: the mean variance of the scores of the rows is 0.7^2."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(400, 7)) * np.array([9.0, 3, 2, 1, 1, 0.5, 0.1])
    values, vectors = np.linalg.eigh(rows.T @ rows)
    for ridge, noise in ((1.0, 0.1), (1e4, 3.0)):
        tau = horizon(values, ridge, gram_std=1e-9, noise=noise, n=400)
        covariance = (vectors * (tau * noise / (values + ridge)) ** 2) @ vectors.T
        variances = np.einsum("ij,jk,ik->i", rows, covariance, rows)
        assert math.sqrt(variances.mean()) == pytest.approx(0.7, rel=1e-9)


def test_eigenvalues_that_noise_hides_are_known_by_their_mean():
    """A bulk of 50 and two large ones, under noise whose edge is ten times the bulk: tau is nearly that without noise.

    False alarms: the mean of 98 eigenvalues is off by 50 / sqrt(98) = 5 of 50 per std; 5 of them are below 2^-20.
    """
    rng, dim, std = np.random.default_rng(1), 100, 50.0
    true = np.r_[np.full(98, 50.0), 5e4, 2e5]
    wanted = horizon(true, ridge_of(std, dim), gram_std=1e-9, noise=1.0, n=1000)
    for _ in range(5):
        noise = rng.normal(size=(dim, dim)) * std
        found = np.linalg.eigvalsh(np.diag(true) + (noise + noise.T) / 2)
        assert found[0] < -100
        assert horizon(found, ridge_of(std, dim), std, 1.0, 1000) == pytest.approx(
            wanted, rel=0.3
        )
    hidden = horizon(np.full(dim, -1e3), ridge_of(std, dim), std, 1.0, 1000)
    assert 0 < hidden < math.inf


@given(
    st.integers(1, 10**4),
    st.integers(1, 500),
    st.floats(-3.0, 1.0).map(lambda x: 10**x),
    st.integers(10, 10**6),
)
def test_the_share_is_what_the_steps_need(dim, scores, mu, n):
    curvature = 0.25 if scores == 1 else 1 / scores
    steps, share, clip = preconditioned_numbers(mu, n, dim, scores, curvature)
    longest = (
        4 * math.sqrt(2 * dim) * curvature / clip
    )  # horizon over the largest step, at a share of one half
    assert 32 <= steps <= 128
    assert 0.02 <= share <= 0.2
    if 0.02 < share < 0.2:
        assert longest * math.sqrt((1 - share) / share) == pytest.approx(steps)
    if steps > 32:  # as few as a fifth of the level allows
        assert share == pytest.approx(0.2, rel=0.1)
        assert steps == 128 or longest * 2 <= steps < longest * 2 + 1
    assert clip == min(max(mu * n / math.sqrt(scores * dim) / 250, 0.5), 1.0)


def test_a_clip_of_yours_is_kept():
    assert preconditioned_numbers(0.1, 1000, 10, 1, 0.25, clip=0.3)[2] == 0.3
    wide, narrow = (
        preconditioned_numbers(0.1, 1000, 300, 2, 0.5, clip=clip) for clip in (1.0, 0.5)
    )
    assert narrow[0] > wide[0]


@given(sizes, sizes, sizes)
def test_a_step_ends_at_the_largest_eigenvalue(curvature, ridge, largest):
    moved = stable_step(curvature, ridge, largest) * curvature * largest / (largest + ridge)
    assert moved == pytest.approx(1.0)
    assert stable_step(curvature, ridge, 0.0) < math.inf
