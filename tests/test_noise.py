"""Noise: its law, how far it is from the ideal one, and that nothing that can be predicted is asked for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

import torch_dpsco as dp
from tests.algorithms.users import same
from tests.contract.registry import ROWS
from tests.contract.runs import records
from tests.streams import Bytes, gaussians, seeded
from torch_dpsco import noise
from torch_dpsco.algorithms.mechanisms import draw_quantile
from torch_dpsco.algorithms.oracles import UserFiltered
from torch_dpsco.estimators import LogisticRegression
from torch_dpsco.noise import (
    Keystream,
    Stream,
    add_normal_,
    exponential_sum,
    noise_generator,
    normal,
    normal_,
)
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.sampling import RankSampler, make_sampler
from torch_dpsco.shuffle_model.oracles import uniform, words

pytestmark = pytest.mark.usefixtures("arithmetic")
FALSE_ALARM = 1e-6
REALS = [torch.float32, torch.float64]
mpmath.mp.prec = 400


class Given(Stream):
    """Gives blocks of bytes, one for each call."""

    def __init__(self, *blocks: bytes) -> None:
        self.left = list(blocks)

    def read(self, size: int) -> bytes:
        block = self.left.pop(0)
        assert len(block) == size
        return block


def pair(word: int, turn: int, more: int, real: torch.dtype) -> tuple[torch.Tensor, int]:
    """Returns the pair of one word of the radius and one of the angle, and how many calls were left over."""
    block = np.array([word], np.int64).tobytes()
    block += np.array([turn], np.int64 if real == torch.float64 else np.int32).tobytes()
    source = Given(block, more.to_bytes(24, "little"))
    return normal_(torch.empty(2, dtype=real), 1.0, source), len(source.left)


# -- the law ----------------------------------------------------------------------------------------------------------


@pytest.mark.real_entropy
@pytest.mark.parametrize("real", REALS, ids=str)
def test_noise_has_mean_variance_and_law_of_the_gaussian(real):
    """Of fresh bits; false-alarm rate 6e-6."""
    values = gaussians(300_001, Keystream(), 3.0, real)
    assert values.dtype == real
    scaled = values.double().numpy() / 3.0
    assert stats.kstest(scaled, "norm").pvalue > FALSE_ALARM
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], len(scaled))
    assert low < (scaled**2).sum() < high
    assert abs(scaled.mean()) < stats.norm.isf(FALSE_ALARM / 2) / math.sqrt(len(scaled))
    cells = np.histogram(stats.norm.cdf(scaled), bins=1000, range=(0, 1))[0]
    assert stats.chisquare(cells).pvalue > FALSE_ALARM
    tail = int((np.abs(scaled) > 3.5).sum())
    law = stats.binom(len(scaled), 2 * stats.norm.sf(3.5))
    assert min(law.cdf(tail), law.sf(tail - 1)) > FALSE_ALARM / 2


@pytest.mark.parametrize("real", REALS, ids=str)
def test_the_two_halves_of_the_pairs_are_independent(real):
    """Cells of the plane of a pair, by ranks; false-alarm rate 2e-6."""
    values = gaussians(100_000, seeded(1), dtype=real).double().numpy()
    first, second = stats.norm.cdf(values[:32768]), stats.norm.cdf(values[32768:65536])
    cells = np.histogram2d(first, second, bins=12, range=[[0, 1], [0, 1]])[0].ravel()
    assert stats.chisquare(cells).pvalue > FALSE_ALARM
    squares = stats.pearsonr(values[:32768] ** 2, values[32768:65536] ** 2)
    assert squares.pvalue > FALSE_ALARM


@pytest.mark.parametrize("size", [0, 1, 2, 3, 511, 512, 513, 65_535, 65_536, 65_537, 200_001])
def test_any_number_of_numbers_is_drawn_once_each(size):
    for real in REALS:
        values = gaussians(size, seeded(size), dtype=real)
        assert len(values) == size
        assert values.isfinite().all()
        assert len(values.double().unique()) >= size - size // 500  # float32 has few numbers


def test_refined_numbers_have_the_law_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every number were at an edge; false-alarm rate 1e-6."""
    monkeypatch.setattr(noise, "_LOW", 0.0)
    values = gaussians(20_000, seeded(2)).numpy()
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("count", [1, 2, 9, 70_000])
def test_sums_of_exponential_numbers_are_gamma(count):
    source = seeded(count)
    sums = [exponential_sum(count, source) for _ in range(4000 if count < 10 else 30)]
    assert stats.kstest(sums, stats.gamma(count).cdf).pvalue > FALSE_ALARM


