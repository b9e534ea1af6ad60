"""Shuffled binomial noise: the Renyi divergence of a binomial law and its shift, on a window.

In the shuffled sum each of N public coins adds a bit that is 1 with probability p, so that a coordinate of the count is
k + Bin(N, p), and a neighboring data set shows k +- s + Bin(N, p). The supports differ: no order has a finite
divergence. So let W be a set of outcomes, P = Bin(N, p), Q its shift, and P_W the law P given W. Then, for any event E,

    P(E) <= P_W(E) + P(not W),
    D_a(P_W || Q) = [ log sum_W P^a Q^(1-a) - a log P(W) ] / (a - 1),

and (epsilon, delta) from the divergence holds for P and Q at delta + P(not W). In compositions of d coordinates P is
(1 - P(not W))^d times the product of the P_W plus a rest, so that divergences add up and at most d P(not W) is added.

Exchanging the data sets turns the shift by s into one by -s, and the divergence returned is the larger of both.

Many shifts and all orders need few divergences, by two convexities. log P is concave, so that for a fixed window

    (a - 1) D_a(s) = log sum_W exp(a log P(y) - (a - 1) log P(y - s)) - a log P(W)

is convex in s, as the log-sum-exp of convex functions (log P between integers on straight lines); and it is convex in a
for every s. So between two computed points the bound is a chord, and compared with c s^2 or c a (a - 1) a chord is too
high by no more than a factor that depends on the two points alone (`_between_shifts`, `_between_orders`).

Proof: docs/proofs/heavy_tailed.md#shuffle-accountant. Source: Cheu, Joseph, Mao and Peng 2021 (the protocol).

Tails of binomial laws, never below the exact value.

The first mass of a tail is computed in 50 digits and the others by the ratios of neighbors, so that nothing depends on
the accuracy of a library's special functions: scipy 1.15 is 1e-6 too low for 1e11 trials.

Proof: docs/proofs/accounting.md#binomial-tails.

Sizes and costs. A record moves the count of coordinate j by an integer s_j, the noise of N = n b coins hides it, and
the accountant above says how well. With rounding coupled (`oracles.round_randomly`),
a value on the grid that moves by v_j moves a count by less than |v_j| + 1, by 0 if v_j = 0, and by at most g, the bits
there are:

    Algorithm 11, |x|_2 <= D:       |v|_2 <= g, so that |s|_2 <= g + sqrt(d);   max |s_j| <= g,   N = n b
    Algorithm 13, |x_j| <= tau:     all d coordinates may move by 2 tau at once: |s|_2 <= g sqrt(d),   max |s_j| <= g,
                                    N = (n / m) b, since a record is in one of m groups

The budget g + sqrt(d) holds after L2 clipping only: with it, Algorithm 13 would be billed at epsilon = 0.97 where its
exact delta is 0.046 instead of 1e-5 (d = 10, n = 1000, g = 64, b = 314).

The cost is one event of the ledger, `ZCDP(rho, failure)`: a coupling failure (noise off the window) and, given
that there is none, D_a <= rho a for all orders. It adds up under composition like all others, and takes 1 % of rho
compared with a curve of one order at a time.

N counts the noise of honest users only: `honest_fraction` of them, rounded down, in each group.

Proof: docs/proofs/heavy_tailed.md#sizes-of-shuffled-sums.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import scipy

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rdp import FloatArray, zcdp_epsilon
from torch_dpsco.errors import ConditionError, InfeasibleError

_POINTS = 1 << 22  # of a window, about 200 MB
_MANY_POINTS = 1 << 18  # of a window for which all shifts and orders are wanted
_UNIT = 2.0**-53
_ROUNDING = 1.0 + 1e-12  # more than that of the few operations on bounds
# from 1.004, closely enough that the chords between them cost 0.5 %; nothing ever needs the last of them
_ORDERS = tuple(1 + 0.004 * 1.3**k for k in range(17)) + tuple(
    1 + 0.3 * 1.15**k for k in range(120)
)


class ShuffleCost(NamedTuple):
    """A concentrated divergence that holds except with a given probability.

    Args:
        rho: D_a <= rho a for every order a > 1.
        failure: a probability to be taken from delta, by `delta' = (delta - failure) / (1 - failure)`.
    """

    rho: float
    failure: float


def zcdp_shuffle(
    trials: int,
    noise_probability: float,
    *,
    dim: int,
    max_shift: int,
    shift_norm: float,
    delta_window: float,
) -> ShuffleCost:
    """Returns rho with D_a <= rho a for all orders a > 1, and the failure probability, of d shuffled sums.

    One record moves the sums by integers s_1..s_d; rho is about 1 % above |s|^2 / (2 N p (1 - p)) for many bits.

    Args:
        trials: N >= 1, noise bits of a coordinate, from all honest users together. More bits only add noise: N whose
            windows have more than 2^18 points are reduced to what fits.
        noise_probability: p in (0, 1).
        dim: d >= 1.
        max_shift: bound of each |s_j|, >= 1.
        shift_norm: bound of sqrt(sum s_j^2), > 0.
        delta_window: mass off the window of one coordinate, in (0, 1); should be much below 1 / (N p (1 - p)).

    Raises:
        ValueError: an argument is out of range.
        ConditionError: the window is empty, since the shift is too large for N.

    Guarantee: replace-one, if the record moves the sums by at most that for every value of the public and the coupled
        private coins (the divergence is jointly quasi-convex).

    Source: docs/proofs/heavy_tailed.md#shuffle-accountant.

    Example:
        >>> cost = zcdp_shuffle(314_000, 0.5, dim=10, max_shift=65, shift_norm=64 + 10**0.5, delta_window=1e-8)
        >>> round(cost.rho, 5), cost.failure < 1e-7
        (0.02901, True)
    """
    window, norm = _shuffle_window(
        trials, noise_probability, dim, max_shift, shift_norm, delta_window
    )
    bounds = [(shift, _concentrated(window.pair(shift))) for shift in _shifts(max_shift)]
    return ShuffleCost(_composed(bounds, dim, norm), window.failure(dim))


def _shuffle_window(
    trials: int,
    noise_probability: float,
    dim: int,
    max_shift: int,
    shift_norm: float,
    delta_window: float,
) -> tuple[_Window, float]:
    trials = check.positive_count(trials=trials)
    max_shift = check.positive_count(max_shift=max_shift)
    p = check.open_interval(0.0, 1.0, noise_probability=noise_probability)
    outside = check.open_interval(0.0, 1.0, delta_window=delta_window)
    check.positive_count(dim=dim)
    norm = check.positive(shift_norm=shift_norm)
    if max_shift >= _MANY_POINTS:
        raise InfeasibleError(f"max_shift must be < {_MANY_POINTS} (got {max_shift})")
    while (
        scipy.stats.binom.isf(outside / 2, trials, p)
        - scipy.stats.binom.ppf(outside / 2, trials, p)
        > _MANY_POINTS
    ):
        # Bin(N, p) is Bin(N', p) plus independent noise: what holds for fewer bits holds for more
        trials = trials // 4 * 3
    return _Window(trials, p, max_shift, outside), norm


def _shifts(max_shift: int) -> list[int]:
    """Returns 1..8, then steps by factors of at most 1.15, up to max_shift."""
    found = list(range(1, min(8, max_shift) + 1))
    while found[-1] < max_shift:
        found.append(min(max_shift, int(found[-1] * 1.15)))
    return found


def _composed(bounds: list[tuple[int, float]], dim: int, norm: float) -> float:
    """Returns the cost of d coordinates from that of some shifts, where costs are convex in the shift."""
    kappa = bounds[0][1]
    for (low, at_low), (high, at_high) in pairwise(bounds):
        kappa = max(kappa, max(at_low / low**2, at_high / high**2) * _between_shifts(low, high))
    # PRIVACY: every shift counts, also those between the computed ones (test_no_shift_costs_more_than_kappa_says)
    return min(kappa * norm**2, dim * max(bounds[0][1], bounds[-1][1])) * _ROUNDING


def _between_shifts(low: int, high: int) -> float:
    """Returns the largest (chord of s^2) / s^2 over integers in [low, high]."""
    return 1.0 if high <= low + 1 else (low + high) ** 2 / (4.0 * low * high)


def _between_orders(low: float, high: float) -> float:
    """Returns the largest (chord of a (a - 1)) / (a (a - 1)) over [low, high]."""
    ends = math.sqrt(low * high)
    below = math.sqrt((low - 1) * (high - 1))
    return ((low + high - 1) / (ends + below)) ** 2


def _concentrated(pair: _Pair) -> float:
    """Returns a bound of D_a / a over all orders."""
    worst = pair.worst_loss()
    found = 0.0
    before = 1.0
    rate = 0.0
    for order in _ORDERS:
        last = rate
        rate = pair.divergence(order) / order
        found = max(found, max(last, rate) * _between_orders(before, order))
        before = order
        if worst / order <= found:
            break
    # PRIVACY: at all larger orders D_a <= the largest loss (test_rho_covers_every_order)
    return max(found, worst / before)


class _Window:
    """The law Bin(N, p) on a window, next to its shifts by at most `reach`."""

    def __init__(self, trials: int, p: float, reach: int, delta_window: float) -> None:
        first = int(scipy.stats.binom.ppf(delta_window / 2, trials, p))
        last = int(scipy.stats.binom.isf(delta_window / 2, trials, p))
        low = max(first, reach)
        high = min(last, trials - reach)
        self._trials = trials
        if high - low + 2 * reach >= _POINTS:
            raise InfeasibleError(
                f"trials and shift must give a window of at most {_POINTS} points (got"
                f" {high - low})"
            )
        # PRIVACY: what is off the window is rounded up
        # (test_the_lost_mass_of_many_trials_is_the_exact_one_rounded_up)
        self.lost = (
            lower_tail(low - 1, trials, p) + upper_tail(high + 1, trials, p)
        ) * _ROUNDING
        if low > high or self.lost >= 1:
            raise ConditionError(
                f"shift must leave a window within {trials} trials (got {reach})"
            )
        steps = _log_ratios(trials, p, low - reach + 1, high + reach)
        # log P is the running sum of the steps, up to a constant: exact enough for ratios near 1, where the difference
        # of two logarithms of factorials is not
        self._running = np.concatenate([[0.0], np.cumsum(steps)])
        self._running -= self._running.max()
        self._reach = reach
        self._inside = self._running[reach:-reach]
        self._log_weight = self._inside - math.log(float(np.exp(self._inside).sum()))
        self._each = _UNIT * (
            8 + float(np.abs(self._running).max())
        )  # error of a step and of its summation
        self._mirrored = p == 0.5 and low + high == trials  # then both directions are one

    def failure(self, dim: int) -> float:
        """Returns the probability that some coordinate's noise is off the window, rounded up."""
        failure = dim * self.lost * _ROUNDING
        if failure >= 1:
            raise ConditionError(
                f"max_shift must leave a window within {self._trials} trials that misses less than"
                f" 1/{dim} of the noise, and delta_window be below that, for {dim} coordinates (got"
                f" {self._reach}, which misses {self.lost:.3g})"
            )
        return failure

    def pair(self, shift: int) -> _Pair:
        """Returns the law on the window and its shifts by +-s."""
        start = self._reach
        stop = self._running.size - self._reach
        losses = [
            self._inside - self._running[start - shift : stop - shift]
        ]  # log P / Q, Q being P moved up
        if not self._mirrored:
            losses.append(self._inside - self._running[start + shift : stop + shift])
        return _Pair(losses, self._log_weight, -math.log1p(-self.lost), self._each, 2 * shift)


