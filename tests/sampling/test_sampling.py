from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from tests.streams import Picked, seeded_sampler
from torch_dpsco.accounting.designs import (
    Design,
    Disjoint,
    Draw,
    Fixed,
    Full,
    Poisson,
    Shuffled,
    Undeclared,
)
from torch_dpsco.accounting.events import clipped_gaussian
from torch_dpsco.errors import SequenceError, UnitError, UnknownSamplerError
from torch_dpsco.noise import Stream
from torch_dpsco.sampling import (
    Chunk,
    DesignSampler,
    DisjointSampler,
    DrawLog,
    FixedSampler,
    FullSampler,
    PoissonSampler,
    PrivateLoader,
    ShuffledSampler,
    make_sampler,
    poisson_positions,
    samplers,
)

N = 20
X = torch.arange(N, dtype=torch.float64).unsqueeze(1).repeat(1, 3)
Y = torch.arange(N)
TENSORS = TensorDataset(X, Y)
DESIGNS = [Poisson(4, N), Fixed(4, N), Shuffled(4, N), Disjoint(4, N), Full(N)]
SAMPLERS = [PoissonSampler, FixedSampler, ShuffledSampler, DisjointSampler, FullSampler]
RARE = Poisson(1, N)  # most draws of it are small, and a third of them empty
multiprocess = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


