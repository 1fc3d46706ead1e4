"""Index plan on the CPU: radix sort, then two passes over the sorted lookups.

Every lookup becomes one int64: its key (see the README), shifted left, or'ed with its occurrence. A
sort by key is then stable, and carries the occurrence along for free.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cpu_jit import compiled
from .cpu_threads import parallel_for
from .plan import IndexPlan
from .table_batch import TableBatch

_MAX_DIGIT_BITS = 11
# Below, waking threads takes longer than the work; the last pass is the longest.
_MIN_LOOKUPS_PER_WORKER = 65_536
_MIN_LOOKUPS_OF_LAST_PASS = 16_384
_BLOCK_LOOKUPS = 2048
_MAX_PACKED_BITS = 63
# `_divide` works in float64.
_MAX_KEY_BITS = 52


def build_plan(indices_L: Tensor, offsets: Tensor, batch: TableBatch) -> tuple[IndexPlan, int]:
    """Sorts and groups the lookups of a batch; equal to `reference.build_plan` bit for bit.

    Args:
        indices_L: `(L,)` table-local ids, int32 or int64, feature after feature, bag after bag.
        offsets: `(F*B+1,)` first lookup of every bag, int32 or int64.
        batch: the tables, with 3 cores each.

    Returns:
        The plan, and the position of the first id outside [0, num_embeddings) or -1. Such an id is
        treated as 0.

    Raises:
        ValueError: the tables have more rows than a key has bits.

    Example: the README draws a plan.
    """
    tables = _table_arrays(batch)
    num_lookups = indices_L.shape[0]
    occurrence_bits = max(num_lookups - 1, 0).bit_length()
    key_bits = int(tables.row_offsets[-1] - 1).bit_length()
    if key_bits > min(_MAX_KEY_BITS, _MAX_PACKED_BITS - occurrence_bits):
        raise ValueError(
            f"the tables have {tables.row_offsets[-1]} rows together (padding included), the limit "
            f"is 2^{min(_MAX_KEY_BITS, _MAX_PACKED_BITS - occurrence_bits)} for {num_lookups} ids"
        )
    num_threads = torch.get_num_threads()
    num_workers = max(1, min(num_threads, num_lookups // _MIN_LOOKUPS_PER_WORKER))
    plan = _empty_plan(num_lookups, offsets.shape[0] - 1, int(tables.core_offsets[1, -1]))
    plan.offsets.copy_(offsets)

    packed_L = np.empty(num_lookups, np.int64)
    occurrence_bag_L = np.empty(num_lookups, np.int32)
    first_bad = np.full(num_workers, num_lookups, np.int64)

    def pack(task: int, worker: int) -> None:
        low, high = _share(num_lookups, task, num_workers)
        starts = plan.offsets.numpy()
        _pack_keys(
            low,
            high,
            max(0, int(np.searchsorted(starts, low, side="right")) - 1),
            indices_L.numpy(),
            starts,
            tables,
            occurrence_bits,
            packed_L,
            occurrence_bag_L,
            first_bad[task:],
        )

    parallel_for(pack, num_workers, num_workers)
    packed_L, scratch_L = _radix_sort(packed_L, occurrence_bits, key_bits, num_workers)
    index: Any = IndexPlan(*[tensor.numpy() for tensor in plan])  # type: ignore[arg-type]

    # A block of bags has about _BLOCK_LOOKUPS lookups.
    block_bits = (_BLOCK_LOOKUPS * plan.num_bags // max(num_lookups, 1)).bit_length()

    def fill(task: int, worker: int) -> None:
        if task == 0:
            _order_bags(
                packed_L, occurrence_bits, occurrence_bag_L, index.offsets[:-1].copy(),
                index.order_L, index.bag_L, index.pooled_row_L, index.pooled_occurrence_L,
                scratch_L, index.offsets[:-1 : 1 << block_bits].astype(np.int64), block_bits,
            )  # fmt: skip
        else:
            _find_rows(
                packed_L, occurrence_bits, tables, index.row_starts, index.i3_U,
                index.prefix_starts, index.i1_P, index.i2_P, index.group_starts, index.counts,
            )  # fmt: skip

    parallel_for(fill, 2, num_threads if num_lookups >= _MIN_LOOKUPS_OF_LAST_PASS else 1)
    return plan, -1 if first_bad.min() == num_lookups else int(first_bad.min())


class _TableArrays(NamedTuple):
    """A `TableBatch` as arrays; the last entry of the offsets is the end of the last table."""

    num_embeddings: np.ndarray  # (T,)
    row_factors: np.ndarray  # (T, 3)
    row_offsets: np.ndarray  # (T+1,)
    core_offsets: np.ndarray  # (3, T+1)
    feature_tables: np.ndarray  # (F,)


@lru_cache(maxsize=4096)  # unsharded collections have one batch per feature
def _table_arrays(batch: TableBatch) -> _TableArrays:
    row_factors = np.array(batch.row_factors, np.int64)
    # Python integers: the product of a user's factors may exceed 64 bits before it is refused.
    rows = [int(p1) * int(p2) * int(p3) for p1, p2, p3 in batch.row_factors]
    row_offsets = list(accumulate(rows, initial=0))
    if row_offsets[-1] > 2**_MAX_KEY_BITS:
        raise ValueError(
            f"the tables have {row_offsets[-1]} rows together (padding included), the limit is "
            f"2^{_MAX_KEY_BITS}"
        )
    core_offsets = np.zeros((3, len(rows) + 1), np.int64)
    np.cumsum(row_factors.T, axis=1, out=core_offsets[:, 1:])
    return _TableArrays(
        np.array(batch.num_embeddings, np.int64),
        row_factors,
        np.array(row_offsets, np.int64),
        core_offsets,
        np.array(batch.feature_tables, np.int64),
    )


def _empty_plan(num_lookups: int, num_bags: int, num_groups: int) -> IndexPlan:
    sizes = {
        "row_starts": num_lookups + 1,
        "prefix_starts": num_lookups + 1,
        "group_starts": num_groups + 1,
        "offsets": num_bags + 1,
        "counts": 2,
    }
    return IndexPlan(
        *(
            torch.empty(sizes.get(name, num_lookups), dtype=torch.int32)
            for name in IndexPlan._fields
        )
    )


def _share(total: int, task: int, num_tasks: int) -> tuple[int, int]:
    return total * task // num_tasks, total * (task + 1) // num_tasks


def _radix_sort(
    packed_L: np.ndarray, occurrence_bits: int, key_bits: int, num_workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """The packed lookups, sorted by key, and an array as large to overwrite: the two may be the
    argument and a new one in any order."""
    num_passes = -(-key_bits // _MAX_DIGIT_BITS)
    source, target = packed_L, np.empty_like(packed_L)
    if num_passes == 0 or len(packed_L) < 2:
        return source, target
    digit_bits = -(-key_bits // num_passes)
    counts = np.empty((num_workers, 1 << digit_bits), np.int64)
    for shift in range(occurrence_bits, occurrence_bits + key_bits, digit_bits):

        def count(task: int, worker: int, source: np.ndarray = source, shift: int = shift) -> None:
            _count_digits(*_share(len(source), task, num_workers), source, shift, counts[task])

        def move(
            task: int,
            worker: int,
            source: np.ndarray = source,
            target: np.ndarray = target,
            shift: int = shift,
        ) -> None:
            low, high = _share(len(source), task, num_workers)
            _move_by_digit(low, high, source, target, shift, counts[task])

        parallel_for(count, num_workers, num_workers)
        _starts_from_counts(counts)
        parallel_for(move, num_workers, num_workers)
        source, target = target, source
    return source, target


@compiled()
def _divide(x: Any, divisor: Any, inverse: Any) -> Any:
    """x // divisor for 0 <= x < 2^52. In float64, so that LLVM makes vectors of it."""
    quotient = np.int64(x * inverse)
    rest = x - quotient * divisor
    return quotient + np.int64(rest >= divisor) - np.int64(rest < 0)


