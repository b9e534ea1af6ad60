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

at t = e^epsilon. All are bounds of `allocation_sums`, and at most what one unsampled Gaussian release costs.

Source: docs/proofs/allocation.md#one-pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr

from torch_dpsco.accounting.analysis.allocation_sums import Hinge, Sum, Term
from torch_dpsco.accounting.analysis.gaussian import (
    gaussian_epsilon,
    gaussian_log_delta,
    gaussian_mu,
)
from torch_dpsco.accounting.analysis.pld import pld_epsilon
from torch_dpsco.accounting.analysis.pld_laws import (
    UNIT,
    GaussianLoss,
    GridLaw,
    LossLaw,
    of_atoms,
)
from torch_dpsco.accounting.analysis.rdp import FloatArray
from torch_dpsco.accounting.analysis.rounding import down

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
DEEPEST_PROFILE = (
    -300.0
)  # of log delta: beyond, guesses at slopes fail, and points would take minutes
_TOLERANCE = 1e-4  # of epsilon, that a grid may cost
_LEAST_TOLERANCE = 1e-5  # of log delta
_FLOOR, _DEEPEST = (
    -30.0,
    -650.0,
)  # logarithms of a probability that does not matter: at first, and at last
_SPACING = {
    "remove": (0.02, 0.06),
    "add": (0.02, 0.06),
    "replace": (0.12, 0.4),
}  # of a profile: widths, nats
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
