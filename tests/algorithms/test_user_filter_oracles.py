"""The filtered mean of users: its definition, how far one user moves it, isolation, halting, and what it charges."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import torch_dpsco as dp
from tests.algorithms.users import certain, released, same
from tests.reference.papers.user_level import filtered_mean
from torch_dpsco.accounting.analysis.pure import bad_pass_probability, svt_gaussian_delta
from torch_dpsco.accounting.designs import Draw, Full
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ZERO_OUT,
    Failure,
    NonPrivate,
    Repeat,
)
from torch_dpsco.algorithms.oracles import UserFiltered, weighted_mean
from torch_dpsco.errors import AdjacencyError, SequenceError
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.rows.neighbors import mean_rounding, neighbor_counts, within

FALSE_ALARM = 1e-6
BAD = [math.nan, math.inf, -math.inf, 1e300, -1e308, 1e39]
EDGE = [
    0.0,
    1.0,
    -1.0,
    2.0,
    -2.0,
    0.5,
    5e-324,
    math.nextafter(1.0, 2.0),
    math.nextafter(1.0, 0.0),
    1e3,
    1001.0,
]


def column(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)[:, None]


def literal(rows, tau, filter):
    """The definition in rational arithmetic: (score, mean); rows that are not finite are on their own."""
    n = filter.n_users
    table = [
        [Fraction(v) for v in row] if all(map(math.isfinite, row)) else None
        for row in rows.double().tolist()
    ]

    def count(row, radius):
        if row is None:
            return 1
        return sum(
            o is not None and sum((a - b) ** 2 for a, b in zip(row, o, strict=True)) <= radius**2
            for o in table
        )

    score = Fraction(sum(count(row, Fraction(tau)) for row in table) + n - len(table), n)
    a, radius = Fraction(n + 1, 2), Fraction(tau)
    weights = [
        Fraction(0)
        if row is None
        else min(max((count(row, radius) - a) / (filter.ramp_end - a), Fraction(0)), Fraction(1))
        for row in table
    ]
    if not sum(weights):
        return score, torch.zeros(rows.shape[1], dtype=torch.float64)
    kept = [(w, row) for w, row in zip(weights, table, strict=True) if w]
    mean = [
        float(sum(w * row[i] for w, row in kept) / sum(weights)) for i in range(rows.shape[1])
    ]
    return score, torch.tensor(mean, dtype=torch.float64)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.integers(12, 16), st.integers(1, 3), st.data())
def test_the_answer_is_that_of_the_definition(n, dim, data):
    filter = same(n, n - 1)
    lattice = st.sampled_from([0.0, 0.5, 1.0, -0.5, 0.25, 2.0])
    table = data.draw(
        st.lists(st.lists(lattice, min_size=dim, max_size=dim), min_size=n, max_size=n)
    )
    for place in data.draw(st.lists(st.integers(0, n - 1), max_size=2)):
        table[place][0] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    rows = torch.tensor(table, dtype=torch.float64)
    score, mean = literal(rows, 1.0, filter)
    answer = released(certain(filter), rows)
    assert answer.halted == (score <= filter.score_floor)
    if not answer.halted:
        torch.testing.assert_close(answer.mean[0], mean, rtol=1e-13, atol=1e-15)


def test_several_rows_of_a_user_are_averaged_over_physical_batches_and_places():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(60, 3, generator=generator, dtype=torch.float64) / 10
    users = torch.randint(8, (60,), generator=generator)
    means = torch.stack([rows[users == user].mean(0) for user in range(8)])
    expected = released(certain(same(8)), means).mean[0]
    whole = released(certain(same(8)), rows, users).mean[0]
    torch.testing.assert_close(whole, expected)
    split = released(certain(same(8)), rows, users, splits=(1, 20, 20, 59)).mean[0]
    torch.testing.assert_close(split, whole, rtol=1e-14, atol=1e-16)
    order = torch.randperm(60, generator=generator)
    torch.testing.assert_close(
        released(certain(same(8)), rows[order], users[order]).mean[0], expected
    )
    names = torch.randperm(8, generator=generator)
    torch.testing.assert_close(released(certain(same(8)), rows, names[users]).mean[0], expected)


# -- sensitivity ------------------------------------------------------------------------------------------------------


def moved(filter, first, second, tau=1.0, threshold=None, **others):
    """Returns the distance of two answers over the declared sensitivity; None unless both pass."""
    oracles = [certain(filter, tau, threshold=threshold, **others) for _ in range(2)]
    answers = [
        released(oracle, rows) for oracle, rows in zip(oracles, (first, second), strict=True)
    ]
    if any(answer.halted for answer in answers):
        return None
    distance = float(
        torch.linalg.vector_norm(answers[0].mean[0].double() - answers[1].mean[0].double())
    )
    return distance / oracles[0].sensitivity(REPLACE_ONE)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(12, 18), st.integers(1, 3), st.data())
def test_no_user_moves_the_mean_past_the_sensitivity(n, dim, data):
    filter = same(n, data.draw(st.integers(n - 2, n - 1)))
    near = st.sampled_from([0.0, 0.5, 1.0, -0.5, -1.0, 1.5, 2.0, 0.25])
    table = data.draw(
        st.lists(st.lists(near, min_size=dim, max_size=dim), min_size=n, max_size=n)
    )
    rows = torch.tensor(table, dtype=torch.float64)
    one, other = rows.clone(), rows.clone()
    for changed in (one, other):
        changed[0] = torch.tensor(
            data.draw(st.lists(st.sampled_from(EDGE + BAD), min_size=dim, max_size=dim))
        )
    ratio = moved(filter, one, other)
    assert ratio is None or ratio <= 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_bound_of_equal_radii_is_nearly_reached(dtype):
    # all others at 0; one user at exactly tau on one side, then on the other: 2 tau / n
    n = 200
    rows = torch.zeros(n, 1, dtype=dtype)
    one, other = rows.clone(), rows.clone()
    one[0], other[0] = 1, -1
    ratio = moved(same(n, n - 0.5, 150), one, other)
    assert 0.95 < ratio <= 1.0


@pytest.mark.cases(36, 18)
@pytest.mark.parametrize("value", [*EDGE, *BAD])
@pytest.mark.parametrize("other", [*EDGE, *BAD])
def test_one_user_moves_the_score_by_at_most_its_sensitivity(value, other):
    # the test is free of noise: find the score by asking at both sides of the bound
    n, rest = 12, [0.0] * 6 + [1.0] * 3 + [-1.0] * 2

    def score(first):
        rows = column(first, *rest)
        joined = within(rows, 1e3)
        return Fraction(int(neighbor_counts(rows, 1.0, joined).sum()), n)

    low, high = sorted((score(value), score(other)))
    assert high - low <= Fraction(2 * (n - 1), n)
    event = certain(same(n), noise_std=1.0).event().events[0]
    assert event.sensitivity(REPLACE_ONE) >= Fraction(2 * (n - 1), n)


def test_the_score_sensitivity_is_reached_by_an_isolated_user():
    n = 12

    def passes(first, threshold):
        return not released(
            certain(same(n, 9.5, 9), threshold=threshold), column(first, *[0.0] * (n - 1))
        ).halted

    full, low = n, Fraction((n - 1) ** 2 + 1, n)
    assert full - low == Fraction(2 * (n - 1), n)
    for value in BAD:
        assert passes(0.0, 11.9)
        assert not passes(value, float(low) + 1e-6)
        assert passes(value, float(low) - 1e-6)


def test_a_user_without_rows_counts_itself_in_the_score():
    n, rows = 12, torch.zeros(11, 1)
    exact = (11 * 11 + 1) / n
    for threshold, halts in ((exact - 1e-6, False), (exact + 1e-6, True)):
        assert released(certain(same(n, 9.5, 9), threshold=threshold), rows).halted is halts


# -- isolation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [*BAD, 1001.0])
def test_isolated_users_count_themselves_and_nobody_else(value):
    n = 10
    good = [0.0, 0.25, 0.5, 0.25, 0.0, 0.25, 0.5, 0.25, 0.25]
    expected = released(certain(same(n, 8.0, 7)), column(*good), torch.arange(1, n)).mean[
        0
    ]  # user 0 has no rows
    assert torch.equal(
        released(certain(same(n, 8.0, 7)), column(*good, value)).mean[0], expected
    )
    few = certain(same(n, 8.0, 7), min_items=2)
    twice = torch.tensor([*good, *good, 0.25], dtype=torch.float64)[
        :, None
    ]  # the last one has a single row
    users = torch.tensor([*range(9), *range(9), 9])
    torch.testing.assert_close(released(few, twice, users).mean[0], expected)


def test_non_finite_users_never_reach_the_mean():
    rows = torch.full((50, 4), 0.25)
    rows[7, 2], rows[9] = math.nan, math.inf
    assert released(certain(same(50, 40.0, 35)), rows).mean[0].tolist() == [0.25] * 4


def test_everybody_isolated_halts_without_an_error():
    for rows in (
        torch.full((8, 2), math.nan),
        torch.zeros(0, 2),
        10.0 * torch.arange(8.0)[:, None],
    ):
        answer = released(certain(same(8)), rows, torch.arange(len(rows)))
        assert answer.halted
        assert answer.still
        assert not torch.cat(answer.mean).any()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**31))
def test_the_error_of_the_weighted_mean_is_within_its_bound(n, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = 1e3 + torch.rand(n, 1, dtype=torch.float64, generator=generator)
    weights = torch.rand(n, dtype=torch.float64, generator=generator)
    exact = sum(
        Fraction(w) * Fraction(x)
        for w, x in zip(weights.tolist(), rows[:, 0].tolist(), strict=True)
    )
    exact /= sum(map(Fraction, weights.tolist()))
    error = abs(Fraction(weighted_mean(rows, weights).item()) - exact)
    assert error <= Fraction(mean_rounding(n, 1.0, 1001.0)) / 2


# -- the test, halting and the phase ----------------------------------------------------------------------------------


def test_after_a_halt_nothing_is_read_or_released():
    oracle, generator = (
        certain(same(8), noise_std=1.0, steps=5),
        torch.Generator().manual_seed(0),
    )
    released(oracle, 5.0 * torch.arange(8.0)[:, None])
    assert oracle.halted
    before = generator.get_state()
    oracle.open([torch.zeros(1)])
    oracle.observe(GradBatch([DenseBlock(torch.zeros(8, 1))]), users=None)  # not looked at
    answer = oracle.release(generator)
    assert (answer.halted, answer.still, answer.mean[0].item()) == (True, True, 0.0)
    assert torch.equal(generator.get_state(), before)


def test_more_steps_than_planned_are_refused():
    oracle = certain(same(8), steps=2)
    for _ in range(2):
        assert not released(oracle, torch.zeros(8, 1)).halted
    with pytest.raises(SequenceError, match="all 2 planned"):
        released(oracle, torch.zeros(8, 1))


def test_the_phase_is_charged_for_what_is_drawn():
    filter, tau, std = same(100, 90.0, 74), 0.5, 0.01
    numbers = {"threshold": 95.0, "threshold_scale": 0.3, "query_scale": 0.4, "steps": 7}
    filter = replace(filter, pair_radius=tau, noise_std=std, **numbers)
    oracle = UserFiltered(filter)
    test, mean, failure = oracle.event().events
    assert (test.b_threshold, test.b_query, test.sensitivity(REPLACE_ONE)) == (
        0.3,
        0.4,
        pytest.approx(1.98),
    )
    assert isinstance(mean, Repeat)
    assert mean.n == 7
    assert mean.event.sigma == pytest.approx(std / filter.sensitivity, rel=1e-15)
    assert isinstance(failure, Failure)
    assert failure.kind == "transcript"
    assert failure.probability == pytest.approx(bad_pass_probability(5.0, 7, 0.3, 0.4), rel=1e-8)
    oracle.open([torch.zeros(1000)])
    assert std <= oracle.noise_std <= std * (1 + 1e-7)
    assert oracle.noise_std / oracle.sensitivity(REPLACE_ONE) == pytest.approx(
        mean.event.sigma, rel=1e-15
    )


def test_the_ledger_covers_the_proved_delta():
    filter = same(1000, 850.0, 750)
    numbers = {"threshold": 985.0, "threshold_scale": 2.0, "query_scale": 4.0, "steps": 50}
    oracle = UserFiltered(replace(filter, noise_std=0.5, **numbers))
    accountant = dp.Accountant(unit="user", adjacency=REPLACE_ONE)
    accountant.record(oracle.event())
    delta = 1e-4
    epsilon = accountant.get_epsilon(delta)
    mu = math.sqrt(50) * filter.sensitivity / 0.5
    test = 1.998 / 2.0 + 2 * 1.998 / 4.0
    assert svt_gaussian_delta(epsilon, test, mu) + oracle.bad_pass <= delta * (1 + 1e-9)


def test_a_halt_earns_no_refund():
    oracle = certain(same(8), noise_std=1.0, steps=9)
    whole = oracle.event()
    assert [type(part).__name__ for part in whole.events] == [
        "AboveThreshold",
        "Repeat",
        "Failure",
    ]
    assert whole.events[1].n == 9
    assert oracle.charge(Full(8), Draw(8)) == (whole, 9, False)
    assert not released(oracle, torch.zeros(8, 1)).halted
    released(oracle, 5.0 * torch.arange(8.0)[:, None])
    assert oracle.halted
    assert oracle.event() == whole


def test_a_copy_has_no_threshold_and_a_resumed_run_has_its_own():
    oracle = certain(same(8), noise_std=1.0, steps=9)
    released(oracle, torch.zeros(8, 1))
    assert copy.deepcopy(oracle).state()["threshold_noise"] is None
    resumed = certain(same(8), noise_std=1.0, steps=9)
    resumed.restore(oracle.state())
    assert resumed.state() == oracle.state()
    assert oracle.state()["confidential"]
    released(oracle, torch.zeros(8, 1))
    with pytest.raises(SequenceError, match="later one of this run"):
        oracle.restore(resumed.state())


@pytest.mark.parametrize("adjacency", [ADD_REMOVE, ZERO_OUT])
def test_the_filter_is_charged_under_replace_one_only(adjacency):
    oracle = certain(same(8), noise_std=1.0)
    oracle.open([torch.zeros(1)])
    with pytest.raises(AdjacencyError):
        oracle.sensitivity(adjacency)
    with pytest.raises(AdjacencyError):
        dp.Accountant(unit="user", adjacency=adjacency).ledger.cost(
            adjacency, extra=oracle.event()
        )


@pytest.mark.parametrize("factor", [1.0, 0.5, 1.05])
def test_halved_noise_of_the_filtered_mean_is_caught(factor, monkeypatch):
    declared = certain(same(8), noise_std=0.3)
    if factor != 1.0:
        right = UserFiltered.noise_std.fget
        monkeypatch.setattr(
            UserFiltered, "noise_std", property(lambda self: factor * right(self))
        )
    rows = torch.zeros(8, 20_000)
    noise = released(declared, rows).mean[0]
    std = (
        declared.event().events[1].event.sigma * declared.filter.sensitivity
    )  # what the ledger was told
    statistic = float((noise.double() / std).square().sum())
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], noise.numel())
    assert bool(low <= statistic <= high) is (factor == 1.0)


def test_without_noise_nothing_is_promised():
    assert certain(same(8)).event().events == (NonPrivate(),)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "make"),
    [
        ("pair_radius must be", lambda: certain(same(8), 0.0)),
        ("pair_radius must be", lambda: certain(same(8), math.inf)),
        ("noise_std must be", lambda: certain(same(8), noise_std=-1.0)),
        ("steps must be", lambda: certain(same(8), steps=0)),
        ("min_items must be", lambda: certain(same(8), min_items=0)),
        ("n must be >= 4", lambda: same(3, 2.9, 2)),
        ("ramp_end must be", lambda: same(8, 7.0, 8)),
        ("ramp_end must be", lambda: same(8, 7.0, 4)),
        ("ramp_end must be", lambda: same(8, 7.0, 5.5)),
        ("score_floor must be larger", lambda: same(100, 51.5, 51)),
        ("score_floor <= n", lambda: same(8, 9.0, 6)),
        ("threshold must be > score_floor", lambda: certain(same(8), threshold=7.0)),
        ("threshold must be", lambda: certain(same(8), threshold=math.nan)),
    ],
)
def test_numbers_without_a_proof_are_refused(word, make):
    with pytest.raises(ValueError, match=word):
        make()


def test_the_pure_function_agrees_with_the_oracle():
    rows = torch.rand(30, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = filtered_mean(rows, 1.0, 15.5, 20)
    answer = released(certain(same(30, 21.0, 20)), rows)
    assert found["score"] > 21.0
    torch.testing.assert_close(found["mean"], answer.mean[0])
