"""A loss of one's own: log cosh of the residual, a smooth absolute value."""

from dataclasses import dataclass

import torch
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.losses.base import upper  # products, rounded up


@dataclass(frozen=True)
class LogCosh(dp.losses.ResidualLoss):
    """log cosh r: phi' = tanh r is at most min(1, |r|), and its slope at most 1."""

    def curve(self, residual: Tensor) -> Tensor:
        """phi(r)."""
        size = residual.abs()
        return size + torch.log1p(torch.expm1(-2 * size) / 2)

    def slope(self, residual: Tensor) -> Tensor:
        """phi'(r)."""
        return residual.tanh()

    def holder_exponent(self) -> float:
        """alpha: the gradient is Lipschitz."""
        return 1.0

    def holder_constant(self, exponent: float, bound_x: float) -> float:
        """L = B^2."""
        return upper(bound_x, bound_x)

    def loss_at_zero(self, bound_y: float) -> float:
        """M0 = min(Y, Y^2/2), which log cosh Y does not exceed."""
        return upper(bound_y, min(1.0, bound_y / 2))

    def grad_bound(self, radius: float, bound_x: float, bound_y: float) -> float:
        """G(R) = B min(1, Y + B R)."""
        return upper(bound_x, min(1.0, bound_y + bound_x * radius))


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
