"""Neighbor counts: exact functions of pairs of rows, whatever the tiles; sums of rows by user."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from torch_dpsco.rows import (
    DenseBlock,
    FactoredBlock,
    GradBatch,
    batch,
    neighbors,
)
from torch_dpsco.rows.neighbors import neighbor_counts

UNIT = Fraction(1, 2**53)


def counts(rows, radius):
    return neighbor_counts(rows, radius)


def exact_counts(rows, radius: Fraction):
    """The definition in rational arithmetic; rows that are not finite are on their own."""
    table = [
        [Fraction(v) for v in row] if all(map(math.isfinite, row)) else None
        for row in rows.double().tolist()
    ]

    def near(first, second):
        return sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) <= radius**2

    return [
        1
        if first is None
        else sum(second is not None and near(first, second) for second in table)
        for first in table
    ]


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(neighbors, "_TILE", 4)
    monkeypatch.setattr(neighbors, "_WIDTH", 3)
    monkeypatch.setattr(neighbors, "_PAIRS", 2)


lattice = st.integers(-6, 6).map(float)
special = st.sampled_from([math.nan, math.inf, -math.inf, 1e300, -3e38, 0.0])


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 11),
    st.integers(1, 7),
    st.sampled_from([1, 3, 5, 13]),
    st.integers(-40, 40),
    st.data(),
)
def test_ties_at_the_radius_count_as_in_exact_arithmetic(n, dim, radius, power, data):
    # integers times a power of 2: squares and sums are exact, and many distances are the radius itself
    value = st.one_of(
        lattice.map(lambda v: math.ldexp(v, power)),
        lattice.map(lambda v: math.ldexp(v, power)),
        special,
    )
    table = data.draw(
        st.lists(st.lists(value, min_size=dim, max_size=dim), min_size=n, max_size=n)
    )
    rows = torch.tensor(table, dtype=torch.float64)
    rows[rows.abs() > 1e60] = math.inf
    tau = math.ldexp(float(radius), power)
    for tile in (1024, 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(neighbors, "_TILE", tile)
            patch.setattr(neighbors, "_WIDTH", tile)
            assert counts(rows, tau).tolist() == exact_counts(rows, Fraction(tau))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.integers(1, 6), st.floats(0, 1e3), st.integers(0, 2**31))
def test_counts_are_those_of_the_radius_up_to_rounding_of_the_sum(n, dim, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(n, dim, dtype=torch.float64, generator=generator)
    # all about at the radius from the first, where a Gram matrix of float64 cannot tell
    rows = offset + directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    rows[0] = offset
    found = counts(rows, 1.0).tolist()
    slack = (dim + 7) * UNIT
    low, high = exact_counts(rows, 1 - slack), exact_counts(rows, 1 + slack)
    assert all(a <= b <= c for a, b, c in zip(low, found, high, strict=True))


def tied(n, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(n, dim, dtype=torch.float64, generator=generator)
    rows = 700.0 + directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    rows[: n // 5] = 700.0
    return rows


@pytest.mark.weekly
def test_counts_do_not_depend_on_the_places_of_rows(small_tiles):
    rows = tied(40, 5)
    expected = counts(rows, 1.0)
    for seed in range(20):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(counts(rows[order], 1.0), expected[order])


@pytest.mark.weekly
def test_counts_do_not_depend_on_tiles():
    rows = tied(60, 7)
    whole = counts(rows, 1.0)
    assert len(set(whole.tolist())) > 5  # rounding decides many of these ties
    for tile, width, pairs in ((1, 1, 1), (7, 2, 3), (59, 7, 100), (64, 5, 8)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(neighbors, "_TILE", tile)
            patch.setattr(neighbors, "_PAIRS", pairs)
            assert torch.equal(counts(rows, 1.0), whole)
            patch.setattr(neighbors, "_WIDTH", width)
            again = counts(rows, 1.0)
            patch.setattr(neighbors, "_TILE", 1024)
            assert torch.equal(counts(rows, 1.0), again)


@pytest.mark.slow
def test_ties_are_decided_by_the_two_rows_alone():
    def verdicts_agree():
        rows = tied(30, 6)
        whole = counts(rows, 1.0)
        pairs = sum(counts(rows[[j, k]], 1.0) - 1 for j in range(30) for k in range(j)).sum()
        return int(whole.sum()) - 30 == int(pairs)

    assert verdicts_agree()
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # without it, the Gram matrix is at the mercy of its rounding
        patch.setattr(neighbors, "_decide", lambda *args: None)
        assert not verdicts_agree()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e308, -1.0, 0.5, 700.0])
def test_replacing_or_removing_a_row_moves_other_counts_by_at_most_one(value):
    rows = tied(25, 4)
    other = rows.clone()
    other[3] = value
    before, after = counts(rows, 1.0), counts(other, 1.0)
    others = torch.arange(25) != 3
    assert (before - after)[others].abs().max() <= 1
    alone = counts(rows[others], 1.0)
    assert set((before[others] - alone).tolist()) <= {0, 1}


def test_rows_that_are_not_finite_are_their_own_only_neighbor():
    rows = torch.tensor(
        [
            [0.0, 0.0],
            [math.nan, 0.0],
            [math.inf, 0.0],
            [math.inf, 0.0],
            [0.0, 1.0],
            [1e200, 1e200],
        ]
    )
    for dtype in (torch.float32, torch.float64):
        assert counts(rows.to(dtype), 1.0).tolist() == [2, 1, 1, 1, 2, 1]
        near = neighbors.within(rows.to(dtype), 2.0)
        assert near.tolist() == [True, False, False, False, True, False]
    assert counts(torch.zeros(0, 3), 1.0).shape == (0,)


def test_subnormal_and_huge_distances_are_compared_without_overflow():
    rows = torch.tensor(
        [[0.0], [5e-324], [1e-160], [3e38], [-3e38], [1e69]], dtype=torch.float64
    )
    assert counts(rows, 1e-60).tolist() == [3, 3, 3, 1, 1, 1]
    assert counts(rows, 1e39).tolist() == [5, 5, 5, 5, 5, 1]
    assert counts(torch.full((3, 5), 1e-200, dtype=torch.float64), 1e60).tolist() == [3, 3, 3]


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        known = {
            tensor.untyped_storage().data_ptr()
            for tensor in args
            if isinstance(tensor, torch.Tensor)
        }
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage().data_ptr() not in known
            ):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("dim", [3, 2000])
def test_memory_is_that_of_tiles_and_not_of_pairs_or_rows(dim):
    rows = torch.randn(2500, dim, generator=torch.Generator().manual_seed(0)) + 1
    rows[:50] = rows[0]
    spy = LargestTensor()
    with spy:
        neighbor_counts(rows, 1.0)
    assert spy.numel <= 2 * 1024 * 1026


# -- sums by user -----------------------------------------------------------------------------------------------------


def batch_of(rows):
    return GradBatch([DenseBlock(rows)])


def sum_by(rows, users, n_users):
    """Returns the sums of the rows of each user, (n_users, D)."""
    sums = torch.zeros(n_users, sum(shape.numel() for shape in rows.shapes), device=users.device)
    rows.add_by(users, sums)
    return sums


def test_sums_by_user_are_those_of_a_loop():
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(20, 2, 3, generator=generator),
        torch.randn(20, 5, generator=generator),
    )
    users = torch.randint(7, (20,), generator=generator)
    sums = sum_by(GradBatch([DenseBlock(first), DenseBlock(second)], order=[1, 0]), users, 8)
    rows = torch.cat([second, first.reshape(20, 6)], dim=1)
    for user in range(8):
        torch.testing.assert_close(sums[user], rows[users == user].sum(0))


def test_sums_of_factored_rows_are_those_of_dense_ones():
    generator = torch.Generator().manual_seed(0)
    block = FactoredBlock(
        torch.randn(9, 4, generator=generator), torch.randn(9, 3, generator=generator)
    )
    users = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 0])
    dense = GradBatch(list(map(DenseBlock, block.dense())))
    assert torch.equal(sum_by(GradBatch([block]), users, 3), sum_by(dense, users, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_are_taken_in_the_precision_of_the_sum_and_unscaled(dtype):
    rows = torch.full((3000, 1), 3.0).to(dtype)
    assert (
        sum_by(batch_of(rows).unscaled(4.0), torch.zeros(3000, dtype=torch.int64), 1).item()
        == 2250.0
    )


def test_the_sum_of_a_user_depends_on_no_other_rows():
    rows = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    users = torch.randint(3, (300,), generator=torch.Generator().manual_seed(1))
    expected = sum_by(batch_of(rows), users, 3)[1]
    other = torch.where((users == 1)[:, None], rows, torch.tensor([math.nan, math.inf, 1e38]))
    alone = users == 1
    assert torch.equal(sum_by(batch_of(other), users, 3)[1], expected)
    assert torch.equal(sum_by(batch_of(rows[alone]), users[alone], 3)[1], expected)


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a device."""

    device = property(lambda self: torch.device("cuda"))


