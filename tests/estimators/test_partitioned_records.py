"""Sums over partitions: the additions that public numbers allow for, whatever the partitions are."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import torch_dpsco as dp
from tests.estimators.test_parts import DIM, task
from torch_dpsco.accounting.analysis.rounding import gamma
from torch_dpsco.estimators.gradient_descent import plan_noisy_gd
from torch_dpsco.estimators.records import PairwiseSum, Records, sum_terms
from torch_dpsco.estimators.task import build_objective, make_records, make_stored_records
from torch_dpsco.streams import partitions as module
from torch_dpsco.streams.blocks import RawPart
from torch_dpsco.streams.partitions import PARTITION_ROWS, PartitionedRecords, RawPartitions


class Listed:
    """Partitions of raw parts."""

    def __init__(self, parts: list[list[RawPart]]) -> None:
        self.parts = parts

    def run(self, function: Callable[[Iterator[Any]], Any]) -> list[Any]:
        return [function(iter(part)) for part in self.parts]


def partitioned(
    given: Any, features: Tensor, targets: Tensor, sizes: Iterable[int]
) -> PartitionedRecords:
    parts = [
        [(x, y, torch.ones(len(y), dtype=torch.float64))]
        for x, y in zip(features.split(list(sizes)), targets.split(list(sizes)), strict=True)
    ]
    return make_stored_records(given, RawPartitions(Listed(parts), iter))


# -- the number of additions ------------------------------------------------------------------------------------------


class Counting:
    """A sum that knows how many roundings its terms have passed through at most; adding nothing rounds nothing."""

    def __init__(self, depth: int | None = None) -> None:
        self.depth = depth

    def __add__(self, other: Counting) -> Counting:
        if self.depth is None or other.depth is None:
            return other if self.depth is None else self
        return Counting(max(self.depth, other.depth) + 1)


def merged(depths: Iterable[int]) -> int:
    total = PairwiseSum(Counting())  # type: ignore[arg-type]
    for depth in depths:
        total.add(Counting(depth))  # type: ignore[arg-type]
    return total.result().depth or 0  # type: ignore[attr-defined]


def additions(sizes: list[int], rows: int) -> int:
    """What a term passes through where partitions of these sizes are summed in blocks of so many rows."""
    within = [
        merged(min(rows, size - start) for start in range(0, size, rows))
        for size in sizes
        if size
    ]
    return merged(within)


SIZES = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 1500), st.integers(510, 515)),
    min_size=1,
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, rows=st.sampled_from([1, 3, 100, PARTITION_ROWS]))
@example(sizes=[1] * 1024, rows=PARTITION_ROWS)
@example(sizes=[1] * 1025, rows=PARTITION_ROWS)
@example(sizes=[1023, *[1] * 4000], rows=PARTITION_ROWS)
@example(sizes=[1, 1024], rows=PARTITION_ROWS)
@example(sizes=[513, 511], rows=PARTITION_ROWS)
def test_a_term_passes_through_as_many_additions_as_public_numbers_allow_for(sizes, rows):
    """`rows` is less than 512 where rows are wide."""
    n = sum(sizes)
    assert additions(sizes, rows) <= (sum_terms(n) if n else 0)


@pytest.mark.parametrize("sizes", [[1024, 1, 1], [3072, 1, 1], [1024, 1024, 1, 1, 1]])
def test_blocks_of_as_many_rows_as_in_memory_would_take_more_additions(sizes):
    assert additions(sizes, 1024) > sum_terms(sum(sizes))


@pytest.mark.parametrize("sizes", [[5], [0, 0, 3], [1] * 9, [700, 0, 513, 1, 2000], [1] * 600])
def test_records_know_how_many_additions_there_are(sizes):
    n = sum(sizes)
    records = partitioned(task(n=n), torch.ones(n, DIM), torch.ones(n), sizes)
    assert records._rows == PARTITION_ROWS
    assert additions(sizes, PARTITION_ROWS) <= records.depth <= 3 * sum_terms(n)


def exact(terms: Tensor) -> Fraction:
    return sum(map(Fraction, terms.tolist()), Fraction())


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 999))
def test_sums_over_partitions_are_within_the_public_bound_of_the_exact_sum(sizes, seed):
    n = sum(sizes)
    draws = torch.Generator().manual_seed(seed)
    features = torch.randn(n, DIM, generator=draws, dtype=torch.float64) * 10.0 ** torch.randint(
        -6, 7, (n, 1), generator=draws
    )
    given = task(n=max(n, 1))
    records = partitioned(given, features, torch.ones(n), sizes)
    terms = make_records(given, features, torch.ones(n)).norms
    (found,) = records.sum(lambda part: (part.total(part.norms),))
    off = abs(Fraction(float(found)) - exact(terms))
    assert off <= Fraction(gamma(sum_terms(max(n, 1)))) * exact(terms.abs())


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=9), seed=st.integers(0, 99))
@example(sizes=[1, 0, 5], seed=0)
def test_every_record_is_summed_once(sizes, seed):
    """Integers add up exactly, in any order."""
    n = sum(sizes)
    features = torch.zeros(n, DIM)
    targets = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
    records = partitioned(task(), features, targets, sizes)
    counted, total = records.sum(
        lambda part: (part.total(part.weights), part.total(part.targets))
    )
    assert records.count == float(counted) == n
    assert float(total) == float(targets.sum())


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("sizes", [[41], [0, 7, 34], [1] * 41])
@pytest.mark.parametrize("label", [1.0, -1.0])
def test_no_record_in_partitions_moves_a_gradient_by_more_than_planned(sizes, label):
    """The record may be all there is of a partition, or move others to other partitions."""
    plan = plan_noisy_gd(task(n=100), steps=3)
    features = torch.randn(40, DIM, generator=torch.Generator().manual_seed(2))
    joined = torch.cat([torch.full((1, DIM), label * 1e6), features])
    labels = torch.cat([torch.tensor([-label]), torch.ones(40)])
    most = 0.0
    for w in (
        torch.zeros(DIM + 1),
        torch.full((DIM + 1,), 30.0),
        torch.tensor([9.0, -3.0, 1.0, -40.0]),
    ):
        one, other = (
            build_objective(plan.task, plan.reg, records).value_and_gradient(w.double())[1]
            for records in (
                partitioned(plan.task, features, torch.ones(40), [13, 27]),
                partitioned(plan.task, joined, labels, sizes),
            )
        )
        most = max(most, float(torch.linalg.vector_norm(one - other)))
    lipschitz = plan.task.lipschitz
    assert lipschitz is not None
    assert 0.9 * lipschitz <= most <= lipschitz * (1 + 1e-12)


# -- what travels, and what comes back --------------------------------------------------------------------------------


def two(sizes: tuple[int, int] = (3, 4)) -> PartitionedRecords:
    n = sum(sizes)
    return partitioned(task(), torch.ones(n, DIM), torch.ones(n), sizes)


def test_no_noise_travels_to_a_partition():
    """Whatever holds the records is refused by pickle: an objective, with the noise that was added to it."""
    records = two()
    objective = build_objective(task(), 1.0, records, torch.ones(DIM + 1, dtype=torch.float64))
    for held in (records, objective, records._partitions):
        with pytest.raises(TypeError, match="must not be pickled"):
            pickle.dumps(held)


def test_no_record_comes_back():
    seen: list[Any] = []
    raw = two()._partitions
    inner = raw._partitions
    raw._partitions = type(
        "Seen", (), {"run": lambda self, function: seen.extend(inner.run(function)) or seen[-2:]}
    )()
    records = PartitionedRecords(raw, lambda part: make_records(task(), *part))
    records.sum(lambda part: (part.gram(part.weights),))
    assert records.thinned(records.thinning(16)) is records
    for reading in seen:
        assert reading.sums == () or reading.sums[0].shape == (DIM + 1, DIM + 1)
        assert reading.empty is None or all(len(column) == 0 for column in reading.empty)
        assert set(vars(reading)) == {"noted", "empty", "sums", "arithmetic"}


def test_what_needs_a_number_for_each_record_is_refused():
    with pytest.raises(dp.errors.ConditionError, match="in memory"):
        two().scores(torch.zeros(DIM + 1, dtype=torch.float64))


def test_workers_of_several_kinds_are_refused(monkeypatch):
    kinds = iter(["AVX2", "AVX2", "AVX512", "AVX512"])
    monkeypatch.setattr(module.torch.backends.cpu, "get_cpu_capability", lambda: next(kinds))
    records = two()
    with pytest.raises(dp.errors.ConditionError, match=r"one kind.*AVX2.*AVX512"):
        records.sum(lambda part: (part.total(part.weights),))


def test_workers_of_which_one_is_without_the_accelerator_are_refused(monkeypatch):
    kinds = iter(["C", "C", "C", "torch"])
    monkeypatch.setattr(module.native, "arithmetic", lambda: next(kinds))
    with pytest.raises(dp.errors.ConditionError, match=r"accelerator on all or none"):
        two().sum(lambda part: (part.total(part.weights),))


@pytest.mark.parametrize("results", [[], [None], [3]])
def test_an_engine_that_returns_something_else_is_refused(results):
    raw = RawPartitions(type("Odd", (), {"run": lambda self, function: results})(), iter)
    with pytest.raises(ValueError, match="what the function returned"):
        raw.empty()


def test_wide_rows_come_in_shorter_blocks():
    """Rows of 2^14 numbers in blocks of 256: `rows` of the first test."""
    assert Records(torch.zeros(3, 2**14), torch.ones(3), block_rows=PARTITION_ROWS)._rows == 256
