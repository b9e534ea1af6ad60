"""Shuffled sums: bits and counts have one law, sums are unbiased, and sized protocols keep their exact delta."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from tests.reference.papers import heavy_tailed as papers
from tests.reference.papers.accounting import zcdp_rho
from tests.reference.papers.heavy_tailed import (
    analyze_scalar_sum,
    randomize_scalar,
    scalar_sum,
    scalar_sum_variance,
    vector_parameters_paper,
    vector_sum,
)
from tests.shuffle_model.exact_shuffle import delta_bounds
from torch_dpsco.accounting.analysis.rdp import zcdp_epsilon
from torch_dpsco.errors import ConditionError, InfeasibleError
from torch_dpsco.shuffle_model import (
    COORDINATES,
    VECTORS,
    ShuffledClipped,
    ShuffleParameters,
    shuffle_cost,
    shuffle_parameters,
)
from torch_dpsco.shuffle_model import numbers as shuffle_sizing
from torch_dpsco.shuffle_model import oracles as shuffle_noise
from torch_dpsco.shuffle_model.oracles import (
    binomial_noise,
    binomial_table,
    centered_sum,
    grid_values,
    round_randomly,
)

RUNS = 100_000
ALARM = 1e-9  # chance that a true law fails a test


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def exact_law(values, upper, parameters):
    """Returns the pmf of the count, as fractions: users' ones plus noise."""
    law = [Fraction(1)]

    def with_coin(law, chance):
        return [
            (law[k] if k < len(law) else 0) * (1 - chance) + (law[k - 1] * chance if k else 0)
            for k in range(len(law) + 1)
        ]

    for value in values:
        place = Fraction(value) * parameters.grid / Fraction(upper)
        whole = math.floor(place)
        law = with_coin([Fraction(0)] * whole + law, place - whole)
    for _ in range(len(values) * parameters.noise_bits):
        law = with_coin(law, Fraction(parameters.noise_probability))
    return law


def assert_law(counts, law):
    """Compares draws with a pmf by a chi-square test, small cells joined."""
    expected = np.array([float(chance) for chance in law]) * len(counts)
    seen = np.bincount(counts.numpy(), minlength=len(law)).astype(float)
    assert len(seen) == len(law)
    assert seen[expected == 0].sum() == 0
    small = expected < 10
    cells = [
        *zip(seen[~small], expected[~small], strict=True),
        (seen[small].sum(), expected[small].sum()),
    ]
    statistic = sum((got - want) ** 2 / want for got, want in cells if want > 0)
    assert statistic < chi2.isf(ALARM, max(1, sum(want > 0 for _, want in cells) - 1))


# -- Algorithm 14 -----------------------------------------------------------------------------------------------------

SMALL = [0.1, 0.75, 1.5, 0.0]
LAWS = [
    ShuffleParameters(3, 2, 0.25),
    ShuffleParameters(1, 1, 0.5),
    ShuffleParameters(5, 0),
    ShuffleParameters(2, 7, 0.8),
]


@pytest.mark.cases(4, 2)
@pytest.mark.parametrize("parameters", LAWS, ids=str)
@pytest.mark.parametrize("messages", [True, False])
def test_bits_and_counts_have_the_exact_law(parameters, messages):
    values = torch.tensor(SMALL, dtype=torch.float64)[:, None].expand(-1, RUNS)
    counts = scalar_sum(values, 1.5, parameters, seeded(1), messages=messages)
    assert_law(counts, exact_law(SMALL, 1.5, parameters))


def test_halved_noise_fails_the_test_of_the_law():
    values = torch.tensor(SMALL, dtype=torch.float64)[:, None].expand(-1, RUNS)
    counts = scalar_sum(values, 1.5, ShuffleParameters(3, 4), seeded(2))
    with pytest.raises(AssertionError):
        assert_law(counts, exact_law(SMALL, 1.5, ShuffleParameters(3, 8)))


def test_each_user_sends_bits_that_hide_nothing_else():
    values = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)
    bits = randomize_scalar(values, 1.0, ShuffleParameters(4, 3), seeded())
    assert bits.dtype == torch.bool
    assert bits.shape == (3, 7)
    assert bits[:, :4].sum(dim=1).tolist() == [0, 4, 2]


@pytest.mark.parametrize("parameters", LAWS, ids=str)
def test_the_estimate_is_unbiased_with_the_variance_it_says(parameters):
    law = exact_law(SMALL, 1.5, parameters)
    p, bits, n = parameters.noise_probability, parameters.noise_bits, len(SMALL)
    estimates = [
        analyze_scalar_sum(k, n, parameters.grid, bits, p, 1.5) for k in range(len(law))
    ]
    mean = sum(float(chance) * estimate for chance, estimate in zip(law, estimates, strict=True))
    variance = sum(
        float(chance) * (estimate - mean) ** 2
        for chance, estimate in zip(law, estimates, strict=True)
    )
    assert mean == pytest.approx(sum(SMALL), rel=1e-12)
    bound = scalar_sum_variance(n, parameters.grid, bits, p, 1.5)
    assert bound - n / 4 * (1.5 / parameters.grid) ** 2 <= variance * (1 + 1e-12)
    assert variance <= bound * (1 + 1e-12)


