"""Sums in the shuffle model: users send bits, a shuffler mixes them, an analyzer counts them.

Binomial noise is made of uniform bits, by integers alone. The bits that users add to a shuffled sum are many, and only
their number counts. It is drawn by inversion: a table holds the binomial distribution function in units of 2^-124,
computed in integers, and a uniform integer of 124 bits is looked up in it. So the law drawn differs from Bin(N, p) by
at most 2^-110 at any point, and by less than 2^-100 in total variation.

Floating-point samplers (`torch.binomial`) evaluate N log(...) and err by about N 2^-53 in the logarithm of the law, so
that the noise would depend on how a platform rounds.

Sizes and costs. A record moves the count of coordinate j by an integer s_j, the noise of N = n b coins hides it, and
the numeric accountant of `accounting.analysis.shuffle` says how well. With rounding coupled (`shuffle.round_randomly`),
a value on the grid that moves by v_j moves a count by less than |v_j| + 1, by 0 if v_j = 0, and by at most g, the bits
there are:

    Algorithm 11, |x|_2 <= D:       |v|_2 <= g, so that |s|_2 <= g + sqrt(d);   max |s_j| <= g,   N = n b
    Algorithm 13, |x_j| <= tau:     all d coordinates may move by 2 tau at once: |s|_2 <= g sqrt(d),   max |s_j| <= g,
                                    N = (n / m) b, since a record is in one of m groups

The budget g + sqrt(d) holds after L2 clipping only: with it, Algorithm 13 would be billed at epsilon = 0.97 where its
exact delta is 0.046 instead of 1e-5 (d = 10, n = 1000, g = 64, b = 314).

The cost is one event of the ledger, `ApproxZCDP(rho, failure)`: a coupling failure (noise off the window) and, given
that there is none, D_a <= rho a for all orders. It adds up under composition like all others, and takes 1 % of rho
compared with a curve of one order at a time.

N counts the noise of honest users only: `honest_fraction` of them, rounded down, in each group.

The protocol. Algorithm 14 for one number x in [0, L], with integers g (grid) and b (noise bits) and a coin of
probability p:

    user:      k = floor(x g / L) + Ber(x g / L - floor(x g / L)) ones,  Bin(b, p) more ones,  zeros up to g + b bits
    analyzer:  (L / g) (number of ones - p b n)

It is unbiased. Bits have no sender after the shuffle, so that their number is all an analyzer learns: a count path that
draws sum(k) + Bin(n b, p) at once has the law of the bits. Algorithm 11 sums vectors by one such protocol per
coordinate, with messages labelled by the coordinate and values moved from [-D, D] to [0, 2 D].

THE SHUFFLE MODEL HERE IS SIMULATED IN ONE PROCESS, which sees all data. The guarantee is that of the counts, and holds
against an analyzer behind a real shuffler only if the users whose noise it counts are honest (`honest_fraction`).

Differs from the paper in: 1. the sizing of g and b (`shuffle_sizing`); 2. values are moved to [0, 2 D] before they are
rounded and clamped to the grid, so that no rounding of the machine makes a message longer.

Proofs: docs/proofs/heavy_tailed.md#binomial-table, docs/proofs/heavy_tailed.md#shuffled-sums,
docs/proofs/heavy_tailed.md#sizes-of-shuffled-sums. Source: Lowy and Razaviyayn, Algorithms 11 and 14; Cheu, Joseph, Mao
and Peng 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.convert import zcdp_rho
from torch_dpsco.accounting.analysis.shuffle import ShuffleCost, zcdp_shuffle
from torch_dpsco.accounting.events import REPLACE_ONE, ZERO_OUT, ApproxZCDP
from torch_dpsco.errors import ConditionError, InfeasibleError
from torch_dpsco.noise import uniform, words
from torch_dpsco.rng import Source

_WORD = 62  # bits of a half: what an int64 holds with room to compare
_ONE = 1 << (2 * _WORD)
_GUARD = 128  # more bits, for the recurrence
_LARGEST = 2 * 10**10  # trials: a table of two million points


class BinomialNoise:
    """Draws from Bin(N, p).

    Args:
        trials: N >= 0, at most 2 10^10.
        noise_probability: p in (0, 1).

    Example:
        >>> noise = BinomialNoise(1000, 0.5)
        >>> counts = noise.draw((20000,), torch.Generator().manual_seed(0))
        >>> counts.dtype, abs(counts.double().mean().item() - 500) < 0.6
        (torch.int64, True)
    """

    def __init__(self, trials: int, noise_probability: float) -> None:
        self.trials = check.count(trials=trials)
        self.noise_probability = check.open_interval(0.0, 1.0, noise_probability=noise_probability)
        if self.trials > _LARGEST:
            raise InfeasibleError(f"trials must be at most {_LARGEST} to be drawn (got {trials})")
        self._first, self._high, self._low = _table(self.trials, self.noise_probability)

    def draw(self, shape: tuple[int, ...], generator: Source) -> Tensor:
        """Returns independent draws: int64, on the generator's device."""
        if not self.trials:
            return torch.zeros(shape, dtype=torch.int64, device=generator.device)
        high = self._high.to(generator.device)
        top = words(shape, _WORD, generator)
        # the number drawn is that of entries <= the uniform integer; most are decided by its upper half
        index = torch.searchsorted(high, top)
        undecided = (index < len(high)) & (high[index.clamp(max=len(high) - 1)] == top)
        for place in undecided.nonzero():
            where = tuple(place.tolist())
            # PRIVACY: the lower half decides ties (test_the_noise_is_binomial_to_all_its_bits)
            bottom = words((), _WORD, generator)
            tied = self._low[self._high.numpy() == int(top[where])]
            index[where] += int(np.searchsorted(tied, int(bottom), side="right"))
        return index + self._first


