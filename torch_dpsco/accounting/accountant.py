"""The accountant: charges events to a ledger before noise is drawn, and refuses those that would exceed the budget.

replace_one from add_remove: a replaced record is one removed and one added, a group of two.

Source: docs/proofs/accounting.md#replacing-from-adding-and-removing.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, cast

import scipy

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco._loaded import when_imported
from torch_dpsco.accounting.analysis.gaussian import gaussian_epsilon
from torch_dpsco.accounting.analysis.rdp import group_approx_dp_delta, group_gdp_mu
from torch_dpsco.accounting.budgets import NO_BUDGET_DELTA, Budget
from torch_dpsco.accounting.events import ADD_REMOVE, REPLACE_ONE, Adjacency, Event, below_one
from torch_dpsco.accounting.filters import adaptive_epsilon, make_filter
from torch_dpsco.accounting.journal import Journal
from torch_dpsco.accounting.ledger import Ledger, locked
from torch_dpsco.accounting.ledger_file import (
    FOREIGN,
    Book,
    History,
    LedgerFile,
    history_of,
    read_state,
    write_state,
)
from torch_dpsco.accounting.opacus import OpacusFace, epsilon_at_orders, foreign_book
from torch_dpsco.accounting.report.figures import (
    PrivacyReport,
    attack_advantage,
    make_report,
    rounded_up,
)
from torch_dpsco.errors import AdjacencyError, DpscoError, PrivacyError

_CACHED_QUERIES = 256


class Spent(NamedTuple):
    """What was spent so far.

    Args:
        epsilon: at delta, under the accountant's adjacency.
        delta: that of the budget.
    """

    epsilon: float
    delta: float


class Accountant(OpacusFace):
    """One ledger for everything that is released about one data set, with an optional hard budget.

    Events are charged by `authorize` before their noise is drawn, so that a crash over-counts and never under-counts.
    Threads may share it (see `lock`). Copies share the ledger: `copy.deepcopy` returns the accountant itself, because
    two fits on copies of a model spend twice. Pickling raises, since a copy in another process would spend unseen. With
    a ledger file every charge is on the disk before `authorize` returns; a new accountant on the same file knows what
    was spent.

    Args:
        budget: refuse what would pass it; None records without limit.
        adjacency: default of queries; a budget's adjacency wins. None: "add_remove" if the first event comes from
            Opacus (`step`, the hook, `history`), else "replace_one".
        unit: what one record is; a budget's unit wins. Optimizers of another unit are refused.
        ledger_path: of the ledger file (see `ledger_file`); None keeps the ledger in memory and checkpoints only.
        must_exist: refuse to make a new ledger file: for all runs on some data but the first.

    Raises:
        PrivacyError: the ledger file is in use, damaged, an older copy, or missing although it must exist.
        ValueError: the ledger file is of another adjacency or unit.

    Guarantee:
        The epsilon reported at delta bounds the composition of all authorized events under the adjacency asked for,
        if their parameters were fixed in advance (under a planned budget that is enforced, see `planning`), or the
        budget's mode is adaptive (see `filters`). Steps of Opacus optimizers count as sampled the way that Opacus says
        until `bind` has seen the loader. Source: docs/proofs/accounting.md#composition.

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
    ) -> None:
        check.choice(("example", "user"), unit=unit)
        if budget is not None:
            adjacency = budget.adjacency
            unit = budget.unit
            make_filter(budget)  # may raise, and must before a file is opened
        super().__init__(_opened(adjacency, unit, ledger_path, must_exist), budget)
        # with the number of events that they are of
        self._answers: dict[
            tuple[float, Adjacency, str, bool, Budget | None], tuple[int, float]
        ] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Accountant:
        return self

    def __reduce__(self) -> NoReturn:
        raise PrivacyError(
            "an accountant must not be pickled: a copy would spend unseen; save state_dict()"
            " instead"
        )

    # -- questions ----------------------------------------------------------------------------------------------------

    @property
    @locked
    def spent(self) -> Spent:
        """Epsilon so far at the budget's delta, as `get_epsilon`; computed once, until the next charge.

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
            Accountant(epsilon 0.5815 of 1 at delta 1e-05 under replace_one, events: 6, unit: example)
            >>> round(accountant.remaining, 3), accountant.max_steps(step)  # 6 steps took more than 10 more will
            (0.419, 10)
        """
        return max(0.0, self._required_budget("remaining").epsilon - self.spent.epsilon)

    def _required_budget(self, asked: str) -> Budget:
        if self._budget is None:
            raise ValueError(
                f"budget must be set to say what is {asked} (got None): ask get_epsilon(delta)"
            )
        return self._budget

    def _so_far(self, delta: float) -> float:
        return (
            self.get_epsilon(delta) if len(self) else 0.0
        )  # an adaptive budget quotes its target even then

    @locked
    def __repr__(self) -> str:
        delta, limit = (
            (NO_BUDGET_DELTA, "")
            if self._budget is None
            else (self._budget.delta, f" of {self._budget.epsilon:g}")
        )
        try:
            epsilon = rounded_up(
                self._so_far(delta)
            )  # PRIVACY: quoted (test_the_repr_never_shows_less_than_was_spent)
        except DpscoError:
            epsilon = "not proved"
        return (
            f"Accountant(epsilon {epsilon}{limit} at delta {rounded_up(delta)} under"
            f" {self.adjacency}, events: {len(self)}, unit: {self.unit})"
        )

    @typed
    @locked
    def get_epsilon(
        self,
        delta: float,
        *,
        adjacency: Adjacency | None = None,
        method: str | None = None,
        alphas: Iterable[float] | None = None,
        eps_error: float | None = None,
        delta_error: float | None = None,
        poisson: bool = True,
        allow_group: bool = False,
    ) -> float:
        """Returns epsilon spent at delta.

        Args:
            delta: in [0, 1); at 0 epsilon is the sum of pure epsilons.
            adjacency: default the accountant's.
            method: None or "best", or one of `curves.METHODS` for parameters fixed in advance.
            alphas: Renyi orders to use, as Opacus' Renyi accountant has them; the default finds the best.
            eps_error: of Opacus' numerical accountant; not needed.
            delta_error: of Opacus' numerical accountant; not needed.
            poisson: must be True; other sampling is declared by its events.
            allow_group: for replace_one, where some event has no guarantee of its own: take the ledger's add_remove
                curve for one record removed and one added (see `replace_one_epsilon`), which is larger.

        Raises:
            InfeasibleError: delta is 0 and some event has no pure epsilon; it is named.
            AdjacencyError: some event has no guarantee under this adjacency.
        """
        if not poisson:
            # PRIVACY: batches of another law are never accounted as Poisson
            # (test_poisson_false_and_misspelled_keywords_are_refused)
            raise ValueError(
                "poisson must be True (got False): call accountant.bind(loader) on a loader that"
                " shuffles, or record events that say how batches were drawn"
            )
        if eps_error is not None:
            check.positive(eps_error=eps_error)
        if delta_error is not None:
            check.positive(delta_error=delta_error)
        adjacency = adjacency or self.adjacency
        # PRIVACY: a plain number: the answer to a tensor is not that to its later value
        # (test_a_tensor_as_delta_is_read_each_time)
        delta = below_one(delta=delta)
        if alphas is not None:
            return epsilon_at_orders(
                lambda level: self.ledger.cost(adjacency, level), alphas, delta
            )
        # an adaptive answer is that of the budget
        key = (delta, adjacency, method or "best", bool(allow_group), self.budget)
        length, known = self._answers.get(key, (-1, 0.0))
        if length == len(self):
            return known
        try:
            found = self._epsilon(delta, adjacency, method or "best")
        except AdjacencyError:
            if not allow_group or self.adaptive or adjacency != REPLACE_ONE:
                raise
            found = replace_one_epsilon(self.ledger, delta)
        if len(self._answers) >= _CACHED_QUERIES:
            self._answers.clear()
        self._answers[key] = len(self), found
        return found

    def _epsilon(self, delta: float, adjacency: Adjacency, method: str) -> float:
        if self.adaptive and method == "best":
            return adaptive_epsilon(self.ledger, delta, adjacency, self._rule)
        epsilon = self.ledger.epsilon(delta, adjacency, method)
        return epsilon if self._budget is None else self._budget.quoted(epsilon, delta)

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
            # (test_an_adaptive_run_has_no_delta_mu_or_rho)
            raise ValueError("delta must be given for an adaptive run: ask get_epsilon(delta)")

    @typed
    @locked
    def get_mu(
        self, *, adjacency: Adjacency | None = None, delta_min: float | None = None
    ) -> float:
        """Returns mu of Gaussian differential privacy, exact for unsampled Gaussian noise.

        Args:
            adjacency: default the accountant's.
            delta_min: in (0, 1), for sampled events: a mu whose Gaussian curve covers theirs where delta >= delta_min.
                Quote it with that restriction, and do not compose it further.

        Raises:
            ValueError: there is no such mu: sampled events without delta_min, failure probabilities, no known loss law,
                parameters that may depend on what was released.
        """
        self._require_fixed_parameters()
        if delta_min is not None:
            check.open_interval(0.0, 1.0, delta_min=delta_min)
        adjacency = adjacency or self.adjacency
        cost = self.ledger.cost(adjacency)
        if cost.mu_squared is not None and not cost.fails:
            return math.sqrt(cost.mu_squared)
        if delta_min is None or cost.fails:
            raise ValueError(
                "mu must be exact: the ledger holds sampled or failing events, ask get_epsilon"
                " instead, or get_mu(delta_min=1e-10) for sampled events that were fixed in advance"
            )
        found = self.ledger.mu(adjacency, delta_min)
        if found is None:
            raise ValueError(
                "mu must come from loss distributions, and some event has none: ask get_epsilon"
                " instead"
            )
        return found

    @typed
    @locked
    def get_rho(self, *, adjacency: Adjacency | None = None) -> float:
        """Returns rho of zero-concentrated differential privacy.

        Raises:
            ValueError: some event has none, or a failure probability, or parameters may depend on what was released.
        """
        self._require_fixed_parameters()
        cost = self.ledger.cost(adjacency or self.adjacency)
        if cost.zcdp is None or cost.zcdp[0] or cost.fails:
            raise ValueError(
                "rho must be exact: the ledger holds sampled or failing events, ask get_epsilon"
                " instead"
            )
        return cost.zcdp[1]

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
            if self._budget is None:
                raise ValueError("delta must be given when there is no budget (got None)")
            delta = self._budget.quoted_delta
            if self._budget.risk is not None and math.isinf(self.get_epsilon(delta)):
                delta = (
                    self._budget.delta
                )  # events that are one point of a curve say nothing at another delta
        report = make_report(
            self.ledger, below_one(delta=delta), self.adjacency, self.unit, self._rule, ahead
        )
        if self.adaptive:
            report = self._adaptive_report(report)
        return replace(
            report, assumptions=(*report.assumptions, *self._doubts()), ledger_id=self.ledger_id
        )

    def _adaptive_report(self, report: PrivacyReport) -> PrivacyReport:
        epsilons = {
            adjacency: self.get_epsilon(report.delta, adjacency=adjacency)
            for adjacency in report.epsilons
        }
        fixed = "noise, rates and number of steps"  # what does not hold here
        return replace(
            report,
            epsilons=epsilons,
            method="filter or odometer, parameters may depend on what was released",
            assumptions=tuple(line for line in report.assumptions if not line.startswith(fixed)),
            advantage=attack_advantage(epsilons[report.adjacency], report.delta),
            planned_epsilon=None,
            spent=(),  # PRIVACY: their sums bound nothing (test_an_adaptive_card_draws_no_sums)
        )

    def _doubts(self) -> Iterator[str]:
        asserted = self._config.get("asserted", 0)
        if asserted:
            yield (
                f"sampling of {asserted} steps asserted, not verified: accountant.bind(loader) was"
                " not called"
            )
        if self.suspicious_sampling:
            yield (
                "SUSPICIOUS SAMPLING: batches charged as Poisson looked fixed-size, epsilon may be"
                " under-reported"
            )

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    @locked
    def history(self) -> History:
        """The Poisson steps as Opacus keeps them: (noise multiplier, sampling rate, steps); other events are left out.

        Assigning replaces the ledger, as Opacus' calibration needs it; PrivacyError if it holds anything but steps of
        Opacus optimizers, or is kept in a file.
        """
        return history_of(self.ledger)

    @history.setter
    @locked
    def history(self, history: Iterable[Sequence[float]]) -> None:
        self._journal.require_own_process()
        if len(self) > self._config.get("stepped", 0) or self._journal.file is not None:
            # PRIVACY: (test_history_cannot_be_assigned_over_authorized_events)
            raise PrivacyError(
                "history must not replace events that were authorized, recorded or filed: make a"
                " new one"
            )
        self._journal.replace(
            foreign_book(history, secrets.token_hex(16), self._config["adjacency"], self.unit)
        )
        self._forget_answers()

    def _forget_answers(self) -> None:
        self._reread()
        self._answers.clear()

    @typed
    @locked
    def state_dict(self, destination: MutableMapping[str, Any] | None = None) -> Any:
        """Returns primitives only: ledger (bit exact), settings and a digest.

        Args:
            destination: mapping to write into; default a new dict.
        """
        if destination is None:
            destination = {}
        self._journal.introduce()
        destination.update(write_state(self._journal.book))
        return destination

    @locked
    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, import_foreign: bool = False
    ) -> None:
        """Restores a ledger; of two states of one history the later one wins, so that nothing charged is forgotten.

        Args:
            state_dict: of an accountant of this class (versions 1 to 3), which shares nothing with it afterwards.
            import_foreign: take the state of Opacus' "rdp", "prv" or "gdp" accountant; the ledger must be empty.

        Raises:
            ValueError: empty; wrong mechanism, version, adjacency, unit or digest.
            PrivacyError: the two states are of different histories, so that neither knows all charges; equal counts are
                no proof of a common history.
        """
        state = cast(Any, state_dict)
        mine = self._config
        known = isinstance(state, Mapping) and state.get("mechanism")
        if check.flag(import_foreign=import_foreign) and known in FOREIGN:
            if "history" not in state:
                raise ValueError("history must be in the state of an Opacus accountant")
            book = foreign_book(
                state["history"], secrets.token_hex(16), mine["adjacency"], self.unit
            )
        else:
            book = read_state(state)
        for field in ("adjacency", "unit"):
            given = book.config.get(field)
            if given != mine[field] and None not in (
                given if field == "adjacency" else "",
                mine[field],
            ):
                raise ValueError(
                    f"{field} must be {mine[field]!r}, this accountant's (got {given!r})"
                )
        book.config["adjacency"] = book.config["adjacency"] or mine["adjacency"]
        self._journal.load(book)
        self._forget_answers()

    @locked
    def continue_from(self, state_dict: Mapping[str, Any]) -> Mapping[str, int]:
        """Returns the releases marked per run, after making sure that this ledger is a later state of a checkpoint's.

        Raises:
            PrivacyError: no ledger file, one of another ledger, or one that is older than the checkpoint.
        """
        return self._journal.continue_from(read_state(state_dict))

    @locked
    def close(self) -> None:
        """Closes the ledger file, so that another accountant may open it; nothing can be charged here any more."""
        if self._journal.file is not None:
            self._journal.file.close()


