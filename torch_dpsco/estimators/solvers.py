"""Run-time proofs that a point is within a distance of the exact minimizer: the privacy of every release rests on them.

| | certificate | of |
|---|---|---|
| C1 | `gradient_certificate` | ||w - w*|| <= ||s||/mu for a subgradient s at w |
| C2 | `projected_certificate` | the same on the ball, for the point after a gradient step and a projection |

Every computed norm is increased by a bound on its rounding error before it is used. float64 only.

Differs from the paper in: the paper assumes that a bound on the EXPECTED accuracy of a solver bounds the distance,
which is false (docs/proofs/output.md#accuracy-in-expectation); here the point at hand is certified, whatever solver
found it.

Solvers: their target accuracy, how long they run, and what rounding may hide from their certificates.

A certificate compares a COMPUTED gradient norm with a public tolerance. The comparison proves
something about the exact one only after a bound on the rounding is taken off. With u = 2^-53, m terms per sum and the
objective (weight / n) sum_i l_i + (lam/2) |w|^2 + b.w,

    e_grad = (m + d + 16) u (weight L + lam |w| + |b|) + (d + 8) u weight beta (|w| + offset)

bounds the error of the gradient norm. m is n for plain sums, in any order; for pairwise sums
ceil(log2 n); for sums of blocks of 1024 rows that are then added pairwise, the block and the logarithm of their number.

Two things count besides sums: the scores' own error where a target is subtracted from them (`offset`, see
`Problem.score_offset`), and the beta term, in sum form.

No privacy rests on steps and step sizes, how long each solver runs in the worst case: what is released is certified.

Source: docs/proofs/output.md#rounding-of-a-gradient, docs/proofs/output.md#solvers-that-cannot-fail; Higham, Accuracy
and Stability, ch. 3 and 4.

Untrusted solvers of strongly convex objectives, and the certificates that verify their results.

`solve(objective, tolerance)` is the entry: a fast solver (Newton, L-BFGS), a run-time certificate
of the distance to the exact minimizer, and a deterministic fallback. Nothing but the point leaves: iteration counts,
losses, times and the certified number depend on the data.

Differs from the paper in: its output step trusts the expected accuracy of the solver; here the solver is never trusted,
and its stochastic solvers, accurate in expectation only, are in tests/reference/papers/output_solvers.py.

Near the minimum differences of values drown in rounding while gradients do not: a step of either method is accepted on
the value within a slack of 1e-13 |F|, or on a smaller gradient norm. Damped Newton is for d up to some thousands, with
few passes over the data: a factor of the Hessian is kept while it still shrinks the gradient threefold per step, since
a Hessian costs d gradients, and what steps show of the curvature since then corrects it, as in L-BFGS. Undamped Newton
diverges on residual-clipped losses. L-BFGS is for many coordinates: it has no stopping rule besides the certificate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from torch_dpsco._validate import positive, typed
from torch_dpsco.accounting.analysis.rounding import gamma
from torch_dpsco.errors import ConditionError, NotCertifiedError
from torch_dpsco.estimators.objectives import norm_up
from torch_dpsco.estimators.records import Objective, project, require_double

_CLEAR = 3.0  # of the norm of the noise, about 2 tau sqrt(p / 2)
_UP = 1 + 1e-12  # more than the rounding of the few scalar operations after a bound


@dataclass(frozen=True)
class Solution:
    """A point w, and a proof that ||w - w*|| <= distance. NOT private before noise is added: neither may be shown.

    Attributes:
        w: float64 point.
        distance: bound on the distance to the exact minimizer, rounding included; inf or NaN proves nothing.
    """

    w: Tensor = field(repr=False)
    distance: float = field(repr=False)

    def proves(self, distance: float) -> bool:
        """Whether the point is certified to be within `distance`; False for NaN."""
        return self.distance <= distance


@typed
def gradient_certificate(objective: Objective, point: Tensor) -> Solution:
    """C1: ||w - w*|| <= ||s||/mu for any subgradient s of a mu-strongly convex F at w.

    Args:
        objective: with strong_convexity > 0.
        point: w, float64.

    Returns:
        The point, and (computed norm + bound on its rounding)/mu.

    Raises:
        ValueError: if the point is not float64 or autocast is on.
        ConditionError: if the objective is not strongly convex.

    Source:
        docs/proofs/output.md#a-gradient-certifies, docs/proofs/output.md#rounding-of-a-gradient

    Example:
        >>> from torch_dpsco.losses import Squared
        >>> from torch_dpsco.estimators.objectives import LinearObjective
        >>> from torch_dpsco.estimators.records import Records
        >>> F = LinearObjective(Squared(), Records(torch.ones(1, 1), torch.ones(1)), reg=1.0, normalizer=1)
        >>> gradient_certificate(F, torch.tensor([0.5], dtype=torch.float64)).proves(1e-12)
        True
    """
    require_double(point, objective.dim)
    size = norm_up(objective.value_and_gradient(point)[1])
    error = objective.gradient_error(point)
    return Solution(point, (size + error) / _strong(objective) * _UP)


def projected_certificate(objective: Objective, point: Tensor, radius: float) -> Solution:
    """C2: a gradient step from w, projected onto B(0, R), and the certificate of the point reached.

    s = beta (w - w+) + grad F(w+) - grad F(w) is a subgradient of F + indicator at w+ = Pi(w - grad F/beta).
    The step that was really made is used, so that only the projection and the gradients are rounded.

    Args:
        objective: smooth on R^dim, strong_convexity > 0.
        point: w, float64; anywhere.
        radius: R > 0, or inf.

    Returns:
        w+ with its distance on the ball; w itself with C1 if that proves the free minimizer to lie in the ball.

    Raises:
        ValueError, ConditionError: as for C1; ConditionError also if the objective is not smooth.

    Source:
        docs/proofs/output.md#a-projected-step-certifies
    """
    require_double(point, objective.dim)
    if math.isinf(positive(allow_inf=True, radius=radius)):
        return gradient_certificate(objective, point)
    if objective.smoothness is None:
        raise ConditionError(
            "a ball needs a smooth objective: its certificate is a projected gradient step"
        )
    free = gradient_certificate(objective, point)
    if norm_up(point) + free.distance <= radius:
        return free  # the free minimizer is proved to lie in the ball
    beta = objective.smoothness
    gradient = objective.value_and_gradient(point)[1]
    moved = project(point - gradient / beta, radius)
    residual = beta * (point - moved) + objective.value_and_gradient(moved)[1] - gradient
    size = norm_up(point) + norm_up(moved) + norm_up(gradient) / beta
    # beta (exact step - made step), and the rounding of the residual itself
    error = gamma(4 * objective.dim + 64) * (beta * size + norm_up(gradient))
    error += objective.gradient_error(point) + objective.gradient_error(moved)
    return Solution(moved, (norm_up(residual) + error) / _strong(objective) * _UP)


def _strong(objective: Objective) -> float:
    if not objective.strong_convexity > 0:
        raise ConditionError(
            "strong_convexity must be > 0: without it no distance to a minimizer can be certified"
        )
    return objective.strong_convexity


_SHARE = 1e-3  # of the sensitivity: the noise grows by that much
# of the Lipschitz constant
_AMP_LEAST = 1e-6
_AMP_MOST = 1e-2
_ROOM = 4  # tolerances must exceed the rounding by this factor


def solver_tolerance(sensitivity: float, strong_convexity: float) -> float:
    """Returns the default bound on the gradient norm, 0.1 % of mu Delta / 2: the share by which the noise grows.

    Args:
        sensitivity: Delta > 0, of exact minimizers.
        strong_convexity: mu > 0.

    Source: docs/proofs/output.md#tolerances

    Example:
        >>> round(solver_tolerance(sensitivity=0.02, strong_convexity=0.1), 12)
        1e-06
    """
    return _SHARE * strong_convexity * sensitivity / 2


def check_tolerance(grad_tol: float, rounding: float) -> float:
    """Returns the tolerance; raises ConditionError unless it exceeds four times the rounding of the gradient.

    Both are public, so that this happens before the data are read. At run time the computed norm must be at most the
    tolerance minus the rounding at the actual point.

    Example:
        >>> check_tolerance(1e-6, rounding=1e-12)
        1e-06
    """
    # PRIVACY: below the rounding nothing is certified (test_a_tolerance_below_the_rounding_is_refused)
    if not grad_tol > _ROOM * rounding:
        raise ConditionError(
            f"grad_tol = {grad_tol:g} is not above four times the rounding of the gradient: use a"
            f" grad_tol above {_ROOM * rounding:g}, or a larger reg"
        )
    return grad_tol


def amp_tolerance(lipschitz: float, rounding: float) -> float:
    """Returns tau = max(1e-6 L, 4 e), the gradient norm asked for where the noise is in the objective.

    Args:
        lipschitz: L > 0, of one record.
        rounding: e >= 0, `gradient_rounding` of the sum form at a public bound on |w| and |b|.

    Raises:
        ConditionError: 4 e exceeds 1e-2 L.

    Source: docs/proofs/objective.md#rounding-and-tolerance

    Example:
        >>> amp_tolerance(1.0, rounding=1e-6)
        4e-06
    """
    tolerance = max(_ROOM * rounding, _AMP_LEAST * lipschitz)
    if not tolerance <= _AMP_MOST * lipschitz:
        raise ConditionError(
            f"the rounding of the gradient, {rounding:g}, exceeds {_AMP_MOST / _ROOM:g} lipschitz:"
            " use a smaller n_max, or a larger reg"
        )
    return tolerance


_ROUNDING = 1e-14  # relative, of a count before it is rounded up


def agd_certified_steps(
    strong_convexity: float, smoothness: float, distance: float, grad_tol: float
) -> int:
    """Returns T after which accelerated gradient descent has a gradient norm <= g, whatever the data.

    F(y_T) - min F <= (mu + beta) R0^2 / 2 exp(-(T - 1) sqrt(mu / beta)) and |grad F|^2 <= 2 beta (F - min F), so that
    T = 1 + ceil(sqrt(beta / mu) log(beta (mu + beta) R0^2 / g^2)) steps suffice.

    Args:
        strong_convexity: mu > 0.
        smoothness: beta >= mu.
        distance: R0 > 0, bound on the distance of the start to the minimizer.
        grad_tol: g > 0.

    Raises:
        ConditionError: beta < mu.

    Guarantee: in exact arithmetic and without a constraint.

    Source: docs/proofs/output.md#solvers-that-cannot-fail

    Example:
        >>> agd_certified_steps(strong_convexity=0.01, smoothness=1.0, distance=3.0, grad_tol=1e-8)
        392
    """
    mu = strong_convexity
    beta = smoothness
    if beta < mu:
        raise ConditionError(f"smoothness must be >= strong_convexity = {mu:g} (got {beta:g})")
    log_ratio = (
        math.log(beta) + math.log(mu + beta) + 2 * (math.log(distance) - math.log(grad_tol))
    )
    return 1 + math.ceil(math.sqrt(beta / mu) * max(log_ratio, 0.0) * (1 + _ROUNDING))


def needed_eigenvalue(size: int, std: float) -> float:
    """Returns what the least eigenvalue of a noisy Hessian must exceed for intervals: a number that a plan knows.

    Args:
        size: number of coefficients, the intercept among them.
        std: >= 0, of the noise on the diagonal: `ObjectivePlan.hessian_scale`, `AdaSSPPlan.constants.std_xtx_diag`.

    Source:
        docs/proofs/inference.md#the-limit

    Example:
        >>> needed_eigenvalue(4, 7.0)
        42.0
    """
    return _CLEAR * std * math.sqrt(size)


_NEWTON_DIM = 1000  # a Hessian costs about d/4 gradients
_THIN_STEPS = 6  # of the first guess


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
        objective: strongly convex and smooth.
        tolerance: r > 0, public distance ||w - w*||; must lie above the rounding of float64 by public constants.
        radius: of the ball around 0 that is the feasible set, or inf.
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
    if objective.smoothness is None:
        raise ConditionError(
            f"{type(objective).__name__} must be smooth to be solved: give it a public smoothing"
        )
    point = (
        torch.zeros(objective.dim, dtype=torch.float64, device=objective.device)
        if start is None
        else start
    )
    require_double(point, objective.dim)
    # a loop that diverged is no start: its point would fail its certificate, and the solver begin again from 0
    point = torch.where(torch.isfinite(point).all(), point, 0.0)
    with torch.no_grad():
        fast = _fast(objective, point, distance)
        fast = fast if bool(torch.isfinite(fast).all()) else point
        found = projected_certificate(objective, fast, radius)
        if not found.proves(distance):
            # PRIVACY: a solver that fails must not raise, which would show that it failed
            # (test_the_fallback_certifies_when_the_fast_solver_is_broken)
            found = certified_descent(objective, torch.zeros_like(point), distance, radius)
    return found


def _fast(objective: Objective, start: Tensor, distance: float) -> Tensor:
    """The point of an untrusted unconstrained solver."""
    if objective.dim > _NEWTON_DIM:
        return lbfgs(objective, start, distance)
    fewer = objective.thinned()
    if fewer is not None:  # the first steps need not see every record
        thin, like = fewer
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
) -> Solution:
    """Accelerated descent until the certificate holds: at the worst-case number of steps at the latest.

    The certificate is tried at a geometric sequence of step counts. Rounding can make the last digits slow, so that the
    count may be passed fourfold.

    Args:
        objective: smooth and strongly convex.
        start: w_0, float64.
        distance: r > 0.
        radius: R, or inf.

    Returns:
        A point that is certified to be within the distance.

    Raises:
        NotCertifiedError: if the constants of the objective are violated, or `distance` lies below the rounding of
            float64: both outside of any guarantee, and both excluded by the checks of public constants before.

    Source:
        docs/proofs/output.md#solvers-that-cannot-fail
    """
    beta = objective.smoothness
    mu = objective.strong_convexity
    assert beta is not None  # of accelerated_steps
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
        found = projected_certificate(objective, point, radius)
        if found.proves(distance):
            return found
        point = found.w
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
