"""Objective perturbation: a random linear term in the objective, solved to a certified accuracy.

    theta = argmin J(w) + <b, w>,   b ~ N(0, sigma^2 I), or of density exp(-g |b|) where epsilon is pure

and, since theta is found approximately, theta_hat + N(0, sigma_out^2 I) is released (AMP). For smooth losses of one
score, whose constants hold at every w of R^d, and softmax; see `accounting.analysis.objective` for the proofs.

Differs from the paper in: it is not there. Iyengar et al. 2019 take half of the output noise that is needed.

Source: docs/proofs/objective.md; Chaudhuri, Monteleoni and Sarwate 2011; Kifer, Smith and Thakurta 2012.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.objective import (
    AMP_MU_OUT,
    AMP_PURE_SHARE,
    Change,
    amp_delta,
    amp_noise_std,
    amp_sigma,
    hessian_sensitivity,
    log_det,
    noise_reg,
    objpert_pure_rate,
    objpert_reg,
    softmax_log_det,
    spare_epsilon,
)
from torch_dpsco.accounting.analysis.rounding import DOUBLE, up
from torch_dpsco.accounting.curves import objective_curve
from torch_dpsco.accounting.events import REPLACE_ONE, ApproxDP, Pure, RDPCurve
from torch_dpsco.errors import ConditionError, InfeasibleError
from torch_dpsco.estimators.records import Records, project, sum_terms
from torch_dpsco.estimators.solvers import amp_tolerance, solve
from torch_dpsco.estimators.task import LinearPlan, LinearTask, build_objective, weight_guess
from torch_dpsco.noise import Source, gaussian_vector
from torch_dpsco.step.exact_noise import knorm_vector, symmetric_noise


@dataclass(frozen=True, kw_only=True)
class ObjectivePlan(LinearPlan):
    """Public numbers of one release.

    Args:
        noise_scale: std of b, or 1/g.
        charge: "approx" or "curve", see `plan_objective`.
    """

    noise_scale: float
    charge: str = "approx"

    mechanism = "objective"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.choice(("approx", "curve"), charge=self.charge)
        check.positive(noise_scale=self.noise_scale)
        if self.task.num_scores > 1 and (self.curve or self.task.pure):
            raise ConditionError(
                "charge must be 'approx' for softmax, of a budget with delta > 0 (use output"
                " perturbation for others): no curve and no pure epsilon is proved for several"
                " scores"
            )
        if self.curve and self.task.noise_multiplier is None:
            # it costs more than the budget that its noise was chosen for, where it stands alone
            object.__setattr__(self, "budget", None)
        self.distance  # noqa: B018  raises where nothing is proved, or rounding would hide it

    @property
    def curve(self) -> bool:
        """Whether a Renyi curve is charged."""
        return not self.task.pure and (
            self.charge == "curve" or self.task.noise_multiplier is not None
        )

    @cached_property
    def distance(self) -> float:
        """What the solver has to certify, tau / reg."""
        tolerance = amp_tolerance(
            _constants(self.task)[0], _rounding(self.task, self.reg, self.noise_scale)
        )
        return tolerance / self.reg

    @property
    def output_scale(self) -> float:
        """Std of the noise on the answer, or scale of the K-norm's."""
        return _output_scale(self.task, self.distance)

    def _event(self) -> ApproxDP | Pure | RDPCurve:
        return (
            self.own_event()
        )  # with what is measured before it: both are in one law of the loss

    def own_event(self) -> ApproxDP | Pure | RDPCurve:
        """Returns what was asked for, or what the noise costs where that is more."""
        task = self.task
        if task.pure:
            lipschitz, smoothness = _constants(task)
            determinant = log_det(self.reg, smoothness)
            moved = (1 + (task.adjacency == REPLACE_ONE)) * lipschitz
            parts = moved / self.noise_scale, 2 * self.distance / self.output_scale
            # margin: quotients and sum are rounded up, by the next number (docs/proofs/rounding.md#model-of-arithmetic)
            spent = math.fsum([determinant, *(math.nextafter(part, math.inf) for part in parts)])
            spent = math.nextafter(spent, math.inf)
            # PRIVACY: the epsilon of both noises (test_an_edited_plan_is_refused_or_charges_what_it_draws)
            return Pure(max(task.target.epsilon, spent), (task.adjacency,))
        change = _change(task, self.reg)
        if self.curve:
            return _curve(self.noise_scale, change, _mu_out(task), task.adjacency)
        epsilon = task.target.epsilon
        # PRIVACY: the delta of the noise that is drawn (test_an_edited_plan_is_refused_or_charges_what_it_draws)
        spent = _amp_delta(epsilon, self.noise_scale, change, _mu_out(task))
        return ApproxDP(epsilon, max(_spent(task.target.delta), spent), (task.adjacency,))

    @property
    def noise_and_signal(self) -> tuple[float, float, str]:
        """As in `LinearPlan`."""
        task = self.task
        assert task.lipschitz is not None  # of plan_objective
        std = self.noise_scale * (math.sqrt(task.parameters + 1) if task.pure else 1.0)
        return std, task.n * task.lipschitz, "the sum of all gradients"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        if self.curve:
            yield (
                "charged",
                "a Renyi curve, which composes well with others and costs more alone",
            )

    @property
    def hessian_scale(self) -> float:
        """Std of the noise on the diagonal of the Hessian, sqrt(2) times that of its other entries; 0 for no release.

        Source: docs/proofs/inference.md#a-hessian-at-the-answer
        """
        moved = hessian_sensitivity(_constants(self.task)[1], self.task.adjacency)
        task = self.task
        if not task.curvature:
            return 0.0
        most = task.most_records
        reach = task.width * task.preparation.bound * _norm(task, self.reg, self.noise_scale)
        # PRIVACY: sums and scores are rounded, in both data sets (test_rounding_is_in_the_noise_of_the_hessian)
        rounding = 1 + 4 * most * (sum_terms(most) + 64 * task.width + 80 + 8 * reach) * DOUBLE
        # margin: of the quotient (docs/proofs/rounding.md#model-of-arithmetic)
        return up(moved * rounding / task.curvature, 1e-15)

    def draw(self, solved: Records, generator: Source) -> Tensor:
        """Draws b, solves, adds noise: returns the private vector, then a Hessian, if it is paid for."""
        draw = knorm_vector if self.task.pure else gaussian_vector
        dim = self.task.parameters
        objective = build_objective(
            self.task, self.reg, solved, draw(dim, self.noise_scale, generator)
        )
        found = solve(objective, self.distance)
        answer = project(found.w + draw(dim, self.output_scale, generator), self.task.radius)
        if not self.task.curvature:
            return answer
        # PRIVACY: at what is released, not at the secret point (test_the_hessian_is_that_at_the_answer)
        hessian = build_objective(self.task, 0.0, solved).hessian(answer)
        noise = symmetric_noise(
            dim, self.hessian_scale, self.hessian_scale / math.sqrt(2), generator
        )
        return torch.cat([answer, (hessian + noise).flatten()])


