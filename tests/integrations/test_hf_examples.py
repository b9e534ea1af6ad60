"""The examples and pages on accelerate and transformers, run as a reader runs them."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from accelerate.state import AcceleratorState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
    ),  # peft asks for it
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def load(name: str) -> ModuleType:
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 100
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        spec.loader.exec_module(module)
        sys.modules.pop("adult", None)
    return module


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("name", "budget", "steps"), [("accelerate_loop", 1.0, 4), ("hf_trainer", 3.0, 2)]
)
def test_a_quick_run_prints_private_beside_non_private_scores(
    name: str, budget: float, steps: int
) -> None:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        figures = load(name).main(["--quick"])
    assert 0.0 < figures["epsilon"] <= budget
    assert figures["steps"] >= steps
    assert all(0.3 < figures[key] < 1.0 for key in ("baseline", "private"))
    for key in ("baseline", "private"):
        assert f"accuracy {figures[key]:.4f}" in text.getvalue()


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("page", ["accelerate", "transformers"])
def test_the_blocks_of_a_page_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```",
        (ROOT / f"docs/integrations/{page}.md").read_text("utf-8"),
        re.DOTALL,
    )
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": page})
    assert "differential privacy" in capsys.readouterr().out
