"""Public numbers of an exact Gaussian release: the grid, the noise on it, and what the grid costs.

    release = g (n + Z),   n = x / g rounded and cut at 2^50,   Z integer, P(Z) ~ exp(-Z^2 / (2 m^2)) per coordinate,
    m = 2^p,   g = s (1 + 2^-17) / m

It is charged as a Gaussian release with noise std s and sensitivity D (1 + 2^-12), D that of the computed vector x.

1. Grid. Quotient and rounding move x/g by at most 1/4 + 1/2 per coordinate, on both sides of a neighboring pair: n
   moves by at most D/g + (3/2) sqrt(d) in L2. `exact_grid` takes p so large that (3/2) g sqrt(d) is at most 2^-13 D.
2. Noise. Z is, up to a factor of exp(+-2^-1800) per coordinate, a randomized rounding of n + N(0, m^2 - 64): so the
   release is post-processing of a Gaussian release, and holds all that holds for one, sampled or composed. With
   p >= 12, g sqrt(m^2 - 64) is above s.

Source: docs/proofs/exact_gaussian.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_dpsco import _validate as check
from torch_dpsco.errors import ConditionError

_SHARE = 2.0**-12  # of a sensitivity, that is added for the grid
_NOISE = 1.0 + 2.0**-17  # of the std charged: what randomized rounding takes, and a hair
_LEAST_BITS, _MOST_BITS = 12, 40
_RANGE = (2.0**-500, 2.0**500)  # of std: no number of the release is subnormal, or overflows


@dataclass(frozen=True)
class Grid:
    """The public grid of a release and the noise on it.

    Args:
        spacing: g > 0; each coordinate of the release is g times an integer.
        bits: p, log2 of the noise std in units of g.
    """

    spacing: float
    bits: int


def asks_exact(secure: str | None) -> bool:
    """Returns whether noise is to be exact; raises ValueError unless `secure` is None or "exact"."""
    return check.choice((None, "exact"), secure=secure) == "exact"


def require_gaussian(secure: str | None, why: str = "delta = 0 takes K-norm noise, whose law is continuous") -> None:
    """Raises ConditionError if exact noise is asked for where there is none; `why` says what there is, in words."""
    if asks_exact(secure):
        # PRIVACY: (test_what_has_no_exact_form_refuses_by_name)
        raise ConditionError(f"secure must be None here, since exact noise is Gaussian and on the answer: {why}")


def with_grid(sensitivity: float, exact: bool = True) -> float:
    """Returns the sensitivity on the grid, which is that of the vector times 1 + 2^-12; itself if not `exact`."""
    return check.nonnegative(sensitivity=sensitivity) * (1.0 + _SHARE if exact else 1.0)


def exact_grid(std: float, sensitivity: float, dim: int, largest: float = 0.0) -> Grid:
    """Returns the grid of a release that is charged as Gaussian noise of that std at that sensitivity.

    Args:
        std: s charged, in [2^-500, 2^500].
        sensitivity: the least one charged, > 0, grid included: from `with_grid`.
        dim: d >= 1.
        largest: public bound on coordinates, that the grid must reach; 0 if none is known: others are cut at 2^50 g.

    Raises:
        ConditionError: the noise is too large for its sensitivity, or too small, to be drawn in 64-bit integers.

    Guarantee: see this module.

    Example:
        >>> grid = exact_grid(std=2.0, sensitivity=with_grid(0.5), dim=100)
        >>> grid.bits, round(grid.spacing * 2**grid.bits, 4)
        (19, 2.0)
    """
    std, sensitivity = check.positive(std=std), check.positive(sensitivity=sensitivity)
    if not _RANGE[0] <= std <= _RANGE[1]:
        raise ConditionError(f"the noise std must be in [2^-500, 2^500] to be exact (got {std:g})")
    # PRIVACY: 1.5 g sqrt(d) within 2^-13 of the sensitivity, half of what `with_grid` added
    # (test_neighbors_differ_by_at_most_the_charged_sensitivity_on_the_grid)
    bits = math.log2(1.5 * math.sqrt(check.positive_count(dim=dim)) * _NOISE) + math.log2(std) - math.log2(sensitivity)
    p = max(_LEAST_BITS, math.ceil(bits + 13.0))
    spacing = std * _NOISE / 2.0**p
    if p > _MOST_BITS or not check.nonnegative(largest=largest) <= 2.0**49 * spacing:
        raise ConditionError(
            f"secure='exact' needs numbers of 64 bits: noise std over sensitivity times sqrt(dim) must be below 2^26, "
            f"and values below 2^49 steps of the grid (got std {std:g}, sensitivity {sensitivity:g}, dim {dim}, values "
            f"up to {largest:g}); use secure=None"
        )
    return Grid(spacing, p)
