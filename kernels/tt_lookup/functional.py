"""Lookups in tensor-train tables as functions: of one table, or of many by one kernel."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from ecorec_torchrec.kernels.tt_index import IndexPlan, TableBatch
from ecorec_torchrec.kernels.tt_index.checks import check_layout
from torch import Tensor

from .backends import choose_engine
from .dtypes import CORE_DTYPES, accumulate_dtype, without_autocast
from .op import tt_lookup
from .products import bmm
from .reference import tt_lookup_reference

_MODES = ("sum", "mean")


class TTShape(Protocol):
    """What a lookup needs to know of a table (`ecorec_torchrec.TTSpec` has it)."""

    @property
    def num_embeddings(self) -> int: ...
    @property
    def row_factors(self) -> tuple[int, ...]: ...
    @property
    def col_factors(self) -> tuple[int, ...]: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...


def tt_embedding_bag(
    indices: Tensor,
    offsets: Tensor | None,
    cores: Sequence[Tensor],
    spec: TTShape,
    *,
    mode: str = "sum",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    output_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
    bounds_check: str = "fatal",
) -> Tensor:
    """Sums or means of bags of rows of one TT table, as `torch.nn.functional.embedding_bag`.

    The table is never materialised: each distinct row is computed once, from the cores
    (TT-Rec, Yin et al. 2021; prefix sharing as in EcoRec). Differentiable once in the cores and
    in the weights.

    Args:
        indices: `(L,)` int32 or int64 ids with `offsets`, or `(B, n)` without: bags of n.
        offsets: `(B,)` int32 or int64 start of every bag, or `(B + 1,)` with
            `include_last_offset`; None for 2-D indices.
        cores: K >= 2 tensors, core k `(p_k, r_{k-1}, q_k, r_k)`; fp32, bf16, fp16 or fp64. Sums run
            in fp32 (fp64 for fp64).
        spec: the table's shape.
        mode: "sum" or "mean". With weights the mean is `sum(w e) / bag length`.
        per_sample_weights: a weight for every index, shaped like `indices`; any float dtype.
        include_last_offset: `offsets` ends with L.
        output_dtype: default: that of the cores.
        workspace_bytes: limit for temporary buffers of one forward or backward call, beside results
            and the index plan (see the family's README). None: the backend's choice. The result
            does not depend on it, bit for bit.
        backend: "auto", "triton", "cpu" or "reference".
        bounds_check: what an id outside [0, num_embeddings) does: "fatal" raises, "warning" warns
            and "ignore" is silent, both using row 0; "none": the caller promises there is none.

    Returns:
        `(B, D)`; empty bags are zero.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: an id, an offset, a shape, a device, a mode or the backend does not fit, or
            `workspace_bytes` is below the floor that the message names.

    Example::

        spec = TTSpec(90, (4, 5, 5), (2, 2, 2), (8, 8))
        cores = [torch.randn(shape) for shape in spec.core_shapes]
        ids, offsets = torch.tensor([3, 89, 3]), torch.tensor([0, 2])
        tt_embedding_bag(ids, offsets, cores, spec)   # (2, 8): rows 3 + 89, row 3
    """
    if indices.dim() == 2:
        if offsets is not None:
            raise ValueError("offsets must be None for 2-D indices: every row is a bag")
        if per_sample_weights is not None and per_sample_weights.shape != indices.shape:
            raise ValueError(
                f"per_sample_weights have shape {tuple(per_sample_weights.shape)}, "
                f"indices {tuple(indices.shape)}"
            )
        num_bags, bag_length = indices.shape
        bounds = torch.arange(num_bags + 1, device=indices.device) * bag_length
        weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        indices = indices.reshape(-1)
    elif offsets is None:
        raise ValueError(f"{indices.dim()}-D indices need offsets")
    else:
        end = offsets.new_full((1,), indices.numel())
        bounds = offsets if include_last_offset else torch.cat([offsets.reshape(-1), end])
        weights = per_sample_weights
    return batched_tt_embedding_bag(
        indices,
        bounds,
        cores,
        _single_table(spec),
        mode=mode,
        per_sample_weights=weights,
        output_dtype=output_dtype,
        workspace_bytes=workspace_bytes,
        backend=backend,
        bounds_check=bounds_check,
    )


def tt_embedding(
    indices: Tensor,
    cores: Sequence[Tensor],
    spec: TTShape,
    *,
    output_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
    bounds_check: str = "fatal",
) -> Tensor:
    """Rows of one TT table, as `torch.nn.functional.embedding`.

    Args:
        indices: int32 or int64 ids of any shape.
        cores, spec, output_dtype, workspace_bytes, backend, bounds_check: as in
            `tt_embedding_bag`.

    Returns:
        `(*indices.shape, D)`.

    Raises:
        TypeError, ValueError: as `tt_embedding_bag`.

    Example::

        tt_embedding(torch.tensor([[3, 89]]), cores, spec)   # (1, 2, D)
    """
    feature_offsets = torch.arange(2, device=indices.device) * indices.numel()
    rows = batched_tt_embedding(
        indices.reshape(-1),
        feature_offsets,
        cores,
        _single_table(spec),
        output_dtype=output_dtype,
        workspace_bytes=workspace_bytes,
        backend=backend,
        bounds_check=bounds_check,
    )
    return rows.view(*indices.shape, rows.shape[1])


def batched_tt_embedding_bag(
    indices_L: Tensor,
    offsets: Tensor,
    cores: Sequence[Tensor],
    batch: TableBatch,
    *,
    mode: str = "sum",
    per_sample_weights: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
    bounds_check: str = "fatal",
) -> Tensor:
    """Pooled rows of F features over T TT tables of equal column factors and ranks.

    One table's results and gradients do not depend on the other tables, bit for bit. Replaces
    FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen` for TT tables.

    Args:
        indices_L: `(L,)` int32 or int64 table-local ids, feature after feature, bag after bag.
        offsets: `(F*B + 1,)` int32 or int64, feature-major (as in a `KeyedJaggedTensor`).
        cores: K flat cores `(sum_t p_tk, r_{k-1}, q_k, r_k)`.
        batch: tables and features.
        mode, per_sample_weights, output_dtype, workspace_bytes, backend, bounds_check: as in
            `tt_embedding_bag`.

    Returns:
        `(B, F*D)`: the features side by side, in the order of `batch.feature_names`.

    Raises:
        TypeError, ValueError: as `tt_embedding_bag`; names the feature or table.

    Example::

        batch = TableBatch(("user", "item"), (90, 50), ((4, 5, 5), (3, 4, 5)), (2, 2, 2), (8, 8),
                           feature_names=("u", "i"), feature_tables=(0, 1))
        cores = [torch.randn(shape) for shape in batch.core_shapes]
        # 2 samples: u = [[7], [8, 9]], i = [[], [5]]
        ids, offsets = torch.tensor([7, 8, 9, 5]), torch.tensor([0, 1, 3, 3, 4])
        batched_tt_embedding_bag(ids, offsets, cores, batch)   # (2, 16)
    """
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {_MODES}, got {mode!r}")
    check_layout(indices_L, offsets, batch, bounds_check)
    _check_cores(cores, batch, indices_L.device)
    weights_L = _checked_weights(per_sample_weights, indices_L, cores[0].dtype)
    return _lookup(
        indices_L,
        offsets,
        list(cores),
        batch,
        weights_L,
        mean=mode == "mean",
        pooled=True,
        output_dtype=output_dtype or cores[0].dtype,
        workspace_bytes=workspace_bytes,
        backend=backend,
        bounds_check=bounds_check,
    )


def batched_tt_embedding(
    indices_L: Tensor,
    feature_offsets: Tensor,
    cores: Sequence[Tensor],
    batch: TableBatch,
    *,
    output_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
    bounds_check: str = "fatal",
) -> Tensor:
    """Rows (no pooling) of F features over T TT tables, as `batched_tt_embedding_bag`.

    Args:
        indices_L: `(L,)` int32 or int64 table-local ids, feature after feature.
        feature_offsets: `(F + 1,)` int32 or int64: feature f owns the ids from entry f to f + 1.

    Returns:
        `(L, D)`, in the order of `indices_L`.

    Raises:
        TypeError, ValueError: as `tt_embedding_bag`; names the feature or table.

    Example::

        batched_tt_embedding(torch.tensor([7, 8, 5]), torch.tensor([0, 2, 3]), cores, batch)
    """
    check_layout(indices_L, feature_offsets, batch, bounds_check)
    if feature_offsets.shape[0] != batch.num_features + 1:
        raise ValueError(
            f"feature_offsets must have {batch.num_features + 1} entries for "
            f"{batch.num_features} features, got {feature_offsets.shape[0]}"
        )
    _check_cores(cores, batch, indices_L.device)
    return _lookup(
        indices_L,
        feature_offsets,
        list(cores),
        batch,
        None,
        mean=False,
        pooled=False,
        output_dtype=output_dtype or cores[0].dtype,
        workspace_bytes=workspace_bytes,
        backend=backend,
        bounds_check=bounds_check,
    )


def _lookup(
    indices_L: Tensor,
    offsets: Tensor,
    cores: list[Tensor],
    batch: TableBatch,
    weights_L: Tensor | None,
    *,
    mean: bool,
    pooled: bool,
    output_dtype: torch.dtype,
    workspace_bytes: int | None,
    backend: str,
    bounds_check: str,
) -> Tensor:
    engine = choose_engine(backend, indices_L.device, cores[0].dtype)
    with without_autocast(indices_L.device.type):
        if engine == "reference":
            if workspace_bytes is not None:
                warnings.warn("backend='reference' ignores workspace_bytes", stacklevel=3)
            return tt_lookup_reference(
                indices_L,
                offsets,
                cores,
                batch,
                weights_L,
                mean=mean,
                pooled=pooled,
                output_dtype=output_dtype,
                bounds_check=bounds_check,
            )
        cores, key = _three_cores(cores, batch)
        plan = IndexPlan(*torch.ops.ecorec.tt_index(indices_L, offsets, key, bounds_check))
        return tt_lookup(
            plan if pooled else plan.unpooled(),
            cores,
            weights_L,
            num_features=batch.num_features if pooled else 1,
            mean=mean,
            output_dtype=output_dtype,
            workspace_bytes=workspace_bytes,
            engine=engine,
        )


def _three_cores(cores: list[Tensor], batch: TableBatch) -> tuple[list[Tensor], str]:
    """Cores and `TableBatch.key` of the same tables with 3 cores, the form the engines know.

    Two cores get a first core of ones. Of more than three, the leading ones are multiplied out,
    table by table: their product has prod(p)/(p_{K-1} p_K) rows, few beside N. Differentiable.
    """
    if batch.num_cores == 3:
        return cores, batch.key
    key = _three_core_key(batch.key)
    if batch.num_cores == 2:
        return [cores[0].new_ones(batch.num_tables, 1, 1, 1), *cores], key
    cores = [core.to(accumulate_dtype(core.dtype)) for core in cores]
    leading = []
    for table, row_factors in enumerate(batch.row_factors):
        product, *others = [
            cores[k].narrow(0, batch.core_offsets[k][table], row_factors[k])
            for k in range(batch.num_cores - 2)
        ]
        for core in others:
            product = _merge(product, core)
        leading.append(product)
    return [torch.cat(leading), *cores[-2:]], key


def _merge(left: Tensor, right: Tensor) -> Tensor:
    """Two neighbouring cores as one: `(i, a, q, r)` and `(j, r, p, s)` to `(i*j, a, q*p, s)`."""
    (i, a, q, r), (j, _, p, s) = left.shape, right.shape
    product = bmm(left.reshape(1, -1, r).expand(j, -1, -1), right.flatten(2))
    by_row = product.view(j, i, a, q, p, s).transpose(0, 1)
    return by_row.reshape(i * j, a, q * p, s)


@torch.compiler.assume_constant_result
def _three_core_key(key: str) -> str:
    batch = TableBatch.from_key(key)
    if batch.num_cores == 2:
        row_factors = tuple((1, *p) for p in batch.row_factors)
        col_factors, ranks = (1, *batch.col_factors), (1, *batch.ranks)
    else:
        row_factors = tuple((math.prod(p[:-2]), *p[-2:]) for p in batch.row_factors)
        col_factors = (math.prod(batch.col_factors[:-2]), *batch.col_factors[-2:])
        ranks = batch.ranks[-2:]
    return replace(batch, row_factors=row_factors, col_factors=col_factors, ranks=ranks).key


def _single_table(spec: TTShape) -> TableBatch:
    return TableBatch(
        ("table",),
        (spec.num_embeddings,),
        (spec.row_factors,),
        spec.col_factors,
        spec.ranks,
        ("indices",),
        (0,),
    )


def _check_cores(cores: Sequence[Tensor], batch: TableBatch, device: torch.device) -> None:
    if len(cores) != batch.num_cores:
        raise ValueError(f"the tables have {batch.num_cores} cores each, got {len(cores)}")
    for k, (core, shape) in enumerate(zip(cores, batch.core_shapes, strict=True)):
        if tuple(core.shape) != shape:
            raise ValueError(f"core {k} must have shape {shape}, got {tuple(core.shape)}")
        if core.dtype not in CORE_DTYPES or core.dtype != cores[0].dtype:
            raise TypeError(
                f"cores must share one dtype of {CORE_DTYPES}, got {[c.dtype for c in cores]}"
            )
        if core.device != device:
            raise ValueError(f"core {k} is on {core.device}, the indices are on {device}")


def _checked_weights(
    weights: Tensor | None, indices_L: Tensor, core_dtype: torch.dtype
) -> Tensor | None:
    """The weights in the dtype of the sums, always a copy: a caller may reuse the buffer before
    backward reads it."""
    if weights is None:
        return None
    if not weights.is_floating_point():
        raise TypeError(f"per_sample_weights must be floating point, got {weights.dtype}")
    if weights.shape != indices_L.shape:
        raise ValueError(
            f"per_sample_weights have shape {tuple(weights.shape)}, "
            f"indices {tuple(indices_L.shape)}: one weight for every index"
        )
    if weights.device != indices_L.device:
        raise ValueError(
            f"per_sample_weights are on {weights.device}, indices on {indices_L.device}"
        )
    return weights.to(accumulate_dtype(core_dtype), copy=True)
