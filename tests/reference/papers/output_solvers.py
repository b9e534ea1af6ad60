"""The stochastic solvers of output perturbation, step by step: Katyusha, and subgradients with a weighted average.

Their accuracy holds in expectation only, which bounds no distance, so that the package certifies what faster solvers
find. Differs from the papers in: Katyusha's rate hides a constant, so that the certificate C1 decides, free at the
start of every epoch; the indices of the weighted average are off by one there (docs/errata.md, E8, and E10 for tau_1).

Source: docs/proofs/output.md#steps-of-katyusha, docs/proofs/output.md#steps-of-the-subgradient-method.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.reference.papers.output import katyusha_parameters
from torch_dpsco.estimators.objectives import LinearObjective
from torch_dpsco.estimators.records import project
from torch_dpsco.estimators.solvers import Iterate, certified


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

    Source:
        docs/proofs/output.md#steps-of-katyusha (algorithm 3 of the paper)
    """
    records = objective.records
    mu = objective.strong_convexity
    bends = objective.loss.problem(bound_x=1.0).smoothness
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
            change = _row_gradient(objective, draw, query) - _row_gradient(
                objective, draw, snapshot
            )
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

    Source:
        docs/proofs/output.md#steps-of-the-subgradient-method (algorithm 2 of the paper)
    """
    mu = objective.strong_convexity
    count = objective.records.count
    share = count / objective.normalizer
    point = project(start, radius)
    average = torch.zeros_like(start)
    for step, draw in enumerate(
        torch.randint(count, (steps,), generator=generator).tolist(), start=1
    ):
        average = average + 2 * step / (steps * (steps + 1)) * point
        slope = share * _row_gradient(objective, draw, point) + mu * point
        if objective.linear_term is not None:
            slope = slope + objective.linear_term
        point = project(point - 2 / (mu * (step + 1)) * slope, radius)
    return average


def _row_gradient(objective: LinearObjective, row: int, point: Tensor) -> Tensor:
    """Returns c_i phi'_i(<w, x_i>) x_i of one record, without the normalizer."""
    features = objective.records.select(torch.tensor([row]))
    return objective.slopes(features @ point, slice(row, row + 1)) @ features
