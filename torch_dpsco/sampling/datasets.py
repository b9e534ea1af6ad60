"""Data sets that a loader draws from: gathered by themselves, and streams in private files, read once.

`Spilled` holds a stream, of which nothing per record stays in memory. The files have no name: nobody can open them, and
they are gone with the data set or the process, also after a crash. They hold the records as they are, so that the disk
is as confidential as the data.

A copy of a record that shares no memory with whoever gave it, for all who hold a record before they use it.

A source may fill one buffer again for each record, and a data set may give views of it. Whoever keeps what they gave
would have the last record many times over, and one record would count for many. Whether records share memory may depend
on their values, so that nothing is refused for it: what is held is copied.
"""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import IO, Any, NoReturn

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset, get_worker_info

from torch_dpsco._validate import typed
from torch_dpsco.errors import PrivacyError, UnitError


class Gathered(Dataset[Any], ABC):
    """A map-style data set from which `optimizer.loader` takes all records of a batch at once."""

    @abstractmethod
    def __len__(self) -> int:
        """How many records there are."""

    @abstractmethod
    def gather(self, positions: npt.NDArray[np.int64]) -> list[Tensor]:
        """Returns what collating the records at some positions gives, also for none: tensors of as many rows."""


_PLACE = 8  # bytes of a place in the file
_SEEKING = threading.Lock()


class Spilled(Dataset[Any]):
    """A map-style data set of the records of a stream; whoever reads it twice gets the same records.

    Args:
        stream: finite, e.g. an IterableDataset; read once, here, in this process.
        folder: in which the files are, of a disk that is large enough; default that of `tempfile`.

    Raises:
        UnitError: the stream is read inside of a worker of a DataLoader, which may have a part of it only.

    Example:
        >>> data = Spilled((k, k * k) for k in range(100))
        >>> len(data), data[7]
        (100, (7, 49))
    """

    @typed
    def __init__(
        self, stream: Iterable[Any], folder: str | os.PathLike[str] | None = None
    ) -> None:
        if get_worker_info() is not None:
            raise UnitError(
                "stream must be read in the main process: a worker may have a part of it only"
            )
        self._records = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (as long as the data set)
        self._places = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        for file in (self._records, self._places):
            weakref.finalize(self, file.close)
        self._length = 0
        end = 0
        for record in stream:
            self._places.write(end.to_bytes(_PLACE, "little"))
            end += self._records.write(
                pickle.dumps(owned(record), protocol=pickle.HIGHEST_PROTOCOL)
            )
            self._length += 1
        self._places.write(end.to_bytes(_PLACE, "little"))
        self._records.flush()
        self._places.flush()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(
                "index must be that of a record"
            )  # how many there are may be private
        places = _read_at(self._places, 2 * _PLACE, _PLACE * index)
        start, end = (int.from_bytes(places[k : k + _PLACE], "little") for k in (0, _PLACE))
        return pickle.loads(_read_at(self._records, end - start, start))

    def __repr__(self) -> str:
        return "Spilled(SECRET)"

    def __reduce__(self) -> NoReturn:
        raise PrivacyError(
            "records of a stream must not be pickled: they are in files of this process"
        )


def _read_at(file: IO[bytes], size: int, start: int) -> bytes:
    """Returns bytes of a file, which threads and workers may read side by side."""
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), size, start)
    with _SEEKING:  # Windows, where no worker shares the descriptor
        file.seek(start)
        return file.read(size)


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
