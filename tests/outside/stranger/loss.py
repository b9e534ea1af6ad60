"""A loss of one's own: log cosh of the residual, a smooth absolute value."""

from dataclasses import dataclass

import torch
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.losses.base import Line


@dataclass(frozen=True)
class LogCosh(dp.losses.ResidualLoss):
    """log cosh r: phi' = tanh r is within [-1, 1], 0 at r = 0, and its own slope at most 1."""

    line = Line(-1.0, 1.0, 1.0)

    def curve(self, residual: Tensor) -> Tensor:
        """phi(r)."""
        size = residual.abs()
        return size + torch.log1p(torch.expm1(-2 * size) / 2)

    def slope(self, residual: Tensor) -> Tensor:
        """phi'(r)."""
        return residual.tanh()


if __name__ == "__main__":
    loss = LogCosh()
    problem = loss.problem(bound_x=1.0, bound_y=2.0, radius=5.0)
    print("smoothness", problem.smoothness, "Lipschitz constant", problem.lipschitz)
    dp.losses.check_holder(loss, problem, bound_x=1.0, bound_y=2.0)  # finds nothing to object to
    try:
        dp.losses.check_holder(loss, dp.Problem(smoothness=0.9), bound_x=1.0, bound_y=2.0)
    except dp.errors.NotCertifiedError as error:
        print("a bolder promise:", str(error).partition(",")[0])
    plan = dp.HolderSGD.plan(problem=problem, n=10_000, budget=dp.Budget(1.0, 1e-6))
    print("steps", plan.steps, "batch", plan.batch_size, "epsilon", round(plan.epsilon(), 3))
