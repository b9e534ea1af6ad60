"""Models with small public settings, and data for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_dpsco import estimators as models

N = 120
COMMON = {"epsilon": 20.0, "delta": 1e-3, "adjacency": "add_remove", "n": N, "bound_x": 5.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "LogisticRegression": {"classes": (0, 1)},
    "SoftmaxRegression": {"classes": (0, 1, 2)},
    "LinearSVC": {"classes": (0, 1)},
    "HuberRegressor": {"bound_y": 5.0},
    "QuantileRegressor": {"bound_y": 5.0},
    "Ridge": {"bound_y": 5.0},
    "Lasso": {"bound_y": 5.0},
    "TiltedClassifier": {"classes": (0, 1), "n_min": 1},
    "AdversarialClassifier": {"classes": (0, 1)},
}


def make(name: str, **changes: Any) -> Any:
    return getattr(models, name)(**{**COMMON, **SETTINGS[name], **changes})


def rows(count: int = N, width: int = 3) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, width))


def targets(name: str, X: np.ndarray) -> np.ndarray:
    signal = X @ np.arange(1.0, X.shape[1] + 1)
    if "bound_y" in SETTINGS[name]:
        return signal
    return (
        np.searchsorted([-1.0, 1.0], signal)
        if name == "SoftmaxRegression"
        else (signal > 0).astype(int)
    )
