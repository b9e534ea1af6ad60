"""Schedules of localized methods: 40-digit formulas, privacy cost, the reduction, boosting, minibatches."""

from __future__ import annotations

import dataclasses
import math
import warnings
from fractions import Fraction

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.papers.heavy_tailed import (
    boosted_copies,
    boosted_localized_schedule,
    localized_schedule,
    localized_schedule_ballfree,
    localized_schedule_minibatch,
    localized_schedule_paper,
    reduction_schedule,
    reduction_sizes,
)
from tests.reference.papers.localized import boosted_failure
from torch_dpsco.accounting.analysis.gaussian import sensitivity_factor
from torch_dpsco.algorithms.localized_numbers import (
    ballfree_rate,
    halved_sizes,
    minibatch_size,
    sc_reduction_sizes_full,
)
from torch_dpsco.errors import InfeasibleError, UtilityWarning

TASK = {
    "n": 5000,
    "dim": 10,
    "rho": 0.5,
    "moment_order": 2.0,
    "second_moment": 1.0,
    "diameter": 2.0,
}
TIGHT = TASK | {"moment_2k": 1.5, "max_steps": None}
BOOSTED = TASK | {"moment": 1.3, "max_steps": None}
REDUCED = TIGHT | {"strong_convexity": 0.5}
PLANS = [
    (localized_schedule_ballfree, TIGHT),
    (localized_schedule, TIGHT),
    (boosted_localized_schedule, BOOSTED | {"copies": 3}),
    (boosted_localized_schedule, BOOSTED | {"copies": 5, "ball": False, "conservative": True}),
    (reduction_schedule, REDUCED),
]
ALL_PLANS = pytest.mark.parametrize(
    ("planner", "task"),
    PLANS,
    ids=["ball-free", "ball", "boosted", "boosted ball-free", "reduction"],
)
LAWS = st.fixed_dictionaries(
    {
        "n": st.integers(16, 10**6),
        "dim": st.integers(1, 1000),
        "rho": st.floats(1e-3, 1e3),
        "moment_order": st.floats(2.0, 20.0),
        "second_moment": st.floats(0.1, 10.0),
        "diameter": st.floats(0.1, 10.0),
        "max_steps": st.sampled_from([None, 1, 300]),
        "adjacency": st.sampled_from(["replace_one", "zero_out"]),
    }
)


def records_of(schedule):
    """Returns how many records the phases use."""
    return getattr(schedule, "records", sum(phase.n for phase in schedule.phases))


def step_fraction(phase, t):
    """Returns lambda lr_t of step t: w <- Proj( (1-f) w + f c - (f/lambda) (mean + noise) )."""
    if phase.lr is not None:
        return phase.reg * phase.lr
    return 1.0 / (t + 1.0) if math.isinf(getattr(phase, "radius", math.inf)) else 2.0 / (t + 2.0)


def exact_bias(r, k, C):
    return (k - 1) ** (k - 1) / k**k * mpmath.mpf(r) ** k / C ** (k - 1)


def is_count(found, x):
    """Whether a number of steps is ceil(x), or at least 1; next to an integer float64 may round up to its neighbor."""
    low, high = (max(1, int(mpmath.ceil(x * (1 + e * mpmath.mpf(10) ** -9)))) for e in (-1, 1))
    return low <= found <= high


