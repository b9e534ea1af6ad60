"""Several forwards of a model on the same records: one row for each, or words about what is wrong.

Why it matters for privacy: a record in two rows moves a clipped sum by two clips.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import torch_dpsco as dp
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.rows import GradBatch, retire_forwards

N = 9
CLIP = 0.05
bce = functional.binary_cross_entropy_with_logits
EARLY_DYNAMO = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="torch 2.6 compiles no attached model"
)
Loss = Callable[[Any, Any, Any], Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def convolutions() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
    )


def optimizer_of(model: nn.Module, **options: Any) -> Any:
    given = {
        "sampling": dp.Full(N),
        "steps": 3,
        "noise_multiplier": 1e-9,
        "adjacency": "replace_one",
    }
    plan = dp.ClippedSGD.plan(n=N, clip=CLIP, lr=1.0, **(given | options))
    return dp.ClippedSGD(model.parameters(), plan)


def data(*shape: int) -> TensorDataset:
    torch.manual_seed(3)
    return TensorDataset(torch.randn(N, *shape), torch.arange(N) % 2)


def gan(model: Any, x: Tensor, y: Tensor) -> Tensor:
    fake = torch.full_like(x, 0.3)
    return bce(model(x), torch.ones(len(x), 2)) + bce(model(fake), torch.zeros(len(x), 2))


def triplet(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return functional.triplet_margin_loss(model(x), model(x * 1.1), model(-x), margin=2.0)


def flipped_views(model: Any, x: Tensor, y: Tensor) -> Tensor:
    seen = [x, x.flip(-1), x.flip(-2)] if x.dim() > 2 else [x, x.flip(1)]
    return sum(functional.cross_entropy(model(v), y) for v in seen) / len(seen)


def in_turn(model: Any, x: Tensor, y: Tensor) -> Tensor:
    first = model(x)
    return (
        functional.cross_entropy(model(torch.cat([first, x[:, 2:]], 1)), y)
        + first.square().mean()
    )


def together(model: Any, x: Tensor, y: Tensor) -> Tensor:
    outputs = torch.cat([model(x), model(x + 1)])
    return functional.cross_entropy(outputs, torch.cat([y, 1 - y]))


def by_hand(model: nn.Module, loss: Loss, dataset: TensorDataset) -> list[Tensor]:
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for x, y in dataset:
        found = torch.autograd.grad(loss(model, x[None], y[None]), params)
        norm = torch.cat([g.flatten() for g in found]).norm()
        for t, g in zip(total, found, strict=True):
            t += g * min(1.0, CLIP / float(norm)) / len(dataset)
    return total


def moved(
    model: nn.Module, loss: Loss, dataset: TensorDataset, *, steps: int = 1, **options: Any
) -> list[Tensor]:
    """Returns minus the move of one step, for a loss by steps."""
    check = options.pop("check_first_step", True)
    before = [p.detach().clone() for p in model.parameters()]
    dp.attach(model, check_first_step=check)
    optimizer = optimizer_of(model, **options)
    for x, y in optimizer.loader(dataset, steps=steps):
        optimizer.zero_grad()
        with dp.same_records(model):
            loss(model, x, y).backward()
        optimizer.step()
    return [a - p.detach() for a, p in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("loss", [gan, triplet, flipped_views, in_turn, together])
@pytest.mark.parametrize("asked", [True, False])
def test_rows_of_several_forwards_are_those_of_records_alone(loss: Loss, asked: bool) -> None:
    expected = by_hand(net(), loss, data(4))
    found = moved(net(), loss, data(4), check_first_step=asked)
    torch.testing.assert_close(found, expected, atol=2e-7, rtol=1e-5)


def test_rows_of_convolutions_too() -> None:
    expected = by_hand(convolutions(), flipped_views, data(1, 4, 4))
    found = moved(convolutions(), flipped_views, data(1, 4, 4))
    torch.testing.assert_close(found, expected, atol=2e-7, rtol=1e-5)


def test_rows_of_embeddings_too() -> None:
    def texts() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3), nn.Flatten(), nn.Linear(12, 2))

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y) + model((x + 1) % 7).square().mean()

    words = TensorDataset(torch.randint(0, 7, (N, 4)), data(4).tensors[1])
    expected = by_hand(texts(), loss, words)
    torch.testing.assert_close(moved(texts(), loss, words), expected, atol=2e-7, rtol=1e-5)


def test_batches_in_parts() -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = optimizer_of(dp.attach(model))
    for x, y in optimizer.loader(data(4), steps=1, physical_batch_size=4):
        with dp.same_records(model):
            triplet(model, x, y).backward()
        optimizer.step()
    found = [a - p.detach() for a, p in zip(before, model.parameters(), strict=True)]
    torch.testing.assert_close(found, by_hand(net(), triplet, data(4)), atol=2e-7, rtol=1e-5)


def test_another_attached_model_in_the_block_is_looked_at_itself() -> None:
    first = dp.attach(net())
    second = dp.attach(net())
    optimizer = optimizer_of(first)
    for x, y in optimizer.loader(data(4), steps=1):
        with dp.same_records(first):
            other = second(x)
            (triplet(first, x, y) + other.softmax(0).square().sum().detach()).backward()
            with pytest.raises(PrivacyError, match="in the loss"):
                other.softmax(0).square().sum().backward()
    verdicts = first._dpsco.first.verdicts  # type: ignore[union-attr]
    assert verdicts["inputs of dp.same_records"].startswith("checked at the first step")


@EARLY_DYNAMO
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_model_is_looked_at_too() -> None:
    def run(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        model = net()
        before = [p.detach().clone() for p in model.parameters()]
        compiled = torch.compile(dp.attach(model), backend="eager")
        optimizer = optimizer_of(model)
        for x, y in optimizer.loader(data(4), steps=1):
            with dp.same_records(model):
                triplet(lambda t: compiled(change(t)), x, y).backward()
            optimizer.step()
        return [a - p.detach() for a, p in zip(before, model.parameters(), strict=True)]

    expected = by_hand(net(), triplet, data(4))
    torch.testing.assert_close(run(lambda t: t * 1), expected, atol=2e-7, rtol=1e-5)
    with pytest.raises(PrivacyError, match="keep their places"):
        run(lambda t: t.roll(1, 0))


def test_two_backwards_are_one_row() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        functional.cross_entropy(model(x), y).backward()
        return functional.cross_entropy(model(-x), y)

    def once(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y) + functional.cross_entropy(model(-x), y)

    found = moved(net(), loss, data(4))
    torch.testing.assert_close(found, by_hand(net(), once, data(4)), atol=2e-7, rtol=1e-5)


def test_rows_are_those_of_a_wrapped_module() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            return self.net(x), self.net(z)

    wrapped = dp.attach(Both())
    x = torch.randn(N, 4)
    a, b = wrapped(x, -x)
    (a.square().mean() + b.exp().mean()).backward()
    expected = GradBatch.consume(list(wrapped.parameters()))
    model = dp.attach(net(), check_first_step=False)
    with dp.same_records(model):
        (model(x).square().mean() + model(-x).exp().mean()).backward()
    rows = GradBatch.consume(list(model.parameters()))
    assert len(rows) == N
    assert torch.equal(rows.norms(), expected.norms())
    for i in range(N):
        weights = torch.eye(N, dtype=torch.float64)[i]
        assert all(map(torch.equal, rows.weighted_sum(weights), expected.weighted_sum(weights)))


class Views(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = data(4)[index]
        return torch.stack([x * torch.linspace(1, 2, 4).roll(k) for k in range(3)]), y


def test_views_of_a_data_set_are_one_row() -> None:
    dataset = Views()

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return sum(functional.cross_entropy(model(x[:, k]), y) for k in range(3)) / 3

    kept = [dataset[i] for i in range(N)]
    found = moved(net(), loss, dataset)  # type: ignore[arg-type]
    torch.testing.assert_close(found, by_hand(net(), loss, kept), atol=2e-7, rtol=1e-5)  # type: ignore[arg-type]


def neighbors(loss: Loss, made: Callable[[], nn.Module] = net, **options: Any) -> float:
    """Returns how far one record that is replaced moves the sum of rows, in clips."""
    dataset = data(4)
    dataset.tensors[0].mul_(0.1)[2].fill_(3.0)
    other = TensorDataset(dataset.tensors[0].clone(), dataset.tensors[1])
    other.tensors[0][2] *= -1
    found = [moved(made(), loss, d, **options) for d in (dataset, other)]
    gaps = torch.cat([(a - b).flatten() for a, b in zip(*found, strict=True)])
    return float(gaps.norm()) * N / CLIP


@pytest.mark.parametrize("loss", [gan, triplet, flipped_views, together])
def test_a_record_moves_a_sum_by_its_own_row_only(loss: Loss) -> None:
    assert neighbors(loss) <= 2 * (1 + 1e-5)


def test_what_the_check_refuses_would_move_more() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) + model(x.flip(0))).mean()

    def linear() -> nn.Module:
        return nn.Linear(4, 1, bias=False)

    with pytest.raises(PrivacyError, match="keep their places"):
        neighbors(loss, linear)
    assert neighbors(loss, linear, check_first_step=False) > 3.5


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "permuted": lambda x: x[torch.randperm(len(x))],
    "by a fixed index": lambda x: x[[*range(1, len(x)), 0]],
    "in place": lambda x: x.clone().copy_(x.flip(0)),
    "centered": lambda x: x - x.mean(0),
    "sorted": lambda x: x.sort(0)[0],
    "mixed": lambda x: 0.5 * x + 0.5 * x.flip(0),
    "cut and put together": lambda x: torch.cat([x[1:], x[:1]]),
    "a record for all": lambda x: x[:1].expand(len(x), -1) * 2,
    "a view from the second record on": lambda x: x.as_strided((len(x) - 1, 4), (4, 1), 4),
    "a matrix that is transposed": lambda x: (x @ x.T)[:, :4],
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED.keys())
def test_records_that_change_places_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return model(x).square().mean() + model(change(x)).square().mean()

    model = net()
    with pytest.raises((PrivacyError, SequenceError), match=r"dp\.same_records"):
        moved(model, loss, data(4))
    assert not any(p.grad is not None for p in model.parameters())


def test_an_index_from_before_the_block_is_refused() -> None:
    order = torch.randperm(N)

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return model(x).square().mean() + model(x[order]).square().mean()

    with pytest.raises(PrivacyError, match="an index from before the block"):
        moved(net(), loss, data(4))


def test_outputs_that_change_places_are_refused() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        again = torch.cat([model(x), x[:, 2:]], 1)
        return model(again.flip(0)).square().mean()

    with pytest.raises(PrivacyError, match="keep their places"):
        moved(net(), loss, data(4))


def test_a_second_backward_is_looked_at() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        model(x).square().mean().backward()
        return model(x.flip(0)).square().mean()

    with pytest.raises(PrivacyError, match="keep their places"):
        moved(net(), loss, data(4))


def test_losses_that_couple_records_over_forwards_are_refused() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) @ model(-x).T).logsumexp(1).sum()

    with pytest.raises(PrivacyError, match="in the loss"):
        moved(net(), loss, data(4))


def test_inputs_from_before_the_block_are_refused() -> None:
    model = dp.attach(net())
    optimizer = optimizer_of(model)
    for x, _ in optimizer.loader(data(4), steps=1):
        other = x.flip(0)
        with dp.same_records(model):
            model(x)
            with pytest.raises(SequenceError, match="inside of the block"):
                model(other)


@pytest.mark.parametrize(
    "view", [lambda x: x[1:], lambda x: x[::2], lambda x: x[:1].expand(len(x), -1)]
)
def test_views_of_other_records_are_refused_in_every_step(view: Any) -> None:
    model = dp.attach(net())
    optimizer = optimizer_of(model)
    for k, (x, _) in enumerate(optimizer.loader(data(4), steps=2)):
        with dp.same_records(model):
            loss = model(x).square().mean()
            if k:
                with pytest.raises(SequenceError, match=r"dp\.same_records"):
                    model(view(x))
            loss.backward()
        optimizer.discard() if k else optimizer.step()


def test_forwards_of_other_sizes_are_refused() -> None:
    model = dp.attach(net(), check_first_step=False)
    with dp.same_records(model):
        model(torch.ones(N, 4))
        with pytest.raises(SequenceError, match="one row for each record"):
            model(torch.ones(N - 1, 4))


class Boxed(nn.Module):
    """A model of inputs in an object of its own, of which nobody knows the number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, box: SimpleNamespace) -> Tensor:
        return self.layer(box.x)


