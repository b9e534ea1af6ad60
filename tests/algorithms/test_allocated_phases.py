"""Passes of secret draws inside of phases that are cut by position: parts of one permutation."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.algorithms.test_allocated import one_step
from tests.algorithms.test_allocated_parts import (
    DATA,
    DELTA,
    DESIGN,
    FULL,
    PASS,
    SHORT,
    N,
    T,
)
from tests.algorithms.test_allocated_parts import built as chosen
from tests.test_mutations import assert_caught
from torch_dpsco.accounting.designs import Assigned, Parts
from torch_dpsco.accounting.events import Parallel, Repeat
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import AdjacencyError, UnknownSamplerError
from torch_dpsco.sampling import Partition, PartsSampler, PrivateLoader, one_pass

BY_POSITION = Parts(DESIGN.parts, N)
POSITIONAL = ("replace_one", "zero_out")


def built(
    design: Parts = BY_POSITION, accountant: dp.Accountant | None = None
) -> tuple[nn.Module, Any]:
    return chosen(
        design,
        accountant=dp.Accountant(adjacency="zero_out") if accountant is None else accountant,
    )


def train(model: nn.Module, optimizer: Any, steps: int | None = None, **loader: Any) -> None:
    for x, y in optimizer.loader(DATA, steps=steps, isolation="none", **loader):
        one_step(model, optimizer, x, y)


# -- what is charged --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "design", [BY_POSITION, Parts(SHORT.parts, N), Parts(DESIGN.parts[1:], N)]
)
def test_parts_of_one_permutation_are_charged_by_their_passes(design: Parts) -> None:
    model, optimizer = built(design)
    ahead = optimizer.ahead()
    train(model, optimizer)
    assert ahead == design.event(FULL, design.steps_per_epoch)
    for adjacency in POSITIONAL:
        assert Ledger([ahead]).epsilon(DELTA, adjacency) == optimizer.accountant.ledger.epsilon(
            DELTA, adjacency
        )
    with pytest.raises(AdjacencyError):
        Ledger([ahead]).epsilon(DELTA, "add_remove")
    with pytest.raises(AdjacencyError):
        built(design, dp.Accountant(adjacency="add_remove"))


def test_a_pass_in_a_part_of_positions_is_one_event_of_it() -> None:
    event = BY_POSITION.between(1, 10, [FULL, FULL], "p")
    full = FULL.only("zero_out", "replace_one")
    assert event == Parallel({"0": (Repeat(full, 1),), "1": (Repeat(PASS, 2),)}, "p")
    known = Parts(((dp.Full(8), 2), (Assigned(4, 16, amplification=False), T)), N)
    assert known.between(2, 6, [FULL, FULL], "p") == Parallel({"1": (Repeat(full, 1),)}, "p")
    with pytest.raises(ValueError, match="passes must be 1"):
        Parts(((Assigned(4, 16, passes=2, amplification=False), T),), N)


# -- draws ------------------------------------------------------------------------------------------------------------


def test_parts_of_positions_and_their_passes_hold_each_record_once() -> None:
    sampler = PartsSampler(BY_POSITION)
    drawn = list(sampler.draws())
    assert [draw.part for draw, _ in drawn] == [
        "0",
        "0",
        *(f"1/{k}" for _ in range(2) for k in range(T)),
    ]
    assert [draw.index for draw, _ in drawn] == list(range(2 + 2 * T))
    first = set(drawn[0][1].tolist())
    assert len(first) == 8
    for start in (2, 2 + T):
        found = np.concatenate([indices for _, indices in drawn[start : start + T]]).tolist()
        assert sorted(found) == sorted(set(range(N)) - first)
    again = list(PartsSampler(BY_POSITION, resume=replace(sampler.partition, made=3)).draws())
    assert [indices.tolist() for _, indices in again] == [
        indices.tolist() for _, indices in drawn[3:]
    ]


@pytest.mark.slow
def test_picks_inside_of_positions_are_uniform_and_independent() -> None:
    """Pairs of batches of one record in two passes, over 4,000 keys: a false alarm has probability 1e-6."""
    counts = np.zeros((T, T))
    for _ in range(4000):
        drawn = [indices for _, indices in PartsSampler(BY_POSITION).draws()][2:]
        where = [k for k, indices in enumerate(drawn) if 5 in indices]
        if where:  # in the second part
            counts[where[0], where[1] - T] += 1
    assert stats.chisquare(counts.ravel()).pvalue > 1e-6


def names_of_permutations(cut_of: Any) -> bool:
    """Returns whether the name in the ledger is that of a permutation of so few records."""
    design = Parts(((Assigned(2, 5), 3),), 5)
    sampler = PartsSampler(design)
    sampler.partition = Partition(cut_of(sampler), 5)
    name = one_pass.partition_name(design, sampler.partition)
    orders = (np.array(order) for order in permutations(range(5)))
    return any(
        one_pass.partition_name(design, Partition(order, size=5)) == name for order in orders
    )


def test_the_name_of_parts_with_secret_draws_does_not_tell_them() -> None:
    """It is a public digest: few permutations could all be tried, 256 random bits cannot."""

    def check() -> None:
        assert not names_of_permutations(lambda sampler: sampler._new_cut())

    check()
    assert_caught(check, lambda patch: patch.setattr(PartsSampler, "_keyed", False))


def test_copies_of_a_sampler_of_positions_draw_anew() -> None:
    sampler = PartsSampler(BY_POSITION)
    for other in (
        copy.copy(sampler),
        copy.deepcopy(sampler),
        pickle.loads(pickle.dumps(sampler)),
    ):
        assert not np.array_equal(other.partition.cut, sampler.partition.cut)
        assert other.partition.cut.tobytes() not in pickle.dumps(sampler)


def test_draws_in_positions_that_may_be_known_are_not_amplified() -> None:
    given = PartsSampler(BY_POSITION, resume=Partition(np.arange(32, dtype=np.uint8), size=N))
    with pytest.raises(UnknownSamplerError, match="must draw by itself"):
        built()[1].bind(PrivateLoader(DATA, given))
    known = Parts(((dp.Full(8), 2), (Assigned(4, 16, amplification=False), T)), N)
    with pytest.raises(AdjacencyError, match="loader must draw by"):
        built(Parts(((dp.Full(8), 2), (Assigned(4, 16), T)), N))[1].bind(
            PrivateLoader(DATA, PartsSampler(known))
        )
    model, optimizer = built(known)
    for x, y in optimizer.bind(PrivateLoader(DATA, PartsSampler(known))):
        one_step(model, optimizer, x, y)
    assert "RandomAllocation" not in str(list(optimizer.accountant.ledger.entries()))
    with pytest.raises(UnknownSamplerError, match="design must be Parts"):
        PartsSampler(DESIGN)


def test_a_replaced_record_is_in_the_batches_of_the_one_before() -> None:
    """All that a key fixes goes by position, whatever the records are."""
    made = []
    for _ in range(2):
        sampler = PartsSampler(BY_POSITION)
        sampler.partition = replace(sampler.partition, cut=np.arange(32, dtype=np.uint8))
        data = TensorDataset(torch.rand(N, 2))
        loader = PrivateLoader(data, sampler)
        made.append([indices.tolist() for _, indices in loader.batch_sampler.draws()])
    assert made[0] == made[1]
