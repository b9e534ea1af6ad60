"""What plans that protect users have in common, those of filtered means included."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import ADD_REMOVE
from torch_dpsco.algorithms.user_localized_numbers import UserPhase
from torch_dpsco.algorithms.user_numbers import PairRadiusSearch, UserFilterPlan
from torch_dpsco.errors import MissingConstantError
from torch_dpsco.optim.planned import PlannedOptimizer, StepPlan
from torch_dpsco.oracles.base import MeanOracle
from torch_dpsco.oracles.users.filtered import Filter, UserFiltered
from torch_dpsco.oracles.users.search import UserSearched
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Prox
from torch_dpsco.rules import UpdateRule
from torch_dpsco.step import checks


@dataclass(frozen=True, kw_only=True)
class UserPlan(StepPlan):
    """Public numbers of a run that protects users.

    Args:
        min_items: rows that a user must have to count, public.
    """

    unit: ClassVar[str] = "user"
    min_items: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive_count(min_items=self.min_items)

    @property
    def assumed(self) -> str:
        """What is assumed, in words."""
        known = "" if self.adjacency == ADD_REMOVE else "; their number is public"
        return f"ids are right; rows of a user do not depend on other users{known}"


@dataclass(frozen=True, kw_only=True)
class FilterPlan(UserPlan):
    """Public numbers of a run on filtered means of users.

    Args:
        reach: users farther than reach * pair_radius from the center are isolated.
        risk_bound: on the expected excess risk of the answer; None where no theorem chose the step size.
    """

    values: ClassVar[tuple[type, ...]] = (UserFilterPlan, UserPhase, PairRadiusSearch)
    reach: float = 1000.0
    risk_bound: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check.between(1.0, 1e6, reach=self.reach)

    @abstractmethod
    def oracle(self, prox: Prox, center: Sequence[Tensor] | None = None) -> MeanOracle:
        """Returns a new oracle with the plan's numbers, that measures users from a center."""

    def of_all_users(
        self,
        plan: UserFilterPlan,
        center: Sequence[Tensor] | None,
        search: PairRadiusSearch | None = None,
    ) -> UserFiltered:
        """Returns the oracle of a filter, with a search in its first release if there is one."""
        kept = Filter(
            plan.n_users, plan.score_floor, plan.ramp_end, plan.filter, plan.coupling_failure
        )
        test = ("steps", "threshold", "threshold_scale", "query_scale")
        numbers: dict[str, Any] = {name: getattr(plan, name) for name in test}
        numbers |= {
            "center": center,
            "reach": self.reach,
            "min_items": self.min_items,
            "ids": self.n,
        }
        if search is not None:
            return UserSearched(search, kept, plan.noise_std / plan.pair_radius, **numbers)
        return UserFiltered(kept, plan.pair_radius, plan.noise_std, **numbers)

    def ending(self) -> Iterator[tuple[str, str]]:
        """Yields the last lines of the table."""
        yield "assumed", self.assumed
        if self.risk_bound is not None:
            yield (
                "expected",
                f"excess risk of the answer at most {self.risk_bound:.3g}, if the promises hold",
            )


class FilterOptimizer(PlannedOptimizer):
    """Base of the named optimizers on filtered means of users.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from the class's own `plan`.
        center: public vector that users' mean gradients are measured from, a tensor per parameter; None for 0.
        rule: as in `PlannedOptimizer`, and so are the others.
        prox: as there.
        reg: as there.
        accountant: as there.
        generator: as there.
    """

    def __init__(
        self,
        params: Any,
        plan: Any = None,
        *,
        center: Sequence[Tensor] | None = None,
        rule: UpdateRule | None = None,
        prox: Prox | None = None,
        reg: float | None = None,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        **moved: Any,
    ) -> None:
        self._center = center
        super().__init__(
            params,
            plan,
            rule=rule,
            prox=prox,
            reg=reg,
            accountant=accountant,
            generator=generator,
            **moved,
        )

    def _oracle(self, plan: StepPlan, prox: Prox) -> MeanOracle:
        assert isinstance(plan, FilterPlan)
        return plan.oracle(prox, self._center)


def near(plan: UserFilterPlan) -> str:
    """Returns in words the noise of a filter, beside the distance of users that it allows."""
    return (
        f"std {plan.noise_std:.3g} per coordinate of the mean of users within"
        f" {plan.pair_radius:.3g} of each other"
    )


def disagreement(stops: str, risk: float) -> str:
    """Returns in words what happens where the users of a step disagree.

    Args:
        stops: what ends then.
        risk: bound on the probability of that among users who agree as guessed.
    """
    return (
        f"{stops} ends early if users disagree, which has probability at most {risk:.2g} if they"
        " agree as guessed; each step compares all pairs of users"
    )


def warn_if_users_are_buried(
    plans: Sequence[UserFilterPlan],
    problem: Problem | None,
    n_users: int,
    dim: int | None,
    budget: Budget | None,
) -> None:
    """Warns where a bound on gradients is promised and the noise exceeds it in each of the phases."""
    if dim is None or budget is None:
        return
    with suppress(MissingConstantError):
        bound = lipschitz_of(problem, "a warning")
        noise = min(plan.noise_std / math.sqrt(plan.steps) for plan in plans)
        checks.warn_if_buried(
            noise, bound, n=n_users, dim=dim, epsilon=budget.epsilon, of="the mean of all steps"
        )


def lipschitz_of(problem: Problem | None, wanted: str) -> float:
    """Returns the promised bound on gradients; raises MissingConstantError, which names what is wanted."""
    if problem is None:
        raise MissingConstantError(
            f"{wanted} must be given, or a problem=Problem(lipschitz=...) from which it follows"
        )
    return problem.grad_bound()