def test_rows_of_a_user_are_added_in_their_order(monkeypatch):
    """As on devices whose index_add_ has no order: turn by turn, no user twice in one."""
    rows = torch.randn(300, 3, generator=torch.Generator().manual_seed(0)).exp()
    users = (
        torch.randint(40, (300,), generator=torch.Generator().manual_seed(1)).square() % 40
    )  # of many or no rows
    sums = torch.zeros(40, 3)
    for turn in batch._turns(users):
        assert len(users[turn].unique()) == len(turn)
        sums[users[turn]] += rows[turn]
    assert torch.equal(sums, sum_by(batch_of(rows), users, 40))
    assert not list(batch._turns(users[:0]))
    monkeypatch.setattr(torch.Tensor, "index_add_", lambda *arguments: 1 / 0)
    there = torch.zeros(40, 3)
    batch._add_in_order(there, users, rows.as_subclass(Elsewhere))
    assert torch.equal(there, sums)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_sums_by_user_on_a_gpu_are_those_of_the_cpu():
    rows = torch.randn(3000, 3, generator=torch.Generator().manual_seed(0)).exp()
    users = torch.randint(40, (3000,), generator=torch.Generator().manual_seed(1))
    there = sum_by(batch_of(rows.cuda()), users.cuda(), 40)
    assert torch.equal(there.cpu(), sum_by(batch_of(rows), users, 40))


@pytest.mark.parametrize(
    "users",
    [
        torch.tensor([0, 3]),
        torch.tensor([-1, 0]),
        torch.tensor([0]),
        torch.tensor([0, 1], dtype=torch.int32),
    ],
)
def test_ids_out_of_range_are_refused(users):
    with pytest.raises(ValueError, match="users must be"):
        batch_of(torch.ones(2, 1)).add_by(users, torch.zeros(3, 1))
