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

Tables of several kinds, column by column: pandas, Arrow, and dicts of columns.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

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
                    f"column {name!r} must be of numbers (got {dtype}): encode it by public rules, as"
                    " dp.Schema does"
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
    dtype = getattr(y, "dtype", None)
    kind = "f" if isinstance(y, Tensor) else getattr(dtype, "kind", "O")
    if getattr(dtype, "type", None) is str:  # text of pandas
        kind = "U"
    if classes is None and kind in "US":
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
_DATES = ("datetime", "timestamp", "date")
_NEVER = ("timedelta", "complex")


def names(frame: Any) -> list[str]:
    """Returns the names of the columns."""
    if isinstance(frame, Mapping):
        return list(frame)
    return list(getattr(frame, "column_names", None) or frame.columns)


def columns_of(frame: Any, wanted: list[str], dates: Collection[str] = ()) -> dict[str, Column]:
    """Returns columns of a table by name; raises ValueError unless each is there once, and all have one length.

    Args:
        frame: the table.
        wanted: names of columns.
        dates: those of them that may be of dates.
    """
    there = names(frame)
    for name in wanted:
        if (times := there.count(name)) != 1:
            alone = "there is one column alone; see the separator of a file"
            other = "names must be those of the table, to the letter"
            raise ValueError(
                f"column {name!r} must be in the frame, once (got it {times} times):"
                f" {alone if len(there) == 1 else other}"
            )
    columns = {name: column(name, frame[name], name in dates) for name in wanted}
    lengths = {name: len(found) for name, found in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns must have one length (got {lengths})")
    return columns


def column(name: str, found: Any, dates: bool = False) -> Column:
    """Returns a column of pandas, Arrow or numpy, or a list; raises ValueError unless of numbers, text or dates."""
    kind = str(getattr(found, "dtype", getattr(found, "type", type(found).__name__)))
    listed = hasattr(found, "__len__") and not isinstance(found, (str, bytes))
    refused = _NEVER if dates else (*_NEVER, *_DATES)
    if not listed or kind.startswith(refused) or getattr(found, "ndim", 1) != 1:
        raise ValueError(
            f"column {name!r} of the frame must be a list or array (n,) of numbers or text, or of"
            f" dates where the schema says Date (got {kind})"
        )
    if kind.startswith("datetime64") and isinstance(found, np.ndarray):
        return list(
            found.astype("datetime64[us]").tolist()
        )  # of nanoseconds numpy makes numbers
    if hasattr(found, "to_pylist"):
        whole = kind.startswith(("int", "uint", "bool")) and not found.null_count
        if whole or kind.startswith(("float", "double", "halffloat")):
            return np.asarray(found.to_numpy(zero_copy_only=False))
        return list(found.to_pylist())
    if isinstance(getattr(found, "dtype", None), np.dtype) and found.dtype.kind in "biuf":
        return np.asarray(found)
    return list(found.tolist() if hasattr(found, "tolist") else found)
