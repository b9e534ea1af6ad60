"""An update rule of one's own: the sign of the private mean."""

from typing import Any

import torch
from torch import nn

import torch_dpsco as dp
from torch_dpsco.problem import Phase
from torch_dpsco.rules import Groups, State, absorb, trained


class Sign(dp.rules.UpdateRule):
    """w <- w - lr sign(mean)."""

    def check_groups(self, groups: Groups) -> None:
        """Takes all groups."""

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Makes step k; `absorb` keeps the average that was asked for."""
        for group in groups:
            params = trained(group)
            absorb(params, state, k, self.average)
            for p in params:
                if p.grad is not None:
                    p.sub_(self.step_size(group["lr"], k, phase) * p.grad.sign())

    def settings(self) -> dict[str, Any]:
        """What a checkpoint must agree with."""
        return {"rule": "Sign", "average": self.average}

    def state_dict(self) -> dict[str, Any]:
        """Nothing beside the averages, which the optimizer keeps."""
        return {}

    def load_state_dict(self, state: dict[str, Any], groups: Groups) -> None:
        """Nothing to load."""


if __name__ == "__main__":
    torch.manual_seed(0)
    features = torch.randn(1000, 4)
    model = dp.attach(nn.Linear(4, 1))
    plan = dp.ClippedSGD.plan(n=1000, budget=dp.Budget(1.0, 1e-5), clip=1.0, lr=0.1, batch_size=100, epochs=2)
    optimizer = dp.ClippedSGD(model.parameters(), plan, rule=Sign(average="uniform"))
    for x, y in optimizer.loader(torch.utils.data.TensorDataset(features, features.sum(1, keepdim=True))):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    print("steps", plan.steps, "epsilon of the plan", round(plan.epsilon(), 3))
