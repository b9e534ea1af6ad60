"""Rows that are made to break the declared errors of the accelerator and of float64 norms, by exact rational numbers.

An attack returns the error of some numbers over the error that is declared, at most 1. A search changes the numbers
that come nearest, one by one, to neighbors, other magnitudes and other signs, from random ones and from rows of which
most roundings go one way. The bounds are those of docs/proofs/rounding.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import mpmath
import pytest
import torch
from torch import Tensor

from tests.estimators.test_in_c import exact_gradient
from tests.test_native import INF, NAN, U, V, needed
from torch_dpsco import native
from torch_dpsco.estimators import preparation
from torch_dpsco.estimators.objectives import LinearObjective
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.records import Records
from torch_dpsco.losses import Logistic, ResidualClipped
from torch_dpsco.rows import FactoredBlock, GradBatch, row_norms
from torch_dpsco.step.oracle import Clipped

DOUBLE = torch.float64
EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65)
Numbers = list[float]


@pytest.fixture(params=["C", "torch"])
def each_arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with the accelerator, and without it."""
    if request.param == "torch":
        monkeypatch.setattr(native, "_found", lambda: (None, "off"))
    elif not native.is_available():
        pytest.skip(f"the accelerator is {native.status()}")


# -- numbers that round badly -----------------------------------------------------------------------------------------


def number(draw: random.Random, dtype: torch.dtype) -> float:
    """A number of any magnitude: subnormal, next to a power of two, next to the largest, a signed zero."""
    info = torch.finfo(dtype)
    low, high = math.frexp(info.tiny * info.eps)[1], math.frexp(info.max)[1] - 1
    kind = draw.randrange(8)
    if kind == 0:
        return draw.choice((0.0, -0.0, info.tiny, info.tiny * info.eps, info.max, 1.0))
    size = math.ldexp(1.0, draw.randint(low, high) if kind == 1 else draw.randint(-70, 60))
    mantissa = draw.choice((1.0, 1.0 + info.eps, 2.0 - info.eps, 1.0 + draw.random(), 4 / 3))
    return draw.choice((-1.0, 1.0)) * min(mantissa * size, info.max)


def neighbor(value: float, draw: random.Random, dtype: torch.dtype) -> float:
    """A number near another, or of another kind."""
    kind, eps = draw.randrange(6), torch.finfo(dtype).eps
    if kind == 0:
        return number(draw, dtype)
    if kind == 1:
        return -value
    found = value * draw.choice((0.5, 2.0, 1 + eps, 1 - eps, 1 + 64 * eps, 1.5, eps, 0.9))
    return max(-torch.finfo(dtype).max, min(torch.finfo(dtype).max, found))


def rows_in_odd_memory(values: Numbers, n: int, d: int, dtype: torch.dtype) -> Tensor:
    """Rows that start between the places where vectors are aligned, with NaN before, between and after them."""
    offset, stride = 1 + d % 5, d + 3
    memory = torch.full((offset + n * stride + 8,), NAN, dtype=dtype)
    rows = memory[offset : offset + n * stride].view(n, stride)[:, :d]
    rows.copy_(torch.tensor(values, dtype=DOUBLE).view(n, d).to(dtype))
    return rows


def climb(
    attack: Callable[[Numbers], float], start: Numbers, draw: random.Random, rounds: int,
    dtype: torch.dtype = torch.float32,
) -> float:  # fmt: skip
    """Returns the largest ratio that changes of some numbers of a start find; fails above 1."""
    best, most = list(start), attack(start)
    for _ in range(rounds):
        assert most <= 1, (most, best)
        tried = list(best)
        for _ in range(draw.choice((1, 1, 2, 5))):
            place = draw.randrange(len(tried))
            tried[place] = neighbor(tried[place], draw, dtype)
        found = attack(tried)
        if found >= most:
            best, most = tried, found
    assert most <= 1, (most, best)
    return most


