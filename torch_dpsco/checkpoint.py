"""Checkpoints of `fit`: written whole or not at all, and continued by the next call with the same path."""

from __future__ import annotations

import os
import pickle
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from torch_dpsco import _validate as check
from torch_dpsco.accounting.ledger_file import sync_folder
from torch_dpsco.distributed import world_size
from torch_dpsco.errors import PrivacyError, SequenceError, UtilityWarning
from torch_dpsco.step import checks
from torch_dpsco.step.checks import require_same_parameters
from torch_dpsco.step.step import PrivateOptimizer


class Unsaved:
    """A run without checkpoints."""

    def is_over(self, dataset: Dataset[Any]) -> bool:
        """Returns whether the run that was taken up has no steps to make, after installing its answer."""
        return False

    def step_made(self) -> None:
        """Saves if it is time to."""

    def save(self) -> None:
        """Saves the current state."""


class Checkpoint(Unsaved):
    """The checkpoint file of one run.

    CONFIDENTIAL: it may hold secret iterates, who was in which batch, and noise that is still to be used. It is written
    with rights for its owner only.

    Args:
        path: of the file; a file of this run is taken up at once, which may lose steps (see `PrivateOptimizer.resume`).
        every: steps between two checkpoints.
        model: with the optimizer's parameters.
        optimizer: whose accountant has a ledger file.

    Raises:
        PrivacyError: no ledger file, another one than that of the run, or a checkpoint of another run.
        ValueError: a checkpoint of another plan, or no checkpoint.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int,
        model: nn.Module,
        optimizer: PrivateOptimizer,
    ) -> None:
        self.path = os.fspath(path)
        self.every = check.positive_count(every=every)
        self._model = model
        self._optimizer = optimizer
        if world_size() > 1:
            raise SequenceError(
                f"checkpoint must be None in a run of several processes (got {world_size()})"
            )
        if optimizer.accountant.ledger_path is None:
            # PRIVACY: a checkpoint alone does not know what was released after it
            # (test_a_checkpoint_needs_a_ledger_file)
            raise PrivacyError(
                "accountant must have a ledger file for a run with checkpoints, which knows what"
                " was released after the last one: accountant=dp.Accountant(budget,"
                " ledger_path=...)"
            )
        self._finished = False  # whether the file is of a run that was over
        if os.path.exists(self.path):
            self._take_up()

    def _take_up(self) -> None:
        try:
            state = torch.load(self.path, weights_only=True)
            model = state["model"]
            optimizer = state["optimizer"]
            run = state["optimizer"]["dpsco"]["run"]
        except (RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"checkpoint must be a file that fit has written (got {self.path!r},"
                f" {type(error).__name__}): name another file"
            ) from error
        self._finished = bool(state["optimizer"]["dpsco"]["finalized"])
        if not self._optimizer.steps and not self._optimizer.finalized:
            self._model.load_state_dict(model)
            self._optimizer.resume(optimizer)
        elif run != self._optimizer.run:
            raise PrivacyError(
                f"checkpoint must be a file of this run (got {self.path!r}, of another one): name"
                " another file"
            )

    def is_over(self, dataset: Dataset[Any]) -> bool:
        """Returns whether the run that was taken up has no steps to make, after installing its answer.

        Warns if that was installed before: nothing is left of the records by which a finished run could know them.

        Raises:
            UnitError: the data set is another one, as its public number of records shows.
        """
        optimizer = self._optimizer
        planned = optimizer.schedule.steps
        if not optimizer.finalized and (planned is None or optimizer.steps < planned):
            return False
        if optimizer.accountant.unit == "example":
            checks.require_universe(
                optimizer.design, optimizer.adjacency, checks.number_of_records(dataset)
            )
        if self._finished:
            warnings.warn(
                f"nothing was trained: checkpoint={self.path!r} is of a finished run, whose model"
                " is returned, whatever dataset holds; to train another one, name another file",
                UtilityWarning,
                stacklevel=4,
            )
        else:
            optimizer.finalize()
            self.save()
        return True

    def step_made(self) -> None:
        """Saves if it is time to."""
        if self._optimizer.steps % self.every == 0:
            self.save()

    def save(self) -> None:
        """Replaces the file by the current state, which is on the disk before it gets the name."""
        state: dict[str, Any] = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        draft = f"{self.path}.draft"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path)
        sync_folder(self.path)


def open_checkpoint(
    path: str | os.PathLike[str] | None,
    every: int,
    model: nn.Module,
    optimizer: PrivateOptimizer,
) -> Unsaved:
    """Returns the checkpoint of a run, taken up if it is there; `Unsaved` without a path."""
    every = check.positive_count(every=every)
    if path is None:
        return Unsaved()
    require_same_parameters(model, optimizer)
    return Checkpoint(path, every, model, optimizer)
