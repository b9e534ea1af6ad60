"""Gradient methods: accelerated, variance-reduced, and stochastic subgradients.

Differs from the papers in: Katyusha's rate hides a constant and holds in expectation only, so that the number of epochs
is a hint; the certificate C1, free at the start of every epoch, decides. Weights of the average are theta^(j - m),
which cannot overflow. Records are drawn with replacement from a generator of the solver, never from that of the noise.

Of subgradient steps with a weighted average, the first method of the paper, the indices are off by one
(docs/errata.md#paper-4-lowy-razaviyayn-output-perturbation, E8): the corrected ones are used. Their accuracy holds in
expectation only, which bounds no distance: whatever it returns is certified, or polished until it is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_dpsco.errors import ConditionError, NotCertifiedError
from torch_dpsco.linear.objectives.base import Objective
from torch_dpsco.linear.objectives.linear import LinearObjective, RowBounds, norm_up
from torch_dpsco.linear.solvers.certificates import Certificate, project, projected_certificate
from torch_dpsco.linear.solvers.newton import Iterate, certified
from torch_dpsco.theory.linear.solvers import agd_certified_steps, katyusha_parameters


def accelerated_steps(
    objective: Objective, start: Tensor, steps: int, radius: float = math.inf
) -> Tensor:
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
        >>> from torch_dpsco.linear.objectives import LinearObjective
        >>> F = LinearObjective(Squared(), torch.ones(1, 1), torch.ones(1), reg=1.0, normalizer=1)
        >>> round(accelerated_steps(F, torch.zeros(1, dtype=torch.float64), 9).item(), 9)
        0.5
    """
    beta = objective.smoothness
    mu = objective.strong_convexity
    if beta is None or not mu > 0:
        raise ConditionError("accelerated descent needs a smooth, strongly convex objective")
    root = math.sqrt(max(beta / mu, 1.0))
    momentum = (root - 1) / (root + 1)
    last = start
    query = start
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
    beta = objective.smoothness
    mu = objective.strong_convexity
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
    point = start
    steps = 32
    while True:
        point = accelerated_steps(objective, point if steps > 32 else start, steps, radius)
        if not bool(torch.isfinite(point).all()):
            raise _refusal()
        point, certificate = projected_certificate(objective, point, radius)
        if certificate.proves(distance):
            return point, certificate
        if steps > 4 * worst:
            raise _refusal()
        steps *= 2


def _refusal() -> NotCertifiedError:
    return NotCertifiedError(
        "no certificate: the promised constants are violated, or float64 is too coarse"
    )


def katyusha(
    objective: LinearObjective,
    start: Tensor,
    distance: float,
    epochs: int = 50,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Epochs of 2n steps on F = (1/n) sum_i g_i + (mu/2)||w||^2 until C1 proves the distance, or they are over.

    Args:
        objective: a smooth `LinearObjective` with reg > 0 and at least one record.
        start: w_0, float64.
        distance: target of the certificate.
        epochs: at most.
        generator: of the solver, CPU; None for torch's default.

    Returns:
        The last full-gradient point. It promises nothing: certify it.

    Raises:
        ConditionError: if the objective is not a smooth, strongly convex sum.

    Source:
        docs/proofs/output.md#steps-of-katyusha (algorithm 3 of the paper)
    """
    records = objective.records
    mu = objective.strong_convexity
    bends = RowBounds(objective.loss, records).bend
    if bends is None or not mu > 0 or records.count == 0:
        raise ConditionError(
            "katyusha needs a smooth, strongly convex sum over at least one record"
        )
    share = records.count / objective.normalizer
    rows = float((bends * records.weights * records.norms**2).max()) * share
    beta = max(rows, mu) * (1 + 1e-9) + mu  # of one term, with the regularizer
    parameters = katyusha_parameters(records.count, beta, mu)
    snapshot = ahead = behind = start
    for _ in range(epochs):
        iterate = Iterate.at(objective, snapshot)
        if certified(objective, iterate, distance):
            break
        full = iterate.gradient - mu * snapshot
        draws = torch.randint(records.count, (parameters.m,), generator=generator).tolist()
        total = torch.zeros_like(start)
        weight = 0.0
        growth = 1 + parameters.gamma * mu
        for draw in draws:
            query = parameters.tau1 * ahead + parameters.tau2 * snapshot
            query = query + (1 - parameters.tau1 - parameters.tau2) * behind
            change = objective.row_gradient(draw, query) - objective.row_gradient(draw, snapshot)
            slope = full + share * change
            ahead = (ahead - parameters.gamma * slope) / growth
            behind = (3 * beta * query - slope) / (3 * beta + mu)
            total = total / growth + behind
            weight = weight / growth + 1
        snapshot = total / weight
    return snapshot


def stochastic_subgradient(
    objective: LinearObjective,
    start: Tensor,
    steps: int,
    radius: float = math.inf,
    generator: torch.Generator | None = None,
) -> Tensor:
    """w_t = Pi[w_(t-1) - eta_t g_i(w_(t-1))], eta_t = 2/(mu (t + 1)); returns sum_t 2t/(T (T + 1)) w_(t-1).

    Args:
        objective: reg > 0, at least one record; smooth or not.
        start: w_0, float64.
        steps: T >= 1, fixed in advance.
        radius: R of the ball, or inf.
        generator: of the solver, CPU; None for torch's default.

    Returns:
        The average, with E F - min F <= 2 L^2/(mu (T + 1)). It promises nothing: certify it.

    Raises:
        ConditionError: if the objective is not strongly convex, or has no records.

    Source:
        docs/proofs/output.md#steps-of-the-subgradient-method (algorithm 2 of the paper)
    """
    mu = objective.strong_convexity
    count = objective.records.count
    if not mu > 0 or count == 0:
        raise ConditionError(
            "stochastic subgradient steps need a strongly convex sum over at least one record"
        )
    share = count / objective.normalizer
    point = project(start, radius)
    average = torch.zeros_like(start)
    for step, draw in enumerate(
        torch.randint(count, (steps,), generator=generator).tolist(), start=1
    ):
        average = average + 2 * step / (steps * (steps + 1)) * point
        slope = share * objective.row_gradient(draw, point) + mu * point
        if objective.linear_term is not None:
            slope = slope + objective.linear_term
        point = project(point - 2 / (mu * (step + 1)) * slope, radius)
    return average
