"""Tables that no number of the library was chosen on, looked at once per change; see tables.py.

Ranges and levels are those of the pages that describe the data, rounded, or what a quantity can be at all.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from sklearn.datasets import load_digits
from table_parts import Table, flag, log_unit, made, one_hot, package_file, records, unit

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

# -- yes or no --------------------------------------------------------------------------------------------------------


def cards() -> Table:
    """A credit card is paid late in September, by what is known in April (Taiwan 2005)."""
    found = records("causaldata", "credit_cards")
    blocks = [flag(found["LateApril"]), unit(found["AGE"], 20, 80)]
    blocks += [log_unit(found["BillApril"], 1_000)]
    return made("cards", "score", blocks, flag(found["LateSept"]))


def happy() -> Table:
    """A person is very happy (General Social Survey, 1994 to 2006)."""
    found = records("wooldridge", "happiness")
    work = (
        *("working fulltime", "working parttime", "temp not working", "unempl, laid off"),
        *("retired", "school", "keeping house", "other"),
    )
    regions = (
        *("new england", "middle atlantic", "e. nor. central", "w. nor. central"),
        *("south atlantic", "e. sou. central", "w. sou. central", "mountain", "pacific"),
    )
    blocks = [one_hot(found["workstat"], work), one_hot(found["region"], regions)]
    blocks += [unit(found["year"], 1990, 2010), unit(found["prestige"], 10, 90)]
    blocks += [unit(found["educ"], 0, 20), unit(found["tvhours"], 0, 24)]
    blocks += [unit(found[name], 0, 8) for name in ("babies", "preteen", "teens")]
    blocks += [flag(found[name] == 1) for name in ("black", "female", "regattend", "mothfath16")]
    blocks += [flag(found["divorce"] == "yes")]
    return made("happy", "score", blocks, found["vhappy"])


def pensions() -> Table:
    """A worker may take part in a 401(k) plan (United States, 1991)."""
    found = records("wooldridge", "k401ksubs")
    income = unit(found["inc"], 0, 200)
    blocks = [income, income**2, unit(found["age"], 25, 65), unit(found["fsize"], 1, 13)]
    blocks += [flag(found[name] == 1) for name in ("marr", "male", "pira")]
    return made("pensions", "score", blocks, found["e401k"])


def deaths() -> Table:
    """A person above 50 dies in the years after a blood test (Olmsted County)."""
    found = records("survival", "flchain")
    blocks = [unit(found["age"], 50, 100), flag(found["sex"] == "F"), flag(found["mgus"] == 1)]
    blocks += [unit(found["kappa"], 0, 20), unit(found["lambda"], 0, 20)]
    blocks += [unit(found["creatinine"], 0, 10), unit(found["flc.grp"], 1, 10)]
    return made("deaths", "score", blocks, found["death"])


def affairs() -> Table:
    """A wife had an affair (a survey of Redbook magazine, 1974)."""
    found = pd.read_csv(package_file("statsmodels", "datasets", "fair", "fair.csv"))
    blocks = [unit(found["rate_marriage"], 1, 5), unit(found["age"], 17.5, 42)]
    blocks += [unit(found["yrs_married"], 0.5, 23), unit(found["children"], 0, 5.5)]
    blocks += [unit(found["religious"], 1, 4), unit(found["educ"], 9, 20)]
    jobs = (1, 2, 3, 4, 5, 6)
    blocks += [one_hot(found["occupation"], jobs), one_hot(found["occupation_husb"], jobs)]
    return made("affairs", "score", blocks, flag(found["affairs"] > 0))


def callbacks() -> Table:
    """An invented applicant is called back (Boston and Chicago, 2001 and 2002): about one in twelve."""
    found = records("openintro", "resume")
    kinds = ("supervisor", "secretary", "sales_rep", "retail_sales", "manager", "clerical")
    owners = ("unknown", "nonprofit", "private", "public")
    blocks = [one_hot(found["job_type"], kinds), one_hot(found["job_ownership"], owners)]
    blocks += [unit(found["years_college"], 0, 4), unit(found["years_experience"], 0, 40)]
    blocks += [flag(found["race"] == "white"), flag(found["gender"] == "f")]
    blocks += [flag(found["job_city"] == "Chicago"), flag(found["resume_quality"] == "high")]
    flags = (
        *("job_equal_opp_employer", "job_req_any", "job_req_communication"),
        *("job_req_education", "job_req_computer", "job_req_organization", "honors"),
        *("worked_during_school", "computer_skills", "special_skills", "volunteer", "military"),
        *("employment_holes", "has_email_address"),
    )
    blocks += [flag(found[name] == 1) for name in flags]
    return made("callbacks", "score", blocks, found["received_callback"])


def churn() -> Table:
    """A customer of a telephone company leaves: about one in seven."""
    found = records("modeldata", "mlc_churn")
    areas = ("area_code_408", "area_code_415", "area_code_510")
    blocks = [one_hot(found["area_code"], areas), unit(found["account_length"], 0, 250)]
    blocks += [flag(found[name] == "yes") for name in ("international_plan", "voice_mail_plan")]
    blocks += [unit(found["number_vmail_messages"], 0, 60)]
    blocks += [unit(found["number_customer_service_calls"], 0, 10)]
    for time, minutes in (("day", 400), ("eve", 400), ("night", 400)):
        blocks += [unit(found[f"total_{time}_minutes"] / minutes, 0, 1)]
        blocks += [unit(found[f"total_{time}_calls"], 0, 200)]
    blocks += [unit(found["total_intl_minutes"], 0, 20), unit(found["total_intl_calls"], 0, 20)]
    return made("churn", "score", blocks, flag(found["churn"] == "yes"))


def credits() -> Table:
    """A loan of the Lending Club goes bad: about one in twenty."""
    found = records("modeldata", "lending_club")
    verified = ("Not_Verified", "Verified", "Source_Verified")
    blocks = [unit(found["funded_amnt"], 0, 40_000), flag(found["term"] == "term_60")]
    blocks += [unit(found["int_rate"], 0, 31), one_hot(found["verification_status"], verified)]
    blocks += [log_unit(found["annual_inc"], 1e6), unit(found["revol_util"], 0, 150)]
    blocks += [unit(found["delinq_2yrs"], 0, 10), unit(found["inq_last_12m"], 0, 20)]
    blocks += [unit(found["all_util"], 0, 150), unit(found["num_il_tl"], 0, 50)]
    blocks += [unit(found["open_il_24m"], 0, 20), log_unit(found["total_bal_il"], 1e6)]
    return made("credits", "score", blocks, flag(found["Class"] == "bad"))


def digits() -> Table:
    """A handwritten digit is even; 64 pixels of 0 to 16."""
    images = load_digits()
    blocks = [unit(pixel, 0, 16) for pixel in images.data.T]
    return made("digits", "score", blocks, images.target % 2 == 0)


# -- numbers ----------------------------------------------------------------------------------------------------------


def interest() -> Table:
    """Interest of a loan of the Lending Club, in percent."""
    found = records("openintro", "loans_full_schema")
    homes = ("MORTGAGE", "RENT", "OWN")
    verified = ("Verified", "Not Verified", "Source Verified")
    blocks = [
        one_hot(found["homeownership"], homes),
        one_hot(found["verified_income"], verified),
    ]
    blocks += [log_unit(found["annual_income"], 1e6), unit(found["debt_to_income"], 0, 100)]
    blocks += [unit(found["emp_length"], 0, 10), unit(found["delinq_2y"], 0, 10)]
    blocks += [unit(found["inquiries_last_12m"], 0, 20), unit(found["term"], 36, 60)]
    blocks += [unit(found["total_credit_lines"], 0, 60), log_unit(found["loan_amount"], 40_000)]
    blocks += [unit(found["earliest_credit_line"], 1960, 2020)]
    blocks += [log_unit(found["total_credit_limit"], 2e6)]
    bounds = {"bound_y": 40.0, "threshold": 5.0}
    return made("interest", "score", blocks, found["interest_rate"], **bounds)


def vietnam() -> Table:
    """Logarithm of a household's medical spending (Vietnam Living Standards Survey 1997)."""
    found = records("Ecdat", "VietNamI")
    blocks = [unit(found["age"], 0, 5), flag(found["sex"] == "male"), unit(found["educ"], 0, 12)]
    blocks += [unit(found["illness"], 0, 9), unit(found["illdays"], 0, 30)]
    blocks += [unit(found["actdays"], 0, 30)]
    blocks += [flag(found[name] == 1) for name in ("married", "injury", "insurance")]
    return made("vietnam", "score", blocks, found["lnhhexp"], bound_y=20.0, threshold=0.5)


