"""Private empirical risk minimization of linear models: solve with certainty, release once.

* `task`: the public numbers, and how rows are prepared;
* `output`, `objective`, `noisy_gd`, `adassp`: a plan for each mechanism, which solves and releases;
* `fit`: `plan_linear` chooses one, `fit_linear` carries it out, for `estimators`; the optimizers of `optim` are made of
  the same plans.
"""

from torch_dpsco.linear.fit import MECHANISMS, choose_mechanism, fit_linear, plan_linear
from torch_dpsco.linear.task import LinearTask, Preparation

__all__ = ["MECHANISMS", "LinearTask", "Preparation", "choose_mechanism", "fit_linear", "plan_linear"]
