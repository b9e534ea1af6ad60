"""The base classes of the estimators: scikit-learn's where it is installed, else those of `own`, of the same names.

Only this file knows whether scikit-learn is there. Nothing of it that looks at values is used on training data: an
exception because of one record's value would tell that value.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch_dpsco.estimators.own import (
    BaseEstimator,
    ClassifierMixin,
    DataConversionWarning,
    NotFittedError,
    RegressorMixin,
    TransformerMixin,
)

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
            model, X if hasattr(X, "shape") else [[0.0] * width], skip_check_array=True, reset=False
        )
    elif width != model.n_features_in_:
        raise ValueError(
            f"X has {width} features, but {type(model).__name__} is expecting"
            f" {model.n_features_in_} features as input"
        )
