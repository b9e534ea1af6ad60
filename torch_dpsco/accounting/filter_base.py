"""The interface of filters, and the planned modes. See `filter_modes` for adaptive ones and `make_filter`.

A filter is a pure function of the budget (fixed in advance) and the ledger: it keeps nothing, so that a refusal cannot
change anything, a cheaper event may still fit, and a resumed run needs the ledger alone. Charging is `Ledger.add`.

Source: docs/proofs/accounting.md#planned-budgets.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

from torch_dpsco.accounting.events import Event, Repeat
from torch_dpsco.accounting.filters import Budget, within
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.accounting.pure_sums import impurity
from torch_dpsco.accounting.report import rounded_up
from torch_dpsco.accounting.search import largest
from torch_dpsco.errors import BudgetExceeded

_MAX_STEPS = 2**40
ULP = 2.0**-52


@dataclass(frozen=True)
class Usage:
    """How much of one resource a ledger uses, of what the budget has."""

    resource: str
    spent: float
    limit: float

    @property
    def fits(self) -> bool:
        """Whether it stays within the limit; not for an infinite or undefined cost."""
        # limits of adaptive modes are rounded down by more than this lets pass
        return within(self.spent, self.limit)

    @property
    def share(self) -> float:
        """Part of the limit in use; inf where there is no limit to use."""
        return self.spent / self.limit if self.limit > 0 else math.inf if self.spent > 0 else 0.0


class Filter(ABC):
    """Decides whether an event fits a budget, given a ledger. Nothing is ever charged here.

    Args:
        budget: fixed before the first event.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    @abstractmethod
    def usages(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> tuple[Usage, ...]:
        """Returns the use of every resource, with the event as if it had been charged `count` more times.

        Raises:
            ValueError: the mode cannot take an event; it is named.
            AdjacencyError: an event has no guarantee under the budget's adjacency.
        """

    def admits(self, ledger: Ledger, event: Event, count: int = 1) -> bool:
        """Returns whether `count` such events fit after those of the ledger; raises as `usages` does."""
        return self._fits(ledger, event, count)

    def _fits(self, ledger: Ledger, event: Event | None, count: int) -> bool:
        # PRIVACY: all, not any (test_an_order_that_still_fits_does_not_save_one_that_does_not)
        return all(usage.fits for usage in self.usages(ledger, event, count))

    def holds(self, ledger: Ledger) -> bool:
        """Returns whether the ledger is within the budget, so that the target is its guarantee."""
        return self._fits(ledger, None, 0)

    def usage(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> Usage:
        """Returns the use of the resource that is closest to its limit."""
        return max(self.usages(ledger, event, count), key=lambda usage: usage.share)

    def max_steps(self, ledger: Ledger, event: Event) -> int:
        """Returns how many such events fit, 0 to 2^40: that many are admitted and one more is not."""
        return largest(lambda count: -1.0 if self.admits(ledger, event, count) else 1.0, _MAX_STEPS)

    def remaining(self, ledger: Ledger) -> str:
        """Returns in words what is left of the resource that is closest to its limit."""
        usage = self.usage(ledger)
        left = max(0.0, usage.limit - usage.spent)
        return f"{left:.6g} of {usage.limit:.6g} left ({usage.resource})"

    def refusal(self, ledger: Ledger, event: Event, count: int = 1) -> str:
        """Returns why the event is refused: what was asked, the limit, what is spent, and how many would fit."""
        budget, uses = self.budget, self.usages(ledger, event, count)
        asked = max((usage for usage in uses if not usage.fits), key=lambda usage: usage.share, default=uses[0])
        spent = next((usage.spent for usage in self.usages(ledger) if usage.resource == asked.resource), 0.0)
        return (
            f"{count} x {event} would bring {asked.resource} to {rounded_up(asked.spent, 6)}, past the budget of "
            f"{asked.limit:.6g} ({budget.mode}, epsilon={budget.epsilon:.6g} at delta={budget.delta:g}, "
            f"{budget.adjacency}); spent {rounded_up(spent, 6)} in {len(ledger)} events, "
            f"remaining {max(0.0, asked.limit - spent):.6g}, room for {self.max_steps(ledger, event)} more of this "
            f"event"
        )


class PlannedFilter(Filter):
    """Parameters fixed in advance, as the accountant sees to: the composed epsilon stays within the target."""

    def usages(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> tuple[Usage, ...]:
        """Returns epsilon."""
        return (Usage("epsilon", self._epsilon(ledger, event, count), self.budget.epsilon),)

    def _fits(self, ledger: Ledger, event: Event | None, count: int) -> bool:
        # any bound decides, the cheap ones first: loss distributions only near the end of the budget
        return self._epsilon(ledger, event, count, enough=self.budget.epsilon) <= self.budget.epsilon

    def _epsilon(
        self, ledger: Ledger, event: Event | None, count: int, method: str = "best", enough: float = 0.0
    ) -> float:
        budget = self.budget
        return ledger.evaluate(budget.delta, budget.adjacency, method, extra=event, count=count, enough=enough).epsilon

    def refusal(self, ledger: Ledger, event: Event, count: int = 1) -> str:
        """Returns why the event is refused, and the least epsilon that would admit it."""
        budget, spent, most = self.budget, self.usage(ledger).spent, self.max_steps(ledger, event)
        asked = rounded_up(self.usage(ledger, event, count).spent, 6)
        return (
            f"{count} x {event} would bring epsilon to {asked}, past the budget of {budget.epsilon:.6g} "
            f"at delta={budget.delta:g} ({budget.adjacency}); spent {rounded_up(spent, 6)} in {len(ledger)} events, "
            f"remaining {max(0.0, budget.epsilon - spent):.6g}, room for {most} more of this event. "
            f"Smallest epsilon that would admit it: {asked}"
        )

    def max_steps(self, ledger: Ledger, event: Event) -> int:
        """Returns how many such events fit, 0 to 2^40, without charging anything."""

        def excess(count: int, method: str = "best") -> float:
            return self._epsilon(ledger, event, count, method) - self.budget.epsilon

        by_renyi = largest(lambda count: excess(count, "rdp"), _MAX_STEPS)  # never more, and fast
        return largest(excess, _MAX_STEPS, guess=by_renyi)


class PureFilter(Filter):
    """delta = 0: the sum of pure epsilons stays within the target. Parameters may depend on what was released before.

    Whatever rule chose the events, the density ratio of the run is at most e to the sum along its path (see
    `pure_sums`). The sum is exact, and may pass the target by 4 units in the last place: what parts of a target that
    are each rounded can come to.
    """

    def usages(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> tuple[Usage, ...]:
        """Returns the sum of pure epsilons, inf if some event has none."""
        # PRIVACY: without a pure epsilon nothing fits (test_no_event_without_a_pure_epsilon_fits_a_budget_at_delta_0)
        return (Usage("epsilon", ledger.pure(self.budget.adjacency, event, count), self.budget.epsilon),)

    def refusal(self, ledger: Ledger, event: Event, count: int = 1) -> str:
        """Returns why the event is refused; names the event that has no pure epsilon, if that is it."""
        culprit = ledger.find_impure(self.budget.adjacency, event, count)
        return super().refusal(ledger, event, count) if culprit is None else f"{count} x {event}: {impurity(culprit)}"


class ScheduledFilter(Filter):
    """Parameters fixed in advance, as declared: each declared event is admitted at most as often as declared.

    The whole schedule fits the target, or the filter is not built. Order and stop may then depend on what was released:
    let V(M) be the largest hockey stick of any rule that runs the declared events M, each once, in an order of its
    choice. Whatever x is first, the rest is a rule for M - x given the output of x, so that V(M) is at most that of x
    composed with the dominating pairs of M - x: by induction, of all of M, in which the order does not matter. An event
    left out is post-processing of one that was run and ignored.

    Raises:
        BudgetExceeded: the schedule as a whole passes the target; nothing was released.
    """

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        assert budget.schedule is not None
        self._plan = Ledger(Repeat(event, steps) for event, steps in budget.schedule)
        self._declared = _counts(self._plan)
        whole = PlannedFilter(budget) if budget.delta > 0 else PureFilter(budget)
        if not whole.holds(self._plan):
            culprit = None if budget.delta > 0 else self._plan.find_impure(budget.adjacency)
            raise BudgetExceeded(
                f"the schedule would bring epsilon to {rounded_up(whole.usage(self._plan).spent, 6)}, past the budget "
                f"of {budget.epsilon:.6g} at delta={budget.delta:g} ({budget.adjacency}); "
                f"{'declare fewer steps' if culprit is None else impurity(culprit)}"
            )

    def usages(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> tuple[Usage, ...]:
        """Returns the steps of every declared event, and of others with the limit 0."""
        asked = _counts(ledger)
        for key, times in _counts(Ledger([Repeat(event, count)]) if event is not None else Ledger()).items():
            asked[key] = asked.get(key, 0) + times
        found = [_steps(key, times, self._declared.get(key, 0)) for key, times in asked.items()]
        found += [_steps(key, 0, limit) for key, limit in self._declared.items() if key not in asked]
        return tuple(found) or (Usage("steps of the schedule", 0.0, 0.0),)

    def usage(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> Usage:
        """Returns the steps of the whole schedule."""
        usages = self.usages(ledger, event, count)
        return Usage("steps of the schedule", sum(u.spent for u in usages), sum(u.limit for u in usages))


_Key: TypeAlias = tuple[str, str, Event]


def _counts(ledger: Ledger) -> dict[_Key, int]:
    return {(partition, part, event): times for partition, part, event, times in ledger.entries()}


def _steps(key: _Key, times: int, limit: int) -> Usage:
    partition, part, event = key
    place = f" on part {part} of {partition}" if partition else ""
    return Usage(f"declared steps of {event}{place}", times, limit)
