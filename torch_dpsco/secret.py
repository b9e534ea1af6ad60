"""A type for states that must stay secret: it shows no value, and a checkpoint that holds one says so."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from typing import Any


class SecretState(dict[str, Any]):
    """A state dict with what must stay secret: iterates without noise, noise of a threshold, or who is in which batch.

    It shows no value; torch.save stores it as a plain mapping, which torch.load reads with weights_only=True.
    """

    def __repr__(self) -> str:
        return f"SecretState(CONFIDENTIAL, {sorted(self)})"

    def __copy__(self) -> SecretState:
        return SecretState(self)

    copy = __copy__

    def __deepcopy__(self, memo: dict[int, Any]) -> SecretState:
        return SecretState({key: deepcopy(value, memo) for key, value in self.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())
