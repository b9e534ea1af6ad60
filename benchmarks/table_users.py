"""Tables of people, schools, or places with many rows each; see tables.py."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from table_parts import (
    SPLIT_SEED,
    STATES,
    Array,
    Table,
    flag,
    known_flights,
    log_unit,
    made,
    one_hot,
    records,
    unit,
)

# -- develop ----------------------------------------------------------------------------------------------------------


def aircraft() -> Table:
    """As flights_late, for 600 aircraft with all their flights: users with 1 to some hundred rows."""
    found, rows = known_flights()
    flown = found["tailnum"].notna().to_numpy()
    found, rows = found[flown], rows[flown]
    ids = pd.factorize(found["tailnum"], sort=True)[0]
    taken = np.isin(ids, np.random.default_rng(SPLIT_SEED).permutation(ids.max() + 1)[:600])
    late = flag(found["arr_delay"][taken] > 15)
    users = found["tailnum"][taken]
    return made(
        "aircraft", "develop", [rows[taken, :41]], late, bound_x=math.sqrt(7), users=users
    )


def batters() -> Table:
    """Runs of a season of a baseball player; users are players, with 1 to 30 seasons."""
    found = records("plyr", "baseball")
    blocks = [
        unit(found["year"], 1870, 2010),
        unit(found["g"], 0, 162),
        unit(found["ab"], 0, 700),
    ]
    blocks += [
        unit(found["h"], 0, 250),
        unit(found["hr"], 0, 60),
        unit(found["bb"], 0, 200),
        unit(found["sb"], 0, 100),
    ]
    blocks += [one_hot(found["lg"], ("NL", "AL", "AA", "FL", "PL", "UA"))]
    return made(
        "batters",
        "develop",
        blocks,
        found["r"] / 10,
        bound_y=20.0,
        threshold=0.5,
        users=found["id"],
    )


# -- more ------------------------------------------------------------------------------------------------------------

GENRES = (
    *(
        "Action",
        "Adventure",
        "Animation",
        "Children",
        "Comedy",
        "Crime",
        "Documentary",
        "Drama",
        "Fantasy",
    ),
    *(
        "Film-Noir",
        "Horror",
        "IMAX",
        "Musical",
        "Mystery",
        "Romance",
        "Sci-Fi",
        "Thriller",
        "War",
        "Western",
    ),
)


def ratings() -> Table:
    """A film gets 4 stars or more (MovieLens); users are those who rate, with 10 to some thousand films."""
    found = records("dslabs", "movielens")
    genres = np.column_stack(
        [found["genres"].str.contains(genre, regex=False) for genre in GENRES]
    ).astype(float)
    genres /= np.maximum(1.0, np.sqrt(genres.sum(axis=1, keepdims=True)))
    blocks = [unit(found["year"], 1900, 2020), unit(found["timestamp"], 7.9e8, 1.5e9), genres]
    return made("ratings", "develop", blocks, flag(found["rating"] >= 4), users=found["userId"])


def chemistry() -> Table:
    """A level of B or better in chemistry (England, 1997); users are schools."""
    found = records("mlmRev", "Chem97")
    blocks = [
        unit(found["gcsescore"], 0, 8),
        unit(found["age"], -6, 6),
        flag(found["gender"] == "F"),
    ]
    return made("chemistry", "develop", blocks, flag(found["score"] >= 8), users=found["school"])


def storms() -> Table:
    """The wind has hurricane strength, 64 knots; users are the Atlantic storms since 1975, with all their positions."""
    found = records("dplyr", "storms")
    lat, long = unit(found["lat"], 0, 75), unit(found["long"], -140, 20)
    blocks = [
        unit(found["year"], 1970, 2025),
        one_hot(found["month"], tuple(range(1, 13))),
        lat,
        long,
        lat**2,
        long**2,
    ]
    name = found["name"] + found["year"].astype(str)
    return made("storms", "develop", blocks, flag(found["wind"] >= 64), users=name)


def _counties() -> tuple[pd.DataFrame, list[Array]]:
    """Returns counties of the United States, each in the 17 years from 1980, and their blocks."""
    found = records("wooldridge", "countymurders")
    blocks = [
        unit(found["year"], 1980, 1996),
        log_unit(found["density"], 70_000),
        log_unit(found["popul"], 1e7),
    ]
    blocks += [
        unit(found["perc1019"], 0, 50),
        unit(found["perc2029"], 0, 50),
        unit(found["percblack"], 0, 100),
    ]
    blocks += [unit(found["percmale"], 30, 80), unit(found["rpcincmaint"], 0, 1500)]
    return found, [
        *blocks,
        unit(found["rpcpersinc"], 0, 50_000),
        unit(found["rpcunemins"], 0, 1000),
    ]


def counties() -> Table:
    """Murders per 10,000 people and year; users are counties: heavy tail."""
    found, blocks = _counties()
    return made(
        "counties",
        "develop",
        blocks,
        found["murdrate"],
        bound_y=50.0,
        threshold=0.5,
        users=found["countyid"],
    )


def murders() -> Table:
    """A year has a murder in the county."""
    found, blocks = _counties()
    return made(
        "murders", "develop", blocks, flag(found["murders"] > 0), users=found["countyid"]
    )


def teachers() -> Table:
    """Score in mathematics in 100 points (Tennessee STAR); users are teachers with their classes."""
    found = records("mlmRev", "star", "math", "tch")
    blocks = [
        one_hot(found["gr"], ("K", "1", "2", "3")),
        one_hot(found["cltype"], ("small", "reg", "reg+A")),
    ]
    blocks += [
        one_hot(found["schtype"], ("inner", "suburb", "rural", "urban")),
        flag(found["ses"] == "F"),
    ]
    blocks += [
        flag(found["sx"] == "F"),
        one_hot(found["eth"], tuple("WBAHIO")),
        unit(found["exp"], 0, 45),
    ]
    return made(
        "teachers",
        "develop",
        blocks,
        found["math"] / 100,
        bound_y=10.0,
        threshold=0.5,
        users=found["tch"],
    )


def districts() -> Table:
    """Log of the weekly income (United States census of 2000); users are its districts of 100,000 people."""
    found = records("wooldridge", "census2000")
    experience = unit(found["exper"], 0, 50)
    blocks = [one_hot(found["educ"], (9, 10, 11, 12, 13, 14, 15, 16)), experience, experience**2]
    blocks += [one_hot(found["state"], STATES)]
    place = found["state"].astype(str) + found["puma"].astype(str)
    return made(
        "districts",
        "develop",
        blocks,
        found["lweekinc"],
        bound_y=12.0,
        threshold=0.5,
        users=place,
    )


def restaurants() -> Table:
    """Points short of 100 in an inspection (Anchorage); users are businesses with all their branches."""
    found = records("causaldata", "restaurant_inspections")
    blocks = [
        unit(found["Year"], 2000, 2020),
        log_unit(found["NumberofLocations"], 1000),
        flag(found["Weekend"]),
    ]
    lost = 100 - found["inspection_score"]
    return made(
        "restaurants",
        "develop",
        blocks,
        lost,
        bound_y=100.0,
        threshold=5.0,
        users=found["business_name"],
    )


# -- people, and others, with a few rows each -------------------------------------------------------------------------


def patents() -> Table:
    """A firm of the United States gets a patent in a year; users are firms, with 1 to 9 years (1991 to 1999)."""
    found = records("sandwich", "InstInnovation")
    blocks = [unit(found["year"], 1991, 1999), flag(found["sp500"] == "yes")]
    blocks += [log_unit(found[name], 2e5) for name in ("sales", "capital", "randd")]
    blocks += [log_unit(found["employment"], 1_000), unit(found["tobinq"], 0, 20)]
    blocks += [unit(found["institutions"], 0, 100), unit(found["competition"], 0, 1)]
    return made("patents", "develop", blocks, found["patents"] > 0, users=found["company"])


def colleges() -> Table:
    """The median earnings of those who left a college are 33,000 dollars; users are colleges (2007 to 2016)."""
    found = records("causaldata", "scorecard", "earnings_med")
    blocks = [unit(found["year"], 2007, 2016), log_unit(found["count_working"], 1e5)]
    blocks += [one_hot(found["pred_degree_awarded_ipeds"], (1, 2, 3))]
    blocks += [log_unit(found["count_not_working"], 1e5)]
    rich = found["earnings_med"] >= 33_000
    return made("colleges", "develop", blocks, rich, users=found["unitid"])


def pupils() -> Table:
    """A score in mathematics is above 0, that of the third grade; users are children, with 1 to 6 years."""
    found = records("mlmRev", "egsingle")
    blocks = [unit(found["year"], -2.5, 2.5), flag(found["female"] == "Female")]
    blocks += [
        flag(found[name].astype(str) == "1") for name in ("retained", "black", "hispanic")
    ]
    blocks += [unit(found["size"], 0, 2_000), unit(found["lowinc"], 0, 100)]
    blocks += [unit(found["mobility"], 0, 100)]
    return made("pupils", "develop", blocks, found["math"] > 0, users=found["childid"])


def tests() -> Table:
    """A test for COVID-19 is positive: about one in eighteen; users are patients, most of them with one test."""
    found = records("medicaldata", "covid_testing")
    groups = ("patient", "client", "misc adult", "other adult", "unidentified")
    blocks = [one_hot(found["demo_group"], groups), unit(found["pan_day"], 0, 120)]
    blocks += [unit(found["age"], 0, 100), flag(found["gender"] == "female")]
    blocks += [flag(found["drive_thru_ind"] == 1), flag(found["orderset"] == 1)]
    positive = flag(found["result"] == "positive")
    return made("tests", "develop", blocks, positive, users=found["subject_id"])
