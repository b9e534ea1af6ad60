"""Checkpoints of an optimizer that releases only its answer: they hold secret iterates, as their type says."""

from __future__ import annotations

import math
import secrets
from typing import Any

from torch import nn

from torch_dpsco.accounting.adjacency import Adjacency
from torch_dpsco.accounting.designs import Design, Shuffled
from torch_dpsco.accounting.events import SimpleEvent
from torch_dpsco.errors import SequenceError
from torch_dpsco.optim.common import CommonOptimizer, in_turn
from torch_dpsco.optim.edits import Kept
from torch_dpsco.optim.state import (
    add_private_state,
    restore_averages,
    split_private_state,
    tell_of_lost_answer,
    unpacked,
)
from torch_dpsco.prox import Prox
from torch_dpsco.sampling import DrawLog


class SavedRowFree(CommonOptimizer):
    """The state of a run of secret iterates; `RowFreeOptimizer`, which adds the step, has the arguments."""

    design: Design
    planned_steps: int
    lrs: tuple[float, ...]
    event: SimpleEvent
    noise_std: float
    prox: Prox
    bounds: tuple[float | None, float | None]
    average: str
    adjacency: Adjacency
    _params: tuple[nn.Parameter, ...]
    _epoch: str
    _given_up: bool
    _kept: Kept
    _run: str
    _log: DrawLog | None

    def settings(self) -> dict[str, Any]:
        """Returns the public constants that fix the mechanism; checkpoints of other ones are refused."""
        return {
            "design": repr(self.design),
            "steps": self.planned_steps,
            "lrs": [lr.hex() for lr in self.lrs],
            "event": repr(self.event),
            "noise_std": self.noise_std.hex() if math.isfinite(self.noise_std) else "inf",
            "prox": repr(self.prox),
            "bounds": repr(self.bounds),
            "average": self.average,
            "adjacency": self.adjacency,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and primitives. Until `finalize()` a `SecretState`: it holds secret iterates."""
        private = {
            "t": self._steps,
            "run": self._run,
            "finalized": self._finalized,
            "epoch": self._epoch,
            "ledger": self.accountant.state_dict(),
            "confidential": not self._finalized,
            "given_up": self._given_up,
        }
        if not self._finalized:
            private["iterates"] = [value.clone() for value in self._kept.iterates]
        return add_private_state(super().state_dict(), self.settings(), private)

    @in_turn
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state, ledger included. Load the model's state too: it holds the iterate.

        The run has one charge. Answers to two loads of one state are charged twice only where their accountants know
        of each other: in several processes by the ledger file of the run, see `resume`.

        Raises:
            ValueError: the state is of another plan or version; says which settings differ.
            PrivacyError: the state's ledger would forget events charged here.
            SequenceError: a run with independent batches is not over.
        """
        public, private = split_private_state(state_dict, self.settings())
        if not isinstance(self.design, Shuffled) and private["t"] > 0 and not private["finalized"]:
            # PRIVACY: two continuations would share who was drawn before, which composition does not allow for
            # (test_a_run_with_independent_batches_cannot_be_resumed)
            raise SequenceError(
                "a run with independent batches must be made in one go: its continuations would share who was drawn; "
                "use sampling='shuffled', which can be continued between epochs"
            )
        self.accountant.load_state_dict(private["ledger"])
        if not private["t"]:  # nothing was drawn: a run of its own
            private = private | {"run": self._run}
        self._restore(public, private)

    def _restore(self, public: dict[str, Any], private: dict[str, Any]) -> None:
        super().load_state_dict(public)
        restore_averages(self.state, public, self._params)
        self._steps, self._finalized, self._epoch = private["t"], private["finalized"], private["epoch"]
        self._given_up = private["given_up"]
        self._kept.note(private.get("iterates"))
        self._run, self._log = private.get("run", self._run), None
        self.zero_grad()

    @in_turn
    def resume(self, state_dict: dict[str, Any]) -> int:
        """Goes on with an interrupted run, on a new optimizer whose accountant has the run's ledger file.

        Nothing was released before `finalize()`, so that no step is lost: those after the checkpoint are made again;
        with independent batches, or within a permutation, all are (then the parameters are set to 0). Warns if the
        answer was charged, and is lost: another one is charged again.

        Args:
            state_dict: of the run's last checkpoint; load the model's state before.

        Returns:
            0: the number of steps that were lost.

        Raises:
            ValueError: the state is of another plan or version; says which settings differ.
            SequenceError: the optimizer has made steps.
            PrivacyError: the ledger file is missing, of another ledger, or older than the checkpoint.
        """
        public, private, marked = unpacked(self, self.settings(), state_dict)
        whole = isinstance(self.design, Shuffled) and private["t"] % self.design.steps_per_epoch == 0
        if whole or private["finalized"] or not private["t"]:
            self._restore(public, private)
        else:
            for p in self._params:
                p.detach().zero_()
            self._kept.note()
        if private["run"] in marked and not self._finalized:
            self._run = secrets.token_hex(16)
            tell_of_lost_answer(type(self).__name__)
        return 0
