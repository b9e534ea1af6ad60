"""Grid laws of single releases against the exact mixtures in high precision: masses, hockey sticks, both directions."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.papers.accounting import LaplaceLoss, laplace_delta
from tests.reference.papers.pure import pure_delta
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta
from torch_dpsco.accounting.analysis.pld_laws import (
    Dots,
    FixedSizeLoss,
    GaussianLoss,
    GridLaw,
    LossPair,
    MixturePair,
    OppositePair,
    PoissonLoss,
    PureLoss,
    ReplaceOneLoss,
    connected,
)

REACH = 9.0
PAIRS = [
    MixturePair(0.01, 1.0),
    MixturePair(0.004, 0.6),
    MixturePair(0.5, 0.3),
    MixturePair(1e-6, 2.0),
    MixturePair(0.999999, 1.0),
    MixturePair(0.3, 40.0),
    MixturePair(1.0, 4.0),
    OppositePair(0.01, 1.0),
    OppositePair(0.4, 0.35),
    OppositePair(0.97, 3.0),
    OppositePair(1e-7, 0.8),
]
SAMPLED = [PoissonLoss(p.rate, p.noise) for p in PAIRS if isinstance(p, MixturePair)]
LAWS = [
    *SAMPLED,
    *(law.exchanged() for law in SAMPLED),
    *(ReplaceOneLoss(p.rate, p.noise) for p in PAIRS if isinstance(p, OppositePair)),
    FixedSizeLoss(0.01, 0.5),
    FixedSizeLoss(0.3, 2.0),
    GaussianLoss(0.7),
    LaplaceLoss(0.7),
    LaplaceLoss(12.0),
    PureLoss(1.3),
    PureLoss(0.31),
]


def hockey_stick(law: GridLaw, epsilon: float) -> float:
    """E(1 - e^(epsilon - L))_+ of a grid law."""
    return law.infinite + math.fsum(
        law.mass * np.maximum(-np.expm1(epsilon - law.losses()), 0.0)
    )


def weights(pair: LossPair) -> list[mp.mpf]:
    q = mp.mpf(pair.rate)
    return [1 - q, q]


def tails(pair: LossPair, x: mp.mpf, above: bool) -> tuple[mp.mpf, mp.mpf]:
    """P and Q of a half line, in the precision of the context."""
    sign = -1 if isinstance(pair, OppositePair) else 0

    def tail(direction: int) -> mp.mpf:
        means = [0, direction]
        side = 1 if above else -1
        return mp.fsum(
            w * mp.ncdf(side * (m - x) / mp.mpf(pair.noise))
            for w, m in zip(weights(pair), means, strict=True)
        )

    return tail(1), tail(sign)


def least_hockey_stick(pair: LossPair, epsilon: float, exchanged: bool = False) -> float:
    """A value that the exact hockey stick attains or exceeds, and misses by the square of the error of a float cut.

    It is P(S) - e^epsilon Q(S) for the half line S that the float solver finds best; the exact one is the largest.
    """
    loss = -epsilon if exchanged else epsilon
    low, high = (pair.loss(end) for end in pair.ends(60.0))
    if not low < loss < high:
        return 0.0
    with mp.workdps(60):
        p, q = tails(pair, mp.mpf(pair.positions(np.array([loss]))[0]), above=not exchanged)
        first, second = (q, p) if exchanged else (p, q)
        return float(first - mp.exp(mp.mpf(epsilon)) * second)


def exact(law: object, epsilon: float) -> float:
    """The privacy profile at epsilon >= 0."""
    if isinstance(law, PoissonLoss):
        return least_hockey_stick(MixturePair(law.rate, law.noise), epsilon, law.reverse)
    if isinstance(law, ReplaceOneLoss):
        return least_hockey_stick(OppositePair(law.rate, law.noise), epsilon)
    if isinstance(law, FixedSizeLoss):
        return least_hockey_stick(MixturePair(law.rate, law.noise), epsilon)
    if isinstance(law, LaplaceLoss):
        return laplace_delta(epsilon, 1 / law.epsilon)
    if isinstance(law, PureLoss):
        return pure_delta(epsilon, law.epsilon)
    assert isinstance(law, GaussianLoss)
    return gaussian_delta(law.ratio, epsilon)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize("grid", [1e-3, 0.03])
def test_grid_laws_are_never_below_the_exact_hockey_stick(law, grid):
    put = law.on_grid(grid, REACH)
    top = min(law.span(5.0)[1] * 1.05, 40.0)
    for epsilon in np.linspace(0.0, top, 50):
        assert hockey_stick(put, epsilon) >= exact(law, epsilon + put.shift) * (1 - 1e-15)


@pytest.mark.slow
@given(
    rate=st.floats(-8, 0).map(lambda e: 10**e).filter(lambda q: q < 1),
    noise=st.floats(-0.7, 2).map(lambda e: 10**e),
    grid=st.floats(-3.5, -0.7).map(lambda e: 10**e),
    share=st.floats(0.0, 1.0),
    direction=st.sampled_from(["remove", "add", "replace", "fixed"]),
)
@settings(max_examples=60)
def test_any_grid_law_is_above_the_exact_hockey_stick(rate, noise, grid, share, direction):
    law = {
        "remove": PoissonLoss(rate, noise),
        "add": PoissonLoss(rate, noise, reverse=True),
        "replace": ReplaceOneLoss(rate, noise),
        "fixed": FixedSizeLoss(rate, noise),
    }[direction]
    put = law.on_grid(max(grid, law.span(REACH)[1] / 1e4), REACH)
    epsilon = share * min(max(law.span(5.0)), 60.0)
    assert hockey_stick(put, epsilon) >= exact(law, epsilon + put.shift) * (1 - 1e-15)


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_at_the_dots_the_hockey_stick_is_exact(law):
    put = law.on_grid(1e-3, REACH)
    checked = 0
    for index in np.unique(np.linspace(0, law.span(6.0)[1] / 1e-3, 12).astype(int)):
        true = exact(law, index * 1e-3)
        if true > 1e-9:
            # pure laws have a kink between two dots; its chord is seen at no dot
            assert hockey_stick(put, index * 1e-3) == pytest.approx(true, rel=1e-8)
            checked += 1
    assert checked or law.span(6.0)[1] < 1e-3


@pytest.mark.cases(21, 10)
@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize("grid", [1e-3, 0.03])
def test_the_masses_of_both_hypotheses_are_kept(law, grid):
    put = law.on_grid(grid, REACH)
    assert 0 <= math.fsum(put.mass) + put.infinite - 1 < 1e-11
    assert -1e-15 <= math.fsum(put.mass * np.exp(-put.losses())) - 1 < 1e-11
    assert put.mass.min() >= 0
    assert put.infinite < 1e-18


def test_what_integrals_may_be_short_of_is_added():
    put = Dots(
        0, np.array([0.25, 0.5, 0.0]), (0.125, 0.0), (0.125, 0.0), 0.5, 0.0, accuracy=0.5
    ).law()
    assert put.mass.tolist() == [0.25, 0.5 + 0.125 * 1.5, 0.0]
    assert put.infinite >= 0.125 * 1.5
    # a bucket at (0, 1/2] with all of its mass at the upper end: p = 1, e = 1 - e^-1/2; and with none there
    full, none = (
        connected(np.array([1.0]), np.array([-math.expm1(-0.5) * share]), 0.5, 0.25)
        for share in (1.0, 0.0)
    )
    assert full.tolist() == pytest.approx([2 * 0.25, 1.25])
    assert none.tolist() == [1.25 + 2 * 0.25, 0.0]


@pytest.mark.cases(9, 4)
@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_what_lies_beyond_the_reach_moves_up(law):
    # so short a reach that the tails count
    put = law.on_grid(0.01, 1.5)
    assert math.fsum(put.mass) + put.infinite >= 1
    for epsilon in np.linspace(0.0, law.span(1.0)[1], 5):
        assert hockey_stick(put, epsilon) >= exact(law, epsilon + put.shift) * (1 - 1e-15)


@pytest.mark.cases(4, 2)
@pytest.mark.parametrize("law", SAMPLED, ids=repr)
def test_exchanged_laws_are_dual(law):
    # H_t(Q, P) = 1 - t + t H_(1/t)(P, Q)
    put, other = law.on_grid(1e-3, REACH), law.exchanged().on_grid(1e-3, REACH)
    assert law.exchanged().exchanged() == law
    for epsilon in np.round(
        np.linspace(*law.span(4.0), 9), 3
    ):  # dots: between them there are chords in t and 1/t
        dual = -math.expm1(-epsilon) + math.exp(-epsilon) * hockey_stick(put, epsilon)
        # masses are rounded up, by a little of all, also where the profile is the small rest of 1 - t
        assert hockey_stick(other, -epsilon) == pytest.approx(
            dual, rel=1e-10, abs=1e-12 * (1 + math.exp(-epsilon))
        )


def test_the_law_of_fixed_batches_has_the_profile_of_both_orderings():
    law = FixedSizeLoss(0.05, 0.6).on_grid(1e-3, REACH)
    forward = PoissonLoss(0.05, 0.6).on_grid(1e-3, REACH)
    backward = PoissonLoss(0.05, 0.6, reverse=True).on_grid(1e-3, REACH)
    for epsilon in (0.001, 0.02, 0.4, 3.0):
        assert hockey_stick(law, epsilon) == pytest.approx(
            hockey_stick(forward, epsilon), rel=1e-9
        )
        assert hockey_stick(law, -epsilon) == pytest.approx(
            hockey_stick(backward, -epsilon), rel=1e-9
        )
        assert hockey_stick(forward, epsilon) > hockey_stick(backward, epsilon)
    dual = law.mass[::-1] * np.exp(law.losses())
    np.testing.assert_allclose(
        law.mass[2:-2], dual[2:-2], rtol=1e-9
    )  # the ends hold tails, which move up


def test_at_rate_one_all_laws_are_gaussian():
    gaussian = GaussianLoss(0.5).on_grid(1e-3, REACH)
    for law in (
        PoissonLoss(1.0, 2.0),
        PoissonLoss(1.0, 2.0, reverse=True),
        FixedSizeLoss(1.0, 2.0),
    ):
        put = law.on_grid(1e-3, REACH)
        assert put.first == gaussian.first
        np.testing.assert_allclose(put.mass, gaussian.mass, rtol=1e-9, atol=1e-20)


@pytest.mark.cases(7, 3)
@pytest.mark.parametrize(
    "pair",
    [*PAIRS, MixturePair(0.2, 0.05), OppositePair(0.5, 0.02)],
    ids=repr,
)
def test_cuts_are_within_the_stated_shift(pair):
    low, high = (pair.loss(end) for end in pair.ends(REACH))
    losses = np.linspace(low, high, 41)[1:-1]
    cuts = pair.positions(losses)
    with mp.workdps(50):
        z2 = mp.mpf(pair.noise) ** 2
        for loss, cut in zip(losses, cuts, strict=True):
            x = mp.mpf(cut)
            p = mp.fsum(
                w * mp.exp(j * (2 * x - j) / (2 * z2)) for j, w in enumerate(weights(pair))
            )
            q = 1
            if isinstance(pair, OppositePair):
                q = mp.fsum(
                    w * mp.exp(-j * (2 * x + j) / (2 * z2)) for j, w in enumerate(weights(pair))
                )
            assert abs(mp.log(p / q) - mp.mpf(loss)) <= pair.shift(REACH)


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("pair", PAIRS, ids=repr)
def test_the_loss_increases(pair):
    # the premise of the buckets; proved in the module, so any violation would be a wrong formula
    ends = pair.ends(3.0)
    losses = [pair.loss(x) for x in np.linspace(*ends, 200)]
    assert np.all(np.diff(losses) >= 0)
    assert losses[-1] > losses[0]


@pytest.mark.cases(4, 2)
@pytest.mark.parametrize("pair", PAIRS, ids=repr)
def test_buckets_have_the_stated_accuracy(pair):
    losses = np.linspace(
        pair.loss(-pair.reverse_shift - pair.noise), pair.loss(1 + 2 * pair.noise), 8
    )
    cuts = pair.positions(losses)
    mass, excess = pair.integrate(cuts, losses[:-1], REACH)
    with mp.workdps(50):
        z2 = mp.mpf(pair.noise) ** 2
        for k in range(mass.size):
            x = mp.mpf(cuts[k])
            p, q = (
                a - b
                for a, b in zip(
                    tails(pair, x, True), tails(pair, mp.mpf(cuts[k + 1]), True), strict=True
                )
            )
            ratio = mp.fsum(
                w * mp.exp(j * (2 * x - j) / (2 * z2)) for j, w in enumerate(weights(pair))
            )
            if isinstance(pair, OppositePair):
                ratio /= mp.fsum(
                    w * mp.exp(-j * (2 * x + j) / (2 * z2)) for j, w in enumerate(weights(pair))
                )
            assert abs(mass[k] / p - 1) <= pair.accuracy(REACH)
            # relative to what of the excess could come from a rounded left end
            assert (
                abs(excess[k] - (p - ratio * q))
                <= pair.accuracy(REACH) * excess[k] + 1e-14 * mass[k]
            )
