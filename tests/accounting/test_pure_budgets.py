"""delta = 0: questions, budgets and statements where only pure epsilons count."""

from __future__ import annotations

import itertools
import json
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accounting.ledgers import image, refusal
from torch_dpsco.accounting import calibrate
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget, make_filter
from torch_dpsco.accounting.designs import Full, Undeclared
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    GDP,
    REPLACE_ONE,
    ZCDP,
    ZERO_OUT,
    AboveThreshold,
    ApproxDP,
    Event,
    Failure,
    Gaussian,
    KNorm,
    Laplace,
    NonPrivate,
    Parallel,
    PoissonGaussian,
    Pure,
    RDPCurve,
    Repeat,
    Sequential,
    WORGaussian,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.accounting.report import OneRelease, Run, group_guarantee
from torch_dpsco.accounting.statement import Statement, make_statement
from torch_dpsco.errors import AdjacencyError, BudgetExceeded, InfeasibleError

SLACK = Fraction(1, 2**50)  # relative: what rounded parts of a target may come to above it
GAUSSIAN = Gaussian(1e9, dict.fromkeys(ADJACENCIES, 1.0))
IMPURE: list[Event] = [
    GAUSSIAN,
    Gaussian(1.0, {REPLACE_ONE: 0.0}, failure=1e-9),
    PoissonGaussian(100.0, 1e-6),
    WORGaussian(100.0, 1, 10**6),
    ApproxDP(0.1, 1e-12),
    ZCDP(0.1, 1e-12),
    ZCDP(1e-6),
    GDP(1e-6),
    RDPCurve((2.0,), (0.1,)),
    Failure(1e-12),
    Failure(1e-12, "transcript"),
    NonPrivate(),
    Laplace(0.0, {REPLACE_ONE: 1.0}),
    AboveThreshold(0.0, 1.0, {REPLACE_ONE: 1.0}),
]
PURE: list[tuple[Event, float]] = [
    (Pure(0.3), 0.3),
    (KNorm(0.3, 7), 0.3),
    (Laplace(4.0, {REPLACE_ONE: 2.0}), 0.5),
    (ApproxDP(0.3, 0.0), 0.3),
    (Failure(0.0), 0.0),
    (Gaussian(1.0, {REPLACE_ONE: 0.0}), 0.0),
    (PoissonGaussian(1.0, 0.0), 0.0),
    (Repeat(Pure(0.25), 3), 0.75),
    (Sequential((Pure(0.25), KNorm(0.5, 2))), 0.75),
    (Repeat(GAUSSIAN, 0), 0.0),
    (Pure(1e200), 1e200),
]
names = st.sampled_from(["a", "b", "c"])
epsilons = st.one_of(st.floats(0.0, 2.0), st.sampled_from([0.1, 0.2, 0.3, 1 / 3, 1e-300]))
# (partition, part, epsilon, count); the empty partition is the whole data set
charges = st.lists(
    st.tuples(st.sampled_from(["", "p", "q"]), names, epsilons, st.integers(0, 10**6)),
    max_size=8,
)


def placed(partition: str, part: str, event: Event) -> Event:
    return Parallel({part: [event]}, partition) if partition else event


def plain_sum(rows: list[tuple[str, str, float, int]]) -> Fraction:
    """The exact sum by hand: parts of a partition by their largest, all else added."""
    total = Fraction()
    for partition in {row[0] for row in rows}:
        sums: dict[str, Fraction] = {}
        for _, part, epsilon, count in (row for row in rows if row[0] == partition):
            part = part if partition else ""
            sums[part] = sums.get(part, Fraction()) + count * Fraction(epsilon)
        total += max(sums.values())
    return total


# -- questions --------------------------------------------------------------------------------------------------------


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(("event", "epsilon"), PURE, ids=repr)
def test_a_question_at_delta_0_has_the_pure_epsilon_as_its_answer(event, epsilon):
    ledger = Ledger([event])
    answer = ledger.evaluate(0.0, REPLACE_ONE)
    assert (answer.epsilon, answer.method) == (epsilon, "pure")
    assert (
        ledger.evaluate(0, REPLACE_ONE, "pure") == ledger.evaluate(-0.0, REPLACE_ONE) == answer
    )
    accountant = Accountant(adjacency=REPLACE_ONE)
    accountant.authorize(event)
    assert accountant.get_epsilon(torch.zeros(())) == epsilon
    assert accountant.report(0.0).epsilon == epsilon
    assert not math.copysign(1.0, accountant.report(-0.0).delta) < 0


