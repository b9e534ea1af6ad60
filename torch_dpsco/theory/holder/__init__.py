"""Hoelder-smooth losses (Wang, Lei, Ying, Zhang): gradient perturbation, stability of SGD."""
