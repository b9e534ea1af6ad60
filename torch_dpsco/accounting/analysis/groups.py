"""Several records of one privacy unit: k hops between neighbors.

k hops of (epsilon, delta) give (k epsilon, delta (1 + e^epsilon + .. + e^((k-1) epsilon))), those of mu-GDP k mu.
Neither is the best statement for a mechanism that is known: a Gaussian whose unit contributes at most some sum has that
sum as its sensitivity, and a unit of k Poisson-sampled records is the mixture of `rdp_poisson_gaussian_group`.

Source: docs/proofs/accounting.md#groups.
"""

from __future__ import annotations

import math

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.exact import upper


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
    epsilon = check.nonnegative(epsilon=epsilon)
    delta = check.between(0.0, 1.0, delta=delta)
    size = check.positive_count(group_size=group_size)
    if delta == 0 or size == 1:
        return delta
    # e^((k-1) epsilon) times a factor in [1, k]; the logarithm keeps it finite
    factor = math.expm1(-size * epsilon) / math.expm1(-epsilon) if epsilon > 0 else float(size)
    growth = (size - 1) * epsilon
    log_delta = math.log(delta)
    if growth + log_delta > 0:
        return 1.0
    # PRIVACY: covers the rounding of the exponent (test_group_delta_is_not_below_its_exact_value)
    return min(1.0, math.exp(growth + log_delta) * factor * (1 + 1e-15 * (8 + growth - log_delta)))


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
    # PRIVACY: a product of floats rounds to nearest (test_products_are_not_below_their_exact_values)
    return upper(
        check.nonnegative(mu=mu, allow_inf=True), check.positive_count(group_size=group_size)
    )