def test_a_sparse_vector_run_counts_with_its_pure_epsilon():
    # 1/4 for the threshold and 2/8 for the queries, which above_threshold_epsilon rounds up
    run = Ledger([AboveThreshold(4.0, 8.0, {REPLACE_ONE: 1.0}), Pure(0.5)])
    assert 1.0 <= run.epsilon(0.0, REPLACE_ONE) <= 1.0 + 1e-14


def test_nothing_costs_nothing_at_delta_0():
    assert Accountant().get_epsilon(0.0) == 0.0
    assert Accountant(Budget(1.0, 0.0, "replace_one")).report().epsilon == 0.0
    assert Accountant(Budget(1.0, 0.0, "replace_one")).get_delta(0.0) == 0.0


@pytest.mark.parametrize("event", IMPURE, ids=repr)
def test_what_has_no_pure_epsilon_is_named(event):
    ledger = Ledger([Pure(0.1), event, Pure(0.2)])
    with pytest.raises(InfeasibleError) as caught:
        ledger.epsilon(0.0, REPLACE_ONE)
    assert str(caught.value).startswith(
        f"delta must be > 0 (got 0.0): {event} has no finite pure epsilon"
    )
    assert "give delta > 0" in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert ledger.pure(REPLACE_ONE) == math.inf


@pytest.mark.slow
@given(charges)
@settings(max_examples=150, deadline=None)
def test_a_ledger_of_pure_events_costs_the_plain_sum_rounded_once(rows):
    ledger = Ledger()
    for partition, part, epsilon, count in rows:
        ledger.add(placed(partition, part, Pure(epsilon)), count)
    exact = plain_sum([row for row in rows if row[3]])
    assert ledger.epsilon(0.0, REPLACE_ONE) == float(exact)
    assert ledger.epsilon(0.0, REPLACE_ONE) == pytest.approx(
        ledger.cost(REPLACE_ONE).pure, rel=1e-12
    )
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))).epsilon(
        0.0, REPLACE_ONE
    ) == float(exact)
    assert ledger.delta(float(exact) * (1 + 1e-12), REPLACE_ONE) == 0.0


def test_a_sum_of_pure_epsilons_has_no_rounding_of_its_own():
    events = [Pure(2.0**-60 * (1 + k * 2.0**-52)) for k in range(2000)]
    exact = sum((Fraction(event.eps) for event in events), Fraction(1))
    assert Ledger([Pure(1.0), *events]).epsilon(0.0, REPLACE_ONE) == float(exact) > 1.0
    assert Ledger([Repeat(Pure(1e300), 10**9)]).epsilon(0.0, REPLACE_ONE) == math.inf


@pytest.mark.parametrize("method", ["rdp", "pld", "prv"])
def test_no_other_method_answers_at_delta_0(method):
    accountant = Accountant()
    accountant.authorize(Pure(0.5))
    with pytest.raises(
        ValueError, match=rf"method must be 'best' or 'pure' at delta=0 \(got '{method}'\)"
    ):
        accountant.get_epsilon(0.0, method=method)


def test_a_gaussian_among_pure_events_leaves_questions_at_a_delta_above_0_only():
    accountant = Accountant()
    accountant.authorize(Pure(0.5))
    assert accountant.get_epsilon(0.0) == 0.5
    accountant.authorize(GAUSSIAN)
    with pytest.raises(InfeasibleError, match="Gaussian noise"):
        accountant.get_epsilon(0.0)
    with pytest.raises(InfeasibleError, match="Gaussian noise"):
        accountant.report(0.0)
    assert 0 < accountant.get_epsilon(1e-6) < 0.51
    assert 0 < accountant.get_delta(0.5) < 1e-6


# -- adjacency and parts ----------------------------------------------------------------------------------------------


