"""Whatever the loop looks like, the parameters are those of a plain loop by hand, and each release is charged once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torch_dpsco as dp
from tests.compat.harness import (
    assert_same_model,
    dataset,
    joined,
    network,
    numbers,
    private_optimizer,
    replayed,
    squared,
)
from tests.problems import make_optimizer
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.errors import SequenceError, UnknownSamplerError

N, BATCH, STEPS = 12, 4, 5
Batch = tuple[Tensor, Tensor]


class Run:
    """A network under a private optimizer without noise, with Poisson draws of 4 of 12 records."""

    def __init__(self, design: dp.Design | None = None, **options: Any) -> None:
        self.model = dp.attach(network(), loss_reduction="sum")
        design = design or dp.Poisson(BATCH, N)
        self.optimizer = private_optimizer(self.model, design, **options)
        self.draws: list[Batch] = []

    def loader(self, steps: int = STEPS, **options: Any) -> dp.sampling.PrivateLoader:
        return self.optimizer.loader(dataset(), steps=steps, isolation="none", **options)

    def backward(self, batch: Batch) -> Tensor:
        loss = squared(self.model(batch[0]), batch[1])
        loss.backward()
        return loss

    def train(self, batches: Any, record: bool = True) -> None:
        for batch in batches:
            if record:
                self.draws.append(tuple(batch))
            self.optimizer.zero_grad()
            self.backward(batch)
            self.optimizer.step()

    def check(self, releases: int = STEPS, optimizer: Any = None) -> None:
        assert len(self.draws) == releases
        assert self.optimizer.steps == len(self.optimizer.accountant) == releases
        charged = dp.Accountant(adjacency="add_remove")
        charged.record(self.optimizer.design.event(self.optimizer.oracle.event(), releases))
        assert self.optimizer.accountant.ledger.digest() == charged.ledger.digest()
        assert_same_model(
            self.model, replayed(self.draws, self.optimizer.design.batch_size, optimizer)
        )


# -- batches ----------------------------------------------------------------------------------------------------------


def test_a_plain_loop():
    run = Run()
    run.train(run.loader())
    run.check()


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_over_worker_processes(workers):
    run = Run()
    run.train(run.loader(num_workers=workers))
    run.check()


def test_a_loop_over_a_bound_data_loader():
    run = Run()
    sampler = dp.sampling.PoissonSampler(dp.Poisson(BATCH, N), steps=STEPS)
    run.train(run.optimizer.bind(DataLoader(dataset(), batch_sampler=sampler)))
    run.check()


def test_a_closure():
    run = Run()
    for batch in run.loader():
        run.draws.append(tuple(batch))
        with torch.no_grad():
            expected = squared(run.model(batch[0]), batch[1])
        run.optimizer.zero_grad()
        assert run.optimizer.step(lambda batch=batch: run.backward(batch)) == expected
    run.check()


def split(batch: Batch, size: int = 2) -> Iterator[Batch]:
    for start in range(0, max(len(batch[0]), 1), size):
        yield tuple(t[start : start + size] for t in batch)


def by_loader(run: Run) -> Iterator[tuple[Batch, Callable[[], None]]]:
    for batch in run.loader(physical_batch_size=2):
        yield tuple(batch), run.optimizer.step


def by_physical_batches(run: Run) -> Iterator[tuple[Batch, Callable[[], None]]]:
    for batch in run.loader().in_parts(2):
        yield tuple(batch), run.optimizer.step


def by_physical_batches_with_workers(run: Run) -> Iterator[tuple[Batch, Callable[[], None]]]:
    for batch in run.loader(num_workers=2).in_parts(2):
        yield tuple(batch), run.optimizer.step


def by_opacus(run: Run) -> Iterator[tuple[Batch, Callable[[], None]]]:
    with BatchMemoryManager(
        data_loader=run.loader(), max_physical_batch_size=2, optimizer=run.optimizer
    ) as batches:
        for batch in batches:
            yield tuple(batch), run.optimizer.step


def by_opacus_bound(run: Run) -> Iterator[tuple[Batch, Callable[[], None]]]:
    sampler = dp.sampling.PoissonSampler(dp.Poisson(BATCH, N), steps=STEPS)
    loader = run.optimizer.bind(DataLoader(dataset(), batch_sampler=sampler))
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=run.optimizer
    ) as batches:
        for batch in batches:
            yield tuple(batch), run.optimizer.step


def by_accumulate(run: Run) -> Iterator[tuple[Batch, Callable[[], None]]]:
    for batch in run.loader():
        parts = list(split(tuple(batch)))
        for k, part in enumerate(parts):
            yield part, run.optimizer.step if k + 1 == len(parts) else run.optimizer.accumulate


def by_two_backward_passes(run: Run) -> Iterator[tuple[Batch, Callable[[], None]]]:
    for batch in run.loader():
        parts = list(split(tuple(batch)))
        for k, part in enumerate(parts):
            yield part, run.optimizer.step if k + 1 == len(parts) else lambda: None


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "chunks",
    [
        by_loader,
        by_physical_batches,
        by_physical_batches_with_workers,
        by_opacus,
        by_opacus_bound,
        by_accumulate,
        by_two_backward_passes,
    ],
)
def test_a_draw_in_parts_makes_one_release(chunks):
    run, parts = Run(), []
    for batch, step in chunks(run):
        assert len(batch[0]) <= 2
        if step is not run.optimizer.accumulate and chunks is not by_two_backward_passes:
            run.optimizer.zero_grad()
        run.backward(batch)
        parts.append(batch)
        before = run.optimizer.steps
        step()
        if run.optimizer.steps > before:
            run.draws.append(joined(parts))
            parts = []
    assert not parts
    run.check()


def test_batch_memory_manager_with_workers_is_refused():
    run = Run(dp.Full(N))  # several parts are sure
    loader = run.loader(3, num_workers=2)

    def train() -> None:
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=4, optimizer=run.optimizer
        ) as batches:
            run.train(batches)

    with pytest.raises(
        SequenceError,
        match=r"optimizer.loader\(dataset, physical_batch_size=..., num_workers=...\)",
    ):
        train()
    assert len(run.optimizer.accountant) == 0


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("physical", [None, 2])
def test_breaking_out_of_an_epoch_leaves_nothing_behind(workers, physical):
    run = Run(dp.Full(N))
    loader = run.loader(num_workers=workers, physical_batch_size=physical)
    for _ in range(3):
        for k, batch in enumerate(loader):
            if k == (
                1 if physical is None else N // 2 + 1
            ):  # in the second draw, for parts after its first one
                break
            run.optimizer.zero_grad()
            run.backward(batch)
            run.optimizer.step()
        run.optimizer.discard()
    run.draws = [tuple(dataset().tensors)] * 3
    run.check(3)


class Nested(Dataset[Any]):
    """Records as nested dicts with sequences of different lengths."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        x, y = dataset()[i]
        return {"inputs": {"x": x.expand(1 + i % 3, -1)}, "target": y}


