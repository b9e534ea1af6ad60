"""Parquet and Arrow tables as blocks: what columns are read as, in which order, and the fit to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import fs

from torch_dpsco.errors import UnitError
from torch_dpsco.estimators import LogisticRegression
from torch_dpsco.integrations import _files
from torch_dpsco.integrations.parquet import ParquetRows, parquet_blocks

N = 1000


def table() -> pa.Table:
    draws = np.random.default_rng(0)
    a, b = draws.random(N, dtype=np.float32), draws.integers(0, 2, N)
    label = np.where(a + 0.2 * b > 0.6, "yes", "no")
    return pa.table({"a": a, "b": b, "label": label, "w": draws.random(N)})


@pytest.fixture
def path(tmp_path: Path) -> str:
    for place, part in enumerate((table().slice(0, 700), table().slice(700))):
        pq.write_table(part, tmp_path / f"{place}.parquet", row_group_size=300)
    return str(tmp_path)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("rows", [1, 77, 1000, 5000])
def test_blocks_are_the_rows_of_the_table_in_order(path, rows):
    blocks = list(parquet_blocks(path, "label", ["b", "a"], sample_weight="w", rows=rows)())
    X, y, w = (np.concatenate(columns) for columns in zip(*blocks[1:], strict=True))
    whole = table()
    assert max(len(block) for block, *_ in blocks) <= rows
    assert np.array_equal(X, np.stack([whole["b"].to_numpy(), whole["a"].to_numpy()], axis=1))
    assert y.tolist() == whole["label"].to_pylist()
    assert np.array_equal(w, whole["w"].to_numpy())


def test_a_parquet_file_under_two_names_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "0.parquet").symlink_to(tmp_path / "0.parquet")
    whole = ds.dataset(["0.parquet"], format="parquet")
    twice = [
        ["0.parquet", "0.parquet"],
        ["0.parquet", "./0.parquet"],
        ["0.parquet", "1.parquet", "links/0.parquet"],
        path,  # a folder with a link
        ds.dataset([whole, whole]),
        ds.dataset([whole, ds.dataset(["links/0.parquet"], format="parquet")]),
        ds.dataset(["0.parquet", "links/0.parquet"], format="parquet").filter(ds.field("w") > 0),
        ds.dataset(
            ["0.parquet", "links/0.parquet"],
            filesystem=fs.SubTreeFileSystem(path, fs.LocalFileSystem()),
        ),
    ]
    for source in twice:
        with pytest.raises(UnitError, match="each file once"):
            parquet_blocks(source, "label", ["a"])
        with pytest.raises(UnitError, match="each file once"):
            ParquetRows(source, ["a"], "b")


@pytest.mark.parametrize("text", ["csv", "json"])
def test_tables_of_text_are_refused(tmp_path, text):
    (tmp_path / "t").write_text("a,label\n1,2\n" if text == "csv" else '{"a": 1, "label": 2}\n')
    source = ds.dataset([ds.dataset(str(tmp_path / "t"), format=text)])
    with pytest.raises(ValueError, match=rf"as \.parquet \(got {text}\)"):
        parquet_blocks(source, "label")
    with pytest.raises(ValueError, match=rf"as \.parquet \(got {text}\)"):
        ParquetRows(source, ["a"], "label")


def test_row_groups_of_one_file_are_no_two_files(path, tmp_path):
    (file,) = ds.dataset(str(tmp_path / "0.parquet"), format="parquet").get_fragments()
    groups = file.split_by_row_group()

    def joined(parts):
        return ds.FileSystemDataset(parts, table().schema, file.format, file.filesystem)

    X = np.concatenate(
        [block[0] for block in parquet_blocks(joined(groups[:2]), "label", ["a"])()]
    )
    assert np.array_equal(X[:, 0], table()["a"].to_numpy()[:600])
    with pytest.raises(UnitError, match="each file once"):
        parquet_blocks(joined([*groups, groups[0]]), "label", ["a"])


def test_tables_elsewhere_are_told_by_their_paths():
    place = _files._place(fs.SubTreeFileSystem("/mock", fs._MockFileSystem()), "a//b.parquet")
    assert place == ("mock", "/mock/a/b.parquet")


@pytest.mark.slow
def test_a_fit_to_a_table_is_that_of_its_rows_in_memory(path, monkeypatch):
    monkeypatch.setattr(
        "torch_dpsco.estimators.fits.noise_generator",
        lambda device, given: torch.Generator().manual_seed(0),
    )
    model = {"epsilon": 4.0, "n": N, "bound_x": 2.0**0.5, "classes": ("no", "yes")}
    whole = table()
    X = np.stack([whole["a"].to_numpy().astype(float), whole["b"].to_numpy()], axis=1)
    first = LogisticRegression(**model).fit(X, whole["label"].to_pylist())
    second = LogisticRegression(**model).fit(parquet_blocks(path, "label", ["a", "b"], rows=64))
    np.testing.assert_allclose(second.coef_, first.coef_, rtol=1e-9)


@pytest.mark.parametrize(
    "kind", [pa.float32(), pa.float16(), pa.float64(), pa.int8(), pa.uint64(), pa.bool_()]
)
def test_types_follow_from_the_schema_and_missing_values_are_nan(kind):
    """A block without missing values has the dtype of one with them: it must not tell whether there are any."""
    full, holed = (
        pa.array(values, pa.float64()).cast(kind) for values in ([1, 0, 1], [1, None, 0])
    )
    source = ds.dataset(
        pa.table({"x": pa.chunked_array([full, holed]), "t": pa.chunked_array([holed, full])})
    )
    _, (X, t), (Y, u) = parquet_blocks(source, "t")()
    assert X.dtype == Y.dtype == (np.float32 if kind == pa.float32() else np.float64)
    assert t.dtype == u.dtype == np.float64
    assert X[:, 0].tolist() == u.tolist() == [1, 0, 1]
    assert np.isnan(Y[1, 0])
    assert np.isnan(t[1])


@pytest.mark.parametrize(
    ("columns", "error", "words"),
    [
        ({"target": "nothing"}, ValueError, "'nothing'"),
        ({"target": "label", "features": ["a", "c"]}, ValueError, "'c'"),
        ({"target": "a", "features": ["label"]}, TypeError, "'label' must be of numbers"),
        ({"target": "label", "rows": 0}, ValueError, "rows"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_the_schema(path, columns, error, words):
    with pytest.raises(error, match=words):
        parquet_blocks(path, **columns)


def test_a_table_without_rows_is_a_fit():
    source = ds.dataset(table().slice(0, 0))
    model = LogisticRegression(adjacency="add_remove", n=N, bound_x=2.0, classes=("no", "yes"))
    fitted = model.fit(parquet_blocks(source, "label", ["a", "b"]))
    assert np.isfinite(fitted.coef_).all()
