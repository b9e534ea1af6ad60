"""Rows of a linear model in closed form: what a forward and a backward would record, from two products with the data.

For scores s = W x + c the row of a record is the outer product of l'(s; y) and (x, 1), so that neither autograd nor
hooks are needed. `fit` takes this path by itself where model, loss and data allow it, and the ordinary one elsewhere;
oracle, ledger, noise and update are the same code, and the rows are equal up to rounding.

| taken | left to the ordinary path |
|---|---|
| the model is one `nn.Linear`, attached, without hooks of others, its weight before its bias | any other model |
| losses of `torch_dpsco.losses`; BCEWithLogitsLoss, CrossEntropyLoss and MSELoss without options | other losses |
| a TensorDataset of (features (n, d), targets) in memory, of the model's dtype and device | other data |
| the optimizer's `step` is the library's | a subclass with a `step` of its own |

A record's row is a function of that record alone: products are with its own features only. Labels are read as by
`losses.base`; a null record has the slope 0, or NaN in C, which leaves such a row out. The input's factor of the
norms, sqrt(|x|^2 + 1), is computed once per data set.

Source: docs/proofs/rounding.md#closed-forms-and-other-rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from torch_dpsco import compat, native
from torch_dpsco.losses.base import CHANCE, CLASS, REAL, SIGN, Loss, read
from torch_dpsco.losses.table import Logistic, SoftmaxCrossEntropy
from torch_dpsco.rows import FactoredBlock, GradBatch, Summation, input_factors
from torch_dpsco.rows.first_step import random_parameters
from torch_dpsco.rows.layers.recorded import is_recorded
from torch_dpsco.sampling import PrivateLoader, Slots
from torch_dpsco.sampling.loader import Sizes
from torch_dpsco.trial import Leaf
from torch_dpsco.trial.sizes import Trial

# scores (B, K) or (B,), targets -> derivatives of the losses, as scores
_Slope = Callable[[Tensor, Tensor], Tensor]
_BLOCK_ROWS = 8192


class ClosedForm:
    """The rows of one attached Linear layer on a data set in memory.

    Args:
        layer: attached.
        slope: derivative of the loss of a record in its scores.
        features: (n, d) of the layer's dtype and device.
        targets: as `slope` takes them: (n,) for one score.
    """

    def __init__(
        self, layer: nn.Linear, slope: _Slope, features: Tensor, targets: Tensor
    ) -> None:
        self._slope = slope
        self._layer = layer
        self._params: tuple[Tensor, Tensor | None] = layer.weight, layer._parameters["bias"]
        trained = {name for name, p in layer.named_parameters() if p.requires_grad}
        self._trained = {name: name in trained for name in ("weight", "bias")}
        self._columns = [features, targets.contiguous()]
        self._scored: _Scored | None = None
        linear = all(self._trained.values()) and layer.out_features == 1
        factors_of = partial(input_factors, bias="bias" in trained)
        if self._trained["weight"]:
            self._columns.append(torch.cat([factors_of(t) for t in features.split(_BLOCK_ROWS)]))
        if linear and native.suits(features) and layer.weight.is_contiguous() and slope in _IN_C:
            self._scored = _Scored(self._columns, layer, slope)

    def batches(self, loader: PrivateLoader) -> Iterator[GradBatch]:
        """Yields the rows of each batch that the loader delivers, at the parameters as they are then."""
        if self._scored is not None:
            # PRIVACY: no places, no filling: a row in C has the same bits wherever it stands, whatever the others are
            # (test_rows_of_a_fit_in_c_are_the_same_beside_any_others)
            for index in loader.positions():
                yield GradBatch([self._scored if index is None else self._scored.select(index)])
            return
        isolation = loader.isolation
        if loader.slots is not None and (isolation.open or isolation.tested is not None):
            # PRIVACY: of these products, not of those of a forward (test_a_closed_form_is_tested_by_itself)
            isolation.settle(self._sizes(loader.slots))
        for columns in loader.read_only(self._columns):
            yield GradBatch([self._rows(*columns)])

    def _sizes(self, slots: Slots) -> Sizes | str:
        """Returns in what sizes draws may be delivered."""
        features, targets = self._columns[:2]

        def answers(made: list[Tensor]) -> list[Tensor]:
            factors = [known.new_ones(len(made[0])) for known in self._columns[2:]]
            block = self._rows(*made, *factors)
            return [block.backprops, block.norms()]

        leaves = [Leaf((1, *t.shape[1:]), t.dtype, t.device, 0) for t in (features, targets)]
        trial = Trial(answers, leaves, usual=slots.usual, most=slots.most)
        with random_parameters(self._layer):
            return trial.sizes()

    def _rows(
        self, features: Tensor, targets: Tensor, factors: Tensor | None = None
    ) -> FactoredBlock:
        weight, bias = self._params
        if (
            len(weight) == 1
        ):  # a product with a vector is several times faster than one with a matrix of one row
            scores = torch.mv(features, weight.squeeze(0))
            scores = scores if bias is None else scores.add_(bias)
        else:
            scores = nn.functional.linear(features, weight, bias)
        slopes = self._slope(scores, targets).reshape(len(features), len(weight))
        return FactoredBlock(features, slopes, factors=factors, **self._trained)


class _Scored(FactoredBlock):
    """Rows of records of the data set itself, which are scored, clipped and added in one reading, in C.

    Args:
        columns: features, targets and factors of all records.
        layer: of one output.
        slope: one of `_IN_C`.
    """

    _index: Tensor | None = None  # of the records; None for all in their order

    def __init__(self, columns: Sequence[Tensor], layer: nn.Linear, slope: _Slope) -> None:
        features, targets, factors = columns
        self._records = native.Linear(features, targets, factors, _IN_C[slope])
        self._columns = columns
        self._slope = slope
        self._layer = layer
        self.shapes = [layer.weight.shape, layer.bias.shape]

    def __len__(self) -> int:
        known = self._columns[0] if self._index is None else self._index
        return known.shape[0]

    def clipped_sum(
        self, limit: float, scale: float, index: Tensor | slice | None = None
    ) -> Tensor:
        """Returns the sum of the rows, see `Block.clipped_sum`."""
        assert index is None  # no block of these is filled up
        bias = float(self._layer.bias)
        return self._records.sum(limit, scale, self._layer.weight, bias, self._index)

    def norms(self) -> Tensor:
        """Returns certified upper bounds of the rows' norms."""
        return self._factored().norms()

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns the weighted sums for weight and bias."""
        return self._factored().weighted_sum(weights, precision)

    def dense(self) -> list[Tensor]:
        """Returns the rows of weight and bias."""
        return self._factored().dense()

    def select(self, index: Tensor | slice) -> _Scored:
        """Returns some of the rows."""
        assert isinstance(index, Tensor)  # no block of these is filled up
        part = object.__new__(_Scored)  # copy.copy costs three times as much
        part.__dict__.update(self.__dict__)
        part._index = index if self._index is None else self._index[index]
        return part

    def _factored(self) -> FactoredBlock:
        """Returns the rows as an oracle sees them that does not let them be clipped in C."""
        features, targets, factors = map(self._taken, self._columns)
        # PRIVACY: torch's products round by the number of rows, which is private
        # (test_rows_of_a_fit_in_c_are_the_same_beside_any_others)
        params = self._layer.weight, float(self._layer.bias)
        slopes = native.slopes(features, targets, *params, _IN_C[self._slope])
        return FactoredBlock(features, slopes.unsqueeze(1), factors=factors)

    def _taken(self, column: Tensor) -> Tensor:
        return column if self._index is None else column.index_select(0, self._index)


def closed_form(
    model: nn.Module,
    params: Sequence[Tensor],
    loss_fn: Any,
    dataset: Dataset[Any],
    loader: PrivateLoader,
) -> ClosedForm | None:
    """Returns the closed form of the rows of a model on a data set, None if there is none.

    Args:
        model: attached.
        params: its trained parameters, in the order of the optimizer.
        loss_fn: loss_fn(model(input), target) -> scalar, reduced as the model was attached.
        dataset: of (input, target) pairs.
        loader: of the data set, without a collate function of its own.
    """
    if type(dataset) is not TensorDataset or len(dataset.tensors) != 2 or not loader.gathers:
        return None
    features, targets = dataset.tensors
    if not isinstance(model, nn.Linear) or type(model) is not nn.Linear:
        return None
    if not is_recorded(model) or _is_changed(model, loss_fn):
        return None
    own = [model._parameters[name] for name in ("weight", "bias")]
    if [id(p) for p in params] != [id(p) for p in own if p is not None and p.requires_grad]:
        return None
    weight = model.weight
    same = features.dtype == weight.dtype and features.device == weight.device == targets.device
    fits = features.dim() == 2 and features.shape[1] == model.in_features
    if not same or not fits or not features.is_contiguous():
        return None
    mean = bool(model._dpsco.mean)
    found = _slope_of(loss_fn, model.out_features, targets, weight.dtype, mean=mean)
    if found is None:
        return None
    return ClosedForm(model, found[0], features, found[1])


def _is_changed(model: nn.Linear, loss_fn: Any) -> bool:
    """Returns whether a user's hook, or a forward of its own, may make another function of the model or the loss."""
    for module, own in ((model, [1, 1]), (loss_fn, [0, 0])):
        # attach has a hook before and one after the forward
        if isinstance(module, nn.Module):
            hooks = [module._forward_pre_hooks, module._forward_hooks]
            others = len(module._backward_hooks) + len(module._backward_pre_hooks)
            if compat.has_own_forward(module) or [len(each) for each in hooks] != own or others:
                return True
    tensor_hooks = any(p._backward_hooks for p in model.parameters() if p.requires_grad)
    return tensor_hooks or compat.some_global_hook()