def root(square: Fraction) -> Fraction:
    """The square root, rounded up by at most 2^-200 of it."""
    if not square:
        return square
    shift = 1200 - (square.numerator.bit_length() - square.denominator.bit_length()) // 2
    return (
        Fraction(math.isqrt(math.ceil(square * Fraction(2) ** (2 * shift))) + 1)
        / Fraction(2) ** shift
    )


def squared(values: Numbers) -> Fraction:
    return sum((Fraction(value) ** 2 for value in values), Fraction(0))


# -- norms ------------------------------------------------------------------------------------------------------------


def norm_attack(dtype: torch.dtype, d: int) -> Callable[[Numbers], float]:
    """The exact norm over the certified one; what is added for underflow is no room for what does not."""

    def attack(values: Numbers) -> float:
        row = rows_in_odd_memory(values, 1, d, dtype)
        bound = float(row_norms(row))
        assert not math.isnan(bound)
        return (
            0.0 if math.isinf(bound) else float(root(squared(row[0].tolist())) / Fraction(bound))
        )

    return attack


def check_norms(rounds: int, draw: random.Random) -> None:
    for dtype in (torch.float32, DOUBLE, torch.bfloat16):
        real = DOUBLE if dtype == DOUBLE else torch.float32
        for d in (*EDGES, 1023, 1024, 1025):
            few = rounds if d < 100 else rounds // 20 + 1
            for start in (
                [number(draw, dtype) for _ in range(d)],
                [
                    1.0,
                    *[1.5 * torch.finfo(real).eps ** 0.5] * (d - 1),
                ],  # each square is half lost
                [math.sqrt(2) * (-1) ** j for j in range(d)],
            ):
                climb(norm_attack(dtype, d), start, draw, few, dtype)


@pytest.mark.usefixtures("each_arithmetic")
def test_no_row_is_longer_than_its_certified_norm():
    check_norms(6, random.Random())


@needed
def test_squares_that_are_lost_one_by_one_are_within_the_error_of_a_norm():
    """A chain that stands at a power of two loses nearly half a unit for each further square: the worst there is."""
    row = torch.full((1, 1024), math.sqrt(0.499 * 2.0**-23))
    row[0, :16] = 1.0
    bound, exact = Fraction(float(row_norms(row))), root(squared(row[0].tolist()))
    assert exact <= bound
    assert exact * (1 + Fraction(2) ** -18) >= bound * (
        1 + Fraction(2) ** -20
    )  # a quarter of the room is needed


def factor_attack(dtype: torch.dtype, width: int, bias: bool) -> Callable[[Numbers], float]:
    """The norm of an outer product over the certified one; what underflows in a product of norms is left out."""

    def attack(values: Numbers) -> float:
        a, g = (
            rows_in_odd_memory(part, 1, len(part), dtype)
            for part in (values[:width], values[width:])
        )
        bound = float(FactoredBlock(a, g, bias=bias).norms())
        if not math.isfinite(bound):
            return 0.0
        exact = squared(g[0].tolist()) * (squared(a[0].tolist()) + bias)
        return float(root(exact) / (Fraction(bound) + Fraction(2) ** -1000))

    return attack


@pytest.mark.usefixtures("each_arithmetic")
def test_no_outer_product_is_longer_than_its_certified_norm():
    draw = random.Random()
    for dtype in (torch.float32, DOUBLE):
        for width, out in ((1, 1), (2, 1), (1, 7), (9, 8), (17, 3)):
            for bias in (False, True):
                start = [number(draw, dtype) for _ in range(width + out)]
                worst = climb(factor_attack(dtype, width, bias), start, draw, 15, dtype)
                assert worst <= 1, (dtype, width, out, bias)


# -- sums of outer products -------------------------------------------------------------------------------------------


