"""Opacus' interface, keyword by keyword: what is the same as in Opacus, what is charged, and what is refused."""

from __future__ import annotations

import copy
import inspect
import math
import re
import warnings
from typing import Any

import opacus
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from opacus.accountants import PRVAccountant
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager as TheirManager
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.events import PoissonGaussian
from torch_dpsco.errors import (
    AdjacencyError,
    BudgetExceeded,
    PrivacyError,
    SequenceError,
    UtilityWarning,
)
from torch_dpsco.integrations.opacus import BatchMemoryManager, DPOptimizer, PrivacyEngine
from torch_dpsco.sampling.samplers import PoissonSampler

N, DIM, DELTA = 64, 3, 1e-5
FEATURES = torch.randn(N, DIM, generator=torch.Generator().manual_seed(3))
DATA = TensorDataset(FEATURES, (FEATURES[:, 0] > 0).long())
LOSS = nn.CrossEntropyLoss()


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.sin(torch.arange(p.numel()) + k).view_as(p))
    return model


def parts(
    batch_size: int = 16, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **more: Any
) -> dict[str, Any]:
    """Returns what both engines take: fresh objects, noise and clip."""
    model = net()
    loader = DataLoader(DATA, batch_size=batch_size, shuffle=True)
    made = {
        "module": model,
        "optimizer": kind(model.parameters(), lr=0.1),
        "data_loader": loader,
    }
    return made | {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | more


def target(**more: Any) -> dict[str, Any]:
    """Returns good keywords of make_private_with_epsilon."""
    given = parts() | {"target_epsilon": 2.0, "target_delta": DELTA, "epochs": 2, "n": N}
    del given["noise_multiplier"]
    return given | more


def train(model: nn.Module, optimizer: Any, batches: Any, loss: Any = LOSS) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


# -- the keywords of Opacus -------------------------------------------------------------------------------------------


def keywords(function: Any) -> dict[str, Any]:
    """Returns the defaults of named parameters."""
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.kind is not p.VAR_KEYWORD and p.name != "self"}


METHODS = [
    name
    for name, _ in inspect.getmembers(opacus.PrivacyEngine, callable)
    if not name.startswith("_")
]


def test_the_methods_of_opacus_are_known() -> None:
    """A method that a newer Opacus has shows here."""
    assert METHODS == [
        "get_compatible_module",
        "get_epsilon",
        "is_compatible",
        "load_checkpoint",
        "make_private",
        "make_private_with_epsilon",
        "save_checkpoint",
        "validate",
    ]


# noise and clip have no schedulers; what torch.save takes is given to torch.save
LEFT_OUT = {"noise_scheduler", "grad_clip_scheduler"}
LEFT_OUT |= {f"module_{act}_dict_kwargs" for act in ("state", "load")}
LEFT_OUT |= {f"torch_{act}_kwargs" for act in ("save", "load")}


@pytest.mark.parametrize("name", [*METHODS, "__init__"])
def test_each_keyword_of_opacus_is_one_here_with_its_default(name: str) -> None:
    """A keyword that a newer Opacus has shows here, and so does one of ours that it lacks."""
    theirs, ours = (
        keywords(getattr(opacus.PrivacyEngine, name)),
        keywords(getattr(PrivacyEngine, name)),
    )
    assert ours.keys() - theirs.keys() == ({"n"} if name.startswith("make_private") else set())
    assert theirs.keys() - LEFT_OUT <= ours.keys()
    # the criterion of theirs is not used but in mode "ghost", where it is the same
    for keyword in theirs.keys() - LEFT_OUT - {"criterion"}:
        if theirs[keyword] is not inspect.Parameter.empty:
            assert ours[keyword] == theirs[keyword], keyword


def test_the_manager_has_the_keywords_of_opacus() -> None:
    assert keywords(BatchMemoryManager.__init__) == keywords(TheirManager.__init__)


# each keyword of make_private: a value that works beside the default, or None where the next table refuses all others
WORKS = {
    "batch_first": True,
    "clipping": "flat",
    "criterion": LOSS,
    "data_loader": DataLoader(DATA, batch_size=9, drop_last=True, shuffle=True),
    "grad_sample_mode": "functorch",
    "loss_reduction": "sum",
    "max_grad_norm": 0.5,
    "module": None,
    "noise_generator": None,
    "noise_multiplier": 2.0,
    "optimizer": None,
    "poisson_sampling": True,
    "rand_on_empty": False,
    "wrap_model": False,
}


