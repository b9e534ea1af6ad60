"""Output perturbation: sensitivities attained and never passed, schedules at their optimum, budgets of rounding."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from tests.reference.papers.output import (
    accuracy_paper,
    adversarial_smoothness,
    argmin_sensitivity,
    delta_with_failure,
    expected_suboptimal_sensitivity,
    gap_rounding,
    psgd_sensitivity,
    psgd_sensitivity_strongly_convex,
    reg_convex_erm,
    reg_convex_population,
    reg_smooth_erm,
    reg_smooth_population,
    residual_clip_constants,
    risk_convex_erm,
    risk_convex_population,
    risk_smooth_erm,
    risk_smooth_population,
    risk_strongly_convex,
    suboptimal_sensitivity,
)
from torch_dpsco.accounting.analysis.gaussian import gaussian_sigma
from torch_dpsco.algorithms.output_sgd_numbers import noise_norms
from torch_dpsco.errors import ConditionError, MissingConstantError
from torch_dpsco.estimators.output import (
    adversarial_gradient_diameter,
    adversarial_lipschitz,
    certified_sensitivity,
    erm_sensitivity,
)
from torch_dpsco.estimators.records import gradient_rounding, sum_terms
from torch_dpsco.estimators.solvers import amp_tolerance, check_tolerance, solver_tolerance
from torch_dpsco.estimators.task import minimizer_radius
from torch_dpsco.losses.table import logistic_gradient_diameter

scales = st.floats(-5.0, 5.0).map(lambda x: 10**x)
counts = st.integers(1, 10**7)


# Sensitivity.


@given(scales, scales, counts)
def test_the_erm_sensitivity_is_the_exact_ratio_rounded_up(lipschitz, mu, n):
    exact = Fraction(lipschitz) / (Fraction(mu) * n)
    for adjacency, factor in (("replace_one", 2), ("add_remove", 1), ("zero_out", 1)):
        ours = Fraction(erm_sensitivity(lipschitz, mu, n, adjacency))
        assert factor * exact <= ours <= factor * exact * (1 + Fraction(1, 10**14))
    # a diameter counts for a replaced record only, and is not capped
    assert erm_sensitivity(lipschitz, mu, n, "add_remove", 9.0) == erm_sensitivity(
        lipschitz, mu, n, "add_remove"
    )
    assert Fraction(erm_sensitivity(lipschitz, mu, n, gradient_diameter=9.0)) >= 9 / (
        Fraction(mu) * n
    )
    assert psgd_sensitivity_strongly_convex(lipschitz, mu, n) == erm_sensitivity(
        lipschitz, mu, n
    )


def test_the_smallest_numbers_do_not_underflow_to_no_noise():
    assert erm_sensitivity(1e-300, 1e300, 10**9) > 0
    assert psgd_sensitivity(1e-300, 1e-300, 1) > 0
    assert certified_sensitivity(1e-300, 1e300, 1e-300) > 0


def absolute_minimizer(shifts, kink, mu):
    """Minimizer of (mu/2) w^2 + (kink/n) sum |w - x_i| by bisection of its subgradient."""
    low, high = -10.0, 10.0
    for _ in range(200):
        w = (low + high) / 2
        slope = mu * w + kink * float(np.mean(np.sign(w - shifts)))
        low, high = (low, w) if slope > 0 else (w, high)
    return (low + high) / 2


@pytest.mark.parametrize("n", [3, 11, 101])
def test_two_points_with_a_kink_attain_the_sensitivity(n):
    """l = (mu/2) w^2 + c |w - x|, x = +-c/(mu n), counts (n +- 1)/2: the minimizers are 2 c/(mu n) apart."""
    mu, kink = 0.7, 1.3
    r = kink / (mu * n)
    ends = []
    for more in ((n + 1) // 2, (n - 1) // 2):
        ends.append(absolute_minimizer(np.array([r] * more + [-r] * (n - more)), kink, mu))
    moved = abs(ends[0] - ends[1])
    assert moved == pytest.approx(2 * r, rel=1e-9)
    assert moved <= erm_sensitivity(kink, mu, n)  # the regularizer cancels: L = c suffices
    assert moved / erm_sensitivity(kink * (1 + 1 / n), mu, n) == pytest.approx(
        n / (n + 1), rel=1e-9
    )


@pytest.mark.slow
def test_no_pair_of_quadratics_moves_further():
    """Huber losses of rows on the unit sphere, solved exactly enough; the moved record is antipodal or random."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for trial in range(60):
        n, d, lam = 6, 3, 10 ** rng.uniform(-2, 0)
        x = rng.normal(size=(n, d))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        y = rng.normal(size=n) * 5
        other_x, other_y = x.copy(), y.copy()
        other_x[0], other_y[0] = (x[0], -y[0]) if trial % 2 else (-x[1], 5.0)
        moved = np.linalg.norm(
            huber_minimizer(x, y, lam) - huber_minimizer(other_x, other_y, lam)
        )
        worst = max(worst, moved / erm_sensitivity(1.0, lam, n))
    assert 0.3 < worst <= 1.0 + 1e-6


