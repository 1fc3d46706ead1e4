"""Rows as tensors, and one rank's share of a global batch.

Legend: R rows, W id slots of a row (the widths of all sparse features together), B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

EMPTY_SLOT = -1


@dataclass(frozen=True)
class SparseFeature:
    """A feature and the table of the same name that it reads."""

    name: str
    num_embeddings: int
    width: int = 1
    """The most ids a bag of this feature holds."""


@dataclass(frozen=True)
class Schema:
    """What the columns of a data set are."""

    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]

    @property
    def num_slots(self) -> int:
        return sum(feature.width for feature in self.sparse)


@dataclass
class Rows:
    """Rows of a data set, column by column.

    Attributes:
        dense: `(R, number of dense features)` float32.
        ids: `(R, W)` int64, the slots of all sparse features side by side; `EMPTY_SLOT` where a
            bag has fewer ids than its feature's width.
        labels: `(R,)` float32, 0 or 1.
    """

    dense: Tensor
    ids: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return self.labels.numel()

    def select(self, index_R: Tensor) -> Rows:
        return Rows(self.dense[index_R], self.ids[index_R], self.labels[index_R])


@dataclass
class RankBatch(Batch):
    """TorchRec's `Batch`, one rank's share of a global batch.

    `loss_scale` is world size / rows of the global batch, a 0-d float32: a rank's summed loss
    times it, averaged over the ranks, is the mean over the global batch, however uneven the shares
    are and even where a rank has no row.
    """

    loss_scale: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> RankBatch:
        return RankBatch(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.loss_scale.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        self.loss_scale.record_stream(stream)

    def pin_memory(self) -> RankBatch:
        return RankBatch(
            self.dense_features.pin_memory(),
            self.sparse_features.pin_memory(),
            self.labels.pin_memory(),
            self.loss_scale.pin_memory(),
        )


def share_of_rank(num_rows: int, rank: int, world_size: int) -> slice:
    """The rows of a global batch that a rank trains on: every row on one rank, evenly.

    Example::

        [share_of_rank(5, rank, 2) for rank in range(2)]  # [slice(0, 2), slice(2, 5)]
        [share_of_rank(1, rank, 2) for rank in range(2)]  # [slice(0, 0), slice(0, 1)]
    """
    return slice(num_rows * rank // world_size, num_rows * (rank + 1) // world_size)


def make_batch(rows: Rows, schema: Schema, global_rows: int, world_size: int) -> RankBatch:
    """A batch of all of `rows`, which are one rank's share of `global_rows` rows."""
    values, lengths, slot = [], [], 0
    for feature in schema.sparse:
        ids_BW = rows.ids[:, slot : slot + feature.width]
        slot += feature.width
        filled_BW = ids_BW != EMPTY_SLOT
        values.append(ids_BW[filled_BW])
        lengths.append(filled_BW.sum(dim=1, dtype=torch.int32))
    return RankBatch(
        dense_features=rows.dense,
        sparse_features=KeyedJaggedTensor(
            keys=[feature.name for feature in schema.sparse],
            values=torch.cat(values),
            lengths=torch.cat(lengths),
        ),
        labels=rows.labels,
        loss_scale=torch.tensor(world_size / global_rows),
    )


def fold_ids(batches: Iterator[RankBatch], rows_by_feature: dict[str, int]) -> Iterator[RankBatch]:
    """Reduces the ids of the named features modulo the given rows: hashing into a smaller table."""
    for batch in batches:
        kjt = batch.sparse_features
        values = kjt.values().clone()
        starts = kjt.offset_per_key()
        for feature, (start, stop) in zip(
            kjt.keys(), zip(starts, starts[1:], strict=False), strict=True
        ):
            if feature in rows_by_feature:
                values[start:stop] %= rows_by_feature[feature]
        folded = KeyedJaggedTensor(keys=kjt.keys(), values=values, lengths=kjt.lengths())
        yield RankBatch(batch.dense_features, folded, batch.labels, batch.loss_scale)
