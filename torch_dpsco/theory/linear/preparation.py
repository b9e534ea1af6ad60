"""What it costs to measure where rows and targets lie, and how much of a budget to take for it.

Rows with |x| <= B and weights c in [0, 1] give one vector, the sum of (c x / B, c / 2, c |x|^2 / (2 B^2)): of the
center, the number and the spread of the records. Targets give noisy counts of those below a threshold, one after the
other. All have Gaussian noise, whose levels mu add in squares with each other's and the mechanism's.

Differs from the paper in: it is not there. Source: docs/proofs/preparation.md
"""

from __future__ import annotations

import math

from torch_dpsco import _validate as check
from torch_dpsco.theory.clipping import sensitivity_factor

ROWS_SHARE, TARGETS_SHARE = 0.1, 0.05  # of mu^2, at most
COUNTS = 25  # of targets, at most: all, 16 for the location, 8 for the spread
_ROWS_ERROR, _ROWS_USELESS = 0.05, 0.3  # norm of the noise on the center over B: wanted, and not worth it
_COUNT_ERROR, _COUNT_USELESS = 0.005, 0.1  # std of the noise on a count over n: wanted, and not worth it


def rows_moved(adjacency: str) -> float:
    """Returns how far one record moves the vector of rows: sqrt(3/2), or 2 if it is replaced.

    Example:
        >>> rows_moved("replace_one"), round(rows_moved("add_remove"), 6)
        (2.0, 1.224745)
    """
    return 2.0 if sensitivity_factor(adjacency) == 2 else math.sqrt(1.5) * (1 + 1e-15)


def rows_level(mu: float, n: int, dim: int, adjacency: str) -> float:
    """Returns the level at which to measure rows, 0 where it does not pay.

    The noise on the center has the norm sqrt(d) moved / (n level) in units of the bound. A twentieth of it is enough;
    a share of mu^2 is the most that is paid, and nothing is where that leaves more than 0.3, since the center of rows
    with features in [0, 1] lies at about 0.8 and their spread is about 0.5.

    Args:
        mu: level of the whole budget, > 0.
        n: public number of records.
        dim: of rows.
        adjacency: "add_remove", "zero_out" or "replace_one".

    Source: docs/proofs/preparation.md#when-it-pays

    Example:
        >>> round(rows_level(0.2, 10_000, 50, "add_remove"), 4), rows_level(0.2, 100, 50, "add_remove")
        (0.0173, 0.0)
    """
    least = math.sqrt(check.positive_count(dim=dim)) * rows_moved(adjacency) / check.positive_count(n=n)
    return _level(mu, least, ROWS_SHARE, _ROWS_ERROR, _ROWS_USELESS)


def targets_level(mu: float, n: int) -> float:
    """Returns the level at which to measure targets, all counts together; 0 where it does not pay.

    Args:
        mu: level of the whole budget, > 0.
        n: public number of records.

    Source: docs/proofs/preparation.md#when-it-pays

    Example:
        >>> round(targets_level(0.2, 100_000), 4), targets_level(0.2, 500)
        (0.01, 0.0)
    """
    least = math.sqrt(COUNTS) / check.positive_count(n=n)
    return _level(mu, least, TARGETS_SHARE, _COUNT_ERROR, _COUNT_USELESS)


def _level(mu: float, least: float, share: float, wanted: float, useless: float) -> float:
    level = min(least / wanted, math.sqrt(share) * check.positive(mu=mu))
    return level if least / level <= useless else 0.0


def level_left(mu: float, spent: float) -> float:
    """Returns the level that a budget of level mu leaves beside Gaussian releases of level `spent`, rounded down."""
    if not 0 <= check.nonnegative(spent=spent) < check.positive(mu=mu):
        raise ValueError(f"spent must be below mu={mu:g} (got {spent:g})")
    # PRIVACY: squares of levels add up (test_preparation_and_release_together_have_the_level_of_the_budget)
    return math.sqrt((mu - spent) * (mu + spent)) * (1 - 1e-15) if spent else mu