def huber_minimizer(x, y, lam, weight=None):
    """Minimizer of the mean (or weighted sum) of Huber losses of threshold 1 plus (lam/2) |w|^2, by Newton's method."""
    weight = 1 / len(y) if weight is None else weight
    w = np.zeros(x.shape[1])
    for _ in range(3000):
        residual = x @ w - y
        gradient = weight * x.T @ np.clip(residual, -1, 1) + lam * w
        w = w - gradient / (weight * len(y) + lam)
        if np.linalg.norm(gradient) < 1e-12:
            break
    return w


def test_an_approximate_minimizer_moves_by_twice_its_error():
    mu, grad_tol = 0.3, 1e-3
    # F = (mu/2)(w - a)^2 with a = 0 or 1: points with gradient +-grad_tol, as far apart as can be
    moved = (1.0 + grad_tol / mu) - (0.0 - grad_tol / mu)
    assert moved <= certified_sensitivity(1.0, mu, grad_tol) <= moved * (1 + 1e-14)
    alpha = 1e-4
    moved = 1.0 + 2 * math.sqrt(2 * alpha / mu)
    assert moved <= suboptimal_sensitivity(1.0, mu, alpha) * (1 + 1e-15)
    assert suboptimal_sensitivity(1.0, mu, alpha) == pytest.approx(moved, rel=1e-13)


def laplace_profile(centers, other, scale, epsilon):
    """Exact delta of mixtures of Laplace noise: integral of (p - e^epsilon q)_+ on a fine grid."""
    grid = np.linspace(-400 * scale, 400 * scale, 400_001)

    def density(mixture):
        return sum(
            weight * np.exp(-np.abs(grid - center) / scale) / (2 * scale)
            for center, weight in mixture
        )

    p, q = density(centers), density(other)
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * (grid[1] - grid[0]))


def test_an_accuracy_in_expectation_is_not_private_and_its_repair_is():
    """A counterexample to the paper: alpha holds in expectation, and the paper's noise is no protection."""
    mu, lipschitz, n, epsilon = 1.0, 1.0, 1000, 1.0
    alpha = lipschitz**2 / (mu * n**2)
    exact = erm_sensitivity(lipschitz, mu, n)
    jump = 0.5
    p = 2 * alpha / (mu * jump**2)
    claimed = suboptimal_sensitivity(exact, mu, alpha)
    with_record = [(0.0, 1 - p), (jump, p)]
    without = [(0.0, 1 - p), (-jump, p)]
    # pure epsilon: the density ratio far to the right is nowhere near e^1
    far = 0.6
    ratio = math.log(
        sum(w * math.exp(-abs(far - c) / claimed) for c, w in with_record)
        / sum(w * math.exp(-abs(far - c) / claimed) for c, w in without)
    )
    assert ratio > 50
    assert laplace_profile(with_record, without, claimed, epsilon) > 0.5 * p
    # repaired by Markov's inequality: failures of probability delta_fail are charged
    failure = 1e-4
    repaired = expected_suboptimal_sensitivity(exact, mu, alpha, failure)
    total = delta_with_failure(1e-9, failure, epsilon, kind="per_side")
    assert laplace_profile(with_record, without, repaired, epsilon) <= total


