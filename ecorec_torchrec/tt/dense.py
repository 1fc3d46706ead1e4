"""Conversion between a dense table and its cores: TT-SVD one way, materialising the other.

Legend: N rows, D columns, p and q row and column factors, r ranks, C rows of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .spec import TTSpec

# Size of the temporaries of `to_dense`.
_CHUNK_BYTES = 32 << 20
# TT-SVD keeps the table in float64 up to this many entries, in float32 above.
_FLOAT64_ENTRIES = 1 << 24


@torch.no_grad()
def to_dense(cores: Sequence[Tensor], spec: TTSpec, out: Tensor | None = None) -> Tensor:
    """The table that the cores stand for, row i at position i.

    Works in row chunks: beside the result it needs tens of MiB, and rows N..prod(p) are never
    made. Not differentiable.

    Args:
        cores: K tensors of `spec.core_shapes`, one dtype and device.
        spec: the table's shape.
        out: (N, D) tensor of any floating dtype and device to write to (a memory-mapped file's
            tensor, say). By default a new tensor of the cores' dtype and device.

    Returns:
        (N, D), `out` when given. Products are computed in float32, in float64 for such cores.

    Raises:
        TypeError: `out` is not floating point.
        ValueError: shapes of cores or `out` do not fit the spec.

    Example::

        spec = TTSpec(5, (2, 3), (1, 2), (1,))
        cores = [torch.ones(shape) for shape in spec.core_shapes]
        to_dense(cores, spec)   # (5, 2), all ones
    """
    spec.check_cores(cores)
    shape = (spec.num_embeddings, spec.embedding_dim)
    if out is None:
        out = torch.empty(shape, dtype=cores[0].dtype, device=cores[0].device)
    elif tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, the table has {shape}")
    elif not out.is_floating_point():
        raise TypeError(f"out must be floating point, got {out.dtype}")
    for start, rows_CD in _dense_chunks(cores, spec):
        out[start : start + len(rows_CD)] = rows_CD.to(out)
    return out


@torch.no_grad()
def from_dense(weight: Tensor, spec: TTSpec) -> tuple[list[Tensor], float]:
    """Cores that approximate a dense table, by TT-SVD; the way in for pre-trained weights.

    The rows are padded with zeros to prod(p) and the table is cut at one core after the other by a
    truncated singular value decomposition. The error is at most the root of the sum of the squares
    of all discarded singular values; with ranks that discard none it is rounding. (Rows of zeros
    count: a table of low TT rank whose N is below prod(p) is not found again exactly.) Ranks beyond
    what the shape can use are filled up with zeros. Cores are scaled to equal root mean square, so
    that an optimizer treats them alike. Needs about three copies of the table while it runs.

    Args:
        weight: (N, D), floating point, finite.
        spec: the shape wanted, with its ranks.

    Returns:
        The K cores, in the dtype and on the device of `weight`, and the relative error
        ||table - weight|| / ||weight|| (Frobenius, over the N rows; 0.0 for a zero table).

    Raises:
        TypeError: `weight` is not floating point.
        ValueError: its shape does not fit the spec, or an entry is not finite.

    Source: I. Oseledets, "Tensor-Train Decomposition", SIAM J. Sci. Comput. 33 (2011), alg. 1.

    Example::

        spec = TTSpec.suggest(1000, 16, rank=8)
        cores, relative_error = from_dense(torch.randn(1000, 16), spec)
        names = [f"embedding_bags.users.tt_cores.{k}" for k in range(3)]
        ebc.load_state_dict(dict(zip(names, cores)), strict=False)   # a TTEmbeddingBagCollection
    """
    shape = (spec.num_embeddings, spec.embedding_dim)
    if not weight.is_floating_point():
        raise TypeError(f"weight must be floating point, got {weight.dtype}")
    if tuple(weight.shape) != shape:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, the spec describes {shape} "
            "(num_embeddings, embedding_dim)"
        )
    if not weight.isfinite().all():
        bad = int((~weight.isfinite()).sum())
        raise ValueError(f"weight has {bad} entries that are not finite")
    rest = _interleaved(weight, spec)
    cores = []
    for p_k, left, q_k, right in spec.core_shapes[:-1]:
        basis, rest = _truncated_split(rest.reshape(left * p_k * q_k, -1), right)
        cores.append(basis.reshape(left, p_k, q_k, right).transpose(0, 1))
    p_k, left, q_k, right = spec.core_shapes[-1]
    cores.append(rest.reshape(left, p_k, q_k, right).transpose(0, 1))
    cores = [core.to(weight.dtype).contiguous() for core in _balanced(cores)]
    return cores, _relative_error(cores, spec, weight)


def _dense_chunks(cores: Sequence[Tensor], spec: TTSpec) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) in order; a chunk is a run of prefixes (ids without their last digit)."""
    dtype = torch.promote_types(cores[0].dtype, torch.float32)
    cores = [core.to(dtype) for core in cores]
    *head, last = cores
    p_last, rank, q_last, _ = last.shape
    last_RX = last.transpose(0, 1).reshape(rank, p_last * q_last)
    widest = max(core[0].numel() for core in head)
    prefix_bytes = (2 * p_last * spec.embedding_dim + 2 * widest) * dtype.itemsize
    num_prefixes = -(-spec.num_embeddings // p_last)
    chunk = max(1, _CHUNK_BYTES // prefix_bytes)
    for start in range(0, num_prefixes, chunk):
        prefix_C = torch.arange(start, min(start + chunk, num_prefixes), device=last.device)
        prefix_CQR = _prefix_products(head, prefix_C)
        rows = (prefix_CQR.reshape(-1, rank) @ last_RX).reshape(len(prefix_C), -1, p_last, q_last)
        rows_CD = rows.transpose(1, 2).reshape(-1, spec.embedding_dim)
        yield start * p_last, rows_CD[: spec.num_embeddings - start * p_last]


def _prefix_products(head: Sequence[Tensor], prefix_C: Tensor) -> Tensor:
    """(C, prod of the head's q, rank): the product of all cores but the last."""
    digits = []
    for core in reversed(head):
        digits.append(prefix_C % len(core))
        prefix_C = prefix_C // len(core)
    digits.reverse()
    product_CQR = head[0][digits[0]].flatten(1, 2)
    for core, digit_C in zip(head[1:], digits[1:], strict=True):
        product_CQR = product_CQR @ core[digit_C].flatten(2)
        product_CQR = product_CQR.reshape(len(digit_C), -1, core.shape[3])
    return product_CQR


def _interleaved(weight: Tensor, spec: TTSpec) -> Tensor:
    """The padded table as a tensor of axes (p_1, q_1, p_2, q_2, ..), the order TT-SVD cuts in."""
    num_entries = spec.num_padded_rows * spec.embedding_dim
    small = num_entries <= _FLOAT64_ENTRIES or weight.dtype == torch.float64
    dtype = torch.float64 if small else torch.float32
    table = torch.zeros(spec.num_padded_rows, spec.embedding_dim, dtype=dtype, device=weight.device)
    table[: spec.num_embeddings] = weight
    K = spec.num_cores
    axes = [axis for k in range(K) for axis in (k, K + k)]
    return table.reshape(*spec.row_factors, *spec.col_factors).permute(axes).contiguous()


def _truncated_split(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """`matrix` (m, n) as basis (m, rank) times rest (rank, n), the best such approximation.

    The singular vectors come from the smaller Gram matrix, in float64: unfoldings of a table are
    long and thin, and a full decomposition of them would cost far more. The basis is orthonormal
    (up to zero columns), so errors of later cuts carry over to the table unchanged.
    """
    m, n = matrix.shape
    useful = min(rank, m, n)
    if m <= n:
        basis = _leading_eigenvectors(_gram(matrix), useful).to(matrix)
        rest = basis.T @ matrix
    else:
        right = _leading_eigenvectors(_gram(matrix.T), useful).to(matrix)
        basis, triangle = torch.linalg.qr(matrix @ right)
        rest = triangle @ right.T
    if useful < rank:
        basis = torch.nn.functional.pad(basis, (0, rank - useful))
        rest = torch.nn.functional.pad(rest, (0, 0, 0, rank - useful))
    return basis, rest


def _gram(matrix: Tensor, columns: int = 1 << 16) -> Tensor:
    """matrix @ matrix.T in float64, without a float64 copy of all of it."""
    gram = torch.zeros(len(matrix), len(matrix), dtype=torch.float64, device=matrix.device)
    for part in matrix.split(columns, dim=1):
        part = part.double()
        gram.addmm_(part, part.T)
    return gram


def _leading_eigenvectors(gram: Tensor, count: int) -> Tensor:
    _, vectors = torch.linalg.eigh(gram)  # ascending eigenvalues
    return vectors[:, -count:].flip(1)


def _balanced(cores: Sequence[Tensor]) -> list[Tensor]:
    """The same table from cores of equal root mean square."""
    sizes = [float(core.square().mean().sqrt()) for core in cores]
    if min(sizes) == 0:
        return list(cores)
    common = math.exp(sum(math.log(size) for size in sizes) / len(sizes))
    return [core * (common / size) for core, size in zip(cores, sizes, strict=True)]


def _relative_error(cores: Sequence[Tensor], spec: TTSpec, weight: Tensor) -> float:
    error = norm = 0.0
    for start, rows_CD in _dense_chunks(cores, spec):
        wanted_CD = weight[start : start + len(rows_CD)].double()
        error += float((rows_CD - wanted_CD).square().sum())
        norm += float(wanted_CD.square().sum())
    return math.sqrt(error / norm) if norm > 0 else 0.0
