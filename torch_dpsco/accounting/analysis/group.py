"""Several records of one privacy unit, and one record replaced where only adding and removing was analyzed.

Going from a data set to another that differs in k records is k hops between neighbors. What holds for one hop:

| one hop | k hops |
|---|---|
| pure epsilon | k epsilon |
| (epsilon, delta) | (k epsilon, delta (1 + e^epsilon + .. + e^((k-1) epsilon))) |
| rho-zCDP | k^2 rho |
| mu-GDP | k mu |
| Renyi curve D | sum of ka / (ka - k + i) D_(ka-k+i) over i = 1..k |

Replacing a record is two hops, remove and add, over the data set without it. None of these is the best statement for
a mechanism that is known: a Gaussian whose unit contributes at most some sum has that sum as its sensitivity; a unit of
k Poisson-sampled records is the mixture of `rdp_poisson_gaussian_group` and `poisson_group_delta`, and one replaced
Poisson-sampled record the pair of `rdp_poisson_gaussian_replace_one`.

Source: docs/proofs/accounting.md#groups; Mironov 2017; Bun and Steinke 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch_dpsco import _validate
from torch_dpsco.accounting.analysis.group_rdp import (
    RDPPoint,
    rdp_group,
    rdp_group_point,
    rdp_replace_one,
    rounded_up_product,
)
from torch_dpsco.accounting.analysis.poisson_profile import poisson_group_delta
from torch_dpsco.errors import AdjacencyError

__all__ = [
    "RDPPoint",
    "group_approx_dp_delta",
    "group_delta",
    "group_epsilon",
    "group_gdp_mu",
    "group_pure_epsilon",
    "group_zcdp_rho",
    "poisson_group_delta",
    "rdp_group",
    "rdp_group_point",
    "rdp_replace_one",
    "replace_one_delta",
    "replace_one_epsilon",
    "user_mu",
]

Curve = Callable[[float], float]

_SPLITS = 32  # tried splits of an epsilon; every split is valid
_LARGEST = 1e6  # epsilons beyond are reported as inf


def group_approx_dp_delta(epsilon: float, delta: float, group_size: int) -> float:
    """Returns the delta of a group at k epsilon: delta (e^(k epsilon) - 1) / (e^epsilon - 1).

    Args:
        epsilon: >= 0, of one record.
        delta: in [0, 1], of one record.
        group_size: k >= 1.

    Returns:
        delta of (k epsilon, delta)-DP for k records, at most 1, rounded up.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: the adjacency of the argument, k times.

    Source: docs/proofs/accounting.md#groups.

    Example:
        >>> round(group_approx_dp_delta(epsilon=0.2, delta=1e-6, group_size=2), 12)
        2.221403e-06
    """
    epsilon = _validate.nonnegative(epsilon=epsilon)
    delta = _validate.between(0.0, 1.0, delta=delta)
    size = _validate.positive_count(group_size=group_size)
    if delta == 0 or size == 1:
        return delta
    # e^((k-1) epsilon) times a factor in [1, k]; the logarithm keeps it finite
    factor = math.expm1(-size * epsilon) / math.expm1(-epsilon) if epsilon > 0 else float(size)
    growth, log_delta = (size - 1) * epsilon, math.log(delta)
    if growth + log_delta > 0:
        return 1.0
    # PRIVACY: covers the rounding of the exponent (test_group_delta_is_not_below_its_exact_value)
    return min(1.0, math.exp(growth + log_delta) * factor * (1 + 1e-15 * (8 + growth - log_delta)))


def group_pure_epsilon(epsilon: float, group_size: int) -> float:
    """Returns k epsilon, rounded up: the pure epsilon of a group.

    Args:
        epsilon: >= 0, of one record.
        group_size: k >= 1.

    Source: docs/proofs/accounting.md#groups.

    Example:
        >>> group_pure_epsilon(epsilon=0.5, group_size=4)
        2.0
    """
    return rounded_up_product(
        _validate.nonnegative(epsilon=epsilon, allow_inf=True), _validate.positive_count(group_size=group_size)
    )


def group_zcdp_rho(rho: float, group_size: int) -> float:
    """Returns k^2 rho, rounded up: the zCDP parameter of a group.

    Args:
        rho: >= 0, of one record.
        group_size: k >= 1.

    Source: docs/proofs/accounting.md#groups; Bun and Steinke 2016, proposition 27.

    Example:
        >>> group_zcdp_rho(rho=0.5, group_size=4)
        8.0
    """
    return rounded_up_product(
        _validate.nonnegative(rho=rho, allow_inf=True), _validate.positive_count(group_size=group_size) ** 2
    )


def group_gdp_mu(mu: float, group_size: int) -> float:
    """Returns k mu, rounded up: the GDP parameter of a group.

    Args:
        mu: >= 0, of one record.
        group_size: k >= 1.

    Source: docs/proofs/accounting.md#groups; Dong, Roth and Su 2022.

    Example:
        >>> group_gdp_mu(mu=0.5, group_size=4)
        2.0
    """
    return rounded_up_product(
        _validate.nonnegative(mu=mu, allow_inf=True), _validate.positive_count(group_size=group_size)
    )


def group_delta(epsilon: float, curve: Curve, group_size: int) -> float:
    """Returns delta at epsilon of a group, from a whole curve delta(epsilon) of one record.

    The least of `group_approx_dp_delta(e, curve(e), k)` over e from 0 to epsilon / k.

    Args:
        epsilon: >= 0, of the group.
        curve: valid delta of one record at any epsilon >= 0.
        group_size: k >= 1.

    Returns:
        delta in [0, 1].

    Raises:
        ValueError: an argument is out of range.

    Source: docs/proofs/accounting.md#groups.

    Example:
        >>> round(group_delta(2.0, lambda e: 1e-6 * math.exp(-e), 2), 9)
        1.368e-06
    """
    epsilon = _validate.nonnegative(epsilon=epsilon)
    size = _validate.positive_count(group_size=group_size)
    # PRIVACY: rounded down, so that k e <= epsilon (test_group_delta_uses_no_more_than_its_epsilon)
    share = epsilon / size * (1 - 4e-16)
    tried = [share * i / _SPLITS for i in range(_SPLITS)] + [share]
    return min(group_approx_dp_delta(e, curve(e), size) for e in tried)


def group_epsilon(delta: float, curve: Curve, group_size: int) -> float:
    """Returns an epsilon at which `group_delta` is at most delta, the least one to a relative 1e-9.

    Args:
        delta: in (0, 1), of the group.
        curve: valid delta of one record at any epsilon >= 0, nonincreasing.
        group_size: k >= 1.

    Returns:
        epsilon >= 0; inf if there is none up to 1e6.

    Source: docs/proofs/accounting.md#groups.

    Example:
        >>> round(group_epsilon(2e-6, lambda e: 1e-6 * math.exp(-e), 2), 6)
        0.0
    """
    size = _validate.positive_count(group_size=group_size)
    return _least_epsilon(lambda epsilon: group_delta(epsilon, curve, size), delta)


def replace_one_delta(epsilon: float, curve: Curve) -> float:
    """Returns delta at epsilon under REPLACE_ONE from a whole curve under ADD_REMOVE.

    Over the data set without the record, P <= e^s M + delta(s) and M <= e^(epsilon-s) Q + delta(epsilon - s), so that
    delta = delta(s) + e^s delta(epsilon - s) for every s in [0, epsilon]; the least of 33 values of s is returned. The
    middle one is (2e, delta (1 + e^e)); an s below it is mostly better.

    Args:
        epsilon: >= 0.
        curve: delta under ADD_REMOVE, the larger of both directions, at any epsilon >= 0.

    Returns:
        delta in [0, 1].

    Raises:
        ValueError: epsilon is negative or not finite, or a value of the curve is not in [0, 1].

    Guarantee: REPLACE_ONE of the record that is added or removed.

    Source: docs/proofs/accounting.md#replacing-from-adding-and-removing.

    Example:
        >>> round(replace_one_delta(2.0, lambda e: 1e-6 * math.exp(-e)), 9)
        9.7e-07
    """
    epsilon = _validate.nonnegative(epsilon=epsilon)
    tried = [epsilon * i / _SPLITS for i in range(_SPLITS + 1)]
    values = [_validate.between(0.0, 1.0, delta=curve(s * (1 - 4e-16))) for s in tried]  # s and its rest add up to less
    least = min(near + _grown(far, s) for s, near, far in zip(tried, values, reversed(values), strict=True))
    return min(1.0, least * (1 + 1e-15))


def replace_one_epsilon(delta: float, curve: Curve) -> float:
    """Returns an epsilon at which `replace_one_delta` is at most delta, the least one to a relative 1e-9.

    Args:
        delta: in (0, 1).
        curve: delta under ADD_REMOVE, the larger of both directions, at any epsilon >= 0, nonincreasing.

    Returns:
        epsilon >= 0; inf if there is none up to 1e6.

    Source: docs/proofs/accounting.md#replacing-from-adding-and-removing.

    Example:
        >>> round(replace_one_epsilon(1.5e-6, lambda e: 1e-6 * math.exp(-e)), 3)
        0.693
    """
    return _least_epsilon(lambda epsilon: replace_one_delta(epsilon, curve), delta)


def user_mu(items_per_release: Sequence[int], noise_multiplier: float, adjacency: str) -> float:
    """Returns the GDP parameter of Gaussian releases of fixed batches for a user who owns several items.

    mu = sqrt(sum over releases of (items in that release)^2) C / s, doubled where the items are replaced and not
    zeroed. With m items a user and e passes it is at most m sqrt(e) C / s, reached if they all share a batch.

    Args:
        items_per_release: items of the user in each release, >= 0; a public bound on all users.
        noise_multiplier: s / C, noise std over the clip of one item, > 0.
        adjacency: "zero_out" or "replace_one", of the user.

    Returns:
        mu, rounded up; exact for adaptively chosen functions of the batches.

    Raises:
        ValueError: an argument is out of range.
        AdjacencyError: "add_remove": removing a user would shift the batches of all others.

    Source: docs/proofs/accounting.md#groups.

    Example:
        >>> round(user_mu([2, 0, 1], noise_multiplier=2.0, adjacency="zero_out"), 6)
        1.118034
    """
    noise = _validate.positive(noise_multiplier=noise_multiplier)
    if adjacency == "add_remove":
        raise AdjacencyError("fixed batches have no guarantee under add_remove: ask for zero_out or replace_one")
    factor = {"zero_out": 1, "replace_one": 2}[_validate.choice(("zero_out", "replace_one"), adjacency=adjacency)]
    squares = sum(_validate.count(items_per_release=items) ** 2 for items in items_per_release)
    return factor * math.sqrt(squares) / noise * (1 + 1e-15)


def _least_epsilon(delta_at: Curve, delta: float) -> float:
    delta = _validate.open_interval(0.0, 1.0, delta=delta)
    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_at(high) > delta:
        low, high = high, 2 * high
        if high > _LARGEST:
            return math.inf
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_at(middle) <= delta else (middle, high)
    return high


def _grown(delta: float, epsilon: float) -> float:
    """Returns e^epsilon delta, at most 1, rounded up."""
    if delta == 0:
        return 0.0
    # PRIVACY: more than the rounding of the exponent (test_two_hops_are_never_below_the_exact_replacement)
    return math.exp(min(0.0, math.log(delta) + epsilon)) * (1 + 1e-12 + 1e-15 * epsilon)
