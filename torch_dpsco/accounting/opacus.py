"""The accountant's interface to Opacus: `PrivacyEngine(accountant="dpsco")` needs nothing else.

Opacus must know the name: it does where it is imported before torch_dpsco, and after an `Accountant` was made, or
`torch_dpsco.integrations.opacus` imported.

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
from torch_dpsco.accounting.analysis.rdp import rdp_epsilon_at_order
from torch_dpsco.accounting.book import Book
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
from torch_dpsco.accounting.journal import Note
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
    return max(
        0.0, min(rdp_epsilon_at_order(float(value), order, delta) for value, order in pairs)
    )


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


class OpacusSteps:
    """What steps of Opacus optimizers cost, as far as is known how batches are drawn; Opacus need not be imported.

    What Opacus says about sampling is "asserted, not verified" until `bind` has seen the loader; then steps cost what
    the loader's draws do, whatever the rate that Opacus says.
    """

    def __init__(self) -> None:
        self._design: Design | None = None
        self._known: tuple[float, float, Event] | None = None
        self._same_sizes = 0
        self._last_size = -1
        self._warned_of_several = False

    def bind(self, loader: Any) -> Design:
        """Returns the design of a loader, by which steps are charged from now on."""
        self._design = recognize(loader)
        self._known = None
        self._same_sizes = 0
        return self._design

    @property
    def verified(self) -> bool:
        """Whether a loader was seen."""
        return self._design is not None

    def note(self, event: Event) -> Note:
        """Returns what the ledger notes with a step."""
        marks = ("stepped",) if self.verified else ("stepped", "asserted")
        adjacency = ADD_REMOVE if isinstance(event, PoissonGaussian) else ZERO_OUT
        return Note(marks, adjacency=adjacency)

    def of_one_batch(self, noise: float, rate: float) -> Event:
        """Returns the event of a step over one batch; the same numbers are checked once."""
        known = self._known
        # a tensor could change its value
        plain = type(noise) is float and type(rate) is float
        if known is None or not plain or known[0] != noise or known[1] != rate:
            event = self._event(noise, check.between(0.0, 1.0, sample_rate=rate), 1)
            known = (noise, rate, event)
            self._known = known if plain else None
        return known[2]

    def _event(self, noise: float, rate: float, batches: int) -> Event:
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

    def of_optimizer(self, optimizer: Any, rate: float) -> Event:
        """Returns the event of the step that an Opacus optimizer is about to make."""
        batches = check.positive_count(accumulated_iterations=optimizer.accumulated_iterations)
        event = self._event(optimizer.noise_multiplier, rate, batches)
        if batches > 1 and not self._warned_of_several:
            self._warned_of_several = True
            warnings.warn(
                f"{batches} accumulated batches are charged as a mixture over how many of them hold"
                " a record, which costs more than one batch of their size and has no replace_one"
                " guarantee; use BatchMemoryManager to split one large batch instead",
                UtilityWarning,
                stacklevel=5,
            )
        return event

    def looks_fixed(self, optimizer: Any, rate: float) -> bool:
        """Returns whether the sizes of batches do not vary as those of Poisson sampling do, and warns of it.

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
        if self._same_sizes != _SAME_SIZES or size * (1.0 - rate) <= _LEAST_VARIANCE:
            return False
        warnings.warn(
            f"batches look fixed-size: {_SAME_SIZES} steps in a row had {size} rows each, which"
            f" Poisson sampling at rate {rate:.6g} does not do; if they are, epsilon is"
            " under-reported: call accountant.bind(loader), or make_private(...,"
            " poisson_sampling=True)",
            UserWarning,
            stacklevel=5,
        )
        return True
