"""The grouped lookup in Triton: forward and backward of all tables of a group in one launch set.

The host launches the same kernels whatever U and P are: it never waits for the device. The maths
is in this folder's README, the kernels in `triton_forward.py` and `triton_backward.py`. Not
measured on a GPU: tested by Triton's interpreter, and compiled for NVIDIA and AMD targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from ecorec_torchrec.kernels.tt_index import IndexPlan
from torch import Tensor
from triton import cdiv

from . import triton_backward as bwd
from . import triton_forward as fwd
from .launch import Blocks, LaunchConfig, dot_precision
from .triton_parts import Bounds, Cut, Parts, choose_cut, find_parts, index_bytes

_LOOKUPS_PER_PIECE = 128
_PREFIXES_PER_PIECE = 32
_ROWS_PER_PIECE = 64
_INDEX_BYTES_PER_ENTRY = 64
"""Bound for a sort's keys, values and temporaries, per entry."""


def forward(
    plan: IndexPlan,
    cores: list[Tensor],
    weights_L: Tensor | None,
    num_features: int,
    mean: bool,
    output_dtype: torch.dtype,
    workspace_bytes: int | None,
) -> Tensor:
    """Pooled rows `(B, F*D)`; arguments as in this folder's README.

    Raises:
        ValueError: `workspace_bytes` is below the floor that the message names.
    """
    lookup = _Lookup(plan, cores, weights_L, num_features, mean)
    out = cores[0].new_empty(
        plan.num_bags // num_features, num_features * lookup.dim, dtype=output_dtype
    )
    if not plan.num_lookups:
        return out.zero_()

    def sums_bytes(cut: Cut) -> int:
        """What pooling keeps between parts."""
        sums = out.numel() if output_dtype != torch.float32 else 0
        return 4 * (2 * plan.num_bags + sums) if cut.num_parts > 1 else 0

    with torch.cuda.device_of(out):
        parts = lookup.cut(workspace_bytes, sums_bytes)
        prefixes, rows = lookup.new_prefixes(parts), lookup.new_rows(parts)
        sums, taken = out, [plan.counts, plan.counts]  # not used by a single part
        if parts.cut.num_parts > 1:
            taken = [torch.empty_like(plan.offsets) for _ in range(2)]
            if output_dtype != torch.float32:
                sums = torch.empty_like(out, dtype=torch.float32)
        for part in range(parts.cut.num_parts):
            lookup.multiply_prefixes(parts, part, prefixes)
            lookup.multiply_rows(parts, part, prefixes, rows)
            lookup.pool(parts, part, rows, sums, taken, out)
    return out


def backward(
    grad: Tensor,
    plan: IndexPlan,
    cores: list[Tensor],
    weights_L: Tensor | None,
    num_features: int,
    mean: bool,
    needs_cores: bool,
    needs_weights: bool,
    workspace_bytes: int | None,
) -> tuple[list[Tensor] | None, Tensor | None]:
    """Gradients of the cores and of the weights; arguments as in this folder's README.

    Raises:
        ValueError: `workspace_bytes` is below the floor that the message names.
    """
    lookup = _Lookup(plan, cores, weights_L, num_features, mean)
    weight_grads = torch.empty_like(weights_L) if needs_weights and weights_L is not None else None
    if not plan.num_lookups:
        return [torch.zeros_like(core) for core in cores] if needs_cores else None, weight_grads

    def other_bytes(cut: Cut) -> int:
        weights_bytes = 12 * plan.num_lookups if needs_weights else 0
        return weights_bytes + (_CoreGrads.nbytes(lookup, cut) if needs_cores else 0)

    with torch.cuda.device_of(grad):
        parts = lookup.cut(workspace_bytes, other_bytes)
        core_grads = _CoreGrads(lookup, parts, grad) if needs_cores else None
        prefixes, rows = lookup.new_prefixes(parts), lookup.new_rows(parts)
        for part in range(parts.cut.num_parts):
            lookup.multiply_prefixes(parts, part, prefixes)
            if weight_grads is not None:
                lookup.multiply_rows(parts, part, prefixes, rows)
                lookup.differentiate_weights(parts, part, rows, grad, weight_grads)
            if core_grads is not None:
                core_grads.add(part, prefixes, rows)
        return core_grads.finish() if core_grads is not None else None, weight_grads


