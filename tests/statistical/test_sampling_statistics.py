"""Samplers draw by exactly the law that accounting assumes.

Each test compares with the exact law at a false-alarm rate of 1e-6 (of a whole test, where it makes several
comparisons), with fixed seeds, so that it passes or fails for good. `test_each_bound_refuses_another_law` shows that
every statistic fails on samplers that are wrong in the way that it is made for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from itertools import combinations, permutations, product

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from tests.streams import Picked, seeded_sampler
from torch_dpsco.accounting.designs import Design, Fixed, Poisson, Shuffled
from torch_dpsco.errors import UtilityWarning
from torch_dpsco.sampling import poisson_positions

FALSE_ALARM = 1e-6
N, B, DRAWS = 40, 8, 20_000
RATE = B / N
Members = npt.NDArray[np.float64]  # (draws, records), 1 where the record is in the batch
Batch = npt.NDArray[np.int64]


def batches(design: Design, draws: int, seed: int = 0) -> list[Batch]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UtilityWarning)
        sampler = seeded_sampler(design, steps=draws, seed=seed)
    return [indices for _, indices in sampler.draws()]


def members(drawn: Iterable[Batch], n: int = N) -> Members:
    rows = list(drawn)
    table = np.zeros((len(rows), n))
    for row, indices in zip(table, rows, strict=True):
        row[indices] = 1.0
    return table


@pytest.fixture(scope="module")
def poisson() -> Members:
    return members(batches(Poisson(B, N), DRAWS))


# -- statistics: each returns the probability of something at least as far from the law --------------------------------


def _two_sided(cdf: float, sf: float) -> float:
    return 2 * min(cdf, sf)


def chi_square(observed: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Pearson's statistic for counts with a given total."""
    o, e = np.asarray(observed, dtype=float), np.asarray(expected, dtype=float)
    assert e.min() > 5
    statistic = ((o - e) ** 2 / e).sum()
    return _two_sided(
        float(stats.chi2.cdf(statistic, len(e) - 1)), float(stats.chi2.sf(statistic, len(e) - 1))
    )


def inclusion(table: Members) -> float:
    """Counts of independent records with rate RATE; the sum of their squared z is chi-square."""
    z = (table.sum(0) - len(table) * RATE) / math.sqrt(len(table) * RATE * (1 - RATE))
    statistic = float((z**2).sum())
    return _two_sided(float(stats.chi2.cdf(statistic, N)), float(stats.chi2.sf(statistic, N)))


def largest_correlation(first: Members, second: Members, pairs: list[tuple[int, int]]) -> float:
    """Normal tail of the largest |z| among the products (x_i - q)(y_j - q), by Bonferroni."""
    scale = math.sqrt(len(first)) * RATE * (1 - RATE)
    z = (first - RATE).T @ (second - RATE) / scale
    largest = max(abs(float(z[i, j])) for i, j in pairs)
    return min(1.0, 2 * len(pairs) * float(stats.norm.sf(largest)))


def independence(table: Members) -> float:
    return largest_correlation(table, table, list(combinations(range(table.shape[1]), 2)))


def renewal(table: Members) -> float:
    """Records of one draw against those of the next one, a record against itself included."""
    n = table.shape[1]
    return largest_correlation(table[:-1], table[1:], list(product(range(n), range(n))))


def batch_sizes(table: Members) -> float:
    """Sizes against Binomial(N, RATE), rare sizes joined."""
    counts = np.bincount(table.sum(1).astype(int), minlength=N + 1)
    law = stats.binom.pmf(np.arange(N + 1), N, RATE)
    common = law * len(table) > 20
    return chi_square(
        [*counts[common], counts[~common].sum()],
        [*(law[common] * len(table)), law[~common].sum() * len(table)],
    )


POISSON_STATISTICS = [inclusion, independence, renewal, batch_sizes]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("statistic", POISSON_STATISTICS)
def test_poisson_batches_follow_their_law(poisson, statistic):
    """False-alarm rate 1e-6."""
    assert statistic(poisson) > FALSE_ALARM


def _redraw(table: Members, draw: Callable[[np.random.Generator], Iterable[int]]) -> Members:
    rng = np.random.default_rng(0)
    return members([np.fromiter(draw(rng), dtype=np.int64) for _ in range(len(table))])


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("statistic", "wrong"),
    [
        # the last record is never drawn
        (inclusion, lambda t: t * (np.arange(N) < N - 1)),
        # one sampling rate is 5 % too large
        (
            inclusion,
            lambda t: _redraw(t, lambda rng: np.flatnonzero(rng.random(N) < RATE * 1.05)),
        ),
        # a block of records of the right expected size
        (
            independence,
            lambda t: _redraw(
                t, lambda rng: (rng.integers(N) + np.arange(rng.binomial(N, RATE))) % N
            ),
        ),
        # two records that always come together
        (independence, lambda t: t[:, np.r_[0, 0 : N - 1]]),
        # the same batch again
        (renewal, lambda t: np.repeat(t[::2], 2, axis=0)),
        # pages of a permutation: a record of this draw is not in the next one
        (renewal, lambda t: members(batches(Shuffled(B, N), DRAWS))),
        # fixed size: right in every single record
        (batch_sizes, lambda t: members(batches(Fixed(B, N), DRAWS))),
        # empty batches left out
        (batch_sizes, lambda t: t[t.sum(1) > 3]),
    ],
)
def test_each_bound_refuses_another_law(poisson, statistic, wrong):
    assert statistic(wrong(poisson)) < 1e-12


