"""Whatever the data and whatever the fast solver does, `solve` returns a certified point."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

from tests.estimators import objective_references as reference
from tests.reference.papers.output_solvers import katyusha, stochastic_subgradient
from torch_dpsco.errors import ConditionError, NotCertifiedError
from torch_dpsco.estimators.objectives import LinearObjective
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.robust import Adversarial, Tilted
from torch_dpsco.estimators.solvers import (
    accelerated_steps,
    certified_descent,
    gradient_certificate,
    lbfgs,
    newton,
    solve,
)
from torch_dpsco.losses import (
    Hinge,
    Huber,
    Logistic,
    ResidualClipped,
    SmoothedHinge,
    SmoothedPinball,
    SoftmaxCrossEntropy,
    Squared,
)

solving = importlib.import_module(
    "torch_dpsco.estimators.solvers"
)  # the package exports a function of this name


def rows(seed, n, dim, kind="plain"):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, dim, generator=generator, dtype=torch.float64) / math.sqrt(dim)
    y = torch.sign(
        X @ torch.ones(dim).double() + 0.3 * torch.randn(n, generator=generator).double()
    )
    if kind == "ill-conditioned":
        X = X * torch.logspace(0, -4, dim, dtype=torch.float64)
    if kind == "duplicates":
        X, y = X[: n // 10 + 1].repeat(10, 1)[:n], y[: n // 10 + 1].repeat(10)[:n]
    if kind == "separable":
        y = torch.where(X[:, 0] > 0, 1.0, -1.0).double()
    if kind == "equal":
        X, y = X[:1].repeat(n, 1), torch.ones(n).double()
    return X, y


KINDS = {
    "plain": (200, 5),
    "ill-conditioned": (200, 5),
    "duplicates": (200, 5),
    "separable": (200, 5),
    "equal": (50, 3),
    "more features than records": (10, 40),
    "one record": (1, 3),
}
LOSSES = [
    Logistic(),
    SmoothedHinge(0.1),
    Huber(0.5),
    Squared(),
    ResidualClipped(Logistic(), 0.2),
    Hinge(power=2),
]


def mean(loss, X, y, reg):
    return LinearObjective(loss, Records(X, y), reg=reg, normalizer=len(X))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("most", [0, 1000])  # coordinates up to which a Hessian is formed
@pytest.mark.parametrize("kind", KINDS)
def test_every_solver_ends_certified(kind, most, monkeypatch):
    monkeypatch.setattr(solving, "_NEWTON_DIM", most)
    for loss in LOSSES:
        X, y = rows(0, *KINDS[kind], kind)
        reg = 1e-6  # condition up to 1e6
        objective = mean(loss, X, y, reg)
        tolerance = 1e-3 / (reg * len(X))
        solution = solve(objective, tolerance)
        assert solution.proves(tolerance)
        assert gradient_certificate(objective, solution.w).proves(tolerance)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("loss", LOSSES[:2], ids=repr)
def test_solutions_are_within_the_tolerance_of_the_true_minimizer(loss):
    curve = reference.logistic if isinstance(loss, Logistic) else reference.smoothed_hinge(0.1)
    for kind, (n, dim) in KINDS.items():
        X, y = rows(1, n, dim, kind)
        objective = mean(loss, X, y, 1e-3)
        at = reference.margin_objective(*reference.long_rows(X, y), curve, 1e-3, n)
        for tolerance in (1e-1, 1e-4, 1e-8):
            point = solve(objective, tolerance).w
            exact, doubt = reference.minimizer(at, objective, newton(objective, point, 1e-300))
            assert doubt < 1e-12
            assert reference.distance(point, exact) <= tolerance + doubt


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("broken", ["nan", "stuck", "wrong"])
@pytest.mark.parametrize("kind", ["smooth", "attacked", "ball"])
def test_the_fallback_certifies_when_the_fast_solver_is_broken(monkeypatch, kind, broken):
    X, y = rows(3, 40, 3)

    def bad(objective, start, distance, steps=0):
        return {"nan": start * math.nan, "stuck": start, "wrong": start + 1e3}[broken]

    monkeypatch.setattr(solving, "newton", bad)
    monkeypatch.setattr(solving, "lbfgs", bad)
    objective = {
        "smooth": mean(Logistic(), X, y, 1e-2),
        "attacked": Adversarial(
            Logistic(), Records(X, y), attack_radius=0.1, reg=0.1, normalizer=40, smoothing=1e-3
        ),
        "ball": mean(Logistic(), X, y, 1e-2),
    }[kind]
    tolerance = 0.05 / (objective.strong_convexity * 40)
    solution = solve(objective, tolerance, radius=0.7 if kind == "ball" else math.inf)
    assert solution.proves(tolerance)
    monkeypatch.undo()
    exact = solve(objective, tolerance / 100, radius=0.7 if kind == "ball" else math.inf).w
    assert float((solution.w - exact).norm()) <= tolerance * 1.01


def test_the_solution_on_a_ball_is_that_of_the_sphere_or_the_free_one():
    X, y = rows(4, 100, 4)
    objective = mean(Logistic(), X, y, 1e-2)
    free = solve(objective, 1e-9).w
    assert torch.allclose(
        solve(objective, 1e-6, radius=2 * float(free.norm())).w, free, atol=1e-6
    )
    for share in (0.1, 0.9, 0.999):
        radius = share * float(free.norm())
        w = solve(objective, 1e-7, radius=radius).w
        assert float(w.norm()) == pytest.approx(radius, abs=1e-7)
        gradient = objective.value_and_gradient(w)[1]
        assert float(gradient @ w) == pytest.approx(-float(gradient.norm() * w.norm()), rel=1e-6)
    with pytest.raises(ConditionError, match="smooth"):
        solve(mean(Hinge(), X, y, 0.1), 1e-3, radius=1.0)


def test_undamped_newton_diverges_on_a_clipped_loss_and_ours_does_not():
    """Far away the clipped loss is straight: an undamped step is as long as 1/reg."""
    X = torch.tensor([[1.0], [1.0], [1.0]], dtype=torch.float64)
    objective = mean(ResidualClipped(Logistic(), 0.3), X, torch.tensor([1.0, 1.0, -1.0]), 1e-3)
    w = torch.tensor([3.0], dtype=torch.float64)
    sizes = []
    for _ in range(20):
        w = w - torch.linalg.solve(objective.hessian(w), objective.value_and_gradient(w)[1])
        sizes.append(float(w.abs()))
    assert sizes[-1] > 20
    assert float(objective.value_and_gradient(w)[1].norm()) > 1e-3
    start = torch.tensor([3.0], dtype=torch.float64)
    assert gradient_certificate(objective, newton(objective, start, 1e-8)).proves(1e-8)


def test_worst_case_counts_of_accelerated_descent_hold_alone():
    X, y = rows(5, 60, 4, "ill-conditioned")
    for reg in (1.0, 1e-2, 1e-4):
        objective = mean(Logistic(), X, y, reg)
        assert certified_descent(objective, torch.zeros(4).double(), 1e-4 / reg).proves(
            1e-4 / reg
        )
        exact = solve(objective, 1e-10).w
        kappa, least = objective.smoothness / reg, objective.value(exact)
        for steps in (5, 20, 80):
            after = (
                objective.value(accelerated_steps(objective, torch.zeros(4).double(), steps))
                - least
            )
            rate = (
                (reg + objective.smoothness)
                / 2
                * float(exact @ exact)
                * math.exp(-(steps - 1) / math.sqrt(kappa))
            )
            assert after <= rate + 1e-14


@pytest.mark.weekly
def test_stochastic_solvers_come_close_alone():
    X, y = rows(8, 100, 3)
    objective = LinearObjective(
        Logistic(),
        Records(X, y),
        reg=0.1,
        normalizer=100,
        linear_term=0.01 * torch.ones(3).double(),
    )
    exact, zero = solve(objective, 1e-10).w, torch.zeros(3).double()
    generator = torch.Generator().manual_seed(0)
    point = katyusha(objective, zero, 1e-6, epochs=30, generator=generator)
    assert float((point - exact).norm()) <= 1e-6
    lipschitz = 2 * float(X.norm(dim=1).max()) + 1
    average = stochastic_subgradient(objective, zero, 4000, generator=generator)
    # 2 L^2/(mu (T + 1)) in expectation; three times that by Markov's inequality fails with probability 1/3 at most,
    # and this seed is fixed
    assert objective.value(average) - objective.value(exact) <= 3 * 2 * lipschitz**2 / (
        0.1 * 4001
    )
    average = stochastic_subgradient(
        mean(Hinge(), X, y, 0.1), zero, 4000, radius=1.0, generator=generator
    )
    assert float(average.norm()) <= 1.0
    assert float((lbfgs(objective, zero, 1e-8) - exact).norm()) <= 1e-8


def test_a_kink_is_refused():
    X, y = rows(9, 50, 3)
    with pytest.raises(ConditionError, match="LinearObjective must be smooth to be solved"):
        solve(mean(Hinge(), X, y, 0.1), 1e-3)
    kinked = Adversarial(Logistic(), Records(X, y), attack_radius=5.0, reg=0.1, normalizer=50)
    with pytest.raises(ConditionError, match="Adversarial must be smooth to be solved"):
        solve(kinked, 1e-3)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("attack_norm", [2, math.inf])
@pytest.mark.parametrize("radius", [1e-3, 0.05, 0.3])
def test_adversarial_solutions_are_certified_and_beat_their_neighbors(attack_norm, radius):
    X, y = rows(10, 60, 3)
    numbers = {"attack_radius": radius, "attack_norm": attack_norm, "smoothing": 1e-3}
    objective = Adversarial(Logistic(), Records(X, y), reg=0.05, normalizer=60, **numbers)
    solution = solve(objective, 1e-3)
    assert solution.proves(1e-3)
    generator, best = torch.Generator().manual_seed(0), objective.value(solution.w)
    for scale in (1e-2, 1e-1, 1.0):
        for _ in range(50):
            move = scale * torch.randn(3, generator=generator, dtype=torch.float64)
            # strong convexity around w*, which is within 1e-3
            assert objective.value(solution.w + move) >= best - 2e-3 * (1 + 0.05 + radius)


def test_tilted_and_softmax_objectives_end_certified(monkeypatch):
    X, y = rows(11, 80, 4)
    X = X / X.norm(dim=1, keepdim=True).clamp(min=1)
    for tilt in (-0.05, 0.5, 5.0):
        objective = Tilted(Logistic(), Records(X, y), tilt=tilt, reg=0.1, bound_x=1.0)
        assert solve(objective, 1e-8).proves(1e-8)
    objective = LinearObjective(
        SoftmaxCrossEntropy(3),
        Records(X, torch.arange(80) % 3, num_classes=3),
        reg=0.01,
        normalizer=80,
    )
    for most in (0, 1000):
        monkeypatch.setattr(solving, "_NEWTON_DIM", most)
        assert solve(objective, 1e-8).proves(1e-8)


def test_a_first_guess_from_every_sixteenth_record_changes_nothing_but_the_way_there():
    X, y = rows(12, 17_000, 3)
    X[16] = math.nan
    objective = mean(Logistic(), X, y, 1e-3)
    thin = objective._every(16)
    assert thin.records.count == 1063
    assert thin.records._features.data_ptr() == X.data_ptr()
    direct = mean(Logistic(), X[::16].clone(), y[::16], 1e-3)
    w = torch.ones(3, dtype=torch.float64)
    share = thin.normalizer / 1063
    assert torch.allclose(
        thin.value_and_gradient(w)[1] - 1e-3 * w,
        (direct.value_and_gradient(w)[1] - 1e-3 * w) / share,
    )
    solution = solve(objective, 1e-6)
    assert solution.proves(1e-6)
    assert (
        float((solution.w - newton(objective, torch.zeros(3).double(), 1e-9)).norm())
        <= 1e-6 + 1e-9
    )


@pytest.mark.parametrize("reg", [1e-9, 1e-3, 1e6])
def test_newton_gets_there_from_a_hessian_of_something_else(reg):
    X, y = rows(12, 500, 3)
    objective, other = mean(Logistic(), X, y, 1e-3), mean(Logistic(), X[:4], y[:4], reg)
    found = newton(objective, torch.zeros(3).double(), 1e-9, like=other)
    assert gradient_certificate(objective, found).proves(1e-9)


def test_an_empty_sum_has_its_minimizer_in_closed_form():
    term = torch.tensor([1.0, -2.0], dtype=torch.float64)
    objective = LinearObjective(
        Logistic(),
        Records(torch.zeros(0, 2), torch.zeros(0)),
        reg=0.5,
        normalizer=1,
        linear_term=term,
    )
    assert torch.allclose(solve(objective, 1e-9).w, -term / 0.5)


def test_a_tolerance_below_rounding_or_a_nan_objective_is_never_answered():
    X, y = rows(12, 20, 2)
    for loss in (Logistic(), SmoothedHinge(0.1)):
        with pytest.raises(NotCertifiedError):
            solve(mean(loss, X, y, 1e-2), 1e-25)
    objective = mean(Logistic(), X, y, 1e-2)
    objective.value_and_gradient = lambda point: (math.nan, point * math.nan)
    with pytest.raises(NotCertifiedError):
        solve(objective, 1e-3)


def test_objectives_without_strong_convexity_and_bad_arguments_are_refused():
    X, y = rows(13, 20, 2)
    with pytest.raises(ConditionError, match="regularize"):
        solve(mean(Logistic(), X, y, 0.0), 1e-3)
    objective = mean(Logistic(), X, y, 0.1)
    for wrong in (
        {"tolerance": 0.0},
        {"tolerance": math.inf},
        {"tolerance": 1.0, "radius": 0.0},
    ):
        with pytest.raises(ValueError, match="must be"):
            solve(objective, **wrong)


def test_nothing_but_the_point_leaves():
    X, y = rows(14, 20, 2)
    solution = solve(mean(Logistic(), X, y, 0.1), 1e-3)
    assert set(vars(solution)) == {"w", "distance"}
    assert repr(solution) == "Solution()"


# Lemma S: the distance of the minimizers of adjacent data sets.


def adjacent(seed, n=12, dim=2):
    """A data set of rows in the unit ball and one with record 0 replaced, often by its opposite."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    X = X / X.norm(dim=1, keepdim=True).clamp(min=1)
    y = torch.sign(torch.randn(n, generator=generator, dtype=torch.float64))
    if seed % 3 == 0:
        X = X[:1].repeat(n, 1) / X[0].norm()
    other, labels = X.clone(), y.clone()
    if seed % 2:
        other[0] = torch.nn.functional.normalize(
            torch.randn(dim, generator=generator, dtype=torch.float64), dim=0
        )
    else:
        X[0] = X[0] / X[0].norm()
        other[0] = -X[0] if seed % 4 else X[0]
        labels[0] = -y[0] if seed % 4 == 0 else y[0]
    return X, y, other, labels


