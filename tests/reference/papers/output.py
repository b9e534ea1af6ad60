"""Formulas of output perturbation that the package does not use, for vectors and comparisons.

Regularization and risk, the weights that balance noise against bias: with the noise z of a release, s = E|z| / Delta <=
d / epsilon (K-norm noise) or sqrt(d) sigma (Gaussian), and v = E|z|^2 / Delta^2 = d (d + 1) / epsilon^2 or d sigma^2,
sigma the least Gaussian std at sensitivity 1. A minimizer of F + (lam/2) |w|^2 has Delta = 2 L / (lam n) if one record
is replaced, and

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
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco._validate import positive
from torch_dpsco.accounting.analysis.gaussian import gaussian_log_delta
from torch_dpsco.accounting.analysis.rounding import DOUBLE, safe, scaled_up, up
from torch_dpsco.algorithms.heavy_tailed_numbers import safe_exp
from torch_dpsco.algorithms.output_sgd_numbers import noise_norms
from torch_dpsco.errors import ConditionError, InfeasibleError
from torch_dpsco.estimators.least_squares import (
    AdaSSPConstants,
    AdaSSPPlan,
    _bounds,
    _rounding,
)
from torch_dpsco.estimators.output import erm_sensitivity
from torch_dpsco.estimators.records import sum_terms
from torch_dpsco.estimators.task import LinearTask

_MODES = ("tight", "paper")


_ROUNDING = 1e-14  # relative, of a count before it is rounded up


def _count(steps: float, name: str) -> int:
    if not steps * (1 + _ROUNDING) < 2.0**63:
        raise InfeasibleError(f"{name} would take {steps:g} steps: use a larger {name}")
    return max(1, math.ceil(steps * (1 + _ROUNDING)))


def residual_clip_constants(bound_x: float, clip: float) -> tuple[float, float]:
    """Returns (L, smoothness) of the logistic loss whose derivative is clipped: phi' = max(-sigmoid(-m), -C / |x|).

    L = min(C, B). The curvature p (1 - p) r^2 at p = sigmoid(-m) <= C / r, r = |x| <= B, is at most r^2 / 4, and
    C (r - C) for r > 2 C, which increases: C (B - C) if C < B / 2, else B^2 / 4. As phi(m) is the integral of
    min(sigmoid(-t), C / r) over t > m, the loss at 0 is at most log 2, as without the clip.

    Args:
        bound_x: B > 0.
        clip: C > 0, bound on the gradient of a record.

    Source: docs/proofs/output.md#clipped-residuals

    Example:
        >>> tuple(round(constant, 9) for constant in residual_clip_constants(bound_x=1.0, clip=0.25))
        (0.25, 0.1875)
    """
    bound, clip = check.positive(bound_x=bound_x), check.positive(clip=clip)
    curvature = clip * (bound - clip) if clip < bound / 2 else bound * bound / 4
    return min(clip, bound), safe(curvature)


def adversarial_smoothness(
    bound_x: float,
    attack_radius: float,
    smoothing: float = 1e-3,
    link_lipschitz: float = 1.0,
    curvature: float = 0.25,
    *,
    norm: str = "l2",
    dim: int = 1,
) -> float:
    """Returns k (B + a)^2 + L_phi rho / nu, a smoothness of the robust loss with a smoothed norm.

    The public nu > 0 turns |w| into sqrt(|w|^2 + nu^2), and |w|_1 into the sum of sqrt(w_j^2 + nu^2). Their gradients
    are not longer, their curvature is at most 1 / nu.

    Args:
        bound_x: B > 0, bound on the Euclidean norm of x.
        attack_radius: rho >= 0; a = rho, or rho sqrt(d) for attacks in the maximum norm.
        smoothing: nu > 0.
        link_lipschitz: L_phi > 0; phi nonincreasing.
        curvature: k >= 0, bound on phi'' (1/4 for the logistic loss).
        norm: "l2" or "linf".
        dim: d >= 1, for linf.

    Source: docs/proofs/output.md#robust-losses

    Example:
        >>> round(adversarial_smoothness(1.0, 0.5, smoothing=0.1), 9)
        5.5625
    """
    reach = check.positive(bound_x=bound_x) + _attack_length(attack_radius, norm, dim)
    bend = (
        check.positive(link_lipschitz=link_lipschitz)
        * attack_radius
        / check.positive(smoothing=smoothing)
    )
    return safe(check.nonnegative(curvature=curvature) * reach * reach + bend)


def gap_rounding(
    n: int,
    dim: int,
    *,
    primal: float,
    dual: float,
    lipschitz: float,
    norm: float,
    weight: float = 1.0,
    score_offset: float = 0.0,
) -> float:
    """Returns e_gap, which bounds how far a computed duality gap is from the exact one.

    Args:
        n: records, >= 1.
        dim: d >= 1.
        primal: P, the primal value, or a bound on its size.
        dual: D, the dual value, or a bound on its size.
        lipschitz: L > 0, bound on the gradient of a loss.
        norm: |w| >= 0, or a bound on it.
        weight: as in `gradient_rounding`.
        score_offset: as in `gradient_rounding`.

    Source: docs/proofs/output.md#rounding-of-a-gap

    Example:
        >>> gap_rounding(10**5, 20, primal=1.0, dual=1.0, lipschitz=1.0, norm=5.0) < 1e-11
        True
    """
    d, weight = check.positive_count(dim=dim), check.positive(weight=weight)
    reach = check.nonnegative(norm=norm) + check.nonnegative(score_offset=score_offset)
    values = abs(check.finite(primal=primal)) + abs(check.finite(dual=dual))
    values += 2 * weight * check.positive(lipschitz=lipschitz) * reach
    return scaled_up(DOUBLE * (sum_terms(n) + d + 16) * values, 16)


def reg_convex_erm(
    lipschitz: float,
    radius: float,
    n: int,
    dim: int,
    epsilon: float,
    delta: float,
    mode: str = "tight",
) -> float:
    """Returns lam for the empirical risk of Lipschitz losses: (2 L / R) sqrt(s / n), the paper's L / (R sqrt(1 + 1/q)).

    Args:
        lipschitz: L > 0.
        radius: R > 0, of a ball that holds a minimizer of the risk for every data set.
        n: >= 1.
        dim: d >= 1.
        epsilon: > 0.
        delta: in [0, 1), below 1/2 for mode "paper"; 0 means K-norm noise.
        mode: "tight" or "paper".

    Returns:
        lam > 0, for the mean form.

    Source: docs/proofs/output.md#risk-of-a-noisy-minimizer

    Example:
        >>> round(reg_convex_erm(1.0, 2.0, n=1000, dim=10, epsilon=1.0, delta=0), 9)
        0.1
    """
    scale = check.positive(lipschitz=lipschitz) / check.positive(radius=radius)
    if check.choice(_MODES, mode=mode) == "paper":
        return scale / math.sqrt(1 + 1 / paper_ratio(n, dim, epsilon, delta))
    return 2 * scale * math.sqrt(noise_norms(dim, epsilon, delta)[0] / check.positive_count(n=n))


def reg_convex_population(
    lipschitz: float,
    radius: float,
    n: int,
    dim: int,
    epsilon: float,
    delta: float,
    mode: str = "tight",
) -> float:
    """Returns lam for the population risk of Lipschitz losses: (2 L / R) sqrt((1 + s) / n).

    The paper's is (L / R) (sqrt(q) + 1 / sqrt(n)). Arguments as in `reg_convex_erm`.

    Source: docs/proofs/output.md#risk-of-a-noisy-minimizer

    Example:
        >>> round(reg_convex_population(1.0, 2.0, n=1000, dim=10, epsilon=1.0, delta=0), 9)
        0.104880885
    """
    scale = check.positive(lipschitz=lipschitz) / check.positive(radius=radius)
    if check.choice(_MODES, mode=mode) == "paper":
        return scale * (math.sqrt(paper_ratio(n, dim, epsilon, delta)) + 1 / math.sqrt(n))
    return (
        2
        * scale
        * math.sqrt((1 + noise_norms(dim, epsilon, delta)[0]) / check.positive_count(n=n))
    )


def reg_smooth_erm(
    lipschitz: float, radius: float, smoothness: float, n: int, dim: int, epsilon: float, delta: float,
    mode: str = "tight",
) -> float:  # fmt: skip
    """Returns lam for the empirical risk of beta-smooth losses: 2 (beta L^2 v / (R n)^2)^(1/3).

    The paper's is (beta L^2 / R^2)^(1/3) q^(2/3), for q^2 <= L / (R beta) (a condition of its risk bound).

    The arguments are those of `reg_smooth_population`.

    Source: docs/proofs/output.md#risk-of-a-noisy-minimizer

    Example:
        >>> round(reg_smooth_erm(1.0, 2.0, 0.25, n=1000, dim=10, epsilon=1.0, delta=0), 9)
        0.038029525
    """
    scale = _cubic_scale(lipschitz, radius, smoothness)
    if check.choice(_MODES, mode=mode) == "paper":
        return scale * math.pow(paper_ratio(n, dim, epsilon, delta), 2 / 3)
    return (
        2
        * scale
        * math.pow(noise_norms(dim, epsilon, delta)[1] / check.positive_count(n=n) ** 2, 1 / 3)
    )


def risk_convex_erm(
    lipschitz: float,
    radius: float,
    n: int,
    dim: int,
    epsilon: float,
    delta: float,
    mode: str = "tight",
) -> float:
    """Returns the bound on the excess empirical risk at `reg_convex_erm`: 2 L R sqrt(s / n).

    The paper's is 8.5 L R sqrt(q).

    For the projected release of an exact minimizer, replace_one. Arguments as in `reg_convex_erm`.

    Source: docs/proofs/output.md#risk-of-a-noisy-minimizer

    Example:
        >>> round(risk_convex_erm(1.0, 2.0, n=1000, dim=10, epsilon=1.0, delta=0), 9)
        0.4
    """
    scale = check.positive(lipschitz=lipschitz) * check.positive(radius=radius)
    if check.choice(_MODES, mode=mode) == "paper":
        return 8.5 * scale * math.sqrt(paper_ratio(n, dim, epsilon, delta))
    return 2 * scale * math.sqrt(noise_norms(dim, epsilon, delta)[0] / check.positive_count(n=n))


def risk_convex_population(
    lipschitz: float, radius: float, n: int, dim: int, epsilon: float, delta: float
) -> float:
    """Returns 2 L R sqrt((1 + s) / n), the bound on the excess population risk at the tight `reg_convex_population`.

    Arguments as in `reg_convex_erm`.

    Source: docs/proofs/output.md#risk-of-a-noisy-minimizer

    Example:
        >>> round(risk_convex_population(1.0, 2.0, n=1000, dim=10, epsilon=1.0, delta=0), 9)
        0.419523539
    """
    scale = check.positive(lipschitz=lipschitz) * check.positive(radius=radius)
    return (
        2
        * scale
        * math.sqrt((1 + noise_norms(dim, epsilon, delta)[0]) / check.positive_count(n=n))
    )


def risk_smooth_erm(
    lipschitz: float, radius: float, smoothness: float, n: int, dim: int, epsilon: float, delta: float,
    mode: str = "tight",
) -> float:  # fmt: skip
    """Returns the bound on the excess empirical risk at `reg_smooth_erm`: (3/2) (beta L^2 R^4 v / n^2)^(1/3).

    The paper's is 48.5 beta^(1/3) L^(2/3) R^(4/3) q^(2/3). For a release that is not projected. Arguments as in
    `reg_smooth_erm`.

    Raises:
        ValueError: an argument is out of range.
        ConditionError: mode "paper" with q^2 > L / (R beta).

    Source: docs/proofs/output.md#risk-of-a-noisy-minimizer

    Example:
        >>> round(risk_smooth_erm(1.0, 2.0, 0.25, n=1000, dim=10, epsilon=1.0, delta=0), 9)
        0.114088574
    """
    scale = _cubic_scale(lipschitz, radius, smoothness) * radius**2
    if check.choice(_MODES, mode=mode) == "tight":
        return (
            1.5
            * scale
            * math.pow(
                noise_norms(dim, epsilon, delta)[1] / check.positive_count(n=n) ** 2, 1 / 3
            )
        )
    q = paper_ratio(n, dim, epsilon, delta)
    if q * q > lipschitz / (radius * smoothness):
        raise ConditionError(
            f"the paper's bound needs q^2 <= L / (R beta) (got q = {q:g}): use mode='tight'"
        )
    return 48.5 * scale * math.pow(q, 2 / 3)


def accuracy_paper(
    lipschitz: float, strong_convexity: float, n: int, dim: int, epsilon: float, delta: float
) -> float:
    """Returns the paper's accuracy of the solver, (L^2 / (mu n)) min(1/n, q n), for strongly convex objectives.

    With a certificate it is not needed. Arguments as in `risk_strongly_convex`.

    Source: docs/proofs/output.md#published-schedules (Corollary 3.1).

    Example:
        >>> accuracy_paper(1.0, 0.5, n=1000, dim=10, epsilon=1.0, delta=0)
        2e-06
    """
    lipschitz, mu = (
        check.positive(lipschitz=lipschitz),
        check.positive(strong_convexity=strong_convexity),
    )
    q = paper_ratio(n, dim, epsilon, delta)
    return lipschitz**2 / (mu * n) * min(1 / n, q * n)


def accuracy_paper_smooth(
    lipschitz: float,
    strong_convexity: float,
    smoothness: float,
    n: int,
    dim: int,
    epsilon: float,
    delta: float,
) -> float:
    """Returns the paper's accuracy for smooth objectives, (L^2 / (mu n^2)) min(kappa (q n)^2, 1), kappa = beta / mu.

    Source: docs/proofs/output.md#published-schedules (Corollary 3.2).

    Example:
        >>> accuracy_paper_smooth(1.0, 0.5, 1.0, n=1000, dim=10, epsilon=1.0, delta=0)
        2e-06
    """
    lipschitz, mu = (
        check.positive(lipschitz=lipschitz),
        check.positive(strong_convexity=strong_convexity),
    )
    kappa = check.positive(smoothness=smoothness) / mu
    q = paper_ratio(n, dim, epsilon, delta)
    return lipschitz**2 / (mu * n**2) * min(kappa * (q * n) ** 2, 1)


def argmin_sensitivity(
    lipschitz: float, strong_convexity: float, radius: float = math.inf
) -> float:
    """Returns min(2 L / mu, 2 R): one record may change the whole objective, as where it is no mean over records.

    Args:
        lipschitz: L > 0, of the whole objective.
        strong_convexity: mu > 0.
        radius: R > 0, of a ball that holds every minimizer; inf if none is known.

    Source: docs/proofs/output.md#how-far-a-minimizer-moves (Proposition 2.2 of the paper).

    Example:
        >>> round(argmin_sensitivity(lipschitz=1.0, strong_convexity=0.1, radius=1.3), 9)
        2.6
    """
    lipschitz, mu = (
        check.positive(lipschitz=lipschitz),
        check.positive(strong_convexity=strong_convexity),
    )
    radius = check.positive(radius=radius, allow_inf=True)
    return safe(min(2 * lipschitz / mu, 2 * radius))


def psgd_sensitivity(lipschitz: float, lr: float, passes: int, batch_size: int = 1) -> float:
    """Returns 2 k L eta / b: the last iterate, or the average, of k passes of SGD in one order of the records.

    Args:
        lipschitz: L > 0.
        lr: eta > 0, constant and at most 2 / beta: steps that do not touch the record are then not expansive.
        passes: k >= 1.
        batch_size: b >= 1; all batches have b records.

    Guarantee: replace_one, for convex beta-smooth losses, an order that does not depend on the data, and steps without
        momentum; a projection on a convex set is allowed.

    Source: docs/proofs/output.md#closed-forms-of-bolt-on-runs; Wu et al. 2017.

    Example:
        >>> round(psgd_sensitivity(lipschitz=1.0, lr=0.01, passes=5), 9)
        0.1
    """
    lipschitz, lr = check.positive(lipschitz=lipschitz), check.positive(lr=lr)
    passes, batch_size = (
        check.positive_count(passes=passes),
        check.positive_count(batch_size=batch_size),
    )
    return safe(2 * passes * lipschitz * lr / batch_size)


def psgd_sensitivity_strongly_convex(lipschitz: float, strong_convexity: float, n: int) -> float:
    """Returns 2 L / (mu n), for the LAST iterate of steps min(1/beta, 1/(mu t)): that of the exact minimizer.

    It holds for any number of passes and any batches, and not for an average of iterates:
    early iterates move by more, their uniform average by about log(n) times as much (`algorithms.output_sgd_numbers`
    computes it).

    Args:
        lipschitz: L > 0, of the data-dependent part.
        strong_convexity: mu > 0.
        n: records used in each pass, a multiple of the batch size, >= 1.

    Guarantee: as `psgd_sensitivity`, for the last iterate only.

    Source: docs/proofs/output.md#closed-forms-of-bolt-on-runs; Wu et al. 2017.

    Example:
        >>> round(psgd_sensitivity_strongly_convex(lipschitz=1.0, strong_convexity=0.1, n=1000), 9)
        0.02
    """
    return erm_sensitivity(lipschitz, strong_convexity, n)


def tilted_sensitivity_paper(
    tilt: float, loss_range: float, n: int, lipschitz: float, strong_convexity: float
) -> float:
    """Returns the paper's (2 L / mu) min(1, C / n), which is valid for tau > 0 and larger than `tilted_sensitivity`.

    Args:
        tilt: tau > 0.
        loss_range: r >= 0.
        n: >= 1.
        lipschitz: L > 0.
        strong_convexity: mu > 0.

    Guarantee: replace_one.

    Source: docs/proofs/output.md#tilted-means (Lemma 5.2 of the paper).

    Example:
        >>> round(tilted_sensitivity_paper(1.0, 2.0, 100, lipschitz=1.0, strong_convexity=0.1), 9)
        1.47781122
    """
    exponent = check.positive(tilt=tilt) * check.nonnegative(loss_range=loss_range)
    share = min(1.0, scaled_up(safe_exp(scaled_up(exponent, 1)) / check.positive_count(n=n), 4))
    return safe(
        2
        * check.positive(lipschitz=lipschitz)
        / check.positive(strong_convexity=strong_convexity)
        * share
    )


def dual_ascent_steps(bound_x: float, reg: float, distance: float, excess: float = 1.0) -> int:
    """Returns T = ceil(c B / (lam r)): steps of dual FISTA after which the primal point is within r of the minimizer.

    For hinge and pinball losses the dual variables lie in a box with sides of length 1. From its center, with the step
    1 / L_D, L_D = B^2 n / (lam n0^2), the dual is within 2 L_D (n/4) / (t + 1)^2 of its maximum, and
    (lam/2) |v_t - w|^2 is at most that: |v_t - w| <= (n / n0) B / (lam (t + 1)) for certain.

    Args:
        bound_x: B > 0, bound on |x|.
        reg: lam > 0, in the mean form.
        distance: r > 0.
        excess: c >= n / n0 for every possible number n of records, n0 the divisor: 1 under replace_one and zero_out,
            n_max / n0 under add_remove.

    Raises:
        ValueError: an argument is out of range.
        InfeasibleError: T overflows.

    Guarantee: a distance for every data set, in exact arithmetic: no certificate is needed at run time.

    Source: docs/proofs/output.md#solvers-that-cannot-fail

    Example:
        >>> dual_ascent_steps(bound_x=1.0, reg=0.01, distance=0.5)
        201
    """
    bound, reg = check.positive(bound_x=bound_x), check.positive(reg=reg)
    # PRIVACY: the fallback that always ends (test_dual_ascent_reaches_its_distance_on_every_data_set)
    return _count(
        check.positive(excess=excess) * bound / reg / check.positive(distance=distance),
        "distance",
    )


@dataclass(frozen=True)
class HingeGap:
    """A primal point, its duality gap and its distance to the minimizer, for the hinge loss."""

    w: Tensor
    gap: float
    distance_bound: float


def hinge_dual_gap(X: Tensor, y: Tensor, dual: Tensor, reg: float) -> HingeGap:
    """The primal point of dual variables b in [0, 1] of a mean hinge loss, its gap and distance bound.

    w = (1/(reg n)) sum b_i y_i x_i; gap = P(w) - D(b); ||w - w*|| <= sqrt(2 gap/reg).

    Args:
        X: (n, d) floating point features (or nested lists).
        y: (n,) labels +-1.
        dual: b, (n,), clipped to [0, 1].
        reg: lambda > 0.

    Returns:
        The point, the gap and the distance.

    Source:
        docs/proofs/output.md#a-duality-gap-certifies

    Example:
        >>> round(hinge_dual_gap([[1.0]], [1.0], [1.0], 1.0).gap, 9)
        0.0
    """
    features = torch.as_tensor(X, dtype=torch.float64)
    targets = torch.as_tensor(y, dtype=torch.float64)
    variables = torch.as_tensor(dual, dtype=torch.float64).clamp(0.0, 1.0)
    point = (variables * targets) @ features / (positive(reg=reg) * len(features))
    margins = 1 - targets * (features @ point)
    gap = float((margins.clamp(min=0.0) - variables * margins).mean())
    return HingeGap(point, gap, math.sqrt(2 * gap / reg))


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
    lipschitz: float,
    radius: float,
    smoothness: float,
    n: int,
    dim: int,
    epsilon: float,
    delta: float,
) -> float:
    """Returns 2 L^2 / (lam n) + 2 beta L^2 v / (lam n)^2 + lam R^2 / 2 at the tight `reg_smooth_population`.

    Arguments as there.

    Source: docs/proofs/output.md#risk-of-a-noisy-minimizer

    Example:
        >>> round(risk_smooth_population(1.0, 2.0, 0.25, n=1000, dim=10, epsilon=1.0, delta=0), 6)
        0.161446
    """
    lam = reg_smooth_population(lipschitz, radius, smoothness, n, dim, epsilon, delta)
    noise = risk_strongly_convex(
        lipschitz, lam, n, dim, epsilon, delta, smoothness=smoothness, population=True
    )
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
    lipschitz, mu = (
        check.positive(lipschitz=lipschitz),
        check.positive(strong_convexity=strong_convexity),
    )
    first, second = noise_norms(dim, epsilon, delta)
    distance = check.nonnegative(distance=distance)
    exact = 2 * lipschitz / (mu * check.positive_count(n=n))
    stability = lipschitz * exact if population else 0.0
    sensitivity = exact + 2 * distance
    if smoothness is None:
        return lipschitz * (first * sensitivity + distance) + stability
    return (
        check.positive(smoothness=smoothness) / 2 * (second * sensitivity**2 + distance**2)
        + stability
    )


def subgradient_steps(lipschitz: float, strong_convexity: float, accuracy: float) -> int:
    """Returns T = ceil(2 L^2 / (mu alpha)), for which E[F - min F] <= 2 L^2 / (mu (T + 1)) <= alpha.

    The method takes steps 2 / (mu (t + 1)) from w_(t-1) and averages w_(t-1) with weights 2 t / (T (T + 1)). The
    accuracy holds in expectation only: it certifies nothing.

    Args:
        lipschitz: L > 0, bound on the subgradients on the ball.
        strong_convexity: mu > 0.
        accuracy: alpha > 0.

    Raises:
        ValueError: an argument is out of range.
        InfeasibleError: T overflows.

    Source: docs/proofs/output.md#steps-of-the-subgradient-method

    Example:
        >>> subgradient_steps(lipschitz=1.0, strong_convexity=0.5, accuracy=0.001)
        4001
    """
    lipschitz, mu = (
        check.positive(lipschitz=lipschitz),
        check.positive(strong_convexity=strong_convexity),
    )
    return _count(
        2 * lipschitz / mu * (lipschitz / check.positive(accuracy=accuracy)), "accuracy"
    )


def tilted_smoothness(tilt: float, lipschitz: float, smoothness: float) -> float:
    """Returns beta + max(tau, 0) L^2, a smoothness of the tilted losses (D^2 / 4 for L^2 if it is smaller).

    Args:
        tilt: tau, finite.
        lipschitz: L > 0.
        smoothness: beta >= 0, of every loss.

    Source: docs/proofs/output.md#tilted-means (Lemma 5.3 of the paper).

    Example:
        >>> round(tilted_smoothness(tilt=10.0, lipschitz=2.0, smoothness=1.0), 9)
        41.0
    """
    tilt, beta = check.finite(tilt=tilt), check.nonnegative(smoothness=smoothness)
    return scaled_up(beta + max(tilt, 0.0) * check.positive(lipschitz=lipschitz) ** 2, 6)


class AdaSSPPaperConstants(NamedTuple):
    """Those of the paper: std_xtx is that of every entry of the upper triangle."""

    std_lmin: float
    std_xtx: float
    shift_lmin: float
    std_xty: float
    lam_cap: float


def adassp_constants_paper(
    epsilon: float, delta: float, bound_x: float, bound_y: float, dim: int, failure: float = 0.05
) -> AdaSSPPaperConstants:
    """Returns the published noise, with epsilon/3 and log(6/delta) for each release, once its joint curve is checked.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        bound_x: B > 0.
        bound_y: Y > 0.
        dim: d >= 1.
        failure: in (0, 1), for utility only.

    Raises:
        ValueError: an argument is out of range.
        ConditionError: the joint release is not (epsilon, delta)-DP.

    Guarantee: (epsilon, delta)-DP under add_remove and zero_out.

    Source: docs/proofs/output.md#published-noise-of-adassp; Wang 2018, algorithm 2.

    Example:
        >>> round(adassp_constants_paper(1.0, 1e-6, bound_x=1.0, bound_y=1.0, dim=10).std_xty, 6)
        11.851811
    """
    third = check.positive(epsilon=epsilon) / 3
    log_term = math.log(6) - math.log(check.open_interval(0.0, 1.0, delta=delta))
    square = check.positive(bound_x=bound_x) ** 2
    product = bound_x * check.positive(bound_y=bound_y)
    d = check.positive_count(dim=dim)
    failure = check.open_interval(0.0, 1.0, failure=failure)
    # PRIVACY: three equal levels; the published proof treats each alone (test_the_published_noise_is_checked);
    # margin of the quotient (docs/proofs/rounding.md#model-of-arithmetic)
    mu = up(math.sqrt(3) * third / math.sqrt(log_term), 1e-14)
    if gaussian_log_delta(epsilon, mu) > math.log(delta):
        raise ConditionError(
            f"the published noise is not ({epsilon:g}, {delta:g})-DP: its three releases are"
            f" {mu:g}-GDP"
        )
    std = scaled_up(math.sqrt(log_term) / third, 8)
    cap = math.sqrt(d * log_term * math.log(2 * d * d / failure)) * square / third
    return AdaSSPPaperConstants(
        std * square, std * square, log_term / third * square, std * product, cap
    )


def adassp_plan_of_the_paper(task: LinearTask) -> AdaSSPPlan:
    """Returns the plan with the published noise, more by the roundings; of delta less what a ledger rounds with."""
    delta = task.target.delta * (1 - 1e-9)
    paper = adassp_constants_paper(task.target.epsilon, delta, *_bounds(task))
    up_to = (
        paper.std_lmin,
        paper.std_xtx,
        paper.std_xtx,
        paper.std_xty,
        paper.lam_cap,
        paper.shift_lmin,
    )
    more = _rounding(task)
    return AdaSSPPlan(task=task, constants=AdaSSPConstants(*(value * more for value in up_to)))


def suboptimal_sensitivity(
    sensitivity: float, strong_convexity: float, accuracy: float
) -> float:
    """Returns Delta + 2 sqrt(2 alpha / mu), for points whose objective is within alpha of the minimum FOR CERTAIN.

    The paper uses it for solvers that reach alpha in expectation, which is not private (see the errata): use
    `certified_sensitivity` or `expected_suboptimal_sensitivity` for those.

    Args:
        sensitivity: Delta > 0, of exact minimizers.
        strong_convexity: mu > 0.
        accuracy: alpha > 0.

    Source: docs/proofs/output.md#accuracy-in-expectation (Proposition 3.1 of the paper).

    Example:
        >>> round(suboptimal_sensitivity(sensitivity=0.02, strong_convexity=0.1, accuracy=1e-5), 9)
        0.048284271
    """
    sensitivity = check.positive(sensitivity=sensitivity)
    mu = check.positive(strong_convexity=strong_convexity)
    return safe(
        sensitivity + 2 * math.sqrt(2 * check.positive(accuracy=accuracy)) / math.sqrt(mu)
    )


def expected_suboptimal_sensitivity(
    sensitivity: float, strong_convexity: float, expected_accuracy: float, failure: float
) -> float:
    """Returns Delta + 2 sqrt(2 alpha / (mu p)): E[F(w) - min F] <= alpha gives F(w) - min F <= alpha / p but for p.

    Args:
        sensitivity: Delta > 0, of exact minimizers.
        strong_convexity: mu > 0.
        expected_accuracy: alpha > 0, on every data set.
        failure: p in (0, 1), of a failure on each side by itself: it adds (1 + e^epsilon) p to delta
            (`delta_with_failure`, kind "per_side").

    Guarantee: the sensitivity outside of the failure; a pure epsilon is not possible this way.

    Source: docs/proofs/output.md#accuracy-in-expectation

    Example:
        >>> round(expected_suboptimal_sensitivity(0.02, 0.1, expected_accuracy=1e-5, failure=1e-7), 6)
        89.462719
    """
    alpha = check.positive(expected_accuracy=expected_accuracy)
    failure = check.open_interval(0.0, 1.0, failure=failure)
    return safe(suboptimal_sensitivity(sensitivity, strong_convexity, safe(alpha / failure)))


class KatyushaParameters(NamedTuple):
    """Inner steps m of an epoch, weights tau1 and tau2 of the points that are mixed, and the step size gamma."""

    m: int
    tau1: float
    tau2: float
    gamma: float


def katyusha_parameters(
    n: int, smoothness: float, strong_convexity: float
) -> KatyushaParameters:
    """Returns m = 2 n, tau1 = min(sqrt(m mu / (3 beta)), 1/2), tau2 = 1/2 and gamma = 1 / (3 tau1 beta).

    Args:
        n: records, >= 1.
        smoothness: beta > 0, of each loss.
        strong_convexity: mu > 0, of the regularizer.

    Source: docs/proofs/output.md#steps-of-katyusha (the paper's tau1 misses the beta).

    Example:
        >>> katyusha_parameters(n=10, smoothness=5.0, strong_convexity=5.0).tau1
        0.5
    """
    m = 2 * check.positive_count(n=n)
    beta = check.positive(smoothness=smoothness)
    mu = check.positive(strong_convexity=strong_convexity)
    tau1 = min(math.sqrt(m * mu / (3 * beta)), 0.5)
    return KatyushaParameters(m, tau1, 0.5, 1 / (3 * tau1 * beta))


def _attack_length(attack_radius: float, norm: str, dim: int) -> float:
    root = math.sqrt(check.positive_count(dim=dim))
    radius = check.nonnegative(attack_radius=attack_radius)
    return radius if check.choice(("l2", "linf"), norm=norm) == "l2" else radius * root


_CLOSED_FORM = 2e-15  # relative: more than the rounding of a few operations
_ZHAO_SLACK = 1e-14  # of sigma: where the closed form is nearly exact (large epsilon), more than the kernel's error


def gaussian_sigma_zhao(epsilon: float, delta: float, sensitivity: float) -> float:
    """Returns Delta (c + sqrt(c^2 + epsilon)) / (sqrt(2) epsilon), c = `zhao_constant(delta)`, rounded up.

    This sigma solves u = epsilon sigma / Delta - Delta / (2 sigma) = sqrt(2) c, and delta(epsilon) <= Phi(-u)
    = erfc(c) / 2. By erfc(c) = (2/pi) int_0^(pi/2) exp(-c^2 / sin^2 t) dt, split at pi/4,
    erfc(c) / 2 <= (e^(-c^2) + e^(-2 c^2)) / 4, which c makes equal to delta. `gaussian_sigma` is smaller.

    Args:
        epsilon: > 0.
        delta: in (0, 1/2).
        sensitivity: L2 sensitivity of the released vector under the adjacency asked for, > 0.

    Returns:
        Noise std per coordinate, in the unit of `sensitivity`.

    Raises:
        ValueError: an argument is out of range, or the std is too large for a float.
        ConditionError: the std falls short of the exact curve, by the rounding of a subnormal number.

    Guarantee: (epsilon, delta)-DP of one release, for the adjacency under which `sensitivity` holds.

    Source: docs/proofs/output.md#gaussian-noise-in-closed-form (Zhao et al. 2019).

    Example:
        >>> round(gaussian_sigma_zhao(epsilon=1.0, delta=1e-6, sensitivity=0.02), 6)
        0.101683
    """
    epsilon = check.positive(epsilon=epsilon)
    sensitivity = check.positive(sensitivity=sensitivity)
    c = zhao_constant(delta)
    factor = (c + math.sqrt(c * c + epsilon)) / (math.sqrt(2) * epsilon)
    sigma = check.finite(sigma=max(sensitivity * factor * (1 + _ZHAO_SLACK), math.ulp(0.0)))
    # PRIVACY: the exact curve has the last word (test_the_noise_of_zhao_is_checked_against_the_exact_curve)
    if not gaussian_log_delta(epsilon, sensitivity / sigma) <= math.log(delta):
        raise ConditionError(
            f"sigma = {sigma:g} falls short of delta = {delta:g} at epsilon = {epsilon:g}; use"
            " gaussian_sigma"
        )
    return sigma


def zhao_constant(delta: float) -> float:
    """Returns c = sqrt(log(2 / (sqrt(16 delta + 1) - 1))), rounded up: t = e^(-c^2) solves t^2 + t = 4 delta.

    With r = sqrt(16 delta + 1), 1/t is (r + 1) / (8 delta) and, near delta = 1/2 where it approaches 1,
    1 + (1/2 - delta) (r + 1) / (delta (r + 3)).

    Args:
        delta: in (0, 1/2).

    Returns:
        c > 0.

    Raises:
        ValueError: delta is out of range.

    Source: docs/proofs/output.md#gaussian-noise-in-closed-form (Zhao et al. 2019).

    Example:
        >>> round(zhao_constant(delta=1e-6), 6)
        3.52551
    """
    delta = check.open_interval(0.0, 0.5, delta=delta)
    root = math.sqrt(16 * delta + 1)
    if delta < 0.1:
        square = math.log((root + 1) / 8) - math.log(delta)  # apart: 1 / delta may overflow
    else:
        square = math.log1p((0.5 - delta) * (root + 1) / (delta * (root + 3)))
    return math.sqrt(square) * (1 + _CLOSED_FORM)


def delta_with_failure(delta: float, failure: float, epsilon: float, kind: str) -> float:
    """Returns the delta of a mechanism whose analysis holds except for a failure.

    Args:
        delta: in [0, 1], of the mechanism without the failure.
        failure: total failure probability of this kind, in [0, 1].
        epsilon: >= 0, at which delta holds; only "per_side" depends on it.
        kind: "coupling" d + (1 - d) delta, "transcript" delta + beta, "per_side" delta + (1 + e^epsilon) beta.

    Returns:
        delta in [0, 1], rounded up.

    Raises:
        ValueError: an argument is out of range.

    Source: docs/proofs/accounting.md#failure-probabilities, docs/proofs/output.md#accuracy-in-expectation.

    Example:
        >>> round(delta_with_failure(delta=1e-6, failure=1e-7, epsilon=1.0, kind="per_side"), 12)
        1.371828e-06
    """
    delta = check.between(0.0, 1.0, delta=delta)
    failure = check.between(0.0, 1.0, failure=failure)
    epsilon = check.nonnegative(epsilon=epsilon)
    weight = 1.0
    if check.choice(("coupling", "transcript", "per_side"), kind=kind) == "per_side":
        weight = 1 + math.exp(epsilon) if epsilon < 700 else math.inf
    if failure == 0:
        return delta
    kept = 1 - failure if kind == "coupling" else 1.0
    total = kept * delta + weight * failure
    # PRIVACY: rounded up (test_a_failure_is_never_undercharged)
    return min(1.0, total * (1 + 1e-14))
