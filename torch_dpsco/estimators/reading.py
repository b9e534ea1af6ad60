"""The base classes of the estimators: scikit-learn's where it is installed, else some of the same names.

Only this file knows whether scikit-learn is there. Nothing of it that looks at values is used on training data: an
exception because of one record's value would tell that value.

What `fit` reads: rows, labels, targets and weights, as tensors, without a decision that depends on a value.

Shapes and dtypes are public and may raise. A value must not, nor may one record change how others are read. So Python
lists are read item by item: numpy would turn [0, 1, "x"] into strings, and a single record would make null records of
all. Arrays of objects are refused as rows, since whether they hold numbers is known from each record only.

| given | read as |
|---|---|
| numpy float32, float64; torch tensor | itself, no copy |
| integers, booleans, float16, foreign byte order, lists | float64 |
| data frame | float32 if all columns are, else float64; missing values are NaN |
| labels | places among the classes |

Base classes for use without scikit-learn, with its names: parameters and scores, and nothing else.

Tables of several kinds, column by column: pandas, Arrow, dicts of columns, and files.

Whether the cells of a CSV file are those of its records: a rule of quotes by which none reaches another record.

A quote opens at the beginning of a cell, closes at its end, and is doubled inside (RFC 4180, as all writers of CSV do
it); there may be line breaks between quotes. Any other quote shows that whoever wrote the file paid no heed to quotes.
Then a note that begins with one swallows the rows up to the next quote, or all that follow: one record would decide how
many others there are. So a file with such a quote is refused, also where a reader would take the quote for text.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_dpsco._validate import shown
from torch_dpsco.accounting.analysis.rounding import FloatArray

__all__ = [
    "BaseEstimator",
    "ClassifierMixin",
    "DataConversionWarning",
    "NotFittedError",
    "RegressorMixin",
    "TransformerMixin",
    "check_columns",
    "read_columns",
]

_Self = TypeVar("_Self", bound="BaseEstimator")


class NotFittedError(ValueError, AttributeError):
    """A model was used before `fit`."""


class DataConversionWarning(UserWarning):
    """Data of another shape than requested were accepted."""


class BaseEstimator:
    """The arguments of the constructor, by name.

    Example:
        >>> class Model(BaseEstimator):
        ...     def __init__(self, *, reg=1.0):
        ...         self.reg = reg
        >>> Model().set_params(reg=2.0).get_params()
        {'reg': 2.0}
    """

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns the arguments of the constructor; `deep` is there for scikit-learn's sake."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self: _Self, **params: Any) -> _Self:
        """Sets arguments of the constructor; raises ValueError for other names, and sets nothing then."""
        known = self.get_params()
        for name in params.keys() - known.keys():
            raise ValueError(
                f"{name!r} is no parameter of {type(self).__name__}: {', '.join(known)}"
            )
        for name, value in params.items():
            setattr(self, name, value)
        return self


class ClassifierMixin:
    """Accuracy as the score."""

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Returns the (weighted) share of right predictions."""
        right = self.predict(X) == np.asarray(y)  # type: ignore[attr-defined]
        return float(np.average(right, weights=sample_weight))


class TransformerMixin:
    """`fit` and `transform` in one."""

    def fit_transform(self, X: Any, y: Any = None, **options: Any) -> Any:
        """Returns transformed rows of the table that is fitted."""
        return self.fit(X, y, **options).transform(X)  # type: ignore[attr-defined]