def test_uniform_numbers_and_words_have_their_bits():
    numbers = uniform((40, 500), seeded(3))
    assert numbers.shape == (40, 500)
    assert numbers.dtype == torch.float64
    assert stats.kstest(numbers.flatten().numpy(), "uniform").pvalue > FALSE_ALARM
    assert torch.equal((numbers * 2**53).round() / 2**53, numbers)
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    assert uniform((2,), Bytes(255)).tolist() == [1 - 2.0**-53] * 2
    drawn = words((30_000,), 3, seeded(4))
    assert stats.chisquare(torch.bincount(drawn, minlength=8).numpy()).pvalue > FALSE_ALARM
    assert words((), 62, Bytes(255)).item() == 2**62 - 1
    assert words((), 62, Bytes(0)).item() == 0


# -- how far it is from the ideal one ---------------------------------------------------------------------------------


def ideal(
    word: int, turn: int, more: int, inside: tuple[float, float], bits: int
) -> tuple[Any, Any, Any]:
    """Returns R, X and Y of a point inside the cell of the words: V, A continuous."""
    k = word if word >= 0 else -word - 1
    v = (mpmath.mpf((k << 192) + more) + inside[0]) / mpmath.mpf(2) ** 255
    angle = 2 * mpmath.pi * (turn + mpmath.mpf(inside[1]) - 0.5) / mpmath.mpf(2) ** bits
    radius = mpmath.sqrt(-2 * mpmath.log(v))
    return radius, radius * mpmath.cos(angle), radius * mpmath.sin(angle)


EDGES = [
    0,
    1,
    2**20,
    2**42,
    2**43 - 1,
    2**43,
    2**43 + 1,
    2**62,
    2**63 - 2**43 - 1,
    2**63 - 2**43,
    2**63 - 2,
    2**63 - 1,
]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("real", REALS, ids=str)
def test_each_number_is_within_its_bound_of_an_ideal_one(real):
    """|X - Z| <= (2^-42 + 2^-48 R), or 2^-19 R in float32, for Z from any point of the cell of bits."""
    rng, bits = np.random.default_rng(5), 64 if real == torch.float64 else 32
    cases = [
        (sign * k - (sign < 0), rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1)))
        for k in EDGES
        for sign in (1, -1)
    ]
    cases += rng.integers(-(2**63), 2**63 - 1, (300, 2)).tolist()
    cases += [
        (int(k) * 2**30, turn) for k, turn in rng.integers(-(2**31), 2**31, (100, 2))
    ]  # beside the edges
    for word, turn in cases:
        turn = int(turn) >> (64 - bits) if abs(int(turn)) >= 2 ** (bits - 1) else int(turn)
        more = int.from_bytes(rng.bytes(24), "little")
        drawn, left = pair(int(word), turn, more, real)
        for inside in ((0.0, 0.0), (0.999, 0.999), (0.5, 0.5)):
            spread = (
                (0.5, inside[1]) if left else inside
            )  # without the further bits, they are what is inside
            radius, *expected = ideal(
                int(word), turn, more if not left else int(inside[0] * 2**192), spread, bits
            )
            bound = 2.0**-42 + 2.0**-48 * radius if bits == 64 else 2.0**-19 * radius
            for value, exact in zip(drawn.tolist(), expected, strict=True):
                assert abs(value - exact) <= bound, (word, turn, inside)


def test_the_tail_is_reached_in_small_steps():
    """Each power of two of V down to 2^-256 is another radius, and so is each of the numbers between."""
    radii = [
        normal_(
            torch.empty(1, dtype=torch.float64),
            1.0,
            Given(bytes(16), (2**k).to_bytes(24, "little")),
        ).item()
        for k in range(192)
    ]
    assert (np.diff(radii) < 0).all()
    assert np.abs(np.diff(radii)).max() < 0.08
    expected = [math.sqrt(-2 * (math.log(2.0**k + 0.5) - 255 * math.log(2))) for k in range(192)]
    np.testing.assert_allclose(radii, expected, rtol=1e-14)
    assert radii[0] > 18.7


