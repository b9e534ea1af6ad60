"""Epsilons and noise multipliers that the pages quote in prose are computed here, and must be there as they are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from opacus.accountants.utils import get_noise_multiplier

import torch_dpsco as dp
from torch_dpsco.accounting.analysis.gaussian import gaussian_epsilon
from torch_dpsco.accounting.events import ADD_REMOVE, REPLACE_ONE, clipped_gaussian
from torch_dpsco.accounting.ledger import Ledger

ROOT = Path(__file__).parents[2]
N, BATCH, DELTA = 32_561, 512, 1e-5  # the Adult example
PROBLEM = dp.losses.Logistic().problem(bound_x=3.61)


def page(name: str) -> str:
    """Returns the words of a page, with one space between them."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def adult() -> tuple[float, Ledger]:
    """The noise multiplier of the Adult example, and its ledger."""
    budget = dp.Budget(1.0, DELTA, adjacency=ADD_REMOVE)
    plan = dp.HolderSGD.plan(problem=PROBLEM, n=N, budget=budget, batch_size=BATCH, epochs=10)
    event = dp.Poisson(BATCH, N).event(clipped_gaussian(plan.noise_multiplier), plan.steps)
    return plan.noise_multiplier, Ledger([event])


def rounded_up(value: float, digits: int) -> str:
    scaled = math.ceil(value * 10**digits - 1e-9) / 10**digits
    return f"{scaled:.{digits}f}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")
def test_the_move_from_opacus_quotes_the_noise_of_both(adult: tuple[float, Ledger]) -> None:
    settings = {
        "target_epsilon": 1.0,
        "target_delta": DELTA,
        "sample_rate": 1 / math.ceil(N / BATCH),
        "epochs": 10,
    }
    by_prv, by_rdp = (
        get_noise_multiplier(**settings, accountant=name) for name in ("prv", "rdp")
    )
    sentence = (
        f"a noise multiplier of {adult[0]:.2f} here and of {by_prv:.2f} by Opacus' PRV accountant, which leaves room "
        f"for its error ({by_rdp:.2f} by its Renyi accountant)"
    )
    assert sentence in page("docs/from_opacus.md")


@pytest.mark.slow
def test_one_run_has_the_quoted_epsilons_under_two_relations(
    adult: tuple[float, Ledger],
) -> None:
    under = {
        adjacency: adult[1].epsilon(DELTA, adjacency) for adjacency in (ADD_REMOVE, REPLACE_ONE)
    }
    assert rounded_up(under[ADD_REMOVE], 2) == "1.00"
    three = rounded_up(under[REPLACE_ONE], 3)
    assert f"spends 1 under add_remove and {three} under replace_one" in page(
        "docs/from_opacus.md"
    )
    plan = dp.HolderSGD.plan(
        problem=PROBLEM, n=N, budget=dp.Budget(1.0, DELTA, adjacency=ADD_REMOVE), dim=66
    )
    two = rounded_up(plan.epsilon(adjacency=REPLACE_ONE), 2)
    assert f"spend epsilon 1.00 under add_remove and {two} under replace_one" in page(
        "docs/guarantees.md"
    )


def test_claims_in_the_table_of_audits_are_those_of_the_accountant() -> None:
    text = page("docs/accounting.md")
    for delta, words in ((0.05, "0.05"), (1e-5, "1e-5")):
        assert f"| Gaussian, sigma = 1 | {words} |" in text
        assert f"| {rounded_up(gaussian_epsilon(1.0, delta), 3)} |" in text
    full = Ledger([clipped_gaussian(2 / 3)])
    assert f"| 0.3 | 800 | 1 - 1e-6 | {rounded_up(full.epsilon(0.3, ADD_REMOVE), 3)} |" in text
    claimed = Ledger([dp.Poisson(256, 60_000).event(clipped_gaussian(1.0), 235)])
    both = "; ".join(
        rounded_up(claimed.epsilon(1e-5, adjacency), 3)
        for adjacency in (ADD_REMOVE, REPLACE_ONE)
    )
    assert f"| 1e-5 | 100,000 | 1 - 1e-6 | {both} |" in text


def test_rows_protect_their_users_as_badly_as_the_page_says() -> None:
    epsilon, rows = 0.1, 50
    times, factor = (
        f"{rows} e^({epsilon * (rows - 1):.1f})",
        rows * math.exp(epsilon * (rows - 1)),
    )
    sentence = f"epsilon = {epsilon} a row is {epsilon * rows:g} for {rows} rows, with delta multiplied by {times}"
    assert f"{sentence}, about {round(factor, -2):,.0f}." in page("docs/user_level.md")
