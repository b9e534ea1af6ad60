"""The accelerator against exact arithmetic and against torch; what it must not read; kernels that are wrong.

`test_noise.py`, `rows/test_norms.py`, `test_summation.py` and `algorithms/test_closed_form.py` run with it
and without it.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.streams import seeded
from torch_dpsco import native
from torch_dpsco.noise import normal_
from torch_dpsco.rows import FactoredBlock, GradBatch
from torch_dpsco.step.oracle import Clipped

SOURCE = Path(native.__file__).parent / "_kernel.c"
U, V = Fraction(1, 2**53), Fraction(1, 2**24)  # units of float64 and float32
NAN, INF = math.nan, math.inf
needed = pytest.mark.skipif(
    not native.is_available(), reason=f"the accelerator is {native.status()}"
)


# -- whether it is used -----------------------------------------------------------------------------------------------


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes a folder the one where the accelerator is looked for."""
    monkeypatch.setattr(native, "_HERE", tmp_path)
    monkeypatch.delenv("TORCH_DPSCO_NATIVE", raising=False)
    native._found.cache_clear()
    yield tmp_path
    native._found.cache_clear()


def test_without_a_library_torch_computes(searched: Path):
    assert native.status().startswith("not built: install torch_dpsco again")
    assert not native.suits(torch.ones(2, 2))


def test_a_file_that_is_no_library_is_not_used(searched: Path):
    (searched / "_kernel.bin").write_bytes(b"no library")
    assert native.status().startswith("not usable: ")


@needed
def test_a_library_of_another_text_is_not_used(searched: Path):
    [library] = SOURCE.parent.glob("_kernel.bin")
    shutil.copy(library, searched)
    (searched / SOURCE.name).write_text(SOURCE.read_text() + "\n")
    assert (
        native.status() == "built from another version of _kernel.c: install torch_dpsco again"
    )
    native._found.cache_clear()
    shutil.copy(SOURCE, searched)
    assert native.status() == "in use"


@pytest.mark.slow
def test_the_environment_switches_it_off():
    script = "from torch_dpsco import native; print(native.status(), native.is_available())"
    environment = os.environ | {"TORCH_DPSCO_NATIVE": "off"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "off (TORCH_DPSCO_NATIVE=off) False"


@needed
@pytest.mark.parametrize(
    ("rows", "suits"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(0, 4), True),
        (torch.ones(3, 8)[:, :4], True),
        (torch.ones(4, 3).T, False),
        (torch.ones(3, 8)[:, ::2], False),
        (torch.ones(3, 4, dtype=torch.float64), False),
        (torch.ones(3, 4, dtype=torch.bfloat16), False),
        (torch.ones(3, 4, device="meta"), False),
        (torch.ones(3, 4).to_sparse(), False),
        (torch.ones(3, 4, dtype=torch.complex64).conj().imag[:, :1], False),
        (torch.nn.Parameter(torch.ones(3, 4)), False),
        (torch.ones(3, 0), False),
        (torch.ones(12), False),
    ],
)
def test_only_rows_of_float32_side_by_side_are_read(rows: Tensor, suits: bool):
    assert native.suits(rows) is suits


# -- sums and norms ---------------------------------------------------------------------------------------------------


def exact_sum(rows: Tensor, weights: Tensor) -> tuple[list[Fraction], list[Fraction]]:
    """Returns the sum of weighted rows, and that of the absolute values."""
    found, sizes = [Fraction(0)] * rows.shape[1], [Fraction(0)] * rows.shape[1]
    for row, weight in zip(rows.tolist(), weights.tolist(), strict=True):
        for j, number in enumerate(row if weight else []):
            found[j] += Fraction(weight) * Fraction(number)
            sizes[j] += abs(Fraction(weight) * Fraction(number))
    return found, sizes


def rows_of(kind: str, n: int, d: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * n + d)
    rows = torch.randn(n, d, generator=generator)
    if kind == "scales":
        rows *= torch.logspace(-40, 15, n * d).view(n, d)
    if kind == "equal":
        rows = torch.full((n, d), 1.0000077)
    if kind == "cancelling":
        rows[1::2] = -rows[0 : n - 1 : 2] * (1 + 2.0**-20)
    return rows


