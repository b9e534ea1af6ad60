"""Output perturbation of SGD: paths, sensitivity, noise and risk of a run."""
