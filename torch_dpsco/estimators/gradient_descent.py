"""Noisy gradient descent on all records: of which the last iterate alone is released, or every noisy sum.

    w <- w - eta (sum of gradients + reg w + N(0, sigma^2 I)),   T steps from a public start

The last iterate: a step contracts by c = max(|1 - eta mu|, |1 - eta beta|) on every data set, so that what a record did
in early steps fades: mu_GDP = (S/sigma) sqrt((1 - c^T)/(1 + c^T) (1 + c)/(1 - c)), S bounding how far a record moves
the sum. Every sum: mu_GDP = (S/sigma) sqrt(T), and what is made of the sums is free: momentum, no regularizer, an
average of the later half of the iterates. How far the steps reach then takes the place of a regularizer.

Differs from the paper in: it is not there. Bok, Su and Altschuler 2024.

Source: docs/proofs/output.md#noisy-gradient-descent

Noisy gradient descent on users: the mean gradient of a user's rows is clipped, whatever their number.

    w <- w + v,   v <- m v - eta (sum over users of clip(mean gradient of a user, C) + N(0, sigma^2 I)),   T steps

All T noisy sums are released, as in `gradient_descent`, with users in place of records; the answer is the average of
the later half. A user's rows have the weight 1 / their number, so that what is measured before counts users as well.

Clipped users have votes of equal length: the intercept goes to the median user, and scores grow too large; those of
records grow by noise. So the logistic loss gets more such steps on rows of two numbers, the score of that answer and
the constant, whose clip is the bound on their gradients: scale and intercept are those of the mean loss.

Differs from the paper in: it is not there.

Source: docs/proofs/user_level.md#linear-models, docs/proofs/output.md#scale-and-intercept
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import noisy_gd_mu
from torch_dpsco.accounting.analysis.objective import objpert_reg
from torch_dpsco.accounting.analysis.rounding import (
    DOUBLE,
    gamma,
    safe,
    up,
)
from torch_dpsco.accounting.events import GDP, REPLACE_ONE
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.objectives import LinearObjective, loss_sums
from torch_dpsco.estimators.preparation import signal_to_noise
from torch_dpsco.estimators.records import Records, gradient_rounding, project
from torch_dpsco.estimators.task import LinearPlan, LinearTask, build_objective, weight_guess
from torch_dpsco.losses import Logistic
from torch_dpsco.noise import Source, gaussian_vector
from torch_dpsco.problem import smooth_pace, steps_to

_MOST_STEPS, _STEPS = (
    500,
    200,
)  # of the last iterate; of all sums, with noise of one's own. A step reads all records
_FAINT_LABELS, _FAINT_TARGETS = 60.0, 30.0  # n mu / sqrt(d), below which steps go less far
_OF_TARGETS = 2.0  # times the guess of the weights, where targets are real
_FAR = 1000.0  # times 1 / bound on rows: iterates are kept in that ball where there is no regularizer
_LAST_STEPS, _LAST_CLIP, _LAST_FAR = (
    32,
    math.sqrt(2),
    1000.0,
)  # for scale and intercept: their number (4 is the root of half of it), bound on gradients, radius
_LEAST_SCALE = 0.1  # 0 would lose the order of scores
_MOST_LAST, _ENOUGH, _FEW = (
    0.1,
    300.0,
    150.0,
)  # share of mu^2 for them, of records; n mu of them that is enough, and n mu below which they are not worth it
_ROOM = 40.0  # times the norm of every minimizer: iterates are kept in that ball, for which rounding is bounded


@dataclass(frozen=True, kw_only=True)
class DescentPlan(LinearPlan):
    """Public numbers of noisy steps on all records: what all such plans share.

    Args:
        steps: T.
        noise_std: of the noise on each sum of gradients.
    """

    steps: int
    noise_std: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_covered(self.task)
        check.positive_count(steps=self.steps)
        check.positive(noise_std=self.noise_std)

    @staticmethod
    def require_covered(task: LinearTask) -> None:
        """Raises ConditionError for a task that the steps are not for."""
        smooth_constants(task)

    @property
    def reg(self) -> float:
        """Regularizer of the answer, in sum form; 0 for none."""
        return self.task.reg or 0.0

    @property
    @abstractmethod
    def largest(self) -> float:
        """Bound on what a record adds to a sum."""

    @property
    def noise_and_signal(self) -> tuple[float, float, str]:
        """As in `LinearPlan`."""
        std = self.noise_std / math.sqrt(self.steps)
        return std, self.task.n * self.largest, "the mean of all steps"


def descend(
    total: Callable[[Tensor], Tensor],
    start: Tensor,
    std: float,
    generator: Source,
    *,
    steps: int,
    lr: float,
    radius: float,
    momentum: float = 0.0,
    averaged: int | None = None,
    direction: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Makes steps with momentum along noisy sums, in a ball: returns the average of the last iterates.

    Args:
        total: sum over the records, at an iterate: NOT private.
        start: public.
        std: of the noise on each sum.
        generator: of the noise.
        steps: T.
        lr: eta.
        radius: of the ball.
        momentum: in [0, 1).
        averaged: number of iterates; None for the later half.
        direction: of a step, made of a noisy sum and the iterate; None for the sum itself.
    """
    w = start
    moved = torch.zeros_like(w)
    last = steps - steps // 2 if averaged is None else averaged
    answer = torch.zeros_like(w)
    for step in range(steps):
        # PRIVACY: to the sum over all records or users, in each step (test_a_step_without_its_noise_is_caught,
        # test_a_preconditioned_step_without_noise_is_caught, test_each_sum_over_users_gets_its_noise)
        noisy = total(w) + gaussian_vector(len(w), std, generator)
        along = noisy if direction is None else direction(noisy, w)
        moved = momentum * moved - lr * along
        w = project(w + moved, radius)
        if step >= steps - last:
            answer += w
    return answer / last