def _opened(
    adjacency: Adjacency | None, unit: str, path: str | os.PathLike[str] | None, must_exist: bool
) -> Journal:
    """Returns an empty journal, or that of a ledger file."""
    book = Book(config={"adjacency": adjacency, "unit": unit})
    if path is None:
        if must_exist:
            raise ValueError("ledger_path must be given with must_exist=True (got None)")
        return Journal(book)
    file = LedgerFile(path, must_exist=must_exist)
    if file.is_empty:
        return Journal(book, file)
    known = file.book.config
    if known.get("unit") != unit or (adjacency is not None and known.get("adjacency") != adjacency):
        file.close()
        raise ValueError(
            f"ledger file must be for {adjacency or 'any adjacency'} and the unit {unit!r} (got "
            f"{known.get('adjacency')!r} and {known.get('unit')!r} in {file.path!r})"
        )
    return Journal(file.book, file)


def _register() -> None:
    from opacus.accountants import IAccountant, register_accountant

    IAccountant.register(Accountant)
    # the latest class wins where a module is loaded twice
    register_accountant(Accountant.mechanism(), Accountant, force=True)


when_imported("opacus.accountants", _register)

_LARGEST = 500.0  # epsilon of one record; twice that is no guarantee
_TOLERANCE = 1e-6  # of the epsilon of one record


