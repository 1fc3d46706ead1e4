"""The loops of EcoRec's pattern on the CPU, compiled by numba, on the SIMD tiles of `tt_lookup`.

Arrays are float32, a flattened core row per row: G1 `(p1, q1*r1)`, G2 `(p2, r1*q2*r2)`,
G3 `(p3, r2*q3)`; `G2_T` and `G3_T` hold each row's matrix transposed. `shape` is
(q1, q2, q3, r1, r2), M = q1*q2, t = M*r2. Rows are held transposed, (q3, M): M is wide enough for
vectors where q3 is not. Every loop works on items low..high, as task of the thread `worker`.

`row_low` and `prefix_low` are the first row and prefix of a micro-batch: its buffers start there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ecorec_torchrec.kernels.tt_index.cpu_jit import compiled
from ecorec_torchrec.kernels.tt_lookup.cpu_simd import gather_sum, matmul, transpose


@compiled()
def _address(array: Any, element: Any) -> Any:
    return np.int64(array.ctypes.data) + np.int64(4) * np.int64(element)


@compiled()
def _add(target, source) -> None:  # type: ignore[no-untyped-def]
    for k in range(len(source)):
        target[k] += source[k]


# Forward


@compiled()
def _prefix_product(shape, G1, G2, i1, i2, target) -> None:  # type: ignore[no-untyped-def]
    """Address `target` (q1, q2*r2) = G1[i1] @ G2[i2]."""
    q1, q2, _, r1, r2 = shape
    width = q2 * r2
    matmul(
        target, width, _address(G1, np.int64(i1) * q1 * r1), r1, 1,
        _address(G2, np.int64(i2) * r1 * width), width, q1, width, r1, 0,
    )  # fmt: skip


@compiled()
def _rows_of_prefix(shape, G3, i3_U, prefix, prefix_T, rows, row_low, first, end) -> None:  # type: ignore[no-untyped-def]
    """Rows first..end of the prefix at address `prefix` (M, r2)."""
    q1, q2, q3, _, r2 = shape
    M = q1 * q2
    transpose(prefix_T, M, prefix, r2, M, r2)
    for row in range(first, end):
        matmul(
            _address(rows, (row - row_low) * M * q3), M,
            _address(G3, np.int64(i3_U[row]) * r2 * q3), 1, q3,
            prefix_T, M, q3, M, r2, 0,
        )  # fmt: skip


@compiled()
def prefix_products(shape, G1, G2, i1_P, i2_P, prefixes, prefix_low, low, high, worker) -> None:  # type: ignore[no-untyped-def]
    q1, q2, _, _, r2 = shape
    for prefix in range(low, high):
        target = _address(prefixes, (prefix - prefix_low) * q1 * q2 * r2)
        _prefix_product(shape, G1, G2, i1_P[prefix], i2_P[prefix], target)


@compiled()
def rows_from_prefixes(  # type: ignore[no-untyped-def]
    shape, G3, i3_U, prefix_starts, prefixes, prefix_low, scratches, rows, row_low, row_high,
    low, high, worker,
) -> None:  # fmt: skip
    """Rows row_low..row_high of prefixes low..high, from the products that `prefixes` holds."""
    q1, q2, _, _, r2 = shape
    for prefix in range(low, high):
        first, end = max(prefix_starts[prefix], row_low), min(prefix_starts[prefix + 1], row_high)
        source = _address(prefixes, (prefix - prefix_low) * q1 * q2 * r2)
        prefix_T = _address(scratches[worker], 0)
        _rows_of_prefix(shape, G3, i3_U, source, prefix_T, rows, row_low, first, end)


@compiled()
def rows_at_once(  # type: ignore[no-untyped-def]
    shape, G1, G2, G3, i1_P, i2_P, i3_U, prefix_starts, scratches, rows, low, high, worker,
) -> None:  # fmt: skip
    """All rows of prefixes low..high; each prefix is used while it is in the cache."""
    q1, q2, _, _, r2 = shape
    product = _address(scratches[worker], 0)
    prefix_T = _address(scratches[worker], q1 * q2 * r2)
    for prefix in range(low, high):
        _prefix_product(shape, G1, G2, i1_P[prefix], i2_P[prefix], product)
        first, end = prefix_starts[prefix], prefix_starts[prefix + 1]
        _rows_of_prefix(shape, G3, i3_U, product, prefix_T, rows, 0, first, end)


@compiled()
def pool(  # type: ignore[no-untyped-def]
    dim, rows, row_low, row_high, pooled_row_L, offsets, next_of_bag, out_T, low, high, worker,
) -> None:  # fmt: skip
    """Adds the rows row_low..row_high to bags low..high of `out_T` (B, D), rows transposed.

    `next_of_bag` is every bag's first entry of `pooled_row_L` not yet summed, and is advanced.
    """
    table = _address(rows, -row_low * dim)
    for bag in range(low, high):
        begin, end = np.int64(next_of_bag[bag]), np.int64(next_of_bag[bag])
        while end < offsets[bag + 1] and pooled_row_L[end] < row_high:
            end += 1
        next_of_bag[bag] = end
        if begin < end:
            gather_sum(
                _address(out_T, bag * dim), table, dim, dim, _address(pooled_row_L, begin), 0,
                end - begin, len(pooled_row_L) - begin, 1,
            )  # fmt: skip


@compiled()
def transpose_rows(target, source, height, width, low, high, worker) -> None:  # type: ignore[no-untyped-def]
    """target[i] (width, height) = source[i] (height, width) transposed."""
    size = height * width
    for i in range(low, high):
        transpose(_address(target, i * size), height, _address(source, i * size), width,
                  height, width)  # fmt: skip


# Backward


@compiled()
def _row_gradient(dim, row, row_starts, bag_L, grad, target) -> None:  # type: ignore[no-untyped-def]
    begin, end = np.int64(row_starts[row]), np.int64(row_starts[row + 1])
    gather_sum(
        target, _address(grad, 0), dim, dim, _address(bag_L, begin), 0, end - begin,
        len(bag_L) - begin, 0,
    )  # fmt: skip


@compiled()
def _core3_gradient(shape, row_grad, prefix, target, accumulate) -> None:  # type: ignore[no-untyped-def]
    """Addresses: target (q3, r2) (+)= row_grad (M, q3)^T @ prefix (M, r2)."""
    q1, q2, q3, _, r2 = shape
    matmul(target, r2, row_grad, 1, q3, prefix, r2, q3, r2, q1 * q2, accumulate)


@compiled()
def _prefix_gradient(shape, row_grad, G3_T, i3, target, accumulate) -> None:  # type: ignore[no-untyped-def]
    """Address target (M, r2) (+)= row_grad (M, q3) @ G3[i3]^T."""
    q1, q2, q3, _, r2 = shape
    right = _address(G3_T, np.int64(i3) * q3 * r2)
    matmul(target, r2, row_grad, q3, 1, right, r2, q1 * q2, r2, q3, accumulate)


@compiled()
def _core2_gradient(shape, G1, i1, prefix_grad, target, accumulate) -> None:  # type: ignore[no-untyped-def]
    """Addresses: target (r1, q2*r2) (+)= G1[i1]^T @ prefix_grad (q1, q2*r2)."""
    q1, q2, _, r1, r2 = shape
    width = q2 * r2
    left = _address(G1, np.int64(i1) * q1 * r1)
    matmul(target, width, left, 1, r1, prefix_grad, width, r1, width, q1, accumulate)


@compiled()
def _core1_gradient(shape, prefix_grad, G2_T, i2, target, accumulate) -> None:  # type: ignore[no-untyped-def]
    """Addresses: target (q1, r1) (+)= prefix_grad (q1, q2*r2) @ G2[i2]^T."""
    q1, q2, _, r1, r2 = shape
    width = q2 * r2
    right = _address(G2_T, np.int64(i2) * r1 * width)
    matmul(target, r1, prefix_grad, width, 1, right, r1, q1, r1, width, accumulate)


@compiled()
def row_items(  # type: ignore[no-untyped-def]
    shape, G3_T, i3_U, prefix_starts, row_starts, bag_L, grad, prefixes, prefix_low, row_grads,
    core3_items, prefix_items, row_low, row_high, low, high, worker,
) -> None:  # fmt: skip
    """The items of rows row_low..row_high of prefixes low..high: row gradient, its addend to G3
    (transposed), its addend to the gradient of its prefix."""
    q1, q2, q3, _, r2 = shape
    M = q1 * q2
    for prefix in range(low, high):
        product = _address(prefixes, (prefix - prefix_low) * M * r2)
        first, end = max(prefix_starts[prefix], row_low), min(prefix_starts[prefix + 1], row_high)
        for row in range(first, end):
            item = row - row_low
            row_grad = _address(row_grads, item * M * q3)
            _row_gradient(M * q3, row, row_starts, bag_L, grad, row_grad)
            core3 = _address(core3_items, item * q3 * r2)
            _core3_gradient(shape, row_grad, product, core3, 0)
            _prefix_gradient(
                shape, row_grad, G3_T, i3_U[row], _address(prefix_items, item * M * r2), 0
            )


@compiled()
def scatter_rows(  # type: ignore[no-untyped-def]
    i3_U, prefix_starts, core3_items, prefix_items, prefix_grads, prefix_low, dG3_copies, row_low,
    row_high, low, high, worker,
) -> None:  # fmt: skip
    """Adds the row items to the thread's copy of dG3 and to the gradients of their prefixes."""
    dG3 = dG3_copies[worker]
    for prefix in range(low, high):
        target = prefix_grads[prefix - prefix_low]
        target.fill(0)
        first, end = max(prefix_starts[prefix], row_low), min(prefix_starts[prefix + 1], row_high)
        for row in range(first, end):
            _add(dG3[i3_U[row]], core3_items[row - row_low])
            _add(target, prefix_items[row - row_low])


