"""Pure privacy at order 1, which the package does not ask for."""

from torch_dpsco.accounting.analysis.pure import rdp_pure, rho_pure


def rdp_pure_dp(epsilon: float, order: float) -> float:
    """Returns `rdp_pure`; at order 1 the Kullback-Leibler divergence epsilon tanh(epsilon / 2)."""
    return rho_pure(epsilon) if order == 1 else rdp_pure(epsilon, order)
