"""Epsilon of growing counts from transforms that are kept: the bound, and that nothing asked before changes it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.accounting.analysis.test_pld_compose import exact_delta, random_law
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis import pld
from torch_dpsco.accounting.analysis import pld as pld_powers
from torch_dpsco.accounting.analysis.pld import (
    Powers,
    crossing,
    pld_epsilon,
    transforms,
)
from torch_dpsco.accounting.analysis.pld_laws import (
    Cumulant,
    DeltaCurve,
    FixedSizeLoss,
    GridLaw,
    LossLaw,
    PoissonLoss,
    PureLoss,
    ReplaceOneLoss,
    Window,
    tilted,
    window,
)
from torch_dpsco.accounting.events import PoissonGaussian

LAWS = [
    PoissonLoss(0.004, 1.1),
    PoissonLoss(0.01, 3.0),
    ReplaceOneLoss(0.02, 0.9),
    FixedSizeLoss(0.01, 0.8),
]


def forget() -> None:
    pld._kept.cache_clear()
    pld._both_ways.cache_clear()


def block_of(
    laws: list[tuple[GridLaw, int]], least: list[int], tilt: float
) -> tuple[Powers, Window]:
    cumulant = Cumulant(laws)
    smallest = Cumulant([(law, few) for (law, _), few in zip(laws, least, strict=True)])
    view = window(cumulant, tilt, cumulant.limit)
    low = min(view.low, window(smallest, tilt, smallest.limit).low)
    view = Window(tilt, low, view.high, view.rise)
    return Powers(laws, least, view, -10.0, 0.0), view


@pytest.mark.parametrize("tilt", [0.3, 2.0, 30.0])
@pytest.mark.parametrize("atom", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("most", [[4], [9], [6, 2, 4]])
@pytest.mark.parametrize("least_log", [-52.0, -3.0])
def test_every_count_of_a_block_is_above_the_exact_convolution(
    tilt, atom, most, least_log, monkeypatch
):
    monkeypatch.setattr(pld_powers, "_LEAST_LOG", least_log)
    rng = np.random.default_rng(7)
    laws = [(random_law(rng, 40 + 11 * k, atom), count) for k, count in enumerate(most)]
    least = [max(1, count // 2) for count in most]
    powers, view = block_of(laws, least, tilt)
    for counts in (
        least,
        most,
        [min(few + 1, count) for few, count in zip(least, most, strict=True)],
    ):
        composed = [(law, count) for (law, _), count in zip(laws, counts, strict=True)]
        for share in (0.05, 0.4, 0.7, 0.95):
            at = view.low + share * view.width
            aim = float(np.log(max(exact_delta(composed, at), 1e-300)))
            curve = powers.curve(counts, aim)
            losses = (curve.first + np.arange(curve.log_delta.size)) * curve.grid
            exact = [exact_delta(composed, float(loss)) for loss in losses]
            for value, delta, rounding in zip(
                curve.log_delta, exact, curve.log_rounding, strict=True
            ):
                assert np.exp(np.longdouble(value)) >= delta
                if least_log < -50:
                    assert np.exp(value) <= float(delta) * (1 + 1e-5) + 1.1 * np.exp(rounding)


def test_frequencies_left_out_are_counted(monkeypatch):
    law = random_law(np.random.default_rng(5), 60, 0.3)
    found = {}
    for least_log in (-52.0, -2.0):
        monkeypatch.setattr(pld_powers, "_LEAST_LOG", least_log)
        powers, _ = block_of([(law, 8)], [5], 1.0)
        found[least_log] = powers.curve([5], -2.0), powers._frequencies.size
    (full, many), (short, few) = found[-52.0], found[-2.0]
    assert few < many / 2
    assert short.log_rounding[0] > full.log_rounding[0] + 10
    assert short.first >= full.first
    ones = transforms([tilted(law, 1.0)], powers._size)
    bound = ones.bound[0] ** 5 * ones.times
    assert powers._left_out >= np.delete(bound, powers._frequencies).sum() * (
        1 - 1e-9
    )  # of the smallest count


def test_every_release_adds_what_rounding_took_from_its_loss():
    curve = DeltaCurve(-3, 0.5, np.log([0.9, 0.8, 0.7, 0.5, 0.2, 0.1, 0.05]), np.full(7, -40.0))
    query, mass = pld._AtDelta(0.1), np.ones(1)
    plan, view = pld._Plan(1.0, 0.0, 0.0, 0.0), Window(1.0, 0.0, 1.0, 1.0)
    laws = [
        [(GridLaw(0, mass, 0.0, 0.5, each), 1) for each in (shift, 0.0)] for shift in (0.0, 0.02)
    ]
    exact, shifted = (pld._Scene(each, plan, view).answer(query, curve, [3, 2]) for each in laws)
    assert shifted.epsilon == pytest.approx(exact.epsilon + 0.06)


def test_the_window_of_a_block_reaches_down_to_the_losses_of_its_smallest_count(monkeypatch):
    ledger = [(PoissonLoss(0.5, 8.0), 2**20 + 1)]
    forget()
    kept = pld_epsilon(ledger, 1e-5)
    forget()
    monkeypatch.setattr(pld, "_kept", lambda *_: None)
    assert kept.epsilon == pytest.approx(pld_epsilon(ledger, 1e-5).epsilon, rel=1e-5)
    pld._both_ways.cache_clear()


def test_what_lies_above_the_window_and_infinite_losses_are_counted():
    law = random_law(np.random.default_rng(3), 50, 0.2)
    law = GridLaw(law.first, law.mass, 1e-3, law.grid, law.shift)
    cumulant = Cumulant([(law, 6)])
    view = window(cumulant, 2.0, cumulant.limit)
    cut = Window(2.0, view.low, view.low + 0.6 * view.width, view.rise)
    powers = Powers([(law, 6)], [4], cut, -1.0, view.low)
    for count in (4, 5, 6):
        curve = powers.curve([count], math.log(0.05))
        for k, value in enumerate(curve.log_delta):
            assert math.exp(value) >= exact_delta([(law, count)], (curve.first + k) * curve.grid)
    assert (
        powers.curve([6], math.log(1e-3)).epsilon(math.log(1e-3)) is None
    )  # infinite losses are more


@pytest.mark.cases(3, 4)
@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.01])
def test_kept_transforms_give_what_composing_anew_gives(law, delta, monkeypatch):
    forget()
    counts = (65, 96, 200, 3000, 4097, 6144)
    kept = [pld_epsilon([(law, count)], delta) for count in counts]
    assert pld._kept.cache_info().currsize > 0
    forget()
    monkeypatch.setattr(pld, "_kept", lambda *_: None)
    anew = [pld_epsilon([(law, count)], delta) for count in counts]
    pld._both_ways.cache_clear()
    for ours, theirs in zip(kept, anew, strict=True):
        assert theirs.epsilon * (1 - 1e-5) <= ours.epsilon <= theirs.epsilon * (1 + 1e-6)
        assert ours.rounding < 1e-4 + 2 * theirs.rounding
    assert sorted(kept) == kept


def test_several_laws_are_kept_together(monkeypatch):
    forget()
    ledger = [
        (PoissonLoss(0.01, 1.0), 777),
        (ReplaceOneLoss(0.02, 2.0), 30),
        (PureLoss(0.1), 3),
    ]
    kept = pld_epsilon(ledger, 1e-5)
    forget()
    monkeypatch.setattr(pld, "_kept", lambda *_: None)
    assert kept.epsilon == pytest.approx(pld_epsilon(ledger, 1e-5).epsilon, rel=1e-6)
    pld._both_ways.cache_clear()


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_epsilon_does_not_depend_on_what_was_asked_before(law: LossLaw):
    counts, found = [129, 130, 160, 192, 193, 250], []
    for order in (counts, counts[::-1], counts[3:] + counts[:3]):
        forget()
        known = {count: pld_epsilon([(law, count)], 1e-5) for count in order}
        found.append([known[count] for count in counts])
    assert found[0] == found[1] == found[2]


def test_a_ledger_that_grew_has_the_epsilon_of_one_that_was_charged_at_once():
    event = PoissonGaussian(1.1, 256 / 60000)
    forget()
    grown = Accountant(adjacency="add_remove")
    grown.authorize(event, 190)
    for _ in range(10):
        grown.authorize(event)
        grown.get_epsilon(1e-5)
    forget()
    once = Accountant(adjacency="add_remove")
    once.authorize(event, 200)
    assert grown.get_epsilon(1e-5) == once.get_epsilon(1e-5)


@given(st.integers(1, 10**9))
def test_blocks_are_narrow_and_depend_on_the_count_alone(count):
    least, most = pld._block(count)
    assert 1 <= least <= count <= most < 1.5 * least + 1
    assert pld._block(least) == pld._block(most) == (least, most)


def test_a_crossing_is_found_whatever_the_shape():
    shapes = {
        "line": lambda k: 1000.5 - k,
        "step": lambda k: 1.0 if k < 1000 else -1.0,
        "flat, then steep": lambda k: -1e-9 if k >= 1000 else 5.0,
        "power": lambda k: (1000.5 - k) ** 3,
        "end": lambda k: math.exp(-k) - 1e-300,
    }
    for name, shape in shapes.items():
        for guess in (-5, 3, 999, 1000, 10**7):
            asked = []
            low, high = crossing(
                lambda k, f=shape, a=asked: a.append(k) or f(k), -1, 10**6, guess, -1e-3
            )
            assert high == low + 1, name
            assert shape(high) <= 0 < shape(low)
            assert len(asked) <= 8 + 21
    assert crossing(lambda _: 1.0, -1, 10, 0, -1.0) == (9, 10)
    assert crossing(lambda _: -1.0, -1, 10, 0, -1.0) == (-1, 0)
