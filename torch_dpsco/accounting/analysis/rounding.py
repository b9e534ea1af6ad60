"""Rounding: of two runs, of an exact release, and of products.

What floating-point rounding costs: the distance of two runs as COMPUTED, and the grid of an exact Gaussian release.

A computed step on a batch of k <= b records is

    w' = Proj( w - (eta/b) sum_i g~_i ) + r,   g~_i = phi'(t_i + q_i) x_i + e_i,   t_i = w.x_i,
    |q_i| <= q B,   |mean of the e_i| <= eps_g,   |r| <= rho.

Let u = w - v be the difference of two runs before a step on the same records, s_i and s_i' their computed scores,
D_i = phi'(s_i) - phi'(s_i'). By Jensen it suffices to consider one record with step eta' = eta k/b <= eta:

    |u - eta' D x|^2 = |u|^2 - 2 eta' D (t - t') + eta'^2 D^2 |x|^2,      t - t' = (s - s') - (q_i - q_i')
                    <= |u|^2 + { eta'^2 B^2 D^2 - 2 eta' D (s - s') } + 2 eta' |D| 2 q B.

The braces are at most a(eta)^2 by the proof of `expansions`, which needs the scores only; |D| <= 2 G/B, where G/B
bounds |phi'| at the computed scores. So the constant is 8, and with the errors that do not pass a subgradient

    d' <= sqrt(d^2 + a^2 + 8 eta q G) + 2 (eta eps_g + rho),

also at a kink, where the computed gradients may differ by their whole jump although the scores differ by an ulp. For
0 < alpha < 1 a share theta of D (s - s') >= |D|^{1+1/alpha} l^{-1/alpha}, L = l B^{1+alpha}, can pay for q instead:

    max_D { 4 eta q B D - theta eta D^{1+1/alpha} l^{-1/alpha} }
        = (4 / (1+alpha)) eta q L (4 alpha q / ((1+alpha) theta))^alpha

replaces 8 eta q G, and what is left for the braces is a bound with l (2/(2-theta))^alpha in place of l: a^2 grows by
(2/(2-theta))^{2 alpha/(1-alpha)}, at most 1.6 % at theta = (1-alpha)/64. At alpha = 1 phi'(t + q) is phi'(t) plus an
error: eps_g grows by L q and the root stays. Each is a bound for the whole run, the smaller one counts. A hit adds
c eta G/b as before: the error of the differing record is part of eps_g. In step 1 all scores are exactly 0.

For another convex loss (no scalar score) the arguments of its gradient are not known; the user certifies eps_g
(`gradient_error`), or the plan is refused.

IEEE arithmetic with unit roundoff u, gamma(k) = k u / (1 - k u), sums in any order, rows of d features with a computed
norm <= B (their true norm may exceed it by gamma(d + 4), which is counted as an error of score and gradient):

    q      = gamma(2d + 8) (R + offset)      offset: what the loss adds to the score, over B (1/B or Y/B)
    eps_g  = gamma(b + 2d + 64) G            64 roundings for phi', 1/b, the product and the loss' own constants
    rho    = gamma(4) (R + 2 eta G), or gamma(2d + 32) with a projection (the library's `Ball`)
    mean   = gamma(T + 8) R                  running or weighted mean, in double precision

Assumes that nothing of the size u B R_s is lost in underflow, which holds if B R_s > d 2^-960 (2^-96 in single).
Source: docs/proofs/rounding.md#two-runs-in-floating-point; Higham, Accuracy and Stability, ch. 3.

An exact Gaussian release has public numbers of its own:

    release = g (n + Z),   n = x / g rounded and cut at 2^50,   Z integer, P(Z) ~ exp(-Z^2 / (2 m^2)) per coordinate,
    m = 2^p,   g = s (1 + 2^-17) / m

It is charged as a Gaussian release with noise std s and sensitivity D (1 + 2^-12), D that of the computed vector x.

1. Grid. Quotient and rounding move x/g by at most 1/4 + 1/2 per coordinate, on both sides of a neighboring pair: n
   moves by at most D/g + (3/2) sqrt(d) in L2. `exact_grid` takes p so large that (3/2) g sqrt(d) is at most 2^-13 D.
2. Noise. Z is, up to a factor of exp(+-2^-1800) per coordinate, a randomized rounding of n + N(0, m^2 - 64): so the
   release is post-processing of a Gaussian release, and holds all that holds for one, sampled or composed. With
   p >= 12, g sqrt(m^2 - 64) is above s.

Source: docs/proofs/exact_gaussian.md.

Exact products, rounded up to a float.

Margins of rounding: what a bound is enlarged by, so that its own roundings cannot make it too small.

A comment that says "margin" names the lemma that says how large it must be. Removing one is seen by no test where the
numbers that it is for are too rare to be found.

Source: docs/proofs/rounding.md#model-of-arithmetic
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco.errors import ConditionError, MissingConstantError

FloatArray = NDArray[np.float64]
Numbers = TypeVar("Numbers", float, NDArray[np.floating], NDArray[np.float64])

DOUBLE = 2.0**-53


def gamma(operations: int, unit_roundoff: float = DOUBLE) -> float:
    """Returns k u / (1 - k u), which bounds the relative effect of k roundings; rounded up.

    Raises:
        ConditionError: k u > 1/2: the precision is too low for such sums.

    Example:
        >>> gamma(3) == scaled_up(3 * 2.0**-53 / (1 - 3 * 2.0**-53), 8)
        True
    """
    product = operations * unit_roundoff
    if product > 0.5:
        raise ConditionError(
            f"unit_roundoff must be at most {0.5 / operations:g} for sums of {operations} terms "
            f"(got {unit_roundoff:g}): train in double precision"
        )
    return scaled_up(product / (1 - product), 8)


def scaled_up(value: Numbers, roundings: int) -> Numbers:
    """Returns an upper bound on a nonnegative quantity whose computation took at most that many roundings."""
    return value * (1 + (2 * roundings + 4) * DOUBLE)


def safe(value: float, roundings: int = 8) -> float:
    """Returns an upper bound on a positive quantity that was computed with so many roundings, underflow included.

    Example:
        >>> safe(0.0) > 0, 1.0 < safe(1.0) < 1.0 + 1e-14
        (True, True)
    """
    return max(scaled_up(value, roundings), sys.float_info.min)


@dataclass(frozen=True)
class RoundingErrors:
    """Per-step errors: d' <= sqrt(d^2 + scale a^2 + squared) + 2 added.

    Args:
        squared: (T,).
        added: (T,).
        scale: >= 1.
    """

    squared: FloatArray
    added: FloatArray
    scale: float = 1.0


@dataclass(frozen=True)
class Arithmetic:
    """The floating-point arithmetic of a run and the sizes of its sums; methods take numbers or arrays.

    Args:
        dim: d >= 1, number of parameters (features, with the bias).
        batch_size: b >= 1.
        unit_roundoff: u of the parameters and gradients; 2^-53 (default) or 2^-24.
        score_offset: >= 0, largest number that the loss adds to a score, over B: 1/B for margins, Y/B for residuals.
        projected: whether steps end with a projection on a ball.
        gradient_error: certified bound on the error of the computed mean gradient, for losses without scalar score.

    Example:
        >>> 2e-12 < Arithmetic(dim=10_000, batch_size=1).score_error(1.0) < 3e-12
        True
    """

    dim: int
    batch_size: int
    unit_roundoff: float = DOUBLE
    score_offset: float = 0.0
    projected: bool = False
    gradient_error: float | None = None

    def __post_init__(self) -> None:
        check.positive_count(dim=self.dim)
        check.positive_count(batch_size=self.batch_size)
        check.positive(unit_roundoff=self.unit_roundoff)
        check.nonnegative(score_offset=self.score_offset)
        if self.gradient_error is not None:
            check.nonnegative(gradient_error=self.gradient_error)

    def score_error(self, radius: Numbers) -> Numbers:
        """Returns q, the error of a computed score over B, at parameters of this norm."""
        return self._gamma(2 * self.dim + 8) * (radius + self.score_offset)

    def gradient_error_of(self, grad_bound: Numbers) -> Numbers:
        """Returns eps_g, the error of the computed mean gradient apart from that of the scores."""
        if self.gradient_error is not None:
            return 0.0 * grad_bound + self.gradient_error
        return self._gamma(self.batch_size + 2 * self.dim + 64) * grad_bound

    def update_error(self, radius: Numbers, move: FloatArray) -> FloatArray:
        """Returns rho, the error of w - eta g and of the projection; `move` is eta G."""
        return self._gamma(2 * self.dim + 32 if self.projected else 4) * (radius + 2 * move)

    def average_error(self, steps: int, radius: float) -> float:
        """Returns the error of a mean of that many iterates, kept in double precision."""
        return gamma(steps + 8) * radius

    def norm_bound(self, radius: float) -> float:
        """Returns a bound on the true norm of a parameter whose computed norm is at most this radius."""
        return radius * (1 + self._gamma(self.dim + 16))

    def errors(
        self,
        lr: FloatArray,
        radii: FloatArray,
        grad_bounds: FloatArray,
        exponent: float,
        constant: float,
        glm: bool,
    ) -> list[RoundingErrors]:
        """Returns the bounds on the errors of all steps, of which the caller may take whichever is better for the run.

        Args:
            lr: eta_s (T,).
            radii: R_s (T,).
            grad_bounds: G_s (T,), at radius R_s + `score_error(R_s)`.
            exponent: alpha.
            constant: L.
            glm: whether the loss has a scalar score.

        Raises:
            MissingConstantError: no scalar score and no certified gradient_error.
        """
        added = lr * self.gradient_error_of(grad_bounds) + self.update_error(
            radii, lr * grad_bounds
        )
        if self.gradient_error is not None:
            return [RoundingErrors(np.zeros_like(lr), added)]
        if not glm:
            raise MissingConstantError(
                "gradient_error must be certified for a loss without scalar score: a bound on the"
                " rounding error of the mean gradient (got None)"
            )
        score = self.score_error(radii)
        forms = [RoundingErrors(8 * lr * score * grad_bounds, added)]
        if exponent == 1:
            forms.append(RoundingErrors(np.zeros_like(lr), added + lr * constant * score))
        elif exponent > 0:
            theta = (1 - exponent) / 64
            powers = np.power(4 * exponent / ((1 + exponent) * theta) * score, exponent)
            scale = math.exp(-2 * exponent / (1 - exponent) * math.log1p(-theta / 2))
            forms.append(
                RoundingErrors(4 / (1 + exponent) * lr * constant * score * powers, added, scale)
            )
        return forms

    def _gamma(self, operations: int) -> float:
        return gamma(operations, self.unit_roundoff)


_SHARE = 2.0**-12  # of a sensitivity, that is added for the grid
_NOISE = 1.0 + 2.0**-17  # of the std charged: what randomized rounding takes, and a hair
_LEAST_BITS = 12
_MOST_BITS = 40
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


def require_gaussian(
    secure: str | None, why: str = "delta = 0 takes K-norm noise, whose law is continuous"
) -> None:
    """Raises ConditionError if exact noise is asked for where there is none; `why` says what there is, in words."""
    if asks_exact(secure):
        # PRIVACY: (test_what_has_no_exact_form_refuses_by_name)
        raise ConditionError(
            f"secure must be None here, since exact noise is Gaussian and on the answer: {why}"
        )


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
    std = check.positive(std=std)
    sensitivity = check.positive(sensitivity=sensitivity)
    if not _RANGE[0] <= std <= _RANGE[1]:
        raise ConditionError(
            f"the noise std must be in [2^-500, 2^500] to be exact (got {std:g})"
        )
    # PRIVACY: 1.5 g sqrt(d) within 2^-13 of the sensitivity, half of what `with_grid` added
    # (test_neighbors_differ_by_at_most_the_charged_sensitivity_on_the_grid)
    bits = (
        math.log2(1.5 * math.sqrt(check.positive_count(dim=dim)) * _NOISE)
        + math.log2(std)
        - math.log2(sensitivity)
    )
    p = max(_LEAST_BITS, math.ceil(bits + 13.0))
    spacing = std * _NOISE / 2.0**p
    if p > _MOST_BITS or not check.nonnegative(largest=largest) <= 2.0**49 * spacing:
        raise ConditionError(
            "secure='exact' needs numbers of 64 bits: noise std over sensitivity times sqrt(dim)"
            f" must be below 2^26, and values below 2^49 steps of the grid (got std {std:g},"
            f" sensitivity {sensitivity:g}, dim {dim}, values up to {largest:g}); use secure=None"
        )
    return Grid(spacing, p)


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


def up(value: Numbers, share: float) -> Numbers:
    """Returns a value >= 0 enlarged by a share of itself; a value < 0 moves down."""
    return value * (1 + share)


def down(value: Numbers, share: float) -> Numbers:
    """Returns a value >= 0 less a share of itself; a value < 0 moves up."""
    return value * (1 - share)
