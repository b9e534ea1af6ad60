"""The accountant: charges events to a ledger before noise is drawn, and refuses those that would exceed the budget.

Source: docs/proofs/accounting.md#planned-budgets, docs/proofs/accounting.md#filters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.accounting.answers import Answers, paid
from torch_dpsco.accounting.budgets import (
    NO_BUDGET_DELTA,
    Budget,
    adaptive_epsilon,
    make_filter,
    quoted,
)
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.events import (
    ZERO_OUT,
    Adjacency,
    Event,
    Parallel,
    RandomAllocation,
    Sequential,
    clipped_gaussian,
)
from torch_dpsco.accounting.journal import Limit, open_journal
from torch_dpsco.accounting.ledger import LOCK, NONE, Ledger, locked, read_state, write_state
from torch_dpsco.accounting.report import (
    PrivacyReport,
    Spent,
    make_report,
)
from torch_dpsco.errors import DpscoError, PrivacyError, SequenceError, UnitError

WAYS_ON = (
    "A run that was interrupted goes on by resume() or fit(checkpoint=...); a release is given"
    " again to the same script on its ledger file; other data have another ledger; a smaller plan may fit;"
    " in a loop optimizer.finalize() installs the answer of the steps that were made"
)
_INSIDE = (
    "an event that may depend on what was released must not be charged while a pass of random"
    " allocation is open: call finalize() on its optimizer first, or give it Assigned(...,"
    " amplification=False)"
)


class Accountant:
    """One ledger for everything that is released about one data set, with an optional hard budget.

    Events are charged by `authorize` before their noise is drawn, so that a crash over-counts and never under-counts.
    Threads may share it (see `lock`). Copies share the ledger: `copy` and `deepcopy` return the accountant itself, as
    two fits on copies of a model spend twice. Pickling raises, since a copy in another process would spend unseen. With
    a ledger file every charge is on the disk before `authorize` returns; a new accountant on the same file knows what
    was spent.

    Args:
        budget: refuse what would pass it; None records without limit.
        adjacency: default of queries; a budget's adjacency wins. None: that of the first optimizer, else
            "zero_out".
        unit: what one record is; a budget's unit wins. Optimizers of another unit are refused.
        ledger_path: of the ledger file (see `ledger_file`); None keeps the ledger in memory and checkpoints only.
        must_exist: refuse to make a new ledger file: for all runs on some data but the first.
        anew: charge also those releases again whose answers an earlier run on the file has paid for (see `answers`).

    Raises:
        PrivacyError: the ledger file is in use, damaged, an older copy, or missing although it must exist.
        ValueError: the ledger file is of another adjacency or unit.

    Guarantee:
        The epsilon reported at delta bounds the composition of all authorized events under the adjacency asked for,
        if their parameters were fixed in advance (under a planned budget that is enforced, see `planning`), or the
        budget's mode is adaptive (see `budgets`). Source: docs/proofs/accounting.md#composition.

    Example:
        >>> from torch_dpsco.accounting.events import PoissonGaussian
        >>> accountant = Accountant(Budget(1.0, 1e-5, adjacency="add_remove"))
        >>> step = PoissonGaussian(noise_multiplier=2.0, q=0.01)
        >>> accountant.authorize(step, 10)
        >>> accountant.max_steps(step) > 0, len(accountant)
        (True, 10)
    """

    @typed
    def __init__(
        self,
        budget: Budget | None = None,
        *,
        adjacency: Adjacency | None = None,
        unit: str = "example",
        ledger_path: str | os.PathLike[str] | None = None,
        must_exist: bool = False,
        anew: bool = False,
    ) -> None:
        check.choice(("example", "user"), unit=unit)
        check.flag(anew=anew)
        if budget is not None:
            adjacency = budget.adjacency if budget.says_adjacency else adjacency
            unit = budget.unit
            make_filter(budget)  # may raise, and must before a file is opened
        self._journal = open_journal(adjacency, unit, ledger_path, must_exist)
        self._limit = Limit(self._journal, budget)
        self._part: Parallel | None = None  # that it charges; None is all records
        path = self.ledger_path
        # of releases that are made at once; None without a file
        self.answers = None if path is None else Answers(path, anew)

    def __copy__(self) -> Accountant:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Accountant:
        return self

    def __reduce__(self) -> NoReturn:
        raise PrivacyError(
            "an accountant must not be pickled into another process (joblib, loky, multiprocessing) or a file: a copy"
            " would spend unseen. Make it, and the optimizer or estimator that holds it, in the worker and return its"
            " state_dict(), or run in one process (n_jobs=1, threads); to save it, save state_dict()"
        )

    # -- settings -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of events charged."""
        return len(self.ledger)

    @property
    def ledger(self) -> Ledger:
        """What was charged."""
        return self._journal.book.ledger

    @property
    def _config(self) -> dict[str, Any]:
        return self._journal.book.config

    @property
    def ledger_id(self) -> str:
        """Random name of the ledger, the same in its file, in checkpoints and reports; that of a checkpoint is kept."""
        return self._journal.book.id

    @property
    def ledger_path(self) -> str | None:
        """Path of the ledger file, if there is one."""
        return None if self._journal.file is None else self._journal.file.path

    def marked(self, run: str) -> int:
        """Returns how many releases a run may have made (see `Book.releases`)."""
        return self._journal.book.releases.get(run, 0)

    @property
    def interrupted(self) -> bool:
        """Whether its file knows runs of earlier processes, of which an optimizer built now may resume one.

        Then no optimizer is refused at construction for want of budget: every charge is decided when it comes.
        """
        return self._journal.interrupted

    @property
    def is_running(self) -> bool:
        """Whether the ledger has a run that was not finalized in this process: an optimizer built now may resume it."""
        return any(
            "/" not in run for run in self._journal.book.releases.keys() - self._journal.ended
        )

    def end(self, run: str) -> None:
        """Notes that a run is finalized, so that none that is built later resumes it."""
        self._journal.ended.add(run)

    @property
    def unit(self) -> str:
        """What one record is."""
        return str(self._config["unit"])

    @property
    def adjacency(self) -> Adjacency:
        """Default of queries."""
        return self._config["adjacency"] or ZERO_OUT

    @property
    def adaptive(self) -> bool:
        """Whether some parameter was, or may be, chosen from what was released before."""
        return bool(self._config.get("adaptive")) or self._limit.adaptive

    @property
    def budget(self) -> Budget | None:
        """What may be spent; None means no limit."""
        return self._limit.budget

    @budget.setter
    @locked
    def budget(self, budget: Budget | None) -> None:
        self._limit.change(budget)

    @typed
    @locked
    def settle(self, adjacency: Adjacency) -> None:
        """Takes this adjacency, unless budget, constructor, file or an earlier charge have said one."""
        if self._config["adjacency"] is None:
            self._config["adjacency"] = adjacency
            if self.budget is not None:
                self._limit.change(self.budget.under(adjacency))

    @typed
    @locked
    def require_unit(self, unit: str, adjacency: Adjacency = ZERO_OUT) -> None:
        """Signs an optimizer up: raises UnitError for another privacy unit; settles the adjacency if none was said."""
        if unit != self.unit:
            raise UnitError(f"unit must be {self.unit!r}, the accountant's (got {unit!r})")
        # PRIVACY: what comes later must not change what the optimizer promises (test_who_comes_first_decides)
        self.settle(adjacency)

    @locked
    def require_adaptive(self) -> None:
        """Signs an optimizer up whose events depend on what was released; raises PrivacyError for a planned budget."""
        self._limit.require_adaptive()

    @typed
    def part(
        self,
        part: str | int,
        *,
        partition: str,
        kind: str = "positional",
        key_public: bool = False,
    ) -> Accountant:
        """Returns this accountant for one part of a partition of the records: what it charges touches no other record.

        Ledger, file and budget are the same; whoever has charged by this accountant still charges all records.

        Args:
            part: name of the part.
            partition: name that identifies the partition (see `events.Parallel`).
            kind: "positional" or "keyed".
            key_public: whether a key is public and kept by a replacement.

        Raises:
            SequenceError: this is the accountant of a part.

        Example:
            >>> from torch_dpsco.accounting.accountant import Accountant
            >>> from torch_dpsco.accounting.events import Pure
            >>> accountant = Accountant()
            >>> for part in "ab":
            ...     accountant.part(part, partition="halves").authorize(Pure(0.5))
            >>> accountant.get_epsilon(0.0)  # no record is in both
            0.5
        """
        if self._part is not None:
            raise SequenceError(f"parts must not be cut further (got {part!r} of {self._part})")
        view = object.__new__(Accountant)
        of = Parallel({str(part): ()}, partition, kind, key_public)
        vars(view).update(vars(self), _part=of)
        return view

    def _placed(self, event: Event) -> Event:
        """Returns what is charged for an event."""
        if self._part is None:
            return event
        ((part, _),) = self._part.items()
        return replace(self._part, parts={part: (event,)})

    @typed
    @locked
    def declare(self, event: Event, steps: int | None) -> None:
        """Says before the first release what will be charged under a planned budget, as optimizers do when built.

        With one kind of event nothing need be declared: it may be charged while the budget lasts. Of several plans all
        but one need a number of steps, and all must fit the budget together. Without a planned budget nothing is
        promised, and nothing kept.

        Args:
            event: of a step, or of a run.
            steps: how often, >= 0; None for as long as the budget lasts.

        Raises:
            PrivacyError: something was released already, and the event was not planned then.
        """
        try:
            self._limit.declare(event, steps)
        except PrivacyError as error:
            self._tell(error)
            raise

    @locked
    def require_planned(self, event: Event) -> None:
        """Raises PrivacyError if the budget is planned, something was released, and the event was not planned then."""
        try:
            self._limit.require_planned(event)
        except PrivacyError as error:
            self._tell(error)
            raise

    def _tell(self, error: PrivacyError) -> None:
        """Makes an error say what is on the ledger, if anything is."""
        if len(self):
            error.args = (f"{self.holdings}: {error}. {WAYS_ON}",)

    # -- charging -----------------------------------------------------------------------------------------------------

    @typed
    @locked
    def record(self, event: Event, count: int = 1, *, adaptive: bool = False) -> None:
        """Charges an event that has happened already, even past the budget (truth wins over wishes).

        Inside of another run's pass of random allocation, an event that may depend on what was released takes the
        amplification of passes away: they are charged once more, as unsampled releases.

        Args:
            event: what happened.
            count: how often, >= 0.
            adaptive: whether its parameters were chosen from what was released before.
        """
        event = self._placed(event)
        count = check.count(count=count)
        self._limit.record(event, count)
        try:
            self._charge(event, count, adaptive)
            if self._is_inside(event, count, adaptive, NONE):
                # PRIVACY: it has happened; what it was chosen from counts as if all knew where records were
                # (test_what_has_happened_inside_a_pass_takes_its_amplification_away)
                for _, _, one, times in list(self.ledger.entries()):
                    if isinstance(one, RandomAllocation):
                        self._journal.charge(clipped_gaussian(one.noise), times)
        finally:
            self._limit.open_unused()

    def authorize(
        self,
        event: Event,
        count: int = 1,
        *,
        planned: int | Callable[[], int] = 1,
        adaptive: bool = False,
        releases: Mapping[str, int] | None = None,
        ahead: Callable[[], int] | None = None,
    ) -> None:
        """Charges an event that is about to happen, or refuses it.

        Args:
            event: what is about to happen.
            count: how often, >= 0.
            planned: how many such events are planned from here on, this one included, or what says so when it matters;
                only `count` are charged now, but if all fit, they are decided at once.
            adaptive: whether its parameters were chosen from what was released before.
            releases: per run, how many of its releases may have been made from here on (see `Book.releases`); noted
                even if the event is empty.
            ahead: says how many charges from here on, this one included, are equal, each with releases that are one
                further: one line of a ledger file may then pay for several, see `ledger_file`.

        Raises:
            BudgetExceeded: the event would pass the budget; the ledger is unchanged.
            AdjacencyError: the event has no guarantee under the budget's adjacency; the ledger is unchanged.
            PrivacyError: the ledger file could not be written; nothing may be released. Or parameters may be chosen on
                the way, and another run is inside of a pass of random allocation.
        """
        if not callable(planned):
            most = check.positive_count(planned=planned)
            planned = lambda: most  # noqa: E731
        if type(adaptive) is not bool:
            check.flag(adaptive=adaptive)  # type: ignore[unreachable]
        if ahead is not None and not callable(ahead):
            raise ValueError(f"ahead must be a function (got {check.shown(ahead)})")
        if not isinstance(releases, (Mapping, type(None))):
            raise ValueError(
                f"releases must be a mapping of runs to numbers (got {check.shown(releases)})"
            )
        if type(count) is not int or not 0 <= count <= check.LARGEST_COUNT:
            count = check.count(count=count)
        # PRIVACY: between deciding and charging nobody else may charge (test_no_number_of_threads_passes_the_budget)
        with LOCK:
            if adaptive:
                self._limit.require_adaptive()
            if self._part is not None:
                event = self._placed(event)
            releases = releases or NONE
            if self._is_inside(event, count, adaptive, releases):
                # PRIVACY: proved for events that are fixed before the pass
                # (test_no_adaptive_event_is_charged_inside_a_pass)
                raise PrivacyError(_INSIDE)
            try:
                left = self._limit.decide(event, count, planned)
            except PrivacyError as error:
                self._tell(error)
                raise
            if ahead is not None:
                ahead = partial(self._limit.ahead, event, left, ahead)
            try:
                self._charge(event, count, adaptive, releases, ahead)
            finally:
                self._limit.note(event, left - count)

    @typed
    def pay(
        self,
        event: Event,
        plan: Callable[[], Mapping[str, Any]] | None,
        records: Callable[[str], str],
        draw: Callable[[], Any],
    ) -> Any:
        """Charges a release and draws its answer; or returns the one that the ledger file has paid for.

        Args:
            event: of the release, charged before anything is drawn.
            plan: returns public primitives that tell it from other releases; None, or where there are none
                (ValueError), keeps no answer.
            records: returns their fingerprint by a key (`sampling.fingerprint`), which the confidential file keeps.
            draw: draws the noise and returns the answer: numbers and lists of them, as JSON holds.

        Raises:
            BudgetExceeded: nothing was drawn.
            PrivacyError: an answer was paid for with other records, or is gone or altered; or it could not be kept,
                and is shown to nobody.
        """
        if self.answers is None:
            self.authorize(event)
            return draw()
        return paid(self, event, plan, records, draw)

    def _charge(
        self,
        event: Event,
        count: int,
        adaptive: bool = False,
        releases: Mapping[str, int] = NONE,
        ahead: Callable[[], int] | None = None,
    ) -> None:
        config = self._journal.book.config
        undecided = config["adjacency"] is None
        if undecided:
            # before the charge: the first line of a ledger file names it
            config["adjacency"] = ZERO_OUT if self.budget is None else self.budget.adjacency
        added = 0
        try:
            added = self._journal.charge(event, count, adaptive, releases, ahead)
        finally:
            if undecided and not added and not releases:
                config["adjacency"] = None

    def _is_inside(
        self, event: Event, count: int, adaptive: bool, releases: Mapping[str, int]
    ) -> bool:
        """Returns whether an event that outputs may have chosen comes inside of another run's pass."""
        book = self._journal.book
        if not (adaptive or self._limit.adaptive or book.config.get("adaptive")):
            return False
        return count > 0 and event != Sequential(()) and book.in_pass(releases)

    @typed
    @locked
    def admits(self, event: Event, count: int = 1) -> bool:
        """Returns whether the budget (always, without one) would admit the event; charges nothing."""
        return self._limit.admits(self._placed(event), check.count(count=count))

    @typed
    @locked
    def max_steps(self, event: Event) -> int:
        """Returns how many more of this event fit the budget (at most 2^40), without charging anything."""
        return self._limit.most(self._placed(event))

    # -- questions ----------------------------------------------------------------------------------------------------

    @property
    @locked
    def spent(self) -> Spent:
        """Epsilon so far at the budget's delta, as `get_epsilon`.

        Under an adaptive budget that is the target from the first charge on. To stop before the plan is made, because
        of what was released, does not make this figure the guarantee: the target is (see `budgets`).

        Raises:
            ValueError: there is no budget, whose delta it is: ask `get_epsilon(delta)`.
        """
        budget = self._required_budget("spent")
        return Spent(self._so_far(budget.delta), budget.delta)

    @property
    @locked
    def remaining(self) -> float:
        """The budget's epsilon less what was `spent`, at least 0: a figure to display, of which nothing can be bought.

        Epsilons do not subtract: what still fits depends on what was charged and on what comes, and is often far more
        than this figure suggests. `max_steps(event)` says how many more of an event fit, `admits(event)` whether it
        does; of a run, `optimizer.ahead(1)` is the next event and `optimizer.ahead()` all that is planned.

        Raises:
            ValueError: there is no budget.

        Example:
            >>> from torch_dpsco.accounting.events import clipped_gaussian
            >>> accountant, step = Accountant(Budget(1.0, 1e-5)), clipped_gaussian(30.0)
            >>> accountant.authorize(step, 6)
            >>> accountant
            Accountant(epsilon 0.2732 of 1 spent at delta 1e-05 under zero_out, events: 6, unit: example)
            >>> round(accountant.remaining, 3), accountant.max_steps(step)  # 6 steps took more than 10 more will
            (0.727, 58)
        """
        return max(0.0, self._required_budget("remaining").epsilon - self.spent.epsilon)

    def _required_budget(self, asked: str) -> Budget:
        if self.budget is None:
            raise ValueError(
                f"budget must be set to say what is {asked} (got None): ask get_epsilon(delta)"
            )
        return self.budget

    def _so_far(self, delta: float) -> float:
        # an adaptive budget quotes its target even then
        return self.get_epsilon(delta) if len(self) else 0.0

    @property
    @locked
    def holdings(self) -> str:
        """What is on the ledger, and how much of its budget that is, in words."""
        return f"{self._journal.book}; {self._in_words}"

    @locked
    def __repr__(self) -> str:
        return f"Accountant({self._in_words}, events: {len(self)}, unit: {self.unit})"

    @property
    def _in_words(self) -> str:
        budget = self.budget
        delta = NO_BUDGET_DELTA if budget is None else budget.delta
        limit = "" if budget is None else f" of {budget.epsilon:g}"
        try:
            # PRIVACY: quoted (test_the_repr_never_shows_less_than_was_spent)
            epsilon = rounded_up(self._so_far(delta))
        except DpscoError:
            epsilon = "not proved"
        return (
            f"epsilon {epsilon}{limit} spent at delta {rounded_up(delta)} under {self.adjacency}"
        )

    @typed
    @locked
    def get_epsilon(
        self,
        delta: float,
        *,
        adjacency: Adjacency | None = None,
        method: str = "best",
    ) -> float:
        """Returns epsilon spent at delta.

        Args:
            delta: in [0, 1); at 0 epsilon is the sum of pure epsilons.
            adjacency: default the accountant's.
            method: "best", or another of `curves.METHODS`, for parameters fixed in advance.

        Raises:
            InfeasibleError: delta is 0 and some event has no pure epsilon; it is named.
            AdjacencyError: some event has no guarantee under this adjacency.
        """
        adjacency = adjacency or self.adjacency
        # PRIVACY: a plain number: the answer to a tensor is not that to its later value
        # (test_a_tensor_as_delta_is_read_each_time)
        delta = check.below_one(delta=delta)
        if self.adaptive and method == "best":
            return adaptive_epsilon(self.ledger, delta, adjacency, self._limit.rule)
        return quoted(self.ledger.epsilon(delta, adjacency, method), delta, self.budget)

    @typed
    @locked
    def get_delta(self, epsilon: float, *, adjacency: Adjacency | None = None) -> float:
        """Returns the delta spent at epsilon, for parameters fixed in advance.

        Raises:
            ValueError: parameters may depend on what was released, so that only `get_epsilon` has an answer.
        """
        self._require_fixed_parameters()
        return self.ledger.delta(epsilon, adjacency or self.adjacency)

    def _require_fixed_parameters(self) -> None:
        if self.adaptive:
            # PRIVACY: sums of costs that were chosen on the way bound nothing by themselves
            # (test_an_adaptive_run_has_no_delta_or_mu)
            raise ValueError("delta must be given for an adaptive run: ask get_epsilon(delta)")

    @typed
    @locked
    def get_mu(self, *, adjacency: Adjacency | None = None) -> float:
        """Returns mu of Gaussian differential privacy, exact for unsampled Gaussian noise.

        Raises:
            ValueError: there is no such mu: sampled events, failure probabilities, or parameters that may depend on
                what was released.
        """
        self._require_fixed_parameters()
        cost = self.ledger.cost(adjacency or self.adjacency)
        if math.isnan(cost.mu_squared) or cost.fails:
            raise ValueError(
                "mu must be exact: the ledger holds events without it, or failing ones; ask"
                " get_epsilon instead"
            )
        return math.sqrt(cost.mu_squared)

    @typed
    @locked
    def report(self, delta: float | None = None, *, ahead: Event | None = None) -> PrivacyReport:
        """Returns what was spent under every adjacency that all events support, with the assumptions behind it.

        Args:
            delta: in [0, 1); default `Budget.quoted_delta`: the budget's, or 1e-6 beside a planned risk where epsilon
                is finite there.
            ahead: event of what a run still plans to do; gives the report its `planned_epsilon`. Nothing is charged.

        Raises:
            InfeasibleError: delta is 0 and some event has no pure epsilon; it is named.
        """
        if delta is None:
            if self.budget is None:
                raise ValueError("delta must be given when there is no budget (got None)")
            delta = self.budget.quoted_delta
            if self.budget.risk is not None and math.isinf(self.get_epsilon(delta)):
                # events that are one point of a curve say nothing at another delta
                delta = self.budget.delta
        return make_report(
            self.ledger,
            check.below_one(delta=delta),
            self.adjacency,
            self.unit,
            self._limit.rule,
            ahead,
            adaptive=self.adaptive,
            ledger_id=self.ledger_id,
        )

    # -- state ------------------------------------------------------------------------------------------------------

    @locked
    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only: ledger (bit exact), settings and a digest."""
        self._journal.introduce()
        return write_state(self._journal.book)

    @locked
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a ledger; of two states of one history the later one wins, so that nothing charged is forgotten.

        Args:
            state_dict: of an accountant of this class, which shares nothing with it afterwards.

        Raises:
            ValueError: empty; wrong mechanism, version, adjacency, unit or digest.
            PrivacyError: the two states are of different histories, so that neither knows all charges; equal counts are
                no proof of a common history.
        """
        mine = self._config
        book = read_state(state_dict)
        for field in ("adjacency", "unit"):
            given = book.config.get(field)
            undecided = field == "adjacency" and None in (given, mine[field])
            if given != mine[field] and not undecided:
                raise ValueError(
                    f"{field} must be {mine[field]!r}, this accountant's (got {given!r})"
                )
        book.config["adjacency"] = book.config["adjacency"] or mine["adjacency"]
        self._journal.load(book)
        self._limit.reread()

    @locked
    def continue_from(self, state_dict: Mapping[str, Any]) -> Mapping[str, int]:
        """Returns the releases marked per run, after making sure that this ledger is a later state of a checkpoint's.

        Raises:
            PrivacyError: no ledger file, one of another ledger, or one that is older than the checkpoint.
        """
        return self._journal.continue_from(read_state(state_dict))

    @locked
    def close(self) -> None:
        """Closes the ledger file, so that another accountant may open it; nothing can be charged here any more.

        What the file was charged ahead (see `ledger_file`) and no step has used is given back.
        """
        self._journal.close()
