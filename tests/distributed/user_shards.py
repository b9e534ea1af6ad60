"""Users on several processes: data, optimizers and loops that their tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.processes import DIM, N, layer, numbers, records

USERS, CLIP = 16, 0.3
OWNER = torch.arange(N) % USERS  # four records each


def share(rank: int, world: int) -> Tensor:
    """Users of a rank: two shards, after a rank without users where there are three."""
    parts = torch.arange(USERS).flip(0).split([5, 11])
    return parts[rank - (world - 2)] if rank >= world - 2 else torch.arange(0)


def shard_of(rank: int, world: int = 2) -> tuple[TensorDataset, Tensor]:
    """Returns own records, and their users."""
    mine = torch.isin(OWNER, share(rank, world))
    return TensorDataset(*(tensor[mine] for tensor in records().tensors)), OWNER[mine]


def summed_layer(**options: Any) -> nn.Linear:
    """A model whose loss is a sum, so that batches need not be filled up."""
    return dp.attach(dp.detach(layer(**options)), loss_reduction="sum")


def built(
    kind: str, model: nn.Module, noise: float = 1.0, accountant: Any = None, **options: Any
) -> dp.UserClippedSGD:
    given: dict[str, Any] = {
        "n": USERS,
        "clip": CLIP,
        "lr": 0.1,
        "noise_multiplier": noise,
        "steps": 4,
    }
    given |= (
        {"batch_size": 4, "sampling": "poisson"} if kind == "poisson" else {"sampling": "full"}
    )
    plan = dp.UserClippedSGD.plan(**given | options)
    return dp.UserClippedSGD(model.parameters(), plan, accountant=accountant)


def backward(model: nn.Module, optimizer: dp.PrivateOptimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    if len(x):
        nn.functional.mse_loss(model(x), y, reduction="sum").backward()


def train(model: nn.Module, optimizer: dp.PrivateOptimizer, loader: Any) -> dict[str, Any]:
    """Returns users and records of each draw, and the parameters after each step."""
    drawn, path = [], []
    for x, y, position, ids in loader:
        backward(model, optimizer, x, y)
        drawn.append((ids.unique_consecutive().tolist(), position.tolist()))
        optimizer.step(users=ids)
        path.append(numbers(model))
    return {"drawn": drawn, "path": torch.stack(path)}


def rows(
    own: tuple[TensorDataset, Tensor], user: int, many: int, value: float
) -> tuple[TensorDataset, Tensor]:
    """Returns a shard with one user more, of that many long rows."""
    x = torch.full((many, DIM), value, dtype=torch.float64)
    new = (x, x[:, :1].abs() * 100.0, torch.zeros(many, dtype=torch.int64))
    data = TensorDataset(
        *(torch.cat([old, more]) for old, more in zip(own[0].tensors, new, strict=True))
    )
    return data, torch.cat([own[1], torch.full((many,), user)])


def patched(owner: Any, name: str, new: Callable[..., Any]) -> Callable[[], None]:
    old = getattr(owner, name)
    setattr(owner, name, new)
    return lambda: setattr(owner, name, old)
