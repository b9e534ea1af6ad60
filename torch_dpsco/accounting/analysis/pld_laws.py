"""Privacy loss laws of single releases, and laws on a grid that dominate them, rounding included.

    PoissonLoss      Gaussian noise on a Poisson sample, a unit of k records added, removed or zeroed out
    ReplaceOneLoss   the same, one record replaced
    FixedSizeLoss    Gaussian noise on a batch of fixed size, one record replaced or zeroed out
    GaussianLoss     unsampled Gaussian noise
    ApproxLoss       whatever is (epsilon, delta)-DP

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
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_epsilon
from torch_dpsco.accounting.analysis.pld_pairs import UNIT, LossPair, MixturePair, OppositePair
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
        return self._closed(
            1 - self.first - self.mass.size, mass[::-1].copy(), self.above[1], self.below[1]
        )

    def _closed(self, first: int, mass: FloatArray, below: float, above: float) -> GridLaw:
        # PRIVACY: tails move up, never away (test_what_integrals_may_be_short_of_is_added)
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
        first,
        connected(mass, excess, grid, accuracy),
        pair.below(low),
        pair.above(high),
        grid,
        shift,
        accuracy,
    )


_many = lru_cache(maxsize=1024)(_dots)
_few = lru_cache(maxsize=4)(_dots)


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
    # PRIVACY: rounded up, dot by dot (test_what_integrals_may_be_short_of_is_added)
    points[:-1] = (mass - upper) * (1 + accuracy) + 2 * accuracy * mass
    points[1:] += upper * (1 + accuracy)
    return points


@dataclass(frozen=True)
class LossLaw(ABC):
    """The loss of one release; hashable, so that its grid laws are computed once."""

    @property
    def mu(self) -> float | None:
        """The mu of a Gaussian release, None of any other."""
        return None

    @property
    def infinite(self) -> float:
        """Mass of an infinite loss."""
        return 0.0

    @property
    def least_delta(self) -> float:
        """The delta below which its grid laws give no figure."""
        return 0.0

    @property
    def weight(self) -> int:
        """Cost of a grid point, relative to that of a single record's."""
        return 1

    def exchanged(self) -> LossLaw:
        """Returns the law of the loss with P and Q exchanged."""
        return self

    def epsilon_alone(self, delta: float) -> float | None:
        """Returns epsilon at delta of a single release, in both orders, where no grid is needed for it."""
        return None

    def delta_alone(self, epsilon: float) -> float | None:
        """Returns delta at epsilon of a single release, in both orders, where no grid is needed for it."""
        return None

    @abstractmethod
    def span(self, reach: float) -> tuple[float, float]:
        """Returns an interval of losses, beyond which less than 2 Phi(-reach) of the mass lies, infinity aside."""

    @abstractmethod
    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """Returns a grid law that dominates this one (see the module)."""


@dataclass(frozen=True)
class PoissonLoss(LossLaw):
    """The Gaussian mechanism on a Poisson sample, for a unit added, removed or zeroed out.

    Args:
        rate: q in (0, 1].
        noise: z > 0, noise std over the clip of one record.
        size: k >= 1, records of the unit, each sampled on its own (or accumulated batches).
        reverse: False is log(with / without) under "with" (the remove direction), True the add direction. Both must
            hold, over a whole ledger each: `pld.pld_epsilon` sees to it.

    Guarantee: ADD_REMOVE and ZERO_OUT.
    Source: docs/proofs/accounting.md#several-records-of-a-unit.
    """

    rate: float
    noise: float
    size: int = 1
    reverse: bool = False

    def __post_init__(self) -> None:
        check.fields(self, rate=_rate, noise=_noise, size=check.positive_count)

    @property
    def mu(self) -> float | None:
        """At rate 1 the release is Gaussian."""
        return self.size / self.noise if self.rate == 1 else None

    @property
    def weight(self) -> int:
        """Every component is integrated."""
        return self.size

    def exchanged(self) -> PoissonLoss:
        """Returns the other direction."""
        return replace(self, reverse=not self.reverse)

    def span(self, reach: float) -> tuple[float, float]:
        """See the base class."""
        low, high = _span(self._pair, *self._pair.ends(reach))
        return (-high, -low) if self.reverse else (low, high)

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        both = dots(self._pair, *self._pair.ends(reach), grid, reach)
        return both.exchanged() if self.reverse else both.law()

    @property
    def _pair(self) -> MixturePair:
        return MixturePair(self.rate, self.noise, self.size)


@dataclass(frozen=True)
class GaussianLoss(LossLaw):
    """An unsampled Gaussian release; several merge into one, with mu^2 summed.

    Args:
        ratio: mu = sensitivity / noise std, > 0.
    """

    ratio: float

    def __post_init__(self) -> None:
        check.fields(self, ratio=check.positive)

    @property
    def mu(self) -> float | None:
        """See the base class."""
        return self.ratio

    def epsilon_alone(self, delta: float) -> float:
        """See the base class."""
        return gaussian_epsilon(self.ratio, delta)

    def delta_alone(self, epsilon: float) -> float:
        """See the base class."""
        return min(1.0, gaussian_delta(self.ratio, epsilon) * (1 + 1e-12))

    def span(self, reach: float) -> tuple[float, float]:
        """See the base class."""
        return PoissonLoss(1.0, 1 / self.ratio).span(reach)

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        return PoissonLoss(1.0, 1 / self.ratio).on_grid(grid, reach)


