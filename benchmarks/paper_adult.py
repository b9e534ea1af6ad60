"""Exhibit of Lowy, Razaviyayn 2021, section 5, on Adult (examples/adult.py): tilted and adversarial training.

Logistic regression on 32,561 people (replace_one, delta = 1e-6); accuracy on the 16,281 test people. Output
perturbation with the regularizer 0.005 a record; the answer is solved once for all epsilon, and the noise of the plans
is drawn. Attacks move each of the five numbers of a row (age, education, gains, losses, hours; each within [0, 1])
by up to 0.1, to the worse side, and none of its categories. Beside it: noise in the objective, and `HolderSGD`, whose
loop moves the rows of each batch by the worst attack on the weights so far; seconds are those of one thread, for
planning and training.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from paper_drawing import OURS, Exhibit, Series, loglog, measured, table
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.estimators.output import OutputPlan
from torch_dpsco.estimators.task import make_records

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from adult import NUM_FEATURES, NUM_NUMERIC, Adult, load_adult

LOSS, DELTA, REG, ROW_NORM = dp.losses.Logistic(), 1e-6, 0.005, 3.47  # without the constant
BALL = 3.0  # of tilted answers, which bounds the range of their losses
REACH = 0.1
SCALE = (1.0,) * NUM_NUMERIC + (0.0,) * (NUM_FEATURES - NUM_NUMERIC)
BOX = {"attack_radius": REACH, "attack_norm": math.inf, "attack_scale": SCALE}
OUTPUT: dict[str, dict[str, object]] = {
    "output, ordinary": {},
    "output, robust": BOX,
    "output, tilt 0.1": {"tilt": 0.1, "radius": BALL},
    "output, tilt 0.3": {"tilt": 0.3, "radius": BALL},
}
OBJECTIVE, LOOP = "objective, ordinary", "HolderSGD, attacked rows"
RACE = 3.0  # epsilon of run times


def budget(epsilon: float) -> dp.Budget:
    """Returns the budget of all models."""
    return dp.Budget(epsilon, DELTA, "replace_one")


def worst(weight: Tensor, signs: Tensor) -> Tensor:
    """Returns the worst attack on rows with these labels."""
    return -REACH * torch.outer(signs, weight.sign() * torch.tensor(SCALE, dtype=weight.dtype))


class Table:
    """Adult, its labels as signs, and how models do on the test people."""

    def __init__(self, rows: int) -> None:
        people: Adult = load_adult()
        self.x, self.signs = people.train_features[:rows], 2 * people.train_labels[:rows] - 1
        self._test, self._signs = people.test_features, 2 * people.test_labels - 1

    def right(self, answer: Tensor) -> tuple[float, float]:
        """Returns the shares of test people that weights and a bias are right about: as they are, and attacked."""
        weight, bias = answer[:-1].float(), float(answer[-1])
        moved = self._test + worst(weight, self._signs)
        shares = [
            (((x @ weight + bias) * self._signs) > 0).float().mean() for x in (self._test, moved)
        ]
        return float(shares[0]), float(shares[1])

    def output_plan(self, name: str, epsilon: float) -> OutputPlan:
        """Returns the plan of output perturbation."""
        plan: OutputPlan = dp.OutputPerturbation.plan(
            model=nn.Linear(NUM_FEATURES, 1),
            loss=LOSS,
            n=len(self.x),
            budget=budget(epsilon),
            bound_x=ROW_NORM,
            reg=REG * len(self.x),
            **OUTPUT[name],
        )
        return plan

    def solved(self, name: str) -> Tensor:
        """Returns the certified minimizer, which is not private."""
        plan = self.output_plan(name, 1.0)
        return plan.solve(make_records(plan.task, self.x, self.signs))

    def by_objective(self, epsilon: float) -> Tensor:
        """Returns the answer of noise in the objective."""
        model = nn.Linear(NUM_FEATURES, 1)
        plan = dp.ObjectivePerturbation.plan(
            model=model,
            loss=LOSS,
            n=len(self.x),
            budget=budget(epsilon),
            bound_x=ROW_NORM,
            residual_clip=0.5,
        )
        optimizer = dp.ObjectivePerturbation(model.parameters(), plan)
        optimizer.solve(TensorDataset(self.x, self.signs))
        optimizer.finalize()
        return flat(model)

    def by_loop(self, epochs: float) -> Tensor:
        """Returns the answer of a loop over attacked rows."""
        model = nn.Linear(NUM_FEATURES, 1)
        for part in model.parameters():
            nn.init.zeros_(part)
        plan = dp.HolderSGD.plan(
            problem=LOSS.problem(bound_x=ROW_NORM + REACH * NUM_NUMERIC**0.5, intercept=True),
            n=len(self.x),
            budget=budget(RACE),
            dim=NUM_FEATURES + 1,
            batch_size=1_024,
            epochs=epochs,
        )
        data = TensorDataset(self.x, self.signs)
        optimizer = dp.HolderSGD(dp.attach(model).parameters(), plan)
        for x, y in optimizer.loader(data, steps=plan.steps):
            optimizer.zero_grad()
            moved = x + worst(model.weight.detach()[0], y.flatten())
            LOSS(model(moved), y).backward()
            optimizer.step()
        optimizer.finalize()
        return flat(model)


def flat(model: nn.Linear) -> Tensor:
    """Returns weights and bias in one vector."""
    return torch.cat([model.weight.detach()[0], model.bias.detach()]).double()


def against_epsilon(
    people: Table, epsilons: Sequence[float], draws: int
) -> dict[str, list[list[tuple[float, float]]]]:
    """Returns accuracies, as they are and attacked, of draws of each model at each epsilon."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for name in OUTPUT:
        w = people.solved(name)
        for epsilon in epsilons:
            std = people.output_plan(name, epsilon).noise_scale
            noisy = [
                w + std * torch.randn(len(w), generator=generator, dtype=w.dtype)
                for _ in range(draws)
            ]
            found.setdefault(name, []).append([people.right(answer) for answer in noisy])
    found[OBJECTIVE] = [
        [people.right(people.by_objective(epsilon)) for _ in range(3)] for epsilon in epsilons
    ]
    return found