def test_forwards_of_sizes_that_are_not_known_are_refused() -> None:
    model = dp.attach(Boxed(), check_first_step=False)
    with dp.same_records(model):
        model(SimpleNamespace(x=torch.ones(N, 4)))
        with pytest.raises(SequenceError, match="one row for each record"):
            model(SimpleNamespace(x=torch.ones(N - 1, 4)))


def test_a_block_is_of_one_batch() -> None:
    model = dp.attach(net(), check_first_step=False)
    optimizer = optimizer_of(model)
    batches = iter(optimizer.loader(data(4), steps=2))
    x, _ = next(batches)
    with dp.same_records(model):
        model(x).square().mean().backward()
        retire_forwards(list(model.parameters()))
        with pytest.raises(SequenceError, match="one batch"):
            model(x)
    optimizer.discard()
    with dp.same_records(model):
        next(batches := iter(optimizer.loader(data(4), steps=1)))
        with pytest.raises(SequenceError, match=r"tensors of optimizer\.loader"):
            model(x)


@pytest.mark.parametrize("block", [True, False])
def test_forwards_before_the_block_are_refused(block: bool) -> None:
    model = dp.attach(net(), check_first_step=False)
    x = torch.ones(N, 4)
    with dp.same_records(model) if block else contextlib.nullcontext():
        model(x[:4]).sum().backward()
    with dp.same_records(model), pytest.raises(SequenceError, match="one batch"):
        model(x[4:])