def test_each_keyword_of_make_private_is_tried() -> None:
    assert keywords(opacus.PrivacyEngine.make_private).keys() - LEFT_OUT == WORKS.keys()


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", [name for name, value in WORKS.items() if value is not None])
def test_each_keyword_works(name: str) -> None:
    given = parts(n=N) | {name: WORKS[name]}
    _, optimizer, loader = PrivacyEngine().make_private(**given)
    loss = nn.CrossEntropyLoss(reduction=given.get("loss_reduction", "mean"))
    before = [p.detach().clone() for p in given["module"].parameters()]
    train(given["module"], optimizer, loader, loss)
    assert (
        optimizer.steps == len(optimizer.accountant) == len(loader) == len(given["data_loader"])
    )
    assert not any(map(torch.equal, before, given["module"].parameters()))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "shuffled": ({"poisson_sampling": False}, AdjacencyError, "sampling='allocated'"),
    "per layer": (
        {"clipping": "per_layer", "max_grad_norm": [1.0] * 4},
        ValueError,
        r"math.hypot\(\*norms\)",
    ),
    "a list": (
        {"max_grad_norm": [1.0, 1.0]},
        ValueError,
        r"of layers take math.hypot\(\*norms\)",
    ),
    "adaptive": ({"clipping": "adaptive"}, PrivacyError, r"clip=dp.Pilot\(\)"),
    "a word": ({"clipping": "ghost"}, ValueError, "clipping must be"),
    "seed": (
        {"noise_generator": torch.Generator().manual_seed(0)},
        PrivacyError,
        "can subtract the noise",
    ),
    "several processes": (
        {"grad_sample_mode": "ghost_fsdp"},
        ValueError,
        "grad_sample_mode must be",
    ),
    "no rows": ({"grad_sample_mode": "no_op"}, ValueError, "grad_sample_mode must be"),
    "made-up records": ({"rand_on_empty": True}, PrivacyError, "rand_on_empty must be False"),
    "reduction": ({"loss_reduction": "none"}, ValueError, "loss_reduction must be"),
    "noise": ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier must be"),
    "clip": ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm must be"),
    "n": ({"n": 0}, ValueError, "n must be"),
    "no batch": (
        {"data_loader": DataLoader(DATA, batch_size=65, drop_last=True, shuffle=True)},
        ValueError,
        "batch_size must be",
    ),
    "an adaptive keyword": (
        {"target_unclipped_quantile": 0.5},
        TypeError,
        "target_unclipped_quantile",
    ),
}


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_unsound_is_refused_and_changes_nothing(case: str) -> None:
    change, error, message = REFUSED[case]
    given = parts(n=N)
    with pytest.raises(error, match=message):
        PrivacyEngine().make_private(**given | change)
    assert type(given["module"][0]) is nn.Linear
    if "n" not in change:
        PrivacyEngine().make_private(**given)  # as if nothing had happened


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(
    "case", ["shuffled", "per layer", "adaptive", "seed", "no rows", "reduction"]
)
def test_a_target_refuses_the_same(case: str) -> None:
    change, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        PrivacyEngine().make_private_with_epsilon(**target(**change))


