"""Tilted objectives: weights, curvature and sensitivity against minimizers found by Newton's method."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.papers.output import tilted_sensitivity_paper, tilted_smoothness
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.output import (
    erm_sensitivity,
    tilted_max_weight,
    tilted_sensitivity,
    tilted_strong_convexity,
)

tilts = st.floats(-20.0, 20.0)


@given(tilts, st.floats(0.0, 10.0), st.integers(1, 50), st.integers(0, 10**6))
def test_no_weight_exceeds_the_bound(tilt, loss_range, n, seed):
    rng = np.random.default_rng(seed)
    losses = loss_range * rng.choice([0.0, 1.0, rng.uniform()], n)
    exponent = tilt * losses
    weights = np.exp(exponent - exponent.max())
    assert weights.max() / weights.sum() <= tilted_max_weight(tilt, loss_range, n) * (1 + 1e-14)


def test_the_bound_on_the_weight_is_attained_and_has_its_limits():
    for tilt, ends in ((0.7, (3.0, 0.0)), (-0.7, (0.0, 3.0))):
        weights = np.exp(tilt * np.array([ends[0], *[ends[1]] * 9]))
        assert weights[0] / weights.sum() == pytest.approx(
            tilted_max_weight(tilt, 3.0, 10), rel=1e-13
        )
    assert tilted_max_weight(0.0, 5.0, 8) == pytest.approx(1 / 8)
    assert tilted_max_weight(3.0, 5.0, 1) == 1.0
    assert tilted_max_weight(1e6, 5.0, 10**6) == 1.0
    assert tilted_max_weight(1e-320, 1e-10, 10) == pytest.approx(0.1)


def minimizer(x, tilt, lam):
    """Minimizer of the tilted losses log(1 + e^(-w.x)), |x| <= 1, plus (lam/2) |w|^2, by damped Newton steps."""
    w = np.zeros(x.shape[1])
    for _ in range(200):
        margin = x @ w
        loss, p = np.logaddexp(0, -margin), 1 / (1 + np.exp(margin))
        exponent = tilt * loss
        v = np.exp(exponent - exponent.max())
        v /= v.sum()
        rows = -p[:, None] * x
        mean = v @ rows
        gradient = mean + lam * w
        if np.linalg.norm(gradient) < 1e-13:
            break
        hessian = (x.T * (v * p * (1 - p))) @ x + lam * np.eye(x.shape[1])
        hessian += tilt * ((rows - mean).T * v) @ (rows - mean) * (tilt > 0)
        w = w - np.linalg.solve(hessian, gradient) * (1.0 if tilt >= 0 else 0.5)
    assert np.linalg.norm(gradient) < 1e-9
    return w


def sphere(rng, n, dim):
    x = rng.normal(size=(n, dim))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("tilt", [-0.15, 0.0, 0.5, 3.0])
def test_no_replaced_record_moves_the_minimizer_further(tilt):
    rng = np.random.default_rng(0)
    lam, n = 0.3, 6
    rho = min(1 / lam, math.sqrt(2 * math.log(2) / lam))
    bound = tilted_sensitivity(tilt, rho, n, 1.0, lam)
    worst = 0.0
    for trial in range(25):
        x = sphere(rng, n, 2)
        x[1:] = x[1] if trial % 3 == 0 else x[1:]
        other = x.copy()
        other[0] = -x[0] if trial % 2 else sphere(rng, 1, 2)[0]
        worst = max(
            worst,
            float(np.linalg.norm(minimizer(x, tilt, lam) - minimizer(other, tilt, lam))) / bound,
        )
    assert 0.02 < worst <= 1.0


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("tilt", [-0.15, 0.5, 3.0])
def test_no_added_record_moves_the_minimizer_further(tilt):
    rng = np.random.default_rng(1)
    lam = 0.3
    rho = min(1 / lam, math.sqrt(2 * math.log(2) / lam))
    for n in (1, 2, 5):
        bound = tilted_sensitivity(tilt, rho, 1, 1.0, lam, adjacency="add_remove", n_min=n)
        for _ in range(10):
            x = sphere(rng, n + 1, 2)
            moved = np.linalg.norm(minimizer(x, tilt, lam) - minimizer(x[:-1], tilt, lam))
            assert moved <= bound
            assert bound <= tilted_sensitivity(tilt, rho, 1, 1.0, lam, adjacency="add_remove")


def test_the_first_record_is_covered_by_its_length():
    """From no record to one the minimizer moves by up to L / lam: no weight is assumed below 1."""
    lam, lipschitz = 0.5, 2.0
    bound = tilted_sensitivity(1.0, 1.0, 1, lipschitz, lam, adjacency="add_remove")
    assert bound >= 2 * lipschitz / lam
    known = tilted_sensitivity(1.0, 1.0, 1, lipschitz, lam, adjacency="add_remove", n_min=1)
    assert known < bound


def test_without_tilt_it_is_the_mean():
    assert tilted_sensitivity(0.0, 2.0, 50, 1.5, 0.2) == pytest.approx(
        erm_sensitivity(1.5, 0.2, 50)
    )
    assert tilted_sensitivity(1e-9, 2.0, 50, 1.5, 0.2) == pytest.approx(
        erm_sensitivity(1.5, 0.2, 50)
    )
    assert tilted_smoothness(0.0, 1.5, 0.7) == pytest.approx(0.7)
    assert tilted_strong_convexity(0.0, 1.5, 0.7) == 0.7


@given(st.floats(0.01, 20.0), st.floats(0.0, 5.0), st.integers(1, 1000))
def test_the_papers_sensitivity_is_larger(tilt, loss_range, n):
    paper = tilted_sensitivity_paper(tilt, loss_range, n, 1.0, 0.1)
    assert tilted_sensitivity(tilt, loss_range, n, 1.0, 0.1) <= paper * (1 + 1e-13)


def test_the_curvature_bounds_hold_and_are_attained():
    """One dimension, two losses +-L w: the variance of the gradients is L^2 at w = 0."""
    lipschitz, lam, step = 1.5, 1.0, 1e-4
    for tilt in (2.0, -0.05):

        def objective(w, tilt=tilt):
            return (
                np.log(np.mean(np.exp(tilt * lipschitz * w * np.array([1.0, -1.0])))) / tilt
                + lam * w * w / 2
            )

        curvature = (objective(step) + objective(-step) - 2 * objective(0.0)) / step**2
        if tilt > 0:
            assert curvature == pytest.approx(tilted_smoothness(tilt, lipschitz, lam), rel=1e-5)
        else:
            assert curvature == pytest.approx(
                tilted_strong_convexity(tilt, lipschitz, lam), rel=1e-5
            )


def test_a_tilt_that_costs_the_convexity_is_refused():
    with pytest.raises(ConditionError, match="strong_convexity > 1"):
        tilted_sensitivity(-1.0, 2.0, 100, lipschitz=1.0, strong_convexity=0.1)
    with pytest.raises(ConditionError):
        tilted_strong_convexity(-0.1, 1.0, 0.1)
    assert tilted_strong_convexity(-0.0999, 1.0, 0.1) > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tilted_smoothness(1.0, 0.0, 1.0), "lipschitz must be > 0"),
        (lambda: tilted_smoothness(1.0, 1.0, math.inf), "smoothness must be finite"),
        (lambda: tilted_sensitivity_paper(-1.0, 1.0, 10, 1.0, 1.0), "tilt must be > 0"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
