"""How far, in how many steps and how fast noisy gradient descent is to go, from its noise and from nothing private.

    H = D / s             the horizon: step sizes add up to it (h T = H); s is the norm of the noise of all steps' mean
    h <= T / (5 L)        where the loss is L-smooth, so that momentum carries such steps, and T^2 >= 5 L H
    m = (L h - 1)/(L h + 1),  lr = h (1 - m) = 2 h/(L h + 1) <= 2/L

T steps of equal total budget have noise of variance T s^2 each, hence s^2 for their mean, whatever T is: more steps
cost time alone. The average of the iterates has excess risk of at most D^2/(2 H) + H s^2/2 + terms that vanish with T,
which H = D/s minimizes.

Proof: docs/proofs/steps.md#horizon, docs/proofs/steps.md#momentum. Three numbers are choices, not theory: the distance
D (`usual_distance`), the clip (`clip_share`) and the number of passes, see docs/proofs/steps.md#choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_dpsco import _validate as check

LEAST = 64  # steps
MOST = 1024
MOST_OF_USERS = 256
PASSES = 20  # over the data, in batches of 1/PASSES of them times the steps at most
SETTLED = (
    5.0  # T (1 - m) is about twice that at least: fast directions have e^-5 of their start left
)
USUAL_DIM = 64  # where nobody says
_FIRST_STEPS = 50.0  # D in units of a first step of size 1/B^2
_TARGETS = 3.0  # and of the targets' bound over B
_ALONG = (
    20.0  # gradients of the mean loss along the way are about that much shorter than the bound
)
_SAMPLED = 4.0  # and deviations of single rows from them
_LOUD = 0.008  # noise from which rows are clipped
_CLIPPED = 0.5  # at half of the bound
_FEW = 5  # steps of one pass
_RELATIVE = 6.0  # of steps in units of a clip
_OSCILLATION = 4.0
_ROUNDS = 200.0


@dataclass(frozen=True)
class Pace:
    """Step size and momentum.

    Args:
        lr: of a step.
        momentum: in [0, 1); the steps of `rules.Momentum` have size lr/(1 - momentum).
    """

    lr: float
    momentum: float = 0.0


def usual_distance(
    grad_at_zero: float, bound_x: float, bound_y: float | None, smooth: bool
) -> float:
    """Returns the guess of |w_1 - w*| where there is none: 50 first steps, at most six times the targets' bound.

    Args:
        grad_at_zero: bound on gradients at 0, > 0.
        bound_x: B > 0, of rows.
        bound_y: Y > 0, of real targets; None for labels.
        smooth: whether first steps of size 1/B^2 have a meaning; else it is three times the targets' bound, if any.

    Example:
        >>> usual_distance(0.5, 1.0, None, smooth=True)
        25.0
    """
    steps = (
        _FIRST_STEPS
        * check.positive(grad_at_zero=grad_at_zero)
        / check.positive(bound_x=bound_x) ** 2
    )
    if bound_y is None:
        return steps
    targets = _TARGETS * check.positive(bound_y=bound_y) / bound_x
    return min(steps, 2.0 * targets) if smooth else targets


def clip_share(noise: float) -> float:
    """Returns the share of the gradient bound at which the rows of a linear model are clipped.

    1 up to 0.0005, 1/2 from 0.008 on, and proportional to noise^(-1/4) between them.

    Args:
        noise: norm of the noise of all steps' mean over the bound, >= 0.

    Example:
        >>> clip_share(0.0001), clip_share(0.03)
        (1.0, 0.5)
    """
    ratio = check.nonnegative(noise=noise) / _LOUD
    return 1.0 if ratio <= _CLIPPED**4 else max(_CLIPPED, _CLIPPED * ratio**-0.25)


def noise_of_mean(
    noise_multiplier: float,
    clip: float,
    batch_size: int,
    steps: int,
    dim: int | None,
    sampled: bool,
) -> float:
    """Returns s, the norm of the noise of the mean of all steps, that of sampling included.

    Args:
        noise_multiplier: z > 0, std on the sum over the clip.
        clip: C > 0.
        batch_size: b.
        steps: T.
        dim: d; None for a usual one.
        sampled: whether batches are not all rows.
    """
    added = noise_multiplier * math.sqrt(dim or USUAL_DIM) / batch_size
    return (
        clip / math.sqrt(steps) * math.hypot(added, sampled / (_SAMPLED * math.sqrt(batch_size)))
    )


def steps_to(horizon: float, smoothness: float | None) -> int:
    """Returns T with T^2 >= 5 L H, between 64 and 1024; without smoothness the most.

    Args:
        horizon: H > 0.
        smoothness: L > 0; None for a loss with kinks.
    """
    if smoothness is None:
        return MOST
    return min(
        MOST,
        max(LEAST, math.ceil(math.sqrt(SETTLED * smoothness * check.positive(horizon=horizon)))),
    )


def smooth_pace(horizon: float, steps: int, smoothness: float) -> Pace:
    """Returns step size and momentum for an L-smooth loss.

    Args:
        horizon: H > 0.
        steps: T.
        smoothness: L > 0.

    Example:
        >>> smooth_pace(horizon=50.0, steps=100, smoothness=1.0)
        Pace(lr=0.5, momentum=0.0)
    """
    step = min(
        check.positive(horizon=horizon) / check.positive_count(steps=steps),
        steps / (SETTLED * smoothness),
    )
    reach = check.positive(smoothness=smoothness) * max(step, 1.0 / smoothness)
    momentum = max(0.0, (reach - 1.0) / (reach + 1.0))
    return Pace(step * (1.0 - momentum), momentum)


def rough_pace(distance: float, noise: float, steps: int, grad_bound: float) -> Pace:
    """Returns step size and momentum for a loss with kinks: h = D/sqrt(T^2 s^2 + T g^2), g = grad_bound/20.

    Args:
        distance: D > 0.
        noise: s > 0.
        steps: T.
        grad_bound: > 0, of rows.

    Example:
        >>> pace = rough_pace(distance=1.0, noise=1e-9, steps=400, grad_bound=20.0)
        >>> round(pace.lr, 9), pace.momentum
        (0.00125, 0.975)
    """
    check.positive_count(steps=steps)
    moved = math.hypot(
        steps * check.positive(noise=noise), math.sqrt(steps) * grad_bound / _ALONG
    )
    momentum = max(0.0, 1.0 - 2.0 * SETTLED / steps)
    return Pace(check.positive(distance=distance) / moved * (1.0 - momentum), momentum)


def one_pass_steps(horizon: float, smoothness: float, momentum: bool) -> int:
    """Returns the number of batches of one pass, whose noise grows with it: H(T) = H/sqrt(T).

    Args:
        horizon: H of one step on all records.
        smoothness: L > 0.
        momentum: whether steps may be T/(5 L), or 1/(2 L) at most.
    """
    reach = check.positive(horizon=horizon) * check.positive(smoothness=smoothness)
    steps = math.pow(SETTLED * reach, 2.0 / 5.0) if momentum else math.pow(2.0 * reach, 2.0 / 3.0)
    return min(MOST, max(_FEW, math.ceil(steps)))


def risk(distance: float, noise: float, steps: int, smoothness: float, momentum: bool) -> float:
    """Returns D^2/(2 H) + H s^2/2 at the best horizon H that so many steps reach, by which numbers of steps compare.

    Args:
        distance: D > 0.
        noise: s > 0, of the mean of all steps.
        steps: T.
        smoothness: L > 0.
        momentum: as in `one_pass_steps`.

    Example:
        >>> risk(1.0, 0.1, 100, 1.0, momentum=True), risk(1.0, 0.1, 4, 1.0, momentum=True) > 0.1
        (0.1, True)
    """
    largest = check.positive_count(steps=steps) / SETTLED if momentum else 0.5
    horizon = min(
        check.positive(distance=distance) / noise,
        steps * largest / check.positive(smoothness=smoothness),
    )
    return distance**2 / (2.0 * horizon) + horizon * noise**2 / 2.0


def relative_steps(noise: float) -> int:
    """Returns T, between 64 and 256, for means in units of a clip, where no smoothness is known: sqrt(200/noise).

    Args:
        noise: norm of the noise of the mean of all steps, in units of the clip, > 0.
    """
    return min(
        MOST_OF_USERS, max(LEAST, math.ceil(math.sqrt(_ROUNDS / check.positive(noise=noise))))
    )


def relative_pace(noise: float, steps: int, distance: float | None = None) -> Pace:
    """Returns step size and momentum for means in units of a clip: h = D min(1/(T s), T/40).

    The second bound keeps a step lr = h (1 - m) below D/4.

    Args:
        noise: s > 0, in units of the clip.
        steps: T.
        distance: D > 0; default 6, for rows of norms of about 1 to 3.

    Example:
        >>> pace = relative_pace(noise=0.1, steps=100)
        >>> round(pace.lr, 9), pace.momentum
        (0.06, 0.9)
    """
    steps = check.positive_count(steps=steps)
    reach = check.positive(distance=distance or _RELATIVE)
    slow = min(1.0, 2.0 * SETTLED / steps)
    step = min(1.0 / (steps * check.positive(noise=noise)), 1.0 / (_OSCILLATION * slow))
    return Pace(reach * step * slow, 1.0 - slow)