def test_a_ball_bounds_what_a_whole_objective_may_move():
    assert argmin_sensitivity(1.0, 0.1, 1.3) == pytest.approx(2.6)
    assert argmin_sensitivity(1.0, 10.0, 1.3) == pytest.approx(0.2)
    assert argmin_sensitivity(1.0, 0.1) == pytest.approx(20.0)


# The minimizer's norm.


def test_the_radius_is_the_least_of_the_bounds_and_holds():
    rng = np.random.default_rng(1)
    for _ in range(20):
        n, lam = 8, 10 ** rng.uniform(-2, 1)
        x = rng.normal(size=(n, 2))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        y = np.sign(rng.normal(size=n)) * 0.8
        w = np.linalg.norm(huber_minimizer(x, y, lam))
        rho = minimizer_radius(lam, lipschitz=1.0, loss_at_zero=0.32)
        assert (
            w
            <= rho
            == min(
                minimizer_radius(lam, lipschitz=1.0), minimizer_radius(lam, loss_at_zero=0.32)
            )
        )
    assert minimizer_radius(0.1, lipschitz=1.0, radius=2.0) == 2.0


def test_a_sum_of_many_records_leaves_the_replace_radius():
    """Ridge: with n = 100 n0 records the minimizer is outside of the radius for n0, and inside of the one for n_max."""
    n0, records, lam, bound_y = 10, 1000, 1.0, 1.0
    w = records / n0 * bound_y / (records / n0 + lam)  # x = 1, y = 1 in every record
    assert w > minimizer_radius(lam * 3, loss_at_zero=0.5)  # the claim for n = n0
    w = records / n0 / (records / n0 + 3 * lam)
    assert w <= minimizer_radius(3 * lam * n0 / records, loss_at_zero=bound_y**2 / 2)
    assert minimizer_radius(3 * lam, radius=5.0) == 5.0
    with pytest.raises(MissingConstantError):
        minimizer_radius(1.0)


# Constants of losses.


@given(st.floats(0.05, 4.0), st.floats(0.0, 5.0), st.integers(0, 10**6))
def test_no_pair_of_logistic_gradients_is_further_apart(bound, radius, seed):
    rng = np.random.default_rng(seed)
    w, u, v = rng.normal(size=(3, 2))
    w *= radius / np.linalg.norm(w)
    u, v = u * bound / np.linalg.norm(u), v * bound / np.linalg.norm(v)
    u = u if seed % 2 else bound * np.array([w[0], w[1]]) / max(np.linalg.norm(w), 1e-12)
    first, second = (row / (1 + math.exp(-w @ row)) for row in (u, v))
    assert np.linalg.norm(first - second) <= logistic_gradient_diameter(bound, radius) * (
        1 + 1e-15
    )


@given(st.floats(0.1, 3.0), st.floats(0.01, 5.0), st.integers(0, 10**6))
def test_the_clipped_residual_has_its_constants(bound, clip, seed):
    lipschitz, smoothness = residual_clip_constants(bound, clip)
    rng = np.random.default_rng(seed)
    length = bound * rng.uniform(0.01, 1.0, 400)
    margin = rng.uniform(-8, 8, 400)
    p = 1 / (1 + np.exp(margin))
    slope = np.minimum(p, clip / length)
    curve = np.where(p < clip / length, p * (1 - p), 0.0)
    assert np.all(slope * length <= lipschitz * (1 + 1e-15))
    assert np.all(curve * length**2 <= smoothness * (1 + 1e-15))


def test_the_smoothness_of_the_clipped_residual_is_attained():
    for bound, clip in ((1.0, 0.2), (2.0, 0.9), (1.0, 0.5), (1.0, 3.0)):
        p = min(0.5, clip / bound)
        assert p * (1 - p) * bound**2 == pytest.approx(
            residual_clip_constants(bound, clip)[1], rel=1e-12
        )


