"""Scripts as Opacus users write them, as short as they can be: the traps are shown on these before ours are shown.

Every model is one Linear layer without bias whose loss adds up its scores, so that the per-sample gradient of a record
is the record itself and a release can be read off the parameters: w = -(sum of clipped records + noise) / divisor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

DELTA = 1e-5


class Scores(nn.Module):
    """A criterion: the scores themselves. Opacus' ghost mode sets `reduction` to "none" to get one per record."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        scores = outputs.squeeze(1)
        return scores if self.reduction == "none" else getattr(scores, self.reduction)()


def plain(dim: int = 1, start: float = 0.0) -> nn.Linear:
    """Returns the model, not private yet."""
    model = nn.Linear(dim, 1, bias=False)
    nn.init.constant_(model.weight, start)
    return model


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


@dataclass
class Script:
    """What PrivacyEngine.make_private returned; `weight` is the parameter, `criterion` what the user calls."""

    engine: PrivacyEngine
    weight: Tensor
    model: nn.Module
    optimizer: Any
    criterion: Callable[..., Any]
    loader: Any

    def backward(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.model(x), None).backward()

    def step(self, x: Tensor) -> Tensor:
        """Makes a step on the records x, and returns by how much it moved the parameters."""
        before = self.weight.detach().clone()
        self.backward(x)
        self.optimizer.step()
        return (self.weight.detach() - before).flatten()

    def epoch(self) -> list[Tensor]:
        return [self.step(x) for (x,) in self.loader]

    @property
    def epsilon(self) -> float:
        return float(self.engine.get_epsilon(DELTA))


def opacus_script(
    x: Tensor,
    *,
    batch_size: int | None = None,
    noise: float = 0.0,
    start: float = 0.0,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    reduction: str = "sum",
    mode: str = "hooks",
    workers: int = 0,
) -> Script:
    """Makes a script private by Opacus with clip 1; by default each (Poisson) batch holds all records."""
    model = plain(x.shape[1], start)
    engine = PrivacyEngine(accountant="rdp")
    criterion = Scores(reduction)
    parts = engine.make_private(
        module=model,
        optimizer=optimizer(model.parameters()),
        criterion=criterion,
        data_loader=DataLoader(
            TensorDataset(x), batch_size=batch_size or len(x), num_workers=workers
        ),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        loss_reduction=reduction,
        grad_sample_mode=mode,
    )
    loss = parts[2] if mode == "ghost" else criterion
    return Script(engine, model.weight, parts[0], parts[1], loss, parts[-1])