def test_steps_are_made_after_the_block() -> None:
    model = dp.attach(net(), check_first_step=False)
    optimizer = optimizer_of(model)
    x, _ = next(iter(optimizer.loader(data(4), steps=1)))
    with dp.same_records(model):
        model(x).square().mean().backward()
        with pytest.raises(SequenceError, match="after the block"):
            optimizer.step()
        with pytest.raises(SequenceError, match="after the block"):
            optimizer.accumulate()
    optimizer.step()
    assert optimizer.steps == 1


def test_blocks_are_not_nested_and_end_with_an_exception() -> None:
    model = dp.attach(net(), check_first_step=False)
    with (
        dp.same_records(model),
        pytest.raises(SequenceError, match="in another"),
        dp.same_records(model),
    ):
        pass
    with contextlib.suppress(ZeroDivisionError), dp.same_records(model):
        raise ZeroDivisionError
    model._dpsco.reset()  # type: ignore[union-attr]
    a, b = model(torch.ones(3, 4)), model(torch.ones(3, 4))
    (a.sum() + b.sum()).backward()
    assert len(GradBatch.consume(list(model.parameters()))) == 6  # other records again


def test_a_block_that_raises_leaves_no_rows() -> None:
    model = dp.attach(net())
    optimizer = optimizer_of(model)
    for x, _ in optimizer.loader(data(4), steps=1):
        with pytest.raises(PrivacyError, match="keep their places"), dp.same_records(model):
            (model(x) + model(x.flip(0))).mean().backward()
        with pytest.raises(SequenceError, match="missing"):
            optimizer.step()
        with pytest.raises(PrivacyError, match="keep their places"), dp.same_records(model):
            loss = (model(x) + model(x.flip(0))).mean()
        with pytest.raises(SequenceError, match="follow its own forward"):
            loss.backward()


