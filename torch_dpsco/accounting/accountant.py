"""The accountant: charges events to a ledger before noise is drawn, and refuses those that would pass the budget."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from typing import Any, NoReturn

from torch_dpsco import _validate as check
from torch_dpsco.accounting.events import REPLACE_ONE, Adjacency, Event, check_adjacency
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.accounting.report import PrivacyReport, make_report, rounded_up
from torch_dpsco.errors import BudgetExceeded, PrivacyError, UnitError

__all__ = ["Accountant"]

_MAX_STEPS = 2**40
_VERSION = 1


class Accountant:
    """One ledger for everything that is released about one data set, with an optional hard budget.

    Events are charged by `authorize` before their noise is drawn, so that a crash over-counts and never under-counts.
    Copies share the ledger: `copy.deepcopy` returns the accountant itself, because two fits on copies of a model spend
    twice. Pickling raises, since a copy in another process would spend unseen.

    Args:
        budget: refuse what would pass it; None records without limit.
        adjacency: default of queries; a budget's adjacency wins.
        unit: what one record is; a budget's unit wins. Optimizers of another unit are refused.

    Guarantee:
        The epsilon reported at delta bounds the composition of all authorized events under the adjacency asked for,
        if their parameters were fixed in advance (a planned run; see `filters`). Source: spec accounting.md 2, 5, 7.

    Example:
        >>> from torch_dpsco.accounting.events import PoissonGaussian
        >>> accountant = Accountant(Budget(1.0, 1e-5, adjacency="add_remove"))
        >>> step = PoissonGaussian(noise_multiplier=2.0, q=0.01)
        >>> accountant.authorize(step, 10)
        >>> accountant.max_steps(step) > 0, len(accountant)
        (True, 10)
    """

    def __init__(
        self, budget: Budget | None = None, *, adjacency: Adjacency = REPLACE_ONE, unit: str = "example"
    ) -> None:
        self.budget = budget
        self.adjacency: Adjacency = budget.adjacency if budget else check_adjacency(adjacency)
        self.unit = budget.unit if budget else check.choice(("example", "user"), unit=unit)
        self.ledger = Ledger()
        self._process = os.getpid()
        # who charged, and from which event on: tells an earlier state of this ledger from another of equal counts
        self._runs: list[tuple[str, int]] = []
        self._charging = False
        # (event, budget and events charged so far), and how many more of the event are then known to fit
        self._allowance: tuple[tuple[Event, Budget, int], int] | None = None

    def __len__(self) -> int:
        """Number of events charged."""
        return len(self.ledger)

    def __deepcopy__(self, memo: dict[int, Any]) -> Accountant:
        return self

    def __reduce__(self) -> NoReturn:
        raise PrivacyError("an accountant must not be pickled: a copy would spend unseen; save state_dict() instead")

    def require_unit(self, unit: str) -> None:
        """Raises UnitError if events of another privacy unit were to be charged to this ledger."""
        if unit != self.unit:
            raise UnitError(f"unit must be {self.unit!r}, the accountant's (got {unit!r})")

    def record(self, event: Event, count: int = 1) -> None:
        """Charges an event that has happened already, even past the budget (truth wins over wishes)."""
        self._charge(event, count)

    def _charge(self, event: Event, count: int) -> None:
        if os.getpid() != self._process:
            # PRIVACY: a fork copies the noise stream too (test_a_forked_copy_cannot_spend_unseen_or_repeat_the_noise)
            raise PrivacyError(
                "an accountant must be charged in the process that made it: a forked copy would spend unseen and "
                "repeat the noise; make optimizer and accountant in the worker and bring their state_dict() back"
            )
        start = len(self.ledger)
        self.ledger.add(event, count)
        if not self._charging and len(self.ledger) > start:
            self._runs.append((secrets.token_hex(16), start))
            self._charging = True

    def authorize(self, event: Event, count: int = 1) -> None:
        """Charges an event that is about to happen, or refuses it.

        Raises:
            BudgetExceeded: the event would pass the budget; the ledger is unchanged.
            AdjacencyError: the event has no guarantee under the budget's adjacency; the ledger is unchanged.
        """
        check.count(count=count)
        if self.budget is None:
            self._charge(event, count)
            return
        left = self._room(self.budget, event, count)
        self._charge(event, count)
        self._allowance = (event, self.budget, len(self.ledger)), left - count

    def _room(self, budget: Budget, event: Event, count: int) -> int:
        # Runs of equal events are decided once: then authorizing is one comparison.
        known, left = self._allowance or (None, 0)
        if known == (event, budget, len(self.ledger)) and count <= left:
            return left
        if not self.admits(event, count):
            self._refuse(event, count)
        return self.max_steps(event) if known is not None and known[0] == event else count

    def admits(self, event: Event, count: int = 1) -> bool:
        """Returns whether the budget (always, without one) would admit the event; charges nothing."""
        if self.budget is None:
            return True
        trial = self.ledger.evaluate(self.budget.delta, self.budget.adjacency, extra=event, count=count)
        return trial.epsilon <= self.budget.epsilon

    def _refuse(self, event: Event, count: int) -> NoReturn:
        budget = self.budget
        assert budget is not None
        spent = self.ledger.epsilon(budget.delta, budget.adjacency)
        asked = self.ledger.evaluate(budget.delta, budget.adjacency, extra=event, count=count).epsilon
        raise BudgetExceeded(
            f"{count} x {event} would bring epsilon to {rounded_up(asked, 6)}, past the budget of {budget.epsilon:.6g} "
            f"at delta={budget.delta:g} ({budget.adjacency}); spent {rounded_up(spent, 6)} in {len(self)} events, room "
            f"for {self.max_steps(event)} more of this event. Smallest epsilon that would admit it: "
            f"{rounded_up(asked, 6)}"
        )

    def max_steps(self, event: Event) -> int:
        """Returns how many more of this event fit the budget (at most 2^40), without charging anything."""
        if self.budget is None:
            raise ValueError("budget must be set to count the steps left (got None)")
        if not self.admits(event):
            return 0
        low, high = 1, 2
        while high < _MAX_STEPS and self.admits(event, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.admits(event, middle) else (low, middle)
        return low

    def get_epsilon(self, delta: float, *, adjacency: Adjacency | None = None, method: str = "best") -> float:
        """Returns epsilon spent at delta, under the accountant's adjacency unless another is asked for."""
        return self.ledger.epsilon(delta, check_adjacency(adjacency or self.adjacency), method)

    def get_delta(self, epsilon: float, *, adjacency: Adjacency | None = None) -> float:
        """Returns the delta spent at epsilon."""
        return self.ledger.delta(epsilon, check_adjacency(adjacency or self.adjacency))

    def get_mu(self, *, adjacency: Adjacency | None = None) -> float:
        """Returns the exact mu of Gaussian differential privacy.

        Raises:
            ValueError: some event was sampled or has a failure probability, so that no mu holds.
        """
        cost = self.ledger.cost(check_adjacency(adjacency or self.adjacency))
        if cost.mu_squared is None or cost.failure:
            raise ValueError("mu must be exact: the ledger holds sampled or failing events, ask get_epsilon instead")
        return math.sqrt(cost.mu_squared)

    def get_rho(self, *, adjacency: Adjacency | None = None) -> float:
        """Returns rho of zero-concentrated differential privacy; raises ValueError where `get_mu` does."""
        return self.get_mu(adjacency=adjacency) ** 2 / 2.0

    def report(self, delta: float | None = None, *, ahead: Event | None = None) -> PrivacyReport:
        """Returns what was spent under every adjacency that all events support, with the assumptions behind it.

        Args:
            delta: default the budget's.
            ahead: event of what a run still plans to do; gives the report its `planned_epsilon`. Nothing is charged.
        """
        if delta is None:
            if self.budget is None:
                raise ValueError("delta must be given when there is no budget (got None)")
            delta = self.budget.delta
        return make_report(self.ledger, delta, self.adjacency, self.unit, self.budget, ahead)

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only: ledger (bit exact), settings and a digest."""
        return {
            "version": _VERSION,
            "adjacency": self.adjacency,
            "unit": self.unit,
            "ledger": self.ledger.to_json(),
            "runs": [list(run) for run in self._runs],
            "digest": _digest(self.ledger, self._runs),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a ledger; of two states of one history the later one wins, so that nothing charged is forgotten.

        Raises:
            ValueError: wrong version, adjacency, unit or digest.
            PrivacyError: the two states are of different histories, so that neither knows all charges; equal counts are
                no proof of a common history.
        """
        if state.get("version") != _VERSION:
            raise ValueError(f"version must be {_VERSION} (got {state.get('version')!r})")
        for field in ("adjacency", "unit"):
            if state.get(field) != getattr(self, field):
                raise ValueError(
                    f"{field} must be {getattr(self, field)!r}, this accountant's (got {state.get(field)!r})"
                )
        loaded = Ledger.from_json(state.get("ledger", ()))
        runs = [(str(token), check.count(start=start)) for token, start in state.get("runs", ())]
        if _digest(loaded, runs) != state.get("digest"):
            raise ValueError("digest must match the ledger: the state was altered or is damaged")
        # PRIVACY: two runs with equal counts are two runs (test_two_continuations_of_one_checkpoint_are_two_histories)
        if _is_past(runs, len(loaded), self._runs, len(self.ledger)) and self.ledger.includes(loaded):
            return  # a rolled-back run: what was charged since stays charged
        if not (_is_past(self._runs, len(self.ledger), runs, len(loaded)) and loaded.includes(self.ledger)):
            raise PrivacyError(
                "loading would forget events charged here: the two ledgers have different histories; load a checkpoint "
                "before the accountant is charged for anything else"
            )
        self.ledger, self._runs, self._charging = loaded, runs, False
        self._allowance = None


def _digest(ledger: Ledger, runs: list[tuple[str, int]]) -> str:
    return hashlib.sha256(json.dumps([ledger.digest(), runs]).encode()).hexdigest()


def _is_past(first: list[tuple[str, int]], size: int, second: list[tuple[str, int]], total: int) -> bool:
    """Returns whether a ledger of `size` events is an earlier state of one of `total`: it ends before they part."""
    shared = len(first)
    return second[:shared] == first and size <= (second[shared][1] if len(second) > shared else total)
