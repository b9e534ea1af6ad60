"""Tables in which a row is a person, or a thing; see tables.py."""

from __future__ import annotations

import math

import numpy as np
from adult import load_adult
from table_parts import (
    STATES,
    Table,
    flag,
    known_flights,
    log_unit,
    made,
    one_hot,
    records,
    some_rows,
    unit,
)

# -- develop ----------------------------------------------------------------------------------------------------------


def adult() -> Table:
    """Income above 50K; the 65 features of examples/adult.py: 5 numbers, 7 groups."""
    data = load_adult()
    rows, targets = (
        np.concatenate([data[k].double().numpy(), data[k + 2].double().numpy()]) for k in (0, 1)
    )
    test = np.arange(len(rows)) >= len(data.train_features)
    return Table("adult", "develop", rows, targets, test, math.sqrt(12))


def flights_late() -> Table:
    """A flight out of New York is more than 15 minutes late, by what is known before departure: 4 groups, 3 numbers."""
    found, rows = known_flights()
    some = some_rows(len(found))
    late = flag(found["arr_delay"].iloc[some] > 15)
    return made("flights_late", "develop", [rows[some, :41]], late, bound_x=math.sqrt(7))


def flights_delay() -> Table:
    """Delay at arrival in hours, by what is known at departure: heavy tail; sqrt(4 + 3 + 5^2)."""
    found, rows = known_flights()
    some = some_rows(len(found))
    hours = found["arr_delay"].to_numpy()[some] / 60
    bounds = {"bound_x": math.sqrt(32), "bound_y": 24.0}
    return made("flights_delay", "develop", [rows[some]], hours, **bounds, threshold=0.25)


def diamonds() -> Table:
    """Price in 1,000 dollars; ill-conditioned."""
    found = records("ggplot2", "diamonds")
    carat = unit(found["carat"], 0, 5)
    blocks = [carat, carat**2, unit(found["depth"], 40, 80), unit(found["table"], 40, 100)]
    blocks += [one_hot(found["cut"], ("Fair", "Good", "Very Good", "Premium", "Ideal"))]
    blocks += [one_hot(found["color"], tuple("DEFGHIJ"))]
    blocks += [
        one_hot(found["clarity"], ("I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"))
    ]
    return made("diamonds", "develop", blocks, found["price"] / 1000, bound_y=20.0)


def wives() -> Table:
    """A wife has health insurance through her job (Current Population Survey 1993)."""
    found = records("Ecdat", "HI")
    levels = ("<9years", "9-11years", "12years", "13-15years", "16years", ">16years")
    blocks = [
        unit(found["experience"], 0, 60),
        unit(found["kidslt6"], 0, 6),
        unit(found["kids618"], 0, 8),
    ]
    blocks += [
        unit(found["husby"], 0, 200),
        unit(found["whrswk"], 0, 99),
        flag(found["hhi"] == "yes"),
    ]
    blocks += [
        one_hot(found["education"], levels),
        one_hot(found["race"], ("white", "black", "other")),
    ]
    blocks += [
        one_hot(found["region"], ("northcentral", "south", "west", "other")),
        flag(found["hispanic"] == "yes"),
    ]
    return made("wives", "develop", blocks, flag(found["whi"] == "yes"))


def food() -> Table:
    """Share of food in the spending of Spanish households, in percent."""
    found = records("Ecdat", "BudgetFood")
    blocks = [
        log_unit(found["totexp"], 2e7),
        unit(found["age"], 16, 99),
        unit(found["size"], 1, 12),
    ]
    blocks += [one_hot(found["town"], (1, 2, 3, 4, 5)), flag(found["sex"] == "man")]
    return made("food", "develop", blocks, found["wfood"] * 100, bound_y=100.0, threshold=10.0)


def earnings() -> Table:
    """Hourly earnings in dollars (Current Population Surveys)."""
    found = records("AER", "CPSSW8")
    blocks = [
        unit(found["age"], 18, 65),
        unit(found["age"], 18, 65) ** 2,
        unit(found["education"], 0, 20),
    ]
    blocks += [
        flag(found["gender"] == "female"),
        one_hot(found["region"], ("Northeast", "Midwest", "South", "West")),
    ]
    return made("earnings", "develop", blocks, found["earnings"], bound_y=100.0, threshold=5.0)


# -- yes or no --------------------------------------------------------------------------------------------------------


