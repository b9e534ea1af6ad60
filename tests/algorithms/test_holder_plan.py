"""Plans of output perturbation, the published noise of Algorithm 1, and the schedules of the theorems."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from tests.reference.papers.holder import (
    log_expansion_constant,
    log_iterate_constant,
    lr_theorem,
    output_sensitivity_paper,
    output_sigma_paper,
    output_sigma_weighted,
    self_bounding_constant,
    steps_exponent,
    steps_theorem,
)
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta
from torch_dpsco.algorithms.holder_numbers import path_sensitivity
from torch_dpsco.algorithms.output_sgd_numbers import (
    LossPromises,
    OutputTask,
    output_path,
)
from torch_dpsco.errors import AdjacencyError, ConditionError, MissingConstantError


def hinge(q, radius=1.0):
    def grad_bound(r):
        return q * (1 + r) ** (q - 1)

    return LossPromises(
        q - 1,
        q,
        grad_bound,
        loss_at_zero=1.0,
        radius=radius,
        glm=True,
        score_offset=1.0,
    )


def plan_output(promises: LossPromises, **task: Any) -> Any:
    return SimpleNamespace(**OutputTask(promises=promises, **task).plan())


TASK = {"batch_size": 1, "dim": 20, "epsilon": 1.0, "delta": 1e-6}


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize(
    ("q", "n", "power", "paper", "independent", "shuffled"),
    [
        (1.5, 1000, -0.5, 55.8, 0.655, 0.293),
        (1.5, 10_000, -0.5, 19.5, 0.207, 0.0927),
        (1.0, 1000, -0.75, 6.67, 0.269, 0.274),
        (2.0, 1000, -0.5, 74.4, 1.22, 0.534),
    ],
)
def test_the_measured_noise_of_the_specification_is_reproduced(
    q, n, power, paper, independent, shuffled
):
    lr = 0.5 * n**power
    published = output_sigma_paper(q - 1, q, q, 1.0, 1.0, lr, n, n, 1.0, 1e-6, "bounded")
    assert published == pytest.approx(paper, rel=0.01)
    promises = hinge(q)
    drawn = output_sigma_weighted(
        1.0, 1e-6, q - 1, q, promises.grad_bound(1.0), lr, n, n, 1, glm=True
    )
    assert drawn == pytest.approx(independent, rel=0.01)
    plan = plan_output(promises, n=n, lr=lr, epochs=1, **TASK)
    assert plan.noise_scale == pytest.approx(shuffled, rel=0.01)
    assert plan.steps == n


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("q", [1.0, 1.3, 1.5, 2.0])
@pytest.mark.parametrize("radius", [1.0, math.inf])
@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
def test_a_plan_pays_for_its_path_as_it_is_computed(q, radius, adjacency):
    n, task = 300, TASK | {"batch_size": 7}
    promises = hinge(q, radius)
    given = task | {"n": n, "adjacency": adjacency, "distance": 1.0}
    plan = plan_output(promises, **given)
    sizes = np.full(plan.steps, plan.lr)
    moved, scale = OutputTask(promises=promises, **given).noise(sizes)
    assert scale == plan.noise_scale
    hit_constant = 2 if adjacency == "replace_one" else 1
    path = output_path(promises, sizes, batch_size=7, hit_constant=hit_constant, dim=20)
    assert moved == path_sensitivity(path, 43)
    assert gaussian_delta(moved / plan.noise_scale, 1.0) <= 1e-6
    assert plan.steps % 43 == 0
    assert plan.risk_bound is None  # 7 does not divide 300


def test_zero_out_needs_half_the_noise_where_nothing_expands():
    plans = [
        plan_output(hinge(2.0), n=100, adjacency=adjacency, lr=0.01, **TASK)
        for adjacency in ("replace_one", "zero_out")
    ]
    assert plans[0].noise_scale == pytest.approx(2 * plans[1].noise_scale, rel=1e-6)


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("q", [1.0, 1.25, 1.5, 2.0])
def test_the_balanced_step_has_the_least_risk_bound(q):
    promises, task = hinge(q), TASK | {"n": 2000}
    best = plan_output(promises, **task)
    epochs = best.steps // 2000
    own = {"n": 2000, "batch_size": 1, "dim": 20, "epsilon": 1.0, "delta": 1e-6}
    assert best.lr == OutputTask(promises=promises, **own).balanced_lr(epochs)
    for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0):
        if q == 2.0 and best.lr * factor > 1.0:
            continue
        other = plan_output(promises, lr=best.lr * factor, epochs=epochs, **task)
        assert other.risk_bound >= best.risk_bound * (1 - 1e-3)


def test_rough_losses_get_more_epochs_and_smooth_ones_one():
    epochs = [plan_output(hinge(q), n=1000, **TASK).steps / 1000 for q in (1.0, 1.25, 1.5, 2.0)]
    assert epochs == [20, math.ceil(1000**0.4), 1, 1]


def test_step_sizes_may_change_and_must_be_one_per_step():
    lr = 0.01 / np.sqrt(np.arange(1, 201))
    plan = plan_output(hinge(1.5), n=100, epochs=2, lr=lr.tolist(), **TASK)
    assert plan.lr == tuple(lr.tolist())
    assert plan.risk_bound is None
    assert (
        plan.noise_scale < plan_output(hinge(1.5), n=100, epochs=2, lr=0.01, **TASK).noise_scale
    )
    with pytest.raises(ValueError, match="one per step"):
        plan_output(hinge(1.5), n=100, epochs=1, lr=lr.tolist(), **TASK)


def test_one_step_is_refused_for_its_answer_is_the_start_whatever_the_data():
    with pytest.raises(ConditionError, match="steps must be >= 2"):
        plan_output(hinge(1.5), lr=0.1, **(TASK | {"n": 5, "batch_size": 5, "epochs": 1}))
    assert (
        plan_output(
            hinge(1.5), lr=0.1, **(TASK | {"n": 5, "batch_size": 5, "epochs": 2})
        ).noise_scale
        > 0
    )


REFUSED = [
    ({"adjacency": "add_remove"}, AdjacencyError, "replace_one, zero_out"),
    ({"epsilon": 0.0}, ValueError, "epsilon must be > 0"),
    ({"delta": 1.0}, ValueError, "delta must be in"),
    ({"epochs": 0}, ValueError, "epochs must be"),
    ({"dim": 0}, ValueError, "dim must be"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_what_is_not_proved_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        plan_output(hinge(1.5), **(TASK | {"n": 100, "lr": 0.01} | changes))


def test_missing_promises_are_named():
    with pytest.raises(MissingConstantError, match="distance"):
        plan_output(hinge(1.5, math.inf), n=100, **TASK)
    with pytest.raises(MissingConstantError, match="loss_at_zero"):
        plan_output(replace(hinge(1.5, math.inf), loss_at_zero=None), n=100, lr=0.01, **TASK)
    with pytest.raises(MissingConstantError, match="gradient_error"):
        plan_output(replace(hinge(1.5), glm=False), n=100, lr=0.01, **TASK)


def test_the_published_noise_has_its_own_conditions():
    numbers = (0.5, 1.5, 1.5, 1.0, 1.0)
    with pytest.raises(ConditionError, match="lr must be < min"):
        output_sigma_paper(*numbers, 0.9, 100, 100, 1.0, 1e-6)


# The published noise.


def literal_paper(alpha, constant, at_zero, radius, lr, steps, n, epsilon, delta):
    """Algorithm 1's noise as printed (bounded domain), in high precision."""
    with mpmath.workdps(40):
        a, big = mpmath.mpf(alpha), mpmath.mpf(constant)
        gamma = mpmath.mpf(delta) / 2
        x = 3 * n * mpmath.log(n / gamma) / steps
        hits = mpmath.mpf(steps) / n * (1 + max(mpmath.sqrt(x), x))
        bound = at_zero + big * mpmath.mpf(radius) ** a
        expanding = mpmath.mpf(0)
        if alpha < 1:
            c = mpmath.sqrt((1 - a) / (1 + a)) * (mpmath.mpf(2) ** -a * big) ** (1 / (1 - a))
            expanding = c**2 * steps * mpmath.mpf(lr) ** (2 / (1 - a))
        square = mpmath.e * (expanding + 4 * bound**2 * mpmath.mpf(lr) ** 2 * (1 + hits) * hits)
        return mpmath.sqrt(2 * mpmath.log(mpmath.mpf("2.5") / delta) * square) / epsilon


