"""AboveThreshold: the law of its answers, what a neighbor changes, halting, and what a checkpoint keeps."""

from __future__ import annotations

import copy
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from tests.reference.papers.accounting import sequence_probability
from torch_dpsco.accounting.analysis.pure import above_threshold_epsilon, bad_pass_probability
from torch_dpsco.accounting.events import REPLACE_ONE
from torch_dpsco.algorithms import mechanisms as above_threshold
from torch_dpsco.algorithms.mechanisms import AboveThreshold
from torch_dpsco.errors import SequenceError

FALSE_ALARM = 1e-6


def make(threshold=10.0, b1=2.0, b2=4.0, sensitivity=Fraction(2), steps=5):
    return AboveThreshold(
        threshold, threshold_scale=b1, query_scale=b2, sensitivity=sensitivity, steps=steps
    )


def passes_before_the_halt(scores, seed_generator, **numbers) -> int | None:
    """Returns how many of the scores pass before one does not; None if all pass."""
    run = make(steps=len(scores), **numbers)
    return next(
        (k for k, score in enumerate(scores) if not run.passes(score, seed_generator)), None
    )


def is_likely(successes, number, p) -> bool:
    law = stats.binom(number, p)
    return bool(min(law.cdf(successes), law.sf(successes - 1)) > FALSE_ALARM / 2)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("first", "last", "k"), [(0.0, 0.0, 1), (3.0, -4.0, 2), (-2.0, 1.0, 3), (1.0, -9.0, 0)]
)
@pytest.mark.parametrize(("b1", "b2"), [(2.0, 4.0), (3.0, 1.0)])
def test_answers_have_the_probabilities_of_the_exact_integrals(first, last, k, b1, b2):
    scores = [10.0 + first] * k + [10.0 + last]
    generator, number = torch.Generator().manual_seed(7), 1500
    hits = sum(
        passes_before_the_halt(scores, generator, b1=b1, b2=b2) == k for _ in range(number)
    )
    assert is_likely(hits, number, sequence_probability(first, last, k, b1, b2))


@pytest.mark.weekly
def test_halved_noise_of_the_test_is_caught():
    generator, number, scores = torch.Generator().manual_seed(7), 5000, [13.0, 13.0, 6.0]
    for b1, b2, fits in ((2.0, 4.0, True), (1.0, 4.0, False), (2.0, 2.0, False)):
        hits = sum(
            passes_before_the_halt(scores, generator, b1=b1, b2=b2) == 2 for _ in range(number)
        )
        assert is_likely(hits, number, sequence_probability(3.0, -4.0, 2, 2.0, 4.0)) is fits, (
            b1,
            b2,
        )


def discrete_law(t, reach):
    k = np.arange(-reach, reach + 1)
    return k, math.tanh(1 / (2 * t)) * np.exp(-np.abs(k) / t)


def transcript(gaps, t1, t2, reach=4000):
    """Exact probability that all but the last pass, in units of the grid: gap + nu >= rho."""
    rho, density = discrete_law(t1, reach)
    for place, gap in enumerate(gaps):
        up = tail(rho - gap, t2)
        density = density * (up if place < len(gaps) - 1 else 1 - up)
    return float(density.sum())


def tail(need, t):
    """P[noise >= need] of the discrete law, for integers."""
    far = np.exp(-np.maximum(need, 1 - need) / t) / (1 + math.exp(-1 / t))
    return np.where(need >= 1, far, 1 - far)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("passes", [0, 1, 10, 300])
@pytest.mark.parametrize("level", [-60, -8, 0, 3, 40])
def test_neighbors_never_differ_by_more_than_the_declared_epsilon(passes, level):
    # coarse grid of 4 steps within the sensitivity: the discrete law itself is tested, not its limit
    t1, t2, worst = 4 * 2.0, 4 * 3.0, 0.0
    epsilon = above_threshold_epsilon(2.0, 3.0, 1.0)
    for down, up in ((4, 4), (4, -4), (-4, 4), (3, -4)):
        one = transcript([level] * passes + [-level], t1, t2)
        other = transcript([level - down] * passes + [-level + up], t1, t2)
        worst = max(worst, abs(math.log(one / other)))
    assert 0 < worst <= epsilon * (1 + 1e-9)


def test_a_part_of_the_declared_epsilon_is_reached():
    high, low = (
        transcript([first] * 100 + [last], 8.0, 12.0) for first, last in ((-36, -64), (-40, -60))
    )
    assert abs(math.log(high / low)) > 0.4 * above_threshold_epsilon(2.0, 3.0, 1.0)


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("margin", [0.0, 1.0, 6.0, 20.0])
def test_bad_passes_of_the_discrete_law_are_below_the_bound(steps, margin, monkeypatch):
    monkeypatch.setattr(above_threshold, "_STEPS", 16)
    run = make(10.0, 2.0, 4.0, Fraction(2), steps)
    step = 2 / 16
    rho, density = discrete_law(2.0 / step, 4000)
    up = tail(rho + margin / step, 4.0 / step)  # some nu >= rho + margin
    exact = float((density * (1 - (1 - up) ** steps)).sum())
    union = min(1.0, steps * float((density * up).sum()))
    assert exact <= run.bad_pass(10.0 - margin) <= max(1.6 * union, 0.6) + 1e-12


