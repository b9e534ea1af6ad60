"""Faster ways to the same rows: stacks of recorded layers, for `attach`, and compiled rows, for `fit`."""

from torch_dpsco.acts import register

register("rows.stacks", "torch_dpsco.fast.stack:run_as_one")
register("rows.compiled", "torch_dpsco.fast.compiled:try_compile")
