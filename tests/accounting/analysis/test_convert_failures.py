"""Failures: exact fractions, worst cases that reach each rule, and the summary of a curve as Gaussian privacy."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.reference.papers.output import delta_with_failure
from tests.reference.papers.pure import pure_delta
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta
from torch_dpsco.accounting.analysis.rdp import FAILURE_KINDS, delta_before_failure
from torch_dpsco.accounting.events import Failure, Gaussian
from torch_dpsco.accounting.ledger import Ledger

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
@pytest.mark.parametrize("kind", FAILURE_KINDS)
@given(probabilities, probabilities)
def test_the_inverse_never_exceeds_the_delta_of_the_statement(kind, delta, failure):
    epsilon = 0.0
    left = delta_before_failure(delta, failure, kind)
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
    assert delta_before_failure(0.3, 0.1, "coupling") == pytest.approx(0.2 / 0.9, rel=1e-12)
    assert delta_before_failure(0.3, 0.3, "coupling") == 0.0
    assert delta_before_failure(1.0, 1.0, "coupling") == 0.0


def test_a_failure_at_a_huge_epsilon_takes_everything():
    assert delta_with_failure(0.0, 1e-300, 800.0, "per_side") == 1.0
    assert delta_with_failure(0.0, 0.0, 800.0, "per_side") == 0.0


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
)
@settings(max_examples=60)
def test_the_epsilon_with_failures_satisfies_delta(mu, delta, coupling, transcript):
    shares = {"coupling": coupling * delta, "transcript": transcript * delta}
    noisy = Gaussian(1.0, {"zero_out": mu}, failure=shares["coupling"])
    ledger = Ledger([noisy, Failure(shares["transcript"], "transcript")])
    epsilon = ledger.epsilon(delta, "zero_out")
    assert total(mu, epsilon, shares) <= delta * (1 + 1e-12)
    if epsilon > 1e-6:
        assert total(mu, epsilon * (1 - 1e-3), shares) > delta * (1 - 1e-9)


def total(mu, epsilon, shares):
    value = gaussian_delta(mu, epsilon)
    for kind, failure in shares.items():
        value = delta_with_failure(value, failure, epsilon, kind)
    return value


@pytest.mark.parametrize("kind", FAILURE_KINDS)
def test_failures_that_take_all_of_delta_leave_no_epsilon(kind):
    ledger = Ledger([Gaussian(1.0, {"zero_out": 0.3}), Failure(1e-5, kind)])
    assert ledger.epsilon(1e-5, "zero_out") == math.inf


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
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
