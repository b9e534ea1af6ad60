"""A run of output perturbation from the promises about its loss: what is asked for, and its path, with rounding.

Source: docs/proofs/holder.md#distance-of-two-runs.

Plans of output perturbation: step size, sensitivity, noise and risk of a run, before anything is spent.

    U(eta) = D^2 / (2 eta T) + eta G^2 / 2 + G sqrt(d) Delta(eta) / mu*(epsilon, delta) + [K > 1] 2 G Delta_stab(eta)

bounds the expected excess risk of the noised, projected average of one run over K shuffled epochs; the balanced step
minimizes it on a log grid. Proof: sum |w_{t+1} - w*|^2 <= |w_t - w*|^2 - 2 eta (f_t(w_t) - f_t(w*)) + eta^2 G^2; in the
first epoch f_t is the loss of records that w_t has not seen; later ones are, and putting independent copies in their
place moves w_t by Delta_stab on average (replace-one sensitivity), hence the loss by G times that; noise of expected
norm at most sigma sqrt(d) moves the loss by G times it, and the projection brings points nearer.

Differs from the paper in: its step sizes balance its own noise, which is larger.

Source: docs/proofs/holder.md#shuffled-epochs, docs/proofs/holder.md#risk-of-output-perturbation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu, gaussian_sigma
from torch_dpsco.accounting.analysis.rounding import (
    DOUBLE,
    Arithmetic,
    asks_exact,
    exact_grid,
    require_gaussian,
    with_grid,
)
from torch_dpsco.algorithms.holder_numbers import (
    RunPath,
    expansions,
    iterate_bounds,
    path_sensitivity,
    run_path,
    uniform_sigma,
)
from torch_dpsco.errors import AdjacencyError, ConditionError, MissingConstantError

FloatArray = NDArray[np.float64]

HIT_CONSTANTS = {"replace_one": 2.0, "zero_out": 1.0}


@dataclass(frozen=True)
class LossPromises:
    """What is promised about the loss of any single record; `Problem` holds the same numbers.

    Args:
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0, on all of R^d.
        grad_bound: nondecreasing r -> G(r). It is asked a little beyond the radius, for rounding.
        loss_at_zero: M0, for an unbounded domain.
        radius: of the feasible set, a ball around 0; inf for none.
        glm: whether the loss is phi(w.x; y) with a scalar score.
        score_offset: largest number that the loss adds to the score, over B (1/B for margins, Y/B for residuals).
        gradient_error: certified rounding error of the mean gradient; needed unless `glm`.
    """

    holder_exponent: float
    holder_constant: float
    grad_bound: Callable[[float], float]
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
    """

    steps: int
    lr: float | tuple[float, ...]
    average: str
    sensitivity: float | None
    noise_scale: float
    risk_bound: float | None


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
    arithmetic: Arithmetic | None = None
    if unit_roundoff is not None:
        arithmetic = Arithmetic(
            dim,
            batch_size,
            unit_roundoff,
            promises.score_offset,
            projected=math.isfinite(promises.radius),
            gradient_error=promises.gradient_error,
        )
    radii, bounds = _bounds_along(promises, sizes, arithmetic)
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


