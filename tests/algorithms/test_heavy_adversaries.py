"""Adversaries against the proved bounds of the one-pass methods: worst biases, noise, curvatures and recursions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import linprog

from torch_dpsco.algorithms.heavy_tailed_numbers import (
    averaging_schedule,
    proximal_pl_bound,
    strongly_convex_coefficients,
)

# Adversaries. A bias of norm B and noise of variance S; F(w) = curvature |w|^2/2 (Huber beyond a kink), optimum 0.


class Adversary:
    """Gradients of the radial Huber function, plus a bias outward, inward or constant, plus Gaussian noise."""

    def __init__(self, curvature, kink, bias, variance, kind, runs, seed):
        self.curvature, self.kink, self.bias, self.std, self.kind = (
            curvature,
            kink,
            bias,
            math.sqrt(variance / 2),
            kind,
        )
        self.runs, self.generator = runs, np.random.default_rng(seed)

    def value(self, w):
        r = np.linalg.norm(w, axis=1)
        inner = np.minimum(r, self.kink)
        return self.curvature * (inner**2 / 2 + self.kink * (r - inner))

    def gradient(self, w):
        r = np.maximum(np.linalg.norm(w, axis=1, keepdims=True), 1e-300)
        unit = w / r
        direction = {"out": -unit, "in": unit, "constant": np.array([[1.0, 0.0]])}[self.kind]
        noise = self.generator.standard_normal((self.runs, 2)) * self.std
        return self.curvature * np.minimum(r, self.kink) * unit + self.bias * direction + noise


def project(w, radius):
    return w * np.minimum(
        1.0, radius / np.maximum(np.linalg.norm(w, axis=1, keepdims=True), 1e-300)
    )


@pytest.mark.cases(30, 15)
@pytest.mark.parametrize("kind", ["out", "in", "constant"])
@pytest.mark.parametrize(("kink", "T"), [(1e9, 5), (1e9, 40), (0.05, 20), (1e-3, 60)])
@pytest.mark.parametrize(("bias", "variance"), [(0.0, 1.0), (0.3, 0.0), (0.1, 0.2), (0.0, 0.0)])
def test_no_adversary_exceeds_the_accelerated_bound(kind, kink, T, bias, variance):
    beta, D, runs = 1.0, 1.0, 400
    error = variance + bias**2
    eta = max(2 * beta, math.sqrt(error * T * (T + 1) * (2 * T + 1) / 12) / D)
    bound = 2 * eta * D**2 / (T * (T + 1)) + (2 * T + 1) * error / (6 * eta) + bias * D
    other = Adversary(beta, kink, bias, variance, kind, runs, seed=T)
    w = ag = np.tile([[0.6, 0.8]], (runs, 1))
    for t in range(1, T + 1):
        alpha = 2 / (t + 1)
        md = (1 - alpha) * ag + alpha * w
        w = project(
            w - t / (2 * eta) * other.gradient(md), 2.0
        )  # W of radius 2 around the optimum
        ag = alpha * w + (1 - alpha) * ag
    assert other.value(ag).mean() <= bound


def test_the_accelerated_bound_is_within_a_factor_of_5_of_what_an_adversary_reaches():
    """So that a constant lost in it would show."""
    T, bias = 40, 0.3
    eta = max(2.0, bias * math.sqrt(T * (T + 1) * (2 * T + 1) / 12))
    bound = 2 * eta / (T * (T + 1)) + (2 * T + 1) * bias**2 / (6 * eta) + bias
    other = Adversary(0.3, 1e9, bias, 0.0, "out", 1, seed=0)
    w = ag = np.array([[1.0, 0.0]])
    for t in range(1, T + 1):
        alpha = 2 / (t + 1)
        w = w - t / (2 * eta) * other.gradient((1 - alpha) * ag + alpha * w)
        ag = alpha * w + (1 - alpha) * ag
    assert other.value(ag).mean() >= bound / 5


@pytest.mark.cases(13, 6)
@pytest.mark.parametrize("kind", ["out", "in", "constant"])
@pytest.mark.parametrize(
    ("mu", "beta", "T"), [(1.0, 1.0, 9), (0.2, 1.0, 4), (0.2, 1.0, 60), (0.02, 1.0, 200)]
)
@pytest.mark.parametrize(("bias", "variance"), [(0.0, 1.0), (0.3, 0.0), (0.1, 0.2), (0.0, 0.0)])
def test_no_adversary_exceeds_the_strongly_convex_bound(kind, mu, beta, T, bias, variance):
    plan = averaging_schedule(strong_convexity=mu, smoothness=beta, steps=T)
    u = strongly_convex_coefficients(strong_convexity=mu, smoothness=beta, steps=T)
    for curvature in (mu, beta):  # the flattest and the steepest risk with these constants
        other = Adversary(curvature, 1e9, bias, variance, kind, 400, seed=T)
        w = np.tile([[0.6, 0.8]], (400, 1))
        total = np.zeros_like(w)
        for lr, weight in zip(plan.lr, plan.weights, strict=True):
            w = project(w - lr * other.gradient(w), 2.0)
            total += weight * w
        found = other.value(total / sum(plan.weights)).mean()
        assert found <= u.initial + u.bias * bias**2 + u.noise * variance


def worst_recursion(mu, beta, T, weights, lrs, noise, start):
    """Largest weighted mean of s_t under q_{t+1} <= (1 - mu lr) q_t - lr s_t + noise lr^2, all nonnegative."""
    inequality, limit = np.zeros((T, 2 * T)), np.zeros(T)  # variables s_0..s_{T-1}, q_1..q_T
    for t, lr in enumerate(lrs):
        inequality[t, t], inequality[t, T + t] = lr, 1.0
        limit[t] = noise * lr**2
        if t == 0:
            limit[t] += (1 - mu * lr) * start
        else:
            inequality[t, T + t - 1] = -(1 - mu * lr)
    objective = -np.concatenate([np.array(weights) / sum(weights), np.zeros(T)])
    return -linprog(objective, A_ub=inequality, b_ub=limit, method="highs").fun


@pytest.mark.parametrize(
    ("mu", "beta", "T"), [(1.0, 5.0, 100), (1.0, 5.0, 4), (0.1, 1.0, 50), (1.0, 1.0, 20)]
)
def test_linear_weights_attain_their_bound_in_the_worst_case(mu, beta, T):
    plan = averaging_schedule(strong_convexity=mu, smoothness=beta, steps=T)
    u = strongly_convex_coefficients(strong_convexity=mu, smoothness=beta, steps=T)
    worst = worst_recursion(mu, beta, T, plan.weights, plan.lr, noise=2.0, start=1.0)
    assert worst <= (u.initial + u.noise) * (1 + 1e-9)
    assert worst >= (u.initial + u.noise) * (0.9 if beta / mu < T else 0.4)


def test_squared_weights_do_not_telescope():
    """Stich's lemma in some printings: x^2 (x - 2) > (x - 1)^3 for x >= 3, so that the sum exceeds what it claims."""
    assert all(x * x * (x - 2) > (x - 1) ** 3 for x in range(3, 1000))
    assert all(x * (x - 2) <= (x - 1) ** 2 for x in range(2, 1000))
    mu, beta, T = 1.0, 5.0, 100
    plan = averaging_schedule(strong_convexity=mu, smoothness=beta, steps=T)
    u = strongly_convex_coefficients(strong_convexity=mu, smoothness=beta, steps=T)
    linear = worst_recursion(mu, beta, T, plan.weights, plan.lr, noise=1.0, start=1.0)
    squared = worst_recursion(
        mu, beta, T, np.square(plan.weights), plan.lr, noise=1.0, start=1.0
    )
    assert round(linear, 4) == round(u.initial + u.noise / 2, 4) == 0.0626
    assert round(squared, 4) == 0.0889
    x = np.array(plan.weights[50:])
    telescoped = (2 / mu * x.sum() + mu / 2 * x[0] ** 2 * (x[0] - 2) / (mu * beta)) / (
        x**2
    ).sum()
    assert squared > 1.5 * telescoped


