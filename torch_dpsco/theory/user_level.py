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

from torch_dpsco.theory.user_baselines import break_even_clip, centered_sensitivity, clipping_noise_std
from torch_dpsco.theory.user_calibrate import calibrate_filter, check_user_adjacency, smallest_users
from torch_dpsco.theory.user_filter import UserFilterPlan
from torch_dpsco.theory.user_localized import LocalizedUserPlan, UserPhase, localized_user_plan
from torch_dpsco.theory.user_poisson import PoissonFilterPlan, poisson_filter_plan, poisson_step_mu, poisson_underflow
from torch_dpsco.theory.user_radius import (
    PairRadiusSearch,
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
    "smallest_users",
    "typical_score",
    "user_localized_schedule",
]
