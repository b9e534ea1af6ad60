"""Privacy curves as pure functions of public numbers: no state, no torch, nothing about any data set.

* `gaussian`: the exact trade-off of unsampled Gaussian noise and its inverses.
* `zcdp`: zero-concentrated privacy to (epsilon, delta) and back.
* `rdp`: Renyi curves of the Gaussian mechanism under Poisson and fixed-size sampling (the integrals behind both in
  `quadrature`).
* `pure`, `svt`: mechanisms of a pure epsilon; `shuffle`: shifts of binomial sums.
* `pld` (with `pld_laws`, `pld_compose`): composed privacy loss distributions, and a mu that
  covers them.
* `convert`: Renyi curves and failure probabilities to (epsilon, delta).

Every function returns a bound that holds as returned: epsilon and noise are rounded up, mu and rho down.
"""
