"""Models, batches and losses of the benchmarks; torch alone, so that peers can use them in environments of their own.

"logistic d/b" is logistic regression in d dimensions on a batch of b, "softmax d/b" a head of 10 classes. The network
of convolutions is that of Opacus' MNIST example (26,010 parameters). The transformer is one pre-LN block with a
classifier on the mean over positions. "GPT-2 + LoRA" is transformers' own, 4 layers of width 128 on 48 words, trained
by factors of rank 4 of peft beside its attention; left out where one of the two is not installed. "SiLU" is an MLP with
this activation and one output. "LoRA" trains factors of rank 8 beside the frozen linear layers of the block, and the
classifier; "embedding" is a table of 100,000 x 32 with a classifier on the mean of 20 words.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Block", "Case", "Data", "cases", "everyday", "fine_tuned", "long", "more"]

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, how its records are drawn, and a loss that is a mean over the batch.

    Attributes:
        batch: records in memory, for variants that are given one.
        draw: makes so many records.
        records: of a data set, of which batches of the size of `batch` are gathered.
        only: variants that are measured, where the others would take gigabytes; empty for all.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[int], Data]
    batch: Data
    loss: nn.Module
    records: int
    device: str = "cpu"
    only: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of records of a batch."""
        return len(self.batch[0])

    @property
    def data(self) -> Data:
        """The records of the data set, the same ones every time."""
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return self.draw(self.records)

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


def _case(
    name: str,
    build: Callable[[], nn.Module],
    draw: Callable[[int], Data],
    size: int,
    loss: nn.Module | None = None,
    records: int = 16_384,
) -> Case:
    loss = loss or nn.CrossEntropyLoss()
    return Case(name, build, draw, draw(size), loss, max(records, 4 * size))


def _labelled(shape: tuple[int, ...], classes: int = 10) -> Callable[[int], Data]:
    return lambda n: (torch.randn(n, *shape), torch.randint(classes, (n,)))


def _answered(dim: int) -> Callable[[int], Data]:
    return lambda n: (torch.randn(n, dim), (torch.rand(n, 1) > 0.5).float())


def _logistic(dim: int, size: int) -> Case:
    name = f"logistic {dim}/{size}"
    build, records = (lambda: nn.Linear(dim, 1)), 4096 if dim > 1000 else 16_384
    return _case(name, build, _answered(dim), size, nn.BCEWithLogitsLoss(), records)


def _softmax(dim: int, size: int) -> Case:
    return _case(f"softmax {dim}/{size}", lambda: nn.Linear(dim, 10), _labelled((dim,)), size)


def _layers(widths: tuple[int, ...], activation: type[nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers = [
            layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), activation())
        ]
        return nn.Sequential(*layers[:-1])

    return build


def _mlp(widths: tuple[int, ...], size: int) -> Case:
    name = f"MLP {'-'.join(map(str, widths))} b={size}"
    draw = _labelled((widths[0],), widths[-1])
    return _case(name, _layers(widths, nn.ReLU), draw, size)


def _silu(widths: tuple[int, ...], size: int) -> Case:
    name = f"SiLU {'-'.join(map(str, widths))} b={size}"
    build, draw = _layers(widths, nn.SiLU), _answered(widths[0])
    return _case(name, build, draw, size, nn.BCEWithLogitsLoss())


def _cnn(size: int) -> Case:
    def build() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
            *(nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1)),
            *(nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
        )

    return _case(f"CNN b={size}", build, _labelled((1, 28, 28)), size, records=4096)


def _transformer(width: int, length: int, hidden: int, size: int) -> Case:
    name = f"transformer block b={size}" + (f" T={length}" if length > 64 else "")
    build, draw = (lambda: Block(width, 4, hidden)), _labelled((length, width))
    return _case(name, build, draw, size, records=1024)


