"""What the tests of the optimizer contract share: rows, which are optimizers, and runs of them on one tiny task.

All rows but those with a filter share the task: 24 records (or users), batches of 6 (of 24 under `Full`), 4 planned
steps, so that a one-pass design uses each record once.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.streams import seeded, seeded_sampler
from torch_dpsco.accounting.designs import Assigned, Design, Draw, Parts
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import SequenceError, UtilityWarning
from torch_dpsco.sampling import DesignSampler, PrivateLoader, UserLoader, make_sampler

N, BATCH, STEPS, DIM = 24, 6, 4, 3
LOSS = dp.losses.Logistic()
FACTS = {
    "plain": "each step is w - lr * mean",
    "moving": "each release moves the iterate",
    "rates": "step sizes are those of the parameter groups",
    "empty": "a draw may be empty",
    "anew": "a loop over a new loader may follow on any step: no step needs a batch of its own",
    "clip": "the clip is a public function of the iterate, that of the row",
    "quiet": "without noise nothing is drawn but batches, so that a release is a function of them",
    "alike": "all steps cost the same, and the design says how much",
    "endless": "without steps the run has no end",
    "private": "noise is drawn, and some budget admits a step",
    "numbers": "noise, clip and batch size are those of the settings",
    "batch": "the batch size is",
    "shared": "the ledger may serve several runs of one state: releases have no secret in common",
}


@dataclass(frozen=True)
class Settings:
    """What a test may vary; `scale` multiplies the clip, or the record bound that the clip follows from."""

    noise: float = 1.0
    scale: float = 1.0
    batch: int = BATCH
    steps: int | None = STEPS
    lr: float = 0.1
    accountant: dp.Accountant | None = None
    generator: torch.Generator | None = None


Build = Callable[[Any, Settings], dp.PrivateOptimizer]


def records(n: int = N, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Returns n records with |x| <= 3 and labels +-1."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(n, DIM, generator=generator)
    features = features * (
        3 * torch.rand(n, 1, generator=generator) / features.norm(dim=1, keepdim=True)
    )
    labels = torch.sign(torch.randn(n, 1, generator=generator))
    return TensorDataset(features.to(dtype), labels.to(dtype))


def agreeing(n: int = N, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Returns n records that are near each other, so that users with one or more of them agree."""
    features = torch.eye(DIM)[0] + 0.1 * torch.randn(
        n, DIM, generator=torch.Generator().manual_seed(0)
    )
    return TensorDataset(features.to(dtype), torch.ones(n, 1, dtype=dtype))


@dataclass(frozen=True)
class Row:
    """An optimizer under contract.

    `clip(norm, scale)`: the bound that the row must clip at when the parameters have that norm. `lacks`: the `FACTS`
    that do not hold. `louder`: how much larger the noise of a mean is than clip / batch size.
    """

    name: str
    build: Build
    adjacency: str
    clip: Callable[[float, float], float] | None = None
    lacks: frozenset[str] = frozenset()
    data: Callable[..., TensorDataset] = records
    louder: Callable[[Any], float] = lambda oracle: 1.0
    unit: str = "example"

    def __post_init__(self) -> None:
        assert self.lacks <= FACTS.keys()
        assert self.clip is not None or "clip" in self.lacks

    def make(
        self, settings: Settings | None = None, model: nn.Module | None = None, **changes: Any
    ) -> Run:
        """Returns a fresh (attached, zero) model with its optimizer."""
        settings = replace(settings or Settings(), **changes)
        model = self.model() if model is None else model
        return Run(model, self.build(model.parameters(), settings), self)

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Linear:
        """Returns an attached model at 0."""
        return self.attach(zeros(dtype))

    def attach(self, model: nn.Module) -> Any:
        """Attaches a model; where users are protected, and for half precision, its loss is a sum."""
        summed = self.unit == "user" or any(
            p.dtype == torch.bfloat16 for p in model.parameters()
        )
        return dp.attach(model, loss_reduction="sum" if summed else "mean")

    def accountant(self, budget: dp.Budget | None = None, **more: Any) -> dp.Accountant:
        """Returns an accountant that the optimizer can charge."""
        return dp.Accountant(budget, adjacency=self.adjacency, unit=self.unit, **more)


def is_amplified(design: Design) -> bool:
    return isinstance(design, Assigned) and design.amplification


def repeatable(design: Design, size: int, steps: int, seed: int) -> DesignSampler:
    """Returns a sampler that draws as a seed says; where no seed is accepted, its secret is written into it."""
    if not is_amplified(design):
        return seeded_sampler(design, size=size, steps=steps, seed=seed)
    sampler = make_sampler(design, size=size, steps=steps)
    key = np.random.default_rng(seed).integers(0, 256, 32, dtype=np.uint8)
    sampler.partition = replace(sampler.partition, cut=key)  # type: ignore[attr-defined]
    return sampler


