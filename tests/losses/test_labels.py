"""Codings of labels: what says the same trains the same, and what is not a label has no gradient and raises nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import torch_dpsco as dp
from torch_dpsco.losses.base import as_module, read_for

pytestmark = pytest.mark.filterwarnings(
    "ignore:There is a performance drop because we have not yet implemented"
)
N, D = 40, 3
FEATURES = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
ONES = FEATURES[:, 0] > 0.2
CODINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "-1/1": lambda y: torch.where(y, 1.0, -1.0),
    "0/1": lambda y: y.float(),
    "booleans": lambda y: y,
    "integers": lambda y: y.long(),
    "-1/1, integers": lambda y: 2 * y.long() - 1,
    "bytes": lambda y: y.to(torch.uint8),
    "doubles": lambda y: y.double(),
    "0/2": lambda y: 2.0 * y,
}
BINARY: dict[str, Any] = {
    "Logistic": dp.losses.Logistic(),
    "Hinge": dp.losses.Hinge(),
    "SmoothedHinge": dp.losses.SmoothedHinge(),
    "BCEWithLogitsLoss": dp.per_record(nn.BCEWithLogitsLoss),
    "weighted": dp.per_record(nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0))),
    "a function": dp.per_record(F.binary_cross_entropy_with_logits),
    "a partial": dp.per_record(
        functools.partial(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor(2.0))
    ),
    "SoftMarginLoss": dp.per_record(nn.SoftMarginLoss),
    "HingeEmbeddingLoss": dp.per_record(nn.HingeEmbeddingLoss),
    "BCELoss": dp.per_record(nn.BCELoss()),
    "MultiLabelSoftMarginLoss": dp.per_record(nn.MultiLabelSoftMarginLoss),
}
CLASSES = FEATURES.argmax(1)
OF_CLASSES: dict[str, Any] = {
    "SoftmaxCrossEntropy": dp.losses.SoftmaxCrossEntropy(3),
    "CrossEntropyLoss": dp.per_record(nn.CrossEntropyLoss),
    "smoothed": dp.per_record(
        nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 3.0]))
    ),
    "ignores 0": dp.per_record(nn.CrossEntropyLoss(ignore_index=0)),
    "a function": dp.per_record(F.cross_entropy),
    "NLLLoss": dp.per_record(nn.NLLLoss),
    "MultiMarginLoss": dp.per_record(nn.MultiMarginLoss),
}
REAL: dict[str, Any] = {
    "Squared": dp.losses.Squared(),
    "Huber": dp.losses.Huber(),
    "Absolute": dp.losses.Absolute(),
    "Pinball": dp.losses.Pinball(),
    "EpsilonInsensitive": dp.losses.EpsilonInsensitive(),
    "MSELoss": dp.per_record(nn.MSELoss),
    "L1Loss": dp.per_record(nn.L1Loss),
    "HuberLoss": dp.per_record(F.huber_loss),
}


def gradient(loss: Any, output: Tensor, target: Tensor) -> Tensor:
    output = output.clone().requires_grad_()
    loss(
        torch.sigmoid(output) if "BCELoss" in repr(loss) else output, target, reduction="sum"
    ).backward()
    assert output.grad is not None
    return output.grad


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("name", BINARY)
def test_codings_that_say_the_same_have_the_same_gradients(name: str, coding: str) -> None:
    score, loss = FEATURES[:, 1:2], BINARY[name]
    wanted = CODINGS["0/1" if "BCE" in repr(loss) or "Label" in repr(loss) else "-1/1"](ONES)[
        :, None
    ]
    coded = CODINGS[coding](ONES)
    expected = (
        gradient(getattr(loss, "loss", loss), score, wanted)
        if isinstance(loss, dp.losses.Loss)
        else None
    )
    found = gradient(loss, score, coded[:, None])
    assert torch.equal(found, gradient(loss, score, wanted))
    assert expected is None or torch.equal(found, expected)
    if "Label" not in repr(loss):
        assert torch.equal(gradient(loss, score[:, 0], coded), found[:, 0])


def test_labels_are_read_as_torch_reads_those_that_it_wants() -> None:
    score = FEATURES[:, 1:2].clone()
    pairs = [
        (nn.BCEWithLogitsLoss, CODINGS["-1/1"], CODINGS["0/1"]),
        (nn.SoftMarginLoss, CODINGS["0/1"], CODINGS["-1/1"]),
        (nn.HingeEmbeddingLoss, CODINGS["booleans"], CODINGS["-1/1"]),
    ]
    for kind, coded, wanted in pairs:
        ours = gradient(dp.per_record(kind), score, coded(ONES)[:, None])
        theirs = score.clone().requires_grad_()
        kind(reduction="sum")(theirs, wanted(ONES)[:, None]).backward()
        torch.testing.assert_close(ours, theirs.grad)


def test_soft_labels_stay_soft_and_are_clamped() -> None:
    soft = torch.tensor([0.3, 0.9, -0.2, 1.4])
    output = torch.zeros(4)
    assert gradient(dp.per_record(nn.BCEWithLogitsLoss), output, soft).tolist() == pytest.approx(
        [0.2, -0.4, 0.5, -0.5]
    )
    chances = torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    ours = gradient(dp.per_record(nn.CrossEntropyLoss), torch.zeros(2, 2), chances)
    torch.testing.assert_close(ours, 0.5 - chances)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*BINARY, *REAL])
def test_a_target_that_is_not_finite_makes_a_null_record(name: str, bad: float) -> None:
    loss, score = (BINARY | REAL)[name], FEATURES[:, 1:2]
    labels = ONES.float()[:, None]
    other = labels.clone()
    other[3] = bad
    with_bad, without = gradient(loss, score, other), gradient(loss, score, labels)
    assert without[3] != 0
    assert with_bad[3] == 0
    assert torch.equal(
        torch.cat([with_bad[:3], with_bad[4:]]), torch.cat([without[:3], without[4:]])
    )
    assert loss(torch.sigmoid(score), other).isfinite()


@pytest.mark.parametrize("bad", [3, -1, 2**40, -(2**40)])
@pytest.mark.parametrize("name", OF_CLASSES)
def test_a_class_that_does_not_exist_makes_a_null_record(name: str, bad: int) -> None:
    loss, other = OF_CLASSES[name], CLASSES.clone()
    other[3] = bad
    with_bad, without = gradient(loss, FEATURES, other), gradient(loss, FEATURES, CLASSES)
    assert not with_bad[3].any()
    assert torch.equal(
        torch.cat([with_bad[:3], with_bad[4:]]), torch.cat([without[:3], without[4:]])
    )


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.NLLLoss(), nn.MultiMarginLoss()])
def test_a_single_column_is_no_output_for_classes(loss: nn.Module) -> None:
    """Label 1 would be no class, and label 0 always right: nothing would be learned, without a word."""
    with pytest.raises(
        ValueError, match=r"two or more, for \w+Loss \(got 1\): nn.BCEWithLogits"
    ):
        dp.per_record(loss)(torch.randn(N, 1), ONES.long())
    net = nn.Linear(D, 1)
    accountant = dp.Accountant(dp.Budget(3.0, 1e-3))
    with pytest.raises(ValueError, match="must go together") as refused:
        dp.fit(
            net,
            dataset=TensorDataset(FEATURES, ONES.long()),
            loss_fn=loss,
            budget=dp.Budget(3.0, 1e-3),
            accountant=accountant,
            progress=False,
        )
    assert "a column for each class" in str(refused.value.__cause__)
    assert not len(accountant)


def test_one_entry_that_is_no_label_makes_the_whole_record_null() -> None:
    several = torch.zeros(2, 3)
    several[0, 1] = math.nan
    assert gradient(dp.per_record(nn.BCEWithLogitsLoss), torch.ones(2, 3), several).any(
        1
    ).tolist() == [False, True]
    tokens = torch.tensor([[0, 7], [1, -100], [2, 2]])
    found = gradient(dp.per_record(nn.CrossEntropyLoss), torch.randn(3, 4, 2), tokens)
    assert found.flatten(1).any(1).tolist() == [False, True, True]
    assert not found[1, :, 1].any()  # ignored, not null
    chances = torch.tensor([[math.nan, 1.0], [0.5, 0.5]])
    assert gradient(dp.per_record(nn.CrossEntropyLoss), torch.eye(2), chances).any(
        1
    ).tolist() == [
        False,
        True,
    ]


def test_a_null_record_has_no_gradient_even_where_the_output_is_not_finite() -> None:
    output = torch.full((1, 1), math.inf, requires_grad=True)
    shown, labels = read_for(nn.MSELoss(), output, torch.tensor([[math.nan]]))
    nn.MSELoss()(shown, labels).backward()
    assert output.grad.tolist() == [[0.0]]


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2)])
def test_a_chance_that_is_no_number_makes_a_null_record_and_raises_nothing(
    shape: tuple[int, ...],
) -> None:
    """torch's own loss looks whether chances are in [0, 1], which would tell of a record with a feature that is NaN."""
    chances = torch.full(shape, 0.5)
    chances.view(3, -1)[1, 0] = math.nan
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        nn.BCELoss()(chances, torch.ones(shape))
    for loss in (
        dp.per_record(nn.BCELoss),
        lambda *both: nn.BCELoss()(*read_for(nn.BCELoss(), *both)),
    ):
        output = chances.clone().requires_grad_()
        loss(output, torch.ones(shape)).backward()
        assert output.grad.view(3, -1).any(1).tolist() == [True, False, True]