def check_sums() -> None:
    for kind in ("normal", "scales", "equal", "cancelling"):
        for n, d in ((0, 3), (1, 1), (3, 5), (4, 16), (5, 17), (9, 40), (130, 33)):
            rows = torch.cat(
                [rows_of(kind, n, d), torch.full((2, d), NAN), torch.full((1, d), INF)]
            )
            weights = torch.cat(
                [
                    torch.logspace(-3, 0, n, dtype=torch.float64),
                    torch.zeros(3, dtype=torch.float64),
                ]
            )
            if n > 2:
                rows[1], weights[1] = NAN, 0.0
            start = torch.ones(d, dtype=torch.float64)
            total = native.add_weighted(rows, weights, start.clone())
            found, sizes = exact_sum(rows, weights)
            for value, exact, size in zip(total.tolist(), found, sizes, strict=True):
                assert math.isfinite(value)
                assert abs(Fraction(value) - exact - 1) <= (n + 5) * U * (size + 1)


def check_norms() -> None:
    for kind in ("normal", "scales", "equal"):
        for n, d in ((1, 1), (3, 5), (4, 16), (5, 17), (3, 2000)):
            rows = rows_of(kind, n, d)
            for row, bound in zip(rows.tolist(), native.norms(rows).tolist(), strict=True):
                square = sum((Fraction(x) ** 2 for x in row), Fraction(0))
                assert square <= Fraction(bound) ** 2
                assert Fraction(bound) <= Fraction(
                    math.sqrt(square) * (1 + 2.0**-17) + 2.0**-63 * d
                )
    bad = torch.tensor([[NAN, 0.0], [INF, 0.0], [1.9e19, 0.0], [1.8e19, 0.0], [3e38, 3e38]])
    bounds = native.norms(bad).tolist()
    assert math.isnan(bounds[0])
    assert [math.isinf(bound) for bound in bounds[1:]] == [True, True, False, True]


def check_outer() -> None:
    """Each product of a tile is rounded at most tile + 2 times, and the sum once."""
    for kind in ("normal", "scales", "equal", "cancelling"):
        for n, out, d, tile in (
            (0, 2, 3, 8),
            (1, 1, 1, 1),
            (5, 2, 17, 4),
            (9, 13, 16, 64),
            (3, 6, 70, 2),
            (400, 7, 5, 4),
        ):
            rows, grads = (
                rows_of(kind, n, d),
                rows_of(kind if kind == "equal" else "normal", n, out + 3)[:, 3:],
            )
            rows, grads = (
                torch.cat([rows, torch.full((2, d), NAN)]),
                torch.cat([grads, torch.full((2, out), INF)]),
            )
            weights = torch.cat(
                [
                    torch.logspace(-3, 0, n, dtype=torch.float64),
                    torch.zeros(2, dtype=torch.float64),
                ]
            )
            weights[2 : n - 3 : 4] = 0.0
            total, bias = native.outer_sums(grads, rows, weights, tile)
            for o, line in enumerate(total.tolist()):
                kept = weights > 0
                found, sizes = exact_sum(rows[kept], (weights * grads[:, o].double())[kept])
                for value, exact, size in zip(line, found, sizes, strict=True):
                    assert math.isfinite(value)
                    assert (
                        abs(Fraction(value) - exact)
                        <= (tile + 4) * V * size + Fraction(2) ** -140
                    )
            sums, sizes = exact_sum(grads, weights)
            for value, exact, size in zip(bias.tolist(), sums, sizes, strict=True):
                assert math.isfinite(value)
                assert abs(Fraction(value) - exact) <= (n + 5) * U * size


@needed
def test_sums_of_outer_products_in_c_err_by_at_most_their_chain():
    check_outer()


@needed
def test_sums_in_c_err_by_at_most_what_float64_may():
    check_sums()


@needed
def test_norms_in_c_are_never_below_the_exact_norm():
    check_norms()


@needed
def test_norms_in_c_cover_what_is_read_as_zero():
    assert torch.set_flush_denormal(True)
    try:
        for number in (2.0**-127, 2.0**-64):
            assert float(native.norms(torch.full((1, 900), number))) >= 30.0 * number
    finally:
        torch.set_flush_denormal(False)


