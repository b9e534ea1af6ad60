"""What optimizers without clipping make of a problem and of the parameters of one linear layer, before they start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_dpsco.errors import MissingConstantError, NotCertifiedError
from torch_dpsco.optim.checks import listed
from torch_dpsco.problem import Problem
from torch_dpsco.theory.holder_promises import LossPromises


@dataclass(frozen=True)
class GradBound:
    """r -> G(r) of a problem, as a value that compares: bound methods compare by identity."""

    problem: Problem
    paper: bool = False

    def __call__(self, radius: float) -> float:
        """Returns G(radius)."""
        return self.problem.paper_grad_bound(radius) if self.paper else self.problem.grad_bound(radius)


def loss_promises(
    problem: Problem, *, by: str, gradient_error: float | None = None, paper: bool = False
) -> LossPromises:
    """Returns the promises of a problem as theory takes them.

    Args:
        problem: needs holder_exponent, holder_constant, and score_offset if its score is a scalar.
        by: name of the optimizer that asks, for messages.
        gradient_error: certified bound on the error of the computed mean gradient, for losses of several scores.
        paper: whether gradients are bounded as in the paper.

    Raises:
        MissingConstantError: a promise is missing.
    """
    exponent, constant = problem.require("holder_exponent", "holder_constant", by=by)
    if problem.is_glm and problem.score_offset is None:
        raise MissingConstantError(
            f"{by} needs score_offset, the largest number that the loss adds to the score over bound_x: "
            "promise Problem(score_offset=...) (0 if it adds none), or use losses.<Loss>().problem(bound_x=...)"
        )
    return LossPromises(
        holder_exponent=exponent,
        holder_constant=constant,
        grad_bound=GradBound(problem, paper),
        grad_at_zero=problem.grad_at_zero,
        loss_at_zero=problem.loss_at_zero,
        radius=problem.radius,
        glm=problem.is_glm,
        score_offset=problem.score_offset or 0.0,
        gradient_error=gradient_error,
    )


def parameters_of(params: Any, lr: float | Sequence[float] | None) -> list[nn.Parameter]:
    """Returns parameters, given as such, as (name, parameter), or as one group without a step size of its own."""
    items = listed(params)
    if items and isinstance(items[0], dict):
        if len(items) > 1:
            raise ValueError(f"params must be one group: the plan has one step size (got {len(items)} groups)")
        if items[0].get("lr", lr) != lr:
            raise ValueError(f"lr must be given to the plan, and be the step size of the plan (got {items[0]['lr']})")
        items = list(items[0]["params"])
    return [item[1] if isinstance(item, tuple) else item for item in items]


def reach(promises: LossPromises, lr: float | Sequence[float], steps: int) -> float:
    """Returns how far from their start plain steps can end; inf where gradients have no bound."""
    total = lr * steps if isinstance(lr, float) else math.fsum(lr)
    try:
        return min(promises.radius, total * promises.grad_bound(promises.radius))
    except MissingConstantError:
        return math.inf


def record_bounds(problem: Problem, bias: bool) -> tuple[float | None, float | None]:
    """Returns the bounds that the loader enforces: the ones of a bias take their share of bound_x."""
    if problem.bound_x is None:
        return None, None
    if not bias:
        return problem.bound_x, problem.bound_y
    if problem.bound_x <= 1:
        raise ValueError(
            f"bound_x must be > 1 with a bias, whose column of ones has norm 1 by itself (got {problem.bound_x:g}): "
            f"use Linear(bias=False), or bound_x = sqrt(B^2 + 1) for features of norm B"
        )
    # PRIVACY: rounded down (test_the_ones_of_a_bias_are_part_of_the_bound)
    return math.sqrt(problem.bound_x**2 - 1) * (1 - 1e-15), problem.bound_y


def require_linear(params: Sequence[nn.Parameter], is_glm: bool, certified: bool) -> bool:
    """Returns whether there is a bias; raises NotCertifiedError for parameters that are not of one Linear layer."""
    shapes = [tuple(p.shape) for p in params]
    linear = 1 <= len(shapes) <= 2 and len(shapes[0]) == 2 and shapes[1:] in ([], [(shapes[0][0],)])
    if not linear and certified is not True:
        # PRIVACY: the sensitivity is that of convex losses (test_other_models_need_a_certificate)
        raise NotCertifiedError(
            f"params must be weight and bias of one Linear layer (got shapes {shapes}): output perturbation needs a "
            f"loss that is convex in all of them. If it is, with the constants of the problem, give certify_convex=True"
        )
    if linear and is_glm and shapes[0][0] != 1:
        raise NotCertifiedError(
            f"params must be those of a layer with one output, the scalar score of this loss (got {shapes[0][0]})"
        )
    return linear and len(shapes) == 2
