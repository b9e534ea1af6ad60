"""UserClippedSGD: clips each user's mean gradient, whatever rows it is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.adjacency import Adjacency, below_one
from torch_dpsco.accounting.budgets.budget import Budget
from torch_dpsco.accounting.designs import Design, Full
from torch_dpsco.optim import checks
from torch_dpsco.optim.planned import agreed_adjacency, dimension, given_noise, noise_on_mean, sampled, steps_of
from torch_dpsco.optim.user_plan import UserOptimizer, UserPlan
from torch_dpsco.oracles.clipped import Clipped
from torch_dpsco.oracles.users.centered import Centered
from torch_dpsco.prox import Prox

_FULL_STEPS, _EPOCHS = 30, 10


@dataclass(frozen=True, kw_only=True)
class UserClippedPlan(UserPlan):
    """Public numbers of a run of UserClippedSGD.

    Args:
        clip: of a user's mean gradient, or of its distance from the center.
        noise_multiplier: noise std on the sum over users over the clip.
        center_decay: of the average of releases that the center follows; None keeps it.
    """

    clip: float
    noise_multiplier: float
    center_decay: float | None = None

    def oracle(self, prox: Prox, center: Sequence[Tensor] | None = None) -> Centered:
        """Returns a new oracle with the plan's numbers."""
        clipping = Clipped(self.clip, self.noise_multiplier, self.batch_size)
        return Centered(clipping, self.n, center=center, decay=self.center_decay, min_items=self.min_items)

    def noise_shares(self) -> Iterator[tuple[str, float, int | None]]:
        """Yields the noise on the mean of users; see `Plan.noise_shares`."""
        yield "each step", self.noise_multiplier / self.batch_size, None

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        yield noise_on_mean(self.noise_multiplier / self.batch_size, self.clip)
        if self.center_decay is not None:
            yield "center", f"gradients are measured from a running average of releases, of decay {self.center_decay:g}"
        yield "assumed", self.assumed


class UserClippedSGD(UserOptimizer):
    """SGD on the mean of users' clipped mean gradients: user-level DP-SGD, the default recommendation.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from `UserClippedSGD.plan`.
        center: public vector that users' mean gradients are measured from, a tensor per parameter; None for 0.
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
        >>> optimizer.finalize()
        >>> optimizer.report().epsilon == plan.epsilon() <= 2.0
        True
    """

    plans = UserClippedPlan

    @classmethod
    def plan(
        cls,
        *,
        n_users: int,
        clip: float,
        lr: float,
        budget: Budget | None = None,
        noise_multiplier: float | None = None,
        batch_size: int | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        sampling: str | Design = "poisson",
        center_decay: float | None = None,
        min_items: int = 1,
        average: str = "last",
        adjacency: Adjacency | None = None,
        dim: Any = None,
        secure: str | None = None,
    ) -> UserClippedPlan:
        """Returns noise, steps and epsilon of a run, before anything is spent.

        Args:
            n_users: public number of users (a reference under add_remove).
            clip: C > 0, of each user's mean gradient (its distance from the center), public.
            lr: step size, > 0.
            budget: target, of unit "user"; the noise is chosen for it unless it is given, and then the budget only
                limits the run.
            noise_multiplier: z >= 0, noise std on the sum over users over C; 0 is not private.
            batch_size: expected number of users of a batch, the public divisor; default all of them.
            steps: number of steps, in place of epochs. Without both, and with a noise of yours, there is no limit but
                the budget.
            epochs: passes over users; default 30 (all users: 30 steps), 10 for smaller batches.
            sampling: "poisson", "fixed" (with a batch of all users: "full"), "shuffled", "assigned" (one pass) or
                "full"; or a design of users.
            center_decay: in [0, 1): the center follows the releases; None keeps it.
            min_items: rows that a user must have, public; others contribute 0.
            average: "last", "uniform" or "weighted".
            adjacency: default the budget's, or "replace_one".
            dim: number of parameters, or the model: a warning tells where noise buries the signal.
            secure: "exact" for noise in integers on a public grid, see docs/performance.md for its cost.

        Raises:
            InfeasibleError: the target cannot be reached; names the way out.
            UnitError: the budget is of another unit.
            AdjacencyError: sampling and adjacency do not go together.
        """
        adjacency, dim = agreed_adjacency(adjacency, budget, "user"), dimension(dim)
        n_users = check.positive_count(n_users=n_users)
        if sampling in ("poisson", "fixed") and batch_size in (None, n_users):
            sampling = "full"
        design = sampled(sampling, batch_size, n_users, adjacency)
        default = _FULL_STEPS if isinstance(design, Full) else _EPOCHS
        steps = steps_of(design, steps, epochs, None if noise_multiplier is not None else default)
        noise = given_noise(noise_multiplier, budget, design, steps)
        if noise_multiplier is None and budget and steps and dim:
            of_all = noise / design.batch_size / math.sqrt(steps)
            checks.warn_if_buried(of_all, n=n_users, dim=dim, epsilon=budget.epsilon)
        return UserClippedPlan(
            budget=budget,
            adjacency=adjacency,
            design=design,
            steps=steps,
            lr=check.positive(lr=lr),
            average=average,
            secure=secure,
            clip=check.positive(clip=clip),
            noise_multiplier=noise,
            center_decay=None if center_decay is None else below_one(center_decay=center_decay),
            min_items=min_items,
        )
