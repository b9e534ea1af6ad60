"""OutputPerturbation, ObjectivePerturbation and NoisyGD: their life, what stays secret, what is refused and named."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import torch_dpsco as dp
from torch_dpsco.errors import (
    AdjacencyError,
    BudgetExceeded,
    ConditionError,
    InfeasibleError,
    PrivacyError,
    SequenceError,
    UnitError,
    UtilityWarning,
)
from torch_dpsco.estimators.output import OutputPlan
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.solvers import solve
from torch_dpsco.estimators.task import build_objective, make_records

N = 24
BUDGET = dp.Budget(1.0, 1e-6, "replace_one")
ADD_REMOVE = dp.Budget(1.0, 1e-6, adjacency="add_remove")
KINDS = ("OutputPerturbation", "ObjectivePerturbation", "NoisyGD")
ROWS = torch.randn(N, 3, generator=torch.Generator().manual_seed(1))
SIGNS = torch.where(ROWS[:, 0] > 0, 1.0, -1.0)
DATA = TensorDataset(ROWS, SIGNS)


def planned(kind: str = "OutputPerturbation", model: Any = None, **settings: Any):
    options = {
        "loss": dp.losses.Logistic(),
        "n": N,
        "budget": BUDGET,
        "bound_x": 1.0,
        "reg": 30.0,
    } | settings
    return getattr(dp, kind).plan(model=nn.Linear(3, 1) if model is None else model, **options)


def make(kind: str = "OutputPerturbation", model: nn.Linear | None = None, **settings: Any):
    model = nn.Linear(3, 1) if model is None else model
    own = {name: settings.pop(name) for name in ("accountant", "generator") if name in settings}
    return model, getattr(dp, kind)(model.parameters(), planned(kind, model, **settings), **own)


def train(model: nn.Linear, optimizer: Any, steps: int = 3) -> None:
    loss = dp.losses.Logistic()
    own = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(ROWS.to(model.weight.dtype)), SIGNS).backward()
        own.step()


def silence(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torch_dpsco.estimators.output.gaussian_vector",
        lambda dim, std, draws: torch.zeros(dim, dtype=torch.float64),
    )


# -- life -------------------------------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_solved_answer_is_charged_and_installed(kind: str, bias: bool) -> None:
    model, optimizer = make(kind, nn.Linear(3, 1, bias=bias))
    before = model.weight.detach().clone()
    optimizer.solve(DATA)
    assert torch.equal(model.weight, before)  # nothing shows before the release
    assert len(optimizer.accountant) == 0 or kind != "OutputPerturbation"
    optimizer.finalize()
    assert optimizer.finalized
    assert not torch.equal(model.weight, before)
    assert len(optimizer.accountant) >= 1
    assert 0.9 < optimizer.report().epsilon <= 1
    assert "one release" in str(optimizer.report())


def test_the_answer_without_noise_is_the_minimizer_and_its_last_column_the_bias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = make()
    silence(optimizer, monkeypatch)
    optimizer.solve(DATA)
    optimizer.finalize()
    task = optimizer._plan.task
    exact = solve(build_objective(task, 30.0, make_records(task, ROWS, SIGNS)), 1e-9).w
    answer = torch.cat([model.weight.detach().flatten(), model.bias.detach()]).double()
    assert float((answer - exact).norm()) < 1e-4
    assert float(exact[-1].abs()) > 1e-3


def test_a_loop_is_certified_from_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    silence(optimizer, monkeypatch)
    train(model, optimizer)
    starts: list[Tensor] = []
    original = OutputPlan.solve

    def watched(plan: OutputPlan, records: Records, start: Tensor | None = None) -> Tensor:
        starts.append(start)
        return original(plan, records, start)

    monkeypatch.setattr(OutputPlan, "solve", watched)
    optimizer.certify(DATA)
    torch.testing.assert_close(
        starts[0],
        torch.cat([model.weight.detach().flatten(), model.bias.detach()]).double(),
        rtol=0,
        atol=0,
    )
    optimizer.finalize()
    other, twin = make()
    twin.solve(DATA)
    twin.finalize()
    torch.testing.assert_close(model.weight, other.weight, rtol=0, atol=1e-3)


@pytest.mark.parametrize("fill", [math.nan, math.inf, 3e38])
def test_a_loop_that_diverged_is_released_all_the_same(fill: float) -> None:
    model, optimizer = make()
    nn.init.constant_(model.weight, fill)
    optimizer.certify(DATA)
    optimizer.finalize()
    assert torch.isfinite(model.weight).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_release_ends_a_with_block(kind: str) -> None:
    _model, optimizer = make(kind)
    with optimizer:
        optimizer.solve(DATA)
    assert optimizer.finalized


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_a_with_block_releases_nothing(kind: str) -> None:
    _model, optimizer = make(kind)
    optimizer.solve(DATA)
    with pytest.raises(KeyError), optimizer:
        raise KeyError
    assert not optimizer.finalized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_model_of_any_precision_gets_the_answer(dtype: torch.dtype) -> None:
    model, optimizer = make(model=nn.Linear(3, 1).to(dtype))
    optimizer.solve(DATA)
    optimizer.finalize()
    assert model.weight.dtype == dtype
    assert torch.isfinite(model.weight).all()


@pytest.mark.slow
def test_classes_have_a_row_each() -> None:
    labels = torch.arange(N) % 4  # class 3 is unknown: null records
    softmax = {
        "loss": dp.losses.SoftmaxCrossEntropy(3),
        "reg": 50.0,
        "budget": dp.Budget(2.0, 1e-6, "replace_one"),
    }
    for kind in ("OutputPerturbation", "ObjectivePerturbation", "NoisyGD"):
        model, optimizer = make(kind, nn.Linear(3, 3), **softmax)
        optimizer.solve(TensorDataset(ROWS, labels))
        optimizer.finalize()
        assert model.weight.shape == (3, 3)
        assert torch.isfinite(model.bias).all()


class Pairs(Dataset):
    """Map-style, (1, 3) images and Python numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return ROWS[index].reshape(1, 3), float(SIGNS[index])


