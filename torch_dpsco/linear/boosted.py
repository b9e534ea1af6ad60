"""Least squares by rounds on residuals: X'X with noise once, then noisy sums of clipped gradients (boosted AdaSSP).

    w <- w + (X'X + N + ridge I)^-1 (sum of clip(x (y - <w, x>), C) + N(0, s^2 I)),   T rounds from 0

The answer is the average of the later half. Residuals shrink, so that C may be far below the bound on targets, to which
the noise of AdaSSP is proportional; and what a large ridge hides in one round, further rounds bring back.

Differs from the paper (Tang et al. 2023) in: X'X is released once; rounds are clipped, not targets; each round takes
the last answer in whole, with an average of the answers; all levels are added up exactly.

Source: docs/proofs/boosting.md
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.stated import GDP
from torch_dpsco.errors import ConditionError
from torch_dpsco.linear.objectives import LinearObjective
from torch_dpsco.linear.objectives.base import Records
from torch_dpsco.linear.solvers.certificates import project
from torch_dpsco.linear.task import LinearPlan, LinearTask
from torch_dpsco.losses import Squared
from torch_dpsco.losses.clipped import ResidualClipped
from torch_dpsco.mechanisms.vector_noise import gaussian_vector
from torch_dpsco.rng import Source
from torch_dpsco.theory.linear.boosted import boosted_clip, boosted_mu, boosted_noise
from torch_dpsco.theory.linear.preparation import signal_to_noise
from torch_dpsco.theory.linear.solvers import gradient_rounding, sum_terms
from torch_dpsco.theory.rounding import DOUBLE, require_gaussian

_ROUNDS = 40
_FAR = 1000.0  # times the clip on residuals over the bound on rows: iterates are kept in that ball
_TAIL = 2.72  # sqrt(2 log(2 / 0.05)): for the ridge
_GUESS, _WIDEST = 0.1, 2.0  # of the bound on targets: their spread, if it is not measured; clips in that case


@dataclass(frozen=True, kw_only=True)
class BoostedPlan(LinearPlan):
    """Public numbers of one run; reg (0 by default) is a ridge of the answer, beside that of a round.

    Args:
        rounds: T.
        clip: C > 0, norm that gradients are clipped to.
        gram_std: of the noise on the diagonal of X'X.
        noise_std: of the noise on each sum.
    """

    rounds: int
    clip: float
    gram_std: float
    noise_std: float

    mechanism = "boosted_adassp"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_covered(self.task)
        check.positive_count(rounds=self.rounds), check.positive(clip=self.clip)
        check.positive(gram_std=self.gram_std), check.positive(noise_std=self.noise_std)

    @property
    def reg(self) -> float:
        """Regularizer of the answer, in sum form; 0 for none."""
        return self.task.reg or 0.0

    @property
    def radius(self) -> float:
        """Radius of the ball that iterates are projected on."""
        return min(self.task.radius, _FAR * self.clip / self.task.preparation.bound**2)

    def own_event(self) -> GDP:
        """Returns what the matrix and all sums cost."""
        task, (bound, rounding) = self.task, _roundings(self.task, self.clip, self.radius)
        # PRIVACY: of the noise and rounds of the release (test_an_edited_plan_is_refused_or_charges_what_it_draws)
        mu = boosted_mu(
            self.gram_std,
            self.noise_std,
            self.rounds,
            bound_x=bound,
            clip=self.clip,
            adjacency=task.adjacency,
            rounding=rounding,
        )
        return GDP(mu, (task.adjacency,))

    @property
    def noise_and_signal(self) -> tuple[float, float, str]:
        """As in `LinearPlan`."""
        return self.noise_std / math.sqrt(self.rounds), self.task.n * self.clip, "the mean of all rounds"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        residual = self.clip / self.task.preparation.bound
        yield (
            "rounds",
            f"{self.rounds} on all records, residuals clipped at {residual:.3g} (longer rows) and more; X'X once, with "
            f"noise of std {self.gram_std:.3g}; answer: the average of the later half",
        )

    def draw(self, solved: Records, generator: Source) -> Tensor:
        """Adds noise to X'X and to the sum of each round: returns the private vector; see `LinearPlan`."""
        dim, device = solved.dim, solved.device
        row, column = torch.tril_indices(dim, dim, device=device)
        noisy = solved.gram(solved.weights)
        # PRIVACY: squares off the diagonal count twice in the Frobenius norm; float32 would round 1/sqrt(2) down
        # (test_the_noise_of_the_matrix_is_not_rounded_down)
        units = noisy.new_full((len(row),), math.sqrt(0.5))
        units[row == column] = 1.0
        # PRIVACY: to every entry that is used (test_each_round_gets_its_noise_once)
        noisy[row, column] += units * gaussian_vector(len(row), self.gram_std, generator)
        values, vectors = torch.linalg.eigh(noisy)  # of the lower triangle
        ridge = self.gram_std * (math.sqrt(2 * dim) + _TAIL) + self.reg
        values = values.clamp(min=0.0) + ridge
        objective = LinearObjective(ResidualClipped(Squared(), self.clip), solved, reg=0.0, normalizer=1.0)
        w = torch.zeros(dim, dtype=torch.float64, device=device)
        total = torch.zeros_like(w)
        for step in range(self.rounds):
            # PRIVACY: to the sum over all records, in each round (test_each_round_gets_its_noise_once)
            moment = gaussian_vector(dim, self.noise_std, generator) - objective.value_and_gradient(w)[1]
            w = project(w + vectors @ ((vectors.T @ (moment - self.reg * w)) / values), self.radius)
            if step >= self.rounds // 2:
                total += w
        return total / (self.rounds - self.rounds // 2)


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
    _require_covered(task)
    require_gaussian(secure, "boosted AdaSSP draws its noise in floating point; use mechanism='adassp'")
    prepare, width = task.prepare, boosted_clip(signal_to_noise(task.level, task.n, task.parameters))
    if prepare is None or prepare.quantile is None or not prepare.spreads:
        width = min(width, _WIDEST) * _GUESS * (task.bound_y or 1.0)
    clip = width * task.preparation.bound
    draft = BoostedPlan(task=task, rounds=rounds, clip=clip, gram_std=1.0, noise_std=1.0)
    bound, rounding = _roundings(task, clip, draft.radius)
    gram_std, noise_std = boosted_noise(
        task.level, rounds, bound_x=bound, clip=clip, adjacency=task.adjacency, rounding=rounding
    )
    return replace(draft, gram_std=gram_std, noise_std=noise_std)


def _require_covered(task: LinearTask) -> None:
    if not isinstance(task.loss, Squared) or task.residual_clip is not None or task.tilt or task.attack_radius:
        raise ConditionError(f"boosted AdaSSP needs the squared loss, as it is (got {task.loss!r})")
    if task.pure:
        raise ConditionError("boosted AdaSSP is Gaussian: give delta > 0, or use output perturbation")


def _roundings(task: LinearTask, clip: float, radius: float) -> tuple[float, float]:
    """Returns the bound on rows with room for the rounding of X'X, and what rounding may do to a sum."""
    most, bound = task.most_records, task.preparation.bound
    # PRIVACY: sums are rounded, in both data sets (test_rounding_is_in_the_sensitivity_of_a_round)
    room = 1.0 + 4 * most * (sum_terms(most) + 16) * DOUBLE
    offset = (task.bound_y or 0.0) / bound
    rounding = gradient_rounding(
        most, task.width, lipschitz=clip, smoothness=bound**2, reg=0.0, norm=radius, weight=most, score_offset=offset
    )
    return bound * math.sqrt(room) * (1 + 4 * DOUBLE), rounding
