"""Triton kernels of the forward pass, each with its launcher.

Legend: U unique rows, P prefixes (i1, i2), L lookups, D embedding dim; M = q1*q2, COLS = q2*r2,
t = M*r2. A *tile* holds `tile_prefixes` neighbouring prefixes of one group (fewer at the group's
end), a *part* is a run of tiles (`triton_parts.py`). Buffers hold one part: entry 0 is its first
prefix or row. Half-precision cores are widened when they are loaded; all sums are fp32. Integers
that change from part to part or batch to batch are not specialised: no recompilation for them.
"""

# mypy: allow-untyped-defs
# Arguments of kernels are pointers and device scalars: they have no Python type.

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import part_bounds


@triton.jit
def bag_row(bag, bags_per_feature, num_features):
    """Bag (feature-major) -> its row in a `(B*F, D)` view of `(B, F*D)`."""
    return (bag % bags_per_feature).to(tl.int64) * num_features + bag // bags_per_feature


@triton.jit(do_not_specialize=["part"])
def prefix_kernel(
    core0,
    core1,
    prefixes,
    i1_P,
    i2_P,
    tile_starts,
    cuts,
    part,
    Q1: tl.constexpr,
    R1: tl.constexpr,
    COLS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Part 1, a tile per program: `prefixes[j] = core0[i1_j] @ core1[i2]`."""
    first_tile, end_tile, first_prefix, _, _, _ = part_bounds(cuts, part)
    tile = first_tile + tl.program_id(0)
    if tile >= end_tile:
        return
    begin = tl.load(tile_starts + tile)
    end = tl.load(tile_starts + tile + 1)
    i2 = tl.load(i2_P + begin).to(tl.int64)

    line = tl.arange(0, BLOCK_M)  # (prefix, q1)
    prefix = begin + line // Q1
    exists = prefix < end
    i1 = tl.load(i1_P + prefix, mask=exists, other=0).to(tl.int64)
    left = core0 + (i1 * Q1 + line % Q1) * R1
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    right = core1 + i2 * (R1 * COLS) + col
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, R1, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_mask = exists[:, None] & (k < R1)[None, :]
        b_mask = (k < R1)[:, None] & (col < COLS)[None, :]
        a = tl.load(left[:, None] + k[None, :], mask=a_mask, other=0.0).to(tl.float32)
        b = tl.load(right[None, :] + k[:, None] * COLS, mask=b_mask, other=0.0).to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    out = prefixes + ((prefix - first_prefix).to(tl.int64) * Q1 + line % Q1) * COLS
    tl.store(out[:, None] + col[None, :], acc, mask=exists[:, None] & (col < COLS)[None, :])


@triton.jit(do_not_specialize=["part"])
def row_kernel(
    prefixes,
    core2,
    rows,
    i3_U,
    prefix_starts,
    cuts,
    part,
    M: tl.constexpr,
    R2: tl.constexpr,
    Q3: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Part 2, a prefix per program: `rows[u] = prefixes[j] @ core2[i3_u]` for its rows u.

    The rows of a prefix stand side by side: one product of M x (rows * q3).
    """
    _, _, first_prefix, end_prefix, first_row, _ = part_bounds(cuts, part)
    slot = tl.program_id(0)
    prefix = first_prefix + slot
    if prefix >= end_prefix:
        return
    begin = tl.load(prefix_starts + prefix)
    end = tl.load(prefix_starts + prefix + 1)

    ROWS: tl.constexpr = BLOCK_N // Q3
    line = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)  # (row, q3)
    left = prefixes + slot.to(tl.int64) * (M * R2) + line * R2
    for first in range(begin, end, ROWS):
        row = first + column // Q3
        exists = (column < ROWS * Q3) & (row < end)
        i3 = tl.load(i3_U + row, mask=exists, other=0).to(tl.int64)
        right = core2 + i3 * (R2 * Q3) + column % Q3
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, R2, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            a_mask = (line < M)[:, None] & (k < R2)[None, :]
            b_mask = (k < R2)[:, None] & exists[None, :]
            a = tl.load(left[:, None] + k[None, :], mask=a_mask, other=0.0)
            b = tl.load(right[None, :] + k[:, None] * Q3, mask=b_mask, other=0.0).to(tl.float32)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        out = rows + (row - first_row).to(tl.int64) * (M * Q3) + column % Q3
        mask = (line < M)[:, None] & exists[None, :]
        tl.store(out[None, :] + line[:, None] * Q3, acc, mask=mask)


@triton.jit(do_not_specialize=["part", "num_bags", "bags_per_feature", "num_features"])
def pool_kernel(
    rows,
    pooled_row_L,
    pooled_occurrence_L,
    offsets,
    weights_L,
    sums,
    taken_before,
    taken_after,
    out,
    cuts,
    part,
    num_bags,
    bags_per_feature,
    num_features,
    D: tl.constexpr,
    MEAN: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Adds this part's rows to their bags, one after the other in ascending order of rows.

    Between parts a bag's sum (`sums`, fp32) and how many of its lookups it holds (`taken_*`) wait
    in memory, so that the sum is the same chain of additions wherever the batch is cut.
    """
    _, _, _, _, first_row, end_row = part_bounds(cuts, part)
    bag = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = bag < num_bags
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = exists[:, None] & (col < D)[None, :]
    place = bag_row(bag, bags_per_feature, num_features)[:, None] * D + col[None, :]
    begin = tl.load(offsets + bag, mask=exists, other=0)
    end = tl.load(offsets + bag + 1, mask=exists, other=0)
    if FIRST:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        at = begin
    else:
        acc = tl.load(sums + place, mask=mask, other=0.0)
        at = begin + tl.load(taken_before + bag, mask=exists, other=0)

    going = tl.max((at < end).to(tl.int32), 0)
    while going > 0:
        taken = tl.zeros((BLOCK_M,), tl.int32)
        for i in tl.static_range(UNROLL):
            lookup = at + i
            here = lookup < end
            row = tl.load(pooled_row_L + lookup, mask=here, other=0)
            here = here & (row < end_row)
            term = tl.load(
                rows + (row - first_row).to(tl.int64)[:, None] * D + col[None, :],
                mask=here[:, None] & (col < D)[None, :],
                other=0.0,
            )
            if weights_L is not None:
                occurrence = tl.load(pooled_occurrence_L + lookup, mask=here, other=0)
                term *= tl.load(weights_L + occurrence, mask=here, other=0.0)[:, None]
            acc = tl.where(here[:, None], acc + term, acc)
            taken += here.to(tl.int32)
        at += taken
        # Rows ascend within a bag: if the last one was not taken, none behind it is.
        going = tl.max((taken == UNROLL).to(tl.int32), 0)
    if LAST:
        if MEAN:
            acc = acc / tl.maximum(end - begin, 1).to(tl.float32)[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(sums + place, acc, mask=mask)
        tl.store(taken_after + bag, at - begin, mask=exists)
