"""Models that leave the house: what may be published of a private linear model, in one JSON file.

A file has weights, classes, public numbers of the preparation and the privacy statement, and nothing is executed to
read it. Predictions need numpy, and a schema to read tables. See docs/released.md.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco.accounting.statement import Statement
from torch_dpsco.estimators.schema import Schema

Array = NDArray[np.float64]

_FORMAT = "torch_dpsco.estimators.released"
_VERSION = 1
_KINDS = {
    "LogisticRegression": "probabilities",
    "SoftmaxRegression": "softmax",
    "LinearSVC": "classifier",
    "TiltedClassifier": "classifier",
    "AdversarialClassifier": "classifier",
    "HuberRegressor": "regressor",
    "QuantileRegressor": "regressor",
    "Ridge": "regressor",
}
_CLASSES = (
    "classes must be two or more different texts, numbers or truth values, one per score (got"
    " others)"
)


@dataclass(frozen=True, eq=False)
class Released:
    """A private linear model without its training: made by `Released.of(model)`, or read by `Released.load(path)`.

    Args:
        kind: "probabilities" (two classes, logistic), "softmax", "classifier" (two classes) or "regressor".
        coef: (K, d) weights for raw rows, K = 1 but for softmax.
        intercept: (K,).
        classes: labels; () for a regressor.
        bound_x: > 0, norm that shifted and scaled rows are clipped to.
        center: subtracted from rows, (d,), public; None for 0.
        scale: > 0, that they are divided by then, (d,), public; None for 1.
        names: names of the columns of a data frame, (d,), which one to predict must have in this order; or None.
        card: the privacy statement, as `json.loads(model.report().json())`.
        schema: of tables to predict from, as `Schema.to_dict()`; None for rows of numbers.

    Guarantee:
        That of the fit, by post-processing: no field but public settings and the release itself. Under replace_one and
        zero_out, the card has n, which is public there; under add_remove, the public guess.
    """

    kind: str
    coef: tuple[tuple[float, ...], ...]
    intercept: tuple[float, ...]
    classes: tuple[Any, ...]
    bound_x: float
    center: tuple[float, ...] | None
    scale: tuple[float, ...] | None
    names: tuple[str, ...] | None
    card: Mapping[str, Any]
    schema: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _require(
            self.kind in _KINDS.values(),
            f"kind must be one of {', '.join(sorted(set(_KINDS.values())))}",
        )
        width = len(self.coef[0]) if self.coef else 0
        _require(width > 0, "coef must have rows of numbers (got none)")
        for name, values in (
            ("intercept", self.intercept),
            *(("coef", row) for row in self.coef),
        ):
            _require(
                all(_finite(value) for value in values),
                f"{name} must be finite numbers (got others)",
            )
        _require(
            all(len(row) == width for row in self.coef),
            "coef must have rows of one length (got several)",
        )
        _require(
            len(self.intercept) == len(self.coef),
            "intercept must have one number per row of coef",
        )
        plain = all(
            isinstance(label, (str, bool, int)) or _finite(label) for label in self.classes
        )
        _require(plain and len(set(self.classes)) == len(self.classes), _CLASSES)
        scores = len(self.classes) if self.kind == "softmax" else 1
        _require(
            len(self.coef) == scores,
            "coef must have one row, or for softmax one per class (got others)",
        )
        several = len(self.classes) >= 2 if self.kind == "softmax" else len(self.classes) == 2
        _require(not self.classes if self.kind == "regressor" else several, _CLASSES)
        _require(_finite(self.bound_x) and self.bound_x > 0, "bound_x must be a number > 0")
        _require(isinstance(self.card, Mapping), "card must be an object, the privacy statement")
        self._check_columns(width)

    def _check_columns(self, width: int) -> None:
        """Raises for units, names and a schema that do not go with the coefficients."""
        for name, given in (("center", self.center), ("scale", self.scale)):
            fits = given is None or (
                len(given) == width and all(_finite(value) for value in given)
            )
            _require(fits, f"{name} must be {width} finite numbers, or null")
        _require(self.scale is None or min(self.scale) > 0, "scale must be numbers > 0")
        named = self.names is None or (
            len(self.names) == width and all(isinstance(x, str) for x in self.names)
        )
        _require(named, f"names must be {width} texts, or null")
        if self.schema is not None:
            columns = len(Schema.from_dict(self.schema).names)
            _require(
                columns == width,
                f"schema must have {width} features, as coef has (got {columns})",
            )

    @classmethod
    @typed
    def of(
        cls, model: Any, *, schema: Schema | None = None, card: Statement | None = None
    ) -> Released:
        """Returns what may be published of a fitted model of `torch_dpsco.estimators`.

        Args:
            model: fitted.
            schema: that its rows were read by; predictions are then for tables.
            card: the statement to publish; None for `model.report()`.

        Raises:
            ValueError: another class, a model that is not fitted, or classes that JSON has no word for.
        """
        name = type(model).__name__
        module = type(model).__module__
        # PRIVACY: what a subclass adds nobody has proved (test_other_classes_are_refused_by_name)
        if name not in _KINDS or not module.startswith("torch_dpsco.estimators."):
            raise ValueError(f"model must be one of {', '.join(_KINDS)} (got {module}.{name})")
        if not hasattr(model, "coef_"):
            raise ValueError(f"model must be fitted (got {name} without a fit): call fit before")
        task = model.plan_.task
        given = task.preparation if task.prepare is None else task.prepare.given
        names = getattr(model, "feature_names_in_", None)
        return cls(
            kind=_KINDS[name],
            coef=tuple(map(tuple, np.atleast_2d(model.coef_).tolist())),
            intercept=tuple(np.atleast_1d(model.intercept_).tolist()),
            classes=tuple(model.classes_.tolist()) if hasattr(model, "classes_") else (),
            bound_x=given.bound_x,
            center=given.center,
            scale=given.scale,
            names=None if names is None else tuple(names),
            card=json.loads((model.report() if card is None else card).json()),
            schema=None if schema is None else schema.to_dict(),
        )

    @typed
    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes the file, in which numbers are exact; raises FileExistsError for one that is there already."""
        text = self.json()
        with open(path, "w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)

    def json(self) -> str:
        """Returns what `save` writes."""
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        return f"{json.dumps(content, indent=1, allow_nan=False)}\n"

    @classmethod
    @typed
    def load(cls, path: str | os.PathLike[str]) -> Released:
        """Reads a file; raises ValueError that names the field for whatever `save` did not write."""
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"path must be of JSON that Released.save wrote (got {os.fspath(path)!r})"
            ) from error
        found = read.pop("format", None) if isinstance(read, dict) else None
        ours = f"format must be {_FORMAT!r}, as Released.save and dpsco fit write it"
        _require(found == _FORMAT, f"{ours} (got {check.shown(found)} in {os.fspath(path)!r})")
        version = read.pop("version", None)
        _require(
            type(version) is int and version == _VERSION,
            f"version must be {_VERSION}: take a newer torch_dpsco",
        )
        wanted = list(cls.__dataclass_fields__)
        for name in sorted({*wanted} ^ {*read}):
            raise ValueError(
                f"{name} must be in the file"
                if name in wanted
                else f"{name!r} must not be in the file"
            )
        for name in ("coef", "intercept", "classes", "center", "scale", "names"):
            optional = name in ("center", "scale", "names") and read[name] is None
            _require(optional or isinstance(read[name], list), f"{name} must be a list")
        _require(
            all(isinstance(row, list) for row in read["coef"]), "coef must be a list of lists"
        )
        _require(not any(isinstance(x, (list, dict)) for x in read["classes"]), _CLASSES)
        _require(isinstance(read["kind"], str), "kind must be text")
        read["coef"] = tuple(map(tuple, read["coef"]))
        for name in ("intercept", "classes", "center", "scale", "names"):
            read[name] = None if read[name] is None else tuple(read[name])
        return cls(**read)

    # -- predictions -------------------------------------------------------------------------------------------------

    def predict(self, X: Any) -> NDArray[Any]:
        """Returns labels or numbers (n,) of public rows (n, d), or of a table if there is a schema."""
        if self.kind == "regressor":
            return self._scores(X)[:, 0]
        scores = self.decision_function(X)
        labels = np.asarray(self.classes)
        if labels.tolist() != list(
            self.classes
        ):  # of several kinds, which numpy would turn into one
            labels = np.empty(len(self.classes), dtype=object)
            labels[:] = self.classes
        return np.asarray(
            labels[scores.argmax(1) if scores.ndim == 2 else (scores > 0).astype(np.int64)]
        )

    def decision_function(self, X: Any) -> Array:
        """Returns scores of a classifier: (n,) for the second of two classes, or (n, K)."""
        _require(
            self.kind != "regressor", "kind must be of a classifier for scores (got 'regressor')"
        )
        scores = self._scores(X)
        if self.kind != "softmax":
            return scores[:, 0]
        return scores if scores.shape[1] > 2 else scores[:, 1] - scores[:, 0]

    def predict_proba(self, X: Any) -> Array:
        """Returns probabilities (n, K) of public rows, for logistic and softmax regression."""
        _require(
            self.kind in ("probabilities", "softmax"),
            f"kind must have probabilities (got {self.kind!r})",
        )
        scores = self._scores(X)
        if self.kind == "probabilities":
            small = np.exp(-np.abs(scores[:, 0]))
            likely = 1.0 / (1.0 + small)
            unlikely = small / (1.0 + small)
            second = scores[:, 0] >= 0
            return np.stack(
                [np.where(second, unlikely, likely), np.where(second, likely, unlikely)], axis=1
            )
        weights = np.exp(scores - scores.max(1, keepdims=True))
        return np.asarray(weights / weights.sum(1, keepdims=True))

    def _scores(self, X: Any) -> Array:
        if self.schema is not None and not (
            isinstance(X, (np.ndarray, list)) and np.ndim(X) == 2
        ):
            X = Schema.from_dict(self.schema).features(X)
            _require(
                not np.isnan(X).any(),
                "X must have values that the schema can read, or columns with missing=True",
            )
        columns = getattr(X, "columns", None)
        if self.names is not None and columns is not None and list(columns) != list(self.names):
            raise ValueError(f"X must have the columns {list(self.names)}, in this order")
        weight = np.array(self.coef)
        wanted = f"X must be real numbers of shape (n, {weight.shape[1]}) (got {check.shown(X)})"
        try:
            if (found := np.asarray(X)).dtype.kind == "c":
                raise TypeError("which numpy would cut to their real parts")
            rows = found.astype(np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(wanted) from error
        _require(rows.ndim == 2 and rows.shape[1] == weight.shape[1], wanted)
        _require(bool(np.isfinite(rows).all()), "X must be finite numbers (got others)")
        center = np.zeros(weight.shape[1]) if self.center is None else np.array(self.center)
        scale = np.ones(weight.shape[1]) if self.scale is None else np.array(self.scale)
        rows = (rows - center) / scale
        largest = np.maximum(
            np.abs(rows).max(1, keepdims=True, initial=0.0), np.finfo(np.float64).tiny
        )
        norms = largest * np.linalg.norm(
            rows / largest, axis=1, keepdims=True
        )  # squares neither over- nor underflow
        rows = rows * np.minimum(1.0, self.bound_x / np.maximum(norms, np.finfo(np.float64).tiny))
        return np.asarray(
            rows @ (weight * scale).T + (np.array(self.intercept) + weight @ center)
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
