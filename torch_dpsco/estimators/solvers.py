"""Untrusted solvers of strongly convex objectives, and the certificates that verify their results.

`solve(objective, tolerance)` is the entry: a fast solver (Newton, L-BFGS, Huber continuation), a run-time certificate
of the distance to the exact minimizer, and a deterministic fallback. Nothing but the point leaves: iteration counts,
losses, times and the certified number depend on the data.

Differs from the paper in: its output step trusts the expected accuracy of the solver; here the solver is never trusted,
and its stochastic solvers, accurate in expectation only, are in tests/reference/papers/output_solvers.py.

Newton and L-BFGS; for losses with kinks, Newton on smoothed losses of shrinking width.

Near the minimum differences of values drown in rounding while gradients do not: a step of either method is accepted on
the value within a slack of 1e-13 |F|, or on a smaller gradient norm. Damped Newton is for d up to some thousands, with
few passes over the data: a factor of the Hessian is kept while it still shrinks the gradient threefold per step, since
a Hessian costs d gradients, and what steps show of the curvature since then corrects it, as in L-BFGS. Undamped Newton
diverges on residual-clipped losses. L-BFGS is for many coordinates: it has no stopping rule besides the certificate.

Hinge, pinball and absolute loss are maxima of slopes, l = max over a in [low, high] of a z (`BoxDual`). Smoothed with
width h it is the maximum of a z - h a^2/2, whose maximizer a = clip(z/h) is a feasible dual point: the Fenchel gap of
(w, a) is of order h times the share of records at the kink, and certifies w for the loss itself. The fallback, which
cannot fail, is accelerated projected ascent on the dual with the average of the primal points, whose gap is at most
5 L_D (R_a)^2/(t (t + 1)), R_a half the diagonal of the box, for a pair that C3 certifies at run time, so that rounding
in the ascent needs no analysis.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from torch_dpsco._doors import typed
from torch_dpsco._validate import positive
from torch_dpsco.errors import ConditionError, NotCertifiedError
from torch_dpsco.estimators.certificates import (
    BoxDual,
    Certificate,
    agd_certified_steps,
    box_of,
    distance_of_gap,
    gap_certificate,
    gap_error,
    primal_point,
    project,
    projected_certificate,
)
from torch_dpsco.estimators.objectives import LinearObjective, norm_up
from torch_dpsco.estimators.records import Objective, require_double

__all__ = ["Certificate", "Solution", "solve"]

_NEWTON_DIM = 1000  # a Hessian costs about d/4 gradients
_LIKE = 4  # every 4th record is enough for a Hessian, which is near that of all
_THIN, _THIN_ROWS, _THIN_STEPS = (
    16,
    1024,
    6,
)  # of the first guess: every 16th record, of which there are 1024 or more


@dataclass(frozen=True)
class Solution:
    """A certified point. NOT private: it becomes private by the noise added to it, and must not be shown before.

    Attributes:
        w: float64 point.
        certificate: proof of its distance to the exact minimizer.
    """

    w: Tensor = field(repr=False)
    certificate: Certificate = field(repr=False)


@typed
def solve(
    objective: Objective,
    tolerance: float,
    *,
    radius: float = math.inf,
    start: Tensor | None = None,
) -> Solution:
    """A point within `tolerance` of the minimizer of the objective (on the ball of `radius`), certified in float64.

    Args:
        objective: strongly convex.
        tolerance: r > 0, public distance ||w - w*||; must lie above the rounding of float64 by public constants.
        radius: of the ball around 0 that is the feasible set, or inf; needs a smooth objective.
        start: w_0, float64, or None for 0.

    Returns:
        The point and its certificate.

    Raises:
        ValueError: if an argument is out of range, or the start is not float64, or autocast is on.
        ConditionError: if the objective is not strongly convex, or not smooth where that is needed.
        NotCertifiedError: only if a value is NaN, a promised constant is violated, or the tolerance lies below the
            rounding of float64. This depends on the data and is outside of any guarantee.

    Guarantee:
        ||w - w*|| <= tolerance, whatever the fast solver did.

    Source:
        docs/proofs/output.md#certified-points, docs/proofs/output.md#solvers-that-cannot-fail

    Example:
        >>> from torch_dpsco.losses import Logistic
        >>> from torch_dpsco.estimators.objectives import LinearObjective
        >>> from torch_dpsco.estimators.records import Records
        >>> F = LinearObjective(Logistic(), Records(torch.eye(2), torch.ones(2)), reg=0.1, normalizer=2)
        >>> solve(F, 1e-9)
        Solution()
    """
    distance = positive(tolerance=tolerance)
    radius = positive(allow_inf=True, radius=radius)
    if not objective.strong_convexity > 0:
        raise ConditionError("strong_convexity must be > 0: regularize every coordinate")
    point = (
        torch.zeros(objective.dim, dtype=torch.float64, device=objective.device)
        if start is None
        else start
    )
    require_double(point, objective.dim)
    # a loop that diverged is no start: its point would fail its certificate, and the solver begin again from 0
    point = torch.where(torch.isfinite(point).all(), point, 0.0)
    with torch.no_grad():
        if isinstance(objective, LinearObjective) and BoxDual.of(objective.loss) is not None:
            if math.isfinite(radius):
                raise ConditionError(
                    "a ball needs a smooth objective; take SmoothedHinge or Huber"
                )
            found, certificate = continuation(objective, point, distance)
            if not certificate.proves(distance):
                found, certificate = dual_ascent(objective, distance)
        elif objective.smoothness is None:
            raise ConditionError(
                f"{type(objective).__name__} must be smooth to be solved: give it a public"
                " smoothing"
            )
        else:
            fast = _fast(objective, point, distance)
            fast = fast if bool(torch.isfinite(fast).all()) else point
            found, certificate = projected_certificate(objective, fast, radius)
            if not certificate.proves(distance):
                # PRIVACY: a solver that fails must not raise, which would show that it failed
                # (test_the_fallback_certifies_when_the_fast_solver_is_broken)
                found, certificate = certified_descent(
                    objective, torch.zeros_like(point), distance, radius
                )
    return Solution(found, certificate)


def _fast(objective: Objective, start: Tensor, distance: float) -> Tensor:
    """The point of an untrusted unconstrained solver."""
    if objective.dim > _NEWTON_DIM:
        return lbfgs(objective, start, distance)
    if isinstance(objective, LinearObjective) and objective.records.count >= _THIN * _THIN_ROWS:
        # the first steps need not see every record: a Hessian of a sixteenth of them costs a sixteenth
        thin = objective.thinned(objective.records.thinning(_THIN))
        # a sample of a table that no memory holds takes a reading: one is enough there
        like = objective.thinned(_LIKE) if objective.records.thinning(_LIKE) == _LIKE else thin
        guess = newton(thin, start, distance, _THIN_STEPS)
        if bool(torch.isfinite(guess).all()):
            return newton(objective, guess, distance, like=like)
    return newton(objective, start, distance)


def accelerated_steps(
    objective: Objective, start: Tensor, steps: int, radius: float = math.inf
) -> Tensor:
    """The last y_t of y_t = Pi[w_(t-1) - grad F(w_(t-1))/beta], w_t = y_t + p (y_t - y_(t-1)).

    Args:
        objective: smooth and strongly convex on R^dim (extrapolated points leave the ball).
        start: w_0 = y_0, float64.
        steps: T; the momentum is p = (sqrt kappa - 1)/(sqrt kappa + 1).
        radius: R, or inf.

    Returns:
        y_T, with F(y_T) - min F <= ((mu + beta)/2) ||w_0 - w*||^2 exp(-(T - 1)/sqrt(kappa)) in exact arithmetic.

    Raises:
        ConditionError: if the objective is not smooth and strongly convex.

    Source:
        docs/proofs/output.md#solvers-that-cannot-fail (algorithm 4 of the paper)

    Example:
        >>> from torch_dpsco.losses import Squared
        >>> from torch_dpsco.estimators.objectives import LinearObjective
        >>> from torch_dpsco.estimators.records import Records
        >>> F = LinearObjective(Squared(), Records(torch.ones(1, 1), torch.ones(1)), reg=1.0, normalizer=1)
        >>> round(accelerated_steps(F, torch.zeros(1, dtype=torch.float64), 9).item(), 9)
        0.5
    """
    beta = objective.smoothness
    mu = objective.strong_convexity
    if beta is None or not mu > 0:
        raise ConditionError("accelerated descent needs a smooth, strongly convex objective")
    root = math.sqrt(max(beta / mu, 1.0))
    momentum = (root - 1) / (root + 1)
    last = start
    query = start
    for _ in range(steps):
        moved = project(query - objective.value_and_gradient(query)[1] / beta, radius)
        query = moved + momentum * (moved - last)
        last = moved
    return last


def certified_descent(
    objective: Objective, start: Tensor, distance: float, radius: float = math.inf
) -> tuple[Tensor, Certificate]:
    """Accelerated descent until the certificate holds: at the worst-case number of steps at the latest.

    The certificate is tried at a geometric sequence of step counts. Rounding can make the last digits slow, so that the
    count may be passed fourfold.

    Args:
        objective: smooth and strongly convex.
        start: w_0, float64.
        distance: r > 0.
        radius: R, or inf.

    Returns:
        (point, certificate) with certificate.distance <= distance.

    Raises:
        NotCertifiedError: if the constants of the objective are violated, or `distance` lies below the rounding of
            float64: both outside of any guarantee, and both excluded by the checks of public constants before.

    Source:
        docs/proofs/output.md#solvers-that-cannot-fail
    """
    beta = objective.smoothness
    mu = objective.strong_convexity
    if beta is None or not mu > 0:
        raise ConditionError("accelerated descent needs a smooth, strongly convex objective")
    gradient = objective.value_and_gradient(start)[1]
    reach = (norm_up(gradient) + objective.gradient_error(start)) / mu
    reach = min(reach, norm_up(start) + radius)
    floor = objective.gradient_error(torch.zeros_like(start)) / mu  # least at 0
    if not (math.isfinite(reach) and floor < distance):
        raise _refusal()
    # C2 ends with a residual of up to three gradients of this size
    worst = agd_certified_steps(mu, beta, max(reach, distance), mu * distance / 8)
    point = start
    steps = 32
    while True:
        point = accelerated_steps(objective, point if steps > 32 else start, steps, radius)
        if not bool(torch.isfinite(point).all()):
            raise _refusal()
        point, certificate = projected_certificate(objective, point, radius)
        if certificate.proves(distance):
            return point, certificate
        if steps > 4 * worst:
            raise _refusal()
        steps *= 2


def _refusal() -> NotCertifiedError:
    return NotCertifiedError(
        "no certificate: the promised constants are violated, or float64 is too coarse"
    )


_SLACK = 1e-13
_SLOPE = 1e-4
_HALVINGS = 40


@dataclass(frozen=True)
class Iterate:
    """A point with its value, gradient and gradient norm."""

    point: Tensor
    value: float
    gradient: Tensor
    size: float

    @classmethod
    def at(cls, objective: Objective, point: Tensor) -> Iterate:
        """Evaluates the objective at a point."""
        value, gradient = objective.value_and_gradient(point)
        return cls(point, value, gradient, float(torch.linalg.vector_norm(gradient)))

    def finite(self) -> bool:
        """Whether value and gradient are."""
        return math.isfinite(self.value) and math.isfinite(self.size)


def certified(objective: Objective, iterate: Iterate, distance: float) -> bool:
    """Whether C1 will hold at the iterate, with a margin for the rounding of the certificate itself."""
    error = objective.gradient_error(iterate.point)
    return (iterate.size * (1 + 1e-9) + error) * (
        1 + 1e-9
    ) <= objective.strong_convexity * distance


def backtrack(objective: Objective, start: Iterate, direction: Tensor) -> Iterate | None:
    """The first of the steps 1, 1/2, 1/4, ... that makes progress; None if none does."""
    slope = float(start.gradient @ direction)
    step = 1.0
    if not slope < 0:
        return None
    for _ in range(_HALVINGS):
        trial = Iterate.at(objective, start.point + step * direction)
        lower = trial.value <= start.value + _SLOPE * step * slope + _SLACK * abs(start.value)
        flatter = trial.size <= (1 - 0.1 * step) * start.size
        near = abs(trial.value - start.value) <= 1e3 * _SLACK * abs(start.value)
        if trial.finite() and (lower or (flatter and near)):
            return trial
        step /= 2
    return None


_KEEP = 0.3
_HISTORY = 20
_Pairs = deque[tuple[Tensor, Tensor]]  # of moves and turns of the gradient


def newton(
    objective: Objective,
    start: Tensor,
    distance: float,
    steps: int = 100,
    like: Objective | None = None,
) -> Tensor:
    """Newton steps with Armijo backtracking until C1 proves the distance, or no step helps.

    Args:
        objective: with a Hessian and strong_convexity > 0.
        start: w_0, float64.
        distance: target of the certificate, > 0.
        steps: at most.
        like: whose Hessian is near enough for the first steps, and costs less; None for none.

    Returns:
        The iterate of least gradient norm. It promises nothing: certify it.

    Source:
        Boyd and Vandenberghe, Convex Optimization, section 9.5.

    Example:
        >>> from torch_dpsco.losses import Squared
        >>> from torch_dpsco.estimators.objectives import LinearObjective
        >>> from torch_dpsco.estimators.records import Records
        >>> F = LinearObjective(Squared(), Records(torch.ones(1, 1), torch.ones(1)), reg=1.0, normalizer=1)
        >>> round(newton(F, torch.zeros(1, dtype=torch.float64), 1e-9).item(), 9)
        0.5
    """
    iterate = best = Iterate.at(objective, start)
    factor: Tensor | None = None
    pairs: _Pairs = deque(maxlen=_HISTORY)
    for _ in range(steps):
        if not iterate.finite() or certified(objective, iterate, distance):
            break
        fresh = factor is None and like is None
        if factor is None:
            factor, failed = torch.linalg.cholesky_ex((like or objective).hessian(iterate.point))
            like = None
            if bool(failed):
                break
            pairs.clear()
        direction = -_inverse_times(pairs, iterate, partial(_solved, factor))
        following = backtrack(objective, iterate, direction)
        if following is None or (
            following.size >= best.size and following.value >= iterate.value
        ):
            if fresh:
                break  # rounding allows no better
            factor = None
            continue
        if following.size > _KEEP * iterate.size:
            factor = None
        _remember(pairs, iterate, following)
        iterate = following
        best = iterate if iterate.size < best.size else best
    return best.point


def _solved(factor: Tensor, vector: Tensor) -> Tensor:
    return torch.cholesky_solve(vector.unsqueeze(1), factor).squeeze(1)


def lbfgs(objective: Objective, start: Tensor, distance: float, steps: int = 2000) -> Tensor:
    """L-BFGS steps until C1 proves the distance, or no step helps even along the gradient.

    Args:
        objective: strong_convexity > 0; no Hessian needed.
        start: w_0, float64.
        distance: target of the certificate, > 0.
        steps: at most.

    Returns:
        The iterate of least gradient norm. It promises nothing: certify it.

    Source:
        Nocedal and Wright, Numerical Optimization, section 7.2.

    Example:
        >>> import torch
        >>> from torch_dpsco.losses import Logistic
        >>> from torch_dpsco.estimators.objectives import LinearObjective
        >>> from torch_dpsco.estimators.records import Records
        >>> F = LinearObjective(Logistic(), Records(torch.eye(3), torch.ones(3)), reg=0.1, normalizer=3)
        >>> point = lbfgs(F, torch.zeros(3, dtype=torch.float64), 1e-9)
        >>> bool(F.value_and_gradient(point)[1].norm() < 1e-10)
        True
    """
    iterate = best = Iterate.at(objective, start)
    pairs: _Pairs = deque(maxlen=_HISTORY)

    def scaled(vector: Tensor) -> Tensor:
        if not pairs:
            return vector / (objective.smoothness or max(iterate.size, 1.0))
        move, turn = pairs[-1]
        return vector * ((move @ turn) / (turn @ turn))

    for _ in range(steps):
        if not iterate.finite() or certified(objective, iterate, distance):
            break
        following = backtrack(objective, iterate, -_inverse_times(pairs, iterate, scaled))
        if following is None:
            if not pairs:
                break
            pairs.clear()
            continue
        _remember(pairs, iterate, following)
        iterate = following
        best = iterate if iterate.size < best.size else best
    return best.point


def _remember(pairs: _Pairs, before: Iterate, after: Iterate) -> None:
    """Keeps what a step shows of the curvature along it."""
    move = after.point - before.point
    turn = after.gradient - before.gradient
    if float(move @ turn) > 1e-16 * float(move.norm() * turn.norm()):
        pairs.append((move, turn))


def _inverse_times(
    pairs: _Pairs, iterate: Iterate, initial: Callable[[Tensor], Tensor]
) -> Tensor:
    """The two-loop product of the approximate inverse Hessian, `initial` corrected by pairs, with the gradient."""
    vector = iterate.gradient.clone()
    shares = []
    for move, turn in reversed(pairs):
        share = (move @ vector) / (move @ turn)
        vector -= share * turn
        shares.append(share)
    vector = initial(vector)
    for (move, turn), share in zip(pairs, reversed(shares), strict=True):
        vector += (share - (turn @ vector) / (move @ turn)) * move
    return vector


_SHRINK = 0.1  # of the width, at first
_LEAST_SHRINK = 0.95
_ROUNDS = 40
_LARGEST = 2**22  # entries of the rows at the kinks, for their pseudo-inverse
_DENSE = 2000  # coordinates up to which a Hessian is formed


class SmoothedBox(Objective):
    """The objective with max over a of (a z - h a^2/2) in place of the loss. A step to the solution, not certified.

    Args:
        objective: with a `BoxDual` loss.
        width: h > 0.
    """

    def __init__(self, objective: LinearObjective, width: float) -> None:
        self.base = objective
        self.box = box_of(objective)
        self.width = width
        self.dim = objective.dim
        self.device = objective.device
        self.strong_convexity = objective.strong_convexity
        self.smoothness = None

    def dual(self, point: Tensor) -> Tensor:
        """The maximizing a of every record, shape (n,)."""
        records = self.base.records
        return self._slopes(self.box.residuals(records.scores(point), records.targets))

    def value_and_gradient(self, point: Tensor) -> tuple[float, Tensor]:
        """Smoothed value and its gradient."""
        records = self.base.records
        box = self.box

        def terms(scores: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            targets = records.targets[rows]
            weights = records.weights[rows]
            residuals = box.residuals(scores, targets)
            slopes = self._slopes(residuals)
            losses = slopes * (residuals - self.width / 2 * slopes)
            return weights * losses, -weights * slopes * box.signs(targets)

        return self.base.completed(*records.fold(point, terms), point)

    def hessian(self, point: Tensor) -> Tensor:
        """Curvature 1/h of the records between the two corners."""
        base = self.base
        records = self.base.records
        residuals = self.box.residuals(records.scores(point), records.targets) / self.width
        inside = (residuals > self.box.low) & (residuals < self.box.high)
        curvature = records.weights * inside * self.box.signs(records.targets) ** 2 / self.width
        total = records.gram(curvature) / base.normalizer
        total.diagonal().add_(base.reg)
        return total

    def gradient_error(self, point: Tensor) -> float:
        """0: no certificate is built on this objective."""
        return 0.0

    def _slopes(self, residuals: Tensor) -> Tensor:
        return (residuals / self.width).clamp(self.box.low, self.box.high)


def continuation(
    objective: LinearObjective, start: Tensor, distance: float
) -> tuple[Tensor, Certificate]:
    """Smoothed problems of shrinking width, from h = 1 on, until C3 proves the distance or the rounds are over.

    Args:
        objective: hinge, pinball or absolute loss, reg > 0.
        start: w_0, float64.
        distance: r > 0.

    Returns:
        (point, its certificate): the best found; it may miss the distance.

    Source:
        docs/proofs/output.md#a-duality-gap-certifies
    """
    step = newton if objective.dim <= _DENSE else lbfgs
    best = start
    proof = Certificate(math.inf)
    settled = start
    width = 1.0
    shrink = _SHRINK
    for _ in range(_ROUNDS):
        smooth = SmoothedBox(objective, width)
        point = step(smooth, settled, distance / 8)
        dual = smooth.dual(point)
        for primal, variables in ((point, dual), onto_kinks(objective, dual)):
            certificate = gap_certificate(objective, primal, variables)
            if certificate.distance < proof.distance:
                best = primal
                proof = certificate
        if proof.proves(distance) or shrink > _LEAST_SHRINK:
            break
        if certified(smooth, Iterate.at(smooth, point), distance / 4):
            settled = point
            width = width * shrink
        else:  # too far in one leap: the set of records at the kink changed too much
            width = width / math.sqrt(shrink)
            shrink = math.sqrt(shrink)
    return best, proof


def onto_kinks(objective: LinearObjective, dual: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the free dual variables so that v(a) lies on the kinks of their records, as at the solution.

    For free records A = (sign_i x_i) and residuals r: the least d with A d = r, and the least change of a with
    v(a + change) = v(a) + d. Twice, since the second removes the rounding of the first. Where the free set is wrong the
    pair is merely worse: its certificate says so.

    Returns:
        (v(a), a).
    """
    box = box_of(objective)
    records = objective.records
    free = ((dual > box.low) & (dual < box.high) & (records.weights > 0)).nonzero().squeeze(1)
    point = primal_point(objective, dual)
    if not 0 < len(free) * objective.dim <= _LARGEST:
        return point, dual
    targets = records.targets[free]
    rows = records.select(free) * box.signs(targets).unsqueeze(1)
    inverse = torch.linalg.pinv(rows)
    scale = objective.strong_convexity * objective.normalizer / records.weights[free]
    for _ in range(2):
        move = inverse @ (box.offsets(targets) - rows @ point)
        dual = dual.index_add(0, free, scale * (inverse.T @ move)).clamp(box.low, box.high)
        point = primal_point(objective, dual)
    return point, dual


