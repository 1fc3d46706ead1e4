"""The patterns of TT-Rec, EL-Rec and EcoRec in PyTorch: batched matrix products, any device.

The originals call cuBLAS with arrays of pointers; PyTorch's `bmm` has no such form, so the operands
of every product are gathered first. Where the originals add atomically, `index_add_` stands.

Cores are matrices per row: G1 `(p1, q1, r1)`, G2 `(p2, r1, q2*r2)`, G3 `(p3, r2, q3)`.
M = q1*q2; an *item* is one product of a batch: a lookup, a unique row or a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from .lookups import MicroBatch, Shape, SortedLookups, UnsortedLookups


@dataclass(frozen=True)
class TTRec:
    """TT-Rec (Yin et al., 2021): every lookup is a chain of products of its own.

    Nothing is shared between equal ids. Intermediate results are held for a chunk of lookups at a
    time.

    Args:
        chunk_lookups: lookups per chunk.
    """

    chunk_lookups: int = 1000

    def prepare(self, indices_L: Tensor, offsets: Tensor, shape: Shape) -> UnsortedLookups:
        return UnsortedLookups.of(indices_L, offsets, shape)

    def forward(self, lookups: UnsortedLookups, cores: list[Tensor], shape: Shape) -> Tensor:
        matrices = _matrices(cores, shape)
        out_BD = cores[0].new_zeros(lookups.num_bags, shape.dim)
        for i1, i2, i3, bag in self._chunks(lookups):
            prefixes = torch.bmm(matrices.G1[i1], matrices.G2[i2]).view(_prefix_view(shape))
            rows = torch.bmm(prefixes, matrices.G3[i3])
            out_BD.index_add_(0, bag, rows.flatten(1))
        return out_BD

    def backward(
        self, grad_BD: Tensor, lookups: UnsortedLookups, cores: list[Tensor], shape: Shape
    ) -> list[Tensor]:
        grads = [torch.zeros_like(core) for core in cores]
        for i1, i2, i3, bag in self._chunks(lookups):
            _add_item_gradients_(grads, cores, shape, i1, i2, i3, grad_BD[bag])
        return grads

    def _chunks(self, lookups: UnsortedLookups) -> zip:
        return zip(*(x.split(self.chunk_lookups) for x in lookups[:4]), strict=True)


@dataclass(frozen=True)
class ELRec:
    """EL-Rec (Wang et al., 2022): prefixes are shared in forward, row gradients are added first.

    Forward multiplies each unique prefix once, but the third core once per lookup, and holds all
    L rows. Backward adds the gradients of equal rows before the products ("in-advance
    aggregation"), then runs the whole chain, prefix included, once per unique row.
    """

    def prepare(self, indices_L: Tensor, offsets: Tensor, shape: Shape) -> SortedLookups:
        return SortedLookups.of(indices_L, offsets, shape)

    def forward(self, lookups: SortedLookups, cores: list[Tensor], shape: Shape) -> Tensor:
        out_BD = cores[0].new_zeros(lookups.num_bags, shape.dim)
        if not lookups.num_rows:
            return out_BD
        matrices = _matrices(cores, shape)
        prefixes = torch.bmm(matrices.G1[lookups.i1_P], matrices.G2[lookups.i2_P])
        row_L = lookups.row_of_lookup
        left = prefixes.view(_prefix_view(shape))[lookups.prefix_of_row[row_L]]
        rows_L = torch.bmm(left, matrices.G3[lookups.i3_U[row_L]]).flatten(1)
        return out_BD.index_add_(0, lookups.bag_L, rows_L)

    def backward(
        self, grad_BD: Tensor, lookups: SortedLookups, cores: list[Tensor], shape: Shape
    ) -> list[Tensor]:
        grads = [torch.zeros_like(core) for core in cores]
        row_grads = grad_BD.new_zeros(lookups.num_rows, shape.dim)
        row_grads.index_add_(0, lookups.row_of_lookup, grad_BD[lookups.bag_L])
        i1_U, i2_U = lookups.i1_P[lookups.prefix_of_row], lookups.i2_P[lookups.prefix_of_row]
        _add_item_gradients_(grads, cores, shape, i1_U, i2_U, lookups.i3_U, row_grads)
        return grads


@dataclass(frozen=True)
class EcoRec:
    """EcoRec (SC'24): each unique prefix and each unique row once, forward and backward.

    Backward adds the gradients of the rows of a prefix before the products with the first two
    cores. With `micro_batch_rows` the sorted unique rows are worked on in M ranges.

    Args:
        micro_batch_rows: M = ceil(U / micro_batch_rows), the original's rule with 20,000; None:
            M = 1.
    """

    micro_batch_rows: int | None = 20_000

    def prepare(self, indices_L: Tensor, offsets: Tensor, shape: Shape) -> SortedLookups:
        return SortedLookups.of(indices_L, offsets, shape)

    def forward(self, lookups: SortedLookups, cores: list[Tensor], shape: Shape) -> Tensor:
        out_BD = cores[0].new_zeros(lookups.num_bags, shape.dim)
        matrices, prefix_of_row = _matrices(cores, shape), lookups.prefix_of_row
        for part in lookups.micro_batches(self.micro_batch_rows):
            i1_P, i2_P = lookups.i1_P[part.prefixes], lookups.i2_P[part.prefixes]
            prefixes = torch.bmm(matrices.G1[i1_P], matrices.G2[i2_P]).view(_prefix_view(shape))
            left = prefixes[prefix_of_row[part.rows] - part.prefixes.start]
            rows_U = torch.bmm(left, matrices.G3[lookups.i3_U[part.rows]]).flatten(1)
            row_L, starts = _pooled_in(part, lookups)
            out_BD += embedding_bag(row_L, rows_U, starts, mode="sum")
        return out_BD

    def backward(
        self, grad_BD: Tensor, lookups: SortedLookups, cores: list[Tensor], shape: Shape
    ) -> list[Tensor]:
        grads = [torch.zeros_like(core) for core in cores]
        for part in lookups.micro_batches(self.micro_batch_rows):
            self._add_gradients_(grads, part, grad_BD, lookups, cores, shape)
        return grads

    def _add_gradients_(
        self,
        grads: list[Tensor],
        part: MicroBatch,
        grad_BD: Tensor,
        lookups: SortedLookups,
        cores: list[Tensor],
        shape: Shape,
    ) -> None:
        matrices, sums = _matrices(cores, shape), _matrices(grads, shape)
        starts = lookups.row_starts[part.rows] - part.lookups.start
        row_grads = embedding_bag(lookups.bag_L[part.lookups], grad_BD, starts, mode="sum")
        row_grads = row_grads.view(-1, *_row_view(shape))
        i1_P, i2_P = lookups.i1_P[part.prefixes], lookups.i2_P[part.prefixes]
        i3_U = lookups.i3_U[part.rows]
        prefix_of_row = lookups.prefix_of_row[part.rows] - part.prefixes.start

        left, middle = matrices.G1[i1_P], matrices.G2[i2_P]
        prefixes = torch.bmm(left, middle).view(_prefix_view(shape))
        sums.G3.index_add_(0, i3_U, torch.bmm(prefixes[prefix_of_row].mT, row_grads))
        prefix_grads = torch.zeros_like(prefixes)
        prefix_grads.index_add_(0, prefix_of_row, torch.bmm(row_grads, matrices.G3[i3_U].mT))
        prefix_grads = prefix_grads.view(_left_view(shape))
        sums.G2.index_add_(0, i2_P, torch.bmm(left.mT, prefix_grads))
        sums.G1.index_add_(0, i1_P, torch.bmm(prefix_grads, middle.mT))


class _Matrices(NamedTuple):
    G1: Tensor
    G2: Tensor
    G3: Tensor


def _matrices(cores: list[Tensor], shape: Shape) -> _Matrices:
    """Views of the cores, one matrix per row."""
    (q1, _, q3), (r1, r2) = shape.col_factors, shape.ranks
    views = ((-1, q1, r1), (-1, r1, shape.col_factors[1] * r2), (-1, r2, q3))
    return _Matrices(*(core.view(view) for core, view in zip(cores, views, strict=True)))


def _prefix_view(shape: Shape) -> tuple[int, int, int]:
    return -1, shape.col_factors[0] * shape.col_factors[1], shape.ranks[1]


def _left_view(shape: Shape) -> tuple[int, int, int]:
    return -1, shape.col_factors[0], shape.col_factors[1] * shape.ranks[1]


def _row_view(shape: Shape) -> tuple[int, int]:
    return shape.col_factors[0] * shape.col_factors[1], shape.col_factors[2]


def _add_item_gradients_(
    grads: list[Tensor],
    cores: list[Tensor],
    shape: Shape,
    i1: Tensor,
    i2: Tensor,
    i3: Tensor,
    item_grads: Tensor,
) -> None:
    """Adds the core gradients of n items `(i1, i2, i3)` with gradients `(n, D)`; every item
    recomputes its own prefix and makes its own addend to all three cores."""
    matrices, sums = _matrices(cores, shape), _matrices(grads, shape)
    left, middle, right = matrices.G1[i1], matrices.G2[i2], matrices.G3[i3]
    prefixes = torch.bmm(left, middle).view(_prefix_view(shape))
    item_grads = item_grads.view(-1, *_row_view(shape))
    sums.G3.index_add_(0, i3, torch.bmm(prefixes.mT, item_grads))
    prefix_grads = torch.bmm(item_grads, right.mT).view(_left_view(shape))
    sums.G2.index_add_(0, i2, torch.bmm(left.mT, prefix_grads))
    sums.G1.index_add_(0, i1, torch.bmm(prefix_grads, middle.mT))


def _pooled_in(part: MicroBatch, lookups: SortedLookups) -> tuple[Tensor, Tensor]:
    """What `embedding_bag` needs to pool the rows of a micro-batch: rows, and starts of bags."""
    if part.rows == slice(0, lookups.num_rows):
        return lookups.pooled_row_L, lookups.offsets[:-1]
    row_L, rows = lookups.pooled_row_L, part.rows
    inside_L = (row_L >= rows.start) & (row_L < rows.stop)
    before_L = torch.nn.functional.pad(inside_L.cumsum(0), (1, 0))
    starts = before_L[lookups.offsets[:-1]].to(row_L.dtype)
    return row_L[inside_L] - rows.start, starts
