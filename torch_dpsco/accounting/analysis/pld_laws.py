"""Pairs of Gaussian mixtures on the line whose privacy loss increases, cut where the loss is a multiple of the grid.

    MixturePair    P = (1-q) N(0, z^2) + q N(1, z^2),      Q = N(0, z^2)
    OppositePair   P = (1-q) N(0, z^2) + q N(1, z^2),      Q = (1-q) N(0, z^2) + q N(-1, z^2)

The loss l = log(P/Q) increases with x: in the first pair P/Q is 1 - q + q e^((2x - 1) / 2z^2); in the second one its
numerator increases and its denominator decreases. So {l <= t} is a half line, and a bucket of losses is an interval
(c, c'] of x. Over it `integrate` returns

    p = P(bucket)   and   e = p - e^l(c) Q(bucket) = integral of P(x) - P(c) Q(x) / Q(c),

the latter from terms that are all positive (1 - e^(-(x-c) / z^2) for the rise since c), so that no digit is lost to
the small difference: Gauss-Legendre with 4 nodes, on panels so short that its relative error is below `accuracy`.

Source: docs/proofs/accounting.md#losses-on-a-grid.

Privacy loss laws of single releases, and laws on a grid that dominate them, rounding included.

    PoissonLoss      Gaussian noise on a Poisson sample, one record added, removed or zeroed out
    ReplaceOneLoss   the same, one record replaced
    FixedSizeLoss    Gaussian noise on a batch of fixed size, one record replaced or zeroed out
    GaussianLoss     unsampled Gaussian noise
    PureLoss         whatever is epsilon-DP

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_epsilon
from torch_dpsco.accounting.analysis.rdp import FloatArray, PoissonMixture

UNIT = 2.0**-53  # relative error of one operation in double precision
_BLOCK = 1 << 14  # panels integrated at once: the nodes stay in the cache
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(4)
_FRACTIONS = (1 + _POINTS) / 2
_SHARES = _WEIGHTS / 2


@dataclass(frozen=True)
class LossPair(ABC):
    """A pair (P, Q) with increasing loss.

    Args:
        rate: q in (0, 1]; 1 in `MixturePair` only.
        noise: z > 0, in units of the shift of one record.
    """

    rate: float
    noise: float
    reverse_shift = 0.0  # distance from 0 of the outermost component of Q, to the left

    @abstractmethod
    def loss(self, x: float) -> float:
        """Returns log(P(x) / Q(x))."""

    @abstractmethod
    def positions(self, losses: FloatArray) -> FloatArray:
        """Returns the x of ascending losses inside the range of the loss."""

    @abstractmethod
    def _densities(
        self, x: FloatArray, rise: FloatArray, loss: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Returns P(x) and P(x) - e^loss Q(x), where `loss` is that at x - rise."""

    def ends(self, reach: float) -> tuple[float, float]:
        """Returns the interval `reach` standard deviations beyond the outermost means."""
        return -self.reverse_shift - reach * self.noise, 1 + reach * self.noise

    def span(self, reach: float) -> tuple[float, float]:
        """Returns the losses there."""
        low, high = self.ends(reach)
        return self.loss(low), self.loss(high)

    def shift(self, reach: float) -> float:
        """Returns a bound on the rounding error of the loss at a cut.

        A cut is x = z^2 y + j / 2, y a sum of logarithms of e^l, weights and e^(j^2 / 2z^2) (see `positions`). It is
        off by a few ulps of z^2 |y| + |x|, and l grows with slope at most 2 / z^2.
        Losses are at most x / z^2.
        """
        x = self.ends(reach)[1] / self.noise / self.noise
        return 32 * UNIT * (4 + x + self._log_weight)

    def accuracy(self, reach: float) -> float:
        """Returns a bound on the relative error of an integrated mass: that of the exponents, with a margin of 4."""
        spread = (1 + self.reverse_shift) / self.noise
        return 8 * UNIT * (8 + (reach + spread) ** 2 + self._log_weight)

    def tails(self, x: float, side: float) -> tuple[float, float]:
        """Returns P and Q of what lies below x (side 1), or above it (side -1)."""
        weight = np.exp(self._log_weights)
        first, second = (
            float(weight @ ndtr(side * (x - np.array([0.0, mean])) / self.noise))
            for mean in (1.0, -self.reverse_shift)
        )
        return first, second

    def integrate(
        self, cuts: FloatArray, losses: FloatArray, reach: float
    ) -> tuple[FloatArray, FloatArray]:
        """Returns p and e of the buckets between ascending cuts, `losses` being those at their left ends."""
        width = np.diff(cuts)
        limit = min(self.noise / reach, self.noise * self.noise) / 7
        pieces = np.maximum(np.ceil(width / limit), 1).astype(np.int64)
        mass = np.empty(width.size)
        excess = np.empty(width.size)
        ends = np.cumsum(pieces)
        borders = np.searchsorted(ends, np.arange(_BLOCK, ends[-1], _BLOCK))
        for first, last in pairwise(np.unique([0, *borders, pieces.size]).tolist()):
            part = slice(first, last)
            count = pieces[part]
            start = np.cumsum(count) - count
            step = np.repeat(width[part] / count, count)
            done = (np.arange(step.size) - np.repeat(start, count)) * step
            rise = done[:, None] + step[:, None] * _FRACTIONS
            densities = self._densities(
                np.repeat(cuts[:-1][part], count)[:, None] + rise,
                rise,
                np.repeat(losses[part], count)[:, None],
            )
            mass[part], excess[part] = (
                np.add.reduceat((each @ _SHARES) * step, start) for each in densities
            )
        return mass, excess

    def _normal(self, x: FloatArray, mean: float, log_factor: FloatArray | float) -> FloatArray:
        """Returns exp(log_factor) N(x; mean, z^2)."""
        scaled = (x - mean) / self.noise
        density: FloatArray = np.exp(log_factor - scaled * scaled / 2) / (
            self.noise * math.sqrt(2 * math.pi)
        )
        return density

    @cached_property
    def _log_weights(self) -> FloatArray:
        """Logarithms of 1 - q and q."""
        stay = math.log1p(-self.rate) if self.rate < 1 else -math.inf
        return np.array([stay, math.log(self.rate)])

    @property
    def _log_weight(self) -> float:
        """Size of the largest finite logarithm among the weights, an amplifier of rounding."""
        logs = self._log_weights
        return float(np.abs(logs[np.isfinite(logs)]).max())


