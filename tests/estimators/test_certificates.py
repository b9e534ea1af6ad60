"""No certificate ever claims less than the true distance, which is known to 1e-17."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.estimators import objective_references as reference
from tests.reference.papers.output import hinge_dual_gap
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.certificates import (
    BoxDual,
    Certificate,
    distance_of_gap,
    gap_certificate,
    gradient_certificate,
    primal_point,
    projected_certificate,
)
from torch_dpsco.estimators.objectives import LinearObjective
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.robust import Adversarial, Tilted
from torch_dpsco.estimators.solvers import newton, solve
from torch_dpsco.losses import Absolute, Hinge, Huber, Logistic, Pinball, SmoothedHinge, Squared

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
        return objective, reference.margin_objective(*rows, reference.logistic, reg, n), generator
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
                moved, certificate = projected_certificate(objective, near, radius)
                assert (
                    reference.distance(moved, exact)
                    <= certificate.distance + 1e-17 / objective.strong_convexity
                )
                assert float(moved.norm()) <= radius * (1 + 1e-14)
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


LOSSES = [Hinge(), Pinball(0.25), Pinball(0.9), Absolute()]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_the_gap_of_records_is_the_difference_of_primal_and_dual(loss):
    for seed in range(40):
        objective, _, generator = problem(seed, "logistic")
        X, y = objective.records._features, objective.records.targets
        weights = torch.rand(len(X), generator=generator, dtype=torch.float64) + 0.1
        term = torch.randn(objective.dim, generator=generator, dtype=torch.float64)
        nonsmooth = LinearObjective(
            loss, Records(X, y, weights), reg=0.3, normalizer=3, linear_term=term
        )
        box = BoxDual.of(loss)
        dual = box.low + (box.high - box.low) * torch.rand(
            len(X), generator=generator, dtype=torch.float64
        )
        point = torch.randn(objective.dim, generator=generator, dtype=torch.float64)
        v = primal_point(nonsmooth, dual)
        # D(a) = (1/N) sum c a offset - reg/2 |v|^2, for offset 1 (hinge) or y
        lower = float((weights * dual * box.offsets(y)).sum()) / 3 - 0.15 * float(v @ v)
        gap = nonsmooth.value(point) - lower
        claimed = gap_certificate(nonsmooth, point, dual).distance
        assert claimed == pytest.approx(math.sqrt(2 * gap / 0.3), rel=1e-9)
        assert torch.allclose(
            box.shares(box.residuals(X @ point, y), dual) >= 0, torch.tensor(True)
        )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_gap_certificates_hold_at_random_pairs(loss):
    for seed in range(40):
        base, _, generator = problem(seed, "logistic")
        objective = LinearObjective(
            loss, Records(base.records._features, base.records.targets), reg=0.2, normalizer=2
        )
        best = solve(objective, 1e-5).w  # its own certificate is tested by `test_solve`
        box = BoxDual.of(loss)
        for _ in range(5):
            dual = box.low + (box.high - box.low) * torch.rand(
                len(objective.records.targets), generator=generator, dtype=torch.float64
            )
            for point in (
                primal_point(objective, dual),
                torch.randn(objective.dim, generator=generator).double(),
            ):
                assert (
                    float((point - best).norm())
                    <= gap_certificate(objective, point, dual).distance + 1e-5
                )


def test_an_exact_hinge_solution_has_a_gap_at_the_level_of_rounding():
    # one record: w = b x/lam with b = min(1, lam/|x|^2), on the kink
    result = hinge_dual_gap([[3.0, 4.0]], [1.0], [2.0 / 25.0], 2.0)
    assert torch.allclose(result.w, torch.tensor([0.12, 0.16], dtype=torch.float64))
    assert 0 <= result.gap < 1e-14
    assert (
        result.distance_bound == distance_of_gap(result.gap, 2.0) or result.distance_bound < 1e-6
    )


def test_infeasible_duals_are_clipped_before_they_can_fake_a_gap():
    wild, tame = (
        hinge_dual_gap([[1.0]], [1.0], [5.0], 0.1),
        hinge_dual_gap([[1.0]], [1.0], [1.0], 0.1),
    )
    assert wild.gap == tame.gap
    objective = LinearObjective(
        Hinge(), Records(torch.ones(1, 1), torch.ones(1)), reg=0.1, normalizer=1
    )
    point = torch.tensor([2.0], dtype=torch.float64)  # the minimizer is 1
    for dual in (-5.0, 0.2, 20.0):
        claimed = gap_certificate(
            objective, point, torch.tensor([dual], dtype=torch.float64)
        ).distance
        assert claimed >= 1.0
        clipped = torch.tensor([min(max(dual, 0.0), 1.0)], dtype=torch.float64)
        assert claimed == gap_certificate(objective, point, clipped).distance


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
        assert repaired.certificate.proves(tolerance)
        assert float((repaired.w - exact).abs()) <= tolerance


def test_nan_and_infinite_distances_prove_nothing():
    assert not Certificate(math.nan).proves(1e300)
    assert not Certificate(math.inf).proves(1e300)
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
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="autocast"):
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
    with pytest.raises(ConditionError, match="dual"):
        gap_certificate(
            LinearObjective(Logistic(), Records(X, y), reg=1.0, normalizer=2),
            torch.zeros(2).double(),
            torch.zeros(2).double(),
        )


def test_certificates_do_not_show_their_number():
    objective, _, _ = problem(3, "logistic")
    solution = solve(objective, 1e-6)
    assert repr(solution) == "Solution()"
    assert repr(solution.certificate) == "Certificate()"
