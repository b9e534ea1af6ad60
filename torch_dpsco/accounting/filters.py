"""Filters: whether an event still fits into a budget, in planned and in adaptive modes.

A filter is a pure function of the budget (fixed in advance) and the ledger: it keeps nothing, so that a refusal cannot
change anything, a cheaper event may still fit, and a resumed run needs the ledger alone. Charging is `Ledger.add`.

What every adaptive mode rests on: fix two neighboring data sets. Each event, given everything released before it, has a
cost that bounds the divergence of its two output laws, in both directions; for events on parts of a partition the pair
lies in one part, so that its cost is at most the largest over parts. The filter admits an event only while the sum of
the costs stays within a number fixed in advance, on every path. Then, whatever rule chose the events and the stop:

* "gdp": sum of mu_t^2 <= m^2 gives m-GDP (Smith and Thakurta 2022): no overhead over parameters fixed in advance.
* "zcdp": sum of rho_t <= r gives r-zCDP (Whitehouse, Ramdas, Rogers and Wu 2023). Where an event is (xi, rho)-zCDP,
  D_a <= xi + rho a <= (xi + rho) a, and xi + rho is charged.
* "rdp": sum of D_t(a) <= B(a) gives (a, B)-RDP (Feldman and Zrnic 2021), at each order fixed in advance. All orders
  must stay within their budgets. "Continue while SOME order does" is no filter: that order is chosen by the data.
* "rdp-mixture": see `budgets`.
* "pure": see `ledger.store`.

Failures. Let an event hold its cost except with probability p, in the sense of a coupling: both output laws mix, with
weight 1 - p, two laws within the cost. Let w be the product of 1 - p_t along the path, and P', Q' the laws of the whole
run when nothing fails. Then for every set S and t >= 0, as w is the same function of the path on both sides,

    P(S) - t Q(S) <= E_P'[1 - w] + int_S w (dP' - t dQ') <= f + H_t(P', Q')    if 1 - w <= f on every path,

so that the noise is judged at delta - f, where f is the part of delta that the budget sets aside. Failures of the
transcript (union bound: adds p) and on each side (adds (1 + e^epsilon) p) are taken from the same part.

Source: docs/proofs/accounting.md#planned-budgets, docs/proofs/accounting.md#filters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn, TypeAlias, cast

import numpy as np

from torch_dpsco._margin import up
from torch_dpsco.accounting.analysis.rdp import FloatArray, rdp_epsilon_at_order
from torch_dpsco.accounting.budgets import (
    ODOMETER_ORDERS,
    Budget,
    gdp_filter_budget,
    mixture_filter_admits,
    odometer_epsilon,
    renyi_budget,
    within,
    zcdp_filter_budget,
)
from torch_dpsco.accounting.calibrate import largest
from torch_dpsco.accounting.curves import Cost, cost_of, orders_at
from torch_dpsco.accounting.events import Adjacency, Event, Repeat
from torch_dpsco.accounting.ledger import Ledger, impurity
from torch_dpsco.accounting.report.figures import rounded_up
from torch_dpsco.errors import BudgetExceeded, InfeasibleError

_MAX_STEPS = 2**40
_LARGEST_EXPONENT = 700.0  # of a finite power of e
ULP = 2.0**-52


@dataclass(frozen=True)
class Usage:
    """How much of one resource of the budget a ledger uses."""

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
    def usages(
        self, ledger: Ledger, event: Event | None = None, count: int = 1
    ) -> tuple[Usage, ...]:
        """Returns the use of every resource, with the event as if it had been charged `count` more times.

        Raises:
            ValueError: the mode cannot take an event; it is named.
            AdjacencyError: an event has no guarantee under the budget's adjacency.
        """

    def admits(self, ledger: Ledger, event: Event | None, count: int = 1) -> bool:
        """Returns whether `count` such events, if any, fit after those of the ledger; raises as `usages` does."""
        # PRIVACY: all, not any (test_an_order_that_still_fits_does_not_save_one_that_does_not)
        return all(usage.fits for usage in self.usages(ledger, event, count))

    def admits_next(self, ledger: Ledger, event: Event, count: int) -> bool:
        """Returns what `admits` does, for a ledger that is known to be within the budget."""
        return self.admits(ledger, event, count)

    def holds(self, ledger: Ledger) -> bool:
        """Returns whether the ledger is within the budget, so that the target is its guarantee."""
        return self.admits(ledger, None, 0)

    def usage(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> Usage:
        """Returns the use of the resource that is closest to its limit."""
        return max(self.usages(ledger, event, count), key=lambda usage: usage.share)

    def max_steps(self, ledger: Ledger, event: Event) -> int:
        """Returns how many such events fit, 0 to 2^40: that many are admitted and one more is not."""
        return largest(
            lambda count: -1.0 if self.admits(ledger, event, count) else 1.0, _MAX_STEPS
        )

    def refusal(self, ledger: Ledger, event: Event, count: int = 1) -> str:
        """Returns why the event is refused: what was asked, the limit, what is spent, and how many would fit."""
        budget = self.budget
        uses = self.usages(ledger, event, count)
        asked = max(
            (usage for usage in uses if not usage.fits),
            key=lambda usage: usage.share,
            default=uses[0],
        )
        spent = next(
            (usage.spent for usage in self.usages(ledger) if usage.resource == asked.resource),
            0.0,
        )
        return (
            f"{count} x {event} would bring {asked.resource} to {rounded_up(asked.spent, 6)}, past"
            f" the budget of {asked.limit:.6g} ({budget.mode}, epsilon={budget.epsilon:.6g} at"
            f" delta={budget.delta:g}, {budget.adjacency}); spent {rounded_up(spent, 6)} in"
            f" {len(ledger)} events, remaining {max(0.0, asked.limit - spent):.6g}, room for"
            f" {self.max_steps(ledger, event)} more of this event"
        )


class PlannedFilter(Filter):
    """Parameters fixed in advance, which the accountant enforces: the composed epsilon stays within the target."""

    def usages(
        self, ledger: Ledger, event: Event | None = None, count: int = 1
    ) -> tuple[Usage, ...]:
        """Returns epsilon."""
        return (Usage("epsilon", self._epsilon(ledger, event, count), self.budget.epsilon),)

    def admits(self, ledger: Ledger, event: Event | None, count: int = 1) -> bool:
        """Returns whether `count` such events, if any, fit after those of the ledger."""
        # any bound decides, the cheap ones first: loss distributions only near the end of the budget
        return (
            self._epsilon(ledger, event, count, enough=self.budget.epsilon) <= self.budget.epsilon
        )

    def _epsilon(
        self,
        ledger: Ledger,
        event: Event | None,
        count: int,
        method: str = "best",
        enough: float = 0.0,
    ) -> float:
        budget = self.budget
        return ledger.evaluate(
            budget.delta, budget.adjacency, method, extra=event, count=count, enough=enough
        ).epsilon

    def refusal(self, ledger: Ledger, event: Event, count: int = 1) -> str:
        """Returns why the event is refused, and the least epsilon that would admit it."""
        budget = self.budget
        spent = self.usage(ledger).spent
        most = self.max_steps(ledger, event)
        asked = rounded_up(self.usage(ledger, event, count).spent, 6)
        return (
            f"{count} x {event} would bring epsilon to {asked}, past the budget of"
            f" {budget.epsilon:.6g} at delta={budget.delta:g} ({budget.adjacency}); spent"
            f" {rounded_up(spent, 6)} in {len(ledger)} events, remaining"
            f" {max(0.0, budget.epsilon - spent):.6g}, room for {most} more of this event. Smallest"
            f" epsilon that would admit it: {asked}"
            + ("" if budget.risk is None else f". The budget is {budget.target}")
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
    `Ledger.pure`). The sum is exact, and may pass the target by 4 units in the last place: what parts of a target that
    are each rounded can come to.
    """

    def usages(
        self, ledger: Ledger, event: Event | None = None, count: int = 1
    ) -> tuple[Usage, ...]:
        """Returns the sum of pure epsilons, inf if some event has none."""
        # PRIVACY: without a pure epsilon nothing fits (test_no_event_without_a_pure_epsilon_fits_a_budget_at_delta_0)
        return (
            Usage(
                "epsilon", ledger.pure(self.budget.adjacency, event, count), self.budget.epsilon
            ),
        )

    def refusal(self, ledger: Ledger, event: Event, count: int = 1) -> str:
        """Returns why the event is refused; names the event that has no pure epsilon, if that is it."""
        culprit = ledger.find_impure(self.budget.adjacency, event, count)
        return (
            super().refusal(ledger, event, count)
            if culprit is None
            else f"{count} x {event}: {impurity(culprit)}"
        )


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
                "the schedule would bring epsilon to"
                f" {rounded_up(whole.usage(self._plan).spent, 6)}, past the budget of"
                f" {budget.epsilon:.6g} at delta={budget.delta:g} ({budget.adjacency});"
                f" {'declare fewer steps' if culprit is None else impurity(culprit)}"
            )

    def usages(
        self, ledger: Ledger, event: Event | None = None, count: int = 1
    ) -> tuple[Usage, ...]:
        """Returns the steps of every declared event, and of others with the limit 0."""
        asked = _counts(ledger)
        for key, times in _counts(
            Ledger([Repeat(event, count)]) if event is not None else Ledger()
        ).items():
            asked[key] = asked.get(key, 0) + times
        found = [_steps(key, times, self._declared.get(key, 0)) for key, times in asked.items()]
        found += [
            _steps(key, 0, limit) for key, limit in self._declared.items() if key not in asked
        ]
        return tuple(found) or (Usage("steps of the schedule", 0.0, 0.0),)

    def admits_next(self, ledger: Ledger, event: Event, count: int) -> bool:
        """Returns whether what the event changes is declared, which is all that may have come to pass the schedule."""
        changed = ledger.changed(event, count)
        return all(
            times <= self._declared.get((*place, simple), 0)
            for place, counts in changed.items()
            for simple, times in counts.items()
        )

    def usage(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> Usage:
        """Returns the steps of the whole schedule."""
        usages = self.usages(ledger, event, count)
        return Usage(
            "steps of the schedule", sum(u.spent for u in usages), sum(u.limit for u in usages)
        )


_Key: TypeAlias = tuple[str, str, Event]


def _counts(ledger: Ledger) -> dict[_Key, int]:
    return {(partition, part, event): times for partition, part, event, times in ledger.entries()}


def _steps(key: _Key, times: int, limit: int) -> Usage:
    partition, part, event = key
    place = f" on part {part} of {partition}" if partition else ""
    return Usage(f"declared steps of {event}{place}", times, limit)


class AdaptiveFilter(Filter):
    """Parameters chosen from what was released before: sums of costs stay within numbers fixed in advance."""

    level = 0  # of the order grid on which the costs are kept
    takes = ""  # what the mode can take, for messages

    @abstractmethod
    def _uses(self, cost: Cost, rounding: float) -> tuple[Usage, ...] | None:
        """Returns the uses of the mode's resources, times `rounding`; None if some event has no such cost."""

    def _cost(self, ledger: Ledger, event: Event | None, count: int) -> tuple[Cost, float]:
        """Returns the composed cost with a factor that exceeds the rounding of its sum."""
        entries = ledger.size + (event is not None)
        cost = ledger.cost(
            self.budget.adjacency, self.level, event, count if event is not None else 1
        )
        return cost, 1.0 + 2.0 * ULP * max(0, entries - 1)

    def usages(
        self, ledger: Ledger, event: Event | None = None, count: int = 1
    ) -> tuple[Usage, ...]:
        """Returns what the ledger, with further events, has used of the budget."""
        cost, rounding = self._cost(ledger, event, count)
        uses = self._uses(cost, rounding)
        if uses is None:
            self._name_culprit(ledger, event)
        return (*uses, self._failures(cost))

    def holds(self, ledger: Ledger) -> bool:
        """Returns whether the ledger is within the budget; not if the mode cannot take one of its events."""
        uses = self._uses(*self._cost(ledger, None, 0))
        return uses is not None and self.admits(ledger, None, 0)

    def _failures(self, cost: Cost) -> Usage:
        # PRIVACY: what fails is taken from delta in advance (test_failures_are_paid_from_the_part_set_aside)
        sides = 1.0 + math.exp(min(self.budget.epsilon, _LARGEST_EXPONENT))
        spent = cost.failure + cost.transcript + sides * cost.per_side
        # margin: the sums round, for which `Budget.noise_delta` leaves room (docs/proofs/accounting.md#filters)
        return Usage("failure probability", spent, up(self.budget.failure, 1e-12))

    def _name_culprit(self, ledger: Ledger, event: Event | None) -> NoReturn:
        asked = Ledger([event]) if event is not None else Ledger()
        for _, _, simple, _ in (*asked.entries(), *ledger.entries()):
            if self._uses(cost_of(simple, self.budget.adjacency, self.level), 1.0) is None:
                raise ValueError(
                    f"mode {self.budget.mode!r} must be fed {self.takes} (got {simple}); mode 'rdp'"
                    " takes every event"
                )
        raise AssertionError("a sum has a cost if every term has one")


class GDPFilter(AdaptiveFilter):
    """Sum of mu_t^2 within mu(epsilon, delta - failure)^2: exact, no overhead."""

    takes = "unsampled Gaussian noise only"

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        self._limit = gdp_filter_budget(budget.epsilon, budget.noise_delta)

    def _uses(self, cost: Cost, rounding: float) -> tuple[Usage, ...] | None:
        if cost.mu_squared is None:
            return None
        return (Usage("the sum of mu^2", cost.mu_squared * rounding, self._limit),)


class ZCDPFilter(AdaptiveFilter):
    """Sum of rho_t within rho(epsilon, delta - failure)."""

    takes = "events with a rho (unsampled Gaussian noise, or pure)"

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        self._limit = zcdp_filter_budget(budget.epsilon, budget.noise_delta)

    def _uses(self, cost: Cost, rounding: float) -> tuple[Usage, ...] | None:
        if cost.zcdp is None:
            return None
        xi, rho = cost.zcdp
        return (
            Usage("the sum of rho", (xi + rho) * rounding, self._limit),
        )  # xi + rho a <= (xi + rho) a


class RDPOrdersFilter(AdaptiveFilter):
    """At every order fixed in advance, the sum of Renyi costs is within the order's budget.

    Without orders in the budget there is one: the order at which the budget's schedule uses the least share, so that
    runs like it last longest. It depends on the budget alone, and is therefore fixed in advance.

    Raises:
        InfeasibleError: no order leaves a budget for the target.
    """

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        orders = (
            cast("tuple[float, ...]", budget.orders) if budget.orders else (_best_order(budget),)
        )
        self._limits = [
            renyi_budget(order, budget.epsilon, budget.noise_delta) for order in orders
        ]
        self.orders = orders
        self._curve = _OrderReader(orders)
        self.level = self._curve.level

    def _uses(self, cost: Cost, rounding: float) -> tuple[Usage, ...] | None:
        spent = self._curve.read(cost) * rounding
        return tuple(
            Usage(f"the Renyi divergence of order {order:g}", float(value), limit)
            for order, value, limit in zip(self.orders, spent, self._limits, strict=True)
        )


class RDPMixtureFilter(AdaptiveFilter):
    """The mixture of Renyi orders of `budgets`: no order needs to be known, at a small overhead.

    Raises:
        InfeasibleError: not even an empty run meets the target.
    """

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        assert budget.orders is not None
        self.orders = cast("tuple[float, ...]", budget.orders)
        self._curve = _OrderReader(self.orders)
        self.level = self._curve.level
        nothing = np.zeros(len(self.orders))
        if not self._admits_spent(budget.epsilon, nothing):
            floor = self._least_epsilon(nothing)
            raise InfeasibleError(
                f"epsilon must be >= {rounded_up(floor)}, the smallest that these orders grant an"
                f" empty run at delta={budget.noise_delta:g} (got {budget.epsilon:g}); take larger"
                " orders"
            )

    def _admits_spent(self, epsilon: float, spent: FloatArray) -> bool:
        weights = cast("tuple[float, ...] | None", self.budget.weights)
        return mixture_filter_admits(
            epsilon, self.budget.noise_delta, self.orders, spent, weights
        )

    def admits(self, ledger: Ledger, event: Event | None, count: int = 1) -> bool:
        """Returns whether `count` such events, if any, fit after those of the ledger."""
        cost, rounding = self._cost(ledger, event, count)
        return self._failures(cost).fits and self._admits_spent(
            self.budget.epsilon, self._curve.read(cost) * rounding
        )

    def _uses(self, cost: Cost, rounding: float) -> tuple[Usage, ...] | None:
        spent = self._curve.read(cost) * rounding
        return (
            Usage(
                "epsilon of the Renyi mixture", self._least_epsilon(spent), self.budget.epsilon
            ),
        )

    def _least_epsilon(self, spent: FloatArray) -> float:
        """Returns the least target, to 1e-6 relative and rounded up, that would admit these costs."""
        if not np.isfinite(spent).any():
            return math.inf
        high = self.budget.epsilon
        while not self._admits_spent(high, spent):
            if high > 1e300:
                return math.inf
            high *= 2.0
        low = 0.0
        while high - low > 1e-6 * high and high > 1e-12:
            middle = (low + high) / 2.0
            if self._admits_spent(middle, spent):
                high = middle
            else:
                low = middle
        return high


class _OrderReader:
    """Reads a Renyi curve at given orders, from the grid on which costs are kept.

    Between two orders of the grid (a - 1) D_a is convex, as the logarithm of a moment generating function: the chord is
    an upper bound. It is linear in the values at the grid, so that the bound of a sum is the sum of bounds, each fixed
    with its event.
    """

    def __init__(self, orders: Sequence[float]) -> None:
        self._orders = np.asarray(orders, dtype=np.float64)
        self.level = next(
            level for level in range(8) if orders_at(level)[-1] >= self._orders.max()
        )
        grid = orders_at(self.level)
        self._right = np.searchsorted(grid, self._orders)
        self._left = np.where(grid[self._right] == self._orders, self._right, self._right - 1)
        width = np.where(self._left == self._right, 1.0, grid[self._right] - grid[self._left])
        part = np.where(self._left == self._right, 1.0, (self._orders - grid[self._left]) / width)
        self._from_left = (1.0 - part) * (grid[self._left] - 1.0) / (self._orders - 1.0)
        self._from_right = part * (grid[self._right] - 1.0) / (self._orders - 1.0)

    def read(self, cost: Cost) -> FloatArray:
        """Returns an upper bound per order; inf where a neighboring order has none."""
        left = cost.rdp[self._left]
        right = cost.rdp[self._right]
        known = np.isfinite(left) & np.isfinite(right)
        chord = self._from_left * np.where(known, left, 0.0) + self._from_right * np.where(
            known, right, 0.0
        )
        exact = self._left == self._right
        return np.where(known, np.where(exact, right, chord * (1.0 + 16.0 * ULP)), math.inf)


def _best_order(budget: Budget) -> float:
    """Returns the order at which the schedule uses the least share of the budget's Renyi budget."""
    assert budget.schedule is not None
    plan = Ledger(Repeat(event, steps) for event, steps in budget.schedule)
    if not len(plan) or not plan.cost(budget.adjacency).rdp.any():
        raise ValueError(
            "schedule must spend something, so that an order can be chosen for it (got"
            f" {budget.schedule})"
        )
    orders = orders_at(1)
    delta = budget.noise_delta
    orders, cost = orders[orders > 1.01], plan.cost(budget.adjacency, 1).rdp[orders > 1.01]
    overheads = np.array([rdp_epsilon_at_order(0.0, order, delta) for order in orders])
    room = budget.epsilon * (1.0 - 1e-12) - overheads
    usable = (room > 0) & np.isfinite(cost)
    if not usable.any():
        floor = rounded_up(float(overheads[np.isfinite(cost)].min(initial=math.inf)))
        raise InfeasibleError(
            f"epsilon must be > {floor}, the least overhead of an order (got {budget.epsilon:g})"
        )
    share = np.where(usable, cost, math.inf) / np.where(usable, room, 1.0)
    return float(orders[np.argmin(share)])


_MODES: dict[str, type[Filter]] = {
    "planned": PlannedFilter,
    "gdp": GDPFilter,
    "zcdp": ZCDPFilter,
    "rdp": RDPOrdersFilter,
    "rdp-mixture": RDPMixtureFilter,
    "pure": PureFilter,
}


@lru_cache(maxsize=64)
def make_filter(budget: Budget) -> Filter:
    """Returns the filter of a budget's mode.

    Raises:
        BudgetExceeded: a planned schedule passes the target as a whole.
        InfeasibleError: the mode leaves no room at this target; the smallest target is named.
        AdjacencyError: the schedule has no guarantee under the budget's adjacency.

    Guarantee:
        If every event was admitted before its noise was drawn, the run is (epsilon, delta)-DP under the budget's
        adjacency. "planned": for parameters fixed in advance. Adaptive modes: for any choice of events and of the stop
        from what was released before. Source: docs/proofs/accounting.md#filters.

    Example:
        >>> from torch_dpsco.accounting.events import Gaussian
        >>> run, ledger = make_filter(Budget(1.0, 1e-5, mode="gdp")), Ledger()
        >>> loud, quiet = Gaussian(4.0, {"zero_out": 1.0}), Gaussian(10.0, {"zero_out": 1.0})
        >>> ledger.add(loud)
        >>> run.admits(ledger, loud), run.max_steps(ledger, quiet)
        (False, 0)
    """
    if budget.mode == "planned" and budget.schedule is not None:
        return ScheduledFilter(budget)
    if budget.delta == 0:
        return PureFilter(budget)
    return _MODES[budget.mode](budget)


def adaptive_epsilon(
    ledger: Ledger, delta: float, adjacency: Adjacency, budget: Budget | None = None
) -> float:
    """Returns the epsilon to quote at delta for a run whose parameters may depend on what was released.

    The target of an adaptive budget is the guarantee while the ledger is within it and delta is at least its delta.
    Otherwise the odometer: the privacy loss passes the value returned at no time, except with probability delta. The
    composed epsilon of parameters fixed in advance is smaller and is no guarantee here. At delta = 0 the odometer is
    the sum of pure epsilons.

    Args:
        ledger: what was charged.
        delta: in [0, 1).
        adjacency: that of the question.
        budget: that of the run, if it has one.

    Returns:
        epsilon >= 0; inf where the failures of events are more than was set aside in advance.

    Raises:
        InfeasibleError: delta is 0 and some event has no pure epsilon.
    """
    target = (
        budget is not None
        and budget.adaptive
        and budget.adjacency == adjacency
        and delta >= budget.delta
    )
    if budget is not None and target and make_filter(budget).holds(ledger):
        return budget.epsilon
    if delta == 0:
        return ledger.epsilon(delta, adjacency)
    reader = _OrderReader(ODOMETER_ORDERS)
    cost = ledger.cost(adjacency, reader.level)
    entries = ledger.size
    kept = 0.0 if budget is None else budget.failure * (1.0 + 1e-12)
    kept = kept if kept < delta else 0.0  # then no failure at all is granted
    if cost.per_side or cost.failure + cost.transcript > kept:
        return math.inf
    if not cost.rdp.any():
        return 0.0
    return odometer_epsilon(
        ODOMETER_ORDERS, reader.read(cost) * (1.0 + 2.0 * ULP * entries), delta - kept
    )
