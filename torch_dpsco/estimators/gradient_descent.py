"""Noisy gradient descent on all records: of which the last iterate alone is released, or every noisy sum.

    w <- w - eta (sum of gradients + reg w + N(0, sigma^2 I)),   T steps from a public start

The last iterate: a step contracts by c = max(|1 - eta mu|, |1 - eta beta|) on every data set, so that what a record did
in early steps fades: mu_GDP = (S/sigma) sqrt((1 - c^T)/(1 + c^T) (1 + c)/(1 - c)), S bounding how far a record moves
the sum. Every sum: mu_GDP = (S/sigma) sqrt(T), and what is made of the sums is free: momentum, no regularizer, an
average of the later half of the iterates. How far the steps reach then takes the place of a regularizer.

Differs from the paper in: it is not there. Bok, Su and Altschuler 2024.

Source: docs/proofs/output.md#noisy-gradient-descent

Gradient descent on clipped gradients, preconditioned by a noisy covariance: for many classes, for large noise.

    G = X'X + noise, once;      W <- W - eta (sum of clipped gradients + noise) (G + ridge I)^-1,   T steps from 0

The answer is the average of the last iterates; all of them may be shown. The first step is least squares on indicators.
The gradient of a record is (p - e_y) x', whose norm is |p - e_y| |x|: to clip it takes no more than its K scores.
`estimators.least_squares` has other numbers, for the squared loss.

Differs from the papers (Mehta et al. 2023; Ganesh et al. 2023) in: steps in place of one solution per release; a
covariance that is as noisy as it may be, since it makes steps few and no answer wrong; a step size from the noise.

Source: docs/proofs/heads.md#preconditioned-gradient-descent

Gradient descent preconditioned by a noisy covariance: its level, and a step size that knows the noise.

A plan releases X'X once and T sums of clipped gradients, each with Gaussian noise: with stds s_G and s, and a record
that moves them by at most D_G and D, all of them together are GDP of the level

    mu^2 = (D_G / s_G)^2 + T (D / s)^2.

Everything else is post-processing, the step size too. A sum of step sizes tau puts noise of std tau s0 / (v_j + ridge),
s0 = s / sqrt(T), on the weights along the eigenvector j of X'X, with the eigenvalue v_j: noise of the variance

    (tau s0)^2 S,      S = (1/n) sum_j v_j / (v_j + ridge)^2,

on the score of a row, on average. tau is chosen so that its std is 0.7, where scores of a softmax begin to decide at 1:
less learns too little, more drowns what was learned. No privacy rests on that.

Source: docs/proofs/heads.md#what-is-released, docs/proofs/heads.md#steps-that-know-their-noise.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco._margin import up
from torch_dpsco.accounting.analysis.gaussian import noisy_gd_mu
from torch_dpsco.accounting.analysis.objective import objpert_reg
from torch_dpsco.accounting.analysis.rounding import (
    DOUBLE,
    FloatArray,
    require_gaussian,
    safe,
    scaled_up,
)
from torch_dpsco.accounting.events import GDP, REPLACE_ONE
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.certificates import project, sum_terms
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.task import LinearPlan, LinearTask, build_objective, weight_guess
from torch_dpsco.noise import Source
from torch_dpsco.step.exact_noise import gaussian_vector
from torch_dpsco.step.pace import smooth_pace, steps_to

_MOST_STEPS, _STEPS = (
    500,
    200,
)  # of the last iterate; of all sums, with noise of one's own. A step reads all records
_OF_TARGETS = 2.0  # times the guess of the weights, where targets are real
_FAR = 1000.0  # times 1 / bound on rows: iterates are kept in that ball where there is no regularizer
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


@dataclass(frozen=True, kw_only=True)
class NoisyGDPlan(DescentPlan):
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
            check_momentum(self.momentum)

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
        task, most, (lipschitz, _) = (
            self.task,
            self.task.most_records,
            smooth_constants(self.task),
        )
        radius = self.radius
        moved = (2.0 if task.adjacency == REPLACE_ONE else 1.0) * lipschitz
        # PRIVACY: each sum is rounded, in both data sets (test_rounding_is_in_the_sensitivity_of_a_noisy_step)
        moved += 2 * task.gradient_rounding(
            self.reg, radius, lipschitz, dim=task.width, most=most
        )
        if self.momentum is not None:
            # PRIVACY: every sum is released (test_all_steps_of_a_run_with_momentum_are_charged)
            return GDP(noisy_gd_mu(self.steps, 1.0, moved, self.noise_std), (task.adjacency,))
        beta = self._smoothness
        # margin: of the quotient, the same at both ends of [reg, beta] (docs/proofs/rounding.md#model-of-arithmetic)
        contraction = min(1.0, up((beta - self.reg) / (beta + self.reg), 1e-15))
        # margin: w - eta g is rounded by a few ulp of numbers up to the radius, in units of g: over eta
        # (docs/proofs/rounding.md#gradients-and-gaps-of-objectives)
        moved += 2 * 8 * DOUBLE * radius / self.lr
        # PRIVACY: of the noise and steps of the release (test_an_edited_plan_is_refused_or_charges_what_it_draws)
        return GDP(noisy_gd_mu(self.steps, contraction, moved, self.noise_std), (task.adjacency,))

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
        objective = build_objective(self.task, self.reg, solved)
        return descend(
            lambda w: objective.value_and_gradient(w)[1],
            torch.zeros(objective.dim, dtype=torch.float64, device=objective.device),
            self.noise_std,
            generator,
            steps=self.steps,
            lr=self.lr,
            radius=self.radius,
            momentum=self.momentum or 0.0,
            averaged=1 if self.momentum is None else None,
        )


def check_momentum(momentum: float) -> None:
    """Raises ValueError unless it is in [0, 1)."""
    if not 0 <= check.finite(momentum=momentum) < 1:
        raise ValueError(f"momentum must be in [0, 1) (got {momentum})")


def way_guess(task: LinearTask) -> float:
    """Returns how far steps should be able to go: the guess of |w|, and more for regressions."""
    return weight_guess(task) * (_OF_TARGETS if task.loss.target_kind == "real" else 1.0)


def far_radius(task: LinearTask) -> float:
    """Returns the radius of the ball that iterates are projected on where there is no regularizer."""
    return min(task.radius, _FAR / task.preparation.bound)


def plan_noisy_gd(
    task: LinearTask, steps: int | None = None, secure: str | None = None, released: str = "last"
) -> NoisyGDPlan:
    """Returns the numbers of noisy gradient descent for a task.

    Args:
        task: its public numbers; delta > 0.
        steps: T; default 3 beta / reg, where the last iterate has converged, at most 500; for all sums as many as the
            way that the noise allows needs, 64 to 1024.
        secure: None; "exact" is refused, see docs/proofs/exact_gaussian.md.
        released: "last" for the last iterate, with a regularizer; "all" for all sums, with momentum, and without one
            unless it is given.

    Raises:
        ConditionError: the loss is not smooth and Lipschitz on R^d, tilted or adversarial, or delta is 0.

    Guarantee:
        The event of the plan, for the task's adjacency: for the last iterate alone, where n_max is a promise about the
        number of records on which the contraction rests, or for all noisy sums.
    """
    require_gaussian(
        secure,
        "NoisyGD hides all its noisy steps but the last; use OutputPerturbation,"
        " mechanism='output'",
    )
    _, smoothness = smooth_constants(task)
    if check.choice(("last", "all"), released=released) == "all":
        return _all_sums(task, steps)
    if task.reg is None:
        task = replace(task, reg=objpert_reg(task.target.epsilon, smoothness))
    draft = NoisyGDPlan(task=task, steps=1, noise_std=1.0)
    converged = min(math.ceil(3 * draft._smoothness / draft.reg), _MOST_STEPS)
    return _with_noise(replace(draft, steps=converged if steps is None else steps))


def _with_noise(draft: NoisyGDPlan) -> NoisyGDPlan:
    """Returns the plan with the noise that is given, or uses the level of its task up."""
    task = draft.task
    if task.noise_multiplier is not None:
        return replace(draft, noise_std=task.noise_multiplier * draft.largest)
    return replace(draft, noise_std=safe(draft.own_event().mu / task.level))


def _all_sums(task: LinearTask, steps: int | None) -> NoisyGDPlan:
    """Returns the plan whose steps reach as far as the noise allows, see docs/proofs/output.md#how-far-to-go."""
    lipschitz, smoothness = smooth_constants(task)
    draft = NoisyGDPlan(task=task, steps=1, noise_std=1.0, momentum=0.0)
    curvature = task.n * smoothness + draft.reg
    if task.noise_multiplier is None:
        once = draft.own_event().mu / task.level  # noise of one sum at the cost of all T of them
    else:
        steps = _STEPS if steps is None else steps
        once = task.noise_multiplier * lipschitz / math.sqrt(steps)
    horizon = way_guess(task) / (once * math.sqrt(task.parameters))
    steps = steps_to(horizon, curvature) if steps is None else steps
    momentum = smooth_pace(horizon, steps, curvature).momentum
    return _with_noise(replace(draft, steps=steps, momentum=momentum))


