"""Real tables for benchmarks/accuracy.py, each with bounds that are public constants.

    python benchmarks/tables.py --list                   # rows, features, users, and non-private reference scores
    python benchmarks/tables.py --list --tables adult wages
    python benchmarks/tables.py --save FOLDER            # each as FOLDER/<name>.npz

Nothing is downloaded: the data are files of installed packages (`pip install '.[benchmarks]'`), which are read and not
imported, and `examples/data`. A table without its package raises FileNotFoundError.

Every range, level and unit below stands for what a code book says, rounded; none is a minimum, mean or set of levels
read off the data. Rows are made of blocks of norm at most 1: a number in [0, 1], or a one-hot group (an unlisted level
is all zeros, as a missing number is 0). So a row, without a bias column, has norm at most the root of the number of
blocks. Rows without a target are left out, which looks at one record. Split: the first fifth of a public permutation is
the test set, of users where there are users (adult: its own test file).

`develop` tables may be looked at when a rule is made. No number may be chosen by a look at the `score` tables, those of
table_unseen.py, which are run once per change.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import minimize
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import log_loss, r2_score, roc_auc_score

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import table_rows
import table_unseen
import table_users
from table_parts import Array, Table

_ROWS = (
    *("adult", "flights_late", "wives", "flights_delay", "diamonds", "food", "earnings"),
    *("votes", "abortion", "crashes", "homes", "mothers", "insurance"),
    *("wages", "incomes", "medical", "vocabulary", "hotels", "films"),
)
_USERS = (
    *("aircraft", "batters", "ratings", "chemistry", "storms", "murders"),
    *("counties", "teachers", "districts", "restaurants"),
    *("patents", "colleges", "pupils", "tests"),
)
_UNSEEN = (
    *(
        "cards",
        "happy",
        "pensions",
        "deaths",
        "affairs",
        "callbacks",
        "churn",
        "credits",
        "digits",
    ),
    *("interest", "vietnam", "drinks", "pay", "deliveries", "popularity", "injuries"),
    *("unions", "lectures", "doctors", "tuna", "obesity", "fights", "voters", "passes"),
)
TABLES: dict[str, Callable[[], Table]] = {
    **{name: getattr(table_rows, name) for name in _ROWS},
    **{name: getattr(table_users, name) for name in _USERS},
    **{name: getattr(table_unseen, name) for name in _UNSEEN},
}

# -- scores -----------------------------------------------------------------------------------------------------------


def scores(table: Table, answers: Array) -> dict[str, float]:
    """Returns the scores of answers (log-odds, or predictions) on the test rows; of "auc", more is better."""
    truth = table.targets[table.test]
    if table.kind == "binary":
        chance = 1 / (1 + np.exp(-np.clip(answers, -30, 30)))
        return {
            "auc": float(roc_auc_score(truth, answers)),
            "log_loss": float(log_loss(truth, chance)),
        }
    miss = np.abs(answers - truth)
    return {"mae": float(miss.mean()), "huber": float(huber(miss, table.threshold).mean())}


def huber(miss: Array, threshold: float) -> Array:
    """Returns Huber's loss of absolute errors: threshold * miss - threshold^2/2 above the threshold, miss^2/2 below."""
    low = np.minimum(miss, threshold)
    return low * (miss - low / 2)


def with_bias(rows: Array) -> Array:
    """Returns rows with a constant-1 column at their end."""
    return np.column_stack([rows, np.ones(len(rows))])


# -- what is not private ----------------------------------------------------------------------------------------------


def not_private(table: Table) -> dict[str, float]:
    """Returns scores of non-private fits: logistic regression, or the least of Huber's (and nearly absolute) loss."""
    train, test = with_bias(table.rows[~table.test]), with_bias(table.rows[table.test])
    targets = table.targets[~table.test]
    if table.kind == "binary":
        model = LogisticRegression(C=1e3, max_iter=2_000, fit_intercept=False).fit(
            train, targets
        )
        return scores(table, model.decision_function(test))
    squares = LinearRegression(fit_intercept=False).fit(train, targets)
    fits = {
        t: least_huber(train, targets, t, squares.coef_)
        for t in (table.threshold, table.threshold / 50)
    }
    found = [scores(table, test @ weights) for weights in fits.values()]
    r2 = float(r2_score(table.targets[table.test], squares.predict(test)))
    return {
        "mae": found[1]["mae"],
        "huber": found[0]["huber"],
        "mae_of_huber": found[0]["mae"],
        "r2": r2,
    }


def least_huber(rows: Array, targets: Array, threshold: float, start: Array) -> Array:
    """Returns the weights of least Huber loss, in units of which the columns are well conditioned."""
    _, sizes, basis = np.linalg.svd(rows, full_matrices=False)
    change = basis.T / np.maximum(sizes, 1e-6 * sizes[0]) * len(rows) ** 0.5
    better = rows @ change

    def value(w: Array) -> tuple[float, Array]:
        miss = better @ w - targets
        return float(huber(np.abs(miss), threshold).mean()), better.T @ miss.clip(
            -threshold, threshold
        ) / len(miss)

    first = np.linalg.lstsq(change, start, rcond=None)[0]
    options = {"maxiter": 1_000, "ftol": 1e-12, "gtol": 1e-9}
    return change @ minimize(value, first, jac=True, method="L-BFGS-B", options=options).x


def trivial(table: Table) -> dict[str, float]:
    """Returns the scores of the best constant of the training rows: their rate, or their median."""
    train = table.targets[~table.test]
    rate = float(train.mean())
    constant = np.log(rate / (1 - rate)) if table.kind == "binary" else float(np.median(train))
    return scores(table, np.full(int(table.test.sum()), constant))


# -- the command ------------------------------------------------------------------------------------------------------


def described(table: Table) -> str:
    """Returns a line of public numbers and of what is not private."""
    users = "" if table.users is None else f", {table.users.max() + 1:,} users"
    size = f"{len(table.rows):,} rows ({table.test.mean():.0%} test), d = {table.rows.shape[1]}{users}"
    facts = f"bound_x {table.bound_x:.3f}"
    if table.bound_y is not None:
        facts += f", bound_y {table.bound_y:g}, threshold {table.threshold:g}"
    best, none = not_private(table), trivial(table)
    shown = ", ".join(
        f"{k} {v:.4f}" + (f" (constant {none[k]:.4f})" if k in none else "")
        for k, v in best.items()
    )
    return f"{table.name} [{table.split}, {table.kind}]: {size}; {facts}; not private: {shown}"


def save(table: Table, folder: Path) -> None:
    """Writes a table as numpy arrays; `users` and `bound_y` are there where the table has them."""
    some = {"users": table.users, "bound_y": table.bound_y}
    facts = {
        "kind": table.kind,
        "split": table.split,
        "bound_x": table.bound_x,
        "threshold": table.threshold,
    }
    arrays = {"X": table.rows, "y": table.targets, "test": table.test}
    np.savez_compressed(
        folder / f"{table.name}.npz",
        **arrays,
        **facts,
        **{k: v for k, v in some.items() if v is not None},
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints, or saves, what the options ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--list", action="store_true", help="a line for each table, with non-private scores"
    )
    parser.add_argument(
        "--tables", nargs="+", choices=TABLES, default=list(TABLES), metavar="NAME"
    )
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    for name in args.tables:
        try:
            table = TABLES[name]()
        except FileNotFoundError as error:
            print(f"{name} is left out: {error}")
            continue
        if args.save is not None:
            save(table, args.save)
        if args.list:
            print(described(table), flush=True)


if __name__ == "__main__":
    main()