def votes() -> Table:
    """A vote for Trump in 2016 (a survey of 64,600 voters)."""
    found = records("stevedata", "TV16", "votetrump")
    races = (
        "White",
        "Black",
        "Hispanic",
        "Asian",
        "Native American",
        "Mixed",
        "Other",
        "Middle Eastern",
    )
    blocks = [
        unit(found["age"], 18, 99),
        flag(found["female"] == 1),
        flag(found["collegeed"] == 1),
        flag(found["bornagain"] == 1),
    ]
    blocks += [
        unit(found["famincr"], 1, 12),
        unit(found["religimp"], 1, 4),
        unit(found["churchatd"], 1, 6),
    ]
    blocks += [
        unit(found["prayerfreq"], 1, 7),
        one_hot(found["racef"], races),
        one_hot(found["state"], STATES),
    ]
    return made("votes", "develop", blocks, found["votetrump"])


def abortion() -> Table:
    """Abortion for any reason should be legal (General Social Survey, 1977 to 2018)."""
    found = records("stevedata", "gss_abortion", "abany")
    blocks = [
        unit(found["year"], 1970, 2020),
        unit(found["age"], 18, 90),
        unit(found["educ"], 0, 20),
    ]
    blocks += [
        flag(found["sex"] == "Female"),
        one_hot(found["race"], ("White", "Black", "Other")),
    ]
    blocks += [one_hot(found["pid"], (0, 1, 2, 3, 4, 5, 6))]
    return made("abortion", "develop", blocks, found["abany"])


def crashes() -> Table:
    """A person in a car crash dies (about one in twenty)."""
    found = records("DAAG", "nassCDS", "dead")
    blocks = [
        one_hot(found["dvcat"], ("1-9km/h", "10-24", "25-39", "40-54", "55+")),
        flag(found["airbag"] == "airbag"),
    ]
    blocks += [
        flag(found["seatbelt"] == "belted"),
        flag(found["frontal"] == 1),
        flag(found["sex"] == "m"),
    ]
    blocks += [
        unit(found["ageOFocc"], 16, 100),
        unit(found["yearVeh"], 1950, 2003),
        flag(found["occRole"] == "driver"),
    ]
    blocks += [one_hot(found["abcat"], ("unavail", "deploy", "nodeploy"))]
    return made("crashes", "develop", blocks, flag(found["dead"] == "dead"))


def homes() -> Table:
    """A man owns his home (United States census of 1960; a public sample of the rows)."""
    found = records("causaldata", "mortgages")
    blocks = [
        one_hot(found["bpl"], STATES),
        one_hot(found["qob"], (1, 2, 3, 4)),
        flag(found["nonwhite"] == 1),
    ]
    blocks += [flag(found["vet_wwko"] == 1), unit(found["qob_minus_kw"], -60, 30)]
    return made("homes", "develop", blocks, found["home_ownership"])


def mothers() -> Table:
    """A mother of two or more works (United States census of 1980)."""
    found = records("wooldridge", "labsup")
    blocks = [
        unit(found["kids"], 2, 10),
        unit(found["age"], 20, 36),
        unit(found["agefstm"], 15, 35),
    ]
    blocks += [
        unit(found["educ"], 0, 20),
        unit(found["nonmomi"], 0, 150),
        flag(found["black"] == 1),
    ]
    blocks += [
        flag(found["hispan"] == 1),
        flag(found["samesex"] == 1),
        flag(found["multi2nd"] == 1),
    ]
    return made("mothers", "develop", blocks, found["worked"])


def insurance() -> Table:
    """A person has health insurance (National Health Interview Survey 2009)."""
    found = records("stevedata", "mm_nhis")
    blocks = [
        flag(found["fml"] == 1),
        unit(found["hlth"], 1, 5),
        flag(found["nwhite"] == 1),
        unit(found["age"], 18, 65),
    ]
    blocks += [
        unit(found["yedu"], 0, 18),
        unit(found["famsize"], 1, 15),
        flag(found["empl"] == 1),
    ]
    blocks += [unit(found["inc"], 0, 200_000)]
    return made("insurance", "develop", blocks, found["hi"])


# -- numbers ----------------------------------------------------------------------------------------------------------


def wages() -> Table:
    """Weekly wage in 100 dollars (Current Population Survey 1988): heavy tail."""
    found = records("AER", "CPS1988")
    experience = unit(found["experience"], -5, 65)
    blocks = [
        unit(found["education"], 0, 18),
        experience,
        experience**2,
        flag(found["ethnicity"] == "afam"),
    ]
    blocks += [flag(found["smsa"] == "yes"), flag(found["parttime"] == "yes")]
    blocks += [one_hot(found["region"], ("northeast", "midwest", "south", "west"))]
    return made("wages", "develop", blocks, found["wage"] / 100, bound_y=200.0)


