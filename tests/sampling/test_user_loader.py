"""UserLoader and the loaders of optimizers that protect users: a draw is of users, and brings all their rows."""

from __future__ import annotations

import datetime

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

import torch_dpsco as dp
from tests.algorithms import user_runs as runs
from tests.streams import seeded_sampler
from torch_dpsco.errors import PrivacyError, UnitError
from torch_dpsco.sampling import (
    PrivateLoader,
    UserLoader,
    make_sampler,
    user_ids,
)

# Seeds warn in every test here.
IDS = torch.tensor([3, 0, 3, 1, 5, 3, 0])  # users 2, 4 have no rows
ROWS = TensorDataset(torch.arange(7.0)[:, None], torch.arange(7))


def made(
    design: dp.Poisson | dp.Fixed | dp.Full,
    ids: torch.Tensor = IDS,
    steps: int = 40,
    **more: int,
) -> UserLoader:
    data = TensorDataset(torch.arange(float(len(ids)))[:, None], torch.arange(len(ids)))
    return UserLoader(
        data, seeded_sampler(design, size=design.n, steps=steps, seed=3), ids, **more
    )


def taken(loader: UserLoader) -> list[tuple[list[int], list[int], bool]]:
    """Returns (records, ids, last) of all chunks, each used as a step would."""
    found = []
    for _, records, ids in loader:
        log = loader.batch_sampler.log
        chunk, log.taken = log.take(), None
        if chunk.last:
            log.use_up()
        assert chunk.rows == len(records) == len(ids)
        found.append((records.tolist(), ids.tolist(), chunk.last))
    return found


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    """A map-style data set that is no TensorDataset."""

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index)]), index


@pytest.mark.parametrize(
    "design", [dp.Poisson(2, 6), dp.Fixed(2, 6), dp.Full(6)], ids=["poisson", "fixed", "full"]
)
def test_a_draw_brings_every_row_of_its_users_with_its_id_and_no_other_row(design) -> None:
    batches = taken(made(design))
    assert len(batches) == 40
    for records, ids, last in batches:
        assert last
        assert ids == IDS[records].tolist()
        assert len(set(records)) == len(records)
        drawn = set(ids)
        assert sorted(records) == [k for k, user in enumerate(IDS.tolist()) if user in drawn]
    assert {user for _, ids, _ in batches for user in ids} == {0, 1, 3, 5}


def test_users_without_rows_are_drawn_as_often_as_others() -> None:
    sizes = [len(set(ids)) for _, ids, _ in taken(made(dp.Fixed(3, 6), steps=400))]
    assert max(sizes) == 3
    assert min(sizes) == 1  # both users without rows were in the draw
    assert np.mean(sizes) == pytest.approx(2.0, abs=0.15)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, 7), max_size=30), chunk=st.integers(1, 9), seed=st.integers(0, 5)
)
def test_chunks_of_any_size_hold_the_rows_of_the_whole_draw(
    ids: list[int], chunk: int, seed: int
) -> None:
    users = torch.tensor(ids, dtype=torch.int64)
    whole = taken(made(dp.Poisson(3, 8), users, steps=5 + seed))
    joined, draw = [], ([], [])
    for records, of, last in taken(
        made(dp.Poisson(3, 8), users, steps=5 + seed, physical_batch_size=chunk)
    ):
        assert len(records) <= chunk
        draw = (draw[0] + records, draw[1] + of)
        if last:
            joined.append((*draw, True))
            draw = ([], [])
    assert joined == whole
    assert draw == ([], [])


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("workers", [0, 2])
def test_other_data_sets_and_workers_deliver_the_same_rows_and_ids(workers: int) -> None:
    sampler = seeded_sampler(dp.Poisson(2, 6), size=6, steps=12, seed=3)
    loader = UserLoader(Numbers(), sampler, IDS, physical_batch_size=2, num_workers=workers)
    assert taken(loader) == taken(made(dp.Poisson(2, 6), steps=12, physical_batch_size=2))


def test_a_second_iteration_starts_with_ids_of_its_own() -> None:
    loader = made(dp.Full(6), steps=2, physical_batch_size=3)
    for _, records, ids in loader:
        assert ids.tolist() == IDS[records].tolist()
        break  # in the middle of a draw
    loader.batch_sampler.log.give_up()
    assert [ids for _, ids, _ in taken(loader)] == [[0, 0, 1], [3, 3, 3], [5]] * 2


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)
def test_ids_may_be_of_any_integer_type(dtype: torch.dtype) -> None:
    assert user_ids(IDS.to(dtype), 7).equal(IDS)
    assert user_ids(IDS.to(dtype).numpy(), 7).equal(IDS)
    assert user_ids(IDS.tolist(), 7).dtype == torch.int64


