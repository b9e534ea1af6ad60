"""What the one-pass plans for heavy-tailed gradients share: checked inputs, errors of a mean, the search for T.

n records are cut into T batches of s = floor(n/T), each used once, so that T does not enter the privacy cost. A step
has the sampling variance r_2^2/s and the noise variance d sigma^2, sigma = `mean_noise_std(C, s, rho)`.

Proof: docs/proofs/heavy_tailed.md#one-pass.

Plans of averaged ClippedSGD (Algorithms 6 and 7): one pass, strongly convex and smooth losses.

For steps of at most 1/beta, with s_t the excess risk after step t, q_t the squared distance, S the conditional variance
of a noisy mean and B its bias,

    q_{t+1} <= (1 - mu lr_t) q_t - lr_t s_t + 2 lr_t^2 S + 2 lr_t B^2/mu,

and the weighted average of the iterates AFTER their steps satisfies E F - F* <= u_0 |w_0-w*|^2 + u_B B^2 + u_S S.

Differs from the paper in: 1. the paper's proof returns an iterate whose excess risk is below 2 B^2/mu if there is one,
which no algorithm can test; the bound here needs no such step; 2. weights k + j, not (k + j)^2, with steps
2/(mu (k + j)): squares do not telescope, since x^2 (x-2) > (x-1)^3 for x >= 3, while x (x-2) <= (x-1)^2; 3. explicit
constants, T and C minimize the bound.

Proof: docs/proofs/heavy_tailed.md#averaged-steps. Source: Stich (2019), Lemma 3; Lowy and Razaviyayn, Theorem 11.

Plans of AcceleratedSGD (Algorithms 2 and 5): one pass, smooth convex losses.

With T batches of s records, B the bias of a clipped mean, V = r_2^2/s + d sigma^2 + B^2 and
eta = max(2 beta, sqrt(V T (T+1)(2T+1)/12)/D), the last average satisfies

    E F - F* <= 4 beta D^2/(T(T+1)) + 2 D sqrt(V (2T+1)/(3T(T+1))) + B D.

Proof: docs/proofs/heavy_tailed.md#accelerated-steps (the recursion of Ghadimi and Lan with weights t). The threshold
minimizes B D plus the part of the noise in the root: B(C) + a C with a = `accelerated_factor` times that of a mean.

Differs from the paper in: 1. explicit constants; 2. the sharp bias constant; 3. T minimizes the bound itself, rather
than its order.

Source: Lowy and Razaviyayn, Theorems 9 and 31.

Plans of ProximalSGD (Algorithms 8 and 9): one pass, smooth risk plus a penalty, under the proximal PL condition.

F = F_0 + f_1 with F_0 beta-smooth (it need not be convex) and f_1 convex and free of data:

    mu (F(w) - F*) <= -beta min_y [ <grad F_0(w), y-w> + (beta/2)|y-w|^2 + f_1(y) - f_1(w) ].

With eta = 1/(2 beta), the LAST iterate satisfies
E F(w_T) - F* <= (1 - mu/(4 beta))^T (F(w_0) - F*) + (3 B^2 + 2 S)/mu.

Differs from the paper in: 1. explicit constants, by a proof without its lemma on perturbed minimizers
(docs/proofs/heavy_tailed.md#proximal-steps); 2. T and C minimize the bound.

Source: Lowy and Razaviyayn, Theorem 48.

Clipping with k moments: the bias it causes, the threshold that balances bias and noise, and the noise of a mean.

A gradient g with E||g||^k <= r^k is clipped to g min(1, C/||g||). The mean moves by at most

    B(C) = beta_k r^k / C^(k-1),    beta_k = (k-1)^(k-1) / k^k,

since ||E g - E clip(g)|| <= E(||g|| - C)_+ and (x - C)/x^k is largest at x = kC/(k-1). A two-point law attains it for
C >= (k-1) r/k, so that no better constant exists. The noise grows with C; the two thresholds below balance the two.

Differs from the paper (Lowy and Razaviyayn, arXiv 2209.07403) in: 1. the bias constant of its Lemma 6, 1/(k-1), is
(k/(k-1))^k in [e, 4] times too large for k >= 2; 2. noise is stated by rho-zCDP under a named
adjacency, the paper's "epsilon" is sqrt(2 rho).

Everything is evaluated in logarithms, for k from 1 + 1e-15 to 1e6.

Proofs: docs/proofs/heavy_tailed.md#clipping-bias,
docs/proofs/heavy_tailed.md#best-clip, docs/proofs/heavy_tailed.md#noise-of-a-mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco._validate import check_fields
from torch_dpsco.accounting.analysis.gaussian import sensitivity_factor
from torch_dpsco.accounting.analysis.rounding import scaled_up
from torch_dpsco.errors import ConditionError, InfeasibleError, warn

_RANGES = {
    "n": check.positive_count,
    "dim": check.positive_count,
    "rho": check.positive,
    "moment": check.positive,
    "second_moment": check.positive,
}
MAX_STEPS = 100_000  # end of the search for the number of steps
_GRID = 400


def check_order(moment_order: float) -> None:
    """Raises ConditionError for k < 2, where gradients may have infinite variance."""
    k = check.order(moment_order=moment_order)
    if k < 2:
        raise ConditionError(
            f"moment_order must be >= 2 for a theorem to choose (got {k:g}): give a clip, chosen"
            " without looking at the data"
        )


@dataclass(frozen=True)
class PilotPlan:
    """Public numbers of a pilot.

    Args:
        size: records of the group.
        epsilon: of its release.
        quantile: target of the clip among the norms.
        c_min: least threshold.
        c_max: largest threshold.
    """

    size: int
    epsilon: float
    quantile: float
    c_min: float
    c_max: float

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        return (
            f"the clip is a private {self.quantile:.3g}-quantile of the gradient norms of"
            f" {self.size} examples, within [{self.c_min:g}, {self.c_max:g}]"
        )


@dataclass(frozen=True, kw_only=True)
class OnePassPlan:
    """Public numbers of a run in one pass, of every method.

    Args:
        steps: T, one batch each.
        clip: C.
        noise_std: sigma, std per coordinate of the noise on a mean.
        bias: largest norm of the bias of a clipped mean, B(C) unless C is below (k-1) r_k/k.
        variance: r_2^2/s + d sigma^2, WITHOUT the square of the bias.
        lr: step size as the optimizer takes it: of the first step, or the factor of t in that of step t.
        bound: on the expected excess risk; not proved under add_remove, see docs/proofs/heavy_tailed.md#one-pass.
    """

    steps: int
    clip: float
    noise_std: float
    bias: float
    variance: float
    lr: float
    bound: float


@dataclass(frozen=True)
class OnePass:
    """Checked public inputs of a one-pass plan.

    Args:
        n: records, public.
        dim: d, number of parameters.
        rho: > 0, zCDP of the whole run.
        moment: r_k > 0 with sup_w E||grad f(w,x)||^k <= r_k^k.
        moment_order: k >= 2.
        second_moment: r_2; default r_k (r_2 <= r_k).
        adjacency: "replace_one", "zero_out" or "add_remove".

    Example:
        >>> data = OnePass(n=100, dim=1, rho=0.5, moment=1.0, moment_order=2.0)
        >>> data.batch_size(3), round(data.noise_variance(10, 1.0), 12), round(data.sampling_variance(10), 12)
        (33, 0.04, 0.1)
    """

    n: int
    dim: int
    rho: float
    moment: float
    moment_order: float
    second_moment: float | None = None
    adjacency: str = "replace_one"

    def __post_init__(self) -> None:
        check.ranges(self, _RANGES)
        check_order(self.moment_order)
        sensitivity_factor(self.adjacency)

    def batch_size(self, steps: int) -> int:
        """Returns s = floor(n/T); raises ValueError for T > n."""
        if check.positive_count(steps=steps) > self.n:
            raise ValueError(
                f"steps must be <= n={self.n}, for batches that use each record once (got {steps})"
            )
        return self.n // steps

    def noise_std(self, batch_size: int, clip: float) -> float:
        """Returns sigma of the noise on a mean."""
        # PRIVACY: one mean per record, so that rho buys each (test_each_batch_costs_rho_and_batches_are_disjoint).
        return mean_noise_std(clip, batch_size, self.rho, adjacency=self.adjacency)

    def noise_variance(self, batch_size: int, clip: float) -> float:
        """Returns d sigma^2, the expected square of the noise on a mean."""
        return self.dim * self.noise_std(batch_size, clip) ** 2

    def sampling_variance(self, batch_size: int) -> float:
        """Returns r_2^2/s, a bound on the variance of a clipped mean without noise."""
        return (self.second_moment or self.moment) ** 2 / batch_size

    def run(self, steps: int, clip: float) -> dict[str, Any]:
        """Returns the fields of a `OnePassPlan` that follow from steps and clip."""
        s = self.batch_size(steps)
        return {
            "steps": steps,
            "clip": clip,
            "noise_std": self.noise_std(s, clip),
            "bias": clip_bias_worst(self.moment, self.moment_order, clip),
            "variance": self.sampling_variance(s) + self.noise_variance(s, clip),
        }


def least_steps(bound: Callable[[int], float], most: int) -> int:
    """Returns an integer T in 1..min(most, 1e5) with a small bound(T): a geometric grid of 400, then +-2 around it.

    Source:
        docs/proofs/heavy_tailed.md#one-pass.

    Example:
        >>> least_steps(lambda T: T + 100 / T, most=1000)
        10
    """
    last = min(most, MAX_STEPS)
    grid = {round(math.exp(math.log(last) * i / (_GRID - 1))) for i in range(_GRID)}
    start = min(sorted(grid), key=bound)
    return min(range(max(1, start - 2), min(last, start + 2) + 1), key=bound)


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


def averaging_schedule(
    *, strong_convexity: float, smoothness: float, steps: int
) -> AveragingSchedule:
    """Returns step sizes <= 1/cap and weights: constant steps for T <= cap/mu, else also a decreasing second half.

    Args:
        strong_convexity: mu > 0.
        smoothness: cap >= mu.
        steps: T >= 1.

    Raises:
        ConditionError: mu exceeds the cap.

    Source:
        docs/proofs/heavy_tailed.md#averaged-steps.

    Example:
        >>> averaging_schedule(strong_convexity=1.0, smoothness=1.0, steps=4)
        AveragingSchedule(lr=(1.0, 1.0, 1.0, 0.6666666666666666), weights=(0.0, 0.0, 2.0, 3.0))
    """
    mu = strong_convexity
    cap = smoothness
    _require_curvature(mu, cap)
    if steps <= cap / mu:
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
    mu = strong_convexity
    beta = smoothness
    _require_curvature(mu, beta)
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
    data: OnePass,
    *,
    strong_convexity: float,
    smoothness: float,
    diameter: float = math.inf,
    steps: int | None = None,
    clip: float | None = None,
) -> OnePassPlan:
    """Returns the plan of averaged steps with its excess risk bound.

    Args:
        data: records, privacy and moments.
        strong_convexity: mu > 0, of the population risk.
        smoothness: beta >= mu, of the population risk.
        diameter: bound on |w_0 - w*|; r_2/mu is one, and the smaller of the two is used.
        steps: T <= n; default the minimizer of the bound.
        clip: a threshold of your own, chosen without looking at the training records.

    Raises:
        ConditionError: mu > beta.
        ValueError: an argument is out of range.

    Guarantee:
        As `accelerated_plan`: rho-zCDP with noise of `noise_std` on each mean, one batch per record.

    Source:
        docs/proofs/heavy_tailed.md#averaged-steps.

    Example:
        >>> data = OnePass(n=10**5, dim=50, rho=0.5, moment=1.0, moment_order=2.0)
        >>> plan = strongly_convex_plan(data, strong_convexity=0.5, smoothness=1.0, diameter=2.0)
        >>> plan.steps, round(plan.bound, 4)
        (18, 0.0032)
    """
    mu = strong_convexity
    beta = smoothness
    _require_curvature(mu, beta)
    # |w_0 - w*| <= |grad F(w_0)|/mu <= r_1/mu, and r_1 <= r_2 <= r_k
    distance = min(
        diameter,
        (data.second_moment or data.moment) / mu,
    )

    def planned(T: int) -> OnePassPlan:
        u = strongly_convex_coefficients(strong_convexity=mu, smoothness=beta, steps=T)
        chosen = clip
        if chosen is None:
            weight = u.noise * data.noise_variance(data.batch_size(T), 1.0)
            chosen = clip_threshold_square(data.moment, data.moment_order, u.bias, weight)
        run = data.run(T, chosen)
        bound = u.initial * distance**2 + u.bias * run["bias"] ** 2 + u.noise * run["variance"]
        return OnePassPlan(**run, lr=1.0 / beta, bound=bound)

    return planned(least_steps(lambda T: planned(T).bound, data.n) if steps is None else steps)


def _log_growth(mu: float, beta: float) -> float:
    """-log(1 - mu/beta), accurate at both ends; inf at mu = beta."""
    if mu == beta:
        return math.inf
    return (
        -math.log1p(-mu / beta) if mu < beta / 2.0 else math.log(beta / (beta - mu))
    )  # beta - mu is exact here


def _require_curvature(mu: float, beta: float) -> None:
    if mu > beta:
        raise ConditionError(f"strong_convexity must be <= smoothness={beta:g} (got {mu:g})")


def accelerated_plan(
    data: OnePass,
    *,
    smoothness: float,
    diameter: float,
    steps: int | None = None,
    clip: float | None = None,
) -> OnePassPlan:
    """Returns the plan of accelerated steps with its excess risk bound: step t = 1, 2, ... has size t lr = t/(2 eta).

    Args:
        data: records, privacy and moments. The paper's "epsilon" is sqrt(2 rho), not one of differential privacy.
        smoothness: beta >= 0; at 0 (linear losses) one step is best.
        diameter: D > 0, of the feasible set. With a bound on |w_0 - w*| only, `bound` is not proved (see the source).
        steps: T <= n; default the minimizer of the bound, at most 1e5.
        clip: a threshold of your own, chosen without looking at the training records.

    Raises:
        ValueError: an argument is out of range; T > n.

    Guarantee:
        With noise of `noise_std` on the mean of each batch, and each record in at most one batch by a choice that does
        not depend on the data, the run is rho-zCDP under the adjacency, whatever the promised constants are worth.

    Source:
        docs/proofs/heavy_tailed.md#accelerated-steps.

    Example:
        >>> data = OnePass(n=10**5, dim=50, rho=0.5, moment=1.0, moment_order=2.0)
        >>> plan = accelerated_plan(data, smoothness=1.0, diameter=2.0)
        >>> plan.steps, round(plan.bound, 4)
        (41, 0.0885)
    """
    D = diameter

    def exchange_rate(T: int) -> float:
        mean = exchange_rate_mean(data.batch_size(T), data.dim, data.rho, data.adjacency)
        return accelerated_factor(T) * mean

    def planned(T: int) -> OnePassPlan:
        chosen = clip
        if chosen is None:
            chosen = clip_threshold_linear(data.moment, data.moment_order, exchange_rate(T))
        run = data.run(T, chosen)
        bias = run["bias"]
        error = run["variance"] + bias**2
        eta = max(2.0 * smoothness, math.sqrt(error * T * (T + 1) * (2 * T + 1) / 12.0) / D)
        root = math.sqrt(error * (2 * T + 1) / (3.0 * T * (T + 1)))
        bound = 4.0 * smoothness * D**2 / (T * (T + 1)) + 2.0 * D * root + bias * D
        return OnePassPlan(**run, lr=1.0 / (2.0 * eta), bound=bound)

    if steps is None:
        steps = 1 if smoothness == 0 else least_steps(lambda T: planned(T).bound, data.n)
    plan = planned(steps)
    weight = exchange_rate(steps)
    if weight >= 1.0:
        warn(
            f"noise dominates: a unit of clip costs {weight:.3g} >= 1 of error; more records, a"
            " larger rho or fewer parameters are needed"
        )
    return plan


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
    mu = pl_constant
    beta = smoothness
    if mu > beta:
        raise ConditionError(f"pl_constant must be <= smoothness={beta:g} (got {mu:g})")
    decay = math.exp(steps * math.log1p(-mu / (4.0 * beta)))
    return decay * initial_gap + (3.0 * bias**2 + 2.0 * variance) / mu


def proximal_pl_plan(
    data: OnePass,
    *,
    pl_constant: float,
    smoothness: float,
    initial_gap: float,
    steps: int | None = None,
    clip: float | None = None,
) -> OnePassPlan:
    """Returns the plan of proximal steps, of size 1/(2 beta), with its excess risk bound.

    Args:
        data: records, privacy and moments, of the gradients of the data term.
        pl_constant: mu > 0; for strongly convex risks their constant is one.
        smoothness: beta >= mu, of F_0.
        initial_gap: bound > 0 on F(w_0) - F*, public.
        steps: T <= n; default the minimizer of the bound with its own threshold.
        clip: a threshold of your own, chosen without looking at the training records.

    Raises:
        ConditionError: mu > beta.
        ValueError: an argument is out of range.

    Guarantee:
        As `accelerated_plan`; the penalty must not depend on the data, or its proximal map is no post-processing.

    Source:
        docs/proofs/heavy_tailed.md#proximal-steps.

    Example:
        >>> data = OnePass(n=10**5, dim=50, rho=0.5, moment=1.0, moment_order=2.0)
        >>> plan = proximal_pl_plan(data, pl_constant=0.5, smoothness=1.0, initial_gap=2.0)
        >>> plan.steps, round(plan.bound, 4)
        (49, 0.0218)
    """

    def planned(T: int) -> OnePassPlan:
        chosen = clip
        if chosen is None:
            weight = 2.0 * data.noise_variance(data.batch_size(T), 1.0)
            chosen = clip_threshold_square(data.moment, data.moment_order, 3.0, weight)
        run = data.run(T, chosen)
        bound = proximal_pl_bound(
            pl_constant=pl_constant,
            smoothness=smoothness,
            initial_gap=initial_gap,
            steps=T,
            bias=run["bias"],
            variance=run["variance"],
        )
        return OnePassPlan(**run, lr=1.0 / (2.0 * smoothness), bound=bound)

    return planned(least_steps(lambda T: planned(T).bound, data.n) if steps is None else steps)


# PRIVACY: l2 sensitivity of a sum of rows clipped at 1 (test_one_record_moves_a_clipped_mean_by_no_more_than_declared).

# no result is subnormal in between
_SMALLEST = 2.0**-960
_LARGEST = 2.0**960


def safe_exp(exponent: float) -> float:
    """Returns e^x, infinite where that exceeds floating point (math.exp raises)."""
    return math.exp(exponent) if exponent < 709.0 else math.inf


def clip_bias(moment: float, moment_order: float, clip: float) -> float:
    """Returns the bound B(C) on the norm of the bias of a clipped mean.

    Args:
        moment: r > 0 with E||g||^k <= r^k.
        moment_order: k > 1.
        clip: C > 0.

    Returns:
        beta_k r^k / C^(k-1); inf beyond floating point.

    Source:
        docs/proofs/heavy_tailed.md#clipping-bias (Lemma 6).

    Example:
        >>> round(clip_bias(1.0, 2.0, 0.5), 12)
        0.5
    """
    k = moment_order
    log_r = math.log(moment)
    return safe_exp(_log_bias_constant(k) + log_r + (k - 1) * (log_r - math.log(clip)))


def clip_bias_worst(moment: float, moment_order: float, clip: float) -> float:
    """Returns the largest norm of the bias of a clipped mean among all laws with the moment.

    B(C) for C >= (k-1) r/k, where a two-point law attains it; r - C below, attained by gradients of norm r.

    Args:
        moment: r > 0.
        moment_order: k > 1.
        clip: C > 0.

    Source:
        docs/proofs/heavy_tailed.md#clipping-bias.

    Example:
        >>> clip_bias_worst(1.0, 2.0, 0.25), round(clip_bias(1.0, 2.0, 0.25), 12)
        (0.75, 1.0)
    """
    bound = clip_bias(moment, moment_order, clip)
    return (
        bound
        if clip >= moment * math.exp(_log_ratio(moment_order))
        else min(bound, moment - clip)
    )


def clip_threshold_linear(moment: float, moment_order: float, noise_weight: float) -> float:
    """Returns the threshold that minimizes B(C) + a C: C = r (c_k / a)^(1/k), c_k = ((k-1)/k)^k.

    The minimum is k B(C). For a <= 1 it is the exact minimax choice. For a >= 1 the noise outweighs the gradient and
    no threshold is worth a step; the formula still minimizes the bound.

    Args:
        moment: r > 0.
        moment_order: k > 1.
        noise_weight: a > 0, error by noise per unit of threshold (an `exchange_rate_...`).

    Raises:
        InfeasibleError: the minimizer exceeds floating point.

    Source:
        docs/proofs/heavy_tailed.md#best-clip.

    Example:
        >>> round(clip_threshold_linear(1.0, 2.0, 0.01), 12)
        5.0
    """
    k = moment_order
    log_clip = math.log(moment) + _log_ratio(k) - math.log(noise_weight) / k
    return _finite_clip(log_clip, noise_weight)


def clip_threshold_square(
    moment: float, moment_order: float, bias_weight: float, noise_weight: float
) -> float:
    """Returns the threshold that minimizes u B(C)^2 + q C^2: C = r ((k-1) u beta_k^2 / q)^(1/(2k)).

    Args:
        moment: r > 0.
        moment_order: k > 1.
        bias_weight: u > 0.
        noise_weight: q > 0.

    Raises:
        InfeasibleError: the minimizer exceeds floating point.

    Source:
        docs/proofs/heavy_tailed.md#best-clip.

    Example:
        >>> round(clip_threshold_square(1.0, 2.0, 1.0, 0.0001), 12)
        5.0
    """
    k = moment_order
    log_weights = math.log(bias_weight) - math.log(noise_weight)
    log_clip = math.log(moment) + (math.log(k - 1) + 2 * _log_bias_constant(k) + log_weights) / (
        2 * k
    )
    return _finite_clip(log_clip, noise_weight)


def mean_noise_std(
    clip: float,
    batch_size: int,
    rho: float,
    steps: int = 1,
    adjacency: str = "replace_one",
) -> float:
    """Returns the std of the Gaussian noise on a mean of clipped rows, for `steps` means of the same rows.

    sigma = S sqrt(steps / (2 rho)), S = 2C/s (replace_one) or C/s (zero_out, add_remove), rounded up.

    Args:
        clip: C > 0.
        batch_size: s >= 1, the public divisor (not the realized number of rows).
        rho: > 0, zCDP of all `steps` means together.
        steps: T >= 1 means of the SAME rows; 1 if each row is used once.
        adjacency: "replace_one", "zero_out" or "add_remove".

    Returns:
        The std per coordinate of the noise on the MEAN; that on the sum is `batch_size` times it.

    Raises:
        ValueError: an argument is out of range.
        InfeasibleError: the std leaves the range of floating point.

    Guarantee:
        rho-zCDP, hence sqrt(2 rho)-GDP, of the `steps` noisy means under the adjacency, for rows that the loader puts
        into this batch whatever the data are (add_remove: by a choice made for each record by itself).

    Source:
        docs/proofs/heavy_tailed.md#noise-of-a-mean; Bun and Steinke, Proposition 1.6.

    Example:
        >>> round(mean_noise_std(1.0, batch_size=100, rho=0.5), 12)
        0.02
    """
    C = check.positive(clip=clip)
    s = check.positive_count(batch_size=batch_size)
    S = sensitivity_factor(adjacency)
    T = check.positive_count(steps=steps)
    # PRIVACY: rounded up, never down (test_the_noise_of_a_mean_is_never_below_its_exact_value).
    return _rounded_up(S * C / s, math.sqrt(T / (2.0 * check.positive(rho=rho))))


def exchange_rate_mean(
    batch_size: int, dim: int, rho: float, adjacency: str = "replace_one"
) -> float:
    """Returns a = sqrt(2 d / rho) / s (replace_one), the error by noise per unit of threshold, for one mean.

    Since d/dC E(||g|| - C)_+ = -P(||g|| > C), the (1 - a)-quantile of the gradient norms minimizes
    E(||g|| - C)_+ + a C: no moment has to be known.

    Args:
        batch_size: s.
        dim: d.
        rho: > 0, zCDP of the mean.
        adjacency: zero_out and add_remove halve a.

    Source:
        docs/proofs/heavy_tailed.md#exchange-rates.

    Example:
        >>> round(exchange_rate_mean(batch_size=100, dim=1, rho=0.5), 12)
        0.02
    """
    return sensitivity_factor(adjacency) / 2.0 * math.sqrt(2.0 * dim / rho) / batch_size


def accelerated_factor(steps: int) -> float:
    """Returns what a unit of clip costs in AcceleratedSGD over `exchange_rate_mean`: a = 4 sqrt(d T / (3 rho)) / n.

    Source:
        docs/proofs/heavy_tailed.md#exchange-rates.
    """
    return 2.0 * math.sqrt(2.0 / (3.0 * float(steps)))


def exchange_rate_phase(n: int, dim: int, rho: float, adjacency: str = "replace_one") -> float:
    """Returns a = sqrt(8 d / rho) / m of a multi-pass phase on m records.

    Source:
        docs/proofs/heavy_tailed.md#exchange-rates.

    Example:
        >>> round(exchange_rate_phase(n=100, dim=2, rho=1.0), 12)
        0.04
    """
    return 2.0 * exchange_rate_mean(n, dim, rho, adjacency)


def _log_ratio(k: float) -> float:
    """log((k-1)/k), accurate at both ends."""
    return math.log1p(-1.0 / k) if k >= 2.0 else math.log(k - 1.0) - math.log(k)


def _log_bias_constant(k: float) -> float:
    return (k - 1.0) * _log_ratio(k) - math.log(k)


def _finite_clip(log_clip: float, noise_weight: float) -> float:
    clip = safe_exp(log_clip)
    if not 0.0 < clip < math.inf:
        raise InfeasibleError(
            f"noise_weight must leave a threshold within floating point (got {noise_weight:g}, log"
            f" threshold {log_clip:g}): give a clip"
        )
    return clip


def _rounded_up(sensitivity: float, ratio: float) -> float:
    """Sensitivity times ratio, rounded up; refused where a factor may be subnormal and lose more than a rounding."""
    std = sensitivity * ratio
    if not (_SMALLEST < sensitivity < _LARGEST and _SMALLEST < std < _LARGEST):
        raise InfeasibleError(
            "clip and rho must give a noise std within floating point (got sensitivity"
            f" {sensitivity:g}, std over sensitivity {ratio:g})"
        )
    return scaled_up(std, 6)
