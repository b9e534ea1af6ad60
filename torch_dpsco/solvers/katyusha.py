"""Katyusha: variance-reduced, accelerated stochastic gradients.

Differs from the paper in: its rate hides a constant and holds in expectation only, so that the number of epochs is a
hint; the certificate C1, free at the start of every epoch, decides. Weights of the average are theta^(j - m), which
cannot overflow. Records are drawn with replacement from a generator of the solver, never from that of the noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dpsco.errors import ConditionError
from torch_dpsco.objectives.linear import LinearObjective
from torch_dpsco.solvers.descent import Iterate, certified
from torch_dpsco.theory.solvers import katyusha_parameters


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
    records, mu = objective.records, objective.strong_convexity
    if objective.constants.bend is None or not mu > 0 or records.count == 0:
        raise ConditionError("katyusha needs a smooth, strongly convex sum over at least one record")
    share = records.count / objective.normalizer
    rows = float((objective.constants.bend * records.weights * records.norms**2).max()) * share
    beta = max(rows, mu) * (1 + 1e-9) + mu  # of one term, with the regularizer
    parameters = katyusha_parameters(records.count, beta, mu)
    snapshot = ahead = behind = start
    for _ in range(epochs):
        iterate = Iterate.at(objective, snapshot)
        if certified(objective, iterate, distance):
            break
        full = iterate.gradient - mu * snapshot
        draws = torch.randint(records.count, (parameters.m,), generator=generator).tolist()
        total, weight, growth = torch.zeros_like(start), 0.0, 1 + parameters.gamma * mu
        for draw in draws:
            query = parameters.tau1 * ahead + parameters.tau2 * snapshot
            query = query + (1 - parameters.tau1 - parameters.tau2) * behind
            slope = full + share * objective.row_difference(draw, query, snapshot)
            ahead = (ahead - parameters.gamma * slope) / growth
            behind = (3 * beta * query - slope) / (3 * beta + mu)
            total, weight = total / growth + behind, weight / growth + 1
        snapshot = total / weight
    return snapshot
