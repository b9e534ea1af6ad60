"""Least squares from noisy sufficient statistics, with a ridge that is large enough for their noise (AdaSSP).

    lambda_min(X'X), X'X and X'y, each with Gaussian noise;   theta = (X'X + ridge I)^-1 X'y of the noisy ones

For K classes the targets are the K indicators less 1/K, all solved with one X'X; the scores are K times the solution,
which is a step of Newton's method from 0 on the softmax cross-entropy: so are the probabilities that they make.

Differs from the paper (Wang 2018) in: one Gaussian budget is shared out, with noise in an orthonormal basis of the
symmetric matrices; the published proof for each part alone fails for small delta.

Source: docs/proofs/output.md#least-squares-from-noisy-statistics

Least squares by rounds on residuals: X'X with noise once, then noisy sums of clipped gradients (boosted AdaSSP).

    w <- w + (X'X + N + ridge I)^-1 (sum of clip(x (y - <w, x>), C) + N(0, s^2 I)),   T rounds from 0

Steps of `gradient_descent` of length 1; the answer is the average of the later half. Residuals shrink, so that C may
be far below the bound on targets, to which the noise of AdaSSP is proportional; and what a large ridge hides in one
round, further rounds bring back.

Differs from the paper (Tang et al. 2023) in: X'X is released once; rounds are clipped, not targets; each round takes
the last answer in whole, with an average of the answers; all levels are added up exactly.

Source: docs/proofs/boosting.md

Least squares by noisy sufficient statistics, with a ridge that adapts to the smallest eigenvalue (AdaSSP).

Rows with |x| <= B and targets with |y| <= Y give three releases, of lambda_min(X'X), X'X and X'y. Adding or removing a
record changes them by at most B^2, B^2 (in the Frobenius norm) and B Y; replacing one by B^2, sqrt(2) B^2 and 2 B Y.
Noise on X'X that is isotropic in an orthonormal basis of the symmetric matrices has the std s on the diagonal and
s / sqrt(2) off it. The three levels mu = sensitivity / std add in squares; everything else is post-processing.

Differs from the paper in: the budget is that of the joint release, with any split (`weights`), which is less noise; its
steps are not (epsilon/3, delta/3)-DP each, but together they are usually (epsilon, delta)-DP (tests/reference/papers).

Source: docs/proofs/output.md#least-squares-from-noisy-statistics; Wang 2018, Revisiting differentially private linear
regression.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import (
    gaussian_mu,
    sensitivity_factor,
)
from torch_dpsco.accounting.analysis.rounding import (
    DOUBLE,
    FloatArray,
    safe,
    scaled_up,
    up,
)
from torch_dpsco.accounting.events import GDP, REPLACE_ONE
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.gradient_descent import DescentPlan, descend
from torch_dpsco.estimators.objectives import (
    NEAR_ROWS,
    ROUNDINGS,
    NearSums,
    loss_sums,
    row_losses,
)
from torch_dpsco.estimators.preparation import level_left, signal_to_noise
from torch_dpsco.estimators.records import Records, project, sum_terms
from torch_dpsco.estimators.task import LinearPlan, LinearTask, build_objective
from torch_dpsco.noise import Source, gaussian_vector
from torch_dpsco.problem import round_up
from torch_dpsco.step.exact_noise import symmetric_noise

_SCORES = 100.0  # radius of the ball of iterates, in units of one score per parameter


_GUARD = 1e-9  # relative, of a limit on slopes: see `losses.table`


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
    roundings: ClassVar[float] = 1.0  # of a sum, over those of one that reads all records

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
    def momentum(self) -> float:
        """In [0, 1)."""
        return 0.0

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
        rounding = self.roundings * task.gradient_rounding(
            0.0, self.radius, largest, dim=size, most=most
        )
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
        pushed = f", with momentum {self.momentum:.3g}" if self.momentum else ""
        yield (
            "steps",
            (
                f"{self.steps} on all records, gradients clipped at {self.clip:.3g}, preconditioned"
                f" by X'X with noise of std {self.gram_std:.3g} and a ridge of {self.ridge:.3g};"
                f" answer: the mean of the last {self._averaged}{pushed}"
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
        total = self.sums(solved, noisy_gram)
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

        solved.keep()
        return descend(
            total,
            solved.zeros(task.parameters),
            self.noise_std,
            generator,
            steps=self.steps,
            lr=self.step_size(values),
            radius=self.radius,
            momentum=self.momentum,
            averaged=self._averaged,
            direction=direction,
        )

    def sums(self, records: Records, gram: Tensor) -> Callable[[Tensor], Tensor]:
        """Returns the sum of clipped gradients as a function of w: NOT private; X'X is for those that need it."""
        return partial(self.gradient, records)

    def gradient(self, records: Records, w: Tensor) -> Tensor:
        """Returns the sum of clipped gradients at w: NOT private."""
        # PRIVACY: rounded down, so that limit |x| is at most C
        # (test_no_record_moves_a_preconditioned_step_by_more_than_the_clip)
        clip = self.clip * (1 - _GUARD)
        return records.sum(partial(loss_sums, self.task.loss, w, clip=clip))[1]

    def step_size(self, eigenvalues: Tensor) -> float:
        """Returns eta, of the eigenvalues of the noisy X'X: post-processing."""
        noise = self.noise_std / math.sqrt(self.steps)
        values = eigenvalues.cpu().numpy()
        tau = horizon(values, self.ridge, self.gram_std, noise, self.task.n)
        return min(
            tau / self.steps, stable_step(_curvature(self.task), self.ridge, float(values[-1]))
        )


