"""Plans of ProximalSGD (Algorithms 8 and 9): one pass, smooth risk plus a penalty, under the proximal PL condition.

F = F_0 + f_1 with F_0 beta-smooth (it need not be convex) and f_1 convex and free of data:

    mu (F(w) - F*) <= -beta min_y [ <grad F_0(w), y-w> + (beta/2)|y-w|^2 + f_1(y) - f_1(w) ].

With eta = 1/(2 beta), the LAST iterate satisfies
E F(w_T) - F* <= (1 - mu/(4 beta))^T (F(w_0) - F*) + (3 B^2 + 2 S)/mu.

Differs from the paper in: 1. explicit constants, by a proof without its lemma on perturbed minimizers
(docs/proofs/heavy_tailed.md#proximal-steps); 2. T and C minimize the bound; mode "paper" keeps the published C.

Source: Lowy and Razaviyayn, Theorem 48.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.errors import ConditionError
from torch_dpsco.theory.clipping import clip_threshold_square, safe_exp
from torch_dpsco.theory.heavy_tailed.inputs import OnePass, OnePassPlan, check_mode, least_steps


@dataclass(frozen=True, kw_only=True)
class ProximalPlan(OnePassPlan):
    """Public numbers of a planned run of ProximalSGD.

    Args, besides those of `OnePassPlan`, where `lr` is 1/(2 beta):
        pl_constant: mu.
        initial_gap: bound on F(w_0) - F*.
    """

    pl_constant: float
    initial_gap: float


def proximal_pl_bound(
    *,
    pl_constant: float,
    smoothness: float,
    steps: int,
    initial_gap: float,
    bias: float,
    variance: float,
) -> float:
    """Returns (1 - mu/(4 beta))^T gap + (3 B^2 + 2 S)/mu.

    Args:
        pl_constant: mu > 0, at most beta.
        smoothness: beta.
        steps: T >= 1.
        initial_gap: bound >= 0 on F(w_0) - F*.
        bias: B >= 0.
        variance: S >= 0.

    Raises:
        ConditionError: mu > beta.

    Source:
        docs/proofs/heavy_tailed.md#proximal-steps.

    Example:
        >>> proximal_pl_bound(pl_constant=1.0, smoothness=1.0, steps=1, initial_gap=4.0, bias=0.0, variance=0.5)
        4.0
    """
    mu = check.positive(pl_constant=pl_constant)
    beta = check.positive(smoothness=smoothness)
    if mu > beta:
        raise ConditionError(f"pl_constant must be <= smoothness={beta:g} (got {mu:g})")
    decay = math.exp(check.positive_count(steps=steps) * math.log1p(-mu / (4.0 * beta)))
    errors = 3.0 * check.nonnegative(bias=bias) ** 2 + 2.0 * check.nonnegative(variance=variance)
    return decay * check.nonnegative(initial_gap=initial_gap) + errors / mu


def proximal_pl_plan(
    *,
    n: int,
    dim: int,
    rho: float,
    pl_constant: float,
    smoothness: float,
    initial_gap: float,
    moment: float,
    moment_order: float,
    second_moment: float | None = None,
    steps: int | None = None,
    clip: float | None = None,
    adjacency: str = "replace_one",
    mode: str = "tight",
    allow_infinite_variance: bool = False,
) -> ProximalPlan:
    """Returns the plan with its excess risk bound.

    Args:
        n: public number of records.
        dim: d.
        rho: > 0, zCDP of the run.
        pl_constant: mu > 0; for strongly convex risks their constant is one.
        smoothness: beta >= mu, of F_0.
        initial_gap: bound > 0 on F(w_0) - F*, public.
        moment: r_k of the gradients of the data term.
        moment_order: k.
        second_moment: r_2, default r_k.
        steps: T <= n; default the minimizer of the bound with its own threshold.
        clip: a threshold of your own, chosen without looking at the training records.
        adjacency: "replace_one", "zero_out" or "add_remove" (batches by a choice for each record by itself).
        mode: "tight" or "paper" (replace_one only; the published C).
        allow_infinite_variance: admits k < 2.

    Raises:
        AdjacencyError: mode "paper" outside replace_one.
        ConditionError: mu > beta; k < 2 without `allow_infinite_variance`.
        ValueError: an argument is out of range.

    Guarantee:
        As `accelerated_plan`; the penalty must not depend on the data, or its proximal map is no post-processing.

    Source:
        docs/proofs/heavy_tailed.md#proximal-steps.

    Example:
        >>> plan = proximal_pl_plan(n=10**5, dim=50, rho=0.5, pl_constant=0.5, smoothness=1.0, initial_gap=2.0,
        ...                         moment=1.0, moment_order=2.0)
        >>> plan.steps, round(plan.bound, 4)
        (49, 0.0218)
    """
    data = OnePass(
        n, dim, rho, moment, moment_order, second_moment, adjacency, allow_infinite_variance
    )
    check.positive(initial_gap=initial_gap)
    paper = check_mode(mode, adjacency) == "paper"
    goal: dict[str, Any] = {
        "pl_constant": pl_constant,
        "smoothness": smoothness,
        "initial_gap": initial_gap,
    }

    def planned(T: int) -> ProximalPlan:
        chosen = clip
        if chosen is None and paper:
            chosen = _paper_clip(data, T)
        elif chosen is None:
            weight = 2.0 * data.noise_variance(data.batch_size(T), 1.0)
            chosen = clip_threshold_square(moment, moment_order, 3.0, weight)
        run = data.run(T, chosen)
        bound = proximal_pl_bound(**goal, steps=T, bias=run["bias"], variance=run["variance"])
        return ProximalPlan(**run, **goal, lr=1.0 / (2.0 * smoothness), bound=bound, mode=mode)

    return planned(least_steps(lambda T: planned(T).bound, n) if steps is None else steps)


def _paper_clip(data: OnePass, T: int) -> float:
    """r_k (eps n/(sqrt(d) T))^(1/k), eps^2 = 2 rho."""
    log_signal = (
        math.log(2.0 * data.rho) / 2.0 + math.log(data.n) - math.log(data.dim) / 2.0 - math.log(T)
    )
    return safe_exp(math.log(data.moment) + log_signal / data.moment_order)
