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

Bolt-on private SGD: how far one record moves the answer of permutation SGD on a smooth convex loss, and the plan.

    w_1 = 0,   w_{t+1} = Proj( c_t (w_t - (eta_t/b) sum over the batch of g(w_t, z)) ),   c_t = 1/(1 + eta_t gamma)

The regularizer (gamma/2)|w|^2 enters as a proximal step. With eta~ = c eta this IS the gradient step of
loss + regularizer of the paper, w (1 - eta~ gamma) - eta~ g; its min(1/(beta + gamma), 1/(gamma t)) is
eta_t = min(1/beta, 1/(gamma (t-1))), and its largest step 2/(beta + 2 gamma) is 2/beta here, whatever gamma is.

Sensitivity. Both runs see the same batches. A batch without the differing record moves their distance d to at most
c d: for eta <= 2/beta the gradient step of a convex beta-smooth loss is not expansive, nor is a projection. With it,

    d_{t+1} <= c_t (d_t + h eta_t G / b) + 2 r_t,      h = 2 (replace_one) or 1 (zero_out)

where r_t is what rounding adds (`holder_rounding` at exponent 1, and the roundings of the shrinkage). The inequality is
linear: of the answer sum_t v_t w_t, t = 1..T+1, a hit at step s moves c_s h eta_s G A_s / b, with
A_T = v_{T+1}, A_s = v_{s+1} + c_{s+1} A_{s+1}, and a record is hit once an epoch, at its worst step. This is

    constant step, gamma = 0, last iterate      2 K G eta / b
    ... uniform average of w_1..w_T             (2 G eta / b) ((K+1)/2 - 1/m)      m steps an epoch
    default steps, last iterate                 2 G / (gamma b m), for any number K of epochs

A short last batch is used with the divisor b: it moves less, and b m >= n. (Dropping it would give b floor(n/b).)

Differs from the paper in: 1. sensitivities are computed step by step, so that averages need less noise at gamma = 0.
2. At gamma > 0 the bound of the last iterate is FALSE for an average (early iterates move by up to 2 G / (gamma t)):
the one computed here is up to 1 + log T times larger for the uniform average, about (K+1)/K times for the weighted.
3. The last batch may be short. 4. Rounding is covered. 5. Zero-out. 6. Every figure is rounded up.

Risk at gamma = 0 of the uniform average, b a divisor of n, constant step, records drawn independently: as in
`plan`, |w_{t+1} - w*|^2 <= |w_t - w*|^2 - 2 eta (f_t(w_t) - f_t(w*)) + eta^2 G^2; a record of step t met w_t in
K' earlier epochs, K' <= K - 1, (K-1)/2 on average; with another one in its place w_t would be nearer than
2 eta G K' / b, so that E F(w_t) <= E f_t(w_t) + 2 eta G^2 K' / b; the noise z adds at most G E|z|:

    U(eta) = D^2 / (2 eta T) + eta G^2 / 2 + eta G^2 (K-1)/b + G E|z|,      E|z| proportional to eta

Source: docs/proofs/output.md#bolt-on-runs, docs/proofs/output.md#risk-of-a-bolt-on-run; Wu, Li, Kumar, Chaudhuri, Jha,
Naughton 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu, gaussian_sigma
from torch_dpsco.accounting.analysis.rounding import (
    DOUBLE,
    Arithmetic,
    asks_exact,
    exact_grid,
    gamma,
    require_gaussian,
    safe,
    scaled_up,
    with_grid,
)
from torch_dpsco.algorithms.holder_numbers import (
    RunPath,
    expansions,
    iterate_bounds,
    path_sensitivity,
    run_path,
    step_sizes,
    uniform_sigma,
)
from torch_dpsco.errors import AdjacencyError, ConditionError, MissingConstantError
from torch_dpsco.estimators.output_numbers import noise_norms

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


_POWERS: dict[str, float | None] = {
    "last": None,
    "uniform": 0.0,
    "weighted": 1.0,
}  # of t, in the weight of w_t


def decreasing_lr(smoothness: float, reg: float, steps: int) -> FloatArray:
    """Returns proximal step sizes min(1/beta, 1/(gamma (t-1))), t = 1..T: the paper's min(1/(beta+gamma), 1/(gamma t)).

    Args:
        smoothness: beta > 0, of the loss without its regularizer.
        reg: gamma > 0.
        steps: T >= 1.

    Source: docs/proofs/output.md#closed-forms-of-bolt-on-runs

    Example:
        >>> decreasing_lr(smoothness=1.0, reg=0.5, steps=5).tolist()
        [1.0, 1.0, 1.0, 0.6666666666666666, 0.5]
    """
    beta = check.positive(smoothness=smoothness)
    reg = check.positive(reg=reg)
    done = np.arange(check.positive_count(steps=steps), dtype=np.float64)
    return np.asarray(1.0 / np.maximum(beta, reg * done))


