"""Passes of secret draws inside of phases that are cut by position: LocalizedSGD, and parts of one permutation."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.algorithms.test_allocated import one_step, stored
from tests.algorithms.test_allocated_parts import (
    DATA,
    DELTA,
    DESIGN,
    FULL,
    PASS,
    SHORT,
    N,
    T,
    parts,
)
from tests.algorithms.test_allocated_parts import built as chosen
from tests.test_mutations import assert_caught
from torch_dpsco.accounting.designs import Assigned, Parts
from torch_dpsco.accounting.events import Parallel, RandomAllocation, Repeat, clipped_gaussian
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.algorithms.localized_numbers import LocalizedPhase, LocalizedSchedule
from torch_dpsco.errors import AdjacencyError, UnknownSamplerError
from torch_dpsco.sampling import Partition, PartsSampler, PrivateLoader, one_pass
from torch_dpsco.step.chooser import noise_for

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
    for x, y in optimizer.loader(DATA, steps=steps, padding=False, **loader):
        one_step(model, optimizer, x, y)


# -- plans ------------------------------------------------------------------------------------------------------------


def planned(**given: Any) -> Any:
    common = {
        "n": 300,
        "dim": 3,
        "budget": dp.Budget(1.0, DELTA, adjacency="zero_out"),
        "clip": 1.0,
        "reg": 0.1,
    }
    return dp.LocalizedSGD.plan(
        **{**common, "min_phase": 60, "max_steps": 200, "sampling": "allocated", **given}
    )


@pytest.mark.weekly
@pytest.mark.parametrize("adjacency", POSITIONAL)
def test_phases_in_passes_spend_the_budget_with_less_noise(adjacency: Any) -> None:
    budget = dp.Budget(1.0, DELTA, adjacency=adjacency)
    plan = planned(budget=budget)
    poisson = planned(budget=budget, sampling="poisson")
    assert 0.98 < plan.epsilon() <= 1.0
    assert type(plan).from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    for (design, draws), phase, other in zip(
        plan.design.parts, plan.localized.phases, poisson.localized.phases, strict=True
    ):
        assert isinstance(design, Assigned)
        assert draws == phase.steps == design.steps_per_epoch <= other.steps
        assert design.batch_size == phase.batch_size == other.batch_size
        assert phase.noise_multiplier == pytest.approx(noise_for(budget, design, draws))
        assert phase.noise_multiplier < other.noise_multiplier


@pytest.mark.weekly
def test_phases_whose_batches_would_be_single_records_take_all_of_them() -> None:
    plan = planned(min_phase=9, max_steps=1500)
    assert [type(design) for design, _ in plan.design.parts][-1] is dp.Full
    last = plan.localized.phases[-1]
    assert last.batch_size == last.n


def test_a_phase_of_few_steps_is_one_pass() -> None:
    plan = planned(budget=dp.Budget(0.1, DELTA, adjacency="zero_out"), max_steps=7)
    for design, draws in plan.design.parts:
        assert isinstance(design, Assigned)
        assert design.passes == 1
        assert draws == design.batches <= 7


@pytest.mark.weekly
def test_the_theorem_says_nothing_of_phases_in_passes() -> None:
    """Their batches depend on those before; it bounds the variance of steps that do not."""
    promised = dp.Problem(radius=1.0, moment=2.0, moment_order=4.0)
    for sampling in ("full", "poisson", "allocated"):
        schedule = planned(problem=promised, clip=None, reg=None, sampling=sampling).localized
        known = sampling != "allocated"
        assert (schedule.risk_bound is not None, schedule.proved) == (known, known)
        assert all((phase.error is not None) == known for phase in schedule.phases)


def phases(**changes: Any) -> LocalizedSchedule:
    numbers = {
        "n": 16,
        "batch_size": 4,
        "clip": 1.0,
        "steps": 8,
        "reg": 0.5,
        "noise_std": 0.5,
    }
    one = LocalizedPhase(**{"index": 1, "radius": np.inf, "error": None, **numbers, **changes})
    return LocalizedSchedule(phases=(one,), rho=None)


@pytest.mark.parametrize("steps", [3, 6, 9])
def test_given_phases_must_be_of_whole_passes(steps: int) -> None:
    assert dp.LocalizedSGD.plan(n=N, phases=phases(), sampling="allocated").design == Parts(
        ((Assigned(4, 16, passes=2), 8),), N
    )
    with pytest.raises(
        ValueError, match=f"steps of phase 1 must be whole passes, of 4 steps each.*got {steps}"
    ):
        dp.LocalizedSGD.plan(n=N, phases=phases(steps=steps), sampling="allocated")


def test_one_word_is_missing_for_phases() -> None:
    with pytest.raises(
        ValueError, match="sampling must be one of full, poisson, fixed, allocated"
    ):
        planned(sampling="assigned")


@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
def test_a_run_in_phases_is_charged_as_planned(tmp_path: Path) -> None:
    """Each pass at its first step, to its phase, also where the process was killed inside of one."""
    budget = dp.Budget(9.0, DELTA, adjacency="zero_out")
    plan = dp.LocalizedSGD.plan(n=N, phases=phases(), sampling="allocated", budget=budget)

    def run() -> tuple[nn.Module, Any]:
        model = dp.attach(nn.Linear(2, 1, bias=False), loss_reduction="sum")
        accountant = dp.Accountant(plan.budget, ledger_path=tmp_path / "ledger")
        return model, dp.LocalizedSGD(model.parameters(), plan, accountant=accountant)

    model, optimizer = run()
    assert optimizer.ahead() == plan.design.event(clipped_gaussian(2.0), 8)
    train(model, optimizer, 1)
    assert parts(optimizer) == [("0", RandomAllocation(2.0, 4), 1)]
    train(model, optimizer, 4, resume=True)
    state, first = stored(optimizer), optimizer._batch.partition
    train(model, optimizer, 1, resume=True)
    optimizer.accountant.close()
    model, again = run()
    with pytest.warns(UserWarning, match="1 steps after step 5 were lost"):
        again.resume(state)
    train(model, again, resume=True)
    assert np.array_equal(again._batch.partition.cut, first.cut)
    assert parts(again) == [("0", RandomAllocation(2.0, 4), 2)]
    again.finalize()
    assert again.accountant.get_epsilon(DELTA) == plan.epsilon(DELTA)
    assert "anew in each of 2 passes" in " ".join(str(again.report(DELTA)).split())


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
    sampler.partition = Partition(cut_of(sampler), size=5)
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
    once = Parts(((dp.Full(8), 2), (Assigned(4, 16), T)), N)
    with pytest.warns(dp.errors.UtilityWarning, match="seed="):
        seeded = PartsSampler(once, seed=1)
    assert seeded.design == once.without_amplification()
    with pytest.raises(AdjacencyError, match="loader must draw by"):
        built(once)[1].bind(PrivateLoader(DATA, seeded))
    model, optimizer = built(once.without_amplification())
    for x, y in optimizer.bind(PrivateLoader(DATA, seeded)):
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
