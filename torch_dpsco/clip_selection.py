"""How to choose a clip threshold without guessing it, and what that costs.

The bias of clipping at C is at most E(|g| - C)_+, whose derivative is -P(|g| > C). So for "bias bound + a C", a being
what a unit of C costs in noise, the best threshold is exactly the (1 - a)-quantile of the gradient norm: no moment
order, no moment. The exchange rate a is the planner's.

| tool | charged as |
|---|---|
| `private_quantile` | `Pure(epsilon)`, or `ZCDP(rho)` with epsilon = sqrt(8 rho) (bounded range) |
| `private_moment` | `ZCDP(rho / 2)` for its truncation point, and a Gaussian at rho / 2 |
| `oracles.QuantilePilot` | the same quantile, on a pilot group of records of its own: free under the max rule |
| `oracles.AdaptiveClipped` | each step's noise multiplier holds the count's share |

Proofs: docs/proofs/heavy_tailed.md#exchange-rates, docs/proofs/heavy_tailed.md#private-quantile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco._margin import up
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.adjacency import ADJACENCIES, REPLACE_ONE, ZERO_OUT, Adjacency
from torch_dpsco.accounting.events import Gaussian, Sequential
from torch_dpsco.accounting.stated import ZCDP, Pure
from torch_dpsco.errors import InfeasibleError, warn
from torch_dpsco.mechanisms.exponential import draw_quantile, geometric_grid, quantile_law
from torch_dpsco.mechanisms.vector_noise import exact_release
from torch_dpsco.noise import normal
from torch_dpsco.rng import noise_generator
from torch_dpsco.theory.rounding import asks_exact, exact_grid, with_grid

__all__ = [
    "C_MAX",
    "C_MIN",
    "LEAST_PILOT",
    "adaptive_clip_update",
    "pilot_size",
    "private_moment",
    "private_quantile",
    "rank_error",
    "target_quantile",
    "warn_at_grid_end",
]

C_MIN, C_MAX = 1e-4, 1e4  # default range of thresholds
LEAST_PILOT = 200  # records
RULES = ("theory", "balanced", "median")


@typed
def adaptive_clip_update(clip: float, fraction: float, target: float, lr: float = 0.2) -> float:
    """Returns the next threshold, clip exp(-lr (fraction - target)): post-processing of a private fraction.

    It may be inf or 0, where the factor is beyond floating point.

    Args:
        clip: threshold so far, > 0.
        fraction: private estimate of the fraction of rows below it; noise may put it outside of [0, 1].
        target: quantile to be reached, in [0, 1].
        lr: > 0.

    Raises:
        ValueError: an argument is out of range.

    Source: Andrew, Thakkar, McMahan and Ramaswamy 2021; docs/proofs/heavy_tailed.md#adaptive-clip.

    Example:
        >>> round(adaptive_clip_update(1.0, fraction=0.9, target=0.5), 4)
        0.9231
    """
    off = check.finite(fraction=fraction) - check.between(0.0, 1.0, target=target)
    return check.positive(clip=clip) * math.exp(min(-check.positive(lr=lr) * off, 709.0))  # exp(710) would raise


@typed
def pilot_size(n: int) -> int:
    """Returns how many of n records a pilot should have: 5 %, at least 200.

    Raises:
        InfeasibleError: no record would be left to train on.
    """
    size = max(LEAST_PILOT, math.ceil(check.positive_count(n=n) / 20))
    if size >= n:
        raise InfeasibleError(f"n must be > {LEAST_PILOT} for a pilot group (got {n}): give a fixed clip")
    return size


@typed
def rank_error(epsilon: float, grid_size: int, failure: float = 0.05) -> float:
    """Returns (2/epsilon) log(K/failure): a private quantile's rank is that near but for this probability.

    Args:
        epsilon: of the exponential mechanism, > 0.
        grid_size: K >= 1.
        failure: in (0, 1).
    """
    size = check.positive_count(grid_size=grid_size)
    return 2.0 / check.positive(epsilon=epsilon) * math.log(size / check.open_interval(0.0, 1.0, failure=failure))


@typed
def target_quantile(
    rule: str,
    exchange_rate: float | None = None,
    *,
    pilot_size: int,
    epsilon: float,
    grid_size: int,
    failure: float = 0.05,
) -> float:
    """Returns the quantile of gradient norms at which to clip: that of a rule, as far as the pilot can resolve it.

    * "theory": 1 - a, best for the bias bound; "balanced": min(1 - a, 0.9); "median": 1/2.
    * If a > 0.9 the noise dominates whatever the clip: 0.1, with a warning.
    * Above 1 - 2 rank_error / pilot_size (for 0.9 and below: 1 - rank_error / pilot_size) the release would often be
      more than the largest norm: that, with a warning.

    Args:
        rule: "theory", "balanced" or "median".
        exchange_rate: a >= 0, the growth of the noise per unit of clip; not needed for "median".
        pilot_size: public number of norms.
        epsilon: of the exponential mechanism, > 0.
        grid_size: K, number of thresholds to choose from.
        failure: probability with which the rank error may be larger.

    Raises:
        InfeasibleError: the pilot resolves no quantile at all; names the smallest size that does.
        ValueError: an argument is out of range, or the exchange rate is missing.

    Example:
        >>> target_quantile("balanced", 0.02, pilot_size=500, epsilon=1.0, grid_size=107)
        0.9
    """
    wanted = _wanted(check.choice(RULES, rule=rule), exchange_rate)
    size, error = check.positive_count(pilot_size=pilot_size), rank_error(epsilon, grid_size, failure)
    if error >= size:
        raise InfeasibleError(f"pilot_size must be >= {math.floor(error) + 1} at epsilon {epsilon:g} (got {size})")
    # ranks near the end are released together with all thresholds above every norm: keep twice the error away from it
    highest = max(1.0 - 2.0 * error / size, min(0.9, 1.0 - error / size))
    if wanted > highest:
        warn(
            f"a pilot of {size} records resolves ranks up to {error:.0f} only: quantile {highest:.3f} instead of "
            f"{wanted:.3f}; a larger pilot_size or epsilon would resolve it"
        )
    return min(wanted, highest)


def _wanted(rule: str, exchange_rate: float | None) -> float:
    if rule == "median":
        return 0.5
    if exchange_rate is None:
        raise ValueError(f"exchange_rate must be given for rule {rule!r} (got None): plans have it")
    rate = check.nonnegative(exchange_rate=exchange_rate)
    if rate > 0.9:
        warn(
            f"noise dominates: a unit of clip costs {rate:.2f} in noise, so no clip gives a useful step; the quantile "
            f"is 0.1. Use more records per step, fewer steps or a larger budget",
            stacklevel=3,
        )
        return 0.1
    return 1.0 - rate if rule == "theory" else min(1.0 - rate, 0.9)


def warn_at_grid_end(threshold: float, grid: Sequence[float] | NDArray[np.float64]) -> None:
    """Warns if a released threshold is an end of its grid. It looks at the private output only, so that it is free."""
    name = {float(grid[0]): "c_min", float(grid[-1]): "c_max"}.get(threshold)
    if name is not None:
        warn(f"the private threshold {threshold:g} is at the end of its grid: {name} is probably wrong", stacklevel=3)


@typed
def private_quantile(
    norms: ArrayLike,
    *,
    quantile: float,
    epsilon: float | None = None,
    rho: float | None = None,
    c_min: float = C_MIN,
    c_max: float = C_MAX,
    accountant: Accountant,
    n: int | None = None,
    generator: torch.Generator | None = None,
) -> float:
    """Releases a threshold near a quantile of private norms, and charges it.

    Args:
        norms: one number >= 0 per record, which depends on that record alone; NaN and inf count as above everything.
        quantile: public target in [0, 1].
        epsilon: of the exponential mechanism, charged as `Pure`; give this one or `rho`.
        rho: charged as `ZCDP`, with epsilon = sqrt(8 rho); cheaper in a ledger of Gaussians.
        c_min: least threshold, public, > 0.
        c_max: largest threshold, public.
        accountant: charged before anything is drawn.
        n: public reference number of records, for add_remove. None: their number is public.
        generator: for tests only (warns).

    Raises:
        BudgetExceeded: the release would pass the budget; nothing was drawn.
        AdjacencyError: add_remove without n.
        ValueError: an argument is out of range.

    Guarantee:
        epsilon-DP, and (epsilon^2 / 8)-zCDP, under replace_one and zero_out; under add_remove too if n is given. Unit:
        what one norm is of. What c_min, c_max and quantile were chosen by must not be the data.

    Source: docs/proofs/heavy_tailed.md#private-quantile.

    Example:
        >>> from torch_dpsco.accounting.adjacency import REPLACE_ONE
        >>> accountant = Accountant(adjacency=REPLACE_ONE)
        >>> clip = private_quantile(np.linspace(0, 4, 400), quantile=0.5, epsilon=1.0, accountant=accountant)
        >>> 1.5 < clip < 2.5, round(accountant.get_epsilon(1e-6), 3)
        (True, 1.0)
    """
    values, size, adjacencies = _records(norms, n)
    grid = geometric_grid(c_min, c_max)
    if (epsilon is None) == (rho is None):
        raise ValueError(f"epsilon or rho must be given, and not both (got {epsilon} and {rho})")
    event: Pure | ZCDP
    if epsilon is not None:
        event = Pure(check.positive(epsilon=epsilon), adjacencies)
    else:
        rho = check.positive(rho=rho)
        event, epsilon = ZCDP(rho, adjacencies=adjacencies), _epsilon_of(rho)
    quantile_law([], grid, quantile, epsilon, size)  # its checks, before anything is charged
    stream = noise_generator("cpu", generator)
    # PRIVACY: charged before anything is drawn (test_nothing_is_drawn_that_was_not_charged)
    accountant.authorize(event)
    threshold = draw_quantile(values, grid, quantile, epsilon, size, stream)
    warn_at_grid_end(threshold, grid)
    return threshold


@typed
def private_moment(
    norms: ArrayLike,
    order: float,
    *,
    rho: float,
    c_min: float = C_MIN,
    c_max: float = C_MAX,
    secure: str | None = None,
    accountant: Accountant,
    n: int | None = None,
    generator: torch.Generator | None = None,
) -> float:
    """Releases an estimate of (E |g|^k)^(1/k) from private norms, for the planners, and charges it.

    tau is a private (1 - 1/sqrt(n))-quantile, with rho/2; then mean_i min(|g_i|, tau)^k + N(0, (tau^k / n)^2 / rho),
    with the other rho/2, clamped at 0; its k-th root. Biased low: what is above tau counts as tau.

    Args:
        norms: one number >= 0 per record, which depends on that record alone; NaN and inf count as tau.
        order: k > 1.
        rho: zCDP of both releases together, > 0.
        c_min: least tau, public, > 0.
        c_max: largest tau, public.
        secure: "exact" for noise drawn in integers on a public grid; the draw of tau is one of integers anyhow.
        accountant: charged before anything is drawn.
        n: public reference number of records, for add_remove. None: their number is public.
        generator: for tests only (warns).

    Returns:
        The estimate >= 0; 0, with a warning, if noise hides the moment.

    Raises:
        BudgetExceeded: the release would pass the budget; nothing was drawn.
        AdjacencyError: add_remove without n.
        ValueError: an argument is out of range.

    Guarantee:
        rho-zCDP under replace_one and zero_out; under add_remove too if n is given: in units of tau^k each summand is
        in [0, 1] and the divisor is public, so that one record moves the mean by at most 1/n.

    Source: docs/proofs/heavy_tailed.md#private-moment.

    Example:
        >>> norms = np.linspace(0, 1, 4000)  # (1 / 5)^(1 / 4) = 0.669
        >>> 0.6 < private_moment(norms, 4.0, rho=0.5, accountant=Accountant()) < 0.7
        True
    """
    values, size, adjacencies = _records(norms, n)
    grid, order = geometric_grid(c_min, c_max), check.order(order=order)
    rho, stream = check.positive(rho=rho), noise_generator("cpu", generator)
    quantile, epsilon = 1.0 - 1.0 / math.sqrt(size), _epsilon_of(rho / 2)
    gaussian = _moment_event(rho, adjacencies, asks_exact(secure))
    event = Sequential((ZCDP(rho / 2, adjacencies=adjacencies), gaussian))
    quantile_law([], grid, quantile, epsilon, size)  # its checks, before anything is charged
    # PRIVACY: charged before anything is drawn (test_nothing_is_drawn_that_was_not_charged)
    accountant.authorize(event)
    tau = draw_quantile(values, grid, quantile, epsilon, size, stream)
    # PRIVACY: NaN and inf become 1, so that each summand is in [0, 1] (test_one_norm_moves_the_moment_by_at_most_1)
    summands = np.nan_to_num(np.clip(values / tau, 0.0, 1.0), nan=1.0) ** order
    total = math.fsum(summands.tolist())
    if gaussian.exact:
        total = float(exact_release(torch.tensor([total], dtype=torch.float64), gaussian, stream))
    else:
        total += normal(gaussian.sigma, stream)
    warn_at_grid_end(tau, grid)
    mean = total / size
    if mean <= 0:
        warn("the moment drowned in its noise: use more records or a larger rho")
    return tau * math.pow(max(mean, 0.0), 1.0 / order)


def _moment_event(rho: float, adjacencies: tuple[Adjacency, ...], exact: bool) -> Gaussian:
    """Returns the event, (rho/2)-zCDP, of a noisy sum of numbers in [0, 1]."""
    # of fewer than 2^32 summands: 2^-20 for their powers, whose last bit may depend on their place, 2^-20 for the sums
    # PRIVACY: rounding to the grid moves the sum too (test_the_grid_is_in_the_sensitivity_of_exact_moments); margin
    # of the noise (docs/proofs/rounding.md#model-of-arithmetic)
    moved = with_grid(1.0 + 2.0**-18, exact)
    event = Gaussian(up(moved / math.sqrt(rho), 2.0**-50), dict.fromkeys(adjacencies, moved), exact=exact)
    if exact:
        exact_grid(event.sigma, moved, 1, largest=2.0**32)  # raises before anything is charged
    return event


def _records(norms: ArrayLike, n: int | None) -> tuple[NDArray[np.float64], int, tuple[Adjacency, ...]]:
    """Returns the norms, their public number, and the adjacencies under which that is public."""
    try:
        values = np.asarray(norms, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"norms must hold one number per record (got {type(norms).__name__})") from error
    if values.ndim != 1:
        raise ValueError(f"norms must hold one number per record (got shape {values.shape})")
    if n is not None:
        return values, check.positive_count(n=n), ADJACENCIES
    # PRIVACY: their number enters the rank and the divisor (test_without_a_public_size_add_remove_is_refused)
    return values, check.positive_count(n=len(values)), (REPLACE_ONE, ZERO_OUT)


def _epsilon_of(rho: float) -> float:
    """Returns epsilon of an exponential mechanism that is rho-zCDP: rho = epsilon^2 / 8, rounded down."""
    return math.sqrt(8.0 * rho) * (1.0 - 2.0**-50)
