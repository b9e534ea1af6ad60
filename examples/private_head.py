"""A private head on frozen features: a network learns from public images, its last layer from private ones.

    python examples/private_head.py            # eps = 1 on 20,000 private images of 10 classes, half a minute
    python examples/private_head.py --quick    # fewer images, for a smoke test

The images are synthetic: a smooth pattern per class, shifted at random, with noise. The network has seen 20 public
classes; the 10 of the private data are others. Its features are computed once. They, their center and the bound on
their length come from public images, and the head is the only thing that private images change.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from pictures import bars
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from torch_dpsco.estimators import SoftmaxRegression

EPSILON, DELTA = 1.0, 1e-6
PRIVATE, TEST, PUBLIC = 20_000, 5_000, 8_000
QUICK = 2_000, 1_000, 1_000
CLASSES, PUBLIC_CLASSES = 10, 20
SIDE, SHIFT, NOISE, FEATURES = 12, 2, 1.5, 64
EPOCHS, BATCH, LR, SEED = 5, 100, 2e-3, 0


def draw(patterns: Tensor, count: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns images (count, 1, SIDE, SIDE) and their classes."""
    labels = torch.randint(len(patterns), (count,), generator=draws)
    moves = torch.randint(-SHIFT, SHIFT + 1, (count, 2), generator=draws)
    shifted = [torch.roll(patterns[k], tuple(move), (0, 1)) for k, move in zip(labels, moves.tolist(), strict=True)]
    images = torch.stack(shifted) + NOISE * torch.randn(count, SIDE, SIDE, generator=draws)
    return images[:, None], labels


def smooth_patterns(count: int, draws: torch.Generator) -> Tensor:
    """Returns patterns (count, SIDE, SIDE) of low frequencies, of variance 1."""
    waves = torch.randn(count, 1, SIDE // 3, SIDE // 3, generator=draws)
    patterns = nn.functional.interpolate(waves, size=(SIDE, SIDE), mode="bicubic")[:, 0]
    return patterns / patterns.std((1, 2), keepdim=True)


def train(images: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    """Returns a network that was trained on public images, without its last layer."""
    body = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * (SIDE // 4) ** 2, FEATURES), nn.ReLU()),
    )
    model = nn.Sequential(body, nn.Linear(FEATURES, PUBLIC_CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return body.eval()


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, prints private beside non-private accuracy and what was spent, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,000 private and 1,000 public images, one epoch")
    quick = parser.parse_args(argv).quick
    n, n_test, n_public = QUICK if quick else (PRIVATE, TEST, PUBLIC)

    torch.manual_seed(SEED)
    draws = torch.Generator().manual_seed(SEED)
    patterns = smooth_patterns(PUBLIC_CLASSES + CLASSES, draws)
    public = draw(patterns[CLASSES:], n_public, draws)
    body = train(*public, 1 if quick else EPOCHS)
    private, test = draw(patterns[:CLASSES], n, draws), draw(patterns[:CLASSES], n_test, draws)
    with torch.no_grad():  # once: the network does not change any more
        seen, train_rows, test_rows = (body(images) for images, _ in (public, private, test))
    center = seen.mean(0)
    length = float((seen - center).norm(dim=1).quantile(0.9))

    public_map = {"bound_x": 1.0, "feature_center": center.tolist(), "feature_scale": [length] * FEATURES}
    public_map |= {"adjacency": "add_remove", "n": n, "classes": range(CLASSES)}
    head = SoftmaxRegression(epsilon=EPSILON, delta=DELTA, **public_map)
    print(head.plan(FEATURES), "\n")
    head.fit(train_rows, private[1])
    rows, test_set = (((found - center) / length).numpy() for found in (train_rows, test_rows))
    public_head = LogisticRegression(max_iter=500).fit(rows, private[1].numpy())
    figures = {"private": head.score(test_rows, test[1]), "not private": public_head.score(test_set, test[1].numpy())}
    for name, figure in figures.items():
        print(f"{name:<12} accuracy {figure:.4f}")
    print(f"spent: {head.privacy_}")
    bars("accuracy", figures)
    return figures | {"epsilon": head.privacy_.epsilon}


if __name__ == "__main__":
    main()