def _bounds_along(
    promises: LossPromises, sizes: FloatArray, arithmetic: Arithmetic | None
) -> tuple[ArrayLike, ArrayLike]:
    """Returns radii of the iterates, and bounds on gradients there."""
    if math.isfinite(promises.radius):
        if arithmetic is None:
            return promises.radius, promises.grad_bound(promises.radius)
        radius = arithmetic.norm_bound(promises.radius)
        return radius, promises.grad_bound(radius + arithmetic.score_error(radius))
    if promises.loss_at_zero is None:
        raise MissingConstantError("loss_at_zero is needed on an unbounded domain (got None)")
    return iterate_bounds(
        sizes,
        promises.grad_bound,
        holder_exponent=promises.holder_exponent,
        holder_constant=promises.holder_constant,
        loss_at_zero=promises.loss_at_zero,
        arithmetic=arithmetic,
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


_SAMPLING = ("shuffled", "fixed")
_MAX_EPOCHS = 20
_GRID = 97
_DECADES = 6


def plan_output(
    promises: LossPromises,
    *,
    n: int,
    batch_size: int,
    dim: int,
    epsilon: float = math.nan,
    delta: float = math.nan,
    noise_multiplier: float | None = None,
    adjacency: str = "replace_one",
    sampling: str | None = None,
    epochs: int | None = None,
    lr: float | Sequence[float] | None = None,
    distance: float | None = None,
    secure: str | None = None,
) -> OutputRun:
    """Returns the numbers of a run whose noised average is (epsilon, delta)-DP.

    The answer is the uniform average of w_1..w_T; the T-th update is never used.

    Args:
        promises: constants of the loss.
        n: public number of records.
        batch_size: b in [1, n].
        dim: d, number of parameters.
        epsilon: > 0; not needed where the noise is given.
        delta: in (0, 1), likewise.
        noise_multiplier: noise std over sensitivity, in place of what (epsilon, delta) needs (shuffled batches).
        adjacency: "replace_one" or "zero_out"; n is public.
        sampling: "shuffled" (default) or "fixed" (the paper's).
        epochs: K >= 1; default 1 for alpha >= 1/2, else n^{(1-2 alpha)/(1+alpha)}, at most 20.
        lr: a step size, or T of them, fixed in advance; default `balanced_output_lr`.
        distance: D, guess of |w*|; default the radius.
        secure: "exact" for noise drawn in integers (shuffled batches); see docs/proofs/exact_gaussian.md.

    Raises:
        AdjacencyError: add_remove (n is public here).
        ConditionError: a side condition of the step size fails.
        MissingConstantError: a promise or `distance` is missing.
        ValueError: an argument is out of range.

    Guarantee: (epsilon, delta)-DP of the noised average alone, one release, records, given the promises, for what is
    computed in the given arithmetic (`holder_rounding`). Nothing else of the run may be published.

    Example:
        >>> hinge = LossPromises(0.5, 1.5, lambda r: 1.5 * (1 + r) ** 0.5, radius=1.0, glm=True, score_offset=1.0)
        >>> plan = plan_output(hinge, n=10000, batch_size=1, dim=20, epsilon=1.0, delta=1e-6, lr=0.005)
        >>> plan.steps, round(plan.noise_scale, 4)
        (10000, 0.0927)
    """
    sampling = sampling or "shuffled"
    request = _Request(
        promises,
        n,
        batch_size,
        dim,
        epsilon,
        delta,
        noise_multiplier,
        adjacency,
        distance,
        sampling,
    )
    sizes = _step_sizes(request, epochs, lr)
    path = request.path(sizes)
    if sampling != "shuffled":
        require_gaussian(secure, "what one record moves is random here; use sampling='shuffled'")
    sensitivity, sigma = _noise(request, path, asks_exact(secure))
    step = stated_lr(sizes)
    risk = _risk(request, sizes, sensitivity, sigma) if isinstance(step, float) else None
    return OutputRun(sizes.size, step, "uniform", sensitivity, sigma, risk)


@dataclass(frozen=True)
class _Request(RunRequest):
    """What a plan is asked for, checked; fields as in `plan_output`."""

    sampling: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check.choice(_SAMPLING, sampling=self.sampling)
        if self.noise_multiplier is None:
            check.open_interval(0.0, 1.0, delta=self.delta)
        elif self.sampling != "shuffled":
            raise ConditionError(
                f"noise_multiplier must not be given for sampling={self.sampling!r}: what one"
                " record moves is random there, and noise is calibrated for a budget (got"
                f" {self.noise_multiplier})"
            )

    @property
    def mu(self) -> float:
        if self.noise_multiplier is None:
            return gaussian_mu(self.epsilon, self.delta)
        return 1.0 / self.noise_multiplier if self.noise_multiplier else math.inf

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.promises.radius)

    def path(self, lr: FloatArray) -> RunPath:
        return output_path(
            self.promises,
            lr,
            batch_size=self.batch_size,
            hit_constant=self.hit_constant,
            dim=self.dim,
        )