@given(
    st.floats(0.0, 1.0),
    st.floats(0.1, 5.0),
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.floats(0.1, 4.0),
)
def test_the_noise_of_algorithm_1_is_the_printed_one_rounded_up(
    alpha, constant, steps, n, epsilon
):
    arguments = (alpha, constant, 1.2, 1.5, 0.09 / constant, steps, n, epsilon, 1e-6)
    ours = output_sigma_paper(*arguments[:3], None, *arguments[3:])
    exact = literal_paper(*arguments)
    assert exact <= ours <= exact * (1 + mpmath.mpf("1e-9"))


@pytest.mark.parametrize(
    ("delta", "edge"),
    [(2e-3, 7.463), (2e-5, 8.419), (2e-6, 8.782), (2e-8, 9.374), (2e-10, 9.849)],
)
def test_the_noise_of_algorithm_1_is_refused_where_its_lemma_fails(delta, edge):
    """The classical formula against Phi, written out: it stops being enough exactly where the plan stops."""
    arguments = (0.5, 1.0, 1.0, None, 1.0, 0.01, 100, 100)

    def enough(epsilon):
        mu = epsilon / math.sqrt(2 * math.log(2.5 / delta))
        return (
            ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)
            <= delta / 2
        )

    for epsilon in (0.01, 0.5, 1.0, 3.0, edge - 2e-3):
        assert enough(epsilon)
        assert output_sigma_paper(*arguments, epsilon, delta) > 0
    for epsilon in (edge + 2e-3, 20.0):
        assert not enough(epsilon)
        with pytest.raises(ConditionError, match="exact curves"):
            output_sigma_paper(*arguments, epsilon, delta)