SENSITIVE = {
    "logistic": (lambda X, y: mean(Logistic(), X, y, 0.1), 2 / (0.1 * 12)),
    "clipped": (
        lambda X, y: mean(ResidualClipped(Logistic(), 0.3), X, y, 0.1),
        0.6 / (0.1 * 12),
    ),
    "smoothed hinge": (lambda X, y: mean(SmoothedHinge(0.2), X, y, 0.1), 2 / (0.1 * 12)),
    "huber": (lambda X, y: mean(Huber(0.5), X, y, 0.1), 1 / (0.1 * 12)),
    "hinge": (lambda X, y: mean(SmoothedHinge(1e-3), X, y, 0.1), 2 / (0.1 * 12)),
    "pinball": (lambda X, y: mean(SmoothedPinball(0.3, 1e-3), X, y, 0.1), 1.4 / (0.1 * 12)),
    # L/reg bounds the minimizers: the range of the losses is rho B with rho = min(10, sqrt(2 ln 2/reg))
    "tilted up": (
        lambda X, y: Tilted(Logistic(), Records(X, y), tilt=0.5, reg=0.1, bound_x=1.0),
        None,
    ),
    "tilted down": (
        lambda X, y: Tilted(Logistic(), Records(X, y), tilt=-0.05, reg=0.1, bound_x=1.0),
        None,
    ),
    "adversarial": (
        lambda X, y: Adversarial(
            Logistic(), Records(X, y), attack_radius=0.2, reg=0.1, normalizer=12, smoothing=1e-3
        ),
        2 / (0.1 * 12),
    ),
}


