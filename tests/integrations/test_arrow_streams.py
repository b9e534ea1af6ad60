"""Iterables of Arrow tables as a source of `ParquetRows`: what is read, what may change on the way, what is refused."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_dpsco as dp

pa = pytest.importorskip("pyarrow")

from torch_dpsco.integrations import parquet  # noqa: E402
from torch_dpsco.integrations.parquet import ParquetRows  # noqa: E402

NAMES = ["a", "b"]


def table(start: int = 0, n: int = 10) -> Any:
    a = np.arange(start, start + n, dtype=np.float64)
    return pa.table({"id": [f"name {k}" for k in range(n)], "a": a, "b": -a, "y": a % 2})


def stream(*starts: int) -> Iterator[Any]:
    yield from (table(start) for start in starts)


def all_of(data: ParquetRows) -> list[Any]:
    return [part.tolist() for part in data.gather(np.arange(len(data)))]


def test_tables_and_batches_from_anywhere_give_the_records_in_order() -> None:
    whole = pa.concat_tables(stream(0, 10, 20))
    expected = all_of(ParquetRows(whole, NAMES, "y"))
    assert expected[0] == [[float(k), float(-k)] for k in range(30)]
    sources = (
        stream(0, 10, 20),
        [table(0), table(10), table(20)],
        (table(0), table(10, 20)),
        whole.to_reader(max_chunksize=7),
        whole.to_batches(max_chunksize=4),
        (part for part in [table(0), *table(10, 20).to_batches(), table(0, 0)]),
    )
    for source in sources:
        assert all_of(ParquetRows(source, NAMES, "y")) == expected
    assert all_of(ParquetRows(table().to_batches()[0], NAMES, "y")) == all_of(
        ParquetRows(table(), NAMES, "y")
    )


def test_an_iterable_without_a_table_has_no_records() -> None:
    """As a shard that no record came to: that it is empty is private."""
    data = ParquetRows(iter([]), NAMES, "y")
    assert len(data) == 0
    assert [tuple(part.shape) for part in data.gather(np.arange(0))] == [(0, 2), (0, 1)]


def test_the_kind_of_numbers_may_change_on_the_way() -> None:
    """Ray and pandas find types out from values: one person more or less must not end a run."""
    y = pa.array([0, 1])
    source = [
        pa.table({"a": pa.array([1.5, None]), "y": y}),
        pa.table({"a": pa.array([2, 3]), "y": pa.array([1.0, 0.5])}),
        pa.table({"a": pa.array([True, False]), "y": pa.nulls(2)}),
        pa.table({"y": y, "a": pa.nulls(2)}),
    ]
    inputs, target = ParquetRows(iter(source), ["a"], "y", target_dtype=torch.int64).gather(
        np.arange(8)
    )
    nan = float("nan")
    assert str(inputs[:, 0].tolist()) == str([1.5, nan, 2.0, nan, nan, nan, nan, nan])
    assert target.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    first = ParquetRows(iter(source[::-1]), ["a"], "y").gather(np.arange(8))[0]
    assert first.isnan()[:, 0].tolist() == [True] * 4 + [False, False, False, True]


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (
            pa.table({"a": [1.0], "y": [1]}),
            r"must be columns of the source, each once \(got 'b'\)",
        ),
        (
            pa.table({"a": [1.0], "b": ["secret"], "y": [1]}),
            "column 'b' must hold numbers .got string",
        ),
        (
            pa.table([[1.0], [1.0], [1.0], [1]], names=["a", "b", "b", "y"]),
            r"each once \(got 'b'\)",
        ),
        ({"a": 1.0}, "Arrow tables or record batches .got a dict"),
        ("secret", "Arrow tables or record batches .got a str"),
        (None, "Arrow tables or record batches .got a NoneType"),
    ],
)
def test_what_is_no_table_of_these_columns_is_refused_wherever_it_comes(
    later: Any, words: str
) -> None:
    for source in ([later], [table(), later], [table(), later, table()]):
        with pytest.raises(ValueError, match=words) as caught:
            ParquetRows(iter(source), NAMES, "y")
        assert "secret" not in str(caught.value)


def test_other_columns_may_come_and_go() -> None:
    source = [
        table(),
        table().drop_columns(["id"]),
        table().append_column("more", pa.array(["x"] * 10)),
    ]
    assert len(ParquetRows(source, NAMES, "y")) == 30


@pytest.mark.parametrize("source", [5, None, object()])
def test_what_is_no_iterable_is_told_how_to_be_one(source: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"iterable of tables, as ray_dataset.iter_batches\(batch_format='pyarrow'\)",
    ):
        ParquetRows(source, NAMES, "y")


def test_an_error_of_arrow_on_the_way_is_not_quoted() -> None:
    def broken() -> Iterator[Any]:
        yield table()
        raise pa.ArrowInvalid("secret")

    with pytest.raises(
        ValueError, match=r"source must be readable to its end \(got ArrowInvalid\)"
    ) as caught:
        ParquetRows(broken(), NAMES, "y")
    assert caught.value.__suppress_context__

    def ended() -> Iterator[Any]:
        yield table()
        raise KeyError("the code of a generator is its owner's")

    with pytest.raises(KeyError):
        ParquetRows(ended(), NAMES, "y")


def test_one_table_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []
    block = parquet._block

    def counted(columns: Any, row: Any) -> Any:
        blocks.append(len(columns[-1]))
        return block(columns, row)

    monkeypatch.setattr(parquet, "_block", counted)
    monkeypatch.setattr(parquet, "_ROWS", 1000)
    assert len(ParquetRows(iter([table(0, 2500), table().to_batches()[0]]), NAMES, "y")) == 2510
    assert blocks == [1000, 1000, 500, 10]
    monkeypatch.undo()
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    peak = 0

    def watched() -> Iterator[Any]:
        nonlocal peak
        for k in range(20):
            yield pa.table(
                {"a": np.full(50_000, float(k)), "b": np.zeros(50_000), "y": np.zeros(50_000)}
            )
            peak = max(peak, pa.total_allocated_bytes() - before)

    assert len(ParquetRows(watched(), NAMES, "y")) == 1_000_000
    assert (
        tracemalloc.get_traced_memory()[1] + peak < 8 << 20
    )  # a table has 1.2 MB, all have 24 MB
    tracemalloc.stop()


def test_fit_trains_from_a_stream() -> None:
    torch.manual_seed(0)
    model, loss, n = nn.Linear(2, 1), dp.losses.Logistic(), 60
    plan = dp.HolderSGD.plan(problem=loss.problem(bound_x=3.0), n=n, budget=dp.Budget(2.0, 1e-3))
    optimizer = dp.HolderSGD(model.parameters(), plan)
    tables = (
        pa.table({"a": [0.1, None, 0.3], "b": [0.0, 1.0, 0.5], "y": [-1, 1, 1]})
        for _ in range(20)
    )
    dp.fit(model, optimizer, ParquetRows(tables, NAMES, "y"), loss, shard=n, progress=False)
    assert optimizer.steps == plan.steps
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("page", ["parquet", "tar"])
def test_the_blocks_of_the_pages_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / f"docs/integrations/{page}.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(block, scope)
    if page == "tar":
        assert len(scope["data"]) == 40
        assert bool(scope["data"].gather(np.arange(40))[0].isfinite().all())
    else:
        assert (
            len(scope["ParquetRows"](scope["tables"](), inputs=["age", "hours"], target="y"))
            == 8
        )
