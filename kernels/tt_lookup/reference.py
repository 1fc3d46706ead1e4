"""The truth that every engine is tested against: plain PyTorch, any number of cores, autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from ecorec_torchrec.kernels.tt_index import TableBatch
from ecorec_torchrec.kernels.tt_index.checks import check_offsets, report_out_of_range
from ecorec_torchrec.kernels.tt_index.reference import split_ids
from torch import Tensor

from .dtypes import accumulate_dtype


def tt_rows(digits_KL: list[Tensor], cores: list[Tensor]) -> Tensor:
    """Rows `(L, D)` of TT tables, one chain of products per lookup.

    Args:
        digits_KL: per core `(L,)` row numbers into it.
        cores: K cores `(p_k, r_{k-1}, q_k, r_k)`.
    """
    rows = cores[0][digits_KL[0]].flatten(1, 2)  # (L, q1, r1)
    for digit_L, core in zip(digits_KL[1:], cores[1:], strict=True):
        rows = torch.einsum("lmr,lrqs->lmqs", rows, core[digit_L]).flatten(1, 2)
    return rows.flatten(1)


def tt_lookup_reference(
    indices_L: Tensor,
    offsets: Tensor,
    cores: Sequence[Tensor],
    batch: TableBatch,
    weights_L: Tensor | None = None,
    *,
    mean: bool,
    pooled: bool,
    output_dtype: torch.dtype,
    bounds_check: str,
) -> Tensor:
    """Pooled rows `(B, F*D)`, or without pooling `(L, D)`, one product chain per lookup.

    Args as `batched_tt_embedding_bag` (pooled) and `batched_tt_embedding` (not).
    """
    check_offsets(indices_L, offsets, batch)
    table_L, digits_KL, bag_L, first_out_of_range = split_ids(indices_L, offsets, batch)
    if first_out_of_range >= 0:
        report_out_of_range(first_out_of_range, indices_L, offsets, batch, bounds_check)
    flat_digits_KL = [
        digit_L + torch.tensor(core_offset, device=digit_L.device)[table_L]
        for digit_L, core_offset in zip(digits_KL, batch.core_offsets, strict=True)
    ]
    dtype = accumulate_dtype(cores[0].dtype)
    rows_LD = tt_rows(flat_digits_KL, [core.to(dtype) for core in cores])
    if not pooled:
        return rows_LD.to(output_dtype)
    if weights_L is not None:
        rows_LD = rows_LD * weights_L.unsqueeze(1)
    num_bags, num_features = offsets.shape[0] - 1, batch.num_features
    pooled_BD = rows_LD.new_zeros(num_bags, batch.embedding_dim).index_add(0, bag_L, rows_LD)
    if mean:
        pooled_BD = pooled_BD / offsets.diff().clamp(min=1).unsqueeze(1)
    by_bag = pooled_BD.view(num_features, num_bags // num_features, batch.embedding_dim)
    return by_bag.transpose(0, 1).flatten(1).to(output_dtype)
