"""Sums over parts: the additions of the same records in memory, and no record moves them by more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.estimators import records as base
from torch_dpsco.estimators.gradient_descent import plan_noisy_gd
from torch_dpsco.estimators.least_squares import plan_preconditioned_gd
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.task import (
    LinearTask,
    build_objective,
    make_records,
    make_stored_records,
)
from torch_dpsco.losses import Logistic, Squared
from torch_dpsco.streams import blocks as parts
from torch_dpsco.streams.blocks import PartedRecords, RawBlocks, RawPart

DIM = 3


def blocks_of(features: Tensor, targets: Tensor, size: int) -> RawBlocks:
    def read() -> Iterator[RawPart]:
        yield features[:0], targets[:0], torch.ones(0, dtype=torch.float64)
        for start in range(0, len(features), size):
            rows = slice(start, start + size)
            yield (
                features[rows],
                targets[rows],
                torch.ones(len(features[rows]), dtype=torch.float64),
            )

    return RawBlocks(read)


def task(**changes: object) -> LinearTask:
    numbers = {
        "loss": Logistic(),
        "n": 1000,
        "budget": dp.Budget(1.0, 1e-5, adjacency="add_remove"),
        **changes,
    }
    return LinearTask(preparation=Preparation(1.0, intercept=0.5), dim=DIM, **numbers)  # type: ignore[arg-type]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BLOCK_ROWS", 2)
    monkeypatch.setattr(parts, "_PART_ENTRIES", 2 * (DIM + 1) * 4)


def sums_of(records: base.Records) -> tuple[Tensor, ...]:
    return records.total(records.norms), records.gram(records.weights)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 90),
    size=st.integers(1, 20),
    blocks=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 99),
)
def test_a_sum_over_parts_is_that_of_the_records_in_memory_to_the_last_bit(
    count, size, blocks, seed
):
    features = torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed)) * 1e3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "BLOCK_ROWS", 2)
        patch.setattr(base, "_TILED_ROWS", 2)
        patch.setattr(parts, "_PART_ENTRIES", 2 * (DIM + 1) * blocks)
        memory = make_records(task(), features, torch.ones(count))
        parted = make_stored_records(task(), blocks_of(features, torch.ones(count), size))
        found = parted.sum(sums_of)
    assert parted.part_rows == 2 * blocks
    assert (parted.count, parted.dim, parted.depth) == (memory.count, memory.dim, memory.depth)
    for whole, part in zip(sums_of(memory), found, strict=True):
        assert torch.equal(whole, part)


@pytest.mark.usefixtures("short")
def test_parts_of_another_length_would_add_in_another_order():
    """The test above sees orders: three blocks to a part are not those of the binary counter."""
    features = torch.randn(
        64, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    memory = make_records(task(), features, torch.ones(64))
    parted = make_stored_records(task(), blocks_of(features, torch.ones(64), 5))
    total = lambda records: (records.total(records.norms**3),)  # noqa: E731
    assert torch.equal(parted.sum(total)[0], memory.sum(total)[0])
    parted.part_rows = 6
    assert not torch.equal(parted.sum(total)[0], memory.sum(total)[0])


@pytest.mark.cases(1, 1)
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("place", [0, 7, 40])
@pytest.mark.parametrize("label", [1.0, -1.0])
def test_no_record_in_blocks_moves_a_gradient_by_more_than_planned(place, label):
    """A record that is added in front moves all others to other places in other parts."""
    plan = plan_noisy_gd(task(n=100), steps=3)
    row = torch.full((1, DIM), label * 1e6)
    features = torch.randn(40, DIM, generator=torch.Generator().manual_seed(2))
    signs = torch.ones(40)
    joined = torch.cat([features[:place], row, features[place:]])
    labels = torch.cat([signs[:place], torch.tensor([-label]), signs[place:]])
    most = 0.0
    for w in (
        torch.zeros(DIM + 1),
        torch.full((DIM + 1,), 30.0),
        torch.tensor([9.0, -3.0, 1.0, -40.0]),
    ):
        one, other = (
            build_objective(
                plan.task, plan.reg, make_stored_records(plan.task, blocks_of(*data, 9))
            ).value_and_gradient(w.double())[1]
            for data in ((features, signs), (joined, labels))
        )
        most = max(most, float(torch.linalg.vector_norm(one - other)))
    lipschitz = plan.task.lipschitz
    assert lipschitz is not None
    assert 0.9 * lipschitz <= most <= lipschitz * (1 + 1e-12)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("target", [1.0, -1.0])
def test_no_record_in_blocks_moves_a_clipped_sum_by_more_than_the_clip(target):
    given = task(loss=Squared(), bound_y=1.0, n=100)
    plan = plan_preconditioned_gd(given)
    features = torch.randn(30, DIM, generator=torch.Generator().manual_seed(3))
    extra = torch.cat([torch.full((1, DIM), 1e5), features])
    w = torch.full((DIM + 1,), -target * 1e4, dtype=torch.float64)
    sums = [
        plan.gradient(
            make_stored_records(given, blocks_of(rows, torch.full((len(rows),), target), 4)), w
        )
        for rows in (features, extra)
    ]
    moved = float(torch.linalg.vector_norm(sums[0] - sums[1]))
    assert 0.99 * plan.clip <= moved <= plan.clip * (1 + 1e-12)


@pytest.mark.usefixtures("short")
def test_a_first_guess_holds_every_step_th_record_of_all_parts(monkeypatch):
    features = torch.randn(50, DIM, generator=torch.Generator().manual_seed(4))
    parted = make_stored_records(task(), blocks_of(features, torch.ones(50), 11))
    memory = make_records(task(), features, torch.ones(50))
    for step in (3, 4, 16):
        assert torch.equal(parted.thinned(step).norms, memory.thinned(step).norms)
    assert parted.thinning(16) == 16
    monkeypatch.setattr(parts, "_SAMPLE_ENTRIES", 5)
    assert parted.thinned(parted.thinning(2)).count * parted.dim <= 5 + parted.dim


def test_what_needs_a_number_for_each_record_is_refused():
    records = make_stored_records(task(), blocks_of(torch.ones(4, DIM), torch.ones(4), 2))
    assert isinstance(records, PartedRecords)
    with pytest.raises(dp.errors.ConditionError, match="in memory"):
        records.scores(torch.zeros(DIM + 1, dtype=torch.float64))
