"""What floating-point rounding adds to the distance of two runs: the bound must hold for what is COMPUTED.

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
In the sampler "uniform", where a run without a hit costs nothing, it is also assumed that equal inputs give equal
results, or that the order of roundings is chosen without looking at the data.

Source: docs/proofs/rounding.md#two-runs-in-floating-point; Higham, Accuracy and Stability, ch. 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate
from torch_dpsco.errors import ConditionError, MissingConstantError

FloatArray = NDArray[np.float64]
Numbers = TypeVar("Numbers", float, NDArray[np.floating], NDArray[np.float64])

DOUBLE = 2.0**-53
SINGLE = 2.0**-24


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
        _validate.positive_count(dim=self.dim)
        _validate.positive_count(batch_size=self.batch_size)
        _validate.positive(unit_roundoff=self.unit_roundoff)
        _validate.nonnegative(score_offset=self.score_offset)
        if self.gradient_error is not None:
            _validate.nonnegative(gradient_error=self.gradient_error)

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
        self, lr: FloatArray, radii: FloatArray, grad_bounds: FloatArray, exponent: float, constant: float, glm: bool
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
        added = lr * self.gradient_error_of(grad_bounds) + self.update_error(radii, lr * grad_bounds)
        if self.gradient_error is not None:
            return [RoundingErrors(np.zeros_like(lr), added)]
        if not glm:
            raise MissingConstantError(
                "gradient_error must be certified for a loss without scalar score: a bound on the rounding error of "
                "the mean gradient (got None)"
            )
        score = self.score_error(radii)
        forms = [RoundingErrors(8 * lr * score * grad_bounds, added)]
        if exponent == 1:
            forms.append(RoundingErrors(np.zeros_like(lr), added + lr * constant * score))
        elif exponent > 0:
            theta = (1 - exponent) / 64
            powers = np.power(4 * exponent / ((1 + exponent) * theta) * score, exponent)
            scale = math.exp(-2 * exponent / (1 - exponent) * math.log1p(-theta / 2))
            forms.append(RoundingErrors(4 / (1 + exponent) * lr * constant * score * powers, added, scale))
        return forms

    def _gamma(self, operations: int) -> float:
        return gamma(operations, self.unit_roundoff)
