"""Weighted sums err by no more than `plan_summation` says: compared with integer arithmetic, which does not round.

What counts is the difference of two neighboring sums, since that is what the sensitivity must cover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.problems import released
from torch_dpsco.rows import DenseBlock, FactoredBlock, GradBatch, Summation, plan_summation
from torch_dpsco.step.oracle import Clipped, clip_weights

pytestmark = pytest.mark.usefixtures("arithmetic")
SCALE = 2.0**300  # all numbers here are multiples of 2^-300
ELEMENTS = 2**17 + 2**13  # of a batch: enough for float32 to be planned
BATCHES = [8, 64, 512, 4096]


def integers(values: Tensor) -> np.ndarray:
    """Returns values * SCALE as Python integers."""
    scaled = values.double().numpy() * SCALE
    assert np.all(scaled == np.floor(scaled))
    return np.vectorize(int, otypes=[object])(scaled)


def length(numerators: np.ndarray, factors: int = 2) -> float:
    """Returns the L2 norm of numerators / SCALE^factors."""
    return math.sqrt(math.fsum((n / int(SCALE) ** factors) ** 2 for n in numerators.ravel()))


# -- adversarial rows: (m, d) of norm about 1 -------------------------------------------------------------------------


def all_equal(m: int, d: int) -> Tensor:
    # every partial sum is rounded in the same direction, coordinate by coordinate
    return torch.full((m, d), 1.0000077 / math.sqrt(d))


def alternating(m: int, d: int) -> Tensor:
    signs = torch.where(torch.arange(m) % 2 == 0, 1.0, -1.0)
    return all_equal(m, d) * signs[:, None] * torch.linspace(0.5, 1.5, d)


def halves(m: int, d: int) -> Tensor:
    # the sum climbs to m/2 and comes back to 0: the largest partial sums for the least result
    return all_equal(m, d) * torch.where(torch.arange(m) < m // 2, 1.0, -1.0)[:, None]


def growing(m: int, d: int) -> Tensor:
    return all_equal(m, d) * torch.logspace(-6, 0, m)[:, None]


def shrinking(m: int, d: int) -> Tensor:
    return growing(m, d).flip(0)


def huge(m: int, d: int) -> Tensor:
    # far past the clip, so that the weights do not round to 1
    return torch.randn(m, d, generator=torch.Generator().manual_seed(m)) * 1e5


ROWS = [all_equal, alternating, halves, growing, shrinking, huge]


def neighbors(rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yields one row and the positions of the others; those after it move up by one, and so between the tiles."""
    for missing in (0, rows // 2, rows - 1):
        yield missing, torch.cat([torch.arange(missing), torch.arange(missing + 1, rows)])


def dense(rows: Tensor) -> Callable[[Tensor], GradBatch]:
    return lambda index: GradBatch([DenseBlock(rows[index])])


def outer(acts: Tensor, backprops: Tensor) -> Callable[[Tensor], GradBatch]:
    return lambda index: GradBatch([FactoredBlock(acts[index], backprops[index], bias=False)])


def vector(rows: Tensor) -> Callable[[int], np.ndarray]:
    return lambda i: integers(rows[i]) * int(SCALE)


def product(acts: Tensor, backprops: Tensor) -> Callable[[int], np.ndarray]:
    return lambda i: integers(backprops[i])[:, None] * integers(acts[i])[None]


def largest_error(
    batch: Callable[[Tensor], GradBatch], row: Callable[[int], np.ndarray], plan: Summation
) -> float:
    """Returns the largest error of the difference of neighboring sums at clip 1.

    Args:
        batch: the batch of the rows at some positions.
        row: one of its rows, times SCALE^2.
        plan: precision; also of that many rows.
    """
    everyone = batch(torch.arange(plan.rows))
    weights = clip_weights(everyone.norms(), 1.0)
    [total] = everyone.weighted_sum(weights, plan.for_rows(plan.rows))
    errors = []
    for missing, index in neighbors(plan.rows):
        [fewer] = batch(index).weighted_sum(weights[index], plan.for_rows(len(index)))
        moved = (integers(total) - integers(fewer)) * int(SCALE) ** 2
        errors.append(
            length(moved - row(missing) * integers(weights[missing : missing + 1])[0], factors=3)
        )
    return max(errors)


def test_the_sum_of_a_narrow_layer_moves_by_what_is_declared():
    # Of 903 rows of a 784-2 layer 512 lead to the edge of a binade, where the others oscillate: beyond it, where one
    # row more leads, each is rounded up by nearly half a unit in the last place, before it hardly at all. A kernel
    # that adds product after product to the total sums these errors: 1.0117 clips.
    batch_size, unit = 680, 2.0**-14
    step = (round(0.8 / unit) + 0.5) * unit
    first, others = [4095 / 4096] * 512, [-(step - unit / 64), step + unit / 64] * 196

    def mean(slopes):
        oracle = Clipped(clip=float(batch_size), noise_multiplier=0.0, batch_size=batch_size)
        acts, backprops = torch.zeros(len(slopes), 784), torch.zeros(len(slopes), 2)
        acts[:, 0], backprops[:, 0] = 1.0, torch.tensor(slopes) * batch_size
        rows = GradBatch([FactoredBlock(acts, backprops, bias=False)])
        return released(oracle, [torch.zeros(2, 784)], [rows]), oracle.sensitivity("add_remove")

    fewer, _ = mean(first + others[:391])
    more, declared = mean([4095 / 4096, *first, *others[:391]])
    assert 0.99 < float(torch.linalg.vector_norm(more - fewer)) <= declared


def float64_error(rows: int) -> float:
    """Twice rows * (1024 + rows) roundings: the bound of float64 sums without what mean losses add."""
    return 2.0 * (1024 + rows) * rows * 2.0**-53


def plan_for(batch_size: int) -> tuple[Summation, int]:
    dim = ELEMENTS // batch_size
    return plan_summation(batch_size, dim), dim


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("batch_size", BATCHES)
@pytest.mark.parametrize("make", ROWS)
def test_float32_sums_of_vectors_err_by_at_most_what_is_claimed(batch_size, make):
    plan, dim = plan_for(batch_size)
    assert plan.vector_tile
    rows = make(plan.rows, dim)
    error = largest_error(dense(rows), vector(rows), plan)
    assert error <= plan.error
    assert error > 0  # float32 was used


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("batch_size", [8, 64, 512, 4096])
@pytest.mark.parametrize("make", ROWS)
def test_float32_sums_of_outer_products_err_by_at_most_what_is_claimed(
    batch_size, make, arithmetic
):
    dim, in_c = ELEMENTS // batch_size, arithmetic == "C"
    plan = plan_summation(batch_size, dim, vectors=not in_c, in_c=in_c)
    assert bool(plan.matrix_tile) is (in_c or batch_size < 4096)
    if not plan.matrix_tile:
        return
    acts, backprops = (
        make(plan.rows, dim // 16),
        torch.linspace(0.1, 0.4, 16).repeat(plan.rows, 1),
    )
    error = largest_error(outer(acts, backprops), product(acts, backprops), plan)
    assert 0 < error <= plan.error


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("batch_size", [8, 64, 512])
@pytest.mark.parametrize("make", ROWS)
def test_float32_sums_of_the_rows_of_a_bias_err_by_at_most_what_is_claimed(batch_size, make):
    plan, dim = plan_for(batch_size)
    rows = make(plan.rows, dim)

    def bias(index: Tensor) -> GradBatch:
        return GradBatch([FactoredBlock(rows[index, :1], rows[index], weight=False)])

    assert 0 < largest_error(bias, vector(rows), plan) <= plan.error


@pytest.mark.cases(4, 2)
@pytest.mark.parametrize("batch_size", [64, 4096])
@pytest.mark.parametrize("make", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float64_sums_err_by_at_most_what_is_claimed(batch_size, make, dtype):
    plan, dim = plan_for(batch_size)
    plan = Summation(0, 0, plan.rows, plan.max_rows, plan.error)
    rows = make(plan.rows, dim).to(dtype) * (1 + 2.0**-30)
    assert largest_error(dense(rows), vector(rows), plan) <= float64_error(plan.rows)
    acts, backprops = rows[:, :50], rows[:, 50 : 50 + 7]
    error = largest_error(outer(acts, backprops), product(acts, backprops), plan)
    assert error <= float64_error(plan.rows)


@pytest.mark.parametrize("make", ROWS)
def test_what_c_cannot_read_is_summed_in_float64_where_its_tiles_are_planned(make):
    """They would be too large for sums of torch."""
    plan = plan_summation(4096, 160, in_c=True)
    assert plan.matrix_tile
    acts, backprops = make(plan.rows, 10), torch.linspace(0.1, 0.4, 16).repeat(plan.rows, 1)

    def strided(index: Tensor) -> GradBatch:
        return GradBatch(
            [FactoredBlock(acts[index].T.contiguous().T, backprops[index], bias=False)]
        )

    assert largest_error(strided, product(acts, backprops), plan) <= float64_error(plan.rows)


def test_float64_rows_are_never_summed_in_float32():
    plan, dim = plan_for(64)
    rows = all_equal(plan.rows, dim).double() * (1 + 2.0**-30)
    assert plan.vector_tile
    assert plan.matrix_tile
    assert largest_error(dense(rows), vector(rows), plan) <= float64_error(plan.rows)
    acts, backprops = rows[:, :500], rows[:, 500:516]
    error = largest_error(outer(acts, backprops), product(acts, backprops), plan)
    assert error <= float64_error(plan.rows)


@pytest.mark.cases(0, 1)
def test_single_sums_are_within_half_of_the_claim_of_the_exact_sum():
    plan, dim = plan_for(512)
    for make in (all_equal, halves, huge):
        rows = make(plan.rows, dim)
        weights = clip_weights(GradBatch([DenseBlock(rows)]).norms(), 1.0)
        [total] = GradBatch([DenseBlock(rows)]).weighted_sum(weights, plan)
        error = integers(total) * int(SCALE) - integers(weights) @ integers(rows)
        assert length(error) <= plan.error / 2


def test_the_claim_is_one_that_a_careless_sum_would_break():
    plan, dim = plan_for(512)
    rows = all_equal(plan.rows, dim)
    weights = clip_weights(GradBatch([DenseBlock(rows)]).norms(), 1.0)
    total = torch.zeros(dim, dtype=torch.float16)
    for row, weight in zip(rows, weights, strict=True):
        total += (weight * row).half()
    assert length(integers(total) * int(SCALE) - integers(weights) @ integers(rows)) > plan.error


# -- when float32 is used ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 7, 64, 500, 4096, 10**5, 10**7])
@pytest.mark.parametrize("dim", [1, 100, 10**4, 10**8])
def test_every_plan_costs_little_and_covers_more_rows_than_expected(batch_size, dim):
    plan = plan_summation(batch_size, dim)
    assert plan.rows >= batch_size + 8 * math.isqrt(batch_size)
    assert plan.max_rows >= 2 * batch_size + 2**16
    assert float64_error(plan.max_rows) <= plan.error
    # what float64 sums and the rounding of 1/B in mean losses cost, and 2^-7
    mean_loss = 8 * 2.0**-24 * (2 * batch_size + 1024)
    assert plan.error <= 2.0**-7 + (float64_error(plan.max_rows) + mean_loss) * (1 + 1e-9)
    for tile in {plan.vector_tile, plan.matrix_tile} - {0}:
        assert 2 * (tile + 3) * plan.rows * 2.0**-24 <= 2.0**-7


@pytest.fixture(params=["high", "medium"])
def fast_products(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision(before)


def test_float32_is_not_used_where_its_products_are_inexact(fast_products):
    plan, dim = plan_for(64)
    assert plan.vector_tile
    used = plan.for_rows(1)
    assert (used.vector_tile, used.matrix_tile) == (0, 0)
    rows = all_equal(plan.rows, dim)
    assert largest_error(dense(rows), vector(rows), plan) <= float64_error(plan.rows)


def test_float32_is_not_used_for_more_rows_than_planned():
    plan, _ = plan_for(64)
    assert plan.for_rows(plan.rows) is plan
    for rows in (plan.rows + 1, 10**9):
        used = plan.for_rows(rows)
        assert (used.vector_tile, used.matrix_tile, used.error) == (0, 0, plan.error)


@pytest.mark.parametrize("extra", [0, 1, 100])
def test_chunks_that_pass_the_planned_rows_stay_within_the_claim(extra):
    plan, dim = plan_for(64)
    rows, query = huge(plan.rows + extra, dim), [torch.zeros(dim)]
    oracle = Clipped(1.0, 0.0, batch_size=64)

    def mean(part: Tensor) -> Tensor:
        return released(
            oracle, query, [GradBatch([DenseBlock(chunk)]) for chunk in part.split(50)]
        )

    weights = clip_weights(GradBatch([DenseBlock(rows)]).norms(), 1.0)
    for missing, index in neighbors(len(rows)):
        exact = weights[missing] * rows[missing].double() / 64
        error = torch.linalg.vector_norm(mean(rows) - mean(rows[index]) - exact)
        assert error <= oracle.sensitivity("add_remove") - 1 / 64
        assert oracle.sensitivity("add_remove") <= (1 + plan.error) / 64


@pytest.mark.cases(0, 1)
def test_a_clip_outside_of_the_range_of_float32_is_summed_in_float64(arithmetic):
    plan, dim = plan_for(64)
    rows = all_equal(plan.rows, dim)
    for clip, in_float32 in ((1.0, True), (2.0**-29, True), (2.0**-30, False), (2.0**41, False)):
        scaled = rows * min(clip, 2.0**41)
        oracle = Clipped(clip, 0.0, batch_size=64)
        mean = released(oracle, [torch.zeros(dim)], [GradBatch([DenseBlock(scaled)])])
        weights = clip_weights(GradBatch([DenseBlock(scaled)]).norms(), clip) / 64
        exact = integers(weights) @ integers(scaled)
        error = length(integers(mean) * int(SCALE) - exact)
        assert (error > 1e-9 * clip) is (in_float32 and arithmetic == "torch")


def test_weights_below_the_normal_numbers_of_float32_count_as_zero():
    block = DenseBlock(torch.tensor([[3.0], [5.0], [7.0], [math.inf]]))
    weights = torch.tensor(
        [2.0**-127, 2.0**-126, 1.0 - 2.0**-53, 2.0**-127], dtype=torch.float64
    )
    [total] = GradBatch([block]).weighted_sum(weights)
    assert total.tolist() == [5 * 2.0**-126 + 7 * (1.0 - 2.0**-53)]
    weights[2] = 0.0
    assert GradBatch([block]).weighted_sum(weights)[0].tolist() == [5 * 2.0**-126]
    assert GradBatch([block]).weighted_sum(torch.zeros(4, dtype=torch.float64))[0].tolist() == [
        0.0
    ]


def test_few_numbers_are_summed_in_float64_whatever_the_plan():
    rows = all_equal(16, 100)
    plan = Summation(8, 8, 16, 16, 1.0)
    assert largest_error(dense(rows), vector(rows), plan) <= float64_error(16)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("batch_size", [64, 512, 4096])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 1e-3, 0.0])
@pytest.mark.parametrize("make", [all_equal, halves, huge])
def test_short_rows_are_summed_in_larger_tiles_within_the_claim(make, share, batch_size):
    plan, dim = plan_for(batch_size)
    rows = make(plan.rows, dim)
    norms = GradBatch([DenseBlock(rows)]).norms()
    weights = clip_weights(norms, 1.0) * share
    mean_norm = (
        math.fsum((weights * norms).tolist()) / plan.rows
    )  # sums of other orders may round to above the share
    assert mean_norm <= max(share, 1e-9)
    used = plan.for_rows(plan.rows, mean_norm)
    assert used.vector_tile >= plan.vector_tile
    assert used.error == plan.error
    if 0 < share <= 0.1:
        assert used.vector_tile > plan.vector_tile
    [total] = GradBatch([DenseBlock(rows)]).weighted_sum(weights, used)
    error = integers(total) * int(SCALE) - integers(weights) @ integers(rows)
    assert length(error) <= plan.error / 2
    acts, backprops = rows[:, : dim // 16], torch.linspace(0.1, 0.4, 16).repeat(plan.rows, 1)
    [total] = GradBatch([FactoredBlock(acts, backprops, bias=False)]).weighted_sum(weights, used)
    exact = sum(
        integers(weights[i : i + 1])[0]
        * integers(backprops[i])[:, None]
        * integers(acts[i])[None]
        for i in range(plan.rows)
    )
    if used.matrix_tile:
        assert length(integers(total) * int(SCALE) ** 2 - exact, factors=3) <= plan.error / 2


@pytest.mark.parametrize("mean_norm", [1.0, 1.5, math.nan, math.inf, -1.0])
def test_a_mean_norm_that_says_nothing_leaves_the_planned_tiles(mean_norm):
    plan, _ = plan_for(512)
    assert plan.for_rows(plan.rows, mean_norm) is plan


@pytest.mark.parametrize("batch_size", [64, 512, 4096, 10**5])
@pytest.mark.parametrize("mean_norm", [0.9, 0.5, 0.2, 0.01, 1e-6])
def test_chains_are_longer_by_no_more_than_rows_are_shorter(batch_size, mean_norm):
    plan = plan_summation(batch_size, 10**4)
    used = plan.for_rows(1, mean_norm)
    for tile, chain in (
        (used.vector_tile, used.vector_tile + 3),
        (used.matrix_tile, used._matrix_chain(used.matrix_tile or 1)),
    ):
        if tile:
            assert 2 * chain * 2.0**-24 * plan.rows * mean_norm <= plan.error
