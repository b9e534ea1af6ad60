"""Objectives against autograd, against 80-bit references, and against rows that hold nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.estimators import objective_references as reference
from torch_dpsco.accounting.analysis.rounding import gamma
from torch_dpsco.errors import ConditionError, NotCertifiedError
from torch_dpsco.estimators.objectives import LinearObjective
from torch_dpsco.estimators.records import PairwiseSum, Records
from torch_dpsco.estimators.robust import Adversarial, Tilted
from torch_dpsco.losses import (
    Hinge,
    Huber,
    Logistic,
    PowerLoss,
    ResidualClipped,
    SmoothedHinge,
    SoftmaxCrossEntropy,
    Squared,
)


def data(seed, n=40, dim=3, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, dim, generator=generator, dtype=torch.float64) * scale
    labels = torch.sign(torch.randn(n, generator=generator, dtype=torch.float64))
    return features, labels, torch.randn(dim, generator=generator, dtype=torch.float64)


def plain(name, X, y):
    """Returns an objective and the same as an autograd formula."""
    soft = torch.nn.functional.softplus
    weights = torch.linspace(0, 2, len(X), dtype=torch.float64)
    term = torch.arange(X.shape[1], dtype=torch.float64)
    if name == "logistic":
        objective = LinearObjective(
            Logistic(), Records(X, y, weights), reg=0.3, normalizer=7, linear_term=term
        )
        return (
            objective,
            lambda w: (weights * soft(-y * (X @ w))).sum() / 7 + 0.15 * w @ w + term @ w,
        )
    if name == "squared":
        objective = LinearObjective(Squared(), Records(X, y), reg=0.3, normalizer=len(X))
        return objective, lambda w: ((y - X @ w) ** 2 / 2).mean() + 0.15 * w @ w
    if name == "huber":
        objective = LinearObjective(
            Huber(threshold=0.7), Records(X, y), reg=0.3, normalizer=len(X)
        )
        return (
            objective,
            lambda w: torch.nn.functional.huber_loss(X @ w, y, delta=0.7) + 0.15 * w @ w,
        )
    if name == "tilted up" or name == "tilted down":
        tilt, reg = (2.0, 0.3) if name == "tilted up" else (-0.5, 99.0)
        bound = float(X.norm(dim=1).max())
        objective = Tilted(Logistic(), Records(X, y), tilt=tilt, reg=reg, bound_x=bound)
        return (
            objective,
            lambda w: (
                (torch.exp(tilt * soft(-y * (X @ w))).mean()).log() / tilt + reg / 2 * w @ w
            ),
        )
    if name == "adversarial 2":
        objective = Adversarial(
            Logistic(), Records(X, y), attack_radius=0.4, reg=0.3, normalizer=9
        )
        return (
            objective,
            lambda w: soft(-(y * (X @ w) - 0.4 * w.norm())).sum() / 9 + 0.15 * w @ w,
        )
    if name == "adversarial inf":
        objective = Adversarial(
            Logistic(),
            Records(X, y),
            attack_radius=0.4,
            reg=0.3,
            normalizer=9,
            attack_norm=math.inf,
            smoothing=0.2,
        )
        size = lambda w: torch.sqrt(w * w + 0.04).sum()  # noqa: E731
        return objective, lambda w: soft(-(y * (X @ w) - 0.4 * size(w))).sum() / 9 + 0.15 * w @ w
    if name == "adversarial ellipsoid" or name == "adversarial box":
        scale = torch.tensor([2.0, 0.0, 0.3], dtype=torch.float64)
        norm = 2 if name == "adversarial ellipsoid" else math.inf
        objective = Adversarial(
            Logistic(),
            Records(X, y),
            attack_radius=0.4,
            reg=0.3,
            normalizer=9,
            attack_norm=norm,
            attack_scale=(2.0, 0.0, 0.3),
            smoothing=0.2,
        )
        if norm == 2:
            size = lambda w: torch.sqrt((scale * w).square().sum() + 0.04)  # noqa: E731
        else:
            size = lambda w: torch.sqrt((scale * w).square() + 0.04).sum()  # noqa: E731
        return objective, lambda w: soft(-(y * (X @ w) - 0.4 * size(w))).sum() / 9 + 0.15 * w @ w
    labels = (torch.arange(len(X)) % 3).long()
    objective = LinearObjective(
        SoftmaxCrossEntropy(3), Records(X, labels, num_classes=3), reg=0.3, normalizer=len(X)
    )
    cross = torch.nn.functional.cross_entropy
    return objective, lambda w: cross(X @ w.view(3, -1).T, labels) + 0.15 * w @ w


NAMES = [
    "logistic",
    "squared",
    "huber",
    "tilted up",
    "tilted down",
    "adversarial 2",
    "adversarial inf",
    "adversarial ellipsoid",
    "adversarial box",
    "softmax",
]


@pytest.mark.cases(15, 7)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_values_gradients_and_hessians_are_those_of_autograd(name, seed):
    X, y, w = data(seed, n=1500 if seed == 0 else 40)  # more than a block, and less
    objective, formula = plain(name, X, y)
    point = w.repeat(objective.dim // len(w)) * torch.linspace(
        1, 2, objective.dim, dtype=torch.float64
    )
    value, gradient = objective.value_and_gradient(point)
    leaf = point.clone().requires_grad_()
    exact = formula(leaf)
    exact.backward()
    assert abs(value - float(exact.detach())) <= 1e-12 * max(1, abs(value))
    assert torch.allclose(gradient, leaf.grad, rtol=1e-10, atol=1e-12)
    hessian = torch.autograd.functional.hessian(formula, point)
    assert torch.allclose(objective.hessian(point), hessian, rtol=1e-9, atol=1e-11)
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert objective.strong_convexity <= float(eigenvalues.min()) * (1 + 1e-9)
    if objective.smoothness is not None:
        assert objective.smoothness >= float(eigenvalues.max()) * (1 - 1e-9)


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("name", NAMES)
def test_declared_constants_hold_between_random_pairs_of_points(name):
    X, y, _ = data(5)
    objective, _ = plain(name, X, y)
    generator = torch.Generator().manual_seed(6)
    for _ in range(50):
        first, second = (
            torch.randn(2, objective.dim, generator=generator, dtype=torch.float64) * 3
        )
        gap = objective.value_and_gradient(first)[1] - objective.value_and_gradient(second)[1]
        move = first - second
        assert gap @ move >= objective.strong_convexity * (move @ move) * (1 - 1e-9)
        if objective.smoothness is not None:
            assert gap.norm() <= objective.smoothness * move.norm() * (1 + 1e-9)


def ill_scaled(seed):
    """Features over ten orders of magnitude, a far point: scores cancel."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    X = (
        X
        * 10.0 ** torch.randint(-6, 4, (60, 1), generator=generator)
        * torch.tensor([1e3, 1.0, 1e-3, 1.0, 1e2])
    )
    y = torch.sign(torch.randn(60, generator=generator, dtype=torch.float64))
    return (
        X,
        y,
        torch.randn(5, generator=generator, dtype=torch.float64) * 10.0 ** (seed % 5 - 2),
    )


