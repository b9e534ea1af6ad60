"""What torch and Opacus do not promise to keep: done without where that can be, or named in a sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from opacus.optimizers import DPOptimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from torch_dpsco import compat
from torch_dpsco.compat import of_opacus
from torch_dpsco.step import run
from torch_dpsco.step.run import is_watched

# Each is hidden from our code alone: torch itself reads some of them.
PRIVATE = (
    "_unsafe_view",
    *("_will_engine_execute_node", "_current_graph_task_id"),
    *(
        "_active_ddp_module",
        "_get_registry",
    ),
    " ".join(compat._GLOBAL_HOOKS) + " _global_optimizer_pre_hooks _global_optimizer_post_hooks",
    *("_optimizer_step_pre_hooks _optimizer_step_post_hooks", "_profiler_enabled", "next_id"),
)
WITHOUT = """
import builtins, os, sys
import torch, torch.distributed._composable
torch.set_num_threads(1)
get, has = getattr, hasattr

def hidden(asked):
    return asked in names and sys._getframe(2).f_globals["__name__"].startswith("torch_dpsco")

def our_getattr(owner, asked, *default):
    if not hidden(asked):
        return get(owner, asked, *default)
    if default:
        return default[0]
    raise AttributeError(asked)

def use():
    builtins.getattr = our_getattr
    builtins.hasattr = lambda owner, asked: has(owner, asked) and not hidden(asked)
    import torch_dpsco as dp
    accountant = dp.Accountant()
    accountant.authorize(dp.accounting.events.PoissonGaussian(1.0, 0.1))
    assert accountant.get_epsilon(1e-5) > 0
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    if names == ["_get_registry"]:  # whether it is replicated is unknown: refused
        from torch_dpsco.compat import is_replicated
        assert is_replicated(model)
        return
    model = dp.attach(model)
    plan = dp.ClippedSGD.plan(n=9, clip=1.0, noise_multiplier=0.0, sampling="full", steps=3, lr=0.1)
    rule = dp.rules.Momentum("uniform", 0.5)
    optimizer = dp.ClippedSGD(model.parameters(), plan, rule=rule)
    data = torch.utils.data.TensorDataset(torch.ones(9, 3), torch.ones(9, 1))
    for x, y in optimizer.loader(data):
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    print(float(sum(p.detach().sum() for p in model.parameters())), file=sys.stderr)

failed = []
for argument in sys.argv[1:]:
    names = argument.split()
    if os.fork() == 0:
        use()
        sys.stderr.flush()
        os._exit(0)
    if os.wait()[1]:
        failed.append(argument)
print(*failed)
"""


@pytest.mark.slow
def test_without_a_private_name_torch_dpsco_is_imported_and_makes_private_steps():
    command = [sys.executable, "-c", WITHOUT, "nothing", *PRIVATE]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.stdout == "\n", ran.stderr
    answers = {round(float(line), 6) for line in ran.stderr.splitlines()}
    assert len(answers) == 1  # the same steps


def test_without_the_count_of_hooks_secret_iterates_are_refused_in_a_sentence(monkeypatch):
    monkeypatch.delattr(RemovableHandle, "next_id")
    with pytest.raises(
        ImportError,
        match=r"needs RemovableHandle\.next_id for optimizers of secret iterates, which torch .*"
        r" HolderSGD and ClippedSGD do without.* install one of these",
    ):
        compat.hooks_made()


def test_hooks_that_cannot_be_read_count_as_there(monkeypatch):
    assert not compat.some_global_hook()
    monkeypatch.setattr(compat, "_GLOBAL_HOOKS", ("_renamed",))
    assert compat.some_global_hook()
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    assert not is_watched(plain)
    monkeypatch.setattr(run, "OPTIMIZER_HOOKS", [compat._UNKNOWN])
    assert is_watched(plain)


def test_a_class_that_opacus_does_not_have_is_named():
    assert of_opacus("optimizers.DPOptimizer", "nowhere.Nothing") == (DPOptimizer,)
    with pytest.raises(ImportError, match=r"needs opacus\.optimizers\.Renamed"):
        of_opacus("optimizers.Renamed")


LATER = """
import sys
import torch_dpsco as dp
late = ("opacus", "torch._dynamo", "sklearn", "scipy.stats", "scipy.optimize", "scipy.signal", "matplotlib")
assert not [name for name in late if name in sys.modules], [name for name in late if name in sys.modules]
import torch_dpsco.estimators
assert "opacus" not in sys.modules and "torch._dynamo" not in sys.modules
import torch
model = torch.compile(dp.attach(torch.nn.Linear(2, 1)), backend="eager")
if not torch.__version__.startswith("2.6."):  # it compiles no attached model
    model(torch.ones(3, 2)).sum().backward()
"""


@pytest.mark.slow
def test_what_is_slow_to_import_is_imported_when_it_is_needed():
    ran = subprocess.run(
        [sys.executable, "-c", LATER], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_hooks_of_all_modules_and_optimizers_are_seen():
    assert not compat.some_global_hook()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert compat.some_global_hook()
    handle.remove()
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    assert not is_watched(plain)
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert is_watched(plain)
    handle.remove()
    assert not compat.some_global_hook() | is_watched(plain)


def test_a_running_backward_is_seen():
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(compat.backward_number()))
    for _ in range(2):
        x.sum().backward()
    assert -1 < seen[0] < seen[1]
    assert compat.backward_number() == -1
