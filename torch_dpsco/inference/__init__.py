"""How sure a fitted model is of what it says."""
