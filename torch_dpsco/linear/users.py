"""Noisy gradient descent on users: the mean gradient of a user's rows is clipped, whatever their number.

    w <- w + v,   v <- m v - eta (sum over users of clip(mean gradient of a user, C) + N(0, sigma^2 I)),   T steps

All T noisy sums are released, as in `noisy_gd`, with users in place of records; the answer is the average of the later
half. A user's rows have the weight 1 / their number, so that what is measured before counts users as well.

Differs from the paper in: it is not there. Source: docs/proofs/user_level.md#linear-models
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.adjacency import REPLACE_ONE
from torch_dpsco.accounting.analysis.gaussian import noisy_gd_mu
from torch_dpsco.accounting.stated import GDP
from torch_dpsco.errors import ConditionError
from torch_dpsco.linear.noisy_gd import far_radius, run_momentum, smooth_constants
from torch_dpsco.linear.objectives import LinearObjective
from torch_dpsco.linear.objectives.base import Records
from torch_dpsco.linear.task import LinearPlan, LinearTask, weight_guess
from torch_dpsco.mechanisms.vector_noise import gaussian_vector
from torch_dpsco.rng import Source
from torch_dpsco.theory.linear.output import safe
from torch_dpsco.theory.linear.preparation import signal_to_noise
from torch_dpsco.theory.rounding import gamma

MOST_ROWS = 2**26  # for which roundings of a user's sums are bounded
_STEPS, _LEAST_FRICTION = 200, 0.04
_FRICTION, _CLIPS = 0.1, (0.01, 0.1)  # wanted; clips of the bound on a row's gradient, which means are far below


@dataclass(frozen=True, kw_only=True)
class UserGDPlan(LinearPlan):
    """Public numbers of one run on users, whose number is the task's n.

    Args:
        steps: T.
        noise_std: of the noise on the sum over users.
        momentum: m in [0, 1).
        clip: C > 0.
    """

    unit: ClassVar[str] = "user"
    mechanism = "noisy_gd"

    steps: int
    noise_std: float
    momentum: float
    clip: float

    def __post_init__(self) -> None:
        super().__post_init__()
        smooth_constants(self.task), check.positive_count(steps=self.steps), check.positive(noise_std=self.noise_std)
        check.positive(clip=self.clip)
        if not 0 <= check.finite(momentum=self.momentum) < 1:
            raise ValueError(f"momentum must be in [0, 1) (got {self.momentum})")

    @property
    def reg(self) -> float:
        """Regularizer of the objective, in sum form; 0 for none."""
        return self.task.reg or 0.0

    @property
    def lr(self) -> float:
        """Step size eta, on the sum."""
        return 1.0 / (self.task.n * smooth_constants(self.task)[1] + self.reg)

    def own_event(self) -> GDP:
        """Returns what all noisy sums cost."""
        moved = (2.0 if self.task.adjacency == REPLACE_ONE else 1.0) * self.clip
        # PRIVACY: each sum is rounded, in both data sets (test_rounding_is_in_the_sensitivity_of_a_sum_over_users)
        moved += 2 * self._rounding
        # PRIVACY: of the noise and steps of the release (test_an_edited_plan_is_refused_or_charges_what_it_draws)
        return GDP(noisy_gd_mu(self.steps, 1.0, moved, self.noise_std), (self.task.adjacency,))

    @property
    def _rounding(self) -> float:
        """What rounding may do to the sum: to the mean of each user, which clipping does not enlarge, and to sums."""
        task, most, (lipschitz, _) = self.task, self.task.most_records, smooth_constants(self.task)
        mean = task.gradient_rounding(0.0, far_radius(task), lipschitz, dim=task.width, most=1)
        mean += lipschitz * gamma(MOST_ROWS)
        return most * (mean + self.clip * gamma(most + task.width + 16))

    @property
    def noise_and_signal(self) -> tuple[float, float, str]:
        """As in `LinearPlan`."""
        return self.noise_std / math.sqrt(self.steps), self.task.n * self.clip, "the mean of all steps"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        yield (
            "steps",
            f"{self.steps} on all users, mean gradient of each clipped at {self.clip:.3g}, step size {self.lr:.3g} on "
            f"the sum, answer: the average of the later half, with momentum {self.momentum:.3g}",
        )

    def draw(self, solved: tuple[Records, Tensor], generator: Source) -> Tensor:
        """Makes the steps from 0: returns the private average; see `LinearPlan`.

        Args:
            solved: records, with weights of at most 1 over a user, and the user of each, from 0.
            generator: of the noise.
        """
        records, users = solved
        loss = self.task.loss if self.task.clipped is None else self.task.clipped
        objective = LinearObjective(loss, records, reg=0.0, normalizer=1.0)

        def noisy(w: Tensor) -> Tensor:
            total = self._sum(objective, records, users, w)
            # PRIVACY: to the sum over all users, in each step (test_each_sum_over_users_gets_its_noise)
            return total + gaussian_vector(len(w), self.noise_std, generator) + self.reg * w

        start = torch.zeros(objective.dim, dtype=torch.float64, device=objective.device)
        return run_momentum(start, noisy, self.steps, self.lr, self.momentum, far_radius(self.task))

    def _sum(self, objective: LinearObjective, records: Records, users: Tensor, w: Tensor) -> Tensor:
        """Returns the sum over users of their clipped means: NOT private."""
        count = int(users.max()) + 1 if len(users) else 0
        means = torch.zeros(count, len(w), dtype=torch.float64, device=w.device)
        for rows, block in records.blocks():
            means.index_add_(0, users[rows], objective.slopes(block @ w, rows).unsqueeze(1) * block)
        norms = torch.linalg.vector_norm(means, dim=1)
        # PRIVACY: less by the rounding of norm and product (test_no_user_moves_a_sum_further_than_the_clip)
        most = self.clip * (1 - gamma(len(w) + 8))
        return (means * torch.where(norms > most, most / norms, 1.0).unsqueeze(1)).sum(0)


def plan_users(task: LinearTask, steps: int = _STEPS, clip: float | None = None) -> UserGDPlan:
    """Returns the numbers of noisy gradient descent on users.

    Args:
        task: its public numbers; n is the number of users, and the budget is of unit "user", with delta > 0.
        steps: T.
        clip: C; default 0.01 to 0.1 of the bound on the gradient of a row: the least that reaches as far as the noise
            allows, see docs/proofs/user_level.md#linear-models.

    Raises:
        ConditionError: the loss is not smooth and Lipschitz on R^d, tilted or adversarial, or delta is 0.

    Guarantee:
        The event of the plan, for all noisy sums, unit: all rows of one user. Ids are right.
    """
    lipschitz, _ = smooth_constants(task)
    draft = UserGDPlan(task=task, steps=steps, noise_std=1.0, momentum=0.0, clip=lipschitz)
    reach = weight_guess(task) * signal_to_noise(task.level, task.n, task.parameters)
    if task.loss.target_kind != "real":
        reach /= 3  # clipped means bend little, so that nothing holds the noise back
    steepest = draft.lr * task.n * steps  # what a unit of clip reaches without momentum
    if clip is None:
        clip = min(max(_FRICTION * reach / steepest, _CLIPS[0] * lipschitz), _CLIPS[1] * lipschitz)
    draft = replace(draft, clip=clip)
    friction = min(max(steepest * clip / reach, _LEAST_FRICTION), 1.0)
    return replace(draft, noise_std=safe(draft.own_event().mu / task.level), momentum=1.0 - friction)


def users_of(groups: Tensor) -> tuple[Tensor, Tensor, int]:
    """Returns the user of each row, from 0, the weights 1 / rows of its user, and the number of users: NOT private.

    Raises:
        ConditionError: more rows than roundings are bounded for.
    """
    if len(groups) > MOST_ROWS:
        raise ConditionError(f"users must have at most {MOST_ROWS} rows together")
    _, codes, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    # PRIVACY: all rows of a user weigh 1 together (test_a_user_counts_as_much_as_one_record)
    return codes, 1.0 / counts.double()[codes], len(counts)
