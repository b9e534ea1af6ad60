"""Budgets, and the filters that decide before an event whether it still fits.

Parameters are either fixed in advance or chosen during the run, and the two need different arithmetic:

* "planned": noise, rates and numbers of steps are fixed in advance: the accountant refuses what was not planned before
  the first release (see `planning`). An event is admitted while the composed epsilon stays within the target. Stopping
  early because of what was released is post-processing of the planned run, so that the target (not the smaller epsilon
  of the steps made) is then the guarantee. A stop decided by private data in any other way (a validation loss) is a
  release of its own. At delta = 0 the composed epsilon is the sum of pure epsilons, which bounds adaptive runs too;
  nothing without one is admitted (no Gaussian noise).
* "gdp", "rdp": adaptive. Every parameter may be chosen from everything released before, and so may the stop; the target
  holds all the same, because the budget was fixed in advance.

A filter is a pure function of the budget (fixed in advance) and the ledger: it keeps nothing, so that a refusal cannot
change anything, a cheaper event may still fit, and a resumed run needs the ledger alone. Charging is `Ledger.add`.

What every adaptive mode rests on: fix two neighboring data sets. Each event, given everything released before it, has a
cost that bounds the divergence of its two output laws, in both directions; for events on parts of a partition the pair
lies in one part, so that its cost is at most the largest over parts. The filter admits an event only while the sum of
the costs stays within a number fixed in advance, on every path. Then, whatever rule chose the events and the stop:

* "gdp": sum of mu_t^2 <= m^2 gives m-GDP (Smith and Thakurta 2022): no overhead over parameters fixed in advance.
* "rdp": let L be the privacy loss of the releases so far and S_a the sum of their Renyi costs at order a. For K fixed
  orders, M = sum over a of e^((a - 1) (L - S_a)) / K is a nonnegative supermartingale of mean at most 1. If, where the
  run stops, delta/K sum_a e^((a-1) (l - S_a)) >= 1 - e^(epsilon - l) for every l > epsilon, then
  (1 - e^(epsilon - L))_+ <= delta M, and optional stopping bounds its mean, the hockey stick, by delta. The costs only
  grow, so that the condition is checked before each event with the event included.

Without a budget there is the odometer: by Ville's inequality M < 1/delta for ever, except with probability delta, so
that L <= epsilon_t at all times t, where epsilon_t solves sum_a e^((a-1) (epsilon_t - S_a)) = K/delta.

A release that may fail has no cost in adaptive modes.

Source: docs/proofs/accounting.md#planned-budgets, docs/proofs/accounting.md#filters,
docs/proofs/accounting.md#odometer-and-mixture-filter, docs/proofs/accounting.md#budgets-for-a-risk; Feldman and Zrnic
2021; Whitehouse, Ramdas, Rogers and Wu 2023; Smith and Thakurta 2022.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from torch_dpsco import _validate as check
from torch_dpsco import shown
from torch_dpsco._validate import check_fields, in_our_words, typed
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.analysis.rdp import FloatArray, curve_of
from torch_dpsco.accounting.analysis.risk import line_of_advantage, line_of_rates
from torch_dpsco.accounting.calibrate import MOST, largest, rounded_up
from torch_dpsco.accounting.curves import orders_at
from torch_dpsco.accounting.events import ZERO_OUT, Adjacency, Event, in_words
from torch_dpsco.accounting.ledger import Ledger, impurity
from torch_dpsco.errors import InfeasibleError, outside, warn

_TAKES = {
    "planned": "any event",
    "gdp": "unsampled Gaussian noise that cannot fail only",
    "rdp": "any event that cannot fail",
}
MODES = tuple(_TAKES)

_USUAL = {"adjacency": ZERO_OUT, "unit": "example"}  # where neither budget nor plan says them
_MISSING = float("nan")  # told from a nan that was given by identity
NO_BUDGET_DELTA = 1e-6  # of figures where no delta is part of a target

_ROUNDING = 1e-14  # relative to the largest term or exponent of a sum: more than its rounding
_ULP = 2.0**-52


@in_our_words
@dataclass(frozen=True, repr=False)
class Budget:
    """A privacy target (epsilon, delta) with its neighboring relation and the unit that it protects.

    A target may be a risk instead: `advantage`, or `tpr` at `fpr`. Then epsilon and delta are a point that implies it,
    for every mechanism, and with no loss for Gaussian noise; everything is decided by them. Such a delta is no
    probability of failure of the noise, but it is what failures may take: an advantage of 0.1 also allows to publish a
    record with probability 0.1, and hardly limits the true positive rate at a small false positive rate; `tpr` does.

    A budget must not be chosen or changed after the first release.

    Args:
        epsilon: > 0; chosen for a risk.
        delta: in [0, 1); chosen for a risk. 0 is pure differential privacy: mode "planned", and events with a pure
            epsilon, which may then be chosen on the way too.
        adjacency: "zero_out" (a record is emptied; n is public), "replace_one" or "add_remove". None for "zero_out",
            or for what the plan or ledger that takes this budget needs or names (see `under`). Budgets of different
            adjacencies are different promises and are never compared.
        unit: what one record is; "example" or "user". None for "example", or for what the plan or release that takes
            this budget protects.
        mode: "planned": parameters fixed in advance. Adaptive: "gdp" (unsampled Gaussians, no overhead), "rdp" (any
            event that cannot fail).
        advantage: largest (true - false positive rate) of any test which of two neighboring data sets was used, in
            (0, 1), in place of epsilon and delta.
        tpr: largest true positive rate of such a test, in (fpr, 1), in place of epsilon and delta, with `fpr`.
        fpr: its false positive rate, in (0, 1).

    Raises:
        ValueError: a field is out of range, not used by the mode, or leaves no budget.

    Example:
        >>> Budget(1.0, 1e-5, adjacency="add_remove")
        Budget(epsilon=1.0, delta=1e-05, adjacency='add_remove', unit='example', mode='planned')
        >>> Budget(1.0, 1e-5, mode="rdp").adaptive
        True
        >>> Budget(tpr=0.2, fpr=0.01).risk
        'true positive rate 0.2 at false positive rate 0.01'
    """

    epsilon: float = _MISSING
    delta: float = _MISSING
    adjacency: Adjacency = None  # type: ignore[assignment]  # "zero_out", unless a plan names another
    unit: str = None  # type: ignore[assignment]  # "example", unless a plan protects users
    mode: str = "planned"
    advantage: float | None = None
    tpr: float | None = None
    fpr: float | None = None

    def __post_init__(self) -> None:
        missing = [name for name in ("epsilon", "delta") if getattr(self, name) is _MISSING]
        if missing and (self.advantage, self.tpr, self.fpr) == (None, None, None):
            raise TypeError(
                f"{' and '.join(missing)} must be given, or advantage, or tpr and fpr"
            )
        unsaid = {name for name in _USUAL if vars(self)[name] is None}
        object.__setattr__(self, "_unsaid", unsaid)
        for name in unsaid:
            object.__setattr__(self, name, _USUAL[name])
        check_fields(self)
        self._set_line(len(missing) == 2)
        check.fields(self, epsilon=check.positive, delta=check.below_one)
        check.choice(("example", "user"), unit=self.unit)
        check.choice(MODES, mode=self.mode)
        if self.delta == 0 and self.adaptive:
            # PRIVACY: conversions divide by delta (test_a_mode_that_converts_divergences_needs_a_delta)
            raise ValueError(
                f"delta must be > 0 in mode {self.mode!r} (got 0.0): at delta = 0 take mode 'planned', whose sums hold"
                " for events that are chosen on the way too"
            )

    def _set_line(self, free: bool) -> None:
        """Sets epsilon and delta to those that imply the risk, if a risk is the target."""
        if (self.tpr is None) != (self.fpr is None) or (
            self.tpr is not None and self.advantage is not None
        ):
            raise ValueError(
                "advantage must be given alone, or tpr and fpr together (got"
                f" advantage={self.advantage}, tpr={self.tpr}, fpr={self.fpr})"
            )
        if self.risk is None:
            return
        given = [name for name in ("advantage", "tpr", "fpr") if getattr(self, name) is not None]
        check.fields(self, **dict.fromkeys(given, check.positive))
        if self.advantage is not None:
            line = line_of_advantage(self.advantage)
        else:
            assert self.tpr is not None
            assert self.fpr is not None
            line = line_of_rates(self.tpr, self.fpr)
        # PRIVACY: a budget that says one thing and keeps another (test_a_risk_and_another_epsilon_are_refused)
        if not free and (self.epsilon, self.delta) != line:
            raise ValueError(
                f"epsilon and delta must be left out beside a risk (got {self.epsilon} and"
                f" {self.delta})"
            )
        object.__setattr__(self, "epsilon", line[0])
        object.__setattr__(self, "delta", line[1])

    @property
    def adaptive(self) -> bool:
        """Whether parameters may be chosen from what was released before."""
        return self.mode != "planned"

    @property
    def risk(self) -> str | None:
        """The risk that is the target, in words; None where epsilon and delta are."""
        if self.advantage is not None:
            return f"advantage {self.advantage:g}"
        return (
            None
            if self.tpr is None
            else f"true positive rate {self.tpr:g} at false positive rate {self.fpr:g}"
        )

    @property
    def target(self) -> str:
        """What is promised, in words."""
        if self.risk is None:
            return f"epsilon {self.epsilon:.15g} at delta {self.delta:.15g}"
        return f"{self.risk} (by epsilon {self.epsilon:g} at delta {self.delta:g})"

    @property
    def quoted_delta(self) -> float:
        """The delta at which epsilon is quoted: of the target, or 1e-6 where that is a risk, planned in advance."""
        # adaptive modes promise the target alone: at another delta the odometer's epsilon would say more than the risk
        return self.delta if self.risk is None or self.adaptive else NO_BUDGET_DELTA

    @typed
    def under(self, adjacency: Adjacency | None = None, unit: str | None = None) -> Budget:
        """Returns this budget with adjacency and unit, those that it was made without; None leaves them open.

        Example:
            >>> Budget(1.0, 1e-5).under("replace_one").adjacency
            'replace_one'
            >>> Budget(1.0, 1e-5, "add_remove").under("replace_one", "user")
            Budget(epsilon=1.0, delta=1e-05, adjacency='add_remove', unit='user', mode='planned')
        """
        said: dict[str, Any] = {"adjacency": adjacency, "unit": unit}
        left_open = {name: said[name] for name in vars(self)["_unsaid"]}
        return replace(self, **left_open) if any(left_open.values()) else self

    @property
    def says_adjacency(self) -> bool:
        """Whether the budget was made with an adjacency; else that of a plan or ledger takes its place."""
        return "adjacency" not in vars(self)["_unsaid"]

    def __repr__(self) -> str:
        extra = ("advantage", "tpr", "fpr")
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        fields_shown = [
            f"{name}={value!r}"
            for name, value in values.items()
            if name not in extra or value is not None
        ]
        return f"Budget({', '.join(fields_shown)})"

    def _repr_html_(self) -> str:
        rows = [("target", self.target), ("adjacency", in_words(self.adjacency))]
        return shown.table(
            "Budget", [*rows, ("protects", f"one {self.unit}"), ("mode", self.mode)]
        )


def quoted(epsilon: float, delta: float, budget: Budget | None) -> float:
    """Returns the epsilon to quote for a composed one: the budget's, where rounding alone puts it above.

    At delta = 0 only, where parts of the target may sum to a little more than it (0.1 + 0.2 to more than 0.3).
    """
    if budget is None or not budget.delta == delta == 0 or not within(epsilon, budget.epsilon):
        return epsilon
    return min(epsilon, budget.epsilon)


def within(spent: float, limit: float) -> bool:
    """Returns whether a sum stays within its limit up to 4 units in the last place, for the rounding of its terms.

    Example:
        >>> within(0.1 + 0.2, 0.3), within(0.3 * (1 + 2e-15), 0.3), within(math.inf, 1.0)
        (True, False, False)
    """
    return spent <= limit * (1.0 + 2.0**-50)


_IN_PARTS: ContextVar[bool] = ContextVar("in_parts", default=False)


@contextmanager
def parts() -> Iterator[None]:
    """Inside, nothing is said of delta: whoever parted the budget has judged the whole."""
    token = _IN_PARTS.set(True)
    try:
        yield
    finally:
        _IN_PARTS.reset(token)


def warn_of_delta(budget: Budget | None, n: int) -> None:
    """Warns where delta is 1/n or more; called wherever a budget meets a public number of records or users.

    Publishing k of n records that are picked at random is (0, k/n)-differentially private, since one record is among
    them with probability k/n.

    Args:
        budget: None says nothing; nor does one that is stated as a risk, whose delta is no probability.
        n: public number of what the budget protects.
    """
    if budget is None or budget.risk or _IN_PARTS.get() or budget.delta < 1.0 / max(n, 1):
        return
    open_records = max(1, math.floor(budget.delta * n * (1.0 + 1e-12)))
    warn(
        f"delta must be far below 1/n={1 / n:.2g} (got {budget.delta:g}): publishing {open_records}"
        f" of the {n} {budget.unit}s in the open, picked at random, satisfies such a budget; give a"
        f" delta of {0.1 / n:.2g} or less",
        outside(),
    )


ODOMETER_ORDERS = (
    1.25,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    8.0,
    12.0,
    16.0,
    24.0,
    32.0,
    48.0,
    64.0,
    128.0,
    256.0,
)

_GAP = 1e-10  # how far below the minimum of the filter's function its lower bound may lie


class Filter(ABC):
    """Decides whether an event fits a budget, given a ledger. Nothing is ever charged here.

    Args:
        budget: fixed before the first event.
    """

    resource = "epsilon"

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.limit = budget.epsilon

    @abstractmethod
    def spent(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> float:
        """Returns how much is used, with the event as if it had been charged `count` more times.

        Raises:
            AdjacencyError: an event has no guarantee under the budget's adjacency.
        """

    def admits(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> bool:
        """Returns whether `count` such events, if any, fit after those of the ledger; raises as `spent` does."""
        # limits of adaptive modes are rounded down by more than this lets pass
        return within(self.spent(ledger, event, count), self.limit)

    def max_steps(self, ledger: Ledger, event: Event) -> int:
        """Returns how many such events fit, 0 to 2^40: that many are admitted and one more is not."""
        return largest(lambda count: -1.0 if self.admits(ledger, event, count) else 1.0, MOST)

    def refusal(self, ledger: Ledger, event: Event, count: int = 1) -> str:
        """Returns why the event is refused: what was asked, the limit, what is spent, and how many would fit.

        At delta = 0 it names the event that has no pure epsilon, if that is it.
        """
        budget = self.budget
        impure = budget.delta == 0
        culprit = ledger.find_impure(budget.adjacency, event, count) if impure else None
        if culprit is not None:
            return f"{count} x {event}: {impurity(culprit)}"
        spent = self.spent(ledger)
        asked = rounded_up(self.spent(ledger, event, count), 6)
        return (
            f"what is asked for would bring {self.resource} to {asked}, past the budget of"
            f" {self.limit:.6g} ({budget.target}, {budget.adjacency}; mode {budget.mode!r} takes"
            f" {_TAKES[budget.mode]}); spent"
            f" {rounded_up(spent, 6)} in {len(ledger)} events, remaining {max(0.0, self.limit - spent):.6g},"
            f" room for {self.max_steps(ledger, event)} more of this event"
        )


class PlannedFilter(Filter):
    """Parameters fixed in advance, which the accountant enforces: the composed epsilon stays within the target."""

    def spent(
        self,
        ledger: Ledger,
        event: Event | None = None,
        count: int = 1,
        method: str = "best",
        enough: float = 0.0,
    ) -> float:
        """Returns epsilon; see `Ledger.evaluate`."""
        budget = self.budget
        return ledger.evaluate(
            budget.delta, budget.adjacency, method, extra=event, count=count, enough=enough
        ).epsilon

    def admits(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> bool:
        """Returns whether `count` such events, if any, fit after those of the ledger."""
        # any bound decides, the cheap ones first: loss distributions only near the end of the budget
        return self.spent(ledger, event, count, enough=self.limit) <= self.limit

    def max_steps(self, ledger: Ledger, event: Event) -> int:
        """Returns how many such events fit, 0 to 2^40, without charging anything."""

        def excess(count: int, method: str = "best") -> float:
            return self.spent(ledger, event, count, method) - self.limit

        by_renyi = largest(lambda count: excess(count, "rdp"), MOST)  # never more, and fast
        return largest(excess, MOST, guess=by_renyi)


class PureFilter(Filter):
    """delta = 0: the sum of pure epsilons stays within the target. Parameters may depend on what was released before.

    Whatever rule chose the events, the density ratio of the run is at most e to the sum along its path (see
    `Ledger.pure`). The sum is exact, and may pass the target by 4 units in the last place: what parts of a target that
    are each rounded can come to.
    """

    def spent(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> float:
        """Returns the sum of pure epsilons, inf if some event has none."""
        # PRIVACY: without a pure epsilon nothing fits (test_no_event_without_a_pure_epsilon_fits_a_budget_at_delta_0)
        return ledger.pure(self.budget.adjacency, event, count)


class GDPFilter(Filter):
    """Sum of mu_t^2 within mu(epsilon, delta)^2, for parameters chosen on the way: exact, no overhead."""

    resource = "the sum of mu^2"

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        # PRIVACY: the square rounds to nearest (test_the_gdp_budget_is_not_above_the_square_of_mu)
        self.limit = gaussian_mu(budget.epsilon, budget.delta) ** 2 * (1.0 - 3e-16)

    def spent(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> float:
        """Returns the sum of mu^2; inf with other events, and with those that may fail."""
        cost = ledger.cost(self.budget.adjacency, 0, event, count)
        # PRIVACY: (test_what_may_fail_fits_no_adaptive_budget)
        if math.isnan(cost.mu_squared) or cost.fails:
            return math.inf
        return cost.mu_squared * _rounding(ledger, event)


class RDPFilter(Filter):
    """Renyi costs, for parameters chosen on the way: a mixture of orders, of which the best need not be known.

    Raises:
        InfeasibleError: not even an empty run meets the target.
    """

    resource = "epsilon of the Renyi mixture"

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        if not self.admits(Ledger()):
            raise InfeasibleError(
                f"epsilon must be >= {rounded_up(self.spent(Ledger()))}, the smallest that mode 'rdp' grants an empty"
                f" run at delta={budget.delta:g} (got {budget.epsilon:g})"
            )

    def admits(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> bool:
        """Returns whether `count` such events, if any, fit after those of the ledger."""
        costs = _renyi_costs(ledger, self.budget.adjacency, event, count)
        return mixture_filter_admits(self.limit, self.budget.delta, *costs)

    def spent(self, ledger: Ledger, event: Event | None = None, count: int = 1) -> float:
        """Returns the least target, to 1e-6 relative and rounded up, that would admit these costs."""
        costs = _renyi_costs(ledger, self.budget.adjacency, event, count)
        high = self.limit
        while not mixture_filter_admits(high, self.budget.delta, *costs):
            if high > 1e300:
                return math.inf
            high *= 2.0
        return _least(
            lambda target: mixture_filter_admits(target, self.budget.delta, *costs), high, 1e-6
        )


def _least(fits: Callable[[float], bool], high: float, rtol: float = 0.0) -> float:
    """Returns about the least of the numbers that fit, of which `high` is one, and so are all larger ones."""
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high or high - low <= rtol * high:
            break
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def _rounding(ledger: Ledger, event: Event | None = None) -> float:
    """Returns a factor that exceeds the rounding of a sum over the entries of a ledger, and an event."""
    return 1.0 + 2.0 * _ULP * max(0, ledger.size + (event is not None) - 1)


def _renyi_costs(
    ledger: Ledger,
    adjacency: Adjacency,
    event: Event | None = None,
    count: int = 1,
) -> tuple[FloatArray, FloatArray]:
    """Returns the next larger orders of the grid on which costs are kept, and the sums of costs there."""
    orders = orders_at(0)
    places = np.searchsorted(orders, ODOMETER_ORDERS)
    cost = ledger.cost(adjacency, 0, event, count)
    # PRIVACY: (test_what_may_fail_fits_no_adaptive_budget)
    sums = np.full(len(places), math.inf) if cost.fails else cost.rdp[places]
    return orders[places], sums * _rounding(ledger, event)


@lru_cache(maxsize=64)
def make_filter(budget: Budget) -> Filter:
    """Returns the filter of a budget's mode.

    Raises:
        InfeasibleError: the mode leaves no room at this target; the smallest target is named.

    Guarantee:
        If every event was admitted before its noise was drawn, the run is (epsilon, delta)-DP under the budget's
        adjacency. "planned": for parameters fixed in advance, or at delta = 0 any. Adaptive modes: for any choice of
        events and of the stop from what was released before. Source: docs/proofs/accounting.md#filters.

    Example:
        >>> from torch_dpsco.accounting.events import Gaussian
        >>> run, ledger = make_filter(Budget(1.0, 1e-5, mode="gdp")), Ledger()
        >>> loud, quiet = Gaussian(4.0, {"zero_out": 1.0}), Gaussian(10.0, {"zero_out": 1.0})
        >>> ledger.add(loud)
        1
        >>> run.admits(ledger, loud), run.max_steps(ledger, quiet)
        (False, 0)
    """
    if budget.delta == 0:
        return PureFilter(budget)
    modes: dict[str, type[Filter]] = {
        "planned": PlannedFilter,
        "gdp": GDPFilter,
        "rdp": RDPFilter,
    }
    return modes[budget.mode](budget)


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
        epsilon >= 0; inf where some event may fail.

    Raises:
        InfeasibleError: delta is 0 and some event has no pure epsilon.
    """
    if budget is not None and (budget.adaptive or budget.delta == 0):
        asked = budget.adjacency == adjacency and delta >= budget.delta
        if asked and make_filter(budget).admits(ledger):
            return budget.epsilon
    if delta == 0:
        return ledger.epsilon(delta, adjacency)
    orders, costs = _renyi_costs(ledger, adjacency)
    return odometer_epsilon(orders, costs, delta) if costs.any() else 0.0


