"""Parquet as a data set: what is in it, what becomes a null record, what is refused, and runs on it."""

from __future__ import annotations

import copy
import importlib
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.processes import backward, full, layer, numbers
from torch_dpsco.errors import PrivacyError
from torch_dpsco.sampling import records_of

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pads = pytest.importorskip("pyarrow.dataset")

from torch_dpsco.integrations.parquet import ParquetRows  # noqa: E402

N, DIM = 64, 5
NAMES = [f"x{j}" for j in range(DIM)]


def table(n: int = N, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    columns = {name: rng.standard_normal(n) for name in NAMES}
    return pa.table(columns | {"y": rng.integers(0, 2, n)})


def tensors(data: Any) -> TensorDataset:
    """The same records in memory."""
    return TensorDataset(*data.gather(np.arange(len(data))))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pq.write_table(table(), tmp_path / "rows.parquet", row_group_size=10)
    return tmp_path / "rows.parquet"


def test_all_sources_give_the_same_records_in_order(path: Path) -> None:
    known = table()
    x = torch.from_numpy(np.stack([known[name].to_numpy() for name in NAMES], axis=1))
    y = torch.tensor(known["y"].to_pylist(), dtype=torch.float64)[:, None]
    for source in (path, str(path), path.parent, [str(path)], known, pads.dataset(path)):
        data = ParquetRows(source, inputs=NAMES, target="y", dtype=torch.float64)
        assert len(data) == N
        for found, wanted in zip(data.gather(np.arange(N)), (x, y), strict=True):
            assert torch.equal(found, wanted)
    single = ParquetRows(path, NAMES, "y", target_dtype=torch.int64)
    inputs, target = single[7]
    assert torch.equal(inputs, x[7].float())
    assert (target.dtype, target.shape, int(target)) == (torch.int64, (), int(y[7]))
    assert torch.equal(single.gather(np.array([5, 2, 5]))[0], x[[5, 2, 5]].float())
    turned = ParquetRows(path, NAMES[::-1], "y", dtype=torch.float64)
    assert torch.equal(turned[3][0], x[3].flip(0))
    for index in (-1, N):
        with pytest.raises(IndexError, match="index must be that of a record"):
            single[index]


def test_kinds_of_numbers() -> None:
    source = pa.table(
        {
            "whole": pa.array([1, None], pa.int8()),
            "half": pa.array([np.float16(0.5), None], pa.float16()),
            "exact": pa.array([Decimal("1.25"), Decimal("2.50")]),
            "flag": pa.array([True, False]),
            "y": pa.array([2**53, 1], pa.uint64()),
        }
    )
    data = ParquetRows(
        source,
        ["whole", "half", "exact", "flag"],
        "y",
        dtype=torch.float64,
        target_dtype=torch.int64,
    )
    assert data[0][0].tolist() == [1.0, 0.5, 1.25, 1.0]
    assert int(data[0][1]) == 2**53
    assert bool(data[1][0].isnan().all())


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(
    ("x", "y", "null"),
    [
        (1.0, 1.0, False),
        (None, 1.0, True),
        (np.nan, 1.0, True),
        (np.inf, 1.0, True),
        (1e300, 1.0, True),  # of no float32
        (1.0, None, True),
        (1.0, -np.inf, True),
        (1.0, 1e300, True),
    ],
)
def test_records_that_cannot_be_used_become_null_records(x: Any, y: Any, null: bool) -> None:
    """They are records, are drawn, and their rows contribute exactly nothing."""
    source = pa.table({"a": [1.0, 2.0, x], "b": [0.5, 0.5, 0.5], "y": [0.0, 1.0, y]})
    data = ParquetRows(source, ["a", "b"], "y")
    inputs, target = data[2]
    assert len(data) == 3
    assert (bool(inputs.isnan().all()), float(target)) == ((True, 0.0) if null else (False, 1.0))
    sums = []
    for records in (data, TensorDataset(*data.gather(np.arange(2)))):
        model = layer(inputs=2, dtype=torch.float32)
        optimizer = full(model, 3, adjacency="add_remove")
        for features, targets in optimizer.loader(records, steps=1):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(features), targets).backward()
            optimizer.step()
        sums.append(numbers(model))
    assert torch.equal(*sums) == null


def test_a_class_that_is_no_integer_makes_a_null_record() -> None:
    source = pa.table({"a": [1.0] * 5, "y": [0.0, 2.0, 0.5, None, 1e19]})
    data = ParquetRows(source, ["a"], "y", target_dtype=torch.int64)
    inputs, target = data.gather(np.arange(5))
    assert target.tolist() == [0, 2, 0, 0, 0]
    assert inputs.isnan()[:, 0].tolist() == [False, False, True, True, True]
    large = ParquetRows(
        pa.table({"a": [1.0], "y": pa.array([2**63], pa.uint64())}),
        ["a"],
        "y",
        target_dtype=torch.int64,
    )
    assert bool(large[0][0].isnan())


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["secret", "b"]),
        pa.array(["secret", "b"]).dictionary_encode(),
        pa.array([[1.0], [2.0]]),
        pa.array([0, 1], pa.timestamp("s")),
    ],
)
def test_columns_without_numbers_are_refused_by_name(column: Any) -> None:
    for names in (["job"], ["a", "job"]):
        with pytest.raises(
            ValueError, match=r"column .job. must hold numbers .* publicly known"
        ) as caught:
            ParquetRows(pa.table({"job": column, "a": [1.0, 2.0], "y": [0, 1]}), names, "y")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inputs": ["a", "z"]}, "inputs and target must be columns"),
        ({"target": "z"}, "inputs and target must be columns"),
        ({"inputs": []}, "inputs must be a list of names"),
        ({"inputs": "a"}, "inputs must be a list"),
        ({"inputs": ["a", "a"]}, "got one twice"),
        ({"inputs": ["a", "y"]}, "got one twice"),
        ({"dtype": torch.int64}, "dtype must be torch.float32 or torch.float64"),
        ({"target_dtype": torch.int32}, "target_dtype must be"),
        ({"source": 3}, "source must be Parquet files"),
    ],
)
def test_what_is_no_choice_of_columns_is_refused(options: dict[str, Any], words: str) -> None:
    good: dict[str, Any] = {
        "source": pa.table({"a": [1.0], "y": [1]}),
        "inputs": ["a"],
        "target": "y",
    }
    assert len(ParquetRows(**good)) == 1
    with pytest.raises(ValueError, match=words):
        ParquetRows(**good | options)


