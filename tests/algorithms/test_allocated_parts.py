"""Passes of secret draws inside of parts: events of their part, and what would make their charge too small is refused.

As in test_allocated.py, each refusal has a mutation that its test catches.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from tests.algorithms.test_allocated import begun_again, one_step, refused, stored
from tests.algorithms.test_allocated import built as whole_run
from tests.test_mutations import assert_caught, nothing
from torch_dpsco.accounting.designs import Assigned, AssignedParts, Draw, Parts
from torch_dpsco.accounting.events import (
    ADJACENCIES,
    Parallel,
    Pure,
    RandomAllocation,
    Repeat,
    Sequential,
    clipped_gaussian,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import AdjacencyError, BudgetExceeded, PrivacyError, UnknownSamplerError
from torch_dpsco.noise import KeyedStream, SecretState
from torch_dpsco.problem import Phase, Schedule
from torch_dpsco.sampling import FullSampler, PrivateLoader, one_pass
from torch_dpsco.sampling.one_pass import AssignedPartsSampler
from torch_dpsco.step import optimizer as saved
from torch_dpsco.step import run as charges
from torch_dpsco.step.batch import LogicalBatch
from torch_dpsco.step.oracle import Clipped, MeanOracle, Phased
from torch_dpsco.step.run import sizes_are_private

N, T, Z, DELTA = 24, 4, 2.0, 1e-4
DATA = TensorDataset(torch.ones(N, 2), torch.ones(N, 1))
PASS, FULL = RandomAllocation(Z, T), clipped_gaussian(Z)
DESIGN = AssignedParts(
    ((dp.Full(8), 2), (Assigned(4, 16, passes=2), 2 * T)), N
)  # draws 0, 1; then 2..5 and 6..9
SHORT = AssignedParts(
    ((Assigned(4, 8, passes=2), 3), (Assigned(4, 16), T)), N
)  # draws 0, 1; 2, half a pass; 3..6
ONE = AssignedParts(((dp.Full(8), 2), (Assigned(4, 16), 1)), N)  # one batch of a pass


def built(
    design: Parts = DESIGN,
    oracles: tuple[MeanOracle, ...] | None = None,
    accountant: dp.Accountant | None = None,
) -> tuple[nn.Module, dp.PrivateOptimizer]:
    model = dp.attach(nn.Linear(2, 1, bias=False), loss_reduction="sum")
    if oracles is None:
        oracles = tuple(Clipped(1.0, Z, part.batch_size) for part, _ in design.parts)
    steps = [draws for _, draws in design.parts]
    optimizer = dp.PrivateOptimizer(
        model.parameters(),
        0.1,
        oracle=Phased(list(zip(oracles, steps, strict=True))),
        rule=dp.rules.SGD(),
        design=design,
        schedule=Schedule(tuple(map(Phase, steps))),
        accountant=dp.Accountant(adjacency="add_remove") if accountant is None else accountant,
    )
    return model, optimizer


def train(
    model: nn.Module, optimizer: dp.PrivateOptimizer, steps: int | None = None, **loader: Any
) -> None:
    for x, y in optimizer.loader(DATA, steps=steps, isolation="none", **loader):
        one_step(model, optimizer, x, y)


def parts(optimizer: dp.PrivateOptimizer) -> list[tuple[str, Any, int]]:
    """Returns (part, event, count) of the ledger, whose events are all of the run's partition."""
    entries = list(optimizer.accountant.ledger.entries())
    assert {partition for partition, _, _, _ in entries} <= {optimizer._batch.partition_name}
    return [(part, event, count) for _, part, event, count in entries]


# -- what is charged --------------------------------------------------------------------------------------------------