_LARGEST_REG = 1e15  # beyond, the rounding of sums alone is too large


def plan_objective(task: LinearTask, charge: str = "approx") -> ObjectivePlan:
    """Returns the numbers of objective perturbation for a task.

    Args:
        task: its public numbers.
        charge: what a ledger is told, for delta > 0 and one score: "approx", the (epsilon, delta) of the budget, which
            is exact for a release that stands alone; "curve", a Renyi curve, which composes better with others but
            says more than epsilon for one alone. Noise of your own is charged as a curve.

    Raises:
        ConditionError: the loss is not smooth and Lipschitz on R^d, tilted or adversarial, or pure and softmax.
        InfeasibleError: reg is too small for epsilon; the message names the smallest one.

    Guarantee:
        The event of the plan, for the task's adjacency, for the released point.
    """
    _, smoothness = _constants(task)
    ranks = max(
        1, task.num_scores - 1
    )  # of a record's second derivative, each of which the determinant pays for
    reg = objpert_reg(task.target.epsilon, ranks * smoothness) if task.reg is None else task.reg
    if (
        task.reg is None and ranks == 1 and not task.pure and not task.curvature
    ):  # its bias is subtracted there
        reg = max(reg, noise_reg(_scale(task, reg), task.parameters, weight_guess(task)))
    try:
        scale = _scale(task, reg)
    except InfeasibleError as error:
        if not task.curvature:
            raise
        raise InfeasibleError(
            f"{error}; or give intervals a smaller share of the budget"
        ) from error
    while task.reg is None and not _solvable(task, reg, scale):
        reg *= 2  # b can only be smaller then
        if reg > _LARGEST_REG:
            raise InfeasibleError(
                f"n_max={task.n_max} records are more than a gradient in float64 can be certified"
                " for: n_max must be smaller (below about 1e10 in a few dimensions), or take"
                " mechanism='noisy_gd'"
            )
    return ObjectivePlan(
        task=replace(task, reg=reg), noise_scale=_scale(task, reg), charge=charge
    )


