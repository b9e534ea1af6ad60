"""A deep point among m models, without bounds: what it costs, and how many models it takes.

A record is in one part, whose model it may move anywhere. The check that few models cannot empty the deep region costs
1/scale, the draw of a point 2 log b + log(1 + g), b the factor of its odds per unit of depth; both fail with
probability at most the larger of g and P(noise >= threshold).

Source: docs/proofs/tukey.md; Amin, Joseph, Ribero and Vassilvitskii 2022, Easy differentially private linear
regression.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from torch_dpsco import _validate as check
from torch_dpsco.errors import InfeasibleError
from torch_dpsco.theory.rounding import scaled_up

_CHECK = 1 / 3  # of epsilon
_STEEPEST = 8.0  # log b, beyond which a draw is the deepest box anyway
_SLACK = 8.0  # scales of its noise by which the check is to be passed
_ROOM = 1.5  # more parts than normal models take: those of small parts have heavier tails
MOST_PARTS, _WANTED, _PER_PARAMETER, _LEAST_PER_PARAMETER = 16_000, 2000, 5, 2


class TukeyNumbers(NamedTuple):
    """Public numbers of the mechanism.

    Args:
        parts: m, number of models.
        depth: t >= 2, least depth of a point that is drawn.
        base: b > 1.
        rarity: g in (0, 1).
        scale: > 0, of the discrete Laplace noise of the check.
        threshold: >= 1.
    """

    parts: int
    depth: int
    base: float
    rarity: float
    scale: float
    threshold: int

    @property
    def epsilon(self) -> float:
        """Of check and draw together, rounded up."""
        # PRIVACY: both are released (test_an_edited_plan_is_refused_or_charges_what_it_draws); margin of the sum
        # (docs/proofs/rounding.md#model-of-arithmetic)
        return scaled_up(1.0 / self.scale + 2.0 * math.log(self.base) + math.log1p(self.rarity), 16)

    @property
    def delta(self) -> float:
        """Of check and draw together, rounded up."""
        return max(scaled_up(self.rarity, 2), bad_pass(self.scale, self.threshold))


def bad_pass(scale: float, threshold: int) -> float:
    """Returns P(noise >= threshold) of discrete Laplace noise on the integers, rounded up; threshold >= 1.

    Source: docs/proofs/tukey.md#the-check

    Example:
        >>> round(bad_pass(1.0, 1), 6)
        0.268941
    """
    rate = 1.0 / check.positive(scale=scale)
    exponent = -check.positive_count(threshold=threshold) * rate
    return scaled_up(math.exp(exponent * (1 - 1e-15)) / (1.0 + math.exp(-rate)), 16)


def tukey_numbers(epsilon: float, delta: float, n: int, dim: int) -> TukeyNumbers:
    """Returns the numbers that keep (epsilon, delta), with as many parts as n allows and normal models need.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        n: public number of records.
        dim: coordinates of a model.

    Raises:
        InfeasibleError: n is too small for the check to be passed even by normal models.

    Source: docs/proofs/tukey.md#how-many-parts

    Example:
        >>> numbers = tukey_numbers(1.0, 1e-6, 100_000, 10)
        >>> numbers.parts, numbers.depth, numbers.threshold
        (2000, 500, 40)
    """
    target, rarity = check.positive(epsilon=epsilon) * (1 - 1e-9), check.open_interval(0, 1, delta=delta) * (1 - 1e-9)
    scale = 1.0 / (target * _CHECK)
    exponent = min((target * (1 - _CHECK) - rarity) / 2, _STEEPEST)
    if not exponent > 2.0**-12:
        raise InfeasibleError(f"epsilon must be above {3 * (2.0**-12 + delta):.2g} for a deep model (got {epsilon:g})")
    steps = 2 ** (8 + max(0, math.ceil(-math.log2(exponent))))
    base = 1.0 + math.floor(math.expm1(exponent) * steps * (1 - 1e-12)) / steps
    threshold = max(1, math.ceil(-math.log(rarity) * scale))
    while threshold > 1 and bad_pass(scale, threshold - 1) <= rarity:
        threshold -= 1
    numbers = TukeyNumbers(0, 0, base, rarity, scale, threshold)
    size = check.positive_count(dim=dim)
    least = next((m for m in _sizes() if _passes(numbers, m, size)), None)
    if least is None:
        raise InfeasibleError(f"epsilon={epsilon:g} takes more than {MOST_PARTS} models of {dim} parameters: raise it")
    if n < _LEAST_PER_PARAMETER * least * size:
        raise InfeasibleError(
            f"n must be >= {_LEAST_PER_PARAMETER * least * size} for a deep model at epsilon={epsilon:g}, delta="
            f"{delta:g}: {least} parts with {_LEAST_PER_PARAMETER * size} records each (got {n}); state bounds"
        )
    parts = max(least, min(n // (_PER_PARAMETER * size), _WANTED))
    return numbers._replace(parts=parts, depth=parts // 4)


def _sizes() -> list[int]:
    sizes = [16]
    while sizes[-1] * 1.1 <= MOST_PARTS:
        sizes.append(math.ceil(sizes[-1] * 1.1))
    return sizes


def _passes(numbers: TukeyNumbers, parts: int, dim: int) -> bool:
    """Returns whether models at normal quantiles, with room, pass the check by enough."""
    m = math.floor(parts / _ROOM)
    t, steps = m // 4, math.ceil(numbers.threshold + _SLACK * numbers.scale)
    low, top = t - 1 - steps, m // 2
    if low < 1 or t + steps > top:
        return False
    normal, rate = NormalDist(), math.log(numbers.base)
    outer = math.log(-normal.inv_cdf(low / (m + 1)))
    inner = range(t + steps, top + 1)
    lost = (
        dim * (outer - math.log(-normal.inv_cdf(i / (m + 1)))) - rate * (i - t - steps) for i in inner if 2 * i <= m
    )
    return min(lost, default=math.inf) <= math.log(numbers.rarity)
