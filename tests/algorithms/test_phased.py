"""Oracles one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.problems import release_in_float64
from torch_dpsco.accounting.designs import Draw, Full
from torch_dpsco.accounting.events import CLIP_UNITS
from torch_dpsco.algorithms.clips import PilotClipped, QuantilePilot
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.step.oracle import Clipped, Phased

QUERY = [torch.zeros(2)]
ROUNDING = 1 + 2.0**-6


def rows(*values: list[float]) -> GradBatch:
    return GradBatch([DenseBlock(torch.tensor(values))])


def phased(noise: float = 0.0) -> Phased:
    return Phased([(Clipped(1.0, noise, 10), 3), (Clipped(0.5, 2 * noise, 5), 2)])


def test_each_step_is_answered_by_the_oracle_of_its_phase() -> None:
    oracle = phased()
    for step, (clip, batch) in enumerate([(1.0, 10)] * 3 + [(0.5, 5)] * 2):
        oracle.open(QUERY, step)
        oracle.observe(rows([3.0, 4.0]))
        assert oracle.batch_size == batch
        assert oracle.sensitivity("replace_one") == pytest.approx(2 * clip / batch, rel=1e-2)
        answer = oracle.release(torch.Generator()).mean[0]
        assert float(answer.norm()) == pytest.approx(clip / batch, rel=1e-2)
        assert oracle.metrics() == oracle.phases[step // 3][0].metrics()
    with pytest.raises(SequenceError, match="all 5 steps"):
        oracle.open(QUERY, 5)


def test_events_are_those_of_the_phases() -> None:
    oracle = phased(4.0)
    assert [member.event().sigma for member in oracle.members] == [4.0, 8.0]
    oracle.open(QUERY, 4)
    assert oracle.event().sigma == 8.0
    assert oracle.charge(Full(10), Draw(10)) == (oracle.event(), 1, False)


def test_rows_of_one_phase_never_enter_the_release_of_another() -> None:
    oracle = phased()
    oracle.open(QUERY, 2)
    oracle.observe(rows([3.0, 4.0]))
    oracle.open(QUERY, 3)
    oracle.observe(rows([0.0, 0.25]))
    assert oracle.release(torch.Generator()).mean[0].tolist() == pytest.approx([0.0, 0.05])
    oracle.open(QUERY, 0)
    assert not oracle.release(torch.Generator()).mean[0].any()
    oracle.open(QUERY, 1)
    oracle.observe(rows([3.0, 4.0]))
    oracle.discard()
    assert not oracle.release(torch.Generator()).mean[0].any()


SPECIAL = [0.0, 1e-42, 1e30, 3e38, float("inf"), float("-inf"), float("nan"), 1.0, -2.0]
row = st.lists(
    st.one_of(st.sampled_from(SPECIAL), st.floats(-10, 10, width=32)), min_size=2, max_size=2
)


@settings(derandomize=True, max_examples=80)
@given(
    batch=st.lists(row, min_size=1, max_size=6),
    other=row,
    step=st.integers(0, 4),
    data=st.data(),
)
def test_no_replaced_row_moves_a_release_by_more_than_the_sensitivity(
    batch: list[list[float]], other: list[float], step: int, data: st.DataObject
) -> None:
    oracle, place, means = phased(), data.draw(st.integers(0, len(batch) - 1)), []
    for replaced in (batch[place], other, [0.0, 0.0]):
        changed = [*batch[:place], replaced, *batch[place + 1 :]]
        oracle.open(QUERY, step)
        release_in_float64(oracle.phases[step // 3][0])
        oracle.observe(rows(*changed))
        means.append(oracle.release(torch.Generator()).mean[0].clone())
    clip = [1.0, 0.5][step // 3] / [10, 5][step // 3]
    for adjacency, (a, b) in {"replace_one": (0, 1), "zero_out": (0, 2)}.items():
        distance = float((means[a] - means[b]).norm())
        assert distance <= oracle.sensitivity(adjacency)
        assert oracle.sensitivity(adjacency) <= CLIP_UNITS[adjacency] * clip * ROUNDING


def test_a_pilot_comes_first_and_fixes_the_clip_of_later_phases() -> None:
    pilot = QuantilePilot(4, 1e6, quantile=0.5)
    oracle = Phased([(pilot, 1), (PilotClipped(pilot, 0.0, 2), 2)])
    with pytest.raises(SequenceError, match="pilot"):
        oracle.open(QUERY, 1)
    oracle.open(QUERY, 0)
    oracle.observe(rows([1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]))
    assert oracle.release(torch.Generator().manual_seed(0)).still
    assert 2.0 <= pilot.chosen < 3.0
    oracle.open(QUERY, 1)
    oracle.observe(rows([9.0, 0.0]))
    assert float(oracle.release(torch.Generator()).mean[0][0]) == pytest.approx(
        pilot.chosen / 2, rel=1e-3
    )
    with pytest.raises(SequenceError, match="has released its threshold"):
        oracle.open(QUERY, 0)


def test_states_are_restored_and_settings_tell_plans_apart() -> None:
    def make(quantile: float = 0.5) -> Phased:
        pilot = QuantilePilot(2, 1e6, quantile=quantile)
        return Phased([(pilot, 1), (PilotClipped(pilot, 1.0, 2), 2)])

    first, second = make(), make()
    first.open(QUERY, 0)
    first.observe(rows([1.0, 0.0], [2.0, 0.0]))
    first.release(torch.Generator().manual_seed(0))
    second.restore(first.state())
    second.open(QUERY, 1)
    assert second.phases[1][0].clip == first.phases[0][0].chosen
    assert first.settings() == second.settings() != make(0.6).settings()
    bad = {**first.state(), "0": {"chosen": 0.123}}
    with pytest.raises(ValueError, match="chosen must be on the grid"):
        make().restore(bad)


def test_an_oracle_is_taken_once_with_all_of_its_parts() -> None:
    shared = Clipped(1.0, 0.0, 10)
    Phased([(shared, 2), (shared, 3)]).take()
    with pytest.raises(SequenceError, match="another optimizer's"):
        Phased([(shared, 2)]).take()
    with pytest.raises(SequenceError, match="another optimizer's"):
        shared.take()


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        ([], "phases must hold an oracle"),
        ([(Clipped(1.0, 0.0, 1), 0)], "steps must be"),
        ([("clip", 1)], "phases must be a list, each item a tuple of .*a MeanOracle"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(phases: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Phased(phases)


def test_numbers_of_phases_are_fixed() -> None:
    oracle = phased(1.0)
    for name in ("batch_size", "phases", "members", "unit"):
        with pytest.raises((PrivacyError, AttributeError)):
            setattr(oracle, name, 1)


def test_phases_of_different_units_are_refused() -> None:
    from torch_dpsco.algorithms.oracles import UserClipped

    users = UserClipped(Clipped(1.0, 1.0, 5), n_users=5)
    assert Phased([(users, 2)]).unit == "user"
    with pytest.raises(ValueError, match="the same unit in each phase"):
        Phased([(Clipped(1.0, 1.0, 5), 1), (UserClipped(Clipped(1.0, 1.0, 5), n_users=5), 2)])