def plan_preconditioned_gd(task: LinearTask) -> PreconditionedGDPlan:
    """Returns the numbers of preconditioned gradient descent for a task.

    Args:
        task: its public numbers; delta > 0, no reg. residual_clip is the clip over the bound of rows. Losses of real
            targets with bounded slopes get a `RobustPlan`.

    Raises:
        ConditionError: the loss is not smooth, tilted or adversarial, reg is given, or delta is 0.

    Guarantee:
        The event of the plan, for the task's adjacency, for X'X and all iterates. n_max is a promise about the number
        of records, on which the allowance for rounding rests.
    """
    PreconditionedGDPlan.require_covered(task)
    if task.loss.target_kind == "real" and task.clipped is None and task.lipschitz is not None:
        draft = RobustPlan(
            task=task, steps=_ROBUST_STEPS, clip=task.lipschitz, noise_std=1.0, gram_std=1.0
        )
        return calibrated(draft, _ROBUST_SHARE)
    steps, share, clip = preconditioned_numbers(
        task.level,
        task.n,
        task.width,
        task.num_scores,
        _curvature(task),
        task.residual_clip,
    )
    clip *= task.preparation.bound
    return calibrated(
        PreconditionedGDPlan(task=task, steps=steps, clip=clip, noise_std=1.0, gram_std=1.0),
        share,
    )


def calibrated(draft: _Plan, share: float) -> _Plan:
    """Returns a plan with the noise that uses the level of its task up: this share of mu^2 is for X'X."""
    level = draft.task.level
    gram, moved = draft._moves
    gram_std = gram / (level * math.sqrt(share))
    noise_std = moved * math.sqrt(draft.steps / (1 - share)) / level
    # PRIVACY: rounded up, so that the level comes out below mu (test_the_rounds_have_the_level_of_the_budget)
    spent = replace(draft, gram_std=gram_std, noise_std=noise_std).own_event().mu
    more = safe(spent / level)  # 1 but for rounding
    return replace(draft, gram_std=gram_std * more, noise_std=noise_std * more)


def require_plain_sum(task: LinearTask, name: str) -> None:
    """Raises ConditionError unless a task is a plain sum of smooth losses, at delta > 0."""
    task.require_gaussian(name)
    if task.tilt or task.attack_radius or task.problem.smoothness is None:
        raise ConditionError(
            f"{name} needs a plain sum of smooth losses (got {task.loss!r}): use output"
            " perturbation"
        )


def _curvature(task: LinearTask) -> float:
    """Returns the second derivative of the loss in a score, at 0: its mean over classes of a softmax."""
    if task.num_scores > 1:
        return 1 / task.num_scores
    return (
        1.0
        if task.loss.squared
        else (task.problem.smoothness or 0.0) / task.preparation.bound**2
    )


_SCORE_NOISE = 0.7  # std of the noise on a score that decides how long to go on


_DAMPING = 2.0  # ridge, over the norm of the noise on X'X


_SHARES = (0.02, 0.2)  # of mu^2, for X'X