def outer_attack(n: int, out: int, d: int, tile: int) -> Callable[[Numbers], float]:
    """The largest error of a coordinate over (tile + 4) u of its terms, and of a bias over (n + 5) u64."""

    def attack(values: Numbers) -> float:
        cut, rest = n * d, n * (d + out)
        rows = rows_in_odd_memory(
            [max(-(2.0**60), min(2.0**60, v)) for v in values[:cut]], n, d, torch.float32
        )
        grads = rows_in_odd_memory(
            [max(-(2.0**40), min(2.0**40, v)) for v in values[cut:rest]], n, out, torch.float32
        )
        weights = torch.tensor(
            [abs(v) if 2.0**-60 < abs(v) < 2.0**20 else 0.0 for v in values[rest:]], dtype=DOUBLE
        )
        total, bias = native.outer_sums(grads, rows, weights, tile)
        most = 0.0
        x, g, w = rows.tolist(), grads.tolist(), [Fraction(v) for v in weights.tolist()]
        for o in range(out):
            scaled = [w[i] * Fraction(g[i][o]) for i in range(n)]
            size = sum(map(abs, scaled), Fraction(0))
            error = abs(Fraction(float(bias[o])) - sum(scaled, Fraction(0)))
            most = max(most, float(error / ((n + 5) * U * size + Fraction(2) ** -1000)))
            for j in range(d):
                terms = [s * Fraction(x[i][j]) for i, s in enumerate(scaled)]
                size = sum(map(abs, terms), Fraction(0))
                # a weighted backprop below the least normal number, times an input; a product below it
                lost = sum(
                    (Fraction(2) ** -149 * abs(Fraction(x[i][j])) for i in range(n)), Fraction(0)
                )
                error = abs(Fraction(float(total[o, j])) - sum(terms, Fraction(0)))
                room = (tile + 4) * V * size + lost + (n + 1) * Fraction(2) ** -149
                most = max(most, float(error / room))
        return most

    return attack


def check_outer(rounds: int, draw: random.Random) -> None:
    for n, out, d, tile in (
        (1, 1, 1, 1), (2, 6, 16, 1), (3, 7, 15, 2), (5, 5, 17, 4), (8, 12, 1, 8),
        (9, 1, 8, 8), (17, 2, 3, 16), (33, 1, 2, 32), (15, 13, 9, 64), (7, 3, 65, 3),
    ):  # fmt: skip
        count = n * (d + out + 1)
        mixed = [number(draw, torch.float32) for _ in range(count)]
        lost = [*[1.0] * d, *[0.99 * 2.0**-24] * (d * (n - 1)), *[1.0] * (n * (out + 1))]
        for start in (mixed, lost):
            climb(outer_attack(n, out, d, tile), start, draw, rounds)


@needed
def test_no_sum_of_outer_products_errs_by_more_than_its_chain():
    check_outer(4, random.Random())


@needed
@pytest.mark.parametrize("tile", [8, 32, 64])
def test_products_that_are_lost_one_by_one_are_within_the_error_of_a_sum(tile: int):
    values = [1.0, *[0.499 * 2.0**-23] * (tile - 1), *[1.0] * tile, *[1.0] * tile]
    found = outer_attack(tile, 1, 1, tile)(values)
    assert (tile - 3) / (tile + 4) * 0.9 <= found <= 1


@needed
def test_odd_rows_of_weight_0_leave_a_sum_of_outer_products_as_it_is():
    draw = random.Random()
    for n, out, d in ((1, 1, 1), (4, 6, 16), (5, 7, 17), (33, 13, 65)):
        rows, grads = torch.randn(n, d), torch.randn(n, out)
        weights = torch.rand(n, dtype=DOUBLE) * (torch.arange(n) % 3 > 0)
        clean = native.outer_sums(grads, rows, weights, 4)
        for bad in (NAN, INF, -INF, 3e38, 1e-45, -0.0):
            mine = rows.clone(), grads.clone()
            for part in mine:
                part[weights == 0, draw.randrange(part.shape[1])] = bad
            assert all(map(torch.equal, native.outer_sums(mine[1], mine[0], weights, 4), clean))