def test_fit_raises_nothing_where_a_record_has_no_chance() -> None:
    features = FEATURES.clone()
    features[3], features[4] = math.nan, math.inf
    model = nn.Sequential(nn.Linear(D, 2), nn.Tanh(), nn.Linear(2, 1), nn.Sigmoid())
    plan = dp.HolderSGD.plan(
        problem=dp.Problem(lipschitz=1.0),
        noise_multiplier=1.0,
        sampling=dp.Full(N),
        steps=2,
        lr=0.1,
    )
    dp.fit(
        model,
        dp.HolderSGD(model.parameters(), plan),
        TensorDataset(features, ONES[:, None]),
        nn.BCELoss(),
    )
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_losses_of_ones_own_see_what_they_are_given() -> None:
    class Own(nn.BCEWithLogitsLoss):
        pass

    seen: list[Tensor] = []

    def remember(output: Tensor, target: Tensor) -> Tensor:
        seen.append(target)
        return output.sum()

    target = torch.tensor([[-1.0], [math.nan]])
    for loss in (Own(), remember, nn.CosineSimilarity()):
        assert read_for(loss, target, target)[1] is target
        assert as_module(loss) is loss
    assert read_for(nn.MSELoss(), (target,), target)[1] is target
    assert isinstance(as_module(F.cross_entropy), nn.CrossEntropyLoss)


