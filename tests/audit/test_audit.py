"""The audit: it finds most of a known epsilon, never more than that, and what it has to catch, it catches.

All seeds are fixed, so that no test depends on luck. Where a test says that a sound mechanism passes, it audits with
confidence 1 - 1e-6: with any other seed it would fail with at most that probability.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from mpmath import mp
from scipy.special import expit
from scipy.stats import binom

import torch_dpsco as dp
from tests.streams import picks
from torch_dpsco.accounting.designs import Design
from torch_dpsco.accounting.events import Event, Gaussian, PoissonGaussian, Repeat, WORGaussian
from torch_dpsco.audits.repeated import _epsilon_lower, choose, judge
from torch_dpsco.errors import AdjacencyError, SequenceError, UtilityWarning
from torch_dpsco.step.oracle import ClippedMean

SURE = 1 - 1e-6
TAIL = 1e-6


def normal(seed: int, *size: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size)


def gaussian_outputs(sigma: float, trials: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    first, second = sigma * normal(seed, 2, trials)
    return first, second + 1.0


def reported(event: Event, delta: float, adjacency: str = "add_remove") -> float:
    accountant = dp.Accountant(adjacency=adjacency)  # type: ignore[arg-type]
    accountant.authorize(event)
    return accountant.get_epsilon(delta)


def gaussian_epsilon(sigma: float, delta: float) -> float:
    return reported(Gaussian(sigma, {"add_remove": 1.0}), delta)


# -- power and validity --


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(
    ("sigma", "delta", "trials"),
    [
        (1.0, 0.05, 20_000),
        (0.5, 0.05, 20_000),
        (2.0, 0.01, 20_000),
        (0.7, 0.01, 20_000),
        (1.0, 1e-5, 200_000),
    ],
)
def test_an_audit_finds_more_than_0_6_of_the_epsilon_of_a_gaussian_and_never_more_than_it(
    sigma, delta, trials
):
    epsilon = gaussian_epsilon(sigma, delta)
    found = dp.audit_outputs(*gaussian_outputs(sigma, trials), delta=delta)
    assert 0.6 * epsilon < found.epsilon_lower < epsilon < found.reach
    assert found.high == 1
    assert found.tested == trials // 2
    swapped = dp.audit_outputs(*reversed(gaussian_outputs(sigma, trials)), delta=delta)
    assert 0.6 * epsilon < swapped.epsilon_lower < epsilon


@pytest.mark.parametrize(
    ("sigma", "delta", "trials"), [(1.0, 0.05, 20_000), (1.0, 1e-5, 200_000)]
)
def test_halved_noise_is_refuted(sigma, delta, trials):
    found = dp.audit_outputs(*gaussian_outputs(sigma / 2, trials), delta=delta, confidence=SURE)
    assert found.contradicts(gaussian_epsilon(sigma, delta))
    sound = dp.audit_outputs(*gaussian_outputs(sigma, trials), delta=delta, confidence=SURE)
    assert not sound.contradicts(gaussian_epsilon(sigma, delta))


def failures_of_small_audits(epsilon: float, confidence: float, repetitions: int = 200) -> int:
    """Returns how many audits of randomized response, hidden among coordinates that say nothing, go wrong."""
    rng = np.random.default_rng(3)
    failures = 0
    for _ in range(repetitions):
        sides = [rng.random((400, 3)) < 0.5 for _ in range(2)]
        for sign, side in zip((-1, 1), sides, strict=True):
            side[:, 0] = rng.random(400) < expit(sign * epsilon / 2)
        failures += (
            dp.audit_outputs(*sides, delta=0.0, confidence=confidence).epsilon_lower > epsilon
        )
    return failures


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("epsilon", [0.0, 1.0])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_an_audit_is_wrong_no_more_often_than_its_confidence_says(epsilon, confidence):
    # the bit's epsilon is attained by the plainest test: the hardest case for a lower bound
    assert failures_of_small_audits(epsilon, confidence) <= binom.isf(TAIL, 200, 1 - confidence)


@pytest.mark.slow
def test_failures_do_occur_where_the_bound_is_exact():
    # at confidence 0.1 a sound bound is wrong now and then; none at all would mean that it gives power away
    assert 1 <= failures_of_small_audits(1.0, 0.1) <= binom.isf(TAIL, 200, 0.9)


@pytest.mark.slow
def test_a_bound_from_the_outputs_that_chose_it_is_false():
    # 200 audits of noise alone: judged on other outputs, and on those that chose the threshold
    judged, flattered = 0, 0
    for scores in normal(4, 200, 2, 1000):
        sides = scores[0], scores[1]
        judged += judge([sides], 0, 0.0, 0.9).epsilon_lower > 0
        flattered += choose(sides, 0, 500, 0.0, 0.05).bound > 0
    assert judged <= binom.isf(TAIL, 200, 0.1) < flattered


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize(
    ("hits", "false_hits", "n"), [(0, 0, 50), (50, 0, 50), (3, 1, 50), (900, 17, 1000)]
)
@pytest.mark.parametrize("tail", [0.025, 5e-7, 1e-12])
def test_the_interval_ends_are_those_of_the_binomial_tails(hits, false_hits, n, tail):
    # delta = 0: exp(bound) = max(t/f, (1-f)/(1-t)) with P(B(n, t) >= hits) = tail = P(B(n, f) <= false_hits)
    mp.dps = 40

    def rate(k: int, upper_tail: float) -> mp.mpf:
        """The rate at which k or more of n have this probability."""
        low, high = mp.mpf(0), mp.mpf(1)
        for _ in range(140):
            middle = (low + high) / 2
            below = mp.betainc(k, n - k + 1, 0, middle, regularized=True) < upper_tail
            low, high = (middle, high) if below else (low, middle)
        return low

    t = rate(hits, tail) if hits else mp.mpf(0)
    f = rate(false_hits + 1, 1 - mp.mpf(tail))
    expected = max(mp.log(max(t / f, (1 - f) / (1 - t))), 0)
    found = _epsilon_lower(np.array([hits]), np.array([false_hits]), n, 0.0, tail)[0]
    assert found == pytest.approx(float(expected), rel=1e-9, abs=1e-9)


# -- what sampling has to look like --

SIGMA, BATCH, N, STEPS = 1.0, 256, 60_000, 235


def epoch_of_likelihood_ratios(
    fixed_batches: bool, trials: int = 100_000
) -> tuple[np.ndarray, np.ndarray]:
    """Returns exact log likelihood ratios of one epoch on two data sets that differ in one record, in 1-D.

    Fixed batches, replace_one: all other gradients are -1, the record's is -1 or +1, so that a batch with it moves the
    sum by 2. Poisson, add_remove: the record's gradient is 1 and the others' are known.
    """
    rng, rate, z = np.random.default_rng(4), BATCH / N, SIGMA / 2 if fixed_batches else SIGMA
    ratios = np.zeros((2, trials))
    for side in (0, 1):
        for start in range(0, trials, 10_000):
            x = z * rng.normal(size=(10_000, STEPS))
            if side:
                x += rng.random((10_000, STEPS)) < rate
            ratios[side, start : start + 10_000] = np.log1p(
                rate * np.expm1((2 * x - 1) / (2 * z * z))
            ).sum(axis=1)
    return ratios[0], ratios[1]


@pytest.mark.slow
def test_fixed_batches_that_are_accounted_as_poisson_are_refuted():
    found = dp.audit_outputs(
        *epoch_of_likelihood_ratios(fixed_batches=True), delta=1e-5, confidence=SURE
    )
    assert found.contradicts(0.3934)  # tight for Poisson under add_remove
    assert found.contradicts(0.5299)  # tight for Poisson under replace_one
    poisson = Repeat(PoissonGaussian(SIGMA, BATCH / N), STEPS)
    assert found.contradicts(reported(poisson, 1e-5))
    assert found.contradicts(reported(poisson, 1e-5, "replace_one"))
    assert not found.contradicts(5.030)  # a lower bound on what they truly cost
    assert not found.contradicts(
        reported(Repeat(WORGaussian(SIGMA, BATCH, N), STEPS), 1e-5, "replace_one")
    )


@pytest.mark.slow
def test_poisson_batches_pass():
    ratios = epoch_of_likelihood_ratios(fixed_batches=False)
    found = dp.audit_outputs(*ratios, delta=1e-5, confidence=SURE)
    assert not found.contradicts(0.3934)
    # but not with a quarter of the noise that is reported
    quiet = reported(Repeat(PoissonGaussian(4 * SIGMA, BATCH / N), STEPS), 1e-3)
    assert dp.audit_outputs(*ratios, delta=1e-3, confidence=SURE).contradicts(quiet)


# -- mechanisms as functions --


def test_laplace_noise_passes_at_its_epsilon_and_not_at_two_thirds_of_it():
    rng = np.random.default_rng(5)
    found = dp.audit(
        lambda x: x + rng.laplace(), (0.0, 1.0), delta=0.0, trials=5000, confidence=SURE, seed=1
    )
    assert not found.contradicts(1.0)
    assert found.contradicts(0.66)


def test_an_exact_likelihood_ratio_finds_what_no_linear_score_can():
    rng = np.random.default_rng(6)

    def ring(radius: float) -> np.ndarray:
        """A point near a circle: both means are 0, and the radius is the secret."""
        angle = rng.uniform(0, 2 * math.pi)
        return radius * np.array([math.cos(angle), math.sin(angle)]) + 0.5 * rng.normal(size=2)

    arguments = {"delta": 0.0, "trials": 2000, "confidence": SURE, "seed": 1}
    exact = dp.audit(ring, (1.0, 3.0), score=np.linalg.norm, **arguments)
    fitted = dp.audit(ring, (1.0, 3.0), **arguments)
    linear = dp.audit(ring, (1.0, 3.0), score=lambda point: point[0] + point[1], **arguments)
    assert exact.epsilon_lower > 3
    assert fitted.epsilon_lower > 3
    assert linear.epsilon_lower < 2.5
    assert exact.adjacency is None


def test_a_leak_that_shows_on_one_side_only_is_found_in_its_direction():
    rng = np.random.default_rng(7)
    arguments = {"delta": 0.0, "trials": 2000, "confidence": SURE, "seed": 1}
    for pair in ((0.0, 0.1), (0.1, 0.0)):
        found = dp.audit(lambda p: float(rng.random() < p), pair, **arguments)
        assert found.epsilon_lower > 0.8
    # it is (0, 0.1)-DP
    assert (
        dp.audit(
            lambda p: float(rng.random() < p), (0.0, 0.1), **arguments | {"delta": 0.1}
        ).epsilon_lower
        == 0
    )


def test_no_noise_gives_the_most_that_so_many_trials_can_show():
    found = dp.audit(lambda x: x, (1.0, 2.0), delta=1e-5, trials=100)
    assert (
        found.epsilon_lower
        == found.reach
        == pytest.approx(math.log((0.025 ** (1 / 50) - 1e-5) / (1 - 0.025**0.02)))
    )
    assert (found.hits, found.false_hits) == (50, 0)


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(
    "kind", ["number", "0-d", "tensor", "float16", "array", "list", "module"]
)
def test_outputs_may_be_numbers_arrays_tensors_and_modules(kind):
    rng = np.random.default_rng(8)

    def noisy(x: float) -> object:
        value = x + rng.normal()
        weight = torch.tensor([[value, 1.0]], requires_grad=True)
        module = torch.nn.Linear(2, 1, bias=False)
        module.weight.data = weight.data
        return {
            "number": value,
            "0-d": weight[0, 0],
            "tensor": weight,
            "float16": weight.half(),
            "array": np.array([[value], [2.0]]),
            "list": [value, 7],
            "module": module,
        }[kind]

    found = dp.audit(noisy, (0.0, 8.0), delta=0.0, trials=80, seed=1)
    assert found.epsilon_lower == found.reach


def test_many_outputs_with_few_trials_still_tell_the_sides_apart():
    noise = normal(9, 2, 60, 500)
    noise[1, :, :100] += 1.0
    found = dp.audit_outputs(torch.from_numpy(noise[0]), list(noise[1]), delta=1e-5)
    assert found.epsilon_lower > 0.8 * found.reach


def test_neither_scale_nor_shift_nor_constant_coordinates_of_the_outputs_matter():
    first, second = normal(10, 2, 2000, 2)
    second[:, 0] += 2.0
    plain = dp.audit_outputs(first, second, delta=1e-3)

    def moved(side):
        return np.column_stack(
            [1e-9 * side[:, 0] - 5e-9, 1e12 + 1e6 * side[:, 1], np.full(2000, 3.0)]
        )

    found = dp.audit_outputs(moved(first), moved(second), delta=1e-3)
    assert (found.hits, found.false_hits) == (plain.hits, plain.false_hits)


# -- what cannot raise a bound --


class Counter:
    """A score or mechanism with a memory: later calls give more."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: object) -> float:
        self.calls += 1
        return float(self.calls)


