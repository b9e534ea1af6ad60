"""Models, batches and losses of the benchmarks; torch alone, so that peers can use them in environments of their own.

"logistic d/b" is logistic regression in d dimensions on a batch of b, "softmax d/b" a head of 10 classes. The network
of convolutions is that of Opacus' MNIST example (26,010 parameters). The transformer is one pre-LN block with a
classifier on the mean over positions. "LoRA" trains factors of rank 8 beside its frozen linear layers, and the
classifier; "embedding" is a table of 100,000 x 32 with a classifier on the mean of 20 words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Block", "Case", "cases", "mlp", "more"]


@dataclass(frozen=True)
class Case:
    """A model with a batch that is in memory, and a loss that is a mean over the batch.

    `only` names the variants that are measured, where the others would take gigabytes; empty for all.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: tuple[Tensor, Tensor]
    loss: nn.Module
    device: str = "cpu"
    only: tuple[str, ...] = ()

    @property
    def is_linear(self) -> bool:
        """Whether the model is one linear layer."""
        return type(self.build()) is nn.Linear

    def model(self) -> nn.Module:
        """Returns the model with the same weights every time."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return self.build().to(self.device)


class Block(nn.Module):
    """Pre-LN attention and feed-forward block, mean over positions, classifier."""

    def __init__(self, width: int, heads: int, hidden: int, classes: int = 10) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.classify = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns scores (B, classes) of sequences (B, T, width)."""
        size, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(size, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (
            F.scaled_dot_product_attention(query, key, value)
            .transpose(1, 2)
            .reshape(size, length, width)
        )
        x = x + self.out(mixed)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.classify(x.mean(dim=1))


def _logistic(dim: int, size: int) -> Case:
    batch = (torch.randn(size, dim), (torch.rand(size, 1) > 0.5).float())
    return Case(
        f"logistic {dim}/{size}", lambda: nn.Linear(dim, 1), batch, nn.BCEWithLogitsLoss()
    )


def _softmax(dim: int, size: int) -> Case:
    batch = (torch.randn(size, dim), torch.randint(10, (size,)))
    return Case(
        f"softmax {dim}/{size}", lambda: nn.Linear(dim, 10), batch, nn.CrossEntropyLoss()
    )


def mlp(widths: tuple[int, ...], size: int) -> Case:
    """Returns an MLP of some widths, with a batch."""

    def build() -> nn.Module:
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    batch = (torch.randn(size, widths[0]), torch.randint(widths[-1], (size,)))
    return Case(
        f"MLP {'-'.join(map(str, widths))} b={size}", build, batch, nn.CrossEntropyLoss()
    )


def _cnn(size: int) -> Case:
    def build() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
            *(nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1)),
            *(nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
        )

    batch = (torch.randn(size, 1, 28, 28), torch.randint(10, (size,)))
    return Case(f"CNN b={size}", build, batch, nn.CrossEntropyLoss())


def _transformer(width: int, length: int, hidden: int, size: int) -> Case:
    batch = (torch.randn(size, length, width), torch.randint(10, (size,)))
    return Case(
        f"transformer block b={size}",
        lambda: Block(width, 4, hidden),
        batch,
        nn.CrossEntropyLoss(),
    )


class LoRA(nn.Module):
    """A frozen linear layer with a trained update of rank r beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output with the update."""
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def _lora(width: int, length: int, hidden: int, size: int, rank: int) -> Case:
    def build() -> nn.Module:
        block = Block(width, 4, hidden).requires_grad_(False)
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, LoRA(getattr(block, name), rank))
        block.classify.requires_grad_(True)
        return block

    batch = (torch.randn(size, length, width), torch.randint(10, (size,)))
    return Case(f"LoRA r={rank} b={size}", build, batch, nn.CrossEntropyLoss())


class Words(nn.Module):
    """Classifier on the mean of the embeddings of words."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table, self.classify = nn.Embedding(words, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns scores (B, classes) of texts (B, T)."""
        out: Tensor = self.classify(self.table(x).mean(dim=1))
        return out


def _embedding(words: int, width: int, length: int, size: int) -> Case:
    batch = (torch.randint(words, (size, length)), torch.randint(10, (size,)))
    name = f"embedding {words}x{width} b={size}"
    return Case(
        name, lambda: Words(words, width), batch, nn.CrossEntropyLoss(), only=("plain", "loop")
    )


def more(*, smoke: bool = False) -> list[Case]:
    """Returns further cases, which are timed by us and Opacus only; the same data every time."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        if smoke:
            return [_lora(8, 4, 16, 4, 2), _embedding(50, 4, 3, 4)]
        heads = [_softmax(1000, 4096), _softmax(10000, 256)]
        large = replace(mlp((784, 512, 256, 10), 2048), only=("plain", "loop", "ghost"))
        table = mlp((40, 64, 64, 2), 256)
        return [
            *heads,
            table,
            large,
            _lora(128, 64, 512, 32, 8),
            _embedding(100_000, 32, 20, 256),
        ]


def cases(*, smoke: bool = False) -> list[Case]:
    """Returns all cases, or small ones of each kind; the same data every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if smoke:
            return [
                _logistic(20, 32),
                _softmax(20, 32),
                mlp((20, 16, 10), 32),
                _cnn(4),
                _transformer(8, 4, 16, 4),
            ]
        return [
            *(_logistic(dim, size) for dim in (100, 1000, 10000) for size in (256, 4096)),
            *(
                _softmax(1000, 256),
                mlp((784, 512, 256, 10), 256),
                _cnn(64),
                _transformer(128, 64, 512, 32),
            ),
        ]