@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.filterwarnings("ignore:n is not given:UserWarning")
def test_passes_are_charged_as_passes(targeted: bool) -> None:
    """Opacus charges a pass over fixed batches as Poisson ones, less than half of what it costs under replace_one."""
    theirs, ours = opacus.PrivacyEngine(), PrivacyEngine()
    given = parts(poisson_sampling=False)
    train(*theirs.make_private(**given))
    given = parts(poisson_sampling=False)
    if targeted:
        given |= {"target_epsilon": 2.0, "target_delta": DELTA, "epochs": 1}
        del given["noise_multiplier"]
    make = ours.make_private_with_epsilon if targeted else ours.make_private
    with pytest.warns(UtilityWarning, match="poisson_sampling=False makes passes"):
        model, optimizer, loader = make(**given)
    sizes, noise = [], optimizer.noise_multiplier
    for x, y in loader:
        sizes.append(len(x))
        train(model, optimizer, [(x, y)])
    assert sizes == [16] * 4
    truth = dp.Accountant(adjacency="zero_out")
    event = dp.accounting.events.clipped_gaussian(noise)
    truth.authorize(dp.Shuffled(16, N).event(event, 4))
    assert ours.get_epsilon(DELTA) == pytest.approx(truth.get_epsilon(DELTA))
    if targeted:
        assert truth.get_epsilon(DELTA) == pytest.approx(2.0, rel=1e-3)
    else:
        replaced = dp.Accountant(adjacency="replace_one")
        replaced.authorize(dp.Shuffled(16, N).event(event, 4))
        assert truth.get_epsilon(DELTA) > theirs.get_epsilon(DELTA)
        assert replaced.get_epsilon(DELTA) > 2 * theirs.get_epsilon(DELTA)


def test_passes_are_not_for_records_that_are_removed() -> None:
    for make, given in (("make_private", parts(n=N)), ("make_private_with_epsilon", target())):
        with pytest.raises(AdjacencyError, match=r"poisson_sampling must be True with n="):
            getattr(PrivacyEngine(), make)(**given, poisson_sampling=False)


def test_noise_that_can_be_repeated_is_refused() -> None:
    for make, given in (("make_private", parts(n=N)), ("make_private_with_epsilon", target())):
        with pytest.raises(
            PrivacyError, match=r"noise_generator must be None \(got Generator\).*generator=\)"
        ):
            getattr(PrivacyEngine(), make)(**given, noise_generator=torch.Generator())


def test_made_up_records_are_refused() -> None:
    with pytest.raises(PrivacyError, match="a record takes the place of a made-up one"):
        PrivacyEngine().make_private(**parts(n=N, rand_on_empty=True))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_size=8, sampler=SubsetRandomSampler(range(32))),
        DataLoader(DATA, batch_sampler=PoissonSampler(dp.Poisson(8, N))),
    ],
    ids=["subset", "batch sampler"],
)
def test_a_sampler_of_ones_own_is_refused(loader: DataLoader) -> None:
    """Opacus draws from all records, also from those that the sampler leaves out."""
    with pytest.raises(
        PrivacyError, match="data_loader must have a fixed batch_size and no sampler of its own"
    ):
        PrivacyEngine().make_private(**parts(data_loader=loader, n=N))


@pytest.mark.parametrize("accountant", ["gdp", "moments"])
def test_other_accountants_are_refused(accountant: str) -> None:
    with pytest.raises((PrivacyError, ValueError), match="accountant must be"):
        PrivacyEngine(accountant=accountant)


