"""Steps and step sizes of the filtered method: explicit constants, and the paper's numbers for reference.

With noise sigma = sigma_1 sqrt(T) per step, projected subgradient steps and average iterate, regret plus uniform
argument stability give for convex, G-Lipschitz losses, n users with m i.i.d. items each,

    E excess risk <= R^2/(2 eta T) + eta A,   A = (G^2 + d T sigma_1^2)/2 + 2 G^2 sqrt(T) + 4 G^2 T/(nm),

plus 2 G R times the probability of a halt or of a user without full weight. R bounds the distance of the start to a
minimizer (in the mean square).

Differs from the paper in: 1. constants; 2. no smoothing is needed (docs/errata.md, paper 3, E10); 3. steps end where
they stop helping.

Source: docs/proofs/user_level.md#bound-of-the-steps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch_dpsco import _validate as check
from torch_dpsco.errors import warn
from torch_dpsco.theory.user_level.calibrate import calibrate_filter
from torch_dpsco.theory.user_level.filter import UserFilterPlan


class UserSchedule(NamedTuple):
    """Step size, and the bound on the expected excess risk."""

    lr: float
    bound: float


class FilteredSchedule(NamedTuple):
    """A plan, the step size, and the bound on the expected excess risk; None if it did not choose the step size."""

    plan: UserFilterPlan
    lr: float
    bound: float | None


class PaperSchedule(NamedTuple):
    """The numbers of Theorem 4.1, constants 1; the radius is of a smoothing that no optimizer does."""

    smoothing_radius: float
    lr: float
    pair_radius: float
    default_steps: int


class LocalizedRadii(NamedTuple):
    """Sizes of the phases and the paper's bounds on the distance at which each starts."""

    phases_count: int
    phase_users: tuple[int, ...]
    radii: tuple[float, ...]


def schedule(
    lipschitz: float,
    radius: float,
    n_items: int,
    steps: int,
    dim: int,
    noise_std_per_root_step: float,
) -> UserSchedule:
    """Returns eta = R/sqrt(2 T A) and the bound R sqrt(2A/T) of the module's docstring.

    Args:
        lipschitz: G > 0.
        radius: R > 0.
        n_items: n m >= 1.
        steps: T >= 1.
        dim: d >= 1.
        noise_std_per_root_step: sigma_1 >= 0, noise std per step over sqrt(T).

    Source: docs/proofs/user_level.md#bound-of-the-steps.

    Example:
        >>> round(schedule(1.0, 1.0, 10**6, 100, 10, 0.0).bound, 6)
        0.640319
    """
    G = check.positive(lipschitz=lipschitz)
    R = check.positive(radius=radius)
    items = check.positive_count(n_items=n_items)
    T = check.positive_count(steps=steps)
    noise = (
        check.positive_count(dim=dim)
        * check.nonnegative(noise_std_per_root_step=noise_std_per_root_step) ** 2
    )
    A = (G**2 + T * noise) / 2 + 2 * G**2 * math.sqrt(T) + 4 * G**2 * T / items
    return UserSchedule(R / math.sqrt(2 * T * A), R * math.sqrt(2 * A / T))


def best_steps(
    lipschitz: float,
    n_items: int,
    dim: int,
    noise_std_per_root_step: float,
    max_steps: int | None = 200,
) -> int:
    """Returns T = min{(nm)^2/4, (4 G^2/(d sigma_1^2))^2, max_steps}, at least 1: beyond, nothing improves.

    Example:
        >>> best_steps(1.0, 10**6, 10, 0.1, max_steps=None), best_steps(1.0, 10**6, 10, 0.01)
        (1600, 200)
    """
    G = check.positive(lipschitz=lipschitz)
    items = check.positive_count(n_items=n_items)
    noise = (
        check.positive_count(dim=dim)
        * check.nonnegative(noise_std_per_root_step=noise_std_per_root_step) ** 2
    )
    enough = [items * items / 4]
    if noise > 0:
        enough.append((4 * G**2 / noise) ** 2)
    if max_steps is not None:
        enough.append(check.positive_count(max_steps=max_steps))
    return max(1, round(min(enough)))


