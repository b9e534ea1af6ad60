"""How to choose a clip threshold without guessing it, and what that costs.

The bias of clipping at C is at most E(|g| - C)_+, whose derivative is -P(|g| > C). So for "bias bound + a C", a being
what a unit of C costs in noise, the best threshold is exactly the (1 - a)-quantile of the gradient norm: no moment
order, no moment. The exchange rate a is the planner's.

| tool | charged as |
|---|---|
| `oracles.QuantilePilot` | `Pure(epsilon)`, on a pilot group of records of its own: free under the max rule |
| `oracles.AdaptiveClipped` | each step's noise multiplier holds the count's share |

Proofs: docs/proofs/heavy_tailed.md#exchange-rates, docs/proofs/heavy_tailed.md#private-quantile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco.errors import InfeasibleError, warn

__all__ = [
    "C_MAX",
    "C_MIN",
    "LEAST_PILOT",
    "adaptive_clip_update",
    "pilot_size",
    "rank_error",
    "target_quantile",
    "warn_at_grid_end",
]

C_MIN, C_MAX = 1e-4, 1e4  # default range of thresholds
LEAST_PILOT = 200  # records
RULES = ("theory", "balanced", "median")


@typed
def adaptive_clip_update(clip: float, fraction: float, target: float, lr: float = 0.2) -> float:
    """Returns the next threshold, clip exp(-lr (fraction - target)): post-processing of a private fraction.

    It may be inf or 0, where the factor is beyond floating point.

    Args:
        clip: threshold so far, > 0.
        fraction: private estimate of the fraction of rows below it; noise may put it outside of [0, 1].
        target: quantile to be reached, in [0, 1].
        lr: > 0.

    Raises:
        ValueError: an argument is out of range.

    Source: Andrew, Thakkar, McMahan and Ramaswamy 2021; docs/proofs/heavy_tailed.md#adaptive-clip.

    Example:
        >>> round(adaptive_clip_update(1.0, fraction=0.9, target=0.5), 4)
        0.9231
    """
    off = check.finite(fraction=fraction) - check.between(0.0, 1.0, target=target)
    return check.positive(clip=clip) * math.exp(
        min(-check.positive(lr=lr) * off, 709.0)
    )  # exp(710) would raise


@typed
def pilot_size(n: int) -> int:
    """Returns how many of n records a pilot should have: 5 %, at least 200.

    Raises:
        InfeasibleError: no record would be left to train on.
    """
    size = max(LEAST_PILOT, math.ceil(check.positive_count(n=n) / 20))
    if size >= n:
        raise InfeasibleError(
            f"n must be > {LEAST_PILOT} for a pilot group (got {n}): give a fixed clip"
        )
    return size


@typed
def rank_error(epsilon: float, grid_size: int, failure: float = 0.05) -> float:
    """Returns (2/epsilon) log(K/failure): a private quantile's rank is that near but for this probability.

    Args:
        epsilon: of the exponential mechanism, > 0.
        grid_size: K >= 1.
        failure: in (0, 1).
    """
    size = check.positive_count(grid_size=grid_size)
    return (
        2.0
        / check.positive(epsilon=epsilon)
        * math.log(size / check.open_interval(0.0, 1.0, failure=failure))
    )


@typed
def target_quantile(
    rule: str,
    exchange_rate: float | None = None,
    *,
    pilot_size: int,
    epsilon: float,
    grid_size: int,
    failure: float = 0.05,
) -> float:
    """Returns the quantile of gradient norms at which to clip: that of a rule, as far as the pilot can resolve it.

    * "theory": 1 - a, best for the bias bound; "balanced": min(1 - a, 0.9); "median": 1/2.
    * If a > 0.9 the noise dominates whatever the clip: 0.1, with a warning.
    * Above 1 - 2 rank_error / pilot_size (for 0.9 and below: 1 - rank_error / pilot_size) the release would often be
      more than the largest norm: that, with a warning.

    Args:
        rule: "theory", "balanced" or "median".
        exchange_rate: a >= 0, the growth of the noise per unit of clip; not needed for "median".
        pilot_size: public number of norms.
        epsilon: of the exponential mechanism, > 0.
        grid_size: K, number of thresholds to choose from.
        failure: probability with which the rank error may be larger.

    Raises:
        InfeasibleError: the pilot resolves no quantile at all; names the smallest size that does.
        ValueError: an argument is out of range, or the exchange rate is missing.

    Example:
        >>> target_quantile("balanced", 0.02, pilot_size=500, epsilon=1.0, grid_size=107)
        0.9
    """
    wanted = _wanted(check.choice(RULES, rule=rule), exchange_rate)
    size = check.positive_count(pilot_size=pilot_size)
    error = rank_error(epsilon, grid_size, failure)
    if error >= size:
        raise InfeasibleError(
            f"pilot_size must be >= {math.floor(error) + 1} at epsilon {epsilon:g} (got {size})"
        )
    # ranks near the end are released together with all thresholds above every norm: keep twice the error away from it
    highest = max(1.0 - 2.0 * error / size, min(0.9, 1.0 - error / size))
    if wanted > highest:
        warn(
            f"a pilot of {size} records resolves ranks up to {error:.0f} only: quantile"
            f" {highest:.3f} instead of {wanted:.3f}; a larger pilot_size or epsilon would"
            " resolve it"
        )
    return min(wanted, highest)


def _wanted(rule: str, exchange_rate: float | None) -> float:
    if rule == "median":
        return 0.5
    if exchange_rate is None:
        raise ValueError(
            f"exchange_rate must be given for rule {rule!r} (got None): plans have it"
        )
    rate = check.nonnegative(exchange_rate=exchange_rate)
    if rate > 0.9:
        warn(
            f"noise dominates: a unit of clip costs {rate:.2f} in noise, so no clip gives a useful"
            " step; the quantile is 0.1. Use more records per step, fewer steps or a larger"
            " budget",
            stacklevel=3,
        )
        return 0.1
    return 1.0 - rate if rule == "theory" else min(1.0 - rate, 0.9)


def warn_at_grid_end(threshold: float, grid: Sequence[float] | NDArray[np.float64]) -> None:
    """Warns if a released threshold is an end of its grid. It looks at the private output only, so that it is free."""
    name = {float(grid[0]): "c_min", float(grid[-1]): "c_max"}.get(threshold)
    if name is not None:
        warn(
            f"the private threshold {threshold:g} is at the end of its grid: {name} is probably"
            " wrong",
            stacklevel=3,
        )
