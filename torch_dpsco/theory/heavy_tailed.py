"""Plans and bounds of the methods for heavy-tailed gradients: the names that optimizers and tests import.

* one pass over disjoint batches: `accelerated_plan` (smooth convex), `strongly_convex_plan`, `proximal_pl_plan`;
* multi-pass phases on disjoint parts: `localized_schedule_ballfree` (non-smooth convex), `reduction_schedule` (strongly
  convex), `boosted_localized_schedule` (few moments), `localized_schedule_minibatch`;
* the published numbers: mode "paper" of the plans.

The guarantees are stated with each plan. All numbers are public: they follow from n, d, rho and promised
moments.

Proofs: docs/proofs/heavy_tailed.md. Source: Lowy and Razaviyayn, arXiv 2209.07403.
"""

from __future__ import annotations

from torch_dpsco.theory.heavy_accelerated import accelerated_plan
from torch_dpsco.theory.heavy_averaged import averaging_schedule, strongly_convex_coefficients, strongly_convex_plan
from torch_dpsco.theory.heavy_boosted import boosted_localized_schedule
from torch_dpsco.theory.heavy_localized import localized_schedule_ballfree
from torch_dpsco.theory.heavy_phases import LocalizedPhase, LocalizedSchedule
from torch_dpsco.theory.heavy_proximal import proximal_pl_plan
from torch_dpsco.theory.heavy_reduction import localized_schedule_minibatch, minibatch_size, reduction_schedule

__all__ = [
    "LocalizedPhase",
    "LocalizedSchedule",
    "accelerated_plan",
    "averaging_schedule",
    "boosted_localized_schedule",
    "localized_schedule_ballfree",
    "localized_schedule_minibatch",
    "minibatch_size",
    "proximal_pl_plan",
    "reduction_schedule",
    "strongly_convex_coefficients",
    "strongly_convex_plan",
]
