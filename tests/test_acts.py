"""What is registered from outside, by name."""

from __future__ import annotations

import pytest

import torch_dpsco as dp
from torch_dpsco import acts


def test_a_place_in_words_is_imported_at_use_and_a_later_one_replaces_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acts, "_KNOWN", dict(acts._KNOWN))
    acts.register("mine", "math:sqrt")
    assert acts.act("mine")(9.0) == 3.0
    acts.register("mine", abs)
    assert acts.act("mine")(-9.0) == 9.0
    with pytest.raises(LookupError, match="nothing is registered as 'other'"):
        acts.act("other")


def test_a_preview_of_ones_own_takes_the_place_of_the_librarys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acts, "_KNOWN", dict(acts._KNOWN))
    model = dp.estimators.Ridge(n=1000, bound_x=1.0, bound_y=1.0)
    acts.register("model.preview", lambda model, *given, **more: (type(model).__name__, more))
    assert model.preview(dim=3)[0] == "Ridge"
    acts.register("fit.stored", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.fit(lambda: iter(()))
