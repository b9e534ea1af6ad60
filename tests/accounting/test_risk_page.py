"""The table of docs/choose_epsilon.md is computed here."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_mu
from torch_dpsco.accounting.analysis.risk import Risk

PAGE = Path(__file__).parents[2] / "docs" / "choose_epsilon.md"
DELTA = 1e-6


def percent(share: float) -> str:
    return f"{math.ceil(min(share, 1.0) * 1000 - 1e-9) / 10:.1f} %"


def figures(risk: Risk) -> list[str]:
    shares = [0.5 + 0.5 * risk.advantage, risk.true_positive(0.01), risk.true_positive(0.001)]
    return [
        percent(share)
        for share in (*shares, risk.posterior(0.1, 0.01), risk.posterior(0.1, 0.001))
    ]


def test_the_table_is_what_is_computed():
    rows = []
    for epsilon in (0.1, 0.5, 1.0, 2.0, 4.0, 8.0):
        mu = gaussian_mu(epsilon, DELTA)
        for name, risk in (
            ("Gaussian noise", Risk(lambda e, mu=mu: gaussian_delta(mu, e))),
            ("any", Risk.of_point(epsilon, DELTA)),
        ):
            rows.append(f"| {epsilon:g} | {name} | {' | '.join(figures(risk))} |")
    written = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ][1:]
    assert written == rows


@pytest.mark.slow
def test_every_python_block_of_the_page_runs(capsys):
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    shown = " ".join(capsys.readouterr().out.split())
    assert "all but one patient" in shown
    assert "true positive rate 0.02 at false positive rate 0.01" in shown