def smooth_constants(task: LinearTask) -> tuple[float, float]:
    """Returns bounds on gradient and curvature of a record's loss."""
    if task.pure:
        raise ConditionError(
            "noisy gradient descent is Gaussian: give delta > 0, or use output perturbation"
        )
    if task.tilt or task.attack_radius or task.smoothness is None or task.lipschitz is None:
        raise ConditionError(
            "noisy gradient descent needs a sum of smooth losses with bounded gradients (got"
            f" {task.loss!r}): give a residual_clip, or use output perturbation"
        )
    return task.lipschitz, task.smoothness


_SCORES = 100.0  # radius of the ball of iterates, in units of one score per parameter
_GUARD = 1e-9  # relative, of a limit on slopes: see `losses.clipped`
_Plan = TypeVar("_Plan", bound="PreconditionedGDPlan")


@dataclass(frozen=True, kw_only=True)
class PreconditionedGDPlan(DescentPlan):
    """Public numbers of one run, all of whose iterates are private.

    Args:
        clip: C > 0, on the norm of a record's gradient.
        gram_std: of the noise on X'X, in an orthonormal basis of the symmetric matrices.
    """

    clip: float
    gram_std: float

    mechanism = "preconditioned_gd"
    share: ClassVar[float] = 0.3  # of the iterates, the last ones, that are averaged

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive(clip=self.clip)
        check.positive(gram_std=self.gram_std)

    @staticmethod
    def require_covered(task: LinearTask) -> None:
        """Raises ConditionError for a task that the steps are not for."""
        name = "preconditioned gradient descent"
        if task.reg is not None:
            raise ConditionError(
                f"reg must be None for {name}, which is regularized by its length"
            )
        require_plain_sum(task, name)

    @property
    def largest(self) -> float:
        """C."""
        return self.clip

    @property
    def ridge(self) -> float:
        """What is added to the noisy X'X, beside reg."""
        return ridge_of(self.gram_std, self.task.width)

    @property
    def radius(self) -> float:
        """Radius of the ball that iterates are projected on, for which rounding is bounded."""
        task = self.task
        size = (
            _SCORES
            * math.sqrt(task.parameters)
            * max(1.0, task.bound_y or 1.0)
            / task.preparation.bound
        )
        return min(task.radius, size)

    @property
    def _moves(self) -> tuple[float, float]:
        """How far one record moves X'X, in the Frobenius norm, and a sum of clipped gradients."""
        task = self.task
        most = self.task.most_records
        sides = 1 + (self.task.adjacency == REPLACE_ONE)
        # PRIVACY: sums are rounded, in both data sets (test_rounding_is_in_the_sensitivity_of_a_preconditioned_step)
        gram = (
            math.sqrt(sides)
            * task.preparation.bound**2
            * (1 + 4 * most * (sum_terms(most) + 16) * DOUBLE)
        )
        size = task.width + 2 * task.num_scores + 32  # probabilities are rounded 2 K + 32 times
        largest = max(
            task.problem.lipschitz or 2 * self.clip, self.clip
        )  # slopes of twice the clip end at the clip
        rounding = task.gradient_rounding(0.0, self.radius, largest, dim=size, most=most)
        # PRIVACY: both rounded up (test_no_record_moves_a_preconditioned_step_by_more_than_the_clip); margin of the
        # sums (docs/proofs/rounding.md#gradients-and-gaps-of-objectives)
        return safe(gram), safe(sides * self.clip + 2 * rounding)

    def own_event(self) -> GDP:
        """Returns what X'X and all steps cost together."""
        gram, moved = self._moves
        # PRIVACY: of the noise that is drawn (test_an_edited_plan_is_refused_or_charges_what_it_draws)
        level = preconditioned_mu(gram, self.gram_std, moved, self.noise_std, self.steps)
        return GDP(level, (self.task.adjacency,))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        yield (
            "steps",
            (
                f"{self.steps} on all records, gradients clipped at {self.clip:.3g}, preconditioned"
                f" by X'X with noise of std {self.gram_std:.3g} and a ridge of {self.ridge:.3g};"
                f" answer: the mean of the last {self._averaged}"
            ),
        )

    @property
    def _averaged(self) -> int:
        return math.ceil(self.share * self.steps)

    def draw(self, solved: Records, generator: Source) -> Tensor:
        """Makes the steps from 0: returns the mean of the last iterates; see `LinearPlan`."""
        task = self.task
        size = (self.task.num_scores, self.task.width)
        (noisy_gram,) = solved.sum(lambda part: (part.gram(part.weights),))
        row, column = torch.tril_indices(task.width, task.width, device=solved.device)
        # PRIVACY: to every entry that is used (test_each_round_gets_its_noise_once)
        noise = gaussian_vector(len(row), self.gram_std, generator)
        # PRIVACY: squares off the diagonal count twice in the Frobenius norm; float32 would round 1/sqrt(2) down
        # (test_the_noise_of_the_matrix_is_not_rounded_down)
        noise[row != column] *= math.sqrt(0.5)
        noisy_gram[row, column] += noise
        values, vectors = torch.linalg.eigh(noisy_gram)  # of the lower triangle
        inverse = (vectors / (values.clamp(min=0) + self.ridge + self.reg)) @ vectors.T

        def direction(noisy: Tensor, w: Tensor) -> Tensor:
            gradient = (noisy + self.reg * w).view(size)
            if task.num_scores > 1:  # the noise of what adds up to 0 over classes
                gradient = gradient - gradient.mean(0)
            along: Tensor = gradient @ inverse
            return along.flatten()

        return descend(
            lambda w: self.gradient(solved, w.view(size)).flatten(),
            torch.zeros(task.parameters, dtype=torch.float64, device=solved.device),
            self.noise_std,
            generator,
            steps=self.steps,
            lr=self.step_size(values),
            radius=self.radius,
            averaged=self._averaged,
            direction=direction,
        )

    def gradient(self, records: Records, w: Tensor) -> Tensor:
        """Returns the sum of clipped gradients at w, both (K, width): NOT private."""
        # PRIVACY: rounded down, so that limit |x| is at most C
        # (test_no_record_moves_a_preconditioned_step_by_more_than_the_clip)
        loss = self.task.loss
        clip = self.clip * (1 - _GUARD)

        def terms(part: Records, scores: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            slopes = loss.derivative(
                scores if len(w) > 1 else scores.squeeze(1), part.targets[rows]
            )
            slopes = slopes.view(len(scores), -1)
            factors = (clip / part.norms[rows] / torch.linalg.vector_norm(slopes, dim=1)).clamp(
                max=1.0
            )
            return part.weights[rows], slopes * (part.weights[rows] * factors).unsqueeze(1)

        return records.sum(lambda part: part.fold(w, partial(terms, part)))[1]

    def step_size(self, eigenvalues: Tensor) -> float:
        """Returns eta, of the eigenvalues of the noisy X'X: post-processing."""
        noise = self.noise_std / math.sqrt(self.steps)
        values = eigenvalues.cpu().numpy()
        tau = horizon(values, self.ridge, self.gram_std, noise, self.task.n)
        return min(
            tau / self.steps, stable_step(_curvature(self.task), self.ridge, float(values[-1]))
        )


def plan_preconditioned_gd(task: LinearTask, secure: str | None = None) -> PreconditionedGDPlan:
    """Returns the numbers of preconditioned gradient descent for a task.

    Args:
        task: its public numbers; delta > 0, no reg. residual_clip is the clip over the bound of rows.
        secure: None; "exact" is refused.

    Raises:
        ConditionError: the loss is not smooth, tilted or adversarial, reg is given, or delta is 0.

    Guarantee:
        The event of the plan, for the task's adjacency, for X'X and all iterates. n_max is a promise about the number
        of records, on which the allowance for rounding rests.
    """
    require_gaussian(
        secure,
        "preconditioned gradient descent makes many releases; use mechanism='adassp' or 'output'",
    )
    PreconditionedGDPlan.require_covered(task)
    steps, share, clip = preconditioned_numbers(
        task.level, task.n, task.width, task.num_scores, _curvature(task), task.residual_clip
    )
    clip *= task.preparation.bound
    return calibrated(
        PreconditionedGDPlan(task=task, steps=steps, clip=clip, noise_std=1.0, gram_std=1.0),
        share,
    )


def calibrated(draft: _Plan, share: float) -> _Plan:
    """Returns a plan with the noise that uses the level of its task up: this share of mu^2 is for X'X."""
    level, (gram, moved) = draft.task.level, draft._moves
    gram_std = gram / (level * math.sqrt(share))
    noise_std = moved * math.sqrt(draft.steps / (1 - share)) / level
    # PRIVACY: rounded up, so that the level comes out below mu (test_the_rounds_have_the_level_of_the_budget)
    spent = replace(draft, gram_std=gram_std, noise_std=noise_std).own_event().mu
    more = safe(spent / level)  # 1 but for rounding
    return replace(draft, gram_std=gram_std * more, noise_std=noise_std * more)


def require_plain_sum(task: LinearTask, name: str) -> None:
    """Raises ConditionError unless a task is a plain sum of smooth losses, at delta > 0."""
    if task.pure:
        raise ConditionError(f"{name} is Gaussian: give delta > 0, or use output perturbation")
    if task.tilt or task.attack_radius or task.problem.smoothness is None:
        raise ConditionError(
            f"{name} needs a plain sum of smooth losses (got {task.loss!r}): use output"
            " perturbation"
        )


def _curvature(task: LinearTask) -> float:
    """Returns the second derivative of the loss in a score, at 0: its mean over classes of a softmax."""
    if task.num_scores > 1:
        return 1 / task.num_scores
    return (task.problem.smoothness or 0.0) / task.preparation.bound**2


_SCORE_NOISE = 0.7  # std of the noise on a score that decides how long to go on
_DAMPING = 2.0  # ridge, over the norm of the noise on X'X
_SHARES = (0.02, 0.2)  # of mu^2, for X'X
_FEW_AND_MANY = (32, 128)
_CLIPS = (0.5, 1.0)  # over the bound on rows
_LOUD = 250.0  # signal over noise from which no clip helps
_REACH = 2.0  # bound on rows over what is left of them beside the few large eigenvalues


class PreconditionedNumbers(NamedTuple):
    """Number of steps, share of mu^2 for X'X, and the clip over the bound on rows."""

    steps: int
    share: float
    clip: float


def preconditioned_numbers(
    mu: float, n: int, dim: int, num_scores: int, curvature: float, clip: float | None = None
) -> PreconditionedNumbers:
    """Returns the numbers of a run, by public numbers alone.

    The longest horizon is tau = _REACH ridge / (B s0), in T steps of at most 1 / curvature: T is the least number, from
    32 to 128, for which a fifth of mu^2 makes the ridge small enough, and the share is what that many steps need.

    Args:
        mu: > 0, to be spent.
        n: public number of records.
        dim: d >= 1, of prepared rows.
        num_scores: K.
        curvature: of the loss in a score at 0, > 0; its mean over classes.
        clip: over the bound on rows; None to choose it, from 1/2 where noise is loud to 1.

    Source: docs/proofs/heads.md#steps-that-know-their-noise

    Example:
        >>> preconditioned_numbers(mu=0.21, n=20_000, dim=129, num_scores=20, curvature=0.05).steps
        32
    """
    signal = check.positive(mu=mu) * check.positive_count(n=n) / math.sqrt(num_scores * dim)
    if clip is None:
        clip = min(max(signal / _LOUD, _CLIPS[0]), _CLIPS[1])
    needed = _DAMPING * _REACH * math.sqrt(2 * check.positive_count(dim=dim)) * curvature / clip
    least, most = _SHARES
    steps = min(
        max(math.ceil(needed * math.sqrt((1 - most) / most)), _FEW_AND_MANY[0]), _FEW_AND_MANY[1]
    )
    odds = (needed / steps) ** 2
    return PreconditionedNumbers(steps, min(max(odds / (1 + odds), least), most), clip)


def ridge_of(gram_std: float, dim: int) -> float:
    """Returns the ridge, twice the bound sqrt(2 d) s_G on the mean norm of the noise on X'X.

    Example:
        >>> ridge_of(1.0, 50)
        20.0
    """
    return (
        _DAMPING
        * check.positive(gram_std=gram_std)
        * math.sqrt(2 * check.positive_count(dim=dim))
    )


def stable_step(curvature: float, ridge: float, largest: float) -> float:
    """Returns the step size that ends in one step along the largest eigenvalue of X'X, where the curvature is this.

    Example:
        >>> stable_step(0.25, ridge=1.0, largest=1.0)
        8.0
    """
    return 1 / check.positive(curvature=curvature) * (1 + ridge / max(largest, ridge * 1e-6))


def preconditioned_mu(
    gram_moved: float, gram_std: float, gradient_moved: float, gradient_std: float, steps: int
) -> float:
    """Returns mu of X'X and all sums together, rounded up.

    Args:
        gram_moved: D_G > 0, in the Frobenius norm.
        gram_std: s_G > 0, in an orthonormal basis of the symmetric matrices.
        gradient_moved: D > 0.
        gradient_std: s > 0, of each coordinate of each sum.
        steps: T >= 1.

    Guarantee: mu-GDP of all releases together, each of which may depend on those before.

    Source: docs/proofs/heads.md#what-is-released

    Example:
        >>> round(preconditioned_mu(1.0, 2.0, 1.0, 4.0, steps=12), 9)
        1.0
    """
    covariance = check.positive(gram_moved=gram_moved) / check.positive(gram_std=gram_std)
    sums = check.positive(gradient_moved=gradient_moved) / check.positive(
        gradient_std=gradient_std
    )
    # PRIVACY: every step counts (test_the_level_of_a_run_is_that_of_all_its_releases); margin of the root
    # (docs/proofs/rounding.md#model-of-arithmetic)
    return scaled_up(
        math.hypot(covariance, math.sqrt(check.positive_count(steps=steps)) * sums), 8
    )


def horizon(
    eigenvalues: FloatArray, ridge: float, gram_std: float, noise: float, n: int
) -> float:
    """Returns tau, the sum of the step sizes at which the noise on a score has the std 0.7.

    Args:
        eigenvalues: of the noisy X'X, (d,). Those within its noise are replaced by their mean.
        ridge: > 0.
        gram_std: of the noise on X'X.
        noise: s0 > 0.
        n: public number of records.

    Source: docs/proofs/heads.md#steps-that-know-their-noise

    Example:
        >>> round(horizon(np.array([100.0, 100.0]), ridge=100.0, gram_std=1.0, noise=2.0, n=50), 6)
        35.0
    """
    values = np.asarray(eigenvalues, dtype=np.float64)
    edge = gram_std * math.sqrt(2 * len(eigenvalues))
    hidden = values < edge
    if hidden.any():
        # the mean of what noise hides has noise of std gram_std / sqrt(number of them)
        values = np.where(
            hidden, max(values[hidden].mean(), gram_std / math.sqrt(hidden.sum())), values
        )
    return _SCORE_NOISE * math.sqrt(n / float((values / (values + ridge) ** 2).sum())) / noise


def boosted_clip(signal: float) -> float:
    """Returns where to clip residuals, in spreads of the targets: the mean of a skewed target needs a wide clip.

    Args:
        signal: n mu / sqrt(d), see `estimators.preparation.signal_to_noise`.

    Source: docs/proofs/boosting.md#how-wide-and-how-long

    Example:
        >>> boosted_clip(50.0), boosted_clip(400.0), boosted_clip(10_000.0)
        (1.0, 2.0, 10.0)
    """
    return max(1.0, math.sqrt(check.positive(signal=signal)) / 10)
