"""What torch and Opacus do not promise to keep: found at import, or named in a sentence."""

from __future__ import annotations

import importlib

import pytest
import torch
from opacus.optimizers import DPOptimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_dpsco import compat


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
def test_a_missing_function_is_named_with_the_versions_that_were_run(monkeypatch, reload, owner, name):
    with monkeypatch.context() as patch:
        patch.delattr(owner, name)
        with pytest.raises(ImportError, match=rf"needs torch\S*\.{name}, which torch .* install one of these"):
            reload()


def test_a_missing_attribute_of_an_opacus_optimizer_is_named(monkeypatch, reload):
    made = DPOptimizer.__init__

    def renamed(self, *args, **kwargs):
        made(self, *args, **kwargs)
        del self._is_last_step_skipped

    with monkeypatch.context() as patch:
        patch.setattr(DPOptimizer, "__init__", renamed)
        with pytest.raises(ImportError, match=r"needs opacus\.optimizers\.DPOptimizer\._is_last_step_skipped"):
            reload()


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
    x.register_hook(lambda _: seen.append(compat.in_backward()))
    x.sum().backward()
    assert seen == [True]
    assert not compat.in_backward()
