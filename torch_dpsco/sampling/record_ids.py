"""Batches that records pick by a keyed hash of their ids: alike in every reading and process, in any order.

Pick of a pass: BLAKE2b of the id under the run's secret key of 256 bits, personalized by the pass, 512 bits modulo T.
For who does not know the key the picks of different ids, and of different passes, are independent and uniform, up to
n passes T 2^-512 in total variation and the security of the key, as for all draws of `rng.KeyedStream`; neither is
charged (docs/proofs/allocation.md#picks-by-ids).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from torch_dpsco._doors import typed
from torch_dpsco.errors import UnitError
from torch_dpsco.sampling.draws import records_of

_Indices = npt.NDArray[np.int64]
_BLOCK = 1 << 16  # ids that are made Python objects at a time
_WIDTH = 16  # bytes of a digest by which processes compare ids


class RecordIds:
    """The id of each record. A record is its id: nothing is protected that has several.

    Args:
        ids: integers, strings or bytes, which may be mixed (1 and "1" are two ids); a list, an array, a tensor or a
            column. Arrays of integers stay as they are.
        records: how many there are; default as many as ids.

    Raises:
        UnitError: not one id per record, or of another kind. No id is quoted: it may be a name.
    """

    @typed
    def __init__(self, ids: Any, records: int | None = None) -> None:
        if isinstance(ids, (str, bytes, Mapping, Set)) or not isinstance(ids, Iterable):
            raise UnitError(f"ids must hold one id per record (got {type(ids).__name__})")
        if isinstance(ids, (Tensor, np.ndarray)) and ids.ndim != 1:
            raise UnitError(f"ids must hold one id per record (got {ids.ndim} dimensions)")
        if isinstance(ids, Tensor):
            ids = ids.tolist() if ids.is_floating_point() else ids.detach().cpu().numpy()
        whole = isinstance(ids, np.ndarray) and ids.dtype.kind in "iu"
        self._ids: Any = ids.copy() if whole else [_plain(thing) for thing in ids]
        if records is not None and len(self._ids) != records:
            raise UnitError("ids must hold one id per record (got more or fewer)")
        if not whole:
            for thing in self._ids:
                id_bytes(thing)

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return "RecordIds(SECRET)"

    def require_unique(self) -> None:
        """Raises UnitError if two records have one id."""
        different = (
            np.unique(self._ids) if isinstance(self._ids, np.ndarray) else set(self._bytes())
        )
        if len(different) < len(self):
            raise UnitError(SEVERAL)

    def picks(self, key: bytes, k: int, batches: int) -> _Indices:
        """Returns the batch of each record in pass k, 0..batches - 1.

        Args:
            key: 32 secret bytes.
            k: pass.
            batches: of a pass.
        """
        start = start_of_pass(key, k)
        return np.fromiter(
            (pick(start, name, batches) for name in self._bytes()), np.int64, len(self)
        )

    def digests(self, key: bytes) -> _Indices:
        """Returns (n, 2) words by which holders of a key can tell whether ids are equal."""
        start = blake2b(key=key, person=b"equal", digest_size=_WIDTH)
        found = bytearray()
        for name in self._bytes():
            one = start.copy()
            one.update(name)
            found += one.digest()
        return np.frombuffer(bytes(found), dtype=np.int64).reshape(-1, 2)

    def contents(self, dataset: Any) -> Iterator[Any]:
        """Yields what tells the ids and their records from others, in an order that is that of no reading."""
        names = [blake2b(name, digest_size=32).digest() for name in self._bytes()]
        order = sorted(range(len(names)), key=names.__getitem__)
        yield b"".join(names[i] for i in order)
        yield from records_of(dataset, order)

    def _bytes(self) -> Iterator[bytes]:
        for start in range(0, len(self), _BLOCK):
            part = self._ids[start : start + _BLOCK]
            yield from map(id_bytes, part.tolist() if isinstance(part, np.ndarray) else part)


SEVERAL = (
    "ids must be unique (got one of several records): who has several records is protected as a"
    " user, by UserClippedSGD and optimizer.loader(dataset, users=...)"
)
SPREAD = "users must be on one rank each, with all of their records (got one who is on several)"


def _plain(thing: Any) -> Any:
    """Returns the number or text of a scalar, whose memory may be filled again."""
    return (
        thing.item()
        if isinstance(thing, np.generic) or (isinstance(thing, Tensor) and not thing.ndim)
        else thing
    )


def id_bytes(thing: Any) -> bytes:
    """Returns bytes that no other id has, the same in every process.

    Raises:
        UnitError: no integer, string or bytes.
    """
    thing = _plain(thing)
    if isinstance(thing, str):
        return b"s" + thing.encode("utf-8", "surrogatepass")
    if isinstance(thing, bytes):
        return b"b" + thing
    # PRIVACY: 1, 1.0 and True are equal, and hash() is another one in each process
    # (test_ids_that_are_not_the_same_everywhere_are_refused)
    if not isinstance(thing, int) or isinstance(thing, bool):
        raise UnitError(f"ids must be integers, strings or bytes (got a {type(thing).__name__})")
    return b"i%x" % thing


def start_of_pass(key: bytes, k: int) -> Any:
    """Returns what the hashes of pass k begin with.

    Args:
        key: 32 secret bytes.
        k: pass.
    """
    # PRIVACY: other picks in each pass, and under each key (test_picks_by_ids_are_uniform_and_independent)
    return blake2b(key=key, person=b"pass" + k.to_bytes(12, "little"))


def pick(start: Any, name: bytes, batches: int) -> int:
    """Returns the batch, 0..batches - 1, of a record in the pass of `start`; `name` has the bytes of its id."""
    one = start.copy()
    # PRIVACY: of its own id, and of its id alone
    # (test_picks_by_ids_are_uniform_and_independent, test_a_record_less_moves_no_other_wherever_it_was)
    one.update(name)
    return int.from_bytes(one.digest(), "little") % batches
