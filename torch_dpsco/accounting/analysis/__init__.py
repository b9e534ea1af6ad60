"""Privacy curves as pure functions of public numbers: no state, no torch, nothing about any data set.

* `gaussian`: the exact trade-off of unsampled Gaussian noise and its inverses.
* `zcdp`: zero-concentrated privacy to (epsilon, delta) and back.
* `rdp`: Renyi curves of the Gaussian mechanism under Poisson and fixed-size sampling (the latter live in `wor`; the
  integrals behind both in `mixtures` and `quadrature`).
* `pure`, `knorm`, `svt`: mechanisms of a pure epsilon; `shuffle`: shifts of binomial sums; `contraction`: noisy
  gradient descent whose last iterate alone is released.
* `group`: several records at once; `odometer`: parameters that depend on what was released.
* `pld` (with `pld_pairs`, `pld_loss`, `pld_grid`, `pld_plan`, `pld_compose`): composed privacy loss distributions, and
  `pld_gdp`: a mu that covers them.
* `convert`, `convert_failures`: Renyi curves and failure probabilities to (epsilon, delta).

Every function returns a bound that holds as returned: epsilon and noise are rounded up, mu and rho down.
"""