def dual_ascent(objective: LinearObjective, distance: float) -> tuple[Tensor, Certificate]:
    """Accelerated projected ascent on the box of dual variables, from its center, with the primal average.

    With theta_t = 2/(t + 2): y = (1 - theta) a + theta b; b <- clip(b + grad D(y)/(theta L_D)); a <- (1 - theta) a +
    theta b; wbar <- (1 - theta) wbar + theta v(y). Then P(wbar) - D(a) <= 5 L_D sum_i (side/2)^2/(T (T + 1)) after T
    steps, since P is the maximum over the box of the linearizations of D.

    Returns:
        (wbar, certificate) with certificate.distance <= distance, after O(B/(reg r)) steps at the latest.

    Raises:
        NotCertifiedError: if float64 is too coarse for `distance`: outside of any guarantee.

    Source:
        docs/proofs/output.md#solvers-that-cannot-fail
    """
    box = box_of(objective)
    records = objective.records
    mu = objective.strong_convexity
    signs = box.signs(records.targets)
    scale = records.weights / objective.normalizer
    steepness = float(records.total((scale * signs * records.norms) ** 2)) / mu * (1 + 1e-9)
    half = (box.high - box.low) / 2
    if distance_of_gap(gap_error(objective, 0.0), mu) > distance:
        raise NotCertifiedError(
            "no certificate: float64 is too coarse for the distance asked for"
        )
    used = float((records.weights > 0).sum())
    worst = math.ceil(math.sqrt(4 * steepness * used * half * half / mu) / distance) + 2
    dual = shifted = torch.full_like(records.norms, (box.low + box.high) / 2)
    average = primal_point(objective, dual)
    check = 8
    for step in range(4 * worst + 2):
        theta = 2 / (step + 2)
        query = (1 - theta) * dual + theta * shifted
        point = primal_point(objective, query)
        residuals = box.residuals(records.scores(point), records.targets)
        if steepness > 0:
            shifted = (shifted + scale * residuals / (theta * steepness)).clamp(box.low, box.high)
        dual = (1 - theta) * dual + theta * shifted
        average = (1 - theta) * average + theta * point
        if step >= check or step == 0:
            check = max(check, step + step // 8)
            certificate = gap_certificate(objective, average, dual)
            if certificate.proves(distance):
                return average, certificate
    raise NotCertifiedError("no certificate: float64 is too coarse for the distance asked for")