# -- the same as Opacus -----------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_without_noise_full_batches_train_as_in_opacus(
    kind: Any, reduction: str, mode: str
) -> None:
    """Rate 1: no chance is left. The clip shortens rows, and the sum is divided, or not, as there."""
    results = []
    for engine, more in ((opacus.PrivacyEngine(), {}), (PrivacyEngine(), {"n": N})):
        given = parts(
            N, kind, noise_multiplier=0.0, max_grad_norm=0.3, loss_reduction=reduction, **more
        )
        loss = nn.CrossEntropyLoss(reduction=reduction)
        made = engine.make_private(**given, grad_sample_mode=mode, criterion=loss)
        model, optimizer, loader = made[0], made[1], made[-1]
        for _ in range(3):
            train(model, optimizer, loader, made[2] if mode == "ghost" else loss)
        results.append(torch.cat([p.detach().flatten() for p in given["module"].parameters()]))
    start = torch.cat([p.detach().flatten() for p in net().parameters()])
    moved = float((results[0] - start).norm())
    assert moved > 0.01
    assert (
        float((results[1] - results[0]).norm()) < 1e-3 * moved
    )  # Opacus adds 1e-6 to norms, which Adam magnifies


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize(
    ("records", "batch_size", "drop_last"), [(64, 16, False), (60, 16, False), (60, 16, True)]
)
def test_batches_are_those_of_opacus(records: int, batch_size: int, drop_last: bool) -> None:
    found = []
    for engine, more in ((opacus.PrivacyEngine(), {}), (PrivacyEngine(), {"n": records})):
        data = TensorDataset(*(t[:records] for t in DATA.tensors))
        loader = DataLoader(data, batch_size=batch_size, drop_last=drop_last, shuffle=True)
        _, optimizer, loader = engine.make_private(**parts(data_loader=loader, **more))
        found.append(
            (
                len(loader),
                optimizer.expected_batch_size,
                optimizer.noise_multiplier,
                optimizer.max_grad_norm,
            )
        )
    assert found[0] == found[1]
    assert optimizer.design == dp.Poisson(found[0][1], records)
    assert type(loader.batch_sampler) is PoissonSampler


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_noise_is_that_of_opacus(reduction: str) -> None:
    """Gradients of 0: what is left is noise, of std z C on the sum. Fails by chance with probability below 1e-6."""
    model = nn.Linear(200, 50, bias=False)
    data = TensorDataset(torch.zeros(N, 200), torch.zeros(N).long())
    given = parts(
        data_loader=DataLoader(data, batch_size=16, shuffle=True),
        noise_multiplier=1.5,
        max_grad_norm=0.4,
        n=N,
    )
    given |= {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_reduction": reduction,
    }
    _, optimizer, loader = PrivacyEngine().make_private(**given)
    before = model.weight.detach().clone()
    x, y = next(iter(loader))
    nn.CrossEntropyLoss(reduction=reduction)(model(x), y).backward()
    optimizer.step()
    moved = (before - model.weight.detach()) / 0.1 * (16 if reduction == "mean" else 1)
    share = float(moved.square().mean().sqrt()) / (1.5 * 0.4)
    assert abs(share - 1.0) < 5.0 / math.sqrt(2 * moved.numel())


# Opacus' PRV accountant says so of the orders of its first guess
@pytest.mark.cases(0, 1)
@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha:UserWarning")
@pytest.mark.parametrize(
    ("noise", "batch_size", "epochs"), [(1.0, 16, 3), (0.7, 8, 2), (2.0, 32, 4)]
)
@pytest.mark.parametrize("n", [N, None], ids=["add_remove", "zero_out"])
def test_epsilon_is_that_of_opacus_and_not_below_the_truth(
    noise: float, batch_size: int, epochs: int, n: int | None
) -> None:
    engine = PrivacyEngine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UtilityWarning)
        model, optimizer, loader = engine.make_private(
            **parts(batch_size, noise_multiplier=noise, n=n)
        )
    for _ in range(epochs):
        train(model, optimizer, loader)
    rate, steps = batch_size / N, epochs * len(loader)
    theirs = PRVAccountant()
    theirs.history = [(noise, rate, steps)]
    assert list(engine.accountant.ledger.events()) == [(PoissonGaussian(noise, rate), steps)]
    found = engine.get_epsilon(DELTA)
    assert (
        found == optimizer.accountant.get_epsilon(DELTA) == engine.accountant.get_epsilon(DELTA)
    )
    assert (
        theirs.get_epsilon(DELTA) - 0.02 < found < theirs.get_epsilon(DELTA) + 1e-3
    )  # its errors are 0.01
    law = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, pessimistic_estimate=False
    )
    assert found >= law.self_compose(steps).get_epsilon_for_delta(DELTA)


@pytest.mark.weekly
@pytest.mark.slow  # the calibration of Opacus takes long
@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha:UserWarning")
def test_a_target_is_spent_by_its_epochs_and_no_more() -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(**target(epochs=3))
    theirs = opacus.PrivacyEngine()
    given = target(epochs=3)
    del given["n"]
    _, other, _ = theirs.make_private_with_epsilon(**given)
    assert optimizer.noise_multiplier <= other.noise_multiplier
    assert optimizer.noise_multiplier == pytest.approx(other.noise_multiplier, rel=0.02)
    assert engine.plan is not None
    assert engine.plan.epsilon() <= 2.0
    for _ in range(3):
        train(model, optimizer, loader)
    assert 1.99 < engine.get_epsilon(DELTA) == engine.plan.epsilon() <= 2.0
    with pytest.warns(UtilityWarning, match="all planned steps are made: this loop has no"):
        train(model, optimizer, loader)
    with pytest.raises(BudgetExceeded):
        engine.accountant.authorize(optimizer.design.event(optimizer.oracle.event(), 1))


