"""Adversaries against the proved errors of one phase (Lemma 14 in its sharp and ball-free forms)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from torch_dpsco.algorithms.localized_numbers import ballfree_rate

RUNS = 1500
SLACK = 1.05  # of a mean over the runs


class Phase:
    """A risk slope w_1 + curvature |w|^2/2 in d = 3, center 0, whose clipped mean errs by at most `bias`; clip 1.

    The wrong gradient points away from the minimizer ("out"), always one way ("away") or across ("across"), and keeps
    the norm of the clipped mean at 1 or less.
    """

    reg = 0.7

    def __init__(self, bias, noise, kind, curvature, steps):
        self.bias, self.kind, self.curvature = bias, kind, curvature
        self.slope = 1.0 - bias
        self.best = np.array([-self.slope / (self.reg + curvature), 0.0, 0.0])
        self.std = math.sqrt(noise / 3)
        self.generator = np.random.default_rng(steps)

    def clipped_mean(self, w):
        exact = self.slope * np.array([1.0, 0, 0]) + self.curvature * w
        away = w - self.best
        unit = away / np.maximum(np.linalg.norm(away, axis=1, keepdims=True), 1e-12)
        direction = {
            "out": -unit,
            "away": np.array([[1.0, 0, 0]]),
            "across": np.array([[0, 1.0, 0]]),
        }[self.kind]
        mean = exact + self.bias * direction
        assert np.linalg.norm(mean, axis=1).max() <= 1 + 1e-9
        return mean

    def run(self, steps, fraction, radius):
        """Returns |w_T - what| of all runs."""
        w = np.zeros((RUNS, 3))
        for t in range(steps):
            noisy = self.clipped_mean(w) + self.std * self.generator.standard_normal(w.shape)
            w = w - fraction(t) / self.reg * (noisy + self.reg * w)
            w = w * np.minimum(
                1.0, radius / np.maximum(np.linalg.norm(w, axis=1, keepdims=True), 1e-12)
            )
        return np.linalg.norm(w - self.best, axis=1)

    def excess(self, distances):
        """V_T, the mean squared distance beyond the ball of radius bias/lambda around the minimizer."""
        return np.mean(np.maximum(distances - self.bias / self.reg, 0.0) ** 2)


CASES = [
    (bias, noise, kind, steps)
    for bias in (0.0, 0.2, 0.6)
    for noise in (0.0, 1.0, 30.0)
    for kind in ("out", "away", "across")
    for steps in (1, 2, 5, 40)
]


@pytest.mark.cases(18, 9)
@pytest.mark.parametrize(("bias", "noise", "kind", "steps"), CASES)
def test_a_phase_within_a_ball_stays_below_its_bounds(bias, noise, kind, steps):
    phase = Phase(bias, noise, kind, 0.0, steps)
    radius = 1.5 / phase.reg  # holds the minimizer
    square = ((1.0 + phase.reg * radius) ** 2 + noise) / phase.reg**2
    distances = phase.run(steps, lambda t: 2 / (t + 2), radius)
    assert (
        phase.excess(distances)
        <= square * (1.0 if steps == 1 else 4 / (3 * (steps + 1))) * SLACK
    )
    assert np.mean(distances**2) <= (4 * square / (steps + 1) + (bias / phase.reg) ** 2) * SLACK
    distances = phase.run(steps, lambda t: 1 / (t + 1), radius)
    assert phase.excess(distances) <= square / steps * SLACK


@pytest.mark.cases(29, 14)
@pytest.mark.parametrize("curved", [False, True])
@pytest.mark.parametrize(("bias", "noise", "kind", "steps"), CASES)
def test_a_phase_without_a_ball_stays_below_its_bound(bias, noise, kind, steps, curved):
    """nu = noise/T with clip 1: lambda^2 V_T <= a^2, and the distance to the minimizer is at most (a + bias)/lambda."""
    if curved:  # runs without noise: there the curved clipped mean has norm <= 1 too
        noise = 0.0
    phase = Phase(bias, noise, kind, 0.1 if curved else 0.0, steps)
    distances = phase.run(steps, lambda t: 1 / (t + 1), math.inf)
    rate = ballfree_rate(noise / steps, steps)
    assert phase.reg**2 * phase.excess(distances) <= rate**2 * SLACK
    assert phase.reg * math.sqrt(np.mean(distances**2)) <= (rate + bias) * SLACK


def test_the_ballfree_bound_is_within_a_factor_of_3_of_a_run_where_noise_dominates():
    phase = Phase(0.2, 300.0, "out", 0.0, 100)
    found = phase.reg**2 * phase.excess(phase.run(100, lambda t: 1 / (t + 1), math.inf))
    assert found >= ballfree_rate(3.0, 100) ** 2 / 3


@pytest.mark.parametrize("steps", [5, 50])
def test_the_noise_of_a_phase_moves_its_answer_as_far_as_the_schedule_says(steps):
    """Linear risks: lambda w_T is minus a mean of T noisy gradients, so that its variance is nu whatever T is."""
    phase = Phase(0.0, 2.0 * steps, "away", 0.0, steps)
    found = phase.reg**2 * np.mean(phase.run(steps, lambda t: 1 / (t + 1), math.inf) ** 2)
    assert found == pytest.approx(2.0, rel=0.1)