def pad(records: list[dict[str, Any]]) -> dict[str, Any]:
    sequences = [record["inputs"]["x"] for record in records]
    lengths = torch.tensor([len(s) for s in sequences])
    padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    return {
        "inputs": {"x": padded, "lengths": lengths},
        "target": torch.stack([r["target"] for r in records]),
    }


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("workers", [0, 2])
def test_nested_records_padded_by_collate_and_empty_draws(workers):
    run = Run(dp.Poisson(1, N))
    for batch in run.optimizer.loader(
        Nested(), steps=12, collate_fn=pad, num_workers=workers, isolation="none"
    ):
        x, lengths = batch["inputs"]["x"], batch["inputs"]["lengths"]
        means = x.sum(1) / lengths[:, None]  # all times of a record are alike
        run.draws.append((means, batch["target"]))
        run.optimizer.zero_grad()
        run.backward((means, batch["target"]))
        run.optimizer.step()
    run.check(12)
    assert (
        min(len(x) for x, _ in run.draws) == 0
    )  # false alarm: (1 - (11/12)^12)^12 = 0.0016 of no empty draw


def test_an_empty_draw_needs_no_forward():
    run = Run(dp.Poisson(1, N))
    for batch in run.loader(12):
        run.draws.append(tuple(batch))
        run.optimizer.zero_grad()
        if run.optimizer.outstanding_rows:
            run.backward(batch)
        run.optimizer.step()
    run.check(12)


