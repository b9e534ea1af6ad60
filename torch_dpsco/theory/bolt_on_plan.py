"""Bolt-on private SGD: step size, sensitivity, noise and risk of a run, before anything is spent.

Risk at gamma = 0 of the uniform average, b a divisor of n, constant step, records drawn independently: as in
`holder_plan`, |w_{t+1} - w*|^2 <= |w_t - w*|^2 - 2 eta (f_t(w_t) - f_t(w*)) + eta^2 G^2; a record of step t met w_t in
K' earlier epochs, K' <= K - 1, (K-1)/2 on average; with another one in its place w_t would be nearer than
2 eta G K' / b, so that E F(w_t) <= E f_t(w_t) + 2 eta G^2 K' / b; the noise z adds at most G E|z|:

    U(eta) = D^2 / (2 eta T) + eta G^2 / 2 + eta G^2 (K-1)/b + G E|z|,      E|z| proportional to eta

Source: docs/proofs/output.md#risk-of-a-bolt-on-run; `bolt_on` for the sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_sigma
from torch_dpsco.errors import AdjacencyError
from torch_dpsco.theory.bolt_on import bolt_on_sensitivity, decreasing_lr
from torch_dpsco.theory.exact_noise import asks_exact, exact_grid, require_gaussian, with_grid
from torch_dpsco.theory.holder_plan import HIT_CONSTANTS
from torch_dpsco.theory.holder_promises import LossPromises, OutputRun, distance_bound
from torch_dpsco.theory.holder_rounding import DOUBLE, scaled_up
from torch_dpsco.theory.output_constants import noise_norms

FloatArray = NDArray[np.float64]


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
    request = _Request(
        promises, n, batch_size, dim, epsilon, delta, noise_multiplier, adjacency, epochs, reg, average, distance
    )
    sizes = request.step_sizes(lr)
    if delta == 0:
        require_gaussian(secure)
    # PRIVACY: rounding to the grid moves the answer too (test_the_grid_is_in_the_sensitivity_of_exact_plans)
    sensitivity = with_grid(request.sensitivity(sizes), asks_exact(secure))
    exact = request.sensitivity(sizes, None)  # in real numbers
    scale = request.scale(sensitivity)
    if asks_exact(secure):
        exact_grid(scale, sensitivity, dim)  # raises before anything is spent
    constant = bool(np.all(sizes == sizes[0]))
    return OutputRun(
        steps=sizes.size,
        lr=float(sizes[0]) if constant else tuple(sizes.tolist()),
        average=request.answer,
        sensitivity=sensitivity,
        noise_scale=scale,
        risk_bound=request.risk(float(sizes[0])) if constant else None,
        rounding_share=max(0.0, 1 - exact / sensitivity),
    )


@dataclass(frozen=True)
class _Request:
    """What a plan is asked for, checked; fields as in `plan_bolt_on`."""

    promises: LossPromises
    n: int
    batch_size: int
    dim: int
    epsilon: float
    delta: float
    noise_multiplier: float | None
    adjacency: str
    epochs: int
    reg: float
    average: str | None
    distance: float | None

    def __post_init__(self) -> None:
        n, _ = check.positive_count(n=self.n), check.positive_count(dim=self.dim)
        if check.positive_count(batch_size=self.batch_size) > n:
            raise ValueError(f"batch_size must be at most n = {n} (got {self.batch_size})")
        check.positive_count(epochs=self.epochs)
        check.nonnegative(reg=self.reg)
        if self.noise_multiplier is not None:
            check.nonnegative(noise_multiplier=self.noise_multiplier)
        else:
            check.positive(epsilon=self.epsilon)
            if self.delta != 0:
                check.open_interval(0.0, 1.0, delta=self.delta)
        if self.adjacency not in HIT_CONSTANTS:
            raise AdjacencyError(f"adjacency must be one of replace_one, zero_out (got {self.adjacency})")

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.n // self.batch_size)

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
            # PRIVACY: rounded up further than the epsilon of the event is (test_a_plan_with_half_the_noise_is_refused)
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
            hit_constant=HIT_CONSTANTS[self.adjacency],
            dim=self.dim,
            unit_roundoff=unit_roundoff,
        )

    def step_sizes(self, lr: float | Sequence[float] | None) -> FloatArray:
        """Returns eta_1..eta_T."""
        if lr is None:
            if self.reg > 0:
                return decreasing_lr(self.promises.holder_constant, self.reg, self.steps)
            lr = self._balanced_lr()
        sizes = np.asarray(lr, dtype=np.float64)
        if sizes.shape not in ((), (self.steps,)):
            raise ValueError(f"lr must be a number or {self.steps} numbers, one per step (got shape {sizes.shape})")
        return np.array(np.broadcast_to(sizes, (self.steps,)))

    def _balanced_lr(self) -> float:
        largest = (2 - 1e-12) / self.promises.holder_constant
        reach = distance_bound(self.promises, self.distance)
        return min(largest, reach / math.sqrt(2 * self.steps * self._cost()))

    def _cost(self) -> float:
        """Returns (U - D^2/(2 eta T)) / eta, in real numbers."""
        bound, unit = self.promises.grad_bound(self.promises.radius), 1 / self.promises.holder_constant
        linear = replace(self.promises, radius=math.inf, grad_bound=lambda _: bound)  # where twice the radius is no cap
        moved = replace(self, promises=linear).sensitivity(np.full(self.steps, unit), None) / unit  # per step size
        noise = self._noise_norm() * moved
        return max(bound * (bound / 2 + bound * (self.epochs - 1) / self.batch_size + noise), 1e-300)

    def risk(self, lr: float) -> float | None:
        """Returns U(eta), or None where it is not proved or D is not known."""
        proved = self.reg == 0 and self.answer == "uniform" and self.n % self.batch_size == 0
        if not proved or (self.distance is None and not math.isfinite(self.promises.radius)):
            return None
        return distance_bound(self.promises, self.distance) ** 2 / (2 * lr * self.steps) + lr * self._cost()