class RegressorMixin:
    """R^2 as the score."""

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Returns 1 - (weighted) squared error / squared error of the mean."""
        truth = np.asarray(y, dtype=np.float64)
        center = np.average(truth, weights=sample_weight)
        left = np.average((truth - self.predict(X)) ** 2, weights=sample_weight)  # type: ignore[attr-defined]
        return float(1.0 - left / np.average((truth - center) ** 2, weights=sample_weight))


validate_data: Any = None
if not TYPE_CHECKING:
    with suppress(ImportError):
        # first, since versions before 1.6, which lack it, count as not installed
        from sklearn.utils.validation import validate_data  # isort: skip
        from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, TransformerMixin
        from sklearn.exceptions import DataConversionWarning, NotFittedError


class _Columns(BaseEstimator):
    """Takes the attributes that scikit-learn sets, until a fit has succeeded."""


def read_columns(X: Any, width: int) -> dict[str, Any]:
    """Returns n_features_in_ and, for a data frame with named columns, feature_names_in_; reads no value.

    Raises:
        TypeError: some names of columns are strings, and some are not.
    """
    if validate_data is None:
        return {"n_features_in_": width}
    holder = _Columns()
    validate_data(
        holder, X if hasattr(X, "shape") else [[0.0] * width], skip_check_array=True, reset=True
    )
    return vars(holder)


def check_columns(model: Any, X: Any, width: int) -> None:
    """Raises ValueError if a model was fitted to other columns."""
    if validate_data is not None:
        validate_data(
            model,
            X if hasattr(X, "shape") else [[0.0] * width],
            skip_check_array=True,
            reset=False,
        )
    elif width != model.n_features_in_:
        raise ValueError(
            f"X has {width} features, but {type(model).__name__} is expecting"
            f" {model.n_features_in_} features as input"
        )


_NUMBER = (bool, int, float, np.number, np.bool_)
_OF_KIND: dict[str, Any] = {
    **dict.fromkeys("biuf", _NUMBER),
    "U": str,
    "S": bytes,
}  # what a label of a dtype can be
_READ_ONLY = "The given NumPy array is not writ"  # nothing here writes


def as_features(X: Any) -> Tensor:
    """Returns rows as a floating point tensor (n, d), of the data themselves where that is possible.

    Args:
        X: numpy array, torch tensor, data frame, or list of lists of numbers, (n, d). Non-finite values are allowed.

    Raises:
        TypeError: sparse, or a dtype that is not of numbers.
        ValueError: complex, no column, or another number of dimensions.
    """
    if isinstance(X, Tensor):
        rows = X.detach()
        if rows.layout != torch.strided:
            raise TypeError(
                "X must be dense: sparse tensors are not supported, call X.to_dense()"
            )
        _require_real("X", rows.is_complex())
        rows = rows if rows.is_floating_point() else rows.double()
    else:
        rows = _from_numpy(_as_array(X))
    if rows.dim() != 2:
        raise ValueError(
            f"Expected 2D array, got {rows.dim()}D array instead: X must be (n, d). Reshape your"
            " data either using array.reshape(-1, 1) if it has a single feature or"
            " array.reshape(1, -1) if it is a single row"
        )
    if rows.shape[1] == 0:
        raise ValueError(
            f"X has 0 feature(s) (shape={tuple(rows.shape)}) while a minimum of 1 is required."
        )
    return rows


def _as_array(X: Any) -> NDArray[Any]:
    if hasattr(X, "toarray"):
        raise TypeError("X must be dense: sparse data are not supported, call X.toarray()")
    if hasattr(X, "dtypes") and hasattr(X, "iloc"):
        for name, dtype in zip(X.columns, X.dtypes, strict=True):
            if getattr(dtype, "kind", "O") not in "biuf":
                raise TypeError(
                    f"column {name!r} must be of numbers (got {dtype}): encode it by public rules"
                )
        single = all(dtype == np.float32 for dtype in X.dtypes)
        return np.asarray(
            X.to_numpy(dtype=np.float32 if single else np.float64, na_value=np.nan)
        )
    if X is None or isinstance(X, (str, bytes)):
        raise TypeError(
            "X must be rows (n, d) with a dtype of numbers, as an array or a data frame (got"
            f" {shown(X)})"
        )
    array = np.asarray(X)
    if isinstance(X, Sequence) and array.dtype.kind not in "biuf" and array.ndim == 2:
        # PRIVACY: no item decides how others are read (test_one_item_does_not_change_how_other_rows_are_read)
        return np.array([[_number(value) for value in row] for row in X])
    return array


def _require_real(name: str, is_complex: bool) -> None:
    if is_complex:
        raise ValueError(
            f"Complex data not supported: {name} must be real (got complex numbers)"
        )


def _from_numpy(array: NDArray[Any]) -> Tensor:
    _require_real("X", array.dtype.kind == "c")
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"X must have a dtype of numbers (got {array.dtype}): convert each value by a public"
            " rule"
        )
    if array.dtype.kind != "f" or array.dtype.itemsize not in (4, 8) or not array.dtype.isnative:
        array = array.astype(np.float64)
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_READ_ONLY)
        return torch.from_numpy(array)


def _flat(values: Any, name: str, count: int, device: torch.device) -> Tensor | NDArray[Any]:
    """Returns a column of n values: a tensor, or an array, of objects if they came in a list."""
    if values is None:
        raise ValueError(
            f"the model requires {name} to be passed, but the target {name} is None"
        )
    if isinstance(values, Tensor):
        column: Any = values.detach().to(device)
    elif hasattr(values, "shape") and not hasattr(values, "toarray"):
        column = values.to_numpy() if hasattr(values, "to_numpy") else np.asarray(values)
    elif isinstance(values, Sequence) and not isinstance(values, (str, bytes)):
        # PRIVACY: no item decides how others are read (test_one_label_does_not_change_how_others_are_read)
        column = np.empty(len(values), dtype=object)
        for index, value in enumerate(values):
            column[index] = value
    else:
        column = np.asarray(values)
    _require_real(
        name, column.is_complex() if isinstance(column, Tensor) else column.dtype.kind == "c"
    )
    if column.ndim == 2 and column.shape[1] == 1:
        warnings.warn(
            f"A column-vector {name} was passed when a 1d array was expected: it is read as shape"
            " (n_samples,)",
            DataConversionWarning,
            stacklevel=4,
        )
        column = column.reshape(-1)
    if tuple(column.shape) != (count,):
        raise ValueError(
            f"bad input shape {tuple(column.shape)} of {name}: X and {name} have inconsistent"
            f" numbers of records, {name} should be a 1d array of {count}"
        )
    return column  # type: ignore[no-any-return]


def as_column(values: Any, name: str, count: int, device: torch.device) -> Tensor:
    """Returns n real numbers as a tensor; what is not a number becomes NaN.

    Raises:
        ValueError: another shape, or complex.
    """
    column = _flat(values, name, count, device)
    if isinstance(column, Tensor):
        return column
    if column.dtype.kind in "biuf":
        return _from_numpy(column).to(device)
    return torch.tensor([_number(value) for value in column], dtype=torch.float64, device=device)


def require_dtype(y: Any, classes: Sequence[Any] | None) -> None:
    """Raises for targets of a dtype that holds none that counts, so that a whole budget would buy nothing.

    Args:
        y: targets; lists, and dtypes that hold anything, pass: what they hold is private.
        classes: labels, or None for numbers.

    Raises:
        TypeError: text, where targets are numbers.
        ValueError: numbers or text, where no class is.
    """
    kind = "f" if isinstance(y, Tensor) else getattr(getattr(y, "dtype", None), "kind", "O")
    if classes is None and kind in ("U", "S"):
        raise TypeError(
            f"y must have a dtype of numbers (got {y.dtype}): convert each value by a public rule"
        )
    if classes and not any(isinstance(label, _OF_KIND.get(kind, object)) for label in classes):
        raise ValueError(
            f"y must have labels among classes={shown(tuple(map(_plain, classes)))}, and {y.dtype}"
            " can hold none of them: give classes as they are in y"
        )


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def as_codes(labels: Any, classes: Sequence[Any], count: int, device: torch.device) -> Tensor:
    """Returns the places of n labels among the classes, int64; -1 for a label that is none of them.

    Args:
        labels: numpy array, torch tensor, series or list, (n,).
        classes: public and different from each other.
        count: n.
        device: of the answer.

    Raises:
        ValueError: another shape, or complex.

    Example:
        >>> as_codes(["no", "yes", "maybe", None], ("no", "yes"), 4, torch.device("cpu")).tolist()
        [0, 1, -1, -1]
    """
    column = _flat(labels, "y", count, device)
    if isinstance(column, Tensor) or column.dtype.kind != "O":
        known = (
            _NUMBER if isinstance(column, Tensor) else _OF_KIND.get(column.dtype.kind, object)
        )
        codes = torch.full((count,), -1, dtype=torch.int64, device=device)
        for place, name in enumerate(classes):
            if isinstance(name, known):
                codes[torch.as_tensor(column == name, device=device)] = place
        return codes
    table = {_plain(name): place for place, name in enumerate(classes)}
    return torch.tensor(
        [_place(table, value) for value in column], dtype=torch.int64, device=device
    )


def _plain(name: Any) -> Any:
    return name.item() if isinstance(name, np.generic) else name


def _place(table: dict[Any, int], label: Any) -> int:
    try:
        return table.get(label, -1)
    except TypeError:  # no key, such as a list
        return -1


def require_finite(rows: Tensor) -> None:
    """Raises ValueError for rows to predict that hold NaN or infinity; not for training data."""
    if not bool(rows.isfinite().all()):
        raise ValueError("X must be finite, to predict from: Input X contains NaN or infinity")


_DENSE_ENTRIES = 2**22


def is_sparse(X: Any) -> bool:
    """Whether these are sparse rows of scipy."""
    return hasattr(X, "toarray") and hasattr(X, "tocsr") and len(X.shape) == 2


def dense_rows(X: Any) -> Iterator[Tensor]:
    """Yields rows as `as_features` reads them: all at once, or a few sparse ones at a time; at least once."""
    if not is_sparse(X):
        yield as_features(X)
        return
    rows = X.tocsr()
    step = max(1, _DENSE_ENTRIES // max(1, X.shape[1]))
    for start in range(0, max(1, X.shape[0]), step):
        yield as_features(rows[start : start + step].toarray())


def record_weights(
    given: Any, factors: Tensor | None, count: int, device: torch.device
) -> Tensor | None:
    """Returns the weights of records in [0, 1], times factors by class; None for ones."""
    if given is None:
        return factors
    # PRIVACY: clipped before it meets a factor (test_a_large_sample_weight_counts_as_one)
    weights = as_column(given, "sample_weight", count, device).double().clamp(0.0, 1.0)
    return weights if factors is None else weights * factors


def labels_of(classes: Sequence[Any]) -> NDArray[Any]:
    """Returns labels as an array, of objects where they are of several kinds, which numpy would turn into one."""
    labels = np.asarray(classes)
    if labels.tolist() == list(classes):
        return labels
    labels = np.empty(len(classes), dtype=object)
    labels[:] = classes
    return labels


def decisions(scores: FloatArray) -> FloatArray:
    """Returns scores (n, K) of three classes or more, or (n,) of the second of two."""
    if scores.shape[1] == 2:
        return np.asarray(scores[:, 1] - scores[:, 0])
    return scores if scores.shape[1] > 2 else np.asarray(scores[:, 0])


def labelled(labels: NDArray[Any], decided: FloatArray) -> NDArray[Any]:
    """Returns the label of each of these `decisions`."""
    places = decided.argmax(1) if decided.ndim == 2 else (decided > 0).astype(np.int64)
    return np.asarray(labels[places])


def chances(scores: FloatArray) -> FloatArray:
    """Returns probabilities (n, K) of scores (n, K), or for two classes of scores (n, 1) of the second one."""
    if scores.shape[1] == 1:
        scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(weights / weights.sum(1, keepdims=True))


Column = (
    NDArray[Any] | list[Any]
)  # numbers by dtype, missing ones NaN; else values, each by itself
_DATES = ("datetime", "timedelta", "timestamp", "date", "complex")


def opened(frame: Any, wanted: list[str] | None) -> Any:
    """Returns a table; that of a path with these columns alone, or all of them."""
    if isinstance(frame, Mapping) or hasattr(frame, "columns"):
        return frame
    path = os.fspath(frame) if isinstance(frame, (str, os.PathLike)) else ""
    if not path.endswith((".csv", ".parquet")):
        raise ValueError(
            "frame must be a table with named columns, or the path of a .csv or .parquet file (got"
            f" {shown(frame)})"
        )
    if not os.path.isfile(path):
        raise FileNotFoundError(f"frame must be a file that is there (got {path!r})")
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            "files must be read by pyarrow: pip install 'torch_dpsco[parquet]'"
        ) from error
    try:
        if path.endswith(".csv"):
            return _read_csv(path)
        present = parquet.read_schema(path).names
        chosen = present if wanted is None else [name for name in wanted if name in present]
        return parquet.read_table(path, columns=chosen)
    except (pyarrow.ArrowException, UnicodeDecodeError):
        # PRIVACY: pyarrow quotes the row (test_no_row_of_a_broken_file_is_quoted)
        raise ValueError(
            f"frame must be a valid {path.rpartition('.')[2]} file (got {path!r})"
        ) from None


def names(frame: Any) -> list[str]:
    """Returns the names of the columns."""
    if isinstance(frame, Mapping):
        return list(frame)
    return list(getattr(frame, "column_names", None) or frame.columns)


def columns_of(frame: Any, wanted: list[str]) -> dict[str, Column]:
    """Returns columns of a table by name; raises ValueError unless each is there once, and all have one length."""
    there = names(frame)
    for name in wanted:
        if (times := there.count(name)) != 1:
            raise ValueError(
                f"column {name!r} must be in the frame, once (got it {times} times)"
            )
    columns = {name: column(name, frame[name]) for name in wanted}
    lengths = {name: len(found) for name, found in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns must have one length (got {lengths})")
    return columns


def column(name: str, found: Any) -> Column:
    """Returns a column of pandas, Arrow or numpy, or a list; raises ValueError unless it is of numbers or text."""
    kind = str(getattr(found, "dtype", getattr(found, "type", type(found).__name__)))
    listed = hasattr(found, "__len__") and not isinstance(found, (str, bytes))
    if not listed or kind.startswith(_DATES) or getattr(found, "ndim", 1) != 1:
        raise ValueError(
            f"column {name!r} of the frame must be a list or array (n,) of numbers or text (got"
            f" {kind})"
        )
    if hasattr(found, "to_pylist"):
        whole = kind.startswith(("int", "uint", "bool")) and not found.null_count
        if whole or kind.startswith(("float", "double", "halffloat")):
            return np.asarray(found.to_numpy(zero_copy_only=False))
        return list(found.to_pylist())
    if isinstance(getattr(found, "dtype", None), np.dtype) and found.dtype.kind in "biuf":
        return np.asarray(found)
    return list(found.tolist() if hasattr(found, "tolist") else found)


def _read_csv(path: str) -> Any:
    """Returns all columns of a file, as text."""
    import pyarrow
    from pyarrow import csv

    # PRIVACY: else one record could become many (test_a_record_of_many_lines_stays_one)
    lines = csv.ParseOptions(newlines_in_values=True)
    before = _version(path)
    with pyarrow.OSFile(path) as file:
        if not has_whole_cells(file):
            # PRIVACY: a note that begins with a quote would swallow the rows after it
            # (test_no_quote_of_a_record_swallows_others)
            raise ValueError(
                "frame must be a .csv file whose quotes enclose whole cells, and are doubled"
                f" inside, as CSV writers do (got {path!r}): one that is left open swallows the"
                " rows after it; write the file anew from its source, or as .parquet"
            )
    # each reader opens the file itself: threads of pyarrow read ahead, also after a reader is done, so that one file
    # for both would lose rows (test_no_row_of_a_slow_file_is_lost)
    with csv.open_csv(path, parse_options=lines) as reader:
        head = reader.schema.names
    # PRIVACY: text, since types would be guessed from values (test_no_value_of_a_file_decides_how_others_are_read)
    text = csv.ConvertOptions(column_types=dict.fromkeys(head, pyarrow.string()))
    table = csv.read_csv(path, parse_options=lines, convert_options=text)
    if _version(path) != before:
        raise ValueError(
            f"frame must be a file that nobody writes while it is read (got {path!r})"
        )
    return table


def _version(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


_BLOCK = 1 << 20  # bytes that are looked at together
_MARK = b"\xef\xbb\xbf"  # of UTF-8, before the first cell
_QUOTE = ord('"')
_OUTSIDE = np.isin(
    np.arange(256), [*b',\r\n"']
)  # what may be on the outer side of a quote; another quote doubles it


def has_whole_cells(file: BinaryIO) -> bool:
    r"""Returns whether all quotes of a file, which is read to its end, enclose whole cells or are doubled inside.

    Example:
        >>> import io
        >>> [has_whole_cells(io.BytesIO(text)) for text in (b'1,"a ""b""\n"', b'1,"a\n2,b', b'1,a "b"', b'1,"a"b')]
        [True, False, False, False]
    """
    before = b"\n"
    block = file.read(_BLOCK).removeprefix(_MARK)
    inside = 0
    while block:
        after = file.read(_BLOCK)
        codes = np.frombuffer(before + block + (after[:1] or b"\n"), dtype=np.uint8)
        quotes = 1 + np.flatnonzero(codes[1:-1] == _QUOTE)
        opening = quotes[inside::2]
        closing = quotes[1 - inside :: 2]
        # PRIVACY: (test_no_quote_of_a_record_swallows_others)
        if not (_OUTSIDE[codes[opening - 1]].all() and _OUTSIDE[codes[closing + 1]].all()):
            return False
        before = block[-1:]
        block = after
        inside = (inside + len(quotes)) % 2
    return not inside
