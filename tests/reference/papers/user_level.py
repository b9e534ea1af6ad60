"""Formulas of user-level papers that the package does not use, for vectors and comparisons."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import scipy
import torch
from scipy.special import betainc
from scipy.stats import chi2
from torch import Tensor

from tests.reference.papers.accounting import poisson_group_delta
from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.algorithms.oracles import ramp_weights, weighted_mean
from torch_dpsco.algorithms.user_numbers import UserFilter, default_phases, ramp_start
from torch_dpsco.errors import ConditionError, warn
from torch_dpsco.rows.neighbors import neighbor_counts
from torch_dpsco.shuffle_model.numbers import lower_tail, upper_tail

_UP = 1 + 2e-15  # more than the roundings of a coefficient


def item_level_user_delta(
    max_items: int, sample_rate: float, noise_multiplier: float, epsilon: float
) -> float:
    """Returns delta for a whole user of one release of clipped, Poisson-sampled ITEMS, at most K of a user.

    The exact mixture over the number of the user's items that are drawn, both directions; for a run use the event
    `PoissonGaussian(..., k=K)`. Group privacy of the item-level epsilon is a bound, and a poor one.

    Args:
        max_items: K >= 1, cap on the items of a user.
        sample_rate: q of an item.
        noise_multiplier: z = noise std/clip of an item.
        epsilon: >= 0.

    Guarantee: one user with at most K items added or removed.

    Source: docs/proofs/user_level.md#clipped-means-of-users.

    Example:
        >>> round(item_level_user_delta(5, 0.1, 0.8, 1.0), 6)
        0.084877
    """
    ways = (
        poisson_group_delta(max_items, sample_rate, noise_multiplier, epsilon, way)
        for way in ("remove", "add")
    )
    return max(ways)


def sketch_failure(sketch_dim: int, distortion: float, n_users: int, steps: int) -> float:
    """Returns min(1, T n(n+1)/2 P[chi2_k < k (1 - eta)^2]): some pair contracts under a fresh Gaussian sketch.

    With a sketch drawn anew for each step, after its point is fixed, distances of at most tau in the sketch are at most
    tau/(1 - eta) but for this failure, of which both sides have one: (1 + e^epsilon) times it adds to delta.

    Args:
        sketch_dim: k >= 1.
        distortion: eta in (0, 1).
        n_users: n >= 1; the n + 1 rows of a pair of data sets count.
        steps: T >= 1.

    Source: docs/proofs/user_level.md#fresh-sketches.

    Example:
        >>> sketch_failure(256, 0.3, 1000, 1000) < 2e-4
        True
    """
    k, eta = (
        check.positive_count(sketch_dim=sketch_dim),
        check.open_interval(0.0, 1.0, distortion=distortion),
    )
    n, T = check.positive_count(n_users=n_users), check.positive_count(steps=steps)
    tail = float(chi2.logcdf(k * (1 - eta) ** 2, k))
    pairs = math.log(T) + math.log(n) + math.log(n + 1) - math.log(2)
    return min(1.0, math.exp(min(0.0, tail + pairs)) * (1 + 1e-9))


def min_users_paper(steps: int, delta: float, epsilon: float, corrected: bool) -> int:
    """Returns ceil(40 log(4T/delta)/epsilon), the paper's condition, or 240 in place of 40: its argument, mended.

    Neither is a check: `calibrate_filter` says what is proved (docs/errata.md, paper 3, E3).

    Example:
        >>> min_users_paper(11, 1e-6, 1.0, corrected=False)
        704
    """
    T, delta = check.positive_count(steps=steps), check.open_interval(0.0, 1.0, delta=delta)
    factor = 240 if corrected else 40
    return math.ceil(factor * math.log(4 * T / delta) / check.positive(epsilon=epsilon))


def centered_clip_mean(rows: Any, center: Any, clip: float) -> Tensor:
    """Returns c + (1/n) sum_j clip(x_j - c, C) of (n, D) means of users, without noise.

    Example:
        >>> centered_clip_mean([[3.0], [0.0]], [0.0], 1.0).tolist()
        [0.5]
    """
    middle = torch.as_tensor(center, dtype=torch.float64)
    off = torch.as_tensor(rows, dtype=torch.float64) - middle
    lengths = torch.linalg.vector_norm(off, dim=1, keepdim=True)
    return middle + (off * (clip / lengths.clamp(min=clip))).mean(0)


def deficiency_coefficient(
    n_min: int, deficiency: float, ramp_start: float, ramp_end: int
) -> float:
    """Returns Rp with |g - g'| <= 2 tau Rp for a user added to a batch of at least n_min users.

    e_j counts the users of the batch farther than tau from x_j, v is their mean, weights are clip((a - e_j)/(a - b), 0,
    1), and min(v, v') <= V. With c = 1/(a - b), K_A = n_min V/a and K_B = n_min V/b,

        Rp = max{ (1 + K_A c)/(n_min - K_A), (1 + K_B c)/n_min }.

    Args:
        n_min: smallest batch that is answered.
        deficiency: V >= 0, bound on the smaller of the two mean deficiencies.
        ramp_start: a, where weights reach 0; in (ramp_end, (n_min - 1)/2].
        ramp_end: b, up to which weights are 1.

    Example:
        >>> round(deficiency_coefficient(9363, 195.0, 4681.0, 2340) * 10**4, 2)
        1.42
    """
    c, none, full = (
        1 / (ramp_start - ramp_end),
        n_min * deficiency / ramp_start,
        n_min * deficiency / ramp_end,
    )
    return max((1 + none * c) / (n_min - none), (1 + full * c) / n_min)


def poisson_step_mu(
    score_sensitivity: float, score_noise_std: float, noise_ratio: float
) -> float:
    """Returns the mu of a score of sensitivity D and a mean of noise std z times its own, released together.

    Example:
        >>> round(poisson_step_mu(2.0, 12.5, 7.5), 6)
        0.208273
    """
    return math.hypot(score_sensitivity / score_noise_std, 1 / noise_ratio)


def poisson_underflow(n_users: int, sample_rate: float, n_min: int) -> float:
    """Returns P[Bin(n - 1, q) < n_min]: the others of a user are too few in a Poisson sample.

    Example:
        >>> 3.4e-7 < poisson_underflow(1750, 0.25, 350) < 3.5e-7
        True
    """
    return lower_tail(n_min - 1, n_users - 1, sample_rate)


def filtered_mean(
    rows: Any, pair_radius: float, ramp_start: float, ramp_end: float
) -> dict[str, Any]:
    """Returns score, counts, weights and mean of the filter, without noise.

    Args:
        rows: (n, D) means of users.
        pair_radius: tau > 0.
        ramp_start: a, number of neighbors up to which the weight is 0.
        ramp_end: b, number of neighbors from which on it is 1.

    Source: docs/proofs/user_level.md#one-radius-filter.

    Example:
        >>> filtered_mean(torch.tensor([[0.0], [0.5], [1.0], [9.0]]), 1.0, 2.5, 3)["mean"].tolist()
        [0.5]
    """
    points = torch.as_tensor(rows, dtype=torch.float64)
    counts = neighbor_counts(points, pair_radius)
    weights = ramp_weights(counts, ramp_start, ramp_end)
    score = float(counts.sum()) / len(counts)
    return {
        "score": score,
        "counts": counts,
        "weights": weights,
        "mean": weighted_mean(points, weights),
    }


def filter_coefficient_two_radius(
    n: int, score_floor: float, ramp_end: int | None = None
) -> float:
    """Returns 2 (1 + (n - M)/(b - a))/M, M = ceil(H), in units of 2 tau, for a filter of radius 2 tau.

    These are the paper's radii. Rounded up.

    Args:
        n: users, >= 4; public.
        score_floor: H in (a, n]; at least one of the two scores is >= H.
        ramp_end: b, integer in (a, M - 1]; default M - 1, the best.

    Raises:
        ConditionError: no such b.
        ValueError: an argument is out of range.

    Guarantee: as `filter_coefficient`; a pair within tau of a third row must be within the filter's radius.

    Source: docs/proofs/user_level.md#two-radius-filter.

    Example:
        >>> round(filter_coefficient_two_radius(1000, 666.0), 6)
        0.0091
    """
    M = math.ceil(_score(n, score_floor))
    if ramp_start(n) >= M - 1:
        raise ConditionError(
            f"score_floor must be > {math.floor(ramp_start(n)) + 1} for n={n} (got {score_floor:g})"
        )
    a, b = _ramp(n, M - 1 if ramp_end is None else ramp_end)
    if b > M - 1:
        raise ValueError(f"ramp_end must be <= ceil(score_floor) - 1 = {M - 1} (got {b})")
    return 2 * (1 + (n - M) / (b - a)) / M * _UP


def bernoulli_mismatch(count: int, probability: float, failure: float) -> int:
    """Returns the smallest k with P[Bin(count, probability) > k] <= failure, never less.

    Args:
        count: N_0 >= 0, users whose membership may differ.
        probability: in [0, 1], that it does.
        failure: zeta in (0, 1).

    Source: docs/proofs/user_level.md#random-membership.

    Example:
        >>> bernoulli_mismatch(60, 0.02, 1e-9)
        12
    """
    count = check.count(count=count)
    p = check.between(0.0, 1.0, probability=probability)
    failure = check.open_interval(0.0, 1.0, failure=failure)
    k = max(0, min(count, int(scipy.stats.binom.isf(failure, count, p)))) if count and p else 0

    def exceeds(k: int) -> bool:
        # PRIVACY: an isf that is one too small would hide mismatches (test_mismatches_are_counted_exactly)
        return upper_tail(k + 1, count, p) > failure

    while k < count and exceeds(k):
        k += 1
    while k > 0 and not exceeds(k - 1):
        k -= 1
    return k


def bernoulli_sensitivity(
    n: int, score_floor: float, ramp_end: int, failure: float, pair_radius: float
) -> float:
    """Returns Delta_B = 4 tau (1 + k)/M of the paper's filter, whose weights are probabilities; rounded up.

    Users enter the mean independently with probability w_j (neighbors within 2 tau). Among the n - M users whose
    probability may differ, more than k enter on one side only with probability at most zeta under the maximal coupling.

    Args:
        n: users; public.
        score_floor: H; ceil(H) >= ramp_end + 1.
        ramp_end: b.
        failure: zeta in (0, 1), of one step; the T steps of a run add T zeta to delta.
        pair_radius: tau > 0.

    Raises:
        ConditionError: ceil(H) < ramp_end + 1.

    Source: docs/proofs/user_level.md#random-membership.

    Example:
        >>> round(bernoulli_sensitivity(10**4, 8000.0, 6666, 1e-12, 1.0) * 10**4, 1)
        80.0
    """
    (a, b), M = _ramp(n, ramp_end), math.ceil(_score(n, score_floor))
    tau = check.positive(pair_radius=pair_radius)
    if b >= M:
        raise ConditionError(f"score_floor must be > ramp_end={b} (got {score_floor:g})")
    return 4 * tau * (1 + bernoulli_mismatch(n - M, min(1.0, _UP / (b - a)), failure)) / M * _UP


def _ramp(n: int, ramp_end: int) -> tuple[float, int]:
    """Returns a and the checked b; b = n would let a user without missing neighbors change its weight."""
    a = ramp_start(n)
    b = check.positive_count(ramp_end=ramp_end)
    if not a < b < n:
        raise ValueError(
            f"ramp_end must be an integer in ((n+1)/2, n-1] = ({a:g}, {n - 1}] (got {b})"
        )
    return a, b


def _score(n: int, score_floor: float) -> float:
    H = check.finite(score_floor=score_floor)
    if not ramp_start(n) < H <= n:
        raise ConditionError(
            f"score_floor must be in ((n+1)/2, n] = ({ramp_start(n):g}, {n}] (got {H:g})"
        )
    return H


def ball_marginal_cdf(dim: int, radius: float, value: float) -> float:
    """Returns P[y_1 <= value] = 1/2 + sign(t) I_{(t/r)^2}(1/2, (d+1)/2)/2 for y uniform in the ball.

    Args:
        dim: d >= 1.
        radius: r > 0.
        value: t, any finite number.

    Source: docs/proofs/user_level.md#smoothing.

    Example:
        >>> ball_marginal_cdf(1, 2.0, 1.0)
        0.75
    """
    d, r, t = (
        check.positive_count(dim=dim),
        check.positive(radius=radius),
        check.finite(value=value),
    )
    share = min(1.0, abs(t) / r)
    middle = float(betainc(0.5, (d + 1) / 2, share * share)) / 2
    if middle < 0.25:  # (1 - share)(1 + share) would round a small share away
        return 0.5 + math.copysign(middle, t)
    tail = (
        float(betainc((d + 1) / 2, 0.5, (1 - share) * (1 + share))) / 2
    )  # keeps its digits where it is tiny
    return tail if t < 0 else 1 - tail


def ball_marginal_variance(dim: int, radius: float) -> float:
    """Returns r^2/(d + 2), the variance of a coordinate.

    Example:
        >>> ball_marginal_variance(2, 2.0)
        1.0
    """
    return check.positive(radius=radius) ** 2 / (check.positive_count(dim=dim) + 2)


def smoothing_bias(lipschitz: float, dim: int, radius: float) -> float:
    """Returns G r d/(d + 1) = G E|y|, by which the smoothed loss may exceed the loss.

    Example:
        >>> smoothing_bias(2.0, 3, 2.0)
        3.0
    """
    G, r = check.positive(lipschitz=lipschitz), check.positive(radius=radius)
    return G * r * check.positive_count(dim=dim) / (dim + 1)


def smoothing_smoothness(lipschitz: float, dim: int, radius: float) -> float:
    """Returns G sqrt(d)/r, a Lipschitz constant of the gradient of the smoothed loss.

    Example:
        >>> smoothing_smoothness(1.0, 4, 0.5)
        4.0
    """
    return (
        check.positive(lipschitz=lipschitz)
        * math.sqrt(check.positive_count(dim=dim))
        / check.positive(radius=radius)
    )


class PaperSchedule(NamedTuple):
    """The numbers of Theorem 4.1, constants 1; the radius is of a smoothing that no optimizer does."""

    smoothing_radius: float
    lr: float
    pair_radius: float
    default_steps: int


class LocalizedRadii(NamedTuple):
    """Sizes of the phases and the paper's bounds on the distance at which each starts."""

    phases_count: int
    phase_users: tuple[int, ...]
    radii: tuple[float, ...]


def schedule_paper(
    n_users: int,
    items_per_user: int,
    dim: int,
    epsilon: float,
    delta: float,
    lipschitz: float,
    radius: float,
    steps: int,
) -> PaperSchedule:
    """Returns the schedule of Theorem 4.1 with its hidden constants at 1: for reference, no noise level follows.

    r = d^(1/4) R/sqrt(T), eta = (R/G) min{sqrt(m) n eps/(T sqrt(d) L), T^(-3/4), sqrt(nm)/T}, L = log(mnd/delta),
    tau = G log(ndm e^eps T/delta)/sqrt(m), default T = (mn)^2 + ceil(mn sqrt(d)).

    Source: Asi and Liu, Theorem 4.1; docs/proofs/user_level.md#distances-of-phases.

    Example:
        >>> schedule_paper(100, 5, 10, 1.0, 1e-6, 1.0, 1.0, 1000).default_steps
        251582
    """
    n = check.positive_count(n_users=n_users)
    m = check.positive_count(items_per_user=items_per_user)
    d = check.positive_count(dim=dim)
    T = check.positive_count(steps=steps)
    eps = check.positive(epsilon=epsilon)
    delta = check.open_interval(0.0, 1.0, delta=delta)
    G = check.positive(lipschitz=lipschitz)
    R = check.positive(radius=radius)
    log_items = math.log(m) + math.log(n) + math.log(d) - math.log(delta)
    rates = (
        math.sqrt(m) * n * eps / (T * math.sqrt(d) * log_items),
        T**-0.75,
        math.sqrt(n * m) / T,
    )
    return PaperSchedule(
        smoothing_radius=d**0.25 * R / math.sqrt(T),
        lr=R / G * min(rates),
        pair_radius=G * (log_items + eps + math.log(T)) / math.sqrt(m),
        default_steps=(m * n) ** 2 + math.ceil(m * n * math.sqrt(d)),
    )


def user_localized_schedule(
    n_users: int,
    items_per_user: int,
    dim: int,
    epsilon: float,
    delta: float,
    lipschitz: float,
    strong_convexity: float,
    rate_constant: float = 4.0,
    phases: int | None = None,
) -> LocalizedRadii:
    """Returns phases and radii of Algorithm 4 as published: the radii are not capped, and nothing is calibrated.

    k = max(1, ceil(log2 log2(mn))), n_i = n/2^(k+1-i), E_i = (4 C^2 G^2/mu)(1/(n_i m) + d log^2(n_i d m/delta)/(n_i^2
    eps^2 m)), D_i = 16 E_i ((2G^2/mu)/(16 E_0))^(1/2^i), Rhat_j = sqrt(2 D_{j-1}/mu). Use min(Rhat_j, R, 2G/mu);
    `plan_phases` has bounds with explicit constants in place of C.

    Args:
        n_users: n; phase j has floor(n_j) of them, the smallest first.
        items_per_user: m.
        dim: d.
        epsilon: of each phase, hence of the run.
        delta: of each phase.
        lipschitz: G.
        strong_convexity: mu.
        rate_constant: C, the hidden constant of Theorem 4.1.
        phases: k; default as above.

    Source: Asi and Liu, Theorem 4.11; docs/proofs/user_level.md#distances-of-phases.

    Example:
        >>> user_localized_schedule(4096, 4, 10, 2.0, 1e-6, 1.0, 1.0).phase_users
        (256, 512, 1024, 2048)
    """
    n = check.positive_count(n_users=n_users)
    m = check.positive_count(items_per_user=items_per_user)
    d = check.positive_count(dim=dim)
    C = check.positive(rate_constant=rate_constant)
    eps = check.positive(epsilon=epsilon)
    delta = check.open_interval(0.0, 1.0, delta=delta)
    G = check.positive(lipschitz=lipschitz)
    mu = check.positive(strong_convexity=strong_convexity)
    k = default_phases(n * m) if phases is None else check.positive_count(phases=phases)

    def error(i: int) -> float:
        size = n / 2 ** (k + 1 - i)
        private = d * math.log(size * d * m / delta) ** 2 / (size**2 * eps**2 * m)
        bound: float = 16 * 4 * C**2 * G**2 / mu * (1 / (size * m) + private)
        return bound

    gaps = [error(i) * (2 * G**2 / mu / error(0)) ** (0.5**i) for i in range(k)]
    sizes = tuple(n // 2 ** (k + 1 - j) for j in range(1, k + 1))
    return LocalizedRadii(k, sizes, tuple(math.sqrt(2 * gap / mu) for gap in gaps))


def published_noise_std(
    n: int, steps: int, epsilon: float, delta: float, pair_radius: float
) -> float:
    """Returns the noise of the paper, for comparison: it is NOT a proved calibration, and no optimizer accepts it.

    sigma^2 = 8 tau^2 T log(e^eps T/delta) log(e^(eps/2)/delta)/(n eps)^2. Warns.

    Source: docs/errata.md, paper 3, E2 and E4.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     round(published_noise_std(2000, 100, 1.0, 1e-6, 1.0) * 2000)
        472
    """
    n = check.positive_count(n=n)
    T = check.positive_count(steps=steps)
    tau = check.positive(pair_radius=pair_radius)
    eps = check.positive(epsilon=epsilon)
    log_delta = math.log(check.open_interval(0.0, 1.0, delta=delta))
    warn("the published noise is not a proved calibration (errata E2, E4); for comparison only")
    logs = (eps + math.log(T) - log_delta) * (eps / 2 - log_delta)
    return math.sqrt(8 * T * logs) * tau / (n * eps)


def clipping_noise_std(
    n_users: int, steps: int, epsilon: float, delta: float, clip: float
) -> float:
    """Returns the noise of T full-batch means of clipped users' gradients, all of (epsilon, delta) spent on them.

    Under replace_one. Source: docs/proofs/user_level.md#when-the-filter-wins.

    Example:
        >>> round(clipping_noise_std(2000, 100, 1.0, 1e-6, 1.0) * 2000)
        84
    """
    return 2 * clip / n_users * math.sqrt(steps) / gaussian_mu(epsilon, delta)


def break_even_clip(plan: UserFilter, epsilon: float, delta: float) -> float:
    """Returns the C at which full-batch clipping of users needs the noise of a filter, under replace_one.

    Source: docs/proofs/user_level.md#when-the-filter-wins.
    """
    return plan.noise_std / clipping_noise_std(plan.n_users, plan.steps, epsilon, delta, 1.0)
