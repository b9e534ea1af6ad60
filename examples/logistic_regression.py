"""Private logistic regression on 32,561 people (UCI Adult): is the yearly income above 50,000 dollars?

    python examples/logistic_regression.py            # eps = 1, about half a minute with set-up
    python examples/logistic_regression.py --quick    # a tenth of an epoch, for a smoke test
    python examples/logistic_regression.py --details  # what was charged and assumed, too

Nothing here is tuned: noise, step size and number of steps follow from public constants. Every figure but those on
the test set is known before the data are touched. The privacy card is written into the current folder: `--card FILE`
writes it elsewhere, as .html, .pdf, .md or .json.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from adult import ROW_NORM_BOUND, accuracy, auc, fit_baseline, load_adult
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp

EPSILON, DELTA = 1.0, 1e-5
ADJACENCY = "add_remove"
QUICK_EPOCHS = 0.1
CARD = Path("privacy_card.html" if importlib.util.find_spec("matplotlib") else "privacy_card.md")
SECRETS = {
    "add_remove": "whether one given person is in the data",
    "replace_one": "which of two records one given person has",
}


def evaluate(model: nn.Module, features: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Returns (accuracy, AUC) on a public test set."""
    with torch.no_grad():
        scores = model(features)
    return accuracy(scores, labels), auc(scores, labels)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, prints what was learned and what was spent, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument("--delta", type=float, default=DELTA)
    parser.add_argument("--adjacency", choices=("add_remove", "replace_one"), default=ADJACENCY)
    parser.add_argument("--epochs", type=float, help="passes over the data; default by the step rule")
    parser.add_argument("--quick", action="store_true", help="a tenth of an epoch")
    parser.add_argument("--details", action="store_true", help="print what was charged and assumed")
    parser.add_argument("--card", type=Path, help=f"a new file for the privacy card (default: {CARD}, replaced)")
    args = parser.parse_args(argv)
    if args.card and args.card.exists():
        parser.error(f"--card must be a new file (got {args.card})")

    data = load_adult()
    dataset = TensorDataset(data.train_features, data.train_labels[:, None])
    model = nn.Linear(data.train_features.shape[1], 1)
    for p in model.parameters():
        nn.init.zeros_(p)

    # What is promised about ONE record, before any is seen; its per-sample gradient bound follows from it.
    problem = dp.losses.Logistic().problem(bound_x=ROW_NORM_BOUND)
    optimizer = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            problem=problem,
            n=len(dataset),
            budget=dp.Budget(args.epsilon, args.delta, adjacency=args.adjacency),
            epochs=QUICK_EPOCHS if args.quick else args.epochs,
            dim=model,
        ),
    )
    start = time.perf_counter()
    dp.fit(model, optimizer, dataset, nn.BCEWithLogitsLoss())
    seconds = time.perf_counter() - start

    private = evaluate(model, data.test_features, data.test_labels)
    baseline = evaluate(fit_baseline(data.train_features, data.train_labels), data.test_features, data.test_labels)
    # of a quick run as text: pictures take seconds
    statement, card = optimizer.report(), args.card or (CARD.with_suffix(".md") if args.quick else CARD)
    statement.save(card, overwrite=args.card is None)
    report = statement.figures
    print(f"\n{'test set of 16,281 people':<28}{'accuracy':>10}{'AUC':>10}")
    print(f"{'private':<28}{private[0]:>10.4f}{private[1]:>10.4f}")
    print(f"{'not private':<28}{baseline[0]:>10.4f}{baseline[1]:>10.4f}")
    if args.details:
        print(f"\nspent: {report}")
    print(f"\n{optimizer.steps} steps in {seconds:.1f} s")

    change = [100 * (reached - public) for public, reached in zip(baseline, private, strict=True)]
    right = math.ceil(500 * (1 + report.advantage)) / 10
    print(f"""
On a public test set the private model is right about {100 * private[0]:.1f} % of the people.
{"Privacy and the short run" if args.quick else "Privacy"} changed accuracy by {change[0]:+.2f} and AUC by \
{change[1]:+.2f} points, out of 100.

{statement.headline}
An attacker who knows every other record, the code and the model, and bets on
{SECRETS[args.adjacency]}, wins at most {right:.1f} % of even bets
(by tossing a coin: 50 %).
The privacy card says this in full, for publication with the model: {card}""")
    return {
        "accuracy": private[0],
        "auc": private[1],
        "baseline_accuracy": baseline[0],
        "baseline_auc": baseline[1],
        "epsilon": report.epsilon,
        "epsilon_replace_one": report.epsilons["replace_one"],
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
