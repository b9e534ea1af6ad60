"""Users' means as rows, and what oracles without noise release for them."""

from __future__ import annotations

from dataclasses import replace

import torch

from torch_dpsco.algorithms.oracles import UserFiltered
from torch_dpsco.algorithms.user_numbers import UserFilter
from torch_dpsco.rows import DenseBlock, GradBatch


def observe(oracle, rows, users=None, splits=()):
    """Opens a batch and shows (B, D) rows of users; by default one row each."""
    users = torch.arange(len(rows)) if users is None else users
    oracle.open([torch.zeros(rows.shape[1], dtype=torch.float64)])
    for part, ids in zip(rows.tensor_split(splits), users.tensor_split(splits), strict=True):
        oracle.observe(GradBatch([DenseBlock(part)]), users=ids)


def released(oracle, rows, users=None, splits=()):
    observe(oracle, rows, users, splits)
    return oracle.release(torch.Generator().manual_seed(0))


def certain(filter, tau=1.0, *, threshold=None, steps=1, noise_std=0.0, **others):
    """A filter whose test is (almost) free of noise; its threshold is just above H."""
    level = filter.score_floor + 1e-6 if threshold is None else threshold
    own = replace(filter, pair_radius=tau, noise_std=noise_std, steps=steps, threshold=level)
    return UserFiltered(own, **others)


def same(n, floor=None, end=None):
    floor = n - 1 if floor is None else floor
    return UserFilter(
        n_users=n, steps=1, pair_radius=1.0, threshold=floor + 1e-6, threshold_scale=1e-12, query_scale=1e-12,
        score_floor=floor, ramp_end=3 * n // 4 if end is None else end, noise_std=0.0,
    )  # fmt: skip