_Last = tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True)
class ScaledPlan(DescentPlan):
    """Steps after which scores of the logistic loss may get a private scale and intercept, by more noisy sums.

    Args:
        last_std: of the noise on these sums; None for no such sums.
    """

    last_std: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.last_std is not None:
            check.positive(last_std=self.last_std)
            if not self.task.loss.log_odds:
                raise ConditionError(
                    f"last_std must be None for other losses than Logistic (got {self.task.loss!r})"
                )

    @property
    @abstractmethod
    def _last(self) -> _Last:
        """Clip of scores over their bound; way of scale and intercept together; scale to start at; largest scale."""

    def _event_of(self, level: float) -> GDP:
        """Returns what steps of this level cost together with these sums."""
        if self.last_std is not None:
            # PRIVACY: these sums are released too (test_the_sums_for_scale_and_intercept_are_charged)
            level = safe(math.hypot(level, self._last_level(self.last_std)))
        return GDP(level, (self.task.adjacency,))

    def _last_level(self, std: float) -> float:
        return self._level(_LAST_STEPS, _LAST_CLIP, self._last_rounding, std)

    def _level(self, steps: int, clip: float, rounding: float, std: float) -> float:
        sides = 2.0 if self.task.adjacency == REPLACE_ONE else 1.0
        # PRIVACY: each sum is rounded, in both data sets (test_rounding_is_in_the_sensitivity_of_a_sum_over_users);
        # margin of both (docs/proofs/rounding.md#weighted-means-of-users)
        return noisy_gd_mu(steps, 1.0, sides * clip + 2 * rounding, std)

    @property
    def _last_rounding(self) -> float:
        """As `_rounding`, of the sums for scale and intercept."""
        most = self.task.most_records
        slope = 1.0
        bend = 0.25
        score = gamma(self.task.width + 16) / self._last[0]  # of a score, over its clip
        # PRIVACY: products that make a score may be rounded differently beside other rows
        # (test_rounding_is_in_the_sensitivity_of_the_sums_for_scale_and_intercept)
        mean = (slope + _LAST_CLIP * bend * _LAST_FAR) * score + _LAST_CLIP * gamma(MOST_ROWS)
        mean += gradient_rounding(
            1,
            2,
            lipschitz=_LAST_CLIP,
            smoothness=2 * bend,
            reg=0.0,
            norm=_LAST_FAR,
            score_offset=1.0,
        )
        return most * (mean + _LAST_CLIP * gamma(most + 18))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        if self.last_std is not None:
            std = f"noise of std {self.last_std:.4g} on the sum"
            yield "scale", f"and intercept: {_LAST_STEPS} more, {std}"

    def _scaled(
        self,
        w: Tensor,
        shift: float,
        total: Callable[[Tensor, float, Tensor], Tensor],
        generator: Source,
    ) -> Tensor:
        """Returns the private answer with a private scale and intercept, if there are sums for them.

        Args:
            w: of the steps.
            shift: the intercept to start at.
            total: sum of gradients, by what makes scores over their clip of rows, the constant, and the point of scale
                and intercept: NOT private.
            generator: of the noise.
        """
        if self.last_std is None:
            return w
        constant = self.task.preparation.intercept
        slopes = w.clone()
        if constant:
            slopes[-1] = 0.0
        wide, way, start, most = self._last
        unit = max(wide * self.task.preparation.bound_x * float(slopes.norm()), 1e-100)
        pace = smooth_pace(4 * way / self.last_std, _LAST_STEPS, self.task.n / 2)
        scale, shift = descend(
            partial(total, slopes / unit, constant),
            w.new_tensor([start * unit, shift]),
            self.last_std,
            generator,
            steps=_LAST_STEPS,
            lr=pace.lr,
            radius=_LAST_FAR,
            momentum=pace.momentum,
        ).tolist()
        answer = slopes * min(max(scale / unit, _LEAST_SCALE), most)
        if constant:
            answer[-1] = shift / constant
        return project(answer, far_radius(self.task))


