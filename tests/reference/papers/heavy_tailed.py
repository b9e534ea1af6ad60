"""Formulas of the heavy-tailed and shuffle papers that the package does not use, for vectors and comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from tests.reference.papers import localized
from tests.reference.papers.localized import _gap
from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import sensitivity_factor
from torch_dpsco.algorithms import localized_numbers
from torch_dpsco.algorithms.heavy_tailed_numbers import (
    OnePass,
    _log_bias_constant,
    _rounded_up,
    accelerated_factor,
    accelerated_plan,
    clip_bias,
    clip_threshold_square,
    exchange_rate_mean,
    mean_noise_std,
    safe_exp,
    strongly_convex_coefficients,
)
from torch_dpsco.algorithms.localized_numbers import (
    LocalizedPhase,
    PhaseTask,
    _parts,
    halved_sizes,
)
from torch_dpsco.algorithms.mechanisms import FloatArray, _counts, _law, _points
from torch_dpsco.algorithms.oracles import clipped_rows, medians
from torch_dpsco.errors import AdjacencyError, ConditionError
from torch_dpsco.noise import Source
from torch_dpsco.shuffle_model import VECTORS, ShuffleParameters, shuffle_parameters
from torch_dpsco.shuffle_model.oracles import (
    binomial_noise,
    centered_sum,
    grid_values,
    round_randomly,
    uniform,
)


def _batch(n: int, steps: int) -> int:
    """Returns floor(n/T)."""
    return OnePass(n=n, dim=1, rho=1.0, moment=1.0, moment_order=2.0).batch_size(steps)


def clip_bias_constant(moment_order: float) -> float:
    """Returns beta_k = (k-1)^(k-1)/k^k, the sharp constant of the clipping bias.

    Args:
        moment_order: k > 1.

    Source:
        docs/proofs/heavy_tailed.md#clipping-bias (Lemma 6).

    Example:
        >>> clip_bias_constant(2.0)
        0.25
    """
    return safe_exp(_log_bias_constant(check.order(moment_order=moment_order)))


def coordinatewise_noise_std(
    batch_size: int,
    groups: int,
    clip: float,
    dim: int,
    rho: float,
    adjacency: str = "replace_one",
) -> float:
    """Returns the std of the noise on a coordinate-wise median of means, or on each of its group means.

    One record moves one group mean, by at most 2 tau in each of d coordinates over the group size; the median of means
    moves by no more. sigma = 2 tau sqrt(d) / floor(s/m) / sqrt(2 rho), rounded up.

    Args:
        batch_size: s >= 1 rows; those beyond m floor(s/m) are dropped.
        groups: m >= 1 groups of floor(s/m) rows, m <= s.
        clip: tau > 0, of each coordinate.
        dim: d >= 1.
        rho: > 0, zCDP of the mean.
        adjacency: "replace_one", or "zero_out" (half of the noise).

    Raises:
        AdjacencyError: add_remove: the groups are cut by position, and a removal shifts all of them.

    Guarantee:
        rho-zCDP under the adjacency, whether noise is added after the median or, independently, to each group mean
        before it (each record is in one group, the median is post-processing). One row per record.

    Source:
        docs/proofs/heavy_tailed.md#median-of-means (Algorithm 12).

    Example:
        >>> round(coordinatewise_noise_std(batch_size=8, groups=4, clip=1.0, dim=2, rho=1.0), 6)
        1.0
    """
    s, m = check.positive_count(batch_size=batch_size), check.positive_count(groups=groups)
    if m > s:
        raise ValueError(f"groups must be <= batch_size={s} (got {m})")
    S = sensitivity_factor(adjacency)
    if adjacency == "add_remove":
        raise AdjacencyError(
            "add_remove has no guarantee for groups cut by position (a removal shifts all of them): use replace_one "
            "or zero_out"
        )
    spread = S * check.positive(clip=clip) * math.sqrt(check.positive_count(dim=dim)) / (s // m)
    # PRIVACY: rounded up; groups of floor(s/m) rows (test_the_noise_of_a_median_covers_the_worst_group).
    return _rounded_up(spread, math.sqrt(1.0 / (2.0 * check.positive(rho=rho))))


def coordinatewise_clip(
    batch_size: int, groups: int, dim: int, rho: float, moment: float, moment_order: float
) -> float:
    """Returns the default tau of the median of means: the square rule with u = d 4^(k-1) and q = d sigma^2/tau^2.

    Args:
        batch_size: s.
        groups: m <= s.
        dim: d.
        rho: > 0.
        moment: gamma > 0 with E|g_j - E g_j|^k <= gamma^k for each coordinate. Also |E g_j| <= tau/2 is assumed: take
            the maximum with twice a public bound on the means, if there is one.
        moment_order: k > 1.

    Source:
        docs/proofs/heavy_tailed.md#accuracy-of-medians-of-means.

    Example:
        >>> round(coordinatewise_clip(batch_size=1000, groups=1, dim=10, rho=0.5, moment=1.0, moment_order=2.0), 3)
        8.891
    """
    k = check.order(moment_order=moment_order)
    std = coordinatewise_noise_std(batch_size, groups, 1.0, dim, rho)
    # d cancels out of both weights; 4^(k-1) is taken out of the logarithm, so that large k do not overflow
    base = clip_threshold_square(moment, k, 1.0, std**2)
    return base * safe_exp((k - 1) * math.log(2.0) / k)


def coordinatewise_groups(dim: int, failure: float) -> int:
    """Returns the number of groups m = ceil(8 log(d/zeta)) of a median of means that holds for all coordinates.

    Args:
        dim: d >= 1.
        failure: zeta in (0, 1).

    Source:
        docs/proofs/heavy_tailed.md#accuracy-of-medians-of-means.

    Example:
        >>> coordinatewise_groups(dim=10, failure=0.1)
        37
    """
    ratio = math.log(check.positive_count(dim=dim)) - math.log(
        check.open_interval(0.0, 1.0, failure=failure)
    )
    return max(1, math.ceil(8.0 * ratio))


def strongly_convex_clip(
    *,
    strong_convexity: float,
    smoothness: float,
    steps: int,
    n: int,
    dim: int,
    rho: float,
    moment: float,
    moment_order: float,
    adjacency: str = "replace_one",
) -> float:
    """Returns the threshold that minimizes u_B B(C)^2 + u_S d sigma(C)^2.

    Args:
        strong_convexity: mu.
        smoothness: beta.
        steps: T.
        n: records.
        dim: d.
        rho: > 0.
        moment: r_k.
        moment_order: k > 1.
        adjacency: of rho.

    Source:
        docs/proofs/heavy_tailed.md#averaged-steps (square rule with q = u_S 2 d T^2/(rho n^2)).

    Example:
        >>> round(strongly_convex_clip(strong_convexity=1.0, smoothness=1.0, steps=1, n=100, dim=1, rho=0.5,
        ...                            moment=1.0, moment_order=2.0), 6)
        3.535534
    """
    u = strongly_convex_coefficients(
        strong_convexity=strong_convexity, smoothness=smoothness, steps=steps
    )
    data = OnePass(
        n=n,
        dim=dim,
        rho=rho,
        moment=moment,
        moment_order=moment_order,
        adjacency=adjacency,
    )
    weight = u.noise * data.noise_variance(data.batch_size(steps), 1.0)
    return clip_threshold_square(moment, moment_order, u.bias, weight)


def boosted_copies(failure: float, phases: int, smallest_group: int) -> int:
    """Returns the smallest odd J with `boosted_failure` at most zeta.

    Args:
        failure: zeta in (0, 1).
        phases: I.
        smallest_group: m_I >= 16, records per group of the last phase.

    Raises:
        InfeasibleError: groups of fewer than 16 records.

    Source:
        docs/proofs/heavy_tailed.md#boosted-phases.

    Example:
        >>> boosted_copies(failure=0.05, phases=4, smallest_group=100)
        43
    """
    zeta = check.open_interval(0.0, 1.0, failure=failure)
    exponent = math.log(check.positive_count(phases=phases) / zeta)
    needed = max(1, math.ceil(exponent / (2.0 * _gap(smallest_group) ** 2)))
    return needed + 1 - needed % 2


def proximal_pl_clip(
    *,
    steps: int,
    n: int,
    dim: int,
    rho: float,
    moment: float,
    moment_order: float,
    adjacency: str = "replace_one",
) -> float:
    """Returns the threshold that minimizes 3 B(C)^2 + 2 d sigma(C)^2.

    Args:
        steps: T.
        n: records.
        dim: d.
        rho: > 0.
        moment: r_k.
        moment_order: k > 1.
        adjacency: of rho.

    Source:
        docs/proofs/heavy_tailed.md#proximal-steps (square rule with u_B = 3 and q = 4 d T^2/(rho n^2)).

    Example:
        >>> round(proximal_pl_clip(steps=1, n=100, dim=1, rho=0.5, moment=1.0, moment_order=2.0), 6)
        3.912711
    """
    data = OnePass(
        n=n,
        dim=dim,
        rho=rho,
        moment=moment,
        moment_order=moment_order,
        adjacency=adjacency,
    )
    return clip_threshold_square(
        moment, moment_order, 3.0, 2.0 * data.noise_variance(data.batch_size(steps), 1.0)
    )


def reduction_sizes(n: int) -> list[int]:
    """Returns the published part sizes floor(2^(t-2) n/log2 n), t = 1..M, M = max(1, ceil(log2 log2 n)).

    Args:
        n: >= 2.

    Source:
        docs/proofs/heavy_tailed.md#reduction-for-strong-convexity.

    Example:
        >>> reduction_sizes(12345)
        [454, 908, 1816, 3633]
    """
    parts, log_n = _parts(n), math.log2(n)
    return [math.floor(2.0 ** (t - 2) * n / log_n) for t in range(1, parts + 1)]


def quantile_probabilities(
    values: ArrayLike, grid: ArrayLike, quantile: float, epsilon: float
) -> FloatArray:
    """Returns the exact law for the score |count - rank|, computed in log space: the formula, not what is drawn from.

    Args:
        values: (n,) numbers; NaN and inf count as above every grid point.
        grid: (K,) increasing public numbers.
        quantile: in [0, 1]; the target rank is quantile * n.
        epsilon: > 0.

    Returns:
        (K,) probabilities.

    Raises:
        ValueError: grid, quantile or epsilon is out of range.

    Source: docs/proofs/heavy_tailed.md#private-quantile.

    Example:
        >>> quantile_probabilities([1.0, 2.0, 3.0], [0.5, 2.5], 2 / 3, epsilon=2.0).round(4).tolist()
        [0.1192, 0.8808]
    """
    points = _points(grid)
    numbers = np.asarray(values, dtype=np.float64)
    rank = check.between(0.0, 1.0, quantile=quantile) * len(numbers)
    return _law(np.abs(_counts(numbers, points) - rank), check.positive(epsilon=epsilon))


def randomize_scalar(
    values: Tensor, upper: float, parameters: ShuffleParameters, generator: Source
) -> Tensor:
    """Returns the bits of each user (Algorithm 14, randomizer), in the order in which they were made: not shuffled.

    Args:
        values: (n, ...) numbers in [0, upper]; others are clamped.
        upper: L > 0.
        parameters: g, b, p.
        generator: of noise; also the rounding comes from it.

    Returns:
        (n, ..., g + b) bool. For tests and real shufflers: memory for every bit.
    """
    upper, grid = check.positive(upper=upper), parameters.grid
    ones = round_randomly(grid_values(values, upper, grid), generator)
    value_bits = torch.arange(grid, device=values.device) < ones[..., None]
    drawn = uniform((*values.shape, parameters.noise_bits), generator).to(values.device)
    noise_bits = drawn < parameters.noise_probability
    return torch.cat([value_bits, noise_bits], dim=-1)


def analyze_scalar_sum(
    count: int, n: int, grid: int, noise_bits: int, noise_probability: float, upper: float
) -> float:
    """Returns (L / g) (count - p b n), the estimate of the sum of n numbers in [0, L] (Algorithm 14, analyzer).

    Args:
        count: ones among the n (g + b) bits, >= 0.
        n: users, >= 1.
        grid: g >= 1.
        noise_bits: b >= 0.
        noise_probability: p in (0, 1).
        upper: L > 0.

    Source: docs/proofs/heavy_tailed.md#shuffled-sums.

    Example:
        >>> round(analyze_scalar_sum(count=36, n=10, grid=4, noise_bits=3, noise_probability=0.136, upper=3.349), 5)
        26.72502
    """
    n, sizes = check.positive_count(n=n), ShuffleParameters(grid, noise_bits, noise_probability)
    excess = check.count(count=count) - sizes.noise_probability * (sizes.noise_bits * n)
    return check.positive(upper=upper) / sizes.grid * excess


def scalar_sum_variance(
    n: int, grid: int, noise_bits: int, noise_probability: float, upper: float
) -> float:
    """Returns (L / g)^2 (n b p (1 - p) + n / 4), a bound of the variance of Algorithm 14's estimate.

    Args:
        n: users, >= 1.
        grid: g >= 1.
        noise_bits: b >= 0.
        noise_probability: p in (0, 1).
        upper: L > 0.

    Source: docs/proofs/heavy_tailed.md#shuffled-sums.

    Example:
        >>> scalar_sum_variance(n=4, grid=2, noise_bits=3, noise_probability=0.5, upper=2.0)
        4.0
    """
    n, sizes = check.positive_count(n=n), ShuffleParameters(grid, noise_bits, noise_probability)
    p = sizes.noise_probability
    return (check.positive(upper=upper) / sizes.grid) ** 2 * (
        n * sizes.noise_bits * p * (1.0 - p) + n / 4.0
    )


def scalar_sum(
    values: Tensor,
    upper: float,
    parameters: ShuffleParameters,
    generator: Source,
    *,
    messages: bool = False,
) -> Tensor:
    """Returns the count of ones of Algorithm 14, per trailing index: all that an analyzer behind a shuffler learns.

    Args:
        values: (n, ...) numbers in [0, upper]; others are clamped.
        upper: L > 0.
        parameters: g, b, p.
        generator: of noise; also the rounding comes from it.
        messages: whether to make every bit, and count; else the count is drawn at once, with the same law.

    Returns:
        (...) int64.

    Guarantee: of the parameters, see `shuffle_sizing`: replace-one or zero-out, n public, honest users.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> count = scalar_sum(torch.tensor([0.5, 1.0]), 1.0, ShuffleParameters(grid=2, noise_bits=0), generator)
        >>> int(count)
        3
    """
    if messages:
        return randomize_scalar(values, upper, parameters, generator).sum(dim=(0, -1))
    ones = round_randomly(
        grid_values(values, check.positive(upper=upper), parameters.grid), generator
    )
    noise = binomial_noise(
        len(values) * parameters.noise_bits,
        parameters.noise_probability,
        tuple(values.shape[1:]),
        generator,
    )
    return ones.sum(0) + noise


def vector_sum(
    vectors: Tensor,
    bound: float,
    parameters: ShuffleParameters,
    generator: Source,
    *,
    messages: bool = False,
) -> Tensor:
    """Returns the estimate of the sum of vectors of L2 norm at most D (Algorithm 11).

    Args:
        vectors: (n, d) floating, each of norm at most `bound`; THE CALLER CLIPS (see `shuffle_model.ShuffledClipped`).
        bound: D > 0.
        parameters: g, b, p of each coordinate.
        generator: of noise; also the rounding comes from it.
        messages: whether to make every bit.

    Returns:
        (d,) float64, unbiased.

    Source: docs/proofs/heavy_tailed.md#shuffled-sums.

    Example:
        >>> vectors = torch.tensor([[1.0, -1.0], [0.0, 0.5]])
        >>> vector_sum(vectors, 2.0, ShuffleParameters(grid=8, noise_bits=0), torch.Generator()).tolist()
        [1.0, -0.5]
    """
    bound = check.positive(bound=bound)
    count = scalar_sum(
        vectors.double() + bound, 2.0 * bound, parameters, generator, messages=messages
    )
    return centered_sum(count, len(vectors), bound, parameters)


def vector_parameters_paper(n: int, dim: int, epsilon: float, delta: float) -> ShuffleParameters:
    """Returns the closed-form sizes of the literature: valid, and about 10^6 times more noise than needed.

    g = ceil(max(2 sqrt(n), d, 4)), b = ceil(24e4 g^2 log(4 (d^2 + 1) / delta)^2 / (epsilon^2 n)), p = 1/4. Accepted
    where the claim behind it was checked, epsilon <= 10 and delta <= 0.1, and if the numeric accountant confirms it.
    (The claim for one number fails elsewhere: at g = 1, epsilon = 15, delta = 0.49 the exact delta is 0.517.)

    Args:
        n: public number of users, >= 1.
        dim: d >= 1.
        epsilon: in (0, 10].
        delta: in (0, 0.1].

    Raises:
        ConditionError: epsilon or delta out of that range, or the accountant does not confirm.

    Source: docs/proofs/heavy_tailed.md#sizes-of-shuffled-sums.

    Example:
        >>> vector_parameters_paper(n=100, dim=10, epsilon=2.859, delta=1e-6)
        ShuffleParameters(grid=20, noise_bits=46122780, noise_probability=0.25)
    """
    n, dim = check.positive_count(n=n), check.positive_count(dim=dim)
    epsilon, delta = check.positive(epsilon=epsilon), check.open_interval(0.0, 1.0, delta=delta)
    if epsilon > 10 or delta > 0.1:
        raise ConditionError(
            f"epsilon must be <= 10 and delta <= 0.1 for the closed form (got {epsilon}, {delta})"
        )
    grid = math.ceil(max(2.0 * math.sqrt(n), dim, 4.0))
    bits = math.ceil(
        24e4 * grid**2 * math.log(4.0 * (dim**2 + 1) / delta) ** 2 / (epsilon**2 * n)
    )
    found = ShuffleParameters(grid, bits, 0.25)
    # what holds for fewer bits holds for more: sizes from the accountant are enough to confirm
    enough = shuffle_parameters(
        VECTORS, n, dim, epsilon, delta, grid=grid, noise_probability=0.25
    )
    if enough.noise_bits > bits:
        # PRIVACY: (test_the_closed_form_is_refused_where_its_claim_was_not_confirmed)
        raise ConditionError(
            f"epsilon must be larger: the accountant needs {enough.noise_bits} noise bits (got {bits})"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class PublishedPhase(LocalizedPhase):
    """A phase within a ball around its start."""

    radius: float


def localized_schedule_paper(
    *,
    n: int,
    dim: int,
    paper_epsilon: float,
    moment_order: float,
    moment_2k: float,
    lr: float,
    power: float = 1.0,
) -> tuple[PublishedPhase, ...]:
    """Returns the phases of the paper, with constants 1 in its orders, replace_one and no cap on the steps.

    eta_i = 4^-i eta, lambda_i = 1/(eta_i n_i^p), T_i = ceil(n_i^p log n), C_i = rt_2k (eps n_i/sqrt(d log n))^(1/k),
    R_i = 2 rt_2k n^(q/(2k))/lambda_i with q = 1/2 + log(ell)/log(n).

    Args:
        n: records, >= 2.
        dim: d.
        paper_epsilon: sqrt(2 rho); NOT an epsilon of differential privacy.
        moment_order: k.
        moment_2k: rt_2k.
        lr: eta > 0.
        power: p >= 1.

    Guarantee:
        rho-zCDP under replace_one with rho = paper_epsilon^2/2, as `localized_schedule_ballfree`.

    Source:
        docs/proofs/heavy_tailed.md#published-schedules.

    Example:
        >>> phases = localized_schedule_paper(n=1000, dim=1, paper_epsilon=1.614, moment_order=2.0, moment_2k=2.253925,
        ...                                   lr=0.1)
        >>> len(phases), phases[0].steps, phases[0].reg
        (9, 3454, 0.08)
    """
    sizes, log_n = halved_sizes(n), math.log(n)
    check.positive_count(dim=dim)
    k, r = check.order(moment_order=moment_order), check.positive(moment_2k=moment_2k)
    eps, eta = check.positive(paper_epsilon=paper_epsilon), check.positive(lr=lr)
    if check.positive(power=power) < 1:
        raise ValueError(f"power must be >= 1 (got {power})")
    reach = 2.0 * r * math.exp((log_n / 2.0 + math.log(len(sizes))) / (2.0 * k))
    phases = []
    for i, size in enumerate(sizes, start=1):
        eta_i, weight = eta * 4.0**-i, float(size) ** power
        C, T = r * (eps * size / math.sqrt(dim * log_n)) ** (1.0 / k), math.ceil(weight * log_n)
        phases.append(
            PublishedPhase(
                index=i,
                n=size,
                batch_size=size,
                clip=C,
                steps=T,
                reg=1.0 / (eta_i * weight),
                radius=reach * eta_i * weight,
                noise_std=mean_noise_std(C, size, eps**2 / 2.0, T),
                error=None,
                lr=eta_i,
            )
        )
    return tuple(phases)


def median_of_means(rows: ArrayLike, groups: int, clip: float) -> Tensor:
    """Returns coordinate-wise medians of the means of m consecutive groups of clipped rows, without noise: (d,).

    Args:
        rows: (B, d); a row that is not finite counts as 0.
        groups: m in 1..B; each group has floor(B / m) rows.
        clip: tau > 0, bound of every coordinate.

    Source: docs/proofs/heavy_tailed.md#median-of-means (Algorithm 12).

    Example:
        >>> median_of_means([[0.0], [2.0], [100.0]], groups=3, clip=5.0).tolist()
        [2.0]
    """
    table = torch.as_tensor(rows, dtype=torch.float64)
    size = len(table) // groups
    return medians(
        clipped_rows([table[: groups * size]], clip).view(groups, size, -1).mean(dim=1)
    )


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


def averaged_clip_paper(data: OnePass, T: int) -> float:
    """Returns the threshold of Theorem 11 with constant 1: r_k (eps^2 n^2/(d T))^(1/(2k)), eps^2 = 2 rho."""
    log_signal = (
        math.log(2.0 * data.rho) + 2.0 * math.log(data.n) - math.log(data.dim) - math.log(T)
    )
    return safe_exp(math.log(data.moment) + log_signal / (2.0 * data.moment_order))


def averaged_steps_paper(data: OnePass, mu: float, beta: float, distance: float) -> int:
    """Returns ceil(2 kappa log(beta D^2 / rate)) with the published rate, of which only the order is stated."""
    kappa = beta / mu
    k = data.moment_order
    noise = math.sqrt(data.dim * kappa / (2.0 * data.rho)) / data.n
    rate = data.moment**2 / mu * (1.0 / data.n + noise ** ((2.0 * k - 2.0) / k))
    return min(data.n, math.ceil(2.0 * kappa * math.log(max(math.e, beta * distance**2 / rate))))


def proximal_clip_paper(data: OnePass, T: int) -> float:
    """Returns the threshold of Theorem 48 with constant 1: r_k (eps n/(sqrt(d) T))^(1/k), eps^2 = 2 rho."""
    log_signal = (
        math.log(2.0 * data.rho) / 2.0
        + math.log(data.n)
        - math.log(data.dim) / 2.0
        - math.log(T)
    )
    return safe_exp(math.log(data.moment) + log_signal / data.moment_order)


def flat(planner: Callable[..., Any], inputs: Any = OnePass) -> Callable[..., Any]:
    """Returns a plan that takes the fields of its inputs beside its own keywords."""
    names = {field.name for field in fields(inputs)}

    def planned(**task: Any) -> Any:
        own = {name: value for name, value in task.items() if name in names}
        rest = {name: value for name, value in task.items() if name not in names}
        return planner(inputs(**own), **rest)

    return planned


def accelerated_numbers(**task: Any) -> dict[str, float]:
    """Returns the numbers of an accelerated plan by the letters of the vectors."""
    plan = flat(accelerated_plan)(**task)
    adjacency = task.get("adjacency", "replace_one")
    mean = exchange_rate_mean(task["n"] // plan.steps, task["dim"], task["rho"], adjacency)
    return {
        "a": accelerated_factor(plan.steps) * mean,
        "C": plan.clip,
        "bias": plan.bias,
        "sigma": plan.noise_std,
        "var_total": plan.variance,
        "eta": 1.0 / (2.0 * plan.lr),
        "bound": plan.bound,
    }


localized_schedule = flat(localized.localized_schedule, PhaseTask)
localized_schedule_ballfree = flat(localized_numbers.localized_schedule_ballfree, PhaseTask)
localized_schedule_minibatch = flat(localized_numbers.localized_schedule_minibatch, PhaseTask)
boosted_localized_schedule = flat(localized.boosted_localized_schedule, PhaseTask)
reduction_schedule = flat(localized_numbers.reduction_schedule, PhaseTask)


def clip_bias_bound(
    moment: float, moment_order: float, clip: float, mode: str = "tight"
) -> float:
    """Returns the bound on the bias of a clipped mean, of mode "tight" or with the published constant 1/(k-1).

    Example:
        >>> round(clip_bias_bound(1.0, 2.0, 0.5, mode="paper"), 12)
        2.0
    """
    check.choice(("tight", "paper"), mode=mode)
    bound = clip_bias(moment, moment_order, clip)
    return (
        bound
        if mode == "tight"
        else bound / (moment_order - 1) / clip_bias_constant(moment_order)
    )


def exchange_rate_strongly_convex(
    n: int,
    dim: int,
    steps: int,
    rho: float,
    bias: float,
    noise: float,
    adjacency: str = "replace_one",
) -> float:
    """Returns a = sqrt(2 u_S d / (u_B rho)) T / n of averaged ClippedSGD.

    Args:
        n: records.
        dim: d.
        steps: T.
        rho: > 0.
        bias: u_B of `strongly_convex_coefficients`.
        noise: u_S of the same.
        adjacency: zero_out and add_remove halve a.

    Source:
        docs/proofs/heavy_tailed.md#exchange-rates.

    Example:
        >>> round(exchange_rate_strongly_convex(n=100, dim=2, steps=1, rho=1.0, bias=1.0, noise=1.0), 12)
        0.02
    """
    ratio = check.positive(noise=noise) / check.positive(bias=bias)
    return math.sqrt(ratio) * exchange_rate_mean(_batch(n, steps), dim, rho, adjacency)


def exchange_rate_proximal_pl(
    n: int, dim: int, steps: int, rho: float, adjacency: str = "replace_one"
) -> float:
    """Returns a = sqrt(4 d / (3 rho)) T / n of ProximalSGD.

    Source:
        docs/proofs/heavy_tailed.md#exchange-rates.

    Example:
        >>> round(exchange_rate_proximal_pl(n=100, dim=3, steps=1, rho=1.0), 12)
        0.02
    """
    return math.sqrt(2.0 / 3.0) * exchange_rate_mean(_batch(n, steps), dim, rho, adjacency)
