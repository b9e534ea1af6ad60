from __future__ import annotations

import warnings

import pytest
import torch
from opacus.data_loader import DPDataLoader
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from torch_dpsco.accounting.designs import Disjoint, Fixed, Full, Poisson, Shuffled, identify
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