def exact_ballfree(task, r2k, counts):
    """(A_i, C_i, sigma_i, T_i) of docs/proofs/heavy_tailed.md#localized-schedule and the sum of its bound."""
    k, d, S = (
        mpmath.mpf(task["moment_order"]),
        task["dim"],
        mpmath.mpf(sensitivity_factor(task["adjacency"])),
    )
    rho, total, rows = mpmath.mpf(task["rho"]), mpmath.mpf(0), []
    for i, T in enumerate(counts, start=1):
        m = task["n"] // 2**i
        nu = 2 * d / (mpmath.mpf(m) ** 2 * rho) * (S / 2) ** 2
        assert is_count(T, (4 + 8 * mpmath.sqrt(nu)) / nu)
        T = min(T, task["max_steps"] or T)
        a = mpmath.sqrt(nu * (1 + (1 + mpmath.log(T)) / T) + (4 + 8 * mpmath.sqrt(nu)) / T)
        C = r2k * (((k - 1) / k) ** k / min(a, mpmath.mpf(1))) ** (1 / k)
        A = exact_bias(r2k, k, C) + a * C
        rows.append((A, C, S * C / m * mpmath.sqrt(T / (2 * rho)), T))
        total += (2 * mpmath.mpf(task["second_moment"]) ** 2 / m + 4 * A**2) / mpmath.mpf(8) ** (
            i - 1
        )
    return rows, total


@pytest.mark.slow
@given(LAWS)
def test_the_ballfree_schedule_agrees_with_40_digits(task):
    found = localized_schedule_ballfree(**task, moment_2k=3.0)
    uncapped = localized_schedule_ballfree(**task | {"max_steps": None}, moment_2k=3.0)
    with mpmath.workdps(40):
        assert len(found.phases) == task["n"].bit_length() - 1
        rows, total = exact_ballfree(
            task, mpmath.mpf(3), [phase.steps for phase in uncapped.phases]
        )
        D = mpmath.mpf(task["diameter"])
        assert found.bound == pytest.approx(float(D * mpmath.sqrt(2 * total)), rel=1e-9)
        for i, (phase, (A, C, sigma, T)) in enumerate(zip(found.phases, rows, strict=True)):
            lam = 8**i * mpmath.sqrt(2 * total) / D
            assert phase.steps == T
            for value, exact in (
                (phase.error, A),
                (phase.clip, C),
                (phase.noise_std, sigma),
                (phase.reg, lam),
            ):
                assert value == pytest.approx(float(exact), rel=1e-9)
        tail = task["second_moment"] * found.phases[-1].error / found.phases[-1].reg
        assert found.tail == pytest.approx(tail, rel=1e-12)
        assert found.risk_bound == found.bound + found.tail


@pytest.mark.slow
@given(LAWS, st.sampled_from([1, 3]))
def test_the_schedule_with_balls_agrees_with_40_digits(task, shrink):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UtilityWarning)
        found = localized_schedule(**task, moment_2k=3.0 / shrink, first_moment=0.5)
    with mpmath.workdps(40):
        k, n = mpmath.mpf(task["moment_order"]), task["n"]
        r = mpmath.mpf(3.0 / shrink)
        ell = n.bit_length() - 1
        Lb = r * (ell * mpmath.sqrt(n)) ** (1 / (2 * k))
        rho, total = (
            mpmath.mpf(task["rho"])
            * (2 / mpmath.mpf(sensitivity_factor(task["adjacency"]))) ** 2,
            0,
        )
        for i, phase in enumerate(found.phases):
            m = n // 2 ** (i + 1)
            q = 8 * task["dim"] / (mpmath.mpf(m) ** 2 * rho)
            C = r * ((k - 1) * ((k - 1) ** (k - 1) / k**k) ** 2 / q) ** (1 / (2 * k))
            T = phase.steps
            assert is_count(phase.uncapped_steps, 4 * (1 + Lb / C) ** 2 / q)
            assert min(phase.uncapped_steps, task["max_steps"] or math.inf) == T
            A2 = (
                exact_bias(r, k, C) ** 2
                + q * C**2 * mpmath.mpf(T) / (T + 1)
                + 4 * (C + Lb) ** 2 / mpmath.mpf(T + 1)
            )
            assert phase.error == pytest.approx(float(mpmath.sqrt(A2)), rel=1e-9)
            assert phase.clip == pytest.approx(float(C), rel=1e-9)
            assert phase.radius == pytest.approx(
                min(task["diameter"], float(Lb) / phase.reg), rel=1e-9
            )
            total += (2 * mpmath.mpf(task["second_moment"]) ** 2 / m + 4 * A2) / mpmath.mpf(
                8
            ) ** i
        D = mpmath.mpf(task["diameter"])
        assert found.bound == pytest.approx(float(D * mpmath.sqrt(2 * total)), rel=1e-9)
    last = found.phases[-1]
    tail = 0.5 * (last.error / last.reg + (ell + 1) * task["diameter"] / math.sqrt(n))
    assert found.tail == pytest.approx(tail, rel=1e-9)


