"""Exact products, rounded up to a float."""

from __future__ import annotations

import math
from fractions import Fraction


def upper(*factors: float | Fraction) -> float:
    """Least float that is not below the exact product of nonnegative factors; inf if one is infinite or it overflows.

    Example:
        >>> upper(0.5, 3.0), upper(0.1, 3.0) >= Fraction(0.1) * 3
        (1.5, True)
    """
    if math.inf in factors:
        return math.inf
    exact = math.prod(Fraction(factor) for factor in factors)
    try:
        nearest = float(exact)
    except OverflowError:
        return math.inf
    return nearest if nearest >= exact else math.nextafter(nearest, math.inf)
