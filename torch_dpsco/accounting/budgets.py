"""Budgets, and what a filter needs to decide before an event whether it still fits.

Parameters are either fixed in advance or chosen during the run, and the two need different arithmetic:

* "planned": noise, rates and numbers of steps are fixed in advance: the accountant refuses what was not planned before
  the first release (see `plans`). An event is admitted while the composed epsilon stays within the target. Stopping
  early because of what was released is post-processing of the planned run, so that the target (not the smaller epsilon
  of the steps made) is then the guarantee. A stop decided by private data in any other way (a validation loss) is a
  release of its own. With a `schedule` only declared events are admitted. At delta = 0 the composed epsilon is the sum
  of pure epsilons; nothing without one is admitted (no Gaussian noise).
* "gdp", "zcdp", "rdp", "rdp-mixture", and "pure" at delta = 0: adaptive. Every parameter may be chosen from everything
  released before, and so may the stop; the target holds all the same, because the budget was fixed in advance. See
  `filter_modes`.

Source: docs/proofs/accounting.md#planned-budgets, docs/proofs/accounting.md#filters,
docs/proofs/accounting.md#budgets-for-a-risk.

Whether delta is small beside the number of records that it is to protect.

Privacy loss of runs whose parameters, and whose end, are chosen from earlier outputs.

Let L be the privacy loss of the releases so far and S_a the sum of their Renyi costs at order a, each cost chosen by
the past. For fixed weights w_a that sum to 1,

    M = sum over a of w_a e^((a - 1) (L - S_a))

is a nonnegative supermartingale of mean at most 1. Three statements follow; the orders and weights must be fixed before
the first release, and the costs hold in both directions.

* Odometer. By Ville's inequality M < 1/delta for ever, except with probability delta: L <= epsilon_t at all times t,
  where epsilon_t solves sum_a w_a e^((a-1) (epsilon_t - S_a)) = 1/delta.
* Filter over a mixture of orders. If, where the run stops, delta sum_a w_a e^((a-1) (l - S_a)) >= 1 - e^(epsilon - l)
  for every l > epsilon, then (1 - e^(epsilon - L))_+ <= delta M, and optional stopping bounds its mean, the hockey
  stick, by delta: the run is (epsilon, delta)-DP. The costs only grow, so that the condition is checked before each
  event with the event included.
* Filters of one order, of zCDP and of unsampled Gaussians compare a sum with a fixed budget: no overhead.

Source: docs/proofs/accounting.md#odometer-and-mixture-filter; Feldman and Zrnic 2021; Whitehouse, Ramdas, Rogers and
Wu 2023; Smith and Thakurta 2022.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import ArrayLike

from torch_dpsco import _validate as check
from torch_dpsco._doors import check_fields, in_our_words
from torch_dpsco.accounting.analysis.convert import zcdp_rho
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.analysis.quadrature import FloatArray
from torch_dpsco.accounting.analysis.rdp import curve_of, rdp_epsilon_at_order
from torch_dpsco.accounting.analysis.risk import line_of_advantage, line_of_rates
from torch_dpsco.accounting.events import ZERO_OUT, Adjacency, Event
from torch_dpsco.errors import warn

_WITH_DELTA = (
    "gdp",
    "zcdp",
    "rdp",
    "rdp-mixture",
)  # adaptive modes that have no room at delta = 0
ADAPTIVE_MODES = (*_WITH_DELTA, "pure")
MODES = ("planned", *ADAPTIVE_MODES)

_MISSING = float("nan")  # told from a nan that was given by identity
NO_BUDGET_DELTA = 1e-6  # of figures where no delta is part of a target

_ROUNDING = 1e-14  # relative to the largest term or exponent of a sum: more than its rounding
_SLACK = 1.0 + 1e-12  # rounding of a sum of spends
_LEAST_ORDER = 1.01  # closer to 1 the conversion multiplies errors of the curve by more than 100
_LARGEST_ORDER = 2.0**20  # of the grid on which curves are kept


@in_our_words
@dataclass(frozen=True, repr=False)
class Budget:
    """A privacy target (epsilon, delta) with its neighboring relation and the unit that it protects.

    A target may be a risk instead: `advantage`, or `tpr` at `fpr`. Then epsilon and delta are a point that implies it,
    for every mechanism, and with no loss for Gaussian noise; everything is decided by them. Such a delta is no
    probability of failure of the noise, but it is what failures may take: an advantage of 0.1 also allows to publish a
    record with probability 0.1, and hardly limits the true positive rate at a small false positive rate; `tpr` does.

    Everything that an adaptive mode compares with is fixed here, before the run: a budget must not be chosen or changed
    after the first release.

    Args:
        epsilon: > 0; chosen for a risk.
        delta: in [0, 1); chosen for a risk. 0 is pure differential privacy: modes "planned" and "pure", and events with
            a pure epsilon.
        adjacency: "zero_out" (a record is emptied; n is public), "replace_one" or "add_remove". None for "zero_out",
            or for what the plan or ledger that takes this budget needs or names (see `under`). Budgets of different
            adjacencies are different promises and are never compared.
        unit: what one record is; "example" or "user".
        mode: "planned": parameters fixed in advance. Adaptive: "gdp" (unsampled Gaussians, no overhead), "zcdp" (what
            has a rho), "rdp" (any event, Renyi orders fixed in advance), "rdp-mixture" (any event, order not known),
            "pure" (delta = 0: what has a pure epsilon).
        orders: Renyi orders. "rdp": one number or several, all of which must stay within their budgets (more orders
            only refuse earlier), or None for the one order that lets the `schedule` run longest. "rdp-mixture": at
            least one; None for those of the odometer.
        weights: of the orders of "rdp-mixture", > 0, with sum 1; None for equal ones.
        failure: adaptive modes: part of delta set aside, in advance, for failure probabilities of events; the noise
            is judged at delta - failure. In [0, delta).
        schedule: (event, steps) pairs. "planned": None takes the plans of optimizers and of `Accountant.declare`;
            otherwise only declared events are admitted, in any order, each at most as often as declared (() admits
            nothing until something is declared, see `declaring`). "rdp": the plan for which the order is chosen; no
            restriction.
        advantage: largest (true - false positive rate) of any test which of two neighboring data sets was used, in
            (0, 1), in place of epsilon and delta. Not in mode "pure".
        tpr: largest true positive rate of such a test, in (fpr, 1), in place of epsilon and delta, with `fpr`.
        fpr: its false positive rate, in (0, 1).

    Raises:
        ValueError: a field is out of range, not used by the mode, or leaves no budget.

    Example:
        >>> Budget(1.0, 1e-5, adjacency="add_remove")
        Budget(epsilon=1.0, delta=1e-05, adjacency='add_remove', unit='example', mode='planned')
        >>> Budget(1.0, 1e-5, mode="rdp", orders=20).adaptive
        True
        >>> Budget(tpr=0.2, fpr=0.01).risk
        'true positive rate 0.2 at false positive rate 0.01'
    """

    epsilon: float = _MISSING
    delta: float = _MISSING
    adjacency: Adjacency = None  # type: ignore[assignment]  # "zero_out", unless a plan names another
    unit: str = "example"
    mode: str = "planned"
    orders: float | Iterable[float] | None = None
    weights: Iterable[float] | None = None
    failure: float = 0.0
    schedule: Iterable[tuple[Event, int]] | None = None
    advantage: float | None = None
    tpr: float | None = None
    fpr: float | None = None

    def __post_init__(self) -> None:
        missing = [name for name in ("epsilon", "delta") if getattr(self, name) is _MISSING]
        if missing and (self.advantage, self.tpr, self.fpr) == (None, None, None):
            raise TypeError(
                f"{' and '.join(missing)} must be given, or advantage, or tpr and fpr"
            )
        unsaid = vars(self)["adjacency"] is None
        object.__setattr__(self, "_unsaid", unsaid)
        if unsaid:
            object.__setattr__(self, "adjacency", ZERO_OUT)
        check_fields(self)
        self._set_line(len(missing) == 2)
        check.fields(self, epsilon=check.positive, delta=check.below_one)
        check.choice(("example", "user"), unit=self.unit)
        check.choice(MODES, mode=self.mode)
        self._check_delta()
        self._check_use()
        check.fields(self, failure=check.nonnegative)
        if self.failure and self.failure >= self.delta:
            raise ValueError(
                f"failure must be < delta={self.delta:g}, of which it is a part (got"
                f" {self.failure})"
            )
        if self.schedule is not None:
            check.fields(self, schedule=_steps)
        if self.orders is not None or self.mode == "rdp-mixture":
            check.fields(self, orders=self._checked_orders)
        if self.weights is not None:
            check.fields(self, weights=self._checked_weights)

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
        if self.mode == "pure":
            raise ValueError(
                "advantage, tpr and fpr must not be given in mode 'pure': give epsilon, and delta=0"
            )
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

    def _check_delta(self) -> None:
        """Raises ValueError if the mode does not take this delta."""
        if self.delta == 0 and self.mode in _WITH_DELTA:
            # PRIVACY: their conversions divide by delta (test_a_mode_that_converts_divergences_needs_a_delta)
            raise ValueError(
                f"delta must be > 0 in mode {self.mode!r} (got 0.0); at delta = 0 take mode 'pure'"
            )
        if self.delta > 0 and self.mode == "pure":
            raise ValueError(f"delta must be 0 in mode 'pure' (got {self.delta})")

    def _check_use(self) -> None:
        """Raises ValueError if a field is given that the mode does not use: it would promise what is not done."""
        used = {
            "orders": ("rdp", "rdp-mixture"),
            "weights": ("rdp-mixture",),
            "failure": _WITH_DELTA,
            "schedule": ("planned", "rdp"),
        }
        for name, modes in used.items():
            value = getattr(self, name)
            if self.mode not in modes and value is not None and value != 0.0:
                raise ValueError(
                    f"{name} must not be given in mode {self.mode!r} (got {value!r})"
                )
        if self.mode == "rdp" and self.orders is None and not self.schedule:
            raise ValueError(
                "orders must be given in mode 'rdp' (got None), or a schedule of (event, steps) to"
                " choose one order for"
            )

    def _checked_orders(self, orders: float | Iterable[float] | None) -> tuple[float, ...]:
        given = (
            ODOMETER_ORDERS
            if orders is None
            else orders
            if isinstance(orders, Iterable)
            else (orders,)
        )
        found = tuple(check.order(orders=order) for order in given)
        if not found or len(set(found)) < len(found):
            raise ValueError(
                f"orders must be different from each other, >= 1 of them (got {found})"
            )
        for order in found:
            if not _LEAST_ORDER < order <= _LARGEST_ORDER:
                raise ValueError(f"orders must be in ({_LEAST_ORDER}, 2^20] (got {order})")
            if self.mode == "rdp":
                renyi_budget(order, self.epsilon, self.noise_delta)
        return found

    def _checked_weights(self, weights: Iterable[float]) -> tuple[float, ...]:
        found = tuple(check.positive(weights=weight) for weight in weights)
        if self.orders is None or len(found) != len(tuple(self.orders)):  # type: ignore[arg-type]
            raise ValueError(
                f"weights must be as many as orders, which must be given (got {len(found)})"
            )
        if abs(math.fsum(found) - 1.0) > 1e-12:
            raise ValueError(f"weights must sum to 1 (got {math.fsum(found)})")
        return found

    @property
    def adaptive(self) -> bool:
        """Whether parameters may be chosen from what was released before."""
        return self.mode in ADAPTIVE_MODES

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
        return self.line if self.risk is None else f"{self.risk} (by {self.line})"

    @property
    def line(self) -> str:
        """Epsilon and delta in words."""
        return f"epsilon {self.epsilon:g} at delta {self.delta:g}"

    @property
    def quoted_delta(self) -> float:
        """The delta at which epsilon is quoted: of the target, or 1e-6 where that is a risk, planned in advance."""
        # adaptive modes promise the target alone: at another delta the odometer's epsilon would say more than the risk
        return self.delta if self.risk is None or self.adaptive else NO_BUDGET_DELTA

    @property
    def noise_delta(self) -> float:
        """The part of delta left for the noise: delta - failure, rounded down by more than sums of failures round."""
        return self.delta - self.failure * (1.0 + 2.0 * (_SLACK - 1.0))

    def quoted(self, epsilon: float, delta: float) -> float:
        """Returns the epsilon to quote for a composed one: the target, where rounding alone puts it above.

        At delta = 0 only, where parts of the target may sum to a little more than it (0.1 + 0.2 to more than 0.3).
        """
        return (
            min(epsilon, self.epsilon)
            if self.delta == delta == 0 and within(epsilon, self.epsilon)
            else epsilon
        )

    def under(self, adjacency: Adjacency | None) -> Budget:
        """Returns this budget under an adjacency, if it was made without one; else, and for None, itself.

        Example:
            >>> Budget(1.0, 1e-5).under("replace_one").adjacency
            'replace_one'
            >>> Budget(1.0, 1e-5, "add_remove").under("replace_one").adjacency
            'add_remove'
        """
        return (
            self
            if adjacency is None or self.says_adjacency
            else replace(self, adjacency=adjacency)
        )

    @property
    def says_adjacency(self) -> bool:
        """Whether the budget was made with an adjacency; else that of a plan or ledger takes its place."""
        return not vars(self)["_unsaid"]

    def declaring(self, event: Event, steps: int) -> Budget:
        """Returns a budget whose schedule holds `steps` more of the event.

        Raises:
            ValueError: there is no schedule to add to, or the mode is adaptive.
        """
        if self.mode != "planned" or self.schedule is None:
            raise ValueError(
                "schedule must be given, as () at least, for a planned budget to take declarations"
            )
        said = self.adjacency if self.says_adjacency else None
        schedule = (*self.schedule, (event, check.count(steps=steps)))
        return replace(self, adjacency=said, schedule=schedule)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        extra = ("orders", "weights", "schedule", "advantage", "tpr", "fpr")
        hidden = {name for name in extra if shown[name] is None} | (
            {"failure"} if self.failure == 0 else set()
        )
        return f"Budget({', '.join(f'{name}={value!r}' for name, value in shown.items() if name not in hidden)})"


def _steps(schedule: Iterable[tuple[Event, int]]) -> tuple[tuple[Event, int], ...]:
    return tuple((event, check.count(steps=steps)) for event, steps in schedule)


def within(spent: float, limit: float) -> bool:
    """Returns whether a sum stays within its limit up to 4 units in the last place, for the rounding of its terms.

    Example:
        >>> within(0.1 + 0.2, 0.3), within(0.3 * (1 + 2e-15), 0.3), within(math.inf, 1.0)
        (True, False, False)
    """
    return spent <= limit * (1.0 + 2.0**-50)


def renyi_budget(order: float, epsilon: float, delta: float) -> float:
    """Returns the largest Renyi cost D at one order that converts to (epsilon, delta), rounded down.

    D = epsilon + (log(delta) + log(a)) / (a - 1) - log((a - 1) / a), the conversion of `analysis.rdp` solved for D.

    Raises:
        ValueError: the order is too small for the target (no budget is left), or an argument is out of range.
    """
    overhead = rdp_epsilon_at_order(0.0, order, delta)
    # PRIVACY: rounded down by more than the error of the sum (test_an_exhausted_mode_is_its_target_exactly)
    budget = epsilon - overhead - _ROUNDING * (epsilon + abs(overhead))
    if budget <= 0:
        raise ValueError(
            f"order must leave a budget: at order {order:g} the conversion alone costs"
            f" {overhead:.4g} of epsilon={epsilon:g}; take a larger order"
        )
    return budget


_IN_PARTS: ContextVar[bool] = ContextVar("in_parts", default=False)


@contextmanager
def parts() -> Iterator[None]:
    """Inside, nothing is said of delta: whoever parted the budget has judged the whole."""
    token = _IN_PARTS.set(True)
    try:
        yield
    finally:
        _IN_PARTS.reset(token)


def warn_of_delta(budget: Budget | None, n: int, stacklevel: int = 2) -> None:
    """Warns where delta is 1/n or more; called wherever a budget meets a public number of records or users.

    Publishing k of n records that are picked at random is (0, k/n)-differentially private, since one record is among
    them with probability k/n.

    Args:
        budget: None says nothing; nor does one that is stated as a risk, whose delta is no probability.
        n: public number of what the budget protects.
        stacklevel: as in `errors.warn`.
    """
    if budget is None or budget.risk or _IN_PARTS.get() or budget.delta < 1.0 / max(n, 1):
        return
    open_records = max(1, math.floor(budget.delta * n * (1.0 + 1e-12)))
    warn(
        f"delta must be far below 1/n={1 / n:.2g} (got {budget.delta:g}): publishing {open_records}"
        f" of the {n} {budget.unit}s in the open, picked at random, satisfies such a budget; give a"
        f" delta of {0.1 / n:.2g} or less",
        stacklevel + 1,
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


def odometer_epsilon(
    orders: ArrayLike, spent: ArrayLike, delta: float, weights: ArrayLike | None = None
) -> float:
    """Returns the privacy loss that is exceeded at no time of an adaptive run, except with probability delta.

    Args:
        orders: (K,) orders, each > 1, fixed before the run.
        spent: (K,) sum of the Renyi costs so far at each order, each >= 0 (inf: the order no longer counts).
        delta: in (0, 1).
        weights: (K,) positive weights that sum to 1, fixed before the run; None: uniform.

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
    excess, cost, log_weight = _state(orders, spent, weights)
    target = -math.log(check.open_interval(0.0, 1.0, delta=delta))
    # at this epsilon one order alone suffices
    high = float(np.min(cost + (target - log_weight) / excess, initial=math.inf))
    if math.isinf(high):
        return math.inf
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        value, _ = _log_sum(
            log_weight + excess * (middle - cost), excess, np.maximum(cost, middle)
        )
        # margin: a middle that rounding could have helped stays below the root
        # (docs/proofs/accounting.md#odometer-and-mixture-filter)
        if value >= target * (1 + _ROUNDING):
            high = middle
        else:
            low = middle
    # PRIVACY: rounded up (test_the_odometer_is_rounded_up)
    return high * (1 + _ROUNDING)