# -- scripts ----------------------------------------------------------------------------------------------------------

README = """
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
train_loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
privacy_engine = PrivacyEngine()
model, optimizer, train_loader = privacy_engine.make_private(
    module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.1, max_grad_norm=1.0,
)
for epoch in range(2):
    for data, labels in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(data), labels)
        loss.backward()
        optimizer.step()
epsilon = privacy_engine.get_epsilon(delta=1e-5)
"""
TUTORIAL = """
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager

model = Net()
if not PrivacyEngine().is_compatible(module=model, optimizer=None, data_loader=None):
    model = PrivacyEngine.get_compatible_module(model)
model.train()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
train_loader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True, num_workers=0)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=train_loader, epochs=2, target_epsilon=3.0, target_delta=1e-5,
    max_grad_norm=1.2,
)
print(f"Using sigma={optimizer.noise_multiplier} and C={optimizer.max_grad_norm}")
for epoch in range(2):
    with BatchMemoryManager(
        data_loader=train_loader, max_physical_batch_size=7, optimizer=optimizer
    ) as memory_safe_data_loader:
        for data, labels in memory_safe_data_loader:
            assert len(data) <= 7
            optimizer.zero_grad()
            criterion(model(data), labels).backward()
            optimizer.step()
    scheduler.step()
epsilon = privacy_engine.get_epsilon(1e-5)
assert optimizer.param_groups[0]["lr"] == 0.01 / 4
"""
GHOST = """
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
train_loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
privacy_engine = PrivacyEngine()
model_gc, optimizer_gc, criterion_gc, train_loader = privacy_engine.make_private(
    module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0,
    criterion=criterion, grad_sample_mode="ghost",
)
for data, labels in train_loader:
    optimizer_gc.zero_grad()
    loss = criterion_gc(model_gc(data), labels)
    loss.backward()
    optimizer_gc.step()
    value = loss.item()
epsilon = privacy_engine.get_epsilon(1e-5)
"""
PLAIN = """
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
train_loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
privacy_engine = PrivacyEngine()
model, dp_optimizer, train_loader = privacy_engine.make_private(
    module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0,
)
for data, labels in train_loader:
    criterion(model(data), labels).backward()
    dp_optimizer.step()
    dp_optimizer.zero_grad()
epsilon = privacy_engine.get_epsilon(1e-5)
"""


def moved(script: str) -> str:
    """Returns a script with its imports changed, and nothing else."""
    ours = "from torch_dpsco.integrations.opacus import"
    script = script.replace("from opacus import", ours).replace(
        "from opacus.utils.batch_memory_manager import", ours
    )
    assert "from opacus" not in script
    return script


TUTORIAL_CASE = pytest.param(
    TUTORIAL, id="tutorial", marks=pytest.mark.slow
)  # the calibration of Opacus takes long
OTHERS = [
    pytest.param(s, id=name)
    for name, s in (("readme", README), ("ghost", GHOST), ("hooks", PLAIN))
]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("script", [*OTHERS, TUTORIAL_CASE])
def test_a_script_runs_with_its_imports_changed(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spent = []
    for text in (script, moved(script)):
        scope: dict[str, Any] = {"torch": torch, "Net": net, "dataset": DATA, "criterion": LOSS}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(text, "script.py", "exec"), scope)
        spent.append(scope["epsilon"])
    assert spent[1] == pytest.approx(spent[0], abs=0.05)
    assert isinstance(scope["privacy_engine"], PrivacyEngine)
    if script is PLAIN:
        assert not hasattr(dp.detach(scope["model"]), "_dpsco")


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_criterion_that_reduces_in_another_way_is_refused(mode: str) -> None:
    given = parts(n=N, criterion=nn.CrossEntropyLoss(reduction="sum"), grad_sample_mode=mode)
    with pytest.raises(ValueError, match="loss_reduction"):
        PrivacyEngine().make_private(**given)


def test_a_mistake_of_the_loop_is_found() -> None:
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(**parts(n=N))
    x, y = next(iter(DataLoader(DATA, batch_size=16)))  # the old loader
    LOSS(model(x), y).backward()
    with pytest.raises(SequenceError, match="no batch is outstanding"):
        optimizer.step()
    assert dp.doctor(model, LOSS, loader, optimizer).healthy


