"""Means of rows clipped at the gradient bound of a problem, which may follow the public iterate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.errors import MissingConstantError
from torch_dpsco.oracles.clipped import ClippedMean
from torch_dpsco.oracles.weights import joint_norm
from torch_dpsco.problem import Problem

NOISES = ("adaptive", "constant", "paper")


class HolderClipped(ClippedMean):
    """Clips at the gradient bound that the loss promises, so that with true constants nothing is ever clipped.

    `noise="adaptive"`: C_t = G(|w_t|), a function of the public iterate; the ratio z is constant, so that each step is
    the same event whatever the iterates do, also on an unbounded domain. `noise="constant"`: C = G(radius).
    `noise="paper"`: C = M + L radius^alpha, the bound of the paper.

    Args:
        problem: promised constants; see `Problem.grad_bound`.
        noise_multiplier: z >= 0.
        batch_size: public divisor.
        noise: "adaptive", "constant" or "paper".
        radius: bound of the feasible set; inf for the whole space.

    Raises:
        MissingConstantError: constants are missing, or a constant bound does not exist on an unbounded domain.

    Source: docs/proofs/holder.md#bound-at-the-iterate; Wang, Lei, Ying, Zhang, Algorithm 2 (constant).
    """

    def __init__(
        self,
        problem: Problem,
        noise_multiplier: float,
        batch_size: int,
        *,
        noise: str = "adaptive",
        radius: float = math.inf,
    ) -> None:
        super().__init__(noise_multiplier, batch_size)
        self.noise = check.choice(NOISES, noise=noise)
        self.problem, self.radius = problem, check.positive(radius=radius, allow_inf=True)
        if noise == "paper" and math.isinf(self.radius):
            raise MissingConstantError("radius must be finite for noise='paper': the paper projects onto a ball")
        # past problem.radius some constants are not promised; rows are clipped all the same
        self._reach = min(self.radius, problem.radius)
        if noise == "paper":
            self._constant, self._follows = problem.paper_grad_bound(self._reach), False
            return
        at_zero = problem.grad_bound(0.0)  # raises if constants are missing
        try:
            self._constant = problem.grad_bound(self._reach)
        except MissingConstantError:
            if noise == "constant":
                raise
            self._constant = math.inf
        # a bound that is the same everywhere need not follow the iterate
        self._follows = noise == "adaptive" and self._constant > at_zero

    def bound(self, query: Sequence[Tensor]) -> float:
        """Returns C for gradients at `query`; raises ValueError if the iterate is not finite."""
        if not self._follows:
            return self._constant
        norm = joint_norm(query)
        if math.isinf(norm):
            raise ValueError("the iterate must be finite: training diverged, lower lr or bound the domain (radius=)")
        return min(self.problem.grad_bound(min(norm, self._reach)), self._constant)

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return {
            "oracle": "HolderClipped",
            "noise": self.noise,
            "noise_multiplier": self.noise_multiplier,
            "radius": self.radius,
            "problem": repr(self.problem),
            "grad_bound": self.problem.grad_bound(min(1.0, self._reach)),  # repr leaves exact_grad_bound out
        }
