"""Rows of several parameters as one block: norms and sums are those of the blocks one by one, and certified."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rows.test_norms import DTYPES, assert_certified, rows, squares
from torch_dpsco.rows import FLOAT64, DenseBlock, FactoredBlock, Summation, plan_summation
from torch_dpsco.rows.blocks import _flat, joined

SHAPES = [(3,), (2, 1024), (), (5, 700), (1, 2048)]


def blocks(n: int, dtype: torch.dtype = torch.float32) -> list[DenseBlock]:
    generator = torch.Generator().manual_seed(n)
    return [
        DenseBlock(torch.randn(n, *shape, generator=generator).to(dtype)) for shape in SHAPES
    ]


def as_one(parts: list[DenseBlock]) -> DenseBlock:
    return DenseBlock(*(row for part in parts for row in part.rows))


@pytest.mark.weekly
@given(st.lists(rows(), min_size=1, max_size=4))
def test_joined_norms_are_never_below_the_exact_norm(parts):
    bound = float(DenseBlock(*(row[None] for row in parts)).norms())
    coarse = min((row.dtype for row in parts), key=lambda dtype: dtype == torch.float64)
    square, width = sum(squares(row.tolist()) for row in parts), sum(map(len, parts))
    if math.isinf(bound):  # of the coarser numbers, or of finer ones in a joint norm
        assert square >= 2**126
    else:
        assert_certified(bound, square, coarse, width)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_one_long_row(dtype):
    parts = blocks(4, dtype)
    flat = torch.cat(
        [row.flatten(1) if row.dim() > 1 else row[:, None] for row in as_one(parts).rows],
        dim=1,
    )
    for bound, row in zip(as_one(parts).norms().tolist(), flat, strict=True):
        assert_certified(bound, squares(row.tolist()), dtype, len(row))


@pytest.mark.cases(23, 7)
@pytest.mark.parametrize("n", [0, 1, 8, 9, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "precision", [FLOAT64, Summation(8, 8, 100, 200, 0.0)], ids=["float64", "float32"]
)
def test_sums_are_those_of_the_blocks_one_by_one(n, dtype, precision):
    parts = blocks(n, dtype)
    weights = torch.linspace(0.1, 1.0, n, dtype=torch.float64)
    exact = [
        (row.double().flatten(1) if n and row.dim() > 1 else None) for row in as_one(parts).rows
    ]
    for shape, total, row in zip(
        SHAPES, as_one(parts).weighted_sum(weights, precision), exact, strict=True
    ):
        assert total.shape == shape
        if row is not None:
            torch.testing.assert_close(
                total.double().flatten(), weights @ row, rtol=1e-5, atol=1e-5
            )


def test_the_error_of_a_sum_in_one_tile_is_within_the_plan():
    n, dim = 64, sum(math.prod(shape) for shape in SHAPES)
    parts, plan = blocks(n), plan_summation(n, dim)
    assert plan.vector_tile >= n  # so that float32 is used here
    norms = as_one(parts).norms()
    weights = 1.0 / norms  # clip 1
    sums = as_one(parts).weighted_sum(weights, plan)
    assert {total.dtype for total in sums} == {torch.float32}
    exact = [torch.einsum("b,b...->...", weights, row.double()) for row in as_one(parts).rows]
    error = math.hypot(
        *(float((a.double() - b).norm()) for a, b in zip(sums, exact, strict=True))
    )
    assert 2 * error <= plan.error


def test_only_dense_blocks_that_follow_each_other_are_joined():
    parts = blocks(2)
    factored = FactoredBlock(torch.ones(2, 3), torch.ones(2, 1))
    found = joined([parts[0], factored, *parts, factored, factored])
    assert [type(block) for block in found] == [
        DenseBlock,
        FactoredBlock,
        DenseBlock,
        FactoredBlock,
        FactoredBlock,
    ]
    assert all(map(torch.equal, found[0].dense(), parts[0].dense()))
    assert found[2].shapes == [torch.Size(shape) for shape in SHAPES]  # in their order
    assert [row.shape[0] for row in found[2].select(torch.tensor([1])).dense()] == [1] * len(
        parts
    )
    assert joined([factored]) == [factored]


def permuted(n: int) -> DenseBlock:
    """Rows of shape (3, 400, 2) with the last dimension outermost in memory, as those of convolutions are."""
    stored = torch.randn(n, 2, 3, 400, generator=torch.Generator().manual_seed(n))
    return DenseBlock(stored.permute(0, 2, 3, 1))


@pytest.mark.parametrize("n", [0, 1, 40])
@pytest.mark.parametrize(
    "precision",
    [FLOAT64, Summation(8, 8, 100, 200, 0.0), plan_summation(40, 2400)],
    ids=["float64", "tiles", "plan"],
)
def test_rows_in_another_order_of_memory_are_read_without_a_copy_and_summed_in_their_shape(
    n, precision
):
    block = permuted(n)
    if n:
        assert _flat(block.rows[0]).data_ptr() == block.rows[0].data_ptr()
    weights = torch.linspace(0.1, 1.0, n, dtype=torch.float64)
    exact = torch.einsum("b,b...->...", weights, block.rows[0].double())
    for each in (block, as_one([*blocks(n), block])):
        total = each.weighted_sum(weights, precision)[-1]
        assert total.is_contiguous()
        torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)
