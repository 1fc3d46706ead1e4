"""What a data set gives the trainer, and the form that is held in memory."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Literal

import torch

from ecorec_torchrec.train.data.batch import RankBatch, Rows, Schema, make_batch, share_of_rank

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


class Dataset(abc.ABC):
    """Rows in three disjoint splits, shared out over ranks.

    Every rank gets the same number of batches, so that collectives match; every row goes to one
    rank. The last batch of a split may be smaller, and smaller than the number of ranks.

    Attributes:
        schema: the columns.
        seed: splits and shuffling follow from it.
    """

    schema: Schema
    seed: int

    @abc.abstractmethod
    def describe(self) -> str:
        """One line about the sizes of the splits."""

    @abc.abstractmethod
    def num_batches(self, split: Split, batch_size: int) -> int | None:
        """Global batches of a split; None where that would take a pass over a large file."""

    @abc.abstractmethod
    def batches(
        self,
        split: Split,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        epoch: int = 0,
        start_batch: int = 0,
    ) -> Iterator[RankBatch]:
        """This rank's shares of the global batches of a split.

        Args:
            split: train (shuffled anew in every epoch), val or test (in order).
            batch_size: rows of a global batch.
            rank: which share.
            world_size: how many shares.
            epoch: which order of the training rows.
            start_batch: batches to leave out at the start, for a run that goes on.
        """

    def rows_that_occur(self) -> dict[str, int]:
        """Distinct ids of each feature over all splits; empty where that is not known."""
        return {}


class InMemoryDataset(Dataset):
    """A data set whose rows fit into memory.

    Args:
        rows: all rows.
        schema: their columns.
        val_fraction, test_fraction: shares held out, drawn by `seed`.
        seed: see `Dataset`.

    Raises:
        ValueError: a split would hold no row.
    """

    def __init__(
        self, rows: Rows, schema: Schema, *, val_fraction: float, test_fraction: float, seed: int
    ) -> None:
        self.schema = schema
        self.seed = seed
        self._rows = rows
        generator = torch.Generator().manual_seed(seed)
        order_R = torch.randperm(len(rows), generator=generator)
        num_val, num_test = int(len(rows) * val_fraction), int(len(rows) * test_fraction)
        num_train = len(rows) - num_val - num_test
        self._index: dict[Split, torch.Tensor] = dict(
            zip(SPLITS, order_R.split([num_train, num_val, num_test]), strict=True)
        )
        for split, index in self._index.items():
            if not index.numel():
                raise ValueError(f"the {split} split of {len(rows)} rows is empty")

    def split_rows(self, split: Split) -> Rows:
        """The rows of a split, in the order of evaluation."""
        return self._rows.select(self._index[split])

    def describe(self) -> str:
        sizes = ", ".join(f"{split} {index.numel():,}" for split, index in self._index.items())
        return f"{len(self._rows):,} rows: {sizes}"

    def num_batches(self, split: Split, batch_size: int) -> int:
        return -(-self._index[split].numel() // batch_size)

    def batches(
        self,
        split: Split,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        epoch: int = 0,
        start_batch: int = 0,
    ) -> Iterator[RankBatch]:
        index_R = self._index[split]
        if split == "train":
            generator = torch.Generator().manual_seed(epoch_seed(self.seed, epoch))
            index_R = index_R[torch.randperm(index_R.numel(), generator=generator)]
        for global_index in index_R.split(batch_size)[start_batch:]:
            num_rows = global_index.numel()
            share = self._rows.select(global_index[share_of_rank(num_rows, rank, world_size)])
            yield make_batch(share, self.schema, num_rows, world_size)

    def rows_that_occur(self) -> dict[str, int]:
        counts, slot = {}, 0
        for feature in self.schema.sparse:
            ids = self._rows.ids[:, slot : slot + feature.width]
            slot += feature.width
            counts[feature.name] = ids[ids >= 0].unique().numel()
        return counts


def epoch_seed(seed: int, epoch: int) -> int:
    """A seed of its own for every (seed, epoch)."""
    return seed * 1_000_003 + epoch + 1
