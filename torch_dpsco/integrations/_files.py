"""Files of a source, none of which may be there twice, whatever it is called: each of its records would be two."""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch_dpsco.errors import UnitError

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
