"""What objective perturbation charges: a Renyi curve.

For monotone losses with one record added or removed it is the curve of the pair that dominates the release, about
a s^2/2 at small orders, so that the determinant costs nothing there. A Gaussian event (GDP) would have to cover the
point c + e of that pair, and is larger.

Source: docs/proofs/objective.md#what-is-charged
"""

from __future__ import annotations

from torch_dpsco import _validate as check
from torch_dpsco.accounting.adjacency import ADD_REMOVE, REPLACE_ONE, ZERO_OUT, Adjacency, check_adjacency
from torch_dpsco.accounting.curves import orders_at
from torch_dpsco.accounting.stated import RDPCurve
from torch_dpsco.theory import objective_perturbation as formulas

_LEVEL = 1  # orders up to 2^14


def objective_curve(
    noise_std: float,
    reg: float,
    lipschitz: float,
    smoothness: float,
    *,
    monotone: bool,
    mu_out: float = 0.0,
    adjacency: Adjacency = ADD_REMOVE,
) -> RDPCurve:
    """Returns the Renyi curve of a release by objective perturbation of a loss of one linear score.

    Args:
        noise_std: sigma > 0, of b.
        reg: lam > 0, in sum form.
        lipschitz: L > 0, bound on the gradient of a loss at every theta of R^d.
        smoothness: beta >= 0, bound on phi'' |x|^2 at every theta of R^d.
        monotone: whether phi' keeps its sign for each record.
        mu_out: >= 0, level of the noise on an approximate minimizer; 0 for an exact one.
        adjacency: of the guarantee: "add_remove" includes "zero_out".

    Raises:
        ValueError: an argument is out of range.

    Guarantee: as `theory.objective_perturbation.objpert_rdp`, or `objpert_delta_monotone` for monotone losses.

    Source: docs/proofs/objective.md#what-is-charged

    Example:
        >>> curve = objective_curve(10.0, 5.0, 1.0, 0.25, monotone=True)
        >>> curve.adjacencies, curve.values[0] < 0.01
        (('add_remove', 'zero_out'), True)
    """
    adjacency, mu_out = check_adjacency(adjacency), check.nonnegative(mu_out=mu_out)
    determinant = formulas.log_det(reg, smoothness)

    def divergence(order: float) -> float:
        if monotone:
            value = formulas.objpert_rdp_dominating(order, noise_std, reg, lipschitz, smoothness, adjacency)
        elif adjacency == REPLACE_ONE:
            value = formulas.objpert_rdp_general(order, noise_std, determinant, 2 * lipschitz, 2)
        else:
            value = formulas.objpert_rdp(order, noise_std, reg, lipschitz, smoothness)
        return (value + order * mu_out * mu_out / 2) * (1 + 1e-15)

    orders = tuple(float(order) for order in orders_at(_LEVEL))
    stated = (REPLACE_ONE,) if adjacency == REPLACE_ONE else (ADD_REMOVE, ZERO_OUT)
    return RDPCurve(orders, tuple(divergence(order) for order in orders), stated)
