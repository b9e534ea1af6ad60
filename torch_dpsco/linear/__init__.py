"""Private empirical risk minimization of linear models: solve to certified accuracy, release once.

* `task`: the public numbers, and how rows are prepared;
* `output`, `objective`, `noisy_gd`, `adassp`, `preconditioned_gd`: a plan for each mechanism, which solves and
  releases;
* here: `plan_linear` chooses one by public facts, `fit_linear` carries it out, for `estimators`; the optimizers are
  made of the same plans.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.errors import AdjacencyError, InfeasibleError
from torch_dpsco.linear.adassp import plan_adassp
from torch_dpsco.linear.noisy_gd import plan_noisy_gd
from torch_dpsco.linear.objective import plan_objective
from torch_dpsco.linear.output import plan_output
from torch_dpsco.linear.preconditioned_gd import plan_preconditioned_gd
from torch_dpsco.linear.solvers import SOLVERS
from torch_dpsco.linear.task import LinearPlan, LinearTask, Preparation, make_records
from torch_dpsco.losses import Squared
from torch_dpsco.losses.classification import SoftmaxCrossEntropy
from torch_dpsco.rng import noise_generator
from torch_dpsco.theory.rounding import asks_exact

__all__ = ["MECHANISMS", "LinearTask", "Preparation", "choose_mechanism", "fit_linear", "plan_linear"]

MECHANISMS = ("auto", "output", "objective", "noisy_gd", "adassp", "preconditioned_gd")


def choose_mechanism(task: LinearTask, secure: str | None = None) -> str:
    """Returns the mechanism for a task, by public facts: loss, epsilon, delta, reg; `secure` leaves those it can.

    | loss | delta > 0 | delta = 0 |
    |---|---|---|
    | squared, not clipped | adassp | output |
    | smooth, bounded gradients, one score | objective | objective where reg allows it, else output |
    | softmax | preconditioned_gd; objective for a reg of yours; adassp for exact noise | output |
    | with kinks, tilted, adversarial | output | output |

    Source: docs/proofs/objective.md#default-regularizer, docs/proofs/heads.md#which-mechanism (the ranking), and
    docs/choosing.md.

    Example:
        >>> import torch_dpsco as dp
        >>> from torch_dpsco.linear import Preparation
        >>> task = LinearTask(loss=dp.losses.Hinge(), preparation=Preparation(1.0), dim=3, n=100,
        ...                   budget=dp.Budget(1.0, 1e-6))
        >>> choose_mechanism(task)
        'output'
    """
    if task.tilt or task.attack_radius:
        return "output"
    if isinstance(task.loss, Squared) and task.residual_clip is None:
        return "output" if task.pure else "adassp"
    classes, exact = isinstance(task.loss, SoftmaxCrossEntropy), asks_exact(secure)
    if classes and not task.pure:
        return "adassp" if exact else "preconditioned_gd" if task.reg is None else "objective"
    if task.lipschitz is None or task.smoothness is None or exact:
        return "output"
    if not task.pure:
        return "objective"
    if classes:
        return "output"
    try:
        plan_objective(task)
    except InfeasibleError:
        return "output"
    return "objective"


def plan_linear(
    task: LinearTask, mechanism: str = "auto", *, mode: str = "tight", secure: str | None = None, solver: str = "auto"
) -> LinearPlan:
    """Returns the plan of one release of a private linear model.

    Args:
        task: public numbers.
        mechanism: "auto" (`choose_mechanism`) or one of `MECHANISMS`.
        mode: "tight" or "paper" (output, adassp).
        secure: "exact" for noise drawn in integers (output, adassp; delta > 0), which "auto" then chooses from.
        solver: of output and objective perturbation, see `linear.solvers.solve`; never trusted.

    Raises:
        ConditionError: the mechanism does not cover the task.
    """
    asked, solver = check.choice(MECHANISMS, mechanism=mechanism), check.choice(SOLVERS, solver=solver)
    chosen = choose_mechanism(task, secure) if asked == "auto" else asked
    if chosen == "adassp":
        return plan_adassp(task, mode, secure)
    if chosen == "preconditioned_gd":
        plan = plan_preconditioned_gd(task, secure)
        return replace(plan, reason=_MANY_SCORES) if asked == "auto" else plan
    if chosen == "noisy_gd":
        return plan_noisy_gd(task, secure=secure)
    if chosen == "objective":
        return plan_objective(task, secure=secure, solver=solver)
    return plan_output(task, mode, secure, solver)


_MANY_SCORES = (
    "for classes steps on clipped gradients bear the noise best, whatever n, d, classes and epsilon: see "
    "docs/choosing.md#heads-with-many-classes"
)


def fit_linear(
    plan: LinearPlan,
    features: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    accountant: Accountant | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Releases the weights of a private linear model.

    Args:
        plan: from `plan_linear`.
        features: raw, (n, d), floating point.
        targets: (n,) real, +-1, or class numbers.
        weights: (n,) of the losses, a private part of the records, clipped to [0, 1]; None for ones. A loss times a
            weight <= 1 has the constants of the loss, so that no noise changes.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own; repeatable, so for tests only (warns).

    Returns:
        (K, width) float64, K = 1 or the number of classes; the last column is the intercept's, to be multiplied by
        the constant of the preparation.

    Raises:
        BudgetExceeded: nothing was drawn.

    Guarantee:
        The event of the plan, for the weights. Unit: one row. What is assumed: public numbers that are public; under
        replace_one and zero_out n, under add_remove n_max where gradients are bounded by the minimizer's norm.
    """
    task = plan.task
    ledger = plan.ledger() if accountant is None else accountant
    ledger.require_unit("example")
    if ledger.adjacency != task.adjacency:
        # PRIVACY: a cost under one adjacency bounds nothing under another
        # (test_a_ledger_of_another_adjacency_is_refused)
        raise AdjacencyError(f"accountant must have the adjacency {task.adjacency!r} (got {ledger.adjacency!r})")
    records = make_records(task, features, targets, weights)
    answer = plan.release(plan.solve(records), ledger, noise_generator(records.device, generator))
    return answer.reshape(task.num_scores, task.width)