class Tuples(Dataset):
    """The records of TENSORS, not as tensors in memory."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


class Dicts(Tuples):
    def __getitem__(self, index: int) -> Any:
        return {"x": X[index].float(), "pair": (Y[index], float(index)), "flag": bool(index % 2)}


def seeded(design: Design, **options: Any) -> DesignSampler:
    return seeded_sampler(design, seed=1, **options)


def used(loader: Any, sampler: DesignSampler) -> Iterator[tuple[Any, Chunk]]:
    """Every batch of a loader with its chunk, as a step would take and end it."""
    for batch in loader:
        chunk = sampler.log.take()
        yield batch, chunk
        sampler.log.taken = None
        if chunk.last:
            sampler.log.use_up()


def positions(sampler: DesignSampler) -> list[list[int]]:
    return [indices.tolist() for _, indices in sampler.draws()]


# -- draws ------------------------------------------------------------------------------------------------------------


class FixedNumber(Stream):
    """All numbers that it draws have the same bits: those of a number in (0, 1), and further ones when asked for."""

    def __init__(self, bits: list[int]) -> None:
        self.word, *self.further = bits
        self.asked = 0

    def read(self, size: int) -> bytes:
        if size > 8:  # a chunk of words
            return (2 * self.word).to_bytes(8, "little") * (size // 8)
        self.asked += 1
        return self.further[(self.asked - 1) % len(self.further)].to_bytes(size, "little")


@given(st.integers(0, 3000), st.floats(1e-6, 1))
def test_the_gap_method_reaches_the_first_and_the_last_position(size, rate):
    """Numbers above 1 - rate are gaps of 0: every position is drawn, over as many chunks as it takes."""
    assert poisson_positions(
        size, rate, FixedNumber([int(2**63 * (1 - rate / 2))])
    ).tolist() == list(range(size))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("rate", [1e-7, 1e-4, 256 / 60_000, 0.3, 0.9, 1 - 2.0**-40])
@pytest.mark.parametrize("mean", [1e-3, 1.0, 9.0, 20.0, 50.0])
def test_gaps_have_exactly_the_law_of_the_rate_that_is_charged(rate, mean):
    """P(gap >= k) = (1 - q)^k: numbers next to it, of which 127 bits decide nothing, are on their side of it."""
    k = max(1, int(mean / -math.log1p(-rate)))
    with mpmath.mp.workprec(2000):
        edge = int((1 - mpmath.mpf(rate)) ** k * 2**191)
    for number, gap in ((edge - 4, k), (edge + 4, k - 1)):
        stream = FixedNumber([number >> 128, (number >> 64) % 2**64, number % 2**64])
        assert poisson_positions(k + 1, rate, stream)[0] == gap
        assert stream.asked % 2 == 0 < stream.asked


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("more", [0, 1])
def test_no_gap_is_too_long_to_be_drawn(more):
    """Beyond 2^-53 and 2^-63, where float64 and the first word end."""
    stream = FixedNumber([0, *[0] * more, 2**60, 0])
    longest = (63 + 64 * more + 4) * math.log(2) / -math.log1p(-1e-6)
    assert abs(poisson_positions(int(longest) + 2, 1e-6, stream)[0] - longest) < 1


def test_batches_are_drawn_at_the_rate_that_is_charged(monkeypatch):
    seen = []
    monkeypatch.setattr(
        samplers, "poisson_positions", lambda size, rate, rng: seen.append(rate) or np.arange(0)
    )
    for design in (Poisson(7, 49), Poisson(3, 1001)):
        list(PoissonSampler(design, steps=1).draws())
        assert design.draw_event(clipped_gaussian(1.0), Draw(0)).q == seen[-1]


@pytest.mark.parametrize(
    ("size", "rate"), [(0, 0.5), (0, 1.0), (1, 1.0), (7, 1.0), (10**7, 1e-7), (5, 1e-300)]
)
def test_drawn_positions_are_distinct_sorted_and_in_range(size, rate):
    rng = Picked(np.random.default_rng(0))
    for _ in range(20):
        drawn = poisson_positions(size, rate, rng)
        assert drawn.dtype == np.int64
        assert (np.diff(drawn) > 0).all()
        assert ((drawn >= 0) & (drawn < size)).all()
        assert rate < 1 or len(drawn) == size


@pytest.mark.parametrize("design", DESIGNS, ids=lambda d: type(d).__name__)
def test_a_sampler_makes_one_epoch_or_the_steps_asked_for(design):
    sampler, short = make_sampler(design), make_sampler(design, steps=1)
    assert len(sampler) == len(positions(sampler)) == design.steps_per_epoch
    assert len(short) == len(positions(short)) == 1
    for draw, indices in make_sampler(design).draws():
        assert draw.size == len(indices) == len(set(indices.tolist()))


def test_fixed_batches_have_exactly_their_size():
    assert {len(batch) for batch in positions(make_sampler(Fixed(7, N), steps=50))} == {7}
    assert positions(make_sampler(Fixed(N, N), steps=1)) == [list(range(N))]


@pytest.mark.parametrize("batch_size", [1, 6, N])
def test_shuffled_epochs_hold_each_record_once_in_parts_of_their_own(batch_size):
    epoch = math.ceil(N / batch_size)
    draws = list(make_sampler(Shuffled(batch_size, N), steps=2 * epoch + 1).draws())
    for chosen in (draws[:epoch], draws[epoch : 2 * epoch]):
        assert sorted(i for _, indices in chosen for i in indices) == list(range(N))
        assert len({(draw.partition, draw.part) for draw, _ in chosen}) == epoch
        assert len({draw.partition for draw, _ in chosen}) == 1
    assert (
        len({draw.partition for draw, _ in draws}) == 3
    )  # a started third pass is a pass of its own


def test_every_iteration_and_every_sampler_has_a_permutation_of_its_own():
    sampler = make_sampler(Shuffled(5, N))
    names = {draw.partition for _ in range(3) for draw, _ in sampler.draws()}
    names |= {
        draw.partition for _ in range(3) for draw, _ in make_sampler(Disjoint(5, N)).draws()
    }
    assert len(names) == 6


def test_partitions_of_different_cuts_have_different_names():
    """One permutation cut in two ways: part 0 of one overlaps with part 1 of the other."""
    names = {draw.partition for b in (5, 10) for draw, _ in seeded(Shuffled(b, N)).draws()}
    again = {
        draw.partition for kind in (Shuffled, Disjoint) for draw, _ in seeded(kind(5, N)).draws()
    }
    assert (len(names), len(again)) == (2, 1)


def test_a_one_pass_sampler_is_used_up_by_one_iteration():
    sampler = make_sampler(Disjoint(6, N))
    assert sorted(i for batch in positions(sampler) for i in batch) == list(range(N))
    for spent in (sampler, copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        with pytest.raises(SequenceError, match="each record may be used once"):
            next(spent.draws())
    broken_off = make_sampler(Disjoint(6, N))
    next(iter(PrivateLoader(TENSORS, broken_off)))
    with pytest.raises(SequenceError):
        next(iter(PrivateLoader(TENSORS, broken_off)))


# -- construction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_refuses_a_foreign_design(sampler):
    """Fixed-size batches that say they are Poisson would be under-accounted more than tenfold."""
    for design in [*DESIGNS, Undeclared(4)]:
        if type(make_sampler(design) if design in DESIGNS else None) is sampler:
            assert sampler(design).design is design
        else:
            with pytest.raises(
                UnknownSamplerError, match=rf"design must be \w+ for {sampler.__name__} \(got "
            ):
                sampler(design)


def test_an_undeclared_design_has_no_sampler():
    with pytest.raises(UnknownSamplerError, match="no sampling was declared: give n="):
        make_sampler(Undeclared(4))


@pytest.mark.parametrize("design", DESIGNS, ids=lambda d: type(d).__name__)
def test_another_number_of_records_is_refused_where_batches_depend_on_it(design):
    if isinstance(design, (Poisson, Full)):  # their n is a reference and a divisor
        assert make_sampler(design, size=N + 1).size == N + 1
    else:
        with pytest.raises(UnitError, match=rf"size must be n={N}, .* \(got {N + 1}\)"):
            make_sampler(design, size=N + 1)
    with pytest.raises(UnitError, match=rf"dataset must have {N} records, .* \(got 10\)"):
        PrivateLoader(TensorDataset(X[:10]), make_sampler(design))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make_sampler(RARE, steps=0), r"steps must be an integer >= 1 \(got 0\)"),
        (
            lambda: make_sampler(Disjoint(6, N), steps=5),
            r"steps must be <= 4, what is left of one pass .* \(got 5\)",
        ),
        (
            lambda: PrivateLoader(TENSORS, make_sampler(RARE), physical_batch_size=0),
            r"physical_batch_size must be",
        ),
    ],
)
def test_a_bad_number_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# -- secrecy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_a_copy_draws_other_batches_and_logs_for_itself(duplicate):
    sampler = seeded(Poisson(50, 1000))
    sampler.log.deliver(Chunk(Draw(1), 1, 1, last=True))
    twin = duplicate(sampler)
    assert not twin.log.waiting
    assert "PCG64" not in str(sampler.__getstate__())  # no stream in a checkpoint or a worker
    assert (twin.design, twin.size, twin.steps) == (sampler.design, sampler.size, sampler.steps)
    assert positions(twin) != positions(sampler)


def test_batches_are_drawn_anew_each_time():
    assert positions(make_sampler(Poisson(50, 1000))) != positions(
        make_sampler(Poisson(50, 1000))
    )


# -- log --------------------------------------------------------------------------------------------------------------


def test_the_log_admits_one_use_of_each_batch_in_order():
    log, chunks = DrawLog(), [Chunk(Draw(k), k, k, last=True) for k in range(3)]
    with pytest.raises(SequenceError, match="no batch is outstanding"):
        log.take()
    log.deliver(chunks[0])
    with pytest.raises(SequenceError, match="the previous batch was not used"):
        log.deliver(chunks[1])
    assert log.take() is log.taken is chunks[0]
    with pytest.raises(SequenceError, match="no batch is outstanding"):
        log.take()
    with pytest.raises(
        SequenceError, match="the previous batch was not used"
    ):  # taken, but its step has not ended
        log.deliver(chunks[1])
    log.taken = None
    with pytest.raises(SequenceError, match="an older iteration of the loader was continued"):
        log.deliver(chunks[1])
    log.use_up()
    log.deliver(chunks[1])


def test_a_restart_asks_for_the_draw_that_was_given_up():
    log, restarts = DrawLog(), []
    log.on_restart = lambda: restarts.append(len(log.waiting))
    source = (Draw(1), np.array([4]))
    log.deliver(Chunk(Draw(1), 1, 1, last=True, source=source))
    log.take()
    with pytest.raises(SequenceError, match="the previous batch was not used"):
        log.restart()
    assert restarts == []
    log.give_up()
    with pytest.raises(SequenceError, match="the draw was given up"):
        log.deliver(Chunk(Draw(2), 2, 2, last=True))
    log.restart()
    assert restarts == [0]
    assert log.taken is None
    assert log.again is source
    with pytest.raises(SequenceError):
        log.take()
    log.deliver(Chunk(Draw(1), 1, 1, last=True, source=source))
    log.use_up()
    assert log.again is None
    log.restart()


# -- loaders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("physical", [None, 1, 3, 100])
@pytest.mark.parametrize("design", [RARE, *DESIGNS], ids=lambda d: type(d).__name__)
def test_chunks_cover_each_draw_with_one_last_flag(design, physical):
    expected = positions(seeded(design))
    sampler = seeded(design)
    covered: list[list[int]] = [[]]
    chunks = []
    for (x, y), chunk in used(
        PrivateLoader(TENSORS, sampler, physical_batch_size=physical), sampler
    ):
        assert len(x) == len(y) == chunk.rows <= (physical or N)
        assert x[:, 0].tolist() == y.tolist()
        covered[-1] += y.tolist()
        chunks.append(chunk)
        if chunk.last:
            assert chunk.draw.size == len(covered[-1])
            covered.append([])
    assert covered == [*expected, []]
    assert len({id(chunk.draw) for chunk in chunks}) == len(expected) == len(sampler)


@pytest.mark.cases(1, 1)
@multiprocess
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("physical", [None, 2])
def test_tensors_in_memory_give_the_batches_of_the_data_loader(physical, workers):
    runs = []
    for dataset, count in ((TENSORS, 0), (Tuples(), workers)):
        sampler = seeded(RARE, steps=30)
        loader = PrivateLoader(dataset, sampler, physical_batch_size=physical, num_workers=count)
        runs.append(
            [
                (x.tolist(), y.tolist(), x.dtype, y.dtype, c.rows, c.last)
                for (x, y), c in used(loader, sampler)
            ]
        )
    assert runs[0] == runs[1]
    assert min(rows for *_, rows, _ in runs[0]) == 0


@pytest.mark.parametrize("dataset", [TENSORS, Tuples()])
def test_an_empty_draw_is_a_batch_without_rows(dataset):
    sampler = seeded(RARE, steps=40)
    empty = [
        batch
        for batch, chunk in used(PrivateLoader(dataset, sampler), sampler)
        if not chunk.rows
    ]
    assert empty
    for x, y in empty:
        assert (x.shape, x.dtype, y.shape, y.dtype) == ((0, 3), torch.float64, (0,), torch.int64)


@pytest.mark.cases(1, 1)
@multiprocess
@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_draw_has_the_structure_of_the_records(workers):
    sampler = seeded(RARE, steps=20)
    seen = {
        chunk.rows: batch
        for batch, chunk in used(PrivateLoader(Dicts(), sampler, num_workers=workers), sampler)
    }
    for rows, batch in seen.items():
        first, second = batch["pair"]
        assert (batch["x"].shape, batch["x"].dtype) == ((rows, 3), torch.float32)
        assert (first.dtype, second.dtype, batch["flag"].dtype) == (
            torch.int64,
            torch.float64,
            torch.bool,
        )
        assert len(first) == len(second) == len(batch["flag"]) == rows
    assert 0 in seen


def test_a_collate_function_of_the_users_is_used_also_for_tensors():
    sampler, sizes = seeded(RARE, steps=40), set()
    loader = PrivateLoader(
        TENSORS,
        sampler,
        collate_fn=lambda items: [2 * default_collate(items)[0], torch.tensor(1)],
    )
    for (x, _), chunk in used(loader, sampler):
        assert (x.shape, x.dtype) == ((chunk.rows, 3), torch.float64)
        assert (x % 2 == 0).all()
        sizes.add(chunk.rows)
    assert 0 in sizes


def test_a_subclass_of_a_tensor_dataset_keeps_its_own_records():
    class Negated(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return -x, y

    sampler = make_sampler(Full(N))
    [((x, _), _)] = used(PrivateLoader(Negated(X, Y), sampler), sampler)
    assert (x == -X).all()


def test_what_is_sent_to_workers_can_be_pickled(monkeypatch):
    """Where processes are spawned, and not forked, the collate function is pickled."""
    sent = []
    monkeypatch.setattr(
        "torch_dpsco.sampling.loader.DataLoader",
        lambda *_, **options: sent.append(options) or [],
    )
    list(PrivateLoader(Tuples(), make_sampler(RARE), num_workers=2))
    collate = pickle.loads(pickle.dumps(sent[0]["collate_fn"]))
    assert [part.shape for part in collate([])] == [(0, 3), (0,)]
    assert [part.shape for part in collate([Tuples()[0]])] == [(1, 3), (1,)]


def test_a_batch_that_no_step_has_used_stops_the_loader():
    loader = PrivateLoader(TENSORS, make_sampler(Fixed(4, N)))
    batches = iter(loader)
    next(batches)
    with pytest.raises(SequenceError, match="use another loader for evaluation"):
        next(batches)


@pytest.mark.cases(2, 1)
@multiprocess
@pytest.mark.parametrize(("dataset", "workers"), [(TENSORS, 0), (Tuples(), 0), (Tuples(), 2)])
def test_an_iteration_broken_off_is_followed_by_one_that_begins_with_the_same_draw(
    dataset, workers
):
    sampler = make_sampler(Fixed(4, N))
    loader = PrivateLoader(dataset, sampler, physical_batch_size=3, num_workers=workers)
    restarts = []
    sampler.log.on_restart = lambda: restarts.append(True)
    _, first = next(iter(loader))  # delivered, never used; chunk 2 of its draw never delivered
    with pytest.raises(SequenceError, match="the previous batch was not used"):
        next(iter(loader))
    sampler.log.give_up()
    flags, targets = [], []
    for (_, y), chunk in used(loader, sampler):
        assert len(y) == chunk.rows
        flags.append((chunk.rows, chunk.last))
        targets.append(y.tolist())
    assert flags == [(3, False), (1, True)] * 5
    assert targets[0] == first.tolist()
    assert not sampler.log.waiting
    assert len(restarts) == 2


def test_a_sampler_serves_a_plain_data_loader_as_batch_sampler():
    sampler, expected = (
        seeded(Poisson(10, N), steps=15),
        positions(seeded(Poisson(10, N), steps=15)),
    )
    loader = DataLoader(Tuples(), batch_sampler=sampler)
    assert len(loader) == 15
    got = []
    for (_, y), chunk in used(loader, sampler):
        assert (len(y), chunk.last) == (chunk.rows, True)
        got.append(y.tolist())
    assert got == expected
    assert not sampler.log.waiting