class Growing(Counter):
    """Outputs of ever more numbers."""

    def __call__(self, output: object) -> list[float]:  # type: ignore[override]
        return [0.0] * int(super().__call__(output))


class Draws:
    """Noise that has nothing to do with the input."""

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        self.rng, self.scale = np.random.default_rng(seed), scale

    def __call__(self, output: object) -> float:
        return self.scale * self.rng.normal()


@pytest.mark.cases(9, 4)
@pytest.mark.parametrize(
    "score",
    [
        Counter(),
        lambda x: 0.0,
        lambda x: math.inf if x > 0 else -math.inf,
        lambda x: 1e300 * x,
        lambda x: math.sin(1e6 * x),
        Draws(11),
        lambda x: float(hash(x) % 97),
        None,
    ],
    ids=["counts calls", "constant", "infinite", "huge", "wild", "random", "hash", "fitted"],
)
@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_no_score_shows_anything_where_there_is_nothing(score, delta):
    rng = np.random.default_rng(12)
    found = dp.audit(
        lambda x: rng.normal(),
        ("a", "b"),
        delta=delta,
        trials=1000,
        confidence=SURE,
        score=score,
        seed=2,
    )
    assert found.epsilon_lower == 0
    assert not found.contradicts(0.0)


def test_a_state_that_drifts_from_run_to_run_is_no_difference_between_the_inputs():
    assert (
        dp.audit(
            Counter(), ("a", "b"), delta=0.0, trials=1000, confidence=SURE, seed=3
        ).epsilon_lower
        == 0
    )


