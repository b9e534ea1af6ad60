"""The paper on user-level privacy against its own claims: docs/errata.md, paper 3."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.reference.papers.accounting import bad_pass_integral, sequence_probability
from tests.reference.papers.user_level import (
    bernoulli_sensitivity,
    min_users_paper,
    published_noise_std,
    schedule_paper,
    user_localized_schedule,
)
from tests.reference.user_level_literal import (
    AboveThreshold,
    LiteralPhase,
    OutlierRemoval,
    algorithm_3,
    algorithm_4,
    algorithm_4_phases,
    ball,
    concentration_score,
    inclusion,
    published_scales,
)
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta
from torch_dpsco.accounting.analysis.pure import (
    above_threshold_epsilon,
    svt_gaussian_delta,
)
from torch_dpsco.algorithms.user_numbers import calibrate_filter, pair_radius_iid
from torch_dpsco.errors import UtilityWarning

# -- E2: the published algorithm is not private at the level claimed ------------------------------------------------

N, T, EPSILON, DELTA, TAU = 704, 11, 1.0, 1e-6, 1.0


def rows(left: int, own: float) -> np.ndarray:
    """User 1 at `own`, `left` users at -tau, the rest at +tau."""
    return np.array([[own]] + [[-TAU]] * left + [[TAU]] * (N - 1 - left))


def attack(b1: float, b2: float, noise_std: float) -> tuple[float, float, float]:
    """Returns a lower bound of delta at epsilon = 1, the log-ratio of the tests, and mu of the ten releases.

    D and D' differ in user 1, queries are chosen by the attacker: ten with a high score that is higher under D, then
    one that is lower under D. The transcript is "ten answers, then the halt".
    """
    D, E = [rows(625, 0.0)] * 10 + [rows(624, -3.0)], [rows(625, -3.0)] * 10 + [rows(624, 0.0)]
    assert all((a[1:] == b[1:]).all() for a, b in zip(D, E, strict=True))
    gaps = [
        [concentration_score(x, TAU) - 4 * N / 5 for x in (data[0], data[-1])] for data in (D, E)
    ]
    p, q = (sequence_probability(first, last, 10, b1, b2) for first, last in gaps)
    assert (inclusion(D[0], TAU) == 1).all()
    assert (inclusion(E[0], TAU) == 1).all()
    mu = math.sqrt(10) * abs(float(D[0].mean() - E[0].mean())) / noise_std
    ratio = math.log(p / q)
    # tests and Gaussians are independent: P - e^epsilon Q = p (P_G - e^rest Q_G), maximized over events of the releases
    rest = EPSILON - ratio
    delta = p * gaussian_delta(mu, rest) if rest >= 0 else p - math.exp(EPSILON) * q
    return delta, ratio, mu


def test_the_published_scales_exceed_the_delta_claimed_by_two_orders():
    assert (
        min_users_paper(T, DELTA, EPSILON, corrected=False) == N
    )  # the paper's condition holds
    with pytest.warns(UtilityWarning, match="not a proved calibration"):
        noise = published_noise_std(N, T, EPSILON, DELTA, TAU)
    delta, ratio, mu = attack(*published_scales(EPSILON), noise)
    assert delta == pytest.approx(1.549e-4, rel=2e-3)
    assert delta > 150 * DELTA
    assert ratio == pytest.approx(0.966, abs=1e-3)  # the tests alone were to stay within 1/2
    assert mu == pytest.approx(0.0644, abs=1e-4)


def test_the_same_attack_stays_below_delta_at_our_calibration():
    task = {"n_users": N, "steps": T, "epsilon": EPSILON, "delta": DELTA, "pair_radius": TAU}
    plan = calibrate_filter(**task)
    delta, ratio, _ = attack(plan.threshold_scale, plan.query_scale, plan.noise_std)
    score = 2 * (N - 1) / N
    assert ratio <= above_threshold_epsilon(plan.threshold_scale, plan.query_scale, score)
    assert delta < DELTA


def test_the_published_noise_exceeds_delta_with_the_least_possible_sensitivity():
    with pytest.warns(UtilityWarning, match="not a proved calibration"):
        noise = published_noise_std(10**4, 100, EPSILON, DELTA, TAU)
    # even with a sensitivity of 4 tau/n, the least possible, tests and Gaussians together exceed it
    assert svt_gaussian_delta(EPSILON, 1.0, 10 * 4 * TAU / 10**4 / noise) > 100 * DELTA


def test_doubled_scales_keep_the_tests_within_half_of_epsilon():
    b1, b2 = (2 * scale for scale in published_scales(EPSILON))
    assert attack(b1, b2, 1.0)[1] == pytest.approx(0.490, abs=1e-3)


# -- E1, E3, E4, E5 -------------------------------------------------------------------------------------------------


def test_membership_probabilities_move_by_six_in_a_data_set_that_the_lemma_bounds_by_less():
    """Clusters at -2 tau, 0, 2 tau with fractions .42, .16, .42; user 1 leaves the middle one."""
    n = 601
    sizes = (round(0.42 * n), round(0.16 * n), n - 1 - round(0.42 * n) - round(0.16 * n))
    common = [[2.0 * k] for k, size in zip((-1, 0, 1), sizes, strict=True) for _ in range(size)]
    near, far = (inclusion(np.array([[own], *common]), TAU) for own in (0.0, 1e9))
    assert np.abs(near - far).sum() == pytest.approx(6.04, abs=0.05)


def test_where_the_score_is_high_the_same_sum_is_at_most_three():
    """6 (n - M)/n + 1 with M >= 2n/3 + 1: what the correction uses."""
    n = 60
    for apart in range(20):
        common = [[0.0]] * (n - 1 - apart) + [[2.0]] * apart
        near, far = (np.array([[own], *common]) for own in (0.0, 1e9))
        M = math.ceil(max(concentration_score(x, TAU) for x in (near, far)))
        if 2 * n / 3 + 1 <= M:
            moved = np.abs(inclusion(near, TAU) - inclusion(far, TAU)).sum()
            assert moved <= 6 * (n - M) / n + 1 <= 3


@pytest.mark.parametrize(("steps", "probability"), [(11, 5.9e-5), (101, 1.2e-4), (1001, 2.6e-4)])
def test_the_papers_number_of_users_lets_bad_steps_pass_far_too_often(steps, probability):
    n = min_users_paper(steps, DELTA, EPSILON, corrected=False)
    found = bad_pass_integral(4 * n / 5 - 2 * n / 3, steps, *published_scales(EPSILON))
    assert found == pytest.approx(probability, rel=0.1)
    assert found > 50 * DELTA
    n = min_users_paper(steps, DELTA, EPSILON, corrected=True)
    assert bad_pass_integral(4 * n / 5 - 2 * n / 3, steps, 8.0, 16.0) < DELTA


def test_one_user_moves_the_mean_by_four_tau_over_n_with_everyone_included():
    """Thirds at -tau/2, 0, tau/2; user 1 goes from -2 tau to 2 tau: no constant below 4 can hold for two radii."""
    n = 31
    common = [[x] for x in (-0.5, 0.0, 0.5) for _ in range((n - 1) // 3)]
    near, far = (np.array([[own], *common]) for own in (-2.0, 2.0))
    assert (inclusion(near, TAU) == 1).all()
    assert (inclusion(far, TAU) == 1).all()
    moved = abs(float(near.mean() - far.mean()))
    assert moved == pytest.approx(4 * TAU / n)
    assert moved <= bernoulli_sensitivity(n, float(n - 1), 20, 1e-9, TAU)


def test_a_ball_of_radius_tau_halts_the_paper_at_once_in_high_dimension():
    """Users tau from a center in orthogonal directions are sqrt(2) tau apart: nobody has a neighbor."""
    x = np.eye(50) * TAU
    oracle = OutlierRemoval(50, TAU)
    assert concentration_score(x, TAU) == 1.0
    assert oracle.answer(x) is None
    assert concentration_score(x, 2 * TAU) == 50.0


def test_the_pair_radius_is_free_of_the_dimension_and_holds_for_honest_users():
    rng = np.random.default_rng(0)
    n, m, d, trials = 40, 50, 30, 200
    tau, halted = pair_radius_iid(1.0, m, n, 0.05), 0
    for _ in range(trials):
        items = rng.normal(size=(n, m, d))
        x = (items / np.linalg.norm(items, axis=2, keepdims=True)).mean(1)
        gaps = ((x[:, None] - x[None]) ** 2).sum(2)
        halted += gaps.max() > tau**2
    assert halted <= 0.05 * trials + 4 * math.sqrt(0.05 * trials)
    assert schedule_paper(n, m, d, 1.0, 1e-6, 1.0, 1.0, 10).pair_radius > 3 * tau


# -- the literal algorithms -----------------------------------------------------------------------------------------


def test_the_literal_test_halts_at_the_first_query_below_and_stays_halted():
    run = AboveThreshold(10.0, threshold_noise=1.0, query_noise=[0.0, -2.0, 5.0])
    assert [run.top(9.0), run.top(10.0)] == [True, False]
    assert run.halted
    oracle = OutlierRemoval(3, TAU)
    assert oracle.answer(np.array([[0.0], [5.0], [9.0]])) is None
    assert oracle.answer(np.zeros((3, 1))) is None


@pytest.mark.slow
def test_the_literal_methods_descend_on_a_quadratic_and_stop_where_users_disagree():
    rng = np.random.default_rng(1)
    optimum = rng.normal(size=(64, 3)) * 0.01 + 1.0

    def query(theta, j):
        return theta - optimum[j]

    found = algorithm_3(
        query, range(64), np.zeros(3), 200, 0.2, OutlierRemoval(64, 0.5), ball(10.0)
    )
    assert np.linalg.norm(found - 1.0) < 0.1
    spread = algorithm_3(
        query, range(64), np.zeros(3), 200, 0.2, OutlierRemoval(64, 1e-9), ball(10.0)
    )
    assert (spread == 0).all()
    phases = [LiteralPhase(16, 50, 0.0, 0.2, 0.5, 1.0), LiteralPhase(32, 50, 0.0, 0.2, 0.5, 1.0)]
    assert (
        np.linalg.norm(algorithm_4(query, range(64), phases, np.zeros(3), 10.0, 50) - 1.0) < 0.2
    )


def test_the_phases_of_the_library_are_those_of_the_transcription():
    task = {"epsilon": 2.0, "delta": 1e-6}
    literal = algorithm_4_phases(4096, 4, 10, **task, G=1.5, mu=0.3, C=4.0)
    ours = user_localized_schedule(4096, 4, 10, **task, lipschitz=1.5, strong_convexity=0.3)
    assert ours.phase_users == tuple(phase.users for phase in literal)
    for phase, radius in zip(literal, ours.radii, strict=True):
        assert radius == pytest.approx(phase.start_radius, rel=1e-12)
        made = schedule_paper(
            phase.users, 4, 10, **task, lipschitz=1.5, radius=radius, steps=phase.steps
        )
        assert made.default_steps == phase.steps
        assert made.lr == pytest.approx(phase.lr, rel=1e-12)
        assert made.pair_radius == pytest.approx(phase.tau, rel=1e-12)
        assert made.smoothing_radius == pytest.approx(phase.smoothing_radius, rel=1e-12)