def bolt_on_sensitivity(
    promises: LossPromises,
    lr: Sequence[float] | FloatArray,
    *,
    reg: float,
    average: str,
    batch_size: int,
    steps_per_epoch: int,
    hit_constant: float,
    dim: int,
    unit_roundoff: float | None = DOUBLE,
) -> float:
    """Returns how far one record moves the answer of a run, rounded up; see this module.

    Args:
        promises: constants of the loss, with holder_exponent 1.
        lr: proximal step sizes (T,), each in (0, 2/beta], fixed in advance.
        reg: gamma >= 0.
        average: "last", "uniform" or "weighted".
        batch_size: b >= 1, the divisor, also of a short last batch.
        steps_per_epoch: m >= 1.
        hit_constant: 2 for replace-one, 1 for zero-out.
        dim: d >= 1.
        unit_roundoff: of the arithmetic; None for real numbers.

    Raises:
        ConditionError: the loss is not smooth, a step exceeds 2/beta, or rounding is not small in so many steps.
        MissingConstantError: no bound on the gradient, or none on its rounding error.

    Guarantee: replace-one or zero-out of one record, for every order of the records that does not depend on them, for
    convex losses with the promised constants on R^d, what is computed included.

    Source: docs/proofs/output.md#bolt-on-runs, docs/proofs/output.md#rounding-of-a-bolt-on-run

    Example:
        >>> smooth = LossPromises(1.0, 0.25, lambda r: 1.0, glm=True, score_offset=1.0)
        >>> run = {"average": "last", "batch_size": 10, "steps_per_epoch": 100, "hit_constant": 2, "dim": 5}
        >>> round(bolt_on_sensitivity(smooth, [0.5] * 300, reg=0.0, **run), 9)
        0.3
        >>> round(bolt_on_sensitivity(smooth, decreasing_lr(0.25, 0.1, 300), reg=0.1, **run), 9)
        0.02
    """
    sizes = step_sizes(lr)
    reg = check.nonnegative(reg=reg)
    if promises.holder_exponent != 1:
        raise ConditionError(
            "holder_exponent must be 1: bolt-on SGD needs a smooth loss (got"
            f" {promises.holder_exponent:g}); HolderOutputSGD takes others"
        )
    # PRIVACY: larger steps move runs apart; raises above 2/beta (test_a_step_above_two_over_beta_is_refused)
    expansions(1.0, promises.holder_constant, sizes)
    weights = _weights(average, sizes.size)
    # rounded up by more than the errors of the computed divisor and of a step size 2/beta that is rounded
    shrink = scaled_up(1.0 / (1.0 + sizes * reg), 4)
    tails = _tails(weights, shrink)
    computed = _Computed(promises, sizes, reg, batch_size, dim, unit_roundoff)
    scale = check.positive(hit_constant=hit_constant) / check.positive_count(
        batch_size=batch_size
    )
    hits = scale * computed.grad_bound * sizes * shrink * tails
    starts = np.arange(0, sizes.size, check.positive_count(steps_per_epoch=steps_per_epoch))
    # PRIVACY: a record is in any one batch of each epoch (test_no_pair_of_neighbors_moves_the_answer_further)
    moved = float(np.maximum.reduceat(hits, starts).sum())
    # margin: both runs are rounded (docs/proofs/rounding.md#two-runs-in-floating-point)
    moved += 2 * float(computed.added @ tails)
    if average != "last":
        moved += 2 * computed.average_error
    return safe(min(moved, 2 * computed.radius), 4 * sizes.size + 64)


