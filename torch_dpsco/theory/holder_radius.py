"""How far from 0 the iterates of SGD can be, for Hoelder-smooth convex losses on an unbounded domain.

    R_1 = 0,    R_{s+1} = min( sqrt(R_s^2 + A(eta_s)), R_s + eta_s G(R_s) )

The first branch is that of a nonnegative convex loss,

    A = 2 eta M0 + (1-alpha)/(1+alpha) (L eta)^{2/(1-alpha)};

at exponent 0 the second term is eta^2 G0^2, at exponent 1 it is 0. Proof: |w - eta g|^2 = |w|^2 - 2 eta <w, g> +
eta^2 |g|^2 with -<w, g> <= l(0) - l(w), and the last term against - 2 eta l(w) by self-bounding |g| <=
c l^{alpha/(1+alpha)} and Young. The second branch is the triangle inequality. Radii are deterministic: nothing that
depends on the data, and no realized iterate, enters.

At exponent 0, A takes G at the radius. After the first 512 steps, radii are bounded in blocks of 1/64 of the steps
before, by the same two inequalities, so that a million steps take milliseconds. The bounds may include rounding
(`holder_rounding`).

Source: docs/proofs/holder.md#radius-of-the-iterates.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_dpsco import _validate
from torch_dpsco.errors import ConditionError
from torch_dpsco.theory.holder_rounding import Arithmetic, scaled_up
from torch_dpsco.theory.holder_stability import step_sizes

FloatArray = NDArray[np.float64]

_U = 2.0**-53
_LARGEST_LOG = 700.0
_EXACT_STEPS = 512


def _growth(alpha: float, constant: float, loss_at_zero: float, lr: FloatArray) -> FloatArray:
    """Returns A(eta) of every step size, without the term of alpha = 0, which depends on the radius."""
    alpha = _validate.between(0.0, 1.0, holder_exponent=alpha)
    constant, largest = _validate.positive(holder_constant=constant), float(np.max(lr, initial=0.0))
    growth = 2 * lr * loss_at_zero
    if alpha == 1 and largest > 1.0 / constant:
        raise ConditionError(
            f"lr must be at most 1/L = {1.0 / constant:g} for a smooth loss on an unbounded domain (got {largest:g})"
        )
    if 0 < alpha < 1:
        logs = (math.log1p(-alpha) - math.log1p(alpha)) + 2 * (math.log(constant) + np.log(lr)) / (1 - alpha)
        terms = 4 * (abs(math.log(constant)) + np.abs(np.log(lr))) / (1 - alpha)
        if np.max(logs, initial=-math.inf) > _LARGEST_LOG:
            raise ConditionError(f"lr: step size too large for this alpha: A(eta) overflows (got {largest:g})")
        growth = growth + np.exp(logs + 8 * _U * (terms + np.abs(logs)))
    return np.asarray(growth * (1 + 16 * _U), dtype=np.float64)


def iterate_bounds(
    lr: ArrayLike,
    grad_bound: Callable[[float], float],
    *,
    holder_exponent: float,
    holder_constant: float,
    loss_at_zero: float,
    arithmetic: Arithmetic | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Returns (R_s), (G_s): bounds on |w_s| and on gradient norms at w_s, s = 1..T, on an unbounded domain.

    R_1 = 0, R_{s+1} = min( sqrt(R_s^2 + A_s), R_s + eta_s G_s ) + r_s, G_s = G(R_s + q_s), where with arithmetic given
    q_s is the error of the scores (over B), A_s grows by 2 eta_s q_s G_s, for -phi'(s) s <= phi(0) - phi(s) holds at
    the computed score, and r_s = eta_s eps_g + rho_s; see `holder_rounding`. r may be taken out of the root by the
    induction of this module. In a block of steps both inequalities are iterated with the errors and the gradient bound
    at a radius that the end of the block is then found not to exceed (or the radius is doubled).

    Args:
        lr: step sizes (T,), all > 0, fixed in advance.
        grad_bound: nondecreasing r -> G(r), e.g. `Problem.grad_bound`.
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0.
        loss_at_zero: M0 >= 0.
        arithmetic: in which the run is computed; None for real numbers.

    Raises:
        ConditionError: holder_exponent is 1 and a step size is > 1/L, or A overflows.

    Guarantee: for every data set for which the promised constants hold, surely.

    Source: docs/proofs/holder.md#radius-of-the-iterates, docs/proofs/rounding.md#two-runs-in-floating-point.
    """
    sizes = step_sizes(lr)
    growth = _growth(holder_exponent, holder_constant, _validate.nonnegative(loss_at_zero=loss_at_zero), sizes)
    radii, bounds = np.empty_like(sizes), np.empty_like(sizes)
    radius, start = 0.0, 0
    while start < sizes.size:
        length = 1 if start < _EXACT_STEPS else min(start // 64, sizes.size - start)
        block = slice(start, start + length)
        reach = radius if length == 1 else 1.001 * math.sqrt(radius**2 + float(growth[block].sum()))
        while True:
            score = 0.0 if arithmetic is None else arithmetic.score_error(reach)
            bound = _validate.nonnegative(grad_bound=grad_bound(reach + score))
            path = _path_of_radii(radius, reach, bound, sizes[block], growth[block], arithmetic, holder_exponent == 0)
            if length == 1 or path[-2] <= reach:
                break
            reach *= 2
        radii[block], bounds[block] = path[:-1], bound
        radius, start = float(path[-1]), start + length
    return radii, bounds


def _path_of_radii(
    radius: float,
    reach: float,
    bound: float,
    lr: FloatArray,
    growth: FloatArray,
    arithmetic: Arithmetic | None,
    rough: bool,
) -> FloatArray:
    """Returns bounds on the norms before each step of a block and after the last, if none before exceeds `reach`."""
    added, score = np.zeros_like(lr), 0.0
    if arithmetic is not None:
        score = arithmetic.score_error(reach)
        added = lr * arithmetic.gradient_error_of(bound) + arithmetic.update_error(reach, lr * bound)
    squares = growth + 2 * lr * score * bound + ((lr * bound) ** 2 if rough else 0.0)
    slow = np.sqrt(radius**2 + np.cumsum(squares))
    fast = radius + np.cumsum(lr * bound)
    ends = scaled_up(np.minimum(slow, fast) + np.cumsum(added), 2 * lr.size + 16)
    return np.concatenate([[radius], ends])
