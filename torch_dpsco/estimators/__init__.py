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
| `Lasso` | squared, few features chosen of many | choices, then boosted AdaSSP |
| `TiltedClassifier` | tilted logistic | output perturbation |
| `AdversarialClassifier` | logistic under attack | output perturbation |

One of your own is a `Regressor` or a `BinaryClassifier` that says its loss in `make_loss` (docs/your_own.md).
"""

# Imported on first use, with scikit-learn, which the optimizers of `solved` do without. Of any release, `task` has the
# public numbers, and `base` takes a mechanism and carries it out: `output`, `objective`, `gradient_descent` or
# `least_squares`; `objectives` and `solvers` are what is solved, and how.
from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "AdversarialClassifier",
    "HuberRegressor",
    "Lasso",
    "LinearSVC",
    "LogisticRegression",
    "QuantileRegressor",
    "Ridge",
    "SoftmaxRegression",
    "TiltedClassifier",
]

if TYPE_CHECKING:
    from torch_dpsco.estimators.files import Dialect as Dialect
    from torch_dpsco.estimators.models import (
        AdversarialClassifier,
        HuberRegressor,
        Lasso,
        LinearSVC,
        LogisticRegression,
        QuantileRegressor,
        Ridge,
        SoftmaxRegression,
        TiltedClassifier,
    )
    from torch_dpsco.estimators.models import BinaryClassifier as BinaryClassifier
    from torch_dpsco.estimators.models import Regressor as Regressor
    from torch_dpsco.estimators.preparation import Facts as Facts
    from torch_dpsco.estimators.released import Released as Released
    from torch_dpsco.estimators.schema import Category as Category
    from torch_dpsco.estimators.schema import Date as Date
    from torch_dpsco.estimators.schema import Number as Number
    from torch_dpsco.estimators.schema import Ordered as Ordered
    from torch_dpsco.estimators.schema import Schema as Schema
    from torch_dpsco.estimators.schema import Table as Table
else:  # or type checkers would take every name for one that exists
    _HOMES = {
        "preparation": ("Facts",),
        "models": (*__all__, "BinaryClassifier", "Regressor"),
        "released": ("Released",),
        "files": ("Dialect",),
        "schema": ("Category", "Date", "Number", "Ordered", "Schema", "Table"),
    }
    _HOME = {name: place for place, names in _HOMES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*_HOME, *(name for name in globals() if name.startswith("__"))})
