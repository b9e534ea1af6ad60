"""Normalized rows: each line of the oracle's table, and what one record can do."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.problems import released
from torch_dpsco.accounting.events import ADJACENCIES, clipped_gaussian
from torch_dpsco.algorithms.clips import AutoClip, auto_weights
from torch_dpsco.errors import PrivacyError
from torch_dpsco.rows import DenseBlock, FactoredBlock, GradBatch
from torch_dpsco.step import oracle as clipped

BOUND = 2.0
LENGTHS = [0.0, 1e-45, 1e-20, 0.01, 1.0, 1e10, 1e19, 3e38, math.inf, -math.inf, math.nan]


def mean(
    rows: torch.Tensor, bound: float = BOUND, size: int = 1, offset: float = 0.01
) -> torch.Tensor:
    return released(
        AutoClip(bound, 0.0, size, offset),
        [torch.zeros(rows.shape[1])],
        [GradBatch([DenseBlock(rows)])],
    )


@pytest.mark.parametrize("length", [1e-3, 0.01, 1.0, 1e6, 1e18])
def test_a_row_is_scaled_to_its_share_of_the_bound(length):
    row = torch.tensor([[0.6, -0.8]]) * length
    expected = row[0].double() * BOUND / (length + 0.01)
    torch.testing.assert_close(mean(row), expected, rtol=2e-4, atol=0)
    assert mean(row).norm() < BOUND


def test_a_zero_row_stays_zero_and_a_bad_row_counts_nothing():
    assert not mean(torch.zeros(3, 2)).any()
    for bad in (math.nan, math.inf, -math.inf, 3e38):
        assert torch.equal(
            mean(torch.tensor([[bad, bad], [0.5, 0.0]])), mean(torch.tensor([[0.5, 0.0]]))
        )


@given(*[st.floats(1e-150, 1e150)] * 3)
def test_a_weighted_norm_is_below_the_bound(norm, bound, offset):
    (weight,) = auto_weights(torch.tensor([norm], dtype=torch.float64), bound, offset).tolist()
    assert Fraction(weight) * Fraction(norm) <= Fraction(bound)


def test_auto_weights_drop_what_has_no_norm():
    assert auto_weights(
        torch.tensor([math.nan, math.inf], dtype=torch.float64), 1.0, 0.1
    ).tolist() == [0.0, 0.0]


def moves(adjacency: str, dim: int, rows: str) -> list[float]:
    """Returns how far the mean moves when the first of four records is changed in every way, over what is declared."""
    oracle = AutoClip(BOUND, 0.0, 4)
    direction = torch.ones(dim) / math.sqrt(dim)

    def with_record(length: float | None) -> torch.Tensor:
        lengths = [*([] if length is None else [length]), 1.0, -3.0, 0.02]
        if rows == "dense":
            block = DenseBlock(torch.tensor(lengths)[:, None] * direction)
        else:
            block = FactoredBlock(
                direction.expand(len(lengths), dim), torch.tensor(lengths)[:, None], bias=False
            )
        return released(
            oracle,
            [torch.zeros(dim) if rows == "dense" else torch.zeros(1, dim)],
            [GradBatch([block])],
        )

    records = [*LENGTHS, *(-length for length in LENGTHS)]
    base = {"add_remove": [None], "zero_out": [0.0], "replace_one": records}[adjacency]
    pairs = itertools.product(base, records)
    found = [float((with_record(a) - with_record(b)).norm()) for a, b in pairs]
    return [distance / oracle.sensitivity(adjacency) for distance in found]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("rows", ["dense", "auto"])
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_no_row_moves_the_mean_further_than_declared(adjacency, rows):
    for dim in (1, 3000):
        assert 0.95 < max(moves(adjacency, dim, rows)) <= 1.0


def test_rows_that_are_not_scaled_are_caught(monkeypatch):
    monkeypatch.setattr(
        AutoClip, "weights", lambda self, norms, clip: clipped.clip_weights(norms, 1.1 * clip)
    )
    with pytest.raises(PrivacyError, match="weights of AutoClip"):
        moves("replace_one", 1, "dense")
    monkeypatch.setattr(clipped.ClippedMean, "_require_within_clip", lambda self, form: None)
    assert max(moves("replace_one", 1, "dense")) > 1.0


def test_the_event_is_that_of_rows_clipped_at_the_bound():
    oracle = AutoClip(BOUND, 1.5, 10)
    oracle.open([torch.zeros(3)])
    assert oracle.event() == clipped_gaussian(1.5)
    assert oracle.noise_std == 1.5 * oracle.sensitivity("zero_out")
    assert oracle.clip == BOUND
    assert oracle.settings() == {
        "oracle": "AutoClip",
        "clip": BOUND,
        "offset": 0.01,
        "noise_multiplier": 1.5,
    }


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_numbers_are_named(bad):
    with pytest.raises(ValueError, match="clip must be"):
        AutoClip(bad, 1.0, 1)
    with pytest.raises(ValueError, match="offset must be"):
        AutoClip(1.0, 1.0, 1, offset=bad)


def test_a_tiny_offset_is_refused():
    AutoClip(1.0, 1.0, 1, offset=2.0**-40)
    with pytest.raises(ValueError, match=r"offset must be >= clip / 2\^40"):
        AutoClip(1.0, 1.0, 1, offset=2.0**-41)