def test_a_map_style_dataset_is_read_like_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for dataset in (DATA, Pairs(N), TensorDataset(ROWS.double(), SIGNS.long())):
        model, optimizer = make()
        silence(optimizer, monkeypatch)
        optimizer.solve(dataset)
        optimizer.finalize()
        answers.append(model.weight.detach().clone())
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:generator= makes")
def test_a_data_set_that_changes_after_solve_changes_nothing(kind: str) -> None:
    answers = []
    for later in (1.0, 1e6):
        rows, signs = ROWS.clone(), SIGNS.clone()
        model, optimizer = make(kind, generator=torch.Generator().manual_seed(5))
        optimizer.solve(TensorDataset(rows, signs))
        rows *= later
        signs *= later
        optimizer.finalize()
        answers.append(model.weight.detach().clone())
    assert torch.equal(*answers)


# -- one release ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_release_is_the_first_one(kind: str) -> None:
    model, optimizer = make(kind)
    optimizer.solve(DATA)
    optimizer.finalize()
    answer, spent = model.weight.detach().clone(), len(optimizer.accountant)
    for again in (
        lambda: optimizer.solve(DATA),
        lambda: optimizer.certify(DATA),
        optimizer.step,
    ):
        with pytest.raises(SequenceError):
            again()
    optimizer.finalize()
    assert torch.equal(model.weight, answer)
    assert len(optimizer.accountant) == spent


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_released_before_something_is_solved(kind: str) -> None:
    _model, optimizer = make(kind)
    with pytest.raises(SequenceError, match="solve"):
        optimizer.finalize()
    assert len(optimizer.accountant) == 0
    assert not optimizer.finalized


