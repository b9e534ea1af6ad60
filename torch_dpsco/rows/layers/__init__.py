"""Layers that record the rows of their own parameters, one file per kind; `register` adds one of yours."""

from torch_dpsco.rows.layers.kinds import register
from torch_dpsco.rows.layers.recorded import Formed, Kept, Kind, Use, pairs, require_dims

__all__ = ["Formed", "Kept", "Kind", "Use", "pairs", "register", "require_dims"]
