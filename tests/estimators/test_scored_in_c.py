"""Sums over records that are read once in C, for losses with a bent slope and for softmax, against exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import mpmath
import pytest
import torch
from torch import Tensor

from tests.estimators.test_in_c import maps, rows_of
from tests.test_native import changed, found_by, needed
from torch_dpsco import native
from torch_dpsco.accounting.analysis.rounding import DOUBLE as U
from torch_dpsco.estimators.objectives import LinearObjective, loss_sums, row_losses
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.records import Records
from torch_dpsco.losses import (
    Huber,
    Logistic,
    ResidualClipped,
    SmoothedHinge,
    SmoothedPinball,
    SoftmaxCrossEntropy,
    Squared,
)

pytestmark = needed
NAN, INF, DOUBLE = math.nan, math.inf, torch.float64
SHAPES = ((0, 3), (1, 1), (3, 5), (37, 19), (1030, 2), (33, 500))
LOSSES = (
    Squared(),
    Huber(0.25),
    SmoothedPinball(0.75, 0.5),
    SmoothedHinge(0.5),
    ResidualClipped(Squared(), 0.25),
    ResidualClipped(Huber(0.5), 0.125),
    ResidualClipped(SmoothedHinge(0.5), 0.25),
)


def slope_of(loss: object, limit: float, score: Fraction, target: float) -> Fraction:
    """Returns the derivative in the score, exactly."""
    if isinstance(loss, ResidualClipped):
        inner = slope_of(loss.loss, INF, score, target)
        cut = Fraction(limit) if math.isfinite(limit) else abs(inner)
        return max(-cut, min(cut, inner))
    gap = score - Fraction(target)
    if isinstance(loss, Huber):
        k = Fraction(loss.threshold)
        return max(-k, min(k, gap))
    if isinstance(loss, SmoothedPinball):
        t = Fraction(loss.quantile)
        return max(-t, min(1 - t, gap / Fraction(loss.width)))
    if isinstance(loss, SmoothedHinge):
        line = (Fraction(target) * score - 1) / Fraction(loss.width)
        return Fraction(target) * max(Fraction(-1), min(Fraction(0), line))
    return gap


def table_of(n: int, d: int, loss: object, dtype: torch.dtype) -> Records:
    """Records of many lengths: not finite, subnormal, huge, at the bound, of weight 0, with a target at a corner."""
    rows = rows_of(n, d, dtype)
    if n > 12:
        rows[9] = 0.0
        rows[9, 0] = 2.0  # at the bound
        rows[10] = rows[9]
    targets = torch.linspace(-2.0, 2.0, n, dtype=DOUBLE)
    if isinstance(getattr(loss, "loss", loss), SmoothedHinge):
        targets = torch.where(torch.arange(n) % 3 == 0, -1.0, 1.0).double()
    elif n > 12:
        targets[9], targets[10], targets[11] = 0.25, NAN, -INF
    weights = (torch.arange(n) % 5 / 4).double()
    return Records(rows, targets, weights, prepare=Preparation(2.0))


def check_lines() -> None:
    """Gradients are within the bound that certificates take off, on every row that the class of losses can meet."""
    for n, d in SHAPES:
        for loss in LOSSES[:: 1 if n < 1000 else 3]:
            for dtype in (torch.float32, DOUBLE):
                records = table_of(n, d, loss, dtype)
                found = row_losses(loss, records)
                assert found is not None
                assert found.kind == "bent"
                objective = LinearObjective(loss, records, reg=0.0, normalizer=1.0)
                point = torch.linspace(-1.0, 1.5, d, dtype=DOUBLE)
                value, gradient = objective.value_and_gradient(point)
                rows = records.select(torch.arange(n)).tolist()
                limits = loss.limits(records.norms).tolist()
                total = [Fraction(0)] * d
                numbers = [Fraction(v) for v in point.tolist()]
                for x, y, limit, weight in zip(
                    rows, records.targets.tolist(), limits, records.weights.tolist(), strict=True
                ):
                    if weight == 0.0:
                        continue
                    exact = [Fraction(v) for v in x]
                    score = sum(
                        (a * b for a, b in zip(exact, numbers, strict=True)), Fraction(0)
                    )
                    slope = Fraction(weight) * slope_of(loss, limit, score, y)
                    total = [t + slope * v for t, v in zip(total, exact, strict=True)]
                gap = math.sqrt(
                    sum(
                        float(Fraction(g) - t) ** 2
                        for g, t in zip(gradient.tolist(), total, strict=True)
                    )
                )
                assert gap <= objective.gradient_error(point) + 1e-300
                of_rows = loss.of_norms(records.norms)
                values = of_rows.value(records.scores(point), records.targets)
                expected = float((records.weights * values)[records.weights > 0].sum())
                assert value == pytest.approx(expected, rel=1e-11, abs=1e-13)


def check_clips() -> None:
    """No record adds more than the clip, whatever its loss and its numbers."""
    for loss in (Squared(), Huber(3.0), SmoothedPinball(0.9, 0.1), Logistic()):
        for scale in (1e-300, 1.0, 1e150):
            rows = scale * rows_of(12, 5)[8:]
            for row, target in zip(rows, (1.0, -1.0, 1.0, -1.0), strict=True):
                part = Records(row[None], torch.tensor([target]).double())
                found = loss_sums(loss, torch.full((5,), 3.0).double(), part, 0.25)[1]
                assert float(found.norm()) <= 0.25 * (1 + 1e-9)


def exact_classes(records: Records, point: Tensor, clip: float) -> Tensor:
    rows = records.select(torch.arange(records.count)).tolist()
    with mpmath.workdps(40):
        total = mpmath.zeros(*point.shape)
        for x, y, weight in zip(
            rows, records.targets.tolist(), records.weights.tolist(), strict=True
        ):
            scores = [mpmath.fdot(x, w) for w in point.tolist()]
            most = max(scores)
            terms = [mpmath.exp(s - most) for s in scores]
            slopes = [t / sum(terms) - (k == y) for k, t in enumerate(terms)]
            size = mpmath.sqrt(sum(s * s for s in slopes)) * mpmath.norm(x)
            share = 1 if size <= clip else clip / size
            total += weight * share * mpmath.matrix(slopes) * mpmath.matrix(x).T
        return torch.tensor([[float(v) for v in row] for row in total.tolist()], dtype=DOUBLE)


def check_classes() -> None:
    for n, d in SHAPES[:4]:
        for count in (2, 3, 9):
            for clip in (INF, 0.3):
                for size in (0.0, 1.0, 1e4):
                    labels = (torch.arange(n) * 7) % (count + 1)  # one class is not known
                    weights = (torch.arange(n) % 5 / 4).double()
                    records = Records(
                        rows_of(n, d),
                        labels,
                        weights,
                        num_classes=count,
                        prepare=Preparation(1.5, intercept=0.5),
                    )
                    point = size * torch.linspace(-1, 1, count * records.dim, dtype=DOUBLE)
                    objective = LinearObjective(SoftmaxCrossEntropy(count), records, reg=0.0)
                    losses, found = loss_sums(SoftmaxCrossEntropy(count), point, records, clip)
                    found = found.view(count, -1)
                    exact = exact_classes(records, point.view(count, -1), clip)
                    room = objective.gradient_error(point) + 1e-300
                    assert float((found - exact).norm()) <= 2 * room
                    scores = torch.cat(
                        [block @ point.view(count, -1).T for _, block in records.blocks()]
                        or [point.new_zeros(0, count)]
                    )
                    values = SoftmaxCrossEntropy(count).value(scores, records.targets)
                    assert float(losses) == pytest.approx(
                        float(records.weights @ values), rel=1e-11, abs=1e-12
                    )


def check_kept_images() -> None:
    """Images that are kept are those that are computed, to the last bit of every sum."""
    for n, d in SHAPES:
        for prepare in maps(d):
            rows = torch.where(rows_of(n, d).abs() < 1e100, rows_of(n, d), NAN)
            found = []
            for keep in (False, True):
                records = Records(rows, torch.linspace(-1, 1, n).double(), prepare=prepare)
                point = torch.linspace(-1, 1, records.dim, dtype=DOUBLE)
                if keep and records._table is not None:
                    records._table.keep(records._used)
                losses = row_losses(Huber(0.25), records)
                assert losses is not None
                bends, scores = torch.ones(2, n, dtype=DOUBLE)
                total = records.scored(point, losses, bends, scores)
                used = records._used
                wanted = records.select(torch.arange(n)) @ point
                torch.testing.assert_close(scores[used], wanted[used], rtol=1e-9, atol=1e-12)
                found.append((*total, bends, torch.where(used, scores, 0.0)))
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def check_combinations() -> None:
    for n, d in SHAPES[:5]:
        records = table_of(n, d, Squared(), DOUBLE)
        slopes = torch.linspace(-3, 2, n, dtype=DOUBLE)
        rows = records.select(torch.arange(n))
        room = (n + 4) * U * (slopes.abs() @ rows.abs()) + 1e-300
        assert bool(((records.combine(slopes) - slopes @ rows).abs() <= 2 * room).all())


def check_counts() -> None:
    """Weights of values up to a number: ties count, NaN and infinity do not."""
    for n in (0, 1, 3, 7, 8, 9, 31, 1024, 1025, 3000):
        values = torch.arange(n).double() % 7
        if n > 9:
            values[4], values[5], values[6] = NAN, INF, -INF
        weights = (torch.arange(n) % 3 + 1).double() / 2
        total = native.below(values, weights, 3.0, 1024)
        chosen = [w for v, w in zip(values.tolist(), weights.tolist(), strict=True) if v <= 3.0]
        assert float(total) == math.fsum(chosen)


ALL: tuple[Callable[[], None], ...] = (
    check_lines,
    check_clips,
    check_classes,
    check_kept_images,
    check_combinations,
    check_counts,
)


@pytest.mark.parametrize("check", ALL)
def test_what_c_adds_up(check: Callable[[], None]):
    check()


def test_a_null_record_adds_nothing_to_a_combination():
    records = Records(torch.ones(3, 2), torch.tensor([1.0, NAN, 2.0]))
    assert records.in_c
    assert records.combine(torch.ones(3, dtype=DOUBLE)).tolist() == [2.0, 2.0]


def test_a_score_that_is_not_finite_shows():
    records = Records(torch.full((1, 2), 1e100, dtype=DOUBLE), torch.ones(1))
    point = torch.full((2,), 1e300, dtype=DOUBLE)
    for loss in (Huber(1.0), ResidualClipped(Squared(), 1.0), Logistic()):
        losses = row_losses(loss, records)
        assert losses is not None
        assert records.scored(point, losses)[1].isnan().all()


def test_wide_gram_matrices_are_within_their_rounding():
    for n in (0, 1, 5, 1030):
        rows = torch.randn(n, 130, dtype=DOUBLE)
        records = Records(rows, torch.ones(n))
        weights = torch.linspace(0, 2, n, dtype=DOUBLE)
        exact = (weights[:, None] * rows).T @ rows
        room = (n + 9) * U * ((weights[:, None] * rows.abs()).T @ rows.abs()) + 1e-300
        assert bool(((records.gram(weights) - exact).abs() <= 2 * room).all())
        assert bool(((records.gram(-weights) + exact).abs() <= 2 * room).all())


def test_distances_are_those_of_the_images():
    rows = rows_of(40, 6)
    records = Records(rows, torch.ones(40), prepare=Preparation(1.5))
    center = torch.linspace(-0.3, 0.4, 6, dtype=DOUBLE)
    images = records.select(torch.arange(40))
    used = records.weights > 0
    torch.testing.assert_close(
        records.distances(center)[used],
        (images - center).norm(dim=1)[used],
        rtol=1e-12,
        atol=1e-15,
    )
    moved = Records(rows, torch.ones(40), prepare=Preparation(1.5, intercept=1.0))
    with pytest.raises(ValueError, match="rows must be cut only"):
        moved.distances(center)


def test_memory_of_another_kind_is_refused():
    table = native.Table(
        torch.ones(4, 3, dtype=DOUBLE), [INF, INF, 0.0, 0.0, 0.0, *[0.0] * 3, *[1.0] * 3]
    )
    point, columns = torch.ones(3, dtype=DOUBLE), torch.ones(5, 4, dtype=DOUBLE)
    refused = [
        lambda: table.scored(columns[:1], point, 4, kind="bent"),
        lambda: table.scored(columns, point, 4, kind="fixed"),
        lambda: table.scored(columns, point, 4, scores=point),
        lambda: table.classes(columns, point[None], 4),
        lambda: table.classes(columns[:3].contiguous(), point[:2][None], 4),
        lambda: native.below(point, columns[0], 1.0, 4),
        lambda: native.below(point.float(), point, 1.0, 4),
    ]
    for call in refused:
        with pytest.raises(ValueError, match="memory for C must be"):
            call()


MUTATIONS = {
    "no upper bound": ("NAME(where)(place > high, high, ", "("),
    "no lower bound": ("NAME(where)(place < low, low, place)", "place"),
    "no gain": ("(target * score - zero) * gain", "(target * score - zero)"),
    "a slope without its sign": ("*slope = weight * target * cut;", "*slope = weight * cut;"),
    "a wrong loss": ("cut * (place - cut * 0.5)", "cut * place"),
    "no clip of classes": ("NAME(where)(length > limit, limit / length, one)", "one"),
    "no own class": ("- NAME(where)(label == (double)k + zero, one, zero)", ""),
    "no most": ("most = NAME(where)(score > most, score, most);", ""),
    "a class that is not read": ("for (int64_t k = 1; k < classes; k++)", "for (int64_t k = 1; k + 1 < classes; k++)"),
    "the next image": ("if (kept) return kept + i * padded;", "if (kept) return kept + (i + 1) * padded;"),
    "a count without ties": ("if (values[i] <= most) a[0]", "if (values[i] < most) a[0]"),
    "a count without the rest": ("i < n; i++)\n        if (values[i]", "i + 1 < n; i++)\n        if (values[i]"),
    "no scores": ("if (found) memcpy(found + start, scores", "if (0) memcpy(found + start, scores"),
}  # fmt: skip


@pytest.mark.cases(0, 4)
@pytest.mark.parametrize("name", [None, *MUTATIONS])
def test_a_wrong_kernel_is_caught(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wrong = found_by(ALL, changed(name, MUTATIONS), tmp_path, monkeypatch)
    assert bool(wrong) == (name is not None), wrong
