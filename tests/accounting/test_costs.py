"""Costs of all kinds of events, how they compose, and epsilon by every method."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.papers.accounting import laplace_delta
from tests.reference.papers.orders import rdp_l2_knorm, rdp_laplace, rdp_pure
from tests.reference.papers.pure import pure_delta
from torch_dpsco.accounting.analysis.pure import rho_pure
from torch_dpsco.accounting.curves import METHODS, cost_of, laws_of, orders_at
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    CLIP_UNITS,
    GDP,
    REPLACE_ONE,
    ZCDP,
    ZERO_OUT,
    AboveThreshold,
    ApproxDP,
    Failure,
    Gaussian,
    KNorm,
    Laplace,
    NonPrivate,
    Parallel,
    PoissonGaussian,
    Pure,
    RDPCurve,
    WORGaussian,
    clipped_gaussian,
    event_from_json,
    event_to_json,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import AdjacencyError

DELTA = 1e-5
ORDERS = orders_at(0)
SENS = {ADD_REMOVE: 1.0, ZERO_OUT: 1.0, REPLACE_ONE: 2.0}
EVENTS = [
    Gaussian(2.0, SENS),
    PoissonGaussian(1.0, 0.01),
    WORGaussian(1.0, 10, 1000),
    Laplace(4.0, SENS),
    AboveThreshold(8.0, 16.0, SENS, num_positives=2),
    Pure(0.5),
    ApproxDP(0.5, 1e-7),
    ZCDP(0.01),
    ZCDP(0.01, 1e-7),
    GDP(0.3),
    KNorm(0.5, dim=20),
    RDPCurve((2.0, 4.0, 300.0), (0.1, 0.2, 20.0)),
    Failure(1e-7, "coupling"),
    Failure(1e-7, "transcript"),
    Parallel({"a": [Pure(0.5)]}, "keys", partition_kind="keyed"),
    Parallel({"a": [Pure(0.5)]}, "public keys", partition_kind="keyed", key_public=True),
]


@pytest.mark.parametrize("event", EVENTS, ids=str)
@pytest.mark.parametrize("exact", [True, False])
def test_every_event_survives_json(event, exact):
    assert event_from_json(event_to_json(event, exact=exact)) == event
    ledger = Ledger([event])
    assert Ledger.from_json(ledger.to_json()).digest() == ledger.digest()


def test_events_without_new_fields_have_the_json_of_old():
    assert set(event_to_json(PoissonGaussian(1.0, 0.1))) == {"type", "noise_multiplier", "q"}
    assert set(event_to_json(Parallel({}, "p"))) == {"type", "partition", "parts"}


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_pure_mechanisms_have_the_curves_of_the_analysis(adjacency):
    shift = SENS[adjacency]
    for event, epsilon, curve in (
        (Laplace(4.0, SENS), shift / 4, rdp_laplace(4.0 / shift, ORDERS)),
        (AboveThreshold(8.0, 16.0, SENS, 2), shift / 8 + 4 * shift / 16, None),
        (Pure(0.5), 0.5, None),
        (KNorm(0.5, 20), 0.5, rdp_l2_knorm(0.5, 20, ORDERS)),
    ):
        cost = cost_of(event, adjacency)
        assert cost.pure == pytest.approx(epsilon)
        assert cost.rho == pytest.approx(rho_pure(epsilon))
        np.testing.assert_allclose(
            cost.rdp, rdp_pure(epsilon, ORDERS) if curve is None else curve, rtol=1e-12
        )


@pytest.mark.parametrize("method", METHODS)
def test_pure_epsilon_is_the_price_at_small_delta(method):
    ledger = Ledger([Pure(0.5), Laplace(4.0, SENS)])
    found = ledger.epsilon(1e-12, ADD_REMOVE, method)
    assert found >= 0.75 * (1 - 1e-9) if method == "rdp" else found <= 0.75 * (1 + 1e-6)
    assert ledger.delta(0.75, ADD_REMOVE) == 0.0


def test_many_pure_releases_cost_less_than_their_sum():
    ledger = Ledger()
    ledger.add(Pure(0.1), 400)
    assert ledger.epsilon(DELTA, ADD_REMOVE) < 0.3 * 40.0
    assert ledger.pure(ADD_REMOVE) == pytest.approx(40.0)


def test_pure_events_have_the_worst_law():
    for event, epsilon in (
        (Pure(1.0), 1.0),
        (Laplace(1.0, {ADD_REMOVE: 1.0}), 1.0),
        (KNorm(1.0, 5), 1.0),
    ):
        for at in (0.0, 0.3, 0.9):
            delta = Ledger([event])
            found = delta.epsilon(pure_delta(at, epsilon) * (1 + 1e-9), ADD_REMOVE, "pld")
            assert found <= at + 2e-3
        assert pure_delta(0.3, 1.0) >= laplace_delta(0.3, 1.0)
        assert laws_of(event, ADD_REMOVE) == laws_of(Pure(epsilon), ADD_REMOVE)


def test_stated_guarantees_hold_where_they_were_stated_only():
    for event in (
        Pure(1.0, (ADD_REMOVE,)),
        GDP(1.0, (ADD_REMOVE,)),
        ZCDP(1.0, adjacencies=(ADD_REMOVE,)),
    ):
        assert cost_of(event, ADD_REMOVE) is not None
        for adjacency in (ZERO_OUT, REPLACE_ONE):
            with pytest.raises(AdjacencyError, match=f"is not stated for {adjacency}"):
                Ledger([event]).epsilon(DELTA, adjacency)


def test_a_curve_is_bounded_by_its_chords_and_nothing_is_said_past_its_end():
    truth = cost_of(Gaussian(2.0, {ADD_REMOVE: 1.0}), ADD_REMOVE).rdp
    orders = (1.5, 3.0, 10.0, 50.0)
    cost = cost_of(RDPCurve(orders, tuple(a / 8 for a in orders)), ADD_REMOVE).rdp
    inside = ORDERS <= 50.0
    assert np.all(cost[inside] >= truth[inside] * (1 - 1e-12))
    assert np.all(np.isinf(cost[~inside]))
    for order in orders:
        at = np.flatnonzero(np.isclose(ORDERS, order))
        np.testing.assert_allclose(cost[at], order / 8)
    gap = cost_of(RDPCurve((2.0, 4.0), (math.inf, 1.0)), ADD_REMOVE).rdp
    assert np.all(np.isinf(gap[(ORDERS > 1) & (ORDERS < 4)]))


# -- failures ---------------------------------------------------------------------------------------------------------


def test_failures_take_their_share_of_delta():
    base = Gaussian(2.0, {REPLACE_ONE: 1.0})

    def epsilon(*events):
        return Ledger(events).epsilon(DELTA, REPLACE_ONE)

    plain, p = epsilon(base), 2e-6
    assert epsilon(base, Failure(p)) == pytest.approx(
        Ledger([base]).epsilon((DELTA - p) / (1 - p), REPLACE_ONE), rel=1e-6
    )
    assert epsilon(base, Failure(p, "transcript")) == pytest.approx(
        Ledger([base]).epsilon(DELTA - p, REPLACE_ONE), rel=1e-6
    )
    assert plain < epsilon(base, Failure(DELTA / 2, "transcript"))
    for kind in ("coupling", "transcript"):
        assert epsilon(base, Failure(DELTA, kind)) == math.inf
        assert (
            Ledger([base, Failure(p, kind)]).delta(1.0, REPLACE_ONE)
            > Ledger([base]).delta(1.0, REPLACE_ONE) + p / 2
        )


def test_approximate_guarantees_are_pure_ones_with_a_failure():
    for event, same in (
        (ApproxDP(0.5, 1e-7), [Pure(0.5), Failure(1e-7)]),
        (ZCDP(0.01, 1e-7), [ZCDP(0.01), Failure(1e-7)]),
    ):
        assert Ledger([event]).epsilon(DELTA, ADD_REMOVE) == pytest.approx(
            Ledger(same).epsilon(DELTA, ADD_REMOVE)
        )
        assert Ledger([event]).epsilon(1e-7, ADD_REMOVE) == math.inf


# -- parts by key -----------------------------------------------------------------------------------------------------


def parts(name: str, **options: object) -> Parallel:
    return Parallel({"a": [Pure(1.0)], "b": [Pure(0.5)]}, name, **options)


def test_keyed_parts_have_no_replace_one_guarantee():
    ledger = Ledger([parts("keys", partition_kind="keyed")])
    assert (
        ledger.epsilon(DELTA, ADD_REMOVE)
        == ledger.epsilon(DELTA, ZERO_OUT)
        == pytest.approx(1.0, rel=1e-4)
    )
    with pytest.raises(AdjacencyError, match=r"no replace_one guarantee .*another key"):
        ledger.epsilon(DELTA, REPLACE_ONE)
    public = Ledger([parts("keys", partition_kind="keyed", key_public=True)])
    assert public.epsilon(DELTA, REPLACE_ONE) == pytest.approx(1.0, rel=1e-4)
    with pytest.raises(AdjacencyError, match="no add_remove guarantee"):
        Ledger([parts("positions")]).epsilon(DELTA, ADD_REMOVE)


def test_a_partition_is_cut_in_one_way():
    ledger = Ledger([parts("p", partition_kind="keyed")])
    digest = ledger.digest()
    with pytest.raises(ValueError, match="partition 'p' must be cut in one way"):
        ledger.add(parts("p"))
    assert ledger.digest() == digest
    with pytest.raises(ValueError, match="must be cut in one way"):
        ledger.evaluate(DELTA, ZERO_OUT, extra=parts("p"))
    with pytest.raises(ValueError, match="key_public must be False"):
        parts("q", key_public=True)


# -- privacy loss distributions ---------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("noise", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 100])
def test_pld_agrees_with_dp_accounting_and_is_never_above_renyi(noise, steps):
    ledger = Ledger()
    ledger.add(PoissonGaussian(noise, 0.01), steps)
    ledger.add(clipped_gaussian(8.0), 2)
    judge = PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-4
    )
    judge.compose(
        dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(noise)), steps
    )
    judge.compose(dp_accounting.GaussianDpEvent(8.0), 2)
    found, theirs = ledger.epsilon(DELTA, ADD_REMOVE, "pld"), judge.get_epsilon(DELTA)
    assert theirs - 2e-3 <= found <= theirs * 1.005 + 2e-3
    assert found <= ledger.epsilon(DELTA, ADD_REMOVE)
    assert ledger.evaluate(DELTA, ADD_REMOVE, "pld").method == "pld"


def test_where_an_event_has_no_law_the_best_other_bound_is_reported():
    for event in (ZCDP(0.01), RDPCurve((2.0,), (0.1,)), NonPrivate(), PoissonGaussian(0.0, 0.1)):
        ledger = Ledger([PoissonGaussian(1.0, 0.01), event])
        assert ledger.epsilon(DELTA, ADD_REMOVE, "pld") == ledger.epsilon(DELTA, ADD_REMOVE)


@pytest.mark.slow
def test_the_worst_combination_of_parts_counts():
    """A part with one large release and one with many small ones: neither is the worse one at every delta."""
    large, small = [Pure(1.0)], [Gaussian(4.0, {ZERO_OUT: 1.0})] * 16
    both = Ledger([Parallel({"a": large, "b": small}, "p"), PoissonGaussian(1.0, 0.02)])
    for delta in (1e-9, 1e-5, 0.05):
        alone = [
            Ledger([Parallel({"a": part}, "p"), PoissonGaussian(1.0, 0.02)]).epsilon(
                delta, ZERO_OUT, "pld"
            )
            for part in (large, small)
        ]
        assert both.epsilon(delta, ZERO_OUT, "pld") == pytest.approx(max(alone), rel=1e-9)


def test_a_failure_of_one_part_is_not_added_to_the_losses_of_another():
    fails, leaks, both = ApproxDP(1.0, 1e-6), Gaussian(5.0, {ZERO_OUT: 1.0}), GDP(0.1)
    ledger = Ledger([Parallel({"a": [fails], "b": [leaks, leaks]}, "p"), both])
    alone = [Ledger([fails, both]), Ledger([leaks, leaks, both])]
    for delta in (1.5e-6, 1e-5, 1e-3):
        assert ledger.epsilon(delta, ZERO_OUT) == max(
            one.epsilon(delta, ZERO_OUT) for one in alone
        )
    for epsilon in (0.0, 0.5, 2.0):
        assert ledger.delta(epsilon, ZERO_OUT) == max(
            one.delta(epsilon, ZERO_OUT) for one in alone
        )
    # a part of which Renyi divergences alone are known does not hide what is known of others
    curve, leaks = RDPCurve((2.0, 8.0, 32.0), (0.02, 0.08, 0.32)), Gaussian(3.0, {ZERO_OUT: 1.0})
    mixed = Ledger([Parallel({"a": [curve], "b": [leaks, Pure(0.5)]}, "p")])
    for delta in (1e-6, 1e-3):
        assert mixed.epsilon(delta, ZERO_OUT) == max(
            Ledger(part).epsilon(delta, ZERO_OUT) for part in ([curve], [leaks, Pure(0.5)])
        )
    # a record is in one part of each partition, and in both partitions
    twice = Ledger(
        [
            Parallel({"a": [fails], "b": [leaks]}, "p"),
            Parallel({"a": [fails], "b": [leaks]}, "q"),
        ]
    )
    assert twice.epsilon(1e-5, ZERO_OUT) == max(
        Ledger(pair).epsilon(1e-5, ZERO_OUT)
        for pair in ([fails, fails], [fails, leaks], [leaks, leaks])
    )
    assert twice.epsilon(1e-6, ZERO_OUT) == math.inf


@pytest.mark.parametrize("one", [RDPCurve((2.0,), (0.1,)), ApproxDP(1.0, 1e-9)])
@pytest.mark.parametrize(
    ("kind", "adjacency"), [("positional", ADD_REMOVE), ("keyed", REPLACE_ONE)]
)
def test_choices_of_parts_need_a_cut_that_holds(one, kind, adjacency):
    ledger = Ledger([Parallel({"a": [one], "b": [GDP(0.1)]}, "p", kind)])
    with pytest.raises(AdjacencyError, match="partition 'p'"):
        ledger.epsilon(1e-5, adjacency)
    with pytest.raises(AdjacencyError, match="partition 'p'"):
        ledger.delta(1.0, adjacency)


def test_too_many_combinations_fall_back():
    blocks = [
        Parallel(
            {str(i): [PoissonGaussian(1.0 + i / 10, 0.01)] for i in range(4)},
            f"p{k}",
            partition_kind="keyed",
        )
        for k in range(5)
    ]
    ledger = Ledger(blocks)
    assert ledger.evaluate(DELTA, ADD_REMOVE, "pld").method == "rdp"


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(
        st.sampled_from([e for e in EVENTS if not isinstance(e, (Parallel, RDPCurve))]),
        max_size=4,
    ),
    st.sampled_from([1e-3, 1e-6]),
)
def test_best_is_never_above_any_other_bound(events, delta):
    """Loss distributions lose where only a pure epsilon is known of noise in many dimensions (`KNorm`)."""
    ledger, adjacency = Ledger(events), ZERO_OUT if _fixed(events) else ADD_REMOVE
    best = ledger.evaluate(delta, adjacency)
    figures = {method: ledger.epsilon(delta, adjacency, method) for method in ("rdp", "pld")}
    figures["pure"] = ledger.cost(adjacency).pure
    assert best.epsilon <= min(figures.values())
    assert best.epsilon == figures.get(best.method, best.epsilon)


def _fixed(events: list) -> bool:
    return any(isinstance(event, WORGaussian) for event in events)


# -- wrong input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Laplace(-1.0, SENS), "scale must be >= 0"),
        (lambda: Laplace(1.0, {}), "sens must name at least one adjacency"),
        (lambda: AboveThreshold(1.0, 1.0, SENS, 0), "num_positives must be"),
        (lambda: Pure(math.nan), "eps must be"),
        (lambda: ApproxDP(1.0, 1.0), r"delta must be in \[0, 1\)"),
        (lambda: ZCDP(-0.1), "rho must be"),
        (lambda: ZCDP(0.1, -1.0), "delta must be"),
        (lambda: GDP(math.inf), "mu must be"),
        (lambda: KNorm(1.0, 0), "dim must be"),
        (lambda: RDPCurve((), ()), "equally many"),
        (lambda: RDPCurve((2.0, 2.0), (1.0, 1.0)), "orders must increase"),
        (lambda: RDPCurve((1.0,), (1.0,)), "orders must be finite and > 1"),
        (lambda: RDPCurve((2.0,), (-1.0,)), "values must be"),
        (lambda: Failure(1.0), r"probability must be in \[0, 1\)"),
        (lambda: Failure(0.1, "sometimes"), "kind must be one of"),
        (lambda: PoissonGaussian(1.0, 1.1), "q must be"),
        (lambda: Pure(1.0, ()), "adjacencies must name"),
        (lambda: Pure(1.0, ("neighbor",)), "adjacency must be one of"),
        (lambda: parts("p", partition_kind="colored"), "partition_kind must be one of"),
    ],
)
def test_wrong_fields_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_numbers_of_numpy_become_numbers_of_python():
    assert type(Pure(np.float32(0.5)).eps) is float
    assert CLIP_UNITS[REPLACE_ONE] == 2.0
