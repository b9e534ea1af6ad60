"""What is checked when an optimizer or its loader is built, beyond the list of test_errors.py."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import IterableDataset

import torch_dpsco as dp

PROBLEM = dp.losses.Logistic().problem(bound_x=2.0)


def test_a_stream_cannot_be_sampled_from():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    params = torch.nn.Linear(2, 1).parameters()
    opt = dp.HolderSGD(params, dp.HolderSGD.plan(lr=0.1, problem=PROBLEM, noise_multiplier=1.0, batch_size=1, n=10))
    with pytest.raises(ValueError, match=r"dataset must be map-style, to be sampled from \(got Stream"):
        opt.loader(Stream())


def test_a_parameter_given_twice_is_refused():
    p = torch.nn.Parameter(torch.zeros(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns, we refuse
        with pytest.raises(ValueError, match="params must hold each parameter once"):
            dp.HolderSGD([p, p], dp.HolderSGD.plan(lr=0.1, problem=PROBLEM, noise_multiplier=1.0, batch_size=1, n=10))


def test_an_undefined_adjacency_names_the_way_out():
    params = torch.nn.Linear(2, 1).parameters()
    with pytest.raises(dp.AdjacencyError, match=r"give n= \(Poisson batches, every adjacency\)"):
        dp.HolderSGD(
            params,
            dp.HolderSGD.plan(
                lr=0.1,
                problem=PROBLEM,
                noise_multiplier=1.0,
                batch_size=1,
                n=10,
                sampling="fixed",
                adjacency="add_remove",
            ),
        )


def test_an_oracle_that_looks_at_places_needs_a_design_that_keeps_them():
    """In a sampled or assigned batch one record more moves all rows after it to other groups."""
    for design in (dp.Poisson(6, 24), dp.Fixed(6, 24), dp.Assigned(6, 24)):
        oracle = dp.oracles.Coordinatewise(1.0, 1.0, 6, groups=2)
        with pytest.raises(dp.AdjacencyError, match="design must keep the places of rows for Coordinatewise"):
            dp.AcceleratedSGD(torch.nn.Linear(2, 1).parameters(), 0.1, oracle=oracle, design=design)
    for design in (dp.Disjoint(6, 24), dp.Shuffled(6, 24)):
        oracle = dp.oracles.Coordinatewise(1.0, 1.0, 6, groups=2)
        assert dp.AcceleratedSGD(torch.nn.Linear(2, 1).parameters(), 0.1, oracle=oracle, design=design).oracle is oracle