def test_constants_of_the_paper_overflow_in_no_limit_and_agree_at_both():
    assert log_iterate_constant(1.0, 4.0, 1.0, 0.5) == 0.0
    assert log_iterate_constant(0.0, 2.0, 1.0, 0.0) == pytest.approx(math.log(9.0))
    assert math.exp(log_iterate_constant(0.9, 4.0, 1.0, 1.0)) == pytest.approx(
        0.1 / 1.9 * 4.0**20 + 2, rel=1e-9
    )  # E5
    assert 1e4 < log_iterate_constant(0.9999, 4.0, 1.0, 1.0) < math.inf
    assert log_expansion_constant(1.0, 4.0) == -math.inf
    assert self_bounding_constant(1e-12, 2.0, 5.0) == pytest.approx(2.0, rel=1e-9)
    assert self_bounding_constant(0.0, 2.0, 5.0) == pytest.approx(7.0)
    with pytest.raises(ConditionError, match="step size too large for this alpha"):
        output_sensitivity_paper(0.9999, 4.0, 1.0, 1.0, None, 0.2, 1000, 1000, 1e-6, "unbounded")


@pytest.mark.parametrize("alpha", [0.2, 0.7])
def test_the_iterate_constant_is_what_the_papers_long_formula_simplifies_to(alpha):
    constant, loss = 1.7, 0.3
    c = self_bounding_constant(alpha, constant, 1.0)
    long = (1 - alpha) / (1 + alpha) * c ** (2 * (1 + alpha) / (1 - alpha))
    long *= (alpha / (1 + alpha)) ** (2 * alpha / (1 - alpha))
    assert math.exp(log_iterate_constant(alpha, constant, 1.0, loss)) == pytest.approx(
        long + 2 * loss, rel=1e-10
    )


# Schedules.


def test_exponents_meet_one_where_the_papers_cases_do():
    assert steps_exponent((math.sqrt(73) - 7) / 4 + 1e-9, 9) == 1.0
    assert steps_exponent((math.sqrt(73) - 7) / 4 - 1e-3, 9) > 1.0
    for theorem in (10, 12):
        assert steps_exponent(0.5, theorem) == 1.0
        assert steps_exponent(0.499, theorem) > 1.0
    assert steps_theorem(1000, 0.75, 9) == 1000
    assert steps_theorem(100, 0.0, 12) == 10_000


def test_theorem_12_takes_the_reciprocal_so_that_steps_shrink_with_their_number():
    numbers = {
        "n": 1000,
        "dim": 10,
        "epsilon": 1.0,
        "delta": 1e-6,
        "failure": 0.1,
        "holder_exponent": 0.5,
    }
    one, ten = (lr_theorem(12, steps=steps, **numbers) for steps in (1000, 10_000))
    assert one == pytest.approx(10 * ten)
    # 1/(T max) balances: as printed, max/T, it would be below 1/T, which its own assumption eta > 1/T excludes (E7)
    assert one > 1 / 1000


@pytest.mark.parametrize(
    "changes", [{"theorem": 11}, {"n": 1}, {"delta": 0.0}, {"failure": 1.0}, {"steps": 0}]
)
def test_schedules_refuse_what_is_out_of_range(changes):
    numbers = {
        "theorem": 9,
        "n": 10,
        "dim": 1,
        "epsilon": 1.0,
        "delta": 0.1,
        "failure": 0.1,
        "steps": 5,
    }
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be"):
        lr_theorem(**(numbers | {"holder_exponent": 0.5} | changes))