def tilted_bound(tilt, mu):
    spread = math.exp(abs(tilt) * math.sqrt(2 * math.log(2) / 0.1))
    return 2 / mu * spread / (spread + 11)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", SENSITIVE)
def test_minimizers_of_adjacent_data_sets_are_within_the_sensitivity(name):
    build, bound = SENSITIVE[name]
    bound = (
        bound
        or {"tilted up": tilted_bound(0.5, 0.1), "tilted down": tilted_bound(0.05, 0.05)}[name]
    )
    tolerance, ratios = 1e-3 * bound, []
    for seed in range(200):
        X, y, other, labels = adjacent(seed)
        move = solve(build(X, y), tolerance).w - solve(build(other, labels), tolerance).w
        ratios.append(float(move.norm()) / (bound + 2 * tolerance))
    assert max(ratios) <= 1
    assert max(ratios) > 0.05  # the pairs do move it


def test_the_closed_form_of_a_linear_attack_is_a_saddle_value_for_one_record():
    """One record: the solution of the closed form is the best w against its own worst attack."""
    X, y = torch.tensor([[1.0, 0.5]], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    objective = Adversarial(
        Logistic(), Records(X, y), attack_radius=0.3, reg=0.2, normalizer=1, smoothing=1e-6
    )
    w = solve(objective, 1e-9).w
    attacked = X[0] - 0.3 * w / w.norm()
    slope = -torch.sigmoid(-(attacked @ w)) * attacked + 0.2 * w
    assert float(slope.norm()) <= 1e-8