@pytest.mark.parametrize("seed", range(10))
def test_rounding_bounds_cover_the_true_rounding_on_ill_scaled_data(seed):
    X, y, w = ill_scaled(seed)
    long_x, long_y = reference.long_rows(X, y)
    long_w = w.numpy().astype(reference.LONG)
    squares = lambda r: (r * r / 2, r)  # noqa: E731
    scale = (1e3, 0.0, 1 / 3, 1e-7, 7.0)
    pairs = [
        (
            LinearObjective(Logistic(), Records(X, y), reg=1e-3, normalizer=60),
            reference.margin_objective(long_x, long_y, reference.logistic, 1e-3, 60),
        ),
        (
            LinearObjective(SmoothedHinge(0.1), Records(X, y), reg=1e-3, normalizer=1),
            reference.margin_objective(long_x, long_y, reference.smoothed_hinge(0.1), 1e-3, 1),
        ),
        (
            LinearObjective(Squared(), Records(X, y), reg=1e-3, normalizer=60),
            reference.residual_objective(long_x, long_y, squares, 1e-3, 60),
        ),
        (
            Tilted(Logistic(), Records(X, y), tilt=0.7, reg=1e-3),
            reference.tilted_objective(long_x, long_y, reference.logistic, 1e-3, 0.7),
        ),
        (
            Adversarial(Logistic(), Records(X, y), attack_radius=0.3, reg=1e-3, normalizer=60),
            reference.adversarial_objective(long_x, long_y, reference.logistic, 1e-3, 0.3, 60),
        ),
        (
            Adversarial(
                Logistic(),
                Records(X, y),
                attack_radius=0.3,
                reg=1e-3,
                normalizer=60,
                attack_scale=scale,
            ),
            reference.adversarial_objective(
                long_x, long_y, reference.logistic, 1e-3, 0.3, 60, scale=scale
            ),
        ),
    ]
    for objective, at in pairs:
        _, gradient = objective.value_and_gradient(w)
        _, exact_gradient = at(long_w)
        error = np.sqrt(((gradient.numpy().astype(reference.LONG) - exact_gradient) ** 2).sum())
        assert error <= objective.gradient_error(w)


