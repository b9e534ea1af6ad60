"""A checkpoint that was made before the first loader holds the cut of the records, and goes on with it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.crashes.runs import CASES, Case
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.errors import PrivacyError, SequenceError, UtilityWarning
from torch_dpsco.sampling import PrivateLoader, make_sampler
from torch_dpsco.step.optimizer import RunOptimizer


def _correlated(params: Any, accountant: dp.Accountant) -> Any:
    plan = dp.CorrelatedSGD.plan(
        n=120, clip=1.0, lr=0.1, budget=accountant.budget, batch_size=30, epochs=2
    )
    return dp.CorrelatedSGD(params, plan, accountant=accountant)


NAMES = ("clipped", "accelerated", "holder-allocated", "localized", "localized-user")
ALL = {name: CASES[name] for name in NAMES} | {"correlated": Case(_correlated)}


@contextmanager
def opened(case: Case, folder: Path) -> Iterator[tuple[Any, Any]]:
    """What a script of one's own does at its start: a checkpoint before the first loader, or going on from it."""
    accountant = dp.Accountant(case.budget, ledger_path=folder / "ledger")
    model = dp.attach(case.model(), loss_reduction=case.reduction)
    optimizer = case.build(model.parameters(), accountant)
    path = folder / "checkpoint"
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.resume(state["optimizer"])
    else:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    try:
        yield model, optimizer
    finally:
        accountant.close()


def train(model: Any, optimizer: Any, case: Case, loader: Any, most: int = 1000) -> list[Any]:
    """Makes steps; returns the first inputs of each batch, as delivered."""
    seen = []
    for batch in loader:
        seen.append(batch[0].tolist())
        optimizer.zero_grad()
        case.loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        if len(seen) == most:
            break
    return seen


def events(accountant: dp.Accountant) -> list[Any]:
    """Returns what is charged, without the names of partitions."""
    found = [(part, str(event), k) for _, part, event, k in accountant.ledger.entries()]
    return sorted(found)


def uninterrupted(case: Case) -> list[Any]:
    model = dp.attach(case.model(), loss_reduction=case.reduction)
    optimizer = case.build(model.parameters(), dp.Accountant(case.budget))
    data, users = case.data()
    while optimizer.steps < optimizer.schedule.steps:
        train(model, optimizer, case, optimizer.loader(data, users, isolation="none"))
    return events(optimizer.accountant)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", list(ALL))
def test_a_checkpoint_before_the_first_loader_ends_its_run(
    name: str, resume: bool, tmp_path: Path
) -> None:
    """Under a budget of exactly the run, whether the first loader was asked to resume or not."""
    case = ALL[name]
    data, users = case.data()
    with opened(case, tmp_path) as (model, optimizer):
        loader = optimizer.loader(data, users, resume=resume, isolation="none")
        first = train(model, optimizer, case, loader, most=2)
        run = optimizer.run
    with again(case, tmp_path) as (model, optimizer):  # which loses two steps
        assert (optimizer.run, optimizer.steps) == (run, 2)
        while optimizer.steps < optimizer.schedule.steps:
            loader = optimizer.loader(data, users, resume=True, isolation="none")
            first += train(model, optimizer, case, loader)
        optimizer.finalize()
        accountant = optimizer.accountant
        assert accountant.get_epsilon(case.budget.delta) <= case.budget.epsilon
        assert events(accountant) == uninterrupted(case)
    assert len(first) == optimizer.schedule.steps
    if name in ("clipped", "accelerated"):  # of one pass
        used = [tuple(row) for part in first for row in part]
        assert len(set(used)) == len(used) >= 100


def crashed(case: Case, folder: Path, **loader: Any) -> None:
    data, _ = case.data()
    with opened(case, folder) as (model, optimizer):
        train(model, optimizer, case, optimizer.loader(data, isolation="none", **loader), most=2)


