"""Plans of the filtered optimizers from promises and a budget, and the oracles that carry them out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.events import ADD_REMOVE, REPLACE_ONE
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.errors import AdjacencyError, MissingConstantError, UtilityWarning
from torch_dpsco.optim import checks
from torch_dpsco.optim.heavy_plan import scale_of
from torch_dpsco.optim.planned import agreed_adjacency
from torch_dpsco.oracles.user_filtered import Filter, UserFiltered
from torch_dpsco.oracles.user_poisson import AdaptiveRadius, PoissonTest, UserPoissonFiltered
from torch_dpsco.oracles.user_search import UserSearched
from torch_dpsco.problem import Problem
from torch_dpsco.theory.smoothing import smoothing_bias
from torch_dpsco.theory.user_level import (
    FilteredSchedule,
    LocalizedUserPlan,
    PairRadiusSearch,
    PoissonFilterPlan,
    UserFilterPlan,
    calibrate_filter,
    filtered_schedule,
    localized_user_plan,
    pair_radius_iid,
    poisson_filter_plan,
    schedule,
)

__all__ = ["filtered_oracle", "plan_filtered", "plan_localized_users", "poisson_oracle", "warn_if_users_are_buried"]

_FILTERED, _LOCALIZED = "UserFilteredSGD", "LocalizedUserSGD"


def plan_filtered(
    *,
    n_users: int,
    budget: Budget,
    dim: int,
    problem: Problem | None,
    min_items: int,
    pair_radius: float | PairRadiusSearch | None,
    lr: float | None,
    steps: int | None,
    max_steps: int,
    distance: float | None,
    batch_size: int | None,
    filter: str,
    typical_score: float | None,
    halt_probability: float,
    smoothing: float,
) -> FilteredSchedule:
    """Returns the plan of `UserFilteredSGD`, whose `plan` has the arguments."""
    agreed_adjacency(None, budget, "user")
    check.positive_count(dim=dim), check.positive_count(max_steps=max_steps)
    if distance is not None:
        check.positive(distance=distance)
    items, r = check.positive_count(min_items=min_items), check.nonnegative(smoothing=smoothing)
    epsilon = budget.epsilon
    if isinstance(pair_radius, PairRadiusSearch):
        epsilon, tau = _after_search(budget, pair_radius), 1.0  # the noise scales with what is found
        if lr is None or steps is None:
            raise MissingConstantError("lr and steps must be given beside a search: its bound is not known before")
    elif pair_radius is None:
        planned = check.positive_count(steps=max_steps if steps is None else steps)
        tau = pair_radius_iid(_lipschitz(problem, "pair_radius"), items, n_users, halt_probability / planned)
    else:
        tau = pair_radius
    if budget.adjacency == ADD_REMOVE:
        return _sampled(n_users, budget, tau, lr, steps, batch_size, typical_score, halt_probability)
    if budget.adjacency != REPLACE_ONE:
        raise AdjacencyError(f"budget must be of replace_one or add_remove for the filter (got {budget.adjacency})")
    if batch_size is not None:
        raise ValueError(f"batch_size must be None under replace_one: all users are in each step (got {batch_size})")
    if steps is None:
        plan = filtered_schedule(
            n_users=n_users,
            items_per_user=items,
            dim=dim,
            epsilon=epsilon,
            delta=budget.delta,
            lipschitz=_lipschitz(problem, "steps"),
            radius=_distance(problem, distance),
            pair_radius=tau,
            typical_score=typical_score,
            halt_probability=halt_probability,
            filter=filter,
            max_steps=max_steps,
        ).plan
    else:
        plan = calibrate_filter(
            n_users=n_users,
            steps=steps,
            epsilon=epsilon,
            delta=budget.delta,
            pair_radius=tau,
            typical_score=typical_score,
            halt_probability=halt_probability,
            filter=filter,
        )
    if isinstance(pair_radius, PairRadiusSearch) and pair_radius.overshoot > 0.05:
        warnings.warn(
            f"the search may end above all distances, with probability {pair_radius.overshoot:.2g}: give it more "
            f"epsilon (got {pair_radius.epsilon:g} for {pair_radius.n_users} users)",
            UtilityWarning,
            stacklevel=3,
        )
    if lr is not None:
        return FilteredSchedule(plan, check.positive(lr=lr), None)
    G, sigma_1 = _lipschitz(problem, "lr"), plan.noise_std / math.sqrt(plan.steps)
    best = schedule(G, _distance(problem, distance), n_users * items, plan.steps, dim, sigma_1)
    return FilteredSchedule(plan, best.lr, best.bound + smoothing_bias(G, dim, r))


def _sampled(
    n_users: int,
    budget: Budget,
    pair_radius: float,
    lr: float | None,
    steps: int | None,
    batch_size: int | None,
    typical_score: float | None,
    skip_probability: float,
) -> FilteredSchedule:
    if lr is None or steps is None or batch_size is None:
        raise MissingConstantError(
            f"lr, steps and batch_size must be given under add_remove, where no bound chooses them (got {lr}, {steps} "
            f"and {batch_size})"
        )
    score = n_users if typical_score is None else check.between(0.0, n_users, typical_score=typical_score)
    plan = poisson_filter_plan(
        n_users=n_users,
        batch_size=batch_size,
        steps=steps,
        epsilon=budget.epsilon,
        delta=budget.delta,
        pair_radius=pair_radius,
        typical_deficiency=batch_size * (1 - score / n_users),
        skip_probability=skip_probability,
    )
    return FilteredSchedule(plan, check.positive(lr=lr), None)


def plan_localized_users(
    *,
    n_users: int,
    budget: Budget,
    dim: int,
    problem: Problem,
    reg: float,
    min_items: int,
    pair_radius: float | None,
    phases: int | None,
    max_steps: int,
    distance: float | None,
    filter: str,
    score_share: float,
    halt_probability: float,
    schedule: str,
) -> LocalizedUserPlan:
    """Returns the plan of `LocalizedUserSGD`, whose `plan` has the arguments."""
    agreed_adjacency(None, budget, "user")
    if budget.adjacency != REPLACE_ONE:
        raise AdjacencyError(f"budget must be of replace_one, as the filter on all users is (got {budget.adjacency})")
    convexity = (problem.strong_convexity or 0.0) + check.nonnegative(reg=reg)
    if not convexity:
        raise MissingConstantError(
            f"{_LOCALIZED} needs strong convexity: give reg=, the lambda of (lambda/2)|w|^2, or promise "
            f"Problem(strong_convexity=...)"
        )
    if reg and math.isinf(problem.radius):
        raise MissingConstantError(f"{_LOCALIZED} needs Problem(radius=...) with reg=: it bounds the gradient reg w")
    lipschitz = _lipschitz(problem, "steps") + (reg * problem.radius if reg else 0.0)
    return localized_user_plan(
        n_users=n_users,
        items_per_user=check.positive_count(min_items=min_items),
        dim=dim,
        epsilon=budget.epsilon,
        delta=budget.delta,
        lipschitz=lipschitz,
        strong_convexity=convexity,
        radius=2 * problem.radius if distance is None else check.positive(distance=distance),
        pair_radius=pair_radius,
        score_share=score_share,
        halt_probability=halt_probability,
        filter=filter,
        phases=phases,
        max_steps=max_steps,
        schedule=schedule,
    )


def warn_if_users_are_buried(
    plans: Sequence[UserFilterPlan | PoissonFilterPlan], problem: Problem | None, n_users: int, dim: int, budget: Budget
) -> None:
    """Warns where a bound on gradients is promised and the noise exceeds it in each of the phases."""
    with suppress(MissingConstantError):
        bound = _lipschitz(problem, "a warning")
        noise = min(plan.noise_std / math.sqrt(plan.steps) for plan in plans)
        checks.warn_if_buried(noise, bound, n=n_users, dim=dim, epsilon=budget.epsilon, of="the mean of all steps")


def _after_search(budget: Budget, search: PairRadiusSearch) -> float:
    """Returns the epsilon that a search leaves."""
    if budget.adjacency == ADD_REMOVE:
        raise AdjacencyError("pair_radius must be a number under add_remove: adapt= follows the tests for free")
    if search.epsilon >= budget.epsilon:
        raise ValueError(
            f"pair_radius must be a search of less than the budget's epsilon={budget.epsilon:g} (got "
            f"{search.epsilon:g})"
        )
    return budget.epsilon - search.epsilon


def _lipschitz(problem: Problem | None, wanted: str) -> float:
    if problem is None:
        raise MissingConstantError(f"{wanted} must be given, or a problem=Problem(lipschitz=...) from which it follows")
    return problem.grad_bound()


def _distance(problem: Problem | None, distance: float | None) -> float:
    return scale_of(Problem() if problem is None else problem, distance, _FILTERED)


def filtered_oracle(
    plan: UserFilterPlan,
    search: PairRadiusSearch | None,
    center: Sequence[Tensor] | None,
    reach: float,
    min_items: int,
    ids: int,
) -> UserFiltered:
    """Returns the oracle of a plan, with a search in its first release if there is one; ids are in [0, ids)."""
    kept = Filter(plan.n_users, plan.score_floor, plan.ramp_end, plan.filter, plan.coupling_failure)
    if search is not None:
        return UserSearched(
            search,
            kept,
            plan.noise_std / plan.pair_radius,
            steps=plan.steps,
            threshold=plan.threshold,
            threshold_scale=plan.threshold_scale,
            query_scale=plan.query_scale,
            center=center,
            reach=reach,
            min_items=min_items,
            ids=ids,
        )
    return UserFiltered(
        kept,
        plan.pair_radius,
        plan.noise_std,
        steps=plan.steps,
        threshold=plan.threshold,
        threshold_scale=plan.threshold_scale,
        query_scale=plan.query_scale,
        center=center,
        reach=reach,
        min_items=min_items,
        ids=ids,
    )


def poisson_oracle(
    plan: PoissonFilterPlan,
    adapt: AdaptiveRadius | None,
    center: Sequence[Tensor] | None,
    reach: float,
    min_items: int,
) -> UserPoissonFiltered:
    """Returns the oracle of a plan for Poisson samples."""
    test = PoissonTest(
        plan.n_users,
        plan.batch_size,
        plan.n_min,
        plan.deficiency,
        plan.threshold,
        plan.score_noise_std,
        plan.ramp_end,
    )
    return UserPoissonFiltered(
        test, plan.pair_radius, plan.noise_std, center=center, reach=reach, min_items=min_items, adapt=adapt
    )
