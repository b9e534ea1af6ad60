"""Problems and runs that the tests of `HolderOutputSGD` share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.losses import Hinge, Huber, Logistic, Pinball, PowerLoss

Vector = np.ndarray
BOUND_X, BOUND_Y = 1.0, 0.7
DELTA = 1e-3
HINGE = Hinge(power=1.5)
PROBLEM = HINGE.problem(bound_x=1.0, radius=1.0)
LOSSES: dict[str, dp.losses.TableLoss] = {
    **{f"hinge {q}": Hinge(power=q) for q in (1.0, 1.2, 1.5, 1.8, 2.0)},
    **{f"power {q}": PowerLoss(power=q) for q in (1.0, 1.2, 1.5, 1.8, 2.0)},
    "logistic": Logistic(),
    "pinball 0.5": Pinball(0.5),
    "pinball 0.9": Pinball(0.9),
    "huber": Huber(threshold=0.3),
}


class Order:
    """A source of one permutation: the order of the data set."""

    def permutation(self, size: int) -> Vector:
        return np.arange(size)


def answer(
    loss: dp.losses.Loss, plan: Any, data: tuple[Vector, Vector], source: Any, bias: bool = False
) -> Vector:
    """Returns what the optimizer releases with its noise off."""
    features, labels = (torch.from_numpy(part) for part in data)
    model = nn.Linear(features.shape[1], 1, bias=bias).double()
    ledger = dp.Accountant(adjacency=plan.adjacency)
    opt = dp.HolderOutputSGD(
        model.parameters(), replace(plan, noise_scale=0.0), accountant=ledger
    )
    loader = opt.loader(TensorDataset(features, labels))
    loader._loader.batch_sampler.rng = source
    with opt:
        for x, y in loader:
            loss(model(x), y).backward()
            opt.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
