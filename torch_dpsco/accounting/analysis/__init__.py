"""Privacy curves as pure functions of public numbers: no state, no torch, nothing about any data set.

* `gaussian`: the exact trade-off of unsampled Gaussian noise and its inverses.
* `rdp`: Renyi curves of the Gaussian mechanism under Poisson and fixed-size sampling (the integrals behind both in
  `quadrature`), and what epsilon or delta a curve gives.
* `pure`, `svt`: mechanisms of a pure epsilon; `shuffle`: shifts of binomial sums.
* `pld` (with `pld_laws`): composed privacy loss distributions.
* `convert`: failure probabilities, and zero-concentrated privacy to (epsilon, delta) and back.

Every function returns a bound that holds as returned: epsilon and noise are rounded up, mu and rho down.
"""
