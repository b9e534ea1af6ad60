"""Promised constants of a convex problem, and the gradient bound that follows from them.

A `Problem` is what the caller knows about the loss BEFORE seeing the data. Everything calibrated without clipping rests
on it: a constant read off the data voids the guarantee. `torch_dpsco.losses` fills a Problem in for the common losses.

Conventions for one record z, loss l(w, z), fixed subgradient g(w, z), ball B(r) = {||w|| <= r}, joint norm over all
parameters:

    holder_exponent a, holder_constant L    ||g(w,z) - g(w',z)|| <= L ||w - w'||^a     on ALL of R^d, l convex there
    grad_at_zero M, loss_at_zero M0         M = sup_z ||g(0,z)||,  M0 = sup_z l(0,z)  with l >= 0
    G(r) = sup_z sup_{w in B(r)} ||g(w,z)|| <= M + L r^a                               `grad_bound`

Differs from the paper in: 1. G(r) is the least of all promised bounds, not only M + L r^a.
2. At a = 0 also G <= L for nonnegative convex losses (`grad_bound`). 3. Every computed bound is rounded up.

Phases of a run, its steps and their pace, fixed before it starts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco._validate import between, check_fields, choice, nonnegative, order, positive
from torch_dpsco.errors import MissingConstantError

_SLACK = 1.0 + 2.0**-49

_CHECKS: dict[str, Callable[..., float]] = {
    "holder_exponent": functools.partial(between, 0.0, 1.0),
    "holder_constant": positive,
    "grad_at_zero": nonnegative,
    "loss_at_zero": nonnegative,
    "lipschitz": positive,
    "gradient_diameter": positive,
    "smoothness": nonnegative,
    "strong_convexity": positive,
    "pl_constant": positive,
    "moment_order": order,
    "moment": positive,
    "second_moment": positive,
    "radius": functools.partial(positive, allow_inf=True),
    "bound_x": positive,
    "bound_y": positive,
    "score_offset": nonnegative,
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Promises about the loss of any single record of the universe; their range is checked, their truth is not.

    All are optional; an algorithm names what it needs with `require`. Two problems are equal if all promises are.

    Args:
        holder_exponent: a in [0, 1]; 1 means smooth, 0 that subgradients vary by at most `holder_constant`. Promises
            also that the loss is convex on the whole of R^d. Needs `holder_constant`.
        holder_constant: L > 0, on the whole of R^d, not only on the feasible set. At a = 0 it is the JUMP of the
            subgradient, which may be twice the Lipschitz constant.
        grad_at_zero: M >= 0, bound on the gradient norm at w = 0.
        loss_at_zero: M0 >= 0, bound on the loss at w = 0. Promises also that the loss is nonnegative everywhere.
        lipschitz: bound > 0 on the gradient norm for ||w|| <= `radius`.
        gradient_diameter: bound > 0 on ||g(w,z) - g(w,z')|| over two records, for ||w|| <= `radius`.
        smoothness: Lipschitz constant >= 0 of the gradient, on the whole of R^d.
        strong_convexity: modulus > 0.
        pl_constant: Polyak-Lojasiewicz (or proximal-PL) constant > 0.
        moment_order: k > 1, the order of `moment`.
        moment: k-th ROOT of the k-th moment of the gradient norm, > 0; needs `moment_order`.
        second_moment: square root of the second moment of the gradient norm, > 0.
        radius: radius of a ball around 0 that holds the feasible set, > 0; inf if unconstrained.
        is_glm: whether the loss is phi(w.x; y) with a scalar score w.x and phi convex.
        bound_x: B > 0, norm of the features of every record, the column of ones of a bias included.
        bound_y: Y > 0, largest absolute value of a target.
        score_offset: >= 0, largest number that the loss adds to the score w.x, over B (Y/B for residuals y - w.x). It
            enters the error of floating-point scores only.
        exact_grad_bound: nondecreasing function r -> G(r), r in [0, inf]; may return inf. It must pickle, and compare
            by value, for the problem to do so.

    Raises:
        ValueError: if a constant is out of range or not finite, or half of a pair is missing.

    Guarantee:
        None by itself. Mechanisms that do not clip are private only if the promises hold for EVERY record that the
        data set might hold, that is for the whole universe after `losses.enforce_bounds`.

    Source:
        docs/proofs/holder.md#promises.

    Example:
        >>> Problem(lipschitz=1.0).grad_bound()
        1.0
        >>> problem = Problem(holder_exponent=0.5, holder_constant=2.0, grad_at_zero=1.0)
        >>> round(problem.grad_bound(4.0), 9)
        5.0
    """

    holder_exponent: float | None = None
    holder_constant: float | None = None
    grad_at_zero: float | None = None
    loss_at_zero: float | None = None
    lipschitz: float | None = None
    gradient_diameter: float | None = None
    smoothness: float | None = None
    strong_convexity: float | None = None
    pl_constant: float | None = None
    moment_order: float | None = None
    moment: float | None = None
    second_moment: float | None = None
    radius: float = math.inf
    is_glm: bool = False
    bound_x: float | None = None
    bound_y: float | None = None
    score_offset: float | None = None
    exact_grad_bound: Callable[[float], float] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        check.ranges(self, _CHECKS)
        for first, second in (
            ("holder_exponent", "holder_constant"),
            ("moment_order", "moment"),
        ):
            if (getattr(self, first) is None) != (getattr(self, second) is None):
                raise ValueError(f"{first} and {second} must be given together")

    def grad_bound(self, radius: float | None = None) -> float:
        """Least promised upper bound on the gradient norm over the ball of this radius around 0.

        The least of `lipschitz` (where it was promised; lipschitz + L (radius - self.radius)^a beyond, where roundings
        of the parameters may lead), `exact_grad_bound(radius)`,
        M + L radius^a, M at radius 0, and L itself if a = 0 and the loss is nonnegative. The last needs convexity on
        R^d and `loss_at_zero`: along -u, u = g(w)/||g(w)||, a nonnegative loss must flatten, so some subgradient there
        has an inner product with u of at most e, and ||g(w)|| = <g(w), u> <= L + e for every e > 0.

        Args:
            radius: r in [0, inf]; None means the feasible radius `self.radius`. For a projected iterate pass
                min(||w||, self.radius): a norm rounded above the radius loses the `lipschitz` promise.

        Returns:
            G(r) >= 0, finite, rounded up where computed, nondecreasing in r (if `exact_grad_bound` is).

        Raises:
            MissingConstantError: if no promised constant bounds the gradient on this ball.

        Guarantee:
            An upper bound on ||g(w,z)|| for every ||w|| <= r and every record z for which the promises hold.

        Source:
            docs/proofs/holder.md#gradient-bound.

        Example:
            >>> Problem(holder_exponent=0, holder_constant=1, grad_at_zero=1, loss_at_zero=1).grad_bound()
            1.0
        """
        reach = self.radius if radius is None else radius
        if not (type(reach) is float and reach >= 0.0):
            reach = nonnegative(allow_inf=True, radius=reach)
        # PRIVACY: sensitivity of unclipped gradients (test_grad_bound_is_the_least_promised_bound)
        least = min(self._bounds(reach), default=math.inf)
        if math.isinf(least):
            raise MissingConstantError(
                f"no promised constant bounds the gradient for ||w|| <= {reach:g}: give Problem a"
                " lipschitz constant (valid up to its radius), an exact_grad_bound, or"
                " holder_exponent, holder_constant and grad_at_zero with a finite radius;"
                " losses.<Loss>().problem(bound_x=..., radius=...) gives them all; for a net:"
                " dp.NetSGD.plan(n=, budget=, dim=model)"
            )
        return least

    def require(self, *names: str, by: str) -> tuple[float, ...]:
        """Returns the named constants, or says which are missing, who asked, and where to get them.

        Args:
            names: fields that hold a number; radius counts as missing if it is inf.
            by: name of the algorithm that asks, for the message.

        Returns:
            The values, in the order of `names`.

        Raises:
            MissingConstantError: if any is missing.
            ValueError: if a name is not a numeric field.

        Example:
            >>> Problem(smoothness=2.0).require("smoothness", by="AcceleratedSGD")
            (2.0,)
        """
        values = {name: getattr(self, choice(_CHECKS, name=name)) for name in names}
        missing = [name for name, value in values.items() if value is None or value == math.inf]
        if missing:
            example = ", ".join(f"{name}=..." for name in missing)
            raise MissingConstantError(
                f"{by} needs {', '.join(missing)}: promise Problem({example}), derived from public"
                " knowledge and never from the data, or use losses.<Loss>().problem(bound_x=...,"
                " radius=...), which gives what its loss has; a plan that takes clip= and lr= needs no"
                " promise beside both; for a net: dp.NetSGD.plan(n=, budget=, dim=model)"
            )
        return tuple(values[name] for name in names)

    def _bounds(self, reach: float) -> Iterator[float]:
        if self.lipschitz is not None and reach <= self.radius:
            yield self.lipschitz
        elif (
            self.lipschitz is not None
            and self.holder_exponent is not None
            and self.holder_constant is not None
        ):
            # w outside of the ball is reach - radius away from a point of it
            beyond = math.pow(reach - self.radius, self.holder_exponent)
            yield round_up(self.lipschitz + self.holder_constant * beyond)
        if self.exact_grad_bound is not None:
            exact = self.exact_grad_bound(reach)
            if not (type(exact) is float and exact >= 0.0):
                exact = nonnegative(allow_inf=True, exact_grad_bound=exact)
            yield round_up(exact)
        if self.grad_at_zero is not None and reach == 0:
            yield self.grad_at_zero
        if self.holder_exponent is not None and self.holder_constant is not None:
            if self.grad_at_zero is not None:
                yield round_up(
                    self.grad_at_zero
                    + self.holder_constant * math.pow(reach, self.holder_exponent)
                )
            if self.holder_exponent == 0 and self.loss_at_zero is not None:
                yield self.holder_constant