def replace_one_epsilon(ledger: Ledger, delta: float) -> float:
    """Returns an epsilon under replace_one from the add_remove curve of a whole ledger.

    Exact for unsampled Gaussians (2 mu); at delta = 0 twice the sum of pure epsilons. Else the least 2 e with
    delta(e) (1 + exp(e)) <= delta, to 1e-6, rounded up. Where every event has a replace_one guarantee of its own, that
    one is smaller: use `Ledger.epsilon`.

    Args:
        ledger: what was charged.
        delta: in [0, 1).

    Returns:
        epsilon >= 0; inf if there is none up to 1000.

    Raises:
        AdjacencyError: some event has no guarantee under add_remove.
        InfeasibleError: delta is 0 and some event has no pure epsilon.

    Guarantee: (epsilon, delta)-DP under replace_one, if the ledger's parameters were fixed in advance.

    Source: docs/proofs/accounting.md#replacing-from-adding-and-removing.

    Example:
        >>> from torch_dpsco.accounting.events import PoissonGaussian, Repeat
        >>> ledger = Ledger([Repeat(PoissonGaussian(1.0, 256 / 60000), 235)])
        >>> round(replace_one_epsilon(ledger, 1e-5), 3), round(ledger.epsilon(1e-5, "replace_one"), 3)
        (0.884, 0.53)
    """
    delta = below_one(delta=delta)
    if delta == 0:
        return 2.0 * ledger.epsilon(delta, ADD_REMOVE)
    cost = ledger.cost(ADD_REMOVE)
    if cost.mu_squared is not None and not cost.fails:
        mu = group_gdp_mu(math.sqrt(cost.mu_squared), 2) * (
            1.0 + 2.0**-50
        )  # the square root rounds
        return gaussian_epsilon(mu, delta)

    def excess(epsilon: float) -> float:
        spent = group_approx_dp_delta(epsilon, ledger.delta(epsilon, ADD_REMOVE), 2)
        return max(-1e3, math.log(spent / delta)) if spent > 0 else -1e3

    low = 0.0
    high = min(_LARGEST, max(1e-3, ledger.epsilon(delta, ADD_REMOVE)))
    if excess(low) <= 0:
        return 0.0
    while excess(high) > 0:
        if high == _LARGEST:
            return math.inf
        low = high
        high = min(_LARGEST, 1.5 * high)
    single = (
        float(scipy.optimize.brentq(excess, low, high, xtol=_TOLERANCE * high)) + _TOLERANCE * high
    )
    # PRIVACY: only what was seen to hold (test_a_replaced_record_is_one_removed_and_one_added)
    return 2.0 * (single if single < high and excess(single) <= 0 else high)
