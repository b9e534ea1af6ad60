"""Traps of batches: T3, T4, T13, T16. Each test shows plain Opacus 1.6 first, then ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torch_dpsco as dp
from tests.checks import scores, step
from tests.problems import column, make_optimizer
from tests.traps.naive import Script, opacus_script
from torch_dpsco.errors import SequenceError, UnitError
from torch_dpsco.sampling import RankSampler, make_sampler

ROWS = pytest.mark.parametrize("rows", ["auto", "dense"])
WORKERS = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


def in_parts(script: Script, size: int) -> BatchMemoryManager:
    return BatchMemoryManager(
        data_loader=script.loader, max_physical_batch_size=size, optimizer=script.optimizer
    )


# -- T3 ---------------------------------------------------------------------------------------------------------------


def naive_release_after_an_interruption(first: float) -> Tensor:
    """Returns what a run on two records releases, after its loop was broken off in the middle of a logical batch."""
    naive = opacus_script(torch.tensor([[first], [0.0]]))
    with in_parts(naive, 1) as parts:
        for (x,) in parts:
            naive.step(x)
            break
        return torch.cat([naive.step(x) for (x,) in parts]).sum()


Parts = Callable[[dp.PrivateOptimizer, Any], Iterable[Any]]
PARTS: dict[str, Parts] = {
    "loader": lambda ours, data: ours.loader(data, steps=1, physical_batch_size=1),
    "BatchMemoryManager": lambda ours, data: managed(ours, ours.loader(data, steps=1)),
    "BatchMemoryManager of a DataLoader": lambda ours, data: managed(
        ours, own_loader(ours, data)
    ),
}


def own_loader(ours: dp.PrivateOptimizer, data: Any, workers: int = 0) -> DataLoader[Any]:
    return ours.bind(
        DataLoader(data, batch_sampler=make_sampler(ours.design, steps=1), num_workers=workers)
    )


def managed(ours: dp.PrivateOptimizer, loader: Any, size: int = 1) -> Iterable[Any]:
    return BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=size, optimizer=ours
    ).__enter__()


def release_after_an_interruption(
    first: float, rows: str, parts_of: Parts
) -> tuple[Tensor, dp.PrivateOptimizer]:
    model = scores(1, rows)
    ours = make_optimizer(model, dp.Full(2))
    parts = parts_of(ours, column(first, 0.0))
    for (x,) in parts:
        model(x).sum().backward()
        ours.step()
        break
    ours.discard()
    for (x,) in parts:
        ours.zero_grad()
        model(x).sum().backward()
        ours.step()
    return -model.weight.detach().squeeze(), ours


@pytest.mark.cases(4, 2)
@ROWS
@pytest.mark.parametrize("parts", list(PARTS))
def test_t03_an_interrupted_logical_batch_leaves_nothing_behind(rows: str, parts: str) -> None:
    """T3: a loop over parts of a logical batch is interrupted in the middle; then training continues.

    Opacus 1.6: `zero_grad()` keeps the sum of the parts; the next release holds a record twice: it moves by 2.000 with
    clip 1 when that record is zeroed.

    Here: the next iteration raises until `discard()`, and then delivers the same draw from its start; the release moves
    by at most the declared sensitivity, clip/batch size, and one event is charged for the one release.
    """
    moved = naive_release_after_an_interruption(1.0) - naive_release_after_an_interruption(0.0)
    assert abs(moved.item()) == pytest.approx(2.0, abs=1e-5)

    there, ours = release_after_an_interruption(1.0, rows, PARTS[parts])
    without, _ = release_after_an_interruption(0.0, rows, PARTS[parts])
    assert 0.49 < (there - without).item() <= ours.oracle.sensitivity("zero_out")
    assert ours.oracle.sensitivity("zero_out") == pytest.approx(0.5, rel=1e-3)
    assert len(ours.accountant) == ours.steps == 1


# -- T4 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@WORKERS
@ROWS
def test_t04_parts_that_workers_prefetched_do_not_shift_later_steps(rows: str) -> None:
    """T4: the same with two workers, which run ahead of the loop.

    Opacus 1.6: the flags of prefetched parts stay in a queue: of the next four plain batches only the last makes a step
    (F, F, F, T), with the sum of all four.

    Here: each part carries its own flag: all four batches make their step (T, T, T, T), each with its own mean; a
    BatchMemoryManager with workers raises SequenceError and names `optimizer.loader(dataset, physical_batch_size=...)`.
    """
    naive = opacus_script(torch.ones(8, 1), workers=2)
    with in_parts(naive, 2) as parts:
        next(iter(parts))
    moves = torch.cat([step for _ in range(4) for step in naive.epoch()])
    assert (moves != 0).tolist() == [False, False, False, True]
    assert moves[-1].item() == pytest.approx(-32.0, abs=1e-3)  # 8 records, 4 times each

    model, data = scores(1, rows), column(*[1.0] * 8)
    ours = make_optimizer(model, dp.Full(8))
    next(iter(ours.loader(data, steps=1, physical_batch_size=2, num_workers=2)))
    ours.discard()
    means = [step(model, ours, x) for (x,) in ours.loader(data, steps=4)]
    torch.testing.assert_close(torch.cat(means), torch.ones(4), atol=1e-3, rtol=0)
    assert len(ours.accountant) == ours.steps == 4
    message = r"optimizer.loader\(dataset, .*num_workers"
    with pytest.raises(SequenceError, match=message):
        own_loader(ours, data, workers=2)
    with pytest.raises(SequenceError, match=message):
        next(iter(managed(ours, ours.loader(data, steps=1, num_workers=2), 2)))
    assert len(ours.accountant) == ours.steps == 4


# -- T13 --------------------------------------------------------------------------------------------------------------


def naive_rank(rank: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Returns the batches of one of two ranks: positions in its own half of 60 records, at rate 1/30."""
    generator = torch.Generator().manual_seed(seed)
    with monkeypatch.context() as patch:  # for the sampler alone, which asks at once
        patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        patch.setattr(torch.distributed, "get_rank", lambda: rank)
        sampler = DistributedUniformWithReplacementSampler(
            total_size=60, sample_rate=1 / 30, shuffle=False, generator=generator
        )
    return [(batch // 2).tolist() for batch in sampler]


def test_t13_ranks_draw_different_places_and_no_empty_batch_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T13: training on two processes by Poisson sampling, and batches that turn out to be empty.

    Opacus 1.6: the distributed sampler skips empty batches: of 30 planned ones, one rank makes 21 and the other 23;
    ranks with equal seeds draw identical positions in all of them.

    Here: both ranks make all 30 batches, empty ones too, and from one key they draw different positions of their own
    halves, whatever seeds are set; an empty batch is a step of noise, and is charged.
    """
    first, second = naive_rank(0, 3, monkeypatch), naive_rank(1, 4, monkeypatch)
    assert (len(first), len(second)) == (21, 23)
    assert first == naive_rank(1, 3, monkeypatch)

    ranks = []
    for rank in (0, 1):
        torch.manual_seed(3)
        sampler = RankSampler(dp.Poisson(2, 60), rank=rank, processes=2, key=bytes(32))
        batches = [indices.tolist() for _, indices in sampler.draws()]
        assert len(batches) == 30
        assert [] in batches
        assert {i % 2 for batch in batches for i in batch} == {rank}
        ranks.append([[i // 2 for i in batch] for batch in batches])
    assert ranks[0] != ranks[1]

    model = scores(1)
    ours = make_optimizer(model, dp.Poisson(1, 30), noise=1.0)
    sizes = []
    monkeypatch.undo()
    for (x,) in ours.loader(column(*[1.0] * 30)):
        sizes.append(len(x))
        step(model, ours, x)
    assert len(sizes) == len(ours.accountant) == 30


# -- T16 --------------------------------------------------------------------------------------------------------------


def public_numbers(n_records: int, rows: str) -> tuple[float, int, float, int]:
    """Returns rate, steps, divisor and number of charged events of a run on a data set of some size, n declared 64."""
    model = scores(1, rows)
    ours = make_optimizer(model, dp.Poisson(8, 64), adjacency="add_remove")
    loader = ours.loader(column(*[1.0] * n_records), isolation="none")
    steps, divisors = 0, []
    for (x,) in loader:
        steps += 1
        mean = step(model, ours, x)
        if len(x):
            divisors.append(len(x) / mean.item())
    assert max(divisors) - min(divisors) < 1e-2
    return (
        loader.design.batch_size / loader.design.n,
        steps,
        round(divisors[0], 2),
        len(ours.accountant),
    )


@ROWS
def test_t16_rate_steps_and_divisor_do_not_tell_the_number_of_records(rows: str) -> None:
    """T16: one record more or less, batch size 8.

    Opacus 1.6: 64 records give rate 1/8, 8 steps and divisor 8; 65 give rate 1/9, 9 steps and divisor 7: the neighbors
    of add/remove differ in public numbers that the accountant assumes to be equal.

    Here: all three follow from a declared n: both have rate 1/8, 8 steps and divisor 8. Under replace_one, where n is
    public, a data set of another size raises UnitError.
    """
    naive = {
        n: opacus_script(torch.ones(n, 1), batch_size=8, reduction="mean") for n in (64, 65)
    }
    numbers = {
        n: (script.loader.sample_rate, len(script.loader), script.optimizer.expected_batch_size)
        for n, script in naive.items()
    }
    assert numbers == {64: (1 / 8, 8, 8), 65: (1 / 9, 9, 7)}

    assert public_numbers(64, rows) == public_numbers(65, rows) == (1 / 8, 8, 8.0, 8)
    ours = make_optimizer(nn.Linear(1, 1), dp.Poisson(8, 64), adjacency="replace_one")
    with pytest.raises(UnitError, match="declared 64, the data set has 65"):
        ours.loader(column(*[1.0] * 65))
