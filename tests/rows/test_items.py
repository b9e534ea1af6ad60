"""Rows of embeddings by record and item: equal to dense rows, certified, and kept apart."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_dpsco.rows import FLOAT64, DenseBlock, GradBatch, ItemBlock, Summation, plan_summation
from torch_dpsco.rows.layers.kinds import coalesced

RECORDS, ITEMS, WIDTH = 6, 9, 3


def made(
    seed: int, uses: int = 20, dtype: torch.dtype = torch.float32
) -> tuple[ItemBlock, Tensor]:
    """Returns rows and the same rows as one tensor; record 4 and item 7 are never used."""
    generator = torch.Generator().manual_seed(seed)
    records = torch.tensor([0, 1, 2, 3, 5])[torch.randint(5, (uses,), generator=generator)]
    items = torch.randint(7, (uses,), generator=generator)
    vectors = torch.randn(uses, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    rows = torch.zeros(RECORDS, ITEMS, WIDTH, dtype=vectors.dtype).index_put(
        (records, items), vectors, accumulate=True
    )
    return coalesced(records, items, vectors, RECORDS, ITEMS), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("uses", [0, 1, 20, 200])
def test_rows_by_item_are_those_of_a_dense_block(dtype, uses):
    block, rows = made(uses, uses, dtype)
    dense = DenseBlock(rows)
    close = (
        {"rtol": 1e-12, "atol": 1e-12}
        if dtype == torch.float64
        else {"rtol": 1e-5, "atol": 1e-5}
    )
    assert block.shapes == dense.shapes
    assert len(block) == RECORDS
    torch.testing.assert_close(block.dense()[0], rows, **close)
    weights = torch.linspace(0.1, 1, RECORDS, dtype=torch.float64)
    torch.testing.assert_close(block.norms(), dense.norms(), rtol=2e-4, atol=1e-9)
    for index in (
        torch.arange(RECORDS),
        torch.tensor([5, 0, 3]),
        torch.tensor([4]),
        torch.arange(0),
    ):
        chosen, expected = block.select(index), dense.select(index)
        assert len(chosen) == len(index)
        torch.testing.assert_close(chosen.dense()[0], expected.dense()[0], **close)
        for ours, theirs in zip(
            chosen.weighted_sum(weights[index], FLOAT64),
            expected.weighted_sum(weights[index], FLOAT64),
            strict=True,
        ):
            assert ours.dtype == torch.float64
            torch.testing.assert_close(ours, theirs, **close)


@given(st.integers(0, 2**31), st.sampled_from([1e-44, 1e-20, 1.0, 1e18]), st.booleans())
def test_norms_of_items_are_never_below_the_exact_norm(seed, size, double):
    block, _ = made(seed, dtype=torch.float64 if double else torch.float32)
    block = ItemBlock(block.records, block.items, block.vectors * size, RECORDS, ITEMS)
    for row, bound in zip(
        block.dense()[0].double().flatten(1).tolist(), block.norms().tolist(), strict=True
    ):
        exact = sum((Fraction(v) ** 2 for v in row), Fraction(0))
        assert Fraction(bound) ** 2 >= exact
        hidden = (
            2.0**-62 * ITEMS if not double else 0.0
        )  # what may underflow in a square of float32
        assert bound <= math.sqrt(exact) * (1 + 2.0**-13) + hidden + 1e-150


def test_many_small_items_beside_a_large_one_count():
    # each square is less than half a unit of the sum, so that adding them one by one loses all of them
    n_items = 2**18
    vectors = torch.full((n_items, 1), 2.0**-27, dtype=torch.float64)
    vectors[0] = 1.0
    block = ItemBlock(
        torch.zeros(n_items, dtype=torch.int64), torch.arange(n_items), vectors, 1, n_items
    )
    exact = 1 + (n_items - 1) * Fraction(2) ** -54
    assert exact <= Fraction(float(block.norms())) ** 2 <= exact * (1 + Fraction(2) ** -33)


def test_sums_of_items_are_kept_in_float32_only_where_that_is_planned():
    block, rows = made(3)
    weights = torch.full((RECORDS,), 0.5, dtype=torch.float64)
    for plan, dtype in ((plan_summation(64, 10**5), torch.float32), (FLOAT64, torch.float64)):
        [total] = block.weighted_sum(weights, plan)
        assert total.dtype == dtype
        expected = torch.tensordot(weights, block.dense()[0].double(), 1)
        slack = 2.0**-24 if dtype == torch.float32 else 2.0**-48
        assert bool(((total.double() - expected).abs() <= slack * expected.abs()).all())
    [total] = made(3, dtype=torch.float64)[0].weighted_sum(weights, Summation(8, 8, 64, 64, 1.0))
    assert total.dtype == torch.float64
    assert rows.dtype == torch.float32


def test_users_see_the_rows_of_items():
    block, rows = made(5)
    users = torch.tensor([0, 1, 1, 0, 2, 2])
    sums = torch.zeros(3, ITEMS * WIDTH)
    GradBatch([block]).add_by(users, sums)
    torch.testing.assert_close(
        sums.view(3, ITEMS, WIDTH), torch.zeros(3, ITEMS, WIDTH).index_add(0, users, rows)
    )
