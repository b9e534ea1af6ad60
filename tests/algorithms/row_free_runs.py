"""Runs of `HolderOutputSGD` on 12 records in batches of 5: three steps an epoch, the last batch is short."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp

N, DIM, BATCH, EPOCH = 12, 3, 5, 3
LOSS = dp.losses.Hinge(power=1.5)
PROBLEM = LOSS.problem(bound_x=1.0, radius=1.0)
BUDGET = dp.Budget(1.0, 1e-3, "replace_one")


def records(n: int = N) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(n, DIM, generator=draw) / 2, torch.randn(n, 1, generator=draw).sign()
    )


@dataclass
class Run:
    model: nn.Linear
    opt: dp.HolderOutputSGD

    def backward(self, batch: Any) -> float:
        features, labels = batch
        loss = LOSS(self.model(features), labels)
        loss.backward()
        return loss.item()

    def train(self, loader: Any = None, steps: int | None = None) -> Run:
        """Makes steps; all of an iteration if their number is not given."""
        for batch in itertools.islice(
            self.opt.loader(records()) if loader is None else loader, steps
        ):
            self.backward(batch)
            self.opt.step()
        return self

    def averages(self) -> list[torch.Tensor]:
        return [self.opt.state[p]["average"].clone() for p in self.model.parameters()]

    def snapshot(self) -> tuple[Any, ...]:
        weights = [p.detach().double().numpy().tobytes() for p in self.model.parameters()]
        return (
            weights,
            self.opt.accountant.ledger.digest(),
            len(self.opt.accountant),
            self.opt.steps,
            self.opt.finalized,
        )


def make(
    model: nn.Module | None = None,
    *,
    accountant: dp.Accountant | None = None,
    generator: torch.Generator | None = None,
    **changes: Any,
) -> Run:
    """Returns a run that charges an accountant with any budget, by default with that of its noise."""
    model = nn.Linear(DIM, 1, bias=False).double() if model is None else model
    arguments = {
        "problem": PROBLEM,
        "n": N,
        "budget": BUDGET,
        "batch_size": BATCH,
        "epochs": 1,
        "lr": 0.1,
        **changes,
    }
    plan = dp.HolderOutputSGD.plan(**arguments, dim=model)
    if accountant is not None and accountant.budget != plan.budget:
        plan = replace(plan, budget=None)
    return Run(
        model,
        dp.HolderOutputSGD(model.parameters(), plan, accountant=accountant, generator=generator),
    )


@contextmanager
def refused(run: Run, error: type[Exception], match: str) -> Iterator[None]:
    """The block raises, and leaves parameters, ledger and step count as they were."""
    before = run.snapshot()
    with pytest.raises(error, match=match):
        yield
    assert run.snapshot() == before


def hold(run: Any) -> Any:
    """Returns a run whose last step keeps the answer back, until `release`."""
    run.opt.finalize = lambda: None
    return run


def release(run: Any) -> None:
    """Releases an answer that was kept back."""
    vars(run.opt).pop("finalize", None)
    run.opt.finalize()


class InOrder:
    """A source of permutations that are fixed in advance, one after another."""

    def __init__(self, orders: list[np.ndarray]) -> None:
        self.orders = list(orders)

    def permutation(self, size: int) -> np.ndarray:
        return self.orders.pop(0)


def ordered(run: Run, orders: list[np.ndarray]) -> Any:
    loader = run.opt.loader(records())
    loader._loader.batch_sampler.rng = InOrder(orders)
    return loader
