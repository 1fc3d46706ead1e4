"""The patterns as one differentiable function of ids, offsets and cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from ecorec_torchrec.kernels.tt_lookup.functional import TTShape
from torch import Tensor
from torch.autograd.function import once_differentiable

from .lookups import Shape


class Pattern(Protocol):
    """How a batch is computed; frozen dataclasses. `lookups` is whatever `prepare` makes."""

    def prepare(self, indices_L: Tensor, offsets: Tensor, shape: Shape) -> Any: ...
    def forward(self, lookups: Any, cores: list[Tensor], shape: Shape) -> Tensor: ...
    def backward(
        self, grad_BD: Tensor, lookups: Any, cores: list[Tensor], shape: Shape
    ) -> list[Tensor]: ...


def baseline_embedding_bag(
    indices: Tensor,
    offsets: Tensor,
    cores: Sequence[Tensor],
    spec: TTShape,
    pattern: Pattern,
    *,
    include_last_offset: bool = False,
) -> Tensor:
    """Sums of bags of rows of one TT table, computed as a published system does.

    For comparison only; `ecorec_torchrec.kernels.tt_embedding_bag` is what to use. Narrower, as
    the originals are: one table of 3 cores, fp32 (here fp64 too, in PyTorch), sums, no weights.
    Differentiable once in the cores; the originals change the cores in place instead.

    Args:
        indices: `(L,)` int32 or int64 ids.
        offsets: `(B,)` int32 or int64 start of every bag, or `(B + 1,)` with `include_last_offset`.
        cores: core k `(p_k, r_{k-1}, q_k, r_k)`, fp32 or fp64.
        spec: the table's shape (a `TTSpec`).
        pattern: `TTRec`, `ELRec`, `EcoRec`, or on the CPU `NumbaEcoRec`, `NumbaEcoRecTuned`.
        include_last_offset: `offsets` ends with L.

    Returns:
        `(B, D)`; empty bags are zero.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: not 3 cores, or an id, an offset, a shape or a device does not fit.

    Example::

        spec = TTSpec(90, (4, 5, 5), (2, 2, 2), (8, 8))
        cores = [torch.randn(shape) for shape in spec.core_shapes]
        ids, offsets = torch.tensor([3, 89, 3]), torch.tensor([0, 2])
        baseline_embedding_bag(ids, offsets, cores, spec, EcoRec())   # (2, 8): rows 3 + 89, row 3
    """
    shape = _shape(cores, spec, indices.device)
    if not include_last_offset:
        offsets = torch.cat([offsets, offsets.new_full((1,), indices.numel())])
    lookups = pattern.prepare(indices, offsets, shape)
    return _Lookup.apply(pattern, lookups, shape, *cores)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pattern: Pattern, lookups: Any, shape: Shape, *cores: Tensor) -> Tensor:
        ctx.pattern, ctx.lookups, ctx.shape = pattern, lookups, shape
        ctx.save_for_backward(*cores)
        return pattern.forward(lookups, [core.contiguous() for core in cores], shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        cores = [core.contiguous() for core in ctx.saved_tensors]
        grads = ctx.pattern.backward(grad.contiguous(), ctx.lookups, cores, ctx.shape)
        return None, None, None, *grads


def _shape(cores: Sequence[Tensor], spec: TTShape, device: torch.device) -> Shape:
    if len(spec.row_factors) != 3:
        raise ValueError(f"the patterns are for 3 cores, the spec has {len(spec.row_factors)}")
    ranks = (1, *spec.ranks, 1)
    shapes = tuple(zip(spec.row_factors, ranks, spec.col_factors, ranks[1:], strict=False))
    if tuple(tuple(core.shape) for core in cores) != shapes:
        raise ValueError(f"cores must have shapes {shapes}, got {[tuple(c.shape) for c in cores]}")
    dtypes = {core.dtype for core in cores}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        raise TypeError(f"cores must be all fp32 or all fp64, got {[c.dtype for c in cores]}")
    if any(core.device != device for core in cores):
        raise ValueError(f"cores are on {[str(c.device) for c in cores]}, indices on {device}")
    p1, p2, p3 = spec.row_factors
    q1, q2, q3 = spec.col_factors
    r1, r2 = spec.ranks
    return Shape(spec.num_embeddings, (p1, p2, p3), (q1, q2, q3), (r1, r2))