# -- what n is --------------------------------------------------------------------------------------------------------


def test_without_n_the_size_counts_as_public_with_a_warning() -> None:
    engine = PrivacyEngine()
    with pytest.warns(
        UtilityWarning, match="n is not given: the number of records was read off the data set"
    ) as told:
        _, optimizer, _ = engine.make_private(**parts())
    assert len(told) == 1
    assert told[0].filename == __file__
    assert optimizer.adjacency == engine.accountant.adjacency == "zero_out"
    text = str(optimizer.report(DELTA))
    assert "under zero_out (the guarantee)" in text
    with pytest.raises(PrivacyError, match="n must be the number of records under zero_out"):
        optimizer.loader(TensorDataset(*(t[1:] for t in DATA.tensors)))


def test_with_n_nothing_follows_the_size_of_the_data_set() -> None:
    plans = []
    for size in (N, N - 1):
        loader = DataLoader(
            TensorDataset(*(t[:size] for t in DATA.tensors)), batch_size=16, shuffle=True
        )
        engine = PrivacyEngine()
        _, optimizer, loader = engine.make_private_with_epsilon(**target(data_loader=loader))
        plans.append((engine.plan, len(loader), optimizer.settings(), loader.slots.block))
    assert plans[0] == plans[1]
    assert optimizer.adjacency == "add_remove"
    text = str(optimizer.report())
    assert "The number n = 64 used here is a public reference" in text


def test_runs_with_and_without_n_have_ledgers_of_their_own() -> None:
    engine = PrivacyEngine()
    engine.make_private(**parts(n=N))
    with pytest.raises(AdjacencyError):
        engine.make_private(**parts())


# -- one engine, several runs -----------------------------------------------------------------------------------------


def test_runs_of_an_engine_are_added_up() -> None:
    engine = PrivacyEngine()
    for runs in (1, 2):
        model, optimizer, loader = engine.make_private(**parts(n=N))
        train(model, optimizer, loader)
        assert list(engine.accountant.ledger.events()) == [
            (PoissonGaussian(1.0, 0.25), 4 * runs)
        ]
    assert engine.get_epsilon(DELTA) == optimizer.accountant.get_epsilon(DELTA)


def test_a_target_is_that_of_all_runs_of_an_engine() -> None:
    engine = PrivacyEngine()
    engine.make_private(**parts(n=N))
    with pytest.raises(PrivacyError, match=r"make a new PrivacyEngine\(\)"):
        engine.make_private_with_epsilon(**target())
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(**target())
    for _ in range(2):
        train(model, optimizer, loader)
    with pytest.raises((PrivacyError, ValueError)):  # Opacus only warns
        engine.make_private_with_epsilon(**target())
    assert engine.get_epsilon(DELTA) <= 2.0


