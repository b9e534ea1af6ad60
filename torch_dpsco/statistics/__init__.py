"""Statistical inference from released private models: standard errors, p-values, confidence intervals.

    model = LogisticRegression(epsilon=1.0, n=10_000, bound_x=2.0, classes=(0, 1), intervals=0.3).fit(X, y)
    print(model.summary())

* `debiased`: estimate and covariance, of what was released; * `summary`: the table. All of it is post-processing.
"""

from torch_dpsco.acts import register
from torch_dpsco.estimators.solvers import needed_eigenvalue
from torch_dpsco.statistics.debiased import Debiased, debias, least_squares
from torch_dpsco.statistics.summary import Summary, p_value, reach, summarize

register("model.summary", summarize)

__all__ = [
    "Debiased",
    "Summary",
    "debias",
    "least_squares",
    "needed_eigenvalue",
    "p_value",
    "reach",
]
