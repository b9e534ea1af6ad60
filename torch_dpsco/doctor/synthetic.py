"""Synthetic batches with the shapes and dtypes of a data set's first record; they do not depend on data values.

Inputs are random in (0, 1), or 0 and 1 for integers; targets of (input, target) pairs are 1, or class 0. Alternative
records have other values, and other targets too if the loss takes them (0, or class 1). What is not a tensor after
collating is the first record's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dpsco.compat import tree_flatten, tree_leaves, tree_map, tree_unflatten

_SEED = 20_240_229
_SIZES = (5, 7, 11, 13, 17, 19)


class SyntheticRecords:
    """A pool of synthetic records, from which batches are collated.

    Record i < size and record i + size are two versions of the same position.

    Args:
        record: gives number of tensors, shapes and dtypes.
        collate: makes a batch of a list of records.
        device: where the batches go.
        other_targets: whether the second versions have other targets too.
        ignored: class number that the loss ignores; the second versions of records with several targets have it.

    Raises:
        ValueError: the collated batch has no tensor with a dimension for the records.
    """

    def __init__(
        self,
        record: Any,
        collate: Callable[[list[Any]], Any],
        device: torch.device,
        *,
        other_targets: bool = True,
        ignored: int | None = None,
    ) -> None:
        # a record of a TensorDataset is a view, whose deepcopy copies ALL records: cut the views off once
        self._record = tree_map(
            lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, record
        )
        self._collate = collate
        self._device = device
        leaves, structure = self._template(2)
        more = self._template(3)[0]
        # where all is made up, and for any number of records alike, the collate function is not asked again
        alike = len(more) == len(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves)
        self._structure = structure if alike else None
        self._dims = [
            (
                _batch_dim(leaf, other)
                if isinstance(leaf, Tensor) and isinstance(other, Tensor)
                else None
            )
            for leaf, other in zip(leaves, more[: len(leaves)], strict=True)
        ]
        if all(dim is None for dim in self._dims):
            raise ValueError("a batch must hold a tensor with one entry per record (got none)")
        lengths = {n for leaf in leaves if isinstance(leaf, Tensor) for n in leaf.shape}
        self.size = next((size for size in _SIZES if size not in lengths), _SIZES[0])
        batch = tree_unflatten(leaves, structure)
        self.is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        n_inputs = len(tree_leaves(batch[0])) if self.is_pair else len(leaves)
        generator = torch.Generator().manual_seed(_SEED)
        self._pools: list[Tensor | None] = []
        self._scaled = set()  # the places of inputs that are numbers, which can be large or small
        for place, (leaf, dim) in enumerate(zip(leaves, self._dims, strict=True)):
            if not isinstance(leaf, Tensor):
                self._pools.append(None)
                continue
            shape = [2 * self.size if d == dim else n for d, n in enumerate(leaf.shape)]
            if place < n_inputs:
                self._pools.append(_values(shape, leaf.dtype, generator))
                if dim is not None and leaf.is_floating_point():
                    self._scaled.add(place)
            else:
                self._pools.append(
                    _targets(shape, leaf.dtype, dim if other_targets else None, self.size, ignored)
                )

    def _template(self, size: int) -> tuple[list[Any], Any]:
        batch = self._collate([copy.deepcopy(self._record) for _ in range(size)])
        if isinstance(batch, Mapping) and not isinstance(batch, dict):
            batch = dict(batch)  # e.g. a tokenizer's own mapping
        flat: tuple[list[Any], Any] = tree_flatten(batch)
        return flat

    @property
    def has_numbers(self) -> bool:
        """Whether inputs are numbers that can be large or small."""
        return bool(self._scaled)

    def batch(self, records: Sequence[int], scales: Sequence[float] | None = None) -> Any:
        """Returns the batch of some records of the pool; `scales`: times a number for the inputs of each."""
        index = torch.tensor(list(records))
        made_up = list(self._pools), self._structure
        out, structure = self._template(len(records)) if self._structure is None else made_up
        for place, (pool, dim) in enumerate(zip(self._pools, self._dims, strict=True)):
            if pool is not None:
                values = pool if dim is None else pool.index_select(dim, index)
                if scales is not None and dim is not None and place in self._scaled:
                    shape = [1] * values.dim()
                    shape[dim] = len(records)
                    values = values * torch.tensor(scales, dtype=values.dtype).view(shape)
                out[place] = values.to(self._device)
        return tree_unflatten(out, structure)


def _batch_dim(leaf: Tensor, other: Tensor) -> int | None:
    """Returns the dimension that grows with the number of records."""
    differing = [d for d, (a, b) in enumerate(zip(leaf.shape, other.shape, strict=False)) if a != b]
    return differing[0] if len(differing) == 1 else None


def _values(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _targets(
    shape: list[int], dtype: torch.dtype, dim: int | None, size: int, ignored: int | None
) -> Tensor:
    # 1 is a legal target of every loss that knows labels +-1, labels 0 and 1, or real numbers
    first = 1 if dtype.is_floating_point else 0
    targets = torch.full(shape, first).to(dtype)
    if dim is not None:
        others = targets.narrow(dim, size, size).fill_(1 - first)
        # a mean over the targets that are not ignored couples the records; where a record has one target only, `fit`
        # looks at the batches themselves, for the loss's default would be refused everywhere
        several = [d for d, n in enumerate(others.shape) if d != dim and n > 1]
        if ignored is not None and several and not dtype.is_floating_point:
            others.select(several[0], 0).fill_(ignored)
    return targets