@dataclass
class _Pair:
    """The law P on a window and Q = its shift, in both directions.

    Args:
        losses: log P / Q on the window, for each direction.
        log_weight: log of P, made a law on the window.
        missing: -log P(window).
        each: error of a step of log P and of its summation.
        steps: of which there are in each of the two logarithms of a loss, together.
    """

    losses: list[FloatArray]
    log_weight: FloatArray
    missing: float
    each: float
    steps: int

    def __post_init__(self) -> None:
        self._weight = np.exp(self.log_weight)
        self._largest = [float(np.abs(one).max()) for one in self.losses]
        self._error = self.steps * self.each

    def worst_loss(self) -> float:
        """Returns a bound of log P_W / Q on the window, for both directions."""
        return max(self._largest) + 2 * self._error + self.missing

    def divergence(self, order: float) -> float:
        """Returns D_a(P_W || Q) for the worse direction of the shift, rounded up."""
        bounds = [
            self._one_way(losses, largest, order - 1)
            for losses, largest in zip(self.losses, self._largest, strict=True)
        ]
        return max(0.0, *bounds) + self.missing

    def _one_way(self, losses: FloatArray, largest: float, power: float) -> float:
        terms = power * losses
        largest = power * largest
        if largest < 1:
            np.expm1(terms, out=terms)
            log_mean = math.log1p(float(self._weight @ terms))
            spread = float(self._weight @ np.abs(terms, out=terms)) / math.exp(log_mean)
        else:
            terms += self.log_weight
            peak = float(terms.max())
            terms -= peak
            log_mean = peak + math.log(float(np.exp(terms, out=terms).sum()))
            spread = 1.0
        # margin: errors of losses, weights and sums (docs/proofs/heavy_tailed.md#shuffle-accountant)
        sums = 2 * (self.log_weight.size + self.steps + 1) * self.each
        error = (sums + 16 * _UNIT * (1 + largest)) * spread / power
        return log_mean / power + self._error + error


