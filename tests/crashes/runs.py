"""Runs that are killed and resumed: python -m tests.crashes.runs NAME ..., a process of its own, which only forks.

For each optimizer, under a budget that is calibrated for the run to the last bit: a forked child trains with a ledger
file and checkpoints, publishes each release, and kills itself at one point; another child runs the same script again.
Prints a line of JSON per point, which `test_crashes` checks, and an empty one after each case. Without names it takes
them from the standard input, one a line: a fork costs a hundredth of the imports of a new process, and dies like one.
A name may say how many steps a line of the ledger file pays for, as in "holder-poisson:4"; else it pays for one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.algorithms import user_runs as runs
from torch_dpsco import train as checkpoint
from torch_dpsco.accounting import journal
from torch_dpsco.errors import BudgetExceeded
from torch_dpsco.step.run import Run
from torch_dpsco.step.step import PrivateOptimizer

EVERY = 3  # steps between checkpoints
DELTA = 1e-4
_write = os.write  # also where a test counts the calls
Build = Callable[[Any, dp.Accountant], Any]


@dataclass(frozen=True)
class Case:
    """A run: `build` makes the optimizer of parameters and an accountant with exactly the run's budget."""

    build: Build
    budget: dp.Budget = field(default_factory=lambda: dp.Budget(1.0, DELTA))
    data: Callable[[], tuple[TensorDataset, Any]] = lambda: records(120)
    model: Callable[[], nn.Module] = lambda: nn.Linear(2, 1)
    loss: Any = field(default_factory=dp.losses.Logistic)
    reduction: str | None = "mean"


def records(n: int) -> tuple[TensorDataset, Any]:
    """Returns n records with a label each, always the same, and no users."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=(n, 2))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    y = np.sign(x[:, :1] + 0.1)
    return TensorDataset(
        torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    ), None


def _problem() -> dp.Problem:
    return dp.losses.Logistic().problem(bound_x=2.0, radius=2.0)


def _steps(cls: Any, problem: dp.Problem, n: int = 120, **options: Any) -> Case:
    def build(params: Any, accountant: dp.Accountant) -> Any:
        params = list(params)
        plan = cls.plan(problem=problem, n=n, budget=accountant.budget, dim=params, **options)
        return cls(params, plan, accountant=accountant)

    return Case(build, data=lambda: records(n))


def _users(build: Build, data: Callable[[], tuple[TensorDataset, Any]]) -> Case:
    return Case(build, runs.budget(), data, lambda: runs.Shifts(2), runs.squared_loss, "sum")


def _user_clipped(params: Any, accountant: dp.Accountant) -> Any:
    plan = dp.UserClippedSGD.plan(
        n=200, budget=accountant.budget, clip=1.0, lr=0.1, batch_size=20, steps=6
    )
    return dp.UserClippedSGD(params, plan, accountant=accountant)


def _filtered(params: Any, accountant: dp.Accountant) -> Any:
    plan = runs.filtered_plan(runs.plan(200, 5), 0.1)
    return dp.UserFilteredSGD(params, plan, accountant=accountant)


def _localized_user(params: Any, accountant: dp.Accountant) -> Any:
    own = runs.phased(runs.plan(200, 4), runs.plan(300, 3), n_users=500)
    return dp.LocalizedUserSGD(params, runs.localized_plan(own), accountant=accountant)


_SMOOTH = dp.Problem(smoothness=1.0, radius=2.0)
CASES = {
    "holder-poisson": _steps(dp.HolderSGD, _problem(), batch_size=30, epochs=2),
    "holder-fixed": _steps(dp.HolderSGD, _problem(), batch_size=30, epochs=2, sampling="fixed"),
    # two passes of four steps, for which the budget has room and for no third one
    "holder-allocated": replace(
        _steps(
            dp.HolderSGD,
            _problem(),
            batch_size=30,
            epochs=2,
            sampling="allocated",
            noise_multiplier=4.0,
        ),
        budget=dp.Budget(0.6, DELTA, adjacency="add_remove"),
    ),
    "accelerated": _steps(dp.AcceleratedSGD, _SMOOTH, clip=1.0, steps=7, sampling="shuffled"),
    "proximal": _steps(dp.ProximalSGD, _SMOOTH, clip=1.0, steps=7, sampling="shuffled"),
    "clipped": _steps(dp.ClippedSGD, _SMOOTH, clip=1.0, steps=7),
    "localized": _steps(dp.LocalizedSGD, _SMOOTH, clip=1.0, reg=0.1, max_steps=3, min_phase=30),
    "localized-pilot": _steps(
        dp.LocalizedSGD, _SMOOTH, 1500, clip=dp.Pilot(), reg=0.1, max_steps=2, min_phase=600
    ),
    "user-clipped": _users(_user_clipped, lambda: runs.agreeing(200)),
    "user-filtered": _users(_filtered, lambda: runs.agreeing(200)),
    "user-halting": _users(_filtered, lambda: runs.scattered(200)),
    "localized-user": _users(_localized_user, lambda: runs.agreeing(500)),
    "localized-halting": _users(_localized_user, lambda: runs.scattered(500)),
}


def train(case: Case, folder: Path) -> tuple[Any, dp.Accountant]:
    """What a user's script does, each time it is run."""
    accountant = dp.Accountant(case.budget, ledger_path=folder / "ledger")
    model = case.model()
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer = case.build(model.parameters(), accountant)
    data, users = case.data()
    dp.fit(
        model, optimizer, data, case.loss, users=users, loss_reduction=case.reduction, progress=False,
        checkpoint=folder / "checkpoint", every=EVERY,
    )  # fmt: skip
    return optimizer, accountant


