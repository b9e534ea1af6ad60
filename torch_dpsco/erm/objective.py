"""Objective perturbation: a random linear term in the objective, solved to a certified accuracy.

    theta = argmin J(w) + <b, w>,   b ~ N(0, sigma^2 I), or of density exp(-g |b|) where epsilon is pure

and, since theta is found approximately, theta_hat + N(0, sigma_out^2 I) is released (AMP). For smooth losses of one
score, whose constants hold at every w of R^d, and softmax; see `theory.objective_perturbation` for the proofs.

Differs from the paper in: it is not there. Iyengar et al. 2019 take half of the output noise that is needed.

Source: docs/proofs/objective.md; Chaudhuri, Monteleoni and Sarwate 2011; Kifer, Smith and Thakurta 2012.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.events import REPLACE_ONE
from torch_dpsco.accounting.objective import objective_curve
from torch_dpsco.accounting.stated import ApproxDP, Pure, RDPCurve
from torch_dpsco.erm.plan import LinearPlan
from torch_dpsco.erm.records import build_objective
from torch_dpsco.erm.task import LinearTask
from torch_dpsco.errors import ConditionError
from torch_dpsco.losses.softmax import SoftmaxCrossEntropy
from torch_dpsco.mechanisms.vector_noise import gaussian_vector, knorm_vector
from torch_dpsco.objectives.records import Records
from torch_dpsco.rng import Source
from torch_dpsco.solvers import SOLVERS, solve
from torch_dpsco.solvers.certificates import project
from torch_dpsco.theory.exact_noise import require_gaussian
from torch_dpsco.theory.objective_perturbation import (
    AMP_MU_OUT,
    AMP_PURE_SHARE,
    amp_noise_std,
    amp_sigma_general,
    amp_sigma_monotone,
    log_det,
    objpert_pure_rate,
    objpert_reg,
    softmax_log_det,
)
from torch_dpsco.theory.output import amp_tolerance, gradient_rounding

__all__ = ["ObjectivePlan", "plan_objective"]


@dataclass(frozen=True, kw_only=True)
class ObjectivePlan(LinearPlan):
    """Public numbers of one release.

    Args:
        noise_scale: std of b, or 1/g.
        distance: that the solver has to certify, tau / reg.
        output_scale: std, or scale of the K-norm's, of the noise on the answer.
        solver: see `solvers.solve`; never trusted.
    """

    noise_scale: float
    distance: float
    output_scale: float
    solver: str = "auto"

    mechanism = "objective"

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
        if isinstance(self.charged, RDPCurve):
            yield "charged", "a Renyi curve, which composes well with others and costs more alone"

    def release(self, solved: Records, accountant: Accountant, generator: Source) -> Tensor:
        """Charges, draws b, solves, adds noise: returns the private vector; see `LinearPlan`."""
        # PRIVACY: charged before b is drawn (test_a_refused_release_draws_nothing)
        accountant.authorize(self.charged)
        draw, dim = knorm_vector if self.task.pure else gaussian_vector, self.task.parameters
        objective = build_objective(self.task, self.reg, solved, draw(dim, self.noise_scale, generator))
        found = solve(objective, self.distance, solver=self.solver)
        return project(found.w + draw(dim, self.output_scale, generator), self.task.radius)


def plan_objective(
    task: LinearTask, charge: str = "approx", secure: str | None = None, solver: str = "auto"
) -> ObjectivePlan:
    """Returns the numbers of objective perturbation for a task.

    Args:
        task: its public numbers.
        charge: what a ledger is told, for delta > 0 and one score: "approx", the (epsilon, delta) of the budget, which
            is exact for a release that stands alone; "curve", a Renyi curve, which composes better with others but
            says more than epsilon for one alone. Noise of your own is charged as a curve.
        secure: None; "exact" is refused, see docs/proofs/exact_gaussian.md.
        solver: see `ObjectivePlan`.

    Raises:
        ConditionError: the loss is not smooth and Lipschitz on R^d, tilted or adversarial, or pure and softmax.
        InfeasibleError: reg is too small for epsilon; the message names the smallest one.

    Guarantee:
        The event of the plan, for the task's adjacency, for the released point.
    """
    lipschitz, smoothness = _constants(task)
    require_gaussian(
        secure, "objective perturbation is proved in a continuous law; use OutputPerturbation, mechanism='output'"
    )
    curve = check.choice(("approx", "curve"), charge=charge) == "curve" or task.noise_multiplier is not None
    ranks = max(1, task.num_scores - 1)  # of a record's second derivative, each of which the determinant pays for
    reg = objpert_reg(task.target.epsilon, ranks * smoothness) if task.reg is None else task.reg
    size = _pure_scale if task.pure else _noise_std
    scale = size(task, reg, lipschitz, smoothness)
    rounding = _rounding(task, reg, scale)
    while task.reg is None and 4 * rounding > 9e-5 * lipschitz:  # a large epsilon asks for less than float64 can solve
        reg *= 2  # b can only be smaller then
        rounding = _rounding(task, reg, scale)
    tolerance = amp_tolerance(lipschitz, rounding)
    noise = size(task, reg, lipschitz, smoothness)
    distance = tolerance / reg
    charged: ApproxDP | Pure | RDPCurve
    if task.pure:
        charged = Pure(task.target.epsilon, (task.adjacency,))
        # PRIVACY: twice: either point may be off (test_the_output_noise_covers_both_approximate_minimizers)
        output = 2 * distance / (AMP_PURE_SHARE * task.target.epsilon) * (1 + 1e-15)
    else:
        output = amp_noise_std(tolerance, reg)
        if curve:
            charged = _event(task, reg, noise, lipschitz, smoothness)
        else:
            charged = ApproxDP(task.target.epsilon, _spent(task.target.delta), (task.adjacency,))
    return ObjectivePlan(
        task=task,
        reg=reg,
        charged=charged,
        noise_scale=noise,
        distance=distance,
        output_scale=output,
        solver=check.choice(SOLVERS, solver=solver),
    )


def _rounding(task: LinearTask, reg: float, scale: float) -> float:
    """Returns what rounding may hide where |b| is not beyond all reason; at run time the actual one is taken off."""
    assert task.lipschitz is not None
    assert task.smoothness is not None
    assert task.problem.loss_at_zero is not None
    dim, most = task.parameters, task.n_max
    linear = scale * (dim + 10 * math.sqrt(dim) if task.pure else math.sqrt(dim) + 10)
    # J(w) <= J(0): reg |w|^2 / 2 <= |b| |w| + n l0
    norm = (linear + math.sqrt(linear * linear + 2 * reg * most * task.problem.loss_at_zero)) / reg
    return gradient_rounding(
        most,
        task.width,
        lipschitz=task.lipschitz,
        smoothness=task.smoothness,
        reg=reg,
        norm=norm,
        weight=most,
        linear=linear,
        score_offset=task.problem.score_offset or 0.0,
    )


def _spent(delta: float) -> float:
    """Returns the delta that is stated: a ledger needs some left to round with."""
    return delta * (1 - 1e-9)


def _constants(task: LinearTask) -> tuple[float, float]:
    if task.tilt or task.attack_radius:
        raise ConditionError("objective perturbation needs a plain sum of losses: use output perturbation here")
    if task.lipschitz is None or task.smoothness is None:
        raise ConditionError(
            f"objective perturbation needs a smooth loss with bounded gradients (got {task.loss!r}): give a "
            f"residual_clip, or use SmoothedHinge or Huber"
        )
    return task.lipschitz, task.smoothness


def _noise_std(task: LinearTask, reg: float, lipschitz: float, smoothness: float) -> float:
    if task.noise_multiplier is not None:
        return task.noise_multiplier * lipschitz
    epsilon, delta = task.target.epsilon, _spent(task.target.delta)
    replaced = task.adjacency == REPLACE_ONE
    moved = (1 + replaced) * lipschitz
    if task.monotone:
        return _monotone_std(epsilon, delta, float(reg), lipschitz, smoothness, task.adjacency)
    if isinstance(task.loss, SoftmaxCrossEntropy):
        classes = task.loss.num_classes
        determinant = softmax_log_det(task.preparation.bound, reg, classes)
        return _general_std(epsilon, delta, determinant, moved, (1 + replaced) * (classes - 1))
    return _general_std(epsilon, delta, log_det(reg, smoothness), moved, 1 + replaced)


@functools.lru_cache(maxsize=256)  # a plan is made more than once, and the quadrature takes a second
def _monotone_std(
    epsilon: float, delta: float, reg: float, lipschitz: float, smoothness: float, adjacency: str
) -> float:
    return amp_sigma_monotone(epsilon, delta, reg, lipschitz, smoothness, AMP_MU_OUT, adjacency)


@functools.lru_cache(maxsize=256)
def _general_std(epsilon: float, delta: float, determinant: float, diameter: float, subspace_dim: int) -> float:
    return amp_sigma_general(epsilon, delta, determinant, diameter, subspace_dim, AMP_MU_OUT)


def _event(task: LinearTask, reg: float, noise: float, lipschitz: float, smoothness: float) -> RDPCurve:
    if isinstance(task.loss, SoftmaxCrossEntropy):
        raise ConditionError("charge must be 'approx' for softmax, of a budget: no curve is proved for several scores")
    return objective_curve(
        noise, reg, lipschitz, smoothness, monotone=task.monotone, mu_out=AMP_MU_OUT, adjacency=task.adjacency
    )


def _pure_scale(task: LinearTask, reg: float, lipschitz: float, smoothness: float) -> float:
    """Returns 1/g, the scale of b for the part of epsilon that it has."""
    if isinstance(task.loss, SoftmaxCrossEntropy):
        raise ConditionError("a pure epsilon is proved for one score only: use output perturbation for softmax")
    epsilon = (1 - AMP_PURE_SHARE) * task.target.epsilon * (1 - 1e-15)
    return 1 / objpert_pure_rate(epsilon, reg, lipschitz, smoothness, task.adjacency) * (1 + 1e-15)
