"""Sums of independent likelihood ratios, and how far they exceed a level: the numerics of random allocation.

With x ~ N(0, z^2), l(x) = e^((2x - 1) / 2z^2) and t >= 0, one term is Y = l(x) - t l(-x), increasing in x. This module
bounds E (+-(Y_1 + .. + Y_T) - level)_+ from above, for T independent terms.

1. One term goes to a grid k h: what lies between two points is spread to both, mass and mean kept. That is a
   mean-preserving spread, so that E (.)_+ does not decrease. Intervals are single steps near the center, and 1 / 512 of
   their distance from it farther out. Masses and means are integrated from positive terms (`pld_laws`), and rounded so
   that what is bounded can only grow.
2. The convolution of T tilted laws, and the bound on its error, are those of `pld`.
3. E (S - k h)_+ is h times the sum of P(S > j h) over j >= k: positive terms. What lies above the window is bounded by
   Chernoff's inequality; what a term exceeds the top of its grid by is added as well.

A poor tilt, grid or window makes a figure loose, never too small.

Source: docs/proofs/allocation.md#sums-on-a-grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from torch_dpsco.accounting.analysis.gaussian import gaussian_log_delta
from torch_dpsco.accounting.analysis.pld import convolved, log_of, released, transform_size
from torch_dpsco.accounting.analysis.pld_laws import (
    UNIT,
    GridLaw,
    LossPair,
    Window,
    edges,
    least,
    tilted,
    window,
)
from torch_dpsco.accounting.analysis.rdp import FloatArray

_DETAIL = 512  # intervals are single steps up to this distance from the center, then 1 / 512 of it wide
_WIDE = 3.0  # noise below which the terms l(x) - t l(-x) are spread around 0
# steps of a window
_FEW = 1 << 12
_MANY = 1 << 20
_WIDEST = 1 << 18  # steps of a term
_SPARE = 20.0  # nats below the smallest probability that matters, where terms are cut
_LOW = 60.0  # nats of tilt below the mean, where terms are cut
_REACH = 37.0  # standard deviations at most
_NEAR = 0.5  # a difference of likelihood ratios


@dataclass(frozen=True)
class Term(LossPair):
    """The variable l(x) - t l(-x).

    Args:
        rate: 1.
        noise: z > 0.
        log_weight: log t, -inf for l(x) alone.
    """

    log_weight: float = -math.inf
    reverse_shift = 1.0

    @property
    def positive(self) -> bool:
        """Whether t = 0."""
        return self.log_weight == -math.inf

    @cached_property
    def root(self) -> float:
        """2 sqrt(t l(x) l(-x)), so that l(x) + t l(-x) is the square root of Y^2 + root^2."""
        return 2 * math.exp((self.log_weight - 1 / (self.noise * self.noise)) / 2)

    @property
    def rounding(self) -> float:
        """Bound on the error of log l(x) where x is the position of a value, up to 40 standard deviations out."""
        variance = self.noise * self.noise
        return (
            32
            * UNIT
            * (4 + max(self.log_weight, 0.0) + (3 + (_REACH + 3) * self.noise) / variance)
        )

    def loss(self, x: float) -> float:
        """Returns log l(x)."""
        return (2 * x - 1) / (2 * self.noise * self.noise)

    def value(self, x: FloatArray) -> FloatArray:
        """Returns Y(x)."""
        variance = self.noise * self.noise
        values: FloatArray = np.exp((x - 0.5) / variance) - np.exp(
            self.log_weight - (x + 0.5) / variance
        )
        return values

    def positions(self, values: FloatArray) -> FloatArray:
        """Returns the x of values of Y, not 0 if t = 0: X = l(x) solves X^2 - Y X - root^2 / 4 = 0."""
        variance = self.noise * self.noise
        larger = np.log(
            (np.abs(values) + np.hypot(values, self.root)) / 2
        )  # log l(x) or, for Y < 0, log t l(-x)
        log_ratio = np.where(values >= 0, larger, self.log_weight - larger - 1 / variance)
        return variance * log_ratio + 0.5

    def _densities(
        self, x: FloatArray, rise: FloatArray, loss: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Returns the density of x, and e^-loss times its product with Y(x) - Y(x - rise)."""
        exponent = rise / (self.noise * self.noise)
        excess = self._normal(x, 1, -loss) * -np.expm1(-exponent)
        if not self.positive:
            excess += self._normal(x, -1, self.log_weight - loss) * np.expm1(exponent)
        return self._normal(x, 0, 0.0), excess


