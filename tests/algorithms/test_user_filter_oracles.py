"""The filtered mean of users: its definition, how far one user moves it, isolation, halting, and what it charges."""

from __future__ import annotations

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import torch_dpsco as dp
from tests.algorithms.users import certain, observe, released, same, two
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
from torch_dpsco.algorithms.user_filter_oracles import UserFilter, UserFiltered, weighted_mean
from torch_dpsco.errors import AdjacencyError, ConditionError, SequenceError
from torch_dpsco.rows import DenseBlock, GradBatch, Points, mean_rounding, neighbor_counts

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
    a, radius = Fraction(n + 1, 2), Fraction(tau) * (1 if filter.kind == "same" else 2)
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
@given(st.sampled_from([same, two]), st.integers(12, 16), st.integers(1, 3), st.data())
def test_the_answer_is_that_of_the_definition(kind, n, dim, data):
    filter = kind(n, n - 1)
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
@given(st.sampled_from([same, two]), st.integers(12, 18), st.integers(1, 3), st.data())
def test_no_user_moves_the_mean_past_the_sensitivity(kind, n, dim, data):
    filter = kind(n, data.draw(st.integers(n - 2, n - 1)))
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
@pytest.mark.parametrize("offset", [0.0, 64.0])
def test_the_bound_of_equal_radii_is_nearly_reached(dtype, offset):
    # all others at 0; one user at exactly tau on one side, then on the other: 2 tau / n
    n = 200
    rows = torch.full((n, 1), offset, dtype=dtype)
    one, other = rows.clone(), rows.clone()
    one[0], other[0] = offset + 1, offset - 1
    center = None if not offset else [torch.full((1,), offset)]
    ratio = moved(UserFilter(n, n - 0.5, 150), one, other, center=center)
    assert 0.95 < ratio <= 1.0


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_bound_of_the_wider_filter_is_nearly_reached(dtype):
    n = 1000
    common = [-0.5] * 333 + [0.0] * 333 + [0.5] * 333
    one, other = (column(v, *common, dtype=dtype) for v in (2.0, -2.0))
    floor = ((n - 1) ** 2 + 1) / n - 0.01
    ratio = moved(two(n, floor, 2 * n // 3), one, other)
    assert 0.95 < ratio <= 1.0


@pytest.mark.slow
def test_a_search_over_clusters_comes_near_the_bounds_and_never_passes_them():
    """Clusters on a line; each pair is bounded at its own score, by the coefficients that the oracle uses."""
    rng, best = np.random.default_rng(0), {"same": 0.0, "two": 0.0}
    places = np.array([-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0])
    for _ in range(4000):
        n = int(rng.integers(12, 400))
        sizes = np.bincount(
            rng.choice(9, n - 1, p=rng.dirichlet(np.full(9, rng.choice([0.1, 0.5])))), minlength=9
        )
        ends = rng.choice([*places, 1e9], 2)
        sides = []
        for end in ends:
            at, weight = np.append(places, end), np.append(sizes, 1)
            near = np.abs(at[:, None] - at)
            sides.append((at, weight, (near <= 1) @ weight, (near <= 2) @ weight))
        score = max(float((w * f).sum()) / n for _, w, f, _ in sides)
        for kind, index in (("same", 2), ("two", 3)):
            low, high = (
                n // 2 + 2,
                min(math.floor(score), n - 1) if kind == "same" else math.ceil(score) - 1,
            )
            if low > high:
                continue
            end = int(rng.integers(low, high + 1))
            try:
                bound = UserFilter(n, score, end, kind=kind).coefficient
            except ConditionError:
                continue
            means = []
            for at, weight, *counts in sides:
                w = weight * np.clip(
                    (counts[index - 2] - (n + 1) / 2) / (end - (n + 1) / 2), 0, 1
                )
                means.append(
                    float((w * np.where(w > 0, at, 0)).sum() / w.sum()) if w.sum() else 0.0
                )
            ratio = abs(means[0] - means[1]) / bound
            assert ratio <= 1.0 + 1e-12
            best[kind] = max(best[kind], ratio)
    assert best["same"] > 0.95
    assert best["two"] > 0.85


@pytest.mark.cases(36, 18)
@pytest.mark.parametrize("value", [*EDGE, *BAD])
@pytest.mark.parametrize("other", [*EDGE, *BAD])
def test_one_user_moves_the_score_by_at_most_its_sensitivity(value, other):
    # the test is free of noise: find the score by asking at both sides of the bound
    n, rest = 12, [0.0] * 6 + [1.0] * 3 + [-1.0] * 2

    def score(first):
        rows = column(first, *rest)
        joined = Points(rows).within(1e3)
        return Fraction(int(neighbor_counts(Points(rows), [1.0], joined)[0].sum()), n)

    low, high = sorted((score(value), score(other)))
    assert high - low <= Fraction(2 * (n - 1), n)
    event = certain(same(n), noise_std=1.0).phase_event().events[0]
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


@pytest.mark.slow
def test_neighbors_of_one_user_are_neighbors_at_twice_the_radius():
    generator, close = torch.Generator().manual_seed(0), {True: 0, False: 0}
    for _ in range(300):
        step, base = torch.randn(2, 3, dtype=torch.float64, generator=generator)
        rows = torch.stack([base - step, base, base + step])
        # the least radius at which both ends are neighbors of the middle, as computed
        squares = Points(rows).squares(torch.tensor([0, 2]), torch.tensor([1, 1]))
        tau = math.sqrt(float(squares.max()))
        while tau * tau < float(squares.max()):
            tau = math.nextafter(tau, math.inf)
        oracle = certain(two(12), tau)
        observe(oracle, rows)
        once, twice = neighbor_counts(Points(rows), oracle._radii())
        assert once[1] == 3
        assert twice.tolist() == [3, 3, 3]
        close[neighbor_counts(Points(rows), [2 * tau])[0].tolist() == [3, 3, 3]] += 1
    assert close[False] > 0  # it takes the enlarged radius


# -- isolation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [*BAD, 1001.0])
def test_isolated_users_count_themselves_and_nobody_else(value):
    n = 10
    good = [0.0, 0.25, 0.5, 0.25, 0.0, 0.25, 0.5, 0.25, 0.25]
    expected = released(certain(same(n, 8.0, 7)), column(*good), torch.arange(1, n)).mean[
        0
    ]  # user 0 has no rows
    assert torch.equal(released(certain(same(n, 8.0, 7)), column(*good, value)).mean[0], expected)
    few = certain(same(n, 8.0, 7), min_items=2)
    twice = torch.tensor([*good, *good, 0.25], dtype=torch.float64)[
        :, None
    ]  # the last one has a single row
    users = torch.tensor([*range(9), *range(9), 9])
    torch.testing.assert_close(released(few, twice, users).mean[0], expected)


def test_non_finite_users_never_reach_the_mean():
    rows = torch.full((50, 4), 0.25)
    rows[7, 2], rows[9] = math.nan, math.inf
    for kind in (
        same(50, 40.0, 35),
        two(50, 40.0, 35),
        UserFilter(50, 40.0, 33, "paper_corrected", 1e-6),
    ):
        assert released(certain(kind), rows).mean[0].tolist() == [0.25] * 4


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


def test_the_mean_around_a_far_public_center_keeps_its_digits():
    rows = (
        1e4
        + torch.rand(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 10
    )
    exact = [math.fsum(rows[:, i].tolist()) / 40 for i in range(3)]
    answer = released(certain(same(40), center=[torch.full((3,), 1e4)]), rows)
    torch.testing.assert_close(
        answer.mean[0], torch.tensor(exact, dtype=torch.float64), rtol=1e-15, atol=0.0
    )
    assert released(certain(same(40)), rows).halted  # farther than 1000 tau from 0


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
    error = abs(Fraction(weighted_mean(Points(rows), weights).item()) - exact)
    assert error <= Fraction(mean_rounding(n, 1.0, 1001.0)) / 2


# -- the test, halting and the phase ----------------------------------------------------------------------------------


def test_after_a_halt_nothing_is_read_or_released():
    oracle, generator = certain(same(8), noise_std=1.0, steps=5), torch.Generator().manual_seed(0)
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
    oracle = UserFiltered(
        filter, tau, std, steps=7, threshold=95.0, threshold_scale=0.3, query_scale=0.4
    )
    test, mean, failure = oracle.phase_event().events
    assert (test.b_threshold, test.b_query, test.sensitivity(REPLACE_ONE)) == (
        0.3,
        0.4,
        pytest.approx(1.98),
    )
    assert isinstance(mean, Repeat)
    assert mean.n == 7
    assert mean.event.sigma == pytest.approx(std / (filter.coefficient * tau), rel=1e-15)
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
    oracle = UserFiltered(
        filter, 1.0, 0.5, steps=50, threshold=985.0, threshold_scale=2.0, query_scale=4.0
    )
    accountant = dp.Accountant(unit="user", adjacency=REPLACE_ONE)
    accountant.record(oracle.phase_event())
    delta = 1e-4
    epsilon = accountant.get_epsilon(delta)
    mu = math.sqrt(50) * filter.coefficient / 0.5
    test = 1.998 / 2.0 + 2 * 1.998 / 4.0
    assert svt_gaussian_delta(epsilon, test, mu) + oracle.bad_pass <= delta * (1 + 1e-9)


def test_a_halt_earns_no_refund():
    oracle = certain(same(8), noise_std=1.0, steps=9)
    whole = oracle.phase_event()
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
            adjacency, extra=oracle.phase_event()
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
        declared.phase_event().events[1].event.sigma * declared.filter.coefficient
    )  # what the ledger was told
    statistic = float((noise.double() / std).square().sum())
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], noise.numel())
    assert bool(low <= statistic <= high) is (factor == 1.0)


