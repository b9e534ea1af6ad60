"""Private linear models in the style of scikit-learn, which is used if it is installed but not needed.

    model = LogisticRegression(epsilon=1.0, n=32_561, bound_x=3.47, classes=(0, 1)).fit(X, y)
    model.predict_proba(X_new);   print(model.report())

| class | loss | mechanism by default, delta > 0 |
|---|---|---|
| `LogisticRegression` | logistic, gradients clipped | objective perturbation |
| `SoftmaxRegression` | softmax cross-entropy | preconditioned gradient descent |
| `LinearSVC` | hinge, smoothed | objective perturbation |
| `HuberRegressor` | Huber | noisy gradient descent |
| `QuantileRegressor` | pinball, smoothed | noisy gradient descent |
| `Ridge` | squared | boosted AdaSSP |
| `TiltedClassifier` | tilted logistic | output perturbation |
| `AdversarialClassifier` | logistic under attack | output perturbation |

Imported on first use, with scikit-learn, which the optimizers of `solved` do without. Of any release, `task`
has the public numbers, and `choose` takes a mechanism and carries it out: `output`, `objective`, `gradient_descent`,
`users` or `least_squares`; `objectives` and `solvers` are what is solved, and how.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "AdversarialClassifier",
    "HuberRegressor",
    "LinearSVC",
    "LogisticRegression",
    "QuantileRegressor",
    "Ridge",
    "SoftmaxRegression",
    "TiltedClassifier",
]

if TYPE_CHECKING:
    from torch_dpsco.estimators.classifiers import (
        AdversarialClassifier,
        LinearSVC,
        LogisticRegression,
        SoftmaxRegression,
        TiltedClassifier,
    )
    from torch_dpsco.estimators.columns import Category as Category
    from torch_dpsco.estimators.columns import Number as Number
    from torch_dpsco.estimators.columns import Ordered as Ordered
    from torch_dpsco.estimators.regressors import HuberRegressor, QuantileRegressor, Ridge
    from torch_dpsco.estimators.released import Released as Released
    from torch_dpsco.estimators.schema import Schema as Schema
    from torch_dpsco.estimators.schema import Table as Table
else:  # or type checkers would take every name for one that exists
    _HOMES = {
        **dict.fromkeys(__all__, "classifiers"),
        **dict.fromkeys(("HuberRegressor", "QuantileRegressor", "Ridge"), "regressors"),
        **dict.fromkeys(("Category", "Number", "Ordered"), "columns"),
        **dict.fromkeys(("Schema", "Table"), "schema"),
        "Released": "released",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
