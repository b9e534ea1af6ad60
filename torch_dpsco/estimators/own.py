"""Base classes for use without scikit-learn, with its names: parameters and scores, and nothing else."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import numpy as np

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