_Plan = TypeVar("_Plan", bound=ScaledPlan)


def _pairs(direction: Tensor, constant: float, records: Records) -> Records:
    """Returns records of score and constant, both in [-1, 1]: NOT private."""

    def made() -> Records:
        rows = records.zeros(records.count, 2)
        for part, block in records.blocks():
            rows[part, 0] = (block @ direction).clamp(-1.0, 1.0)
            if constant:
                rows[part, 1] = block[:, -1] / constant
        return Records(rows, records.targets, records.weights)

    return records.once(("pairs", direction), made)


def _pair_sums(
    direction: Tensor, constant: float, point: Tensor, part: Records
) -> tuple[Tensor]:
    """Returns the sum of the gradients of records in memory, in scale and intercept: NOT private."""
    return (loss_sums(Logistic(), point, _pairs(direction, constant, part))[1],)


@dataclass(frozen=True, kw_only=True)
class NoisyGDPlan(ScaledPlan):
    """Public numbers of one run.

    Args:
        momentum: in [0, 1), where all sums are released; None where the last iterate is.
    """

    momentum: float | None = None

    mechanism = "noisy_gd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum is None:
            check.positive(reg=self.task.reg)
        else:
            check.below_one(momentum=self.momentum)

    @property
    def _last(self) -> _Last:
        # noise makes scores too large, by far where one class is rare: from less than half of it
        return min(1.0, 2 / math.sqrt(self.task.dim)), 1.0, 0.4, 8.0

    @property
    def lr(self) -> float:
        """Step size eta, on the sum."""
        if self.momentum is not None:
            return (1.0 + self.momentum) / (
                self.task.n * smooth_constants(self.task)[1] + self.reg
            )
        return 2.0 / (self._smoothness + self.reg)

    @property
    def radius(self) -> float:
        """Radius of the ball that iterates are projected on."""
        if self.momentum is not None:
            return far_radius(self.task)
        return min(
            self.task.radius,
            safe(_ROOM * self.task.most_records * smooth_constants(self.task)[0] / self.reg),
        )

    @property
    def _smoothness(self) -> float:
        return safe(self.task.most_records * smooth_constants(self.task)[1] + self.reg)

    def own_event(self) -> GDP:
        """Returns what the last iterate costs, or all sums."""
        task = self.task
        most = task.most_records
        lipschitz, _ = smooth_constants(task)
        radius = self.radius
        moved = (2.0 if task.adjacency == REPLACE_ONE else 1.0) * lipschitz
        # PRIVACY: each sum is rounded, in both data sets (test_rounding_is_in_the_sensitivity_of_a_noisy_step)
        moved += 2 * task.gradient_rounding(
            self.reg, radius, lipschitz, dim=task.width, most=most
        )
        if self.momentum is not None:
            # PRIVACY: every sum is released (test_all_steps_of_a_run_with_momentum_are_charged)
            return self._event_of(noisy_gd_mu(self.steps, 1.0, moved, self.noise_std))
        beta = self._smoothness
        # margin: of the quotient, the same at both ends of [reg, beta] (docs/proofs/rounding.md#model-of-arithmetic)
        contraction = min(1.0, up((beta - self.reg) / (beta + self.reg), 1e-15))
        # margin: w - eta g is rounded by a few ulp of numbers up to the radius, in units of g: over eta
        # (docs/proofs/rounding.md#gradients-and-gaps-of-objectives)
        moved += 2 * 8 * DOUBLE * radius / self.lr
        # PRIVACY: of the noise and steps of the release (test_an_edited_plan_is_refused_or_charges_what_it_draws)
        return self._event_of(noisy_gd_mu(self.steps, contraction, moved, self.noise_std))

    @property
    def largest(self) -> float:
        """Bound on the gradient of a record."""
        return smooth_constants(self.task)[0]

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        what = "the last iterate"
        if self.momentum is not None:
            what = f"the average of the later half, with momentum {self.momentum:.3g}"
        yield (
            "steps",
            f"{self.steps} on all records, step size {self.lr:.3g} on the sum, answer: {what}",
        )

    def draw(self, solved: Records, generator: Source) -> Tensor:
        """Makes the steps from 0: returns the private answer; see `LinearPlan`."""
        solved.keep()
        objective = build_objective(self.task, self.reg, solved)
        answer = descend(
            objective.gradient,
            solved.zeros(self.task.parameters),
            self.noise_std,
            generator,
            steps=self.steps,
            lr=self.lr,
            radius=self.radius,
            momentum=self.momentum or 0.0,
            averaged=1 if self.momentum is None else None,
        )
        # of clipped gradients, which lead further from 0 than log odds are
        shift = 0.8 * float(answer[-1]) * self.task.preparation.intercept
        return self._scaled(
            answer, shift, lambda *at: solved.sum(partial(_pair_sums, *at))[0], generator
        )


