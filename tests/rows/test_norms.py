"""Norms of rows are upper bounds, and close ones: compared with rational arithmetic, which does not round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from torch_dpsco.rows import (
    FLOAT64,
    DenseBlock,
    FactoredBlock,
    GradBatch,
    Summation,
    input_factors,
    row_norms,
)

pytestmark = pytest.mark.usefixtures("arithmetic")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ABOVE = {
    torch.float32: 1.3e-4,
    torch.float64: 2e-12,
}  # largest relative distance from the exact norm
HIDDEN = {
    torch.float32: Fraction(2) ** -63,
    torch.float64: Fraction(2) ** -511,
}  # what a coordinate can add besides
LARGE = {torch.float32: 2.0**64, torch.float64: 2.0**512}  # beyond, squares overflow


def working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def squares(values: Iterable[float]) -> Fraction:
    return sum((Fraction(v) ** 2 for v in values), Fraction(0))


def root(square: Fraction) -> Fraction:
    """The square root, rounded up to a multiple of 2^-600."""
    return Fraction(math.isqrt(math.ceil(square * 2**1200)) + 1, 2**600)


def assert_certified(bound: float, square: Fraction, dtype: torch.dtype, width: int) -> None:
    """The bound is at least the root of `square` and not far above; inf only where squares overflow."""
    dtype = working(dtype)
    if math.isinf(bound):
        assert square * 2 >= Fraction(LARGE[dtype]) ** 2
        return
    assert Fraction(bound) ** 2 >= square
    hidden = HIDDEN[dtype] * (1 + Fraction(2) ** -11)  # subnormal squares are rounded too
    allowed = (1 + Fraction(ABOVE[dtype])) * root(square) + hidden * root(Fraction(width))
    assert Fraction(bound) <= allowed * (1 + Fraction(2) ** -40)


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """A row of any precision, with numbers of all magnitudes, subnormal ones included, up to 4100 wide."""
    dtype = draw(st.sampled_from(DTYPES))
    info = torch.finfo(dtype)
    low, high = math.frexp(info.smallest_normal * info.eps)[1] - 1, math.frexp(info.max)[1] - 1
    middle = draw(st.integers(low, high))
    spread = draw(st.sampled_from([0, 3, 30, 3000]))
    exponents = st.integers(max(low, middle - spread), min(high, middle + spread))
    numbers = st.builds(
        lambda m, e, s: s * math.ldexp(m, e),
        st.floats(1.0, 1.99),
        exponents,
        st.sampled_from([-1, 1]),
    )
    values = draw(st.lists(numbers | st.just(0.0), min_size=1, max_size=12))
    row = torch.tensor(values, dtype=torch.float64).clamp(-info.max, info.max).to(dtype)
    return row.repeat(draw(st.sampled_from([1, 1, 2, 100, 342])))


@pytest.mark.cases(0, 1)
@given(rows())
def test_norms_are_never_below_the_exact_norm(row):
    square = squares(row.tolist())
    assert_certified(float(row_norms(row[None])), square, row.dtype, len(row))
    assert_certified(float(DenseBlock(row.view(1, -1, 1)).norms()), square, row.dtype, len(row))


@pytest.mark.cases(19, 9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 100, 1025])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-3, 1.0, 1e4, 1e15])
def test_factors_of_inputs_and_a_bias_are_never_below_the_exact_norm(dtype, width, size):
    generator = torch.Generator().manual_seed(width)
    rows = torch.cat([torch.randn(4, width, generator=generator), torch.ones(2, width)]).double()
    rows[4:] *= 1.0 + 2.0**-12
    acts = (rows * size / math.sqrt(width)).to(dtype)
    factors = input_factors(acts, bias=True)
    assert factors.dtype == torch.float64
    for row, bound in zip(acts, factors.tolist(), strict=True):
        if not torch.isfinite(row).all():
            assert not math.isfinite(bound)
            continue
        square = squares(row.tolist()) + 1
        assert square <= Fraction(bound) ** 2 <= square * (1 + Fraction(1, 5000)) ** 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_factors_of_rows_that_must_not_count_are_not_finite(value):
    factors = input_factors(torch.tensor([[value, 1.0, 0.0], [1.0, 1.0, 0.0]]), bias=True)
    assert [math.isfinite(factor) for factor in factors.tolist()] == [False, True]


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [10_000_000, 9_999_999])
def test_ten_million_equal_coordinates_are_not_lost(dtype, width):
    # one float32 accumulator stops growing at 2^24 equal terms, and errs by 8e-3 here
    for value in (1.0, 1.9990234375, 3e-5):
        row = torch.full((1, width), value, dtype=dtype)
        assert_certified(
            float(row_norms(row)), width * Fraction(row[0, 0].item()) ** 2, dtype, width
        )


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 1023, 1024, 1025, 2047, 2048, 5000])
def test_random_rows_of_every_width_are_certified(dtype, width):
    generator = torch.Generator().manual_seed(width)
    block = torch.randn(8, width, generator=generator, dtype=torch.float64)
    block[4:] *= torch.logspace(-4, 4, width, dtype=torch.float64)  # sorted magnitudes
    for row, bound in zip(block.to(dtype), row_norms(block.to(dtype)).tolist(), strict=True):
        assert_certified(bound, squares(row.tolist()), dtype, width)


@contextmanager
def flushed_subnormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flushed", [False, True])
def test_what_underflows_is_covered(dtype, flushed):
    info = torch.finfo(dtype)
    for value in (
        info.smallest_normal * info.eps,
        info.smallest_normal / 2,
        info.smallest_normal,
        info.tiny**0.5 / 2,
    ):
        row = torch.full((1, 3000), value, dtype=dtype)
        square = 3000 * Fraction(row[0, 0].item()) ** 2
        if flushed:
            with flushed_subnormals():
                bound = row_norms(row)
        else:
            bound = row_norms(row)
        assert_certified(float(bound), square, dtype, 3000)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("width", [3, 5000])
def test_a_row_with_a_non_finite_entry_has_no_finite_norm(bad, width):
    for dtype in DTYPES:
        block = torch.ones(2, width, dtype=dtype)
        block[1, width - 1] = bad
        assert torch.isfinite(row_norms(block)).tolist() == [True, False]
        assert GradBatch([DenseBlock(block)]).norms().isfinite().tolist() == [True, False]
        for acts, backprops in (
            (block, torch.ones(2, 2, dtype=dtype)),
            (torch.zeros(2, 2, dtype=dtype), block),
        ):
            factored = FactoredBlock(acts, backprops, bias=acts is not block)
            assert GradBatch([factored]).norms().isfinite().tolist() == [True, False]


def test_an_overflowing_norm_is_infinite_and_not_wrong():
    assert row_norms(torch.tensor([[3e38, 3e38], [1e18, 1e18]])).isinf().tolist() == [
        True,
        False,
    ]
    assert row_norms(
        torch.tensor([[1e300, 0.0], [1e150, 0.0]], dtype=torch.float64)
    ).isinf().tolist() == [True, False]


def test_a_row_without_coordinates_has_norm_zero():
    assert row_norms(torch.zeros(2, 0)).tolist() == [0.0, 0.0]
    assert row_norms(torch.zeros(0, 7)).shape == (0,)
    assert row_norms(torch.zeros(0, 5000)).shape == (0,)


@pytest.mark.cases(0, 1)
@given(rows(), rows(), st.booleans(), st.booleans())
@example(
    torch.tensor([2.0**-26, 0.0]), torch.tensor([-1.0]), True, True
)  # |a|^2 is a rounding of 1
def test_factored_norms_are_never_below_the_exact_norm(acts, backprops, weight, bias):
    if not weight and not bias:
        return
    block = FactoredBlock(acts[None], backprops[None], weight=weight, bias=bias)
    bound = float(block.norms())
    exact = squares(backprops.tolist()) * (weight * squares(acts.tolist()) + bias)
    assert not math.isnan(bound)
    assert math.isinf(bound) or Fraction(bound) ** 2 >= exact


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factored_norms_are_close(dtype):
    generator = torch.Generator().manual_seed(1)
    acts, backprops = (torch.randn(20, k, generator=generator, dtype=dtype) for k in (1500, 40))
    bounds = FactoredBlock(acts, backprops).norms()
    for a, b, bound in zip(acts.tolist(), backprops.tolist(), bounds.tolist(), strict=True):
        exact = math.sqrt(squares(b) * (squares(a) + 1))
        assert exact <= bound <= exact * (1 + 2 * ABOVE[dtype])


@pytest.mark.cases(0, 1)
@given(rows(), rows(), st.integers(2, 5000))
def test_norms_of_scaled_factors_are_never_below_the_exact_norm(acts, backprops, scale):
    bound = float(FactoredBlock(acts[None], backprops[None], scale=scale).norms())
    exact = scale**2 * squares(backprops.tolist()) * (squares(acts.tolist()) + 1)
    assert math.isinf(bound) or Fraction(bound) ** 2 >= exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaled_factors_are_those_of_scaled_rows(dtype):
    generator = torch.Generator().manual_seed(3)
    acts, backprops = (torch.randn(20, k, generator=generator, dtype=dtype) for k in (50, 40))
    index, weights = (
        torch.tensor([7, 3, 11]),
        torch.tensor([0.5, 0.25, 1.0], dtype=torch.float64),
    )
    scaled, whole = FactoredBlock(acts, backprops, scale=48), FactoredBlock(acts, 48 * backprops)
    torch.testing.assert_close(scaled.norms(), whole.norms(), rtol=1e-6, atol=0.0)
    for one, other in zip(scaled.dense(), whole.dense(), strict=True):
        assert torch.equal(one, other)
    for precision in (FLOAT64, Summation(2, 2, 100, 200, 0.0)):
        sums = (
            block.select(index).weighted_sum(weights, precision) for block in (scaled, whole)
        )
        for one, other in zip(*sums, strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.cases(0, 1)
@given(st.lists(rows(), min_size=1, max_size=6))
def test_joint_norms_of_blocks_are_never_below_the_exact_norm(parts):
    bound = float(GradBatch([DenseBlock(part[None]) for part in parts]).norms())
    exact = sum((squares(part.tolist()) for part in parts), Fraction(0))
    assert not math.isnan(bound)
    assert math.isinf(bound) or Fraction(bound) ** 2 >= exact


@pytest.mark.weekly
def test_many_blocks_have_the_norm_of_their_rows_joined():
    generator = torch.Generator().manual_seed(2)
    parts = [torch.randn(5, k, generator=generator) for k in (1, 10, 2000, 3, 64) * 40]
    joined = [math.sqrt(squares(row)) for row in torch.cat(parts, dim=1).tolist()]
    bounds = GradBatch([DenseBlock(part) for part in parts]).norms().tolist()
    for exact, bound in zip(joined, bounds, strict=True):
        assert exact <= bound <= exact * (1 + ABOVE[torch.float32])
