"""TT lookup on the CPU: buffers, parts and threads around the loops of `cpu_kernels`.

As in EcoRec (SC'24) each unique row and each prefix is computed once, in micro-batches of sorted
rows; its small products per prefix and its atomic additions are replaced by matrix products per
group and one owner per result. Does for TT cores what FBGEMM's
`SplitTableBatchedEmbeddingBagsCodegen` does for dense tables on the CPU.

Legend: L lookups, U unique rows, P prefixes, B bags per feature, F features, D embedding_dim. A
*part* is a run of prefixes whose rows are held at the same time: the micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from ecorec_torchrec.kernels.tt_index import IndexPlan
from ecorec_torchrec.kernels.tt_index.cpu_threads import parallel_for
from torch import Tensor

from . import cpu_kernels as kernels

_DEFAULT_ROWS_BYTES = 64 * 2**20
_DEFAULT_COPIES_BYTES = 32 * 2**20
_MIN_LOOKUPS_PER_WORKER = 2048
_TASKS_PER_WORKER = 4
_MIN_ELEMENTS_TO_SHARE = 2**19
_ALIGNMENT_BYTES = 64
_FLOAT_BYTES = 4
_OVERHEAD_BYTES = 16_384
"""Alignment of the buffers, and the objects that hold them."""


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
        ValueError: `workspace_bytes` is below what the call and its largest prefix need.
    """
    call = _Call.of(plan, cores, num_features, mean)
    out = torch.empty(plan.num_bags // num_features, num_features * call.embedding_dim)
    fixed_bytes = _cast_bytes(*cores) + (out.nbytes if output_dtype != out.dtype else 0)
    fixed_bytes += 0 if weights_L is None else weights_L.nbytes  # in pooled order
    weights = _array(weights_L)
    pooled_weights_L = _floats(len(weights))
    kernels.take(weights, call.index.pooled_occurrence_L, pooled_weights_L)
    for part in _parts(call, fixed_bytes, workspace_bytes):
        pool = partial(
            kernels.pool_rows, call.shape, part.rows, part.row_low, part.row_high,
            part.row_high == call.num_rows, call.index.pooled_row_L, pooled_weights_L,
            call.index.offsets, part.next_of_bag, num_features, mean, part.scratches,
            out.numpy().reshape(-1),
        )  # fmt: skip
        _parallel_ranges(0, plan.num_bags, len(part.scratches), pool)
    return out.to(output_dtype)


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
        ValueError: `workspace_bytes` is below what the call and its largest prefix or table need.
    """
    call = _Call.of(plan, cores, num_features, mean)
    fixed_bytes = _cast_bytes(grad, *cores, *(cores if needs_cores else ()))
    grad_floats = grad.detach().float().numpy().reshape(-1)
    weights_grad, core_grads = None, None
    # The core gradients come first: their floor is raised to that of the weights gradient, so that
    # one error names what the whole call needs.
    wanted_weights_L = weights_L if needs_weights else None
    if needs_cores:
        float_grads = [torch.zeros(core.shape) for core in cores]
        if call.num_prefixes:
            _core_gradients_(
                float_grads,
                call,
                grad_floats,
                _array(weights_L),
                0 if wanted_weights_L is None else _rows_floor(call),
                fixed_bytes,
                workspace_bytes,
            )
        core_grads = [g.to(core.dtype) for g, core in zip(float_grads, cores, strict=True)]
    if wanted_weights_L is not None:
        weights_grad = torch.empty_like(wanted_weights_L)
        _weights_gradient_(weights_grad, call, grad_floats, fixed_bytes, workspace_bytes)
    return core_grads, weights_grad


@dataclass(frozen=True)
class _Call:
    """What all passes of one call share."""

    index: Any  # an IndexPlan whose fields are arrays
    num_rows: int
    num_prefixes: int
    shape: tuple[int, ...]  # q1, q2, q3, r1, r2
    cores: list[np.ndarray]  # float32 (rows, row size)
    num_features: int
    mean: bool
    num_workers: int

    @classmethod
    def of(cls, plan: IndexPlan, cores: list[Tensor], num_features: int, mean: bool) -> _Call:
        num_rows, num_prefixes = plan.counts.tolist()
        shape = (*(core.shape[2] for core in cores), cores[0].shape[3], cores[1].shape[3])
        arrays = [core.detach().float().flatten(1).numpy() for core in cores]
        num_workers = min(torch.get_num_threads(), plan.num_lookups // _MIN_LOOKUPS_PER_WORKER)
        index: Any = [tensor.numpy() for tensor in plan]
        return cls(
            IndexPlan(*index), num_rows, num_prefixes, shape, arrays, num_features, mean,
            max(1, num_workers),
        )  # fmt: skip

    @property
    def embedding_dim(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2]


class _Part(NamedTuple):
    """Computed rows row_low..row_high, and what pooling them needs."""

    rows: np.ndarray  # elements of the rows, transposed (q3, M), from row_low on
    row_low: int
    row_high: int
    next_of_bag: np.ndarray  # (F*B,) first pooled entry that no part has summed
    scratches: np.ndarray  # (workers, elements)


def _parts(call: _Call, fixed_bytes: int, workspace_bytes: int | None) -> Iterator[_Part]:
    """Computes all unique rows, part by part; one empty part if there are none."""
    index, dim = call.index, call.embedding_dim
    layout = kernels.rows_layout(call.shape)
    starts = index.prefix_starts[: call.num_prefixes + 1]
    scratch_size = max(layout[-1], kernels.bag_layout(call.shape)[-1])
    num_workers, rows_bytes = _divide_workspace(
        call.num_workers,
        scratch_size,
        _rows_floor(call),
        _DEFAULT_ROWS_BYTES,
        fixed_bytes,
        workspace_bytes,
    )
    max_rows = (rows_bytes - index.offsets.nbytes) // (dim * _FLOAT_BYTES)
    rows = _floats(min(max_rows, call.num_rows) * dim)
    scratches = _floats(num_workers, scratch_size)
    next_of_bag = index.offsets[:-1].copy()
    low = 0
    while True:
        row_low = int(starts[low])
        high = int(np.searchsorted(starts, row_low + max_rows, side="right")) - 1
        compute = partial(
            kernels.compute_rows, call.shape, *call.cores, index.i1_P, index.i2_P, index.i3_U,
            index.prefix_starts, kernels.block_prefixes(call.shape), layout, scratches, rows,
            row_low,
        )  # fmt: skip
        _parallel_ranges(low, high, num_workers, compute)
        yield _Part(rows, row_low, int(starts[high]), next_of_bag, scratches)
        if high == call.num_prefixes:
            return
        low = high


def _rows_floor(call: _Call) -> int:
    """Bytes of the rows of the largest prefix, and of `next_of_bag`."""
    starts = call.index.prefix_starts[: call.num_prefixes + 1]
    largest = int(np.diff(starts).max(initial=0))
    return largest * call.embedding_dim * _FLOAT_BYTES + call.index.offsets.nbytes


def _weights_gradient_(
    weights_grad_L: Tensor,
    call: _Call,
    grad: np.ndarray,
    fixed_bytes: int,
    workspace_bytes: int | None,
) -> None:
    index = call.index
    for part in _parts(call, fixed_bytes, workspace_bytes):
        dots = partial(
            kernels.weight_gradients, call.shape, part.rows, part.row_low, part.row_high,
            index.pooled_row_L, index.pooled_occurrence_L, index.offsets, part.next_of_bag,
            call.num_features, call.mean, part.scratches, grad, weights_grad_L.numpy(),
        )  # fmt: skip
        _parallel_ranges(0, len(part.next_of_bag), len(part.scratches), dots)


def _core_gradients_(
    core_grads: list[Tensor],
    call: _Call,
    grad: np.ndarray,
    weights_L: np.ndarray,
    other_floor: int,
    fixed_bytes: int,
    workspace_bytes: int | None,
) -> None:
    """Writes the gradients of the cores, a run of independent ranges at a time."""
    index, (q1, _, q3, r1, r2) = call.index, call.shape
    layout = kernels.gradient_layout(call.shape)
    place_L, factor_L = _sorted_lookups(call, weights_L)
    G3_T = _floats(len(call.cores[2]), q3 * r2)
    G3_T.reshape(-1, q3, r2)[:] = call.cores[2].reshape(-1, r2, q3).transpose(0, 2, 1)
    range_starts = np.empty((len(index.group_starts), 3), np.int64)
    highest = np.empty((len(index.group_starts), 2), np.int64)
    num_ranges = kernels.independent_ranges(
        index.group_starts, index.i1_P, index.i3_U, index.prefix_starts, highest, range_starts
    )
    # The partial sums of a range cover the rows of G1 and G3 up to the next range.
    copy_bytes_R = np.diff(range_starts[: num_ranges + 1, 1:], axis=0) @ [q1 * r1, q3 * r2]
    copy_bytes_R *= kernels.NUM_COPIES * _FLOAT_BYTES
    fixed_bytes += factor_L.nbytes + (place_L.nbytes if place_L is not index.bag_L else 0)
    fixed_bytes += G3_T.nbytes + range_starts.nbytes + highest.nbytes + copy_bytes_R.nbytes
    num_workers, max_copy_bytes = _divide_workspace(
        call.num_workers,
        layout[-1],
        max(int(copy_bytes_R.max()), other_floor),
        _DEFAULT_COPIES_BYTES,
        fixed_bytes,
        workspace_bytes,
    )
    scratches = _floats(num_workers, layout[-1])
    dG1, dG2, dG3 = (gradient.flatten(1).numpy() for gradient in core_grads)
    runs = list(_runs(copy_bytes_R, max_copy_bytes))
    buffer = _floats(max(int(copy_bytes_R[a:b].sum()) for a, b in runs) // _FLOAT_BYTES)
    for first, end in runs:
        ranges = range_starts[first : end + 1]
        (_, low_1, low_3), (_, high_1, high_3) = ranges[0].tolist(), ranges[-1].tolist()
        size_1 = kernels.NUM_COPIES * (high_1 - low_1) * q1 * r1
        size_3 = kernels.NUM_COPIES * (high_3 - low_3) * q3 * r2
        dG1_copies = buffer[:size_1].reshape(kernels.NUM_COPIES, -1, q1 * r1)
        dG3_copies = buffer[size_1 : size_1 + size_3].reshape(kernels.NUM_COPIES, -1, q3 * r2)
        num_tasks = 1
        if num_workers > 1:
            num_tasks = min(end - first, _TASKS_PER_WORKER) * kernels.NUM_COPIES
        add_gradients = partial(
            kernels.core_gradients, call.shape, *call.cores[:2], G3_T, index.i1_P, index.i2_P,
            index.i3_U, index.prefix_starts, index.group_starts, index.row_starts, place_L,
            factor_L, grad, kernels.block_prefixes(call.shape), layout, scratches, ranges, dG2,
            dG1_copies, dG3_copies, num_tasks,
        )  # fmt: skip
        parallel_for(add_gradients, num_tasks, num_workers)
        for copies, height, width, total in (
            (dG1_copies, 1, q1 * r1, dG1[low_1:high_1]),
            (dG3_copies, q3, r2, dG3[low_3:high_3]),
        ):
            add_up = partial(kernels.sum_copies, copies, height, width, total)
            is_small = copies.size < _MIN_ELEMENTS_TO_SHARE
            _parallel_ranges(0, len(total), 1 if is_small else num_workers, add_up)


def _sorted_lookups(call: _Call, weights_L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per sorted lookup its row of the gradient `(B*F, D)`, and its factor (empty: all ones)."""
    index, num_lookups = call.index, len(call.index.bag_L)
    place_L = index.bag_L if call.num_features == 1 else np.empty(num_lookups, np.int32)
    factor_L = _floats(num_lookups if call.mean or len(weights_L) else 0)
    kernels.sorted_lookups(
        index.bag_L, index.order_L, index.offsets, weights_L, call.num_features, call.mean,
        place_L, factor_L,
    )  # fmt: skip
    return place_L, factor_L


def _array(weights_L: Tensor | None) -> np.ndarray:
    """The weights; empty for "all ones"."""
    return np.empty(0, np.float32) if weights_L is None else weights_L.detach().numpy()


def _runs(bytes_R: np.ndarray, max_bytes: int) -> Iterator[tuple[int, int]]:
    """First and end of runs whose sum stays within the limit, or that hold one entry."""
    start, total = 0, 0
    for i, num_bytes in enumerate(bytes_R.tolist()):
        if i > start and total + num_bytes > max_bytes:
            yield start, i
            start, total = i, 0
        total += num_bytes
    yield start, len(bytes_R)


def _parallel_ranges(
    low: int, high: int, num_workers: int, run: Callable[[int, int, int], None]
) -> None:
    """`run(first, end, worker)` over pieces of low..high."""
    num_tasks = min(high - low, 1 if num_workers == 1 else num_workers * _TASKS_PER_WORKER)

    def run_piece(task: int, worker: int) -> None:
        first, end = (low + (high - low) * t // num_tasks for t in (task, task + 1))
        run(first, end, worker)

    parallel_for(run_piece, num_tasks, num_workers)


def _divide_workspace(
    num_workers: int,
    scratch_size: int,
    largest_bytes: int,
    default_bytes: int,
    fixed_bytes: int,
    workspace_bytes: int | None,
) -> tuple[int, int]:
    """Divides the workspace between scratch, one per thread, and the buffer that is cut in parts.

    Returns:
        The number of threads that there is scratch for, and the bytes of the buffer: at least
        `largest_bytes`, its largest indivisible piece.

    Raises:
        ValueError: not even one thread and the largest piece fit.
    """
    if workspace_bytes is None:
        return num_workers, max(default_bytes, largest_bytes)
    fixed_bytes += _OVERHEAD_BYTES
    scratch_bytes = scratch_size * _FLOAT_BYTES
    floor = fixed_bytes + scratch_bytes + largest_bytes
    if workspace_bytes < floor:
        raise ValueError(
            f"workspace_bytes={workspace_bytes} is below the floor of {floor} bytes: {fixed_bytes} "
            f"for the whole call, {scratch_bytes} for a thread and {largest_bytes} for the largest "
            "indivisible piece (the rows of a prefix, the partial sums of a table)"
        )
    spare_bytes = workspace_bytes - fixed_bytes
    # Threads get half of what is left, and never what the largest piece needs.
    for_threads = min(spare_bytes // 2, spare_bytes - largest_bytes)
    num_workers = max(1, min(num_workers, for_threads // scratch_bytes))
    return num_workers, spare_bytes - num_workers * scratch_bytes


def _floats(*shape: int) -> np.ndarray:
    """Uninitialised float32, on a cache line's boundary: vectors then never straddle two."""
    size = math.prod(shape)
    raw = np.empty(size + _ALIGNMENT_BYTES // _FLOAT_BYTES, np.float32)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES // _FLOAT_BYTES
    return raw[start : start + size].reshape(shape)


def _cast_bytes(*tensors: Tensor) -> int:
    """Bytes of float32 copies of the tensors that have another dtype."""
    return sum(t.numel() * _FLOAT_BYTES for t in tensors if t.dtype != torch.float32)
