"""Step sizes for Hoelder-smooth losses that balance the bound on the risk, and how far apart two runs drift.

Source: docs/proofs/holder.md#risk-of-gradient-perturbation; Wang, Lei, Ying and Zhang, Algorithms 1 and 2.

How far apart two runs of SGD drift, and how far from 0 they go, for Hoelder-smooth convex losses.

Two runs see the same batches of data sets that differ in one record. Their distance d grows in two ways:

    other records   d' <= sqrt(d^2 + a^2)                  `expansions`: a = 0 for smooth losses, L eta at exponent 0
    a hit           d' <= sqrt(d^2 + a^2) + c eta G / b    the batch of b holds the differing record

with G a bound on gradient norms at the radius that the iterates can have reached (`iterate_bounds`), and c = 2 for a
replaced record, 1 for one replaced by a null record. After hits h_1..h_k and m expanding steps d <= a sqrt(m) + sum h:
induction, by (a sqrt(m) + h)^2 + a^2 <= (a sqrt(m + 1) + h)^2. So the average sum_t v_t w_t moves by at most

    Delta(H) = drift + sum_{s in H} hit_s,    drift = sum_t v_t sqrt(sum_{s=2}^{t-1} a(eta_s)^2),
    hit_s = (c / b) eta_s G_s V_s,            V_s = sum_{t > s} v_t

over the set H of hit steps: a `RunPath`. Step 1 never expands, for both runs start at 0.

Every number that scales noise is rounded up; a(eta) is evaluated in log space with an error bound for every exponent
below 1, none is treated as 1. What rounding of the runs adds is in `accounting.analysis.rounding`.

On an unbounded domain the iterates can be as far from 0 as

    R_1 = 0,    R_{s+1} = min( sqrt(R_s^2 + A(eta_s)), R_s + eta_s G(R_s) )

The first branch is that of a nonnegative convex loss,

    A = 2 eta M0 + (1-alpha)/(1+alpha) (L eta)^{2/(1-alpha)};

at exponent 0 the second term is eta^2 G0^2, at exponent 1 it is 0. Proof: |w - eta g|^2 = |w|^2 - 2 eta <w, g> +
eta^2 |g|^2 with -<w, g> <= l(0) - l(w), and the last term against - 2 eta l(w) by self-bounding |g| <=
c l^{alpha/(1+alpha)} and Young. The second branch is the triangle inequality. Radii are deterministic: nothing that
depends on the data, and no realized iterate, enters.

At exponent 0, A takes G at the radius. After the first 512 steps, radii are bounded in blocks of 1/64 of the steps
before, by the same two inequalities, so that a million steps take milliseconds. The bounds may include rounding.

Source: docs/proofs/holder.md#distance-of-two-runs, docs/proofs/holder.md#radius-of-the-iterates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rounding import Arithmetic, scaled_up
from torch_dpsco.errors import ConditionError


def balanced_lr(
    distance: float, steps: int, grad_bound: float, dim: int, noise_std: float
) -> float:
    """Returns the step size D / sqrt(T (G^2 + d s^2)) that balances the two terms of `average_risk_bound`.

    Args:
        distance: D > 0, guess of |w_1 - w*|; the radius of the feasible set is one.
        steps: T >= 1.
        grad_bound: G >= 0, bound on per-sample gradient norms.
        dim: d >= 1, number of parameters.
        noise_std: s >= 0, std of the noise on the mean gradient.

    Example:
        >>> balanced_lr(distance=1.0, steps=100, grad_bound=1.0, dim=1, noise_std=0.0)
        0.1
    """
    second_moment = grad_bound**2 + dim * noise_std**2
    if second_moment == 0:
        raise ValueError("grad_bound must be > 0 when there is no noise (got 0)")
    return distance / math.sqrt(steps * second_moment)


def average_risk_bound(
    distance: float,
    steps: int,
    lr: float,
    grad_bound: float,
    dim: int,
    noise_std: float,
    batch_size: int,
) -> float:
    """Returns a bound on the expected excess empirical risk of the uniform average of w_1..w_T.

    D^2/(2 eta T) + (eta/2) (G^2 (1 + 1/b) + d s^2), for convex losses, projected steps and no clipping bias. Proof: the
    expected square of the noisy mean is at most the bracket (the variance of a Poisson batch of expected size b with
    divisor b is at most G^2/b); sum the usual inequality for projected stochastic gradient steps.

    Args:
        distance: D, bound on |w_1 - w*|.
        steps: T.
        lr: eta.
        grad_bound: G, bound on per-sample gradient norms over the feasible set.
        dim: d.
        noise_std: s, std of the noise on the mean gradient.
        batch_size: b.
    """
    second_moment = grad_bound**2 * (1.0 + 1.0 / batch_size) + dim * noise_std**2
    return distance**2 / (2.0 * lr * steps) + 0.5 * lr * second_moment


FloatArray = NDArray[np.float64]

_U = 2.0**-53
_LARGEST_LOG_RATE = 350.0  # of a, so that a^2 does not overflow


# The expansion of one step.


def expansions(
    holder_exponent: float, holder_constant: float, lr: FloatArray, glm: bool = False
) -> FloatArray:
    """Returns a(eta), by which one step on the same records moves two runs apart: d' <= sqrt(d^2 + a^2), rounded up.

    a = sqrt((1-alpha)/(1+alpha)) k^{alpha/(1-alpha)} (L eta)^{1/(1-alpha)} with k = 1/2, or alpha/(1+alpha) for a GLM.

    Proof. For D = g(w) - g(w'), convexity on R^d gives <w - w', D> >= (2 alpha/(1+alpha)) L^{-1/alpha} |D|^{1+1/alpha};
    for phi(w.x) only t = x.(w - w') moves and t dphi >= |dphi|^{1+1/alpha} l^{-1/alpha} with L = l B^{1+alpha}.
    Maximize eta^2 |D|^2 - 2 eta <w - w', D> over |D|. A mean over a batch is covered by Jensen.

    Args:
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0, on all of R^d.
        lr: step sizes eta > 0, (T,).
        glm: whether the loss is phi(w.x; y) with a scalar score.

    Returns:
        a >= 0 of each step; underflow to 0 is correct.

    Raises:
        ConditionError: alpha = 1 and eta > 2/L, or a overflows.
        ValueError: an argument is out of range.

    Source: docs/proofs/holder.md#expansion-of-a-step, docs/proofs/holder.md#expansion-with-a-scalar-score.
    """
    alpha = check.between(0.0, 1.0, holder_exponent=holder_exponent)
    constant = check.positive(holder_constant=holder_constant)
    largest = float(np.max(lr, initial=0.0))
    if alpha == 1 and largest > 2.0 / constant:
        raise ConditionError(
            f"lr must be at most 2/L = {2.0 / constant:g} for a smooth loss (got {largest:g})"
        )
    logs = log_expansion(alpha, constant, np.log(lr), glm)
    if np.max(logs, initial=-math.inf) > _LARGEST_LOG_RATE:
        raise ConditionError(
            f"lr: step size too large for this alpha: its expansion overflows (got {largest:g})"
        )
    # PRIVACY: rounded up (test_the_expansion_is_never_below_its_value_in_high_precision); margin of
    # the exponential (docs/proofs/rounding.md#model-of-arithmetic)
    return np.asarray(scaled_up(np.exp(logs), 4))


def log_expansion(alpha: float, constant: float, log_lr: FloatArray, glm: bool) -> FloatArray:
    """Returns an upper bound on log a(eta), tight to a few ulps of its terms; -inf at alpha = 1. No checks."""
    if alpha == 1:
        return np.full_like(log_lr, -math.inf)
    factor = alpha * math.log(alpha / (1 + alpha) if glm else 0.5) if alpha > 0 else 0.0
    root = (math.log1p(-alpha) - math.log1p(alpha)) / 2
    inner = factor + math.log(constant) + log_lr
    terms = abs(factor) + abs(math.log(constant)) + np.abs(log_lr)
    return root + inner / (1 - alpha) + 8 * _U * (terms / (1 - alpha) + abs(root))


# The path of a run, and its sensitivity.


@dataclass(frozen=True, eq=False)
class RunPath:
    """What the sensitivity of a run consists of: Delta(H) = min(drift + sum of the hits in H, cap), 0 if H is empty.

    Args:
        drift: what steps on the same records, and rounding, add; >= 0.
        hits: (T-1,), what the differing record adds if it is in the batch of step 1, .., T-1.
        cap: diameter of the feasible set (enlarged by rounding), or inf.
    """

    drift: float
    hits: FloatArray
    cap: float = math.inf


def run_path(
    lr: ArrayLike,
    grad_bounds: ArrayLike,
    *,
    holder_exponent: float,
    holder_constant: float,
    batch_size: int,
    hit_constant: float,
    weights: ArrayLike | None = None,
    glm: bool = False,
    radius: float = math.inf,
    arithmetic: Arithmetic | None = None,
    radii: ArrayLike | None = None,
) -> RunPath:
    """Returns the path of projected SGD with averaging, rounded up.

    With arithmetic given, the bound holds for the iterates and the average that are COMPUTED (`holder_rounding`).

    Args:
        lr: step sizes eta_s (T,), > 0, fixed in advance; the last one is never used.
        grad_bounds: G_s (T,) or a number, bounds on gradient norms at w_s; with arithmetic, at radius R_s plus
            `arithmetic.score_error(R_s)`, as `iterate_bounds` returns them.
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0.
        batch_size: b >= 1, the divisor, also of a shorter last batch.
        hit_constant: c = 2 (replace-one) or 1 (zero-out).
        weights: v_t (T,), >= 0 with sum 1; None for the uniform average of w_1..w_T.
        glm: whether the loss is phi(w.x; y) with a scalar score.
        radius: of the feasible set, for the cap 2R; inf for none.
        arithmetic: None for real numbers.
        radii: R_s (T,) or a number, bounds on the norms of the computed iterates; needed with arithmetic.

    Raises:
        ConditionError: see `expansions`.
        ValueError: an argument is out of range or has another length.

    Guarantee: replace-one (c=2) or zero-out (c=1) of one record, any batches that are the same positions on both sides,
    convex losses with the promised constants on R^d. Proof in the docstring of this module.

    Source: docs/proofs/holder.md#distance-of-two-runs.

    Example:
        >>> promises = {"holder_exponent": 0.0, "holder_constant": 1.0}
        >>> path = run_path([0.1, 0.1, 0.1], 1.0, **promises, batch_size=1, hit_constant=2)
        >>> round(path.drift, 6), [round(float(hit), 6) for hit in path.hits]
        (0.033333, [0.133333, 0.066667])
    """
    sizes = step_sizes(lr)
    bounds = np.broadcast_to(_array("grad_bounds", grad_bounds, sizes.size), sizes.shape)
    shares = _weights(weights, sizes.size)
    tails = np.concatenate([np.cumsum(shares[:0:-1])[::-1], [0.0]])  # V_1..V_T, V_T = 0
    scale = hit_constant / batch_size
    slack = 4 * sizes.size + 64
    squares = expansions(holder_exponent, holder_constant, sizes, glm) ** 2
    if arithmetic is None:
        drift = _drift(shares, squares)
    else:
        if radii is None:
            raise ValueError("radii must be given with arithmetic (got None)")
        norms = np.broadcast_to(_array("radii", radii, sizes.size), sizes.shape)
        errors = arithmetic.errors(sizes, norms, bounds, holder_exponent, holder_constant, glm)
        final = 2 * arithmetic.average_error(sizes.size, float(norms.max()))
        # The error of the scores costs at most either of two bounds, each for the whole run.
        drift = final + min(
            _drift(shares, squares * e.scale + e.squared) + 2 * float(e.added @ tails)
            for e in errors
        )
    cap = 2 * radius
    if arithmetic is not None and cap < math.inf:
        cap = 2 * (arithmetic.norm_bound(radius) + arithmetic.average_error(sizes.size, radius))
    # PRIVACY: rounded up (test_the_path_agrees_with_the_double_sum_and_is_never_below_it); margin of
    # the sums (docs/proofs/rounding.md#model-of-arithmetic)
    hits = scaled_up(scale * sizes * bounds * tails, slack)[:-1]
    return RunPath(drift=scaled_up(drift, slack), hits=hits, cap=scaled_up(cap, 8))


def path_sensitivity(path: RunPath, steps_per_epoch: int) -> float:
    """Returns the sensitivity of a run that visits each record once an epoch (shuffled or fixed order), rounded up.

    Delta = min( drift + sum over epochs of the largest hit in the epoch, cap ): deterministic, no failure probability.

    Args:
        path: see `run_path`; its T steps are epochs of m steps, the last one may be shorter.
        steps_per_epoch: m = ceil(n / batch_size) >= 1.

    Guarantee: replace-one or zero-out, as in `run_path`; every record is in exactly one batch of an epoch, and the
    order does not depend on the data.

    Source: docs/proofs/holder.md#shuffled-epochs.

    Example:
        >>> promises = {"holder_exponent": 0.0, "holder_constant": 1.0}
        >>> path = run_path([0.1, 0.1, 0.1], 1.0, **promises, batch_size=1, hit_constant=2)
        >>> round(path_sensitivity(path, steps_per_epoch=3), 6)
        0.166667
    """
    if path.hits.size == 0:  # the answer is w_1 = 0
        return 0.0
    starts = np.arange(0, path.hits.size, steps_per_epoch)
    hits = float(np.maximum.reduceat(path.hits, starts).sum())
    return min(scaled_up(path.drift + hits, starts.size + 8), path.cap)


def step_sizes(lr: ArrayLike) -> FloatArray:
    """Returns step sizes as an array (T,); raises ValueError unless all are finite and > 0."""
    sizes = np.asarray(lr, dtype=np.float64)
    if (
        sizes.ndim != 1
        or sizes.size == 0
        or not (np.isfinite(sizes).all() and (sizes > 0).all())
    ):
        raise ValueError(
            f"lr must be a nonempty list of finite numbers > 0 (got {check.shown(sizes.tolist())})"
        )
    return sizes


def _array(name: str, values: ArrayLike, length: int) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape not in ((), (length,)) or not (
        np.isfinite(array).all() and (array >= 0).all()
    ):
        raise ValueError(
            f"{name} must hold one or {length} finite numbers >= 0 (got shape {array.shape})"
        )
    return array


def _weights(weights: ArrayLike | None, steps: int) -> FloatArray:
    if weights is None:
        return np.full(steps, 1.0 / steps)
    shares = _array("weights", weights, steps)
    if shares.shape != (steps,) or abs(math.fsum(shares) - 1.0) > 1e-9:
        raise ValueError(
            f"weights must be {steps} numbers >= 0 with sum 1 (got shape {shares.shape})"
        )
    return shares


def _drift(shares: FloatArray, squares: FloatArray) -> float:
    """Returns sum_t v_t sqrt(sum_{s=2}^{t-1} squares_s)."""
    return float(shares[2:] @ np.sqrt(np.cumsum(squares[1:-1])))


_LARGEST_LOG = 700.0
_EXACT_STEPS = 512


def _growth(alpha: float, constant: float, loss_at_zero: float, lr: FloatArray) -> FloatArray:
    """Returns A(eta) of every step size, without the term of alpha = 0, which depends on the radius."""
    largest = float(np.max(lr, initial=0.0))
    growth = 2 * lr * loss_at_zero
    if alpha == 1 and largest > 1.0 / constant:
        raise ConditionError(
            f"lr must be at most 1/L = {1.0 / constant:g} for a smooth loss on an unbounded domain"
            f" (got {largest:g})"
        )
    if 0 < alpha < 1:
        logs = (math.log1p(-alpha) - math.log1p(alpha)) + 2 * (
            math.log(constant) + np.log(lr)
        ) / (1 - alpha)
        terms = 4 * (abs(math.log(constant)) + np.abs(np.log(lr))) / (1 - alpha)
        if np.max(logs, initial=-math.inf) > _LARGEST_LOG:
            raise ConditionError(
                f"lr: step size too large for this alpha: A(eta) overflows (got {largest:g})"
            )
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
    growth = _growth(holder_exponent, holder_constant, loss_at_zero, sizes)
    radii = np.empty_like(sizes)
    bounds = np.empty_like(sizes)
    radius = 0.0
    start = 0
    while start < sizes.size:
        length = 1 if start < _EXACT_STEPS else min(start // 64, sizes.size - start)
        block = slice(start, start + length)
        reach = (
            radius if length == 1 else 1.001 * math.sqrt(radius**2 + float(growth[block].sum()))
        )
        while True:
            score = 0.0 if arithmetic is None else arithmetic.score_error(reach)
            bound = grad_bound(reach + score)
            path = _path_of_radii(
                radius,
                reach,
                bound,
                sizes[block],
                growth[block],
                arithmetic,
                holder_exponent == 0,
            )
            if length == 1 or path[-2] <= reach:
                break
            reach *= 2
        radii[block], bounds[block] = path[:-1], bound
        radius = float(path[-1])
        start = start + length
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
    added = np.zeros_like(lr)
    score = 0.0
    if arithmetic is not None:
        score = arithmetic.score_error(reach)
        added = lr * arithmetic.gradient_error_of(bound) + arithmetic.update_error(
            reach, lr * bound
        )
    squares = growth + 2 * lr * score * bound + ((lr * bound) ** 2 if rough else 0.0)
    slow = np.sqrt(radius**2 + np.cumsum(squares))
    fast = radius + np.cumsum(lr * bound)
    ends = scaled_up(np.minimum(slow, fast) + np.cumsum(added), 2 * lr.size + 16)
    return np.concatenate([[radius], ends])