def test_a_refused_model_takes_nothing_from_the_target() -> None:
    engine = PrivacyEngine()
    mixing = nn.Sequential(nn.Linear(DIM, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="BatchNorm"):
        engine.make_private_with_epsilon(
            **target(module=mixing, optimizer=torch.optim.SGD(mixing.parameters(), lr=0.1))
        )
    model, optimizer, loader = engine.make_private_with_epsilon(**target())
    for _ in range(2):
        train(model, optimizer, loader)
    assert 1.99 < engine.get_epsilon(DELTA) <= 2.0


def test_an_accountant_of_ones_own_is_charged(tmp_path: Any) -> None:
    budget = dp.Budget(2.0, DELTA, adjacency="add_remove")
    accountant = dp.Accountant(budget, ledger_path=tmp_path / "ledger")
    engine = PrivacyEngine(accountant=accountant)
    train(*engine.make_private_with_epsilon(**target()))
    assert engine.accountant is accountant
    assert len(accountant) == 4


def test_there_is_no_epsilon_before_the_first_run() -> None:
    for kind in (SequenceError, ValueError):  # ours, and that of Opacus
        with pytest.raises(kind, match="make_private must be called first"):
            PrivacyEngine().get_epsilon(DELTA)


# -- what is private already, and what is fixed -----------------------------------------------------------------------


def test_nothing_is_wrapped_twice() -> None:
    engine = PrivacyEngine()
    given = parts(n=N)
    model, optimizer, loader = engine.make_private(**given)
    with pytest.raises(SequenceError, match="must be plain"):
        engine.make_private(**parts(n=N) | {"module": model, "optimizer": optimizer})
    with pytest.raises(SequenceError, match=r"dp.detach\(model\)"):
        engine.make_private(**given)
    with pytest.raises(ValueError, match="data_loader must be a DataLoader"):
        engine.make_private(**parts(n=N) | {"data_loader": loader})
    assert optimizer.original_optimizer is given["optimizer"]
    engine.make_private(
        **given | {"module": dp.detach(model), "optimizer": optimizer.original_optimizer}
    )


def test_what_opacus_made_private_is_refused() -> None:
    model, optimizer, loader = opacus.PrivacyEngine().make_private(**parts())
    for change in ({"module": model}, {"optimizer": optimizer}, {"data_loader": loader}):
        with pytest.raises(PrivacyError):
            PrivacyEngine().make_private(**parts(n=N) | change)
    given = parts()
    opacus.PrivacyEngine().make_private(**given, wrap_model=False)
    with pytest.raises(SequenceError, match="must be plain"):
        PrivacyEngine().make_private(**given, n=N)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("make", [ExponentialNoise, ExponentialGradClip])
def test_schedulers_of_noise_and_clip_are_refused(make: Any) -> None:
    _, optimizer, _ = PrivacyEngine().make_private(**parts(n=N))
    with pytest.raises(PrivacyError, match="is fixed at construction"):
        make(optimizer, gamma=0.5).step()
    assert optimizer.noise_multiplier == optimizer.max_grad_norm == 1.0


def test_secure_mode_draws_exact_noise() -> None:
    for secure in (True, False):
        engine = PrivacyEngine(secure_mode=secure)
        model, optimizer, loader = engine.make_private(**parts(n=N))
        train(model, optimizer, loader)
        event = next(event for _, _, event, _ in engine.accountant.ledger.entries())
        assert event.exact is secure
        assert not optimizer.seeded


# -- modules and checkpoints ------------------------------------------------------------------------------------------


def test_modules_are_judged_as_by_opacus() -> None:
    engine, mixing = PrivacyEngine(), nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8))
    assert engine.is_compatible(module=net(), optimizer=None, data_loader=None)
    assert not engine.is_compatible(module=mixing, optimizer=None, data_loader=None)
    with pytest.raises(UnsupportedModuleError):
        engine.validate(module=mixing, optimizer=None, data_loader=None)
    fixed = PrivacyEngine.get_compatible_module(mixing)
    assert isinstance(fixed[1], nn.GroupNorm)
    assert isinstance(mixing[1], nn.BatchNorm2d)
    assert engine.is_compatible(module=fixed, optimizer=None, data_loader=None)


def spectral(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(layer)


@pytest.mark.parametrize("engine", [PrivacyEngine, opacus.PrivacyEngine])
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(DIM, 8), nn.BatchNorm1d(8)),
        lambda: nn.InstanceNorm1d(DIM, affine=True, track_running_stats=True),
        lambda: nn.LSTM(DIM, 2),
        lambda: nn.MultiheadAttention(DIM, 1),
        lambda: nn.Linear(DIM, 2).eval(),
    ],
    ids=["batch norm", "instance norm", "lstm", "attention", "eval"],
)
def test_a_refused_module_raises_what_it_raises_in_opacus(engine: Any, build: Any) -> None:
    module = build()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    made = engine()
    with pytest.raises(UnsupportedModuleError):
        made.make_private(**parts() | {"module": module, "optimizer": optimizer})
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
    with pytest.raises(ValueError):  # noqa: PT011  (each in its words)
        made.make_private(**parts() | {"optimizer": optimizer})