def mixture_filter_admits(
    epsilon: float,
    delta: float,
    orders: ArrayLike,
    spent: ArrayLike,
    weights: ArrayLike | None = None,
) -> bool:
    """Returns whether a run with these costs, the event asked for included, is within (epsilon, delta).

    Args:
        epsilon: >= 0, the budget.
        delta: in (0, 1), the budget.
        orders: (K,) orders, each > 1, fixed before the run.
        spent: (K,) sum of the Renyi costs at each order, the event asked for included.
        weights: (K,) positive weights that sum to 1, fixed before the run; None: uniform.

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
    return mixture_filter_log_margin(epsilon, orders, spent, weights) >= target * (1 + _ROUNDING)


def mixture_filter_log_margin(
    epsilon: float, orders: ArrayLike, spent: ArrayLike, weights: ArrayLike | None = None
) -> float:
    """Returns a lower bound on h = min over x > 0 of log(sum_a W_a e^((a-1) x)) - log(1 - e^-x).

    W_a = w_a e^((a-1) (epsilon - S_a)); e^-h is the smallest delta that the filter can grant at epsilon. Both terms are
    convex in x, so that between a point with a negative slope and one with a positive slope the function lies above
    both tangents: where these cross is the bound. Bisection on the slope ends when the bound is within 1e-10 of a value
    of the function; values are lowered and slopes padded by their rounding. So the minimum is never overestimated.

    Args:
        epsilon: >= 0.
        orders: (K,) orders, each > 1.
        spent: (K,) sum of the Renyi costs at each order, each >= 0.
        weights: (K,) positive weights that sum to 1; None: uniform.

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
    excess, cost, log_weight = _state(orders, spent, weights)
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
        bound = _crossing(high - low, left, right) - _ROUNDING * float(excess.max()) * (
            high - low
        )
        if min(left[0], right[0]) - bound <= _GAP or not low < middle < high:
            break
        if tangent(middle)[1] < 0:
            low = middle
        else:
            high = middle
    return bound


