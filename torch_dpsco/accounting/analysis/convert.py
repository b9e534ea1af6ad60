"""Failure probabilities, and what Gaussian and zero-concentrated differential privacy say of (epsilon, delta).

A mechanism may be as private as its analysis says only up to an event of probability beta. Three kinds are told apart:

* coupling: the noiseless outputs of the two data sets can be coupled so that they are close except with probability d.
  By joint convexity of the hockey stick its delta is at most d + (1 - d) delta, with no factor e^epsilon;
* transcript: the failure is a function of the pair of data sets and the transcript, and two mechanisms M and M* agree
  until it happens. Then P(E) <= P*(E and good) + beta <= e^epsilon Q*(E and good) + delta + beta and the good part is
  the same under M: it adds beta;
* per side: on each data set on its own, M differs from M* with probability beta. Then P(E) <= P*(E) + beta
  <= e^epsilon (Q(E) + beta) + delta + beta: it adds (1 + e^epsilon) beta.

Several failures of one kind: couplings of successive releases hold together with probability prod(1 - d_i); transcript
and per-side failures add up.

Source: docs/proofs/accounting.md#failure-probabilities, docs/proofs/output.md#accuracy-in-expectation (per side).

Zero-concentrated differential privacy: rho-zCDP bounds the Renyi divergence of every order a by rho a. The conversion
at order a = 1 + b is

    epsilon(b) = (1 + b) rho + log(b / (1 + b)) - (log(delta) + log(1 + b)) / b,

and its derivative in b, rho + (log(delta) + log(1 + b)) / b^2, changes sign once, at the b with

    rho b^2 + log(1 + b) = log(1 / delta).

So both directions need one root, and any b gives a valid bound: an inexact root costs tightness, never privacy. For
unsampled Gaussian noise alone `gaussian` is exact and smaller.

Source: docs/proofs/accounting.md#concentrated-privacy; Bun and Steinke 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import scipy

from torch_dpsco import _validate as check
from torch_dpsco._margin import up

FailureKind = Literal["coupling", "transcript", "per_side"]

FAILURE_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)


def delta_before_failure(
    delta: float, failure: float, epsilon: float, kind: FailureKind
) -> float:
    """Returns the delta that is left for the mechanism itself.

    Args:
        delta: in [0, 1], of the whole statement.
        failure: total failure probability of this kind, in [0, 1].
        epsilon: >= 0, of the whole statement; only "per_side" depends on it.
        kind: "coupling" (delta - d) / (1 - d), "transcript" delta - beta, "per_side" delta - (1 + e^epsilon) beta.

    Returns:
        delta in [0, 1], rounded down; 0 if the failure takes all of it.

    Raises:
        ValueError: an argument is out of range.

    Source: docs/proofs/accounting.md#failure-probabilities.

    Example:
        >>> round(delta_before_failure(delta=1e-6, failure=1e-7, epsilon=1.0, kind="transcript"), 12)
        9e-07
    """
    delta, failure, weight = _checked(delta, failure, epsilon, kind)
    if failure == 0:
        return delta
    # PRIVACY: rounded down (test_the_inverse_never_exceeds_the_delta_of_the_statement); margin of what is
    # taken away (docs/proofs/accounting.md#failure-probabilities)
    left = delta * (1 - _ROUNDING) - up(failure * weight, 4 * _ROUNDING)
    if left <= 0:
        return 0.0
    return left / (1 - failure) * (1 - _ROUNDING) if kind == "coupling" else left


def epsilon_with_failures(
    delta: float,
    epsilon_at: Callable[[float], float],
    *,
    coupling: float = 0.0,
    transcript: float = 0.0,
    per_side: float = 0.0,
) -> float:
    """Returns an epsilon at which a mechanism with failures satisfies delta.

    epsilon solves epsilon = epsilon_at(delta'), delta' = (delta - beta_t - (1 + e^epsilon) beta_s - d) / (1 - d). The
    right-hand side grows with epsilon, so that iterating from 0 climbs to the least solution; the value returned lies
    above it and has been checked to satisfy the inequality.

    Args:
        delta: in (0, 1), of the whole statement.
        epsilon_at: conversion of the mechanism itself, nonincreasing in delta.
        coupling: total failure of couplings, d = 1 - prod(1 - d_i).
        transcript: total of transcript failures, beta_t.
        per_side: total of per-side failures, beta_s.

    Returns:
        epsilon >= 0, within a relative 1e-9 where it is not next to the largest that the failures admit; inf if they
        take all of delta.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: (epsilon, delta)-DP if `epsilon_at` is valid for the mechanism itself.

    Source: docs/proofs/accounting.md#failure-probabilities.

    Example:
        >>> from torch_dpsco.accounting.analysis.gaussian import gaussian_epsilon
        >>> round(epsilon_with_failures(1e-5, lambda delta: gaussian_epsilon(0.1, delta), per_side=1e-6), 6)
        0.347804
    """
    delta = check.open_interval(0.0, 1.0, delta=delta)

    def bound(epsilon: float) -> float:
        left = delta_before_failure(delta, transcript, epsilon, "transcript")
        left = delta_before_failure(left, per_side, epsilon, "per_side")
        left = delta_before_failure(left, coupling, epsilon, "coupling")
        return epsilon_at(left) if 0 < left < 1 else math.inf

    epsilon = 0.0
    for round_number in range(400):
        padded = epsilon * (1 + 1e-9 * 2 ** (round_number // 20)) + 1e-12
        found = bound(padded)
        # PRIVACY: only a verified epsilon is returned (test_the_epsilon_with_failures_satisfies_delta)
        if found <= padded:
            return found  # smaller, and valid too, since less is taken away there
        epsilon = bound(epsilon)
        if math.isinf(epsilon):
            break
    return math.inf


def _checked(
    delta: float, failure: float, epsilon: float, kind: FailureKind
) -> tuple[float, float, float]:
    """Returns delta, the failure, and the factor with which it is added to delta."""
    delta = check.between(0.0, 1.0, delta=delta)
    failure = check.between(0.0, 1.0, failure=failure)
    epsilon = check.nonnegative(epsilon=epsilon)
    if check.choice(FAILURE_KINDS, kind=kind) != "per_side":
        return delta, failure, 1.0
    return delta, failure, 1 + math.exp(epsilon) if epsilon < 700 else math.inf


_ROUNDING = 1e-14  # relative to the largest term of a sum: more than its rounding


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Returns the least epsilon for which rho-zCDP is known to imply (epsilon, delta)-DP, rounded up.

    Args:
        rho: >= 0.
        delta: in (0, 1).

    Returns:
        epsilon >= 0.

    Raises:
        ValueError: rho is negative or not finite, or delta is not in (0, 1).

    Guarantee: every rho-zCDP mechanism is (epsilon, delta)-DP, under the adjacency of its rho.

    Source: docs/proofs/accounting.md#concentrated-privacy.

    Example:
        >>> round(zcdp_epsilon(rho=0.1, delta=1e-5), 4)
        1.9142
    """
    rho = check.nonnegative(rho=rho)
    log_inverse = -math.log(check.open_interval(0.0, 1.0, delta=delta))
    if rho == 0:
        return 0.0

    def slope(log_b: float) -> float:
        b = math.exp(log_b)
        return rho * b * b + math.log1p(b) - log_inverse

    # At the root one of the two terms is at least half of the right-hand side, and neither exceeds it.
    log_gauss = (math.log(log_inverse) - math.log(rho)) / 2
    low = min(log_gauss - 0.5 * math.log(2), math.log(log_inverse / 2))
    high = min(log_gauss, log_inverse + math.log(-math.expm1(-log_inverse)))
    b = math.exp(scipy.optimize.brentq(slope, low - 1e-9, high + 1e-9, xtol=1e-12))
    gain = math.log1p(1 / b)
    conversion = (log_inverse - math.log1p(b)) / b
    # PRIVACY: the last term exceeds the rounding of the others (test_zcdp_conversions_are_on_the_safe_side)
    return max(
        0.0, (1 + b) * rho - gain + conversion + 1e-15 * ((1 + b) * rho + gain + abs(conversion))
    )


def zcdp_rho(epsilon: float, delta: float) -> float:
    """Returns the largest rho for which rho-zCDP is known to imply (epsilon, delta)-DP, rounded down.

    At the optimal b, rho = (log(1/delta) - log(1 + b)) / b^2 and epsilon = (1 + 2b) rho - log(1 + 1/b), which
    decreases in b: one root.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).

    Returns:
        rho >= 0 (0 below 1e-300).

    Raises:
        ValueError: epsilon is negative or not finite, or delta is not in (0, 1).

    Guarantee: zcdp_epsilon(rho, delta) <= epsilon for the rho returned.

    Source: docs/proofs/accounting.md#concentrated-privacy.

    Example:
        >>> round(zcdp_rho(epsilon=1.0, delta=1e-5), 5)
        0.03056
    """
    epsilon = check.nonnegative(epsilon=epsilon)
    log_inverse = -math.log(check.open_interval(0.0, 1.0, delta=delta))

    def gap(log_b: float) -> float:
        b = math.exp(log_b)
        rho = (log_inverse - math.log1p(b)) / b / b
        return (1 + 2 * b) * rho - math.log1p(1 / b) - epsilon

    # At the largest b, 1/delta - 1, rho is 0 and the gap is negative; at small b it is about log(1/delta) / b^2.
    high = min(
        log_inverse + math.log(-math.expm1(-log_inverse)), 709.0
    )  # e^709 is the last power that is finite
    low = high - 1.0
    while gap(low) <= 0:
        low -= 1.0 + abs(low) / 8
    b = math.exp(high if gap(high) > 0 else scipy.optimize.brentq(gap, low, high, xtol=1e-12))
    rho = (epsilon + math.log1p(1 / b) - (log_inverse - math.log1p(b)) / b) / (1 + b)
    # PRIVACY: 1e-12 exceeds all rounding (test_zcdp_conversions_are_on_the_safe_side)
    return rho * (1 - 1e-12) if rho > 1e-300 else 0.0  # subnormal numbers round by more
