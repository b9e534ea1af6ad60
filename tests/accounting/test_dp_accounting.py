"""Random heterogeneous ledgers against dp-accounting: epsilon lies inside the other tool's error interval.

Let true be the exact epsilon of a ledger, and U(h) the epsilon of dp-accounting on a grid of losses with step h.

* U(h) >= true: its grid law dominates the exact one ("connect the dots").
* B(h) <= true: losses are rounded down to the grid ("privacy buckets", pessimistic_estimate=False).
* true >= U(h) - (U(2 h) - U(h)): the excess U(h) - true grows with h, like h^2 while h is below the standard deviation
  of a loss and like h beyond, so that doubling h adds at least what h has added. An estimate, and closer than B.

Cut tails add about 1e-15 per event to delta, and Fourier transforms err by less than 1e-13; both move epsilon by less
than `TAILS` at deltas of at least 1e-7. So an upper bound that is as tight as theirs lies in

    [max(B(h), U(h) - (U(2 h) - U(h))) - TAILS, U(h) + TAILS].

A Laplace event of ours may have several coordinates, and may be charged as the worst pure mechanism of its epsilon. The
upper end of a ledger with Laplace noise is therefore that of dp-accounting with such mechanisms in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as other_tool
from dp_accounting.pld.common import DifferentialPrivacyParameters
from dp_accounting.rdp import RdpAccountant

from tests.reference.papers.mixtures import rdp_epsilon_at_order
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.curves import orders_at
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ZERO_OUT,
    Adjacency,
    Event,
    Gaussian,
    Laplace,
    PoissonGaussian,
    WORGaussian,
    clipped_gaussian,
)

RELATION = {
    ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
    ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
    REPLACE_ONE: NeighboringRelation.REPLACE_ONE,
}
STEP = 5e-4
TAILS = 1e-6
LEDGERS, QUICK = 30, 7
ORDERS = (2, 3, 8, 32, 128)


@dataclass(frozen=True)
class Setting:
    """Events with counts, and the question."""

    entries: tuple[tuple[Event, int], ...]
    delta: float
    adjacency: Adjacency

    @property
    def accountant(self) -> Accountant:
        accountant = Accountant(adjacency=self.adjacency)
        for event, count in self.entries:
            accountant.authorize(event, count)
        return accountant

    @property
    def has_laplace(self) -> bool:
        return any(isinstance(event, Laplace) for event, _ in self.entries)


@cache
def setting(seed: int) -> Setting:
    """Returns a ledger of one to three Poisson keys, up to two plain Gaussians and, where defined, Laplace noise."""
    rng = np.random.default_rng([4, seed])
    adjacency = (ADD_REMOVE, REPLACE_ONE, ZERO_OUT)[seed % 3]
    entries: list[tuple[Event, int]] = []
    for _ in range(rng.integers(1, 4)):
        noise, rate = 10 ** rng.uniform(-0.1, 0.6), 10 ** rng.uniform(-3, -0.5)
        entries.append((PoissonGaussian(noise, rate), int(10 ** rng.uniform(0, 2.3))))
    for _ in range(rng.integers(0, 3)):
        entries.append((clipped_gaussian(10 ** rng.uniform(0.8, 1.4)), int(rng.integers(1, 6))))
    if adjacency != REPLACE_ONE and rng.random() < 0.6:
        epsilon = (
            int(rng.integers(1, 26)) / 100
        )  # a multiple of every grid here: nothing is rounded
        entries.append(
            (Laplace(1 / epsilon, {ADD_REMOVE: 1.0, ZERO_OUT: 1.0}), int(rng.integers(1, 6)))
        )
    return Setting(tuple(entries), float(10 ** rng.uniform(-7, -3)), adjacency)


def their_event(event: Event) -> dp_accounting.DpEvent:
    if isinstance(event, PoissonGaussian):
        return dp_accounting.PoissonSampledDpEvent(
            event.q, dp_accounting.GaussianDpEvent(event.noise_multiplier)
        )
    if isinstance(event, Laplace):
        return dp_accounting.LaplaceDpEvent(event.scale)
    return dp_accounting.GaussianDpEvent(event.sigma)


def upper(case: Setting, step: float) -> float:
    """Returns U(step), by their accountant."""
    judge = PLDAccountant(RELATION[case.adjacency], value_discretization_interval=step)
    for event, count in case.entries:
        judge.compose(their_event(event), count)
    return judge.get_epsilon(case.delta)


def by_laws(case: Setting, step: float, *, pure: bool, pessimistic: bool) -> float:
    """Returns B(step), or U(step) if `pessimistic`; `pure` puts the worst pure mechanism in Laplace noise's place."""
    total = other_tool.identity(step, pessimistic_estimate=pessimistic)
    how = {
        "value_discretization_interval": step,
        "pessimistic_estimate": pessimistic,
        "use_connect_dots": pessimistic,
    }
    for event, count in case.entries:
        if isinstance(event, Laplace) and pure:
            law = other_tool.from_privacy_parameters(
                DifferentialPrivacyParameters(1 / event.scale, 0.0), step
            )
        elif isinstance(event, Laplace):
            law = other_tool.from_laplace_mechanism(event.scale, **how)
        else:
            noise, rate = (
                (event.noise_multiplier, event.q)
                if isinstance(event, PoissonGaussian)
                else (event.sigma, 1)
            )
            relation = RELATION[case.adjacency]
            law = other_tool.from_gaussian_mechanism(
                noise, sampling_prob=rate, neighboring_relation=relation, **how
            )
        total = total.compose(law.self_compose(count))
    return total.get_epsilon_for_delta(case.delta)


