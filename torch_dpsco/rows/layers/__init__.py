"""Layers that record the rows of their own parameters, one file per kind; `register` adds one of yours."""

from torch_dpsco.rows.layers.recorded import Formed, Kept, Kind, Use, pairs, require_dims
from torch_dpsco.rows.layers.table import register

__all__ = ["Formed", "Kept", "Kind", "Use", "pairs", "register", "require_dims"]
