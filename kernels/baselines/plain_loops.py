"""The loops of `NumbaGroupedPlain`, as a compiler makes of them what they say.

Legend, `shape` and `G2_T`, `G3_T` as in `cpu_kernels.py`. The products are the SIMD tiles of
`tt_lookup`; sorting, pooling and the sums of bag gradients are plain loops. Buffers come from the
caller; `scratch` has `scratch_size` floats.
"""

from __future__ import annotations

import numpy as np
from ecorec_torchrec.kernels.tt_lookup.cpu_simd import matmul
from numba import njit

from .cpu_kernels import (
    _add,
    _address,
    _core3_gradient,
    _prefix_gradient,
    _rows_of_prefix,
)

_DIGIT_BITS = 11
NUM_DIGITS = 1 << _DIGIT_BITS


def scratch_size(shape: tuple[int, ...], max_group: int) -> int:
    q1, q2, q3, r1, r2 = shape
    return 2 * max_group * (q1 * r1 + q1 * q2 * r2) + q1 * q2 * max(q3, r2)


@njit(cache=True, nogil=True)
def sort_by_id(ids, key_bits, source, target, starts):  # type: ignore[no-untyped-def]
    """`id << 32 | occurrence`, sorted: a radix sort of whole ids, 11 bits at a time. The int64
    arrays `source`, `target` (L,) and `starts` are overwritten; one of the first two returned."""
    for i in range(len(ids)):
        source[i] = np.int64(ids[i]) << 32 | i
    mask = (1 << _DIGIT_BITS) - 1
    for shift in range(32, 32 + key_bits, _DIGIT_BITS):
        starts[:] = 0
        for i in range(len(source)):
            starts[((source[i] >> shift) & mask) + 1] += 1
        for digit in range(mask + 1):
            starts[digit + 1] += starts[digit]
        for i in range(len(source)):
            digit = (source[i] >> shift) & mask
            target[starts[digit]] = source[i]
            starts[digit] += 1
        source, target = target, source
    return source


@njit(cache=True, nogil=True)
def find_rows(packed_L, offsets, p2, p3, found):  # type: ignore[no-untyped-def]
    """Rows and prefixes of the sorted lookups, and the row of every occurrence.

    `found` (8, L + 1) int32 is where the results, views of it, are written.
    """
    num_lookups = len(packed_L)
    bag_of_occurrence, bag_L = found[0, :num_lookups], found[1, :num_lookups]
    row_of_occurrence, row_starts, prefix_starts = found[2, :num_lookups], found[3], found[4]
    i1_P, i2_P, i3_U = found[5], found[6], found[7]
    for bag in range(len(offsets) - 1):
        for occurrence in range(offsets[bag], offsets[bag + 1]):
            bag_of_occurrence[occurrence] = bag
    num_rows = num_prefixes = 0
    last_id = last_prefix = np.int64(-1)
    for position in range(num_lookups):
        row_id, occurrence = packed_L[position] >> 32, packed_L[position] & 0xFFFFFFFF
        if row_id != last_id:
            prefix = row_id // p3
            if prefix != last_prefix:
                i1_P[num_prefixes], i2_P[num_prefixes] = prefix // p2, prefix % p2
                prefix_starts[num_prefixes] = num_rows
                num_prefixes += 1
                last_prefix = prefix
            i3_U[num_rows] = row_id - prefix * p3
            row_starts[num_rows] = position
            num_rows += 1
            last_id = row_id
        bag_L[position] = bag_of_occurrence[occurrence]
        row_of_occurrence[occurrence] = num_rows - 1
    row_starts[num_rows], prefix_starts[num_prefixes] = num_lookups, num_rows
    return (
        bag_L, row_of_occurrence, row_starts[: num_rows + 1], prefix_starts[: num_prefixes + 1],
        i1_P[:num_prefixes], i2_P[:num_prefixes], i3_U[:num_rows],
    )  # fmt: skip


@njit(cache=True, nogil=True)
def group_prefixes(i2_P, order_P, group_starts, places) -> None:  # type: ignore[no-untyped-def]
    """Prefixes ordered by i2, and where every i2 begins; `group_starts` comes as zeros."""
    num_groups = len(places)
    for prefix in range(len(i2_P)):
        group_starts[i2_P[prefix] + 1] += 1
    for group in range(num_groups):
        group_starts[group + 1] += group_starts[group]
    places[:] = group_starts[:-1]
    for prefix in range(len(i2_P)):
        order_P[places[i2_P[prefix]]] = prefix
        places[i2_P[prefix]] += 1


