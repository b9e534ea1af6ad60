"""Objective perturbation: integrals in high precision, and exact densities over adversarial data."""

from __future__ import annotations

import functools
import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.papers.objective import (
    amp_delta,
    amp_delta_general,
    amp_delta_monotone,
    amp_sigma_monotone,
    objpert_delta,
    objpert_delta_general,
    objpert_delta_monotone,
    objpert_rdp_dominating,
    objpert_rdp_monotone,
    objpert_sigma,
    objpert_sigma_general,
    objpert_sigma_monotone,
    rdp_of_any_sign,
)
from torch_dpsco.accounting.analysis import objective as op
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, profile
from torch_dpsco.accounting.analysis.objective import Change
from torch_dpsco.errors import InfeasibleError

mp.mp.dps = 35


# References in high precision.


def exact_profile(epsilon, mu):
    epsilon, mu = mp.mpf(epsilon), mp.mpf(mu)
    upper, lower = mp.ncdf(mu / 2 - epsilon / mu), mp.ncdf(-mu / 2 - epsilon / mu)
    return upper - mp.exp(epsilon) * lower


def exact_c(reg, smoothness):
    return mp.log1p(mp.mpf(smoothness) / mp.mpf(reg))


def chi_density(t, k):
    return (
        mp.mpf(2) ** (1 - mp.mpf(k) / 2)
        / mp.gamma(mp.mpf(k) / 2)
        * t ** (k - 1)
        * mp.exp(-t * t / 2)
    )


@pytest.mark.slow
@given(st.floats(-6.0, 40.0), st.floats(-3.0, 1.3).map(lambda x: 10**x))
def test_profiles_are_never_below_their_high_precision_values(epsilon, mu):
    with mp.workdps(600):  # the reference cancels where epsilon is many mu
        exact = exact_profile(epsilon, mu)
        if exact > mp.mpf("1e-290"):
            assert exact <= profile(epsilon, mu) <= exact * (1 + mp.mpf("2e-9"))


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("k", [2, 5, 40])
@pytest.mark.parametrize(
    ("epsilon", "sigma"), [(0.2, 1.0), (1.0, 4.0), (3.0, 3.0), (1.0, 0.6), (0.05, 40.0)]
)
def test_quadratures_are_never_below_the_integral(k, epsilon, sigma):
    s, left = 1 / mp.mpf(sigma), mp.mpf(epsilon) - mp.mpf("0.04") - 1 / mp.mpf(sigma) ** 2 / 2
    start = max(mp.mpf(0), left / s)
    mode = max(start, mp.sqrt(k - 1))
    points = [start, mode, *(mode + j for j in (1, 2, 4, 8, 16, 40))]
    points = sorted(set(points))
    exact = mp.quad(lambda t: (1 - mp.exp(left - s * t)) * chi_density(t, k), points)
    ours = objpert_delta_general(epsilon, sigma, 0.04, 1.0, k)
    assert exact * (1 - mp.mpf("1e-12")) <= ours <= exact * (1 + mp.mpf("5e-9"))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("mu_out", [0.3, 0.01, 1e-4])
@pytest.mark.parametrize(("epsilon", "sigma"), [(0.5, 3.0), (1.0, 5.3), (0.02, 30.0)])
def test_quadratures_with_output_noise_are_never_below_the_integral(mu_out, epsilon, sigma):
    s, left = 1 / mp.mpf(sigma), mp.mpf(epsilon) - exact_c(2.0, 0.01)
    corner = (left - s * s / 2) / s
    width = mp.mpf(mu_out) / s
    cuts = [
        -s / 2,
        *(corner + j * width for j in (-40, -12, -4, -1, 0, 1, 4, 12, 40)),
        corner + 3,
        corner + 12,
        40,
    ]
    cuts = sorted({max(-s / 2, cut) for cut in cuts})
    with mp.workdps(60):
        tail = mp.quad(
            lambda t: mp.npdf(t) * exact_profile(left - s * s / 2 - s * t, mu_out), cuts
        )
        exact = mp.ncdf(-s / 2) * exact_profile(left, mu_out) + tail
    ours = amp_delta_monotone(epsilon, sigma, 2.0, 1.0, 0.01, mu_out)
    assert exact * (1 - mp.mpf("1e-12")) <= ours <= exact * (1 + mp.mpf("5e-9"))


