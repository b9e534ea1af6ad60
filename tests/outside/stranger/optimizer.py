"""An optimizer of one's own: SGD that clips at a private quantile of the gradient norms."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

import torch_dpsco as dp
from torch_dpsco.accounting.calibrate import noise_multiplier
from torch_dpsco.step.plan import Plan, PlannedOptimizer, StepPlan


@dataclass(frozen=True, kw_only=True)
class QuantilePlan(StepPlan):
    """Public numbers of a run.

    Args:
        clip: first threshold.
        quantile: of the norms, which the threshold moves to.
        total: noise multiplier of a step, mean and count together.
    """

    clip: float
    quantile: float
    total: float

    def oracle(self, prox: dp.prox.Prox) -> dp.oracles.AdaptiveClipped:
        """What makes the steps private."""
        return dp.oracles.AdaptiveClipped(
            self.clip, None, self.batch_size, self.quantile, total_noise_multiplier=self.total
        )

    def lines(self) -> Iterator[tuple[str, str]]:
        """What `print(plan)` says."""
        yield from super().lines()
        yield "clip", f"from {self.clip:g} to the {self.quantile:g}-quantile of the gradient norms"


class QuantileSGD(PlannedOptimizer):
    """SGD on Poisson batches, clipped at a quantile."""

    plans = QuantilePlan

    @classmethod
    def plan(
        cls, *, n: int, budget: dp.Budget, steps: int, batch_size: int, lr: float, quantile: float = 0.5
    ) -> QuantilePlan:
        """Chooses the noise for the budget."""
        design = dp.Poisson(batch_size, n)
        return QuantilePlan(
            budget=budget,
            adjacency=budget.adjacency,
            design=design,
            steps=steps,
            lr=lr,
            clip=1.0,
            quantile=quantile,
            total=noise_multiplier(
                budget.epsilon, budget.delta, design=design, steps=steps, adjacency=budget.adjacency
            ),
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    features = torch.randn(4096, 4)
    plan = QuantileSGD.plan(n=4096, budget=dp.Budget(2.0, 1e-6), steps=32, batch_size=256, lr=0.1)
    print(dict(plan.lines())["clip"])
    assert Plan.from_dict(plan.to_dict()) == plan
    model = dp.attach(nn.Linear(4, 1))
    optimizer = QuantileSGD(model.parameters(), plan)
    for _ in range(2):
        for x, y in optimizer.loader(torch.utils.data.TensorDataset(features, features.sum(1, keepdim=True))):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    print("spent", round(optimizer.report().epsilon, 3), "planned", round(plan.epsilon(), 3))
