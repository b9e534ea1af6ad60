"""Private logistic regression that is solved, not trained: 32,561 people (UCI Adult), epsilon = 1, pure epsilon too.

    python examples/output_perturbation.py            # seven private models, about twenty seconds
    python examples/output_perturbation.py --quick    # 4,000 people, for a smoke test

There are no steps, rates or batches to choose, and nothing is published but the answer:

* output perturbation: find the minimizer, certify how far it can be, add noise once. Any loss, any solver, delta = 0.
* objective perturbation: add a secret random linear term to the objective, then solve that. Smooth losses.
* noisy gradient descent: full batches, noise in each step, and only the last iterate is shown, which costs less.

One model is trained by a loop of your own, with an optimizer of torch, and only certified here. If the loop stopped
early, `certify` solves on: how good it was is a matter of time, not of privacy.

What decides about output perturbation is the regularizer, through which one record moves the minimizer: the default has
the least bound on the risk, 0.01 n is an everyday choice. Objective perturbation needs less of it; its residuals are
clipped at half of their largest value, as the estimators do by default.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from adult import Adult, accuracy, auc, fit_baseline, load_adult
from pictures import bars
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp

EPSILON, DELTA = 1.0, 1e-6
ROW_NORM = 3.47  # of five numbers in [0, 1] and seven one-hot groups, the intercept not counted: sqrt(12) and a bit
REG = 0.01  # per record
CLIP = 0.5  # of the largest possible residual
QUICK_ROWS, QUICK_STEPS = 4_000, 20

LOSS = dp.losses.Logistic()
Solved = dp.OutputPerturbation | dp.ObjectivePerturbation | dp.NoisyGD


def own_loop(model: nn.Linear, data: TensorDataset, n: int, budget: dp.Budget) -> dp.OutputPerturbation:
    """Returns an optimizer whose model was trained by L-BFGS of torch, in a loop of one's own."""
    plan = dp.OutputPerturbation.plan(model=model, loss=LOSS, n=n, budget=budget, bound_x=ROW_NORM, reg=REG * n)
    optimizer = dp.OutputPerturbation(model.parameters(), plan)
    secret = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    rows, signs = data.tensors

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = LOSS(model(rows), signs[:, None])
        loss = loss + 0.5 * REG * (model.weight.square().sum() + model.bias.square().sum())
        loss.backward()
        return loss

    for _ in range(2):  # as long as you like; until finalize() nothing of it may be shown, not even the loss
        secret.step(closure)
    optimizer.certify(data)
    return optimizer


def fit_private(name: str, data: TensorDataset, n: int, steps: int | None) -> tuple[nn.Linear, Solved]:
    """Returns a private model and the optimizer that made it."""
    model = nn.Linear(data.tensors[0].shape[1], 1)
    for p in model.parameters():
        nn.init.zeros_(p)
    pure = dp.Budget(EPSILON, 0.0, adjacency="add_remove")
    budget = dp.Budget(EPSILON, DELTA, adjacency="add_remove")
    methods: dict[str, tuple[type[Solved], dict[str, object]]] = {
        "output, pure": (dp.OutputPerturbation, {"budget": pure}),
        "objective, pure": (dp.ObjectivePerturbation, {"budget": pure, "residual_clip": CLIP}),
        "output": (dp.OutputPerturbation, {"budget": budget}),
        "output, reg 0.01 n": (dp.OutputPerturbation, {"budget": budget, "reg": REG * n}),
        "objective": (dp.ObjectivePerturbation, {"budget": budget, "residual_clip": CLIP}),
        "noisy gradient descent": (dp.NoisyGD, {"budget": budget, "residual_clip": CLIP, "steps": steps}),
    }
    optimizer: Solved
    if name == "the same, own loop":
        optimizer = own_loop(model, data, n, budget)
    else:
        method, settings = methods[name]
        plan = method.plan(model=model, loss=LOSS, n=n, bound_x=ROW_NORM, **settings)  # print(plan)
        optimizer = method(model.parameters(), plan)
        optimizer.solve(data)
    optimizer.finalize()  # charges, draws the noise, writes the answer into the model
    return model, optimizer


METHODS = {
    **dict.fromkeys(("output, pure", "objective, pure"), 0.0),
    **dict.fromkeys(("output", "output, reg 0.01 n", "the same, own loop"), DELTA),
    **dict.fromkeys(("objective", "noisy gradient descent"), DELTA),
}


def evaluate(model: nn.Linear, data: Adult) -> dict[str, float]:
    """Returns accuracy, AUC and log-loss on the public test set."""
    with torch.no_grad():
        scores = model(data.test_features).squeeze(1)
    loss = nn.functional.binary_cross_entropy_with_logits(scores, data.test_labels)
    labels = data.test_labels
    return {"accuracy": accuracy(scores, labels), "auc": auc(scores, labels), "log_loss": float(loss)}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Fits all models, prints what they learned and what each spent, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4,000 people only")
    args = parser.parse_args(argv)

    people = load_adult()
    n = QUICK_ROWS if args.quick else len(people.train_features)
    features, labels = people.train_features[:n], people.train_labels[:n]
    data = TensorDataset(features, 2 * labels - 1)

    results = {"not private": evaluate(fit_baseline(features, labels), people)}
    spent: dict[str, float] = {}
    print(f"{'test set of 16,281 people':<28}{'accuracy':>10}{'AUC':>10}{'log-loss':>10}   spent")
    for name in ("not private", *METHODS):
        if name != "not private":
            model, optimizer = fit_private(name, data, n, QUICK_STEPS if args.quick else None)
            results[name], spent[name] = evaluate(model, people), optimizer.report().epsilon
        shown = "".join(f"{value:>10.4f}" for value in results[name].values())
        print(f"{name:<28}{shown}   {f'({spent[name]:.4g}, {METHODS[name]:g})' if name in spent else '-'}")
    headline = str(optimizer.report()).splitlines()[0]  # the whole of it says what that means, and what it does not
    print(f"\nthe last one alone: {headline}\npublishing several of them costs what all of them spent, together")
    bars("AUC on the test set", {name: found["auc"] for name, found in results.items()})
    return {f"{name}: {kind}": value for name, found in results.items() for kind, value in found.items()} | {
        f"{name}: epsilon": value for name, value in spent.items()
    }


if __name__ == "__main__":
    main()