def _slope_of(
    loss_fn: Any, outputs: int, targets: Tensor, dtype: torch.dtype, *, mean: bool
) -> tuple[_Slope, Tensor] | None:
    """Returns the derivative of a loss, and the targets as it takes them; None for other losses and targets."""
    if targets.is_complex():
        return None
    if isinstance(loss_fn, Loss):
        own = type(loss_fn)
        column = targets.shape in ((len(targets),), (len(targets), 1))
        fits = mean and column and loss_fn.num_scores == outputs
        if not fits or own.__call__ is not Loss.__call__ or own._align is not Loss._align:
            return None
        if own is Logistic:  # the same numbers in fewer calls
            return _sign_slope, -_labels(SIGN, targets, dtype).nan_to_num(nan=0.0)
        slope = partial(_derivative, loss_fn)
        if loss_fn.target_kind != CLASS:
            return slope, _labels(loss_fn.target_kind, targets, dtype)
        whole = not targets.is_floating_point() and targets.dtype != torch.bool
        return (slope, _classes(targets.reshape(-1), outputs)) if whole else None
    if getattr(loss_fn, "reduction", None) != ("mean" if mean else "sum"):
        return None
    weights = [getattr(loss_fn, name, None) for name in ("weight", "pos_weight")]
    weighted = weights != [None, None]
    if type(loss_fn) is nn.CrossEntropyLoss:
        plain = not weighted and loss_fn.label_smoothing == 0.0
        if not plain or targets.dtype != torch.int64 or targets.dim() != 1 or outputs == 1:
            return None
        ignored = targets == loss_fn.ignore_index
        # in a sum a target that is ignored is a null record; a mean over the others is refused by `fit`
        if mean and bool(ignored.any()):
            return None
        classes = _classes(targets, outputs).masked_fill(ignored, -1)
        return partial(_derivative, SoftmaxCrossEntropy(outputs)), classes
    if outputs != 1 or targets.shape != (len(targets), 1):
        return None
    if type(loss_fn) is nn.BCEWithLogitsLoss and not weighted:
        return _logistic_slope, _labels(CHANCE, targets, dtype)
    square = type(loss_fn) is nn.MSELoss and targets.is_floating_point()
    return (_square_slope, _labels(REAL, targets, dtype)) if square else None


