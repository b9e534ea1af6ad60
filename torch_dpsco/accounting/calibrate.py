"""Calibration: the least noise that stays within a target, and searches for the largest count that does.

Source: docs/proofs/accounting.md#figures-of-a-report.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_CEILING, Context

import scipy

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.accounting.analysis.allocation import allocation_noise
from torch_dpsco.accounting.designs import Assigned, Design
from torch_dpsco.accounting.events import Adjacency, check_adjacency, clipped_gaussian
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import InfeasibleError

MOST = 2**40  # steps that are counted
_HUGE = 1e300  # in place of infinity, which has no line through it


def rounded_up(value: float, digits: int = 4) -> str:
    """Returns the value >= 0 with that many significant digits (1 to 15), never less than it is.

    Example:
        >>> rounded_up(0.99991), rounded_up(1e-5), rounded_up(float("inf"))
        ('1', '1e-05', 'inf')
    """
    # PRIVACY: printed figures are quoted, and typed in again as a budget (test_no_printed_epsilon_is_rounded_down)
    exact = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    return f"{float(exact):.{digits}g}"


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
    low = 0
    high = max(1, guess)
    step = max(1, guess // 8)
    seen: dict[int, float] = {}

    def known(count: int) -> float:
        nonlocal low, high
        if count not in seen:
            seen[count] = max(-_HUGE, min(_HUGE, excess(count)))
            if seen[count] > 0:
                high = min(high, count)
            else:
                low = max(low, count)
        return seen[count]

    while high <= limit and known(high) <= 0:
        high = high + step
        step = 2 * step
    high = min(high, limit + 1)
    if low >= 1 and high <= limit and high - low > 1:
        first = low
        last = high
        ratio = high / low

        def at(part: float) -> float:
            return known(last if part == 1.0 else min(last, int(first * ratio**part)))

        scipy.optimize.brentq(at, 0.0, 1.0, xtol=0.1 / high)
    while high - low > 1:
        known((low + high) // 2)
    return low


_LOWEST = 1e-3
_HIGHEST = 1e8


def design_epsilon(
    noise_multiplier: float,
    delta: float,
    *,
    design: Design,
    steps: int,
    adjacency: Adjacency,
    method: str = "best",
) -> float:
    """Returns epsilon at delta of `steps` draws of clipped sums with this noise.

    Args:
        noise_multiplier: noise std on the sum over the clip norm, >= 0.
        delta: in (0, 1).
        design: how batches are drawn.
        steps: number of releases, >= 0.
        adjacency: neighboring relation.
        method: see `curves.epsilon_of`.

    Example:
        >>> from torch_dpsco.accounting.designs import Poisson
        >>> round(design_epsilon(1.0, 1e-5, design=Poisson(256, 60000), steps=235, adjacency="add_remove"), 2)
        0.39
    """
    check.open_interval(0.0, 1.0, delta=delta)
    event = design.event(clipped_gaussian(noise_multiplier), steps)
    return Ledger([event]).epsilon(delta, check_adjacency(adjacency), method)


def epoch_steps(design: Design, epochs: float) -> int:
    """Returns the number of draws of some epochs: whole epochs of `batches`, and a part of one rounded up.

    Example:
        >>> from torch_dpsco.accounting.designs import Poisson
        >>> epoch_steps(Poisson(1, 93), 1), epoch_steps(Poisson(256, 60000), 0.5)
        (93, 118)
    """
    if check.positive(epochs=epochs) == int(epochs):
        return (
            int(epochs) * design.batches
        )  # what a loop over that many iterations of the loader makes
    return math.ceil(epochs * design.n / design.batch_size - 1e-9)


@typed
def noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    design: Design,
    steps: int,
    adjacency: Adjacency,
    method: str = "best",
    rtol: float = 1e-4,
) -> float:
    """Returns the least noise multiplier, to relative accuracy rtol and rounded up, that meets a target.

    Args:
        epsilon: target, > 0.
        delta: target, in (0, 1).
        design: how batches are drawn.
        steps: number of releases, >= 1; those of some passes are `epoch_steps`.
        adjacency: neighboring relation of the target.
        method: see `curves.epsilon_of`.
        rtol: relative accuracy of the result, in [1e-12, 1].

    Raises:
        InfeasibleError: no noise up to 1e8 meets the target; names the smallest epsilon that can be met.
        AdjacencyError: the design has no guarantee under this adjacency.
    """
    check.positive(epsilon=epsilon)
    check.open_interval(0.0, 1.0, delta=delta)
    check.positive_count(steps=steps)
    check.between(1e-12, 1.0, rtol=rtol)

    def epsilon_at(noise: float, method: str = method) -> float:
        return design_epsilon(
            noise, delta, design=design, steps=steps, adjacency=adjacency, method=method
        )

    if isinstance(design, Assigned) and design.amplification and method in ("best", "pld"):
        passes = math.ceil(steps / design.batches)
        return allocation_noise(
            epsilon, delta, design.batches, check_adjacency(adjacency), epochs=passes
        )
    # never below what the method says, and much faster
    cheap = "rdp" if method in ("best", "pld") else method
    high = 1.0
    while high < _HIGHEST and epsilon_at(high, cheap) > epsilon:
        high = min(2.0 * high, _HIGHEST)
    if high == _HIGHEST and epsilon_at(high) > epsilon:
        raise InfeasibleError(
            f"epsilon must be >= {rounded_up(epsilon_at(high))}, the smallest that {steps} steps"
            f" reach at delta={delta:g} with any noise up to {_HIGHEST:g} (got {epsilon:g}); take"
            " fewer steps or a larger delta"
        )
    low = high / 2.0
    while epsilon_at(low, cheap) <= epsilon or epsilon_at(low) <= epsilon:
        high = low
        low = low / 2.0
        if low < _LOWEST:
            return high
    return _least(epsilon_at, epsilon, low, high, rtol / 4.0)


def _least(
    epsilon_at: Callable[[float], float],
    epsilon: float,
    low: float,
    high: float,
    tolerance: float,
) -> float:
    """Returns the least noise that meets a target, which the higher one does and the lower one does not."""

    def excess(log_noise: float) -> float:
        spent = epsilon_at(math.exp(log_noise))
        return max(-50.0, min(50.0, math.log(spent / epsilon))) if spent > 0 else -50.0

    root = float(
        scipy.optimize.brentq(
            excess, math.log(low), math.log(high), xtol=tolerance, rtol=4.0 * 2.0**-52
        )
    )
    noise = math.exp(root) * (1.0 + tolerance)
    # PRIVACY: only what meets the target (test_only_noise_that_was_seen_to_meet_the_target_is_returned)
    while noise < high and epsilon_at(noise) > epsilon:
        noise *= 1.0 + tolerance
    return min(noise, high)