@pytest.mark.parametrize("order", [1.01, 1.5, 8, 300])
@pytest.mark.parametrize("sigma", [0.7, 5.0, 400.0])
def test_renyi_curves_are_never_below_their_high_precision_values(order, sigma):
    k, s, c = mp.mpf(order) - 1, 1 / mp.mpf(sigma), exact_c(3.0, 0.25)
    t = k * s
    folded = c + s * s / 2 + (t * t / 2 + mp.log(2 * mp.ncdf(t))) / k
    positive = mp.ncdf(-s / 2) + mp.exp(k * (k + 1) * s * s / 2) * mp.ncdf(s / 2 + k * s)
    for ours, exact in (
        (rdp_of_any_sign(order, sigma, 3.0, 1.0, 0.25), folded),
        (objpert_rdp_monotone(order, sigma, 3.0, 1.0, 0.25), c + mp.log(positive) / k),
    ):
        assert exact <= ours <= exact * (1 + mp.mpf("1e-11"))


def test_the_renyi_curve_of_several_dimensions_is_not_below_its_integral():
    for k in (2, 9):
        t = mp.mpf(4) * mp.mpf("0.25")
        moment = mp.quad(
            lambda r, k=k, t=t: chi_density(r, k) * mp.exp(t * r), [0, 1, 3, 6, 12, 40]
        )
        exact = mp.mpf("0.1") + mp.mpf("0.25") ** 2 / 2 + mp.log(moment) / 4
        assert (
            exact <= op.objpert_rdp(5, 4.0, Change(0.1, 1.0, k)) <= exact * (1 + mp.mpf("1e-8"))
        )


def tangent(s, c):
    """e / s in high precision."""
    total = 2 * mp.ncdf(s / 2) - 1
    low, high = mp.mpf(0), 40 + s
    for _ in range(118):
        z = (low + high) / 2
        above = mp.ncdf(s / 2 - z) - mp.exp(-c) * mp.ncdf(-s / 2 - z) > total
        low, high = (z, high) if above else (low, z)
    return low


def dominating(s, c):
    """The loss law of the pair: mass of the atom at 0, and e / s."""
    z = tangent(s, c)
    return mp.ncdf(-s / 2) - mp.exp(-c) * mp.ncdf(-s / 2 - z), z


@pytest.mark.cases(7, 3)
@pytest.mark.parametrize("order", [1.01, 2, 32, 500])
@pytest.mark.parametrize(("sigma", "reg"), [(0.5, 0.3), (5.0, 1.0), (50.0, 10.0), (300.0, 0.1)])
def test_the_dominating_curve_is_not_below_its_high_precision_value(order, sigma, reg):
    k, s, c = mp.mpf(order) - 1, 1 / mp.mpf(sigma), exact_c(reg, 0.25)
    atom, z = dominating(s, c)
    gauss, far = mp.exp(k * (k + 1) * s * s / 2), (k + mp.mpf(1) / 2) * s
    ahead = gauss * mp.ncdf(-far) + atom + mp.exp(k * c) * gauss * mp.ncdf(far - z)
    back = gauss * mp.ncdf(far) + atom + mp.exp(-(k + 1) * c) * gauss * mp.ncdf(-far - z)
    exact = mp.log(max(ahead, back)) / k
    ours = objpert_rdp_dominating(order, sigma, reg, 1.0, 0.25)
    assert exact <= ours <= exact * (1 + mp.mpf("1e-11")) + mp.mpf("2e-13") / k
    assert ours <= objpert_rdp_monotone(order, sigma, reg, 1.0, 0.25) * (1 + 1e-12) + 1e-12


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("order", "sigma"), [(1.5, 2.0), (6, 5.0)])
def test_the_curve_of_a_replaced_record_is_the_integral_of_its_profile(order, sigma):
    """E[r^a] = 1 + a (a-1) int (e^(k x) + e^(-(k+1) x)) H(x) dx, H the summed profile beyond c, a chord below."""
    k, s, c = mp.mpf(order) - 1, 1 / mp.mpf(sigma), exact_c(1.0, 0.25)

    def total(x):
        return exact_profile(x, 2 * s) + 2 * exact_profile(x, s)

    def divergence(x):
        if x >= c:
            return total(x - c)
        return total(0) + (1 - total(0)) * (mp.exp(c) - mp.exp(x)) / (mp.exp(c) + 1)

    integral = mp.quad(
        lambda x: (mp.exp(k * x) + mp.exp(-(k + 1) * x)) * divergence(x),
        [0, c, c + s, c + 4 * s, c + 12 * s, c + 40 * s],
    )
    exact = mp.log(1 + k * (k + 1) * integral) / k
    ours = objpert_rdp_dominating(order, sigma, 1.0, 1.0, 0.25, "replace_one")
    assert exact * (1 - mp.mpf("1e-14")) <= ours <= exact * (1 + mp.mpf("1e-9"))


