"""Streams of ranks: the union of what several processes draw, each its own positions, is a Poisson draw."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from scipy import stats

import torch_dpsco as dp
from tests.test_mutations import assert_caught
from torch_dpsco.errors import UnknownSamplerError
from torch_dpsco.noise import KeyedStream
from torch_dpsco.sampling import RankAssignedSampler, RankSampler, one_pass
from torch_dpsco.sampling import samplers as parts

FALSE_ALARM = 1e-6  # of each statistical check, whose seeds are fixed besides


RATE, DRAWS, RANKS = 0.1, 4000, 3
SIZE = 20 * RANKS


def inclusions(key: bytes) -> np.ndarray:
    """Returns which positions are in which draws: (DRAWS, SIZE) bool, joined over the ranks."""
    found = np.zeros((DRAWS, SIZE), dtype=bool)
    for rank in range(RANKS):
        design = dp.Poisson(round(RATE * SIZE), SIZE)
        sampler = RankSampler(design, rank=rank, processes=RANKS, key=key, steps=DRAWS)
        for k, (draw, indices) in enumerate(sampler.draws()):
            assert (draw.size, draw.index) == (len(indices), k)
            assert set(indices % RANKS) <= {rank}
            found[k, indices] = True
    return found


def check_that_positions_are_independent(found: np.ndarray) -> None:
    """Chi-square on each position's count and on the sizes; pairs of ranks at the same place as often as by chance."""
    q = stats.binom(DRAWS, RATE)
    counts = found.sum(axis=0)
    assert stats.chi2.sf(((counts - q.mean()) ** 2 / q.var()).sum(), SIZE) > FALSE_ALARM / 3
    sizes = np.bincount(found.sum(axis=1), minlength=SIZE + 1)
    expected = DRAWS * stats.binom(SIZE, RATE).pmf(np.arange(SIZE + 1))
    kept = expected > 10
    observed, wanted = [np.append(part[kept], part[~kept].sum()) for part in (sizes, expected)]
    assert (
        stats.chi2.sf(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1)
        > FALSE_ALARM / 3
    )
    for a in range(RANKS):
        for b in range(a):
            joint = int((found[:, a::RANKS] & found[:, b::RANKS]).sum())
            trials = DRAWS * SIZE // RANKS
            assert stats.binomtest(joint, trials, RATE**2).pvalue > FALSE_ALARM / 9


@pytest.mark.slow
def test_the_union_over_ranks_is_a_poisson_draw() -> None:
    check_that_positions_are_independent(inclusions(bytes(range(32))))


@pytest.mark.slow
def test_equal_streams_of_ranks_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = parts.rank_generator
    monkeypatch.setattr(parts, "rank_generator", lambda key, rank: generator(key, 0))
    with pytest.raises(AssertionError):
        check_that_positions_are_independent(inclusions(bytes(range(32))))


def test_streams_differ_by_rank_and_by_each_bit_of_the_key() -> None:
    keys = [bytes(32), *((1 << bit).to_bytes(32, "little") for bit in (0, 127, 128, 255))]
    first = {
        tuple(parts.rank_generator(key, rank).words(2)) for key in keys for rank in range(50)
    }
    assert len(first) == 50 * len(keys)
    again = parts.rank_generator(keys[1], 3).words(2)
    assert tuple(again) in first
    with pytest.raises(ValueError, match="key must have 32 bytes"):
        parts.rank_generator(b"", 0)


def test_a_copy_of_a_rank_sampler_draws_other_batches() -> None:
    sampler = RankSampler(dp.Poisson(16, 32), rank=1, processes=2, key=bytes(32), steps=20)
    copied = copy.deepcopy(sampler)
    draws = [[indices.tolist() for _, indices in s.draws()] for s in (sampler, copied)]
    assert draws[0] != draws[1]
    assert {i % 2 for draw in draws[1] for i in draw} == {1}
    assert [draw.index for draw, _ in sampler.draws()] == list(
        range(20, 40)
    )  # numbered across iterations


def test_more_ranks_than_records_draw_nothing() -> None:
    sampler = RankSampler(dp.Full(2), rank=2, processes=3, key=bytes(32), steps=2)
    assert [(draw.size, len(indices)) for draw, indices in sampler.draws()] == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    "design", [dp.Fixed(2, 8), dp.Shuffled(2, 8), dp.Disjoint(2, 8), dp.Assigned(2, 8)], ids=str
)
def test_designs_whose_positions_depend_on_each_other_are_refused(design: Any) -> None:
    with pytest.raises(
        UnknownSamplerError, match="design must be Poisson or Full in a run of several processes"
    ):
        RankSampler(design, rank=0, processes=2, key=bytes(32))


def test_ranks_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="rank must be < processes=2"):
        RankSampler(dp.Full(8), rank=2, processes=2, key=bytes(32))


# -- batches that records draw by themselves --------------------------------------------------------------------------


def by_rank(key: bytes, processes: int = 2, size: int = 24) -> np.ndarray:
    """Returns the batch of each record in each pass, drawn by the rank that owns it: (passes, size)."""
    passes = np.full((2, size), -1)
    for rank in range(processes):
        place: dict[str, Any] = {"rank": rank, "processes": processes, "key": key}
        for draw, indices in RankAssignedSampler(
            dp.Assigned(6, 24, passes=2), **place, size=size, steps=8
        ).draws():
            assert (passes[draw.index // 4, indices] < 0).all()
            assert set(indices % processes) <= {rank}
            passes[draw.index // 4, indices] = int(draw.part)
    return passes


def check_that_ranks_are_independent() -> None:
    passes = np.array([by_rank(np.random.default_rng(k).bytes(32)) for k in range(400)])
    assert (passes >= 0).all()  # every record is in one batch of each pass
    counts = np.stack([(passes == k).sum(axis=0) for k in range(4)])
    assert ((counts - 100) ** 2 / 100).sum() < stats.chi2.isf(1e-6, 2 * 24 * 3)
    for first, second in (
        ((0, 0), (0, 1)),
        ((0, 6), (1, 7)),
        ((0, 0), (0, 2)),
        ((0, 3), (1, 3)),
    ):
        pairs = np.zeros((4, 4))
        np.add.at(pairs, (passes[(slice(None), *first)], passes[(slice(None), *second)]), 1)
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-6


@pytest.mark.slow
def test_ranks_draw_the_batches_of_their_records_independently() -> None:
    def equal(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            one_pass, "KeyedStream", lambda key, label: KeyedStream(key, label.split(" rank")[0])
        )

    assert_caught(check_that_ranks_are_independent, equal)


def test_a_rank_without_records_has_all_batches() -> None:
    place: dict[str, Any] = {"rank": 2, "processes": 3, "key": bytes(range(32))}
    sampler = RankAssignedSampler(dp.Assigned(1, 2, passes=2), **place, steps=4)
    assert [(draw.size, draw.index, len(indices)) for draw, indices in sampler.draws()] == [
        (0, k, 0) for k in range(4)
    ]
    names = {
        RankAssignedSampler(dp.Assigned(1, 2), **place | {"rank": k}).so_far.cut.tobytes()
        for k in (0, 1)
    }
    assert len(names) == 1
    for wrong in ({"rank": 3}, {"processes": 0}):
        with pytest.raises(ValueError, match="must be"):
            RankAssignedSampler(dp.Assigned(1, 2), **place | wrong)
