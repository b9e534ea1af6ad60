"""Plans of averaged ClippedSGD (Algorithms 6 and 7): one pass, strongly convex and smooth losses.

For steps of at most 1/beta, with s_t the excess risk after step t, q_t the squared distance, S the conditional variance
of a noisy mean and B its bias,

    q_{t+1} <= (1 - mu lr_t) q_t - lr_t s_t + 2 lr_t^2 S + 2 lr_t B^2/mu,

and the weighted average of the iterates AFTER their steps satisfies E F - F* <= u_0 |w_0-w*|^2 + u_B B^2 + u_S S.

Differs from the paper in: 1. the paper's proof returns an iterate whose excess risk is below 2 B^2/mu if there is one,
which no algorithm can test; the bound here needs no such step; 2. weights k + j, not (k + j)^2, with steps
2/(mu (k + j)): squares do not telescope, since x^2 (x-2) > (x-1)^3 for x >= 3, while x (x-2) <= (x-1)^2; 3. explicit
constants, T and C minimize the bound.

Proof: docs/proofs/heavy_tailed.md#averaged-steps. Source: Stich (2019), Lemma 3; Lowy and Razaviyayn, Theorem 11.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch_dpsco import _validate as check
from torch_dpsco.errors import ConditionError
from torch_dpsco.theory.clipping import clip_threshold_square, safe_exp
from torch_dpsco.theory.heavy_tailed.inputs import OnePass, OnePassPlan, check_mode, least_steps


@dataclass(frozen=True)
class AveragingSchedule:
    """Step sizes and weights of steps 0..T-1.

    Args:
        lr: step sizes.
        weights: of the iterate AFTER each step, not normalized.
    """

    lr: tuple[float, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class BoundCoefficients:
    """E F - F* <= initial |w_0 - w*|^2 + bias B^2 + noise S.

    Args:
        initial: u_0.
        bias: u_B.
        noise: u_S.
    """

    initial: float
    bias: float
    noise: float


@dataclass(frozen=True, kw_only=True)
class StronglyConvexPlan(OnePassPlan):
    """Public numbers of a planned run of averaged ClippedSGD.

    Args, besides those of `OnePassPlan`:
        strong_convexity: mu.
        distance: bound on |w_0 - w*| used in `bound`.
        schedule: step sizes and weights.
        coefficients: of the bound.
    """

    strong_convexity: float
    distance: float
    schedule: AveragingSchedule = field(repr=False)
    coefficients: BoundCoefficients = field(repr=False)


def averaging_schedule(
    *, strong_convexity: float, inverse_lr_cap: float, steps: int
) -> AveragingSchedule:
    """Returns step sizes <= 1/cap and weights: constant steps for T <= cap/mu, else also a decreasing second half.

    Args:
        strong_convexity: mu > 0.
        inverse_lr_cap: >= mu; the smoothness.
        steps: T >= 1.

    Raises:
        ConditionError: mu exceeds the cap.

    Source:
        docs/proofs/heavy_tailed.md#averaged-steps.

    Example:
        >>> averaging_schedule(strong_convexity=1.0, inverse_lr_cap=1.0, steps=4)
        AveragingSchedule(lr=(1.0, 1.0, 1.0, 0.6666666666666666), weights=(0.0, 0.0, 2.0, 3.0))
    """
    mu, cap = _checked_curvature(strong_convexity, inverse_lr_cap, "inverse_lr_cap")
    if check.positive_count(steps=steps) <= cap / mu:
        growth = (
            0.0 if mu == cap else _log_growth(mu, cap)
        )  # at mu = cap there is one step, of any weight
        return AveragingSchedule(
            (1.0 / cap,) * steps, tuple(math.exp((t + 1) * growth) for t in range(steps))
        )
    first = (steps + 1) // 2
    weights = [2.0 * cap / mu + j for j in range(steps - first)]
    lr = (1.0 / cap,) * first + tuple(2.0 / (mu * weight) for weight in weights)
    return AveragingSchedule(lr, (0.0,) * first + tuple(weights))


def strongly_convex_coefficients(
    *, strong_convexity: float, smoothness: float, steps: int
) -> BoundCoefficients:
    """Returns u_0, u_B and u_S of the bound for `averaging_schedule` with cap = smoothness.

    Args:
        strong_convexity: mu > 0.
        smoothness: beta >= mu.
        steps: T >= 1.

    Raises:
        ConditionError: mu > beta.

    Source:
        docs/proofs/heavy_tailed.md#averaged-steps.

    Example:
        >>> strongly_convex_coefficients(strong_convexity=1.0, smoothness=2.0, steps=1)
        BoundCoefficients(initial=1.0, bias=2.0, noise=1.0)
    """
    mu, beta = _checked_curvature(strong_convexity, smoothness, "smoothness")
    kappa = beta / mu
    T = check.positive_count(steps=steps)
    growth = _log_growth(mu, beta)
    if kappa >= T:
        total = float(T) if mu == beta else kappa * math.expm1(T * growth)
        return BoundCoefficients(beta / total, 2.0 / mu, 2.0 / beta)
    first = (T + 1) // 2
    M = T - first
    ks = 2.0 * kappa
    total = M * ks + M * (M - 1) / 2.0
    K = ks * (ks - 2.0)
    return BoundCoefficients(
        mu / 2.0 * K / total * math.exp(-first * growth),
        2.0 / mu * (1.0 + K / (2.0 * total)),
        (K / beta + 4.0 * M / mu) / total,
    )


def strongly_convex_plan(
    *,
    n: int,
    dim: int,
    rho: float,
    strong_convexity: float,
    smoothness: float,
    moment: float,
    moment_order: float,
    second_moment: float | None = None,
    diameter: float = math.inf,
    steps: int | None = None,
    clip: float | None = None,
    adjacency: str = "replace_one",
    mode: str = "tight",
    allow_infinite_variance: bool = False,
) -> StronglyConvexPlan:
    """Returns the plan with its excess risk bound.

    Args:
        n: public number of records.
        dim: d.
        rho: > 0, zCDP of the run.
        strong_convexity: mu > 0, of the population risk.
        smoothness: beta >= mu, of the population risk.
        moment: r_k.
        moment_order: k.
        second_moment: r_2, default r_k.
        diameter: bound on |w_0 - w*|; r_2/mu is one, and the smaller of the two is used.
        steps: T <= n; default the minimizer of the bound. Mode "paper", which states its order only:
            ceil(2 kappa log(beta D^2 / rate)) with the published rate.
        clip: a threshold of your own, chosen without looking at the training records.
        adjacency: "replace_one", "zero_out" or "add_remove" (batches by a choice for each record by itself).
        mode: "tight" or "paper" (replace_one only; the published C).
        allow_infinite_variance: admits k < 2.

    Raises:
        AdjacencyError: mode "paper" outside replace_one.
        ConditionError: mu > beta; k < 2 without `allow_infinite_variance`.
        ValueError: an argument is out of range.

    Guarantee:
        As `accelerated_plan`: rho-zCDP with noise of `noise_std` on each mean, one batch per record.

    Source:
        docs/proofs/heavy_tailed.md#averaged-steps.

    Example:
        >>> plan = strongly_convex_plan(n=10**5, dim=50, rho=0.5, strong_convexity=0.5, smoothness=1.0, moment=1.0,
        ...                             moment_order=2.0, diameter=2.0)
        >>> plan.steps, round(plan.bound, 4)
        (18, 0.0032)
    """
    data = OnePass(
        n, dim, rho, moment, moment_order, second_moment, adjacency, allow_infinite_variance
    )
    mu, beta = _checked_curvature(strong_convexity, smoothness, "smoothness")
    # |w_0 - w*| <= |grad F(w_0)|/mu <= r_1/mu, and r_1 <= r_2 <= r_k
    distance = min(
        check.positive(diameter=diameter, allow_inf=True), (second_moment or moment) / mu
    )
    paper = check_mode(mode, adjacency) == "paper"

    def planned(T: int, schedule: AveragingSchedule) -> StronglyConvexPlan:
        u = strongly_convex_coefficients(strong_convexity=mu, smoothness=beta, steps=T)
        chosen = clip
        if chosen is None and paper:
            chosen = _paper_clip(data, T)
        elif chosen is None:
            weight = u.noise * data.noise_variance(data.batch_size(T), 1.0)
            chosen = clip_threshold_square(moment, moment_order, u.bias, weight)
        run = data.run(T, chosen)
        return StronglyConvexPlan(
            **run,
            lr=1.0 / beta,
            bound=u.initial * distance**2 + u.bias * run["bias"] ** 2 + u.noise * run["variance"],
            strong_convexity=mu,
            smoothness=beta,
            distance=distance,
            mode=mode,
            schedule=schedule,
            coefficients=u,
        )

    if steps is None and paper:
        steps = _paper_steps(data, mu, beta, distance)
    elif steps is None:  # its T numbers are not needed to find T
        steps = least_steps(lambda T: planned(T, AveragingSchedule((), ())).bound, n)
    return planned(steps, averaging_schedule(strong_convexity=mu, inverse_lr_cap=beta, steps=steps))


def _paper_clip(data: OnePass, T: int) -> float:
    """r_k (eps^2 n^2/(d T))^(1/(2k)), eps^2 = 2 rho."""
    log_signal = (
        math.log(2.0 * data.rho) + 2.0 * math.log(data.n) - math.log(data.dim) - math.log(T)
    )
    return safe_exp(math.log(data.moment) + log_signal / (2.0 * data.moment_order))


def _paper_steps(data: OnePass, mu: float, beta: float, distance: float) -> int:
    kappa = beta / mu
    k = data.moment_order
    noise = math.sqrt(data.dim * kappa / (2.0 * data.rho)) / data.n
    rate = data.moment**2 / mu * (1.0 / data.n + noise ** ((2.0 * k - 2.0) / k))
    return min(data.n, math.ceil(2.0 * kappa * math.log(max(math.e, beta * distance**2 / rate))))


def _log_growth(mu: float, beta: float) -> float:
    """-log(1 - mu/beta), accurate at both ends; inf at mu = beta."""
    if mu == beta:
        return math.inf
    return (
        -math.log1p(-mu / beta) if mu < beta / 2.0 else math.log(beta / (beta - mu))
    )  # beta - mu is exact here


def _checked_curvature(strong_convexity: float, cap: float, name: str) -> tuple[float, float]:
    mu = check.positive(strong_convexity=strong_convexity)
    beta = (
        check.positive(inverse_lr_cap=cap)
        if name == "inverse_lr_cap"
        else check.positive(smoothness=cap)
    )
    if mu > beta:
        raise ConditionError(f"strong_convexity must be <= {name}={beta:g} (got {mu:g})")
    return mu, beta