def add_linear(
    rows: Tensor,
    targets: Tensor,
    factors: Tensor | None,
    total: Tensor,
    *,
    slope: str = "given",
    **given: Any,
) -> Tensor:
    return total.add_(native.Linear(rows, targets, factors, slope).sum(**given))


# -- the linear step --------------------------------------------------------------------------------------------------

SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "given": lambda scores, targets: targets,
    "sign": lambda scores, targets: torch.sigmoid(scores * targets) * targets,
    "logistic": lambda scores, targets: torch.sigmoid(scores) - targets,
    "square": lambda scores, targets: 2.0 * (scores - targets),
}
STEEPEST = {"given": 0.0, "sign": 0.25, "logistic": 0.25, "square": 2.0}


def problem(n: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n + d)
    rows = (
        torch.randn(n, d, generator=generator)
        * torch.logspace(-2, 1, max(n, 1))[:n, None]
        / math.sqrt(d)
    )
    return (
        rows,
        torch.randint(2, (n,), generator=generator) * 2.0 - 1.0,
        torch.randn(d, generator=generator),
    )


def check_linear() -> None:
    """Each slope is that of the exact score within the errors of float32; clip and sum are those of float64."""
    for kind, slope in SLOPES.items():
        for n, d in ((0, 3), (1, 1), (3, 5), (4, 16), (7, 17), (37, 100), (130, 33)):
            rows, targets, weight = problem(n, d)
            lengths = (rows.double().square().sum(1) + 1.0).sqrt()
            for factors in (None, lengths * (1 + 2.0**-30)):
                for index in (None, torch.arange(n).flip(0)[: n // 2 + 1]):
                    total = add_linear(
                        rows, targets, factors, torch.zeros(d + 1, dtype=torch.float64), limit=0.7, scale=0.25,
                        slope=kind, weight=weight, bias=0.3, index=index,
                    )  # fmt: skip
                    some = slice(None) if index is None else index
                    x, y, f = rows[some].double(), targets[some].double(), lengths[some]
                    scores = x @ weight.double() + 0.3
                    cut = (slope(scores, y) * f).clamp(-0.7, 0.7) / f
                    expected = 0.25 * torch.cat([cut @ x, cut.sum()[None]])
                    error = (
                        STEEPEST[kind]
                        * float(V)
                        * (d + 4)
                        * (x.abs() @ weight.double().abs() + 0.3)
                    )
                    error = (
                        error + 2 * float(V) * (1 + scores.abs()) + 2.0**-28
                    ) * f  # of a length
                    assert float((total - expected).norm()) <= 0.25 * float(error.sum()) + 1e-15


def check_clip() -> None:
    """No row is longer than the limit, and what is no number counts for nothing."""
    for kind in SLOPES:
        for size in (1e-30, 1.0, 1e15):
            rows, targets, weight = problem(9, 20)
            rows, longest = rows / rows.norm(dim=1, keepdim=True) * size, Fraction(0)
            for i in range(len(rows)):
                total = add_linear(
                    rows[i : i + 1], 1e6 * targets[i : i + 1], None, torch.zeros(21, dtype=torch.float64), limit=0.5,
                    scale=1.0, slope=kind, weight=weight, bias=0.3,
                )  # fmt: skip
                square = sum((Fraction(v) ** 2 for v in total.tolist()), Fraction(0))
                longest = max(longest, square)
            assert Fraction(0.49) ** 2 < longest <= (Fraction(0.5) * (1 + 16 * U)) ** 2


def check_bad_rows() -> None:
    rows, targets, weight = problem(12, 20)
    clean = None
    for bad in (None, NAN, INF, -INF, 3e38):
        for place, kind in ((0, "sign"), (5, "logistic"), (11, "square"), (2, "given")):
            mine, labels = rows.clone(), targets.clone()
            keep = torch.tensor([i for i in range(12) if i != place])
            clean = add_linear(
                rows, targets, None, torch.zeros(21, dtype=torch.float64), limit=0.5, scale=1.0, slope=kind,
                weight=weight, index=keep,
            )  # fmt: skip
            if bad is None:
                labels[place] = NAN
            else:
                mine[place, 3] = bad
            found = add_linear(
                mine, labels, None, torch.zeros(21, dtype=torch.float64), limit=0.5, scale=1.0, slope=kind,
                weight=weight,
            )  # fmt: skip
            torch.testing.assert_close(found, clean, rtol=0.0, atol=1e-14)

    for slope, factor in ((INF, 1.0), (-INF, 1.0), (NAN, 1.0), (1.0, 2.0**64), (1.0, NAN)):
        factors = torch.full((12,), 2.0, dtype=torch.float64)
        labels = targets.clone()
        labels[4], factors[4] = slope, factor
        mine = rows.clone()
        mine[4] = 1e18
        total = add_linear(
            mine, labels, factors, torch.zeros(21, dtype=torch.float64), limit=0.5, scale=1.0
        )
        labels[4], factors[4] = 0.0, 2.0
        without = add_linear(
            rows, labels, factors, torch.zeros(21, dtype=torch.float64), limit=0.5, scale=1.0
        )
        torch.testing.assert_close(total, without, rtol=0.0, atol=1e-14)


def check_isolation() -> None:
    """The row of a record has the same bits wherever it stands, whatever the others hold."""
    rows, targets, weight = problem(23, 37)
    for place in range(23):
        alone = None
        for others in (1.0, 1e10, NAN):
            mine = torch.full_like(rows, others)
            mine[place] = rows[place]
            labels = torch.full_like(targets, 0.25)
            labels[place] = targets[place]
            factors = torch.full((23,), INF, dtype=torch.float64)  # the others count for nothing
            factors[place] = 3.0
            for index in (None, torch.arange(23).roll(place)):
                found = add_linear(
                    mine, labels, factors, torch.zeros(38, dtype=torch.float64), limit=0.5, scale=1.0, slope="sign",
                    weight=weight, bias=0.1, index=index,
                )  # fmt: skip
                assert alone is None or torch.equal(found, alone)
                alone = found


def check_slopes() -> None:
    """Slopes alone are those of the step: of the exact score, and of the record alone."""
    for kind, slope in SLOPES.items():
        for n, d in ((0, 3), (1, 1), (5, 17), (37, 100)):
            rows, targets, weight = problem(n, d)
            found = native.slopes(rows, targets, weight, 0.3, kind)
            scores = rows.double() @ weight.double() + 0.3
            size = rows.double().abs() @ weight.double().abs() + 0.3
            error = STEEPEST[kind] * float(V) * (d + 4) * size + 2 * float(V) * (
                1 + scores.abs()
            )
            assert ((found - slope(scores, targets.double())).abs() <= error + 2.0**-28).all()
            for i in range(n):
                part = slice(i, i + 1)
                assert torch.equal(
                    native.slopes(rows[part], targets[part], weight, 0.3, kind), found[part]
                )


def check_hard_rows() -> None:
    """The sum is that of single rows, whatever is among them: subnormal, huge, equal, opposite or not finite ones."""
    tiny, huge = torch.full((20,), 1e-42), torch.full((20,), 1e30)
    base = torch.linspace(-1.0, 1.0, 20)
    some = [
        tiny,
        huge,
        base,
        -base,
        1e18 * base,
        1e-20 * base,
        torch.full((20,), NAN),
        INF * base,
    ]
    some += [torch.zeros(20), *[base] * 41, *[1e6 * base, -1e6 * base] * 7]
    rows, weight = torch.stack(some), torch.linspace(1.0, 2.0, 20)
    targets = torch.ones(len(rows))
    for kind in SLOPES:
        for n in (1, 2, 9, len(rows)):
            single = [
                add_linear(
                    rows, targets, None, torch.zeros(21, dtype=torch.float64), limit=0.5,
                    scale=0.125, slope=kind, weight=weight, bias=-0.2, index=torch.tensor([i]),
                )
                for i in range(n)
            ]  # fmt: skip
            exact = [
                sum((Fraction(float(v[j])) for v in single), Fraction(0)) for j in range(21)
            ]
            terms = torch.stack(single).abs().sum(0).tolist()
            total = add_linear(
                rows[:n], targets[:n], None, torch.zeros(21, dtype=torch.float64), limit=0.5,
                scale=0.125, slope=kind, weight=weight, bias=-0.2,
            )  # fmt: skip
            for j in range(21):
                assert abs(Fraction(float(total[j])) - exact[j]) <= (n + 2) * U * Fraction(
                    terms[j]
                )
            assert all(float(v.norm()) <= 0.5 * 0.125 * (1 + 2.0**-48) for v in single)


def true_gap(word: int, rate: float) -> tuple[int, int]:
    """Returns the gaps at both ends of what a word says of V."""
    with mpmath.mp.workprec(300):
        ends = [mpmath.mpf(word + end) / 2**63 for end in (0, 1)]
        miss = mpmath.log1p(-mpmath.mpf(rate))
        return tuple(int(mpmath.floor(mpmath.log(v) / miss)) if v else 2**80 for v in ends)


def check_gaps() -> None:
    """Positions are those of true gaps; a word that does not decide its own is never taken."""
    for rate in (1e-6, 256 / 60_000, 0.3, 0.97):
        room = -(2.0**-40) / math.log1p(-rate)
        words = np.random.default_rng(1).integers(0, 2**63, 50).tolist()
        for k in (1, 2, 30):  # where a gap ends, and on either side of it, farther and farther
            with mpmath.mp.workprec(300):
                edge = int((1 - mpmath.mpf(rate)) ** k * 2**63)
            words += [edge, *(edge + s * 2**b for b in (0, 4, 20, 24, 30, 45) for s in (-1, 1))]
        words += [0, 1, 2**39, 2**40 + 2**20, 2**63 - 1, 2**63 - 2**30, 2**63 - 2**45]
        words = [word for word in words if 0 <= word < 2**63]
        decided = 0
        for word in words:
            low, high = true_gap(word, rate)
            found = native.gaps(
                (2 * word).to_bytes(8, "little"), math.log1p(-rate), room, 10**9, -1
            )
            assert found is None or found.tolist() == [low] == [high], (rate, word)
            decided += found is not None
        assert decided >= 50
        bits = np.array(words[:50], dtype=np.uint64) * 2
        expected = np.cumsum([true_gap(word, rate)[0] + 1 for word in words[:50]]) + 4
        for size in (10**9, int(expected[7]), int(expected[7]) + 1, 6):
            inside = int((expected < size).sum())
            found = native.gaps(bits.tobytes(), math.log1p(-rate), room, size, 4)
            assert found.tolist()[:inside] == expected[:inside].tolist()
            assert len(found) == min(50, inside + 1)
            assert (found[inside:] >= size).all()


@needed
@pytest.mark.parametrize(
    "check", [check_linear, check_clip, check_bad_rows, check_isolation, check_hard_rows]
)
def test_the_linear_step_in_c(check: Callable[[], None]):
    check()


@needed
def test_slopes_in_c_are_those_of_the_linear_step():
    check_slopes()


@needed
def test_gaps_in_c_are_the_true_ones_or_left_to_more_bits():
    check_gaps()


@needed
@pytest.mark.parametrize("bad", [-1, 9, 2**40])
def test_records_outside_of_the_data_set_are_refused(bad: int):
    rows, targets, weight = problem(9, 4)
    total = torch.zeros(5, dtype=torch.float64)
    with pytest.raises(IndexError, match=r"index must be in \[0, 9\)"):
        add_linear(
            rows,
            targets,
            None,
            total,
            limit=1.0,
            scale=1.0,
            slope="sign",
            weight=weight,
            index=torch.tensor([0, bad]),
        )
    assert not total.any()


@needed
@pytest.mark.parametrize("n", [1, 5, 400])
@pytest.mark.parametrize("where", ["added", "first", "last"])
def test_a_record_moves_a_linear_sum_in_c_by_at_most_its_sensitivity(n: int, where: str):
    generator = torch.Generator().manual_seed(n)
    features, slopes = (
        torch.randn(n + 1, 50, generator=generator),
        1e3 * torch.randn(n + 1, generator=generator),
    )
    place = {"added": n // 2, "first": 0, "last": n}[where]
    kept = torch.tensor([i for i in range(n + 1) if i != place])
    oracle, means = Clipped(0.3, 0.0, 400), []
    for index in (torch.arange(n + 1), kept):
        oracle.open([torch.zeros(1, 50), torch.zeros(1)])
        oracle.observe(GradBatch([FactoredBlock(features[index], slopes[index][:, None])]))
        total = oracle._total
        assert total is not None
        means.append(total.clone())
    moved = float((means[0] - means[1]).norm())
    assert 0.99 * 0.3 / 400 <= moved <= oracle.sensitivity("add_remove")


def test_several_processes_declare_the_error_of_float32(monkeypatch: pytest.MonkeyPatch):
    query = [torch.zeros(1, 5000), torch.zeros(1)]
    alone, several, without = (Clipped(1.0, 1.0, 512) for _ in range(3))
    alone.open(query)
    several.open(query)
    several.share(2)
    declared = several.noise_std
    several.open(query)
    assert several.noise_std == declared
    monkeypatch.setattr(native, "_found", lambda: (None, "off"))
    without.open(query)
    assert several.noise_std == without.noise_std
    assert alone.noise_std <= without.noise_std * (1 - 1e-4 * native.is_available())


@needed
def test_parameters_elsewhere_declare_the_error_of_float32() -> None:
    """The accelerator adds on the CPU only."""
    oracle = Clipped(1.0, 1.0, 512)
    oracle.open([torch.zeros(1, 5000)])
    form = [(torch.Size([1, 5000]), torch.float32, torch.device("mps"))]
    assert oracle._planned(form).error > oracle._summation.error


# -- noise ------------------------------------------------------------------------------------------------------------


def check_noise() -> None:
    errors = (torch.float32, 2.0**-18), (torch.float64, 2.0**-41)
    for size, (real, error) in itertools.product((1, 2, 7, 8, 15, 16, 17, 1023, 70_003), errors):
        for mean in (None, torch.linspace(-1, 1, size, dtype=torch.float64)):
            found = normal_(torch.empty(size, dtype=real), 1.5, seeded(size), mean)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(native, "_found", lambda: (None, "off"))
                expected = normal_(torch.empty(size, dtype=real), 1.5, seeded(size), mean)
            room = 1.5 * error * (1 + expected.abs().max())
            assert float((found - expected).abs().max()) <= room


def check_edges_of_noise() -> None:
    """Words whose V is beyond 2^-20 of 0 or 1 are counted, and radii are right up to there."""
    half, places = 2**62, ((pairs, place) for pairs in (1, 8, 13) for place in range(pairs))
    for (pairs, place), size, less in itertools.product(places, (4, 8), (0, 1)):
        real = torch.float32 if size == 4 else torch.float64
        out = torch.empty(2 * pairs - less, dtype=real)
        for word, beyond in (
            (0, 1),
            (2**43 - 2**30, 1),
            (2**43 + 2**30, 0),
            (2**63 - 2**43 - 2**30, 0),
            (2**63 - 2**43 + 2**30, 1),
        ):
            bits = np.full(pairs, half)
            bits[place] = word
            given = bits.tobytes() + bytes(
                pairs * size
            )  # angles 0, so that the first half are the radii
            assert native.gaussians(given, out, 1.0, -20 * math.log(2), -(2.0**-20)) == beyond
            log = (
                math.log((word + 0.5) / 2**63)
                if word < half
                else math.log1p((word - 2**63 + 0.5) / 2**63)
            )
            assert out[place].item() == pytest.approx(math.sqrt(-2 * log), rel=2.0**-20)


@needed
def test_noise_in_c_is_that_of_torch_from_the_same_bits():
    check_noise()
    check_edges_of_noise()


@needed
@pytest.mark.parametrize(("real", "size"), [(torch.float32, 4), (torch.float64, 8)])
def test_too_few_bits_are_refused(real: torch.dtype, size: int):
    out = torch.zeros(5, dtype=real)
    with pytest.raises(ValueError, match="bits must be enough for 5 numbers"):
        native.gaussians(bytes(3 * (8 + size) - 1), out, 1.0, -INF, 0.0)
    assert not out.any()


@needed
def test_memory_of_another_kind_is_refused():
    rows, targets, weight = problem(4, 3)
    total, weights = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    strided = targets.repeat_interleave(2)[::2]
    refused: list[Callable[[], object]] = [
        lambda: native.add_weighted(rows, weights[:3], total[:3]),
        lambda: native.add_weighted(rows, weights, total),
        lambda: add_linear(rows, targets[:3], None, total, limit=1.0, scale=1.0),
        lambda: add_linear(rows, strided, None, total, limit=1.0, scale=1.0),
        lambda: add_linear(rows, targets.double(), None, total, limit=1.0, scale=1.0),
        lambda: add_linear(rows, targets, weights.float(), total, limit=1.0, scale=1.0),
        lambda: add_linear(
            rows,
            targets,
            None,
            total,
            limit=1.0,
            scale=1.0,
            index=torch.arange(4, dtype=torch.int32),
        ),
        lambda: add_linear(
            rows, targets, None, total, limit=1.0, scale=1.0, index=torch.arange(8)[::2]
        ),
        lambda: add_linear(rows, targets, weights[:3], total, limit=1.0, scale=1.0),
        lambda: add_linear(
            rows, targets, None, total, limit=1.0, scale=1.0, slope="sign", weight=weight[:2]
        ),
        lambda: native.outer_sums(rows, rows, weights[:3], 4),
        lambda: native.outer_sums(rows, rows, weights.float(), 4),
        lambda: native.gaussians(bytes(100), torch.zeros(4), 1.0, -INF, 0.0, total[:3]),
    ]
    for call in refused:
        with pytest.raises(ValueError, match="memory for C must be"):
            call()
    assert not total.any()


# -- wrong kernels ----------------------------------------------------------------------------------------------------

ALL = (
    check_sums,
    check_norms,
    check_outer,
    check_linear,
    check_clip,
    check_bad_rows,
    check_isolation,
    check_noise,
)
ALL += (check_edges_of_noise, check_slopes, check_hard_rows, check_gaps)
MUTATIONS = {
    "gaps that words do not decide": ("!(beside > room && beside < 1.0 - room)", "0"),
    "a gap below an integer": ("beside > room && beside", "beside"),
    "a gap above an integer": ("&& beside < 1.0 - room", ""),
    "few bits of a gap": ("w[r] < FEW || ", ""),
    "a bit of a gap twice": ("w >>= 1;", ""),
    "a position twice": ("last += gap + 1", "last += gap"),
    "a position outside": ("if (last >= size)", "if (last > size)"),
    "a long gap": (
        "quotient[r] < most ? (int64_t)quotient[r] : size + 1",
        "(int64_t)quotient[r] & 15",
    ),
    "slopes without their bias": (
        "weight, x->d) + (double)bias, target);",
        "weight, x->d), target);",
    ),
    "no clip": ("length > most, most,", "length > most, length,"),
    "no clip below": ("length < -most, -most, length", "length < -most, length, length"),
    "infinite rows count": ("(length < infinite) & ", ""),
    "huge rows count": (" & (factor < largest)", ""),
    "rows of weight 0 are read": (
        "if (weight[r] == 0.0) p[r] = kept;",
        "if (!kept) p[r] = kept;",
    ),
    "the last row twice": (
        "target = {0}, factor = {INFINITY, INFINITY, INFINITY, INFINITY};",
        "target = {1, 1, 1, 1}, factor = {2, 2, 2, 2};",
    ),
    "norms without room": ("norm * (1.0 + NORM_ERROR) + HIDDEN * sqrt((double)d)", "norm"),
    "half of a norm": ("f8 both = a[r] + b[r];", "f8 both = a[r];"),
    "a factor without the 1": ("sqrt(norm[r] * norm[r] + 1.0)", "norm[r]"),
    "one chain of all products": ("start + tile < n ? start + tile : n", "n"),
    "inputs of weight 0 are read": ("if (weights[i] == 0.0) continue;", ""),
    "backprops of weight 0 are read": (
        "if (w == 0.0) memset(row, 0, 4 * out);",
        "w = w == 0.0 ? 1e-300 : w;",
    ),
    "the first tile only": (
        "for (int64_t start = 0; start < n; start += tile) {",
        "for (int64_t start = 0; !start; start = 1) {",
    ),
    "a panel too little": (
        "(x->d - start + BROAD - 1) / BROAD",
        "(x->d - start + BROAD - 2) / BROAD",
    ),
    "a column twice": (
        "for (; j < d; j++)\n        for (int r",
        "for (j -= j > 0; j < d; j++)\n        for (int r",
    ),
    "a score of the next row": (
        "NAME(load8)(p[r] + j + 8) * high",
        "NAME(load8)(p[3 - r] + j + 8) * high",
    ),
    "sums in float32": (
        "memcpy(out + j, &low, sizeof low);",
        "low = WIDE(NARROW(low)); memcpy(out + j, &low, 32);",
    ),
    "a wrong sign": ("(quarter + 1) & 2", "quarter & 2"),
    "a coarse logarithm": ("1.0 / 3.0;", "0.3333;"),
    "a coarse logarithm in float32": ("1.0f / 3.0f;", "0.3f;"),
    "no logarithm for V near 1": ("NAME(where8)(near, -rest, m - 1.0f)", "(m - 1.0f)"),
    "refined too seldom": ("(value > low) & (value < high)", "(value > low)"),
    "a missing pair of eight": ("outside += found[k];\n    return", "outside -= 1;\n    return"),
    "a quarter of a turn more": ("(1u << 29)) >> 30", "(1u << 30)) >> 30"),
    "a wrong sign in float32": ("(quarter & 2) << 30", "(quarter & 1) << 31"),
    "no scale": ("radius = ROOT(square) * scale", "radius = ROOT(square)"),
    "no scale in float32": ("radius = ROOT8(square) * scale", "radius = ROOT8(square)"),
    "an angle of half a turn": ("6.283185307179586476925", "3.141592653589793"),
}


def found_by(
    checks: Sequence[Callable[[], None]], text: str, folder: Path, patch: pytest.MonkeyPatch
) -> list[str]:
    """Compiles a kernel as setup.py does, uses it, and returns the name of the first check that finds it wrong."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (folder / "_kernel.c").write_text(text)
    flags = [
        "-O1",
        "-std=gnu11",
        "-fno-math-errno",
        "-ffp-contract=fast",
        "-Wno-psabi",
        "-shared",
        "-fPIC",
    ]
    version = f"-DDPSCO_VERSION={zlib.crc32(text.encode())}LL"
    subprocess.run(
        [compiler, *flags, version, "-o", "_kernel.bin", "_kernel.c", "-lm"],
        cwd=folder,
        check=True,
    )
    patch.setattr(native, "_HERE", folder)
    library = native._found.__wrapped__()
    assert library[1] == "in use"
    patch.setattr(native, "_found", lambda: library)
    for check in checks:
        try:
            check()
        except (AssertionError, ValueError):  # exact arithmetic takes no NaN
            return [check.__name__]
    return []


def changed(name: str | None, mutations: Mapping[str, tuple[str, str]]) -> str:
    """Returns the kernel with a mistake, or as it is."""
    text = SOURCE.read_text()
    old, new = ("", "") if name is None else mutations[name]
    assert old in text
    return text.replace(old, new) if old else text


@pytest.mark.cases(0, 10)
@needed
@pytest.mark.parametrize("name", [None, *MUTATIONS])
def test_a_wrong_kernel_is_caught(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wrong = found_by(ALL, changed(name, MUTATIONS), tmp_path, monkeypatch)
    assert bool(wrong) == (name is not None), wrong


@pytest.mark.slow
@needed
def test_the_kernel_without_special_instructions_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = SOURCE.read_text().replace("#if defined(__x86_64__)", "#if 0")
    assert not found_by(ALL, text, tmp_path, monkeypatch)


def test_bits_of_words_are_all_used():
    """The angle of a turn that is not a multiple of a quarter is no multiple of one: 64 bits, or 32."""
    found = normal_(torch.empty(2000, dtype=torch.float64), 1.0, seeded(1)).numpy()
    angles = np.arctan2(found[1000:], found[:1000])
    assert len(np.unique(angles)) == 1000
