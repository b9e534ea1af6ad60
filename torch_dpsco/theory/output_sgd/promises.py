"""A run of output perturbation from the promises about its loss: what is asked for, and its path, with rounding.

Source: docs/proofs/holder.md#distance-of-two-runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_dpsco import _validate as check
from torch_dpsco.errors import AdjacencyError, MissingConstantError
from torch_dpsco.theory.holder.stability import RunPath, iterate_bounds, run_path
from torch_dpsco.theory.rounding import DOUBLE, Arithmetic

FloatArray = NDArray[np.float64]

HIT_CONSTANTS = {"replace_one": 2.0, "zero_out": 1.0}


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
class RunRequest:
    """What a plan is asked for, checked; fields as in `plan.plan_output`."""

    promises: LossPromises
    n: int
    batch_size: int
    dim: int
    epsilon: float
    delta: float
    noise_multiplier: float | None
    adjacency: str
    distance: float | None

    def __post_init__(self) -> None:
        n = check.positive_count(n=self.n)
        _ = check.positive_count(dim=self.dim)
        if check.positive_count(batch_size=self.batch_size) > n:
            raise ValueError(f"batch_size must be at most n = {n} (got {self.batch_size})")
        if self.adjacency not in HIT_CONSTANTS:
            raise AdjacencyError(
                f"adjacency must be one of replace_one, zero_out (got {self.adjacency})"
            )
        if self.noise_multiplier is not None:
            check.nonnegative(noise_multiplier=self.noise_multiplier)
        else:
            check.positive(epsilon=self.epsilon)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, a short last one included."""
        return -(-self.n // self.batch_size)

    @property
    def hit_constant(self) -> float:
        """How many gradients of its own a record brings to a step in which the data sets differ."""
        return HIT_CONSTANTS[self.adjacency]


def each_step(lr: float | Sequence[float], steps: int) -> FloatArray:
    """Returns the step sizes (T,) of a number, or of T of them."""
    sizes = np.asarray(lr, dtype=np.float64)
    if sizes.shape not in ((), (steps,)):
        raise ValueError(
            f"lr must be a number or {steps} numbers, one per step (got shape {sizes.shape})"
        )
    return np.array(np.broadcast_to(sizes, (steps,)))


def stated_lr(sizes: FloatArray) -> float | tuple[float, ...]:
    """Returns step sizes as a plan states them: one number if all are the same."""
    return float(sizes[0]) if bool(np.all(sizes == sizes[0])) else tuple(sizes.tolist())


@dataclass(frozen=True)
class OutputRun:
    """Public numbers of a run that releases only its answer.

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
    sizes = np.asarray(lr, dtype=np.float64)
    bounded = math.isfinite(promises.radius)
    alpha = promises.holder_exponent
    L = promises.holder_constant
    at_zero = promises.loss_at_zero
    arithmetic = None
    if unit_roundoff is not None:
        offset = promises.score_offset
        error = promises.gradient_error
        arithmetic = Arithmetic(
            dim, batch_size, unit_roundoff, offset, projected=bounded, gradient_error=error
        )
    radii: ArrayLike
    bounds: ArrayLike
    if bounded:
        radii = promises.radius if arithmetic is None else arithmetic.norm_bound(promises.radius)
        bounds = promises.grad_bound(
            radii + (0.0 if arithmetic is None else arithmetic.score_error(radii))
        )
    elif at_zero is None:
        raise MissingConstantError("loss_at_zero is needed on an unbounded domain (got None)")
    else:
        bound = promises.grad_bound
        radii, bounds = iterate_bounds(
            sizes,
            bound,
            holder_exponent=alpha,
            holder_constant=L,
            loss_at_zero=at_zero,
            arithmetic=arithmetic,
        )
    return run_path(
        sizes,
        bounds,
        holder_exponent=alpha,
        holder_constant=L,
        batch_size=batch_size,
        hit_constant=hit_constant,
        weights=weights,
        glm=promises.glm,
        radius=promises.radius,
        arithmetic=arithmetic,
        radii=radii,
    )


def distance_bound(promises: LossPromises, distance: float | None) -> float:
    """Returns D: the guess, at most the radius; the radius if there is none."""
    if distance is not None:
        return min(check.positive(distance=distance), promises.radius)
    if not math.isfinite(promises.radius):
        raise MissingConstantError(
            "distance, a guess of |w*|, is needed on an unbounded domain (got None)"
        )
    return promises.radius
