"""The step rule in plans: it follows the noise, what is given wins, and what a run does is what its plan says."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.errors import MissingConstantError
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.step import chooser as theory
from torch_dpsco.step.oracle import HolderClipped
from torch_dpsco.step.plan import Plan

BUDGET = dp.Budget(1.0, 1e-6, "replace_one")
LOGISTIC = dp.losses.Logistic().problem(bound_x=2.0)
HUBER = dp.losses.Huber(threshold=1.0).problem(bound_x=2.0, bound_y=5.0)
PINBALL = dp.losses.Pinball(quantile=0.5).problem(bound_x=2.0, bound_y=5.0)
N = 20_000


def plan(problem: dp.Problem = LOGISTIC, **changes: Any) -> Any:
    return dp.HolderSGD.plan(
        **{"problem": problem, "n": N, "budget": BUDGET, "dim": 10, **changes}
    )


def horizon(made: Any) -> float:
    return made.steps * made.lr / (1 - made.momentum)


# -- what it chooses --------------------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("problem", [LOGISTIC, HUBER, PINBALL])
def test_with_more_noise_the_horizon_is_shorter_and_the_clip_no_larger(
    problem: dp.Problem,
) -> None:
    made = [
        plan(problem, budget=dp.Budget(epsilon, 1e-6, "replace_one"))
        for epsilon in (0.03, 0.1, 0.3, 1.0, 3.0)
    ]
    assert problem is PINBALL or all(horizon(a) <= horizon(b) for a, b in pairwise(made))
    assert horizon(made[0]) < horizon(made[-1]) / 3
    assert all(a.clip <= b.clip for a, b in pairwise(made))
    assert (made[0].clip, made[-1].clip) == (0.5, 1.0)
    assert all(0.999 * p.budget.epsilon < p.epsilon() <= p.budget.epsilon for p in made)
    assert all((p.average, p.risk_bound) == ("weighted", None) for p in made)


def test_the_horizon_is_the_distance_over_the_exact_noise() -> None:
    made = plan(budget=dp.Budget(0.1, 1e-6, "replace_one"))
    clip = made.clip * LOGISTIC.lipschitz
    noise = theory.noise_of_mean(
        made.noise_multiplier, clip, made.batch_size, made.steps, 10, sampled=True
    )
    assert horizon(made) == pytest.approx(25.0 / 2.0 / noise)
    twice = plan(budget=dp.Budget(0.1, 1e-6, "replace_one"), distance=1.0)
    assert horizon(twice) == pytest.approx(
        1.0 / noise, rel=0.02
    )  # in other steps, of nearly equal noise


def test_a_ball_is_a_distance_that_the_answer_has_at_most() -> None:
    problem, budget = (
        dp.losses.Logistic().problem(bound_x=2.0, radius=1.0),
        dp.Budget(0.1, 1e-6, "replace_one"),
    )
    made = plan(problem, budget=budget)
    assert horizon(made) < horizon(plan(budget=budget)) / 5
    assert made.prox() == dp.prox.Ball(1.0)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("n", [20_000, 100_000, 2_000_000])
def test_batches_make_twenty_passes_but_a_million_rows_at_least_and_twenty_at_most(
    n: int,
) -> None:
    made = plan(n=n, budget=dp.Budget(1.0, 1e-9, "replace_one"))
    rows = made.steps * made.batch_size
    assert rows == pytest.approx(min(max(20 * n, 1e6), 2e7), rel=0.1)
    assert 64 <= made.steps <= 1100


@pytest.mark.slow
def test_adjacency_and_dimension_enter_by_the_noise_alone() -> None:
    small, large = plan(dim=10), plan(dim=1000)
    assert horizon(large) < horizon(small)
    assert horizon(plan(budget=dp.Budget(1.0, 1e-6, adjacency="add_remove"))) > horizon(small)
    assert plan(dim=None).lr == plan(dim=64).lr


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize(
    "sampling", ["poisson", "fixed", "shuffled", "full", "assigned", dp.Poisson(500, N)]
)
def test_every_sampling_has_a_rule(sampling: Any) -> None:
    adjacency = "add_remove" if sampling == "assigned" else "replace_one"
    made = plan(sampling=sampling, budget=dp.Budget(1.0, 1e-6, adjacency=adjacency))
    assert made.momentum > 0
    assert made.epsilon() <= 1.0
    assert type(made.design).__name__.lower() == (
        sampling if isinstance(sampling, str) else "poisson"
    )
    if sampling == "assigned":
        assert made.steps * made.batch_size == pytest.approx(N, rel=0.01)


# -- what is given wins -----------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"steps": 77}, lambda p: p.steps),
        ({"batch_size": 123}, lambda p: p.batch_size),
        ({"average": "last"}, lambda p: p.average),
        ({"clip": 0.7}, lambda p: p.clip),
        ({"sampling": "fixed"}, lambda p: type(p.design).__name__.lower()),
    ],
)
def test_one_given_number_is_taken_and_the_others_follow(
    given: dict[str, Any], read: Any
) -> None:
    made = plan(**given)
    assert read(made) == next(iter(given.values()))
    assert made.momentum > 0
    assert made.epsilon() <= 1.0


@pytest.mark.slow
def test_passes_that_are_given_are_made() -> None:
    made = plan(epochs=3)
    assert made.steps * made.batch_size == pytest.approx(3 * N, rel=0.05)
    assert plan(epochs=3, batch_size=500).steps == 120


@pytest.mark.parametrize("problem", [LOGISTIC, HUBER])
def test_a_given_step_size_is_one_without_momentum_and_with_the_batches_of_before(
    problem: dp.Problem,
) -> None:
    made = plan(problem, lr=0.1)
    assert (made.lr, made.momentum, made.clip, made.average) == (0.1, 0, 1, "last")
    assert (made.batch_size, made.steps) == (512, 400)


def test_given_noise_has_no_rule() -> None:
    made = dp.HolderSGD.plan(problem=LOGISTIC, n=N, noise_multiplier=2.0, steps=10)
    assert (made.momentum, made.clip, made.lr, made.average) == (
        0,
        1,
        1 / LOGISTIC.smoothness,
        "last",
    )


@pytest.mark.parametrize("clip", [0.0, -0.5, 1.01, math.nan, "half"])
def test_a_clip_is_a_share(clip: Any) -> None:
    with pytest.raises(ValueError, match="clip"):
        plan(clip=clip)


def test_losses_of_many_scores_are_not_clipped_by_default() -> None:
    softmax = dp.losses.SoftmaxCrossEntropy(num_classes=4).problem(bound_x=2.0)
    assert plan(softmax, budget=dp.Budget(0.05, 1e-6, "replace_one")).clip == 1
    assert plan(softmax, clip=0.5).clip == 0.5


# -- what a run does --------------------------------------------------------------------------------------------------


def data(n: int = 40) -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(n, 3, generator=draw, dtype=torch.float64) / 2
    return TensorDataset(x, torch.sign(x[:, :1] + 0.1))


def without_noise(made: Any) -> Any:
    return replace(made, noise_multiplier=0.0, budget=None)


@pytest.mark.cases(1, 1)
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("radius", [math.inf, 0.3])
@pytest.mark.parametrize("average", ["last", "weighted"])
def test_a_run_is_the_loop_of_the_page(radius: float, average: str) -> None:
    problem, set_of = dp.losses.Logistic().problem(bound_x=2.0, radius=radius), data()
    made = without_noise(
        plan(problem, n=40, sampling="full", steps=12, average=average, clip=0.25)
    )
    made = replace(made, lr=0.5, momentum=0.75)
    model = nn.Linear(3, 1, dtype=torch.float64)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    dp.fit(
        model,
        dp.HolderSGD(model.parameters(), made),
        set_of,
        dp.losses.Logistic(),
        progress=False,
    )

    x = np.c_[set_of.tensors[0].numpy(), np.ones(40)]
    y = set_of.tensors[1][:, 0].numpy()
    w = z = np.zeros(4)
    iterates = []
    for _ in range(12):
        iterates.append(w)
        slopes = -y / (1 + np.exp(y * (x @ w)))
        limits = (
            0.25 * problem.grad_bound() / np.linalg.norm(x, axis=1)
        )  # below the bound at the start
        z = z - 2.0 * (x.T @ np.clip(slopes, -limits, limits)) / 40
        z = z * min(1.0, radius / np.linalg.norm(z))
        w = 0.75 * w + 0.25 * z
    share = np.arange(1, 13)
    expected = w if average == "last" else share @ np.array(iterates) / share.sum()
    found = np.r_[model.weight.detach().numpy().ravel(), model.bias.detach().numpy()]
    assert np.allclose(found, expected, atol=1e-6)
    assert np.linalg.norm(found) <= radius + 1e-9


@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
def test_a_run_with_momentum_goes_on_from_a_checkpoint() -> None:
    made, answers = without_noise(plan(n=40, sampling="full", steps=10)), []
    for stop in (None, 4):
        torch.manual_seed(0)
        model = dp.attach(nn.Linear(3, 1, dtype=torch.float64))
        optimizer = dp.HolderSGD(model.parameters(), made)
        for part in (10,) if stop is None else (stop, 10 - stop):
            for x, y in optimizer.loader(data(), steps=part):
                optimizer.zero_grad()
                dp.losses.Logistic()(model(x), y).backward()
                optimizer.step()
            if part == stop:
                file = io.BytesIO()
                torch.save((model.state_dict(), optimizer.state_dict()), file)
                file.seek(0)
                weights, state = torch.load(file, weights_only=False)
                model = dp.attach(nn.Linear(3, 1, dtype=torch.float64))
                model.load_state_dict(weights)
                optimizer = dp.HolderSGD(model.parameters(), made)
                optimizer.load_state_dict(state)
        optimizer.finalize()
        answers.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*answers)


def test_a_plan_with_momentum_prints_and_is_saved() -> None:
    made = plan(budget=dp.Budget(0.1, 1e-6, "replace_one"))
    text = " ".join(str(made).split())
    assert f"momentum {made.momentum:.3g}, answer: an average weighted by step" in text
    assert "rows are clipped at 0.5 of the bound that the loss promises" in text
    assert Plan.from_dict(made.to_dict()) == made
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
        replace(made, momentum=1.0)


# -- a clip below the bound -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
@pytest.mark.parametrize(
    "problem", [LOGISTIC, HUBER, dp.losses.Squared().problem(bound_x=2.0, bound_y=5.0)]
)
def test_no_row_passes_the_share_of_the_bound_and_noise_is_in_proportion(
    problem: dp.Problem, share: float
) -> None:
    for norm in (0.0, 0.5, 40.0):
        oracle = HolderClipped(problem, 2.0, 5, clip_share=share)
        query = [torch.tensor([norm, 0.0], dtype=torch.float64)]
        oracle.open(query)
        largest = problem.lipschitz or problem.grad_bound(norm)
        assert oracle.clip <= min(share * largest, problem.grad_bound(norm)) * (1 + 1e-12)
        assert oracle.noise_std == pytest.approx(2.0 * oracle.clip / 5, rel=0.02)
        assert oracle.event().sigma == 2.0
        oracle.observe(GradBatch([DenseBlock(torch.tensor([[1e6, 0.0]], dtype=torch.float64))]))
        released = oracle.release(torch.Generator().manual_seed(0)).mean[0]
        oracle.open(query)
        without = oracle.release(torch.Generator().manual_seed(0)).mean[0]
        assert float((released - without).norm()) <= oracle.sensitivity("zero_out")


def test_an_oracle_with_a_share_says_so_to_checkpoints() -> None:
    names = [
        HolderClipped(LOGISTIC, 2.0, 5, clip_share=share).settings() for share in (1.0, 0.5)
    ]
    assert [name["clip_share"] for name in names] == [1.0, 0.5]


# -- clipped rows -----------------------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("sampling", ["poisson", "full", "fixed"])
def test_many_passes_of_clipped_sgd_follow_the_noise_whatever_the_clip(sampling: str) -> None:
    kind = {"problem": dp.Problem(smoothness=4.0), "n": N, "dim": 10, "sampling": sampling}
    small, large = (
        dp.ClippedSGD.plan(**kind, budget=dp.Budget(epsilon, 1e-6, "replace_one"), clip=1.0)
        for epsilon in (0.1, 1.0)
    )
    assert horizon(small) < horizon(large)
    assert 64 <= small.steps <= large.steps
    again = dp.ClippedSGD.plan(**kind, budget=dp.Budget(0.1, 1e-6, "replace_one"), clip=7.0)
    assert (again.lr, again.momentum, again.steps) == (small.lr, small.momentum, small.steps)
    known = dp.ClippedSGD.plan(
        **kind, budget=dp.Budget(0.1, 1e-6, "replace_one"), clip=7.0, distance=7.0 * 50 / 4 / 2
    )
    assert horizon(known) == pytest.approx(horizon(small) / 2, rel=0.05)
    assert (
        small.average,
        dp.ClippedSGD.plan(**kind, budget=BUDGET, clip=1.0, lr=0.1).average,
    ) == (
        "weighted",
        "last",
    )


def test_clipped_sgd_needs_a_smoothness_or_a_step_size() -> None:
    with pytest.raises(MissingConstantError, match="ClippedSGD needs smoothness"):
        dp.ClippedSGD.plan(n=N, budget=BUDGET, clip=1.0, sampling="poisson", dim=10)


def test_one_pass_makes_more_steps_where_there_is_less_noise() -> None:
    kind = {
        "problem": dp.Problem(smoothness=4.0),
        "n": N,
        "dim": 10,
        "clip": 1.0,
        "sampling": "shuffled",
    }
    made = [
        dp.ClippedSGD.plan(**kind, budget=dp.Budget(epsilon, 1e-6, "replace_one"))
        for epsilon in (0.1, 1.0, 8.0)
    ]
    assert made[0].steps < made[1].steps < made[2].steps
    assert all(p.design.one_pass and p.momentum > 0 for p in made)
    flat = [
        dp.ProximalSGD.plan(**kind | {"n": 500}, budget=dp.Budget(epsilon, 1e-6, "replace_one"))
        for epsilon in (0.7, 1.0, 8.0)
    ]
    assert all(
        (p.momentum, p.average) == (0, "last") and p.lr <= 1 / 8 * (1 + 1e-12) for p in flat
    )
    assert flat[0].steps < flat[2].steps
    assert dp.AcceleratedSGD.plan(**kind, budget=BUDGET).steps == 5
    assert dp.ClippedSGD.plan(**kind, budget=BUDGET, lr=0.1).steps == 5


# -- what it is for ---------------------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("epsilon", [0.3, 3.0])
def test_a_default_run_is_better_than_ten_epochs_at_one_over_smoothness(epsilon: float) -> None:
    """The excess of the loss of a fixed task is a third of that of the earlier default, or less (it is a tenth)."""
    n, dim = 6_000, 8
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(n, dim, generator=draw) * torch.logspace(0, -1, dim) + 0.5
    x = x / x.norm(dim=1).max()
    scores = 10 * (x @ torch.randn(dim, generator=draw))
    y = torch.sign(torch.sigmoid(scores - scores.mean()) - torch.rand(n, generator=draw))[
        :, None
    ]
    problem, loss = dp.losses.Logistic().problem(bound_x=math.sqrt(2)), dp.losses.Logistic()
    budget = dp.Budget(epsilon, 1e-6, adjacency="add_remove")

    def fitted(lr: float | None) -> float:
        model = nn.Linear(dim, 1)
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        made = dp.HolderSGD.plan(problem=problem, n=n, budget=budget, lr=lr, dim=model)
        dp.fit(
            model,
            dp.HolderSGD(model.parameters(), made),
            TensorDataset(x, y),
            loss,
            progress=False,
        )
        return float(loss(model(x), y).detach())

    best = nn.Linear(dim, 1)
    solver = torch.optim.LBFGS(best.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        solver.zero_grad()
        value = loss(best(x), y)
        value.backward()
        return value

    solver.step(closure)
    least = float(closure().detach())
    assert fitted(None) - least < (fitted(1.0 / problem.smoothness) - least) / 3


def test_without_dim_each_class_counts_as_many_parameters() -> None:
    classes = dp.losses.SoftmaxCrossEntropy(20).problem(bound_x=2.0)
    assert horizon(plan(classes, dim=None)) == horizon(plan(classes, dim=20 * 64))
    assert horizon(plan(classes, dim=None)) < horizon(plan(classes, dim=64)) / 3
