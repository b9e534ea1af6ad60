"""The numpy references of the optimizers agree with the trajectories of the vectors, noise where it belongs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.adapters import load
from tests.reference import heavy_tailed_literal as literal
from torch_dpsco.algorithms.heavy_tailed_numbers import averaging_schedule

VECTORS = load(Path(__file__).parents[1] / "vectors")


def cases(function):
    found = [vector for vector in VECTORS if vector.key == f"heavytail:{function}"]
    assert len(found) >= 10
    return pytest.mark.parametrize("vector", found, ids=str)


def least_squares(inputs):
    X, y = np.array(inputs["X"]), np.array(inputs["y"])
    size = len(X) // inputs["T"]
    batches = [range(t * size, (t + 1) * size) for t in range(inputs["T"])]
    return lambda w, i: (X[i] @ w - y[i]) * X[i], np.array(inputs["w0"]), batches


@cases("traj_acsa_lsq_noiseless_ball")
def test_algorithm_2_follows_the_vectors_step_by_step(vector):
    v = vector.inputs
    gradient, w0, batches = least_squares(v)
    answers, _ = literal.algorithm_2(
        gradient, w0, batches, v["C"], v["eta"], literal.ball(v["R"])
    )
    np.testing.assert_allclose(answers, vector.expected, rtol=1e-9, atol=1e-12)


@cases("traj_sc_lsq_noiseless_ball")
def test_algorithm_6_follows_the_vectors(vector):
    v = vector.inputs
    gradient, w0, batches = least_squares(v)
    plan = averaging_schedule(strong_convexity=v["mu"], smoothness=v["beta"], steps=v["T"])
    average, last = literal.algorithm_6(
        gradient, w0, batches, v["C"], plan.lr, plan.weights, literal.ball(v["R"])
    )
    np.testing.assert_allclose(average, vector.expected["average"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(last, vector.expected["last"], rtol=1e-9, atol=1e-12)


@cases("traj_prox_l1_lsq_noiseless")
def test_algorithm_8_follows_the_vectors(vector):
    v = vector.inputs
    gradient, w0, batches = least_squares(v)
    prox = literal.soft_threshold(v["l1"])
    last = literal.algorithm_8(gradient, w0, batches, v["C"], 1 / (2 * v["beta"]), prox)
    np.testing.assert_allclose(last, vector.expected, rtol=1e-9, atol=1e-12)


@cases("traj_alg3_lsq_noiseless")
def test_algorithm_3_follows_the_vectors(vector):
    v = vector.inputs
    gradient, w0, _ = least_squares(v)
    phase = literal.Phase(v["C"], v["T"], v["lam"], v["R"], "ball")
    last = literal.algorithm_3(gradient, w0, range(len(v["X"])), phase)
    np.testing.assert_allclose(last, vector.expected, rtol=1e-9, atol=1e-12)


@cases("coordwise_median_of_means_noiseless")
def test_algorithm_12_follows_the_vectors(vector):
    v = vector.inputs
    found = literal.algorithm_12(np.array(v["Z"]), v["m"], v["tau"])
    np.testing.assert_allclose(found, vector.expected, rtol=1e-9, atol=1e-12)


@cases("aggregate_select")
def test_the_choice_among_copies_follows_the_vectors(vector):
    assert (
        literal.select_central([np.array(y) for y in vector.inputs["Y"]])
        == vector.expected["index"]
    )


def test_noise_moves_each_reference_by_what_its_first_step_says():
    def gradient(w, i):
        return np.array([1.0, 0.0])

    w0, noise = np.zeros(2), [np.array([0.0, 1.0])]
    answers, queries = literal.algorithm_2(gradient, w0, [[0]], 9.0, 2.0, noise=noise)
    np.testing.assert_allclose(answers[0], [-0.25, -0.25])
    np.testing.assert_allclose(queries[0], w0)
    np.testing.assert_allclose(
        literal.algorithm_6(gradient, w0, [[0]], 9.0, [0.5], [1.0], noise=noise)[0], [-0.5, -0.5]
    )
    phase = literal.Phase(clip=9.0, steps=1, reg=2.0)
    np.testing.assert_allclose(
        literal.algorithm_4(gradient, w0, [[0]], [phase], noise=[noise])[0], [-0.5, -0.5]
    )
    prox = literal.soft_threshold(0.0)
    np.testing.assert_allclose(
        literal.algorithm_8(gradient, w0, [[0]], 9.0, 0.5, prox, noise), [-0.5, -0.5]
    )
    np.testing.assert_allclose(
        literal.algorithm_12([[1.0, 0.0]], 1, 9.0, before=noise), [1.0, 1.0]
    )
    three = [[[0], [0], [0]]]
    chosen = literal.boosted(
        gradient, w0, three, [phase], noise=[[[np.zeros(2)], [np.array([9.0, 9.0])], noise]]
    )
    np.testing.assert_allclose(chosen[0], [-0.5, 0.0])


def test_localization_hands_the_last_iterate_on_as_the_next_center():
    def gradient(w, i):
        return np.array([float(i)])

    phases = [literal.Phase(9.0, 3, 1.0), literal.Phase(9.0, 3, 8.0)]
    first, second = literal.algorithm_4(gradient, np.zeros(1), [[1], [4]], phases)
    np.testing.assert_allclose(first, [-1.0])  # what = c - g/lambda for linear losses
    np.testing.assert_allclose(second, [-1.5])
    far = literal.algorithm_3(
        gradient, np.zeros(1), [4], literal.Phase(9.0, 3, 1.0, 0.5, "ball")
    )
    np.testing.assert_allclose(far, [-0.5])
    np.testing.assert_array_equal(literal.clip_row(np.array([math.nan, 1.0]), 1.0), [0.0, 0.0])