def _log_ratios(trials: int, p: float, first: int, last: int) -> FloatArray:
    """Returns log P(y) / P(y - 1) = log((N - y + 1) p / (y (1 - p))) for y = first..last."""
    y = np.arange(first, last + 1, dtype=np.float64)
    ratios: FloatArray = np.log(((trials - y + 1) * p) / (y * (1 - p)))
    return ratios


_MOST_TRIALS = 10**13
_CHUNK = 1 << 12
_HALF_LOG_TWO_PI = Decimal("0.91893853320467274178032973640561763986139747363778")


def lower_tail(k: int, trials: int, p: float) -> float:
    """Returns P[Bin(trials, p) <= k], rounded up by at most 3e-8 of itself (1e-11 for up to 1e6 trials).

    Args:
        k: any integer.
        trials: in 0..1e13.
        p: in [0, 1].

    Example:
        >>> 1 <= lower_tail(0, 10, 0.5) * 2**10 < 1 + 1e-11
        True
    """
    return upper_tail(trials - k, trials, 1 - Fraction(p))


def upper_tail(k: int, trials: int, p: float | Fraction) -> float:
    """Returns P[Bin(trials, p) >= k], as `lower_tail` that of at most k."""
    if trials > _MOST_TRIALS:
        raise InfeasibleError(
            f"trials of a binomial law must be <= {_MOST_TRIALS:.0e} (got {trials})"
        )
    p = Fraction(p)
    if k <= 0 or k > trials or p in (0, 1):
        return float(k <= 0 or (k <= trials and p == 1))
    if k <= trials * p:
        low, error = _beyond_the_mean(trials - k + 1, trials, 1 - p)
        return min(1.0, (1 - low * (1 - error)) * (1 + 2 * _UNIT))
    tail, error = _beyond_the_mean(k, trials, p)
    return min(1.0, tail * (1 + error))


