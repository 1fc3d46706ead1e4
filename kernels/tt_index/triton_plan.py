"""The index plan on a GPU: sorts and scans of PyTorch, the rest in Triton, no host synchronisation.

Legend: L lookups, F features, `digits_F` the numbers of `_table_numbers`. The kernels take one
lookup per lane. Everything is sized by L, F*B and sum p2, so nothing waits for U and P.
"""

# mypy: allow-untyped-defs
# Arguments of kernels are pointers and device scalars: they have no Python type.

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .plan import IndexPlan
from .table_batch import TableBatch

_BLOCK = 256
_MAX_INT32 = 2**31 - 1

# Integers that change from batch to batch are not specialised: no recompilation while training.


def build_plan(indices_L: Tensor, offsets: Tensor, batch: TableBatch) -> tuple[IndexPlan, Tensor]:
    """Sorts, deduplicates and groups the ids of a batch of 3-core tables.

    Same result as `reference.build_plan`, bit for bit; but the position of the first id out of
    range (-1: none) stays on the device, `()` int64, so that whoever does not look does not wait.

    Args:
        indices_L: `(L,)` int32 or int64 table-local ids, contiguous.
        offsets: `(F*B + 1,)` int32 or int64, contiguous, checked.
        batch: the tables and features.
    """
    with torch.cuda.device_of(indices_L):
        return _build_plan(indices_L, offsets, batch)


