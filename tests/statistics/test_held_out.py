"""Held-out records in front of a model: none is moved by another one, and models that couple them are refused."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import torch_dpsco as dp
from torch_dpsco.errors import NotCertifiedError, UtilityWarning
from torch_dpsco.noise import Keystream, Stream
from torch_dpsco.sampling.slots import free_slots
from torch_dpsco.statistics import held_out, scores
from torch_dpsco.statistics.conformal import conformal
from torch_dpsco.statistics.scores import METRICS

UNIT = 2**20
BOUND: dict[str, Any] = {"log_loss": 2.0, "absolute_error": 2.0, "squared_error": 4.0}


class ByPlace:
    """Rounds a row by its place in the block, as products of float32 may, and has a jump where that shows."""

    classes_ = (0, 1)

    def predict(self, X: Any) -> Any:
        off = np.where(np.arange(len(X)) % 3 == 0, 1e-9, -1e-9)
        return (X[:, 0] + off > 0).astype(int)

    def predict_proba(self, X: Any) -> Any:
        said = 0.1 + 0.8 * self.predict(X)
        return np.stack([1 - said, said], axis=1)


class Given(Stream):
    """Gives bytes that are known."""

    def __init__(self, known: bytes) -> None:
        self.known = known

    def read(self, size: int) -> bytes:
        assert size <= len(self.known)
        return self.known[:size]


def with_words(patch: pytest.MonkeyPatch, words: Any) -> None:
    patch.setattr(held_out, "sampling_generator", lambda: Given(words.tobytes()))


def counts(metric: str, X: Any, y: Any, users: Any = None) -> Any:
    labels = [] if metric.endswith("error") else [0, 1]
    records = held_out.held_out(X, y, labels, users)
    args = ByPlace(), metric, BOUND.get(metric, 1.0), labels, 8, records.rows, records.truth
    return scores.counts(scores._contributions(*args), records.users)


def table() -> tuple[Any, Any]:
    """Returns records of which, in their order, those at the jump are all at places that round up."""
    at_jump = np.arange(3000) % 1024 % 3 == 0
    return np.where(at_jump[:, None], 0.0, [[1.0, 0.0]]), at_jump.astype(float)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("gone", [0, 700, 2999])
def test_a_record_that_leaves_moves_no_other(
    metric: str, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are independent, so that those of the others have one law with and without a record: couple them."""
    (X, y), words = table(), Keystream().words(3000)
    with_words(monkeypatch, words)
    both = counts(metric, X, y)
    with_words(monkeypatch, np.delete(words, gone))
    rest = counts(metric, np.delete(X, gone, 0), np.delete(y, gone))
    assert (both >= rest).all()
    assert (both - rest).sum() <= UNIT


def test_a_user_who_leaves_moves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    (X, y), words, users = table(), Keystream().words(3000), np.arange(3000) % 11
    with_words(monkeypatch, words)
    both = counts("accuracy", X, y, users)
    stay = users != 4
    with_words(monkeypatch, words[stay])
    rest = counts("accuracy", X[stay], y[stay], users[stay])
    assert np.abs(both - rest).sum() <= UNIT


def test_a_record_that_leaves_moves_no_threshold_but_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, seen = import_module("torch_dpsco.statistics.conformal"), []
    law = module.score_law
    monkeypatch.setattr(
        module, "score_law", lambda found, *more: seen.append(found.copy()) or law(found, *more)
    )
    (X, y), words = table(), Keystream().words(3000)
    budget = dp.Budget(20.0, 1e-6, adjacency="add_remove")
    with_words(monkeypatch, words)
    conformal(ByPlace(), X, y, budget=budget, bins=8)
    with_words(monkeypatch, words[1:])
    conformal(ByPlace(), X[1:], y[1:], budget=budget, bins=8)
    assert np.abs(seen[0] - seen[1]).max() <= UNIT


def test_each_record_stands_once_and_no_slot_holds_two() -> None:
    for records in (0, 1, 1000, 20_000):
        found = list(free_slots(records, 1024, Keystream()))
        assert sorted(np.concatenate([mine for mine, _ in found]).tolist()) == list(
            range(records)
        )
        assert all(len(set(slots.tolist())) == len(slots) for _, slots in found)
        assert len(found) >= 1
        assert len(found) <= 2 * records / 1024 + 20


def test_slots_are_uniform_and_independent() -> None:
    """Chi-square of one slot and of neighbors in pairs: false alarm below 1e-6 in both."""
    records = 64_000
    slots = np.empty(records, dtype=int)
    for mine, places in free_slots(records, 16, Keystream()):
        slots[mine] = places
    assert stats.chisquare(np.bincount(slots, minlength=16)).pvalue > 5e-7
    pairs = slots[::2] * 16 + slots[1::2]
    assert stats.chisquare(np.bincount(pairs, minlength=256)).pvalue > 5e-7


