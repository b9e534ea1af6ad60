"""How many bits the shuffled sums need, and what they cost.

A record moves the count of coordinate j by an integer s_j, the noise of N = n b coins hides it, and the numeric
accountant of `accounting.analysis.shuffle` says how well. With rounding coupled (`shuffle.round_randomly`), a value on
the grid that moves by v_j moves a count by less than |v_j| + 1, by 0 if v_j = 0, and by at most g, the bits there are:

    Algorithm 11, |x|_2 <= D:       |v|_2 <= g, so that |s|_2 <= g + sqrt(d);   max |s_j| <= g,   N = n b
    Algorithm 13, |x_j| <= tau:     all d coordinates may move by 2 tau at once: |s|_2 <= g sqrt(d),   max |s_j| <= g,
                                    N = (n / m) b, since a record is in one of m groups

The budget g + sqrt(d) holds after L2 clipping only: with it, Algorithm 13 would be billed at epsilon = 0.97 where its
exact delta is 0.046 instead of 1e-5 (d = 10, n = 1000, g = 64, b = 314).

The cost is one event of the ledger, `ApproxZCDP(rho, failure)`: a coupling failure (noise off the window) and, given
that there is none, D_a <= rho a for all orders. It adds up under composition like all others, and takes 1 % of rho
compared with a curve of one order at a time.

N counts the noise of honest users only: `honest_fraction` of them, rounded down, in each group.

Proofs: docs/proofs/heavy_tailed.md#shuffled-sums, docs/proofs/heavy_tailed.md#sizes-of-shuffled-sums.
Source: Cheu, Joseph, Mao and Peng 2021 (closed form, mode "paper").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.shuffle import ShuffleCost, zcdp_shuffle
from torch_dpsco.accounting.analysis.zcdp import zcdp_rho
from torch_dpsco.accounting.events import REPLACE_ONE, ZERO_OUT, ApproxZCDP
from torch_dpsco.errors import ConditionError, InfeasibleError

FAILURE = 1e-10  # probability that noise is off the window of the accountant, for one release
_STEP = 1.1  # by which noise grows until the accountant agrees
_LARGEST = 2.5e8  # variance of the noise that the accountant tells from less (about 10^9 bits)


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
        p = check.open_interval(0.0, 1.0, noise_probability=self.noise_probability)
        object.__setattr__(self, "grid", check.positive_count(grid=self.grid))
        object.__setattr__(self, "noise_bits", check.count(noise_bits=self.noise_bits))
        object.__setattr__(self, "noise_probability", p)


def vector_cost(
    parameters: ShuffleParameters, n: int, dim: int, *, failure: float = FAILURE, honest_fraction: float = 1.0
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
    parameters: ShuffleParameters, n: int, dim: int, *, failure: float = FAILURE, honest_fraction: float = 1.0
) -> ShuffleCost:
    """Returns what a group of n vectors costs that are clipped in each coordinate (Algorithm 13).

    Arguments, errors and guarantee are those of `vector_cost`; n is the size of one group, and groups are disjoint.

    Example:
        >>> round(coordinate_cost(ShuffleParameters(64, 314), n=1000, dim=10).rho, 3)
        0.262
    """
    dim = check.positive_count(dim=dim)
    # PRIVACY: all coordinates may move by the whole grid at once
    # (test_the_l2_budget_would_under_report_coordinatewise_sums)
    return _cost(parameters, n, dim, parameters.grid * math.sqrt(dim), failure, honest_fraction)


def _cost(
    parameters: ShuffleParameters, n: int, dim: int, shift_norm: float, failure: float, honest_fraction: float
) -> ShuffleCost:
    check.open_interval(0.0, 1.0, failure=failure)
    # PRIVACY: the noise of dishonest users hides nothing (test_only_honest_noise_counts)
    trials = _honest(n, honest_fraction) * parameters.noise_bits
    if not trials:
        raise ConditionError(f"noise_bits must be >= 1 to hide anything (got {parameters.noise_bits})")
    p = parameters.noise_probability
    # much less than the divergence at shift 1, 1 / (2 N p (1 - p)) times the order: else the window alone would cost
    window = min(failure / dim * (1.0 - 1e-6), 1e-3 / (2.0 * trials * p * (1.0 - p)))
    return zcdp_shuffle(
        trials, p, dim=dim, max_shift=parameters.grid, shift_norm=shift_norm * (1.0 + 1e-12), delta_window=window
    )


def _honest(n: int, honest_fraction: float) -> int:
    n, share = check.positive_count(n=n), check.between(0.0, 1.0, honest_fraction=honest_fraction)
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
    dim, target = check.positive_count(dim=dim), _target(epsilon, delta)
    if grid is None:
        grid = math.ceil(max(math.sqrt(5 * check.positive_count(n=n) * target.rho), 4 * math.sqrt(dim), 4))
    norm = check.positive_count(grid=grid) + math.sqrt(dim)

    def cost(parameters: ShuffleParameters) -> ShuffleCost:
        return vector_cost(parameters, n, dim, failure=target.failure, honest_fraction=honest_fraction)

    return _sized(cost, grid, noise_probability, norm, target, _honest(n, honest_fraction))


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
    dim, target = check.positive_count(dim=dim), _target(epsilon, delta)
    if not size:
        raise ValueError(f"groups must be <= batch_size={batch_size} (got {groups})")
    if grid is None:
        grid = math.ceil(max(math.sqrt(5 * size * target.rho / dim), 4))
    norm = check.positive_count(grid=grid) * math.sqrt(dim)

    def cost(parameters: ShuffleParameters) -> ShuffleCost:
        return coordinate_cost(parameters, size, dim, failure=target.failure, honest_fraction=honest_fraction)

    return _sized(cost, grid, noise_probability, norm, target, _honest(size, honest_fraction))


def failure_of(delta: float) -> float:
    """Returns the share of delta that a calibrated release leaves to the window of the accountant."""
    return min(FAILURE, check.open_interval(0.0, 1.0, delta=delta) / 100)


def _target(epsilon: float, delta: float) -> ShuffleCost:
    failure = failure_of(delta)
    rho = zcdp_rho(check.positive(epsilon=epsilon), (delta - failure) / (1.0 - failure))
    return ShuffleCost(rho, failure)


def _sized(
    cost: Callable[[ShuffleParameters], ShuffleCost],
    grid: int,
    p: float,
    norm: float,
    target: ShuffleCost,
    users: int,
) -> ShuffleParameters:
    """Returns the parameters with the least noise of the rule, or 1.1 times as much each time, that meet a target."""
    rho, failure = target
    p = check.open_interval(0.0, 1.0, noise_probability=p)
    bits = math.ceil(1.05 * norm**2 / (2.0 * rho * p * (1.0 - p) * users))
    while bits * users * p * (1.0 - p) < _LARGEST:
        found = ShuffleParameters(grid, bits, p)
        try:
            price = cost(found)
            # PRIVACY: the accountant decides, also on what a grid too long for the noise loses
            # (test_sized_protocols_meet_epsilon_and_delta_exactly)
            if price.rho <= rho and price.failure <= failure:
                return found
        except ConditionError:  # too few bits for the grid
            pass
        bits = math.ceil(_STEP * bits)
    smallest = norm**2 / (2.0 * _LARGEST)
    raise InfeasibleError(f"epsilon must be larger: rho must be above {smallest:.2g} for this grid (got {rho:.2g})")
