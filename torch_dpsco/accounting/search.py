"""The largest count that still fits, with few evaluations."""

from __future__ import annotations

from collections.abc import Callable

from scipy.optimize import brentq

_HUGE = 1e300  # in place of infinity, which has no line through it


def largest(excess: Callable[[int], float], limit: int, guess: int = 1) -> int:
    """Returns the largest count that fits, by galloping from a guess and then by interpolation over log(count).

    Args:
        excess: what a count >= 1 takes above the limit of a resource, nondecreasing; a count fits if it is <= 0.
        limit: the largest count of interest, >= 0.
        guess: where to start, >= 1.

    Returns:
        A count in 0..limit; 0 if not even one fits. The count returned was evaluated and fits, unless it is 0; the next
        one was evaluated and does not fit, unless it is above the limit.

    Example:
        >>> largest(lambda count: count**2 - 1000.0, limit=10**6)
        31
    """
    low, high, step = 0, max(1, guess), max(1, guess // 8)
    seen: dict[int, float] = {}

    def known(count: int) -> float:
        nonlocal low, high
        if count not in seen:
            seen[count] = max(-_HUGE, min(_HUGE, excess(count)))
            low, high = (low, min(high, count)) if seen[count] > 0 else (max(low, count), high)
        return seen[count]

    while high <= limit and known(high) <= 0:
        high, step = high + step, 2 * step
    high = min(high, limit + 1)
    if low >= 1 and high <= limit and high - low > 1:
        first, last = low, high
        ratio = high / low

        def at(part: float) -> float:
            return known(last if part == 1.0 else min(last, int(first * ratio**part)))

        brentq(at, 0.0, 1.0, xtol=0.1 / high)
    while high - low > 1:
        known((low + high) // 2)
    return low
