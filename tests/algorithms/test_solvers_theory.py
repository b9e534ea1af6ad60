"""Step counts of the solvers, run in the worst cases they are for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.reference.papers.output import (
    dual_ascent_steps,
    katyusha_parameters,
    subgradient_steps,
)
from torch_dpsco.errors import ConditionError, InfeasibleError
from torch_dpsco.estimators.solvers import agd_certified_steps


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("kappa", [1.0, 30.0, 1e4])
def test_accelerated_descent_reaches_its_gradient_norm_from_every_start(kappa):
    """Quadratics with eigenvalues between mu and beta, and a loss whose curvature switches between the two."""
    mu, beta = 0.01, 0.01 * kappa
    momentum = (math.sqrt(kappa) - 1) / (math.sqrt(kappa) + 1)
    eigenvalues = np.geomspace(mu, beta, 20)
    rng = np.random.default_rng(0)
    gradients = [
        lambda w: eigenvalues * w,
        lambda w: np.where(w > 0, mu * w, beta * w),
        lambda w: mu * w + (beta - mu) * np.clip(w, -0.1, 0.1),
    ]
    for gradient in gradients:
        start = rng.normal(size=20)
        tolerance = 1e-9
        steps = agd_certified_steps(
            mu, beta, float(np.linalg.norm(start)) * (1 + 1e-12), tolerance
        )
        previous = w = start
        for _ in range(steps):
            y = w - gradient(w) / beta
            w, previous = (1 + momentum) * y - momentum * previous, y
        assert np.linalg.norm(gradient(previous)) <= tolerance
    assert agd_certified_steps(1.0, 2.0, 1e-12, 1.0) == 1


@pytest.mark.slow
def test_dual_ascent_reaches_its_distance_on_every_data_set():
    """Hinge: FISTA on the box from its center, against the minimizer of a long run."""
    rng = np.random.default_rng(1)
    worst = 0.0
    for _ in range(5):
        n, lam = 20, 10 ** rng.uniform(-2, -0.5)
        x = rng.normal(size=(n, 3))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        x = np.abs(x) if rng.uniform() < 0.5 else x
        distance = 0.02 / lam
        steps = dual_ascent_steps(1.0, lam, distance)
        reached, exact = fista(x, lam, steps), fista(x, lam, 8_000)
        worst = max(worst, float(np.linalg.norm(reached - exact)) / distance)
    assert 1e-4 < worst <= 1.0
    assert dual_ascent_steps(1.0, 0.01, 0.5, excess=2.0) == pytest.approx(
        2 * dual_ascent_steps(1.0, 0.01, 0.5), abs=2
    )


def fista(x, lam, steps):
    """Primal point after so many steps on max mean(b) - (lam/2) |v(b)|^2, v = sum b x / (lam n), b in [0, 1]^n."""
    n = len(x)
    b = point = np.full(n, 0.5)
    weight, size = 1.0, lam * n * n / n  # 1 / L_D with L_D = 1 / (lam n)
    for _ in range(steps):
        v = x.T @ point / (lam * n)
        new = np.clip(point + size * (1 - x @ v) / n, 0, 1)
        following = (1 + math.sqrt(1 + 4 * weight * weight)) / 2
        point = new + (weight - 1) / following * (new - b)
        b, weight = new, following
    return x.T @ b / (lam * n)


@pytest.mark.slow
def test_the_subgradient_method_reaches_its_accuracy_on_average():
    """E|w| and (mu/2) w^2: mean over 60 seeds below the bound, which is far above it (no false alarm to speak of)."""
    mu, radius, accuracy = 1.0, 1.0, 0.02
    lipschitz = 1.0 + mu * radius
    steps = subgradient_steps(lipschitz, mu, accuracy)
    assert steps == math.ceil(2 * lipschitz**2 / (mu * accuracy)) + (1 if steps > 400 else 0)
    rng = np.random.default_rng(2)
    total = 0.0
    for _ in range(60):
        w, average = 1.0, 0.0
        for t in range(1, steps + 1):
            average += 2 * t / (steps * (steps + 1)) * w
            shift = rng.choice([-0.5, 0.5])
            w = float(
                np.clip(w - 2 / (mu * (t + 1)) * (np.sign(w - shift) + mu * w), -radius, radius)
            )
        total += (abs(average - 0.5) + abs(average + 0.5)) / 2 + mu / 2 * average**2 - 0.5
    assert total / 60 <= accuracy


def test_the_parameters_of_katyusha_satisfy_their_relations():
    for n, beta, mu in ((1, 1.0, 1.0), (10**6, 0.25, 1e-9), (50, 3.0, 0.1)):
        found = katyusha_parameters(n, beta, mu)
        assert found.m == 2 * n
        assert 0 < found.tau1 <= found.tau2 == 0.5
        assert found.gamma * 3 * found.tau1 * beta == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: subgradient_steps(0.0, 1.0, 1.0), "lipschitz must be > 0"),
        (lambda: subgradient_steps(1.0, 0.0, 1.0), "strong_convexity must be > 0"),
        (lambda: subgradient_steps(1.0, 1.0, -1.0), "accuracy must be > 0"),
        (lambda: katyusha_parameters(0, 1.0, 1.0), "n must be an integer >= 1"),
        (lambda: katyusha_parameters(1, 1.0, math.nan), "strong_convexity must be > 0"),
        (lambda: dual_ascent_steps(1.0, 1.0, 0.0), "distance must be > 0"),
        (lambda: dual_ascent_steps(1.0, 1.0, 1.0, 0.0), "excess must be > 0"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_impossible_counts_are_refused():
    with pytest.raises(ConditionError, match="smoothness must be >= strong_convexity"):
        agd_certified_steps(2.0, 1.0, 1.0, 1.0)
    with pytest.raises(InfeasibleError, match="larger accuracy"):
        subgradient_steps(1e10, 1e-10, 1e-10)
    with pytest.raises(InfeasibleError, match="larger distance"):
        dual_ascent_steps(1.0, 1e-20, 1e-20)
