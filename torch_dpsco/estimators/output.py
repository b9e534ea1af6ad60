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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.convert import delta_with_failure
from torch_dpsco.accounting.analysis.gaussian import gaussian_sigma, gaussian_sigma_zhao
from torch_dpsco.accounting.analysis.rounding import (
    asks_exact,
    exact_grid,
    gamma,
    require_gaussian,
    safe,
    with_grid,
)
from torch_dpsco.accounting.designs import is_exact
from torch_dpsco.accounting.events import REPLACE_ONE, Failure, Gaussian, KNorm, Sequential
from torch_dpsco.errors import CalibrationError, ConditionError, SequenceError
from torch_dpsco.estimators.certificates import (
    BoxDual,
    check_gap_tolerance,
    check_tolerance,
    project,
    solver_tolerance,
)
from torch_dpsco.estimators.output_numbers import (
    adversarial_gradient_diameter,
    adversarial_lipschitz,
    certified_sensitivity,
    erm_sensitivity,
    expected_suboptimal_sensitivity,
)
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.solvers import SOLVERS, solve
from torch_dpsco.estimators.task import LinearPlan, LinearTask, build_objective
from torch_dpsco.estimators.tilted_numbers import tilted_sensitivity, tilted_strong_convexity
from torch_dpsco.noise import Source
from torch_dpsco.step.exact_noise import exact_release, gaussian_vector, knorm_vector
from torch_dpsco.step.plan import exact_cost

_SCORE = 5.0  # norm times bound on rows of a model to be had: probabilities up to 0.993
_GRID = tuple(10.0 ** (power / 4) for power in range(-32, 13))


def least_risk_reg(task: LinearTask, plan: Callable[[LinearTask], Any]) -> float:
    """Returns the regularizer, in sum form, of the least bound; a search over public numbers.

    Args:
        task: its reg is not read.
        plan: `estimators.output.plan_output`.

    Raises:
        CalibrationError: nothing is proved for any regularizer.

    Example:
        >>> import torch_dpsco as dp
        >>> from torch_dpsco.estimators.task import LinearTask
        >>> from torch_dpsco.estimators.preparation import Preparation
        >>> from torch_dpsco.estimators.output import plan_output
        >>> task = LinearTask(loss=dp.losses.Logistic(), preparation=Preparation(1.0), dim=10, n=10_000,
        ...                   budget=dp.Budget(1.0, 1e-6))
        >>> 10 < least_risk_reg(task, plan_output) < 1000
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
            risk = _risk(task, plan(replace(task, reg=reg)), bound)
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


def _added(task: LinearTask, plan: Any, grown: float) -> float:
    """Returns a bound on E F(w + z) - F(w) of a plan's noise z, F without its regularizer."""
    spread = plan.noise_and_signal[0]
    lipschitz = task.lipschitz_at_minimizers(plan.reg) * math.sqrt(grown)
    moved = lipschitz * spread
    if task.smoothness is not None:
        moved = min(
            moved, (task.smoothness * grown + abs(task.tilt) * lipschitz**2) / 2 * spread**2
        )
    return float(moved)


def _risk(task: LinearTask, plan: Any, bound: float) -> float:
    radius = min(task.radius, _SCORE / bound)
    return _added(task, plan, (bound / task.preparation.bound) ** 2) + float(
        plan.reg / task.n / 2 * radius**2
    )


_MODES = ("tight", "paper")


