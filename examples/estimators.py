"""Private linear models like those of scikit-learn, all mechanisms, at several budgets: what does privacy cost?

    python examples/estimators.py                    # a minute or two
    python examples/estimators.py --quick            # seconds: fewer rows, one budget
    python examples/estimators.py --plot curve.png   # the table as a plot (matplotlib)

Adult (area under the ROC curve of the test records), and diamonds (R^2), if plotnine is installed, which has the table.
Every setting is a public constant: none was read off the data or tuned on them. delta = 1e-6, unless it says pure; one
record added or removed. Each figure is one fit, spends its budget once, and comes out a little different each time.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adult import auc, fit_baseline, load_adult

from torch_dpsco.errors import CalibrationError
from torch_dpsco.estimators import (
    AdversarialClassifier,
    HuberRegressor,
    LinearSVC,
    LogisticRegression,
    QuantileRegressor,
    Ridge,
    TiltedClassifier,
)

EPSILONS = (0.1, 0.5, 1.0, 3.0, 8.0)
DELTA = 1e-6
# five numbers in [0, 1] and seven one-hot groups: sqrt(12), see adult.py
ADULT: dict[str, Any] = {"adjacency": "add_remove", "n": 32_561, "bound_x": 3.47, "classes": (0, 1)}
# three one-hot groups, and four numbers that are seldom far from 0: rows beyond are clipped
DIAMONDS: dict[str, Any] = {"adjacency": "add_remove", "n": 43_000, "bound_x": 1.96, "bound_y": 15.0}
CUTS = ("Fair", "Good", "Very Good", "Premium")  # one level of each group is left out
COLORS = ("D", "E", "F", "G", "H", "I")
CLARITIES = ("I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1")

Scores = dict[str, list[float]]
CLASSIFIERS: dict[str, Callable[..., Any]] = {
    "logistic (objective perturbation)": lambda **s: LogisticRegression(**s),
    "logistic, pure epsilon": lambda **s: LogisticRegression(**{**s, "delta": 0.0}),
    "logistic, output perturbation": lambda **s: LogisticRegression(mechanism="output", **s),
    "logistic, noisy gradient descent": lambda **s: LogisticRegression(mechanism="noisy_gd", **s),
    "support vectors (objective)": lambda **s: LinearSVC(**s),
    "adversarial, 0.05 (output)": lambda **s: AdversarialClassifier(attack_radius=0.05, **s),
    "tilted, 0.1 (output)": lambda **s: TiltedClassifier(tilt=0.1, radius=3.0, n_min=s["n"] // 2, **s),
}
REGRESSORS: dict[str, Callable[..., Any]] = {
    "ridge (boosted AdaSSP)": lambda **s: Ridge(**s),
    "ridge, pure epsilon (output)": lambda **s: Ridge(**{**s, "delta": 0.0}, radius=20.0),
    "Huber (objective perturbation)": lambda **s: HuberRegressor(**s),
    "median (output perturbation)": lambda **s: QuantileRegressor(**s),
}


def load_diamonds() -> tuple[np.ndarray, np.ndarray] | None:
    """Returns 21 features and the price in thousands, less 5; None if plotnine, which has the table, is not there."""
    package = importlib.util.find_spec("plotnine")
    if package is None or package.origin is None:
        return None
    with (Path(package.origin).parent / "data" / "diamonds.csv").open(newline="") as file:
        records = list(csv.DictReader(file))
    return np.array([encode(record) for record in records]), np.array([float(r["price"]) / 1000 - 5 for r in records])


def encode(record: dict[str, str]) -> list[float]:
    """Returns the features of one diamond, by public constants; no other one has a say."""
    carat = (min(max(float(record["carat"]), 0.0), 3.0) - 1) / 2
    depth = (min(max(float(record["depth"]), 55.0), 70.0) - 62) / 8
    table = (min(max(float(record["table"]), 50.0), 70.0) - 58) / 12
    groups = (("cut", CUTS), ("color", COLORS), ("clarity", CLARITIES))
    return [
        carat,
        carat * carat,
        depth,
        table,
        *(float(record[k] == level) for k, levels in groups for level in levels),
    ]


def compare(
    makers: dict[str, Callable[..., Any]], epsilons: tuple[float, ...], score: Callable[[Any], float], **settings: Any
) -> Scores:
    """Prints and returns the scores of all methods at all budgets; nan where a mechanism has no answer."""
    table: Scores = {}
    for name, make in makers.items():
        table[name] = []
        for epsilon in epsilons:
            try:
                table[name].append(score(make(epsilon=epsilon, delta=DELTA, **settings)))
            except CalibrationError:
                table[name].append(math.nan)
        print(f"{name:34}" + "".join(f"{value:9.4f}" for value in table[name]), flush=True)
    return table


def header(title: str, epsilons: tuple[float, ...], baseline: float) -> None:
    print(f"\n{title}; not private {baseline:.4f}\n{'epsilon':34}" + "".join(f"{e:9g}" for e in epsilons))


def on_adult(epsilons: tuple[float, ...], rows: int) -> tuple[Scores, float]:
    X, y, test_X, test_y = load_adult()
    X, y = X[:rows], y[:rows]
    baseline = auc(fit_baseline(X, y)(test_X).squeeze(1), test_y)
    header("Adult, AUC", epsilons, baseline)

    def score(model: Any) -> float:
        return float(auc(torch.from_numpy(model.fit(X, y).decision_function(test_X)), test_y))

    return compare(CLASSIFIERS, epsilons, score, **{**ADULT, "n": min(rows, ADULT["n"])}), baseline


def on_diamonds(X: np.ndarray, y: np.ndarray, epsilons: tuple[float, ...], rows: int) -> tuple[Scores, float]:
    test = np.arange(len(X)) % 5 == 0
    chosen = np.flatnonzero(~test)
    chosen = chosen[:: max(1, len(chosen) // rows)]
    ones = np.ones((len(X), 1))
    weight = np.linalg.lstsq(np.hstack([X, ones])[chosen], y[chosen], rcond=None)[0]
    left = y[test] - np.hstack([X, ones])[test] @ weight
    baseline = float(1 - np.mean(left**2) / np.var(y[test]))
    header("Diamonds, R^2", epsilons, baseline)

    def score(model: Any) -> float:
        return float(model.fit(X[chosen], y[chosen]).score(X[test], y[test]))

    return compare(REGRESSORS, epsilons, score, **{**DIAMONDS, "n": min(rows, DIAMONDS["n"])}), baseline


def draw(results: dict[str, tuple[Scores, float]], epsilons: tuple[float, ...], path: str) -> None:
    """Saves one panel per data set: score against epsilon."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(6 * len(results), 4.5), squeeze=False)
    for panel, (title, (table, baseline)) in zip(panels[0], results.items(), strict=True):
        for name, values in table.items():
            panel.plot(epsilons, values, marker="o", label=name)
        panel.axhline(baseline, color="black", linestyle="--", label="not private")
        panel.set(title=title, xlabel="epsilon", xscale="log", ylim=(0.5, 1.0))
        panel.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> dict[str, tuple[Scores, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4000 rows, one budget")
    parser.add_argument("--plot", metavar="FILE", help="save the table as a plot")
    options = parser.parse_args(argv)
    epsilons, rows = ((1.0,), 4000) if options.quick else (EPSILONS, 10**6)
    results = {"Adult": on_adult(epsilons, rows)}
    diamonds = load_diamonds()
    if diamonds is None:
        print("\nDiamonds: left out, since plotnine is not installed (pip install plotnine)")
    else:
        results["Diamonds"] = on_diamonds(*diamonds, epsilons, rows)
    if options.plot:
        draw(results, epsilons, options.plot)
        print(f"\nplot: {options.plot}")
    return results


if __name__ == "__main__":
    main()