@dataclass(frozen=True)
class MixturePair(LossPair):
    """A Poisson-sampled record present, or absent; at rate 1 a plain Gaussian release."""

    def loss(self, x: float) -> float:
        """Returns log r(x), exactly linear at rate 1."""
        if self.rate == 1:
            return (2 * x - 1) / (2 * self.noise * self.noise)
        return float(PoissonMixture(self.rate, self.noise).log_ratio(np.array([x]))[0])

    def positions(self, losses: FloatArray) -> FloatArray:
        """Solves q e^((2x - 1) / 2z^2) = e^l - (1 - q)."""
        variance = self.noise * self.noise
        stay, drawn = self._log_weights
        target = losses + np.log(-np.expm1(stay - losses))
        found: FloatArray = (target - (drawn - 1 / (2 * variance))) * variance
        return found

    def _densities(
        self, x: FloatArray, rise: FloatArray, loss: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        stay, drawn = self._log_weights
        shifted = self._normal(x, 1, drawn)
        excess = shifted * -np.expm1(rise * (-1 / (self.noise * self.noise)))
        return self._normal(x, 0, stay) + shifted, excess


@dataclass(frozen=True)
class OppositePair(LossPair):
    """A Poisson-sampled record replaced by its opposite: the pair of REPLACE_ONE, with a loss odd in x."""

    reverse_shift = 1.0  # Q has a component at -1

    def loss(self, x: float) -> float:
        """Returns log r(x) - log r(-x)."""
        ratio = PoissonMixture(self.rate, self.noise).log_ratio(np.array([x, -x]))
        return float(ratio[0] - ratio[1])

    def positions(self, losses: FloatArray) -> FloatArray:
        """Returns x = z^2 (l/2 + asinh(((1-q)/q) e^(1/2z^2) sinh(l/2))), the argument of asinh kept as a logarithm."""
        variance = self.noise * self.noise
        half = np.abs(losses) / 2
        with np.errstate(divide="ignore"):
            log_argument = half + np.log(-np.expm1(-2 * half)) - math.log(2)
        log_argument = (
            log_argument + math.log1p(-self.rate) - math.log(self.rate) + 1 / (2 * variance)
        )
        # beyond e^20, asinh(y) = log(2y) up to 1/4y^2 < 1e-18
        inverse = np.where(
            log_argument > 20,
            log_argument + math.log(2),
            np.arcsinh(np.exp(np.minimum(log_argument, 20))),
        )
        return np.copysign(variance * (half + inverse), losses)

    def _densities(
        self, x: FloatArray, rise: FloatArray, loss: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        exponent = rise / (self.noise * self.noise)
        stay, drawn = self._log_weights
        forward = self._normal(x, 1, drawn)
        excess = self._normal(x, -1, drawn + loss) * np.expm1(exponent) - forward * np.expm1(
            -exponent
        )
        return self._normal(x, 0, stay) + forward, excess


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
    inner = np.clip(pair.positions(ends[1:-1]), low, high)
    borders = np.concatenate([[low], inner, [high]])
    mass, excess = pair.integrate(borders, ends[:-1], reach)
    # the first one is p - m e^low so far, of the dot at or below `low`
    excess[0] -= (mass[0] - excess[0]) * math.expm1(-max(ends[0] - first * grid, 0.0))
    accuracy = pair.accuracy(reach)
    return Dots(
        first,
        connected(mass, excess, grid, accuracy),
        pair.tails(low, 1.0),
        pair.tails(high, -1.0),
        grid,
        pair.shift(reach),
        accuracy,
    )


_many = lru_cache(maxsize=1024)(_dots)
_few = lru_cache(maxsize=4)(_dots)


def cuts(low: float, high: float, grid: float) -> tuple[int, FloatArray]:
    """Returns the index of the first dot, at or below `low`, and the losses that end the buckets: low, dots, high."""
    first = math.floor(low / grid)
    last = max(math.ceil(high / grid), first + 1)
    return first, np.concatenate([[low], np.arange(first + 1, last) * grid, [high]])


def of_atoms(losses: FloatArray, mass: FloatArray, infinite: float, grid: float) -> GridLaw:
    """Returns a grid law that dominates the law of ascending losses with masses, and that at infinity."""
    places = np.ceil(losses / grid).astype(np.int64) - 1
    above = np.maximum(losses - places * grid, 0.0)
    buckets = np.zeros((2, int(places[-1] - places[0]) + 1))
    for bucket, each in zip(buckets, (mass, -mass * np.expm1(-above)), strict=True):
        np.add.at(bucket, places - places[0], each)
    accuracy = 16 * UNIT * (4 + float(np.abs(losses).max()))
    points = connected(buckets[0], buckets[1], grid, accuracy)
    return GridLaw(int(places[0]), points, infinite, grid, accuracy)


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
    def least_delta(self) -> float:
        """The delta below which its grid laws give no figure."""
        return 0.0

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
class SampledLoss(LossLaw):
    """The loss of the Gaussian mechanism on a random batch.

    Args:
        rate: in (0, 1].
        noise: z > 0, noise std over the shift of one record.
    """

    rate: float
    noise: float
    reverse = False

    def __post_init__(self) -> None:
        # squares are finite: more noise than 1e100 counts as 1e100, and noise up to 1e-100 gets no figure anyway
        object.__setattr__(self, "noise", min(max(self.noise, 1e-100), 1e100))

    @property
    def pair(self) -> LossPair:
        """The mixtures of it."""
        return MixturePair(self.rate, self.noise)

    def span(self, reach: float) -> tuple[float, float]:
        """See the base class."""
        low, high = self.pair.span(reach)
        return (-high, -low) if self.reverse else (low, high)

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        both = dots(self.pair, *self.pair.ends(reach), grid, reach)
        return both.exchanged() if self.reverse else both.law()


@dataclass(frozen=True)
class PoissonLoss(SampledLoss):
    """The Gaussian mechanism on a Poisson sample, for a record added, removed or zeroed out.

    Args:
        rate: q in (0, 1].
        noise: z > 0, noise std over the clip.
        reverse: False is log(with / without) under "with" (the remove direction), True the add direction. Both must
            hold, over a whole ledger each: `pld.pld_epsilon` sees to it.

    Guarantee: ADD_REMOVE and ZERO_OUT.
    Source: docs/proofs/accounting.md#poisson-batch-one-record-added-or-removed.
    """

    reverse: bool = False

    def exchanged(self) -> PoissonLoss:
        """Returns the other direction."""
        return replace(self, reverse=not self.reverse)


@dataclass(frozen=True)
class GaussianLoss(LossLaw):
    """An unsampled Gaussian release; several merge into one, with mu^2 summed.

    Args:
        ratio: mu = sensitivity / noise std, > 0.
    """

    ratio: float

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
class ReplaceOneLoss(SampledLoss):
    """The Gaussian mechanism on a Poisson sample, for one record replaced: rate q in (0, 1), noise z > 0 over the clip.

    Guarantee: REPLACE_ONE, if a record's contribution does not depend on who else is in the batch.
    Source: docs/proofs/accounting.md#poisson-batch-one-record-replaced.
    """

    @property
    def pair(self) -> LossPair:
        """See the base class."""
        return OppositePair(self.rate, self.noise)


@dataclass(frozen=True)
class FixedSizeLoss(SampledLoss):
    """The Gaussian mechanism on a batch of fixed size, drawn uniformly: rate gamma in (0, 1], noise z > 0 over 2 clip.

    The profile H_t(mix, Q) for t >= 1, H_t(Q, mix) for t < 1 is attained pointwise, by no single pair; the law with
    that profile puts the mass of mix on {x > 1/2} at +l(x), that of Q on {x > 1/2} at -l(x), and the rest at 0.

    Guarantee: REPLACE_ONE and ZERO_OUT.
    Source: docs/proofs/accounting.md#batches-of-fixed-size.
    """

    def span(self, reach: float) -> tuple[float, float]:
        """See the base class."""
        _, high = self.pair.span(reach)
        return -high, high

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        pair = self.pair
        half = replace(dots(pair, 0.5, pair.ends(reach)[1], grid, reach), below=(0.0, 0.0))
        forward = half.law()
        backward = half.exchanged()
        rest = (1 - self.rate) * math.erf(1 / (math.sqrt(8) * self.noise)) * (1 + half.accuracy)
        # PRIVACY: both signs, not one ordering (test_fixed_batches_accounted_by_one_ordering_are_under_reported)
        mass = np.concatenate(
            [backward.mass[:-1], [rest + backward.mass[-1] + forward.mass[0]], forward.mass[1:]]
        )
        return GridLaw(backward.first, mass, forward.infinite, grid, forward.shift)


@dataclass(frozen=True)
class PureLoss(LossLaw):
    """Any epsilon-DP release, epsilon >= 0.

    The worst law: +epsilon with probability e^eps / (1 + e^eps), else -epsilon.
    """

    epsilon: float

    def span(self, reach: float) -> tuple[float, float]:
        """The support."""
        return -self.epsilon, self.epsilon

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        scale = 1 / (1 + math.exp(-self.epsilon))
        mass = np.array([scale * math.exp(-self.epsilon), scale])
        return of_atoms(np.array(self.span(reach)), mass, 0.0, grid)


Counted = Sequence[tuple[GridLaw, int]]


_DETAIL = 64  # blocks are single points up to this distance, then 1 / 64 of their distance wide


_LOG_TAIL = math.log(1e15)  # of the tilted mass beyond each end of the window


class Cumulant:
    """Cumulant of a composition, finite losses only.

    Args:
        laws: grid laws, each with the number of its releases >= 1.
    """

    def __init__(self, laws: Counted) -> None:
        blocks = [_summary(law) for law, _ in laws]
        # largest tilt: there one step of the grid is a factor e^16
        self.limit = 16 / laws[0][0].grid
        # largest finite loss
        self.top = math.fsum(count * float(law.losses()[-1]) for law, count in laws)
        self._counts = np.array([float(count) for _, count in laws])
        self._losses = np.concatenate([losses for losses, _ in blocks])
        self._log_mass = np.log(np.concatenate([mass for _, mass in blocks]))
        sizes = np.array([losses.size for losses, _ in blocks])
        self._starts = np.cumsum(sizes) - sizes
        self._law = np.repeat(np.arange(len(laws)), sizes)

    def __call__(self, t: float) -> float:
        """Returns K(t)."""
        exponents = t * self._losses + self._log_mass
        top = np.maximum.reduceat(exponents, self._starts)
        logs = top + np.log(np.add.reduceat(np.exp(exponents - top[self._law]), self._starts))
        return float(self._counts @ logs)


def conversion(t: float) -> float:
    """Returns max over x >= 0 of log((1 - e^-x) e^(-t x)) = t log t - (t+1) log(t+1).

    So log delta(eps) <= K(t) - t eps + conversion(t): the Renyi conversion of order t + 1.
    """
    return t * math.log(t) - (t + 1) * math.log1p(t) if t > 0 else 0.0


def least(objective: Callable[[float], float], limit: float) -> float:
    """Returns the best power of 2^(1/8), from 2^-24 to `limit`, for a quasi-convex objective of t > 0.

    Convex functions are quasi-convex, and so are convex functions over t, if positive at 0: all the objectives of this
    package. No bound needs the very minimum.
    """
    low = -192
    high = math.floor(8 * math.log2(limit))
    while low < high:
        middle = (low + high) // 2
        if objective(2.0 ** (middle / 8)) <= objective(2.0 ** ((middle + 1) / 8)):
            high = middle
        else:
            low = middle + 1
    return float(2.0 ** (low / 8))


@dataclass(frozen=True)
class Window:
    """A tilt, and losses between which all but about 1e-15 of the tilted mass lies.

    Args:
        tilt: theta > 0.
        low: lower end.
        high: upper end.
        rise: the s > theta for which sum T_i K_i(s) - s U is least, nearly, at the upper end.
    """

    tilt: float
    low: float
    high: float
    rise: float

    @property
    def width(self) -> float:
        """Length of the window."""
        return self.high - self.low

    def including(self, loss: float, widest: float) -> Window:
        """Returns the window extended down to a loss, unless it becomes wider than `widest` and 4 times its width."""
        farther = self.low > loss and self.high - loss <= max(widest, 4 * self.width)
        return replace(self, low=loss) if farther else self


def window(cumulant: Callable[[float], float], tilt: float, limit: float) -> Window:
    """Returns the window of a tilted composition: Chernoff's bound at both ends."""
    base = cumulant(tilt)

    def end(step: float) -> float:
        return (cumulant(tilt + step) - base + _LOG_TAIL) / abs(step)

    up = least(end, limit)
    down = least(lambda step: end(-step), limit)
    return Window(tilt, -end(-down), end(up), tilt + up)


def narrowed(cumulant: Cumulant, tilt: float, epsilon: float, spare: float) -> Window:
    """Returns the narrowest window among tilts below the best one, at the price of at most `spare` nats of rounding.

    Where rare releases with a large loss make up delta, tilting makes them frequent, and several of them at once have
    to be kept apart: a smaller tilt may need a tenth of the points.
    """

    def price(t: float) -> float:
        return cumulant(t) - t * epsilon + conversion(t)

    best = window(cumulant, tilt, cumulant.limit)
    dearest = price(tilt) + spare
    for eighths in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24):
        smaller = tilt / 2 ** (eighths / 8)
        if price(smaller) > dearest:
            break
        best = min(best, window(cumulant, smaller, cumulant.limit), key=lambda one: one.width)
    return best


def _summary(law: GridLaw) -> tuple[FloatArray, FloatArray]:
    """Returns centers of mass and masses of the blocks of a law."""
    size = law.mass.size
    starts = (
        edges(_DETAIL, max(abs(law.first), abs(law.first + size), _DETAIL).bit_length())
        - law.first
    )
    inside = starts[(starts > 1) & (starts < size - 1)]
    # the ends stay single points: they decide about large |t|
    starts = np.unique(np.concatenate([[0, 1], inside, [size - 1]]))
    mass = np.add.reduceat(law.mass, starts)
    moment = np.add.reduceat(law.mass * np.arange(size), starts)
    kept = mass > 0
    return (law.first + moment[kept] / mass[kept]) * law.grid, mass[kept]


@lru_cache(maxsize=64)
def edges(detail: int, bits: int) -> npt.NDArray[np.int64]:
    """Returns the indices between +-2^bits at which blocks start, of one or of 1 / detail of their distance from 0."""
    ratio = 1 + 1 / detail
    count = math.ceil(math.log(2.0**bits / detail) / math.log(ratio))
    far = np.ceil(detail * ratio ** np.arange(count + 1)).astype(np.int64)
    return np.unique(np.concatenate([-far, np.arange(-detail, detail + 1), far]))


@dataclass(frozen=True, eq=False)
class TiltedLaw:
    """A law with masses p e^(theta l - log_norm), which sum to 1 up to rounding.

    Args:
        law: the law p.
        mass: (n,) tilted masses, rounded up.
        log_norm: the number c.
    """

    law: GridLaw
    mass: FloatArray
    log_norm: float


def tilted(law: GridLaw, tilt: float) -> TiltedLaw:
    """Returns p e^(tilt l), normalized."""
    log_mass, exponents = tilted_exponents(law, tilt)
    top = float(exponents.max())
    mass = np.exp(exponents - top)
    total = float(mass.sum())
    # margin: rounded up (docs/proofs/accounting.md#composition-by-transforms)
    mass *= (1 + 4 * UNIT * (4 + 2 * np.abs(log_mass) + np.abs(exponents) + abs(top))) / total
    return TiltedLaw(law, mass, top + math.log(total))


def coarsening(law: GridLaw, tilt: float) -> float:
    """Returns what doubling the grid would add to log sum p e^(tilt l).

    That is between 1 and 3 times what this grid, instead of an ever finer one, has added: 1 if the grid is wider than
    the variations of the loss, 3 if much narrower. An odd dot moved to its even neighbors, masses and e^-l kept, gains
    a factor 1 + (e^(th) - 1) (1 - e^(-(1+t)h)) / (1 + e^-h) of its e^(t l).
    """
    _, exponents = tilted_exponents(law, tilt)
    share = np.exp(exponents - exponents.max())
    odd = float(share[(law.first + 1) % 2 :: 2].sum()) / float(share.sum())
    gain = (
        math.expm1(tilt * law.grid)
        * -math.expm1(-(1 + tilt) * law.grid)
        / (1 + math.exp(-law.grid))
    )
    return math.log1p(odd * gain)


def tilted_exponents(law: GridLaw, tilt: float) -> tuple[FloatArray, FloatArray]:
    """Returns log p, floored at log 1e-300, and log p + tilt l."""
    log_mass = np.log(np.maximum(law.mass, 1e-300))
    return log_mass, log_mass + tilt * law.losses()


@dataclass(frozen=True, eq=False)
class DeltaCurve:
    """An upper bound on log delta at the grid losses (first + i) grid; between them, delta is below the chord in e^eps.

    Args:
        first: index of the first grid point.
        grid: h.
        log_delta: (N,) bounds, <= 0.
        log_rounding: (N,) logarithm of the part of delta that stands for items 1 and 2 of the module.
    """

    first: int
    grid: float
    log_delta: FloatArray
    log_rounding: FloatArray

    def epsilon(self, log_delta: float) -> float | None:
        """Returns the least epsilon with at most this delta; None if the window does not show one."""
        below = self.log_delta <= log_delta
        k = int(np.argmax(below))
        if not below[k]:
            return None
        if k == 0:
            return self.first * self.grid
        high = math.exp(self.log_delta[k - 1] - log_delta)
        low = math.exp(self.log_delta[k] - log_delta)
        share = (high - 1 + 8 * UNIT * high) / (high - low)
        return (self.first + k - 1) * self.grid + math.log1p(
            min(share, 1.0) * math.expm1(self.grid)
        )

    def log_delta_at(self, epsilon: float) -> float:
        """Returns log delta at an epsilon; that of the nearest end outside of the window, or 0 below it."""
        k = math.floor(epsilon / self.grid) - self.first
        if k < 0:
            return 0.0
        if k + 1 >= self.log_delta.size:
            return float(self.log_delta[-1])
        high = float(self.log_delta[k])
        low = float(self.log_delta[k + 1])
        # rounded down: the share of the way to the next, lower point
        share = math.expm1(
            epsilon - (self.first + k) * self.grid - 4 * UNIT * abs(epsilon)
        ) / math.expm1(self.grid)
        value = high + math.log1p(
            min(max(share, 0.0), 1.0) * math.expm1(low - high) * (1 - 8 * UNIT)
        )
        return min(0.0, value + 8 * UNIT * (2 + abs(value)))

    def rounding_at(self, epsilon: float) -> float:
        """Returns the share of delta that is a margin for rounding and the window."""
        k = min(max(math.floor(epsilon / self.grid) - self.first, 0), self.log_delta.size - 1)
        return math.exp(min(self.log_rounding[k] - self.log_delta[k], 0.0))
