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
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

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


_RANGES = {
    "n": check.positive_count,
    "batch_size": check.positive_count,
    "dim": check.positive_count,
    "noise_multiplier": check.nonnegative,
    "epochs": check.positive_count,
    "distance": check.positive,
}


@dataclass(frozen=True, kw_only=True)
class AnswerTask(ABC):
    """What a run that releases only its answer is asked for, checked.

    Args:
        promises: constants of the loss.
        n: public number of records.
        batch_size: b in [1, n].
        dim: d, number of parameters.
        epsilon: > 0; not needed where the noise is given.
        delta: likewise; 0 takes K-norm noise, where the run has it.
        noise_multiplier: noise scale over sensitivity, in place of what (epsilon, delta) needs.
        adjacency: "replace_one" or "zero_out"; n is public.
        epochs: K >= 1.
        lr: a step size, or T of them, fixed in advance; None for the default.
        distance: D, guess of |w*|; default the radius.
        secure: "exact" for noise drawn in integers; see docs/proofs/exact_gaussian.md.

    Raises:
        AdjacencyError: add_remove: n is public here.
        ConditionError: a side condition of the step size fails.
        MissingConstantError: a promise or `distance` is missing.
        ValueError: an argument is out of range.

    Guarantee: (epsilon, delta)-DP of the noised answer alone, one release, records, given the promises, for what is
    computed in double precision (`holder_rounding`). Nothing else of the run may be published.
    """

    promises: LossPromises
    n: int
    batch_size: int
    dim: int
    epsilon: float = math.nan
    delta: float = math.nan
    noise_multiplier: float | None = None
    adjacency: str = "replace_one"
    epochs: int | None = None
    lr: float | Sequence[float] | None = None
    distance: float | None = None
    secure: str | None = None

    def __post_init__(self) -> None:
        check.ranges(self, _RANGES)
        if self.adjacency not in HIT_CONSTANTS:
            raise AdjacencyError(
                f"adjacency must be one of replace_one, zero_out (got {self.adjacency})"
            )
        if self.noise_multiplier is None:
            check.positive(epsilon=self.epsilon)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, a short last one included."""
        return -(-self.n // self.batch_size)

    @property
    def hit_constant(self) -> float:
        """How many gradients of its own a record brings to a step in which the data sets differ."""
        return HIT_CONSTANTS[self.adjacency]

    @property
    @abstractmethod
    def answer(self) -> str:
        """Which iterate or average is released."""

    @abstractmethod
    def step_sizes(self) -> FloatArray:
        """Returns eta_1..eta_T."""

    @abstractmethod
    def noise(self, lr: FloatArray) -> tuple[float, float]:
        """Returns the sensitivity and the noise scale."""

    @abstractmethod
    def risk(self, lr: FloatArray, sensitivity: float, scale: float) -> float | None:
        """Returns U at one step size; None where it is not proved."""

    def plan(self) -> dict[str, Any]:
        """Returns the numbers of the run.

        Returns:
            steps: T.
            lr: step size, or one per step.
            average: what is released: "last" (w_{T+1}), or the "uniform" or "weighted" (by t) average of w_1..w_T.
            noise_scale: std of the Gaussian noise per coordinate, or scale of the K-norm noise.
            risk_bound: on the expected excess risk over comparators within the distance, real numbers; None where it is
                not proved.
        """
        sizes = self.step_sizes()
        sensitivity, scale = self.noise(sizes)
        alike = bool(np.all(sizes == sizes[0]))
        return {
            "steps": sizes.size,
            "lr": float(sizes[0]) if alike else tuple(sizes.tolist()),
            "average": self.answer,
            "noise_scale": scale,
            "risk_bound": self.risk(sizes, sensitivity, scale) if alike else None,
        }

    def noise_for(self, moved: float) -> tuple[float, float]:
        """Returns the sensitivity of an answer that a record moves by so much, and the noise scale."""
        exact = asks_exact(self.secure)
        # PRIVACY: rounding to the grid moves the answer too (test_the_grid_is_in_the_sensitivity_of_exact_plans)
        sensitivity = with_grid(moved, exact)
        scale = self._scale(sensitivity)
        if exact:
            exact_grid(scale, sensitivity, self.dim)  # raises before anything is spent
        return sensitivity, scale

    def _scale(self, sensitivity: float) -> float:
        if self.noise_multiplier is not None:
            return self.noise_multiplier * sensitivity
        if self.delta == 0:
            # PRIVACY: rounded up further than the epsilon of the event is (test_a_plan_with_half_the_noise_is_refused);
            # margin of the quotient (docs/proofs/rounding.md#model-of-arithmetic)
            return scaled_up(sensitivity / self.epsilon, 8)
        return gaussian_sigma(self.epsilon, self.delta, sensitivity) if sensitivity > 0 else 0.0


def each_step(lr: float | Sequence[float], steps: int) -> FloatArray:
    """Returns the step sizes (T,) of a number, or of T of them."""
    sizes = np.asarray(lr, dtype=np.float64)
    if sizes.shape not in ((), (steps,)):
        raise ValueError(
            f"lr must be a number or {steps} numbers, one per step (got shape {sizes.shape})"
        )
    return np.array(np.broadcast_to(sizes, (steps,)))


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
        return min(distance, promises.radius)
    if not math.isfinite(promises.radius):
        raise MissingConstantError(
            "distance, a guess of |w*|, is needed on an unbounded domain (got None)"
        )
    return promises.radius


_MAX_EPOCHS = 20
_GRID = 97
_DECADES = 6


@dataclass(frozen=True, kw_only=True)
class OutputTask(AnswerTask):
    """Of the noised uniform average of w_1..w_T; the T-th update is never used.

    Epochs: default 1 for alpha >= 1/2, else n^{(1-2 alpha)/(1+alpha)}, at most 20.

    Example:
        >>> hinge = LossPromises(0.5, 1.5, lambda r: 1.5 * (1 + r) ** 0.5, radius=1.0, glm=True, score_offset=1.0)
        >>> plan = OutputTask(promises=hinge, n=10000, batch_size=1, dim=20, epsilon=1.0, delta=1e-6, lr=0.005).plan()
        >>> plan["steps"], round(plan["noise_scale"], 4)
        (10000, 0.0927)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_multiplier is None:
            check.open_interval(0.0, 1.0, delta=self.delta)

    @property
    def answer(self) -> str:
        """Which iterate or average is released."""
        return "uniform"

    def step_sizes(self) -> FloatArray:
        """Returns eta_1..eta_T."""
        epochs = self.epochs
        if epochs is None:
            alpha = self.promises.holder_exponent
            passes = 1.0 if alpha >= 0.5 else math.pow(self.n, (1 - 2 * alpha) / (1 + alpha))
            epochs = min(_MAX_EPOCHS, math.ceil(passes * (1 - 1e-12)))
        steps = self.steps_per_epoch * epochs
        if steps == 1:
            raise ConditionError(
                "steps must be >= 2: the answer is the average of w_1..w_T, whose first is the"
                f" start, so that one step releases a constant (got batch_size={self.batch_size},"
                f" n={self.n}, one epoch); take a smaller batch_size or more epochs"
            )
        return each_step(self.balanced_lr(epochs) if self.lr is None else self.lr, steps)

    def noise(self, lr: FloatArray) -> tuple[float, float]:
        """Returns the sensitivity and the noise scale."""
        path = output_path(
            self.promises,
            lr,
            batch_size=self.batch_size,
            hit_constant=self.hit_constant,
            dim=self.dim,
        )
        return self.noise_for(path_sensitivity(path, self.steps_per_epoch))

    def balanced_lr(self, epochs: int) -> float:
        """Returns the step size that minimizes U (see this module) on a log grid of 16 points a decade.

        G is taken at the distance D on an unbounded domain. It affects accuracy only: privacy is computed afterwards.

        Raises:
            MissingConstantError: no distance on an unbounded domain.

        Source: docs/proofs/holder.md#risk-of-output-perturbation.
        """
        promises = self.promises
        steps = self.steps_per_epoch * epochs
        reach = distance_bound(promises, self.distance)
        alpha = promises.holder_exponent
        constant = promises.holder_constant
        bounded = math.isfinite(promises.radius)
        bound = max(promises.grad_bound(reach), 1e-300)
        largest = (
            (2.0 if bounded else 1.0) if alpha == 1 else math.exp(min(300 * (1 - alpha), 300.0))
        )
        largest *= (1 - 1e-12) / constant
        grid = reach / (bound * math.sqrt(steps)) * np.logspace(-_DECADES, 0, _GRID)
        grid = np.minimum(grid, largest)
        roots = float(np.sqrt(np.arange(1, max(steps - 1, 1))).sum()) / steps
        drift = expansions(alpha, constant, grid, promises.glm) * roots
        epoch = (epochs + 1) / 2 - 1 / self.steps_per_epoch
        hit = grid * bound / self.batch_size * epoch
        delta_stab = drift + 2.0 * hit
        noise = math.sqrt(self.dim) / self._mu * (drift + self.hit_constant * hit)
        risk = reach**2 / (2 * grid * steps) + grid * bound**2 / 2
        risk = risk + bound * (noise + (2 * delta_stab if epochs > 1 else 0.0))
        return float(grid[int(np.argmin(risk))])

    @property
    def _mu(self) -> float:
        if self.noise_multiplier is None:
            return gaussian_mu(self.epsilon, self.delta)
        return 1.0 / self.noise_multiplier if self.noise_multiplier else math.inf

    def risk(self, lr: FloatArray, sensitivity: float, scale: float) -> float | None:
        """Returns U at one step size; None where it is not proved."""
        promises = self.promises
        if self.n % self.batch_size or math.isinf(promises.radius):
            return None
        distance = distance_bound(promises, self.distance)
        bound = promises.grad_bound(promises.radius)
        step = float(lr[0])
        stability = (
            2 * bound * sensitivity * (2.0 / self.hit_constant)
            if lr.size > self.steps_per_epoch
            else 0.0
        )
        start = distance**2 / (2 * step * lr.size)
        return start + step * bound**2 / 2 + bound * scale * math.sqrt(self.dim) + stability


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
    return np.asarray(1.0 / np.maximum(smoothness, reg * np.arange(steps, dtype=np.float64)))


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
    hits = hit_constant / batch_size * computed.grad_bound * sizes * shrink * tails
    starts = np.arange(0, sizes.size, steps_per_epoch)
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
            dim,
            batch_size,
            unit_roundoff,
            offset,
            projected=bounded,
            gradient_error=error,
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