# -- models that couple rows -----------------------------------------------------------------------------------------


class Normalizing:
    """Centers a block by its own mean."""

    def predict(self, X: Any) -> Any:
        return X[:, 0] - X[:, 0].mean()


class Remembering:
    """Centers a block by the mean of all that it has seen."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def predict(self, X: Any) -> Any:
        self.rows.append(X[:, 0])
        return X[:, 0] - np.concatenate(self.rows).mean()


class Ranking:
    """Only its largest rows know of each other."""

    def predict(self, X: Any) -> Any:
        return np.minimum(X[:, 0], np.quantile(X[:, 0], 0.9))


class Training:
    """A net in training mode: batch normalization, and dropout, whose masks the global random numbers decide."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2))

    def predict(self, X: Any) -> Any:
        return self.net(torch.from_numpy(X).float()).detach()[:, 0]


class Random:
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.source = np.random.default_rng(0)

    def predict(self, X: Any) -> Any:
        return X[:, 0] + self.source.normal(size=len(X))


X, Y = np.random.default_rng(5).normal(size=(400, 2)), np.zeros(400)
BUDGET = dp.Budget(1.0, 1e-6, adjacency="add_remove")


@pytest.mark.parametrize("model", [Normalizing, Remembering, Ranking, Training, Random])
def test_a_model_that_couples_rows_is_refused(model: Any) -> None:
    ledger = dp.Accountant(adjacency="add_remove")
    with pytest.raises(NotCertifiedError, match="what depends on that row alone"):
        dp.score(model(), X, Y, "absolute_error", bound=1.0, budget=BUDGET, accountant=ledger)
    with pytest.raises(NotCertifiedError, match="what depends on that row alone"):
        conformal(model(), X, Y, bound=1.0, budget=BUDGET, accountant=ledger)
    assert not len(ledger)


def test_labels_that_depend_on_the_block_are_refused() -> None:
    class Above:
        classes_ = (0, 1)

        def predict(self, X: Any) -> Any:
            return (X[:, 0] > X[:, 0].mean()).astype(int)

    with pytest.raises(NotCertifiedError, match="what depends on that row alone"):
        dp.score(Above(), X, Y, budget=BUDGET)


def scored(model: Any) -> float:
    return dp.score(model, X, Y, "absolute_error", bound=4.0, budget=dp.Budget(1e5, 1e-6)).value


def test_dropout_alone_couples_no_rows_and_random_numbers_stay_what_they_were() -> None:
    model = Training()
    model.net[1].eval()
    held = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    args = model.predict, lambda out: held_out.numbers(out, (1024,)), 2, np.float64
    held_out.require_apart(*args)
    assert torch.equal(torch.get_rng_state(), held[0])
    assert (np.random.get_state()[1] == held[1]).all()  # noqa: NPY002
    assert 0 < scored(model) < 4


class Choosy:
    """Takes rows of 0 and 1 alone, or none at all."""

    def __init__(self, allowed: tuple[float, ...]) -> None:
        self.allowed = allowed

    def predict(self, X: Any) -> Any:
        if not np.isin(X[:2], self.allowed).all():
            raise KeyError("not in the book")
        return X[:, 0]


def test_a_model_that_takes_no_made_up_rows_is_named() -> None:
    read = lambda out: held_out.numbers(out, (1024,))  # noqa: E731
    held_out.require_apart(Choosy((0.0, 1.0)).predict, read, 2, np.float64)
    with pytest.warns(UtilityWarning, match="could not be tried .* raised KeyError"):
        held_out.require_apart(Choosy((7.0,)).predict, read, 2, np.float64)


def test_last_bits_that_differ_from_call_to_call_are_named() -> None:
    class Flickering:
        calls = 0

        def predict(self, X: Any) -> Any:
            self.calls += 1
            return X[:, 0] * (1 + 1e-15 * (self.calls % 2))

    with pytest.warns(UtilityWarning, match="differs from call to call in its last bits"):
        assert scored(Flickering()) == pytest.approx(np.abs(X[:, 0]).mean(), abs=1e-3)


def test_a_model_may_use_its_answer_again() -> None:
    class Reusing:
        answer = np.empty(1024)

        def predict(self, X: Any) -> Any:
            self.answer[:] = X[:, 0]
            return self.answer

    assert scored(Reusing()) == pytest.approx(np.abs(X[:, 0]).mean(), abs=1e-3)
