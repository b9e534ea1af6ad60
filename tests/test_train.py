"""`fit`: what it shows, what it refuses before anything is spent, and what is left when it is interrupted."""

from __future__ import annotations

import math
import re
from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import torch_dpsco as dp
from torch_dpsco.errors import InfeasibleError, PrivacyError, SequenceError, UtilityWarning
from torch_dpsco.rows.attach import is_attached
from torch_dpsco.sampling.loader import to_device

N, BATCH, DIM, DELTA = 40, 8, 3, 1e-3
LOSS = dp.losses.Logistic()
PROBLEM = LOSS.problem(bound_x=2.0)
Pair = namedtuple("Pair", "inputs target")


def records(n: int = N, shape: tuple[int, ...] = (DIM,)) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, *shape, generator=generator), torch.ones(n, 1))


class Records(Dataset):
    """Gives whatever it is made of, one by one."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def linear() -> nn.Linear:
    return nn.Linear(DIM, 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 1))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(8, 1))


def holder(model: nn.Module, **changes: Any) -> dp.HolderSGD:
    kind = {
        "lr": 0.1,
        "problem": PROBLEM,
        "noise_multiplier": 2.0,
        "batch_size": BATCH,
        "n": N,
        "steps": 5,
        **changes,
    }
    own = {name: kind.pop(name) for name in ("generator", "accountant", "rule") if name in kind}
    return dp.HolderSGD(model.parameters(), dp.HolderSGD.plan(**kind), **own)


def planned(model: nn.Module, budget: dp.Budget | None = None, **changes: Any) -> dp.HolderSGD:
    """Returns an optimizer with a budget of five steps."""
    kind = {"problem": PROBLEM, "n": N, "batch_size": BATCH, "epochs": 1, **changes}
    own = {name: kind.pop(name) for name in ("generator", "accountant", "rule") if name in kind}
    plan = dp.HolderSGD.plan(budget=budget or dp.Budget(1.0, DELTA), **kind)
    return dp.HolderSGD(model.parameters(), plan, **own)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# -- the bar ----------------------------------------------------------------------------------------------------------


def frames(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns what a user sees, one line for each time the bar was drawn."""
    captured = capsys.readouterr()
    assert captured.out == ""
    return [frame for frame in re.split(r"[\r\n]", captured.err) if frame.strip()]


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws the bar at each step, however fast they are."""
    monkeypatch.setattr("torch_dpsco.train._SHOW_EVERY", 0.0)
    monkeypatch.setattr("torch_dpsco.train._SHARE", math.inf)


@pytest.mark.cases(0, 1)
@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_the_bar_never_shows_less_epsilon_than_was_spent(
    adjacency: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = linear()
    optimizer = planned(model, dp.Budget(1.0, DELTA, adjacency=adjacency), epochs=10)
    dp.fit(model, optimizer, records(), LOSS)
    event = optimizer.design.event(optimizer.oracle.event(), 1)
    seen = []
    for frame in frames(capsys)[1:]:
        step, epsilon, left = re.search(
            r" (\d+)/50 .*epsilon=([\d.]+), left=(\d+)\]", frame
        ).groups()
        assert int(step) + int(left) == 50
        other = dp.Accountant(adjacency=adjacency)
        other.record(event, int(step))
        spent = other.get_epsilon(DELTA)
        assert spent <= float(epsilon) <= 1.002 * spent
        seen.append(int(step))
    assert set(seen) == set(range(1, 51))


@pytest.mark.slow
@pytest.mark.usefixtures("every_step")
def test_the_bar_never_shows_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    model = linear()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return LOSS(output, target) * 0 + 7.654321

    dp.fit(model, planned(model), records(), loss)
    shown = frames(capsys)
    assert len(shown) > 5
    for frame in shown:
        assert (
            re.search(r"[76]\.[56]\d|loss", re.sub(r"[\d.?]+ ?(step/s|s/step)", "", frame))
            is None
        )


@pytest.mark.usefixtures("every_step")
def test_without_a_delta_the_bar_shows_the_steps_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = linear()
    dp.fit(model, holder(model), records(), LOSS)
    shown = frames(capsys)
    assert "left=0" in shown[-1]
    assert not any("epsilon" in frame for frame in shown)


def test_without_progress_nothing_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    model = linear()
    dp.fit(model, planned(model), records(), LOSS, progress=False)
    assert capfd.readouterr() == ("", "")


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("build", "shape"), [(linear, (DIM,)), (mlp, (DIM,)), (conv, (1, 4, 4))]
)
def test_every_kind_of_model_trains_through_empty_draws(
    build: Any, shape: tuple[int, ...]
) -> None:
    model, calls = build(), []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if optimizer.outstanding_rows is not None:  # else the doctor probes
            calls.append(len(target))
        return LOSS(output, target, reduction="sum")

    optimizer = planned(
        model, batch_size=1, epochs=1, sampling="poisson"
    )  # 40 draws, each empty with probability 0.36
    before, data = weights(model), records(shape=shape)
    assert (
        dp.fit(
            model, optimizer, data, loss, loss_reduction="sum", isolation="none", progress=False
        )
        is model
    )
    assert optimizer.steps == len(optimizer.accountant) == 40
    assert 0 not in calls
    assert len(calls) < 40  # all full: probability 2e-8
    assert optimizer.finalized
    assert not any(
        torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_the_model_can_be_used_at_once() -> None:
    model, data = conv(), records(shape=(1, 4, 4))
    dp.fit(model, planned(model), data, LOSS, progress=False)
    assert torch.equal(
        model(data.tensors[0]), model(data.tensors[0])
    )  # two forwards, gradients enabled


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fit_is_the_loop_that_one_would_write(reduction: str) -> None:
    # Rate 1 makes every draw the data set, and the noise is seeded; so both runs are the same to the bit.
    first, second = linear(), linear()
    second.load_state_dict(first.state_dict())
    optimizers = []
    for model in (first, second):
        with pytest.warns(UtilityWarning, match="generator="):
            optimizers.append(
                planned(
                    model, batch_size=N, epochs=4, generator=torch.Generator().manual_seed(3)
                )
            )
    loss = partial(LOSS, reduction=reduction)
    dp.fit(first, optimizers[0], records(), loss, loss_reduction=reduction, progress=False)
    dp.attach(second, loss_reduction=reduction)
    for inputs, targets in optimizers[1].loader(records(), steps=4):
        optimizers[1].zero_grad()
        loss(second(inputs), targets).backward()
        optimizers[1].step()
    optimizers[1].finalize()
    assert all(map(torch.equal, first.parameters(), second.parameters()))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_physical_batches_make_one_step_of_each_draw(rows: str) -> None:
    model, seen = dp.attach(mlp(), rows=rows), []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if optimizer.outstanding_rows is not None:  # else the doctor probes
            seen.append(len(target))
        return LOSS(output, target)

    optimizer = planned(model, batch_size=None, sampling="full", epochs=5)
    dp.fit(model, optimizer, records(), loss, physical_batch_size=16, progress=False)
    assert seen == [16, 16, 8] * 5
    assert optimizer.steps == len(optimizer.accountant) == 5


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("workers", [0, 1])
def test_pairs_of_any_structure_are_trained_on(workers: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(DIM, 1)

        def forward(self, inputs: Any) -> torch.Tensor:
            return self.layer(inputs["x"] + inputs["more"][0][:, None])

    model = Model()
    data = Records(
        [
            Pair({"x": torch.ones(DIM), "more": [torch.tensor(i % 2.0)]}, torch.ones(1))
            for i in range(N)
        ]
    )
    dp.fit(model, optimizer := planned(model), data, LOSS, num_workers=workers, progress=False)
    assert optimizer.steps == 5


def test_batches_move_to_the_device_of_the_model_whatever_their_structure() -> None:
    batch = Pair(
        {"x": torch.ones(2), "names": ["a", "b"]}, [torch.ones(2, dtype=torch.int64), 3]
    )
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is Pair
    assert moved.inputs["x"].is_meta
    assert moved.inputs["names"] == ["a", "b"]
    assert (moved.target[0].is_meta, moved.target[0].dtype, moved.target[1]) == (
        True,
        torch.int64,
        3,
    )


# -- refused before anything is spent ---------------------------------------------------------------------------------


def check_refused(
    kind: type[Exception],
    message: str,
    model: nn.Module,
    optimizer: Any,
    data: Any = None,
    loss: Any = LOSS,
    **kw: Any,
) -> None:
    """Asserts that fit raises, and that model and ledger are then as they were."""
    before, spent = weights(model), len(optimizer.accountant)
    with pytest.raises(kind, match=message):
        dp.fit(model, optimizer, data or records(), loss, progress=False, **kw)
    assert len(optimizer.accountant) == spent
    assert all(map(torch.equal, before, model.parameters()))


def test_more_steps_than_are_planned_are_refused_and_the_plan_can_still_be_made() -> None:
    model = linear()
    optimizer = planned(model)
    check_refused(
        ValueError,
        r"steps must be <= 5, what is left of the 5 planned ones \(got 6\)",
        model,
        optimizer,
        steps=6,
    )
    assert not optimizer.finalized
    dp.fit(model, optimizer, records(), LOSS, steps=5, progress=False)
    check_refused(SequenceError, "finalized: make a new one", model, optimizer)


def test_a_plan_that_is_made_is_refused_with_the_way_out() -> None:
    model = dp.attach(linear())
    optimizer = planned(model, batch_size=N)
    for inputs, targets in optimizer.loader(records(), steps=1):
        LOSS(model(inputs), targets).backward()
        optimizer.step()
    check_refused(
        SequenceError,
        "the optimizer is finalized: make a new one to train again",
        model,
        optimizer,
    )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("design", [dp.Poisson, dp.Fixed, dp.Shuffled], ids=lambda d: d.__name__)
@pytest.mark.parametrize("already", [0, 3])
def test_steps_that_the_budget_does_not_admit_are_refused_and_as_many_as_named_can_be_made(
    design: Any, already: int
) -> None:
    model = dp.attach(linear())
    accountant = dp.Accountant(dp.Budget(3.0, DELTA))
    oracle = dp.oracles.Clipped(
        clip=1.0, noise_multiplier=2.0 if design is not dp.Shuffled else 4.0, batch_size=BATCH
    )
    own = design(BATCH, N)
    if already:
        accountant.record(own.event(oracle.event(), already))
    optimizer = dp.PrivateOptimizer(
        model.parameters(),
        0.1,
        oracle=oracle,
        rule=dp.rules.SGD(),
        design=own,
        accountant=accountant,
    )
    with pytest.raises(
        InfeasibleError, match=r"steps must be <= \d+, .*the budget admits \(got 500\)"
    ) as caught:
        dp.fit(model, optimizer, records(), LOSS, steps=500, progress=False)
    admitted = int(re.search(r"<= (\d+)", str(caught.value))[1])
    assert len(accountant) == (1 if already and design is dp.Shuffled else already)
    check_refused(InfeasibleError, f"<= {admitted},", model, optimizer, steps=admitted + 1)
    dp.fit(model, optimizer, records(), LOSS, steps=admitted, progress=False)
    assert optimizer.steps == admitted > 0
    assert optimizer.report().epsilon <= 3.0


def test_an_unknown_number_of_steps_is_refused() -> None:
    model = linear()
    check_refused(
        ValueError, r"steps must be given.*\(got None\)", model, holder(model, steps=None)
    )
    check_refused(
        ValueError, r"steps must be an integer >= 1 \(got 0\)", model, holder(model), steps=0
    )
    check_refused(
        ValueError,
        r"physical_batch_size must be an integer >= 1",
        model,
        holder(model),
        physical_batch_size=0,
    )


def test_an_optimizer_of_another_model_is_refused() -> None:
    model = mlp()
    check_refused(SequenceError, r"model 4, optimizer 2, in common 0", model, holder(linear()))
    check_refused(
        SequenceError,
        r"in common 2\): make the optimizer after the last change .* freeze the others with",
        model,
        holder(model[0]),
    )
    model[2].requires_grad_(False)
    dp.fit(model, holder(model[0]), records(), LOSS, progress=False)


@pytest.mark.parametrize(
    ("record", "got"),
    [
        ({"x": torch.ones(DIM), "y": torch.ones(1)}, r"got dict\)"),
        ((torch.ones(DIM), torch.ones(1), torch.ones(1)), "got tuple of 3"),
        ([torch.ones(DIM)], "got list of 1"),
        (torch.ones(2), r"got Tensor\)"),
    ],
)
def test_records_that_are_no_pairs_are_refused(record: Any, got: str) -> None:
    model = linear()
    message = rf"dataset must give \(input, target\) pairs \({got}.*TensorDataset\(X, y\).*write the loop yourself"
    check_refused(ValueError, message, model, holder(model), Records([record] * N))


def test_an_optimizer_of_torch_is_refused() -> None:
    model = linear()
    sgd: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"optimizer must be a PrivateOptimizer, as HolderSGD\(.*got SGD"
    ):
        dp.fit(model, sgd, records(), LOSS, progress=False)


def test_a_stream_is_refused() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([])

    check_refused(
        ValueError, "dataset must be map-style", model := linear(), holder(model), Stream()
    )


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda output, target: (output - target).square(), r"shape \(\d+, 1\)"),
        (lambda output, target: 1.0, "float"),
    ],
)
def test_a_loss_that_is_no_scalar_tensor_is_refused(loss: Any, got: str) -> None:
    message = rf"the loss must be a tensor with one number \(got {got}\)"
    check_refused(ValueError, message, model := linear(), holder(model), loss=loss)
    assert not is_attached(model)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_reduction_of_a_criterion_of_torch_is_read_from_it(reduction: str) -> None:
    loss = nn.BCEWithLogitsLoss(reduction=reduction)
    model = linear()
    dp.fit(model, holder(model), records(), loss, progress=False)
    assert model._dpsco.mean is (reduction == "mean")
    other = {"mean": "sum", "sum": "mean"}[reduction]
    message = f"loss_reduction must be '{reduction}', that of the loss"
    fresh = linear()
    check_refused(
        ValueError, message, fresh, holder(fresh), records(), loss, loss_reduction=other
    )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("value", [0.0, 1e30, float("nan")])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_check_of_the_reduction_sees_no_value_of_the_data(
    value: float, reduction: str
) -> None:
    data, seen = TensorDataset(torch.full((N, DIM), value), torch.full((N, 1), value)), []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(target)
        return (output - target).square().sum() / (len(target) if reduction == "mean" else 1)

    model = linear()
    wrong = {"mean": "sum", "sum": "mean"}[reduction]
    message = rf"this is a {reduction}, and\s+dp.attach\(loss_reduction='{wrong}'"
    check_refused(ValueError, message, model, holder(model), data, loss, loss_reduction=wrong)
    assert set(torch.cat(seen).unique().tolist()) <= {0.0, 1.0}


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("attached", [False, True])
def test_a_loss_that_couples_records_is_refused(attached: bool) -> None:
    model = dp.attach(linear()) if attached else linear()

    def tilted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp((output - target).square().flatten(), 0)

    check_refused(PrivacyError, "coupled records", model, holder(model), loss=tilted)
    assert is_attached(model) == attached


# -- the data set under add_remove ------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("n", [0, 1, 2 * N])
def test_under_add_remove_any_number_of_records_is_as_many_steps(n: int) -> None:
    model = linear()
    optimizer = planned(model, dp.Budget(1.0, DELTA, adjacency="add_remove"))
    dp.fit(model, optimizer, records(n), LOSS, progress=False)
    assert (optimizer.steps, len(optimizer.accountant)) == (5, 1)  # a pass is charged as a whole


# -- interruption -----------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("physical", [None, 16])
def test_an_interrupted_fit_keeps_steps_and_ledger_and_can_go_on(physical: int | None) -> None:
    model, calls = linear(), []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.extend(
            [len(target)] * (optimizer.outstanding_rows is not None)
        )  # else the doctor probes
        if len(calls) == 2 * (1 if physical is None else 3) + 1:  # in the third step
            calls.append(0)
            raise KeyboardInterrupt
        return LOSS(output, target)

    optimizer = planned(model, batch_size=None, sampling="full", epochs=5)
    with pytest.raises(KeyboardInterrupt):
        dp.fit(model, optimizer, records(), loss, physical_batch_size=physical, progress=False)
    assert not optimizer.finalized
    assert optimizer.steps == len(optimizer.accountant) == 2
    assert 0 < optimizer.report().epsilon < 1
    with optimizer.released():
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    dp.fit(model, optimizer, records(), loss, progress=False)
    assert optimizer.steps == len(optimizer.accountant) == 5
    assert optimizer.report().epsilon <= 1


def test_a_charge_whose_step_was_lost_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear()
    optimizer = planned(model, batch_size=N, epochs=5)

    def interrupted(generator: torch.Generator) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optimizer.oracle, "release", interrupted)
        with pytest.warns(UtilityWarning, match="did not end"), pytest.raises(KeyboardInterrupt):
            dp.fit(model, optimizer, records(), LOSS, progress=False)
    assert (optimizer.steps, len(optimizer.accountant)) == (1, 1)
    dp.fit(model, optimizer, records(), LOSS, progress=False)
    assert (optimizer.steps, len(optimizer.accountant)) == (5, 5)


def token_labels(several: bool) -> TensorDataset:
    """Classes 0..2 for records of 5 numbers; the last record's are ignored, in part where it has several."""
    labels = (
        torch.zeros(12, 4, dtype=torch.int64) if several else torch.zeros(12, dtype=torch.int64)
    )
    labels[-1, ...] = torch.tensor([-100, 0, -100, 0]) if several else -100
    return TensorDataset(torch.randn(12, 5), labels)