def test_a_fit_to_noise_in_many_dimensions_shows_nothing():
    noise = normal(13, 2, 100, 1000)
    assert dp.audit_outputs(*noise, delta=0.0, confidence=SURE).epsilon_lower == 0


# -- training --

DATA = torch.utils.data.TensorDataset(torch.zeros(2, 1), torch.ones(2, 1))
CANARY, OPPOSITE, NULL = ((torch.tensor([x]), torch.ones(1)) for x in (9.0, -9.0, 0.0))
LOSS = dp.losses.Logistic()


def maker(
    design: Design,
    adjacency: str,
    noise_multiplier: float,
    steps: int = 2,
    shared=None,
    width: int = 1,
):
    """Returns make() of runs whose canaries are clipped in every step: the worst case in one dimension."""
    generator = torch.Generator().manual_seed(14)

    def make():
        model = torch.nn.Linear(width, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        with pytest.warns(UtilityWarning, match="repeatable"):
            optimizer = dp.HolderSGD(
                model.parameters(),
                dp.HolderSGD.plan(
                    lr=0.01,
                    problem=LOSS.problem(bound_x=1.0),
                    noise_multiplier=noise_multiplier,
                    batch_size=design.batch_size,
                    sampling=design,
                    steps=steps,
                    adjacency=adjacency,
                ),
                accountant=shared,
                generator=generator,
            )
        return model, optimizer

    return make


@pytest.mark.weekly
def test_training_with_half_of_the_noise_that_it_reports_is_refuted(monkeypatch):
    # one full batch: mu = 1.5, epsilon(0.3) = 1.10; with half of the noise it is 4.0
    noise_std = ClippedMean.noise_std.fget
    monkeypatch.setattr(ClippedMean, "noise_std", property(lambda self: 0.5 * noise_std(self)))
    make = maker(dp.Full(2), "add_remove", 2 / 3, steps=1)
    found = dp.audit_training(
        make, DATA, CANARY, loss=LOSS, delta=0.3, trials=800, confidence=SURE, seed=5
    )
    assert found.adjacency == "add_remove"
    assert found.claimed == pytest.approx(1.10, abs=0.05)
    assert found.contradicts()
    assert "REFUTED" in str(found)


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("design", "adjacency", "other"),
    [
        pytest.param(dp.Full(2), "zero_out", NULL, id="full-zero_out"),
        pytest.param(dp.Poisson(1, 2), "add_remove", None, id="poisson-add_remove"),
        pytest.param(dp.Fixed(1, 2), "replace_one", OPPOSITE, id="fixed-replace_one"),
    ],
)
def test_training_passes_and_an_unclipped_canary_is_refuted(
    monkeypatch, design, adjacency, other
):
    sampling = picks(17)
    monkeypatch.setattr(
        "torch_dpsco.sampling.samplers.sampling_generator", lambda seed=None: sampling
    )
    make = maker(design, adjacency, 5.0)
    arguments = {
        "loss": LOSS,
        "delta": 0.1,
        "other": other,
        "trials": 200,
        "confidence": SURE,
        "seed": 6,
    }
    found = dp.audit_training(make, DATA, CANARY, **arguments)
    assert not found.contradicts()
    assert "not refuted" in str(found)
    loud = torch.tensor([9000.0]), torch.ones(1)
    monkeypatch.setattr(
        "torch_dpsco.step.oracle.clip_weights", lambda norms, clip: torch.ones_like(norms)
    )
    assert dp.audit_training(make, DATA, loud, **arguments).contradicts()


