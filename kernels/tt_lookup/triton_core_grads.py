"""The core gradients of a call of the grouped lookup in Triton, summed part by part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from . import triton_backward as bwd
from .launch import LOOKUPS_PER_PIECE, PREFIXES_PER_PIECE, ROWS_PER_PIECE
from .triton_lookup import Lookup, owners
from .triton_parts import Cut, Parts

_INDEX_BYTES_PER_ENTRY = 64
"""Bound for a sort's keys, values and temporaries, per entry."""


class _Segments(NamedTuple):
    """Entries (rows or prefixes) ordered by the core row that they use, cut into pieces."""

    order: Tensor
    """Entries, segment after segment, ascending within each."""
    starts: Tensor
    """(segments + 1,) core row -> first entry in `order`."""
    slot_segments: Tensor
    """(slots,) slot of a piece -> its core row."""
    pieces: Tensor
    """(slots, size) sums."""

    @classmethod
    def of(cls, keys: Tensor, count: Tensor, core: Tensor, per_piece: int) -> _Segments:
        """`keys`: the core row of every entry; `count` of them exist."""
        num_segments, size = core.shape[0], core[0].numel()
        entry = torch.arange(len(keys), dtype=torch.int32, device=keys.device)
        keys, order = torch.sort(keys.masked_fill(entry >= count, num_segments), stable=True)
        segment = torch.arange(num_segments + 1, dtype=torch.int32, device=keys.device)
        starts = torch.searchsorted(keys, segment, out_int32=True)
        first_slots = starts // per_piece + segment
        num_slots = cls.num_slots(len(keys), core, per_piece)
        pieces = torch.empty(num_slots, size, dtype=torch.float32, device=keys.device)
        slot_segments = owners(first_slots, num_slots).clamp_(max=num_segments - 1)
        return cls(order.int(), starts, slot_segments, pieces)

    @staticmethod
    def num_slots(num_entries: int, core: Tensor, per_piece: int) -> int:
        return num_entries // per_piece + core.shape[0]

    @classmethod
    def nbytes(cls, num_entries: int, core: Tensor, per_piece: int) -> int:
        slots = cls.num_slots(num_entries, core, per_piece)
        indices = _INDEX_BYTES_PER_ENTRY * num_entries + 16 * (slots + core.shape[0] + 1)
        return indices + 4 * slots * core[0].numel()


