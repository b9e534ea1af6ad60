from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_dpsco.problem import Phase, Schedule


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_steps_are_located_phase_by_phase_in_order(lengths):
    schedule = Schedule(tuple(Phase(steps) for steps in lengths))
    assert schedule.steps == sum(lengths)
    expected = [(index, k) for index, steps in enumerate(lengths) for k in range(steps)]
    assert [schedule.locate(step) for step in range(sum(lengths))] == expected
    with pytest.raises(
        ValueError, match=rf"step must be < {sum(lengths)}, .* \(got {sum(lengths)}\)"
    ):
        schedule.locate(sum(lengths))


def test_a_last_phase_without_steps_never_ends():
    schedule = Schedule((Phase(2), Phase(lr=0.1)))
    assert schedule.steps is None
    assert [schedule.locate(step) for step in (0, 1, 2, 10**9)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 10**9 - 2),
    ]


def test_the_default_is_one_phase_without_end():
    assert Schedule() == Schedule((Phase(None, None),))
    assert Schedule().locate(7) == (0, 7)


@pytest.mark.parametrize("step", [-1, 0.5, True, None])
def test_a_step_is_a_whole_number(step):
    with pytest.raises(ValueError, match="step must be an integer"):
        Schedule().locate(step)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Phase(0), r"steps must be an integer >= 1 \(got 0\)"),
        (lambda: Phase(2.0), r"steps must be an integer \(got 2\.0\)"),
        (lambda: Phase(lr=0), r"lr must be > 0 \(got 0\.0\)"),
        (lambda: Phase(lr=math.nan), r"lr must be > 0 \(got nan\)"),
        (lambda: Phase(lr=math.inf), r"lr must be finite \(got inf\)"),
        (lambda: Schedule(()), r"phases must hold at least one phase \(got none\)"),
        (lambda: Schedule((Phase(), Phase(2))), "phases must have steps, except the last one"),
    ],
)
def test_a_bad_number_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("scalar", [np.float64, torch.tensor])
def test_numbers_of_numpy_and_torch_become_plain_ones(scalar):
    """The repr of a schedule enters the digests of checkpoints, and a tensor could be changed afterwards."""
    phase = Phase(np.int64(3), lr=scalar(0.5))
    assert (type(phase.steps), type(phase.lr)) == (int, float)
    assert repr(Schedule([phase])) == repr(Schedule((Phase(3, 0.5),)))
    assert hash(Schedule([phase])) == hash(Schedule((Phase(3, 0.5),)))


def test_a_schedule_cannot_be_changed():
    phases = [Phase(2)]
    schedule = Schedule(phases)
    phases.append(Phase(3))
    assert schedule.steps == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.phases = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.phases[0].steps = 7