def _build_plan(indices_L: Tensor, offsets: Tensor, batch: TableBatch) -> tuple[IndexPlan, Tensor]:
    num_lookups, num_groups = indices_L.shape[0], batch.core_shapes[1][0]
    numbers_F = _table_numbers(batch.key, indices_L.device)
    position_L = torch.arange(num_lookups, device=indices_L.device, dtype=offsets.dtype)
    bag_of_L = torch.searchsorted(offsets, position_L, right=True, out_int32=True) - 1
    bags_per_feature = max((offsets.shape[0] - 1) // batch.num_features, 1)
    num_blocks = triton.cdiv(num_lookups, _BLOCK)

    key_L = torch.empty(num_lookups, dtype=torch.int64, device=indices_L.device)
    outside_L = torch.empty_like(key_L, dtype=torch.bool)
    if num_lookups:
        _key_kernel[(num_blocks,)](
            indices_L, bag_of_L, numbers_F, key_L, outside_L, num_lookups, bags_per_feature, _BLOCK
        )
    sorted_key_L, order_L = torch.sort(key_L, stable=True)
    bag_L = bag_of_L[order_L]

    # Rows in the low half, prefixes in the high half: one scan counts both.
    changes_L = torch.empty_like(key_L)
    if num_lookups:
        _change_kernel[(num_blocks,)](
            sorted_key_L, bag_L, numbers_F, changes_L, num_lookups, bags_per_feature, _BLOCK
        )
    ranks_L = torch.cumsum(changes_L, 0)

    def new_ints(length: int) -> Tensor:
        return torch.empty(length, dtype=torch.int32, device=indices_L.device)

    row_starts, prefix_starts = new_ints(num_lookups + 1), new_ints(num_lookups + 1)
    i1_P, i2_P, i3_U = new_ints(num_lookups), new_ints(num_lookups), new_ints(num_lookups)
    row_of_sorted_L, counts = new_ints(num_lookups), new_ints(2)
    _level_kernel[(triton.cdiv(num_lookups + 1, _BLOCK),)](
        sorted_key_L,
        bag_L,
        numbers_F,
        ranks_L,
        row_of_sorted_L,
        row_starts,
        i3_U,
        prefix_starts,
        i1_P,
        i2_P,
        counts,
        num_lookups,
        bags_per_feature,
        _BLOCK,
    )
    existing_i2_P = i2_P.masked_fill(position_L >= counts[1], _MAX_INT32)
    group = torch.arange(num_groups + 1, dtype=torch.int32, device=indices_L.device)
    by_bag_L = torch.sort(bag_L, stable=True).indices
    order_L = order_L.to(torch.int32)
    plan = IndexPlan(
        order_L=order_L,
        bag_L=bag_L,
        row_starts=row_starts,
        i3_U=i3_U,
        prefix_starts=prefix_starts,
        i1_P=i1_P,
        i2_P=i2_P,
        group_starts=torch.searchsorted(existing_i2_P, group, out_int32=True),
        pooled_row_L=row_of_sorted_L[by_bag_L],
        pooled_occurrence_L=order_L[by_bag_L],
        offsets=offsets.to(torch.int32, copy=True),
        counts=counts,
    )
    return plan, _first(outside_L)


def _first(flags_L: Tensor) -> Tensor:
    """Position of the first set flag, -1 if there is none, without leaving the device."""
    if not flags_L.shape[0]:
        return torch.full((), -1, dtype=torch.int64, device=flags_L.device)
    flags = flags_L.to(torch.int8)
    return torch.where(flags.any(), flags.argmax(), -1)


@lru_cache(maxsize=4096)  # unsharded collections have one batch per feature
def _table_numbers(key: str, device: torch.device) -> Tensor:
    """`(F, 8)`: what the kernels need to know of the table behind each feature.

    Columns: num_embeddings, p1, p2, p3, first key, first row in the flat cores 0, 1 and 2.
    """
    batch = TableBatch.from_key(key)
    numbers_T = [
        [num_rows, *factors, row_offset, *core_offsets]
        for num_rows, factors, row_offset, core_offsets in zip(
            batch.num_embeddings,
            batch.row_factors,
            batch.row_offsets,
            zip(*batch.core_offsets, strict=True),
            strict=True,
        )
    ]
    return torch.tensor([numbers_T[table] for table in batch.feature_tables], device=device)


@triton.jit(do_not_specialize=["num_lookups", "bags_per_feature"])
def _key_kernel(
    indices_L,
    bag_of_L,
    numbers_F,
    key_L,
    outside_L,
    num_lookups,
    bags_per_feature,
    BLOCK: tl.constexpr,
):
    """Id -> the key it is sorted by; ids out of range count as 0 and are flagged."""
    lookup = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = lookup < num_lookups
    numbers = numbers_F + tl.load(bag_of_L + lookup, mask=exists, other=0) // bags_per_feature * 8
    row = tl.load(indices_L + lookup, mask=exists, other=0).to(tl.int64)
    outside = (row < 0) | (row >= tl.load(numbers))
    row = tl.where(outside, 0, row)
    p1, p2, p3 = tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    i3 = row % p3
    i2 = row // p3 % p2
    i1 = row // p3 // p2
    key = tl.load(numbers + 4) + (i2 * p1 + i1) * p3 + i3
    tl.store(key_L + lookup, key, mask=exists)
    tl.store(outside_L + lookup, outside, mask=exists)


@triton.jit(do_not_specialize=["num_lookups", "bags_per_feature"])
def _change_kernel(
    key_L, bag_L, numbers_F, changes_L, num_lookups, bags_per_feature, BLOCK: tl.constexpr
):
    """Does a row (bit 0), does a prefix (bit 32) begin at this sorted position?"""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = position < num_lookups
    numbers = numbers_F + tl.load(bag_L + position, mask=exists, other=0) // bags_per_feature * 8
    p3, first_key = tl.load(numbers + 3), tl.load(numbers + 4)
    key = tl.load(key_L + position, mask=exists, other=0)
    before = tl.load(key_L + position - 1, mask=exists & (position > 0), other=-1)
    new_row = key != before
    new_prefix = (before < first_key) | ((key - first_key) // p3 != (before - first_key) // p3)
    changes = new_row.to(tl.int64) + (new_prefix.to(tl.int64) << 32)
    tl.store(changes_L + position, changes, mask=exists)


@triton.jit(do_not_specialize=["num_lookups", "bags_per_feature"])
def _level_kernel(
    key_L,
    bag_L,
    numbers_F,
    ranks_L,
    row_of_sorted_L,
    row_starts,
    i3_U,
    prefix_starts,
    i1_P,
    i2_P,
    counts,
    num_lookups,
    bags_per_feature,
    BLOCK: tl.constexpr,
):
    """Writes starts and digits of rows and prefixes, and what lies past the last of them."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = position < num_lookups
    ranks = tl.load(ranks_L + position, mask=exists, other=0)
    before = tl.load(ranks_L + position - 1, mask=exists & (position > 0), other=0)
    row = ((ranks & 0xFFFFFFFF) - 1).to(tl.int32)
    prefix = ((ranks >> 32) - 1).to(tl.int32)
    new_row = exists & ((ranks & 0xFFFFFFFF) != (before & 0xFFFFFFFF))
    new_prefix = exists & ((ranks >> 32) != (before >> 32))

    numbers = numbers_F + tl.load(bag_L + position, mask=exists, other=0) // bags_per_feature * 8
    p1, p3 = tl.load(numbers + 1), tl.load(numbers + 3)
    key = tl.load(key_L + position, mask=exists, other=0) - tl.load(numbers + 4)
    i3 = key % p3 + tl.load(numbers + 7)
    i1 = key // p3 % p1 + tl.load(numbers + 5)
    i2 = key // p3 // p1 + tl.load(numbers + 6)
    tl.store(row_of_sorted_L + position, row, mask=exists)
    tl.store(row_starts + row, position, mask=new_row)
    tl.store(i3_U + row, i3.to(tl.int32), mask=new_row)
    tl.store(prefix_starts + prefix, row, mask=new_prefix)
    tl.store(i1_P + prefix, i1.to(tl.int32), mask=new_prefix)
    tl.store(i2_P + prefix, i2.to(tl.int32), mask=new_prefix)

    last = tl.load(ranks_L + num_lookups - 1, mask=num_lookups > 0, other=0)
    num_rows, num_prefixes = (last & 0xFFFFFFFF).to(tl.int32), (last >> 32).to(tl.int32)
    past_rows = position >= num_rows
    past_prefixes = position >= num_prefixes
    tl.store(row_starts + position, num_lookups, mask=past_rows & (position <= num_lookups))
    tl.store(prefix_starts + position, num_rows, mask=past_prefixes & (position <= num_lookups))
    tl.store(i3_U + position, 0, mask=past_rows & exists)
    tl.store(i1_P + position, 0, mask=past_prefixes & exists)
    tl.store(i2_P + position, 0, mask=past_prefixes & exists)
    if tl.program_id(0) == 0:
        tl.store(counts, num_rows)
        tl.store(counts + 1, num_prefixes)