def test_without_noise_nothing_is_promised():
    assert certain(same(8)).phase_event().events == (NonPrivate(),)


def test_bernoulli_users_enter_with_their_weight_as_probability():
    # 40 users at 0, 8 at 1.5 that have 48 neighbors within 2, 12 at 3 with few: score and weights are known
    n, filter = 60, UserFilter(60, 45.0, 40, "paper_corrected", 1e-3)
    weights = filter.weights(
        torch.tensor([30, 31, 35, 40, 60]).repeat(4000, 1).reshape(-1),
        torch.Generator().manual_seed(0),
    )
    share = weights.view(4000, 5).mean(0)
    assert set(weights.tolist()) == {0.0, 1.0}
    assert (share[0], share[3], share[4]) == (0.0, 1.0, 1.0)
    for place, count in ((1, 31), (2, 35)):
        law = stats.binom(4000, (count - 30.5) / 9.5)
        hits = int(share[place] * 4000 + 0.5)
        assert min(law.cdf(hits), law.sf(hits - 1)) > FALSE_ALARM
    event = certain(filter, noise_std=1.0).phase_event().events[1].event
    assert event.failure == pytest.approx(1e-3, rel=1e-6)
    assert event.failure >= 1e-3 + n * 2.0**-53
    dp.Accountant(unit="user").record(certain(filter, noise_std=1.0).phase_event())


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "word", "make"),
    [
        (ValueError, "n must be >= 4", lambda: certain(UserFilter(3, 2.9, 2))),
        (ValueError, "pair_radius must be", lambda: certain(same(8), 0.0)),
        (ValueError, "pair_radius must be", lambda: certain(same(8), math.inf)),
        (ValueError, "noise_std must be", lambda: certain(same(8), noise_std=-1.0)),
        (ValueError, "steps must be", lambda: certain(same(8), steps=0)),
        (ValueError, "min_items must be", lambda: certain(same(8), min_items=0)),
        (ValueError, "reach must be", lambda: certain(same(8), reach=0.5)),
        (
            ValueError,
            "center must be finite",
            lambda: certain(same(8), center=[torch.tensor([math.nan])]),
        ),
        (ValueError, "ramp_end must be", lambda: UserFilter(8, 7.0, 8)),
        (ValueError, "ramp_end must be", lambda: UserFilter(8, 7.0, 4)),
        (ValueError, "ramp_end must be", lambda: UserFilter(8, 7.0, 5.5)),
        (ConditionError, "score_floor must be", lambda: UserFilter(100, 51.5, 51)),
        (ConditionError, "score_floor must be", lambda: UserFilter(8, 9.0, 6)),
        (ValueError, "filter must be one of", lambda: UserFilter(8, 7.0, 6, kind="published")),
        (
            ValueError,
            "coupling_failure must be",
            lambda: UserFilter(8, 7.0, 5, kind="paper_corrected"),
        ),
        (
            ValueError,
            "coupling_failure must be 0",
            lambda: UserFilter(8, 7.0, 6, coupling_failure=0.1),
        ),
        (
            ConditionError,
            "threshold must be > score_floor",
            lambda: certain(same(8), threshold=7.0),
        ),
        (ValueError, "threshold must be", lambda: certain(same(8), threshold=math.nan)),
    ],
)
def test_numbers_without_a_proof_are_refused(error, word, make):
    with pytest.raises(error, match=word):
        make()


def test_the_pure_function_agrees_with_the_oracle():
    rows = torch.rand(30, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = filtered_mean(rows, 1.0, 15.5, 20)
    answer = released(certain(same(30, 21.0, 20)), rows)
    assert found["score"] > 21.0
    torch.testing.assert_close(found["mean"], answer.mean[0])
