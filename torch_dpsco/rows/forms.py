"""The forms of rows, and what is registered from outside: shortcuts through recorded layers, and engines of `fit`.

| form | where | who chooses it |
|---|---|---|
| recorded: a layer's backward keeps its rows | `layers.table`, more by `layers.register` | `attach` |
| dense: Opacus' hooks, or `torch.func` where it has none | `hooks` | `attach`, for all other layers |
| closed: of a linear model, from its data | `closed_form` | `fit`, where nobody could see the difference |
| shortcuts: several recorded layers as one, with the same bits | `SHORTCUTS` | `attach` |
| engines: in place of forward and backward | `ENGINES` | `fit`, or a loop |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn


class Shortcut(ABC):
    """A faster way through recorded layers, whose outputs, rows and gradients have the same bits."""

    @abstractmethod
    def start(self, modules: Sequence[nn.Module]) -> None:
        """Takes the way in the modules of a model whose layers are recorded, in place."""

    @abstractmethod
    def stop(self, modules: Sequence[nn.Module]) -> None:
        """Undoes it; has nothing to undo in a model that was never started."""


class Engine(Protocol):
    """Leaves rows on the parameters of a model that is not attached, and makes the steps."""

    def step(
        self, optimizer: Any, inputs: Any, targets: Any, *, users: Tensor | None = None
    ) -> None:
        """Makes one private step from a batch."""


SHORTCUTS: list[Shortcut] = []
# by name: (model, loss_fn, loader) -> engine, or why there is none
ENGINES: dict[str, Callable[[nn.Module, Any, Any], Engine | str]] = {}
