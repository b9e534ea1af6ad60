"""Coefficients of the filtered mean: exact values, and a search for pairs of data sets that exceed or reach them."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.papers.user_level import (
    bernoulli_mismatch,
    bernoulli_sensitivity,
    filter_coefficient_two_radius,
)
from torch_dpsco.algorithms.user_numbers import best_ramp_end, filter_coefficient, ramp_start
from torch_dpsco.errors import ConditionError

# -- exact values --------------------------------------------------------------------------------------------------


def exact_same(n: int, H: Fraction, b: int) -> Fraction | None:
    a, c = Fraction(n + 1, 2), 1 / (b - Fraction(n + 1, 2))
    K_A, K_B = n * (n - H) / (n - a), n * (n - H) / (n - b)
    if n <= K_A:
        return None
    return max((1 + K_A * c) / (n - K_A), (1 + K_B * c) / n)


@st.composite
def settings_of_the_filter(draw):
    n = draw(st.integers(4, 10**6))
    b = draw(st.integers(math.floor((n + 1) / 2) + 1, n - 1))
    H = draw(st.floats(b, n))
    return n, H, b


@pytest.mark.slow
@given(settings_of_the_filter())
@settings(max_examples=300)
def test_the_coefficient_is_never_below_its_exact_value(setting):
    n, H, b = setting
    exact = exact_same(n, Fraction(H), b)
    if exact is None or exact >= 1:
        with pytest.raises(ConditionError, match="score_floor must be larger"):
            filter_coefficient(n, H, b)
    elif exact < Fraction(999, 1000):
        assert exact <= Fraction(filter_coefficient(n, H, b)) <= exact * (1 + Fraction(1, 10**9))


@given(settings_of_the_filter())
def test_the_two_radius_coefficient_is_never_below_its_exact_value(setting):
    n, H, b = setting
    M = math.ceil(H)
    if b <= M - 1:
        exact = 2 * (1 + (n - M) / (b - Fraction(n + 1, 2))) / M
        assert (
            exact
            <= Fraction(filter_coefficient_two_radius(n, H, b))
            <= exact * (1 + Fraction(1, 10**12))
        )
        assert filter_coefficient_two_radius(n, H) <= filter_coefficient_two_radius(n, H, b)


@pytest.mark.parametrize("n", [4, 5, 10, 11, 50, 333])
@pytest.mark.parametrize("share", [0.52, 0.6, 0.7, 0.8, 0.9, 0.99, 1.0])
def test_the_best_ramp_end_is_that_of_a_scan(n, share):
    H, found = share * n, {}
    for b in range(math.floor(ramp_start(n)) + 1, min(math.floor(H), n - 1) + 1):
        exact = exact_same(n, Fraction(H), b)
        if exact is not None and exact < 1:
            found[b] = float(exact)
    if not found:
        with pytest.raises(ConditionError):
            best_ramp_end(n, H)
    else:
        best = best_ramp_end(n, H)
        assert best.coefficient == filter_coefficient(n, H, best.ramp_end)
        assert best.coefficient == pytest.approx(min(found.values()), rel=1e-13)


def test_agreement_of_all_costs_what_averaging_costs():
    assert filter_coefficient(1000, 1000.0, 999) == pytest.approx(1 / 1000, rel=1e-14)
    assert best_ramp_end(10**5, 99_000.0).coefficient * 10**5 == pytest.approx(1.16, abs=0.005)


def test_the_two_radius_filter_wins_at_low_scores_and_loses_at_high_ones():
    n = 10**4
    for share, better in ((0.65, "two"), (0.85, "two"), (0.88, "same"), (0.95, "same")):
        same, two = (
            best_ramp_end(n, share * n).coefficient,
            filter_coefficient_two_radius(n, share * n),
        )
        assert ("two" if two < same else "same") == better


def test_the_figures_of_the_specification_for_random_membership():
    n, b = 10**4, 20_000 // 3
    for share, random, fixed in ((0.68, 112, 16.3), (0.8, 80, 8.3), (0.95, 46, 3.6)):
        assert bernoulli_sensitivity(n, share * n, b, 1e-12, 1.0) * n == pytest.approx(
            random, rel=0.01
        )
        best = min(
            best_ramp_end(n, share * n).coefficient, filter_coefficient_two_radius(n, share * n)
        )
        assert 2 * best * n == pytest.approx(fixed, rel=0.02)


@given(st.integers(0, 80), st.integers(1, 99), st.integers(1, 12))
def test_mismatches_are_counted_exactly(count, percent, digits):
    p, failure = Fraction(percent, 100), Fraction(1, 10**digits)
    mass = [math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(count + 1)]
    exact = next(k for k in range(count + 1) if 1 - sum(mass[: k + 1]) <= failure)
    found = bernoulli_mismatch(count, float(p), float(failure))
    assert found == exact or (
        found == exact + 1 and abs(1 - sum(mass[: exact + 1]) - failure) < failure / 10**8
    )


def test_no_mismatch_where_none_can_differ():
    assert bernoulli_mismatch(0, 0.5, 1e-9) == bernoulli_mismatch(50, 0.0, 1e-9) == 0
    assert bernoulli_mismatch(50, 1.0, 1e-9) == 50


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: filter_coefficient(3, 3.0, 2), "n must be >= 4"),
        (
            lambda: filter_coefficient(10, 9.0, 10),
            r"ramp_end must be in \(\(n\+1\)/2, n-1\] = \(5.5, 9\]",
        ),
        (lambda: filter_coefficient(10, 9.0, 5), "ramp_end must be in"),
        (lambda: filter_coefficient(10, 9.0, 7.5), "ramp_end must be an integer"),
        (lambda: filter_coefficient(10, 7.0, 8), "<= score_floor .* score_floor=7"),
        (lambda: filter_coefficient(10, 11.0, 8), "score_floor <= n"),
        (lambda: filter_coefficient(10, math.nan, 8), "score_floor must be finite"),
        (lambda: filter_coefficient(100, 53.0, 52), "no bound is proved"),
        (lambda: best_ramp_end(100, 50.6), r"score_floor must be in \[51, 100\]"),
        (lambda: filter_coefficient_two_radius(100, 50.9), "score_floor must be > 51"),
        (lambda: filter_coefficient_two_radius(100, 80.0, 80), "ramp_end must be <= ceil"),
        (
            lambda: bernoulli_sensitivity(100, 66.0, 66, 1e-6, 1.0),
            "score_floor must be > ramp_end=66",
        ),
        (lambda: bernoulli_sensitivity(100, 80.0, 66, 0.0, 1.0), "failure must be in"),
        (lambda: bernoulli_sensitivity(100, 80.0, 66, 1e-6, 0.0), "pair_radius must be > 0"),
        (lambda: bernoulli_mismatch(-1, 0.5, 0.1), "count must be an integer >= 0"),
        (lambda: bernoulli_mismatch(5, 1.5, 0.1), "probability must be in"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- the search ----------------------------------------------------------------------------------------------------
# Pairs of data sets on a line: clusters at multiples of tau/2 (exact in binary), and user 1 somewhere, or isolated.

CLUSTERS = 5
FAR = 1e6


class Pairs:
    """Many pairs at once: positions (B, C), sizes (B, C) of the common users, user 1 before and after (B,)."""

    def __init__(self, n, position, size, before, after):
        self.n, self.position, self.size, self.before, self.after = (
            n,
            position,
            size,
            before,
            after,
        )

    def counts(self, user, radius):
        """Neighbors of each cluster's members and of user 1, everyone included."""
        gap = np.abs(self.position[:, :, None] - self.position[:, None, :])
        near = np.abs(self.position - user[:, None]) <= radius
        return ((gap <= radius) * self.size[:, None, :]).sum(2) + near, 1 + (
            near * self.size
        ).sum(1)

    def score(self, user):
        common, own = self.counts(user, 1.0)
        return ((common * self.size).sum(1) + own) / self.n

    def mean(self, user, radius, weight):
        """The filtered mean, with weight(counts) for counts of shape (B, .)."""
        common, own = self.counts(user, radius)
        w, w1 = weight(common) * self.size, weight(own[:, None])[:, 0]
        total = w.sum(1) + w1
        moment = (w * self.position).sum(1) + w1 * np.where(w1 > 0, user, 0.0)
        return np.where(total > 0, moment / np.where(total > 0, total, 1), 0.0)


