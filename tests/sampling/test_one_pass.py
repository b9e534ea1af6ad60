"""Samplers of one pass: partitions, their names, second passes, resuming; statistics of what is drawn."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import torch_dpsco as dp
from tests.streams import seeded_sampler
from tests.test_mutations import assert_caught
from torch_dpsco.accounting.designs import AssignedParts
from torch_dpsco.errors import SequenceError, UnitError, UnknownSamplerError
from torch_dpsco.noise import KeyedStream
from torch_dpsco.sampling import Partition, make_sampler, one_pass
from torch_dpsco.sampling.one_pass import (
    AssignedPartsSampler,
    AssignedSampler,
    DisjointSampler,
    PartsSampler,
    partition_name,
)

FALSE_ALARM = 1e-6
PARTS = dp.Parts(
    ((dp.Full(8), 2), (dp.Disjoint(3, 7), 3), (dp.Poisson(2, 4), 3), (dp.Fixed(2, 3), 2)), 24
)
KEYED = AssignedParts(((dp.Full(8), 2), (dp.Assigned(3, 10), 4), (dp.Poisson(2, 6), 3)), 24)
DESIGNS = [dp.Disjoint(5, 24), dp.Assigned(5, 24), PARTS, KEYED]


def drawn(sampler: Any) -> list[tuple[str, str, list[int]]]:
    return [(draw.partition, draw.part, indices.tolist()) for draw, indices in sampler.draws()]


def partition_of(design: Any) -> Partition:
    sampler = seeded_sampler(design, seed=1)
    next(sampler.draws())
    return sampler.partition


def used(draws: list[tuple[str, str, list[int]]]) -> dict[str, set[int]]:
    """Returns the records of each part; those of "2/0", "2/1", .. are parts of their own."""
    members: dict[str, set[int]] = {}
    for _, part, indices in draws:
        members.setdefault(part, set()).update(indices)
    return members


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: type(design).__name__)
def test_parts_are_disjoint_and_each_draw_holds_a_record_once(design: Any) -> None:
    for seed in range(20):
        draws = drawn(seeded_sampler(design, seed=seed))
        assert len(draws) == design.steps_per_epoch
        assert len({name for name, _, _ in draws}) == 1
        members = used(draws)
        assert sum(map(len, members.values())) == len(set().union(*members.values()))
        assert all(len(indices) == len(set(indices)) for _, _, indices in draws)


@pytest.mark.parametrize(
    "design", [dp.Disjoint(5, 24), dp.Assigned(5, 24)], ids=lambda design: type(design).__name__
)
def test_one_pass_uses_every_record_once(design: Any) -> None:
    counts = Counter(
        i for _, _, indices in drawn(seeded_sampler(design, seed=3)) for i in indices
    )
    assert counts == Counter(range(24))


def test_disjoint_batches_have_their_public_sizes_and_phases_all_of_their_records() -> None:
    assert [
        len(indices) for _, _, indices in drawn(seeded_sampler(dp.Disjoint(5, 24), seed=3))
    ] == [
        5,
        5,
        5,
        5,
        4,
    ]
    draws = drawn(seeded_sampler(PARTS, seed=3))
    assert [part for _, part, _ in draws] == [
        "0",
        "0",
        "1/0",
        "1/1",
        "1/2",
        "2",
        "2",
        "2",
        "3",
        "3",
    ]
    assert sorted(draws[0][2]) == sorted(draws[1][2])
    assert [len(indices) for _, _, indices in draws[:5]] == [8, 8, 3, 3, 1]
    assert [len(indices) for _, _, indices in draws[8:]] == [2, 2]


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: type(design).__name__)
def test_a_second_pass_is_refused(design: Any) -> None:
    for stop in (0, 1, None):
        sampler = make_sampler(design)
        iterator = sampler.draws()
        for _ in range(design.steps_per_epoch if stop is None else stop):
            next(iterator)
        if stop == 0:
            next(iterator)
        with pytest.raises(SequenceError, match="each record may be used once"):
            next(sampler.draws())
    whole = replace(partition_of(design), made=design.steps_per_epoch)
    with pytest.raises(SequenceError, match="each record may be used once"):
        make_sampler(design, resume=whole)


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: type(design).__name__)
def test_more_draws_than_are_left_are_refused(design: Any) -> None:
    last = design.steps_per_epoch
    with pytest.raises(ValueError, match=f"steps must be <= {last}"):
        make_sampler(design, steps=last + 1)
    with pytest.raises(ValueError, match=f"steps must be <= {last - 2}"):
        make_sampler(design, steps=last - 1, resume=replace(partition_of(design), made=2))
    with pytest.raises(ValueError, match="steps must be"):
        make_sampler(design, steps=0)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "design", [dp.Disjoint(5, 24), dp.Assigned(5, 24)], ids=lambda design: type(design).__name__
)
@settings(derandomize=True, max_examples=30)
@given(stops=st.lists(st.integers(0, 4), max_size=4).map(sorted), seed=st.integers(0, 99))
def test_resumed_pieces_are_the_whole(design: Any, stops: list[int], seed: int) -> None:
    whole = drawn(seeded_sampler(design, seed=seed))
    sampler, pieces = seeded_sampler(design, seed=seed), []
    for stop in stops:
        for draw, indices in sampler.draws():
            if len(pieces) == stop:
                break
            pieces.append((draw.partition, draw.part, indices.tolist()))
        sampler = make_sampler(design, resume=replace(sampler.partition, made=len(pieces)))
    assert pieces + drawn(sampler) == whole


def test_resumed_phases_keep_their_records() -> None:
    whole = drawn(seeded_sampler(PARTS, seed=4))
    first = seeded_sampler(PARTS, seed=4, steps=6)
    started = drawn(first)
    rest = drawn(make_sampler(PARTS, resume=replace(first.partition, made=6)))
    assert [part for _, part, _ in started + rest] == [part for _, part, _ in whole]
    assert {name for name, _, _ in started + rest} == {name for name, _, _ in whole}
    together = used(started + rest)
    assert sum(map(len, together.values())) == len(set().union(*together.values()))
    members = first.partition.cut[15:19]  # of the Poisson part
    assert together["2"] <= set(members.tolist())


def test_partitions_of_different_cuts_have_different_names() -> None:
    names = set()
    made = [
        seeded_sampler(design, seed=seed)
        for design in (*DESIGNS, dp.Disjoint(4, 24))
        for seed in range(5)
    ]
    other = dp.Parts((*PARTS.parts[:3], (dp.Fixed(1, 3), 2)), 24)  # the same cut in other parts
    made += [seeded_sampler(other, seed=seed) for seed in range(5)]
    for sampler in made:
        names |= {name for name, _, _ in drawn(sampler)}
    assert len(names) == 30


def test_the_name_of_a_resumed_partition_is_the_first_one() -> None:
    for design in DESIGNS:
        first = seeded_sampler(design, seed=1)
        name = drawn(first)[0][0]
        kept = replace(first.partition, cut=first.partition.cut.copy(), made=1)
        assert (
            partition_name(first.design, kept) == name
        )  # of a design without amplification, for its seed
        again = make_sampler(first.design, resume=kept)
        assert {other for other, _, _ in drawn(again)} == {name}


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: type(design).__name__)
def test_copies_draw_other_partitions_unless_they_are_drawn(design: Any) -> None:
    sampler = make_sampler(design)
    for twin in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert drawn(twin)[0][0] != drawn(make_sampler(design))[0][0]
    drawn(sampler)
    twin = copy.deepcopy(sampler)
    with pytest.raises(SequenceError, match="each record may be used once"):
        next(twin.draws())


def test_samplers_are_of_their_designs_and_sizes() -> None:
    kinds = {dp.Disjoint: DisjointSampler, dp.Assigned: AssignedSampler, dp.Parts: PartsSampler}
    kinds[AssignedParts] = AssignedPartsSampler
    for design in DESIGNS:
        assert type(make_sampler(design)) is kinds[type(design)]
        for other in set(kinds.values()) - {kinds[type(design)]}:
            with pytest.raises(UnknownSamplerError, match="design must be"):
                other(design)
        with pytest.raises(ValueError, match=r"data set.*(size|got)"):
            make_sampler(design, resume=Partition(np.arange(25), size=25))
    for design in (dp.Disjoint(5, 24), PARTS):
        with pytest.raises(UnitError, match="n=24"):
            make_sampler(design, size=23)


def test_a_cut_that_is_no_key_is_refused() -> None:
    """What is left of it would be other parts, and records be used twice."""
    for cut in (np.arange(4), np.zeros(31, dtype=np.uint8), np.zeros(32)):
        with pytest.raises(SequenceError, match="resume must be a partition as it was written"):
            drawn(make_sampler(dp.Assigned(5, 24), resume=Partition(cut, made=1, size=24)))


@pytest.mark.parametrize("size", [0, 1, 3, 100])
def test_assigned_batches_are_drawn_of_any_number_of_records(size: int) -> None:
    draws = drawn(make_sampler(dp.Assigned(5, 24), size=size))
    assert [part for _, part, _ in draws] == ["0", "1", "2", "3", "4"]
    assert sorted(i for _, _, indices in draws for i in indices) == list(range(size))


def test_a_record_that_is_removed_moves_no_other_one() -> None:
    """The keys of a seed are drawn one after another: those of the records before the last stay."""
    with_it, without = (
        drawn(seeded_sampler(dp.Assigned(5, 24), size=size, seed=8)) for size in (24, 23)
    )
    for (_, _, more), (_, _, less) in zip(with_it, without, strict=True):
        assert [i for i in more if i != 23] == less


def test_a_record_less_moves_no_other_to_another_part() -> None:
    design = AssignedParts(((dp.Full(8), 1), (dp.Assigned(4, 16), 4)), 24)
    with_it, without = (drawn(seeded_sampler(design, size=size, seed=8)) for size in (24, 23))
    for (_, part, more), (_, same, less) in zip(with_it, without, strict=True):
        assert part == same
        assert [i for i in more if i != 23] == less
    members = (
        used(drawn(seeded_sampler(KEYED, size=23, seed=8))),
        used(drawn(seeded_sampler(KEYED, size=24, seed=8))),
    )
    first = [{i for part, own in side.items() if part == "0" for i in own} for side in members]
    assert first[0] == first[1] - {23}


# -- statistics: chi-square tests, false-alarm rate 1e-6 each; seeds fixed --------------------------------------------


def uniform(observed: np.ndarray) -> float:
    return float(stats.chisquare(observed.ravel()).pvalue)


@pytest.mark.slow
def test_records_are_assigned_to_parts_as_often_as_their_sizes_say() -> None:
    design, counts = (
        AssignedParts(((dp.Full(6), 1), (dp.Assigned(6, 18), 3)), 24),
        np.zeros((24, 4)),
    )
    for seed in range(1500):
        for k, (_, _, indices) in enumerate(drawn(seeded_sampler(design, seed=seed))):
            counts[indices, k] += 1
    assert counts.sum(axis=1).tolist() == [1500] * 24
    assert ((counts - 375) ** 2 / 375).sum() < stats.chi2.isf(FALSE_ALARM, 24 * 3)


@pytest.mark.slow
def test_every_record_is_in_every_part_equally_often() -> None:
    for design in (dp.Disjoint(6, 24), dp.Assigned(6, 24)):
        counts = np.zeros((24, 4))
        for seed in range(1500):
            for k, (_, _, indices) in enumerate(drawn(seeded_sampler(design, seed=seed))):
                counts[indices, k] += 1
        # rows are independent of each other up to the fixed sizes of Disjoint, which only lower the statistic
        statistic = ((counts - 375) ** 2 / 375).sum()
        assert statistic < stats.chi2.isf(FALSE_ALARM, 24 * 3)


@pytest.mark.slow
def test_assigned_records_are_independent_of_each_other() -> None:
    pairs = np.zeros((4, 4))
    for seed in range(4000):
        part = {
            i: k
            for k, (_, _, indices) in enumerate(
                drawn(seeded_sampler(dp.Assigned(6, 24), seed=seed))
            )
            for i in indices
        }
        pairs[part[3], part[17]] += 1
    assert uniform(pairs) > FALSE_ALARM


def picked(sampler: Any, size: int = 24) -> np.ndarray:
    """Returns the batch of each record in each pass: (passes, size)."""
    passes = np.full((sampler.design.passes, size), -1)
    for draw, indices in sampler.draws():
        passes[draw.index // sampler.design.batches, indices] = int(draw.part)
    assert (passes >= 0).all()
    return passes


def check_that_passes_are_independent() -> None:
    """Uniform, and as often the same batch in two passes as chance has it; sizes spread as binomial ones do."""
    runs = []
    for k in range(400):
        sampler = AssignedSampler(dp.Assigned(6, 24, passes=3), steps=12)
        sampler.partition = replace(sampler.partition, cut=np.random.default_rng(k).bytes(32))
        sampler.partition = replace(
            sampler.partition, cut=np.frombuffer(sampler.partition.cut, dtype=np.uint8)
        )
        runs.append(picked(sampler))
    passes = np.array(runs)  # (runs, passes, records)
    counts = np.stack([(passes == k).sum(axis=0) for k in range(4)])
    assert ((counts - 100) ** 2 / 100).sum() < stats.chi2.isf(FALSE_ALARM, 3 * 24 * 3)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        pairs = np.zeros((4, 4))
        np.add.at(pairs, (passes[:, first].ravel(), passes[:, second].ravel()), 1)
        assert uniform(pairs) > FALSE_ALARM
    sizes = (passes == 0).sum(axis=2).ravel()
    spread = (
        (sizes - 6.0) ** 2 / 4.5
    ).sum()  # variance 24 / 4 * 3 / 4; a permutation that is cut has none
    assert stats.chi2.ppf(1e-9, sizes.size) < spread < stats.chi2.isf(1e-9, sizes.size)


@pytest.mark.slow
def test_each_pass_has_draws_of_its_own() -> None:
    def one_for_all(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(one_pass, "KeyedStream", lambda key, label: KeyedStream(key, "assigned"))

    def cut_to_size(patch: pytest.MonkeyPatch) -> None:
        class Cut(KeyedStream):
            def integers(self, limit: int, count: int) -> np.ndarray:
                return self.permutation(count) % limit

        patch.setattr(one_pass, "KeyedStream", Cut)

    for mutation in (one_for_all, cut_to_size):
        assert_caught(check_that_passes_are_independent, mutation)


def test_a_pass_goes_on_at_any_of_its_batches() -> None:
    """Batches are the same wherever a sampler begins."""
    whole = make_sampler(dp.Assigned(50, 1000, passes=2), size=1003, steps=40)
    expected = drawn(whole)
    for made in (0, 7, 19):
        partition = replace(whole.partition, made=made)
        sampler = make_sampler(whole.design, size=1003, resume=partition)
        assert drawn(sampler) == expected[made : 20 + made]


def test_the_draws_of_a_key_are_those_of_every_version() -> None:
    """A run may be resumed by a later version, which must find each record in its batch."""
    sampler = AssignedSampler(dp.Assigned(6, 24, passes=2), steps=8)
    sampler.partition = replace(sampler.partition, cut=np.arange(32, dtype=np.uint8))
    first, second = picked(sampler)
    assert first.tolist() == [
        2,
        1,
        2,
        3,
        3,
        0,
        0,
        3,
        0,
        2,
        3,
        2,
        3,
        2,
        1,
        0,
        3,
        1,
        2,
        0,
        1,
        0,
        2,
        0,
    ]
    assert second.tolist() == [
        0,
        2,
        0,
        1,
        3,
        0,
        2,
        3,
        3,
        0,
        1,
        3,
        2,
        1,
        2,
        0,
        0,
        3,
        3,
        1,
        2,
        1,
        2,
        1,
    ]


def test_iterations_are_passes_and_go_on_where_steps_have_stopped() -> None:
    sampler = make_sampler(dp.Assigned(6, 24, passes=3))
    assert len(sampler) == 4
    whole = drawn(
        AssignedSampler(dp.Assigned(6, 24, passes=3), steps=12, resume=sampler.partition)
    )
    seen: list[Any] = []
    for stop in (4, 2, 4, 2):
        for k, indices in enumerate(sampler, 1):
            taken = sampler.log.take()
            sampler.log.use_up()
            seen.append((taken.draw.partition, taken.draw.part, indices))
            if k == stop:
                break
    assert seen == whole
    with pytest.raises(SequenceError, match="exhausted"):
        next(iter(sampler))
    resumed = make_sampler(
        dp.Assigned(6, 24, passes=3), resume=replace(sampler.partition, made=7)
    )
    assert drawn(resumed) == whole[7:11]


@pytest.mark.slow
def test_records_of_one_disjoint_batch_are_a_uniform_subset() -> None:
    subsets = Counter()
    for seed in range(3000):
        subsets[frozenset(drawn(seeded_sampler(dp.Disjoint(2, 6), seed=seed))[1][2])] += 1
    assert len(subsets) == 15
    assert uniform(np.array(list(subsets.values()))) > FALSE_ALARM
    assert np.std(list(subsets.values())) > 2  # not drawn round robin


def test_poisson_draws_of_a_phase_have_their_rate() -> None:
    design = dp.Parts(((dp.Full(4), 1), (dp.Poisson(2, 8), 50)), 12)
    hits = trials = 0
    for seed in range(40):
        for _, part, indices in drawn(seeded_sampler(design, seed=seed)):
            hits, trials = hits + (part == "1") * len(indices), trials + (part == "1") * 8
    assert stats.binomtest(hits, trials, 0.25).pvalue > FALSE_ALARM
