"""User-level privacy by filtered averaging: the names that optimizers and tests import.

* how far one user moves the mean: `user_sensitivity`; what a plan of public numbers proves: `user_filter`;
* the least noise, or the smallest number of users that works: `user_calibrate`;
* Poisson samples of users: `user_poisson`; the pair radius: `user_radius`;
* steps and step sizes, the paper's numbers: `user_schedules`; phases: `user_localized`;
* what to compare with: `user_baselines`.

The published calibration is not private (docs/errata.md, paper 3); here it is a figure for comparison only.

Source: docs/proofs/user_level.md; Asi and Liu, User-level differentially private stochastic convex optimization.
"""

from __future__ import annotations

import math

from scipy.stats import chi2

from torch_dpsco import _validate as check
from torch_dpsco.theory.user_baselines import (
    break_even_clip,
    centered_sensitivity,
    clipping_noise_std,
    item_level_user_delta,
)
from torch_dpsco.theory.user_calibrate import calibrate_filter, check_user_adjacency, smallest_users
from torch_dpsco.theory.user_filter import UserFilterPlan
from torch_dpsco.theory.user_localized import LocalizedUserPlan, UserPhase, localized_user_plan
from torch_dpsco.theory.user_poisson import PoissonFilterPlan, poisson_filter_plan, poisson_step_mu, poisson_underflow
from torch_dpsco.theory.user_radius import (
    PairRadiusSearch,
    adapted_pair_radius,
    pair_radius_iid,
    pair_radius_of_ball,
    pair_radius_search,
    typical_score,
)
from torch_dpsco.theory.user_schedules import (
    FilteredSchedule,
    LocalizedRadii,
    PaperSchedule,
    UserSchedule,
    best_steps,
    default_phases,
    filtered_schedule,
    min_users_paper,
    published_noise_std,
    schedule,
    schedule_paper,
    user_localized_schedule,
)
from torch_dpsco.theory.user_sensitivity import (
    RampEnd,
    bernoulli_mismatch,
    bernoulli_sensitivity,
    best_poisson_ramp_end,
    best_ramp_end,
    filter_coefficient,
    filter_coefficient_two_radius,
    poisson_filter_coefficient,
    ramp_start,
)

__all__ = [
    "FilteredSchedule",
    "LocalizedRadii",
    "LocalizedUserPlan",
    "PairRadiusSearch",
    "PaperSchedule",
    "PoissonFilterPlan",
    "RampEnd",
    "UserFilterPlan",
    "UserPhase",
    "UserSchedule",
    "adapted_pair_radius",
    "bernoulli_mismatch",
    "bernoulli_sensitivity",
    "best_poisson_ramp_end",
    "best_ramp_end",
    "best_steps",
    "break_even_clip",
    "calibrate_filter",
    "centered_sensitivity",
    "check_user_adjacency",
    "clipping_noise_std",
    "default_phases",
    "filter_coefficient",
    "filter_coefficient_two_radius",
    "filtered_schedule",
    "item_level_user_delta",
    "localized_user_plan",
    "min_users_paper",
    "pair_radius_iid",
    "pair_radius_of_ball",
    "pair_radius_search",
    "poisson_filter_coefficient",
    "poisson_filter_plan",
    "poisson_step_mu",
    "poisson_underflow",
    "published_noise_std",
    "ramp_start",
    "schedule",
    "schedule_paper",
    "sketch_failure",
    "smallest_users",
    "typical_score",
    "user_localized_schedule",
]


def sketch_failure(sketch_dim: int, distortion: float, n_users: int, steps: int) -> float:
    """Returns min(1, T n(n+1)/2 P[chi2_k < k (1 - eta)^2]): some pair contracts under a fresh Gaussian sketch.

    With a sketch drawn anew for each step, after its point is fixed, distances of at most tau in the sketch are at most
    tau/(1 - eta) but for this failure, of which both sides have one: (1 + e^epsilon) times it adds to delta.

    Args:
        sketch_dim: k >= 1.
        distortion: eta in (0, 1).
        n_users: n >= 1; the n + 1 rows of a pair of data sets count.
        steps: T >= 1.

    Source: docs/proofs/user_level.md#fresh-sketches.

    Example:
        >>> sketch_failure(256, 0.3, 1000, 1000) < 2e-4
        True
    """
    k, eta = check.positive_count(sketch_dim=sketch_dim), check.open_interval(0.0, 1.0, distortion=distortion)
    n, T = check.positive_count(n_users=n_users), check.positive_count(steps=steps)
    tail = float(chi2.logcdf(k * (1 - eta) ** 2, k))
    pairs = math.log(T) + math.log(n) + math.log(n + 1) - math.log(2)
    return min(1.0, math.exp(min(0.0, tail + pairs)) * (1 + 1e-9))
