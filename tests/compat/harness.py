"""What all compatibility tests share: rows of a batch against the gradients of each record alone, and plain loops.

There are as many records as time steps, so that no shape gives a layout away that takes time for the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.designs import Design
from torch_dpsco.rows import GradBatch

RECORDS = TIMES = 3
DIM = 4
CLIP, LR = 0.7, 0.3


def numbers(*shape: int, seed: int = 1, n: int = RECORDS) -> Tensor:
    return torch.randn(
        n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def items(*shape: int, below: int = 5, seed: int = 2) -> Tensor:
    return torch.randint(
        0, below, (RECORDS, *shape), generator=torch.Generator().manual_seed(seed)
    )


class Wired(nn.Module):
    """Parts and a function (module, *inputs) -> outputs that says how they are joined; both must pickle."""

    def __init__(self, wiring: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.wiring = wiring
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wiring(self, *args, **kwargs)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def record_losses(output: Any, batch_dim: int = 0) -> Tensor:
    """Returns one loss per record from all tensors of the output, nested as they may be."""
    total: Any = 0.0
    for k, leaf in enumerate(tree_leaves(output)):
        flat = leaf.movedim(batch_dim, 0).flatten(1)
        weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype, device=flat.device)
        total = total + ((flat - 0.3 * (k + 1)).square() * weights).sum(1)
    return total


@dataclass(frozen=True)
class Case:
    """A model and a batch; `inputs` is a tuple of positional or a dict of keyword inputs."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    batch_dim: int = 0
    dtype: torch.dtype = torch.float64

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().to(self.dtype).train()

    def batch(self) -> Any:
        return tree_map(
            lambda t: t.to(self.dtype) if t.is_floating_point() else t, self.inputs()
        )

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        return record_losses(output, self.batch_dim)

    def record(self, batch: Any, i: int) -> Any:
        return tree_map(lambda t: t.narrow(self.batch_dim if t.dim() > 1 else 0, i, 1), batch)

    def attach(self, rows: str, reduction: str, **options: Any) -> nn.Module:
        return dp.attach(
            self.model(),
            rows=rows,
            loss_reduction=reduction,
            batch_first=not self.batch_dim,
            **options,
        )

    def tolerance(self) -> float:
        return 1e-10 if self.dtype == torch.float64 else 1e-5


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def rows_alone(case: Case, model: nn.Module, batch: Any) -> list[Tensor]:
    """Returns the gradient of each record's loss, by plain autograd on a copy that was never attached."""
    found = []
    for i in range(RECORDS):
        twin = copy.deepcopy(model)
        case.losses(twin, case.record(batch, i)).sum().backward()
        found.append(
            [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in trained(twin)]
        )
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def rows_recorded(case: Case, model: nn.Module, batch: Any, reduction: str) -> list[Tensor]:
    """Returns the rows that an attached model records for a batch."""
    losses = case.losses(model, batch)
    (losses.mean() if reduction == "mean" else losses.sum()).backward()
    return GradBatch.consume(trained(model)).dense()


def altered(batch: Any, record: int, batch_dim: int = 0) -> Any:
    """Returns the batch with other values for one record."""

    def change(leaf: Tensor) -> Tensor:
        leaf = leaf.clone()
        own = leaf.select(batch_dim if leaf.dim() > 1 else 0, record)
        own.copy_(1 - 2 * own if leaf.is_floating_point() else (own + 1) % 2)
        return leaf

    return tree_map(change, batch)


def assert_rows(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


# -- loops ------------------------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.RMSNorm(3), nn.Linear(3, 1)).double()


def dataset(n: int = 12) -> TensorDataset:
    return TensorDataset(numbers(2, seed=5, n=n), numbers(1, seed=6, n=n))


def private_optimizer(model: nn.Module, design: Design, **options: Any) -> dp.PrivateOptimizer:
    """Returns an optimizer without noise, so that the parameters can be compared."""
    oracle = dp.oracles.Clipped(CLIP, 0.0, design.batch_size)
    settings = {
        "params": model.parameters(),
        "lr": LR,
        "rule": dp.rules.SGD(),
        "adjacency": "add_remove",
    } | options
    return dp.PrivateOptimizer(oracle=oracle, design=design, **settings)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def clipped_means(
    model: nn.Module, draw: tuple[Tensor, Tensor], batch_size: int
) -> list[Tensor]:
    """Returns the mean of the clipped gradients of the records of a draw, each taken by plain autograd."""
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for x, y in zip(*draw, strict=True):
        grads = torch.autograd.grad(squared(model(x[None]), y[None]), params)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for part, g in zip(total, grads, strict=True):
            part += g * min(1.0, CLIP / float(norm)) / batch_size
    return total


def replayed(
    draws: Iterable[tuple[Tensor, Tensor]],
    batch_size: int,
    optimizer: Any = None,
    build: Any = None,
) -> nn.Module:
    """Returns the model that a plain loop by hand trains on the same draws."""
    model = (build or network)()
    inner = (optimizer or (lambda params: torch.optim.SGD(params, lr=LR)))(model.parameters())
    for draw in draws:
        for p, mean in zip(
            model.parameters(), clipped_means(model, draw, batch_size), strict=True
        ):
            p.grad = mean
        inner.step()
    return model


def assert_same_model(found: nn.Module, expected: nn.Module, tolerance: float = 1e-9) -> None:
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def joined(chunks: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in chunks]), torch.cat([y for _, y in chunks])
