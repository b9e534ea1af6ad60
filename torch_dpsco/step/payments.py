"""What the steps of a run cost, which releases a charge has paid for, and what would repeat one of them.

Releases that share a charge share a secret too: the noise of a threshold, past noise, or who is in which batch. Two
continuations of such a run would show it, under ledgers that know nothing of each other. So there is one: in this
process, or, after a crash, with the ledger file, which knows how far the run has come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch_dpsco.accounting.designs import Design, Draw
from torch_dpsco.accounting.events import (
    Event,
    Parallel,
    RandomAllocation,
    Repeat,
    Sequential,
    event_from_json,
    event_to_json,
)
from torch_dpsco.accounting.parts import Parts
from torch_dpsco.errors import AdjacencyError, SequenceError
from torch_dpsco.oracles.base import Charge, MeanOracle
from torch_dpsco.oracles.phased import Phased


class Paid(NamedTuple):
    """What a charge of several releases has paid for.

    Args:
        stop: step after the last of them.
        partition: how records were cut into batches; "" where they are not.
        event: what was charged, where it is that of a pass of secret draws; None elsewhere.
    """

    stop: int
    partition: str
    event: Event | None = None

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> Paid:
        """Returns what `row` has made."""
        stop, partition, *event = row
        return cls(stop, partition, event_from_json(event[0]) if event else None)

    @property
    def row(self) -> list[Any]:
        """All of it as primitives."""
        return [
            self.stop,
            self.partition,
            *([] if self.event is None else [event_to_json(self.event)]),
        ]

    def require(self, partition: str, event: Event | None = None) -> None:
        """Raises SequenceError for a batch of records that were cut in another way, or for a release of less noise."""
        if event != self.event:
            # PRIVACY: (test_a_step_with_less_noise_than_its_pass_was_charged_for_is_refused)
            raise SequenceError(
                f"steps must be those that their pass was charged for, {self.event} (got one of"
                f" {event}): noise is fixed before a pass, or give amplification=False to the"
                " design"
            )
        if partition != self.partition:
            # PRIVACY: a record would come at other steps than those that were charged
            # (test_another_cut_under_a_charge_of_the_whole_run_is_caught)
            raise SequenceError(
                "batches must be those of the cut that was charged for the whole run: go on with "
                "optimizer.loader(dataset, resume=True), or make a new optimizer"
            )


def first_charges(oracle: MeanOracle, design: Design) -> list[Charge]:
    """Returns what the first release of each phase is charged."""
    draws = _first_draws(oracle, design)
    return [member.charge(design, draw) for member, draw in zip(oracle.members, draws, strict=True)]


def _first_draws(oracle: MeanOracle, design: Design) -> list[Draw]:
    if not isinstance(design, Parts):
        return [Draw(0, "planned", str(k)) for k, _ in enumerate(oracle.members)]
    starts = accumulate((draws for _, draws in design.parts[:-1]), initial=0)
    return [Draw(0, "planned", str(k), start) for k, start in enumerate(starts)]


def pass_of(event: Event) -> RandomAllocation | None:
    """Returns the pass of secret draws that a charge is of, of all records or of a part; None for others."""
    events = (
        [one for _, inside in event.items() for one in inside]
        if isinstance(event, Parallel)
        else [event]
    )
    return next((one for one in events if isinstance(one, RandomAllocation)), None)


def require_planned(event: Event, planned: RandomAllocation | None) -> None:
    """Raises SequenceError if a charge is not of the pass, or of none, that was known when the run was made."""
    if pass_of(event) != planned:
        # PRIVACY: a batch, and a pass over all batches of its part, would count as disjoint; and a run that was made
        # without passes may be copied (test_a_charge_of_another_pass_than_planned_is_refused)
        raise SequenceError(
            "steps must be charged as was known when the optimizer was made, by"
            f" {planned or 'no pass'} (got {event}): give amplification=False to the design"
        )


def is_pass(oracle: MeanOracle, design: Design, charges: Sequence[Charge]) -> bool:
    """Returns whether passes of secret draws are charged as a whole, before their first step.

    Args:
        oracle: of the run.
        design: how batches are drawn.
        charges: of the members of the oracle, see `first_charges`.

    Raises:
        AdjacencyError: only a part of the steps of a pass has the noise that it is charged for.
    """
    if not any(pass_of(charge.event) for charge in charges):
        return False
    draws = _first_draws(oracle, design)
    covered = [
        design.covers(member.event(), draw)
        for member, draw in zip(oracle.members, draws, strict=True)
    ]
    whole = all(
        not charge.adaptive and charge.covers == most
        for charge, most in zip(charges, covered, strict=True)
    )
    alike = (
        isinstance(design, Parts) or len({charge.event for charge in charges}) == 1
    )  # parts have their own passes
    if not (alike and whole):
        # PRIVACY: the charge is of steps that are alike, and fixed before the first of them
        # (test_a_pass_whose_steps_are_not_alike_is_refused)
        raise AdjacencyError(
            f"design must be given amplification=False for {type(oracle).__name__}, whose steps of"
            f" a pass are not all charged alike, as fixed before the first of them (got {design})"
        )
    return True


def planned_event(
    oracle: MeanOracle, design: Design, start: int, stop: int, partition: str = "planned"
) -> Event:
    """Returns the event of the draws in [start, stop) of a run."""
    if design.one_pass:
        return design.between(start, stop, [member.event() for member in oracle.members], partition)
    if isinstance(oracle, Phased):
        # PRIVACY: a later phase may cost more (test_what_is_ahead_of_a_run_is_what_it_spends)
        parts = []
        first = 0
        for member, steps in oracle.phases:
            begin = max(start, first)
            end = min(stop, first + steps)
            parts += [planned_event(member, design, begin, end, partition)] if begin < end else []
            first += steps
        return Sequential(tuple(parts))
    charge = oracle.charge(design, Draw(0, partition, "0"))
    if design.positional and charge.covers == 1:  # a pass is charged, not a draw
        return design.between(start, stop, [oracle.event()])
    return Repeat(charge.event, math.ceil((stop - start) / charge.covers))


def refuse_copy(sharing: Sequence[MeanOracle]) -> None:
    """Raises SequenceError for a copy of a run with members whose releases share a charge."""
    if sharing:
        # PRIVACY: the copy's releases would have the secrets of the original's
        # (test_a_copy_of_a_run_that_is_charged_as_a_whole_is_caught)
        raise SequenceError(
            "an optimizer whose run is charged as a whole must not be copied before finalize(): its"
            " releases share a secret; make a new one, which is charged by itself"
        )


def refuse_load(sharing: Sequence[MeanOracle]) -> None:
    """Raises SequenceError for a checkpoint of such a run that is loaded without its ledger file."""
    if sharing:
        # PRIVACY: one secret would answer for two runs, whose ledgers know nothing of each other
        # (test_a_second_load_of_a_run_that_is_charged_as_a_whole_is_caught)
        raise SequenceError(
            "a run that is charged as a whole must be continued once: by resume(state_dict), with"
            " an accountant that has the run's ledger file; or start another one, which is charged"
            " again"
        )


def refuse_lost(sharing: Sequence[MeanOracle], lost: int) -> None:
    """Raises SequenceError where releases are lost, and a member does not say by `lose` what that means."""
    if lost and any(type(member).lose is MeanOracle.lose for member in sharing):
        # PRIVACY: what later releases share with a lost one is lost with it
        # (test_a_lost_release_of_an_oracle_that_does_not_expect_it_is_caught)
        raise SequenceError(
            f"{lost} steps may have been made after the checkpoint, without which this oracle"
            " cannot go on: make a new optimizer, which is charged by itself (an oracle of yours"
            " says by `lose` what they mean)"
        )
