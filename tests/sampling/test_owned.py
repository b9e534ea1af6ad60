"""Whoever holds a record before it is used owns it: sources that fill one buffer again for each of their records.

Each test has a source whose records are unit vectors, so that the sum of clipped rows counts how often each record is
used; and no noise to speak of. Before records were copied one of them was used for all of its batch.
"""

from __future__ import annotations

import copy
import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import torch_dpsco as dp
from torch_dpsco.errors import UnitError
from torch_dpsco.integrations.tar import TarRows
from torch_dpsco.sampling import RecordIds, Spilled
from torch_dpsco.sampling.datasets import owned
from torch_dpsco.sampling.loader import OneByOne, source_of

N = 16  # records
ROWS = torch.eye(N)


class Reusing(Dataset[Any]):
    """Fills one tensor again for each record, as readers of binary files do."""

    name = "people"

    def __init__(self) -> None:
        self.room, self.label = torch.empty(N), torch.empty(1)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.room.copy_(ROWS[index])
        self.label.fill_(1.0)
        return self.room, self.label


class OfNumpy(Reusing):
    """The same in memory of numpy, whose writes torch does not see."""

    def __init__(self) -> None:
        self.room, self.label = np.empty(N, dtype=np.float32), np.empty(1, dtype=np.float32)

    def __getitem__(self, index: int) -> Any:
        self.room[:] = ROWS[index].numpy()
        self.label[:] = 1.0
        return self.room, self.label


