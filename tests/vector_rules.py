"""What counts as agreement with a test vector.

| family, tolerance | a number x agrees with the expected e if |
|---|---|
| `rtol`, `atol` (accounting, output) | abs(x - e) <= atol + rtol abs(e) |
| `rel`, `abs` (userlevel) | abs(x - e) <= max(abs, rel abs(e)) |
| one number t (heavytail) | abs(x - e) <= max(t abs(e), t / 1000); fields named T: also +-1 |
| one number t (holder) | <= t abs(e); t at e = 0; t max(1, abs(e)) if the function's name contains "log" |
| no tolerance, or 0 | x == e (integers, booleans) |
| `ledger_epsilon`, `epsilon_*` (accounting) | e - 5e-4 <= x <= e + rtol e + atol: lower is under-accounting |
| a probability (`PROBABILITIES`) | as its family says and abs(log x - log e) <= 1e-3: tiny is not 0 |
| `*_sigma*` (output) | as above and x >= e (1 - 1e-9): less noise is never accepted |
| `{min, max}`, `{sigma_at_least, sigma_at_most}` | x lies in the interval (and the plan's delta, recomputed, holds) |
| null, `{raises}`, `{error}` | the call raises ValueError (null: or returns None) |
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.adapters import API_MAP, Vector, recomputed_filter_delta
from torch_dpsco.algorithms.localized_numbers import LocalizedPhase, LocalizedSchedule

# Functions that return a probability, and the field that holds it ("result" if it is the whole, or its items): a delta
# far below the absolute tolerance of its vector must not pass by being small (see `accepted`).
PROBABILITIES = {
    "allocation:allocation_delta": "result",
    "accounting:gaussian_delta": "result",
    "accounting:group_approx_dp_delta": "result",
    "heavytail:binomial_shift_renyi_windowed": "lost_mass",
    "heavytail:exp_mech_quantile_probs": "result",
    "heavytail:gdp_delta": "result",
    "output:amp_delta": "result",
    "output:amp_delta_monotone": "result",
    "output:delta_with_failure": "result",
    "output:gaussian_delta": "result",
    "output:objpert_delta": "result",
    "output:objpert_delta_general": "result",
    "output:objpert_delta_monotone": "result",
    "userlevel:ball_marginal_cdf": "result",
    "userlevel:delta_svt_plus_gaussian": "result",
    "userlevel:els_mog_delta_one_step": "result",
    "userlevel:jl_contraction_delta": "result",
    "userlevel:laplace_diff_tail": "result",
    "userlevel:poisson_underflow_prob": "result",
    "userlevel:svt_bad_pass_prob": "result",
    "userlevel:svt_sequence_prob": "result",
}

# The letters of the proofs, which vectors have, for fields of localized schedules and their phases.
LETTERS = {
    "i": "index",
    "m": "n",
    "C": "clip",
    "T": "steps",
    "lam": "reg",
    "R": "radius",
    "sigma": "noise_std",
    "A": "error",
    "Q": "error",
    "eta": "lr",
    "ell": "phases_count",
    "lam1": "reg",
    "J": "copies",
}

LOG_TOLERANCE = 1e-3  # of the logarithm of a probability


# what a schedule says by its phases
_OF_PHASES: dict[str, Any] = {"phases_count": len, "reg": lambda phases: phases[0].reg}


def mismatches(vector: Vector, actual: Any) -> list[str]:
    """Returns what is wrong with a computed value; nothing if it agrees with the vector."""
    expected = vector.expected
    if expected is None or (isinstance(expected, dict) and {"raises", "error"} & set(expected)):
        if isinstance(actual, ValueError) or (expected is None and actual is None):
            return []
        return [f"ValueError expected (got {actual!r})"]
    if isinstance(actual, ValueError):
        return [f"raised {actual!r}"]
    return [*_compare(vector, expected, actual, "result"), *_recompute(vector, actual)]


def _compare(vector: Vector, expected: Any, actual: Any, path: str) -> Iterator[str]:
    if isinstance(expected, dict) and set(expected) == {"min", "max"}:
        if not (_is_number(actual) and expected["min"] <= float(actual) <= expected["max"]):
            yield f"{path}: {actual!r} is not in [{expected['min']}, {expected['max']}]"
    elif isinstance(expected, dict):
        returns = API_MAP[vector.key].get("returns", {})
        for name, value in expected.items():
            yield from _compare(
                vector, value, _field(actual, returns.get(name, name)), f"{path}.{name}"
            )
    elif isinstance(expected, list):
        items = actual.tolist() if isinstance(actual, (np.ndarray, torch.Tensor)) else actual
        if not isinstance(items, (list, tuple)) or len(items) != len(expected):
            yield f"{path}: {len(expected)} items expected (got {actual!r})"
            return
        for index, (value, item) in enumerate(zip(expected, items, strict=True)):
            yield from _compare(vector, value, item, f"{path}[{index}]")
    elif isinstance(expected, (bool, str)) or expected is None:
        if not isinstance(actual, (bool, np.bool_, str, type(None))) or actual != expected:
            yield f"{path}: {expected!r} expected (got {actual!r})"
    else:
        low, high = accepted(vector, path.rpartition(".")[2].partition("[")[0], expected)
        if not (_is_number(actual) and low <= float(actual) <= high):
            yield f"{path}: {expected!r} expected, accepted are [{low!r}, {high!r}] (got {actual!r})"


def accepted(vector: Vector, field: str, expected: float) -> tuple[float, float]:
    """Returns the interval of accepted values of a number of a vector (the table of this module's docstring)."""
    if field == "sigma_at_least":
        return expected, math.inf
    if field == "sigma_at_most":
        return -math.inf, expected
    if math.isinf(expected):
        return expected, expected
    slack = _slack(vector, field, abs(expected))
    low, high = expected - slack, expected + slack
    if vector.family == "accounting" and vector.function.startswith(
        ("ledger_epsilon", "epsilon_")
    ):
        low = expected - 5e-4
    if vector.family == "output" and "_sigma" in vector.function:
        low = max(low, expected * (1 - 1e-9))
    if PROBABILITIES.get(vector.key) == field and expected > 0:
        low, high = (
            max(low, expected * math.exp(-LOG_TOLERANCE)),
            min(high, expected * math.exp(LOG_TOLERANCE)),
        )
    return low, high


def _slack(vector: Vector, field: str, size: float) -> float:
    tolerance = vector.tolerance
    if isinstance(tolerance, dict) and set(tolerance) == {"rtol", "atol"}:
        return tolerance["atol"] + tolerance["rtol"] * size
    if isinstance(tolerance, dict):
        return max(tolerance["abs"], tolerance["rel"] * size)
    if not tolerance:
        return 1.0 if vector.family == "heavytail" and field == "T" else 0.0
    if vector.family == "heavytail":
        return max(tolerance * size, tolerance * 1e-3, 1.0 if field == "T" else 0.0)
    if vector.family == "holder":
        if "log" in vector.function:
            return tolerance * max(1.0, size)
        return tolerance * size if size else tolerance
    raise ValueError(f"{vector}: a single tolerance has no meaning in this family")


def _recompute(vector: Vector, plan: Any) -> Iterator[str]:
    if vector.key != "userlevel:calibrate_tight":
        return
    inputs = vector.inputs
    delta = recomputed_filter_delta(
        plan,
        n_users=inputs["n"],
        steps=inputs["T"],
        epsilon=inputs["eps"],
        pair_radius=inputs["tau"],
    )
    if not delta <= inputs["delta"]:
        yield f"the plan's delta is {delta!r}, above the target {inputs['delta']!r}"


def _field(actual: Any, name: str) -> Any:
    if isinstance(actual, dict):
        return actual.get(name, f"no field {name!r}")
    if isinstance(actual, (LocalizedPhase, LocalizedSchedule)):
        if name == "sigma2":
            return actual.noise_std**2
        name = LETTERS.get(name, name)
    if name in _OF_PHASES and not hasattr(actual, name) and hasattr(actual, "phases"):
        return _OF_PHASES[name](actual.phases)
    return getattr(actual, name, f"no field {name!r}")


def _is_number(actual: Any) -> bool:
    if isinstance(actual, torch.Tensor):
        return actual.numel() == 1 and actual.dtype != torch.bool
    return isinstance(actual, (int, float, np.integer, np.floating)) and not isinstance(
        actual, bool
    )
