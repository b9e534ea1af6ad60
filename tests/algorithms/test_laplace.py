"""The exact discrete Laplace sampler: its law, its grid, and what it refuses. Seeds are fixed; bounds hold at 1e-6."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from scipy import stats

from torch_dpsco.noise import noise_generator
from torch_dpsco.step import exact_noise as laplace
from torch_dpsco.step.exact_noise import draw_laplace

FALSE_ALARM = 1e-6


def draws(scale, step, number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [draw_laplace(scale, step, generator) for _ in range(number)]


def fits_the_discrete_law(values, t) -> bool:
    """Chi-square over the integers that are expected 20 times or more, and their two tails."""
    number, counted = len(values), Counter(int(v) for v in values)
    p0 = math.tanh(1 / (2 * t))
    reach = max(0, math.floor(t * math.log(number * p0 / 20)))
    observed = [counted[k] for k in range(-reach, reach + 1)]
    expected = [number * p0 * math.exp(-abs(k) / t) for k in range(-reach, reach + 1)]
    for sign in (-1, 1):
        observed.append(sum(c for k, c in counted.items() if sign * k > reach))
        expected.append(number * math.exp(-(reach + 1) / t) / (1 + math.exp(-1 / t)))
    return bool(stats.chisquare(observed, expected, sum_check=False).pvalue > FALSE_ALARM)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("t", [Fraction(1, 3), Fraction(1), Fraction(7, 5), Fraction(40, 7)])
def test_draws_have_exactly_the_discrete_laplace_law(t):
    assert fits_the_discrete_law(draws(t, 1, 20_000), float(t))


@pytest.mark.slow
def test_other_laws_are_told_from_it():
    values = draws(Fraction(7, 5), 1, 20_000)
    assert not fits_the_discrete_law(values, 1.5)
    assert not fits_the_discrete_law(
        [*values, *[Fraction(0)] * 3000], 1.4
    )  # a zero of each sign now and then
    assert not fits_the_discrete_law([abs(v) for v in values], 1.4)


def test_on_a_fine_grid_draws_look_continuous():
    values = [float(v) for v in draws(2.5, Fraction(3, 2**31), 4000, seed=1)]
    assert stats.kstest(values, "laplace", (0.0, 2.5)).pvalue > FALSE_ALARM
    assert stats.kstest(values, "laplace", (0.0, 2.5 / 1.2)).pvalue < FALSE_ALARM


@pytest.mark.parametrize("step", [Fraction(1, 3), Fraction(999, 1000 * 2**20), 0.1, 7])
def test_draws_are_multiples_of_the_step(step):
    assert all((v / Fraction(step)).denominator == 1 for v in draws(0.3, step, 50))


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 5), (1, 5), (2, 3), (1, 1)])
def test_coins_of_exponential_probability_are_exact(numerator, denominator):
    bits = laplace._Bits(torch.Generator().manual_seed(3))
    number = 20_000
    heads = sum(laplace._exp_coin(numerator, denominator, bits) for _ in range(number))
    law = stats.binom(number, math.exp(-numerator / denominator))
    assert law.cdf(heads) > FALSE_ALARM / 2
    assert law.sf(heads - 1) > FALSE_ALARM / 2


@pytest.mark.parametrize("limit", [1, 2, 3, 2**62 + 1, 3**90])
def test_integers_are_uniform_below_their_limit(limit):
    bits = laplace._Bits(torch.Generator().manual_seed(4))
    values = [laplace._below(limit, bits) for _ in range(3000)]
    assert all(0 <= v < limit for v in values)
    if limit > 3:
        assert stats.kstest([v / limit for v in values], "uniform").pvalue > FALSE_ALARM
    else:
        observed = [values.count(k) for k in range(limit)]
        assert limit == 1 or stats.chisquare(observed).pvalue > FALSE_ALARM


def test_fresh_generators_draw_other_numbers_and_seeds_repeat_them():
    one, other = (draw_laplace(1.0, Fraction(1, 2**60), noise_generator()) for _ in range(2))
    assert one != other
    assert draws(1.0, Fraction(1, 2**60), 3) == draws(1.0, Fraction(1, 2**60), 3)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_scale_and_step_must_be_positive_and_finite(bad):
    with pytest.raises(ValueError, match="scale must be"):
        draws(bad, 1, 1)
    with pytest.raises(ValueError, match="step must be"):
        draws(1.0, bad, 1)
