"""Rows of one width in a private file, of which many are gathered at once; memory does not grow with their number.

The file has no name: nobody can open it, and it is gone with the data set or the process, also after a crash. It holds
the rows as they are, so that the disk is as confidential as the data. It is mapped into memory; what a batch has
touched is given back to the system, which may keep it cached as long as it has room.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from torch_dpsco.errors import PrivacyError, UnitError

_AT_A_TIME = 2048  # rows: the system maps up to 64 KiB around each, 128 MiB
_GIVE_BACK = (
    getattr(mmap, "MADV_DONTNEED", None) if sys.platform == "linux" else None
)  # elsewhere it means more
_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.int64: np.dtype(np.int64),
}


def row_dtype(
    dtype: torch.dtype, shape: Sequence[int], target_dtype: torch.dtype, target_shape: Sequence[int]
) -> np.dtype[Any]:
    """Returns the dtype of a row with inputs and a target; raises ValueError for others than a file can hold."""
    if dtype not in (torch.float32, torch.float64):  # null records have inputs of NaN
        raise ValueError(f"dtype must be torch.float32 or torch.float64 (got {dtype})")
    if target_dtype not in _NUMPY:
        raise ValueError(
            f"target_dtype must be torch.float32, torch.float64 or torch.int64 (got {target_dtype})"
        )
    return np.dtype(
        [
            ("inputs", _NUMPY[dtype], tuple(shape)),
            ("target", _NUMPY[target_dtype], tuple(target_shape)),
        ]
    )


class Gathered(Dataset[Any], ABC):
    """A map-style data set from which `optimizer.loader` takes all records of a batch at once."""

    @abstractmethod
    def __len__(self) -> int:
        """How many records there are."""

    @abstractmethod
    def gather(self, positions: npt.NDArray[np.int64]) -> list[Tensor]:
        """Returns what collating the records at some positions gives, also for none: tensors of as many rows."""


class RowFile(Gathered):
    """(inputs, target) pairs from blocks of rows, which are written into an unnamed file, once.

    Args:
        blocks: arrays of `row`, read here.
        row: fields "inputs" and "target".
        folder: in which the file is; default that of `tempfile`.

    Raises:
        UnitError: the blocks are read inside of a worker of a DataLoader, which may have a part of them only.
    """

    def __init__(
        self,
        blocks: Iterable[npt.NDArray[Any]],
        row: np.dtype[Any],
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if get_worker_info() is not None:
            raise UnitError(
                "rows must be read in the main process: a worker may have a part of them only"
            )
        if folder is not None and not os.path.isdir(folder):
            raise ValueError(f"folder must be one that is there (got {os.fspath(folder)!r})")
        self._map: mmap.mmap | None = None
        self._rows: npt.NDArray[Any] = np.empty(0, dtype=row)
        with tempfile.TemporaryFile(dir=folder) as file:
            for block in blocks:
                np.asarray(block, dtype=row).tofile(file)
            size = os.fstat(file.fileno()).st_size
            if size:  # an empty file cannot be mapped
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
                self._rows = np.frombuffer(self._map, dtype=row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError("index must be that of a record")  # how many there are may be private
        inputs, target = self.gather(np.array([index]))
        return inputs[0], target[0]

    def gather(self, positions: npt.NDArray[np.int64]) -> list[Tensor]:
        """Returns the inputs and targets of some positions."""
        found: npt.NDArray[Any] = np.empty(len(positions), dtype=self._rows.dtype)
        for start in range(0, len(positions), _AT_A_TIME):
            part = slice(start, start + _AT_A_TIME)
            found[part] = self._rows[positions[part]]
            if self._map is not None and _GIVE_BACK is not None:
                self._map.madvise(_GIVE_BACK)
        return [torch.from_numpy(np.array(found[name], order="C")) for name in ("inputs", "target")]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(SECRET)"

    def __reduce__(self) -> NoReturn:
        raise PrivacyError("rows must not be pickled: they are in a file of this process")
