"""Regression in the shuffle model: users send bits, a shuffler mixes them, nobody has to be trusted with a record.

    python examples/shuffle_model.py            # 16,000 synthetic users, three runs of each method, a few seconds
    python examples/shuffle_model.py --quick    # 4,000 users and one run each, for a smoke test

In the central model a curator sees all gradients and adds noise. Here each user clips her own gradient, rounds its
coordinates at random to a few bits, and adds some random bits; a shuffler forwards the bits of all users of a batch in
random order. Each user's bits are too few to hide her; those of all users together are enough.

THIS IS A SIMULATION, IN ONE PROCESS THAT SEES ALL GRADIENTS: it draws what the analyzer would receive, and gives no
protection against whoever runs it. And the guarantee is that of the protocol WITH HONEST USERS: those who leave out
their random bits take them from all others. `--honest 0.9` pays for a tenth of users who do.

Both methods are AcceleratedSGD, one pass in five batches, with the same clip and steps, chosen in public; only the
oracle is another one. The clip is a guess, for there is no pilot among users who trust nobody.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch
from pictures import bars
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.shuffle_model import ShuffledClipped

EPSILON, DELTA = 1.0, 1e-5
ADJACENCY = "replace_one"  # the number of users of a batch is public
DIM, STEPS, CLIP = 10, 5, 5.0
USERS, QUICK_USERS, RUNS = 16_000, 4_000, 3
SMOOTHNESS = 1.0  # of the squared loss with standard normal features
LOSS = dp.losses.Squared()


def make_users(n: int, seed: int) -> tuple[TensorDataset, Tensor]:
    """Returns n made-up records with Student-t noise (2.5 degrees of freedom), and the weights behind them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        truth = nn.functional.normalize(torch.randn(DIM), dim=0)
        x = torch.randn(n, DIM)
        noise = torch.distributions.StudentT(2.5).sample((n,))
    return TensorDataset(x, (x @ truth + noise)[:, None]), truth


def make_oracle(n: int, epsilon: float, honest: float) -> ShuffledClipped:
    """Returns the protocol whose batches are (epsilon, delta)-DP each, hence the whole pass."""
    return ShuffledClipped.calibrated(CLIP, n // STEPS, DIM, epsilon=epsilon, delta=DELTA, honest_fraction=honest)


def train(name: str, users: TensorDataset, epsilon: float, honest: float) -> tuple[nn.Module, dp.PrivateOptimizer]:
    """Returns a private model, and the optimizer that knows what was spent."""
    model = nn.Linear(DIM, 1, bias=False)
    nn.init.zeros_(model.weight)
    n, budget = len(users), dp.Budget(epsilon, DELTA, adjacency=ADJACENCY)
    if name == "central":
        problem = dp.Problem(smoothness=SMOOTHNESS)
        plan = dp.AcceleratedSGD.plan(problem=problem, n=n, budget=budget, clip=CLIP, steps=STEPS)
        optimizer: dp.PrivateOptimizer = dp.AcceleratedSGD(model.parameters(), plan)
    else:  # an oracle of its own: put together by hand
        optimizer = dp.PrivateOptimizer(
            model.parameters(),
            lr=1.0 / (4.0 * SMOOTHNESS),
            oracle=make_oracle(n, epsilon, honest),
            rule=dp.rules.Accelerated(),
            design=dp.Disjoint(n // STEPS, n),
            schedule=dp.Schedule((dp.Phase(STEPS),)),
            accountant=dp.Accountant(budget),
        )
    return dp.fit(model, optimizer, users, LOSS, progress=False), optimizer


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, prints how near the answers are, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument("--honest", type=float, default=1.0, help="share of the users who add their random bits")
    parser.add_argument("--quick", action="store_true", help="4,000 users and one run each")
    args = parser.parse_args(argv)

    n, runs = (QUICK_USERS, 1) if args.quick else (USERS, RUNS)
    sizes = make_oracle(n, args.epsilon, args.honest).parameters
    print(f"{n:,} users in {STEPS} batches send {DIM} x ({sizes.grid} + {sizes.noise_bits}) bits each, once\n")
    print(f"{'median excess risk; zero has 0.5':<36}{'':>10}{'epsilon':>10}")
    figures: dict[str, float] = {"bits": DIM * (sizes.grid + sizes.noise_bits)}
    for name in ("central", "shuffled"):
        found = []
        for seed in range(runs):
            users, truth = make_users(n, seed)
            model, optimizer = train(name, users, args.epsilon, args.honest)
            found.append(float((model.weight.detach()[0] - truth).square().sum()) / 2.0)
        figures[f"{name}_excess"] = statistics.median(found)
        figures[f"{name}_epsilon"] = optimizer.report().epsilon
        print(f"{name:<36}{figures[f'{name}_excess']:>10.4f}{figures[f'{name}_epsilon']:>10.4f}")
    print(f"\nof the shuffled model: {optimizer.report().headline}")
    print("  A central simulation; it holds for the protocol, with honest users and a shuffler that only shuffles.")
    bars("median excess risk", figures, "_excess")
    return figures


if __name__ == "__main__":
    main()
