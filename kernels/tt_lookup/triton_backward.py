"""Triton kernels of the backward pass. Legend and conventions as in `triton_forward.py`.

Every sum has one owner and a fixed order, so there are no atomics. Where a segment may be too long
for one program it is summed in *pieces* of a fixed number of entries, counted from the segment's
own start: what else is in the batch, and where it is cut, moves no piece boundary.

    segment               entries   piece i of segment s (first entry at `starts[s]`)
    row of the table      lookups   full pieces only, the rest is added by the row's owner
    row of core 0, 2      prefixes, rows; every piece has a slot `starts[s] // PIECE + s + i`
"""

# mypy: allow-untyped-defs
# Arguments of kernels are pointers and device scalars: they have no Python type.

from __future__ import annotations

import triton
import triton.language as tl

from .triton_forward import bag_row
from .triton_parts import part_bounds


@triton.jit
def lookup_scale(order_L, bag, position, offsets, weights_L, mask, MEAN: tl.constexpr):
    """Factor of each sorted lookup's bag gradient: weight, and 1 / length under `mean`."""
    scale = mask.to(tl.float32)
    if MEAN:
        length = tl.load(offsets + bag + 1, mask=mask, other=1)
        length -= tl.load(offsets + bag, mask=mask, other=0)
        scale = scale / length.to(tl.float32)
    if weights_L is not None:
        occurrence = tl.load(order_L + position, mask=mask, other=0)
        scale *= tl.load(weights_L + occurrence, mask=mask, other=0.0)
    return scale


