"""No certificate ever claims less than the true distance, which is known to 1e-17."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.estimators import objective_references as reference
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.objectives import LinearObjective
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.robust import Adversarial, Tilted
from torch_dpsco.estimators.solvers import (
    Solution,
    gradient_certificate,
    newton,
    projected_certificate,
    solve,
)
from torch_dpsco.losses import Hinge, Huber, Logistic, SmoothedHinge, Squared

FAR = math.inf


def problem(seed, kind):
    """A random problem, sometimes with tiny, huge, equal or opposite records; its reference."""
    generator = torch.Generator().manual_seed(1000 + seed)
    n, dim = 1 + seed % 9, 1 + seed % 4
    X = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    X = X * 10.0 ** (seed % 3 - 1)
    if seed % 5 == 0:
        X = X[:1].repeat(n, 1) * torch.sign(torch.randn(n, 1, generator=generator))
    y = torch.sign(torch.randn(n, generator=generator, dtype=torch.float64))
    reg = 10.0 ** -(seed % 6)
    rows = reference.long_rows(X, y)
    if kind == "logistic":
        objective = LinearObjective(Logistic(), Records(X, y), reg=reg, normalizer=n)
        return (
            objective,
            reference.margin_objective(*rows, reference.logistic, reg, n),
            generator,
        )
    if kind == "smoothed hinge":
        objective = LinearObjective(SmoothedHinge(0.5), Records(X, y), reg=reg, normalizer=n)
        return (
            objective,
            reference.margin_objective(*rows, reference.smoothed_hinge(0.5), reg, n),
            generator,
        )
    if kind == "squared":
        objective = LinearObjective(Squared(), Records(X, y), reg=reg, normalizer=n)
        return (
            objective,
            reference.residual_objective(*rows, lambda r: (r * r / 2, r), reg, n),
            generator,
        )
    if kind == "tilted":
        objective = Tilted(Logistic(), Records(X, y), tilt=1.5, reg=reg)
        return (
            objective,
            reference.tilted_objective(*rows, reference.logistic, reg, 1.5),
            generator,
        )
    objective = Adversarial(
        Logistic(), Records(X, y), attack_radius=0.1, reg=reg, normalizer=n, smoothing=0.05
    )
    return (
        objective,
        reference.adversarial_objective(*rows, reference.logistic, reg, 0.1, n, 0.05),
        generator,
    )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "kind", ["logistic", "smoothed hinge", "squared", "tilted", "adversarial"]
)
def test_gradient_certificates_hold_and_are_not_absurdly_loose(kind):
    for seed in range(60):
        objective, at, generator = problem(seed, kind)
        start = newton(objective, torch.zeros(objective.dim, dtype=torch.float64), 1e-300)
        exact, doubt = reference.minimizer(at, objective, start)
        assert doubt <= 1e-12
        points = [
            start
            + 10.0**-k * torch.randn(objective.dim, generator=generator, dtype=torch.float64)
            for k in range(17)
        ]
        for point in [start, torch.from_numpy(exact.astype(float)), *points]:
            true, claimed = (
                reference.distance(point, exact),
                gradient_certificate(objective, point).distance,
            )
            assert true <= claimed + doubt
            rounding = objective.gradient_error(point) / objective.strong_convexity
            kappa = objective.smoothness / objective.strong_convexity
            assert claimed <= kappa * (true + doubt) * (1 + 1e-6) + 2.1 * rounding


@pytest.mark.weekly
def test_projected_certificates_hold_on_balls_that_cut_the_minimizer_off_and_on_others():
    checked = 0
    for seed in range(60):
        objective, at, generator = problem(seed, "logistic")
        free = newton(objective, torch.zeros(objective.dim, dtype=torch.float64), 1e-300)
        for share in (0.3, 0.99, 1.01, 2.0):
            radius = max(share * float(free.norm()), 1e-6)
            exact = constrained_minimizer(at, objective, free, radius)
            for k in range(0, 20, 3):
                near = torch.from_numpy(exact.astype(float))
                near = near + 10.0**-k * torch.randn(
                    objective.dim, generator=generator, dtype=torch.float64
                )
                moved = projected_certificate(objective, near, radius)
                assert (
                    reference.distance(moved.w, exact)
                    <= moved.distance + 1e-17 / objective.strong_convexity
                )
                assert float(moved.w.norm()) <= radius * (1 + 1e-14)
                checked += 1
    assert checked > 1000


def constrained_minimizer(at, objective, free, radius):
    """By bisection on the multiplier, with exact minimizers of F + (t/2)|w|^2."""
    exact, _ = reference.minimizer(at, objective, free)
    if np.sqrt((exact**2).sum()) <= radius:
        return exact
    low, high = (
        0.0,
        10.0 * (objective.smoothness + float(np.abs(at(0 * exact)[1]).sum()) / radius),
    )
    w = exact
    for _ in range(75):
        middle = (low + high) / 2
        for _ in range(12):
            gradient = at(w)[1] + reference.LONG(middle) * w
            if np.abs(gradient).max() < 1e-17:
                break
            hessian = objective.hessian(
                torch.from_numpy(w.astype(float))
            ).numpy() + middle * np.eye(len(w))
            w = w - np.linalg.solve(hessian, gradient.astype(float))
        low, high = (middle, high) if np.sqrt((w**2).sum()) > radius else (low, middle)
    return w * (reference.LONG(radius) / np.sqrt((w**2).sum()))


def test_the_counterexample_of_the_paper_is_refused_and_repaired():
    """A solver that is accurate in expectation and wrong, by a record's sign, with probability 0.002."""
    n, mu, reach = 1000, 1.0, 0.5
    X = torch.ones(n, 1, dtype=torch.float64)
    for sign in (-1.0, 1.0):
        y = torch.ones(n, dtype=torch.float64)
        y[0] = sign
        objective = LinearObjective(Huber(1.0), Records(X, y), reg=mu, normalizer=n)
        exact = solve(objective, 1e-12).w
        delta = 2 / (mu * n)
        tolerance = 1e-3 * delta / 2
        adversarial = exact + sign * reach
        alpha = 1 / (mu * n * n)
        assert 2 * alpha / (mu * reach**2) * mu * reach**2 / 2 == pytest.approx(
            alpha
        )  # accurate in expectation
        assert not gradient_certificate(objective, adversarial).proves(tolerance)
        repaired = solve(objective, tolerance, start=adversarial)
        assert repaired.proves(tolerance)
        assert float((repaired.w - exact).abs()) <= tolerance


