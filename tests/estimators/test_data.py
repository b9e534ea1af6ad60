"""What is read: shapes and dtypes decide, values never do."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch

from torch_dpsco.estimators.reading import (
    DataConversionWarning,
    as_codes,
    as_column,
    as_features,
    require_dtype,
)

CPU = torch.device("cpu")
ROWS = np.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_of_floats_are_read_where_they_are(dtype):
    array = ROWS.astype(dtype)
    assert as_features(array).data_ptr() == array.ctypes.data
    tensor = torch.from_numpy(array)
    assert as_features(tensor).data_ptr() == tensor.data_ptr()
    assert as_features(tensor.half()).dtype == torch.float16


@pytest.mark.parametrize(
    "given",
    [
        ROWS.tolist(),
        ROWS.astype(int),
        ROWS.astype(">f8"),
        ROWS.astype(np.float16),
        ROWS.astype(np.longdouble),
        np.asfortranarray(ROWS),
        ROWS[::-1, ::-1][::-1, ::-1],
        pd.DataFrame(ROWS),
        pd.DataFrame(ROWS.astype(int)),
        pd.DataFrame({"a": [0, 2, 4], "b": pd.array([1, 3, 5], dtype="Int64")}),
        torch.arange(6).reshape(3, 2),
    ],
)
def test_all_kinds_of_numbers_are_read_alike(given):
    found = as_features(given)
    assert found.is_floating_point()
    assert torch.equal(found.double(), torch.from_numpy(ROWS))


def test_negative_strides_and_read_only_arrays_are_read():
    frozen = ROWS[::-1].copy()
    frozen.flags.writeable = False
    assert torch.equal(as_features(ROWS[::-1]), as_features(frozen))


def test_a_data_frame_keeps_float32_and_turns_missing_values_into_nan():
    assert as_features(pd.DataFrame(ROWS.astype(np.float32))).dtype == torch.float32
    frame = pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "b": [True, False]})
    assert as_features(frame)[1, 0].isnan()
    assert as_features(frame)[:, 1].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (scipy.sparse.eye(3).tocsr(), TypeError, "sparse"),
        (torch.eye(3).to_sparse(), TypeError, "sparse"),
        (ROWS.astype(object), TypeError, "dtype of numbers"),
        (np.array([["a"]]), TypeError, "dtype of numbers"),
        (pd.DataFrame({"job": ["x", "y"]}), TypeError, "column 'job'"),
        (ROWS + 1j, ValueError, "Complex"),
        (torch.eye(2) + 1j, ValueError, "Complex"),
        (ROWS[0], ValueError, "2D"),
        (ROWS[:, :0], ValueError, "0 feature"),
    ],
)
def test_a_wrong_shape_or_dtype_is_refused(given, error, said):
    with pytest.raises(error, match=said):
        as_features(given)


def test_no_value_of_a_row_is_refused():
    bad = ROWS.copy()
    bad[0, 0], bad[1, 1] = np.nan, -np.inf
    assert as_features(bad).shape == (3, 2)
    assert as_features(np.empty((0, 2))).shape == (0, 2)


@pytest.mark.parametrize(
    "labels",
    [
        ["no", "yes", "maybe"],
        np.array(["no", "yes", "maybe"]),
        np.array(["no", "yes", "maybe"], dtype=object),
        pd.Series(["no", "yes", "maybe"]),
        pd.Series(["no", "yes", "maybe"], dtype="category"),
        pd.Series(["no", "yes", None]),
        ["no", "yes", ["a list"]],
    ],
)
def test_labels_are_found_by_name(labels):
    assert as_codes(labels, ("no", "yes"), 3, CPU).tolist() == [0, 1, -1]


@pytest.mark.parametrize(
    "labels",
    [
        [1, 0, 7],
        [1.0, 0.0, np.nan],
        np.array([1.0, 0.0, np.nan]),
        np.array([1, 0, 7], dtype=np.int8),
        torch.tensor([1.0, 0.0, torch.nan]),
        torch.tensor([1, 0, 7]),
        pd.array([1, 0, None], dtype="Int64"),
    ],
)
def test_labels_are_found_by_number(labels):
    assert as_codes(labels, (1, 0), 3, CPU).tolist() == [0, 1, -1]


def test_one_label_does_not_change_how_others_are_read():
    for stranger in ("x", 2.5, None, 2**70, 1j, object(), [1]):
        assert as_codes([0, 1, 1, stranger], (0, 1), 4, CPU).tolist() == [0, 1, 1, -1]
        numbers = as_column([0, 1, 1, stranger], "y", 4, CPU)
        assert numbers[:3].tolist() == [0, 1, 1]


@pytest.mark.parametrize("stranger", ["x", "7", None, 2**70, 1j, object()])
def test_one_item_does_not_change_how_other_rows_are_read(stranger):
    found = as_features([[0, 1], [0.5, 0.25], [2, stranger]])
    assert found[:2].tolist() == [[0, 1], [0.5, 0.25]]
    assert found[2, 0] == 2


def test_booleans_and_strings_as_tensors_and_classes():
    assert as_codes(torch.tensor([True, False]), (0, 1), 2, CPU).tolist() == [1, 0]
    assert as_codes(torch.tensor([1, 0]), ("0", "1"), 2, CPU).tolist() == [
        -1,
        -1,
    ]  # `require_dtype` refuses these
    assert as_codes(np.empty(0), (0, 1), 0, CPU).tolist() == []


def test_what_is_no_number_is_a_missing_target():
    assert as_column([1, "2", "x", None], "y", 4, CPU)[:2].tolist() == [1, 2]
    assert as_column([1, "2", "x", None], "y", 4, CPU)[2:].isnan().all()
    assert as_column(pd.Series([1.5, 2.5]), "y", 2, CPU).tolist() == [1.5, 2.5]


def test_targets_of_another_shape_are_refused():
    for bad in (ROWS, [1, 2], 3.0, None):
        with pytest.raises(ValueError, match="y"):
            as_column(bad, "y", 3, CPU)
    with pytest.raises(ValueError, match="Complex"):
        as_column(torch.ones(3) + 1j, "y", 3, CPU)
    with pytest.warns(DataConversionWarning, match="column-vector"):
        assert as_column(ROWS[:, :1], "y", 3, CPU).shape == (3,)


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (np.array(["a", "b"]), (0, 1)),
        (np.array([0, 1]), ("no", "yes")),
        (np.array([True, False]), ("no", "yes")),
        (torch.tensor([0, 1]), ("0", "1")),
        (pd.Series([0.0, 1.0]), ("no", "yes")),
        (pd.array([0, 1], dtype="Int64"), ("no", "yes")),
        (
            pd.array([0, None], dtype="Int64"),
            ("no", "yes"),
        ),  # as the one before, though numpy holds it as objects
        (np.array([b"no"]), ("no", "yes")),
        (pd.Series(["0", "1"], dtype="string"), (0, 1)),
    ],
)
def test_a_dtype_that_holds_no_class_is_refused(y, classes):
    with pytest.raises(ValueError, match="give classes as they are in y"):
        require_dtype(y, classes)


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (["a", "b"], (0, 1)),
        (np.array(["a", "b"], dtype=object), (0, 1)),
        (pd.Series(["a", "b"]).astype("category"), (0, 1)),
        (np.array(["a", "b"]), ("no", "yes")),
        (np.array([7, 8]), (False, True)),
        (np.array([7, 8]), ("no", 1)),
        (np.array([b"no"]), (b"no", b"yes")),
        ([1.0, "x"], None),
        (np.array([1, 2]), None),
        (None, None),
    ],
)
def test_no_value_of_a_target_is_refused(y, classes):
    require_dtype(y, classes)


def test_targets_of_text_are_refused_where_they_are_numbers():
    with pytest.raises(TypeError, match="y must have a dtype of numbers \\(got <U1\\)"):
        require_dtype(np.array(["a", "b"]), None)
    with pytest.raises(TypeError, match="y must have a dtype of numbers \\(got str"):
        require_dtype(pd.Series(["a", "b"], dtype="string"), None)


@pytest.mark.parametrize(
    ("given", "shown"), [(None, "None"), ("table.csv", "'table.csv'"), (b"x", "bytes")]
)
def test_what_is_no_table_is_named(given, shown):
    with pytest.raises(
        TypeError, match=f"X must be rows .*as an array or a data frame \\(got {shown}\\)"
    ):
        as_features(given)


def test_a_column_of_another_length_is_named():
    with pytest.raises(ValueError, match="sample_weight should be a 1d array of 3"):
        as_column([1.0, 2.0], "sample_weight", 3, CPU)