def test_at_delta_0_the_largest_part_counts():
    parts = Parallel({"a": [Pure(0.5), Pure(0.25)], "b": [Pure(0.5)]}, "p")
    ledger = Ledger(
        [Pure(1.0), parts, Parallel({"b": [Pure(0.5)]}, "p"), Parallel({"x": [Pure(2.0)]}, "q")]
    )
    assert ledger.epsilon(0.0, REPLACE_ONE) == 1.0 + 1.0 + 2.0
    assert ledger.evaluate(0.0, ZERO_OUT, extra=parts, count=2).epsilon == 1.0 + 2.25 + 2.0
    with pytest.raises(
        AdjacencyError, match="parts cut by position have no add_remove guarantee"
    ):
        ledger.epsilon(0.0, ADD_REMOVE)
    keyed = Ledger([Parallel({"a": [Pure(0.5)], "b": [Pure(0.75)]}, "k", "keyed")])
    assert keyed.epsilon(0.0, ADD_REMOVE) == 0.75
    with pytest.raises(AdjacencyError, match="parts by key have no replace_one guarantee"):
        keyed.epsilon(0.0, REPLACE_ONE)


def test_an_event_of_another_adjacency_is_refused_at_delta_0():
    replaced = KNorm(0.5, 3, adjacencies=(REPLACE_ONE,))
    accountant = Accountant(Budget(1.0, 0.0, adjacency=ADD_REMOVE))
    for event in (replaced, Laplace(1.0, {REPLACE_ONE: 0.5})):
        with pytest.raises(AdjacencyError, match=r"under add_remove|for add_remove"):
            accountant.authorize(event)
    assert len(accountant) == 0
    accountant = Accountant(Budget(1.0, 0.0, "replace_one"))
    accountant.authorize(replaced)
    assert accountant.report().epsilons == {REPLACE_ONE: 0.5}


def test_a_report_at_delta_0_leaves_out_adjacencies_without_a_pure_epsilon():
    accountant = Accountant(adjacency=REPLACE_ONE)
    accountant.authorize(Gaussian(1.0, {REPLACE_ONE: 0.0, ZERO_OUT: 1.0}))
    assert accountant.report(0.0).epsilons == {REPLACE_ONE: 0.0}
    assert set(accountant.report(1e-5).epsilons) == {REPLACE_ONE, ZERO_OUT}


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["gdp", "rdp"])
def test_a_mode_that_converts_divergences_needs_a_delta(mode):
    with pytest.raises(
        ValueError, match=rf"delta must be > 0 in mode '{mode}' \(got 0.0\): .*'planned'"
    ):
        Budget(1.0, 0.0, mode=mode)


def test_a_pure_budget_is_a_value():
    budget = Budget(1.0, -0.0, "replace_one")
    assert (
        budget
        == Budget(1, 0, "replace_one")
        == Budget(torch.ones(()), torch.zeros(()), "replace_one")
    )
    assert (
        repr(budget)
        == "Budget(epsilon=1.0, delta=0.0, adjacency='replace_one', unit='example', mode='planned')"
    )
    assert not budget.adaptive


@pytest.mark.parametrize("event", IMPURE, ids=repr)
def test_no_event_without_a_pure_epsilon_fits_a_budget_at_delta_0(event):
    accountant = Accountant(Budget(1e6, 0.0, "replace_one"))
    accountant.authorize(Pure(0.5))
    before = image(accountant)
    for asked in (event, Parallel({"a": [event]}, "p"), Sequential((Pure(0.1), event))):
        assert not accountant.admits(asked)
        assert accountant.max_steps(asked) == 0
        told = refusal(accountant, asked)
        assert f"{event} has no finite pure epsilon (delta = 0 has no Gaussian noise" in told
    assert image(accountant) == before
    accountant.authorize(Repeat(event, 0))  # nothing


def test_a_budget_at_delta_0_ends_where_the_sum_would_pass_it():
    accountant = Accountant(Budget(1.0, 0.0, "replace_one"))
    assert accountant.max_steps(Pure(0.1)) == 10
    for _ in range(10):
        accountant.authorize(Pure(0.1))
    assert accountant.get_epsilon(0.0) == accountant.report().epsilon == 1.0
    told = refusal(accountant, Pure(1e-3))
    assert "would bring epsilon to 1.00101, past the budget of 1 (epsilon 1 at delta 0" in told
    assert "room for 0 more" in told
    accountant.authorize(Pure(0.0), 7)
    assert len(accountant) == 17