def random_pairs(rng, n, many):
    """Half of the pairs have one large cluster at 0, so that scores of all heights occur."""
    position = rng.integers(-6, 7, (many, CLUSTERS)) / 2.0
    position[::2, 0] = 0.0
    cut = np.sort(rng.integers(0, n, (many, CLUSTERS - 1)), axis=1)
    cut[::2] = (
        n
        - 1
        - np.sort(rng.integers(0, 1 + n // 3, (len(cut[::2]), CLUSTERS - 1)), axis=1)[:, ::-1]
    )
    size = np.diff(cut, axis=1, prepend=0, append=n - 1)
    user = rng.integers(-6, 7, (2, many)) / 2.0
    user[rng.random((2, many)) < 0.1] = FAR
    return Pairs(n, position, size, user[0], user[1])


def moved(rng, pairs, keep):
    """Variations of some pairs: users go from one cluster to another, a cluster or user 1 shifts."""
    index = rng.choice(keep, len(pairs.before))
    position, size = pairs.position[index].copy(), pairs.size[index].copy()
    rows = np.arange(len(index))
    source, target = rng.integers(0, CLUSTERS, (2, len(index)))
    step = np.minimum(size[rows, source], rng.integers(0, 3, len(index)))
    size[rows, source] -= step
    size[rows, target] += step
    shift = rng.random(len(index)) < 0.3
    position[rows[shift], source[shift]] += rng.integers(-1, 2, shift.sum()) / 2.0
    before, after = pairs.before[index].copy(), pairs.after[index].copy()
    other = rng.random(len(index)) < 0.2
    after[other] = rng.integers(-6, 7, other.sum()) / 2.0
    return Pairs(pairs.n, position, size, before, after)


def ratios(pairs, filter, rng):
    """|g - g'| over the bound at the larger of the two scores, and (H, b) of each pair; 0 where nothing is proved."""
    n, a = pairs.n, (pairs.n + 1) / 2
    H = np.maximum(pairs.score(pairs.before), pairs.score(pairs.after))
    if filter == "same":
        best = np.minimum(np.floor(H), n - 1)
        b = np.where(
            rng.random(len(H)) < 0.7, np.round((n + a) / 2), rng.integers(int(a) + 1, n, len(H))
        )
        b = np.minimum(b, best)
        valid = b > a
        b = np.where(valid, b, n - 1)
        c, K_A, K_B = 1 / (b - a), n * (n - H) / (n - a), n * (n - H) / (n - b)
        bound = 2 * np.maximum((1 + K_A * c) / np.maximum(n - K_A, 1e-9), (1 + K_B * c) / n)
        valid &= (n > K_A) & (bound < 2)
        radius = 1.0
    else:
        M = np.ceil(H - 1e-12)
        b, radius = M - 1, 2.0
        valid = b > a
        b = np.where(valid, b, n - 1)
        bound = 4 * (1 + (n - M) / (b - a)) / M

    def weight(counts):
        return np.clip((counts - a) / (b - a)[:, None], 0, 1)

    moves = np.abs(
        pairs.mean(pairs.before, radius, weight) - pairs.mean(pairs.after, radius, weight)
    )
    return np.where(valid, moves / bound, 0.0), H, b


def search(filter, n, many, rounds, seed):
    """Returns the largest ratio, and the largest one among scores below 0.95 n, with the settings where it is."""
    rng = np.random.default_rng(seed)
    pairs, best = random_pairs(rng, n, many), {"any": (0.0, 0.0, 0), "low": (0.0, 0.0, 0)}
    for _ in range(rounds):
        ratio, H, b = ratios(pairs, filter, rng)
        low = np.where(0.95 * n > H, ratio, 0.0)
        for name, values in (("any", ratio), ("low", low)):
            k = int(values.argmax())
            best[name] = max(best[name], (float(values[k]), float(H[k]), int(b[k])))
        pairs = moved(
            rng, pairs, np.concatenate([np.argsort(ratio)[-200:], np.argsort(low)[-200:]])
        )
    return best


def check_search(filter, sizes, many, rounds):
    reached = {"any": 0.0, "low": 0.0}
    for seed, n in enumerate(sizes):
        best = search(filter, n, many, rounds, seed)
        for name, (ratio, H, b) in best.items():
            assert ratio <= 1 + 1e-9, (n, H, b)
            reached[name] = max(reached[name], ratio)
            if ratio > 0:  # the formula of this file is that of the library
                own = (
                    filter_coefficient(n, H, b)
                    if filter == "same"
                    else filter_coefficient_two_radius(n, H, b)
                )
                assert own > 0
    return reached


def test_no_pair_exceeds_the_bound_of_filter_same_and_some_reach_it():
    reached = check_search("same", (8, 9, 21, 40, 100), many=5000, rounds=8)  # 200,000 pairs
    assert reached["any"] > 0.999  # a weak search would prove nothing
    assert reached["low"] > 0.6


def test_no_pair_exceeds_the_bound_of_filter_two_and_some_come_within_five_percent():
    reached = check_search("two", (9, 40, 100, 300), many=5000, rounds=8)
    assert reached["any"] > 0.95
    assert reached["low"] > 0.8


@pytest.mark.weekly
@pytest.mark.parametrize("filter", ["same", "two"])
def test_no_pair_exceeds_the_bound_in_a_long_search(filter):
    sizes = (7, 8, 9, 10, 12, 15, 21, 22, 40, 41, 75, 100, 101, 300, 1000)
    reached = check_search(filter, sizes, many=8_000, rounds=20)
    assert reached["any"] > 0.985


def test_the_search_would_refute_a_bound_that_is_five_percent_too_small():
    rng = np.random.default_rng(0)
    pairs = random_pairs(rng, 100, 5000)
    assert max(ratios(pairs, "same", rng)[0].max(), ratios(pairs, "two", rng)[0].max()) > 0.95


@pytest.mark.slow
@given(
    st.integers(4, 12),
    st.integers(1, 3),
    st.sampled_from(["same", "two"]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=200)
def test_no_pair_of_free_points_exceeds_the_bounds(n, dim, filter, random):
    """Points on a coarse lattice of up to three dimensions, most of them close together."""
    far = np.array([FAR] + [0.0] * (dim - 1))

    def point():
        return np.array(
            [random.choice((-2.0, -1.0, -0.5, 0.0, 0.0, 0.0, 0.5, 1.0, 2.0)) for _ in range(dim)]
        )

    rows = np.stack([point() for _ in range(n)])
    other = rows.copy()
    other[0] = far if random.random() < 0.2 else point()

    def counts(x, radius):
        return (((x[:, None] - x[None]) ** 2).sum(2) <= radius**2).sum(1)

    H, a = max(counts(rows, 1.0).sum(), counts(other, 1.0).sum()) / n, (n + 1) / 2
    try:
        b, coefficient = (
            best_ramp_end(n, H)
            if filter == "same"
            else (math.ceil(H) - 1, filter_coefficient_two_radius(n, H))
        )
    except ConditionError:
        return

    def mean(x):
        w = np.clip((counts(x, 1.0 if filter == "same" else 2.0) - a) / (b - a), 0, 1)
        return (w[w > 0] @ x[w > 0]) / w.sum()

    assert np.linalg.norm(mean(rows) - mean(other)) <= 2 * coefficient * (1 + 1e-12)


def test_membership_probabilities_of_common_users_differ_by_at_most_the_bound():
    """At most n - M of them differ at all, by at most 1/(b - a): what `bernoulli_mismatch` counts."""
    rng = np.random.default_rng(6)
    n, b = 60, 40
    a = (n + 1) / 2
    pairs = random_pairs(rng, n, 20_000)
    H = np.maximum(pairs.score(pairs.before), pairs.score(pairs.after))
    p, q = (
        np.clip((pairs.counts(user, 2.0)[0] - a) / (b - a), 0, 1)
        for user in (pairs.before, pairs.after)
    )
    differ = ((p != q) * pairs.size).sum(1)
    good = np.ceil(H) >= b + 1
    assert good.sum() > 1000
    assert (differ <= n - np.ceil(H))[good].all()
    assert (np.abs(p - q)[pairs.size > 0] <= 1 / (b - a) + 1e-12).all()
    assert (differ[good] > 0).any()
