"""Layers that record the rows of their own parameters, one file per kind."""
