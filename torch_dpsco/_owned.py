"""A copy of a record that shares no memory with whoever gave it, for all who hold a record before they use it.

A source may fill one buffer again for each record, and a data set may give views of it. Whoever keeps what they gave
would have the last record many times over, and one record would count for many. Whether records share memory may depend
on their values, so that nothing is refused for it: what is held is copied.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FIXED = (str, bytes, int, float, complex, bool, type(None))


def owned(record: Any) -> Any:
    """Returns a deep copy: of tensors and arrays their own entries alone, not the memory that they are views of.

    Args:
        record: tensors, arrays, numbers, strings, bytes and buffers, in tuples, lists, dicts and objects of any depth.

    Raises:
        TypeError: something in it cannot be copied, such as an open file. Its kind is named, no value.

    Example:
        >>> import torch
        >>> room = torch.zeros(2)
        >>> record = owned({"x": room, "y": 1})
        >>> room.fill_(7.0).tolist(), record["x"].tolist()
        ([7.0, 7.0], [0.0, 0.0])
    """
    kind = type(record)
    if kind in _FIXED:
        return record
    if kind is Tensor:
        return record.clone()
    if kind is np.ndarray and not record.dtype.hasobject:
        return record.copy()
    if kind in (tuple, list):
        return kind([owned(part) for part in record])
    if kind is dict:
        return {name: owned(part) for name, part in record.items()}
    if kind is memoryview:
        return np.asarray(record).copy().data
    try:
        with _OwnEntries():
            return copy.deepcopy(record)
    except (TypeError, copy.Error):
        raise TypeError(
            "records must be of what can be copied, as tensors, arrays, numbers, strings, and"
            " objects of these: a source may fill its memory again before a record is used (got a"
            f" {kind.__name__})"
        ) from None


class _OwnEntries(TorchFunctionMode):
    """Makes deep copies of tensors take their own entries: torch copies the whole memory that a tensor is a view of."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return args[0].clone() if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))