@pytest.mark.cases(31, 5)
@pytest.mark.parametrize("sign", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize(("mu", "T"), [(1.0, 5), (0.3, 5), (0.3, 60)])
@pytest.mark.parametrize(
    ("bias", "variance", "strength"),
    [(0.3, 0.0, 0.0), (0.1, 1.0, 0.2), (0.0, 1.0, 0.0), (0.0, 0.0, 0.2)],
)
def test_no_adversary_exceeds_the_proximal_bound(sign, mu, T, bias, variance, strength):
    """F = mu w^2/2 + strength |w|, beta = 1, last iterate; the bias pushes outward, inward or one way."""
    generator = np.random.default_rng(T)
    w = np.full(4000, 1.0)
    for _ in range(T):
        direction = -sign * np.sign(w) if sign else 1.0
        gradient = (
            mu * w + bias * direction + math.sqrt(variance) * generator.standard_normal(4000)
        )
        moved = w - 0.5 * gradient
        w = np.sign(moved) * np.maximum(np.abs(moved) - 0.5 * strength, 0.0)
    found = np.mean(mu * w**2 / 2 + strength * np.abs(w))
    gap = mu / 2 + strength
    bound = proximal_pl_bound(
        pl_constant=mu, smoothness=1.0, steps=T, initial_gap=gap, bias=bias, variance=variance
    )
    assert found <= bound


def test_the_proximal_bound_is_within_a_factor_of_12_of_a_run():
    """A quadratic of curvature mu << beta: bias B leaves the gap B^2/(2 mu), the bound has 3 B^2/mu."""
    bias, mu = 0.5, 0.1
    bound = proximal_pl_bound(
        pl_constant=mu, smoothness=1.0, steps=400, initial_gap=1.0, bias=bias, variance=0.0
    )
    w = 1.0
    for _ in range(400):
        w -= 0.5 * (mu * w - bias)
    assert bound / 12 <= mu * w**2 / 2 <= bound
