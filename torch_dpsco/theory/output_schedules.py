"""Regularization and risk of output perturbation: the weights that balance noise against bias.

With the noise z of a release, s = E|z| / Delta <= d / epsilon (K-norm noise) or sqrt(d) sigma (Gaussian), and
v = E|z|^2 / Delta^2 = d (d + 1) / epsilon^2 or d sigma^2, sigma the least Gaussian std at sensitivity 1. A minimizer of
F + (lam/2) |w|^2 has Delta = 2 L / (lam n) if one record is replaced, and

    Lipschitz, projected on B(0, R)    L s Delta                    + lam R^2 / 2
    beta-smooth, not projected         beta v Delta^2 / 2           + lam R^2 / 2
    population                         either + L Delta, the stability of the minimizer.

Mode "tight" takes the lam that minimizes its bound. Mode "paper" has the published schedules, with
q = d / (epsilon n) or sqrt(d) (c + sqrt(c^2 + epsilon)) / (epsilon n), c = `zhao_constant(delta)`.

Differs from the paper in: 1. Delta is that of the loss alone. 2. The noise is bounded on the population loss before
stability is used, so that no Lipschitz constant outside of the ball is needed.

Source: docs/proofs/output.md#risk-of-a-noisy-minimizer, docs/proofs/output.md#published-schedules.
"""

from __future__ import annotations

import math

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_sigma, zhao_constant

__all__ = ["noise_norms", "paper_ratio", "reg_smooth_population", "risk_smooth_population", "risk_strongly_convex"]

_MODES = ("tight", "paper")


def noise_norms(dim: int, epsilon: float, delta: float) -> tuple[float, float]:
    """Returns (s, v), bounds on E|z| and on E|z|^2 for a release with sensitivity 1.

    Args:
        dim: d >= 1.
        epsilon: > 0.
        delta: in [0, 1); 0 means K-norm noise.

    Source: docs/proofs/output.md#risk-of-a-noisy-minimizer

    Example:
        >>> noise_norms(dim=10, epsilon=2.0, delta=0)
        (5.0, 27.5)
    """
    d, epsilon = check.positive_count(dim=dim), check.positive(epsilon=epsilon)
    if check.nonnegative(delta=delta) == 0:
        return d / epsilon, d * (d + 1) / epsilon**2
    sigma = gaussian_sigma(epsilon, delta, 1.0)
    return math.sqrt(d) * sigma, d * sigma**2


def paper_ratio(n: int, dim: int, epsilon: float, delta: float) -> float:
    """Returns q, the noise to size ratio in which the paper states its schedules.

    Raises:
        ValueError: an argument is out of range: delta must be 0 or in (0, 1/2).

    Source: docs/proofs/output.md#published-schedules

    Example:
        >>> paper_ratio(n=1000, dim=10, epsilon=1.0, delta=0)
        0.01
    """
    n, d = check.positive_count(n=n), check.positive_count(dim=dim)
    epsilon = check.positive(epsilon=epsilon)
    if check.nonnegative(delta=delta) == 0:
        return d / (epsilon * n)
    c = zhao_constant(delta)
    return math.sqrt(d) * (c + math.sqrt(c * c + epsilon)) / (epsilon * n)