class Tokens(nn.Module):
    """Scores (B, 3, 4) of 4 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).view(-1, 3, 4)


def full_steps(model: nn.Module) -> dp.PrivateOptimizer:
    return dp.PrivateOptimizer(
        model.parameters(),
        0.1,
        oracle=dp.oracles.Clipped(1.0, 1.0, 12),
        rule=dp.rules.SGD(),
        design=dp.Full(12),
        adjacency="replace_one",
    )


def test_a_mean_over_the_targets_that_are_not_ignored_is_refused():
    model = Tokens()
    optimizer = full_steps(model)
    with pytest.raises(
        PrivacyError, match="coupled records"
    ):  # by the doctor, whatever the labels are
        dp.fit(
            model, optimizer, token_labels(True), nn.CrossEntropyLoss(), steps=1, progress=False
        )
    single = nn.Sequential(nn.Linear(5, 3))
    refused = full_steps(single)
    with pytest.raises(PrivacyError, match="must not ignore targets"):
        dp.fit(
            single, refused, token_labels(False), nn.CrossEntropyLoss(), steps=1, progress=False
        )
    assert len(optimizer.accountant) == len(refused.accountant) == 0


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("several", [True, False])
def test_a_sum_may_ignore_targets(several):
    model = Tokens() if several else nn.Sequential(nn.Linear(5, 3))
    loss = nn.CrossEntropyLoss(reduction="sum")
    optimizer = full_steps(model)
    dp.fit(
        model,
        optimizer,
        token_labels(several),
        loss,
        steps=2,
        loss_reduction="sum",
        progress=False,
    )
    assert optimizer.steps == 2