def test_a_model_is_not_copied_in_a_block() -> None:
    model = dp.attach(net())
    with dp.same_records(model), pytest.raises(SequenceError, match="between steps"):
        copy.deepcopy(model)
    assert copy.deepcopy(model)._dpsco.passes.shared is None  # type: ignore[union-attr]


def test_layers_that_record_no_rows_are_refused_by_name() -> None:
    model = dp.attach(DPLSTM(3, 2, batch_first=True))
    with (
        pytest.raises(SequenceError, match=r"RNNLinear.*wrap the forwards in one module"),
        dp.same_records(model),
    ):
        pass
    with pytest.raises(SequenceError, match="attached"), dp.same_records(net()):
        pass


def test_forwards_in_eval_mode_leave_no_rows() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            target = model(x).softmax(1)
        model.train()
        return functional.cross_entropy(model(-x), target)

    found = moved(net(), loss, data(4))
    torch.testing.assert_close(found, by_hand(net(), loss, data(4)), atol=2e-7, rtol=1e-5)


def test_a_gradient_penalty_is_refused_by_name() -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        mix = (x * torch.rand(len(x), 1)).requires_grad_()
        (slope,) = torch.autograd.grad(model(mix).sum(), mix, create_graph=True)
        return model(x).mean() + (slope.norm(dim=1) - 1).square().mean()

    for asked in (True, False):
        with pytest.raises(SequenceError, match="gradient penalty"):
            moved(net(), loss, data(4), check_first_step=asked)


