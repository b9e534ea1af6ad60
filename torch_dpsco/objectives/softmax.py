"""Softmax regression: F(W) = (1/N) sum_i c_i (logsumexp(W x_i) - (W x_i)_{y_i}) + (reg/2) ||W||^2 + <q, W>."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_dpsco._doors import typed
from torch_dpsco._validate import nonnegative, positive
from torch_dpsco.losses.softmax import SoftmaxCrossEntropy
from torch_dpsco.objectives.base import Objective
from torch_dpsco.objectives.linear import EVALUATION, norm_up
from torch_dpsco.objectives.records import Records, as_records, gamma


@typed
class SoftmaxObjective(Objective):
    """Cross-entropy of a linear model with K classes; w is W, shape (K, d), flattened row by row.

    Args:
        features: (n, d) floating point, any device; or Records; read in blocks.
        targets: (n,) class numbers of an integer dtype; others than 0..K-1 make null records.
        num_classes: K >= 2, public.
        reg: weight of (1/2)||W||_F^2, >= 0.
        normalizer: N > 0, public.
        weights: (n,) c_i >= 0, or None.
        linear_term: q, (K d,) float64, or None.

    Raises:
        ValueError: if shapes or dtypes do not fit, or a number is out of range.

    Source:
        docs/proofs/objective.md#softmax, docs/proofs/output.md#rounding-of-a-gradient

    Example:
        >>> F = SoftmaxObjective(torch.eye(2), torch.tensor([0, 1]), num_classes=3, reg=0.1, normalizer=2)
        >>> F.dim, round(F.value(torch.zeros(6, dtype=torch.float64)), 4)
        (6, 1.0986)
    """

    def __init__(
        self,
        features: Tensor | Records,
        targets: Tensor | None = None,
        *,
        num_classes: int,
        reg: float,
        normalizer: float,
        weights: Tensor | None = None,
        linear_term: Tensor | None = None,
    ) -> None:
        self.loss = SoftmaxCrossEntropy(num_classes)
        self.records = records = as_records(features, targets, weights, num_classes=self.loss.num_classes)
        self.reg = nonnegative(reg=reg)
        self.normalizer = positive(normalizer=normalizer)
        self.shape = (self.loss.num_classes, records.dim)
        self.dim, self.device = math.prod(self.shape), records.device
        if linear_term is not None and (linear_term.shape != (self.dim,) or linear_term.dtype != torch.float64):
            raise ValueError(f"linear_term must be float64 of shape ({self.dim},) (got {tuple(linear_term.shape)})")
        self.linear_term = linear_term
        norms, up = records.norms * (1 + gamma(records.dim + 8)), 1 + gamma(records.depth + 8)
        self._slope_mass = float(records.total(records.weights * norms)) * math.sqrt(2.0) * up
        self._curvature = float(records.total(records.weights * norms * norms)) / 2 * up
        self.strong_convexity = self.reg
        self.smoothness = (self._curvature / self.normalizer + self.reg) * (1 + gamma(8))

    def value_and_gradient(self, point: Tensor) -> tuple[float, Tensor]:
        """F(W) and its gradient, flattened, in one pass over the data."""
        losses, slopes = self.records.fold(point.view(self.shape), self._terms)
        value = losses / self.normalizer + self.reg / 2 * (point @ point)
        gradient = slopes.flatten() / self.normalizer + self.reg * point
        if self.linear_term is not None:
            value, gradient = value + self.linear_term @ point, gradient + self.linear_term
        return float(value), gradient

    def hessian(self, point: Tensor) -> Tensor:
        """X^T diag(c p_k (1[k = l] - p_l)) X/N in block (k, l), plus reg I; O(n K^2 d^2) and K^2 d^2 memory."""
        classes, dim = self.shape
        chances = self._chances(point)
        total = torch.zeros(classes, dim, classes, dim, dtype=torch.float64, device=self.device)
        for k in range(classes):
            for other in range(k + 1):
                curvature = chances[:, k] * (float(k == other) - chances[:, other])
                block = self.records.gram(self.records.weights * curvature) / self.normalizer
                total[k, :, other] = block
                total[other, :, k] = block
        square = total.view(self.dim, self.dim)
        square.diagonal().add_(self.reg)
        return square

    def gradient_error(self, point: Tensor) -> float:
        """Bound on ||computed - exact gradient||: softmax is 1/2-Lipschitz in the scores, ||p - e_y|| <= sqrt 2."""
        size = norm_up(point)
        scores = gamma(self.shape[1] + 4) * self._curvature * size
        summed = gamma(self.records.depth + EVALUATION + 2 * self.shape[0]) * self._slope_mass
        added = gamma(8) * (self._slope_mass / self.normalizer + self.reg * size + self._linear_size())
        return ((scores + summed) / self.normalizer + added) * (1 + 1e-9)

    def _terms(self, scores: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        targets, weights = self.records.targets[rows], self.records.weights[rows]
        slopes = weights.unsqueeze(1) * self.loss.derivative(scores, targets)
        return weights * self.loss.value(scores, targets), slopes

    def _chances(self, point: Tensor) -> Tensor:
        weight = point.view(self.shape)
        parts = [(block @ weight.T).softmax(1) for _, block in self.records.blocks()]
        return torch.cat(parts) if parts else torch.zeros(0, self.shape[0], dtype=torch.float64, device=self.device)

    def _linear_size(self) -> float:
        return 0.0 if self.linear_term is None else norm_up(self.linear_term)
