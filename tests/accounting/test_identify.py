from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from scipy import stats
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from torch_dpsco.accounting.designs import Disjoint, Fixed, Full, Poisson, Shuffled
from torch_dpsco.accounting.events import PoissonGaussian, clipped_gaussian
from torch_dpsco.accounting.identify import RatePoisson, identify, recognize
from torch_dpsco.errors import UnknownSamplerError
from torch_dpsco.sampling import FixedSampler, PoissonSampler, PrivateLoader, make_sampler

N = 20
DATA = TensorDataset(torch.arange(float(N)).unsqueeze(1))
DESIGNS = [Poisson(4, N), Fixed(4, N), Shuffled(4, N), Disjoint(4, N), Full(N)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(N))


def opacus_loader() -> DPDataLoader:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DPDataLoader(DATA, sample_rate=0.2)


@pytest.mark.parametrize("design", DESIGNS, ids=lambda d: type(d).__name__)
def test_our_samplers_are_believed_in_every_loader(design):
    assert identify(make_sampler(design)) == design
    assert identify(PrivateLoader(DATA, make_sampler(design))) == design
    assert identify(PrivateLoader(DATA, make_sampler(design), physical_batch_size=2)) == design
    assert identify(DataLoader(DATA, batch_sampler=make_sampler(design))) == design


FOREIGN = {
    "sequential": (lambda: DataLoader(DATA, batch_size=4), "SequentialSampler"),
    "shuffled": (
        lambda: DataLoader(DATA, batch_size=4, shuffle=True),
        "DataLoader > BatchSampler > RandomSampler",
    ),
    "replacement": (
        lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)),
        "RandomSampler",
    ),
    "weighted": (
        lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * N, N)),
        "WeightedRandomSampler",
    ),
    "stream": (lambda: DataLoader(Stream(), batch_size=4), "_InfiniteConstantSampler"),
    "stream without batches": (
        lambda: DataLoader(Stream(), batch_size=None),
        "_InfiniteConstantSampler",
    ),
    "opacus": (opacus_loader, "DPDataLoader > UniformWithReplacementSampler"),
    "list": (lambda: [DATA[0]], "got list"),
    "nothing": (lambda: None, "got NoneType"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_every_other_sampling_is_refused_with_the_ways_out(name):
    build, seen = FOREIGN[name]
    with pytest.raises(UnknownSamplerError) as caught:
        identify(build())
    for words in (
        seen,
        "must draw by a sampler of torch_dpsco",
        "optimizer.loader(dataset)",
        "DataLoader(dataset, batch_sampler=PoissonSampler(...))",
        "without n= and design=",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize("sampler", [PoissonSampler(Poisson(4, N)), FixedSampler(Fixed(4, N))])
def test_a_design_sampler_under_another_batch_sampler_is_refused(sampler):
    """Such a loader joins several draws into one batch, in which a record may be several times."""
    with pytest.raises(UnknownSamplerError, match="BatchSampler"):
        identify(DataLoader(DATA, sampler=sampler, batch_size=2))


def test_a_design_that_is_no_design_is_not_believed():
    loader = DataLoader(DATA, batch_size=4)
    loader.design = "Poisson(4, 20)"
    with pytest.raises(UnknownSamplerError):
        identify(loader)


# -- recognize: foreign samplers whose law is known -------------------------------------------------------------------


def uniform(rate: float, size: int = N) -> DataLoader:
    return DataLoader(
        DATA, batch_sampler=UniformWithReplacementSampler(num_samples=size, sample_rate=rate)
    )


@pytest.mark.parametrize("design", DESIGNS, ids=lambda d: type(d).__name__)
def test_our_samplers_are_recognized_as_they_are_identified(design):
    assert recognize(DataLoader(DATA, batch_sampler=make_sampler(design))) == design
    assert recognize(PrivateLoader(DATA, make_sampler(design))) == design


def test_the_poisson_sampler_of_opacus_is_recognized_with_its_rate_and_size():
    for loader in (uniform(0.25), opacus_loader()):
        design = recognize(loader)
        assert isinstance(design, RatePoisson)
        assert design.n == N
        assert (
            loader.batch_sampler.sample_rate
            <= design.sample_rate
            < loader.batch_sampler.sample_rate + 2.0**-23
        )
        assert design.draw_event(clipped_gaussian(1.5), None) == PoissonGaussian(
            1.5, design.sample_rate
        )


def test_an_epoch_of_a_recognized_loader_has_no_step_too_few():
    """The rate that is drawn with is rounded up by 2^-24, which must not halve the number of steps."""
    for size, batch_size in ((93, 1), (100, 2), (64, 16), (60000, 256)):
        assert recognize(uniform(batch_size / size, size)).steps_per_epoch == -(
            -size // batch_size
        )
    assert RatePoisson(0.0, 5).steps_per_epoch == 5


def test_physical_parts_are_recognized_as_the_draws_behind_them():
    for inner, expected in (
        (UniformWithReplacementSampler(num_samples=N, sample_rate=0.25), RatePoisson(0.25, N)),
        (make_sampler(Poisson(4, N)), Poisson(4, N)),
        (BatchSampler(SequentialSampler(DATA), 4, False), Shuffled(4, N)),
    ):
        parts = BatchSplittingSampler(sampler=inner, max_batch_size=2, optimizer=None)
        assert recognize(DataLoader(DATA, batch_sampler=parts)) == expected


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_without_replacement_are_a_pass_each_and_claim_nothing(shuffle, drop_last):
    loader = DataLoader(DATA, batch_size=6, shuffle=shuffle, drop_last=drop_last)
    assert recognize(loader) == Shuffled(6, N)
    assert recognize(DataLoader(DATA, batch_size=10 * N)) == Shuffled(N, N)


class OwnUniform(UniformWithReplacementSampler):
    """Draws in a way of its own."""

    def __iter__(self):
        return iter([[0, 0]])


class OwnBatches(BatchSampler):
    """Joins batches in a way of its own."""


class OwnLoader(DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield torch.cat([batch[0], batch[0]])


UNKNOWN = {
    "replacement": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)),
    "two permutations": lambda: DataLoader(
        DATA, 4, sampler=RandomSampler(DATA, num_samples=2 * N)
    ),
    "part of a permutation": lambda: DataLoader(
        DATA, 4, sampler=RandomSampler(DATA, num_samples=N // 2)
    ),
    "weighted": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * N, N)),
    "subset": lambda: DataLoader(DATA, 4, sampler=SubsetRandomSampler([0, 0, 1])),
    "list of positions": lambda: DataLoader(DATA, 4, sampler=[0, 0, 1]),
    "list of batches": lambda: DataLoader(DATA, batch_sampler=[[0, 0]]),
    "one by one": lambda: DataLoader(DATA, batch_size=None),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "own uniform": lambda: DataLoader(
        DATA, batch_sampler=OwnUniform(num_samples=N, sample_rate=0.1)
    ),
    "own batches": lambda: DataLoader(
        DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 4, False)
    ),
    "own loader": lambda: OwnLoader(DATA, batch_size=4),
    "bare sampler": lambda: UniformWithReplacementSampler(num_samples=N, sample_rate=0.1),
    "our sampler inside": lambda: DataLoader(
        DATA, sampler=PoissonSampler(Poisson(4, N)), batch_size=2
    ),
    "list": lambda: [DATA[0]],
    "nothing": lambda: None,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_subclass_of_a_known_sampler_is_refused(name):
    loader = UNKNOWN[name]()
    with pytest.raises(UnknownSamplerError) as caught:
        recognize(loader)
    for words in (
        "must draw in a known way",
        "poisson_sampling=True",
        "accountant.record(event)",
        "shuffle=True",
    ):
        assert words in str(caught.value)