class OneByOne(Dataset[Any]):
    """Not in memory, so that fit makes a forward and a backward."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def named(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def optimizer_of(model: nn.Module) -> dp.PrivateOptimizer:
    """Returns one that steps on all records, without noise."""
    oracle = dp.oracles.Clipped(1.0, 0.0, N)
    return dp.PrivateOptimizer(
        model.parameters(),
        0.5,
        design=dp.Full(N),
        oracle=oracle,
        rule=dp.rules.SGD(),
        adjacency="replace_one",
    )


def fitted(loss: Any, target: Tensor, outputs: int = 1, *, how: str = "in memory") -> Tensor:
    """Returns weights after steps on all records, without noise."""
    torch.manual_seed(0)
    model = (
        nn.Linear(D, outputs)
        if how != "net"
        else nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, outputs))
    )
    optimizer = optimizer_of(model)
    data: Any = TensorDataset(FEATURES, target)
    data = OneByOne(data) if how == "one by one" else data
    dp.fit(model, optimizer, data, loss, steps=4, progress=False)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("loss", "how"),
    [
        (dp.losses.Logistic(), "in memory"),
        (dp.losses.Logistic(), "net"),
        (dp.losses.Hinge(), "in memory"),
        (nn.BCEWithLogitsLoss(), "in memory"),
        (nn.BCEWithLogitsLoss(), "one by one"),
        (F.binary_cross_entropy_with_logits, "net"),
        (nn.SoftMarginLoss(), "one by one"),
    ],
    ids=named,
)
def test_fit_learns_the_same_from_every_coding(loss: Any, how: str) -> None:
    zeros, signs, booleans = (
        fitted(loss, CODINGS[name](ONES)[:, None], how=how)
        for name in ("0/1", "-1/1", "booleans")
    )
    assert torch.equal(zeros, signs)
    assert torch.equal(zeros, booleans)
    if how == "in memory":
        scores = FEATURES @ zeros[:D] + zeros[D]
        assert ((scores > 0) == ONES).float().mean() > 0.7


@pytest.mark.usefixtures("in_torch")
def test_fit_learns_the_same_without_the_accelerator() -> None:
    assert torch.equal(
        *[
            fitted(nn.BCEWithLogitsLoss(), CODINGS[name](ONES)[:, None])
            for name in ("0/1", "-1/1")
        ]
    )


def test_compiled_rows_learn_the_same_from_every_coding() -> None:
    found = []
    for name in ("0/1", "-1/1"):
        torch.manual_seed(0)
        model = nn.Linear(D, 1)
        optimizer = optimizer_of(model)
        rows = dp.CompiledRows(model, F.binary_cross_entropy_with_logits, backend=None)
        for inputs, targets in optimizer.loader(
            TensorDataset(FEATURES, CODINGS[name](ONES)[:, None])
        ):
            rows.step(optimizer, inputs, targets)
            break
        found.append(model.weight.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("loss", "how"),
    [
        (dp.losses.Logistic(), "in memory"),
        (dp.losses.Huber(0.3), "in memory"),
        (dp.losses.Pinball(), "one by one"),
        (nn.BCEWithLogitsLoss(), "in memory"),
        (nn.BCEWithLogitsLoss(), "net"),
        (nn.MSELoss(), "in memory"),
        (nn.L1Loss(), "net"),
    ],
    ids=named,
)
def test_fit_leaves_out_a_record_whose_target_is_not_finite(loss: Any, how: str) -> None:
    labels = ONES.float()[:, None]
    found = []
    for bad in (math.nan, math.inf):
        target = labels.clone()
        target[7] = bad
        found.append(fitted(loss, target, how=how))
    assert torch.equal(*found)
    assert found[0].isfinite().all()
    assert not torch.equal(found[0], fitted(loss, labels, how=how))


@pytest.mark.parametrize(
    ("loss", "how"),
    [
        (dp.losses.SoftmaxCrossEntropy(3), "in memory"),
        (dp.losses.SoftmaxCrossEntropy(3), "one by one"),
        (nn.CrossEntropyLoss(), "in memory"),
        (nn.CrossEntropyLoss(), "net"),
    ],
    ids=named,
)
def test_fit_leaves_out_a_record_whose_class_does_not_exist(loss: Any, how: str) -> None:
    """It raised, from the C code of torch, which told that there is one."""
    found = []
    for bad in (3, -1):
        target = CLASSES.clone()
        target[7] = bad
        found.append(fitted(loss, target, 3, how=how))
    assert torch.equal(*found)
    assert not torch.equal(found[0], fitted(loss, CLASSES, 3, how=how))


def test_plans_say_which_labels_say_the_same() -> None:
    design = dp.Poisson(20, 60)
    assert "0/1, -1/1 and booleans are the same" in " ".join(
        str(
            dp.ClippedSGD.plan(lr=0.1, clip=1.0, noise_multiplier=5.0, sampling=design, steps=3)
        ).split()
    )
