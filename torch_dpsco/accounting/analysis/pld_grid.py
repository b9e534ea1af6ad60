"""Privacy loss laws on a grid that dominate the exact laws, rounding included.

For a dominating pair (P, Q) the privacy loss is L = log P/Q under P. A grid law keeps the mass of L on the grid k h and
at infinity. A bucket (k h, (k+1) h] of P-mass p and Q-mass m is replaced by two dots,

    w_1 = (p - m e^(k h)) / (1 - e^-h)  at (k+1) h,        w_0 = p - w_1  at k h,

which keep both masses ("connecting the dots"). As a function of t = e^eps the hockey stick E(1 - t e^-L)_+ is convex,
and on the grid law it is the chord of its own values at t = e^(k h): nowhere smaller, and equal at the dots. Since
e^-L -> (1 - t e^-L)_+ is convex whatever is added to L, the same holds inside a composition.

What is left out is never dropped: the P-mass above the last bucket goes to infinity, that below the first one up to its
right end. Rounding: bucket ends are solved up to `shift`, so that the law dominates that of L - `shift`; masses have a
relative error below eta, and (1 + eta) w_0 + 2 eta p, (1 + eta) w_1 are kept: no dot has less mass than it should.
Exchanging P and Q turns w at k h into w e^(-k h) at -k h: the same dots serve both orders.

Source: docs/proofs/accounting.md#losses-on-a-grid; Doroshenko, Ghazi, Kamath, Kumar and Manurangsi 2022 (the
chords).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from torch_dpsco.accounting.analysis.pld_pairs import UNIT, LossPair
from torch_dpsco.accounting.analysis.quadrature import FloatArray

_TINY = 1e-300  # more than what underflow takes from a point
_SMALL = 1 << 15  # points up to which many dots are kept for later calls


@dataclass(frozen=True, eq=False)
class GridLaw:
    """A law of losses (first + i) grid with mass[i], and `infinite` at infinity; it dominates L - shift.

    Args:
        first: index of the first grid point.
        mass: (n,) masses >= 0, read-only.
        infinite: mass of an infinite loss.
        grid: h > 0.
        shift: bound on what rounding took from a loss, >= 0.
    """

    first: int
    mass: FloatArray
    infinite: float
    grid: float
    shift: float

    def losses(self) -> FloatArray:
        """Returns the (n,) finite losses."""
        return np.asarray((self.first + np.arange(self.mass.size)) * self.grid, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Dots:
    """The dots of a pair between two ends of x, and what lies beyond: (P-mass, Q-mass) below and above."""

    first: int
    mass: FloatArray
    below: tuple[float, float]
    above: tuple[float, float]
    grid: float
    shift: float
    accuracy: float

    def law(self) -> GridLaw:
        """Returns the law of log P/Q under P."""
        return self._closed(self.first, self.mass.copy(), self.below[0], self.above[0])

    def exchanged(self) -> GridLaw:
        """Returns the law of log Q/P under Q."""
        losses = (self.first + np.arange(self.mass.size)) * self.grid
        mass = self.mass * np.exp(-losses) * (1 + 4 * UNIT * (2 + np.abs(losses)))
        return self._closed(1 - self.first - self.mass.size, mass[::-1].copy(), self.above[1], self.below[1])

    def _closed(self, first: int, mass: FloatArray, below: float, above: float) -> GridLaw:
        # PRIVACY: tails move up, never away (test_the_masses_of_both_hypotheses_are_kept)
        mass[1] += below * (1 + self.accuracy)
        infinite = above * (1 + self.accuracy) + mass.size * _TINY
        mass.setflags(write=False)
        return GridLaw(first, mass, infinite, self.grid, self.shift)


def dots(pair: LossPair, low: float, high: float, grid: float, reach: float) -> Dots:
    """Returns the dots of a pair between two ends of x; those of the last calls are remembered."""
    points = (pair.loss(high) - pair.loss(low)) / grid
    return (_many if points < _SMALL else _few)(pair, low, high, grid, reach)


def _dots(pair: LossPair, low: float, high: float, grid: float, reach: float) -> Dots:
    first, ends = cuts(pair.loss(low), pair.loss(high), grid)
    positions, residual = pair.positions(ends[1:-1])
    borders = np.concatenate([[low], np.clip(positions, low, high), [high]])
    mass, excess = lifted(*pair.integrate(borders, ends[:-1], reach), ends[0] - first * grid)
    accuracy = pair.accuracy(reach)
    shift = pair.shift(reach) + residual
    return Dots(
        first, connected(mass, excess, grid, accuracy), pair.below(low), pair.above(high), grid, shift, accuracy
    )


_many, _few = lru_cache(maxsize=1024)(_dots), lru_cache(maxsize=4)(_dots)


def cuts(low: float, high: float, grid: float) -> tuple[int, FloatArray]:
    """Returns the index of the first dot, at or below `low`, and the losses that end the buckets: low, dots, high."""
    first = math.floor(low / grid)
    last = max(math.ceil(high / grid), first + 1)
    return first, np.concatenate([[low], np.arange(first + 1, last) * grid, [high]])


def lifted(mass: FloatArray, excess: FloatArray, gap: float) -> tuple[FloatArray, FloatArray]:
    """Makes the first excess, p - m e^low, that over the dot a `gap` >= 0 below the low end of the first bucket."""
    excess[0] -= (mass[0] - excess[0]) * math.expm1(-max(gap, 0.0))
    return mass, excess


def atom(loss: float, weight: float, index: int, grid: float) -> tuple[float, float]:
    """Returns mass and excess of an atom in the bucket that starts at dot `index`."""
    return weight, -weight * math.expm1(-max(loss - index * grid, 0.0))


def connected(mass: FloatArray, excess: FloatArray, grid: float, accuracy: float) -> FloatArray:
    """Returns the dots of buckets with p and e = p - m e^(k h), none of them with less mass than it should have."""
    upper = np.minimum(excess / -math.expm1(-grid), mass)
    points = np.zeros(mass.size + 1)
    # PRIVACY: rounded up, dot by dot (test_grid_laws_are_never_below_the_exact_hockey_stick)
    points[:-1] = (mass - upper) * (1 + accuracy) + 2 * accuracy * mass
    points[1:] += upper * (1 + accuracy)
    return points
