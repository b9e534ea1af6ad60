"""Events of objective perturbation in a ledger."""

from __future__ import annotations

import pytest

from tests.reference.papers.objective import (
    amp_delta_monotone,
    objpert_rdp_dominating,
    objpert_rdp_monotone,
    of_any_sign,
    of_one_sign,
    rdp_of_any_sign,
)
from torch_dpsco.accounting.analysis.objective import Change, log_det, objpert_rdp
from torch_dpsco.accounting.analysis.rdp import rdp_epsilon
from torch_dpsco.accounting.curves import cost_of, objective_curve
from torch_dpsco.errors import AdjacencyError

REG, NOISE = 0.88, 6.0


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("monotone", [True, False])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_curve_holds_its_formula_at_every_order(monotone, adjacency):
    if monotone:
        change = of_one_sign(REG, 1.0, 0.25, adjacency)
    elif adjacency == "add_remove":
        change = of_any_sign(REG, 1.0, 0.25)
    else:
        change = Change(log_det(REG, 0.25), 2.0, 2)
    curve = objective_curve(NOISE, change, 0.01, adjacency)
    for order, value in list(zip(curve.orders, curve.values, strict=True))[::37]:
        if monotone:
            exact = objpert_rdp_dominating(order, NOISE, REG, 1.0, 0.25, adjacency)
        elif adjacency == "add_remove":
            exact = rdp_of_any_sign(order, NOISE, REG, 1.0, 0.25)
        else:
            exact = objpert_rdp(order, NOISE, change)
        assert (
            exact + order * 0.01**2 / 2 <= value <= (exact + order * 0.01**2 / 2) * (1 + 1e-14)
        )
    assert cost_of(curve, adjacency, 1).rdp.max() < float("inf")
    with pytest.raises(AdjacencyError):
        cost_of(curve, "add_remove" if adjacency == "replace_one" else "replace_one", 0)


def test_a_curve_is_nearly_as_good_alone_and_better_in_company():
    curve = objective_curve(NOISE, of_one_sign(REG, 1.0, 0.25), 0.0, "add_remove")
    naive = [objpert_rdp_monotone(order, NOISE, REG, 1.0, 0.25) for order in curve.orders]
    assert all(
        value <= worse * (1 + 1e-12) + 1e-11
        for value, worse in zip(curve.values, naive, strict=True)
    )
    alone = rdp_epsilon(curve.orders, curve.values, 1e-6).epsilon
    delta = amp_delta_monotone(alone, NOISE, REG, 1.0, 0.25, 0.0)
    assert 1e-7 < delta <= 1e-6  # a curve of divergences loses a part of delta
    many = [16 * value for value in curve.values]
    assert (
        rdp_epsilon(curve.orders, many, 1e-6).epsilon
        < 0.8 * rdp_epsilon(curve.orders, [16 * value for value in naive], 1e-6).epsilon
    )