def test_generators_and_noise_of_the_block_pass_and_the_report_says_what_was_checked() -> None:
    model = dp.attach(net())
    maker = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    optimizer = optimizer_of(model)
    for x, _ in optimizer.loader(data(4), steps=3):
        with dp.same_records(model):
            fake = maker(torch.randn(len(x), 3)).detach()
            loss = bce(model(x), torch.ones(N, 2)) + bce(model(fake), torch.zeros(N, 2))
            loss.backward()
        optimizer.step()
        with dp.public(model):
            model(maker(torch.randn(8, 3))).mean().backward()
    assert optimizer.steps == 3
    assert type(fake) is Tensor
    assert "inputs of dp.same_records: checked at the first step" in str(optimizer.report(1e-5))


@pytest.mark.parametrize("isolation", [None, "slots"])
def test_batches_of_private_size_are_filled_up_to_one(isolation: Any) -> None:
    model = dp.attach(net())
    maker = nn.Linear(3, 4)
    torch.manual_seed(0)
    options = {"noise_multiplier": 1.0, "adjacency": "add_remove", "steps": 4}
    plan = dp.ClippedSGD.plan(
        n=64, clip=1.0, lr=0.1, batch_size=16, sampling="poisson", **options
    )
    optimizer = dp.ClippedSGD(model.parameters(), plan)
    dataset = TensorDataset(torch.randn(64, 4))
    for (x,) in optimizer.loader(dataset, steps=4, isolation=isolation):
        with dp.same_records(model):
            fake = maker(torch.randn(len(x), 3)).detach()
            loss = bce(model(x), torch.ones(len(x), 2)) + bce(
                model(fake), torch.zeros(len(x), 2)
            )
            loss.backward()
        optimizer.step()
    assert optimizer.steps == 4
    assert optimizer._isolation.level == "slots"


def test_several_forwards_after_a_test_of_one_are_refused() -> None:
    model = dp.attach(net())
    plan = dp.ClippedSGD.plan(
        n=64, clip=1.0, lr=0.1, batch_size=16, sampling="poisson", noise_multiplier=1.0, steps=4
    )
    optimizer = dp.ClippedSGD(model.parameters(), plan)
    dataset = TensorDataset(torch.randn(64, 4), torch.zeros(64, 2))
    for k, (x, y) in enumerate(optimizer.loader(dataset, steps=3)):
        with dp.same_records(model) if k else contextlib.nullcontext():
            loss = functional.mse_loss(model(x), y)
            if k:
                with pytest.raises(SequenceError, match="isolation='slots'"):
                    loss.backward()
                break
            loss.backward()
        optimizer.step()
        assert optimizer._isolation.level == "rounded"


def test_the_scripts_of_the_page_run() -> None:
    page = (Path(__file__).parents[2] / "docs/several_calls.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks[1:]:  # the first one is a pattern
        exec(block, names)
        known = (
            r"inputs of dp.same_records: (checked at the first step|they are the loader's own)"
        )
        assert re.search(known, str(names["optimizer"].report()))
