"""Passes of secret draws: one charge before the first step of each, and whatever would make it too small is refused.

Each refusal has a mutation that its test catches. Figures of the event are in tests/accounting.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from tests.reference.absolute import HolderAbsolute
from tests.test_mutations import assert_caught, nothing
from torch_dpsco.accounting.designs import Assigned, Draw
from torch_dpsco.accounting.events import (
    ADJACENCIES,
    Gaussian,
    Parallel,
    RandomAllocation,
    Repeat,
    clipped_gaussian,
)
from torch_dpsco.accounting.ledger import Book, Ledger
from torch_dpsco.errors import (
    AdjacencyError,
    BudgetExceeded,
    InfeasibleError,
    PrivacyError,
    SequenceError,
    UnknownSamplerError,
    UtilityWarning,
)
from torch_dpsco.noise import SecretState
from torch_dpsco.problem import Phase, Schedule
from torch_dpsco.sampling import AssignedSampler, FullSampler, PrivateLoader
from torch_dpsco.step import optimizer as saved
from torch_dpsco.step import run as charges
from torch_dpsco.step.batch import LogicalBatch
from torch_dpsco.step.oracle import Clipped, MeanOracle, Phased

N, T, Z = 24, 4, 2.0
DELTA = 1e-4
DATA = TensorDataset(torch.ones(N, 2), torch.ones(N, 1))
PASS = RandomAllocation(Z, T)


def built(
    passes: int = 2,
    *,
    oracle: MeanOracle | None = None,
    steps: int | None = None,
    accountant: dp.Accountant | None = None,
    **design: Any,
) -> tuple[nn.Module, dp.PrivateOptimizer]:
    model = dp.attach(nn.Linear(2, 1, bias=False))
    optimizer = dp.PrivateOptimizer(
        model.parameters(),
        0.1,
        oracle=oracle or Clipped(1.0, Z, N // T),
        rule=dp.rules.SGD(),
        design=Assigned(N // T, N, passes=passes, **design),
        schedule=Schedule((Phase(steps or T * passes),)),
        accountant=dp.Accountant(adjacency="add_remove") if accountant is None else accountant,
    )
    return model, optimizer


def train(
    model: nn.Module, optimizer: dp.PrivateOptimizer, steps: int | None = None, **loader: Any
) -> list[int]:
    """Makes steps; returns the sizes of their batches."""
    sizes = []
    for x, y in optimizer.loader(DATA, steps=steps, isolation="none", **loader):
        sizes.append(len(x))
        one_step(model, optimizer, x, y)
    return sizes


def one_step(model: nn.Module, optimizer: dp.PrivateOptimizer, x: Any, y: Any) -> None:
    optimizer.zero_grad()
    dp.losses.Logistic()(model(x), y, reduction="sum").backward()
    optimizer.step()


def charged(optimizer: dp.PrivateOptimizer) -> list[tuple[Any, int]]:
    return [(event, count) for _, _, event, count in optimizer.accountant.ledger.entries()]


def refused(call: Callable[[], Any], match: str, kind: type[Exception] = SequenceError) -> None:
    error = None
    try:
        call()
    except kind as raised:
        error = raised
    assert match in str(error)


def stored(optimizer: dp.PrivateOptimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


@pytest.fixture(autouse=True)
def sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """All losses here are sums, so that any batch may be empty."""
    attach = dp.attach
    monkeypatch.setattr(dp, "attach", lambda model: attach(model, loss_reduction="sum"))


# -- what is charged --------------------------------------------------------------------------------------------------


def check_that_a_pass_is_charged_first() -> None:
    model, optimizer = built()
    batches = iter(optimizer.loader(DATA, isolation="none"))
    one_step(model, optimizer, *next(batches))
    assert charged(optimizer) == [(PASS, 1)]
    for batch in batches:
        one_step(model, optimizer, *batch)
    assert (optimizer.steps, charged(optimizer)) == (T, [(PASS, 1)])
    optimizer.finalize()
    assert charged(optimizer) == [(PASS, 1)]


def test_a_pass_that_is_stopped_early_was_charged_as_a_whole() -> None:
    """The mutation charges step by step, as much as a prefix would cost."""

    def by_prefix(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Assigned, "covers", lambda self, base, draw: 1)
        patch.setattr(
            Assigned,
            "draw_event",
            lambda self, base, draw: RandomAllocation(base.sigma, draw.index % T + 1),
        )

    assert_caught(check_that_a_pass_is_charged_first, by_prefix)


def test_every_pass_is_charged_and_the_plan_is_the_ledger() -> None:
    model, optimizer = built(passes=3)
    whole = optimizer.ahead()
    assert whole == dp.Assigned(N // T, N, passes=3).event(clipped_gaussian(Z), 3 * T)
    loader = optimizer.loader(DATA, isolation="none")
    assert len(loader) == T
    for done in (1, 2, 3):
        for batch in loader:
            one_step(model, optimizer, *batch)
        assert (optimizer.steps, charged(optimizer)) == (done * T, [(PASS, done)])
    assert Ledger([whole]).digest() == optimizer.accountant.ledger.digest()
    with pytest.warns(UtilityWarning, match="all planned steps are made: this loop has no"):
        assert list(loader) == []


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_pass_costs_less_than_one_release(adjacency: Any) -> None:
    known, amplified = (dp.Accountant(adjacency=adjacency) for _ in range(2))
    known.record(clipped_gaussian(Z))
    amplified.record(PASS)
    assert amplified.get_epsilon(DELTA) < 0.75 * known.get_epsilon(DELTA)


def test_a_budget_that_pays_a_prefix_only_refuses_the_first_step() -> None:
    """z = 1, T = 100: 0.372 for ten steps that were fixed in advance, 0.621 for the pass."""
    budget = dp.Budget(0.5, 1e-5, adjacency="add_remove")
    model = dp.attach(nn.Linear(2, 1))

    def make(accountant: dp.Accountant) -> dp.PrivateOptimizer:
        oracle, design = Clipped(1.0, 1.0, 1), Assigned(1, 100)
        parts: dict[str, Any] = {"oracle": oracle, "rule": dp.rules.SGD(), "design": design}
        return dp.PrivateOptimizer(model.parameters(), 0.1, **parts, accountant=accountant)

    with pytest.raises(InfeasibleError, match=r"epsilon must be >= 0\.621"):
        make(dp.Accountant(budget))
    late = dp.Accountant(adjacency="add_remove")
    optimizer, data = make(late), TensorDataset(torch.ones(100, 2), torch.ones(100, 1))
    late.budget = budget
    for x, y in optimizer.loader(data, isolation="none"):
        with pytest.raises(BudgetExceeded):
            one_step(model, optimizer, x, y)
        break
    assert (optimizer.steps, len(late)) == (0, 0)
    late.budget = dp.Budget(0.63, 1e-5, adjacency="add_remove")
    for x, y in optimizer.loader(data, isolation="none", resume=True):
        one_step(model, optimizer, x, y)
        break
    assert (optimizer.steps, len(late)) == (1, 1)


@pytest.mark.parametrize(
    "base",
    [
        Gaussian(2.0, {"replace_one": 2.0}),
        Gaussian(2.0, {"add_remove": 1.0, "zero_out": 1.0, "replace_one": 1.0}),
        Gaussian(2.0, {"add_remove": 1.0, "zero_out": 1.0, "replace_one": 2.0}, failure=1e-9),
        clipped_gaussian(0.0),
        dp.accounting.events.Pure(1.0),
    ],
    ids=str,
)
def test_only_clipped_gaussian_sums_are_amplified(base: Any) -> None:
    design, draw = Assigned(6, 24, passes=2), Draw(3, "a", "1", 5)
    assert design.amplifies(clipped_gaussian(2.0))
    assert [design.covers(clipped_gaussian(2.0), Draw(3, "a", "", k)) for k in range(8)] == [
        4,
        3,
        2,
        1,
        4,
        3,
        2,
        1,
    ]
    assert design.between(3, 5, [clipped_gaussian(2.0)]) == Repeat(
        PASS, 2
    )  # the end of a pass, and the next one
    assert design.between(4, 8, [clipped_gaussian(2.0)]) == Repeat(PASS, 1)
    assert not design.amplifies(base)
    assert design.covers(base, draw) == 1
    assert design.draw_event(base, draw) == Parallel(
        {"1": (base,)}, "a/1", "keyed", key_public=True
    )
    assert design.event(base, 5).n == 2  # type: ignore[union-attr]


def test_a_charge_that_is_asked_for_again_pays_for_as_much() -> None:
    oracle, design = Clipped(1.0, Z, N // T), Assigned(N // T, N)
    for draw in (Draw(0), Draw(0, "a", "0")):
        assert [oracle.charge(design, draw).covers for _ in range(2)] == [T, T]


def test_without_amplification_every_pass_is_a_partition_of_its_own() -> None:
    model, optimizer = built(amplification=False)
    whole = optimizer.ahead()
    train(model, optimizer, 2 * T)
    assert {partition for partition, _, _, _ in optimizer.accountant.ledger.entries()} == {
        optimizer._batch.partition_name + end for end in ("", "/1")
    }
    ledger = dp.Accountant(adjacency="add_remove")
    ledger.record(whole)
    two = dp.Accountant(adjacency="add_remove")
    two.record(clipped_gaussian(Z), 2)
    epsilons = [one.get_epsilon(DELTA) for one in (ledger, optimizer.accountant, two)]
    assert epsilons == [epsilons[0]] * 3


# -- what would make a charge too small -------------------------------------------------------------------------------


class Fading(Clipped):
    """Has less noise from its second release on, and does not say that it depends on anything."""

    _made = 0

    def event(self) -> Any:
        return clipped_gaussian(Z if self._made == 0 else Z / 2)

    def release(self, generator: Any) -> Any:
        self._made += 1
        return super().release(generator)


def check_that_less_noise_is_refused() -> None:
    model, optimizer = built(oracle=Fading(1.0, Z, N // T))
    refused(
        lambda: train(model, optimizer), "steps must be those that their pass was charged for"
    )
    assert optimizer.steps == 1


def test_a_step_with_less_noise_than_its_pass_was_charged_for_is_refused() -> None:
    assert_caught(
        check_that_less_noise_is_refused,
        lambda patch: patch.setattr(charges.Paid, "require", nothing),
    )


def test_a_pass_whose_steps_are_not_alike_is_refused() -> None:
    """Phases of different noise, noise that follows the iterate, and a charge that pays for more than a pass."""

    def check() -> None:
        phases = [(Clipped(1.0, Z, N // T), 2), (Clipped(1.0, 2 * Z, N // T), 2)]
        problem = dp.losses.Logistic().problem(bound_x=2.0)
        absolute = HolderAbsolute(problem, 0.5, N // T, radius=1.0)
        for oracle in (Phased(phases), absolute, Longer(1.0, Z, N // T)):
            refused(
                lambda oracle=oracle: built(oracle=oracle), "amplification=False", AdjacencyError
            )  # type: ignore[misc]

    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(charges.Run, "in_passes", True)

    assert_caught(check, mutate)


class Longer(Clipped):
    def charge(self, design: Any, draw: Draw) -> Any:
        return super().charge(design, draw)._replace(covers=2 * T)


def check_that_draws_serve_once() -> None:
    """Of two optimizers with one ledger, which got the same secret by a trick, only one makes each step."""
    ledger = dp.Accountant(adjacency="add_remove")
    (model, first), (other, second) = built(accountant=ledger), built(accountant=ledger)
    loaders = [PrivateLoader(DATA, AssignedSampler(first.design)) for _ in range(2)]
    loaders[1].batch_sampler.partition = loaders[0].batch_sampler.partition  # type: ignore[attr-defined]
    for optimizer, loader in zip((first, second), loaders, strict=True):
        optimizer.bind(loader)
    one_step(model, first, *next(iter(loaders[0])))
    refused(
        lambda: one_step(other, second, *next(iter(loaders[1]))),
        "may have been released already",
    )
    assert charged(first) == [(PASS, 1)]


def test_the_draws_of_a_pass_serve_once() -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(charges.Run, "_require_fresh", nothing)

    assert_caught(check_that_draws_serve_once, mutate)


def check_that_a_pass_does_not_begin_again() -> None:
    model, optimizer = built()
    train(model, optimizer, 2)
    refused(
        lambda: optimizer.bind(PrivateLoader(DATA, AssignedSampler(optimizer.design))),
        "go on with draw 2",
    )
    cut = optimizer._batch.partition.cut.tolist()
    refused(lambda: train(model, optimizer, 2), "None")  # a loader without resume goes on too
    assert optimizer._batch.partition.cut.tolist() == cut
    assert (optimizer.steps, charged(optimizer)) == (4, [(PASS, 1)])


def begun_again(run: Any, batch: Any, made: int, *, resume: bool) -> Any:
    """`loading.continued` without its checks."""
    return batch.sealed() if resume else None


def test_a_pass_is_not_begun_again() -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(saved, "continued", begun_again)

    assert_caught(check_that_a_pass_does_not_begin_again, mutate)


def test_a_copy_is_refused_until_the_answer_is_released() -> None:
    def check() -> None:
        model, optimizer = built()
        train(model, optimizer, 2)
        for copied in (copy.deepcopy, pickle.dumps):
            refused(lambda copied=copied: copied((model, optimizer)), "must not be copied")  # type: ignore[misc]
        optimizer.finalize()
        copy.deepcopy((model, optimizer))

    assert_caught(check, lambda patch: patch.setattr(saved, "refuse_copy", nothing))


def test_a_pass_goes_on_in_one_place_only() -> None:
    def check() -> None:
        model, optimizer = built()
        train(model, optimizer, 2)
        refused(lambda: built()[1].load_state_dict(stored(optimizer)), "must be continued once")

    assert_caught(check, lambda patch: patch.setattr(saved, "refuse_load", nothing))


def test_a_checkpoint_of_the_start_gives_its_draws_to_a_resumed_run_only() -> None:
    _, optimizer = built()
    optimizer.loader(DATA, isolation="none")
    state = stored(optimizer)
    key = state["dpsco"]["partition"]["cut"].numpy().tobytes()
    for other in (built()[1], built()[1]):
        other.load_state_dict(copy.deepcopy(state))
        assert other._batch.partition is None
        other.loader(DATA, resume=True, isolation="none")
        assert other._batch.partition is not None
        assert other._batch.partition.cut.tobytes() != key


def test_copies_of_an_assigned_sampler_draw_anew() -> None:
    sampler = AssignedSampler(Assigned(5, N, passes=2))
    for twin in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert twin.partition.cut.tobytes() != sampler.partition.cut.tobytes()


def test_a_sampler_or_loader_that_is_stored_does_not_tell_its_draws() -> None:
    sampler = AssignedSampler(Assigned(5, N, passes=2))
    for stored_one in (sampler, PrivateLoader(DATA, sampler)):
        assert sampler.partition.cut.tobytes() not in pickle.dumps(stored_one)


def test_a_pass_by_the_accountant_of_a_part_is_an_event_of_the_part() -> None:
    accountant = dp.Accountant(adjacency="add_remove")
    part = accountant.part("a", partition="mine", kind="keyed", key_public=True)
    model, optimizer = built(accountant=part)
    train(model, optimizer, T)
    assert list(accountant.ledger.entries()) == [("mine", "a", PASS, 1)]


# -- draws that may be known ------------------------------------------------------------------------------------------


class InOrder(AssignedSampler):
    """Draws in the order of the records, and says that it assigns."""

    def draws(self) -> Any:
        for k, part in enumerate(np.split(np.arange(N), T)):
            yield Draw(len(part), "mine", str(k), k), part


def test_draws_that_may_be_known_are_not_amplified() -> None:
    def check() -> None:
        design = Assigned(N // T, N, passes=2)
        known = AssignedSampler(design).partition
        foreign = FullSampler(dp.Full(N))
        foreign.design = design
        for sampler in (InOrder(design), AssignedSampler(design, resume=known), foreign):
            for loader in (
                PrivateLoader(DATA, sampler),
                DataLoader(DATA, batch_sampler=sampler),
            ):
                refused(
                    lambda one=loader: built()[1].bind(one), "by fresh bits", UnknownSamplerError
                )  # type: ignore[misc]

    assert_caught(check, lambda patch: patch.setattr(LogicalBatch, "_require_secret", nothing))


def test_one_sampler_of_passes_delivers_one_data_set() -> None:
    """The records of a second one stand at other places, so that one of them would be in two batches of a pass."""

    def check() -> None:
        _, optimizer = built()
        sampler = AssignedSampler(optimizer.design)
        optimizer.bind(DataLoader(DATA, batch_sampler=sampler))
        optimizer.bind(DataLoader(DATA, batch_sampler=sampler))
        other = TensorDataset(*(part.flip(0) for part in DATA.tensors))
        refused(
            lambda: optimizer.bind(DataLoader(other, batch_sampler=sampler)),
            "must be the one that it draws from",
        )

    assert_caught(check, lambda patch: patch.setattr(LogicalBatch, "_require_own_pass", nothing))


def test_no_other_design_is_amplified() -> None:
    """Batches of fixed sizes have no such bound (docs/proofs/allocation.md#not-covered)."""
    base = clipped_gaussian(Z)
    for design in (
        dp.Disjoint(6, N),
        dp.Shuffled(6, N),
        dp.Fixed(6, N),
        dp.Full(N),
        dp.Cyclic(6, N, passes=2),
    ):
        assert "RandomAllocation" not in str(design.event(base, 2)) + str(
            design.draw_event(base, Draw(6, "p", "0"))
        )
        assert design.covers(base, Draw(6, "p", "0")) == 1
        if not isinstance(design, dp.Full):
            with pytest.raises(AdjacencyError):
                design.draw_event(PASS, Draw(6, "p", "0"))


# -- what must not show -----------------------------------------------------------------------------------------------


def public(n: int, caplog: pytest.LogCaptureFixture) -> str:
    """Returns all that a run on n records shows, but for the answer and random names; draws and noise are fixed."""
    caplog.clear()
    data = TensorDataset(torch.ones(n, 2), torch.ones(n, 1))
    model, optimizer = built(passes=1)
    sampler = AssignedSampler(optimizer.design, size=n)
    sampler.partition = replace(sampler.partition, cut=np.arange(32, dtype=np.uint8))
    seen: list[Any] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loader = optimizer.loader(data)  # for its slots
        sampler.log = loader.batch_sampler.log
        loader.batch_sampler.partition = sampler.partition  # type: ignore[attr-defined]
        seen += [repr(loader.batch_sampler.partition), len(loader)]  # type: ignore[attr-defined]
        for x, y in loader:
            seen.append(x.shape)
            one_step(model, optimizer, x, y)
            seen += [optimizer.metrics, repr(optimizer)]
        refused(optimizer.step, "all 4 planned steps are made")
        seen += [str(error.message) for error in warned]
        assert list(loader) == []
        seen += [str(error.message) for error in warned]
        optimizer.finalize()
        report = optimizer.report(DELTA)
        ledger = optimizer.accountant.ledger.to_json()
        facts = {
            key: value for key, value in json.loads(report.json()).items() if "id" not in key
        }
        seen += [ledger, facts, str(optimizer.ahead()), optimizer.settings()]
    return repr(seen) + caplog.text


def test_no_size_of_a_batch_and_no_draw_shows_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    """Of two data sets that differ in a record, everything public is equal, although batches differ in size."""
    caplog.set_level(logging.DEBUG)
    first, second = public(N, caplog), public(N - 1, caplog)
    assert first == second
    assert "RandomAllocation" in first


def test_a_checkpoint_with_draws_says_that_it_is_secret() -> None:
    model, optimizer = built()
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    assert (
        repr(optimizer._batch.partition) == "Partition(made=2)"
    )  # not the key of the draws, nor how many records
    assert isinstance(state, SecretState)
    assert isinstance(state["dpsco"], SecretState)
    assert repr(state).startswith("SecretState(CONFIDENTIAL")
    train(model, optimizer, 2 * T - 2, resume=True)
    optimizer.finalize()
    state = optimizer.state_dict()
    assert type(state) is dict
    assert "partition" not in state["dpsco"]


# -- sums and steps ---------------------------------------------------------------------------------------------------


def test_the_divisor_is_public_and_a_record_moves_one_release_of_a_pass() -> None:
    """Without noise, one record less moves the release of its own batch alone, by at most clip / batch size."""

    def releases(n: int) -> list[torch.Tensor]:
        sampler = AssignedSampler(Assigned(N // T, N, passes=2), size=n)
        sampler.partition = replace(sampler.partition, cut=np.arange(32, dtype=np.uint8))
        made = []
        for _, indices in sampler.draws():
            oracle = Clipped(1.0, 0.0, N // T)
            oracle.open([torch.zeros(2)])
            rows = torch.linspace(0.5, 2.0, N)[indices, None].repeat(1, 2)
            oracle.observe(dp.rows.GradBatch([dp.rows.DenseBlock(rows)]))
            made.append(oracle.release(torch.Generator()).mean[0].double())
        return made

    moves = [float((a - b).norm()) for a, b in zip(releases(N), releases(N - 1), strict=True)]
    assert sum(move > 1e-6 for move in moves) == 1
    assert max(moves) <= T / N + 1e-6


def test_an_empty_batch_is_a_step_of_noise_under_the_charge_of_its_pass() -> None:
    model = dp.attach(nn.Linear(2, 1, bias=False))
    parts: dict[str, Any] = {
        "oracle": Clipped(1.0, Z, 1),
        "rule": dp.rules.SGD(),
        "design": Assigned(1, 3),
    }
    optimizer = dp.PrivateOptimizer(
        model.parameters(),
        0.1,
        **parts,
        accountant=dp.Accountant(adjacency="add_remove"),
        schedule=Schedule((Phase(3),)),
    )
    nobody = TensorDataset(torch.ones(0, 2), torch.ones(0, 1))
    before = model.weight.detach().clone()
    for k, _ in enumerate(optimizer.loader(nobody, isolation="none"), 1):
        optimizer.zero_grad()
        optimizer.step()
        assert optimizer.steps == k
        assert not torch.equal(model.weight, before)
        before = model.weight.detach().clone()
    assert charged(optimizer) == [(RandomAllocation(Z, 3), 1)]


# -- crashes ----------------------------------------------------------------------------------------------------------


def test_a_resumed_pass_has_the_same_draws_and_no_second_charge(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    model, optimizer = built(accountant=dp.Accountant(adjacency="add_remove", ledger_path=path))
    sampler = optimizer.loader(DATA, isolation="none").batch_sampler
    expected = [
        indices.tolist()
        for _, indices in AssignedSampler(sampler.design, resume=sampler.partition).draws()
    ]
    state = stored(optimizer)
    train(model, optimizer, 2, resume=True)
    state = stored(optimizer)
    train(model, optimizer, 1, resume=True)  # is lost
    optimizer.accountant.close()

    ledger = dp.Accountant(adjacency="add_remove", ledger_path=path)
    model, again = built(accountant=ledger)
    with pytest.warns(UserWarning, match="1 steps after step 2 were lost"):
        assert again.resume(copy.deepcopy(state)) == 1
    assert (again.steps, charged(again)) == (3, [(PASS, 1)])
    loader = again.loader(DATA, isolation="none", resume=True)
    assert next(loader.batch_sampler.draws())[1].tolist() == expected[3]
    other = AssignedSampler(
        again.design, resume=replace(AssignedSampler(again.design).partition, made=3)
    )
    refused(lambda: again.bind(PrivateLoader(DATA, other)), "by fresh bits", UnknownSamplerError)
    train(model, again, T + 1, resume=True)
    assert (again.steps, charged(again)) == (2 * T, [(PASS, 2)])


def test_a_crash_between_passes_goes_on_with_the_pass_that_was_begun(tmp_path: Path) -> None:
    """The checkpoint is of the first pass, and the crash in the second one, of which two steps are lost."""
    path = tmp_path / "ledger"
    model, optimizer = built(
        accountant=dp.Accountant(adjacency="add_remove", ledger_path=path), passes=3
    )
    train(model, optimizer, 1)
    state = stored(optimizer)
    train(model, optimizer, T + 1, resume=True)
    optimizer.accountant.close()
    model, again = built(
        accountant=dp.Accountant(adjacency="add_remove", ledger_path=path), passes=3
    )
    with pytest.warns(UserWarning, match="5 steps"):
        again.resume(state)
    assert again._progress.paid == charges.Paid(2 * T, again._batch.partition_name, PASS)
    train(model, again, 2 * T - 2, resume=True)
    assert (again.steps, charged(again)) == (3 * T, [(PASS, 3)])


# -- events that are chosen on the way --------------------------------------------------------------------------------


def check_that_nothing_adaptive_is_charged_inside() -> None:
    ledger = dp.Accountant(adjacency="add_remove")
    model, optimizer = built(accountant=ledger)
    train(model, optimizer, 2)
    chosen = clipped_gaussian(100.0)
    refused(
        lambda: ledger.authorize(chosen, adaptive=True),
        "call finalize() on its optimizer",
        PrivacyError,
    )
    ledger.authorize(chosen)  # fixed before
    optimizer.finalize()
    ledger.authorize(chosen, adaptive=True)
    assert charged(optimizer) == [(PASS, 1), (chosen, 2)]


def test_what_has_happened_inside_a_pass_takes_its_amplification_away() -> None:
    """Truth is recorded; then nothing is proved but that the place of a record may be known."""
    ledger = dp.Accountant(adjacency="add_remove")
    model, optimizer = built(accountant=ledger)
    train(model, optimizer, 2)
    chosen = clipped_gaussian(100.0)
    ledger.record(chosen, adaptive=True)
    assert charged(optimizer) == [(PASS, 1), (chosen, 1), (clipped_gaussian(Z), 1)]
    optimizer.finalize()
    ledger.record(chosen, adaptive=True)
    assert charged(optimizer)[1:] == [(chosen, 2), (clipped_gaussian(Z), 1)]


def test_no_adaptive_event_is_charged_inside_a_pass() -> None:
    assert_caught(
        check_that_nothing_adaptive_is_charged_inside,
        lambda patch: patch.setattr(Book, "in_pass", lambda self, own: False),
    )


@pytest.mark.weekly
def test_a_pass_that_fits_but_not_by_the_mode_of_the_budget_is_refused_for_that() -> None:
    budget = dp.Budget(2.0, DELTA, mode="rdp")
    given: dict[str, Any] = {"n": 200, "batch_size": 20, "epochs": 2, "sampling": "allocated"}
    plan = dp.HolderSGD.plan(
        problem=dp.losses.Logistic().problem(bound_x=2.0), budget=budget, **given
    )
    with pytest.raises(
        InfeasibleError, match=r"mode must leave room for one step with this noise \(got 'rdp'"
    ):
        dp.HolderSGD(nn.Linear(2, 1).parameters(), plan)


def test_an_adaptive_budget_takes_passes_one_after_another() -> None:
    budget = dp.Budget(8.0, DELTA, adjacency="add_remove", mode="rdp")
    ledger = dp.Accountant(budget)
    model, optimizer = built(accountant=ledger)
    train(model, optimizer, T)
    with pytest.raises(PrivacyError, match="while a pass of random allocation is open"):
        ledger.authorize(clipped_gaussian(100.0))
    train(model, optimizer, T, resume=True)
    optimizer.finalize()
    ledger.authorize(clipped_gaussian(100.0))
    assert charged(optimizer)[0] == (PASS, 2)


# -- plans and loops --------------------------------------------------------------------------------------------------


def words(text: object) -> str:
    return " ".join(str(text).split())


@pytest.mark.slow
def test_a_plan_of_passes_says_what_its_run_charges() -> None:
    given: dict[str, Any] = {
        "n": N,
        "noise_multiplier": Z,
        "sampling": "allocated",
        "batch_size": 6,
        "epochs": 2,
    }
    problem = dp.losses.Logistic().problem(bound_x=2.0)
    holder = dp.HolderSGD.plan(problem=problem, **given)
    for plan in (holder, dp.ClippedSGD.plan(problem=problem, clip=1.0, lr=0.1, **given)):
        assert (plan.design, plan.steps) == (Assigned(6, N, passes=2), 8)
        assert plan.event() == Repeat(PASS, 2)
        assert type(plan).from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        assert (
            "random allocation: each example in one of 4 batches of each pass, of 6 examples"
            in words(list(plan.lines()))
        )
    optimizer = dp.HolderSGD(dp.attach(nn.Linear(2, 1)).parameters(), replace(holder, steps=8))
    said = words(optimizer.report(DELTA))
    assert (
        "picked one of 4 batches, secretly; amplified by random allocation; batch sizes not released"
        in said
    )


@pytest.mark.weekly
@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_plans_of_passes_spend_their_budget(passes: int) -> None:
    budget = dp.Budget(2.0, 1e-3, adjacency="replace_one" if passes == 2 else "add_remove")
    given: dict[str, Any] = {
        "n": N,
        "budget": budget,
        "sampling": "allocated",
        "batch_size": 6,
        "epochs": passes,
    }
    plan = dp.HolderSGD.plan(problem=dp.losses.Logistic().problem(bound_x=2.0), **given)
    assert 0.99 * budget.epsilon < plan.epsilon() <= budget.epsilon
    model = dp.attach(nn.Linear(2, 1))
    optimizer = dp.HolderSGD(model.parameters(), plan)
    for x, y in optimizer.loader(DATA, steps=4 * passes, isolation="none"):
        one_step(model, optimizer, x, y)
    optimizer.finalize()
    assert optimizer.accountant.get_epsilon(1e-3) == plan.epsilon()


def test_steps_of_a_plan_make_the_passes_that_they_need() -> None:
    given: dict[str, Any] = {
        "problem": dp.losses.Logistic().problem(bound_x=2.0),
        "n": N,
        "batch_size": 6,
    }
    plan = dp.HolderSGD.plan(noise_multiplier=Z, steps=9, sampling="allocated", **given)
    assert (plan.design, plan.steps, plan.event()) == (
        Assigned(6, N, passes=3),
        9,
        Repeat(PASS, 3),
    )
    with pytest.raises(
        ValueError, match="epochs or steps must be given for sampling='allocated'"
    ):
        dp.HolderSGD.plan(noise_multiplier=Z, sampling="allocated", **given)


@pytest.mark.slow
def test_plans_print_whole_passes_and_say_where_nothing_is_gained() -> None:
    """16 batches of 62.5 records, with a divisor of 64, are a pass; 2.5 passes are charged, and said, as they are."""
    given: dict[str, Any] = {
        "problem": dp.losses.Logistic().problem(bound_x=2.0),
        "n": 1000,
        "noise_multiplier": Z,
    }
    for epochs, said in ((3, "48 steps, 3 passes"), (2.5, "40 steps, 2.5 passes")):
        plan = dp.HolderSGD.plan(**given, sampling="allocated", batch_size=64, epochs=epochs)
        assert said in words(plan)
        assert plan.event() == Repeat(RandomAllocation(Z, 16), 3)
    plain = dp.HolderSGD.plan(**given, sampling=Assigned(64, 1000, amplification=False))
    assert "each example in one of 16 batches, of about 64; nothing is gained by it" in words(
        plain
    )
    with pytest.raises(
        ValueError, match=r"\(got 48\): for more passes take sampling='allocated' or 'poisson'"
    ):
        dp.HolderSGD.plan(**given, sampling="assigned", batch_size=64, epochs=3)


@pytest.mark.weekly
def test_users_who_are_allocated_by_default_make_whole_passes() -> None:
    """A pass that is begun costs as much as a whole one."""
    budget = dp.Budget(2.0, 1e-4, adjacency="add_remove", unit="user")
    plan = dp.UserClippedSGD.plan(
        n=200, budget=budget, dim=3, sampling="allocated", batch_size=20
    )
    assert isinstance(plan.design, Assigned)
    assert plan.steps == plan.design.steps_per_epoch


def private(epochs: int, model: nn.Module, loader: DataLoader[Any], **more: Any) -> Any:
    return dp.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loader,
        problem=dp.losses.Logistic().problem(bound_x=2.0),
        budget=dp.Budget(2.0, 1e-3, adjacency="zero_out"),
        n=N,
        epochs=epochs,
        **more,
    )


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("epochs", "word"),
    [(1, "assigned"), (1, "allocated"), pytest.param(3, "allocated", marks=pytest.mark.slow)],
)
def test_a_private_loop_over_passes_sees_each_record_once_in_each(
    epochs: int, word: str
) -> None:
    numbered = TensorDataset(torch.ones(N, 2), torch.arange(1, N + 1)[:, None].double())
    model, optimizer, loader = private(
        epochs, nn.Linear(2, 1), DataLoader(numbered, batch_size=6, shuffle=True), sampling=word
    )
    passes = []
    for _ in range(epochs):
        seen = []
        for x, number in loader:
            seen.append(tuple(number[number > 0].int().tolist()))  # without the filling
            optimizer.zero_grad()
            if len(x):
                dp.losses.Logistic()(model(x), torch.ones(len(x), 1)).backward()
            optimizer.step()
        assert sorted(i for batch in seen for i in batch) == list(range(1, N + 1))
        passes.append(tuple(seen))
    assert len(set(passes)) == epochs
    optimizer.finalize()
    assert optimizer.report().figures.epsilon <= 2.0


@pytest.mark.weekly
def test_a_private_loop_over_shuffled_passes_pays_for_them_without_amplification() -> None:
    loader = DataLoader(DATA, batch_size=6, shuffle=True)
    plans = {
        word: private(1, nn.Linear(2, 1), loader, sampling=word)[1].plan
        for word in ("allocated", "shuffled")
    }
    assert plans["shuffled"].noise_multiplier > 1.2 * plans["allocated"].noise_multiplier
    with pytest.raises(ValueError, match="for more passes take sampling='allocated'"):
        private(3, nn.Linear(2, 1), loader, sampling="assigned")


def test_users_are_in_one_batch_of_a_pass_with_all_their_rows() -> None:
    plan = dp.UserClippedSGD.plan(
        n=N,
        clip=1.0,
        lr=0.1,
        noise_multiplier=Z,
        sampling="allocated",
        batch_size=6,
        epochs=2,
        adjacency="add_remove",
    )
    model = dp.attach(nn.Linear(2, 1))
    optimizer = dp.UserClippedSGD(model.parameters(), plan)
    loader = optimizer.loader(
        TensorDataset(torch.ones(60, 2), torch.ones(60, 1)), torch.arange(60) % N
    )
    batches: list[dict[int, int]] = []
    for _ in range(2):
        last = optimizer.steps
        for x, y, users in loader:
            if optimizer.steps == last:
                batches.append({})
                last += 1
            for user in users[users >= 0].tolist():
                batches[-1][user] = batches[-1].get(user, 0) + 1
            one_step(model, optimizer, x, y)
    for first in (0, T):
        seen = batches[first : first + T]
        assert sum(map(len, seen)) == N
        assert {user: rows for batch in seen for user, rows in batch.items()} == {
            k: 2 + (k < 12) for k in range(N)
        }
    assert charged(optimizer) == [(PASS, 2)]
