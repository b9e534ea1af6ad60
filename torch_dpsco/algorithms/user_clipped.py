"""UserClippedSGD: clips each user's mean gradient, whatever rows it is made of.

What plans that protect users have in common, those of filtered means included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Design, Full
from torch_dpsco.accounting.events import ADD_REMOVE, Adjacency
from torch_dpsco.algorithms.clips import AdaptiveClipped
from torch_dpsco.algorithms.user_oracles import UserClipped
from torch_dpsco.errors import MissingConstantError
from torch_dpsco.problem import Pace, Phase
from torch_dpsco.prox import Prox
from torch_dpsco.step.chooser import (
    Draws,
    Given,
    UserScale,
    agreed,
    choose_design,
    choose_noise,
    choose_pace,
    dimension,
    warn_if_buried,
    with_batches,
)
from torch_dpsco.step.oracle import Clipped, ClippedMean, Release
from torch_dpsco.step.plan import PlannedOptimizer, StepPlan, noise_on_mean

_FULL_STEPS = 30
_EPOCHS = 10
_START = 0.03  # of a search: first clip
_TARGET = 0.1  # and quantile
_VOTES = 0.02  # and share of the squared budget


@dataclass(frozen=True, kw_only=True)
class UserPlan(StepPlan):
    """Public numbers of a run that protects users.

    Args:
        min_items: rows that a user must have to count, public.
    """

    unit: ClassVar[str] = "user"
    min_items: int = 1

    @property
    def assumed(self) -> str:
        """What is assumed, in words."""
        known = "" if self.adjacency == ADD_REMOVE else "; their number is public"
        return f"ids are right; rows of a user do not depend on other users{known}"


@dataclass(frozen=True, kw_only=True)
class UserClippedPlan(UserPlan):
    """Public numbers of a run of UserClippedSGD.

    Args:
        clip: of a user's mean gradient; the first one of a search.
        noise_multiplier: noise std on the sum over users over the clip; of a search that of a whole step, in which sum
            and votes are released together.
        search: whether the clip follows a low quantile of the lengths of users' gradients (`oracles.AdaptiveClipped`);
            then means are divided by the clip: lr is in its units.
    """

    clip: float
    noise_multiplier: float
    search: bool = False

    def oracle(self, prox: Prox) -> UserClipped:
        """Returns a new oracle with the plan's numbers."""
        clipping: ClippedMean = Clipped(self.clip, self.noise_multiplier, self.batch_size)
        if self.search:
            count_noise = (1.0 - _TARGET) * self.noise_multiplier / math.sqrt(_VOTES)
            spread = (
                count_noise / self.batch_size
            )  # of the noise on the share of users below the clip
            clipping = AdaptiveClipped(
                self.clip,
                None,
                self.batch_size,
                _TARGET,
                lr=0.1 / max(0.5, spread),
                first=1.0 / max(1.0, spread),
                count_noise=count_noise,
                total_noise_multiplier=self.noise_multiplier,
            )
        return UserClipped(clipping, self.n, min_items=self.min_items)

    def noise_shares(self) -> Iterator[tuple[str, float, int | None]]:
        """Yields the noise on the mean of users; see `Plan.noise_shares`."""
        yield "each step", self.noise_multiplier / self.batch_size, None

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        share = self.noise_multiplier / self.batch_size
        if not self.search:
            yield noise_on_mean(share, self.clip)
        else:
            yield (
                "noise",
                (
                    f"std {share:.3g} of the clip per coordinate of a mean of gradients, of norm at"
                    " most the clip"
                ),
            )
            yield (
                "clip",
                (
                    f"found in the run, for {_VOTES:.0%} of its squared budget: from {self.clip:g}"
                    f" on it follows the {_TARGET:g} quantile of the lengths of users'"
                    " mean gradients; a user should have some ten rows"
                ),
            )
        yield "assumed", self.assumed


