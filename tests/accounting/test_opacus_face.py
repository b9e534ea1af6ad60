from __future__ import annotations

import copy
import warnings

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import (
    GaussianAccountant,
    PRVAccountant,
    RDPAccountant,
    create_accountant,
)
from opacus.accountants.utils import get_noise_multiplier
from torch import nn
from torch.utils.data import DataLoader

from tests.accounting.ledgers import DELTA, STEP, WHOLE, image, part
from tests.accounting.opacus_script import DATA, Script
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import ADD_REMOVE, REPLACE_ONE, PoissonGaussian
from torch_dpsco.errors import PrivacyError

# -- contract ---------------------------------------------------------------------------------------------------------


def test_opacus_makes_our_accountant_by_name():
    assert type(create_accountant("dpsco")) is Accountant
    assert Accountant.mechanism() == create_accountant("dpsco").mechanism() == "dpsco"


def test_make_private_charges_every_step():
    script = Script()
    script.steps(10)
    assert script.accountant.history == [(1.0, 0.25, 10)]
    assert len(script.accountant) == 10
    assert script.accountant.adjacency == ADD_REMOVE
    assert script.engine.get_epsilon(DELTA) == script.accountant.ledger.epsilon(
        DELTA, ADD_REMOVE
    )


@pytest.mark.slow
def test_our_epsilon_is_between_half_of_opacus_renyi_figure_and_all_of_it():
    for noise, rate, steps in ((1.0, 0.01, 500), (0.7, 0.1, 50), (4.0, 0.004, 1000)):
        ours, theirs = Accountant(), RDPAccountant()
        ours.history = theirs.history = [(noise, rate, steps)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Opacus: the best order is the last
            figure = theirs.get_epsilon(DELTA)
        assert 0.4 * figure < ours.get_epsilon(DELTA) <= figure * (1 + 1e-9)


@pytest.mark.slow
def test_make_private_with_epsilon_reaches_its_target():
    engine, model = PrivacyEngine(accountant="dpsco"), nn.Linear(3, 1)
    _, optimizer, _ = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=16, shuffle=True),
        target_epsilon=2.0,
        target_delta=DELTA,
        epochs=3,
        max_grad_norm=1.0,
    )
    check = Accountant()
    check.history = [(optimizer.noise_multiplier, 0.25, 12)]
    assert 1.9 < check.get_epsilon(DELTA) <= 2.0
    assert len(engine.accountant) == 0


@pytest.mark.slow
def test_calibration_by_opacus_never_needs_more_noise_than_its_own_accountant_and_small_targets_are_reached():
    setting = {
        "target_delta": DELTA,
        "sample_rate": 0.01,
        "steps": 1000,
        "epsilon_tolerance": 1e-3,
    }
    ours = get_noise_multiplier(target_epsilon=1.0, accountant="dpsco", **setting)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs: the best order is the last
        theirs = get_noise_multiplier(target_epsilon=1.0, accountant="rdp", **setting)
    assert ours <= theirs + 1e-3
    small = get_noise_multiplier(
        target_epsilon=0.05, accountant="dpsco", **(setting | {"epsilon_tolerance": 1e-5})
    )
    assert small <= 20.4  # theirs: "too low"


def test_checkpoints_of_opacus_hold_the_whole_ledger(tmp_path):
    script, other = Script(), Script()
    script.steps(6)
    script.accountant.record(WHOLE, 2)
    script.engine.save_checkpoint(
        path=tmp_path / "c", module=script.model, optimizer=script.optimizer
    )
    other.engine.load_checkpoint(
        path=tmp_path / "c", module=other.model, optimizer=other.optimizer
    )
    assert image(other.accountant) == image(script.accountant)
    other.steps(1)
    assert len(other.accountant) == 9
    assert len(script.accountant) == 8


def test_states_share_nothing_with_their_accountant():
    source, target = Accountant(), Accountant()
    source.step(noise_multiplier=1.0, sample_rate=0.1)
    state = source.state_dict()
    target.load_state_dict(state)
    frozen = copy.deepcopy(state)
    for accountant in (source, target):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert state == frozen
    before = image(target)
    state["ledger"][0]["count"] = 0
    state["config"]["unit"] = "user"
    state["runs"].clear()
    assert image(target) == before
    given = {"kept": 1}
    assert source.state_dict(given) is given
    assert given["kept"] == 1
    assert given["mechanism"] == "dpsco"


# -- history ----------------------------------------------------------------------------------------------------------


def test_history_is_settable_and_replaces_the_ledger():
    accountant = Accountant()
    for steps in (5, 50, 0):
        accountant.history = [(2.0, 0.1, steps), (1.5, 0.2, 1)]
        assert len(accountant) == steps + 1
        plain = Accountant()
        plain.record(PoissonGaussian(2.0, 0.1), steps)
        plain.record(PoissonGaussian(1.5, 0.2))
        assert accountant.get_epsilon(DELTA) == plain.get_epsilon(DELTA, adjacency=ADD_REMOVE)
    accountant.history = []
    assert (len(accountant), accountant.history, accountant.get_epsilon(DELTA)) == (0, [], 0.0)


