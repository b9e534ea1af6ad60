"""Trainers and engines of others; each module needs its extra, and is imported only when it is used.

`pip install torch_dpsco[lightning]` for `torch_dpsco.integrations.lightning`, and so on.
"""
