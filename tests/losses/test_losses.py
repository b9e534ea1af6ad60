from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torch_dpsco.losses import (
    Absolute,
    EpsilonInsensitive,
    Hinge,
    Huber,
    Logistic,
    Loss,
    MarginLoss,
    Pinball,
    PowerLoss,
    SmoothedHinge,
    SmoothedPinball,
    SoftmaxCrossEntropy,
    Squared,
    TableLoss,
)

MARGIN = [
    Hinge(),
    Hinge(1.1),
    Hinge(1.5),
    Hinge(2),
    Logistic(),
    SmoothedHinge(0.5),
    SmoothedHinge(2),
]
RESIDUAL = [PowerLoss(q) for q in (1, 1.1, 1.5, 2)]
RESIDUAL += [Absolute(), Squared(), Huber(0.7), Huber(3), Pinball(), Pinball(0.1), Pinball(0.9)]
RESIDUAL += [SmoothedPinball(), SmoothedPinball(0.9, 0.3), SmoothedPinball(0.2, 3)]
RESIDUAL += [EpsilonInsensitive(), EpsilonInsensitive(0), EpsilonInsensitive(5)]
SCALAR: list[TableLoss] = [*MARGIN, *RESIDUAL]
SOFTMAX = [SoftmaxCrossEntropy(2), SoftmaxCrossEntropy(5)]
ALL: list[TableLoss] = [*SCALAR, *SOFTMAX]
INTERPOLATED = [Logistic(), Huber(0.7), SmoothedHinge(0.5), SmoothedPinball(0.9, 0.3)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
B, Y = 2.0, 0.5
numbers = st.floats(-20, 20)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def worst_targets(loss: Loss, bound: float = Y) -> Tensor:
    return f64(-1, 1) if isinstance(loss, MarginLoss) else f64(-bound, bound)


def batch(
    loss: Loss, dtype: torch.dtype = torch.float64, size: int = 16
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator()
    shape = (size,) if loss.num_scores == 1 else (size, loss.num_scores)
    score = torch.randn(shape, generator=generator, dtype=torch.float64).mul(2).to(dtype)
    if loss.num_scores > 1:
        return score, torch.arange(size) % loss.num_scores
    return score, worst_targets(loss).repeat(size // 2).to(dtype)


# The table ---------------------------------------------------------------------------------------------------------


@pytest.mark.cases(39, 19)
@pytest.mark.parametrize("loss", SCALAR, ids=repr)
@pytest.mark.parametrize("radius", [0.0, 0.3, 3.0])
def test_the_gradient_bound_and_the_bounds_at_zero_are_attained(
    loss: TableLoss, radius: float
) -> None:
    problem = loss.problem(bound_x=B, bound_y=Y)
    target = worst_targets(loss).repeat(2)
    score = f64(-1, -1, 1, 1) * B * radius
    attained = B * loss.derivative(score, target).abs().max().item()
    assert problem.grad_bound(radius) == pytest.approx(attained, rel=1e-12)
    assert problem.exact_grad_bound is not None
    assert problem.exact_grad_bound(radius) == pytest.approx(attained, rel=1e-12)
    if radius == 0:
        assert problem.grad_at_zero == pytest.approx(attained, rel=1e-12)
        assert problem.loss_at_zero == pytest.approx(
            loss.value(score, target).max().item(), rel=1e-12
        )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("loss", SCALAR, ids=repr)
@settings(derandomize=True, max_examples=100)
@given(first=numbers, second=numbers, target=st.floats(-1, 1))
def test_scalar_losses_obey_their_hoelder_constant_and_are_convex(
    loss: TableLoss, first: float, second: float, target: float
) -> None:
    s, t, y = f64(first), f64(second), f64(target)
    slope = loss.derivative(s, y)
    change = (loss.derivative(t, y) - slope).abs().item()
    for exponent in (0.0, 0.4, 1.0) if loss.interpolates else (None,):
        problem = loss.problem(bound_x=B, holder_exponent=exponent)
        alpha, constant = problem.require("holder_exponent", "holder_constant", by="test")
        assert B * change <= constant * (abs(first - second) / B) ** alpha * (1 + 1e-9) + 1e-12
    assert (loss.value(t, y) - loss.value(s, y) - slope * (t - s)).item() >= -1e-9


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("loss", SOFTMAX, ids=repr)
@settings(derandomize=True, max_examples=100)
@given(seed=st.integers(0, 10**6), spread=st.floats(0.01, 30))
def test_the_softmax_obeys_its_constants_and_is_convex(
    loss: SoftmaxCrossEntropy, seed: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    s, t = spread * torch.randn(2, 8, loss.num_classes, generator=generator, dtype=torch.float64)
    y = torch.arange(8) % loss.num_classes
    problem = loss.problem(bound_x=B)
    slope, gap = loss.derivative(s, y), t - s
    (constant,) = problem.require("holder_constant", by="test")
    change = B * (loss.derivative(t, y) - slope).norm(dim=1)
    assert (change <= constant * gap.norm(dim=1) / B * (1 + 1e-9)).all()
    bounds = f64(*(problem.grad_bound(radius) for radius in (s.norm(dim=1) / B).tolist()))
    assert (B * slope.norm(dim=1) <= bounds).all()
    assert (loss.value(t, y) - loss.value(s, y) - (slope * gap).sum(1) >= -1e-9).all()


@pytest.mark.parametrize("loss", ALL, ids=repr)
def test_the_derivative_is_the_finite_difference_away_from_kinks(loss: TableLoss) -> None:
    score, target = batch(loss)
    step = 1e-6
    for k in range(loss.num_scores):
        shift = step * (
            torch.ones_like(score)
            if score.dim() == 1
            else torch.eye(loss.num_scores)[k].double()
        )
        slope = loss.derivative(score, target)
        numeric = (loss.value(score + shift, target) - loss.value(score - shift, target)) / (
            2 * step
        )
        torch.testing.assert_close(
            slope if score.dim() == 1 else slope[:, k], numeric, rtol=1e-6, atol=1e-6
        )


def test_subgradients_at_kinks_are_fixed() -> None:
    for loss, kink in (
        (Hinge(), 1.0),
        (Absolute(), 0.5),
        (PowerLoss(1), 0.5),
        (Pinball(0.9), 0.5),
    ):
        target = 1.0 if isinstance(loss, MarginLoss) else 0.5
        assert loss.derivative(f64(kink), f64(target)).item() == 0.0
    assert EpsilonInsensitive(0.25).derivative(f64(0.25, 0.75), f64(0.5, 0.5)).tolist() == [
        0.0,
        0.0,
    ]


def test_optional_constants_are_set_exactly_when_they_hold() -> None:
    lipschitz = [
        Hinge(),
        Logistic(),
        *SOFTMAX,
        Absolute(),
        Huber(0.7),
        Pinball(0.9),
        SmoothedHinge(2),
        PowerLoss(1),
    ]
    unbounded = [Squared(), *(build(q) for build in (Hinge, PowerLoss) for q in (1.1, 1.5, 2))]
    for loss in ALL:
        problem = loss.problem(bound_x=B, bound_y=Y)
        assert (problem.lipschitz is not None) == (loss not in unbounded), loss
        assert problem.smoothness == (
            problem.holder_constant if problem.holder_exponent == 1 else None
        )
        assert problem.is_glm == (loss not in SOFTMAX)
        assert problem.gradient_diameter is None
    assert [loss.problem(bound_x=B).lipschitz for loss in lipschitz] == pytest.approx(
        [B, B, 2 * math.sqrt(2), 2 * math.sqrt(2), B, 0.7 * B, 0.9 * B, B, B]
    )


@pytest.mark.slow
@settings(derandomize=True, max_examples=200)
@given(bound=st.floats(1e-3, 1e3), size=st.floats(1e-3, 1e3))
def test_constants_of_the_table_are_rounded_up(bound: float, size: float) -> None:
    exact_b, exact_y = Fraction(bound), Fraction(size)
    squared = Squared().problem(bound_x=bound, bound_y=size)
    huber = Huber(size).problem(bound_x=bound)
    pinball = Pinball(0.1).problem(bound_x=bound, bound_y=size)
    pairs = [
        (squared.holder_constant, exact_b**2),
        (squared.grad_at_zero, exact_b * exact_y),
        (squared.loss_at_zero, exact_y**2 / 2),
        (squared.grad_bound(size), exact_b * (exact_y + exact_b * exact_y)),
        (huber.lipschitz, exact_b * exact_y),
        (pinball.grad_bound(), exact_b * (1 - Fraction(0.1))),
        (SmoothedHinge(size).problem(bound_x=bound).smoothness, exact_b**2 / exact_y),
    ]
    for promised, exact in pairs:
        assert promised is not None
        assert exact <= Fraction(promised) <= exact * (1 + Fraction(1, 10**14))


def test_other_exponents_are_given_where_the_table_has_them() -> None:
    for loss in ALL:
        own = loss.problem(bound_x=1.0)
        assert loss.problem(bound_x=1.0, holder_exponent=own.holder_exponent) == own
        other = 0.25
        if isinstance(loss, tuple(type(row) for row in INTERPOLATED)):
            assert loss.problem(bound_x=1.0, holder_exponent=other).holder_exponent == other
            assert loss.problem(bound_x=1.0, holder_exponent=other).smoothness is None
        else:
            with pytest.raises(ValueError, match="holder_exponent of"):
                loss.problem(bound_x=1.0, holder_exponent=other)
        with pytest.raises(ValueError, match="holder_exponent must be in"):
            loss.problem(bound_x=1.0, holder_exponent=1.5)
    assert Hinge(1.1).problem(bound_x=1.0, holder_exponent=0.1).holder_exponent == pytest.approx(
        0.1
    )


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_records_must_be_bounded(bound: float) -> None:
    with pytest.raises(ValueError, match="bound_x"):
        Squared().problem(bound_x=bound)
    with pytest.raises(ValueError, match="bound_y"):
        Squared().problem(bound_x=1.0, bound_y=bound)


def test_bounds_whose_constants_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match="holder_constant must be finite"):
        Squared().problem(bound_x=1e200)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Hinge(0.9), "power"),
        (lambda: PowerLoss(2.1), "power"),
        (lambda: Huber(0.0), "threshold"),
        (lambda: Pinball(1.0), "quantile"),
        (lambda: SmoothedHinge(math.inf), "width"),
        (lambda: EpsilonInsensitive(-0.1), "width"),
        (lambda: SoftmaxCrossEntropy(1), "num_classes"),
        (lambda: SoftmaxCrossEntropy(2.5), "num_classes"),  # type: ignore[arg-type]
    ],
)
def test_shape_parameters_out_of_range_are_refused(
    build: Callable[[], Loss], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        build()


@pytest.mark.parametrize("loss", ALL, ids=repr)
def test_losses_and_their_problems_are_values(loss: TableLoss) -> None:
    problem = loss.problem(bound_x=B, bound_y=Y)
    assert pickle.loads(pickle.dumps(loss)) == copy.deepcopy(loss) == loss
    assert pickle.loads(pickle.dumps(problem)) == copy.deepcopy(problem) == problem
    assert hash(problem) == hash(loss.problem(bound_x=B, bound_y=Y))
    assert problem != loss.problem(bound_x=B, bound_y=2 * Y)


# The criterion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "reference"),
    [
        (Squared(), lambda s, y: nn.MSELoss()(s, y) / 2),
        (PowerLoss(2), nn.MSELoss()),
        (Absolute(), nn.L1Loss()),
        (PowerLoss(1), nn.L1Loss()),
        (Huber(0.7), nn.HuberLoss(delta=0.7)),
        (Logistic(), nn.SoftMarginLoss()),
        (Logistic(), lambda s, y: nn.BCEWithLogitsLoss()(s, (y + 1) / 2)),
        (SoftmaxCrossEntropy(5), nn.CrossEntropyLoss()),
        (Pinball(0.5), lambda s, y: nn.L1Loss()(s, y) / 2),
        (Hinge(), lambda s, y: torch.relu(1 - y * s).mean()),
        (SmoothedHinge(1e-9), lambda s, y: torch.relu(1 - y * s).mean()),
        (EpsilonInsensitive(0.3), lambda s, y: torch.relu((y - s).abs() - 0.3).mean()),
    ],
)
def test_values_and_gradients_equal_those_of_torch(
    loss: Loss, reference: Callable[[Tensor, Tensor], Tensor]
) -> None:
    score, target = batch(loss)
    ours, theirs = (score.clone().requires_grad_() for _ in range(2))
    mine, other = loss(ours, target), reference(theirs, target)
    mine.backward()
    other.backward()
    torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.cases(21, 10)