def _beyond_the_mean(k: int, n: int, p: Fraction) -> tuple[float, float]:
    """Returns P[Bin(n, p) >= k] for n p < k <= n, and a bound of its relative error."""
    odds = float(
        min(p / (1 - p), Fraction(2) ** 1000)
    )  # larger ones have k = n, where no mass is left
    total, last, at = 1.0, 1.0, k  # in units of the mass at k
    while True:
        ratio = (n - at) / (at + 1) * odds
        # PRIVACY: ratios fall, so that this bounds all that is left (test_tails_are_exact_rounded_up)
        rest = last * ratio / (1 - ratio)
        if rest <= 1e-12 * total:
            break
        j = np.arange(at, min(at + _CHUNK, n), dtype=np.float64)
        masses = last * np.cumprod((n - j) / (j + 1) * odds)
        total = total + float(masses.sum())
        last = float(masses[-1])
        at = at + j.size
    with localcontext(Context(prec=50)):
        tail = float(_log_mass(k, n, p).exp() * Decimal(total + rest))
    # each ratio errs by 3 roundings and that of the odds; a tail below the smallest normal float is rounded up to it
    return max(tail, sys.float_info.min), 2e-12 + 8 * _UNIT * (at - k + 8)


def _log_mass(k: int, n: int, p: Fraction) -> Decimal:
    log_p, log_q = ((Decimal(x.numerator) / Decimal(x.denominator)).ln() for x in (p, 1 - p))
    return (
        _log_factorial(n)
        - _log_factorial(k)
        - _log_factorial(n - k)
        + k * log_p
        + (n - k) * log_q
    )


