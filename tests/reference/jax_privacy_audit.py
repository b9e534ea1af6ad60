"""Bounds of jax-privacy's auditor on scores that both libraries make for themselves: writes jax_privacy_audit.json.

pip install jax-privacy==2.0.0
python tests/reference/jax_privacy_audit.py
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np

FIGURES = Path(__file__).with_suffix(".json")
CASES = [
    {
        "canaries": canaries,
        "guesses": guesses,
        "mu": mu,
        "confidence": confidence,
        "delta": delta,
    }
    for (canaries, guesses), mu, confidence, delta in itertools.product(
        [(200, 20), (200, 100), (1000, 100), (1000, 500)],
        [0.5, 2.0, 6.0],
        [0.95, 0.999],
        [1e-14, 1e-6, 1e-4],
    )
]


def scores(canaries: int, mu: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns coins, and scores with noise; the old generator gives the same numbers in every version of numpy."""
    rng = np.random.RandomState(7)
    coins = rng.random_sample(canaries) < 0.5
    return coins, coins + rng.standard_normal(canaries) / mu


def main() -> None:
    from jax_privacy.auditing import CanaryScoreAuditor, Explicit

    figures = []
    for case in CASES:
        coins, values = scores(case["canaries"], case["mu"])
        auditor = CanaryScoreAuditor(values[coins], values[~coins])
        at = Explicit(float(np.sort(values)[-case["guesses"]]))
        asked = 1.0 - case["confidence"], case["delta"]
        any_, gaussian = (
            float(bound(*asked, threshold_strategy=at))
            for bound in (auditor.epsilon_one_run, auditor.epsilon_one_run_fdp)
        )
        figures.append(case | {"any": any_, "gaussian": gaussian})
    FIGURES.write_text(json.dumps({"jax-privacy": "2.0.0", "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
