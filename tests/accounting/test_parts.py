"""Designs of one pass over disjoint parts: events, plans, and what they refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_dpsco as dp
from torch_dpsco.accounting.designs import AssignedParts, Draw
from torch_dpsco.accounting.events import (
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    Gaussian,
    Parallel,
    Pure,
    Repeat,
    Sequential,
    clipped_gaussian,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import AdjacencyError, BudgetExceeded

DELTA = 1e-5
BASE = clipped_gaussian(4.0)


def epsilon(event: Any, adjacency: str = "replace_one") -> float:
    return Ledger([event]).epsilon(DELTA, adjacency)


@st.composite
def designs(draw: st.DrawFn) -> dp.Parts:
    """Parts of all four kinds."""
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 30))
        batch = draw(st.integers(1, n))
        design = draw(
            st.sampled_from(
                [dp.Full(n), dp.Poisson(batch, n), dp.Fixed(batch, n), dp.Disjoint(batch, n)]
            )
        )
        most = design.steps_per_epoch if isinstance(design, dp.Disjoint) else 5
        parts.append((design, draw(st.integers(1, most))))
    return dp.Parts(tuple(parts), sum(design.n for design, _ in parts) + draw(st.integers(0, 5)))


def spent(
    design: dp.Parts, bases: list[Any], start: int, stop: int, partition: str = "p"
) -> Ledger:
    """Returns the ledger of the draws start..stop - 1, charged one by one as a loader names them."""
    ledger, k = Ledger(), 0
    for part, (own, draws) in enumerate(design.parts):
        for inner in range(draws):
            if start <= k < stop:
                name = f"{part}/{inner}" if isinstance(own, dp.Disjoint) else str(part)
                ledger.add(design.draw_event(bases[part], Draw(own.batch_size, partition, name)))
            k += 1
    return ledger


@pytest.mark.slow
@settings(derandomize=True, max_examples=40)
@given(design=designs(), data=st.data())
def test_the_plan_of_any_first_draws_is_what_the_ledger_then_holds(
    design: dp.Parts, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, design.steps_per_epoch))
    ledger = spent(design, [BASE] * len(design.parts), 0, k)
    planned = epsilon(design.event(BASE, k))
    assert ledger.epsilon(DELTA, "replace_one") == pytest.approx(planned, rel=1e-9)
    assert ledger.epsilon(DELTA, "replace_one") <= planned * (1 + 1e-12)


@pytest.mark.slow
@settings(derandomize=True, max_examples=40)
@given(design=designs(), data=st.data())
def test_what_is_spent_and_what_is_ahead_are_together_the_whole(
    design: dp.Parts, data: st.DataObject
) -> None:
    noises = [data.draw(st.sampled_from([1.0, 2.0, 8.0])) for _ in design.parts]
    bases = [clipped_gaussian(noise) for noise in noises]
    last = design.steps_per_epoch
    stop = data.draw(st.integers(0, last))
    ledger = spent(design, bases, 0, stop)
    ahead = design.between(stop, last, bases, "p")
    together = ledger.evaluate(DELTA, "replace_one", extra=ahead).epsilon
    whole = spent(design, bases, 0, last).epsilon(DELTA, "replace_one")
    assert together == pytest.approx(whole, rel=1e-9)
    assert together == pytest.approx(epsilon(design.between(0, last, bases)), rel=1e-9)
    assert isinstance(design.between(last, last, bases), Sequential)


@pytest.mark.weekly
@settings(derandomize=True, max_examples=40)
@given(design=designs(), data=st.data())
def test_the_whole_costs_what_the_costliest_part_costs(
    design: dp.Parts, data: st.DataObject
) -> None:
    bases = [clipped_gaussian(data.draw(st.sampled_from([1.0, 2.0, 8.0]))) for _ in design.parts]
    own = [
        epsilon(d.event(base, draws))
        for (d, draws), base in zip(design.parts, bases, strict=True)
    ]
    assert epsilon(design.between(0, design.steps_per_epoch, bases)) == pytest.approx(
        max(own), rel=2e-2
    )
    assert epsilon(design.between(0, design.steps_per_epoch, bases)) >= max(own) * (1 - 1e-9)


def test_a_pure_group_and_gaussian_ones_cost_their_maximum_and_not_that_of_their_curves() -> (
    None
):
    design = dp.Parts(((dp.Full(20), 1), (dp.Disjoint(10, 80), 8)), 100)
    gaussian = epsilon(clipped_gaussian(4.0))
    for share in (0.5, 1.0, 1.5):
        pure = Pure(share * gaussian, ("replace_one", "zero_out"))
        whole = epsilon(design.between(0, 9, [pure, BASE]))
        assert whole == pytest.approx(max(gaussian, epsilon(pure)), rel=1e-4)


def test_partitions_compose_and_parts_of_one_do_not() -> None:
    design = dp.Parts(((dp.Full(5), 2), (dp.Full(5), 2)), 10)
    one = spent(design, [BASE, BASE], 0, 4)
    two = Ledger()
    for name in ("p", "q"):
        for k in range(2):
            for _ in range(2):
                two.add(design.draw_event(BASE, Draw(5, name, str(k))))
    assert one.epsilon(DELTA, "replace_one") == pytest.approx(epsilon(Repeat(BASE, 2)), rel=1e-9)
    assert two.epsilon(DELTA, "replace_one") == pytest.approx(epsilon(Repeat(BASE, 4)), rel=1e-9)


@settings(derandomize=True, max_examples=20)
@given(design=designs())
def test_parts_cut_by_position_refuse_add_remove(design: dp.Parts) -> None:
    with pytest.raises(AdjacencyError):
        epsilon(design.event(BASE, 1), "add_remove")
    with pytest.raises(AdjacencyError):
        spent(design, [BASE] * len(design.parts), 0, 1).epsilon(DELTA, "add_remove")


def test_draws_lie_in_their_parts() -> None:
    design = dp.Parts(((dp.Full(50), 3), (dp.Disjoint(5, 25), 4), (dp.Poisson(2, 5), 1)), n=100)
    assert [design.part_of(k) for k in range(8)] == [0, 0, 0, 1, 1, 1, 1, 2]
    assert (design.steps_per_epoch, design.batch_size, design.one_pass, design.positional) == (
        8,
        50,
        True,
        True,
    )
    with pytest.raises(ValueError, match=r"draw must be < 8 \(got 8\)"):
        design.part_of(8)


@pytest.mark.parametrize(
    ("parts", "n", "words"),
    [
        ((), 5, "at least one"),
        (((dp.Full(6), 1),), 5, "at most n=5 records together"),
        (((dp.Full(3), 1), (dp.Full(3), 1)), 5, r"at most n=5 records together \(got 6\)"),
        (((dp.Full(3), 0),), 5, "draws must be"),
        (((dp.Shuffled(1, 3), 1),), 5, "parts must be"),
        (((dp.Cyclic(1, 3, 2), 1),), 5, "parts must be"),
        (((dp.Parts(((dp.Full(3), 1),), 3), 1),), 5, "parts must be"),
        (((dp.Disjoint(2, 4), 3),), 5, "draws must be <= 2"),
        (((dp.Full(3), 1),), 0, "n must be"),
        (((dp.Full(3), 1),), 3.5, "n must be an integer"),
    ],
    ids=str,
)
def test_parts_that_cannot_be_are_refused_by_name(parts: Any, n: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dp.Parts(parts, n)


def test_more_draws_than_one_pass_are_refused() -> None:
    for design in (dp.Parts(((dp.Full(3), 2),), 3), dp.Assigned(2, 5), dp.Disjoint(2, 5)):
        with pytest.raises(ValueError, match=f"draws must be <= {design.steps_per_epoch}"):
            design.event(BASE, design.steps_per_epoch + 1)
        assert len(Ledger([design.event(BASE, 0)])) == 0


# -- assigned records -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
def test_assigned_batches_hold_under_every_adjacency(adjacency: str) -> None:
    """Whatever is spent on the parts of one assignment costs what one unsampled Gaussian costs."""
    design, ledger = dp.Assigned(6, 26, amplification=False), Ledger()
    assert design.steps_per_epoch == 5
    one = epsilon(BASE, adjacency)
    for k in range(5):
        ledger.add(design.draw_event(BASE, Draw(k, "assigned/x/5", str(k))))
        assert ledger.epsilon(DELTA, adjacency) == pytest.approx(one, rel=1e-12)
        assert epsilon(design.event(BASE, k + 1), adjacency) == one
    ledger.add(design.draw_event(BASE, Draw(6, "assigned/x/5", "0")))
    assert ledger.epsilon(DELTA, adjacency) > 1.2 * one


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
def test_records_are_assigned_to_parts_under_every_adjacency(adjacency: str) -> None:
    """All parts together cost what the costliest of them does; two draws of one part cost more."""
    design = AssignedParts(((dp.Full(6), 1), (dp.Poisson(5, 20), 4)), 26)
    trained = epsilon(dp.Poisson(5, 20).event(BASE, 4), adjacency)
    ledger = Ledger()
    ledger.add(design.draw_event(Pure(0.1, ADJACENCIES), Draw(6, "parts/x", "0", 0)))
    for k in range(4):
        ledger.add(design.draw_event(BASE, Draw(5, "parts/x", "1", 1 + k)))
    assert ledger.epsilon(DELTA, adjacency) == pytest.approx(max(0.1, trained), rel=1e-9)
    planned = design.between(0, 5, [Pure(2.0, ADJACENCIES), BASE])
    assert epsilon(planned, adjacency) == pytest.approx(
        max(2.0, trained), rel=1e-4
    )  # pure: delta is to spare
    assert [
        design.charges_left(Draw(0, "p", "0", k), 9, of_passes=False) for k in (0, 1, 4)
    ] == [
        1,
        4,
        1,
    ]
    by_position = dp.Parts(design.parts, 26)
    if adjacency == "add_remove":
        with pytest.raises(AdjacencyError):
            epsilon(by_position.between(0, 5, [BASE, BASE]), adjacency)


@pytest.mark.parametrize(
    ("parts", "n"),
    [(((dp.Full(6), 1),), 7), (((dp.Full(6), 1), (dp.Fixed(2, 20), 3)), 26), ((), 1)],
)
def test_assigned_parts_are_of_all_records_and_of_designs_without_positions(
    parts: Any, n: int
) -> None:
    with pytest.raises(ValueError, match="parts must"):
        AssignedParts(parts, n)


def test_assigned_batches_of_a_query_of_one_adjacency_hold_under_that_only() -> None:
    base = Gaussian(4.0, {"zero_out": 1.0})
    ledger = Ledger(
        [dp.Assigned(6, 26, amplification=False).draw_event(base, Draw(3, "assigned/x/5", "0"))]
    )
    assert ledger.epsilon(DELTA, "zero_out") > 0
    for adjacency in ("add_remove", "replace_one"):
        with pytest.raises(AdjacencyError):
            ledger.epsilon(DELTA, adjacency)


def test_the_same_partition_cannot_be_cut_by_position_and_by_key() -> None:
    ledger = Ledger(
        [dp.Assigned(6, 26, amplification=False).draw_event(BASE, Draw(3, "x", "0"))]
    )
    with pytest.raises(ValueError, match="cut in one way"):
        ledger.add(dp.Disjoint(6, 26).draw_event(BASE, Draw(6, "x", "1")))


@pytest.mark.parametrize(("batch_size", "n"), [(0, 5), (6, 5), (1.5, 5), (1, 0)])
def test_assigned_sizes_are_checked(batch_size: Any, n: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        dp.Assigned(batch_size, n)


@pytest.mark.parametrize(
    "design", [dp.Assigned(2, 5), dp.Parts(((dp.Full(3), 2), (dp.Poisson(1, 2), 1)), 5)]
)
def test_designs_are_values(design: Any) -> None:
    assert design == dataclasses.replace(design)
    assert hash(design) == hash(dataclasses.replace(design))
    with pytest.raises(dataclasses.FrozenInstanceError):
        design.n = 7
    names = {name: getattr(dp, name) for name in dp.__all__}
    assert eval(repr(design), names) == design  # it enters the digests of checkpoints


# -- deciding ---------------------------------------------------------------------------------------------------------


def test_only_a_part_within_another_one_adds_nothing() -> None:
    """What the accountant admits without a look at epsilon leaves the cost bit for bit."""
    a, b = (Gaussian(sigma, {REPLACE_ONE: 1.0, ZERO_OUT: 1.0}) for sigma in (2.0, 3.0))
    ledger = Ledger([Parallel({"0": [a, a, b]}, "p"), Parallel({"1": [a]}, "p")])
    nothing = [
        Parallel({"1": [a]}, "p"),
        Parallel({"2": [a, b]}, "p"),
        Parallel({"1": [a], "2": [b]}, "p"),
    ]
    something = [
        Parallel({"0": [b]}, "p"),
        Parallel({"1": [a, a]}, "p"),
        Parallel({"2": [b, b]}, "p"),
        Parallel({"2": [a]}, "q"),
        Parallel({"2": [Gaussian(2.5, {REPLACE_ONE: 1.0})]}, "p"),
        a,
        Sequential((Parallel({"1": [a]}, "p"), b)),
        Sequential(()),
    ]
    assert all(ledger.adds_nothing(event) for event in nothing)
    assert not any(ledger.adds_nothing(event) for event in something)
    for event in nothing:
        assert ledger.evaluate(1e-5, REPLACE_ONE, extra=event).epsilon == ledger.epsilon(
            1e-5, REPLACE_ONE
        )
    with pytest.raises(ValueError, match="must be cut in one way"):
        ledger.adds_nothing(Parallel({"1": [a]}, "p", "keyed", key_public=True))


def test_what_was_recorded_past_the_budget_is_not_admitted_as_nothing() -> None:
    step = Parallel({"0": [Gaussian(5.0, {REPLACE_ONE: 1.0})]}, "p")
    accountant = dp.Accountant(dp.Budget(1.5, 1e-5, "replace_one"))
    accountant.authorize(step)
    accountant.authorize(Parallel({"1": [Gaussian(5.0, {REPLACE_ONE: 1.0})]}, "p"))
    accountant.record(Gaussian(1.0, {REPLACE_ONE: 1.0}))
    with pytest.raises(BudgetExceeded):
        accountant.authorize(Parallel({"2": [Gaussian(5.0, {REPLACE_ONE: 1.0})]}, "p"))
