"""Released noise is Gaussian, of the declared standard deviation, and independent everywhere.

Bounds are exact or Kolmogorov-Smirnov ones at a false-alarm rate of 1e-6 a test. Tests of fresh generators cannot have
fixed seeds, so that 1e-6 is their rate in every run; the others use seeds, and pass or fail for good.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.streams import gaussians
from torch_dpsco.accounting.events import ADJACENCIES
from torch_dpsco.errors import UtilityWarning
from torch_dpsco.noise import Source, noise_generator
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.step.oracle import Clipped

FALSE_ALARM = 1e-6
SHAPES = [(100, 300), (20_000,), (1,), (7, 3, 2)]
CLIP, NOISE, BATCH = 0.7, 1.3, 50


def has_std(values: Tensor, std: float) -> bool:
    """Whether the sum of squares is within the exact chi-square bounds of centered Gaussians of that std."""
    statistic = float((values.double() / std).square().sum())
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], values.numel())
    return bool(low <= statistic <= high)


def is_gaussian(values: Tensor, std: float) -> bool:
    return bool(
        stats.kstest(values.double().flatten().numpy(), stats.norm(scale=std).cdf).pvalue
        > FALSE_ALARM
    )


def are_uncorrelated(first: Tensor, second: Tensor) -> bool:
    a, b = first.double().flatten(), second.double().flatten()
    z = float(a @ b) / math.sqrt(float(a @ a) * float(b @ b) / len(a))
    return bool(abs(z) < stats.norm.isf(FALSE_ALARM / 2))


def releases(
    generator: Source, number: int = 1, dtype: torch.dtype = torch.float64, noise: float = NOISE
) -> list[list[Tensor]]:
    """Noise-only releases of a clipped oracle: those of empty batches."""
    oracle = Clipped(clip=CLIP, noise_multiplier=noise, batch_size=BATCH)
    answers = []
    for _ in range(number):
        oracle.open([torch.zeros(shape, dtype=dtype) for shape in SHAPES])
        answers.append([part.clone() for part in oracle.release(generator).mean])
        assert (
            noise <= oracle.noise_std * BATCH / CLIP <= noise * (1 + 2**-6)
        )  # the sum's rounding is covered too
    return answers


def flat(answer: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in answer])


def declared_std() -> float:
    oracle = Clipped(clip=CLIP, noise_multiplier=NOISE, batch_size=BATCH)
    oracle.open([torch.zeros(shape) for shape in SHAPES])
    return oracle.noise_std


STD = declared_std()


def test_fresh_noise_has_the_std_and_law_asked_for():
    """False-alarm rate 3e-6 a run."""
    values = gaussians(200_000, noise_generator())
    assert has_std(values, 1.0)
    assert is_gaussian(values, 1.0)
    assert abs(float(values.mean())) < stats.norm.isf(FALSE_ALARM / 2) / math.sqrt(len(values))


def test_fresh_generators_are_independent_of_each_other():
    """All pairs of eight streams; false-alarm rate 28e-6 a run."""
    streams = [gaussians(10_000, noise_generator()) for _ in range(8)]
    assert all(are_uncorrelated(a, b) for k, a in enumerate(streams) for b in streams[:k])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_released_noise_has_the_declared_std_in_every_precision(dtype):
    [answer] = releases(torch.Generator().manual_seed(0), dtype=dtype)
    assert has_std(flat(answer), STD)
    assert is_gaussian(flat(answer), STD)
    assert {part.dtype for part in answer} == {
        torch.float64 if dtype == torch.float64 else torch.float32
    }
    for part, shape in zip(answer, SHAPES, strict=True):
        assert part.shape == shape
        assert has_std(part, STD)


@pytest.mark.slow
def test_noise_is_new_for_every_parameter_and_every_release():
    answers = releases(torch.Generator().manual_seed(1), 6)
    for k, answer in enumerate(answers):
        assert are_uncorrelated(answer[0].flatten()[:20_000], answer[1])
        assert are_uncorrelated(flat(answer)[:-1], flat(answer)[1:])
        for other in answers[:k]:
            assert are_uncorrelated(flat(answer), flat(other))
    assert (
        len({float(v) for answer in answers for v in flat(answer)})
        == 6 * flat(answers[0]).numel()
    )


def test_the_noise_does_not_depend_on_the_rows():
    """One seed, empty and full batch: the answers differ by the exact clipped mean."""
    oracle = Clipped(clip=CLIP, noise_multiplier=NOISE, batch_size=BATCH)
    rows = torch.randn(
        BATCH, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    answers = []
    for batch in (rows[:0], rows):
        oracle.open([torch.zeros(30, dtype=torch.float64)])
        oracle.observe(GradBatch([DenseBlock(batch)]))
        answers.append(oracle.release(torch.Generator().manual_seed(3)).mean[0].clone())
    scale = (CLIP / rows.norm(dim=1)).clamp(max=1.0)
    mean = (rows * scale[:, None]).sum(0) / BATCH
    torch.testing.assert_close(answers[1] - answers[0], mean, rtol=1e-12, atol=1e-12)


def test_the_noise_covers_the_sensitivity_that_the_event_declares():
    oracle = Clipped(clip=CLIP, noise_multiplier=NOISE, batch_size=BATCH)
    oracle.open([torch.zeros(3)])
    for adjacency in ADJACENCIES:
        declared = oracle.event().sensitivity(adjacency) / oracle.event().sigma
        assert oracle.sensitivity(adjacency) / oracle.noise_std <= declared * (1 + 1e-12)


def test_no_noise_is_exactly_none():
    [answer] = releases(torch.Generator(), noise=0.0)
    assert not flat(answer).any()


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize(
    ("bound", "spoil"),
    [
        (has_std, lambda values: values / 2),
        (has_std, lambda values: values * 0.97),
        (is_gaussian, lambda values: values * 0.93),
        (is_gaussian, lambda values: values.sign() * STD),
        (is_gaussian, lambda values: values + 0.05 * STD),
        (is_gaussian, lambda values: (torch.rand_like(values) - 0.5) * STD * math.sqrt(12)),
    ],
)
def test_each_bound_refuses_another_noise(
    bound: Callable[[Tensor, float], bool], spoil: Callable[[Tensor], Tensor]
):
    torch.manual_seed(0)
    values = flat(releases(torch.Generator().manual_seed(4))[0])
    assert bound(values, STD)
    assert not bound(spoil(values), STD)


def test_the_bound_on_correlation_refuses_noise_used_twice():
    values = flat(releases(torch.Generator().manual_seed(5))[0])
    fresh = torch.empty_like(values).normal_(0, STD, generator=torch.Generator().manual_seed(6))
    assert are_uncorrelated(values, fresh)
    for reused in (values, -values, fresh + 0.1 * values):
        assert not are_uncorrelated(values, reused)


def test_global_seeds_reach_neither_noise_nor_repeat_it():
    """An attacker who knows torch.manual_seed and np.random.seed knows nothing about the noise."""
    drawn = []
    for _ in range(3):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        drawn.append(flat(releases(noise_generator())[0]))
    torch.manual_seed(0)
    drawn.append(torch.empty_like(drawn[0]).normal_())
    assert all(are_uncorrelated(a, b) for k, a in enumerate(drawn) for b in drawn[:k])


def test_a_generator_of_the_callers_repeats_the_noise_and_only_that():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UtilityWarning)
        first, second = (
            flat(releases(noise_generator("cpu", torch.Generator().manual_seed(8)))[0])
            for _ in range(2)
        )
    assert torch.equal(first, second)
