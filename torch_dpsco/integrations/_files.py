"""Files of a source, none of which may be there twice, whatever it is called: each of its records would be two.

`RowFile` holds what was read from them, as rows of one width, of which many are gathered at once: a file without a name
(as of `sampling.Spilled`) that is mapped into memory, and what a batch has touched is given back to the system, which
may keep it cached.
"""

from __future__ import annotations

import mmap
import os
import posixpath
import sys
import tempfile
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_dpsco.errors import PrivacyError, UnitError
from torch_dpsco.sampling.datasets import Gathered

_TEXT = ("csv", "json")


def identity(status: os.stat_result, path: str) -> Hashable:
    """Returns what two names of one file have in common, spellings and links; `status` is that of `path`."""
    # without inodes, as on some network drives, links cannot be seen through further
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(path)


def identities(paths: Sequence[str], name: str) -> list[Hashable]:
    """Returns the identity of each file.

    Args:
        paths: of files.
        name: of the argument, for messages.

    Raises:
        UnitError: two paths are of one file.
        OSError: there is no such file.
    """
    first: dict[Hashable, str] = {}
    for path in paths:
        found = identity(os.stat(path), path)
        if found in first:
            # PRIVACY: each of its records would be two (test_a_file_under_two_names_is_refused)
            raise UnitError(
                f"{name} must hold each file once (got one file as {first[found]!r} and {path!r})"
            )
        first[found] = path
    return list(first)


def require_sound(dataset: Any) -> None:
    """Checks the files of a pyarrow dataset.

    Raises:
        UnitError: a file, or a row group of it, is there more than once.
        ValueError: files of text.
    """
    for part, _ in _files(dataset):
        if (kind := part.format.default_extname) in _TEXT:
            # PRIVACY: types are guessed from values, and a quote that is left open swallows the rows after it
            # (test_tables_of_text_are_refused)
            raise ValueError(
                "source must be of files that say what their columns are, as .parquet (got"
                f" {kind}): dp.Schema.read reads .csv, and pyarrow.parquet.write_table writes"
                " tables"
            )
    files = Counter(_place(part.filesystem, path) for part, path in _files(dataset))
    if not any(count > 1 for count in files.values()):
        return  # no file is opened
    try:
        pieces: Counter[Hashable] = Counter(
            (_place(part.filesystem, part.path), group.id if group else None)
            for part in dataset.get_fragments()
            if hasattr(part, "path")
            for group in getattr(part, "row_groups", None) or [None]
        )
    except ValueError:  # of a filtered table parts are not told
        pieces = files
    if any(count > 1 for count in pieces.values()):
        # PRIVACY: as above (test_a_parquet_file_under_two_names_is_refused)
        raise UnitError(
            "source must hold each file once (got one twice, under one name or two, or by a link)"
        )


def _files(dataset: Any) -> Iterator[tuple[Any, str]]:
    """Yields the path of each file of a pyarrow dataset, and of those that it joins, with the one that it is in."""
    for part in getattr(dataset, "children", ()):
        yield from _files(part)
    for path in getattr(dataset, "files", ()):
        yield dataset, path


def _place(system: Any, path: str) -> Hashable:
    while hasattr(system, "base_fs"):
        system, path = system.base_fs, posixpath.join(system.base_path, path)
    if system.type_name == "local":
        return identity(os.stat(path), path)
    return system.type_name, posixpath.normpath(path)


_AT_A_TIME = 2048  # rows: the system maps up to 64 KiB around each, 128 MiB
# elsewhere it means more
_GIVE_BACK = getattr(mmap, "MADV_DONTNEED", None) if sys.platform == "linux" else None
_NUMPY = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (torch.float32, torch.float64, torch.int64)
}


def row_dtype(
    dtype: torch.dtype,
    shape: Sequence[int],
    target_dtype: torch.dtype,
    target_shape: Sequence[int],
) -> np.dtype[Any]:
    """Returns the dtype of a row with inputs and a target; raises ValueError for others than a file can hold."""
    kinds = list(_NUMPY)
    # null records have inputs of NaN
    for name, given, known in (
        ("dtype", dtype, kinds[:2]),
        ("target_dtype", target_dtype, kinds),
    ):
        if given not in known:
            raise ValueError(f"{name} must be {' or '.join(map(str, known))} (got {given})")
    return np.dtype(
        [
            ("inputs", _NUMPY[dtype], tuple(shape)),
            ("target", _NUMPY[target_dtype], tuple(target_shape)),
        ]
    )


class RowFile(Gathered):
    """(inputs, target) pairs from blocks of rows, which are written into an unnamed file, once.

    Args:
        blocks: arrays of `row`, read here.
        row: fields "inputs" and "target".
        folder: in which the file is; default that of `tempfile`.
    """

    def __init__(
        self,
        blocks: Iterable[npt.NDArray[Any]],
        row: np.dtype[Any],
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
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
            raise IndexError(
                "index must be that of a record"
            )  # how many there are may be private
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
        return [
            torch.from_numpy(np.array(found[name], order="C")) for name in ("inputs", "target")
        ]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(SECRET)"

    def __reduce__(self) -> NoReturn:
        raise PrivacyError("rows must not be pickled: they are in a file of this process")
