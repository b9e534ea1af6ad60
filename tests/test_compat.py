"""What torch and Opacus do not promise to keep: found at import, or named in a sentence."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
from opacus.optimizers import DPOptimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_dpsco import compat
from torch_dpsco._loaded import of_opacus


@pytest.fixture
def reload():
    yield lambda: importlib.reload(compat)
    importlib.reload(compat)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch, "_foreach_add_"),
        (torch._C, "_current_graph_task_id"),
        (torch.nn.modules.module, "_global_forward_hooks"),
        (torch.utils, "_pytree"),
    ],
)
def test_a_missing_function_is_named_with_the_versions_that_were_run(
    monkeypatch, reload, owner, name
):
    with monkeypatch.context() as patch:
        patch.delattr(owner, name)
        with pytest.raises(
            ImportError, match=rf"needs torch\S*\.{name}, which torch .* install one of these"
        ):
            reload()


def test_a_missing_attribute_of_an_opacus_optimizer_is_named(monkeypatch):
    made = DPOptimizer.__init__

    def renamed(self, *args, **kwargs):
        made(self, *args, **kwargs)
        del self._is_last_step_skipped

    with monkeypatch.context() as patch:
        patch.setattr(DPOptimizer, "__init__", renamed)
        with pytest.raises(
            ImportError, match=r"needs opacus\.optimizers\.DPOptimizer\._is_last_step_skipped"
        ):
            compat.require_opacus()
    compat.require_opacus()


def test_to_look_at_opacus_draws_nothing():
    torch.manual_seed(7)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    compat.require_opacus()
    assert torch.equal(torch.rand(3), drawn)


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
from opacus.accountants import IAccountant, create_accountant
assert isinstance(dp.Accountant(), IAccountant)
assert type(create_accountant("dpsco")) is dp.Accountant
import torch
from torch_dpsco.rows import attach
from torch_dpsco.rows.layers import recorded
model = torch.compile(dp.attach(torch.nn.Linear(2, 1)), backend="eager")
if not torch.__version__.startswith("2.6."):  # it compiles no attached model
    model(torch.ones(3, 2)).sum().backward()
    # a compiled model leaves these out, though the compiler was loaded later
    for part in (attach._BEGIN, attach._TAKE, attach._END, recorded._RECORD):
        assert part.call != part._in_any, part._function
"""
DOOR = """
import torch_dpsco as dp
import opacus
import torch_dpsco.integrations.opacus
from opacus.accountants import create_accountant
assert type(create_accountant("dpsco")) is dp.Accountant
"""
EARLIER = """
import opacus
import torch_dpsco as dp
from opacus.accountants import create_accountant
assert type(create_accountant("dpsco")) is dp.Accountant
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", [LATER, DOOR, EARLIER], ids=["later", "by a door", "earlier"])
def test_what_is_slow_to_import_is_imported_when_it_is_needed(order):
    ran = subprocess.run([sys.executable, "-c", order], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_hooks_of_all_modules_and_optimizers_are_seen():
    assert not compat.some_global_hook()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert compat.some_global_hook()
    handle.remove()
    assert not compat.some_optimizer_hook()
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert compat.some_optimizer_hook()
    handle.remove()
    assert not compat.some_global_hook() | compat.some_optimizer_hook()


def test_a_running_backward_is_seen():
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(compat.backward_number()))
    for _ in range(2):
        x.sum().backward()
    assert -1 < seen[0] < seen[1]
    assert compat.backward_number() == -1
