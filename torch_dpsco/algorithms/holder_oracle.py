"""Means of rows clipped at the gradient bound of a problem, with a fixed ratio of noise or a fixed noise.

`HolderClipped` clips at the bound of the public iterate and keeps the ratio of noise to clip, so that the noise follows
the iterate. `HolderAbsolute` fixes the noise in advance and the ratio follows: steps near the origin, where gradients
are small, cost less. What a step costs is known before it is made, from public history, but not before the run: it
needs a filter or an odometer.

Source: docs/proofs/holder.md#prescribed-noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.designs import Design, Draw
from torch_dpsco.accounting.events import clipped_gaussian
from torch_dpsco.errors import MissingConstantError
from torch_dpsco.problem import Problem
from torch_dpsco.step.oracle import Charge, ClippedMean, joint_norm

_BITS = 10  # of the ratio that the ledger sees
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
        if noise == "paper" and math.isinf(self.radius):
            raise MissingConstantError(
                "radius must be finite for noise='paper': the paper projects onto a ball"
            )
        # past problem.radius some constants are not promised; rows are clipped all the same
        self._reach = min(self.radius, problem.radius)
        if noise == "paper":
            self._constant = problem.paper_grad_bound(self._reach)
            self._follows = False
            return
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


class HolderAbsolute(HolderClipped):
    """Clips at G(|w_t|) and adds noise whose std on the mean is given.

    The ledger is told the ratio of noise to clip rounded down to 10 bits, which costs at most 0.2 % of it and lets a
    run have few distinct events.

    Args:
        problem: promised constants; see `Problem.grad_bound`.
        noise_std: std of the noise on the released mean, > 0; or one per step, the last one for all steps after.
        batch_size: public divisor.
        radius: bound of the feasible set; inf for the whole space.

    Raises:
        MissingConstantError: constants are missing.

    Example:
        >>> import torch
        >>> from torch_dpsco.losses import Squared
        >>> oracle = HolderAbsolute(Squared().problem(bound_x=1.0), noise_std=0.5, batch_size=10)
        >>> for point in (0.0, 3.0):
        ...     oracle.open([torch.full((1,), point)])
        ...     print(round(oracle.clip, 2), oracle.event().sigma)
        1.0 4.9921875
        4.0 1.248046875
    """

    def __init__(
        self,
        problem: Problem,
        noise_std: float | Sequence[float],
        batch_size: int,
        *,
        radius: float = math.inf,
    ) -> None:
        super().__init__(problem, 0.0, batch_size, radius=radius)
        given = (noise_std,) if isinstance(noise_std, (int, float)) else tuple(noise_std)
        if not given:
            raise ValueError(
                "noise_std must hold a number for each step, at least one (got none)"
            )
        self._stds = tuple(check.positive(noise_std=std) for std in given)
        self._step = 0
        self._set(
            problem.grad_bound(0.0) / self.batch_size
        )  # the first event is one at the origin

    def _set(self, sensitivity: float) -> None:
        exact = self._stds[min(self._step, len(self._stds) - 1)] / sensitivity
        mantissa, exponent = math.frexp(exact * (1.0 - 2.0**-50))
        # PRIVACY: rounded down (test_the_ledger_is_told_no_more_noise_than_is_drawn)
        self._multiplier = math.ldexp(math.floor(mantissa * 2**_BITS), exponent - _BITS)
        self._event = clipped_gaussian(self._multiplier, self._exact)

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Fixes clip, noise and event by the public point."""
        super().open(query, step)
        self._step = check.count(step=step)
        self._set(self.sensitivity("zero_out"))
        if self._exact:
            self._plan_grid()  # of this step's noise

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what the release of the open batch is charged; the next one depends on the iterate."""
        return super().charge(design, draw)._replace(adaptive=True)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the released mean."""
        return self._stds[min(self._step, len(self._stds) - 1)]

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        follow = super().settings()
        del follow["noise_multiplier"], follow["noise"]
        return follow | {"noise_std": list(self._stds)}


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
