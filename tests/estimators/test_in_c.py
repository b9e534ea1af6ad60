"""Records that are read in C: images, norms, sums of a logistic loss, Gram matrices; kernels that are wrong.

All other tests of linear models run with the accelerator and without it.
"""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import mpmath
import pytest
import torch
from torch import Tensor

from tests.test_native import SOURCE, U, changed, found_by, needed
from torch_dpsco import native
from torch_dpsco.accounting.analysis.rounding import gamma
from torch_dpsco.estimators.objectives import LinearObjective, row_losses
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.records import PairwiseSum, Records, pairwise
from torch_dpsco.estimators.solvers import gradient_certificate
from torch_dpsco.losses import Logistic, ResidualClipped, Squared

pytestmark = needed
NAN, INF, DOUBLE = math.nan, math.inf, torch.float64
SHAPES = ((1, 1), (3, 5), (4, 8), (9, 16), (37, 19), (70, 3))


def maps(d: int) -> list[Preparation | None]:
    center, scale = tuple(0.3 * k for k in range(d)), tuple(2.0 + k for k in range(d))
    unit = Preparation(0.75, center=(0.01,) * d, scale=(0.3,) * d, intercept=0.3, whole=True)
    return [
        None,
        Preparation(2.0),
        Preparation(1.0, intercept=0.5),
        Preparation(0.5, center=center, scale=scale, intercept=0.25, whole=True),
        replace(unit, before=1.5),
    ]