_FEW_AND_MANY = (32, 128)


_CLIPS = (0.5, 1.0)  # over the bound on rows


_LOUD = 250.0  # signal over noise from which no clip helps


_REACH = 2.0  # bound on rows over what is left of them beside the few large eigenvalues


def preconditioned_numbers(
    mu: float, n: int, dim: int, num_scores: int, curvature: float, clip: float | None = None
) -> tuple[int, float, float]:
    """Returns the number of steps, the share of mu^2 for X'X, and the clip over the bound on rows.

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
        >>> preconditioned_numbers(mu=0.21, n=20_000, dim=129, num_scores=20, curvature=0.05)[0]
        32
    """
    signal = mu * n / math.sqrt(num_scores * dim)
    if clip is None:
        clip = min(max(signal / _LOUD, _CLIPS[0]), _CLIPS[1])
    needed = _DAMPING * _REACH * math.sqrt(2 * dim) * curvature / clip
    least, most = _SHARES
    steps = min(
        max(math.ceil(needed * math.sqrt((1 - most) / most)), _FEW_AND_MANY[0]), _FEW_AND_MANY[1]
    )
    odds = (needed / steps) ** 2
    return steps, min(max(odds / (1 + odds), least), most), clip


def ridge_of(gram_std: float, dim: int) -> float:
    """Returns the ridge, twice the bound sqrt(2 d) s_G on the mean norm of the noise on X'X.

    Example:
        >>> ridge_of(1.0, 50)
        20.0
    """
    return _DAMPING * gram_std * math.sqrt(2 * dim)


def stable_step(curvature: float, ridge: float, largest: float) -> float:
    """Returns the step size that ends in one step along the largest eigenvalue of X'X, where the curvature is this.

    Example:
        >>> stable_step(0.25, ridge=1.0, largest=1.0)
        8.0
    """
    return 1 / curvature * (1 + ridge / max(largest, ridge * 1e-6))


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
    covariance = gram_moved / gram_std
    sums = gradient_moved / gradient_std
    # PRIVACY: every step counts (test_the_level_of_a_run_is_that_of_all_its_releases); margin of the root
    # (docs/proofs/rounding.md#model-of-arithmetic)
    return scaled_up(math.hypot(covariance, math.sqrt(steps) * sums), 8)


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
    return max(1.0, math.sqrt(signal) / 10)