@pytest.mark.parametrize("kind", KINDS)
def test_a_solved_run_cannot_be_copied(kind: str) -> None:
    model, optimizer = make(kind)
    optimizer.solve(DATA)
    saves: list[Callable[[], object]] = [
        lambda: copy.deepcopy(optimizer),
        lambda: copy.copy(optimizer),
        lambda: pickle.dumps(optimizer),
        lambda: torch.save(optimizer, io.BytesIO()),
        lambda: copy.deepcopy((model, optimizer)),
    ]
    for save in saves:
        with pytest.raises(SequenceError, match="copied"):
            save()


@pytest.mark.parametrize("kind", KINDS)
def test_no_state_before_the_release(kind: str) -> None:
    _model, optimizer = make(kind)
    for ready in (lambda: None, lambda: optimizer.solve(DATA)):
        ready()
        with pytest.raises(SequenceError, match="finalize"):
            optimizer.state_dict()
    optimizer.finalize()
    assert optimizer.state_dict()["state"] == {}


def test_a_refused_release_leaves_the_parameters_and_spends_nothing() -> None:
    for kind in KINDS:
        ledger = dp.Accountant(BUDGET)
        model, optimizer = make(kind, accountant=ledger)
        optimizer.solve(DATA)
        ledger.record(dp.accounting.events.Pure(0.9))
        before = model.weight.detach().clone()
        with pytest.raises(BudgetExceeded):
            optimizer.finalize()
        assert torch.equal(model.weight, before)
        assert not optimizer.finalized
        assert len(ledger) == 1


# -- secrets ----------------------------------------------------------------------------------------------------------


def secrets(optimizer: Any) -> list[str]:
    """Names of the attributes that hold tensors, records, or a torch optimizer."""
    kinds = (Tensor, Records, torch.optim.Optimizer, Dataset)
    return [name for name, value in vars(optimizer).items() if isinstance(value, kinds)]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_secret_is_left_after_the_release(kind: str) -> None:
    _model, optimizer = make(kind)
    optimizer.solve(DATA)
    assert secrets(optimizer)  # the check sees what is held
    optimizer.finalize()
    assert secrets(optimizer) == []


def test_the_gradients_of_a_loop_are_dropped_at_the_release() -> None:
    model, optimizer = make()
    train(model, optimizer)
    optimizer.certify(DATA)
    assert "_solved" in secrets(optimizer)
    assert model.weight.grad is not None
    optimizer.finalize()
    assert secrets(optimizer) == []
    assert model.weight.grad is None
    assert model.bias.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_printed_and_reported_does_not_depend_on_the_data(kind: str) -> None:
    words = []
    for rows, signs in ((ROWS, SIGNS), (torch.full_like(ROWS, 1e30), -SIGNS)):
        _model, optimizer = make(kind)
        optimizer.solve(TensorDataset(rows, signs))
        words.append([repr(optimizer), str(optimizer)])
        optimizer.finalize()
        words[-1] += [
            repr(optimizer),
            str(optimizer.report()),
            str(optimizer.report().figures),
            str(optimizer.steps),
        ]
    first, second = (
        [re.sub(r"ledger: \w+", "ledger", word) for word in run] for run in words
    )  # each has its own id
    assert first == second


