"""delta of one pass of random allocation, as a function of epsilon, in each of three comparisons.

With noise z per clip and L_i = e^((2 x_i - 1) / 2z^2), x_i ~ N(0, z^2) independent, a pass of T steps has

    remove:   E (M - t)_+,        M = (L_1 + .. + L_T) / T,         add:   E (1 - t M)_+,
    replace:  E (M - t M')_+,     M' = the same with -x_i,

at t = e^epsilon. All are bounds of `allocation_sums`, and at most what one unsampled Gaussian release costs.

Source: docs/proofs/allocation.md#one-pass.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy

from torch_dpsco._margin import down
from torch_dpsco.accounting.analysis.allocation_jumps import by_one_large
from torch_dpsco.accounting.analysis.allocation_sums import Hinge, Sum, Term
from torch_dpsco.accounting.analysis.gaussian import gaussian_epsilon, gaussian_log_delta
from torch_dpsco.accounting.analysis.quadrature import FloatArray

LARGEST = 150.0  # epsilon up to which sums are computed
LEAST_NOISE = 0.25  # from which on they are
MOST_NOISE, MOST_STEPS = 1e4, 1 << 20  # more counts as that much
DEEPEST_PROFILE = (
    -300.0
)  # of log delta: beyond, guesses at slopes fail, and points would take minutes
ADJACENCIES = ("add_remove", "zero_out", "replace_one")
_TOLERANCE = 1e-4  # of epsilon, that a grid may cost
_LEAST_TOLERANCE = 1e-5  # of log delta
_SEARCH, _TRIALS = 1e-4, 48  # of epsilon; a secant at first, then halves
_FLOOR, _DEEPEST = (
    -30.0,
    -650.0,
)  # logarithms of a probability that does not matter: at first, and at last
_SPACING = {
    "remove": (0.02, 0.06),
    "add": (0.02, 0.06),
    "replace": (0.12, 0.4),
}  # of a profile: widths, nats
_MUCH, _MUCH_OF_A_POINT = 1e-5, 0.02  # of a bound, for rounding and what is cut off
_MUCH_OF_EPSILON = 5e-4  # what that may add to epsilon
_SPAN = 6.0  # nats that one curve is read for


class Pass(NamedTuple):
    """One way of comparing the two laws of a pass.

    Args:
        noise: z.
        steps: T >= 1.
        way: "remove", "add" or "replace".
    """

    noise: float
    steps: int
    way: str

    @property
    def exchanged(self) -> Pass:
        """The two laws in the other order."""
        return self._replace(way={"remove": "add", "add": "remove", "replace": "replace"}[self.way])

    @property
    def mu(self) -> float:
        """Of the unsampled Gaussian that costs at least as much."""
        return (2.0 if self.way == "replace" else 1.0) / self.noise

    @property
    def plain(self) -> bool:
        """Whether the unsampled Gaussian is what is reported."""
        return self.steps == 1 or self.noise < LEAST_NOISE

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
        level = question.level if self.way == "replace" else self.sum(epsilon - slack, _FLOOR).level
        factor = epsilon if self.way == "add" else 0.0
        value = hinge.log_at(level) + factor - math.log(self.steps) + slack
        return min(value, gaussian_log_delta(epsilon, self.mu) * (1 - 1e-12), 0.0)


@lru_cache(maxsize=8192)
def guess(pair: Pass, epsilon: float) -> tuple[float, float, float]:
    """Returns about log delta(epsilon), 1 to 5 too large, its slope, and the floor that it takes: nothing is proved."""
    floor = _FLOOR
    while True:
        question = pair.sum(epsilon, floor)
        value = question.guess[1] - math.log(pair.steps) + (epsilon if pair.way == "add" else 0.0)
        if value > floor + 5 or floor <= _DEEPEST:
            return value, question.slope, floor
        floor = max(min(value, floor) - 20, _DEEPEST)


def curve(pair: Pass, epsilon: float) -> Hinge:
    """Returns the bound on the excess of the sum that `Pass.log_delta` needs near an epsilon."""
    _, slope, floor = guess(pair, epsilon)
    question = pair.sum(epsilon, floor)
    if pair.way == "replace":
        question = pair.sum(epsilon - 3 * question.term.rounding, floor)
    return question.answer(max(_TOLERANCE * epsilon * slope, _LEAST_TOLERANCE))


@lru_cache(maxsize=8192)
def log_delta(pair: Pass, epsilon: float, much: float = _MUCH) -> float:
    """Returns a bound on log delta(epsilon), epsilon >= 0; a slower one if more than `much` of it is a margin."""
    # PRIVACY: one step is a Gaussian release, and more steps cost no more (test_more_steps_never_cost_more); margin of
    # the kernel (docs/proofs/accounting.md#renyi-integrals)
    if pair.plain or epsilon > LARGEST:
        return min(down(gaussian_log_delta(epsilon, pair.mu), 1e-12), 0.0)
    hinge = curve(pair, epsilon)
    value = pair.log_delta(hinge, epsilon)
    if pair.way == "add" or hinge.share_at(pair.sum(epsilon, _FLOOR).level) < much:
        return value
    return min(value, _one_large(pair, epsilon))


def _one_large(pair: Pass, epsilon: float) -> float:
    """Returns the bound on log delta(epsilon) that keeps its digits where one large term makes up delta."""
    _, slope, floor = guess(pair, epsilon)
    slack = 3 * pair.sum(epsilon, floor).term.rounding
    question = pair.sum(epsilon - slack, min(floor, -90.0))
    tolerance = max(_TOLERANCE * epsilon * slope, _LEAST_TOLERANCE)
    return by_one_large(question, min(tolerance, 1e-3)) - math.log(pair.steps) + slack


@lru_cache(maxsize=2048)
def epsilon_at(pair: Pass, delta: float) -> float:
    """Returns an epsilon >= 0 at which the bound on delta is at most `delta`, nearly the least one.

    A secant on sqrt(-log delta), which is nearly linear, inside a bracket.
    """
    low = -1.0
    high = gaussian_epsilon(pair.mu, delta)
    target = math.log(delta)
    if (
        pair.plain or high == 0 or target < _DEEPEST
    ):  # where no guess is good, that of the unsampled Gaussian
        return high
    epsilon, slope = _start(pair, target, high)
    much = max(_MUCH, min(-_MUCH_OF_EPSILON * epsilon * slope * 2 * math.sqrt(-target), 0.1))
    seen: tuple[float, float] | None = None
    for tried in range(_TRIALS):
        if epsilon <= 0 and low < 0:
            epsilon = 0.0
        elif tried > _TRIALS // 4 or not low < epsilon < high:
            epsilon = (max(low, 0.0) + high) / 2
        excess = math.sqrt(-target) - math.sqrt(-log_delta(pair, epsilon, much))
        # PRIVACY: only what was seen to meet delta is returned (test_the_epsilon_of_a_pass_meets_delta)
        low, high = (epsilon, high) if excess > 0 else (low, epsilon)
        if seen and (found := (excess - seen[1]) / (epsilon - seen[0])) < 0:
            slope = found
        if high - max(low, 0.0) <= _SEARCH * high or 0 <= -excess <= -slope * _SEARCH * epsilon:
            break
        seen = epsilon, excess
        epsilon += _SEARCH * epsilon / 2 - excess / slope
    return high


def _start(pair: Pass, target: float, most: float) -> tuple[float, float]:
    """Returns about the epsilon at log delta = target, and the slope there of -sqrt(-log delta).

    By two Gaussians: one large term against the rest, taken for a lognormal number, and all terms together.
    """
    variance = math.expm1(1 / pair.noise**2)
    others = 0.0
    most = min(most, LARGEST)
    whole = variance / pair.steps
    if pair.way == "replace":
        others = variance / (pair.steps - 1)
        whole = 2 * (variance - math.expm1(-1 / pair.noise**2)) / pair.steps
    mu = math.sqrt(math.log1p(whole))
    spread = math.hypot(1 / pair.noise, math.sqrt(math.log1p(others)))

    def excess(epsilon: float) -> float:
        found = gaussian_log_delta(epsilon, mu)
        if pair.way != "add":
            large = gaussian_log_delta(math.log1p(pair.steps * math.expm1(epsilon)), spread)
            found = min(float(np.logaddexp(found, large)), 0.0)
        return math.sqrt(-target) - math.sqrt(-found)

    epsilon = 0.0 if excess(0.0) <= 0 else most
    if excess(0.0) > 0 > excess(most):
        epsilon = float(scipy.optimize.brentq(excess, 0.0, most, xtol=1e-9 * most, rtol=1e-3))
    least = max(0.99 * epsilon, 0.0)
    width = max(0.02 * epsilon, 1e-6 * most)
    return epsilon, min((excess(least + width) - excess(least)) / width, -1e-9)


@lru_cache(maxsize=64)
def profile(pair: Pass, log_floor: float) -> tuple[FloatArray, FloatArray]:
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
            values.append(min(log_delta(pair, epsilons[-1], _MUCH_OF_A_POINT), values[-1]))
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
