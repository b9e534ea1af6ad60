"""Errata of the paper on output perturbation (docs/errata.md, paper 4) that no other test shows, with their numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.reference.papers.output import (
    accuracy_paper,
    gaussian_sigma_zhao,
    paper_ratio,
    reg_convex_population,
    reg_smooth_population,
    risk_strongly_convex,
    subgradient_steps,
    suboptimal_sensitivity,
    zhao_constant,
)
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_sigma
from torch_dpsco.algorithms.output_sgd_numbers import noise_norms
from torch_dpsco.estimators.output import (
    erm_sensitivity,
    tilted_sensitivity,
)
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.robust import Adversarial, Tilted
from torch_dpsco.losses import Huber, Logistic, Loss, SmoothedHinge, Squared


@pytest.mark.parametrize(
    ("reach", "loss"), [(0.05, 3.7), (0.1, 12.6), (0.5, 92.0), (1.0, 194.0)]
)
def test_an_accuracy_in_expectation_loses_far_more_than_the_epsilon_claimed(
    reach: float, loss: float
) -> None:
    """E1: with probability p the solver is off by `reach`, to the side of one record; far to the right it shows."""
    mu, lipschitz, n, epsilon = 1.0, 1.0, 1000, 1.0
    alpha = lipschitz**2 / (mu * n**2)
    p = 2 * alpha / (mu * reach**2)
    assert p * mu * reach**2 / 2 == pytest.approx(alpha)  # the accuracy in expectation is kept
    moved = erm_sensitivity(lipschitz, mu, n)
    scale = suboptimal_sensitivity(moved, mu, alpha) / epsilon
    # densities of w_hat + Laplace noise beyond all centers, whose exact minimizers are `moved` apart
    here = (1 - p) + p * math.exp(reach / scale)
    there = ((1 - p) + p * math.exp(-reach / scale)) * math.exp(-moved / scale)
    assert math.log(here / there) == pytest.approx(loss, rel=0.01)
    assert loss > 3 * epsilon


@pytest.mark.parametrize(
    ("epsilon", "delta", "true"), [(1.0, 1e-5, 7.4e-5), (5.0, 1e-5, 7.0e-4), (0.1, 1e-5, 6.3e-6)]
)
def test_the_printed_density_of_algorithm_7_halves_the_variance(
    epsilon: float, delta: float, true: float
) -> None:
    """E2: exp(-2 epsilon^2 |z|^2 / (Delta^2 (c + sqrt(c^2 + epsilon))^2)); the proof has no 2."""
    c = zhao_constant(delta)
    exponent = (
        2 * epsilon**2 / (c + math.sqrt(c * c + epsilon)) ** 2
    )  # = 1 / (2 sigma^2) at Delta = 1
    printed = math.sqrt(1 / (2 * exponent))
    assert printed == pytest.approx(
        gaussian_sigma_zhao(epsilon, delta, 1.0) / math.sqrt(2), rel=1e-9
    )
    assert gaussian_delta(1 / printed, epsilon) == pytest.approx(true, rel=0.02)
    assert gaussian_delta(1 / gaussian_sigma_zhao(epsilon, delta, 1.0), epsilon) <= delta


def test_the_printed_noise_of_algorithm_6_is_too_small_by_2_4() -> None:
    """E3: Delta + 2 alpha / mu in place of Delta + 2 sqrt(2 alpha / mu)."""
    for mu, lipschitz, n in ((1.0, 1.0, 1000), (0.1, 0.3, 2000)):
        alpha, moved = lipschitz**2 / (mu * n**2), erm_sensitivity(lipschitz, mu, n)
        needed = suboptimal_sensitivity(moved, mu, alpha)
        assert needed / (moved + 2 * alpha / mu) == pytest.approx(2.4, rel=0.03)
        # points of accuracy alpha on either side of minimizers `moved` apart are as far apart as that
        assert moved + 2 * math.sqrt(2 * alpha / mu) == pytest.approx(needed, rel=1e-12)


def test_a_maximum_of_smooth_losses_has_a_kink() -> None:
    """E4: one record at 0 under an l2 attack: log(1 + exp(rho |w|)); the gradient jumps by rho at w = 0."""
    rho = 0.5
    zero = torch.zeros(1, 2, dtype=torch.float64)
    attacked = Adversarial(
        Logistic(), Records(zero, torch.ones(1)), attack_radius=rho, reg=0.1, normalizer=1
    )
    assert attacked.smoothness is None
    step = torch.tensor([1e-9, 0.0], dtype=torch.float64)
    jump = attacked.value_and_gradient(step)[1] - attacked.value_and_gradient(-step)[1]
    assert float(jump.norm()) == pytest.approx(
        rho, rel=1e-6
    )  # 2 rho |phi'(0)|, however small the step
    # a public smoothing of the norm mends it: from 1e-9 on both sides the gradient moves by no more than promised
    mended = Adversarial(
        Logistic(),
        Records(zero, torch.ones(1)),
        attack_radius=rho,
        reg=0.1,
        normalizer=1,
        smoothing=1e-3,
    )
    change = mended.value_and_gradient(step)[1] - mended.value_and_gradient(-step)[1]
    assert float(change.norm()) <= mended.smoothness * 2e-9 * (1 + 1e-9)


def test_a_saddle_gap_that_trusts_concavity_certifies_a_wrong_point() -> None:
    """A Huber loss of w (x + v) - y at x = y = 1, |v| <= 1/2: the gap of Algorithm 6 is 0 at a point 0.9 away."""
    mu, reach = 0.01, 0.5

    def huber(r: np.ndarray | float) -> np.ndarray:
        size = np.abs(r)
        return np.where(size <= 1, size**2 / 2, size - 0.5)

    def attacked(w: np.ndarray | float, v: float) -> np.ndarray:
        return huber(w * (1 + v) - 1) + mu / 2 * np.square(w)

    w, v = 0.5 / (0.25 + mu), -reach  # the best w against v, and v a best answer to first order
    residual = w * (1 + v) - 1
    assert residual * (1 + v) + mu * w == pytest.approx(0, abs=1e-12)
    gap = max(residual * w * (other - v) for other in (-reach, reach))  # linear in the attack
    assert gap == 0
    grid = np.linspace(0, 3, 300_001)
    worst = np.maximum(attacked(grid, -reach), attacked(grid, reach))
    best = float(grid[worst.argmin()])
    claimed = math.sqrt(2 * gap / mu)
    assert claimed == 0
    assert abs(w - best) > 0.9


@pytest.mark.parametrize(
    "loss",
    [Logistic(), SmoothedHinge(), Squared(), Huber()],
    ids=repr,
)
def test_no_loss_of_a_score_is_concave_in_attacks(loss: Loss) -> None:
    """Moves of the score by t and -t raise the mean loss, so that Assumption 2 fails for every w but 0."""
    y = torch.ones(2, dtype=torch.float64)
    for score in (0.0, 0.5, 1.5):
        for move in (0.5, 2.0):
            both = loss.value(torch.tensor([score - move, score + move]).double(), y).mean()
            here = loss.value(torch.tensor([score, score]).double(), y).mean()
            assert both >= here - 1e-12
    ends = loss.value(torch.tensor([-1.0, 3.0]).double(), y).mean()
    assert ends > loss.value(torch.ones(2).double(), y).mean() + 0.1


def test_replacing_a_record_changes_the_weights_of_all_others() -> None:
    """E5: the terms that the proof of Lemma 5.2 drops are not 0."""
    rows = torch.tensor([[1.0], [1.0], [1.0]], dtype=torch.float64)
    point = torch.tensor([2.0], dtype=torch.float64)
    weights = [
        Tilted(
            Logistic(), Records(rows, torch.tensor([1.0, 1.0, last])), tilt=1.0, reg=0.1
        ).weights(point)
        for last in (1.0, -1.0)
    ]
    assert float(weights[0][0]) == pytest.approx(1 / 3)
    assert float(weights[1][0]) < 0.15


def test_what_all_data_sets_share_moves_no_minimizer() -> None:
    """E6: linear losses <w, x> with |x| <= L, in the mean, and (lam/2) |w|^2: w* = -mean(x) / lam."""
    lipschitz, lam, n, radius = 2.0, 0.1, 50, 20.0
    moved = abs((-lipschitz) - lipschitz) / (n * lam)  # of the one record that differs
    ours = erm_sensitivity(lipschitz, lam, n)
    assert moved <= ours <= moved * (1 + 1e-12)
    assert lipschitz / lam <= radius  # all minimizers are in the ball
    published = 2 * (lipschitz + lam * radius) / (lam * n)
    assert published / ours == pytest.approx(2.0)


def test_the_steps_of_corollary_3_1_fall_short_of_its_accuracy() -> None:
    """E8: T is printed with 2 c + sqrt(epsilon) where the accuracy has c + sqrt(c^2 + epsilon)."""
    lipschitz, mu, dim, delta = 1.0, 0.5, 1, 1e-6

    def steps(n: int, epsilon: float) -> tuple[int, float]:
        alpha, c = accuracy_paper(lipschitz, mu, n, dim, epsilon, delta), zhao_constant(delta)
        printed = math.sqrt(dim) * (2 * c + math.sqrt(epsilon)) / (epsilon * n)
        return subgradient_steps(lipschitz, mu, alpha), 2 * n * max(n, 1 / (printed * n))

    needed, printed = steps(3, 60.0)
    assert printed < 0.9 * needed
    needed, printed = steps(
        1000, 8.0
    )  # but as long as epsilon < n^2 it is n that counts in both
    assert printed == 2 * 1000**2 == pytest.approx(needed, abs=1)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
def test_the_square_that_corollary_2_2_needs_is_that_of_the_whole_sum(epsilon: float) -> None:
    """E9: (c + sqrt(c^2 + epsilon))^2 lies between 4 c^2 and (2 c + sqrt(epsilon))^2, and d counts."""
    for delta in (1e-3, 1e-9):
        c = zhao_constant(delta)
        value = (c + math.sqrt(c * c + epsilon)) ** 2
        assert 4 * c * c < value <= (2 * c + math.sqrt(epsilon)) ** 2
        assert value > 2 * c + math.sqrt(epsilon)  # without the square it is no bound
    for dim in (1, 7):
        assert noise_norms(dim, epsilon, 1e-6)[1] == pytest.approx(
            dim * gaussian_sigma(epsilon, 1e-6, 1.0) ** 2
        )


def test_the_smooth_risk_of_a_tilted_mean_grows_as_the_square_of_its_largest_weight() -> None:
    """E9: beta E|z|^2 / 2 with |z| proportional to C / (C + n - 1), C = e^(tau r)."""
    n, dim, beta = 10**9, 4, 1.0

    def risk(tilt: float) -> float:
        sigma = gaussian_sigma(1.0, 1e-6, tilted_sensitivity(tilt, 2.0, n, 1.0, 0.1))
        return beta / 2 * dim * sigma**2

    weight = math.exp(1.5 * 2.0)
    assert risk(1.5) / risk(0.0) == pytest.approx(weight**2, rel=1e-6)


@pytest.mark.parametrize("dim", [1, 10])
def test_the_ratio_of_pure_noise_is_no_bound_on_gaussian_noise(dim: int) -> None:
    """E11: Proposition 2.7 is printed with d/(epsilon n) alone; at delta > 0 the noise is up to q n."""
    n, epsilon, delta = 10_000, 1.0, 1e-9
    noise, q = noise_norms(dim, epsilon, delta)[0], paper_ratio(n, dim, epsilon, delta)
    assert dim / epsilon < noise <= q * n
    printed = math.sqrt(dim / (epsilon * n)) + 1 / math.sqrt(n)
    assert reg_convex_population(1.0, 1.0, n, dim, epsilon, 0.0, mode="paper") == pytest.approx(
        printed
    )
    assert reg_convex_population(1.0, 1.0, n, dim, epsilon, delta, mode="paper") > printed


def test_without_the_stability_term_the_smooth_population_bound_of_the_paper_is_none() -> None:
    """E11: with 2 L^2 / (lam n) left out, noise and bias alone fall below the generalization error of the minimizer."""
    lipschitz, radius, beta, n, dim = 1.0, 1.0, 1e-4, 1000, 1
    lam = reg_smooth_population(lipschitz, radius, beta, n, dim, 1.0, 0.0, mode="paper")
    noise = risk_strongly_convex(lipschitz, lam, n, dim, 1.0, 0.0, smoothness=beta)
    stability = 2 * lipschitz**2 / (lam * n)
    assert stability > 10 * (noise + lam * radius**2 / 2)
