"""Budgets, and the filters that decide before an event whether it still fits."""