class Promised:
    """A loss that a problem may be of; plans hold those that are dataclasses, and are saved with them."""


@dataclass(frozen=True)
class TableGradBound:
    """r -> G(r) of a table row, as a value that pickles and compares (a partial of a bound method does not compare).

    Args:
        loss: a `losses.TableLoss`.
        bound_x: of its problem.
        bound_y: likewise.
    """

    loss: Any
    bound_x: float
    bound_y: float

    def __call__(self, radius: float) -> float:
        """G(radius), nearest or above; `Problem.grad_bound` rounds it up."""
        return float(self.loss.grad_bound(radius, self.bound_x, self.bound_y))


def round_up(value: float) -> float:
    """Upper bound on a nonnegative quantity computed as `value` with at most 15 roundings of relative size 2^-53.

    The factor 1 + 2^-49 costs 2e-15 of noise, and keeps order: a <= b gives round_up(a) <= round_up(b).

    Example:
        >>> 0.3 < round_up(0.3) < 0.3 + 1e-15
        True
    """
    return value * _SLACK


_OF_PHASE = {
    "steps": check.positive_count,
    "lr": positive,
    "reg": positive,
}


@dataclass(frozen=True)
class Phase:
    """A stretch of steps.

    Args:
        steps: number of steps, >= 1; None for a single phase without end.
        lr: step size in this phase; None keeps that of the param groups.
        reg: lambda of (lambda/2) |w - c|^2 around the starting point c of the phase, for rules that have it; > 0.
    """

    steps: int | None = None
    lr: float | None = None
    reg: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        check.ranges(self, _OF_PHASE)