@contextmanager
def again(case: Case, folder: Path) -> Iterator[tuple[Any, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UtilityWarning)  # of the lost steps
        with opened(case, folder) as found:
            yield found


def refused(optimizer: Any, data: TensorDataset, **loader: Any) -> None:
    with pytest.raises(PrivacyError, match="must hold the records of the run"):
        optimizer.loader(data, **loader)


def rolled(data: TensorDataset) -> TensorDataset:
    return TensorDataset(*(t.roll(1, 0) for t in data.tensors))


@pytest.mark.parametrize("name", ["clipped", "accelerated", "correlated", "localized"])
def test_a_cut_that_a_checkpoint_of_the_start_holds_is_of_the_records_of_its_first_loader(
    name: str, tmp_path: Path
) -> None:
    """A record at another place would be used twice; the checkpoint has seen none of them, but the ledger has."""
    case = ALL[name]
    crashed(case, tmp_path)
    with again(case, tmp_path) as (_, optimizer):
        refused(optimizer, rolled(case.data()[0]), resume=True)
    with again(case, tmp_path) as (_, optimizer):
        optimizer.loader(case.data()[0], resume=True)


def test_a_cut_without_steps_is_of_the_records_of_its_first_loader_too(tmp_path: Path) -> None:
    case = ALL["accelerated"]
    data, _ = case.data()
    with opened(case, tmp_path) as (_, optimizer):
        optimizer.loader(data)
    with opened(case, tmp_path) as (_, optimizer):
        refused(optimizer, rolled(data))


@pytest.mark.parametrize("ids", [False, True])
def test_draws_by_ids_go_on_by_ids_from_a_checkpoint_of_the_start(
    ids: bool, tmp_path: Path
) -> None:
    case = ALL["clipped"]
    data, _ = case.data()
    named = {"record_ids": list(range(120))}
    crashed(case, tmp_path, **(named if ids else {}))
    with again(case, tmp_path) as (_, optimizer):
        refused(optimizer, data, resume=True, **({} if ids else named))
    with again(case, tmp_path) as (model, optimizer):
        loader = optimizer.loader(data, resume=True, **(named if ids else {}))
        train(model, optimizer, case, loader)
        assert (optimizer.steps, len(optimizer.accountant)) == (7, 1)


def test_a_run_keeps_the_cut_that_a_checkpoint_holds(tmp_path: Path) -> None:
    case = ALL["clipped"]
    data, _ = case.data()
    with opened(case, tmp_path) as (model, optimizer):
        design = optimizer.design
        held = optimizer.state_dict()["dpsco"]["partition"]["cut"].tolist()
        with pytest.raises(
            SequenceError, match="by the cut that a checkpoint of this run holds"
        ):
            optimizer.bind(PrivateLoader(data, make_sampler(design)))
        for _ in range(2):  # the second loader does not cut anew either
            optimizer.loader(data)
            assert optimizer._batch.partition.cut.tolist() == held
        refused(optimizer, rolled(data))
        train(model, optimizer, case, optimizer.loader(data))
        assert len(optimizer.accountant) == 1


def test_a_loaded_checkpoint_of_the_start_gives_no_secret_draws(tmp_path: Path) -> None:
    """`load_state_dict` starts another run: of a pass that is charged as a whole it has draws of its own."""
    case = ALL["clipped"]
    first = case.build(case.model().parameters(), Accountant(case.budget))
    state = first.state_dict()
    assert state["dpsco"]["confidential"]
    second = case.build(dp.attach(case.model()).parameters(), Accountant(case.budget))
    second.load_state_dict(state)
    second.loader(case.data()[0])
    cut = state["dpsco"]["partition"]["cut"].tolist()
    assert second._batch.partition.cut.tolist() != cut


def test_without_the_mark_of_its_records_a_cut_goes_on_with_others(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Without the mark in the ledger the run goes on with records that were moved."""
    case = ALL["accelerated"]
    monkeypatch.setattr(RunOptimizer, "_tie_records", lambda optimizer: None)
    crashed(case, tmp_path)
    with again(case, tmp_path) as (_, optimizer):
        optimizer.loader(rolled(case.data()[0]), resume=True)


def test_a_pass_that_another_run_has_begun_is_no_early_cut() -> None:
    """A copy of an optimizer that took over a loader on its way draws a pass of its own, unless it resumes."""
    data = TensorDataset(torch.ones(24, 3), torch.ones(24, 1))
    model = dp.attach(torch.nn.Linear(3, 1))
    ledger = dp.Accountant(adjacency="replace_one")

    def built() -> dp.PrivateOptimizer:
        oracle = dp.oracles.Clipped(1.0, 2.0, 6)
        rule, design = dp.rules.SGD(), dp.Disjoint(6, 24)
        return dp.PrivateOptimizer(
            model.parameters(), 0.1, oracle=oracle, rule=rule, design=design, accountant=ledger
        )

    first, second = built(), built()
    loader = first.loader(data)
    for x, y in loader:
        first.zero_grad()
        dp.losses.Logistic()(model(x), y).backward()
        first.step()
        break
    second.bind(loader)
    second.loader(data, resume=True)
    _, third = copy.deepcopy((model, second))
    assert third.loader(data).batch_sampler.steps == 4
    assert third.loader(data, resume=True).batch_sampler.steps == 4
    assert second.loader(data, resume=True).batch_sampler.steps == 3
