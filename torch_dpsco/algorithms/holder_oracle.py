"""Means of rows clipped at the gradient bound of a problem, at the public iterate, with a fixed ratio of noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.errors import MissingConstantError
from torch_dpsco.problem import Problem
from torch_dpsco.step.clipped import ClippedMean
from torch_dpsco.step.oracle import joint_norm

NOISES = ("adaptive", "constant")


class HolderClipped(ClippedMean):
    """Clips at the gradient bound that the loss promises, so that with true constants nothing is ever clipped.

    `noise="adaptive"`: C_t = G(|w_t|), a function of the public iterate; the ratio z is constant, so that each step is
    the same event whatever the iterates do, also on an unbounded domain. `noise="constant"`: C = G(radius).

    Args:
        problem: promised constants; see `Problem.grad_bound`.
        noise_multiplier: z >= 0.
        batch_size: public divisor.
        noise: "adaptive" or "constant".
        radius: bound of the feasible set; inf for the whole space.
        clip_share: in (0, 1], of the bound over the feasible set (of that at the iterate, where it has none), past
            which rows are clipped; 1 clips none.

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
        clip_share: float = 1.0,
    ) -> None:
        super().__init__(noise_multiplier, batch_size)
        self.noise = check.choice(NOISES, noise=noise)
        self.clip_share = require_share(clip_share=clip_share)
        self.problem = problem
        self.radius = check.positive(radius=radius, allow_inf=True)
        # past problem.radius some constants are not promised; rows are clipped all the same
        self._reach = min(self.radius, problem.radius)
        at_zero = problem.grad_bound(0.0)  # raises if constants are missing
        try:
            self._constant = problem.grad_bound(self._reach)
        except MissingConstantError:
            if noise == "constant":
                raise
            self._constant = math.inf
        # a bound that is the same everywhere need not follow the iterate
        self._follows = noise == "adaptive" and self._constant * self.clip_share > at_zero

    def bound(self, query: Sequence[Tensor]) -> float:
        """Returns C for gradients at `query`; raises ValueError if the iterate is not finite."""
        if not self._follows:
            return self._constant * self.clip_share
        norm = joint_norm(query)
        if math.isinf(norm):
            raise ValueError(
                "the iterate must be finite: training diverged, lower lr or bound the domain"
                " (radius=)"
            )
        here = self.problem.grad_bound(min(norm, self._reach))
        return shared_bound(here, self._constant, self.clip_share)

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        at_one = self.problem.grad_bound(
            min(1.0, self._reach)
        )  # repr leaves exact_grad_bound out
        own = {"problem": repr(self.problem), "grad_bound": at_one}
        own |= {} if self.clip_share == 1 else {"clip_share": self.clip_share}
        return self._named("noise", "noise_multiplier", "radius", **own)


def require_share(**field: Any) -> float:
    """Returns the field, a share of the bound on gradients; raises ValueError unless it is in (0, 1]."""
    ((name, value),) = field.items()
    return check.between(0.0, 1.0, **{name: check.positive(**{name: value})})


def shared_bound(here: float, largest: float, share: float) -> float:
    """Returns the clip: a share of the largest bound, or of the bound here where there is no largest one.

    Args:
        here: bound on gradients at an iterate.
        largest: bound over the feasible set, inf for none.
        share: in (0, 1].
    """
    return min(here, share * largest) if math.isfinite(largest) else share * here
