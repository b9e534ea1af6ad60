"""The accountant's interface to Opacus: `PrivacyEngine(accountant="dpsco")` needs nothing else.

Facts of Opacus 1.6 that give it this shape. `create_accountant` calls the class without arguments. Noise is calibrated
by assigning `accountant.history` in a loop. The hook runs after noise is added and before the parameters move, so that
an exception in it prevents the release. Opacus multiplies the rate by the number of accumulated batches; that is wrong
(a record may be in several of them), and the mixture over that number is charged here instead.

Source: docs/proofs/accounting.md#several-records-of-a-unit, docs/proofs/accounting.md#sampling-designs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from torch_dpsco import _validate as check
from torch_dpsco._loaded import of_torch
from torch_dpsco.accounting.analysis.convert import rdp_epsilon_at_order
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.curves import Cost, orders_at
from torch_dpsco.accounting.designs import Design, Draw, Poisson
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ZERO_OUT,
    Adjacency,
    Event,
    PoissonGaussian,
    clipped_gaussian,
)
from torch_dpsco.accounting.identify import RatePoisson, recognize
from torch_dpsco.accounting.journal import Journal
from torch_dpsco.accounting.ledger import locked
from torch_dpsco.accounting.ledger_file import MECHANISM, Book
from torch_dpsco.accounting.spending import Note, Spending
from torch_dpsco.errors import SequenceError, UtilityWarning

_LEAST_ORDER = 1.01  # closer to 1 the conversion multiplies errors of the curve by more than 100
_SAME_SIZES = 30
_LEAST_VARIANCE = 4.0


def epsilon_at_orders(
    cost_at: Callable[[int], Cost], alphas: Iterable[float], delta: float
) -> float:
    """Returns epsilon from Renyi orders given by the caller, each read at the next larger order of the grid.

    The Renyi divergence increases with its order, so that this is an upper bound.

    Raises:
        ValueError: no order, or one out of (1.01, 2^14], or events with failure probabilities.
    """
    orders = [check.order(alphas=alpha) for alpha in alphas]
    grid = orders_at(1)
    cost = cost_at(1)
    if not orders or not all(_LEAST_ORDER < order <= grid[-1] for order in orders):
        raise ValueError(
            f"alphas must be in ({_LEAST_ORDER}, {grid[-1]:g}], at least one (got {orders})"
        )
    if cost.fails:
        raise ValueError(
            "alphas must not be given for events with failure probabilities: leave them out"
        )
    places = np.searchsorted(grid, orders)
    pairs = zip(cost.rdp[places], orders, strict=True)
    return max(0.0, min(rdp_epsilon_at_order(float(value), order, delta) for value, order in pairs))


def foreign_book(
    history: Iterable[Sequence[float]], run: str, adjacency: Adjacency | None, unit: str
) -> Book:
    """Returns the book of a history in Opacus' form, whose sampling is taken on trust.

    Raises:
        ValueError: an entry is not (noise multiplier >= 0, rate in [0, 1], steps >= 0).
    """
    book = Book(config={"adjacency": adjacency, "unit": unit})
    if not isinstance(history, Iterable):
        raise ValueError(
            f"history must hold (noise_multiplier, sample_rate, steps) (got {history!r})"
        )
    entry: Any
    for entry in history:
        if not isinstance(entry, Sequence) or len(entry) != 3:
            raise ValueError(
                f"history must hold (noise_multiplier, sample_rate, steps) (got {entry!r})"
            )
        book.ledger.add(PoissonGaussian(entry[0], entry[1]), check.count(steps=entry[2]))
    if len(book.ledger):
        book.runs.append((run, 0))
        book.config["adjacency"] = adjacency or ADD_REMOVE
        book.mark(("stepped", "asserted"), len(book.ledger))
    return book


class OpacusFace(Spending):
    """What Opacus requires of an accountant, but for its questions; Opacus itself need not be imported.

    The hook of `get_optimizer_hook_fn` authorizes each step before the parameters move. What it is told about sampling
    is "asserted, not verified" until `bind` has seen the loader; then steps are charged as the loader draws, whatever
    the rate that Opacus says.

    Args:
        journal: what is charged so far.
        budget: refuse what would pass it; None records without limit.
    """

    def __init__(self, journal: Journal, budget: Budget | None) -> None:
        super().__init__(journal, budget)
        self._design: Design | None = None
        self._step_event: tuple[float, float, Event] | None = None
        self._same_sizes = 0
        self._last_size = -1
        self._warned_of_several = False

    @classmethod
    def mechanism(cls) -> str:
        """Returns the accountant's name in Opacus' registry."""
        return MECHANISM

    @locked
    def suspect(self) -> None:
        """Notes that the sampling is probably not what was asserted."""
        self._config["suspicious"] = True

    def bind(self, loader: Any) -> Design:
        """Returns the design of a loader, by which the steps of Opacus optimizers are charged from now on.

        Poisson samplers (Opacus' and ours) give their own rate. Batches that are shuffled or cut in order claim no
        amplification: each step is charged as an unsampled one, under zero_out and replace_one only.

        Raises:
            UnknownSamplerError: the law of its batches is not known; names the ways out.
        """
        self._design = recognize(loader)
        self._step_event = None
        self._same_sizes = 0
        return self._design

    @property
    def sampling(self) -> str:
        """How the sampling of steps that Opacus makes is known: "verified" or "asserted, not verified"."""
        return "asserted, not verified" if self._design is None else "verified"

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Charges one step that an Opacus optimizer has made.

        Args:
            noise_multiplier: noise std on the sum over the clip norm, >= 0.
            sample_rate: Poisson rate in [0, 1].
        """
        known = self._step_event
        plain = (
            type(noise_multiplier) is float and type(sample_rate) is float
        )  # a tensor could change its value
        if known is None or not plain or known[0] != noise_multiplier or known[1] != sample_rate:
            event = self._event_of(
                noise_multiplier, check.between(0.0, 1.0, sample_rate=sample_rate), 1
            )
            known = (noise_multiplier, sample_rate, event)
            self._step_event = known if plain else None
        self._spend_step(known[2], happened=True)

    @locked
    def _spend_step(self, event: Event, *, happened: bool) -> None:
        """Charges a step; even past the budget if it has happened."""
        marks = ("stepped", "asserted") if self._design is None else ("stepped",)
        note = Note(
            marks, adjacency=ADD_REMOVE if isinstance(event, PoissonGaussian) else REPLACE_ONE
        )
        charge = self._charge if happened else self._authorize
        charge(self._placed(event), 1, note)

    def _event_of(self, noise: float, rate: float, batches: int) -> Event:
        """Returns the event of a step over accumulated batches, as the bound loader draws them."""
        design = self._design
        if design is None:
            return PoissonGaussian(noise, rate, batches)
        if isinstance(design, (Poisson, RatePoisson)):
            asserted = check.between(0.0, 1.0, sample_rate=rate)
            # PRIVACY: the loader knows its rate better (test_a_bound_loader_corrects_a_smaller_rate)
            return PoissonGaussian(noise, max(asserted, design.sample_rate), batches)
        if batches != 1:
            raise SequenceError(
                f"accumulated batches must be 1 for a loader that is not Poisson (got {batches}): a"
                " record could be in two of them"
            )
        base = clipped_gaussian(noise)
        if design.positional or design.one_pass:
            # PRIVACY: one pass costs one Gaussian, but where passes begin cannot be seen from here, so that each step
            # counts (test_a_bound_shuffled_loader_is_never_accounted_as_poisson)
            return base.only(ZERO_OUT, REPLACE_ONE)
        return design.draw_event(base, Draw(design.batch_size))

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """Returns a hook that charges a step of Opacus' optimizer before it moves the parameters.

        A step that does not fit the budget raises BudgetExceeded; its gradients are dropped and nothing is released.

        Args:
            sample_rate: Poisson rate of one batch, in [0, 1].
        """
        sample_rate = check.between(
            0.0, 1.0, sample_rate=sample_rate
        )  # by this name the doctor finds it

        def hook(optimizer: Any) -> None:
            try:
                self._charge_for(optimizer, sample_rate)
            except BaseException:
                # PRIVACY: a later step must not release what was refused (test_a_refused_step_leaves_no_gradient)
                for parameter in optimizer.params:
                    parameter.summed_grad = None
                optimizer.zero_grad(set_to_none=True)
                raise

        return hook

    def _charge_for(self, optimizer: Any, rate: float) -> None:
        batches = check.positive_count(accumulated_iterations=optimizer.accumulated_iterations)
        event = self._event_of(optimizer.noise_multiplier, rate, batches)
        if batches > 1 and not self._warned_of_several:
            self._warned_of_several = True
            warnings.warn(
                f"{batches} accumulated batches are charged as a mixture over how many of them hold"
                " a record, which costs more than one batch of their size and has no replace_one"
                " guarantee; use BatchMemoryManager to split one large batch instead",
                UtilityWarning,
                stacklevel=4,
            )
        self._spend_step(event, happened=False)
        if isinstance(event, PoissonGaussian):
            self._watch(optimizer, event.q)

    def _watch(self, optimizer: Any, rate: float) -> None:
        """Warns of batches whose sizes do not vary as those of Poisson sampling do.

        With a variance n q (1 - q) > 4 no size has probability above 0.25, so that 30 equal ones have below 1e-17.
        """
        rows = getattr(optimizer.params[0], "grad_sample", None)
        partial = getattr(
            optimizer, "_is_last_step_skipped", False
        )  # the rows are the last part of a batch
        size = -1 if partial or not isinstance(rows, of_torch("Tensor")) else len(rows)
        self._same_sizes = (
            self._same_sizes + 1 if size >= 0 and size == self._last_size else int(size >= 0)
        )
        self._last_size = size
        if self._same_sizes == _SAME_SIZES and size * (1.0 - rate) > _LEAST_VARIANCE:
            self.suspect()
            warnings.warn(
                f"batches look fixed-size: {_SAME_SIZES} steps in a row had {size} rows each, which"
                f" Poisson sampling at rate {rate:.6g} does not do; if they are, epsilon is"
                " under-reported: call accountant.bind(loader), or make_private(...,"
                " poisson_sampling=True)",
                UserWarning,
                stacklevel=5,
            )
