"""What the patterns know of a batch: its lookups as they come, or sorted by id.

Legend: L lookups, U unique rows, P unique prefixes (i1, i2), B bags, D embedding_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from ecorec_torchrec.kernels.tt_index import TableBatch, index_plan
from ecorec_torchrec.kernels.tt_index.checks import (
    check_layout,
    check_offsets,
    report_out_of_range,
)
from ecorec_torchrec.kernels.tt_index.reference import split_ids
from torch import Tensor


class Shape(NamedTuple):
    """A table of 3 cores: G1 `(p1, 1, q1, r1)`, G2 `(p2, r1, q2, r2)`, G3 `(p3, r2, q3, 1)`."""

    num_embeddings: int
    row_factors: tuple[int, int, int]
    col_factors: tuple[int, int, int]
    ranks: tuple[int, int]

    @property
    def dim(self) -> int:
        q1, q2, q3 = self.col_factors
        return q1 * q2 * q3

    def table(self, row_factors: tuple[int, int, int]) -> TableBatch:
        return TableBatch(
            ("table",),
            (self.num_embeddings,),
            (row_factors,),
            self.col_factors,
            self.ranks,
            ("indices",),
            (0,),
        )


class UnsortedLookups(NamedTuple):
    """The digits and the bag of every lookup, in the caller's order."""

    i1_L: Tensor
    i2_L: Tensor
    i3_L: Tensor
    bag_L: Tensor
    num_bags: int

    @classmethod
    def of(cls, indices_L: Tensor, offsets: Tensor, shape: Shape) -> UnsortedLookups:
        """Splits the ids; TypeError or ValueError if ids or offsets do not fit."""
        batch = shape.table(shape.row_factors)
        check_layout(indices_L, offsets, batch, "fatal")
        check_offsets(indices_L, offsets, batch)
        _, digits, bag_L, first_out_of_range = split_ids(indices_L, offsets, batch)
        i1_L, i2_L, i3_L = digits
        if first_out_of_range >= 0:
            report_out_of_range(first_out_of_range, indices_L, offsets, batch, "fatal")
        return cls(i1_L, i2_L, i3_L, bag_L, len(offsets) - 1)


class SortedLookups(NamedTuple):
    """The lookups of a batch sorted by id, hence by (i1, i2, i3), with what repeats told apart."""

    bag_L: Tensor
    """Sorted position -> bag."""
    row_starts: Tensor
    """(U+1,) unique row -> first sorted position."""
    prefix_starts: Tensor
    """(P+1,) prefix -> first unique row."""
    i1_P: Tensor
    i2_P: Tensor
    i3_U: Tensor
    pooled_row_L: Tensor
    """The unique row of every lookup, bag after bag, ascending within a bag."""
    offsets: Tensor
    """(B+1,) bag -> first entry of `pooled_row_L`."""

    @classmethod
    def of(cls, indices_L: Tensor, offsets: Tensor, shape: Shape) -> SortedLookups:
        """Sorts and deduplicates the ids; TypeError or ValueError if they do not fit.

        An index plan sorts by (i2, i1, i3). Seen as a table with the row factors
        (1, p1 * p2, p3), its order is that of the ids: same sort, and no grouping by i2.
        """
        p1, p2, p3 = shape.row_factors
        plan = index_plan(indices_L, offsets, shape.table((1, p1 * p2, p3)))
        num_rows, num_prefixes = plan.counts.tolist()
        prefix_P = plan.i2_P[:num_prefixes]
        return cls(
            bag_L=plan.bag_L,
            row_starts=plan.row_starts[: num_rows + 1],
            prefix_starts=plan.prefix_starts[: num_prefixes + 1],
            i1_P=prefix_P // p2,
            i2_P=prefix_P % p2,
            i3_U=plan.i3_U[:num_rows],
            pooled_row_L=plan.pooled_row_L,
            offsets=plan.offsets,
        )

    @property
    def num_rows(self) -> int:
        return self.i3_U.shape[0]

    @property
    def num_prefixes(self) -> int:
        return self.i1_P.shape[0]

    @property
    def num_bags(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def prefix_of_row(self) -> Tensor:
        prefixes = torch.arange(self.num_prefixes, device=self.i1_P.device)
        return torch.repeat_interleave(
            prefixes, self.prefix_starts.diff(), output_size=self.num_rows
        )

    @property
    def row_of_lookup(self) -> Tensor:
        """Sorted position -> unique row."""
        rows = torch.arange(self.num_rows, device=self.i3_U.device)
        return torch.repeat_interleave(
            rows, self.row_starts.diff(), output_size=self.bag_L.shape[0]
        )

    def micro_batches(self, max_rows: int | None) -> Iterator[MicroBatch]:
        """Cuts the unique rows in M = ceil(U / max_rows) ranges of near-equal size (None: M = 1).

        A range owns its rows, with all their lookups; a prefix on a cut belongs to both sides.
        """
        num_parts = min(self.num_rows, 1) if max_rows is None else -(-self.num_rows // max_rows)
        bounds = [self.num_rows * part // num_parts for part in range(num_parts)] + [self.num_rows]
        cuts = torch.tensor(bounds, device=self.i3_U.device, dtype=self.prefix_starts.dtype)
        first_prefix = torch.searchsorted(self.prefix_starts, cuts[:-1], right=True) - 1
        end_prefix = torch.searchsorted(self.prefix_starts, cuts[1:])
        ranges = zip(
            bounds[:-1], bounds[1:], first_prefix.tolist(), end_prefix.tolist(),
            self.row_starts[cuts[:-1].long()].tolist(), self.row_starts[cuts[1:].long()].tolist(),
            strict=True,
        )  # fmt: skip
        for row_low, row_high, prefix_low, prefix_high, lookup_low, lookup_high in ranges:
            yield MicroBatch(
                slice(row_low, row_high),
                slice(prefix_low, prefix_high),
                slice(lookup_low, lookup_high),
            )


class MicroBatch(NamedTuple):
    """Ranges of unique rows, of the prefixes they need, and of their sorted lookups."""

    rows: slice
    prefixes: slice
    lookups: slice