@pytest.mark.slow
@given(
    st.floats(0.1, 3.0),
    st.floats(0.0, 6.0),
    st.integers(0, 10**6),
    st.sampled_from(["l2", "linf"]),
)
def test_no_pair_of_robust_gradients_is_further_apart(bound, attack, seed, norm):
    rng = np.random.default_rng(seed)
    dim = 3
    w, x, z = rng.normal(size=(3, dim))
    x, z = x * bound / np.linalg.norm(x), z * bound / np.linalg.norm(z)
    shared = w / np.linalg.norm(w) if norm == "l2" else np.sign(w)
    gradients = [
        rng.choice([0.0, rng.uniform(), 1.0]) * (row - attack * shared) for row in (x, z)
    ]
    length = attack * (1 if norm == "l2" else math.sqrt(dim))
    assert np.linalg.norm(gradients[0] - gradients[1]) <= adversarial_gradient_diameter(
        bound, length
    )
    assert np.linalg.norm(gradients[0]) <= adversarial_lipschitz(bound, length)


def test_robustness_up_to_the_bound_costs_no_noise():
    for attack in (0.0, 0.5, 1.0):
        assert adversarial_gradient_diameter(1.0, attack) == pytest.approx(2.0)
    assert adversarial_gradient_diameter(1.0, 0.5 * math.sqrt(16)) == pytest.approx(3.0)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_smoothed_norm_has_its_smoothness(norm):
    rng = np.random.default_rng(2)
    bound, attack, nu, dim = 1.0, 0.7, 0.05, 2
    limit = adversarial_smoothness(bound, attack, nu, norm=norm, dim=dim)
    largest = 0.0
    for _ in range(300):
        w, x = rng.normal(size=(2, dim)) * np.array([[10 ** rng.uniform(-3, 0.5)], [1.0]])
        x *= bound / np.linalg.norm(x)

        def gradient(w, x=x):
            if norm == "l2":
                length = math.sqrt(w @ w + nu * nu)
                direction = w / length
            else:
                length, direction = (
                    float(np.sum(np.sqrt(w**2 + nu**2))),
                    w / np.sqrt(w**2 + nu**2),
                )
            return -(x - attack * direction) / (1 + math.exp(w @ x - attack * length))

        step = 1e-6
        jacobian = np.stack(
            [(gradient(w + step * e) - gradient(w - step * e)) / (2 * step) for e in np.eye(dim)]
        )
        largest = max(largest, float(np.abs(np.linalg.eigvals(jacobian)).max()))
    assert 0.3 * limit < largest <= limit * (1 + 1e-6)


# Bolt-on SGD.


def test_no_replaced_record_moves_one_order_of_sgd_further():
    rng = np.random.default_rng(3)
    worst = 0.0
    for _ in range(40):
        n, batch, passes = 12, int(rng.choice([1, 3])), 3
        x = rng.normal(size=(n, 2))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        other = x.copy()
        other[rng.integers(n)] *= -1
        lr = 2 / 0.25 * rng.uniform(0.1, 1.0)
        ends = [np.zeros(2), np.zeros(2)]
        for w, rows in zip(ends, (x, other), strict=True):
            for _ in range(passes):
                for start in range(0, n, batch):
                    part = rows[start : start + batch]
                    w += lr * np.mean(part / (1 + np.exp(part @ w))[:, None], axis=0)
        bound = psgd_sensitivity(1.0, lr, passes, batch)
        worst = max(worst, float(np.linalg.norm(ends[0] - ends[1])) / bound)
    assert 0.02 < worst <= 1.0


# Schedules.