class _Computed:
    """What floating-point arithmetic does to a run: bounds on gradients and norms, and the error of each step.

    Attributes:
        radius: of a ball that holds all computed iterates and averages.
        grad_bound: G, at radius and score error.
        added: r_t (T,).
        average_error: of a computed average.
    """

    def __init__(
        self,
        promises: LossPromises,
        lr: FloatArray,
        reg: float,
        batch_size: int,
        dim: int,
        unit_roundoff: float | None,
    ) -> None:
        bounded = math.isfinite(promises.radius)
        self.radius = promises.radius
        self.added = np.zeros_like(lr)
        self.average_error = 0.0
        if unit_roundoff is None:
            self.grad_bound = promises.grad_bound(self.radius)
            return
        offset = promises.score_offset
        error = promises.gradient_error
        arithmetic = Arithmetic(
            dim, batch_size, unit_roundoff, offset, projected=bounded, gradient_error=error
        )
        reach = arithmetic.norm_bound(promises.radius)
        self.grad_bound = promises.grad_bound(
            reach + arithmetic.score_error(reach) if bounded else math.inf
        )
        if not bounded:
            reach = 1.001 * self._reach(lr, reg)
        norms = np.full_like(lr, reach)
        bounds = np.full_like(lr, self.grad_bound)
        forms = arithmetic.errors(lr, norms, bounds, 1.0, promises.holder_constant, promises.glm)
        # the last form is added to the distance, so that it passes contractions; shrinkage rounds divisor and quotient
        self.added = forms[-1].added + (
            gamma(4, unit_roundoff) * (reach + lr * self.grad_bound) if reg else 0.0
        )
        if not bounded and self._reach(lr, reg, self.added) > reach:
            raise ConditionError(
                f"steps must be fewer: rounding may add 0.1 % to the iterates of {lr.size} steps"
            )
        self.average_error = arithmetic.average_error(lr.size, reach)
        self.radius = reach + self.average_error

    def _reach(self, lr: FloatArray, reg: float, added: FloatArray | float = 0.0) -> float:
        """Returns min(sum of eta G, G / gamma), with the errors of the steps: |w| <= c (|w| + eta G) + r."""
        moves = lr * self.grad_bound + added
        total = scaled_up(float(moves.sum()), lr.size + 8)
        if not reg:
            return total
        # X >= c (X + eta G) + r for every step if X >= G / gamma + r (1 + eta gamma) / (eta gamma)
        fixed = self.grad_bound / reg + float(np.max(added * (1 + lr * reg) / (lr * reg)))
        return min(total, scaled_up(fixed, 16))


def _weights(average: str, steps: int) -> FloatArray:
    """Returns v_1..v_{T+1}."""
    power = _POWERS[check.choice(_POWERS, average=average)]
    if power is None:
        return np.append(np.zeros(steps), 1.0)
    if steps == 1:
        raise ConditionError(
            "average must be 'last' for one step: averages are of w_1..w_T, here 0 (got"
            f" {average!r})"
        )
    shares = np.arange(1.0, steps + 1.0) ** power
    return np.append(shares / shares.sum(), 0.0)


def _tails(weights: FloatArray, shrink: FloatArray) -> FloatArray:
    """Returns A_1..A_T: what a unit of distance after step s is worth in the answer."""
    later = zip(weights[-2:0:-1].tolist(), shrink[:0:-1].tolist(), strict=True)
    tails = accumulate(
        later, lambda tail, step: step[0] + step[1] * tail, initial=float(weights[-1])
    )
    return np.array(list(tails)[::-1])


def plan_bolt_on(
    promises: LossPromises,
    *,
    n: int,
    batch_size: int,
    dim: int,
    epsilon: float = math.nan,
    delta: float = math.nan,
    noise_multiplier: float | None = None,
    adjacency: str = "replace_one",
    epochs: int = 1,
    lr: float | Sequence[float] | None = None,
    reg: float = 0.0,
    average: str | None = None,
    distance: float | None = None,
    secure: str | None = None,
) -> OutputRun:
    """Returns the numbers of a run whose noised answer is (epsilon, delta)-DP.

    Args:
        promises: constants of the loss, smooth.
        n: public number of records.
        batch_size: b in [1, n].
        dim: d, number of parameters.
        epsilon: > 0; not needed where the noise is given.
        delta: in [0, 1); 0 takes K-norm noise; any other is not needed where the noise is given.
        noise_multiplier: noise scale over sensitivity, in place of what (epsilon, delta) needs.
        adjacency: "replace_one" or "zero_out"; n is public.
        epochs: K >= 1.
        lr: proximal step size in (0, 2/beta], or T of them, fixed in advance; default `decreasing_lr` if reg > 0, else
            the constant step that minimizes U (with the noise of the answer that is asked for).
        reg: gamma >= 0.
        average: "last", "uniform" or "weighted"; default "last" if reg > 0, else "uniform" ("last" for one step).
        distance: D, guess of |w*|; default the radius.
        secure: "exact" for noise drawn in integers (delta > 0); see docs/proofs/exact_gaussian.md.

    Raises:
        AdjacencyError: add_remove: n is public here.
        ConditionError: see `bolt_on_sensitivity`.
        MissingConstantError: a promise is missing, or `distance` for the default step size.
        ValueError: an argument is out of range.

    Guarantee: (epsilon, delta)-DP of the noised answer alone, one release, records, given the promises, for what is
    computed in double precision. Nothing else of the run may be published.

    Source: docs/proofs/output.md#bolt-on-runs

    Example:
        >>> smooth = LossPromises(1.0, 0.25, lambda r: 1.0, glm=True, score_offset=1.0)
        >>> plan = plan_bolt_on(smooth, n=1000, batch_size=10, dim=5, epsilon=1.0, delta=0.0, reg=0.1, epochs=3)
        >>> plan.steps, plan.average, round(plan.noise_scale, 9)
        (300, 'last', 0.02)
    """
    request = _BoltOnRequest(
        promises,
        n,
        batch_size,
        dim,
        epsilon,
        delta,
        noise_multiplier,
        adjacency,
        distance,
        epochs,
        reg,
        average,
    )
    sizes = request.step_sizes(lr)
    if delta == 0:
        require_gaussian(secure)
    # PRIVACY: rounding to the grid moves the answer too (test_the_grid_is_in_the_sensitivity_of_exact_plans)
    sensitivity = with_grid(request.sensitivity(sizes), asks_exact(secure))
    scale = request.scale(sensitivity)
    if asks_exact(secure):
        exact_grid(scale, sensitivity, dim)  # raises before anything is spent
    step = stated_lr(sizes)
    risk = request.risk(step) if isinstance(step, float) else None
    return OutputRun(sizes.size, step, request.answer, sensitivity, scale, risk)


