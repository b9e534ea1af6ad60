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
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco._margin import up
from torch_dpsco.accounting.analysis.gaussian import (
    gaussian_mu,
    sensitivity_factor,
)
from torch_dpsco.accounting.analysis.rounding import (
    DOUBLE,
    asks_exact,
    exact_grid,
    require_gaussian,
    scaled_up,
    with_grid,
)
from torch_dpsco.accounting.designs import is_exact
from torch_dpsco.accounting.events import GDP, Gaussian
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.certificates import project, sum_terms
from torch_dpsco.estimators.gradient_descent import (
    PreconditionedGDPlan,
    boosted_clip,
    calibrated,
    require_plain_sum,
)
from torch_dpsco.estimators.preparation import level_left, signal_to_noise
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.task import LinearPlan, LinearTask, build_objective
from torch_dpsco.noise import Source
from torch_dpsco.problem import round_up
from torch_dpsco.step.exact_noise import exact_release, gaussian_vector, symmetric_noise
from torch_dpsco.step.plan import exact_cost


@dataclass(frozen=True, kw_only=True)
class AdaSSPPlan(LinearPlan):
    """Public numbers of one release; reg (0 by default) is added to the adaptive ridge.

    Args:
        constants: noise and ridge.
        secure: "exact" for noise in integers on a public grid; None for floating point.
    """

    constants: AdaSSPConstants
    secure: str | None = None

    mechanism = "adassp"

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "constants", AdaSSPConstants(*self.constants)
        )  # a list, where it was saved
        super().__post_init__()
        _require_covered(self.task)
        if self.task.curvature and asks_exact(self.secure):
            raise ConditionError("secure must be None where intervals are paid for")

    @property
    def reg(self) -> float:
        """Added to the adaptive ridge."""
        return self.task.reg or 0.0

    @property
    def mu(self) -> float:
        """Level of the three releases together, rounding included."""
        # PRIVACY: of the noise that is drawn (test_an_edited_plan_is_refused_or_charges_what_it_draws)
        level = adassp_mu(self.constants, *_bounds(self.task), adjacency=self.task.adjacency)
        return level * _rounding(self.task, asks_exact(self.secure))

    @property
    def total_scale(self) -> float:
        """Std of the noise on the sum of squared targets, which intervals need; 0 for no release.

        Source: docs/proofs/inference.md#least-squares
        """
        _, bound_y, _ = _bounds(self.task)
        # PRIVACY: a record adds up to bound_y^2 (test_no_record_moves_the_sum_of_squares_by_more,
        # test_the_sum_of_squares_is_charged_with_the_statistics); margin of the quotient
        # (docs/proofs/rounding.md#model-of-arithmetic)
        moved = bound_y**2 * _rounding(self.task, False)
        return up(moved / self.task.curvature, 1e-15) if self.task.curvature else 0.0

    @property
    def hessian_scale(self) -> float:
        """As in `LinearPlan`: of X'X."""
        return self.constants.std_xtx_diag if self.task.curvature else 0.0

    def own_event(self) -> GDP | Gaussian:
        """Returns what the release alone costs."""
        adjacency = self.task.adjacency
        if self.task.curvature:
            # PRIVACY: of all four (test_the_sum_of_squares_is_charged_with_the_statistics); margin of the
            # root (docs/proofs/rounding.md#model-of-arithmetic)
            return GDP(up(math.hypot(self.mu, self.task.curvature), 2.0**-50), (adjacency,))
        return (
            Gaussian(1.0, {adjacency: self.mu}, exact=True)
            if self.secure
            else GDP(self.mu, (adjacency,))
        )

    @property
    def noise_and_signal(self) -> tuple[float, float, str]:
        """As in `LinearPlan`."""
        bound_x, bound_y, _ = _bounds(self.task)
        return self.constants.std_xty, self.task.n * bound_x * bound_y, "X'y"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        yield exact_cost(self.secure)

    def statistics(self, records: Records) -> tuple[float, Tensor, Tensor]:
        """Returns the least eigenvalue of X'X, X'X and X'y, flattened: NOT private."""
        (gram,) = records.sum(lambda part: (part.gram(part.weights),))
        zero = torch.zeros(self.task.parameters, dtype=torch.float64, device=records.device)
        # the gradient at 0 is -X'y, of y or of the indicators less 1/K
        moment = -build_objective(self.task, 0.0, records).value_and_gradient(zero)[1]
        return float(torch.linalg.eigvalsh(gram)[0]), gram, moment

    def draw(self, solved: Records, generator: Source) -> Tensor:
        """Adds noise to the three statistics, solves: returns the private vector; see `LinearPlan`.

        Where intervals are paid for, noisy X'X, X'y and the sum of squared targets follow.
        """
        least, gram, moment = self.statistics(solved)
        event = self.own_event()
        given = self.constants
        dim = solved.dim
        if is_exact(event):
            least, noisy, moment = _exact(least, gram, moment, given, event, generator)
        else:
            least += float(gaussian_vector(1, given.std_lmin, generator))
            noisy = gram + symmetric_noise(
                dim, given.std_xtx_diag, given.std_xtx_offdiag, generator
            )
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