def reg_smooth_population(
    lipschitz: float, radius: float, smoothness: float, n: int, dim: int, epsilon: float, delta: float,
    mode: str = "tight",
) -> float:  # fmt: skip
    """Returns lam for the population risk of beta-smooth losses.

    The tight one minimizes 2 L^2 / (lam n) + 2 beta L^2 v / (lam n)^2 + lam R^2 / 2: it is the positive root of
    R^2 lam^3 / 2 = 2 L^2 lam / n + 4 beta L^2 v / n^2. The paper's is (beta L^2 / R^2)^(1/3) (q^(2/3) + 1 / sqrt(n)).

    Args:
        lipschitz: L > 0.
        radius: R > 0, of a ball that holds a minimizer of the risk for every data set.
        smoothness: beta > 0.
        n: >= 1.
        dim: d >= 1.
        epsilon: > 0.
        delta: in [0, 1), below 1/2 for mode "paper"; 0 means K-norm noise.
        mode: "tight" or "paper".

    Source: docs/proofs/output.md#risk-of-a-noisy-minimizer

    Example:
        >>> round(reg_smooth_population(1.0, 2.0, 0.25, n=1000, dim=10, epsilon=1.0, delta=0, mode="paper"), 9)
        0.030969665
    """
    scale, n = _cubic_scale(lipschitz, radius, smoothness), check.positive_count(n=n)
    if check.choice(_MODES, mode=mode) == "paper":
        return scale * (math.pow(paper_ratio(n, dim, epsilon, delta), 2 / 3) + 1 / math.sqrt(n))
    # lam^3 = 3 p lam + 2 r, solved by the hyperbolic or the trigonometric formula for its one positive root
    p = 4 * lipschitz**2 / (3 * n * radius**2)
    r = 4 * scale**3 * noise_norms(dim, epsilon, delta)[1] / n**2
    ratio = r / math.pow(p, 1.5)
    if ratio >= 1:
        return 2 * math.sqrt(p) * math.cosh(math.acosh(ratio) / 3)
    return 2 * math.sqrt(p) * math.cos(math.acos(ratio) / 3)


def _cubic_scale(lipschitz: float, radius: float, smoothness: float) -> float:
    ratio = check.positive(lipschitz=lipschitz) / check.positive(radius=radius)
    return math.pow(check.positive(smoothness=smoothness) * ratio * ratio, 1 / 3)


def risk_smooth_population(
    lipschitz: float, radius: float, smoothness: float, n: int, dim: int, epsilon: float, delta: float
) -> float:
    """Returns 2 L^2 / (lam n) + 2 beta L^2 v / (lam n)^2 + lam R^2 / 2 at the tight `reg_smooth_population`.

    Arguments as there.

    Source: docs/proofs/output.md#risk-of-a-noisy-minimizer

    Example:
        >>> round(risk_smooth_population(1.0, 2.0, 0.25, n=1000, dim=10, epsilon=1.0, delta=0), 6)
        0.161446
    """
    lam = reg_smooth_population(lipschitz, radius, smoothness, n, dim, epsilon, delta)
    noise = risk_strongly_convex(lipschitz, lam, n, dim, epsilon, delta, smoothness=smoothness, population=True)
    return noise + lam * radius**2 / 2


def risk_strongly_convex(
    lipschitz: float,
    strong_convexity: float,
    n: int,
    dim: int,
    epsilon: float,
    delta: float,
    *,
    smoothness: float | None = None,
    population: bool = False,
    distance: float = 0.0,
) -> float:
    """Returns the bound on the excess risk of a perturbed minimizer of a mu-strongly convex objective.

    L E|z| if projected, or beta E|z|^2 / 2 for beta-smooth losses without a projection; plus the stability 2 L^2/(mu n)
    for the population risk; plus what a point at the given distance of the minimizer loses, L r or beta r^2 / 2.

    Args:
        lipschitz: L > 0.
        strong_convexity: mu > 0.
        n: >= 1.
        dim: d >= 1.
        epsilon: > 0.
        delta: in [0, 1).
        smoothness: beta > 0; None for losses that are Lipschitz only.
        population: whether the risk is that of the population.
        distance: r >= 0, certified (grad_tol / mu); the noise grows by 2 r / Delta.

    Source: docs/proofs/output.md#risk-of-a-noisy-minimizer

    Example:
        >>> round(risk_strongly_convex(1.0, 0.1, n=1000, dim=10, epsilon=1.0, delta=0), 9)
        0.2
    """
    lipschitz, mu = check.positive(lipschitz=lipschitz), check.positive(strong_convexity=strong_convexity)
    first, second = noise_norms(dim, epsilon, delta)
    distance = check.nonnegative(distance=distance)
    exact = 2 * lipschitz / (mu * check.positive_count(n=n))
    stability = lipschitz * exact if population else 0.0
    sensitivity = exact + 2 * distance
    if smoothness is None:
        return lipschitz * (first * sensitivity + distance) + stability
    return check.positive(smoothness=smoothness) / 2 * (second * sensitivity**2 + distance**2) + stability