@pytest.mark.parametrize(
    ("conservative", "constants"), [(True, (48, 12, 144, 72, 3)), (False, (4, 1, 1, 8, 1))]
)
@pytest.mark.parametrize("ball", [True, False])
def test_the_boosted_schedule_agrees_with_40_digits(conservative, constants, ball):
    found = boosted_localized_schedule(
        **BOOSTED | {"copies": 3, "conservative": conservative, "ball": ball}
    )
    g, o, b, s, reach = constants
    with mpmath.workdps(40):
        total, r, rho, d = mpmath.mpf(0), mpmath.mpf(1.3), mpmath.mpf(0.5), 10
        for i, phase in enumerate(found.phases):
            m, T = (5000 >> (i + 1)) // 3, phase.steps
            nu = 2 * d / (m**2 * rho)
            unit = 4 * nu if ball else 3 * mpmath.mpf(ballfree_rate(float(nu), T)) ** 2
            C = r * (b * mpmath.mpf(1) / 16 / (o * unit)) ** mpmath.mpf(0.25)
            X = (unit * C**2 * T + 4 * (C + 2) ** 2) / (T + 1) if ball else unit * C**2
            Q = mpmath.sqrt(mpmath.mpf(g) / m) + mpmath.sqrt(
                o * X + b * exact_bias(r, 2, C) ** 2
            )
            assert (phase.n, phase.copies) == (m, 3)
            assert phase.error == pytest.approx(float(Q), rel=1e-9)
            assert phase.clip == pytest.approx(float(C), rel=1e-9)
            total += Q**2 / 8**i
        assert found.bound == pytest.approx(float(2 * mpmath.sqrt(s * total)), rel=1e-9)
    last = found.phases[-1]
    assert found.tail == pytest.approx(reach * last.error / last.reg, rel=1e-9)
    assert last.radius == pytest.approx(2 / last.reg) if ball else last.radius == math.inf


# Privacy.


@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out", "add_remove"])
@pytest.mark.parametrize("change", [{}, {"reg": 0.05}, {"max_steps": 7}])
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@ALL_PLANS
def test_every_phase_costs_rho_and_no_more(planner, task, change, adjacency):
    """Whatever lambda, caps and balls are; records of phases and copies are disjoint."""
    schedule = planner(**task | change, adjacency=adjacency)
    copies = [getattr(phase, "copies", 1) for phase in schedule.phases]
    used = [J * phase.n for J, phase in zip(copies, schedule.phases, strict=True)]
    assert records_of(schedule) == sum(used) <= task["n"]
    for phase in schedule.phases:
        sensitivity = (
            Fraction(sensitivity_factor(adjacency)) * Fraction(phase.clip) / phase.batch_size
        )
        cost = phase.steps * sensitivity**2 / (2 * Fraction(phase.noise_std) ** 2)
        assert Fraction(task["rho"]) * (1 - Fraction(1, 2**46)) <= cost <= Fraction(task["rho"])
        assert phase.batch_size == phase.n
        assert phase.noise_multiplier == pytest.approx(phase.noise_std * phase.n / phase.clip)


