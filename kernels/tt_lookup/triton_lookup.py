"""One call of the grouped lookup in Triton: its arguments, and the launches of both passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from ecorec_torchrec.kernels.tt_index import IndexPlan
from torch import Tensor
from triton import cdiv

from . import triton_backward as bwd
from . import triton_forward as fwd
from .launch import Blocks, LaunchConfig
from .triton_parts import Bounds, Cut, Parts, choose_cut, find_parts, index_bytes


@dataclass(frozen=True)
class Lookup:
    """Arguments of a call, what follows from them, and the kernels that both passes launch."""

    plan: IndexPlan
    cores: list[Tensor]
    weights_L: Tensor | None
    num_features: int
    mean: bool
    config: LaunchConfig

    @cached_property
    def q(self) -> tuple[int, int, int]:
        q1, q2, q3 = (core.shape[2] for core in self.cores)
        return q1, q2, q3

    @cached_property
    def r(self) -> tuple[int, int]:
        return self.cores[0].shape[3], self.cores[1].shape[3]

    @property
    def dim(self) -> int:
        return self.q[0] * self.q[1] * self.q[2]

    @property
    def cols(self) -> int:
        return self.q[1] * self.r[1]

    @property
    def bags_per_feature(self) -> int:
        return self.plan.num_bags // self.num_features

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds.of(self.plan, self.cores, self.config.tile_prefixes)

    @cached_property
    def owner_of_sorted(self) -> Tensor:
        """Row of every sorted lookup."""
        return owners(self.plan.row_starts, self.plan.num_lookups)

    def cut(self, workspace_bytes: int | None, other_bytes: Callable[[Cut], int]) -> Parts:
        """Cuts the batch so that prefixes, rows, indices and `other_bytes` fit."""
        num_groups = self.cores[1].shape[0]

        def bytes_of(cut: Cut) -> int:
            prefix_elements = cut.largest.prefixes * self.q[0] * self.cols
            buffers = 4 * (prefix_elements + cut.largest.rows * self.dim)
            return buffers + index_bytes(self.bounds, num_groups, cut) + other_bytes(cut)

        tile_prefixes = self.config.tile_prefixes
        cut = choose_cut(self.bounds, self.cores, tile_prefixes, workspace_bytes, bytes_of)
        return find_parts(self.plan, self.bounds, cut, tile_prefixes)

    def new_buffer(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device=self.cores[0].device)

    def new_prefixes(self, parts: Parts) -> Tensor:
        return self.new_buffer(parts.cut.largest.prefixes, self.q[0], self.cols)

    def new_rows(self, parts: Parts) -> Tensor:
        return self.new_buffer(parts.cut.largest.rows, self.dim)

    def multiply_prefixes(self, parts: Parts, part: int, prefixes: Tensor) -> None:
        blocks = self.config.prefix
        fwd.prefix_kernel[(parts.cut.largest.tiles, cdiv(self.cols, blocks.n))](
            self.cores[0],
            self.cores[1],
            prefixes,
            self.plan.i1_P,
            self.plan.i2_P,
            parts.tile_starts,
            parts.cuts,
            part,
            Q1=self.q[0],
            R1=self.r[0],
            COLS=self.cols,
            **self.product(blocks),
        )

    def multiply_rows(self, parts: Parts, part: int, prefixes: Tensor, rows: Tensor) -> None:
        blocks, m = self.config.row, self.q[0] * self.q[1]
        fwd.row_kernel[(parts.cut.largest.prefixes, cdiv(m, blocks.m))](
            prefixes,
            self.cores[2],
            rows,
            self.plan.i3_U,
            self.plan.prefix_starts,
            parts.cuts,
            part,
            M=m,
            R2=self.r[1],
            Q3=self.q[2],
            **self.product(blocks),
        )

    def pool(
        self, parts: Parts, part: int, rows: Tensor, sums: Tensor, taken: list[Tensor], out: Tensor
    ) -> None:
        blocks = self.config.gather
        fwd.pool_kernel[(cdiv(self.plan.num_bags, blocks.m), cdiv(self.dim, blocks.n))](
            rows,
            self.plan.pooled_row_L,
            self.plan.pooled_occurrence_L,
            self.plan.offsets,
            self.weights_L,
            sums,
            taken[part % 2],
            taken[1 - part % 2],
            out,
            parts.cuts,
            part,
            self.plan.num_bags,
            self.bags_per_feature,
            self.num_features,
            D=self.dim,
            MEAN=self.mean,
            FIRST=part == 0,
            LAST=part == parts.cut.num_parts - 1,
            BLOCK_M=blocks.m,
            BLOCK_N=blocks.n,
            UNROLL=blocks.k,
            **blocks.schedule,
        )

    def differentiate_weights(
        self, parts: Parts, part: int, rows: Tensor, grad: Tensor, weight_grads: Tensor
    ) -> None:
        blocks = self.config.gather
        bwd.weight_grad_kernel[(cdiv(self.plan.num_lookups, blocks.m),)](
            grad,
            rows,
            self.owner_of_sorted,
            self.plan.order_L,
            self.plan.bag_L,
            self.plan.offsets,
            weight_grads,
            parts.cuts,
            part,
            self.plan.num_lookups,
            self.bags_per_feature,
            self.num_features,
            D=self.dim,
            MEAN=self.mean,
            BLOCK_M=blocks.m,
            BLOCK_N=blocks.n,
            **blocks.schedule,
        )

    def product(self, blocks: Blocks) -> dict[str, Any]:
        """The arguments of a kernel that multiplies matrices."""
        sides = {"BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "BLOCK_K": blocks.k}
        return {"PRECISION": self.config.precision, **sides, **blocks.schedule}


def owners(starts: Tensor, num_entries: int) -> Tensor:
    """Entry -> the segment that it lies in."""
    entry = torch.arange(num_entries, dtype=torch.int32, device=starts.device)
    return torch.searchsorted(starts, entry, right=True, out_int32=True) - 1