@compiled()
def prefix_items(  # type: ignore[no-untyped-def]
    shape, G1, G2_T, i1_P, i2_P, prefix_grads, core1_items, core2_items, prefix_low,
    low, high, worker,
) -> None:  # fmt: skip
    """The items of prefixes low..high: their addends to G1 and to G2."""
    for prefix in range(low, high):
        item = prefix - prefix_low
        source = _address(prefix_grads, item * prefix_grads.shape[1])
        core2 = _address(core2_items, item * core2_items.shape[1])
        _core2_gradient(shape, G1, i1_P[prefix], source, core2, 0)
        core1 = _address(core1_items, item * core1_items.shape[1])
        _core1_gradient(shape, source, G2_T, i2_P[prefix], core1, 0)


@compiled()
def scatter_prefixes(  # type: ignore[no-untyped-def]
    i1_P, i2_P, core1_items, core2_items, dG1_copies, dG2_copies, prefix_low, low, high, worker,
) -> None:  # fmt: skip
    """Adds the prefix items to the thread's copies of dG1 and dG2."""
    for prefix in range(low, high):
        _add(dG1_copies[worker, i1_P[prefix]], core1_items[prefix - prefix_low])
        _add(dG2_copies[worker, i2_P[prefix]], core2_items[prefix - prefix_low])


