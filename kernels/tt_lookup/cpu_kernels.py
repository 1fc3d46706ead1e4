"""The loops of the CPU engine, compiled by numba. The README tells the maths.

Cores are float32 matrices of one flattened row per core row: G1 `(sum p1, q1*r1)`,
G2 `(sum p2, r1*q2*r2)`, G3 `(sum p3, r2*q3)`. `shape` is (q1, q2, q3, r1, r2). M = q1*q2, so a
prefix is an (M, r2) matrix and a row is prefix @ G3[i3], (M, q3). Inside, rows are held transposed,
(q3, M): M is wide enough for vectors where q3 is not.

A block is a run of prefixes of one group (one row of G2), whose rows of G1 are stacked: products
with G2[i2] are then real matrix products. Its size depends on the shape alone, and no task writes
what another task touches: results do not depend on threads or on cuts.

`layout` holds the places of a kernel's buffers within its scratch (float32), and its size last.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from ecorec_torchrec.kernels.tt_index.cpu_jit import compiled

from .cpu_simd import gather_sum, matmul, transpose

NUM_COPIES = 8
"""Partial sums per row of the gradients of G1 and G3, so that several threads can add to a row in
a fixed order; also the most threads that the backward of one table keeps busy."""
_MAX_BLOCK_ROWS = 128
_MAX_BLOCK_ELEMENTS = 32_768
_ALIGNMENT = 16  # elements: 64 bytes

Layout = tuple[int, ...]


def block_prefixes(shape: tuple[int, ...]) -> int:
    """Prefixes per block: high matrices that stay in the cache."""
    q1, q2, _, _, r2 = shape
    return max(1, min(_MAX_BLOCK_ROWS, _MAX_BLOCK_ELEMENTS // (q2 * r2)) // q1)


def rows_layout(shape: tuple[int, ...]) -> Layout:
    """Scratch of `compute_rows`: stacked G1 rows, block of prefixes, one prefix transposed."""
    q1, q2, _, r1, r2 = shape
    height = block_prefixes(shape) * q1
    return _layout(height * r1, height * q2 * r2, q1 * q2 * r2)


def bag_layout(shape: tuple[int, ...]) -> Layout:
    """Scratch of `pool_rows` and `weight_gradients`: one row."""
    q1, q2, q3, _, _ = shape
    return _layout(q1 * q2 * q3)


def gradient_layout(shape: tuple[int, ...]) -> Layout:
    """Scratch of `core_gradients`: stacked G1 rows and block of prefixes, the gradients of both,
    a transposed G2 row, the gradient of one row."""
    q1, q2, q3, r1, r2 = shape
    height = block_prefixes(shape) * q1
    block = (height * r1, height * q2 * r2)
    return _layout(*block, *block, r1 * q2 * r2, q1 * q2 * q3)


def _layout(*sizes: int) -> Layout:
    return tuple(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))


@compiled()
def _address(array: Any, element: Any) -> Any:
    return np.int64(array.ctypes.data) + np.int64(4) * np.int64(element)


@compiled()
def _compute_block(shape, G1, G2, i1_P, group, low, high, scratch, stacked, block) -> None:  # type: ignore[no-untyped-def]
    """Stacks the G1 rows of prefixes low..high; block = stacked @ G2[group]."""
    q1, q2, _, r1, r2 = shape
    for prefix in range(low, high):
        G1_row = G1[i1_P[prefix]]
        place = stacked + (prefix - low) * q1 * r1
        for k in range(q1 * r1):
            scratch[place + k] = G1_row[k]
    matmul(
        _address(scratch, block), q2 * r2,
        _address(scratch, stacked), r1, 1,
        _address(G2, group * r1 * q2 * r2), q2 * r2,
        (high - low) * q1, q2 * r2, r1, 0,
    )  # fmt: skip


@compiled()
def compute_rows(  # type: ignore[no-untyped-def]
    shape, G1, G2, G3, i1_P, i2_P, i3_U, prefix_starts, block_size, layout, scratches, rows,
    row_low, low, high, worker,
) -> None:  # fmt: skip
    """The unique rows of prefixes low..high, transposed (q3, M), into the elements of `rows`, which
    begin with row `row_low`."""
    q1, q2, q3, r1, r2 = shape
    stacked, block, prefix_T, _ = layout
    scratch = scratches[worker]
    M = q1 * q2
    start = low
    while start < high:
        group = np.int64(i2_P[start])
        end = start + 1
        while end < high and end < start + block_size and i2_P[end] == group:
            end += 1
        _compute_block(shape, G1, G2, i1_P, group, start, end, scratch, stacked, block)
        for prefix in range(start, end):
            place = block + (prefix - start) * M * r2
            transpose(_address(scratch, prefix_T), M, _address(scratch, place), r2, M, r2)
            for row in range(prefix_starts[prefix], prefix_starts[prefix + 1]):
                matmul(
                    _address(rows, (row - row_low) * M * q3), M,
                    _address(G3, np.int64(i3_U[row]) * r2 * q3), 1, q3,
                    _address(scratch, prefix_T), M,
                    q3, M, r2, 0,
                )  # fmt: skip
        start = end


@compiled()
def _end_of_part(pooled_row_L, begin, end, row_high):  # type: ignore[no-untyped-def]
    """The first entry of begin..end (ascending rows) whose row is not below `row_high`."""
    if begin < end and pooled_row_L[end - 1] < row_high:
        return np.int64(end)
    while begin < end and pooled_row_L[begin] < row_high:
        begin += 1
    return np.int64(begin)


@compiled()
def pool_rows(  # type: ignore[no-untyped-def]
    shape, rows, row_low, row_high, is_last, pooled_row_L, pooled_weights_L, offsets, next_of_bag,
    num_features, mean, scratches, out, low, high, worker,
) -> None:  # fmt: skip
    """Adds the rows row_low..row_high, held in `rows`, to bags low..high of `out` (B, F*D).

    `next_of_bag` holds, per bag, the first entry of `pooled_row_L` not yet summed, and is advanced.
    Between parts `out` holds transposed sums; the last part turns them round and takes the mean.
    """
    q1, q2, q3, _, _ = shape
    M = q1 * q2
    D = M * q3
    scratch = scratches[worker]
    num_bags = (len(offsets) - 1) // num_features
    # Row numbers count from the first row of the batch; only row_low.. is there.
    table = _address(rows, -row_low * D)
    for bag in range(low, high):
        place = (bag % num_bags) * num_features + bag // num_bags
        begin = np.int64(next_of_bag[bag])
        end = _end_of_part(pooled_row_L, begin, offsets[bag + 1], row_high)
        next_of_bag[bag] = end
        started = begin > offsets[bag]
        if begin == end and not is_last:
            continue
        if started:
            for k in range(D):
                scratch[k] = out[place * D + k]
        weights = np.int64(0)
        if len(pooled_weights_L) > 0:
            weights = _address(pooled_weights_L, begin)
        gather_sum(
            _address(scratch, 0), table, D, D, _address(pooled_row_L, begin), weights,
            end - begin, len(pooled_row_L) - begin, np.int64(started),
        )  # fmt: skip
        if not is_last:
            for k in range(D):
                out[place * D + k] = scratch[k]
            continue
        length = offsets[bag + 1] - offsets[bag]
        if mean and length > 1:
            scale = np.float32(1.0) / np.float32(length)
            for k in range(D):
                scratch[k] *= scale
        transpose(_address(out, place * D), q3, _address(scratch, 0), M, q3, M)


@compiled()
def take(values, index, out) -> None:  # type: ignore[no-untyped-def]
    """out = values[index], if there are values."""
    for i in range(len(out)):
        out[i] = values[index[i]]


@compiled(fastmath={"reassoc", "contract"})
def _dot(x, y):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for k in range(len(x)):
        total += x[k] * y[k]
    return total


@compiled()
def weight_gradients(  # type: ignore[no-untyped-def]
    shape, rows, row_low, row_high, pooled_row_L, pooled_occurrence_L, offsets, next_of_bag,
    num_features, mean, scratches, grad, weights_grad_L, low, high, worker,
) -> None:  # fmt: skip
    """`pool_rows`, backward in the weights: <row, gradient of its bag> for bags low..high."""
    q1, q2, q3, _, _ = shape
    M = q1 * q2
    D = M * q3
    scratch = scratches[worker]
    num_bags = (len(offsets) - 1) // num_features
    for bag in range(low, high):
        place = (bag % num_bags) * num_features + bag // num_bags
        begin = np.int64(next_of_bag[bag])
        end = _end_of_part(pooled_row_L, begin, offsets[bag + 1], row_high)
        next_of_bag[bag] = end
        length = np.float32(offsets[bag + 1] - offsets[bag] if mean else 1)
        if begin < end:
            transpose(_address(scratch, 0), M, _address(grad, place * D), q3, M, q3)
        for entry in range(begin, end):
            row = np.int64(pooled_row_L[entry]) - row_low
            dot = _dot(scratch[:D], rows[row * D : (row + 1) * D])
            weights_grad_L[pooled_occurrence_L[entry]] = dot / length


@compiled()
def sorted_lookups(  # type: ignore[no-untyped-def]
    bag_L, order_L, offsets, weights_L, num_features, mean, place_L, factor_L
) -> None:
    """Per sorted lookup: the row of the gradient `(B*F, D)`; weight times scale of its bag.

    With one feature `place_L` is `bag_L`, without weights and mean `factor_L` is empty.
    """
    num_bags = (len(offsets) - 1) // num_features
    if num_features > 1:
        for i in range(len(place_L)):
            place_L[i] = bag_L[i] % num_bags * num_features + bag_L[i] // num_bags
    for i in range(len(factor_L)):
        factor = weights_L[order_L[i]] if len(weights_L) > 0 else np.float32(1)
        if mean:
            factor /= np.float32(offsets[bag_L[i] + 1] - offsets[bag_L[i]])
        factor_L[i] = factor


@compiled()
def _lowest_and_highest(values, low, high):  # type: ignore[no-untyped-def]
    lowest = highest = values[low]
    for i in range(low + 1, high):
        lowest, highest = min(lowest, values[i]), max(highest, values[i])
    return np.int64(lowest), np.int64(highest)


@compiled()
def independent_ranges(group_starts, i1_P, i3_U, prefix_starts, highest, ranges):  # type: ignore[no-untyped-def]
    """Cuts the prefixes where no row of G1 or G3 is used on both sides: at least between tables.

    Entry k of `ranges` (groups + 1, 3) becomes the first prefix, the first G1 row and the first G3
    row of range k; the entry past the last range is the end of all. Returns the number of ranges.
    `highest` (groups, 2) is scratch.
    """
    num_groups = len(group_starts) - 1
    # From the back: the lowest rows of G1 and G3 from each group on.
    lowest_1 = lowest_3 = np.int64(2**62)
    for group in range(num_groups - 1, -1, -1):
        low, high = group_starts[group], group_starts[group + 1]
        if low < high:
            low_1, highest[group, 0] = _lowest_and_highest(i1_P, low, high)
            low_3, highest[group, 1] = _lowest_and_highest(
                i3_U, prefix_starts[low], prefix_starts[high]
            )
            lowest_1, lowest_3 = min(lowest_1, low_1), min(lowest_3, low_3)
        ranges[group, 1], ranges[group, 2] = lowest_1, lowest_3
    # From the front: a cut is free where they lie above the highest rows so far.
    count = 0
    highest_1 = highest_3 = np.int64(-1)
    for group in range(num_groups):
        if group_starts[group] < group_starts[group + 1]:
            lowest_1, lowest_3 = ranges[group, 1], ranges[group, 2]
            if lowest_1 > highest_1 and lowest_3 > highest_3:
                ranges[count, 0] = group_starts[group]
                ranges[count, 1], ranges[count, 2] = lowest_1, lowest_3
                count += 1
            highest_1 = max(highest_1, highest[group, 0])
            highest_3 = max(highest_3, highest[group, 1])
    ranges[count, 0] = group_starts[num_groups]
    ranges[count, 1], ranges[count, 2] = highest_1 + 1, highest_3 + 1
    return count


@compiled()
def core_gradients(  # type: ignore[no-untyped-def]
    shape, G1, G2, G3_T, i1_P, i2_P, i3_U, prefix_starts, group_starts, row_starts, place_L,
    factor_L, grad, block_size, layout, scratches, ranges, dG2, dG1_copies, dG3_copies, num_tasks,
    task, worker,
) -> None:  # fmt: skip
    """Every `num_tasks`-th (range, copy): the groups of a range that add to one copy.

    Recomputes the prefixes of a block, then takes the gradients of all three cores from them while
    they are in the cache: neither the rows nor the prefixes of a batch are ever held.

    Args:
        ranges: `(ranges+1, 3)` of this call, from `independent_ranges`.
        G3_T: `(sum p3, q3*r2)`, each row transposed.
        place_L: sorted lookup -> row of `grad` seen as `(B*F, D)`.
        factor_L: sorted lookup -> factor; empty for "all ones".
        dG1_copies, dG3_copies: `(NUM_COPIES, rows, width)`, the rows from `ranges[0]` on.
    """
    first_1, first_3 = ranges[0, 1], ranges[0, 2]
    scratch = scratches[worker]
    for item in range(task, (len(ranges) - 1) * NUM_COPIES, num_tasks):
        here, copy = item // NUM_COPIES, item % NUM_COPIES
        dG1, dG3 = dG1_copies[copy], dG3_copies[copy]
        dG1[ranges[here, 1] - first_1 : ranges[here + 1, 1] - first_1].fill(0)
        dG3[ranges[here, 2] - first_3 : ranges[here + 1, 2] - first_3].fill(0)
        # Counted from the first group of the range, not of the flat core: a table's neighbours
        # must not decide which of its groups share a copy.
        first_group = np.int64(i2_P[ranges[here, 0]])
        end_group = np.int64(i2_P[ranges[here + 1, 0] - 1]) + 1
        for group in range(first_group + copy, end_group, NUM_COPIES):
            if group_starts[group] < group_starts[group + 1]:
                _group_gradients(
                    group, shape, G1, G2, G3_T, i1_P, i3_U, prefix_starts,
                    np.int64(group_starts[group]), np.int64(group_starts[group + 1]),
                    row_starts, place_L, factor_L, grad, block_size, layout, scratch,
                    dG2, dG1, dG3, first_1, first_3,
                )  # fmt: skip


@compiled()
def _group_gradients(  # type: ignore[no-untyped-def]
    group, shape, G1, G2, G3_T, i1_P, i3_U, prefix_starts, low, high, row_starts, place_L,
    factor_L, grad, block_size, layout, scratch, dG2, dG1, dG3, first_1, first_3,
) -> None:  # fmt: skip
    """dG2[group]; adds to dG1 and dG3, whose rows count from `first_1` and `first_3`."""
    q1, q2, q3, r1, r2 = shape
    stacked, block, stacked_grad, block_grad, G2_T, _, _ = layout
    M, width = q1 * q2, q2 * r2
    G2_address = _address(G2, group * r1 * width)
    dG2_address = _address(dG2, group * r1 * width)
    transpose(_address(scratch, G2_T), r1, G2_address, width, r1, width)
    for start in range(low, high, block_size):
        end = min(start + block_size, high)
        _compute_block(shape, G1, G2, i1_P, group, start, end, scratch, stacked, block)
        for prefix in range(start, end):
            place = (prefix - start) * M * r2
            _prefix_gradients(
                prefix, shape, G3_T, i3_U, prefix_starts, row_starts, place_L, factor_L, grad,
                layout, scratch, block + place, block_grad + place, dG3, first_3,
            )  # fmt: skip
        height = (end - start) * q1
        matmul(
            dG2_address, width,
            _address(scratch, stacked), 1, r1,
            _address(scratch, block_grad), width,
            r1, width, height, np.int64(start > low),
        )  # fmt: skip
        matmul(
            _address(scratch, stacked_grad), r1,
            _address(scratch, block_grad), width, 1,
            _address(scratch, G2_T), r1,
            height, r1, width, 0,
        )  # fmt: skip
        for prefix in range(start, end):
            dG1_row = dG1[i1_P[prefix] - first_1]
            place = stacked_grad + (prefix - start) * q1 * r1
            for k in range(q1 * r1):
                dG1_row[k] += scratch[place + k]


@compiled()
def _prefix_gradients(  # type: ignore[no-untyped-def]
    prefix, shape, G3_T, i3_U, prefix_starts, row_starts, place_L, factor_L, grad, layout, scratch,
    prefix_place, grad_place, dG3, first_3,
) -> None:  # fmt: skip
    """The gradient of one prefix, from the gradients of its rows; adds to dG3 (rows transposed)."""
    q1, q2, q3, _, r2 = shape
    M = q1 * q2
    D = M * q3
    first = prefix_starts[prefix]
    row_grad = _address(scratch, layout[5])
    for row in range(first, prefix_starts[prefix + 1]):
        begin, end = np.int64(row_starts[row]), np.int64(row_starts[row + 1])
        weights = np.int64(0)
        if len(factor_L) > 0:
            weights = _address(factor_L, begin)
        gather_sum(
            row_grad, _address(grad, 0), D, D, _address(place_L, begin), weights,
            end - begin, len(place_L) - begin, 0,
        )  # fmt: skip
        i3 = np.int64(i3_U[row])
        matmul(
            _address(dG3, (i3 - first_3) * q3 * r2), r2,
            row_grad, 1, q3,
            _address(scratch, prefix_place), r2,
            q3, r2, M, 1,
        )  # fmt: skip
        matmul(
            _address(scratch, grad_place), r2,
            row_grad, q3, 1,
            _address(G3_T, i3 * q3 * r2), r2,
            M, r2, q3, np.int64(row > first),
        )  # fmt: skip


@compiled()
def sum_copies(copies, height, width, total, low, high, worker) -> None:  # type: ignore[no-untyped-def]
    """total[low:high] = the sum over the copies, each row (height, width) transposed."""
    for row in range(low, high):
        first = copies[0, row]
        for copy in range(1, NUM_COPIES):
            other = copies[copy, row]
            for k in range(height * width):
                first[k] += other[k]
        transpose(_address(total[row], 0), height, _address(first, 0), width, height, width)