def check_that_a_pass_is_charged_to_its_part_first() -> None:
    model, optimizer = built()
    train(model, optimizer, 3)
    assert parts(optimizer) == [("0", FULL, 2), ("1", PASS, 1)]
    train(model, optimizer, T - 1, resume=True)
    assert parts(optimizer) == [("0", FULL, 2), ("1", PASS, 1)]
    train(model, optimizer, 1, resume=True)
    assert parts(optimizer) == [("0", FULL, 2), ("1", PASS, 2)]
    train(model, optimizer, T - 1, resume=True)
    assert (optimizer.steps, parts(optimizer)) == (
        DESIGN.steps_per_epoch,
        [("0", FULL, 2), ("1", PASS, 2)],
    )
    optimizer.finalize()


def test_a_pass_inside_of_a_part_is_charged_to_the_part() -> None:
    """The mutations charge step by step, batches as if they were parts, or all to no part."""

    def by_prefix(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(AssignedParts, "covers", lambda self, base, draw: 1)

    def to_a_batch(patch: pytest.MonkeyPatch) -> None:
        def charge(self: AssignedParts, base: Any, draw: Draw) -> Any:
            event = RandomAllocation(base.sigma, T) if draw.part.startswith("1") else base
            return self._parallel({draw.part: (event,)}, draw.partition)

        patch.setattr(AssignedParts, "draw_event", charge)

    for mutation in (by_prefix, to_a_batch):
        assert_caught(check_that_a_pass_is_charged_to_its_part_first, mutation)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("design", [DESIGN, SHORT, ONE])
def test_plans_of_passes_in_parts_are_what_their_ledgers_hold(design: AssignedParts) -> None:
    model, optimizer = built(design)
    planned = optimizer.ahead()
    assert planned == design.event(FULL, design.steps_per_epoch)
    train(model, optimizer)
    for adjacency in ADJACENCIES:
        assert Ledger([planned]).epsilon(
            DELTA, adjacency
        ) == optimizer.accountant.ledger.epsilon(DELTA, adjacency)
    assert optimizer.ahead() == Sequential(())


def test_draws_of_parts_cost_the_passes_that_they_touch() -> None:
    def event(start: int, stop: int) -> Any:
        return DESIGN.between(start, stop, [FULL, FULL], "p")

    def of(**used: Any) -> Parallel:
        return Parallel(
            {name[1:]: (one,) for name, one in used.items()}, "p", "keyed", key_public=True
        )

    assert event(0, 3) == of(_0=Repeat(FULL, 2), _1=Repeat(PASS, 1))
    assert event(2, 6) == of(_1=Repeat(PASS, 1))
    assert event(5, 7) == of(_1=Repeat(PASS, 2))  # the end of a pass, and the next one
    assert event(1, 10) == of(_0=Repeat(FULL, 1), _1=Repeat(PASS, 2))
    assert "RandomAllocation" not in str(DESIGN.between(0, 2, [FULL, FULL], "p"))


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_parts_with_passes_cost_what_the_costliest_does(adjacency: Any) -> None:
    alone = [
        Ledger([event]).epsilon(DELTA, adjacency) for event in (Repeat(FULL, 2), Repeat(PASS, 2))
    ]
    assert alone[1] < 0.8 * alone[0]
    assert Ledger([DESIGN.event(FULL, 10)]).epsilon(DELTA, adjacency) == pytest.approx(
        alone[0], rel=1e-9
    )
    piloted = DESIGN.between(0, 10, [Pure(0.01, ADJACENCIES), FULL])
    assert Ledger([piloted]).epsilon(DELTA, adjacency) == pytest.approx(alone[1], rel=1e-9)


def check_that_known_batches_are_of_one_pass() -> None:
    with pytest.raises(ValueError, match="passes must be 1"):
        AssignedParts(((dp.Full(8), 2), (Assigned(4, 16, passes=2, amplification=False), 8)), N)
    for call in (
        lambda: DESIGN.draw_event(Pure(0.1, ADJACENCIES), Draw(4, "p", "1/0", 2)),
        lambda: DESIGN.between(2, 8, [FULL, Pure(0.1, ADJACENCIES)]),
    ):
        with pytest.raises(ValueError, match="passes must be 1"):
            call()


def test_a_part_is_assigned_to_batches_once() -> None:
    """Where nothing is amplified batches are charged, which are disjoint within one pass only."""
    once = AssignedParts(((dp.Full(8), 2), (Assigned(4, 16), 4)), N)
    known = AssignedParts(((dp.Full(8), 2), (Assigned(4, 16, amplification=False), 4)), N)
    assert (once.secret, known.secret, DESIGN.secret) == (True, False, True)
    assert "RandomAllocation" not in str(known.event(FULL, 6))
    pure = Pure(0.1, ADJACENCIES)
    for design in (once, known):
        assert design.covers(pure, Draw(4, "p", "1/0", 2)) == 1
        assert design.draw_event(pure, Draw(4, "p", "1/0", 2)) == Parallel(
            {"1/0": (pure,)}, "p", "keyed", key_public=True
        )

    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr("torch_dpsco.accounting.designs._require_one_pass", nothing)

    check_that_known_batches_are_of_one_pass()
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            check_that_known_batches_are_of_one_pass()


def test_a_pass_pays_for_no_step_of_the_next_part() -> None:
    def check() -> None:
        draws = [("0", 0), ("0", 1), ("0", 2), ("1", 3), ("1", 4), ("1", 5), ("1", 6)]
        assert [SHORT.covers(FULL, Draw(4, "p", f"{part}/0", k)) for part, k in draws] == [
            2,
            1,
            1,
            4,
            3,
            2,
            1,
        ]
        model, optimizer = built(SHORT)
        train(model, optimizer)
        assert parts(optimizer) == [("0", RandomAllocation(Z, 2), 2), ("1", PASS, 1)]

    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(AssignedParts, "covers", lambda self, base, draw: self.parts[0][0].batches)

    assert_caught(check, mutate)
    with pytest.raises(ValueError, match="draw 3 must be of part 1"):
        SHORT.covers(FULL, Draw(4, "p", "0/0", 3))


def test_a_budget_that_does_not_pay_the_pass_refuses_its_first_step() -> None:
    ledger = dp.Accountant(adjacency="add_remove")
    model, optimizer = built(ONE, (Clipped(1.0, 20.0, 8), Clipped(1.0, Z, 4)), ledger)
    pass_alone, pilot = (
        Ledger([PASS]).epsilon(DELTA, "add_remove"),
        Repeat(clipped_gaussian(20.0), 2),
    )
    ledger.budget = dp.Budget(0.9 * pass_alone, DELTA, adjacency="add_remove")
    assert Ledger([pilot]).epsilon(DELTA, "add_remove") < 0.9 * pass_alone
    batches = iter(optimizer.loader(DATA, isolation="none"))
    for _ in range(2):
        one_step(model, optimizer, *next(batches))
    with pytest.raises(BudgetExceeded):
        one_step(model, optimizer, *next(batches))
    assert (optimizer.steps, parts(optimizer)) == (2, [("0", clipped_gaussian(20.0), 2)])


# -- what would make a charge too small -------------------------------------------------------------------------------


class Changing(Clipped):
    """Has other noise from some release on, and does not say that it depends on anything."""

    def __init__(self, change: int, first: Any, later: Any, batch_size: int = 4) -> None:
        super().__init__(1.0, Z, batch_size)
        self._change, self._events, self._made = change, (first, later), 0

    def event(self) -> Any:
        return self._events[self._made >= self._change]

    def release(self, generator: Any) -> Any:
        self._made += 1
        return super().release(generator)


def test_a_step_in_a_part_with_less_noise_than_its_pass_is_refused() -> None:
    def check() -> None:
        model, optimizer = built(
            oracles=(Clipped(1.0, Z, 8), Changing(1, FULL, clipped_gaussian(Z / 2)))
        )
        refused(
            lambda: train(model, optimizer),
            "steps must be those that their pass was charged for",
        )
        assert optimizer.steps == 3

    assert_caught(check, lambda patch: patch.setattr(charges.Paid, "require", nothing))


def test_a_charge_of_another_pass_than_planned_is_refused() -> None:
    """A batch is charged, and then a pass over all batches of the same part; or a later pass of other noise."""

    def check() -> None:
        once = AssignedParts(((dp.Full(8), 2), (Assigned(4, 16), 4)), N)
        model, optimizer = built(
            once, (Clipped(1.0, Z, 8), Changing(1, Pure(0.1, ADJACENCIES), FULL))
        )
        refused(lambda: train(model, optimizer), "as was known when the optimizer was made")
        assert optimizer.steps == 3
        model, optimizer = built(
            oracles=(Clipped(1.0, Z, 8), Changing(T, FULL, clipped_gaussian(Z / 2)))
        )
        refused(lambda: train(model, optimizer), "as was known when the optimizer was made")
        assert (optimizer.steps, parts(optimizer)) == (2 + T, [("0", FULL, 2), ("1", PASS, 1)])

    assert_caught(check, lambda patch: patch.setattr(charges, "_refuse_pass", nothing))


class Longer(Clipped):
    def charge(self, design: Any, draw: Draw) -> Any:
        return super().charge(design, draw)._replace(covers=2 * T)


class Adaptive(Clipped):
    def charge(self, design: Any, draw: Draw) -> Any:
        return super().charge(design, draw)._replace(adaptive=True)


def test_parts_whose_passes_are_not_fixed_before_are_refused() -> None:
    """A charge that pays for more than a pass; noise of a part, with or without passes, that outputs choose."""

    def check() -> None:
        first, second = Clipped(1.0, Z, 8), Clipped(1.0, Z, 4)
        for pair in (
            (first, Longer(1.0, Z, 4)),
            (Longer(1.0, Z, 8), second),
            (first, Adaptive(1.0, Z, 4)),
            (Adaptive(1.0, Z, 8), second),
        ):
            refused(lambda pair=pair: built(oracles=pair), "amplification=False", AdjacencyError)  # type: ignore[misc]

    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(charges.Run, "in_passes", True)
        patch.setattr(dp.Accountant, "require_adaptive", nothing)

    assert_caught(check, mutate)


def test_draws_in_parts_serve_once() -> None:
    """Of two optimizers with one ledger, which got the same secret by a trick, only one makes each step."""

    def check() -> None:
        ledger = dp.Accountant(adjacency="add_remove")
        (model, first), (other, second) = built(accountant=ledger), built(accountant=ledger)
        loaders = [PrivateLoader(DATA, AssignedPartsSampler(DESIGN)) for _ in range(2)]
        loaders[1].batch_sampler.partition = loaders[0].batch_sampler.partition  # type: ignore[attr-defined]
        for optimizer, loader in zip((first, second), loaders, strict=True):
            optimizer.bind(loader)
        one_step(model, first, *next(iter(loaders[0])))
        refused(
            lambda: one_step(other, second, *next(iter(loaders[1]))),
            "may have been released already",
        )

    assert_caught(check, lambda patch: patch.setattr(charges.Run, "_require_fresh", nothing))


def test_parts_with_passes_are_not_begun_again() -> None:
    def check() -> None:
        model, optimizer = built()
        train(model, optimizer, 4)
        refused(
            lambda: optimizer.bind(PrivateLoader(DATA, AssignedPartsSampler(DESIGN))),
            "go on with draw 4",
        )
        refused(lambda: train(model, optimizer, 2), "None")  # it goes on
        assert parts(optimizer) == [("0", FULL, 2), ("1", PASS, 1)]

    assert_caught(check, lambda patch: patch.setattr(saved, "continued", begun_again))


@pytest.mark.parametrize("made", [1, 4])
def test_a_copy_of_parts_with_passes_is_refused(made: int) -> None:
    """Also in the part before: the copy would have the draws of the passes that follow."""

    def check() -> None:
        model, optimizer = built()
        train(model, optimizer, made)
        for copied in (copy.deepcopy, pickle.dumps):
            refused(lambda copied=copied: copied((model, optimizer)), "must not be copied")  # type: ignore[misc]
        optimizer.finalize()
        copy.deepcopy((model, optimizer))

    assert_caught(check, lambda patch: patch.setattr(saved, "refuse_copy", nothing))


def test_a_copy_of_one_batch_of_a_pass_is_refused() -> None:
    """The charge pays for one release, of draws that a second one would share."""

    def check() -> None:
        model, optimizer = built(ONE)
        train(model, optimizer, 2)
        assert [charge.covers for charge in charges.first_charges(optimizer.oracle, ONE)] == [
            1,
            1,
        ]
        refused(lambda: copy.deepcopy((model, optimizer)), "must not be copied")
        refused(
            lambda: built(ONE)[1].load_state_dict(stored(optimizer)), "must be continued once"
        )

    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr("torch_dpsco.step.run.pass_of", nothing)
        patch.setattr(charges, "_refuse_pass", nothing)

    assert_caught(check, mutate)


def test_parts_with_passes_go_on_in_one_place_only() -> None:
    def check() -> None:
        model, optimizer = built()
        train(model, optimizer, 4)
        refused(lambda: built()[1].load_state_dict(stored(optimizer)), "must be continued once")

    assert_caught(check, lambda patch: patch.setattr(saved, "refuse_load", nothing))


def test_a_checkpoint_of_the_start_gives_its_parts_to_a_resumed_run_only() -> None:
    _, optimizer = built()
    optimizer.loader(DATA, isolation="none")
    state = stored(optimizer)
    key = state["dpsco"]["partition"]["cut"].numpy().tobytes()
    for other in (built()[1], built()[1]):
        other.load_state_dict(copy.deepcopy(state))
        other.loader(DATA, resume=True, isolation="none")
        assert other._batch.partition is not None
        assert other._batch.partition.cut.tobytes() != key


def test_copies_of_a_sampler_of_parts_draw_anew() -> None:
    sampler = AssignedPartsSampler(DESIGN)
    for twin in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert twin.partition.cut.tobytes() != sampler.partition.cut.tobytes()


class InOrder(AssignedPartsSampler):
    """Draws in the order of the records, and says that it assigns."""

    def _all_parts(self, cut: Any) -> Any:
        yield from [("0", np.arange(8))] * 2
        yield from [
            (f"1/{k}", part)
            for _ in range(2)
            for k, part in enumerate(np.split(np.arange(8, N), T))
        ]


def test_draws_in_parts_that_may_be_known_are_not_amplified() -> None:
    def check() -> None:
        foreign = FullSampler(dp.Full(N))
        foreign.design = DESIGN
        given = AssignedPartsSampler(DESIGN, resume=AssignedPartsSampler(DESIGN).partition)
        for sampler in (InOrder(DESIGN), given, foreign):
            for loader in (
                PrivateLoader(DATA, sampler),
                DataLoader(DATA, batch_sampler=sampler),
            ):
                refused(
                    lambda one=loader: built()[1].bind(one), "by fresh bits", UnknownSamplerError
                )  # type: ignore[misc]

    assert_caught(check, lambda patch: patch.setattr(LogicalBatch, "_require_secret", nothing))


# -- draws ------------------------------------------------------------------------------------------------------------


def check_that_passes_in_a_part_are_independent() -> None:
    """Batches are uniform within the part, and two passes agree as often as chance has it."""
    counts, pairs = np.zeros((2, T)), np.zeros((T, T))
    for k in range(600):
        sampler = AssignedPartsSampler(DESIGN)
        key = np.frombuffer(np.random.default_rng(k).bytes(32), dtype=np.uint8)
        sampler.partition = replace(sampler.partition, cut=key)
        draws = [(draw, indices) for draw, indices in sampler.draws()]
        assert [draw.part for draw, _ in draws] == [
            "0",
            "0",
            *([f"1/{k}" for k in range(T)] * 2),
        ]
        batches = np.full((2, N), -1)
        for at, (_, indices) in enumerate(draws[2:]):
            batches[at // T, indices] = at % T
        assert ((batches[0] >= 0) == (batches[1] >= 0)).all()
        assert sorted(draws[0][1].tolist()) == np.flatnonzero(batches[0] < 0).tolist()
        first, second = batches[:, batches[0] >= 0]
        np.add.at(pairs, (first, second), 1)
        counts += [np.bincount(one, minlength=T) for one in (first, second)]
    assert all(stats.chisquare(row).pvalue > 1e-6 for row in (*counts, pairs.ravel()))


@pytest.mark.slow
def test_each_pass_inside_of_a_part_has_draws_of_its_own() -> None:
    def one_for_all(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            one_pass,
            "KeyedStream",
            lambda key, label: KeyedStream(key, label.partition(" pass")[0]),
        )

    assert_caught(check_that_passes_in_a_part_are_independent, one_for_all)


def test_a_record_less_moves_no_other_to_another_batch_of_a_part() -> None:
    made = []
    for size in (N, N - 1):
        sampler = AssignedPartsSampler(DESIGN, size=size)
        sampler.partition = replace(sampler.partition, cut=np.arange(32, dtype=np.uint8))
        made.append([indices.tolist() for _, indices in sampler.draws()])
    for more, less in zip(*made, strict=True):
        assert [i for i in more if i != N - 1] == less


def test_a_checkpoint_with_draws_in_parts_says_that_it_is_secret() -> None:
    model, optimizer = built()
    train(model, optimizer, 4)
    assert isinstance(optimizer.state_dict(), SecretState)
    train(model, optimizer, resume=True)
    optimizer.finalize()
    state = optimizer.state_dict()
    assert type(state) is dict
    assert "partition" not in state["dpsco"]


# -- crashes ----------------------------------------------------------------------------------------------------------


def crashed(
    path: Path, design: AssignedParts, kept: int, lost: int
) -> tuple[nn.Module, Any, list[Any]]:
    """Returns a run that was resumed after `kept` steps, with so many lost, and the draws of the first one."""
    model, optimizer = built(
        design, accountant=dp.Accountant(adjacency="add_remove", ledger_path=path)
    )
    train(model, optimizer, kept)
    sampler = AssignedPartsSampler(design, resume=replace(optimizer._batch.partition, made=0))
    draws = [indices.tolist() for _, indices in sampler.draws()]
    state = stored(optimizer)
    if lost:
        train(model, optimizer, lost, resume=True)
    optimizer.accountant.close()
    model, again = built(
        design, accountant=dp.Accountant(adjacency="add_remove", ledger_path=path)
    )
    if lost:
        with pytest.warns(UserWarning, match=f"{lost} steps after step {kept} were lost"):
            assert again.resume(state) == lost
    else:
        assert again.resume(state) == 0
    return model, again, draws


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize(
    ("kept", "lost"), [(4, 0), (4, 1), (1, 2), (1, 3), (4, 3), (5, 2), (2, 6)]
)
def test_a_resumed_pass_in_a_part_has_the_same_draws_and_no_second_charge(
    kept: int, lost: int, tmp_path: Path
) -> None:
    model, again, draws = crashed(tmp_path / "ledger", DESIGN, kept, lost)
    made = kept + lost
    assert again.steps == made
    loader = again.loader(DATA, isolation="none", resume=True)
    delivered = [indices.tolist() for _, indices in loader.batch_sampler.draws()]
    assert (
        delivered[:1] == draws[made : made + 1] or made < 2
    )  # all records of a part have no order that was drawn
    assert delivered == draws[made:]
    other = AssignedPartsSampler(
        DESIGN, resume=replace(AssignedPartsSampler(DESIGN).partition, made=made)
    )
    refused(lambda: again.bind(PrivateLoader(DATA, other)), "by fresh bits", UnknownSamplerError)
    train(model, again, resume=True)
    assert (again.steps, parts(again)) == (10, [("0", FULL, 2), ("1", PASS, 2)])


def check_that_lost_steps_are_paid_to_the_end_of_their_pass() -> None:
    """Where no charge is known a lost step pays for what is left of its pass, at whatever step of it that is."""
    expected = {
        0: [T] * 3 + [None] + [2 * T] * 3 + [None],
        2: [None] * 2 + [6] * 3 + [None] + [10] * 3 + [None],
    }
    for optimizer, before in ((whole_run()[1], 0), (built()[1], 2)):
        stops = []
        progress = optimizer._progress
        for made in range(before + 2 * T):
            progress.paid = None
            progress.steps = made
            optimizer.oracle.lose(made, halted=False)
            try:
                optimizer._run.note_lost(
                    progress,
                    optimizer._batch.partition_name,
                    cut=optimizer._batch.partition is not None,
                )
            except ValueError as error:
                raise AssertionError(made) from error
            stops.append(None if progress.paid is None else progress.paid.stop)
        assert stops == expected[before]


def test_a_lost_step_in_a_pass_is_paid_to_its_end_and_no_further() -> None:
    """The mutation takes a lost step for the first one of its pass."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        real = charges.Run._lost_draw
        patch.setattr(charges.Run, "_lost_draw", lambda *args: replace(real(*args), index=0))

    assert_caught(check_that_lost_steps_are_paid_to_the_end_of_their_pass, mutate)


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(
    ("kept", "lost", "stop"),
    [(1, 2, 6), (2, 3, 6), (4, 1, 6), (5, 2, 10), (3, 4, 10), (2, 5, 10), (6, 1, 10)],
)
def test_a_run_that_is_resumed_inside_of_a_pass_has_paid_for_that_pass(
    kept: int, lost: int, stop: int, tmp_path: Path
) -> None:
    _, again, _ = crashed(tmp_path / "ledger", DESIGN, kept, lost)
    name = again._batch.partition_name
    assert again._progress.paid == charges.Paid(
        stop, name, DESIGN.draw_event(FULL, Draw(0, name, "1", stop - 1))
    )


def test_a_lost_pass_that_its_part_does_not_finish_is_paid_to_the_end_of_the_part(
    tmp_path: Path,
) -> None:
    model, again, _ = crashed(tmp_path / "ledger", SHORT, 1, 2)  # the whole first part is made
    assert again._progress.paid is not None
    assert again._progress.paid.stop == 2
    train(model, again, resume=True)
    assert parts(again) == [("0", RandomAllocation(Z, 2), 2), ("1", PASS, 1)]


# -- events that are chosen on the way --------------------------------------------------------------------------------


def test_no_adaptive_event_is_charged_inside_a_pass_of_a_part() -> None:
    ledger = dp.Accountant(adjacency="add_remove")
    model, optimizer = built(accountant=ledger)
    train(model, optimizer, 4)
    chosen = clipped_gaussian(100.0)
    refused(
        lambda: ledger.authorize(chosen, adaptive=True),
        "call finalize() on its optimizer",
        PrivacyError,
    )
    ledger.record(chosen, adaptive=True)  # truth is recorded, and takes the amplification away
    assert ("", "", clipped_gaussian(Z), 1) in list(ledger.ledger.entries())
    optimizer.finalize()
    ledger.authorize(chosen, adaptive=True)


def test_a_report_says_that_batches_of_parts_are_secret() -> None:
    model, optimizer = built()
    train(model, optimizer)
    said = " ".join(str(optimizer.report(DELTA)).split())
    assert (
        "in it each example picked one of 4 batches, secretly, anew in each of 2 passes" in said
    )
    assert "amplified by random allocation" in said


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_batches_of_passes_inside_of_parts_are_filled_up_in_every_adjacency(
    adjacency: Any,
) -> None:
    """By last bits all others would show which batch a record has picked, as in a pass over all records."""
    secret, known = (
        AssignedParts(((dp.Full(6), 1), (Assigned(3, 18, amplification=amplified), 6)), 24)
        for amplified in (True, False)
    )
    assert sizes_are_private(secret, adjacency, "example")
    assert sizes_are_private(known, adjacency, "example") == (adjacency == "add_remove")
