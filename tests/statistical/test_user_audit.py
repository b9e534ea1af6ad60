"""Audits of the optimizers that protect users: two data sets differ in all rows of one person, and in their number.

The loss is linear, so that the steps of a run are independent draws of one release; their difference is as large as the
sensitivity (clipping), or nearly (filter). Both bounds hold with probability 1 - 1e-6, and the seeds are fixed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import torch_dpsco as dp
from tests.algorithms import user_runs as runs
from torch_dpsco.accounting.events import Gaussian
from torch_dpsco.accounting.ledger import Ledger

# Seeds warn in every test here.
pytestmark = pytest.mark.filterwarnings("ignore:.*repeatable:torch_dpsco.errors.UtilityWarning")
STEPS, DELTA, CONFIDENCE = 1200, 0.2, 1 - 2e-6
MU = 1.2  # of one release


def claimed(mu: float) -> float:
    """Returns the epsilon of one Gaussian release."""
    return Ledger([Gaussian(1.0, {"replace_one": mu})]).epsilon(DELTA, "replace_one")


def released(run: runs.Run, rows: np.ndarray, ids: np.ndarray) -> torch.Tensor:
    """Returns the private means of all steps."""
    found = []
    for batch in run.opt.loader(
        runs.dataset(rows), ids, isolation="none"
    ):  # a draw is one batch
        run.step(batch)
        found.append(float(run.model.layer.weight.grad))
    assert len(found) == STEPS
    assert not run.opt.halted
    return torch.tensor(found)


def clipped(mu: float, place: float, rows: int, seed: int) -> torch.Tensor:
    """Two users; one of them holds so many rows at a place."""
    generator = torch.Generator().manual_seed(seed)
    run = runs.clipped(
        2, dim=1, lr=1e-9, noise_multiplier=2.0 / mu, steps=STEPS, generator=generator
    )
    return released(run, np.array([[place]] * rows + [[0.0]]), np.array([0] * rows + [1]))


def filtered(mu: float, place: float, rows: int, seed: int) -> torch.Tensor:
    """Users at 0, and one whom the filter takes for one of them."""
    plan = runs.quiet(91, steps=STEPS, floor=90.5, end=68)
    plan = replace(plan, noise_std=plan.sensitivity / mu)
    run = runs.filtered(plan, dim=1, lr=1e-9, generator=torch.Generator().manual_seed(seed))
    data = np.concatenate([np.full((rows, 1), place / 2), np.zeros((90, 1))])
    return released(run, data, np.concatenate([np.zeros(rows, dtype=int), np.arange(1, 91)]))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("attack", [clipped, filtered], ids=["clipped", "filtered"])
def test_no_attack_on_a_person_beats_the_claim_and_one_on_halved_noise_does(attack) -> None:
    first, second = attack(MU, 2.0, 1, 1), attack(MU, -2.0, 5, 2)
    found = dp.audit_outputs(first, second, delta=DELTA, confidence=CONFIDENCE).epsilon_lower
    assert found <= claimed(MU)
    # the mutation: half the noise that is claimed
    first, second = attack(2 * MU, 2.0, 1, 1), attack(2 * MU, -2.0, 5, 2)
    assert dp.audit_outputs(
        first, second, delta=DELTA, confidence=CONFIDENCE
    ).epsilon_lower > claimed(MU)