def test_the_slack_of_a_pure_sum_is_4_units_in_the_last_place():
    run = make_filter(Budget(1.0, 0.0, "replace_one"))
    assert run.admits(Ledger(), Pure(1.0 + 2.0**-50))
    assert not run.admits(Ledger(), Pure(1.0 + 2.0**-50 + 2.0**-52))
    # however many rounded parts: no slack of its own for each
    spent = Ledger([Pure(1.0), *(Pure(k * 2.0**-55) for k in (1, 2, 4, 8, 16))])
    assert run.admits(spent)
    assert not run.admits(spent, Pure(2.0**-51))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("target", "parts"), [(0.3, (0.1, 0.2)), (0.6, (0.2, 0.4)), (0.7, (0.15, 0.55))]
)
def test_parts_of_a_target_fit_it_and_are_quoted_as_the_target(target, parts):
    accountant = Accountant(Budget(target, 0.0, "replace_one"))
    for part in parts:
        accountant.authorize(KNorm(part, 3))
    assert accountant.ledger.epsilon(0.0, REPLACE_ONE) > target
    assert accountant.get_epsilon(0.0) == target
    report = accountant.report()
    assert set(report.epsilons.values()) <= {target, accountant.ledger.epsilon(0.0, REPLACE_ONE)}
    assert report.epsilon == target
    run = Run("Sgd", Full(100), KNorm(0.1, 3), 1, 1, True)
    assert make_statement(report, run).warnings == ()


@pytest.mark.cases(1, 1)
@given(target=st.floats(0.01, 5.0), rows=charges)
@settings(max_examples=60, deadline=None)
def test_a_budget_at_delta_0_admits_exactly_what_fits(target, rows):
    accountant, taken = Accountant(Budget(target, 0.0, "replace_one")), []
    limit = Fraction(target) * (1 + SLACK)
    for partition, part, epsilon, count in rows:
        event, asked = (
            placed(partition, part, Pure(epsilon)),
            plain_sum([*taken, (partition, part, epsilon, count)]),
        )
        try:
            accountant.authorize(event, count)
        except BudgetExceeded:
            assert asked > Fraction(target)
        else:
            taken.append((partition, part, epsilon, count))
            assert asked <= limit * (
                1 + Fraction(1, 2**52)
            )  # the sum and the limit are rounded to floats
    assert accountant.get_epsilon(0.0) <= target


@given(target=st.floats(0.01, 5.0), spent=st.floats(0.0, 2.0), epsilon=st.floats(1e-6, 2.0))
@settings(max_examples=60, deadline=None)
def test_the_number_of_pure_steps_left_is_exact(target, spent, epsilon):
    accountant = Accountant(Budget(target, 0.0, "replace_one"))
    accountant.record(Pure(spent))
    steps = accountant.max_steps(Pure(epsilon))
    assert not accountant.admits(Pure(epsilon), steps + 1)
    if steps:
        assert accountant.admits(Pure(epsilon), steps)
    assert abs(max(0.0, (target - spent) / epsilon) - steps) <= 1 + 1e-6


def test_what_was_recorded_past_a_pure_budget_ends_it():
    accountant = Accountant(Budget(1.0, 0.0, "replace_one"))
    accountant.authorize(Pure(0.25))
    accountant.record(GAUSSIAN)  # truth wins over wishes
    assert f"{GAUSSIAN} has no finite pure epsilon" in refusal(accountant, Pure(0.25))
    assert accountant.max_steps(Pure(0.25)) == 0
    with pytest.raises(InfeasibleError, match="give delta > 0"):
        accountant.report()
    assert 0.2499 < accountant.report(1e-6).epsilon < 0.26
    accountant = Accountant(Budget(1.0, 0.0, "replace_one"))
    accountant.record(Pure(1.5))
    statement = make_statement(accountant.report(), Run("Sgd", Full(100), Pure(1.5), 1, 1, True))
    assert "The budget (epsilon 1 at delta 0) was exceeded" in statement.warnings[0]
    assert accountant.get_epsilon(0.0) == 1.5