def test_the_published_schedule_costs_half_of_the_squared_epsilon():
    for phase in localized_schedule_paper(
        n=1000, dim=3, paper_epsilon=0.8, moment_order=2.0, moment_2k=1.5, lr=0.1
    ):
        cost = (
            phase.steps
            * (2 * Fraction(phase.clip) / phase.n) ** 2
            / (2 * Fraction(phase.noise_std) ** 2)
        )
        assert (
            Fraction(0.32) * (1 - Fraction(1, 2**45))
            <= cost
            <= Fraction(0.32) * (1 + Fraction(1, 2**50))
        )
        assert step_fraction(phase, 0) == step_fraction(phase, 9) == pytest.approx(1 / phase.n)


@pytest.mark.parametrize(("planner", "task"), PLANS[:4])
def test_half_the_sensitivity_is_worth_four_budgets(planner, task):
    half, four = planner(**task, adjacency="zero_out"), planner(**task | {"rho": 2.0})
    assert half.bound == pytest.approx(four.bound, rel=1e-12)
    for one, other in zip(half.phases, four.phases, strict=True):
        assert one.noise_std == pytest.approx(other.noise_std, rel=1e-12)


# What a lambda of one's own, caps and small phases change.


@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@ALL_PLANS
def test_a_lambda_of_ones_own_keeps_clip_noise_and_steps_and_drops_the_bound(planner, task):
    default, own = (
        planner(**task | {"max_steps": 50}),
        planner(**task | {"max_steps": 50}, reg=0.05),
    )
    assert own.phases[0].reg == 0.05
    assert own.bound is own.tail is own.risk_bound is None
    assert default.risk_bound == default.bound + default.tail
    if planner is not reduction_schedule:
        assert [phase.reg for phase in own.phases] == [
            0.05 * 8**i for i in range(len(own.phases))
        ]
    for one, other in zip(default.phases, own.phases, strict=True):
        assert (one.clip, one.noise_std, one.steps, one.n) == (
            other.clip,
            other.noise_std,
            other.steps,
            other.n,
        )


def test_the_chosen_lambda_minimizes_the_bound():
    schedule = localized_schedule_ballfree(**TIGHT)
    X = schedule.bound**2 / (2 * 2.0**2)
    for other in (0.5, 0.9, 1.1, 2.0):
        lam = other * schedule.phases[0].reg
        assert lam * 2.0**2 / 2 + X / lam > schedule.bound
    assert schedule.phases[0].reg * 2.0**2 / 2 + X / schedule.phases[0].reg == pytest.approx(
        schedule.bound
    )


def test_a_cap_is_never_silent():
    with pytest.warns(UtilityWarning, match="max_steps=20 cuts phase 1 short of its"):
        capped = localized_schedule(**TIGHT | {"max_steps": 20})
    assert capped.capped
    assert [phase.uncapped_steps for phase in capped.phases] == [
        p.steps for p in localized_schedule(**TIGHT).phases
    ]
    with pytest.warns(UtilityWarning, match="max_steps=20"):
        boosted_localized_schedule(**BOOSTED | {"max_steps": 20})


@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
def test_a_cap_makes_the_bound_with_balls_grow_with_the_data_and_the_ballfree_one_not():
    """A linear regression: D = 4, rt_2 = 27, rt_4 = 33, T_max = 2000, at eps = 1, delta = 1e-5."""
    law = {
        "dim": 10,
        "moment_order": 2.0,
        "second_moment": 27.0,
        "moment_2k": 33.0,
        "diameter": 4.0,
    }
    rho = 0.0362  # the exact Gaussian conversion of (1, 1e-5): mu^2/2
    tight = [localized_schedule(n=n, rho=rho, **law).bound for n in (4000, 16000)]
    free = [localized_schedule_ballfree(n=n, rho=rho, **law).bound for n in (4000, 16000)]
    assert tight == [pytest.approx(156, rel=0.03), pytest.approx(229, rel=0.03)]
    assert free == [pytest.approx(88, rel=0.03), pytest.approx(86, rel=0.03)]


def test_small_phases_join_the_one_before():
    schedule = localized_schedule_ballfree(**TIGHT | {"min_phase": 100})
    sizes = [phase.n for phase in schedule.phases]
    assert sizes == [2500, 1250, 625, 312, 156 + 78 + 39 + 19 + 9 + 4 + 2 + 1]
    assert records_of(schedule) == records_of(localized_schedule_ballfree(**TIGHT))


