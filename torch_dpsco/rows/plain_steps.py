"""Steps of plain optimizers on attached models, whose gradients are rows: refused, since they would move nothing.

While a model is attached, torch's public hook on the steps of all optimizers looks at their parameters; it is the only
thing here that is global. Private optimizers, and those that an update rule steps on a private mean, go on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from torch_dpsco.errors import SequenceError
from torch_dpsco.rows.passes import PassCounter

_OWNERS, PASSES = "dpsco_optimizers", "dpsco_passes_of_model"  # attributes of parameters


class Owners:
    """The private optimizers of a parameter; none in copies, which have optimizers of their own."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def __reduce__(self) -> tuple[type[Owners], tuple[()]]:
        return Owners, ()


def note_owner(params: Iterable[nn.Parameter], optimizer: Any) -> None:
    """Notes on parameters that a private optimizer trains them."""
    for p in params:
        p.__dict__.setdefault(_OWNERS, Owners()).alive.add(optimizer)


def owners(params: Iterable[nn.Parameter]) -> list[Any]:
    """Returns the private optimizers that train some of the parameters."""
    found = {
        id(owner): owner
        for p in params
        if _OWNERS in p.__dict__
        for owner in p.__dict__[_OWNERS].alive
    }
    return list(found.values())


class _Watch:
    """The hook, installed while something is attached."""

    only_looks = True  # private steps need not go through torch's wrapper for it

    def __init__(self) -> None:
        self._attached = 0
        self._handle: Any = None

    def start(self, attachment: Any) -> weakref.finalize[Any, Any]:
        """Watches until the attachment is undone, by calling what is returned, or gone."""
        self._attached += 1
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self)
        stop = weakref.finalize(attachment, self._stop)
        stop.atexit = False
        return stop

    def _stop(self) -> None:
        self._attached -= 1
        if not self._attached:
            self._handle.remove()
            self._handle = None

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p in _recorded(optimizer):
            mine = owners([p])
            if optimizer in mine or any(owner.in_step for owner in mine):
                return
            raise SequenceError(
                "a plain optimizer must not step on an attached model (got"
                f" {type(optimizer).__name__}): its gradients are recorded row by row, so that"
                " nothing would move. For private records call step() of a private optimizer, that"
                " of dp.make_private or dp.ClippedSGD(model.parameters(), plan); for public data"
                " write `with dp.public(model):` around zero_grad, backward and step; after"
                " private training dp.detach(model)"
            )


def _recorded(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yields the parameters of an optimizer whose gradients are rows now."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            passes: PassCounter | None = getattr(p, "__dict__", {}).get(PASSES)
            if passes is not None and not passes.paused:
                yield p


WATCH = _Watch()
