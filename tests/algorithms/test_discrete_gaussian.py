"""The law of the vectorized sampler, its certified bounds, and its independence of everything but random bytes."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import chain, repeat

import mpmath
import numpy as np
import pytest
from scipy import stats

from tests.reference import discrete_gaussian_literal as literal
from torch_dpsco.step import exact_noise as module
from torch_dpsco.step.exact_noise import MOST_BITS, discrete_gaussian, exp_bounds

FALSE_ALARM = 1e-6


def binned(numbers, edges):
    return np.diff(np.searchsorted(np.sort(numbers), edges))


def law_of_bins(bits, edges):
    """Returns probabilities of [e_i, e_{i+1}) by Euler and Maclaurin: a sum is an integral but for exp(-2 pi^2 m^2)."""
    m = 2.0**bits
    return np.diff(stats.norm.cdf((np.asarray(edges, dtype=np.float64) - 0.5) / m))


@pytest.mark.parametrize("bits", [4, 5, 7])
def test_small_draws_have_exactly_the_law(bits):
    m, size = 2**bits, 400_000
    numbers = discrete_gaussian(size, bits)
    reach = 4 * m
    with mpmath.workdps(30):
        weights = [mpmath.exp(-mpmath.mpf(x * x) / (2 * m * m)) for x in range(reach + 1)]
        total = mpmath.jtheta(3, 0, mpmath.exp(-mpmath.mpf(1) / (2 * m * m)))
        law = np.array([float(weights[abs(x)] / total) for x in range(-reach, reach + 1)])
    counts = np.bincount(numbers[np.abs(numbers) <= reach] + reach, minlength=2 * reach + 1)
    counts, law = np.append(counts, size - counts.sum()), np.append(law, 1.0 - law.sum())
    assert stats.chisquare(counts, law * size).pvalue > FALSE_ALARM


@pytest.mark.parametrize("bits", [10, 20, 28, 33, MOST_BITS])
def test_large_draws_have_the_law_in_cells_and_uniform_last_bits(bits):
    size = 400_000
    numbers = discrete_gaussian(size, bits)
    edges = np.concatenate([[-(2**62)], np.arange(-64, 65) * 2 ** (bits - 4), [2**62]])
    assert (
        stats.chisquare(binned(numbers, edges), law_of_bins(bits, edges) * size).pvalue
        > FALSE_ALARM
    )
    # within a cell near 1.5 standard deviations, where the chord decides most: the density is not flat
    inner = 2**bits + np.arange(65) * 2 ** (bits - 6)
    found = binned(np.abs(numbers), inner)
    law = law_of_bins(bits, inner)
    assert stats.chisquare(found, law / law.sum() * found.sum()).pvalue > FALSE_ALARM
    last = np.bincount(numbers & 15, minlength=16)
    assert stats.chisquare(last).pvalue > FALSE_ALARM


@pytest.mark.slow
def test_vectorized_and_literal_draws_are_of_one_law():
    many, few = (
        discrete_gaussian(200_000, 6),
        [literal.discrete_gaussian(Fraction(2**12)) for _ in range(20_000)],
    )
    edges = [-(10**6), *range(-160, 161, 10), 10**6]
    table = np.array([binned(many, edges), binned(np.array(few), edges)])
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_tails_beyond_six_standard_deviations_can_be_drawn():
    # Algorithms on 32 bits of radius end at 6.66: forced proposals of each cell must be kept in proportion to the law
    tables, bits = module._tables(), 10
    for cell in (100, 150, 191):
        entry = int(np.flatnonzero(tables.cell == cell)[0])
        words = np.full(64, entry, dtype=np.uint64)
        source = iter([words.tobytes(), np.zeros(64, dtype=np.uint32).tobytes()])
        rest = chain(source, repeat(None))
        drawn = module._accepted(64, bits, lambda size, rest=rest: next(rest) or bytes(size))
        assert len(drawn) == 64
        assert set(drawn.tolist()) == {cell << (bits - 4)}


def test_the_tail_is_drawn_with_its_own_law():
    # P(x in cell 192 + i) over that of cell 191, through the very acceptance numbers
    bits, width = 8, 2**4
    for extra in (1, 2, 5):
        x = (192 + extra - 1) * width + 3
        with mpmath.workdps(60):
            a = (
                3180
                * mpmath.mpf(2) ** extra
                * mpmath.exp(-mpmath.mpf(x * x) / 2 ** (2 * bits + 1))
            )
            assert a < mpmath.mpf(2) ** -32  # what `margin` takes for granted
            scaled = int(mpmath.floor(a * mpmath.mpf(2) ** 160))
        for u, kept in ((scaled - 1, True), (scaled + 1, False)):
            words = [(u >> shift) & (2**32 - 1) for shift in range(128, -1, -32)]
            later = iter([word.to_bytes(4, "little") for word in words[1:]])
            assert (
                module._coin(
                    words[0], 3180 << extra, 1, x, bits, lambda _, it=later: next(it, bytes(4))
                )
                is kept
            )


def test_a_tail_cell_has_the_probability_of_its_acceptance():
    coins = iter([1, 1, 0, 0, 1, 0])
    drawn = [module._tail(lambda _: bytes([next(coins)])) for _ in range(3)]
    assert drawn == [(194, 3), (192, 1), (193, 2)]


def test_every_table_entry_is_a_lower_bound_within_two_units():
    tables = module._tables()
    with mpmath.workdps(50):
        for cell in (0, 1, 15, 16, 17, 40, 64, 100, 191):
            assert tables.counts[cell] >= 3180 * mpmath.exp(-mpmath.mpf(cell**2) / 512)
            for part in (0, 1, 31, 63, 64):
                a = (
                    3180
                    * mpmath.exp(-((cell + mpmath.mpf(part) / 64) ** 2) / 512)
                    / int(tables.counts[cell])
                )
                assert 0 <= a * 2**32 - int(tables.lower[cell, part]) < 2
    assert 2**16 - 64 < tables.counts.sum() + 1 <= 2**16
    assert (np.bincount(tables.cell, minlength=194)[:192] == tables.counts).all()


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("bits", [4, 12, 28, 30, MOST_BITS])
def test_the_chord_is_within_its_margin_of_the_probability(bits):
    tables, b, generator = module._tables(), bits - 4, np.random.default_rng(bits)
    cells = np.concatenate([np.arange(192), generator.integers(0, 60, 600)])
    inside = generator.integers(0, 2**b, len(cells))
    inside[:96] = 2**b - 1 - (np.arange(96) % max(1, 2**b // 64))
    # U surely below a, or surely above it: by a unit, which long integers decide, and by more than any margin
    for side, least in ((-1, True), (1, False), (-1, False), (1, True)):
        uniform = np.zeros(len(cells), dtype=np.uint32)
        for i, (cell, j) in enumerate(zip(cells.tolist(), inside.tolist(), strict=True)):
            with mpmath.workdps(40):
                x = (cell << b) | j
                a = (
                    3180
                    * mpmath.exp(-mpmath.mpf(x * x) / 2 ** (2 * bits + 1))
                    / int(tables.counts[cell])
                )
                far = side * (1 if least else 2 * int(tables.margin[cell]) + 2)
                uniform[i] = max(0, min(2**32 - 1, int(mpmath.floor(a * 2**32)) + far))
        kept = np.zeros(len(cells), dtype=bool)
        places = np.arange(len(cells))
        module._decide(
            places,
            cells.astype(np.uint8),
            inside,
            uniform,
            (cells << b) | inside,
            kept,
            bits,
            bytes,
        )
        assert kept[uniform > 0].all() if side < 0 else not kept.any()


def test_a_sampler_that_is_flat_in_each_cell_would_be_noticed(monkeypatch):
    tables = module._tables()
    flat = np.repeat(tables.lower[:, :1], 65, axis=1)
    monkeypatch.setattr(
        module, "_tables", lambda: tables._replace(lower=flat, margin=tables.margin * 0)
    )
    numbers, inner = discrete_gaussian(1_000_000, 12), 2**12 + np.arange(65) * 2**6
    found, law = binned(np.abs(numbers), inner), law_of_bins(12, inner)
    assert stats.chisquare(found, law / law.sum() * found.sum()).pvalue < FALSE_ALARM


@pytest.mark.parametrize(
    ("numerator", "shift"),
    [(0, 5), (1, 0), (3, 1), (10**9, 20), (2**80, 81), (150, 0), (1, 200)],
)
def test_exponentials_have_certified_bounds(numerator, shift):
    for bits in (8, 64, 200):
        low, high = exp_bounds(numerator, shift, bits)
        with mpmath.workdps(400):
            exact = (
                mpmath.exp(-mpmath.mpf(numerator) / mpmath.mpf(2) ** shift)
                * mpmath.mpf(2) ** bits
            )
            assert low <= exact <= high
        assert high - low <= 2


def test_bytes_that_are_all_equal_do_not_stop_the_sampler_for_good():
    # all zeros: cell 0, u = 0: +0 for ever; all ones: "again", which fresh bytes end
    assert discrete_gaussian(5, 12, bytes).tolist() == [0] * 5
    stuck = iter([b"\xff" * (8 * 21), b"\xff" * (4 * 21)])
    assert len(discrete_gaussian(5, 12, lambda size: next(stuck, None) or bytes(size))) == 5


def test_draws_come_from_the_library_source_of_entropy(monkeypatch):
    import torch_dpsco.noise as rng

    asked = []
    real = rng._random_bytes
    monkeypatch.setattr(rng, "_random_bytes", lambda size: asked.append(size) or real(size))
    discrete_gaussian(100, 12)
    assert sum(asked) >= 1200


def test_nothing_is_drawn_for_no_number_and_ranges_are_enforced():
    assert discrete_gaussian(0, 12).shape == (0,)
    for bits in (3, 41, 1.5):
        with pytest.raises(ValueError, match="bits"):
            discrete_gaussian(3, bits)


def test_the_first_proposals_are_kept_in_their_order():
    # a sampler that sorted, or kept the smaller ones, would pass a test of one number
    numbers = discrete_gaussian(300_000, 14)
    first, second = numbers[::2], numbers[1::2]
    assert abs(stats.spearmanr(first, second).statistic) < 5 / math.sqrt(len(first))
    assert stats.ks_2samp(first[:1000], numbers[-150_000:]).pvalue > FALSE_ALARM
