"""Going on after a crash: which releases a run may have made, and what becomes of those that its checkpoint misses.

The ledger file says it: each charge names the run and how many of its releases may have been made from then on, and
is on the disk before their noise is drawn. A run that is resumed never makes one of these again, since a second answer
under the charge of the first would be free. They are lost: time, not budget.

| crash | charged | marked | after resume |
|---|---|---|---|
| before the charge of a step is on the disk | no | no | the step is made |
| after it, before or after the release | yes | yes | the step is lost |
| after a checkpoint | yes | yes | nothing is lost |
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.errors import SequenceError, UtilityWarning
from torch_dpsco.optim.state import require_run, split_private_state


class Resumable(Protocol):
    """What a run is made of that can be resumed."""

    accountant: Accountant

    @property
    def steps(self) -> int:
        """Steps made."""

    @property
    def finalized(self) -> bool:
        """Whether the answer was installed."""

    def settings(self) -> dict[str, Any]:
        """Returns the public constants of the mechanism."""


def unpacked(run: Resumable, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Mapping[str, int]]:
    """Returns (torch's part, private part, releases that are marked) of a checkpoint for a run that goes on.

    Raises:
        ValueError: the state is of another plan, noise, clip or version; says which settings differ.
        SequenceError: the optimizer has made steps.
        PrivacyError: the ledger file is missing, of another ledger, or older than the checkpoint.
    """
    if run.steps or run.finalized:
        raise SequenceError("resume must be called on a new optimizer (got one that has made steps)")
    public, private = split_private_state(state, run.settings())
    require_run(private)
    # PRIVACY: only its own ledger knows what was released since (test_a_run_is_resumed_with_its_own_ledger_file_only)
    return public, private, run.accountant.continue_from(private["ledger"])


def tell_of_lost(steps: int, made: int) -> None:
    """Warns of steps that an interrupted run may have made after its checkpoint, after `made` steps."""
    if steps:
        warnings.warn(
            f"{steps} steps after step {made} were lost to a crash: they were charged after the checkpoint, so that "
            f"the run goes on without them and makes none of them again",
            UtilityWarning,
            stacklevel=4,
        )


def tell_of_lost_answer(name: str) -> None:
    """Warns of an only answer that was charged, and may have been released, before the crash."""
    warnings.warn(
        f"the answer of this {name} run was charged before the crash and is lost: it may have been released, so that "
        f"another one is charged again, if the budget has room for it",
        UtilityWarning,
        stacklevel=4,
    )
