"""Records of a map-style data set, fetched one by one, so that none is in the memory of another."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, TensorDataset

from torch_dpsco._owned import owned
from torch_dpsco.errors import UnitError
from torch_dpsco.sampling.row_file import Gathered


class OneByOne(Dataset[Any]):
    """Gives each record of a data set as a copy that is made as it is fetched, in the workers of a DataLoader too.

    A data set may fill one tensor for all of its records, or change what it gave before. What it has besides records is
    found here as well.

    Args:
        source: map-style data set. Its `__getitems__`, which a DataLoader prefers, is asked for one record at a time.
    """

    __getitems__ = None  # else a DataLoader would ask the source for a whole batch

    def __init__(self, source: Dataset[Any]) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        several = getattr(self.source, "__getitems__", None)
        if not several:
            # PRIVACY: the record that is fetched last would be the whole batch
            # (test_a_data_set_that_fills_one_tensor_gives_each_record_once)
            return owned(self.source[index])
        found = several([index])
        if len(found) != 1:
            # PRIVACY: one record would be several (test_a_fetch_of_one_record_gives_one)
            raise UnitError(
                f"dataset.__getitems__ must give one record for one index (got {len(found)})"
            )
        return owned(found[0])

    def __getattr__(self, name: str) -> Any:
        if name == "source" or name.startswith("__"):  # not there yet, as in an unpickled copy
            raise AttributeError(name)
        return getattr(self.source, name)


def one_by_one(dataset: Any) -> Any:
    """Returns a data set whose records nothing writes to, as those of tensors in memory, or `OneByOne` of it."""
    fresh = type(dataset) is TensorDataset or isinstance(
        dataset, (Gathered, OneByOne)
    )  # a subclass may write to them
    return dataset if fresh else OneByOne(dataset)


def source_of(dataset: Any) -> Any:
    """Returns the data set that was given."""
    return dataset.source if isinstance(dataset, OneByOne) else dataset
