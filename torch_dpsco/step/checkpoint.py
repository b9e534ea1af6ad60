"""Checkpoints of a private optimizer: what they keep, what they are tied to, and how a run continues.

Going on after a crash: which releases a run may have made, and what becomes of those that its checkpoint misses.

The ledger file says it: each charge names the run and how many of its releases may have been made from then on, and
is on the disk before their noise is drawn. A run that is resumed never makes one of these again, since a second answer
under the charge of the first would be free. They are lost: time, not budget.

| crash | charged | marked | after resume |
|---|---|---|---|
| before the charge of a step is on the disk | no | no | the step is made |
| after it, before or after the release | yes | yes | the step is lost, and all that were charged ahead with it |
| after a checkpoint | yes | yes | nothing is lost |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.ledger import read_state
from torch_dpsco.errors import PrivacyError, SequenceError, warn
from torch_dpsco.noise import SecretState, Source
from torch_dpsco.sampling import Partition
from torch_dpsco.step.batch import LogicalBatch
from torch_dpsco.step.run import CommonOptimizer, Paid, Progress, Run

_KEY = "dpsco"
_VERSION = 3


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _short(settings: dict[str, Any], name: str) -> str:
    text = repr(settings.get(name))
    return text if len(text) <= 80 else f"{text[:77]}..."


def add_private_state(
    state: dict[str, Any], settings: dict[str, Any], private: dict[str, Any]
) -> dict[str, Any]:
    """Returns a torch optimizer's state dict with the private part added.

    Args:
        state: of `torch.optim.Optimizer.state_dict`.
        settings: public constants that fix the mechanism, JSON-codable.
        private: tensors and primitives.
    """
    fixed = {"version": _VERSION, "settings": settings, "digest": _digest(settings)}
    # PRIVACY: (test_a_state_with_secrets_says_so_by_its_type_and_shows_none)
    kind = SecretState if private["confidential"] else dict
    return kind({**state, _KEY: kind(fixed | private)})


def split_private_state(
    state: dict[str, Any], settings: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (torch's part, private part) of a state dict.

    Raises:
        ValueError: no private part, another version, or a mechanism with other settings.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"state_dict must be a mapping (got {check.shown(state)})")
    private = state.get(_KEY)
    if private is None or private.get("version") != _VERSION:
        raise ValueError(
            f"state_dict must be a private optimizer's, version {_VERSION} (got {sorted(state)})"
        )
    if missing := {"digest", "settings", "t", "run", "ledger", "finalized"} - set(private):
        raise ValueError(
            f"state_dict must be as it was written (got one without {', '.join(sorted(missing))})"
        )
    if private["digest"] != _digest(settings):
        saved = private["settings"]
        differ = [
            name for name in sorted({*saved, *settings}) if saved.get(name) != settings.get(name)
        ]
        details = "; ".join(
            f"{name}: {_short(settings, name)} here, {_short(saved, name)} there"
            for name in differ
        )
        raise ValueError(
            "state_dict must be of the same plan (got another one:"
            f" {details or 'its digest is wrong'}); make the optimizer with the arguments of the"
            " saved run"
        )
    return {key: value for key, value in state.items() if key != _KEY}, private


def require_charged(private: dict[str, Any], *, shared: bool) -> None:
    """Raises PrivacyError unless the ledger of a state holds the charges of its steps; see `split_private_state`.

    Args:
        private: private part of the state.
        shared: whether steps share a charge.
    """
    steps = private["t"]
    ledger = read_state(private["ledger"])
    marked = ledger.releases.get(private["run"], private.get("since", steps))
    if len(ledger.ledger) < (min(steps, 1) if shared else steps) or marked < steps:
        # PRIVACY: a checkpoint whose ledger was emptied or exchanged (test_steps_without_their_charges_are_refused)
        raise PrivacyError(
            f"state_dict must hold the charges of its {steps} steps (got a ledger of"
            f" {len(ledger.ledger)} events): its ledger was emptied or is another one"
        )


def restore_averages(
    state: MutableMapping[Tensor, Any], saved: dict[str, Any], params: Sequence[Tensor]
) -> None:
    """Puts the averages back in float64: torch casts what it loads to the dtype of the parameters."""
    for p, index in zip(
        params, (i for group in saved["param_groups"] for i in group["params"]), strict=True
    ):
        average = saved["state"].get(index, {}).get("average")
        if average is not None:
            state[p]["average"] = average.to(p.device, copy=True)


def unpacked(
    run: CommonOptimizer, settings: dict[str, Any], state: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], Mapping[str, int]]:
    """Returns (torch's part, private part, releases that are marked) of a checkpoint for a run that continues.

    Raises:
        ValueError: the state is of another plan, noise, clip or version; says which settings differ.
        SequenceError: the optimizer has made steps.
        PrivacyError: the ledger file is missing, of another ledger, or older than the checkpoint.
    """
    if run.steps or run.finalized:
        raise SequenceError(
            "resume must be called on a new optimizer (got one that has made steps)"
        )
    public, private = split_private_state(state, settings)
    # PRIVACY: only its own ledger knows what was released since (test_a_run_is_resumed_with_its_own_ledger_file_only)
    return public, private, run.accountant.continue_from(private["ledger"])


def tell_of_lost(steps: int, made: int) -> None:
    """Warns of steps that an interrupted run may have made after its checkpoint, after `made` steps."""
    if steps:
        warn(
            f"{steps} steps after step {made} were lost to a crash: they were charged after the"
            " checkpoint, or ahead, so that the run goes on without them and makes none of them"
            " again",
            stacklevel=4,
        )


def private_state(
    run: Run, progress: Progress, batch: LogicalBatch, noise: Source
) -> dict[str, Any]:
    """Returns what a checkpoint keeps beside torch's part of a state: tensors and primitives."""
    # PRIVACY: a run that is resumed has the same threshold
    # (test_a_checkpoint_of_the_start_gives_its_threshold_to_a_resumed_run_only)
    run.oracle.prepare(noise)
    phase, k = run.schedule.position(progress.steps)
    partition = None if progress.finalized else batch.sealed()
    oracle = run.oracle.state()
    # PRIVACY: with the keys known, a record less moves all later ones, and who has the key of a fingerprint can
    # try records (test_the_keys_of_records_are_secret_where_removing_one_moves_the_others)
    shared = bool(run.payments.sharing) and not (
        run.payments.in_passes and progress.finalized
    )  # of passes no draw is left
    private: dict[str, Any] = {
        "t": progress.steps,
        "phase": phase,
        "k": k,
        "halted": progress.halted,
        "still": progress.stills,
        "finalized": progress.finalized,
        "run": run.payments.run,
        "since": progress.since,
        "public": progress.public,
        "rule": run.rule.state_dict(),
        "oracle": oracle,
        "ledger": run.accountant.state_dict(),
        "confidential": shared or partition is not None or isinstance(oracle, SecretState),
        "paid": None if run.payments.paid is None else run.payments.paid.row,
    }
    if partition is not None:
        private["partition"] = {**vars(partition), "cut": torch.from_numpy(partition.cut)}
    return private


def of_a_start(run: Run, private: dict[str, Any]) -> dict[str, Any]:
    """Returns the private part of a checkpoint without steps, for another run than the one that it is of."""
    # PRIVACY: a threshold that nothing was charged for yet serves one run, the resumed one
    # (test_a_checkpoint_of_the_start_gives_its_threshold_to_a_resumed_run_only)
    private = private | {"oracle": None, "run": run.payments.run}
    if run.payments.in_passes:
        # PRIVACY: and so do secret draws (test_a_checkpoint_of_the_start_gives_its_draws_to_a_resumed_run_only)
        private.pop("partition", None)
    return private


def restore(
    run: Run,
    progress: Progress,
    batch: LogicalBatch,
    private: dict[str, Any],
    groups: list[dict[str, Any]],
) -> None:
    """Puts run, progress and batch where a checkpoint was; `groups` are the optimizer's, already restored."""
    run.rule.load_state_dict(private["rule"], groups)
    if private["oracle"] is not None:
        run.oracle.restore(private["oracle"])
    if "partition" in private:
        saved = private["partition"]
        batch.resume(Partition(**{**saved, "cut": saved["cut"].numpy()}))
    progress.steps = private["t"]
    progress.halted = private["halted"]
    progress.finalized = private["finalized"]
    progress.stills = private["still"]
    progress.since = private.get("since", progress.steps)
    progress.public = private.get("public", 0)
    run.payments.run = private["run"]
    run.payments.paid = None if private.get("paid") is None else Paid.of_row(private["paid"])


def go_on_behind(batch: LogicalBatch, marked: Mapping[str, int]) -> None:
    """Lets a batch go on behind all draws of its partition that releases may have used."""
    partition = batch.partition
    if partition is not None:
        used = marked.get(batch.partition_name, partition.made)
        batch.resume(replace(partition, made=max(partition.made, used)))
