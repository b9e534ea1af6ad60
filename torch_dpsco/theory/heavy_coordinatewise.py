"""Choices for the coordinate-wise median of means (Algorithm 12): its threshold and its number of groups.

The noise is `clipping.coordinatewise_noise_std`. Prefer one group, or the l2 clip, unless coordinates differ in tails.

Proof: docs/proofs/heavy_tailed.md#accuracy-of-medians-of-means.
"""

from __future__ import annotations

import math

from torch_dpsco import _validate as check
from torch_dpsco.theory.clipping import clip_threshold_square, coordinatewise_noise_std, safe_exp

__all__ = ["coordinatewise_clip", "coordinatewise_groups"]


def coordinatewise_clip(
    batch_size: int, groups: int, dim: int, rho: float, moment: float, moment_order: float
) -> float:
    """Returns the default tau of the median of means: the square rule with u = d 4^(k-1) and q = d sigma^2/tau^2.

    Args:
        batch_size: s.
        groups: m <= s.
        dim: d.
        rho: > 0.
        moment: gamma > 0 with E|g_j - E g_j|^k <= gamma^k for each coordinate. Also |E g_j| <= tau/2 is assumed: take
            the maximum with twice a public bound on the means, if there is one.
        moment_order: k > 1.

    Source:
        docs/proofs/heavy_tailed.md#accuracy-of-medians-of-means.

    Example:
        >>> round(coordinatewise_clip(batch_size=1000, groups=1, dim=10, rho=0.5, moment=1.0, moment_order=2.0), 3)
        8.891
    """
    k = check.order(moment_order=moment_order)
    std = coordinatewise_noise_std(batch_size, groups, 1.0, dim, rho)
    # d cancels out of both weights; 4^(k-1) is taken out of the logarithm, so that large k do not overflow
    base = clip_threshold_square(moment, k, 1.0, std**2)
    return base * safe_exp((k - 1) * math.log(2.0) / k)


def coordinatewise_groups(dim: int, failure: float) -> int:
    """Returns the number of groups m = ceil(8 log(d/zeta)) of a median of means that holds for all coordinates.

    Args:
        dim: d >= 1.
        failure: zeta in (0, 1).

    Source:
        docs/proofs/heavy_tailed.md#accuracy-of-medians-of-means.

    Example:
        >>> coordinatewise_groups(dim=10, failure=0.1)
        37
    """
    ratio = math.log(check.positive_count(dim=dim)) - math.log(check.open_interval(0.0, 1.0, failure=failure))
    return max(1, math.ceil(8.0 * ratio))
