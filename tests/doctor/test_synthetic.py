"""Made-up batches: what they are made from."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from torch_dpsco.diagnosis.probe import SyntheticRecords
from torch_dpsco.diagnosis.script import Script
from torch_dpsco.trial import SyntheticBatches


def test_a_record_that_is_a_view_is_not_copied_with_all_the_others() -> None:
    dataset = TensorDataset(torch.rand(1_000, 3), torch.ones(1_000, 1))
    seen: list[int] = []

    def collate(records: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        seen.extend(
            leaf.untyped_storage().nbytes() // leaf.itemsize
            for record in records
            for leaf in record
        )
        return default_collate(records)

    loader = DataLoader(dataset, collate_fn=collate)
    synthetic = SyntheticRecords(Script(torch.nn.Linear(3, 1), None, loader, None))
    batch = synthetic.batch(SyntheticBatches(synthetic.leaves, 2, 1).batch())
    assert [tuple(leaf.shape) for leaf in batch] == [(2, 3), (2, 1)]
    assert set(seen) == {3, 1}
