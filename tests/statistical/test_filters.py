"""Adaptive adversaries against the filters: the noise is simulated, and what leaks is counted.

A release of sensitivity 1 with noise N(0, 1/mu^2) has the privacy loss mu^2/2 + mu Z, Z standard normal. Each adversary
chooses the next mu, and when to stop, from the loss so far. The filters decide on real ledgers; all that a ledger of a
few kinds of events can hold is decided once and looked up, so that a hundred thousand runs take a second.

The hockey stick of a run at epsilon is the mean of X = (1 - e^(epsilon - loss))_+, which lies in [0, 1]. If the mean is
at most delta, N independent runs average x > delta with probability at most e^(-N kl(x, delta)) (Chernoff; Hoeffding
1963). A test alarms where that is below 1e-6. The seeds are fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import pytest
from scipy.stats import norm

from torch_dpsco.accounting.budgets import Budget, Filter, adaptive_epsilon, make_filter
from torch_dpsco.accounting.events import Gaussian, Repeat
from torch_dpsco.accounting.ledger import Ledger

FALSE_ALARM = 1e-6
RUNS = 100_000
DELTA = 0.02
MUS = np.array([0.15, 0.3, 0.6])
FAILURE = 4e-4
Policy = Callable[[np.ndarray], np.ndarray]


def event(mu: float, failure: float) -> Gaussian:
    return Gaussian(1.0 / mu, {"replace_one": 1.0}, failure)


def ledger_of(counts: tuple[int, ...], failure: float) -> Ledger:
    return Ledger(
        [Repeat(event(float(mu), failure), n) for mu, n in zip(MUS, counts, strict=True)]
    )


@cache
def admitted(run: Filter, failure: float = 0.0) -> np.ndarray:
    """Returns, for each ledger that can be reached and each kind, whether one more event of the kind is admitted."""
    most = [run.max_steps(Ledger(), event(float(mu), failure)) for mu in MUS]
    table = np.zeros((*(n + 1 for n in most), len(MUS)), dtype=bool)
    reached = {(0, 0, 0)}
    for counts in product(*(range(n + 1) for n in most)):
        if counts not in reached:
            continue
        ledger = ledger_of(counts, failure)
        for kind, mu in enumerate(MUS):
            table[(*counts, kind)] = run.admits(ledger, event(float(mu), failure))
            if table[(*counts, kind)]:
                reached.add(tuple(n + (k == kind) for k, n in enumerate(counts)))
    return table


def bolder_when_lucky(loss: np.ndarray) -> np.ndarray:
    """What spends most after noise that hid the difference, and least after noise that showed it."""
    return np.where(loss < 0.1, 2, np.where(loss < 0.6, 1, 0))


def bolder_when_unlucky(loss: np.ndarray) -> np.ndarray:
    return np.where(loss > 0.6, 2, np.where(loss > 0.1, 1, 0))


def careful(loss: np.ndarray) -> np.ndarray:
    return np.zeros(len(loss), dtype=int)


def all_at_once(loss: np.ndarray) -> np.ndarray:
    return np.full(len(loss), 2)


def at_the_peak(epsilon: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda loss: loss > epsilon + 0.05


def simulate(
    table: np.ndarray,
    policy: Policy,
    stop: Callable[[np.ndarray], np.ndarray],
    seed: int,
    failure: float = 0.0,
    watch: Callable[[np.ndarray, np.ndarray], None] = lambda state, loss: None,
) -> np.ndarray:
    """Returns the privacy loss of each run where it stops: nothing fits any more, or the adversary has seen enough."""
    rng = np.random.default_rng(seed)
    shape = table.shape[:-1]
    steps = np.array(
        [shape[1] * shape[2], shape[2], 1]
    )  # what one event of a kind adds to the index of a ledger
    rows, state = table.reshape(-1, len(MUS)), np.zeros(RUNS, dtype=int)
    loss = np.zeros(RUNS)
    active = np.arange(RUNS)
    while True:
        active = active[~stop(loss[active])]
        if not len(active):
            break
        fits = rows[state[active]]
        kind = policy(loss[active])
        for smaller in (1, 0):  # what is refused leaves room for less
            refused = ~fits[np.arange(len(active)), kind]
            kind = np.where(refused, np.minimum(kind, smaller), kind)
        going = fits[np.arange(len(active)), kind]
        active, kind = active[going], kind[going]
        mu = MUS[kind]
        loss[active] += mu * mu / 2 + mu * rng.standard_normal(len(active))
        loss[active[rng.random(len(active)) < failure]] = (
            math.inf
        )  # the premise fails: all is told
        state[active] += steps[kind]
        watch(state, loss)
    return loss


def alarms(mean: float, delta: float) -> bool:
    """Returns whether an average of RUNS values in [0, 1] refutes that their mean is at most delta."""
    if mean <= delta:
        return False
    rest = (1 - mean) * math.log((1 - mean) / (1 - delta)) if mean < 1 else 0.0
    return RUNS * (mean * math.log(mean / delta) + rest) >= math.log(1 / FALSE_ALARM)


def hockey_stick(loss: np.ndarray, epsilon: float) -> float:
    return float(np.mean(np.maximum(0.0, -np.expm1(epsilon - loss))))


def never(loss: np.ndarray) -> np.ndarray:
    return np.isinf(loss)


EPSILON = {"gdp": 1.5, "rdp": 2.2}
POLICIES = [bolder_when_lucky, bolder_when_unlucky, careful, all_at_once]


def filter_of(mode: str, factor: float = 1.0) -> Filter:
    return make_filter(Budget(EPSILON[mode] * factor, DELTA, "replace_one", mode=mode))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("mode", EPSILON)
def test_no_adaptive_adversary_leaks_more_than_the_target(mode: str) -> None:
    table, epsilon = admitted(filter_of(mode)), EPSILON[mode]
    for seed, policy in enumerate(POLICIES):
        for stop in (never, at_the_peak(epsilon)):
            found = hockey_stick(simulate(table, policy, stop, seed), epsilon)
            assert not alarms(found, DELTA)
            assert found > DELTA / 100  # the budget was put to use


@pytest.mark.parametrize("mode", EPSILON)
def test_a_filter_with_a_larger_target_would_be_caught(mode: str) -> None:
    wide = filter_of(mode, 2.0)
    steps = wide.max_steps(Ledger(), event(0.6, 0.0))
    loss = steps * 0.18 + 0.6 * math.sqrt(steps) * np.random.default_rng(0).standard_normal(RUNS)
    assert alarms(hockey_stick(loss, EPSILON[mode]), DELTA)


@pytest.mark.slow
def test_an_exhausted_gaussian_budget_is_its_delta() -> None:
    """No overhead: an adversary that uses the budget up leaks delta, whatever the order of its steps."""
    table = admitted(filter_of("gdp"))
    for seed, policy in enumerate(POLICIES[:3]):
        found = hockey_stick(simulate(table, policy, never, seed), EPSILON["gdp"])
        assert found > 0.9 * DELTA
        assert not alarms(found, DELTA)


def test_failures_that_nobody_set_aside_would_be_caught() -> None:
    loss = simulate(admitted(filter_of("gdp")), careful, never, seed=0, failure=FAILURE)
    assert alarms(hockey_stick(loss, EPSILON["gdp"]), DELTA)


# -- the odometer -----------------------------------------------------------------------------------------------------


class Watch:
    """Notes which runs had, at some time, a loss above what was quoted for their ledger at that time."""

    def __init__(self, table: np.ndarray, quote: Callable[[Ledger], float]) -> None:
        self._shape, self._quote = table.shape[:-1], quote
        self._quoted = np.full(math.prod(self._shape), np.nan)
        self._quoted[0] = math.inf  # nothing was released
        self.passed = np.zeros(RUNS, dtype=bool)

    def __call__(self, state: np.ndarray, loss: np.ndarray) -> None:
        for new in np.unique(state[np.isnan(self._quoted[state])]):
            counts = tuple(int(n) for n in np.unravel_index(new, self._shape))
            self._quoted[new] = self._quote(ledger_of(counts, 0.0))
        self.passed |= loss > self._quoted[state]


@pytest.mark.slow
def test_the_loss_passes_the_odometer_at_no_time() -> None:
    table = admitted(filter_of("rdp"))
    for seed, policy in enumerate(POLICIES):
        watch = Watch(table, lambda ledger: adaptive_epsilon(ledger, DELTA, "replace_one"))
        simulate(table, policy, never, seed, watch=watch)
        assert not alarms(float(watch.passed.mean()), DELTA)


def quantile(ledger: Ledger) -> float:
    """The loss that is exceeded with probability DELTA by parameters fixed in advance."""
    square = ledger.cost("replace_one").mu_squared
    assert square is not None
    return square / 2 + math.sqrt(square) * float(norm.isf(DELTA))


def test_the_bound_for_fixed_parameters_is_passed_too_often() -> None:
    table = admitted(filter_of("rdp"))
    watch = Watch(table, quantile)
    simulate(table, careful, never, 0, watch=watch)
    assert alarms(float(watch.passed.mean()), DELTA)