class Missing:
    """What is not even equal to itself, as pandas.NaT."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return False


BAD = {
    "floats": ([0.0, 1.0, 2.0], "integer"),
    "bools": ([True, False, True], "integer"),
    "too-few": ([0, 1], "one id per record, 3 of them"),
    "a-column": (np.array([[0], [1], [2]]), "one id per record"),
    "lists": ([[0], [1], [2]], r"ids that hash \(got \['list'\]\)"),
    "none": (None, "users"),
    "negative": ([0, 1, -1], "users must be >= 0"),
    "a-string": ("abc", r"one id per record \(got str\)"),
    "a-mapping": ({"a": 0, "b": 1, "c": 2}, r"one id per record \(got dict\)"),
    "strings-and-numbers": (["a", 1, "b"], r"integers only.*\['int', 'str'\]"),
    "a-name-is-missing": (["a", None, "b"], r"\['NoneType', 'str'\]"),
    "a-time-is-missing": (["a", Missing(), "b"], r"\['Missing', 'str'\]"),
    "too-large-for-a-dtype": ([2**70, 1, 2], "integer"),
    "complex": ([1j, 2j, 3j], "users"),
    "objects": (np.array([1, None, 2], dtype=object), "users"),
    "out-of-the-universe": ([0, 1, 10], r"users must be < n=10 \(got a larger id"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_ids_that_cannot_be_are_refused_by_name(name: str) -> None:
    ids, message = BAD[name]
    run = runs.clipped(10)
    with pytest.raises(UnitError, match=message):
        run.opt.loader(runs.dataset(np.ones((3, 2))), ids)


@pytest.mark.parametrize("make", [list, np.array, lambda ids: np.array(ids, dtype=object)])
def test_names_are_numbered_in_order_of_appearance(make) -> None:
    names = ["ann", "bob", "ann", "eve", "bob"]
    assert user_ids(make(names), 5).tolist() == [0, 1, 0, 2, 1]


def test_any_ids_that_hash_are_numbered() -> None:
    days = [datetime.date(2026, 11, d) for d in (1, 2, 1)]
    assert (
        user_ids(days, 3).tolist()
        == user_ids([("a", 1), ("b", 1), ("a", 1)], 3).tolist()
        == [0, 1, 0]
    )
    assert user_ids(np.array(days, dtype="datetime64[D]"), 3).tolist() == [0, 1, 0]
    assert user_ids([], 0).tolist() == user_ids(np.array([], dtype=str), 0).tolist() == []


def test_more_names_than_users_are_refused_without_quoting_one() -> None:
    run = runs.clipped(2)
    with pytest.raises(UnitError, match="users must be < n=2") as caught:
        run.opt.loader(runs.dataset(np.ones((3, 2))), ["ann", "bob", "eve"])
    assert not any(name in str(caught.value) for name in ("ann", "bob", "eve"))


@pytest.mark.parametrize("adjacency", ["replace_one", "add_remove"])
def test_names_train_like_numbers(adjacency: str) -> None:
    data, ids = runs.agreeing(12, rows=3)
    names = [f"user {k}" for k in ids.tolist()]
    runs_of = [runs.clipped(12, clip=0.7, steps=3, adjacency=adjacency) for _ in range(2)]
    for run, of in zip(runs_of, (ids, names), strict=True):
        for rows, targets, _ in run.opt.loader(data, of):
            runs.linear_loss(run.model(rows), targets).backward()
            run.opt.step()
    torch.testing.assert_close(runs_of[0].weights, runs_of[1].weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
def test_ids_out_of_the_universe_are_refused(adjacency: str) -> None:
    run = runs.clipped(10, batch_size=5, adjacency=adjacency)
    with pytest.raises(UnitError, match="users must be < n=10"):
        run.opt.loader(runs.dataset(np.ones((3, 2))), [0, 1, 10])
    assert len(run.opt.loader(runs.dataset(np.ones((3, 2))), [0, 1, 9])) == 1
    with pytest.raises(UnitError, match="users must be < n=6"):
        UserLoader(ROWS, make_sampler(dp.Full(6), size=6), IDS + 1)


def test_ids_that_change_later_are_not_followed() -> None:
    ids = np.array([0, 1, 1])
    run = runs.clipped(2, steps=2)
    loader = run.loader(runs.dataset([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]), ids)
    ids[:] = 0
    for rows, _, users in loader:
        assert rows[:, 0].tolist() == [1.0, 2.0, 3.0]
        assert users.tolist() == [0, 1, 1]
        runs.linear_loss(run.model(rows), torch.zeros(3, 1)).backward()
        run.opt.step()


def test_read_only_ids_do_not_warn() -> None:
    ids = np.array([0, 1, 1])
    ids.setflags(write=False)
    assert user_ids(ids, 3).tolist() == [0, 1, 1]


# -- the loader of an optimizer ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_loader_of_an_optimizer_draws_users_by_its_design() -> None:
    run = runs.clipped(30, batch_size=10, steps=200)
    data, ids = runs.agreeing(30, rows=3)
    sizes = []
    for rows, _, users in run.loader(data, ids):
        drawn = torch.isin(ids, users)
        assert len(rows) == int(drawn.sum())
        sizes.append(len(users.unique()))
        if len(rows):
            runs.linear_loss(run.model(rows), torch.zeros(len(rows), 1)).backward()
        run.opt.step()
    assert len(sizes) == 200
    assert np.mean(sizes) == pytest.approx(10.0, abs=4 * np.sqrt(30 * 2 / 9 / 200))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("users", [0, 20, 30])
def test_under_add_remove_the_data_say_how_many_users_there_are(users: int) -> None:
    run = runs.clipped(30, batch_size=15, steps=60, adjacency="add_remove")
    data, ids = (
        runs.agreeing(users, rows=2)
        if users
        else (runs.dataset(np.ones((0, 2))), torch.arange(0))
    )
    run.train(data, ids)
    assert run.opt.steps == 60
    assert bool(run.weights.abs().sum() > 0) == (users > 0)
    assert len({type(run.loader(data, ids).batch_sampler)}) == 1
    assert run.loader(data, ids).batch_sampler.size == (users or 30)


def test_under_add_remove_users_beyond_the_reference_are_refused_at_once() -> None:
    run = runs.clipped(30, batch_size=15, steps=60, adjacency="add_remove")
    data, ids = runs.agreeing(45, rows=2)
    with pytest.raises(
        UnitError, match=r"users must be numbered below n=30, the reference \(got a larger"
    ):
        run.opt.loader(data, ids)


def test_only_loaders_of_users_are_bound_to_an_optimizer_that_protects_users() -> None:
    """With a row per position of the draw a user with more rows is drawn more often than charged."""
    run = runs.clipped(30, batch_size=15, steps=3)
    data, _ = runs.agreeing(30)
    with pytest.raises(PrivacyError, match="users"):
        run.opt.bind(PrivateLoader(data, make_sampler(run.opt.design, size=30, steps=3)))
    with pytest.raises(PrivacyError, match="users"):
        run.opt.bind(
            torch.utils.data.DataLoader(
                data, batch_sampler=make_sampler(run.opt.design, size=30, steps=3)
            )
        )


def test_a_loader_of_users_is_not_bound_to_an_optimizer_that_protects_examples() -> None:
    layer = runs.model()
    plan = dp.ClippedSGD.plan(
        lr=1.0, clip=1.0, noise_multiplier=1.0, sampling=dp.Poisson(15, 30), steps=3
    )
    opt = dp.ClippedSGD(layer.parameters(), plan)
    data, ids = runs.agreeing(30, rows=2)
    with pytest.raises(PrivacyError, match="loader must draw examples"):
        opt.bind(UserLoader(data, make_sampler(opt.design, size=30, steps=3), ids))


def test_the_loader_of_an_optimizer_that_protects_users_needs_their_ids_and_the_step_knows_them() -> (
    None
):
    with pytest.raises(
        UnitError, match="users must be given for UserClippedSGD, which protects users"
    ):
        runs.clipped(3).opt.loader(runs.dataset(np.ones((3, 2))))
    data, ids = runs.agreeing(12, rows=4)
    given, known = (runs.clipped(12, clip=0.7, steps=2) for _ in range(2))
    given.train(data, ids)
    for rows, targets, _ in known.opt.loader(data, ids, physical_batch_size=7):
        runs.linear_loss(known.model(rows), targets).backward()
        known.opt.step()
    torch.testing.assert_close(known.weights, given.weights, rtol=0, atol=1e-12)


IDS_OF_ROWS = {
    "one-per-row": lambda ids: torch.arange(len(ids)),  # each row would count as a user
    "another-order": lambda ids: ids.flip(0),
    "shifted": lambda ids: (ids + 1) % 3,
    "too-few": lambda ids: ids[:-1],
    "too-large": lambda ids: ids + 1,
    "negative": lambda ids: ids - 1,
}


@pytest.mark.cases(8, 4)
@pytest.mark.parametrize("partial", [False, True], ids=["step", "accumulate"])
@pytest.mark.parametrize("name", list(IDS_OF_ROWS))
def test_ids_that_were_not_delivered_are_refused(name: str, partial: bool) -> None:
    """With an id of its own for each of its 8 rows a user would contribute 8 clips."""
    run = runs.clipped(3)
    owners = [0] * 8 + [1, 2]
    rows, targets, ids = next(iter(run.opt.loader(runs.dataset(np.ones((10, 2))), owners)))
    runs.linear_loss(run.model(rows), targets).backward()
    with pytest.raises(UnitError, match="users must be the ids that the loader delivered"):
        (run.opt.accumulate if partial else run.opt.step)(users=IDS_OF_ROWS[name](ids))
    assert (run.opt.steps, len(run.opt.accountant), run.weights.tolist()) == (0, 0, [0.0, 0.0])


def test_ids_that_the_loop_overwrites_are_refused() -> None:
    run = runs.clipped(3)
    rows, targets, ids = next(
        iter(run.opt.loader(runs.dataset(np.ones((10, 2))), [0] * 8 + [1, 2]))
    )
    runs.linear_loss(run.model(rows), targets).backward()
    ids.copy_(torch.arange(len(ids)))
    with pytest.raises(UnitError, match="users must be the ids that the loader delivered"):
        run.opt.step(users=ids)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("chunk", [None, 1, 4, 1000])
def test_there_is_one_release_per_draw_whatever_the_chunks(chunk: int | None) -> None:
    run = runs.clipped(30, batch_size=10, steps=6, clip=0.7)
    data, ids = runs.agreeing(30, rows=5)
    chunks = 0
    for batch in run.loader(data, ids, seed=1, steps=6, physical_batch_size=chunk):
        run.step(batch)
        chunks += 1
    whole = runs.clipped(30, batch_size=10, steps=6, clip=0.7).train(data, ids, seed=1, steps=6)
    assert (run.opt.steps, len(run.opt.accountant)) == (6, 6)
    torch.testing.assert_close(run.weights, whole.weights, rtol=0, atol=1e-12)
    assert run.ledger() == whole.ledger()
    assert chunks > 6 if chunk in (1, 4) else chunks == 6


def test_accumulated_parts_make_the_step_of_the_whole_draw() -> None:
    data, ids = runs.agreeing(12, rows=4)
    whole, parted = (runs.clipped(12, clip=0.7, steps=2) for _ in range(2))
    whole.train(data, ids)
    for rows, targets, users in parted.loader(data, ids):
        for index in torch.arange(len(rows)).split(5):
            runs.linear_loss(parted.model(rows[index]), targets[index]).backward()
            parted.opt.accumulate(users=users[index])
        parted.opt.step()
    torch.testing.assert_close(parted.weights, whole.weights, rtol=0, atol=1e-12)


# -- phases -----------------------------------------------------------------------------------------------------------


def test_phases_draw_disjoint_users_with_all_their_rows_and_go_on_after_a_break() -> None:
    run = runs.localized(
        runs.phased(runs.quiet(8, steps=2), runs.quiet(16, steps=3), n_users=30)
    )
    data, ids = runs.agreeing(30, rows=3)
    seen: list[set[int]] = []
    while run.opt.steps < 5:
        for batch in run.opt.loader(data, ids, resume=run.opt.steps > 0, physical_batch_size=7):
            before = run.opt.steps
            if len(seen) == before:
                seen.append(set())
            seen[before] |= set(batch[2].tolist()) - {-1}  # rows of the filling are nobody's
            run.step(batch)
            if run.opt.steps == 3 and before == 2:
                break  # and resume in the middle of the second phase
    assert [len(users) for users in seen] == [8, 8, 16, 16, 16]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3] == seen[4]
    assert not seen[0] & seen[2]


def test_phases_do_not_start_again() -> None:
    run = runs.localized(runs.phased(runs.quiet(8, steps=2), runs.quiet(16, steps=2)))
    data, ids = runs.agreeing(24)
    for batch in run.opt.loader(data, ids):
        run.step(batch)
        break
    with pytest.raises(PrivacyError, match="must hold the records of the run"):
        run.opt.loader(data, ids.roll(1))
    for batch in run.opt.loader(data, ids):
        run.step(batch)
    assert run.opt.steps == 4
    assert {part for _, part, _, _ in run.opt.accountant.ledger.entries()} == {"0", "1"}


def test_users_without_rows_are_in_phases_too() -> None:
    run = runs.localized(
        runs.phased(runs.quiet(40, floor=35, steps=2), runs.quiet(40, floor=35, steps=2))
    )
    data, ids = runs.agreeing(80)
    run.train(runs.dataset(data.tensors[0][:79]), ids[:79])
    assert (run.opt.steps, run.opt.halted) == (4, False)
    assert not run.weights.equal(torch.zeros(2, dtype=torch.float64))
