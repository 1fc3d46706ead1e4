"""The index plan in plain PyTorch, on any device: the truth for the other builders."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .plan import IndexPlan
from .table_batch import TableBatch


class Digits(NamedTuple):
    """Every lookup's table and digits, before the tables' offsets are added."""

    table_L: Tensor
    digits_KL: list[Tensor]
    bag_L: Tensor
    first_out_of_range: int


def split_ids(indices_L: Tensor, offsets: Tensor, batch: TableBatch) -> Digits:
    """Splits ids of K-core tables into digits. Ids out of range count as 0.

    Args:
        indices_L: `(L,)` int32 or int64 table-local ids.
        offsets: `(F*B + 1,)` checked offsets.
        batch: the tables, of any number of cores.
    """
    device, num_bags = indices_L.device, offsets.shape[0] - 1
    bags_per_feature = max(num_bags // batch.num_features, 1)
    bag_L = torch.repeat_interleave(
        torch.arange(num_bags, device=device), offsets.diff(), output_size=indices_L.shape[0]
    )
    table_L = torch.tensor(batch.feature_tables, device=device)[bag_L // bags_per_feature]
    rest_L = indices_L.long()
    outside_L = (rest_L < 0) | (
        rest_L >= torch.tensor(batch.num_embeddings, device=device)[table_L]
    )
    positions = outside_L.nonzero()
    rest_L = rest_L.masked_fill(outside_L, 0)
    digits_KL: list[Tensor] = []
    for k in reversed(range(batch.num_cores)):
        factor_L = torch.tensor([p[k] for p in batch.row_factors], device=device)[table_L]
        digits_KL.insert(0, rest_L % factor_L)
        rest_L = rest_L // factor_L
    return Digits(table_L, digits_KL, bag_L, int(positions[0]) if len(positions) else -1)


def build_plan(indices_L: Tensor, offsets: Tensor, batch: TableBatch) -> tuple[IndexPlan, int]:
    """Sorts, deduplicates and groups the ids of a batch of 3-core tables.

    Args:
        indices_L: `(L,)` int32 or int64 table-local ids, feature after feature.
        offsets: `(F*B + 1,)` int32 or int64, checked (`checks.check_offsets`).
        batch: the tables and features.

    Returns:
        The plan, and the position of the first id out of range (-1: none). Such ids count as 0.
    """
    num_lookups, device = indices_L.shape[0], indices_L.device
    table_L, (d1_L, d2_L, d3_L), bag_of_L, first_out_of_range = split_ids(indices_L, offsets, batch)
    p1_L = torch.tensor([p[0] for p in batch.row_factors], device=device)[table_L]
    p3_L = torch.tensor([p[2] for p in batch.row_factors], device=device)[table_L]
    row_offset_L = torch.tensor(batch.row_offsets, device=device)[table_L]
    key_L, order_L = torch.sort(row_offset_L + (d2_L * p1_L + d1_L) * p3_L + d3_L, stable=True)

    row_starts = _changes(key_L)
    first_U = order_L[row_starts]
    i1_U, i2_U, i3_U = (
        digit_L[first_U] + torch.tensor(core_offset, device=device)[table_L[first_U]]
        for digit_L, core_offset in zip((d1_L, d2_L, d3_L), batch.core_offsets, strict=True)
    )
    prefix_starts = _changes(i1_U, i2_U)
    i1_P, i2_P = i1_U[prefix_starts], i2_U[prefix_starts]
    num_groups = batch.core_shapes[1][0]
    group_starts = torch.searchsorted(i2_P, torch.arange(num_groups + 1, device=device))

    num_rows, num_prefixes = len(row_starts), len(prefix_starts)
    row_of_sorted_L = torch.repeat_interleave(
        torch.arange(num_rows, device=device), _lengths(row_starts, num_lookups)
    )
    bag_L = bag_of_L[order_L]
    by_bag_L = torch.argsort(bag_L, stable=True)
    plan = IndexPlan(
        order_L=order_L,
        bag_L=bag_L,
        row_starts=_pad(row_starts, num_lookups + 1, num_lookups),
        i3_U=_pad(i3_U, num_lookups, 0),
        prefix_starts=_pad(prefix_starts, num_lookups + 1, num_rows),
        i1_P=_pad(i1_P, num_lookups, 0),
        i2_P=_pad(i2_P, num_lookups, 0),
        group_starts=group_starts,
        pooled_row_L=row_of_sorted_L[by_bag_L],
        pooled_occurrence_L=order_L[by_bag_L],
        offsets=offsets,
        counts=torch.tensor([num_rows, num_prefixes], device=device),
    )
    return IndexPlan(*(x.to(torch.int32, copy=True) for x in plan)), first_out_of_range


def _changes(*columns: Tensor) -> Tensor:
    """Positions at which any of the columns differs from its predecessor; 0 is one of them."""
    changed = torch.ones_like(columns[0], dtype=torch.bool)
    if len(changed):
        changed[1:] = torch.stack([x[1:] != x[:-1] for x in columns]).any(0)
    return changed.nonzero().squeeze(1)


def _lengths(starts: Tensor, end: int) -> Tensor:
    return torch.diff(starts, append=starts.new_tensor([end]))


def _pad(values: Tensor, length: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)), value=fill)
