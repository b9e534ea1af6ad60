"""Privacy curves as pure functions of public numbers: no state, no torch, nothing about any data set.

* `gaussian`: the exact trade-off of unsampled Gaussian noise and its inverses; `risk`: a curve in errors and odds.
* `rdp`: Renyi curves of the Gaussian mechanism under Poisson and fixed-size sampling, what epsilon or delta a curve or
  zero-concentrated privacy gives, and failure probabilities.
* `pure`: mechanisms of a pure epsilon, and noisy tests; `shuffle`: shifts of binomial sums.
* `pld_laws`, `pld`: privacy loss distributions, and what they give composed; `allocation`: passes of
  random allocation.
* `objective`: objective perturbation; `rounding`: what floating-point numbers cost.

Every function returns a bound that holds as returned: epsilon and noise are rounded up, mu and rho down.
"""