def test_all_zeros_and_all_ones_give_the_ends_of_the_support():
    for real in REALS:
        ends = [normal_(torch.empty(5, dtype=real), 2.0, Bytes(value)) for value in (0, 255)]
        assert all(values.isfinite().all() for values in ends)
        assert float(ends[0].abs().max()) == pytest.approx(
            2 * math.sqrt(512 * math.log(2)), rel=1e-6
        )
        assert float(ends[1].abs().max()) == pytest.approx(
            2 * math.sqrt(126 * math.log(2)), rel=1e-6
        )
    assert exponential_sum(3, Bytes(0)) == pytest.approx(3 * 256 * math.log(2), rel=1e-12)


def test_refined_logarithms_are_exact_at_both_ends():
    for k in (0, 1, 2**20, 2**63 - 2**20, 2**63 - 1):
        for more in (0, 1, 2**191, 2**192 - 1):
            v = Fraction(2 * ((k << 192) + more) + 1, 2**256)
            exact = mpmath.log(mpmath.mpf(v.numerator) / v.denominator)
            for word in (k, -k - 1):
                assert noise._refined(word, more) == pytest.approx(float(exact), rel=1e-15)


def test_the_distance_is_below_what_the_docs_say():
    """The cells whose logarithm is not known to 2^-50: k 2^192 + more below 2^50 at either end of 2^255."""
    per_number = Fraction(2 * 2**50, 2**255)
    assert per_number <= Fraction(1, 2**200)
    # 2^64 numbers at epsilon 20: below a thousandth of a delta of 1e-29
    assert (1 + math.exp(20)) * float(Fraction(1, 2**200) * 2**64) < 1e-29 / 1000


@pytest.mark.parametrize(
    "std", [1.0, 0.1, 1 / 3, 1e-3, 7e5, 1e-29, 1e29, 1e-38, 1e-42, 3e37, 1e-300]
)
def test_a_standard_deviation_is_never_rounded_down(std):
    """The radius of given bits times std, in float32: at least the exact product, and at most 2^-20 above it."""
    block = np.array([2**62, 0], np.int64).tobytes()  # R = sqrt(2 log 2), angle 0
    wide = not 2.0**-100 < std < 2.0**100
    value = float(
        normal_(torch.empty(1, dtype=torch.float32), std, Given(block if wide else block[:12]))
    )
    exact = math.sqrt(2 * math.log(2)) * std
    least = float(np.float32(exact)) if wide else exact
    assert least <= value <= exact * (1 + 2.0**-20) + 1e-45


# -- where it goes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("real", REALS, ids=str)
@pytest.mark.parametrize(
    "make", [lambda t: t, lambda t: t.t(), lambda t: t[:, ::2]], ids=["whole", "turned", "gaps"]
)
def test_noise_is_added_to_any_tensor_of_the_host(real, make):
    values = torch.arange(60_000, dtype=real).view(300, 200)
    ours = make(values.clone())
    assert add_normal_(ours, 0.5, seeded(6)) is ours
    plain = gaussians(ours.numel(), seeded(6), 0.5, real).view(ours.shape)
    assert torch.equal(ours, make(values) + plain)
    filled = make(values.clone())
    assert normal_(filled, 0.5, seeded(6)) is filled
    assert torch.equal(filled, plain)


@pytest.mark.parametrize("fill", [normal_, add_normal_])
def test_what_has_no_law_is_refused_by_name(fill):
    numbers = torch.zeros(6, dtype=torch.float64)
    for kind in (
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.bool,
        torch.complex128,
        torch.float8_e5m2,
    ):
        with pytest.raises(
            ValueError, match=f"out must be of torch.float32 or torch.float64 .got {kind}"
        ):
            fill(torch.empty(6, dtype=kind), 1.0, Keystream())
    for std in (-1.0, -1e-300, math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=rf"std must be >= 0 and finite \(got {std}\)"):
            fill(numbers, std, Keystream())
    for shared in (
        numbers[:1].expand(6),
        numbers.as_strided((3, 3), (1, 1)),
        numbers.view(2, 1, 3).expand(2, 4, 3),
    ):
        with pytest.raises(
            ValueError, match=r"out must have each number at a place of its own .got shape"
        ):
            fill(shared, 1.0, Keystream())
    assert not numbers.any()
    assert fill(numbers.view(2, 1, 3).expand(2, 1, 3).transpose(0, 2), 1.0, Keystream()).all()
    assert not fill(torch.zeros(6), 0.0, Keystream()).any()


def test_noise_of_a_large_tensor_is_that_of_its_pieces():
    size = 3 * 2**16 + 5
    drawn, added = (
        gaussians(size, seeded(7)),
        add_normal_(torch.zeros(size, dtype=torch.float64), 1.0, seeded(7)),
    )
    assert torch.equal(drawn, added)
    assert len(drawn.unique()) == size
    assert normal(2.0, seeded(8)) == pytest.approx(2 * normal(1.0, seeded(8)))


