"""A stream that is read several times, some batches at a time, whose records pick these by a keyed hash of their ids.

No record is written anywhere, and the order may be another one in each reading. Whatever a stream gives, an id is in
one batch of a pass, and there once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco._owned import owned
from torch_dpsco.errors import PrivacyError, UnitError
from torch_dpsco.sampling.samplers import SEVERAL, fingerprint, id_bytes, pick, start_of_pass


class Streamed(Dataset[Any]):
    """A stream with an id for each record, for `optimizer.loader` and passes of random allocation.

    Args:
        stream: gives the same records whenever it is iterated over, in whatever order, e.g. an IterableDataset.
        id_of: returns the id of a record, an integer, string or bytes that no other record has.
        held: records that are in memory at a time, about; n/held readings are a pass. A public constant.

    Raises:
        UnitError: the stream can be read once only.

    Example:
        >>> data = Streamed([("a", 1.0), ("b", 2.0)], id_of=lambda record: record[0])
        >>> len(data), data[1]
        (2, ('b', 2.0))
    """

    @typed
    def __init__(
        self, stream: Iterable[Any], id_of: Callable[[Any], Any], held: int = 1 << 20
    ) -> None:
        if isinstance(stream, Iterator):
            raise UnitError(
                f"stream must be one that can be read again (got a {type(stream).__name__}):"
                " Spilled(stream) reads it once into private files"
            )
        self._stream = stream
        self._id_of = id_of
        self.held = check.positive_count(held=held)
        self._length: int | None = None

    def __len__(self) -> int:
        """How many records there are: the first time by a reading."""
        if self._length is None:
            self._length = sum(1 for _ in self._stream)
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """Returns a record by a reading up to it."""
        for record in (
            islice(self._stream, index, None) if isinstance(index, int) and index >= 0 else ()
        ):
            return owned(record)
        raise IndexError("index must be that of a record")  # how many there are may be private

    def __repr__(self) -> str:
        return "Streamed(SECRET)"

    def __reduce__(self) -> NoReturn:
        raise PrivacyError("a stream must not be pickled: it is read in the main process")

    def require_unique(self) -> None:
        """Does nothing: equal ids are found when their batch is drawn."""

    def members(
        self, key: bytes, k: int, batches: int, first: int, stop: int
    ) -> Iterator[npt.NDArray[Any]]:
        """Yields the records of the batches first, .., stop - 1 of pass k, by one reading.

        Args:
            key: 32 secret bytes.
            k: pass.
            batches: of a pass.
            first: batch.
            stop: batch after the last.

        Raises:
            UnitError: two records of a batch have one id; those of one id are in one batch.
        """
        begin = start_of_pass(key, k)
        names = set()
        found: list[list[Any]] = [[] for _ in range(first, stop)]
        for record in self._stream:
            name = id_bytes(self._id_of(record))
            batch = pick(begin, name, batches)
            if first <= batch < stop:
                if name in names:
                    # PRIVACY: (test_a_stream_with_one_id_twice_is_refused)
                    raise UnitError(SEVERAL)
                names.add(name)
                # PRIVACY: the record that is read last would be all of them
                # (test_a_stream_that_fills_one_tensor_gives_each_record_once)
                found[batch - first].append(owned(record))
        for records in found:
            yield _array(records)

    def contents(self, dataset: Any) -> Iterator[Any]:
        """Yields a number that tells these ids and records from others, in whatever order they come."""
        one_by_one = (
            fingerprint("", (id_bytes(self._id_of(record)), record)) for record in self._stream
        )
        yield f"{sum(int(tag, 16) for tag in one_by_one):x}"


class Itself(Dataset[Any]):
    """Gives records for themselves, where records are drawn and no positions."""

    def __getitem__(self, record: Any) -> Any:
        return record


def _array(records: list[Any]) -> npt.NDArray[Any]:
    """Returns an array of things as they are."""
    made = np.empty(len(records), dtype=object)
    for i, record in enumerate(records):
        made[i] = record
    return made
