"""Exact privacy of shifted binomial noise: hockey-stick divergences from products of laws, bounded from both sides."""

from __future__ import annotations

import math

import numpy as np
from scipy.signal import fftconvolve
from scipy.special import gammaln


def masses(trials, p):
    """Returns the pmf of Bin(N, p), to about 1e-12 of each mass that matters."""
    y = np.arange(trials + 1)
    log = (
        gammaln(trials + 1)
        - gammaln(y + 1)
        - gammaln(trials - y + 1)
        + y * math.log(p)
        + (trials - y) * math.log1p(-p)
    )
    mass = np.exp(log)
    return mass / mass.sum()


def losses(trials, p, shift):
    """Returns (mass of P, log P / Q), Q being P moved up by the shift (down if it is negative); inf where Q is 0."""
    mass, y = masses(trials, p), np.arange(trials + 1)
    source = y - shift
    inside = (source >= 0) & (source <= trials)

    def log_ways(k):
        return -gammaln(k + 1) - gammaln(trials - k + 1)

    known = np.clip(source, 0, trials)
    loss = log_ways(y) - log_ways(known) + shift * (math.log(p) - math.log1p(-p))
    return mass, np.where(inside, loss, np.inf)


def delta_bounds(trials, p, shifts, epsilon, step=5e-5, negligible=1e-15):
    """Returns (lower, upper) bounds of H_eps(P || Q) for independent coordinates with these shifts.

    Losses are rounded down or up to a grid, and added up by convolution.
    """
    bounds = []
    for upward in (False, True):
        finite, infinite, offset = np.ones(1), 0.0, 0
        for shift in shifts:
            if shift == 0:
                continue
            mass, loss = losses(trials, p, shift)
            keep = mass > negligible / trials
            never, lost = float(mass[np.isinf(loss)].sum()), float(mass[~keep].sum())
            keep &= np.isfinite(loss)
            cell = (np.ceil if upward else np.floor)(loss[keep] / step).astype(int)
            law = np.bincount(cell - cell.min(), weights=mass[keep])
            infinite = 1 - (1 - infinite) * (1 - never - (lost if upward else 0.0))
            finite, offset = fftconvolve(finite, law), offset + cell.min()
        gain = -np.expm1(epsilon - step * (offset + np.arange(len(finite))))
        gained = np.maximum(finite, 0.0) * np.maximum(
            gain, 0.0
        )  # the transform errs by about 1e-17 at each point
        bounds.append(float(gained.sum()) + infinite)
    return bounds[0], bounds[1]