@compiled()
def gradients_at_once(  # type: ignore[no-untyped-def]
    shape, G1, G2, G2_T, G3_T, i1_P, i2_P, i3_U, prefix_starts, row_starts, bag_L, grad, scratches,
    dG1_copies, dG2_copies, dG3_copies, low, high, worker,
) -> None:  # fmt: skip
    """All gradients of prefixes low..high, added to the thread's copies while in the cache."""
    q1, q2, q3, r1, r2 = shape
    M = q1 * q2
    dG1, dG2, dG3 = dG1_copies[worker], dG2_copies[worker], dG3_copies[worker]
    product = _address(scratches[worker], 0)
    prefix_grad = _address(scratches[worker], M * r2)
    row_grad = _address(scratches[worker], 2 * M * r2)
    for prefix in range(low, high):
        i1, i2 = np.int64(i1_P[prefix]), np.int64(i2_P[prefix])
        _prefix_product(shape, G1, G2, i1, i2, product)
        first = prefix_starts[prefix]
        for row in range(first, prefix_starts[prefix + 1]):
            i3 = np.int64(i3_U[row])
            _row_gradient(M * q3, row, row_starts, bag_L, grad, row_grad)
            _core3_gradient(shape, row_grad, product, _address(dG3, i3 * q3 * r2), 1)
            _prefix_gradient(shape, row_grad, G3_T, i3, prefix_grad, np.int64(row > first))
        _core2_gradient(shape, G1, i1, prefix_grad, _address(dG2, i2 * r1 * q2 * r2), 1)
        _core1_gradient(shape, prefix_grad, G2_T, i2, _address(dG1, i1 * q1 * r1), 1)


@compiled()
def sum_copies(copies, low, high, worker) -> None:  # type: ignore[no-untyped-def]
    """Rows low..high of all copies, added up in copy 0."""
    for row in range(low, high):
        for copy in range(1, len(copies)):
            _add(copies[0, row], copies[copy, row])