_STEEPEST = 2.0**40  # tilt


def _cumulant(values: FloatArray, mass: FloatArray, count: int) -> Callable[[float], float]:
    """Returns a guess at the cumulant of a sum of `count` terms, from values of a term and their probabilities."""
    log_mass = np.log(mass)

    def cumulant(t: float) -> float:
        exponents = t * values + log_mass
        top = float(exponents.max())
        return count * (top + math.log(float(np.exp(exponents - top).sum())))

    return cumulant


@dataclass(frozen=True)
class Sum:
    """How far does sign (Y_1 + .. + Y_T) exceed a level?

    Args:
        term: law of Y.
        count: T >= 1.
        sign: 1 or -1; -1 for t = 0 only.
        level: a number, of the sign of `sign` for t = 0, at most 0 else.
        log_floor: logarithm of a probability that does not matter: terms are cut in tails of less.
    """

    term: Term
    count: int
    sign: int
    level: float
    log_floor: float

    @cached_property
    def ends(self) -> tuple[float, float]:
        """Values at which a term is cut."""
        reach = min(-float(ndtri(math.exp(max(self.log_floor - _SPARE, -690.0)))), _REACH)
        far = math.exp(min(self.term.loss(1 + reach * self.term.noise), 690.0))
        low = float(self.term.value(np.array([-reach * self.term.noise]))[0])
        if self.sign < 0:  # at the level nothing is left to exceed
            return min(low, -self.level), min(far, -self.level)
        if self.term.positive:  # from the level on, the excess is linear in the term
            return low, min(far, max(self.level, 2.0))
        top = float(self.term.value(np.array([1 + reach * self.term.noise]))[0])
        if (
            top < _NEAR
        ):  # where both likelihood ratios are near 1, the term is far smaller than the one
            return low, top
        return low, min(far, -self.level or 2 * self.count * math.exp(self.term.log_weight))

    @cached_property
    def points(self) -> tuple[FloatArray, FloatArray]:
        """Some values of a term, cut, and their probabilities: for guesses only."""
        x, mass = _nodes(self.term.noise)
        return np.clip(self.term.value(x), *self.ends), mass

    @cached_property
    def guess(self) -> tuple[float, float]:
        """The best tilt, and about the Chernoff bound on log E (S - level)_+ that it gives: nothing is proved by it."""
        values, mass = self.points
        mean = float(values @ mass)
        unit = abs(self.level - self.sign * self.count * mean)
        unit += math.sqrt(float((values - mean) ** 2 @ mass) * self.count)
        unit = min(unit, abs(self.level) + self.count * math.exp(max(self.term.log_weight, 0.0)))
        unit = max(unit, 1e-9 * (self.ends[1] - self.ends[0]))
        cumulant = _cumulant(self.sign * (values - mean) / unit, mass, self.count)
        level = (self.level - self.sign * self.count * mean) / unit

        def price(t: float) -> float:
            return cumulant(t) - t * level - math.log(t)

        tilt = least(price, _STEEPEST)
        return tilt / unit, price(tilt) - 1 + math.log(unit)

    @property
    def slope(self) -> float:
        """About the derivative of the logarithm of E (S - level)_+, less, by log t or the logarithm of |level|."""
        if self.term.positive:
            return self.guess[0] * abs(self.level)
        values, mass = self.points
        weights = mass * np.exp(self.guess[0] * (values - values.max()))
        opposite = (np.hypot(values, self.term.root) - values) / 2  # t l(-x)
        return self.guess[0] * self.count * float(opposite @ weights / weights.sum())

    @cached_property
    def _center(self) -> float:
        """The value around which the grid of a term is finest: its mean, tilted where that is smaller."""
        values, mass = self.points
        weights = (
            mass * np.exp(-self.guess[0] * (values - values.min())) if self.sign < 0 else mass
        )
        return float(values @ weights / weights.sum())

    def answer(self, tolerance: float) -> Hinge:
        """Returns the bound near the level.

        Args:
            tolerance: nats of the answer that the grid may cost, > 0; more if that takes more than 2^20 points.
        """
        tilt, center, (values, mass) = self.guess[0], self._center, self.points
        cumulant = _cumulant(self.sign * tilt * (values - center), mass, self.count)
        aim = tilt * (self.level - self.sign * self.count * center)
        view = window(cumulant, 1.0, _STEEPEST)
        low = min(view.low, aim - 8)
        high = max(view.high, aim + 8)
        wanted = min(math.sqrt(12 * tolerance / self.count), (high - low) / _FEW)
        bottom = self.ends[0] if self.sign < 0 else max(self.ends[0], center - _LOW / tilt)
        step = max(wanted / tilt, (high - low) / _MANY / tilt, (self.ends[1] - bottom) / _WIDEST)
        grid = step * tilt
        middle = round(center / step)
        moved = self.sign * tilt * self.count * (center - middle * step)
        bounds = math.floor(bottom / step), math.ceil(self.ends[1] / step)
        law = spread(self.term, step, (bounds[0], middle, bounds[1]), self.sign, grid)
        view = replace(view, low=low + moved, high=high + moved)
        first, log_value = _exceeded(law, self.count, view, aim + moved)
        # PRIVACY: what terms exceed the ends of their grid by (test_what_terms_exceed_their_grid_by_counts)
        lost = self.count * self._beyond(bounds[0] * step, bounds[1] * step)
        return Hinge(first + self.sign * self.count * middle, step, log_value, lost)

    def _beyond(self, low: float, high: float) -> float:
        """Returns a bound on what sign * Y exceeds, on average, an end of its grid by."""
        if self.sign > 0:
            place = float(self.term.positions(np.array([high]))[0])
            noise = self.term.noise
            # (Y - high)_+ <= l(x) + (-high)_+ where Y > high, which is where x is beyond the place, up to rounding
            far = float(ndtr((1 - place) / noise + self.term.rounding * noise))
            if high <= 0:
                return (
                    far - high * float(ndtr(-place / noise + self.term.rounding * noise))
                ) * (1 + 1e-9)
            # at most that for t = 0, a Gaussian hockey stick
            near = math.exp(gaussian_log_delta(max(math.log(high), 0.0), 1 / noise)) + max(
                1 - high, 0.0
            )
            return min(near, far) * (1 + 1e-9)
        if low == 0:
            return 0.0
        place = float(self.term.positions(np.array([low]))[0])
        return low * float(ndtr(place / self.term.noise)) * (1 + 1e-9)