@given(st.floats(), st.sampled_from([1e-310, 1e-200, 0.3, 1.0, 1e200]), st.integers(1, 10**6))
def test_no_value_leaves_the_grid(value, upper, grid):
    place = grid_values(torch.tensor([value, upper, 0.0], dtype=torch.float64), upper, grid)
    assert place[1:].tolist() == [grid, 0]
    assert 0 <= place[0].item() <= grid
    ones = round_randomly(place, seeded())
    assert ones[1:].tolist() == [grid, 0]
    assert 0 <= ones[0].item() <= grid


@given(
    st.lists(st.floats(0.0, 50.0), min_size=1, max_size=5),
    st.floats(-3.0, 3.0),
    st.integers(0, 10**6),
)
def test_coupled_rounding_moves_by_less_than_one_more(places, move, seed):
    one = torch.tensor(places, dtype=torch.float64)
    other = (one + move).clamp(0.0, 50.0)
    steps = round_randomly(one, seeded(seed)) - round_randomly(other, seeded(seed))
    assert bool((steps.abs() <= torch.ceil((one - other).abs())).all())


def test_rounding_comes_from_the_generator():
    places = torch.full((1000,), 0.5, dtype=torch.float64)
    assert torch.equal(round_randomly(places, seeded(3)), round_randomly(places, seeded(3)))
    assert not torch.equal(round_randomly(places, seeded(3)), round_randomly(places, seeded(4)))


# -- Algorithm 11 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [True, False])
def test_sums_of_vectors_are_unbiased(messages):
    vectors, parameters = (
        torch.tensor([[0.6, -0.8], [0.1, 0.0], [-1.0, 0.0]]),
        ShuffleParameters(4, 6),
    )
    generator = seeded(5)
    wide = vectors.repeat(1, RUNS // 10)  # copies of the coordinates are independent runs
    sums = vector_sum(wide, 1.0, parameters, generator, messages=messages).view(-1, 2)
    deviation = math.sqrt(scalar_sum_variance(3, 4, 6, 0.5, 2.0) / len(sums))
    assert bool(((sums.mean(0) - vectors.double().sum(0)).abs() < 6.5 * deviation).all())


def test_a_count_at_its_mean_is_an_exact_zero():
    for parameters in (ShuffleParameters(6, 314), ShuffleParameters(8, 12, 0.25)):
        expected = (
            int(parameters.noise_probability * 1000 * parameters.noise_bits)
            + 1000 * parameters.grid // 2
        )
        assert centered_sum(torch.tensor([expected]), 1000, 0.1, parameters).item() == 0.0


# -- the noise --------------------------------------------------------------------------------------------------------


def drawn_law(trials, p):
    """Returns the law that is drawn, by its table."""
    first, high, low = binomial_table.__wrapped__(trials, p)
    halves = zip(high.tolist(), low.tolist(), strict=True)
    edges = [
        0,
        *((high << shuffle_noise._WORD) + low for high, low in halves),
        shuffle_noise._ONE,
    ]
    return {
        first + k: (high - low) / shuffle_noise._ONE
        for k, (low, high) in enumerate(pairwise(edges))
    }


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("trials", "p"), [(1, 0.5), (7, 0.3), (60, 0.5), (300, 0.01), (300, 0.99), (2000, 0.5)]
)
def test_the_table_of_the_noise_is_exact(trials, p):
    chance, law = Fraction(p), drawn_law(trials, p)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    for y in range(trials + 1):
        exact = math.comb(trials, y) * chance**y * (1 - chance) ** (trials - y)
        assert abs(Fraction(law.get(y, 0.0)) - exact) <= exact * Fraction(1, 2**50) + Fraction(
            1, 2**110
        )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("bits", [2, 4])
def test_the_noise_is_binomial_to_all_its_bits(monkeypatch, bits):
    # halves of so few bits tie all the time
    monkeypatch.setattr(shuffle_noise, "_WORD", bits)
    monkeypatch.setattr(shuffle_noise, "_ONE", 1 << (2 * bits))
    table = binomial_table.__wrapped__(6, 0.5)
    monkeypatch.setattr(shuffle_noise, "binomial_table", lambda trials, p: table)
    law = drawn_law(6, 0.5)
    draws = binomial_noise(6, 0.5, (20_000,), seeded(6))
    assert len({int(half) for half in table[1]}) < len(table[1]) or bits == 4
    assert_law(draws, [law.get(y, 0.0) for y in range(7)])


