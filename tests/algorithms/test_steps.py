"""The step rule's formulas: what a horizon, a pace and a share are; no admitted loss makes the loop diverge."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import torch_dpsco as dp
from torch_dpsco.step import chooser as theory

POSITIVE = st.floats(1e-3, 1e3)


def loop(slope, start, h, m, steps, noise=None, project=lambda z: z):
    """The loop of docs/proofs/steps.md, written literally: all iterates w_1..w_{T+1}."""
    w = z = np.asarray(start, dtype=float)
    iterates = [w]
    for t in range(steps):
        z = project(z - h * (slope(w) + (0.0 if noise is None else noise[t])))
        w = m * w + (1 - m) * z
        iterates.append(w)
    return np.array(iterates)


@given(POSITIVE, POSITIVE, st.integers(1, 500))
def test_the_horizon_is_the_distance_over_the_noise_unless_steps_are_too_few(
    horizon, smoothness, steps
):
    pace = theory.smooth_pace(horizon, steps, smoothness)
    size = pace.lr / (1 - pace.momentum)
    assert size * steps == pytest.approx(min(horizon, steps**2 / (5 * smoothness)), rel=1e-9)
    assert pace.lr * smoothness <= 2 * (1 + 1e-9)
    needed = theory.steps_to(horizon, smoothness)
    assert 64 <= needed <= 1024
    if 64 < needed < 1024:
        assert (needed - 1) ** 2 < 5 * smoothness * horizon <= needed**2


@given(POSITIVE, st.floats(1e-6, 1.0), st.integers(20, 500), POSITIVE)
def test_a_loss_with_kinks_minimizes_the_terms_of_the_bound(distance, noise, steps, bound):
    pace = theory.rough_pace(distance, noise, steps, bound)
    assert pace.momentum == pytest.approx(1 - 10 / steps)

    def terms(h):
        return (
            distance**2 / (2 * h * steps) + h * steps * noise**2 / 2 + h * (bound / 20) ** 2 / 2
        )

    best = pace.lr / (1 - pace.momentum)
    assert all(terms(best) <= terms(best * factor) for factor in (0.9, 0.99, 1.01, 1.1))


@pytest.mark.weekly
@given(st.floats(0.1, 100.0), st.integers(10, 300), st.floats(1e-3, 1.0))
def test_no_quadratic_loss_makes_the_rule_diverge(horizon, steps, share):
    """The roots of the recursion in a direction of eigenvalue share * L are below the bound of the page."""
    pace = theory.smooth_pace(horizon, steps, 1.0)
    m, h = pace.momentum, pace.lr / (1 - pace.momentum)
    roots = np.roots([1.0, -(1 + m - pace.lr * share), m])
    assert abs(roots).max() <= max(math.sqrt(m), 1 - h * share) + 1e-7
    at = loop(lambda w: share * w, [1.0], h, m, 3000)
    assert abs(at[-1][0]) < max(1e-3, max(0.0, 1 - h * share) ** 2900)


def test_a_rate_of_twice_the_stable_one_diverges():
    """So that the test above can fail."""
    pace = theory.smooth_pace(1e6, 100, 1.0)
    far = 2.2 * (1 + pace.momentum) / (1 - pace.momentum)
    assert abs(loop(lambda w: w, [1.0], far, pace.momentum, 300)[-1][0]) > 1e3


def test_momentum_is_the_heavy_ball():
    scales, lr, m = np.array([1.0, 0.1, 0.01]), 0.7, 0.8
    at = loop(lambda w: scales * (w - 3.0), np.zeros(3), lr / (1 - m), m, 50)
    w, last = np.zeros(3), np.zeros(3)
    for t in range(50):
        w, last = w - lr * scales * (w - 3.0) + m * (w - last), w
        assert np.allclose(at[t + 1], w, atol=1e-12)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("weights", ["uniform", "weighted"])
@pytest.mark.parametrize("m", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("ball", [math.inf, 1.0])
def test_the_risk_of_a_run_with_momentum_is_below_the_bound(weights, m, ball):
    """A kink in 4 dimensions, means of 300 runs; the bound holds for the mean, whose standard error is added."""
    draw, steps, h, level, target = (
        np.random.default_rng(1),
        60,
        0.4,
        0.5,
        np.array([0.6, -0.6, 0.0, 0.0]),
    )

    def slope(w):
        return np.sign(w - target) / 2

    def project(z):
        return z / max(1.0, np.linalg.norm(z) / ball)

    runs = []
    squares = []
    for _ in range(300):
        at = loop(slope, np.zeros(4), h, m, steps, draw.normal(0, level, (steps, 4)), project)[
            :steps
        ]
        share = np.ones(steps) if weights == "uniform" else np.arange(1, steps + 1)
        runs.append(np.abs((share @ at) / share.sum() - target).sum() / 2)
        squares.append(np.mean([slope(w) @ slope(w) for w in at]))
    start, distance = np.abs(target).sum() / 2, np.linalg.norm(target)
    bound = (
        distance**2 / (2 * h * steps)
        + h / 2 * (np.mean(squares) + 4 * level**2)
        + m / (1 - m) * start / steps
    )
    bound *= 1 if weights == "uniform" else 2.1
    assert np.mean(runs) - 5 * np.std(runs) / math.sqrt(300) < bound
    assert np.mean(runs) > bound / 40  # the bound is about this run


def test_feasible_iterates_have_feasible_averages():
    def project(z):
        return np.clip(z, -1.0, 1.0)

    at = loop(lambda w: w - 5.0, np.zeros(2), 3.0, 0.9, 40, project=project)
    assert np.abs(at).max() <= 1.0


@given(st.floats(0.0, 10.0))
def test_the_share_of_the_bound_falls_from_one_to_a_half(noise):
    share = theory.clip_share(noise)
    assert 0.5 <= share <= 1.0
    assert theory.clip_share(noise * 1.5) <= share
    assert share == 1.0 if noise <= 0.0005 else share < 1.0
    assert share == 0.5 if noise >= 0.008 else share > 0.5


def test_distances_are_steps_and_targets():
    assert theory.usual_distance(1.0, 2.0, None, smooth=True) == 12.5
    assert theory.usual_distance(1.0, 2.0, 100.0, smooth=True) == 12.5
    assert theory.usual_distance(1.0, 2.0, 1.0, smooth=True) == 3.0
    assert theory.usual_distance(1.0, 2.0, 100.0, smooth=False) == 150.0


def test_noise_of_all_steps_does_not_depend_on_their_number_on_full_batches():
    levels = [
        theory.noise_of_mean(3.0 * math.sqrt(T), 2.0, 1000, T, 25, sampled=False)
        for T in (1, 10, 400)
    ]
    assert levels == pytest.approx([2.0 * 3.0 * 5.0 / 1000] * 3)
    more = theory.noise_of_mean(3.0, 2.0, 100, 4, 25, sampled=True)
    assert more == pytest.approx(2.0 / 2 * math.hypot(3.0 * 5 / 100, 1 / (4 * 10)))
    assert theory.noise_of_mean(3.0, 2.0, 100, 4, None, sampled=True) > more


@given(st.floats(1.0, 1e6), POSITIVE, st.booleans())
def test_one_pass_has_the_least_number_of_batches_that_the_horizon_admits(
    horizon, smoothness, momentum
):
    T = theory.one_pass_steps(horizon, smoothness, momentum)

    def fits(steps):
        size = horizon / steps**1.5
        return size <= (steps / 5 if momentum else 0.5) / smoothness * (1 + 1e-9)

    assert 5 <= T <= 1024
    if 5 < T < 1024:
        assert fits(T)
        assert not fits(T - 1)


@given(st.floats(1e-4, 1.0), st.integers(10, 400), st.floats(0.1, 100.0))
def test_steps_in_units_of_a_clip_stay_below_a_quarter_of_the_distance(noise, steps, distance):
    pace = theory.relative_pace(noise, steps, distance)
    size = pace.lr / (1 - pace.momentum)
    assert pace.lr <= distance / 4 * (1 + 1e-9)
    assert size * steps <= distance / noise * (1 + 1e-9)
    assert pace.lr >= distance / 4 * (1 - 1e-9) or size * steps == pytest.approx(
        distance / noise
    )
    assert 64 <= theory.relative_steps(noise) <= 256


def test_one_pass_has_the_steps_of_its_horizon_or_if_it_is_secret_those_of_least_risk():
    budget = dp.Budget(1.0, 1e-6)
    scale = theory.Scale(bound=1.0, distance=5.0, smoothness=1.0, dim=10)
    horizon = scale.horizon(2000, budget)
    for momentum in (True, False):
        made = theory.one_pass(scale, 2000, budget, momentum)
        assert made == theory.one_pass_steps(horizon, 1.0, momentum)
    assert theory.one_pass(scale, 3, budget, momentum=True) <= 3
    secret = theory.one_pass(scale, 2000, budget, momentum=True, secret=True)
    assert secret in theory.numbers_of_steps(2000)
    kinks = dataclasses.replace(scale, smoothness=None)
    assert theory.one_pass(kinks, 2000, budget, momentum=True, secret=True) == 1024
