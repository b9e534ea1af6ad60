"""The contract of every private optimizer: rows are the optimizers of `registry.ROWS`, columns the tests below."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

import torch_dpsco as dp
from tests.contract.registry import ROWS, having
from tests.contract.runs import (
    FACTS,
    STEPS,
    N,
    Row,
    assert_no_batches,
    assert_unchanged,
    records,
    same,
    snapshot,
)
from tests.streams import seeded
from torch_dpsco.accounting.events import ADJACENCIES
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import (
    AdjacencyError,
    BudgetExceeded,
    PrivacyError,
    SequenceError,
    UnitError,
    UnknownSamplerError,
)
from torch_dpsco.step.oracle import MeanOracle
from torch_dpsco.step.run import planned_event

# Seeds, momentum and Adam warn about utility in every test here.
pytestmark = pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
DELTA = 1e-3


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> Row:
    return request.param


def epsilon(ledger: Ledger, adjacency: str) -> float | str:
    try:
        return ledger.epsilon(DELTA, adjacency)
    except AdjacencyError:
        return "refused"


def classes_of(oracle: MeanOracle) -> set[type]:
    """Returns the classes of an oracle, and of those that it is made of."""
    parts = [
        part
        for part in (*oracle.members, *vars(oracle).values())
        if isinstance(part, MeanOracle)
    ]
    return {type(oracle)}.union(*(classes_of(part) for part in parts if part is not oracle))


def test_every_public_optimizer_and_oracle_has_a_row() -> None:
    optimizers = [row.make().opt for row in ROWS]
    public = {
        v
        for v in (getattr(dp, name) for name in dp.__all__)
        if isinstance(v, type) and issubclass(v, dp.PrivateOptimizer)
    }
    assert public == {type(opt) for opt in optimizers}
    means = {
        v for v in vars(dp.oracles).values() if isinstance(v, type) and issubclass(v, MeanOracle)
    }
    used = set[type]().union(*(classes_of(opt.oracle) for opt in optimizers))
    assert {oracle for oracle in means if not inspect.isabstract(oracle)} <= used


def test_every_fact_is_lacked_by_some_row_and_held_by_another() -> None:
    for fact in FACTS:
        assert 0 < sum(fact in row.lacks for row in ROWS) < len(ROWS), fact


# -- the mechanism ----------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
def test_the_ledger_after_k_steps_is_the_planned_event_of_k_steps(row: Row) -> None:
    run, each = row.make(), []
    for k, batch in enumerate(run.loader(), start=1):
        run.backward(batch)
        run.opt.step()
        opt = run.opt
        if row.name in ("absolute", "phased"):
            each.append(opt.design.event(opt.oracle.event(), 1))
            planned = Ledger(each)
        elif "alike" in row.lacks:
            planned = Ledger([planned_event(opt.oracle, opt.design, 0, k)])
        else:
            planned = Ledger([opt.design.event(opt.oracle.event(), k)])
        spent = run.opt.accountant.ledger
        assert k == run.opt.steps
        assert len(spent) == run.charged(k)
        assert [epsilon(spent, a) for a in ADJACENCIES] == pytest.approx(
            [epsilon(planned, a) for a in ADJACENCIES]
        )
    assert run.opt.report(DELTA).figures.adjacency == row.adjacency


@pytest.mark.cases(4, 2)
@having("private")
def test_what_is_ahead_of_a_run_is_what_it_spends(row: Row) -> None:
    run = row.make()
    ahead = [epsilon(Ledger([run.opt.ahead()]), a) for a in ADJACENCIES]
    run.train()
    if run.opt.adaptive:
        return  # nobody knows before
    assert [epsilon(run.opt.accountant.ledger, a) for a in ADJACENCIES] == pytest.approx(ahead)


@pytest.mark.cases(3, 1)
def test_the_planned_steps_can_be_made_and_no_more(row: Row) -> None:
    run = row.make().train()
    before = snapshot(run)
    assert_no_batches(run)
    with pytest.raises(SequenceError, match="all 4 planned steps are made: the answer is inst"):
        run.opt.step()
    assert_unchanged(run, before, trained=False)


def test_the_last_planned_step_installs_the_answer(row: Row) -> None:
    run = row.make().train(STEPS - 1)
    assert not run.opt.finalized
    run.train(1, seed=2)
    assert run.opt.finalized
    for p in run.model.parameters():
        assert torch.equal(p, run.opt.rule.answer(p, run.opt.state))
    before = snapshot(run)
    run.opt.finalize()
    with run.opt, run.opt.released():
        assert same(run.parameters(), before[0])
    assert_unchanged(run, before, trained=False)
    assert "Not finalized" not in str(run.opt.report(DELTA))


@pytest.mark.cases(3, 1)
@having("clip")
def test_the_clip_is_the_bound_at_the_public_iterate(row: Row) -> None:
    run = row.make(scale=2.0)
    for batch in run.loader():
        norm = math.sqrt(sum(float(p.double().square().sum()) for p in run.parameters()))
        run.backward(batch)
        run.opt.step()
        assert run.opt.metrics["clip"] == pytest.approx(row.clip(norm, 2.0), rel=1e-3)
        assert run.opt.metrics["clip"] >= row.clip(norm, 2.0) * (1 - 1e-12)


@pytest.mark.cases(4, 2)
def test_metrics_are_public_numbers_and_the_same_before_and_after_a_backward(row: Row) -> None:
    run = row.make()
    for batch in run.loader():
        before = run.opt.metrics
        run.backward(batch)
        for p in run.model.parameters():
            p.grad = torch.full_like(
                p, 1234.5
            )  # what a backward without dp.attach would leave there
        assert run.opt.metrics == before
        run.opt.step()
        public = run.opt.metrics
        assert public["step"] == run.opt.steps
        if "clip" not in row.lacks:
            assert set(public) == {"step", "clip", "noise_std"}
            assert public["clip"] == run.opt.oracle.metrics()["clip"]
            louder = row.louder(run.opt.oracle)
            assert public["noise_std"] == pytest.approx(
                louder * public["clip"] / run.opt.oracle.batch_size, rel=0.01
            )
        assert all(type(value) in (int, float) for value in public.values())


@pytest.mark.cases(6, 3)
@having("empty", "private")
def test_an_empty_batch_is_a_charged_step_of_noise_only(row: Row) -> None:
    for forward in (True, False):
        run, silent = row.make(), row.make(noise=0.0)
        for each in (run, silent):
            for batch in each.loader(size=0, steps=1):
                if forward:
                    each.backward(batch)
                each.opt.step()
            assert each.opt.steps == 1
            assert len(each.opt.accountant) == each.charged(1)
        assert all(bool((p != 0).any()) and bool(p.isfinite().all()) for p in run.parameters())
        assert all(float(p.abs().max()) < 1e-15 for p in silent.parameters())


@pytest.mark.cases(2, 1)
@having("quiet")
def test_physical_chunks_make_the_step_of_the_whole_batch(row: Row) -> None:
    whole = row.make(noise=0.0, model=row.model(torch.float64)).train()
    chunked = row.make(noise=0.0, model=row.model(torch.float64)).train(physical=2)
    for a, b in zip(
        whole.parameters() + whole.answer(), chunked.parameters() + chunked.answer(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert (whole.ledger(), whole.opt.steps) == (chunked.ledger(), chunked.opt.steps)


@pytest.mark.cases(2, 1)
@having("quiet")
def test_accumulated_parts_make_the_step_of_the_whole_batch(row: Row) -> None:
    whole = row.make(noise=0.0).train()
    parted = row.make(noise=0.0)
    parted.opt._noise = seeded(5)
    for features, labels, *_ in parted.loader():
        for part in range(0, len(features), 2):
            parted.backward((features[part : part + 2], labels[part : part + 2]))
            parted.opt.accumulate()
        parted.opt.step()
    for a, b in zip(whole.parameters(), parted.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert whole.ledger() == parted.ledger()


@pytest.mark.cases(5, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_floating_dtype_trains(row: Row, dtype: torch.dtype) -> None:
    run = row.make(model=row.model(dtype)).train()
    assert run.opt.steps == STEPS
    for p, answer in zip(run.parameters(), run.answer(), strict=True):
        assert p.dtype == answer.dtype == dtype
        assert bool(p.isfinite().all())
        assert bool((answer != 0).any())
    averages = [state["average"].dtype for state in run.opt.state.values() if "average" in state]
    assert averages == ([torch.float64] * 2 if run.opt.rule.average != "last" else [])


# -- refused calls ----------------------------------------------------------------------------------------------------


@pytest.mark.cases(2, 1)
@having("endless", "private", "anew")
def test_the_budget_refuses_a_step_and_leaves_everything_as_it_was(row: Row) -> None:
    opt = row.make(steps=None).opt
    target = 1.05 * Ledger([planned_event(opt.oracle, opt.design, 0, 1)]).epsilon(
        DELTA, row.adjacency
    )
    budget = dp.Budget(target, DELTA, adjacency=row.adjacency, unit=row.unit)
    if opt.adaptive:
        target *= 2  # in terms of one order
        budget = replace(budget, epsilon=target, mode="rdp")
    run = row.make(steps=None, accountant=row.accountant(budget))
    for seed in range(20):
        if not run.opt.accountant.admits(planned_event(run.opt.oracle, run.opt.design, 0, 1)):
            break
        run.train(1, seed=seed)
    before = snapshot(run)
    for batch in run.loader(seed=99, steps=1):
        run.backward(batch)
        with pytest.raises(BudgetExceeded, match="past the budget"):
            run.opt.step()
    assert run.opt.steps >= 1
    assert_unchanged(run, before)
    assert run.opt.report().epsilon <= target
    run.opt.finalize()


@pytest.mark.cases(5, 2)
def test_a_second_step_on_one_batch_is_refused(row: Row) -> None:
    run = row.make()
    for batch in run.loader(steps=1):
        run.backward(batch)
        run.opt.step()
        before = snapshot(run)
        run.backward(batch)
        with pytest.raises(SequenceError, match="no batch is outstanding"):
            run.opt.step()
    assert_unchanged(run, before)


@pytest.mark.cases(5, 2)
def test_a_batch_of_a_foreign_loader_is_refused(row: Row) -> None:
    run = row.make()
    before = snapshot(run)
    for batch in DataLoader(records(), batch_size=6):
        run.backward(batch)
        with pytest.raises(SequenceError, match=r"optimizer.loader\(dataset\)"):
            run.opt.step()
    foreign, name = (
        (UnknownSamplerError, "RandomSampler")
        if row.unit == "example"
        else (UnitError, "DataLoader")
    )
    with pytest.raises(foreign, match=name):
        run.opt.bind(DataLoader(records(), batch_size=6, shuffle=True))
    assert_unchanged(run, before)


@pytest.mark.cases(11, 5)
def test_a_loader_of_another_design_is_refused(row: Row) -> None:
    design = row.make().opt.design
    other = next(
        run for r in ROWS if r.unit == row.unit and (run := r.make()).opt.design != design
    )
    with pytest.raises(AdjacencyError, match="this optimizer's design"):
        row.make().opt.bind(other.loader())


@pytest.mark.cases(20, 10)
def test_a_skipped_batch_is_refused(row: Row) -> None:
    run = row.make()
    batches = iter(run.loader())
    next(batches)
    with pytest.raises(SequenceError, match=r"previous batch was not used.*do not accumulate"):
        next(batches)
    assert len(run.opt.accountant) == 0


@pytest.mark.cases(6, 3)
def test_more_rows_than_drawn_are_refused(row: Row) -> None:
    run = row.make()
    before = snapshot(run)
    for features, labels, *_ in run.loader(steps=1):
        run.backward(
            (torch.cat([features, features[:1] + 1]), torch.cat([labels, labels.new_ones(1, 1)]))
        )
        with pytest.raises(SequenceError, match="at most the rows of one draw"):
            run.opt.step()
    assert_unchanged(run, before)


@pytest.mark.cases(5, 2)
def test_a_second_backward_on_one_batch_is_refused(row: Row) -> None:
    run = row.make()
    before = snapshot(run)
    for batch in run.loader(steps=1):
        run.backward(batch)
        run.backward(batch)
        with pytest.raises(SequenceError, match="one backward for each"):
            run.opt.step()
    assert_unchanged(run, before)


@pytest.mark.cases(5, 2)
def test_a_step_without_rows_is_refused_and_the_next_batch_is_usable(row: Row) -> None:
    run = row.make()
    loader = run.loader(steps=2)
    batches = iter(loader)
    first = next(batches)
    with pytest.raises(SequenceError, match=r"gradients are missing.*dp.attach.*no zero_grad"):
        run.opt.step()
    assert len(run.opt.accountant) == 0
    with pytest.raises(SequenceError, match="the draw was given up"):
        next(batches)
    if run.opt.design.one_pass:
        loader = run.going_on()
    again = next(iter(loader))  # a new loop begins with the same draw
    assert all(map(torch.equal, again, first))
    run.backward(again)
    run.opt.step()
    assert (len(run.opt.accountant), run.opt.steps) == (run.charged(1), 1)


@pytest.mark.cases(4, 2)
def test_a_finalized_optimizer_refuses_steps(row: Row) -> None:
    run = row.make().train(2)
    run.opt.finalize()
    before = snapshot(run)
    for batch in run.loader(steps=1):
        run.backward(batch)
        for call in (run.opt.step, run.opt.accumulate):
            with pytest.raises(SequenceError, match="finalize"):
                call()
    run.opt.finalize()
    assert_unchanged(run, before, trained=False)


@pytest.mark.cases(19, 9)
def test_the_public_size_is_that_of_the_data_set_unless_records_may_be_added(row: Row) -> None:
    run = row.make()
    design = run.opt.design
    more = run.given(design.n + 1)
    if row.adjacency == "add_remove" and row.unit == "example":
        assert len(run.opt.loader(*more)) == math.ceil(N / design.batch_size)
        return
    with pytest.raises(UnitError, match=str(design.n)):
        run.opt.loader(*more)


# -- the answer -------------------------------------------------------------------------------------------------------


@pytest.mark.cases(5, 2)
def test_released_shows_the_answer_that_finalize_installs(row: Row) -> None:
    run = row.make().train(2)
    query, answer = run.parameters(), run.answer()
    assert same(run.parameters(), query)
    if run.opt.rule.average != "last":
        assert not same(query, answer)
    with (
        pytest.raises(KeyError),
        run.opt.released(),
    ):  # the query comes back after an error as well
        raise KeyError
    assert same(run.parameters(), query)
    run.opt.finalize()
    assert same(run.parameters(), answer)
    assert same(run.answer(), answer)


@pytest.mark.cases(5, 2)
def test_the_shown_answer_can_be_neither_trained_nor_finalized(row: Row) -> None:
    run = row.make().train(2)
    for batch in run.loader(seed=2, steps=1):
        before = snapshot(run)
        with run.opt.released():
            run.backward(batch)
            for call in (run.opt.step, run.opt.accumulate, run.opt.finalize):
                with pytest.raises(SequenceError, match="released"):
                    call()
        assert same(run.parameters(), before[0])
        assert run.ledger() == before[1]
    assert not run.opt.finalized


@pytest.mark.cases(2, 1)
def test_the_context_finalizes_unless_it_fails(row: Row) -> None:
    run, failed = row.make(), row.make()
    with run.opt as same_optimizer:
        run.train(2)
        answer = run.answer()
    assert same_optimizer is run.opt
    assert run.opt.finalized
    assert same(run.parameters(), answer)
    failed.train(2)
    with pytest.raises(KeyboardInterrupt), failed.opt:
        raise KeyboardInterrupt
    assert not failed.opt.finalized
    failed.train(2, seed=2).opt.finalize()


@pytest.mark.cases(5, 2)
def test_what_the_ledger_relies_on_cannot_be_reassigned(row: Row) -> None:
    run = row.make().train(1)
    before = snapshot(run)
    other = row.make(noise=0.1, accountant=row.accountant()).opt
    for name in (
        "oracle",
        "rule",
        "design",
        "schedule",
        "prox",
        "reg",
        "adjacency",
        "accountant",
        *sorted(run.opt._fixed & vars(run.opt).keys()),
    ):
        with pytest.raises(PrivacyError, match=f"{name} is fixed at construction"):
            setattr(run.opt, name, getattr(other, name))
    for number in {"noise_multiplier", "batch_size"} & set(dir(run.opt.oracle)):
        with pytest.raises(PrivacyError, match=f"{number} is fixed at construction"):
            setattr(run.opt.oracle, number, 1)
    with pytest.raises(SequenceError, match="params are fixed at construction"):
        run.opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    assert_unchanged(run, before, trained=False)
    run.train(1, seed=3)
