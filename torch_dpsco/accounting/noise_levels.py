"""Renyi costs of sampled Gaussian releases with many different noises, from the curves of a grid of noises.

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
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from torch_dpsco._margin import up
from torch_dpsco.accounting.analysis.rdp import FloatArray
from torch_dpsco.accounting.curves import cost_of, orders_at, spread_of
from torch_dpsco.accounting.events import (
    Adjacency,
    PoissonGaussian,
    SimpleEvent,
    WORGaussian,
)

MANY = 64  # different noises, beyond which their curves are not computed one by one
_LEVELS = 64  # per factor of 2
_WHOLE = 1 << 20  # of which a share is a number
_STEEP = 500.0  # exponent beyond which the larger of two curves is taken


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
