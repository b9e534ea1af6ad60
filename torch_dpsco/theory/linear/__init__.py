"""Linear models (Lowy, Razaviyayn 2021, and others): output and objective perturbation, certificates."""
