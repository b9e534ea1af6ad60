"""Statistical inference from released private models: standard errors, p-values, confidence intervals.

    model = LogisticRegression(epsilon=1.0, n=10_000, bound_x=2.0, classes=(0, 1), intervals=0.3).fit(X, y)
    print(model.summary())

* `debiased`: estimate and covariance, of what was released; * `summary`: the table. All of it is post-processing.
"""

from torch_dpsco.acts import register

register("model.summary", "torch_dpsco.statistics.summary:summarize")
