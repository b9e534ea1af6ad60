"""What events cost: each one under an adjacency, and how costs compose and convert to epsilon.

A `Cost` holds what composes by addition, each where it is defined: the Renyi curve on a grid of orders, mu^2 of
Gaussian differential privacy (exact for unsampled Gaussians), rho of zero-concentrated privacy, the sum of pure
epsilons, and failure probabilities of both kinds. Sequential composition adds costs, parallel composition takes
their pointwise maximum (valid for each measure by itself: the differing record lies in one part).

What objective perturbation charges is a Renyi curve. For monotone losses with one record added or removed it is the
curve of the pair that dominates the release, about a s^2/2 at small orders, so that the determinant costs nothing
there. A Gaussian event (GDP) would have to cover the point c + e of that pair, and is larger.

Source: docs/proofs/accounting.md#composition, docs/proofs/accounting.md#figures-of-a-report,
docs/proofs/objective.md#what-is-charged.

Which privacy loss law an event has, for the path of `analysis.pld`: not every event has one, for `ZCDP` and
`RDPCurve` only Renyi divergences are known. Failures are not part of a law; they are taken out of delta first.

Source: docs/proofs/accounting.md#dominating-laws, docs/proofs/accounting.md#losses-on-a-grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.allocation import allocation_law
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_epsilon
from torch_dpsco.accounting.analysis.objective import Change, objpert_rdp
from torch_dpsco.accounting.analysis.pld import pld_delta, pld_epsilon
from torch_dpsco.accounting.analysis.pld_laws import (
    FixedSizeLoss,
    GaussianLoss,
    LossLaw,
    PoissonLoss,
    PureLoss,
    ReplaceOneLoss,
)
from torch_dpsco.accounting.analysis.pure import (
    above_threshold_epsilon,
    rdp_l2_knorm,
    rdp_laplace,
    rdp_pure,
    rho_pure,
)
from torch_dpsco.accounting.analysis.rdp import (
    FloatArray,
    default_orders,
    delta_before_failure,
    rdp_delta,
    rdp_epsilon,
    rdp_poisson_gaussian,
    rdp_poisson_gaussian_replace_one,
    rdp_wor_gaussian,
    zcdp_epsilon,
)
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    CLIP_UNITS,
    GDP,
    REPLACE_ONE,
    ZCDP,
    ZERO_OUT,
    AboveThreshold,
    Adjacency,
    ApproxDP,
    Failure,
    Gaussian,
    KNorm,
    Laplace,
    NonPrivate,
    PoissonGaussian,
    Pure,
    RandomAllocation,
    RDPCurve,
    SimpleEvent,
    Stated,
    WORGaussian,
    check_adjacency,
)
from torch_dpsco.errors import AdjacencyError

METHODS = ("best", "rdp", "pld")
_SCALARS = 5  # numbers of a row behind its Renyi curve
_SURVIVAL = 2  # place of log_survival, from the end


@cache
def orders_at(level: int) -> FloatArray:
    """Returns the order grid: to 2^8 at level 0, to 2^14 at level 1.

    It is denser than the default orders, which alone cost up to 1 % of epsilon. Steps of 0.1 below 11 are those of
    Opacus, so that our figure is never larger than its; ratios of 1.02 above 64 leave 5e-5. Most runs are decided at
    small orders, and those above 2^8 take two thirds of the time.
    """
    dense = np.concatenate(
        [np.arange(11, 110) / 10.0, np.round(np.geomspace(64.0, 2.0**14, 281))]
    )
    grid = np.union1d(default_orders(), np.append(dense, 2.0**8))
    grid = grid[grid <= (2.0**8, 2.0**14)[level]]
    grid.setflags(write=False)
    return grid


@dataclass(frozen=True)
class Cost:
    """A composable privacy cost under one adjacency.

    Args:
        rdp: Renyi divergence bound per order of `orders_at(level)`.
        mu_squared: mu^2 of Gaussian differential privacy, nan unless all events have one.
        rho: of zero-concentrated privacy, nan unless all events have one.
        pure: sum of pure epsilons, inf where there is none.
        log_survival: sum of log(1 - failure) of couplings.
        transcript: sum of transcript failures.
    """

    rdp: FloatArray
    mu_squared: float = math.nan
    rho: float = math.nan
    pure: float = math.inf
    log_survival: float = 0.0
    transcript: float = 0.0

    @classmethod
    def zero(cls, level: int) -> Cost:
        """Returns the cost of nothing."""
        return cls(np.zeros_like(orders_at(level)), 0.0, 0.0, 0.0)

    @property
    def row(self) -> FloatArray:
        """All numbers in one vector, nan for what is not defined: sums of costs are sums of rows."""
        rest = (self.mu_squared, self.rho, self.pure, self.log_survival, self.transcript)
        return np.concatenate([self.rdp, rest])

    @classmethod
    def of_row(cls, row: FloatArray) -> Cost:
        """Returns the cost of a row."""
        return cls(row[:-_SCALARS], *map(float, row[-_SCALARS:]))

    def __add__(self, other: Cost) -> Cost:
        return Cost.of_row(self.row + other.row)

    @property
    def failure(self) -> float:
        """Probability that some coupling fails, rounded up."""
        return min(1.0, -math.expm1(self.log_survival) * (1.0 + 1e-14))

    @property
    def fails(self) -> bool:
        """Whether something may fail."""
        return bool(self.log_survival or self.transcript)

    def maximum(self, other: Cost) -> Cost:
        """Returns the pointwise maximum: a bound whichever of the two parts holds the differing record."""
        row = np.maximum(self.row, other.row)  # nan, what is not defined, stays nan
        row[-_SURVIVAL] = min(self.log_survival, other.log_survival)
        return Cost.of_row(row)


@lru_cache(maxsize=4096)
def cost_of(event: SimpleEvent, adjacency: Adjacency, level: int = 0) -> Cost:
    """Returns the cost of one event.

    Raises:
        AdjacencyError: the event has no guarantee under this adjacency.
    """
    orders = orders_at(level)
    if isinstance(event, Stated):
        event.require(adjacency)
        return _cost_as_stated(event, orders)
    return _cost(event, adjacency, orders)


def _cost(event: object, adjacency: Adjacency, orders: FloatArray) -> Cost:
    """Returns the cost of a mechanism."""
    match event:
        case NonPrivate():
            return Cost(np.full_like(orders, math.inf), math.inf, math.inf, math.inf)
        case Gaussian():
            found = _of_noise(event.sensitivity(adjacency), event.sigma, orders)
            return replace(found, log_survival=math.log1p(-event.failure))
        case PoissonGaussian() | WORGaussian():
            return _of_sampled(event, adjacency, orders)
        case RandomAllocation():
            # at most what one unsampled release costs: docs/proofs/allocation.md#one-pass
            found = _of_noise(CLIP_UNITS[adjacency], event.noise, orders)
            if event.steps == 1 or event.noise == 0:
                return found
            # PRIVACY: mu^2 is left out, since epsilon would be read off it (test_a_pass_has_no_exact_gaussian_figure)
            return replace(found, mu_squared=math.nan)
        case Laplace() | AboveThreshold():
            return _of_laplace(event, event.sensitivity(adjacency), orders)
        case Failure():
            nothing = Cost(np.zeros_like(orders), 0.0, 0.0, 0.0)
            if event.kind == "transcript":
                return replace(nothing, transcript=event.probability)
            return replace(nothing, log_survival=math.log1p(-event.probability))
    raise ValueError(f"event must be a value of torch_dpsco.accounting.events (got {event!r})")


def _of_noise(sensitivity: float, sigma: float, orders: FloatArray) -> Cost:
    """Returns the cost of an unsampled release with Gaussian noise."""
    mu = 0.0 if sensitivity == 0 else math.inf if sigma == 0 else sensitivity / sigma
    rho = mu * mu / 2.0
    return Cost(rho * orders, mu * mu, rho, 0.0 if mu == 0 else math.inf)


def _of_sampled(
    event: PoissonGaussian | WORGaussian, adjacency: Adjacency, orders: FloatArray
) -> Cost:
    noise = event.noise_multiplier
    if isinstance(event, PoissonGaussian):
        if event.q in (0.0, 1.0):  # nothing, or the whole data set: an unsampled Gaussian
            return _of_noise(event.q * CLIP_UNITS[adjacency], noise, orders)
        if adjacency == REPLACE_ONE:
            return Cost(rdp_poisson_gaussian_replace_one(event.q, noise, orders))
        # the remove direction is the larger one at every order
        return Cost(rdp_poisson_gaussian(event.q, noise, orders))
    if adjacency == ADD_REMOVE:
        raise AdjacencyError(
            f"{event} is not defined under add_remove: its batch size depends on the data set size"
        )
    if event.batch_size == event.dataset_size:
        return _of_noise(2.0, noise, orders)
    return Cost(rdp_wor_gaussian(event.batch_size / event.dataset_size, noise / 2.0, orders))


def _of_laplace(event: Laplace | AboveThreshold, sensitivity: float, orders: FloatArray) -> Cost:
    scales = (event.scale,) if isinstance(event, Laplace) else (event.b_threshold, event.b_query)
    if sensitivity == 0 or min(scales) == 0:
        return _of_pure(0.0 if sensitivity == 0 else math.inf, orders)
    if isinstance(event, AboveThreshold):
        return _of_pure(
            above_threshold_epsilon(
                event.b_threshold, event.b_query, sensitivity, event.num_positives
            ),
            orders,
        )
    # D_a is convex in the shift and 0 at 0, so that over all shifts of this L1 norm one coordinate is the worst
    rdp = rdp_laplace(event.scale / sensitivity, orders)
    return _of_pure(sensitivity / event.scale, orders, rdp)


def _of_pure(epsilon: float, orders: FloatArray, rdp: FloatArray | None = None) -> Cost:
    if math.isinf(epsilon):
        return Cost(np.full_like(orders, math.inf), rho=math.inf)
    mu_squared = 0.0 if epsilon == 0 else math.nan
    rdp = rdp_pure(epsilon, orders) if rdp is None else rdp
    return Cost(rdp, mu_squared, rho_pure(epsilon), epsilon)


def _cost_as_stated(
    event: GDP | ZCDP | RDPCurve | ApproxDP | KNorm | Pure, orders: FloatArray
) -> Cost:
    """Returns the cost of a guarantee."""
    match event:
        case GDP():
            return _of_noise(event.mu, 1.0, orders)
        case ZCDP():
            survival = math.log1p(-event.delta)
            return Cost(event.rho * orders, rho=event.rho, log_survival=survival)
        case RDPCurve():
            return _of_curve(event, orders)
        case ApproxDP():
            # simulated by: tell all with probability delta, else a pure mechanism (Kairouz, Oh, Viswanath 2015)
            survival = math.log1p(-event.delta)
            return replace(_of_pure(event.eps, orders), log_survival=survival)
        case KNorm() if event.eps:
            return _of_pure(event.eps, orders, rdp_l2_knorm(event.eps, event.dim, orders))
    return _of_pure(event.eps, orders)


def _of_curve(event: RDPCurve, orders: FloatArray) -> Cost:
    # (a - 1) D_a is convex and 0 at a = 1, so that a chord bounds it from above; past the last order nothing is known
    known = np.concatenate([[1.0], event.orders])
    heights = np.concatenate(
        [[0.0], (np.asarray(event.orders) - 1.0) * np.asarray(event.values)]
    )
    with np.errstate(invalid="ignore"):
        chord = np.interp(orders, known, heights, right=math.inf) / (orders - 1.0)
    return Cost(np.where(np.isnan(chord), math.inf, chord))


@dataclass(frozen=True)
class Evaluation:
    """An epsilon with how it was obtained: the method, and the Renyi order if it has one."""

    epsilon: float
    method: str
    order: float | None = None


def _rdp_evaluation(cost_at: Callable[[int], Cost], delta: float) -> Evaluation:
    for level in (0, 1):
        orders = orders_at(level)
        best = rdp_epsilon(orders, cost_at(level).rdp, delta)
        if not math.isfinite(best.epsilon) or best.order < orders[-1] or best.epsilon == 0:
            break
    return Evaluation(best.epsilon, "rdp", best.order)


Counted = tuple[tuple[LossLaw, int], ...]
Laws = Callable[[str], Counted | None]  # of a method, which says how many may be composed


def epsilon_of(
    cost_at: Callable[[int], Cost],
    delta: float,
    laws: Laws,
    method: str = "best",
    enough: float = 0.0,
) -> Evaluation:
    """Converts a cost into epsilon at delta.

    Args:
        cost_at: the cost on the order grid of a level (more orders are asked for when the last one is the best).
        delta: in (0, 1).
        laws: of the same events.
        method: "best" (the least bound there is, with loss distributions if they take few laws), "rdp" (Renyi
            divergences alone), or "pld" (loss distributions of any number of events; the best of the others where
            there is no figure).
        enough: an epsilon below which a cheaper bound will do, >= 0.

    Raises:
        ValueError: unknown method.
    """
    check.open_interval(0.0, 1.0, delta=delta)
    check.choice(METHODS, method=method)
    cost_at = cache(cost_at)
    cost = cost_at(0)
    if not cost.fails:
        return _converted(cost_at, delta, laws, method, enough)

    left = delta_before_failure(delta, cost.transcript, "transcript")
    left = delta_before_failure(left, cost.failure, "coupling")
    if left > 0:
        found = _converted(cost_at, left, laws, method)
        if math.isfinite(found.epsilon):
            return found
    return Evaluation(math.inf, "failure")


def _converted(
    cost_at: Callable[[int], Cost],
    delta: float,
    laws: Laws,
    method: str,
    enough: float = 0.0,
) -> Evaluation:
    cost = cost_at(0)
    if method == "rdp":
        return _rdp_evaluation(cost_at, delta)
    if not math.isnan(cost.mu_squared):  # exact: nothing is below it
        mu = math.sqrt(cost.mu_squared)
        return Evaluation(gaussian_epsilon(mu, delta) if mu < math.inf else math.inf, "gdp")
    found = [_rdp_evaluation(cost_at, delta)]
    if not math.isnan(cost.rho):
        epsilon = zcdp_epsilon(cost.rho, delta) if cost.rho < math.inf else math.inf
        found.append(Evaluation(epsilon, "zcdp"))
    found.append(Evaluation(cost.pure, "pure"))
    if method == "pld" or min(bound.epsilon for bound in found) > enough:
        known = laws(method)
        tightest = None if known is None else pld_epsilon(known, delta)
        if tightest is not None:
            found = [Evaluation(tightest.epsilon, "pld"), *(found if method == "best" else ())]
    return min(found, key=lambda evaluation: evaluation.epsilon)


def delta_of(cost_at: Callable[[int], Cost], epsilon: float, laws: Laws) -> float:
    """Converts a cost into the least delta at epsilon >= 0 (see `epsilon_of` for the arguments)."""
    check.nonnegative(epsilon=epsilon)
    cost = cost_at(0)
    if math.isnan(cost.mu_squared):
        # orders up to 2^14 for small deltas; more would gain nothing that a loss distribution does not
        delta = 0.0 if epsilon >= cost.pure else rdp_delta(orders_at(1), cost_at(1).rdp, epsilon)
        known = laws("best") if delta > 0 else None
        tightest = None if known is None else pld_delta(known, epsilon)
        delta = delta if tightest is None else min(delta, tightest.delta)
    else:
        delta = (
            1.0
            if math.isinf(cost.mu_squared)
            else gaussian_delta(math.sqrt(cost.mu_squared), epsilon)
        )
    delta0 = cost.failure
    return min(1.0, delta0 + (1.0 - delta0) * delta + cost.transcript)


def objective_curve(
    noise_std: float, change: Change, mu_out: float, adjacency: Adjacency
) -> RDPCurve:
    """Returns the Renyi curve of a release by objective perturbation.

    Args:
        noise_std: sigma > 0, of b.
        change: what a record can do.
        mu_out: >= 0, level of the noise on an approximate minimizer; 0 for an exact one.
        adjacency: of the guarantee: "add_remove" includes "zero_out".

    Raises:
        ValueError: an argument is out of range.

    Guarantee: as `accounting.analysis.objective.Change`.

    Source: docs/proofs/objective.md#what-is-charged

    Example:
        >>> curve = objective_curve(10.0, Change(0.05, 1.0), 0.0, "add_remove")
        >>> curve.adjacencies, curve.values[0] < 0.01
        (('add_remove', 'zero_out'), True)
    """
    adjacency = check_adjacency(adjacency)
    mu_out = check.nonnegative(mu_out=mu_out)

    def divergence(order: float) -> float:
        value = objpert_rdp(order, noise_std, change)
        return (value + order * mu_out * mu_out / 2) * (1 + 1e-15)

    orders = tuple(orders_at(1).tolist())
    proved = (REPLACE_ONE,) if adjacency == REPLACE_ONE else (ADD_REMOVE, ZERO_OUT)
    return RDPCurve(orders, tuple(map(divergence, orders)), proved)


@lru_cache(maxsize=4096)
def laws_of(event: SimpleEvent, adjacency: Adjacency) -> tuple[LossLaw, ...] | None:
    """Returns the law of an event (none for one that costs nothing); None if it has none that is known, or is infinite.

    Raises:
        AdjacencyError: the event has no guarantee under this adjacency.

    Example:
        >>> from torch_dpsco.accounting.events import Gaussian
        >>> laws_of(Gaussian(2.0, {"replace_one": 1.0}), "replace_one")
        (GaussianLoss(ratio=0.5),)
    """
    cost = cost_of(event, adjacency, 0)  # raises where the event is not defined
    if isinstance(event, Failure) or cost.pure == 0:
        return ()
    if not math.isnan(cost.mu_squared):
        return (
            None if math.isinf(cost.mu_squared) else (GaussianLoss(math.sqrt(cost.mu_squared)),)
        )
    if isinstance(event, (PoissonGaussian, WORGaussian)) and event.noise_multiplier == 0:
        return None
    if isinstance(event, PoissonGaussian):
        if adjacency == REPLACE_ONE:
            return (ReplaceOneLoss(event.q, event.noise_multiplier),)
        return (PoissonLoss(event.q, event.noise_multiplier),)
    if isinstance(event, RandomAllocation):
        return (allocation_law(event.noise, event.steps, adjacency),)
    if isinstance(event, WORGaussian):
        return (
            FixedSizeLoss(event.batch_size / event.dataset_size, event.noise_multiplier / 2.0),
        )
    # PRIVACY: the worst law of a pure mechanism; that of one Laplace coordinate is not proved to be the worst for
    # several (test_pure_events_have_the_worst_law)
    return (PureLoss(cost.pure),) if math.isfinite(cost.pure) else None


def composed_laws(
    counts: Mapping[SimpleEvent, int] | None, adjacency: Adjacency, most: float
) -> Counted | None:
    """Returns the laws of counted events with their counts; None without counts, or where some event has no law.

    None as well where more than `most` laws are needed: then at once.
    """
    if counts is None:
        return None
    laws: dict[LossLaw, int] = {}
    others = 0  # Gaussians merge into one
    for event, times in counts.items():
        known = laws_of(event, adjacency)
        others += sum(law.mu is None and law not in laws for law in known or ())
        if known is None or others > most:
            return None
        for law in known:
            laws[law] = laws.get(law, 0) + times
    return tuple(sorted(laws.items(), key=repr))
