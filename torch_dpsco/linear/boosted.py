"""Least squares by rounds on residuals: X'X with noise once, then noisy sums of clipped gradients (boosted AdaSSP).

    w <- w + (X'X + N + ridge I)^-1 (sum of clip(x (y - <w, x>), C) + N(0, s^2 I)),   T rounds from 0

Steps of `preconditioned_gd` of length 1; the answer is the average of the later half. Residuals shrink, so that C may
be far below the bound on targets, to which the noise of AdaSSP is proportional; and what a large ridge hides in one
round, further rounds bring back.

Differs from the paper (Tang et al. 2023) in: X'X is released once; rounds are clipped, not targets; each round takes
the last answer in whole, with an average of the answers; all levels are added up exactly.

Source: docs/proofs/boosting.md
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from torch_dpsco.accounting.analysis.rounding import require_gaussian
from torch_dpsco.errors import ConditionError
from torch_dpsco.linear.preconditioned_gd import PreconditionedGDPlan, calibrated, require_plain_sum
from torch_dpsco.linear.task import LinearTask
from torch_dpsco.losses import Squared
from torch_dpsco.theory.linear.preconditioned import boosted_clip
from torch_dpsco.theory.linear.preparation import signal_to_noise

_ROUNDS, _SHARE = 40, 0.2  # of mu^2, for X'X
_FAR = 1000.0  # times the clip on residuals over the bound on rows: iterates are kept in that ball
_TAIL = 2.72  # sqrt(2 log(2 / 0.05)): for the ridge
_GUESS, _WIDEST = (
    0.1,
    2.0,
)  # of the bound on targets: their spread, if it is not measured; clips in that case


@dataclass(frozen=True, kw_only=True)
class BoostedPlan(PreconditionedGDPlan):
    """Public numbers of one run, of as many rounds as steps; reg is a ridge of the answer, beside that of a round."""

    mechanism = "boosted_adassp"
    share = 0.5

    @staticmethod
    def require_covered(task: LinearTask) -> None:
        """Raises ConditionError for another loss, and for delta = 0."""
        if not isinstance(task.loss, Squared) or task.residual_clip is not None:
            raise ConditionError(
                f"boosted AdaSSP needs the squared loss, as it is (got {task.loss!r})"
            )
        require_plain_sum(task, "boosted AdaSSP")

    @property
    def ridge(self) -> float:
        """Added to the noisy X'X: the norm of its noise is above that with probability 0.05."""
        return self.gram_std * (math.sqrt(2 * self.task.width) + _TAIL)

    @property
    def radius(self) -> float:
        """Radius of the ball that iterates are projected on."""
        return min(self.task.radius, _FAR * self.clip / self.task.preparation.bound**2)

    def step_size(self, eigenvalues: Tensor) -> float:
        """1: each round takes the last answer in whole."""
        return 1.0


def plan_boosted(task: LinearTask, rounds: int = _ROUNDS, secure: str | None = None) -> BoostedPlan:
    """Returns the numbers of boosted AdaSSP for a task with the squared loss.

    Args:
        task: its public numbers; delta > 0. reg is a ridge of the answer; None for none.
        rounds: T; each reads all records once.
        secure: None; "exact" is refused.

    Raises:
        ConditionError: another loss, or delta = 0.

    Guarantee:
        The event of the plan, for the task's adjacency, for everything computed from the noisy X'X and all noisy sums.
    """
    require_gaussian(
        secure, "boosted AdaSSP draws its noise in floating point; use mechanism='adassp'"
    )
    BoostedPlan.require_covered(task)
    prepare = task.prepare
    width = boosted_clip(signal_to_noise(task.level, task.n, task.parameters))
    if prepare is None or prepare.quantile is None or not prepare.spreads:
        width = min(width, _WIDEST) * _GUESS * (task.bound_y or 1.0)
    clip = width * task.preparation.bound
    return calibrated(
        BoostedPlan(task=task, steps=rounds, clip=clip, noise_std=1.0, gram_std=1.0), _SHARE
    )