SEEDS = [
    pytest.param(seed, marks=pytest.mark.slow if seed >= QUICK else ())
    for seed in range(LEDGERS)
]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("seed", SEEDS)
def test_epsilon_of_a_random_ledger_lies_in_the_error_interval_of_dp_accounting(seed):
    case = setting(seed)
    ours = case.accountant.get_epsilon(case.delta, method="pld")
    fine, coarse = upper(case, STEP), upper(case, 2 * STEP)
    rounded_down = by_laws(case, STEP, pure=False, pessimistic=False)
    assert rounded_down - TAILS <= ours  # proved to be no more than the truth
    assert fine - (coarse - fine) - TAILS <= ours
    assert (
        ours
        <= (by_laws(case, STEP, pure=True, pessimistic=True) if case.has_laplace else fine)
        + TAILS
    )
    assert coarse - fine < 0.02 * fine  # the interval says something


def test_the_random_ledgers_are_of_all_kinds():
    cases = [setting(seed) for seed in range(LEDGERS)]
    for adjacency in RELATION:
        assert sum(case.adjacency == adjacency for case in cases) == 10
    assert sum(case.has_laplace for case in cases) >= 5
    assert sum(len(case.entries) >= 3 for case in cases) >= 10
    kinds = {type(event) for case in cases[:QUICK] for event, _ in case.entries}
    assert kinds == {PoissonGaussian, Laplace, Gaussian}


@pytest.mark.cases(13, 6)
@pytest.mark.parametrize(
    "seed", [seed for seed in range(LEDGERS) if seed % 3 != 1]
)  # theirs has no replace_one here
def test_renyi_epsilon_of_a_random_ledger_is_that_of_dp_accounting_at_every_order(seed):
    case = setting(seed)
    accountant = case.accountant
    for order in ORDERS:
        judge = RdpAccountant(orders=[order], neighboring_relation=RELATION[case.adjacency])
        for event, count in case.entries:
            judge.compose(their_event(event), count)
        level = 0 if order <= orders_at(0)[-1] else 1
        curve = accountant.ledger.cost(case.adjacency, level).rdp
        value = float(curve[np.searchsorted(orders_at(level), order)])
        assert max(0.0, rdp_epsilon_at_order(value, order, case.delta)) == pytest.approx(
            judge.get_epsilon(case.delta), rel=1e-9
        )
    assert accountant.get_epsilon(case.delta, method="pld") <= accountant.get_epsilon(
        case.delta, method="rdp"
    )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("seed", range(3))
def test_epsilon_of_random_fixed_batches_is_below_the_published_bound_of_dp_accounting(seed):
    """Theirs is the bound of Wang, Balle and Kasiviswanathan, with noise relative to twice the clip."""
    rng = np.random.default_rng([5, seed])
    accountant, judge = (
        Accountant(),
        RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE),
    )
    n, delta = int(rng.integers(200, 50_000)), float(10 ** rng.uniform(-7, -3))
    for _ in range(rng.integers(1, 4)):
        noise, size, count = (
            10 ** rng.uniform(0, 0.8),
            int(rng.integers(1, n // 10)),
            int(10 ** rng.uniform(0, 2)),
        )
        accountant.authorize(WORGaussian(noise, size, n), count)
        release = dp_accounting.GaussianDpEvent(noise / 2)
        judge.compose(dp_accounting.SampledWithoutReplacementDpEvent(n, size, release), count)
    published = judge.get_epsilon(delta)
    renyi = accountant.get_epsilon(delta, method="rdp")
    assert (
        published / 4
        < accountant.get_epsilon(delta, method="pld")
        <= renyi
        <= published * (1 + 1e-9)
    )
