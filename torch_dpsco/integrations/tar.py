"""Tar archives of records, several files each, as a data set for `optimizer.loader` and `fit`, in bounded memory.

Draws want records at random places, and archives are read from start to end. So they are read once, decoded by a
function of yours, into an unnamed private file of rows (`sampling.datasets`), from which batches are gathered.

    0001.npy  0001.cls  0002.npy  0002.cls  ..    files in a row that share their name up to the first dot

| in an archive | in the data set |
|---|---|
| a record that `decode` makes finite numbers of the declared shapes of | a record, of `dtype` and `target_dtype` |
| a record that it raises for, of other shapes, with NaN or infinity (also after rounding) | a null record |
| a class that is no integer, with target_dtype=torch.int64 | a null record |
| a record whose files lie in two archives | a record in each of them |
| a name that comes again in one archive, after other records or with the same ending | UnitError, by the path |
| folders, links, files without a dot or with nothing before it | nothing |
| an archive that is given twice, by another spelling or a link too | UnitError, by the paths |
| an archive that cannot be read to its end | ValueError, by the path |

Null records: see `integrations.parquet`. The names in one archive are in memory while it is read.
"""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from lzma import LZMAError
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.errors import UnitError
from torch_dpsco.integrations._files import RowFile, identities, identity, row_dtype
from torch_dpsco.trial import attempt

_BLOCK = 1 << 20  # bytes that are looked at behind the end of an archive
_Decode = Callable[[dict[str, bytes]], tuple[Any, Any]]


class TarRows(RowFile):
    """A map-style data set of (inputs, target) pairs from tar archives, plain or compressed, read once, here.

    Args:
        paths: of the archives, in order.
        decode: maps the files of a record, {"npy": .., "cls": ..} by what is after the first dot, to (inputs, target):
            tensors, arrays or numbers. A function of this record alone.
        shape: of the inputs of a record. Public, as `target_shape`: not found out from a record.
        target_shape: of a target; () is a number.
        dtype: of the inputs: torch.float32 or torch.float64.
        target_dtype: default torch.int64, for classes; torch.float32 or torch.float64.
        example: files of a made-up record, which are decoded first. What `decode` raises for real ones is not shown: a
            mistake in it makes null records of all of them.
        folder: in which the private file is; it needs room for all rows. Default that of `tempfile`.

    Raises:
        ValueError: an archive cannot be read to its end, or `decode` makes no record of the example.
        UnitError: an archive has a name of a record twice, or is given twice, also
            by another spelling or a link. No name of a record is quoted.

    Example:
        >>> import io, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "people.tar")
        >>> with tarfile.open(path, "w") as archive:
        ...     for name, content in {"ann.txt": b"1 2", "ann.cls": b"7", "bob.txt": b"none", "bob.cls": b"3"}.items():
        ...         member = tarfile.TarInfo(name)
        ...         member.size = len(content)
        ...         archive.addfile(member, io.BytesIO(content))
        >>> def decode(files):
        ...     return [float(word) for word in files["txt"].split()], int(files["cls"])
        >>> data = TarRows([path], decode, shape=[2])
        >>> len(data), data[0], data[1]
        (2, (tensor([1., 2.]), tensor(7)), (tensor([nan, nan]), tensor(0)))
    """

    @typed
    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        decode: _Decode,
        *,
        shape: Sequence[int],
        target_shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        target_dtype: torch.dtype = torch.int64,
        example: Mapping[str, bytes] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        for size in shape:
            check.positive_count(shape=size)
        for size in target_shape:
            check.positive_count(target_shape=size)
        row = row_dtype(dtype, shape, target_dtype, target_shape)
        names = [os.fspath(path) for path in paths]
        files = [*zip(names, _identities(names), strict=True)]
        if example is not None and not _filled(np.zeros(1, dtype=row), decode, dict(example)):
            raise ValueError(
                f"decode must make finite inputs of shape {tuple(shape)} and a target of shape"
                f" {tuple(target_shape)} of example"
            )
        super().__init__(_rows(files, decode, row), row, folder)


def _identities(paths: Sequence[str]) -> list[Hashable]:
    try:
        return identities(paths, "paths")
    except OSError as error:
        raise _unreadable(error, str(error.filename)) from None


def _unreadable(error: Exception, path: str) -> ValueError:
    return ValueError(
        f"paths must be of tar archives that can be read to their end (got {type(error).__name__}"
        f" of {path})"
    )


def _rows(
    archives: Sequence[tuple[str, Hashable]], decode: _Decode, row: np.dtype[Any]
) -> Iterator[npt.NDArray[Any]]:
    """Yields one row after the other."""
    for path, known in archives:
        for files in _records(path, known):
            block = np.zeros(1, dtype=row)
            # PRIVACY: an error would end the run because of one record, and quote it
            # (test_records_that_cannot_be_used_become_null_records)
            if attempt("decode", partial(_filled, block, decode, files)) is not True:
                block["inputs"], block["target"] = np.nan, 0
            yield block


def _filled(block: npt.NDArray[Any], decode: _Decode, files: dict[str, bytes]) -> bool:
    """Decodes a record into a block of one row, and returns whether it is one, finite and of these shapes."""
    for name, value in zip(("inputs", "target"), decode(files), strict=True):
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().double() if value.is_floating_point() else value.cpu()
        found = np.asarray(value)
        if found.shape != block[name].shape[1:] or found.dtype.kind not in "biuf":
            return False
        with np.errstate(over="ignore", invalid="ignore"):
            block[name][0] = found
        exact = block[name].dtype.kind == "f" or bool((block[name][0] == found).all())
        if not exact or not bool(np.isfinite(found).all() and np.isfinite(block[name]).all()):
            return False
    return True


def _records(path: str, known: Hashable) -> Iterator[dict[str, bytes]]:
    """Yields the files of each record of an archive, by what is after the first dot of their names."""
    seen: set[str] = set()
    key: str | None = None
    files: dict[str, bytes] = {}
    for name, content in _files(path, known):
        folder, _, base = name.rpartition("/")
        stem, dot, ending = base.partition(".")
        if not stem or not dot:
            continue
        if (found := f"{folder}/{stem}") != key or ending in files:
            if found in seen:
                # PRIVACY: one person would be two records (test_a_name_that_comes_twice_is_refused_by_the_archive)
                raise UnitError(
                    "names of records must be unique in an archive, and the files of each in a row"
                    f" (not so in {path})"
                )
            if files:
                yield files
            seen.add(found)
            key = found
            files = {}
        files[ending] = content
    if files:
        yield files


class _Header(tarfile.TarInfo):
    """A header that is damage where it cannot be read; tarfile takes it for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # zeros, which are the end
                raise
            raise tarfile.ReadError(str(error)) from None


def _files(path: str, known: Hashable) -> Iterator[tuple[str, bytes]]:
    """Yields the names and contents of the files of an archive; raises ValueError unless it is read to its end."""
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, tarinfo=_Header) as archive:
            if identity(os.fstat(file.fileno()), path) != known:
                raise tarfile.ReadError(
                    "another file than the one that was compared with the others"
                )
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # else all headers stay in memory
                content = archive.extractfile(member) if member.isreg() else None
                if content is not None:
                    yield member.name, content.read()
            while rest := archive.fileobj.read(_BLOCK):
                if rest.strip(b"\0"):
                    raise tarfile.ReadError("more after the end")
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error, LZMAError) as error:
        raise _unreadable(error, path) from None
