"""Runs every test vector of a folder through the package: `pytest tests/test_vectors.py --vectors DIR`.

A vector is `{"function", "inputs", "expected", tolerance}` in a file `FAMILY.json` (a list, or `{"cases": list}`).
`tests/vectors/api_map.json` says which callable of the package computes it, how its inputs are called there (`args`),
which arguments the vector leaves out (`fixed`) and which field of the result is meant (`returns`).

`tests/vector_rules.py` says what counts as agreement. A function that the package does not have yet is skipped as "not
built" and counted in the summary; for the functions in `BUILT` that is a failure.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import adapters
from tests.adapters import API_MAP, FOLDER, NotBuiltError, Vector, call, load, parse, resolve
from tests.vector_rules import PROBABILITIES, mismatches

# Functions that the package has: "not built" is no excuse for these.
# Families of which all functions are built.
COMPLETE = ("accounting", "allocation", "heavytail", "holder", "output", "userlevel")
# Vectors that take more than 1.5 s.
SLOW = {"allocation:allocation_epsilon": (22, 23), "allocation:allocation_noise": (5,)}
BUILT = {
    family: [key.split(":")[1] for key in API_MAP if key.startswith(f"{family}:")]
    for family in COMPLETE
}


# The vectors.


def pytest_generate_tests(metafunc):
    if "vector" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--vectors")
        vectors = load(Path(chosen) if chosen else FOLDER)
        slow = {} if chosen else SLOW  # those from elsewhere are all run
        marks = [
            [pytest.mark.slow] if each.number in slow.get(each.key, ()) else []
            for each in vectors
        ]
        cases = [
            pytest.param(each, marks=mark) for each, mark in zip(vectors, marks, strict=True)
        ]
        metafunc.parametrize("vector", cases, ids=[str(each) for each in vectors])


@pytest.mark.cases(11, 5)
def test_the_package_agrees_with_the_vector(vector, record_property):
    record_property("vector", vector.key)
    try:
        actual = call(vector)
        problems = mismatches(vector, actual)
    except NotBuiltError as missing:
        pytest.skip(f"not built: {missing}")
    assert problems == [], f"{vector.key} with {vector.inputs}"


@pytest.mark.cases(19, 9)
@pytest.mark.parametrize(
    "key", [f"{family}:{function}" for family, names in BUILT.items() for function in names]
)
def test_a_function_that_must_exist_is_built(key):
    first = next(vector for vector in load(FOLDER) if vector.key == key)
    assert call(first) is not None  # NotBuiltError fails


def test_every_vector_has_a_callable_and_a_name_for_each_input():
    for vector in load(FOLDER):
        entry = API_MAP[vector.key]
        assert set(vector.inputs) <= set(entry["args"]), vector.key
        assert not set(entry["args"].values()) & set(entry.get("fixed", {})), vector.key


def test_a_formula_of_several_families_has_one_implementation():
    homes = {}
    for key, entry in API_MAP.items():
        place = entry["module"], entry["name"]
        if entry["alias_of"] is not None:
            canonical = API_MAP[entry["alias_of"]]
            assert canonical["alias_of"] is None, key
            assert place == (canonical["module"], canonical["name"]), key
        else:
            homes.setdefault((*place, str(entry.get("fixed", {}))), []).append(key)
    assert [keys for keys in homes.values() if len(keys) > 1] == []


# The rules: each accepts what it should and, above all, refuses what it should.


def _leaves(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (leaf, function that returns the whole with that leaf replaced)."""
    if isinstance(value, dict):
        for name, item in value.items():
            for leaf, rebuild in _leaves(item):
                yield leaf, lambda new, name=name, rebuild=rebuild: value | {name: rebuild(new)}
    elif isinstance(value, list):
        for index, item in enumerate(value):
            for leaf, rebuild in _leaves(item):
                yield (
                    leaf,
                    lambda new, index=index, rebuild=rebuild: [
                        *value[:index],
                        rebuild(new),
                        *value[index + 1 :],
                    ],
                )
    else:
        yield value, lambda new: new


def _wrong(leaf: Any) -> list[Any]:
    if isinstance(leaf, bool):
        return [not leaf, None]
    if isinstance(leaf, str) or leaf is None:
        return ["wrong"]
    beyond = 2.0 + 0.05 * abs(leaf)
    numbers = [0.0] if math.isinf(leaf) else [leaf - beyond, leaf + beyond]
    return [*numbers, math.nan, None, "1", ValueError("refused")]


def _as_result(vector: Vector, expected: Any) -> Any:
    """Returns the expected value under the field names of the package."""
    if isinstance(expected, list):
        return [_as_result(vector, item) for item in expected]
    if not isinstance(expected, dict):
        return expected
    returns = API_MAP[vector.key].get("returns", {})
    return {
        returns.get(name, name): _as_result(vector, value) for name, value in expected.items()
    }