@pytest.mark.parametrize(("trials", "p"), [(314_000, 0.5), (10**8, 0.25)])
def test_noise_of_many_bits_has_mean_and_variance_of_the_binomial(trials, p):
    draws = binomial_noise(trials, p, (RUNS,), seeded(7)).double()
    variance = trials * p * (1 - p)
    assert abs(draws.mean().item() - trials * p) < 6.5 * math.sqrt(variance / RUNS)
    assert abs(draws.var().item() / variance - 1) < 6.5 * math.sqrt(2 / RUNS)


def test_the_noise_holds_no_array_of_its_trials():
    assert len(binomial_table(10**8, 0.5)[1]) < 200_000
    with pytest.raises(InfeasibleError, match="trials must be at most"):
        binomial_table(10**14, 0.5)
    assert binomial_noise(0, 0.5, (2, 3), seeded()).tolist() == [[0] * 3] * 2


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=25)
@example(
    5, 1, 3.0, 1e-5, 1
)  # fewer than 16 coins, whose extremes the grid reaches with probability 6e-5
@given(
    st.integers(5, 300),
    st.integers(1, 3),
    st.floats(0.3, 4.0),
    st.sampled_from([1e-3, 1e-5]),
    st.integers(1, 8),
)
def test_sized_protocols_meet_epsilon_and_delta_exactly(n, dim, epsilon, delta, grid):
    l2 = shuffle_parameters(VECTORS, n, dim, epsilon, delta, grid=grid)
    norm = grid + math.sqrt(dim)
    flat = min(grid, math.floor(norm / math.sqrt(dim)))
    rest = math.floor(math.sqrt(max(norm**2 - grid**2, 0.0) / max(dim - 1, 1)))
    worst = [[flat] * dim, [grid] + [min(rest, grid)] * (dim - 1)]
    boxes = shuffle_parameters(COORDINATES, n, dim, epsilon, delta, grid=grid)
    for parameters, vectors in ((l2, worst), (boxes, [[grid] * dim])):
        for shifts in vectors:
            for sign in (1, -1):
                moved = [sign * shift for shift in shifts]
                assert (
                    delta_bounds(n * parameters.noise_bits, 0.5, moved, epsilon, step=1e-3)[0]
                    <= delta
                )


def test_half_of_the_sized_noise_is_caught():
    parameters = shuffle_parameters(VECTORS, 1000, 1, 1.0, 1e-5)
    for share, kept in ((1, True), (4, False)):
        trials = 1000 * parameters.noise_bits // share
        lower, upper = delta_bounds(trials, 0.5, [parameters.grid], 1.0)
        assert (upper <= 1e-5) is kept
        assert (lower > 1e-5) is not kept


def test_noise_grows_until_the_accountant_agrees(monkeypatch):
    true, rho = shuffle_sizing.zcdp_shuffle, zcdp_rho(1.0, 1e-5 - 1e-10)

    def stricter(*arguments, **named):
        cost = true(*arguments, **named)
        return cost._replace(rho=1.5 * cost.rho)

    monkeypatch.setattr(shuffle_sizing, "zcdp_shuffle", stricter)
    for found, reach in (
        (shuffle_parameters(VECTORS, 1000, 10, 1.0, 1e-5), VECTORS),
        (shuffle_parameters(COORDINATES, 1000, 10, 1.0, 1e-5), COORDINATES),
    ):
        assert 0.8 * rho <= shuffle_cost(reach, found, 1000, 10).rho <= rho


def test_the_rule_of_the_specification_is_the_start():
    rho = zcdp_rho(1.0, 1e-5 - 1e-10)
    assert shuffle_parameters(VECTORS, 1000, 10, 1.0, 1e-5, grid=64) == ShuffleParameters(
        64, math.ceil(1.05 * 4 * (64 + math.sqrt(10)) ** 2 / (2 * rho * 1000))
    )
    assert shuffle_parameters(COORDINATES, 250, 10, 1.0, 1e-5, grid=64) == ShuffleParameters(
        64, math.ceil(1.05 * 4 * 10 * 64**2 / (2 * rho * 250))
    )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("n", "dim"), [(100, 1000), (10**5, 1000), (10**6, 10), (10, 1)])
@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_default_sizes_are_confirmed_by_the_accountant(n, dim, epsilon):
    parameters = shuffle_parameters(VECTORS, n, dim, epsilon, 1e-6)
    cost = shuffle_cost(VECTORS, parameters, n, dim)
    assert zcdp_epsilon(cost.rho, 1e-6 - cost.failure) <= epsilon
    # rounding adds at most about a tenth to the variance
    noise = n * parameters.noise_bits / 4
    assert n / 4 <= 0.13 * noise