SIZES = {"n": 2000, "dim": 15, "epsilon": 0.7}


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_the_tight_weights_minimize_their_bounds(delta):
    L, R, beta, n = 1.5, 2.0, 0.4, SIZES["n"]
    s, v = noise_norms(SIZES["dim"], SIZES["epsilon"], delta)
    args = {**SIZES, "delta": delta}

    def stability(lam):
        return 2 * L * L / (lam * n)

    def noise(lam):
        return L * s * 2 * L / (lam * n)

    def smooth_noise(lam):
        return beta / 2 * v * (2 * L / (lam * n)) ** 2

    cases = [
        (reg_convex_erm(L, R, **args), risk_convex_erm(L, R, **args), noise),
        (
            reg_convex_population(L, R, **args),
            risk_convex_population(L, R, **args),
            lambda lam: noise(lam) + stability(lam),
        ),
        (reg_smooth_erm(L, R, beta, **args), risk_smooth_erm(L, R, beta, **args), smooth_noise),
        (
            reg_smooth_population(L, R, beta, **args),
            risk_smooth_population(L, R, beta, **args),
            lambda lam: smooth_noise(lam) + stability(lam),
        ),
    ]
    for reg, risk, part in cases:

        def bound(log_lam, part=part):
            lam = math.exp(log_lam)
            return part(lam) + lam * R * R / 2

        best = minimize_scalar(
            bound, bounds=(math.log(reg) - 3, math.log(reg) + 3), method="bounded"
        )
        assert math.exp(best.x) == pytest.approx(reg, rel=1e-3)
        assert risk == pytest.approx(bound(math.log(reg)), rel=1e-9)
        assert risk <= best.fun * (1 + 1e-9)


def test_both_branches_of_the_cubic_solve_it():
    for n in (10, 10**6):
        for dim in (1, 10**5):
            L, R, beta = 1.0, 3.0, 0.25
            lam = reg_smooth_population(L, R, beta, n, dim, 1.0, 0.0)
            v = noise_norms(dim, 1.0, 0.0)[1]
            right = 2 * L * L * lam / n + 4 * beta * L * L * v / n**2
            assert R * R * lam**3 / 2 == pytest.approx(right, rel=1e-9)


@pytest.mark.parametrize(
    ("n", "epsilon", "delta"), [(1000, 1.0, 0.0), (1000, 1.0, 1e-6), (10**5, 0.1, 1e-8)]
)
def test_the_tight_bounds_are_below_the_papers(n, epsilon, delta):
    args = {"n": n, "dim": 10, "epsilon": epsilon, "delta": delta}
    assert risk_convex_erm(1.0, 2.0, **args) < risk_convex_erm(1.0, 2.0, mode="paper", **args)
    assert risk_smooth_erm(1.0, 2.0, 0.25, **args) < risk_smooth_erm(
        1.0, 2.0, 0.25, mode="paper", **args
    )


def test_the_slopes_of_the_bounds_in_n():
    def slope(risk):
        return math.log(risk(10**6) / risk(10**4)) / math.log(100)

    args = (10, 1.0, 1e-6)
    assert slope(lambda n: risk_strongly_convex(1.0, 0.1, n, *args)) == pytest.approx(-1)
    assert slope(
        lambda n: risk_strongly_convex(1.0, 0.1, n, *args, smoothness=1.0)
    ) == pytest.approx(-2)
    assert slope(lambda n: risk_convex_erm(1.0, 1.0, n, *args)) == pytest.approx(-1 / 2)
    assert slope(lambda n: risk_smooth_erm(1.0, 1.0, 1.0, n, *args)) == pytest.approx(-2 / 3)


def test_the_excess_risk_of_noise_on_a_quadratic_is_within_its_bound():
    """F = (beta/2) w^2, L on the ball: E F(z) = (beta/2) E|z|^2 exactly."""
    n, dim, mu, L = 500, 7, 0.5, 1.0
    sigma = gaussian_sigma(1.0, 1e-6, erm_sensitivity(L, mu, n))
    exact = mu / 2 * dim * sigma**2
    assert risk_strongly_convex(L, mu, n, dim, 1.0, 1e-6, smoothness=mu) == pytest.approx(
        exact, rel=1e-9
    )
    off = risk_strongly_convex(L, mu, n, dim, 1.0, 1e-6, smoothness=mu, distance=1e-3)
    assert off > exact + mu / 2 * 1e-6
    more = risk_strongly_convex(L, mu, n, dim, 1.0, 1e-6, smoothness=mu, population=True)
    assert more == pytest.approx(exact + 2 * L * L / (mu * n), rel=1e-9)