def _rounding(task: LinearTask, reg: float, scale: float) -> float:
    """Returns what rounding may hide where |b| is not beyond all reason; at run time the actual one is taken off."""
    assert task.lipschitz is not None
    linear = _linear(task, scale)
    norm = _norm(task, reg, scale)
    return task.gradient_rounding(
        reg, norm, task.lipschitz, dim=task.width, most=task.n_max, linear=linear
    )


def _linear(task: LinearTask, scale: float) -> float:
    """Returns what |b| exceeds with a probability below e^-40 only."""
    dim = task.parameters
    return scale * (dim + 10 * math.sqrt(dim) if task.pure else math.sqrt(dim) + 10)


def _norm(task: LinearTask, reg: float, scale: float) -> float:
    """Returns a bound on the norm of the minimizer for such a b."""
    assert task.problem.loss_at_zero is not None
    linear = _linear(task, scale)
    # J(w) <= J(0): reg |w|^2 / 2 <= |b| |w| + n l0
    return (
        linear + math.sqrt(linear * linear + 2 * reg * task.n_max * task.problem.loss_at_zero)
    ) / reg


def _solvable(task: LinearTask, reg: float, scale: float) -> bool:
    """Whether float64 solves so well that the noise on the answer costs less than reg does, on a quadratic model."""
    lipschitz, smoothness = _constants(task)
    try:
        tolerance = amp_tolerance(lipschitz, _rounding(task, reg, scale))
    except ConditionError:
        return False
    squares = (
        task.parameters
        * _output_scale(task, tolerance / reg) ** 2
        * (task.parameters + 1 if task.pure else 1)
    )
    return smoothness * squares <= reg * weight_guess(task) ** 2 / task.n


def _output_scale(task: LinearTask, distance: float) -> float:
    """Returns the scale of the noise on an answer within this distance of the minimizer."""
    if not task.pure:
        return amp_noise_std(distance, 1.0)
    # PRIVACY: twice: either point may be off (test_pure_noise_covers_both_approximate_minimizers); margin of the
    # quotient (docs/proofs/rounding.md#model-of-arithmetic)
    return up(2 * distance / (AMP_PURE_SHARE * task.target.epsilon), 1e-15)


def _spent(delta: float) -> float:
    """Returns the delta that is stated: a ledger needs some left to round with."""
    return delta * (1 - 1e-9)


def _constants(task: LinearTask) -> tuple[float, float]:
    return task.smooth_constants("objective perturbation")


def _scale(task: LinearTask, reg: float) -> float:
    """Returns the std of b, or 1/g for the part of epsilon that it has."""
    lipschitz, smoothness = _constants(task)
    if task.pure:
        epsilon = (1 - AMP_PURE_SHARE) * task.target.epsilon * (1 - 1e-15)
        rate = objpert_pure_rate(epsilon, reg, lipschitz, smoothness, task.adjacency)
        return 1 / rate * (1 + 1e-15)
    if task.noise_multiplier is not None:
        return task.noise_multiplier * lipschitz
    if task.num_scores == 1:
        spare_epsilon(task.target.epsilon, reg, smoothness)  # names the least reg
    delta = _spent(task.target.delta)
    return _amp_sigma(task.target.epsilon, delta, _change(task, reg), _mu_out(task))


def _mu_out(task: LinearTask) -> float:
    """Returns the level of the Gaussian releases beside b: what is measured, and the noise on the answer."""
    # PRIVACY: units and Hessians are released too (test_what_is_measured_is_charged_with_the_release,
    # test_the_hessian_is_charged_with_the_answer); margin of the root (docs/proofs/rounding.md#model-of-arithmetic)
    return up(math.hypot(AMP_MU_OUT, task.measured), 2.0**-50) if task.measured else AMP_MU_OUT


def _change(task: LinearTask, reg: float) -> Change:
    """Returns what one record can do."""
    lipschitz, smoothness = _constants(task)
    replaced = task.adjacency == REPLACE_ONE
    sides = 1 + replaced
    if task.num_scores > 1:
        determinant = softmax_log_det(task.preparation.bound, reg, task.num_scores)
        return Change(determinant, sides * lipschitz, sides * (task.num_scores - 1))
    determinant = log_det(reg, smoothness)
    if task.monotone:
        return Change(determinant, lipschitz, replaced=replaced)
    return Change(determinant, sides * lipschitz, sides)


_cached = functools.lru_cache(
    maxsize=256
)  # a plan is made more than once, and the quadrature takes a second
_amp_sigma = _cached(amp_sigma)
_amp_delta = _cached(amp_delta)
_curve = _cached(objective_curve)
