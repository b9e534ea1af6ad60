"""Rows in private units, for loops: centered and scaled by what is measured before the first step, in the same budget.

    x = clip((raw - m) B/r, B),   then   <w, x> + b = <w', raw> + b - <w', m>,   w' = w B/r,   for rows that are not cut

The plan has the public numbers of the measurement, and noise for what it leaves of the budget; `standardize` charges
it, measures, maps the data set, and takes the units out of the weights afterwards. The mechanism is that of the
estimators, `estimators.preparation`; with users the rows of each weigh 1 together.

Differs from the paper in: it is not there. Source: docs/proofs/preparation.md#loops
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.accounting.analysis.gaussian import gaussian_epsilon, gaussian_mu
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import Event, Sequential
from torch_dpsco.errors import ConditionError, MissingConstantError, SequenceError, UnitError
from torch_dpsco.estimators.gradient_descent import users_of
from torch_dpsco.estimators.preparation import (
    Preparation,
    PrivatePreparation,
    counts_level,
    level_left,
    number_of_counts,
    share_within,
    sum_level,
)
from torch_dpsco.estimators.records import Records
from torch_dpsco.noise import noise_generator
from torch_dpsco.sampling import PrivateLoader
from torch_dpsco.sampling.loader import user_ids
from torch_dpsco.step.checks import world_size
from torch_dpsco.step.chooser import Given, require_planned
from torch_dpsco.step.plan import PlannedOptimizer, StepPlan

_WITHIN, _WITHIN_REAL = (
    0.9,
    0.98,
)  # of rows within the radius: of labels, and of targets that lie on lines
_MOST_ROWS = 2**31  # for which roundings of sums are bounded


@dataclass(frozen=True, kw_only=True)
class PreparedPlan(StepPlan):
    """Public numbers of a run, rows of which may be put into private units before.

    Args:
        noise_multiplier: noise std on a sum over the clip.
        prepare: what is measured of rows before the first step; None for nothing.
    """

    length: ClassVar[float] = (
        5.0  # norm that prepared rows are clipped to, beside the 1 of a bias
    )

    noise_multiplier: float
    prepare: PrivatePreparation | None = None

    values: ClassVar[tuple[type, ...]] = (Preparation, PrivatePreparation)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prepare and self.secure:
            # PRIVACY: units get noise in floating point (test_exact_noise_of_units_is_refused)
            raise ConditionError(
                f"secure must be None beside prepare='auto' (got {self.secure!r}): units are"
                " measured with noise in floating point"
            )

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        if self.prepare:
            yield "prepared", str(self.prepare)

    def _event_until(self, steps: int | None) -> Event:
        event = super()._event_until(steps)
        if not self.prepare:
            return event
        # PRIVACY: units are released too (test_a_plan_charges_what_it_measures)
        return Sequential((self.prepare.event(self.adjacency), event))


_Plan = TypeVar("_Plan", bound=PreparedPlan)


def measurements(
    budget: Budget | None,
    given: Given,
    *,
    bound_x: float | None,
    dim: int | None,
    real: bool = False,
) -> PrivatePreparation | None:
    """Returns what is measured of rows before a run, by public numbers; None where it does not pay.

    Args:
        budget: of the run.
        given: n, the public number of records or users, and what else is given of the run.
        bound_x: bound on the norm of raw rows.
        dim: of the parameters of one score, its bias included.
        real: whether targets are numbers, to which rows that are cut do not belong.
    """
    if budget is None or given.noise_multiplier is not None or bound_x is None or dim is None:
        raise MissingConstantError(
            "budget, bound_x and dim (the number of parameters, or the model) must be given beside"
            f" prepare='auto', and noise_multiplier not (got {budget}, {bound_x}, {dim} and"
            f" {given.noise_multiplier})"
        )
    require_planned(budget)
    check.positive(bound_x=bound_x)
    mu = gaussian_mu(budget.epsilon, budget.delta)
    rows = sum_level(mu, given.n, dim, budget.adjacency)
    counts = number_of_counts(rows=True, targets=False, spreads=False)
    level = counts_level(mu, given.n, counts)
    if not (rows and level):
        return None
    within = share_within(_WITHIN_REAL if real else _WITHIN, level, given.n, counts)
    return PrivatePreparation(given=Preparation(bound_x), rows=rows, counts=level, within=within)


def rest(budget: Budget | None, prepare: PrivatePreparation | None) -> Budget | None:
    """Returns about what a budget leaves beside what is measured, if anything is: exactly so for Gaussian noise."""
    if not budget or not prepare:
        return budget
    left = level_left(gaussian_mu(budget.epsilon, budget.delta), prepare.level)
    epsilon = gaussian_epsilon(left, budget.delta)
    return Budget(epsilon, budget.delta, adjacency=budget.adjacency, unit=budget.unit)


def with_measurements(
    plan: _Plan, budget: Budget | None, prepare: PrivatePreparation | None
) -> _Plan:
    """Returns the plan of both, with the noise of a plan for `rest`, or more where both together need it."""
    if not budget or not prepare:
        return plan
    made = replace(plan, budget=budget, prepare=prepare)
    # PRIVACY: of both, as the ledger will compose them (test_noise_is_raised_until_both_fit_the_budget)
    while made.epsilon(budget.delta) > budget.epsilon:
        made = replace(made, noise_multiplier=made.noise_multiplier * 1.001)
    return made


class PreparedOptimizer(PlannedOptimizer):
    """Base of optimizers whose plans may measure units of rows before the first step."""

    _plan: PreparedPlan
    units: Preparation | None = None  # that were measured
    _prepared: Dataset[Any] | None = None  # the data set that is in them

    def _start(self, device: torch.device) -> None:
        prepare = self._plan.prepare
        if prepare:
            self.accountant.declare(prepare.event(self.adjacency), 1)
        super()._start(device)

    def loader(self, dataset: Dataset[Any], *args: Any, **drawn: Any) -> PrivateLoader:
        """Returns a loader, see `PrivateOptimizer.loader`, of the data set that `standardize` has returned, if any."""
        if self._plan.prepare and dataset is not self._prepared:
            raise SequenceError(
                "dataset must be in the units that the plan measures: iterate over"
                " prepared = dp.standardize(optimizer, dataset), optimizer.loader(prepared.dataset),"
                " and call prepared.undo(model) at the end; dp.fit does it by itself"
            )
        return super().loader(dataset, *args, **drawn)


class Standardized(NamedTuple):
    """A data set in private units.

    Args:
        dataset: its rows, and the targets as they were.
        units: what was done to each row, released; None for nothing.
    """

    dataset: Dataset[Any]
    units: Preparation | None

    @torch.no_grad()
    def undo(self, layer: nn.Module) -> None:
        """Takes the units out of the weights, once: then the layer is one for raw rows.

        Args:
            layer: that reads the rows; it has a bias.
        """
        if self.units is None:
            return
        layer = require_undone(layer)
        center, scale = self.units.shift_and_scale
        weight = layer.weight.double().cpu() / scale
        layer.bias.sub_((weight @ center).to(layer.bias))
        layer.weight.copy_(weight)


def require_undone(layer: nn.Module) -> nn.Linear:
    """Returns a layer that units can be taken out of; raises ConditionError for others."""
    if not isinstance(layer, nn.Linear) or layer._parameters["bias"] is None:
        raise ConditionError(
            "model must be an nn.Linear with a bias, out of which units can be taken (got"
            f" {type(layer).__name__}); for another one plan with prepare=None"
        )
    return layer


@typed
def standardize(
    optimizer: PreparedOptimizer,
    dataset: Dataset[Any],
    users: Any = None,
    *,
    units: Preparation | None = None,
) -> Standardized:
    """Measures rows privately, as the plan says, and returns the data set in these units: centered, scaled, clipped.

    Charged to the optimizer's ledger before anything is drawn, once: a second call gives the same units. Where the plan
    measures nothing, nothing is charged, and the data set is returned as it is.

    Args:
        optimizer: of a plan with prepare="auto".
        dataset: of (rows (n, d), targets) in memory, all of the records that the run draws from.
        users: the id of the user of each record, for an optimizer that protects users.
        units: those that this run has measured in a process before, to go on without a new charge.

    Raises:
        BudgetExceeded: nothing was drawn.
        ConditionError: the data set is none of tensors.
        UnitError: users are missing, or given where records are protected.

    Guarantee:
        The event `plan.prepare.event(adjacency)`, beside that of the steps; unit and adjacency are the plan's. Assumed:
        fewer than 2^31 rows; the bound on raw rows is public, and enforced by clipping.
        Source: docs/proofs/preparation.md#loops

    Example:
        >>> import torch_dpsco as dp
        >>> data = TensorDataset(torch.rand(4000, 3) / 2 + 0.5, torch.ones(4000, 1))
        >>> model = dp.attach(nn.Linear(3, 1))
        >>> plan = dp.HolderSGD.plan(problem=dp.losses.Logistic().problem(bound_x=2.0, intercept=True), n=4000,
        ...                          epsilon=1.0, delta=1e-6, dim=model, prepare="auto")
        >>> optimizer = dp.HolderSGD(model.parameters(), plan)
        >>> prepared = standardize(optimizer, data)
        >>> bool(prepared.dataset.tensors[0].norm(dim=1).max() < 5.001), len(optimizer.accountant)
        (True, 1)
    """
    prepare = optimizer._plan.prepare
    if not prepare:
        return Standardized(dataset, None)
    tensors: Any = getattr(dataset, "tensors", ())
    if len(tensors) != 2:
        raise ConditionError(
            "dataset must be a TensorDataset of rows (n, d) and targets, to be prepared (got"
            f" {type(dataset).__name__})"
        )
    if (users is None) == (optimizer.oracle.unit == "user"):
        # PRIVACY: without ids each row of a user counts (test_users_are_named_where_they_are_protected)
        raise UnitError(
            "users must be given for an optimizer that protects users, and for no other"
            f" (got {type(users).__name__}; {type(optimizer).__name__} protects"
            f" {optimizer.oracle.unit}s)"
        )
    if world_size() > 1:
        raise ConditionError("prepare must be None in a run of several processes")
    rows, targets = tensors
    units = units or optimizer.units or _measured(optimizer, prepare, rows, users)
    optimizer.units = units
    images = [units(part) for part in rows.split(2**16)]
    prepared = TensorDataset(torch.cat(images).to(rows.dtype), targets)
    optimizer._prepared = prepared
    return Standardized(prepared, units)


def _measured(
    optimizer: PreparedOptimizer, prepare: PrivatePreparation, rows: Tensor, users: Any
) -> Preparation:
    """Returns private units, after charging them."""
    shares = None
    if users is not None:
        # PRIVACY: rows of a user weigh 1 together (test_a_user_moves_units_as_much_as_one_record)
        shares = users_of(user_ids(users, len(rows)).to(rows.device))[1]
    records = Records(rows, rows.new_zeros(len(rows)), shares, prepare=prepare.given)
    # PRIVACY: before anything is drawn (test_units_are_charged_before_they_are_drawn)
    optimizer.accountant.authorize(prepare.event(optimizer.adjacency))
    found = prepare.measure(
        records,
        Preparation(1.0),
        _MOST_ROWS,
        optimizer.adjacency,
        noise_generator(rows.device, None),
    ).rows
    assert found.scale is not None  # of rows that are measured
    length = optimizer._plan.length
    return replace(found, scale=tuple(value / length for value in found.scale), bound_x=length)
