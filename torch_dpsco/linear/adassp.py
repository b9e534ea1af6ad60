"""Least squares from noisy sufficient statistics, with a ridge that is large enough for their noise (AdaSSP).

    lambda_min(X'X), X'X and X'y, each with Gaussian noise;   theta = (X'X + ridge I)^-1 X'y of the noisy ones

For K classes the targets are the K indicators less 1/K, all solved with one X'X; the scores are K times the solution,
which is a step of Newton's method from 0 on the softmax cross-entropy: so are the probabilities that they make.

Differs from the paper (Wang 2018) in: mode "tight" shares one Gaussian budget out and has noise in an orthonormal basis
of the symmetric matrices; mode "paper" is checked, since its proof for each part alone fails for small delta.

Source: docs/proofs/output.md#least-squares-from-noisy-statistics
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco._margin import up
from torch_dpsco.accounting.analysis.rounding import (
    DOUBLE,
    asks_exact,
    exact_grid,
    require_gaussian,
    with_grid,
)
from torch_dpsco.accounting.designs import is_exact
from torch_dpsco.accounting.events import GDP, Gaussian
from torch_dpsco.errors import AdjacencyError, ConditionError
from torch_dpsco.linear.objectives.base import Records
from torch_dpsco.linear.solvers.certificates import project
from torch_dpsco.linear.task import LinearPlan, LinearTask, build_objective
from torch_dpsco.losses import Squared
from torch_dpsco.losses.classification import SoftmaxCrossEntropy
from torch_dpsco.mechanisms.vector_noise import exact_release, gaussian_vector, symmetric_noise
from torch_dpsco.plan import exact_cost
from torch_dpsco.problem import round_up
from torch_dpsco.rng import Source
from torch_dpsco.theory.linear.adassp import (
    AdaSSPConstants,
    adassp_constants,
    adassp_constants_paper,
    adassp_mu,
)
from torch_dpsco.theory.linear.solvers import sum_terms


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


def plan_adassp(task: LinearTask, mode: str = "tight", secure: str | None = None) -> AdaSSPPlan:
    """Returns the numbers of AdaSSP for a task with the squared loss, or the softmax cross-entropy.

    Args:
        task: its public numbers; delta > 0. reg is added to the ridge; None adds nothing.
        mode: "tight" or "paper".
        secure: "exact" for noise drawn in integers (mode "tight"), on the three statistics over their stds, as one
            vector: its event is a Gaussian of std 1.

    Raises:
        ConditionError: another loss, delta = 0, or a published noise that is not private enough.

    Guarantee:
        The event of the plan, for the task's adjacency, for everything computed from the three statistics.
    """
    _require_covered(task)
    epsilon = task.target.epsilon
    delta = task.target.delta
    exact = asks_exact(secure)
    if task.curvature and mode != "tight":
        raise ConditionError("mode must be 'tight' where intervals are paid for")
    if check.choice(("tight", "paper"), mode=mode) == "tight":
        constants = adassp_constants(
            epsilon, delta, *_bounds(task), adjacency=task.adjacency, spent=task.measured
        )
    else:
        require_gaussian(secure, "mode='paper' is the published algorithm; use mode='tight'")
        if task.adjacency == "replace_one":
            raise AdjacencyError(
                "mode 'paper' is proved for add_remove and zero_out: use mode='tight'"
            )
        delta *= 1 - 1e-9  # a ledger needs some left to round with
        paper = adassp_constants_paper(epsilon, delta, *_bounds(task))
        constants = AdaSSPConstants(
            paper.std_lmin,
            paper.std_xtx,
            paper.std_xtx,
            paper.std_xty,
            paper.lam_cap,
            paper.shift_lmin,
        )
    constants = AdaSSPConstants(*(value * _rounding(task, exact) for value in constants))
    plan = AdaSSPPlan(task=task, constants=constants, secure=secure)
    if exact:
        size = 1 + task.width * (task.width + 1) // 2 + task.parameters
        mu = plan.mu
        exact_grid(1.0, mu, size, largest=2 * task.most_records * mu)  # raises before a charge
    return plan


def _require_covered(task: LinearTask) -> None:
    known = isinstance(task.loss, (Squared, SoftmaxCrossEntropy))
    if not known or task.residual_clip is not None or task.tilt or task.attack_radius:
        raise ConditionError(
            f"AdaSSP needs the squared loss, or softmax, as it is (got {task.loss!r})"
        )
    if task.pure:
        raise ConditionError("AdaSSP is Gaussian: give delta > 0, or use output perturbation")


def _bounds(task: LinearTask) -> tuple[float, float, int]:
    """Returns the bounds on rows and targets, and the width of rows."""
    # PRIVACY: |e_y - 1/K|^2 = 1 - 1/K (test_no_record_moves_the_three_statistics_by_more_than_the_level)
    bound_y = round_up(math.sqrt(1 - 1 / task.num_scores)) if task.bound_y is None else task.bound_y
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
