"""Correlated noise: what is added, what is taken back, what it costs, and when past noise is forgotten."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import torch_dpsco as dp
from tests.streams import seeded
from torch_dpsco.accounting.designs import Design, Draw
from torch_dpsco.accounting.events import CLIP_UNITS, clipped_gaussian
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.algorithms.correlated_numbers import square_root
from torch_dpsco.algorithms.oracles import CorrelatedClipped
from torch_dpsco.errors import AdjacencyError, ConditionError
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.sampling import make_sampler

B, N, DIM, STEPS = 4, 20, 3, 10  # five batches of a pass
CYCLE = dp.Cyclic(B, N, 2)


def built(noise: float = 1.0, bands: int = 4, steps: int = STEPS) -> CorrelatedClipped:
    return CorrelatedClipped(1.0, noise, B, square_root(bands), steps)


def released(
    oracle: CorrelatedClipped,
    draw: Draw,
    source: Any,
    rows: Tensor | None = None,
    design: Design = CYCLE,
) -> Tensor:
    oracle.open([torch.zeros(DIM, dtype=torch.float64)])
    if rows is not None:
        oracle.observe(GradBatch([DenseBlock(rows)]))
    oracle.charge(design, draw)
    return oracle.release(source).mean[0].clone()


def draws(start: int = 0, stop: int = STEPS, partition: str = "one") -> list[Draw]:
    return [Draw(B, partition, str(t % 5), t) for t in range(start, stop)]


def white(steps: int) -> list[Tensor]:
    """The fresh noise that `seeded(0)` gives: that of a strategy without bands."""
    oracle, source = built(bands=1), seeded(0)
    return [released(oracle, draw, source) for draw in draws(0, steps)]


def test_a_run_without_rows_releases_the_noise_of_the_strategy() -> None:
    oracle, source = built(), seeded(0)
    strategy = oracle.strategy
    got = torch.stack([released(oracle, draw, source) for draw in draws()])
    matrix = torch.zeros(STEPS, STEPS, dtype=torch.float64)
    for i in range(STEPS):
        for j, c in enumerate(strategy.coefficients[: i + 1]):
            matrix[i, i - j] = c
    fresh = torch.stack(white(STEPS)) * strategy.norm
    torch.testing.assert_close(got, torch.linalg.solve(matrix, fresh), rtol=1e-9, atol=1e-12)


def test_rows_are_clipped_means_on_top_of_the_noise() -> None:
    rows = torch.tensor(
        [[3.0, 0.0, 4.0], [0.0, 0.5, 0.0], [math.nan, 0.0, 0.0]], dtype=torch.float64
    )
    quiet, noisy, source = built(), built(), seeded(0)
    silence = [released(quiet, draw, source) for draw in draws(0, 3)]
    source = seeded(0)
    for draw, noise in zip(draws(0, 3), silence, strict=True):
        mean = released(noisy, draw, source, rows) - noise
        torch.testing.assert_close(
            mean, torch.tensor([0.6, 0.5, 0.8], dtype=torch.float64) / B, rtol=1e-3, atol=1e-9
        )


def test_fresh_noise_is_larger_by_the_norm() -> None:
    """And by room for what rounding of the noise that is taken back may add."""
    for bands, steps, noise in ((1, 1, 0.5), (4, STEPS, 1.0), (16, 1000, 20.0)):
        ordinary = dp.oracles.Clipped(1.0, noise, B)
        oracle = CorrelatedClipped(1.0, noise, B, square_root(bands), steps)
        for each in (ordinary, oracle):
            each.open([torch.zeros(DIM)])
        nominal = ordinary.noise_std * oracle.strategy.norm
        room = noise * oracle.strategy.rounding(steps, max(steps, bands), DIM)
        assert nominal / (1.0 - room) <= oracle.noise_std <= nominal * (1.0 + 2.0 * room + 1e-13)
        assert oracle.noise_std > nominal
        assert oracle.sensitivity("replace_one") == ordinary.sensitivity("replace_one")


def test_a_step_is_charged_as_an_ordinary_one() -> None:
    oracle = built(noise=2.0)
    draw = draws()[0]
    assert oracle.charge(CYCLE, draw) == (
        CYCLE.draw_event(clipped_gaussian(2.0), draw),
        1,
        False,
    )
    with pytest.raises(AdjacencyError):
        Ledger([oracle.charge(CYCLE, draw).event]).epsilon(1e-5, "add_remove")


@pytest.mark.parametrize(
    "design",
    [
        dp.Poisson(B, N),
        dp.Fixed(B, N),
        dp.Full(N),
        dp.Assigned(B, N),
        dp.Parts(((dp.Full(N), 2),), N),
    ],
)
def test_designs_that_keep_no_distance_are_refused(design: Design) -> None:
    with pytest.raises(AdjacencyError, match="design must be Disjoint, Cyclic or Shuffled"):
        built().charge(design, Draw(B, "one", "0"))


def test_fewer_batches_than_bands_are_refused() -> None:
    with pytest.raises(ConditionError, match="bands must be <= 5, the batches of a pass"):
        built(bands=6).charge(CYCLE, draws()[0])
    built(bands=6).charge(dp.Disjoint(B, N), draws()[0])  # one pass: no record comes again


def test_noise_in_integers_is_refused() -> None:
    with pytest.raises(ConditionError, match="secure must be None for correlated noise"):
        built().use_exact_noise()


def test_a_noise_that_rounding_would_hide_is_refused() -> None:
    oracle = CorrelatedClipped(1.0, 1e12, B, square_root(8), 1000)
    oracle.open([torch.zeros(DIM)])
    with pytest.raises(ConditionError, match="noise_multiplier must be smaller"):
        oracle.noise_std  # noqa: B018


# -- what is forgotten ------------------------------------------------------------------------------------------------

INTERRUPTIONS: dict[str, Any] = {
    "another partition": lambda oracle: draws(3, 4, "two"),
    "a batch is left out": lambda oracle: draws(4, 5),
    "the same batch again": lambda oracle: draws(2, 3),
    "the pass begins again": lambda oracle: draws(0, 1),
    "a lost step": lambda oracle: oracle.lose(3, halted=False) or draws(3, 4),
    "a checkpoint": lambda oracle: oracle.restore(oracle.state()) or draws(3, 4),
    "a plan in between": lambda oracle: draws(3, 4),
}


@pytest.mark.parametrize("how", INTERRUPTIONS)
def test_noise_is_forgotten_where_steps_are_not_known_to_be_apart(how: str) -> None:
    """The release is then that of a run which begins: fresh noise alone."""
    oracle, source = built(), seeded(0)
    for draw in draws(0, 3):
        released(oracle, draw, source)
    (draw,) = INTERRUPTIONS[how](oracle)
    fresh = white(4)[3] * oracle.strategy.norm
    oracle.open([torch.zeros(DIM, dtype=torch.float64)])
    oracle.charge(CYCLE, draw)
    if how == "a plan in between":
        oracle.charge(CYCLE, Draw(0, "planned", "0"))
    got = oracle.release(source).mean[0]
    torch.testing.assert_close(got, fresh, rtol=1e-9, atol=1e-12)
    (after,) = draws(int(draw.part) + 1, int(draw.part) + 2, draw.partition)
    if how != "a plan in between":
        assert not torch.equal(
            released(oracle, after, source), white(5)[4] * oracle.strategy.norm
        )  # it goes on


def test_a_release_that_was_not_charged_takes_nothing_back() -> None:
    oracle, source = built(), seeded(0)
    released(oracle, draws()[0], source)
    oracle.open([torch.zeros(DIM, dtype=torch.float64)])
    got = oracle.release(source).mean[0]
    torch.testing.assert_close(got, white(2)[1] * oracle.strategy.norm, rtol=1e-9, atol=1e-12)


def test_noise_is_forgotten_after_the_planned_steps() -> None:
    oracle, source = built(steps=3), seeded(0)
    got = [released(oracle, draw, source) for draw in draws(0, 4)]
    fresh = [each * oracle.strategy.norm for each in white(4)]
    assert not torch.allclose(got[2], fresh[2])
    torch.testing.assert_close(got[3], fresh[3], rtol=1e-9, atol=1e-12)


def test_copies_and_checkpoints_hold_no_past_noise() -> None:
    oracle, source = built(), seeded(0)
    for draw in draws(0, 3):
        released(oracle, draw, source)
    assert len(oracle._past) == 3
    assert oracle.state() == {}
    assert repr(oracle._past) == "_Past(SECRET)"
    for copied in (copy.copy, copy.deepcopy, lambda past: pickle.loads(pickle.dumps(past))):
        twin = copied(oracle._past)
        assert (len(twin), twin.maxlen) == (0, 3)
    assert len(copy.deepcopy(oracle)._past) == 0
    assert all(
        "tensor" not in str(value)
        for value in (oracle.settings(), oracle.metrics(), repr(oracle))
    )


# -- the design -------------------------------------------------------------------------------------------------------


@given(batch=st.integers(1, 8), n=st.integers(1, 30), passes=st.integers(1, 4))
def test_batches_come_in_the_same_order_in_each_pass(batch: int, n: int, passes: int) -> None:
    design = dp.Cyclic(min(batch, n), n, passes)
    made = list(make_sampler(design).draws())
    assert len(made) == design.steps_per_epoch == design.batches * passes
    assert len({draw.partition for draw, _ in made}) == 1
    for t, (draw, records) in enumerate(made):
        assert (draw.index, draw.part) == (t, str(t % design.batches))
        assert records.tolist() == made[t % design.batches][1].tolist()
    assert sorted(i for _, records in made[: design.batches] for i in records.tolist()) == list(
        range(n)
    )


@given(start=st.integers(0, 10), more=st.integers(0, 10))
def test_the_cost_of_steps_ahead_is_that_of_their_draws(start: int, more: int) -> None:
    stop, base = min(start + more, 10), clipped_gaussian(3.0)
    start = min(start, stop)
    made = [CYCLE.draw_event(base, draw) for draw in draws(0, start)]
    every = [*made, *(CYCLE.draw_event(base, draw) for draw in draws(start, stop))]
    for adjacency in ("zero_out", "replace_one"):
        expected = Ledger(every).epsilon(1e-5, adjacency) if every else 0.0
        ahead = (
            Ledger([*made, CYCLE.between(start, stop, [base], "one")]).epsilon(1e-5, adjacency)
            if every
            else 0.0
        )
        assert ahead == expected
        if not start and stop:
            assert Ledger([CYCLE.event(base, stop)]).epsilon(1e-5, adjacency) == expected


def test_wrong_numbers_of_a_cycle_are_refused() -> None:
    with pytest.raises(ValueError, match="passes must be"):
        dp.Cyclic(B, N, 0)
    with pytest.raises(ValueError, match="draws must be <= 10"):
        CYCLE.event(clipped_gaussian(1.0), 11)
    assert CLIP_UNITS["replace_one"] == 2.0
