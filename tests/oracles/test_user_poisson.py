"""The Poisson filter of users: its definition, how far one user more moves test and mean, and what a step costs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import torch_dpsco as dp
from tests.oracles.users import observe, released
from torch_dpsco.accounting.adjacency import ADD_REMOVE, REPLACE_ONE, ZERO_OUT
from torch_dpsco.accounting.designs import Draw, Fixed, Full, Poisson
from torch_dpsco.accounting.events import NonPrivate, PoissonGaussian
from torch_dpsco.accounting.stated import Failure
from torch_dpsco.errors import AdjacencyError, ConditionError
from torch_dpsco.oracles.users.poisson import AdaptiveRadius, PoissonTest, UserPoissonFiltered

FALSE_ALARM = 1e-6
BAD = [math.nan, math.inf, -math.inf, 1e300, 1001.0]


def make(least=20, largest=2.0, threshold=1.9, score_std=1e-9, end=5, tau=1.0, std=0.0, batch=40, n=400, **others):
    return UserPoissonFiltered(PoissonTest(n, batch, least, largest, threshold, score_std, end), tau, std, **others)


def column(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)[:, None]


def test_the_answer_is_the_weighted_mean_of_the_sample():
    # 26 users at 0, 2 at 1.5 (26 missing neighbors: weight 0), 2 at 0.75 (all within 1)
    rows = column(*[0.0] * 26, 1.5, 1.5, 0.75, 0.75)
    answer = released(make(largest=4.0, threshold=3.7), rows)
    missing = [2] * 26 + [26] * 2 + [0] * 2  # mean (52 + 52) / 30 = 3.47
    weights = np.clip([(9.5 - e) / 4.5 for e in missing], 0, 1)
    assert answer.mean[0].item() == pytest.approx(float(weights @ rows[:, 0].numpy() / weights.sum()), rel=1e-14)
    assert (answer.halted, answer.still) == (False, False)
    assert released(make(threshold=1.9), rows).still


def test_small_and_failed_batches_release_nothing_and_the_run_goes_on():
    oracle = make(std=1.0)
    for rows in (torch.zeros(19, 1), 5.0 * torch.arange(30.0)[:, None], torch.zeros(0, 1)):
        answer = released(oracle, rows.double())
        assert (answer.still, answer.halted, answer.mean[0].item()) == (True, False, 0.0)
    assert not released(oracle, torch.zeros(20, 1).double()).still
    assert oracle.metrics()["answered"] == 1.0


@settings(max_examples=120, deadline=None)
@given(st.integers(20, 26), st.integers(1, 2), st.data())
def test_one_user_more_moves_the_mean_by_at_most_the_sensitivity(n, dim, data):
    near = st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0, -0.5, -1.0, 2.0])
    table = data.draw(st.lists(st.lists(near, min_size=dim, max_size=dim), min_size=n, max_size=n))
    added = data.draw(st.sampled_from([0.0, 1.0, -1.0, 1.5, 2.0, math.nextafter(1.0, 2.0), *BAD]))
    rows = torch.tensor(table, dtype=torch.float64)
    more = torch.cat([rows, torch.full((1, dim), added, dtype=torch.float64)])
    oracle = make(threshold=1.999)
    first, second = (released(oracle, batch) for batch in (rows, more))
    if not (first.still or second.still):
        moved = torch.linalg.vector_norm(first.mean[0] - second.mean[0])
        assert moved <= oracle.sensitivity(ADD_REMOVE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_bound_is_nearly_reached_in_units_of_the_radius(dtype):
    rows = column(*[0.0] * 400, dtype=dtype)
    oracle = make(least=400, largest=0.5, threshold=0.4, end=100, batch=500, n=1000)
    one = released(oracle, rows)
    other = released(oracle, torch.cat([rows, column(1.0, dtype=dtype)]))
    moved = float(other.mean[0] - one.mean[0])
    # a user at tau: tau / (n + 1); an earlier search found 0.75 of 2 tau Rp at most
    assert 0.45 < moved / oracle.sensitivity(ADD_REMOVE) <= 1.0


@pytest.mark.parametrize("value", [0.0, 1.0, 2.0, *BAD])
def test_one_user_more_moves_the_deficiency_by_less_than_two(value):
    rows = column(*[0.0] * 20, *[1.0] * 4)

    def deficiency(batch):
        low, high = 0.0, 30.0
        for _ in range(40):
            middle = (low + high) / 2
            oracle = make(threshold=middle, largest=31.0, least=1000, end=100, batch=2000, n=3000)
            object.__setattr__(oracle.test, "least", 4)  # the question is that of the test alone
            low, high = (middle, high) if released(oracle, batch).still else (low, middle)
        return high

    assert abs(deficiency(torch.cat([rows, column(value)])) - deficiency(rows)) < 2.0


@pytest.mark.parametrize("value", BAD)
def test_non_finite_users_never_reach_the_mean(value):
    rows = column(*[0.25] * 29, value)
    answer = released(make(largest=4.0, threshold=3.0), rows)
    assert answer.mean[0].item() == 0.25


def test_test_and_mean_are_charged_together():
    oracle = make(std=0.2, score_std=3.0)
    sampled, failure, _ = oracle.event().events
    z = 0.2 / oracle.test.coefficient
    assert isinstance(sampled, PoissonGaussian)
    assert sampled.q == 0.1
    assert sampled.noise_multiplier <= 1 / math.hypot(2 / 3.0, 1 / z)
    assert sampled.noise_multiplier == pytest.approx(1 / math.hypot(2 / 3.0, 1 / z), rel=1e-14)
    assert isinstance(failure, Failure)
    assert failure.kind == "transcript"
    assert make().event().events == (NonPrivate(),)


def test_bad_steps_are_as_rare_as_declared():
    test = PoissonTest(100_000, 10_000, 9363, 195.0, 60.0, 20.0, 2340)
    exact = stats.norm.sf((195.0 - 60.0) / 20.0) + stats.binom.cdf(9362, 99_999, 0.1)
    assert exact <= test.failure <= exact * (1 + 1e-8)
    assert test.coefficient / 2 * 10_000 == pytest.approx(1.42, abs=0.005)
    fewer = PoissonTest(100_000, 10_000, 9363, 195.0, 60.0, 20.0, 2340, users_at_least=95_000)
    assert fewer.failure > test.failure


@pytest.mark.parametrize("adjacency", [REPLACE_ONE, ZERO_OUT])
def test_the_poisson_filter_is_charged_under_add_remove_only(adjacency):
    test = PoissonTest(100_000, 10_000, 9363, 195.0, 60.0, 20.0, 2340)
    oracle = UserPoissonFiltered(test, 1.0, 0.01)
    oracle.open([torch.zeros(1)])
    with pytest.raises(AdjacencyError):
        oracle.sensitivity(adjacency)
    with pytest.raises(AdjacencyError):
        dp.Accountant(unit="user", adjacency=adjacency).ledger.cost(adjacency, extra=oracle.event())
    accountant = dp.Accountant(unit="user", adjacency=ADD_REMOVE)
    accountant.record(oracle.event(), 100)
    assert 0 < accountant.get_epsilon(1e-6) < math.inf


def test_no_other_sampling_amplifies_its_event():
    for design in (Poisson(40, 400), dp.Fixed(40, 400), dp.Disjoint(40, 400)):
        with pytest.raises(AdjacencyError):
            design.event(make(std=1.0).event())


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_halved_noise_of_the_sampled_mean_is_caught(factor, monkeypatch):
    oracle = make(std=0.3)
    right = UserPoissonFiltered.noise_std.fget
    monkeypatch.setattr(UserPoissonFiltered, "noise_std", property(lambda self: factor * right(self)))
    noise = released(oracle, torch.zeros(25, 20_000)).mean[0]
    statistic = float((noise.double() / 0.3).square().sum())
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], noise.numel())
    assert bool(low <= statistic <= high) is (factor == 1.0)


def test_the_noise_of_the_test_is_that_of_its_standard_deviation():
    oracle, passed = make(score_std=2.0, threshold=1.0, largest=2.0), 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(1500):
        observe(oracle, torch.zeros(20, 1))
        passed += not oracle.release(generator).still
    law = stats.binom(1500, stats.norm.cdf(0.5))
    assert min(law.cdf(passed), law.sf(passed - 1)) > FALSE_ALARM
    assert stats.binom(1500, stats.norm.cdf(1.0)).cdf(passed) < FALSE_ALARM


def test_the_radius_follows_the_noisy_deficiency():
    adapt = AdaptiveRadius(target=0.5, low=0.5, high=4.0, lr=0.2)
    oracle = make(std=0.1, adapt=adapt)
    event = oracle.event()
    observe(oracle, torch.zeros(30, 1))
    std = oracle.noise_std
    oracle.release(torch.Generator().manual_seed(0))
    assert oracle.pair_radius == pytest.approx(math.exp(-0.2 * 0.5), rel=1e-6)  # nobody is missing
    observe(oracle, torch.zeros(30, 1))
    assert oracle.noise_std == pytest.approx(std * oracle.pair_radius, rel=1e-9)
    assert oracle.event() == event
    far = 10.0 * torch.arange(40.0)[:, None]
    before = oracle.pair_radius
    released(oracle, far)
    assert oracle.pair_radius == pytest.approx(before * math.exp(0.2 * (39 / 40 - 0.5)), rel=1e-6)
    for _ in range(40):
        released(oracle, far)
    assert oracle.pair_radius == 4.0
    other = make(std=0.1, adapt=adapt)
    other.restore(oracle.state())
    assert other.pair_radius == 4.0


@pytest.mark.parametrize(
    ("error", "word", "make_it"),
    [
        (ValueError, "n_min must be|ramp_start must be|ramp_end must be", lambda: make(least=3, end=1)),
        (ValueError, "ramp_end must be", lambda: make(end=10)),
        (ValueError, "ramp_end must be", lambda: make(end=0)),
        (ConditionError, "threshold must be", lambda: make(threshold=2.0)),
        (ConditionError, "deficiency must be smaller", lambda: make(largest=9.0)),
        (ValueError, "noise_std must be", lambda: make(score_std=0.0)),
        (ValueError, "batch_size must be", lambda: make(batch=500)),
        (ValueError, "pair_radius must be", lambda: make(tau=0.0)),
        (ValueError, "pair_radius must be", lambda: make(tau=9.0, adapt=AdaptiveRadius(0.5, 0.5, 4.0))),
        (ValueError, "low and high", lambda: AdaptiveRadius(0.5, 4.0, 0.5)),
    ],
)
def test_numbers_without_a_proof_are_refused(error, word, make_it):
    with pytest.raises(error, match=word):
        make_it()


@pytest.mark.parametrize("design", [Full(1000), Poisson(99, 1000), Fixed(100, 1000)])
def test_the_poisson_filter_is_charged_for_its_own_samples_only(design):
    test = PoissonTest(1000, 100, least=50, largest_deficiency=5.0, threshold=1.0, noise_std=1.0, ramp_end=12)
    oracle = UserPoissonFiltered(test, pair_radius=1.0, noise_std=0.5)
    assert oracle.charge(Poisson(100, 1000), Draw(90)) == (oracle.event(), 1, False)
    with pytest.raises(AdjacencyError, match=r"design must be Poisson\(100, 1000\)"):
        oracle.charge(design, Draw(90))
