"""Solvers of strongly convex objectives, none of them trusted, and the certificates that are.

`solve(objective, tolerance)` is the entry: a fast solver (Newton, L-BFGS, Katyusha, stochastic subgradient, Huber
continuation), a run-time certificate of the distance to the exact minimizer, and a deterministic fallback.
"""

from __future__ import annotations

from torch_dpsco.linear.solvers.certificates import Certificate, gradient_certificate
from torch_dpsco.linear.solvers.solve import SOLVERS, Solution, solve

__all__ = ["SOLVERS", "Certificate", "Solution", "gradient_certificate", "solve"]