@compiled()
def _pack_keys(  # type: ignore[no-untyped-def]
    low, high, first_bag, indices_L, offsets, tables, occurrence_bits, packed_L, occurrence_bag_L,
    first_bad,
) -> None:  # fmt: skip
    """Keys and bags of the occurrences low..high, the first of which lies in `first_bag`;
    `first_bad[0]` becomes the first bad one."""
    num_features = len(tables.feature_tables)
    num_bags = (len(offsets) - 1) // num_features  # per feature
    for feature in range(num_features):
        begin = max(low, offsets[feature * num_bags])
        end = min(high, offsets[(feature + 1) * num_bags])
        if begin >= end:
            continue
        table = tables.feature_tables[feature]
        num_embeddings, base = tables.num_embeddings[table], tables.row_offsets[table]
        p1, p2, p3 = tables.row_factors[table]
        inverse_2, inverse_3 = 1.0 / p2, 1.0 / p3
        bad = 0
        for occurrence in range(begin, end):
            row = np.int64(indices_L[occurrence])
            is_bad = (row < 0) | (row >= num_embeddings)
            bad += is_bad
            row = np.int64(0) if is_bad else row
            prefix = _divide(row, p3, inverse_3)
            i1 = _divide(prefix, p2, inverse_2)
            key = base + ((prefix - i1 * p2) * p1 + i1) * p3 + (row - prefix * p3)
            packed_L[occurrence] = (key << occurrence_bits) | occurrence
        if bad and first_bad[0] >= len(indices_L):
            for occurrence in range(end - 1, begin - 1, -1):
                row = np.int64(indices_L[occurrence])
                if row < 0 or row >= num_embeddings:
                    first_bad[0] = occurrence
    while first_bag < len(offsets) - 1 and offsets[first_bag] < high:
        for occurrence in range(max(low, offsets[first_bag]), min(high, offsets[first_bag + 1])):
            occurrence_bag_L[occurrence] = first_bag
        first_bag += 1


