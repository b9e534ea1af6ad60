"""Norms and sums of rows that are left as sequences of factors: certified where they cancel, in rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_dpsco.rows import GradBatch, SequenceBlock, plan_summation
from torch_dpsco.rows import blocks as gram
from torch_dpsco.rows.blocks import CANCELLATION
from torch_dpsco.step.oracle import clip_weights

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def block(acts: Tensor, backprops: Tensor) -> SequenceBlock:
    return SequenceBlock(acts, backprops, torch.Size([backprops.shape[2], acts.shape[2]]))


def exact_row(acts: Tensor, backprops: Tensor) -> list[Fraction]:
    """Returns sum_t g_t a_t^T of one record, flat."""
    left, right = (
        [[Fraction(v) for v in time] for time in side.double().tolist()]
        for side in (backprops, acts)
    )
    out, width = backprops.shape[1], acts.shape[1]
    pairs = list(zip(left, right, strict=True))
    return [
        sum((g[o] * a[i] for g, a in pairs), Fraction(0))
        for o in range(out)
        for i in range(width)
    ]


def square(values: list[Fraction]) -> Fraction:
    return sum((v * v for v in values), Fraction(0))


def terms(acts: Tensor, backprops: Tensor) -> Tensor:
    """Returns sum_t |g_t| |a_t| of each record, up to rounding."""
    norms = [torch.linalg.vector_norm(side.double(), dim=2) for side in (acts, backprops)]
    return (norms[0] * norms[1]).sum(1)


def cancelling(
    seed: int, out: int = 3, width: int = 4, depth: int = 2, size: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns a record of 2^depth pairs that cancel up to 2^-23, once or twice: (1, T, in), (1, T, out)."""
    generator = torch.Generator().manual_seed(seed)
    a, g = (size * torch.randn(k, generator=generator) for k in (width, out))
    moved = 1 + 2.0**-23
    acts, backprops = [a, a], [g, -(g * moved)]
    if depth == 2:
        acts, backprops = [a, a, a * moved, a * moved], [g, -(g * moved), -g, g * moved]
    return torch.stack(acts)[None], torch.stack(backprops)[None]


@given(
    st.integers(0, 2**31), st.integers(1, 2), st.sampled_from([1e-30, 1e-10, 1.0, 1e10, 1e18])
)
def test_norms_of_sequences_that_cancel_are_never_below_the_exact_norm(seed, depth, size):
    acts, backprops = cancelling(seed, depth=depth, size=size)
    bound = float(block(acts, backprops).norms())
    assert Fraction(bound) ** 2 >= square(exact_row(acts[0], backprops[0]))


@given(st.integers(0, 2**31), st.integers(1, 6), st.sampled_from(DTYPES))
def test_norms_of_random_sequences_are_certified_and_close(seed, times, dtype):
    generator = torch.Generator().manual_seed(seed)
    acts, backprops = (torch.randn(2, times, k, generator=generator).to(dtype) for k in (4, 3))
    for i, bound in enumerate(block(acts, backprops).norms().tolist()):
        exact = square(exact_row(acts[i], backprops[i]))
        assert Fraction(bound) ** 2 >= exact
        floor = float(terms(acts, backprops)[i]) / CANCELLATION
        assert bound <= max(math.sqrt(exact), floor) * (1 + 1.0001 * 2.0**-14)


def test_a_gram_norm_without_its_error_is_below_the_row(monkeypatch):
    # the terms alone, S / 1024, would cover these rows: without them the error of the Gram matrix must
    monkeypatch.setattr(gram, "CANCELLATION", 2.0**200)
    below = 0
    for seed in range(40):
        acts, backprops = cancelling(seed)
        exact = square(exact_row(acts[0], backprops[0]))
        assert exact > 0
        a, g = acts[0].double(), backprops[0].double()
        careless = max(float(((g @ g.t()) * (a @ a.t())).sum()), 0.0) * (1 + 2.0**-13)
        below += Fraction(careless) < exact
        assert Fraction(float(block(acts, backprops).norms())) ** 2 >= exact
    assert below >= 5