def filtered_schedule(
    *,
    n_users: int,
    items_per_user: int,
    dim: int,
    epsilon: float,
    delta: float,
    lipschitz: float,
    radius: float,
    pair_radius: float,
    typical_score: float | None = None,
    halt_probability: float = 0.01,
    filter: str = "best",
    max_steps: int = 200,
) -> FilteredSchedule:
    """Returns a calibrated plan with the steps that suit its noise: T depends on sigma_1, and sigma_1 on log T only.

    Args:
        n_users: n, public.
        items_per_user: m, the smallest admitted number.
        dim: d, number of parameters.
        epsilon: > 0, of the run.
        delta: in (0, 1).
        lipschitz: G.
        radius: R.
        pair_radius: tau.
        typical_score: as in `calibrate_filter`, and so are the others.
        halt_probability: as there.
        filter: as there.
        max_steps: cap; a step costs n^2 d operations.

    Raises:
        InfeasibleError: as `calibrate_filter`.

    Guarantee: that of the plan.

    Source: docs/proofs/user_level.md#bound-of-the-steps.
    """
    items = check.positive_count(n_users=n_users) * check.positive_count(
        items_per_user=items_per_user
    )
    steps = check.positive_count(max_steps=max_steps)
    for _ in range(3):
        plan = calibrate_filter(
            n_users=n_users,
            steps=steps,
            epsilon=epsilon,
            delta=delta,
            pair_radius=pair_radius,
            typical_score=typical_score,
            halt_probability=halt_probability,
            filter=filter,
        )
        sigma_1 = plan.noise_std / math.sqrt(steps)
        better = best_steps(lipschitz, items, dim, sigma_1, max_steps)
        if better == steps:
            break
        steps = better
    made = schedule(
        lipschitz, radius, items, plan.steps, dim, plan.noise_std / math.sqrt(plan.steps)
    )
    return FilteredSchedule(plan, made.lr, made.bound)


def schedule_paper(
    n_users: int,
    items_per_user: int,
    dim: int,
    epsilon: float,
    delta: float,
    lipschitz: float,
    radius: float,
    steps: int,
) -> PaperSchedule:
    """Returns the schedule of Theorem 4.1 with its hidden constants at 1: for reference, no noise level follows.

    r = d^(1/4) R/sqrt(T), eta = (R/G) min{sqrt(m) n eps/(T sqrt(d) L), T^(-3/4), sqrt(nm)/T}, L = log(mnd/delta),
    tau = G log(ndm e^eps T/delta)/sqrt(m), default T = (mn)^2 + ceil(mn sqrt(d)).

    Source: Asi and Liu, Theorem 4.1; docs/proofs/user_level.md#distances-of-phases.

    Example:
        >>> schedule_paper(100, 5, 10, 1.0, 1e-6, 1.0, 1.0, 1000).default_steps
        251582
    """
    n = check.positive_count(n_users=n_users)
    m = check.positive_count(items_per_user=items_per_user)
    d = check.positive_count(dim=dim)
    T = check.positive_count(steps=steps)
    eps = check.positive(epsilon=epsilon)
    delta = check.open_interval(0.0, 1.0, delta=delta)
    G = check.positive(lipschitz=lipschitz)
    R = check.positive(radius=radius)
    log_items = math.log(m) + math.log(n) + math.log(d) - math.log(delta)
    rates = (
        math.sqrt(m) * n * eps / (T * math.sqrt(d) * log_items),
        T**-0.75,
        math.sqrt(n * m) / T,
    )
    return PaperSchedule(
        smoothing_radius=d**0.25 * R / math.sqrt(T),
        lr=R / G * min(rates),
        pair_radius=G * (log_items + eps + math.log(T)) / math.sqrt(m),
        default_steps=(m * n) ** 2 + math.ceil(m * n * math.sqrt(d)),
    )