def way_guess(task: LinearTask) -> float:
    """Returns how far steps should be able to go: the guess of |w|, and more for regressions."""
    return weight_guess(task) * (_OF_TARGETS if task.loss.target_kind == "real" else 1.0)


def _way(task: LinearTask) -> float:
    """Returns how far to go: as far as the guess, and less where that much noise would hide what can be learned."""
    way = way_guess(task)
    if task.noise_multiplier is not None:
        return way
    signal = signal_to_noise(task.level, task.n, task.parameters)
    if task.loss.target_kind == "real":
        return way * min(1.0, signal / _FAINT_TARGETS)
    return way * min(1.0, signal / _FAINT_LABELS) ** 2


def far_radius(task: LinearTask) -> float:
    """Returns the radius of the ball that iterates are projected on where there is no regularizer."""
    return min(task.radius, _FAR / task.preparation.bound)


def plan_noisy_gd(
    task: LinearTask, steps: int | None = None, released: str = "last"
) -> NoisyGDPlan:
    """Returns the numbers of noisy gradient descent for a task.

    Args:
        task: its public numbers; delta > 0.
        steps: T; default 3 beta / reg, where the last iterate has converged, at most 500; for all sums as many as the
            way that the noise allows needs, 64 to 1024.
        released: "last" for the last iterate, with a regularizer; "all" for all sums, with momentum, and without one
            unless it is given.

    Raises:
        ConditionError: the loss is not smooth and Lipschitz on R^d, tilted or adversarial, or delta is 0.

    Guarantee:
        The event of the plan, for the task's adjacency: for the last iterate alone, where n_max is a promise about the
        number of records on which the contraction rests, or for all noisy sums.
    """
    _, smoothness = smooth_constants(task)
    if check.choice(("last", "all"), released=released) == "all":
        return _all_sums(task, steps)
    if task.reg is None:
        task = replace(task, reg=objpert_reg(task.target.epsilon, smoothness))
    draft = NoisyGDPlan(task=task, steps=1, noise_std=1.0)
    converged = min(math.ceil(3 * draft._smoothness / draft.reg), _MOST_STEPS)
    return _with_noise(replace(draft, steps=converged if steps is None else steps))


def _with_noise(draft: NoisyGDPlan, share: float = 0.0) -> NoisyGDPlan:
    """Returns the plan with the noise that is given, or uses the level of its task up; see `_spending`."""
    task = draft.task
    if task.noise_multiplier is not None:
        return replace(draft, noise_std=task.noise_multiplier * draft.largest)
    return _spending(draft, draft.own_event().mu, share)


def _spending(draft: _Plan, once: float, share: float) -> _Plan:
    """Returns the plan of the whole level of its task.

    Args:
        draft: its other numbers.
        once: what it costs with noise of std 1.
        share: of the squared level, for scale and intercept.
    """
    level = draft.task.level * (1 - 1e-12 * (share > 0))  # room for roundings
    std = safe(once / (level * math.sqrt(1 - share)))
    last = draft._last_level(1.0) / (level * math.sqrt(share)) if share else None
    return replace(draft, noise_std=std, last_std=last)