@dataclass(frozen=True, kw_only=True)
class AdaSSPPlan(LinearPlan):
    """Public numbers of one release; reg (0 by default) is added to the adaptive ridge.

    Args:
        constants: noise and ridge.
    """

    constants: AdaSSPConstants

    mechanism = "adassp"

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "constants", AdaSSPConstants(*self.constants)
        )  # a list, where it was saved
        super().__post_init__()
        _require_covered(self.task)

    @property
    def reg(self) -> float:
        """Added to the adaptive ridge."""
        return self.task.reg or 0.0

    @property
    def mu(self) -> float:
        """Level of the three releases together, rounding included."""
        # PRIVACY: of the noise that is drawn (test_an_edited_plan_is_refused_or_charges_what_it_draws)
        level = adassp_mu(self.constants, *_bounds(self.task), adjacency=self.task.adjacency)
        return level * _rounding(self.task)

    @property
    def total_scale(self) -> float:
        """Std of the noise on the sum of squared targets, which intervals need; 0 for no release.

        Source: docs/proofs/inference.md#least-squares
        """
        _, bound_y, _ = _bounds(self.task)
        # PRIVACY: a record adds up to bound_y^2 (test_no_record_moves_the_sum_of_squares_by_more,
        # test_the_sum_of_squares_is_charged_with_the_statistics); margin of the quotient
        # (docs/proofs/rounding.md#model-of-arithmetic)
        moved = bound_y**2 * _rounding(self.task)
        return up(moved / self.task.curvature, 1e-15) if self.task.curvature else 0.0

    @property
    def hessian_scale(self) -> float:
        """As in `LinearPlan`: of X'X."""
        return self.constants.std_xtx_diag if self.task.curvature else 0.0

    def own_event(self) -> GDP:
        """Returns what the release alone costs."""
        level = self.mu
        if self.task.curvature:
            # PRIVACY: of all four (test_the_sum_of_squares_is_charged_with_the_statistics); margin of the
            # root (docs/proofs/rounding.md#model-of-arithmetic)
            level = up(math.hypot(level, self.task.curvature), 2.0**-50)
        return GDP(level, (self.task.adjacency,))

    @property
    def noise_and_signal(self) -> tuple[float, float, str]:
        """As in `LinearPlan`."""
        bound_x, bound_y, _ = _bounds(self.task)
        return self.constants.std_xty, self.task.n * bound_x * bound_y, "X'y"

    def statistics(self, records: Records) -> tuple[float, Tensor, Tensor]:
        """Returns the least eigenvalue of X'X, X'X and X'y, flattened: NOT private."""
        (gram,) = records.sum(lambda part: (part.gram(part.weights),))
        zero = records.zeros(self.task.parameters)
        # the gradient at 0 is -X'y, of y or of the indicators less 1/K
        moment = -build_objective(self.task, 0.0, records).value_and_gradient(zero)[1]
        return float(torch.linalg.eigvalsh(gram)[0]), gram, moment

    def draw(self, solved: Records, generator: Source) -> Tensor:
        """Adds noise to the three statistics, solves: returns the private vector; see `LinearPlan`.

        Where intervals are paid for, noisy X'X, X'y and the sum of squared targets follow.
        """
        least, gram, moment = self.statistics(solved)
        given = self.constants
        dim = solved.dim
        least += float(gaussian_vector(1, given.std_lmin, generator))
        noisy = gram + symmetric_noise(dim, given.std_xtx_diag, given.std_xtx_offdiag, generator)
        moment = moment + gaussian_vector(len(moment), given.std_xty, generator)
        ridge = max(0.0, given.lam_cap - max(0.0, least - given.lmin_shift)) + self.reg
        values, vectors = torch.linalg.eigh(noisy)
        # post-processing: an improbable matrix that is not positive definite
        values = (values + ridge).clamp(min=max(given.lam_cap, self.reg) / 10)
        scores = moment.view(-1, dim)
        if len(scores) > 1:
            scores = len(scores) * (
                scores - scores.mean(0)
            )  # the noise of what adds up to 0 over classes
        answer = project((((scores @ vectors) / values) @ vectors.T).flatten(), self.task.radius)
        if not self.task.curvature:
            return answer
        (total,) = solved.sum(lambda part: (part.total(part.weights * part.targets.square()),))
        noise = gaussian_vector(1, self.total_scale, generator)
        return torch.cat([answer, noisy.flatten(), moment, total + noise])


def plan_adassp(task: LinearTask) -> AdaSSPPlan:
    """Returns the numbers of AdaSSP for a task with the squared loss, or the softmax cross-entropy.

    Args:
        task: its public numbers; delta > 0. reg is added to the ridge; None adds nothing.

    Raises:
        ConditionError: another loss, or delta = 0.

    Guarantee:
        The event of the plan, for the task's adjacency, for everything computed from the three statistics.
    """
    _require_covered(task)
    epsilon = task.target.epsilon
    delta = task.target.delta
    constants = adassp_constants(
        epsilon, delta, *_bounds(task), adjacency=task.adjacency, spent=task.measured
    )
    constants = AdaSSPConstants(*(value * _rounding(task) for value in constants))
    return AdaSSPPlan(task=task, constants=constants)


def _require_covered(task: LinearTask) -> None:
    known = task.loss.squared or task.num_scores > 1
    if not known or task.residual_clip is not None or task.tilt or task.attack_radius:
        raise ConditionError(
            f"AdaSSP needs the squared loss, or softmax, as it is (got {task.loss!r})"
        )
    task.require_gaussian("AdaSSP")


def _bounds(task: LinearTask) -> tuple[float, float, int]:
    """Returns the bounds on rows and targets, and the width of rows."""
    # PRIVACY: |e_y - 1/K|^2 = 1 - 1/K (test_no_record_moves_the_three_statistics_by_more_than_the_level)
    bound_y = (
        round_up(math.sqrt(1 - 1 / task.num_scores)) if task.bound_y is None else task.bound_y
    )
    return task.preparation.bound, bound_y, task.width