def rows_of(n: int, d: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    """Rows of many lengths: some zero, subnormal, huge, or not finite."""
    rows = torch.randn(n, d, dtype=DOUBLE, generator=torch.Generator().manual_seed(31 * n + d))
    rows *= torch.logspace(-1.5, 1.5, n, dtype=DOUBLE).flip(0)[:, None]
    if n > 8:
        rows[1], rows[2], rows[3] = 0.0, 5e-324, 1e-200
        rows[4] *= 1e30 if dtype is torch.float32 else 1e200
        rows[5, 0], rows[6, -1], rows[7, -1] = NAN, INF, -INF
    return rows.to(dtype)


def of_map(rows: Tensor, prepare: Preparation | None) -> native.Table:
    d = rows.shape[1]
    plain = [INF, INF, 0.0, 0.0, 0.0, *[0.0] * d, *[1.0] * d]
    numbers = plain if prepare is None else prepare.numbers(d)
    assert numbers is not None
    return native.Table(rows, numbers)


def check_images() -> None:
    """They are those of torch but for rounding, and no norm of one is beyond its bound."""
    for n, d in SHAPES:
        for dtype in (torch.float32, DOUBLE):
            rows = rows_of(n, d, dtype)
            finite = rows.isfinite().all(1)
            for prepare in maps(d):
                table = of_map(rows, prepare)
                images, expected = (
                    table.images(),
                    rows.double() if prepare is None else prepare(rows),
                )
                assert not images[~finite].any()
                short = expected[finite].norm(dim=1) < 1e100  # what no map cuts may be longer
                # a center that cancels leaves the rounding of what it is subtracted from
                torch.testing.assert_close(
                    images[finite][short], expected[finite][short], rtol=1e-13, atol=1e-14
                )
                known = rows.double().norm(dim=1).isfinite() if prepare is None else finite
                assert torch.equal(table.norms.isfinite(), known)
                for image, norm in zip(images.tolist(), table.norms.tolist(), strict=True):
                    square = sum((Fraction(value) ** 2 for value in image), Fraction(0))
                    if prepare is not None:
                        bound = Fraction(prepare.bound)
                        assert square <= bound**2
                    if 1e-140 < norm < INF:
                        error = Fraction(gamma(table.width + 4))
                        assert (
                            square * (1 - error) ** 2
                            <= Fraction(norm) ** 2
                            <= square * (1 + error) ** 2
                        )


def check_isolation() -> None:
    """The image of a row is that of its own numbers, to the last bit, wherever and with whatever it is read."""
    rows = rows_of(37, 19)
    for prepare in maps(19):
        table = of_map(rows, prepare)
        images = table.images()
        single = torch.cat([of_map(rows[i : i + 1], prepare).images() for i in range(37)])
        assert torch.equal(images, single)
        assert torch.equal(table.images(5, 23), images[5:23])
        assert torch.equal(table[::5].images(), images[::5])
        assert torch.equal(table[torch.tensor([36, 0, 0])].images(), images[[36, 0, 0]])
        spaced = torch.full((37, 40), NAN, dtype=DOUBLE)
        spaced[:, 7:26] = rows
        assert torch.equal(of_map(spaced[:, 7:26], prepare).images(), images)


def exact_gradient(
    rows: Tensor, targets: Tensor, limits: Tensor, weights: Tensor, point: Tensor
) -> Tensor:
    """Returns the gradient to 50 digits, rounded."""
    with mpmath.workdps(50):
        total = [mpmath.mpf(0)] * rows.shape[1]
        for x, y, limit, weight in zip(
            *(part.tolist() for part in (rows, targets, limits, weights)), strict=True
        ):
            margin = y * mpmath.fdot(x, point.tolist())
            slope = -y / (1 + mpmath.exp(margin))
            slope = weight * max(-mpmath.mpf(limit), min(mpmath.mpf(limit), slope))
            total = [t + slope * value for t, value in zip(total, x, strict=True)]
        return torch.tensor([float(t) for t in total], dtype=DOUBLE)


def check_logistic() -> None:
    """Gradients are within the bound that certificates take off, losses and curvatures those of torch."""
    for n, d in SHAPES:
        for loss in (Logistic(), ResidualClipped(Logistic(), 0.4)):
            for size in (0.0, 0.7, 30.0, 2000.0):
                rows = rows_of(n, d)[:, :d]
                rows = Preparation(1.0)(torch.where(rows.isfinite(), rows, 0.0))
                targets = torch.where(torch.arange(n) % 3 == 0, -1.0, 1.0).double()
                weights = (torch.arange(n) % 5 / 4).double()
                records = Records(rows, targets, weights)
                objective = LinearObjective(loss, records, reg=0.0, normalizer=1.0)
                point = torch.full((d,), size / math.sqrt(d), dtype=DOUBLE)
                value, gradient = objective.value_and_gradient(point)
                of_rows = loss.of_norms(records.norms)
                limits = loss.limits(records.norms)
                exact = exact_gradient(rows, targets, limits, weights, point)
                assert (
                    float((gradient - exact).norm())
                    <= objective.gradient_error(point) + 1e-16 * n
                )
                scores = rows @ point
                assert value == pytest.approx(
                    float(weights @ of_rows.value(scores, targets)), rel=1e-12
                )
                curvatures = weights * of_rows.second_derivative(scores, targets)
                hessian = rows.T @ (curvatures.unsqueeze(1) * rows)
                torch.testing.assert_close(
                    objective.hessian(point), hessian, rtol=1e-9, atol=1e-12
                )


def check_gram() -> None:
    for n, d in SHAPES:
        rows = rows_of(n, d)
        weights = torch.randn(n, dtype=DOUBLE, generator=torch.Generator().manual_seed(n))
        weights[~rows.isfinite().all(1)] = 0.0
        table = of_map(rows, Preparation(1.0, intercept=0.5))
        images = table.images()
        for start, stop in ((0, n), (n // 3, n - n // 4)):
            found = table.gram(weights, start, stop)
            part = images[start:stop]
            scaled = weights[start:stop].unsqueeze(1) * part
            room = (stop - start + 5) * float(U) * (scaled.abs().T @ part.abs())
            assert bool(((found - scaled.T @ part).abs() <= 2 * room).all())
            assert torch.equal(found, found.T)


def check_null_records() -> None:
    """A record of weight 0 counts for nothing, whatever is in it."""
    rows = rows_of(40, 6)
    rows[5:8] = 1.0
    targets, weights = torch.ones(40, dtype=DOUBLE), torch.ones(40, dtype=DOUBLE)
    weights[[9, 33, 39]] = 0.0
    point, found = torch.arange(6, dtype=DOUBLE) / 7, []
    for odd in (1.0, NAN, INF, 1.7e308):
        rows[[9, 33, 39]] = odd
        objective = LinearObjective(
            Logistic(), Records(rows, targets, weights), reg=0.1, normalizer=1.0
        )
        value, gradient = objective.value_and_gradient(point)
        found.append(
            torch.cat([gradient, torch.tensor([value]), objective.hessian(point).flatten()])
        )
    assert found[0].isfinite().all()
    assert all(torch.equal(found[0], other) for other in found[1:])


def check_rows_that_change() -> None:
    """A row that grows after it was measured would pass its bound, and the limit of its slope: it does not count."""
    for dtype in (torch.float32, DOUBLE):
        for times in (0.5, 1.001, 1e6, NAN):
            rows = rows_of(40, 7, dtype)[20:30].clone()
            records = Records(
                rows, torch.ones(10), None, prepare=Preparation(50.0, intercept=0.25)
            )
            before, norms = records.select(torch.arange(10)), records.norms.clone()
            rows[3:] *= times
            after = records.select(torch.arange(10))
            assert records.in_c
            assert torch.equal(after[:3], before[:3])
            assert bool((after.norm(dim=1) <= norms * (1 + 1e-13)).all())
            assert bool(after[3:].any()) is (times == 0.5)
            losses = row_losses(Logistic(), records)
            assert losses is not None
            _, gradient = records.scored(torch.zeros(8, dtype=DOUBLE), losses)
            assert float(gradient.norm()) <= 0.5 * float(norms.sum()) * (1 + 1e-12)


ALL = (
    check_images,
    check_isolation,
    check_logistic,
    check_gram,
    check_null_records,
    check_rows_that_change,
)


@pytest.mark.parametrize("check", ALL)
def test_what_c_makes_of_records(check):
    check()


def test_c_and_torch_certify_the_same_gradient(monkeypatch: pytest.MonkeyPatch):
    rows, point = rows_of(3000, 7), torch.linspace(-2, 3, 8, dtype=DOUBLE)
    targets = torch.where(torch.arange(3000) % 2 == 0, 1.0, -1.0)
    found = []
    for available in (True, False):
        if not available:
            monkeypatch.setattr(native, "_found", lambda: (None, "off"))
        records = Records(rows, targets, prepare=maps(7)[-1])
        assert records.in_c is available
        objective = LinearObjective(
            ResidualClipped(Logistic(), 0.3), records, reg=1.0, normalizer=1.0
        )
        found.append((*objective.value_and_gradient(point), objective.gradient_error(point)))
    (value, gradient, error), (other, theirs, beside) = found
    assert value == pytest.approx(other, rel=1e-12)
    assert error == pytest.approx(beside, rel=1e-9)
    assert float((gradient - theirs).norm()) <= error + beside


def test_columns_of_a_table_are_read_as_rows():
    rows = rows_of(50, 6)
    for prepare in maps(6):
        one, other = (
            Records(part, torch.ones(50), prepare=prepare)
            for part in (rows, rows.T.contiguous().T)
        )
        assert one.in_c
        assert other.in_c
        assert torch.equal(one.norms, other.norms)
        assert all(
            torch.equal(a, b)
            for (_, a), (_, b) in zip(one.blocks(), other.blocks(), strict=True)
        )


@pytest.mark.parametrize(
    "rows",
    [
        torch.ones(4, 3, dtype=torch.float16),
        torch.ones(4, 3, dtype=DOUBLE, device="meta"),
        torch.ones(3, 4, dtype=DOUBLE).T,
        torch.ones(4, 6, dtype=DOUBLE)[:, ::2],
        torch.ones(4, 0, dtype=DOUBLE),
    ],
)
def test_only_rows_side_by_side_make_a_table(rows: Tensor):
    with pytest.raises(
        ValueError, match="rows must be float32 or float64 of the CPU, side by side"
    ):
        native.Table(rows, [1.0] * 11)


def test_memory_of_another_kind_is_refused():
    table = of_map(rows_of(4, 3), Preparation(1.0))
    columns, point, weights = (
        torch.ones(5, 4, dtype=DOUBLE),
        torch.ones(3, dtype=DOUBLE),
        torch.ones(4, dtype=DOUBLE),
    )
    refused = [
        lambda: native.Table(rows_of(4, 3), [1.0] * 10),
        lambda: table.scored(columns[:4], point, 4),
        lambda: table.scored(columns.T.contiguous().T, point, 4),
        lambda: table.scored(columns, point[:2], 4),
        lambda: table.scored(columns, point.float(), 4),
        lambda: table.scored(columns, point, 4, weights[:3]),
        lambda: table.gram(weights[:3], 0, 4),
    ]
    for call in refused:
        with pytest.raises(ValueError, match="memory for C must be"):
            call()


def test_copies_of_records_have_their_own_memory():
    rows = rows_of(20, 3)
    records = Records(rows, torch.ones(20), prepare=Preparation(1.0))
    images = torch.cat([block for _, block in records.blocks()])
    copies = copy.deepcopy(records), pickle.loads(pickle.dumps(records))
    rows.fill_(7.0)
    for other in copies:
        assert torch.equal(torch.cat([block for _, block in other.blocks()]), images)


def test_extreme_scales_are_left_to_torch():
    assert Preparation(1.0, scale=(1e-300, 1.0)).numbers(2) is None


def test_rows_that_are_longer_by_2_to_1021_make_null_records():
    rows = torch.tensor([[1e308, 1e308], [1e300, 0.0]], dtype=DOUBLE)
    records = Records(rows, torch.ones(2), prepare=Preparation(1.0))
    assert records.weights.tolist() == [0.0, 1.0]
    assert records.norms[1] == pytest.approx(1.0)


def test_a_point_that_was_moved_in_place_is_read_again():
    rows = rows_of(8, 3)
    objective = LinearObjective(Squared(), Records(rows, torch.ones(8)), reg=1.0, normalizer=1.0)
    point = torch.zeros(3, dtype=DOUBLE)
    first = objective.value_and_gradient(point)[1]
    first += 5.0
    assert not torch.equal(objective.value_and_gradient(point)[1], first)
    point += 1.0
    fresh = LinearObjective(Squared(), Records(rows, torch.ones(8)), reg=1.0, normalizer=1.0)
    assert torch.equal(
        objective.value_and_gradient(point)[1], fresh.value_and_gradient(point)[1]
    )
    first, second = (gradient_certificate(one, point) for one in (objective, fresh))
    assert first.distance == second.distance


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 6, 7, 8, 300])
def test_stacked_terms_add_up_in_the_order_of_a_counter(count: int):
    terms = torch.randn(count, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(count))
    total = PairwiseSum(torch.zeros(4, dtype=DOUBLE))
    for term in terms:
        total.add(term)
    assert torch.equal(pairwise(terms), total.result())


MUTATIONS = {
    "rows that grow": ("if (!(NAME(squares)(q[r], x->width) <= most)) then[r] = 0.0;", ""),
    "no cut": ("norm > most ? most / norm : 1.0;", "1.0;"),
    "huge rows are not cut": ("if (!(sqrt(sum) * scale > most)) return 1.0;", "return 1.0;"),
    "rows that are not finite": ("if (!(fabs(p[j]) < INFINITY)) return 0.0;", ""),
    "no center": ("v = (v - shift) * by", "v = v * by"),
    "no center at the end": ("v = (v - center[j]) * factor[j]", "v = v * factor[j]"),
    "a share of the next row": ("first[r] = before[k]", "first[r] = before[count - 1]"),
    "a constant that is not cut": ("x->numbers[3] != 0.0 ? constant * then[r] : constant", "constant"),
    "rows of weight 0 are read": ("if (weights[r] == 0.0) memset", "if (0) memset"),
    "no clip of slopes": ("pull > limit, limit,", "pull > limit, pull,"),
    "a coarse exponential": ("1.0 / 40320.0", "1.001 / 40320.0"),
    "a coarse logarithm": ("1.0 / 3.0;\n    return", "0.3333;\n    return"),
    "curvature beyond the corner": ("& (pull < limit)", ""),
    "a loss without its line": ("NAME(where)(margin < corner, line, curve)", "curve"),
    "a score of the next row": ("c += NAME(load4)(p + 2 * padded + j)", "c += NAME(load4)(p + padded + j)"),
    "a row that is missing": ("r < n; r++) {\n                const", "r + 1 < n; r++) {\n                const"),
    "not symmetric": ("out[i * padded + j] = out[j * padded + i]", "out[i * padded + j] += 0.0"),
    "norms without the constant": ("norm = sqrt(norm * norm + constant * constant);", ";"),
    "sums in float32": ("memcpy(sums + j, &sum, sizeof sum);", "sum = WIDE(NARROW(sum)); memcpy(sums + j, &sum, 32);"),
}  # fmt: skip


@pytest.mark.cases(0, 8)
@pytest.mark.parametrize("name", [None, *MUTATIONS])
def test_a_wrong_kernel_is_caught(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wrong = found_by(ALL, changed(name, MUTATIONS), tmp_path, monkeypatch)
    assert bool(wrong) == (name is not None), wrong


def test_the_kernel_without_special_instructions_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = SOURCE.read_text().replace("#if defined(__x86_64__)", "#if 0")
    assert not found_by(ALL, text, tmp_path, monkeypatch)