def test_the_first_and_the_last_record_are_drawn_like_all_others(poisson):
    """Exact binomial tails of two counts; false-alarm rate 1e-6."""
    for record in (0, N - 1):
        count = int(poisson[:, record].sum())
        tails = stats.binom.cdf(count, DRAWS, RATE), stats.binom.sf(count - 1, DRAWS, RATE)
        assert _two_sided(*map(float, tails)) > FALSE_ALARM / 2


def test_the_batch_size_varies_as_that_of_independent_records_and_not_as_a_fixed_one(poisson):
    """Sample variance against n q (1 - q): its standard error here is 1 %; false-alarm rate 1e-6 (4.9 of them)."""
    sizes = poisson.sum(1)
    variance = N * RATE * (1 - RATE)
    kurtosis = 3 + (1 - 6 * RATE * (1 - RATE)) / variance
    error = variance * math.sqrt((kurtosis - 1) / DRAWS)
    assert abs(float(((sizes - B) ** 2).mean()) - variance) < 4.9 * error
    assert members(batches(Fixed(B, N), 100)).sum(1).var() == 0.0


@pytest.mark.weekly
@pytest.mark.parametrize(("n", "batch_size"), [(6, 1), (6, 3), (5, 4)])
def test_every_subset_has_the_probability_of_independent_coin_tosses(n, batch_size):
    """The whole law of the gap method, on all 2^n subsets; false-alarm rate 1e-6."""
    rate, draws = batch_size / n, 30_000
    codes = [
        int((2**indices).sum()) for indices in batches(Poisson(batch_size, n), draws, seed=1)
    ]
    counts = np.bincount(codes, minlength=2**n)
    sizes = np.array([bin(code).count("1") for code in range(2**n)])
    law = rate**sizes * (1 - rate) ** (n - sizes) * draws
    rare = law < 20
    observed, expected = counts[~rare], law[~rare]
    if rare.any() and law[rare].sum() > 5:
        observed, expected = (
            np.append(observed, counts[rare].sum()),
            np.append(expected, law[rare].sum()),
        )
    assert chi_square(observed, expected * observed.sum() / expected.sum()) > FALSE_ALARM


def test_tiny_rates_on_ten_million_records_are_exact():
    """Totals (binomial), positions (uniform) and the first position (geometric); false-alarm rate 1e-6 in all."""
    n, rate, draws = 10**7, 2e-6, 3000
    rng = Picked(np.random.default_rng(7))
    drawn = [poisson_positions(n, rate, rng) for _ in range(draws)]
    total = sum(map(len, drawn))
    tails = stats.binom.cdf(total, n * draws, rate), stats.binom.sf(total - 1, n * draws, rate)
    assert _two_sided(*map(float, tails)) > FALSE_ALARM / 3
    bins = np.bincount(np.concatenate(drawn) // (n // 50), minlength=50)
    assert chi_square(bins, np.full(50, total / 50)) > FALSE_ALARM / 3
    first = [
        -math.expm1((indices[0] + 1) * math.log1p(-rate)) for indices in drawn if len(indices)
    ]
    assert (
        stats.kstest(np.array(first) / -math.expm1(n * math.log1p(-rate)), "uniform").pvalue
        > FALSE_ALARM / 3
    )


@pytest.mark.slow
def test_every_subset_of_fixed_size_is_equally_likely():
    """All 20 subsets of 3 out of 6; false-alarm rate 1e-6."""
    drawn = [tuple(indices.tolist()) for indices in batches(Fixed(3, 6), DRAWS)]
    subsets = list(combinations(range(6), 3))
    assert (
        chi_square(
            [drawn.count(s) for s in subsets], np.full(len(subsets), DRAWS / len(subsets))
        )
        > FALSE_ALARM
    )


@pytest.mark.slow
def test_fixed_batches_are_drawn_anew_each_time():
    """How many records two consecutive batches share is hypergeometric; false-alarm rate 1e-6."""
    table = members(batches(Fixed(3, 12), DRAWS), 12)
    shared = (table[:-1:2] * table[1::2]).sum(1).astype(int)
    law = stats.hypergeom.pmf(np.arange(4), 12, 3, 3) * len(shared)
    assert chi_square(np.bincount(shared, minlength=4), law) > FALSE_ALARM


@pytest.mark.slow
def test_every_order_of_a_shuffled_epoch_is_equally_likely():
    """All 24 permutations of 4 records in batches of one; false-alarm rate 1e-6."""
    epochs = 10_000
    drawn = np.concatenate(batches(Shuffled(1, 4), 4 * epochs)).reshape(epochs, 4)
    codes = [tuple(row) for row in drawn.tolist()]
    counts = [codes.count(order) for order in permutations(range(4))]
    assert chi_square(counts, np.full(24, epochs / 24)) > FALSE_ALARM
