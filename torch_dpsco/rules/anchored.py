"""Phases that are pulled towards the answer of the phase before: localization.

In a phase with anchor c (its starting point) and regularization lambda, step k = 0, 1, ...:

    w <- Proj( w - f ( mean / lambda + (w - c) ) ),    f = lr / (k + 1), or 2 lr / (k + 2) in a ball around c

(or lambda lr times the step size of the phase, if that has one). It is a subgradient step of size f/lambda on the loss
plus (lambda/2)|w - c|^2; at k = 0 it goes to c - mean/lambda. Only `mean` comes from private data: the regularizer is
added after clip and noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import compat
from torch_dpsco.prox import Ball, Identity, Prox, project_on_two_balls_
from torch_dpsco.rules.base import Groups, State, UpdateRule, means, trained
from torch_dpsco.schedule import Phase


class Anchored(UpdateRule):
    """Regularized subgradient steps; phases with several copies continue from the most central of their answers.

    lr is a factor on all steps; the theory has 1.

    Source: Lowy, Razaviyayn 2023, Algorithms 3 and 4; docs/proofs/heavy_tailed.md#phase-in-a-ball,
    docs/proofs/heavy_tailed.md#phase-without-a-ball.
    """

    def __init__(self) -> None:
        super().__init__("last")

    def check_groups(self, groups: Groups) -> None:
        """Accepts all groups."""

    def _factor(self, lr: float, k: int, phase: Phase) -> float:
        if phase.lr is not None:
            return lr * phase.lr * phase.reg
        return lr / (k + 1) if math.isinf(phase.radius) else 2.0 * lr / (k + 2)

    def step_size(self, lr: float, k: int, phase: Phase) -> float:
        """Returns the step size on the loss."""
        return self._factor(lr, k, phase) / phase.reg

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Makes step k of a phase."""
        for group in groups:
            params = trained(group)
            if not params:
                continue
            lr = float(group["lr"])
            for p in params:
                if "anchor" not in state[p] or (k == 0 and phase.copy == 0):
                    state[p]["anchor"] = p.detach().clone()
            compat.foreach_lerp_(params, [state[p]["anchor"] for p in params], self._factor(lr, k, phase))
            compat.foreach_add_(params, means(params), alpha=-self.step_size(lr, k, phase))

    def constrain(
        self, prox: Prox, params: Sequence[Tensor], steps: Sequence[float], state: State, phase: Phase
    ) -> None:
        """Projects on the feasible set, and on the ball around the anchor."""
        if math.isinf(phase.radius):
            prox.apply_(params, steps)
            return
        params, anchors = list(params), [state[p]["anchor"] for p in params]
        if isinstance(prox, Identity):
            compat.foreach_sub_(params, anchors)
            Ball(phase.radius).apply_(params, steps)
            compat.foreach_add_(params, anchors)
        else:
            assert isinstance(prox, Ball)  # `LocalizedSGD` refuses others
            project_on_two_balls_(params, prox.radius, anchors, phase.radius)

    def end_phase(self, groups: Groups, state: State, phase: Phase) -> None:
        """Keeps the answer of a copy; after the last one, puts the most central answer into the parameters."""
        if phase.copies == 1:
            return
        params = [p for group in groups for p in trained(group)]
        for p in params:
            earlier = state[p].get("candidates") if phase.copy else None
            new = p.detach()[None]
            state[p]["candidates"] = new.clone() if earlier is None else torch.cat([earlier, new])
        if phase.copy + 1 < phase.copies:
            for p in params:
                p.copy_(state[p]["anchor"])
            return
        chosen = select_central(torch.cat([state[p]["candidates"].flatten(1).double() for p in params], dim=1)).index
        for p in params:
            p.copy_(state[p].pop("candidates")[chosen])

    def settings(self) -> dict[str, Any]:
        """Returns the name; the phases are in the schedule."""
        return {"rule": "Anchored"}


@dataclass(frozen=True)
class Selected:
    """Index of the chosen candidate, and the radii of all."""

    index: int
    radii: list[float]


def select_central(candidates: Tensor) -> Selected:
    """Returns the candidate that has more than half of all candidates nearest to it.

    The radius of candidate j is the (floor(J/2) + 1)-th smallest distance to a candidate, itself included; the least
    radius wins, the first one of equals. If more than half of the candidates are within q of a point, the chosen one
    is within 3 q of it.

    Args:
        candidates: (J, dim) float64, J >= 1.

    Source: docs/proofs/heavy_tailed.md#central-candidate.

    Example:
        >>> select_central(torch.tensor([[0.0], [5.0], [0.1]])).index
        0
    """
    # exact differences: the matrix product form of cdist loses half of the digits
    distances = torch.cdist(candidates, candidates, compute_mode="donot_use_mm_for_euclid_dist")
    radii = distances.nan_to_num_(nan=torch.inf).sort(dim=1).values[:, len(candidates) // 2]
    return Selected(int(radii.argmin()), radii.tolist())
