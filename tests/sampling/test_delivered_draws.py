"""A step uses the draw that was delivered: a loop cannot leave one out, nor exchange it for another one.

Who looks at batches and takes the one that he likes has no sampling that amplifies: the design's event is then wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from tests.problems import make_optimizer
from torch_dpsco.accounting.designs import Design, Parts
from torch_dpsco.errors import SequenceError, UtilityWarning
from torch_dpsco.sampling import make_sampler
from torch_dpsco.step.oracle import Clipped, Phased

N, STEPS = 40, 30
DATA = TensorDataset(torch.arange(float(N))[:, None])
DESIGNS = [dp.Poisson(4, N), dp.Fixed(4, N), dp.Shuffled(4, N), dp.Full(N)]
PHASES = Parts(((dp.Poisson(4, 30), 8), (dp.Fixed(2, 10), 3)), N)


def run(design: Design) -> tuple[nn.Linear, dp.PrivateOptimizer]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return dp.attach(model, loss_reduction="sum"), make_optimizer(model, design, noise=1.0)


def phased(design: Parts) -> tuple[nn.Linear, dp.PrivateOptimizer]:
    model = dp.attach(nn.Linear(1, 1, bias=False), loss_reduction="sum")
    phases = [(Clipped(1.0, 1.0, part.batch_size), steps) for part, steps in design.parts]
    return model, dp.PrivateOptimizer(
        model.parameters(),
        0.1,
        oracle=Phased(phases),
        rule=dp.rules.SGD(),
        design=design,
        schedule=dp.Schedule(tuple(dp.Phase(steps) for _, steps in design.parts)),
    )


def step(model: nn.Linear, opt: dp.PrivateOptimizer, x: torch.Tensor) -> list[float]:
    """Makes a step from a batch, and returns its records."""
    opt.zero_grad()
    model(x).sum().backward()
    opt.step()
    return x[:, 0].tolist()


def bound(opt: dp.PrivateOptimizer) -> Any:
    """Returns a torch DataLoader over the optimizer's draws."""
    return opt.bind(DataLoader(DATA, batch_sampler=make_sampler(opt.design, steps=STEPS)))