@functools.cache
def bend(s, c):
    return dominating(mp.mpf(s), mp.mpf(c))


def hull(epsilon, s, c):
    """Divergence of the dominating pair, larger to smaller data set."""
    atom, z = bend(s, c)
    if epsilon >= c + float(z) * s:
        return gaussian_delta(s, epsilon - c)
    slope = float(mp.ncdf(-mp.mpf(s) / 2) - atom)
    return gaussian_delta(s, 0.0) - slope * math.expm1(epsilon)


def test_the_dominating_pair_has_mass_one_and_the_profile_of_the_theorem():
    for s, c in ((0.2, 0.25), (1.5, 0.1), (0.01, 1.0)):
        s, c = mp.mpf(s), mp.mpf(c)
        atom, z = dominating(s, c)
        assert abs(mp.ncdf(-s / 2) + atom + mp.ncdf(s / 2 - z) - 1) < mp.mpf("1e-30")
        other = mp.ncdf(s / 2) + atom + mp.exp(-c) * mp.ncdf(-s / 2 - z)  # the mass of Q
        assert abs(other - 1) < mp.mpf("1e-30")
        at_bend = hull(float(c + z * s) * (1 - 1e-12), float(s), float(c))
        assert at_bend == pytest.approx(gaussian_delta(float(s), float(z * s)), rel=1e-8)


# Consistency.

regs = st.floats(-2.0, 3.0).map(lambda x: 10**x)
noises = st.floats(-0.5, 3.0).map(lambda x: 10**x)
epsilons = st.floats(-2.0, 1.5).map(lambda x: 10**x)


@given(epsilons, noises, regs)
def test_the_bounds_agree_where_they_must(epsilon, sigma, reg):
    c = op.log_det(reg, 0.25)
    folded = objpert_delta(epsilon, sigma, reg, 1.0, 0.25)
    assert objpert_delta_general(epsilon, sigma, c, 1.0, 1) == folded
    keeps_sign = objpert_delta_monotone(epsilon, sigma, reg, 1.0, 0.25)
    if epsilon >= c:
        assert keeps_sign <= folded * (1 + 1e-9) + 1e-13
    else:
        assert keeps_sign == 1.0
    assert keeps_sign <= objpert_delta_monotone(epsilon, sigma, reg, 1.0, 0.25, "replace_one")
    assert keeps_sign == objpert_delta_monotone(epsilon, sigma, reg, 1.0, 0.25, "zero_out")
    assert objpert_delta_monotone(epsilon, sigma * 1.1, reg, 1.0, 0.25) <= keeps_sign
    assert objpert_delta_monotone(epsilon * 1.1, sigma, reg, 1.0, 0.25) <= keeps_sign


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("epsilon", "sigma"), [(0.5, 3.0), (1.0, 5.0), (2.0, 0.8), (0.3, 60.0)])
def test_without_output_noise_amp_is_objective_perturbation(epsilon, sigma, adjacency):
    arguments = (epsilon, sigma, 2.0, 1.0, 0.25)
    exact = objpert_delta_monotone(*arguments, adjacency)
    assert amp_delta_monotone(*arguments, 0.0, adjacency) == exact
    deltas = [amp_delta_monotone(*arguments, mu, adjacency) for mu in (1e-5, 1e-3, 0.05)]
    assert deltas == sorted(deltas)
    assert deltas[0] == pytest.approx(exact, rel=2e-3 if exact > 1e-30 else 1.0)
    assert deltas[0] >= exact * (1 - 1e-9)
    assert amp_delta(*arguments, 1e-5) == pytest.approx(
        objpert_delta(*arguments), rel=2e-3, abs=1e-30
    )


