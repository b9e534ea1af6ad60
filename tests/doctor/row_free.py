"""Parts of scripts of optimizers that need no per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.diagnosis import Diagnosis
from torch_dpsco.losses import Hinge

N, DIM = 60, 3
HINGE = Hinge(power=1.5)
KIND = {"n": N, "budget": dp.Budget(1.0, 1e-3), "batch_size": 10, "lr": 0.1}


def data() -> TensorDataset:
    return TensorDataset(torch.randn(N, DIM), torch.randn(N, 1).sign())


def linear() -> nn.Module:
    return nn.Linear(DIM, 1).double()


def output(
    model: nn.Module, problem: dp.Problem | None = None, **settings: Any
) -> dp.HolderOutputSGD:
    problem = HINGE.problem(bound_x=1.5, radius=2.0) if problem is None else problem
    own = {
        name: settings.pop(name) for name in ("loss_reduction", "generator") if name in settings
    }
    plan = dp.HolderOutputSGD.plan(problem=problem, dim=model, **KIND | settings)
    return dp.HolderOutputSGD(model.parameters(), plan, certify_convex=True, **own)


def diagnose(
    model: nn.Module | None = None, loss: Any = HINGE, problem: Any = None, **settings: Any
) -> Diagnosis:
    model = linear() if model is None else model
    optimizer = output(model, problem, **settings)
    return dp.doctor(model, loss, optimizer.loader(data()), optimizer)


class Around(nn.Module):
    """A linear layer with something around it."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.around = nn.Linear(DIM, 1), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.layer, x)


def pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    """Couples two records that are not the first."""
    joint = (outputs[2:3] * outputs[3:4]).sum() if len(outputs) > 3 else 0.0
    return HINGE(outputs, targets) + 1e-3 * joint


def tilted(outputs: Tensor, targets: Tensor) -> Tensor:
    return (1 - targets * outputs).clamp_min(0).flatten().logsumexp(0)
