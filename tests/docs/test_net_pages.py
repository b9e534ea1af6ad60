"""The pages on nets, run as a reader runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "least"), [("nets", 0.9), ("public_data", 0.88)])
def test_the_blocks_of_a_page_run(
    page: str, least: float, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": page}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, page, "exec"), names)
    (accuracy,) = re.findall(r"accuracy (0\.\d+)", capsys.readouterr().out)
    assert float(accuracy) >= least