def test_history_cannot_be_assigned_over_authorized_events():
    accountant = Accountant()
    accountant.step(noise_multiplier=2.0, sample_rate=0.01)
    accountant.history = [(2.0, 0.01, 2)]
    for charge in (accountant.authorize, accountant.record):
        other = Accountant()
        getattr(other, charge.__name__)(STEP)
        with pytest.raises(PrivacyError, match="history must not replace events"):
            other.history = []
    for event in (WHOLE, part("0")):
        accountant.record(event)
    assert accountant.history == [(2.0, 0.01, 2)]
    before = image(accountant)
    with pytest.raises(PrivacyError, match="history must not replace events"):
        accountant.history = []
    assert image(accountant) == before


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ([(1.0, 2.0, 3)], r"(q|sample_rate) must be in \[0, 1\]"),
        ([(-1.0, 0.1, 3)], "noise_multiplier must be >= 0"),
        ([(1.0, 0.1, 3), (1.0, 0.1, -1)], "steps must be an integer >= 0"),
        ([(1.0, 0.1, 2.5)], "steps must be an integer"),
        ([(1.0, 0.1)], "history must hold"),
        ([(float("nan"), 0.1, 1)], "noise_multiplier"),
    ],
)
def test_a_bad_history_leaves_the_ledger(history, message):
    accountant = Accountant()
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    before = image(accountant)
    with pytest.raises(ValueError, match=message):
        accountant.history = history
    assert image(accountant) == before


def test_a_replaced_history_is_another_history():
    accountant = Accountant()
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    state = accountant.state_dict()
    accountant.history = [(1.0, 0.1, 1)]
    with pytest.raises(PrivacyError, match="would forget events"):
        accountant.load_state_dict(state)


# -- steps and questions ----------------------------------------------------------------------------------------------


def test_steps_with_one_key_share_a_counter_and_tensors_are_read_each_time():
    accountant, noise = Accountant(), torch.tensor(1.0)
    for _ in range(5):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    accountant.step(noise_multiplier=noise, sample_rate=0.1)
    noise += 1.0
    accountant.step(noise_multiplier=noise, sample_rate=0.1)
    noise += 1.0
    accountant.step(noise_multiplier=noise, sample_rate=0.1)
    accountant.step(noise_multiplier=1, sample_rate=0.1)
    assert accountant.history == [(1.0, 0.1, 7), (2.0, 0.1, 1), (3.0, 0.1, 1)]


@pytest.mark.parametrize(
    "bad",
    [
        {"sample_rate": 1.5},
        {"sample_rate": -0.1},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": None},
    ],
)
def test_a_bad_step_is_refused_and_charges_nothing(bad):
    accountant = Accountant()
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    before = image(accountant)
    with pytest.raises(
        ValueError,
        match=next(iter(bad)) if "noise_multiplier" in bad else "(q|sample_rate) must be in",
    ):
        accountant.step(**({"noise_multiplier": 1.0, "sample_rate": 0.1} | bad))
    assert image(accountant) == before


def test_a_step_that_was_made_is_charged_past_the_budget():
    accountant = Accountant(Budget(0.1, DELTA, adjacency=ADD_REMOVE))
    for _ in range(3):
        accountant.step(noise_multiplier=0.5, sample_rate=0.5)
    assert len(accountant) == 3
    assert accountant.get_epsilon(DELTA) > 0.1


def test_poisson_false_and_misspelled_keywords_are_refused():
    accountant = Accountant()
    accountant.history = [(1.0, 0.01, 500)]
    with pytest.raises(TypeError, match="poisson"):
        accountant.get_epsilon(DELTA, poisson=False)
    with pytest.raises(TypeError, match="adjacancy"):
        accountant.get_epsilon(DELTA, adjacancy=REPLACE_ONE)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("foreign", [RDPAccountant, PRVAccountant, GaussianAccountant])
def test_states_of_opacus_accountants_are_taken_when_asked(foreign):
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # the one of Gaussian accounting warns of itself, for good reason
        theirs = foreign()
    for _ in range(7):
        theirs.step(noise_multiplier=1.0, sample_rate=0.1)
    ours = Accountant()
    with pytest.raises(ValueError, match=r"accountant\.history = its history"):
        ours.load_state_dict(theirs.state_dict())
    ours.history = theirs.history
    assert ours.history == [(1.0, 0.1, 7)]
    assert ours.adjacency == ADD_REMOVE
    assert any(
        "7 steps as Opacus says, not verified" in line for line in ours.report(DELTA).assumptions
    )
    ours.step(noise_multiplier=1.0, sample_rate=0.1)
    assert theirs.history == [(1.0, 0.1, 7)]
    before = image(ours)
    with pytest.raises(ValueError, match=r"(q|sample_rate) must be in"):
        Accountant().history = [(1.0, 4.0, 1)]
    assert image(ours) == before
