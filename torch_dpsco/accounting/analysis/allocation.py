"""Random allocation: passes of T steps in which each record takes part in one, drawn uniformly and kept secret.

A pass has a loss law (`AllocationLoss`), made of delta at some hundred epsilons (`allocation`), in both orders,
whose chords in e^epsilon are an upper bound. It composes with all other laws. One pass alone needs no chords.

Figures are upper bounds for all z and T; sums are computed for z from 1/4 to 1e4 and T up to 2^20. Beyond, z and T are
rounded to the safe side, and passes with z below 1/4 count as one unsampled Gaussian release each.

Source: docs/proofs/allocation.md.

delta of one pass of random allocation, as a function of epsilon, in each of three comparisons.

With noise z per clip and L_i = e^((2 x_i - 1) / 2z^2), x_i ~ N(0, z^2) independent, a pass of T steps has

    remove:   E (M - t)_+,        M = (L_1 + .. + L_T) / T,         add:   E (1 - t M)_+,
    replace:  E (M - t M')_+,     M' = the same with -x_i,

at t = e^epsilon. All are bounds of sums (below), and at most what one unsampled Gaussian release costs.

Source: docs/proofs/allocation.md#one-pass.

Sums of independent likelihood ratios, and how far they exceed a level.

With x ~ N(0, z^2), l(x) = e^((2x - 1) / 2z^2) and t >= 0, one term is Y = l(x) - t l(-x), increasing in x. `Sum`
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
from scipy.special import log_ndtr, ndtr, ndtri

from torch_dpsco.accounting.analysis.gaussian import (
    gaussian_epsilon,
    gaussian_log_delta,
    gaussian_mu,
)
from torch_dpsco.accounting.analysis.pld import (
    convolved,
    log_of,
    pld_epsilon,
    released,
    transform_size,
)
from torch_dpsco.accounting.analysis.pld_laws import (
    UNIT,
    GaussianLoss,
    GridLaw,
    LossLaw,
    LossPair,
    Window,
    edges,
    least,
    of_atoms,
    tilted,
    window,
)
from torch_dpsco.accounting.analysis.rounding import FloatArray, down

_SEARCH = 5e-5  # of the noise or of epsilon
_TRIALS = 48  # a quarter of them secants, then halves
_EXCHANGED = {"remove": "add", "add": "remove", "replace": "replace"}


@dataclass(frozen=True)
class AllocationLoss(LossLaw):
    """The loss of one pass.

    Args:
        noise: z >= 1/4, noise std over the clip.
        steps: T >= 2.
        way: "remove" is log(with / without) under "with", "add" its reverse, "replace" one record replaced.

    Guarantee: ADD_REMOVE and ZERO_OUT ("remove", "add": both must hold, see `pld_laws.PoissonLoss`), REPLACE_ONE.
    Source: docs/proofs/allocation.md#a-law-from-a-profile.
    """

    noise: float
    steps: int
    way: str

    def exchanged(self) -> AllocationLoss:
        """See the base class."""
        # PRIVACY: several passes compose in both orders (test_the_larger_direction_is_reported)
        return replace(self, way=_EXCHANGED[self.way])

    @property
    def least_delta(self) -> float:
        """See the base class."""
        return math.exp(DEEPEST_PROFILE)

    def span(self, reach: float) -> tuple[float, float]:
        """See the base class."""
        losses, _, _ = _atoms(self, reach)
        return float(losses[0]), float(losses[-1])

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        return of_atoms(*_atoms(self, reach), grid)

    def epsilon_alone(self, delta: float) -> float:
        """See the base class."""
        order = self.exchanged() if self.way == "add" else self
        found = epsilon_at(order, delta)
        # PRIVACY: both orders (test_the_larger_direction_is_reported)
        if order == order.exchanged() or log_delta(order.exchanged(), found) <= math.log(delta):
            return found
        return max(found, epsilon_at(order.exchanged(), delta))

    def delta_alone(self, epsilon: float) -> float:
        """See the base class."""
        return math.exp(max(log_delta(self, epsilon), log_delta(self.exchanged(), epsilon)))

    @property
    def unsampled_mu(self) -> float:
        """Of the unsampled Gaussian that costs at least as much."""
        return (2.0 if self.way == "replace" else 1.0) / self.noise

    def sum(self, epsilon: float, log_floor: float) -> Sum:
        """Returns the sum whose excess is delta(epsilon) up to a factor."""
        weight = epsilon if self.way == "replace" else -math.inf
        level = {"remove": math.exp(epsilon), "add": -math.exp(-epsilon), "replace": 0.0}[
            self.way
        ] * self.steps
        return Sum(
            Term(1.0, self.noise, log_weight=weight),
            self.steps,
            -1 if self.way == "add" else 1,
            level,
            log_floor,
        )

    def log_delta(self, hinge: Hinge, epsilon: float) -> float:
        """Returns log delta(epsilon) from a bound on the excess of the sum near it, made for epsilon if "replace"."""
        question = self.sum(epsilon, _FLOOR)
        # margin: terms are accurate up to that (docs/proofs/allocation.md#sums-on-a-grid)
        slack = 3 * question.term.rounding
        level = (
            question.level if self.way == "replace" else self.sum(epsilon - slack, _FLOOR).level
        )
        factor = epsilon if self.way == "add" else 0.0
        value = hinge.log_at(level) + factor - math.log(self.steps) + slack
        return min(value, gaussian_log_delta(epsilon, self.unsampled_mu) * (1 - 1e-12), 0.0)


def allocation_law(noise: float, steps: int, adjacency: str) -> LossLaw:
    """Returns the loss law of one pass.

    Args:
        noise: z > 0, noise std over the clip.
        steps: T >= 1.
        adjacency: "add_remove", "zero_out" or "replace_one".

    Guarantee: that of the law, under the adjacency, if picks are uniform, independent of each other and of all data
        and noise, and never released, and T steps of noise at least z clips each are made.

    Source: docs/proofs/allocation.md#dominating-pairs.

    Example:
        >>> allocation_law(1.0, 100, "add_remove")
        AllocationLoss(noise=1.0, steps=100, way='remove')
    """
    # PRIVACY: more noise and more steps cost less (test_more_steps_never_cost_more)
    noise = min(noise, MOST_NOISE)
    steps = min(steps, MOST_STEPS)
    # PRIVACY: a pair of its own (test_more_steps_never_cost_more)
    way = _way(adjacency)
    if steps == 1 or noise < LEAST_NOISE:
        return GaussianLoss(AllocationLoss(noise, steps, way).unsampled_mu)
    return AllocationLoss(noise, steps, way)


def _way(adjacency: str) -> str:
    return "replace" if adjacency == "replace_one" else "remove"


@lru_cache(maxsize=256)
def allocation_noise(
    epsilon: float, delta: float, steps: int, adjacency: str, *, epochs: int = 1
) -> float:
    """Returns nearly the least noise multiplier z with which passes are (epsilon, delta)-DP, rounded up.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        steps: T >= 1, steps of a pass.
        adjacency: "add_remove", "zero_out" or "replace_one".
        epochs: number of passes, >= 1.

    Raises:
        ValueError: epsilon is below what noise counts for.

    Guarantee: epsilon at delta of passes with this noise is at most epsilon.

    Source: docs/proofs/allocation.md#calibration.

    Example:
        >>> round(allocation_noise(1.0, 1e-5, 100, "add_remove"), 3)
        0.873
    """
    mu = gaussian_mu(epsilon, delta) / math.sqrt(epochs)
    way = _way(adjacency)
    # without amplification
    high = AllocationLoss(1.0, steps, way).unsampled_mu / mu * (1 + 1e-12)
    if steps == 1 or high <= LEAST_NOISE:
        return high
    if high > MOST_NOISE:
        high = MOST_NOISE
        least = _epsilon(MOST_NOISE, steps, delta, adjacency, epochs)
        if least > epsilon:
            raise ValueError(
                f"epsilon must be >= {least:.3g} for passes of random allocation, whose noise"
                f" counts as at most {MOST_NOISE:g} clips (got {epsilon:g})"
            )

    def excess(noise: float) -> float:
        found = _epsilon(noise, steps, delta, adjacency, epochs)
        return math.log(max(found, 1e-9 * epsilon) / epsilon)

    return _sought(excess, LEAST_NOISE, high, *_guess(mu, steps, way))


def _epsilon(noise: float, steps: int, delta: float, adjacency: str, epochs: int) -> float:
    """Returns epsilon at delta of passes with fresh picks, at most that of releases without amplification."""
    found = pld_epsilon([(allocation_law(noise, steps, adjacency), epochs)], delta)
    if found is not None:
        return found.epsilon
    mu = AllocationLoss(noise, steps, _way(adjacency)).unsampled_mu
    return gaussian_epsilon(mu * math.sqrt(epochs) * (1 + 1e-15), delta)


def _sought(
    excess: Callable[[float], float], low: float, high: float, guess: float, slope: float
) -> float:
    """Returns where a falling function is at most 0, nearly the first such place: at `high` it is.

    By secants from a guess and a slope, inside of a bracket, and by halves if a dozen have not met.
    """
    before: tuple[float, float] | None = None
    for tried in range(_TRIALS):
        if tried > _TRIALS // 4 or not low < guess < high:
            guess = (low + high) / 2
        value = excess(guess)
        # PRIVACY: only what was seen to meet the target (test_calibrated_noise_meets_its_target,
        # test_the_epsilon_of_a_pass_meets_delta)
        if value > 0:
            low = guess
        else:
            high = guess
        if before and (found := (value - before[1]) / (guess - before[0])) < 0:
            slope = found
        near = _SEARCH * guess
        if high - low <= near or 0 <= -value <= -slope * near:
            break
        before = guess, value
        guess += near / 2 - value / slope
    return high


def _guess(mu: float, steps: int, way: str) -> tuple[float, float]:
    """Returns about the noise of a pass of which many terms together cost mu, and the slope of log mu in it."""
    rise = steps * math.expm1(mu * mu)
    one = math.asinh(rise / 4) if way == "replace" else math.log1p(rise)  # 1 / z^2
    fall = 4 * math.cosh(one) if way == "replace" else math.exp(one)
    return 1 / math.sqrt(one), -(one**1.5) * fall / (steps + rise) / (mu * mu)


@lru_cache(maxsize=64)
def _atoms(pair: AllocationLoss, reach: float) -> tuple[FloatArray, FloatArray, float]:
    """Returns the law whose profile is the chords of both orders: losses with masses, and the mass at infinity."""
    floor = float(log_ndtr(-reach))
    (right, above), (left, below) = (profile(order, floor) for order in (pair, pair.exchanged()))
    start = max(above[0], below[0])  # the two are equal
    above, below = (np.append(start, figures[1:]) for figures in (above, below))
    margin = 64 * UNIT * (4 + max(right[-1], left[-1]))
    # margin: slopes rounded up, more so on the right (docs/proofs/allocation.md#a-law-from-a-profile)
    losses, slopes = _falling(right, above, 3 * margin)
    opposite, falls = _falling(left, below, margin)
    rest = max(0.0, 1 - start - float(slopes[0]) - float(falls[0])) + 1e-14
    mass = np.concatenate(
        [
            -np.diff(falls, append=0.0)[::-1],
            [rest],
            -np.diff(slopes, append=0.0) * np.exp(losses[1:]),
        ]
    )
    mass[-losses.size + 1 :] *= 1 + margin
    mass.setflags(write=False)
    infinite = float(above[-1]) * (1 + 3 * margin)
    return np.concatenate([-opposite[:0:-1], losses]), mass, infinite


def _falling(
    epsilons: FloatArray, deltas: FloatArray, margin: float
) -> tuple[FloatArray, FloatArray]:
    """Returns the corners of the convex hull from below, in e^epsilon, and by how much its edges fall, rounded up."""
    while True:
        width = np.exp(epsilons[:-1]) * np.expm1(np.diff(epsilons))
        slopes = -np.diff(deltas) / width
        kept = np.concatenate([[True], slopes[1:] < slopes[:-1], [True]])
        if kept.all():
            return epsilons, np.maximum.accumulate((slopes * (1 + margin))[::-1])[::-1]
        epsilons = epsilons[kept]
        deltas = deltas[kept]


LARGEST = 150.0  # epsilon up to which sums are computed
# of log delta: beyond, guesses at slopes fail, and points would take minutes
DEEPEST_PROFILE = -300.0
_TOLERANCE = 1e-4  # of epsilon, that a grid may cost
_LEAST_TOLERANCE = 1e-5  # of log delta
# logarithms of a probability that does not matter: at first, and at last
_FLOOR = -30.0
_DEEPEST = -650.0
# of a profile: widths, nats
_SPACING = {"remove": (0.02, 0.06), "add": (0.02, 0.06), "replace": (0.12, 0.4)}
_SPAN = 6.0  # nats that one curve is read for


@lru_cache(maxsize=8192)
def guess(pair: AllocationLoss, epsilon: float) -> tuple[float, float, float]:
    """Returns about log delta(epsilon), 1 to 5 too large, its slope, and the floor that it takes: nothing is proved."""
    floor = _FLOOR
    while True:
        question = pair.sum(epsilon, floor)
        value = (
            question.guess[1] - math.log(pair.steps) + (epsilon if pair.way == "add" else 0.0)
        )
        if value > floor + 5 or floor <= _DEEPEST:
            return value, question.slope, floor
        floor = max(min(value, floor) - 20, _DEEPEST)


def curve(pair: AllocationLoss, epsilon: float) -> Hinge:
    """Returns the bound on the excess of the sum that `AllocationLoss.log_delta` needs near an epsilon."""
    _, slope, floor = guess(pair, epsilon)
    question = pair.sum(epsilon, floor)
    if pair.way == "replace":
        question = pair.sum(epsilon - 3 * question.term.rounding, floor)
    return question.answer(max(_TOLERANCE * epsilon * slope, _LEAST_TOLERANCE))


@lru_cache(maxsize=8192)
def log_delta(pair: AllocationLoss, epsilon: float) -> float:
    """Returns a bound on log delta(epsilon), epsilon >= 0."""
    # PRIVACY: one step is a Gaussian release, and more steps cost no more (test_more_steps_never_cost_more); margin of
    # the kernel (docs/proofs/accounting.md#renyi-integrals)
    if epsilon > LARGEST:
        return min(down(gaussian_log_delta(epsilon, pair.unsampled_mu), 1e-12), 0.0)
    return pair.log_delta(curve(pair, epsilon), epsilon)


@lru_cache(maxsize=2048)
def epsilon_at(pair: AllocationLoss, delta: float) -> float:
    """Returns an epsilon >= 0 at which the bound on delta is at most `delta`, nearly the least one."""
    high = gaussian_epsilon(pair.unsampled_mu, delta)
    target = math.log(delta)

    def excess(epsilon: float) -> float:
        # nearly linear
        return math.sqrt(-target) - math.sqrt(-log_delta(pair, epsilon))

    # where no guess is good, that of the unsampled Gaussian
    if high == 0 or target < _DEEPEST:
        return high
    if excess(0.0) <= 0:
        return 0.0
    guess = _start(pair, delta, high)
    return _sought(excess, 0.0, high, guess, -math.sqrt(-target) / guess)


def _start(pair: AllocationLoss, delta: float, most: float) -> float:
    """Returns about the epsilon at delta, > 0.

    The larger of two Gaussians': all terms together, and one large term against the rest, taken for a lognormal number.
    """
    variance = math.expm1(1 / pair.noise**2)
    others = 0.0
    whole = variance / pair.steps
    if pair.way == "replace":
        others = variance / (pair.steps - 1)
        whole = 2 * (variance - math.expm1(-1 / pair.noise**2)) / pair.steps
    epsilon = gaussian_epsilon(math.sqrt(math.log1p(whole)), delta)
    if pair.way != "add":
        spread = math.hypot(1 / pair.noise, math.sqrt(math.log1p(others)))
        large = min(gaussian_epsilon(spread, delta), 700.0)
        epsilon = max(epsilon, math.log1p(math.expm1(large) / pair.steps))
    return max(min(epsilon, most, LARGEST), 1e-9 * most)


@lru_cache(maxsize=64)
def profile(pair: AllocationLoss, log_floor: float) -> tuple[FloatArray, FloatArray]:
    """Returns ascending epsilons from 0 on, and bounds on delta there, until it is below a floor; not to be changed.

    Points are as close as chords between them need to cost little: in widths of the loss, and in nats of delta. Below
    `DEEPEST_PROFILE` none are computed: what is left counts as infinite losses.
    """
    width, nats = _SPACING[pair.way]
    width *= 1.25 / guess(pair, 0.0)[1]
    epsilons = [0.0]
    values = [log_delta(pair, 0.0)]
    while values[-1] > max(log_floor, DEEPEST_PROFILE) and epsilons[-1] < LARGEST:
        start = epsilons[-1]
        slope = guess(pair, epsilons[-1])[1]
        if pair.way == "replace":
            epsilons.append(start + min(width, nats / slope))
            values.append(min(log_delta(pair, epsilons[-1]), values[-1]))
            continue
        end = start + min(50 * width, _SPAN / slope)
        hinge = curve(pair, end)
        number = math.ceil((end - start) / min(width, nats / guess(pair, end)[1]))
        for epsilon in np.linspace(start, end, number + 1)[1:].tolist():
            epsilons.append(epsilon)
            values.append(min(pair.log_delta(hinge, epsilon), values[-1]))
    found = np.array(epsilons), np.exp(values)
    for figures in found:
        figures.setflags(write=False)
    return found


LEAST_NOISE = 0.25  # from which on sums of losses are computed
# more counts as that much
MOST_NOISE = 1e4
MOST_STEPS = 1 << 20


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
