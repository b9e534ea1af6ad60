"""Projections and proximal maps, applied in place to all parameters as one vector; see `Prox`."""

from torch_dpsco.prox.base import Identity, Prox
from torch_dpsco.prox.penalties import L1, L2, ElasticNet
from torch_dpsco.prox.sets import Ball, Box, Simplex, project_on_two_balls_

__all__ = [
    "Ball",
    "Box",
    "ElasticNet",
    "L2",
    "Identity",
    "L1",
    "Prox",
    "Simplex",
    "project_on_two_balls_",
]
