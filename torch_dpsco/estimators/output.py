"""Output perturbation: solve to a certified accuracy, add noise once.

    release  w_hat + z,   |w_hat - w*| <= r certified,   z calibrated to Delta + 2 r

with w* the minimizer of J (see `estimators.task`), which one record moves by at most Delta. Any solver may be used and
none is trusted. Noise is drawn after the solver has ended, from a stream of its own.

The regularizer where none is given is that of the least bound on the risk of a linear model. The noise z on the weights
moves the score of a row by <x, z>, of the std s|x| only, however many weights there are: for a K-norm noise of scale b,
s = b sqrt(d + 1). By Taylor's formula for each record, and since z has mean 0,

    E F(w + z) - F(w) <= min(beta s^2 / 2, L s)      beta >= phi'' |x|^2,  L >= |phi'| |x|

to which the regularizer adds (lam / 2) R^2 for a model of norm R. Tilted and adversarial objectives are treated as if
they had the sum form, with their constants: no privacy rests on this.

Differs from the paper (Lowy and Razaviyayn, Algorithms 1, 5, 6, 7) in: 1. a certificate at run time in place of an
accuracy in expectation, with which the paper's claim is false; 2. the data's part of the gradients alone moves the
minimizer; 3. analytic Gaussian noise by default; 4. sum form; 5. <x, z> in the bound on the risk, where its schedules
have |z|, which is sqrt(d) times larger and shrinks models more than it has to.

Source: docs/proofs/output.md#how-far-a-minimizer-moves, docs/proofs/output.md#certified-points,
docs/proofs/output.md#default-regularizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_sigma
from torch_dpsco.accounting.analysis.rounding import (
    asks_exact,
    exact_grid,
    require_gaussian,
    safe,
    with_grid,
)
from torch_dpsco.accounting.designs import is_exact
from torch_dpsco.accounting.events import REPLACE_ONE, Gaussian, KNorm
from torch_dpsco.errors import CalibrationError, ConditionError
from torch_dpsco.estimators.output_numbers import (
    adversarial_gradient_diameter,
    adversarial_lipschitz,
    certified_sensitivity,
    erm_sensitivity,
    tilted_sensitivity,
    tilted_strong_convexity,
)
from torch_dpsco.estimators.records import Records, project
from torch_dpsco.estimators.solvers import check_tolerance, solve, solver_tolerance
from torch_dpsco.estimators.task import KINK, LinearPlan, LinearTask, build_objective
from torch_dpsco.noise import Source
from torch_dpsco.step.exact_noise import exact_release, gaussian_vector, knorm_vector
from torch_dpsco.step.plan import exact_cost

_SCORE = 5.0  # norm times bound on rows of a model to be had: probabilities up to 0.993
_GRID = tuple(10.0 ** (power / 4) for power in range(-32, 13))


def least_risk_reg(task: LinearTask) -> float:
    """Returns the regularizer, in sum form, of the least bound; a search over public numbers.

    Args:
        task: its reg is not read.

    Raises:
        CalibrationError: nothing is proved for any regularizer.

    Example:
        >>> import torch_dpsco as dp
        >>> from torch_dpsco.estimators.task import LinearTask
        >>> from torch_dpsco.estimators.preparation import Preparation
        >>> task = LinearTask(loss=dp.losses.Logistic(), preparation=Preparation(1.0), dim=10, n=10_000,
        ...                   budget=dp.Budget(1.0, 1e-6))
        >>> 10 < least_risk_reg(task) < 1000
        True
    """
    bound = task.preparation.bound + task.attack_reach
    base = 0.0
    if task.tilt < 0 and task.lipschitz is not None:
        base = safe(-task.tilt * task.lipschitz**2) * (
            1 + 1e-6
        )  # what a negative tilt takes of the curvature
    best = math.nan
    least = math.inf
    refusal: CalibrationError = ConditionError(
        f"reg must be given: no default has a finite bound for {task.loss!r}"
    )
    for factor in _GRID:
        reg = task.n * (base + factor * bound**2)
        try:
            risk = _risk(task, plan_output(replace(task, reg=reg)), bound)
        except OverflowError:  # e^(tilt range)
            continue
        except CalibrationError as error:
            refusal = error
            continue
        if risk < least:
            best = reg
            least = risk
    if math.isinf(least):
        raise refusal
    return best


def _risk(task: LinearTask, plan: OutputPlan, bound: float) -> float:
    """Returns a bound on E F(w + z) - F(w) of a plan's noise z, F without its regularizer, and what that costs."""
    grown = (bound / task.preparation.bound) ** 2
    spread = plan.noise_and_signal[0]
    lipschitz = task.lipschitz_at_minimizers(plan.reg) * math.sqrt(grown)
    moved = lipschitz * spread
    if task.smoothness is not None:
        moved = min(
            moved, (task.smoothness * grown + abs(task.tilt) * lipschitz**2) / 2 * spread**2
        )
    radius = min(task.radius, _SCORE / bound)
    return moved + plan.reg / task.n / 2 * radius**2