def test_rounding_bounds_cover_scores_that_cancel():
    """A huge w, almost orthogonal to every record: the scores lose their digits, the sum does not."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(20):
        w = 1e8 * torch.randn(6, generator=generator, dtype=torch.float64)
        X = torch.randn(10, 6, generator=generator, dtype=torch.float64)
        X = X - torch.outer(X @ w, w) / (w @ w)
        objective = LinearObjective(
            Logistic(), Records(X, torch.ones(10)), reg=0.0, normalizer=10
        )
        at = reference.margin_objective(
            *reference.long_rows(X, torch.ones(10)), reference.logistic, 0.0, 10
        )
        gradient = objective.value_and_gradient(w)[1].numpy().astype(reference.LONG)
        error = float(np.sqrt(((gradient - at(w.numpy().astype(reference.LONG))[1]) ** 2).sum()))
        assert error <= objective.gradient_error(w)
        worst = max(worst, error / objective.gradient_error(w))
    assert worst > 1e-3


def test_rounding_bounds_are_of_the_size_of_the_spec_and_not_of_the_number_of_records():
    X, y, w = data(0, n=100_000, dim=4)
    X = X / X.norm(dim=1, keepdim=True)
    objective = LinearObjective(Logistic(), Records(X, y), reg=1e-4, normalizer=len(X))
    spec = (1024 + 2 * 7 + 4 + 64) * 2.0**-53 * (
        1 + 1e-4 * float(w.norm())
    ) + 16 * 2.0**-53 * float(w.norm())
    assert objective.gradient_error(w) <= 2 * spec
    assert objective.gradient_error(w) < 1e-11 / 20  # that of a plain sum would be 1e-11


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 3000])
def test_sums_over_blocks_are_within_their_bound_of_the_exact_sum(count):
    generator = torch.Generator().manual_seed(count)
    terms = torch.randn(count, generator=generator, dtype=torch.float64) * 10.0 ** torch.randint(
        -8, 8, (count,), generator=generator
    )
    records = Records(torch.ones(count, 1), torch.ones(count))
    bound = gamma(records.depth) * float(terms.abs().sum())
    assert abs(float(records.total(terms)) - math.fsum(terms.tolist())) <= bound
    assert abs(float(records.combine(terms)) - math.fsum(terms.tolist())) <= bound


def test_pairwise_sums_pass_each_term_through_few_additions():
    class Counting(list):
        """A term that counts its longest chain of additions."""

        depth = 0

        def __add__(self, other):
            total = Counting()
            total.depth = max(self.depth, other.depth) + 1
            return total

    for count in (1, 2, 3, 7, 8, 1000, 1023):
        total = PairwiseSum(Counting())
        for _ in range(count):
            total.add(Counting())
        assert total.result().depth <= 2 * math.ceil(math.log2(count + 1))


BUILDERS = {
    "linear": lambda X, y, c: LinearObjective(
        Logistic(), Records(X, y, c), reg=0.1, normalizer=5
    ),
    "clipped": lambda X, y, c: LinearObjective(
        ResidualClipped(Logistic(), 0.1), Records(X, y, c), reg=0.1, normalizer=5
    ),
    "squared": lambda X, y, c: LinearObjective(
        Squared(), Records(X, y, c), reg=0.1, normalizer=5
    ),
    "softmax": lambda X, y, c: LinearObjective(
        SoftmaxCrossEntropy(2),
        Records(X, (y > 0).long(), c, num_classes=2),
        reg=0.1,
        normalizer=5,
    ),
    "adversarial": lambda X, y, c: Adversarial(
        Logistic(), Records(X, y, c), attack_radius=0.2, reg=0.1, normalizer=5
    ),
}


@pytest.mark.cases(14, 1)
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_null_records_contribute_exactly_nothing(name, junk):
    X, y, w = data(1)
    weights = torch.ones(40, dtype=torch.float64)
    weights[3] = 0.0
    with_zeros, with_junk = X.clone(), X.clone()
    with_zeros[3], with_junk[3] = 0.0, junk
    build = BUILDERS[name]
    clean, dirty = build(with_zeros, y, weights), build(with_junk, y, weights)
    bad_row = build(
        with_junk, y, None
    )  # non-finite features make a null record without a weight, too
    point = w.repeat(clean.dim // 3)
    for other in (dirty, bad_row):
        assert clean.value_and_gradient(point)[0] == other.value_and_gradient(point)[0]
        assert torch.equal(
            clean.value_and_gradient(point)[1], other.value_and_gradient(point)[1]
        )
        assert torch.equal(clean.hessian(point), other.hessian(point))
        assert clean.gradient_error(point) == other.gradient_error(point)
    kept = [row for row in range(40) if row != 3]
    without = build(X[kept], y[kept], None)
    assert torch.allclose(
        without.value_and_gradient(point)[1], clean.value_and_gradient(point)[1], atol=1e-15
    )


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_a_row_that_a_map_makes_finite_stays_null(junk):
    """A public map may send what is not finite anywhere: to 0, as here, or to the row of somebody else."""
    rows = torch.ones(5, 2, dtype=torch.float64)
    rows[3, 0] = junk
    records = Records(rows, torch.ones(5), prepare=lambda raw: raw.nan_to_num(0.5, 0.5, 0.5))
    assert records.weights.tolist() == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert records.norms[3] == records.targets[3] == 0
    assert float(records.norms[0]) == pytest.approx(math.sqrt(2))


def test_a_nan_label_and_an_unknown_class_make_null_records():
    X, y, w = data(2)
    y[0] = math.nan
    weights = torch.ones(40, dtype=torch.float64)
    weights[0] = 0.0
    value, gradient = LinearObjective(
        Squared(), Records(X, y), reg=0.1, normalizer=5
    ).value_and_gradient(w)
    clean = LinearObjective(
        Squared(), Records(X, y.nan_to_num(), weights), reg=0.1, normalizer=5
    )
    assert clean.value_and_gradient(w)[0] == value
    assert torch.equal(clean.value_and_gradient(w)[1], gradient)
    classes = torch.arange(40) % 3
    classes[5] = 7
    weights[0], weights[5] = 1.0, 0.0
    unknown = LinearObjective(
        SoftmaxCrossEntropy(3), Records(X, classes, num_classes=3), reg=0.1, normalizer=5
    )
    zeroed = LinearObjective(
        SoftmaxCrossEntropy(3),
        Records(X, classes.clamp(max=2), weights, num_classes=3),
        reg=0.1,
        normalizer=5,
    )
    point = w.repeat(3)
    assert torch.equal(unknown.value_and_gradient(point)[1], zeroed.value_and_gradient(point)[1])


def test_a_null_record_of_a_tilted_mean_keeps_its_place_so_that_no_weight_exceeds_its_bound():
    X, y, w = data(3, n=4)
    X[0], X[1] = math.nan, math.inf
    weights = Tilted(Logistic(), Records(X, y), tilt=3.0, reg=0.1).weights(w)
    spread = math.exp(3.0 * float(X[2:].norm(dim=1).max() * w.norm()))
    assert weights.min() > 0
    assert float(weights.max()) <= spread / (spread + 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_features_are_read_exactly_and_never_copied_as_a_whole(dtype):
    X, y, w = data(4, n=2500)
    low = X.to(dtype)
    records = Records(low, y)
    assert records._features.data_ptr() == low.data_ptr()
    sizes = [len(block) for _, block in records.blocks()]
    assert max(sizes) <= 1024
    assert sum(sizes) == 2500
    objectives = (
        LinearObjective(Logistic(), Records(part, y), reg=0.1, normalizer=9)
        for part in (low, low.double())
    )
    found, exact = (objective.value_and_gradient(w)[1] for objective in objectives)
    # half precisions are not read in C, which adds up in another order
    torch.testing.assert_close(
        found, exact, rtol=0.0, atol=0.0 if dtype is torch.float32 else 1e-13
    )


def test_blocks_of_wide_records_are_short():
    records = Records(torch.zeros(3, 2**21), torch.zeros(3))
    assert [len(block) for _, block in records.blocks()] == [2, 1]


def test_a_tilt_near_zero_is_the_mean_without_a_jump():
    X, y, w = data(7)
    mean = LinearObjective(Logistic(), Records(X, y), reg=0.1, normalizer=40)
    value, gradient = mean.value_and_gradient(w)
    losses = torch.nn.functional.softplus(-y * (X @ w))
    for tilt in (0.0, 1e-300, 1e-14, -1e-9, 1e-6, -1e-3):
        tilted = Tilted(
            Logistic(), Records(X, y), tilt=tilt, reg=0.1, bound_x=float(X.norm(dim=1).max())
        )
        got, slope = tilted.value_and_gradient(w)
        # the second order: tau var/2
        assert (
            abs(got - value - tilt * float(losses.var(unbiased=False)) / 2)
            <= 1e-13 + 10 * tilt**2
        )
        assert torch.allclose(slope, gradient, atol=1e-14 + 10 * abs(tilt))


def test_huge_tilts_neither_overflow_nor_lose_the_largest_loss():
    X, y, w = data(8)
    objective = Tilted(Logistic(), Records(X, y), tilt=1e5, reg=0.0)
    losses = torch.nn.functional.softplus(-y * (X @ w))
    assert abs(objective.value(w) - float(losses.max())) <= math.log(40) / 1e5
    assert float(objective.weights(w).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("attack_norm", [2, math.inf])
@pytest.mark.parametrize("scale", [None, (2.0, 0.0, 0.3)])
def test_the_adversarial_value_is_that_of_the_worst_attack(attack_norm, scale):
    X, y, w = data(9)
    scales = torch.tensor(scale or (1.0, 1.0, 1.0), dtype=torch.float64)
    objective = Adversarial(
        Logistic(),
        Records(X, y),
        attack_radius=0.4,
        reg=0.0,
        normalizer=1,
        attack_norm=attack_norm,
        attack_scale=scale,
    )
    generator = torch.Generator().manual_seed(1)
    direction = scales * w / (scales * w).norm() if attack_norm == 2 else w.sign()
    worst = X - 0.4 * y.unsqueeze(1) * scales * direction
    loss = torch.nn.functional.softplus(-y * (worst @ w)).sum()
    assert objective.value(w) == pytest.approx(float(loss))
    for _ in range(200):
        moves = torch.randn(X.shape, generator=generator, dtype=torch.float64)
        moves = 0.4 * scales * moves / moves.norm(dim=1, p=attack_norm, keepdim=True)
        assert (
            torch.nn.functional.softplus(-y * ((X + moves) @ w)).sum()
            <= objective.value(w) + 1e-12
        )


@pytest.mark.parametrize("attack_norm", [2, math.inf])
def test_smoothing_raises_values_by_no_more_than_its_bound(attack_norm):
    X, y, w = data(11)
    numbers = {"attack_radius": 0.4, "reg": 0.1, "normalizer": 40, "attack_norm": attack_norm}
    kinked, smooth = (
        Adversarial(Logistic(), Records(X, y), smoothing=nu, **numbers) for nu in (0.0, 1e-3)
    )
    most = 0.4 * 1e-3 * (1 if attack_norm == 2 else 3)
    for scale in (0.0, 1e-4, 1.0):
        assert 0 <= smooth.value(scale * w) - kinked.value(scale * w) <= most * (1 + 1e-9)


@pytest.mark.parametrize("attack_norm", [2, math.inf])
def test_the_smoothness_covers_the_kink_of_the_feature_that_is_moved_most(attack_norm):
    records = Records(torch.zeros(1, 3), torch.ones(1))
    objective = Adversarial(
        Logistic(),
        records,
        attack_radius=0.1,
        reg=0.1,
        attack_norm=attack_norm,
        attack_scale=(0.5, 4.0, 0.0),
        smoothing=1e-3,
    )
    bends = torch.linalg.eigvalsh(objective.hessian(torch.zeros(3, dtype=torch.float64)))
    assert 0.4 * objective.smoothness <= float(bends.max()) <= objective.smoothness
    assert float(bends.min()) == pytest.approx(0.1)  # of the feature that nobody moves


def test_losses_and_tilts_that_void_a_constant_are_refused():
    X, y, _ = data(0)
    with pytest.raises(ConditionError, match="Lipschitz"):
        Tilted(Squared(), Records(X, y), tilt=1.0, reg=0.1)
    with pytest.raises(ConditionError, match="reg must exceed"):
        Tilted(Logistic(), Records(X, y), tilt=-1.0, reg=0.5, bound_x=1.0)
    with pytest.raises(ConditionError, match="bound_x"):
        Tilted(Logistic(), Records(X, y), tilt=-1.0, reg=0.5)
    with pytest.raises(NotCertifiedError, match="clip the rows"):
        Tilted(Logistic(), Records(X, y), tilt=-1e-3, reg=0.5, bound_x=0.1)
    for loss in (Hinge(), Huber(), Squared(), SoftmaxCrossEntropy(3)):
        with pytest.raises(ConditionError, match=r"SmoothedHinge(.|\n)*ClippedSGD"):
            Adversarial(loss, Records(X, y), attack_radius=0.1, reg=0.1, normalizer=1)
    assert (
        LinearObjective(Hinge(), Records(X, y), reg=0.1, normalizer=1).gradient_error(
            torch.zeros(3)
        )
        == math.inf
    )
    assert (
        LinearObjective(PowerLoss(1.5), Records(X, y), reg=0.1, normalizer=1).smoothness is None
    )


@pytest.mark.parametrize(
    ("features", "targets", "weights"),
    [
        (torch.zeros(3), torch.zeros(3), None),
        (torch.zeros(3, 2).long(), torch.zeros(3), None),
        (torch.zeros(3, 2), torch.zeros(4), None),
        (torch.zeros(3, 2), torch.zeros(3, 1), None),
        (torch.zeros(3, 2), torch.zeros(3), torch.zeros(2)),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_raise(features, targets, weights):
    with pytest.raises(ValueError, match="must be"):
        Records(features, targets, weights)


def test_labels_beyond_one_enlarge_the_constants():
    X, _, w = data(12)
    y = torch.full((40,), 3.0, dtype=torch.float64)
    for loss in (Logistic(), SmoothedHinge(0.5)):
        objective = LinearObjective(loss, Records(X, y), reg=0.1, normalizer=40)
        eigenvalues = torch.linalg.eigvalsh(objective.hessian(w * 0))
        assert objective.smoothness >= float(eigenvalues.max())