def test_nan_and_infinite_distances_prove_nothing():
    assert not Solution(torch.zeros(1), math.nan).proves(1e300)
    assert not Solution(torch.zeros(1), math.inf).proves(1e300)
    objective, _, _ = problem(3, "logistic")
    assert not gradient_certificate(
        objective, torch.full((objective.dim,), math.nan).double()
    ).proves(1e300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_lower_precision_is_refused(dtype):
    objective, _, _ = problem(3, "logistic")
    point = torch.zeros(objective.dim, dtype=dtype)
    for call in (
        lambda: gradient_certificate(objective, point),
        lambda: projected_certificate(objective, point, 1.0),
        lambda: solve(objective, 1e-3, start=point),
    ):
        with pytest.raises(ValueError, match="float64"):
            call()


def test_autocast_is_refused():
    objective, _, _ = problem(3, "logistic")
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match="autocast"),
    ):
        gradient_certificate(objective, torch.zeros(objective.dim, dtype=torch.float64))


def test_objectives_without_strong_convexity_certify_nothing():
    X, y = torch.eye(2), torch.ones(2)
    flat = LinearObjective(Logistic(), Records(X, y), reg=0.0, normalizer=2)
    with pytest.raises(ConditionError, match="strong_convexity"):
        gradient_certificate(flat, torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ConditionError, match="smooth"):
        projected_certificate(
            LinearObjective(Hinge(), Records(X, y), reg=1.0, normalizer=2),
            torch.zeros(2).double(),
            1.0,
        )


def test_certificates_do_not_show_their_number():
    objective, _, _ = problem(3, "logistic")
    solution = solve(objective, 1e-6)
    assert repr(solution) == "Solution()"
