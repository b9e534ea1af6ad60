"""The private search for the pair radius: its exact law, its one charge together with the filter, and the run after."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_dpsco as dp
from tests.algorithms import user_runs as runs
from tests.algorithms.test_exponential import assert_keeps_epsilon, ratios
from tests.algorithms.users import certain, observe, released, same
from torch_dpsco.accounting.analysis.svt import concentration_score_sensitivity
from torch_dpsco.accounting.designs import Draw, Full
from torch_dpsco.accounting.events import ADD_REMOVE, REPLACE_ONE, ZERO_OUT, NonPrivate, Pure
from torch_dpsco.algorithms import mechanisms as exponential
from torch_dpsco.algorithms import user_filter_oracles as user_search
from torch_dpsco.algorithms.mechanisms import score_law
from torch_dpsco.algorithms.user_filter_oracles import UserSearched, search_law
from torch_dpsco.algorithms.user_numbers import PairRadiusSearch, pair_radius_search
from torch_dpsco.errors import (
    AdjacencyError,
    InfeasibleError,
    PrivacyError,
    SequenceError,
    UtilityWarning,
)
from torch_dpsco.problem import Phase, Schedule
from torch_dpsco.rows import DenseBlock, GradBatch, Points, neighbor_counts

BAD = [math.nan, math.inf, -math.inf, 1e300, -1e308]
EDGE = [0.0, 1.0, -1.0, 0.5, 2.0, -2.0, math.nextafter(1.0, 2.0), 5e-324, 3.0, 1e3, 1e30]
RADII = (0.25, 0.5, 1.0, 2.0, 4.0)


def grid(n, epsilon=1.0, radii=RADII, target=0.9, widening=1.25):
    return PairRadiusSearch(
        candidates=tuple(radii),
        target=target * n,
        sensitivity=concentration_score_sensitivity(n),
        epsilon=epsilon,
        widening=widening,
    )


def searching(search, n=8, noise_ratio=0.0, steps=1, **others):
    """An oracle whose test is (almost) free of noise."""
    filter = same(n)
    numbers = {
        "threshold": filter.score_floor + 1e-6,
        "threshold_scale": 1e-12,
        "query_scale": 1e-12,
    }
    return UserSearched(search, filter, noise_ratio, steps=steps, **(numbers | others))


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def law_of(oracle, rows, users=None, splits=()):
    """Returns the law that the search draws from."""
    laws = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(user_search, "draw", lambda law, generator: laws.append(law) or 1)
        released(oracle, rows, users, splits)
    return laws[0]


def literal_totals(rows, radii, n):
    """The definition in rational arithmetic."""
    table = [
        [Fraction(v) for v in row] if all(map(math.isfinite, row)) else None
        for row in rows.double().tolist()
    ]
    finite = [row for row in table if row is not None]

    def near(first, second, radius):
        return (
            sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) <= Fraction(radius) ** 2
        )

    pairs = [sum(near(a, b, radius) for a in finite for b in finite) for radius in radii]
    return [count + n - len(finite) for count in pairs]


# -- the law ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(8, 14), st.integers(1, 3), st.data())
def test_the_law_is_that_of_the_definition(n, dim, data):
    lattice = st.sampled_from([0.0, 0.25, 0.5, 1.0, -0.5, 2.0, 4.0])
    present = data.draw(st.integers(1, n))
    table = data.draw(
        st.lists(
            st.lists(lattice, min_size=dim, max_size=dim), min_size=present, max_size=present
        )
    )
    for place in data.draw(st.lists(st.integers(0, present - 1), max_size=2)):
        table[place][0] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    rows, search = (
        torch.tensor(table, dtype=torch.float64),
        grid(n, target=data.draw(st.sampled_from([0.05, 0.4, 0.8]))),
    )
    totals, target = literal_totals(rows, RADII, n), round(Fraction(search.target) * n)
    below = [n, *totals[:-1]]
    scores = [
        max(low - target, target - high, 0) for low, high in zip(below, totals, strict=True)
    ]
    weights = np.exp(-np.array(scores) / (4 * (n - 1)))
    law = law_of(searching(search, n), rows)
    assert np.array_equal(law, search_law(totals, search, n))
    assert np.abs(law / 2**53 - weights / weights.sum()).max() < 2e-5


def common_users():
    """The other users of small data sets: a star, a pile, clusters, a line, some of them nowhere."""
    star = [[math.cos(k * math.pi / 4), math.sin(k * math.pi / 4)] for k in range(8)]
    yield star, 0.3
    yield star, 0.8
    yield [[0.0, 0.0]] * 9, 0.9
    yield [[0.0, 0.0]] * 9, 1.0
    yield [[0.0, 0.0]] * 5 + [[1.0, 0.0]] * 5, 0.6
    yield [[0.25 * k, 0.0] for k in range(-5, 6)], 0.5
    yield [[0.0, 0.0]] * 4 + [[math.nan, 0.0], [0.0, math.inf]] + [[2.0, 0.0]] * 4, 0.4


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("epsilon", [0.3, 2.0, 40.0])
def test_no_replaced_user_breaks_epsilon(epsilon):
    """A user anywhere, nowhere, without rows or with too few, against the same others, in exact arithmetic."""
    moved = 0
    for others, target in common_users():
        n = len(others) + 1
        twice = torch.tensor([*others, *others], dtype=torch.float64)
        ids = torch.arange(1, n).repeat(2)
        found = [(twice, ids)]  # user 0 has no rows
        for value in [*EDGE, *BAD]:
            own = torch.tensor([[value, 0.0]], dtype=torch.float64)
            found.append(
                (torch.cat([own, twice]), torch.cat([torch.tensor([0]), ids]))
            )  # one row: too few
            found.append((torch.cat([own, own, twice]), torch.cat([torch.tensor([0, 0]), ids])))
        search = grid(n, epsilon, target=target)
        laws = [law_of(searching(search, n, min_items=2), rows, users) for rows, users in found]
        distinct = {law.tobytes(): law for law in laws}
        moved += len(distinct) > 1
        for first, second in itertools.combinations(distinct.values(), 2):
            assert_keeps_epsilon(first, second, epsilon)
    assert moved == 7


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(8, 14), st.floats(0.01, 20), st.floats(0.0, 1.0), st.data())
def test_no_replaced_user_breaks_epsilon_anywhere(n, epsilon, target, data):
    places = st.floats(-3, 3)
    others = data.draw(st.lists(places, min_size=n - 1, max_size=n - 1))
    ends = [data.draw(st.one_of(places, st.sampled_from([*EDGE, *BAD]))) for _ in range(2)]
    search = grid(n, epsilon, np.geomspace(0.01, 6, 12).tolist(), target)
    first, second = (law_of(searching(search, n), column(end, *others)) for end in ends)
    assert_keeps_epsilon(first, second, epsilon)


def tight_pair(epsilon):
    """Laws for a user between two groups, whom both are near, and for the same user at infinity.

    At radius 1 only this user is near the others, at all larger ones everybody is: the score of the first candidate
    rises by 2 (n - 1), as it is below the target, those of hundreds of candidates above it fall by as much.
    """
    n, others = 21, [1.0] * 10 + [-1.0] * 10
    search = grid(n, epsilon, [1.0, 2.0, *np.linspace(2.5, 3.0, 400)], target=(400 + 1) / n / n)
    return tuple(law_of(searching(search, n), column(end, *others)) for end in (0.0, math.inf))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 1.5])
def test_a_worst_pair_of_users_spends_all_of_epsilon(epsilon):
    first, second = tight_pair(epsilon)
    assert_keeps_epsilon(first, second, epsilon)
    found = [math.log(ratio) for ratio in ratios(first, second)]
    assert 0.98 * epsilon < max(found) - min(found) <= epsilon
    assert max(map(abs, found)) > 0.9 * epsilon


@pytest.mark.slow
def test_a_law_at_more_than_epsilon_is_caught(monkeypatch):
    law = exponential._law
    assert_keeps_epsilon(*tight_pair(1.0), 1.0)
    for factor in (2.0, 1.02):
        with monkeypatch.context() as patch:
            patch.setattr(
                exponential,
                "_law",
                lambda scores, epsilon, factor=factor: law(scores, factor * epsilon),
            )
            pair = tight_pair(1.0)
        with pytest.raises(AssertionError):
            assert_keeps_epsilon(*pair, 1.0)


def test_a_smaller_sensitivity_of_the_totals_is_caught(monkeypatch):
    """That of counts of pairs instead of ordered pairs, and that of the score without its factor n."""
    for wrong in (0.5, 1 / 21):
        with monkeypatch.context() as patch:
            patch.setattr(
                user_search,
                "score_law",
                lambda s, unit, eps, wrong=wrong: score_law(s, wrong * unit, eps),
            )
            pair = tight_pair(1.0)
        with pytest.raises(AssertionError):
            assert_keeps_epsilon(*pair, 1.0)


def test_users_left_out_as_zero_are_caught(monkeypatch):
    """Counts of 0 for isolated users move the totals by 2 n - 1."""
    counted = neighbor_counts

    def forgets(points, radii, among=None):
        counts = counted(points, radii, among)
        return torch.where(points.within(1e70), counts, 0)

    others = [1.0] * 10 + [-1.0] * 10
    totals = [0, 0]
    for patched in (False, True):
        with monkeypatch.context() as patch:
            if patched:
                patch.setattr(user_search, "neighbor_counts", forgets)
            ends = []
            for end in (0.0, math.inf):
                oracle = searching(grid(21), 21)
                observe(oracle, column(end, *others))
                ends.append(oracle._totals(*oracle._users.take()))
            totals[patched] = max(abs(a - b) for a, b in zip(*ends, strict=True))
    assert totals == [40, 41]


@pytest.mark.slow
def test_distances_that_concentrate_are_found():
    """All pairs of honest users lie between two candidates, so that no total is near the target."""
    n, dim = 600, 1500
    rows = torch.randn(
        n, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ) / math.sqrt(dim)
    cell = 20
    search = pair_radius_search(n, 2.0, math.sqrt(2) * 1.25 ** (0.5 - cell))
    law = law_of(searching(search, n), rows) / 2**53
    observe(oracle := searching(search, n), rows)
    totals = oracle._totals(*oracle._users.take())
    assert totals[cell - 1] < 1.1 * n
    assert totals[cell] == n * n
    assert law[cell] > 0.9
    distances = np.abs(np.array(totals) - n * search.target)
    by_counts = np.exp(-(distances - distances.min()) * search.epsilon / (4 * (n - 1)))
    assert (
        by_counts[cell] / by_counts.sum() < 0.1
    )  # the score |T - t| cannot tell it from what lies above


def test_the_search_counts_physical_batches_as_one():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-8, 9, (80, 2), generator=generator).double() / 4
    users = torch.arange(10).repeat(8)[
        torch.randperm(80, generator=generator)
    ]  # means and all sums are exact
    order = torch.randperm(80, generator=generator)
    whole = law_of(searching(grid(12), 12), rows, users)
    assert np.array_equal(
        law_of(searching(grid(12), 12), rows, users, splits=(1, 30, 30, 79)), whole
    )
    assert np.array_equal(law_of(searching(grid(12), 12), rows[order], users[order]), whole)
    means = torch.stack([rows[users == user].mean(0) for user in range(10)])
    assert np.array_equal(law_of(searching(grid(12), 12), means), whole)
    shifted = law_of(searching(grid(12), 12, center=[torch.full((2,), 64.0)]), rows + 64.0, users)
    assert np.array_equal(shifted, whole)


def test_users_with_too_few_rows_are_as_users_without_any():
    others, users = torch.zeros(18, 1, dtype=torch.float64), torch.arange(1, 10).repeat(2)
    alone = law_of(searching(grid(10), 10, min_items=2), others, users)
    rows, users = torch.cat([others, torch.zeros(1, 1)]), torch.cat([users, torch.tensor([0])])
    assert np.array_equal(law_of(searching(grid(10), 10, min_items=2), rows, users), alone)
    assert not np.array_equal(law_of(searching(grid(10), 10), rows, users), alone)


def test_candidates_far_apart_are_counted_apart():
    parts = user_search._parts([1e-3, 0.5, 1.1, 1000.0, 2000.0])
    assert parts == [[1e-3, 0.5], [1.1, 1000.0], [2000.0]]
    rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    search = pair_radius_search(40, 1.0, 1e-6)
    observe(oracle := searching(search, 40), rows)
    counts = neighbor_counts(Points(rows), search.candidates).sum(1)
    assert oracle._totals(*oracle._users.take()) == counts.tolist()


@pytest.mark.weekly
def test_draws_of_the_search_follow_its_law():
    rows, search = column(*[0.0] * 3, *[0.4] * 3, *[1.5] * 3), grid(9, 2.0, target=0.5)
    law = law_of(searching(search, 9), rows) / 2**53
    generator, draws = torch.Generator().manual_seed(1), []
    for _ in range(1500):
        observe(oracle := searching(search, 9), rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(UserSearched, "_warn_at_end", lambda self, choice: None)
            oracle.release(generator)
        draws.append(oracle.pair_radius / 1.25)
    for radius, probability in zip(RADII, law, strict=True):
        # 5 standard deviations; the seed is fixed
        error = 5 * math.sqrt(probability * (1 - probability) / 1500)
        assert abs(draws.count(radius) / 1500 - probability) < error


# -- the run ----------------------------------------------------------------------------------------------------------


def sure(n=8, **others):
    """A search that finds radius 1 for users at 0 and 1."""
    return searching(grid(n, 1e4, widening=2.0), n, **others)


def halves(n=8):
    return column(*[0.0] * (n // 2), *[1.0] * (n - n // 2))


def test_the_first_release_moves_nothing_and_finds_tau():
    oracle = sure()
    assert not oracle.searched
    answer = released(oracle, halves())
    assert (answer.still, answer.halted) == (True, False)
    assert [mean.tolist() for mean in answer.mean] == [[0.0]]
    assert oracle.searched
    assert oracle.pair_radius == 2.0


def test_later_releases_are_those_of_the_filter_at_the_radius_found():
    for ratio in (0.0, 0.3):
        oracle, plain = (
            sure(noise_ratio=ratio, steps=3),
            certain(same(8), 2.0, noise_std=ratio * 2.0, steps=3),
        )
        released(oracle, halves())
        for rows in (halves(), halves() / 3):
            assert torch.equal(released(oracle, rows).mean[0], released(plain, rows).mean[0])
            assert oracle.noise_std == plain.noise_std
            assert oracle.sensitivity(REPLACE_ONE) == plain.sensitivity(REPLACE_ONE)
        assert released(oracle, 5 * halves()).halted


def test_a_run_has_one_release_more_than_steps():
    oracle = sure(steps=2)
    assert [released(oracle, halves()).still for _ in range(3)] == [True, False, False]
    with pytest.raises(SequenceError, match="all 2 planned"):
        released(oracle, halves())


def test_a_halted_run_searches_and_reads_nothing():
    oracle, generator = sure(noise_ratio=1.0, steps=5), torch.Generator().manual_seed(0)
    released(oracle, halves())
    assert released(oracle, 5.0 * torch.arange(8.0)[:, None]).halted
    before = generator.get_state()
    for halted in (oracle, copy.deepcopy(oracle)):  # the copy knows no tau, and looks for none
        halted.open([torch.zeros(1)])
        halted.observe(GradBatch([DenseBlock(torch.zeros(8, 1))]), users=None)  # not looked at
        answer = halted.release(generator)
        assert (answer.halted, answer.still, answer.mean[0].item()) == (True, True, 0.0)
    assert torch.equal(generator.get_state(), before)


def test_the_event_does_not_depend_on_what_is_found():
    search = grid(8, 0.7)
    first, second = (searching(search, noise_ratio=0.4, steps=3) for _ in range(2))
    event, settings_before = first.phase_event(), first.settings()
    plain = certain(same(8), 4.0, noise_std=1.6, steps=3).phase_event()
    assert event.events[:-1] == plain.events  # 0.4 tau of noise, whatever tau
    assert event.events[-1] == Pure(0.7, (REPLACE_ONE,))
    for oracle, radius in ((first, 1), (second, 3)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(user_search, "draw", lambda law, generator, radius=radius: radius)
            released(oracle, halves())
        assert oracle.pair_radius == RADII[radius] * 1.25
        assert oracle.phase_event() == event
        assert oracle.settings() == settings_before
        assert oracle.noise_multiplier == first.noise_multiplier
    assert first.pair_radius != second.pair_radius
    assert searching(search).phase_event().events == (NonPrivate(), Pure(0.7, (REPLACE_ONE,)))


def test_a_run_is_charged_once():
    oracle = sure(noise_ratio=1.0, steps=9)
    assert oracle.charge(Full(8), Draw(8)) == (
        oracle.phase_event(),
        10,
        False,
    )  # of the search, and 9 tests


def test_a_copy_is_charged_for_a_search_of_its_own():
    """At each point of a run, also between its charge and its draw."""
    oracle = sure(noise_ratio=1.0, steps=9, threshold=7.5, threshold_scale=0.01, query_scale=0.01)
    observe(oracle, halves())
    for _ in range(4):
        for twin in (
            copy.deepcopy(oracle),
            copy.copy(oracle),
            pickle.loads(pickle.dumps(oracle)),
        ):
            assert twin.event() == oracle.phase_event()
            assert not twin.searched
            with pytest.raises(SequenceError, match="search comes first"):
                twin.pair_radius  # noqa: B018
        twin = copy.deepcopy(oracle)
        assert released(twin, halves()).still  # it searches, and then runs a test of its own
        released(twin, halves())
        assert twin.state()["threshold_noise"] != oracle.state()["threshold_noise"]
        oracle.release(torch.Generator().manual_seed(5))
        observe(oracle, halves())


def test_more_users_than_the_search_is_for_are_refused():
    oracle = sure(ids=9)
    with pytest.raises(SequenceError, match="users must be at most 8"):
        released(oracle, halves(9))
    assert not oracle.searched
    oracle.open([torch.zeros(1)])
    with pytest.raises(SequenceError, match="users must be given"):
        oracle.observe(GradBatch([DenseBlock(torch.zeros(8, 1))]))


def test_without_any_rows_there_is_a_draw_and_no_error():
    oracle = searching(grid(8, 1e-3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UserSearched, "_warn_at_end", lambda self, choice: None)
        assert released(oracle, torch.zeros(0, 1)).still
    assert oracle.pair_radius / 1.25 in RADII


@pytest.mark.parametrize(
    ("choice", "word"),
    [(0, "smallest is probably too large"), (4, "points are probably too few")],
)
def test_an_end_of_the_grid_warns_by_the_choice_alone(monkeypatch, choice, word):
    monkeypatch.setattr(user_search, "draw", lambda law, generator: choice)
    for rows in (halves(), torch.full((8, 1), math.nan)):
        oracle = searching(grid(8))
        with pytest.warns(UtilityWarning, match=word):
            released(oracle, rows)
        assert oracle.pair_radius == RADII[choice] * 1.25
    monkeypatch.setattr(user_search, "draw", lambda law, generator: 2)
    released(searching(grid(8)), halves())


def test_what_depends_on_tau_is_refused_before_the_search():
    oracle = sure(noise_ratio=0.5)
    oracle.open([torch.zeros(3)])
    for number in ("pair_radius", "noise_std"):
        with pytest.raises(SequenceError, match="search comes first"):
            getattr(oracle, number)
    with pytest.raises(SequenceError, match="search comes first"):
        oracle.sensitivity(REPLACE_ONE)
    for adjacency in (ADD_REMOVE, ZERO_OUT):
        with pytest.raises(AdjacencyError):
            oracle.sensitivity(adjacency)
        with pytest.raises(AdjacencyError):
            dp.Accountant(unit="user", adjacency=adjacency).ledger.cost(
                adjacency, extra=oracle.phase_event()
            )
    assert oracle.metrics() == {}
    released(oracle, halves())
    assert oracle.metrics() == {
        "pair_radius": 2.0,
        "noise_std": oracle.noise_std,
        "answered": 0.0,
    }
    with pytest.raises(PrivacyError, match="pair_radius is fixed"):
        oracle.pair_radius = 2.0


# -- state ------------------------------------------------------------------------------------------------------------


def test_state_of_a_search_goes_round():
    oracle = sure(noise_ratio=1.0, steps=9)
    for tau in (None, 2.0, 2.0):
        twin = sure(noise_ratio=1.0, steps=9)
        twin.restore(oracle.state())
        assert twin.state() == oracle.state()
        assert twin.state()["pair_radius"] == tau
        assert twin.state()["confidential"]
        assert twin.settings() == oracle.settings()
        assert twin.searched is oracle.searched is (tau is not None)
        if tau is not None:
            answers = [released(run, halves()).mean[0] for run in (copy_of_run(oracle), twin)]
            assert torch.equal(*answers)
        released(oracle, halves())


def copy_of_run(oracle):
    """A second process that goes on with the same run."""
    again = sure(noise_ratio=1.0, steps=9)
    again.restore(oracle.state())
    return again


def test_a_search_cannot_be_rolled_back():
    oracle = sure(noise_ratio=1.0, steps=9)
    fresh = oracle.state()
    released(oracle, halves())
    found = oracle.state()
    for state in (fresh, {**found, "pair_radius": RADII[3] * 2.0}):
        with pytest.raises(SequenceError, match="later one of this run of the search"):
            oracle.restore(state)
    oracle.restore(found)
    released(oracle, halves())
    tested = oracle.state()
    for state in (fresh, found):
        with pytest.raises(SequenceError, match="later one of this run"):
            oracle.restore(state)
    assert oracle.state() == tested
    for wrong in (1.4, math.nan, 0.0):
        with pytest.raises(ValueError, match="pair_radius must be one that the search can find"):
            sure().restore({**found, "pair_radius": wrong})


# -- with an optimizer ------------------------------------------------------------------------------------------------


def optimized(accountant=None, steps=3, search=None, n=40):
    """A run of SGD on users at 0 and 1, with a search in its first step; the test passes."""
    model = runs.Shifts(1)
    filter = same(n, 0.8 * n)
    oracle = UserSearched(
        search or grid(n, 2.0),
        filter,
        0.2,
        steps=steps,
        threshold=0.9 * n,
        threshold_scale=0.1,
        query_scale=0.1,
    )
    opt = dp.PrivateOptimizer(
        dp.attach(model, loss_reduction="sum").parameters(),
        0.1,
        oracle=oracle,
        rule=dp.rules.SGD(),
        design=dp.Full(n),
        schedule=Schedule((Phase(steps + 1),)),
        adjacency=REPLACE_ONE,
        accountant=accountant,
    )
    return runs.Run(model, opt)


def forty():
    return runs.dataset(halves(40).numpy()), torch.arange(40)


def found_one(monkeypatch):
    monkeypatch.setattr(user_search, "draw", lambda law, generator: 2)


@pytest.mark.slow
def test_the_search_is_charged_before_its_draw_and_the_run_pays_once(monkeypatch):
    ledgers = []
    run = optimized()
    monkeypatch.setattr(
        user_search, "draw", lambda law, generator: ledgers.append(run.epsilon()) or 2
    )
    assert run.epsilon() == 0.0
    spent, places = [], [run.weights]
    for batch in run.loader(*forty()):
        run.step(batch)
        spent.append(run.epsilon())
        places.append(run.weights)
    assert len(spent) == 4
    assert set(ledgers + spent) == {spent[0]}
    assert len(ledgers) == 1
    alone = dp.Accountant(unit="user", adjacency=REPLACE_ONE)
    alone.record(run.opt.oracle.phase_event())
    assert spent[0] == alone.get_epsilon(runs.DELTA) > 2.0
    assert torch.equal(places[0], places[1])  # the search moves nothing
    assert not torch.equal(places[1], places[2])
    assert run.opt.metrics["pair_radius"] == 1.25


@pytest.mark.slow
def test_a_budget_without_room_for_the_search_is_refused_before_any_draw(monkeypatch):
    monkeypatch.setattr(user_search, "draw", None)
    room = optimized(search=grid(40, 0.1)).opt.ahead()
    alone = dp.Accountant(unit="user", adjacency=REPLACE_ONE)
    alone.record(room)
    budget = dp.Budget(
        alone.get_epsilon(runs.DELTA) + 0.1, runs.DELTA, adjacency=REPLACE_ONE, unit="user"
    )
    optimized(dp.Accountant(budget), search=grid(40, 0.1))
    with pytest.raises(InfeasibleError):
        optimized(dp.Accountant(budget), search=grid(40, 0.5))


@pytest.mark.slow
def test_a_second_optimizer_pays_for_a_search_of_its_own_and_a_copy_is_refused(monkeypatch):
    found_one(monkeypatch)
    accountant = dp.Accountant(unit="user", adjacency=REPLACE_ONE)
    first = optimized(accountant)
    loader = iter(first.loader(*forty()))
    first.step(next(loader))
    once = first.epsilon()
    with pytest.raises(SequenceError, match="must not be copied before finalize"):
        first.copy()
    second = optimized(accountant)
    second.train(*forty())
    assert accountant.get_epsilon(runs.DELTA) > once
    with pytest.raises(SequenceError, match="another optimizer's"):
        second.opt.oracle.take()


def test_a_checkpoint_after_the_search_goes_on_with_its_radius_and_is_not_charged_again(
    monkeypatch, tmp_path
):
    found_one(monkeypatch)
    first = optimized(runs.ledger(tmp_path))
    first.step(next(iter(first.loader(*forty()))))
    once, resumed = first.epsilon(), first.resumed(optimized)
    assert resumed.opt.oracle.pair_radius == 1.25
    with pytest.raises(SequenceError, match="continued once"):
        resumed.opt.load_state_dict(resumed.opt.state_dict())
    monkeypatch.setattr(user_search, "draw", None)  # it must not search again
    resumed.train(*forty())
    assert (resumed.opt.steps, resumed.epsilon()) == (4, once)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "make"),
    [
        ("search must be a PairRadiusSearch", lambda: searching((1.0, 2.0))),
        ("search must be for n_users=8", lambda: searching(grid(9))),
        ("search must be for n_users=8", lambda: searching(pair_radius_search(7, 1.0, 0.1))),
        ("target must be", lambda: searching(grid(8, target=1.1))),
        ("target must be", lambda: searching(grid(8, target=math.nan))),
        ("widening must be", lambda: searching(grid(8, widening=0.0))),
        ("pair_radius must be", lambda: searching(grid(8, widening=1e41))),
        ("candidates must be in", lambda: searching(grid(8, radii=[0.0, 1.0]))),
        ("candidates must be in", lambda: searching(grid(8, radii=[1.0, math.inf]))),
        ("candidates must be increasing", lambda: searching(grid(8, radii=[1.0, 1.0]))),
        ("candidates must be increasing", lambda: searching(grid(8, radii=[]))),
        ("scores must hold 1 to 4096", lambda: searching(grid(8, radii=range(1, 4099)))),
        ("epsilon must be > 0", lambda: searching(grid(8, epsilon=0.0))),
        ("epsilon must be > .* on a grid of 5", lambda: searching(grid(8, epsilon=1e-9))),
        ("noise_ratio must be", lambda: searching(grid(8), noise_ratio=-1.0)),
        ("noise_ratio must be", lambda: searching(grid(8), noise_ratio=math.nan)),
        ("steps must be", lambda: searching(grid(8), steps=0)),
        ("threshold must be > score_floor", lambda: searching(grid(8), threshold=7.0)),
    ],
)
def test_searches_without_a_proof_are_refused(word, make):
    with pytest.raises(ValueError, match=word):
        make()


def test_too_many_users_for_exact_totals_are_refused():
    n = 2**26
    with pytest.raises(ValueError, match="below 2\\^26"):
        user_search._choices(grid(n), n)
    assert len(user_search._choices(grid(n - 1), n - 1)) == 5
