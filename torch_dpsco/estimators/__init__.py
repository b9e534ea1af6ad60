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

* `protocol`, `own`: scikit-learn's base classes, or ours; * `data`: what `fit` reads; * `base`: what all models do.
"""

from torch_dpsco.estimators.classifiers import (
    AdversarialClassifier,
    LinearSVC,
    LogisticRegression,
    SoftmaxRegression,
    TiltedClassifier,
)
from torch_dpsco.estimators.regressors import HuberRegressor, QuantileRegressor, Ridge

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