@dataclass(frozen=True, kw_only=True)
class OutputPlan(LinearPlan):
    """Public numbers of one release.

    Args:
        noise_scale: std of Gaussian noise, or scale of the K-norm's.
        secure: "exact" for noise in integers on a public grid; None for floating point.
        solver: see `estimators.solvers.solve`; never trusted.
        expected_accuracy: promised for every data set, in place of a certificate; None for none.
        failure: probability that delta pays for, with a promised accuracy; None for none.
    """

    noise_scale: float
    secure: str | None = None
    solver: str = "auto"
    expected_accuracy: float | None = None
    failure: float | None = None

    mechanism = "output"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.expected_accuracy is None) != (self.failure is None):
            raise ValueError(
                "expected_accuracy and failure must be given for guarantee='markov', and for it"
                f" only (got {self.expected_accuracy} and {self.failure})"
            )

    @property
    def trusted(self) -> bool:
        """Whether no certificate is asked for: a promised accuracy takes its place."""
        return self.failure is not None

    @property
    def sensitivity(self) -> float:
        """Delta, how far one record moves the minimizer."""
        return self._moves.minimizer

    @property
    def distance(self) -> float:
        """r, that the solver has to certify; inf for a promise in its place."""
        return self._moves.distance

    @cached_property
    def _moves(self) -> _Moves:
        if self.expected_accuracy is None or self.failure is None:
            return _certified(self.task, self.reg)
        return _promised(self.task, self.reg, self.expected_accuracy, self.failure)

    @property
    def moved(self) -> float:
        """How far one record moves what is released."""
        # PRIVACY: rounding to the grid moves the answer too (test_the_grid_is_in_the_sensitivity_of_exact_plans)
        return with_grid(self._moves.answer, asks_exact(self.secure))

    def own_event(self) -> Gaussian | KNorm | Sequential:
        """Returns what the release alone costs: a pure epsilon is what was asked for, where the noise costs no more."""
        scale = check.positive(noise_scale=self.noise_scale)
        moved = self.moved
        adjacency = self.task.adjacency
        if self.failure is None and self.task.pure:
            # margin: a quotient rounded up (docs/proofs/rounding.md#model-of-arithmetic)
            spent = math.nextafter(moved / scale, math.inf)
            # PRIVACY: the epsilon of the noise that is drawn (test_an_edited_plan_is_refused_or_charges_what_it_draws)
            epsilon = max(self.task.target.epsilon, spent)
            return KNorm(epsilon, self.task.parameters, adjacencies=(adjacency,))
        gaussian = Gaussian(scale, {adjacency: moved}, exact=asks_exact(self.secure))
        return (
            gaussian
            if self.failure is None
            else Sequential((gaussian, Failure(self.failure, "per_side")))
        )

    @property
    def noise_and_signal(self) -> tuple[float, float, str]:
        """As in `LinearPlan`; an answer without records is 0."""
        task = self.task
        std = self.noise_scale * (math.sqrt(task.parameters + 1) if task.pure else 1.0)
        return std, min(task.radius, task.n * self.sensitivity), "the answer"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        if self.trusted:
            yield (
                "trusted",
                "the accuracy that is promised for the loop, in expectation, on every data set",
            )
        task = self.task
        plain = (
            task.num_scores == 1
            and not task.tilt
            and not task.attack_radius
            and math.isinf(task.radius)
        )
        if plain and task.lipschitz is not None:
            # the regularizer's own part, reg |z|^2 / 2 in the sum, is no loss of a record
            yield (
                "expected",
                (
                    f"the noise adds at most {_added(task, self, 1.0):.3g} to the mean loss of the"
                    " records"
                ),
            )
        if not self.task.pure:
            yield exact_cost(self.secure)

    def solve(self, records: Records, start: Tensor | None = None) -> Tensor:
        """Returns a point that is certified to be as near to the minimizer as planned: NOT private.

        Raises:
            NotCertifiedError: an internal error, see `estimators.solvers.solve`; outside of the guarantee.
            SequenceError: an accuracy is promised, and there is no start, from a loop that has it.
        """
        if self.trusted:
            if start is None:
                raise SequenceError(
                    "guarantee='markov' releases what your loop left: call certify(dataset)"
                    " after it"
                )
            return start
        objective = build_objective(self.task, self.reg, records)
        if objective.strong_convexity < self._moves.strong_convexity * (1 - 1e-12):
            raise ConditionError(
                "objective must be that of the plan: its strong convexity is less than planned"
            )
        # a kinked loss needs no ball for its constants: the projection of the answer is enough
        ball = self.task.radius if objective.smoothness is not None else math.inf
        return solve(objective, self.distance, radius=ball, solver=self.solver, start=start).w

    def draw(self, solved: Tensor, generator: Source) -> Tensor:
        """Draws the noise and returns the private vector; see `LinearPlan`."""
        event = self.own_event()
        released = event.events[0] if isinstance(event, Sequential) else event
        if is_exact(released):
            return project(exact_release(solved, released, generator), self.task.radius)
        draw = knorm_vector if isinstance(released, KNorm) else gaussian_vector
        return project(solved + draw(len(solved), self.noise_scale, generator), self.task.radius)