@pytest.mark.cases(6, 3)
@pytest.mark.parametrize("mu_out", [0.01, 0.3])
@pytest.mark.parametrize(
    ("epsilon", "sigma"), [(0.05, 100.0), (1.0, 5.35), (1.0, 0.7), (4.0, 1.2), (20.0, 0.4)]
)
def test_amp_lies_between_its_closed_forms(epsilon, sigma, mu_out):
    """docs/proofs/objective.md#integrals: known without quadrature where epsilon - c is many times mu_out."""
    reg, s = op.objpert_reg(epsilon, 0.25), math.nextafter(1 / sigma, math.inf)
    left = epsilon - op.log_det(reg, 0.25)
    least = profile(left, math.hypot(s, mu_out))
    most = least + float(mp.ncdf(-s / 2)) * profile(left, mu_out)
    keeps_sign = amp_delta_monotone(epsilon, sigma, reg, 1.0, 0.25, mu_out)
    assert least < keeps_sign <= most * (1 + 2e-9)
    if mu_out < 0.1 * left:
        assert most <= least * (1 + 1e-9) < keeps_sign * (1 + 1e-10)
    assert amp_delta(epsilon, sigma, reg, 1.0, 0.25, mu_out) <= 2 * least * (1 + 2e-9)


def test_the_general_quadrature_meets_the_closed_form_of_one_dimension():
    for epsilon, sigma in ((0.5, 3.0), (1.0, 0.4), (0.1, 0.3), (2.0, 9.0)):
        closed = objpert_delta(epsilon, sigma, 2.0, 1.0, 0.25)
        quadrature = amp_delta_general(epsilon, sigma, op.log_det(2.0, 0.25), 1.0, 1, 1e-7)
        assert quadrature == pytest.approx(closed, rel=1e-5)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("delta", [0.1, 1e-6, 1e-30])
@pytest.mark.parametrize("epsilon", [0.05, 1.0, 20.0])
def test_the_noise_meets_its_delta_and_hardly_less_does_not(epsilon, delta):
    reg = op.objpert_reg(epsilon, 0.25)
    c = op.log_det(reg, 0.25)
    cases = [
        (
            objpert_sigma(epsilon, delta, reg, 1.0, 0.25),
            lambda s: objpert_delta(epsilon, s, reg, 1.0, 0.25),
        ),
        (
            objpert_sigma_monotone(epsilon, delta, reg, 1.0, 0.25, "replace_one"),
            lambda s: objpert_delta_monotone(epsilon, s, reg, 1.0, 0.25, "replace_one"),
        ),
        (
            objpert_sigma_monotone(epsilon, delta, reg, 1.0, 0.25),
            lambda s: objpert_delta_monotone(epsilon, s, reg, 1.0, 0.25),
        ),
        (
            objpert_sigma_general(epsilon, delta, c, 2.0, 3),
            lambda s: objpert_delta_general(epsilon, s, c, 2.0, 3),
        ),
    ]
    for sigma, delta_of in cases:
        assert delta_of(sigma) <= delta < delta_of(sigma * (1 - 1e-6))
    mu_out = 0.01 * epsilon
    sigma = amp_sigma_monotone(epsilon, delta, reg, 1.0, 0.25, mu_out)
    assert amp_delta_monotone(epsilon, sigma, reg, 1.0, 0.25, mu_out) <= delta


def test_the_default_reg_spends_a_quarter_of_epsilon_on_the_determinant():
    for epsilon in (1e-3, 1.0, 10.0, 4000.0):
        c = op.log_det(op.objpert_reg(epsilon, 0.25), 0.25)
        assert c <= epsilon / 4 * (1 + 1e-12)
        assert c == pytest.approx(min(epsilon / 4, 700.0), rel=1e-9)


def test_the_output_noise_covers_both_approximate_minimizers():
    """|theta~ - theta| <= tau / lam on each side, so that the two centers differ by up to 2 tau / lam."""
    std = op.amp_noise_std(tolerance=1e-4, reg=0.5, mu_out=0.02)
    assert 2 * 1e-4 / 0.5 / std <= 0.02
    assert 2 * 1e-4 / 0.5 / std == pytest.approx(0.02)


# Exact densities in one dimension.