def test_a_source_that_cannot_be_read_is_not_quoted(path: Path, tmp_path: Path) -> None:
    """A second file has text where the first one has numbers; or is cut off."""
    other = tmp_path / "s.parquet"
    pq.write_table(pa.table({"x0": ["secret"], "y": [1]}), other)
    for words in ("source must be readable", "source must be"):
        with pytest.raises(ValueError, match=words) as caught:
            ParquetRows([str(path), str(other)], ["x0"], "y")
        assert "secret" not in str(caught.value)
        assert caught.value.__suppress_context__
        other.write_bytes(path.read_bytes()[:-100])


def test_nobody_can_open_print_copy_or_store_the_rows(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    data = ParquetRows(path, NAMES, "y", folder=folder)
    assert os.listdir(folder) == []
    assert repr(data) == "ParquetRows(SECRET)"
    with pytest.raises(PrivacyError, match="must not be pickled"):
        copy.deepcopy(data)
    assert not data._rows.flags.writeable


def test_no_rows_have_the_shapes_of_rows() -> None:
    data = ParquetRows(table(0), NAMES, "y")
    assert [tuple(part.shape) for part in data.gather(np.arange(0))] == [(0, DIM), (0, 1)]
    optimizer = full(layer(dtype=torch.float32), 3, adjacency="add_remove", noise=1.0)
    ((x, y),) = optimizer.loader(data, steps=1, isolation="none")
    assert (x.shape, y.shape) == ((0, DIM), (0, 1))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("padding", [False, True])
def test_a_step_is_that_of_the_same_records_in_memory(path: Path, padding: bool) -> None:
    data = ParquetRows(path, NAMES, "y", dtype=torch.float64)
    answers = []
    for records in (data, tensors(data)):
        model = layer()
        optimizer = full(model, N)
        loader = optimizer.loader(
            records, steps=3, isolation="slots" if padding else "none", physical_batch_size=7
        )
        assert loader.gathers
        for x, y in loader:
            backward(model, optimizer, x, y)
            optimizer.step()
        answers.append(numbers(model))
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-12, atol=1e-12)


def test_passes_over_a_file_go_on_with_their_records_only(path: Path) -> None:
    data = ParquetRows(path, NAMES, "y", dtype=torch.float64)
    model = layer()
    problem = dp.losses.Squared().problem(bound_x=3.0, bound_y=2.0)
    plan = dp.HolderSGD.plan(
        lr=0.01,
        problem=problem,
        noise_multiplier=1.0,
        batch_size=16,
        n=N,
        sampling="allocated",
        epochs=1,
    )
    optimizer = dp.HolderSGD(model.parameters(), plan)
    for x, y in optimizer.loader(data, steps=2):
        backward(model, optimizer, x, y)
        optimizer.step()
    optimizer.loader(ParquetRows(path, NAMES, "y", dtype=torch.float64), resume=True)
    with pytest.raises(PrivacyError, match="dataset must hold the records of the run"):
        optimizer.loader(
            ParquetRows(table(seed=1), NAMES, "y", dtype=torch.float64), resume=True
        )


def test_all_records_are_read_for_a_fingerprint(path: Path) -> None:
    data = ParquetRows(path, NAMES, "y")
    (block,) = records_of(data)
    assert torch.equal(block[0], data.gather(np.arange(N))[0])
    (turned,) = records_of(data, list(range(N))[::-1])
    assert torch.equal(turned[0], block[0].flip(0))


@pytest.mark.slow
def test_fit_trains_from_a_file(path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(DIM, 1)
    plan = dp.HolderSGD.plan(
        problem=dp.losses.Logistic().problem(bound_x=3.0), n=N, budget=dp.Budget(2.0, 1e-3)
    )
    optimizer = dp.HolderSGD(model.parameters(), plan)
    dp.fit(model, optimizer, ParquetRows(path, NAMES, "y"), dp.losses.Logistic(), progress=False)
    assert optimizer.steps == plan.steps
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.slow
def test_the_benchmark_runs_on_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    module = importlib.import_module("out_of_core_sgd")
    module.generate(tmp_path / "rows.parquet", 20_000)
    found = [part(tmp_path / "rows.parquet", 20_000) for part in module.PARTS.values()]
    assert found[2]["steps"] > 0
