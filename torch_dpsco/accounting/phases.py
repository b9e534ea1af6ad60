"""Phases: what is charged inside of a block goes to one part of a partition, and nothing that runs beside the block.

Source: docs/proofs/accounting.md#planned-budgets, docs/proofs/accounting.md#filters.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from contextvars import ContextVar, Token
from dataclasses import replace
from typing import Any

from torch_dpsco.accounting.events import Event, Parallel
from torch_dpsco.errors import SequenceError

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Phases:
    """The open phases of one accountant: at most one in each context, of a thread, a task or a callback."""

    def __init__(self) -> None:
        self.opened: ContextVar[Phase | None] = ContextVar("opened", default=None)

    def here(self) -> Phase | None:
        """Returns the phase that the code which runs now charges to; None is all records."""
        phase = self.opened.get()
        return phase if phase is not None and phase.is_here() else None

    def placed(self, event: Event) -> Event:
        """Returns what the code that runs now charges for an event."""
        phase = self.here()
        if phase is None:
            return event
        return replace(phase.partition, parts={phase.part: (event,)})


class Phase:
    """A block whose charges go to a part: those of the context that entered it, until it is left.

    Args:
        phases: of the accountant.
        part: its name.
        partition: of which it is a part, without events.
    """

    def __init__(self, phases: Phases, part: str, partition: Parallel) -> None:
        self.part = part
        self.partition = partition
        self._phases = phases
        self._token: Token[Phase | None] | None = None

    def __enter__(self) -> None:
        _require_no_generator()
        open_now = self._phases.here()
        if open_now is not None:
            raise SequenceError(
                f"a phase on part {open_now.part!r} is open: phases must not be nested"
            )
        self._token = self._phases.opened.set(self)

    def __exit__(self, *_: Any) -> None:
        token = self._token
        self._token = None
        if token is not None:
            with contextlib.suppress(
                ValueError, RuntimeError
            ):  # left in another context: closed there all the same
                self._phases.opened.reset(token)

    def is_here(self) -> bool:
        """Returns whether the block is open in this context itself, and not in the one that this is a copy of."""
        if self._token is None:
            return False
        try:
            # PRIVACY: what is started inside of a phase inherits its context, and may release about all records
            # (test_what_is_started_inside_of_a_phase_charges_to_all_records)
            self._phases.opened.reset(self._token)
        except (ValueError, RuntimeError):  # a token is of the context in which it was made
            return False
        self._token = self._phases.opened.set(self)
        return True


def _require_no_generator() -> None:
    """Raises SequenceError where a phase would stay open while the callers of a generator run."""
    frame = sys._getframe(2)
    while (
        frame.f_back is not None and frame.f_globals.get("__name__") == contextlib.__name__
    ):  # as of an ExitStack
        frame = frame.f_back
    if frame.f_code.co_flags & _GENERATORS:
        # PRIVACY: they would be charged to the part too (test_a_phase_is_not_opened_in_a_generator)
        raise SequenceError(
            f"a phase must not be opened in a generator ({frame.f_code.co_qualname}): what runs"
            " between two of its values would be charged to the part; open it around what is"
            " charged, or return accountant.phase(...)"
        )