def _step_sizes(
    request: _Request, epochs: int | None, lr: float | Sequence[float] | None
) -> FloatArray:
    """Returns the step sizes (T,)."""
    alpha = request.promises.holder_exponent
    per_epoch = request.steps_per_epoch
    if epochs is not None:
        steps = per_epoch * check.positive_count(epochs=epochs)
    else:
        passes = 1.0 if alpha >= 0.5 else math.pow(request.n, (1 - 2 * alpha) / (1 + alpha))
        steps = per_epoch * min(_MAX_EPOCHS, math.ceil(passes * (1 - 1e-12)))
    if steps == 1:
        raise ConditionError(
            "steps must be >= 2: the answer is the average of w_1..w_T, whose first is the start,"
            f" so that one step releases a constant (got batch_size={request.batch_size},"
            f" n={request.n}, one epoch); take a smaller batch_size or more epochs"
        )
    if lr is None:
        lr = balanced_output_lr(request, steps // per_epoch)
    return each_step(lr, steps)


def balanced_output_lr(request: _Request, epochs: int) -> float:
    """Returns the step size that minimizes U (see this module) on a log grid of 16 points a decade.

    G is taken at the distance D on an unbounded domain. It affects accuracy only: privacy is computed afterwards.

    Raises:
        MissingConstantError: no distance on an unbounded domain.

    Source: docs/proofs/holder.md#risk-of-output-perturbation.
    """
    promises = request.promises
    steps = request.steps_per_epoch * epochs
    reach = distance_bound(promises, request.distance)
    alpha = promises.holder_exponent
    constant = promises.holder_constant
    bounded = request.bounded
    bound = max(promises.grad_bound(reach), 1e-300)
    largest = (2.0 if bounded else 1.0) if alpha == 1 else math.exp(min(300 * (1 - alpha), 300.0))
    largest *= (1 - 1e-12) / constant
    grid = reach / (bound * math.sqrt(steps)) * np.logspace(-_DECADES, 0, _GRID)
    grid = np.minimum(grid, largest)
    roots = float(np.sqrt(np.arange(1, max(steps - 1, 1))).sum()) / steps
    drift = expansions(alpha, constant, grid, promises.glm) * roots
    hit = grid * bound / request.batch_size * ((epochs + 1) / 2 - 1 / request.steps_per_epoch)
    delta_stab = drift + 2.0 * hit
    noise = math.sqrt(request.dim) / request.mu * (drift + request.hit_constant * hit)
    risk = reach**2 / (2 * grid * steps) + grid * bound**2 / 2
    risk = risk + bound * (noise + (2 * delta_stab if epochs > 1 else 0.0))
    return float(grid[int(np.argmin(risk))])


def _noise(request: _Request, path: RunPath, exact: bool) -> tuple[float | None, float]:
    """Returns the sensitivity (None if it is random) and the noise std."""
    if request.sampling == "fixed":
        return None, uniform_sigma(
            path, request.batch_size / request.n, request.epsilon, request.delta
        )
    # PRIVACY: rounding to the grid moves the answer too (test_the_grid_is_in_the_sensitivity_of_exact_plans)
    sensitivity = with_grid(path_sensitivity(path, request.steps_per_epoch), exact)
    if request.noise_multiplier is not None:
        noise = request.noise_multiplier * sensitivity
    else:
        noise = (
            gaussian_sigma(request.epsilon, request.delta, sensitivity)
            if sensitivity > 0
            else 0.0
        )
    if exact:
        exact_grid(noise, sensitivity, request.dim)  # raises before anything is spent
    return sensitivity, noise


def _risk(
    request: _Request, lr: FloatArray, sensitivity: float | None, sigma: float
) -> float | None:
    """Returns U at one step size; None where it is not proved."""
    proved = request.sampling == "shuffled" and request.n % request.batch_size == 0
    if not (proved and request.bounded) or sensitivity is None:
        return None
    distance = distance_bound(request.promises, request.distance)
    bound = request.promises.grad_bound(request.promises.radius)
    step = float(lr[0])
    stability = (
        2 * bound * sensitivity * (2.0 / request.hit_constant)
        if lr.size > request.steps_per_epoch
        else 0.0
    )
    start = distance**2 / (2 * step * lr.size)
    return start + step * bound**2 / 2 + bound * sigma * math.sqrt(request.dim) + stability