def plan_output(
    task: LinearTask, mode: str = "tight", secure: str | None = None, solver: str = "auto"
) -> OutputPlan:
    """Returns the numbers of output perturbation for a task.

    Args:
        task: its public numbers.
        mode: "tight" (analytic Gaussian) or "paper" (the closed form of Zhao et al., which is valid and larger).
        secure: "exact" for noise drawn in integers (delta > 0); see docs/proofs/exact_gaussian.md.
        solver: see `OutputPlan`.

    Raises:
        ConditionError: nothing is proved for these settings, e.g. tilts under add_remove without n_min.
        MissingConstantError: the loss needs a radius.

    Guarantee:
        The event of the plan, for a task's adjacency, if the released point is certified within `distance`.
    """
    _require_solvable(task)
    draft = _draft(task, secure, solver=check.choice(SOLVERS, solver=solver))
    if not task.pure:
        return _with_gaussian(draft, mode)
    check.choice(_MODES, mode=mode)
    require_gaussian(secure)
    return replace(draft, noise_scale=draft.moved / task.target.epsilon * (1 + 1e-15))


def _draft(task: LinearTask, secure: str | None, **numbers: Any) -> OutputPlan:
    """Returns a plan with the regularizer of the task, or the chosen one, and noise of scale 1."""
    if task.reg is None:
        task = replace(task, reg=least_risk_reg(task, plan_output))
    return OutputPlan(task=task, noise_scale=1.0, secure=secure, **numbers)


def _with_gaussian(draft: OutputPlan, mode: str, delta: float | None = None) -> OutputPlan:
    """Returns a plan with Gaussian noise for its task's budget, at the budget's delta or what is left of it."""
    task = draft.task
    moved = draft.moved
    chosen = gaussian_sigma if check.choice(_MODES, mode=mode) == "tight" else gaussian_sigma_zhao
    if task.noise_multiplier is not None:
        sigma = task.noise_multiplier * moved
    elif task.prepare is not None:
        if delta is not None or mode != "tight":
            raise ConditionError("prepare must be None for mode='paper' and guarantee='markov'")
        sigma = safe(moved / task.level)
    else:
        sigma = chosen(task.target.epsilon, task.target.delta if delta is None else delta, moved)
    if asks_exact(draft.secure):
        exact_grid(sigma, moved, task.parameters)  # raises before anything is spent
    return replace(draft, noise_scale=sigma)


class _Moves(NamedTuple):
    """How far one record moves things.

    Args:
        strong_convexity: of the objective that is solved, in its own form.
        minimizer: how far the minimizer moves.
        distance: between minimizer and answer, certified; inf if it is promised in expectation.
        answer: how far the answer moves.
    """

    strong_convexity: float
    minimizer: float
    distance: float
    answer: float


