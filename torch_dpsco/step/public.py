"""Steps of a plain optimizer on public data, between private steps.

A private run keeps other points than the parameters: averages, inner and outer iterates, anchors. What a public block
moves the parameters by is added to each of them, so that the run goes on as if it had come to where it was left:

    w_after = Proj(w_before + what the plain steps added up to),    kept <- Proj(kept + w_after - w_before)

Gradients and momenta of private steps stay. That is post-processing: later queries depend on released means and on
public data, which adaptive composition covers. Runs whose noise, tests or phases are made for the run as a whole
refuse.

Source: docs/proofs/accounting.md#composition.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from torch_dpsco._doors import typed
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows.attach import is_attached, paused
from torch_dpsco.rows.forwards import owners
from torch_dpsco.step.step import PrivateOptimizer


@typed
@contextmanager
def public(model: nn.Module) -> Iterator[None]:
    """Lets plain optimizers step on an attached model, with plain gradients of PUBLIC data, between private steps.

    What they move is kept by the next private steps, see `step.public`, and the private optimizer's report says that
    there were public steps. In the block nothing is recorded and no private step is made.

    Args:
        model: attached.

    Raises:
        SequenceError: the model is not attached, a private batch is in progress, or the run must be undisturbed, as
            that of `HolderOutputSGD`, `BoltOnPSGD`, `LocalizedSGD`, `LocalizedUserSGD` and `UserFilteredSGD`.

    Guarantee:
        None for the data of the block, which are public by your word. That of the private steps is unchanged.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = dp.attach(nn.Linear(2, 1))
        >>> plain = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with public(model):
        ...     torch.nn.functional.mse_loss(model(torch.ones(4, 2)), torch.ones(4, 1)).backward()
        ...     plain.step()
    """
    runs = [run for run in owners(model.parameters()) if not run.finalized]
    for run in runs:
        if run.undisturbed:
            raise SequenceError(
                f"{type(run).__name__} takes no public steps between its own: {run.undisturbed}"
            )
    if not is_attached(model):
        raise SequenceError(
            "model must be attached: on any other plain optimizers can step as they are"
        )
    with ExitStack() as stack:
        stack.enter_context(paused(model))
        for run in runs:
            if isinstance(run, PrivateOptimizer):
                stack.enter_context(run.moved_in_public())
        yield
