"""A charge that pays for several releases: whatever would make one of them twice is refused, whoever wrote the oracle.

The oracle here is an outsider's: its noise repeats what earlier releases had, it is charged once for a run, and it has
no protection of its own. Each refusal has a test that fails when it is taken out.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.test_mutations import assert_caught, nothing
from torch_dpsco.accounting import journal
from torch_dpsco.accounting.designs import Design, Draw, positional_event
from torch_dpsco.accounting.events import REPLACE_ONE, Sequential
from torch_dpsco.errors import SequenceError, UtilityWarning
from torch_dpsco.noise import SecretState
from torch_dpsco.problem import Phase, Schedule
from torch_dpsco.step import optimizer as saved
from torch_dpsco.step import run as charges
from torch_dpsco.step.oracle import Charge, Clipped, Release

N, STEPS = 24, 6


class Repeating(Clipped):
    """Each release takes the noise of the one before away again, so that nobody may see one of them twice."""

    def __init__(self, steps: int = STEPS) -> None:
        super().__init__(1.0, 2.0, 8)
        self.steps, self._past = steps, torch.zeros(2)

    def charge(self, design: Design, draw: Draw) -> Charge:
        return Charge(positional_event(self.event()), covers=self.steps)

    def release(self, generator: Any) -> Release:
        past, self._past = self._past, self.noise_std * torch.randn(2)
        release = super().release(generator)
        release.mean[0].add_((self._past - past).reshape(1, 2))
        return release

    def state(self) -> dict[str, Any]:
        return {"past": self._past.clone()}

    def restore(self, state: dict[str, Any]) -> None:
        self._past = state["past"].clone()


def built(
    oracle: Clipped | None = None,
    design: Design | None = None,
    ledger: Path | None = None,
    steps: int = STEPS,
) -> tuple[nn.Module, dp.PrivateOptimizer]:
    model = dp.attach(nn.Linear(2, 1, bias=False))
    optimizer = dp.PrivateOptimizer(
        model.parameters(),
        0.1,
        oracle=oracle or Repeating(),
        rule=dp.rules.SGD(),
        design=design or dp.Shuffled(8, N),
        schedule=Schedule((Phase(steps),)),
        accountant=dp.Accountant(adjacency=REPLACE_ONE, ledger_path=ledger),
    )
    return model, optimizer


DATA = TensorDataset(torch.ones(N, 2), torch.ones(N, 1))


def train(model: nn.Module, optimizer: dp.PrivateOptimizer, steps: int, **loader: Any) -> None:
    for x, y in optimizer.loader(DATA, steps=steps, **loader):
        optimizer.zero_grad()
        dp.losses.Logistic()(model(x), y).backward()
        optimizer.step()


def refused(call: Callable[[], Any], match: str) -> None:
    error = None
    try:
        call()
    except SequenceError as raised:
        error = raised
    assert match in str(error)


def stored(optimizer: dp.PrivateOptimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def test_a_run_is_charged_once_and_again_when_its_releases_are_used_up() -> None:
    model, optimizer = built(Repeating(steps=3))
    whole = optimizer.ahead()
    train(model, optimizer, 3)
    once = optimizer.report(1e-5).figures.epsilon
    assert len(optimizer.accountant) == 1
    train(model, optimizer, 3)
    assert len(optimizer.accountant) == 2
    assert optimizer.report(1e-5).figures.epsilon > once
    assert dp.Accountant(adjacency=REPLACE_ONE).ledger.evaluate(
        1e-5, REPLACE_ONE, extra=whole
    ).epsilon == (optimizer.report(1e-5).figures.epsilon)


def check_that_a_copy_is_refused() -> None:
    model, optimizer = built()
    train(model, optimizer, 2)
    for copied in (copy.deepcopy, pickle.dumps):
        refused(lambda copied=copied: copied((model, optimizer)), "must not be copied")  # type: ignore[misc]
    optimizer.finalize()
    copy.deepcopy((model, optimizer))


def test_a_copy_of_a_run_that_is_charged_as_a_whole_is_caught() -> None:
    assert_caught(
        check_that_a_copy_is_refused, lambda patch: patch.setattr(saved, "refuse_copy", nothing)
    )


@pytest.mark.parametrize("design", [dp.Shuffled(8, N), dp.Disjoint(8, N)])
def test_another_cut_under_a_charge_of_the_whole_run_is_caught(design: Design) -> None:
    """A pass that begins again, by the loader or by a new one, meets records at other steps."""

    def check() -> None:
        model, optimizer = built(design=design)
        train(model, optimizer, 2)
        refused(lambda: train(model, optimizer, 2), "must be those of the cut")
        assert (optimizer.steps, len(optimizer.accountant)) == (2, 1)

    assert_caught(check, lambda patch: patch.setattr(charges.Paid, "require", nothing))


def test_the_second_epoch_of_a_shuffled_design_is_another_cut() -> None:
    model, optimizer = built()
    refused(lambda: train(model, optimizer, 6), "must be those of the cut")
    assert optimizer.steps == N // 8


def check_that_a_checkpoint_is_not_loaded() -> None:
    model, optimizer = built()
    train(model, optimizer, 2)
    state = stored(optimizer)
    for _ in range(2):
        refused(lambda: built()[1].load_state_dict(state), "must be continued once")


def test_a_second_load_of_a_run_that_is_charged_as_a_whole_is_caught() -> None:
    assert_caught(
        check_that_a_checkpoint_is_not_loaded,
        lambda patch: patch.setattr(saved, "refuse_load", nothing),
    )


def test_a_run_goes_on_once_with_its_ledger_file(tmp_path: Path) -> None:
    model, optimizer = built(design=dp.Disjoint(8, N), ledger=tmp_path / "ledger", steps=3)
    train(model, optimizer, 1)
    state, past = stored(optimizer), optimizer.oracle.state()["past"]
    optimizer.accountant.close()
    model, optimizer = built(design=dp.Disjoint(8, N), ledger=tmp_path / "ledger", steps=3)
    assert optimizer.resume(state) == 0
    assert torch.equal(optimizer.oracle.state()["past"], past)
    train(model, optimizer, 2, resume=True)
    assert (optimizer.steps, len(optimizer.accountant)) == (3, 1)


def test_a_lost_release_of_an_oracle_that_does_not_expect_it_is_caught(tmp_path: Path) -> None:
    """A checkpoint that is resumed a second time, or is older than the crash, misses the noise of later releases."""
    runs = iter(range(9))

    def check() -> None:
        ledger = tmp_path / f"ledger{next(runs)}"
        model, optimizer = built(ledger=ledger)
        train(model, optimizer, 1)
        state = stored(optimizer)
        optimizer.accountant.authorize(Sequential(()), releases={optimizer.run: 2})
        optimizer.accountant.close()
        _, again = built(ledger=ledger)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UtilityWarning
            )  # of what is lost, once it is admitted
            refused(lambda: again.resume(state), "cannot go on")

    assert_caught(check, lambda patch: patch.setattr(charges.Run, "require_losable", nothing))


def test_a_run_that_can_lose_nothing_is_charged_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint goes on after each step; with the mark of a later one it would not."""
    monkeypatch.setattr(journal, "steps_ahead", lambda line, step: 8)
    for steps in (1, 2, 3):
        ledger = tmp_path / f"ledger{steps}"
        model, optimizer = built(ledger=ledger)
        train(model, optimizer, steps)
        state = stored(optimizer)
        optimizer.accountant._journal.file.close()  # as a crash does: nothing is given back
        model, again = built(ledger=ledger)
        assert again.resume(state) == 0
        assert again.steps == steps


def test_a_checkpoint_with_what_releases_share_is_secret_whatever_the_oracle_says() -> None:
    model, optimizer = built()
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    assert isinstance(state, SecretState)
    assert state["dpsco"]["confidential"] is True
    assert "past" not in repr(state)


def test_a_checkpoint_that_does_not_say_what_was_paid_for_is_refused(tmp_path: Path) -> None:
    model, optimizer = built(ledger=tmp_path / "ledger")
    train(model, optimizer, 1)
    state = stored(optimizer)
    del state["dpsco"]["paid"]
    optimizer.accountant.close()
    _, again = built(ledger=tmp_path / "ledger")
    with pytest.raises(ValueError, match="got one without paid"):
        again.resume(state)