@pytest.mark.usefixtures("each_arithmetic")
def test_factors_that_are_read_as_0_leave_a_sum_within_its_claim():
    """One number of a backprop is as long as the clip, the others are subnormal when they are weighted."""
    clip, size, out = 2.0**-39, 64, 2**16
    acts, grads = torch.full((size, 2), 2.0**62.9), torch.full((size, out), 0.5)
    # for weights of 2^-119.5, which are divided by 64: below 2^-126 a row would not count at all
    grads[:, 0] = clip * 2.0**119.5 / float(acts[0].double().norm())
    oracle = Clipped(clip, 0.0, size)
    oracle.open([torch.zeros(out, 2)])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        oracle.observe(GradBatch([FactoredBlock(acts, grads, bias=False)]))
    finally:
        torch.set_flush_denormal(False)
    assert oracle._means is not None
    a, g = acts[0].double(), grads[0].double()
    exact = g[:, None] * a * (clip / float(g.norm() * a.norm()))
    error = float((oracle._means[0].double() - exact)[1:].norm())
    assert error <= (oracle.sensitivity("add_remove") - clip / size) / 2


# -- the linear step --------------------------------------------------------------------------------------------------


def linear_attack(n: int, d: int, slope: str) -> Callable[[Numbers], float]:
    """Rows over the limit, and the sum over (n + 5) u64 of its terms, whose weights are those of each record alone."""
    limit, scale = 0.7, 0.25

    def attack(values: Numbers) -> float:
        rows = rows_in_odd_memory(values[: n * d], n, d, torch.float32)
        targets = torch.tensor(values[n * d : n * (d + 1)])
        weight = torch.tensor(values[n * (d + 1) :])

        def added(part: slice) -> Numbers:
            records = native.Linear(rows[part], targets[part].contiguous(), None, slope)
            return records.sum(limit, scale, weight, -0.3).tolist()

        alone = [added(slice(i, i + 1)) for i in range(n)]
        together, most = added(slice(0, n)), 0.0
        factors = [Fraction(one[d]) for one in alone]
        for i, factor in enumerate(factors):
            if factor:
                length = abs(factor) * root(squared(rows[i].tolist()) + 1)
                most = max(
                    most, float(length / (Fraction(limit) * Fraction(scale) * (1 + 16 * U)))
                )
        for j in range(d + 1):
            terms = [
                f * (Fraction(rows[i, j].item()) if j < d else 1)
                for i, f in enumerate(factors)
                if f
            ]
            room = (n + 5) * U * sum(map(abs, terms), Fraction(0)) + Fraction(2) ** -1000
            most = max(most, float(abs(Fraction(together[j]) - sum(terms, Fraction(0))) / room))
        return most

    return attack


def check_linear(rounds: int, draw: random.Random) -> None:
    for slope in native.SLOPES:
        for n, d in ((1, 1), (1, 16), (4, 7), (5, 17), (3, 33), (9, 8)):
            start = [number(draw, torch.float32) for _ in range(n * (d + 1) + d)]
            climb(linear_attack(n, d, slope), start, draw, rounds)


@needed
def test_no_row_of_a_linear_step_is_longer_than_the_limit_and_no_sum_errs_by_more():
    check_linear(8, random.Random())


# -- records of estimators --------------------------------------------------------------------------------------------


def image_attack(prepare: Preparation, d: int, dtype: torch.dtype) -> Callable[[Numbers], float]:
    """An image over its bound."""

    def attack(values: Numbers) -> float:
        rows = rows_in_odd_memory(values, 1, d, dtype)
        numbers = prepare.numbers(d) if native.is_available() else None
        images = prepare(rows) if numbers is None else native.Table(rows, numbers).images()
        assert bool(images.isfinite().all())
        return float(root(squared(images[0].tolist())) / Fraction(prepare.bound))

    return attack


def preparations(d: int) -> list[Preparation]:
    some = {
        "center": tuple(0.3 * j for j in range(d)),
        "scale": tuple(2.0 ** (j - 3) for j in range(d)),
    }
    sizes = (1e-100, 1e-90, 1.0, 1e90, 1e120, 1e300)
    plain = [Preparation(size) for size in sizes]
    before = [Preparation(1.0, before=size) for size in sizes]
    moved = [
        Preparation(0.75, **some, intercept=0.3, whole=whole, before=before)
        for whole in (False, True)
        for before in (INF, 1.5)
    ]
    wide = [Preparation(1.0, scale=(size,) * d) for size in (2.0**-890, 2.0**890)]
    return plain + before + moved + wide


