from __future__ import annotations

import math
import re
import warnings

import dp_accounting
import pytest
import scipy.optimize
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant

from torch_dpsco.accounting.analysis.gaussian import gaussian_sigma
from torch_dpsco.accounting.calibrate import (
    design_epsilon,
    epoch_steps,
    noise_multiplier,
)
from torch_dpsco.accounting.designs import Disjoint, Fixed, Full, Poisson, Shuffled, Undeclared
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    PoissonGaussian,
    Repeat,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import AdjacencyError, InfeasibleError

DELTA = 1e-5
DESIGNS = [
    Poisson(50, 1000),
    Fixed(50, 1000),
    Shuffled(50, 1000),
    Disjoint(50, 1000),
    Full(1000),
    Undeclared(50),
]
STEPS = {Disjoint(50, 1000): 20}
SUPPORTED = {Poisson: ADJACENCIES, Full: ADJACENCIES, Undeclared: (REPLACE_ONE,)}
CELLS = [(d, a) for d in DESIGNS for a in SUPPORTED.get(type(d), (ZERO_OUT, REPLACE_ONE))]


def cell_id(value: object) -> str:
    return value if isinstance(value, str) else type(value).__name__


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("design", "adjacency"), CELLS, ids=cell_id)
@pytest.mark.parametrize("target", [0.2, 3.0])
def test_the_calibrated_noise_meets_the_target_from_below_by_at_most_a_thousandth(
    design, adjacency, target
):
    steps = STEPS.get(design, 33)
    noise = noise_multiplier(target, DELTA, design=design, steps=steps, adjacency=adjacency)
    spent = design_epsilon(noise, DELTA, design=design, steps=steps, adjacency=adjacency)
    assert target * (1 - 1e-3) <= spent <= target


@pytest.mark.weekly
@settings(max_examples=3)
@given(
    st.floats(0.02, 50),
    st.floats(1e-12, 1e-2),
    st.integers(1, 10**5),
    st.integers(1, 60),
    st.integers(60, 10**6),
)
def test_a_tight_tolerance_meets_any_target_tightly(target, delta, steps, batch_size, n):
    query = {"design": Poisson(batch_size, n), "steps": steps, "adjacency": ADD_REMOVE}
    try:
        noise = noise_multiplier(target, delta, rtol=1e-5, **query)
    except InfeasibleError:
        return
    assert design_epsilon(noise, delta, **query) <= target
    if noise > 2e-3:
        assert design_epsilon(noise * (1 - 1e-5), delta, **query) > target


@pytest.mark.slow
def test_only_noise_that_was_seen_to_meet_the_target_is_returned(monkeypatch):
    """Also where the search for the root ends below it."""
    search = scipy.optimize.brentq
    monkeypatch.setattr(
        scipy.optimize, "brentq", lambda *given, **options: search(*given, **options) - 1e-2
    )
    query = {"design": Poisson(10, 1000), "steps": 50, "adjacency": ADD_REMOVE}
    assert design_epsilon(noise_multiplier(1.0, DELTA, **query), DELTA, **query) <= 1.0


def test_unsampled_designs_get_the_exact_gaussian_noise():
    for target in (0.01, 1.0, 30.0):
        for adjacency, moves in ((ZERO_OUT, 1.0), (REPLACE_ONE, 2.0)):
            exact = gaussian_sigma(target, DELTA, moves * math.sqrt(4))
            noise = noise_multiplier(
                target, DELTA, design=Full(10), steps=4, adjacency=adjacency, rtol=1e-9
            )
            assert exact * (1 - 1e-12) <= noise <= exact * (1 + 2e-9)