NO_LEAVES = {"raises", "error", "min", "sigma_at_least"}


@pytest.mark.slow
def test_every_vector_accepts_its_own_value_and_refuses_one_wrong_leaf():
    checked = 0
    for vector in load(FOLDER):
        expected = vector.expected
        if expected is None or (isinstance(expected, dict) and NO_LEAVES & set(expected)):
            continue
        assert mismatches(vector, _as_result(vector, expected)) == [], vector
        leaves = list(_leaves(expected))
        for leaf, rebuild in (leaves[0], leaves[-1]) if leaves else ():
            for wrong in _wrong(leaf):
                assert mismatches(vector, _as_result(vector, rebuild(wrong))) != [], (
                    vector,
                    wrong,
                )
                checked += 1
    assert checked > 10_000


def _vector(key, expected, tolerance):
    family, function = key.split(":")
    return Vector(family, function, {}, expected, tolerance)


RULES = [
    # key, expected, tolerance, accepted values, refused values
    (
        "accounting:gaussian_mu",
        2.0,
        {"rtol": 0.1, "atol": 0.1},
        [1.71, 2.29],
        [1.69, 2.31, math.nan],
    ),
    (
        "accounting:ledger_epsilon",
        2.0,
        {"rtol": 0.1, "atol": 0.1},
        [1.9996, 2.29],
        [1.9994, 2.31],
    ),
    (
        "accounting:epsilon_wor_replace_one",
        2.0,
        {"rtol": 0.1, "atol": 0.0},
        [1.9996, 2.19],
        [1.9994, 2.21],
    ),
    (
        "accounting:ledger_epsilon",
        math.inf,
        {"rtol": 0.1, "atol": 0.1},
        [math.inf],
        [1e300, math.nan],
    ),
    ("output:knorm_mean_norm", 2.0, {"rtol": 0.1, "atol": 0.1}, [1.71, 2.29], [1.69, 2.31]),
    (
        "output:analytic_gaussian_sigma",
        2.0,
        {"rtol": 0.1, "atol": 0.0},
        [2.0, 2.19],
        [1.999, 2.0 * (1 - 2e-9), 2.21],
    ),
    (
        "output:objpert_delta_general",
        1e-118,
        {"rtol": 1e-6, "atol": 1e-14},
        [1.0009e-118],
        [0.0, 9.98e-119, 1.002e-118],
    ),
    ("output:objpert_delta_general", 0.0, {"rtol": 1e-6, "atol": 1e-14}, [0.0, 9e-15], [2e-14]),
    (
        "output:objpert_delta_general",
        0.5,
        {"rtol": 1e-6, "atol": 1e-14},
        [0.5000004],
        [0.5000006],
    ),
    (
        "heavytail:exp_mech_quantile_probs",
        [1e-30, 0.5],
        1e-9,
        [[1e-30, 0.5]],
        [[0.0, 0.5], [1e-20, 0.5]],
    ),
    (
        "heavytail:binomial_shift_renyi_windowed",
        {"rdp": 1e-9, "lost_mass": 1e-9},
        1e-5,
        [{"rdp": 5e-9, "lost_mass": 1.0009e-9}],
        [{"rdp": 1e-9, "lost_mass": 0.0}, {"rdp": 1e-9, "lost_mass": 5e-9}],
    ),
    ("output:sgd_iterations", 100, {"rtol": 0.0, "atol": 1.0}, [99, 100, 101], [98, 102]),
    ("userlevel:mu_for_budget", 2.0, {"rel": 0.1, "abs": 0.0}, [1.81, 2.19], [1.79, 2.21]),
    ("userlevel:mu_for_budget", 2.0, {"rel": 0.01, "abs": 0.1}, [1.91, 2.09], [1.89, 2.11]),
    (
        "userlevel:bernoulli_mismatch_quantile",
        12,
        {"rel": 0, "abs": 0},
        [12, 12.0],
        [11, 13, 12.5],
    ),
    ("heavytail:sc_clip", 2.0, 0.1, [1.81, 2.19], [1.79, 2.21]),
    ("heavytail:sc_clip", 1e-9, 0.1, [9e-5, -9e-5], [1.1e-4, -1.1e-4]),
    (
        "heavytail:sc_reduction_sizes",
        [5, 10],
        0,
        [[5, 10], (5, 10), np.array([5, 10])],
        [[5], [5, 11], [5, 10, 1], 5],
    ),
    (
        "heavytail:localized_schedule_tight",
        {"phases": [{"T": 9}]},
        0,
        [{"phases": [{"T": 10}]}],
        [{"phases": [{"T": 11}]}],
    ),
    (
        "heavytail:localized_schedule_tight",
        {"ell": 9},
        1e-8,
        [{"phases_count": 9}],
        [{"phases_count": 10}, {"ell": 9}],
    ),
    ("holder:beta_unconstrained", 2.0, 0.1, [1.81, 2.19], [1.79, 2.21]),
    ("holder:beta_unconstrained", 0.0, 0.1, [0.09, -0.09], [0.11, -0.11]),
    ("holder:beta_unconstrained", 1e-9, 0.1, [1.09e-9], [1.2e-9, 0.0]),
    ("holder:log_c_alpha_2", 1e-9, 0.1, [0.09, -0.09], [0.11, -0.11]),
    ("holder:log_c_alpha_2", -20.0, 0.1, [-18.1, -21.9], [-17.9, -22.1]),
    ("holder:log_c_alpha_2", -math.inf, 0.1, [-math.inf], [-1e300, math.inf]),
    ("holder:rdp_filter_steps", 3, 0, [3, torch.tensor(3)], [2, 4, True, "3", [3]]),
    ("holder:rdp_filter_steps", 1, None, [1], [0, 2, True]),
    (
        "holder:output_sigma_weighted_mixture",
        {"min": 1.0, "max": 2.0},
        0,
        [1.0, 2.0],
        [0.99, 2.01, math.nan, None, "1.5"],
    ),
    (
        "holder:alg2_paper",
        {"cond_a": False},
        1e-9,
        [{"condition_a": np.bool_(False)}],
        [{"condition_a": True}, {}, 0.0],
    ),
    (
        "holder:alg2_paper",
        {"cond_a": True},
        1e-9,
        [{"condition_a": True}],
        [{"condition_a": 1.0}, {"condition_a": False}],
    ),
    ("holder:rdp_lemma3", None, 1e-9, [None, ValueError("no")], [0.1, math.inf, math.nan]),
    (
        "output:term_sensitivity",
        {"raises": "ValueError"},
        None,
        [ValueError("no")],
        [None, 0.1, math.inf],
    ),
    ("userlevel:mu_for_budget", {"error": "ValueError"}, None, [ValueError("no")], [None, 0.0]),
]