def test_rows_that_cancel_too_far_are_clipped_by_their_terms():
    acts, backprops = (
        torch.cat(side) for side in zip(*(cancelling(seed) for seed in range(30)), strict=True)
    )
    rows = GradBatch([block(acts, backprops)])
    size = terms(acts, backprops)
    assert bool((rows.norms() * CANCELLATION >= size).all())
    for clip in (1e-4, 1e-2):  # float32 rounding of what is left would be far above 1e-4
        weights = clip_weights(rows.norms(), clip)
        assert bool((weights * size <= CANCELLATION * clip).all())
        [total] = rows.weighted_sum(weights, plan_summation(30, 12))
        exact = [Fraction(0)] * 12
        for i, w in enumerate(weights.tolist()):
            exact = [
                e + Fraction(w) * v
                for e, v in zip(exact, exact_row(acts[i], backprops[i]), strict=True)
            ]
        error = math.sqrt(
            square(
                [Fraction(t) - e for t, e in zip(total.flatten().tolist(), exact, strict=True)]
            )
        )
        assert error <= 30 * clip * (963 * CANCELLATION + 31) * 2.0**-53


@pytest.mark.parametrize("batch_size", [1, 64, 4096, 10**6])
def test_plans_reserve_what_sums_of_factors_may_err(batch_size):
    plan = plan_summation(batch_size, 10**6)
    largest = plan.max_rows * (963 * CANCELLATION + plan.max_rows + 1) * 2.0**-53
    mean_loss = 8 * 2.0**-24 * (2 * batch_size + 1024)
    assert 2 * largest + mean_loss <= plan.error
    assert 2 * 1024 * CANCELLATION * plan.max_rows * 2.0**-53 <= mean_loss  # and cost little


@pytest.mark.parametrize("times", [1, 7, 300, 960])
def test_sums_of_many_records_are_those_of_their_rows(times):
    generator = torch.Generator().manual_seed(times)
    acts, backprops = (torch.randn(9, times, k, generator=generator) for k in (5, 4))
    weights = torch.rand(9, dtype=torch.float64, generator=generator)
    rows = torch.einsum("bto,bti->boi", backprops.double(), acts.double())
    made = block(acts, backprops)
    [total] = made.weighted_sum(weights, plan_summation(9, 20))
    torch.testing.assert_close(total, torch.tensordot(weights, rows, 1), rtol=1e-13, atol=1e-12)
    index = torch.tensor([8, 0, 0, 3])
    [some] = made.select(index).weighted_sum(weights[index], plan_summation(9, 20))
    torch.testing.assert_close(
        some, torch.tensordot(weights[index], rows[index], 1), rtol=1e-13, atol=1e-12
    )
    torch.testing.assert_close(made.dense()[0].double(), rows, rtol=1e-4, atol=1e-4)
    exact = torch.linalg.vector_norm(rows.flatten(1), dim=1)
    assert bool((made.norms() >= exact).all())
    torch.testing.assert_close(made.norms(), exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("bad", [math.inf, math.nan, 3e38])
def test_a_sequence_that_is_not_finite_has_no_finite_norm_and_moves_no_other(bad):
    acts, backprops = torch.ones(3, 2, 4), torch.ones(3, 2, 3)
    clean = block(acts, backprops).norms()
    for side in (acts, backprops):
        side[1, 0, 2] = bad
    norms = block(acts, backprops).norms()
    assert torch.isfinite(norms).tolist() == [
        True,
        bad == 3e38,
        True,
    ]  # float64 squares do not overflow
    assert torch.equal(norms[[0, 2]], clean[[0, 2]])


def test_malformed_sequences_are_refused():
    for acts, backprops in (
        (torch.zeros(2, 3), torch.zeros(2, 3)),
        (torch.zeros(2, 3, 1), torch.zeros(2, 4, 1)),
    ):
        with pytest.raises(ValueError, match="acts, backprops must be"):
            SequenceBlock(acts, backprops, torch.Size([1, 1]))
    for acts in (torch.zeros(1, 961, 1), torch.zeros(1, 2, 1).double()):
        with pytest.raises(ValueError, match="at most 960 pairs of at most float32"):
            block(acts, acts)