def odometer_epsilon(orders: ArrayLike, spent: ArrayLike, delta: float) -> float:
    """Returns the privacy loss that is exceeded at no time of an adaptive run, except with probability delta.

    Args:
        orders: (K,) orders, each > 1, fixed before the run.
        spent: (K,) sum of the Renyi costs so far at each order, each >= 0 (inf: the order no longer counts).
        delta: in (0, 1).

    Returns:
        epsilon_t > 0, rounded up; inf if every order is spent.

    Raises:
        ValueError: an argument is out of range or the lengths differ.

    Guarantee: at all times at once, for parameters and stopping rules chosen from earlier outputs.

    Source: docs/proofs/accounting.md#odometer-and-mixture-filter.

    Example:
        >>> orders = np.array(ODOMETER_ORDERS)
        >>> round(odometer_epsilon(orders, 0.1 * orders, delta=1e-5), 4)
        2.4562
    """
    excess, cost, log_weight = _state(orders, spent)
    target = -math.log(check.open_interval(0.0, 1.0, delta=delta))
    # at this epsilon one order alone suffices
    high = float(np.min(cost + (target - log_weight) / excess, initial=math.inf))
    if math.isinf(high):
        return math.inf

    def fits(loss: float) -> bool:
        exponents = log_weight + excess * (loss - cost)
        # margin: a loss that rounding could have helped stays below the root
        # (docs/proofs/accounting.md#odometer-and-mixture-filter)
        return _log_sum(exponents, excess, np.maximum(cost, loss))[0] >= target * (1 + _ROUNDING)

    # PRIVACY: rounded up (test_the_odometer_is_rounded_up)
    return _least(fits, high) * (1 + _ROUNDING)


