"""What the trap tests led to: other ways into the same traps, each refused."""

from __future__ import annotations

import copy
import os

import pytest
import torch

import torch_dpsco as dp
from tests.checks import scores
from tests.problems import column, make_optimizer
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.errors import PrivacyError, SequenceError


def part(model: torch.nn.Linear, optimizer: dp.PrivateOptimizer, batches: object) -> None:
    (x,) = next(batches)
    model(x).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("rows", ["factored", "dense"])
def test_parts_of_two_iterations_are_never_joined(rows: str) -> None:
    model = scores(1, rows)
    ours = make_optimizer(model, dp.Full(4))
    loader = ours.loader(column(1.0, 1.0, 1.0, 1.0), steps=1, physical_batch_size=2)
    older = iter(loader)
    part(model, ours, older)
    ours.discard()
    part(model, ours, iter(loader))
    with pytest.raises(SequenceError, match="an older iteration of the loader was continued"):
        part(model, ours, older)
    assert not model.weight.any()
    assert len(ours.accountant) == ours.steps == 0
    newest = iter(loader)
    part(model, ours, newest)
    part(model, ours, newest)
    assert len(ours.accountant) == ours.steps == 1


def test_an_oracle_serves_one_optimizer() -> None:
    oracle = dp.oracles.Clipped(clip=1.0, noise_multiplier=0.0, batch_size=4)

    def make() -> dp.PrivateOptimizer:
        return dp.PrivateOptimizer(scores(1).parameters(), 1.0, oracle=oracle, rule=dp.rules.SGD(), design=dp.Full(4))

    make()
    with pytest.raises(SequenceError, match="oracle is another optimizer's"):
        make()


def test_a_shallow_copy_of_an_optimizer_is_refused() -> None:
    with pytest.raises(SequenceError, match=r"copy\.deepcopy"):
        copy.copy(make_optimizer(scores(1), dp.Full(4)))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_copy_cannot_spend_unseen_or_repeat_the_noise() -> None:
    model = scores(1)
    ours = make_optimizer(model, Undeclared(1), noise=1.0)
    model(torch.ones(1, 1)).sum().backward()  # torch refuses it in the child of a process that compiled
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ours.step()
        except PrivacyError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as messages:
        assert "in the process that made it" in messages.read()
