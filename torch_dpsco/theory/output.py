"""Output perturbation: the names that optimizers and tests import.

* how far one record moves a minimizer: `output_sensitivity`; constants of losses for that: `output_constants`;
* regularization and risk, the paper's schedules: `output_schedules`;
* what rounding may hide from a certificate, default tolerances: `output_rounding`.

Source: docs/proofs/output.md; Lowy and Razaviyayn, Output Perturbation for Differentially Private Convex Optimization.
"""

from __future__ import annotations

from torch_dpsco.theory.output_constants import (
    adversarial_gradient_diameter,
    adversarial_lipschitz,
    adversarial_smoothness,
    logistic_gradient_diameter,
    residual_clip_constants,
)
from torch_dpsco.theory.output_rounding import (
    amp_tolerance,
    check_gap_tolerance,
    check_tolerance,
    gap_rounding,
    gradient_rounding,
    solver_tolerance,
    sum_terms,
)
from torch_dpsco.theory.output_schedules import (
    accuracy_paper,
    accuracy_paper_smooth,
    noise_norms,
    paper_ratio,
    reg_convex_erm,
    reg_convex_population,
    reg_smooth_erm,
    reg_smooth_population,
    risk_convex_erm,
    risk_convex_population,
    risk_smooth_erm,
    risk_smooth_population,
    risk_strongly_convex,
)
from torch_dpsco.theory.output_sensitivity import (
    argmin_sensitivity,
    certified_sensitivity,
    erm_sensitivity,
    expected_suboptimal_sensitivity,
    minimizer_radius,
    psgd_sensitivity,
    psgd_sensitivity_strongly_convex,
    suboptimal_sensitivity,
)

__all__ = [
    "accuracy_paper",
    "accuracy_paper_smooth",
    "adversarial_gradient_diameter",
    "adversarial_lipschitz",
    "adversarial_smoothness",
    "amp_tolerance",
    "argmin_sensitivity",
    "certified_sensitivity",
    "check_gap_tolerance",
    "check_tolerance",
    "erm_sensitivity",
    "expected_suboptimal_sensitivity",
    "gap_rounding",
    "gradient_rounding",
    "logistic_gradient_diameter",
    "minimizer_radius",
    "noise_norms",
    "paper_ratio",
    "psgd_sensitivity",
    "psgd_sensitivity_strongly_convex",
    "reg_convex_erm",
    "reg_convex_population",
    "reg_smooth_erm",
    "reg_smooth_population",
    "residual_clip_constants",
    "risk_convex_erm",
    "risk_convex_population",
    "risk_smooth_erm",
    "risk_smooth_population",
    "risk_strongly_convex",
    "solver_tolerance",
    "sum_terms",
    "suboptimal_sensitivity",
]