def check_images(rounds: int, draw: random.Random) -> None:
    for d in (1, 3, 4, 5, 8, 17):
        for dtype in (torch.float32, DOUBLE):
            for prepare in preparations(d):
                start = [number(draw, dtype) for _ in range(d)]
                climb(image_attack(prepare, d, dtype), start, draw, rounds, dtype)


@pytest.mark.usefixtures("each_arithmetic")
def test_no_image_is_longer_than_its_bound():
    check_images(6, random.Random())


def test_bounds_below_all_lengths_are_refused(monkeypatch: pytest.MonkeyPatch):
    """What is left of a row of length 1.4e17 would be a share of 1e-317, whose last bits are missing."""
    for field in ("bound_x", "before"):
        with pytest.raises(
            ValueError, match=rf"{field} must be in \[1e-100, inf\] \(got 1e-300\)"
        ):
            Preparation(**{"bound_x": 1.0, field: 1e-300})
    monkeypatch.setattr(preparation, "_LEAST", 0.0)
    attack = image_attack(Preparation(1e-300), 1, DOUBLE)
    assert attack([1.4411520525572506e17]) > 1


# -- logistic sums ----------------------------------------------------------------------------------------------------


def slope_attack(weight: float, limit: float) -> Callable[[Numbers], float]:
    """Slopes of single records, whose one number is 1, over 11 of the 32 roundings that a certificate counts."""

    def attack(values: Numbers) -> float:
        n = len(values) // 2
        targets = torch.tensor([math.copysign(1.0, v) for v in values[n:]], dtype=DOUBLE)
        rows = torch.tensor(values[:n], dtype=DOUBLE).clamp(
            -800.0, 800.0
        )  # scores, of the point 1
        table = native.Table(rows[:, None], [INF, INF, 0.0, 0.0, 0.0, 0.0, 1.0])
        corner = -INF if limit >= 1 else math.log(1 / limit - 1)
        columns = torch.tensor([weight, 0.0, limit, corner, 0.0], dtype=DOUBLE)[:, None].repeat(
            1, n
        )
        columns[1] = targets
        one = torch.ones(1, dtype=DOUBLE)
        sums = [
            float(table[i : i + 1].scored(columns[:, i : i + 1].contiguous(), one, 1)[0])
            for i in range(n)
        ]
        most = 0.0
        with mpmath.workdps(60):
            for x, y, found in zip(rows.tolist(), targets.tolist(), sums, strict=True):
                exact = -y / (1 + mpmath.exp(mpmath.mpf(y) * x))
                exact = weight * max(-mpmath.mpf(limit), min(mpmath.mpf(limit), exact)) * x
                room = 12 * float(U) * abs(exact) + weight * abs(x) * mpmath.mpf(10) ** -303
                most = max(most, float(abs(found - exact) / (room + mpmath.mpf(2) ** -1000)))
        return most

    return attack


def check_slopes(rounds: int, draw: random.Random) -> None:
    halves = [
        k * math.log(2) / 2 for k in range(-2040, 2041, 40)
    ]  # where the nearest multiple changes
    edges = [0.0, -0.0, 5e-324, 1e-17, 2.0**-54, 699.9999, 700.0, 700.0001, 745.2, 709.8, -700.0]
    for weight, limit in ((1.0, INF), (0.3, INF), (1e-8, 0.25), (3.0, 0.75)):
        for values in (edges, halves, [math.nextafter(h, INF) for h in halves]):
            both = [*values, *[draw.choice((-1.0, 1.0)) for _ in values]]
            climb(slope_attack(weight, limit), both, draw, rounds, DOUBLE)


@needed
def test_no_slope_of_a_logistic_loss_in_c_errs_by_more_than_its_roundings():
    check_slopes(3, random.Random())


