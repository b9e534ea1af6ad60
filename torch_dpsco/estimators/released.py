"""Models that leave the house: what may be published of a private linear model, in one JSON file.

A file has weights, classes, public numbers of the preparation and the privacy statement, and nothing is executed to
read it. Predictions take rows as the model does, and with a schema tables. See docs/released.md.
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
import torch
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco import shown
from torch_dpsco._validate import check_fields, typed
from torch_dpsco.accounting.analysis.rounding import FloatArray
from torch_dpsco.accounting.statement import Statement
from torch_dpsco.estimators.link import Link
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.reading import (
    chances,
    decisions,
    dense_rows,
    labelled,
    labels_of,
    require_finite,
)
from torch_dpsco.estimators.schema import Schema

_BLOCK_ROWS = 65_536  # of a prediction: rows are float64 there

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
    "Lasso": "regressor",
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
        link: from scores to log-odds, as `Link.to_dict()`; None where they are the same.
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
    classes: tuple[str | bool | float, ...]
    bound_x: float
    center: tuple[float, ...] | None
    scale: tuple[float, ...] | None
    link: Mapping[str, Any] | None
    names: tuple[str, ...] | None
    card: Mapping[str, Any]
    schema: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return shown.line(
            self, f"{self.kind}, {len(self.coef[0])} features; {self.card.get('headline', '')}"
        )

    def __post_init__(self) -> None:
        check_fields(self)
        check.choice(sorted({*_KINDS.values()}), kind=self.kind)
        count = len(self.classes)
        most = {"regressor": 0, "softmax": max(count, 2)}.get(self.kind, 2)
        _require(count == most and len(set(self.classes)) == count, _CLASSES)
        rows = count if self.kind == "softmax" else 1
        width = len(self.coef[0]) if self.coef else 0
        _require(
            width > 0 and len(self.coef) == rows,
            "coef must have one row of numbers, or for softmax one per class",
        )
        numbers = [("coef", row, width) for row in self.coef]
        numbers += [("intercept", self.intercept, rows), ("bound_x", (self.bound_x,), 1)]
        numbers += [("center", self.center or (0.0,) * width, width)]
        numbers += [("scale", self.scale or (1.0,) * width, width)]
        for name, values, size in numbers:
            fits = len(values) == size and all(map(math.isfinite, values))
            _require(fits, f"{name} must be {size} finite numbers (got others)")
        _require(min((self.bound_x, *(self.scale or ()))) > 0, "bound_x and scale must be > 0")
        _require(self.names is None or len(self.names) == width, f"names must be {width} texts")
        _require(self.link is None or self._fits(width), "link must be what Link.to_dict makes")
        if self.schema is not None:
            columns = len(Schema.from_dict(self.schema).names)
            _require(columns == width, f"schema must have {width} features (got {columns})")

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
        link = getattr(model, "_link", None)
        return cls(
            kind=_KINDS[name],
            coef=tuple(map(tuple, np.atleast_2d(model.coef_).tolist())),
            intercept=tuple(np.atleast_1d(model.intercept_).tolist()),
            classes=tuple(model.classes_.tolist()) if hasattr(model, "classes_") else (),
            bound_x=given.bound_x,
            center=given.center,
            scale=given.scale,
            link=None if link is None else link.to_dict(),
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
            must = "must be" if name in wanted else "must not be"
            raise ValueError(f"{name} {must} in the file")
        return cls(**{name: _frozen(value) for name, value in read.items()})

    # -- predictions -------------------------------------------------------------------------------------------------

    def predict(self, X: Any, *, threshold: float | None = None) -> NDArray[Any]:
        """Returns labels or numbers (n,) of public rows (n, d), or of a table if there is a schema.

        Args:
            X: the rows.
            threshold: in (0, 1), of two labels: the second one where its probability is no less; None for 1/2.
        """
        if threshold is not None:
            least = check.open_interval(0.0, 1.0, threshold=threshold)
            _require(len(self.classes) == 2, "threshold must be left out but for two labels")
            chosen = self.predict_proba(X)[:, 1] >= least
            return np.asarray(labels_of(self.classes)[chosen.astype(int)])
        if self.kind == "regressor":
            return self._scores(X)[:, 0]
        return labelled(labels_of(self.classes), self.decision_function(X))

    def decision_function(self, X: Any) -> FloatArray:
        """Returns scores of a classifier: (n,) for the second of two classes, or (n, K)."""
        _require(
            self.kind != "regressor", "kind must be of a classifier for scores (got 'regressor')"
        )
        return decisions(self._scores(X))

    def predict_proba(self, X: Any) -> FloatArray:
        """Returns probabilities (n, K) of public rows, for logistic and softmax regression."""
        _require(
            self.kind in ("probabilities", "softmax"),
            f"kind must have probabilities (got {self.kind!r})",
        )
        return chances(self._scores(X))

    def _scores(self, X: Any) -> FloatArray:
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
        given = Preparation(self.bound_x, self.center, self.scale)
        scores = scores_of(given, np.array(self.coef), np.array(self.intercept), X)
        return scores if self.link is None else Link.from_dict(self.link)(scores, X)

    def _fits(self, width: int) -> bool:
        """Returns whether the link can be read, and is of rows of this width and one score."""
        try:
            rows = Link.from_dict(self.link or {}).rows
        except (KeyError, TypeError, ValueError):
            return False
        lengths = {len(numbers) for numbers in (rows.center, rows.scale) if numbers is not None}
        return self.kind == "probabilities" and lengths <= {width}


def scores_of(
    given: Preparation, weight: FloatArray, intercept: FloatArray, X: Any
) -> FloatArray:
    """Returns scores (n, K) of public rows, prepared by public numbers, of weights (K, d) for raw rows."""
    center, scale = (values.numpy() for values in given.shift_and_scale)
    # the score of the center, which lies at the origin of prepared rows
    bias = torch.from_numpy(intercept + (weight * center).sum(1))
    prepared = torch.from_numpy(weight * scale)
    blocks = []
    for features in dense_rows(X):
        _require(
            features.shape[1] == weight.shape[1], f"X must be of shape (n, {weight.shape[1]})"
        )
        for rows in torch.split(features, _BLOCK_ROWS):
            require_finite(rows)
            blocks.append(
                (given(rows) @ prepared.to(rows.device).T + bias.to(rows.device)).cpu()
            )
    return np.asarray(torch.cat(blocks).numpy())


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