def _last_share(task: LinearTask) -> float:
    """Returns the share of the squared level for scale and intercept, by public numbers; 0 for none."""
    if not (task.prepare and task.prepare.rows and task.loss.log_odds) or task.noise_multiplier:
        return 0.0
    signal = task.n * task.level
    return min(_MOST_LAST, (_ENOUGH / signal) ** 2) if signal >= _FEW else 0.0


def _all_sums(task: LinearTask, steps: int | None) -> NoisyGDPlan:
    """Returns the plan whose steps reach as far as the noise allows, see docs/proofs/output.md#how-far-to-go."""
    lipschitz, smoothness = smooth_constants(task)
    draft = NoisyGDPlan(task=task, steps=1, noise_std=1.0, momentum=0.0)
    curvature = task.n * smoothness + draft.reg
    share = _last_share(task)
    if task.noise_multiplier is None:
        # noise of one sum at the cost of all T of them
        once = draft.own_event().mu / (task.level * math.sqrt(1 - share))
    else:
        steps = _STEPS if steps is None else steps
        once = task.noise_multiplier * lipschitz / math.sqrt(steps)
    horizon = _way(task) / (once * math.sqrt(task.parameters))
    steps = steps_to(horizon, curvature) if steps is None else steps
    momentum = smooth_pace(horizon, steps, curvature).momentum
    return _with_noise(replace(draft, steps=steps, momentum=momentum), share)


def smooth_constants(task: LinearTask) -> tuple[float, float]:
    """Returns bounds on gradient and curvature of a record's loss."""
    task.require_gaussian("noisy gradient descent")
    return task.smooth_constants("noisy gradient descent")


MOST_ROWS = 2**26  # for which roundings of a user's sums are bounded
_USER_STEPS = 600
_LEAST_FRICTION = 0.015
_FRICTION, _CLIPS = (
    0.1,
    (
        0.01,
        0.1,
        0.3,
    ),
)  # wanted; clips of the bound on a row's gradient, which means are far below
_QUIET = 1e-3  # noise on the mean of all steps, of that bound, up to which a larger clip, with less bias, is free
_SAFE = (
    0.1  # guess of |w| over bound_y / bound on rows, at most, for each unit of signal over noise
)
_LAST_SHARE = 0.2  # of mu^2, for scale and intercept
_LAST_SIGNAL = (
    15.0  # n mu / sqrt(2) of these sums, below which noise does more harm than they mend
)


