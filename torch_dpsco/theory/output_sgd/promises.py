"""A run of output perturbation from the promises about its loss: its path, with rounding, and its step size.

The step size minimizes a bound on the excess risk, see `holder_plan`.

Source: docs/proofs/holder.md#distance-of-two-runs, docs/proofs/holder.md#risk-of-output-perturbation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from torch_dpsco import _validate
from torch_dpsco.errors import MissingConstantError
from torch_dpsco.theory.holder.stability import RunPath, expansions, iterate_bounds, run_path
from torch_dpsco.theory.rounding import DOUBLE, Arithmetic

_GRID, _DECADES = 97, 6


@dataclass(frozen=True)
class LossPromises:
    """What is promised about the loss of any single record; `Problem` holds the same numbers.

    Args:
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0, on all of R^d.
        grad_bound: nondecreasing r -> G(r). It is asked a little beyond the radius, for rounding.
        grad_at_zero: M, for mode "paper".
        loss_at_zero: M0, for an unbounded domain.
        radius: of the feasible set, a ball around 0; inf for none.
        glm: whether the loss is phi(w.x; y) with a scalar score.
        score_offset: largest number that the loss adds to the score, over B (1/B for margins, Y/B for residuals).
        gradient_error: certified rounding error of the mean gradient; needed unless `glm`.
    """

    holder_exponent: float
    holder_constant: float
    grad_bound: Callable[[float], float]
    grad_at_zero: float | None = None
    loss_at_zero: float | None = None
    radius: float = math.inf
    glm: bool = False
    score_offset: float = 0.0
    gradient_error: float | None = None


@dataclass(frozen=True)
class OutputRun:
    """Public numbers of a run that releases its answer alone.

    Args:
        steps: T.
        lr: step size, or one per step.
        average: what is released: "last" (w_{T+1}), or the "uniform" or "weighted" (by t) average of w_1..w_T.
        sensitivity: of the answer, rounding included; None where it is random.
        noise_scale: std of the Gaussian noise per coordinate, or scale of the K-norm noise.
        risk_bound: on the expected excess risk over comparators within the distance, real numbers; None where it is not
            proved.
        rounding_share: share of what records move that is due to floating-point rounding.
    """

    steps: int
    lr: float | tuple[float, ...]
    average: str
    sensitivity: float | None
    noise_scale: float
    risk_bound: float | None
    rounding_share: float


def output_path(
    promises: LossPromises,
    lr: ArrayLike,
    *,
    batch_size: int,
    hit_constant: float,
    dim: int,
    unit_roundoff: float | None = DOUBLE,
    weights: ArrayLike | None = None,
) -> RunPath:
    """Returns the `RunPath` of projected or unbounded SGD, with gradient bounds along the run and rounding.

    Args:
        promises: constants of the loss.
        lr: step sizes (T,), fixed in advance.
        batch_size: b, the divisor.
        hit_constant: 2 for replace-one, 1 for zero-out.
        dim: d.
        unit_roundoff: of the arithmetic; None for real numbers.
        weights: averaging weights (T,); None for uniform.

    Raises:
        ConditionError: see `expansions` and `iterate_bounds`.
        MissingConstantError: loss_at_zero on an unbounded domain, or gradient_error unless `glm`.
    """
    sizes, bounded = np.asarray(lr, dtype=np.float64), math.isfinite(promises.radius)
    arithmetic = None
    if unit_roundoff is not None:
        offset, error = promises.score_offset, promises.gradient_error
        arithmetic = Arithmetic(dim, batch_size, unit_roundoff, offset, projected=bounded, gradient_error=error)
    radii: ArrayLike
    bounds: ArrayLike
    if bounded:
        radii = promises.radius if arithmetic is None else arithmetic.norm_bound(promises.radius)
        bounds = promises.grad_bound(radii + (0.0 if arithmetic is None else arithmetic.score_error(radii)))
    elif promises.loss_at_zero is None:
        raise MissingConstantError("loss_at_zero is needed on an unbounded domain (got None)")
    else:
        radii, bounds = iterate_bounds(
            sizes,
            promises.grad_bound,
            holder_exponent=promises.holder_exponent,
            holder_constant=promises.holder_constant,
            loss_at_zero=promises.loss_at_zero,
            arithmetic=arithmetic,
        )
    return run_path(
        sizes,
        bounds,
        holder_exponent=promises.holder_exponent,
        holder_constant=promises.holder_constant,
        batch_size=batch_size,
        hit_constant=hit_constant,
        weights=weights,
        glm=promises.glm,
        radius=promises.radius,
        arithmetic=arithmetic,
        radii=radii,
    )


def balanced_output_lr(
    promises: LossPromises,
    *,
    n: int,
    batch_size: int,
    epochs: int,
    dim: int,
    mu: float,
    hit_constant: float = 2.0,
    distance: float | None = None,
) -> float:
    """Returns the step size that minimizes U (see this module) on a log grid of 16 points a decade.

    G is taken at the distance D on an unbounded domain. It affects accuracy only: privacy is computed afterwards.

    Args:
        promises: constants of the loss.
        n: public number of records.
        batch_size: b.
        epochs: K.
        dim: d.
        mu: > 0, sensitivity over noise std; inf for no noise.
        hit_constant: 2 for replace-one, 1 for zero-out.
        distance: D, guess of |w*|; default the radius.

    Raises:
        MissingConstantError: no distance on an unbounded domain.

    Source: docs/proofs/holder.md#risk-of-output-perturbation.
    """
    reach = distance_bound(promises, distance)
    alpha, constant, bounded = promises.holder_exponent, promises.holder_constant, math.isfinite(promises.radius)
    per_epoch = -(-n // batch_size)
    steps = per_epoch * epochs
    bound = max(promises.grad_bound(reach), 1e-300)
    largest = (2.0 if bounded else 1.0) if alpha == 1 else math.exp(min(300 * (1 - alpha), 300.0))
    largest *= (1 - 1e-12) / constant
    grid = reach / (bound * math.sqrt(steps)) * np.logspace(-_DECADES, 0, _GRID)
    grid = np.minimum(grid, largest)
    roots = float(np.sqrt(np.arange(1, max(steps - 1, 1))).sum()) / steps
    drift = expansions(alpha, constant, grid, promises.glm) * roots
    hit = grid * bound / batch_size * ((epochs + 1) / 2 - 1 / per_epoch)
    delta_stab = drift + 2.0 * hit
    noise = math.sqrt(dim) / mu * (drift + hit_constant * hit)
    risk = reach**2 / (2 * grid * steps) + grid * bound**2 / 2
    risk = risk + bound * (noise + (2 * delta_stab if epochs > 1 else 0.0))
    return float(grid[int(np.argmin(risk))])


def distance_bound(promises: LossPromises, distance: float | None) -> float:
    """Returns D: the guess, at most the radius; the radius if there is none."""
    if distance is not None:
        return min(_validate.positive(distance=distance), promises.radius)
    if not math.isfinite(promises.radius):
        raise MissingConstantError("distance, a guess of |w*|, is needed on an unbounded domain (got None)")
    return promises.radius