@dataclass(frozen=True)
class _BoltOnRequest(RunRequest):
    """What a plan is asked for, checked; fields as in `plan_bolt_on`."""

    epochs: int
    reg: float
    average: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive_count(epochs=self.epochs)
        check.nonnegative(reg=self.reg)
        if self.noise_multiplier is None and self.delta != 0:
            check.open_interval(0.0, 1.0, delta=self.delta)

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    @property
    def answer(self) -> str:
        """Which iterate or average is released."""
        if self.average is not None:
            return self.average
        return "last" if self.reg > 0 or self.steps == 1 else "uniform"

    def scale(self, sensitivity: float) -> float:
        """Returns the noise of an answer with this sensitivity."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier * sensitivity
        if self.delta == 0:
            # PRIVACY: rounded up further than the epsilon of the event is (test_a_plan_with_half_the_noise_is_refused);
            # margin of the quotient (docs/proofs/rounding.md#model-of-arithmetic)
            return scaled_up(sensitivity / self.epsilon, 8)
        return gaussian_sigma(self.epsilon, self.delta, sensitivity)

    def _noise_norm(self) -> float:
        """Returns a bound on E|z| at sensitivity 1."""
        if self.noise_multiplier is None:
            return noise_norms(self.dim, self.epsilon, self.delta)[0]
        return self.noise_multiplier * (self.dim if self.delta == 0 else math.sqrt(self.dim))

    def sensitivity(self, lr: FloatArray, unit_roundoff: float | None = DOUBLE) -> float:
        """Returns `bolt_on_sensitivity`."""
        return bolt_on_sensitivity(
            self.promises,
            lr,
            reg=self.reg,
            average=self.answer,
            batch_size=self.batch_size,
            steps_per_epoch=self.steps_per_epoch,
            hit_constant=self.hit_constant,
            dim=self.dim,
            unit_roundoff=unit_roundoff,
        )

    def step_sizes(self, lr: float | Sequence[float] | None) -> FloatArray:
        """Returns eta_1..eta_T."""
        if lr is None:
            if self.reg > 0:
                return decreasing_lr(self.promises.holder_constant, self.reg, self.steps)
            lr = self._balanced_lr()
        return each_step(lr, self.steps)

    def _balanced_lr(self) -> float:
        largest = (2 - 1e-12) / self.promises.holder_constant
        reach = distance_bound(self.promises, self.distance)
        return min(largest, reach / math.sqrt(2 * self.steps * self._cost()))

    def _cost(self) -> float:
        """Returns (U - D^2/(2 eta T)) / eta, in real numbers."""
        bound = self.promises.grad_bound(self.promises.radius)
        unit = 1 / self.promises.holder_constant
        linear = replace(
            self.promises, radius=math.inf, grad_bound=lambda _: bound
        )  # where twice the radius is no cap
        moved = (
            replace(self, promises=linear).sensitivity(np.full(self.steps, unit), None) / unit
        )  # per step size
        noise = self._noise_norm() * moved
        return max(
            bound * (bound / 2 + bound * (self.epochs - 1) / self.batch_size + noise), 1e-300
        )

    def risk(self, lr: float) -> float | None:
        """Returns U(eta), or None where it is not proved or D is not known."""
        proved = self.reg == 0 and self.answer == "uniform" and self.n % self.batch_size == 0
        if not proved or (self.distance is None and not math.isfinite(self.promises.radius)):
            return None
        return (
            distance_bound(self.promises, self.distance) ** 2 / (2 * lr * self.steps)
            + lr * self._cost()
        )
