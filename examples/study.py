"""From a table to a decision: one budget for a model, its score and intervals; Adult by rows, flights by aircraft.

    python examples/study.py                    # three studies, about a minute
    python examples/study.py --quick            # the first one, of 4,000 people
    python examples/study.py --save folder      # writes models, cards and pictures too (needs matplotlib)

A schema says what is public about a table: ranges, levels and labels by the meaning of the columns, never read off the
data. The first study predicts from all columns, the second one has intervals for a few, the third protects aircraft.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from adult import DATA_FOLDER, LEVELS
from flights import CARRIERS, ORIGINS, _installed_file
from pictures import bars

import torch_dpsco as dp
from torch_dpsco.estimators import Category, Number

QUICK_ROWS = 4000
NAMES = {
    0: "age",
    1: "workclass",
    3: "education",
    4: "years of education",
    5: "marital status",
    6: "occupation",
    7: "relationship",
    8: "race",
    9: "sex",
    10: "capital gain",
    11: "capital loss",
    12: "hours per week",
}
ADULT = dp.Schema(
    {
        "age": Number(17, 90),
        "years of education": Number(1, 16),
        "hours per week": Number(1, 99),
        **{NAMES[column]: Category(list(levels)) for column, levels in LEVELS.items()},
    },
    target="income",
    labels=["<=50K", ">50K"],
    unit="person",
    one_row_per_unit=True,
)
FEW = dp.Schema(  # for intervals: features that no other one is a function of
    {
        "age": Number(17, 90),
        "years of education": Number(1, 16),
        "hours per week": Number(1, 99),
        "sex": Category(["Female", "Male"], baseline=True),
    },
    target="income",
    labels=["<=50K", ">50K"],
    unit="person",
    one_row_per_unit=True,
)
FLIGHTS = dp.Schema(
    {
        "month": Category(list(range(1, 13))),
        "carrier": Category(list(CARRIERS)),
        "origin": Category(list(ORIGINS)),
        "sched_dep_time": Number(0, 2400),
        "distance": Number(0, 5000),
    },
    target="late",
    labels=[0, 1],
    ids="tailnum",
    rows_per_unit=None,
    unit="aircraft",
)


def adult() -> pd.DataFrame:
    """Returns the training records of Adult, as they are in the file."""
    frame = pd.read_csv(DATA_FOLDER / "adult.data.xz", header=None, skipinitialspace=True)
    return frame.rename(columns={**NAMES, 14: "income"})


def flights() -> pd.DataFrame:
    """Returns all flights of a known aircraft; late is an arrival more than 15 minutes after schedule."""
    frame = pd.read_csv(_installed_file(), usecols=[*FLIGHTS.columns, "tailnum", "arr_delay"])
    frame = frame[frame["tailnum"].notna()]  # a rule that looks at one record
    return frame.assign(late=(frame["arr_delay"] > 15).astype(int))


def main() -> None:
    """Runs the studies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first study alone, of 4,000 people")
    parser.add_argument("--save", type=Path, help="folder, new or empty")
    args = parser.parse_args()
    budget = dp.Budget(1.0, 1e-6, "add_remove")  # of each study; both of Adult together spend twice as much
    users = dp.Budget(2.0, 1e-6, "add_remove", unit="user")
    if args.quick:
        studies = {"prediction": dp.study(adult()[:QUICK_ROWS], ADULT, budget, n=QUICK_ROWS, show=None)}
    else:
        studies = {
            "prediction": dp.study(adult(), ADULT, budget, n=30_000, show=None),
            "intervals": dp.study(adult(), FEW, budget, n=30_000, intervals=0.3, show=None),
            "flights": dp.study(flights(), FLIGHTS, users, n=4000, show=None),
        }
    bars("AUC on held-out records", {name: study.score.value for name, study in studies.items()})
    for name, study in studies.items():
        print(f"{study.summary()}\n")
        if args.save:
            study.save(args.save / name)


if __name__ == "__main__":
    main()