@dataclass(frozen=True, kw_only=True)
class OutputPlan(LinearPlan):
    """Public numbers of one release.

    Args:
        noise_scale: std of Gaussian noise, or scale of the K-norm's.
        secure: "exact" for noise in integers on a public grid; None for floating point.
    """

    noise_scale: float
    secure: str | None = None

    mechanism = "output"

    @property
    def sensitivity(self) -> float:
        """Delta, how far one record moves the minimizer."""
        return self._moves.minimizer

    @property
    def distance(self) -> float:
        """r, that the solver has to certify."""
        return self._moves.distance

    @cached_property
    def _moves(self) -> _Moves:
        """How far one record moves things, and the certificate that is asked for."""
        sensitivity, mu = _sensitivity(self.task, self.reg)
        distance = solver_tolerance(sensitivity, mu) / mu
        # PRIVACY: by public numbers, so that no data set can fail it
        # (test_a_tolerance_below_the_rounding_is_not_planned)
        check_tolerance(mu * distance, _rounding(self.task, self.reg))
        # PRIVACY: both minimizers are approximate (test_the_noise_covers_what_the_solver_left)
        answer = certified_sensitivity(sensitivity, mu, mu * distance)
        return _Moves(mu, sensitivity, distance, answer)

    @property
    def moved(self) -> float:
        """How far one record moves what is released."""
        # PRIVACY: rounding to the grid moves the answer too (test_the_grid_is_in_the_sensitivity_of_exact_plans)
        return with_grid(self._moves.answer, asks_exact(self.secure))

    def own_event(self) -> Gaussian | KNorm:
        """Returns what the release alone costs: a pure epsilon is what was asked for, where the noise costs no more."""
        scale = check.positive(noise_scale=self.noise_scale)
        moved = self.moved
        adjacency = self.task.adjacency
        if self.task.pure:
            # margin: a quotient rounded up (docs/proofs/rounding.md#model-of-arithmetic)
            spent = math.nextafter(moved / scale, math.inf)
            # PRIVACY: the epsilon of the noise that is drawn (test_an_edited_plan_is_refused_or_charges_what_it_draws)
            epsilon = max(self.task.target.epsilon, spent)
            return KNorm(epsilon, self.task.parameters, adjacencies=(adjacency,))
        return Gaussian(scale, {adjacency: moved}, exact=asks_exact(self.secure))

    @property
    def noise_and_signal(self) -> tuple[float, float, str]:
        """As in `LinearPlan`; an answer without records is 0."""
        task = self.task
        std = self.noise_scale * (math.sqrt(task.parameters + 1) if task.pure else 1.0)
        return std, min(task.radius, task.n * self.sensitivity), "the answer"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        if not self.task.pure:
            yield exact_cost(self.secure)

    def solve(self, records: Records, start: Tensor | None = None) -> Tensor:
        """Returns a point that is certified to be as near to the minimizer as planned: NOT private.

        Raises:
            NotCertifiedError: an internal error, see `estimators.solvers.solve`; outside of the guarantee.
        """
        objective = build_objective(self.task, self.reg, records)
        if objective.strong_convexity < self._moves.strong_convexity * (1 - 1e-12):
            raise ConditionError(
                "objective must be that of the plan: its strong convexity is less than planned"
            )
        return solve(objective, self.distance, radius=self.task.radius, start=start).w

    def draw(self, solved: Tensor, generator: Source) -> Tensor:
        """Draws the noise and returns the private vector; see `LinearPlan`."""
        released = self.own_event()
        if is_exact(released):
            return project(exact_release(solved, released, generator), self.task.radius)
        draw = knorm_vector if isinstance(released, KNorm) else gaussian_vector
        return project(solved + draw(len(solved), self.noise_scale, generator), self.task.radius)