class AtOnce(Reusing):
    """Fetches a batch at once, all into one tensor."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Overwriting(Reusing):
    """Gives views of its own rows, and changes those that it gave before."""

    def __init__(self) -> None:
        self.rows, self.newest = ROWS.clone(), 0

    def __getitem__(self, index: int) -> Any:
        self.rows[self.newest] = self.rows[index] = ROWS[index]
        self.newest = index
        return self.rows[index], torch.ones(1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = Reusing()
        yield from ((f"p{index}", *data[index]) for index in range(N))


def optimizer(sampling: Any, **options: Any) -> tuple[nn.Module, Any]:
    """A linear model of no scores, whose rows are the records, and one pass of sums that are all but exact."""
    model = nn.Linear(N, 1, bias=False)
    nn.init.zeros_(model.weight)
    dp.attach(model)
    numbers = {
        "clip": 1.0,
        "noise_multiplier": 1e-9,
        "n": N,
        "lr": 1.0,
        "adjacency": "add_remove",
        **options,
    }
    return model, dp.ClippedSGD(
        model.parameters(), dp.ClippedSGD.plan(sampling=sampling, **numbers)
    )


def pairs(records: list[Any]) -> tuple[Tensor, Tensor]:
    """Collates the records of a stream of (id, x, y)."""
    if not records:
        return torch.zeros(0, N), torch.zeros(0, 1)
    return torch.stack([record[1] for record in records]), torch.stack(
        [record[2] for record in records]
    )


def uses(model: nn.Module, opt: Any, loader: Any, scale: float) -> list[float]:
    """Returns how often each record was used by the steps on the batches of a loader."""
    for x, y, *_ in loader:
        opt.zero_grad()
        (model(x) * y).mean().backward()
        opt.step()
    return (-model.weight.detach()[0] * scale).round(decimals=3).tolist()


SOURCES = [Reusing, OfNumpy, AtOnce, Overwriting, lambda: Subset(AtOnce(), range(N))]
NAMES = ["tensor", "array", "at once", "views", "subset"]


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
@pytest.mark.parametrize(
    "options", [{}, {"physical_batch_size": 4}, {"isolation": "none"}], ids=str
)
def test_a_data_set_that_fills_one_tensor_gives_each_record_once(
    source: Callable[[], Any], options: Any
) -> None:
    model, opt = optimizer(dp.Full(N), steps=1)
    assert uses(model, opt, opt.loader(source(), **options), N) == [1.0] * N


def test_workers_copy_the_records_that_they_fetch() -> None:
    model, opt = optimizer(dp.Full(N), steps=1)
    assert uses(model, opt, opt.loader(OfNumpy(), num_workers=1), N) == [1.0] * N


def test_a_pass_over_a_data_set_that_fills_one_tensor_has_each_record_once() -> None:
    model, opt = optimizer("allocated", batch_size=4, epochs=1)
    assert uses(model, opt, opt.loader(Reusing()), 4) == [1.0] * N


def test_a_user_of_a_data_set_that_fills_one_tensor_has_its_own_records() -> None:
    model = nn.Linear(N, 1, bias=False)
    nn.init.zeros_(model.weight)
    plan = dp.UserClippedSGD.plan(
        clip=1.0,
        noise_multiplier=1e-9,
        n=N,
        batch_size=N,
        sampling=dp.Full(N),
        steps=1,
        lr=1.0,
    )
    opt = dp.UserClippedSGD(dp.attach(model).parameters(), plan)
    assert uses(model, opt, opt.loader(Reusing(), users=list(range(N))), N) == [1.0] * N


def test_a_bound_loader_gives_each_record_once() -> None:
    model, opt = optimizer(dp.Poisson(N // 2, N), steps=1)
    data = Reusing()
    loader = opt.bind(
        DataLoader(
            data, batch_sampler=dp.sampling.PoissonSampler(dp.Poisson(N // 2, N), steps=1)
        )
    )
    assert set(uses(model, opt, loader, N // 2)) <= {0.0, 1.0}
    assert source_of(loader.dataset) is data
    assert source_of(opt.bind(loader).dataset) is data


def test_the_memory_manager_of_opacus_gives_each_record_once() -> None:
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    model, opt = optimizer(dp.Full(N), steps=1)
    loader = opt.loader(Reusing(), isolation="none")
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=5, optimizer=opt
    ) as parts:
        assert uses(model, opt, parts, N) == [1.0] * N


def test_fit_gives_each_record_once() -> None:
    model, opt = optimizer(dp.Full(N), steps=1)
    dp.fit(model, opt, Reusing(), dp.per_record(lambda score, y: score * y), progress=False)
    assert (-model.weight.detach()[0] * N).round(decimals=3).tolist() == [1.0] * N


def test_a_spilled_stream_that_fills_one_tensor_has_each_record_once_and_small() -> None:
    data = Spilled(ROWS[index] for index in range(N))  # views of all rows
    assert torch.equal(torch.stack([data[k] for k in range(N)]), ROWS)
    assert all(data[k].untyped_storage().nbytes() == 4 * N for k in range(N))
    assert torch.equal(
        torch.stack([data[k][1] for data in [Spilled(Stream())] for k in range(N)]), ROWS
    )


def test_ids_that_are_given_in_one_tensor_are_those_of_their_records() -> None:
    class Ids:
        def __iter__(self) -> Iterator[Any]:
            room = torch.empty((), dtype=torch.int64)
            yield from (room.fill_(k) for k in range(N))

    RecordIds(Ids(), N).require_unique()
    model, opt = optimizer("allocated", batch_size=4, epochs=1)
    assert uses(model, opt, opt.loader(Reusing(), record_ids=Ids()), 4) == [1.0] * N


def test_a_decoder_of_archives_that_fills_one_array_has_each_record_once(tmp_path: Any) -> None:
    with tarfile.open(tmp_path / "t.tar", "w") as archive:
        for k in range(N):
            member = tarfile.TarInfo(f"{k}.txt")
            member.size = len(str(k))
            archive.addfile(member, io.BytesIO(str(k).encode()))
    room = np.empty(N)

    def decode(files: dict[str, bytes]) -> tuple[Any, int]:
        room[:] = ROWS[int(files["txt"])]
        return room, 0

    data = TarRows([tmp_path / "t.tar"], decode, shape=[N])
    assert torch.equal(torch.stack([data[k][0] for k in range(N)]), ROWS)


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_a_data_set_that_fills_one_tensor_is_solved_record_by_record(
    source: Callable[[], Any],
) -> None:
    def answer(data: Any) -> Tensor:
        layer = nn.Linear(N, 1, bias=False, dtype=torch.float64)
        plan = dp.OutputPerturbation.plan(
            model=layer,
            loss=dp.losses.Logistic(),
            n=N,
            bound_x=1.0,
            reg=1.0,
            noise_multiplier=1e-9,
        )
        opt = dp.OutputPerturbation(layer.parameters(), plan)
        opt.solve(data)
        opt.finalize()
        return layer.weight.detach()

    torch.testing.assert_close(
        answer(source()), answer(TensorDataset(ROWS, torch.ones(N, 1))), atol=1e-5, rtol=0
    )


def test_a_fetch_of_one_record_gives_one() -> None:
    class Twice(Reusing):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices for _ in range(2)]

    _, opt = optimizer(dp.Full(N), steps=1)
    with pytest.raises(UnitError, match="one record for one index"):
        next(iter(opt.loader(Twice())))


def test_what_a_data_set_has_besides_records_is_still_there() -> None:
    _, opt = optimizer(dp.Full(N), steps=1)
    loader = opt.loader(Reusing())
    assert loader.dataset.name == "people"
    assert len(copy.copy(loader.dataset)) == N
    with pytest.raises(AttributeError):
        _ = loader.dataset.names
    assert (
        opt.loader(TensorDataset(ROWS, torch.ones(N, 1))).dataset.tensors[0] is ROWS
    )  # nothing writes to them


@pytest.mark.parametrize("name", [False, True])
@pytest.mark.parametrize("reuse", ["torch", "numpy"])
def test_a_batch_is_used_as_it_was_at_the_forward(reuse: str, name: bool) -> None:
    """A loop that stages two parts of a batch in one buffer, before its step: each record is used once."""
    model, opt = optimizer(dp.Full(N), steps=1)
    array = np.empty((N // 2, N), dtype=np.float32)
    buffer = torch.from_numpy(array)
    for x, y in opt.loader(TensorDataset(ROWS, torch.ones(N, 1)), isolation="none"):
        opt.zero_grad()
        for start in (0, N // 2):
            part = x[start : start + N // 2]
            if reuse == "numpy":
                array[:] = part.numpy()
            else:
                buffer.copy_(part)
            scores = model(input=buffer) if name else model(buffer)
            (scores * y[start : start + N // 2]).mean().backward()
        opt.step()
    assert (-model.weight.detach()[0] * N).round(decimals=3).tolist() == [1.0] * N


# -- the copy itself --------------------------------------------------------------------------------------------------


@dataclass
class Visit:
    x: Tensor
    notes: list[Any]


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def emptied(thing: Any) -> None:
    """Writes zeros into everything that can be written to."""
    if isinstance(thing, Tensor):
        thing.zero_()
    elif isinstance(thing, (np.ndarray, bytearray, memoryview)):
        np.asarray(thing)[...] = 0
    elif isinstance(thing, (Visit, Plain)):
        emptied(vars(thing))
    elif isinstance(thing, (list, tuple, dict)):
        for part in thing.values() if isinstance(thing, dict) else thing:
            emptied(part)


def shown(thing: Any) -> str:
    if isinstance(thing, memoryview):
        return f"{thing.format} {thing.tolist()}"
    return f"{vars(thing)}" if isinstance(thing, Plain) else f"{thing}"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3)[1:],
        lambda: torch.ones(2, 1).expand(2, 3).clone()[:, 1],
        lambda: np.ones((2, 3))[:, ::2],
        lambda: np.array([np.ones(2), [1.0]], dtype=object)[0],
        lambda: np.array([[np.ones(2)], [[1.0]]], dtype=object)[0].tolist(),
        lambda: (torch.ones(2), [np.ones(2)], {"a": {"b": torch.ones(1)}}),
        lambda: bytearray(b"abc"),
        lambda: memoryview(np.ones((2, 4))[:, ::2]),
        lambda: memoryview(bytearray(b"")),
        lambda: Visit(torch.ones(2), [torch.ones(2), "text"]),
        lambda: Plain(torch.ones(4)[:2]),
    ],
    ids=[*"abcdefghijk"],
)
def test_a_copy_shares_nothing_with_the_record(make: Callable[[], Any]) -> None:
    record, same = make(), make()
    kept = owned(record)
    assert type(kept) is type(record)
    emptied(record)
    assert shown(kept) == shown(same)


def test_a_row_of_a_structured_array_is_copied() -> None:
    table = np.ones(2, dtype=[("x", np.float64), ("y", np.int64)])
    kept = owned(table[0])
    table["x"] = 0.0
    assert kept["x"] == 1.0


def test_an_image_is_copied() -> None:
    image = pytest.importorskip("PIL.Image").new("L", (2, 2), 7)
    kept = owned((image, 1))[0]
    image.putpixel((0, 0), 0)
    assert kept.getpixel((0, 0)) == 7


def test_a_copy_of_a_view_has_its_own_entries_alone() -> None:
    whole = torch.zeros(1000, 3)
    kept = owned((whole[1], Plain(whole[2]), {"z": whole[3]}))
    assert [part.untyped_storage().nbytes() for part in (kept[0], kept[1].x, kept[2]["z"])] == [
        12,
        12,
        12,
    ]


def test_what_does_not_change_is_not_copied() -> None:
    text, number = "a" * 100, 10**30
    assert owned(text) is text
    assert owned(number) is number


def test_what_cannot_be_copied_is_refused_by_its_kind(tmp_path: Any) -> None:
    with (
        open(tmp_path / "secret", "w") as file,
        pytest.raises(TypeError, match=r"got a TextIOWrapper") as found,
    ):
        owned(file)
    assert "secret" not in str(found.value)
    with pytest.raises(TypeError, match="got a generator"):
        owned((1, (k for k in range(3))))


def test_records_of_a_copy_of_a_data_set_are_copied_too() -> None:
    data = copy.deepcopy(OneByOne(Reusing()))
    first, second = data[0], data[1]
    assert first[0][0] == 1.0
    assert second[0][1] == 1.0