def _table(
    trials: int, p: float
) -> tuple[int, Tensor, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Returns the least number drawn and, split in two halves, P(Y <= y) in units of 2^-124 for all y but the last."""
    won, whole = p.as_integer_ratio()
    lost = whole - won
    mode = min(trials, (trials + 1) * won // whole)

    def rising(y: int, won: int, lost: int) -> list[int]:
        weights = [1 << (2 * _WORD + _GUARD)]
        while y < trials and weights[-1] >> (
            _GUARD - 16
        ):  # w(y + 1) / w(y) = (N - y) p / ((y + 1) (1 - p))
            weights.append(weights[-1] * (trials - y) * won // ((y + 1) * lost))
            y += 1
        return weights

    below = rising(trials - mode, lost, won)  # N - Y is Bin(N, 1 - p)
    weights = [*reversed(below), *rising(mode, won, lost)[1:]]
    total = sum(weights)
    running = 0
    high = np.empty(len(weights) - 1, dtype=np.int64)
    low = np.empty(len(weights) - 1, dtype=np.int64)
    for k, weight in enumerate(weights[:-1]):
        running += weight
        high[k], low[k] = divmod(running * _ONE // total, 1 << _WORD)
    return mode - len(below) + 1, torch.from_numpy(high), low


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


def vector_cost(
    parameters: ShuffleParameters,
    n: int,
    dim: int,
    *,
    failure: float = FAILURE,
    honest_fraction: float = 1.0,
) -> ShuffleCost:
    """Returns what one shuffled sum of n vectors costs that are clipped in L2 norm (Algorithms 10 and 11).

    Args:
        parameters: g, b, p of each coordinate.
        n: public number of users, >= 1.
        dim: d >= 1.
        failure: probability to be taken from delta, in (0, 1); the result says more where noise hardly reaches g.
        honest_fraction: of the users whose noise is as the protocol says, in (0, 1].

    Returns:
        rho of all orders and the failure probability, see `ShuffleCost`.

    Raises:
        ConditionError: too few bits of noise to hide anything.

    Guarantee: replace-one and zero-out, unit: one vector per user, n public.

    Source: docs/proofs/heavy_tailed.md#shuffled-sums.

    Example:
        >>> round(vector_cost(ShuffleParameters(64, 314), n=1000, dim=10).rho, 4)
        0.029
    """
    dim = check.positive_count(dim=dim)
    return _cost(parameters, n, dim, parameters.grid + math.sqrt(dim), failure, honest_fraction)


def coordinate_cost(
    parameters: ShuffleParameters,
    n: int,
    dim: int,
    *,
    failure: float = FAILURE,
    honest_fraction: float = 1.0,
) -> ShuffleCost:
    """Returns what a group of n vectors costs that are clipped in each coordinate (Algorithm 13).

    Arguments, errors and guarantee are those of `vector_cost`; n is the size of one group, and groups are disjoint.

    Example:
        >>> round(coordinate_cost(ShuffleParameters(64, 314), n=1000, dim=10).rho, 3)
        0.262
    """
    dim = check.positive_count(dim=dim)
    # PRIVACY: all coordinates may move by the whole grid at once
    # (test_all_coordinates_cost_more_than_one_vector)
    return _cost(parameters, n, dim, parameters.grid * math.sqrt(dim), failure, honest_fraction)


def _cost(
    parameters: ShuffleParameters,
    n: int,
    dim: int,
    shift_norm: float,
    failure: float,
    honest_fraction: float,
) -> ShuffleCost:
    check.open_interval(0.0, 1.0, failure=failure)
    # PRIVACY: the noise of dishonest users hides nothing (test_only_honest_noise_counts)
    trials = _honest(n, honest_fraction) * parameters.noise_bits
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
        shift_norm=shift_norm * (1.0 + 1e-12),
        delta_window=window,
    )


def _honest(n: int, honest_fraction: float) -> int:
    n = check.positive_count(n=n)
    share = check.between(0.0, 1.0, honest_fraction=honest_fraction)
    honest = math.floor(n * share)
    if honest < 1:
        raise ConditionError(f"honest_fraction must leave an honest user among {n} (got {share})")
    return honest


def shuffle_event(cost: ShuffleCost) -> ApproxZCDP:
    """Returns the ledger's event of a cost: under replace_one and zero_out (removing a user changes the public n)."""
    return ApproxZCDP(cost.rho, cost.failure, (REPLACE_ONE, ZERO_OUT))


def vector_parameters(
    n: int,
    dim: int,
    epsilon: float,
    delta: float,
    *,
    grid: int | None = None,
    noise_probability: float = 0.5,
    honest_fraction: float = 1.0,
) -> ShuffleParameters:
    """Returns sizes with which one shuffled sum of L2-clipped vectors is (epsilon, delta)-DP (Algorithms 10 and 11).

    Args:
        n: public number of users, >= 1.
        dim: d >= 1.
        epsilon: > 0.
        delta: in (0, 1).
        grid: g; default max(sqrt(5 n rho), 4 sqrt(d), 4), where rounding adds at most 10 % to the variance.
        noise_probability: p in (0, 1).
        honest_fraction: of the users whose noise is as the protocol says, in (0, 1].

    Raises:
        InfeasibleError: no number of bits is enough for the numeric accountant, which tells 10^9 bits from less.

    Guarantee: checked by the numeric accountant, see `vector_cost`.

    Source: docs/proofs/heavy_tailed.md#sizes-of-shuffled-sums.

    Example:
        >>> vector_parameters(n=1000, dim=10, epsilon=1.0, delta=1e-5, grid=64)
        ShuffleParameters(grid=64, noise_bits=311, noise_probability=0.5)
    """
    dim = check.positive_count(dim=dim)
    target = _target(epsilon, delta)
    if grid is None:
        grid = math.ceil(
            max(math.sqrt(5 * check.positive_count(n=n) * target.rho), 4 * math.sqrt(dim), 4)
        )
    norm = check.positive_count(grid=grid) + math.sqrt(dim)
    return _sized(grid, noise_probability, n, dim, norm, target, honest_fraction)


def coordinate_parameters(
    batch_size: int,
    groups: int,
    dim: int,
    epsilon: float,
    delta: float,
    *,
    grid: int | None = None,
    noise_probability: float = 0.5,
    honest_fraction: float = 1.0,
) -> ShuffleParameters:
    """Returns sizes with which one median of m shuffled sums is (epsilon, delta)-DP (Algorithm 13).

    Args:
        batch_size: s, public number of users.
        groups: m in 1..s; each group has floor(s / m) users.
        dim: d >= 1.
        epsilon: > 0.
        delta: in (0, 1).
        grid: g; default max(sqrt(5 (s / m) rho / d), 4), where rounding adds at most 10 % to the variance.
        noise_probability: p in (0, 1).
        honest_fraction: of the users of each group whose noise is as the protocol says, in (0, 1].

    Raises:
        InfeasibleError: no number of bits is enough for the numeric accountant, which tells 10^9 bits from less.

    Guarantee: checked by the numeric accountant, see `coordinate_cost`.

    Source: docs/proofs/heavy_tailed.md#sizes-of-shuffled-sums.

    Example:
        >>> coordinate_parameters(batch_size=1000, groups=1, dim=10, epsilon=1.0, delta=1e-5, grid=64)
        ShuffleParameters(grid=64, noise_bits=2815, noise_probability=0.5)
    """
    size = check.positive_count(batch_size=batch_size) // check.positive_count(groups=groups)
    dim = check.positive_count(dim=dim)
    target = _target(epsilon, delta)
    if not size:
        raise ValueError(f"groups must be <= batch_size={batch_size} (got {groups})")
    if grid is None:
        grid = math.ceil(max(math.sqrt(5 * size * target.rho / dim), 4))
    norm = check.positive_count(grid=grid) * math.sqrt(dim)
    return _sized(grid, noise_probability, size, dim, norm, target, honest_fraction)


def failure_of(delta: float) -> float:
    """Returns the share of delta that a calibrated release leaves to the window of the accountant."""
    return min(FAILURE, check.open_interval(0.0, 1.0, delta=delta) / 100)


def _target(epsilon: float, delta: float) -> ShuffleCost:
    failure = failure_of(delta)
    rho = zcdp_rho(check.positive(epsilon=epsilon), (delta - failure) / (1.0 - failure))
    return ShuffleCost(rho, failure)


def _sized(
    grid: int, p: float, n: int, dim: int, norm: float, target: ShuffleCost, honest_fraction: float
) -> ShuffleParameters:
    """Returns the parameters with the least noise of the rule, or 1.1 times as much each time, that meet a target."""
    (rho, failure), users = target, _honest(n, honest_fraction)
    p = check.open_interval(0.0, 1.0, noise_probability=p)
    bits = math.ceil(1.05 * norm**2 / (2.0 * rho * p * (1.0 - p) * users))
    while bits * users * p * (1.0 - p) < _LARGEST_VARIANCE:
        found = ShuffleParameters(grid, bits, p)
        try:
            price = _cost(found, n, dim, norm, failure, honest_fraction)
            # PRIVACY: the accountant decides, also on what a grid too long for the noise loses
            # (test_sized_protocols_meet_epsilon_and_delta_exactly)
            if price.rho <= rho and price.failure <= failure:
                return found
        except ConditionError:  # too few bits for the grid
            pass
        bits = math.ceil(_STEP * bits)
    smallest = norm**2 / (2.0 * _LARGEST_VARIANCE)
    raise InfeasibleError(
        f"epsilon must be larger: rho must be above {smallest:.2g} for this grid (got {rho:.2g})"
    )


def grid_values(values: Tensor, upper: float, grid: int) -> Tensor:
    """Returns x g / L in [0, g], float64, for values that are clamped to [0, L]; NaN counts as 0."""
    # PRIVACY: a place past g would be a message too long (test_no_value_leaves_the_grid)
    return (values.double() / upper).nan_to_num_(nan=0.0).clamp_(0.0, 1.0) * float(grid)


def round_randomly(places: Tensor, generator: Source) -> Tensor:
    """Returns floor(v) + Ber(v - floor(v)) for places v on the grid: int64, unbiased.

    With one uniform u for two values it is ceil(v - u): they come out less than |v - v'| + 1 apart.
    """
    whole = places.floor()
    # v - floor(v) is exact; the uniform number has 53 bits
    drawn = uniform(places.shape, generator).to(places.device)
    return whole.to(torch.int64) + (drawn < places - whole).to(torch.int64)


def centered_sum(count: Tensor, n: int, bound: float, parameters: ShuffleParameters) -> Tensor:
    """Returns (2 D / g) (count - p b n) - n D, the estimate of a sum of n numbers in [-D, D] from counts of ones."""
    expected = parameters.noise_probability * (parameters.noise_bits * n)
    # in this order a count at its mean gives an exact zero
    return (count.double() - (expected + n * parameters.grid / 2.0)) * (
        2.0 * bound / parameters.grid
    )


def largest_count(n: int, parameters: ShuffleParameters) -> int:
    """Returns n (g + b), the number of bits of a coordinate; raises ValueError if it is not exact in float64."""
    most = n * (parameters.grid + parameters.noise_bits)
    if most >= 2**53:
        raise ValueError(
            f"n * (grid + noise_bits) must be below 2^53 (got {most:.3g}, {math.log2(most):.1f}"
            " bits)"
        )
    return most
