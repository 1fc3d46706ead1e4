"""`ecorec::tt_index`: the index plan as an operator that compilers can see."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from . import reference
from .checks import check_layout, check_offsets, report_out_of_range
from .plan import IndexPlan
from .table_batch import TableBatch


@torch.compiler.assume_constant_result
def numba_error() -> str | None:
    """Why numba cannot be used; None if it can."""
    return _import_error("numba")


@torch.compiler.assume_constant_result
def triton_error() -> str | None:
    """Why Triton cannot be used; None if it can."""
    return _import_error("triton")


@cache
def _import_error(name: str) -> str | None:
    try:
        import_module(name)
    except Exception as error:  # a numba that does not fit numpy fails in many ways
        return f"{type(error).__name__}: {error}"
    return None


def index_plan(
    indices_L: Tensor, offsets: Tensor, batch: TableBatch, *, bounds_check: str = "fatal"
) -> IndexPlan:
    """Checks the ids of a batch, then sorts, deduplicates and groups them for a lookup.

    Args:
        indices_L: `(L,)` int32 or int64 table-local ids, feature after feature; any strides.
        offsets: `(F*B + 1,)` int32 or int64, bags feature-major as in a `KeyedJaggedTensor`.
        batch: the tables, of 3 cores, and the features.
        bounds_check: what an id outside [0, num_embeddings) does: "fatal" raises, "warning" warns
            once per call, "ignore" nothing; in both latter cases the id counts as 0. "none" does
            not look: on a CUDA device it saves a host synchronisation, and the caller promises
            that ids are in range and offsets are right.

    Returns:
        The plan; it shares no memory with the input.

    Raises:
        TypeError: ids or offsets are not int32 or int64.
        ValueError: an id is out of range ("fatal"), or shapes, devices or offsets do not fit; the
            message names the feature or table, the value and the limit.

    Example::

        batch = TableBatch(("t",), (8,), ((2, 2, 2),), (1, 1, 1), (1, 1), ("f",), (0,))
        plan = index_plan(torch.tensor([5, 3, 5, 4, 1]), torch.tensor([0, 3, 5]), batch)
        plan.counts        # U = 4, P = 3
        plan.order_L       # 4 3 0 2 1
    """
    check_layout(indices_L, offsets, batch, bounds_check)
    return IndexPlan(*torch.ops.ecorec.tt_index(indices_L, offsets, batch.key, bounds_check))


@torch.library.custom_op("ecorec::tt_index", mutates_args=())
def tt_index(indices: Tensor, offsets: Tensor, batch: str, bounds_check: str) -> list[Tensor]:
    tables = TableBatch.from_key(batch)
    indices, offsets = indices.contiguous(), offsets.contiguous()
    if bounds_check != "none" or indices.device.type == "cpu":
        check_offsets(indices, offsets, tables)
    plan, first_out_of_range = _builder(indices.device)(indices, offsets, tables)
    # On a GPU the position is a tensor: whoever does not look does not wait.
    if bounds_check in ("fatal", "warning") and first_out_of_range >= 0:
        report_out_of_range(int(first_out_of_range), indices, offsets, tables, bounds_check)
    return list(plan)


def _builder(device: torch.device) -> Callable[..., tuple[IndexPlan, int | Tensor]]:
    if device.type == "cpu" and numba_error() is None:
        from . import cpu_plan  # imported on use: numba takes a second

        return cpu_plan.build_plan
    if device.type == "cuda" and triton_error() is None:
        from . import triton_plan

        return triton_plan.build_plan
    return reference.build_plan


@tt_index.register_fake
def _(indices: Tensor, offsets: Tensor, batch: str, bounds_check: str) -> list[Tensor]:
    num_lookups = indices.shape[0]
    num_groups = TableBatch.from_key(batch).core_shapes[1][0]
    lengths = {"group_starts": num_groups + 1, "offsets": offsets.shape[0], "counts": 2}
    lengths |= {"row_starts": num_lookups + 1, "prefix_starts": num_lookups + 1}
    return [
        indices.new_empty(lengths.get(name, num_lookups), dtype=torch.int32)
        for name in IndexPlan._fields
    ]