def test_errors_do_not_tell_the_point() -> None:
    _model, optimizer = make()
    optimizer.solve(DATA)
    point = optimizer._solved
    for wrong in (optimizer.state_dict, lambda: copy.copy(optimizer), optimizer.step):
        with pytest.raises(SequenceError) as caught:
            wrong()
        assert not any(f"{abs(float(value)):.3g}" in str(caught.value) for value in point)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_noise_was_calibrated_for_cannot_be_reassigned(kind: str) -> None:
    _model, optimizer = make(kind)
    for name in ("_plan", "accountant"):
        with pytest.raises(PrivacyError, match=name):
            setattr(optimizer, name, getattr(optimizer, name))
    with pytest.raises(SequenceError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises((AttributeError, TypeError)):
        optimizer._plan.task.reg = 1e9
    with pytest.raises((AttributeError, TypeError)):
        optimizer._plan.noise_scale = 0.0


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_another_adjacency_unit_or_budget_of_the_accountant_is_refused(kind: str) -> None:
    for ledger in (
        dp.Accountant(adjacency="add_remove"),
        dp.Accountant(ADD_REMOVE),
        dp.Accountant(dp.Budget(2.0, 1e-6, "replace_one")),
        dp.Accountant(unit="user"),
    ):
        with pytest.raises((AdjacencyError, UnitError)):
            make(kind, accountant=ledger)
        assert len(ledger) == 0
    with pytest.raises(UnitError):
        make(kind, budget=dp.Budget(1.0, 1e-6, "replace_one", unit="user"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_spent_budget_is_noticed_at_construction(kind: str) -> None:
    ledger = dp.Accountant(BUDGET)
    ledger.record(planned(kind).event(), 20)
    with pytest.raises(InfeasibleError, match="epsilon"):
        make(kind, accountant=ledger)
    other = dp.Accountant(BUDGET)
    other.record(dp.accounting.events.Pure(0.1))
    with pytest.raises(PrivacyError, match="planned before the first release"):
        make(kind, accountant=other)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, N - 1, N + 3])
def test_another_number_of_records_is_refused_only_where_n_is_public(
    kind: str, count: int
) -> None:
    rows, signs = ROWS.repeat(2, 1)[:count], SIGNS.repeat(2)[:count]
    with pytest.raises(UnitError, match="n="):
        make(kind)[1].solve(TensorDataset(rows, signs))
    model, optimizer = make(kind, budget=ADD_REMOVE)
    optimizer.solve(TensorDataset(rows, signs))
    optimizer.finalize()
    assert torch.isfinite(model.weight).all()


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_data_set_is_solved_too(kind: str) -> None:
    model, optimizer = make(kind, budget=ADD_REMOVE)
    optimizer.solve(Pairs(0))
    optimizer.finalize()
    assert torch.isfinite(model.weight).all()
    classes, other = make(
        kind, nn.Linear(3, 3), budget=ADD_REMOVE, loss=dp.losses.SoftmaxCrossEntropy(3), reg=50.0
    )
    other.solve(Pairs(0))
    other.finalize()
    assert torch.isfinite(classes.weight).all()


@pytest.mark.cases(3, 1)
def test_the_solver_takes_an_empty_data_set() -> None:
    for loss in (dp.losses.Logistic(), dp.losses.Hinge()):
        for count in (0, 1):
            model, optimizer = make(budget=ADD_REMOVE, loss=loss)
            optimizer.solve(TensorDataset(ROWS[:count], SIGNS[:count]))
            optimizer.finalize()
            assert torch.isfinite(model.weight).all()


@pytest.mark.parametrize(
    ("rows", "targets", "word"),
    [
        (ROWS[:, 0], SIGNS, "features"),
        (ROWS[:, :2], SIGNS, "features"),
        (ROWS.long(), SIGNS, "features"),
        (ROWS, torch.stack([SIGNS, SIGNS], 1), "targets"),
        (ROWS, SIGNS * 1j, "targets"),
    ],
)
def test_data_of_a_wrong_shape_or_dtype_are_named(
    rows: Tensor, targets: Tensor, word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        make()[1].solve(TensorDataset(rows, targets))


def test_labels_of_any_real_dtype_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for targets in (
        SIGNS,
        SIGNS.long(),
        SIGNS.half(),
        SIGNS.to(torch.int8),
        SIGNS[:, None],
        SIGNS.double(),
    ):
        model, optimizer = make()
        silence(optimizer, monkeypatch)
        optimizer.solve(TensorDataset(ROWS, targets))
        optimizer.finalize()
        found.append(model.weight.detach().clone())
    assert all(torch.equal(answer, found[0]) for answer in found)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Conv1d(1, 1, 3),
        nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1)),
        nn.Linear(3, 2),
    ],
)
def test_parameters_that_are_no_linear_layer_of_the_task_are_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="params"):
        planned(model=model)
    with pytest.raises(ValueError, match="params"):
        dp.OutputPerturbation(model.parameters(), planned())
    with pytest.raises(ValueError, match="params"):
        planned(model=[])