def zcdp_filter_budget(epsilon: float, delta: float, failure_budget: float = 0.0) -> float:
    """Returns the rho that adaptive releases may spend in total, beside failures of at most `failure_budget` in total.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).
        failure_budget: d in [0, delta), fixed in advance.

    Returns:
        rho >= 0, rounded down: the run is (epsilon, delta)-DP while the sum of rho_t is at most it and the sum of the
        failures of approximate zCDP at most d.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: full adaptivity, for the adjacency of the rho_t.

    Source: docs/proofs/accounting.md#filters; Whitehouse, Ramdas, Rogers and Wu 2023.

    Example:
        >>> round(zcdp_filter_budget(1.0, 1e-5), 5), round(zcdp_filter_budget(1.0, 1e-5, failure_budget=9e-6), 5)
        (0.03056, 0.02436)
    """
    delta = check.open_interval(0.0, 1.0, delta=delta)
    failure = check.nonnegative(failure_budget=failure_budget)
    if failure >= delta:
        raise ValueError(f"failure_budget must be < delta = {delta:g} (got {failure:g})")
    # margin: the difference rounds to nearest (docs/proofs/rounding.md#model-of-arithmetic)
    return zcdp_rho(epsilon, (delta - failure) * (1 - 3e-16))


def gdp_filter_budget(epsilon: float, delta: float) -> float:
    """Returns the sum of mu_t^2 that adaptive unsampled Gaussian releases may reach: mu(epsilon, delta)^2.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).

    Returns:
        mu^2 > 0, rounded down. Exact and free of overhead.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: full adaptivity, for the adjacency of the mu_t.

    Source: docs/proofs/accounting.md#filters; Smith and Thakurta 2022.

    Example:
        >>> round(gdp_filter_budget(1.0, 1e-5), 5)
        0.07185
    """
    # PRIVACY: the square rounds to nearest (test_the_gdp_budget_is_not_above_the_square_of_mu)
    return gaussian_mu(epsilon, delta) ** 2 * (1 - 3e-16)


