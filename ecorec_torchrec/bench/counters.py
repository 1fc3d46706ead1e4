"""How much every pattern computes and moves for a batch, counted from its index plan.

Units: FLOPs (a multiply-add is 2), bytes. Models, not measurements: what a kernel that holds
nothing but the named operands in registers reads and writes, with no cache. Ids and offsets are not
counted.

Sizes in elements: core rows c1 = q1*r1, c2 = r1*q2*r2, c3 = r2*q3; a prefix t = q1*q2*r2; a row D.
FLOPs of one prefix e1 = 2*q1*r1*q2*r2, of one row from its prefix e2 = 2*q1*q2*r2*q3.
An addition to memory counts as 2 (read and write), an atomic one as 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ecorec_torchrec.kernels.tt_index import TableBatch, index_plan
from ecorec_torchrec.kernels.tt_lookup.launch import (
    PREFIXES_PER_PIECE,
    ROWS_PER_PIECE,
    LaunchConfig,
)
from ecorec_torchrec.tt import TTSpec

MICRO_BATCH_ROWS = 20_000
NUM_GRADIENT_COPIES = 8
"""Copies of the light cores' gradients in our CPU engine."""


@dataclass(frozen=True)
class Workload:
    """One batch of one 3-core table: what its lookups have in common, and the table's shape."""

    lookups: int
    rows: int
    """Unique rows, U."""
    prefixes: int
    """Unique prefixes (i1, i2), P."""
    groups: int
    """Rows of core 1 (values of i2) in use."""
    bags: int
    spec: TTSpec

    @classmethod
    def of(cls, indices_L: Tensor, offsets: Tensor, spec: TTSpec) -> Workload:
        """Counts from the index plan; `offsets` has B + 1 entries.

        Example::

            spec = TTSpec(8, (2, 2, 2), (1, 1, 1), (1, 1))
            Workload.of(torch.tensor([5, 3, 5, 4, 1]), torch.tensor([0, 3, 5]), spec)
            # lookups=5, rows=4, prefixes=3, groups=2, bags=2
        """
        batch = single_table(spec)
        plan = index_plan(indices_L, offsets, batch)
        num_rows, num_prefixes = plan.counts.tolist()
        num_groups = int((plan.group_starts.diff() > 0).sum())
        return cls(plan.num_lookups, num_rows, num_prefixes, num_groups, plan.num_bags, spec)


@dataclass(frozen=True)
class Work:
    """What one step does, without the optimizer."""

    forward_flops: int
    backward_flops: int
    """With the prefixes that are computed again."""
    recomputed_flops: int
    """That part of `backward_flops`."""
    forward_bytes: int
    backward_bytes: int
    workspace_bytes: int
    """Most that is held at a time beside cores, ids and output: intermediates and gradients."""

    @property
    def useful_flops(self) -> int:
        """Forward and backward, nothing counted twice."""
        return self.forward_flops + self.backward_flops - self.recomputed_flops

    @property
    def num_bytes(self) -> int:
        return self.forward_bytes + self.backward_bytes


def single_table(spec: TTSpec) -> TableBatch:
    """The batch of one table and one feature."""
    return TableBatch(
        ("table",),
        (spec.num_embeddings,),
        (spec.row_factors,),
        spec.col_factors,
        spec.ranks,
        ("indices",),
        (0,),
    )


def count(pattern: str, workload: Workload) -> Work:
    """The work of a pattern of `PATTERNS` for a batch.

    Example: the tests count small batches by hand.

    Raises:
        KeyError: no such pattern.
    """
    return PATTERNS[pattern](_Sizes(workload), workload)


