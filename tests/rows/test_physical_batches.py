"""Draws in parts: by our own loader, and Opacus' BatchMemoryManager, which tells the optimizer by flags."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torch_dpsco as dp
from tests.problems import make_optimizer
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.errors import SequenceError
from torch_dpsco.sampling import make_sampler

N = 7
DESIGNS = [dp.Full(N), dp.Fixed(5, N), dp.Poisson(4, N), dp.Shuffled(3, N)]


class Tuples(Dataset):
    """Records that have to be collated one by one."""

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (torch.eye(N)[index],)

    def __len__(self) -> int:
        return N


def scores() -> nn.Linear:
    model = nn.Linear(N, 1, bias=False)
    nn.init.zeros_(model.weight)
    return dp.attach(model, loss_reduction="sum")


def manager(loader, optimizer, size: int = 2) -> BatchMemoryManager:
    return BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=size, optimizer=optimizer
    )


def physical(loader, optimizer, size: int = 2):
    return nullcontext(loader.in_parts(size))


def train(model: nn.Linear, optimizer, batches) -> list[Tensor]:
    """Returns the released means; coordinate i is how often record i is in the release, over the batch size."""
    released: list[Tensor] = []
    for (x,) in batches:
        assert len(x) <= 2
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if optimizer.steps > len(released):
            released.append(model.weight.grad[0] * optimizer.design.batch_size)
    return released


@pytest.mark.cases(5, 2)
@pytest.mark.parametrize("wrap", [manager, physical])
@pytest.mark.parametrize("design", DESIGNS, ids=str)
@pytest.mark.parametrize(
    "dataset", [TensorDataset(torch.eye(N)), Tuples()], ids=["memory", "collated"]
)
def test_one_release_per_draw_holds_each_record_of_it_once(wrap, design, dataset, monkeypatch):
    model = scores()
    optimizer = make_optimizer(model, design, clip=10.0)
    loader = optimizer.loader(dataset, steps=6)
    drawn = []
    draws = type(loader.batch_sampler).draws

    def noted(self):
        for draw, indices in draws(self):
            drawn.append(set(indices.tolist()))
            yield draw, indices

    monkeypatch.setattr(type(loader.batch_sampler), "draws", noted)
    with wrap(loader, optimizer) as batches:
        released = train(model, optimizer, batches)
    assert len(released) == optimizer.steps == len(optimizer.accountant) == 6
    for mean, draw in zip(released, drawn, strict=True):
        expected = torch.tensor([float(i in draw) for i in range(N)])
        torch.testing.assert_close(mean, expected)


def test_a_bound_data_loader_can_be_split():
    model = scores()
    optimizer = make_optimizer(model, dp.Fixed(5, N), clip=10.0)
    sampler = dp.sampling.FixedSampler(optimizer.design, steps=3)
    loader = optimizer.bind(DataLoader(Tuples(), batch_sampler=sampler))
    with manager(loader, optimizer) as batches:
        released = train(model, optimizer, batches)
    assert [int(mean.sum().round()) for mean in released] == [5, 5, 5]
    assert all(float(mean.max()) < 1.001 for mean in released)


def test_a_bound_data_loader_delivers_empty_draws():
    model = scores()
    optimizer = make_optimizer(
        model, dp.Poisson(1, N), clip=10.0, noise=1.0, adjacency="add_remove"
    )
    sampler = dp.sampling.PoissonSampler(
        dp.Poisson(1, N), steps=40
    )  # 0.34 of the draws are empty; none with chance 6e-8
    sizes = []
    for (x,) in optimizer.bind(DataLoader(Tuples(), batch_sampler=sampler)):
        sizes.append(len(x))
        model(x).sum().backward()
        optimizer.step()
    assert 0 in sizes
    assert optimizer.steps == len(optimizer.accountant) == 40


def test_workers_may_run_ahead_of_physical_batches():
    model = scores()
    optimizer = make_optimizer(model, dp.Fixed(5, N), clip=10.0)
    loader = optimizer.loader(Tuples(), steps=3, num_workers=2)
    released = train(model, optimizer, loader.in_parts(2))
    assert [int(mean.sum().round()) for mean in released] == [5, 5, 5]


@pytest.mark.parametrize(
    "design", [dp.Poisson(2, N), dp.Fixed(2, N), dp.Shuffled(2, N), dp.Full(N)]
)
def test_a_foreign_loader_with_workers_is_refused(design):
    """It runs ahead of the steps, so that nobody could see which of its batches a step uses."""
    optimizer = make_optimizer(scores(), design)
    loader = DataLoader(Tuples(), batch_sampler=make_sampler(design, steps=3), num_workers=2)
    with pytest.raises(
        SequenceError, match=r"run ahead .* optimizer.loader\(dataset, num_workers"
    ):
        optimizer.bind(loader)


def test_flags_of_a_loader_that_runs_ahead_are_refused():
    model = scores()
    optimizer = make_optimizer(model, dp.Fixed(5, N))
    loader = optimizer.loader(Tuples(), steps=3, num_workers=2)
    message = r"optimizer.loader\(dataset, physical_batch_size=\.\.\., num_workers"
    with manager(loader, optimizer) as batches, pytest.raises(SequenceError, match=message):
        next(iter(batches))
    assert optimizer.steps == len(optimizer.accountant) == 0


@pytest.mark.parametrize("wrap", [manager, physical])
def test_a_draw_broken_off_leaves_nothing_in_the_next_release(wrap):
    model = scores()
    optimizer = make_optimizer(model, dp.Full(N), clip=10.0)
    loader = optimizer.loader(TensorDataset(torch.eye(N)), steps=3)
    with wrap(loader, optimizer) as batches:
        for count, (x,) in enumerate(batches):
            model(x).sum().backward()
            optimizer.step()
            if count == 1:
                break
    assert optimizer.steps == 0
    optimizer.discard()
    with wrap(loader, optimizer) as batches:
        released = train(model, optimizer, batches)
    assert [mean.round().int().tolist() for mean in released] == [[1] * N] * 3
    plain = train_whole(model, optimizer, loader)  # a plain epoch after the manager's
    assert [mean.round().int().tolist() for mean in plain] == [[1] * N] * 3


def train_whole(model: nn.Linear, optimizer, loader) -> list[Tensor]:
    released = []
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
        released.append(model.weight.grad[0] * optimizer.design.batch_size)
    return released


def test_a_part_that_was_skipped_stops_the_manager():
    model = scores()
    optimizer = make_optimizer(model, dp.Full(N))
    with manager(optimizer.loader(TensorDataset(torch.eye(N))), optimizer) as batches:
        parts = iter(batches)
        next(parts)
        with pytest.raises(SequenceError, match="the previous batch was not used"):
            next(parts)


def test_a_part_used_twice_is_refused():
    model = scores()
    optimizer = make_optimizer(model, dp.Full(N), clip=10.0)
    with manager(optimizer.loader(TensorDataset(torch.eye(N))), optimizer, size=4) as batches:
        for (x,) in batches:
            model(x).sum().backward()
            optimizer.step()
            model(x).sum().backward()
            with pytest.raises(SequenceError, match="no batch is outstanding"):
                optimizer.step()
            break
        for (x,) in batches:
            model(x).sum().backward()
            model(x).sum().backward()
            with pytest.raises(SequenceError, match="at most the rows of one draw"):
                optimizer.step()
            break
    assert optimizer.steps == len(optimizer.accountant) == 0


@pytest.mark.parametrize("wrap", [manager, physical])
def test_a_draw_that_was_given_up_between_its_parts_is_delivered_from_its_start(wrap):
    model = scores()
    optimizer = make_optimizer(model, dp.Full(N), clip=10.0)
    with wrap(optimizer.loader(TensorDataset(torch.eye(N)), steps=2), optimizer) as batches:
        parts = iter(batches)
        for _ in range(2):
            model(next(parts)[0]).sum().backward()
            optimizer.step()
        optimizer.discard()
        with pytest.raises(SequenceError, match="the draw was given up"):
            next(parts)
        released = train(model, optimizer, batches)
    assert [mean.round().int().tolist() for mean in released] == [[1] * N] * 2
    assert optimizer.steps == len(optimizer.accountant) == 2


def test_a_flag_without_a_draw_is_refused():
    model = scores()
    with pytest.raises(
        SequenceError, match="must follow a new draw of the optimizer's own loader"
    ):
        make_optimizer(model, dp.Full(N)).signal_skip_step()
    with pytest.raises(
        SequenceError, match="several backward passes per step need a declared sampling"
    ):
        make_optimizer(model, Undeclared(N)).signal_skip_step(True)


def test_a_draw_that_was_said_to_go_on_cannot_be_followed_by_another():
    """Accumulating gradients by hand with signal_skip_step(True), as with Opacus, would join two draws."""
    model = scores()
    optimizer = make_optimizer(model, dp.Fixed(5, N))
    batches = iter(optimizer.loader(TensorDataset(torch.eye(N)), steps=2))
    (x,) = next(batches)
    optimizer.signal_skip_step(True)
    model(x).sum().backward()
    optimizer.step()
    with pytest.raises(SequenceError, match="the previous draw is not complete"):
        next(batches)
    assert optimizer.steps == 0


def test_parts_have_at_least_one_row():
    loader = make_optimizer(scores(), dp.Full(N)).loader(Tuples(), steps=4)
    assert len(loader.in_parts(2)) == 4
    with pytest.raises(ValueError, match="physical_batch_size must be"):
        loader.in_parts(0)
