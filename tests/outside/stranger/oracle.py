"""An oracle of one's own: rows far beyond the clip do not count at all."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import torch_dpsco as dp


class Dropped(dp.oracles.ClippedMean):
    """Clips rows to norm C, and leaves rows out whose norm is above a multiple of it."""

    def __init__(self, clip: float, most: float, noise_multiplier: float, batch_size: int) -> None:
        super().__init__(noise_multiplier, batch_size)
        self.fixed_clip, self.most = clip, most

    def bound(self, query: Sequence[Tensor]) -> float:
        """The clip at a public point: here the same everywhere."""
        return self.fixed_clip

    def weights(self, norms: Tensor, clip: float) -> Tensor:
        """Factors of rows: `clip_weights` has the rounding in it, and a factor may be made smaller."""
        return dp.oracles.clip_weights(norms, clip) * (norms <= self.most * clip)

    def settings(self) -> dict[str, Any]:
        """What a checkpoint must agree with."""
        return {"oracle": "Dropped", "clip": self.fixed_clip, "most": self.most, "noise": self.noise_multiplier}


if __name__ == "__main__":
    torch.manual_seed(0)
    features = torch.randn(1000, 4)
    model = dp.attach(nn.Linear(4, 1))
    optimizer = dp.PrivateOptimizer(
        model.parameters(),
        lr=0.1,
        oracle=Dropped(clip=1.0, most=10.0, noise_multiplier=4.0, batch_size=100),
        rule=dp.rules.SGD(),
        design=dp.Poisson(100, 1000),
        accountant=dp.Accountant(dp.Budget(1.0, 1e-5)),
    )
    for x, y in optimizer.loader(torch.utils.data.TensorDataset(features, features.sum(1, keepdim=True))):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    print("epsilon", round(optimizer.report().epsilon, 3))
    try:
        optimizer.oracle.most = 100.0
    except dp.errors.PrivacyError as error:
        print(error)