def test_the_papers_smooth_bound_is_refused_outside_of_its_condition():
    with pytest.raises(ConditionError, match="mode='tight'"):
        risk_smooth_erm(1.0, 10.0, 100.0, n=10, dim=100, epsilon=0.1, delta=0.0, mode="paper")


# Rounding.


def test_the_budget_covers_single_precision_sums():
    """The same formula with u = 2^-24 must cover a gradient that is summed in float32."""
    rng = np.random.default_rng(5)
    n, d, lam = 3000, 5, 0.01
    x = rng.normal(size=(n, d)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True) * np.float32(1.001)
    for scale in (0.0, 1.0, 30.0):
        w = (rng.normal(size=d) * scale).astype(np.float32)
        exact_x, exact_w = x.astype(np.float64), w.astype(np.float64)
        exact = -exact_x.T @ (1 / (1 + np.exp(exact_x @ exact_w))) / n + lam * exact_w
        rows = -x * (np.float32(1) / (np.float32(1) + np.exp(x @ w)))[:, None]
        parts = [np.add.accumulate(rows[i : i + 1024], axis=0)[-1] for i in range(0, n, 1024)]
        total = (parts[0] + parts[1]) + parts[2]
        error = np.linalg.norm(total / np.float32(n) + np.float32(lam) * w - exact)
        budget = gradient_rounding(
            n,
            d,
            lipschitz=1.0,
            smoothness=0.25,
            reg=lam,
            norm=float(np.linalg.norm(exact_w)),
        )
        assert 0 < error <= budget * 2.0**29


def test_the_budget_covers_a_subtracted_target():
    """Squared-like residuals y - w.x with |y| far above |w.x|: without the offset the score error is missed."""
    rng = np.random.default_rng(6)
    n, d, target = 50, 3, np.float32(1e4 / 3)
    x = rng.normal(size=(n, d)).astype(np.float32)
    w = rng.normal(size=d).astype(np.float32) * np.float32(1e-3)
    exact = np.clip(x.astype(float) @ w.astype(float) - float(target) + 3333.0, -1, 1)
    ours = np.clip((x @ w - target) + np.float32(3333.0), -1, 1)
    error = np.linalg.norm((x.astype(float).T @ (ours - exact)) / n)
    bound = float(np.linalg.norm(x, axis=1).max())
    rule = {
        "lipschitz": bound,
        "smoothness": bound**2,
        "reg": 0.0,
        "norm": float(np.linalg.norm(w)),
    }
    assert error > gradient_rounding(n, d, **rule) * 2.0**29
    assert (
        error
        <= gradient_rounding(n, d, score_offset=2 * float(target) / bound, **rule) * 2.0**29
    )


def test_the_gap_budget_covers_a_score_that_is_far_above_the_loss():
    """Hinge at margins near 1 with |w| = 1000 in float32: P is tiny, its error is that of the scores."""
    rng = np.random.default_rng(7)
    n, d = 64, 4
    x = rng.normal(size=(n, d)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True) * np.float32(1.001)
    w = (rng.normal(size=d) * 1000).astype(np.float32)
    margin = x.astype(float) @ w.astype(float)
    exact = np.maximum(0, 1e-3 - margin + np.round(margin)).mean()
    ours = np.maximum(
        np.float32(0), np.float32(1e-3) - x @ w + np.round(margin).astype(np.float32)
    ).mean()
    error = abs(float(ours) - exact)
    budget = gap_rounding(
        n, d, primal=exact, dual=0.0, lipschitz=1.0, norm=float(np.linalg.norm(w))
    )
    assert gap_rounding(n, d, primal=exact, dual=0.0, lipschitz=1e-9, norm=0.0) * 2.0**29 < error
    assert error <= budget * 2.0**29


