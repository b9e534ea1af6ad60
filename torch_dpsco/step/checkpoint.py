"""Checkpoints of a private optimizer: what they keep, what they are tied to, and how a run continues.

Going on after a crash: which releases a run may have made, and what becomes of those that its checkpoint misses.

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

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_dpsco import _validate as check
from torch_dpsco.accounting.ledger_file import read_state
from torch_dpsco.distributed import join
from torch_dpsco.errors import PrivacyError, SequenceError, warn
from torch_dpsco.rng import noise_generator
from torch_dpsco.rows.plain_steps import note_owner
from torch_dpsco.sampling import Partition
from torch_dpsco.secret import SecretState
from torch_dpsco.step import checks
from torch_dpsco.step.assembly import Assembly
from torch_dpsco.step.batch import LogicalBatch
from torch_dpsco.step.common import CommonOptimizer
from torch_dpsco.step.oracle import Release
from torch_dpsco.step.payments import Paid, new_run, refuse_copy, refuse_load
from torch_dpsco.step.turn import in_turn

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
            f"{name}: {_short(settings, name)} here, {_short(saved, name)} there" for name in differ
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
            " checkpoint, so that the run goes on without them and makes none of them again",
            stacklevel=4,
        )


def tell_of_lost_answer(name: str) -> None:
    """Warns of an only answer that was charged, and may have been released, before the crash."""
    warn(
        f"the answer of this {name} run was charged before the crash and is lost: it may have been"
        " released, so that another one is charged again, if the budget has room for it",
        stacklevel=4,
    )


class Saved(Assembly):
    """The state of a private optimizer; `PrivateOptimizer`, which adds the step, has the arguments."""

    @abstractmethod
    def _apply(self, params: list[nn.Parameter], release: Release) -> None:
        """Moves by a release."""

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and primitives (loads with weights_only): no noise stream, no batch in progress.

        CONFIDENTIAL, as it says itself and by its type (`SecretState`), as long as one pass goes on: it keeps who is
        in which part and a keyed fingerprint of the records, for which all of them are read once. So is a run of
        noisy tests: it keeps their thresholds.
        """
        self._require_private()  # the iterates that are kept follow at the end of the block
        # PRIVACY: a run that is resumed has the same threshold
        # (test_a_checkpoint_of_the_start_gives_its_threshold_to_a_resumed_run_only)
        self.oracle.prepare(self._noise)
        phase, k = self.schedule.position(self._steps)
        private: dict[str, Any] = {
            "t": self._steps,
            "phase": phase,
            "k": k,
            "halted": self._halted,
            "still": self._stills,
            "finalized": self._finalized,
            "run": self.run,
            "since": self._since,
            "public": self._public,
        }
        private |= {"rule": self.rule.state_dict(), "oracle": self.oracle.state()}
        partition = None if self._finalized else self._batch.sealed()
        # PRIVACY: with the keys known, a record less moves all later ones, and who has the key of a fingerprint can
        # try records (test_the_keys_of_records_are_secret_where_removing_one_moves_the_others)
        shared = bool(self._payments.sharing) and not (
            self._payments.in_passes and self._finalized
        )  # of passes no draw is left
        secret = shared or partition is not None or isinstance(private["oracle"], SecretState)
        private |= {"ledger": self.accountant.state_dict(), "confidential": secret}
        private["paid"] = None if self._payments.paid is None else self._payments.paid.row
        if partition is not None:
            private["partition"] = {**vars(partition), "cut": torch.from_numpy(partition.cut)}
        return add_private_state(super().state_dict(), self.settings(), private)

    @in_turn
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state, ledger included; drops a batch in progress.

        Raises:
            ValueError: the state is of another plan, noise, clip or version; says which settings differ.
            PrivacyError: the state's ledger would forget events charged here.
            SequenceError: the run is charged as a whole and goes on by `resume` only.
        """
        public, private = split_private_state(state_dict, self.settings())
        require_charged(private, shared=bool(self._payments.sharing))
        if private["t"] and not private["finalized"]:
            refuse_load(self._payments.sharing)
        self.discard()
        self.accountant.load_state_dict(private["ledger"])
        if not private["t"] and not self._steps:
            # PRIVACY: a threshold that nothing was charged for yet serves one run, the resumed one
            # (test_a_checkpoint_of_the_start_gives_its_threshold_to_a_resumed_run_only)
            private = private | {"oracle": None, "run": self.run}
            if self._payments.in_passes:
                # PRIVACY: and so do secret draws (test_a_checkpoint_of_the_start_gives_its_draws_to_a_resumed_run_only)
                private.pop("partition", None)
        self._restore(public, private)

    def _restore(self, public: dict[str, Any], private: dict[str, Any]) -> None:
        super().load_state_dict(public)
        restore_averages(self.state, public, self._all_params())
        self.rule.load_state_dict(private["rule"], self.param_groups)
        if private["oracle"] is not None:
            self.oracle.restore(private["oracle"])
        if "partition" in private:
            saved = private["partition"]
            self._batch.resume(Partition(**{**saved, "cut": saved["cut"].numpy()}))
        self._steps = private["t"]
        self._halted = private["halted"]
        self._finalized = private["finalized"]
        self._stills = private["still"]
        self._payments.run = private["run"]
        self._payments.paid = None if private.get("paid") is None else Paid.of_row(private["paid"])
        self._since = private.get("since", self._steps)
        self._public = private.get("public", 0)

    @in_turn
    def resume(self, state_dict: dict[str, Any]) -> int:
        """Goes on with an interrupted run, on a new optimizer whose accountant has the run's ledger file.

        Load the model's state before: it holds the point of the next step. Steps that were charged after the
        checkpoint are not made again, since they may have been released: they are lost, and a warning counts them.

        Args:
            state_dict: of the run's last checkpoint.

        Returns:
            The number of steps that were lost.

        Raises:
            ValueError: the state is of another plan, noise, clip or version; says which settings differ.
            SequenceError: the optimizer has made steps.
            PrivacyError: the ledger file is missing, of another ledger, or older than the checkpoint.
        """
        public, private, marked = unpacked(self, self.settings(), state_dict)
        require_charged(private, shared=bool(self._payments.sharing))
        if self._payments.sharing and "paid" not in private:
            raise ValueError(
                "state_dict must be as it was written (got one without what was paid for)"
            )
        self.discard()
        self._restore(public, private)
        partition = self._batch.partition
        made = self._steps
        if partition is not None:
            used = marked.get(self._batch.partition_name, partition.made)
            self._batch.resume(replace(partition, made=max(partition.made, used)))
        lost = 0 if self._finalized else max(0, marked.get(self.run, made) - made)
        if lost:
            self._payments.require_losable(lost)
        with torch.no_grad():
            for _ in range(lost):
                # PRIVACY: a test that has failed answers no more (test_a_halt_that_the_checkpoint_missed_is_kept)
                self._count_lost(halted=self._payments.halt_mark(self._steps) in marked)
        tell_of_lost(lost, made)
        if self._steps == self._planned:
            self.finalize()
        return lost

    def _count_lost(self, *, halted: bool) -> None:
        """Counts the next step, which was charged, as one whose release is lost."""
        halted = self.oracle.lose(self._steps, halted=halted)
        self._payments.note_lost(
            self._steps, self._batch.partition_name, cut=self._batch.partition is not None
        )
        self._apply(self._trained(), Release([], halted=halted, still=True))

    def __getstate__(self) -> dict[str, Any]:
        self._require_private()
        if not self._finalized:
            refuse_copy(self._payments.sharing)
        # PRIVACY: a copy draws noise of its own; a shared stream could be subtracted (test_copies_draw_fresh_noise)
        # a scheduler's wrapper of `step` is bound to the original, which the copy must not step
        kept = {
            key: value
            for key, value in self.__dict__.items()
            if key not in ("_noise", "_batch", "_world", "step")
        }
        # PRIVACY: with the fingerprint of its records (test_a_copy_goes_on_with_the_records_of_its_run_only)
        return {**kept, "_partition": self._batch.sealed()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        partition = state.pop("_partition", None)
        super().__setstate__(state)
        if "oracle" not in state:  # torch's load_state_dict passes state and groups through here
            return
        device = checks.one_device(self._all_params())
        self._noise = noise_generator(device)
        self._seeded = False
        self._batch = LogicalBatch(self.design, in_order=self._in_order)
        self._world = join(device)
        if partition is not None:
            self._batch.resume(partition)
        self.oracle.discard()
        # PRIVACY: a copy has releases of its own (test_a_copy_is_another_run_in_the_ledger)
        self._payments.run = new_run()
        self._since = self._steps
        note_owner(self._all_params(), self)