def test_the_figures_of_the_page_on_accounting_are_right():
    accountant = Accountant()
    accountant.authorize(KNorm(0.1, 10), 10)
    assert accountant.get_epsilon(0.0) == 1.0
    assert accountant.get_epsilon(1e-6) == pytest.approx(0.411, abs=5e-4)
    more = Accountant(Budget(1.0, 1e-6, "replace_one"))
    assert more.max_steps(KNorm(0.1, 10)) > 20


def test_a_budget_with_a_delta_still_takes_pure_events():
    accountant = Accountant(Budget(1.0, 1e-6, "replace_one"))
    accountant.authorize(KNorm(1.0, 5))
    assert accountant.get_epsilon(0.0) == 1.0 > accountant.get_epsilon(1e-6)


# -- parameters chosen on the way -------------------------------------------------------------------------------------


def worst_ratio(target: float, seed: int, depth: int) -> float:
    """The largest likelihood ratio of a run of randomized responses, each chosen at random from the answers before."""
    rule = random.Random(seed)
    budget = make_filter(Budget(target, 0.0, "replace_one"))

    def ratio(ledger: list[Event], left: int) -> float:
        event = Pure(rule.choice([0.1, 0.3, target / 2, rule.uniform(0.0, target)]))
        if not left or not budget.admits(Ledger(ledger), event):
            return 1.0
        # truth has probability e^eps/(1 + e^eps) on one side, and 1/(1 + e^eps) on the other
        return max(
            math.exp(sign * event.eps) * ratio([*ledger, event], left - 1)
            for sign in (1.0, -1.0)
        )

    return ratio([], depth)


def test_a_run_of_pure_releases_chosen_on_the_way_stays_within_its_target():
    found = [
        worst_ratio(target, seed, 6) / math.exp(target)
        for target in (0.5, 2.0)
        for seed in range(25)
    ]
    assert max(found) <= 1 + 1e-12
    assert max(found) > 0.95  # the bound is reached, so that the test can fail


def test_adaptive_pure_runs_quote_the_target_and_without_a_budget_the_sum():
    accountant = Accountant(Budget(1.0, 0.0, "replace_one"))
    accountant.authorize(Pure(0.25), adaptive=True)
    assert (
        accountant.get_epsilon(0.0)
        == accountant.get_epsilon(1e-5)
        == accountant.report().epsilon
        == 1.0
    )
    assert accountant.report().advantage == pytest.approx(math.tanh(0.5))
    free = Accountant()
    free.authorize(Pure(0.25), 3, adaptive=True)
    assert free.adaptive
    assert free.get_epsilon(0.0) == 0.75
    free.authorize(GAUSSIAN, adaptive=True)
    with pytest.raises(InfeasibleError, match="Gaussian noise"):
        free.get_epsilon(0.0)


# -- what is stored ---------------------------------------------------------------------------------------------------


def test_a_ledger_file_opened_again_knows_what_a_pure_budget_spent(tmp_path):
    budget, path = Budget(1.0, 0.0, "replace_one"), tmp_path / "ledger"
    accountant = Accountant(budget, ledger_path=path)
    accountant.authorize(KNorm(0.3, 5))
    accountant.part("a", partition="p").authorize(Laplace(10.0, {REPLACE_ONE: 1.0}), 4)
    before = image(accountant)
    accountant.close()
    again = Accountant(budget, ledger_path=path)
    assert image(again) == before
    assert again.ledger.epsilon(0.0, REPLACE_ONE) == pytest.approx(0.7, rel=1e-15)
    assert again.max_steps(Pure(0.1)) == 3
    assert "past the budget of 1" in refusal(again, Pure(0.4))
    assert "Gaussian noise" in refusal(again, GAUSSIAN)
    again.close()


def test_a_state_of_pure_events_comes_back_to_the_bit():
    accountant = Accountant(Budget(1.0, 0.0, "replace_one"))
    accountant.authorize(KNorm(1 / 3, 5), 2)
    state = json.loads(json.dumps(accountant.state_dict()))
    again = Accountant(Budget(1.0, 0.0, "replace_one"))
    again.load_state_dict(state)
    assert image(again) == image(accountant)
    assert again.get_epsilon(0.0) == accountant.get_epsilon(0.0) == 2 / 3
    assert again.max_steps(KNorm(1 / 3, 5)) == 1


