"""Constants of AdaSSP: the joint release uses the budget up, the published noise is checked."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.papers.output import adassp_constants_paper
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_mu
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.least_squares import adassp_constants

epsilons = st.floats(-1.5, 1.3).map(lambda x: 10**x)
deltas = st.floats(-12.0, -2.0).map(lambda x: 10**x)
SENSITIVITIES = {
    "add_remove": (1.0, 1.0, 1.0),
    "zero_out": (1.0, 1.0, 1.0),
    "replace_one": (1.0, math.sqrt(2), 2.0),
}


@pytest.mark.slow
@given(epsilons, deltas, st.floats(0.01, 0.98), st.sampled_from(sorted(SENSITIVITIES)))
def test_the_three_levels_add_up_to_the_budget(epsilon, delta, share, adjacency):
    weights = (share / 2, share / 2, 1 - share)
    bound_x, bound_y = 1.7, 0.6
    noise = adassp_constants(epsilon, delta, bound_x, bound_y, 5, 0.05, weights, adjacency)
    lmin, xtx, xty = SENSITIVITIES[adjacency]
    square = (lmin * bound_x**2 / noise.std_lmin) ** 2 + (
        xtx * bound_x**2 / noise.std_xtx_diag
    ) ** 2
    mu = math.sqrt(square + (xty * bound_x * bound_y / noise.std_xty) ** 2)
    assert mu <= gaussian_mu(epsilon, delta) * (1 + 1e-15)
    assert mu == pytest.approx(gaussian_mu(epsilon, delta), rel=1e-12)
    assert gaussian_delta(mu, epsilon) <= delta


def test_the_noise_matrix_is_isotropic_in_the_frobenius_norm():
    """N(0, s^2) on the diagonal and N(0, s^2/2) off it: <E, M> has the variance s^2 |M|_F^2 for every symmetric M."""
    noise = adassp_constants(1.0, 1e-6, 1.0, 1.0, 3)
    rng = np.random.default_rng(0)
    for _ in range(5):
        matrix = rng.normal(size=(3, 3))
        matrix = matrix + matrix.T
        off = np.triu(matrix, 1)
        variance = noise.std_xtx_diag**2 * np.sum(np.diag(matrix) ** 2)
        variance += noise.std_xtx_offdiag**2 * np.sum((2 * off) ** 2)
        assert variance == pytest.approx(noise.std_xtx_diag**2 * np.sum(matrix**2), rel=1e-12)


def test_no_replaced_record_changes_the_statistics_further():
    rng = np.random.default_rng(1)
    for _ in range(200):
        x, z, rest = rng.normal(size=4), rng.normal(size=4), rng.normal(size=(6, 4))
        x, z = x / np.linalg.norm(x), z / np.linalg.norm(z)
        y, target = rng.choice([-1.0, 1.0], 2)
        first, second = rest.T @ rest + np.outer(x, x), rest.T @ rest + np.outer(z, z)
        assert np.linalg.norm(first - second) <= math.sqrt(2) + 1e-12
        assert np.linalg.norm(x * y - z * target) <= 2 + 1e-12
        assert abs(np.linalg.eigvalsh(first)[0] - np.linalg.eigvalsh(second)[0]) <= 1 + 1e-12


def test_the_cap_bounds_the_noise_matrix_but_for_the_failure():
    """False alarms: 400 draws at a failure of 0.2 pass 0.2 by 5 standard deviations with probability below 1e-6."""
    rng, dim, failure = np.random.default_rng(2), 12, 0.2
    noise = adassp_constants(1.0, 1e-6, 1.0, 1.0, dim, failure)
    above = shifted = 0
    for _ in range(400):
        upper = np.triu(rng.normal(size=(dim, dim)) * noise.std_xtx_offdiag, 1)
        matrix = upper + upper.T + np.diag(rng.normal(size=dim) * noise.std_xtx_diag)
        above += np.abs(np.linalg.eigvalsh(matrix)).max() > noise.lam_cap
        shifted += abs(rng.normal() * noise.std_lmin) > noise.lmin_shift
    assert above <= 400 * (failure + 5 * math.sqrt(failure / 400))
    assert shifted <= 400 * (failure + 5 * math.sqrt(failure / 400))


@given(epsilons, deltas)
def test_the_published_noise_is_checked(epsilon, delta):
    """Either the joint release of all three is (epsilon, delta)-DP, or the call raises."""
    try:
        noise = adassp_constants_paper(epsilon, delta, 1.0, 2.0, 4)
    except ConditionError:
        mu = math.sqrt(3) * epsilon / 3 / math.sqrt(math.log(6 / delta))
        assert gaussian_delta(mu * (1 + 1e-9), epsilon) > delta
    else:
        mu = math.sqrt(
            (1 / noise.std_lmin) ** 2 + (1 / noise.std_xtx) ** 2 + (2 / noise.std_xty) ** 2
        )
        assert gaussian_delta(mu, epsilon) <= delta


def test_the_published_noise_is_refused_where_it_falls_short():
    with pytest.raises(ConditionError, match="published noise is not"):
        adassp_constants_paper(60.0, 1e-6, 1.0, 1.0, 4)


def test_one_published_step_alone_is_not_private_at_a_third_of_the_budget():
    noise = adassp_constants_paper(3.0, 1e-6, 1.0, 1.0, 4)
    assert gaussian_delta(1 / noise.std_lmin, 1.0) == pytest.approx(3.7e-6, rel=0.02)


def test_the_tight_noise_on_the_data_is_smaller_than_the_published():
    for epsilon in (0.1, 1.0, 5.0):
        tight, paper = (
            build(epsilon, 1e-6, 1.0, 1.0, 10)
            for build in (adassp_constants, adassp_constants_paper)
        )
        assert tight.std_xtx_diag < paper.std_xtx
        assert tight.std_xty < paper.std_xty
        assert tight.lam_cap < paper.lam_cap


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: adassp_constants(-1.0, 1e-6, 1.0, 1.0, 2), "epsilon must be >= 0"),
        (lambda: adassp_constants(1.0, 0.0, 1.0, 1.0, 2), "delta must be in"),
        (lambda: adassp_constants(1.0, 1.0, 1.0, 1.0, 2), "delta must be in"),
        (lambda: adassp_constants(1.0, 1e-6, 1.0, 1.0, 2, 0.0), "failure must be in"),
        (
            lambda: adassp_constants(1.0, 1e-6, 1.0, 1.0, 2, adjacency="swap"),
            "adjacency must be one of",
        ),
        (lambda: adassp_constants_paper(0.0, 1e-6, 1.0, 1.0, 2), "epsilon must be > 0"),
        (lambda: adassp_constants_paper(1.0, 0.0, 1.0, 1.0, 2), "delta must be in"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
