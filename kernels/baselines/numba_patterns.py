"""EcoRec's pattern on the CPU in the engine of `tt_lookup`: as published, and tuned.

Same sort, same SIMD tiles, same threads as the `cpu` backend of `tt_lookup`, so that what is left
between them is the algorithm. CPU tensors, fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from ecorec_torchrec.kernels.tt_index.cpu_threads import parallel_for
from torch import Tensor

from . import cpu_kernels as kernels
from .lookups import MicroBatch, Shape, SortedLookups

_MIN_LOOKUPS_PER_WORKER = 2048
_TASKS_PER_WORKER = 4
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class NumbaEcoRec:
    """EcoRec (SC'24) as published: every product of a micro-batch is held before it is added.

    Gradients of the cores are added to one copy of all cores per thread, where the original adds
    atomically to one.

    Args:
        micro_batch_rows: as in `EcoRec`.
    """

    micro_batch_rows: int | None = 20_000

    def prepare(self, indices_L: Tensor, offsets: Tensor, shape: Shape) -> SortedLookups:
        return SortedLookups.of(indices_L, offsets, shape)

    def forward(self, lookups: SortedLookups, cores: list[Tensor], shape: Shape) -> Tensor:
        call = _Call.of(lookups, cores, shape)
        scratches = _floats(call.num_workers, call.prefix_size)
        pool = _Pool(call)
        for part in lookups.micro_batches(self.micro_batch_rows):
            prefixes = self._prefixes(call, part)
            rows = _floats(part.rows.stop - part.rows.start, shape.dim)
            call.for_ranges(
                part.prefixes, kernels.rows_from_prefixes, call.sizes, call.cores[2], call.i3_U,
                call.prefix_starts, prefixes, part.prefixes.start, scratches, rows,
                part.rows.start, part.rows.stop,
            )  # fmt: skip
            pool.add(rows, part.rows)
        return pool.output()

    def backward(
        self, grad_BD: Tensor, lookups: SortedLookups, cores: list[Tensor], shape: Shape
    ) -> list[Tensor]:
        call = _Call.of(lookups, cores, shape)
        G2_T, G3_T = call.transposed(1), call.transposed(2)
        copies = call.gradient_copies()
        for part in lookups.micro_batches(self.micro_batch_rows):
            self._add_gradients_(copies, call, part, grad_BD.numpy(), G2_T, G3_T)
        return call.summed(copies)

    def _prefixes(self, call: _Call, part: MicroBatch) -> np.ndarray:
        prefixes = _floats(part.prefixes.stop - part.prefixes.start, call.prefix_size)
        call.for_ranges(
            part.prefixes, kernels.prefix_products, call.sizes, *call.cores[:2], call.i1_P,
            call.i2_P, prefixes, part.prefixes.start,
        )  # fmt: skip
        return prefixes

    def _add_gradients_(
        self,
        copies: list[np.ndarray],
        call: _Call,
        part: MicroBatch,
        grad: np.ndarray,
        G2_T: np.ndarray,
        G3_T: np.ndarray,
    ) -> None:
        G1, G2, G3 = call.cores
        (rows, prefixes), low = part[:2], part.prefixes.start
        num_rows, num_prefixes = rows.stop - rows.start, prefixes.stop - low
        row_grads = _floats(num_rows, call.dim)
        core3_items = _floats(num_rows, G3.shape[1])
        prefix_items = _floats(num_rows, call.prefix_size)
        call.for_ranges(
            prefixes, kernels.row_items, call.sizes, G3_T, call.i3_U, call.prefix_starts,
            call.row_starts, call.bag_L, grad, self._prefixes(call, part), low, row_grads,
            core3_items, prefix_items, rows.start, rows.stop,
        )  # fmt: skip
        prefix_grads = _floats(num_prefixes, call.prefix_size)
        call.for_ranges(
            prefixes, kernels.scatter_rows, call.i3_U, call.prefix_starts, core3_items,
            prefix_items, prefix_grads, low, copies[2], rows.start, rows.stop,
        )  # fmt: skip
        del row_grads, core3_items, prefix_items
        core1_items = _floats(num_prefixes, G1.shape[1])
        core2_items = _floats(num_prefixes, G2.shape[1])
        call.for_ranges(
            prefixes, kernels.prefix_items, call.sizes, G1, G2_T, call.i1_P, call.i2_P,
            prefix_grads, core1_items, core2_items, low,
        )  # fmt: skip
        call.for_ranges(
            prefixes, kernels.scatter_prefixes, call.i1_P, call.i2_P, core1_items, core2_items,
            *copies[:2], low,
        )  # fmt: skip


@dataclass(frozen=True)
class NumbaEcoRecTuned:
    """EcoRec's products, each used while it is in the cache: no item is held but the unique rows.

    The strongest form of the pattern that we know on the CPU: still one small product per prefix
    and per row, but nothing else goes through memory than rows, cores and one copy of the core
    gradients per thread.
    """

    def prepare(self, indices_L: Tensor, offsets: Tensor, shape: Shape) -> SortedLookups:
        return SortedLookups.of(indices_L, offsets, shape)

    def forward(self, lookups: SortedLookups, cores: list[Tensor], shape: Shape) -> Tensor:
        call = _Call.of(lookups, cores, shape)
        rows = _floats(lookups.num_rows, shape.dim)
        call.for_ranges(
            slice(0, lookups.num_prefixes), kernels.rows_at_once, call.sizes, *call.cores,
            call.i1_P, call.i2_P, call.i3_U, call.prefix_starts,
            _floats(call.num_workers, 2 * call.prefix_size), rows,
        )  # fmt: skip
        pool = _Pool(call)
        pool.add(rows, slice(0, lookups.num_rows))
        return pool.output()

    def backward(
        self, grad_BD: Tensor, lookups: SortedLookups, cores: list[Tensor], shape: Shape
    ) -> list[Tensor]:
        call = _Call.of(lookups, cores, shape)
        copies = call.gradient_copies()
        call.for_ranges(
            slice(0, lookups.num_prefixes), kernels.gradients_at_once, call.sizes, *call.cores[:2],
            call.transposed(1), call.transposed(2), call.i1_P, call.i2_P, call.i3_U,
            call.prefix_starts, call.row_starts, call.bag_L, grad_BD.numpy(),
            _floats(call.num_workers, 2 * call.prefix_size + call.dim), *copies,
        )  # fmt: skip
        return call.summed(copies)


class _Call(NamedTuple):
    """One call as arrays, and how its loops are spread over threads."""

    sizes: tuple[int, int, int, int, int]  # q1, q2, q3, r1, r2
    cores: list[np.ndarray]  # (rows, row size)
    num_workers: int
    bag_L: np.ndarray
    row_starts: np.ndarray
    prefix_starts: np.ndarray
    i1_P: np.ndarray
    i2_P: np.ndarray
    i3_U: np.ndarray
    pooled_row_L: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, lookups: SortedLookups, cores: list[Tensor], shape: Shape) -> _Call:
        if cores[0].device.type != "cpu" or cores[0].dtype != torch.float32:
            raise ValueError(
                f"the numba patterns take fp32 CPU tensors, got {cores[0].dtype} on "
                f"{cores[0].device}"
            )
        num_workers = min(torch.get_num_threads(), len(lookups.bag_L) // _MIN_LOOKUPS_PER_WORKER)
        return cls(
            (*shape.col_factors, *shape.ranks),
            [core.detach().flatten(1).numpy() for core in cores],
            max(1, num_workers),
            *(tensor.numpy() for tensor in lookups),
        )

    @property
    def prefix_size(self) -> int:
        q1, q2, _, _, r2 = self.sizes
        return q1 * q2 * r2

    @property
    def dim(self) -> int:
        q1, q2, q3, _, _ = self.sizes
        return q1 * q2 * q3

    def for_ranges(self, items: slice, loop: Callable[..., None], *arguments: object) -> None:
        """`loop(*arguments, low, high, worker)` over pieces of `items`."""
        count = items.stop - items.start
        num_tasks = 1 if self.num_workers == 1 else self.num_workers * _TASKS_PER_WORKER
        num_tasks = min(count, num_tasks)
        run_range = partial(loop, *arguments)

        def run(task: int, worker: int) -> None:
            low, high = (items.start + count * t // num_tasks for t in (task, task + 1))
            run_range(low, high, worker)

        parallel_for(run, num_tasks, self.num_workers)

    def transposed(self, k: int) -> np.ndarray:
        """Core 1 or 2 (G2 or G3) with each row's matrix transposed."""
        core = self.cores[k]
        height = self.sizes[3] if k == 1 else self.sizes[4]
        target = _floats(*core.shape)
        width = core.shape[1] // height
        self.for_ranges(slice(0, len(core)), kernels.transpose_rows, target, core, height, width)
        return target

    def gradient_copies(self) -> list[np.ndarray]:
        """Per core, zeros for each thread to add to; those of G3 have transposed rows."""
        copies = [_floats(self.num_workers, *core.shape) for core in self.cores]
        for copy in copies:
            copy.fill(0)
        return copies

    def summed(self, copies: list[np.ndarray]) -> list[Tensor]:
        """The gradients, in the shape of the cores."""
        q1, q2, q3, r1, r2 = self.sizes
        if self.num_workers > 1:
            for copy in copies:
                self.for_ranges(slice(0, copy.shape[1]), kernels.sum_copies, copy)
        dG3 = np.empty_like(copies[2][0])
        self.for_ranges(slice(0, len(dG3)), kernels.transpose_rows, dG3, copies[2][0], q3, r2)
        shapes = ((-1, 1, q1, r1), (-1, r1, q2, r2), (-1, r2, q3, 1))
        grads = (copies[0][0], copies[1][0], dG3)
        return [torch.from_numpy(g).view(s) for g, s in zip(grads, shapes, strict=True)]


class _Pool:
    """Sums of bags, from rows that come micro-batch by micro-batch."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._next_of_bag = call.offsets[:-1].copy()
        self._out_T = _floats(len(self._next_of_bag), call.dim)
        self._out_T.fill(0)

    def add(self, rows: np.ndarray, numbers: slice) -> None:
        """Adds the unique rows `numbers`, held transposed in `rows`."""
        call = self._call
        call.for_ranges(
            slice(0, len(self._out_T)), kernels.pool, call.dim, rows, numbers.start, numbers.stop,
            call.pooled_row_L, call.offsets, self._next_of_bag, self._out_T,
        )  # fmt: skip

    def output(self) -> Tensor:
        call, q3 = self._call, self._call.sizes[2]
        out = np.empty_like(self._out_T)
        call.for_ranges(
            slice(0, len(out)), kernels.transpose_rows, out, self._out_T, q3, call.dim // q3
        )
        return torch.from_numpy(out)


def _floats(*shape: int) -> np.ndarray:
    """Uninitialised float32, on a cache line's boundary: vectors then never straddle two."""
    size = int(np.prod(shape)) * 4
    raw = np.empty(size + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + size].view(np.float32).reshape(shape)