class Line:
    """theta in R, losses phi(y x theta) with phi' in [-1, 0] and phi'' <= 1 / (4 width) (logistic of scale `width`)."""

    def __init__(self, reg, sigma, width=1.0, sign_changes=False):
        self.reg, self.sigma, self.width, self.sign_changes = reg, sigma, width, sign_changes

    def slopes(self, records, theta):
        value, curve = np.zeros_like(theta), np.zeros_like(theta)
        for scale, offset in records:
            m = (theta * scale - offset) / self.width
            p = 0.5 * (1 + np.tanh(m / 2))
            # logistic: derivative p - 1 in (-1, 0); Huber-like: 2 p - 1 in (-1, 1)
            value += scale * ((2 * p - 1) if self.sign_changes else (p - 1))
            curve += scale**2 * p * (1 - p) / self.width * (2 if self.sign_changes else 1)
        return value, curve

    def smoothness(self):
        return (0.5 if self.sign_changes else 0.25) / self.width

    def log_density(self, records, theta):
        value, curve = self.slopes(records, theta)
        b = -(value + self.reg * theta)
        return (
            -(b**2) / (2 * self.sigma**2)
            - math.log(self.sigma * math.sqrt(2 * math.pi))
            + np.log(curve + self.reg)
        )

    def grid(self, records):
        reach = (9 * self.sigma + len(records) + 1) / self.reg
        return np.linspace(-reach, reach, 20001)


def divergences(log_p, log_q, weight, epsilon):
    """Hockey-stick divergences of both directions."""
    ahead = np.maximum(np.exp(log_p) - math.exp(epsilon) * np.exp(log_q), 0.0).sum() * weight
    back = np.maximum(np.exp(log_q) - math.exp(epsilon) * np.exp(log_p), 0.0).sum() * weight
    return float(ahead), float(back)


def line_cases(seed, count):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        reg, sigma = 10 ** rng.uniform(-0.7, 1.0), 10 ** rng.uniform(-0.3, 0.8)
        width = 10 ** rng.uniform(-0.5, 0.5)
        records = [
            (rng.choice([-1.0, 1.0]), rng.uniform(-4, 4)) for _ in range(rng.integers(0, 4))
        ]
        yield reg, sigma, width, records, (rng.choice([-1.0, 1.0]), rng.uniform(-30, 6)), rng


@pytest.mark.slow
def test_no_added_record_of_a_line_passes_the_bound_and_some_attain_it():
    attained = 0.0
    for reg, sigma, width, records, extra, _ in line_cases(0, 40):
        line = Line(reg, sigma, width)
        theta = line.grid(records)
        weight = theta[1] - theta[0]
        log_p, log_q = (
            line.log_density([*records, extra], theta),
            line.log_density(records, theta),
        )
        assert np.exp(log_p).sum() * weight == pytest.approx(1.0, abs=1e-6)
        beta, s = line.smoothness(), 1 / sigma
        c = op.log_det(reg, beta)
        for epsilon in (0.0, c / 2, c, 1.3 * c + 0.1, c + 0.5, c + 1.5):
            ahead, back = divergences(log_p, log_q, weight, epsilon)
            assert ahead <= hull(epsilon, s, c) + 1e-6
            assert back <= gaussian_delta(s, epsilon) + 1e-6
            bound = objpert_delta_monotone(epsilon, sigma, reg, 1.0, beta)
            assert max(ahead, back) <= bound + 1e-6
            attained = max(attained, ahead / bound if bound > 1e-3 and epsilon > c else 0.0)
            assert max(ahead, back) <= objpert_delta(epsilon, sigma, reg, 1.0, beta) + 1e-6
    assert attained > 0.6


def test_no_renyi_divergence_of_a_line_passes_the_dominating_curve():
    for reg, sigma, width, records, extra, _ in line_cases(1, 25):
        line = Line(reg, sigma, width)
        theta = line.grid(records)
        weight = theta[1] - theta[0]
        log_p, log_q = (
            line.log_density([*records, extra], theta),
            line.log_density(records, theta),
        )
        for order in (1.2, 2.0, 6.0):
            bound = objpert_rdp_dominating(order, sigma, reg, 1.0, line.smoothness())
            for one, other in ((log_p, log_q), (log_q, log_p)):
                moment = np.exp(order * one + (1 - order) * other)
                assert math.log(moment.sum() * weight) / (order - 1) <= bound + 1e-5


