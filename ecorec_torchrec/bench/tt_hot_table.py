"""A TT table whose hottest rows are dense: a prototype, to find out whether it is worth building.

The hot rows are those that were looked up most often before training; each has a dense row of its
own and is looked up nowhere else. FBTT-Embedding's cache is of that kind (Yin et al., "TT-Rec:
Tensor train compression for deep learning recommendation models", MLSys 2021).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ecorec_torchrec.kernels import tt_embedding_bag
from ecorec_torchrec.tt import TTSpec, init_cores_

_ENTRY_STD = 0.01
_ID_BYTES = 8


@dataclass(frozen=True)
class TableShape:
    """How a table of N rows is held.

    Attributes:
        name: in the CSV files.
        embedding_dim: D.
        spec: of the cores; None for no TT part.
        hot_rows: H, dense rows of single ids.
        folded_rows: rows of a dense table that takes ids modulo them; 0 for none.
    """

    name: str
    embedding_dim: int
    spec: TTSpec | None = None
    hot_rows: int = 0
    folded_rows: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, and of the ids of the hot rows."""
        row_bytes = self.embedding_dim * 4
        cores = self.spec.nbytes() if self.spec else 0
        return cores + self.hot_rows * (row_bytes + _ID_BYTES) + self.folded_rows * row_bytes


def shapes_of_equal_bytes(
    num_rows: int, embedding_dim: int, rank: int, hot_ranks: tuple[int, ...]
) -> Iterator[TableShape]:
    """Plain TT of `rank`, hashing, and for each hot rank TT of that rank with hot rows.

    The hot rows get what the smaller cores leave, so that all take the bytes of the first.
    """
    plain = TableShape("tt", embedding_dim, TTSpec.suggest(num_rows, embedding_dim, rank=rank))
    yield plain
    row_bytes = embedding_dim * 4
    yield TableShape("hashing", embedding_dim, folded_rows=plain.nbytes // row_bytes)
    for hot_rank in hot_ranks:
        spec = TTSpec.suggest(num_rows, embedding_dim, rank=hot_rank)
        hot_rows = (plain.nbytes - spec.nbytes()) // (row_bytes + _ID_BYTES)
        yield TableShape(f"tt_hot_r{hot_rank}", embedding_dim, spec, min(hot_rows, num_rows))


def hottest(ids_L: Tensor, count: int) -> Tensor:
    """The `count` most frequent ids, ascending; fewer if fewer occur."""
    ids_U, counts_U = ids_L.unique(return_counts=True)
    return ids_U[counts_U.argsort(descending=True, stable=True)[:count]].sort().values


class HotTTBag(nn.Module):
    """Sums of bags of rows of one table, in any of the shapes.

    Args:
        shape: of the table.
        seen_ids: lookups by which the hot rows are chosen.
        generator: of the initial values.
    """

    hot_ids_H: Tensor

    def __init__(self, shape: TableShape, seen_ids: Tensor, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("hot_ids_H", hottest(seen_ids, shape.hot_rows))
        num_dense = shape.folded_rows or len(self.hot_ids_H)
        rows = torch.empty(num_dense, shape.embedding_dim).normal_(
            std=_ENTRY_STD, generator=generator
        )
        self.rows = nn.Parameter(rows)
        cores = [torch.empty(size) for size in shape.spec.core_shapes] if shape.spec else []
        if shape.spec:
            init_cores_(cores, shape.spec, entry_std=_ENTRY_STD, generator=generator)
        self.cores = nn.ParameterList(cores)

    def forward(self, ids_L: Tensor, offsets: Tensor) -> Tensor:
        """The (B, D) sums; `offsets` has B + 1 entries."""
        if self.shape.folded_rows:
            return self._dense(ids_L % self.shape.folded_rows, offsets)
        if not len(self.hot_ids_H):
            return self._tensor_train(ids_L, offsets)
        slots_L, is_hot_L = self.hot_slots(ids_L)
        before = functional.pad(is_hot_L.cumsum(0), (1, 0))[offsets]
        hot = self._dense(slots_L[is_hot_L], before)
        if self.shape.spec is None:
            return hot
        return hot + self._tensor_train(ids_L[~is_hot_L], offsets - before)

    def hot_slots(self, ids_L: Tensor) -> tuple[Tensor, Tensor]:
        """The place of every id among the hot rows, and whether it is one of them."""
        slots_L = torch.searchsorted(self.hot_ids_H, ids_L).clamp_(max=len(self.hot_ids_H) - 1)
        return slots_L, self.hot_ids_H[slots_L] == ids_L

    def _dense(self, slots_L: Tensor, offsets: Tensor) -> Tensor:
        return functional.embedding_bag(
            slots_L, self.rows, offsets, mode="sum", include_last_offset=True
        )

    def _tensor_train(self, ids_L: Tensor, offsets: Tensor) -> Tensor:
        spec = self.shape.spec
        assert spec is not None
        return tt_embedding_bag(ids_L, offsets, list(self.cores), spec, include_last_offset=True)
