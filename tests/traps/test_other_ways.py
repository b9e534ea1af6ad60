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


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_parts_of_two_iterations_are_never_joined(rows: str) -> None:
    model = scores(1, rows)
    ours = make_optimizer(model, dp.Full(4))
    loader = ours.loader(column(1.0, 1.0, 1.0, 1.0), steps=1, physical_batch_size=2)
    older = iter(loader)
    part(model, ours, older)
    ours.discard()
    newest = iter(loader)
    part(model, ours, newest)
    with pytest.raises(SequenceError, match="an older iteration of the loader was continued"):
        part(model, ours, older)
    assert not model.weight.any()
    assert len(ours.accountant) == ours.steps == 0
    part(model, ours, newest)
    assert len(ours.accountant) == ours.steps == 1


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_another_draw_never_takes_the_place_of_one_in_progress(rows: str) -> None:
    model = scores(1, rows)
    ours = make_optimizer(model, dp.Full(4))
    loader = ours.loader(column(1.0, 1.0, 1.0, 1.0), steps=3, physical_batch_size=2)
    older = iter(loader)
    part(model, ours, older), part(model, ours, older)  # its next draw begins anew
    newest = iter(loader)
    part(model, ours, newest)
    with pytest.raises(SequenceError, match="an older iteration of the loader was continued"):
        part(model, ours, older)
    part(model, ours, newest)
    assert len(ours.accountant) == ours.steps == 2


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_the_rest_of_a_draw_that_was_used_up_is_refused(rows: str) -> None:
    """Else a step with too few rows would give it up, and the next iteration would deliver the used draw again."""
    model = scores(1, rows)
    ours = make_optimizer(model, dp.Fixed(10, 200))
    loader = ours.loader(column(*range(200)), steps=5)
    older = iter(loader.in_parts(2))
    part(model, ours, older)
    ours.discard()
    newest = iter(loader)
    (used,) = next(newest)  # the same draw, whole
    model(used).sum().backward()
    ours.step()
    with pytest.raises(SequenceError, match="an older iteration of the loader was continued"):
        next(older)
    (x,) = next(iter(loader))
    assert not torch.equal(x, used)  # by chance with a probability of 1e-16
    assert len(ours.accountant) == ours.steps == 1


def test_an_oracle_serves_one_optimizer() -> None:
    oracle = dp.oracles.Clipped(clip=1.0, noise_multiplier=0.0, batch_size=4)

    def make() -> dp.PrivateOptimizer:
        return dp.PrivateOptimizer(
            scores(1).parameters(), 1.0, oracle=oracle, rule=dp.rules.SGD(), design=dp.Full(4)
        )

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
    model(
        torch.ones(1, 1)
    ).sum().backward()  # torch refuses it in the child of a process that compiled
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
