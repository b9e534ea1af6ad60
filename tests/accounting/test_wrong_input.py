"""Wrong input of every kind: an error that names the field, and a ledger that is unchanged to the bit."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import numpy as np
import pytest
import torch

from tests.accounting.ledgers import DELTA, STEP, WHOLE, image, part
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    GDP,
    REPLACE_ONE,
    ZCDP,
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
    Repeat,
    Sequential,
    WORGaussian,
    event_from_json,
    event_to_json,
)
from torch_dpsco.errors import (
    PrivacyError,
    SequenceError,
    UnitError,
)

SENS = {REPLACE_ONE: 1.0}
GOOD: list[tuple[type, dict[str, Any]]] = [
    (Gaussian, {"sigma": 1.0, "sens": SENS, "failure": 0.1}),
    (PoissonGaussian, {"noise_multiplier": 1.0, "q": 0.1}),
    (WORGaussian, {"noise_multiplier": 1.0, "batch_size": 2, "dataset_size": 10}),
    (Laplace, {"scale": 1.0, "sens": SENS}),
    (AboveThreshold, {"b_threshold": 1.0, "b_query": 2.0, "sens": SENS, "num_positives": 1}),
    (Pure, {"eps": 1.0}),
    (ApproxDP, {"eps": 1.0, "delta": 0.1}),
    (ZCDP, {"rho": 1.0, "delta": 0.1}),
    (GDP, {"mu": 1.0}),
    (KNorm, {"eps": 1.0, "dim": 3}),
    (Failure, {"probability": 0.1}),
    (Repeat, {"event": NonPrivate(), "n": 2}),
]
WHOLE_NUMBERS = {"batch_size", "dataset_size", "num_positives", "dim", "n"}
NO_NUMBERS = [math.nan, -1, "1", None, True, [1.0], 1j]


def bad_values() -> list[Any]:
    cases = []
    for event, fields in GOOD:
        for name in fields:
            if name in ("sens", "event"):
                continue
            bad = [*NO_NUMBERS, math.inf]
            bad += [1.5, -2] if name in WHOLE_NUMBERS else []
            bad += [1.0] if name in ("failure", "delta", "probability") else []
            bad += [1.0 + 1e-9] if name == "q" else []
            bad += [0] if name in WHOLE_NUMBERS - {"n"} else []
            cases += [
                pytest.param(event, fields, name, item, id=f"{event.__name__}-{name}-{item}")
                for item in bad
            ]
    return cases


@pytest.mark.cases(95, 47)
@pytest.mark.parametrize(("event", "fields", "name", "bad"), bad_values())
def test_every_number_of_every_event_is_checked_and_named(event, fields, name, bad):
    with pytest.raises(ValueError, match=rf"^{name} must be .*\(got ") as caught:
        event(**(fields | {name: bad}))
    shown = bad if isinstance(bad, (str, list, bool)) or bad is None else str(bad).strip("()")
    assert str(shown).split(".")[0] in str(caught.value)


@pytest.mark.parametrize("event", [event for event, fields in GOOD if "sens" in fields])
@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, None, "1", True])
def test_every_sensitivity_is_checked_and_named(event, bad):
    fields = dict(GOOD)[event]
    with pytest.raises(ValueError, match=r"^sens must be .*\(got "):
        event(**(fields | {"sens": {REPLACE_ONE: bad}}))
    with pytest.raises(ValueError, match=r"^adjacency must be one of"):
        event(**(fields | {"sens": {"swap": 1.0}}))


@pytest.mark.parametrize("event", [Pure, ApproxDP, ZCDP, GDP, KNorm])
def test_every_stated_adjacency_is_checked(event):
    fields = dict(GOOD)[event]
    with pytest.raises(ValueError, match=r"^adjacencies must name at least one"):
        event(**fields, adjacencies=())
    with pytest.raises(ValueError, match=r"^adjacency must be one of .*\(got 'swap'\)"):
        event(**fields, adjacencies=("swap",))


@pytest.mark.parametrize("scalar", [np.float64, np.float32, np.array, torch.tensor])
def test_every_number_of_every_event_may_be_a_scalar_of_numpy_or_torch(scalar):
    whole = {np.float64: np.int64, np.float32: np.int32}.get(scalar, scalar)
    for event, fields in GOOD:
        given = {}
        for name, value in fields.items():
            exact = 0.125 if isinstance(value, float) else value  # a number that float32 has too
            given[name] = (
                value
                if name in ("sens", "event")
                else (whole if name in WHOLE_NUMBERS else scalar)(exact)
            )
        made = event(**given)
        plain = event(
            **{
                name: given[name] if name in ("sens", "event") else given[name].item()
                for name in given
            }
        )
        assert made == plain
        assert json.dumps(event_to_json(made)) == json.dumps(event_to_json(plain))
        assert event_from_json(event_to_json(made)) == made


# -- the accountant ---------------------------------------------------------------------------------------------------


@pytest.fixture
def used() -> Accountant:
    accountant = Accountant(adjacency=REPLACE_ONE)
    accountant.authorize(STEP, 3)
    accountant.authorize(part("0"))
    return accountant


QUESTIONS = [
    *[
        (lambda a, d=d: a.get_epsilon(d), "delta must be")
        for d in (0, 0.0, 1, -0.1, 1.5, math.nan, math.inf, "x", None)
    ],
    *[(lambda a, d=d: a.report(d), "delta must be") for d in (0, 1, -0.1, math.nan, "x", None)],
    *[
        (lambda a, e=e: a.get_delta(e), "epsilon must be")
        for e in (-1, math.nan, math.inf, "x", None)
    ],
    (lambda a: a.get_epsilon(DELTA, adjacency="both"), "adjacency must be one of"),
    (lambda a: a.get_epsilon(DELTA, method="prv"), "method must be one of"),
    (lambda a: a.get_epsilon(DELTA, method="gdp"), "method must be"),
    (lambda a: a.max_steps(STEP), "budget must be set"),
]


@pytest.mark.cases(36, 2)
@pytest.mark.parametrize(("ask", "message"), QUESTIONS)
def test_a_wrong_question_is_named_and_changes_nothing(used, ask, message):
    before = image(used)
    with pytest.raises(ValueError, match=message):
        ask(used)
    assert image(used) == before
    assert used.get_epsilon(DELTA) > 0


CHARGES = [
    *[
        (lambda a, c=c: a.authorize(STEP, c), ValueError, "count must be")
        for c in (-1, 1.5, None, "1", True, math.inf)
    ],
    *[(lambda a, c=c: a.record(STEP, c), ValueError, "count must be") for c in (-1, 1.0, None)],
    *[
        (lambda a, e=e: a.authorize(e), ValueError, "event must be")
        for e in ("step", None, 3, STEP.__class__, [STEP])
    ],
    *[
        (
            lambda a, q=q: a.record(PoissonGaussian(1.0, q)),
            ValueError,
            "q must be",
        )
        for q in (1.0001, -0.1, math.nan, None, "x")
    ],
    *[
        (
            lambda a, s=s: a.record(PoissonGaussian(s, 0.1)),
            ValueError,
            "noise_multiplier must be",
        )
        for s in (-1.0, math.nan, math.inf, None, "x")
    ],
    (lambda a: a.authorize(Repeat("step", 2)), ValueError, "event must be"),
    (lambda a: a.authorize(Sequential([STEP, "step"])), ValueError, "event must be"),
    (lambda a: a.authorize(Parallel({"0": [STEP, None]}, "q")), ValueError, "event must be"),
    (
        lambda a: a.authorize(Parallel({"0": [part("1")]}, "q")),
        ValueError,
        "must not contain another",
    ),
    (
        lambda a: a.authorize(Repeat(Parallel({"0": [STEP]}, "p", "keyed"), 2)),
        ValueError,
        "must be cut in one way",
    ),
    (lambda a: a.require_unit("user"), UnitError, "unit must be 'example'"),
    (
        lambda a: setattr(a, "budget", Budget(1.0, DELTA, adjacency=ADD_REMOVE)),
        PrivacyError,
        "budget must be for",
    ),
    (
        lambda a: setattr(a, "budget", Budget(1.0, DELTA, "replace_one", unit="user")),
        PrivacyError,
        "budget must be for",
    ),
]


@pytest.mark.parametrize("phased", [False, True])
@pytest.mark.parametrize(("charge", "error", "message"), CHARGES)
def test_a_wrong_charge_is_named_and_changes_nothing(used, charge, error, message, phased):
    before = image(used)

    by = used
    if phased:
        message = f"{message}|must not contain another|must be cut in one way"
        by = used.part("0", partition="p")
    with pytest.raises(error, match=message):
        charge(by)
    assert image(used) == before
    used.authorize(STEP)
    assert len(used) == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": ""}, "partition must be"),
        ({"partition": "p", "kind": "random"}, "partition_kind must be one of"),
        ({"partition": "p", "key_public": True}, "key_public must be False"),
    ],
)
def test_a_wrong_part_is_refused(used, settings, message):
    with pytest.raises(ValueError, match=message):
        used.part("0", **settings)
    of = used.part("0", partition="p")
    of.authorize(WHOLE.only(REPLACE_ONE))
    with pytest.raises(SequenceError, match="must not be cut further"):
        of.part("1", partition="p")
    used.authorize(STEP)
    assert len(used) == 6


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_copy_charges_nothing_without_a_file_either(used):
    """As in the worker of a DataLoader: what it spends would be forgotten."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for charge in (
                lambda: used.authorize(STEP),
                lambda: used.record(STEP),
            ):
                with pytest.raises(PrivacyError, match="in the process that made it"):
                    charge()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- states -----------------------------------------------------------------------------------------------------------