# -- calibration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: calibrate.noise_multiplier(
            1.0, 0.0, design=Full(10), steps=1, adjacency=REPLACE_ONE
        ),
        lambda: calibrate.design_epsilon(
            1.0, 0.0, design=Full(10), steps=0, adjacency=REPLACE_ONE
        ),
    ],
    ids=["noise_multiplier", "design_epsilon"],
)
def test_no_gaussian_noise_is_calibrated_at_delta_0(call):
    with pytest.raises(ValueError, match=r"delta must be in \(0, 1\) \(got 0.0\)"):
        call()


# -- reports and statements -------------------------------------------------------------------------------------------


def stated(epsilon: float = 1.0, finalized: bool = True) -> Statement:
    accountant = Accountant(Budget(epsilon, 0.0, "replace_one"))
    event = Pure(epsilon)
    if finalized:
        accountant.authorize(event)
    run = OneRelease("OutputPerturbation", Full(100), event, int(finalized), 1, finalized)
    return make_statement(accountant.report(ahead=run.ahead()), run)


def test_a_pure_statement_says_what_holds_and_speaks_of_no_slack():
    statement = stated()
    assert (
        statement.headline
        == "1-differential privacy, pure (delta = 0), for one example (replace_one: replaced by any other)."
    )
    assert statement.warnings == ()
    assert "What delta is" not in dict(statement.sections)
    meaning = " ".join(dict(statement.sections)["What it means"])
    assert "is at most e^epsilon (2.719) times its probability in the other." in meaning
    assert "the odds that they give to a world rise by a factor of at most 2.719." in meaning
    # e / (1 + e) = 0.73106
    assert "wins at most 73.2 % of the time, a coin 50 %." in statement.in_short[0]
    assert "a person with k rows has k epsilon. k = 2: 2; k = 10: 10." in " ".join(
        dict(statement.sections)["What is protected"]
    )
    text = " ".join(str(statement).split())
    for phrase in ("plus delta", "2 delta", "slack", "1/n", "Epsilon and delta", "e^((k-1)"):
        assert phrase not in text
    assert "epsilon 1 at delta 0" in text
    assert "Method: pure" in text
    assert "| 1 | 0 |" in statement.markdown()


def test_a_release_computed_from_all_records_claims_no_batches():
    sampling = " ".join(dict(stated().sections)["How batches are drawn"])
    assert (
        sampling
        == "No sampling: the answer is computed from all examples; 100, their number, is public."
    )


def test_a_pure_statement_is_exact_in_json():
    facts = json.loads(stated(0.5).json())
    assert facts["guarantee"]["delta"] == facts["budget"]["delta"] == 0.0
    assert facts["guarantee"]["epsilon"] == 0.5


def test_a_pure_statement_warns_of_weakness_and_of_what_is_to_come():
    weak = stated(12.0)
    assert weak.headline.startswith("WEAK: 12-differential privacy, pure")
    early = stated(finalized=False)
    assert early.headline.endswith("because nothing was released yet.")
    assert any("Final epsilon: at most 1 by plan or budget" in line for line in early.warnings)
    accountant = Accountant(Budget(1.0, 0.0, "replace_one"))
    accountant.authorize(Pure(1.0))
    undeclared = make_statement(
        accountant.report(), Run("Sgd", Undeclared(8), Pure(1.0), 1, 1, True)
    )
    assert undeclared.warnings == ()  # no delta to compare with 1/n


@given(st.floats(0.0, 50.0), st.integers(1, 1000))
def test_a_group_pays_its_size_times_epsilon_rounded_up(epsilon, size):
    found, delta = group_guarantee(epsilon, 0.0, size)
    assert delta == 0.0
    assert (
        size * Fraction(epsilon)
        <= Fraction(found)
        <= size * Fraction(epsilon) * (1 + Fraction(1, 2**51))
    )


def test_report_lines_at_delta_0_add_up_over_all_pure_kinds():
    accountant = Accountant(Budget(2.0, 0.0, "replace_one"))
    for event, times in itertools.product(
        (Pure(0.25), KNorm(0.25, 2), Laplace(4.0, {REPLACE_ONE: 1.0})), (1, 1)
    ):
        accountant.authorize(event, times)
    assert accountant.report().epsilon == 1.5
    assert str(accountant.report()).startswith("(1.5, 0)-differential privacy, replace_one")