@dataclass(frozen=True)
class _Lookup:
    """One call: its arguments, what follows from them, and the kernels that both passes launch."""

    plan: IndexPlan
    cores: list[Tensor]
    weights_L: Tensor | None
    num_features: int
    mean: bool

    @cached_property
    def q(self) -> tuple[int, int, int]:
        q1, q2, q3 = (core.shape[2] for core in self.cores)
        return q1, q2, q3

    @cached_property
    def r(self) -> tuple[int, int]:
        return self.cores[0].shape[3], self.cores[1].shape[3]

    @property
    def dim(self) -> int:
        return self.q[0] * self.q[1] * self.q[2]

    @property
    def cols(self) -> int:
        return self.q[1] * self.r[1]

    @property
    def bags_per_feature(self) -> int:
        return self.plan.num_bags // self.num_features

    @cached_property
    def config(self) -> LaunchConfig:
        return LaunchConfig.choose(self.q, self.r, dot_precision(self.cores[0].dtype))

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds.of(self.plan, self.cores, self.config.tile_prefixes)

    @cached_property
    def owner_of_sorted(self) -> Tensor:
        """Row of every sorted lookup."""
        return _owners(self.plan.row_starts, self.plan.num_lookups)

    def cut(self, workspace_bytes: int | None, other_bytes: Callable[[Cut], int]) -> Parts:
        """Cuts the batch so that prefixes, rows, indices and `other_bytes` fit."""
        num_groups = self.cores[1].shape[0]

        def bytes_of(cut: Cut) -> int:
            prefix_elements = cut.largest.prefixes * self.q[0] * self.cols
            buffers = 4 * (prefix_elements + cut.largest.rows * self.dim)
            return buffers + index_bytes(self.bounds, num_groups, cut) + other_bytes(cut)

        tile_prefixes = self.config.tile_prefixes
        cut = choose_cut(self.bounds, self.cores, tile_prefixes, workspace_bytes, bytes_of)
        return find_parts(self.plan, self.bounds, cut, tile_prefixes)

    def new_buffer(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device=self.cores[0].device)

    def new_prefixes(self, parts: Parts) -> Tensor:
        return self.new_buffer(parts.cut.largest.prefixes, self.q[0], self.cols)

    def new_rows(self, parts: Parts) -> Tensor:
        return self.new_buffer(parts.cut.largest.rows, self.dim)

    def multiply_prefixes(self, parts: Parts, part: int, prefixes: Tensor) -> None:
        blocks = self.config.prefix
        fwd.prefix_kernel[(parts.cut.largest.tiles, cdiv(self.cols, blocks.n))](
            self.cores[0],
            self.cores[1],
            prefixes,
            self.plan.i1_P,
            self.plan.i2_P,
            parts.tile_starts,
            parts.cuts,
            part,
            Q1=self.q[0],
            R1=self.r[0],
            COLS=self.cols,
            **self.product(blocks),
        )

    def multiply_rows(self, parts: Parts, part: int, prefixes: Tensor, rows: Tensor) -> None:
        blocks, m = self.config.row, self.q[0] * self.q[1]
        fwd.row_kernel[(parts.cut.largest.prefixes, cdiv(m, blocks.m))](
            prefixes,
            self.cores[2],
            rows,
            self.plan.i3_U,
            self.plan.prefix_starts,
            parts.cuts,
            part,
            M=m,
            R2=self.r[1],
            Q3=self.q[2],
            **self.product(blocks),
        )

    def pool(
        self, parts: Parts, part: int, rows: Tensor, sums: Tensor, taken: list[Tensor], out: Tensor
    ) -> None:
        blocks = self.config.gather
        fwd.pool_kernel[(cdiv(self.plan.num_bags, blocks.m), cdiv(self.dim, blocks.n))](
            rows,
            self.plan.pooled_row_L,
            self.plan.pooled_occurrence_L,
            self.plan.offsets,
            self.weights_L,
            sums,
            taken[part % 2],
            taken[1 - part % 2],
            out,
            parts.cuts,
            part,
            self.plan.num_bags,
            self.bags_per_feature,
            self.num_features,
            D=self.dim,
            MEAN=self.mean,
            FIRST=part == 0,
            LAST=part == parts.cut.num_parts - 1,
            BLOCK_M=blocks.m,
            BLOCK_N=blocks.n,
            UNROLL=blocks.k,
            **blocks.schedule,
        )

    def differentiate_weights(
        self, parts: Parts, part: int, rows: Tensor, grad: Tensor, weight_grads: Tensor
    ) -> None:
        blocks = self.config.gather
        bwd.weight_grad_kernel[(cdiv(self.plan.num_lookups, blocks.m),)](
            grad,
            rows,
            self.owner_of_sorted,
            self.plan.order_L,
            self.plan.bag_L,
            self.plan.offsets,
            weight_grads,
            parts.cuts,
            part,
            self.plan.num_lookups,
            self.bags_per_feature,
            self.num_features,
            D=self.dim,
            MEAN=self.mean,
            BLOCK_M=blocks.m,
            BLOCK_N=blocks.n,
            **blocks.schedule,
        )

    def product(self, blocks: Blocks) -> dict[str, Any]:
        """The arguments of a kernel that multiplies matrices."""
        sides = {"BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "BLOCK_K": blocks.k}
        return {"PRECISION": self.config.precision, **sides, **blocks.schedule}


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
        slot_segments = _owners(first_slots, num_slots).clamp_(max=num_segments - 1)
        return cls(order.int(), starts, slot_segments, pieces)

    @staticmethod
    def num_slots(num_entries: int, core: Tensor, per_piece: int) -> int:
        return num_entries // per_piece + core.shape[0]

    @classmethod
    def nbytes(cls, num_entries: int, core: Tensor, per_piece: int) -> int:
        slots = cls.num_slots(num_entries, core, per_piece)
        indices = _INDEX_BYTES_PER_ENTRY * num_entries + 16 * (slots + core.shape[0] + 1)
        return indices + 4 * slots * core[0].numel()


class _CoreGrads:
    """Core gradients, summed part by part."""

    def __init__(self, lookup: _Lookup, parts: Parts, grad: Tensor) -> None:
        plan, cores, bounds = lookup.plan, lookup.cores, lookup.bounds
        self._lookup, self._parts, self._grad = lookup, parts, grad
        self._by_i1 = _Segments.of(
            plan.i1_P[: bounds.prefixes], plan.counts[1], cores[0], _PREFIXES_PER_PIECE
        )
        self._by_i3 = _Segments.of(
            plan.i3_U[: bounds.rows], plan.counts[0], cores[2], _ROWS_PER_PIECE
        )
        self._prefix_of_row_U = _owners(plan.prefix_starts, bounds.rows)
        self._row_pieces = self._sum_row_pieces()
        self._left_grads = lookup.new_buffer(parts.cut.largest.prefixes, *cores[0].shape[2:])
        self._core1_grad = torch.empty_like(cores[1], dtype=torch.float32)

    @staticmethod
    def nbytes(lookup: _Lookup, cut: Cut) -> int:
        """Bytes beside the gradients and the buffers of prefixes and rows."""
        cores, bounds = lookup.cores, lookup.bounds
        num_pieces = lookup.plan.num_lookups // _LOOKUPS_PER_PIECE
        return (
            _Segments.nbytes(bounds.prefixes, cores[0], _PREFIXES_PER_PIECE)
            + _Segments.nbytes(bounds.rows, cores[2], _ROWS_PER_PIECE)
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
            (core0_grad, self._by_i1, _PREFIXES_PER_PIECE, config.pieces0),
            (core2_grad, self._by_i3, _ROWS_PER_PIECE, config.pieces2),
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
        num_pieces = plan.num_lookups // _LOOKUPS_PER_PIECE
        pieces = lookup.new_buffer(num_pieces, lookup.dim)
        if not num_pieces:
            return pieces
        ends = torch.arange(1, num_pieces + 1, dtype=torch.int32, device=pieces.device)
        last_positions = ends * _LOOKUPS_PER_PIECE - 1
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
            PIECE=_LOOKUPS_PER_PIECE,
            STEP=min(4 * blocks.m, _LOOKUPS_PER_PIECE),
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
            PIECE=_LOOKUPS_PER_PIECE,
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
            PIECE=_ROWS_PER_PIECE,
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
            PIECE=_PREFIXES_PER_PIECE,
            BLOCK_N=blocks.n,
            **blocks.schedule,
        )


def _owners(starts: Tensor, num_entries: int) -> Tensor:
    """Entry -> the segment that it lies in."""
    entry = torch.arange(num_entries, dtype=torch.int32, device=starts.device)
    return torch.searchsorted(starts, entry, right=True, out_int32=True) - 1
