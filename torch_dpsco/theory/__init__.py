"""Formulas of the papers with explicit constants: plans, step sizes, bounds. Pure functions of public numbers."""