class _Sizes:
    """The elements and FLOPs of the module's docstring."""

    def __init__(self, workload: Workload) -> None:
        (q1, q2, q3), (r1, r2) = workload.spec.col_factors, workload.spec.ranks
        p1, p2, p3 = workload.spec.row_factors
        self.c1, self.c2, self.c3 = q1 * r1, r1 * q2 * r2, r2 * q3
        self.t, self.dim = q1 * q2 * r2, q1 * q2 * q3
        self.e1, self.e2 = 2 * q1 * r1 * q2 * r2, 2 * q1 * q2 * r2 * q3
        self.cores = p1 * self.c1 + p2 * self.c2 + p3 * self.c3
        self.light_cores = p1 * self.c1 + p3 * self.c3

    @property
    def chain(self) -> int:
        """Elements that backward moves per item of a whole chain of its own."""
        c1, c2, c3, t, dim = self.c1, self.c2, self.c3, self.t, self.dim
        recompute = c1 + c2 + t
        core3 = t + dim + c3 + 3 * c3
        prefix = dim + c3 + t
        core2 = c1 + t + c2 + 3 * c2
        core1 = c2 + t + c1 + 3 * c1
        return recompute + core3 + prefix + core2 + core1


def _tt_rec(s: _Sizes, w: Workload, chunk_lookups: int) -> Work:
    chunk = min(w.lookups, chunk_lookups)
    return Work(
        forward_flops=w.lookups * (s.e1 + s.e2),
        backward_flops=w.lookups * (3 * s.e1 + 2 * s.e2),
        recomputed_flops=w.lookups * s.e1,
        forward_bytes=4 * w.lookups * (s.c1 + s.c2 + s.c3 + 2 * s.t + 2 * s.dim),
        backward_bytes=4 * (w.lookups * s.chain + 3 * s.cores),
        workspace_bytes=4 * (chunk * (s.c1 + s.c2 + s.c3 + s.t) + s.cores),
    )


def _el_rec(s: _Sizes, w: Workload) -> Work:
    forward_elements = w.lookups * s.dim + w.prefixes * s.t
    backward_elements = w.lookups * s.dim + w.rows * (s.dim + s.c1 + s.c2 + s.c3 + s.t)
    return Work(
        forward_flops=w.prefixes * s.e1 + w.lookups * s.e2,
        backward_flops=w.rows * (3 * s.e1 + 2 * s.e2),
        recomputed_flops=w.rows * s.e1,
        forward_bytes=4 * (w.prefixes * (s.c1 + s.c2 + s.t) + w.lookups * (s.c3 + s.t + 3 * s.dim)),
        backward_bytes=4 * (5 * w.lookups * s.dim + w.rows * s.chain),
        workspace_bytes=4 * max(forward_elements, backward_elements) + 120 * w.rows,
    )


