"""Bounds of one-run audits beside those of jax-privacy on equal scores; jax_privacy_audit.py made its figures."""

from __future__ import annotations

import json

import pytest

from tests.reference.jax_privacy_audit import CASES, FIGURES, scores
from torch_dpsco.audits import OneRunAudit

THEIRS = json.loads(FIGURES.read_text(encoding="utf-8"))["figures"]


def ours(case: dict, family: str) -> float:
    coins, values = scores(case["canaries"], case["mu"])
    audit = OneRunAudit(range(case["canaries"]), guess_in=case["guesses"], guess_out=0)
    audit._coins = coins
    return audit.result(
        values, delta=case["delta"], confidence=case["confidence"], family=family
    ).epsilon_lower


def test_figures_are_of_these_cases() -> None:
    assert [{name: case[name] for name in CASES[0]} for case in THEIRS] == CASES
    assert sum(case["any"] > 0.1 for case in THEIRS) > len(CASES) / 2


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "case", THEIRS, ids=lambda case: "-".join(str(value) for value in list(case.values())[:5])
)
def test_bounds_agree_but_for_the_stated_correction(case: dict) -> None:
    gaussian, any_ = ours(case, "gaussian"), ours(case, "any")
    assert gaussian == pytest.approx(case["gaussian"], rel=1e-4, abs=1e-4)
    paid, level = case["canaries"] * case["delta"], 1 - case["confidence"]
    if case["delta"] < 1e-12:  # then no correction is to be seen
        assert any_ == pytest.approx(case["any"], abs=1e-5)
    elif paid <= level:  # beyond, their correction may be the larger one (docs/proofs/audit.md)
        assert any_ <= case["any"] + 2e-6
        assert any_ > 0.9 * case["any"] or paid > level / 20 or case["any"] < 0.1
    else:
        assert any_ < ours(case | {"delta": 0.0}, "any") or any_ == 0.0