def incomes() -> Table:
    """Yearly income in 10,000 dollars of 1986 (General Social Survey, 1974 to 2018): heavy tail."""
    found = records("stevedata", "gss_wages", "realrinc")
    age = unit(found["age"], 18, 90)
    jobs = (
        *(
            "Professional",
            "Service",
            "Office and Administrative Support",
            "Business/Finance",
            "Production",
            "Sales",
        ),
        *(
            "Transportation",
            "Construction/Extraction",
            "Installation, Maintenance, and Repair",
            "Armed Forces",
        ),
        "Farming, Fishing, and Forestry",
    )
    work = (
        *(
            "Full-Time",
            "Part-Time",
            "Temporarily Not Working",
            "Unemployed, Laid Off",
            "Retired",
            "School",
        ),
        *("Housekeeper", "Other"),
    )
    schools = ("Less Than High School", "High School", "Junior College", "Bachelor", "Graduate")
    states = ("Married", "Never Married", "Divorced", "Widowed", "Separated")
    blocks = [
        unit(found["year"], 1970, 2020),
        age,
        age**2,
        unit(found["prestg10"], 10, 90),
        flag(found["gender"] == "Male"),
    ]
    blocks += [
        unit(found["childs"], 0, 8),
        one_hot(found["occrecode"], jobs),
        one_hot(found["wrkstat"], work),
    ]
    blocks += [one_hot(found["educcat"], schools), one_hot(found["maritalcat"], states)]
    return made("incomes", "develop", blocks, found["realrinc"] / 10_000, bound_y=50.0)


def medical() -> Table:
    """Yearly medical spending in 100 dollars (RAND Health Insurance Experiment): very heavy tail."""
    found = records("sampleSelection", "RandHIE")
    blocks = [
        one_hot(found["site"], (1, 2, 3, 4, 5, 6)),
        unit(found["coins"], 0, 100),
        unit(found["xage"], 0, 65),
    ]
    blocks += [
        flag(found["female"] == 1),
        flag(found["child"] == 1),
        unit(found["educdec"], 0, 25),
    ]
    blocks += [
        log_unit(found["income"], 30_000),
        unit(found["disea"], 0, 60),
        unit(found["physlm"], 0, 1),
    ]
    blocks += [unit(found["num"], 1, 14), unit(found["mhi"], 0, 100), flag(found["black"] == 1)]
    blocks += [flag(found["hlthg"] == 1), flag(found["hlthf"] == 1), flag(found["hlthp"] == 1)]
    return made("medical", "develop", blocks, found["meddol"] / 100, bound_y=500.0)


def vocabulary() -> Table:
    """Words known of ten (General Social Survey, 1978 to 2016)."""
    found = records("carData", "GSSvocab", "vocab")
    age = unit(found["age"], 18, 90)
    blocks = [
        unit(found["year"], 1970, 2020),
        age,
        age**2,
        unit(found["educ"], 0, 20),
        flag(found["gender"] == "female"),
    ]
    blocks += [flag(found["nativeBorn"] == "yes")]
    return made("vocabulary", "develop", blocks, found["vocab"], bound_y=10.0)


def hotels() -> Table:
    """Price of a hotel room in 10 euros a night."""
    found = records("modeldata", "hotel_rates")
    meals = (
        "no_meal_package",
        "bed_and_breakfast",
        "breakfast_and_one_other_meal",
        "breakfast_lunch_and_dinner",
    )
    segments = ("online_travel_agent", "offline_travel_agent", "direct", "groups", "corporate")
    kinds = ("transient", "transient_party", "contract", "group")
    blocks = [unit(found["lead_time"], 0, 700), unit(found["stays_in_weekend_nights"], 0, 20)]
    blocks += [
        unit(found["stays_in_week_nights"], 0, 50),
        unit(found["adults"], 0, 4),
        unit(found["children"], 0, 4),
    ]
    blocks += [unit(found["historical_adr"], 0, 250), one_hot(found["market_segment"], segments)]
    blocks += [
        one_hot(found["meal"], meals),
        one_hot(found["reserved_room_type"], tuple("abcdefghl")),
    ]
    blocks += [
        one_hot(found["customer_type"], kinds),
        unit(found["total_of_special_requests"], 0, 5),
    ]
    return made("hotels", "develop", blocks, found["avg_price_per_room"] / 10, bound_y=60.0)


def films() -> Table:
    """Mean rating of a film on IMDb, 1 to 10."""
    found = records("ggplot2movies", "movies")
    genres = ("Action", "Animation", "Comedy", "Drama", "Documentary", "Romance", "Short")
    blocks = [
        unit(found["year"], 1890, 2005),
        unit(found["length"], 0, 300),
        log_unit(found["votes"], 200_000),
    ]
    blocks += [flag(found[genre] == 1) for genre in genres]
    return made("films", "develop", blocks, found["rating"], bound_y=10.0)