LOADERS: dict[str, Callable[[dp.PrivateOptimizer], Any]] = {
    "loader": lambda opt: opt.loader(DATA, steps=STEPS),
    "in parts": lambda opt: opt.loader(DATA, steps=STEPS, physical_batch_size=3),
    "bound": bound,
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("design", DESIGNS, ids=lambda d: type(d).__name__)
def test_a_loop_cannot_leave_a_draw_out(design: Design, make: Callable[..., Any]) -> None:
    """Batches chosen by their size, or by who is in them, are no batches of the design."""
    _, opt = run(design)
    loader = make(opt)

    def choose() -> None:
        for _ in range(5):
            next(iter(loader))

    with pytest.raises(
        SequenceError, match=r"the previous batch was not used.* optimizer.discard\(\)"
    ):
        choose()
    assert opt.steps == len(opt.accountant) == 0


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("design", DESIGNS, ids=lambda d: type(d).__name__)
def test_a_draw_that_was_given_up_is_the_next_one_again(
    design: Design, make: Callable[..., Any]
) -> None:
    model, opt = run(design)
    loader = make(opt)
    batches = iter(loader)
    seen = next(batches)[0][:, 0].tolist()
    opt.discard()
    with pytest.raises(SequenceError, match="the draw was given up"):
        next(batches)
    for _ in range(3):  # as often as one likes
        assert next(iter(loader))[0][:, 0].tolist() == seen
        opt.discard()
    used: list[list[float]] = []
    for (x,) in loader:
        used.append(step(model, opt, x))
    assert used[0] == seen
    assert opt.steps == len(opt.accountant) == STEPS


@pytest.mark.parametrize("design", DESIGNS, ids=lambda d: type(d).__name__)
def test_a_step_that_fails_does_not_exchange_its_draw(design: Design) -> None:
    model, opt = run(design)
    loader = opt.loader(DATA, steps=STEPS)
    for (x,) in loader:
        if len(x):
            break
        step(model, opt, x)
    made = opt.steps
    with pytest.raises(SequenceError, match="per-sample gradients are missing"):
        opt.step()  # without a backward
    (again,) = next(iter(loader))
    assert again.tolist() == x.tolist()
    step(model, opt, again)
    assert opt.steps == made + 1


@pytest.mark.parametrize("design", DESIGNS, ids=lambda d: type(d).__name__)
def test_no_part_of_a_draw_comes_before_the_one_before_it_is_used(design: Design) -> None:
    """A loop could else look at all parts of a draw, and use those that it likes."""
    model, opt = run(design)
    for k in range(2):
        batches = iter(opt.loader(DATA, physical_batch_size=1))
        for _ in range(k):
            step(model, opt, next(batches)[0])
        next(batches)
        with pytest.raises(SequenceError, match="the previous batch was not used"):
            next(batches)
        opt.discard()


def test_a_draw_given_up_goes_to_the_next_loader_whole_or_in_parts() -> None:
    model, opt = run(dp.Fixed(10, N))
    (x,) = next(iter(opt.loader(DATA)))
    with pytest.raises(SequenceError, match="the previous batch was not used"):
        opt.loader(DATA)
    opt.discard()
    parts = []
    for (part,) in opt.loader(
        DATA, steps=1, physical_batch_size=3
    ):  # it did not fit into memory
        parts += step(model, opt, part)
    assert parts == x[:, 0].tolist()
    assert opt.steps == 1


def test_a_draw_given_up_is_refused_on_a_data_set_of_another_size() -> None:
    model = dp.attach(nn.Linear(1, 1), loss_reduction="sum")
    opt = make_optimizer(model, dp.Poisson(4, N), noise=1.0, adjacency="add_remove")
    next(iter(opt.loader(DATA)))
    opt.discard()
    with pytest.raises(SequenceError, match="a loader of the same data set"):
        opt.loader(TensorDataset(torch.zeros(N - 1, 1)))


def test_of_several_loaders_only_the_newest_delivers() -> None:
    _, opt = run(dp.Poisson(4, N))
    loaders = [opt.loader(DATA) for _ in range(3)]
    for old in loaders[:-1]:
        with pytest.raises(SequenceError, match="replaced by a later one"):
            next(iter(old))
    next(iter(loaders[-1]))
    with pytest.raises(SequenceError, match="the previous batch was not used"):
        opt.bind(loaders[0])
    opt.discard()
    opt.bind(loaders[0])
    next(iter(loaders[0]))


def test_an_iteration_that_was_begun_delivers_nothing_after_its_loader_was_replaced() -> None:
    model, opt = run(dp.Poisson(4, N))
    older = iter(opt.loader(DATA))
    step(model, opt, next(older)[0])
    opt.loader(DATA)
    with pytest.raises(SequenceError, match="replaced by a later one"):
        next(older)


def test_a_loader_whose_draw_was_seen_is_not_bound() -> None:
    _, opt = run(dp.Fixed(4, N))
    loaders = [DataLoader(DATA, batch_sampler=make_sampler(opt.design)) for _ in range(3)]
    for loader in loaders:
        next(iter(loader))
        with pytest.raises(SequenceError, match="must be bound before its first batch is drawn"):
            opt.bind(loader)


def test_a_loader_has_one_optimizer() -> None:
    """A second one could use up the draws that the first one does not like."""
    model, opt = run(dp.Fixed(4, N))
    sink_model, sink = run(dp.Fixed(4, N))
    loader = opt.loader(DATA)
    batches = iter(loader)
    next(batches)
    with pytest.raises(SequenceError, match="must be bound before its first batch is drawn"):
        sink.bind(loader)
    opt.discard()
    with pytest.raises(SequenceError, match="must be bound before its first batch is drawn"):
        sink.bind(loader)
    step(model, opt, next(iter(loader))[0])
    sink.bind(loader)  # between two steps it may change hands
    (x,) = next(iter(loader))
    model(x).sum().backward()
    with pytest.raises(SequenceError, match="no batch is outstanding"):
        opt.step()
    sink.discard()
    step(sink_model, sink, next(iter(loader))[0])


@pytest.mark.parametrize("design", [dp.Disjoint(4, N), PHASES], ids=str)
def test_a_draw_that_was_given_up_is_of_no_other_partition(design: Design) -> None:
    model, opt = phased(design) if isinstance(design, Parts) else run(design)
    batches = iter(opt.loader(DATA))
    for _ in range(2):
        step(model, opt, next(batches)[0])
    seen = next(batches)[0].tolist()
    opt.discard()
    if design is not PHASES:  # which are one partition, with or without resume
        with pytest.raises(SequenceError, match="resume=True"):
            opt.loader(DATA)
    for _ in range(2):
        loader = opt.loader(DATA, resume=True)
        assert next(iter(loader))[0].tolist() == seen
        opt.discard()
    for (x,) in opt.loader(DATA, resume=True):
        step(model, opt, x)
    assert opt.steps == design.steps_per_epoch


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("hands", [1, 2])
def test_a_pass_that_changes_hands_goes_on_with_what_is_left(hands: int, fetched: bool) -> None:
    """The new owner took it for untouched: it used again what was used, or was refused the draw that it gave up."""
    runs = [run(dp.Disjoint(4, N)) for _ in range(2)]
    loader = runs[0][1].loader(DATA)
    batches, records = iter(loader), []
    for k in range(hands):
        records += step(*runs[k % 2], next(batches)[0])
        model, opt = runs[(k + 1) % 2]
        opt.bind(loader)
    if fetched:
        next(batches)
        opt.discard()
    for (x,) in opt.loader(DATA, resume=True):
        records += step(model, opt, x)
    assert sorted(records) == list(range(N))


def test_a_draw_that_was_given_up_does_not_come_in_a_pass_of_another_optimizer() -> None:
    (_, opt), (_, other) = run(dp.Disjoint(4, N)), run(dp.Disjoint(4, N))
    next(iter(opt.loader(DATA)))
    opt.discard()
    other.loader(DATA)
    with pytest.raises(SequenceError, match="was given up and is the next one again"):
        opt.bind(other.loader(DATA, resume=True))


def test_phases_are_begun_and_ended_by_one_optimizer() -> None:
    (model, opt), (other_model, other) = phased(PHASES), phased(PHASES)
    loader = opt.loader(DATA)
    batches = iter(loader)
    step(model, opt, next(batches)[0])
    with pytest.raises(
        SequenceError, match=r"go on with draw 0 of the run \(got one at draw 1\)"
    ):
        other.bind(loader)
    with pytest.raises(
        SequenceError, match=r"go on with draw 1 of the run \(got one at draw 0\)"
    ):
        opt.bind(DataLoader(DATA, batch_sampler=make_sampler(PHASES)))
    step(other_model, other, next(iter(other.loader(DATA, resume=True)))[0])
    step(model, opt, next(batches)[0])


def test_going_back_to_a_checkpoint_does_not_exchange_a_draw() -> None:
    model, opt = run(dp.Poisson(8, N))
    loader = opt.loader(DATA)
    step(model, opt, next(iter(loader))[0])
    states = model.state_dict(), opt.state_dict()
    (x,) = next(iter(loader))
    model.load_state_dict(states[0])
    opt.load_state_dict(states[1])
    (again,) = next(iter(loader))
    assert again.tolist() == x.tolist()


def test_a_pass_goes_on_at_the_place_of_its_checkpoint_only() -> None:
    """The loop that was on its way went on at its own place, and a batch was left out."""
    model, opt = run(dp.Disjoint(4, N))
    batches = iter(opt.loader(DATA))
    records = step(model, opt, next(batches)[0])
    state = opt.state_dict()
    step(model, opt, next(batches)[0])
    opt.load_state_dict(state)
    with pytest.raises(SequenceError, match="this loader was replaced"):
        next(batches)
    for (x,) in opt.loader(DATA, resume=True):
        records += step(model, opt, x)
    assert sorted(records) == list(range(N))


@pytest.mark.slow
def test_fit_goes_on_with_the_draw_that_a_loop_has_left() -> None:
    data = TensorDataset(torch.randn(N, 3), torch.ones(N, 1))
    model = nn.Linear(3, 1)
    optimizer = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            problem=dp.losses.Logistic().problem(bound_x=2.0),
            n=N,
            budget=dp.Budget(1.0, 1e-3),
            batch_size=8,
            epochs=1,
            sampling="poisson",
        ),
    )
    next(iter(optimizer.loader(data)))
    dp.fit(model, optimizer, data, dp.losses.Logistic(), progress=False)
    assert optimizer.steps == len(optimizer.accountant) == 5