def test_the_bound_of_bad_passes_is_that_of_the_continuous_law_on_the_fine_grid():
    assert make().bad_pass(0.0) == pytest.approx(
        bad_pass_probability(10.0, 5, 2.0, 4.0), rel=1e-8
    )
    assert make().bad_pass(0.0) >= bad_pass_probability(10.0, 5, 2.0, 4.0)


def test_halting_is_permanent():
    run, generator = make(b1=1e-6, b2=1e-6), torch.Generator().manual_seed(0)
    assert run.passes(11.0, generator)
    assert not run.passes(9.0, generator)
    for _ in range(2):
        with pytest.raises(SequenceError, match="halted"):
            run.passes(1e9, generator)
    assert (run.halted, run.asked) == (True, 2)
    again = make(b1=1e-6, b2=1e-6)
    again.restore(run.state())
    with pytest.raises(SequenceError, match="halted"):
        again.passes(1e9, generator)


def test_more_than_the_planned_queries_are_refused():
    run, generator = make(steps=2, b1=1e-6, b2=1e-6), torch.Generator().manual_seed(0)
    assert [run.passes(11.0, generator) for _ in range(2)] == [True, True]
    with pytest.raises(SequenceError, match="all 2 planned"):
        run.passes(11.0, generator)


def test_the_threshold_is_drawn_once_and_queries_anew():
    run, generator = make(b1=1e9, b2=1e-9, steps=100), torch.Generator().manual_seed(1)
    assert run.state()["threshold_noise"] is None
    run.passes(
        10**12, generator
    )  # far above any threshold; from here on both sides of theta + rho are certain
    level = 10 + run.state()["threshold_noise"] * Fraction(2) / 2**32
    assert all(run.passes(level + Fraction(1, 1000), generator) for _ in range(50))
    assert not run.passes(level - Fraction(1, 1000), generator)
    noisy, answers = make(b1=1e-9, b2=1.0, steps=2000), []
    while not noisy.halted:
        answers.append(noisy.passes(12.0, generator))  # one score, and not one answer
    assert 1 < len(answers) < 2000


def test_a_resumed_run_keeps_its_threshold(tmp_path):
    run, generator = make(b1=1e6, b2=1e-6, steps=9), torch.Generator().manual_seed(2)
    run.passes(10**10, generator)
    torch.save(run.state(), tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    assert saved["confidential"] is True
    level = 10 + saved["threshold_noise"] * Fraction(2) / 2**32
    for shift, expected in ((Fraction(1, 100), True), (Fraction(-1, 100), False)):
        resumed = make(b1=1e6, b2=1e-6, steps=9)
        resumed.restore(saved)
        assert resumed.state()["threshold_noise"] is not None
        assert resumed.asked == 1
        assert resumed.passes(level + shift, torch.Generator().manual_seed(99)) is expected


def test_a_run_cannot_be_rolled_back():
    run, generator = make(b1=1e-6, b2=1e-6), torch.Generator().manual_seed(0)
    start = run.state()
    run.passes(11.0, generator)
    early = run.state()
    run.passes(11.0, generator)
    late = run.state()
    for earlier in (start, early, {**late, "threshold_noise": 5}):
        with pytest.raises(SequenceError, match="later one of this run"):
            run.restore(earlier)
    assert run.state() == late
    run.passes(9.0, generator)
    with pytest.raises(SequenceError, match="later one of this run"):
        run.restore({**run.state(), "halted": False})
    other = copy.deepcopy(run)  # which was asked nothing, and has halted
    with pytest.raises(SequenceError, match="later one of this run"):
        other.restore({**other.state(), "halted": False})


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda run: pickle.loads(pickle.dumps(run))]
)
def test_a_copy_is_a_new_run(copied):
    run, generator = make(b1=1e3, b2=1.0), torch.Generator().manual_seed(0)
    run.passes(10**6, generator)
    other = copied(run)
    assert other.state() == {
        "threshold_noise": None,
        "asked": 0,
        "halted": False,
        "confidential": True,
    }
    other.passes(10**6, generator)
    assert other.state()["threshold_noise"] != run.state()["threshold_noise"]
    run.passes(-(10**6), generator)
    assert copied(run).halted


@pytest.mark.parametrize("n", [3, 7, 10, 49, 704])
def test_the_event_is_never_below_the_exact_sensitivity(n):
    exact = Fraction(2 * (n - 1), n)
    event = make(sensitivity=exact).event(REPLACE_ONE)
    assert exact <= Fraction(event.sensitivity(REPLACE_ONE)) <= exact * (1 + Fraction(1, 2**50))
    assert (event.b_threshold, event.b_query, event.num_positives) == (2.0, 4.0, 1)


@pytest.mark.parametrize(
    ("field", "numbers"),
    [
        ("threshold", {"threshold": math.nan}),
        ("threshold_scale", {"b1": 0.0}),
        ("query_scale", {"b2": -1.0}),
        ("sensitivity", {"sensitivity": 0}),
        ("steps", {"steps": 0}),
    ],
)
def test_numbers_out_of_range_are_named(field, numbers):
    with pytest.raises(ValueError, match=f"{field} must be"):
        make(**numbers)