def test_a_record_at_the_end_of_its_slope_attains_the_monotone_theorem_without_determinant():
    """phi' = -1 over all theta that matter, and phi'' = 0 there: a shift of b by 1, the Gaussian mechanism itself."""
    line = Line(reg=1.0, sigma=2.0, width=0.25)
    theta = line.grid([])
    weight = theta[1] - theta[0]
    log_p, log_q = line.log_density([(1.0, 40.0)], theta), line.log_density([], theta)
    for epsilon in (0.1, 0.5, 1.0):
        assert divergences(log_p, log_q, weight, epsilon)[0] == pytest.approx(
            gaussian_delta(0.5, epsilon), rel=1e-4
        )


def test_the_determinant_is_needed():
    """A curved loss and almost no slope: the divergence is above the Gaussian profile without c."""
    line = Line(reg=0.5, sigma=3.0, width=0.05)
    theta = line.grid([])
    weight = theta[1] - theta[0]
    log_p, log_q = line.log_density([(1.0, 0.0)], theta), line.log_density([], theta)
    s, c = 1 / 3.0, op.log_det(0.5, line.smoothness())
    ahead, back = divergences(log_p, log_q, weight, 1.0)
    assert back <= gaussian_delta(s, 1.0) + 1e-9 < 0.1 * ahead
    assert ahead <= hull(1.0, s, c) + 1e-9


def test_no_replaced_record_of_a_line_passes_the_bound():
    for reg, sigma, width, records, first, rng in line_cases(2, 25):
        line = Line(reg, sigma, width)
        second = (rng.choice([-1.0, 1.0]), rng.uniform(-30, 6))
        theta = line.grid([*records, first])
        weight = theta[1] - theta[0]
        log_p = line.log_density([*records, first], theta)
        log_q = line.log_density([*records, second], theta)
        c = op.log_det(reg, line.smoothness())
        for epsilon in (c, c + 0.3, c + 1.5):
            bound = objpert_delta_monotone(
                epsilon, sigma, reg, 1.0, line.smoothness(), "replace_one"
            )
            general = objpert_delta_general(epsilon, sigma, c, 2.0, 2)
            assert max(divergences(log_p, log_q, weight, epsilon)) <= min(bound, general) + 1e-6
        for order in (1.3, 4.0):
            curve = objpert_rdp_dominating(
                order, sigma, reg, 1.0, line.smoothness(), "replace_one"
            )
            for one, other in ((log_p, log_q), (log_q, log_p)):
                moment = np.exp(order * one + (1 - order) * other)
                assert math.log(moment.sum() * weight) / (order - 1) <= curve + 1e-5


def test_no_loss_with_changing_sign_passes_the_general_bound():
    beyond_monotone = 0
    for reg, sigma, width, records, extra, _ in line_cases(3, 25):
        line = Line(reg, sigma, width, sign_changes=True)
        theta = line.grid(records)
        weight = theta[1] - theta[0]
        extra = (extra[0], extra[1] / 10)
        log_p, log_q = (
            line.log_density([*records, extra], theta),
            line.log_density(records, theta),
        )
        c = op.log_det(reg, line.smoothness())
        for epsilon in (c, c + 0.3, c + 1.5):
            worst = max(divergences(log_p, log_q, weight, epsilon))
            assert worst <= objpert_delta(epsilon, sigma, reg, 1.0, line.smoothness()) + 1e-6
            beyond_monotone += worst > gaussian_delta(1 / sigma, epsilon)
    assert beyond_monotone > 0  # the data are not harmless


def test_an_adversarial_solver_within_its_tolerance_stays_below_the_amp_bound():
    """theta~ = theta +- tau / lam, the sign chosen by the data set; then noise, by convolution on the grid."""
    reg, sigma, mu_out = 1.0, 2.0, 0.4
    line = Line(reg, sigma, width=0.5)
    theta = line.grid([(1.0, 0.0)])
    weight = theta[1] - theta[0]
    shift = 250  # grid points: tau / lam
    std = 2 * shift * weight / mu_out
    kernel = np.exp(-((np.arange(-10000, 10001) * weight) ** 2) / (2 * std**2))
    kernel /= kernel.sum()
    transform = np.fft.rfft(kernel, 40001)
    for offset in (0.0, 40.0):
        pair = []
        for records, move in (([(1.0, offset)], shift), ([], -shift)):
            density = np.roll(np.exp(line.log_density(records, theta)), -move)
            pair.append(np.fft.irfft(np.fft.rfft(density, 40001) * transform, 40001))
        logs = [np.log(np.maximum(density, 1e-300)) for density in pair]
        for epsilon in (0.6, 1.0):
            bound = amp_delta_monotone(epsilon, sigma, reg, 1.0, line.smoothness(), mu_out)
            assert max(divergences(*logs, weight, epsilon)) <= bound + 1e-6