@pytest.mark.slow
def test_a_score_along_the_canary_sees_it_among_many_parameters():
    canary = torch.zeros(100).index_fill(0, torch.tensor([7]), 9.0), torch.ones(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(3, 100, generator=torch.Generator().manual_seed(1)), torch.ones(3, 1)
    )
    found = dp.audit_training(
        maker(dp.Full(3), "add_remove", 0.2, steps=1, width=100),
        data,
        canary,
        loss=LOSS,
        delta=0.1,
        trials=40,
        seed=7,
    )
    assert found.epsilon_lower > 0.8 * found.reach


# -- results and errors --


def test_the_result_says_what_was_shown_in_one_sentence():
    found = dp.audit(lambda x: x, (1.0, 2.0), delta=1e-5, trials=100)
    found = dataclasses.replace(found, adjacency="replace_one")
    assert str(found) == (
        "With 95 % confidence epsilon is at least 2.569 at delta=1e-05 for this replace_one pair: 50 hits against 0 "
        "false ones in 50 tests each (at most 2.569 could be shown)."
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.epsilon_lower = 0.0


def test_no_printed_bound_is_rounded_up():
    found = dp.audit(lambda x: x, (1.0, 2.0), delta=1e-5, trials=100)
    assert "epsilon is at least 1.999 at" in str(
        dataclasses.replace(found, epsilon_lower=1.99999)
    )


def test_a_bound_contradicts_smaller_claims_only():
    found = dp.audit(lambda x: x, (1.0, 2.0), delta=1e-5, trials=100)
    assert found.contradicts(2.5)
    assert not found.contradicts(2.6)
    assert not found.contradicts(found.epsilon_lower)
    assert not found.contradicts(math.inf)
    with pytest.raises(ValueError, match="epsilon must be given"):
        found.contradicts()
    with pytest.raises(ValueError, match="epsilon must be >= 0"):
        found.contradicts(-1.0)
    with pytest.raises(ValueError, match="epsilon must be >= 0"):
        found.contradicts(math.nan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": -0.1}, "delta must be >= 0"),
        ({"delta": 1.0}, r"delta must be in \[0, 1\)"),
        ({"delta": math.nan}, "delta must be >= 0"),
        ({"trials": 7}, "trials must be >= 8"),
        ({"trials": 10.5}, "trials must be an integer"),
        ({"confidence": 1.0}, r"confidence must be in \(0, 1\)"),
        ({"confidence": 0.0}, r"confidence must be in \(0, 1\)"),
        ({"pair": (1.0, 2.0, 3.0)}, "pair must hold two inputs"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_run(change, message):
    def never(x):
        raise AssertionError("ran")

    arguments = {"pair": (1.0, 2.0), "delta": 0.1, "trials": 10} | change
    with pytest.raises(ValueError, match=message):
        dp.audit(never, arguments.pop("pair"), **arguments)


@pytest.mark.parametrize(
    ("run", "score", "message"),
    [
        (lambda x: math.nan, None, "outputs must be finite"),
        (lambda x: math.inf, None, "outputs must be finite"),
        (lambda x: "text", None, "outputs must be numbers"),
        (lambda x: None, None, "outputs must be"),
        (lambda x: {"a": 1}, None, "outputs must be numbers"),
        (lambda x: [0.0] * int(x), None, "first and second must agree"),
        (Growing(), None, "of one size"),
        (Draws(15, 1e300), None, "overflow"),
        (lambda x: x, lambda x: math.nan, "score must not be NaN"),
        (lambda x: x, lambda x: "high", "score must be a number"),
        (lambda x: x, lambda x: None, "score must be a number"),
    ],
)
def test_wrong_outputs_and_scores_are_named(run, score, message):
    with pytest.raises(ValueError, match=message):
        dp.audit(run, (1.0, 2.0), delta=0.1, trials=10, score=score)


def test_sides_of_different_size_are_refused():
    with pytest.raises(ValueError, match="first and second must agree"):
        dp.audit_outputs(np.zeros(10), np.zeros(11), delta=0.1)
    with pytest.raises(ValueError, match="first and second must agree"):
        dp.audit_outputs(np.zeros((10, 2)), np.zeros((10, 3)), delta=0.1)
    with pytest.raises(ValueError, match="trials must be an integer >= 1"):
        dp.audit_outputs([], [], delta=0.1)
    with pytest.raises(ValueError, match="one output for each trial"):
        dp.audit_outputs(1.0, 2.0, delta=0.1)
    assert dp.audit_outputs(np.zeros((10, 0)), np.zeros((10, 0)), delta=0.1).epsilon_lower == 0


def test_canaries_that_do_not_go_with_the_adjacency_are_refused():
    def training(adjacency, data=DATA, canary=CANARY, **arguments):
        make = maker(dp.Full(2), adjacency, 1.0)
        return dp.audit_training(
            make, data, canary, loss=LOSS, trials=10, **{"delta": 0.1} | arguments
        )

    with pytest.raises(AdjacencyError, match="other must be None under add_remove"):
        training("add_remove", other=OPPOSITE)
    with pytest.raises(AdjacencyError, match="other must be given under zero_out"):
        training("zero_out")
    with pytest.raises(ValueError, match="dataset must hold a record"):
        training(
            "replace_one",
            data=torch.utils.data.TensorDataset(torch.zeros(0, 1), torch.zeros(0, 1)),
        )
    with pytest.raises(ValueError, match="canary must have a gradient"):
        training("replace_one", canary=NULL)
    with pytest.raises(ValueError, match=r"delta must be in \(0, 1\)"):
        training("replace_one", delta=0.0)


def test_runs_that_share_an_accountant_are_refused():
    make = maker(dp.Full(2), "replace_one", 1.0, shared=dp.Accountant(adjacency="replace_one"))
    with pytest.raises(SequenceError, match="an accountant of its own"):
        dp.audit_training(make, DATA, CANARY, loss=LOSS, delta=0.1, trials=10)


def test_scores_may_be_scalars_of_numpy_and_torch():
    rng = np.random.default_rng(16)
    for wrap in (np.float32, torch.tensor, np.array):
        found = dp.audit(
            lambda x: x + rng.normal(), (0.0, 9.0), delta=0.0, trials=40, score=wrap, seed=1
        )
        assert found.epsilon_lower == found.reach
