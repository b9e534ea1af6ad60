"""Failures: exact fractions, worst cases that reach each rule, and the summary of a curve as Gaussian privacy."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.reference.papers.output import delta_with_failure
from torch_dpsco.accounting.analysis.gaussian import (
    gaussian_delta,
    gaussian_epsilon,
)
from torch_dpsco.accounting.analysis.pure import pure_delta
from torch_dpsco.accounting.analysis.rdp import delta_before_failure, epsilon_with_failures

KINDS = ["coupling", "transcript", "per_side"]
probabilities = st.one_of(st.just(0.0), st.floats(-15.0, 0.0).map(lambda x: 10**x))
epsilons = st.floats(0.0, 12.0)


def exact_total(delta, failure, epsilon, kind) -> mp.mpf:
    d, f = mp.mpf(delta), mp.mpf(failure)
    return {
        "coupling": f + (1 - f) * d,
        "transcript": d + f,
        "per_side": d + (1 + mp.exp(mp.mpf(epsilon))) * f,
    }[kind]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("kind", KINDS)
@given(probabilities, probabilities, epsilons)
@example(1e-6, 1e-7, 1.0)
def test_a_failure_is_never_undercharged(kind, delta, failure, epsilon):
    with mp.workdps(60):
        exact = min(mp.mpf(1), exact_total(delta, failure, epsilon, kind))
        assert (
            exact
            <= delta_with_failure(delta, failure, epsilon, kind)
            <= exact * (1 + mp.mpf("2e-14"))
        )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("kind", KINDS)
@given(probabilities, probabilities, epsilons)
def test_the_inverse_never_exceeds_the_delta_of_the_statement(kind, delta, failure, epsilon):
    left = delta_before_failure(delta, failure, epsilon, kind)
    assert 0 <= left <= delta
    with mp.workdps(60):
        if left > 0:
            assert exact_total(left, failure, epsilon, kind) <= delta
            assert (
                left
                >= (delta - (exact_total(0.0, failure, epsilon, kind))) * (1 - mp.mpf("1e-10"))
                - 1e-13 * delta
            )
        else:
            assert exact_total(0.0, failure, epsilon, kind) >= delta * (1 - 1e-12)


def test_the_inverse_divides_by_the_rest_of_a_coupling():
    assert delta_before_failure(0.3, 0.1, 0.0, "coupling") == pytest.approx(0.2 / 0.9, rel=1e-12)
    assert delta_before_failure(0.3, 0.3, 0.0, "coupling") == 0.0
    assert delta_before_failure(1.0, 1.0, 0.0, "coupling") == 0.0


def test_a_failure_at_a_huge_epsilon_takes_everything():
    assert delta_with_failure(0.0, 1e-300, 800.0, "per_side") == 1.0
    assert delta_with_failure(0.0, 0.0, 800.0, "per_side") == 0.0
    assert delta_before_failure(0.5, 1e-300, 800.0, "per_side") == 0.0


@given(st.floats(0.1, 3.0), st.floats(0.01, 0.5), st.floats(0.0, 2.0))
def test_each_rule_is_reached_by_a_mechanism_with_that_failure(strength, failure, epsilon):
    """Randomized response beside failures that give the data set away: hockey sticks of finite distributions."""
    p = math.exp(strength) / (1 + math.exp(strength))
    near, far = np.array([p, 1 - p]), np.array([1 - p, p])
    delta = pure_delta(epsilon, strength)

    def hockey_stick(one, other):
        return np.sum(np.maximum(0.0, np.array(one) - math.exp(epsilon) * np.array(other)))

    # coupled except with probability f, and then told apart
    one, other = [*(1 - failure) * near, failure, 0.0], [*(1 - failure) * far, 0.0, failure]
    assert hockey_stick(one, other) == pytest.approx(
        delta_with_failure(delta, failure, epsilon, "coupling"), rel=1e-9
    )
    # on each side mass f is moved: to an outcome that the other side never has, and out of the set that decides
    moved = min(failure, (1 - p) * 0.99)
    one, other = [p - 0.0, 1 - p - moved, moved], [1 - p - moved, p + moved, 0.0]
    bound = delta_with_failure(delta, moved, epsilon, "per_side")
    assert (
        delta_with_failure(delta, moved, epsilon, "transcript") - 1e-12
        <= hockey_stick(one, other)
        <= bound + 1e-12
    )
    if epsilon < strength:
        assert hockey_stick(one, other) == pytest.approx(bound, rel=1e-9)


@pytest.mark.slow
@given(
    st.floats(0.02, 2.0),
    st.floats(-12.0, -0.5).map(lambda x: 10**x),
    st.floats(0.0, 0.45),
    st.floats(0.0, 0.45),
    st.floats(0.0, 0.02),
)
@settings(max_examples=60)
def test_the_epsilon_with_failures_satisfies_delta(mu, delta, coupling, transcript, per_side):
    shares = {
        "coupling": coupling * delta,
        "transcript": transcript * delta,
        "per_side": per_side * delta,
    }
    epsilon = epsilon_with_failures(delta, lambda d: gaussian_epsilon(mu, d), **shares)
    if math.isinf(epsilon):
        # no epsilon satisfies delta: what the failures add, and what the mechanism has, is too much at each of these
        for tried in np.linspace(0, math.log(1 / max(per_side, 1e-9)) + 1, 60):
            assert total(mu, float(tried), shares) > delta * (1 - 1e-3)
        return
    assert total(mu, epsilon, shares) <= delta * (1 + 1e-12)
    if epsilon > 1e-6 and per_side < 1e-3:
        assert total(mu, epsilon * (1 - 1e-3), shares) > delta * (1 - 1e-9)


def total(mu, epsilon, shares):
    value = gaussian_delta(mu, epsilon)
    for kind, failure in shares.items():
        value = delta_with_failure(value, failure, epsilon, kind)
    return value


def test_without_failures_the_conversion_is_unchanged():
    assert epsilon_with_failures(1e-5, lambda d: gaussian_epsilon(0.3, d)) == gaussian_epsilon(
        0.3, 1e-5
    )
    assert epsilon_with_failures(1e-5, lambda d: 0.0) == 0.0


def test_failures_that_take_all_of_delta_leave_no_epsilon():
    for kind in KINDS:
        assert (
            epsilon_with_failures(1e-5, lambda d: gaussian_epsilon(0.3, d), **{kind: 1e-5})
            == math.inf
        )
    # (1 + e^epsilon) beta grows past delta before the mechanism's epsilon is reached
    assert (
        epsilon_with_failures(1e-5, lambda d: gaussian_epsilon(3.0, d), per_side=1e-6) == math.inf
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: delta_with_failure(1.1, 0.0, 1.0, "coupling"), "delta must be in"),
        (lambda: delta_with_failure(0.1, -0.1, 1.0, "coupling"), "failure must be in"),
        (lambda: delta_with_failure(0.1, 0.1, -1.0, "coupling"), "epsilon must be >= 0"),
        (
            lambda: delta_with_failure(0.1, 0.1, 1.0, "both"),
            "kind must be one of coupling, transcript, per_side",
        ),
        (lambda: delta_before_failure(math.nan, 0.1, 1.0, "coupling"), "delta must be in"),
        (lambda: epsilon_with_failures(0.0, lambda d: 0.0), "delta must be in"),
        (lambda: epsilon_with_failures(0.1, lambda d: 0.0, transcript=2.0), "failure must be in"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
