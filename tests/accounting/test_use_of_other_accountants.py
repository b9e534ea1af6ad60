"""Faults in the use of other accountants, shown on the installed version and then asked of ours."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from opacus import PrivacyEngine
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant
from opacus.accountants.utils import get_noise_multiplier
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from tests.streams import seeded_sampler
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.calibrate import design_epsilon, noise_multiplier
from torch_dpsco.accounting.designs import Fixed, Poisson, Shuffled, identify
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    PoissonGaussian,
    WORGaussian,
    clipped_gaussian,
)
from torch_dpsco.errors import UnknownSamplerError

DELTA = 1e-5
FALSE_ALARM = 1e-6


def trained(
    accountant: str, loader: DataLoader, **keywords: object
) -> tuple[PrivacyEngine, DataLoader]:
    """Returns an Opacus engine after one epoch with noise multiplier 1, and the loader that it made."""
    engine, model = PrivacyEngine(accountant=accountant), nn.Linear(1, 1)
    model, optimizer, made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **keywords,
    )
    for (x,) in made:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine, made


def stepped(accountant: Any) -> None:
    if isinstance(accountant, Accountant):
        accountant.record(PoissonGaussian(1.0, 0.1))
    else:
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)


def test_the_length_is_the_number_of_steps():
    """Opacus: `len(accountant)` is the number of different keys, 1 after 5 equal steps."""
    for kind in (RDPAccountant, PRVAccountant, GaussianAccountant, Accountant):
        accountant = kind()
        for _ in range(5):
            stepped(accountant)
        assert len(accountant) == (5 if kind is Accountant else 1)


def test_a_loaded_state_is_not_shared_with_the_caller():
    """Opacus: the history that was loaded is the caller's own list, which the next step changes."""
    for kind in (RDPAccountant, PRVAccountant, GaussianAccountant, Accountant):
        source, target = kind(), kind()
        stepped(source)
        state = source.state_dict()
        kept = repr(state)
        target.load_state_dict(state)
        stepped(target)
        assert (repr(state) == kept) == (kind is Accountant)