def test_a_stream_is_refused():
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Tensor]:
            yield torch.ones(2)

    run = Run()
    with pytest.raises(ValueError, match="must be map-style"):
        run.optimizer.loader(Stream())
    with pytest.raises(UnknownSamplerError, match=r"optimizer.loader\(dataset\)"):
        run.optimizer.bind(DataLoader(Stream()))


# -- inside of a step -------------------------------------------------------------------------------------------------


def test_evaluation_and_metrics_inside_of_the_loop():
    run = Run()
    for batch in run.loader():
        run.draws.append(tuple(batch))
        run.model.eval()
        run.model(dataset().tensors[0])  # gradients enabled, as in careless code
        run.model.train()
        run.optimizer.zero_grad()
        loss = squared(run.model(batch[0]), batch[1])
        with torch.no_grad():
            run.model(batch[0])
        loss.backward()
        with torch.inference_mode():
            run.model(batch[0])
        run.optimizer.step()
    run.check()


def test_a_sum_of_losses():
    run = Run()
    for x, y in run.loader():
        run.draws.append((x, y))
        run.optimizer.zero_grad()
        output = run.model(x)
        (0.25 * squared(output, y) + 0.75 * (output - y).square().sum()).backward()
        run.optimizer.step()
    run.check()


def linear() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def test_two_forwards_of_parts_before_one_backward_are_right_or_refused():
    for rows in ("auto", "dense"):
        model = dp.attach(linear(), rows=rows, loss_reduction="sum")
        optimizer = private_optimizer(model, dp.Full(N))
        for x, y in optimizer.loader(dataset(), steps=1, isolation="none"):
            first = squared(model(x[:5]), y[:5])
            if rows == "dense":
                with pytest.raises(SequenceError, match="waiting for its backward"):
                    model(x[5:])
                break
            (first + squared(model(x[5:]), y[5:])).backward()
            optimizer.step()
            assert_same_model(model, replayed([(x, y)], N, build=linear))


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_an_attack_by_autograd_grad_leaves_the_step_alone(rows):
    run, attacks = Run(), []
    run.model = dp.attach(dp.detach(run.model), rows=rows, loss_reduction="sum")
    for x, y in run.loader():
        x.requires_grad_()
        (slope,) = torch.autograd.grad(squared(run.model(x), y), x)
        attacks.append(slope)
        batch = ((x + 0.1 * slope.sign()).detach(), y)
        run.draws.append(batch)
        run.optimizer.zero_grad()  # forgets the rows that dense layers record in autograd.grad
        run.backward(batch)
        run.optimizer.step()
    run.check()
    assert any(bool(slope.any()) for slope in attacks)


def test_rows_left_by_autograd_grad_are_refused():
    model = dp.attach(network(), loss_reduction="sum")
    optimizer = make_optimizer(model, Undeclared(8))
    x = numbers(2, n=3).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    model(x.detach()).sum().backward()
    with pytest.raises(SequenceError, match=r"autograd.grad.*zero_grad\(\)"):
        optimizer.step()
    assert len(optimizer.accountant) == 0


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_saliency_on_the_graph_of_the_loss_is_right_or_refused(rows):
    model = dp.attach(linear(), rows=rows, loss_reduction="sum")
    optimizer = private_optimizer(model, dp.Full(N))
    for x, y in optimizer.loader(dataset(), steps=1, isolation="none"):
        x.requires_grad_()
        loss = squared(model(x), y)
        torch.autograd.grad(loss, x, retain_graph=True)
        if rows == "dense":
            with pytest.raises(SequenceError, match="must follow a forward"):
                loss.backward()
            break
        loss.backward()
        optimizer.step()
        assert_same_model(model, replayed([(x.detach(), y)], N, build=linear))


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_a_gradient_penalty_is_refused(rows):
    model = dp.attach(linear(), rows=rows, loss_reduction="sum")
    x = numbers(2).requires_grad_()
    output = model(x).sum()
    (slope,) = torch.autograd.grad(output, x, create_graph=True)
    with pytest.raises(SequenceError, match=r"double backward|must follow a forward"):
        (output + slope.square().sum()).backward()