@pytest.mark.weekly
def test_noise_grows_with_everything_that_asks_for_more_privacy_or_releases_more():
    def noise(
        epsilon=1.0, delta=DELTA, batch_size=50, steps=100, adjacency=ADD_REMOVE, kind=Poisson
    ):
        return noise_multiplier(
            epsilon, delta, design=kind(batch_size, 1000), steps=steps, adjacency=adjacency
        )

    middle = noise()
    assert noise(epsilon=2.0) < middle < noise(epsilon=0.5)
    assert noise(delta=1e-4) < middle < noise(delta=1e-6)
    assert noise(batch_size=25) < middle < noise(batch_size=100)
    assert noise(steps=50) < middle < noise(steps=200)
    assert middle < noise(adjacency=REPLACE_ONE) <= noise(adjacency=REPLACE_ONE, kind=Fixed)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("design", [Poisson(50, 1000), Fixed(50, 1000)])
def test_a_target_out_of_reach_is_refused_with_the_least_that_is_in_reach(design):
    """Conversion from orders up to 2^20 leaves log(1 / delta) / 2^20 even without any cost."""
    query = {"design": design, "steps": 10**6, "adjacency": REPLACE_ONE}
    with pytest.raises(
        InfeasibleError, match=r"epsilon must be >= .* \(got 1e-09\); take fewer steps"
    ) as caught:
        noise_multiplier(1e-9, 1e-12, **query)
    least = float(re.search(r">= (\S+),", str(caught.value)).group(1))
    exact = design_epsilon(1e8, 1e-12, **query)
    assert 1e-9 < exact <= least <= exact * 1.001
    assert design_epsilon(noise_multiplier(least, 1e-12, **query), 1e-12, **query) <= least


def test_the_highest_noise_is_tried_before_giving_up():
    query = {"design": Full(10), "steps": 1, "adjacency": REPLACE_ONE}
    reachable, out_of_reach = (design_epsilon(noise, 1e-15, **query) for noise in (9.9e7, 1.1e8))
    assert 0 < out_of_reach < reachable
    assert 9e7 < noise_multiplier(reachable, 1e-15, **query) <= 1e8
    with pytest.raises(InfeasibleError):
        noise_multiplier(out_of_reach, 1e-15, **query)


def test_a_huge_target_gets_a_noise_that_meets_it_and_is_still_positive():
    noise = noise_multiplier(1e12, DELTA, design=Full(10), steps=1, adjacency=REPLACE_ONE)
    assert 0 < noise <= 2e-3
    assert design_epsilon(noise, DELTA, design=Full(10), steps=1, adjacency=REPLACE_ONE) <= 1e12


def test_a_small_target_is_calibrated_where_opacus_says_that_it_is_too_low():
    query = {"design": Poisson(1, 100), "steps": 1000, "adjacency": ADD_REMOVE}
    assert noise_multiplier(0.05, DELTA, rtol=1e-6, **query) <= 20.3925


@pytest.mark.slow
def test_one_epoch_is_never_a_step_short():
    """int(epochs / sample_rate), as Opacus has it, makes 92 steps of 93."""
    assert int(1 / (1 / 93)) == 92 or int(1 / (1 / 49)) == 48
    assert [epoch_steps(Poisson(1, n), 1) for n in range(1, 2000)] == list(range(1, 2000))
    assert [epoch_steps(Poisson(1, n), 0.1) for n in range(10, 3000, 10)] == list(range(1, 300))


# -- epsilon of steps ----------------------------------------------------------------------------------------------


def test_nothing_is_private_without_noise():
    for design in DESIGNS:
        assert (
            design_epsilon(0.0, 0.5, design=design, steps=1, adjacency=REPLACE_ONE) == math.inf
        )
        assert design_epsilon(0.0, 0.5, design=design, steps=0, adjacency=REPLACE_ONE) == 0.0


# -- other accountants ------------------------------------------------------------------------------------------------

SETTINGS = [
    (0.6, 256 / 60000, 235),
    (1.0, 0.01, 10**4),
    (2.0, 0.001, 10**4),
    (0.5, 0.1, 10),
    (5.0, 0.2, 500),
    (1.0, 1.0, 3),
]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("noise", "rate", "steps"), SETTINGS)
def test_renyi_epsilon_is_at_most_that_of_opacus_and_dp_accounting_and_above_the_tight_one(
    noise, rate, steps
):
    ours = Ledger([Repeat(PoissonGaussian(noise, rate), steps)])
    renyi = ours.epsilon(DELTA, ADD_REMOVE, "rdp")
    opacus = RDPAccountant()
    opacus.history = [(noise, rate, steps)]
    assert renyi <= opacus.get_epsilon(DELTA) + 1e-9
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps
    )
    assert renyi <= RdpAccountant().compose(event).get_epsilon(DELTA) + 1e-9
    tight = PLDAccountant(value_discretization_interval=1e-4).compose(event).get_epsilon(DELTA)
    assert tight * (1 - 4e-3) <= ours.epsilon(DELTA, ADD_REMOVE) <= renyi