@pytest.mark.parametrize("loss", ALL, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_backward_pass_is_exactly_the_derivative(loss: Loss, dtype: torch.dtype) -> None:
    score, target = batch(loss, dtype)
    expected = loss.derivative(score, target)
    assert expected.dtype == loss.value(score, target).dtype == dtype
    assert expected.shape == score.shape
    for reduction, share in (("sum", 1.0), ("mean", 1 / 16)):
        output = score.clone().requires_grad_()
        result = loss(output, target, reduction=reduction)
        result.backward()
        assert result.dtype == dtype
        assert torch.equal(output.grad, expected * share)
    output = score.clone().requires_grad_()
    weights = torch.arange(16).to(dtype)
    (loss(output, target, reduction="none") * weights).sum().backward()
    assert torch.equal(output.grad, weights.reshape(16, *[1] * (score.dim() - 1)) * expected)


@pytest.mark.cases(25, 1)
@pytest.mark.parametrize("loss", ALL, ids=repr)
def test_values_stay_close_to_float64_in_every_dtype(loss: Loss) -> None:
    for dtype in DTYPES:
        score, target = batch(loss, dtype)
        exact = loss.value(score.double(), target if loss in SOFTMAX else target.double())
        torch.testing.assert_close(
            loss.value(score, target).double(), exact, rtol=0, atol=40 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("loss", ALL, ids=repr)
def test_columns_and_vectors_mean_the_same_and_never_broadcast(loss: Loss) -> None:
    score, target = batch(loss)
    outputs = [score, score.unsqueeze(1)] if loss.num_scores == 1 else [score]
    for output in outputs:
        for label in (target, target.unsqueeze(1)):
            losses = loss(output, label, reduction="none")
            assert losses.shape == (16,)
            assert torch.equal(losses, loss.value(score, target))


@pytest.mark.parametrize("loss", [Logistic(), Squared(), SoftmaxCrossEntropy(3)], ids=repr)
def test_outputs_and_targets_of_other_shapes_are_refused(loss: Loss) -> None:
    score, target = batch(loss)
    for output in (
        score[0],
        score.reshape(1, *score.shape),
        torch.zeros(16, 4),
        torch.zeros(16, 1, 1),
    ):
        with pytest.raises(ValueError, match="output must have shape"):
            loss(output, target)
    for label in (target[0], target.reshape(4, 4), target.reshape(16, 1, 1)):
        with pytest.raises(ValueError, match="target must have shape"):
            loss(score, label)
    with pytest.raises(ValueError, match="one length"):
        loss(score, target[:1])
    with pytest.raises(ValueError, match="floating point"):
        loss(score.long(), target)
    with pytest.raises(ValueError, match="reduction must be one of"):
        loss(score, target, reduction="average")


@pytest.mark.cases(35, 17)
@pytest.mark.parametrize("loss", ALL, ids=repr)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_empty_batch_gives_zero_loss_and_zero_gradients(loss: Loss, reduction: str) -> None:
    model = nn.Linear(3, loss.num_scores)
    target = torch.zeros(0, dtype=torch.long if loss in SOFTMAX else torch.float32)
    result = loss(model(torch.zeros(0, 3)), target, reduction=reduction)
    result.sum().backward()
    assert result.sum().item() == 0.0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


@pytest.mark.cases(16, 8)
@pytest.mark.parametrize("loss", ALL, ids=repr)
def test_losses_do_not_name_a_device(loss: Loss) -> None:
    score, target = batch(loss)
    output = score.to("meta").requires_grad_()
    loss(output, target.to("meta")).backward()
    assert output.grad.device.type == "meta"


def test_a_second_derivative_is_refused_rather_than_zero() -> None:
    output = f64(1.0, 2.0).requires_grad_()
    [slope] = torch.autograd.grad(Squared()(output, f64(0, 0)), output, create_graph=True)
    assert slope.tolist() == [0.5, 1.0]
    with pytest.raises(RuntimeError, match="differentiable once"):
        slope.sum().backward()
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.func.grad(lambda s: torch.func.grad(lambda t: Logistic()(t, f64(1.0)))(s).sum())(
            f64(1.0)
        )


@pytest.mark.cases(5, 2)
@pytest.mark.parametrize("loss", ALL, ids=repr)
def test_records_are_vectorized_and_traced_to_the_slopes_of_the_table(loss: Loss) -> None:
    """At kinks too, where autograd would choose another subgradient."""
    score, target = batch(loss, size=8)
    if loss.num_scores == 1:
        score[:4], target[:4] = f64(1.0, -1.0, 0.0, 1.0), f64(1.0, -1.0, 1.0, -1.0)
    expected = loss.derivative(score, target)
    slopes = torch.func.vmap(torch.func.grad(lambda s, y: loss(s[None], y[None])))(score, target)
    assert torch.equal(slopes, expected)
    output = score.clone().requires_grad_()
    torch.func.vmap(lambda s, y: loss(s[None], y[None]))(output, target).sum().backward()
    assert torch.equal(output.grad, expected)
    if loss not in (Hinge(1.5), Pinball(0.1), SoftmaxCrossEntropy(5)):
        return
    torch._dynamo.reset()
    traced, output = (
        torch.compile(loss, backend="eager", fullgraph=True),
        score.clone().requires_grad_(),
    )
    losses = traced(output, target, "none")
    losses.sum().backward()
    assert torch.equal(losses, loss.value(score, target))
    assert torch.equal(output.grad, expected)


def test_label_values_are_private_and_never_raise() -> None:
    score = f64(3.0, 3.0, 3.0)
    for loss in MARGIN:
        # y = 0 is a null record; |y| <= 1 keeps the constants.
        assert loss.derivative(score, f64(0.0, 0.0, 0.0)).tolist() == [0.0, 0.0, 0.0]
        assert loss(score, torch.tensor([1, -1, 7])).isfinite()
    loss = SoftmaxCrossEntropy(3)
    output = torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    losses = loss(output, torch.tensor([0, 3, -1, -(2**40)]), reduction="none")
    losses.sum().backward()
    assert losses[1:].tolist() == [0.0, 0.0, 0.0]
    assert not output.grad[1:].any()
    assert output.grad[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_class_numbers_need_an_integer_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="integer dtype"):
        SoftmaxCrossEntropy(3)(torch.zeros(2, 3), torch.zeros(2).to(dtype))


@pytest.mark.parametrize(
    "loss", [Logistic(), SmoothedHinge(), Hinge(), Squared(), Huber(), Pinball()], ids=repr
)
def test_far_scores_keep_their_derivatives_finite_and_accurate(loss: Loss) -> None:
    score = f64(-1e8, 1e8, -1e8, 1e8)
    target = f64(1, 1, -1, -1)
    assert loss.value(score, target).isfinite().all()
    assert loss.derivative(score, target).isfinite().all()
    assert Logistic().value(f64(25.0), f64(1)).item() == pytest.approx(
        math.log1p(math.exp(-25)), rel=1e-14
    )