# Exact densities in two dimensions.


def plane_log_density(records, reg, sigma, width, first, second):
    """Log density of theta on a grid: logistic losses phi(theta.x) of scale `width` with |x| <= 1."""
    gradient = [reg * first, reg * second]
    hessian = [np.full_like(first, reg), np.zeros_like(first), np.full_like(first, reg)]
    for (a, b), offset in records:
        p = 0.5 * (1 + np.tanh((a * first + b * second - offset) / (2 * width)))
        curve = p * (1 - p) / width
        gradient = [gradient[0] + (p - 1) * a, gradient[1] + (p - 1) * b]
        hessian = [
            hessian[0] + curve * a * a,
            hessian[1] + curve * a * b,
            hessian[2] + curve * b * b,
        ]
    square = gradient[0] ** 2 + gradient[1] ** 2
    determinant = hessian[0] * hessian[2] - hessian[1] ** 2
    return -square / (2 * sigma**2) - math.log(2 * math.pi * sigma**2) + np.log(determinant)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("replaced", [False, True])
def test_no_records_of_a_plane_pass_the_bounds(replaced):
    rng = np.random.default_rng(4)
    for _ in range(10):
        reg, sigma, width = (
            10 ** rng.uniform(-0.2, 0.5),
            10 ** rng.uniform(0.0, 0.5),
            10 ** rng.uniform(-0.5, 0.3),
        )
        angles = rng.uniform(0, 2 * math.pi, 4)
        directions = [(math.cos(angle), math.sin(angle)) for angle in angles]
        records = [(direction, rng.uniform(-3, 3)) for direction in directions[:2]]
        new = (directions[2], rng.uniform(-10, 4))
        old = [(directions[3], rng.uniform(-10, 4))] if replaced else []
        axis = np.linspace(-(7 * sigma + 3) / reg, (7 * sigma + 3) / reg, 601)
        weight = (axis[1] - axis[0]) ** 2
        first, second = np.meshgrid(axis, axis)
        log_p = plane_log_density([*records, new], reg, sigma, width, first, second)
        log_q = plane_log_density([*records, *old], reg, sigma, width, first, second)
        assert np.exp(log_p).sum() * weight == pytest.approx(1.0, abs=1e-4)
        beta = 0.25 / width
        c = op.log_det(reg, beta)
        for epsilon in (c, c + 0.4, c + 1.2):
            ahead, back = divergences(log_p, log_q, weight, epsilon)
            if replaced:
                bound = objpert_delta_monotone(epsilon, sigma, reg, 1.0, beta, "replace_one")
                assert (
                    max(ahead, back)
                    <= min(bound, objpert_delta_general(epsilon, sigma, c, 2.0, 2)) + 2e-4
                )
            else:
                assert ahead <= objpert_delta_monotone(epsilon, sigma, reg, 1.0, beta) + 2e-4
                assert back <= gaussian_delta(1 / sigma, epsilon) + 2e-4


# The pure mechanism, softmax, refusals.


def test_the_pure_mechanism_spends_epsilon_and_no_more():
    attained = 0.0
    for reg, _, width, records, extra, _ in line_cases(5, 30):
        line = Line(reg, 1.0, width)
        c = op.log_det(reg, line.smoothness())
        epsilon = c + 0.7
        rate = op.objpert_pure_rate(epsilon, reg, 1.0, line.smoothness())
        theta = np.linspace(-60.0, 60.0, 20001)
        logs = []
        for data in (records, [*records, extra]):
            value, curve = line.slopes(data, theta)
            logs.append(-rate * np.abs(value + reg * theta) + np.log(curve + reg))
        loss = float(np.max(np.abs(logs[0] - logs[1])))
        assert loss <= epsilon * (1 + 1e-12)
        attained = max(attained, loss / epsilon)
    assert attained > 0.8
    assert op.objpert_pure_rate(1.0, 1.0, 1.0, 0.25, "replace_one") == pytest.approx(
        0.5 * 0.776856449, rel=1e-8
    )