@compiled()
def _count_digits(low, high, source, shift, counts) -> None:  # type: ignore[no-untyped-def]
    counts[:] = 0
    for i in range(low, high):
        counts[(source[i] >> shift) & (len(counts) - 1)] += 1


@compiled()
def _starts_from_counts(counts) -> None:  # type: ignore[no-untyped-def]
    """(workers, digits) counts -> where each worker writes its first element of each digit."""
    total = 0
    for digit in range(counts.shape[1]):
        for worker in range(counts.shape[0]):
            count = counts[worker, digit]
            counts[worker, digit] = total
            total += count


@compiled()
def _move_by_digit(low, high, source, target, shift, starts) -> None:  # type: ignore[no-untyped-def]
    for i in range(low, high):
        digit = (source[i] >> shift) & (len(starts) - 1)
        target[starts[digit]] = source[i]
        starts[digit] += 1


@compiled()
def _find_rows(  # type: ignore[no-untyped-def]
    packed_L, occurrence_bits, tables, row_starts, i3_U, prefix_starts, i1_P, i2_P, group_starts,
    counts,
) -> None:  # fmt: skip
    """The levels above the sorted lookups: unique rows, prefixes, groups."""
    num_rows, num_prefixes, num_groups = 0, 0, 0
    table = -1
    last_key, prefix_key, prefix_end = np.int64(-1), np.int64(0), np.int64(0)
    table_end, p1, p3 = np.int64(0), np.int64(1), np.int64(1)
    for position in range(len(packed_L)):
        key = packed_L[position] >> occurrence_bits
        if key == last_key:
            continue
        last_key = key
        if key >= prefix_end:
            while key >= table_end:
                table += 1
                table_end = tables.row_offsets[table + 1]
                p1, p3 = tables.row_factors[table, 0], tables.row_factors[table, 2]
            prefix = (key - tables.row_offsets[table]) // p3
            prefix_key = tables.row_offsets[table] + prefix * p3
            prefix_end = prefix_key + p3
            i2 = tables.core_offsets[1, table] + prefix // p1
            prefix_starts[num_prefixes] = num_rows
            i1_P[num_prefixes] = tables.core_offsets[0, table] + prefix % p1
            i2_P[num_prefixes] = i2
            while num_groups <= i2:
                group_starts[num_groups] = num_prefixes
                num_groups += 1
            num_prefixes += 1
        row_starts[num_rows] = position
        i3_U[num_rows] = tables.core_offsets[2, table] + (key - prefix_key)
        num_rows += 1
    row_starts[num_rows:] = len(packed_L)
    i3_U[num_rows:] = 0
    prefix_starts[num_prefixes:] = num_rows
    i1_P[num_prefixes:] = 0
    i2_P[num_prefixes:] = 0
    group_starts[num_groups:] = num_prefixes
    counts[0], counts[1] = num_rows, num_prefixes


@compiled()
def _order_bags(  # type: ignore[no-untyped-def]
    packed_L, occurrence_bits, occurrence_bag_L, next_of_bag, order_L, bag_L, pooled_row_L,
    pooled_occurrence_L, by_block_L, next_of_block, block_bits,
) -> None:  # fmt: skip
    """Occurrence and bag of every sorted lookup, and the lookups of every bag in sorted order.

    In two passes: first to blocks of neighbouring bags, whose part of the results stays in the
    cache when the second takes the lookups of a block to their bags.

    Args:
        next_of_bag: the first lookup of every bag; overwritten.
        by_block_L: int64 scratch.
        next_of_block: the first lookup of every 2^block_bits bags; overwritten.
    """
    occurrence_mask = (np.int64(1) << occurrence_bits) - 1
    row, last_key = np.int64(-1), np.int64(-1)
    for position in range(len(packed_L)):
        key = packed_L[position] >> occurrence_bits
        row += key != last_key
        last_key = key
        occurrence = packed_L[position] & occurrence_mask
        bag = occurrence_bag_L[occurrence]
        order_L[position] = occurrence
        bag_L[position] = bag
        block = bag >> block_bits
        by_block_L[next_of_block[block]] = (row << 32) | occurrence
        next_of_block[block] += 1
    for entry in by_block_L:
        occurrence = entry & 0xFFFFFFFF
        bag = occurrence_bag_L[occurrence]
        slot = next_of_bag[bag]
        next_of_bag[bag] = slot + 1
        pooled_row_L[slot] = entry >> 32
        pooled_occurrence_L[slot] = occurrence