@pytest.mark.parametrize("n", [2, 3, 7, 8, 1000, 10**6 + 1])
def test_halves_never_use_a_record_twice(n):
    sizes = halved_sizes(n)
    assert len(sizes) == int(math.log2(n) + 1e-12)
    assert min(sizes) == 1
    assert sum(sizes) <= n - 1


def test_steps_stay_within_a_ball_or_average():
    ball = localized_schedule(**TIGHT).phases[0]
    free = localized_schedule_ballfree(**TIGHT).phases[0]
    assert [step_fraction(ball, t) for t in range(3)] == [1.0, 2 / 3, 0.5]
    assert [step_fraction(free, t) for t in range(3)] == [1.0, 0.5, 1 / 3]


@pytest.mark.parametrize("k", [2.0, 3.0, 10.0])
@pytest.mark.parametrize(("planner", "task"), PLANS[:3])
def test_bounds_fall_with_the_root_of_the_data(planner, task, k):
    small, large = (planner(**task | {"n": n, "moment_order": k}).bound for n in (10**6, 10**8))
    slope = math.log(large / small) / math.log(100)
    assert slope == pytest.approx(-0.5, abs=0.08)


# The reduction for strongly convex risks.


@given(st.integers(16, 10**9))
def test_parts_of_the_reduction_double_and_are_disjoint(n):
    full, published = sc_reduction_sizes_full(n), reduction_sizes(n)
    assert n - len(full) <= sum(full) <= n
    assert sum(published) <= n
    assert len(full) == len(published)
    assert 2 ** (2 ** (len(full) - 1)) < n <= 2 ** (2 ** len(full))


def test_exact_powers_count_exactly():
    assert [len(sc_reduction_sizes_full(n)) for n in (16, 17, 256, 257, 65536, 65537)] == [
        2,
        3,
        3,
        4,
        4,
        5,
    ]


@pytest.mark.parametrize("n", [5000, 10**9])
def test_each_part_starts_from_the_distance_that_the_one_before_proves(n):
    schedule, mu = reduction_schedule(**REDUCED | {"n": n}), 0.5
    assert [phase.index for phase in schedule.phases] == list(range(1, len(schedule.phases) + 1))
    law = {name: value for name, value in TIGHT.items() if name not in ("n", "diameter")}
    distance, start = min(2.0, 1.0 / mu), 0
    for size in sc_reduction_sizes_full(n):
        part = localized_schedule_ballfree(n=size, **law, diameter=distance)
        wanted = part.phases
        found = schedule.phases[start : start + len(wanted)]
        assert [dataclasses.replace(phase, index=0) for phase in found] == [
            dataclasses.replace(phase, index=0) for phase in wanted
        ]
        start, used = start + len(wanted), distance
        distance = min(2.0, math.sqrt(2 * part.risk_bound / mu))
    assert start == len(schedule.phases)
    assert (schedule.bound, schedule.tail) == (part.bound, part.tail)
    assert (used < 2.0) == (n > 5000)  # on much data the distance shrinks


def test_the_reduction_beats_localization_on_large_data():
    """The rate is that of localization, squared."""
    law = REDUCED | {"n": 10**8, "moment_order": 4.0}
    plain = {name: value for name, value in law.items() if name != "strong_convexity"}
    assert (
        reduction_schedule(**law).risk_bound
        < localized_schedule_ballfree(**plain).risk_bound / 20
    )


