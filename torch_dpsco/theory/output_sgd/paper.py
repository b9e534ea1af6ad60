"""The published noise of output perturbation (Algorithm 1 of the Hoelder paper), mode "paper", in log space.

    x = 3 n log(n/gamma) / T,  c = max(sqrt x, x),  N = (T/n)(1 + c)           hits, but with probability gamma / n
    G = M + L R^alpha  or, unbounded,  M + L (C_alpha T eta)^{alpha/2}
    Delta^2 = e ( c_{alpha,2}^2 T eta^{2/(1-alpha)} + 4 G^2 eta^2 (1 + N) N )
    sigma^2 = 2 log(2.5/delta) Delta^2 / epsilon^2                             with gamma = delta/2, i.i.d. batches of 1

Differs from the paper in: 1. the Gaussian lemma is proved for epsilon <= 1 only and fails above about 8: the exact
curve must confirm it, else ConditionError (erratum E3); 2. C_alpha in its simplified, equal form. `run_path` needs
10 to 200 times less noise.

Source: docs/proofs/holder.md#noise-of-algorithm-1-as-published, docs/errata.md;
Wang, Lei, Ying and Zhang, Algorithm 1, Theorem 8.
"""

from __future__ import annotations

import math

import numpy as np

from torch_dpsco import _validate
from torch_dpsco.accounting.analysis.gaussian import gaussian_log_delta
from torch_dpsco.errors import ConditionError
from torch_dpsco.theory.holder.stability import log_expansion
from torch_dpsco.theory.rounding import scaled_up

_LARGEST_LOG = 709.0
_DOMAINS = ("bounded", "unbounded")


def log_iterate_constant(
    holder_exponent: float, holder_constant: float, grad_at_zero: float, loss_at_zero: float
) -> float:
    """Returns log C_alpha, where |w_t|^2 <= C_alpha t eta; C_alpha itself overflows for alpha near 1 and L > 1.

    C_alpha = (1-alpha)/(1+alpha) L^{2/(1-alpha)} + 2 M0; C_0 = (M + L)^2 + 2 M0; C_1 = 2 M0. It does not tend to C_1,
    nor to C_0 (erratum E5), and it is a bound for eta < 1 only.

    Args:
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0.
        grad_at_zero: M >= 0, used at alpha = 0.
        loss_at_zero: M0 >= 0.

    Source: docs/proofs/holder.md#noise-of-algorithm-1-as-published.

    Example:
        >>> round(log_iterate_constant(0.99, 2.0, 1.5, 1.0), 3)
        133.336
    """
    alpha, constant = _holder(holder_exponent, holder_constant)
    second = _log(2 * _validate.nonnegative(loss_at_zero=loss_at_zero))
    if alpha == 1:
        return second
    if alpha == 0:
        first = 2 * math.log(_validate.nonnegative(grad_at_zero=grad_at_zero) + constant)
    else:
        first = math.log1p(-alpha) - math.log1p(alpha) + 2 * math.log(constant) / (1 - alpha)
    return float(np.logaddexp(first, second))


def chernoff_factor(n: int, steps: int, failure: float) -> float:
    """Returns c = max(sqrt x, x) with x = 3 n log(n/gamma) / T: a record is hit at most (T/n)(1 + c) times.

    Args:
        n: number of records, >= 1.
        steps: T >= 1.
        failure: gamma in (0, 1).

    Source: docs/proofs/holder.md#noise-of-algorithm-1-as-published; errata E1, E2.

    Example:
        >>> round(chernoff_factor(100, 100, 0.01), 3)
        27.631
    """
    n, steps = _validate.positive_count(n=n), _validate.positive_count(steps=steps)
    x = 3 * n * (math.log(n) - math.log(_validate.open_interval(0.0, 1.0, failure=failure))) / steps
    return scaled_up(max(math.sqrt(x), x), 16)


