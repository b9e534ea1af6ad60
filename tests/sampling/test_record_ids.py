"""Records that pick their batches by a keyed hash of their ids: the law of the picks, what they depend on, refusals."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torch_dpsco as dp
from tests.algorithms.test_allocated import (
    DATA,
    PASS,
    N,
    T,
    built,
    charged,
    one_step,
    refused,
    stored,
    sums,
    train,
)
from tests.doors.calls import CALLS
from tests.problems import slots_of
from tests.test_mutations import assert_caught, nothing
from torch_dpsco.accounting.designs import Assigned
from torch_dpsco.errors import PrivacyError, UnitError, UnknownSamplerError
from torch_dpsco.noise import SecretState, sampling_key
from torch_dpsco.sampling import (
    AssignedSampler,
    RankAssignedSampler,
    RecordIds,
    UserLoader,
    one_pass,
)
from torch_dpsco.sampling import samplers as record_ids
from torch_dpsco.sampling.samplers import id_bytes
from torch_dpsco.step.batch import LogicalBatch

__all__ = ["sums"]  # a fixture
FALSE_ALARM = 1e-6
IDS = [f"patient {k}" for k in range(N)]
KEY = bytes(range(32))


def batches(sampler: AssignedSampler) -> list[list[int]]:
    return [sorted(indices.tolist()) for _, indices in sampler.draws()]


# -- the law ----------------------------------------------------------------------------------------------------------


def cells() -> float:
    """Returns the p-value of the joint law of picks of two ids in two passes, over fresh keys: 16 equal cells."""
    ids = RecordIds(["a", "b"])
    counts = np.zeros(16)
    for _ in range(4000):
        key = sampling_key()
        (a, b), (c, d) = ids.picks(key, 0, 2), ids.picks(key, 1, 2)
        counts[8 * a + 4 * b + 2 * c + d] += 1
    return float(stats.chisquare(counts).pvalue)


@pytest.mark.slow
def test_picks_by_ids_are_uniform_and_independent() -> None:
    """One key: the pairs of picks of 20,000 ids in two passes. Many keys: the picks of two ids in two passes."""
    parts = 7
    ids = RecordIds(np.arange(20_000))

    def check() -> None:
        key = sampling_key()
        first, second = (ids.picks(key, k, parts) for k in (0, 1))
        for counts in (
            np.bincount(first),
            np.bincount(second),
            np.bincount(parts * first + second),
        ):
            assert stats.chisquare(counts).pvalue > FALSE_ALARM
        neighbors = np.bincount(
            parts * first[:-1:2] + first[1::2], minlength=parts**2
        )  # of ids that follow each other
        assert stats.chisquare(neighbors).pvalue > FALSE_ALARM
        assert cells() > FALSE_ALARM

    def same_in_each_pass(patch: pytest.MonkeyPatch) -> None:
        start = record_ids.start_of_pass
        patch.setattr(record_ids, "start_of_pass", lambda key, k: start(key, 0))

    def alike_for_all(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            record_ids, "pick", lambda start, name, parts: pick(start, name[:1], parts)
        )

    pick = record_ids.pick
    for mutate in (same_in_each_pass, alike_for_all):
        assert_caught(check, mutate)


def test_a_pick_is_that_of_the_published_hash() -> None:
    from hashlib import blake2b

    found = RecordIds(["x", 5, b"y"]).picks(KEY, 3, 1000).tolist()
    person = b"pass" + bytes([3]) + bytes(11)
    expected = [
        blake2b(name, key=KEY, person=person, digest_size=64).digest()
        for name in (b"sx", b"i5", b"by")
    ]
    assert found == [int.from_bytes(one, "little") % 1000 for one in expected]


def test_sizes_of_batches_are_binomial() -> None:
    """Over 400 keys, the variance of a size within 6 of its standard deviations; a cut into equal batches has none."""
    ids, parts, keys = RecordIds(np.arange(100)), 4, 400

    def check() -> None:
        sizes = np.array([(ids.picks(sampling_key(), 0, parts) == 0).sum() for _ in range(keys)])
        share = stats.binom.cdf(24, 100, 0.25)
        assert stats.binomtest(int((sizes <= 24).sum()), keys, share).pvalue > FALSE_ALARM
        spread = ((sizes - 25.0) ** 2).mean() / (100 * 0.25 * 0.75)
        assert abs(spread - 1.0) < 6.0 * math.sqrt(2.0 / keys)

    def cut(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            RecordIds,
            "picks",
            lambda self, key, k, parts: (
                one_pass.KeyedStream(key, "").permutation(len(self)) % parts
            ),
        )

    assert_caught(check, cut)


# -- what a pick depends on -------------------------------------------------------------------------------------------


def by_id(ids: Any, cut: Any = None) -> dict[Any, int]:
    """Returns the batch of each id in the first pass of one key."""
    sampler = AssignedSampler(Assigned(N // T, N, passes=2), record_ids=ids)
    sampler.partition = replace(
        sampler.partition, cut=np.append(np.arange(32), 1).astype(np.uint8)
    )
    return {ids[i]: batch for batch, members in enumerate(batches(sampler)) for i in members}


def test_a_record_less_moves_no_other_wherever_it_was() -> None:
    """Nor does a record in its place, or another order. By positions a record less moves the others: the mutation."""

    def check() -> None:
        every = by_id(IDS)
        for gone in (0, 7, N - 1):
            fewer = by_id(IDS[:gone] + IDS[gone + 1 :])
            assert fewer == {name: batch for name, batch in every.items() if name != IDS[gone]}
            other = by_id([*IDS[:gone], "somebody else", *IDS[gone + 1 :]])
            assert other.pop("somebody else") in range(T)
            assert other == fewer
        assert by_id(IDS[::-1]) == every

    def by_position(patch: pytest.MonkeyPatch) -> None:
        def picks(self: RecordIds, key: bytes, k: int, parts: int) -> Any:
            return one_pass.KeyedStream(key, str(k)).integers(parts, len(self))

        patch.setattr(RecordIds, "picks", picks)

    assert_caught(check, by_position)


def test_readings_in_other_orders_and_forms_give_the_same_batches() -> None:
    numbers = list(range(N))
    expected = RecordIds(numbers).picks(KEY, 1, T).tolist()
    for form in (
        np.arange(N),
        np.arange(N, dtype=np.uint8),
        torch.arange(N),
        [np.int16(k) for k in numbers],
    ):
        assert RecordIds(form).picks(KEY, 1, T).tolist() == expected
    assert RecordIds(np.arange(N)[::-1]).picks(KEY, 1, T).tolist() == expected[::-1]
    assert (
        RecordIds(np.array(IDS)).picks(KEY, 1, T).tolist()
        == RecordIds(IDS).picks(KEY, 1, T).tolist()
    )
    many = np.arange(2 * record_ids._BLOCK + 3)
    assert len(RecordIds(many).picks(KEY, 0, T)) == len(many)


def test_different_ids_have_different_bytes() -> None:
    things = [1, 16, -1, "1", "i1", b"1", "", b"", 2**80, "\udc80", "a\0", "a"]
    assert len({id_bytes(thing) for thing in things}) == len(things)
    assert id_bytes(np.str_("a")) == id_bytes("a")
    assert id_bytes(torch.tensor(3)) == id_bytes(np.int8(3)) == id_bytes(3)


def test_ids_that_are_not_the_same_everywhere_are_refused() -> None:
    for bad in (
        None,
        1.0,
        True,
        ("a", 1),
        float("nan"),
        object(),
        np.float32(1.0),
        torch.tensor(True),
    ):
        with pytest.raises(UnitError, match="ids must be integers, strings or bytes"):
            RecordIds(["a", bad])
    for bad in ("abc", b"abc", {"a": 1}, {"a"}, 5, None):
        with pytest.raises(UnitError, match="ids must hold one id per record"):
            RecordIds(bad)
    with pytest.raises(UnitError, match="one id per record"):
        RecordIds(IDS, N + 1)
    for bad in (
        np.ones(3),
        np.array([True]),
        torch.ones(3),
        torch.ones(3, dtype=torch.bfloat16),
        [[1], [2]],
    ):
        with pytest.raises(UnitError, match="ids must be integers"):
            RecordIds(bad)
    for bad in (np.ones((2, 2), dtype=int), torch.ones((2, 2)), torch.tensor(3), np.array(3)):
        with pytest.raises(UnitError, match=r"got [02]D"):
            RecordIds(bad)


# -- one id, one record -----------------------------------------------------------------------------------------------


def test_records_with_one_id_are_refused() -> None:
    def check() -> None:
        for ids in ([*IDS[:-1], IDS[0]], np.arange(N) // 2, [5] * N):
            refused(
                lambda ids=ids: AssignedSampler(Assigned(6, N), record_ids=ids),
                "UserClippedSGD",
                UnitError,
            )  # type: ignore[misc]

    assert_caught(check, lambda patch: patch.setattr(RecordIds, "require_unique", nothing))


def test_ids_need_secret_draws() -> None:
    plain = Assigned(6, N, amplification=False)
    with pytest.raises(UnknownSamplerError, match="ids need secret draws"):
        AssignedSampler(plain, record_ids=IDS)
    with pytest.raises(UnknownSamplerError, match="ids need secret draws"):
        built(amplification=False)[1].loader(DATA, record_ids=IDS)
    with pytest.raises(UnknownSamplerError, match="record_ids must be left out"):
        one_pass.make_sampler(dp.Poisson(6, N), record_ids=IDS)


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_by_ids_is_charged_as_one_by_positions() -> None:
    model, optimizer = built()
    assert sum(train(model, optimizer, record_ids=IDS)) == N
    assert sum(train(model, optimizer, record_ids=IDS, resume=True)) == N
    assert (optimizer.steps, charged(optimizer)) == (2 * T, [(PASS, 2)])


def test_a_run_by_ids_goes_on_by_its_ids_only() -> None:
    """In another order of the records too; not by positions, by other ids, or by ids of other records."""
    numbered = TensorDataset(torch.arange(N)[:, None].repeat(1, 2).float(), torch.ones(N, 1))
    order = list(range(N - 1, -1, -1))
    moved = TensorDataset(*(tensor[order] for tensor in numbered.tensors))

    def seen(loader: Any, count: int, model: Any, optimizer: Any) -> list[list[int]]:
        found = []
        for (x, y), _ in zip(loader, range(count), strict=False):
            found.append(sorted(x[:, 0].int().tolist()))
            one_step(model, optimizer, x, y)
        return found

    model, optimizer = built()
    loader = optimizer.loader(numbered, record_ids=IDS, isolation="none", steps=2 * T)
    expected = batches(loader.batch_sampler)  # type: ignore[arg-type]
    assert seen(
        optimizer.loader(numbered, record_ids=IDS, isolation="none", steps=1, resume=True),
        9,
        model,
        optimizer,
    ) == [expected[0]]
    for data, ids in ((numbered, None), (moved, IDS), (numbered, IDS[::-1]), (DATA, IDS)):
        refused(
            lambda data=data, ids=ids: optimizer.loader(data, record_ids=ids, resume=True),  # type: ignore[misc]
            "dataset must hold the records of the run",
            PrivacyError,
        )
    again = optimizer.loader(
        moved, record_ids=IDS[::-1], isolation="none", resume=True, steps=2 * T - 1
    )
    assert seen(again, 99, model, optimizer) == expected[1:]

    def check() -> None:
        sampler = AssignedSampler(Assigned(6, N, passes=2), record_ids=IDS)
        plain = AssignedSampler(Assigned(6, N, passes=2))
        for one, other in ((sampler, {}), (plain, {"record_ids": IDS})):
            both = AssignedSampler(sampler.design, resume=one.partition, **other)
            refused(
                lambda both=both: batches(both), "with record_ids= if the run has drawn by ids"
            )  # type: ignore[misc]

    assert_caught(check, lambda patch: patch.setattr(AssignedSampler, "_require_key", nothing))


def test_the_ledger_does_not_take_draws_by_ids_for_draws_by_positions() -> None:
    design = Assigned(6, N)
    first = AssignedSampler(design, record_ids=IDS).partition
    second = replace(first, cut=first.cut[:32])
    assert one_pass.partition_name(design, first) != one_pass.partition_name(design, second)


def test_draws_by_ids_of_another_run_are_refused() -> None:
    def check() -> None:
        _, optimizer = built()
        known = AssignedSampler(optimizer.design, record_ids=IDS)
        loader = dp.sampling.PrivateLoader(
            DATA, AssignedSampler(optimizer.design, record_ids=IDS, resume=known.partition)
        )
        refused(lambda: optimizer.bind(loader), "by fresh bits", UnknownSamplerError)

    assert_caught(check, lambda patch: patch.setattr(LogicalBatch, "_require_secret", nothing))
    sampler = AssignedSampler(Assigned(6, N), record_ids=IDS)
    for twin in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert twin.partition.cut.tobytes() != sampler.partition.cut.tobytes()
        assert sorted(i for batch in batches(twin) for i in batch) == list(range(N))


def test_a_loader_of_torch_may_draw_by_ids() -> None:
    model, optimizer = built()
    loader = DataLoader(DATA, batch_sampler=AssignedSampler(optimizer.design, record_ids=IDS))
    for batch in optimizer.bind(loader):
        one_step(model, optimizer, *batch)
    assert optimizer._batch.sealed() is not None
    refused(
        lambda: optimizer.loader(DATA, record_ids=[*IDS[1:], "x"], resume=True),
        "dataset must hold the records of the run",
        PrivacyError,
    )


@pytest.mark.slow
def test_no_id_shows_anywhere() -> None:
    """In no repr, state, report or message; the state is secret as long as draws are left."""
    model, optimizer = built()
    loader = optimizer.loader(DATA, record_ids=IDS, isolation="none")
    sampler = loader.batch_sampler
    shown = [repr(loader), repr(sampler), repr(sampler.ids), repr(sampler.partition)]  # type: ignore[attr-defined]
    one_step(model, optimizer, *next(iter(loader)))
    state = stored(optimizer)
    assert isinstance(optimizer.state_dict(), SecretState)
    shown += [
        repr(state),
        str(optimizer.report(1e-4)),
        optimizer.accountant.ledger.to_json(),
        repr(optimizer),
    ]
    bad: list[Callable[[], Any]] = [
        lambda: optimizer.loader(DATA, record_ids=[*IDS[:-1], IDS[0]], resume=True),
        lambda: optimizer.loader(DATA, record_ids=IDS[:-1], resume=True),
        lambda: optimizer.loader(DATA, record_ids=[*IDS[:-1], None], resume=True),
        lambda: optimizer.loader(DATA, record_ids=[*IDS[::-1], "patient 99"], resume=True),
    ]
    for call in bad:
        with pytest.raises(UnitError) as error:
            call()
        shown.append(str(error.value))
        assert not any(letter.isdigit() for letter in str(error.value))
    assert not any("patient" in text for text in shown)


def test_users_have_no_ids_of_records() -> None:
    plan = dp.UserClippedSGD.plan(
        n=N,
        clip=1.0,
        lr=0.1,
        noise_multiplier=2.0,
        sampling="allocated",
        batch_size=6,
        epochs=1,
    )
    optimizer = dp.UserClippedSGD(dp.attach(torch.nn.Linear(2, 1)).parameters(), plan)
    with pytest.raises(UnitError, match="record_ids must not be given with users"):
        optimizer.loader(DATA, torch.arange(N), record_ids=IDS)
    with pytest.raises(UnitError, match="users must be drawn by their numbers"):
        UserLoader(DATA, AssignedSampler(optimizer.design, record_ids=IDS), torch.arange(N))


# -- processes --------------------------------------------------------------------------------------------------------


def test_processes_with_a_key_give_a_record_the_batch_that_one_process_gives_it() -> None:
    expected = by_id(IDS)
    found = {}
    for rank, own in enumerate((IDS[::3], IDS[1::3] + IDS[2::3], [])):
        sampler = RankAssignedSampler(
            Assigned(6, N, passes=2), rank=rank, processes=3, key=KEY, record_ids=own, steps=T
        )
        drawn = batches(sampler)
        assert len(drawn) == T
        found |= {own[i]: batch for batch, members in enumerate(drawn) for i in members}
    assert found == expected


def test_blocks_of_a_process_with_own_records_have_room_for_a_whole_draw() -> None:
    """Of two processes one may hold nearly all records; by positions each has half of them."""
    _, optimizer = built()
    place: dict[str, Any] = {"rank": 0, "processes": 2, "key": KEY}
    alone = slots_of(optimizer, AssignedSampler(optimizer.design))
    own = slots_of(optimizer, RankAssignedSampler(optimizer.design, **place, record_ids=IDS[1:]))
    by_place = slots_of(optimizer, RankAssignedSampler(optimizer.design, **place))
    assert alone is not None
    assert own is not None
    assert by_place is not None
    assert own.capacity == alone.capacity > by_place.capacity


# -- streams in several readings --------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Gives its records in another order each time."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.read = names, 0

    def __iter__(self) -> Iterator[Any]:
        self.read += 1
        for i in np.random.default_rng(self.read).permutation(len(self.names)):
            number = float(self.names[i].split()[1])
            yield self.names[i], torch.full((2,), number), torch.ones(1)


def rows(records: list[Any]) -> Any:
    return torch.utils.data.default_collate([record[1:] for record in records])


def name_of(record: Any) -> Any:
    return record[0]


# -- ids given to fit and make_private --------------------------------------------------------------------------------


def private(**options: Any) -> tuple[nn.Module, dp.PrivateOptimizer, Any]:
    model = nn.Linear(2, 1, bias=False)
    return dp.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(DATA, batch_size=6, shuffle=True),
        problem=dp.losses.Logistic().problem(bound_x=2.0),
        budget=dp.Budget(2.0, 1e-3),
        n=N,
        epochs=1,
        **{"sampling": "allocated"} | options,
    )


LOSS = nn.BCEWithLogitsLoss(reduction="sum")


@pytest.mark.slow
def test_fit_and_make_private_draw_by_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    picks = RecordIds.picks
    monkeypatch.setattr(
        RecordIds, "picks", lambda self, *args: asked.append(len(self)) or picks(self, *args)
    )
    model, optimizer = built()
    dp.fit(model, optimizer, DATA, LOSS, record_ids=IDS, progress=False)
    assert (optimizer.steps, charged(optimizer)) == (2 * T, [(PASS, 2)])
    assert asked == [N, N]
    _, optimizer, loader = private(record_ids=torch.arange(N))
    next(iter(loader))
    assert asked == [N] * 3
    assert charged(optimizer) == []


@pytest.mark.slow
def test_fit_and_make_private_refuse_ids_before_anything_is_charged() -> None:
    model, optimizer = built()
    for ids in ([5] * N, IDS[1:]):
        with pytest.raises(UnitError, match="ids must"):
            dp.fit(model, optimizer, DATA, LOSS, record_ids=ids, progress=False)
        with pytest.raises(UnitError, match="ids must"):
            private(record_ids=ids)
    assert (optimizer.steps, charged(optimizer)) == (0, [])
    with pytest.raises(UnknownSamplerError, match="record_ids must be left out"):
        private(record_ids=IDS, sampling="poisson")


def test_no_refusal_quotes_an_id() -> None:
    free, arguments = CALLS["dp.fit[row-free]"]()
    _, optimizer = built()
    for call in (
        lambda names: free(**arguments | {"record_ids": names}),
        lambda names: free(**arguments | {"users": names}),
        lambda names: optimizer.loader(DATA, users=names),
        lambda names: optimizer.loader(DATA, record_ids=[*names, 1.5]),
    ):
        with pytest.raises((ValueError, UnitError), match=r"(ids|users) must") as caught:
            call(["Ann", "Bob"])
        assert "Ann" not in str(caught.value)