@pytest.mark.parametrize("kind", ["private", "torch"])
def test_a_permutation_that_was_begun_keeps_its_data_set(kind: str) -> None:
    """The records in another order: the last batch would hold records that the first ones have used."""
    design = dp.Shuffled(4, 12)
    model, opt = run(design)
    x = torch.randn(12, 1)
    same, other = TensorDataset(x), TensorDataset(x.flip(0))

    def loader(data: TensorDataset) -> Any:
        if kind == "private":
            return opt.loader(data, isolation="none")
        return opt.bind(DataLoader(data, batch_sampler=make_sampler(design)))

    for k, (rows,) in enumerate(loader(same)):
        if k == 2:
            last = rows
            break
        step(model, opt, rows)
    opt.discard()
    with pytest.raises(SequenceError, match="goes on with the same dataset object"):
        loader(other)
    assert opt.steps == 2
    (rows,) = next(iter(loader(same)))
    assert torch.equal(rows, last)
    step(model, opt, rows)
    step(
        model, opt, next(iter(loader(other)))[0]
    )  # another permutation, which is charged by itself


def test_more_rows_than_a_part_of_a_draw_has_are_refused() -> None:
    """Of a draw of 12, whose first part has 4: the fifth would be one of them once more."""
    model, opt = run(dp.Full(12))
    data = TensorDataset(torch.randn(12, 1))
    for (rows,) in opt.loader(data, steps=1, physical_batch_size=4, isolation="none"):
        assert len(rows) == 4
        with pytest.raises(SequenceError, match="at most the rows of one draw"):
            step(model, opt, torch.cat([rows, rows[:1]]))
        break
    assert opt.steps == 0


