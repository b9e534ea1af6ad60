"""Stochastic subgradient steps with a weighted average: the first method of the paper.

Differs from the paper in: its indices are off by one
(docs/errata.md#paper-4-lowy-razaviyayn-output-perturbation, E8), the corrected ones are used; the accuracy
holds in expectation only, which bounds no distance: whatever it returns is certified, or polished until it is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_dpsco.errors import ConditionError
from torch_dpsco.objectives.linear import LinearObjective
from torch_dpsco.solvers.certificates import project


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
    mu, count = objective.strong_convexity, objective.records.count
    if not mu > 0 or count == 0:
        raise ConditionError("stochastic subgradient steps need a strongly convex sum over at least one record")
    share, point, average = count / objective.normalizer, project(start, radius), torch.zeros_like(start)
    for step, draw in enumerate(torch.randint(count, (steps,), generator=generator).tolist(), start=1):
        average = average + 2 * step / (steps * (steps + 1)) * point
        slope = share * objective.row_gradient(draw, point) + mu * point
        if objective.linear_term is not None:
            slope = slope + objective.linear_term
        point = project(point - 2 / (mu * (step + 1)) * slope, radius)
    return average
