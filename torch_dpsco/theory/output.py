"""Output perturbation: the names that optimizers and tests import.

* how far one record moves a minimizer: `output_sensitivity`; constants of losses for that: `output_constants`;
* what rounding may hide from a certificate, default tolerances: `output_rounding`.

Source: docs/proofs/output.md; Lowy and Razaviyayn, Output Perturbation for Differentially Private Convex Optimization.
"""

from __future__ import annotations

from torch_dpsco.theory.output_constants import (
    adversarial_gradient_diameter,
    adversarial_lipschitz,
    logistic_gradient_diameter,
)
from torch_dpsco.theory.output_rounding import (
    amp_tolerance,
    check_gap_tolerance,
    check_tolerance,
    gradient_rounding,
    solver_tolerance,
    sum_terms,
)
from torch_dpsco.theory.output_sensitivity import (
    certified_sensitivity,
    erm_sensitivity,
    expected_suboptimal_sensitivity,
    minimizer_radius,
)

__all__ = [
    "adversarial_gradient_diameter",
    "adversarial_lipschitz",
    "amp_tolerance",
    "certified_sensitivity",
    "check_gap_tolerance",
    "check_tolerance",
    "erm_sensitivity",
    "expected_suboptimal_sensitivity",
    "gradient_rounding",
    "logistic_gradient_diameter",
    "minimizer_radius",
    "solver_tolerance",
    "sum_terms",
]