def test_high_orders_are_tried_where_opacus_stops_at_63():
    """Opacus #670: one step with sigma 30 at rate 0.01 is reported as 0.103."""
    opacus = RDPAccountant()
    opacus.history = [(30.0, 0.01, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus says that its largest order was the best
        assert opacus.get_epsilon(DELTA) > 0.1
    assert Ledger([PoissonGaussian(30.0, 0.01)]).epsilon(DELTA, ADD_REMOVE) <= 6.57e-4


@pytest.mark.slow
def test_many_different_noises_are_bounded_by_their_extremes():
    mixed = [Repeat(PoissonGaussian(1.0 + k / 30, 0.01), 10) for k in range(30)]
    low, high = ([Repeat(PoissonGaussian(noise, 0.01), 300)] for noise in (2.0, 1.0))
    spent = [Ledger(events).epsilon(DELTA, ADD_REMOVE) for events in (low, mixed, high)]
    assert spent == sorted(spent)
    assert len(set(spent)) == 3


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "design", [d for d in DESIGNS if (d, ADD_REMOVE) not in CELLS], ids=cell_id
)
def test_a_design_without_a_guarantee_there_is_not_calibrated(design):
    for call in (
        lambda: noise_multiplier(1.0, DELTA, design=design, steps=1, adjacency=ADD_REMOVE),
        lambda: design_epsilon(1.0, DELTA, design=design, steps=1, adjacency=ADD_REMOVE),
    ):
        with pytest.raises(AdjacencyError):
            call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, r"epsilon must be > 0 \(got 0\.0\)"),
        ({"epsilon": math.inf}, r"epsilon must be finite \(got inf\)"),
        ({"delta": 0.0}, r"delta must be in \(0, 1\) \(got 0\.0\)"),
        ({"steps": 0}, r"steps must be an integer >= 1 \(got 0\)"),
        ({"steps": 1.5}, r"steps must be an integer \(got 1\.5\)"),
        ({"adjacency": "swap"}, r"adjacency must be one of .* \(got 'swap'\)"),
        ({"rtol": 0.0}, r"rtol must be in \[1e-12, 1\] \(got 0\.0\)"),
        ({"method": "prv"}, r"method must be one of .* \(got 'prv'\)"),
        ({"method": "gdp"}, r"method must be one of best, rdp, pld"),
        (
            {"design": Disjoint(50, 1000), "steps": 21},
            r"draws must be <= 20, those of Disjoint",
        ),
    ],
)
def test_a_bad_argument_is_named(change, message):
    arguments = {
        "epsilon": 1.0,
        "delta": DELTA,
        "design": Poisson(50, 1000),
        "steps": 3,
        "adjacency": REPLACE_ONE,
    }
    with pytest.raises(ValueError, match=message):
        noise_multiplier(**(arguments | change))


def test_the_noise_of_steps_is_checked_too():
    query = {"design": Poisson(50, 1000), "adjacency": REPLACE_ONE}
    with pytest.raises(ValueError, match=r"noise_multiplier must be >= 0|sigma must be >= 0"):
        design_epsilon(-1.0, DELTA, steps=1, **query)


def test_a_method_changes_the_answer_in_the_known_direction():
    query = {"design": Full(10), "steps": 5, "adjacency": REPLACE_ONE}
    exact, renyi = (noise_multiplier(1.0, DELTA, method=m, **query) for m in ("best", "rdp"))
    assert exact < renyi
    assert design_epsilon(renyi, DELTA, **query) < 1.0