def _labels(kind: str, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns labels (n,) as they are read, NaN for null records."""
    label, known = read(kind, targets.reshape(-1), dtype)
    return torch.where(known, label, math.nan)


def _classes(targets: Tensor, count: int) -> Tensor:
    """Returns class numbers (n,), -1 for null records."""
    return torch.where((targets >= 0) & (targets < count), targets.long(), -1)


def _derivative(loss: Loss, scores: Tensor, targets: Tensor) -> Tensor:
    null = targets < 0 if loss.target_kind == CLASS else targets.isnan()
    slopes = loss.derivative(scores, targets.masked_fill(null, 0))
    return slopes.masked_fill(null.reshape(-1, *[1] * (slopes.dim() - 1)), 0.0)


def _sign_slope(scores: Tensor, opposite: Tensor) -> Tensor:
    """Returns -y sigmoid(-y s) for the opposites -y of the labels."""
    return scores.mul_(opposite).sigmoid_().mul_(opposite)


def _logistic_slope(scores: Tensor, targets: Tensor) -> Tensor:
    return scores.sigmoid_().sub_(targets).masked_fill_(targets.isnan(), 0.0)


def _square_slope(scores: Tensor, targets: Tensor) -> Tensor:
    return scores.sub_(targets).mul_(2.0).masked_fill_(targets.isnan(), 0.0)


_IN_C: dict[_Slope, str] = {
    _sign_slope: "sign",
    _logistic_slope: "logistic",
    _square_slope: "square",
}