def altered_states() -> list[Any]:
    keys = ["version", "ledger", "runs", "config", "id", "digest"]
    cases = [
        pytest.param(key, value, id=f"{key}={value}")
        for key in keys
        for value in (None, 5, [], {})
    ]
    return cases + [pytest.param(key, "missing", id=f"no {key}") for key in keys]


@pytest.mark.parametrize(("key", "value"), altered_states())
def test_every_part_of_a_state_is_looked_at(used, key, value):
    state = json.loads(json.dumps(used.state_dict()))
    if value == "missing":
        del state[key]
    else:
        state[key] = value
    fresh = Accountant(adjacency=REPLACE_ONE)
    fresh.authorize(WHOLE)
    before = image(fresh)
    with pytest.raises(ValueError, match="must"):
        fresh.load_state_dict(state)
    assert image(fresh) == before


@pytest.mark.parametrize("version", [0, 1, 2, 4, "3", 2.5, None, -1])
def test_a_state_of_another_version_is_refused_with_the_one_that_is_read(used, version):
    before = image(used)
    with pytest.raises(ValueError, match="version must be 3"):
        used.load_state_dict(used.state_dict() | {"version": version})
    assert image(used) == before


@pytest.mark.parametrize("mechanism", ["rdp", "prv", "gdp"])
def test_a_foreign_state_is_never_added_to_what_was_charged(used, mechanism):
    before = image(used)
    state = {"mechanism": mechanism, "history": [(1.0, 0.1, 5)]}
    with pytest.raises(ValueError, match="of an accountant of torch_dpsco"):
        used.load_state_dict(state)
    assert image(used) == before