def timed(fit: Callable[[], Tensor], people: Table) -> tuple[float, float]:
    """Returns the seconds of a fit, and its accuracy under attack."""
    start = time.process_time()
    answer = fit()
    return time.process_time() - start, people.right(answer)[1]


def race(people: Table, epochs: Sequence[float]) -> dict[str, list[tuple[float, float]]]:
    """Returns seconds and accuracy under attack of each method, best of three by time."""

    def robust() -> Tensor:
        std = people.output_plan("output, robust", RACE).noise_scale
        w = people.solved("output, robust")
        return w + std * torch.randn(len(w), dtype=w.dtype)

    fits: dict[str, list[Callable[[], Tensor]]] = {
        LOOP: [lambda passes=passes: people.by_loop(passes) for passes in epochs],
        "output, robust": [robust],
        OBJECTIVE: [lambda: people.by_objective(RACE)],
    }
    return {
        name: [sorted(timed(fit, people) for _ in range(3))[1] for fit in kind]
        for name, kind in fits.items()
    }


def exhibit(
    epsilons: Sequence[float], epochs: Sequence[float], draws: int, rows: int
) -> Exhibit:
    """Returns the exhibit: accuracy against epsilon, as rows are and attacked, and against run time."""
    people = Table(rows)
    found, raced = against_epsilon(people, epsilons, draws), race(people, epochs)
    panels, lines = [], {}
    for k, title in enumerate(("rows as they are", "each number moved by up to 0.1")):
        drawn = []
        for j, (name, cells) in enumerate(found.items()):
            runs = [[pair[k] for pair in cell] for cell in cells]
            drawn.append(measured(name, epsilons, runs, j, OURS))
            lines[f"{name}, {'attacked' if k else 'as they are'}"] = list(drawn[-1].y)
        panels.append(
            loglog(title, "epsilon", "accuracy on test people", drawn, linear=True, low=0.5)
        )
    styles = {LOOP: 5, "output, robust": 1, OBJECTIVE: 4}
    drawn = []
    for name, points in raced.items():
        seconds, right = zip(*points, strict=True)
        ends = [(value, value) for value in right]
        drawn.append(Series(name, seconds, right, OURS, styles[name], ends))
    title = f"attacked, epsilon = {RACE:g}, against run time"
    panels.append(loglog(title, "seconds", "accuracy on test people", drawn, linear=True))
    last = {name: values[-1] for name, values in lines.items()}
    best = max(raced[LOOP], key=lambda point: point[1])
    says = (
        f"At epsilon = {epsilons[-1]:g} a robust model classifies {last['output, robust, attacked']:.1%} of attacked "
        f"people right, an ordinary one {last[f'{OBJECTIVE}, attacked']:.1%}, which costs "
        f"{last[f'{OBJECTIVE}, as they are'] - last['output, robust, as they are']:.1%} where nobody attacks; a tilt "
        f"of 0.3 drowns in its noise up to there, and `HolderSGD` on attacked rows reaches {best[1]:.1%} in "
        f"{best[0]:.2g} seconds at epsilon = {RACE:g}, the certified minimizer "
        f"{raced['output, robust'][0][1]:.1%} in {raced['output, robust'][0][0]:.2g}."
    )
    head = ("accuracy at epsilon =", *(f"{epsilon:g}" for epsilon in epsilons))
    shown = table(head, {name: [f"{v:.3f}" for v in values] for name, values in lines.items()})
    times = {
        f"{name}, {passes:g} passes" if name == LOOP else name: [point[0], f"{point[1]:.3f}"]
        for name, points in raced.items()
        for passes, point in zip(epochs, points, strict=False)
    }
    shown += "\n\n" + table(("", "seconds", f"accuracy attacked, epsilon = {RACE:g}"), times)
    note = (
        f"Adult, {len(people.x):,} people, replace_one, delta = {DELTA:g}. Medians of {draws} draws of the noise (of 3 "
        "fits for noise in the objective and run times), whiskers from lowest to highest; tilted answers are in a ball "
        f"of radius {BALL:g}, which bounds their losses."
    )
    return Exhibit("output_adult", says, shown, panels, 3, note)


def exhibits(smoke: bool) -> Iterator[Exhibit]:
    """Yields the exhibit."""
    if smoke:
        yield exhibit((1.0, 8.0), (1.0,), 2, 2_000)
    else:
        yield exhibit((0.3, 1.0, 3.0, 10.0), (1.0, 3.0, 10.0, 30.0), 20, 32_561)