class Scores(nn.Module):
    """Scores of classes by a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        """Returns scores (B, classes) of texts (B, T)."""
        found: Tensor = self.model(input_ids=words).logits
        return found


def _gpt2(
    width: int, layers: int, size: int, *, words: int = 1000, last: bool = False
) -> list[Case]:
    """Returns GPT-2 with LoRA, or with nothing but its last layer trained; none where it is not installed."""
    if not all(map(importlib.util.find_spec, ("transformers", "peft"))):
        print("GPT-2 + LoRA is left out: pip install transformers peft")
        return []
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2ForSequenceClassification

    def build() -> nn.Module:
        sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": 64}
        undropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        others: Any = {"vocab_size": words, "num_labels": 2, "pad_token_id": 0}
        model = GPT2ForSequenceClassification(GPT2Config(**sizes, **undropped, **others))
        if last:
            model.requires_grad_(False).score.requires_grad_(True)
            return Scores(model)
        lora = LoraConfig(
            task_type="SEQ_CLS", r=4, target_modules=["c_attn"], fan_in_fan_out=True
        )
        return Scores(get_peft_model(model, lora))

    def draw(n: int) -> Data:
        return torch.randint(1, words, (n, 48)), torch.randint(2, (n,))

    how = "last layer" if last else "LoRA"
    return [_case(f"GPT-2 + {how} b={size}", build, draw, size, records=512)]


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

    return _case(f"LoRA r={rank} b={size}", build, _labelled((length, width)), size)


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
    name = f"embedding {words}x{width} b={size}"
    draw = _words(words, length)
    return replace(_case(name, lambda: Words(words, width), draw, size), only=("plain", "loop"))


def _words(words: int, length: int) -> Callable[[int], Data]:
    return lambda n: (torch.randint(words, (n, length)), torch.randint(10, (n,)))


def _seeded(make: Callable[[bool], list[Case]]) -> Callable[..., list[Case]]:
    def made(*, smoke: bool = False) -> list[Case]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return make(smoke)

    return made


@_seeded
def everyday(smoke: bool) -> list[Case]:
    """What users train, for runs at default settings; or small ones of each kind."""
    if smoke:
        small = [_mlp((20, 16, 10), 32), _silu((20, 16, 1), 32), _cnn(4)]
        found = [_logistic(20, 32), *small, _transformer(8, 4, 16, 4)]
        return [replace(case, records=4 * case.size) for case in found]
    nets = [_mlp((784, 512, 256, 10), 256), _mlp((40, 64, 64, 10), 256), _silu((40, 64, 1), 256)]
    linear = [_logistic(dim, size) for dim in (100, 1000, 10000) for size in (256, 4096)]
    return [*_gpt2(128, 4, 16), _transformer(128, 64, 512, 32), _cnn(64), *nets, *linear]


@_seeded
def long(smoke: bool) -> list[Case]:
    """Long sequences, for memory."""
    found = _transformer(8, 80, 16, 4) if smoke else _transformer(128, 512, 512, 16)
    return [replace(found, records=4 * found.size)]


@_seeded
def fine_tuned(smoke: bool) -> list[Case]:
    """A model of 124 million parameters of which few are trained, for memory."""
    width, layers, words = (16, 1, 100) if smoke else (768, 12, 50_257)
    return [
        case
        for last in (False, True)
        for case in _gpt2(width, layers, 16, words=words, last=last)
    ]


@_seeded
def cases(smoke: bool) -> list[Case]:
    """What is compared on one batch in memory, with peers; or small ones of each kind."""
    if smoke:
        nets = [_mlp((20, 16, 10), 32), _cnn(4), _transformer(8, 4, 16, 4)]
        return [_logistic(20, 32), _softmax(20, 32), *nets]
    linear = [_logistic(dim, size) for dim in (100, 1000, 10000) for size in (256, 4096)]
    nets = [_mlp((784, 512, 256, 10), 256), _cnn(64), _transformer(128, 64, 512, 32)]
    return [*linear, _softmax(1000, 256), *nets]


@_seeded
def more(smoke: bool) -> list[Case]:
    """Further cases on a batch in memory, which are timed by us and Opacus only."""
    if smoke:
        return [_lora(8, 4, 16, 4, 2), _embedding(50, 4, 3, 4)]
    large = replace(_mlp((784, 512, 256, 10), 2048), only=("plain", "loop", "ghost"))
    heads = [_softmax(1000, 4096), _softmax(10000, 256)]
    small = _mlp((40, 64, 64, 2), 256)
    return [*heads, small, large, _lora(128, 64, 512, 32, 8), _embedding(100_000, 32, 20, 256)]
