"""Phases of the localized user-level method (Algorithm 4), for strongly convex losses: plans, or where they fail.

Phase j = 1..k runs the filtered method on its own floor(n/2^(k+1-j)) users, the smallest first, from the answer of the
one before. Users are in one phase each, by a permutation that does not depend on the data, so that the run costs the
maximum over phases. The smallest phase decides whether a filter is proved at all: `plan_phases` takes the most phases
for which every one is.

With E excess_j <= B_j of `user_filtered_numbers.schedule` at the distance Rhat_j, strong convexity gives Rhat_{j+1} =
min(Rhat_1, sqrt(2 B_j/mu)), Rhat_1 = min(R, 2G/mu).

Differs from the paper in: 1. distances proved from explicit bounds; 2. steps are capped (the paper's are (m n_j)^2);
3. every phase has a calibration of its own; 4. k is what is feasible.

Source: docs/proofs/user_level.md#phases-on-disjoint-users, docs/proofs/user_level.md#distances-of-phases;
Asi and Liu, Algorithm 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.algorithms.user_filtered_numbers import (
    best_steps,
    calibrate_filter,
    default_phases,
    schedule,
)
from torch_dpsco.algorithms.user_numbers import UserFilterPlan, pair_radius_iid
from torch_dpsco.errors import InfeasibleError


@dataclass(frozen=True, kw_only=True)
class UserPhase:
    """Public numbers of one phase.

    Args:
        index: 1, 2, ... in the run.
        plan: filter, noise and guarantee; its n_users and steps are those of the phase.
        lr: eta > 0.
        start_radius: Rhat, bound on the distance of the start to the minimizer (in the mean square).
        uncapped_steps: T without `max_steps`.
        bound: on the expected excess risk after the phase; None where numbers of yours have none.
    """

    index: int
    plan: UserFilterPlan
    lr: float
    start_radius: float
    uncapped_steps: int
    bound: float | None

    @property
    def users(self) -> int:
        """Users of the phase; no other phase uses them."""
        return self.plan.n_users

    @property
    def steps(self) -> int:
        """T of the phase."""
        return self.plan.steps


@dataclass(frozen=True, kw_only=True)
class UserPhases:
    """Phases one after another, on disjoint users.

    Args:
        phases: at least one.
        n_users: n, public; those beyond the sum of the phases are not used.

    Raises:
        ValueError: no phases, more users than n, or phases of different epsilon or delta.

    Guarantee:
        (epsilon, delta)-DP for a replaced user: the maximum over phases of disjoint users; sizes and permutation are
        public.
    """

    phases: tuple[UserPhase, ...]
    n_users: int

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("phases must hold at least one phase (got none)")
        # PRIVACY: a user in two phases would pay for both (test_no_user_is_in_two_phases)
        if sum(phase.users for phase in self.phases) > check.positive_count(n_users=self.n_users):
            raise ValueError(f"phases must have at most n_users={self.n_users} users together")

    @property
    def epsilon(self) -> float:
        """Of the whole run."""
        return max(phase.plan.epsilon for phase in self.phases)

    @property
    def delta(self) -> float:
        """Of the whole run."""
        return max(phase.plan.delta for phase in self.phases)

    @property
    def phases_count(self) -> int:
        """K."""
        return len(self.phases)

    @property
    def bound(self) -> float | None:
        """On the expected excess risk of the answer; None where the last phase has none."""
        return self.phases[-1].bound


def plan_phases(
    *,
    n_users: int,
    items_per_user: int,
    dim: int,
    epsilon: float,
    delta: float,
    lipschitz: float,
    strong_convexity: float,
    radius: float = math.inf,
    pair_radius: float | None = None,
    score_share: float = 0.99,
    halt_probability: float = 0.01,
    filter: str = "best",
    phases: int | None = None,
    max_steps: int = 200,
) -> UserPhases:
    """Returns calibrated phases: as many as asked for, or as many as are feasible.

    Args:
        n_users: n, public.
        items_per_user: m, the smallest admitted number.
        dim: d, number of parameters.
        epsilon: > 0, of each phase, hence of the run.
        delta: in (0, 1), as epsilon.
        lipschitz: G.
        strong_convexity: mu.
        radius: R, bound on the distance of the start to the minimizer; inf for 2G/mu.
        pair_radius: tau; default `pair_radius_iid` of each phase at failure halt_probability/T.
        score_share: public guess of the score over the users of a phase.
        halt_probability: of each phase.
        filter: as in `calibrate_filter`.
        phases: k; default the largest feasible one up to ceil(log2 log2(mn)).
        max_steps: cap on the steps of a phase.

    Raises:
        InfeasibleError: names the phase, its users and steps, and the smallest number of users that works.

    Guarantee: that of `UserPhases`.

    Source: docs/proofs/user_level.md#phases-on-disjoint-users.
    """
    task = _Task(
        n=check.positive_count(n_users=n_users),
        items=check.positive_count(items_per_user=items_per_user),
        dim=check.positive_count(dim=dim),
        most_steps=check.positive_count(max_steps=max_steps),
        lipschitz=check.positive(lipschitz=lipschitz),
        convexity=check.positive(strong_convexity=strong_convexity),
        radius=check.positive(radius=radius, allow_inf=True),
        pair_radius=pair_radius,
        score_share=check.between(0.0, 1.0, score_share=score_share),
        target={
            "epsilon": epsilon,
            "delta": delta,
            "halt_probability": halt_probability,
            "filter": filter,
        },
    )
    if phases is not None:
        return task.planned(check.positive_count(phases=phases))
    for k in range(default_phases(task.n * task.items), 1, -1):
        try:
            return task.planned(k)
        except InfeasibleError:
            continue
    return task.planned(1)


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What phases are asked for, checked; `target` is what `calibrate_filter` takes as it is."""

    n: int
    items: int
    dim: int
    most_steps: int
    lipschitz: float
    convexity: float
    radius: float
    pair_radius: float | None
    score_share: float
    target: dict[str, Any]

    def planned(self, k: int) -> UserPhases:
        """Returns k phases."""
        made: list[UserPhase] = []
        for j in range(1, k + 1):
            users = self.n // 2 ** (k + 1 - j)
            if users < 4:
                raise InfeasibleError(
                    f"phase {j} of {k} has {users} users: use fewer phases, or n_users >="
                    f" {2 ** (k + 3 - j)}"
                )
            try:
                made.append(self._phase(j, users, made[-1].bound if made else None))
            except InfeasibleError as error:
                raise InfeasibleError(
                    f"phase {j} of {k} ({users} of {self.n} users): {error}"
                ) from error
        return UserPhases(phases=tuple(made), n_users=self.n)

    def _phase(self, j: int, users: int, proved: float | None) -> UserPhase:
        """Returns a phase with the step size of the explicit bound, at the distance that the one before proves."""
        start = min(self.radius, 2 * self.lipschitz / self.convexity)
        if proved is not None:
            start = min(start, math.sqrt(2 * proved / self.convexity))
        plan = self._filter(users, self.most_steps)
        items = users * self.items
        steps = 0
        for _ in range(2):
            noise = plan.noise_std / math.sqrt(plan.steps)
            steps = best_steps(self.lipschitz, items, self.dim, noise, None)
            if min(steps, self.most_steps) == plan.steps:
                break
            plan = self._filter(users, min(steps, self.most_steps))
        noise = plan.noise_std / math.sqrt(plan.steps)
        made = schedule(self.lipschitz, start, items, plan.steps, self.dim, noise)
        return UserPhase(
            index=j,
            plan=plan,
            lr=made.lr,
            start_radius=start,
            uncapped_steps=max(steps, plan.steps),
            bound=made.bound,
        )

    def _filter(self, users: int, steps: int) -> UserFilterPlan:
        tau = self.pair_radius
        if tau is None:
            failure = self.target["halt_probability"] / steps
            tau = pair_radius_iid(self.lipschitz, self.items, users, failure)
        return calibrate_filter(
            n_users=users,
            steps=steps,
            pair_radius=tau,
            typical_score=self.score_share * users,
            **self.target,
        )
