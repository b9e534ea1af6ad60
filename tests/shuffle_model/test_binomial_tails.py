"""Tails of binomial laws: at least the exact value, and at most a little above it."""

from __future__ import annotations

import math

import mpmath as mp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpsco.errors import InfeasibleError
from torch_dpsco.shuffle_model.numbers import lower_tail, upper_tail

rates = st.one_of(
    st.sampled_from([0.0, 0.5, 1.0, 1e-300, 5e-324, 1 - 2**-53]), st.floats(0.0, 1.0)
)


def exact_tails(k: int, n: int, p: float) -> tuple[mp.mpf, mp.mpf]:
    """P[Bin(n, p) <= k] and P[Bin(n, p) >= k]."""
    q = mp.mpf(p)
    masses = [math.comb(n, j) * q**j * (1 - q) ** (n - j) for j in range(n + 1)]
    return mp.fsum(masses[: max(k + 1, 0)]), mp.fsum(masses[max(k, 0) :])


@pytest.mark.slow
@given(st.integers(0, 150), rates, st.integers(-2, 152))
def test_tails_are_exact_rounded_up(n, p, k):
    with mp.workdps(400):
        for found, exact in zip(
            (lower_tail(k, n, p), upper_tail(k, n, p)), exact_tails(k, n, p), strict=True
        ):
            assert min(exact, 1) <= found
            assert found <= exact * (1 + mp.mpf("1e-11")) + mp.mpf("2.3e-308")


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("n", "p"), [(2000, 0.5), (2000, 1e-3), (900, 0.9)])
def test_tails_of_thousands_of_trials_are_exact_rounded_up(n, p):
    deviation = math.sqrt(n * p * (1 - p))
    with mp.workdps(60):
        for away in (-6, -1, 0, 1, 6, 12):
            k = int(n * p + away * deviation)
            for found, exact in zip(
                (lower_tail(k, n, p), upper_tail(k, n, p)), exact_tails(k, n, p), strict=True
            ):
                assert (
                    min(exact, 1) <= found <= exact * (1 + mp.mpf("1e-11")) + mp.mpf("2.3e-308")
                )


def test_more_trials_than_the_proof_covers_are_refused():
    assert upper_tail(10**13, 10**13, 1.0) == 1.0
    with pytest.raises(InfeasibleError, match=r"trials of a binomial law must be <= 1e\+13"):
        lower_tail(3, 10**13 + 1, 1e-13)