def _log_factorial(k: int) -> Decimal:
    if k < 64:
        return Decimal(math.factorial(k)).ln()
    x = Decimal(k)
    # Stirling's series, whose error is below the next term: 1 / (1188 x^9) < 5e-20
    series = 1 / (12 * x) - 1 / (360 * x**3) + 1 / (1260 * x**5) - 1 / (1680 * x**7)
    return (x + Decimal("0.5")) * x.ln() - x + _HALF_LOG_TWO_PI + series


FAILURE = 1e-10  # probability that noise is off the window of the accountant, for one release
_STEP = 1.1  # by which noise grows until the accountant agrees
_LARGEST_VARIANCE = (
    2.5e8  # variance of the noise that the accountant tells from less (about 10^9 bits)
)


@dataclass(frozen=True)
class ShuffleParameters:
    """Sizes of the messages of one user and coordinate.

    Args:
        grid: g >= 1, bits for the value.
        noise_bits: b >= 0, bits of noise; 0 gives no privacy.
        noise_probability: p in (0, 1), that a bit of noise is a one.
    """

    grid: int
    noise_bits: int
    noise_probability: float = 0.5

    def __post_init__(self) -> None:
        check.fields(self, grid=check.positive_count, noise_bits=check.count)
        check.fields(self, noise_probability=partial(check.open_interval, 0.0, 1.0))


class Reach(NamedTuple):
    """How far one user moves the counts of a shuffled sum, and the grid where rounding adds at most 10 % of variance.

    Args:
        norm: L2 norm of the move, of (grid, dim).
        grid: of (number of users, dim, rho).
    """

    norm: Callable[[int, int], float]
    grid: Callable[[int, int, float], float]


# vectors that are clipped in L2 norm (Algorithms 10 and 11)
VECTORS = Reach(
    norm=lambda grid, dim: grid + math.sqrt(dim),
    grid=lambda n, dim, rho: max(math.sqrt(5 * n * rho), 4 * math.sqrt(dim), 4),
)
# PRIVACY: all coordinates may move by the whole grid at once (test_all_coordinates_cost_more_than_one_vector)
COORDINATES = Reach(
    norm=lambda grid, dim: grid * math.sqrt(dim),
    grid=lambda n, dim, rho: max(math.sqrt(5 * n * rho / dim), 4),
)  # vectors that are clipped in each coordinate (Algorithm 13)


def shuffle_cost(
    reach: Reach, parameters: ShuffleParameters, n: int, dim: int, failure: float = FAILURE
) -> ShuffleCost:
    """Returns what one shuffled sum of n vectors costs.

    Args:
        reach: `VECTORS` or `COORDINATES`.
        parameters: g, b, p of each coordinate.
        n: public number of users who add their noise, >= 1; of one group, where there are disjoint ones.
        dim: d >= 1.
        failure: probability to be taken from delta, in (0, 1); the result says more where noise hardly reaches g.

    Returns:
        rho of all orders and the failure probability, see `ShuffleCost`.

    Raises:
        ConditionError: too few bits of noise to hide anything.

    Guarantee: replace-one and zero-out, unit: one vector per user, n public.

    Source: docs/proofs/heavy_tailed.md#shuffled-sums.

    Example:
        >>> round(shuffle_cost(VECTORS, ShuffleParameters(64, 314), n=1000, dim=10).rho, 4)
        0.029
        >>> round(shuffle_cost(COORDINATES, ShuffleParameters(64, 314), n=1000, dim=10).rho, 3)
        0.262
    """
    dim = check.positive_count(dim=dim)
    check.open_interval(0.0, 1.0, failure=failure)
    trials = check.positive_count(n=n) * parameters.noise_bits
    if not trials:
        raise ConditionError(
            f"noise_bits must be >= 1 to hide anything (got {parameters.noise_bits})"
        )
    p = parameters.noise_probability
    # much less than the divergence at shift 1, 1 / (2 N p (1 - p)) times the order: else the window alone would cost
    window = min(failure / dim * (1.0 - 1e-6), 1e-3 / (2.0 * trials * p * (1.0 - p)))
    return zcdp_shuffle(
        trials,
        p,
        dim=dim,
        max_shift=parameters.grid,
        shift_norm=reach.norm(parameters.grid, dim) * (1.0 + 1e-12),
        delta_window=window,
    )


