"""Private empirical risk minimization of linear models: solve to certified accuracy, release once.

* `task`: the public numbers, and how rows are prepared;
* `output`, `objective`, `gradient_descent`, `least_squares`, `users`: a plan for each mechanism, which
  solves and releases;
* here: `plan_linear` chooses one by public facts, `fit_linear` carries it out, for `estimators`; the optimizers are
  made of the same plans.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.rounding import asks_exact, require_gaussian
from torch_dpsco.errors import AdjacencyError, ConditionError, InfeasibleError, UnitError
from torch_dpsco.estimators.gradient_descent import plan_noisy_gd, plan_users, users_of
from torch_dpsco.estimators.least_squares import (
    plan_adassp,
    plan_boosted,
    plan_preconditioned_gd,
)
from torch_dpsco.estimators.objective import plan_objective
from torch_dpsco.estimators.output import plan_output
from torch_dpsco.estimators.preparation import (
    Units,
    signal_to_noise,
)
from torch_dpsco.estimators.records import Records, Stored
from torch_dpsco.estimators.task import (
    LinearPlan,
    LinearTask,
    make_records,
    make_stored_records,
)
from torch_dpsco.noise import noise_generator

_ROUNDED = "use mechanism='output', without groups"
# n mu / sqrt(d)
_NOISY_LABELS = 400
_NOISY_TARGETS = 20_000
_DROWNED = 30  # of that, where X'X with noise tells nothing
MECHANISMS = (
    "auto",
    "output",
    "objective",
    "noisy_gd",
    "adassp",
    "boosted_adassp",
    "preconditioned_gd",
)


def choose_mechanism(task: LinearTask, secure: str | None = None) -> str:
    """Returns the mechanism for a task, by public facts: loss, epsilon, delta, reg; `secure` leaves those it can.

    | loss | delta > 0 | delta = 0 |
    |---|---|---|
    | squared, not clipped | boosted_adassp | output |
    | smooth, bounded gradients, real targets, much noise | preconditioned_gd; noisy_gd where X'X drowns | as below |
    | smooth, bounded gradients, labels, much noise | noisy_gd | as below |
    | the same, less noise, or reg is given | objective | objective where reg allows it, else output |
    | softmax | preconditioned_gd; objective for a reg of yours | output |
    | with kinks, tilted, adversarial | output | output |

    Source: docs/proofs/objective.md#default-regularizer, docs/proofs/output.md#how-far-to-go,
    docs/proofs/heads.md#which-mechanism, and docs/choosing.md.

    Example:
        >>> import torch_dpsco as dp
        >>> from torch_dpsco.estimators.preparation import Preparation
        >>> task = LinearTask(loss=dp.losses.Hinge(), preparation=Preparation(1.0), dim=3, n=100,
        ...                   budget=dp.Budget(1.0, 1e-6))
        >>> choose_mechanism(task)
        'output'
    """
    if task.curvature:
        return "adassp" if task.loss.squared else "objective"
    if task.tilt or task.attack_radius or asks_exact(secure):
        return "output"
    if task.loss.squared and task.residual_clip is None:
        return "output" if task.pure else "boosted_adassp"
    classes = task.num_scores > 1
    if classes and not task.pure:
        return "preconditioned_gd" if task.reg is None else "objective"
    if task.lipschitz is None or task.smoothness is None:
        return "output"
    if not task.pure:
        if not _is_noisy(task):
            return "objective"
        real = task.loss.target_kind == "real" and task.clipped is None
        signal = signal_to_noise(task.level, task.n, task.parameters)
        return "preconditioned_gd" if real and signal >= _DROWNED else "noisy_gd"
    if classes:
        return "output"
    try:
        plan_objective(task)
    except InfeasibleError:
        return "output"
    return "objective"


def _is_noisy(task: LinearTask) -> bool:
    """Returns whether noisy gradient descent is better than the determinant that objective perturbation pays for.

    Where epsilon is small, the regularizer that keeps log(1 + beta/reg) a part of it hides more than the noise does.
    """
    if task.reg is not None or task.noise_multiplier is not None:
        return False
    most = _NOISY_TARGETS if task.loss.target_kind == "real" else _NOISY_LABELS
    return signal_to_noise(task.level, task.n, task.parameters) < most


_REASONS = {
    "robust": (
        "n mu / sqrt(d) is so small that the regularizer of objective perturbation would hide more"
        " than noise does, and X'X with noise makes steps few: see"
        " docs/proofs/boosting.md#losses-with-bounded-slopes"
    ),
    "preconditioned_gd": (
        "for classes steps on clipped gradients bear the noise best, whatever n, d, classes and"
        " epsilon: see docs/choosing.md#heads-with-many-classes"
    ),
    "noisy_gd": (
        "n mu / sqrt(d) is so small that the regularizer of objective perturbation would hide more"
        " than noise does: see docs/proofs/output.md#how-far-to-go"
    ),
}


def plan_linear(
    task: LinearTask,
    mechanism: str = "auto",
    secure: str | None = None,
) -> LinearPlan:
    """Returns the plan of one release of a private linear model.

    Args:
        task: public numbers.
        mechanism: "auto" (`choose_mechanism`) or one of `MECHANISMS`.
        secure: "exact" for noise drawn in integers (output; delta > 0), which "auto" then chooses.

    Raises:
        ConditionError: the mechanism does not cover the task.
    """
    check.choice(MECHANISMS, mechanism=mechanism)
    if task.budget is not None and task.budget.unit == "user":
        check.choice(("auto", "noisy_gd"), mechanism=mechanism)
        require_gaussian(secure, _ROUNDED)
        if task.lipschitz is None or task.num_scores > 1:
            raise ConditionError(
                "groups need a loss of one score with bounded gradients, which LogisticRegression,"
                f" LinearSVC, HuberRegressor and QuantileRegressor have (got {task.loss!r})"
            )
        return plan_users(task)
    if mechanism == "auto":
        chosen = choose_mechanism(task, secure)
        plan = plan_linear(task, chosen, secure)
        robust = chosen == "preconditioned_gd" and task.num_scores == 1
        return replace(plan, reason=_REASONS.get("robust" if robust else chosen, ""))
    if mechanism == "output":
        return plan_output(task, secure)
    require_gaussian(secure, _ROUNDED)
    if mechanism == "adassp":
        return plan_adassp(task)
    if mechanism == "noisy_gd":
        return plan_noisy_gd(task, released="all" if task.reg is None else "last")
    if mechanism == "objective":
        return plan_objective(task)
    return plan_boosted(task) if mechanism == "boosted_adassp" else plan_preconditioned_gd(task)


class LinearFit(NamedTuple):
    """What a fit releases.

    Args:
        weights: (K, width) float64, K = 1 or the number of classes; the last column is the intercept's, to be
            multiplied by the constant of the preparation. They are for rows and targets in these units:
        units: public, or released too.
        hessian: (width, width) of the sum of losses at the weights, with noise, where `LinearTask.curvature` is not 0.
        moments: with noise, of the squared loss then: X'y and the sum of squared targets (width + 1,).
    """

    weights: Tensor
    units: Units
    hessian: Tensor | None = None
    moments: Tensor | None = None


def require_sums(plan: LinearPlan) -> None:
    """Raises ConditionError unless all that a plan reads of the records are sums, as of records that come in blocks."""
    task = plan.task
    kind = "records in blocks, and sparse rows, give sums only"
    if plan.unit == "user":
        raise ConditionError(
            f"groups must be None: {kind}, and a user's rows may be in any block. Fit arrays"
        )
    if task.tilt or task.attack_radius:
        raise ConditionError(
            f"tilted and adversarial losses need arrays: {kind}, of plain losses"
        )


def fit_linear(
    plan: LinearPlan,
    features: Tensor | Stored,
    targets: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    users: Tensor | None = None,
    accountant: Accountant | None = None,
    generator: torch.Generator | None = None,
) -> LinearFit:
    """Releases the weights of a private linear model.

    Args:
        plan: from `plan_linear`.
        features: raw, (n, d), floating point; or blocks or partitions of records, with all that belongs to them.
        targets: (n,) real, +-1, or class numbers; None beside blocks.
        weights: (n,) of the losses, a private part of the records, clipped to [0, 1]; None for ones. A loss times a
            weight <= 1 has the constants of the loss, so that no noise changes.
        users: (n,) integer ids of the user of each row, with a plan of `gradient_descent.plan_users`, and only then.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own; repeatable, so for tests only (warns).

    Raises:
        BudgetExceeded: nothing was drawn.
        ConditionError: blocks, for what is not made of sums over records, see `require_sums`.

    Guarantee:
        The event of the plan, for weights, units and Hessian. Unit: one row. What is assumed: public numbers that are
        public; under replace_one and zero_out n, under add_remove n_max where gradients are bounded by the norm of a
        minimizer.
    """
    task = plan.task
    if not isinstance(features, Tensor):
        require_sums(plan)
    ledger = plan.ledger() if accountant is None else accountant
    _require_unit(plan, ledger, users)
    codes = None
    units = Units(task.preparation)
    if users is not None and isinstance(features, Tensor):
        codes, shares = users_of(users.to(features.device))
        # PRIVACY: the weights of a user's rows add up to at most 1 (test_a_fit_weighs_the_rows_of_a_user_as_one_record)
        weights = shares if weights is None else weights.double().clamp(0.0, 1.0) * shares

    def records_in(measured: Units | None) -> Records:
        if isinstance(features, Stored):
            return make_stored_records(task, features, measured)
        assert targets is not None
        return make_records(task, features, targets, weights, measured, users=codes)

    records = records_in(None)
    source = noise_generator(records.device, generator)
    if task.prepare is not None or codes is not None:
        # PRIVACY: of units and weights, before anything is drawn (test_what_is_measured_is_charged_with_the_release)
        ledger.authorize(plan.event())
        if task.prepare is not None:
            units = task.prepare.measure(
                records, task.preparation, task.most_records, task.adjacency, source
            )
            records = records_in(units)
        answer = plan.draw(plan.solve(records) if codes is None else (records, codes), source)
    else:
        answer = plan.release(plan.solve(records), ledger, source)
    return _fit_of(task, units, answer)


def _require_unit(plan: LinearPlan, ledger: Accountant, users: Tensor | None) -> None:
    """Raises UnitError and AdjacencyError for a ledger or records of another unit or adjacency than the plan's."""
    ledger.require_unit(plan.unit, plan.task.adjacency)
    if ledger.adjacency != plan.task.adjacency:
        # PRIVACY: a cost under one adjacency bounds nothing under another
        # (test_a_ledger_of_another_adjacency_is_refused)
        raise AdjacencyError(
            f"accountant must have the adjacency {plan.task.adjacency!r} (got {ledger.adjacency!r})"
        )
    if (users is None) != (plan.unit == "example"):
        raise UnitError(
            "users must be given with a plan for users, and with it only (the plan's unit is"
            f" {plan.unit!r})"
        )


def _fit_of(task: LinearTask, units: Units, answer: Tensor) -> LinearFit:
    """Returns what a release is made of, of the vector that it draws."""
    weights = answer[: task.parameters].reshape(task.num_scores, task.width)
    if not task.curvature:
        return LinearFit(weights, units)
    squares = task.width**2
    hessian, moments = answer[task.parameters :].tensor_split([squares])
    shape = (task.width, task.width)
    return LinearFit(weights, units, hessian.reshape(shape), moments if len(moments) else None)
