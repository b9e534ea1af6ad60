"""Public numbers of a run, written to TensorBoard, Weights & Biases, MLflow or anything else.

    log = dp.loggers.tensorboard(SummaryWriter(folder))      # a writer of yours, set up by you
    dp.fit(model, optimizer, dataset, loss, log=log)         # in a loop of yours: log(optimizer) after each step
    log(optimizer, public={"accuracy": accuracy})            # measured on public data, for which you vouch

What is written of a run follows from its plan and ledger (`public_numbers`); what training records gave cannot be
passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.acts import public_names
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.step.checks import is_first
from torch_dpsco.step.run import CommonOptimizer
from torch_dpsco.step.step import PrivateOptimizer

__dir__ = public_names(__name__)

_UP = ("privacy/epsilon", "privacy/delta")  # rounded up where digits are lost, all others down


class Logger:
    """Writes the public numbers of a run every so many steps, and once more when its answer is installed.

    Call it after each step with the optimizer, or give it to `fit`. Runs that release their answer alone are written
    once they have. In several processes rank 0 writes. What `write` raises reaches you after the step that it is about:
    that step stays made and charged, and the run can go on.

    Args:
        write: write(numbers, step), numbers by name ("privacy/epsilon", ...), step the number of releases made.
        every: steps between two lines. Each costs one `get_epsilon`: hundredths of a second for sampled steps.
        delta: at which epsilon is written; default the budget's. Without either no epsilon is.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.ones(100, 1))
        >>> model, problem = torch.nn.Linear(3, 1), dp.losses.Logistic().problem(bound_x=2.0)
        >>> plan = dp.HolderSGD.plan(problem=problem, n=100, budget=dp.Budget(1.0, 1e-3), batch_size=20, epochs=2)
        >>> optimizer, lines = dp.HolderSGD(model.parameters(), plan), {}
        >>> log = Logger(lambda numbers, step: lines.update({step: numbers}), every=4)
        >>> _ = dp.fit(model, optimizer, data, dp.losses.Logistic(), progress=False, log=log)
        >>> list(lines), 0.99 < lines[10]["privacy/epsilon"] <= 1.0
        ([4, 8, 10], True)
        >>> log(optimizer, training_loss=0.3)
        Traceback (most recent call last):
        ...
        torch_dpsco.errors.PrivacyError: training_loss must not be logged: ...
    """

    @typed
    def __init__(
        self,
        write: Callable[[dict[str, float], int], Any],
        *,
        every: int = 50,
        delta: float | None = None,
    ) -> None:
        self._write = write
        self._every = check.positive_count(every=every)
        self._delta = None if delta is None else check.open_interval(0.0, 1.0, delta=delta)
        self._last: tuple[str, int] | None = None  # run and step of the last line

    def __call__(
        self,
        optimizer: CommonOptimizer,
        public: Mapping[str, float] | None = None,
        **private: Any,
    ) -> None:
        """Writes the numbers of a run, if it is time to.

        Args:
            optimizer: after its step.
            public: numbers that you vouch for, computed from the released model on public data; written at once, as
                "public/...".
            private: nothing; raises.

        Raises:
            PrivacyError: anything else is given; or `public`, before the only answer of a run is released.
            SequenceError: `public` is given in the middle of a batch.
            ValueError: what is public is no plain number.
        """
        if not isinstance(optimizer, CommonOptimizer):
            raise ValueError(f"optimizer must be a private one (got {check.shown(optimizer)})")
        if private:
            # PRIVACY: losses, norms and sizes of training batches are private (test_a_private_number_is_refused)
            name = next(iter(private))
            raise PrivacyError(
                f"{name} must not be logged: what training records give (a loss, a norm, the size"
                " of a batch) is private, and to write it is to release it without noise; measure"
                f" on public data instead, and pass public={{{name!r}: ...}}"
            )
        vouched = _vouched(public)
        steps = isinstance(optimizer, PrivateOptimizer)
        # PRIVACY: the number of inner steps may be private (test_a_run_of_one_answer_is_written_once_it_is_released)
        step = optimizer.steps if steps else int(optimizer.finalized)
        if vouched and not (steps or step):
            # PRIVACY: a score of secret iterates is a release (test_scores_of_secret_iterates_are_refused)
            raise PrivacyError(
                "public must wait for finalize(): what the parameters hold before is secret"
            )
        if isinstance(optimizer, PrivateOptimizer) and optimizer.in_draw:
            if vouched:
                raise SequenceError(
                    "public must be given after the last chunk of a batch, not before"
                )
            return  # what is due was written after the step
        if is_first():
            self._log(optimizer, step, vouched)

    def _log(self, optimizer: CommonOptimizer, step: int, vouched: dict[str, float]) -> None:
        # PRIVACY: one line a step: the number of chunks tells the size of a draw (test_chunks_of_a_draw_leave_one_line)
        due = (
            step
            and (optimizer.finalized or step % self._every == 0)
            and self._last != (optimizer.run, step)
        )
        numbers = public_numbers(optimizer, self._delta) if due else {}
        line = {f"privacy/{name}": value for name, value in numbers.items()}
        if line or vouched:
            self._write(line | vouched, step)
        if due:
            self._last = optimizer.run, step


@typed
def public_numbers(optimizer: CommonOptimizer, delta: float | None = None) -> dict[str, float]:
    """Returns what plan and ledger say about a run, all that a logger writes of it.

    epsilon is what was spent at delta (default the budget's), under the accountant's adjacency, and epsilon_left what
    `Accountant.remaining` shows; noise_multiplier is that of each step, where one number holds for all; lr the step
    size of the first group of parameters; batch_size the planned one: the number of rows drawn is private.
    """
    accountant = optimizer.accountant
    budget = accountant.budget
    run: dict[str, Any] = {}
    if delta is None and budget is not None:
        delta = budget.quoted_delta
    if delta is not None:
        run = {"epsilon": accountant.get_epsilon(delta), "delta": delta}
    if budget is not None and delta == budget.delta:
        run["epsilon_left"] = accountant.remaining
    if isinstance(optimizer, PrivateOptimizer):
        run["noise_multiplier"] = getattr(optimizer.oracle, "noise_multiplier", None)
        run["lr"] = optimizer.param_groups[0]["lr"]
        run["batch_size"] = optimizer.design.batch_size
    return {name: float(value) for name, value in run.items() if value is not None}


def _vouched(public: Any) -> dict[str, float]:
    """Returns public numbers by the names that they are written under."""
    given = {} if public is None else public
    if not isinstance(given, Mapping):
        raise ValueError(
            f"public must be a mapping of names to numbers (got {check.shown(public)})"
        )
    for name, value in given.items():
        if isinstance(value, Tensor):  # most likely the loss of a batch
            raise ValueError(
                f"{name} must be a plain number, as float(...) of a score on public data (got"
                " Tensor)"
            )
    return {
        f"public/{name}": check.finite(**{str(name): value}) for name, value in given.items()
    }


# -- trackers ----------------------------------------------------------------------------------------------------------


@typed
def tensorboard(writer: Any, *, every: int = 50, delta: float | None = None) -> Logger:
    """Returns a logger to your `torch.utils.tensorboard.SummaryWriter`; see `Logger`."""
    _require("add_scalar", "a torch.utils.tensorboard.SummaryWriter", writer=writer)

    def write(numbers: dict[str, float], step: int) -> None:
        for name, value in in_single(numbers).items():
            writer.add_scalar(name, value, step)

    return Logger(write, every=every, delta=delta)


def in_single(numbers: Mapping[str, float]) -> dict[str, float]:
    """Returns numbers of a run as float32 can hold them: what was spent rounded up, all others down."""
    return {
        name: _single(value) if name in _UP else -_single(-value)
        for name, value in numbers.items()
    }


def _single(value: float) -> float:
    """Returns the least float32 that is no smaller: event files of TensorBoard keep no more."""
    # PRIVACY: written figures are quoted (test_no_written_epsilon_is_less_than_was_spent)
    nearest = np.float32(value)
    return (
        float(nearest)
        if float(nearest) >= value
        else float(np.nextafter(nearest, np.float32(np.inf)))
    )


@typed
def wandb(run: Any, *, every: int = 50, delta: float | None = None) -> Logger:
    """Returns a logger to your run of Weights & Biases, from `wandb.init(...)`; see `Logger`.

    The step is logged as "privacy/step": W&B counts its own.
    """
    _require("log", "what wandb.init(...) returns", run=run)
    return Logger(
        lambda numbers, step: run.log({"privacy/step": step, **numbers}),
        every=every,
        delta=delta,
    )


@typed
def mlflow(module: Any, *, every: int = 50, delta: float | None = None) -> Logger:
    """Returns a logger to the active run of `mlflow`, the module, which you have set up; see `Logger`."""
    _require("log_metrics", "mlflow itself", module=module)
    return Logger(
        lambda numbers, step: module.log_metrics(numbers, step=step), every=every, delta=delta
    )


def _require(method: str, kind: str, **tracker: Any) -> None:
    ((name, thing),) = tracker.items()
    if not callable(getattr(thing, method, None)):
        raise ValueError(f"{name} must be {kind} (got {check.shown(thing)})")