class UserClippedSGD(PlannedOptimizer):
    """SGD on the mean of users' clipped mean gradients: user-level DP-SGD, the default recommendation.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from `UserClippedSGD.plan`.
        rule: another update rule, e.g. `rules.TorchRule(torch.optim.Adam(...))`; it has averages of its own.
        prox: constraint or penalty.
        reg: lambda of (lambda/2)|w|^2, see `PrivateOptimizer`.
        accountant: ledger to charge, of unit "user"; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Unit: user, all rows of one. Adjacency: add_remove, zero_out or replace_one with Poisson batches of users, the
        latter two with fixed ones. Event of a step: that of HolderSGD, with users for records. Assumes: batches of the
        optimizer's own loader, ids that are right, rows of a user that do not depend on other users.
        Source: docs/proofs/user_level.md#clipped-means-of-users.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = dp.attach(torch.nn.Linear(3, 1))
        >>> data = torch.utils.data.TensorDataset(torch.randn(90, 3), torch.ones(90, 1))
        >>> plan = dp.UserClippedSGD.plan(
        ...     n_users=30, budget=dp.Budget(2.0, 1e-4, unit="user"), clip=1.0, lr=0.5, steps=4)
        >>> optimizer = dp.UserClippedSGD(model.parameters(), plan)
        >>> for x, y, users in optimizer.loader(data, users=torch.arange(90) % 30):
        ...     optimizer.zero_grad()
        ...     dp.losses.Logistic()(model(x), y).backward()
        ...     optimizer.step(users=users)
        >>> optimizer.report().epsilon == plan.epsilon() <= 2.0
        True
    """

    plans = UserClippedPlan

    @classmethod
    def plan(
        cls,
        *,
        n_users: int,
        clip: float | None = None,
        lr: float | None = None,
        budget: Budget | None = None,
        noise_multiplier: float | None = None,
        batch_size: int | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        sampling: str | Design | None = None,
        min_items: int = 1,
        average: str | None = None,
        adjacency: Adjacency | None = None,
        dim: Any = None,
        distance: float | None = None,
        secure: str | None = None,
    ) -> UserClippedPlan:
        """Returns noise, steps and epsilon of a run, before anything is spent.

        What is not given follows from the number of users and the budget alone (docs/proofs/steps.md#users).

        Args:
            n_users: public number of users (a reference under add_remove).
            clip: C > 0, of each user's mean gradient, public; default a search in the run, whose cost is in the noise.
            lr: step size, > 0, without momentum; default by the step rule. With a search in units of the clip.
            budget: target, of unit "user"; the noise is chosen for it unless it is given, and then the budget only
                limits the run.
            noise_multiplier: z >= 0, noise std on the sum over users over C; 0 is not private.
            batch_size: expected number of users of a batch, the public divisor; default all of them, or at least 1024
                that make 20 passes in the steps of the rule.
            steps: number of steps, in place of epochs; default by the step rule, 64 to 256. Without both, and with a
                noise of yours, there is no limit but the budget.
            epochs: passes over users; where clip and lr are given default 30 (all users: 30 steps), 10 for smaller
                batches.
            sampling: "poisson" (default, but "assigned" for exactly one pass), "fixed" (either with a batch of all
                users: "full"), "shuffled", "allocated" (each user once per pass, secretly: `Assigned`, at the price of
                Poisson), "assigned" (one such pass) or "full"; or a design of users.
            min_items: rows that a user must have, public; others contribute 0.
            average: "last", "uniform" or "weighted"; default "last", or "weighted" where the rule chooses lr.
            adjacency: default the budget's, or "zero_out".
            dim: number of parameters, or the model: the step rule takes 64 without it. A warning tells where noise
                buries the signal.
            distance: guess of how far the parameters have to go, for the step rule; default 6.
            secure: "exact" for noise in integers on a public grid, see docs/performance.md for its cost.

        Raises:
            InfeasibleError: the target cannot be reached; names the way out.
            UnitError: the budget is of another unit.
            AdjacencyError: sampling and adjacency do not go together.
        """
        budget, adjacency = agreed(budget, adjacency, "user")
        given = Given(
            n=check.positive_count(n_users=n_users),
            adjacency=adjacency,
            sampling=sampling,
            batch_size=batch_size,
            steps=steps,
            epochs=epochs,
            noise_multiplier=noise_multiplier,
        )
        if distance is not None:
            check.positive(distance=distance)
        by_rule = clip is None or lr is None
        if noise_multiplier is not None and by_rule:
            raise MissingConstantError(
                f"clip and lr must be given beside noise_multiplier={noise_multiplier} (got {clip}"
                f" and {lr})"
            )
        units = 1.0 if clip is None else check.positive(clip=clip)
        scale = UserScale(units, distance, dimension(dim))
        draws = _design(scale if by_rule else None, budget, given)
        noise = choose_noise(budget, *draws, given)
        pace = choose_pace(scale, draws, noise) if lr is None else Pace(lr)
        warn_if_buried(
            None if noise_multiplier is not None else budget, draws, noise, n_users, scale.dim
        )
        return UserClippedPlan(
            budget=budget,
            adjacency=adjacency,
            design=draws.design,
            steps=draws.steps,
            lr=check.positive(lr=pace.lr),
            momentum=pace.momentum,
            average=average or ("weighted" if lr is None else "last"),
            secure=secure,
            clip=_START if clip is None else units,
            noise_multiplier=noise,
            search=clip is None,
            min_items=check.positive_count(min_items=min_items),
        )

    def _move(self, params: list[nn.Parameter], release: Release, phase: Phase, k: int) -> None:
        if self._plan.search:  # the clip is a release as well
            clip = self.oracle.metrics()["clip"]
            release = release._replace(mean=[mean.div_(clip) for mean in release.mean])
        super()._move(params, release, phase, k)


def _design(scale: UserScale | None, budget: Budget | None, given: Given) -> Draws:
    """Returns batches of users, by the step rule if there is a scale; all users where nothing says other."""
    if scale is not None and budget is not None:
        given = with_batches(scale, budget, given)
    if given.sampling in (None, "poisson", "fixed") and given.batch_size in (None, given.n):
        given = replace(given, sampling="full")
    passes: int | None = None
    if given.noise_multiplier is None:
        is_full = given.sampling == "full" or isinstance(given.sampling, Full)
        passes = _FULL_STEPS if is_full else _EPOCHS
    return choose_design(scale, budget, given, passes)
