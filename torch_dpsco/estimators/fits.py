"""One fit of a linear model: its plan carried out on records, charged first.

Source: docs/proofs/output.md, docs/proofs/objective.md, docs/proofs/preparation.md
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.errors import AdjacencyError, ConditionError, UnitError
from torch_dpsco.estimators.gradient_descent import users_of
from torch_dpsco.estimators.preparation import Units
from torch_dpsco.estimators.records import Records, Stored
from torch_dpsco.estimators.task import LinearPlan, LinearTask, make_records, make_stored_records
from torch_dpsco.noise import noise_generator
from torch_dpsco.sampling import fingerprint


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
    if task.tilt or task.attack_radius or not plan.in_parts:
        raise ConditionError(
            f"tilted and adversarial losses, and Lasso, need arrays: {kind}, of plain losses"
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
    measured = task.prepare is not None or codes is not None
    solved = None if measured else plan.solve(records)

    def draw() -> tuple[dict[str, Any], list[float]]:
        if not measured:
            return {}, plan.draw(solved, source).tolist()
        found = task.measured_units(records, source)
        private = records if task.prepare is None else records_in(found)
        answer = plan.draw(plan.solve(private) if codes is None else (private, codes), source)
        return asdict(found), answer.tolist()

    given = (features, targets, weights, users)
    seen = [getattr(part, "noted", part) for part in given if part is not None]
    # PRIVACY: of units and weights, before anything is drawn (test_what_is_measured_is_charged_with_the_release)
    found, answer = ledger.pay(
        plan.event(), plan.to_dict, partial(fingerprint, contents=seen), draw
    )
    if found:
        units = Units.of(found)
    return _fit_of(task, units, torch.tensor(answer, dtype=torch.float64, device=records.device))


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