def test_a_plan_is_of_its_layer_and_its_optimizer() -> None:
    with pytest.raises(ValueError, match="params"):
        dp.OutputPerturbation(nn.Linear(4, 1).parameters(), planned())
    with pytest.raises(ValueError, match=r"plan must be made by NoisyGD.plan\(...\)"):
        dp.NoisyGD(nn.Linear(3, 1).parameters(), planned())
    assert planned(model=list(nn.Linear(3, 1).parameters())) == planned()


def test_step_and_certify_are_for_loops_alone() -> None:
    for kind in KINDS:
        with pytest.raises(SequenceError):
            make(kind)[1].step()
    for kind in KINDS[1:]:
        with pytest.raises(SequenceError, match="solve"):
            make(kind)[1].certify(DATA)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"bound_x": 0.0}, "bound_x"),
        ({"n": 0}, "n"),
        ({"reg": -1.0}, "reg"),
        ({"radius": 0.0}, "radius"),
        ({"bound_y": 1.0}, "bound_y"),
        ({"n_max": 1}, "n_max"),
        ({"attack_norm": 3.0}, "attack_norm"),
    ],
)
def test_an_argument_out_of_range_is_named(settings: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make(**settings)


def test_what_no_solver_can_certify_is_refused_before_the_data_are_read() -> None:
    for settings in (
        {"loss": dp.losses.EpsilonInsensitive(), "bound_y": 1.0},
        {"loss": dp.losses.PowerLoss(1.5), "bound_y": 1.0},
        {"loss": dp.losses.Huber(), "bound_y": 1.0, "attack_radius": 0.1},
        {"loss": dp.losses.Hinge(), "attack_radius": 0.1},
        {"loss": dp.losses.Hinge(), "tilt": 0.1},
        {"reg": 1e-13, "n_max": 10**9, "budget": ADD_REMOVE},  # below the rounding of float64
    ):
        with pytest.raises(ConditionError):
            make(**settings)


def test_a_seeded_run_warns_and_says_so() -> None:
    with pytest.warns(UtilityWarning, match="generator"):
        optimizer = make(generator=torch.Generator().manual_seed(0))[1]
    assert optimizer.seeded
    assert not make()[1].seeded


def test_the_report_says_where_the_noise_comes_from() -> None:
    with pytest.warns(UtilityWarning, match="generator"):
        repeatable = make(generator=torch.Generator().manual_seed(0))[1]
    for optimizer, loud in ((repeatable, True), (make()[1], False)):
        statement = optimizer.report(1e-6)
        assert any(line.startswith("REPEATABLE NOISE") for line in statement.warnings) is loud
        assert ("cryptographic keystream" in " ".join(str(statement).split())) is not loud


@pytest.mark.parametrize("kind", KINDS[:1])
def test_a_pure_budget_is_spent_purely(kind: str) -> None:
    _model, optimizer = make(kind, budget=dp.Budget(1.0, 0.0, "replace_one"))
    optimizer.solve(DATA)
    optimizer.finalize()
    assert 0.9 < optimizer.report(0.0).epsilon <= 1
    with pytest.raises(ConditionError, match="delta"):
        make("NoisyGD", budget=dp.Budget(1.0, 0.0, "replace_one"))


def test_the_doctor_finds_nothing_in_what_no_pass_over_the_model_enters() -> None:
    model = torch.nn.Linear(2, 1)
    plan = dp.OutputPerturbation.plan(
        model=model,
        loss=dp.losses.Logistic(),
        n=10,
        budget=dp.Budget(1.0, 1e-6, "replace_one"),
        bound_x=1.0,
    )
    optimizer = dp.OutputPerturbation(model.parameters(), plan)
    data = torch.utils.data.TensorDataset(torch.ones(10, 2), torch.ones(10))
    assert dp.doctor(model, None, torch.utils.data.DataLoader(data), optimizer).healthy
    with pytest.raises(ValueError, match=r"call optimizer.solve\(dataset\) and finalize\(\)"):
        dp.fit(model, optimizer, data, dp.losses.Logistic())