def _rounding(task: LinearTask) -> float:
    """Returns the factor by which records move what is released further than the statistics in real numbers."""
    most = task.most_records
    # PRIVACY: sums and eigenvalues are rounded, in both data sets (test_rounding_is_in_the_noise_of_the_statistics)
    return 1.0 + 4 * most * (sum_terms(most) + 64 * task.width + 80) * DOUBLE


_ROUNDS = 40
_SHARE = 0.2  # of mu^2, for X'X
_FAR_CLIP = (
    1000.0  # times the clip on residuals over the bound on rows: iterates are kept in that ball
)
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
    # PRIVACY: sums near a point that was read are rounded more (test_the_rounding_of_sums_near_a_point_is_declared)
    roundings = ROUNDINGS

    @staticmethod
    def require_covered(task: LinearTask) -> None:
        """Raises ConditionError for another loss, and for delta = 0."""
        if not task.loss.squared or task.residual_clip is not None:
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
        return min(self.task.radius, _FAR_CLIP * self._reach)

    def step_size(self, eigenvalues: Tensor) -> float:
        """The whole step, where all records are in the curved part: each round takes the last answer in whole."""
        return 1.0 / _curvature(self.task)

    @property
    def _reach(self) -> float:
        """How far a point moves a gradient by the clip, at most."""
        return self.clip / self.task.preparation.bound**2 / _curvature(self.task)

    def sums(self, records: Records, gram: Tensor) -> Callable[[Tensor], Tensor]:
        """As for other plans, from sums at points nearby where that is faster."""
        losses = row_losses(self.task.loss, records, self.clip * (1 - _GUARD))
        if losses is None or losses.kind != "bent" or records.count < NEAR_ROWS:
            return super().sums(records, gram)
        return NearSums(records, losses, self._reach, gram.clone())


_ROBUST_STEPS = 96
_ROBUST_SHARE = 0.1  # of mu^2, for X'X
_FRICTION = 0.15
_FAINT = 60.0  # n mu / sqrt(d), below which steps are shorter, as noise would hide what can be learned


@dataclass(frozen=True, kw_only=True)
class RobustPlan(BoostedPlan):
    """Public numbers of steps with momentum for losses of real targets with bounded slopes, whose bound is the clip.

    Few records are in the curved part of such a loss, so that its curvature is a small share of X'X: rounds without
    momentum would be slow.
    """

    mechanism = "preconditioned_gd"

    @staticmethod
    def require_covered(task: LinearTask) -> None:
        """Raises ConditionError for a task that the steps are not for."""
        PreconditionedGDPlan.require_covered(task)

    @property
    def momentum(self) -> float:
        """More for a quantile other than the median, whose loss has a narrower curved part."""
        quantile = getattr(self.task.loss, "quantile", 0.5)
        return 1.0 - _FRICTION * math.sqrt(2 * min(quantile, 1 - quantile))

    def step_size(self, eigenvalues: Tensor) -> float:
        """The whole step, or a share of it where noise is loud."""
        whole = super().step_size(eigenvalues)
        task = self.task
        if task.noise_multiplier is not None:
            return whole
        return whole * min(1.0, signal_to_noise(task.level, task.n, task.parameters) / _FAINT)


def plan_boosted(task: LinearTask, rounds: int = _ROUNDS) -> BoostedPlan:
    """Returns the numbers of boosted AdaSSP for a task with the squared loss.

    Args:
        task: its public numbers; delta > 0. reg is a ridge of the answer; None for none.
        rounds: T; each reads all records once.

    Raises:
        ConditionError: another loss, or delta = 0.

    Guarantee:
        The event of the plan, for the task's adjacency, for everything computed from the noisy X'X and all noisy sums.
    """
    BoostedPlan.require_covered(task)
    prepare = task.prepare
    width = boosted_clip(signal_to_noise(task.level, task.n, task.parameters))
    if prepare is None or prepare.quantile is None or not prepare.spreads:
        width = min(width, _WIDEST) * _GUESS * (task.bound_y or 1.0)
    clip = width * task.preparation.bound
    return calibrated(
        BoostedPlan(task=task, steps=rounds, clip=clip, noise_std=1.0, gram_std=1.0), _SHARE
    )


class AdaSSPConstants(NamedTuple):
    """Noise stds of the three releases, the cap on the ridge and the shift of the noisy eigenvalue.

    The ridge is max(0, lam_cap - max(0, noisy lambda_min - lmin_shift)).
    """

    std_lmin: float
    std_xtx_diag: float
    std_xtx_offdiag: float
    std_xty: float
    lam_cap: float
    lmin_shift: float