@dataclass(frozen=True, eq=False)
class Hinge:
    """An upper bound on E (S - s)_+ at s = (first + i) step; between these points it is below the chord.

    Args:
        first: index of the first point.
        step: distance of points.
        log_value: (N,) logarithms of the bounds in steps, without `lost`.
        lost: what terms exceed the ends of their grid by.
    """

    first: int
    step: float
    log_value: FloatArray
    lost: float

    def log_at(self, level: float) -> float:
        """Returns the logarithm of the bound at a level; inf where there is none."""
        # PRIVACY: the level is rounded down (test_between_points_a_bound_is_not_below_its_chord)
        place = level / self.step * (1 - math.copysign(4 * UNIT, level)) - self.first
        k = math.floor(place)
        if k < 0:
            return math.inf
        high, low = (float(self.log_value[min(i, self.log_value.size - 1)]) for i in (k, k + 1))
        value = (
            high + math.log1p(min(place - k, 1.0) * math.expm1(low - high))
            if low < high
            else high
        )
        value += math.log(self.step)
        return float(np.logaddexp(value, log_of(self.lost))) + 16 * UNIT * (
            8 + abs(value) + abs(high)
        )


@lru_cache(maxsize=16)
def _nodes(noise: float) -> tuple[FloatArray, FloatArray]:
    """Returns points x and the mass of N(0, z^2) around them."""
    y = np.arange(-_REACH, _REACH + 1 / noise, 0.05)
    mass = np.exp(-y * y / 2)
    kept = mass > 1e-300
    return y[kept] * noise, mass[kept] / float(mass.sum())


def _cuts(low: int, middle: int, high: int) -> npt.NDArray[np.int64]:
    """Returns the indices between which a law is spread."""
    widest = max(middle - low, high - middle, _DETAIL)
    cuts = middle + edges(_DETAIL, widest.bit_length())
    return np.concatenate([[low], cuts[(cuts > low) & (cuts < high)], [high]])


