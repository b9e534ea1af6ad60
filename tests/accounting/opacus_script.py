"""A plain Opacus training script with our accountant, for tests."""

from __future__ import annotations

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco.integrations.opacus  # noqa: F401 (makes "dpsco" known to Opacus)
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget

N = 64
DATA = TensorDataset(
    torch.randn(N, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(N)
)


class Script:
    """A plain Opacus training script with our accountant."""

    def __init__(
        self,
        *,
        batch_size: int = 16,
        noise: float = 1.0,
        budget: Budget | None = None,
        **keywords,
    ) -> None:
        self.engine = PrivacyEngine(accountant="dpsco")
        self.accountant: Accountant = self.engine.accountant
        self.accountant.budget = budget
        model = nn.Linear(3, 1)
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=batch_size, shuffle=True),
            noise_multiplier=noise,
            max_grad_norm=1.0,
            **keywords,
        )

    def backward(self, x: torch.Tensor) -> None:
        self.model(x).mean().backward()

    def steps(self, number: int, loader=None) -> None:
        made = 0
        while made < number:
            for x, _ in self.loader if loader is None else loader:
                self.backward(x)
                self.optimizer.step()
                self.optimizer.zero_grad()
                made += 1
                if made == number:
                    return


def entries(accountant: Accountant) -> list[tuple]:
    return [(event, count) for _, _, event, count in accountant.ledger.entries()]