@pytest.mark.parametrize(("key", "expected", "tolerance", "good", "bad"), RULES)
def test_a_rule_accepts_what_it_should_and_refuses_the_rest(key, expected, tolerance, good, bad):
    vector = _vector(key, expected, tolerance)
    for value in good:
        assert mismatches(vector, value) == [], value
    for value in bad:
        assert mismatches(vector, value) != [], value
    if expected is not None and not isinstance(expected, dict):
        assert mismatches(vector, ValueError("refused")) != []


NAMED_LIKE_A_PROBABILITY = re.compile("delta|prob|tail|cdf|mass")
NO_PROBABILITIES = {
    *(
        "holder:gaussian_log_delta",
        "heavytail:gdp_mu_from_eps_delta",
        "heavytail:rho_from_eps_delta_zcdp_tight",
    ),
    "output:zhao_c_delta",
}


def test_every_probability_is_also_compared_in_log():
    """By the names: a new function that returns a delta must be listed, or be none; and no listed one has gone."""
    named = {
        vector.key for vector in load(FOLDER) if NAMED_LIKE_A_PROBABILITY.search(vector.function)
    }
    assert named - NO_PROBABILITIES <= set(PROBABILITIES)
    assert named >= NO_PROBABILITIES
    assert set(API_MAP) >= set(PROBABILITIES)


def test_no_under_report_of_a_tiny_probability_passes():
    checked = 0
    for vector in load(FOLDER):
        value, field = vector.expected, PROBABILITIES.get(vector.key)
        if field is None or value is None or (isinstance(value, dict) and field not in value):
            continue
        for wrong in (0.0, 0.99):
            if field != "result":
                tampered, true = value | {field: value[field] * wrong}, value[field]
            else:
                true = min(value) if isinstance(value, list) else value
                tampered = (
                    [item * wrong for item in value]
                    if isinstance(value, list)
                    else value * wrong
                )
            if true > 0:
                assert mismatches(vector, _as_result(vector, tampered)) != [], (vector, wrong)
                checked += 1
    assert checked > 300


def test_only_a_value_error_counts_as_a_refusal(monkeypatch):
    def refuse(error):
        def function(**arguments):
            raise error

        return lambda module, name: function

    vector = Vector("holder", "rdp_lemma3", {"order": 2, "z": 1.0, "p": 0.5}, None, 1e-9)
    monkeypatch.setattr(adapters, "resolve", refuse(ValueError("side condition")))
    assert mismatches(vector, call(vector)) == []
    monkeypatch.setattr(adapters, "resolve", refuse(TypeError("no such argument")))
    with pytest.raises(TypeError):
        call(vector)


