"""Untrusted solvers of strongly convex objectives, and the certificates that verify their results.

`solve(objective, tolerance)` is the entry: a fast solver (Newton, L-BFGS, Katyusha, stochastic subgradient, Huber
continuation), a run-time certificate of the distance to the exact minimizer, and a deterministic fallback. Nothing but
the point leaves: iteration counts, losses, times and the certified number depend on the data.

Differs from the paper in: its output step trusts the expected accuracy of the solver; here the solver is never trusted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_dpsco._doors import typed
from torch_dpsco._validate import choice, positive
from torch_dpsco.errors import ConditionError
from torch_dpsco.linear.objectives.base import Objective, require_double
from torch_dpsco.linear.objectives.linear import LinearObjective
from torch_dpsco.linear.solvers.certificates import (
    BoxDual,
    Certificate,
    gradient_certificate,
    projected_certificate,
)
from torch_dpsco.linear.solvers.gradient import certified_descent, katyusha, stochastic_subgradient
from torch_dpsco.linear.solvers.newton import continuation, dual_ascent, lbfgs, newton

__all__ = ["SOLVERS", "Certificate", "Solution", "gradient_certificate", "solve"]

SOLVERS = ("auto", "newton", "lbfgs", "agd", "katyusha", "subgradient")
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
    solver: str = "auto",
) -> Solution:
    """A point within `tolerance` of the minimizer of the objective (on the ball of `radius`), certified in float64.

    Args:
        objective: strongly convex.
        tolerance: r > 0, public distance ||w - w*||; must lie above the rounding of float64 by public constants.
        radius: of the ball around 0 that is the feasible set, or inf; needs a smooth objective.
        start: w_0, float64, or None for 0.
        solver: what runs first: "auto", "newton", "lbfgs", "agd", "katyusha" or "subgradient". Never trusted.

    Returns:
        The point and its certificate.

    Raises:
        ValueError: if an argument is out of range, or the start is not float64, or autocast is on.
        ConditionError: if the objective is not strongly convex, or not smooth where that is needed.
        NotCertifiedError: only if a value is NaN, a promised constant is violated, or the tolerance lies below the
            rounding of float64. This depends on the data and is outside of any guarantee.

    Guarantee:
        ||w - w*|| <= tolerance, whatever the solver and its seed did.

    Source:
        docs/proofs/output.md#certified-points, docs/proofs/output.md#solvers-that-cannot-fail

    Example:
        >>> from torch_dpsco.losses import Logistic
        >>> from torch_dpsco.linear.objectives import LinearObjective
        >>> F = LinearObjective(Logistic(), torch.eye(2), torch.ones(2), reg=0.1, normalizer=2)
        >>> solve(F, 1e-9)
        Solution()
    """
    distance = positive(tolerance=tolerance)
    radius = positive(allow_inf=True, radius=radius)
    first = choice(SOLVERS, solver=solver)
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
                raise ConditionError("a ball needs a smooth objective; take SmoothedHinge or Huber")
            found, certificate = continuation(objective, point, distance)
            if not certificate.proves(distance):
                found, certificate = dual_ascent(objective, distance)
        elif objective.smoothness is None:
            raise ConditionError(
                f"{type(objective).__name__} must be smooth to be solved: give it a public"
                " smoothing"
            )
        else:
            fast = _fast(objective, point, distance, first)
            fast = fast if bool(torch.isfinite(fast).all()) else point
            found, certificate = projected_certificate(objective, fast, radius)
            if not certificate.proves(distance):
                # PRIVACY: a solver that fails must not raise, which would show that it failed
                # (test_the_fallback_certifies_when_the_fast_solver_is_broken)
                found, certificate = certified_descent(
                    objective, torch.zeros_like(point), distance, radius
                )
    return Solution(found, certificate)


def _fast(objective: Objective, start: Tensor, distance: float, solver: str) -> Tensor:
    """The point of an untrusted unconstrained solver."""
    # PRIVACY: whether there is a record to draw is private (test_every_solver_takes_an_empty_data_set)
    if isinstance(objective, LinearObjective) and objective.records.count:
        # PRIVACY: the state of torch's own generator would tell how many draws were made
        # (test_a_solver_leaves_the_global_generator_where_it_was)
        draws = torch.Generator().manual_seed(0)
        if solver == "katyusha":
            start = katyusha(objective, start, distance, generator=draws)
        elif solver == "subgradient":
            start = stochastic_subgradient(
                objective, start, 2 * objective.records.count, generator=draws
            )
    if solver == "agd":
        return start
    if solver == "lbfgs" or (solver != "newton" and objective.dim > _NEWTON_DIM):
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
