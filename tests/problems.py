"""Models, records and optimizers that several test files share, and how far a release moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.designs import Design
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.rows import GradBatch
from torch_dpsco.rules import SGD
from torch_dpsco.step.batch import make_slots
from torch_dpsco.step.oracle import Clipped, MeanOracle

REDUCTIONS = {"mean": torch.mean, "sum": torch.sum}


class TwoHeads(nn.Module):
    """Scores of one head or of both: which parameters a forward uses is the caller's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor, heads: str = "ab") -> Tensor:
        return sum(getattr(self, head)(x) for head in heads)


class Folded(nn.Module):
    """Folds the second dimension into the batch, so that a record of length T has T rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, 1)).view(len(x), -1)


def make_optimizer(
    model: nn.Module,
    design: Design,
    *,
    clip: float = 1.0,
    noise: float = 0.0,
    adjacency: Adjacency = "replace_one",
) -> dp.PrivateOptimizer:
    oracle = Clipped(clip, noise, design.batch_size)
    return dp.PrivateOptimizer(
        model.parameters(), 1.0, oracle=oracle, rule=SGD(), design=design, adjacency=adjacency
    )


def column(*values: float) -> TensorDataset:
    return TensorDataset(torch.tensor(values, dtype=torch.float32)[:, None])


def gradients(model: nn.Module, x: Tensor, reduction: str) -> GradBatch:
    """Returns the rows of the loss (score - 1)^2."""
    REDUCTIONS[reduction]((model(x) - 1.0).square()).backward()
    return GradBatch.consume(list(model.parameters()))


def release_in_float64(oracle: MeanOracle) -> None:
    """Makes an open oracle's next answer one in float64, so that its own rounding (after the noise) is not measured."""
    oracle._dtype = torch.float64


def released(
    oracle: MeanOracle, query: Sequence[Tensor], batches: Sequence[GradBatch]
) -> Tensor:
    """Returns the joint mean that an oracle without noise releases for the physical batches, in float64."""
    oracle.open(query)
    for batch in batches:
        oracle.observe(batch)
    release_in_float64(oracle)
    return torch.cat([mean.flatten() for mean in oracle.release(torch.Generator()).mean]).clone()


def slots_of(
    optimizer: Any, sampler: Any, *, isolation: str | None = "slots", records: int | None = None
) -> Any:
    """Returns where an optimizer's loader puts the rows of a sampler's draws; None where they are not filled up."""
    dim = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return make_slots(
        optimizer._run, sampler, isolation=isolation, most=None, records=records, dim=dim
    )
