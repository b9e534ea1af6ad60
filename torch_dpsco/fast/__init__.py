"""More ways to rows: stacks of recorded layers and compiled rows, which are faster, and layers in place of torch's.

And kernels for devices: `on_device` and `rows_on_device` call those of `kernels`.
"""

from torch_dpsco.acts import register

register("rows.stacks", "torch_dpsco.fast.stack:run_as_one")
register("noise.on_device", "torch_dpsco.fast.on_device:add_normal_")
register("rows.compiled", "torch_dpsco.fast.compiled:try_compile")
register("rows.on_device", "torch_dpsco.fast.rows_on_device:usable")
register("rows.suits", "torch_dpsco.fast.rows_on_device:suits")
register("rows.norms", "torch_dpsco.fast.rows_on_device:norms")
register("rows.outer_sums", "torch_dpsco.fast.rows_on_device:outer_sums")
register("rows.sequences", "torch_dpsco.fast.rows_on_device:sequences")
register("rows.items", "torch_dpsco.fast.rows_on_device:items")
register("rows.grouped", "torch_dpsco.fast.rows_on_device:grouped")
