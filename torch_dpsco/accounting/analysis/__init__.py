"""Privacy curves as pure functions of public numbers: no state, no torch, nothing about any data set.

* `gaussian`: the exact trade-off of unsampled Gaussian noise and its inverses.
* `zcdp`: zero-concentrated privacy to (epsilon, delta) and back.
* `rdp`: Renyi curves of the Gaussian mechanism under Poisson and fixed-size sampling (the latter live in `wor`; the
  integrals behind both in `mixtures` and `quadrature`).
* `convert`: Renyi curves to (epsilon, delta).

Every function returns a bound that holds as returned: epsilon and noise are rounded up, mu and rho down.
"""
