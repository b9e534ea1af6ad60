"""The privacy card: whole, in one file, and in agreement with the ledger."""

from __future__ import annotations

import base64
import json
import math
import re
from datetime import UTC, datetime

import numpy as np
import pytest

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Full
from torch_dpsco.accounting.events import Gaussian, NonPrivate, Parallel, Pure, clipped_gaussian
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.accounting.report import Run
from torch_dpsco.accounting.statement import make_statement
from torch_dpsco.estimators import LogisticRegression

pytest.importorskip("matplotlib")
DELTA, DATE = 1e-5, datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
STEP = clipped_gaussian(9.0)


def stated(name="NoisyGD", accountant=None):
    accountant = (
        Accountant(Budget(3.0, DELTA, "replace_one")) if accountant is None else accountant
    )
    accountant.authorize(STEP, 4)
    return make_statement(
        accountant.report(DELTA), Run(name, Full(50), STEP, steps=4, planned=4, finalized=True)
    )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("suffix", [".html", ".md", ".json"])
def test_the_card_says_all_that_the_statement_says(tmp_path, suffix):
    path = tmp_path / f"card{suffix}"
    statement = stated()
    statement.save(path, date=DATE)
    text = path.read_text(encoding="utf-8")
    for said in (
        "replace_one",
        "one example",
        "2030-01-02T03:04:05",
        "torch",
        statement.version,
        statement.headline,
    ):
        assert said in text
    for line in statement.figures.assumptions:
        assert line[1:] in text