def gradient_attack(
    n: int, d: int, loss: Logistic | ResidualClipped
) -> Callable[[Numbers], float]:
    """The error of a gradient over the bound that a certificate takes off."""

    def attack(values: Numbers) -> float:
        values = [max(-1e90, min(1e90, v)) for v in values]
        rows = rows_in_odd_memory(values[: n * d], n, d, DOUBLE)
        targets = torch.tensor(
            [math.copysign(1.0, v) for v in values[n * d : n * (d + 1)]], dtype=DOUBLE
        )
        weights = (torch.arange(n) % 3).double() / 2
        point = torch.tensor(
            [max(-1e3, min(1e3, v)) for v in values[n * (d + 1) :]], dtype=DOUBLE
        )
        records = Records(rows, targets, weights, prepare=Preparation(2.0))
        assert records.in_c
        objective = LinearObjective(loss, records, reg=0.0, normalizer=1.0)
        _, gradient = objective.value_and_gradient(point)
        images = records.select(torch.arange(n))
        exact = exact_gradient(
            images, targets, loss.limits(records.norms), records.weights, point
        )
        found = float((gradient - exact).norm())
        return found / (
            objective.gradient_error(point) + float(exact.norm()) * 2.0**-53 + 1e-290
        )

    return attack


def check_gradients(rounds: int, draw: random.Random) -> None:
    for n, d in ((1, 1), (3, 5), (5, 4), (33, 3), (9, 17)):
        for loss in (Logistic(), ResidualClipped(Logistic(), 0.4)):
            start = [number(draw, DOUBLE) for _ in range(n * (d + 1) + d)]
            near = [draw.uniform(-2, 2) for _ in start]
            for values in (start, near):
                climb(gradient_attack(n, d, loss), values, draw, rounds, DOUBLE)


@needed
def test_no_logistic_gradient_in_c_errs_by_more_than_its_certificate_allows():
    check_gradients(3, random.Random())


# -- Gram matrices ----------------------------------------------------------------------------------------------------


def gram_attack(n: int, d: int) -> Callable[[Numbers], float]:
    """The error of an entry over (n + 3) u of its terms: two products and n additions."""

    def attack(values: Numbers) -> float:
        values = [max(-1e60, min(1e60, v)) for v in values]
        rows = rows_in_odd_memory(values[: n * d], n, d, DOUBLE)
        weights = torch.tensor(
            [v if abs(v) > 1e-60 else 0.0 for v in values[n * d :]], dtype=DOUBLE
        )
        table = native.Table(rows, [INF, INF, 0.0, 0.0, 0.0, *[0.0] * d, *[1.0] * d])
        found, most = table.gram(weights, 0, n), 0.0
        assert torch.equal(found, found.T)
        x, w = rows.tolist(), [Fraction(v) for v in weights.tolist()]
        for i in range(d):
            for j in range(i, d):
                terms = [w[r] * Fraction(x[r][i]) * Fraction(x[r][j]) for r in range(n)]
                room = (n + 3) * U * sum(map(abs, terms), Fraction(0))
                lost = (
                    n * Fraction(2) ** -1074 * Fraction(10) ** 61
                )  # a weighted number that underflows
                error = abs(Fraction(float(found[i, j])) - sum(terms, Fraction(0)))
                most = max(most, float(error / (room + lost)))
        return most

    return attack


def check_grams(rounds: int, draw: random.Random) -> None:
    for n, d in ((1, 1), (3, 7), (5, 8), (9, 9), (33, 4), (65, 1)):
        lost = [*[1.0] * d, *[2.0**-27] * ((n - 1) * d), *[1.0] * n]
        for start in ([number(draw, DOUBLE) for _ in range(n * (d + 1))], lost):
            climb(gram_attack(n, d), start, draw, rounds, DOUBLE)


@needed
def test_no_gram_matrix_in_c_errs_by_more_than_its_additions():
    check_grams(4, random.Random())


CHECKS = (
    check_norms, check_outer, check_linear, check_images, check_slopes, check_gradients, check_grams,
)  # fmt: skip


@pytest.mark.weekly
@needed
@pytest.mark.parametrize("check", CHECKS)
def test_long_attacks_find_nothing(check: Callable[[int, random.Random], None]):
    seed = random.SystemRandom().getrandbits(32)
    try:
        check(150, random.Random(seed))
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