def drinks() -> Table:
    """Drinks on a day with drinks (national survey on alcohol, 2001 and 2002): heavy tail; 99 is unknown."""
    found = records("stevedata", "nesarc_drinkspd", "s2aq8b")
    found = found[flag(found["s2aq8b"] == 99) == 0]
    blocks = [one_hot(found["ethrace2a"], (1, 2, 3, 4, 5)), unit(found["age"], 18, 98)]
    blocks += [one_hot(found["region"], (1, 2, 3, 4)), one_hot(found["educ"], (1, 2, 3, 4))]
    blocks += [flag(found["sex"] == 1), one_hot(found["marital"], (1, 2, 3, 4, 5, 6))]
    return made("drinks", "score", blocks, found["s2aq8b"], bound_y=100.0)


def pay() -> Table:
    """Earnings of 1978 in 1,000 dollars, by those of 1974 and 1975, all top-coded (Current Population Survey)."""
    found = records("DAAG", "cps1")
    blocks = [unit(found["age"], 16, 55), unit(found["educ"], 0, 18)]
    blocks += [flag(found[name] == 1) for name in ("black", "hisp", "marr", "nodeg")]
    blocks += [unit(found["re74"], 0, 26_000), unit(found["re75"], 0, 26_000)]
    return made("pay", "score", blocks, found["re78"] / 1_000, bound_y=100.0, threshold=2.0)


