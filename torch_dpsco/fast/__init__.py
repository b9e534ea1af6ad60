"""More ways to rows: stacks of recorded layers and compiled rows, which are faster, and layers in place of torch's."""

from torch_dpsco.acts import register

register("rows.stacks", "torch_dpsco.fast.stack:run_as_one")
register("rows.compiled", "torch_dpsco.fast.compiled:try_compile")