def plan_adassp(task: LinearTask, secure: str | None = None) -> AdaSSPPlan:
    """Returns the numbers of AdaSSP for a task with the squared loss, or the softmax cross-entropy.

    Args:
        task: its public numbers; delta > 0. reg is added to the ridge; None adds nothing.
        secure: "exact" for noise drawn in integers, on the three statistics over their stds, as one
            vector: its event is a Gaussian of std 1.

    Raises:
        ConditionError: another loss, or delta = 0.

    Guarantee:
        The event of the plan, for the task's adjacency, for everything computed from the three statistics.
    """
    _require_covered(task)
    epsilon = task.target.epsilon
    delta = task.target.delta
    exact = asks_exact(secure)
    constants = adassp_constants(
        epsilon, delta, *_bounds(task), adjacency=task.adjacency, spent=task.measured
    )
    constants = AdaSSPConstants(*(value * _rounding(task, exact) for value in constants))
    plan = AdaSSPPlan(task=task, constants=constants, secure=secure)
    if exact:
        size = 1 + task.width * (task.width + 1) // 2 + task.parameters
        mu = plan.mu
        exact_grid(1.0, mu, size, largest=2 * task.most_records * mu)  # raises before a charge
    return plan


def _require_covered(task: LinearTask) -> None:
    known = task.loss.squared or task.num_scores > 1
    if not known or task.residual_clip is not None or task.tilt or task.attack_radius:
        raise ConditionError(
            f"AdaSSP needs the squared loss, or softmax, as it is (got {task.loss!r})"
        )
    if task.pure:
        raise ConditionError("AdaSSP is Gaussian: give delta > 0, or use output perturbation")


def _bounds(task: LinearTask) -> tuple[float, float, int]:
    """Returns the bounds on rows and targets, and the width of rows."""
    # PRIVACY: |e_y - 1/K|^2 = 1 - 1/K (test_no_record_moves_the_three_statistics_by_more_than_the_level)
    bound_y = (
        round_up(math.sqrt(1 - 1 / task.num_scores)) if task.bound_y is None else task.bound_y
    )
    return task.preparation.bound, bound_y, task.width


def _rounding(task: LinearTask, exact: bool) -> float:
    """Returns the factor by which records move what is released further than the statistics in real numbers."""
    most = task.most_records
    # PRIVACY: sums and eigenvalues are rounded, in both data sets (test_rounding_is_in_the_noise_of_the_statistics)
    rounding = (
        1.0 + 4 * most * (sum_terms(most) + 64 * task.width + 80) * DOUBLE
    )  # 16 for the divisions by stds
    # PRIVACY: rounding to the grid moves them too (test_the_grid_is_in_the_noise_of_the_statistics_of_a_ridge)
    return with_grid(rounding, exact)


def _exact(
    least: float,
    gram: Tensor,
    moment: Tensor,
    given: AdaSSPConstants,
    event: Gaussian,
    generator: Source,
) -> tuple[float, Tensor, Tensor]:
    """Returns eigenvalue, matrix and moments, released as one vector in which each has noise of std 1."""
    dim = len(gram)
    row, column = torch.triu_indices(dim, dim, device=gram.device)
    # squares off the diagonal count once here and twice in the Frobenius norm, for noise of 1/sqrt(2) of the std
    stds = torch.where(row == column, given.std_xtx_diag, given.std_xtx_offdiag).to(gram)
    first = moment.new_tensor([least / given.std_lmin])
    released = exact_release(
        torch.cat([first, gram[row, column] / stds, moment / given.std_xty]), event, generator
    )
    noisy = torch.zeros_like(gram)
    noisy[row, column] = noisy[column, row] = released[1 : 1 + len(row)] * stds
    return float(released[0]) * given.std_lmin, noisy, released[1 + len(row) :] * given.std_xty


_ROUNDS, _SHARE = 40, 0.2  # of mu^2, for X'X
_FAR = (
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
        return min(self.task.radius, _FAR * self.clip / self.task.preparation.bound**2)

    def step_size(self, eigenvalues: Tensor) -> float:
        """1: each round takes the last answer in whole."""
        return 1.0


def plan_boosted(
    task: LinearTask, rounds: int = _ROUNDS, secure: str | None = None
) -> BoostedPlan:
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
        weights: shares of mu^2 for lambda_min, X'X and X'y: positive, of sum 1.
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
    share_lmin, share_xtx, share_xty = _shares(weights)
    replaced = sensitivity_factor(adjacency) == 2
    mu = level_left(gaussian_mu(epsilon, delta), spent)
    square = check.positive(bound_x=bound_x) ** 2
    product = bound_x * check.positive(bound_y=bound_y)
    d = check.positive_count(dim=dim)
    tail = _tail(failure)
    # PRIVACY: mu^2 is shared out, so that the squares add up to it (test_the_three_levels_add_up_to_the_budget); margin
    # of quotients (docs/proofs/rounding.md#model-of-arithmetic)
    lmin = scaled_up(square / (mu * math.sqrt(share_lmin)), 12)
    xtx = scaled_up(
        (math.sqrt(2) if replaced else 1.0) * square / (mu * math.sqrt(share_xtx)), 12
    )
    xty = scaled_up((2.0 if replaced else 1.0) * product / (mu * math.sqrt(share_xty)), 12)
    off_diagonal = scaled_up(xtx / math.sqrt(2), 2)
    return AdaSSPConstants(
        lmin, xtx, off_diagonal, xty, xtx * (math.sqrt(2 * d) + tail), lmin * tail
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


def _shares(weights: Sequence[float]) -> tuple[float, float, float]:
    shares = [check.positive(weights=share) for share in weights]
    if len(shares) != 3 or not math.isclose(math.fsum(shares), 1.0, rel_tol=1e-9):
        raise ValueError(f"weights must be three numbers of sum 1 (got {tuple(weights)})")
    first, second, third = (share / (math.fsum(shares) * (1 + 1e-15)) for share in shares)
    return first, second, third


def _tail(failure: float) -> float:
    return math.sqrt(2 * (math.log(2) - math.log(check.open_interval(0.0, 1.0, failure=failure))))
