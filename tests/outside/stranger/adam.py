"""Adam whose second moments are freed of the noise: the variance of the noise is public, so it can be taken off."""

from typing import Any

import torch
from torch import nn

import torch_dpsco as dp
from torch_dpsco.problem import Phase
from torch_dpsco.rules import Groups, State, absorb, trained


class NoiseCorrectedAdam(dp.rules.UpdateRule):
    """w <- w - lr m / sqrt(max(v - noise_std^2, floor^2)), for moments m and v of the private means."""

    def __init__(self, noise_std: float, betas: tuple[float, float] = (0.9, 0.999), floor: float = 1e-3) -> None:
        super().__init__()
        self.noise_std, self.betas, self.floor = noise_std, betas, floor

    def update(self, groups: Groups, state: State, k: int, phase: Phase) -> None:
        """Makes step k = 0, 1, ...; the moments are kept, and saved, in the optimizer's state."""
        for group in groups:
            lr = self.step_size(group["lr"], k, phase)
            absorb(trained(group), state, k, self.average)
            for p in trained(group):
                if p.grad is not None:
                    self.move(p, p.grad, state[p], k, lr)

    def move(self, p: torch.Tensor, mean: torch.Tensor, kept: dict[str, Any], k: int, lr: float) -> None:
        """Moves one parameter by its moments without the variance of the noise."""
        first, second = (1 - beta for beta in self.betas)
        m = kept.setdefault("first", torch.zeros_like(p)).lerp_(mean, first)
        v = kept.setdefault("second", torch.zeros_like(p)).lerp_(mean.square(), second)
        unbiased = v / (1 - self.betas[1] ** (k + 1)) - self.noise_std**2
        size = unbiased.clamp(min=self.floor**2).sqrt()
        p.addcdiv_(m, size, value=-lr / (1 - self.betas[0] ** (k + 1)))

    def settings(self) -> dict[str, Any]:
        """What a checkpoint must agree with."""
        return {"rule": "NoiseCorrectedAdam", "noise_std": self.noise_std, "betas": list(self.betas)}


if __name__ == "__main__":
    torch.manual_seed(0)
    features = torch.randn(4000, 4)
    scales = torch.tensor([0.01, 0.1, 1.0, 10.0])  # public: Adam finds them by itself
    data = torch.utils.data.TensorDataset(features * scales, features.sum(1, keepdim=True))
    model = dp.attach(nn.Linear(4, 1))
    plan = dp.ClippedSGD.plan(n=4000, budget=dp.Budget(3.0, 1e-6), clip=1.0, lr=0.1, batch_size=100, epochs=4)
    optimizer = dp.ClippedSGD(model.parameters(), plan, rule=NoiseCorrectedAdam(plan.noise_std))
    for _ in range(4):
        for x, y in optimizer.loader(data):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    print("steps", plan.steps, "spent", round(optimizer.report().epsilon, 3), "of", plan.budget.epsilon)