def spread(
    term: Term,
    step: float,
    bounds: tuple[int, int, int],
    sign: int,
    grid: float,
) -> GridLaw:
    """Returns a law of sign * Y on multiples of a step that is at least as spread.

    Args:
        term: law of Y.
        step: in units of Y.
        bounds: first multiple, the one that counts as loss 0, and last.
        sign: 1 or -1.
        grid: step of the losses of the result.
    """
    low, middle, high = bounds
    signed = not term.positive and term.noise < _WIDE  # terms of all sizes near 0 matter
    cuts = _cuts(low, min(max(0, low), high) if signed else middle, high)
    from_zero = term.positive and low == 0  # Y > 0
    inner = cuts[1:] if from_zero else cuts
    x = term.positions(np.asarray(inner * step, dtype=np.float64))
    reach = float(np.abs(x).max()) / term.noise
    accuracy = 2 * term.accuracy(reach) + 8 * UNIT * (
        abs(math.log(step)) + max(term.log_weight, 0.0)
    )
    shift = term.rounding
    mass, excess = term.integrate(x, np.full(x.size - 1, math.log(step)), reach)
    sizes = np.hypot(inner * step, term.root) / step
    width = np.diff(inner)
    slack = accuracy + 2 * shift + 1.1 * shift * (sizes[1:] + sizes[:-1]) / width
    below = float(ndtr(x[0] / term.noise))
    if from_zero:
        mass = np.append(below, mass)
        excess = np.append(float(ndtr((x[0] - 1) / term.noise)) / step, excess)
        slack = np.append(4 * accuracy + 4 * shift, slack)
        width = np.append(inner[0], width)
        below = 0.0
    # margin: what goes up is rounded up, for -Y what goes down (docs/proofs/allocation.md#sums-on-a-grid)
    total = mass * (1 + 2 * accuracy)
    up = np.clip(excess / width * (1 + sign * slack), 0.0, total)
    points = np.zeros(high - low + 1)
    np.add.at(points, cuts[:-1] - low, total - up)
    np.add.at(points, cuts[1:] - low, up)
    points[0] += below * (1 + accuracy)
    points[-1] += float(ndtr(-x[-1] / term.noise)) * (1 + accuracy)
    ordered = points if sign > 0 else points[::-1].copy()
    return GridLaw(low - middle if sign > 0 else middle - high, ordered, 0.0, grid, 0.0)


def _exceeded(law: GridLaw, count: int, view: Window, aim: float) -> tuple[int, FloatArray]:
    """Returns the first index of the window, and log E (S - k)_+ in steps, rounded up.

    Args:
        law: of a term.
        count: number of terms.
        view: tilt and window.
        aim: the level, at which exponentials are scaled.
    """
    grid = law.grid
    tilt = view.tilt
    first = math.floor(view.low / law.grid)
    part = tilted(law, tilt)
    mass, error = convolved([(part, count)], first, transform_size(view.width / grid + 4))
    losses = np.asarray((first + np.arange(mass.size)) * grid, dtype=np.float64)
    norm, summed, moment, _ = count * released(part, view.rise)
    log_scale = norm - tilt * aim

    # PRIVACY: the margin for rounding (test_the_margin_for_rounding_is_in_the_figure)
    kept = np.maximum(mass + error, 0.0)
    scaled = kept * np.exp(np.clip(tilt * (aim - losses), -650.0, 650.0))
    above = np.cumsum(scaled[::-1])[::-1]
    sums = np.append(np.cumsum(above[:0:-1])[::-1], 0.0)
    with np.errstate(divide="ignore"):
        inside = np.maximum(np.log(sums) + log_scale, -1e5)
    slack = 8 * UNIT * (8 + mass.size + summed + float(np.abs(losses).max()) + abs(aim))
    # x <= e^(y x) / (e y): what lies above the window
    farther = (losses[-1] - losses + 1 / (math.e * view.rise)) / grid * (1 + 1e-12)
    log_lost = 1e-6 - view.rise * losses[-1] + moment + np.log(farther)
    log_value = np.logaddexp(inside + slack, log_lost) + 8 * UNIT * (8 + np.abs(inside))
    log_value[tilt * (losses - aim) < -650.0] = math.inf  # exponentials were clipped
    return first, log_value
