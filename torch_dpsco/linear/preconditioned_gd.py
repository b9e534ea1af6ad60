"""Gradient descent on clipped gradients, preconditioned by a noisy covariance: for many classes, for large noise.

    G = X'X + noise, once;      W <- W - eta (sum of clipped gradients + noise) (G + ridge I)^-1,   T steps from 0

The answer is the average of the last iterates; all of them may be shown. The first step is least squares on indicators.
The gradient of a record is (p - e_y) x', whose norm is |p - e_y| |x|: to clip it takes no more than its K scores.
`linear.boosted` has other numbers, for the squared loss.

Differs from the papers (Mehta et al. 2023; Ganesh et al. 2023) in: steps in place of one solution per release; a
covariance that is as noisy as it may be, since it makes steps few and no answer wrong; a step size from the noise.

Source: docs/proofs/heads.md#preconditioned-gradient-descent
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rounding import DOUBLE, require_gaussian, safe
from torch_dpsco.accounting.events import GDP, REPLACE_ONE
from torch_dpsco.errors import ConditionError
from torch_dpsco.linear.noisy_gd import run_momentum
from torch_dpsco.linear.objectives.base import Records
from torch_dpsco.linear.task import LinearPlan, LinearTask
from torch_dpsco.mechanisms.vector_noise import gaussian_vector
from torch_dpsco.rng import Source
from torch_dpsco.theory.linear.preconditioned import (
    horizon,
    preconditioned_mu,
    preconditioned_numbers,
    ridge_of,
    stable_step,
)
from torch_dpsco.theory.linear.solvers import sum_terms

_ROOM = 100.0  # radius of the ball of iterates, in units of one score per parameter
_GUARD = 1e-9  # relative, of a limit on slopes: see `losses.clipped`
_Plan = TypeVar("_Plan", bound="PreconditionedGDPlan")


@dataclass(frozen=True, kw_only=True)
class PreconditionedGDPlan(LinearPlan):
    """Public numbers of one run, all of whose iterates are private.

    Args:
        steps: T.
        clip: C > 0, on the norm of a record's gradient.
        noise_std: of the noise on each sum of gradients.
        gram_std: of the noise on X'X, in an orthonormal basis of the symmetric matrices.
    """

    steps: int
    clip: float
    noise_std: float
    gram_std: float

    mechanism = "preconditioned_gd"
    share: ClassVar[float] = 0.3  # of the iterates, the last ones, that are averaged

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_covered(self.task)
        check.positive_count(steps=self.steps)
        check.positive(clip=self.clip)
        check.positive(noise_std=self.noise_std)
        check.positive(gram_std=self.gram_std)

    @staticmethod
    def require_covered(task: LinearTask) -> None:
        """Raises ConditionError for a task that the steps are not for."""
        name = "preconditioned gradient descent"
        if task.reg is not None:
            raise ConditionError(f"reg must be None for {name}, which is regularized by its length")
        require_plain_sum(task, name)

    @property
    def reg(self) -> float:
        """Regularizer of the answer, in sum form; 0 for none."""
        return self.task.reg or 0.0

    @property
    def ridge(self) -> float:
        """What is added to the noisy X'X, beside reg."""
        return ridge_of(self.gram_std, self.task.width)

    @property
    def radius(self) -> float:
        """Radius of the ball that iterates are projected on, for which rounding is bounded."""
        task = self.task
        size = (
            _ROOM
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

    @property
    def noise_and_signal(self) -> tuple[float, float, str]:
        """As in `LinearPlan`."""
        return (
            self.noise_std / math.sqrt(self.steps),
            self.task.n * self.clip,
            "the mean of all steps",
        )

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

        def noisy(w: Tensor) -> Tensor:
            # PRIVACY: to the sum of all records, in each step (test_a_preconditioned_step_without_noise_is_caught)
            total = self.gradient(solved, w.view(size)).flatten() + gaussian_vector(
                len(w), self.noise_std, generator
            )
            gradient = (total + self.reg * w).view(size)
            if task.num_scores > 1:
                gradient = gradient - gradient.mean(
                    0
                )  # the noise of what adds up to 0 over classes
            step: Tensor = gradient @ inverse
            return step.flatten()

        start = torch.zeros(task.parameters, dtype=torch.float64, device=solved.device)
        return run_momentum(
            start, noisy, self.steps, self.step_size(values), 0.0, self.radius, self._averaged
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
        PreconditionedGDPlan(task=task, steps=steps, clip=clip, noise_std=1.0, gram_std=1.0), share
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