# -- nothing that can be predicted ------------------------------------------------------------------------------------

ROWS_HERE = {row.name: row for row in ROWS}
SOME = [
    "holder-poisson-add_remove",
    "holder-fixed-replace_one",
    "clipped-shuffled",
    "clipped-disjoint",
    "clipped-full",
    "accelerated-assigned",
    "clipped-two-phases",
    "localized",
]
DATA = records()
X = np.linspace(-1, 1, 400).reshape(100, 4) / 2


def trained(name: str, run: Any = None) -> None:
    run = run or ROWS_HERE[name].make()
    assert type(run.opt._noise) is Keystream
    with run.opt:
        for batch in run.opt.loader(DATA, steps=None if name == "localized" else 1):
            run.opt.zero_grad()
            run.backward(batch)
            run.opt.step()


def filtered_by_users() -> None:
    oracle = UserFiltered(replace(same(8), noise_std=0.1))
    oracle.open([torch.zeros(1)])
    oracle.observe(
        GradBatch([DenseBlock(torch.arange(8.0)[:, None] / 8)]), users=torch.arange(8)
    )
    oracle.release(noise_generator())


def fitted(**options: Any) -> None:
    options = {
        "epsilon": 1.0,
        "delta": 1e-6,
        "bound_x": 2.0,
        "n": 100,
        "classes": (0, 1),
        **options,
    }
    LogisticRegression(**options).fit(X, np.tile([0, 1], 50))


RELEASES: dict[str, Callable[[], Any]] = {
    **{name: partial(trained, name) for name in SOME},
    "users": filtered_by_users,
    "objective": partial(fitted, mechanism="objective"),
    "output": partial(fitted, mechanism="output"),
    "pure": partial(fitted, mechanism="output", delta=0.0),
    "noisy_gd": partial(fitted, mechanism="noisy_gd"),
    "quantile": lambda: draw_quantile(
        X[:, 0], [0.0, 1.0], 0.5, 1.0, len(X), noise_generator(torch.device("cpu"))
    ),
    "ranks": lambda: list(
        RankSampler(dp.Poisson(5, 50), rank=1, processes=2, key=bytes(32), steps=3).draws()
    ),
    "fixed": lambda: list(make_sampler(dp.Fixed(5, 50)).draws()),
}


class Refused:
    """Stands for torch's class of generators."""

    def __init__(self, *_: Any) -> None:
        raise AssertionError("a generator that can be predicted was made")


def no_other_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets everything of torch and numpy fail that draws Gaussian or uniform numbers, or orders."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a generator that can be predicted was asked")

    for name in ("randn", "rand", "randperm", "normal", "bernoulli", "multinomial", "poisson"):
        monkeypatch.setattr(torch, name, refuse)
    for name in (
        "normal_",
        "uniform_",
        "exponential_",
        "bernoulli_",
        "geometric_",
        "cauchy_",
        "log_normal_",
    ):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    monkeypatch.setattr(torch, "_standard_gamma", refuse)
    for name in (
        "default_rng",
        "Generator",
        "PCG64",
        "PCG64DXSM",
        "MT19937",
        "Philox",
        "SFC64",
        "SeedSequence",
    ):
        monkeypatch.setattr(np.random, name, refuse)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("name", RELEASES)
def test_no_generator_that_can_be_predicted_is_asked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear generators gave all later noise away: 3,400 released float32 numbers held the state of torch's own."""
    made = (
        {"run": ROWS_HERE[name].make()} if name in SOME else {}
    )  # weights are drawn, and then set to 0
    # made-up records of the first step are no secret, nor is the order in which a solver takes records: fixed seeds
    monkeypatch.setattr("torch_dpsco.rows.first_step.FirstStep.waits", False)
    if name not in ("objective", "output", "pure"):
        monkeypatch.setattr(torch, "Generator", Refused)
    no_other_generator(monkeypatch)
    RELEASES[name](**made)


@pytest.mark.parametrize("name", ["clipped-full", "objective", "pure", "users"])
def test_every_release_reads_from_the_keystream(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard of the test above can fail: without the keystream nothing is released."""

    def refuse(size: int) -> bytes:
        raise AssertionError("read")

    monkeypatch.setattr("torch_dpsco.noise._random_bytes", refuse)
    with pytest.raises(AssertionError, match="read"):
        RELEASES[name]()