def output_sensitivity_paper(
    holder_exponent: float,
    holder_constant: float,
    grad_at_zero: float,
    loss_at_zero: float | None,
    radius: float | None,
    lr: float,
    steps: int,
    n: int,
    failure: float,
    domain: str = "bounded",
) -> float:
    """Returns the paper's Delta, which the movement of the average exceeds with probability at most `failure`.

    Args:
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0.
        grad_at_zero: M >= 0.
        loss_at_zero: M0 >= 0; needed on an unbounded domain.
        radius: R > 0; needed on a bounded domain.
        lr: eta in (0, min(1, 1/L)).
        steps: T >= 1.
        n: public number of records.
        failure: gamma in (0, 1).
        domain: "bounded" or "unbounded".

    Raises:
        ConditionError: eta >= min(1, 1/L), or Delta overflows: step size too large for this alpha.
        ValueError: an argument is out of range or missing.

    Source: docs/proofs/holder.md#noise-of-algorithm-1-as-published; Theorem 7 of the paper.

    Example:
        >>> round(output_sensitivity_paper(0.5, 1.0, 1.0, None, 1.5, 0.01, 1000, 1000, 5e-7), 4)
        4.8232
    """
    alpha, constant = _holder(holder_exponent, holder_constant)
    lr, at_zero = _validate.positive(lr=lr), _validate.nonnegative(grad_at_zero=grad_at_zero)
    if not lr < min(1.0, 1.0 / constant):
        raise ConditionError(
            f"lr must be < min(1, 1/holder_constant) = {min(1.0, 1.0 / constant):g} in mode='paper' (got {lr:g})"
        )
    hits = (steps / n) * (1 + chernoff_factor(n, steps, failure))
    if _validate.choice(_DOMAINS, domain=domain) == "bounded":
        log_norm = math.log(_validate.positive(radius=radius))
    else:
        loss_at_zero = _validate.nonnegative(loss_at_zero=loss_at_zero)
        log_norm = (log_iterate_constant(alpha, constant, at_zero, loss_at_zero) + math.log(steps) + math.log(lr)) / 2
    log_bound = np.logaddexp(_log(at_zero), math.log(constant) + (alpha * log_norm if alpha > 0 else 0.0))
    log_drift = math.log(steps) + 2 * float(log_expansion(alpha, constant, np.log(np.array([lr])), glm=False)[0])
    log_hits = 2 * (math.log(2) + log_bound + math.log(lr)) + math.log(hits) + math.log1p(hits)
    total = (1 + float(np.logaddexp(log_drift, log_hits))) / 2
    if total > _LARGEST_LOG:
        raise ConditionError(f"lr: step size too large for this alpha: the paper's sensitivity overflows (got {lr:g})")
    return math.exp(total + 1e-13 * (1 + abs(total)))


def output_sigma_paper(
    holder_exponent: float,
    holder_constant: float,
    grad_at_zero: float,
    loss_at_zero: float | None,
    radius: float | None,
    lr: float,
    steps: int,
    n: int,
    epsilon: float,
    delta: float,
    domain: str = "bounded",
) -> float:
    """Returns the paper's noise std sqrt(2 log(2.5/delta)) Delta / epsilon, if it is valid.

    Args:
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0.
        grad_at_zero: M >= 0.
        loss_at_zero: M0 >= 0; needed on an unbounded domain.
        radius: R > 0; needed on a bounded domain.
        lr: eta in (0, min(1, 1/L)).
        steps: T >= 1.
        n: public number of records.
        epsilon: > 0.
        delta: in (0, 1); half of it pays for more hits than expected.
        domain: "bounded" or "unbounded".

    Raises:
        ConditionError: the exact Gaussian curve exceeds delta/2 (erratum E3), or see
            `output_sensitivity_paper`.

    Guarantee: (epsilon, delta)-DP, REPLACE_ONE, records, batches of one record drawn uniformly with replacement.

    Source: docs/proofs/holder.md#noise-of-algorithm-1-as-published; Theorem 8 of the paper.

    Example:
        >>> round(output_sigma_paper(0.5, 1.0, 1.0, None, 1.5, 0.01, 1000, 1000, 0.7, 1e-6), 4)
        37.4008
    """
    epsilon, delta = _validate.positive(epsilon=epsilon), _validate.open_interval(0.0, 1.0, delta=delta)
    sensitivity = output_sensitivity_paper(
        holder_exponent, holder_constant, grad_at_zero, loss_at_zero, radius, lr, steps, n, delta / 2, domain
    )
    ratio = math.sqrt(2 * math.log(2.5 / delta)) / epsilon
    # PRIVACY: the lemma is false for large epsilon (test_the_noise_of_algorithm_1_is_refused_where_its_lemma_fails)
    if not gaussian_log_delta(epsilon, 1 / ratio) <= math.log(delta / 2) - 1e-11:
        raise ConditionError(
            f"epsilon must be lower: the paper's noise falls short of delta={delta:g} at epsilon={epsilon:g}; "
            'mode="tight" has no such limit'
        )
    return scaled_up(sensitivity * ratio, 16)


def _holder(holder_exponent: float, holder_constant: float) -> tuple[float, float]:
    alpha = _validate.between(0.0, 1.0, holder_exponent=holder_exponent)
    return alpha, _validate.positive(holder_constant=holder_constant)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