def test_a_permutation_that_was_begun_by_a_sampler_alone_is_not_gone_on_with() -> None:
    """Nobody knows whether its places are of the same records."""
    design = dp.Shuffled(4, 12)
    model, opt = run(design)
    x = torch.randn(12, 1)
    for k, places in enumerate(opt.bind(make_sampler(design))):
        if k == 2:
            break
        step(model, opt, x[torch.as_tensor(places)])
    opt.discard()
    with pytest.raises(SequenceError, match="goes on with the same dataset object"):
        opt.bind(make_sampler(design))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampling", ["poisson", "fixed", "allocated"])
def test_a_loop_ends_with_the_plan_in_the_middle_of_an_epoch(
    sampling: str, workers: int
) -> None:
    model = dp.attach(nn.Linear(3, 1))
    design: Any = sampling
    if sampling == "allocated":
        design = dp.Assigned(25, 100, passes=2)
    sizes = {} if sampling == "allocated" else {"batch_size": 25, "steps": 6}
    plan = dp.ClippedSGD.plan(
        n=100, clip=1.0, noise_multiplier=1.0, sampling=design, lr=0.1, **sizes
    )
    optimizer = dp.ClippedSGD(model.parameters(), plan)
    data = TensorDataset(torch.randn(100, 3), torch.randn(100, 1))
    loader = optimizer.loader(data, num_workers=workers)
    epochs = []
    for _ in range(2):
        before = optimizer.steps
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        epochs.append(optimizer.steps - before)
    assert (epochs, optimizer.finalized) == ([4, plan.steps - 4], True)
    with pytest.warns(UtilityWarning, match="this loop has no batches"):
        assert list(loader) == []