class CoreGrads:
    """Core gradients, summed part by part."""

    def __init__(self, lookup: Lookup, parts: Parts, grad: Tensor) -> None:
        plan, cores, bounds = lookup.plan, lookup.cores, lookup.bounds
        self._lookup, self._parts, self._grad = lookup, parts, grad
        self._by_i1 = _Segments.of(
            plan.i1_P[: bounds.prefixes], plan.counts[1], cores[0], PREFIXES_PER_PIECE
        )
        self._by_i3 = _Segments.of(
            plan.i3_U[: bounds.rows], plan.counts[0], cores[2], ROWS_PER_PIECE
        )
        self._prefix_of_row_U = owners(plan.prefix_starts, bounds.rows)
        self._row_pieces = self._sum_row_pieces()
        self._left_grads = lookup.new_buffer(parts.cut.largest.prefixes, *cores[0].shape[2:])
        self._core1_grad = torch.empty_like(cores[1], dtype=torch.float32)

    @staticmethod
    def nbytes(lookup: Lookup, cut: Cut) -> int:
        """Bytes beside the gradients and the buffers of prefixes and rows."""
        cores, bounds = lookup.cores, lookup.bounds
        num_pieces = lookup.plan.num_lookups // LOOKUPS_PER_PIECE
        return (
            _Segments.nbytes(bounds.prefixes, cores[0], PREFIXES_PER_PIECE)
            + _Segments.nbytes(bounds.rows, cores[2], ROWS_PER_PIECE)
            + 16 * bounds.rows
            + num_pieces * (4 * lookup.dim + 16)
            + 4 * cut.largest.prefixes * cores[0][0].numel()
            + (4 * cores[1].numel() if cores[1].dtype != torch.float32 else 0)
        )

    def add(self, part: int, prefixes: Tensor, rows: Tensor) -> None:
        """Adds a part; `prefixes` holds its products, and both buffers are overwritten."""
        self._sum_row_grads(part, row_grads=rows)
        self._add_core2(part, prefixes, row_grads=rows)
        self._sum_prefix_grads(part, row_grads=rows, prefix_grads=prefixes)
        self._add_core1(part, prefix_grads=prefixes)
        self._add_core0(part, prefix_grads=prefixes)

    def finish(self) -> list[Tensor]:
        core0, core1, core2 = self._lookup.cores
        core0_grad, core2_grad = torch.empty_like(core0), torch.empty_like(core2)
        config = self._lookup.config
        for grad, segments, per_piece, blocks in (
            (core0_grad, self._by_i1, PREFIXES_PER_PIECE, config.pieces0),
            (core2_grad, self._by_i3, ROWS_PER_PIECE, config.pieces2),
        ):
            size = segments.pieces.shape[1]
            bwd.sum_pieces_kernel[(grad.shape[0], cdiv(size, blocks.n))](
                segments.pieces,
                segments.starts,
                grad,
                SIZE=size,
                PIECE=per_piece,
                BLOCK_N=blocks.n,
                **blocks.schedule,
            )
        return [core0_grad, self._core1_grad.to(core1.dtype), core2_grad]

    def _sum_row_pieces(self) -> Tensor:
        lookup, plan, blocks = self._lookup, self._lookup.plan, self._lookup.config.gather
        num_pieces = plan.num_lookups // LOOKUPS_PER_PIECE
        pieces = lookup.new_buffer(num_pieces, lookup.dim)
        if not num_pieces:
            return pieces
        ends = torch.arange(1, num_pieces + 1, dtype=torch.int32, device=pieces.device)
        last_positions = ends * LOOKUPS_PER_PIECE - 1
        bwd.row_piece_kernel[(num_pieces, cdiv(lookup.dim, blocks.n))](
            self._grad,
            torch.searchsorted(plan.row_starts, last_positions, right=True, out_int32=True) - 1,
            plan.row_starts,
            plan.order_L,
            plan.bag_L,
            plan.offsets,
            lookup.weights_L,
            pieces,
            lookup.bags_per_feature,
            lookup.num_features,
            D=lookup.dim,
            MEAN=lookup.mean,
            PIECE=LOOKUPS_PER_PIECE,
            STEP=min(4 * blocks.m, LOOKUPS_PER_PIECE),
            BLOCK_N=blocks.n,
            **blocks.schedule,
        )
        return pieces

    def _sum_row_grads(self, part: int, row_grads: Tensor) -> None:
        lookup, plan, blocks = self._lookup, self._lookup.plan, self._lookup.config.gather
        bwd.row_grad_kernel[(cdiv(len(row_grads), blocks.m), cdiv(lookup.dim, blocks.n))](
            self._grad,
            self._row_pieces,
            plan.row_starts,
            plan.order_L,
            plan.bag_L,
            plan.offsets,
            lookup.weights_L,
            row_grads,
            self._parts.cuts,
            part,
            lookup.bags_per_feature,
            lookup.num_features,
            D=lookup.dim,
            MEAN=lookup.mean,
            PIECE=LOOKUPS_PER_PIECE,
            BLOCK_M=blocks.m,
            BLOCK_N=blocks.n,
            UNROLL=blocks.k,
            **blocks.schedule,
        )

    def _sum_prefix_grads(self, part: int, row_grads: Tensor, prefix_grads: Tensor) -> None:
        lookup, plan, blocks = self._lookup, self._lookup.plan, self._lookup.config.prefix_grad
        m, r2 = lookup.q[0] * lookup.q[1], lookup.r[1]
        bwd.prefix_grad_kernel[(len(prefix_grads), cdiv(m, blocks.m), cdiv(r2, blocks.n))](
            row_grads,
            lookup.cores[2],
            prefix_grads,
            plan.i3_U,
            plan.prefix_starts,
            self._parts.cuts,
            part,
            M=m,
            R2=r2,
            Q3=lookup.q[2],
            **lookup.product(blocks),
        )

    def _add_core2(self, part: int, prefixes: Tensor, row_grads: Tensor) -> None:
        lookup, segments, blocks = self._lookup, self._by_i3, self._lookup.config.core2_grad
        bwd.core2_piece_kernel[(len(segments.pieces), cdiv(lookup.r[1], blocks.m))](
            prefixes,
            row_grads,
            segments.pieces,
            segments.slot_segments,
            segments.starts,
            segments.order,
            self._prefix_of_row_U,
            self._parts.cuts,
            part,
            M=lookup.q[0] * lookup.q[1],
            R2=lookup.r[1],
            Q3=lookup.q[2],
            PIECE=ROWS_PER_PIECE,
            **lookup.product(blocks),
        )

    def _add_core1(self, part: int, prefix_grads: Tensor) -> None:
        lookup, blocks = self._lookup, self._lookup.config.core1_grad
        grid = (self._core1_grad.shape[0], cdiv(lookup.r[0], blocks.m), cdiv(lookup.cols, blocks.n))
        bwd.core1_grad_kernel[grid](
            lookup.cores[0],
            prefix_grads,
            self._core1_grad,
            lookup.plan.i1_P,
            self._parts.tile_starts,
            self._parts.group_tiles,
            self._parts.cuts,
            part,
            Q1=lookup.q[0],
            R1=lookup.r[0],
            COLS=lookup.cols,
            TILE_LINES=lookup.config.tile_prefixes * lookup.q[0],
            FIRST=part == 0,
            **lookup.product(blocks),
        )

    def _add_core0(self, part: int, prefix_grads: Tensor) -> None:
        lookup, segments, blocks = self._lookup, self._by_i1, self._lookup.config.left_grad
        bwd.left_grad_kernel[(self._parts.cut.largest.tiles, cdiv(lookup.r[0], blocks.n))](
            prefix_grads,
            lookup.cores[1],
            self._left_grads,
            lookup.plan.i2_P,
            self._parts.tile_starts,
            self._parts.cuts,
            part,
            Q1=lookup.q[0],
            R1=lookup.r[0],
            COLS=lookup.cols,
            **lookup.product(blocks),
        )
        size, blocks = segments.pieces.shape[1], lookup.config.pieces0
        bwd.core0_piece_kernel[(len(segments.pieces), cdiv(size, blocks.n))](
            self._left_grads,
            segments.pieces,
            segments.slot_segments,
            segments.starts,
            segments.order,
            self._parts.cuts,
            part,
            SIZE=size,
            PIECE=PREFIXES_PER_PIECE,
            BLOCK_N=blocks.n,
            **blocks.schedule,
        )