@njit(cache=True, nogil=True)
def _group_products(shape, G1, G2, i1_P, order_P, group, begin, end, stacked, products) -> None:  # type: ignore[no-untyped-def]
    """Part 1 of a group as one product: `products` (n, t) = `stacked` (n*q1, r1) @ G2[group]."""
    q1, q2, _, r1, r2 = shape
    width = q2 * r2
    for i in range(begin, end):
        source = G1[i1_P[order_P[i]]]
        for k in range(q1 * r1):
            stacked[(i - begin) * q1 * r1 + k] = source[k]
    matmul(
        _address(products, 0), width, _address(stacked, 0), r1, 1,
        _address(G2, np.int64(group) * r1 * width), width, (end - begin) * q1, width, r1, 0,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def rows_of_groups(  # type: ignore[no-untyped-def]
    shape, G1, G2, G3, i1_P, i3_U, prefix_starts, order_P, group_starts, rows, max_group, scratch,
    low, high,
) -> None:  # fmt: skip
    """The rows of groups low..high, each held transposed, (q3, M)."""
    q1, q2, _, r1, r2 = shape
    size = q1 * q2 * r2
    at_products, at_prefix = max_group * q1 * r1, max_group * (q1 * r1 + size)
    stacked, products = scratch[:at_products], scratch[at_products:at_prefix]
    prefix_T = scratch[at_prefix : at_prefix + size]
    for group in range(low, high):
        begin, end = group_starts[group], group_starts[group + 1]
        if begin == end:
            continue
        _group_products(shape, G1, G2, i1_P, order_P, group, begin, end, stacked, products)
        for i in range(begin, end):
            prefix = order_P[i]
            _rows_of_prefix(
                shape, G3, i3_U, _address(products, np.int64(i - begin) * size),
                _address(prefix_T, 0), rows, 0, prefix_starts[prefix], prefix_starts[prefix + 1],
            )  # fmt: skip


@njit(cache=True, nogil=True)
def pool_bags(shape, rows, row_of_occurrence, offsets, out, scratch, low, high) -> None:  # type: ignore[no-untyped-def]
    """Bags low..high, their lookups one by one in the caller's order."""
    q1, q2, q3, _, _ = shape
    total = scratch[: q1 * q2 * q3]
    for bag in range(low, high):
        total[:] = 0
        for occurrence in range(offsets[bag], offsets[bag + 1]):
            row = rows[row_of_occurrence[occurrence]]
            for k in range(len(total)):
                total[k] += row[k]
        for line in range(q1 * q2):
            for column in range(q3):
                out[bag, line * q3 + column] = total[column * q1 * q2 + line]


@njit(cache=True, nogil=True)
def gradients_of_groups(  # type: ignore[no-untyped-def]
    shape, G1, G2, G2_T, G3_T, i1_P, i3_U, prefix_starts, row_starts, bag_L, order_P, group_starts,
    grad, max_group, dG1, dG2, dG3_T, scratch, low, high,
) -> None:  # fmt: skip
    """Core gradients of groups low..high; dG1 and dG3_T are added to, rows of dG2 written."""
    q1, q2, q3, r1, r2 = shape
    lines, width = q1 * q2, q2 * r2
    size = lines * r2
    at_left, at_products = max_group * q1 * r1, 2 * max_group * q1 * r1
    at_grads = at_products + max_group * size
    at_row = at_grads + max_group * size
    stacked, left_grads = scratch[:at_left], scratch[at_left:at_products]
    products, prefix_grads = scratch[at_products:at_grads], scratch[at_grads:at_row]
    row_grad = scratch[at_row : at_row + lines * q3]
    for group in range(low, high):
        begin, end = group_starts[group], group_starts[group + 1]
        if begin == end:
            continue
        _group_products(shape, G1, G2, i1_P, order_P, group, begin, end, stacked, products)
        for i in range(begin, end):
            prefix, place = order_P[i], np.int64(i - begin) * size
            first = prefix_starts[prefix]
            for row in range(first, prefix_starts[prefix + 1]):
                row_grad[:] = grad[bag_L[row_starts[row]]]
                for position in range(row_starts[row] + 1, row_starts[row + 1]):
                    _add(row_grad, grad[bag_L[position]])
                source, i3 = _address(row_grad, 0), np.int64(i3_U[row])
                _core3_gradient(
                    shape, source, _address(products, place), _address(dG3_T, i3 * q3 * r2), 1
                )
                _prefix_gradient(
                    shape, source, G3_T, i3, _address(prefix_grads, place), np.int64(row > first)
                )
        count = np.int64(end - begin)
        matmul(
            _address(dG2, np.int64(group) * r1 * width), width, _address(stacked, 0), 1, r1,
            _address(prefix_grads, 0), width, r1, width, count * q1, 0,
        )  # fmt: skip
        matmul(
            _address(left_grads, 0), r1, _address(prefix_grads, 0), width, 1,
            _address(G2_T, np.int64(group) * r1 * width), r1, count * q1, r1, width, 0,
        )  # fmt: skip
        for i in range(begin, end):
            start = (i - begin) * q1 * r1
            _add(dG1[i1_P[order_P[i]]], left_grads[start : start + q1 * r1])