@triton.jit(do_not_specialize=["bags_per_feature", "num_features"])
def row_piece_kernel(
    grad,
    piece_rows,
    row_starts,
    order_L,
    bag_L,
    offsets,
    weights_L,
    pieces,
    bags_per_feature,
    num_features,
    D: tl.constexpr,
    MEAN: tl.constexpr,
    PIECE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sums the bag gradients of one full piece of a row that occurs very often.

    Slot i is of the piece that begins within [i*PIECE, (i+1)*PIECE), if there is one: it covers
    the last position there, and `piece_rows` is the row at that position.
    """
    slot = tl.program_id(0)
    row = tl.load(piece_rows + slot)
    start = tl.load(row_starts + row)
    begin = start + ((slot + 1) * PIECE - 1 - start) // PIECE * PIECE
    if begin + PIECE > tl.load(row_starts + row + 1):
        return
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for step in range(0, PIECE, STEP):
        position = begin + step + tl.arange(0, STEP)
        bag = tl.load(bag_L + position)
        exists = position >= 0
        scale = lookup_scale(order_L, bag, position, offsets, weights_L, exists, MEAN)
        values = tl.load(
            grad + bag_row(bag, bags_per_feature, num_features)[:, None] * D + col[None, :],
            mask=(col < D)[None, :],
            other=0.0,
        ).to(tl.float32)
        acc += tl.sum(scale[:, None] * values, 0)
    tl.store(pieces + slot.to(tl.int64) * D + col, acc, mask=col < D)


@triton.jit(do_not_specialize=["part", "bags_per_feature", "num_features"])
def row_grad_kernel(
    grad,
    pieces,
    row_starts,
    order_L,
    bag_L,
    offsets,
    weights_L,
    row_grads,
    cuts,
    part,
    bags_per_feature,
    num_features,
    D: tl.constexpr,
    MEAN: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Gradient of every unique row: its full pieces, then the other lookups one by one."""
    _, _, _, _, first_row, end_row = part_bounds(cuts, part)
    row = first_row + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < end_row
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(row_starts + row, mask=exists, other=0)
    end = tl.load(row_starts + row + 1, mask=exists, other=0)
    num_pieces = (end - start) // PIECE

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for piece in range(0, tl.max(num_pieces, 0)):
        slot = (start // PIECE + piece).to(tl.int64)
        here = piece < num_pieces
        mask = here[:, None] & (col < D)[None, :]
        values = tl.load(pieces + slot[:, None] * D + col[None, :], mask=mask, other=0.0)
        acc = tl.where(here[:, None], acc + values, acc)
    start += num_pieces * PIECE
    for step in range(0, tl.max(end - start, 0), UNROLL):
        for i in tl.static_range(UNROLL):
            position = start + step + i
            here = position < end
            bag = tl.load(bag_L + position, mask=here, other=0)
            scale = lookup_scale(order_L, bag, position, offsets, weights_L, here, MEAN)
            values = tl.load(
                grad + bag_row(bag, bags_per_feature, num_features)[:, None] * D + col[None, :],
                mask=here[:, None] & (col < D)[None, :],
                other=0.0,
            ).to(tl.float32)
            acc = tl.where(here[:, None], acc + scale[:, None] * values, acc)
    out = row_grads + (row - first_row).to(tl.int64)[:, None] * D + col[None, :]
    tl.store(out, acc, mask=exists[:, None] & (col < D)[None, :])


@triton.jit(do_not_specialize=["part", "num_lookups", "bags_per_feature", "num_features"])
def weight_grad_kernel(
    grad,
    rows,
    row_of_sorted_L,
    order_L,
    bag_L,
    offsets,
    weight_grads,
    cuts,
    part,
    num_lookups,
    bags_per_feature,
    num_features,
    D: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradient of every lookup's weight: its row times the gradient of its bag."""
    _, _, _, _, first_row, end_row = part_bounds(cuts, part)
    position = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = position < num_lookups
    row = tl.load(row_of_sorted_L + position, mask=exists, other=0)
    exists = exists & (row >= first_row) & (row < end_row)
    if tl.max(exists.to(tl.int32), 0) == 0:
        return
    bag = tl.load(bag_L + position, mask=exists, other=0)
    row_at = rows + (row - first_row).to(tl.int64) * D
    grad_at = grad + bag_row(bag, bags_per_feature, num_features) * D
    dot = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, D, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        mask = exists[:, None] & (col < D)[None, :]
        values = tl.load(row_at[:, None] + col[None, :], mask=mask, other=0.0)
        grads = tl.load(grad_at[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
        dot += tl.sum(values * grads, 1)
    dot *= lookup_scale(order_L, bag, position, offsets, None, exists, MEAN)
    occurrence = tl.load(order_L + position, mask=exists, other=0)
    tl.store(weight_grads + occurrence, dot, mask=exists)


@triton.jit(do_not_specialize=["part"])
def prefix_grad_kernel(
    row_grads,
    core2,
    prefix_grads,
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
    """A prefix per program: `prefix_grads[j] = sum_u row_grads[u] @ core2[i3_u]^T`.

    One product whose inner dimension runs over (row, q3).
    """
    _, _, first_prefix, end_prefix, first_row, _ = part_bounds(cuts, part)
    slot = tl.program_id(0)
    prefix = first_prefix + slot
    if prefix >= end_prefix:
        return
    begin = tl.load(prefix_starts + prefix)
    end = tl.load(prefix_starts + prefix + 1)

    ROWS: tl.constexpr = BLOCK_K // Q3
    line = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    r2 = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)  # (row, q3)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + k // Q3
        exists = (k < ROWS * Q3) & (row < end)
        left = row_grads + (row - first_row).to(tl.int64) * (M * Q3) + k % Q3
        a_mask = (line < M)[:, None] & exists[None, :]
        a = tl.load(left[None, :] + line[:, None] * Q3, mask=a_mask, other=0.0)
        i3 = tl.load(i3_U + row, mask=exists, other=0).to(tl.int64)
        right = core2 + i3 * (R2 * Q3) + k % Q3
        b_mask = exists[:, None] & (r2 < R2)[None, :]
        b = tl.load(right[:, None] + r2[None, :] * Q3, mask=b_mask, other=0.0).to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    out = prefix_grads + slot.to(tl.int64) * (M * R2) + line[:, None] * R2 + r2[None, :]
    tl.store(out, acc, mask=(line < M)[:, None] & (r2 < R2)[None, :])


@triton.jit(do_not_specialize=["part"])
def left_grad_kernel(
    prefix_grads,
    core1,
    left_grads,
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
    """A tile per program: `left_grads[j] = prefix_grads[j] @ core1[i2]^T`."""
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
    place = (prefix - first_prefix).to(tl.int64) * Q1 + line % Q1
    r1 = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    left = prefix_grads + place * COLS
    right = core1 + (i2 * R1 + r1) * COLS
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, COLS, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_mask = exists[:, None] & (k < COLS)[None, :]
        b_mask = (k < COLS)[:, None] & (r1 < R1)[None, :]
        a = tl.load(left[:, None] + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(right[None, :] + k[:, None], mask=b_mask, other=0.0).to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    out = (left_grads + place * R1)[:, None] + r1[None, :]
    tl.store(out, acc, mask=exists[:, None] & (r1 < R1)[None, :])


@triton.jit(do_not_specialize=["part"])
def core1_grad_kernel(
    core0,
    prefix_grads,
    core1_grad,
    i1_P,
    tile_starts,
    group_tiles,
    cuts,
    part,
    Q1: tl.constexpr,
    R1: tl.constexpr,
    COLS: tl.constexpr,
    TILE_LINES: tl.constexpr,
    FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A row of core 1 per program: `core1_grad[i2] = sum_j core0[i1_j]^T @ prefix_grads[j]`.

    Parts hold whole tiles, so the steps of the sum are the same wherever the batch is cut; the
    first part writes every row, later ones continue those they have prefixes of.
    """
    first_tile, end_tile, first_prefix, _, _, _ = part_bounds(cuts, part)
    group = tl.program_id(0)
    first_tile = tl.maximum(first_tile, tl.load(group_tiles + group))
    end_tile = tl.minimum(end_tile, tl.load(group_tiles + group + 1))
    r1 = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (r1 < R1)[:, None] & (col < COLS)[None, :]
    out = core1_grad + (group.to(tl.int64) * R1 + r1)[:, None] * COLS + col[None, :]
    if FIRST:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        if first_tile >= end_tile:
            return
        acc = tl.load(out, mask=mask, other=0.0)
    for tile in range(first_tile, end_tile):
        begin = tl.load(tile_starts + tile)
        end = tl.load(tile_starts + tile + 1)
        for start in range(0, TILE_LINES, BLOCK_K):
            line = start + tl.arange(0, BLOCK_K)  # (prefix, q1)
            prefix = begin + line // Q1
            exists = prefix < end
            i1 = tl.load(i1_P + prefix, mask=exists, other=0).to(tl.int64)
            left = core0 + (i1 * Q1 + line % Q1) * R1
            right = prefix_grads + ((prefix - first_prefix).to(tl.int64) * Q1 + line % Q1) * COLS
            a_mask = (r1 < R1)[:, None] & exists[None, :]
            b_mask = exists[:, None] & (col < COLS)[None, :]
            a = tl.load(left[None, :] + r1[:, None], mask=a_mask, other=0.0).to(tl.float32)
            b = tl.load(right[:, None] + col[None, :], mask=b_mask, other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(out, acc, mask=mask)


@triton.jit
def piece_entries(slot, slot_segments, starts, order, first, end, PIECE: tl.constexpr):
    """Where slot's piece begins, and which of its entries belong to [first, end).

    Entries ascend within a segment, so those of a part are a range.
    """
    segment = tl.load(slot_segments + slot)
    start = tl.load(starts + segment)
    begin = start + (slot - start // PIECE - segment) * PIECE
    entry = begin + tl.arange(0, PIECE)
    exists = entry < tl.load(starts + segment + 1)
    value = tl.load(order + entry, mask=exists, other=2147483647)
    skipped = tl.sum((exists & (value < first)).to(tl.int32), 0)
    reached = tl.sum((exists & (value < end)).to(tl.int32), 0)
    return begin, begin + skipped, begin + reached


@triton.jit(do_not_specialize=["part"])
def core2_piece_kernel(
    prefixes,
    row_grads,
    pieces,
    slot_segments,
    starts,
    order_U,
    prefix_of_row_U,
    cuts,
    part,
    M: tl.constexpr,
    R2: tl.constexpr,
    Q3: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A piece of a row of core 2 per program: `sum_u prefixes[j_u]^T @ row_grads[u]`."""
    _, _, first_prefix, _, first_row, end_row = part_bounds(cuts, part)
    slot = tl.program_id(0)
    begin, first, end = piece_entries(
        slot, slot_segments, starts, order_U, first_row, end_row, PIECE
    )
    if first >= end:
        return
    r2 = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    q3 = tl.arange(0, BLOCK_N)
    mask = (r2 < R2)[:, None] & (q3 < Q3)[None, :]
    out = pieces + slot.to(tl.int64) * (R2 * Q3) + r2[:, None] * Q3 + q3[None, :]
    acc = tl.load(out, mask=mask & (first > begin), other=0.0)
    for entry in range(first, end):
        row = tl.load(order_U + entry)
        prefix = tl.load(prefix_of_row_U + row)
        left = prefixes + (prefix - first_prefix).to(tl.int64) * (M * R2) + r2
        right = row_grads + (row - first_row).to(tl.int64) * (M * Q3) + q3
        for start in range(0, M, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            a_mask = (r2 < R2)[:, None] & (k < M)[None, :]
            b_mask = (k < M)[:, None] & (q3 < Q3)[None, :]
            a = tl.load(left[:, None] + k[None, :] * R2, mask=a_mask, other=0.0)
            b = tl.load(right[None, :] + k[:, None] * Q3, mask=b_mask, other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(out, acc, mask=mask)


@triton.jit(do_not_specialize=["part"])
def core0_piece_kernel(
    left_grads,
    pieces,
    slot_segments,
    starts,
    order_P,
    cuts,
    part,
    SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A piece of a row of core 0 per program: the sum of its prefixes' `left_grads`."""
    _, _, first_prefix, end_prefix, _, _ = part_bounds(cuts, part)
    slot = tl.program_id(0)
    begin, first, end = piece_entries(
        slot, slot_segments, starts, order_P, first_prefix, end_prefix, PIECE
    )
    if first >= end:
        return
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    out = pieces + slot.to(tl.int64) * SIZE + col
    acc = tl.load(out, mask=(col < SIZE) & (first > begin), other=0.0)
    for entry in range(first, end):
        prefix = tl.load(order_P + entry)
        values = left_grads + (prefix - first_prefix).to(tl.int64) * SIZE + col
        acc += tl.load(values, mask=col < SIZE, other=0.0)
    tl.store(out, acc, mask=col < SIZE)


@triton.jit
def sum_pieces_kernel(
    pieces, starts, core_grad, SIZE: tl.constexpr, PIECE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """A row of core 0 or 2 per program: its pieces, one after the other."""
    segment = tl.program_id(0)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(starts + segment)
    num_pieces = tl.cdiv(tl.load(starts + segment + 1) - start, PIECE)
    slot = (start // PIECE + segment).to(tl.int64)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for i in range(0, num_pieces):
        acc += tl.load(pieces + (slot + i) * SIZE + col, mask=col < SIZE, other=0.0)
    out = core_grad + segment.to(tl.int64) * SIZE + col
    tl.store(out, acc.to(core_grad.dtype.element_ty), mask=col < SIZE)