def deliveries() -> Table:
    """Minutes until a meal is delivered."""
    found = records("modeldata", "deliveries")
    blocks = [unit(found["hour"], 11, 21), one_hot(found["day"], _DAYS)]
    blocks += [unit(found["distance"], 0, 15)]
    blocks += [unit(found[f"item_{item:02d}"], 0, 5) for item in range(1, 28)]
    times = found["time_to_delivery"]
    return made("deliveries", "score", blocks, times, bound_y=180.0, threshold=5.0)


def popularity() -> Table:
    """Votes for a film on IMDb in 1,000: half have 30 or fewer, some 100,000, so that the bound is generous."""
    found = records("ggplot2movies", "movies")
    genres = ("Action", "Animation", "Comedy", "Drama", "Documentary", "Romance", "Short")
    blocks = [unit(found["year"], 1890, 2005), unit(found["length"], 0, 300)]
    blocks += [unit(found["rating"], 1, 10), *(flag(found[genre] == 1) for genre in genres)]
    bounds = {"bound_y": 200.0, "threshold": 0.1}
    return made("popularity", "score", blocks, found["votes"] / 1_000, **bounds)


def injuries() -> Table:
    """Weeks that an injured worker is compensated for (Kentucky and Michigan): very heavy tail."""
    found = records("wooldridge", "injury")
    blocks = [one_hot(found["injtype"], (1, 2, 3, 4, 5, 6, 7, 8)), unit(found["age"], 15, 80)]
    blocks += [one_hot(found["indust"], (1, 2, 3)), log_unit(found["prewage"], 2_000)]
    flags = ("afchnge", "highearn", "male", "married", "hosp", "ky")
    blocks += [flag(found[name] == 1) for name in flags]
    return made("injuries", "score", blocks, found["durat"], bound_y=260.0, threshold=2.0)


# -- people with a few rows each, and with some tens ------------------------------------------------------------------