def plan_output(task: LinearTask, secure: str | None = None) -> OutputPlan:
    """Returns the numbers of output perturbation for a task.

    Args:
        task: its public numbers.
        secure: "exact" for noise drawn in integers (delta > 0); see docs/proofs/exact_gaussian.md.

    Raises:
        ConditionError: nothing is proved for these settings, e.g. tilts under add_remove without n_min.
        MissingConstantError: the loss needs a radius.

    Guarantee:
        The event of the plan, for a task's adjacency, if the released point is certified within `distance`.
    """
    task = _smooth(task)
    if task.reg is None:
        task = replace(task, reg=least_risk_reg(task))
    draft = OutputPlan(task=task, noise_scale=1.0, secure=secure)
    moved = draft.moved
    if task.pure:
        require_gaussian(secure)
        return replace(draft, noise_scale=moved / task.target.epsilon * (1 + 1e-15))
    if task.noise_multiplier is not None:
        sigma = task.noise_multiplier * moved
    elif task.prepare is not None:
        sigma = safe(moved / task.level)
    else:
        sigma = gaussian_sigma(task.target.epsilon, task.target.delta, moved)
    if asks_exact(secure):
        exact_grid(sigma, moved, task.parameters)  # raises before anything is spent
    return replace(draft, noise_scale=sigma)


class _Moves(NamedTuple):
    """How far one record moves things.

    Args:
        strong_convexity: of the objective that is solved, in its own form.
        minimizer: how far the minimizer moves.
        distance: between minimizer and answer, certified.
        answer: how far the answer moves.
    """

    strong_convexity: float
    minimizer: float
    distance: float
    answer: float


def _smooth(task: LinearTask) -> LinearTask:
    """Returns the task, with a public smoothing of a loss that has a kink, as a certificate needs it."""
    if task.smoothness is not None:
        return task
    smooth = task.loss.smoothed(KINK * (task.bound_y or 1.0))
    if smooth is None:
        raise ConditionError(
            f"loss must be smooth, Hinge or Pinball to be certified (got {task.loss!r})"
        )
    return replace(task, loss=smooth)


def _rounding(task: LinearTask, reg: float) -> float:
    """Returns what rounding may hide from a certificate, for public numbers."""
    lipschitz = task.lipschitz_at_minimizers(reg)
    norm = task.minimizer_radius(reg)
    share = 1.0 / task.n if task.tilt else 1.0  # tilted objectives are means
    return share * task.gradient_rounding(
        reg, norm, lipschitz, dim=task.parameters, most=task.most_records
    )


def _sensitivity(task: LinearTask, reg: float) -> tuple[float, float]:
    """Returns (Delta, mu) of the objective with this regularizer."""
    if task.tilt:
        return _tilted(task, reg)
    if task.attack_radius:
        bound = task.preparation.bound
        rho = task.attack_reach
        link = task.loss.grad_bound(math.inf, 1.0, 1.0)
        spread = adversarial_gradient_diameter(bound, rho, link)
        steepest = adversarial_lipschitz(bound, rho, link)
        return erm_sensitivity(steepest, reg, 1, task.adjacency, spread), reg
    lipschitz = task.lipschitz_at_minimizers(reg)
    diameter = 2 * lipschitz
    if task.clipped is None and task.adjacency == REPLACE_ONE:
        own = task.loss.gradient_diameter(task.minimizer_radius(reg), task.preparation.bound)
        diameter = min(diameter, own)
    return erm_sensitivity(lipschitz, reg, 1, task.adjacency, diameter), reg


def _tilted(task: LinearTask, reg: float) -> tuple[float, float]:
    lam = reg / task.n
    lipschitz = task.lipschitz
    if lipschitz is None:
        raise ConditionError(f"loss must be Lipschitz to be tilted (got {task.loss!r})")
    if task.adjacency == "add_remove" and task.n_min is None:
        raise ConditionError(
            "n_min must be given for tilts under add_remove: a public lower bound on the records"
        )
    lipschitz *= 1 + 2.1e-9  # as the objective takes it: norms of clipped rows are rounded
    span = task.loss_range(lam)
    delta = tilted_sensitivity(
        task.tilt, span, task.n, lipschitz, lam, adjacency=task.adjacency, n_min=task.n_min
    )
    return delta, tilted_strong_convexity(task.tilt, lipschitz, lam)
