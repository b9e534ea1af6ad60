"""A private step: sampling x oracle x rule x schedule, paid from a ledger."""
