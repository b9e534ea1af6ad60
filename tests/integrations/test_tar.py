"""Tar archives as a data set: what is a record, what becomes a null record, what is refused, and runs on it."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.processes import full, layer, numbers
from torch_dpsco.errors import UnitError
from torch_dpsco.integrations import tar
from torch_dpsco.integrations._files import identity
from torch_dpsco.integrations.tar import TarRows

N, DIM = 12, 3
Member = tuple[str, bytes]


def array(x: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(x))
    return file.getvalue()


def decode(files: dict[str, bytes]) -> tuple[Any, Any]:
    x = np.load(io.BytesIO(files["npy"]), allow_pickle=False)
    return torch.from_numpy(x), int(files["cls"])


def record(key: str, x: Any, y: Any) -> list[Member]:
    return [(f"{key}.npy", array(x)), (f"{key}.cls", str(y).encode())]


def written(path: Path, members: Iterable[Member], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


X = np.random.default_rng(0).standard_normal((N, DIM))
Y = np.arange(N) % 2
MEMBERS = [record(f"people/{k:04d}", X[k], Y[k]) for k in range(N)]


def flat(records: Iterable[list[Member]]) -> list[Member]:
    return [member for members in records for member in members]


def rows(paths: list[Path], **options: Any) -> TarRows:
    return TarRows(paths, **{"decode": decode, "shape": [DIM], "dtype": torch.float64} | options)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_records_come_in_the_order_of_the_archives(mode: str, tmp_path: Path) -> None:
    paths = [
        written(tmp_path / "b.tar", flat(MEMBERS[:5]), mode),
        written(tmp_path / "a.tar", flat(MEMBERS[5:]), mode),
        written(tmp_path / "none.tar", [], mode),
    ]
    data = rows(paths)
    x, y = data.gather(np.arange(N))
    assert (len(data), x.dtype, y.dtype) == (N, torch.float64, torch.int64)
    assert torch.equal(x, torch.from_numpy(X))
    assert torch.equal(y, torch.from_numpy(Y))
    assert repr(data) == "TarRows(SECRET)"


def test_names_have_a_key_and_an_ending(tmp_path: Path) -> None:
    seen: list[dict[str, bytes]] = []

    def spy(files: dict[str, bytes]) -> tuple[Any, Any]:
        seen.append(files)
        return 1.0, 1

    path = tmp_path / "names.tar"
    with tarfile.open(path, "w") as archive:
        for name in (
            "a/1.x",
            "a/1.tar.gz",
            "README",
            "a/.hidden",
            "b/1.x",
            "a.d/2.x",
            "link.x",
            "folder.x",
        ):
            member = tarfile.TarInfo(name)
            if name == "link.x":
                member.type, member.linkname = tarfile.SYMTYPE, "a/1.x"
            if name == "folder.x":
                member.type = tarfile.DIRTYPE
            archive.addfile(member, io.BytesIO())
    data = TarRows([path], spy, shape=[])
    assert [set(files) for files in seen] == [{"x", "tar.gz"}, {"x"}, {"x"}]
    assert [part.tolist() for part in data.gather(np.arange(3))] == [[1.0] * 3, [1] * 3]


def test_targets_are_numbers_or_tensors(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.tar", [("1.json", json.dumps({"x": [1, 2], "y": [[0.5, 1]]}).encode())]
    )
    both = lambda files: tuple(json.loads(files["json"]).values())  # noqa: E731
    data = TarRows([path], both, shape=[2], target_shape=[1, 2], target_dtype=torch.float32)
    x, y = data[0]
    assert (x.tolist(), y.tolist(), x.dtype, y.dtype) == (
        [1.0, 2.0],
        [[0.5, 1.0]],
        torch.float32,
        torch.float32,
    )


GOOD = X[0]
UNUSABLE: dict[str, list[Member]] = {
    "no class": [("a.npy", array(GOOD))],
    "a class of text": record("a", GOOD, "secret"),
    "other inputs": [("a.npy", b"secret"), ("a.cls", b"1")],
    "a pickle": [("a.npy", array(np.array([None] * DIM, dtype=object))), ("a.cls", b"1")],
    "longer": record("a", np.ones(DIM + 1), 1),
    "one number": record("a", 1.0, 1),
    "a dimension more": record("a", np.ones((1, DIM)), 1),
    "NaN": record("a", [np.nan, 1.0, 1.0], 1),
    "infinity": record("a", [np.inf, 1.0, 1.0], 1),
    "beyond float32": record("a", [1e300, 1.0, 1.0], 1),
    "complex numbers": record("a", np.ones(DIM) * 1j, 1),
    "text": record("a", ["secret"] * DIM, 1),
    "text of numbers": record("a", ["1"] * DIM, 1),
    "a class beyond int64": record("a", GOOD, 2**63),
}


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("case", UNUSABLE)
def test_records_that_cannot_be_used_become_null_records(case: str, tmp_path: Path) -> None:
    """They are records, wherever they are, and their rows contribute exactly nothing."""
    members = [MEMBERS[0], MEMBERS[1], UNUSABLE[case], MEMBERS[2]]
    data = rows([written(tmp_path / "a.tar", flat(members))], dtype=torch.float32)
    inputs, targets = data.gather(np.arange(4))
    assert len(data) == 4
    assert inputs.isnan().all(1).tolist() == [False, False, True, False]
    assert targets.tolist() == [0, 1, 0, 0]
    sums = []
    for records in (
        TensorDataset(inputs, targets),
        TensorDataset(inputs[[0, 1, 3]], targets[[0, 1, 3]]),
    ):
        model = layer(inputs=DIM, dtype=torch.float32)
        optimizer = full(model, 4, adjacency="add_remove")
        for x, y in optimizer.loader(records, steps=1):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(
                model(x), y[:, None].float()
            ).backward()
            optimizer.step()
        sums.append(numbers(model))
    assert torch.equal(*sums)


@pytest.mark.parametrize(
    "bad",
    [
        (GOOD, 0.5),
        (GOOD, np.nan),
        (GOOD, 2.0**63),
        (GOOD, np.uint64(2**63)),
        (["1"] * DIM, 1),
        (GOOD,),
        None,
    ],
)
def test_what_decode_gives_otherwise_becomes_a_null_record(bad: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar", flat(MEMBERS[:2]))
    given = iter([(GOOD, 1), bad])
    data = TarRows([path], lambda files: next(given), shape=[DIM])
    assert bool(data[0][0].isfinite().all())
    assert bool(data[1][0].isnan().all())


def test_tensors_of_any_kind_are_rows(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar", flat(MEMBERS[:4]))
    ones = torch.ones(DIM)
    given = iter([ones.bfloat16(), ones.byte(), nn.Parameter(ones), ones.bool()])
    data = TarRows([path], lambda files: (next(given), torch.tensor(True)), shape=[DIM])
    x, y = data.gather(np.arange(4))
    assert torch.equal(x, torch.ones(4, DIM))
    assert y.tolist() == [1] * 4


def test_a_mistake_in_decode_is_shown_by_the_example_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar", flat(MEMBERS))

    def wrong(files: dict[str, bytes]) -> Any:
        return decode(files)[0].mistake, 1

    assert bool(TarRows([path], wrong, shape=[DIM]).gather(np.arange(N))[0].isnan().all())
    example = {name.partition(".")[2]: content for name, content in record("e", np.ones(DIM), 1)}
    with pytest.raises(AttributeError, match="mistake"):
        TarRows([path], wrong, shape=[DIM], example=example)
    with pytest.raises(
        ValueError, match=r"decode must make finite inputs of shape \(2,\) .* of example"
    ):
        TarRows([path], decode, shape=[2], example=example)
    assert len(TarRows([path], decode, shape=[DIM], example=example)) == N


def test_a_record_in_two_archives_is_one_in_each(tmp_path: Path) -> None:
    first, second = MEMBERS[1]
    paths = [
        written(tmp_path / "a.tar", [*MEMBERS[0], first]),
        written(tmp_path / "b.tar", [second, *MEMBERS[2]]),
        written(tmp_path / "c.tar", MEMBERS[0]),
    ]
    inputs, _ = rows(paths).gather(np.arange(5))
    assert inputs.isnan().all(1).tolist() == [False, True, True, False, False]


@pytest.mark.parametrize(
    "members",
    [
        [*MEMBERS[0], *MEMBERS[1], *MEMBERS[0]],
        [*MEMBERS[0], *MEMBERS[0]],
        [MEMBERS[0][0], *MEMBERS[1], MEMBERS[0][1]],  # as if all .npy came before all .cls
    ],
)
def test_a_name_that_comes_twice_is_refused_by_the_archive(
    members: list[Member], tmp_path: Path
) -> None:
    path = written(tmp_path / "twice.tar", members)
    with pytest.raises(
        UnitError, match=r"names of records must be unique in an archive.*twice\.tar"
    ) as caught:
        rows([path])
    assert "0000" not in str(caught.value)


def test_a_file_under_two_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = written(tmp_path / "good.tar", flat(MEMBERS))
    (tmp_path / "link.tar").symlink_to(good)
    (tmp_path / "folder").symlink_to(tmp_path)
    (tmp_path / "hard.tar").hardlink_to(good)
    monkeypatch.chdir(tmp_path)
    names = [
        good,
        "good.tar",
        "./good.tar",
        "link.tar",
        "hard.tar",
        "folder/good.tar",
        f"{tmp_path}/./good.tar",
    ]
    for name in names:
        with pytest.raises(UnitError, match=r"paths must hold each file once .*good\.tar"):
            rows([good, written(tmp_path / "other.tar", MEMBERS[0]), name])
    with pytest.raises(
        ValueError, match=r"can be read to their end \(got FileNotFoundError of .*nowhere"
    ):
        rows([good, tmp_path / "nowhere.tar"])


def test_an_archive_that_takes_the_place_of_another_is_refused(tmp_path: Path) -> None:
    first, second = (written(tmp_path / f"{k}.tar", MEMBERS[k]) for k in range(2))

    def change(files: dict[str, bytes]) -> tuple[Any, Any]:
        os.replace(first, second)  # while the first one is read
        return decode(files)

    with pytest.raises(ValueError, match=r"got ReadError of .*1\.tar"):
        TarRows([first, second], change, shape=[DIM])


def test_files_without_numbers_are_told_by_their_real_paths(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    nothing = os.stat_result([0] * 10)
    names = [identity(nothing, str(tmp_path / name)) for name in ("file", "link", "other")]
    assert names[0] == names[1] != names[2]


def test_a_damaged_archive_is_refused_by_its_path(tmp_path: Path) -> None:
    """tarfile itself takes a header that it cannot read, other than the first, for the end."""
    whole = written(tmp_path / "whole.tar", flat(MEMBERS)).read_bytes()
    packed = gzip.compress(whole)
    hole = whole[:2048] + bytes(512) + whole[2560:]
    damaged = {
        "cut in a file": whole[: 512 * 3 + 10],
        "cut in a header": whole[: 512 * 4 + 100],
        "cut between members": whole[: 512 * 4],
        "a broken header": whole[:2048] + b"secret" + whole[2054:],
        "an empty header": hole,
        "no archive": b"secret" * 1000,
        "nothing": b"",
        "cut gzip": packed[: len(packed) // 2],
        "cut gzip at its end": packed[:-4],
        "broken gzip": packed[:300] + bytes(20) + packed[320:],
        "broken sum of gzip": packed[:-6] + b"\1\2" + packed[-4:],
    }
    for name, content in damaged.items():
        path = tmp_path / f"{name}.tar"
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"paths must be of tar archives.*\.tar\)"
        ) as caught:
            rows([tmp_path / "whole.tar", path])
        assert "secret" not in str(caught.value)
        assert caught.value.__suppress_context__
    with pytest.raises(ValueError, match="FileNotFoundError"):
        rows([tmp_path / "missing.tar"])


def test_what_stands_in_a_record_ends_no_run_and_nothing_else_is_caught(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar", flat(MEMBERS))

    def stop(files: dict[str, bytes]) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rows([path], decode=stop)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"paths": "a.tar"}, "paths must be a list"),
        ({"decode": 3}, "decode must be a function"),
        ({"shape": [0]}, "shape must be"),
        ({"shape": 3}, "shape must be a list"),
        ({"target_shape": [-1]}, "target_shape must be"),
        ({"dtype": torch.int64}, "dtype must be torch.float32 or torch.float64"),
        ({"target_dtype": torch.int32}, "target_dtype must be"),
        ({"example": [1]}, "example must be a mapping"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    good: dict[str, Any] = {
        "paths": [written(tmp_path / "a.tar", flat(MEMBERS))],
        "decode": decode,
        "shape": [DIM],
    }
    assert len(TarRows(**good)) == N
    with pytest.raises(ValueError, match=words):
        TarRows(**good | options)


@pytest.mark.weekly
def test_memory_does_not_grow_with_an_archive(tmp_path: Path) -> None:
    def members(count: int) -> list[Member]:
        return flat(record(f"{k:06d}", np.ones(DIM), 1) for k in range(count))

    peaks = []
    for count in (200, 1200):
        path = written(tmp_path / f"{count}.tar", members(count))
        tracemalloc.start()
        rows([path])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 1000 * 600  # a name each, not its two headers


def test_nobody_can_open_the_rows_and_none_have_shapes(tmp_path: Path) -> None:
    (folder := tmp_path / "private").mkdir()
    data = rows([written(tmp_path / "a.tar", [])], folder=folder)
    assert os.listdir(folder) == []
    assert [tuple(part.shape) for part in data.gather(np.arange(0))] == [(0, DIM), (0,)]


def test_fit_trains_from_archives(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = rows(
        [written(tmp_path / "a.tar", [*flat(MEMBERS), *UNUSABLE["NaN"]])], dtype=torch.float32
    )
    model, n = nn.Linear(DIM, 2), N + 1
    plan = dp.ClippedSGD.plan(
        n=n, lr=0.1, clip=1.0, noise_multiplier=1.0, batch_size=4, epochs=1
    )
    optimizer = dp.ClippedSGD(model.parameters(), plan)
    dp.fit(model, optimizer, data, nn.CrossEntropyLoss(), progress=False)
    assert optimizer.steps == plan.steps
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_the_limit_of_what_is_read_behind_the_end_is_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = written(tmp_path / "a.tar", flat(MEMBERS)).read_bytes()
    monkeypatch.setattr(tar, "_BLOCK", 1024)
    (tmp_path / "zeros.tar").write_bytes(whole + bytes(5000))
    assert len(rows([tmp_path / "zeros.tar"])) == N
    (tmp_path / "two.tar").write_bytes(whole + bytes(5000) + whole)
    with pytest.raises(ValueError, match="paths must be of tar archives"):
        rows([tmp_path / "two.tar"])
