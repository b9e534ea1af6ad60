"""Plans of AcceleratedSGD (Algorithms 2 and 5): one pass, smooth convex losses.

With T batches of s records, B the bias of a clipped mean, V = r_2^2/s + d sigma^2 + B^2 and
eta = max(2 beta, sqrt(V T (T+1)(2T+1)/12)/D), the last average satisfies

    E F - F* <= 4 beta D^2/(T(T+1)) + 2 D sqrt(V (2T+1)/(3T(T+1))) + B D.

Proof: docs/proofs/heavy_tailed.md#accelerated-steps (the recursion of Ghadimi and Lan with weights t). The threshold
minimizes B D plus the part of the noise in the root: B(C) + a C with a of `exchange_rate_accelerated`.

Differs from the paper in: 1. explicit constants; 2. the sharp bias constant; 3. T minimizes the bound itself, rather
than its order; mode "paper" keeps the published T and C, whose constants inside the orders are 1.

Source: Lowy and Razaviyayn, Theorems 9 and 31.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.errors import warn
from torch_dpsco.theory.clipping import clip_threshold_linear, exchange_rate_accelerated, safe_exp
from torch_dpsco.theory.heavy_tailed.inputs import OnePass, OnePassPlan, check_mode, least_steps


@dataclass(frozen=True, kw_only=True)
class AcceleratedPlan(OnePassPlan):
    """Public numbers of a planned run of AcceleratedSGD.

    Args, besides those of `OnePassPlan`:
        noise_weight: a, the exchange rate of `clip`.
        inverse_lr: eta; step t = 1, 2, ... has size t/(2 eta), and `lr` is 1/(2 eta).
        diameter: D.
    """

    noise_weight: float
    inverse_lr: float
    diameter: float


def accelerated_plan(
    *,
    n: int,
    dim: int,
    rho: float,
    smoothness: float,
    diameter: float,
    moment: float,
    moment_order: float,
    second_moment: float | None = None,
    steps: int | None = None,
    clip: float | None = None,
    adjacency: str = "replace_one",
    mode: str = "tight",
    allow_infinite_variance: bool = False,
) -> AcceleratedPlan:
    """Returns the plan with its excess risk bound.

    Args:
        n: public number of records.
        dim: d.
        rho: > 0, zCDP of the run; the paper's "epsilon" is sqrt(2 rho), not an epsilon of differential privacy.
        smoothness: beta >= 0; at 0 (linear losses) one step is best.
        diameter: D > 0, of the feasible set. With a bound on |w_0 - w*| only, `bound` is not proved (see the source).
        moment: r_k.
        moment_order: k.
        second_moment: r_2, default r_k.
        steps: T <= n; default the minimizer of the bound, at most 1e5 (mode "paper": the published one).
        clip: a threshold of your own, chosen without looking at the training records.
        adjacency: "replace_one", "zero_out" or "add_remove" (batches by a choice for each record by itself).
        mode: "tight" or "paper" (replace_one only).
        allow_infinite_variance: admits k < 2.

    Raises:
        AdjacencyError: mode "paper" outside replace_one.
        ConditionError: k < 2 without `allow_infinite_variance`.
        ValueError: an argument is out of range; T > n.

    Guarantee:
        With noise of `noise_std` on the mean of each batch, and each record in at most one batch by a choice that does
        not depend on the data, the run is rho-zCDP under the adjacency, whatever the promised constants are worth.

    Source:
        docs/proofs/heavy_tailed.md#accelerated-steps.

    Example:
        >>> plan = accelerated_plan(n=10**5, dim=50, rho=0.5, smoothness=1.0, diameter=2.0, moment=1.0, moment_order=2)
        >>> plan.steps, round(plan.bound, 4)
        (41, 0.0885)
    """
    data = OnePass(
        n, dim, rho, moment, moment_order, second_moment, adjacency, allow_infinite_variance
    )
    check.nonnegative(smoothness=smoothness)
    D = check.positive(diameter=diameter)
    paper = check_mode(mode, adjacency) == "paper"
    published: dict[str, Any] = {"n": n, "dim": dim, "moment": moment, "moment_order": moment_order}
    published |= {"paper_epsilon": math.sqrt(2.0 * rho)}

    def planned(T: int) -> AcceleratedPlan:
        weight = exchange_rate_accelerated(n, dim, T, rho, adjacency)
        chosen = clip
        if chosen is None and paper:
            chosen = accelerated_clip_paper(**published, steps=T)
        elif chosen is None:
            chosen = clip_threshold_linear(moment, moment_order, weight)
        run = data.run(T, chosen)
        bias = run["bias"]
        error = run["variance"] + run["bias"] ** 2
        inverse_lr = max(2.0 * smoothness, math.sqrt(error * T * (T + 1) * (2 * T + 1) / 12.0) / D)
        root = math.sqrt(error * (2 * T + 1) / (3.0 * T * (T + 1)))
        return AcceleratedPlan(
            **run,
            noise_weight=weight,
            inverse_lr=inverse_lr,
            lr=1.0 / (2.0 * inverse_lr),
            bound=4.0 * smoothness * D**2 / (T * (T + 1)) + 2.0 * D * root + bias * D,
            smoothness=smoothness,
            diameter=D,
            mode=mode,
        )

    if steps is None and paper:
        real = accelerated_steps_paper(**published, smoothness=smoothness, diameter=D)
        steps = max(1, math.ceil(min(real, float(n))))
    elif steps is None:
        steps = 1 if smoothness == 0 else least_steps(lambda T: planned(T).bound, n)
    plan = planned(steps)
    if plan.noise_weight >= 1.0:
        warn(
            f"noise dominates: a unit of clip costs {plan.noise_weight:.3g} >= 1 of error; more"
            " records, a larger rho or fewer parameters are needed"
        )
    return plan


def accelerated_steps_paper(
    *,
    n: int,
    dim: int,
    paper_epsilon: float,
    smoothness: float,
    diameter: float,
    moment: float,
    moment_order: float,
) -> float:
    """Returns the real number of steps of Theorems 9 and 31, with constants 1.

    min{ sqrt(y) x^((k-1)/(2k)), y^(2k/(5k-1)) x^(2(k-1)/(5k-1)) }, x = eps n / sqrt(d), y = beta D / r_k.

    Args:
        n: records.
        dim: d.
        paper_epsilon: the paper's epsilon, sqrt(2 rho); NOT an epsilon of differential privacy.
        smoothness: beta >= 0.
        diameter: D.
        moment: r_k.
        moment_order: k.

    Source:
        docs/proofs/heavy_tailed.md#accelerated-steps.

    Example:
        >>> round(accelerated_steps_paper(n=10**4, dim=1, paper_epsilon=1.0, smoothness=1.0, diameter=1.0, moment=1.0,
        ...                               moment_order=2.0), 6)
        7.742637
    """
    k = check.order(moment_order=moment_order)
    x = _log_signal(n, dim, paper_epsilon)
    if check.nonnegative(smoothness=smoothness) == 0:
        return 0.0
    y = (
        math.log(smoothness)
        + math.log(check.positive(diameter=diameter))
        - math.log(check.positive(moment=moment))
    )
    first = y / 2 + (k - 1) / (2 * k) * x
    second = (2 * k * y + 2 * (k - 1) * x) / (5 * k - 1)
    return safe_exp(min(first, second))


def accelerated_clip_paper(
    *, n: int, dim: int, steps: int, paper_epsilon: float, moment: float, moment_order: float
) -> float:
    """Returns the threshold of the paper, r_k (eps n / sqrt(d T))^(1/k), with constant 1.

    Args:
        n: records.
        dim: d.
        steps: T.
        paper_epsilon: sqrt(2 rho).
        moment: r_k.
        moment_order: k.

    Source:
        docs/proofs/heavy_tailed.md#accelerated-steps.

    Example:
        >>> round(accelerated_clip_paper(n=100, dim=1, steps=4, paper_epsilon=1.0, moment=2.0, moment_order=2.0), 6)
        14.142136
    """
    k = check.order(moment_order=moment_order)
    x = _log_signal(n, dim, paper_epsilon) - math.log(check.positive_count(steps=steps)) / 2
    return safe_exp(math.log(check.positive(moment=moment)) + x / k)


def _log_signal(n: int, dim: int, paper_epsilon: float) -> float:
    """Log x, x = eps n / sqrt(d)."""
    log_epsilon = math.log(check.positive(paper_epsilon=paper_epsilon))
    return (
        log_epsilon
        + math.log(check.positive_count(n=n))
        - math.log(check.positive_count(dim=dim)) / 2
    )