def adassp_constants(
    epsilon: float,
    delta: float,
    bound_x: float,
    bound_y: float,
    dim: int,
    failure: float = 0.05,
    weights: Sequence[float] = (0.05, 0.475, 0.475),
    adjacency: str = "add_remove",
    spent: float = 0.0,
) -> AdaSSPConstants:
    """Returns the noise that uses (epsilon, delta) up, and the ridge that is large enough but for the failure.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).
        bound_x: B > 0.
        bound_y: Y > 0.
        dim: d >= 1.
        failure: p in (0, 1), of the bounds sqrt(2 log(2/p)) on a normal and sqrt(2 d) + sqrt(2 log(2/p)) on the
            operator norm of the noise matrix: for utility only.
        weights: shares of mu^2 for lambda_min, X'X and X'y: positive.
        adjacency: "add_remove", "zero_out" or "replace_one".
        spent: level of Gaussian releases that the budget pays for too.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: (epsilon, delta)-DP of the joint release, and of all that is computed from it, under the adjacency.

    Source: docs/proofs/output.md#least-squares-from-noisy-statistics

    Example:
        >>> round(adassp_constants(1.0, 1e-6, bound_x=1.0, bound_y=1.0, dim=10).std_xty, 6)
        6.129808
    """
    whole = math.fsum(weights) * (1 + 1e-15)
    share_lmin, share_xtx, share_xty = (share / whole for share in weights)
    replaced = sensitivity_factor(adjacency) == 2
    mu = level_left(gaussian_mu(epsilon, delta), spent)
    square = bound_x**2
    product = bound_x * bound_y
    failure = check.open_interval(0.0, 1.0, failure=failure)
    tail = math.sqrt(2 * (math.log(2) - math.log(failure)))
    # PRIVACY: mu^2 is shared out, so that the squares add up to it (test_the_three_levels_add_up_to_the_budget); margin
    # of quotients (docs/proofs/rounding.md#model-of-arithmetic)
    lmin = scaled_up(square / (mu * math.sqrt(share_lmin)), 12)
    xtx = scaled_up(
        (math.sqrt(2) if replaced else 1.0) * square / (mu * math.sqrt(share_xtx)), 12
    )
    xty = scaled_up((2.0 if replaced else 1.0) * product / (mu * math.sqrt(share_xty)), 12)
    off_diagonal = scaled_up(xtx / math.sqrt(2), 2)
    return AdaSSPConstants(
        lmin, xtx, off_diagonal, xty, xtx * (math.sqrt(2 * dim) + tail), lmin * tail
    )


def adassp_mu(
    constants: AdaSSPConstants,
    bound_x: float,
    bound_y: float,
    dim: int,
    adjacency: str = "add_remove",
) -> float:
    """Returns mu of the joint release with this noise, rounded up.

    Args:
        constants: whose stds are > 0.
        bound_x: B > 0.
        bound_y: Y > 0.
        dim: d >= 1.
        adjacency: "add_remove", "zero_out" or "replace_one".

    Guarantee: mu-GDP of the three releases together, under the adjacency.

    Source: docs/proofs/output.md#least-squares-from-noisy-statistics

    Example:
        >>> noise = adassp_constants(1.0, 1e-6, bound_x=1.0, bound_y=1.0, dim=10)
        >>> gaussian_mu(1.0, 1e-6) * (1 - 1e-12) < adassp_mu(noise, 1.0, 1.0, 10) <= gaussian_mu(1.0, 1e-6)
        True
    """
    lmin, diagonal, off_diagonal, xty = (check.positive(std=std) for std in constants[:4])
    square = bound_x**2
    product = bound_x * bound_y
    replaced = sensitivity_factor(adjacency) == 2
    # squares off the diagonal count twice in the Frobenius norm, and their noise once
    xtx = min(diagonal, math.sqrt(2) * off_diagonal) if dim > 1 else diagonal
    moved = (
        (1.0, square, lmin),
        (math.sqrt(2) if replaced else 1.0, square, xtx),
        (1.0 + replaced, product, xty),
    )
    return scaled_up(math.hypot(*(factor * size / std for factor, size, std in moved)), 6)