@dataclass(frozen=True, kw_only=True)
class UserGDPlan(ScaledPlan):
    """Public numbers of one run on users, whose number is the task's n; sums are over users.

    Args:
        momentum: m in [0, 1).
        clip: C > 0.
    """

    unit: ClassVar[str] = "user"
    mechanism = "noisy_gd"

    momentum: float
    clip: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive(clip=self.clip)
        check.below_one(momentum=self.momentum)

    @property
    def _last(self) -> _Last:
        return 0.25, 2.0, 1.0, 1.0

    @property
    def largest(self) -> float:
        """C."""
        return self.clip

    @property
    def lr(self) -> float:
        """Step size eta, on the sum."""
        return 1.0 / (self.task.n * smooth_constants(self.task)[1] + self.reg)

    def own_event(self) -> GDP:
        """Returns what all noisy sums cost."""
        # PRIVACY: of the noise and steps of the release (test_an_edited_plan_is_refused_or_charges_what_it_draws)
        level = self._level(self.steps, self.clip, self._rounding, self.noise_std)
        return self._event_of(level)

    @property
    def _rounding(self) -> float:
        """What rounding may do to the sum: to the mean of each user, which clipping does not enlarge, and to sums."""
        task = self.task
        most = task.most_records
        lipschitz, _ = smooth_constants(task)
        mean = task.gradient_rounding(0.0, far_radius(task), lipschitz, dim=task.width, most=1)
        mean += lipschitz * gamma(MOST_ROWS)
        return most * (mean + self.clip * gamma(most + task.width + 16))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        yield (
            "steps",
            (
                f"{self.steps} on all users, mean gradient of each clipped at {self.clip:.3g}, step"
                f" size {self.lr:.3g} on the sum, answer: the average of the later half, with"
                f" momentum {self.momentum:.3g}"
            ),
        )

    def draw(self, solved: tuple[Records, Tensor], generator: Source) -> Tensor:
        """Makes the steps from 0: returns the private average; see `LinearPlan`.

        Args:
            solved: records, with weights of at most 1 over a user, and the user of each, from 0.
            generator: of the noise.
        """
        records, users = solved
        loss = self.task.loss if self.task.clipped is None else self.task.clipped
        objective = LinearObjective(loss, records, reg=0.0)
        w = descend(
            lambda w: self._sum(objective, users, w, self.clip),
            records.zeros(self.task.parameters),
            self.noise_std,
            generator,
            steps=self.steps,
            lr=self.lr,
            radius=far_radius(self.task),
            momentum=self.momentum,
            direction=lambda noisy, w: noisy + self.reg * w,
        )

        def total(direction: Tensor, constant: float, point: Tensor) -> Tensor:
            pairs = _pairs(direction, constant, records)
            return self._sum(
                LinearObjective(Logistic(), pairs, reg=0.0), users, point, _LAST_CLIP
            )

        return self._scaled(w, 0.0, total, generator)

    def _sum(self, objective: LinearObjective, users: Tensor, w: Tensor, clip: float) -> Tensor:
        """Returns the sum over users of their clipped means: NOT private."""
        count = int(users.max()) + 1 if len(users) else 0
        means = w.new_zeros(count, len(w))
        for rows, block in objective.records.blocks():
            means.index_add_(
                0, users[rows], objective.slopes(block @ w, rows).unsqueeze(1) * block
            )
        norms = torch.linalg.vector_norm(means, dim=1)
        # PRIVACY: less by the roundings (test_the_clipped_mean_of_a_user_is_not_longer_than_the_clip)
        most = clip * (1 - gamma(len(w) + 8))
        return (means * torch.where(norms > most, most / norms, 1.0).unsqueeze(1)).sum(0)


def plan_users(
    task: LinearTask, steps: int = _USER_STEPS, clip: float | None = None
) -> UserGDPlan:
    """Returns the numbers of noisy gradient descent on users.

    Args:
        task: its public numbers; n is the number of users, and the budget is of unit "user", with delta > 0.
        steps: T.
        clip: C; default 0.01 to 0.3 of the bound on the gradient of a row: the least that reaches as far as the noise
            allows, above 0.1 only where noise is small; see docs/proofs/user_level.md#linear-models.

    Raises:
        ConditionError: the loss is not smooth and Lipschitz on R^d, tilted or adversarial, or delta is 0.

    Guarantee:
        The event of the plan, for all noisy sums, unit: all rows of one user. Ids are right.
    """
    lipschitz, _ = smooth_constants(task)
    draft = UserGDPlan(task=task, steps=steps, noise_std=1.0, momentum=0.0, clip=lipschitz)
    signal = signal_to_noise(task.level, task.n, task.parameters)
    guess = way_guess(task)
    if task.bound_y is not None:
        guess = min(guess, _SAFE * signal * task.bound_y / task.preparation.bound)
    reach = guess * signal
    if task.loss.target_kind != "real":
        reach /= 3  # clipped means bend little, so that nothing holds the noise back
    steepest = draft.lr * task.n * steps  # what a unit of clip reaches without momentum
    if clip is None:
        least, usual, most = _CLIPS
        most = max(usual, min(most, _QUIET * signal))
        clip = lipschitz * min(max(_FRICTION * reach / (steepest * lipschitz), least), most)
    friction = min(max(steepest * clip / reach, _LEAST_FRICTION), 1.0)
    draft = replace(draft, clip=clip, momentum=1.0 - friction)
    few = signal_to_noise(math.sqrt(_LAST_SHARE) * task.level, task.n, 2) < _LAST_SIGNAL
    share = 0.0 if few or not task.loss.log_odds else _LAST_SHARE
    return _spending(draft, draft.own_event().mu, share)


def users_of(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the user of each row, from 0, and the weights 1 / rows of its user: NOT private.

    Raises:
        ConditionError: more rows than roundings are bounded for.
    """
    if len(groups) > MOST_ROWS:
        raise ConditionError(f"users must have at most {MOST_ROWS} rows together")
    _, codes, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    # PRIVACY: all rows of a user weigh 1 together (test_a_user_counts_as_much_as_one_record)
    return codes, 1.0 / counts.double()[codes]