@pytest.mark.slow
def test_an_epoch_has_no_step_too_few():
    """Opacus: `int(epochs / sample_rate)` is 92 for a rate of 1 / 93, and the noise is too small for 93 steps."""
    setting = {
        "target_epsilon": 1.0,
        "target_delta": DELTA,
        "sample_rate": 1 / 93,
        "epsilon_tolerance": 1e-9,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at too much noise the largest order is the best
        theirs = get_noise_multiplier(epochs=1, accountant="rdp", **setting)
        assert theirs == get_noise_multiplier(steps=92, accountant="rdp", **setting)
    spent = RDPAccountant()
    spent.history = [(theirs, 1 / 93, 93)]
    assert spent.get_epsilon(DELTA) > 1.001

    assert sum(int(1 / (1 / n)) < n for n in range(1, 2000)) > 100
    assert all(Poisson(1, n).steps_per_epoch == n for n in range(1, 2000))
    design = Poisson(1, 93)
    query = {"design": design, "adjacency": ADD_REMOVE, "method": "rdp"}
    noise = noise_multiplier(1.0, DELTA, steps=design.steps_per_epoch, rtol=1e-6, **query)
    assert theirs < noise < 1.01 * theirs
    assert design_epsilon(noise, DELTA, steps=93, **query) <= 1.0


@pytest.mark.slow
def test_fixed_batches_are_not_accounted_as_poisson_ones():
    """Opacus #80, private-transformers #7: an epoch of 60000 records in batches of 256 that are cut in order."""
    data = TensorDataset(torch.zeros(60000, 1))
    engine, _ = trained("rdp", DataLoader(data, batch_size=256), poisson_sampling=False)
    assert engine.accountant.history == [(1.0, 1 / 235, 235)]
    assert engine.get_epsilon(DELTA) == pytest.approx(
        0.926, rel=2e-3
    )  # 0.393 if they were Poisson batches

    query = {"delta": DELTA, "steps": 235, "adjacency": REPLACE_ONE}
    assert design_epsilon(1.0, design=Shuffled(256, 60000), **query) == pytest.approx(
        9.997, rel=1e-3
    )
    assert 5.03 <= design_epsilon(1.0, design=Fixed(256, 60000), method="pld", **query) <= 5.1435
    assert design_epsilon(
        1.0, design=Poisson(256, 60000), method="pld", **query
    ) == pytest.approx(0.530, rel=1e-3)
    with pytest.raises(UnknownSamplerError, match="SequentialSampler"):
        identify(DataLoader(data, batch_size=256))


def test_weighted_samplers_are_refused():
    """Opacus #813: the rate charged is 1 / len(loader) for favored records too, or the weights are dropped."""
    data = TensorDataset(torch.arange(64.0).unsqueeze(1))
    weights = [1.0] * 8 + [0.0] * 56
    loader = DataLoader(data, batch_size=16, sampler=WeightedRandomSampler(weights, 64))
    engine, made = trained("rdp", loader, poisson_sampling=False)
    assert isinstance(made.sampler, WeightedRandomSampler)
    assert engine.accountant.history == [
        (1.0, 0.25, 4)
    ]  # each of the 8 is in a batch with probability 0.88
    _, made = trained("rdp", loader)
    with_weight = sum(int((x < 8).sum()) for _ in range(20) for (x,) in made)
    assert with_weight < 0.3 * sum(
        len(x) for _ in range(20) for (x,) in made
    )  # 8 of 64, and not all

    with pytest.raises(UnknownSamplerError, match="WeightedRandomSampler"):
        identify(loader)


def subsets_p_value(batches: Iterable[np.ndarray], n: int, rate: float) -> float:
    """Pearson's test of the counts of all 2^n subsets against independent coin tosses."""
    codes = np.array([int((2 ** np.asarray(batch, dtype=int)).sum()) for batch in batches])
    sizes = np.array([code.bit_count() for code in range(2**n)])
    expected = rate**sizes * (1 - rate) ** (n - sizes) * len(codes)
    assert expected.min() > 20
    return float(stats.chisquare(np.bincount(codes, minlength=2**n), expected).pvalue)


@pytest.mark.weekly
def test_poisson_batches_are_independent_coin_tosses_and_fixed_or_cyclic_ones_are_not():
    """jax_privacy #121: a binomial size and then a uniform choice is Poisson sampling; fixed or cyclic draws are not.

    That library is not installed: its ways of drawing are written out here. Ours is held against its law in
    `tests/statistical/test_sampling_statistics.py` too. Fixed seeds; false-alarm rate 1e-6 each.
    """
    n, size, draws = 5, 2, 20_000
    rng = np.random.default_rng(121)
    binomial = [rng.choice(n, rng.binomial(n, size / n), replace=False) for _ in range(draws)]
    fixed = [rng.choice(n, size, replace=False) for _ in range(draws)]
    cyclic = [(rng.integers(n) + np.arange(rng.binomial(n, size / n))) % n for _ in range(draws)]
    sampler = seeded_sampler(Poisson(size, n), steps=draws, seed=1)
    ours = [indices for _, indices in sampler.draws()]
    assert (
        min(subsets_p_value(batches, n, size / n) for batches in (binomial, ours)) > FALSE_ALARM
    )
    assert (
        max(subsets_p_value(batches, n, size / n) for batches in (fixed, cyclic)) < FALSE_ALARM
    )


@pytest.mark.slow
def test_fixed_batches_with_little_noise_cost_a_tenth_of_the_published_bound():
    """dp-accounting 0.6: the bound of Wang, Balle and Kasiviswanathan is 300 for an epoch with noise 0.3 of 2 C."""
    judge = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    release = dp_accounting.GaussianDpEvent(0.6 / 2)
    judge.compose(dp_accounting.SampledWithoutReplacementDpEvent(60000, 256, release), 235)
    assert 299 < judge.get_epsilon(DELTA) < 301
    ours = Accountant(adjacency=REPLACE_ONE)
    ours.record(WORGaussian(0.6, 256, 60000), 235)
    assert (
        23.37 <= ours.get_epsilon(DELTA, method="pld") <= 23.84
    )  # between a fixed pair and an earlier figure
    assert ours.get_epsilon(DELTA, method="rdp") == pytest.approx(28.6, rel=1e-2)
    assert ours.get_epsilon(DELTA) < math.ceil(28.72)
    assert clipped_gaussian(0.6).sensitivity(REPLACE_ONE) == 2.0  # what the noise is relative to
