"""The grouped form of `tt_lookup` on the CPU as it was first written, to measure what came after.

The same sums and products: prefixes of one i2 are one matrix product, rows are made while their
prefixes are in the cache, backward recomputes prefixes. Sorting, pooling and the sums of bag
gradients are plain loops over the lookups. CPU tensors, fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from ecorec_torchrec.kernels.tt_index.checks import (
    check_layout,
    check_offsets,
    report_out_of_range,
)
from ecorec_torchrec.kernels.tt_index.cpu_threads import parallel_for
from torch import Tensor

from . import plain_loops as loops
from .lookups import Shape

_NUM_CHUNKS = 8
"""Ranges of groups with gradients of cores 1 and 3 of their own: fixed, so that the bits do not
depend on the threads."""


class PlainLookups(NamedTuple):
    """The lookups sorted by id, and the prefixes grouped by i2, as arrays."""

    bag_L: np.ndarray
    row_of_occurrence: np.ndarray
    row_starts: np.ndarray
    prefix_starts: np.ndarray
    i1_P: np.ndarray
    i2_P: np.ndarray
    i3_U: np.ndarray
    order_P: np.ndarray
    group_starts: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class NumbaGroupedPlain:
    """Our grouped form with plain loops around the products."""

    def prepare(self, indices_L: Tensor, offsets: Tensor, shape: Shape) -> PlainLookups:
        batch = shape.table(shape.row_factors)
        check_layout(indices_L, offsets, batch, "fatal")
        check_offsets(indices_L, offsets, batch)
        ids, (p1, p2, p3) = indices_L.numpy(), shape.row_factors
        if len(ids) and (ids.min() < 0 or ids.max() >= shape.num_embeddings):
            wrong = (ids < 0) | (ids >= shape.num_embeddings)
            report_out_of_range(int(wrong.argmax()), indices_L, offsets, batch, "fatal")
        buffers = np.empty((2, len(ids)), np.int64)
        starts = np.empty(loops.NUM_DIGITS + 1, np.int64)
        packed_L = loops.sort_by_id(ids, int(p1 * p2 * p3 - 1).bit_length(), *buffers, starts)
        room = np.empty((8, len(ids) + 1), np.int32)
        found = loops.find_rows(packed_L, offsets.numpy(), p2, p3, room)
        order_P, group_starts = np.empty_like(found[5]), np.zeros(p2 + 1, np.int32)
        loops.group_prefixes(found[5], order_P, group_starts, np.empty(p2, np.int32))
        return PlainLookups._make([*found, order_P, group_starts, offsets.numpy()])

    def forward(self, lookups: PlainLookups, cores: list[Tensor], shape: Shape) -> Tensor:
        sizes, (G1, G2, G3) = _sizes(shape), _flat(cores)
        rows = np.empty((len(lookups.i3_U), shape.dim), np.float32)
        largest, scratches = _scratches(lookups, sizes)
        make_rows = partial(
            loops.rows_of_groups, sizes, G1, G2, G3, lookups.i1_P, lookups.i3_U,
            lookups.prefix_starts, lookups.order_P, lookups.group_starts, rows, largest,
        )  # fmt: skip
        _for_chunks(_cuts(lookups), scratches, make_rows)
        num_bags = len(lookups.offsets) - 1
        out = torch.empty(num_bags, shape.dim)
        pool = partial(
            loops.pool_bags, sizes, rows, lookups.row_of_occurrence, lookups.offsets, out.numpy()
        )
        bag_cuts = [num_bags * t // _NUM_CHUNKS for t in range(_NUM_CHUNKS + 1)]
        _for_chunks(bag_cuts, scratches, pool)
        return out

    def backward(
        self, grad_BD: Tensor, lookups: PlainLookups, cores: list[Tensor], shape: Shape
    ) -> list[Tensor]:
        sizes, (G1, G2, G3) = _sizes(shape), _flat(cores)
        (_, _, q3), (r1, r2) = shape.col_factors, shape.ranks
        G2_T = np.ascontiguousarray(G2.reshape(len(G2), r1, -1).transpose(0, 2, 1))
        G3_T = np.ascontiguousarray(G3.reshape(len(G3), r2, q3).transpose(0, 2, 1))
        dG1 = np.zeros((_NUM_CHUNKS, *G1.shape), np.float32)
        dG3_T = np.zeros((_NUM_CHUNKS, *G3.shape), np.float32)
        dG2 = np.zeros_like(G2)
        cuts, (largest, scratches) = _cuts(lookups), _scratches(lookups, sizes)

        def run(chunk: int, worker: int) -> None:
            loops.gradients_of_groups(
                sizes, G1, G2, G2_T, G3_T, lookups.i1_P, lookups.i3_U, lookups.prefix_starts,
                lookups.row_starts, lookups.bag_L, lookups.order_P, lookups.group_starts,
                grad_BD.numpy(), largest, dG1[chunk], dG2, dG3_T[chunk], scratches[worker],
                cuts[chunk], cuts[chunk + 1],
            )  # fmt: skip

        parallel_for(run, _NUM_CHUNKS, torch.get_num_threads())
        dG3 = dG3_T.sum(0).reshape(len(G3), q3, r2).transpose(0, 2, 1)
        grads = (dG1.sum(0), dG2, np.ascontiguousarray(dG3))
        return [torch.from_numpy(g).view(c.shape) for g, c in zip(grads, cores, strict=True)]


def _sizes(shape: Shape) -> tuple[int, ...]:
    return (*shape.col_factors, *shape.ranks)


def _flat(cores: list[Tensor]) -> list[np.ndarray]:
    if cores[0].device.type != "cpu" or cores[0].dtype != torch.float32:
        raise ValueError(
            f"the numba patterns take fp32 CPU tensors, got {cores[0].dtype} on {cores[0].device}"
        )
    return [core.detach().flatten(1).numpy() for core in cores]


def _scratches(lookups: PlainLookups, sizes: tuple[int, ...]) -> tuple[int, np.ndarray]:
    """The prefixes of the largest group, and the scratch of every thread."""
    largest = int(np.diff(lookups.group_starts).max())
    size = loops.scratch_size(sizes, largest)
    return largest, np.empty((torch.get_num_threads(), size), np.float32)


def _cuts(lookups: PlainLookups) -> list[int]:
    """Groups cut into chunks of about as many prefixes."""
    num_prefixes, num_groups = len(lookups.i1_P), len(lookups.group_starts) - 1
    inner = [num_prefixes * t // _NUM_CHUNKS for t in range(1, _NUM_CHUNKS)]
    return [0, *np.searchsorted(lookups.group_starts[:-1], inner).tolist(), num_groups]


def _for_chunks(
    cuts: list[int], scratches: np.ndarray, loop: Callable[[np.ndarray, int, int], None]
) -> None:
    """`loop(scratch, low, high)` over all ranges."""
    parallel_for(
        lambda chunk, worker: loop(scratches[worker], cuts[chunk], cuts[chunk + 1]),
        _NUM_CHUNKS,
        len(scratches),
    )
