"""UserClippedSGD: each user's mean gradient is clipped, whatever rows it is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.adjacency import below_one
from torch_dpsco.accounting.calibrate import epoch_steps
from torch_dpsco.accounting.calibrate import noise_multiplier as calibrate_noise
from torch_dpsco.accounting.designs import Fixed, Full, Poisson
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.optim import checks
from torch_dpsco.optim.base import PrivateOptimizer
from torch_dpsco.optim.heavy_plan import dimension
from torch_dpsco.optim.user_base import require_user
from torch_dpsco.oracles.centered import Centered
from torch_dpsco.oracles.clipped import Clipped, ClippedMean
from torch_dpsco.prox import Prox
from torch_dpsco.rules import SGD, UpdateRule
from torch_dpsco.schedule import Phase, Schedule

__all__ = ["UserClippedSGD"]

_SAMPLING: dict[str, type[Poisson] | type[Fixed]] = {"poisson": Poisson, "fixed": Fixed}


class UserClippedSGD(PrivateOptimizer):
    """SGD on the mean of users' clipped mean gradients: user-level DP-SGD, the default recommendation.

    Args:
        params: parameters or groups; all of them count as one vector.
        lr: step size, > 0.
        clip: C > 0, of each user's mean gradient (its distance from the center), public.
        noise_multiplier: z >= 0, noise std on the sum over users over C.
        batch_size: expected number of users of a batch, the public divisor.
        n_users: public number of users (a reference under add_remove).
        sampling: "poisson" or "fixed"; batch_size = n_users takes all users in each step.
        steps: planned number of steps.
        clipping: another `oracles.ClippedMean` in place of clip, noise_multiplier and batch_size, e.g.
            `oracles.AdaptiveClipped`.
        center: public vector that users are measured from, a tensor per parameter; None for 0.
        center_decay: in [0, 1): the center follows the releases; None keeps it.
        min_items: rows that a user must have, public; others contribute 0.
        adjacency: default that of the accountant, or "replace_one".
        average: "last", "uniform" or "weighted"; not with `rule`.
        rule: another update rule.
        prox: constraint or penalty.
        reg: see `PrivateOptimizer`.
        accountant: ledger and budget, of unit "user".
        generator: noise generator of your own (warns).
        secure: "exact" for noise in integers on a public grid, see docs/performance.md for its cost.

    Guarantee:
        Unit: user, all rows of one. Adjacency: add_remove, zero_out or replace_one with Poisson batches of users, the
        latter two with fixed ones. Event of a step: that of HolderSGD, with users for records. Assumes: batches of the
        optimizer's own loader, ids that are right, rows of a user that do not depend on other users.
        Source: docs/proofs/user_level.md#clipped-means-of-users.

    Example:
        >>> import torch_dpsco as dp
        >>> model = dp.attach(torch.nn.Linear(3, 1))
        >>> data = torch.utils.data.TensorDataset(torch.randn(90, 3), torch.ones(90, 1))
        >>> optimizer = dp.UserClippedSGD.calibrated(
        ...     model.parameters(), n_users=30, budget=dp.Budget(2.0, 1e-4, unit="user"), clip=1.0, lr=0.5, steps=4)
        >>> for x, y, users in optimizer.loader(data, users=torch.arange(90) % 30):
        ...     optimizer.zero_grad()
        ...     dp.losses.Logistic()(model(x), y).backward()
        ...     optimizer.step(users=users)
        >>> optimizer.finalize()
        >>> optimizer.steps, optimizer.privacy_spent().unit
        (4, 'user')
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        clip: float | None = None,
        noise_multiplier: float | None = None,
        batch_size: int | None = None,
        n_users: int,
        sampling: str = "poisson",
        steps: int | None = None,
        clipping: ClippedMean | None = None,
        center: Sequence[Tensor] | None = None,
        center_decay: float | None = None,
        min_items: int = 1,
        adjacency: Adjacency | None = None,
        average: str = "last",
        rule: UpdateRule | None = None,
        prox: Prox | None = None,
        reg: float = 0.0,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> None:
        if rule is not None and average != "last":
            raise ValueError(f"average must be given to the rule when there is one (got {average!r})")
        if clipping is None:
            if clip is None or noise_multiplier is None or batch_size is None:
                raise ValueError(
                    "clip, noise_multiplier and batch_size must be given, or a clipping= oracle (got None)"
                )
            clipping = Clipped(clip, noise_multiplier, batch_size)
        elif not (clip is None and noise_multiplier is None and batch_size is None):
            raise ValueError(
                f"clip, noise_multiplier and batch_size must not be given beside clipping (got {clipping!r})"
            )
        if not isinstance(clipping, ClippedMean):
            raise ValueError(f"clipping must be an oracle that clips, as oracles.Clipped (got {clipping!r})")
        if center_decay is not None:
            below_one(center_decay=center_decay)
        super().__init__(
            params,
            lr,
            oracle=Centered(clipping, n_users, center=center, decay=center_decay, min_items=min_items),
            rule=rule or SGD(average),
            design=_users(clipping.batch_size, n_users, sampling),
            schedule=Schedule((Phase(steps),)),
            prox=prox,
            reg=reg,
            adjacency=adjacency,
            accountant=accountant,
            generator=generator,
            secure=secure,
        )

    @classmethod
    def calibrated(
        cls,
        params: Any,
        *,
        n_users: int,
        budget: Budget,
        clip: float,
        lr: float,
        batch_size: int | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        sampling: str = "poisson",
        center: Sequence[Tensor] | None = None,
        center_decay: float | None = None,
        min_items: int = 1,
        average: str = "last",
        rule: UpdateRule | None = None,
        prox: Prox | None = None,
        reg: float = 0.0,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> UserClippedSGD:
        """Returns an optimizer that spends the budget in the planned steps.

        Args:
            params: see the class.
            n_users: public number of users.
            budget: of unit "user".
            clip: public.
            lr: step size.
            batch_size: users of a batch; default all.
            epochs: passes over users; default 30 (all users: 30 steps), 10 for smaller batches.
            steps: number of steps, instead of epochs.
            sampling: see the class.
            center: see the class.
            center_decay: see the class.
            min_items: see the class.
            average: see the class.
            rule: see the class.
            prox: see the class.
            reg: see the class.
            accountant: see the class.
            generator: see the class.
            secure: see the class.
        """
        require_user(budget)
        n_users = check.positive_count(n_users=n_users)
        if steps is not None and epochs is not None:
            raise ValueError(f"steps and epochs must not be given both (got {steps} and {epochs})")
        design = _users(n_users if batch_size is None else batch_size, n_users, sampling)
        if steps is None:
            default = 30 if isinstance(design, Full) else 10
            steps = epoch_steps(design, default if epochs is None else check.positive(epochs=epochs))
        noise = calibrate_noise(budget.epsilon, budget.delta, design=design, steps=steps, adjacency=budget.adjacency)
        if accountant is not None:
            checks.require_budget(accountant, budget)
        params, dim = dimension(params)
        of_all = noise / design.batch_size / math.sqrt(steps)
        checks.warn_if_buried(of_all, n=n_users, dim=dim, epsilon=budget.epsilon)
        return cls(
            params,
            lr,
            clip=clip,
            noise_multiplier=noise,
            batch_size=design.batch_size,
            n_users=n_users,
            sampling=sampling,
            steps=steps,
            center=center,
            center_decay=center_decay,
            min_items=min_items,
            average=average,
            rule=rule,
            prox=prox,
            reg=reg,
            accountant=Accountant(budget) if accountant is None else accountant,
            generator=generator,
            secure=secure,
        )


def _users(batch_size: int, n_users: int, sampling: str) -> Full | Poisson | Fixed:
    kind = _SAMPLING[check.choice(_SAMPLING, sampling=sampling)]
    return Full(n_users) if batch_size == n_users else kind(batch_size, n_users)
