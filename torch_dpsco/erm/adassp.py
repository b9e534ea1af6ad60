"""Least squares from noisy sufficient statistics, with a ridge that is large enough for their noise (AdaSSP).

    lambda_min(X'X), X'X and X'y, each with Gaussian noise;   theta = (X'X + ridge I)^-1 X'y of the noisy ones

Differs from the paper (Wang 2018) in: mode "tight" shares one Gaussian budget out and has noise in an orthonormal basis
of the symmetric matrices; mode "paper" is checked, since its proof for each part alone fails for small delta.

Source: docs/proofs/output.md#least-squares-from-noisy-statistics
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.designs import is_exact
from torch_dpsco.accounting.events import Gaussian
from torch_dpsco.accounting.stated import GDP, ApproxDP
from torch_dpsco.erm.plan import LinearPlan
from torch_dpsco.erm.task import LinearTask
from torch_dpsco.errors import AdjacencyError, ConditionError
from torch_dpsco.losses import Squared
from torch_dpsco.mechanisms.exact_noise import exact_release
from torch_dpsco.mechanisms.vector_noise import gaussian_vector
from torch_dpsco.objectives.records import Records
from torch_dpsco.plan import exact_cost
from torch_dpsco.rng import Source
from torch_dpsco.solvers.certificates import project
from torch_dpsco.theory.adassp import AdaSSPConstants, adassp_constants, adassp_constants_paper
from torch_dpsco.theory.exact_noise import asks_exact, exact_grid, require_gaussian, with_grid
from torch_dpsco.theory.holder_rounding import DOUBLE
from torch_dpsco.theory.output import sum_terms

__all__ = ["AdaSSPPlan", "plan_adassp"]


@dataclass(frozen=True, kw_only=True)
class AdaSSPPlan(LinearPlan):
    """Public numbers of one release; reg is added to the adaptive ridge, and 0 if none is given.

    Args:
        constants: noise and ridge.
    """

    constants: AdaSSPConstants

    mechanism = "adassp"

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", AdaSSPConstants(*self.constants))  # a list, where it was saved
        super().__post_init__()

    @property
    def noise_and_signal(self) -> tuple[float, float, str]:
        """As in `LinearPlan`."""
        task = self.task
        assert task.bound_y is not None  # of plan_adassp
        return self.constants.std_xty, task.n * task.preparation.bound * task.bound_y, "X'y"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        yield exact_cost("exact" if is_exact(self.charged) else None)

    def release(self, solved: Records, accountant: Accountant, generator: Source) -> Tensor:
        """Charges, adds noise to the three statistics, solves: returns the private vector; see `LinearPlan`."""
        gram = solved.gram(solved.weights)
        moment = solved.combine(solved.weights * solved.targets)
        # PRIVACY: charged before anything is drawn (test_a_refused_release_draws_nothing)
        accountant.authorize(self.charged)
        given, dim = self.constants, solved.dim
        least = float(torch.linalg.eigvalsh(gram)[0])
        if is_exact(self.charged):
            least, noisy, moment = _exact(least, gram, moment, given, self.charged, generator)
        else:
            least += float(gaussian_vector(1, given.std_lmin, generator))
            noisy = gram + _symmetric(dim, given, generator)
            moment = moment + gaussian_vector(dim, given.std_xty, generator)
        ridge = max(0.0, given.lam_cap - max(0.0, least - given.lmin_shift)) + self.reg
        values, vectors = torch.linalg.eigh(noisy)
        # post-processing: an improbable matrix that is not positive definite
        values = (values + ridge).clamp(min=max(given.lam_cap, self.reg) / 10)
        return project(vectors @ ((vectors.T @ moment) / values), self.task.radius)


def plan_adassp(task: LinearTask, mode: str = "tight", secure: str | None = None) -> AdaSSPPlan:
    """Returns the numbers of AdaSSP for a task with the squared loss.

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
    if not isinstance(task.loss, Squared) or task.residual_clip is not None or task.tilt or task.attack_radius:
        raise ConditionError(f"AdaSSP needs the squared loss, as it is (got {task.loss!r})")
    if task.pure:
        raise ConditionError("AdaSSP is Gaussian: give delta > 0, or use output perturbation")
    assert task.bound_y is not None
    epsilon, delta = task.target.epsilon, task.target.delta
    bounds = (task.preparation.bound, task.bound_y, task.width)
    event: GDP | ApproxDP | Gaussian
    most = task.most_records
    if check.choice(("tight", "paper"), mode=mode) == "tight":
        constants = adassp_constants(epsilon, delta, *bounds, adjacency=task.adjacency)
        mu = gaussian_mu(epsilon, delta)
        event = GDP(mu, (task.adjacency,))
        if asks_exact(secure):
            event = Gaussian(1.0, {task.adjacency: mu}, exact=True)
            exact_grid(1.0, mu, 1 + task.width * (task.width + 3) // 2, largest=2 * most * mu)  # raises before a charge
    else:
        require_gaussian(secure, "mode='paper' is charged as (epsilon, delta); use mode='tight'")
        if task.adjacency == "replace_one":
            raise AdjacencyError("mode 'paper' is proved for add_remove and zero_out: use mode='tight'")
        delta *= 1 - 1e-9  # a ledger needs some left to round with
        paper = adassp_constants_paper(epsilon, delta, *bounds)
        constants = AdaSSPConstants(
            paper.std_lmin, paper.std_xtx, paper.std_xtx, paper.std_xty, paper.lam_cap, paper.shift_lmin
        )
        event = ApproxDP(epsilon, delta, (task.adjacency,))
    # PRIVACY: sums and eigenvalues are rounded, in both data sets (test_rounding_is_in_the_noise_of_the_statistics)
    rounding = 1.0 + 4 * most * (sum_terms(most) + 64 * task.width + 80) * DOUBLE  # 16 for the divisions by stds
    # PRIVACY: rounding to the grid moves them too (test_the_grid_is_in_the_noise_of_the_statistics_of_a_ridge)
    rounding = with_grid(rounding, is_exact(event))
    constants = AdaSSPConstants(*(value * rounding for value in constants))
    return AdaSSPPlan(task=task, reg=task.reg or 0.0, charged=event, constants=constants)


def _symmetric(dim: int, given: AdaSSPConstants, generator: Source) -> Tensor:
    """Returns a symmetric matrix of noise, with stds of their own on and off the diagonal."""
    noise = gaussian_vector(dim * dim, given.std_xtx_offdiag, generator).view(dim, dim).triu(1)
    return noise + noise.T + torch.diag(gaussian_vector(dim, given.std_xtx_diag, generator))


def _exact(
    least: float, gram: Tensor, moment: Tensor, given: AdaSSPConstants, event: Gaussian, generator: Source
) -> tuple[float, Tensor, Tensor]:
    """Returns eigenvalue, matrix and moments, released as one vector in which each has noise of std 1."""
    dim = len(moment)
    row, column = torch.triu_indices(dim, dim, device=gram.device)
    # squares off the diagonal count once here and twice in the Frobenius norm, for noise of 1/sqrt(2) of the std
    stds = torch.where(row == column, given.std_xtx_diag, given.std_xtx_offdiag).to(gram)
    first = moment.new_tensor([least / given.std_lmin])
    released = exact_release(torch.cat([first, gram[row, column] / stds, moment / given.std_xty]), event, generator)
    noisy = torch.zeros_like(gram)
    noisy[row, column] = noisy[column, row] = released[1:-dim] * stds
    return float(released[0]) * given.std_lmin, noisy, released[-dim:] * given.std_xty