def test_fixed_arguments_reach_the_function_and_inputs_are_renamed(monkeypatch):
    monkeypatch.setattr(adapters, "resolve", lambda module, name: lambda **arguments: arguments)
    vector = Vector(
        "userlevel", "min_users_paper_corrected", {"T": 10, "delta": 0.1, "eps": 1.0}, 1.0, None
    )
    assert call(vector) == {"steps": 10, "delta": 0.1, "epsilon": 1.0, "corrected": True}


def test_the_strings_inf_become_floats_everywhere_and_other_strings_stay():
    case = {
        "function": "f",
        "inputs": {"T": "inf", "domain": "bounded", "x": [["-inf"]]},
        "expected": {"a": "-inf"},
    }
    vector = parse("holder", case)
    assert vector.inputs == {"T": math.inf, "domain": "bounded", "x": [[-math.inf]]}
    assert vector.expected == {"a": -math.inf}


def test_a_missing_module_or_attribute_is_not_built_but_a_broken_module_is_an_error(
    monkeypatch, tmp_path
):
    (tmp_path / "broken_module_of_test.py").write_text("import no_such_module_of_test\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, name in [
        ("torch_dpsco.no_such", "f"),
        ("no_such_package.inner", "f"),
        ("torch_dpsco.errors", "f"),
    ]:
        with pytest.raises(NotBuiltError, match="f"):
            resolve(module, name)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_test"):
        resolve("broken_module_of_test", "f")


def test_vector_files_of_no_family_or_without_vectors_are_refused(tmp_path):
    with pytest.raises(pytest.UsageError, match="no vectors"):
        load(tmp_path)
    (tmp_path / "unheard_of.json").write_text("[]")
    with pytest.raises(pytest.UsageError, match="no such family"):
        load(tmp_path)


@pytest.mark.slow
def test_vectors_from_elsewhere_are_all_run(tmp_path):
    """Also those that have the places of slow ones here; the mark `cases` is for ours alone."""
    content = json.loads((FOLDER / "allocation.json").read_text())
    cases = content["cases"] if isinstance(content, dict) else content
    quick = next(case for case in cases if case["function"] == "allocation_epsilon")
    (tmp_path / "allocation.json").write_text(json.dumps([quick] * 40))
    test = "test_the_package_agrees_with_the_vector"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        f"{__file__}::{test}",
    ]
    found = subprocess.run(
        [*command, "--vectors", tmp_path], cwd=FOLDER.parents[1], capture_output=True, text=True
    )
    assert re.search(r"^40 passed in", found.stdout, re.MULTILINE), found.stdout


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_plan_whose_recomputed_delta_exceeds_the_target_is_refused(monkeypatch, beta):
    stand_ins = {
        "filter_coefficient": lambda n, score_floor, ramp_end: 0.5,
        "bad_pass_probability": lambda margin, steps, threshold_scale, query_scale: beta,
        "svt_gaussian_delta": lambda epsilon, epsilon_svt, mu: mu,
        "concentration_score_sensitivity": lambda n_users: 2.0,
        "above_threshold_epsilon": lambda threshold_scale, query_scale, sensitivity: 1.0,
    }

    monkeypatch.setattr(adapters, "resolve", lambda module, name: stand_ins[name])
    fields = "score_floor", "ramp_end", "threshold", "threshold_scale", "query_scale"
    plan = types.SimpleNamespace(noise_std=2.0, **dict.fromkeys(fields, 1.0))
    # mu = sqrt(4) * 2 * 3 * 0.5 / 2 = 3, so that delta = 3 + (1 + e) beta.
    delta = 3.0 + (1 + math.e) * beta
    interval = {"sigma_at_least": 1.0, "sigma_at_most": 3.0}
    inputs = {"n": 10, "T": 4, "eps": 1.0, "delta": delta * (1 + 1e-12), "tau": 3.0}
    assert (
        mismatches(
            Vector("userlevel", "calibrate_tight", inputs, interval, {"rel": 0, "abs": 0}), plan
        )
        == []
    )
    tighter = inputs | {"delta": delta * (1 - 1e-12)}
    assert (
        mismatches(
            Vector("userlevel", "calibrate_tight", tighter, interval, {"rel": 0, "abs": 0}), plan
        )
        != []
    )
    for narrow in (
        {"sigma_at_least": 2.1, "sigma_at_most": 3.0},
        {"sigma_at_least": 1.0, "sigma_at_most": 1.9},
    ):
        assert (
            mismatches(
                Vector("userlevel", "calibrate_tight", inputs, narrow, {"rel": 0, "abs": 0}),
                plan,
            )
            != []
        )