def shuffle_parameters(
    reach: Reach,
    n: int,
    dim: int,
    epsilon: float,
    delta: float,
    *,
    grid: int | None = None,
    noise_probability: float = 0.5,
) -> ShuffleParameters:
    """Returns the sizes with the least noise, up to a tenth, with which a shuffled sum is (epsilon, delta)-DP.

    Args:
        reach: `VECTORS` or `COORDINATES`.
        n: public number of users who add their noise, >= 1; of one group, where there are disjoint ones.
        dim: d >= 1.
        epsilon: > 0.
        delta: in (0, 1).
        grid: g; default `reach.grid`.
        noise_probability: p in (0, 1).

    Raises:
        InfeasibleError: no number of bits is enough for the numeric accountant, which tells 10^9 bits from less.

    Guarantee: checked by the numeric accountant, see `shuffle_cost`.

    Source: docs/proofs/heavy_tailed.md#sizes-of-shuffled-sums.

    Example:
        >>> shuffle_parameters(VECTORS, n=1000, dim=10, epsilon=1.0, delta=1e-5, grid=64)
        ShuffleParameters(grid=64, noise_bits=311, noise_probability=0.5)
        >>> shuffle_parameters(COORDINATES, n=1000, dim=10, epsilon=1.0, delta=1e-5, grid=64)
        ShuffleParameters(grid=64, noise_bits=2815, noise_probability=0.5)
    """
    users = check.positive_count(n=n)
    dim = check.positive_count(dim=dim)
    failure = failure_of(delta)
    left = (delta - failure) / (1.0 - failure)
    high = check.positive(epsilon=epsilon)
    while zcdp_epsilon(high, left) < epsilon:
        high *= 2
    rho = scipy.optimize.brentq(lambda r: zcdp_epsilon(r, left) - epsilon, 0.0, high)
    if grid is None:
        grid = math.ceil(reach.grid(users, dim, rho))
    norm = reach.norm(check.positive_count(grid=grid), dim)
    p = check.open_interval(0.0, 1.0, noise_probability=noise_probability)
    bits = math.ceil(1.05 * norm**2 / (2.0 * rho * p * (1.0 - p) * users))
    while bits * users * p * (1.0 - p) < _LARGEST_VARIANCE:
        found = ShuffleParameters(grid, bits, p)
        with suppress(ConditionError):  # too few bits for the grid
            price = shuffle_cost(reach, found, users, dim, failure)
            # PRIVACY: the accountant decides, also on what a grid too long for the noise loses
            # (test_sized_protocols_meet_epsilon_and_delta_exactly)
            if zcdp_epsilon(price.rho, left) <= epsilon and price.failure <= failure:
                return found
        bits = math.ceil(_STEP * bits)
    smallest = norm**2 / (2.0 * _LARGEST_VARIANCE)
    raise InfeasibleError(
        f"epsilon must be larger: rho must be above {smallest:.2g} for this grid (got {rho:.2g})"
    )


def failure_of(delta: float) -> float:
    """Returns the share of delta that a calibrated release leaves to the window of the accountant."""
    return min(FAILURE, check.open_interval(0.0, 1.0, delta=delta) / 100)
