"""The ledger: what was charged, in memory and on disk."""
