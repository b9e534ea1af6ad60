"""Bolt-on private SGD: how far one record moves the answer of permutation SGD on a smooth convex loss.

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

Source: docs/proofs/output.md#bolt-on-runs; Wu, Li, Kumar, Chaudhuri, Jha, Naughton 2017.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco.errors import ConditionError
from torch_dpsco.theory.holder_promises import LossPromises
from torch_dpsco.theory.holder_rounding import DOUBLE, Arithmetic, gamma, scaled_up
from torch_dpsco.theory.holder_stability import expansions, step_sizes
from torch_dpsco.theory.output_sensitivity import safe

FloatArray = NDArray[np.float64]

_POWERS: dict[str, float | None] = {"last": None, "uniform": 0.0, "weighted": 1.0}  # of t, in the weight of w_t


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
    beta, reg = check.positive(smoothness=smoothness), check.positive(reg=reg)
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
    sizes, reg = step_sizes(lr), check.nonnegative(reg=reg)
    if promises.holder_exponent != 1:
        raise ConditionError(
            f"holder_exponent must be 1: bolt-on SGD needs a smooth loss (got {promises.holder_exponent:g}); "
            f"HolderOutputSGD takes others"
        )
    # PRIVACY: larger steps move runs apart; raises above 2/beta (test_a_step_above_two_over_beta_is_refused)
    expansions(1.0, promises.holder_constant, sizes)
    weights = _weights(average, sizes.size)
    # rounded up by more than the errors of the computed divisor and of a step size 2/beta that is rounded
    shrink = scaled_up(1.0 / (1.0 + sizes * reg), 4)
    tails = _tails(weights, shrink)
    computed = _Computed(promises, sizes, reg, batch_size, dim, unit_roundoff)
    scale = check.positive(hit_constant=hit_constant) / check.positive_count(batch_size=batch_size)
    hits = scale * computed.grad_bound * sizes * shrink * tails
    starts = np.arange(0, sizes.size, check.positive_count(steps_per_epoch=steps_per_epoch))
    # PRIVACY: a record is in any one batch of each epoch (test_no_pair_of_neighbors_moves_the_answer_further)
    moved = float(np.maximum.reduceat(hits, starts).sum()) + 2 * float(computed.added @ tails)
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
        self.radius, self.added, self.average_error = promises.radius, np.zeros_like(lr), 0.0
        if unit_roundoff is None:
            self.grad_bound = promises.grad_bound(self.radius)
            return
        offset, error = promises.score_offset, promises.gradient_error
        arithmetic = Arithmetic(dim, batch_size, unit_roundoff, offset, projected=bounded, gradient_error=error)
        reach = arithmetic.norm_bound(promises.radius)
        self.grad_bound = promises.grad_bound(reach + arithmetic.score_error(reach) if bounded else math.inf)
        if not bounded:
            reach = 1.001 * self._reach(lr, reg)
        norms, bounds = np.full_like(lr, reach), np.full_like(lr, self.grad_bound)
        forms = arithmetic.errors(lr, norms, bounds, 1.0, promises.holder_constant, promises.glm)
        # the last form is added to the distance, so that it passes contractions; shrinkage rounds divisor and quotient
        self.added = forms[-1].added + (gamma(4, unit_roundoff) * (reach + lr * self.grad_bound) if reg else 0.0)
        if not bounded and self._reach(lr, reg, self.added) > reach:
            raise ConditionError(f"steps must be fewer: rounding may add 0.1 % to the iterates of {lr.size} steps")
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
        raise ConditionError(f"average must be 'last' for one step: averages are of w_1..w_T, here 0 (got {average!r})")
    shares = np.arange(1.0, steps + 1.0) ** power
    return np.append(shares / shares.sum(), 0.0)


def _tails(weights: FloatArray, shrink: FloatArray) -> FloatArray:
    """Returns A_1..A_T: what a unit of distance after step s is worth in the answer."""
    later = zip(weights[-2:0:-1].tolist(), shrink[:0:-1].tolist(), strict=True)
    tails = accumulate(later, lambda tail, step: step[0] + step[1] * tail, initial=float(weights[-1]))
    return np.array(list(tails)[::-1])