@dataclass(frozen=True, kw_only=True)
class BoltOnTask(AnswerTask):
    """Of an iterate, or an average, of a smooth loss.

    Args:
        reg: gamma >= 0.
        average: "last", "uniform" or "weighted"; default "last" if reg > 0, else "uniform" ("last" for one step).

    Step sizes are proximal, in (0, 2/beta]; default `decreasing_lr` if reg > 0, else the constant step that minimizes U
    (with the noise of the answer that is asked for).

    Source: docs/proofs/output.md#bolt-on-runs

    Example:
        >>> smooth = LossPromises(1.0, 0.25, lambda r: 1.0, glm=True, score_offset=1.0)
        >>> task = BoltOnTask(
        ...     promises=smooth, n=1000, batch_size=10, dim=5, epsilon=1.0, delta=0.0, reg=0.1, epochs=3)
        >>> plan = task.plan()
        >>> plan["steps"], plan["average"], round(plan["noise_scale"], 9)
        (300, 'last', 0.02)
    """

    reg: float = 0.0
    average: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check.nonnegative(reg=self.reg)

    @property
    def passes(self) -> int:
        """Epochs."""
        return 1 if self.epochs is None else self.epochs

    @property
    def steps(self) -> int:
        """Number of steps T."""
        return self.steps_per_epoch * self.passes

    @property
    def answer(self) -> str:
        """Which iterate or average is released."""
        if self.average is not None:
            return self.average
        return "last" if self.reg > 0 or self.steps == 1 else "uniform"

    def step_sizes(self) -> FloatArray:
        """Returns eta_1..eta_T."""
        lr = self.lr
        if lr is None:
            if self.reg > 0:
                return decreasing_lr(self.promises.holder_constant, self.reg, self.steps)
            largest = (2 - 1e-12) / self.promises.holder_constant
            reach = distance_bound(self.promises, self.distance)
            lr = min(largest, reach / math.sqrt(2 * self.steps * self._cost()))
        return each_step(lr, self.steps)

    def noise(self, lr: FloatArray) -> tuple[float, float]:
        """Returns the sensitivity and the noise scale."""
        if self.delta == 0:
            require_gaussian(self.secure)
        return self.noise_for(self.sensitivity(lr))

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

    def _noise_norm(self) -> float:
        """Returns a bound on E|z| at sensitivity 1."""
        if self.noise_multiplier is None:
            return noise_norms(self.dim, self.epsilon, self.delta)[0]
        return self.noise_multiplier * math.sqrt(self.dim)

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
            bound * (bound / 2 + bound * (self.passes - 1) / self.batch_size + noise), 1e-300
        )

    def risk(self, lr: FloatArray, sensitivity: float, scale: float) -> float | None:
        """Returns U at one step size; None where it is not proved, or D is not known."""
        proved = self.reg == 0 and self.answer == "uniform" and self.n % self.batch_size == 0
        if not proved or (self.distance is None and not math.isfinite(self.promises.radius)):
            return None
        step = float(lr[0])
        return (
            distance_bound(self.promises, self.distance) ** 2 / (2 * step * self.steps)
            + step * self._cost()
        )


def noise_norms(dim: int, epsilon: float, delta: float) -> tuple[float, float]:
    """Returns (s, v), bounds on E|z| and on E|z|^2 for a release with sensitivity 1.

    Args:
        dim: d >= 1.
        epsilon: > 0.
        delta: in [0, 1); 0 means K-norm noise.

    Source: docs/proofs/output.md#risk-of-a-noisy-minimizer

    Example:
        >>> noise_norms(dim=10, epsilon=2.0, delta=0)
        (5.0, 27.5)
    """
    if delta == 0:
        return dim / epsilon, dim * (dim + 1) / epsilon**2
    sigma = gaussian_sigma(epsilon, delta, 1.0)
    return math.sqrt(dim) * sigma, dim * sigma**2
