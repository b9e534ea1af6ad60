"""Records that no memory holds: in blocks, and in partitions on an engine."""

from torch_dpsco.acts import register

register("fit.stored", "torch_dpsco.streams.partitions:as_blocks")
