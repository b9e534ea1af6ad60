"""The plain-language statement: what it says for each configuration, and what it must never say."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
import tomllib
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_dpsco as dp
from torch_dpsco.accounting import report as grounds
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.designs import (
    Design,
    Disjoint,
    Draw,
    Fixed,
    Full,
    Poisson,
    Shuffled,
    Undeclared,
)
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    clipped_gaussian,
    in_words,
)
from torch_dpsco.accounting.report import Run, charged
from torch_dpsco.accounting.statement import DESIGNS as DRAWN
from torch_dpsco.accounting.statement import Statement, make_statement, words_of

DELTA = 1e-5
STEP = clipped_gaussian(5.0)
DESIGNS = [
    Poisson(64, 1000),
    Fixed(64, 1000),
    Shuffled(64, 1000),
    Disjoint(64, 1000),
    Full(1000),
    Undeclared(64),
]
SUPPORTED = {Poisson: ADJACENCIES, Full: ADJACENCIES, Undeclared: (REPLACE_ONE,)}
CELLS = [(d, a) for d in DESIGNS for a in SUPPORTED.get(type(d), (ZERO_OUT, REPLACE_ONE))]


def named(value: object) -> str:
    return value if isinstance(value, str) else type(value).__name__


def stated(
    design: Design = DESIGNS[0],
    *,
    event: Gaussian | NonPrivate = STEP,
    steps: int = 10,
    planned: int | None = 10,
    finalized: bool = True,
    delta: float | None = DELTA,
    accountant: Accountant | None = None,
    **settings: object,
) -> Statement:
    """Returns the statement of a run that charged its steps; keywords of Accountant go to a new one."""
    if accountant is None:
        accountant = Accountant(**{"adjacency": REPLACE_ONE} | settings)
    for k in range(steps):
        accountant.record(design.draw_event(event, Draw(1, "cut", str(k))))
    run = Run("SomeSGD", design, event, steps, planned, finalized)
    return make_statement(accountant.report(delta, ahead=run.ahead()), run)


def section(statement: Statement, title: str) -> str:
    return " ".join(dict(statement.sections)[title])


def forms(statement: Statement) -> list[str]:
    """Returns the statement as text (unwrapped), markdown and JSON."""
    return [" ".join(str(statement).split()), statement.markdown(), statement.json()]


def test_every_word_and_every_blank_of_the_sentences_is_known():
    """Words that are never asked for, behind one that is false, are known too."""
    report = Accountant().report(DELTA)
    words = words_of(report, Run("SomeSGD", Full(50), STEP, 0, None, False), "0")
    ledger_only = charged((), REPLACE_ONE, ()) | {"adaptive": False}
    texts = tomllib.loads(Path(grounds.__file__).with_name("sentences.toml").read_text())
    phrases = texts.pop("phrases")
    for place, sentences in {**texts.pop("sections"), **phrases, **texts}.items():
        truths = ledger_only if place == "assumed" else words.facts
        for when, text, *each in sentences:
            assert {word.lstrip("!") for word in when.split()} <= truths.keys(), text
            assert {*each} <= words.facts.keys()
            blanks = {
                re.split(r"[.\[]", name)[0] for _, name, *_ in Formatter().parse(text) if name
            }
            assert blanks <= {*words.facts, *phrases, *(["each"] if each else [])}, text
    cases = {"world": {*ADJACENCIES}, "sampling": {kind.__name__ for kind in DRAWN}}
    for name, sentences in phrases.items():
        assert sentences[-1][0] == "" or cases[name] <= {when for when, _ in sentences}


# -- sentences of each configuration ----------------------------------------------------------------------------------

WORLD = {
    ADD_REMOVE: "it is left out",
    ZERO_OUT: "an empty record stands",
    REPLACE_ONE: "any other {} stands",
}
SAMPLING = {
    Poisson: "with probability 0.064 (64/1000), independently of all others. It must stay secret",
    Fixed: "a fresh random choice of exactly 64 out of 1000 {}s. It must stay secret",
    Shuffled: "all 1000 {}s in a fresh random order, cut into batches of 64. Nothing is gained",
    Disjoint: "One pass: 1000 {}s in a random order, cut into batches of 64.",
    Full: "each step uses all {}s, and divides by the public constant 1000.",
    Undeclared: "Not declared: each step is charged as a full release",
}


@pytest.mark.cases(10, 5)
@pytest.mark.parametrize(("design", "adjacency"), CELLS, ids=named)
@pytest.mark.parametrize("unit", ["example", "user"])
def test_the_statement_names_guarantee_unit_worlds_and_sampling(design, adjacency, unit):
    statement = stated(design, adjacency=adjacency, unit=unit)
    epsilon = rounded_up(statement.figures.epsilon)
    assert (
        statement.headline
        == f"({epsilon}, 1e-05)-differential privacy for one {unit} ({in_words(adjacency)})."
    )
    assert f"differ in one {unit} only" in section(statement, "What it means")
    assert WORLD[adjacency].format(unit) in section(statement, "What it means")
    assert (
        sum(
            WORLD[other].format(unit) in section(statement, "What it means")
            for other in ADJACENCIES
        )
        == 1
    )
    assert SAMPLING[type(design)].format(unit) in section(statement, "How batches are drawn")
    first = {
        "example": "One example is one row of the training data.",
        "user": "One user is everything that one person",
    }
    assert f"Protected: {first[unit]}" in section(statement, "In short")
    whose = {
        "example": "One record per example.",
        "user": "All rows of a user carry its id, and no other does.",
    }
    assert whose[unit] in section(statement, "What must hold")
    assert f"Charged: {statement.figures.events[0]}." in section(
        statement, "How it was computed"
    )
    assert "SomeSGD: 10 steps made of 10 planned; finalized." in section(
        statement, "How it was computed"
    )
    assert f"Computed by torch_dpsco {dp.__version__}." in section(
        statement, "How it was computed"
    )


@pytest.mark.parametrize(("design", "adjacency"), CELLS, ids=named)
def test_the_number_of_records_is_protected_under_add_remove_only(design, adjacency):
    statement = stated(design, adjacency=adjacency)
    private = adjacency == ADD_REMOVE
    protected = section(statement, "What is protected")
    assert ("and so is the number of examples" in protected) == private
    assert (
        "n = 1000 used here is a public reference, not the true number" in protected
    ) == private
    assert ("The number of examples is taken to be public" in protected) == (not private)
    assert ("The number of examples." in section(statement, "What is not covered")) == (
        not private
    )
    other = "The figure under add_remove holds only if n, batch size and steps were not taken from the data."
    assert (other in protected) == (not private and ADD_REMOVE in statement.figures.epsilons)


@pytest.mark.parametrize(("design", "adjacency"), CELLS, ids=named)
def test_a_sound_run_needs_no_warning_but_a_missing_declaration(design, adjacency):
    statement = stated(design, adjacency=adjacency)
    if isinstance(design, Undeclared):
        (warning,) = statement.warnings
        assert (
            "No sampling was declared, and no number n of examples: check that delta is far below 1/n."
            in warning
        )
    else:
        assert statement.warnings == ()
        assert "Read this first" not in str(statement)


@pytest.mark.parametrize(
    "sentence",
    [
        "Training losses, also the one that step(closure) returns",
        "Gradients of single records, their norms, how many were clipped",
        "Preparing the data by looking at them",
        "Constants read off the data",
        "Stopping early, or picking a model, by scores on private data that were not charged.",
        "Every run costs its own budget, those thrown away too: give all runs one Accountant",
        "Other releases about the same people",
        "running time, memory, error messages",
    ],
)
def test_the_statement_lists_what_was_not_accounted(sentence):
    for adjacency in ADJACENCIES:
        assert sentence in section(stated(adjacency=adjacency), "What is not covered")


def test_the_statement_says_against_whom_and_what_delta_is_not():
    meaning, delta = (section(stated(), title) for title in ("What it means", "What delta is"))
    assert (
        "anybody who sees everything released, knows every other example, the code and all settings"
        in meaning
    )
    assert "what all the other examples show" in meaning
    assert "It is not the chance that a given person is exposed." in delta
    assert (
        "the probability in one world may exceed e^epsilon times that in the other by at most delta."
        in delta
    )
    assert "every iterate, average and private mean gradient" in section(
        stated(), "What is covered"
    )
    assert "floating-point" in section(stated(), "What must hold")


def test_a_failure_probability_inside_delta_is_said():
    statement = stated(Full(1000), event=Gaussian(5.0, {REPLACE_ONE: 1.0}, failure=1e-8))
    assert (
        "probability that what the proof rests on fails, such as the bound on what one record"
        in section(statement, "What delta is")
    )
    assert "not the chance that a given person" not in section(statement, "What delta is")


@dataclass(frozen=True)
class Foreign(Design):
    batch_size: int = 5
    n: int = 1000

    def event(self, base, draws=1):
        return Full(self.n).event(base, draws)

    def draw_event(self, base, draw):
        return base


def test_a_design_of_somebody_else_is_quoted_as_it_is():
    assert "Foreign(batch_size=5, n=1000)" in section(stated(Foreign()), "How batches are drawn")


# -- what must be said before a figure is quoted ----------------------------------------------------------------------


def test_no_guarantee_is_said_first_and_nothing_is_promised():
    statement = stated(event=NonPrivate())
    assert (
        statement.headline
        == "NO privacy guarantee: epsilon is infinite (replace_one: replaced by any other)."
    )
    assert statement.warnings[0].startswith("No guarantee: something was released without noise")
    assert section(statement, "What it means") == (
        "Nothing bounds what the release tells about one example. Treat it like the data themselves."
    )
    assert not any(
        "-differential privacy" in form or "a coin 50 %" in form for form in forms(statement)
    )


@pytest.mark.parametrize("event", [NonPrivate(), clipped_gaussian(0.0)])
def test_noise_of_zero_is_said_before_the_first_step(event):
    statement = stated(event=event, steps=0, planned=10, finalized=False)
    assert (
        "The noise of this optimizer is 0: each of its steps is a release without any privacy."
        in statement.warnings
    )
    assert any(
        "Final epsilon: at most inf by plan or budget." in warning
        for warning in statement.warnings
    )
    assert statement.headline.endswith("because nothing was released yet.")
    assert "Charged: nothing." in section(statement, "How it was computed")


@pytest.mark.parametrize(("noise", "weak"), [(1.0, True), (8.0, False)])
def test_an_epsilon_above_ten_is_called_weak_with_its_likelihood_ratio(noise, weak):
    statement = stated(Full(1000), event=clipped_gaussian(noise))
    epsilon = statement.figures.epsilon
    assert (epsilon > 10) == weak == statement.headline.startswith("WEAK: (")
    ratio = [
        w for w in statement.warnings if w.startswith("Weak: the likelihood ratio e^epsilon is ")
    ]
    assert len(ratio) == weak
    if weak:
        assert float(re.search(r"is (\S+),", ratio[0]).group(1)) >= math.exp(epsilon)


def test_an_astronomic_epsilon_is_stated_without_overflow():
    statement = stated(Full(1000), event=clipped_gaussian(0.05))
    assert 700 < statement.figures.epsilon < math.inf
    assert "e^epsilon is more than 1e304" in statement.warnings[0]
    assert "wins at most 100 % of the time" in section(statement, "In short")
    assert "k = 2: none; k = 10: none" in section(statement, "What is protected")


@pytest.mark.parametrize(("delta", "warned"), [(1e-3, True), (0.5, True), (0.99e-3, False)])
def test_a_delta_of_one_over_n_is_called_too_large(delta, warned):
    warnings = stated(delta=delta).warnings
    assert [
        w.startswith(f"delta = {rounded_up(delta)} is not below 1/n (n = 1000)")
        for w in warnings
    ] == [True] * warned


def test_an_unfinished_run_is_stated_with_what_it_will_come_to():
    statement = stated(steps=4, finalized=False)
    (warning,) = statement.warnings
    whole = stated().figures.epsilon
    assert warning.startswith(
        "Not finalized: the figures are for the 4 steps made so far, and steps to come cost more."
    )
    assert f"Final epsilon: at most {rounded_up(whole)} by plan or budget." in warning
    assert statement.figures.planned_epsilon == pytest.approx(whole, rel=1e-12)
    assert "4 steps made of 10 planned; not finalized." in section(
        statement, "How it was computed"
    )
    assert f"Epsilon with all planned steps: {rounded_up(whole)}." in section(
        statement, "How it was computed"
    )


def test_a_run_without_plan_or_budget_has_no_final_epsilon():
    (warning,) = stated(steps=1, planned=None, finalized=False).warnings
    assert "the 1 step made so far" in warning
    assert "Final epsilon: nothing bounds it." in warning


def test_a_budget_bounds_a_run_without_plan():
    (warning,) = stated(
        planned=None, finalized=False, budget=Budget(3.0, DELTA, "replace_one")
    ).warnings
    assert "Final epsilon: at most 3 by plan or budget." in warning
    # at a smaller delta the budget says nothing, at a larger one it still holds
    warnings = stated(
        planned=None, finalized=False, delta=DELTA / 2, budget=Budget(3.0, DELTA, "replace_one")
    ).warnings
    assert any("Final epsilon: nothing bounds it." in warning for warning in warnings)
    warnings = stated(
        planned=None, finalized=False, delta=DELTA * 2, budget=Budget(3.0, DELTA, "replace_one")
    ).warnings
    assert any("Final epsilon: at most 3 by plan or budget." in warning for warning in warnings)


def test_the_smaller_of_plan_and_budget_bounds_a_run():
    planned = stated(steps=4, finalized=False, budget=Budget(50.0, DELTA, "replace_one"))
    assert (
        f"at most {rounded_up(planned.figures.planned_epsilon)} by plan" in planned.warnings[0]
    )
    tight = stated(
        steps=4, planned=10**5, finalized=False, budget=Budget(1.0, DELTA, "replace_one")
    )
    assert "at most 1 by plan or budget" in tight.warnings[0]


def test_a_run_that_made_all_steps_lacks_only_its_answer():
    assert stated(finalized=False).warnings == (
        "Not finalized: until finalize() the parameters do not hold the answer.",
    )


def test_an_early_stop_is_quoted_by_plan_or_budget():
    (warning,) = stated(steps=4).warnings
    assert warning.startswith(
        "Stopped after 4 of 10 planned steps. Was that decided by looking at private results"
    )
    assert f"Then quote epsilon {rounded_up(stated().figures.epsilon)}." in warning
    assert "By looking at the data in any other way? That is not covered." in warning


def test_steps_that_were_not_declared_hold_only_if_chosen_blindly():
    (warning,) = stated(planned=None).warnings
    assert warning.startswith("The number of steps (10) was not declared in advance.")
    assert "Then no figure here holds." in warning
    warnings = stated(planned=None, budget=Budget(3.0, DELTA, "replace_one")).warnings
    assert "Then quote epsilon 3." in warnings[0]


def test_the_part_of_a_budget_that_is_left_is_not_promised_away():
    spent = stated().figures.epsilon
    left = stated(budget=Budget(3.0, DELTA, "replace_one"))
    assert left.warnings == (
        "The budget (epsilon 3 at delta 1e-05) is not used up. Whoever may still spend the rest on these data must "
        "promise the budget, not the figure above.",
    )
    assert stated(budget=Budget(spent, DELTA, "replace_one")).warnings == ()
    assert "Budget: epsilon 3 at delta 1e-05." in section(left, "How it was computed")


def test_a_budget_that_was_passed_by_what_happened_is_said():
    (warning,) = stated(budget=Budget(0.1, DELTA, "replace_one")).warnings
    assert warning.startswith("The budget (epsilon 0.1 at delta 1e-05) was exceeded")


def test_figures_at_another_delta_are_not_compared_with_the_budget():
    (warning,) = stated(delta=1e-6, budget=Budget(0.1, DELTA, "replace_one")).warnings
    assert (
        warning
        == "The budget is epsilon 0.1 at delta 1e-05: figures at another delta cannot be compared with it."
    )


def test_the_budget_gives_the_default_delta():
    assert stated(delta=None, budget=Budget(3.0, 1e-7, "replace_one")).figures.delta == 1e-7


# -- figures ----------------------------------------------------------------------------------------------------------


def figures(statement: Statement) -> dict[str, float]:
    """Reads every claimed figure back from the text."""
    text = " ".join(str(statement).split())
    number = r"([\d.e+-]+?)"
    patterns = {
        "epsilon": rf"\({number}, {number}\)-diff",
        "odds": rf"at most e\^epsilon \({number}\)",
        "twice": rf"2 e\^epsilon \({number}\)",
        "two_delta": rf"2 delta \({number}\)",
        "percent": rf"wins at most {number} %",
        "verdict": rf"Epsilon is {number}:",
        "pair": rf"k = 2: \({number}, {number}\)",
        "ten": rf"k = 10: \({number}, {number}\)",
    }
    found = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    return {
        f"{name}{i}": float(v)
        for name, match in found.items()
        if match
        for i, v in enumerate(match.groups())
    }


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.floats(1.0, 200.0), st.floats(1e-12, 1e-2), st.sampled_from(ADJACENCIES))
def test_no_figure_of_the_text_is_rounded_down(noise, delta, adjacency):
    statement = stated(Full(10), event=clipped_gaussian(noise), delta=delta, adjacency=adjacency)
    shown, spent = figures(statement), mpmath.mpf(statement.figures.epsilon)
    with mpmath.workdps(40):
        mu = mpmath.sqrt(10) * (2 if adjacency == REPLACE_ONE else 1) / mpmath.mpf(noise)
        exact = {
            "epsilon0": spent,
            "epsilon1": mpmath.mpf(delta),
            "odds0": mpmath.exp(spent),
            "twice0": 2 * mpmath.exp(spent),
            "two_delta0": 2 * mpmath.mpf(delta),
            "verdict0": spent,
            "percent0": 50 + 50 * mpmath.erf(mu / mpmath.sqrt(8)),
            "pair0": 2 * spent,
            "pair1": 2 * mpmath.exp(spent) * mpmath.mpf(delta),
            "ten0": 10 * spent,
            "ten1": 10 * mpmath.exp(9 * spent) * mpmath.mpf(delta),
        }
        assert shown.keys() >= {
            "epsilon0",
            "epsilon1",
            "odds0",
            "twice0",
            "two_delta0",
            "percent0",
            "verdict0",
        }
        for name, value in shown.items():
            assert exact[name] <= value <= exact[name] * 1.0025, name
        for name, epsilon in statement.figures.epsilons.items():
            for form in forms(statement)[:2]:
                pattern = (
                    rf"epsilon (\S+) under {name} "
                    if form.startswith(("(", "WEAK"))
                    else rf"{name}.* \| (\S+) \| \S+ \|\n"
                )
                assert epsilon <= float(re.search(pattern, form).group(1)) <= epsilon * 1.0011


@given(st.floats(0.05, 8.0), st.floats(0.0, 20.0), st.floats(0.01, 5.0))
def test_the_odds_of_the_truth_rarely_pass_twice_the_factor(mu, epsilon, log_factor):
    """P(log-odds > epsilon + t) <= delta / (1 - e^-t), which is 2 delta at t = log 2, on the exact Gaussian pair."""
    with mpmath.workdps(30):
        delta = mpmath.ncdf(mu / 2 - epsilon / mpmath.mpf(mu)) - mpmath.exp(
            epsilon
        ) * mpmath.ncdf(-mu / 2 - epsilon / mpmath.mpf(mu))
        for t in (mpmath.log(2), mpmath.mpf(log_factor)):
            # under the true world the log-odds are N(mu^2/2, mu^2)
            passed = mpmath.ncdf((mpmath.mpf(mu) ** 2 / 2 - epsilon - t) / mu)
            assert passed <= delta / (1 - mpmath.exp(-t))


# -- forms ------------------------------------------------------------------------------------------------------------

SAMPLES = [
    {},
    {"steps": 4, "finalized": False},
    {"event": NonPrivate()},
    {"design": Undeclared(64)},
    {"design": Shuffled(64, 1000), "budget": Budget(0.01, DELTA, "replace_one")},
    {"adjacency": ADD_REMOVE, "unit": "user", "planned": None},
]


@pytest.mark.parametrize("settings", SAMPLES)
def test_text_markdown_and_json_hold_the_same_sentences(settings):
    statement = stated(**settings)
    text, card, facts = forms(statement)
    for sentence in (
        statement.headline,
        *statement.warnings,
        *(s for _, group in statement.sections for s in group),
    ):
        assert sentence in text
        assert sentence in card
        assert json.dumps(sentence) in facts
    assert statement._repr_markdown_() == card


@pytest.mark.parametrize("settings", SAMPLES)
def test_the_json_reads_back_with_exact_figures(settings):
    statement = stated(**settings)
    facts = json.loads(statement.json())
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["schema"], facts["schema_version"]) == ("torch_dpsco.privacy_statement", 1)
    report = statement.figures
    assert {
        name: float(epsilon) for name, epsilon in facts["epsilons"].items()
    } == report.epsilons
    guarantee = facts["guarantee"]
    assert (float(guarantee["epsilon"]), guarantee["delta"]) == (report.epsilon, report.delta)
    assert guarantee["holds"] == math.isfinite(report.epsilon)
    assert guarantee["advantage"] == report.advantage
    assert facts["run"]["steps"] == statement.run.steps
    assert facts["library"] == {"name": "torch_dpsco", "version": dp.__version__}
    assert (facts["budget"] is None) == (report.budget is None)
    assert facts["design"]["type"] == type(statement.run.design).__name__
    assert facts["design"]["n"] == (
        None if isinstance(statement.run.design, Undeclared) else 1000
    )


def test_infinity_is_a_string_in_json_because_json_has_none():
    text = stated(event=NonPrivate()).json()
    assert "Infinity" not in text
    assert "NaN" not in text
    facts = json.loads(text)
    assert facts["guarantee"]["epsilon"] == facts["epsilons"]["add_remove"] == "inf"


@pytest.mark.parametrize(("design", "adjacency"), CELLS, ids=named)
def test_the_charges_in_json_are_those_of_the_ledger(design, adjacency):
    statement = stated(design, adjacency=adjacency)
    charges = json.loads(statement.json())["charges"]
    assert [c["event"]["type"] for c in charges] == [
        type(c.event).__name__ for c in statement.figures.charges
    ]
    positional = isinstance(design, (Shuffled, Disjoint))
    assert [(c["count"], c["passes"], c["parts"]) for c in charges] == (
        [(1, 1, 10)] if positional else [(10, 0, 0)]
    )
    noise = charges[0]["event"].get("sigma", charges[0]["event"].get("noise_multiplier"))
    assert noise == 5.0


def test_the_card_is_a_table_with_a_row_for_each_adjacency():
    rows = [
        line
        for line in stated(adjacency=ADD_REMOVE).markdown().splitlines()
        if line.startswith("|")
    ]
    assert rows[:2] == ["| adjacency | two worlds | epsilon | delta |", "|---|---|---|---|"]
    assert [row.count("|") for row in rows] == [5] * 5
    assert [row.split("|")[1].strip() for row in rows[2:]] == [
        *(
            "add_remove (the guarantee)",
            "zero_out (for information)",
            "replace_one (for information)",
        )
    ]
    only = [
        line
        for line in stated(Fixed(64, 1000)).markdown().splitlines()
        if line.startswith("| add_remove")
    ]
    assert only == []


@pytest.mark.parametrize("settings", SAMPLES)
def test_lines_of_the_text_fit_a_page(settings):
    assert max(map(len, str(stated(**settings)).splitlines())) <= 100


def test_a_statement_cannot_be_changed():
    statement = stated()
    with pytest.raises(dataclasses.FrozenInstanceError):
        statement.headline = "(0, 0)-differential privacy"


def test_runs_that_share_an_accountant_are_stated_together():
    accountant = Accountant()
    first = stated(accountant=accountant)
    second = stated(Full(1000), accountant=accountant, event=clipped_gaussian(7.0))
    assert second.figures.epsilon > first.figures.epsilon
    assert len(second.figures.charges) == 2
    assert section(second, "How it was computed").count("Charged: ") == 2


# -- what must never be in it -----------------------------------------------------------------------------------------


def fitted(size: int, seed: int, adjacency: str) -> dp.HolderSGD:
    """Returns an optimizer after 8 private steps on data of that size."""
    data = torch.Generator().manual_seed(seed)
    x = torch.nn.functional.normalize(torch.randn(size, 3, generator=data)) * torch.rand(
        size, 1, generator=data
    )
    y = (torch.rand(size, 1, generator=data) < 0.5).float()
    model = dp.attach(torch.nn.Linear(3, 1))
    budget = dp.Budget(1.0, 1e-5, adjacency=adjacency)
    optimizer = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            lr=0.5,
            problem=dp.losses.Logistic().problem(bound_x=1.5),
            budget=budget,
            noise_multiplier=12.0,
            n=1000,
            batch_size=100,
            steps=8,
        ),
        accountant=dp.Accountant(budget),
    )
    loader = optimizer.loader(torch.utils.data.TensorDataset(x, y), steps=8)
    with optimizer:
        for features, labels in loader:
            optimizer.zero_grad()
            dp.losses.Logistic()(model(features), labels).backward()
            optimizer.step()
    return optimizer


def test_no_private_number_appears(monkeypatch):
    """Two data sets that differ in size and in every record give the same statement, byte for byte."""
    monkeypatch.setattr(
        secrets, "token_hex", lambda size: "00" * size
    )  # names of ledgers are random
    one, other = (
        fitted(size, seed, ADD_REMOVE).report() for size, seed in ((937, 1), (1063, 2))
    )
    assert forms(one) == forms(other)
    assert one == other
    assert not any(re.search(r"(?<![\d.])(937|1063)(?!\d)", form) for form in forms(one))
    assert "n = 1000 used here is a public reference" in forms(one)[0]


def test_the_statement_of_a_real_run_is_that_of_its_ledger():
    optimizer = fitted(1000, 3, REPLACE_ONE)
    statement = optimizer.report()
    assert (
        statement.figures.epsilon
        == optimizer.report().epsilon
        == statement.figures.planned_epsilon
    )
    assert f"Charged: 8 x {PoissonGaussian(12.0, 0.1)}." in section(
        statement, "How it was computed"
    )
    assert "HolderSGD: 8 steps made of 8 planned; finalized." in section(
        statement, "How it was computed"
    )
    assert all(
        w.startswith("The budget (epsilon 1 at delta 1e-05) is not used up")
        for w in statement.warnings
    )
