"""Records that no memory holds: in blocks, and in partitions on an engine."""