def _certified(task: LinearTask, reg: float) -> _Moves:
    sensitivity, mu = _sensitivity(task, reg)
    kinked = task.smoothness is None
    distance = solver_tolerance(sensitivity, mu, kinked) / mu
    # PRIVACY: by public numbers, so that no data set can fail it (test_a_tolerance_below_the_rounding_is_not_planned)
    if kinked:
        rounding = _gap_rounding(task, reg)
        distance = max(
            distance, math.sqrt(8 * rounding / mu) * (1 + 1e-9)
        )  # the noise grows by what gaps cannot show
        check_gap_tolerance(distance, mu, rounding)
    else:
        check_tolerance(mu * distance, _rounding(task, reg))
    # PRIVACY: both minimizers are approximate (test_the_noise_covers_what_the_solver_left)
    return _Moves(
        mu, sensitivity, distance, certified_sensitivity(sensitivity, mu, mu * distance)
    )


def _promised(task: LinearTask, reg: float, accuracy: float, failure: float) -> _Moves:
    # PRIVACY: the loop is not constrained to the ball (test_a_promised_accuracy_is_that_of_an_unconstrained_loop)
    sensitivity, mu = _sensitivity(replace(task, radius=math.inf), reg)
    if task.tilt:
        accuracy = accuracy / task.n
    moved = expected_suboptimal_sensitivity(sensitivity, mu, accuracy, failure)
    return _Moves(mu, sensitivity, math.inf, moved)


def _require_solvable(task: LinearTask) -> None:
    """Raises ConditionError for losses that no certificate covers."""
    kinked = task.smoothness is None
    if kinked and (task.tilt or task.attack_radius or BoxDual.of(task.loss) is None):
        raise ConditionError(
            f"loss must be smooth, hinge or pinball to be certified (got {task.loss!r})"
        )


def _rounding(task: LinearTask, reg: float) -> float:
    """Returns what rounding may hide from a certificate, for public numbers."""
    lipschitz = task.lipschitz_at_minimizers(reg)
    norm = task.minimizer_radius(reg)
    share = 1.0 / task.n if task.tilt else 1.0  # tilted objectives are means
    return share * task.gradient_rounding(
        reg, norm, lipschitz, dim=task.parameters, most=task.most_records
    )


def _gap_rounding(task: LinearTask, reg: float) -> float:
    """Returns what rounding may hide from a gap that is summed record by record (see `certificates.gap_error`)."""
    box = BoxDual.of(task.loss)
    assert box is not None  # of _require_solvable
    reach = task.preparation.bound * task.minimizer_radius(reg) + 1 + (task.bound_y or 1.0)
    return gamma(task.width + 6) * box.width * task.most_records * reach


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


def markov_plan(
    task: LinearTask,
    expected_accuracy: float,
    failure: float,
    mode: str = "tight",
    secure: str | None = None,
) -> OutputPlan:
    """Returns the numbers for a point whose objective is within `expected_accuracy` of the minimum in expectation.

    But for a probability of at most `failure` on each side it is within expected_accuracy / failure.

    Args:
        task: its public numbers; delta > 0.
        expected_accuracy: alpha > 0, in sum form, promised for every data set.
        failure: p in (0, 1); (1 + e^epsilon) p of delta pay for it.
        mode: as in `plan_output`.
        secure: as in `plan_output`.

    Raises:
        ConditionError: delta does not pay for the failure.

    Source: docs/proofs/output.md#accuracy-in-expectation
    """
    if task.noise_multiplier is not None:
        raise ConditionError(
            "noise_multiplier must be None for guarantee='markov': the failure is paid from a"
            " budget"
        )
    epsilon = task.target.epsilon
    delta = task.target.delta
    left = delta - delta_with_failure(0.0, failure, epsilon, "per_side") * (1 + 1e-12)
    if not left > 0:
        raise ConditionError(
            f"failure must be below delta / (1 + e^epsilon) = {delta / (1 + math.exp(epsilon)):.3g}"
            f" (got {failure:g})"
        )
    draft = _draft(task, secure, expected_accuracy=expected_accuracy, failure=failure)
    return _with_gaussian(draft, mode, left)
