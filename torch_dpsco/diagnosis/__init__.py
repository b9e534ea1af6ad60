"""The doctor: finds what silently breaks privacy in a training script, before any budget is spent.

Works on the objects of torch_dpsco and on plain Opacus ones. Each mistake has a heading in docs/mistakes.md.

Of optimizers that need no per-sample gradients it asks more: is the loss of a record what was promised about it?
Nothing is clipped there, and privacy rests on promises about the loss of any record, so one synthetic record that
breaks them shows that they do not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.diagnosis.advice import ADVICE
from torch_dpsco.diagnosis.checks import CHECKS
from torch_dpsco.diagnosis.probe import examine
from torch_dpsco.diagnosis.script import NO_RECORD, Diagnosis, Finding, Script
from torch_dpsco.estimators.solved import SolvedOptimizer
from torch_dpsco.rows.attach import first_step_of
from torch_dpsco.rows.layers.recorded import require_whole

__all__ = ["Diagnosis", "Finding", "doctor"]


@typed
def doctor(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    loader: Any,
    optimizer: Optimizer | None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    record: Any = NO_RECORD,
) -> Diagnosis:
    """Returns what is wrong with a training script, spending and changing nothing.

    Reads the objects, and makes ten to forty small forward and backward passes on synthetic batches with the shapes of
    the data set's first record. It knows the mistakes it looks for: `healthy` is no proof of privacy.

    Args:
        model: as it is called in the loop: attached, Opacus' GradSampleModule (hooks or ghost), or plain (as
            HolderOutputSGD wants it).
        loss: loss(outputs, targets) if records are (input, target) pairs, else loss(model, batch); the criterion that
            make_private returns in ghost mode. None leaves out what needs it: nothing is run.
        loader: what the loop iterates over; it is not iterated here, only its data set's record 0 is read. None leaves
            out what needs it.
        optimizer: private, Opacus' DPOptimizer, or a torch one. None leaves out what needs it.
        scaler: torch.amp.GradScaler of the loop.
        record: a record to take the shapes from, instead of the data set's first.

    Guarantee:
        No value in the data set has a say in the findings: shapes, dtypes and the number of records have; where
        iterates are secret, they have none either. Parameters, buffers, gradients, rows, hooks, modes, random streams
        and draws are as before.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = dp.attach(nn.Linear(3, 1))
        >>> plan = dp.HolderSGD.plan(problem=dp.losses.Logistic().problem(bound_x=2.0), n=100,
        ...                          budget=dp.Budget(1.0, 1e-3), batch_size=20, epochs=2)
        >>> optimizer = dp.HolderSGD(model.parameters(), plan)
        >>> loader = optimizer.loader(torch.utils.data.TensorDataset(torch.randn(100, 3), torch.ones(100, 1)))
        >>> print(dp.doctor(model, dp.losses.Logistic(), loader, optimizer))
        healthy: nothing found
    """
    check.made(loss=loss)
    require_whole(model)
    if isinstance(loader, str) or not (
        loader is None or hasattr(loader, "__iter__") or hasattr(loader, "__enter__")
    ):
        raise ValueError(
            f"loader must be what the loop iterates over, or None (got {check.shown(loader)})"
        )
    if isinstance(optimizer, SolvedOptimizer):
        # it reads records by itself: no model, loss or loader of the script is in its release
        return Diagnosis.of(())
    script = Script(model, loss, loader, optimizer, scaler, record)
    evidence = examine(script)
    if evidence.isolation is not None:  # reports of the loader's optimizer quote it
        script.source.isolation.checked = str(evidence.isolation)
    if script.attached:
        first_step_of(script.module).probed = evidence.compared
    return Diagnosis.of(
        chain.from_iterable(check(script, evidence) for check in (*CHECKS, *ADVICE))
    )
