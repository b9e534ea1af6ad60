"""Tiny runs of the optimizers that protect users, on ragged users, with noise or without any.

The loss is -w.x, whose gradient -x does not depend on w, or half the squared distance |w - x|^2, whose gradient w - x
does; so rows are gradients, and a user's mean gradient is known by hand.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.streams import seeded_sampler
from torch_dpsco.accounting.designs import Full, Parts
from torch_dpsco.algorithms.user_numbers import (
    UserFilter,
    UserPhase,
    best_ramp_end,
    calibrate_filter,
)
from torch_dpsco.algorithms.users import UserFilteredPlan, UserLocalizedPlan
from torch_dpsco.sampling import UserLoader

DELTA = 1e-3
EPSILON = 4.0
Loss = Callable[[Tensor, Tensor], Tensor]


class Shifts(nn.Module):
    """A linear map of the rows' own weights: output x.w, with w next to it, so that both losses can be written."""

    def __init__(self, dim: int, start: Sequence[float] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(torch.zeros(dim) if start is None else torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def linear_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """-w.x: the gradient of a row is -x."""
    return -(outputs * targets).sum()


def squared_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """(w.x - y)^2 / 2."""
    return 0.5 * (outputs - targets).square().sum()


def dataset(rows: Any, targets: Any = None) -> TensorDataset:
    """Returns float64 rows (n, d) with targets, default 1."""
    rows = torch.as_tensor(rows, dtype=torch.float64)
    ones = torch.ones(len(rows), 1, dtype=torch.float64)
    return TensorDataset(
        rows, ones if targets is None else torch.as_tensor(targets, dtype=torch.float64)
    )


@dataclass
class Run:
    """A model, its optimizer and a loop."""

    model: nn.Module
    opt: Any
    loss: Loss = linear_loss

    @property
    def weights(self) -> Tensor:
        """A copy of the parameters."""
        return self.model.layer.weight.detach().clone()[0]

    def answer(self) -> Tensor:
        """Returns the private answer so far."""
        with self.opt.released():
            return self.weights

    def loader(
        self, data: TensorDataset, users: Any, *, seed: int | None = None, **others: Any
    ) -> UserLoader:
        """Returns the optimizer's loader, a batch per draw; with a seed one of repeatable draws."""
        if seed is None:
            return self.opt.loader(data, users, **{"isolation": "none"} | others)
        others.pop("isolation", None)
        sampler = seeded_sampler(
            self.opt.design, size=self.opt.design.n, seed=seed, steps=others.pop("steps", None)
        )
        return self.opt.bind(UserLoader(data, sampler, torch.as_tensor(users), **others))

    def step(self, batch: Any) -> None:
        """Makes one step on (rows, targets, ids)."""
        rows, targets, users = batch
        self.opt.zero_grad()
        if len(rows):
            self.loss(self.model(rows), targets).backward()
        self.opt.step(users=users)

    def train(self, data: TensorDataset, users: Any, **loader: Any) -> Run:
        """Iterates once over the loader, in padded batches unless it is told otherwise."""
        for batch in self.loader(data, users, **{"isolation": None} | loader):
            self.step(batch)
        return self

    def ledger(self) -> str:
        return self.opt.accountant.ledger.digest()

    def epsilon(self, delta: float = DELTA) -> float:
        return self.opt.accountant.get_epsilon(delta)

    def copy(self) -> Run:
        return Run(*copy.deepcopy((self.model, self.opt)), self.loss)

    def saved(self) -> Any:
        """Returns model and optimizer states as a file that loads with weights_only."""
        file = io.BytesIO()
        torch.save((self.model.state_dict(), self.opt.state_dict()), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, states: Any) -> Run:
        """Takes over what another run saved."""
        self.model.load_state_dict(states[0])
        self.opt.load_state_dict(states[1])
        return self

    def resumed(self, make: Callable[..., Run]) -> Run:
        """Returns a run that goes on with this one from a checkpoint of now, by the ledger file, as after a crash."""
        (model, optimizer), accountant = self.saved(), self.opt.accountant
        accountant.close()
        again = dp.Accountant(
            accountant.budget,
            adjacency=accountant.adjacency,
            unit="user",
            ledger_path=accountant.ledger_path,
        )
        other = make(accountant=again)
        other.model.load_state_dict(model)
        other.opt.resume(optimizer)
        return other


def ledger(path: Path, **given: Any) -> dp.Accountant:
    """Returns an accountant of users with a file."""
    return dp.Accountant(
        **{"adjacency": "replace_one", "unit": "user"} | given, ledger_path=path / "ledger"
    )


def model(dim: int = 2, start: Sequence[float] | None = None) -> nn.Module:
    return dp.attach(Shifts(dim, start), loss_reduction="sum")


def budget(adjacency: str = "replace_one", epsilon: float = EPSILON) -> dp.Budget:
    return dp.Budget(epsilon, DELTA, adjacency, unit="user")


# -- plans ------------------------------------------------------------------------------------------------------------


@lru_cache
def plan(n_users: int = 200, steps: int = 4, epsilon: float = EPSILON) -> UserFilter:
    """Returns a calibrated filter for users who are at most 1 apart."""
    return calibrate_filter(
        n_users=n_users,
        steps=steps,
        epsilon=epsilon,
        delta=DELTA,
        pair_radius=1.0,
        score_share=1.0,
        halt_probability=1e-9,  # no test may halt by luck
    )


class Phases(NamedTuple):
    """Phases of n users."""

    phases: tuple[UserPhase, ...]
    n_users: int


def phased(*filters: UserFilter, n_users: int | None = None, lr: float = 0.5) -> Phases:
    """Returns phases with these filters, and step sizes lr, lr/2, ..."""
    phases = tuple(
        UserPhase(filter=own, lr=lr / 2**k, bound=1.0) for k, own in enumerate(filters)
    )
    return Phases(phases, sum(own.n_users for own in filters) if n_users is None else n_users)


def quiet(
    n_users: int,
    *,
    steps: int = 3,
    floor: float | None = None,
    end: int | None = None,
    tau: float = 1.0,
    noise_std: float = 0.0,
) -> UserFilter:
    """Returns a filter whose tests have no noise: nothing is private with it."""
    floor = n_users - 1.0 if floor is None else floor
    return UserFilter(
        n_users=n_users,
        steps=steps,
        pair_radius=tau,
        threshold=floor + 1e-6,
        threshold_scale=1e-12,
        query_scale=1e-12,
        score_floor=floor,
        ramp_end=best_ramp_end(n_users, floor).ramp_end if end is None else end,
        noise_std=noise_std,
    )


def filtered_plan(own: UserFilter, lr: float = 1.0, **more: Any) -> UserFilteredPlan:
    """Returns the plan of a run with these numbers of the filter."""
    fixed: dict[str, Any] = {"budget": None, "adjacency": "replace_one", "average": "uniform"}
    design = Full(own.n_users)
    return UserFilteredPlan(design=design, steps=own.steps, lr=lr, filter=own, **(fixed | more))


def localized_plan(own: Phases, **more: Any) -> UserLocalizedPlan:
    """Returns the plan of a run with these phases."""
    filters = [phase.filter for phase in own.phases]
    fixed: dict[str, Any] = {"budget": None, "adjacency": "replace_one", "average": "uniform"}
    return UserLocalizedPlan(
        design=Parts(tuple((Full(one.n_users), one.steps) for one in filters), own.n_users),
        steps=sum(one.steps for one in filters),
        lr=own.phases[0].lr,
        phases=own.phases,
        **(fixed | more),
    )


_OF_OPTIMIZERS = {"rule", "prox", "reg", "accountant", "generator"}

# -- runs -------------------------------------------------------------------------------------------------------------


def clipped(
    n_users: int, *, dim: int = 2, loss: Loss = linear_loss, start: Any = None, **changes: Any
) -> Run:
    """A run of UserClippedSGD on all users, without noise unless asked for; `changes` of the plan or the optimizer."""
    layer = model(dim, start)
    more = {name: changes.pop(name) for name in _OF_OPTIMIZERS & changes.keys()}
    own = {"lr": 1.0, "steps": 1, "clip": 1.0, "noise_multiplier": 0.0, "n": n_users}
    return Run(
        layer,
        dp.UserClippedSGD(layer.parameters(), dp.UserClippedSGD.plan(**(own | changes)), **more),
        loss,
    )


def filtered(
    own: Any,
    *,
    dim: int = 2,
    lr: float = 1.0,
    loss: Loss = linear_loss,
    start: Any = None,
    **more: Any,
) -> Run:
    """A run of UserFilteredSGD with these numbers of the filter; `more` of the plan or the optimizer."""
    layer = model(dim, start)
    others = {name: more.pop(name) for name in _OF_OPTIMIZERS & more.keys()}
    made = filtered_plan(own, lr, **more)
    return Run(layer, dp.UserFilteredSGD(layer.parameters(), made, **others), loss)


def localized(
    own: Phases,
    *,
    dim: int = 2,
    loss: Loss = linear_loss,
    start: Any = None,
    **more: Any,
) -> Run:
    """A run of LocalizedUserSGD with these phases; `more` of the plan or the optimizer."""
    layer = model(dim, start)
    others = {name: more.pop(name) for name in _OF_OPTIMIZERS & more.keys()}
    made = localized_plan(own, **more)
    return Run(layer, dp.LocalizedUserSGD(layer.parameters(), made, **others), loss)


def agreeing(n_users: int, rows: int = 1, dim: int = 2) -> tuple[TensorDataset, Tensor]:
    """Returns users who are all within 1/2 of (1, 0, ...), with 1 to `rows` rows each, in random order."""
    draw = np.random.default_rng(n_users)
    ids = np.repeat(np.arange(n_users), draw.integers(1, rows + 1, n_users))
    ids = draw.permutation(ids)
    noise = draw.normal(size=(len(ids), dim))
    x = np.eye(dim)[0] + 0.2 * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    return dataset(x), torch.tensor(ids)


def scattered(n_users: int, dim: int = 2) -> tuple[TensorDataset, Tensor]:
    """Returns users who are all far apart, so that every test fails."""
    x = np.zeros((n_users, dim))
    x[:, 0] = 10.0 * np.arange(n_users)
    return dataset(x), torch.arange(n_users)


def user_means(data: TensorDataset, users: Any, n_users: int) -> np.ndarray:
    """Returns the mean row of each user, who all have one, as (n_users, d)."""
    rows, ids = data.tensors[0].numpy(), np.asarray(users)
    return np.stack([rows[ids == user].mean(axis=0) for user in range(n_users)])