class Watcher:
    """Publishes what is charged and released, and kills the process at one point.

    Args:
        folder: where it is published.
        point: ("charge" or "step", number): after that charge of this process, or after its release.
    """

    def __init__(self, folder: Path, point: tuple[str, int] | None) -> None:
        self._out = os.open(folder / "published", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._point, self._charges, self._made = point, 0, 0
        Run.pay = self._charging(Run.pay)  # type: ignore[method-assign]
        checkpoint.Checkpoint.step_made = self._stepping(checkpoint.Checkpoint.step_made)  # type: ignore[method-assign]

    def _charging(self, real: Any) -> Any:
        def charge(run: Run, progress: Any, draw: Any) -> Any:
            self._number = progress.steps
            place = [draw.partition, draw.index] if run.design.one_pass else None
            return self._then(real, {"charged": progress.steps, "place": place})(
                run, progress, draw
            )

        return charge

    def _then(self, real: Any, row: dict[str, Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            self.publish(row)
            self._charges += 1
            if self._point == ("charge", self._charges):
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    def _stepping(self, real: Any) -> Any:
        def step_made(saved: Any) -> None:
            optimizer = saved._optimizer
            if isinstance(optimizer, PrivateOptimizer):
                values = b"".join(
                    p.detach().numpy().tobytes()
                    for g in optimizer.param_groups
                    for p in g["params"]
                )
                self.publish(
                    {
                        "released": optimizer.steps - 1,
                        "halted": optimizer.halted,
                        "values": values.hex(),
                    }
                )
            self._made += 1
            if self._point == ("step", self._made):
                os.kill(os.getpid(), signal.SIGKILL)
            real(saved)

        return step_made

    def publish(self, row: dict[str, Any]) -> None:
        """Appends a line, at once or not."""
        _write(self._out, json.dumps(row).encode() + b"\n")


def forked(case: Case, folder: Path, point: tuple[str, int] | None) -> int:
    """Returns how a child that trains ended: 0, or minus the signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        watcher = Watcher(folder, point)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                optimizer, accountant = train(case, folder)
            except BudgetExceeded as error:
                watcher.publish(
                    {"refused": str(error), "told": [str(warning.message) for warning in told]}
                )
                os._exit(3)
        ledger = accountant.ledger
        watcher.publish(
            {
                "finished": True,
                "steps": optimizer.steps,
                "finalized": optimizer.finalized,
                "epsilon": accountant.get_epsilon(case.budget.delta),
                "budget": case.budget.epsilon,
                "told": [str(warning.message) for warning in told],
                "events": [
                    [place, part, type(event).__name__, k]
                    for place, part, event, k in ledger.entries()
                ],
            }
        )
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def kill(case: Case) -> None:
    """Prints, for each point of a case, what was published; stops at the point that no run reaches."""
    case.build(
        case.model().parameters(), dp.Accountant(case.budget)
    )  # plans are remembered in the children
    for kind in ("charge", "step"):
        for number in range(1, 13):
            with tempfile.TemporaryDirectory() as folder:
                ends = [forked(case, Path(folder), (kind, number))]
                if ends == [-signal.SIGKILL]:
                    ends.append(forked(case, Path(folder), None))
                rows = [
                    json.loads(line)
                    for line in (Path(folder) / "published").read_text().splitlines()
                ]
                print(
                    json.dumps({"point": [kind, number], "ends": ends, "rows": rows}), flush=True
                )
                if len(ends) == 1:
                    break


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.argv[1:] or map(str.strip, sys.stdin):
        name, _, ahead = line.partition(":")
        journal.steps_ahead = lambda line, step, ahead=int(ahead or 1): ahead  # type: ignore[misc]
        kill(CASES[name])
        print(flush=True)
