"""Claims of the paper, or of its usual reading, that fail: rows of docs/errata.md about the numbers of plans."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.reference.papers.accounting import zcdp_epsilon_bs16
from tests.reference.papers.heavy_tailed import (
    clip_bias_bound,
    localized_schedule_ballfree,
    localized_schedule_minibatch,
    localized_schedule_paper,
    reduction_schedule,
    reduction_sizes,
    vector_parameters_paper,
)
from torch_dpsco.accounting.analysis.gaussian import gaussian_epsilon
from torch_dpsco.accounting.analysis.rdp import zcdp_epsilon
from torch_dpsco.algorithms.heavy_tailed_numbers import clip_bias, mean_noise_std
from torch_dpsco.algorithms.localized_numbers import (
    sc_reduction_sizes_full,
)
from torch_dpsco.shuffle_model import VECTORS, shuffle_parameters

LAW = {
    "dim": 10,
    "rho": 0.5,
    "moment_order": 2.0,
    "second_moment": 1.0,
    "moment_2k": 1.5,
    "max_steps": None,
}


def records_of(schedule):
    """Returns how many records the phases use."""
    return getattr(schedule, "records", sum(phase.n for phase in schedule.phases))


def test_the_papers_epsilon_is_four_to_five_times_too_small_for_an_epsilon():
    rho, delta = 0.5, 1e-5  # "epsilon" = sqrt(2 rho) = 1
    assert zcdp_epsilon_bs16(rho, delta) == pytest.approx(5.30, abs=0.01)
    assert zcdp_epsilon(rho, delta) == pytest.approx(4.73, abs=0.01)
    assert gaussian_epsilon(1.0, delta) == pytest.approx(4.377, abs=0.001)


@pytest.mark.parametrize("k", [2.0, 3.0, 10.0, 1000.0])
def test_the_published_bias_is_valid_and_up_to_four_times_too_large(k):
    ratio = clip_bias_bound(1.0, k, 2.0, mode="paper") / clip_bias(1.0, k, 2.0)
    assert ratio == pytest.approx((k / (k - 1)) ** k, rel=1e-9)
    assert math.e <= ratio <= 4 * (1 + 1e-12)


def test_removing_a_record_shifts_every_batch_that_is_cut_by_position():
    """Parallel composition is a statement about replaced records: a removal changes all batches, not one."""
    records = np.random.default_rng(0).permutation(1000)

    def batches(order):
        return [
            set(part.tolist()) for part in np.array_split(order[: len(order) // 10 * 10], 10)
        ]

    shorter = records[1:]
    changed = sum(a != b for a, b in zip(batches(records), batches(shorter), strict=True))
    assert changed == 10
    other = records.copy()
    other[0] = 1000  # a record that was not there before
    assert sum(a != b for a, b in zip(batches(records), batches(other), strict=True)) == 1


def test_the_papers_ball_is_twice_the_one_that_its_event_needs():
    """|what - c| <= Lhat/lambda by strong convexity; the published radius has a factor of 2 before the same Lhat."""
    n, k = 4096, 2.0
    ell = 12
    lipschitz = 1.5 * (ell * math.sqrt(n)) ** (1 / (2 * k))
    for phase in localized_schedule_paper(
        n=n, dim=3, paper_epsilon=1.0, moment_order=k, moment_2k=1.5, lr=0.1
    ):
        assert phase.radius * phase.reg == pytest.approx(2 * lipschitz)


def test_a_failure_term_of_the_diameter_would_undo_the_reduction():
    """With balls the tail (ell + 1) rt_1 D/sqrt(n) holds the diameter of W, at any distance to the minimizer."""
    n, mu, D = 10**8, 0.5, 2.0
    law = LAW | {"moment_order": 4.0}
    proved = reduction_schedule(n=n, strong_convexity=mu, diameter=D, **law)
    last = sc_reduction_sizes_full(n)[-1]
    failure = (last.bit_length()) * 1.0 * D / math.sqrt(last)
    assert failure > 10 * proved.risk_bound
    near, far = (
        localized_schedule_ballfree(n=last, diameter=x, **law).risk_bound for x in (0.01, 1.0)
    )
    assert far == pytest.approx(
        100 * near, rel=1e-9
    )  # the ball-free bound is proportional to the distance


def test_published_parts_of_the_reduction_leave_records_unused():
    n = 17 * 2**16
    assert sum(reduction_sizes(n)) < 0.85 * n
    assert sum(sc_reduction_sizes_full(n)) > n - 6


def test_data_sets_that_are_no_power_of_two_lose_fewer_records_than_rounding_down_would():
    n = 2**13 - 1
    assert records_of(localized_schedule_ballfree(n=n, diameter=1.0, **LAW)) > n - 14
    assert n - 2**12 > 0.49 * n  # what rounding down to a power of 2 would drop


def test_cyclic_minibatches_without_amplification_need_more_noise_by_the_inverse_share_of_a_batch():
    """T b/m uses of each record in batches of b: sigma^2 grows by m/b over full passes."""
    m, b, T, rho = 1000, 50, 400, 0.5
    full = mean_noise_std(1.0, m, rho, T)
    cyclic = mean_noise_std(1.0, b, rho, T * b // m)
    assert (cyclic / full) ** 2 == pytest.approx(m / b, rel=1e-12)


def test_amplified_minibatches_keep_the_bound_at_a_fraction_of_the_work():
    """z = 1 from a batch of m sqrt(2 rho/T) on: the noise on the mean is that of full passes."""
    law = {
        "n": 2**12,
        "dim": 50,
        "moment_order": 2.0,
        "second_moment": 1.0,
        "moment_2k": 1.5,
        "diameter": 2.0,
    }
    full = localized_schedule_ballfree(**law, rho=0.5, max_steps=None)
    batches = [
        max(1, math.ceil(phase.n * math.sqrt(1.0 / phase.steps))) for phase in full.phases
    ]
    found = localized_schedule_minibatch(
        **law,
        batch_sizes=batches,
        steps=[phase.steps for phase in full.phases],
        noise_multipliers=[2.0] * len(full.phases),
    )
    assert found.bound <= 1.5 * full.bound
    work = sum(b * phase.steps for b, phase in zip(batches, full.phases, strict=True))
    assert work < 0.02 * sum(phase.n * phase.steps for phase in full.phases)


def test_the_closed_form_of_shuffled_vectors_asks_for_a_million_times_the_noise():
    published = vector_parameters_paper(n=1000, dim=10, epsilon=1.0, delta=1e-5)
    assert (
        published.noise_bits
        > 5e5
        * shuffle_parameters(
            VECTORS, n=1000, dim=10, epsilon=1.0, delta=1e-5, grid=64
        ).noise_bits
    )
