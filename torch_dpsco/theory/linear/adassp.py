"""Least squares by noisy sufficient statistics, with a ridge that adapts to the smallest eigenvalue (AdaSSP).

Rows with |x| <= B and targets with |y| <= Y give three releases, of lambda_min(X'X), X'X and X'y. Adding or removing a
record changes them by at most B^2, B^2 (in the Frobenius norm) and B Y; replacing one by B^2, sqrt(2) B^2 and 2 B Y.
Noise on X'X that is isotropic in an orthonormal basis of the symmetric matrices has the std s on the diagonal and
s / sqrt(2) off it. The three levels mu = sensitivity / std add in squares; everything else is post-processing.

Differs from the paper in: 1. The budget is that of the joint release, with any split (`weights`): less noise. 2. Mode
"paper" is checked: its steps are not (epsilon/3, delta/3)-DP each, but together they are usually (epsilon, delta)-DP.

Source: docs/proofs/output.md#least-squares-from-noisy-statistics; Wang 2018, Revisiting differentially private linear
regression.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch_dpsco import _validate as check
from torch_dpsco._margin import up
from torch_dpsco.accounting.analysis.gaussian import (
    gaussian_log_delta,
    gaussian_mu,
    sensitivity_factor,
)
from torch_dpsco.accounting.analysis.rounding import scaled_up
from torch_dpsco.errors import ConditionError
from torch_dpsco.theory.linear.preparation import level_left


class AdaSSPConstants(NamedTuple):
    """Noise stds of the three releases, the cap on the ridge and the shift of the noisy eigenvalue.

    The ridge is max(0, lam_cap - max(0, noisy lambda_min - lmin_shift)).
    """

    std_lmin: float
    std_xtx_diag: float
    std_xtx_offdiag: float
    std_xty: float
    lam_cap: float
    lmin_shift: float


class AdaSSPPaperConstants(NamedTuple):
    """Those of the paper: std_xtx is that of every entry of the upper triangle."""

    std_lmin: float
    std_xtx: float
    shift_lmin: float
    std_xty: float
    lam_cap: float


def adassp_constants(
    epsilon: float,
    delta: float,
    bound_x: float,
    bound_y: float,
    dim: int,
    failure: float = 0.05,
    weights: Sequence[float] = (0.05, 0.475, 0.475),
    adjacency: str = "add_remove",
    spent: float = 0.0,
) -> AdaSSPConstants:
    """Returns the noise that uses (epsilon, delta) up, and the ridge that is large enough but for the failure.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).
        bound_x: B > 0.
        bound_y: Y > 0.
        dim: d >= 1.
        failure: p in (0, 1), of the bounds sqrt(2 log(2/p)) on a normal and sqrt(2 d) + sqrt(2 log(2/p)) on the
            operator norm of the noise matrix: for utility only.
        weights: shares of mu^2 for lambda_min, X'X and X'y: positive, of sum 1.
        adjacency: "add_remove", "zero_out" or "replace_one".
        spent: level of Gaussian releases that the budget pays for too.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: (epsilon, delta)-DP of the joint release, and of all that is computed from it, under the adjacency.

    Source: docs/proofs/output.md#least-squares-from-noisy-statistics

    Example:
        >>> round(adassp_constants(1.0, 1e-6, bound_x=1.0, bound_y=1.0, dim=10).std_xty, 6)
        6.129808
    """
    share_lmin, share_xtx, share_xty = _shares(weights)
    replaced = sensitivity_factor(adjacency) == 2
    mu = level_left(gaussian_mu(epsilon, delta), spent)
    square = check.positive(bound_x=bound_x) ** 2
    product = bound_x * check.positive(bound_y=bound_y)
    d = check.positive_count(dim=dim)
    tail = _tail(failure)
    # PRIVACY: mu^2 is shared out, so that the squares add up to it (test_the_three_levels_add_up_to_the_budget); margin
    # of quotients (docs/proofs/rounding.md#model-of-arithmetic)
    lmin = scaled_up(square / (mu * math.sqrt(share_lmin)), 12)
    xtx = scaled_up((math.sqrt(2) if replaced else 1.0) * square / (mu * math.sqrt(share_xtx)), 12)
    xty = scaled_up((2.0 if replaced else 1.0) * product / (mu * math.sqrt(share_xty)), 12)
    off_diagonal = scaled_up(xtx / math.sqrt(2), 2)
    return AdaSSPConstants(
        lmin, xtx, off_diagonal, xty, xtx * (math.sqrt(2 * d) + tail), lmin * tail
    )


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
            f" {mu:g}-GDP; use mode='tight'"
        )
    std = scaled_up(math.sqrt(log_term) / third, 8)
    cap = math.sqrt(d * log_term * math.log(2 * d * d / failure)) * square / third
    return AdaSSPPaperConstants(
        std * square, std * square, log_term / third * square, std * product, cap
    )


def adassp_mu(
    constants: AdaSSPConstants,
    bound_x: float,
    bound_y: float,
    dim: int,
    adjacency: str = "add_remove",
) -> float:
    """Returns mu of the joint release with this noise, rounded up.

    Args:
        constants: whose stds are > 0.
        bound_x: B > 0.
        bound_y: Y > 0.
        dim: d >= 1.
        adjacency: "add_remove", "zero_out" or "replace_one".

    Guarantee: mu-GDP of the three releases together, under the adjacency.

    Source: docs/proofs/output.md#least-squares-from-noisy-statistics

    Example:
        >>> noise = adassp_constants(1.0, 1e-6, bound_x=1.0, bound_y=1.0, dim=10)
        >>> gaussian_mu(1.0, 1e-6) * (1 - 1e-12) < adassp_mu(noise, 1.0, 1.0, 10) <= gaussian_mu(1.0, 1e-6)
        True
    """
    lmin, diagonal, off_diagonal, xty = (check.positive(std=std) for std in constants[:4])
    square = bound_x**2
    product = bound_x * bound_y
    replaced = sensitivity_factor(adjacency) == 2
    # squares off the diagonal count twice in the Frobenius norm, and their noise once
    xtx = min(diagonal, math.sqrt(2) * off_diagonal) if dim > 1 else diagonal
    moved = (
        (1.0, square, lmin),
        (math.sqrt(2) if replaced else 1.0, square, xtx),
        (1.0 + replaced, product, xty),
    )
    return scaled_up(math.hypot(*(factor * size / std for factor, size, std in moved)), 6)


def _shares(weights: Sequence[float]) -> tuple[float, float, float]:
    shares = [check.positive(weights=share) for share in weights]
    if len(shares) != 3 or not math.isclose(math.fsum(shares), 1.0, rel_tol=1e-9):
        raise ValueError(f"weights must be three numbers of sum 1 (got {tuple(weights)})")
    first, second, third = (share / (math.fsum(shares) * (1 + 1e-15)) for share in shares)
    return first, second, third


def _tail(failure: float) -> float:
    return math.sqrt(2 * (math.log(2) - math.log(check.open_interval(0.0, 1.0, failure=failure))))