@pytest.mark.slow
def test_the_pdf_opens_and_has_its_date(tmp_path):
    stated().save(tmp_path / "card.pdf", date=DATE)
    content = (tmp_path / "card.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert content.rstrip().endswith(b"%%EOF")
    assert b"D:20300102030405" in content


@pytest.mark.slow
def test_the_html_needs_no_network_and_escapes_text(tmp_path):
    stated("<script>alert(1)</script>").save(tmp_path / "card.html")
    text = (tmp_path / "card.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "http:" not in text
    assert "https:" not in text
    assert "default-src 'none'" in text
    assert (
        text.count("data:image/svg+xml;base64,") == 2 * 3
    )  # for light pages, and for dark ones


def test_json_is_that_of_the_statement_and_more(tmp_path):
    statement = stated()
    statement.save(tmp_path / "card.json", date=DATE)
    saved = json.loads((tmp_path / "card.json").read_text(encoding="utf-8"))
    assert saved.pop("card")["date"] == "2030-01-02T03:04:05+00:00"
    assert saved == json.loads(statement.json())


def test_other_suffixes_and_other_files_are_left_alone(tmp_path):
    path = tmp_path / "card.md"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        stated().save(path)
    assert path.read_text() == "mine"
    stated().save(path, overwrite=True)
    assert path.read_text(encoding="utf-8").startswith("# Privacy card: NoisyGD")
    with pytest.raises(
        ValueError, match=r"path must end in .html, .pdf, .md, .json \(got 'card.docx'\)"
    ):
        stated().save("card.docx")


def test_the_pictures_end_at_what_was_spent():
    statement = stated()
    _, _, spending = statement.plot().axes
    so_far, budget = spending.get_lines()
    assert tuple(so_far.get_xydata()[-1]) == (4.0, statement.epsilon)
    assert budget.get_label() == "budget: 3"


def test_a_picture_that_shows_no_more_than_the_headline_is_left_out():
    assert [axes.get_title() for axes in stated().plot().axes][2:] == ["What was spent"]
    accountant = Accountant()
    accountant.authorize(STEP, 1)
    axes = make_statement(accountant.report(DELTA), stated().run).plot().axes
    titles = [
        "What a test can find out about one example",
        "What an alarm proves about one example",
    ]
    assert [own.get_title() for own in axes] == titles


def test_the_marks_lie_on_the_curve_and_say_what_the_risk_is():
    figures = stated().figures
    risk, (tests, alarms, *_) = figures.risk(), stated().plot().axes
    best, _, *marked, advantage = tests.get_lines()
    curve = dict(zip(*best.get_data(), strict=True))
    for line, f in zip(marked, (0.01, 0.001), strict=True):
        ((x, y),) = line.get_xydata()
        assert (x, y) == (f, 1.0 - risk.true_positive(f))
        assert y <= curve[x] + 1e-12
    ((x, y),) = advantage.get_xydata()
    assert x == y == pytest.approx(curve[x], abs=1e-9)
    assert 1.0 - 2.0 * x == pytest.approx(figures.advantage)
    after, p = alarms.get_lines()[0], 0.1
    assert dict(zip(*after.get_data(), strict=True))[p] == risk.posterior(p, 0.01)


@pytest.mark.slow
def test_the_html_has_a_table_of_what_is_compared_and_fits_a_phone(tmp_path):
    stated().save(tmp_path / "card.html")
    text = (tmp_path / "card.html").read_text(encoding="utf-8")
    assert (
        "<td>replace_one (the guarantee)</td><td>in one the example is in the data set" in text
    )
    assert '<meta name="viewport" content="width=device-width' in text
    assert 'alt="What was spent"' in text


def sentences(statement):
    return [line for _, lines in statement.sections for line in lines]


def test_no_line_of_a_card_is_said_twice():
    for statement in (stated(), fit().report()):
        lines = [*statement.warnings, *sentences(statement)]
        assert len(set(lines)) == len(lines)
        text = statement.markdown()
        assert text.count("won") + text.count("wins") == 1  # an even bet
        assert text.count("hosen without look") + text.count("without a look at these data") <= 1


def fit():
    X = np.linspace(-1, 1, 400).reshape(-1, 1)
    model = LogisticRegression(epsilon=1.0, n=400, bound_x=1.0, classes=(0, 1))
    return model.fit(X, (X[:, 0] > 0).astype(int))


def test_a_card_begins_with_a_verdict_and_ends_with_the_accounts():
    for epsilon, word in ((0.5, "strong"), (1.0, "strong"), (5.0, "moderate"), (40.0, "weak")):
        accountant = Accountant()
        accountant.authorize(Pure(epsilon, ("zero_out",)), 1)
        run = Run("NoisyGD", Full(50), STEP, steps=1, planned=1, finalized=True)
        statement = make_statement(accountant.report(0.0), run)
        verdict = statement.in_short[0]
        assert verdict.startswith(f"Verdict: {word} protection.")
        right = float(re.search(r"wins at most ([\d.]+) %", verdict)[1])
        assert 0 <= right - 100 / (1 + math.exp(-epsilon)) < 0.11
        assert [title for title, _ in statement.appendix] == ["How it was computed"]
        assert not any("Charged" in line for _, lines in statement.main for line in lines)


def test_no_guarantee_is_no_protection():
    accountant = Accountant()
    accountant.authorize(NonPrivate(), 1)
    run = Run("NoisyGD", Full(50), STEP, steps=1, planned=1, finalized=True)
    assert make_statement(accountant.report(DELTA), run).in_short[0] == (
        "Verdict: no protection. What was released may tell all about one example."
    )


def test_accounts_are_behind_a_link_and_at_the_end(tmp_path):
    statement = stated()
    for suffix, mark in ((".html", "<details>"), (".md", "## How it was computed")):
        statement.save(tmp_path / f"card{suffix}")
        text = (tmp_path / f"card{suffix}").read_text(encoding="utf-8")
        before, after = text.split(mark)
        assert "Charged" not in before
        assert "What was spent" not in before
        assert "Charged: 4 x Gaussian" in after
        assert "two worlds" in after
    assert 'alt="What was spent"' in (tmp_path / "card.html").read_text(encoding="utf-8")


def test_pictures_have_a_dark_form_without_a_background(tmp_path):
    stated().save(tmp_path / "card.html")
    text = (tmp_path / "card.html").read_text(encoding="utf-8")
    for kind, dark in (("srcset", True), ("src", False)):
        drawn = re.findall(rf' {kind}="data:image/svg\+xml;base64,([^"]+)"', text)
        assert len(drawn) == 3
        for encoded in drawn:
            svg = base64.b64decode(encoded).decode()
            assert ("#dddddd" in svg) == dark
            assert ("fill: #ffffff" in svg) != dark


def test_an_adaptive_card_draws_no_sums():
    figures = stated(
        accountant=Accountant(Budget(3.0, DELTA, "replace_one", mode="gdp"))
    ).figures
    assert figures.spent == ()


def test_a_ledger_of_the_events_of_a_ledger_is_the_same():
    parts = Parallel(
        {"a": (STEP, STEP), "b": (Gaussian(3.0, {"replace_one": 1.0}),)}, "cut", "keyed", True
    )
    ledger, again = Ledger([STEP, parts, STEP]), Ledger()
    for event, count in ledger.events():
        again.add(event, count)
    assert again.digest() == ledger.digest()


def test_a_run_with_repeatable_noise_has_no_verdict():
    accountant = Accountant()
    accountant.authorize(STEP, 1)
    run = Run("NoisyGD", Full(50), STEP, 1, 1, True, repeatable=True)
    first, *others = make_statement(accountant.report(DELTA), run).in_short
    assert first.startswith("Verdict: none.")
    assert not any("Verdict" in line or "bets" in line for line in others)