def _eco_rec(s: _Sizes, w: Workload, max_rows: int | None = None) -> Work:
    parts = 1 if max_rows is None else max(-(-w.rows // max_rows), 1)
    rows, prefixes = -(-w.rows // parts), -(-w.prefixes // parts)
    p1, p2, _ = w.spec.row_factors
    held = rows * (s.dim + s.t + s.c3) + prefixes * (s.t + s.c1 + s.c2) + s.cores
    row_elements = 2 * s.dim + 5 * s.c3 + 5 * s.t
    prefix_elements = s.c1 + s.c2 + s.t + 2 * s.t + 5 * s.c1 + 5 * s.c2
    return Work(
        forward_flops=w.prefixes * s.e1 + w.rows * s.e2,
        backward_flops=3 * w.prefixes * s.e1 + 2 * w.rows * s.e2,
        recomputed_flops=w.prefixes * s.e1,
        forward_bytes=4
        * (
            w.prefixes * (s.c1 + s.c2 + s.t) + w.rows * (s.c3 + s.t + s.dim) + 3 * w.lookups * s.dim
        ),
        backward_bytes=4
        * (
            4 * w.lookups * s.dim
            + w.rows * row_elements
            + w.prefixes * prefix_elements
            + 5 * s.cores
        ),
        workspace_bytes=4 * held + 48 * rows + 12 * p1 * p2,
    )


def _eco_rec_micro_batched(s: _Sizes, w: Workload) -> Work:
    return _eco_rec(s, w, MICRO_BATCH_ROWS)


def _eco_rec_tuned(s: _Sizes, w: Workload) -> Work:
    """No item leaves the cache: operands are read once, sums of cores are read and written."""
    flops = _eco_rec(s, w)
    return Work(
        forward_flops=flops.forward_flops,
        backward_flops=flops.backward_flops,
        recomputed_flops=flops.recomputed_flops,
        forward_bytes=4 * (w.prefixes * (s.c1 + s.c2) + w.rows * (s.c3 + s.dim) + _pool(s, w)),
        backward_bytes=4
        * (
            w.lookups * s.dim + w.rows * 3 * s.c3 + w.prefixes * (3 * s.c1 + 4 * s.c2) + 3 * s.cores
        ),
        workspace_bytes=4 * max(w.rows * s.dim, 2 * s.cores),
    )


def _grouped(s: _Sizes, w: Workload) -> Work:
    """Prefixes of one row of core 1 are one product; prefixes go through memory."""
    flops = _eco_rec(s, w)
    return Work(
        forward_flops=flops.forward_flops,
        backward_flops=flops.backward_flops,
        recomputed_flops=flops.recomputed_flops,
        forward_bytes=4
        * (
            w.prefixes * (s.c1 + s.t)
            + w.groups * s.c2
            + w.rows * (s.c3 + s.t + s.dim)
            + 2 * w.lookups * s.dim
        ),
        backward_bytes=4
        * (
            2 * w.lookups * s.dim
            + w.prefixes * (5 * s.t + 3 * s.c1)
            + 3 * w.groups * s.c2
            + w.rows * (s.t + 2 * s.dim + 2 * s.c3)
            + 3 * s.cores
        ),
        workspace_bytes=4 * (w.rows * s.dim + 2 * w.prefixes * s.t + s.cores),
    )


def triton_kernel_bytes(workload: Workload) -> dict[str, int]:
    """Bytes that each of our Triton kernels loads and stores in a forward and backward pass of one
    part without weights, ids left out, by kernel name.

    What programs issue, not what comes from memory: a row of core 1, say, is loaded by every tile
    of its group, and a prefix again for every few of its rows. Caches serve part of that, so memory
    sees less. The counts that depend on how prefixes and rows fall into blocks (tiles, steps,
    pieces) are means; the tests compare them with interpreted runs.

    Example::

        triton_kernel_bytes(Workload.of(ids, offsets, spec))["pool_kernel"]
    """
    w, s = workload, _Sizes(workload)
    (q1, q2, q3), (r1, r2) = w.spec.col_factors, w.spec.ranks
    config = LaunchConfig.choose((q1, q2, q3), (r1, r2), "ieee")
    lines, cols = q1 * q2, q2 * r2
    p1, p2, p3 = w.spec.row_factors
    tiles = _mean_blocks(w.prefixes, w.groups, config.tile_prefixes)
    row_steps = _mean_blocks(w.rows, w.prefixes, config.row.n // q3)
    pieces1 = _mean_blocks(w.prefixes, min(p1, w.prefixes), PREFIXES_PER_PIECE)
    pieces3 = _mean_blocks(w.rows, min(p3, w.rows), ROWS_PER_PIECE)
    elements = {
        # forward and backward
        "prefix_kernel": 2
        * (w.prefixes * (s.c1 * _cdiv(cols, config.prefix.n) + s.t) + tiles * s.c2),
        "row_kernel": row_steps * s.t + w.rows * (s.c3 * _cdiv(lines, config.row.m) + s.dim),
        "pool_kernel": _pool(s, w),
        "row_grad_kernel": w.lookups * s.dim + w.rows * s.dim,
        "core2_piece_kernel": w.rows * (s.t + s.dim * _cdiv(r2, config.core2_grad.m))
        + pieces3 * s.c3,
        "prefix_grad_kernel": w.prefixes * s.t
        + w.rows
        * (s.dim * _cdiv(r2, config.prefix_grad.n) + s.c3 * _cdiv(lines, config.prefix_grad.m)),
        "core1_grad_kernel": w.prefixes
        * (s.c1 * _cdiv(cols, config.core1_grad.n) + s.t * _cdiv(r1, config.core1_grad.m))
        + p2 * s.c2,
        "left_grad_kernel": w.prefixes * (s.t * _cdiv(r1, config.left_grad.n) + s.c1)
        + tiles * s.c2,
        "core0_piece_kernel": (w.prefixes + pieces1) * s.c1,
        "sum_pieces_kernel": (pieces1 + p1) * s.c1 + (pieces3 + p3) * s.c3,
    }
    return {kernel: round(4 * count) for kernel, count in elements.items()}


def _cdiv(size: int, block: int) -> int:
    return -(-size // block)


def _mean_blocks(entries: int, segments: int, block: int) -> float:
    """Blocks of `block` entries that segments are cut into, each segment's last one half full."""
    return min(entries, max(segments, entries / block + segments * (block - 1) / (2 * block)))


def _grouped_triton(s: _Sizes, w: Workload) -> Work:
    """The grouped form of the Triton engine; buffers are sized by what L allows for."""
    flops, kernel_bytes = _eco_rec(s, w), triton_kernel_bytes(w)
    forward_bytes = sum(
        (
            kernel_bytes["prefix_kernel"] // 2,
            kernel_bytes["row_kernel"],
            kernel_bytes["pool_kernel"],
        )
    )
    p1, p2, _ = w.spec.row_factors
    prefixes, rows = min(w.lookups, p1 * p2), min(w.lookups, w.spec.num_embeddings)
    return Work(
        forward_flops=flops.forward_flops,
        backward_flops=flops.backward_flops,
        recomputed_flops=flops.recomputed_flops,
        forward_bytes=forward_bytes,
        backward_bytes=sum(kernel_bytes.values()) - forward_bytes,
        workspace_bytes=4 * (rows * s.dim + prefixes * (s.t + s.c1) + s.cores),
    )


def _grouped_fused(s: _Sizes, w: Workload) -> Work:
    """The grouped form of the CPU engine: prefixes stay in the cache, a block at a time."""
    flops = _eco_rec(s, w)
    copies = NUM_GRADIENT_COPIES * s.light_cores
    return Work(
        forward_flops=flops.forward_flops,
        backward_flops=flops.backward_flops,
        recomputed_flops=flops.recomputed_flops,
        forward_bytes=4
        * (w.prefixes * s.c1 + w.groups * s.c2 + w.rows * (s.c3 + s.dim) + _pool(s, w)),
        backward_bytes=4
        * (
            w.lookups * s.dim
            + w.rows * 3 * s.c3
            + w.prefixes * 3 * s.c1
            + 2 * w.groups * s.c2
            + 2 * copies
            + s.cores
        ),
        workspace_bytes=4 * max(w.rows * s.dim, s.cores + copies),
    )


def _dense(s: _Sizes, w: Workload) -> Work:
    """A dense table: rows are read and added, changed rows read and written."""
    table_bytes = 4 * w.spec.num_embeddings * s.dim
    return Work(
        forward_flops=w.lookups * s.dim,
        backward_flops=w.lookups * s.dim,
        recomputed_flops=0,
        forward_bytes=4 * _pool(s, w),
        backward_bytes=4 * (w.lookups * s.dim + 2 * w.rows * s.dim),
        workspace_bytes=table_bytes + 4 * w.lookups * s.dim,
    )


def _pool(s: _Sizes, w: Workload) -> int:
    return (w.lookups + w.bags) * s.dim


PATTERNS: dict[str, Callable[[_Sizes, Workload], Work]] = {
    "tt_rec": partial(_tt_rec, chunk_lookups=1000),
    "tt_rec_chunk_20000": partial(_tt_rec, chunk_lookups=20_000),
    "el_rec": _el_rec,
    "eco_rec": _eco_rec,
    "eco_rec_micro_batched": _eco_rec_micro_batched,
    "eco_rec_tuned": _eco_rec_tuned,
    "grouped": _grouped,
    "grouped_triton": _grouped_triton,
    "grouped_fused": _grouped_fused,
    "dense": _dense,
}
"""Pattern -> its counter."""
