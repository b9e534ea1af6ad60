"""Plans: every public number of a run, fixed before anything is spent.

    plan = dp.HolderSGD.plan(problem=problem, n=n, budget=budget)   # the only list of keywords
    print(plan)                                                     # what it promises, costs and assumes
    optimizer = dp.HolderSGD(model.parameters(), plan)

A plan holds no tensor and nothing that was computed from records, so that it may be printed, saved, sent and compared.

What the plans of optimizers with private steps have in common, and how an optimizer is made from a plan.
"""

from __future__ import annotations

import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from torch_dpsco import _validate as check
from torch_dpsco import shown
from torch_dpsco._validate import check_fields, typed
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import NO_BUDGET_DELTA, Budget, warn_of_delta
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.designs import (
    Assigned,
    Design,
    Full,
    Parts,
)
from torch_dpsco.accounting.events import (
    ADJACENCIES,
    Adjacency,
    Event,
    event_from_json,
    event_to_json,
    in_words,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.acts import act
from torch_dpsco.errors import AdjacencyError, ConditionError
from torch_dpsco.problem import Phase, Problem, Promised, Schedule, TableGradBound
from torch_dpsco.prox import Ball, Identity, Prox
from torch_dpsco.rules import AVERAGES, SGD, Momentum, TorchRule, UpdateRule
from torch_dpsco.sampling.slots import capacity
from torch_dpsco.step import checks
from torch_dpsco.step.oracle import ClippedMean, MeanOracle
from torch_dpsco.step.run import first_charges, planned_event, sizes_are_private
from torch_dpsco.step.step import PrivateOptimizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Ranges = Mapping[str, Callable[..., Any]]
_Self = TypeVar("_Self", bound="Plan")
_VERSION = 1
_LABEL = 12
_WIDTH = 110
_LAST = (
    "assumed",
    "trusted",
    "expected",
    "exact noise",
)  # lines that end every table, in this order


@dataclass(frozen=True, kw_only=True)
class Plan(ABC):
    """Public numbers of a run; a subclass per family adds its own.

    Args:
        budget: target that noise and steps were chosen for; None where they were given.
        adjacency: of the guarantee.
    """

    budget: Budget | None
    adjacency: Adjacency

    unit: ClassVar[str] = "example"
    # frozen dataclasses that fields may hold, beside those of `_VALUES`
    values: ClassVar[tuple[type, ...]] = ()
    # checks of fields, where they are not None
    ranges: ClassVar[Ranges] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__repr__ = Plan.__repr__  # type: ignore[method-assign]  # a dataclass would make its own

    def __post_init__(self) -> None:
        check_fields(self)
        check.ranges(self, self.ranges)
        if self.budget is not None:
            object.__setattr__(self, "budget", self.budget.under(self.adjacency, self.unit))
        promised = (
            (self.adjacency, self.unit)
            if self.budget is None
            else (self.budget.adjacency, self.budget.unit)
        )
        if promised != (self.adjacency, self.unit):
            raise ValueError(
                f"adjacency and unit must be {promised}, the budget's (got"
                f" {(self.adjacency, self.unit)})"
            )

    @abstractmethod
    def event(self) -> Event:
        """Returns everything that the run charges.

        Raises:
            ConditionError: it is not known beforehand: the run has no last step, or a step costs what the iterates make
                it cost.
        """

    @abstractmethod
    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields (label, text) of what is to be said beside the promise: noise, steps, assumptions, expectations."""

    @typed
    def epsilon(self, delta: float | None = None, adjacency: Adjacency | None = None) -> float:
        """Returns what the whole run spends.

        Args:
            delta: in [0, 1); default the budget's.
            adjacency: default the plan's.

        Raises:
            ConditionError: see `event`.
            AdjacencyError: nothing is proved under this adjacency.
            ValueError: delta is needed, since there is no budget.
        """
        if delta is None:
            if self.budget is None:
                raise ValueError(
                    "delta must be given: the plan has noise and steps of yours, and no budget"
                )
            delta = self.budget.quoted_delta
        return Ledger([self.event()]).epsilon(
            check.between(0.0, 1.0, delta=delta), adjacency or self.adjacency
        )

    def ledger(self) -> Accountant:
        """Returns a new ledger with the plan's budget, or with its adjacency and unit alone."""
        if self.budget is not None:
            return Accountant(self.budget)
        return Accountant(adjacency=self.adjacency, unit=self.unit)

    def stages(self) -> Iterator[tuple[int, Event]]:
        """Yields (steps, everything that so many steps charge) for some numbers of steps; nothing for one release."""
        yield from ()

    def noise_shares(self) -> Iterator[tuple[str, float, int | None]]:
        """Yields the noise of each part of the run, as far as the plan knows it.

        Yields:
            (name of the part, std of the noise per coordinate over the largest norm of what it is added to, number of
            coordinates or None).
        """
        yield from ()

    def plot(self) -> Figure:
        """Returns a picture: noise beside signal, and epsilon over steps.

        Raises:
            ImportError: matplotlib is not installed.

        Example:
            >>> import torch_dpsco as dp
            >>> problem = dp.losses.Logistic().problem(bound_x=2.0)
            >>> plan = dp.HolderSGD.plan(problem=problem, n=100, budget=dp.Budget(1.0, 1e-3), batch_size=100, epochs=2)
            >>> [axes.get_title() for axes in plan.plot().axes]
            ['Noise beside signal', 'What is spent']
        """
        figure: Figure = act("plan.plot")(self)
        return figure

    @property
    def shown_delta(self) -> float:
        """The delta at which epsilons are shown: the budget's."""
        return NO_BUDGET_DELTA if self.budget is None else self.budget.quoted_delta

    def __repr__(self) -> str:
        target = "noise of yours" if self.budget is None else self.budget.target
        return shown.line(self, f"{target}, for one {self.unit} ({self.adjacency}); print it")

    def _repr_html_(self) -> str:
        return shown.table(self._title, self._rows())

    @property
    def _title(self) -> str:
        return f"{type(self).__name__}: privacy for one {self.unit} ({in_words(self.adjacency)})"

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("promise", self._promise()), ("epsilon", self._epsilons()), *self.lines()]
        return sorted(rows, key=lambda row: _LAST.index(row[0]) if row[0] in _LAST else -1)

    def __str__(self) -> str:
        out = [self._title]
        for label, text in self._rows():
            out += textwrap.wrap(
                text,
                _WIDTH,
                initial_indent=f"  {label:<{_LABEL}}",
                subsequent_indent=" " * (_LABEL + 2),
            )
        return "\n".join(out)

    def _promise(self) -> str:
        if self.budget is None:
            return "no budget limits the run"
        target = self.budget
        unit = self.unit
        changes = {
            "replace_one": f"replacing one {unit} by any other",
            "add_remove": f"adding or removing one {unit}",
        }
        change = changes.get(self.adjacency, f"replacing one {unit} by an empty one")
        if target.risk:
            return (
                f"no test for {change} does better than {target.risk} (which holds by"
                f" epsilon {target.epsilon:g} at delta {target.delta:g})"
            )
        return (
            f"{change} hardly changes what is released: ({rounded_up(target.epsilon)},"
            f" {rounded_up(target.delta)})-differential privacy"
        )

    def _epsilons(self) -> str:
        delta = self.shown_delta
        found = []
        beyond = ""
        try:
            for adjacency in ADJACENCIES:
                try:
                    epsilon = self.epsilon(delta, adjacency)
                    found.append(f"{adjacency} {rounded_up(epsilon)}")
                    own = self.budget if adjacency == self.adjacency else None
                    if (
                        own
                        and (epsilon if own.risk is None else self.epsilon(own.delta))
                        > own.epsilon
                    ):
                        beyond = "; what would exceed the budget is refused"
                except AdjacencyError:
                    found.append(f"{adjacency} not proved")
        except ConditionError as error:
            return f"not known beforehand: {error}"
        return f"{', '.join(found)} at delta {rounded_up(delta)}{beyond}"

    # -- saving -------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as what JSON holds; `Plan.from_dict` reads it, exactly.

        Raises:
            ValueError: it holds a function of yours (`Problem.exact_grad_bound`).
        """
        row: dict[str, Any] = _encoded(self, self._kinds())
        return {"version": _VERSION, **row}

    @classmethod
    @typed
    def from_dict(cls: type[_Self], row: Mapping[str, Any]) -> _Self:
        """Returns the plan of `to_dict`; raises ValueError for anything else."""
        if row.get("version") != _VERSION:
            raise ValueError(
                f"version of a saved plan must be {_VERSION} (got {row.get('version')!r})"
            )
        act("plan.kinds")()  # the library's, whose files are imported on first use
        kinds = {kind.__name__: kind for kind in _subclasses(cls)}
        kind = kinds.get(row.get("type", ""))
        if kind is None:
            raise ValueError(
                f"type of a saved plan must be one of {', '.join(sorted(kinds))} (got"
                f" {row.get('type')!r})"
            )
        made: _Self = _decoded(
            {key: value for key, value in row.items() if key != "version"}, kind._kinds()
        )
        return made

    @classmethod
    def _kinds(cls) -> dict[str, type]:
        found = _subclasses(Promised) | _subclasses(Design)
        own = (kind for kind in found if is_dataclass(kind))
        return {kind.__name__: kind for kind in (*own, cls, *cls.values, *_VALUES)}


def exact_cost(secure: str | None) -> tuple[str, str]:
    """Returns (label, text) of what exact noise costs, where there is such."""
    more = (
        "up to 9 times the noise's time from 10,000 parameters on, and 0.03 % more of it"
        " (docs/performance.md)"
    )
    return "exact noise", f"{'chosen' if secure else 'on request'}, by secure='exact': {more}"


def passes(number: float) -> str:
    """Returns a number of passes over the data in words."""
    return "1 pass" if number == 1 else f"{number:.3g} passes"


# -- what may be saved -------------------------------------------------------------------------------------------------

_VALUES = (Budget, Problem, Phase, Schedule, TableGradBound)


def _subclasses(kind: type[Any]) -> set[type[Any]]:
    return {kind, *(inner for direct in kind.__subclasses__() for inner in _subclasses(direct))}


def _encoded(value: Any, kinds: Mapping[str, type]) -> Any:
    if isinstance(value, Event):
        return {"type": "event", "event": event_to_json(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"type": "float", "value": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_encoded(item, kinds) for item in value]
    kind = type(value)
    if kinds.get(kind.__name__) is not kind:
        raise ValueError(
            "a plan is saved with values of the library, and losses that are dataclasses (got"
            f" {kind.__name__}: {value!r})"
        )
    own = {
        field.name: _encoded(getattr(value, field.name), kinds)
        for field in fields(value)
        if field.init
    }
    return {"type": kind.__name__, **own}


def _decoded(value: Any, kinds: Mapping[str, type]) -> Any:
    if isinstance(value, list):
        return tuple(_decoded(item, kinds) for item in value)
    if not isinstance(value, Mapping):
        return value
    if value.get("type") == "event":
        return event_from_json(value["event"])
    if value.get("type") == "float":
        return float(value["value"])
    kind = kinds.get(value.get("type", ""))
    if kind is None:
        raise ValueError(f"type must be one of {', '.join(kinds)} (got {value.get('type')!r})")
    given = {name: _decoded(item, kinds) for name, item in value.items() if name != "type"}
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(
            f"fields of a saved {kind.__name__} must be its own (got {sorted(given)})"
        ) from error


_STAGES = 10  # points of a curve over steps


@dataclass(frozen=True, kw_only=True)
class BatchPlan(Plan):
    """Public numbers of a run in batches.

    Args:
        design: how batches are drawn.
        average: which iterates are the answer: "last", "uniform", "weighted" or "ema".
        secure: "exact" for noise in integers on a public grid; None for floating point.
    """

    design: Design
    average: str = "last"
    secure: str | None = None

    ranges: ClassVar[Ranges] = {
        "average": partial(check.choice, AVERAGES),
        "secure": partial(check.choice, (None, "exact")),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        warn_of_delta(self.budget, self.n)

    @property
    def n(self) -> int:
        """Public number of records (or users); a reference under add_remove."""
        return self.design.n

    @property
    def batch_size(self) -> int:
        """Public divisor of a step."""
        return self.design.batch_size


@dataclass(frozen=True, kw_only=True)
class StepPlan(BatchPlan):
    """Public numbers of a run of private steps, whose average is taken where no rule is given.

    Args:
        steps: number of steps; None for no limit but the budget.
        lr: step size, >= 0; steps of size 0 are charged, and move nothing.
        radius: of the ball that the iterates stay in; inf for none.
        reg: lambda of a term (lambda/2)|w|^2 that the other numbers count on.
        momentum: in [0, 1), see `rules.Momentum`; of the rule that is taken where none is given.
    """

    steps: int | None
    lr: float
    radius: float = math.inf
    reg: float = 0.0
    momentum: float = 0.0

    ranges: ClassVar[Ranges] = {
        **BatchPlan.ranges,
        "steps": check.positive_count,
        "lr": check.nonnegative,
        "radius": partial(check.positive, allow_inf=True),
        "reg": check.nonnegative,
        "momentum": check.below_one,
    }

    @abstractmethod
    def oracle(self, prox: Prox) -> MeanOracle:
        """Returns a new oracle with the plan's numbers, for iterates that stay in the feasible set."""

    def rule(self) -> UpdateRule:
        """Returns the update rule that is taken where none is given."""
        return Momentum(self.average, self.momentum) if self.momentum else SGD(self.average)

    def prox(self) -> Prox:
        """Returns the constraint that is taken where none is given."""
        return Ball(self.radius) if math.isfinite(self.radius) else Identity()

    def schedule(self) -> Schedule:
        """Returns the phases of the run."""
        return Schedule((Phase(self.steps),))

    def event(self) -> Event:
        """Returns everything that the run charges, as `Plan.event`."""
        return self._event_until(self.steps)

    def stages(self) -> Iterator[tuple[int, Event]]:
        """Yields what a part of the steps charges; see `Plan.stages`."""
        if self.steps is None:
            self.event()  # raises
            return
        for made in sorted(
            {math.ceil(self.steps * k / _STAGES) for k in range(1, _STAGES + 1)} | {1}
        ):
            yield made, self._event_until(made)

    def noise_shares(self) -> Iterator[tuple[str, float, int | None]]:
        """Yields the noise on means of clipped rows, phase by phase; see `Plan.noise_shares`."""
        members = [
            member
            for member in self.oracle(self.prox()).members
            if isinstance(member, ClippedMean)
        ]
        for k, member in enumerate(members, 1):
            yield (
                "each step" if len(members) == 1 else f"phase {k}",
                member.noise_multiplier / member.batch_size,
                None,
            )

    def _event_until(self, steps: int | None) -> Event:
        oracle = self.oracle(self.prox())
        checks.require_same_parts(oracle, self.design, self.schedule())
        if self.secure:
            oracle.use_exact_noise()
        if any(charge.adaptive for charge in first_charges(oracle, self.design)):
            raise ConditionError("a step costs what the iterates before it make it cost")
        if steps is None:
            raise ConditionError("the run has no last step: give steps=")
        return planned_event(oracle, self.design, 0, steps, "planned")

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what all such plans say; see `Plan.lines`."""
        yield "batches", drawing(self.design, self.unit)
        often = "steps until the budget is spent"
        if self.steps is not None:
            over = passes(_rows(self.design, self.steps) / self.design.n)
            often = f"{self.steps} steps, {over}"
        pace = f"step size {self.lr:g}" + (
            f", momentum {self.momentum:.3g}" if self.momentum else ""
        )
        yield "steps", f"{often}, {pace}, answer: {ANSWERS[self.average]}"
        yield LABELS
        yield from costs(self.oracle(self.prox()), self.design, self.adjacency, self.secure)


LABELS = (
    "labels",
    "0/1, -1/1 and booleans are the same to dp.fit, dp.losses, dp.per_record (not to torch's own)",
)
ANSWERS = {
    "last": "the last iterate",
    "uniform": "the average of all iterates",
    "weighted": "an average weighted by step",
    "ema": "a moving average of the iterates",
}


def costs(
    oracle: MeanOracle, design: Design, adjacency: str, secure: str | None
) -> Iterator[tuple[str, str]]:
    """Yields (label, text) of what filled batches and exact noise cost a run, where there are such.

    Args:
        oracle: a new one, whose noise is made exact.
        design: how batches are drawn.
        adjacency: of the guarantee.
        secure: whether noise is exact, as in `StepPlan`.
    """
    if sizes_are_private(design, adjacency, oracle.unit):
        units = "rows" if oracle.unit == "example" else f"places for {oracle.unit}s"
        yield (
            "filled",
            'draws are filled up, as their size is private: a little ("rounded"; the first step tests'
            f' sizes, for as long as some 100 steps), or to {capacity(design)} {units} ("slots")',
        )
    with suppress(ConditionError):  # there is none
        oracle.use_exact_noise()
        yield exact_cost(secure)


CLIPPED = (
    "assumed",
    "rows do not depend on other records; nothing about moments, since rows are clipped",
)


def expected(risk_bound: float | None) -> Iterator[tuple[str, str]]:
    """Yields (label, text) of a bound on the excess risk, where there is one."""
    if risk_bound is not None:
        yield (
            "expected",
            f"excess risk of the answer at most {risk_bound:.3g}, if the promises hold",
        )


def noise_on_mean(share: float, bound: float, where: str = "") -> tuple[str, str]:
    """Returns (label, text) of noise whose std is a share of the bound on a mean gradient."""
    gradient = f"a mean gradient of norm at most {bound:.3g}{where}"
    return "noise", f"std {share * bound:.3g} per coordinate of {gradient}: {share:.2g} of it"


def drawing(design: Design, unit: str) -> str:
    """Returns in words how batches of a unit are drawn."""
    if isinstance(design, Parts):
        parts = "; then ".join(drawing(part, unit) for part, _ in design.parts)
        return f"{parts}; no {unit} is in two of these parts"
    if isinstance(design, Full):
        return f"all {design.n} {unit}s"
    if isinstance(design, Assigned) and design.amplification:
        batches = (
            f"one of {design.batches} batches of each pass, of {design.n / design.batches:.3g}"
            f" {unit}s on average"
        )
        return f"random allocation: each {unit} in {batches}; who is where, and true sizes, are secret"
    if isinstance(design, Assigned):
        return (
            f"each {unit} in one of {design.batches} batches, of about {design.batch_size}; nothing"
            " is gained by it"
        )
    return f"{type(design).__name__}: {design.batch_size} of {design.n} {unit}s"


def _rows(design: Design, steps: int) -> float:
    """Returns the expected rows of so many steps, of all steps in parts."""
    if isinstance(design, Parts):
        return sum(_rows(part, draws) for part, draws in design.parts)
    if isinstance(design, Assigned):  # batch_size is a divisor, about what a batch holds
        return steps * design.n / design.batches
    return steps * design.batch_size


class PlannedOptimizer(PrivateOptimizer):
    """Base of the named optimizers that make private steps: a plan in, everything else follows.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from the class's own `plan`.
        rule: another update rule, e.g. `rules.TorchRule(torch.optim.Adam(...))`; it has averages of its own.
        prox: constraint or penalty, in place of the plan's.
        reg: lambda of (lambda/2)|w|^2, see `PrivateOptimizer`; default the plan's.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).
    """

    plans: ClassVar[type[StepPlan]]
    _fixed = PrivateOptimizer._fixed | {"plan"}

    def __init__(
        self,
        params: Any,
        plan: Any = None,
        *,
        rule: UpdateRule | None = None,
        prox: Prox | None = None,
        reg: float | None = None,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        **moved: Any,
    ) -> None:
        accountant = self._ledger(plan, moved, accountant)
        prox = plan.prox() if prox is None else prox
        self._plan = self.__dict__["plan"] = (
            plan  # over the class method: optimizer.plan is what it has made
        )
        super().__init__(
            params,
            plan.lr,
            oracle=plan.oracle(prox),
            rule=plan.rule() if rule is None else rule,
            design=plan.design,
            schedule=plan.schedule(),
            prox=prox,
            reg=plan.reg if reg is None else reg,
            accountant=accountant,
            adjacency=plan.adjacency,
            generator=generator,
            secure=plan.secure,
        )
        if getattr(plan, "risk_bound", None) is None:
            return  # as for most nets: there is no theorem to void
        self._lrs = [plan.lr] * len(self.param_groups)
        if isinstance(rule, TorchRule) and not rule.plain:
            checks.warn_of_void_theorem(
                f"{type(rule.optimizer).__name__} on private means is post-processing", 3
            )
