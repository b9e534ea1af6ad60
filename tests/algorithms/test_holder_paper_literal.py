"""The library's formulas of the Hoelder paper against the numpy transcription of its algorithms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.reference import holder_paper_literal as paper
from tests.reference.papers.holder import (
    gradient_noise_paper,
    output_sensitivity_paper,
    output_sigma_paper,
)
from torch_dpsco.algorithms.holder_numbers import run_path


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("radius", [1.5, math.inf])
def test_the_noise_of_algorithm_1_is_that_of_the_transcription(alpha, radius):
    bounded = math.isfinite(radius)
    constants = (alpha, 1.2, 1.0, 0.8)
    sensitivity = paper.sensitivity_1(*constants, radius, 0.02, 400, 300, 5e-7)
    domain = (radius, "bounded") if bounded else (None, "unbounded")
    run = (*constants, domain[0], 0.02, 400, 300)
    assert output_sensitivity_paper(*run, 5e-7, domain[1]) == pytest.approx(
        sensitivity, rel=1e-10
    )
    sigma = paper.sigma_1(sensitivity, 0.8, 1e-6)
    assert output_sigma_paper(*run, 0.8, 1e-6, domain[1]) == pytest.approx(sigma, rel=1e-10)


def test_the_noise_of_algorithm_2_is_that_of_the_transcription():
    sigma = paper.sigma_2(0.5, 1.2, 1.0, 1.5, 400, 300, 0.8, 1e-6, 0.3)
    ours = gradient_noise_paper(
        300, 1, 400, 0.8, 1e-6, split=0.3, grad_bound=1.0 + 1.2 * 1.5**0.5
    )
    # the library states the noise on the sum of a batch, the paper that on the gradient of its one record
    assert math.sqrt(ours.variance) == pytest.approx(sigma, rel=1e-12)


def test_literal_runs_stay_below_the_tight_and_the_tight_below_the_paper_bound():
    """Algorithm 1 with noise off, on neighbors: |y - w.x|^1.5, drawn indices."""
    rng = np.random.default_rng(0)
    n, dim, eta, radius, steps = 30, 3, 0.05, 1.0, 90
    alpha, big_l, m = 0.5, 1.5 * 2**0.5, 1.5
    x = rng.normal(size=(n, dim))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    y = rng.uniform(-1, 1, n)
    other = y.copy()
    other[0] = -y[0]

    def gradient(labels):
        def at(w, index):
            residual = labels[index] - x[index] @ w
            return -1.5 * np.sign(residual) * abs(residual) ** 0.5 * x[index]

        return at

    limit = output_sensitivity_paper(alpha, big_l, m, None, radius, eta, steps, n, 1e-3)
    path = run_path(
        np.full(steps, eta),
        1.5 * 2**0.5,
        holder_exponent=alpha,
        holder_constant=big_l,
        batch_size=1,
        hit_constant=2,
        glm=True,
    )
    for _ in range(30):
        indices = rng.integers(n, size=steps)
        one, first = paper.algorithm_1(gradient(y), dim, radius, eta, indices, np.zeros(dim))
        two, _ = paper.algorithm_1(gradient(other), dim, radius, eta, indices, np.zeros(dim))
        hit = np.flatnonzero(indices[:-1] == 0)
        tight = path.drift + path.hits[hit].sum() if hit.size else 0.0
        assert np.linalg.norm(one - two) <= tight <= limit
        # with zero noise both algorithms are the same run
        same, again = paper.algorithm_2(
            gradient(y), dim, radius, eta, indices, np.zeros((steps, dim))
        )
        assert np.array_equal(first, again)
        assert np.array_equal(one, same)
