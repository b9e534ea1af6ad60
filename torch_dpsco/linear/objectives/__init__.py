"""Full-batch objectives of linear models over in-memory data: what the solvers minimize and certify.

| class | objective |
|---|---|
| `LinearObjective` | mean or public sum of any loss of one score, with an optional linear term |
| `SoftmaxObjective` | cross-entropy of K classes |
| `Tilted` | (1/tau) log mean exp(tau l) |
| `Adversarial` | worst case over ||v||_p <= rho, p = 2 or inf |

All are evaluated in float64, block by block, with proved bounds on the rounding of value and gradient.
"""

from __future__ import annotations

from torch_dpsco.linear.objectives.base import Objective
from torch_dpsco.linear.objectives.linear import LinearObjective, SoftmaxObjective
from torch_dpsco.linear.objectives.robust import Adversarial, Tilted

__all__ = ["Adversarial", "LinearObjective", "Objective", "SoftmaxObjective", "Tilted"]