@settings(max_examples=30)
@given(st.integers(2, 6), st.floats(0.05, 20.0), st.integers(0, 10**6))
def test_no_softmax_record_changes_the_determinant_further(num_classes, reg, seed):
    rng = np.random.default_rng(seed)
    dim, bound = 3, 1.3
    hessian = reg * np.eye(num_classes * dim)
    for _ in range(rng.integers(0, 3)):
        hessian += softmax_hessian(rng, num_classes, dim, bound)
    with_record = hessian + softmax_hessian(rng, num_classes, dim, bound)
    change = np.linalg.slogdet(with_record)[1] - np.linalg.slogdet(hessian)[1]
    assert change <= op.softmax_log_det(bound, reg, num_classes) + 1e-12


def softmax_hessian(rng, num_classes, dim, bound):
    weights = rng.dirichlet(np.full(num_classes, 10 ** rng.uniform(-1, 3)))
    x = rng.normal(size=dim)
    x *= bound / np.linalg.norm(x)
    return np.kron(np.diag(weights) - np.outer(weights, weights), np.outer(x, x))


def test_two_classes_of_equal_weight_attain_the_softmax_bound():
    x = np.array([1.3, 0.0])
    record = np.kron(np.array([[0.25, -0.25], [-0.25, 0.25]]), np.outer(x, x))
    change = np.linalg.slogdet(2.0 * np.eye(4) + record)[1] - 4 * math.log(2.0)
    assert change == pytest.approx(op.softmax_log_det(1.3, 2.0, 2), rel=1e-12)


@pytest.mark.slow
def test_a_determinant_that_uses_epsilon_up_is_refused_with_the_smallest_reg():
    least = 0.25 / math.expm1(0.1)
    for call in (
        lambda reg: objpert_sigma(0.1, 1e-6, reg, 1.0, 0.25),
        lambda reg: objpert_sigma_monotone(0.1, 1e-6, reg, 1.0, 0.25),
        lambda reg: op.spare_epsilon(0.1, reg, 0.25),
        lambda reg: op.objpert_pure_rate(0.1, reg, 1.0, 0.25),
    ):
        with pytest.raises(InfeasibleError, match=rf"reg must be > {least:g}"):
            call(0.999 * least)
        assert call(2 * least) > 0
    with pytest.raises(InfeasibleError, match="log_det"):
        op.amp_sigma(0.1, 1e-6, Change(0.1, 1.0, 2), 1e-3)
    with pytest.raises(InfeasibleError, match="mu_out"):
        amp_sigma_monotone(0.1, 1e-6, 100.0, 1.0, 0.25, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: objpert_delta(-0.1, 1.0, 1.0, 1.0, 0.25), "epsilon must be >= 0"),
        (lambda: objpert_delta(math.nan, 1.0, 1.0, 1.0, 0.25), "epsilon must be >= 0"),
        (lambda: objpert_delta(1.0, 0.0, 1.0, 1.0, 0.25), "noise_std must be > 0"),
        (
            lambda: objpert_delta_monotone(1.0, 1.0, 1.0, 1.0, 0.25, "remove"),
            "adjacency must be one of",
        ),
        (lambda: objpert_delta_general(1.0, 1.0, -0.1, 1.0, 2), "log_det must be >= 0"),
        (
            lambda: objpert_delta_general(1.0, 1.0, 0.1, 1.0, 0),
            "subspace_dim must be an integer >= 1",
        ),
        (lambda: amp_delta(1.0, 1.0, 1.0, 1.0, 0.25, -1.0), "mu_out must be >= 0"),
        (lambda: objpert_sigma(1.0, 0.0, 1.0, 1.0, 0.25), "delta must be in"),
        (lambda: objpert_sigma_monotone(1.0, 1.0, 1.0, 1.0, 0.25), "delta must be in"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_determinant_without_weight_leaves_the_gaussian_mechanism():
    """beta = 0: linear losses, where the whole mechanism is Gaussian noise on the sum of gradients."""
    for order in (1.5, 20.0):
        assert objpert_rdp_dominating(order, 3.0, 1.0, 1.0, 0.0) == pytest.approx(
            order / 18, rel=1e-10
        )
    assert objpert_delta_monotone(0.5, 3.0, 1.0, 1.0, 0.0) == pytest.approx(
        gaussian_delta(1 / 3, 0.5), rel=1e-9
    )