def mixture_filter_admits(
    epsilon: float,
    delta: float,
    orders: ArrayLike,
    spent: ArrayLike,
) -> bool:
    """Returns whether a run with these costs, the event asked for included, is within (epsilon, delta).

    Args:
        epsilon: >= 0, the budget.
        delta: in (0, 1), the budget.
        orders: (K,) orders, each > 1, fixed before the run.
        spent: (K,) sum of the Renyi costs at each order, the event asked for included.

    Returns:
        True only if the condition of the module's docstring holds; False also within rounding of its boundary.

    Raises:
        ValueError: an argument is out of range or the lengths differ.

    Guarantee: a run is (epsilon, delta)-DP if every event was admitted before its noise was drawn.

    Source: docs/proofs/accounting.md#odometer-and-mixture-filter.

    Example:
        >>> orders = np.array(ODOMETER_ORDERS)
        >>> [mixture_filter_admits(2.2, 1e-5, orders, rho * orders) for rho in (0.1, 0.11)]
        [True, False]
    """
    target = -math.log(check.open_interval(0.0, 1.0, delta=delta))
    return mixture_filter_log_margin(epsilon, orders, spent) >= target * (1 + _ROUNDING)


def mixture_filter_log_margin(epsilon: float, orders: ArrayLike, spent: ArrayLike) -> float:
    """Returns a lower bound on h = min over x > 0 of log(sum_a W_a e^((a-1) x)) - log(1 - e^-x).

    W_a = 1/K e^((a-1) (epsilon - S_a)); e^-h is the smallest delta that the filter can grant at epsilon. Both terms are
    convex in x, so that between a point with a negative slope and one with a positive slope the function lies above
    both tangents: the larger of their least values there is the bound. Bisection on the slope ends when the bound is
    within 1e-10 of a value of the function; values are lowered and slopes padded by their rounding. So the minimum is
    never overestimated.

    Args:
        epsilon: >= 0.
        orders: (K,) orders, each > 1.
        spent: (K,) sum of the Renyi costs at each order, each >= 0.

    Returns:
        h, rounded down, by less than 1e-9 and a relative 1e-12 of its exponents; -inf if every order is spent.

    Raises:
        ValueError: an argument is out of range or the lengths differ.

    Source: docs/proofs/accounting.md#odometer-and-mixture-filter.

    Example:
        >>> h = mixture_filter_log_margin(1.0, [4.0], [0.1])  # one order: the conversion of `rdp`
        >>> from torch_dpsco.accounting.analysis.rdp import rdp_delta
        >>> round(math.exp(-h) / rdp_delta([4.0], [0.1], 1.0), 8)
        1.0
    """
    epsilon = check.nonnegative(epsilon=epsilon)
    excess, cost, log_weight = _state(orders, spent)
    if excess.size == 0:
        return -math.inf
    exponents = log_weight + excess * (epsilon - cost)

    def tangent(x: float) -> tuple[float, float]:
        value, slope = _log_sum(exponents + excess * x, excess, np.maximum(cost, epsilon + x))
        return value - math.log(-math.expm1(-x)), slope - 1 / math.expm1(x)

    # With s the slope of the first term, the minimum is where 1 / (e^x - 1) = s, and s is a mean of the a - 1.
    low = math.log1p(1 / float(excess.max()))
    high = math.log1p(1 / float(excess.min()))
    for _ in range(200):
        left = tangent(low)
        right = tangent(high)
        middle = (low + high) / 2
        # PRIVACY: never overestimated (test_the_margin_is_never_above_the_true_minimum); a slope may be off by rounding
        width = high - low
        below = max(
            left[0] + min(left[1], 0.0) * width,
            right[0] - max(right[1], 0.0) * width,
        )
        bound = below - _ROUNDING * float(excess.max()) * width
        if min(left[0], right[0]) - bound <= _GAP or not low < middle < high:
            break
        if tangent(middle)[1] < 0:
            low = middle
        else:
            high = middle
    return bound