def test_only_honest_noise_counts():
    parameters = ShuffleParameters(16, 100)
    half = shuffle_cost(VECTORS, parameters, 500, 4)
    for users in (1000, 1001):
        oracle = ShuffledClipped(1.0, parameters, users, 4, honest_fraction=0.5)
        assert oracle.cost() == half
    sized = ShuffledClipped.calibrated(
        1.0, 1000, 4, epsilon=1.0, delta=1e-6, honest_fraction=0.5
    )
    assert sized.parameters == shuffle_parameters(VECTORS, 500, 4, 1.0, 1e-6)
    with pytest.raises(ConditionError, match="honest_fraction must leave an honest user"):
        ShuffledClipped(1.0, parameters, 10, 4, honest_fraction=0.05)


def test_all_coordinates_cost_more_than_one_vector():
    parameters = ShuffleParameters(64, 314)
    boxes, vector = (
        shuffle_cost(COORDINATES, parameters, 1000, 10).rho,
        shuffle_cost(VECTORS, parameters, 1000, 10).rho,
    )
    assert boxes / vector == pytest.approx(10 * 64**2 / (64 + math.sqrt(10)) ** 2, rel=0.02)


def test_the_event_holds_for_a_public_number_of_users_only():
    event = ShuffledClipped(1.0, ShuffleParameters(4, 100), 1000, 2).event()
    assert set(event.adjacencies) == {"replace_one", "zero_out"}
    assert event.rho > 0
    assert 0 < event.delta <= 1e-10


def test_the_closed_form_is_refused_where_its_claim_was_not_confirmed(monkeypatch):
    assert vector_parameters_paper(100, 10, 1.0, 1e-6).noise_probability == 0.25
    for epsilon, delta in ((10.1, 1e-6), (1.0, 0.2), (15.0, 0.49)):
        with pytest.raises(ConditionError, match=r"epsilon must be <= 10 and delta <= 0\.1"):
            vector_parameters_paper(100, 10, epsilon, delta)
    monkeypatch.setattr(
        papers, "shuffle_parameters", lambda *a, **k: ShuffleParameters(20, 10**12, 0.25)
    )
    with pytest.raises(ConditionError, match="the accountant needs 1000000000000 noise bits"):
        vector_parameters_paper(100, 10, 1.0, 1e-6)


def test_the_closed_form_takes_far_more_noise_than_needed():
    paper = vector_parameters_paper(1000, 10, 1.0, 1e-5)
    assert (
        paper.noise_bits
        > 10**5 * shuffle_parameters(VECTORS, 1000, 10, 1.0, 1e-5, grid=paper.grid).noise_bits
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ShuffleParameters(0, 1), ValueError, "grid must be"),
        (lambda: ShuffleParameters(1, -1), ValueError, "noise_bits must be"),
        (lambda: ShuffleParameters(1, 1, 1.0), ValueError, "noise_probability must be"),
        (lambda: analyze_scalar_sum(-1, 1, 1, 1, 0.5, 1.0), ValueError, "count must be"),
        (lambda: analyze_scalar_sum(1, 0, 1, 1, 0.5, 1.0), ValueError, "n must be"),
        (lambda: scalar_sum_variance(1, 1, 1, 0.5, 0.0), ValueError, "upper must be > 0"),
        (
            lambda: shuffle_cost(VECTORS, ShuffleParameters(4, 0), 10, 1),
            ConditionError,
            "noise_bits must be >= 1",
        ),
        (
            lambda: shuffle_cost(VECTORS, ShuffleParameters(4, 1), 2, 1),
            ConditionError,
            "shift must leave a window",
        ),
        (
            lambda: shuffle_cost(VECTORS, ShuffleParameters(4, 9), 10, 1, failure=0.0),
            ValueError,
            "failure must be",
        ),
        (
            lambda: shuffle_parameters(VECTORS, 10, 1, 0.0, 1e-5),
            ValueError,
            "epsilon must be > 0",
        ),
        (lambda: shuffle_parameters(VECTORS, 10, 1, 1.0, 0.0), ValueError, "delta must be"),
        (
            lambda: shuffle_parameters(COORDINATES, 0, 1, 1.0, 1e-5),
            ValueError,
            "n must be an integer >= 1",
        ),
        (
            lambda: ShuffledClipped(1.0, ShuffleParameters(2**33, 1), 2**20, 1),
            ValueError,
            "counts below 2",
        ),
        (
            lambda: shuffle_parameters(VECTORS, 10, 10, 1e-7, 1e-6),
            InfeasibleError,
            "rho must be above",
        ),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