def _state(
    orders: ArrayLike, spent: ArrayLike, weights: ArrayLike | None
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns a - 1, S_a and log w_a of the orders with a finite cost, all checked."""
    order, cost = curve_of(orders, spent, "spent")
    weight = (
        np.full(order.size, 1 / order.size)
        if weights is None
        else np.asarray(weights, dtype=np.float64)
    )
    if weight.shape != order.shape:
        raise ValueError(
            f"weights must have the length of orders (got {weight.shape} and {order.shape})"
        )
    for bad in weight[~((weight > 0) & (weight <= 1))]:
        raise ValueError(f"weights must be in (0, 1] (got {bad})")
    if abs(float(weight.sum()) - 1) > 1e-12:
        raise ValueError(f"weights must sum to 1 (got {weight.sum()})")
    kept = np.isfinite(cost)
    return order[kept] - 1, cost[kept], np.log(weight[kept])


def _log_sum(exponents: FloatArray, excess: FloatArray, size: FloatArray) -> tuple[float, float]:
    """Returns log(sum_a e^exponent_a), lowered by more than its rounding, and its derivative in epsilon.

    The exponents are differences of terms of at most (a - 1) `size`; those far below the largest do not matter.
    """
    top = float(exponents.max())
    parts = np.exp(exponents - top)
    total = float(parts.sum())
    rounding = float(np.max((np.abs(exponents) + excess * size)[exponents > top - 60]))
    return top + math.log(total) - _ROUNDING * (1 + rounding), float(parts @ excess) / total


def _crossing(width: float, left: tuple[float, float], right: tuple[float, float]) -> float:
    """Returns the height at which two tangents cross, a lower bound of a convex function between them.

    A tangent is a value and a slope. If rounding has turned a sign, the function is at its minimum there: its second
    derivative is at least the square of 1 / (e^x - 1), so that a slope off by a relative e moves the minimum by e^2.
    """
    if left[1] >= 0:
        return left[0]
    if right[1] <= 0:
        return right[0]
    step = ((right[0] - left[0]) - right[1] * width) / (left[1] - right[1])
    return left[0] + left[1] * min(max(step, 0.0), width)
