"""A layer of one's own that records its rows: a root mean square norm."""

import torch
from torch import Tensor, nn

import torch_dpsco as dp
from torch_dpsco.rows.layers import Formed, Kept, Kind, Use, register


class RMSNorm(nn.Module):
    """x / rms(x) times a weight, over the last dimension of (B, ..., size)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes each place by itself."""
        return normalized(x) * self.weight


def normalized(x: Tensor) -> Tensor:
    """x / rms(x)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class RMSNormRows(Kind):
    """A record's row is the sum of normalized x times gradient, over its places."""

    def rows(self, use: Use) -> Kept:
        """Rows (B, size)."""
        rows = use.scale * normalized(use.x) * use.grad
        return Formed(rows.reshape(len(rows), -1, rows.shape[-1]).sum(1), None)


register(RMSNorm, RMSNormRows())


def train(norm: nn.Module) -> None:
    """Makes one private pass over made-up records."""
    torch.manual_seed(0)
    model = dp.attach(nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 1)))
    plan = dp.ClippedSGD.plan(n=256, budget=dp.Budget(2.0, 1e-6), clip=1.0, lr=0.1, batch_size=64, epochs=1)
    optimizer = dp.ClippedSGD(model.parameters(), plan)
    x = torch.randn(256, 4)
    for features, labels in optimizer.loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))):
        nn.functional.mse_loss(model(features), labels).backward()
        optimizer.step()
    print(f"{type(model[1]).__name__}: epsilon", round(optimizer.report().epsilon, 2))


class Hasty(RMSNorm):
    """The same layer, for a kind that is wrong."""


class HastyRows(RMSNormRows):
    """Gives every record the mean of the rows, so that clipping one does not bound it."""

    def rows(self, use: Use) -> Kept:
        """Rows (B, size), all the same."""
        mean = (normalized(use.x) * use.grad).mean(0)
        return Formed(use.scale * mean.expand(len(use.x), -1), None)


if __name__ == "__main__":
    train(RMSNorm(8))
    register(Hasty, HastyRows())
    try:
        train(Hasty(8))
    except dp.errors.PrivacyError as error:
        print(error)
