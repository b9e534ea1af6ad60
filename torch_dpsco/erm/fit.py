"""One function for private linear models: choose a mechanism by public facts, build the objective, release once."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.events import ADD_REMOVE
from torch_dpsco.erm.adassp import plan_adassp, release_adassp
from torch_dpsco.erm.noisy_gd import plan_noisy_gd, release_noisy_gd
from torch_dpsco.erm.objective import plan_objective, release_objective
from torch_dpsco.erm.output import draw_output, plan_output, solve_output
from torch_dpsco.erm.task import LinearTask
from torch_dpsco.errors import AdjacencyError, ConditionError, InfeasibleError, UnitError
from torch_dpsco.losses import Squared
from torch_dpsco.losses.softmax import SoftmaxCrossEntropy
from torch_dpsco.objectives import Adversarial, LinearObjective, SoftmaxObjective, Tilted
from torch_dpsco.objectives.base import Objective
from torch_dpsco.objectives.records import Records
from torch_dpsco.rng import noise_generator
from torch_dpsco.solvers import SOLVERS
from torch_dpsco.theory.exact_noise import asks_exact, require_gaussian

__all__ = ["MECHANISMS", "build_objective", "choose_mechanism", "fit_linear", "make_records", "require_exact_form"]

MECHANISMS = ("auto", "output", "objective", "noisy_gd", "adassp")
_KINK = 1e-3  # public smoothing of the norm of an adversarial objective


_NOT_EXACT = {
    "objective": "objective perturbation is proved in a continuous law; use OutputPerturbation, mechanism='output'",
    "noisy_gd": "NoisyGD hides all its noisy steps but the last; use OutputPerturbation, mechanism='output'",
}


def require_exact_form(mechanism: str, secure: str | None) -> None:
    """Raises ConditionError for a mechanism that has no exact form, where one is asked for."""
    if mechanism in _NOT_EXACT:
        require_gaussian(secure, _NOT_EXACT[mechanism])


def choose_mechanism(task: LinearTask, secure: str | None = None) -> str:
    """Returns the mechanism for a task, by public facts: loss, epsilon, delta, reg; `secure` leaves those it can.

    | loss | delta > 0 | delta = 0 |
    |---|---|---|
    | squared, not clipped | adassp | output |
    | smooth, bounded gradients, one score | objective | objective where reg allows it, else output |
    | softmax | objective | output |
    | with kinks, tilted, adversarial | output | output |

    Source: docs/proofs/objective.md#default-regularizer (the ranking), and docs/choosing.md.

    Example:
        >>> import torch_dpsco as dp
        >>> from torch_dpsco.erm import Preparation
        >>> task = LinearTask(loss=dp.losses.Hinge(), preparation=Preparation(1.0), dim=3, n=100,
        ...                   budget=dp.Budget(1.0, 1e-6))
        >>> choose_mechanism(task)
        'output'
    """
    if task.tilt or task.attack_radius:
        return "output"
    if isinstance(task.loss, Squared) and task.residual_clip is None:
        return "adassp" if task.budget.delta else "output"
    if task.lipschitz is None or task.smoothness is None or asks_exact(secure):
        return "output"
    if task.budget.delta:
        return "objective"
    if isinstance(task.loss, SoftmaxCrossEntropy):
        return "output"
    try:
        plan_objective(task)
    except InfeasibleError:
        return "output"
    return "objective"


def make_records(task: LinearTask, features: Tensor, targets: Tensor, weights: Tensor | None = None) -> Records:
    """Returns the records of a task, prepared when they are read; targets and weights are clipped to their bounds.

    Raises:
        ConditionError: weights for a tilted mean, whose constants have equal ones.
        UnitError: their number is not the public one under replace_one and zero_out, or is above n_max under
            add_remove, which tells that the promise was broken.
        ValueError: shapes or dtypes.
    """
    if features.dim() != 2 or features.shape[1] != task.dim:
        raise ValueError(f"features must be of shape (n, {task.dim}) (got {tuple(features.shape)})")
    if targets.shape != (len(features),) or targets.is_complex():
        raise ValueError(f"targets must be real, ({len(features)},) (got {targets.dtype}, {tuple(targets.shape)})")
    if task.adjacency != ADD_REMOVE and len(features) != task.n:
        # PRIVACY: n is public there, and the data must have it (test_another_number_of_records_is_refused)
        raise UnitError(f"features must have n={task.n} records under {task.adjacency} (got {len(features)})")
    if task.adjacency == ADD_REMOVE and len(features) > task.n_max:
        # PRIVACY: contraction and norms of minimizers rest on it (test_more_records_than_promised_are_refused)
        raise UnitError(f"n_max={task.n_max} must be a public cap on the number of records: there are more")
    if weights is not None:
        if task.tilt:
            raise ConditionError("weights must not be given for a tilted mean, whose constants have equal ones")
        # PRIVACY: all constants are those of weight 1 (test_weights_above_one_are_clipped); NaN makes a null record
        weights = weights.double().clamp(0.0, 1.0)
    classes = task.loss.num_classes if isinstance(task.loss, SoftmaxCrossEntropy) else None
    if task.bound_y is not None:
        targets = targets.double().clamp(-task.bound_y, task.bound_y)  # NaN stays: a null record
    elif classes is None:
        # PRIVACY: other labels would be longer gradients (test_a_label_that_is_no_sign_makes_a_null_record)
        signs = targets.double()
        targets = torch.where(signs.abs() == 1, signs, torch.nan)
    return Records(features, targets, weights, num_classes=classes, prepare=task.preparation)


def build_objective(task: LinearTask, reg: float, records: Records, linear_term: Tensor | None = None) -> Objective:
    """Returns the objective of a task: in sum form, but for tilted ones, with a linear term or None."""
    if task.tilt:
        return Tilted(task.loss, records, tilt=task.tilt, reg=reg / task.n, bound_x=task.preparation.bound)
    if task.attack_radius:
        return Adversarial(
            task.loss,  # checked there
            records,
            attack_radius=task.attack_radius,
            reg=reg,
            normalizer=1.0,
            attack_norm=task.attack_norm,
            smoothing=_KINK,
        )
    if isinstance(task.loss, SoftmaxCrossEntropy):
        return SoftmaxObjective(
            records, num_classes=task.loss.num_classes, reg=reg, normalizer=1.0, linear_term=linear_term
        )
    loss = task.loss if task.clipped is None else task.clipped
    return LinearObjective(loss, records, reg=reg, normalizer=1.0, linear_term=linear_term)


def fit_linear(
    task: LinearTask,
    features: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    mechanism: str = "auto",
    solver: str = "auto",
    mode: str = "tight",
    secure: str | None = None,
    accountant: Accountant | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Releases the weights of a private linear model.

    Args:
        task: public numbers.
        features: raw, (n, d), floating point.
        targets: (n,) real, +-1, or class numbers.
        weights: (n,) of the losses, a private part of the records, clipped to [0, 1]; None for ones. A loss times a
            weight <= 1 has the constants of the loss, so that no noise changes.
        mechanism: "auto" (`choose_mechanism`), "output", "objective", "noisy_gd" or "adassp".
        solver: of output and objective perturbation, see `solvers.solve`; never trusted.
        mode: "tight" or "paper" (output, adassp).
        secure: "exact" for noise drawn in integers (output, adassp; delta > 0), which "auto" then chooses from.
        accountant: ledger to charge; default a new one with the task's budget.
        generator: noise generator of your own; repeatable, so for tests only (warns).

    Returns:
        (K, width) float64, K = 1 or the number of classes; the last column is the intercept's, to be multiplied by
        the constant of the preparation.

    Raises:
        BudgetExceeded: nothing was drawn.
        ConditionError: the mechanism does not cover the task.

    Guarantee:
        The budget of the task, for the weights. Unit: one row. What is assumed: public numbers that are public; under
        replace_one and zero_out n, under add_remove n_max where gradients are bounded by the minimizer's norm.
    """
    chosen, solver = check.choice(MECHANISMS, mechanism=mechanism), check.choice(SOLVERS, solver=solver)
    chosen = choose_mechanism(task, secure) if chosen == "auto" else chosen
    require_exact_form(chosen, secure)
    ledger = Accountant(task.budget) if accountant is None else accountant
    ledger.require_unit("example")
    if ledger.adjacency != task.adjacency:
        # PRIVACY: a cost under one adjacency bounds nothing under another
        # (test_a_ledger_of_another_adjacency_is_refused)
        raise AdjacencyError(f"accountant must have the adjacency {task.adjacency!r} (got {ledger.adjacency!r})")
    records = make_records(task, features, targets, weights)
    noise = noise_generator(records.device, generator)
    if chosen == "adassp":
        answer = release_adassp(records, plan_adassp(task, mode, secure), ledger, noise)
    elif chosen == "noisy_gd":
        plan = plan_noisy_gd(task)
        answer = release_noisy_gd(build_objective(task, plan.reg, records), plan, ledger, noise)
    elif chosen == "objective":
        planned = plan_objective(task)
        build = partial(build_objective, task, planned.reg, records)
        answer = release_objective(build, planned, task.parameters, ledger, noise, solver=solver)
    else:
        output = plan_output(task, mode, secure)
        point = solve_output(build_objective(task, output.reg, records), output, solver)
        answer = draw_output(point, output, ledger, noise)
    return answer.reshape(task.num_scores, task.width)
