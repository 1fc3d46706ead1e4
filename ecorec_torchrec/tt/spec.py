"""The shape of one tensor-train table.

Legend: N `num_embeddings`, D `embedding_dim`, p row factors (prod(p) >= N), q column factors
(prod(q) = D), r TT ranks. Row id -> digits (i1, .., iK) is row-major, the last digit fastest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Row factors are searched this far around N^(1/K): enough for paddings far below 1 %.
_SEARCH_WIDTH = 64
_RANK_ALIGNMENT = 8


@dataclass(frozen=True)
class TTSpec:
    """Shape of a table of N rows and D columns held as K tensor-train cores.

    Core k has shape `(p_k, r_{k-1}, q_k, r_k)`, with r_0 = r_K = 1.

    Args:
        num_embeddings: N, the rows that exist; ids in [N, prod(p)) are padding and out of range.
        row_factors: p, K integers with prod(p) >= N.
        col_factors: q, K integers; their product is the embedding dimension, exactly.
        ranks: the K - 1 inner ranks (r_1, .., r_{K-1}), without the ones at both ends.

    Raises:
        ValueError: a length, a sign or a product does not fit; the message holds the numbers.

    Example::

        spec = TTSpec(1_000_000, (100, 100, 100), (4, 4, 4), (16, 16))
        spec.embedding_dim           # 64
        spec.core_shapes             # ((100, 1, 4, 16), (100, 16, 4, 16), (100, 16, 4, 1))
        spec.nbytes(torch.float32)   # 460_800, where the dense table needs 256_000_000
    """

    num_embeddings: int
    row_factors: tuple[int, ...]
    col_factors: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("row_factors", "col_factors", "ranks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        num_cores = len(self.row_factors)
        if num_cores < 2:
            raise ValueError(f"a TT table has at least 2 cores, got row_factors={self.row_factors}")
        if len(self.col_factors) != num_cores:
            raise ValueError(
                f"row_factors={self.row_factors} and col_factors={self.col_factors} "
                f"must have one factor per core each, got {num_cores} and {len(self.col_factors)}"
            )
        if len(self.ranks) != num_cores - 1:
            raise ValueError(
                f"{num_cores} cores have {num_cores - 1} inner ranks (leave out the ones at both "
                f"ends), got ranks={self.ranks}"
            )
        for name in ("row_factors", "col_factors", "ranks"):
            if any(not isinstance(x, int) or x < 1 for x in getattr(self, name)):
                raise ValueError(f"{name} must be positive integers, got {getattr(self, name)}")
        if not 1 <= self.num_embeddings <= self.num_padded_rows:
            raise ValueError(
                f"num_embeddings={self.num_embeddings} must lie in 1..{self.num_padded_rows}, "
                f"the product of row_factors={self.row_factors}"
            )

    @property
    def num_cores(self) -> int:
        return len(self.row_factors)

    @property
    def embedding_dim(self) -> int:
        return math.prod(self.col_factors)

    @property
    def num_padded_rows(self) -> int:
        """prod(p): the rows that the cores can address, padding included."""
        return math.prod(self.row_factors)

    @property
    def core_shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        left, right = (1, *self.ranks), (*self.ranks, 1)
        return tuple(zip(self.row_factors, left, self.col_factors, right, strict=True))

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.core_shapes)

    def nbytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of all cores stored in `dtype`."""
        return self.num_parameters * dtype.itemsize

    @classmethod
    def suggest(
        cls,
        num_embeddings: int,
        embedding_dim: int,
        *,
        rank: int | None = None,
        max_bytes: int | None = None,
        num_cores: int = 3,
        dtype: torch.dtype = torch.float32,
    ) -> TTSpec:
        """A near-cubic shape for a table of N rows and D columns.

        Give `rank`, or `max_bytes` for the largest rank whose cores fit (rounded down to a
        multiple of 8 from 8 on, which the kernels need for full vectors). Ranks are cut to what
        the shape can use: r_k <= min(prod_{j<=k} p_j q_j, prod_{j>k} p_j q_j).

        Raises:
            ValueError: not exactly one of `rank` and `max_bytes`; a number below 1; or
                `max_bytes` below the size at rank 1.
        """
        raise NotImplementedError
