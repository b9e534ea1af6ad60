"""What it costs to measure where rows and targets lie, and how much of a budget to take for it.

Rows with |x| <= B and weights c in [0, 1] give a noisy sum of c x / B, for their center. Records, distances from the
center and targets give noisy counts of those below a threshold, one after the other: private quantiles by bisection.
The levels mu of all Gaussian releases add in squares, with each other and with what follows.

Differs from the paper in: it is not there. Source: docs/proofs/preparation.md
"""

from __future__ import annotations

import math

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import sensitivity_factor

_SHARE, _MOST_SHARE = (
    0.05,
    0.4,
)  # of mu^2, for sums, and for counts; for counts where less is not worth it
_SUM_ERROR, _SUM_USELESS = (
    0.05,
    0.4,
)  # norm of the noise on the center over B: wanted, and not worth it
_COUNT_ERROR, _COUNT_USELESS = (
    0.003,
    0.15,
)  # std of the noise on a count over n: wanted, and not worth it
RADIUS_COUNTS = 7
LOCATION_COUNTS = 16
SPREAD_COUNTS = 8
NARROW = 0.3  # threshold of Huber's loss in spreads of the targets, for steps with momentum, which bear the curvature
NARROW_OF_USERS = 0.5  # the same for users, who are fewer


def number_of_counts(*, rows: bool, targets: bool, spreads: bool) -> int:
    """Returns how many noisy counts are taken: of all records; for a radius; for a location; for a spread.

    Example:
        >>> number_of_counts(rows=True, targets=True, spreads=True)
        32
    """
    return 1 + RADIUS_COUNTS * rows + (LOCATION_COUNTS + SPREAD_COUNTS * spreads if targets else 0)


def sum_level(mu: float, n: int, dim: int, adjacency: str) -> float:
    """Returns the level at which to take the sum of rows, 0 where it does not pay.

    The noise on the center has the norm sqrt(d) moved / (n level) in units of the bound. A twentieth of it is enough;
    a share of mu^2 is the most that is paid; and nothing is where that leaves more than 0.4, since the center of rows
    with features in [0, 1] lies at about 0.8.

    Args:
        mu: level of the whole budget, > 0.
        n: public number of records.
        dim: of rows.
        adjacency: "add_remove", "zero_out" or "replace_one".

    Source: docs/proofs/preparation.md#when-it-pays

    Example:
        >>> round(sum_level(0.2, 10_000, 50, "add_remove"), 4), sum_level(0.2, 100, 50, "add_remove")
        (0.0141, 0.0)
    """
    error = (
        math.sqrt(check.positive_count(dim=dim))
        * sensitivity_factor(adjacency)
        / check.positive_count(n=n)
    )
    return _level(mu, error, _SUM_ERROR, _SUM_USELESS)


def counts_level(mu: float, n: int, counts: int) -> float:
    """Returns the level of so many noisy counts together, 0 where they do not pay.

    Without units steps are blind, so that more than the usual share is paid where that makes counts just good enough.

    Args:
        mu: level of the whole budget, > 0.
        n: public number of records.
        counts: their number.

    Source: docs/proofs/preparation.md#when-it-pays

    Example:
        >>> round(counts_level(0.2, 100_000, 25), 4), round(counts_level(0.2, 500, 25), 4), counts_level(0.2, 200, 25)
        (0.0167, 0.0667, 0.0)
    """
    error = math.sqrt(check.positive_count(counts=counts)) / check.positive_count(n=n)
    level = _level(mu, error, _COUNT_ERROR, _COUNT_USELESS)
    least = error / _COUNT_USELESS
    return level or (least if least <= math.sqrt(_MOST_SHARE) * mu else 0.0)


def share_within(wanted: float, level: float, n: int, counts: int) -> float:
    """Returns the share of rows to keep within the radius: the wanted one, or four stds of a count below all of them.

    It is compared with a noisy number of all: with less room, a radius beyond all rows would be too small. At least a
    half.

    Example:
        >>> share_within(0.9, 0.2, 1000, 25), share_within(0.9, 0.1, 1000, 25), share_within(0.9, 0.01, 1000, 25)
        (0.9, 0.8, 0.5)
    """
    return max(0.5, min(wanted, 1.0 - 4 * math.sqrt(counts) / (level * n)))


def signal_to_noise(mu: float, n: int, dim: int) -> float:
    """Returns n mu / sqrt(d): the sum of n unit gradients over the norm of the noise on it.

    Example:
        >>> signal_to_noise(0.2, 10_000, 100)
        200.0
    """
    return n * mu / math.sqrt(dim)


def residual_clip(signal: float) -> float:
    """Returns where to clip gradients, as a share of the bound on rows: below it, the noise is less.

    Example:
        >>> residual_clip(100.0), residual_clip(5000.0)
        (0.5, 0.7)
    """
    return 0.5 if signal < 700 else 0.7


def robust_width(signal: float) -> float:
    """Returns the threshold of Huber's loss in spreads of the targets: the more noise, the more records count in full.

    For objective perturbation. A slope is worth its noise only with curvature beside it, which a narrow
    parabola has in few records.

    Example:
        >>> robust_width(100.0), robust_width(1000.0), robust_width(10_000.0)
        (1.5, 1.0, 0.5)
    """
    return max(0.5, min(math.sqrt(1000 / signal), 1.5))


def _level(mu: float, error: float, wanted: float, useless: float) -> float:
    level = min(error / wanted, math.sqrt(_SHARE) * check.positive(mu=mu))
    return level if error / level <= useless else 0.0


def level_left(mu: float, spent: float) -> float:
    """Returns the level that a budget of level mu leaves beside Gaussian releases of level `spent`, rounded down."""
    if not 0 <= check.nonnegative(spent=spent) < check.positive(mu=mu):
        raise ValueError(f"spent must be below mu={mu:g} (got {spent:g})")
    # PRIVACY: squares of levels add up (test_what_is_left_and_what_is_spent_are_within_the_level)
    return math.sqrt((mu - spent) * (mu + spent)) * (1 - 1e-15) if spent else mu
