"""Plugin of pytest: the fixture `dp_check`. It costs other projects nothing, for torch_dpsco is imported on use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def dp_check() -> Callable[..., Any]:
    """Runs `torch_dpsco.audits.check_training` with the arguments given, and fails if the claim is refuted."""
    from torch_dpsco.audits import check_training

    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        found = check_training(*args, **kwargs)
        if found.contradicts():
            pytest.fail(str(found))
        return found

    return checked
