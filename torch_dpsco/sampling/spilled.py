"""A stream of records, read once into private files, from which batches are drawn by position.

The files have no name: nobody can open them, and they are gone with the data set or the process, also after a crash.
They hold the records as they are, so that the disk is as confidential as the data. Nothing per record stays in memory.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

from torch.utils.data import Dataset, get_worker_info

from torch_dpsco._doors import typed
from torch_dpsco._owned import owned
from torch_dpsco.errors import PrivacyError, UnitError

_PLACE = 8  # bytes of a place in the file


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
    def __init__(self, stream: Iterable[Any], folder: str | os.PathLike[str] | None = None) -> None:
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
            raise IndexError("index must be that of a record")  # how many there are may be private
        places = os.pread(
            self._places.fileno(), 2 * _PLACE, _PLACE * index
        )  # which workers may do side by side
        start, end = (int.from_bytes(places[k : k + _PLACE], "little") for k in (0, _PLACE))
        return pickle.loads(os.pread(self._records.fileno(), end - start, start))

    def __repr__(self) -> str:
        return "Spilled(SECRET)"

    def __reduce__(self) -> NoReturn:
        raise PrivacyError(
            "records of a stream must not be pickled: they are in files of this process"
        )
