"""Accelerated gradient descent: the fallback with a worst-case number of steps, and the method for a ball."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_dpsco.errors import ConditionError, NotCertifiedError
from torch_dpsco.objectives.base import Objective
from torch_dpsco.objectives.linear import norm_up
from torch_dpsco.solvers.certificates import Certificate, gradient_certificate, project, projected_certificate
from torch_dpsco.theory.solvers import agd_certified_steps


def accelerated_steps(objective: Objective, start: Tensor, steps: int, radius: float = math.inf) -> Tensor:
    """The last y_t of y_t = Pi[w_(t-1) - grad F(w_(t-1))/beta], w_t = y_t + p (y_t - y_(t-1)).

    Args:
        objective: smooth and strongly convex on R^dim (extrapolated points leave the ball).
        start: w_0 = y_0, float64.
        steps: T; the momentum is p = (sqrt kappa - 1)/(sqrt kappa + 1).
        radius: R, or inf.

    Returns:
        y_T, with F(y_T) - min F <= ((mu + beta)/2) ||w_0 - w*||^2 exp(-(T - 1)/sqrt(kappa)) in exact arithmetic.

    Raises:
        ConditionError: if the objective is not smooth and strongly convex.

    Source:
        docs/proofs/output.md#solvers-that-cannot-fail (algorithm 4 of the paper)

    Example:
        >>> from torch_dpsco.losses import Squared
        >>> from torch_dpsco.objectives import LinearObjective
        >>> F = LinearObjective(Squared(), torch.ones(1, 1), torch.ones(1), reg=1.0, normalizer=1)
        >>> round(accelerated_steps(F, torch.zeros(1, dtype=torch.float64), 9).item(), 9)
        0.5
    """
    beta, mu = objective.smoothness, objective.strong_convexity
    if beta is None or not mu > 0:
        raise ConditionError("accelerated descent needs a smooth, strongly convex objective")
    root = math.sqrt(max(beta / mu, 1.0))
    momentum = (root - 1) / (root + 1)
    last, query = start, start
    for _ in range(steps):
        moved = project(query - objective.value_and_gradient(query)[1] / beta, radius)
        query = moved + momentum * (moved - last)
        last = moved
    return last


def certified_descent(
    objective: Objective, start: Tensor, distance: float, radius: float = math.inf
) -> tuple[Tensor, Certificate]:
    """Accelerated descent until the certificate holds: at the worst-case number of steps at the latest.

    The certificate is tried at a geometric sequence of step counts. Rounding can make the last digits slow, so that the
    count may be passed fourfold.

    Args:
        objective: smooth and strongly convex.
        start: w_0, float64.
        distance: r > 0.
        radius: R, or inf.

    Returns:
        (point, certificate) with certificate.distance <= distance.

    Raises:
        NotCertifiedError: if the constants of the objective are violated, or `distance` lies below the rounding of
            float64: both outside of any guarantee, and both excluded by the checks of public constants before.

    Source:
        docs/proofs/output.md#solvers-that-cannot-fail
    """
    beta, mu = objective.smoothness, objective.strong_convexity
    if beta is None or not mu > 0:
        raise ConditionError("accelerated descent needs a smooth, strongly convex objective")
    gradient = objective.value_and_gradient(start)[1]
    reach = (norm_up(gradient) + objective.gradient_error(start)) / mu
    reach = min(reach, norm_up(start) + radius)
    floor = objective.gradient_error(torch.zeros_like(start)) / mu  # least at 0
    if not (math.isfinite(reach) and floor < distance):
        raise _refusal()
    # C2 ends with a residual of up to three gradients of this size
    worst = agd_certified_steps(mu, beta, max(reach, distance), mu * distance / 8)
    point, steps = start, 32
    while True:
        point = accelerated_steps(objective, point if steps > 32 else start, steps, radius)
        if not bool(torch.isfinite(point).all()):
            raise _refusal()
        if math.isinf(radius):
            certificate = gradient_certificate(objective, point)
        else:
            point, certificate = projected_certificate(objective, point, radius)
        if certificate.proves(distance):
            return point, certificate
        if steps > 4 * worst:
            raise _refusal()
        steps *= 2


def _refusal() -> NotCertifiedError:
    return NotCertifiedError("no certificate: the promised constants are violated, or float64 is too coarse")