def test_sums_need_fewer_terms_the_better_they_are_formed():
    for n in (1, 2, 1024, 1025, 10**6):
        assert sum_terms(n) <= n + 1
    assert [sum_terms(n) for n in (1, 1024, 1025, 2048, 2049)] == [
        1,
        1024,
        1025,
        1025,
        1026,
    ]


def test_the_weights_of_a_sum_scale_its_budget():
    rule = {"lipschitz": 1.0, "smoothness": 0.25, "norm": 2.0}
    mean = gradient_rounding(1000, 5, reg=0.01, **rule)
    total = gradient_rounding(1000, 5, reg=10.0, weight=1000.0, **rule)
    assert total == pytest.approx(1000 * mean, rel=1e-9)
    assert gradient_rounding(1000, 5, reg=10.0, weight=1000.0, linear=50.0, **rule) > total


def test_a_tolerance_below_the_rounding_is_refused():
    assert check_tolerance(4.1e-12, 1e-12) == 4.1e-12
    with pytest.raises(ConditionError, match="above 4e-12"):
        check_tolerance(4e-12, 1e-12)
    assert amp_tolerance(2.0, 0.0) == pytest.approx(2e-6)
    assert amp_tolerance(2.0, 2e-5) == 8e-5
    with pytest.raises(ConditionError, match="n_max"):
        amp_tolerance(2.0, 1e-2)


def test_the_default_tolerance_costs_its_share_of_noise():
    delta = erm_sensitivity(1.0, 0.01, 1000)
    tolerance = solver_tolerance(delta, 0.01)
    assert certified_sensitivity(delta, 0.01, tolerance) == pytest.approx(
        (1 + 1e-3) * delta, rel=1e-12
    )


# Refusals.


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan, "1", None, True])
def test_constants_that_must_be_positive_are_refused_otherwise(bad):
    for call in (
        lambda: argmin_sensitivity(bad, 1.0),
        lambda: suboptimal_sensitivity(0.1, 1.0, bad),
        lambda: expected_suboptimal_sensitivity(0.1, 1.0, bad, 0.1),
        lambda: psgd_sensitivity(1.0, bad, 1),
        lambda: reg_convex_erm(1.0, bad, 10, 2, 1.0, 0.0),
        lambda: reg_smooth_population(1.0, 1.0, bad, 10, 2, 1.0, 0.0),
        lambda: risk_strongly_convex(1.0, bad, 10, 2, 1.0, 0.0),
        lambda: accuracy_paper(1.0, 1.0, 10, 2, bad, 0.0),
        lambda: logistic_gradient_diameter(bad, 1.0),
        lambda: residual_clip_constants(1.0, bad),
        lambda: adversarial_smoothness(1.0, 0.1, bad),
    ):
        with pytest.raises(ValueError, match="must be"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: erm_sensitivity(1.0, 1.0, 10, "remove"), "adjacency must be one of"),
        (lambda: expected_suboptimal_sensitivity(0.1, 1.0, 0.1, 0.0), "failure must be in"),
        (lambda: expected_suboptimal_sensitivity(0.1, 1.0, 0.1, 1.0), "failure must be in"),
        (lambda: reg_convex_erm(1.0, 1.0, 10, 2, 1.0, 0.5, mode="paper"), "delta must be in"),
        (lambda: reg_convex_erm(1.0, 1.0, 10, 2, 1.0, 1.0), "delta must be in"),
        (lambda: reg_convex_erm(1.0, 1.0, 10, 2, 1.0, -1e-9), "delta must be in"),
        (lambda: reg_convex_erm(1.0, 1.0, 10, 2, 1.0, 0.0, mode="fast"), "mode must be one of"),
        (lambda: accuracy_paper(1.0, 1.0, 10, 2, 1.0, 0.5), "delta must be in"),
        (lambda: psgd_sensitivity(1.0, 0.1, 0), "passes must be an integer >= 1"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
