"""Plans: every public number of a run, fixed before anything is spent.

    plan = dp.HolderSGD.plan(problem=problem, n=n, budget=budget)   # the only list of keywords
    print(plan)                                                     # what it promises, costs and assumes
    optimizer = dp.HolderSGD(model.parameters(), plan)

A plan holds no tensor and nothing that was computed from records, so that it may be printed, saved, sent and compared.
"""

from __future__ import annotations

import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch_dpsco import _validate as check
from torch_dpsco import losses
from torch_dpsco._doors import check_fields, typed
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import NO_BUDGET_DELTA, Budget
from torch_dpsco.accounting.designs import (
    Assigned,
    AssignedParts,
    Cyclic,
    Disjoint,
    Fixed,
    Full,
    Parts,
    Poisson,
    Shuffled,
    Undeclared,
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
from torch_dpsco.accounting.report.figures import rounded_up
from torch_dpsco.acts import act
from torch_dpsco.errors import AdjacencyError, ConditionError
from torch_dpsco.losses.base import TableGradBound
from torch_dpsco.problem import Phase, Problem, Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    values: ClassVar[
        tuple[type, ...]
    ] = ()  # frozen dataclasses that fields may hold, beside those of `_VALUES`

    def __post_init__(self) -> None:
        check_fields(self)
        if self.budget is not None:
            object.__setattr__(self, "budget", self.budget.under(self.adjacency))
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
        """Returns a picture: noise beside signal, and epsilon over steps, also with less and more noise.

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

    def __str__(self) -> str:
        rows = [("promise", self._promise()), ("epsilon", self._epsilons()), *self.lines()]
        rows.sort(key=lambda row: _LAST.index(row[0]) if row[0] in _LAST else -1)
        out = [f"{type(self).__name__}: privacy for one {self.unit} ({in_words(self.adjacency)})"]
        for label, text in rows:
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
                f" {target.line})"
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
        own = (kind for kind in _subclasses(losses.TableLoss) if is_dataclass(kind))
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

_VALUES = (
    *(Budget, Problem, Phase, Schedule, TableGradBound),
    *(
        Assigned,
        AssignedParts,
        Cyclic,
        Disjoint,
        Fixed,
        Full,
        Parts,
        Poisson,
        Shuffled,
        Undeclared,
    ),
    *(kind for kind in vars(losses).values() if is_dataclass(kind) and isinstance(kind, type)),
)


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
    if kind is Assigned:  # plans of before, whose noise was that of one release
        given.setdefault("amplification", False)
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(
            f"fields of a saved {kind.__name__} must be its own (got {sorted(given)})"
        ) from error
