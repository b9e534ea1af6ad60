"""Clipping with k moments: the bias it causes, the threshold that balances bias and noise, and the noise of a mean.

A gradient g with E||g||^k <= r^k is clipped to g min(1, C/||g||). The mean moves by at most

    B(C) = beta_k r^k / C^(k-1),    beta_k = (k-1)^(k-1) / k^k,

since ||E g - E clip(g)|| <= E(||g|| - C)_+ and (x - C)/x^k is largest at x = kC/(k-1). A two-point law attains it for
C >= (k-1) r/k, so that no better constant exists. The noise grows with C; the two thresholds below balance the two.

Differs from the paper (Lowy and Razaviyayn, arXiv 2209.07403) in: 1. the bias constant of its Lemma 6, 1/(k-1), is
(k/(k-1))^k in [e, 4] times too large for k >= 2 (mode "paper" keeps it); 2. noise is stated by rho-zCDP under a named
adjacency, the paper's "epsilon" is sqrt(2 rho).

Everything is evaluated in logarithms, for k from 1 + 1e-15 to 1e6.

Proofs: docs/proofs/heavy_tailed.md#clipping-bias,
docs/proofs/heavy_tailed.md#best-clip, docs/proofs/heavy_tailed.md#noise-of-a-mean.
"""

from __future__ import annotations

import math

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import sensitivity_factor
from torch_dpsco.accounting.analysis.rounding import scaled_up
from torch_dpsco.errors import InfeasibleError

# PRIVACY: l2 sensitivity of a sum of rows clipped at 1 (test_one_record_moves_a_clipped_mean_by_no_more_than_declared).

_SMALLEST, _LARGEST = 2.0**-960, 2.0**960  # no result is subnormal in between


def safe_exp(exponent: float) -> float:
    """Returns e^x, infinite where that exceeds floating point (math.exp raises)."""
    return math.exp(exponent) if exponent < 709.0 else math.inf


def clip_bias(moment: float, moment_order: float, clip: float, mode: str = "tight") -> float:
    """Returns the bound B(C) on the norm of the bias of a clipped mean.

    Args:
        moment: r > 0 with E||g||^k <= r^k.
        moment_order: k > 1.
        clip: C > 0.
        mode: "tight" (sharp constant) or "paper" (constant 1/(k-1)).

    Returns:
        beta_k r^k / C^(k-1); inf beyond floating point.

    Source:
        docs/proofs/heavy_tailed.md#clipping-bias (Lemma 6).

    Example:
        >>> round(clip_bias(1.0, 2.0, 0.5), 12), round(clip_bias(1.0, 2.0, 0.5, mode="paper"), 12)
        (0.5, 2.0)
    """
    check.choice(("tight", "paper"), mode=mode)
    k = check.order(moment_order=moment_order)
    log_r = math.log(check.positive(moment=moment))
    constant = _log_bias_constant(k) if mode == "tight" else -math.log(k - 1)
    return safe_exp(constant + log_r + (k - 1) * (log_r - math.log(check.positive(clip=clip))))


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
    k = check.order(moment_order=moment_order)
    log_r = math.log(check.positive(moment=moment))
    log_clip = log_r + _log_ratio(k) - math.log(check.positive(noise_weight=noise_weight)) / k
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
    k = check.order(moment_order=moment_order)
    log_r = math.log(check.positive(moment=moment))
    log_weights = math.log(check.positive(bias_weight=bias_weight)) - math.log(
        check.positive(noise_weight=noise_weight)
    )
    log_clip = log_r + (math.log(k - 1) + 2 * _log_bias_constant(k) + log_weights) / (2 * k)
    return _finite_clip(log_clip, noise_weight)


def mean_noise_std(
    clip: float,
    batch_size: int,
    rho: float,
    steps: int = 1,
    adjacency: str = "replace_one",
    *,
    non_private: bool = False,
) -> float:
    """Returns the std of the Gaussian noise on a mean of clipped rows, for `steps` means of the same rows.

    sigma = S sqrt(steps / (2 rho)), S = 2C/s (replace_one) or C/s (zero_out, add_remove), rounded up.

    Args:
        clip: C > 0.
        batch_size: s >= 1, the public divisor (not the realized number of rows).
        rho: > 0, zCDP of all `steps` means together.
        steps: T >= 1 means of the SAME rows; 1 if each row is used once.
        adjacency: "replace_one", "zero_out" or "add_remove".
        non_private: allows rho = inf, that is no noise.

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
    if check.positive(rho=rho, allow_inf=non_private) == math.inf:
        return 0.0
    # PRIVACY: rounded up, never down (test_the_noise_of_a_mean_is_never_below_its_exact_value).
    return _rounded_up(S * C / s, math.sqrt(T / (2.0 * rho)))


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
    s = check.positive_count(batch_size=batch_size)
    d = check.positive_count(dim=dim)
    return sensitivity_factor(adjacency) / 2.0 * math.sqrt(2.0 * d / check.positive(rho=rho)) / s


def exchange_rate_accelerated(
    n: int, dim: int, steps: int, rho: float, adjacency: str = "replace_one"
) -> float:
    """Returns a = 4 sqrt(d T / (3 rho)) / n of AcceleratedSGD, n = T floor(n/T) records used.

    Source:
        docs/proofs/heavy_tailed.md#exchange-rates.

    Example:
        >>> round(exchange_rate_accelerated(n=1000, dim=3, steps=4, rho=1.0), 12)
        0.008
    """
    s = _batch(n, steps)
    T = float(steps)
    return 2.0 * math.sqrt(2.0 / (3.0 * T)) * exchange_rate_mean(s, dim, rho, adjacency)


def exchange_rate_phase(n: int, dim: int, rho: float, adjacency: str = "replace_one") -> float:
    """Returns a = sqrt(8 d / rho) / m of a multi-pass phase on m records.

    Source:
        docs/proofs/heavy_tailed.md#exchange-rates.

    Example:
        >>> round(exchange_rate_phase(n=100, dim=2, rho=1.0), 12)
        0.04
    """
    return 2.0 * exchange_rate_mean(n, dim, rho, adjacency)


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


def _batch(n: int, steps: int) -> int:
    if check.positive_count(steps=steps) > check.positive_count(n=n):
        raise ValueError(
            f"steps must be <= n={n}, for batches that use each record once (got {steps})"
        )
    return n // steps


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