def user_localized_schedule(
    n_users: int,
    items_per_user: int,
    dim: int,
    epsilon: float,
    delta: float,
    lipschitz: float,
    strong_convexity: float,
    rate_constant: float = 4.0,
    phases: int | None = None,
) -> LocalizedRadii:
    """Returns phases and radii of Algorithm 4 as published: the radii are not capped, and nothing is calibrated.

    k = max(1, ceil(log2 log2(mn))), n_i = n/2^(k+1-i), E_i = (4 C^2 G^2/mu)(1/(n_i m) + d log^2(n_i d m/delta)/(n_i^2
    eps^2 m)), D_i = 16 E_i ((2G^2/mu)/(16 E_0))^(1/2^i), Rhat_j = sqrt(2 D_{j-1}/mu). Use min(Rhat_j, R, 2G/mu);
    `localized_user_plan` does, and by default has bounds with explicit constants in place of C.

    Args:
        n_users: n; phase j has floor(n_j) of them, the smallest first.
        items_per_user: m.
        dim: d.
        epsilon: of each phase, hence of the run.
        delta: of each phase.
        lipschitz: G.
        strong_convexity: mu.
        rate_constant: C, the hidden constant of Theorem 4.1.
        phases: k; default as above.

    Source: Asi and Liu, Theorem 4.11; docs/proofs/user_level.md#distances-of-phases.

    Example:
        >>> user_localized_schedule(4096, 4, 10, 2.0, 1e-6, 1.0, 1.0).phase_users
        (256, 512, 1024, 2048)
    """
    n = check.positive_count(n_users=n_users)
    m = check.positive_count(items_per_user=items_per_user)
    d = check.positive_count(dim=dim)
    C = check.positive(rate_constant=rate_constant)
    eps = check.positive(epsilon=epsilon)
    delta = check.open_interval(0.0, 1.0, delta=delta)
    G = check.positive(lipschitz=lipschitz)
    mu = check.positive(strong_convexity=strong_convexity)
    k = default_phases(n * m) if phases is None else check.positive_count(phases=phases)

    def error(i: int) -> float:
        size = n / 2 ** (k + 1 - i)
        private = d * math.log(size * d * m / delta) ** 2 / (size**2 * eps**2 * m)
        bound: float = 16 * 4 * C**2 * G**2 / mu * (1 / (size * m) + private)
        return bound

    gaps = [error(i) * (2 * G**2 / mu / error(0)) ** (0.5**i) for i in range(k)]
    sizes = tuple(n // 2 ** (k + 1 - j) for j in range(1, k + 1))
    return LocalizedRadii(k, sizes, tuple(math.sqrt(2 * gap / mu) for gap in gaps))


def default_phases(n_items: int) -> int:
    """Returns max(1, ceil(log2 log2(mn))); base 2, so that (mn)^(1/2^k) <= 2.

    Example:
        >>> default_phases(4096 * 4), default_phases(2)
        (4, 1)
    """
    return max(1, math.ceil(math.log2(math.log2(max(2, check.positive_count(n_items=n_items))))))


def published_noise_std(
    n: int, steps: int, epsilon: float, delta: float, pair_radius: float
) -> float:
    """Returns the noise of the paper, for comparison: it is NOT a proved calibration, and no optimizer accepts it.

    sigma^2 = 8 tau^2 T log(e^eps T/delta) log(e^(eps/2)/delta)/(n eps)^2. Warns.

    Source: docs/errata.md, paper 3, E2 and E4.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     round(published_noise_std(2000, 100, 1.0, 1e-6, 1.0) * 2000)
        472
    """
    n = check.positive_count(n=n)
    T = check.positive_count(steps=steps)
    tau = check.positive(pair_radius=pair_radius)
    eps = check.positive(epsilon=epsilon)
    log_delta = math.log(check.open_interval(0.0, 1.0, delta=delta))
    warn("the published noise is not a proved calibration (errata E2, E4); for comparison only")
    logs = (eps + math.log(T) - log_delta) * (eps / 2 - log_delta)
    return math.sqrt(8 * T * logs) * tau / (n * eps)
