"""Which privacy loss law an event has under an adjacency, for the path of `analysis.pld`.

Not every event has one: for `ZCDP`, `ApproxZCDP` and `RDPCurve` only Renyi divergences are known. Failures are not part
of a law; `curves` takes them out of delta first.

Source: docs/proofs/accounting.md#dominating-laws, docs/proofs/accounting.md#losses-on-a-grid.

Renyi costs of sampled Gaussian releases with many different noises, from the curves of a grid of noises.

A release with noise z between two levels, z_1 <= z <= z_2, is dominated by one that draws its level by a coin, z_1 with
probability p. Whatever is asked of a sampled Gaussian sum, its hockey stick h(m), m = 1/z, has a derivative for which
h'(m) e^(s^2 m^2 / 2) does not decrease in m; s depends on the sampling alone. Hence, for every t at once,

    h(m) <= p h(m_1) + (1 - p) h(m_2),    p = (U(m) - U(m_2)) / (U(m_1) - U(m_2)),  U(m) = int_0^m e^(-s^2 x^2 / 2) dx,

and E = e^((a-1) D_a), a sum of hockey sticks, has the same bound. Of n releases between the same levels, the logarithm
being concave, sum (a - 1) D_a <= n log(p E_1 + (1 - p) E_2) with the mean p. Levels are 2^(k/64): epsilon is 0.1 to
0.3 % above that of the sum of the curves. Shares p are integers over 2^20, rounded up: sums of them are exact, in
whatever order releases come.

Source: docs/proofs/accounting.md#between-two-noises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import islice, product

import numpy as np

from torch_dpsco._margin import up
from torch_dpsco.accounting.analysis.allocation import allocation_law
from torch_dpsco.accounting.analysis.pld import gdp_upper, pld_delta, pld_epsilon
from torch_dpsco.accounting.analysis.pld_laws import (
    ApproxLoss,
    FixedSizeLoss,
    GaussianLoss,
    LossLaw,
    PoissonLoss,
    ReplaceOneLoss,
)
from torch_dpsco.accounting.analysis.quadrature import FloatArray
from torch_dpsco.accounting.curves import cost_of, orders_at
from torch_dpsco.accounting.events import (
    REPLACE_ONE,
    Adjacency,
    Failure,
    PoissonGaussian,
    RandomAllocation,
    SimpleEvent,
    WORGaussian,
)

_MOST_COMBINATIONS = 256
_Counted = tuple[tuple[LossLaw, int], ...]
_Places = Mapping[tuple[str, str], Mapping[SimpleEvent, int]]


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
    if cost.mu_squared is not None:
        return None if math.isinf(cost.mu_squared) else (GaussianLoss(math.sqrt(cost.mu_squared)),)
    if isinstance(event, (PoissonGaussian, WORGaussian)) and event.noise_multiplier == 0:
        return None
    if isinstance(event, PoissonGaussian):
        if adjacency == REPLACE_ONE:
            return (ReplaceOneLoss(event.q, event.noise_multiplier),)
        return (PoissonLoss(event.q, event.noise_multiplier, event.k),)
    if isinstance(event, RandomAllocation):
        return (allocation_law(event.noise, event.steps, adjacency),)
    if isinstance(event, WORGaussian):
        return (FixedSizeLoss(event.batch_size / event.dataset_size, event.noise_multiplier / 2.0),)
    # PRIVACY: the worst law of a pure mechanism; that of one Laplace coordinate is not proved to be the worst for
    # several (test_pure_events_have_the_worst_law)
    return (ApproxLoss(cost.pure),) if math.isfinite(cost.pure) else None


class ComposedLaws:
    """The loss laws of a ledger's entries, composed.

    Args:
        counts: gives the events with their counts, per (partition, part); both names are empty for events that touch
            all records. Asked for at the first question.
        adjacency: neighboring relation.
    """

    def __init__(self, counts: Callable[[], _Places], adjacency: Adjacency) -> None:
        self._counts = counts
        self._adjacency = adjacency

    def epsilon(self, delta: float, most: float = math.inf) -> float | None:
        """Returns epsilon at delta; None without a figure, or if it takes more than `most` laws."""
        return self._worst(
            lambda laws: None if (r := pld_epsilon(laws, delta)) is None else r.epsilon, most
        )

    def delta(self, epsilon: float, most: float = math.inf) -> float | None:
        """Returns delta at epsilon; None without a figure, or if it takes more than `most` laws."""
        return self._worst(
            lambda laws: None if (r := pld_delta(laws, epsilon)) is None else r.delta, most
        )

    def mu(self, delta_min: float) -> float | None:
        """Returns a mu that covers the curve where delta >= delta_min (see `pld_gdp`); None without a figure."""
        return self._worst(lambda laws: gdp_upper(laws, delta_min), math.inf)

    def _worst(self, read: Callable[[_Counted], float | None], most: float) -> float | None:
        parts = self._parts(most)
        if parts is None or math.prod(map(len, parts)) > _MOST_COMBINATIONS:
            return None
        # PRIVACY: every combination of parts, since laws are not ordered (test_the_worst_combination_of_parts_counts)
        combinations = [
            tuple(pair for part in chosen for pair in part) for chosen in product(*parts)
        ]
        if (
            sum(law.mu is None for laws in combinations for law, _ in laws) > most
        ):  # Gaussians merge into one
            return None
        found = [read(laws) for laws in combinations]
        known = [figure for figure in found if figure is not None]
        return max(known, default=0.0) if len(known) == len(found) else None

    def _sampled(self, counts: Iterable[SimpleEvent]) -> Iterator[SimpleEvent]:
        return (event for event in counts if spread_of(event, self._adjacency) is not None)

    def _parts(self, most: float) -> list[set[_Counted]] | None:
        """Returns the different parts of each partition as laws with counts.

        None where some event has no law, or a single part takes more than `most` laws: then at once.
        """
        partitions: dict[str, set[_Counted]] = {}
        for (partition, _), counts in self._counts().items():
            laws: dict[LossLaw, int] = {}
            sampled = 0
            if (
                math.isfinite(most)
                and sum(1 for _ in islice(self._sampled(counts), int(most) + 1)) > most
            ):
                return None  # before any of them is asked what it costs
            for event, times in counts.items():
                known = laws_of(event, self._adjacency)
                sampled += sum(law.mu is None and law not in laws for law in known or ())
                if known is None or sampled > most:
                    return None
                for law in known:
                    laws[law] = laws.get(law, 0) + times
            partitions.setdefault(partition, set()).add(tuple(sorted(laws.items(), key=repr)))
        return list(partitions.values())


MANY = 64  # different noises, beyond which their curves are not computed one by one
_LEVELS = 64  # per factor of 2
_WHOLE = 1 << 20  # of which a share is a number
_LEAST = 2.0**-10
_LARGEST = 2.0**40
_STEEP = 500.0  # exponent beyond which the larger of two curves is taken


def spread_of(event: SimpleEvent, adjacency: Adjacency) -> float | None:
    """Returns the number s of a sampled release; None for events of other kinds, which are charged one by one.

    Example:
        >>> spread_of(PoissonGaussian(1.0, 0.01), "add_remove"), spread_of(PoissonGaussian(1.0, 1.0), "add_remove")
        (0.5, None)
    """
    if (
        not isinstance(event, (PoissonGaussian, WORGaussian))
        or not _LEAST < event.noise_multiplier < _LARGEST
    ):
        return None
    if isinstance(event, WORGaussian):
        return 1.0 if event.batch_size < event.dataset_size else None
    if not 0 < event.q < 1:
        return None
    if event.k > 1:
        return math.sqrt((event.k + 1) ** 2 / 3 - event.k) * (1 + 1e-15)
    return 1.0 if adjacency == REPLACE_ONE else 0.5


_Key = tuple[float, int, int]  # how batches are drawn, and the place of the lower level


class Levels:
    """Sampled releases under one adjacency, on one order grid, counted per pair of neighboring levels.

    The result depends on the counts alone.

    Args:
        adjacency: neighboring relation.
        level: of the order grid (`curves.orders_at`).
    """

    def __init__(self, adjacency: Adjacency, level: int) -> None:
        self._adjacency = adjacency
        self._level = level
        self._known: dict[SimpleEvent, tuple[_Key, int, int]] = {}  # with share and times
        self._filled: dict[_Key, tuple[int, int]] = {}  # releases, and the sum of their shares
        self._rows: dict[_Key, FloatArray] = {}
        self._total: FloatArray | None = None  # of the rows
        self._curves: dict[
            _Key, tuple[FloatArray, FloatArray]
        ] = {}  # (a - 1) D_a at the upper level, and the rise

    def put(self, event: SimpleEvent, times: int) -> None:
        """Sets how often a sampled event happened, >= 1; raises AdjacencyError if it has no guarantee."""
        key, share, before = self._place(event)
        releases, shares = self._filled.get(key, (0, 0))
        self._filled[key] = releases + times - before, shares + (times - before) * share
        self._known[event] = key, share, times
        self._rows.pop(key, None)

    def rdp(self, changed: Mapping[SimpleEvent, int]) -> FloatArray:
        """Returns a bound on the composed curve, as if some events had happened another number of times, >= 1."""
        filled: dict[_Key, tuple[int, int]] = {}
        for event, times in changed.items():
            key, share, before = self._place(event)
            releases, shares = filled.get(key) or self._filled.get(key, (0, 0))
            filled[key] = releases + times - before, shares + (times - before) * share
        for key in self._filled.keys() - self._rows.keys():
            self._rows[key], self._total = self._row(key, *self._filled[key]), None
        if filled or self._total is None:
            rows = self._rows | {key: self._row(key, *sums) for key, sums in filled.items()}
            total: FloatArray = np.sum([rows[key] for key in sorted(rows)], axis=0)
            if filled:
                return total
            self._total = total
        return self._total

    def _place(self, event: SimpleEvent) -> tuple[_Key, int, int]:
        """Returns where an event counts, with its share of the lower level, and how often it did."""
        if event in self._known:
            return self._known[event]
        assert isinstance(event, (PoissonGaussian, WORGaussian))
        noise = event.noise_multiplier
        place = math.floor(_LEVELS * math.log2(noise))
        place += (_noise(place + 1) <= noise) - (
            _noise(place) > noise
        )  # where the logarithm was rounded
        sampling = (
            (event.q, event.k)
            if isinstance(event, PoissonGaussian)
            else (event.batch_size, event.dataset_size)
        )
        key = (*sampling, place)
        if key not in self._curves:
            lower, upper = (self._curve(event, _noise(k)) for k in (place, place + 1))
            with np.errstate(invalid="ignore"):  # where both are infinite
                self._curves[key] = upper, lower - upper
        return key, _share(noise, place, spread_of(event, self._adjacency) or math.nan), 0

    def _curve(self, event: PoissonGaussian | WORGaussian, noise: float) -> FloatArray:
        cost = cost_of(replace(event, noise_multiplier=noise), self._adjacency, self._level)
        curve: FloatArray = cost.rdp * (orders_at(self._level) - 1.0)
        return curve

    def _row(self, key: _Key, releases: int, shares: int) -> FloatArray:
        upper, rise = self._curves[key]
        mean = shares / _WHOLE / releases
        # PRIVACY: the mean of E, not of curves (test_many_noises_cost_no_less_than_each_by_itself); margin of the sum
        # (docs/proofs/accounting.md#between-two-noises)
        more = np.where(rise < _STEEP, np.log1p(mean * np.expm1(np.minimum(rise, _STEEP))), rise)
        sums: FloatArray = up(releases * (upper + more) / (orders_at(self._level) - 1.0), 1e-13)
        return np.where(np.isnan(sums), math.inf, sums)


def _noise(place: int) -> float:
    return float(2.0 ** (place / _LEVELS))


@lru_cache(maxsize=4096)
def _areas(place: int, spread: float) -> tuple[Callable[[float], float], float, float]:
    """Returns U up to a constant, its value at the upper level, and by how much it is larger at the lower one."""
    low, high = (spread / math.sqrt(2) / _noise(k) for k in (place + 1, place))
    area = math.erf if high < 1 else _tail
    return area, area(low), area(high) - area(low)


def _tail(x: float) -> float:
    return -math.erfc(x)


def _share(noise: float, place: int, spread: float) -> int:
    """Returns the share of the lower level in 2^20, rounded up by more than its error."""
    area, low, whole = _areas(place, spread)
    # PRIVACY: rounded up (test_many_noises_cost_no_less_than_each_by_itself)
    return (
        min(_WHOLE, math.ceil(_WHOLE * (area(spread / math.sqrt(2) / noise) - low) / whole) + 1)
        if whole
        else _WHOLE
    )