def _state(orders: ArrayLike, spent: ArrayLike) -> tuple[FloatArray, FloatArray, float]:
    """Returns a - 1 and S_a of the orders with a finite cost, and the logarithm of the weight of each order."""
    order, cost = curve_of(orders, spent, "spent")
    kept = np.isfinite(cost)
    return order[kept] - 1, cost[kept], -math.log(order.size)


def _log_sum(exponents: FloatArray, excess: FloatArray, size: FloatArray) -> tuple[float, float]:
    """Returns log(sum_a e^exponent_a), lowered by more than its rounding, and its derivative in epsilon.

    The exponents are differences of terms of at most (a - 1) `size`; those far below the largest do not matter.
    """
    top = float(exponents.max())
    parts = np.exp(exponents - top)
    total = float(parts.sum())
    rounding = float(np.max((np.abs(exponents) + excess * size)[exponents > top - 60]))
    return top + math.log(total) - _ROUNDING * (1 + rounding), float(parts @ excess) / total


def one_budget(budget: Budget | None, epsilon: float | None, delta: float | None) -> Budget:
    """Returns the budget that is given in one of two forms; raises ValueError for none, or both."""
    if budget is None and epsilon is not None and delta is not None:
        return Budget(epsilon, delta)
    if budget is None or (epsilon, delta) != (None, None):
        raise ValueError(
            "epsilon and delta must be given, or a budget, dp.Budget(...), in their place (got"
            f" epsilon={epsilon}, delta={delta}, budget={budget})"
        )
    return budget
