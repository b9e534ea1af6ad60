"""Calibration: the least noise, or the most steps, that a target admits. Never over the target.

Source: spec accounting.md section 9.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch_dpsco import _validate as check
from torch_dpsco.accounting.designs import Design, Disjoint
from torch_dpsco.accounting.events import Adjacency, check_adjacency, clipped_gaussian
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.accounting.report import rounded_up
from torch_dpsco.errors import InfeasibleError

__all__ = ["design_epsilon", "max_steps", "noise_multiplier"]

_LOWEST, _HIGHEST = 1e-3, 1e8


def design_epsilon(
    noise_multiplier: float, delta: float, *, design: Design, steps: int, adjacency: Adjacency, method: str = "best"
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
        0.93
    """
    event = design.event(clipped_gaussian(noise_multiplier), steps)
    return Ledger([event]).epsilon(delta, check_adjacency(adjacency), method)


def _bisect_log(epsilon_at: Callable[[float], float], epsilon: float, low: float, high: float, rtol: float) -> float:
    # invariant: epsilon_at(high) <= epsilon < epsilon_at(low); the conservative end is returned
    while high > low * (1.0 + rtol):
        middle = math.sqrt(low * high)
        if epsilon_at(middle) <= epsilon:
            high = middle
        else:
            low = middle
    return high


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
        steps: number of releases, >= 1.
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

    def epsilon_at(noise: float) -> float:
        return design_epsilon(noise, delta, design=design, steps=steps, adjacency=adjacency, method=method)

    high = 1.0
    while epsilon_at(high) > epsilon:
        if high == _HIGHEST:
            floor = rounded_up(epsilon_at(_HIGHEST))
            raise InfeasibleError(
                f"epsilon must be >= {floor}, the smallest that {steps} steps reach at delta={delta:g} with any "
                f"noise up to {_HIGHEST:g} (got {epsilon:g}); take fewer steps or a larger delta"
            )
        high = min(2.0 * high, _HIGHEST)
    low = high / 2.0
    while epsilon_at(low) <= epsilon:
        high, low = low, low / 2.0
        if low < _LOWEST:
            return high
    return _bisect_log(epsilon_at, epsilon, low, high, rtol)


def max_steps(
    epsilon: float,
    delta: float,
    *,
    noise_multiplier: float,
    design: Design,
    adjacency: Adjacency,
    limit: int = 2**40,
) -> int:
    """Returns the largest number of draws that stays within (epsilon, delta), 0 if not even one does.

    At most `limit`, and at most one pass for a one-pass design. Counts as `design_epsilon` does: for designs that cut
    the data into parts, a started pass costs as much as a whole one.
    """
    check.positive(epsilon=epsilon)
    most = check.positive_count(limit=limit)
    if isinstance(design, Disjoint):
        most = min(most, design.steps_per_epoch)

    def fits(steps: int) -> bool:
        spent = design_epsilon(noise_multiplier, delta, design=design, steps=steps, adjacency=adjacency)
        return spent <= epsilon

    low, high = 0, 1  # `low` fits, and `high` does not, once the doubling has ended below `most`
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
