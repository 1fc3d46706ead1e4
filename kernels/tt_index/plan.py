"""What an index plan is made of. The README tells how and why."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class IndexPlan(NamedTuple):
    """The lookups of one batch, sorted and deduplicated: shared by forward and backward.

    L lookups, U unique rows, P unique prefixes (i1, i2). Every tensor is int32 and its size is
    bounded by L, so that nothing has to wait for U and P: only the first U (P) entries mean
    something, starts past them repeat the end, other entries past them are 0.

    Rows are ordered by table, then i2, then i1, then i3 (not by id): so the prefixes that share a
    row of core 1 are neighbours, and so are the rows that share a prefix.
    """

    order_L: Tensor
    """Sorted position -> occurrence (index in the caller's ids); equal rows keep their order."""
    bag_L: Tensor
    """Sorted position -> bag (feature-major, 0..F*B-1), hence ascending within a unique row."""
    row_starts: Tensor
    """(L+1,) unique row -> first sorted position; L from entry U on."""
    i3_U: Tensor
    """(L,) unique row -> row of flat core 2."""
    prefix_starts: Tensor
    """(L+1,) prefix -> first unique row; U from entry P on."""
    i1_P: Tensor
    """(L,) prefix -> row of flat core 0."""
    i2_P: Tensor
    """(L,) prefix -> row of flat core 1, ascending."""
    group_starts: Tensor
    """(sum p2 + 1,) row of flat core 1 -> first prefix that uses it; the last entry is P."""
    pooled_row_L: Tensor
    """The unique row of every lookup, bag after bag (bag b owns offsets[b]..offsets[b+1]), and
    ascending within a bag: the order in which a bag is summed."""
    pooled_occurrence_L: Tensor
    """The occurrence behind each entry of `pooled_row_L`: where its weight lies."""
    offsets: Tensor
    """(F*B+1,) bag -> first lookup; the caller's offsets, copied."""
    counts: Tensor
    """(2,) U and P."""

    @property
    def num_lookups(self) -> int:
        return self.order_L.shape[0]

    @property
    def num_bags(self) -> int:
        return self.offsets.shape[0] - 1

    def unpooled(self) -> IndexPlan:
        """The same lookups with every lookup in a bag of its own, in the caller's order.

        Features of a sequence lookup differ in length, so their plan is made with one bag per
        feature and then cut up by this.
        """
        row_L = torch.empty_like(self.pooled_row_L)
        row_L = row_L.scatter(0, self.pooled_occurrence_L.long(), self.pooled_row_L)
        starts = torch.arange(self.num_lookups + 1, dtype=torch.int32, device=row_L.device)
        return self._replace(
            bag_L=self.order_L,
            pooled_row_L=row_L,
            pooled_occurrence_L=starts[:-1],
            offsets=starts,
        )