@dataclass(frozen=True)
class ReplaceOneLoss(LossLaw):
    """The Gaussian mechanism on a Poisson sample, for one record replaced: rate q in (0, 1), noise z > 0 over the clip.

    Guarantee: REPLACE_ONE, if a record's contribution does not depend on who else is in the batch.
    Source: docs/proofs/accounting.md#poisson-batch-one-record-replaced.
    """

    rate: float
    noise: float

    def __post_init__(self) -> None:
        check.fields(self, rate=partial(check.open_interval, 0.0, 1.0), noise=_noise)

    def span(self, reach: float) -> tuple[float, float]:
        """See the base class."""
        return _span(self._pair, *self._pair.ends(reach))

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        return dots(self._pair, *self._pair.ends(reach), grid, reach).law()

    @property
    def _pair(self) -> OppositePair:
        return OppositePair(self.rate, self.noise)


@dataclass(frozen=True)
class FixedSizeLoss(LossLaw):
    """The Gaussian mechanism on a batch of fixed size, drawn uniformly: rate gamma in (0, 1], noise z > 0 over 2 clip.

    The profile H_t(mix, Q) for t >= 1, H_t(Q, mix) for t < 1 is attained pointwise, by no single pair; the law with
    that profile puts the mass of mix on {x > 1/2} at +l(x), that of Q on {x > 1/2} at -l(x), and the rest at 0.

    Guarantee: REPLACE_ONE and ZERO_OUT.
    Source: docs/proofs/accounting.md#batches-of-fixed-size.
    """

    rate: float
    noise: float

    def __post_init__(self) -> None:
        check.fields(self, rate=_rate, noise=_noise)

    def span(self, reach: float) -> tuple[float, float]:
        """See the base class."""
        high = self._pair.loss(self._pair.ends(reach)[1])
        return -high, high

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        pair = self._pair
        half = replace(dots(pair, 0.5, pair.ends(reach)[1], grid, reach), below=(0.0, 0.0))
        forward = half.law()
        backward = half.exchanged()
        rest = (1 - self.rate) * math.erf(1 / (math.sqrt(8) * self.noise)) * (1 + half.accuracy)
        # PRIVACY: both signs, not one ordering (test_fixed_batches_accounted_by_one_ordering_are_under_reported)
        mass = np.concatenate(
            [backward.mass[:-1], [rest + backward.mass[-1] + forward.mass[0]], forward.mass[1:]]
        )
        return GridLaw(backward.first, mass, forward.infinite, grid, forward.shift)

    @property
    def mu(self) -> float | None:
        """At rate 1 the release is Gaussian."""
        return 1 / self.noise if self.rate == 1 else None

    @property
    def _pair(self) -> MixturePair:
        return MixturePair(self.rate, self.noise)


@dataclass(frozen=True)
class ApproxLoss(LossLaw):
    """Any (epsilon, delta)-DP release; delta = 0 is pure privacy.

    The worst law: infinity with mass delta, and of the rest +epsilon with e^eps / (1 + e^eps), -epsilon otherwise.

    Args:
        epsilon: >= 0.
        delta: in [0, 1).
    """

    epsilon: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        check.fields(self, epsilon=check.nonnegative, delta=partial(check.between, 0.0, 1.0))
        if self.delta == 1:
            raise ValueError("delta must be < 1 (got 1.0)")

    @property
    def infinite(self) -> float:
        """See the base class."""
        return self.delta

    def span(self, reach: float) -> tuple[float, float]:
        """The support."""
        return -self.epsilon, self.epsilon

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        first = math.floor(-self.epsilon / grid)
        count = math.ceil(self.epsilon / grid) - first
        mass = np.zeros(max(count, 1))
        excess = np.zeros(max(count, 1))
        scale = (1 - self.delta) / (1 + math.exp(-self.epsilon))
        for index, loss, weight in (
            (0, -self.epsilon, scale * math.exp(-self.epsilon)),
            (-1, self.epsilon, scale),
        ):
            atom_mass, atom_excess = atom(loss, weight, first + index % mass.size, grid)
            mass[index] += atom_mass
            excess[index] += atom_excess
        accuracy = 16 * UNIT * (4 + self.epsilon)
        return GridLaw(first, connected(mass, excess, grid, accuracy), self.delta, grid, accuracy)


def _span(pair: LossPair, low: float, high: float) -> tuple[float, float]:
    return pair.loss(low), pair.loss(high)


def _rate(rate: float) -> float:
    return check.between(0.0, 1.0, rate=check.positive(rate=rate))


def _noise(noise: float) -> float:
    """Keeps squares finite: more noise than 1e100 counts as 1e100, and noise up to 1e-100 gets no figure anyway."""
    return min(max(check.positive(noise=noise), 1e-100), 1e100)