def unions() -> Table:
    """A young woman is in a union; users are women, with 1 to 12 years (National Longitudinal Survey)."""
    found = records("sampleSelection", "nlswork", "union")
    blocks = [unit(found["age"], 14, 46), unit(found["grade"], 0, 18)]
    blocks += [unit(found["year"], 68, 88), one_hot(found["race"], (1, 2, 3))]
    blocks += [unit(found["ttl_exp"], 0, 30), unit(found["tenure"], 0, 30)]
    blocks += [flag(found[name] == 1) for name in ("not_smsa", "c_city", "south", "msp")]
    return made("unions", "score", blocks, found["union"], users=found["idcode"])


def lectures() -> Table:
    """Rating of a lecture, 1 to 5; users are students, with some tens of ratings each (ETH Zurich)."""
    found = records("lme4", "InstEval")
    blocks = [one_hot(found["dept"], tuple(np.arange(1, 16))), flag(found["service"] == 1)]
    blocks += [one_hot(found["studage"], (2, 4, 6, 8)), unit(found["lectage"], 1, 6)]
    return made("lectures", "score", blocks, found["y"], bound_y=5.0, users=found["s"])


def doctors() -> Table:
    """A visit to a doctor in three months; users are people, with 1 to 5 years (German Socio-Economic Panel)."""
    found = records("COUNT", "rwm5yr")
    blocks = [
        unit(found["age"], 25, 65),
        unit(found["hhninc"], 0, 20),
        unit(found["educ"], 7, 18),
    ]
    blocks += [one_hot(found["edlevel"], (1, 2, 3, 4)), unit(found["year"], 1984, 1988)]
    flags = ("outwork", "female", "married", "kids", "self")
    blocks += [flag(found[name] == 1) for name in flags]
    return made("doctors", "score", blocks, found["docvis"] > 0, users=found["id"])


def tuna() -> Table:
    """A can of tuna is of the leading brand, by five prices in dollars; users are households with their purchases."""
    found = records("Ecdat", "Tuna")
    prices = ("skw", "cosw", "sko", "coso", "pw")
    blocks = [unit(found[f"price.{brand}"], 0, 1) for brand in prices]
    chosen = flag(found["Tuna.choice"] == "skw")
    return made("tuna", "score", blocks, chosen, users=found["Tuna.hid"])


def obesity() -> Table:
    """A child is obese: one in five; users are children, seen up to three times in four years (Muscatine, Iowa)."""
    found = records("geepack", "muscatine", "obese")
    blocks = [one_hot(found["occasion"], (1, 2, 3)), flag(found["gender"] == "F")]
    blocks += [one_hot(found["base_age"], (6, 8, 10, 12, 14)), unit(found["age"], 5, 18)]
    obese = flag(found["obese"] == "yes")
    return made("obesity", "score", blocks, obese, users=found["id"])


def fights() -> Table:
    """A pupil had a fight at school: one in eight; users are schools (Education Longitudinal Study, 2002)."""
    found = records("mediation", "student")
    blocks = [unit(found["score"], 0, 100), one_hot(found["late"], (1, 2, 3, 4, 5))]
    blocks += [unit(found["smorale"], 1, 5), unit(found["income"], 1, 16)]
    blocks += [unit(found["free"], 1, 7)]
    flags = ("attachment", "work", "coed", "gender", "pared", "catholic")
    blocks += [flag(found[name] == 1) for name in flags]
    return made("fights", "score", blocks, found["fight"], users=found["SCH_ID"])


def voters() -> Table:
    """A young adult is registered to vote; users are high schools (High School and Beyond, in Dee 2004)."""
    found = records("stevedata", "Dee04")
    blocks = [unit(found["distance"], 0, 35)]
    flags = ("hispanic", "college", "black", "otherrace", "female")
    blocks += [flag(found[name] == 1) for name in flags]
    return made("voters", "score", blocks, found["register"], users=found["schoolid"])


def passes() -> Table:
    """60 % of a fourth grade pass in mathematics; users are schools of Michigan, with 1 to 6 years (1993 to 1998)."""
    found = records("wooldridge", "school93_98", "math4")
    blocks = [one_hot(found["year"], tuple(range(1993, 1999))), unit(found["lunch"], 0, 100)]
    blocks += [log_unit(found["enrol"], 2_000), unit(found["exppp"], 0, 15_000)]
    return made("passes", "score", blocks, found["math4"] >= 60, users=found["schid"])