def test_what_only_we_refuse_of_a_module_is_of_the_same_class() -> None:
    module = spectral(nn.Linear(DIM, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(UnsupportedModuleError, match="spectral"):
        PrivacyEngine().make_private(**parts() | {"module": module, "optimizer": optimizer})
    assert type(dp.attach(net())) is nn.Sequential


def test_a_model_knows_itself_by_the_name_of_opacus() -> None:
    for wrap in (True, False):
        model, optimizer, loader = PrivacyEngine().make_private(**parts(n=N), wrap_model=wrap)
        assert hasattr(model, "_module") is wrap
        train(model, optimizer, loader)
        if wrap:
            assert model._module is model
            assert model._module.state_dict().keys() == net().state_dict().keys()
            assert len([*model.modules()]) == 4
            assert copy.deepcopy(dp.detach(model))._module is not model


@pytest.mark.parametrize("schedule", ["warm-up", "one cycle"])
def test_schedulers_of_lr_and_momentum_work_as_in_opacus(schedule: str) -> None:
    seen = []
    for engine, more in ((PrivacyEngine, {"n": N}), (opacus.PrivacyEngine, {})):
        given = parts(kind=torch.optim.AdamW, **more)
        if schedule == "warm-up":  # from 0, before there is a private optimizer
            pace = LambdaLR(given["optimizer"], lambda k: k / 4)
        model, optimizer, loader = engine().make_private(**given)
        if schedule == "one cycle":
            pace = OneCycleLR(optimizer, 0.1, total_steps=5)
        train(model, optimizer, [next(iter(loader))])
        pace.step()
        seen.append([(g["lr"], g["betas"]) for g in given["optimizer"].param_groups])
        assert optimizer.param_groups[0]["lr"] == seen[-1][0][0]
    assert seen[0] == seen[1]


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Any) -> None:
    path, kind = tmp_path / "run.pt", torch.optim.Adam
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(**parts(kind=kind, n=N))
    train(model, optimizer, loader)
    engine.save_checkpoint(
        path=path, module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1}
    )
    other = PrivacyEngine()
    copy, again, batches = other.make_private(**parts(kind=kind, n=N))
    state = other.load_checkpoint(path=path, module=copy, optimizer=again)
    assert state["epoch"] == 1
    assert all(map(torch.equal, model.parameters(), copy.parameters()))
    assert other.get_epsilon(DELTA) == engine.get_epsilon(DELTA)
    train(copy, again, batches)
    assert list(other.accountant.ledger.events()) == [(PoissonGaussian(1.0, 0.25), 8)]
    moments = again.original_optimizer.state[next(copy.parameters())]
    assert int(moments["step"]) == 8


def test_checkpoints_of_something_else_are_refused(tmp_path: Any) -> None:
    path, engine = tmp_path / "run.pt", PrivacyEngine()
    model, optimizer, _ = engine.make_private(**parts(n=N))
    engine.save_checkpoint(path=path, module=model)
    with pytest.raises(ValueError, match="saved without one"):
        engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
    reduced = parts(n=N, loss_reduction="sum")
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    other = PrivacyEngine()
    copy, again, _ = other.make_private(**reduced)
    with pytest.raises(ValueError, match="factor"):
        other.load_checkpoint(path=path, module=copy, optimizer=again)


def test_the_manager_makes_one_release_per_draw() -> None:
    model = nn.Linear(N, 1, bias=False)
    nn.init.zeros_(model.weight)
    data = TensorDataset(torch.eye(N))
    given = parts(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        n=N,
        noise_multiplier=0.0,
    )
    given |= {
        "data_loader": DataLoader(data, batch_size=N),
        "max_grad_norm": 10.0,
        "loss_reduction": "sum",
    }
    model, optimizer, loader = PrivacyEngine().make_private(**given)
    sizes: list[int] = []
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=10, optimizer=optimizer
    ) as batches:
        for (x,) in batches:
            sizes.append(len(x))
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert len(sizes) > 6
    assert max(sizes) <= 10
    assert optimizer.steps == len(optimizer.accountant) == 1
    seen: Tensor = model.weight.grad[0]
    torch.testing.assert_close(seen, torch.ones(N))


def test_the_manager_of_opacus_is_not_needed_and_says_so() -> None:
    given = parts()
    _, optimizer, loader = opacus.PrivacyEngine().make_private(**given)
    with pytest.raises(ValueError, match="data_loader must be a PrivateLoader"):
        BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer)
    _, ours, _ = PrivacyEngine().make_private(**parts(n=N))
    assert isinstance(ours, DPOptimizer)
    assert re.match("DPOptimizer", repr(ours))