def test_the_distributed_sampler_is_refused_because_it_leaves_empty_batches_out(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    sampler = DistributedUniformWithReplacementSampler(total_size=N, sample_rate=0.1)
    with pytest.raises(UnknownSamplerError, match="leaves empty batches out"):
        recognize(DataLoader(DATA, batch_sampler=sampler))


@pytest.mark.parametrize(
    "rate", [1e-9, 2.0**-24, 1.5 * 2.0**-24, 1e-3, 0.1, 1 / 3, 0.5, 1 - 1e-9, 1.0]
)
def test_opacus_rate_is_the_one_that_its_sampler_draws_with(rate):
    """torch.rand has the values k 2^-24: so many of them are below the rate, compared as torch compares."""
    found = recognize(uniform(rate)).sample_rate
    near = round(rate * 2**24)
    candidates = torch.arange(max(0, near - 4), min(2**24, near + 5), dtype=torch.float64)
    below = ((candidates / 2**24).float() < rate).double()
    exact = (candidates[0] + below.sum()) / 2**24
    assert float(exact) == pytest.approx(found, rel=0, abs=2.0**-25)
    assert rate <= found <= 1.0


def test_torch_draws_multiples_of_two_to_the_minus_24():
    drawn = torch.rand(10**5, generator=torch.Generator().manual_seed(1)).double() * 2**24
    assert bool((drawn == drawn.round()).all())
    hits = int((torch.rand(10**6, generator=torch.Generator().manual_seed(2)) < 0.01).sum())
    assert stats.binom.ppf(5e-7, 10**6, 0.01) <= hits <= stats.binom.isf(5e-7, 10**6, 0.01)


def test_a_rate_design_checks_its_numbers():
    for bad in ({"sample_rate": 1.5}, {"sample_rate": -0.1}, {"n": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
            RatePoisson(**({"sample_rate": 0.1, "n": 5} | bad))
    with pytest.raises(ValueError, match="failure must be 0"):
        RatePoisson(0.1, 5).event(dataclasses.replace(clipped_gaussian(1.0), failure=1e-6))
