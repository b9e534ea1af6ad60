"""Private empirical risk minimization of linear models: solve with certainty, release once.

* `task`: the public numbers, and how rows are prepared;
* `output`, `objective`, `noisy_gd`, `adassp`: a plan and a release for each mechanism;
* `fit`: the one entry, `fit_linear`, which `estimators` and the optimizers of `optim` stand on.
"""

from torch_dpsco.erm.fit import MECHANISMS, choose_mechanism, fit_linear
from torch_dpsco.erm.task import LinearTask, Preparation

__all__ = ["MECHANISMS", "LinearTask", "Preparation", "choose_mechanism", "fit_linear"]
