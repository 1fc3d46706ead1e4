"""The shape of one tensor-train table.

Legend: N `num_embeddings`, D `embedding_dim`, p row factors (prod(p) >= N), q column factors
(prod(q) = D), r TT ranks. Row id -> digits (i1, .., iK) is row-major, the last digit fastest.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# How far below the K-th root each of the last factors is tried: enough for paddings below 0.1 %.
_SEARCH_WIDTH = 64
# What a stretched shape costs against padding: (log(largest / smallest factor))^2 times this much.
_STRETCH_WEIGHT = 0.02
_RANK_ALIGNMENT = 8
_MAX_ROW_ID = 2**63 - 1


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
        TypeError: a number is not an integer (NumPy integers are welcome, booleans are not).
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
        object.__setattr__(self, "num_embeddings", _as_int("num_embeddings", self.num_embeddings))
        for name in ("row_factors", "col_factors", "ranks"):
            object.__setattr__(self, name, _as_ints(name, getattr(self, name)))
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
            if min(getattr(self, name)) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 1 <= self.num_embeddings <= self.num_padded_rows:
            raise ValueError(
                f"num_embeddings={self.num_embeddings} must lie in 1..{self.num_padded_rows}, "
                f"the product of row_factors={self.row_factors}"
            )
        if self.num_padded_rows > _MAX_ROW_ID:
            raise ValueError(
                f"row_factors={self.row_factors} address {self.num_padded_rows} rows, more than "
                f"an int64 id can name ({_MAX_ROW_ID})"
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

    def check_cores(self, cores: Sequence[torch.Tensor]) -> None:
        """Raises ValueError, with both shapes, unless `cores` are K tensors of `core_shapes`."""
        shapes = tuple(tuple(core.shape) for core in cores)
        if shapes != self.core_shapes:
            raise ValueError(f"cores have shapes {shapes}, the spec needs {self.core_shapes}")
        if len({(core.dtype, core.device) for core in cores}) > 1:
            raise ValueError(
                "cores must share one dtype and device, got "
                f"{[(core.dtype, str(core.device)) for core in cores]}"
            )

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
        """A near-cubic shape for a table of N rows and D columns, in milliseconds for any N.

        Row factors are close to N^(1/K) with little padding, column factors multiply to D exactly
        and are as equal as D allows; both ascend. Give `rank`, or `max_bytes` for the largest rank
        whose cores fit (rounded down to a multiple of 8 from 8 on, which the kernels need for full
        vectors). Ranks are cut to what the shape can use:
        r_k <= min(prod_{j<=k} p_j q_j, prod_{j>k} p_j q_j).

        Args:
            num_embeddings: N >= 1.
            embedding_dim: D >= 1.
            rank: the same wish for all inner ranks.
            max_bytes: budget for all cores together, stored in `dtype`.
            num_cores: K >= 2. The fast kernels are written for 3.
            dtype: storage type that `max_bytes` is counted in.

        Raises:
            TypeError: a number is not an integer.
            ValueError: not exactly one of `rank` and `max_bytes`; a number below 1; or
                `max_bytes` below the size at rank 1.

        Example::

            TTSpec.suggest(1_000_000, 64, rank=16)
            # TTSpec(1000000, (100, 100, 100), (4, 4, 4), (16, 16))
            TTSpec.suggest(1_000_000, 64, max_bytes=1 << 20).ranks   # (24, 24), 998_400 bytes
        """
        num_embeddings = _as_count("num_embeddings", num_embeddings)
        embedding_dim = _as_count("embedding_dim", embedding_dim)
        num_cores = _as_int("num_cores", num_cores)
        if num_cores < 2:
            raise ValueError(f"num_cores={num_cores}: a TT table has at least 2 cores")
        if (rank is None) == (max_bytes is None):
            raise ValueError(
                f"give exactly one of rank and max_bytes, got rank={rank}, max_bytes={max_bytes}"
            )
        p = _near_equal_factors_covering(num_embeddings, num_cores)
        q = _near_equal_factors_of(embedding_dim, num_cores)
        limits = _useful_ranks(p, q)

        def with_rank(rank: int) -> TTSpec:
            return cls(num_embeddings, p, q, tuple(min(rank, limit) for limit in limits))

        if rank is not None:
            return with_rank(_as_count("rank", rank))
        max_bytes = _as_count("max_bytes", max_bytes)
        smallest = with_rank(1).nbytes(dtype)
        if max_bytes < smallest:
            raise ValueError(
                f"max_bytes={max_bytes} is below the {smallest} bytes that "
                f"num_embeddings={num_embeddings}, embedding_dim={embedding_dim} need at rank 1"
            )
        fits, too_big = 1, max(limits) + 1
        while too_big - fits > 1:
            middle = (fits + too_big) // 2
            if with_rank(middle).nbytes(dtype) <= max_bytes:
                fits = middle
            else:
                too_big = middle
        return with_rank(fits if fits < _RANK_ALIGNMENT else fits - fits % _RANK_ALIGNMENT)


def _as_int(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def _as_count(name: str, value: object) -> int:
    count = _as_int(name, value)
    if count < 1:
        raise ValueError(f"{name}={count} must be at least 1")
    return count


def _as_ints(name: str, values: object) -> tuple[int, ...]:
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}")
    return tuple(_as_int(name, value) for value in values)


def _useful_ranks(p: tuple[int, ...], q: tuple[int, ...]) -> list[int]:
    """The full TT rank at every cut: more cannot be used by any table of this shape."""
    sizes = [p_k * q_k for p_k, q_k in zip(p, q, strict=True)]
    return [min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes))]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _ceil_root(n: int, k: int) -> int:
    """The smallest integer whose k-th power is at least n."""
    root = max(1, round(n ** (1 / k)))
    while root**k < n:
        root += 1
    while root > 1 and (root - 1) ** k >= n:
        root -= 1
    return root


def _near_equal_factors_covering(n: int, count: int) -> tuple[int, ...]:
    """`count` ascending factors with a product of at least n: little padding, little stretch."""

    def cost(factors: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        padding = math.log(math.prod(factors) / n)
        stretch = math.log(max(factors) / min(factors))
        return padding + _STRETCH_WEIGHT * stretch**2, factors

    # Two free factors already give paddings below 0.1 % for large n, so with more than three
    # cores only the last three are searched.
    head: list[int] = []
    rest = n
    while count - len(head) > 3:
        head.append(max(1, round(rest ** (1 / (count - len(head))))))
        rest = _ceil_div(rest, head[-1])
    tails = _factor_candidates(rest, count - len(head))
    return min((tuple(sorted((*head, *tail))) for tail in tails), key=cost)


def _factor_candidates(n: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (n,)
        return
    root = _ceil_root(n, count)
    for factor in range(max(1, root - _SEARCH_WIDTH), root + 1):
        for others in _factor_candidates(_ceil_div(n, factor), count - 1):
            yield (factor, *others)


@cache
def _near_equal_factors_of(n: int, count: int) -> tuple[int, ...]:
    """The `count` ascending factors with product n that have the smallest sum."""
    if count == 1:
        return (n,)
    root = _ceil_root(n, count)  # the smallest factor is not above it
    divisors = (d for d in range(1, root + 1) if n % d == 0)
    shapes = ((d, *_near_equal_factors_of(n // d, count - 1)) for d in divisors)
    return min((tuple(sorted(shape)) for shape in shapes), key=lambda shape: (sum(shape), shape))