def zeros(dtype: torch.dtype = torch.float32) -> nn.Linear:
    model = nn.Linear(DIM, 1, dtype=dtype)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


@dataclass
class Run:
    """A model, its optimizer, and a training loop over batches that a seed repeats."""

    model: nn.Module
    opt: dp.PrivateOptimizer
    row: Row

    def given(
        self, size: int | None = None, dtype: Any = None
    ) -> tuple[TensorDataset, Tensor | None]:
        """Returns the data set of so many records, or users of two records each, and the users."""
        size = self.opt.design.n if size is None else size
        dtype = dtype or next(self.model.parameters()).dtype
        if self.row.unit == "example":
            return self.row.data(size, dtype), None
        return self.row.data(2 * size, dtype), torch.arange(2 * size) % max(1, size)

    def loader(
        self,
        seed: int = 1,
        steps: int = STEPS,
        *,
        size: int | None = None,
        physical: int | None = None,
        dtype: Any = None,
    ) -> PrivateLoader:
        """Returns a bound loader of repeatable draws; where a run has begun in parts, of those that it has left."""
        in_order = isinstance(self.opt.design, Parts) or is_amplified(self.opt.design)
        if in_order and (self.opt.steps or self.opt._batch.partition is not None):
            return self.going_on(steps, physical)
        design = self.opt.design
        dataset, users = self.given(size, dtype)
        units = (
            design.n
            if size is None or (users is not None and self.row.adjacency != "add_remove")
            else size
        )
        sampler = repeatable(design, units, steps, seed)
        if users is None:
            return self.opt.bind(PrivateLoader(dataset, sampler, physical_batch_size=physical))
        return self.opt.bind(UserLoader(dataset, sampler, users, physical_batch_size=physical))

    def going_on(self, steps: int | None = None, physical: int | None = None) -> PrivateLoader:
        """Returns a loader of what a one-pass design has left."""
        dataset, users = self.given()
        return self.opt.loader(
            dataset,
            users,
            steps=steps,
            resume=True,
            physical_batch_size=physical,
            isolation="none",
        )

    def backward(self, batch: Iterable[Tensor]) -> Tensor:
        """Leaves per-sample gradients on the parameters and returns the loss."""
        features, labels, *_ = batch
        loss = LOSS(
            self.model(features), labels, reduction="mean" if self.model._dpsco.mean else "sum"
        )
        loss.backward()
        return loss

    def train(
        self, steps: int = STEPS, seed: int = 1, noise_seed: int | None = 5, **loader: Any
    ) -> Run:
        """Makes steps on repeatable batches with repeatable noise (with noise of its own if `noise_seed` is None)."""
        if noise_seed is not None:
            self.opt._noise = seeded(noise_seed)
        for batch in self.loader(seed, steps, **loader):
            self.opt.zero_grad()
            self.backward(batch)
            self.opt.step()
        return self

    def parameters(self) -> list[Tensor]:
        """Returns a copy of the parameters."""
        return [p.detach().clone() for p in self.model.parameters()]

    def answer(self) -> list[Tensor]:
        """Returns the private answer so far."""
        with self.opt.released():
            return self.parameters()

    def ledger(self) -> str:
        return self.opt.accountant.ledger.digest()

    def charged(self, steps: int) -> int:
        """Returns how many events the ledger of so many steps must hold."""
        charge = self.opt.oracle.charge(self.opt.design, Draw(0, "planned", "0")).event
        return len(Ledger([charge])) * (1 if "shared" in self.row.lacks else steps)

    def copy(self) -> Run:
        return Run(*copy.deepcopy((self.model, self.opt)), self.row)


def same(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    """Returns whether two lists of tensors agree bit for bit, dtypes included."""
    pairs = list(zip(first, second, strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def assert_no_batches(run: Run) -> None:
    """A loop after the last planned step has nothing to deliver, and says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            (UtilityWarning, SequenceError),
            match=r"all planned steps are made: this loop has no|a one-pass loader is exhausted",
        ):
            run.train(1, seed=2)


def assert_unchanged(
    run: Run, before: tuple[list[Tensor], str, int], *, trained: bool = True
) -> None:
    """The parameters, the ledger and the step count are those of `before`, and no row is left anywhere."""
    assert same(run.parameters(), before[0])
    assert (run.ledger(), run.opt.steps) == before[1:]
    if trained:
        assert all(
            p.grad is None and getattr(p, "grad_sample", None) is None
            for p in run.model.parameters()
        )
        assert not run.model.tape.uses


def snapshot(run: Run) -> tuple[list[Tensor], str, int]:
    return run.parameters(), run.ledger(), run.opt.steps