@dataclass(frozen=True)
class Schedule:
    """Phases one after another; each starts from the answer of the one before it.

    Example:
        >>> schedule = Schedule((Phase(2, lr=0.1), Phase(3, lr=0.05)))
        >>> schedule.steps, schedule.locate(2)
        (5, (1, 0))
    """

    phases: tuple[Phase, ...] = (Phase(),)

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "phases", tuple(self.phases))
        if not self.phases:
            raise ValueError("phases must hold at least one phase (got none)")
        if any(phase.steps is None for phase in self.phases[:-1]):
            raise ValueError("phases must have steps, except the last one")

    @property
    def steps(self) -> int | None:
        """Steps of all phases; None without end."""
        known = [phase.steps for phase in self.phases if phase.steps is not None]
        return sum(known) if len(known) == len(self.phases) else None

    def locate(self, step: int) -> tuple[int, int]:
        """Returns (phase, step within it) of step 0, 1, ...; raises ValueError past the end."""
        k = step if type(step) is int and step >= 0 else check.count(step=step)
        for index, phase in enumerate(self.phases):
            if phase.steps is None or k < phase.steps:
                return index, k
            k -= phase.steps
        raise ValueError(
            f"step must be < {self.steps}, the number of planned steps (got {step})"
        )


def shared_bound(here: float, largest: float, share: float) -> float:
    """Returns the clip: a share of the largest bound, or of the bound here where there is no largest one.

    Args:
        here: bound on gradients at an iterate.
        largest: bound over the feasible set, inf for none.
        share: in (0, 1].
    """
    return min(here, share * largest) if math.isfinite(largest) else share * here


LEAST = 64  # steps
MOST = 1024
SETTLED = (
    5.0  # T (1 - m) is about twice that at least: fast directions have e^-5 of their start left
)


@dataclass(frozen=True)
class Pace:
    """Step size and momentum.

    Args:
        lr: of a step.
        momentum: in [0, 1); the steps of `rules.Momentum` have size lr/(1 - momentum).
    """

    lr: float
    momentum: float = 0.0


def steps_to(horizon: float, smoothness: float | None) -> int:
    """Returns T with T^2 >= 5 L H, between 64 and 1024; without smoothness the most.

    Args:
        horizon: H > 0.
        smoothness: L > 0; None for a loss with kinks.
    """
    if smoothness is None:
        return MOST
    return min(MOST, max(LEAST, math.ceil(math.sqrt(SETTLED * smoothness * horizon))))


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
    step = min(horizon / steps, steps / (SETTLED * smoothness))
    reach = smoothness * max(step, 1.0 / smoothness)
    momentum = max(0.0, (reach - 1.0) / (reach + 1.0))
    return Pace(step * (1.0 - momentum), momentum)
