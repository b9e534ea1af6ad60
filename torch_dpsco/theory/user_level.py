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

from torch_dpsco.theory.user_baselines import break_even_clip, clipping_noise_std
from torch_dpsco.theory.user_calibrate import calibrate_filter
from torch_dpsco.theory.user_filter import UserFilterPlan
from torch_dpsco.theory.user_localized import LocalizedUserPlan, UserPhase, localized_user_plan
from torch_dpsco.theory.user_poisson import PoissonFilterPlan, poisson_filter_plan
from torch_dpsco.theory.user_radius import (
    PairRadiusSearch,
    pair_radius_iid,
    pair_radius_of_ball,
    pair_radius_search,
    typical_score,
)
from torch_dpsco.theory.user_schedules import filtered_schedule, published_noise_std, schedule

__all__ = [
    "LocalizedUserPlan",
    "PairRadiusSearch",
    "PoissonFilterPlan",
    "UserFilterPlan",
    "UserPhase",
    "break_even_clip",
    "calibrate_filter",
    "clipping_noise_std",
    "filtered_schedule",
    "localized_user_plan",
    "pair_radius_iid",
    "pair_radius_of_ball",
    "pair_radius_search",
    "poisson_filter_plan",
    "published_noise_std",
    "schedule",
    "typical_score",
]