def test_the_reduction_is_skipped_for_tiny_data_and_takes_a_lambda_that_doubles():
    assert len(reduction_schedule(**REDUCED | {"n": 15}).phases) == 3
    own = reduction_schedule(**REDUCED | {"n": 256}, reg=0.05)
    firsts = [
        own.phases[i].reg for i in (0, 5, 11)
    ]  # parts of 36, 73, 146 records: 5, 6, 7 phases
    assert firsts == pytest.approx([0.05, 0.1, 0.2])
    distant = reduction_schedule(**REDUCED | {"diameter": math.inf})
    assert distant.risk_bound == pytest.approx(
        reduction_schedule(**REDUCED).risk_bound
    )  # rt_1/mu is 2


# Boosting.


def test_the_default_phases_are_too_small_for_the_guarantee_and_fewer_are_not():
    common = BOOSTED | {"n": 10**6, "copies": 101, "conservative": True}
    default = boosted_localized_schedule(**common)
    assert default.phases[-1].n < 16
    assert not default.proved
    fewer = boosted_localized_schedule(**common, phases=6)
    assert fewer.proved
    assert fewer.phases[-1].n >= 16
    assert not boosted_localized_schedule(**common | {"copies": 1}, phases=6).proved
    assert not boosted_localized_schedule(**common | {"conservative": False}, phases=6).proved


@given(st.floats(1e-6, 0.5), st.integers(1, 20), st.integers(16, 10**4))
def test_enough_copies_reach_the_failure_probability_and_fewer_do_not(failure, phases, group):
    J = boosted_copies(failure, phases, group)
    assert J % 2 == 1
    assert boosted_failure(J, phases, group) <= failure * (1 + 1e-9)
    assert J <= 2 or boosted_failure(J - 2, phases, group) > failure * (1 - 1e-9)
    with pytest.raises(InfeasibleError, match="smallest_group must be >= 16"):
        boosted_copies(failure, phases, 15)


def test_the_default_constants_are_those_of_the_plain_bound():
    plain = boosted_localized_schedule(**BOOSTED)
    proved = boosted_localized_schedule(**BOOSTED, conservative=True)
    assert plain.bound < proved.bound / 5
    assert plain.copies == 1


# Minibatches.


def test_full_batches_give_the_ballfree_schedule():
    full = localized_schedule_ballfree(**TIGHT | {"max_steps": 300})
    found = localized_schedule_minibatch(
        n=5000,
        dim=10,
        batch_sizes=[phase.n for phase in full.phases],
        steps=[phase.steps for phase in full.phases],
        noise_multipliers=[phase.noise_multiplier for phase in full.phases],
        moment_order=2.0,
        second_moment=1.0,
        moment_2k=1.5,
        diameter=2.0,
    )
    assert found.rho is None
    for name in ("bound", "tail"):
        assert getattr(found, name) == pytest.approx(getattr(full, name), rel=1e-12)
    for one, other in zip(found.phases, full.phases, strict=True):
        assert one.noise_std == pytest.approx(other.noise_std, rel=1e-12)
        assert one.error == pytest.approx(other.error, rel=1e-12)
        assert one.reg == pytest.approx(other.reg, rel=1e-12)


def test_sampling_adds_its_variance_and_smaller_batches_need_more_of_the_bound():
    law = {
        "n": 1024,
        "dim": 1,
        "moment_order": 2.0,
        "second_moment": 1.0,
        "moment_2k": 1.5,
        "diameter": 2.0,
    }
    sizes = halved_sizes(1024)

    def made(fraction):
        batches = [max(1, size // fraction) for size in sizes]
        steps = [4096] * len(sizes)
        return localized_schedule_minibatch(
            **law, batch_sizes=batches, steps=steps, noise_multipliers=[1.0] * 10
        )

    bounds = [made(fraction).bound for fraction in (1, 4, 16, 64)]
    assert bounds == sorted(bounds)
    b, m = 128, 512
    nu = ((1 / b) ** 2 + (m - b) / (b * (m - 1))) / 4096
    assert made(4).phases[0].error == pytest.approx(1.5 * math.sqrt(ballfree_rate(nu, 4096)))
    assert minibatch_size(512, 0.5, 4096) == 8
    assert minibatch_size(512, 0.5, 1) == 512
