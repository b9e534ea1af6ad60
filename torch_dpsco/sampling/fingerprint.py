"""A keyed fingerprint of the records of a loader: whether a run that goes on has the data set that it began with.

One tag of 128 bits over all records in their order, under a random key of 128 bits (BLAKE2b). Without the key it tells
nothing; with the key one can try data sets, so that key and tag stay in the private checkpoint. That two data sets
differ is all that is ever said about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from torch_dpsco.compat import tree_flatten
from torch_dpsco.errors import PrivacyError


def records_of(dataset: Any) -> Iterator[Any]:
    """Yields the records of a map-style data set in order, or its tensors, which hold the same."""
    if type(dataset) is TensorDataset:  # a subclass may override __getitem__
        yield from dataset.tensors
    else:
        yield from (dataset[i] for i in range(len(dataset)))


def fingerprint(key: str, contents: Iterable[Any]) -> str:
    """Returns the tag of some contents (nested tensors, arrays, numbers, strings and bytes) under a hexadecimal key."""
    found = blake2b(key=bytes.fromhex(key), digest_size=16)
    for item in contents:
        leaves, shape = tree_flatten(item)
        found.update(f"{shape}".encode())
        for leaf in leaves:
            for part in _parts(leaf):
                found.update(part)
    return found.hexdigest()


def _parts(leaf: Any) -> Iterator[Any]:
    """Yields what tells a value from others, and then its bytes."""
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
        yield f"{leaf.dtype}{tuple(leaf.shape)}".encode()
        yield leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif isinstance(leaf, (bytes, str, int, float, complex, NoneType)):
        yield type(leaf).__name__.encode()
        yield leaf if isinstance(leaf, bytes) else repr(leaf).encode()
    elif hasattr(leaf, "__array_interface__") and not np.asarray(leaf).dtype.hasobject:  # their scalars, images
        values = np.asarray(leaf)
        yield f"{values.dtype}{values.shape}".encode()
        yield values.tobytes()
    else:
        # PRIVACY: others may look alike (test_records_that_cannot_be_told_apart_are_refused)
        raise PrivacyError(
            f"dataset must hold dense tensors, arrays of numbers, numbers or strings, so that a run of one pass knows "
            f"its records again (got a {type(leaf).__name__})"
        )
