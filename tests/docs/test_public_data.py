"""The page on public data, run as a reader runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "public_data.md"


def test_the_blocks_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, "public_data.md", "exec"), names)
    (accuracy,) = re.findall(r"accuracy (0\.\d+)", capsys.readouterr().out)
    assert float(accuracy) >= 0.88
