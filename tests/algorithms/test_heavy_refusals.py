"""What the schedules of localized methods refuse, and how they say it."""

from __future__ import annotations

import math

import pytest

from tests.reference.papers.heavy_tailed import (
    boosted_localized_schedule,
    localized_schedule,
    localized_schedule_ballfree,
    localized_schedule_minibatch,
    localized_schedule_paper,
    reduction_schedule,
    reduction_sizes,
)
from torch_dpsco.algorithms.localized_numbers import (
    LocalizedSchedule,
)
from torch_dpsco.errors import ConditionError

TASK = {
    "n": 5000,
    "dim": 10,
    "rho": 0.5,
    "moment_order": 2.0,
    "second_moment": 1.0,
    "diameter": 2.0,
}
TIGHT = TASK | {"moment_2k": 1.5, "max_steps": None}
BOOSTED = TASK | {"moment": 1.3, "max_steps": None}
REDUCED = TIGHT | {"strong_convexity": 0.5}
PLANS = [
    (localized_schedule_ballfree, TIGHT),
    (localized_schedule, TIGHT),
    (boosted_localized_schedule, BOOSTED | {"copies": 3}),
    (boosted_localized_schedule, BOOSTED | {"copies": 5, "ball": False, "conservative": True}),
    (reduction_schedule, REDUCED),
]
ALL_PLANS = pytest.mark.parametrize(
    ("planner", "task"),
    PLANS,
    ids=["ball-free", "ball", "boosted", "boosted ball-free", "reduction"],
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "n must be"),
        ({"n": 1}, "n must be >= "),
        ({"dim": 0}, "dim must be an integer >= 1"),
        ({"rho": 0.0}, "rho must be > 0"),
        ({"rho": math.inf}, "rho must be finite"),
        ({"moment_order": 1.0}, "moment_order must be finite and > 1"),
        ({"moment_order": 1.5}, "moment_order must be >= 2"),
        ({"second_moment": 0.0}, "second_moment must be > 0"),
        ({"first_moment": 0.0}, "first_moment must be > 0"),
        ({"diameter": 0.0}, "diameter must be > 0"),
        ({"max_steps": 0}, "max_steps must be an integer >= 1"),
        ({"reg": 0.0}, "reg must be > 0"),
        ({"adjacency": "swap"}, "adjacency must be one of"),
    ],
)
@ALL_PLANS
def test_bad_values_are_named(planner, task, change, message):
    with pytest.raises(ValueError, match=message):
        planner(**task | change)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: localized_schedule(**TIGHT | {"diameter": math.inf}),
            "diameter must be finite",
        ),
        (
            lambda: localized_schedule_ballfree(**TIGHT | {"diameter": math.inf}),
            "diameter must be finite",
        ),
        (lambda: localized_schedule(**TIGHT | {"moment_2k": 0.0}), "moment_2k must be > 0"),
        (
            lambda: localized_schedule(**TIGHT | {"min_phase": 3000}),
            "min_phase must be <= n/2=2500",
        ),
        (
            lambda: boosted_localized_schedule(**BOOSTED | {"copies": 0}),
            "copies must be an integer >= 1",
        ),
        (lambda: boosted_localized_schedule(**BOOSTED | {"copies": 2501}), "n must be >= 5002"),
        (lambda: boosted_localized_schedule(**BOOSTED | {"phases": 13}), "phases must be <= 12"),
        (lambda: boosted_localized_schedule(**BOOSTED | {"moment": 0.0}), "moment must be > 0"),
        (
            lambda: reduction_schedule(**REDUCED | {"strong_convexity": 0.0}),
            "strong_convexity must be > 0",
        ),
        (lambda: reduction_sizes(1), "n must be >= 2"),
        (
            lambda: localized_schedule_paper(
                n=1, dim=1, paper_epsilon=1, moment_order=2, moment_2k=1, lr=1
            ),
            "n must be",
        ),
        (
            lambda: localized_schedule_paper(
                n=9, dim=1, paper_epsilon=1, moment_order=2, moment_2k=1, lr=1, power=0.5
            ),
            "power must be >= 1",
        ),
        (lambda: LocalizedSchedule(phases=(), rho=1.0), "phases must hold at least one phase"),
    ],
)
def test_bad_values_of_single_functions_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": [4]}, "one number for each of 2 phases"),
        ({"batch_sizes": [3, 1]}, "batch_sizes must be <= the records of their phase, 2"),
        ({"dim": 0}, "dim must be an integer >= 1"),
    ],
)
def test_bad_minibatches_are_named(change, message):
    law = {
        "n": 4,
        "dim": 1,
        "moment_order": 2.0,
        "second_moment": 1.0,
        "moment_2k": 1.5,
        "diameter": 2.0,
    }
    given = {"batch_sizes": [1, 1], "steps": [4, 4], "noise_multipliers": [1.0, 1.0]}
    with pytest.raises(ValueError, match=message):
        localized_schedule_minibatch(**law | given | change)


def test_a_condition_names_the_way_out():
    with pytest.raises(ConditionError, match=r"moment_order must be >= 2.*give a clip"):
        localized_schedule_ballfree(**TIGHT | {"moment_order": 1.5})
